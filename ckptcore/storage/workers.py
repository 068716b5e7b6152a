"""Threads that copy, hash and write. They are started once, and are daemons: a stuck disk must not
keep a process."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

__all__ = ["Workers", "yield_to_others"]

NICENESS = 10  # as `nice` counts

Job = Callable[[], None]


class Workers:
    """`count` threads, from the first `run` on. Several threads may call `run` at once.

    low_priority: they take what computing time others leave them (where the system has priorities
    of threads)."""

    def __init__(
        self, count: int, name: str = "ckptcore-io", *, low_priority: bool = False
    ) -> None:
        self.count, self.name, self.low_priority = count, name, low_priority
        self._jobs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started_in: int | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads now: at the exit of the interpreter none can be started any more."""
        with self._lock:
            if self._started_in != os.getpid():  # threads do not come along into a forked child
                self._started_in, self._jobs = os.getpid(), queue.SimpleQueue()
                self._threads = [
                    threading.Thread(
                        target=_work,
                        args=(self._jobs, self.low_priority),
                        name=f"{self.name}-{number}",
                        daemon=True,
                    )
                    for number in range(self.count)
                ]
                for thread in self._threads:
                    thread.start()

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all of `jobs`, in this order as far as several threads keep one. On return none of
        them runs any more.

        The first error is raised, and jobs that were not begun by then are left out.
        """
        if len(jobs) < 2:
            for job in jobs:
                job()
            return
        self.start()
        run = _Run(jobs)
        for _ in range(min(self.count, len(jobs))):
            self._jobs.put(run)
        run.wait()

    def close(self, timeout: float = 0.0) -> None:
        """Let the threads end when they are done, and wait for that for `timeout` seconds at
        most."""
        if self._started_in == os.getpid():
            self._started_in = None
            for _ in range(self.count):
                self._jobs.put(None)
            deadline = time.monotonic() + timeout
            for thread in self._threads if timeout else ():
                thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _Run:
    """One call of `run`: the threads that help with it take its jobs one after another."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = iter(jobs)
        self.changed = threading.Condition()
        self.working = 0
        self.exhausted = False
        self.error: BaseException | None = None

    def help(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except BaseException as error:
                with self.changed:
                    self.error = self.error or error
                    self.exhausted = True
            # Before anybody hears of it: when the program ends then, memory must not be given back
            # on this thread.
            job = None
            with self.changed:
                self.working -= 1
                self.changed.notify_all()

    def _next(self) -> Job | None:
        with self.changed:
            job = None if self.exhausted else next(self.jobs, None)
            if job is None:
                self.exhausted = True
                self.changed.notify_all()
            else:
                self.working += 1
            return job

    def wait(self) -> None:
        with self.changed:
            try:
                self.changed.wait_for(lambda: self.exhausted and not self.working)
            except (
                BaseException
            ):  # Ctrl-C: what was begun ends first, so that what comes next can clean up after it
                self.exhausted = True
                self.changed.wait_for(lambda: not self.working)
                raise
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # no cycle of error, frame and this


def yield_to_others() -> None:
    """Lower the priority of the calling thread: it yields to training, which often keeps every core
    busy."""
    if sys.platform == "linux":  # elsewhere this call is about the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _work(jobs: queue.SimpleQueue[Any], low_priority: bool) -> None:
    if low_priority:
        yield_to_others()
    while (run := jobs.get()) is not None:
        run.help()
        run = None
