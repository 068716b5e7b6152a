"""One logical state over all ranks: from what each rank holds to the one table of tensors, layouts
and writers.

Ranks with equal structure and layout (all ranks of an FSDP job, all ranks of a pipeline stage)
describe it in equal bytes, so only the distinct descriptions travel, and only when they are not
those of the save before. From them every rank computes the same table without talking.

A save asks in this order: `report` on every rank, `decide` on rank 0; where that says so,
`descriptions` on every rank; then `ShardTables.table` on every rank. Plain values change from save
to save and are put together apart from the table: `values_of` on every rank, `merged_values` on
rank 0.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from reprlib import Repr
from typing import Any
from weakref import WeakKeyDictionary

import msgpack

from ..errors import InvalidState, ReplicationMismatch
from ..format.digest import content_hash
from ..format.layout import (
    Box,
    BoxLayout,
    Layout,
    LogicalTensor,
    Mesh,
    MeshLayout,
    WholeLayout,
    overlapping,
    volume,
)
from ..format.tensorfile import DTYPES, tensor_nbytes
from ..format.values import Opaque, TensorRef, decode, encode, join_path, keyed
from ..ranks.messages import message
from ..state.tree import StateSnapshot, Structure


@message
@dataclass(frozen=True, slots=True)
class PlainValues:
    """The values of a component that are no tensors, encoded. versions: what torch says of modules
    beside their state; None without modules."""

    tree: bytes
    versions: bytes | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """What a rank says of a sharded component, without anything that differs between ranks of one
    layout. structure: names, dtypes, shapes, layouts and aliases, encoded. values_hash: of values
    and of the names that they refer to by number."""

    structure: bytes
    values: PlainValues
    structure_hash: bytes
    values_hash: bytes


@dataclass(frozen=True, slots=True)
class ShardTable:
    """The tensors of a sharded component as all ranks know them, numbered by their position.

    layouts: of each tensor but aliases, how the ranks of each description hold it: of tensors that
    are held alike the same object. names: the tensors of each
    description, by its own numbers. groups: the ranks of each description. signature: of all that
    the table was computed from.
    """

    tensors: list[LogicalTensor]
    layouts: list[list[tuple[list[int], Any]]]
    names: list[list[str]] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    signature: bytes = b""


@message
@dataclass(frozen=True, slots=True)
class StructureReport:
    """What a rank says of its sharded components, by key: hashes of structure and values, and the
    signature of the table that it has kept."""

    structures: dict[str, bytes]
    values: dict[str, bytes]
    kept: dict[str, bytes]


@message
@dataclass(frozen=True, slots=True)
class StructureVerdict:
    """What rank 0 makes of the reports.

    signatures: of the table of each component. groups: of components whose table some rank lacks,
    the ranks of each structure. senders: of components whose values are not known to be equal on
    all ranks, the lowest rank of those that have equal ones.
    """

    signatures: dict[str, bytes]
    groups: dict[str, list[list[int]]]
    senders: dict[str, list[list[int]]]

    @property
    def incomplete(self) -> bool:
        """Whether descriptions have to travel before every rank can compute its tables."""
        return any(len(ranks) > 1 for ranks in self.groups.values())


def describe(snapshot: StateSnapshot) -> Description:
    """What this rank says of a sharded component."""
    known = None if snapshot.structure is None else _described.get(snapshot.structure)
    if known is None:
        rows, boxes = _described_structure(snapshot)
        structure = bytes(msgpack.packb([rows, boxes]))
        known = structure, content_hash(structure), content_hash(rows)
        if snapshot.structure is not None:
            _described[snapshot.structure] = known
    structure, structure_hash, rows_hash = known
    values = PlainValues(snapshot.tree, snapshot.versions)
    values_hash = content_hash(encode([values.tree, values.versions, rows_hash]))
    return Description(structure, values, structure_hash, values_hash)


# What the same structure is described by at every save, the hash of that, and that of its rows.
_described: WeakKeyDictionary[Structure, tuple[bytes, bytes, bytes]] = WeakKeyDictionary()


def _described_structure(snapshot: StateSnapshot) -> tuple[bytes, bytes]:
    """Rows of tensors, the same on ranks whose slices alone differ, so that they are read once; and
    offset and shape of each slice, in order of the rows."""
    meshes: dict[Mesh, int] = {}
    known: dict[int, Any] = {}  # what stands for a layout, by its id
    rows, boxes = [], []
    for spec in (leaf.spec for leaf in snapshot.tensors):
        layout: Any = spec.layout
        if isinstance(layout, MeshLayout):
            if id(layout) not in known:
                number = meshes.setdefault(layout.mesh, len(meshes))
                known[id(layout)] = [number, layout.placements]
            layout = known[id(layout)]
        elif layout == "box" and spec.box is not None:
            boxes += [*spec.box[0], *spec.box[1]]
        rows.append([spec.name, spec.dtype, spec.global_shape, spec.alias_of, layout])
    described = {"tensors": rows, "meshes": [[m.shape, m.ranks] for m in meshes]}
    text = msgpack.packb(described, unicode_errors="surrogatepass")
    return bytes(text), struct.pack(f"<{len(boxes)}q", *boxes)


def decide(reports: Sequence[StructureReport], *, spread: bool) -> StructureVerdict:
    """What to do about tables and values, from the reports of all ranks. spread: replicas share
    the writing."""
    signatures, groups, senders = {}, {}, {}
    for key in reports[0].structures:
        by_structure: dict[bytes, list[int]] = {}
        by_values: dict[bytes, list[int]] = {}
        for rank, report in enumerate(reports):
            by_structure.setdefault(report.structures[key], []).append(rank)
            by_values.setdefault(report.values[key], []).append(rank)
        of_table = [spread, [[each, ranks] for each, ranks in by_structure.items()]]
        signatures[key] = content_hash(encode(of_table))
        if any(report.kept.get(key) != signatures[key] for report in reports):
            groups[key] = list(by_structure.values())
        if len(by_values) > 1:
            senders[key] = list(by_values.values())
    return StructureVerdict(signatures, groups, senders)


def descriptions(
    mine: Mapping[str, Description], verdict: StructureVerdict, rank: int
) -> dict[str, bytes]:
    """The structures that this rank sends: those that it is the lowest rank to have."""
    return {
        key: mine[key].structure
        for key, groups in verdict.groups.items()
        if len(groups) > 1 and any(ranks[0] == rank for ranks in groups)
    }


def structures_of(
    sent: Sequence[Mapping[str, bytes]], verdict: StructureVerdict
) -> dict[str, list[bytes]]:
    """By component, the structure of each group, from what all ranks have sent."""
    return {
        key: [sent[ranks[0]][key] for ranks in groups]
        for key, groups in verdict.groups.items()
        if len(groups) > 1
    }


class ShardTables:
    """The tables of the sharded components of the last save on this rank, which stay while the
    structure does. spread: replicas share the writing; else the lowest rank writes."""

    def __init__(self, *, spread: bool = True) -> None:
        self.spread = spread
        self._kept: dict[str, ShardTable] = {}

    def report(self, mine: Mapping[str, Description]) -> StructureReport:
        """What this rank says before the ranks decide."""
        return StructureReport(
            {key: each.structure_hash for key, each in mine.items()},
            {key: each.values_hash for key, each in mine.items()},
            {key: self._kept[key].signature for key in mine if key in self._kept},
        )

    def update(
        self,
        mine: Mapping[str, Description],
        verdict: StructureVerdict,
        structures: Mapping[str, list[bytes]],
    ) -> dict[str, ShardTable]:
        """The tables of all components of this save. structures: of those of several groups.

        Pure, so every rank has the same tables, or the same error. Raises InvalidState (boxes that
        overlap or leave holes, layouts that do not fit together) with key and ranks.
        """
        for key, groups in verdict.groups.items():
            texts = structures[key] if len(groups) > 1 else [mine[key].structure]
            self._kept[key] = table_of(
                key, texts, groups, spread=self.spread, signature=verdict.signatures[key]
            )
        self._kept = {key: self._kept[key] for key in mine}
        return dict(self._kept)


def values_of(
    mine: Mapping[str, Description], verdict: StructureVerdict, rank: int
) -> dict[str, PlainValues]:
    """The plain values that this rank sends, because other ranks have others."""
    return {
        key: mine[key].values
        for key, groups in verdict.senders.items()
        if any(ranks[0] == rank for ranks in groups)
    }


def merged_values(
    tables: Mapping[str, ShardTable],
    verdict: StructureVerdict,
    sent: Sequence[Mapping[str, PlainValues]],
) -> dict[str, PlainValues]:
    """By component, the values of all ranks put together, from what all ranks have sent: nothing of
    components whose values are equal everywhere.

    Raises ReplicationMismatch where ranks have different values for one key.
    """
    return {
        key: _merged_values(key, tables[key], groups, [sent[ranks[0]][key] for ranks in groups])
        for key, groups in verdict.senders.items()
    }


def _merged_values(
    key: str, table: ShardTable, groups: Sequence[list[int]], values: Sequence[PlainValues]
) -> PlainValues:
    tree: Any = None
    for ranks, each in zip(groups, values, strict=True):
        names = next(n for n, g in zip(table.names, table.groups, strict=True) if ranks[0] in g)
        other = decode(
            each.tree,
            lambda ref, names=names: _Named(names[ref.index], ref.numpy),  # type: ignore[misc]
            opaque=True,
        )
        tree = other if ranks is groups[0] else _merged(key, tree, other, ranks, ())
    numbers = {tensor.name: number for number, tensor in enumerate(table.tensors)}
    encoded = encode(
        tree, lambda _, x: TensorRef(numbers[x.name], x.numpy) if isinstance(x, _Named) else None
    )
    return PlainValues(encoded, _merged_versions([each.versions for each in values]))


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    numpy: bool


def _merged(key: str, a: Any, b: Any, ranks: list[int], path: tuple[Any, ...]) -> Any:
    """The union of two nested states; what both have must be equal."""
    if type(a) is type(b) and isinstance(a, dict):
        result = dict(a)
        for name, item in b.items():
            result[name] = _merged(key, a[name], item, ranks, (*path, name)) if name in a else item
        return a if len(result) == len(a) and all(result[n] is a[n] for n in a) else type(a)(result)
    if type(a) is type(b) and isinstance(a, list | tuple) and len(a) == len(b):
        return type(a)(
            _merged(key, x, y, ranks, (*path, i)) for i, (x, y) in enumerate(zip(a, b, strict=True))
        )
    if (
        type(a) is type(b) is Opaque
        and a.codec == b.codec
        and keyed(a) is not None
        and keyed(b) is not None
    ):
        return Opaque(a.codec, _merged(key, a.payload, b.payload, ranks, path))
    if type(a) is type(b) is _Named:
        return a
    as_names = lambda _, x: TensorRef(0) if isinstance(x, _Named) else None  # noqa: E731
    if a is not b and encode(a, as_names) != encode(b, as_names):
        name = join_path(path) or "value"
        lower, here = value_in_words(a), value_in_words(b)
        raise ReplicationMismatch(
            f"component {key!r} is SHARDED, and its plain value {name!r} is {here} on "
            f"{ranks_in_words(ranks)} and {lower} on "
            "lower ranks; values that are each rank's own belong into a PER_RANK component",
            component=key,
            keys=[name],
            ranks=ranks,
            details={name: {"lower ranks": lower, f"rank {ranks[0]}": here}},
        )
    return a


def _merged_versions(found: Sequence[bytes | None]) -> bytes | None:
    """What the ranks say of the modules that each has."""
    tables: dict[str, dict[str, Any]] = {}
    for encoded in found:
        for path, modules in (decode(encoded) if encoded is not None else {}).items():
            tables.setdefault(path, {}).update(modules)
    return encode(tables) if tables else None


def table_of(
    key: str,
    structures: Sequence[bytes],
    groups: Sequence[list[int]],
    *,
    spread: bool = True,
    signature: bytes = b"",
) -> ShardTable:
    """The table of all tensors of a component with their writers; groups[i] are the ranks of
    structures[i]. Pure. Raises InvalidState, as `ShardTables.update` says."""
    names, claims = _claims(structures, groups)
    numbers = {name: number for number, name in enumerate(claims)}
    loads: dict[Mesh | None, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    # Large states have few forms: of one form all is alike but for who has the least to write.
    forms: dict[Any, _Form] = {}
    tensors: dict[int, LogicalTensor] = {}
    layouts: dict[int, list[tuple[list[int], Any]]] = {}
    sizes = {name: tensor_nbytes(found[0].dtype, found[0].shape) for name, found in claims.items()}
    for name in sorted(claims, key=lambda name: (-sizes[name], name)):
        found, number = claims[name], numbers[name]
        dtype, shape = found[0].dtype, found[0].shape
        if len(found) > 1:
            _check_one_tensor(key, name, found)
        # Which of the tied names comes first may differ between ranks.
        targets = {c.tied[0] if len(c.tied) == 1 else _first(c.tied, numbers) for c in found}
        if len(targets) == 1 and name not in targets:
            tensors[number] = LogicalTensor(name, dtype, shape, None, numbers[targets.pop()])
            layouts[number] = []
            continue
        like = shape, *((c.by, c.layout) for c in found)
        if like not in forms:
            forms[like] = _form(key, name, found, loads)
        form = forms[like]
        layout = form.layout(DTYPES[dtype].itemsize, spread)
        tensors[number] = LogicalTensor(name, dtype, shape, layout)
        layouts[number] = form.layouts
    return ShardTable(
        [tensors[n] for n in range(len(tensors))],
        [layouts[n] for n in range(len(tensors))],
        names,
        [list(ranks) for ranks in groups],
        signature,
    )


def _first(tied: Sequence[str], numbers: Mapping[str, int]) -> str:
    return min(tied, key=numbers.__getitem__)


@dataclass(frozen=True, slots=True, eq=False)
class _Holders:
    """The ranks of descriptions with the same rows: of each one, and of all."""

    members: list[list[int]]
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class _Claim:
    """What descriptions with the same rows say about one tensor. by: the ranks that have
    them. layout: None for all of it; of slices the boxes of all descriptions, one
    after the other, as they were sent."""

    dtype: str
    shape: tuple[int, ...]
    tied: list[str]
    by: _Holders
    layout: MeshLayout | bytes | None

    @property
    def ranks(self) -> list[int]:
        return self.by.ranks


def _claims(
    structures: Sequence[bytes], groups: Sequence[list[int]]
) -> tuple[list[list[str]], dict[str, list[_Claim]]]:
    """Names of the tensors of each structure, by its own numbers; and what is said of each name."""
    alike: dict[bytes, list[int]] = {}  # the structures with the same rows
    boxes: list[bytes] = []
    for number, structure in enumerate(structures):
        text, slices = msgpack.unpackb(structure)
        alike.setdefault(text, []).append(number)
        boxes.append(slices)
    claims: dict[str, list[_Claim]] = {}
    names: list[list[str]] = [[] for _ in structures]
    for text, numbers in alike.items():
        raw = msgpack.unpackb(text, unicode_errors="surrogatepass")
        rows = raw["tensors"]
        meshes = [Mesh(tuple(shape), tuple(members)) for shape, members in raw["meshes"]]
        layouts: dict[tuple[Any, ...], MeshLayout] = {}
        for number in numbers:
            names[number] = [row[0] for row in rows]
        tied: dict[int, list[str]] = {}
        for number, row in enumerate(rows):
            tied.setdefault(number if row[3] is None else row[3], []).append(row[0])
        members, at = [list(groups[n]) for n in numbers], 0
        by = _Holders(members, [rank for ranks in members for rank in ranks])
        for number, (name, dtype, shape, alias, held) in enumerate(rows):
            layout: Any = None
            if held == "box":
                start, at = at, at + 16 * len(shape)
                layout = b"".join([boxes[n][start:at] for n in numbers])
            elif held is not None:
                like = held[0], *held[1]
                if like not in layouts:
                    layouts[like] = MeshLayout(meshes[held[0]], tuple(held[1]))
                layout = layouts[like]
            names_tied = tied[number if alias is None else alias]
            claim = _Claim(dtype, tuple(shape), names_tied, by, layout)
            claims.setdefault(name, []).append(claim)
    return names, claims


def _check_one_tensor(key: str, name: str, claims: Sequence[_Claim]) -> None:
    first = claims[0]
    if any((c.dtype, c.shape) != (first.dtype, first.shape) for c in claims):
        forms = "; ".join(f"{c.dtype} {list(c.shape)} on ranks {c.ranks[:8]}" for c in claims)
        raise _invalid(key, name, f" is not one tensor: {forms}", sorted(_ranks_of(claims)))


def _ranks_of(claims: Sequence[_Claim]) -> list[int]:
    return [rank for claim in claims for rank in claim.ranks]


def _invalid(key: str, name: str, reason: str, ranks: list[int]) -> InvalidState:
    text = f"component {key!r}, key {name!r}{reason}"
    return InvalidState(text, component=key, key=name, ranks=ranks)


@dataclass(frozen=True, slots=True)
class _Writers:
    """Those that hold a part alike, each of which could write it: ranks, or replicas of a mesh
    layout. load: bytes that each of them has to write so far. queue: a heap of (load as it was,
    number in `of`). made: layouts, by writer."""

    of: Sequence[int]
    load: defaultdict[int, int]
    layout: MeshLayout | None = None
    queue: list[tuple[int, int]] = field(default_factory=list)
    made: dict[int, Layout] = field(default_factory=dict)

    def least(self, spread: bool) -> int:
        """The first with the least to write; the first of all where the work is not spread."""
        if not spread:
            return self.of[0]
        if not self.queue:
            self.queue.extend((0, number) for number in range(len(self.of)))
        while True:  # loads only grow, so whoever is first and has what it had has the least
            load, number = self.queue[0]
            writer = self.of[number]
            if load == self.load[writer]:
                return writer
            heapreplace(self.queue, (self.load[writer], number))

    def layout_of(self, writer: int) -> Layout:
        if writer not in self.made:
            of = self.layout
            self.made[writer] = (
                WholeLayout(writer) if of is None else MeshLayout(of.mesh, of.placements, writer)
            )
        return self.made[writer]


@dataclass(slots=True)
class _Form:
    """How the ranks hold all tensors of one shape about which descriptions say the same.

    layouts: as in ShardTable. choices: who may write all of it; boxes: where it is cut without a
    rule, each box, its items, and those that may write it. last: the layout that the boxes had
    before.
    """

    shape: tuple[int, ...]
    layouts: list[tuple[list[int], Any]]
    choices: Sequence[_Writers] = ()
    boxes: Sequence[tuple[Box, int, _Writers]] = ()
    last: BoxLayout | None = None

    def layout(self, itemsize: int, spread: bool) -> Layout:
        """That of one more tensor, with the writer, or of each box the writer, that has the least
        to write so far. spread: see ShardTables."""
        if not self.choices:
            return self._box_layout(itemsize, spread)
        best: tuple[int, int, _Writers] | None = None
        for writers in self.choices:
            writer = writers.least(spread)
            if best is None or (spread and writers.load[writer] < best[0]):
                best = writers.load[writer], writer, writers
        assert best is not None
        _, writer, writers = best
        writers.load[writer] += itemsize * volume(self.shape)
        return writers.layout_of(writer)

    def _box_layout(self, itemsize: int, spread: bool) -> BoxLayout:
        written = []
        for box, items, writers in self.boxes:
            writer = writers.of[0] if len(writers.of) == 1 else writers.least(spread)
            writers.load[writer] += itemsize * items
            written.append((writer, box))
        if self.last is None or [*self.last.boxes] != written:
            self.last = BoxLayout(tuple(written))
        return self.last


def _form(
    key: str,
    name: str,
    claims: Sequence[_Claim],
    loads: Mapping[Mesh | None, defaultdict[int, int]],
) -> _Form:
    """Raises InvalidState for what is not one whole tensor."""
    if any(isinstance(c.layout, bytes) for c in claims):
        return _boxes(key, name, claims, loads[None])
    shape = claims[0].shape
    if len({_grid(c.layout) for c in claims}) > 1:
        what = f" is cut one way on ranks {claims[0].ranks[:8]} and another way on other ranks"
        raise _invalid(key, name, f"{what}; its boxes overlap", claims[-1].ranks)
    choices = []
    absent: set[int] = set()
    for claim in claims:
        layout, mesh = None, None
        writers: Sequence[int] = claim.ranks
        if isinstance(claim.layout, MeshLayout):
            layout, mesh = claim.layout, claim.layout.mesh
            writers = range(layout.replicas)
            if lacking := _lacking(layout, claims):
                absent |= lacking
                lost = {
                    layout.replica_at(at)
                    for rank in lacking
                    if (at := mesh.coordinates(rank)) is not None
                    and volume(layout.box_at(shape, at)[1])
                }
                writers = [r for r in writers if r not in lost]
        if writers:
            # Bytes by rank, or by replica of one mesh: what each has to write so far.
            choices.append(_Writers(writers, loads[mesh], layout))
    if not choices:
        what = f": ranks {sorted(absent)[:8]} should hold a part of it, and do not have the key"
        raise _invalid(key, name, what, sorted(absent))
    return _Form(shape, [(c.ranks, c.layout) for c in claims], choices)


def _lacking(layout: MeshLayout, claims: Sequence[_Claim]) -> set[int]:
    """The ranks of a layout's mesh that do not have the key, or hold another box of it by a layout
    of their own."""
    return set(layout.mesh.ranks).difference(*(c.ranks for c in claims if c.layout == layout))


def _grid(layout: Any) -> tuple[tuple[int, ...], ...]:
    """How a layout cuts each tensor dimension: equal grids have equal boxes."""
    if layout is None:
        return ()
    dims = sorted({int(p[1:]) for p in layout.placements if p != "R"})
    cuts = tuple(
        (dim, *(size for m in layout.order(dim) if (size := layout.mesh.shape[m]) > 1))
        for dim in dims
    )
    return tuple(cut for cut in cuts if len(cut) > 1)


def _boxes(key: str, name: str, claims: Sequence[_Claim], load: defaultdict[int, int]) -> _Form:
    """Boxes that ranks named themselves: each distinct one once, together exactly the tensor."""
    shape = claims[0].shape
    holders: dict[Box, list[int]] = {}
    for claim in claims:
        if not isinstance(claim.layout, bytes):
            what = f" is a Shard on some ranks and not on ranks {claim.ranks[:8]}"
            raise _invalid(key, name, what, claim.ranks)
        width = 2 * len(shape)
        found = struct.unpack(f"<{len(claim.layout) // 8}q", claim.layout)
        for number, ranks in enumerate(claim.by.members):
            row = found[number * width : (number + 1) * width]
            holders.setdefault((row[: len(shape)], row[len(shape) :]), []).extend(ranks)
    boxes = sorted(box for box in holders if volume(box[1]))
    if pair := overlapping(boxes):
        box, other = sorted(pair)
        ranks = [min(holders[box]), min(holders[other])]
        first = f"the box at {box[0]} of {box[1]} on rank {ranks[0]}"
        second = f"the one at {other[0]} of {other[1]} on rank {ranks[1]}"
        raise _invalid(key, name, f": {first} and {second} overlap", ranks)
    missing = volume(shape) - sum(volume(box[1]) for box in boxes)
    if missing:
        held = f"the ranks hold boxes {[list(map(list, b)) for b in boxes[:8]]} of a tensor"
        what = f": {held} of shape {shape}; {missing} items are on no rank"
        raise _invalid(key, name, what, sorted({min(holders[box]) for box in boxes}))
    writers = [(box, volume(box[1]), _Writers(sorted(holders[box]), load)) for box in boxes]
    return _Form(shape, [(ranks, box) for box, ranks in holders.items()], boxes=writers)


def holders_of(
    layouts: Sequence[tuple[list[int], Any]], shape: tuple[int, ...], box: Box, rank: int
) -> tuple[int, ...]:
    """All ranks that hold `box`, which `rank` holds, of one tensor."""
    holders: set[int] = set()
    for ranks, layout in layouts:
        if layout is None:
            holders.update(ranks)
        elif isinstance(layout, tuple):
            if layout == box:
                holders.update(ranks)
        else:
            for at, held in layout.cells(shape, box):
                if held == box:
                    # Not every rank of the mesh need have the key.
                    holders.update(
                        {
                            layout.holder(at, replica) for replica in range(layout.replicas)
                        }.intersection(ranks)
                    )
    return tuple(sorted(holders | {rank}))


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def value_in_words(value: Any, *, typed: bool = True) -> str:
    """A plain value, shortened, and its type, for people."""
    text = _SHORT.repr(value)
    return f"{text} ({type(value).__name__})" if typed else text


def ranks_in_words(ranks: Sequence[int]) -> str:
    """The first of some ranks, for people."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
