"""The saves of one run: one at a time, at once or in the background, and what is told of each."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Literal, NamedTuple, TypeVar

from .catalog.folder import CheckpointInfo
from .coordinator import JOIN_SECONDS, warn_all
from .errors import AsyncSaveError, CheckpointWarning, InvalidState, RankFailed
from .events import OnEvent, SaveEvent
from .ranks.communicator import Communicator
from .replicas.shard_table import ShardTables
from .saving.background import Background, SaveHandle, at_exit
from .saving.flow import Saving
from .saving.staging import HostPool, Staging
from .state.tree import Structure
from .storage.workers import Workers
from .tiers.uploads import Uploads

__all__ = ["Saves"]

log = logging.getLogger("ckptcore")

T = TypeVar("T")


class Saves:
    """Keeps what outlives a save: threads, the pool of host memory, a conversation of the ranks for
    the background.

    after: what the run does after each commit, on the thread that committed, given what to tell
    warnings to. uploads: to other roots, whose failures are told like those of saves.
    """

    def __init__(
        self,
        comm: Communicator,
        io_threads: int,
        staging: Staging,
        on_error: Literal["raise", "warn"],
        drain_timeout: float,
        on_event: OnEvent | None,
        after: Callable[[Saving, CheckpointInfo], None],
        uploads: Uploads,
    ) -> None:
        self.comm, self.on_error, self.drain_timeout, self.on_event = (
            comm,
            on_error,
            drain_timeout,
            on_event,
        )
        self.after, self.uploads = after, uploads
        self.workers = Workers(io_threads)
        # Half as many: where training keeps every core busy, a core that is taken from it holds up
        # the others too.
        self._low_priority = Workers(
            max(1, io_threads // 2), "ckptcore-background", low_priority=True
        )
        self.failed_steps: list[int] = []
        self._pool = HostPool(staging)
        self._tables: ShardTables | None = None
        self._structures: dict[str, Structure] = {}
        self._background = Background()
        self._branch: Communicator | None = None
        # Rank 0 says it. Ranks count no branches: one that was interrupted in an earlier call may
        # have made fewer.
        self.branch_name = ""
        self._pending: SaveHandle | None = None
        self._pid = os.getpid()
        # One pool, one save at a time, whichever threads they are called from.
        self._turn, self._staging = threading.RLock(), False

    @property
    def busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    @property
    def failed(self) -> bool:
        """Whether a save in the background, or an upload, has failed and nobody was told."""
        return (self._pending is not None and self._pending.untold) or self.uploads.failed

    def check_process(self) -> None:
        """Raises InvalidState in a forked child: it has none of the threads."""
        if self._pid != os.getpid():
            raise InvalidState(
                "this CheckpointManager was made in the parent process; make one here, or save "
                "there"
            )

    def check_caller(self) -> None:
        """Raises InvalidState for a call that the save in the background makes itself, and in a
        forked child.

        On several ranks every call waits for its turn, and whoever has it may be waiting for that
        save.
        """
        self.check_process()
        if self.comm.world_size > 1 and self._pending is not None:
            self._pending.wait(0.0)

    def settle(self) -> None:
        """Wait for the save in the background; its failure is for `raise_failure`. Raises
        InvalidState in a fork."""
        self.check_process()
        if self._pending is not None:
            with self.comm.keep_alive() if self.busy else nullcontext():
                self._pending.wait(None)

    def raise_failure(self) -> None:
        """Raise, or warn of, the failure of a save in the background or an upload that nobody was
        told of."""
        pending = self._pending
        if pending is not None and pending.done():
            pending.collect()
        self.uploads.raise_failure()

    def wait(self, timeout: float | None) -> bool:
        """Whether no save is being written or uploaded any more, after at most `timeout` seconds.
        Raises AsyncSaveError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._pending is not None and not self._pending.wait(timeout):
            return False
        if not self.uploads.wait(
            None if deadline is None else max(0.0, deadline - time.monotonic())
        ):
            return False
        self.raise_failure()
        return True

    def now(self, saving: Saving) -> CheckpointInfo:
        """Do all of a save."""
        started = _Start.of(saving)
        try:
            saving.tables, saving.structures = self._kept_tables(saving), self._structures
            saving.begin()
            info = saving.finish(self.comm)
        except BaseException as error:
            self._ended(saving, started, None, error)
            with suppress(
                CheckpointWarning
            ):  # as an error it must not take the place of the one that counts
                warn_all(saving.told)
            raise
        self._ended(saving, started, info, None)
        self.after(saving, info)
        warn_all(saving.told)
        return info

    def later(self, saving: Saving) -> SaveHandle:
        """Capture and stage now, and leave the rest to the background."""
        with self._mine():
            return self._later(saving)

    def _kept_tables(self, saving: Saving) -> ShardTables:
        if self._tables is None:
            self._tables = ShardTables(spread=saving.writers == "split")
        return self._tables

    @contextmanager
    def _mine(self) -> Iterator[None]:
        """The pool, when no save is using it: another thread may have begun one since the caller
        has waited."""
        with self._turn:
            if self._staging:
                raise InvalidState(
                    "save_async was called in the middle of save_async, by a signal handler or a "
                    "state_dict(); use save there"
                )
            self._staging = True
            try:
                self.settle()
                if self._pending is not None:
                    self._pending.collect()
                yield
            finally:
                self._staging = False

    def _later(self, saving: Saving) -> SaveHandle:
        started = _Start.of(saving)
        branch = self._prepared()
        handle = SaveHandle(saving.request.step, saving, self.on_error, self.drain_timeout)
        with _no_garbage_collection():
            try:
                saving.tables, saving.structures = self._kept_tables(saving), self._structures
                saving.begin()
            except BaseException as error:
                handle.give_up()
                if branch is not self.comm and getattr(error, "of_round", None) is None:
                    branch.leave(
                        self.comm.number, error
                    )  # Ctrl-C, say: the others may have got beyond this
                raise
            try:
                self.emit("queued", saving, started)
                saving.stage(self._pool)
            except (
                BaseException
            ) as error:  # Ctrl-C: the save fails on all ranks, and the caller is told by this
                saving.failed = RankFailed(f"{type(error).__name__} while the state was copied")
                handle.give_up()
                raise
            finally:
                self._pending = handle
                self._background.submit(handle, lambda: self._finish(saving, started, branch))
        return handle

    def rehearse(self, saving: Saving) -> None:
        """Have ready what the first `later` of such a state needs."""
        with self._mine():
            saving.rehearse(self._pool)
            self._prepared()

    def close(self) -> None:
        """Wait, bounded in time, then give everything back. Raises AsyncSaveError."""
        if self._pid != os.getpid():
            return  # a forked child has neither the threads nor the connections
        deadline = time.monotonic() + self.drain_timeout
        try:
            self._close_saves()
        finally:
            self.uploads.close(deadline)

    def _close_saves(self) -> None:
        pending = self._pending
        try:
            if pending is not None and not pending.wait(self.drain_timeout):
                pending.give_up()
                what = (
                    f"the save of step {pending.step} has not ended after {self.drain_timeout:g} "
                    "s and is given up"
                )
                raise AsyncSaveError(what, step=pending.step)
            self.raise_failure()
        finally:
            ended = pending is None or pending.done()
            self._background.close(JOIN_SECONDS if ended else 0.0)
            self.workers.close(JOIN_SECONDS if ended else 0.0)
            self._low_priority.close(JOIN_SECONDS if ended else 0.0)
            if ended:
                self._pool.release()
            if self._branch is not None and self._branch is not self.comm:
                self._branch.close()
            if self._branch is not None:
                at_exit.discard(self._branch)

    def emit(
        self,
        kind: Literal["queued", "staged", "committed", "failed", "skipped"],
        saving: Saving,
        started: _Start | None = None,
        nbytes: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """Tell the watcher of one more event of a save."""
        seconds = 0.0 if started is None else time.perf_counter() - started.seconds
        retries = 0 if started is None else saving.storage.retries - started.retries
        step, name, timings = saving.request.step, saving.name, dict(saving.seconds)
        self.tell(
            SaveEvent(
                kind, step, self.comm.rank, name, seconds, nbytes, timings, error, retries=retries
            )
        )

    def tell(self, event: SaveEvent) -> None:
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception as error:
                log.warning(
                    "on_event failed with %r at %s of step %d", error, event.kind, event.step
                )

    def _prepared(self) -> Communicator:
        """Threads and connections, made before they are needed: at the end of a program none can
        be."""
        self.workers.start()
        self._low_priority.start()
        self._background.start()
        if self._branch is None:
            self._branch = self.comm.branch(self.branch_name)
            at_exit.add(self._branch)
        return self._branch

    def _finish(
        self, saving: Saving, started: _Start, branch: Communicator
    ) -> tuple[CheckpointInfo | None, BaseException | None]:
        """In the background: what is left of a save when its state is captured."""
        info: CheckpointInfo | None = None
        failed: BaseException | None = None
        try:
            info = self._numbered(branch, saving, lambda: self._rest(saving, started, branch))
        except BaseException as error:
            failed = error
            self.failed_steps.append(saving.request.step)
        try:
            self._ended(saving, started, info, failed)
            if info is not None:
                self._numbered(branch, saving, lambda: self.after(saving, info))
        except BaseException as error:  # the outcome is what it is all the same
            outcome = "failed" if info is None else "is committed"
            saving.told.append(
                f"{saving.name} {outcome}, and what comes after that went wrong: {error!r}"
            )
        return info, failed

    def _rest(self, saving: Saving, started: _Start, branch: Communicator) -> CheckpointInfo:
        saving.workers = self._low_priority
        if saving.staged is not None:
            saving.staged.wait()
            self.emit("staged", saving, started, saving.staged.nbytes)
        return saving.finish(branch)

    def _numbered(self, branch: Communicator, saving: Saving, work: Callable[[], T]) -> T:
        """Rounds in the background have the number of the call that they belong to, whatever became
        of others."""
        if branch is self.comm:
            return work()
        return branch.exclusively(f"save of step {saving.request.step}", work, number=saving.number)

    def _ended(
        self,
        saving: Saving,
        started: _Start,
        info: CheckpointInfo | None,
        error: BaseException | None,
    ) -> None:
        nbytes = 0 if info is None else info.size_bytes or 0
        self.emit("failed" if info is None else "committed", saving, started, nbytes, error)


class _Start(NamedTuple):
    """When a save was called for, and how often its storage had tried something again by then."""

    seconds: float
    retries: int

    @classmethod
    def of(cls, saving: Saving) -> _Start:
        return cls(time.perf_counter(), saving.storage.retries)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Many small objects are made and go again while state is captured: in a large program enough
    to start a collection of everything, a tenth of a second or more in the middle of a step."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
