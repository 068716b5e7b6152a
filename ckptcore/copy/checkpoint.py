"""Copies of checkpoints between any two storages: verified on the way, resumable, and no checkpoint
before it is whole.

A copy is a verified read whose destination is a file. It follows the rule of commits: where folders
can be renamed it is built beside its place and takes it in one step; elsewhere the manifest is put
last. The manifest is copied byte for byte, so that the copy is the same commit. What was complete
when a copy was interrupted, and verifies, is kept by the next one.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..arguments import check_callable, check_flag, check_path, check_threads, checked_options
from ..catalog.catalog import Target
from ..catalog.folder import (
    PIN_NAME,
    Attempt,
    CheckpointInfo,
    attempts_among,
    check_files,
    in_flight,
    is_ours,
    join,
    mark_name,
    pin_checkpoint,
    read_manifest,
    still_there,
    unmark_attempts,
)
from ..catalog.transaction import Transaction, open_transaction
from ..errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    CheckpointWarning,
    InvalidState,
    NoSpace,
    StorageError,
    UnsupportedVersion,
)
from ..format.digest import CHUNK_BYTES, DIGEST_BYTES, content_digest
from ..format.manifest import MANIFEST_NAME, SIZE_LIMIT, CheckpointManifest, FileEntry, Index
from ..format.tensorfile import StoredTensor
from ..loading.reader import OpenFile, StoredFiles, TensorRead
from ..loading.view import CheckpointView, Problem
from ..saving.writer import FilePlan, write_files
from ..storage.base import Storage
from ..storage.chunks import Chunk, Scratch, Workers, default_threads
from ..storage.opening import open_storage
from ..storage.urls import masked_url, split_url

# Called with the bytes that were copied and kept so far, and those of all files. What it raises
# ends the copy.
CopyProgress = Callable[[int, int, int], Any]


def copy_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    storage_options: dict[str, Any] | None = None,
    target_options: dict[str, Any] | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    pins: bool = False,
    progress: CopyProgress | None = None,
) -> CheckpointInfo:
    """Copy a checkpoint to another folder, which becomes the same checkpoint in another location.

    An interrupted copy is no checkpoint; the next one goes on with what it had finished. When the
    target holds this very commit already, nothing is done. Memory: `threads` times 8 MiB, and what
    the client of the target's storage keeps.

    source: local path or fsspec URL of the checkpoint's folder.
    target: local path or fsspec URL of the new folder.
    storage_options: dict for the filesystem of the source (default None).
    target_options: dict for that of the target (default None: storage_options).
    threads: int, that read and write (default None: one a core, at most 8).
    overwrite: bool, check a copy that is there, and replace it, or another checkpoint, where it is
        not this one (default False).
    pins: bool, copy the pin too (default False).
    progress: function of bytes copied, bytes kept and all bytes (default None).

    Raises InvalidState (an argument), CheckpointCorrupt (the source is damaged: nothing is
    published), CheckpointNotFound, CheckpointExists, UnsupportedVersion, NoSpace, StorageError.
    """
    left_behind: list[str] = []
    check_path("source", source)
    check_threads("threads", threads)
    check_flag("overwrite", overwrite)
    check_flag("pins", pins)
    check_callable("progress", progress)
    checked_options("storage_options", storage_options)
    checked_options("target_options", target_options)
    parent, name = split_url(text := check_path("target", target))
    if not name:
        raise InvalidState(
            f"{masked_url(text)!r} is the top of a storage; name the folder that is to become the "
            "checkpoint"
        )
    own = storage_options if target_options is None else target_options
    try:
        return copy_between(
            open_storage(source, storage_options),
            "",
            open_storage(parent, own),
            name,
            threads=threads,
            progress=progress,
            overwrite=overwrite,
            pins=pins,
            warn=left_behind.append,
        )
    finally:
        for text in left_behind:
            warnings.warn(text, CheckpointWarning, stacklevel=2)


def copy_between(
    source: Storage,
    folder: str,
    target: Storage,
    name: str,
    *,
    threads: int | None = None,
    progress: CopyProgress | None = None,
    overwrite: bool = False,
    pins: bool = False,
    run_id: str | None = None,
    workers: Workers | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> CheckpointInfo:
    """Copy the checkpoint `folder` of one storage to `name` in another. See `copy_checkpoint`.

    run_id: the run that may sweep what is left of the copy when its machine is gone; by default
    nobody does but the next copy. workers: threads that somebody keeps. warn: what was left behind,
    and is no error.
    """
    view = CheckpointView(source, folder)
    owner = run_id or f"copies of {view.manifest.run_id}"
    own = None if workers is not None else Workers(threads or default_threads(), "ckptcore-copy")
    copy = _Copy(view, target, name, owner, workers or own or Workers(1), progress, warn)
    try:
        return copy.run(overwrite, pins)
    except (CheckpointCorrupt, StorageError):
        if not still_there(source, folder, view.manifest):
            what = f"{view.url} was deleted or replaced while it was copied"
            raise CheckpointNotFound(what, path=view.url) from None
        raise
    finally:
        if own is not None:
            own.close()


@dataclass(slots=True)
class _Copy:
    """One copy under way."""

    view: CheckpointView
    target: Storage
    name: str
    owner: str
    workers: Workers
    progress: CopyProgress | None
    warn: Callable[[str], None]
    counted: Counted = field(init=False)
    pins: bool = False

    def run(self, overwrite: bool, pins: bool) -> CheckpointInfo:
        view, target, name = self.view, self.target, self.name
        manifest = view.manifest
        encoded = view.storage.read(join(view.folder, MANIFEST_NAME), SIZE_LIMIT)
        if CheckpointManifest.decode(encoded, view.url).digest != manifest.digest:
            raise CheckpointCorrupt(
                f"{view.url} was replaced while it was copied", path=view.url, kind="digest"
            )
        self.counted = Counted(manifest.size_bytes, self.progress)
        if _same_location(view, target, name):
            raise InvalidState(f"{view.url} is to be copied to where it is")
        self.pins = pins and self._pinned(view.storage, view.folder)
        if self._there(overwrite):
            self.counted.add(0, manifest.size_bytes)
        else:
            # What repairs a checkpoint leaves it as it was.
            self.pins = self.pins or (self._same() and self._pinned(target, name))
            attempt = Attempt.new(self.owner)
            try:
                with in_flight(str(attempt)):
                    self._build(str(attempt), manifest, encoded, overwrite)
            except CheckpointExists:
                if not self._there(overwrite):  # else another copy was quicker
                    raise
        if self.pins:
            pin_checkpoint(target, name)
        there = CheckpointManifest.decode(encoded, target.at(name))
        return CheckpointInfo(name, target.at(name), "committed", there.step, None, there)

    def _there(self, thoroughly: bool) -> bool:
        """Whether the target holds this commit already, by a look at its files, or `thoroughly` by
        reading them."""
        try:
            if not self._same():
                return False
            there = CheckpointView(self.target, self.name)
            check_files(self.target, self.name, there.manifest)
        except (CheckpointNotFound, CheckpointCorrupt):
            return False
        if thoroughly and there.verify(self.workers.count):
            return False
        marks = attempts_among(self.target.entries(self.name))
        if marks and all(Attempt.parse(mark).is_abandoned(self.owner) for mark in marks):
            unmark_attempts(self.target, self.name)  # of a copy that died when all was done
        return True

    @staticmethod
    def _pinned(storage: Storage, folder: str) -> bool:
        return any(entry.name == PIN_NAME for entry in (storage.entries(folder) or ()))

    def _same(self) -> bool:
        """Whether the manifest at the target is of this very commit."""
        try:
            return read_manifest(self.target, self.name).digest == self.view.manifest.digest
        except (CheckpointNotFound, CheckpointCorrupt, UnsupportedVersion):
            return False

    def _build(
        self, attempt: str, manifest: CheckpointManifest, encoded: bytes, overwrite: bool
    ) -> None:
        target = self.target
        made = Target(
            self.name, self.owner, manifest.step, overwrite=overwrite, digest=manifest.digest
        )
        files = manifest.user_files
        into = open_transaction(
            target, made, attempt, resume=True, warn=self.warn, user_files=files
        )
        if into.withdraws() and (problems := self.view.verify(self.workers.count)):
            # The old one goes before the new one is complete, so it had better become complete.
            raise _error_of(problems[0], self.view.url)
        into.begin()
        try:
            self.pins = self.pins or self._pinned(target, into.folder)
            CopiedFiles(self.view, into, self.workers, self.counted).make()
            target.sync_folder(into.folder)
            into.commit(encoded, pinned=self.pins)
        except BaseException as error:
            # What a storage that fails for a while, or Ctrl-C, leaves is taken up by the next copy;
            # all else is of no use.
            interrupted = not isinstance(error, Exception) or type(error) is StorageError
            if not interrupted:
                into.abort()
            raise
        into.remove_replaced()


def _same_location(view: CheckpointView, target: Storage, name: str) -> bool:
    mine, other = view.url, target.at(name)
    if "://" not in mine and "://" not in other:
        return os.path.realpath(mine) == os.path.realpath(other)
    return mine.rstrip("/") == other.rstrip("/")


def _error_of(problem: Problem, url: str) -> CheckpointError:
    if problem.kind == "storage":
        return StorageError(problem.message, path=problem.file, errno=errno.EIO)
    return CheckpointCorrupt(
        problem.message,
        path=url,
        file=problem.file,
        kind=problem.kind,
        tensor=problem.tensor,
        expected=problem.expected,
        actual=problem.actual,
    )


@dataclass(slots=True)
class Counted:
    """What `progress` is called with, from all threads."""

    total: int
    progress: CopyProgress | None
    copied: int = 0
    kept: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, copied: int, kept: int = 0) -> None:
        with self.lock:
            self.copied += copied
            self.kept += kept
            if self.progress is not None:
                self.progress(self.copied, self.kept, self.total)


class _Stored:
    """The bytes of a file of the checkpoint that is copied, verified when they are fetched."""

    def __init__(self, view: CheckpointView, name: str, reads: Sequence[TensorRead]) -> None:
        chunks = sum(len(read.entry.digests) // DIGEST_BYTES for read in reads)
        self.reads, self.file = reads, OpenFile(view.files, name, chunks)

    def fetch(self, chunks: Sequence[Chunk[int]], scratch: Scratch) -> list[memoryview]:
        buffers = [scratch.take(0, sum(chunk.length for chunk in chunks))]
        stored = [Chunk(start, n, at, self.reads[number]) for start, n, at, number in chunks]
        for damage in self.file.read(stored, buffers, scratch.size).values():
            raise damage
        self.file.due.done(len(chunks))
        return buffers


@dataclass(slots=True)
class CopiedFiles:
    """The files that the manifest of `view` lists, for an attempt that was begun."""

    view: CheckpointView
    into: Transaction
    workers: Workers
    counted: Counted

    @property
    def target(self) -> Storage:
        return self.into.storage

    @property
    def work(self) -> str:
        return self.into.folder

    def make(self) -> None:
        """Copy all files, but for those that are there and verify. Each is complete on return, or
        not there.

        Raises CheckpointCorrupt for the source, NoSpace, StorageError.
        """
        view, files = self.view, self.view.manifest.files
        found = self._left_complete()
        self._check_space(sum(record.size for name, record in files.items() if name not in found))
        described: set[str] = set()
        try:
            for writer in sorted({w for c in view.manifest.components.values() for w in c.writers}):
                index = view.index(writer)
                described.update(index.files)
                self._tensor_files(index, found)
                view.forget(writer)
        except CheckpointCorrupt as error:
            error.path = error.path or view.url
            raise
        rest = sorted(files.keys() - described)
        self.workers.run([partial(self._whole_file, name, name in found) for name in rest])

    def _left_complete(self) -> set[str]:
        """Files of an interrupted copy that have the size that they should have. Others of our kind
        are removed."""
        entries = self.target.entries(self.work) or ()
        marks = {mark_name(attempt) for attempt in attempts_among(entries)}
        found = set()
        for entry in entries:
            record = self.view.manifest.files.get(entry.name)
            ours = is_ours(entry.name) or entry.name in self.view.manifest.user_files
            if entry.is_folder or entry.name in marks or not ours:
                continue
            if record is not None and record.size == entry.size:
                found.add(entry.name)
            else:
                self.target.remove(join(self.work, entry.name))
        return found

    def _check_space(self, nbytes: int) -> None:
        free = self.target.free_bytes()
        if free is not None and free < nbytes:
            what = f"{self.target.at(self.work)} needs {nbytes:,} bytes, {free:,} are free"
            raise NoSpace(what, path=self.target.url, needed=nbytes, free=free)

    def _whole_file(self, name: str, there: bool) -> None:
        """An index, or another file that is no tensor file."""
        path, record = join(self.work, name), self.view.manifest.files[name]
        if there:
            with suppress(StorageError):
                if content_digest(self.target.read(path, SIZE_LIMIT)) == record.digest:
                    self.counted.add(0, record.size)
                    return
            self.target.remove(path)
        data = self.view.read_file(name)
        self.into.write(name, data)
        self.counted.add(len(data))

    def _tensor_files(self, index: Index, found: Collection[str]) -> None:
        """Those of one writer."""
        reads: dict[str, list[TensorRead]] = {name: [] for name in index.files}
        for read in sorted(self.view.reads_of(index), key=lambda read: read.entry.start):
            if read.entry.file is not None and read.entry.nbytes:
                reads[read.entry.file].append(read)
        for name in found & reads.keys():
            if self._verifies(name, index.files[name], reads[name]):
                self.counted.add(0, index.files[name].size)
                del reads[name]
            else:
                self.target.remove(join(self.work, name))
        plans: dict[str, FilePlan] = {}
        self.workers.run(
            [partial(self._plan, plans, name, index, mine) for name, mine in reads.items()]
        )
        sources = {name: _Stored(self.view, name, mine) for name, mine in reads.items()}
        known = {
            (name, number): read.entry.digests
            for name, mine in reads.items()
            for number, read in enumerate(mine)
        }
        batch_bytes = max(CHUNK_BYTES, self.view.storage.request_bytes)
        try:
            write_files(
                self.into,
                [*plans.values()],
                sources,
                self.workers,
                known,
                self.counted.add,
                batch_bytes,
            )
        finally:
            for source in sources.values():
                source.file.close()

    def _plan(
        self, plans: dict[str, FilePlan], name: str, index: Index, reads: Sequence[TensorRead]
    ) -> None:
        """Add to `plans` how a file is written again, of which `reads` are all tensors."""
        view, stored = self.view, index.files[name]
        covered = stored.header_size + sum(read.entry.nbytes for read in reads)
        if covered != stored.size:
            what = f"{view.storage.at(join(view.folder, name))} has bytes that no digest covers"
            raise CheckpointCorrupt(
                what, path=view.url, file=name, kind="format", expected=stored.size, actual=covered
            )
        header = view.files.check_header(name, stored)
        tensors = []
        for number, read in enumerate(reads):
            e = read.entry
            stored_tensor = StoredTensor(e.name, e.dtype, e.local_shape, e.start, e.nbytes)
            tensors.append((number, stored_tensor))
        plans[name] = FilePlan(name, name, index.writer, bytes(header), tuple(tensors))

    def _verifies(self, name: str, known: FileEntry, reads: Sequence[TensorRead]) -> bool:
        """Whether a file that an interrupted copy left is what it should be."""
        files = StoredFiles(self.target, self.work)
        try:
            files.check_header(name, known)
            files.read(reads, self.workers.count)
        except (CheckpointCorrupt, StorageError):
            return False
        return True
