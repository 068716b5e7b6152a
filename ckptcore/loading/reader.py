"""Verified parallel reads: each byte is read once, straight into its destination, and hashed while
it is warm."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash

from ..catalog.folder import join
from ..errors import CheckpointCorrupt, StorageError
from ..format.digest import CHUNK_BYTES, DIGEST_BYTES, chunk_count, chunk_digest, content_hash
from ..format.manifest import FileEntry, TensorEntry
from ..storage.base import FileReader, Storage
from ..storage.chunks import Chunk, DueFile, Scratch, Target, Workers, batches, split_up

__all__ = ["StoredFile", "TensorRead", "check_header", "open_member", "read_tensors"]

# Read and hashed at a time, so that the hash finds the bytes in the processor's cache.
STEP_BYTES = 1 << 20

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


def read_tensors(
    storage: Storage,
    folder: str,
    reads: Sequence[TensorRead],
    io_threads: int,
    on_corrupt: OnCorrupt | None = None,
) -> None:
    """Do all `reads`. The first damage raises CheckpointCorrupt (file, tensor, digests), unless
    `on_corrupt` takes each. Memory beyond the targets is bounded by `io_threads` x 8 MiB. With one
    of them all is done on the calling thread, and each file in its order. Raises StorageError."""
    wanted: dict[str, list[TensorRead]] = {}
    for read in reads:
        if read.entry.file is not None and read.entry.digests:
            wanted.setdefault(read.entry.file, []).append(read)
    most = max(CHUNK_BYTES, storage.request_bytes)
    scratch = Scratch(most)
    files: list[StoredFile] = []
    jobs: list[Callable[[], None]] = []
    for name, mine in wanted.items():
        chunks = _chunks(mine)
        files.append(file := StoredFile(storage, folder, name, len(chunks)))
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
    for read in sorted(reads, key=lambda read: read.entry.start):
        start, nbytes = read.entry.start, read.entry.nbytes
        for number in range(chunk_count(nbytes)) if read.chunks is None else read.chunks:
            offset = number * CHUNK_BYTES
            found.append(Chunk(start + offset, min(CHUNK_BYTES, nbytes - offset), offset, read))
    return found


def _read(
    file: StoredFile,
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


class StoredFile:
    """A tensor file of a checkpoint that so many chunks are read of."""

    def __init__(self, storage: Storage, folder: str, name: str, chunks: int) -> None:
        self.storage, self.folder, self.name = storage, folder, name
        self.where = storage.at(join(folder, name))
        # Where each read is a request of its own, few of them count for more than a warm cache.
        self.step_bytes = CHUNK_BYTES if storage.request_bytes else STEP_BYTES
        self.due = DueFile(self._open, chunks)

    def _open(self) -> FileReader:
        with _present(self.storage, self.folder, self.name):
            return self.storage.open(join(self.folder, self.name))

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
        with _present(self.storage, self.folder, self.name, absent=_GONE):
            if len(chunks) == 1:
                digests = [_read_hashing(reader, first, buffers[0], step_bytes)]
            else:
                reader.read_into(first, buffers)
                digests = [chunk_digest(data) for data in split_up(chunks, buffers)]
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
        self, what: str, kind: str, tensor: str, expected: Any, actual: Any
    ) -> CheckpointCorrupt:
        what = f"{self.where}: {what}"
        return CheckpointCorrupt(
            what, file=self.name, kind=kind, tensor=tensor, expected=expected, actual=actual
        )

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
