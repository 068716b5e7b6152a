"""The saves of one run: one at a time, at once or in the background, and what is told of each."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from .coordinator import warn_all
from .errors import AsyncSaveError, CheckpointWarning, InvalidState
from .events import OnEvent, SaveEvent
from .ranks.communicator import Communicator
from .root import CheckpointInfo
from .saving.background import Background, SaveHandle
from .saving.flow import Saving
from .saving.staging import HostPool, Staging
from .saving.workers import Workers

__all__ = ["Saves"]

log = logging.getLogger("ckptcore")


class Saves:
    """Keeps what outlives a save: threads, the pool of host memory, a conversation of the ranks for the background.

    after: what the run does after each commit, on the thread that committed, given what to tell warnings to.
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
    ) -> None:
        self.comm, self.on_error, self.drain_timeout, self.on_event = comm, on_error, drain_timeout, on_event
        self.after = after
        self.workers = Workers(io_threads)
        self.failed_steps: list[int] = []
        self._pool = HostPool(staging)
        self._background = Background()
        self._branch: Communicator | None = None
        self._pending: SaveHandle | None = None
        self._pid = os.getpid()

    @property
    def busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def settle(self) -> None:
        """Wait for the save in the background; its failure is for `raise_failure`. Raises InvalidState in a fork."""
        if self._pid != os.getpid():
            raise InvalidState("this CheckpointManager was made in the parent process; make one here, or save there")
        if self._pending is not None:
            if self.busy:
                self.comm.stay()
            self._pending.wait(None)

    def raise_failure(self) -> None:
        """Raise, or warn of, the failure of a save in the background that nobody was told of."""
        pending = self._pending
        if pending is not None and pending.done():
            self._pending = None
            pending.collect()

    def wait(self, timeout: float | None) -> bool:
        """Whether no save is being written any more, after at most `timeout` seconds. Raises AsyncSaveError."""
        if self._pending is not None and not self._pending.wait(timeout):
            return False
        self.raise_failure()
        return True

    def now(self, saving: Saving) -> CheckpointInfo:
        """Do all of a save."""
        started = time.perf_counter()
        try:
            saving.begin()
            info = saving.finish(self.comm)
        except BaseException as error:
            self._ended(saving, started, None, error)
            with suppress(CheckpointWarning):  # as an error it must not take the place of the one that counts
                warn_all(saving.told)
            raise
        self._ended(saving, started, info, None)
        self.after(saving, info)
        warn_all(saving.told)
        return info

    def later(self, saving: Saving) -> SaveHandle:
        """Capture and stage now, and leave the rest to the background."""
        started = time.perf_counter()
        branch = self._prepared()
        saving.begin()
        handle = SaveHandle(saving.request.step, saving, self.on_error, self.drain_timeout)
        self.emit("queued", saving, started)
        saving.stage(self._pool)
        self._pending = handle
        self._background.submit(lambda: self._finish(handle, saving, started, branch))
        return handle

    def rehearse(self, saving: Saving) -> None:
        """Have ready what the first `later` of such a state needs."""
        saving.begin(rehearsal=True)
        saving.plan()
        saving.rehearse(self._pool)
        self._prepared()

    def close(self) -> None:
        """Wait, bounded in time, then give everything back. Raises AsyncSaveError."""
        if self._pid != os.getpid():
            return  # a forked child has neither the threads nor the connections
        pending = self._pending
        try:
            if pending is not None and not pending.wait(self.drain_timeout):
                pending.give_up()
                what = f"the save of step {pending.step} has not ended after {self.drain_timeout:g} s and is given up"
                raise AsyncSaveError(what, step=pending.step)
            self.raise_failure()
        finally:
            self._background.close()
            self.workers.close()
            if pending is None or pending.done():
                self._pool.release()
            if self._branch is not None and self._branch is not self.comm:
                self._branch.close()

    def emit(
        self,
        kind: Literal["queued", "staged", "committed", "failed", "skipped"],
        saving: Saving,
        started: float | None = None,
        nbytes: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """Tell the watcher of one more event of a save."""
        seconds = 0.0 if started is None else time.perf_counter() - started
        step, name = saving.request.step, saving.name
        self.tell(SaveEvent(kind, step, self.comm.rank, name, seconds, nbytes, dict(saving.seconds), error))

    def tell(self, event: SaveEvent) -> None:
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception as error:
                log.warning("on_event failed with %r at %s of step %d", error, event.kind, event.step)

    def _prepared(self) -> Communicator:
        """Threads and connections, made before they are needed: at the end of a program none can be."""
        self.workers.start()
        self._background.start()
        self._branch = self._branch or self.comm.branch("save")
        return self._branch

    def _finish(self, handle: SaveHandle, saving: Saving, started: float, branch: Communicator) -> None:
        """In the background: what is left of a save when its state is captured."""
        info: CheckpointInfo | None = None
        failed: BaseException | None = None
        try:
            if saving.staged is not None:
                saving.staged.wait()
                self.emit("staged", saving, started, saving.staged.nbytes)
            info = saving.finish(branch)
        except BaseException as error:
            failed = error
            self.failed_steps.append(handle.step)
        self._ended(saving, started, info, failed)
        if info is not None:
            self.after(saving, info)
        handle.end(info, failed)

    def _ended(self, saving: Saving, started: float, info: CheckpointInfo | None, error: BaseException | None) -> None:
        nbytes = 0 if info is None else info.size_bytes or 0
        self.emit("failed" if info is None else "committed", saving, started, nbytes, error)
