"""The storage that the engine asks for: few operations, so that a new backend is an afternoon's
work.

Paths are relative to the storage's root, with `/` between parts. Every failure is a StorageError
(NoSpace when the storage is full) that names the path; `errno` is ENOENT where there is nothing.
Which files make up a checkpoint, and in what order they are written, is not decided here.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ..errors import NoSpace, StorageError
from .urls import join_url

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder; `size` in bytes, None for folders. version: differs where the file was
    replaced, and is its `identity` where folders can be renamed; None where the storage does not
    say."""

    name: str
    is_folder: bool
    size: int | None
    version: str | None = field(default=None, compare=False)


class FileWriter(ABC):
    """A file being written. It does not exist under its name for readers of the rule until `close`
    returned."""

    @abstractmethod
    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` one after the other from byte `offset` on. Threads may call it at once
        when the storage has `positional_writes`; otherwise calls come in order of offset."""

    @abstractmethod
    def close(self) -> None:
        """Finish, and return only when the bytes would survive a crash of the machine (as far as it
        can be asked)."""

    @abstractmethod
    def abort(self) -> None:
        """Give up: whatever was written must not be found under the file's name. Never raises."""


class FileReader(AbstractContextManager["FileReader"]):
    """An open file of `size` bytes: what it reads is of one file even if the name is replaced
    meanwhile."""

    size: int

    @abstractmethod
    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` from byte `offset` on; any number of threads at once. StorageError (EIO)
        at end of file."""

    @abstractmethod
    def close(self) -> None: ...

    def __exit__(self, *_: Any) -> None:
        self.close()


class Storage(ABC):
    """A folder of checkpoints somewhere. `url` is how users name it and how messages print it."""

    url: str
    # Folders can be renamed in one step that readers see as a whole.
    atomic_rename: bool
    # FileWriter.write_at may be called out of order and from several threads.
    positional_writes: bool
    # Of several that write one name at the same time, one succeeds and the others get EEXIST.
    # Without it the name is looked at before, so that the later one may win.
    create_only: bool = False
    # A second name that `link` gives a file takes no room.
    hard_links: bool = False
    # What a read should have at least, where each is a request of its own; 0: any size is as good.
    request_bytes: int = 0
    # How many requests were tried again so far.
    retries: int = 0

    @abstractmethod
    def create(self, path: str, size: int) -> FileWriter:
        """A new file of `size` bytes; EEXIST when the name is taken, at the latest when it is
        closed."""

    @abstractmethod
    def open(self, path: str) -> FileReader: ...

    @abstractmethod
    def list(self, path: str = "") -> list[Entry]:
        """What is in a folder now (never a cached answer), sorted by name; ENOENT when there is
        none."""

    def entries(self, path: str) -> Sequence[Entry] | None:
        """What is in a folder now; None where there is none."""
        try:
            return self.list(path)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return None

    def list_folders(self, beginning: str) -> dict[str, Sequence[Entry] | None]:
        """The folders of the root whose names begin so, sorted; with what is in them now (never a
        cached answer) where the storage says that in the same breath, else None. ENOENT when there
        is no root."""
        found = [
            entry.name
            for entry in self.list()
            if entry.is_folder and entry.name.startswith(beginning)
        ]
        return dict.fromkeys(found)

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Create a folder and the ones above it. One that exists is fine."""

    @abstractmethod
    def sync_folder(self, path: str) -> None:
        """Return when the names in the folder would survive a crash."""

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Files on any storage; folders only with `atomic_rename`. An existing file is replaced, a
        folder never."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file; one that is gone already is fine."""

    def remove_all(self, paths: Sequence[str]) -> None:
        """Remove files, in this order where the storage does not take many at once; ones that are
        gone are fine."""
        for path in paths:
            self.remove(path)

    @abstractmethod
    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty; one that is gone already is fine."""

    def free_bytes(self) -> int | None:
        """Bytes that can still be written; None when the storage does not tell."""
        return None

    def write(self, path: str, data: bytes) -> None:
        """Write a whole small file, durably."""
        writer = self.create(path, len(data))
        try:
            writer.write_at(0, [memoryview(data)])
            writer.close()
        except BaseException:
            writer.abort()
            raise

    def read(self, path: str, limit: int = 1 << 30) -> bytes:
        """A whole small file. StorageError (EFBIG) when it is larger than `limit` bytes."""
        with self.open(path) as reader:
            if reader.size > limit:
                what = (
                    f"{self.at(path)} has {reader.size:,} bytes, more than the {limit:,} expected "
                    "at most"
                )
                raise StorageError(what, path=path, errno=errno.EFBIG)
            data = bytearray(reader.size)
            if data:
                reader.read_into(0, [memoryview(data)])
            return bytes(data)

    def identity(self, path: str) -> str | None:
        """Text that changes when anybody replaces or changes the file; None where there is none, or
        the storage cannot `link` it."""
        return None

    def link(self, source: str, target: str, identity: str) -> bool:
        """Have the bytes of a file under a second name, without moving them: a hard link, or a copy
        that the server makes. Durable as a new file is. EEXIST when the name is taken.

        identity: what the file had when its bytes were known. False, and nothing made, where it has
        another one by now, or the storage cannot do it.
        """
        return False

    def drop_uploads(self, path: str) -> None:  # noqa: B027
        """Give up what was begun to be uploaded to a folder and is not complete, where the storage
        keeps such a thing."""

    def at(self, path: str) -> str:
        """How messages name a path of this storage."""
        return join_url(self.url, path)


def failure(storage: Storage, path: str, doing: str, error: OSError) -> StorageError:
    """The StorageError that says what was done to which path."""
    number = error.errno or (errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO)
    what = f"{storage.at(path)}: {doing} failed: "
    what += error.strerror or str(error) or type(error).__name__
    if number == errno.EMFILE:
        what += " in this process; close some, or raise their limit (ulimit -n)"
    if number not in FULL:
        return StorageError(what, path=path, errno=number)
    free = storage.free_bytes()
    left = "" if free is None else f" ({free:,} bytes free)"
    return NoSpace(what + left, path=path, errno=number, free=free)
