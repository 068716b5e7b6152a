"""Plain values are put back where they are, at every level, whatever they were before; the obvious
loop is right."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import CheckpointManager, InvalidState, StateComponent, Value
from ckptcore.testing.ranks import run_ranks

leaves = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.booleans(),
    st.floats(),
    st.just(2**70),
    st.integers(0, 3).map(lambda n: torch.arange(float(n))),
    st.sampled_from(["f4", "i2"]).map(lambda d: np.ones(2, d)),
    st.just(1).map(lambda _: np.arange(1500.0)),
    st.integers(0, 2).map(lambda n: torch.ones(n, dtype=torch.bfloat16)),
)
keys = st.sampled_from(["a", "b", "c", 0, "0", (1, "x")])
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(keys, inner, max_size=2).map(OrderedDict),
        st.lists(inner, max_size=2).map(deque),
        st.sets(st.integers(), max_size=3),
        st.dictionaries(keys, st.integers(1, 9), max_size=3).map(Counter),
    ),
    max_leaves=8,
)
states = st.dictionaries(keys, nested, max_size=4) | st.lists(nested, max_size=3)


def objects(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Every container by its path, as far as they can be followed."""
    found = {path: value}
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | deque)
        else ()
    )
    for key, item in items:
        found |= objects(item, (*path, key))
    return found


@given(saved=states, live=states, transactional=st.booleans())
@settings(max_examples=120)
def test_whatever_was_there_it_is_as_saved(
    tmp_path_factory: Any, same: Any, saved: Any, live: Any, transactional: bool
) -> None:
    live = live if type(live) is type(saved) else type(saved)()
    before, expected = objects(live), copy.deepcopy(saved)
    with CheckpointManager(tmp_path_factory.mktemp("run")) as ckpt:
        ckpt.save(1, {"v": saved})
        report = ckpt.restore({"v": live}, transactional=transactional)
        same(live, expected)
        assert report.values["v"] == {} or report.values["v"] == [] or report.values["v"] is live
        for path, item in objects(live).items():
            was = before.get(path)
            if (
                type(was) is type(item)
                and isinstance(item, dict | list | set | deque)
                and _reached(before, live, path)
            ):
                assert item is was, path
        ckpt.save(2, {"v": live})
        ckpt.load({"v": live})
    same(live, expected)


def _reached(before: dict[tuple[Any, ...], Any], live: Any, path: tuple[Any, ...]) -> bool:
    """Whether all that is around it is what was there before, so that it was found again."""
    now = objects(live)
    return all(now[path[:n]] is before.get(path[:n]) for n in range(len(path)))


def test_the_obvious_loop(tmp_path: Path) -> None:
    def run(until: int) -> tuple[dict[str, Any], list[int]]:
        counters, history = {"seen": 0, "by": Counter()}, []
        state = {"counters": counters, "history": history}
        with CheckpointManager(tmp_path) as ckpt:
            report = ckpt.restore(state)
            for step in range((report.step or 0) + 1, until + 1):
                counters["seen"] += 8
                counters["by"]["wiki"] += step
                history.append(step)
                ckpt.save(step, state)
        return counters, history

    for until in (2, 4, 6):
        counters, history = run(until)
    assert (counters, history) == ({"seen": 48, "by": Counter(wiki=21)}, [1, 2, 3, 4, 5, 6])


def test_loops_that_take_the_values_out_of_the_report(tmp_path: Path) -> None:
    """As they had to be written before: taking the object, updating with it, clearing and updating
    with it."""
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": {"n": [1]}})
        for take in (
            lambda d, values: values["c"],
            lambda d, values: (d.update(values["c"]), d)[1],
            lambda d, values: (d.clear(), d.update(values["c"]), d)[2],
        ):
            state = {"c": {"n": [], "x": 0}}
            got = take(state["c"], ckpt.load(state).values)
            got["n"].append(2)
            assert (got, got is state["c"]) == ({"n": [1, 2]}, True)


def test_tensors_and_arrays_in_place_where_they_fit(tmp_path: Path) -> None:
    saved = {
        "t": torch.ones(3),
        "u": torch.ones(3),
        "big": np.ones(1000),
        "small": np.ones(2),
        "grown": np.ones(3),
    }
    live = {
        "t": torch.zeros(3),
        "u": torch.zeros(2),
        "big": np.zeros(1000),
        "small": np.zeros(2),
        "grown": np.zeros(2),
    }
    before = dict(live)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"v": saved})
        ckpt.load({"v": live})
    assert [live[k] is before[k] for k in saved] == [True, False, True, True, False]
    assert all((np.asarray(live[k]) == 1).all() and live[k].shape == saved[k].shape for k in saved)


def test_one_list_under_two_names(tmp_path: Path) -> None:
    """Equal contents stay one list; what was saved with two contents becomes two."""
    with CheckpointManager(tmp_path) as ckpt:
        for number, (a, b) in enumerate([([1], [1]), ([1], [2])]):
            ckpt.save(number, {"v": {"a": a, "b": b}, "w": {"c": a}})
            shared: list[int] = [9]
            live = {"v": {"a": shared, "b": shared}, "w": {"c": shared}}
            ckpt.load(live, number)
            assert (live["v"], live["w"]) == ({"a": a, "b": b}, {"c": a})
            assert (live["v"]["a"] is live["v"]["b"], live["w"]["c"] is shared) == (a == b, True)


def test_a_value_that_could_not_be_put_back_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def program(comm: Any) -> str:
        state = [StateComponent("epoch", 3 if comm.rank else {"n": 3}, "REPLICATED")]
        with CheckpointManager(tmp_path, comm=comm) as ckpt, pytest.raises(InvalidState) as caught:
            ckpt.save(1, state)
        return str(caught.value)

    assert all("ckptcore.Value(" in text and "rank 1" in text for text in run_ranks(2, program))
    assert not list(tmp_path.iterdir())


def test_a_holder_on_ranks(tmp_path: Path) -> None:
    def program(comm: Any, value: Any) -> Any:
        holder = Value(value)
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, {"epoch": holder}) if value is not None else ckpt.load({"epoch": holder})
        return holder.value

    run_ranks(2, lambda comm: program(comm, ("x", 3)))
    assert run_ranks(2, lambda comm: program(comm, None)) == [("x", 3)] * 2
    assert repr(Value(3)) == "Value(3)"


def test_a_sharded_dict_takes_what_is_its_own_and_what_is_new(tmp_path: Path) -> None:
    """Values of another rank stay there; what no rank has a key for comes to all."""

    def state(rank: int, late: bool) -> dict[str, Any]:
        made = {
            f"w{rank}": torch.full((2,), float(rank + 1 if late else 0)),
            f"n{rank}": 7 if late else 0,
            "best": None,
        }
        return {**made, "best": {"loss": 0.5}, "seen": [1]} if late else made

    def program(comm: Any, late: bool) -> Any:
        live = state(comm.rank, late)
        parts = [StateComponent("v", live, "SHARDED")]
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, parts) if late else ckpt.load(parts)
        return {k: v.tolist() if torch.is_tensor(v) else v for k, v in live.items()}

    run_ranks(2, lambda comm: program(comm, True))
    for rank, found in enumerate(run_ranks(2, lambda comm: program(comm, False))):
        assert found == {
            f"w{rank}": [rank + 1.0] * 2,
            f"n{rank}": 7,
            "best": {"loss": 0.5},
            "seen": [1],
        }
