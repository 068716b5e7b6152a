"""The files of a checkpoint, copied into a folder elsewhere: written as by a save, from bytes that
are read and verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..catalog.folder import attempts_among, entries_in, is_ours, join, mark_name
from ..catalog.transaction import Transaction
from ..errors import CheckpointCorrupt, NoSpace, StorageError
from ..format.digest import CHUNK_BYTES, DIGEST_BYTES, content_digest
from ..format.manifest import SIZE_LIMIT, FileEntry, Index
from ..format.tensorfile import StoredTensor
from ..loading.reader import StoredFile, TensorRead, check_header, read_tensors
from ..loading.view import CheckpointView
from ..saving.writer import FilePlan, write_files
from ..storage.base import Storage
from ..storage.chunks import Chunk, Scratch, Workers

__all__ = ["CopyProgress", "Counted", "FileCopies"]

# Called with the bytes that were copied and kept so far, and those of all files. What it raises
# ends the copy.
CopyProgress = Callable[[int, int, int], Any]


@dataclass(slots=True)
class Counted:
    """What `progress` is called with, from all threads."""

    total: int
    progress: CopyProgress | None
    copied: int = 0
    kept: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, copied: int, kept: int = 0) -> None:
        with self.lock:
            self.copied += copied
            self.kept += kept
            if self.progress is not None:
                self.progress(self.copied, self.kept, self.total)


class _Stored:
    """The bytes of a file of the checkpoint that is copied, verified when they are fetched."""

    def __init__(self, view: CheckpointView, name: str, reads: Sequence[TensorRead]) -> None:
        chunks = sum(len(read.entry.digests) // DIGEST_BYTES for read in reads)
        self.reads, self.file = reads, StoredFile(view.storage, view.folder, name, chunks)

    def fetch(self, chunks: Sequence[Chunk[int]], scratch: Scratch) -> list[memoryview]:
        buffers = [scratch.take(0, sum(chunk.length for chunk in chunks))]
        stored = [Chunk(start, n, at, self.reads[number]) for start, n, at, number in chunks]
        for damage in self.file.read(stored, buffers, scratch.size).values():
            raise damage
        self.file.due.done(len(chunks))
        return buffers


@dataclass(slots=True)
class FileCopies:
    """The files that the manifest of `view` lists, for an attempt that was begun."""

    view: CheckpointView
    into: Transaction
    workers: Workers
    counted: Counted

    @property
    def target(self) -> Storage:
        return self.into.storage

    @property
    def work(self) -> str:
        return self.into.folder

    def make(self) -> None:
        """Copy all files, but for those that are there and verify. Each is complete on return, or
        not there.

        Raises CheckpointCorrupt for the source, NoSpace, StorageError.
        """
        view, files = self.view, self.view.manifest.files
        found = self._left_complete()
        self._check_space(sum(record.size for name, record in files.items() if name not in found))
        described: set[str] = set()
        try:
            for writer in sorted({w for c in view.manifest.components.values() for w in c.writers}):
                index = view.index(writer)
                described.update(index.files)
                self._tensor_files(index, found)
                view.forget(writer)
        except CheckpointCorrupt as error:
            error.path = error.path or view.url
            raise
        rest = sorted(files.keys() - described)
        self.workers.run([partial(self._whole_file, name, name in found) for name in rest])

    def _left_complete(self) -> set[str]:
        """Files of an interrupted copy that have the size that they should have. Others of our kind
        are removed."""
        entries = entries_in(self.target, self.work)
        marks = {mark_name(attempt) for attempt in attempts_among(entries)}
        found = set()
        for entry in entries:
            if entry.is_folder or entry.name in marks or not is_ours(entry.name):
                continue
            record = self.view.manifest.files.get(entry.name)
            if record is not None and record.size == entry.size:
                found.add(entry.name)
            else:
                self.target.remove(join(self.work, entry.name))
        return found

    def _check_space(self, nbytes: int) -> None:
        free = self.target.free_bytes()
        if free is not None and free < nbytes:
            what = f"{self.target.at(self.work)} needs {nbytes:,} bytes, {free:,} are free"
            raise NoSpace(what, path=self.target.url, needed=nbytes, free=free)

    def _whole_file(self, name: str, there: bool) -> None:
        """An index, or another file that is no tensor file."""
        path, record = join(self.work, name), self.view.manifest.files[name]
        if there:
            with suppress(StorageError):
                if content_digest(self.target.read(path, SIZE_LIMIT)) == record.digest:
                    self.counted.add(0, record.size)
                    return
            self.target.remove(path)
        data = self.view.read_file(name)
        self.into.write(name, data)
        self.counted.add(len(data))

    def _tensor_files(self, index: Index, found: Collection[str]) -> None:
        """Those of one writer."""
        reads: dict[str, list[TensorRead]] = {name: [] for name in index.files}
        for read in sorted(self.view.reads_of(index), key=lambda read: read.entry.start):
            if read.entry.file is not None and read.entry.nbytes:
                reads[read.entry.file].append(read)
        for name in found & reads.keys():
            if self._verifies(name, index.files[name], reads[name]):
                self.counted.add(0, index.files[name].size)
                del reads[name]
            else:
                self.target.remove(join(self.work, name))
        plans: dict[str, FilePlan] = {}
        self.workers.run(
            [partial(self._plan, plans, name, index, mine) for name, mine in reads.items()]
        )
        sources = {name: _Stored(self.view, name, mine) for name, mine in reads.items()}
        known = {
            (name, number): read.entry.digests
            for name, mine in reads.items()
            for number, read in enumerate(mine)
        }
        batch_bytes = max(CHUNK_BYTES, self.view.storage.request_bytes)
        try:
            write_files(
                self.into,
                [*plans.values()],
                sources,
                self.workers,
                known,
                self.counted.add,
                batch_bytes,
            )
        finally:
            for source in sources.values():
                source.file.close()

    def _plan(
        self, plans: dict[str, FilePlan], name: str, index: Index, reads: Sequence[TensorRead]
    ) -> None:
        """Add to `plans` how a file is written again, of which `reads` are all tensors."""
        view, stored = self.view, index.files[name]
        covered = stored.header_size + sum(read.entry.nbytes for read in reads)
        if covered != stored.size:
            what = f"{view.storage.at(join(view.folder, name))} has bytes that no digest covers"
            raise CheckpointCorrupt(
                what, path=view.url, file=name, kind="format", expected=stored.size, actual=covered
            )
        header = check_header(view.storage, view.folder, name, stored)
        places = []
        for number, read in enumerate(reads):
            e = read.entry
            place = StoredTensor(e.name, e.dtype, e.local_shape, e.start, e.nbytes)
            places.append((number, place))
        plans[name] = FilePlan(name, name, index.writer, bytes(header), tuple(places))

    def _verifies(self, name: str, known: FileEntry, reads: Sequence[TensorRead]) -> bool:
        """Whether a file that an interrupted copy left is what it should be."""
        try:
            check_header(self.target, self.work, name, known)
            read_tensors(self.target, self.work, reads, self.workers.count)
        except (CheckpointCorrupt, StorageError):
            return False
        return True
