"""Committing: the index, the receipts, the manifest, and the one step that makes a checkpoint exist."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    CheckpointWarning,
    StorageError,
    UnsupportedVersion,
)
from ..format.digest import content_digest
from ..format.index import ComponentIndex, FileEntry, Index, TensorEntry, index_file_name
from ..format.manifest import MANIFEST_NAME, CheckpointManifest, FileRecord
from ..root import check_files, is_ours, join, read_manifest, remove_attempt, remove_checkpoint_folder
from ..state.tree import Captured
from ..storage.base import Storage
from .plan import FilePlan, hugging_face_index
from .writer import WrittenFile

__all__ = ["Receipt", "check_place", "discard", "publish", "write_index"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one rank wrote: files as they go into the manifest, and per component a digest of its plain values."""

    rank: int
    files: dict[str, FileRecord]
    values: dict[str, str]


def write_index(
    storage: Storage,
    folder: str,
    rank: int,
    captured: Sequence[Captured],
    written: Sequence[WrittenFile],
    whole: dict[str, list[FilePlan]],
) -> Receipt:
    """Write this rank's index, and the Hugging Face indexes of components split over files (`whole`: component ->
    all its files). Returns the receipt."""
    index = Index(rank)
    files: dict[str, FileRecord] = {}
    place_of: dict[tuple[str, int], tuple[str, str, int, bytes]] = {}
    for file in written:
        plan = file.plan
        index.files[plan.name] = FileEntry(plan.size, len(plan.header), file.header_digest)
        for number, place in plan.places:
            digests = bytes(file.digests[number])
            place_of[plan.component, number] = (plan.name, place.name, place.start, digests)
    for component in captured:
        index.components[component.key] = ComponentIndex(component.tree, _entries(component, place_of))
    for name, digest in index.file_digests().items():
        files[name] = FileRecord(index.files[name].size, digest, rank)
    small = {index_file_name(rank): index.encode()}
    for plans in whole.values():
        if len(plans) > 1:
            stem = plans[0].name.rsplit("-", 3)[0]
            small[f"{stem}.safetensors.index.json"] = hugging_face_index(plans)
    for name, data in small.items():
        storage.write(join(folder, name), data)
        files[name] = FileRecord(len(data), content_digest(data), rank)
    return Receipt(rank, files, {c.key: content_digest(c.tree) for c in captured})


def _entries(component: Captured, place_of: dict[tuple[str, int], tuple[str, str, int, bytes]]) -> list[TensorEntry]:
    entries = []
    for number, tensor in enumerate(component.tensors):
        shape = tensor.shape
        if tensor.alias_of is not None:
            entries.append(
                TensorEntry(tensor.name, tensor.dtype, shape, None, shape, None, None, 0, b"", tensor.alias_of)
            )
        else:
            file, stored_name, start, digests = place_of[component.key, number]
            entries.append(
                TensorEntry(tensor.name, tensor.dtype, shape, None, shape, file, stored_name, start, digests, None)
            )
    return entries


def check_place(storage: Storage, name: str, step: int | None, overwrite: bool) -> bool:
    """Whether something at `name` must give way to a new checkpoint.

    A committed checkpoint does so only with `overwrite`; what never became one, or is damaged, always. Raises
    CheckpointExists for the rest: a committed one, one of a newer format, or files that are not ours.
    """
    where = storage.at(name)
    try:
        entries = storage.list(name)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    try:
        check_files(storage, name, read_manifest(storage, name))
    except CheckpointNotFound:
        foreign = [entry.name for entry in entries if entry.is_folder or not is_ours(entry.name)]
        if foreign:
            raise CheckpointExists(
                f"{where} holds {foreign[0]!r}, which no checkpoint of ours has; move the folder away or use another root",
                path=where, step=step) from None  # fmt: skip
        return bool(entries) or storage.atomic_rename
    except CheckpointCorrupt:
        return True
    except UnsupportedVersion as error:
        raise CheckpointExists(f"{where} is in the way: {error}", path=where, step=step) from None
    if not overwrite:
        raise CheckpointExists(
            f"{where} is a committed checkpoint; pass overwrite=True to replace it", path=where, step=step
        )
    return True


def publish(
    storage: Storage, attempt: str, folder: str, name: str, manifest: CheckpointManifest, overwrite: bool
) -> None:
    """Make the files in `folder` the checkpoint `name`. On return it exists and survives a crash.

    With atomic rename: manifest into the attempt, then the attempt takes the name; what had it is put aside first and
    removed after, so at every instant the old or the new one counts. Elsewhere the manifest's put is the commit.
    """
    storage.sync_folder(folder)
    storage.write(join(folder, MANIFEST_NAME), manifest.encode())
    if not storage.atomic_rename:
        return
    storage.sync_folder(folder)
    aside = f"{name}.replaced-{attempt}"
    gives_way = check_place(storage, name, manifest.step, overwrite)
    if gives_way:
        storage.rename(name, aside)
    try:
        storage.rename(folder, name)
    except StorageError as error:
        if gives_way:
            storage.rename(aside, name)
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            where = storage.at(name)
            raise CheckpointExists(
                f"{where} was made by somebody else meanwhile", path=where, step=manifest.step
            ) from None
        raise
    storage.sync_folder("")
    if gives_way:
        try:
            remove_checkpoint_folder(storage, aside)
        except (StorageError, CheckpointCorrupt) as error:
            warnings.warn(f"{storage.at(aside)}, which was replaced, could not be removed: {error}", CheckpointWarning)


def discard(storage: Storage, folder: str) -> None:
    """Remove what a failed attempt wrote. Never raises: the failure is what counts, and leftovers are swept later."""
    try:
        remove_attempt(storage, folder)
    except StorageError as error:
        what = f"{storage.at(folder)}: leftovers of a failed save could not be removed: {error}"
        warnings.warn(what, CheckpointWarning)


def coverage_error(plans: Sequence[FilePlan], receipts: Sequence[Receipt]) -> str | None:
    """Why the receipts do not cover every planned byte exactly once, or None."""
    seen: dict[str, FileRecord] = {}
    for receipt in receipts:
        for name, record in receipt.files.items():
            if name in seen:
                return f"{name} was written by ranks {seen[name].writer} and {record.writer}"
            seen[name] = record
    for plan in plans:
        found = seen.get(plan.name)
        if found is None or found.writer != plan.writer or found.size != plan.size:
            return f"{plan.name} ({plan.size:,} bytes) of rank {plan.writer} is not among what was written"
    return None
