"""How a checkpoint comes to be under a root, whoever makes it: a save, a copy, an upload to a tier,
a node's part.

    transaction = open_transaction(storage, Target(name, run_id, step), attempt)
    transaction.begin()               # nothing is in the way, and there is a folder for the files
    transaction.create(file, size)    # any number of them, on any rank that sees the storage
    transaction.commit(encoded)       # its manifest: from here on it exists, and survives a crash
    transaction.remove_replaced()     # what gave way to it

or `abort` instead of `commit`. Where folders can be renamed in one step it is built beside its
place, which it takes when it is complete; elsewhere it is built in its place, and the put of the
manifest is the commit. Nobody else asks which of the two it is.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ..errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    StorageError,
    UnsupportedVersion,
)
from ..format.digest import content_digest
from ..format.manifest import MANIFEST_NAME, CheckpointManifest, FileRecord, check_readable
from ..storage.base import Entry, FileWriter, Storage
from .catalog import Target, within
from .folder import (
    PIN_NAME,
    WITHDRAWN_NAME,
    Attempt,
    attempts_among,
    check_files,
    is_half_uploaded,
    is_ours,
    join,
    mark_attempt,
    mark_name,
    read_manifest,
    remove_attempt,
    remove_checkpoint_folder,
    remove_if_empty,
    unmark_attempts,
    user_files_in,
)


@dataclass
class Transaction(ABC):
    """One attempt to make the checkpoint that `target` says. Making it does nothing yet; every rank
    that writes to the storage may have one, and one of them begins and ends it.

    marked: nobody else may begin the same attempt, which finds nodes that share a storage without
    knowing. resume: take up what an interrupted attempt of the same owner left. warn: is given what
    was left behind and is no error. user_files: names of its files that the format does not give.
    file: the manifest as listings show it after the commit, where that is known.
    """

    storage: Storage
    target: Target
    attempt: str
    marked: bool = False
    resume: bool = False
    warn: Callable[[str], None] = lambda _: None
    user_files: Sequence[str] = ()
    replaced: str | None = field(default=None, init=False)
    file: Entry | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return self.target.name

    @property
    @abstractmethod
    def folder(self) -> str:
        """Where its files are until the commit."""

    @abstractmethod
    def withdraws(self) -> bool:
        """Whether `begin` takes away a checkpoint that counts, long before the new one does."""

    def begin(self) -> None:
        """Have a folder for the files, and nothing in the way. Raises CheckpointExists,
        StorageError; then nothing of it stays."""
        gives_way = check_target(self.storage, self.target)
        try:
            self._begin(gives_way)
        except (StorageError, CheckpointExists) as error:
            taken = self.marked and isinstance(error, StorageError) and error.errno == errno.EEXIST
            if not (taken or (self.resume and type(error) is StorageError)):
                self.abort()
            raise

    @abstractmethod
    def _begin(self, gives_way: bool) -> None: ...

    @abstractmethod
    def is_visible(self) -> bool:
        """Whether this storage is the one that it was begun in."""

    def create(self, file: str, size: int) -> FileWriter:
        """A new file of it."""
        return self.storage.create(f"{self.folder}/{file}", size)

    def write(self, file: str, data: bytes) -> None:
        """A new small file of it, durable on return."""
        self.storage.write(f"{self.folder}/{file}", data)

    def commit(self, encoded: bytes, *, pinned: bool = False) -> None:
        """Make its files the checkpoint. On return it exists and survives a crash.

        encoded: the manifest. pinned: where the storage allows that, it is never there without its
        pin. Raises InvalidState (a manifest that readers would refuse), CheckpointExists,
        StorageError.
        """
        self._commit(check_readable(encoded), encoded, pinned)

    @abstractmethod
    def _commit(self, manifest: CheckpointManifest, encoded: bytes, pinned: bool) -> None: ...

    def published(self) -> CheckpointManifest | None:
        """The manifest, where a `commit` that was interrupted has come about all the same; it
        survives a crash then. None where that is not known."""
        with suppress(CheckpointCorrupt, CheckpointNotFound, UnsupportedVersion, StorageError):
            manifest = read_manifest(self.storage, self.name)
            if manifest.attempt_id == self.attempt:
                self.storage.sync_folder("")
                return manifest
        return None

    def remove_replaced(self) -> None:
        """Remove what has given way to the checkpoint. That is committed, so a failure is a warning
        only."""
        if self.replaced is not None:
            try:
                remove_checkpoint_folder(self.storage, self.replaced)
            except (StorageError, CheckpointCorrupt) as error:
                where = self.storage.at(self.replaced)
                self.warn(f"{where}, which was replaced, could not be removed: {error}")

    def abort(self, *, others_write: bool = False) -> None:
        """Remove what it wrote, if it is not committed. Never raises: the failure that led here is
        what counts, and leftovers are swept later. others_write: ranks may go on writing there."""
        try:
            self._abort(others_write)
        except StorageError as error:
            where = self.storage.at(self.folder)
            self.warn(f"{where}: leftovers of a failed save could not be removed: {error}")

    @abstractmethod
    def _abort(self, others_write: bool) -> None: ...

    def take_back(self) -> None:
        """Undo `commit`, because it failed on another node. Never raises: what is on one node alone
        is no checkpoint."""
        try:
            self._take_back()
        except (StorageError, CheckpointCorrupt) as error:
            where, what = self.storage.at(self.name), "a save that failed on another node"
            self.warn(f"{where}: {what} could not be taken back: {error}")

    @abstractmethod
    def _take_back(self) -> None: ...


class BesideTransaction(Transaction):
    """Built beside its place, and renamed: what had the name is put aside first and removed after,
    so at every instant the old or the new one counts."""

    @property
    def folder(self) -> str:
        return f"{self.name}.partial-{self.attempt}"

    def withdraws(self) -> bool:
        return False

    def is_visible(self) -> bool:
        return self.storage.entries(self.folder) is not None

    def _begin(self, gives_way: bool) -> None:
        if self.resume and self._take_over():
            return
        if self.marked or self.user_files:
            mark_attempt(self.storage, self.folder, self.attempt, self.user_files)
        else:
            self.storage.make_folder(self.folder)

    def _take_over(self) -> bool:
        """Rename what an interrupted attempt left."""
        beginning = f"{self.name}.partial-"
        try:
            entries = self.storage.list()
        except StorageError:
            entries = []
        for entry in entries:
            left = entry.name.removeprefix(beginning)
            ours = entry.is_folder and left != entry.name
            if ours and Attempt.parse(left).is_abandoned(self.target.run_id):
                with suppress(StorageError):  # another attempt was quicker
                    self.storage.rename(entry.name, self.folder)
                    return True
        return False

    def create(self, file: str, size: int) -> FileWriter:
        if not self.resume:
            return super().create(file, size)
        return _NamedWhenDurable(super().create(_unfinished(file), size), self, file)

    def write(self, file: str, data: bytes) -> None:
        super().write(_unfinished(file) if self.resume else file, data)
        if self.resume:
            self.name_durable(file)

    def name_durable(self, file: str) -> None:
        """Give a file its name, which it has only when it is durable: what an interrupted attempt
        left under that, and verifies, might otherwise be in memory only."""
        self.storage.rename(join(self.folder, _unfinished(file)), join(self.folder, file))

    def _commit(self, manifest: CheckpointManifest, encoded: bytes, pinned: bool) -> None:
        storage, folder, name = self.storage, self.folder, self.name
        if pinned:
            storage.write(join(folder, PIN_NAME), b"")
        storage.write(path := join(folder, MANIFEST_NAME), encoded)
        if self.marked or self.user_files:  # the manifest says now which files are ours
            unmark_attempts(storage, folder)
        storage.sync_folder(folder)
        # Here, where nobody can have replaced it yet.
        file = Entry(MANIFEST_NAME, False, len(encoded), storage.identity(path))
        aside = f"{name}.replaced-{self.attempt}"
        now = replace(
            self.target,
            run_id=manifest.run_id,
            step=manifest.step,
            abandoned=manifest.abandoned,
            digest=manifest.digest,
        )
        gives_way = check_target(storage, now)
        if gives_way:
            storage.rename(name, aside)
        moved = False
        try:
            _rename_once(storage, manifest.attempt_id, folder, name)
            moved = True
            storage.sync_folder("")
        except StorageError as error:
            # If it was moved it may not survive a crash, so it has failed: nothing of it stays.
            self._rename_back([(name, folder)] * moved + [(aside, name)] * gives_way)
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                where = storage.at(name)
                raise CheckpointExists(
                    f"{where} was made by somebody else meanwhile", path=where, step=manifest.step
                ) from None
            raise
        self.replaced, self.file = aside if gives_way else None, file

    def _rename_back(self, renames: Sequence[tuple[str, str]]) -> None:
        """Undo renames. Never raises: the failure that led here is the one to report, and a later
        sweep finishes this."""
        for now, before in renames:
            try:
                self.storage.rename(now, before)
            except StorageError as error:
                self.warn(f"{self.storage.at(now)} could not be renamed back to {before}: {error}")

    def _abort(self, others_write: bool) -> None:
        remove_attempt(self.storage, self.folder, keep_marks=others_write)

    def _take_back(self) -> None:
        self.storage.rename(self.name, self.folder)
        if self.replaced is not None:
            self.storage.rename(self.replaced, self.name)
        self.storage.sync_folder("")
        self.abort()


class InPlaceTransaction(Transaction):
    """Built in its place, under a mark that says whose attempt it is: what had the place is
    withdrawn before, and the manifest is put last."""

    @property
    def folder(self) -> str:
        return self.name

    def withdraws(self) -> bool:
        names = {entry.name for entry in (self.storage.entries(self.name) or ())}
        return MANIFEST_NAME in names and check_target(self.storage, self.target)

    def is_visible(self) -> bool:
        return self.attempt in attempts_among(self.storage.entries(self.folder))

    def _begin(self, gives_way: bool) -> None:
        storage, name = self.storage, self.name
        entries = (storage.entries(name) or ()) if self.resume else []
        marks = attempts_among(entries)
        names = {entry.name for entry in entries}
        resumes = bool(marks) and names.isdisjoint([MANIFEST_NAME, WITHDRAWN_NAME])
        if gives_way and not resumes:
            remove_checkpoint_folder(storage, name)
        mark_attempt(storage, name, self.attempt, self.user_files)
        if not resumes:
            check_alone(storage, self.attempt, name, {}, self.target.step)
            return
        for mark in marks:
            storage.remove(join(name, mark_name(mark)))
        if attempts_among(storage.entries(name)) != [self.attempt]:
            where = storage.at(name)
            raise CheckpointExists(f"{where} is being copied by another job, too", path=where)
        storage.drop_uploads(name)  # of the attempt that did not end

    def _commit(self, manifest: CheckpointManifest, encoded: bytes, pinned: bool) -> None:
        storage, folder = self.storage, self.folder
        check_alone(storage, self.attempt, folder, manifest.files, manifest.step)
        try:
            storage.write(join(folder, MANIFEST_NAME), encoded)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            where = storage.at(folder)  # of two jobs, the create-only put lets one through
            raise CheckpointExists(
                f"another job has just saved at {where}", path=where, step=manifest.step
            ) from None
        try:
            storage.remove(join(folder, mark_name(self.attempt)))  # the only one: `check_alone`
        except StorageError as error:
            self.warn(f"{storage.at(folder)}: the mark of the attempt was left: {error}")

    def _abort(self, others_write: bool) -> None:
        # What is there may be another job's by now: its attempt, or its checkpoint.
        storage, folder, attempt = self.storage, self.folder, self.attempt
        if attempts_among(storage.entries(folder)) == [attempt] and _committed_by(
            storage, folder
        ) in (None, attempt):
            remove_attempt(storage, folder, keep_marks=others_write)
        else:
            storage.remove(join(folder, mark_name(attempt)))
            remove_if_empty(storage, folder)

    def _take_back(self) -> None:
        if _committed_by(self.storage, self.name) == self.attempt:
            remove_checkpoint_folder(self.storage, self.name)


def open_transaction(
    storage: Storage,
    target: Target,
    attempt: str,
    *,
    marked: bool = False,
    resume: bool = False,
    warn: Callable[[str], None] = lambda _: None,
    user_files: Sequence[str] = (),
) -> Transaction:
    """The attempt to make a checkpoint, as this storage allows. See Transaction."""
    kind = BesideTransaction if storage.atomic_rename else InPlaceTransaction
    return kind(storage, target, attempt, marked, resume, warn, user_files)


def _unfinished(file: str) -> str:
    return f"unfinished.{content_digest(file.encode())}.safetensors"


class _NamedWhenDurable(FileWriter):
    """A file of an attempt that may be taken up by another one."""

    def __init__(self, writer: FileWriter, transaction: BesideTransaction, file: str) -> None:
        self._writer, self._transaction, self._file = writer, transaction, file

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._writer.write_at(offset, buffers)

    def close(self) -> None:
        self._writer.close()
        self._transaction.name_durable(self._file)

    def abort(self) -> None:
        self._writer.abort()


def check_target(storage: Storage, target: Target) -> bool:
    """Whether something at its name must give way to a new checkpoint of the run.

    What is the run's own and no checkpoint gives way: one of the run that is damaged, what an
    attempt that is provably abandoned left, a deletion that was not finished. All else does so only
    with `overwrite`: a committed checkpoint, and what may be somebody else's (damaged and of
    another run, or without a manifest that says whose it is; a copy that is going on looks like
    that). The same commit, by `digest`, may always take the place of itself when that is damaged,
    pinned or not. Raises CheckpointExists for the rest: also for a pinned one, one of a newer
    format, what another job may be writing in that place now, and files with names that no
    checkpoint has.
    """
    name, run_id = target.name, target.run_id
    entries = storage.entries(name)
    if entries is None:
        return False
    attempts = attempts_among(entries)
    alive = [] if storage.atomic_rename else attempts
    writing = [attempt for attempt in alive if not Attempt.parse(attempt).is_abandoned(run_id)]
    manifest: CheckpointManifest | None = None
    what = ""
    try:
        manifest = read_manifest(storage, name)
        names = check_files(storage, name, manifest)
    except (CheckpointNotFound, CheckpointCorrupt) as error:
        foreign: list[str] = []
        if isinstance(error, CheckpointNotFound):
            known = user_files_in(storage, name, entries)
            others = [entry for entry in entries if entry.name not in known]
            foreign = [entry.name for entry in others if entry.is_folder or not is_ours(entry.name)]
        if writing:
            what = f"is being written by another job ({writing[0]})"
        elif foreign:
            what = (
                f"holds {foreign[0]!r}, which no checkpoint of ours has; move the folder away or "
                "use another root"
            )
        elif not target.overwrite:
            what = _only_overwritten(target, {e.name for e in entries}, attempts, manifest, error)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return False  # deleted by somebody else meanwhile
    except UnsupportedVersion as error:
        what = f"is in the way: {error}"
    else:
        left = manifest.run_id == run_id and within(manifest.sequence, target.abandoned or ())
        if not (target.overwrite or left):
            what = "is a committed checkpoint; pass overwrite=True to replace it"
        elif PIN_NAME in names and manifest.digest != target.digest:
            what = "is pinned; unpin it before it is replaced"
    if what:
        where = storage.at(name)
        raise CheckpointExists(f"{where} {what}", path=where, step=target.step)
    return bool(entries) or storage.atomic_rename


def _only_overwritten(
    target: Target,
    there: set[str],
    attempts: Sequence[str],
    manifest: CheckpointManifest | None,
    error: CheckpointError,
) -> str:
    """Why what is no committed checkpoint gives way to `overwrite` alone; "" where it does so
    anyway. there: the names in its folder."""
    if PIN_NAME in there and WITHDRAWN_NAME not in there and there != {PIN_NAME}:
        return f"is pinned, and damaged ({error}); pass overwrite=True to replace it"
    if manifest is not None:
        whose = f"is of run {manifest.run_id!r}"
        of_run = manifest.run_id == target.run_id or manifest.digest == target.digest
    else:
        whose = "has no manifest that can be read"
        # Half of an upload was never anybody's file.
        files = {name for name in there if not is_half_uploaded(name)}
        of_run = files <= {PIN_NAME} or WITHDRAWN_NAME in there or bool(attempts)
    if of_run:
        return ""
    how = "pass overwrite=True to replace it, or move it away"
    return f"is not committed, but {whose}, so it may be somebody else's ({error}); {how}"


def check_alone(
    storage: Storage, attempt: str, folder: str, files: Mapping[str, FileRecord], step: int | None
) -> None:
    """Where attempts are built in place: that of our kind, just the mark and `files` of this
    attempt are in the folder.

    Raises CheckpointExists when another job has come between.
    """
    mark = mark_name(attempt)
    expected: dict[str, int | None] = {n: record.size for n, record in files.items() if is_ours(n)}
    expected[mark] = None
    entries = storage.entries(folder) or ()
    found = {e.name: e.size for e in entries if is_ours(e.name) and not e.is_folder}
    if mark in found:
        found[mark] = None
    if found != expected:
        other = min(name for name, _ in found.items() ^ expected.items())
        where = storage.at(folder)
        raise CheckpointExists(f"another job saves at {where} (see {other})", path=where, step=step)


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
