"""The files of a checkpoint, copied into a folder elsewhere: verified reads whose destination is a
file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..catalog.folder import attempts_among, entries_in, is_ours, join, mark_name
from ..catalog.transaction import Transaction
from ..errors import CheckpointCorrupt, NoSpace, StorageError
from ..format.digest import CHUNK_BYTES, content_digest
from ..format.index import FileEntry
from ..format.manifest import SIZE_LIMIT
from ..loading.reader import TensorRead, check_header, read_tensors
from ..loading.view import CheckpointView
from ..storage.base import FileWriter, Storage
from ..storage.chunks import MakeMemory
from ..storage.workers import Workers

__all__ = ["CopyProgress", "Counted", "FileCopies"]

# Called with the bytes that were copied and kept so far, and those of all files. What it raises
# ends the copy.
CopyProgress = Callable[[int, int, int], Any]

PIECE_BYTES = (
    16 * CHUNK_BYTES
)  # of a large file, what one thread copies before it takes up the next piece


@dataclass(slots=True)
class Counted:
    """What `progress` is told, from all threads."""

    total: int
    tell: CopyProgress | None
    copied: int = 0
    kept: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, copied: int, kept: int = 0) -> None:
        with self.lock:
            self.copied += copied
            self.kept += kept
            if self.tell is not None:
                self.tell(self.copied, self.kept, self.total)


@dataclass(slots=True)
class _Into:
    """Where the verified bytes of one tensor go: a file that is being written."""

    writer: FileWriter
    start: int
    counted: Counted
    pinned: MakeMemory | None = None

    def view(self, start: int, stop: int) -> memoryview | None:
        return None

    def put(self, start: int, data: memoryview) -> None:
        self.writer.write_at(self.start + start, [data])
        self.counted.add(len(data))


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
        for writer in sorted({w for c in view.manifest.components.values() for w in c.writers}):
            index = view.index(writer)
            described.update(index.files)
            reads: dict[str, list[TensorRead]] = {name: [] for name in index.files}
            for read in view.reads_of(index):
                if read.entry.file is not None and read.entry.nbytes:
                    reads[read.entry.file].append(read)
            small = []
            for name, known in index.files.items():
                job = partial(self._tensor_file, name, known, reads[name], name in found)
                if self.target.positional_writes and known.size > PIECE_BYTES:
                    job()
                else:
                    small.append(job)
            self.workers.run(small)
            view.forget(writer)
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

    def _tensor_file(
        self, name: str, known: FileEntry, reads: Sequence[TensorRead], there: bool
    ) -> None:
        view, path = self.view, join(self.work, name)
        covered = known.header_size + sum(read.entry.nbytes for read in reads)
        if covered != known.size:
            what = f"{view.storage.at(join(view.folder, name))} has bytes that no digest covers"
            raise CheckpointCorrupt(
                what, path=view.url, file=name, kind="format", expected=known.size, actual=covered
            )
        if there and self._verifies(name, known, reads):
            self.counted.add(0, known.size)
            return
        if there:
            self.target.remove(path)
        header = check_header(view.storage, view.folder, name, known)
        writer = self.into.create(name, known.size)
        try:
            writer.write_at(0, [memoryview(header)])
            self.counted.add(len(header))
            into = [
                replace(read, target=_Into(writer, read.entry.start, self.counted))
                for read in reads
            ]
            self._read(view.storage, view.folder, into)
            writer.close()
        except BaseException as error:
            writer.abort()
            if isinstance(error, CheckpointCorrupt):
                error.path = error.path or view.url
            raise

    def _verifies(self, name: str, known: FileEntry, reads: Sequence[TensorRead]) -> bool:
        """Whether a file that an interrupted copy left is what it should be."""
        try:
            check_header(self.target, self.work, name, known)
            self._read(self.target, self.work, reads)
        except (CheckpointCorrupt, StorageError):
            return False
        return True

    def _read(self, storage: Storage, folder: str, reads: Sequence[TensorRead]) -> None:
        """All of one file: in pieces side by side where it is large and the target takes them so,
        else in order."""
        if (
            not self.target.positional_writes
            or sum(read.entry.nbytes for read in reads) <= PIECE_BYTES
        ):
            read_tensors(storage, folder, reads, 1)
        else:
            self.workers.run(
                [partial(read_tensors, storage, folder, piece, 1) for piece in _pieces(reads)]
            )


def _pieces(reads: Sequence[TensorRead]) -> Iterator[list[TensorRead]]:
    """The chunks of one file in its order, about PIECE_BYTES together."""
    piece: list[TensorRead] = []
    size = 0
    for read in sorted(reads, key=lambda read: read.entry.start):
        chunks: list[int] = []
        for number in range(-(-read.entry.nbytes // CHUNK_BYTES)):
            length = read.entry.chunk(number)[1]
            if size and size + length > PIECE_BYTES:
                yield [*piece, replace(read, chunks=chunks)] if chunks else piece
                piece, chunks, size = [], [], 0
            chunks.append(number)
            size += length
        piece.append(replace(read, chunks=chunks))
    if piece:
        yield piece
