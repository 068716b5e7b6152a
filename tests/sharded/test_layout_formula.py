"""The formula of format/layout.py: boxes cover a tensor exactly, and are found again from any
side."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import prod
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.format.layout import (
    Box,
    BoxLayout,
    LogicalTensor,
    Mesh,
    MeshLayout,
    WholeLayout,
    decode_layouts,
    encode_layouts,
    intersection,
    volume,
)

NOT_A_TABLE = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
)  # what view.py takes for damage
covered = {"examples": 0, "ranks": 0, "most ranks": 0, "empty parts": 0}


@st.composite
def meshes(draw, most: int = 4096) -> Mesh:
    """1 to `most` ranks in 1 to 4 dimensions, in any order, of a world that may be larger."""
    shape: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        shape.append(
            draw(
                st.integers(
                    1, max(1, min(most // prod(shape), draw(st.sampled_from([2, 4, 64, most]))))
                )
            )
        )
    order = random.Random(draw(st.integers(0, 99)))
    size = prod(shape)
    ranks = list(range(size)) if draw(st.booleans()) else order.sample(range(size + 7), size)
    return Mesh(tuple(shape), tuple(ranks))


@st.composite
def layouts(draw, most: int = 4096) -> tuple[MeshLayout, tuple[int, ...]]:
    mesh = draw(meshes(most))
    shape = draw(
        st.lists(st.integers(0, 9) | st.sampled_from([1, 16, 33, 64]), max_size=3).map(tuple)
    )
    cuts = [f"{kind}{dim}" for kind in "Ss" for dim in range(len(shape))]
    placements = tuple(draw(st.sampled_from(["R", *cuts, *cuts])) for _ in mesh.shape)
    layout = MeshLayout(mesh, placements)
    return MeshLayout(mesh, placements, draw(st.integers(0, layout.replicas - 1))), shape


@st.composite
def boxes(draw, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))


def reference_box(
    layout: MeshLayout, shape: tuple[int, ...], at: tuple[int, ...]
) -> list[list[int]]:
    """The items that the rank at a place holds, by cutting lists of numbers as torch.chunk does."""
    held = [list(range(n)) for n in shape]
    plain = [m for m, p in enumerate(layout.placements) if p[0] == "S"]
    strided = [m for m, p in enumerate(layout.placements) if p[0] == "s"]
    for m in [*plain, *reversed(strided)]:
        dim, parts = int(layout.placements[m][1:]), layout.mesh.shape[m]
        size = -(-len(held[dim]) // parts)
        held[dim] = held[dim][at[m] * size : (at[m] + 1) * size]
    return held


def check_layout(layout: MeshLayout, shape: tuple[int, ...], box: Box) -> None:
    mesh = layout.mesh
    places = list(np.ndindex(mesh.shape))
    owners = np.zeros(shape, dtype=np.int64)
    replicas: dict[int, int] = {}
    found: dict[int, Box] = {}
    for rank, at in zip(mesh.ranks, places, strict=True):
        held = layout.box_at(shape, at)
        expected = reference_box(layout, shape, at)
        assert [
            list(range(o, o + n)) for o, n in zip(*held, strict=True)
        ] == expected or not volume(held[1])
        assert volume(held[1]) == prod(map(len, expected))
        replica = layout.replica_at(at)
        replicas[replica] = replicas.get(replica, 0) + 1
        if replica == layout.replica:
            assert layout.holder(at, replica) == rank
            owners[tuple(slice(o, o + n) for o, n in zip(*held, strict=True))] += 1
            if volume(held[1]):
                found[rank] = held
            covered["empty parts"] += not volume(held[1])
    assert (owners == 1).all(), "the boxes of one replica do not cover the tensor exactly"
    assert sorted(replicas) == list(range(layout.replicas)) and len(set(replicas.values())) == 1
    met = [(rank, held) for rank, held in found.items() if intersection(held, box)]
    assert sorted(layout.cuts(shape, box)) == sorted(met)
    whole = ((0,) * len(shape), shape)
    assert sorted(layout.cuts(shape, whole)) == sorted(found.items())
    sample = random.Random(len(places)).sample(range(len(places)), min(32, len(places)))
    for number in sample:
        rank, at = mesh.ranks[number], places[number]
        assert (mesh.coordinates(rank), mesh.rank_at(at)) == (at, rank)
        assert layout.box_of(shape, rank) == found.get(rank)
        for replica in {0, layout.replica, layout.replicas - 1}:
            there = mesh.coordinates(layout.holder(at, replica))
            assert there is not None and layout.replica_at(there) == replica
            assert layout.box_at(shape, there) == layout.box_at(shape, at)
    assert layout.box_of(shape, max(mesh.ranks) + 1) is None
    covered["examples"] += 1
    covered["ranks"] += len(places)
    covered["most ranks"] = max(covered["most ranks"], len(places))


@pytest.fixture
def covering() -> Iterator[None]:
    """All examples together have had large meshes and empty parts."""
    covered.update(dict.fromkeys(covered, 0))
    yield
    print(f"layout formula: {covered}")
    assert covered["most ranks"] > 1000 and 0 < covered["empty parts"] < covered["ranks"]


@given(layouts(64), st.data())
@settings(max_examples=150)
def test_boxes_cover_the_tensor_and_are_found(
    made: tuple[MeshLayout, tuple[int, ...]], data: Any
) -> None:
    check_layout(*made, data.draw(boxes(made[1])))


@given(layouts(), st.data())
@settings(max_examples=25)
def test_boxes_of_thousands_of_ranks(made: tuple[MeshLayout, tuple[int, ...]], data: Any) -> None:
    check_layout(*made, data.draw(boxes(made[1])))


@pytest.mark.stress
@pytest.mark.timeout(1200)
@given(layouts(), st.data())
@settings(max_examples=4000)
def test_boxes_many_times(
    covering: None, made: tuple[MeshLayout, tuple[int, ...]], data: Any
) -> None:
    check_layout(*made, data.draw(boxes(made[1])))


def test_cuts_of_a_wide_job_are_found_without_a_search() -> None:
    # Rank 4095 needs one row: the formula says whose box it is, whatever the number of ranks.
    mesh = Mesh((8, 16, 32), tuple(range(4096)))
    layout = MeshLayout(mesh, ("R", "S0", "S1"), 5)
    assert list(layout.cuts((160, 640), ((37, 61), (1, 1)))) == [
        (5 * 512 + 3 * 32 + 3, ((30, 60), (10, 20)))
    ]
    assert layout.box_of((160, 640), 5 * 512 + 3 * 32 + 3) == ((30, 60), (10, 20))
    assert layout.box_of((160, 640), 4 * 512 + 3 * 32 + 3) is None


def test_an_uneven_two_dimensional_cut_by_hand() -> None:
    # 7 items over tp=2 are 4 and 3; each of these over dp=2: 2+2 and 2+1 ("s": data parallel cuts
    # come last).
    layout = MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), ("s0", "S0"))
    assert [layout.box_of((7,), rank) for rank in range(4)] == [
        ((0,), (2,)),
        ((4,), (2,)),
        ((2,), (2,)),
        ((6,), (1,)),
    ]
    plain = MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), ("S0", "S0"))
    assert [plain.box_of((7,), rank) for rank in range(4)] == [
        ((0,), (2,)),
        ((2,), (2,)),
        ((4,), (2,)),
        ((6,), (1,)),
    ]
    assert [plain.box_of((2,), rank) for rank in range(4)] == [
        ((0,), (1,)),
        None,
        ((1,), (1,)),
        None,
    ]


def test_zero_dimensional_and_empty_tensors() -> None:
    mesh = Mesh((3,), (0, 1, 2))
    scalar = MeshLayout(mesh, ("R",), 2)
    assert list(scalar.cuts((), ((), ()))) == [(2, ((), ()))]
    assert [scalar.box_of((), rank) for rank in range(3)] == [None, None, ((), ())]
    empty = MeshLayout(mesh, ("S0",))
    assert list(empty.cuts((0, 4), ((0, 0), (0, 4)))) == []
    assert [empty.box_of((0, 4), rank) for rank in range(3)] == [None] * 3
    assert intersection(((), ()), ((), ())) == ((), ())


@st.composite
def tables(draw) -> list[LogicalTensor]:
    tensors: list[LogicalTensor] = []
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["mesh", "whole", "boxes", "alias"]))
        if kind == "alias" and (
            targets := [n for n, t in enumerate(tensors) if t.alias_of is None]
        ):
            target = draw(st.sampled_from(targets))
            first = tensors[target]
            tensors.append(LogicalTensor(f"t{number}", first.dtype, first.shape, None, target))
            continue
        layout, shape = draw(layouts(24))
        made: Any = layout
        if kind == "whole":
            made = WholeLayout(draw(st.integers(0, 30)))
        elif kind == "boxes":
            made = BoxLayout(tuple(layout.cuts(shape, ((0,) * len(shape), shape))))
        tensors.append(
            LogicalTensor(
                f"t{number}", draw(st.sampled_from(["F32", "complex128", "U8"])), shape, made
            )
        )
    return tensors


def sent(table: dict[str, Any]) -> dict[str, Any]:
    return msgpack.unpackb(msgpack.packb(table))


@given(tables())
def test_tables_round_trip(tensors: list[LogicalTensor]) -> None:
    table = sent(encode_layouts(tensors))
    assert decode_layouts(table, 31) == tensors
    assert len(table["meshes"]) == len(
        {t.layout.mesh for t in tensors if isinstance(t.layout, MeshLayout)}
    )


def mutated(value: Any, chance: random.Random) -> Any:
    """One thing in it is another."""
    odd = [
        None,
        -1,
        0,
        1,
        2**62,
        2**64 - 1,
        0.5,
        "",
        "S0",
        "s9",
        "R R R",
        b"",
        [],
        {},
        True,
        [[]],
        {"boxes": [[0, [0], [9]]]},
    ]
    if isinstance(value, list | dict) and value and chance.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        at = chance.choice(keys)
        changed = dict(value) if isinstance(value, dict) else list(value)
        if chance.random() < 0.1:
            del changed[at]
        else:
            changed[at] = mutated(value[at], chance)
        return changed
    return chance.choice(odd)


def use(tensors: list[LogicalTensor]) -> None:
    """Everything that readers do with a table."""
    for t in tensors:
        if t.layout is not None and volume(t.shape) < 1 << 20:
            for rank in range(31):
                t.layout.box_of(t.shape, rank)
            boxes_found = [box for _, box in t.layout.cuts(t.shape, ((0,) * len(t.shape), t.shape))]
            assert sum(volume(box[1]) for box in boxes_found) == volume(t.shape), (
                f"{t} has holes or overlaps"
            )


@given(tables(), st.integers(0, 2**32))
@settings(max_examples=100)
def test_mutated_tables_are_refused_or_harmless(tensors: list[LogicalTensor], seed: int) -> None:
    chance = random.Random(seed)
    table = sent(encode_layouts(tensors))
    for _ in range(20):
        try:
            changed = decode_layouts(mutated(table, chance), 31)
        except NOT_A_TABLE:
            continue
        use(changed)


BAD_TABLES = {
    "a mesh without ranks": {
        "meshes": [[[0], []]],
        "tensors": [["a", "F32", [4], None, [0, "S0", 0]]],
    },
    "boxes with a hole": {
        "meshes": [],
        "tensors": [["a", "F32", [4], None, {"boxes": [[0, [0], [2]]]}]],
    },
    "boxes that overlap": {
        "meshes": [],
        "tensors": [["a", "F32", [4], None, {"boxes": [[0, [0], [3]], [1, [2], [2]]]}]],
    },
    "an alias of another shape": {
        "meshes": [],
        "tensors": [["a", "F32", [4], None, 0], ["b", "F32", [5], 0, None]],
    },
    "an alias of another dtype": {
        "meshes": [],
        "tensors": [["a", "F32", [4], None, 0], ["b", "F64", [4], 0, None]],
    },
    "a dtype that is not one": {"meshes": [], "tensors": [["a", "F33", [4], None, 0]]},
    "a rank twice": {"meshes": [[[2], [1, 1]]], "tensors": [["a", "F32", [4], None, [0, "S0", 0]]]},
    "a rank outside the world": {
        "meshes": [[[2], [1, 31]]],
        "tensors": [["a", "F32", [4], None, [0, "S0", 0]]],
    },
    "a replica too many": {
        "meshes": [[[2], [0, 1]]],
        "tensors": [["a", "F32", [4], None, [0, "R", 2]]],
    },
    "a cut of a dimension that is not there": {
        "meshes": [[[2], [0, 1]]],
        "tensors": [["a", "F32", [4], None, [0, "S1", 0]]],
    },
    "an alias of nothing": {"meshes": [], "tensors": [["a", "F32", [4], 7, None]]},
    "an alias of an alias": {
        "meshes": [],
        "tensors": [["a", "F32", [4], 1, None], ["b", "F32", [4], 0, None]],
    },
    "no layout": {"meshes": [], "tensors": [["a", "F32", [4], None, None]]},
}


@pytest.mark.parametrize("what", BAD_TABLES)
def test_tables_that_make_no_sense(what: str) -> None:
    with pytest.raises(NOT_A_TABLE):
        decode_layouts(BAD_TABLES[what], 31)
