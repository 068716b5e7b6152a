"""From the files of a checkpoint to memory: which chunks of which stored boxes fill a part of a
tensor, and verified parallel reads of them.

A stored box is a part of the logical tensor in C order. Of a box that is needed in part, the chunks
that hold needed items are read whole, so that their digests can be checked, and cut afterwards.
Each byte is read once, straight into its destination, and hashed while it is warm.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import xxhash

from ..errors import CheckpointCorrupt, StorageError
from ..format.digest import CHUNK_BYTES, DIGEST_BYTES, chunk_digest, content_hash
from ..format.layout import Box, intersection
from ..format.manifest import FileEntry, TensorEntry
from ..storage.base import FileReader, Storage
from ..storage.chunks import Chunk, DueFile, MakeMemory, Scratch, Target, Workers, batches, split_up

# Read and hashed at a time, so that the hash finds the bytes in the processor's cache.
STEP_BYTES = 1 << 20

# How storages say that there is nothing, or, when it is opened, no file (EINVAL: a pipe or the
# like).
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR})
_NO_FILE = frozenset({errno.EISDIR, errno.EINVAL})

OnCorrupt = Callable[[CheckpointCorrupt], None]


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

    @property
    def numbers(self) -> Sequence[int]:
        """Of the chunks that are read."""
        return (
            range(len(self.entry.digests) // DIGEST_BYTES) if self.chunks is None else self.chunks
        )


class StoredFiles:
    """The files of one checkpoint, which lie in a folder of a storage."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self.storage, self.folder = storage, folder
        self.url = storage.at(folder).rstrip("/")

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    def at(self, name: str) -> str:
        """How messages name a file."""
        return self.storage.at(self.path(name))

    def corrupt(self, name: str, message: str, kind: str, **facts: Any) -> CheckpointCorrupt:
        """The error that says `message` of a file. facts: fields of CheckpointCorrupt."""
        return CheckpointCorrupt(
            f"{self.at(name)}{message}", path=self.url, file=name, kind=kind, **facts
        )

    def open(self, name: str, size: int | None = None) -> FileReader:
        """A file that must be there, with `size` bytes where that is known. Raises
        CheckpointCorrupt where it is not, StorageError."""
        try:
            reader = self.storage.open(self.path(name))
        except StorageError as error:
            if (lost := self.lost(name, error, size, _GONE | _NO_FILE)) is not None:
                raise lost from None
            raise
        if size is not None and reader.size != size:
            reader.close()
            what = f" has {reader.size} bytes, {size} were saved"
            raise self.corrupt(name, what, "size", expected=size, actual=reader.size)
        return reader

    def first_bytes(self, name: str, size: int, count: int) -> bytearray:
        """Of a file that must have `size` bytes, the first `count`. Raises as `open` does."""
        reader, found = self.open(name, size), bytearray(count)
        try:
            reader.read_into(0, [memoryview(found)])
        finally:
            reader.close()
        return found

    def lost(
        self,
        name: str,
        error: StorageError,
        size: int | None = None,
        absent: frozenset[int] = _GONE,
    ) -> CheckpointCorrupt | None:
        """That a file is not there, or no longer, which is no refusal of the storage; None for any
        other failure."""
        if error.errno not in absent:
            return None
        what = " is missing" if error.errno in _GONE else " is not a file"
        return self.corrupt(name, what, "missing", expected=size)

    def check_header(self, name: str, known: FileEntry) -> bytearray:
        """The header of a tensor file. Raises CheckpointCorrupt when the file is missing, or its
        size or header is not what was saved."""
        head = self.first_bytes(name, known.size, known.header_size)
        actual, expected = content_hash(head).hex(), known.header_digest.hex()
        if actual != expected:
            what = f": the header is damaged: digest {actual}, {expected} was saved"
            raise self.corrupt(name, what, "header", expected=expected, actual=actual)
        return head

    def read(
        self, reads: Sequence[TensorRead], io_threads: int, on_corrupt: OnCorrupt | None = None
    ) -> None:
        """Do all `reads`. The first damage raises CheckpointCorrupt (file, tensor, digests), unless
        `on_corrupt` takes each. Memory beyond the targets is bounded by `io_threads` x 8 MiB. With
        one of them all is done on the calling thread, and each file in its order. Raises
        StorageError."""
        wanted: dict[str, list[TensorRead]] = {}
        for read in reads:
            if read.entry.file is not None and read.entry.digests:
                wanted.setdefault(read.entry.file, []).append(read)
        most = max(CHUNK_BYTES, self.storage.request_bytes)
        scratch = Scratch(most)
        files: list[OpenFile] = []
        jobs: list[Callable[[], None]] = []
        for name, mine in wanted.items():
            chunks = _chunks(mine)
            files.append(file := OpenFile(self, name, len(chunks)))
            jobs += [partial(_read, file, b, scratch, on_corrupt) for b in batches(chunks, most)]
        try:
            if io_threads == 1 or len(jobs) == 1:
                for job in jobs:
                    job()
            else:
                with Workers(io_threads, "ckptcore-read") as workers:
                    workers.run(jobs)
        finally:
            for file in files:
                file.close()


def _chunks(reads: Sequence[TensorRead]) -> list[Chunk[TensorRead]]:
    found = []
    for read in sorted(reads, key=attrgetter("entry.start")):
        start, nbytes = read.entry.start, read.entry.nbytes
        for number in read.numbers:
            offset = number * CHUNK_BYTES
            found.append(Chunk(start + offset, min(CHUNK_BYTES, nbytes - offset), offset, read))
    return found


def _read(
    file: OpenFile,
    chunks: Sequence[Chunk[TensorRead]],
    scratch: Scratch,
    on_corrupt: OnCorrupt | None,
) -> None:
    """Read, verify and deliver one batch."""
    buffers: list[memoryview] = []
    direct: list[bool] = []
    used = 0
    for _, length, offset, read in chunks:
        target = read.target
        view = None if target is None else target.view(offset, offset + length)
        direct.append(view is not None)
        if view is None:
            view = scratch.take(used, length, None if target is None else target.pinned)
        buffers.append(view)
        used += length
    # Bytes for an accelerator go through memory that stays warm; and each step takes its turn at
    # the interpreter.
    damaged = file.read(chunks, buffers, file.step_bytes if direct[0] else CHUNK_BYTES)
    for error in damaged.values():
        if on_corrupt is None:
            raise error
        on_corrupt(error)
    for number, (_, _, offset, read) in enumerate(chunks):
        if not direct[number] and read.target is not None and number not in damaged:
            read.target.put(offset, buffers[number])
    file.due.done(len(chunks))


class OpenFile:
    """A tensor file of a checkpoint that so many chunks are read of, while it is needed."""

    def __init__(self, files: StoredFiles, name: str, chunks: int) -> None:
        self.files, self.name = files, name
        # Where each read is a request of its own, few of them count for more than a warm cache.
        self.step_bytes = CHUNK_BYTES if files.storage.request_bytes else STEP_BYTES
        self.due = DueFile(partial(files.open, name), chunks)

    def read(
        self, chunks: Sequence[Chunk[TensorRead]], buffers: Sequence[memoryview], step_bytes: int
    ) -> dict[int, CheckpointCorrupt]:
        """Fill `buffers` with neighbouring chunks; what is damaged, by its number among them.

        buffers: each for one of them or for several. step_bytes: of one chunk, how many are read
        and hashed at a time. Raises CheckpointCorrupt where the file is missing or ends before,
        StorageError.
        """
        reader, first = self.due.open(), chunks[0].start
        end = chunks[-1].start + chunks[-1].length
        if end > reader.size:
            name = chunks[-1].of.name
            what = f"ends at byte {reader.size}; tensor {name!r} needs bytes up to {end}"
            raise self._corrupt(what, "size", name, end, reader.size)
        try:
            if len(chunks) == 1:
                digests = [_read_hashing(reader, first, buffers[0], step_bytes)]
            else:
                reader.read_into(first, buffers)
                digests = [chunk_digest(data) for data in split_up(chunks, buffers)]
        except StorageError as error:
            if (lost := self.files.lost(self.name, error)) is not None:
                raise lost from None
            raise
        damaged = {}
        for number, (chunk, digest) in enumerate(zip(chunks, digests, strict=True)):
            start, length, offset, read = chunk
            at = offset // CHUNK_BYTES * DIGEST_BYTES
            saved = read.entry.digests[at : at + DIGEST_BYTES]
            if digest != saved:
                what = (
                    f"tensor {read.name!r} is damaged: bytes {start} to {start + length} have "
                    f"digest {digest.hex()}, {saved.hex()} was saved"
                )
                damaged[number] = self._corrupt(
                    what, "digest", read.name, saved.hex(), digest.hex()
                )
        return damaged

    def _corrupt(
        self, message: str, kind: str, tensor: str, expected: Any, actual: Any
    ) -> CheckpointCorrupt:
        facts = {"tensor": tensor, "expected": expected, "actual": actual}
        return self.files.corrupt(self.name, f": {message}", kind, **facts)

    def close(self) -> None:
        if self.due.opened is not None:
            self.due.opened.close()


def _read_hashing(reader: FileReader, offset: int, buffer: memoryview, step_bytes: int) -> bytes:
    state = xxhash.xxh3_64()
    for at in range(0, len(buffer), step_bytes):
        step = buffer[at : at + step_bytes]
        reader.read_into(offset + at, [step])
        state.update(step)
    return state.digest()


class HostMemory(NamedTuple):
    """A Target: contiguous memory on the host that holds all of a stored box. keep: what it belongs
    to, which stays alive so."""

    address: int
    keep: Any

    @property
    def pinned(self) -> MakeMemory | None:
        return None

    def view(self, start: int, stop: int) -> memoryview:
        memory = (ctypes.c_char * (stop - start)).from_address(self.address + start)
        return memoryview(memory).cast("B")

    def put(self, start: int, data: memoryview) -> None:
        raise AssertionError("there is always a view")


class PartTarget:
    """A Target for a stored piece of `shape` of which the box at `offset` is wanted: `region` is
    the memory of that box, a numpy array of unsigned integers."""

    def __init__(
        self, region: Any, shape: tuple[int, ...], offset: tuple[int, ...], itemsize: int
    ) -> None:
        self.region, self.shape, self.offset, self.itemsize = region, shape, offset, itemsize
        size = tuple(region.shape)
        # Where the box is one run of the piece and of the memory, bytes go straight in.
        split = next((d for d in reversed(range(len(shape))) if size[d] != shape[d]), 0)
        run = all(size[d] == 1 for d in range(split)) and size[split + 1 :] == shape[split + 1 :]
        self.memory = self.memory_of(region) if run else None
        self.items = self.items_of(region) if run and self.memory is None else None
        self.first = _flat(shape, offset) * itemsize
        self.pinned: MakeMemory | None = self.pinned_for(region)

    def flat(self, data: memoryview) -> Any:
        """Bytes as a flat array of the kind of `region`."""
        import numpy as np

        return np.frombuffer(data, self.region.dtype)

    def memory_of(self, region: Any) -> memoryview | None:
        """The bytes of a contiguous host array; None of another."""
        if not region.flags.c_contiguous or not region.size:
            return None
        return memoryview(region.reshape(-1).view("u1").data)

    def items_of(self, region: Any) -> Any:
        """The same items in one dimension and the same memory; None where there is no such view, or
        none is needed."""
        return None

    def pinned_for(self, region: Any) -> MakeMemory | None:
        """How to make memory that is fast to copy from; None where any is."""
        return None

    def moving(self) -> AbstractContextManager[Any]:
        """What copies are made in."""
        return nullcontext()

    def view(self, start: int, stop: int) -> memoryview | None:
        if self.memory is None or start < self.first or stop > self.first + len(self.memory):
            return None
        return self.memory[start - self.first : stop - self.first]

    def put(self, start: int, data: memoryview) -> None:
        with self.moving():
            flat = self.flat(data)
            if self.items is None:
                _scatter(self.region, self.shape, self.offset, start // self.itemsize, flat)
                return
            # What is wanted of the items from `at` of the box on, as one block copy.
            at = (start - self.first) // self.itemsize
            low, high = max(0, at), min(len(self.items), at + len(flat))
            if low < high:
                self.items[low:high] = flat[low - at : high - at]


def read_of(
    component: str,
    entry: TensorEntry,
    wanted: Box,
    words: Any,
    target: type[PartTarget] = PartTarget,
) -> TensorRead:
    """Read what `wanted` needs of a stored piece into `words`, the memory of `wanted`: an array of
    integers as wide as its items, or of several for each.

    The piece must have something of it.
    """
    held = entry.offset or (0,) * len(entry.shape), entry.local_shape
    common = intersection(held, wanted)
    if common is None:
        raise ValueError(f"the piece at {held[0]} of {held[1]} has nothing of {wanted}")
    # With an ellipsis: a 0-d numpy array gives a view of itself then, and a copy otherwise.
    part = (*(slice(o - w, o - w + n) for o, n, w in zip(*common, wanted[0], strict=True)), ...)
    # Items wider than a word (complex128) have a last dimension of words.
    extra = tuple(words.shape[len(wanted[1]) :])
    shape, size = held[1] + extra, common[1] + extra
    inner = tuple(o - h for o, h in zip(common[0], held[0], strict=True)) + (0,) * len(extra)
    chunks = None if common == held else needed_chunks(shape, inner, size, words.itemsize)
    memory = target(words[part], shape, inner, words.itemsize)
    return TensorRead(component, entry, memory, chunks)


def needed_chunks(
    shape: Sequence[int], offset: Sequence[int], size: Sequence[int], itemsize: int
) -> list[int]:
    """The chunks of a C-order array of `shape` that hold something of the box at `offset` of
    `size`."""
    rows = _row_ranges(shape, offset, size)
    chunks: dict[int, None] = {}
    for first, count in rows:
        start, end = first * itemsize, (first + count) * itemsize
        chunks.update(dict.fromkeys(range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES))))
    return list(chunks)


def _row_ranges(
    shape: Sequence[int], offset: Sequence[int], size: Sequence[int]
) -> list[tuple[int, int]]:
    """Flat ranges (first item, count) that cover the box: whole inner parts at once, rows apart
    only where that can leave a chunk out."""
    if not shape:
        return [(0, 1)]
    row = prod(shape[1:])
    span = row * 8 > CHUNK_BYTES and len(shape) > 1
    if not span:
        low = offset[0] * row + _flat(shape[1:], offset[1:])
        last = [o + n - 1 for o, n in zip(offset, size, strict=True)]
        return [(low, _flat(shape, last) - low + 1)]
    return [
        (index * row + first, count)
        for index in range(offset[0], offset[0] + size[0])
        for first, count in _row_ranges(shape[1:], offset[1:], size[1:])
    ]


def _flat(shape: Sequence[int], index: Sequence[int]) -> int:
    at = 0
    for n, i in zip(shape, index, strict=True):
        at = at * n + i
    return at


def _scatter(
    region: Any, shape: Sequence[int], offset: Sequence[int], start: int, flat: Any
) -> None:
    """Put items `start` ... of a C-order piece into the part of it that `region` is, in as few
    block copies."""
    if not shape:
        region[...] = flat.reshape(region.shape)
        return
    row, count, at = prod(shape[1:]), len(flat), 0
    low, high = offset[0], offset[0] + region.shape[0]
    inner = tuple(slice(o, o + s) for o, s in zip(offset[1:], region.shape[1:], strict=True))
    while at < count:
        index, within = divmod(start + at, row)
        if within or count - at < row:
            n = min(row - within, count - at)
            if low <= index < high:
                _scatter(region[index - low], shape[1:], offset[1:], within, flat[at : at + n])
        else:
            n = (count - at) // row * row
            first, last = max(index, low), min(index + n // row, high)
            if first < last:
                whole = flat[at + (first - index) * row : at + (last - index) * row]
                block = whole.reshape(last - first, *shape[1:])
                region[first - low : last - low] = block[(slice(None), *inner)]
        at += n
