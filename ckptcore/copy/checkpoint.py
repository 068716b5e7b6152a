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
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..arguments import check_callable, check_flag, check_path, check_threads, checked_options
from ..catalog.folder import (
    PIN_NAME,
    Attempt,
    CheckpointInfo,
    attempts_among,
    check_files,
    entries_in,
    in_flight,
    join,
    pin_checkpoint,
    read_manifest,
    still_there,
    unmark_attempts,
)
from ..catalog.transaction import open_transaction
from ..errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    CheckpointWarning,
    InvalidState,
    StorageError,
    UnsupportedVersion,
)
from ..format.manifest import MANIFEST_NAME, SIZE_LIMIT, CheckpointManifest
from ..loading.view import CheckpointView, Problem
from ..storage.base import Storage
from ..storage.chunks import Workers
from ..storage.opening import open_storage
from ..storage.urls import masked_url, split_url
from .files import CopyProgress, Counted, FileCopies

__all__ = ["CopyProgress", "copy_between", "copy_checkpoint"]

MAX_THREADS = 8


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
    told: list[str] = []
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
            tell=told.append,
        )
    finally:
        for text in told:
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
    tell: Callable[[str], None] = lambda _: None,
) -> CheckpointInfo:
    """Copy the checkpoint `folder` of one storage to `name` in another. See `copy_checkpoint`.

    run_id: the run that may sweep what is left of the copy when its machine is gone; by default
    nobody does but the next copy. workers: threads that somebody keeps. tell: what was left behind,
    and is no error.
    """
    view = CheckpointView(source, folder)
    owner = run_id or f"copies of {view.manifest.run_id}"
    own = None if workers is not None else Workers(threads or default_threads(), "ckptcore-copy")
    copy = _Copy(view, target, name, owner, workers or own or Workers(1), progress, tell)
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


def default_threads() -> int:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    )
    return min(MAX_THREADS, max(2, cores))


@dataclass(slots=True)
class _Copy:
    """One copy under way."""

    view: CheckpointView
    target: Storage
    name: str
    owner: str
    workers: Workers
    progress: CopyProgress | None
    tell: Callable[[str], None]
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
        if _same_place(view, target, name):
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
        marks = attempts_among(entries_in(self.target, self.name))
        if marks and all(Attempt.parse(mark).is_abandoned(self.owner) for mark in marks):
            unmark_attempts(self.target, self.name)  # of a copy that died when all was done
        return True

    @staticmethod
    def _pinned(storage: Storage, folder: str) -> bool:
        return any(entry.name == PIN_NAME for entry in entries_in(storage, folder))

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
        into = open_transaction(
            target,
            self.name,
            attempt,
            self.owner,
            manifest.step,
            overwrite=overwrite,
            digest=manifest.digest,
            resume=True,
            warn=self.tell,
        )
        if into.withdraws() and (problems := self.view.verify(self.workers.count)):
            # The old one goes before the new one is complete, so it had better become complete.
            raise _error_of(problems[0], self.view.url)
        into.begin()
        try:
            self.pins = self.pins or self._pinned(target, into.folder)
            FileCopies(self.view, into, self.workers, self.counted).make()
            target.sync_folder(into.folder)
            into.commit(manifest, encoded, pinned=self.pins)
        except BaseException as error:
            # What a storage that fails for a while, or Ctrl-C, leaves is taken up by the next copy;
            # all else is of no use.
            interrupted = not isinstance(error, Exception) or type(error) is StorageError
            if not interrupted:
                into.abort()
            raise
        into.remove_replaced()


def _same_place(view: CheckpointView, target: Storage, name: str) -> bool:
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
