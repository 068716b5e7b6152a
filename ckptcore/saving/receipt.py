"""What a rank writes and says of it: tensor files, index, receipt; and the manifest's account of
all receipts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..catalog.folder import join
from ..catalog.transaction import Transaction
from ..errors import CheckpointCorrupt, CoordinationError, InvalidState, UnsupportedValue
from ..format.digest import combined_digest, content_digest
from ..format.layout import encode_layouts
from ..format.manifest import (
    SIZE_LIMIT,
    ComponentIndex,
    ComponentManifest,
    FileEntry,
    FileRecord,
    Index,
    ReplicaGroup,
    StoredShard,
    TensorEntry,
    index_file_name,
)
from ..format.values import decode
from ..ranks.messages import message
from ..replicas.shard_table import PlainValues
from ..state.component import StateComponent
from ..state.layout import TensorSource
from ..state.tree import StateSnapshot
from ..storage.chunks import Workers
from .plan import PlannedComponent, WritePlan, hugging_face_index
from .writer import WrittenFile, write_files

__all__ = ["RankReceipt", "check_tree", "files_and_components", "write_planned"]


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
    the replica group that it is the lowest rank of."""

    rank: int
    files: list[FileReceipt]
    components: list[str]
    groups: dict[str, GroupReceipt]


@dataclass(frozen=True, slots=True)
class Account:
    """What a manifest says of files and components."""

    files: dict[str, FileRecord]
    components: dict[str, ComponentManifest]


def write_planned(
    transaction: Transaction,
    plan: WritePlan,
    snapshots: Mapping[str, StateSnapshot],
    values: Mapping[str, PlainValues],
    workers: Workers,
    chunks: Mapping[tuple[str, int], bytes],
    progress: Callable[[int], None],
) -> RankReceipt:
    """Write this rank's tensor files, its index, and the Hugging Face indexes of components split
    over files. values: those that this rank writes; chunks: digests that are known."""
    held = {
        c.key: TensorSource({n: t.tensor for n, t in c.tensors(snapshots[c.key]).items()})
        for c in plan.components
    }
    sources = {file.name: held[file.component] for file in plan.files}
    written = write_files(transaction, plan.files, sources, workers, chunks, progress)
    storage, folder, rank = transaction.storage, transaction.folder, plan.rank
    index, small = Index(rank), {}
    for each in written:
        index.files[each.plan.name] = FileEntry(
            each.plan.size, len(each.plan.header), each.header_digest
        )
    groups: dict[str, GroupReceipt] = {}
    for c in plan.components:
        mine = values.get(c.key)
        part = _indexed(
            c, snapshots[c.key], mine, [f for f in written if f.plan.component == c.key]
        )
        if part.tensors or part.pieces or mine is not None:
            index.components[c.key] = part
        if mine is not None or c.table is not None:
            groups[c.key] = _group_receipt(c, snapshots[c.key], mine)
        if mine is not None and c.table is None and len(c.files) > 1:
            stem = c.files[0].name.rsplit("-", 3)[0]
            small[f"{stem}.safetensors.index.json"] = hugging_face_index(c.files)
    if index.components:
        small[index_file_name(rank)] = _readable(index)
    files = [
        FileReceipt(name, index.files[name].size, rank, digest)
        for name, digest in index.file_digests().items()
    ]
    for name, data in small.items():
        storage.write(join(folder, name), data)
        files.append(FileReceipt(name, len(data), rank, content_digest(data)))
    storage.sync_folder(folder)
    return RankReceipt(rank, files, list(index.components), groups)


def check_tree(key: str, tree: bytes) -> None:
    """What every reader does with the plain values of a component, before anything is written: of
    values with tensors in them, whose codec wants real ones, only the form. Raises
    UnsupportedValue."""
    try:
        if len(tree) > SIZE_LIMIT:
            raise ValueError(
                f"its plain values have {len(tree):,} bytes, and readers take {SIZE_LIMIT:,}"
            )
        decode(tree, lenient=True, opaque=True, file="the index")
    except (CheckpointCorrupt, ValueError) as error:
        raise UnsupportedValue(
            f"component {key!r} could not be read back, so it is not saved: {error}", component=key
        ) from None


def _readable(index: Index) -> bytes:
    """The bytes of an index, after what every reader does with them. Raises InvalidState."""
    encoded = index.encode()
    try:
        if len(encoded) > SIZE_LIMIT:
            raise ValueError(f"it has {len(encoded):,} bytes, and readers take {SIZE_LIMIT:,}")
        found = Index.decode(encoded, index_file_name(index.writer))
        if found.file_digests() != index.file_digests():
            raise ValueError("it says other digests than those of the files")
    except (CheckpointCorrupt, ValueError) as error:
        name = index_file_name(index.writer)
        raise InvalidState(
            f"{name} could not be read back, so it is not published: {error}"
        ) from None
    return encoded


def _group_receipt(
    planned: PlannedComponent, snapshot: StateSnapshot, values: PlainValues | None
) -> GroupReceipt:
    table, files = planned.table, planned.files
    tree = b"" if values is None else values.tree
    first = values is not None
    return GroupReceipt(
        content_digest(tree),
        (len(snapshot.tensors) if table is None else len(table.tensors)) if first else 0,
        sum(place.nbytes for file in files for _, place in file.places),
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
    places = [
        (file.plan.name, number, place, digests)
        for file in written
        for number, place, digests in file.tensors()
    ]
    if planned.table is not None:
        pieces = [
            StoredShard(number, name, place.start, digests)
            for name, number, place, digests in places
        ]
        layouts = None if tree is None else encode_layouts(planned.table.tensors)
        return ComponentIndex(
            tree, [], layouts, sorted(pieces, key=lambda piece: piece.number), versions
        )
    entries = []
    for file, number, place, digests in places:
        t = snapshot.tensors[number].spec
        entries.append(
            TensorEntry(
                number,
                t.name,
                t.dtype,
                t.shape,
                None,
                t.shape,
                file,
                place.name,
                place.start,
                digests,
                None,
            )
        )
    for number, t in enumerate(leaf.spec for leaf in snapshot.tensors):
        if t.alias_of is not None and tree is not None:
            entries.append(
                TensorEntry(
                    number, t.name, t.dtype, t.shape, None, t.shape, None, None, 0, b"", t.alias_of
                )
            )
    return ComponentIndex(tree, sorted(entries, key=lambda entry: entry.number), versions=versions)


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
        told = [receipt.groups[c.key] for receipt in receipts if c.key in receipt.groups]
        expected = len(receipts)
        if not c.sharded:
            expected = sum(not ranks.isdisjoint(group.members) for group in groups[c.key])
        names = _names_of(c, told, expected, files, planned)
        digests = (*(group.values for group in told), *(files[name].digest for name in names))
        found[c.key] = ComponentManifest(
            c.key,
            c.sharing_pattern.value,
            writers=[receipt.rank for receipt in receipts if c.key in receipt.components],
            group=c.process_group_name,
            partition=partitions[c.process_group_name] if c.process_group_name else None,
            group_keys=group_keys.get(c.key),
            size_bytes=sum(group.nbytes for group in told),
            checksum=combined_digest(bytes.fromhex(digest) for digest in digests),
            files=names,
            required=c.required,
            tensors=sum(group.tensors for group in told),
            metadata=c.metadata,
        )
    return Account(files, found)


def _names_of(
    component: StateComponent,
    told: Sequence[GroupReceipt],
    expected: int,
    files: Mapping[str, FileRecord],
    planned: set[str],
) -> list[str]:
    """The files of a component, each of which was written as it was planned, once. planned: those
    of the components before it, to which it adds its own."""
    key = component.key
    if len(told) != expected:
        raise CoordinationError(
            f"component {key!r}: {len(told)} copies were written, not {expected}"
        )
    if component.sharded:
        stored, whole = sum(group.nbytes for group in told), sum(group.whole for group in told)
        if stored != whole:
            raise CoordinationError(
                f"component {key!r}: {stored:,} bytes were written of {whole:,}"
            )
    names = []
    for file in (file for group in told for file in group.files):
        record = files.get(file.name)
        as_planned = record is not None and (record.size, record.writer) == (file.size, file.writer)
        if not as_planned or file.name in planned:
            raise CoordinationError(
                f"{file.name} ({file.size:,} bytes) of rank {file.writer} is not what was written "
                "under that name"
            )
        planned.add(file.name)
        names.append(file.name)
    return names
