"""The oracle: whatever layout a state was saved in, and whatever part of it a rank asks for, it
gets the items of the full tensors, to the bit, having read the chunks that hold them and nothing
else."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ckptcore import CheckpointManager, Shard, SharingPattern, StateComponent, open_checkpoint
from ckptcore.format.layout import Mesh, MeshLayout
from ckptcore.format.manifest import Index
from ckptcore.testing.ranks import run_ranks

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.bool,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint16,
    torch.float64,
    torch.complex64,
    torch.float8_e5m2,
    torch.int8,
]
NAMES = [
    ("w",),
    ("model", "layers.0.weight"),
    ("model", "a/b~c"),
    ("opt", "state", "p", "exp_avg"),
    ("", "é"),
    ("x", "y"),
]
covered = {
    "examples": 0,
    "tensors": 0,
    "leaves": 0,
    "empty leaves": 0,
    "mesh leaves": 0,
    "bytes": 0,
    "ranks": 0,
}

Path_ = tuple[str, ...]
Slices = tuple[slice, ...]


@dataclass
class Case:
    """Full tensors by path; what each rank saves; what each rank asks for, with the slices that it
    must get."""

    full: dict[Path_, torch.Tensor] = field(default_factory=dict)
    saves: list[dict[Path_, Any]] = field(default_factory=list)
    ties: dict[Path_, Path_] = field(default_factory=dict)
    wants: list[dict[Path_, Any]] = field(default_factory=list)
    expected: list[dict[Path_, Slices]] = field(default_factory=list)


def filled(chance: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = np.random.default_rng(chance.randrange(1 << 30))
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, shape).astype(bool))
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.from_numpy(generator.integers(0, 256, prod(shape) * size, dtype=np.uint8))
    return data.view(dtype).reshape(shape) if data.numel() else torch.empty(shape, dtype=dtype)


def slices(offset: Any, size: Any) -> Slices:
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))


def partition(
    chance: random.Random, shape: tuple[int, ...], most: int
) -> list[tuple[list[int], list[int]]]:
    """Boxes without a rule: cut again and again, anywhere; some may be empty."""
    boxes = [([0] * len(shape), list(shape))]
    while shape and len(boxes) < most and chance.random() < 0.85:
        offset, size = boxes.pop(chance.randrange(len(boxes)))
        dim = chance.randrange(len(shape))
        at = chance.randint(0, size[dim])
        low, high = list(size), list(size)
        low[dim], high[dim] = at, size[dim] - at
        moved = list(offset)
        moved[dim] += at
        boxes += [(offset, low), (moved, high)]
    return boxes


def random_mesh(chance: random.Random, ranks: list[int], ndim: int) -> MeshLayout:
    shape: list[int] = []
    while len(shape) < 3 and (not shape or chance.random() < 0.5):
        shape.append(chance.randint(1, max(1, len(ranks) // prod(shape))))
    mesh = Mesh(tuple(shape), tuple(chance.sample(ranks, prod(shape))))
    cuts = [f"{kind}{dim}" for kind in "Ss" for dim in range(ndim)]
    return MeshLayout(mesh, tuple(chance.choice(["R", *cuts, *cuts]) for _ in shape))


def some(chance: random.Random, world: int) -> list[int]:
    """A part of the ranks; often all of them."""
    return sorted(chance.sample(range(world), chance.choice([world, chance.randint(1, world)])))


def put_saved(case: Case, chance: random.Random, path: Path_, mesh_shard: Any) -> None:
    full, world = case.full[path], len(case.saves)
    holders, shape = some(chance, world), tuple(full.shape)
    kind = chance.choice(["plain", "boxes", "boxes", "mesh", "mesh"])
    leaves: dict[int, Any] = {}
    if kind == "plain":
        leaves = {rank: full.clone() for rank in holders}
    elif kind == "boxes":
        boxes = partition(chance, shape, len(holders))
        given_out = boxes + [chance.choice(boxes) for _ in range(len(holders) - len(boxes))]
        for rank, (offset, size) in zip(
            chance.sample(holders, len(holders)), given_out, strict=True
        ):
            leaves[rank] = Shard(full[slices(offset, size)].clone(), shape, tuple(offset))
    else:
        layout = random_mesh(chance, holders, full.ndim)
        outside = [
            rank for rank in holders if rank not in layout.mesh.ranks and chance.random() < 0.5
        ]
        leaves = {rank: mesh_shard(full, layout, rank) for rank in (*layout.mesh.ranks, *outside)}
        covered["mesh leaves"] += len(leaves)
    for rank, leaf in leaves.items():
        case.saves[rank][path] = leaf
        if path in case.ties:
            case.saves[rank][case.ties[path]] = leaf


def place_for(chance: random.Random, dtype: torch.dtype, size: list[int]) -> torch.Tensor:
    """Memory of some stride for a part to be read into."""
    kind = chance.choice(["dense", "dense", "transposed", "stepped", "padded"])
    if kind == "transposed" and size:
        return torch.zeros(size[::-1], dtype=dtype).permute(*reversed(range(len(size))))
    if kind == "stepped" and size:
        return torch.zeros([*size[:-1], 2 * size[-1]], dtype=dtype)[..., ::2]
    if kind == "padded" and size:
        return torch.zeros([n + 2 for n in size], dtype=dtype)[tuple(slice(1, n + 1) for n in size)]
    return torch.zeros(size, dtype=dtype)


def put_wanted(case: Case, chance: random.Random, path: Path_, mesh_shard: Any) -> None:
    full, world = case.full[path], len(case.wants)
    holders, shape = some(chance, world), tuple(full.shape)
    layout = random_mesh(chance, holders, full.ndim)
    by_mesh = chance.random() < 0.3
    for rank in layout.mesh.ranks if by_mesh else holders:
        leaf: Any
        if by_mesh:
            leaf = mesh_shard(torch.zeros_like(full), layout, rank)
            box = leaf.box
        elif chance.random() < 0.2:
            leaf, box = place_for(chance, full.dtype, list(shape)), ((0,) * full.ndim, shape)
        else:
            offset = [chance.randint(0, n) for n in shape]
            size = [chance.randint(0, n - o) for n, o in zip(shape, offset, strict=True)]
            leaf, box = (
                Shard(place_for(chance, full.dtype, size), shape, tuple(offset)),
                (offset, size),
            )
        case.wants[rank][path] = leaf
        case.expected[rank][path] = slices(*box)


def make_case(chance: random.Random, mesh_shard: Any, most: int) -> Case:
    before, after = chance.randint(1, most), chance.randint(1, most)
    case = Case()
    case.saves = [{} for _ in range(before)]
    case.wants, case.expected = [{} for _ in range(after)], [{} for _ in range(after)]
    paths = chance.sample(NAMES, chance.randint(1, len(NAMES)))
    for path in paths:
        shape = tuple(
            chance.choice([1, 2, 3, 5, 8, 17, 0 if chance.random() < 0.2 else 4])
            for _ in range(chance.randint(0, 3))
        )
        case.full[path] = filled(chance, chance.choice(DTYPES), shape)
        if chance.random() < 0.2:
            case.ties[path] = (f"tie of {path[-1]}",)
    for path in paths:
        put_saved(case, chance, path, mesh_shard)
    for path, tie in case.ties.items():
        case.full[tie] = case.full[path]
    for path in case.full:
        put_wanted(case, chance, path, mesh_shard)
    return case


def nested(flat: dict[Path_, Any], **values: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {"step": 7, "lr": {"base": 0.1, "at": (1, None, "x")}, **values}
    for path, leaf in flat.items():
        at = tree
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = leaf
    return tree


def named(path: Path_) -> str:
    return "s/" + "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)


def component(state: Any) -> list[StateComponent]:
    return [StateComponent("s", state, SharingPattern.SHARDED, validation_level="TENSOR")]


def check_stored(case: Case, folder: Path) -> None:
    """Every byte of every tensor is stored exactly once, and nothing else is there."""
    view = open_checkpoint(folder)
    assert view.verify() == [] and view.foreign_files() == []
    assert {entry.name for entry in folder.iterdir()} == {
        *view.manifest.files,
        "checkpoint_manifest.json",
    }
    indexes = [Index.decode(file.read_bytes()) for file in sorted(folder.glob("index.*"))]
    stored = view.component("s")
    data = sum(file.size - file.header_size for index in indexes for file in index.files.values())
    logical = sum(
        t.numel() * t.element_size()
        for path, t in case.full.items()
        if path not in case.ties.values()
    )
    assert data == logical == view.manifest.components["s"].size_bytes
    assert {f"s/{t.name}" for t in stored.tensors} == set(map(named, case.full))
    for number, tensor in enumerate(stored.tensors):
        times = np.zeros(tensor.shape, int)
        for piece in stored.pieces(number, ((0,) * len(tensor.shape), tensor.shape)):
            times[slices(piece.offset, piece.local_shape)] += 1
        assert (times == 1).all(), tensor
        if tensor.alias_of is not None:
            assert stored.tensors[tensor.alias_of].alias_of is None


def chunk_bytes_needed(folder: Path, expected: dict[Path_, Slices], chunk: int) -> int:
    """The sizes of the chunks that hold an item of a wanted part, each piece counted for each
    wanted part of it."""
    view = open_checkpoint(folder)
    stored = view.component("s")
    numbers = {f"s/{t.name}": number for number, t in enumerate(stored.tensors)}
    needed = 0
    for path, part in expected.items():
        box = tuple(s.start for s in part), tuple(s.stop - s.start for s in part)
        for piece in stored.pieces(numbers[named(path)], box):
            wanted = np.zeros(piece.shape, bool)
            wanted[part] = True
            items = (
                wanted[slices(piece.offset, piece.local_shape)]
                .reshape(-1)
                .repeat(piece.nbytes // prod(piece.local_shape))
            )
            starts = range(0, len(items), chunk)
            needed += sum(len(items[s : s + chunk]) for s in starts if items[s : s + chunk].any())
    return needed


def check_case(case: Case, root: Path, counting: Any, words: Any, chunk: int) -> None:
    def save(comm: Any) -> None:
        with CheckpointManager(root, comm=comm, io_threads=2) as ckpt:
            ckpt.save(1, component(nested(case.saves[comm.rank])))

    def load(comm: Any) -> tuple[Any, Any]:
        storage = counting(root)
        with CheckpointManager(
            storage, comm=comm, io_threads=2, load_broadcast=comm.world_size % 2 == 0
        ) as ckpt:
            report = ckpt.load(
                component(nested(case.wants[comm.rank], step=0)),
                transactional=comm.world_size % 3 == 2,
            )
        return report, storage

    run_ranks(len(case.saves), save)
    folder = root / "checkpoint-1"
    check_stored(case, folder)
    headers = {
        name: entry.header_size
        for file in folder.glob("index.*")
        for name, entry in Index.decode(file.read_bytes()).files.items()
    }
    for rank, (report, storage) in enumerate(run_ranks(len(case.wants), load)):
        assert (report.missing, report.unexpected, report.cast) == ([], [], {})
        assert (report.values["s"]["step"], report.values["s"]["lr"]) == (
            7,
            {"base": 0.1, "at": (1, None, "x")},
        )
        for path, leaf in case.wants[rank].items():
            part = case.expected[rank][path]
            found = leaf.tensor if isinstance(leaf, Shard) else leaf
            assert np.array_equal(words(found), words(case.full[path][part])), (path, part, rank)
            covered["leaves"] += 1
            covered["empty leaves"] += found.numel() == 0
        data = sum(
            end - start
            for name, start, end in storage.reads
            if name in headers and start >= headers[name]
        )
        assert data <= 1.05 * chunk_bytes_needed(folder, case.expected[rank], chunk), rank
        covered["bytes"] += data
    covered["examples"] += 1
    covered["tensors"] += len(case.full)
    covered["ranks"] += len(case.saves) + len(case.wants)


def check_boxes(case: Case, folder: Path, chance: random.Random, words: Any) -> None:
    """Any box of any tensor, read without ranks and without torch, is numpy's slice of the full
    tensor."""
    view = open_checkpoint(folder)
    for path, full in case.full.items():
        for _ in range(3):
            offset = [chance.randint(0, n) for n in full.shape]
            size = [chance.randint(0, n - o) for n, o in zip(full.shape, offset, strict=True)]
            part = slices(offset, size)
            assert np.array_equal(words(view.read(named(path), part)), words(full[part])), (
                path,
                part,
            )
        assert np.array_equal(words(view.read(named(path))), words(full)), path


def run(chance: random.Random, most: int, root: Path, fixtures: tuple[Any, ...]) -> None:
    counting, words, chunk, mesh_shard = fixtures
    shutil.rmtree(root, ignore_errors=True)
    case = make_case(chance, mesh_shard, most)
    check_case(case, root, counting, words, chunk)
    check_boxes(case, root / "checkpoint-1", chance, words)


@pytest.fixture
def fixtures(counting, words, small_chunks: int, mesh_shard) -> tuple[Any, ...]:
    return counting, words, small_chunks, mesh_shard


# A failure names its seed; making it smaller would take minutes and help nobody.
FAST = {"phases": [Phase.explicit, Phase.reuse, Phase.generate]}


@pytest.fixture
def covering() -> Iterator[None]:
    """All examples together have had everything that can be had."""
    covered.update(dict.fromkeys(covered, 0))
    yield
    print(f"any layout to any layout: {covered}")
    assert [name for name, times in covered.items() if not times] == []
    assert covered["empty leaves"] < covered["leaves"]


@given(st.integers(0, 2**32))
@settings(max_examples=50, **FAST)
def test_any_layout_to_any_layout(fixtures, tmp_path: Path, seed: int) -> None:
    run(random.Random(seed), 5, tmp_path / "root", fixtures)


@given(st.integers(0, 2**32))
@settings(max_examples=12, **FAST)
def test_any_layout_to_any_layout_on_sixteen_ranks(fixtures, tmp_path: Path, seed: int) -> None:
    run(random.Random(seed), 16, tmp_path / "root", fixtures)


@pytest.mark.stress
@pytest.mark.timeout(1800)
@given(st.integers(0, 2**32))
@settings(max_examples=1500, **FAST)
def test_any_layout_many_times(fixtures, tmp_path: Path, covering: None, seed: int) -> None:
    run(random.Random(seed), 16, tmp_path / "root", fixtures)
