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

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any
from weakref import WeakKeyDictionary

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
from ..format.tensorfile import tensor_nbytes
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
    layout. structure: names, dtypes, shapes, layouts and aliases, encoded."""

    structure: bytes
    values: PlainValues
    structure_hash: bytes
    values_hash: bytes


@dataclass(frozen=True, slots=True)
class ShardTable:
    """The tensors of a sharded component as all ranks know them, numbered by their position.

    layouts: of each tensor, how the ranks of each description hold it. names: the tensors of each
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
        text = _described_structure(snapshot)
        known = text, content_hash(text)
        if snapshot.structure is not None:
            _described[snapshot.structure] = known
    values = PlainValues(snapshot.tree, snapshot.versions)
    return Description(
        known[0], values, known[1], content_hash(encode([values.tree, values.versions]))
    )


# What the same structure is described by at every save, and the hash of that.
_described: WeakKeyDictionary[Structure, tuple[bytes, bytes]] = WeakKeyDictionary()


def _described_structure(snapshot: StateSnapshot) -> bytes:
    meshes: dict[Mesh, int] = {}
    rows = []
    for leaf in snapshot.tensors:
        spec = leaf.spec
        layout: Any = None
        if isinstance(spec.layout, MeshLayout):
            mesh = meshes.setdefault(spec.layout.mesh, len(meshes))
            layout = [mesh, list(spec.layout.placements)]
        elif spec.layout == "box":
            layout = {"box": spec.box}
        rows.append([spec.name, spec.dtype, list(spec.global_shape), spec.alias_of, layout])
    return encode({"tensors": rows, "meshes": [[list(m.shape), list(m.ranks)] for m in meshes]})


def decide(reports: Sequence[StructureReport], *, spread: bool) -> StructureVerdict:
    """What to do about tables and values, from the reports of all ranks. spread: replicas share
    the writing."""
    signatures, groups, senders = {}, {}, {}
    for key in reports[0].structures:
        by_structure: dict[bytes, list[int]] = {}
        by_values: dict[tuple[bytes, bytes], list[int]] = {}
        for rank, report in enumerate(reports):
            structure = report.structures[key]
            by_structure.setdefault(structure, []).append(rank)
            by_values.setdefault((structure, report.values[key]), []).append(rank)
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


@dataclass(slots=True)
class _Claim:
    """What one description says about one tensor."""

    dtype: str
    shape: tuple[int, ...]
    tied: list[str]
    layout: Any
    ranks: list[int] = field(default_factory=list)


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
    loads: dict[Mesh | None, defaultdict[int, int]] = {}
    tensors: dict[int, LogicalTensor] = {}
    for name, found in sorted(
        claims.items(), key=lambda c: (-tensor_nbytes(c[1][0].dtype, c[1][0].shape), c[0])
    ):
        first = found[0]
        if any((c.dtype, c.shape) != (first.dtype, first.shape) for c in found):
            forms = "; ".join(f"{c.dtype} {list(c.shape)} on ranks {c.ranks[:8]}" for c in found)
            raise InvalidState(
                f"component {key!r}, key {name!r} is not one tensor: {forms}",
                component=key,
                key=name,
                ranks=sorted(rank for c in found for rank in c.ranks),
            )
        # Which of the tied names comes first may differ between ranks.
        targets = {min(c.tied, key=numbers.__getitem__) for c in found}
        alias = targets.pop() if len(targets) == 1 and name not in targets else None
        layout = None if alias is not None else _layout(key, name, found, loads, spread)
        target = None if alias is None else numbers[alias]
        tensors[numbers[name]] = LogicalTensor(name, first.dtype, first.shape, layout, target)
    return ShardTable(
        [tensors[n] for n in range(len(tensors))],
        [[(c.ranks, c.layout) for c in claims[name]] for name in numbers],
        names,
        [list(ranks) for ranks in groups],
        signature,
    )


def _claims(
    structures: Sequence[bytes], groups: Sequence[list[int]]
) -> tuple[list[list[str]], dict[str, list[_Claim]]]:
    """Names of the tensors of each structure, by its own numbers; and what is said of each name."""
    claims: dict[str, list[_Claim]] = {}
    names: list[list[str]] = []
    for text, ranks in zip(structures, groups, strict=True):
        raw = decode(text)
        meshes = [Mesh(tuple(shape), tuple(members)) for shape, members in raw["meshes"]]
        names.append([row[0] for row in raw["tensors"]])
        tied: dict[int, list[str]] = {}
        for number, row in enumerate(raw["tensors"]):
            tied.setdefault(number if row[3] is None else row[3], []).append(row[0])
        for number, (name, dtype, shape, alias, layout) in enumerate(raw["tensors"]):
            if isinstance(layout, list):
                layout = MeshLayout(meshes[layout[0]], tuple(layout[1]))
            elif layout is not None:
                layout = (tuple(layout["box"][0]), tuple(layout["box"][1]))
            claim = _Claim(
                dtype, tuple(shape), tied[number if alias is None else alias], layout, ranks
            )
            claims.setdefault(name, []).append(claim)
    return names, claims


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


def _layout(
    key: str,
    name: str,
    claims: list[_Claim],
    loads: dict[Mesh | None, defaultdict[int, int]],
    spread: bool,
) -> Layout:
    """The layout of a tensor with its writers: the replica with the least to write so far."""
    shape, dtype = claims[0].shape, claims[0].dtype
    nbytes = tensor_nbytes(dtype, shape)
    if any(isinstance(c.layout, tuple) for c in claims):
        return _boxes(key, name, claims, loads if spread else None)
    grids = {_grid(c.layout) for c in claims}
    if len(grids) > 1:
        raise InvalidState(
            f"component {key!r}, key {name!r} is cut one way on ranks {claims[0].ranks[:8]} and "
            "another way on other ranks; "
            "its boxes overlap",
            component=key,
            key=name,
            ranks=claims[-1].ranks,
        )
    best: tuple[int, defaultdict[int, int], int, _Claim] | None = None
    absent: set[int] = set()
    for claim in claims:
        writers: Sequence[int] = claim.ranks
        if claim.layout is not None:
            writers = range(claim.layout.replicas)
            if lacking := _lacking(claim.layout, claims):
                absent |= lacking
                lost = {
                    claim.layout.replica_at(at)
                    for rank in lacking
                    if (at := claim.layout.mesh.coordinates(rank)) is not None
                    and volume(claim.layout.box_at(shape, at)[1])
                }
                writers = [r for r in writers if r not in lost]
        if writers:
            # Bytes by rank, or by replica of one mesh: what each has to write so far.
            load = loads.setdefault(
                None if claim.layout is None else claim.layout.mesh, defaultdict(int)
            )
            writer = min(writers, key=load.__getitem__) if spread else writers[0]
            if best is None or (spread and load[writer] < best[0]):
                best = load[writer], load, writer, claim
    if best is None:
        raise InvalidState(
            f"component {key!r}, key {name!r}: ranks {sorted(absent)[:8]} should hold a part of "
            "it, and do not have the key",
            component=key,
            key=name,
            ranks=sorted(absent),
        )
    _, load, writer, claim = best
    load[writer] += nbytes
    return (
        WholeLayout(writer)
        if claim.layout is None
        else MeshLayout(claim.layout.mesh, claim.layout.placements, writer)
    )


def _lacking(layout: MeshLayout, claims: Sequence[_Claim]) -> set[int]:
    """The ranks of a layout's mesh that do not have the key, or hold another box of it by a layout
    of their own."""
    return set(layout.mesh.ranks).difference(*(c.ranks for c in claims if c.layout == layout))


def _grid(layout: MeshLayout | None) -> tuple[tuple[int, ...], ...]:
    """How a layout cuts each tensor dimension: equal grids have equal boxes."""
    if layout is None:
        return ()
    dims = sorted({int(p[1:]) for p in layout.placements if p != "R"})
    cuts = tuple(
        (dim, *(size for m in layout.order(dim) if (size := layout.mesh.shape[m]) > 1))
        for dim in dims
    )
    return tuple(cut for cut in cuts if len(cut) > 1)


def _boxes(
    key: str,
    name: str,
    claims: list[_Claim],
    loads: dict[Mesh | None, defaultdict[int, int]] | None,
) -> BoxLayout:
    """Boxes that ranks named themselves: each distinct one once, together exactly the tensor."""
    shape = claims[0].shape
    holders: dict[Box, list[int]] = {}
    for claim in claims:
        if not isinstance(claim.layout, tuple):
            raise InvalidState(
                f"component {key!r}, key {name!r} is a Shard on some ranks and not on ranks "
                f"{claim.ranks[:8]}",
                component=key,
                key=name,
                ranks=claim.ranks,
            )
        if volume(claim.layout[1]):
            holders.setdefault(claim.layout, []).extend(claim.ranks)
    boxes = sorted(holders)
    load = defaultdict(int) if loads is None else loads.setdefault(None, defaultdict(int))
    held: dict[Box, int] = {}
    for box in boxes:  # the holder with the least to write so far
        held[box] = rank = min(holders[box], key=lambda r: (load[r] if loads is not None else 0, r))
        load[rank] += tensor_nbytes(claims[0].dtype, box[1])
    if pair := overlapping(boxes):
        box, other = sorted(pair)
        raise InvalidState(
            f"component {key!r}, key {name!r}: the box at {box[0]} of {box[1]} on rank "
            f"{held[box]} and the one at "
            f"{other[0]} of {other[1]} on rank {held[other]} overlap",
            component=key,
            key=name,
            ranks=[held[box], held[other]],
        )
    missing = volume(shape) - sum(volume(box[1]) for box in boxes)
    if missing:
        raise InvalidState(
            f"component {key!r}, key {name!r}: the ranks hold boxes "
            f"{[list(map(list, b)) for b in boxes[:8]]} of a tensor of "
            f"shape {shape}; {missing} items are on no rank",
            component=key,
            key=name,
            ranks=sorted(held.values()),
        )
    return BoxLayout(tuple((held[box], box) for box in boxes))


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
