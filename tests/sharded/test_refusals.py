"""What is no one logical state is refused at the save, what does not fit at the load: with key and
ranks, on all ranks, with nothing committed and nothing live touched."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    InvalidState,
    ReplicationMismatch,
    Shard,
    SharingPattern,
    StateComponent,
    StateMismatch,
    UnsupportedValue,
    open_checkpoint,
)
from ckptcore.format.layout import Mesh, MeshLayout
from ckptcore.testing.ranks import run_ranks

SHARDED, PER_RANK = SharingPattern.SHARDED, SharingPattern.PER_RANK


def parts(state: Any, key: str = "s", **how: Any) -> list[StateComponent]:
    return [StateComponent(key, state, SHARDED, **how)]


def saved(root: Path, states: list[Any], **how: Any) -> None:
    def program(comm: Any) -> None:
        with CheckpointManager(root, comm=comm) as ckpt:
            ckpt.save(1, parts(states[comm.rank], **how))

    run_ranks(len(states), program)


def rows(
    start: int, stop: int, columns: tuple[int, int] = (0, 4), shape: tuple[int, ...] = (6, 4)
) -> Shard:
    full = torch.arange(24.0).reshape(6, 4)
    return Shard(full[start:stop, columns[0] : columns[1]].clone(), shape, (start, columns[0]))


@pytest.fixture
def refused(tmp_path: Path, errors_of, on_all):
    """refused(states, kind): saving them raises `kind` on all ranks, and commits nothing; the
    error."""

    def check(states: list[Any], kind: type[Exception], **how: Any) -> Any:
        root = tmp_path / "refused"

        def program(comm: Any) -> None:
            with CheckpointManager(root, comm=comm) as ckpt:
                ckpt.save(1, parts(states[comm.rank], **how))

        error = on_all(errors_of(len(states), program), kind)
        left = [entry.name for entry in root.iterdir()] if root.exists() else []
        assert [name for name in left if "partial" not in name] == []
        assert not list(root.rglob("*.safetensors")) and not list(root.rglob("*manifest*"))
        return error

    return check


def test_boxes_that_overlap(refused) -> None:
    error = refused([{"w": rows(0, 3)}, {"w": rows(2, 6)}], InvalidState)
    assert (error.component, error.key, sorted(error.ranks)) == ("s", "w", [0, 1])
    assert "overlap" in error.message


def test_boxes_that_overlap_far_apart_in_order(refused) -> None:
    # The first box reaches over all that follow; the last one meets it in one corner.
    boxes = [rows(0, 6, (0, 2)), rows(0, 2, (2, 4)), rows(2, 4, (2, 4)), rows(4, 6, (1, 4))]
    error = refused([{"w": box} for box in boxes], InvalidState)
    assert (error.key, sorted(error.ranks)) == ("w", [0, 3])


def test_boxes_that_leave_a_hole(refused) -> None:
    error = refused([{"w": rows(0, 2)}, {"x": torch.ones(1)}, {"w": rows(4, 6)}], InvalidState)
    assert (error.component, error.key, error.ranks) == ("s", "w", [0, 2])
    assert "8 items are on no rank" in error.message


def test_a_tensor_that_only_empty_boxes_hold(refused) -> None:
    error = refused([{"w": rows(0, 0)}, {"w": rows(6, 6)}], InvalidState)
    assert error.key == "w"
    assert "24 items are on no rank" in error.message


def test_one_key_two_shapes(refused) -> None:
    error = refused([{"w": rows(0, 3)}, {"w": rows(3, 6, shape=(7, 4))}], InvalidState)
    assert error.key == "w"
    assert all(said in error.message for said in ("[6, 4]", "[7, 4]", "[0]", "[1]"))
    assert error.ranks == [0, 1]


def test_one_key_two_dtypes(refused) -> None:
    error = refused(
        [{"a": {"w": torch.ones(3)}}, {"a": {"w": torch.ones(3, dtype=torch.bfloat16)}}],
        InvalidState,
    )
    assert error.key == "a/w"
    assert "F32" in error.message and "BF16" in error.message
    assert error.ranks == [0, 1]


def test_a_slice_here_and_all_of_it_there(refused) -> None:
    error = refused([{"w": rows(0, 6)}, {"w": torch.ones(6, 4)}], InvalidState)
    assert (error.key, error.ranks) == ("w", [1])


def test_two_ways_of_cutting(refused, mesh_shard) -> None:
    full = torch.arange(24.0).reshape(6, 4)
    layouts = [MeshLayout(Mesh((2,), (0, 1)), ("S0",)), MeshLayout(Mesh((2,), (2, 3)), ("S1",))]
    error = refused(
        [{"w": mesh_shard(full, layouts[rank // 2], rank)} for rank in range(4)], InvalidState
    )
    assert (error.component, error.key, error.ranks) == ("s", "w", [2, 3])


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_of_the_mesh_without_the_key(refused, mesh_shard, absent: int) -> None:
    layout = MeshLayout(Mesh((2,), (0, 1)), ("S0",))
    states: list[Any] = [
        {"w": mesh_shard(torch.ones(4), layout, rank), "x": 1} for rank in range(2)
    ]
    del states[absent]["w"]
    error = refused(states, InvalidState)
    assert (error.component, error.key, error.ranks) == ("s", "w", [absent])


def test_a_replica_that_one_rank_lacks_is_no_loss(tmp_path: Path, mesh_shard) -> None:
    layout = MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), ("R", "S0"))
    full = torch.arange(4.0)
    states: list[Any] = [
        {f"w{n}": mesh_shard(full + n, layout, rank) for n in range(4)} for rank in range(4)
    ]
    for n in range(4):
        del states[2][f"w{n}"]
    saved(tmp_path, states)
    with open_checkpoint(tmp_path / "checkpoint-1") as view:
        assert [view.read(f"s/w{n}").tolist() for n in range(4)] == [
            (full + n).tolist() for n in range(4)
        ]


def test_a_rank_holds_two_boxes_of_one_tensor_under_two_names(tmp_path: Path) -> None:
    # The way to say it: a rank has one box per name.
    full = torch.arange(24.0).reshape(6, 4)
    saved(tmp_path, [{"a": rows(0, 3), "b": rows(0, 6)}, {"a": rows(3, 6)}])
    with open_checkpoint(tmp_path / "checkpoint-1") as view:
        assert np.array_equal(view.read("s/a"), full) and np.array_equal(view.read("s/b"), full)


DIFFERENT = {
    "number": (1, 2),
    "type of number": (1, 1.0),
    "number and truth": (1, True),
    "sign of zero": (0.0, -0.0),
    "length": ([1, 2], [1, 2, 3]),
    "array": (np.arange(5), np.arange(5) + 1),
    "type of array": (np.arange(5), np.arange(5.0)),
    "value and tensor": (1, torch.ones(())),
    "kind of nest": ({"a": 1}, [1]),
    "set": ({1}, {2}),
    "nothing": (None, 0),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_plain_values_that_differ(refused, what: str) -> None:
    first, other = DIFFERENT[what]
    error = refused(
        [{"x": {"v": first}}, {"x": {"v": first}}, {"x": {"v": other}}], ReplicationMismatch
    )
    assert (error.component, error.ranks) == ("s", [2])
    assert error.keys == ["x/v"] or error.keys == ["x/v/a"]


SAME = {
    "not a number": float("nan"),
    "array": np.arange(5),
    "array of nothing": np.array([np.nan, np.inf]),
    "scalar": np.float32(2),
    "nest": {"a": [1, (2, None, {"b": {3}})], 5: b"x"},
    "ordered": OrderedDict(a=1, b=2),
}


@pytest.mark.parametrize("what", SAME)
def test_plain_values_that_are_the_same(tmp_path: Path, same, what: str) -> None:
    value = SAME[what]
    saved(tmp_path, [{"v": value, "mine": {"a": 1}}, {"mine": {"b": 2}, "v": value}, {"v": value}])
    found = open_checkpoint(tmp_path / "checkpoint-1").values("s")
    same(found["v"], value)
    assert found["mine"] == {"a": 1, "b": 2}


@pytest.mark.parametrize("level", ["QUICK", "TENSOR", "FULL"])
def test_plain_replicas_that_differ(refused, level: str) -> None:
    states = [
        {"norm": torch.ones(9), "w": torch.ones(3), "only": {str(rank): torch.ones(1)}}
        for rank in range(4)
    ]
    states[2]["norm"][-1] = 5
    error = refused(states, ReplicationMismatch, validation_level=level)
    assert (error.component, error.keys, error.ranks) == ("s", ["norm"], [2])


def test_only_a_full_look_finds_what_lies_between_the_samples(refused, tmp_path: Path) -> None:
    states = [{"w": torch.zeros(100_000)} for _ in range(2)]
    states[1]["w"][1234] = 1
    saved(tmp_path / "quick", states)
    error = refused(states, ReplicationMismatch, validation_level="TENSOR")
    assert (error.keys, error.ranks) == (["w"], [1])


@pytest.mark.parametrize("level", ["QUICK", "TENSOR"])
def test_replicas_of_a_part_that_differ(refused, mesh_shard, level: str) -> None:
    layout = MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), ("R", "S0"))
    full = torch.arange(10.0).reshape(5, 2)
    states = [
        {"w": mesh_shard(full, layout, rank), "v": mesh_shard(full, layout, rank)}
        for rank in range(4)
    ]
    states[3]["w"].tensor[0] = -1  # ranks 1 and 3 hold rows 3 and 4
    error = refused(states, ReplicationMismatch, validation_level=level)
    assert (error.component, error.keys, error.ranks) == ("s", ["w"], [3])


@pytest.mark.parametrize("key", ["s", "my model", "é"])
def test_replicas_of_a_box_that_differ(tmp_path: Path, errors_of, on_all, key: str) -> None:
    states = [{"w": rows(0, 3)}, {"w": rows(3, 6)}, {"w": rows(3, 6)}]
    states[2]["w"].tensor[1, 1] = -1

    def program(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, parts(states[comm.rank], key))

    error = on_all(errors_of(3, program), ReplicationMismatch)
    assert (error.component, error.keys, error.ranks) == (key, ["w"], [2])


def test_two_components_with_one_name_each_keep_their_ranks(
    tmp_path: Path, errors_of, on_all
) -> None:
    def program(comm: Any) -> None:
        odd = [{"w": torch.full((4,), float(comm.rank == n + 1))} for n in range(2)]
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, [*parts(odd[0], "a"), *parts(odd[1], "b")])

    error = on_all(errors_of(3, program), ReplicationMismatch)
    assert (error.component, error.keys, error.ranks) == ("a", ["w"], [1])


def test_unchecked_replicas_pass(tmp_path: Path) -> None:
    saved(tmp_path, [{"w": torch.zeros(4)}, {"w": torch.ones(4)}], validate_replication=False)
    assert len(set(open_checkpoint(tmp_path / "checkpoint-1").read("s/w").tolist())) == 1


def test_replicas_within_a_tolerance(tmp_path: Path) -> None:
    states = [{"w": torch.zeros(4)}, {"w": torch.full((4,), 1e-9)}]
    saved(tmp_path, states, validation_level="FULL", atol=1e-6)
    assert open_checkpoint(tmp_path / "checkpoint-1").manifest.components["s"].size_bytes == 16


def test_a_full_look_says_how_much_differs(refused) -> None:
    states = [{"w": torch.zeros(4)}, {"w": torch.tensor([0.0, 0.0, 3.0, 1.0])}]
    error = refused(states, ReplicationMismatch, validation_level="FULL")
    assert error.details is not None and error.details["w"]["differing"] == 2


@pytest.mark.parametrize("pattern", ["REPLICATED", "PER_RANK", "GLOBAL"])
def test_slices_in_a_component_that_is_not_sharded(
    tmp_path: Path, errors_of, on_all, pattern: str
) -> None:
    def program(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, [StateComponent("s", {"a": {"w": rows(0, 6)}}, pattern)])

    error = on_all(errors_of(2, program), InvalidState)
    assert (error.component, error.key) == ("s", "a/w")
    assert "SHARDED" in error.message
    assert not list(tmp_path.glob("checkpoint-1"))


def test_a_leaf_that_cannot_be_stored_on_one_rank(refused) -> None:
    states: list[Any] = [{"w": rows(0, 3)}, {"w": rows(3, 6), "odd": object()}]
    error = refused(states, UnsupportedValue)
    assert (error.component, error.key) == ("s", "odd")
    assert list(error.causes) == [1]


def loading(root: Path, errors_of, states: list[Any], **how: Any) -> list[Any]:
    def program(comm: Any) -> Any:
        with CheckpointManager(root, comm=comm) as ckpt:
            return ckpt.load(parts(states[comm.rank]), **how)

    return errors_of(len(states), program)


def test_a_key_that_no_rank_wants(tmp_path: Path, errors_of, on_all) -> None:
    saved(tmp_path, [{"a": torch.ones(2), "b": torch.ones(2)}, {"c": torch.ones(2)}])
    states: list[Any] = [{"a": torch.zeros(2)}, {"b": torch.zeros(2)}, {}]
    error = on_all(loading(tmp_path, errors_of, states), StateMismatch)
    assert (error.unexpected, error.missing) == (["s/c"], [])
    assert [state[key].tolist() for state, key in ((states[0], "a"), (states[1], "b"))] == [
        [0, 0],
        [0, 0],
    ]
    reports = loading(tmp_path, errors_of, states, strict=False)
    assert [report.unexpected for report in reports] == [["s/c"]] * 3
    assert [state[key].tolist() for state, key in ((states[0], "a"), (states[1], "b"))] == [
        [1, 1],
        [1, 1],
    ]


def test_a_key_that_no_checkpoint_has(tmp_path: Path, errors_of, on_all) -> None:
    saved(tmp_path, [{"a": torch.ones(2)}, {"c": torch.ones(2)}])
    states: list[Any] = [
        {"a": torch.zeros(2), "c": torch.zeros(2)},
        {"a": torch.zeros(2), "d": torch.zeros(2)},
    ]
    error = on_all(loading(tmp_path, errors_of, states), StateMismatch)
    assert error.missing == ["s/d"]
    assert list(error.causes) == [1]
    assert states[0]["a"].tolist() == [0, 0]
    reports = loading(tmp_path, errors_of, states, strict=False)
    assert [report.missing for report in reports] == [[], ["s/d"]]
    assert states[1]["d"].tolist() == [0, 0] and states[1]["a"].tolist() == [1, 1]


@pytest.mark.parametrize("world", [1, 2])
def test_nothing_that_matches_is_an_error_even_when_not_strict(
    tmp_path: Path, errors_of, on_all, world: int
) -> None:
    saved(tmp_path, [{"a": torch.ones(2)}, {"b": torch.ones(2)}])
    on_all(
        loading(tmp_path, errors_of, [{"x": torch.zeros(2)}] * world, strict=False), StateMismatch
    )


def test_another_shape_or_dtype_at_the_load(tmp_path: Path, errors_of, on_all) -> None:
    saved(tmp_path, [{"w": rows(0, 3)}, {"w": rows(3, 6)}])
    other = Shard(torch.zeros(3, 5), (6, 5), (0, 0))
    error = on_all(loading(tmp_path, errors_of, [{"w": rows(0, 6)}, {"w": other}]), StateMismatch)
    assert error.mismatched == {"s/w": ("F32 [6, 4]", "F32 [6, 5]")}
    half = Shard(torch.zeros(2, 4, dtype=torch.bfloat16), (6, 4), (1, 0))
    error = on_all(loading(tmp_path, errors_of, [{"w": half}]), StateMismatch)
    assert error.mismatched == {"s/w": ("F32 [6, 4]", "BF16 [6, 4]")}
    reports = loading(tmp_path, errors_of, [{"w": half}], cast=True)
    assert reports[0].cast == {"s/w": "F32 -> BF16"}
    assert half.tensor.tolist() == rows(1, 3).tensor.tolist()


class Own:
    """State of a rank's own that remembers whether it was loaded."""

    sharing_pattern = PER_RANK

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"v": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["v"]


def mixed(
    rank: int, world: int, value: float, **how: Any
) -> tuple[list[StateComponent], Shard, Own]:
    cut = -(-6 // world)
    shard = rows(min(rank * cut, 6), min((rank + 1) * cut, 6))
    shard.tensor.mul_(value)
    own = Own(rank * value)
    return [*parts({"w": shard}), StateComponent("own", own, PER_RANK, **how)], shard, own


@pytest.fixture
def mixed_root(tmp_path: Path) -> Path:
    def save(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, mixed(comm.rank, comm.world_size, 1.0)[0])

    run_ranks(2, save)
    return tmp_path


@pytest.mark.parametrize("policy", ["error", "function", "out of range", "error on one rank"])
def test_another_world_size_next_to_state_of_each_rank(
    mixed_root: Path, errors_of, on_all, policy: str
) -> None:
    live: dict[int, tuple[Any, ...]] = {}

    def program(comm: Any) -> Any:
        policies: dict[str, Any] = {
            "error": "error",
            "function": lambda new, size, old: new % old,
            "out of range": lambda new, size, old: new,
            "error on one rank": "error" if comm.rank == 2 else lambda new, size, old: 0,
        }
        live[comm.rank] = mixed(comm.rank, comm.world_size, -5.0, on_resize=policies[policy])
        with CheckpointManager(mixed_root, comm=comm) as ckpt:
            return ckpt.load(live[comm.rank][0])

    results = errors_of(3, program)
    full = torch.arange(24.0).reshape(6, 4)
    if policy == "function":
        assert [own.value for _, _, own in (live[rank] for rank in range(3))] == [0.0, 1.0, 0.0]
        assert all(
            torch.equal(live[rank][1].tensor, full[2 * rank : 2 * rank + 2]) for rank in range(3)
        )
        return
    error = on_all(results, StateMismatch)
    assert re.search(r"component 'own'", error.message)
    assert (
        set(error.causes)
        == {"error": {0, 1, 2}, "out of range": {2}, "error on one rank": {2}}[policy]
    )
    for rank in range(3):
        assert torch.equal(live[rank][1].tensor, full[2 * rank : 2 * rank + 2] * -5)
        assert live[rank][2].value == rank * -5.0


def test_another_world_size_with_state_that_stays(mixed_root: Path) -> None:
    def program(comm: Any) -> Any:
        components, shard, own = mixed(comm.rank, comm.world_size, -5.0, on_resize="keep")
        with CheckpointManager(mixed_root, comm=comm) as ckpt:
            ckpt.load(components)
        return shard.tensor, own.value

    with pytest.warns(
        CheckpointWarning, match="component 'own' was saved for 2 ranks, there are 3 now"
    ):
        found = run_ranks(3, program)
    assert [value for _, value in found] == [0.0, -5.0, -10.0]
    assert torch.equal(torch.cat([tensor for tensor, _ in found]), torch.arange(24.0).reshape(6, 4))
