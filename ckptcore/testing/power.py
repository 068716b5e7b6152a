"""A storage on a machine that can lose power: what nobody asked to be durable may be gone
afterwards.

    faults = FaultStorage(VolatileStorage(open_storage("/tmp/run")))
    faults.kill(at=20, how="raise")  # or in a forked child, with the default how="exit"
    with pytest.raises(Killed):
        CheckpointManager(faults).save(20, state)
    # What the machine finds when it starts again:
    CheckpointManager("/tmp/run").restore(state)

The rules are those that POSIX promises, and no more, whatever the file system below does beyond
them:

- the bytes of a file are durable when its `close` returned (that is where LocalStorage calls
fsync);
- a name that was created, renamed or removed is durable when `sync_folder` of the folder that holds
it returned. Until
  then each such change of a folder may survive or be undone, whatever becomes of the earlier and
  later ones; a rename survives or not as a whole.

Where folders cannot be renamed (object stores), a name is durable as soon as the call that made it
returned, and only files that were never closed are lost. The root folder itself is taken for
durable once it is there.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import StorageError
from ..storage.base import Entry, FileReader, FileWriter, Storage
from .killed import Killed

__all__ = ["Unsynced", "VolatileStorage"]


@dataclass(frozen=True, slots=True)
class Unsynced:
    """A change that is not durable: its number from 1 in the order of the calls, what it was
    ("create", "make_folder", "rename", "remove", "remove_folder", "link"; "data" for the bytes of
    a file that was not closed), and its path (the new one of a rename)."""

    number: int
    kind: str
    path: str


Survives = Callable[[Unsynced], bool]


@dataclass(slots=True, eq=False)
class _File:
    number: int = 0
    closed: bool = True
    kept: bytes | None = (
        None  # what a file held whose name is gone: the loss of power may bring it back
    )


@dataclass(slots=True, eq=False)
class _Folder:
    now: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Change:
    """One change of names: those that go and those that come. Of a rename between folders both
    folders have it."""

    what: Unsynced
    going: list[tuple[_Folder, str]]
    coming: list[tuple[_Folder, str, _File | _Folder]]

    def folders(self) -> list[_Folder]:
        both = [*(folder for folder, _ in self.going), *(folder for folder, _, _ in self.coming)]
        found = {id(folder): folder for folder in both}
        return list(found.values())

    def apply(self, folder: _Folder, table: dict[str, _File | _Folder]) -> None:
        for at, name in self.going:
            if at is folder:
                table.pop(name, None)
        for at, name, node in self.coming:
            if at is folder:
                table[name] = node

    def fits(self, folder: _Folder, table: dict[str, _File | _Folder]) -> bool:
        """What it takes away is there, and what it brings finds a free place or a file, which it
        replaces."""
        there = all(name in table for at, name in self.going if at is folder)
        return there and not any(
            isinstance(table.get(n), _Folder) for at, n, _ in self.coming if at is folder
        )


class VolatileStorage(Storage):
    """A storage that passes everything on to `inner`, and can take back what was not made durable.

    survives: which of the unsynced changes outlive the loss of power all the same; by default none.
    What is in `inner` at the start is durable. A FaultStorage around it calls `lose_power` when it
    kills. Calls are passed on one at a time. What is removed or replaced is kept in memory until it
    is durably gone, so this is for tests with small files.
    """

    def __init__(self, inner: Storage, survives: Survives = lambda change: False) -> None:
        self.inner = inner
        self.url = inner.url
        self.atomic_rename = inner.atomic_rename
        self.positional_writes = inner.positional_writes
        self.survives = survives
        self._lock = threading.RLock()
        self._dead = False
        self._count = 0
        self._root = _Folder()
        self._open: list[_Writer] = []
        if self.atomic_rename:
            self._fill(self._root, "")

    def _fill(self, folder: _Folder, path: str) -> None:
        try:
            entries = self.inner.list(path)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return
        for entry in entries:
            node: _File | _Folder = _Folder() if entry.is_folder else _File()
            folder.now[entry.name] = folder.durable[entry.name] = node
            if isinstance(node, _Folder):
                self._fill(node, f"{path}/{entry.name}" if path else entry.name)

    def lose_power(self) -> None:
        """Leave in `inner` what the machine finds when it starts again. Every later call here
        raises Killed."""
        with self._lock:
            if self._dead:
                return
            self._dead = True
            if self.atomic_rename:
                self._take_back()
            else:
                for writer in self._open:
                    writer.inner.abort()

    def unsynced(self) -> list[Unsynced]:
        """The changes of names that a loss of power now could undo, in the order in which they were
        made."""
        with self._lock:
            folders = [
                self._root,
                *(node for _, node in _walk(self._root.now) if isinstance(node, _Folder)),
            ]
            found = {
                change.what.number: change.what for folder in folders for change in folder.pending
            }
            return [found[number] for number in sorted(found)]

    def _take_back(self) -> None:
        chosen: dict[int, bool] = {}
        after = dict(_walk(self._survivors(self._root, chosen)))
        before = dict(_walk(self._root.now))
        where = {id(node): path for path, node in before.items()}
        stays = {
            path
            for path, node in after.items()
            if isinstance(node, _File) and node.closed and before.get(path) is node
        }
        contents = {
            path: self._content(path, node, where)
            for path, node in after.items()
            if isinstance(node, _File) and path not in stays
        }
        for writer in self._open:
            writer.release()
        for path in sorted(before, reverse=True):  # what is in a folder before the folder
            if isinstance(before[path], _File):
                if path not in stays:
                    self.inner.remove(path)
            elif not isinstance(after.get(path), _Folder):
                self.inner.remove_folder(path)
        for path, node in after.items():
            if isinstance(node, _Folder):
                self.inner.make_folder(path)
        for path, data in contents.items():
            self.inner.write(path, data)

    def _survivors(self, folder: _Folder, chosen: dict[int, bool]) -> dict[str, _File | _Folder]:
        """What is in a folder afterwards, with new nodes for the folders below it."""
        entries = dict(folder.durable)
        for change in folder.pending:
            if change.what.number not in chosen:
                chosen[change.what.number] = self.survives(change.what)
            if chosen[change.what.number] and change.fits(folder, entries):
                change.apply(folder, entries)
        return {
            name: _Folder(self._survivors(node, chosen)) if isinstance(node, _Folder) else node
            for name, node in entries.items()
        }

    def _content(self, path: str, node: _File, where: dict[int, str]) -> bytes:
        if not node.closed and not self.survives(Unsynced(node.number, "data", path)):
            return b""
        if node.kept is not None:
            return node.kept
        return self.inner.read(where[id(node)]) if id(node) in where else b""

    def _at(self, path: str) -> tuple[_Folder | None, str, _File | _Folder | None]:
        """The folder that a path lies in, its name there, and what has the name."""
        *above, name = path.split("/")
        folder: _File | _Folder | None = self._root
        for part in above:
            folder = folder.now.get(part) if isinstance(folder, _Folder) else None
        return (
            (folder, name, folder.now.get(name))
            if isinstance(folder, _Folder)
            else (None, name, None)
        )

    def _changed(
        self, kind: str, path: str, *, gone: str | None = None, new: _File | _Folder | None = None
    ) -> None:
        """Note that the name `gone` went, or became `path`; or that `new` came there."""
        going: list[tuple[_Folder, str]] = []
        coming: list[tuple[_Folder, str, _File | _Folder]] = []
        if gone is not None:
            folder, name, node = self._at(gone)
            if folder is not None and node is not None:
                going.append((folder, name))
                new = node if gone != path else None
        folder, name, _ = self._at(path)
        if folder is not None and new is not None:
            coming.append((folder, name, new))
        if self.atomic_rename and (going or coming):
            self._count += 1
            change = _Change(Unsynced(self._count, kind, path), going, coming)
            for each in change.folders():
                change.apply(each, each.now)
                each.pending.append(change)

    def _keep(self, path: str) -> None:
        """Remember what a file holds that is about to go."""
        node = self._at(path)[2]
        if isinstance(node, _File) and node.kept is None:
            node.kept = self.inner.read(path)

    @contextmanager
    def _alive(self) -> Iterator[None]:
        with self._lock:
            if self._dead:
                raise Killed
            yield

    def create(self, path: str, size: int) -> FileWriter:
        with self._alive():
            writer = _Writer(
                self, path, self.inner.create(path, size), _File(self._count + 1, closed=False)
            )
            self._changed("create", path, new=writer.node)
            self._open.append(writer)
            return writer

    def open(self, path: str) -> FileReader:
        with self._alive():
            return self.inner.open(path)

    def list(self, path: str = "") -> list[Entry]:
        with self._alive():
            return self.inner.list(path)

    def make_folder(self, path: str) -> None:
        with self._alive():
            self.inner.make_folder(path)
            parts = path.split("/") if path else []
            for above in ("/".join(parts[:depth]) for depth in range(1, len(parts) + 1)):
                if self._at(above)[2] is None:
                    self._changed("make_folder", above, new=_Folder())

    def sync_folder(self, path: str) -> None:
        with self._alive():
            self.inner.sync_folder(path)
            folder = self._at(path)[2] if path else self._root
            for change in list(folder.pending) if isinstance(folder, _Folder) else []:
                for each in change.folders():
                    change.apply(each, each.durable)
                    each.pending.remove(change)

    def identity(self, path: str) -> str | None:
        with self._alive():
            return self.inner.identity(path)

    def link(self, source: str, target: str, identity: str) -> bool:
        with self._alive():
            shared = self.inner.link(source, target, identity)
            if shared:
                self._changed("link", target, new=_File())
            return shared

    def rename(self, source: str, target: str) -> None:
        with self._alive():
            if source != target:
                self._keep(target)
            self.inner.rename(source, target)
            if source != target:
                self._changed("rename", target, gone=source)

    def remove(self, path: str) -> None:
        with self._alive():
            self._keep(path)
            self.inner.remove(path)
            self._changed("remove", path, gone=path)

    def remove_folder(self, path: str) -> None:
        with self._alive():
            self.inner.remove_folder(path)
            self._changed("remove_folder", path, gone=path)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()


class _Writer(FileWriter):
    def __init__(self, storage: VolatileStorage, path: str, inner: FileWriter, node: _File) -> None:
        self.storage, self.path, self.inner, self.node = storage, path, inner, node

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self.storage._alive():
            self.inner.write_at(offset, buffers)

    def close(self) -> None:
        with self.storage._alive():
            self.inner.close()
            self.node.closed = True
            self._done()

    def abort(self) -> None:
        with self.storage._alive():
            if self.node.closed:
                self.storage._keep(self.path)
            self.inner.abort()
            self.storage._changed("remove", self.path, gone=self.path)
            self._done()

    def release(self) -> None:
        """Give back what the system holds for a file that nobody will finish."""
        try:
            self.inner.close()
        except StorageError:
            pass

    def _done(self) -> None:
        self.storage._open = [writer for writer in self.storage._open if writer is not self]


def _walk(
    table: dict[str, _File | _Folder], above: str = ""
) -> Iterator[tuple[str, _File | _Folder]]:
    for name, node in table.items():
        yield above + name, node
        if isinstance(node, _Folder):
            yield from _walk(node.now, f"{above}{name}/")
