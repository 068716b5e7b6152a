"""How bytes go between files and memory, in chunks and by threads: what saving, loading and copying
share.

Neighbours in a file go together, through memory that is used again; a file is open from its first
batch to its last. Threads are started once, and are daemons: a stuck disk must not keep a process.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..format.digest import CHUNK_BYTES

# Chunks of one batch at most, so that there are several batches where tensors are tiny.
BATCH_CHUNKS = 2048
NICENESS = 10  # as `nice` counts

T = TypeVar("T")
MakeMemory = Callable[[int], memoryview]
Job = Callable[[], None]


class Memory(Protocol):
    """The memory of one tensor, as its bytes in C order."""

    @property
    def pinned(self) -> MakeMemory | None:
        """How to make memory that is fast to copy from and to; None where any memory is."""

    def view(self, start: int, stop: int) -> memoryview | None:
        """The memory itself; None when it is not contiguous host memory."""


class Source(Memory, Protocol):
    """Memory that is read."""

    def fill(self, start: int, buffer: memoryview) -> None:
        """Copy bytes from `start` on into `buffer`; used where `view` gives None."""


class Target(Memory, Protocol):
    """Memory that is written."""

    def put(self, start: int, data: memoryview) -> None:
        """Store what is wanted of `data`, the bytes from `start` on; used where `view` gives
        None."""


class Chunk(NamedTuple, Generic[T]):
    """`length` bytes from `start` on in a file, which are those from `offset` on of a tensor.

    of: what the tensor is known by.
    """

    start: int
    length: int
    offset: int
    of: T


def batches(chunks: Iterable[Chunk[T]], most: int = CHUNK_BYTES) -> list[list[Chunk[T]]]:
    """Chunks, in order of their start, that lie next to each other: up to `most` bytes together."""
    found: list[list[Chunk[T]]] = []
    batch: list[Chunk[T]] = []
    size, end = 0, -1
    for chunk in chunks:
        start, length, _, _ = chunk
        if start != end or size + length > most or len(batch) == BATCH_CHUNKS:
            found.append(batch := [])
            size = 0
        batch.append(chunk)
        size += length
        end = start + length
    return found


def split_up(chunks: Sequence[Chunk[T]], buffers: Sequence[memoryview]) -> list[memoryview]:
    """The bytes of each chunk; `buffers` are those of all, each of one or of several of them."""
    if len(buffers) == len(chunks):
        return [*buffers]
    found, rest, at = [], iter(buffers), 0
    buffer = next(rest)
    for _, length, _, _ in chunks:
        if at == len(buffer):
            buffer, at = next(rest), 0
        found.append(buffer[at : at + length])
        at += length
    return found


class Scratch(threading.local):
    """`size` bytes for each thread, and as many for bytes from or to an accelerator, which is fast
    from pinned memory."""

    def __init__(self, size: int = CHUNK_BYTES) -> None:
        self.size = size
        self._plain: memoryview | None = None
        self._pinned: memoryview | None = None

    def take(self, start: int, length: int, make_pinned: MakeMemory | None = None) -> memoryview:
        """Bytes `start` to `start + length` of this thread's memory.

        make_pinned: how to make pinned memory, where that is wanted.
        """
        assert start + length <= self.size
        if make_pinned is None:
            self._plain = self._plain or memoryview(bytearray(self.size))
            return self._plain[start : start + length]
        self._pinned = self._pinned or make_pinned(self.size)
        return self._pinned[start : start + length]

    def bytes_of(self, memory: Source, start: int, length: int, used: int = 0) -> memoryview:
        """Bytes `start` to `start + length` of `memory`: a view, or else copied to this thread's
        memory, of which the first `used` bytes are taken."""
        view = memory.view(start, start + length)
        if view is None:
            view = self.take(used, length, memory.pinned)
            memory.fill(start, view)
        return view


class Closable(Protocol):
    def close(self) -> None: ...


F = TypeVar("F", bound=Closable)


class DueFile(Generic[F]):
    """A file that so many chunks are read from or written to: opened for the first one, and closed
    by the thread that is done with the last one. So no more are open than threads work, however
    many there are."""

    def __init__(self, open_it: Callable[[], F], chunks: int) -> None:
        self._open, self._left, self._lock = open_it, chunks, threading.Lock()
        self.opened: F | None = None

    def open(self) -> F:
        with self._lock:
            if self.opened is None:
                self.opened = self._open()
            return self.opened

    def done(self, chunks: int) -> None:
        with self._lock:
            self._left -= chunks
            if self._left > 0:
                return
        self.open().close()
        self.opened = None


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
                if thread.ident is None:  # also of a start that was interrupted
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
                if thread.ident is not None:
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
            except BaseException:  # Ctrl-C: what was begun ends first, so that it can be cleaned up
                self.exhausted = True
                self.changed.wait_for(lambda: not self.working)
                raise
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # no cycle of error, frame and this


def default_threads() -> int:
    """How many threads read and write where nobody says: one a core, from 2 to 8."""
    if hasattr(os, "sched_getaffinity"):
        return min(8, max(2, len(os.sched_getaffinity(0))))
    return min(8, max(2, os.cpu_count() or 2))


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
