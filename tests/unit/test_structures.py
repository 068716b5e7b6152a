"""A state that has the structure of the save before is known again, and only then."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckptcore import InvalidState, Shard, UnsupportedValue
from ckptcore.state.tree import StateSnapshot, capture


def state() -> dict[str, Any]:
    tied = torch.arange(4.0)
    return {
        "weights": {"a": tied, "b": torch.ones(2, 3), "c": tied, "empty": torch.zeros(0)},
        "array": np.arange(2048.0),
        "list": [torch.ones(1), {"x": torch.zeros(2), "lr": 0.5}],
        "step": 1,
        "text": "x" * 70_000,
    }


def same_parts(a: StateSnapshot, b: StateSnapshot) -> bool:
    return [t.spec for t in a.tensors] == [t.spec for t in b.tensors]


def check_equal(a: StateSnapshot, b: StateSnapshot) -> None:
    assert a.tree == b.tree and a.versions == b.versions and same_parts(a, b)
    for one, other in zip(a.tensors, b.tensors, strict=True):
        assert torch.equal(one.tensor, other.tensor) and one.digest == other.digest


def set_in(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *above, last = path.split("/")

    def change(held: Any) -> None:
        for key in above:
            held = held[int(key) if isinstance(held, list) else key]
        held[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda _: None,
        set_in("step", 2),
        set_in("step", "a word"),
        set_in("text", "y" * 70_000),
        set_in("list/1/lr", {"of": [1, 2]}),
        set_in("weights/b", torch.full((2, 3), 7.0)),
        set_in("weights/b", torch.nn.Parameter(torch.full((2, 3), 7.0))),
        set_in("weights/b", torch.arange(6.0).view(3, 2).T),
        set_in("array", np.arange(2048.0)[::-1]),
    ],
)
def test_what_changes_from_step_to_step_is_known_again(change: Callable[..., Any]) -> None:
    before = capture("m", state())
    changed = state()
    change(changed)
    quick = capture("m", changed, last=before.structure)
    assert quick.structure is before.structure
    check_equal(quick, capture("m", changed))


def tie(held: dict[str, Any]) -> None:
    held["list"][1]["x"] = held["weights"]["b"][0, :2]
    held["list"][0] = held["weights"]["b"][0, :1]  # starts where the other one does


@pytest.mark.parametrize(
    "change",
    [
        set_in("weights/b", torch.ones(3, 2)),
        set_in("weights/b", torch.ones(2, 3, dtype=torch.float64)),
        set_in("weights/b", np.ones((2, 3))),
        set_in("weights/b", 1.0),
        set_in("weights/c", torch.arange(4.0)),
        set_in("weights/d", torch.ones(1)),
        set_in("list/1/y", torch.ones(1)),
        set_in("text", "short"),
        set_in("text", "x" * 70_001),
        set_in("array", torch.arange(2048.0, dtype=torch.float64)),
        lambda s: s["weights"].__setitem__("empty", s["list"][0][:0]),
        lambda s: s["list"][1].__setitem__("x", s["weights"]["a"][:2]),
        lambda s: s["weights"].pop("b"),
        lambda s: s["list"].reverse(),
        lambda s: s["weights"].update(b=s["weights"].pop("b")),
        lambda s: s["weights"].update(empty=s["weights"]["b"]),
        lambda s: s["list"].__setitem__(0, s["weights"]["b"][0, :1]),
        tie,
    ],
)
def test_every_other_change_gives_what_a_first_capture_gives(change: Callable[..., Any]) -> None:
    before = capture("m", state())
    changed = state()
    change(changed)
    check_equal(capture("m", changed, last=before.structure), capture("m", changed))


def test_a_dict_in_another_order_or_with_other_keys_is_no_known_one() -> None:
    first = {"a": torch.zeros(2), "b": torch.ones(2)}
    before = capture("m", first)
    for other in (
        {"b": first["b"], "a": first["a"]},
        {"a": first["a"], 0: first["b"]},
        OrderedDict(first),
        {"a": first["a"], "b": first["b"], "c": 1},
        {"x": first},
    ):
        quick = capture("m", other, last=before.structure)
        check_equal(quick, capture("m", other))
    assert capture("m", {0: first["a"]}).tree != capture("m", {"0": first["a"]}).tree
    numbered = capture("m", {0: first["a"]})
    check_equal(
        capture("m", {"0": first["a"]}, last=numbered.structure), capture("m", {"0": first["a"]})
    )


def test_shards_are_known_by_their_boxes() -> None:
    whole = torch.arange(8.0)
    first = {"w": Shard(whole[:4], (8,), (0,))}
    before = capture("m", first, sharded=True)
    same = capture("m", {"w": Shard(whole[4:], (8,), (0,))}, sharded=True, last=before.structure)
    assert same.structure is before.structure and torch.equal(same.tensors[0].tensor, whole[4:])
    moved = {"w": Shard(whole[4:], (8,), (4,))}
    found = capture("m", moved, sharded=True, last=before.structure)
    assert found.tensors[0].spec.box == ((4,), (4,))
    with pytest.raises(InvalidState, match="declare the component SHARDED"):
        capture("m", first, last=before.structure)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_what_can_not_be_stored_is_told_also_where_something_was_known() -> None:
    before = capture("m", {"a": torch.zeros(2), "b": torch.ones(2)})
    for bad, why in (
        (torch.zeros(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.nested.nested_tensor([torch.ones(1)]), "dense"),
    ):
        with pytest.raises(UnsupportedValue, match=why):
            capture("m", {"a": torch.zeros(2), "b": bad}, last=before.structure)


def test_a_kind_of_shard_of_the_users_own() -> None:
    """It has no form that is known, so it is looked at anew each time."""

    class Mine(Shard):
        pass

    state = {"w": Mine(torch.arange(3.0), (6,), (3,))}
    first = capture("c", state, sharded=True)
    again = capture("c", state, sharded=True, last=first.structure)
    for snapshot in (first, again):
        assert [leaf.tensor.tolist() for leaf in snapshot.tensors] == [[0.0, 1.0, 2.0]]
        assert [leaf.spec.box for leaf in snapshot.tensors] == [((3,), (3,))]
