"""Any other fsspec filesystem: objects that appear whole when they are complete, and no rename of folders."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fsspec

from ..errors import CheckpointError, StorageError
from .base import Entry, FileReader, FileWriter, Storage, translated

__all__ = ["FsspecStorage"]


class FsspecStorage(Storage):
    """`url` is any fsspec URL; `options` go to the filesystem and appear in no message."""

    atomic_rename = False
    positional_writes = False

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url
        try:
            self.fs, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise StorageError(f"{url}: no filesystem for this URL ({error})", path=url, errno=errno.EINVAL) from None
        self.root = "/".join(part for part in root.split("/") if part)
        if root.startswith("/"):
            self.root = "/" + self.root

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def create(self, path: str, size: int) -> FileWriter:
        full = self._full(path)
        with _translated(self, path, "creating the object"):
            self.fs.invalidate_cache()
            if self.fs.exists(full):
                raise FileExistsError(errno.EEXIST, "it exists")
            # Not committed on close: leaving an open file on an exception would publish what was written so far.
            handle = self.fs.open(full, "wb", autocommit=False)
            _forget(getattr(handle, "fs", self.fs), handle)
            return _Writer(self, path, handle)

    def open(self, path: str) -> FileReader:
        with _translated(self, path, "opening the object"):
            full = self._full(path)
            self.fs.invalidate_cache()
            info = self.fs.info(full)
            if info["type"] != "file":
                raise StorageError(f"{self.at(path)} is not a file", path=path, errno=errno.EISDIR)
            return _Reader(self, path, int(info["size"]))

    def list(self, path: str = "") -> list[Entry]:
        with _translated(self, path, "listing"):
            self.fs.invalidate_cache()
            full = self._full(path)
            found = self.fs.ls(full, detail=True)
        entries = {}
        for item in found:
            name = item["name"].rstrip("/").rsplit("/", 1)[-1]
            folder = item["type"] == "directory"
            if item["name"].strip("/") != full.strip("/"):
                entries[name] = Entry(name, folder, None if folder else int(item["size"]))
        return [entries[name] for name in sorted(entries)]

    def make_folder(self, path: str) -> None:
        with _translated(self, path, "creating the folder"):
            self.fs.makedirs(self._full(path), exist_ok=True)

    def sync_folder(self, path: str) -> None:
        pass  # an object that was put is there

    def rename(self, source: str, target: str) -> None:
        with _translated(self, target, f"renaming {source}"):
            # Not mv: it takes [, * and ? in names for patterns.
            self.fs.cp_file(self._full(source), self._full(target))
            self.fs.rm_file(self._full(source))

    def remove(self, path: str) -> None:
        with _translated(self, path, "removing the object"):
            try:
                self.fs.rm_file(self._full(path))
            except FileNotFoundError:
                pass

    def remove_folder(self, path: str) -> None:
        with _translated(self, path, "removing the folder"):
            self.fs.invalidate_cache()
            try:
                self.fs.rmdir(self._full(path))
            except FileNotFoundError:
                pass


class _Writer(FileWriter):
    def __init__(self, storage: FsspecStorage, path: str, handle: Any) -> None:
        self.storage, self.path, self.handle = storage, path, handle

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with _translated(self.storage, self.path, "writing"):
            for buffer in buffers:
                self.handle.write(buffer)

    def close(self) -> None:
        with _translated(self.storage, self.path, "completing the object"):
            self.handle.close()
            self.handle.commit()

    def abort(self) -> None:
        try:
            self.handle.discard()
            # Nothing may flush or publish it when it is garbage-collected.
            if not self.handle.closed:
                self.handle.closed = True
        except (OSError, AttributeError, ValueError):
            pass  # the failure that led here is the one to report
        try:
            # Some filesystems (memory) show an object from its creation on, whatever they were asked.
            self.storage.remove(self.path)
        except OSError:
            pass


class _Reader(FileReader):
    def __init__(self, storage: FsspecStorage, path: str, size: int) -> None:
        self.storage, self.path, self.size = storage, path, size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with _translated(self.storage, self.path, "reading"):
            need = sum(len(b) for b in buffers)
            data = memoryview(self.storage.fs.cat_file(self.storage._full(self.path), start=offset, end=offset + need))
            if len(data) != need:
                raise OSError(errno.EIO, "the object ends too early")
            at = 0
            for buffer in buffers:
                buffer[:] = data[at : at + len(buffer)]
                at += len(buffer)

    def close(self) -> None:
        pass


def _forget(fs: Any, handle: Any) -> None:
    """fsspec notes a file that is not committed on close for the end of a transaction. Ours end none, so that every file
    ever written, and in memory:// its bytes, would be held for as long as the process lives."""
    while True:
        try:
            fs.transaction.files.remove(handle)
        except ValueError:  # it is not there (any more)
            return
        except IndexError:  # another thread has noted or forgotten a file meanwhile
            pass


@contextmanager
def _translated(storage: FsspecStorage, path: str, doing: str) -> Iterator[None]:
    # Filesystems raise OSErrors for most things; what their clients raise beside that (a dead endpoint, a bad bucket,
    # wrong credentials) has no common base.
    with translated(storage, path, doing):
        try:
            yield
        except (OSError, CheckpointError):
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
