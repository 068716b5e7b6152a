"""Writing tensor files: each byte is hashed and written once, straight from where it is, by several
threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ..format.digest import CHUNK_BYTES, DIGEST_BYTES, chunk_count, chunk_digest, content_hash
from ..root import join
from ..storage.base import FileWriter, Storage
from ..storage.scratch import MakeMemory, Scratch
from ..storage.workers import Workers
from .plan import FilePlan

__all__ = ["Source", "WrittenFile", "write_files"]

BATCH_PARTS = 512


class Source(Protocol):
    """The bytes of one tensor, in C order. pinned: how to make memory that `fill` is fast into, if
    not any is."""

    pinned: MakeMemory | None

    def view(self, start: int, stop: int) -> memoryview | None:
        """The memory itself; None when it is not contiguous host memory."""

    def fill(self, start: int, buffer: memoryview) -> None:
        """Copy bytes from `start` on into `buffer`; used where `view` gives None."""


@dataclass(slots=True)
class WrittenFile:
    """What became of one FilePlan: digest of its header, and by tensor number the digests of its
    chunks."""

    plan: FilePlan
    header_digest: bytes
    digests: dict[int, bytearray] = field(default_factory=dict)
    hashed: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Part:
    number: int
    chunk: int
    start: int
    length: int


class _File:
    """A file to write: opened for its first batch, and made durable and closed by the thread that
    finishes its last one. So no more are open than threads write, however many there are."""

    def __init__(self, create: Callable[[], FileWriter], batches: int) -> None:
        self.create, self.left, self.lock = create, batches, threading.Lock()
        self.writer: FileWriter | None = None

    def opened(self) -> FileWriter:
        with self.lock:
            if self.writer is None:
                self.writer = self.create()
            return self.writer

    def batch_done(self) -> None:
        with self.lock:
            self.left -= 1
            last = self.left == 0
        if last:
            self.opened().close()

    def abort(self) -> None:
        if self.writer is not None:
            self.writer.abort()


def write_files(
    storage: Storage,
    folder: str,
    plans: Sequence[FilePlan],
    sources: Mapping[str, Mapping[int, Source]],
    workers: Workers,
    known: Mapping[tuple[str, int], bytes] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[WrittenFile]:
    """Write `plans` into `folder`; `sources` has, by component, the tensors by number. Durable on
    return.

    known: chunk digests that were computed before, by component and tensor number. progress: told,
    from the writing threads, how many bytes each batch had.

    Memory beyond the sources is at most 8 MiB for each of `workers`. On any failure what was
    written is removed again, and the first error is raised (StorageError, NoSpace).
    """
    written = [_prepared(plan, known or {}) for plan in plans]
    files: list[_File] = []
    scratch = Scratch()

    def run(file: _File, result: WrittenFile, batches: Sequence[list[_Part]], head: bytes) -> None:
        for batch in batches:
            progress(
                _write_batch(
                    file.opened(), result, batch, sources[result.plan.component], scratch, head
                )
            )
            head = b""
            file.batch_done()

    try:
        jobs = []
        for result in written:
            batches = list(_batches(result.plan)) or [[]]
            file = _File(
                partial(storage.create, join(folder, result.plan.name), result.plan.size),
                len(batches),
            )
            files.append(file)
            # Files are filled in order where the storage cannot take their parts out of order.
            groups = [[batch] for batch in batches] if storage.positional_writes else [batches]
            jobs += [
                partial(run, file, result, group, b"" if number else result.plan.header)
                for number, group in enumerate(groups)
            ]
        workers.run(jobs)
    except BaseException:
        for file in files:
            file.abort()
        raise
    return written


def _prepared(plan: FilePlan, known: Mapping[tuple[str, int], bytes]) -> WrittenFile:
    result = WrittenFile(plan, content_hash(plan.header))
    for number, place in plan.places:
        digests = known.get((plan.component, number))
        result.digests[number] = bytearray(
            digests or bytes(DIGEST_BYTES * chunk_count(place.nbytes))
        )
        if digests is not None:
            result.hashed.add(number)
    return result


def _batches(plan: FilePlan) -> Iterator[list[_Part]]:
    """Neighbouring chunks, up to CHUNK_BYTES together; in file order."""
    batch: list[_Part] = []
    size = 0
    for number, place in plan.places:
        for chunk in range(chunk_count(place.nbytes)):
            at = chunk * CHUNK_BYTES
            length = min(CHUNK_BYTES, place.nbytes - at)
            if batch and (size + length > CHUNK_BYTES or len(batch) == BATCH_PARTS):
                yield batch
                batch, size = [], 0
            batch.append(_Part(number, chunk, place.start + at, length))
            size += length
    if batch:
        yield batch


def _write_batch(
    writer: FileWriter,
    result: WrittenFile,
    parts: list[_Part],
    sources: Mapping[int, Source],
    scratch: Scratch,
    head: bytes,
) -> int:
    """Hash and write one batch; how many bytes that were."""
    buffers = [memoryview(head)] if head else []
    used = 0
    for part in parts:
        at = part.chunk * CHUNK_BYTES
        source = sources[part.number]
        buffer = source.view(at, at + part.length)
        if buffer is None:
            buffer = scratch.take(used, part.length, source.pinned)
            used += part.length
            source.fill(at, buffer)
        if part.number not in result.hashed:
            where = slice(part.chunk * DIGEST_BYTES, (part.chunk + 1) * DIGEST_BYTES)
            result.digests[part.number][where] = chunk_digest(buffer)
        buffers.append(buffer)
    if buffers:
        writer.write_at(0 if head else parts[0].start, buffers)
    return sum(len(buffer) for buffer in buffers)
