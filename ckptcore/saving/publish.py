"""Publishing: the one step that makes the files in a folder a checkpoint, and what is looked at
before it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence

from ..attempts import Attempt
from ..errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    StorageError,
    UnsupportedVersion,
)
from ..format.manifest import MANIFEST_NAME, CheckpointManifest, FileRecord, check_readable
from ..root import (
    PIN_NAME,
    WITHDRAWN_NAME,
    Ranges,
    attempts_among,
    check_files,
    entries_in,
    is_half_uploaded,
    is_ours,
    join,
    mark_name,
    read_manifest,
    remove_attempt,
    remove_checkpoint_folder,
    remove_if_empty,
    within,
)
from ..storage.base import Entry, Storage

__all__ = [
    "check_alone",
    "check_place",
    "discard",
    "publish",
    "put_in_place",
    "remove_aside",
    "take_back",
]


def check_place(
    storage: Storage,
    name: str,
    step: int | None,
    run_id: str,
    overwrite: bool,
    *,
    digest: str | None = None,
    abandoned: Ranges = (),
) -> bool:
    """Whether something at `name` must give way to a new checkpoint of the run.

    What is the run's own and no checkpoint gives way: one of the run that is damaged, what an
    attempt that is provably abandoned left, a deletion that was not finished. All else does so only
    with `overwrite`: a committed checkpoint, and what may be somebody else's (damaged and of
    another run, or without a manifest that says whose it is; a copy that is going on looks like
    that). digest: of the manifest of the new one; the same commit may always take the place of
    itself when that is damaged, pinned or not. abandoned: commits of the run that give way, because
    it went back behind them. Raises CheckpointExists for the rest: also for a pinned one, one of a
    newer format, what another job may be writing in that place now, and files with names that no
    checkpoint has.
    """
    where = storage.at(name)
    try:
        entries = storage.list(name)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    attempts = attempts_among(entries)
    alive = [] if storage.atomic_rename else attempts
    writing = [attempt for attempt in alive if not Attempt.parse(attempt).is_abandoned(run_id)]
    manifest = None
    try:
        manifest = read_manifest(storage, name)
        names = check_files(storage, name, manifest)
    except (CheckpointNotFound, CheckpointCorrupt) as error:
        if writing:
            what = f"is being written by another job ({writing[0]})"
            raise CheckpointExists(f"{where} {what}", path=where, step=step) from None
        if isinstance(error, CheckpointNotFound):
            _refuse_foreign(where, entries, step)
        there = {entry.name for entry in entries}
        # Half of an upload was never anybody's file.
        files = {name for name in there if not is_half_uploaded(name)}
        own = files <= {PIN_NAME} or WITHDRAWN_NAME in there or bool(attempts)
        if manifest is not None:
            own = manifest.run_id == run_id or manifest.digest == digest
        if not overwrite:
            _refuse_uncommitted(where, step, there, own, manifest, error)
        return isinstance(error, CheckpointCorrupt) or bool(entries) or storage.atomic_rename
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return False  # deleted by somebody else meanwhile
    except UnsupportedVersion as error:
        raise CheckpointExists(f"{where} is in the way: {error}", path=where, step=step) from None
    left = manifest.run_id == run_id and within(manifest.sequence, abandoned)
    if not (overwrite or left):
        raise CheckpointExists(
            f"{where} is a committed checkpoint; pass overwrite=True to replace it",
            path=where,
            step=step,
        )
    if PIN_NAME in names and manifest.digest != digest:
        raise CheckpointExists(
            f"{where} is pinned; unpin it before it is replaced", path=where, step=step
        )
    return True


def _refuse_uncommitted(
    where: str,
    step: int | None,
    there: set[str],
    own: bool,
    manifest: CheckpointManifest | None,
    error: CheckpointError,
) -> None:
    """What is no committed checkpoint, and gives way to `overwrite` alone."""
    if PIN_NAME in there and WITHDRAWN_NAME not in there and there != {PIN_NAME}:
        what = f"is pinned, and damaged ({error}); pass overwrite=True to replace it"
        raise CheckpointExists(f"{where} {what}", path=where, step=step) from None
    if not own:
        whose = (
            "has no manifest that can be read"
            if manifest is None
            else f"is of run {manifest.run_id!r}"
        )
        what = f"is not committed, but {whose}, so it may be somebody else's ({error})"
        how = "pass overwrite=True to replace it, or move it away"
        raise CheckpointExists(f"{where} {what}; {how}", path=where, step=step) from None


def _refuse_foreign(where: str, entries: Sequence[Entry], step: int | None) -> None:
    foreign = [entry.name for entry in entries if entry.is_folder or not is_ours(entry.name)]
    if foreign:
        what = (
            f"{where} holds {foreign[0]!r}, which no checkpoint of ours has; move the folder away "
            "or use another root"
        )
        raise CheckpointExists(what, path=where, step=step) from None


def check_alone(
    storage: Storage, attempt: str, folder: str, files: Mapping[str, FileRecord], step: int | None
) -> None:
    """Where attempts are built in place: that of our kind, just the mark and `files` of this
    attempt are in the folder.

    Raises CheckpointExists when another job has come between.
    """
    expected = {mark_name(attempt): 0} | {name: record.size for name, record in files.items()}
    found = {
        e.name: e.size for e in entries_in(storage, folder) if is_ours(e.name) and not e.is_folder
    }
    if found != expected:
        other = next(
            name for name in sorted(found | expected) if found.get(name) != expected.get(name)
        )
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
    encoded: bytes | None = None,
) -> None:
    """Make the files in `folder` the checkpoint `name`. On return it exists and survives a crash.

    encoded: the manifest, where it is to be written as it was read. What cannot be cleaned up after
    that is no error; it is told.

    With atomic rename: manifest into the attempt, then the attempt takes the name; what had it is
    put aside first and removed after, so at every instant the old or the new one counts. Elsewhere
    the manifest's put is the commit.
    """
    aside = put_in_place(storage, attempt, folder, name, manifest, overwrite, tell, encoded)
    if aside is not None:
        remove_aside(storage, aside, tell)


def remove_aside(storage: Storage, aside: str, tell: Callable[[str], None]) -> None:
    """Remove what has given way to a checkpoint that is committed."""
    try:
        remove_checkpoint_folder(storage, aside)
    except (StorageError, CheckpointCorrupt) as error:
        tell(f"{storage.at(aside)}, which was replaced, could not be removed: {error}")


def put_in_place(
    storage: Storage,
    attempt: str,
    folder: str,
    name: str,
    manifest: CheckpointManifest,
    overwrite: bool,
    tell: Callable[[str], None],
    encoded: bytes | None = None,
) -> str | None:
    """`publish` without removing what gave way: the name that this has now, None when nothing
    did."""
    encoded = encoded or manifest.encode()
    check_readable(encoded)
    if not storage.atomic_rename:
        check_alone(storage, attempt, folder, manifest.files, manifest.step)
    try:
        storage.write(join(folder, MANIFEST_NAME), encoded)
    except StorageError as error:
        if error.errno != errno.EEXIST or storage.atomic_rename:
            raise
        where = storage.at(folder)  # of two jobs, the create-only put lets one through
        raise CheckpointExists(
            f"another job has just saved at {where}", path=where, step=manifest.step
        ) from None
    if not storage.atomic_rename:
        try:
            storage.remove(join(folder, mark_name(attempt)))  # the only one: `check_alone`
        except StorageError as error:
            tell(f"{storage.at(folder)}: the mark of the attempt was left: {error}")
        return None
    storage.sync_folder(folder)
    aside = f"{name}.replaced-{attempt}"
    gives_way = check_place(
        storage,
        name,
        manifest.step,
        manifest.run_id,
        overwrite,
        digest=manifest.digest,
        abandoned=manifest.abandoned,
    )
    if gives_way:
        storage.rename(name, aside)
    moved = False
    try:
        _rename_once(storage, manifest.attempt_id, folder, name)
        moved = True
        storage.sync_folder("")
    except StorageError as error:
        # If it was moved it may not survive a crash, so the save has failed: nothing of it stays.
        _rename_back(storage, [(name, folder)] * moved + [(aside, name)] * gives_way, tell)
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            where = storage.at(name)
            raise CheckpointExists(
                f"{where} was made by somebody else meanwhile", path=where, step=manifest.step
            ) from None
        raise
    return aside if gives_way else None


def _rename_back(
    storage: Storage, renames: Sequence[tuple[str, str]], tell: Callable[[str], None]
) -> None:
    """Undo renames. Never raises: the failure that led here is the one to report, and a later sweep
    finishes this."""
    for now, before in renames:
        try:
            storage.rename(now, before)
        except StorageError as error:
            tell(f"{storage.at(now)} could not be renamed back to {before}: {error}")


def take_back(
    storage: Storage,
    attempt: str,
    folder: str,
    name: str,
    aside: str | None,
    tell: Callable[[str], None],
) -> None:
    """Undo `put_in_place`, because it failed on another node. Never raises: what is on one node
    alone is no checkpoint."""
    try:
        if storage.atomic_rename:
            storage.rename(name, folder)
            if aside is not None:
                storage.rename(aside, name)
            storage.sync_folder("")
        elif _committed_by(storage, name) == attempt:
            remove_checkpoint_folder(storage, name)
    except (StorageError, CheckpointCorrupt) as error:
        tell(
            f"{storage.at(name)}: a save that failed on another node could not be taken back: "
            f"{error}"
        )
    else:
        if storage.atomic_rename:
            discard(storage, attempt, folder, tell)


def _rename_once(storage: Storage, attempt: str, folder: str, name: str) -> None:
    """Rename, and believe what lies there more than the answer: a network filesystem that sends a
    request again because the first answer was lost says ENOENT, EEXIST or ESTALE of a rename that
    it has done."""
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
    storage: Storage,
    attempt: str,
    folder: str,
    tell: Callable[[str], None],
    *,
    others_write: bool = False,
) -> None:
    """Remove what a failed attempt wrote. Never raises: the failure is what counts, and leftovers
    are swept later."""
    try:
        # Where attempts are built in place, what is there may be another job's by now: its attempt,
        # or its checkpoint.
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
