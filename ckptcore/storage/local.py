"""Local disks and mounted filesystems: positional reads and writes, fsync, atomic rename."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import StorageError, UnsafePath
from .base import Entry, FileReader, FileWriter, Storage, failure

IOV_MAX = 1024  # buffers that one preadv or pwritev takes (Linux and macOS)
STREAM_BYTES = 128 << 20
PAGE = mmap.PAGESIZE
DIRECT_BYTES = 256 << 10  # fewer are not worth a way past the page cache

# What is said where a filesystem, or memory, is not made for it.
NO_DIRECT = (errno.EINVAL, errno.EFAULT, errno.ENOTSUP, errno.ENOENT, errno.EACCES, errno.EPERM)
NO_SYNC_RANGE = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE)  # then there is fsync

# Linux only; flags from linux/fs.h.
WAIT_BEFORE, WRITE, WAIT_AFTER = 1, 2, 4
_sync_range: Any = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_range is not None:
    _sync_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class LocalStorage(Storage):
    """A folder on a filesystem of this machine. It need not exist before something is written."""

    atomic_rename = True
    positional_writes = True
    hard_links = True

    def __init__(self, root: Path, *, direct_io: bool = True, keep_cached: bool = False) -> None:
        """direct_io: bytes that lie in memory as they will on the disk, page by page (those of
        background saves do), go there without a copy in the page cache, where the filesystem can do
        that. keep_cached: everything is written through the page cache, and stays there as long as
        the system has memory for it."""
        self.root = Path(os.path.abspath(root.expanduser()))
        self.url = str(self.root)
        past_cache = direct_io and not keep_cached
        self.direct_flag: int = getattr(os, "O_DIRECT", 0) if past_cache else 0
        self.keep_cached = keep_cached

    def at(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}" if path else self.url

    @contextmanager
    def doing(self, path: str, action: str) -> Iterator[None]:
        """Turn an OSError into the StorageError that says what was done to which path."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise failure(self, path, action, error) from error

    @contextmanager
    def _inside(self, path: str) -> Iterator[tuple[int | None, str]]:
        """(folder, name) to reach a path with, such that a folder that has just become a link is
        not followed."""
        above, _, name = path.rpartition("/")
        if not above:
            yield None, self.at(path)
            return
        folder = os.open(
            self.at(above), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        try:
            yield folder, name
        finally:
            os.close(folder)

    def create(self, path: str, size: int) -> FileWriter:
        with self.doing(path, "creating the file"):
            # Mode 0666 less the umask, as any ordinary program creates files.
            fd = os.open(self.at(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        return _Writer(
            self,
            path,
            fd,
            _Stream(fd, drop=not self.keep_cached)
            if size >= STREAM_BYTES and _sync_range is not None
            else None,
        )

    def open(self, path: str) -> FileReader:
        # Not through links, which could lead out of the checkpoint; and without waiting for the
        # other end of a pipe.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with self.doing(path, "opening the file"), self._inside(path) as (folder, name):
                fd = os.open(name, flags, dir_fd=folder)
        except StorageError as error:
            above = path.rpartition("/")[0]
            linked = error.errno in (errno.ELOOP, errno.ENOTDIR) and above
            if linked and os.path.islink(self.at(above)):
                raise StorageError(self._linked(above), path=above, errno=errno.ELOOP) from None
            if error.errno == errno.ELOOP:
                raise UnsafePath(
                    f"{self.at(path)} is a symbolic link; refused",
                    file=path.rpartition("/")[2],
                    kind="format",
                ) from None
            if error.errno == errno.ENXIO:  # a socket, or a device without a driver
                raise StorageError(
                    f"{self.at(path)} is not a regular file", path=path, errno=errno.EINVAL
                ) from None
            raise
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            kind = errno.EISDIR if stat.S_ISDIR(info.st_mode) else errno.EINVAL
            raise StorageError(f"{self.at(path)} is not a regular file", path=path, errno=kind)
        return _Reader(self, path, fd, info.st_size)

    def list(self, path: str = "") -> list[Entry]:
        # The root may be a link; a folder in it that is one lies elsewhere and is not ours to list
        # or to delete.
        if path and os.path.islink(self.at(path)):
            raise StorageError(self._linked(path), path=path, errno=errno.ENOTDIR)
        if not path:
            self._check_root()
        with self.doing(path, "listing the folder"), os.scandir(self.at(path)) as found:
            entries = []
            for item in found:
                folder = item.is_dir(follow_symlinks=False)
                try:
                    info = None if folder else item.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # removed by somebody else between the two calls
                if info is None:
                    entries.append(Entry(item.name, True, None))
                else:
                    entries.append(Entry(item.name, False, info.st_size, _identity(info)))
        return sorted(entries, key=lambda entry: entry.name)

    def entries(self, path: str) -> Sequence[Entry] | None:
        try:
            os.lstat(self.at(path))
        except FileNotFoundError:  # the usual answer to a save, which need be no error first
            return None
        except OSError:
            pass  # the listing says what it is
        return super().entries(path)

    def list_folders(self, beginning: str) -> dict[str, Sequence[Entry] | None]:
        """Links are among them, also those that lead nowhere now: what they stand for is not passed
        over in silence."""
        found = [entry for entry in self.list() if entry.name.startswith(beginning)]
        return dict.fromkeys(
            entry.name for entry in found if entry.is_folder or self._is_folder_link(entry.name)
        )

    def _is_folder_link(self, name: str) -> bool:
        full = self.at(name)
        return os.path.islink(full) and (os.path.isdir(full) or not os.path.exists(full))

    def _linked(self, path: str) -> str:
        target = os.path.realpath(self.at(path))
        return (
            f"{self.at(path)} is a symbolic link; refused: move here what it leads to, or load "
            f"{target} by its path"
        )

    def _check_root(self) -> None:
        """A root that is missing is an empty one, but not where a link to it leads nowhere: the
        disk that has the checkpoints may not be mounted yet."""
        there = next(f for f in (self.root, *self.root.parents) if os.path.lexists(f))
        if there.is_symlink() and not os.path.exists(there):
            raise StorageError(
                f"{there} is a symbolic link to {os.readlink(there)}, which is not "
                "there; mount the disk that it is on, or make that folder",
                path=self.url,
                errno=errno.ENXIO,
            )

    def make_folder(self, path: str) -> None:
        self._check_root()
        with self.doing(path, "creating the folder"):
            # Names below the root are synced by those who need them; nobody else can see to the
            # root itself.
            new = [f for f in (self.root, *self.root.parents) if not f.exists()]
            os.makedirs(self.at(path), exist_ok=True)
            for folder in new:
                _sync_folder(folder.parent)

    def sync_folder(self, path: str) -> None:
        with self.doing(path, "syncing the folder"):
            _sync_folder(self.at(path))

    def rename(self, source: str, target: str) -> None:
        with self.doing(target, f"renaming {source}"):
            if os.path.isdir(self.at(source)) and os.path.isdir(self.at(target)):
                raise FileExistsError(
                    errno.EEXIST, os.strerror(errno.EEXIST)
                )  # POSIX replaces an empty folder
            with self._inside(source) as (old, name), self._inside(target) as (new, new_name):
                os.rename(name, new_name, src_dir_fd=old, dst_dir_fd=new)

    def identity(self, path: str) -> str | None:
        try:
            with self._inside(path) as (folder, name):
                return _identity(os.stat(name, dir_fd=folder, follow_symlinks=False))
        except OSError:
            return None

    def link(self, source: str, target: str, identity: str) -> bool:
        if self.identity(source) != identity:  # also where its folder cannot be reached any more
            return False
        try:
            with (
                self.doing(target, f"linking {source}"),
                self._inside(source) as (old, name),
                self._inside(target) as (new, new_name),
            ):
                os.link(name, new_name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
                if _identity(os.stat(new_name, dir_fd=new, follow_symlinks=False)) == identity:
                    return True
                os.unlink(new_name, dir_fd=new)
        except StorageError as error:
            if error.errno not in _NO_LINKS:
                raise
        return False

    def remove(self, path: str) -> None:
        with self.doing(path, "removing the file"):
            try:
                with self._inside(path) as (folder, name):
                    os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                pass

    def remove_folder(self, path: str) -> None:
        with self.doing(path, "removing the folder"):
            try:
                os.rmdir(self.at(path))
            except FileNotFoundError:
                pass

    def free_bytes(self) -> int | None:
        for folder in (self.root, *self.root.parents):
            try:
                return shutil.disk_usage(folder).free
            except FileNotFoundError:
                continue
            except OSError:
                return None
        return None


# The file is gone, has too many names, or this filesystem has no hard links, or none to there.
_NO_LINKS = frozenset(
    {
        errno.ENOENT,
        errno.EMLINK,
        errno.EXDEV,
        errno.EPERM,
        errno.ENOSYS,
        errno.ENOTSUP,
        errno.EOPNOTSUPP,
    }
)


def _identity(info: os.stat_result) -> str | None:
    """Not the time of change: a new link changes that."""
    return (
        f"{info.st_ino} {info.st_size} {info.st_mtime_ns}" if stat.S_ISREG(info.st_mode) else None
    )


class _Stream:
    """Large files stream to the disk while they are written, through at most STREAM_BYTES of page
    cache.

    Otherwise a save first fills the page cache, evicting what the training reads, and then waits
    for the disk alone. drop: whether what is on the disk leaves the page cache.
    """

    def __init__(self, fd: int, drop: bool = True) -> None:
        self.fd, self.drop = fd, drop
        self.lock = threading.Lock()
        self.pending: deque[tuple[int, int]] = deque()
        self.nbytes = 0

    def wrote(self, offset: int, length: int) -> None:
        """Start writing a range back; wait for the oldest ones, and drop them, when too much is
        pending."""
        self._sync(offset, length, WRITE)
        with self.lock:
            self.pending.append((offset, length))
            self.nbytes += length
            done = []
            while self.nbytes > STREAM_BYTES:
                done.append(self.pending.popleft())
                self.nbytes -= done[-1][1]
        for old in done:
            # This call reports a failed write-back once, and fsync may not repeat it: so it must
            # raise here.
            self._sync(*old, WAIT_BEFORE | WRITE | WAIT_AFTER)
            if self.drop:
                os.posix_fadvise(self.fd, *old, os.POSIX_FADV_DONTNEED)

    def _sync(self, offset: int, length: int, flags: int) -> None:
        if _sync_range is not None and _sync_range(self.fd, offset, length, flags):
            number = ctypes.get_errno()
            if number not in NO_SYNC_RANGE:
                raise OSError(number, os.strerror(number))


class _Writer(FileWriter):
    def __init__(self, storage: LocalStorage, path: str, fd: int, stream: _Stream | None) -> None:
        self.storage, self.path, self.fd, self.stream = storage, path, fd, stream
        self.direct = -1  # the file once more, opened for writes past the page cache
        self.tries_direct = bool(storage.direct_flag)
        self.lock = threading.Lock()

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self.storage.doing(self.path, "writing"):
            # What lies side by side in memory comes as one buffer, but for a header before it.
            start = offset + sum(len(b) for b in buffers[:-1])
            if not (buffers and self.tries_direct and _lies_alike(start, buffers[-1])):
                self._write(offset, buffers)
                return
            self._write(offset, buffers[:-1])
            data = buffers[-1]
            first, end = self._write_direct(start, data)
            self._write(start, [data[: first - start]])
            self._write(end, [data[end - start :]])

    def _write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        _transfer(os.pwritev, self.fd, offset, buffers)
        if self.stream is not None and (length := sum(len(b) for b in buffers)):
            self.stream.wrote(offset, length)

    def _write_direct(self, offset: int, data: memoryview) -> tuple[int, int]:
        """Write the whole pages of `data` past the page cache; the first and the end of the bytes
        that were written.

        No byte of these pages is written in another way, so that the kernel has nothing to
        reconcile.
        """
        start = at = -(-offset // PAGE) * PAGE
        end = (offset + len(data)) // PAGE * PAGE
        try:
            with self.lock:
                if self.direct < 0:
                    # The same file by another door, even when its name is taken by another one
                    # meanwhile.
                    flags = os.O_WRONLY | os.O_CLOEXEC | self.storage.direct_flag
                    self.direct = os.open(f"/proc/self/fd/{self.fd}", flags)
            while at < end:
                done = os.pwrite(self.direct, data[at - offset : end - offset], at)
                at += done // PAGE * PAGE
                if not done or done % PAGE:
                    break
        except OSError as error:
            if error.errno not in NO_DIRECT:
                raise
            # This filesystem, or this memory, is not made for it. Closed with the file: other
            # threads may be using it.
            self.tries_direct = False
        return start, at

    def _close_direct(self) -> None:
        fd, self.direct = self.direct, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        with self.storage.doing(self.path, "syncing"):
            try:
                self._close_direct()
                os.fsync(self.fd)
            finally:
                fd, self.fd = self.fd, -1
                os.close(fd)

    def abort(self) -> None:
        try:
            self._close_direct()
            if self.fd >= 0:
                fd, self.fd = self.fd, -1
                os.close(fd)
            self.storage.remove(self.path)
        except OSError:
            pass  # the failure that led here is the one to report; what is left is swept later


class _Reader(FileReader):
    def __init__(self, storage: LocalStorage, path: str, fd: int, size: int) -> None:
        self.storage, self.path, self.fd, self.size = storage, path, fd, size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self.storage.doing(self.path, "reading"):
            _transfer(os.preadv, self.fd, offset, buffers)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def _sync_folder(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network filesystems have no fsync for folders; their renames are durable on their
        # own.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _lies_alike(offset: int, data: memoryview) -> bool:
    """Whether the pages of the memory are those of the file from byte `offset` on, and worth it."""
    if len(data) < DIRECT_BYTES or data.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) % PAGE == offset % PAGE


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    offset: int,
    buffers: Sequence[memoryview],
) -> None:
    """preadv or pwritev until all buffers are done: both may stop early, at a signal or a limit of
    the system."""
    rest = [b for b in buffers if len(b)]
    while rest:
        done = call(fd, rest[:IOV_MAX], offset)
        if done == 0:
            raise OSError(errno.EIO, "the file ends too early")
        offset += done
        first = 0
        while first < len(rest) and done >= len(rest[first]):
            done -= len(rest[first])
            first += 1
        rest = rest[first:]
        if done:
            rest[0] = rest[0][done:]
