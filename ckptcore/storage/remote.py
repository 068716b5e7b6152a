"""Any other fsspec filesystem: objects that appear whole when they are complete, and no rename of
folders.

S3 has a class of its own (s3.py), which speaks to the filesystem's client directly. Here is what
fsspec offers for all:

* A small file is one `pipe_file`, tried again where that may help. A large one is written through
an open handle that is
  closed only when all is there: that is when object stores show it (`AbstractBufferedFile`). What
  fails in the middle of that is left to the retries of the filesystem's own client.
* Filesystems that rename (a folder, SFTP, SMB, HDFS) would show a file from its first byte on.
There the bytes go into
  `upload.<random>.partial` beside it, which is renamed when it is complete.
* A name that is taken is refused. Where the filesystem has no create-only put this is a question
before the write, so of
  two jobs that write one name at the same moment the later one wins; `create_only` says which it
  is.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ..errors import CheckpointError, StorageError
from .base import Entry, FileReader, FileWriter, Storage, failure
from .retry import RETRY_SECONDS, Retries, http_code
from .urls import masked_url, secrets_of

# Files up to this size are one request; requests of larger ones are of this size.
PIECE_BYTES = 8 << 20
# What makes a filesystem's pipe_file fail, whoever else writes, when the name is taken. All of
# these show an object when it is complete, also those that can move one.
_MODE, _ADLFS = {"mode": "create"}, {"overwrite": False}
CREATE_ONLY: dict[str, dict[str, Any]] = {
    "memory": _MODE,
    "gs": _MODE,
    "gcs": _MODE,
    "az": _ADLFS,
    "abfs": _ADLFS,
    "abfss": _ADLFS,
}


class FsspecStorage(Storage):
    """`url` is any fsspec URL; `options` go to the filesystem and appear in no message.

    One option is ours: `retry_deadline`, the seconds for which an operation that fails is tried
    again.
    """

    atomic_rename = False
    positional_writes = False

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._options = dict(options)
        seconds = self._options.pop("retry_deadline", RETRY_SECONDS)
        if not isinstance(seconds, int | float) or not seconds >= 0:
            raise StorageError(
                f"retry_deadline must be a number of seconds, not {seconds!r}", errno=errno.EINVAL
            )
        self._opened, self._pid = url, 0
        self.url = masked_url(url)
        self._retries = Retries(float(seconds))
        self._secrets = sorted(secrets_of(url, options), key=len, reverse=True)
        fs = self.fs
        real = _real(fs)
        protocols = (real.protocol,) if isinstance(real.protocol, str) else tuple(real.protocol)
        self._create = next((CREATE_ONLY[name] for name in protocols if name in CREATE_ONLY), None)
        self.create_only = self._create is not None
        # What moves by copying and deleting (fsspec's own `mv`) shows objects when they are
        # complete, too.
        self._renames = not self.create_only and type(real).mv is not AbstractFileSystem.mv
        self._in_memory = "memory" in protocols

    @property
    def fs(self) -> Any:
        """The filesystem: one per process, since connections and threads do not come along into a
        forked child."""
        if self._pid != os.getpid():
            try:
                self._fs, root = self._retries.run(self._connect)
            except (ImportError, ValueError, TypeError, KeyError) as error:
                why = self.scrubbed(str(error))
                raise StorageError(
                    f"{self.url}: no filesystem for this URL ({why})",
                    path=self.url,
                    errno=errno.EINVAL,
                ) from None
            except Exception as error:  # some clients log in at once
                with translating(self, "", "connecting"):
                    raise error from None
            scheme, mark, path = root.rpartition("://")  # HTTP keeps its own
            top = "/" if path.startswith("/") and not mark else ""
            self.root = scheme + mark + top + "/".join(part for part in path.split("/") if part)
            self._asking = threading.Lock()
            self._pid = os.getpid()
        return self._fs

    def _connect(self) -> tuple[Any, str]:
        # An instance of our own, without a cache of listings: another process may have changed what
        # is there.
        fs, root = fsspec.core.url_to_fs(
            self._opened, **{"skip_instance_cache": True, **self._options}
        )
        # Some keep listings in a dict of their own, which `_now` empties before each question.
        cache: Any = getattr(_real(fs), "dircache", None)
        if hasattr(cache, "use_listings_cache"):
            cache.use_listings_cache = False
        return fs, root

    @property
    def retries(self) -> int:  # type: ignore[override]
        return self._retries.count

    def scrubbed(self, text: str) -> str:
        """`text` without anything that was given as a credential."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _now(self, ask: str, path: str, **how: Any) -> Any:
        """An answer that is not from a cache, nor from one that another thread has filled
        meanwhile."""
        fs = self.fs
        with self._asking:
            fs.invalidate_cache()
            return getattr(fs, ask)(self._full(path), **how)

    def create(self, path: str, size: int) -> FileWriter:
        with translating(self, path, "creating the object"):
            try:
                self._retries.run(lambda: self._now("info", path))
            except FileNotFoundError:
                return _Writer(self, path, size)
            raise FileExistsError(errno.EEXIST, "it exists")

    def open(self, path: str) -> FileReader:
        with translating(self, path, "opening the object"):
            info = self._retries.run(lambda: self._now("info", path))
            if info["type"] != "file":
                raise StorageError(f"{self.at(path)} is not a file", path=path, errno=errno.EISDIR)
            return _Reader(self, path, int(info["size"]))

    def list(self, path: str = "") -> list[Entry]:
        full = self._full(path)
        with translating(self, path, "listing"):
            found = self._retries.run(lambda: self._now("ls", path, detail=True))
            entries = {}
            for item in found:
                name = item["name"].rstrip("/").rsplit("/", 1)[-1]
                if item["name"].strip("/") != full.strip("/"):
                    folder, size = item["type"] == "directory", self._size_of(item)
                    entries[name] = Entry(name, folder, size, version_in(item))
        return [entries[name] for name in sorted(entries)]

    def _size_of(self, item: dict[str, Any]) -> int | None:
        if item["type"] == "directory":
            return None
        if item["size"] is None:  # a page of links does not say
            item = self._retries.run(lambda: self.fs.info(item["name"]))
        return int(item["size"])

    def make_folder(self, path: str) -> None:
        with translating(self, path, "creating the folder"):
            self._retries.run(lambda: self.fs.makedirs(self._full(path), exist_ok=True))

    def sync_folder(self, path: str) -> None:
        pass  # an object that was put is there

    def rename(self, source: str, target: str) -> None:
        with translating(self, target, f"renaming {source}"):
            self._move(self._full(source), self._full(target))

    def _move(self, source: str, target: str) -> None:
        tries = 0

        def move() -> None:
            nonlocal tries
            tries += 1
            try:
                if self._renames:
                    self.fs.mv(source, target)
                else:  # not mv: it takes [, * and ? in names for patterns
                    self.fs.cp_file(source, target)
            except FileNotFoundError:
                if tries == 1 or not self.fs.exists(target):
                    raise  # else an earlier try was done, and its answer was lost

        self._retries.run(move)
        if not self._renames:
            self._remove(source)

    def remove(self, path: str) -> None:
        with translating(self, path, "removing the object"):
            self._remove(self._full(path))

    def _remove(self, full: str) -> None:
        def remove() -> None:
            with suppress(FileNotFoundError):
                self.fs.rm_file(full)

        self._retries.run(remove)

    def remove_folder(self, path: str) -> None:
        def remove() -> None:
            with suppress(FileNotFoundError):
                self._now("rmdir", path)

        with translating(self, path, "removing the folder"):
            self._retries.run(remove)


class _Writer(FileWriter):
    """Collects PIECE_BYTES, then opens a handle and passes everything on; what stays smaller is one
    request."""

    def __init__(self, storage: FsspecStorage, path: str, size: int) -> None:
        self.storage, self.path = storage, path
        self.final = storage._full(path)
        folder, _, _ = self.final.rpartition("/")
        self.full = (
            f"{folder}/upload.{secrets.token_hex(8)}.partial" if storage._renames else self.final
        )
        self.held = bytearray()
        self.whole = storage._in_memory or size <= PIECE_BYTES
        self.handle: Any = None
        self.touched = False  # something may be there that is to go again on abort

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with translating(self.storage, self.path, "writing"):
            for buffer in buffers:
                if self.whole:
                    self.held += buffer
                    continue
                if self.handle is None:
                    self.handle = self._handle()
                self.handle.write(buffer)

    def _handle(self) -> Any:
        fs = self.storage.fs
        self.touched = True
        if self.storage._renames:
            return fs.open(self.full, "wb")
        # Not committed on close: leaving an open file on an exception would publish what was
        # written so far.
        handle = fs.open(self.full, "wb", autocommit=False, block_size=PIECE_BYTES)
        _forget(getattr(handle, "fs", fs), handle)
        return handle

    def close(self) -> None:
        storage = self.storage
        with translating(storage, self.path, "completing the object"):
            if self.whole:
                self._put()
            elif self.handle is None:
                raise OSError(errno.EIO, "nothing was written")
            else:
                self.handle.close()
                if not storage._renames and hasattr(self.handle, "commit"):
                    self.handle.commit()
            if storage._renames:
                storage._move(self.full, self.final)
                self.full = self.final

    def _put(self) -> None:
        storage, data, tries = self.storage, bytes(self.held), 0

        def put() -> None:
            nonlocal tries
            tries += 1
            if storage._create is None:
                self.touched = True
                storage.fs.pipe_file(self.full, data)
                return
            try:
                storage.fs.pipe_file(self.full, data, **storage._create)
                self.touched = True
            except FileExistsError:
                # When an earlier try was done and its answer was lost, what is there is ours.
                if tries == 1 or storage.fs.cat_file(self.full) != data:
                    raise
                self.touched = True

        storage._retries.run(put)

    def abort(self) -> None:
        self.held = bytearray()
        handle, self.handle = self.handle, None
        if handle is not None and not handle.closed:
            with suppress(OSError, AttributeError, ValueError, RuntimeError):
                if isinstance(handle, AbstractBufferedFile):
                    # Nothing may flush or publish it when it is garbage-collected.
                    handle.closed = True
                if self.storage._renames:
                    handle.close()
                else:
                    handle.discard()
        if self.touched and not self.storage._retries.dead:
            with (
                suppress(OSError),
                translating(self.storage, self.path, "removing what was written of"),
            ):
                self.storage._remove(self.full)


class _Reader(FileReader):
    def __init__(self, storage: FsspecStorage, path: str, size: int) -> None:
        self.storage, self.path, self.size = storage, path, size
        self.full = storage._full(path)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        need = sum(len(b) for b in buffers)
        targets = iter([b.cast("B") for b in buffers if len(b)])
        with translating(self.storage, self.path, "reading"):
            if offset + need > self.size:
                raise OSError(errno.EIO, "the object ends too early")
            at, end = offset, offset + need
            target = next(targets, memoryview(b""))
            while at < end:
                data = self._fetch(at, min(end, at + PIECE_BYTES))
                at += len(data)
                while data:
                    taken = min(len(data), len(target))
                    target[:taken] = data[:taken]
                    data, target = data[taken:], target[taken:]
                    if not target:
                        target = next(targets, target)

    def _fetch(self, start: int, stop: int) -> memoryview:
        """Bytes from `start` on, at least one; the client may give fewer than asked for when a
        connection breaks."""

        def fetch() -> memoryview:
            data = memoryview(self.storage.fs.cat_file(self.full, start=start, end=stop))
            if len(data) == self.size > stop - start:  # a server that knows no ranges sends all
                data = data[start:stop]
            if not data or len(data) > stop - start:
                raise ConnectionError(f"{len(data)} bytes came, {stop - start} were asked for")
            return data

        return self.storage._retries.run(fetch)

    def close(self) -> None:
        pass


def _real(fs: Any) -> Any:
    while isinstance(fs, DirFileSystem):
        fs = fs.fs
    return fs


def _forget(fs: Any, handle: Any) -> None:
    """fsspec notes a file that is not committed on close for the end of a transaction. Ours end
    none, so that every file ever written, and in memory:// its bytes, would be held for as long as
    the process lives."""
    while True:
        try:
            fs.transaction.files.remove(handle)
        except ValueError:  # it is not there (any more)
            return
        except IndexError:  # another thread has noted or forgotten a file meanwhile
            pass


# What clients raise without saying an errno.
_NUMBERS = (
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (PermissionError, errno.EACCES),
    (IsADirectoryError, errno.EISDIR),
    (NotADirectoryError, errno.ENOTDIR),
    (TimeoutError, errno.ETIMEDOUT),
    (ConnectionError, errno.ECONNRESET),
)
# Of the network or the service, not of the bytes: EIO would say that what is stored there is
# damaged.
_REMOTE = getattr(errno, "EREMOTEIO", errno.ECONNABORTED)


def version_in(item: dict[str, Any]) -> str | None:
    """What tells one content of a file from the next one, of what a listing says of it. A time in
    whole seconds does not."""
    tags = [str(item[key]) for key in ("ETag", "etag", "generation") if item.get(key)]
    made = item.get("created")
    return " ".join(tags) or (repr(made) if isinstance(made, float) else None)


@contextmanager
def translating(storage: FsspecStorage, path: str, doing: str) -> Iterator[None]:
    """Turn whatever a client raises into the StorageError that says what was done to which path."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        plain = isinstance(error, OSError)
        number = error.errno if isinstance(error, OSError) else None
        number = number or next((n for kind, n in _NUMBERS if isinstance(error, kind)), _REMOTE)
        status, code = http_code(error)
        if status == 507:
            number = errno.ENOSPC
        elif status is not None and number == errno.EIO:
            number = _REMOTE
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        parts = [why if plain and why else f"{type(error).__name__}: {why}".rstrip(": ")]
        if (code or status) and str(code or status) not in why:
            parts.append(f"({code or status})")
        notes = getattr(error, "__notes__", ())
        parts += [f"({note})" for note in notes if note.startswith("given up")]
        text = storage.scrubbed(" ".join(parts))
        # With a secret in it, it is no cause to be shown either.
        shown = storage.scrubbed(f"{error} {error.__cause__}") == f"{error} {error.__cause__}"
        plainly = OSError(number, text)
        plainly.__cause__ = error if shown else None
        raise failure(storage, path, doing, plainly) from plainly
