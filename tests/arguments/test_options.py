"""Every option is checked where it comes in: what it may not be is InvalidState, and names the
option."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointCoordinator,
    CheckpointError,
    CheckpointManager,
    InvalidState,
    KeepBest,
    KeepEvery,
    KeepLast,
    PreemptionGuard,
    Shard,
    SharingPattern,
    StateComponent,
    TensorBoardEvents,
    Tier,
    ValidationLevel,
    copy_checkpoint,
    open_checkpoint,
    open_storage,
    scan_root,
)
from ckptcore.arguments import checked_timeout, shown
from ckptcore.testing.ranks import run_ranks


def named(value: Any) -> str:
    """The value, without the address of an object: every worker must give a test the same name."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


class NoPath:
    """Looks like a path, and fails in all that one does with it."""

    def __fspath__(self) -> str:
        raise RuntimeError("hands off")

    __eq__ = __hash__ = __fspath__  # type: ignore[assignment]


def component(**facts: Any) -> StateComponent:
    return StateComponent("a", {"x": 1}, **facts)


MANAGER: dict[str, list[Any]] = {
    "keep": [3, "last", KeepLast],
    "comm": [0, "", "gloo", object()],
    "process_groups": [[[0, 1]], "dp", {1: [[0]]}, {"": [[0]]}, {"\ud800": [[0]]}],
    "storage_options": [1, "x", [("a", 1)], {1: 2}],
    "io_threads": [0, -1, 1.5, True, "2", 10**6],
    "run_id": [5, b"run", "", " ", "a\nb", "\x1b[31mred", "\ud800", "x" * 300],
    "writers": ["all", None, 1, np.array(["split", "lowest"])],
    "load_broadcast": [1, None, "yes"],
    "storage_mode": ["nodes", None, []],
    "tiers": ["s3://a/b", 5, [1], ["s3://a/b"], Tier("x")],
    "when_busy": ["never", None, torch.ones(2)],
    "on_error": ["ignore", 1],
    "staging": ["fast", b"auto"],
    "drain_timeout": [-1, math.nan, math.inf, "5", None, True],
    "on_event": ["print", 3],
    "join_timeout": [0, -1, math.nan, math.inf, "5", None],
    "liveness_timeout": [0, -1, math.nan, "5", None],
}
COMPONENT: dict[str, list[Any]] = {
    "sharing_pattern": ["globally", 1, b"GLOBAL", [], ""],
    "validation_level": ["fast", None, 2],
    "process_group_name": ["dp", 5],
    "required": [1, 0, None, "no", np.bool_(True)],
    "validate_replication": [1, "no"],
    "on_resize": ["ignore", None, 3],
    "group_key": [5, "a b", "", "x" * 65],
    "atol": [-1, math.nan, math.inf, "1", None, True],
    "rtol": [-0.5, math.nan, [], b"1"],
    "metadata": ["x", [1], 5],
}


def cases(of: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in of.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(MANAGER), ids=named)
def test_of_a_manager(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidState) as caught:
        CheckpointManager(tmp_path / "run", **{name: value})
    assert name in str(caught.value) or name == "tiers"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "root",
    [None, "", " ", "\n", 5, b"/tmp", "a\0b", "\ud800", [], "~no-such-user-here/x"],
    ids=named,
)
def test_of_a_root(root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[Callable[[], Any]] = [
        lambda: CheckpointManager(root),
        lambda: open_storage(root),
        lambda: scan_root(root),
        lambda: open_checkpoint(root),
        lambda: Tier(root).storage,
        lambda: copy_checkpoint(root, tmp_path / "b"),
        lambda: copy_checkpoint(tmp_path, root),
        lambda: CheckpointCoordinator({"a": 1}).save_checkpoint(root),
        lambda: CheckpointCoordinator({"a": {"x": 1}}).load_checkpoint(root),
    ]
    for number, call in enumerate(calls):
        if isinstance(root, str) and root.startswith("~") and number in (6, 7):
            continue  # taken apart as a text; then the folder has that name
        with pytest.raises(InvalidState):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "value"), cases(COMPONENT), ids=named)
def test_of_a_component(name: str, value: Any) -> None:
    with pytest.raises(InvalidState) as caught:
        component(**{name: value})
    assert caught.value.component == "a"


@pytest.mark.parametrize(
    "key", [None, "", 5, "a/b", "a\nb", "\ud800", "x" * 81, b"a", ("a",)], ids=named
)
def test_of_the_key_of_a_component(key: Any) -> None:
    with pytest.raises(InvalidState, match="component key"):
        StateComponent(key, {"x": 1})


def test_a_class_is_no_state(tmp_path: Path) -> None:
    with pytest.raises(InvalidState, match="the class Linear; give an object"):
        CheckpointManager(tmp_path).save(1, {"m": nn.Linear})


WRONG: dict[str, Callable[[], Any]] = {
    "KeepLast(0)": lambda: KeepLast(0),
    "KeepLast(-5000 digits)": lambda: KeepLast(-(10**5000)),
    "KeepLast(True)": lambda: KeepLast(True),
    "KeepLast('3')": lambda: KeepLast("3"),
    "KeepBest('')": lambda: KeepBest(""),
    "KeepBest(None)": lambda: KeepBest(None),
    "KeepBest(mode)": lambda: KeepBest("loss", "lowest"),
    "KeepBest(count)": lambda: KeepBest("loss", "min", 0),
    "KeepEvery()": lambda: KeepEvery(),
    "KeepEvery(both)": lambda: KeepEvery(1, 1.0),
    "KeepEvery(0)": lambda: KeepEvery(0),
    "KeepEvery(1.5)": lambda: KeepEvery(1.5),
    "KeepEvery('1')": lambda: KeepEvery("1"),
    "KeepEvery(seconds=nan)": lambda: KeepEvery(seconds=math.nan),
    "KeepEvery(seconds=0)": lambda: KeepEvery(seconds=0),
    "KeepEvery(seconds=[])": lambda: KeepEvery(seconds=[]),
    "Tier(every)": lambda: Tier("x", every=0),
    "Tier(keep)": lambda: Tier("x", keep=3),
    "Tier(options)": lambda: Tier("x", storage_options="x"),
    "Shard(tensor)": lambda: Shard([1.0], (1,), (0,)),
    "Shard(shape)": lambda: Shard(torch.ones(1), None, (0,)),
    "Shard(shape 1.5)": lambda: Shard(torch.ones(1), (1.5,), (0,)),
    "Shard(offset)": lambda: Shard(torch.ones(1), (1,), ("0",)),
    "Shard(outside)": lambda: Shard(torch.ones(2), (2,), (1,)),
    "PreemptionGuard(of)": lambda: PreemptionGuard("x"),
    "PreemptionGuard(signals)": lambda: PreemptionGuard(None, signal.SIGTERM),
    "PreemptionGuard(signal 0)": lambda: PreemptionGuard(None, [0]),
    "PreemptionGuard(SIGKILL)": lambda: PreemptionGuard(None, [signal.SIGKILL]),
    "PreemptionGuard(repeat_after)": lambda: PreemptionGuard(None, repeat_after=-1),
    "TensorBoardEvents": lambda: TensorBoardEvents(None),
    "SharingPattern": lambda: SharingPattern("globally"),
    "ValidationLevel": lambda: ValidationLevel("fast"),
    "coordinator comm": lambda: CheckpointCoordinator({"a": 1}, comm=0),
    "coordinator groups": lambda: CheckpointCoordinator({"a": 1}, [[0]]),
    "coordinator io_threads": lambda: CheckpointCoordinator({"a": 1}, io_threads=0),
    "coordinator writers": lambda: CheckpointCoordinator({"a": 1}, writers="all"),
    "coordinator storage_mode": lambda: CheckpointCoordinator({"a": 1}, storage_mode="x"),
    "coordinator state": lambda: CheckpointCoordinator("abc"),
    "timeout": lambda: checked_timeout("1"),
    "timeout nan": lambda: checked_timeout(math.nan),
}


@pytest.mark.parametrize("name", WRONG)
def test_of_everything_else(name: str) -> None:
    with pytest.raises(InvalidState) as caught:
        WRONG[name]()
    assert len(str(caught.value)) < 400


def test_words_in_any_case_and_the_choices_where_it_is_none_of_them() -> None:
    assert SharingPattern("per_group") is SharingPattern("Per_Group") is SharingPattern.PER_GROUP
    assert ValidationLevel("quick") is ValidationLevel.QUICK
    made = component(sharing_pattern="replicated", validation_level="full")
    assert (made.sharing_pattern, made.validation_level) == (
        SharingPattern.REPLICATED,
        ValidationLevel.FULL,
    )
    with pytest.raises(InvalidState) as caught:
        SharingPattern("globally")
    for word in SharingPattern:
        assert repr(word.value) in str(caught.value)
    assert repr("globally") in str(caught.value)


@pytest.mark.parametrize(
    ("given", "meant"), [(None, None), (-3, 0.0), (0, 0.0), (2, 2.0), (np.float32(0.5), 0.5)]
)
def test_timeouts(given: Any, meant: float | None) -> None:
    assert checked_timeout(given) == meant
    assert 0 < checked_timeout(math.inf) < math.inf


@pytest.mark.parametrize(
    "step", [None, True, 1.5, "7", b"1", [], -1, 2**62, 10**5000, np.bool_(True)], ids=shown
)
@pytest.mark.parametrize("call", ["pin", "unpin", "delete", "verify"])
def test_steps_that_are_none_of_a_root(call: str, step: Any, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"a": {"x": torch.ones(1)}})
        with pytest.raises(InvalidState):
            getattr(ckpt, call)(step)
        assert [i.step for i in ckpt.list()] == [1] and not ckpt.latest().pinned


@pytest.mark.parametrize("call", ["load", "restore"])
@pytest.mark.parametrize("name", ["strict", "cast", "transactional", "training_args_hash"])
def test_flags_of_a_load(call: str, name: str, tmp_path: Path) -> None:
    live = {"a": {"x": torch.zeros(1)}}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"a": {"x": torch.ones(1)}})
        with pytest.raises(InvalidState, match=name):
            getattr(ckpt, call)(live, **{name: 1})
        for step in (1.5, NoPath()):
            with pytest.raises(InvalidState):
                getattr(ckpt, call)(live, step)
    assert live["a"]["x"].item() == 0.0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", ["load", "restore", "strict", "keys", "pin", "delete", "verify"])
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(
    call: str, rank: int, tmp_path: Path
) -> None:
    live = [{"a": {"x": torch.zeros(1)}} for _ in range(2)]

    def program(comm: Any) -> str:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, {"a": {"x": torch.ones(1)}})
            wrong = comm.rank == rank
            step: Any = 1.5 if wrong else 1
            state = live[comm.rank]
            made: dict[str, Callable[[], Any]] = {
                "load": lambda: ckpt.load(state, step),
                "restore": lambda: ckpt.restore(state, step),
                "strict": lambda: ckpt.load(state, 1, strict=None if wrong else True),
                "keys": lambda: ckpt.load(state, 1, keys=5 if wrong else "a"),
                "pin": lambda: ckpt.pin(step),
                "delete": lambda: ckpt.delete(step),
                "verify": lambda: ckpt.verify(step),
            }
            try:
                made[call]()
            except CheckpointError as error:
                return type(error).__name__
            return "ok"

    found = run_ranks(2, program, deadline=20.0)
    assert found[0] == found[1] and found[0] in ("InvalidState", "RanksDisagree")
    assert [state["a"]["x"].item() for state in live] == [0.0, 0.0]
    assert [(i.name, i.pinned) for i in scan_root(tmp_path)] == [("checkpoint-1", False)]
