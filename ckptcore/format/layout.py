"""Layouts: how one logical tensor is cut into boxes over ranks, recorded once, and who holds and
who wrote which box.

A mesh is an array of ranks. A placement per mesh dimension says how the tensor lies along it: "R"
replicated, "S<d>" cut along tensor dimension d, "s<d>" cut along d after all "S<d>" cuts
(data-parallel sharding over tensor-parallel shards). Cuts of one tensor dimension are made one
after the other, "S" from the first mesh dimension to the last, then "s" from the last to the first;
each cut of n items over k ranks gives the i-th of them items i*c to min((i+1)*c, n), c = ceil(n/k),
so late parts may be short or empty. Ranks that differ only along "R" dimensions hold the same box;
`replica` counts them in C order, and the replica recorded is the one that wrote the tensor. Source
of the rule: torch.chunk, torch.distributed.tensor.Shard and _StridedShard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from .manifest import DIMENSIONS, sizes, whole
from .tensorfile import DTYPES, tensor_nbytes

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


volume: Callable[[Sequence[int]], int] = prod  # items of a shape


def intersection(a: Box, b: Box) -> Box | None:
    """The common part of two boxes; None when it has no items."""
    offset = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = (min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))
    shape = tuple(e - o for e, o in zip(ends, offset, strict=True))
    return None if any(n <= 0 for n in shape) else (offset, shape)


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of `boxes`, none of them empty, that have an item in common; None when no two overlap.
    Along the dimension with the most cuts, only boxes that start before another ends can
    overlap it."""
    dims = range(len(boxes[0][0])) if boxes else range(0)
    along = max(dims, key=lambda d: len({box[0][d] for box in boxes}), default=None)
    if along is None:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda b: b[0][along]):
        open_boxes = [b for b in open_boxes if b[0][along] + b[1][along] > box[0][along]]
        for other in open_boxes:
            if intersection(other, box) is not None:
                return other, box
        open_boxes.append(box)
    return None


@dataclass(frozen=True, slots=True)
class Mesh:
    """`shape` of the mesh, and its ranks in C order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __hash__(self) -> int:  # thousands of ranks are not gone through for each tensor
        return hash((self.shape, self.ranks[:1], self.ranks[-1:]))

    def rank_at(self, coordinates: Sequence[int]) -> int:
        index = 0
        for size, at in zip(self.shape, coordinates, strict=True):
            index = index * size + at
        return self.ranks[index]

    def coordinates(self, rank: int) -> tuple[int, ...] | None:
        """None when the rank is not in the mesh."""
        try:
            index = self.ranks.index(rank)
        except ValueError:
            return None
        at = []
        for size in reversed(self.shape):
            index, here = divmod(index, size)
            at.append(here)
        return tuple(reversed(at))


@dataclass(frozen=True, slots=True)
class WholeLayout:
    """Every holder has all of it; one of them wrote it."""

    writer: int

    def cuts(self, shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, Box]]:
        """(writer, its box) for the boxes that `box` needs something of."""
        if volume(box[1]):
            yield self.writer, ((0,) * len(shape), shape)

    def box_of(self, shape: tuple[int, ...], rank: int) -> Box | None:
        """The box that `rank` wrote; None when it wrote none."""
        return ((0,) * len(shape), shape) if rank == self.writer else None

    def plain(self) -> Any:
        return self.writer

    def words(self) -> str:
        return f"whole, written by rank {self.writer}"


@dataclass(frozen=True, slots=True)
class BoxLayout:
    """Boxes without a rule, each with its writer."""

    boxes: tuple[tuple[int, Box], ...]

    def cuts(self, shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, Box]]:
        yield from (
            (writer, held) for writer, held in self.boxes if intersection(held, box) is not None
        )

    def box_of(self, shape: tuple[int, ...], rank: int) -> Box | None:
        return next((held for writer, held in self.boxes if writer == rank), None)

    def plain(self) -> Any:
        return {"boxes": [[writer, *box] for writer, box in self.boxes]}

    def words(self) -> str:
        return f"{len(self.boxes)} boxes without a rule"


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """Cut by the placements over a mesh; `replica` wrote it."""

    mesh: Mesh
    placements: tuple[str, ...]
    replica: int = 0

    @property
    def replicas(self) -> int:
        return prod(
            size for size, p in zip(self.mesh.shape, self.placements, strict=True) if p == "R"
        )

    def words(self) -> str:
        shape = "x".join(map(str, self.mesh.shape))
        return f"{','.join(self.placements)} over {shape} ranks"

    def order(self, dim: int) -> list[int]:
        """The mesh dimensions that cut tensor dimension `dim`, in the order of the cuts."""
        plain = [m for m, p in enumerate(self.placements) if p == f"S{dim}"]
        return plain + [
            m for m in reversed(range(len(self.placements))) if self.placements[m] == f"s{dim}"
        ]

    def box_at(self, shape: tuple[int, ...], coordinates: Sequence[int]) -> Box:
        """The box at these coordinates of the mesh; it may be empty."""
        offset, size = [], []
        for dim, n in enumerate(shape):
            start = 0
            for mesh_dim in self.order(dim):
                step = -(-n // self.mesh.shape[mesh_dim])
                low = min(coordinates[mesh_dim] * step, n)
                start, n = start + low, min(step, n - low)
            offset.append(start)
            size.append(n)
        return tuple(offset), tuple(size)

    def replica_at(self, coordinates: Sequence[int]) -> int:
        """Which of the replicas of its box the rank at `coordinates` holds."""
        number = 0
        for size, placement, at in zip(self.mesh.shape, self.placements, coordinates, strict=True):
            if placement == "R":
                number = number * size + at
        return number

    def holder(self, coordinates: Sequence[int], replica: int) -> int:
        """The rank that holds replica number `replica` of the box at `coordinates`."""
        found = list(coordinates)
        for mesh_dim in reversed(range(len(found))):
            if self.placements[mesh_dim] == "R":
                replica, found[mesh_dim] = divmod(replica, self.mesh.shape[mesh_dim])
        return self.mesh.rank_at(found)

    def box_of(self, shape: tuple[int, ...], rank: int) -> Box | None:
        at = self.mesh.coordinates(rank)
        if at is None or self.replica_at(at) != self.replica:
            return None
        box = self.box_at(shape, at)
        return box if volume(box[1]) else None

    def cuts(self, shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, Box]]:
        for coordinates, held in self.cells(shape, box):
            yield self.holder(coordinates, self.replica), held

    def cells(self, shape: tuple[int, ...], box: Box) -> Iterator[tuple[list[int], Box]]:
        """(mesh coordinates, their box) where boxes overlap `box`; coordinates along "R" dimensions
        are 0."""
        if not volume(box[1]):
            return
        per_dim = [
            list(self._cuts_of(dim, n, box[0][dim], box[0][dim] + box[1][dim]))
            for dim, n in enumerate(shape)
        ]
        for cuts in product(*per_dim):
            at: dict[int, int] = {}
            for coordinates, _, _ in cuts:
                at |= coordinates
            held = tuple(start for _, start, _ in cuts), tuple(length for _, _, length in cuts)
            yield [at.get(mesh_dim, 0) for mesh_dim in range(len(self.placements))], held

    def _cuts_of(
        self, dim: int, n: int, low: int, high: int
    ) -> Iterator[tuple[dict[int, int], int, int]]:
        """(mesh coordinates, start, length) of the cuts of one tensor dimension that have items
        from low to high."""

        def cut(
            order: list[int], start: int, length: int, at: dict[int, int]
        ) -> Iterator[tuple[dict[int, int], int, int]]:
            if not order:
                yield at, start, length
                return
            step = -(-length // self.mesh.shape[order[0]])
            for number in range(
                max(low - start, 0) // step, (min(high - start, length) - 1) // step + 1
            ):
                first = number * step
                yield from cut(
                    order[1:], start + first, min(step, length - first), {**at, order[0]: number}
                )

        if high > low:
            yield from cut(self.order(dim), 0, n, {})


Layout = WholeLayout | BoxLayout | MeshLayout


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One tensor of a sharded component: its number is its index in the table. alias_of: number of
    the tensor whose bytes it shares; then it has no layout of its own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout | None
    alias_of: int | None = None

    @property
    def whole(self) -> Box:
        return (0,) * len(self.shape), self.shape

    @property
    def stored_nbytes(self) -> int:
        """Bytes of its own in this checkpoint: of all of it, or of the boxes that one node has."""
        shapes = (
            [box[1] for _, box in self.layout.boxes]
            if isinstance(self.layout, BoxLayout)
            else [self.shape]
        )
        return (
            0
            if self.alias_of is not None
            else sum(tensor_nbytes(self.dtype, shape) for shape in shapes)
        )


def encode_layouts(tensors: Sequence[LogicalTensor]) -> dict[str, Any]:
    """The table as plain values: {"meshes": [[shape, ranks]], "tensors": [[name, dtype, shape,
    alias, layout]]} with layout a writer's rank, [mesh number, placements, replica], or {"boxes":
    [[writer, offset, shape]]}."""
    meshes: dict[Mesh, int] = {}
    known: dict[int, Any] = {id(None): None}  # many tensors share a layout
    rows = []
    for t in tensors:
        if id(t.layout) not in known:
            layout: Any = t.layout
            if isinstance(layout, MeshLayout):
                number = meshes.setdefault(layout.mesh, len(meshes))
                known[id(layout)] = [number, " ".join(layout.placements), layout.replica]
            else:
                known[id(layout)] = layout.plain()
        rows.append([t.name, t.dtype, t.shape, t.alias_of, known[id(t.layout)]])
    return {"meshes": [[m.shape, m.ranks] for m in meshes], "tensors": rows}


def decode_layouts(
    table: dict[str, Any], world_size: int, *, holes: bool = False
) -> list[LogicalTensor]:
    """Raises ValueError, TypeError, KeyError or IndexError when the table does not make sense.
    holes: boxes need not cover their tensor, because other nodes have the rest."""
    meshes = [_mesh(shape, ranks, world_size) for shape, ranks in table["meshes"]]
    known: dict[tuple[int, str, int, int], MeshLayout] = {}  # thousands of tensors have few
    tensors = []
    for name, dtype, shape, alias, layout in table["tensors"]:
        if not isinstance(name, str) or not isinstance(dtype, str):
            raise TypeError("a tensor's name or dtype is not a text")
        size = sizes(shape, 2**57)
        made = (
            None if alias is not None else _layout(layout, meshes, size, world_size, holes, known)
        )
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {dtype!r}, which is not known")
        tensors.append(
            LogicalTensor(name, dtype, size, made, None if alias is None else whole(alias))
        )
    if len({t.name for t in tensors}) != len(tensors):
        raise ValueError("two tensors have one name")
    for t in tensors:
        if t.alias_of is not None:
            first = tensors[t.alias_of]
            if first.alias_of is not None or (first.dtype, first.shape) != (t.dtype, t.shape):
                raise ValueError(
                    f"tensor {t.name!r} is an alias of an alias, or of another kind of tensor"
                )
    return tensors


def _mesh(shape: Any, ranks: Any, world_size: int) -> Mesh:
    mesh = Mesh(
        tuple(1 + whole(n - 1, world_size) for n in shape),
        tuple(whole(r, world_size) for r in ranks),
    )
    if (
        len(mesh.shape) > DIMENSIONS
        or len(mesh.ranks) != prod(mesh.shape)
        or len(set(mesh.ranks)) != len(mesh.ranks)
    ):
        raise ValueError("a mesh's ranks do not fit its shape")
    return mesh


def _layout(
    layout: Any,
    meshes: list[Mesh],
    shape: tuple[int, ...],
    world_size: int,
    holes: bool,
    known: dict[tuple[int, str, int, int], MeshLayout],
) -> Layout:
    """known: layouts over a mesh that were made before."""
    if type(layout) is int:
        return WholeLayout(whole(layout, world_size))
    if isinstance(layout, dict):
        boxes = []
        for writer, offset, size in layout["boxes"]:
            box = tuple(whole(n) for n in offset), tuple(whole(n) for n in size)
            if not (len(box[0]) == len(box[1]) == len(shape)) or any(
                o + n > s for o, n, s in zip(*box, shape, strict=True)
            ):
                raise ValueError(f"a box at {box[0]} of {box[1]} is not inside {shape}")
            boxes.append((whole(writer, world_size), box))
        made_of = BoxLayout(tuple(boxes))
        complete = sum(volume(box[1]) for _, box in boxes) == volume(shape)
        nothing = any(not volume(box[1]) for _, box in boxes)
        if nothing or not (complete or holes) or overlapping([box for _, box in boxes]) is not None:
            raise ValueError("the boxes overlap or leave a hole")
        if len({writer for writer, _ in boxes}) != len(boxes):
            raise ValueError("a writer has two boxes of one tensor")
        return made_of
    number, placements, replica = layout
    like = whole(number), placements, whole(replica), len(shape)
    if like in known:
        return known[like]
    mesh = meshes[number]
    made = known[like] = MeshLayout(mesh, tuple(placements.split()), replica)
    words = {"R", *(f"{kind}{dim}" for kind in "Ss" for dim in range(len(shape)))}
    if (
        len(made.placements) != len(mesh.shape)
        or not words.issuperset(made.placements)
        or replica >= made.replicas
    ):
        raise ValueError(
            f"placements {placements!r}, replica {replica} do not fit the mesh or the tensor"
        )
    return made
