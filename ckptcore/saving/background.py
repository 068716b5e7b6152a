"""Saves that go on while training does: one thread that finishes them, and what the caller holds of
each."""

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
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from ..arguments import checked_timeout
from ..catalog.folder import CheckpointInfo
from ..errors import AsyncSaveError, CheckpointWarning, InvalidState
from ..ranks.communicator import Communicator
from ..storage.workers import yield_to_others
from .flow import Saving

__all__ = ["Background", "SaveHandle"]


class SaveHandle:
    """A save that was begun in the background.

    skipped: it was not, because another one was still being written and `when_busy` is "skip".
    """

    def __init__(
        self,
        step: int,
        saving: Saving | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        drain_timeout: float = 0.0,
        *,
        skipped: bool = False,
    ) -> None:
        self.step, self.skipped = step, skipped
        self.error: BaseException | None = None
        self.on_error, self.drain_timeout = on_error, drain_timeout
        self._told = [] if saving is None else saving.told
        self._saving = saving
        self._info: CheckpointInfo | None = None
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._written = 0, 0
        self._finisher = 0
        if skipped:
            self._ended.set()
        else:
            _expected(self)

    def __repr__(self) -> str:
        if self.skipped or self.error is not None or self._info is not None:
            how = "skipped" if self.skipped else "failed" if self.error is not None else "committed"
        else:
            how = "being written, {:,} of {:,} bytes".format(*self.progress)
        return f"<SaveHandle: step {self.step} ({how})>"

    def staged(self) -> bool:
        """Whether the host has a private copy of everything."""
        saving = self._saving
        return saving is None or saving.staged is None or saving.staged.complete()

    def done(self) -> bool:
        """Whether it is committed, or has failed. Never in a forked child, which does not have the
        thread that writes."""
        return self._ended.is_set()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of tensor files that this rank has written, and has to write."""
        saving = self._saving
        return self._written if saving is None else (saving.progress.written, saving.progress.total)

    def result(self, timeout: float | None = None) -> CheckpointInfo | None:
        """The committed checkpoint, when it is; None for one that was skipped.

        Raises AsyncSaveError, from what the save failed with, and TimeoutError when it has not
        ended after `timeout` seconds (it goes on).
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
        return self._info

    def wait(self, timeout: float | None) -> bool:
        """Whether it has ended, after at most `timeout` seconds. Raises InvalidState on the thread
        that it is ended by."""
        if self._finisher == threading.get_ident() and not self._ended.is_set():
            raise InvalidState(
                f"{self.what} cannot be waited for by what it calls itself (on_event)"
            )
        return self._pid != os.getpid() or self._ended.wait(checked_timeout(timeout))

    def collect(self) -> None:
        """Raise, or warn of, its failure, unless somebody was told before."""
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
        """Whether it has failed and nobody was told."""
        return self._ended.is_set() and self.error is not None and self in _untold

    def give_up(self) -> None:
        """Nothing more is to be said of it at the end of the program."""
        _untold.discard(self)

    def failure(self) -> AsyncSaveError:
        """What there is to raise for a failed save."""
        what = f"{self.what} in the background failed: {self.error}"
        made = AsyncSaveError(what, step=self.step, causes=getattr(self.error, "causes", None))
        made.__cause__ = self.error
        return made

    def end(self, info: CheckpointInfo | None, error: BaseException | None) -> None:
        """For the thread that finishes it."""
        self._written = self.progress
        self._info, self.error, self._saving = (
            info,
            error,
            None,
        )  # lets go of the state, here and not on the way out
        if error is None:
            self.give_up()
        self._ended.set()

    def _warn(self) -> None:
        told, self._told = self._told, []
        for text in told:
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


Outcome = tuple[CheckpointInfo | None, BaseException | None]
Task = tuple[SaveHandle, Callable[[], Outcome]]


class Background:
    """One daemon thread, from `start` or the first save on, that finishes one save after
    another."""

    def __init__(self, name: str = "ckptcore-save") -> None:
        self.name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._tasks,), name=self.name, daemon=True
            )
            self._thread.start()

    def submit(self, handle: SaveHandle, work: Callable[[], Outcome]) -> None:
        """Do `work`, which raises nothing, and end `handle` with what comes of it."""
        self.start()
        self._tasks.put((handle, work))

    def close(self, timeout: float = 0.0) -> None:
        """Let the thread end when it is done, and wait for that for `timeout` seconds at most."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            if timeout:
                thread.join(timeout)

    def __del__(self) -> None:
        self.close()


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    yield_to_others()
    while (task := tasks.get()) is not None:
        handle, work = task
        handle._finisher = threading.get_ident()
        info, error = work()
        # What the save held goes before anybody hears of its end: a program that ends then must not
        # find this thread giving memory back.
        task = work = None  # type: ignore[assignment]
        _forget_locals(error)
        handle.end(info, error)
        del handle, info, error


def _forget_locals(error: BaseException | None) -> None:
    """Let go of the state that the frames of an error hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
