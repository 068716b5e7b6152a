"""Verified parallel reads: each byte is read once, straight into its destination, and hashed while
it is warm."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import xxhash

from ..errors import CheckpointCorrupt, StorageError
from ..format.digest import CHUNK_BYTES, chunk_digest, content_hash
from ..format.index import FileEntry, TensorEntry
from ..root import join
from ..storage.base import FileReader, Storage
from ..storage.scratch import MakeMemory, Scratch

__all__ = ["Target", "TensorRead", "check_header", "open_member", "read_tensors"]

STEP_BYTES = (
    1 << 20
)  # read and hashed at a time, so that the hash finds the bytes in the processor's cache
BATCH_PARTS = 512


class Target(Protocol):
    """Where the bytes of one tensor go, in C order. pinned: how to make memory that `put` is fast
    from, if not any is."""

    pinned: MakeMemory | None

    def view(self, start: int, stop: int) -> memoryview | None:
        """The memory itself; None when it is not contiguous host memory."""

    def put(self, start: int, data: memoryview) -> None:
        """Store what is wanted of `data`, the bytes from `start` on; used where `view` gives
        None."""


@dataclass(frozen=True, slots=True)
class TensorRead:
    """All bytes of `entry`, or those of some of its `chunks`; target None: read and verify only."""

    component: str
    entry: TensorEntry
    target: Target | None
    chunks: Sequence[int] | None = None

    @property
    def name(self) -> str:
        return f"{self.component}/{self.entry.name}"


@dataclass(frozen=True, slots=True)
class _Part:
    read: TensorRead
    chunk: int


def read_tensors(
    storage: Storage,
    folder: str,
    reads: Sequence[TensorRead],
    io_threads: int,
    on_corrupt: Callable[[CheckpointCorrupt], None] | None = None,
) -> None:
    """Do all `reads`. The first damage raises CheckpointCorrupt (file, tensor, digests), unless
    `on_corrupt` takes each. Memory beyond the targets is bounded by `io_threads` x 8 MiB. With one
    of them all is done on the calling thread, and each file in its order. Raises StorageError."""
    files: dict[str, list[TensorRead]] = {}
    for read in reads:
        if read.entry.file is not None and read.entry.nbytes:
            files.setdefault(read.entry.file, []).append(read)
    if not files:
        return
    stop = threading.Event()
    # Where each read is a request of its own, few of them count for more than a warm cache.
    step_bytes = CHUNK_BYTES if storage.request_bytes else STEP_BYTES
    most = max(CHUNK_BYTES, storage.request_bytes)
    scratch = Scratch(most)

    def run(file: _File, parts: list[_Part]) -> None:
        if stop.is_set():
            return
        reader = file.opened()
        with _present(storage, folder, file.name, absent=_GONE):
            where = storage.at(join(folder, file.name))
            found = list(_read_batch(reader, file.name, where, parts, scratch, step_bytes))
        for error in found:
            if on_corrupt is None:
                raise error
            on_corrupt(error)
        file.batch_done()

    opened: list[_File] = []
    jobs: list[Callable[[], None]] = []
    for name, wanted in files.items():
        batches = list(_batches(wanted, most))
        opened.append(file := _File(storage, folder, name, len(batches)))
        jobs += [partial(run, file, batch) for batch in batches]
    try:
        if io_threads == 1:
            for job in jobs:
                job()
            return
        pool = ThreadPoolExecutor(io_threads, "ckptcore-read")
        try:
            done, _ = wait([pool.submit(job) for job in jobs], return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    finally:
        for file in opened:
            file.close()


class _File:
    """A file to read: opened for its first batch, and closed after its last one. So no more are
    open than threads read, however many there are."""

    def __init__(self, storage: Storage, folder: str, name: str, batches: int) -> None:
        self.storage, self.folder, self.name, self.left = storage, folder, name, batches
        self.lock = threading.Lock()
        self.reader: FileReader | None = None

    def opened(self) -> FileReader:
        with self.lock:
            if self.reader is None:
                with _present(self.storage, self.folder, self.name):
                    self.reader = self.storage.open(join(self.folder, self.name))
            return self.reader

    def batch_done(self) -> None:
        with self.lock:
            self.left -= 1
            last = self.left == 0
        if last:
            self.close()

    def close(self) -> None:
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()


def _batches(reads: list[TensorRead], most: int) -> Iterator[list[_Part]]:
    """Chunks that lie next to each other in the file, up to `most` bytes together."""
    batch: list[_Part] = []
    size, end = 0, -1
    for read in sorted(reads, key=lambda r: r.entry.start):
        for number in range(len(read.entry.digests) // 8) if read.chunks is None else read.chunks:
            start, length, _ = read.entry.chunk(number)
            if batch and (start != end or size + length > most or len(batch) == BATCH_PARTS):
                yield batch
                batch, size = [], 0
            batch.append(_Part(read, number))
            size += length
            end = start + length
    if batch:
        yield batch


def _read_batch(
    reader: FileReader, file: str, where: str, parts: list[_Part], scratch: Scratch, step_bytes: int
) -> Iterator[CheckpointCorrupt]:
    """Read, verify and deliver one batch; yields what is damaged."""
    places = [part.read.entry.chunk(part.chunk) for part in parts]
    first = places[0][0]
    total = sum(length for _, length, _ in places)
    buffers: list[memoryview] = []
    direct: list[bool] = []
    at = 0
    for part, (_, length, _) in zip(parts, places, strict=True):
        start = part.chunk * CHUNK_BYTES
        target = part.read.target
        view = None if target is None else target.view(start, start + length)
        direct.append(view is not None)
        buffers.append(
            scratch.take(at, length, None if target is None else target.pinned)
            if view is None
            else view
        )
        at += length
    if first + total > reader.size:
        raise CheckpointCorrupt(
            f"{where} ends at byte {reader.size}; tensor {parts[-1].read.name!r} needs bytes up "
            f"to {first + total}",
            file=file,
            kind="size",
            tensor=parts[-1].read.name,
            expected=first + total,
            actual=reader.size,
        )
    if len(parts) == 1:
        # Bytes for an accelerator go through memory that stays warm; and each step takes its turn
        # at the interpreter.
        digests = [
            _read_hashing(reader, first, buffers[0], step_bytes if direct[0] else CHUNK_BYTES)
        ]
    else:
        reader.read_into(first, buffers)
        digests = [chunk_digest(buffer) for buffer in buffers]
    for part, place, buffer, in_place, digest in zip(
        parts, places, buffers, direct, digests, strict=True
    ):
        if digest != place[2]:
            yield CheckpointCorrupt(
                f"{where}: tensor {part.read.name!r} is damaged: bytes {place[0]} to "
                f"{place[0] + place[1]} have digest "
                f"{digest.hex()}, {place[2].hex()} was saved",
                file=file,
                kind="digest",
                tensor=part.read.name,
                expected=place[2].hex(),
                actual=digest.hex(),
            )
        elif not in_place and part.read.target is not None:
            part.read.target.put(part.chunk * CHUNK_BYTES, buffer)


def _read_hashing(reader: FileReader, offset: int, buffer: memoryview, step_bytes: int) -> bytes:
    state = xxhash.xxh3_64()
    for at in range(0, len(buffer), step_bytes):
        step = buffer[at : at + step_bytes]
        reader.read_into(offset + at, [step])
        state.update(step)
    return state.digest()


# How storages say that there is nothing, or, when it is opened, no file (EINVAL: a pipe or the
# like).
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR})
_NO_FILE = frozenset({errno.EISDIR, errno.EINVAL})


@contextmanager
def _present(
    storage: Storage,
    folder: str,
    file: str,
    size: int | None = None,
    absent: frozenset[int] = _GONE | _NO_FILE,
) -> Iterator[None]:
    """A file of a checkpoint that is not there, or no longer, is CheckpointCorrupt and no refusal
    of the storage."""
    try:
        yield
    except StorageError as error:
        if error.errno not in absent:
            raise
        what = "is missing" if error.errno in _GONE else "is not a file"
        raise CheckpointCorrupt(
            f"{storage.at(join(folder, file))} {what}",
            path=storage.at(folder),
            file=file,
            kind="missing",
            expected=size,
        ) from None


def open_member(storage: Storage, folder: str, file: str, size: int) -> FileReader:
    """Open a file that must be there with `size` bytes. CheckpointCorrupt when it is not,
    StorageError."""
    where = storage.at(join(folder, file))
    with _present(storage, folder, file, size):
        reader = storage.open(join(folder, file))
    if reader.size != size:
        reader.close()
        raise CheckpointCorrupt(
            f"{where} has {reader.size} bytes, {size} were saved",
            path=storage.at(folder),
            file=file,
            kind="size",
            expected=size,
            actual=reader.size,
        )
    return reader


def check_header(storage: Storage, folder: str, file: str, known: FileEntry) -> bytearray:
    """The header. Raises CheckpointCorrupt when a tensor file is missing, or its size or header is
    not what was saved."""
    with open_member(storage, folder, file, known.size) as reader:
        head = bytearray(known.header_size)
        reader.read_into(0, [memoryview(head)])
    actual = content_hash(head)
    if actual != known.header_digest:
        raise CheckpointCorrupt(
            f"{storage.at(join(folder, file))}: the header is damaged: digest {actual.hex()}, "
            f"{known.header_digest.hex()} was saved",
            path=storage.at(folder),
            file=file,
            kind="header",
            expected=known.header_digest.hex(),
            actual=actual.hex(),
        )
    return head
