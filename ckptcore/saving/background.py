"""The saves of one run: one at a time, at once or in the background, and what is told of each.

A save in the background is captured and staged by the caller, and finished by one daemon thread; a
SaveHandle is what the caller holds of it. Its failure is told once: by the next call, `result`,
`close`, or at the end of the program, which waits for it.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import multiprocessing.util
import os
import queue
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

from ..arguments import checked_timeout
from ..catalog.folder import CheckpointInfo
from ..errors import (
    AsyncSaveError,
    CheckpointWarning,
    InvalidState,
    JoinTimeout,
    RankFailed,
    RankLost,
)
from ..events import OnEvent, SaveEvent
from ..ranks.communicator import Communicator
from ..state.tree import collector_paused
from ..storage.chunks import Workers, yield_to_others
from .devices import Staging
from .save import (
    JoinedSave,
    RunFacts,
    SaveCall,
    SavedCheckpoint,
    SaveJob,
    SaveRecord,
    StagedSave,
    capture,
    finish,
    join,
    rehearse,
    save_now,
    stage,
)
from .staging import HostPool

log = logging.getLogger("ckptcore")

# How long threads that have nothing left to do are waited for.
JOIN_SECONDS = 5.0


def warn_all(texts: Iterable[str]) -> None:
    for text in texts:
        warnings.warn(text, CheckpointWarning, stacklevel=3)


class SaveHandle(Future["CheckpointInfo | None"]):
    """A save in the background: a Future of its checkpoint. `save_async` returns it.

    step: int, of the checkpoint.
    skipped: bool, nothing is saved: another save was still being written (when_busy="skip"), or the
        step had a checkpoint (exists="skip"), which is then the result.
    error: the exception that the save failed with; None while there is none.
    """

    def __init__(
        self,
        step: int,
        record: SaveRecord | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        drain_timeout: float = 0.0,
        *,
        skipped: bool = False,
        info: CheckpointInfo | None = None,
    ) -> None:
        super().__init__()
        self.step, self.skipped = step, skipped
        self.error: BaseException | None = None
        self.on_error, self.drain_timeout = on_error, drain_timeout
        self._record = SaveRecord() if record is None else record
        self._staged: StagedSave | None = None
        self._pid = os.getpid()
        self._finisher = 0
        self.set_running_or_notify_cancel()  # what has begun cannot be cancelled
        if skipped:
            self.set_result(info)
        else:
            _expected(self)

    def __repr__(self) -> str:
        if self.skipped or self.done():
            how = "skipped" if self.skipped else "failed" if self.error is not None else "committed"
        else:
            how = "being written, {:,} of {:,} bytes".format(*self.progress)
        return f"<SaveHandle: step {self.step} ({how})>"

    def staged(self) -> bool:
        """Whether the host has a private copy of everything."""
        staged = self._staged
        return staged is None or staged.copy is None or staged.copy.complete()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of tensor files: written so far by this rank, and in all."""
        return self._record.written, self._record.total

    def result(self, timeout: float | None = None) -> CheckpointInfo | None:
        """Wait for the commit, and return the checkpoint. None for a save that was skipped because
        another one was still being written.

        timeout: seconds to wait (default None: for as long as it takes).

        Raises AsyncSaveError when the save failed (`__cause__` says why), and TimeoutError when it
        has not ended by then; it goes on.
        """
        timeout = checked_timeout(timeout)
        if self._pid != os.getpid():
            raise AsyncSaveError(
                f"the save of step {self.step} is the parent process's; ask there", step=self.step
            )
        if not self.wait(timeout):
            raise TimeoutError(
                f"the save of step {self.step} is still going on after {timeout:g} s"
            )
        self._warn()
        if self.error is not None:
            self.give_up()
            raise self.failure()
        return super().result()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end of the save, good or bad. Returns whether it has ended.

        timeout: seconds to wait at most; None for as long as it takes.

        Raises InvalidState on the thread that writes the save, as in `on_event`.
        """
        if self._finisher == threading.get_ident() and not self.done():
            raise InvalidState(
                f"{self.what} cannot be waited for by what it calls itself (on_event)"
            )
        if self._pid != os.getpid():
            return True
        with suppress(TimeoutError):
            self.exception(checked_timeout(timeout))
        return self.done()

    def collect(self) -> None:
        """Raise, or warn of, its failure, unless that was done before."""
        self._warn()
        if self.error is not None and self in _untold:
            self.give_up()
            if self.on_error == "raise":
                raise self.failure()
            warnings.warn(str(self.failure()), CheckpointWarning, stacklevel=5)

    @property
    def what(self) -> str:
        return f"the save of step {self.step}"

    @property
    def untold(self) -> bool:
        """Whether it has failed and that was neither raised nor a warning yet."""
        return self.done() and self.error is not None and self in _untold

    def give_up(self) -> None:
        """Have the end of the program not report it."""
        _untold.discard(self)

    def failure(self) -> AsyncSaveError:
        """The error to raise for a failed save."""
        what = f"{self.what} in the background failed: {self.error}"
        made = AsyncSaveError(what, step=self.step, causes=getattr(self.error, "causes", None))
        made.__cause__ = self.error
        return made

    def warn(self, text: str) -> None:
        """Have a warning given when somebody asks for the result, or at the next call.

        text: what is warned of.
        """
        self._record.warnings.append(text)

    def end(self, info: CheckpointInfo | None, error: BaseException | None) -> None:
        """For the thread that finishes the save.

        info: CheckpointInfo, what was committed; None where nothing was.
        error: what it failed with; None where it did not.
        """
        self.error, self._staged = error, None
        if error is None:
            self.give_up()
            self.set_result(info)
        else:
            self.set_exception(self.failure())

    def _warn(self) -> None:
        texts = self._record.warnings[:]
        del self._record.warnings[: len(texts)]
        for text in texts:
            warnings.warn(text, CheckpointWarning, stacklevel=4)


# Saves of this process that have not ended, or have failed and nobody was told.
_untold: set[SaveHandle] = set()


def _expected(handle: SaveHandle) -> None:
    """The end of the program waits for it."""
    global _registered_in, _past
    _untold.add(handle)
    _past = getattr(sys, "last_value", None)
    # Forked children of multiprocessing end without atexit, and forget what was registered before
    # they began.
    if _registered_in != os.getpid() and multiprocessing.process.parent_process() is not None:
        multiprocessing.util.Finalize(None, _drain, exitpriority=0)
    _registered_in = os.getpid()


_registered_in = 0
# An exception that was nobody's to catch before the last save began (in an interactive session) has
# not ended the program.
_past: BaseException | None = None


# Conversations of saves that nobody has closed.
at_exit: set[Communicator] = set()


@atexit.register
def _drain() -> None:
    """At the end of the program: wait for saves, bounded in time, and let the program fail when one
    has failed.

    An exit code can only be changed by leaving at once, so this comes after everything that
    registered later.
    """
    failed = False
    stuck = False
    while mine := [
        h for h in list(_untold) if h._pid == os.getpid()
    ]:  # a save may begin an upload when it ends
        handle = min(mine, key=lambda h: not h.done())
        if handle.wait(handle.drain_timeout):
            error: Exception | None = handle.failure() if handle.error is not None else None
        else:
            stuck = True
            error = TimeoutError(f"{handle.what} has not ended after {handle.drain_timeout:g} s")
        if error is not None:
            with suppress(Exception):  # nobody may be reading
                print(f"ckptcore: {error}", file=sys.stderr)
            failed |= handle.on_error == "raise"
        _untold.discard(handle)
    _untold.clear()
    for branch in () if stuck else at_exit:
        branch.close()  # rank 0 stays until the others have read that the save is committed
    # After an exception that nobody caught the exit code is not 0, and that exception remains the
    # last word. In a child of multiprocessing it is on its way here.
    dying = sys.exc_info()[1]
    fine = dying is None or (isinstance(dying, SystemExit) and not dying.code)
    if failed and fine and getattr(sys, "last_value", None) is _past:
        try:
            _flush()
        finally:
            os._exit(1)


def _flush() -> None:
    """What a program that leaves at once would take with it: lines that are logged, and files that
    are open. And what it would leave behind: children."""
    children = [c for c in multiprocessing.active_children() if c._parent_pid == os.getpid()]  # type: ignore[attr-defined]
    for child in children:
        with suppress(
            Exception
        ):  # a data loader raises, in a signal handler, that its worker was ended
            if child.daemon:
                child.terminate()
            child.join()
    logging.shutdown()
    for file in [
        o
        for o in gc.get_objects()
        if type(o) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    ]:
        with suppress(Exception):  # closed, or nobody is reading
            file.flush()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has become of work in the background."""

    info: CheckpointInfo | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Task:
    handle: SaveHandle
    work: Callable[[], Outcome]


class Background:
    """One daemon thread, from `start` or the first save on, that finishes one save after
    another."""

    def __init__(self, name: str = "ckptcore-save") -> None:
        self.name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # a signal handler may save, too

    def start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work, args=(self._tasks,), name=self.name, daemon=True
                )
            if self._thread.ident is None:  # also where it was interrupted before it began
                self._thread.start()

    def submit(self, handle: SaveHandle, work: Callable[[], Outcome]) -> None:
        """Do `work`, which raises nothing, and end `handle` with what comes of it."""
        self.start()
        self._tasks.put(_Task(handle, work))

    def close(self, timeout: float = 0.0) -> None:
        """Let the thread end when it is done, and wait for that for `timeout` seconds at most."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            if timeout and thread.ident is not None:
                thread.join(timeout)

    def __del__(self) -> None:
        self.close()


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    yield_to_others()
    while (task := tasks.get()) is not None:
        handle = task.handle
        handle._finisher = threading.get_ident()
        outcome = task.work()
        # What the save held goes before anybody hears of its end: a program that ends then must not
        # find this thread giving memory back.
        task = None
        _forget_locals(outcome.error)
        handle.end(outcome.info, outcome.error)
        del handle, outcome


def _forget_locals(error: BaseException | None) -> None:
    """Let go of the state that the frames of an error hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Uploading:
    """Uploads to other roots, which fail like saves in the background. Here there are none; see
    tiers/uploads.py."""

    @property
    def failed(self) -> bool:
        """Whether an upload has failed and nobody has heard of it."""
        return False

    def catch_up(self, run_id: str | None, step: int) -> None:
        """Go on with what an earlier process of the run left unfinished."""

    def raise_failure(self) -> None:
        """Raise, or warn of, a failure that nobody has heard of."""

    def wait(self, timeout: float | None) -> bool:
        """Whether nothing is being uploaded any more, after at most `timeout` seconds."""
        return True

    def close(self, deadline: float) -> None:
        """Wait until `deadline`, as time.monotonic() counts."""


class AfterCommit(Protocol):
    """What a run does after each commit, on the thread that committed, over its conversation."""

    def __call__(self, saved: SavedCheckpoint, comm: Communicator) -> None: ...


class Saves:
    """Keeps what outlives a save: threads, the pool of host memory, a conversation of the ranks for
    the background."""

    def __init__(
        self,
        comm: Communicator,
        io_threads: int,
        staging: Staging,
        on_error: Literal["raise", "warn"],
        drain_timeout: float,
        on_event: OnEvent | None,
        after: AfterCommit,
        uploads: Uploading,
    ) -> None:
        self.comm, self.on_event = comm, on_event
        self.on_error, self.drain_timeout = on_error, drain_timeout
        self.after, self.uploads = after, uploads
        self.workers = Workers(io_threads)
        # Half as many: where training keeps every core busy, a core that is taken from it holds up
        # the others too.
        self._low_priority = Workers(
            max(1, io_threads // 2), "ckptcore-background", low_priority=True
        )
        self.failed_steps: list[int] = []
        self._pool = HostPool(staging)
        self._background = Background()
        self._branch: Communicator | None = None
        # Rank 0 says it. Ranks count no branches: one that was interrupted in an earlier call may
        # have made fewer, or, if that is rank 0, not know what it has said there.
        self._branch_name = self._branch_made_as = ""
        self._pending: SaveHandle | None = None
        self._pid = os.getpid()
        # One pool, one save at a time, whichever threads they are called from.
        self._turn, self._staging = threading.RLock(), False

    @property
    def _busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    @property
    def _failed(self) -> bool:
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

    def wait_for_pending(self) -> None:
        """Wait for the save in the background; its failure is for `raise_failure`. Raises
        InvalidState in a fork."""
        self.check_process()
        if self._pending is not None:
            with self.comm.keep_alive() if self._busy else nullcontext():
                self._pending.wait(None)

    def wait_for_step(self, step: Any) -> None:
        """Wait for the save in the background where it is one of `step`."""
        if self._pending is not None and self._pending.step == step:
            self.wait_for_pending()

    def skip(self, job: SaveJob, info: CheckpointInfo) -> SaveHandle:
        """What there is to hold of a save whose step has the checkpoint `info`."""
        record = SaveRecord(job.domains.catalog.storage.retries)
        record.step, record.name = info.step or 0, info.name
        self._emit("skipped", job, record)
        return SaveHandle(record.step, skipped=True, info=info)

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

    def now(self, job: SaveJob, call: SaveCall, run: RunFacts) -> CheckpointInfo:
        """Do all of a save."""
        record = SaveRecord(job.domains.catalog.storage.retries)
        self.wait_for_pending()
        joined: JoinedSave | None = None
        try:
            joined = self._joined(job, call, run, record)
            saved = save_now(job, joined, record)
        except BaseException as error:
            # A call that ranks did not come to was none.
            alone = joined is None and isinstance(error, JoinTimeout | RankLost)
            if record.name and not alone:
                self._emit_end(job, record, error)
            with suppress(CheckpointWarning):  # as an error it must not hide the one that counts
                warn_all(record.warnings)
            raise
        self._emit_end(job, record)
        self.after(saved, self.comm)
        warn_all(record.warnings)
        return saved.info

    def begin(self, job: SaveJob, call: SaveCall, run: RunFacts) -> SaveHandle:
        """Capture and stage now, and leave the rest to the background."""
        self.check_process()
        if run.when_busy == "wait":
            self.wait_for_pending()
        record = SaveRecord(job.domains.catalog.storage.retries)
        with collector_paused():
            joined = self._joined(job, call, run, record)
        if joined.verdict.outcome == "skip":
            self._emit("skipped", job, record)
            return SaveHandle(record.step, skipped=True)
        with self._exclusive_pool(), collector_paused():
            return self._begin(job, joined, record)

    def _begin(self, job: SaveJob, joined: JoinedSave, record: SaveRecord) -> SaveHandle:
        branch = self._ready()
        handle = SaveHandle(record.step, record, self.on_error, self.drain_timeout)
        try:
            save = capture(job, joined, record)
        except BaseException as error:
            handle.give_up()
            if branch is not self.comm and getattr(error, "raised_in", None) is None:
                branch.leave(joined.number, error)  # Ctrl-C, say: others may be further by now
            raise
        staged = StagedSave(save)
        try:
            self._emit("queued", job, record)
            staged = stage(save, self._pool)
        except BaseException as error:  # Ctrl-C: the save fails on all ranks, and this tells of it
            how = RankFailed(f"{type(error).__name__} while the state was copied")
            staged = StagedSave(save, failure=how)
            handle.give_up()
            raise
        finally:
            self._pending, handle._staged = handle, staged
            self._background.submit(handle, partial(self._finish, staged, branch))
        return handle

    def rehearse(self, job: SaveJob, call: SaveCall, run: RunFacts) -> None:
        """Have ready what the first `begin` of such a state needs."""
        self.wait_for_pending()
        joined = self._joined(job, call, run, SaveRecord(), rehearsal=True)
        with self._exclusive_pool():
            rehearse(job, joined, self._pool)
            self._ready()

    def _joined(
        self,
        job: SaveJob,
        call: SaveCall,
        run: RunFacts,
        record: SaveRecord,
        *,
        rehearsal: bool = False,
    ) -> JoinedSave:
        """The join, when the failure of an earlier save was told on all ranks."""
        if not self._failed:
            self.raise_failure()  # its warnings
        while True:
            facts = replace(run, busy=self._busy, failed=self._failed, branch=self._branch_name)
            joined = join(job, call, facts, record, rehearsal=rehearsal)
            self._branch_name = joined.verdict.branch
            if joined.verdict.outcome != "failed":
                return joined
            record.name = ""  # nothing was begun
            self.wait_for_pending()  # its end may still be to come here
            with self.comm.round("failure"):
                self.raise_failure()

    @contextmanager
    def _exclusive_pool(self) -> Iterator[None]:
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
                self.wait_for_pending()
                if self._pending is not None:
                    self._pending.collect()
                yield
            finally:
                self._staging = False

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
            for threads in (self._background, self.workers, self._low_priority):
                threads.close(JOIN_SECONDS if ended else 0.0)
            if ended:
                self._pool.release()
            self._close_branch()

    def _ready(self) -> Communicator:
        """Threads and connections, made before they are needed: at the end of a program none can
        be."""
        self.workers.start()
        self._low_priority.start()
        self._background.start()
        if self._branch is None or self._branch_made_as != self._branch_name:
            self._close_branch()
            self._branch = self.comm.branch(self._branch_name)
            self._branch_made_as = self._branch_name
            at_exit.add(self._branch)
        return self._branch

    def _close_branch(self) -> None:
        branch = self._branch
        if branch is not None:
            if branch is not self.comm:
                branch.close()
            at_exit.discard(branch)

    def _finish(self, staged: StagedSave, branch: Communicator) -> Outcome:
        """In the background: what is left of a save when its state is staged. Raises nothing."""
        job, joined, record = staged.save.job, staged.save.joined, staged.save.record
        saved: SavedCheckpoint | None = None
        failed: BaseException | None = None
        try:
            with self._call_of(joined, branch):
                if staged.copy is not None:
                    staged.copy.wait()
                    self._emit("staged", job, record, staged.copy.nbytes)
                saved = finish(staged, branch, self._low_priority)
        except BaseException as error:
            failed = error
            self.failed_steps.append(record.step)
        try:
            self._emit_end(job, record, failed)
            if saved is not None:
                with self._call_of(joined, branch):
                    self.after(saved, branch)
        except BaseException as error:  # the outcome is what it is all the same
            outcome = "failed" if saved is None else "is committed"
            record.warnings.append(
                f"{record.name} {outcome}, and what comes after that went wrong: {error!r}"
            )
        return Outcome(None if saved is None else saved.info, failed)

    @contextmanager
    def _call_of(self, joined: JoinedSave, branch: Communicator) -> Iterator[None]:
        """Rounds in the background have the number of the call that they belong to, whatever became
        of others."""
        words = f"save of step {joined.request.step}"
        with nullcontext() if branch is self.comm else branch.call(words, number=joined.number):
            yield

    def _emit_end(
        self, job: SaveJob, record: SaveRecord, error: BaseException | None = None
    ) -> None:
        """What has become of a save: one that was interrupted after its commit is committed."""
        if record.manifest is None:
            self._emit("failed", job, record, error=error)
        else:
            self._emit("committed", job, record, record.manifest.size_bytes)

    def _emit(
        self,
        kind: Literal["queued", "staged", "committed", "failed", "skipped"],
        job: SaveJob,
        record: SaveRecord,
        nbytes: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """Tell the watcher of one more event of a save."""
        retries = job.domains.catalog.storage.retries - record.retries
        save = record.step, self.comm.rank, record.name, record.elapsed
        timings, reused = dict(record.seconds), record.reused
        self.emit(SaveEvent(kind, *save, nbytes, timings, error, retries=retries, reused=reused))

    def emit(self, event: SaveEvent) -> None:
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception as error:
                log.warning(
                    "on_event failed with %r at %s of step %d", error, event.kind, event.step
                )
