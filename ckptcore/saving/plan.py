"""What is written where: which rank writes which tensors into which files; of that, what one rank
does; what is kept of it from save to save; and the account of it afterwards, in index, receipts and
manifest. Pure: equal inputs, equal plans."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..arguments import check_count, check_flag, check_one_of
from ..errors import CoordinationError, InvalidState
from ..format.digest import combined_digest, content_digest
from ..format.layout import encode_layouts
from ..format.manifest import (
    ComponentIndex,
    ComponentManifest,
    FileEntry,
    FileRecord,
    Index,
    ReplicaGroup,
    StoredShard,
    TensorEntry,
)
from ..format.tensorfile import HEADER_LIMIT, lay_out
from ..ranks.messages import message
from ..replicas.shard_table import PlainValues, ShardTable, ShardTables
from ..state.component import SharingPattern, StateComponent
from ..state.layout import Shard
from ..state.tree import StateSnapshot, Structure, TensorLeaf
from .reuse import Reuse
from .unchanged import Suspects, Unchanged
from .writer import FilePlan, WrittenFile

MAX_FILE_BYTES = 32 << 30
# File systems take no longer names.
NAME_BYTES = 255
# Fewer bytes than this are not worth a file of their own on another rank.
MIN_SHARE_BYTES = 16 << 20


class TensorSpec(NamedTuple):
    """A tensor to be stored: `number` among its component's tensors, name in the file, shape in
    items."""

    number: int
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def plan_component(
    key: str,
    tensors: Sequence[TensorSpec],
    writers: Sequence[int],
    label: str = "",
    *,
    separate: Sequence[frozenset[int]] = (),
    max_file_bytes: int = MAX_FILE_BYTES,
    header_limit: int = HEADER_LIMIT,
) -> list[FilePlan]:
    """The files of one component (or of one rank's, group's or node's copy, told apart by `label`).

    The bytes are split over `writers`, each of which could write all of them: largest tensor first
    to the rank with the least so far. A tensor stays in one file; a file stays below
    `max_file_bytes` unless one tensor is larger, and its header below `header_limit`. Tensors with
    the numbers of one of `separate` share files with each other only. Raises InvalidState when a
    name alone is too long for a header.
    """
    parts: list[tuple[int, list[TensorSpec]]] = []
    rest = frozenset(t.number for t in tensors).difference(*separate)
    for numbers_of in (*separate, rest):
        some = [t for t in tensors if t.number in numbers_of]
        shares = _split_over(some, writers, MIN_SHARE_BYTES)
        for writer in writers:
            parts += [
                (writer, part) for part in _split(key, shares[writer], max_file_bytes, header_limit)
            ]
    files = []
    beginning = _beginning(f"{file_stem(key)}{label}", len(parts))
    for number, (writer, part) in enumerate(parts, 1):
        count = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        header, placed = lay_out((t.stored_name, t.dtype, t.shape) for t in part)
        numbers = {t.stored_name: t.number for t in part}
        contents = tuple((numbers[stored.name], stored) for stored in placed)
        files.append(FilePlan(f"{beginning}{count}.safetensors", key, writer, header, contents))
    return files


def file_stem(key: str) -> str:
    """A component key as the beginning of a file name; what file names cannot hold everywhere is
    percent-encoded."""
    text = re.sub(
        r"[^A-Za-z0-9_.-]",
        lambda m: "".join(f"%{b:02X}" for b in m.group().encode("utf-8", "surrogatepass")),
        key,
    )
    text = f"%2E{text[1:]}" if text.startswith(".") else text
    # File systems take 255 bytes, and label and numbering come on top.
    return text if len(text) <= 120 else f"{text[:100]}~{content_digest(text.encode())[:12]}"


def _beginning(name: str, count: int) -> str:
    """What the names of a copy's files begin with, such that they fit wherever files lie, with
    numbers and endings."""
    ending = (
        max(len(f"-{count:05d}-of-{count:05d}.safetensors"), len(".safetensors.index.json"))
        if count > 1
        else 12
    )
    if len(name) + ending <= NAME_BYTES:
        return name
    return f"{name[: NAME_BYTES - 60]}~{content_digest(name.encode())[:12]}"


def hugging_face_indexes(plan: WritePlan, values: Mapping[str, PlainValues]) -> dict[str, bytes]:
    """By name, those of components that are split over several files, on the rank that writes their
    plain values."""
    found = {}
    for c in plan.components:
        if c.key in values and c.table is None and len(c.files) > 1:
            stem = c.files[0].name.rsplit("-", 3)[0]
            found[f"{stem}.safetensors.index.json"] = hugging_face_index(c.files)
    return found


def hugging_face_index(files: Sequence[FilePlan]) -> bytes:
    """model.safetensors.index.json: which file holds which tensor. Source: transformers' sharded
    checkpoints."""
    weight_map = {stored.name: plan.name for plan in files for _, stored in plan.contents}
    total = sum(stored.nbytes for plan in files for _, stored in plan.contents)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _split_over(
    tensors: Sequence[TensorSpec], writers: Sequence[int], min_bytes: int
) -> dict[int, list[TensorSpec]]:
    total = sum(t.nbytes for t in tensors)
    used = writers[: max(1, min(len(writers), total // min_bytes))]
    loads = dict.fromkeys(used, 0)
    chosen: dict[int, int] = {}
    for tensor in sorted(tensors, key=lambda t: (-t.nbytes, t.number)):
        writer = min(used, key=lambda w: (loads[w], w))
        loads[writer] += tensor.nbytes
        chosen[tensor.number] = writer
    return {w: [t for t in tensors if chosen[t.number] == w] for w in writers}


def _split(
    key: str, tensors: list[TensorSpec], max_file_bytes: int, header_limit: int
) -> list[list[TensorSpec]]:
    # At most so much, without looking at each name: JSON takes up to 6 bytes for a character.
    most = sum(6 * len(t.stored_name) + 102 + 21 * (len(t.shape) + 1) for t in tensors)
    if sum(t.nbytes for t in tensors) <= max_file_bytes and 8192 + most <= header_limit:
        return [tensors] if tensors else []
    parts: list[list[TensorSpec]] = []
    data = head = 0
    for tensor in tensors:
        need = (
            len(json.dumps(tensor.stored_name, ensure_ascii=False).encode())
            + 100
            + 21 * (len(tensor.shape) + 1)
        )
        if need + 8192 > header_limit:
            raise InvalidState(
                f"component {key!r}: a tensor name of {len(tensor.stored_name):,} characters is "
                "too long",
                component=key,
                key=tensor.stored_name[:100],
            )
        if not parts or data + tensor.nbytes > max_file_bytes or head + need > header_limit:
            parts.append([])
            data, head = 0, 8192
        parts[-1].append(tensor)
        data += tensor.nbytes
        head += need
    return parts


@dataclass(frozen=True, slots=True)
class PlannedComponent:
    """What this rank has to do with one component, or with its replica group.

    files: all of the group's (of a sharded component: this rank's). has_values: whether this rank
    writes the plain values. table: of a sharded component; its tensors are numbered as there, and
    held pairs these numbers with this rank's own, where they are not the same.
    """

    key: str
    files: tuple[FilePlan, ...]
    has_values: bool
    table: ShardTable | None = None
    held: tuple[tuple[int, int], ...] | None = None

    def tensors(self, snapshot: StateSnapshot) -> dict[int, TensorLeaf]:
        """This rank's tensors by their numbers in `files`."""
        leaves = snapshot.tensors
        return (
            dict(enumerate(leaves)) if self.held is None else {n: leaves[at] for n, at in self.held}
        )


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Which bytes one rank writes into which files. The same object from save to save, while the
    structure of the state stays. files: this rank's; names: theirs."""

    rank: int
    components: tuple[PlannedComponent, ...]
    files: tuple[FilePlan, ...] = field(init=False)
    names: list[str] = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        files = tuple(f for c in self.components for f in c.files if f.writer == self.rank)
        object.__setattr__(self, "files", files)
        object.__setattr__(self, "names", [file.name for file in files])
        object.__setattr__(self, "nbytes", sum(file.size for file in files))


class KeptPlans:
    """What is kept from save to save while the structure of the state stays: names, dtypes, shapes,
    aliases and layouts, but never where in memory anything is.

    split: replicas share the writing, else the lowest rank does it. reuse: the files of the last
    checkpoint, where they are to be taken over; unchanged: which of its tensors are as they were.
    tables: of sharded components; structures: of all, as they were at the last save.
    """

    def __init__(
        self, *, split: bool = True, reuse: Reuse | None = None, unchanged: Unchanged | None = None
    ) -> None:
        self.split, self.reuse, self.unchanged = split, reuse, unchanged
        self.tables = ShardTables(spread=split)
        self.structures: dict[str, Structure] = {}
        self._structure: list[Any] | None = None
        self._plan: WritePlan | None = None

    def plan(
        self,
        rank: int,
        components: Sequence[StateComponent],
        groups: Mapping[str, Sequence[ReplicaGroup]],
        snapshots: Mapping[str, StateSnapshot],
        tables: Mapping[str, ShardTable],
        *,
        first: int = 0,
    ) -> WritePlan:
        """groups: the ranks that store the same of each component; tables: of sharded ones. first:
        the lowest rank that writes to the same storage. Raises InvalidState."""
        structure: list[Any] = [rank]
        mine: list[_Wanted] = []
        for c in components:
            if (table := tables.get(c.key)) is not None:
                wanted = _Wanted(c.key, snapshots[c.key], rank == first, (rank,), table=table)
            else:
                group = next(group for group in groups[c.key] if rank in group.members)
                writers = self._writers(c, group)
                if rank not in writers:
                    continue
                lowest = rank == group.members[0]
                wanted = _Wanted(c.key, snapshots[c.key], lowest, writers, group.label)
            if self.unchanged is not None:
                parameters = _Parameters.of(snapshots[c.key])
                self.unchanged.trained[c.key] = parameters.trained
                if self.reuse is not None:
                    # Of what several ranks write, each knows the digests of its own part alone.
                    alone = len(wanted.writers) == 1
                    stable = self.unchanged.stable(c.key) if alone else frozenset()
                    wanted = replace(wanted, frozen=parameters.frozen, stable=stable)
            mine.append(wanted)
            structure.append(wanted.structure)
        if self._plan is None or structure != self._structure:
            self._plan = WritePlan(rank, tuple(wanted.planned() for wanted in mine))
            self._structure = structure
        return self._plan

    def _writers(self, component: StateComponent, group: ReplicaGroup) -> tuple[int, ...]:
        """One where the ranks' states may differ, so that all of it is that of one rank."""
        one = component.sharing_pattern in (SharingPattern.GLOBAL, SharingPattern.PER_NODE)
        one = one or bool(component.ignore) or not self.split
        return tuple(group.members[:1] if one else group.members)


def plans_as_asked(writers: str, reuse: bool, refresh_every: int, unchanged: str) -> KeptPlans:
    """What the arguments of a manager say. Raises InvalidState."""
    check_flag("reuse", reuse)
    check_count("refresh_every", refresh_every)
    check_one_of("unchanged", unchanged, ("warn", "ignore"))
    warns = unchanged == "warn"
    return KeptPlans(
        split=writers == "split",
        reuse=Reuse(refresh_every) if reuse else None,
        unchanged=Unchanged(warns=warns, separates=reuse) if reuse or warns else None,
    )


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters in a component's state: names of those that train, numbers of the others."""

    trained: frozenset[str]
    frozen: frozenset[int]

    @classmethod
    def of(cls, snapshot: StateSnapshot) -> _Parameters:
        """To be asked before the state is copied: the leaves of a copy are no parameters."""
        trained, frozen = [], []
        for number, leaf in enumerate(snapshot.tensors):
            live: Any = leaf.tensor if leaf.live is None else leaf.live
            if type(live) is torch.Tensor:  # most of them, and torch is slow to say it
                continue
            live = live.tensor if isinstance(live, Shard) else live
            if isinstance(live, nn.Parameter):
                if live.requires_grad:
                    trained.append(leaf.spec.name)
                else:
                    frozen.append(number)
        return cls(frozenset(trained), frozenset(frozen))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A component that a rank writes a part of. frozen: numbers of this rank's parameters that do
    not train; stable: stored names of tensors that were as they are for some saves."""

    key: str
    snapshot: StateSnapshot
    has_values: bool
    writers: tuple[int, ...]
    label: str = ""
    table: ShardTable | None = None
    frozen: frozenset[int] = frozenset()
    stable: frozenset[str] = frozenset()

    @property
    def structure(self) -> tuple[Any, ...]:
        """Equal where `planned` would be."""
        separate = self.frozen, self.stable
        if self.table is not None:
            return self.key, self.has_values, self.table.signature, separate
        of = self.snapshot.structure  # the same object while it stays
        known: Any = [leaf.spec for leaf in self.snapshot.tensors] if of is None else id(of)
        return self.key, self.has_values, self.writers, self.label, known, separate

    def planned(self) -> PlannedComponent:
        tensors = [leaf.spec for leaf in self.snapshot.tensors]
        if self.table is None:
            numbers = [(n, n) for n, t in enumerate(tensors) if t.alias_of is None]
        else:
            numbered = {t.name: n for n, t in enumerate(tensors)}
            written: dict[Any, bool] = {}  # many tensors share a layout
            numbers = []
            for number, logical in enumerate(self.table.tensors):
                if logical.layout is None or logical.name not in numbered:
                    continue
                like = id(logical.layout), logical.shape
                if like not in written:
                    box = logical.layout.box_of(logical.shape, self.writers[0])
                    written[like] = box is not None
                if written[like]:
                    numbers.append((number, numbered[logical.name]))
        specs = [
            TensorSpec(number, t.stored_name, t.dtype, t.shape, t.nbytes)
            for number, t in ((number, tensors[at]) for number, at in numbers)
        ]
        label = self.label if self.table is None else f".rank{self.writers[0]:05d}"
        frozen = frozenset(number for number, at in numbers if at in self.frozen)
        stable = frozenset(t.number for t in specs if t.stored_name in self.stable) - frozen
        separate = [numbers for numbers in (frozen, stable) if numbers]
        files = tuple(plan_component(self.key, specs, self.writers, label, separate=separate))
        held = None if self.table is None else tuple(numbers)
        return PlannedComponent(self.key, files, self.has_values, self.table, held)


@message
@dataclass(frozen=True, slots=True)
class FileReceipt:
    """A file that was written, or one that was planned for a rank, whose digest is not known."""

    name: str
    size: int
    writer: int
    digest: str = ""


@message
@dataclass(frozen=True, slots=True)
class GroupReceipt:
    """What the lowest rank of a replica group says of a component. values: digest of its plain
    values; files: all that were planned for the group; whole: of a sharded component, the bytes
    that all ranks together have to write."""

    values: str
    tensors: int
    nbytes: int
    files: list[FileReceipt]
    whole: int = 0


@message
@dataclass(frozen=True, slots=True)
class RankReceipt:
    """What one rank wrote: files, components that its index has, and by component what it says of
    the replica group that it is the lowest rank of. seconds: that it took, by phase of the save.
    suspects: see Unchanged."""

    rank: int
    files: list[FileReceipt]
    components: list[str]
    groups: dict[str, GroupReceipt]
    seconds: dict[str, float]
    suspects: Suspects


@dataclass(frozen=True, slots=True)
class Account:
    """What a manifest says of files and components."""

    files: dict[str, FileRecord]
    components: dict[str, ComponentManifest]


def index_of(
    plan: WritePlan,
    snapshots: Mapping[str, StateSnapshot],
    values: Mapping[str, PlainValues],
    written: Sequence[WrittenFile],
) -> Index:
    """What the index of a rank says of the tensor files that it has written, and its plain
    values."""
    index = Index(plan.rank)
    for each in written:
        size, header = each.plan.size, len(each.plan.header)
        index.files[each.plan.name] = FileEntry(size, header, each.header_digest)
    for c in plan.components:
        files = [file for file in written if file.plan.component == c.key]
        part = _indexed(c, snapshots[c.key], values.get(c.key), files)
        if part.tensors or part.pieces or c.key in values:
            index.components[c.key] = part
    return index


def group_receipts(
    plan: WritePlan, snapshots: Mapping[str, StateSnapshot], values: Mapping[str, PlainValues]
) -> dict[str, GroupReceipt]:
    """By component, what the lowest rank of a replica group says of it."""
    return {
        c.key: _group_receipt(c, snapshots[c.key], values.get(c.key))
        for c in plan.components
        if c.key in values or c.table is not None
    }


def _group_receipt(
    planned: PlannedComponent, snapshot: StateSnapshot, values: PlainValues | None
) -> GroupReceipt:
    table, files = planned.table, planned.files
    tree = b"" if values is None else values.tree
    first = values is not None
    return GroupReceipt(
        content_digest(tree),
        (len(snapshot.tensors) if table is None else len(table.tensors)) if first else 0,
        sum(stored.nbytes for file in files for _, stored in file.contents),
        [FileReceipt(file.name, file.size, file.writer) for file in files],
        sum(t.stored_nbytes for t in table.tensors) if first and table is not None else 0,
    )


def _indexed(
    planned: PlannedComponent,
    snapshot: StateSnapshot,
    values: PlainValues | None,
    written: Sequence[WrittenFile],
) -> ComponentIndex:
    """What the index says of a component: rows, or pieces, of what this rank wrote, and aliases
    beside the values."""
    tree, versions = (None, None) if values is None else (values.tree, values.versions)
    contents = [
        (file.plan.name, number, stored, digests)
        for file in written
        for number, stored, digests in file.tensors()
    ]
    if planned.table is not None:
        pieces = [
            StoredShard(number, name, stored.start, digests)
            for name, number, stored, digests in contents
        ]
        layouts = None if tree is None else encode_layouts(planned.table.tensors)
        return ComponentIndex(
            tree, [], layouts, sorted(pieces, key=lambda shard: shard.number), versions
        )
    specs = [leaf.spec for leaf in snapshot.tensors]
    entries = []
    for file, number, stored, digests in contents:
        t, where = specs[number], (file, stored.name, stored.start, digests)
        entries.append(TensorEntry(number, t.name, t.dtype, t.shape, None, t.shape, *where))
    for number, t in enumerate(specs if tree is not None else ()):
        if (alias := t.alias_of) is not None:
            entries.append(
                TensorEntry(number, t.name, t.dtype, t.shape, None, t.shape, alias_of=alias)
            )
    return ComponentIndex(tree, sorted(entries, key=lambda entry: entry.number), versions=versions)


def seconds_by_phase(receipts: Sequence[RankReceipt]) -> dict[str, list[float | None]]:
    """Those of all ranks, in order of rank; None where a rank had no such phase."""
    phases = dict.fromkeys(phase for receipt in receipts for phase in receipt.seconds)
    return {phase: [receipt.seconds.get(phase) for receipt in receipts] for phase in phases}


def files_and_components(
    components: Sequence[StateComponent],
    groups: Mapping[str, Sequence[ReplicaGroup]],
    partitions: Mapping[str, list[list[int]]],
    group_keys: Mapping[str, list[str]],
    receipts: Sequence[RankReceipt],
) -> Account:
    """The manifest's account of what the ranks wrote: all of them, or those of a node that keeps a
    part of its own. groups: the ranks that store the same of each component.

    Raises CoordinationError unless the receipts cover every planned file exactly once.
    """
    ranks = {receipt.rank for receipt in receipts}
    files: dict[str, FileRecord] = {}
    for file in (file for receipt in receipts for file in receipt.files):
        if file.name in files:
            raise CoordinationError(
                f"{file.name} was written by ranks {files[file.name].writer} and {file.writer}"
            )
        files[file.name] = FileRecord(file.size, file.digest, file.writer)
    planned: set[str] = set()
    found = {}
    for c in components:
        of_groups = [receipt.groups[c.key] for receipt in receipts if c.key in receipt.groups]
        expected = len(receipts)
        if not c.sharded:
            expected = sum(not ranks.isdisjoint(group.members) for group in groups[c.key])
        names = _names_of(c, of_groups, expected, files, planned)
        digests = (*(group.values for group in of_groups), *(files[name].digest for name in names))
        found[c.key] = ComponentManifest(
            c.key,
            c.sharing_pattern.value,
            writers=[receipt.rank for receipt in receipts if c.key in receipt.components],
            group=c.process_group_name,
            partition=partitions[c.process_group_name] if c.process_group_name else None,
            group_keys=group_keys.get(c.key),
            size_bytes=sum(group.nbytes for group in of_groups),
            checksum=combined_digest(bytes.fromhex(digest) for digest in digests),
            files=names,
            required=c.required,
            tensors=sum(group.tensors for group in of_groups),
            metadata=c.metadata,
        )
    return Account(files, found)


def _names_of(
    component: StateComponent,
    of_groups: Sequence[GroupReceipt],
    expected: int,
    files: Mapping[str, FileRecord],
    planned: set[str],
) -> list[str]:
    """The files of a component, each of which was written as it was planned, once. planned: those
    of the components before it, to which it adds its own."""
    key = component.key
    if len(of_groups) != expected:
        raise CoordinationError(
            f"component {key!r}: {len(of_groups)} copies were written, not {expected}"
        )
    if component.sharded:
        stored, whole = (
            sum(group.nbytes for group in of_groups),
            sum(group.whole for group in of_groups),
        )
        if stored != whole:
            raise CoordinationError(
                f"component {key!r}: {stored:,} bytes were written of {whole:,}"
            )
    names = []
    for file in (file for group in of_groups for file in group.files):
        record = files.get(file.name)
        as_planned = record is not None and (record.size, record.writer) == (file.size, file.writer)
        if not as_planned or file.name in planned:
            raise CoordinationError(
                f"{file.name} ({file.size:,} bytes) of rank {file.writer} is not what was written "
                "under that name: the ranks planned other files, as they do with reuse=True where "
                "requires_grad differs between them"
            )
        planned.add(file.name)
        names.append(file.name)
    return names
