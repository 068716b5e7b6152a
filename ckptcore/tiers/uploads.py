"""Second roots: what is committed in the fast root is uploaded to durable ones in the background.

    CheckpointManager("/nvme/run", keep=KeepLast(2), tiers=[Tier("s3://bucket/run",
    keep=KeepLast(5))])

A save is committed in the manager's own root, which may go with the machine. After that rank 0
copies it to each tier, in threads of low priority that training never waits for. What
waits to be uploaded is held: retention does not delete it. A failed upload stays waiting and is
tried again after the next commit; it is raised, or warned of, like that of a save in the
background. What the process leaves unfinished, the next one of the run finishes.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

from ..arguments import check_count, check_path, checked_options, shown
from ..catalog.catalog import Catalog, CleanUp, committed, mark_abandoned, scan
from ..catalog.folder import CheckpointInfo, read_manifest
from ..catalog.retention import RetentionPolicy, check_policy
from ..copy.checkpoint import copy_between
from ..errors import (
    AsyncSaveError,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    InvalidState,
    StorageError,
    UnsupportedVersion,
)
from ..events import SaveEvent
from ..saving.background import JOIN_SECONDS, Background, Outcome, SaveHandle, Uploading
from ..storage.base import Storage
from ..storage.chunks import Workers
from ..storage.local import LocalStorage
from ..storage.opening import open_storage
from ..storage.urls import masked_url, split_url

# Of no use to be tried again: what is to be uploaded is damaged or gone, or its place there is
# taken.
_FINAL = (CheckpointCorrupt, CheckpointExists, CheckpointNotFound, UnsupportedVersion)


@dataclass(frozen=True, repr=False)
class Tier:
    """A durable root beside the one that a manager saves to.

    root: local path, fsspec URL or Storage.
    every: int >= 1, each so many-th commit is uploaded, by the commit sequence in the manifests
        (default 1).
    keep: RetentionPolicy there (default None: all); what it would not keep any more is not
        uploaded.
    storage_options: dict for its filesystem, and into no message (default None).
    """

    root: str | os.PathLike[str] | Storage
    every: int = 1
    keep: RetentionPolicy | None = None
    storage_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.root, Storage):
            check_path("Tier: root", self.root)
        check_count("Tier: every", self.every)
        check_policy("Tier: keep", self.keep)
        checked_options("Tier: storage_options", self.storage_options)

    def __repr__(self) -> str:
        """Without what may be a secret."""
        root = self.root.url if isinstance(self.root, Storage) else masked_url(os.fspath(self.root))
        return f"Tier({root!r}, every={self.every}, keep={self.keep})"

    @cached_property
    def storage(self) -> Storage:
        return open_storage(self.root, self.storage_options)


class _UploadHandle(SaveHandle):
    """Uploads that began after one commit."""

    def __init__(
        self, step: int, where: str, on_error: Literal["raise", "warn"], drain_timeout: float
    ) -> None:
        self.where = where
        super().__init__(step, None, on_error, drain_timeout)

    @property
    def what(self) -> str:
        return f"the upload of step {self.step} to {self.where}"

    @property
    def warns(self) -> bool:
        """Whether there is something to warn of that nobody was told."""
        return bool(self._record.warnings)


class Uploads(Uploading):
    """All uploads of one manager; those of the other ranks have no tiers."""

    def __init__(
        self,
        source: Storage,
        tiers: Sequence[Tier],
        on_error: Literal["raise", "warn"] = "raise",
        drain_timeout: float = 0.0,
        threads: int = 1,
        emit: Callable[[SaveEvent], None] = lambda _: None,
    ) -> None:
        self.source, self.on_error, self.drain_timeout = source, on_error, drain_timeout
        self.threads, self.emit = threads, emit
        # Called, by the uploading thread, when one is not held any more, with where warnings go.
        self.on_release: Callable[[Callable[[str], None]], None] = lambda _: None
        self._lanes = [_Lane(self, tier) for tier in tiers]

    def _handles(self) -> list[_UploadHandle]:
        return [handle for lane in self._lanes for handle in lane.handles]

    @property
    def failed(self) -> bool:
        """Whether an upload has failed and nobody was told."""
        return any(handle.untold for handle in self._handles())

    @property
    def held(self) -> set[str]:
        """Names of checkpoints that are waiting, or on their way."""
        return {info.name for lane in self._lanes for info in lane.waiting()}

    def catch_up(self, run_id: str | None, step: int) -> None:
        """Begin to upload what an earlier process of the run did not."""
        for lane in self._lanes:
            if run_id is not None:
                lane.begin(run_id, step)

    def committed(self, info: CheckpointInfo) -> None:
        """Begin to upload what was committed, and what waits from before. Raises nothing, waits for
        nothing."""
        for lane in self._lanes:
            lane.begin(info.run_id or "", info.step or 0, info)

    def forget(self, name: str) -> None:
        """A checkpoint that somebody wants gone is not to be uploaded any more."""
        for lane in self._lanes:
            lane.forget(name)

    def wait(self, timeout: float | None) -> bool:
        """Whether all have ended, after at most `timeout` seconds. Raises nothing."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(
            h.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for h in self._handles()
        )

    def raise_failure(self) -> None:
        """Raise, or warn of, failures that nobody was told of."""
        for lane in self._lanes:
            while (ended := lane.take_ended()) is not None:
                ended.collect()

    def close(self, deadline: float) -> None:
        """Wait until `deadline`, by the monotonic clock, then give up what is left. Raises
        AsyncSaveError."""
        try:
            self.wait(max(0.0, deadline - time.monotonic()))
            stuck = [handle for handle in self._handles() if not handle.done()]
            for handle in stuck:
                handle.give_up()
            if stuck:
                what = (
                    f"{stuck[0].what} has not ended after {self.drain_timeout:g} s and is given "
                    "up; the next run finishes it"
                )
                raise AsyncSaveError(what, step=stuck[0].step)
            self.raise_failure()
        finally:
            for lane in self._lanes:
                lane.close()


class _Lane:
    """The uploads to one tier, one after another.

    The caller (at a restore, a delete, a next save), the thread that saves and the one that uploads
    all come by here: what they change is behind a lock, which a signal handler may come to on the
    thread that has it, and nobody holds it while it reads or writes files.
    """

    def __init__(self, uploads: Uploads, tier: Tier) -> None:
        self.uploads, self.tier, self.storage = uploads, tier, tier.storage
        self._there = Catalog(tier.storage)
        self._lock = threading.RLock()
        self._waiting: dict[str, CheckpointInfo] = {}
        self._handles: list[_UploadHandle] = []
        self._scanned = False
        self._forgotten: set[str] = set()  # until it was looked what an earlier process has left
        self._given_up = threading.Event()
        self._background = Background("ckptcore-upload")
        self._workers = Workers(uploads.threads, "ckptcore-upload-io", low_priority=True)

    def begin(self, run_id: str, step: int, info: CheckpointInfo | None = None) -> None:
        uploads = self.uploads
        handle = _UploadHandle(step, self.storage.url, uploads.on_error, uploads.drain_timeout)
        if not self._scanned:  # what an earlier process has left waiting is held from now on, too
            try:
                self._hold(committed(scan(uploads.source), run_id))
            except CheckpointError as error:
                handle.warn(
                    f"what is still to be uploaded to {self.storage.url} is not known: {error}"
                )
        with self._lock:
            if info is not None and self._due(info):
                self._waiting[info.name] = info
            idle = not self._waiting
            if not idle or handle.warns:  # warnings alone are kept until they were given
                self._handles.append(handle)
        if idle:
            handle.end(None, None)
            return
        self._workers.start()
        self._background.submit(handle, partial(self._work, run_id, handle))

    def _hold(self, left: Sequence[CheckpointInfo]) -> None:
        """Have wait what was found of an earlier process."""
        with self._lock:
            for info in left:
                if self._due(info) and info.name not in self._forgotten:
                    self._waiting.setdefault(info.name, info)  # what was committed meanwhile counts
            self._scanned = True
            self._forgotten.clear()

    def waiting(self) -> list[CheckpointInfo]:
        with self._lock:
            return list(self._waiting.values())

    @property
    def handles(self) -> list[_UploadHandle]:
        with self._lock:
            return list(self._handles)

    def forget(self, name: str) -> None:
        with self._lock:
            self._waiting.pop(name, None)
            if not self._scanned:
                self._forgotten.add(name)

    def take_ended(self) -> _UploadHandle | None:
        """The first handle that has ended, which is nobody else's from now on."""
        with self._lock:
            ended = next((handle for handle in self._handles if handle.done()), None)
            if ended is not None:
                self._handles.remove(ended)
            return ended

    def close(self) -> None:
        ended = all(handle.done() for handle in self.handles)
        self._given_up.set()
        self._background.close(JOIN_SECONDS if ended else 0.0)
        self._workers.close(JOIN_SECONDS if ended else 0.0)

    def _due(self, info: CheckpointInfo) -> bool:
        return (info.sequence or 0) % self.tier.every == 0

    def _work(self, run_id: str, handle: _UploadHandle) -> Outcome:
        """Upload what is waiting; the last one, and the first failure. Raises nothing."""
        try:
            return self._upload_all(run_id, handle)
        except BaseException as error:  # a watcher that leaves the program
            return Outcome(error=error)

    def _upload_all(self, run_id: str, handle: _UploadHandle) -> Outcome:
        """The newest first. Commits go on meanwhile, in another thread."""
        last: CheckpointInfo | None = None
        failed: BaseException | None = None
        tried: list[CheckpointInfo] = []
        there: list[CheckpointInfo] | None = None
        while not self._given_up.is_set():
            left = [info for info in self.waiting() if not any(info is other for other in tried)]
            if not left:
                break
            info = max(left, key=lambda info: info.order)
            started = time.perf_counter()
            try:
                if there is None:
                    there = committed(self._there.recall(), run_id)
                if self._wanted(info, there, handle):
                    last = self._upload(info, run_id, handle)
                    there.append(info)
                    self._event("uploaded", info, started)
                    keep, warn = self.tier.keep, handle.warn
                    self._there.clean_up(CleanUp(keep, run_id, last, warn, self._deleted))
            except BaseException as error:
                tried.append(info)
                if self._replaced(info):
                    self._done(info)
                    continue
                if failed is None:
                    failed, handle.step = error, info.step or 0
                self._event("upload_failed", info, started, error)
                if isinstance(error, _FINAL):
                    self._done(info)
                if there is None:  # the tier cannot be reached: no need to ask for each
                    break
            else:
                self._done(info)
                self.uploads.on_release(handle.warn)
        return Outcome(last, failed)

    def _wanted(
        self, info: CheckpointInfo, there: list[CheckpointInfo], handle: _UploadHandle
    ) -> bool:
        """Whether it is not there yet, and would stay there."""
        if any(_same(info, other) for other in there):
            return False
        waiting = {i.name: i for i in self.waiting()}
        mine = [*(i for i in there if i.name not in waiting), *waiting.values()]
        mine = [i for i in mark_abandoned(sorted(mine, key=lambda i: i.order)) if not i.abandoned]
        if self.tier.keep is None or not mine or info.name == mine[-1].name:
            return True
        try:
            return info.name in self.tier.keep.keep(mine)
        except Exception as error:  # a policy of the user's own may raise anything
            handle.warn(f"{self.storage.url}: which checkpoints to keep is not known: {error!r}")
            return True

    def _upload(self, info: CheckpointInfo, run_id: str, handle: _UploadHandle) -> CheckpointInfo:
        overwrite = False
        try:
            old = read_manifest(self.storage, info.name)
            overwrite = old.run_id == run_id and old.sequence < (info.sequence or 0)
        except (CheckpointNotFound, CheckpointCorrupt, UnsupportedVersion):
            pass
        return copy_between(
            self.uploads.source,
            info.name,
            self.storage,
            info.name,
            workers=self._workers,
            overwrite=overwrite,
            run_id=run_id,
            progress=self._go_on,
            warn=handle.warn,
        )

    def _go_on(self, *_: int) -> None:
        if self._given_up.is_set():
            raise StorageError(
                "the upload is given up", path=self.storage.url, errno=errno.ECANCELED
            )

    def _replaced(self, info: CheckpointInfo) -> bool:
        """Whether another checkpoint is in its place by now, or somebody has deleted it."""
        if not any(info is other for other in self.waiting()):
            return True
        try:
            return (
                info.manifest is not None
                and read_manifest(self.uploads.source, info.name).digest != info.manifest.digest
            )
        except CheckpointError:
            return False

    def _done(self, info: CheckpointInfo) -> None:
        with self._lock:
            if self._waiting.get(info.name) is info:
                del self._waiting[info.name]

    def _event(
        self,
        kind: Literal["uploaded", "upload_failed"],
        info: CheckpointInfo,
        started: float,
        error: BaseException | None = None,
    ) -> None:
        nbytes = 0 if error is not None else info.size_bytes or 0
        seconds = time.perf_counter() - started
        step, root = info.step or 0, self.storage.url
        event = SaveEvent(kind, step, 0, info.name, seconds, nbytes, error=error, root=root)
        self.uploads.emit(event)

    def _deleted(self, info: CheckpointInfo) -> None:
        nbytes = info.size_bytes or 0
        at, root = info.step or 0, self.storage.url
        self.uploads.emit(SaveEvent("deleted", at, 0, info.name, nbytes=nbytes, root=root))


def _same(one: CheckpointInfo, other: CheckpointInfo) -> bool:
    """Whether two are the same commit."""
    mine, theirs = one.manifest, other.manifest
    return mine is not None and theirs is not None and mine.digest == theirs.digest


def open_catalog(
    storage: Storage,
    tiers: Sequence[Tier],
    uploading: bool,
    on_error: Literal["raise", "warn"],
    drain_timeout: float,
    threads: int,
    emit: Callable[[SaveEvent], None],
) -> tuple[Catalog, Uploading]:
    """The catalog of a root with its tiers, and the uploads to them, which are rank 0's."""
    if not tiers:
        return Catalog(storage), Uploading()
    # Writing elsewhere is slow anyway: with half as many threads it takes less from the training.
    threads = max(1, threads // 2)
    uploads = Uploads(storage, tiers if uploading else (), on_error, drain_timeout, threads, emit)
    return UploadingCatalog(storage, tiers, uploads), uploads


def checked_tiers(storage: Storage, tiers: Any, mode: str) -> tuple[Tier, ...]:
    """The tiers of a root, none for None. Raises InvalidState for what is no tier, or no root of
    its own."""
    if not isinstance(tiers, Sequence | None) or isinstance(tiers, str | bytes):
        raise InvalidState(f"tiers must be a list of Tier(root), not {shown(tiers)}")
    found = tuple(tiers or ())
    if wrong := [tier for tier in found if not isinstance(tier, Tier)]:
        raise InvalidState(f"tiers are Tier(root), not {shown(wrong[0])}")
    if found and mode != "shared":
        raise InvalidState(
            "tiers need a root that all ranks share; with storage_mode='node' no rank sees all "
            "files"
        )
    roots = [storage, *(tier.storage for tier in found)]
    urls = [
        os.path.realpath(s.url) if isinstance(s, LocalStorage) else s.url.rstrip("/") for s in roots
    ]
    if len(set(urls)) < len(urls):
        twice = next(url for url in urls if urls.count(url) > 1)
        raise InvalidState(
            f"{twice} is given twice: a tier is another root than the manager's own, and than "
            "other tiers"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Holding(RetentionPolicy):
    """A policy that keeps what is still to be uploaded, too."""

    policy: RetentionPolicy
    held: set[str]

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        return self.policy.keep(checkpoints) | self.held


class UploadingCatalog(Catalog):
    """The root of a manager and its tiers, which checkpoints are on their way to."""

    def __init__(self, storage: Storage, tiers: Sequence[Tier], uploads: Uploads) -> None:
        super().__init__(storage, [tier.storage for tier in tiers])
        self.uploads = uploads
        self._cleaning = threading.Lock()
        self._last: CleanUp | None = None
        uploads.on_release = self._released

    def delete(self, info: CheckpointInfo) -> None:
        if not info.pinned:
            self.uploads.forget(split_url(info.url)[1])
        super().delete(info)

    def clean_up(self, after: CleanUp) -> None:
        self.uploads.committed(after.saved)
        self._last = after
        self._clean(after)

    def _clean(self, after: CleanUp) -> None:
        """But for what is still to be uploaded."""
        with self._cleaning:
            if after.policy is not None:
                after = replace(after, policy=_Holding(after.policy, self.uploads.held))
            super().clean_up(after)

    def _released(self, warn: Callable[[str], None]) -> None:
        """What was held may go, too."""
        if self._last is not None:
            self._clean(replace(self._last, warn=warn, listed=None))
