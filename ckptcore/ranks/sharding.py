"""One logical state over all ranks: from what each rank holds to the one table of tensors, layouts
and writers.

Ranks with equal structure and layout (all ranks of an FSDP job, all ranks of a pipeline stage)
describe it in equal bytes, so only the distinct descriptions travel. From them every rank computes
the same table without talking.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import InvalidState, ReplicationMismatch
from ..format.codecs import Opaque, keyed
from ..format.digest import combined_digest, content_digest, content_hash
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
from ..format.values import TensorRef, decode, encode, join_path
from ..state.component import StateComponent, ValidationLevel
from ..state.tree import Captured
from .communicator import Communicator
from .replication import distances, in_words, replica_digest, short, some_keys, take_fingerprints

__all__ = ["ShardedState", "agree_layouts", "merge_descriptions", "validate_shards"]


@dataclass(slots=True)
class ShardedState:
    """A sharded component as all ranks know it. Tensors are numbered by their place in `tensors`,
    by which the merged `tree` refers to them. layouts: per tensor, how the ranks of each
    description hold it."""

    tree: bytes
    tensors: list[LogicalTensor]
    layouts: list[list[tuple[list[int], Any]]]
    versions: bytes | None = None


def agree_layouts(
    comm: Communicator, captured: Mapping[str, Captured], *, spread: bool = True
) -> dict[str, ShardedState]:
    """The merged state of every component in `captured`; `spread`: replicas share the writing.

    Raises InvalidState (boxes that overlap or leave holes, layouts that do not fit together) and
    ReplicationMismatch (plain values that differ between ranks), with key and ranks, on every rank.
    """
    if not captured:
        return {}
    mine = {key: _describe(state) for key, state in captured.items()}

    def distinct(found: list[dict[str, str]]) -> dict[str, list[list[int]]]:
        result = {}
        for key in mine:
            ranks: dict[str, list[int]] = {}
            for rank, digests in enumerate(found):
                ranks.setdefault(digests[key], []).append(rank)
            result[key] = list(ranks.values())
        return result

    groups = comm.together(
        "layouts", lambda: {k: content_digest(d) for k, d in mine.items()}, distinct
    )
    texts = {key: [mine[key]] for key in mine}
    if any(len(ranks) > 1 for ranks in groups.values()):

        def send() -> dict[str, bytes]:
            return {k: mine[k] for k in mine if any(ranks[0] == comm.rank for ranks in groups[k])}

        def collect(found: list[dict[str, bytes]]) -> dict[str, list[bytes]]:
            return {key: [found[ranks[0]][key] for ranks in groups[key]] for key in groups}

        texts = comm.together("describe layouts", send, collect)

    merged: dict[str, ShardedState] = {}

    def merge() -> None:
        for key in mine:
            merged[key] = merge_descriptions(key, texts[key], groups[key], spread=spread)

    comm.together("merge layouts", merge, lambda _: None)
    return merged


def _describe(state: Captured) -> bytes:
    """A component's structure, values and layouts, without anything that differs between ranks of
    one layout."""
    meshes: dict[Mesh, int] = {}
    rows = []
    for tensor in state.tensors:
        part = tensor.part
        layout: Any = None
        if isinstance(part.layout, MeshLayout):
            layout = [
                meshes.setdefault(part.layout.mesh, len(meshes)),
                list(part.layout.placements),
            ]
        elif part.layout == "box":
            layout = {"box": part.box}
        rows.append([tensor.name, tensor.dtype, list(part.shape), tensor.alias_of, layout])
    # The table by itself: it stays from save to save, while values (steps, learning rates) change.
    table = encode({"tensors": rows, "meshes": [[list(m.shape), list(m.ranks)] for m in meshes]})
    return encode({"tree": state.tree, "table": table, "versions": state.versions})


@dataclass(slots=True)
class _Claim:
    """What one description says about one tensor."""

    dtype: str
    shape: tuple[int, ...]
    tied: list[str]
    layout: Any
    ranks: list[int] = field(default_factory=list)


def merge_descriptions(
    key: str, texts: Sequence[bytes], groups: Sequence[list[int]], *, spread: bool = True
) -> ShardedState:
    """Put distinct descriptions together; groups[i] are the ranks of texts[i]. Pure: equal inputs,
    equal tables."""
    raw = [decode(text) for text in texts]
    table = _table(key, tuple(r["table"] for r in raw), tuple(map(tuple, groups)), spread)
    if len(raw) == 1:  # its tensors are numbered as they are in the table
        return ShardedState(raw[0]["tree"], table.tensors, table.layouts, raw[0]["versions"])
    trees = [
        decode(r["tree"], lambda ref, names=names: _Named(names[ref.index], ref.numpy), opaque=True)  # type: ignore[misc]
        for r, names in zip(raw, table.names, strict=True)
    ]
    tree = trees[0]
    for other, ranks in zip(trees[1:], groups[1:], strict=True):
        tree = _merged(key, tree, other, ranks, ())
    numbers = {tensor.name: number for number, tensor in enumerate(table.tensors)}
    encoded = encode(
        tree, lambda _, x: TensorRef(numbers[x.name], x.numpy) if isinstance(x, _Named) else None
    )
    return ShardedState(
        encoded, table.tensors, table.layouts, _merged_versions([r["versions"] for r in raw])
    )


def _merged_versions(found: Sequence[bytes | None]) -> bytes | None:
    """What the ranks say of the modules that each has."""
    tables: dict[str, dict[str, Any]] = {}
    for encoded in found:
        for path, modules in (decode(encoded) if encoded is not None else {}).items():
            tables.setdefault(path, {}).update(modules)
    return encode(tables) if tables else None


class _Table(NamedTuple):
    """What distinct descriptions say of tensors. names: those of each description, by its own
    numbers."""

    tensors: list[LogicalTensor]
    layouts: list[list[tuple[list[int], Any]]]
    names: list[list[str]]


@lru_cache(maxsize=16)
def _table(
    key: str, tables: tuple[bytes, ...], groups: tuple[tuple[int, ...], ...], spread: bool
) -> _Table:
    """The table of all tensors with their writers. A training run asks for the same one at every
    save."""
    claims: dict[str, list[_Claim]] = {}
    named: list[list[str]] = []
    for text, members in zip(tables, groups, strict=True):
        raw, ranks = decode(text), list(members)
        meshes = [Mesh(tuple(shape), tuple(members)) for shape, members in raw["meshes"]]
        named.append([row[0] for row in raw["tensors"]])
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
    numbers = {name: number for number, name in enumerate(claims)}
    loads: dict[Mesh | None, defaultdict[int, int]] = {}
    tensors: dict[int, LogicalTensor] = {}
    for name, found in sorted(
        claims.items(), key=lambda c: (-tensor_nbytes(c[1][0].dtype, c[1][0].shape), c[0])
    ):
        first = found[0]
        if any((c.dtype, c.shape) != (first.dtype, first.shape) for c in found):
            said = "; ".join(f"{c.dtype} {list(c.shape)} on ranks {c.ranks[:8]}" for c in found)
            raise InvalidState(
                f"component {key!r}, key {name!r} is not one tensor: {said}",
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
    held = [[(c.ranks, c.layout) for c in claims[name]] for name in numbers]
    return _Table([tensors[n] for n in range(len(tensors))], held, named)


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
        lower, here = short(a), short(b)
        raise ReplicationMismatch(
            f"component {key!r} is SHARDED, and its plain value {name!r} is {here} on "
            f"{_ranks(ranks)} and {lower} on "
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
        places: Sequence[int] = claim.ranks
        if claim.layout is not None:
            places = range(claim.layout.replicas)
            if lacking := _lacking(claim.layout, claims):
                absent |= lacking
                lost = {
                    claim.layout.replica_at(at)
                    for rank in lacking
                    if (at := claim.layout.mesh.coordinates(rank)) is not None
                    and volume(claim.layout.box_at(shape, at)[1])
                }
                places = [r for r in places if r not in lost]
        if places:
            # Bytes by rank, or by replica of one mesh: what each has to write so far.
            load = loads.setdefault(
                None if claim.layout is None else claim.layout.mesh, defaultdict(int)
            )
            place = min(places, key=load.__getitem__) if spread else places[0]
            if best is None or (spread and load[place] < best[0]):
                best = load[place], load, place, claim
    if best is None:
        raise InvalidState(
            f"component {key!r}, key {name!r}: ranks {sorted(absent)[:8]} should hold a part of "
            "it, and do not have the key",
            component=key,
            key=name,
            ranks=sorted(absent),
        )
    _, load, place, claim = best
    load[place] += nbytes
    return (
        WholeLayout(place)
        if claim.layout is None
        else MeshLayout(claim.layout.mesh, claim.layout.placements, place)
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
            for at, held in layout.places(shape, box):
                if held == box:
                    # Not every rank of the mesh need have the key.
                    holders.update(
                        {
                            layout.holder(at, replica) for replica in range(layout.replicas)
                        }.intersection(ranks)
                    )
    return tuple(sorted(holders | {rank}))


def validate_shards(
    comm: Communicator,
    components: Sequence[StateComponent],
    captured: Mapping[str, Captured],
    merged: Mapping[str, ShardedState],
) -> dict[tuple[str, int], bytes]:
    """Compare the replicas inside sharded components. Raises ReplicationMismatch on all ranks, with
    keys and ranks.

    Returns the chunk digests that were computed on the way, by component and tensor number.
    """
    known: dict[tuple[str, int], bytes] = {}
    checked = [c for c in components if c.key in merged and c.validated is not ValidationLevel.NONE]
    if not checked or comm.world_size == 1:
        return {}
    mine: dict[str, dict[str, list[Any]]] = {}

    def summary() -> dict[str, str]:
        take_fingerprints(checked, captured)
        digests = {}
        for component in checked:
            numbers = {t.name: number for number, t in enumerate(merged[component.key].tensors)}
            for holders, tensors in _replicas(
                comm.rank, captured[component.key], merged[component.key]
            ).items():
                tag = f"{content_digest(repr(holders).encode())} {component.key}"
                found = {
                    t.name: replica_digest(component, t, numbers[t.name], known) for t in tensors
                }
                mine[tag] = {
                    name: [content_hash(digest), list(holders)] for name, digest in found.items()
                }
                digests[tag] = combined_digest(
                    part
                    for name, found in sorted(mine[tag].items())
                    for part in (name.encode(), found[0])
                )
        return digests

    def compare(found: list[dict[str, str]]) -> list[str]:
        seen: dict[str, str] = {}
        return sorted(
            {
                tag
                for digests in found
                for tag, digest in digests.items()
                if seen.setdefault(tag, digest) != digest
            }
        )

    differing = comm.together("compare replicas", summary, compare)
    for component in checked:
        tags = [tag for tag in differing if tag.split(" ", 1)[1] == component.key]
        if tags:
            _explain(
                comm,
                component,
                captured[component.key],
                {tag: mine[tag] for tag in tags if tag in mine},
            )
    return known


def _explain(
    comm: Communicator,
    component: StateComponent,
    captured: Captured,
    mine: Mapping[str, dict[str, list[Any]]],
) -> None:
    """Find out which tensors differ, on which ranks, and for FULL by how much; raise unless that is
    within tolerance."""

    def compare(found: list[dict[str, dict[str, list[Any]]]]) -> list[list[Any]]:
        """[name, holders, ranks that differ from the lowest of them]."""
        wrong: dict[str, list[Any]] = {}
        reference: dict[str, bytes] = {}
        for rank, tags in enumerate(found):
            for tag, tensors in tags.items():
                for name, (digest, holders) in tensors.items():
                    if reference.setdefault(f"{tag} {name}", digest) != digest:
                        wrong.setdefault(f"{tag} {name}", [name, holders, []])[2].append(rank)
        return list(wrong.values())

    wrong = comm.together("explain replicas", lambda: dict(mine), compare)
    held = {t.name: t for t in captured.tensors}
    numbers, tolerable = distances(
        comm, component, [(name, holders) for name, holders, _ in wrong], held
    )
    if tolerable:
        return
    names = sorted({name for name, _, _ in wrong})
    ranks = sorted({rank for _, _, found_on in wrong for rank in found_on})
    how = f"; {names[0]!r}: {in_words(numbers[names[0]])}" if numbers.get(names[0]) else ""
    raise ReplicationMismatch(
        f"component {component.key!r} is SHARDED, and {some_keys(names)} on {_ranks(ranks)} "
        f"{'is' if len(names) == 1 else 'are'} not equal to the same part on lower ranks; "
        "replicas of a part must be "
        f"equal; nothing was committed{how}",
        component=component.key,
        keys=names[:20],
        ranks=ranks,
        details=numbers or None,
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _replicas(
    rank: int, captured: Captured, merged: ShardedState
) -> dict[tuple[int, ...], list[Any]]:
    """This rank's tensors (or parts) that other ranks hold too, by who holds them."""
    numbers = {t.name: number for number, t in enumerate(merged.tensors)}
    result: dict[tuple[int, ...], list[Any]] = {}
    for tensor in captured.tensors:
        part = tensor.part
        number = numbers[tensor.name]
        if merged.tensors[number].alias_of is None and part.box is not None and volume(part.box[1]):
            holders = holders_of(merged.layouts[number], part.shape, part.box, rank)
            if len(holders) > 1:
                result.setdefault(holders, []).append(tensor)
    return result
