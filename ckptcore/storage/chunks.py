"""Chunks of files on their way to or from memory: what saving, loading and copying share.

Neighbours in a file go together, through memory that is used again; a file is open from its first
batch to its last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from ..format.digest import CHUNK_BYTES

__all__ = [
    "Chunk",
    "DueFile",
    "MakeMemory",
    "Memory",
    "Scratch",
    "Source",
    "Target",
    "batches",
    "split_up",
]

# Chunks of one batch at most, so that there are several batches where tensors are tiny.
BATCH_CHUNKS = 2048

T = TypeVar("T")
MakeMemory = Callable[[int], memoryview]


class Memory(Protocol):
    """The memory of one tensor, as its bytes in C order.

    pinned: how to make memory that is fast to copy from and to; None where any memory is.
    """

    pinned: MakeMemory | None

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
