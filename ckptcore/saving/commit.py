"""Committing: the index, the receipts, the manifest, and the one step that makes a checkpoint exist."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..attempts import Attempt
from ..errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    CoordinationError,
    StorageError,
    UnsupportedVersion,
)
from ..format.digest import combined_digest, content_digest
from ..format.index import ComponentIndex, FileEntry, Index, Piece, TensorEntry, index_file_name
from ..format.layout import LogicalTensor, encode_layouts
from ..format.manifest import MANIFEST_NAME, CheckpointManifest, ComponentManifest, FileRecord
from ..format.tensorfile import tensor_nbytes
from ..ranks.sharding import ShardedState
from ..root import (
    PIN_NAME,
    WITHDRAWN_NAME,
    attempts_among,
    check_files,
    entries_in,
    is_ours,
    join,
    mark_name,
    read_manifest,
    remove_attempt,
    remove_checkpoint_folder,
    remove_if_empty,
    unmark_attempts,
)
from ..state.component import StateComponent
from ..state.layout import TensorBytes
from ..state.tree import CapturedTensor
from ..storage.base import Storage
from .join import JoinedSave
from .plan import FilePlan, hugging_face_index
from .workers import Workers
from .writer import WrittenFile, write_files

__all__ = [
    "Receipt",
    "Share",
    "check_alone",
    "check_place",
    "discard",
    "files_and_components",
    "publish",
    "write_share",
]


@dataclass(slots=True)
class CopyReceipt:
    """What the lowest rank of a copy says about it: its planned files as [name, size, writer]."""

    values: str
    tensors: int
    nbytes: int
    files: list[list[Any]]


@dataclass(slots=True)
class Receipt:
    """What one rank wrote: files as [size, digest], components that its index has, copies that it is the lowest of."""

    rank: int
    files: dict[str, list[Any]] = field(default_factory=dict)
    components: list[str] = field(default_factory=list)
    copies: dict[str, CopyReceipt] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Receipt:
        copies = {key: CopyReceipt(**copy) for key, copy in plain["copies"].items()}
        return cls(plain["rank"], plain["files"], plain["components"], copies)


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part in one copy of a component.

    tensors: what it holds, by number; files: the whole plan of the copy (of a sharded component: this rank's part);
    tree: the plain values, on the lowest rank of the copy; table: the tensors of a sharded component.
    """

    key: str
    tensors: Mapping[int, CapturedTensor]
    files: list[FilePlan]
    tree: bytes | None
    table: list[LogicalTensor] | None = None


def write_share(
    storage: Storage,
    folder: str,
    rank: int,
    shares: Sequence[Share],
    workers: Workers,
    known: Mapping[tuple[str, int], bytes],
    progress: Callable[[int], None],
) -> Receipt:
    """Write this rank's tensor files, its index, and the Hugging Face indexes of components split over files."""
    mine = [plan for share in shares for plan in share.files if plan.writer == rank]
    wanted = {(plan.component, number) for plan in mine for number, _ in plan.places}
    sources = {s.key: {n: TensorBytes(t.tensor) for n, t in s.tensors.items() if (s.key, n) in wanted} for s in shares}
    written = write_files(storage, folder, mine, sources, workers, known, progress)
    index, receipt, small = Index(rank), Receipt(rank), {}
    for file in written:
        index.files[file.plan.name] = FileEntry(file.plan.size, len(file.plan.header), file.header_digest)
    for share in shares:
        part = _indexed(share, [f for f in written if f.plan.component == share.key])
        if part.tensors or part.pieces or share.tree is not None:
            index.components[share.key] = part
            receipt.components.append(share.key)
        if share.tree is not None or share.table is not None:
            receipt.copies[share.key] = _copy_receipt(share)
        if share.tree is not None and share.table is None and len(share.files) > 1:
            stem = share.files[0].name.rsplit("-", 3)[0]
            small[f"{stem}.safetensors.index.json"] = hugging_face_index(share.files)
    if index.components:
        small[index_file_name(rank)] = index.encode()
    for name, digest in index.file_digests().items():
        receipt.files[name] = [index.files[name].size, digest]
    for name, data in small.items():
        storage.write(join(folder, name), data)
        receipt.files[name] = [len(data), content_digest(data)]
    storage.sync_folder(folder)
    return receipt


def _copy_receipt(share: Share) -> CopyReceipt:
    files = [[plan.name, plan.size, plan.writer] for plan in share.files]
    nbytes = sum(place.nbytes for plan in share.files for _, place in plan.places)
    count = len(share.tensors if share.table is None else share.table)
    return CopyReceipt(content_digest(share.tree or b""), count if share.tree is not None else 0, nbytes, files)


def _indexed(share: Share, written: Sequence[WrittenFile]) -> ComponentIndex:
    """What the index says of a share: rows, or pieces, of what this rank wrote, and aliases beside the values."""
    places = [(file.plan.name, number, place, bytes(file.digests[number])) for file in written
              for number, place in file.plan.places]  # fmt: skip
    if share.table is not None:
        pieces = [Piece(number, name, place.start, digests) for name, number, place, digests in places]
        layouts = encode_layouts(share.table) if share.tree is not None else None
        return ComponentIndex(share.tree, [], layouts, sorted(pieces, key=lambda piece: piece.number))
    entries = []
    for file, number, place, digests in places:
        t = share.tensors[number]
        entries.append(
            TensorEntry(number, t.name, t.dtype, t.shape, None, t.shape, file, place.name, place.start, digests, None)
        )
    for number, t in share.tensors.items():
        if t.alias_of is not None and share.tree is not None:
            entries.append(TensorEntry(number, t.name, t.dtype, t.shape, None, t.shape, None, None, 0, b"", t.alias_of))
    return ComponentIndex(share.tree, sorted(entries, key=lambda entry: entry.number))


def files_and_components(
    components: Sequence[StateComponent],
    joined: JoinedSave,
    receipts: Sequence[Receipt],
    sharded: Mapping[str, ShardedState],
) -> tuple[dict[str, FileRecord], dict[str, ComponentManifest]]:
    """The manifest's account of what the ranks wrote.

    Raises CoordinationError unless the receipts cover every planned file exactly once.
    """
    files: dict[str, FileRecord] = {}
    for receipt in receipts:
        for name, (size, digest) in receipt.files.items():
            if name in files:
                raise CoordinationError(f"{name} was written by ranks {files[name].writer} and {receipt.rank}")
            files[name] = FileRecord(size, digest, receipt.rank)
    planned = set()
    manifests = {}
    for component in components:
        copies = [receipt.copies[component.key] for receipt in receipts if component.key in receipt.copies]
        expected = len(receipts) if component.sharded else len(joined.copies[component.key])
        if len(copies) != expected:
            raise CoordinationError(f"component {component.key!r}: {len(copies)} copies were written, not "
                                    f"{expected}")  # fmt: skip
        if component.sharded:
            whole = sum(tensor_nbytes(t.dtype, t.shape) for t in sharded[component.key].tensors if t.alias_of is None)
            if (stored := sum(copy.nbytes for copy in copies)) != whole:
                raise CoordinationError(f"component {component.key!r}: {stored:,} bytes were written of {whole:,}")
        names = []
        for name, size, writer in (file for copy in copies for file in copy.files):
            record = files.get(name)
            if record is None or (record.size, record.writer) != (size, writer) or name in planned:
                raise CoordinationError(
                    f"{name} ({size:,} bytes) of rank {writer} is not what was written under that name"
                )
            planned.add(name)
            names.append(name)
        digests = (*(copy.values for copy in copies), *(files[name].digest for name in names))
        grouped = component.process_group_name
        manifests[component.key] = ComponentManifest(
            component.key,
            component.sharing_pattern.value,
            writers=[receipt.rank for receipt in receipts if component.key in receipt.components],
            group=grouped,
            partition=joined.partitions[grouped] if grouped else None,
            group_keys=joined.group_keys.get(component.key),
            size_bytes=sum(copy.nbytes for copy in copies),
            checksum=combined_digest(bytes.fromhex(digest) for digest in digests),
            files=names,
            required=component.required,
            tensors=sum(copy.tensors for copy in copies),
            metadata=component.metadata,
        )
    return files, manifests


def check_place(storage: Storage, name: str, step: int | None, run_id: str, overwrite: bool) -> bool:
    """Whether something at `name` must give way to a new checkpoint of the run.

    A committed checkpoint does so only with `overwrite`, and so does a damaged one that is pinned; what never became one,
    or is damaged, always. Raises CheckpointExists for the rest: a committed one, a pinned one, one of a newer format,
    what another job may be writing in that place now, or files that are not ours.
    """
    where = storage.at(name)
    try:
        entries = storage.list(name)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    attempts = [] if storage.atomic_rename else attempts_among(entries)
    writing = [attempt for attempt in attempts if not Attempt.parse(attempt).is_abandoned(run_id)]
    try:
        names = check_files(storage, name, read_manifest(storage, name))
    except (CheckpointNotFound, CheckpointCorrupt) as error:
        if writing:
            what = f"is being written by another job ({writing[0]})"
            raise CheckpointExists(f"{where} {what}", path=where, step=step) from None
        there = {entry.name for entry in entries}
        if not overwrite and PIN_NAME in there and WITHDRAWN_NAME not in there and there != {PIN_NAME}:
            what = f"is pinned, and damaged ({error}); pass overwrite=True to replace it"
            raise CheckpointExists(f"{where} {what}", path=where, step=step) from None
        if isinstance(error, CheckpointCorrupt):
            return True
        foreign = [entry.name for entry in entries if entry.is_folder or not is_ours(entry.name)]
        if foreign:
            raise CheckpointExists(
                f"{where} holds {foreign[0]!r}, which no checkpoint of ours has; move the folder away or use another root",
                path=where, step=step) from None  # fmt: skip
        return bool(entries) or storage.atomic_rename
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return False  # deleted by somebody else meanwhile
    except UnsupportedVersion as error:
        raise CheckpointExists(f"{where} is in the way: {error}", path=where, step=step) from None
    if not overwrite:
        raise CheckpointExists(
            f"{where} is a committed checkpoint; pass overwrite=True to replace it", path=where, step=step
        )
    if PIN_NAME in names:
        raise CheckpointExists(f"{where} is pinned; unpin it before it is replaced", path=where, step=step)
    return True


def check_alone(storage: Storage, attempt: str, folder: str, files: Mapping[str, FileRecord], step: int | None) -> None:
    """Where attempts are built in place: that of our kind, just the mark and `files` of this attempt are in the folder.

    Raises CheckpointExists when another job has come between.
    """
    expected = {mark_name(attempt): 0} | {name: record.size for name, record in files.items()}
    found = {e.name: e.size for e in entries_in(storage, folder) if is_ours(e.name) and not e.is_folder}
    if found != expected:
        other = next(name for name in sorted(found | expected) if found.get(name) != expected.get(name))
        where = storage.at(folder)
        raise CheckpointExists(f"another job saves at {where} (see {other})", path=where, step=step)


def publish(
    storage: Storage,
    attempt: str,
    folder: str,
    name: str,
    manifest: CheckpointManifest,
    overwrite: bool,
    tell: Callable[[str], None],
) -> None:
    """Make the files in `folder` the checkpoint `name`. On return it exists and survives a crash.

    What cannot be cleaned up after that is no error; it is told.

    With atomic rename: manifest into the attempt, then the attempt takes the name; what had it is put aside first and
    removed after, so at every instant the old or the new one counts. Elsewhere the manifest's put is the commit.
    """
    if not storage.atomic_rename:
        check_alone(storage, attempt, folder, manifest.files, manifest.step)
    storage.write(join(folder, MANIFEST_NAME), manifest.encode())
    if not storage.atomic_rename:
        try:
            unmark_attempts(storage, folder)
        except StorageError as error:
            tell(f"{storage.at(folder)}: the mark of the attempt was left: {error}")
        return
    storage.sync_folder(folder)
    aside = f"{name}.replaced-{attempt}"
    gives_way = check_place(storage, name, manifest.step, manifest.run_id, overwrite)
    if gives_way:
        storage.rename(name, aside)
    moved = False
    try:
        _rename_once(storage, attempt, folder, name)
        moved = True
        storage.sync_folder("")
    except StorageError as error:
        if moved:  # it may not survive a crash, so the save has failed: nothing of it stays
            storage.rename(name, folder)
        if gives_way:
            storage.rename(aside, name)
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            where = storage.at(name)
            raise CheckpointExists(
                f"{where} was made by somebody else meanwhile", path=where, step=manifest.step
            ) from None
        raise
    if gives_way:
        try:
            remove_checkpoint_folder(storage, aside)
        except (StorageError, CheckpointCorrupt) as error:
            tell(f"{storage.at(aside)}, which was replaced, could not be removed: {error}")


def _rename_once(storage: Storage, attempt: str, folder: str, name: str) -> None:
    """Rename, and believe what lies there more than the answer: a network filesystem that sends a request again because
    the first answer was lost says ENOENT, EEXIST or ESTALE of a rename that it has done."""
    try:
        storage.rename(folder, name)
    except StorageError:
        try:
            done = _committed_by(storage, name) == attempt
        except StorageError:
            done = False
        if not done:
            raise


def _committed_by(storage: Storage, folder: str) -> str | None:
    """The attempt whose manifest is in a folder; None when none verifies."""
    try:
        return read_manifest(storage, folder).attempt_id
    except (CheckpointCorrupt, CheckpointNotFound, UnsupportedVersion):
        return None


def discard(
    storage: Storage, attempt: str, folder: str, tell: Callable[[str], None], *, others_write: bool = False
) -> None:
    """Remove what a failed attempt wrote. Never raises: the failure is what counts, and leftovers are swept later."""
    try:
        # Where attempts are built in place, what is there may be another job's by now: its attempt, or its checkpoint.
        if storage.atomic_rename or (
            attempts_among(entries_in(storage, folder)) == [attempt]
            and _committed_by(storage, folder) in (None, attempt)
        ):
            remove_attempt(storage, folder, keep_marks=others_write)
        else:
            storage.remove(join(folder, mark_name(attempt)))
            remove_if_empty(storage, folder)
    except StorageError as error:
        tell(f"{storage.at(folder)}: leftovers of a failed save could not be removed: {error}")
