"""What lies elsewhere than on a local disk: fetched for an import, and put there by an export."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from ..arguments import check_path
from ..errors import CheckpointExists, CheckpointNotFound, InvalidState, StorageError
from ..storage.base import Storage
from ..storage.local import LocalStorage
from ..storage.opening import open_storage
from ..storage.urls import join_url, local_path, masked_url, split_url

__all__ = ["Fetched", "Target", "check_free", "fetched", "made_locally", "opened_target"]

PORTION = 16 << 20  # bytes in memory at a time
FILES, LEVELS = 100_000, 4  # that a folder of another library has at most


@dataclass(frozen=True, slots=True)
class Fetched:
    """path: where it lies now; downloaded: what was fetched, in words; None where it was local."""

    path: Path
    downloaded: str | None = None


@contextmanager
def fetched(
    source: str | os.PathLike[str],
    options: dict[str, Any] | None,
    scratch: str | os.PathLike[str] | None,
    limit: int | None,
) -> Iterator[Fetched]:
    """A local path of what lies at `source`; what is remote is downloaded, and gone afterwards.

    limit: bytes that are downloaded at most; None: nine tenths of what is free in `scratch`.
    Raises CheckpointNotFound, InvalidState where it is more, StorageError.
    """
    url = check_path("source", source)
    local = local_path(url)
    if local is not None:
        yield Fetched(Path(local).expanduser())
        return
    storage, name, files = _files_at(url, options)
    total = sum(files.values())
    with tempfile.TemporaryDirectory(prefix="ckptcore-", dir=scratch) as folder:
        most = shutil.disk_usage(folder).free * 9 // 10 if limit is None else limit
        if total > most:
            raise InvalidState(
                f"{masked_url(url)} has {total:,} bytes, and at most {most:,} may be downloaded to "
                f"{folder}: give another scratch folder, or a higher limit"
            )
        target = Path(folder) / (name or "source")
        for relative, size in files.items():
            path = target / relative if relative else target
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                for data in portions(storage, join_url(name, relative) if name else relative, size):
                    file.write(data)
        count = f"{len(files)} files" if len(files) != 1 else "1 file"
        yield Fetched(target, f"{count}, {total:,} bytes, downloaded from {masked_url(url)}")


def _files_at(url: str, options: dict[str, Any] | None) -> tuple[Storage, str, dict[str, int]]:
    """The storage around, the last name of the URL, and sizes by the path below that; the path of
    a single file is empty."""
    around, name = split_url(url)
    storage = open_storage(around if name else url, options)
    if name:
        with suppress(StorageError), storage.open(name) as reader:
            return storage, name, {"": reader.size}
    found: dict[str, int] = {}
    todo = [("", 0)]
    while todo:
        folder, level = todo.pop()
        try:
            entries = storage.list(join_url(name, folder) if name else folder)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise CheckpointNotFound(f"{masked_url(url)}: nothing is there", path=url) from None
        for entry in entries:
            if Path(entry.name).name != entry.name or entry.name == "..":
                raise InvalidState(f"{masked_url(url)} holds {entry.name!r}, which is no file name")
            path = f"{folder}/{entry.name}".lstrip("/")
            if not entry.is_folder:
                found[path] = entry.size or 0
            elif level < LEVELS:
                todo.append((path, level + 1))
        if len(found) > FILES:
            raise InvalidState(f"{masked_url(url)} holds more than {FILES:,} files")
    return storage, name, found


def portions(storage: Storage, path: str, size: int) -> Iterator[memoryview]:
    """The bytes of a file, a portion at a time, in one buffer. Raises StorageError."""
    buffer = memoryview(bytearray(min(PORTION, size)))
    with storage.open(path) as reader:
        for start in range(0, size, PORTION):
            data = buffer[: min(PORTION, size - start)]
            reader.read_into(start, [data])
            yield data


def digest_of(storage: Storage, path: str, size: int) -> str:
    hasher = xxh3_128()
    for data in portions(storage, path, size):
        hasher.update(data)
    return hasher.hexdigest()


@dataclass(slots=True)
class Target:
    """A folder that an export fills. files: sizes by name of what was written and read back."""

    storage: Storage
    files: dict[str, int]

    def write(self, name: str, size: int, stream: Iterator[bytes | memoryview]) -> None:
        """Write a file of `size` bytes, a part at a time, and read it back. Raises StorageError
        where it is not what was written."""
        hasher, at = xxh3_128(), 0
        writer = self.storage.create(name, size)
        try:
            for data in stream:
                hasher.update(data)
                writer.write_at(at, [memoryview(data)])
                at += len(data)
            writer.close()
        except BaseException:
            writer.abort()
            raise
        self.files[name] = size
        if digest_of(self.storage, name, size) != hasher.hexdigest():
            raise StorageError(
                f"{self.storage.at(name)} does not read back as it was written", path=name
            )

    def put(self, path: Path) -> None:
        """Write what a local file holds, under its name."""
        size = path.stat().st_size
        self.write(path.name, size, portions(LocalStorage(path.parent), path.name, size))


def check_free(url: str, options: dict[str, Any] | None) -> None:
    """Raises CheckpointExists where a file, or a folder with anything in it, is there already."""
    local = local_path(url)
    if local is not None:
        path = Path(local).expanduser()
        there = path.is_file() or (path.is_dir() and any(path.iterdir()))
    else:
        try:
            there = bool(_files_at(url, options)[2])
        except CheckpointNotFound:
            there = False
    if there:
        raise CheckpointExists(f"{masked_url(url)} is there already, and not empty", path=url)


@contextmanager
def opened_target(url: str, options: dict[str, Any] | None) -> Iterator[Target]:
    """The folder `url`, to be filled: a local one is built beside and renamed when all of it is
    there; of a remote one what was written is removed again after an error."""
    local = local_path(url)
    if local is None:
        target = Target(open_storage(url, options), {})
        try:
            yield target
        except BaseException:
            with suppress(StorageError):
                target.storage.remove_all([*target.files])
            raise
        return
    path = Path(local).expanduser()
    building = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        building.mkdir(parents=True)
        yield Target(LocalStorage(building), {})
        if path.is_dir():
            path.rmdir()
        building.rename(path)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def made_locally(
    url: str, options: dict[str, Any] | None, scratch: str | os.PathLike[str] | None
) -> Iterator[Path]:
    """A local path where a file or a flat folder is made. It goes to `url` afterwards: by a rename,
    or uploaded and read back, a hidden file (which says what the others are) last."""
    around, name = split_url(url)
    local = local_path(url)
    if local is not None:
        scratch = Path(local).expanduser().parent
        scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".ckptcore-", dir=scratch) as folder:
        made = Path(folder) / name
        yield made
        if local is not None:
            target = Path(local).expanduser()
            if target.is_dir():
                target.rmdir()
            made.replace(target)
        elif made.is_file():
            Target(open_storage(around, options), {}).put(made)
        else:
            with opened_target(url, options) as into:
                for path in sorted(made.iterdir(), reverse=True):
                    into.put(path)
