"""Writing tensor files: each byte is hashed and written once, straight from where it is, by several
threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ..format.digest import CHUNK_BYTES, DIGEST_BYTES, chunk_digest, content_hash
from ..format.manifest import chunk_count
from ..format.tensorfile import StoredTensor
from ..storage.base import FileWriter, Storage
from ..storage.chunks import Chunk, DueFile, Scratch, Workers, batches, split_up

# The digests of tensors that were hashed before, by component and tensor number.
Known = Mapping[tuple[str, int], bytes]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One tensor file. contents: tensor numbers, each with where the tensor is in the file, in file
    order."""

    name: str
    component: str
    writer: int
    header: bytes
    contents: tuple[tuple[int, StoredTensor], ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(stored.nbytes for _, stored in self.contents)


class ByteSource(Protocol):
    """Where the bytes of a file come from: tensors in memory, or a file elsewhere."""

    def fetch(self, chunks: Sequence[Chunk[int]], scratch: Scratch) -> list[memoryview]:
        """The bytes of chunks that are neighbours in the file, each buffer of one or of several of
        them; valid until this thread fetches again."""


class NewFiles(Protocol):
    """Where files are made."""

    @property
    def storage(self) -> Storage: ...

    def create(self, name: str, size: int) -> FileWriter: ...


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What became of one FilePlan: digest of its header, and of all its chunks in file order."""

    plan: FilePlan
    header_digest: bytes
    digests: bytearray

    def tensors(self) -> Iterator[tuple[int, StoredTensor, bytes]]:
        """Number, place, and digests of the chunks, of each tensor in the file."""
        at = 0
        for number, stored in self.plan.contents:
            end = at + DIGEST_BYTES * chunk_count(stored.nbytes)
            yield number, stored, bytes(self.digests[at:end])
            at = end


def write_files(
    target: NewFiles,
    plans: Sequence[FilePlan],
    sources: Mapping[str, ByteSource],
    workers: Workers,
    known: Known | None = None,
    progress: Callable[[int], None] = lambda _: None,
    batch_bytes: int = CHUNK_BYTES,
) -> list[WrittenFile]:
    """Write `plans`; `sources` has the bytes of each by its name. Durable on return.

    known: digests that were computed before. progress: is given, by the writing threads, how many
    bytes each batch had. batch_bytes: fetched at a time, at most; memory beyond the sources is
    twice that for each of `workers`. On any failure what is not complete is removed again, and the
    first error is raised (StorageError, NoSpace).
    """
    files: list[_File] = []
    scratch = Scratch(batch_bytes)
    try:
        jobs: list[Callable[[], None]] = []
        for plan in plans:
            file = _File(target, plan, sources[plan.name], scratch, known or {}, progress)
            files.append(file)
            # Files are filled in order where the storage cannot take their parts out of order.
            numbers = range(len(file.batches))
            groups = [[n] for n in numbers] if target.storage.positional_writes else [numbers]
            jobs += [partial(file.write, group) for group in groups]
        workers.run(jobs)
    except BaseException:
        for file in files:
            if file.due.opened is not None:
                file.due.opened.abort()
        raise
    return [file.written for file in files]


def unchanged_files(
    plans: Sequence[FilePlan],
    earlier: Mapping[str, WrittenFile],
    sources: Mapping[str, ByteSource],
    workers: Workers,
    known: Known | None = None,
) -> list[WrittenFile]:
    """Those of `plans` whose bytes are those of the file that `earlier` has by their names, which
    has an equal header. Each is read to its first difference; nothing is written."""
    scratch = Scratch()
    files = [
        _Comparison(plan, earlier[plan.name], sources[plan.name], scratch, known or {})
        for plan in plans
        if plan.name in earlier
    ]
    workers.run([partial(file.compare, n) for file in files for n in range(len(file.batches))])
    return [replace(file.earlier, plan=file.plan) for file in files if not file.differs]


class _Comparison:
    """A file that may be as it was. Every batch is one job, in any order."""

    def __init__(
        self,
        plan: FilePlan,
        earlier: WrittenFile,
        source: ByteSource,
        scratch: Scratch,
        known: Known,
    ) -> None:
        self.plan, self.earlier, self.differs = plan, earlier, False
        self._source, self._scratch = source, scratch
        chunks = _chunks(plan)
        self.batches = batches(chunks, scratch.size)
        self._first = [0]
        for batch in self.batches:
            self._first.append(self._first[-1] + len(batch))
        self._known = _known_in(plan, known)

    def compare(self, number: int) -> None:
        if not self.differs:
            chunks = self.batches[number]
            buffers = self._source.fetch(chunks, self._scratch)
            digests = _digests(chunks, buffers, self._known)
            first = self._first[number] * DIGEST_BYTES
            if digests != self.earlier.digests[first : first + len(digests)]:
                self.differs = True


def _known_in(plan: FilePlan, known: Known) -> dict[int, bytes | None]:
    return {n: known.get((plan.component, n)) for n, _ in plan.contents if known}


def _digests(
    chunks: Sequence[Chunk[int]], buffers: Sequence[memoryview], known: Mapping[int, bytes | None]
) -> bytes:
    digests = []
    for (_, _, offset, number), buffer in zip(chunks, split_up(chunks, buffers), strict=True):
        before, at = known.get(number), offset // CHUNK_BYTES * DIGEST_BYTES
        digests.append(before[at : at + DIGEST_BYTES] if before else chunk_digest(buffer))
    return b"".join(digests)


class _File:
    """A file that is being written. Every batch is one job, in any order."""

    def __init__(
        self,
        target: NewFiles,
        plan: FilePlan,
        source: ByteSource,
        scratch: Scratch,
        known: Known,
        progress: Callable[[int], None],
    ) -> None:
        self.source, self.scratch, self.progress = source, scratch, progress
        chunks = _chunks(plan)
        self.batches = batches(chunks, scratch.size) or [[]]
        self.due = DueFile(partial(target.create, plan.name, plan.size), len(chunks))
        self.first = [0]  # of the chunks of each batch, among those of the file
        for batch in self.batches:
            self.first.append(self.first[-1] + len(batch))
        self.known = _known_in(plan, known)
        digests = bytearray(DIGEST_BYTES * self.first[-1])
        self.written = WrittenFile(plan, content_hash(plan.header), digests)

    def write(self, numbers: Sequence[int]) -> None:
        """Hash and write batches."""
        for number in numbers:
            writer, chunks = self.due.open(), self.batches[number]
            buffers = self.source.fetch(chunks, self.scratch) if chunks else []
            digests = _digests(chunks, buffers, self.known)
            first = self.first[number] * DIGEST_BYTES
            self.written.digests[first : first + len(digests)] = digests
            if number == 0:
                buffers = [memoryview(self.written.plan.header), *buffers]
            writer.write_at(chunks[0].start if number else 0, buffers)
            self.progress(sum(len(buffer) for buffer in buffers))
            self.due.done(len(chunks))


def _chunks(plan: FilePlan) -> list[Chunk[int]]:
    return [
        Chunk(stored.start + offset, min(CHUNK_BYTES, stored.nbytes - offset), offset, number)
        for number, stored in plan.contents
        for offset in range(0, stored.nbytes, CHUNK_BYTES)
    ]
