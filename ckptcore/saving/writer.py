"""Writing tensor files: each byte is hashed and written once, straight from where it is, by several
threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
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


class _Batches:
    """A planned file in batches, each of which is one job, in any order."""

    def __init__(
        self, plan: FilePlan, source: ByteSource, scratch: Scratch, known: Known, least: int = 0
    ) -> None:
        self.plan, self._source, self._scratch = plan, source, scratch
        self._known = {n: known.get((plan.component, n)) for n, _ in plan.contents if known}
        chunks = [
            Chunk(stored.start + offset, min(CHUNK_BYTES, stored.nbytes - offset), offset, number)
            for number, stored in plan.contents
            for offset in range(0, stored.nbytes, CHUNK_BYTES)
        ]
        self.count = len(chunks)
        self.batches = batches(chunks, scratch.size) or [[]] * least
        ends = accumulate(DIGEST_BYTES * len(batch) for batch in self.batches)
        self._ends = [0, *ends]  # of each batch's digests, among those of the file

    def hashed(self, number: int) -> tuple[list[memoryview], slice, bytes]:
        """The bytes of a batch, and where among the digests of the file its own are."""
        chunks = self.batches[number]
        buffers = self._source.fetch(chunks, self._scratch) if chunks else []
        digests = []
        for (_, _, offset, of), buffer in zip(chunks, split_up(chunks, buffers), strict=True):
            before, at = self._known.get(of), offset // CHUNK_BYTES * DIGEST_BYTES
            digests.append(before[at : at + DIGEST_BYTES] if before else chunk_digest(buffer))
        return buffers, slice(self._ends[number], self._ends[number + 1]), b"".join(digests)


class _Comparison(_Batches):
    """A file that may be as it was."""

    def __init__(
        self,
        plan: FilePlan,
        earlier: WrittenFile,
        source: ByteSource,
        scratch: Scratch,
        known: Known,
    ) -> None:
        super().__init__(plan, source, scratch, known)
        self.earlier, self.differs = earlier, False

    def compare(self, number: int) -> None:
        if not self.differs:
            _, at, digests = self.hashed(number)
            self.differs = self.differs or digests != self.earlier.digests[at]


class _File(_Batches):
    """A file that is being written."""

    def __init__(
        self,
        target: NewFiles,
        plan: FilePlan,
        source: ByteSource,
        scratch: Scratch,
        known: Known,
        progress: Callable[[int], None],
    ) -> None:
        super().__init__(plan, source, scratch, known, least=1)  # one without tensors has a header
        self.progress = progress
        self.due = DueFile(partial(target.create, plan.name, plan.size), self.count)
        digests = bytearray(DIGEST_BYTES * self.count)
        self.written = WrittenFile(plan, content_hash(plan.header), digests)

    def write(self, numbers: Sequence[int]) -> None:
        """Hash and write batches."""
        for number in numbers:
            writer, chunks = self.due.open(), self.batches[number]
            buffers, at, digests = self.hashed(number)
            self.written.digests[at] = digests
            if number == 0:
                buffers = [memoryview(self.plan.header), *buffers]
            writer.write_at(chunks[0].start if number else 0, buffers)
            self.progress(sum(len(buffer) for buffer in buffers))
            self.due.done(len(chunks))
