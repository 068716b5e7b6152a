"""A storage that fails on demand: it counts, delays, blocks, raises, cuts, lies or dies in the k-th
operation.

    faults = FaultStorage(open_storage("/tmp/run"))
    faults.fail(kind="write_at", path="*.safetensors", error=errno.EIO)
    with CheckpointManager(faults) as ckpt, pytest.raises(StorageError):
        ckpt.save(10, state)
    assert not [entry.name for entry in faults.inner.list()]

What can go wrong, and how to have it:

    faults.fail(at=3)                        an error in the third operation; times=None: in all
    from there on faults.fail(at=3, after=True)            it is done and reported as failed, like a
    request whose answer was lost faults.short(at=2, keep=0.5)             a write that takes effect
    by half and fails; error=None: nobody is told faults.delay(0.1, kind="list")           slow
    operations gate = faults.block(kind="close")        one that waits until gate.open()
    faults.stale(by=10)                      listings as they were ten operations ago
    FaultStorage(storage, quota=1 << 20)     a disk of one MiB faults.kill(at=40)
    the process ends; over a VolatileStorage (see power.py), the machine does

To kill a process in every operation of a save in turn, count them once and fork a child for each.
With the VolatileStorage, every file and name that nobody made durable is lost as well:

    faults = FaultStorage(open_storage("/tmp/counted"))
    CheckpointManager(faults).save(20, state)
    for k in range(1, faults.count() + 1):
        root = f"/tmp/killed-{k}"
        CheckpointManager(root).save(10, state)
        pid = os.fork()
        if pid == 0:
            faults = FaultStorage(VolatileStorage(open_storage(root)))
            faults.kill(at=k)
            CheckpointManager(faults).save(20, state)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (KILLED_EXIT_CODE, 0)
        assert CheckpointManager(root).restore(state).step in (10, 20)

The kinds of operation are those of Storage (create, open, list, make_folder, sync_folder, rename,
remove, remove_folder, link), of the files it makes (write_at, close, abort) and reads (read_into).
`close` is where a local file is synced and a remote object appears.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ..errors import NoSpace, StorageError
from ..storage.base import FULL, Entry, FileReader, FileWriter, Storage
from .killed import KILLED_EXIT_CODE, Killed
from .power import VolatileStorage
from .rules import OPERATIONS, WRITE_OPERATIONS, Gate, Operation, Rule, kinds_of
from .stale import ListingHistory

__all__ = [
    "KILLED_EXIT_CODE",
    "OPERATIONS",
    "WRITE_OPERATIONS",
    "FaultStorage",
    "Gate",
    "Killed",
    "Operation",
]


@dataclass(frozen=True, slots=True)
class _Asked:
    """An operation under way; keep: the fraction of its bytes that a short write takes."""

    operation: Operation
    keep: float | None


class FaultStorage(Storage):
    """A storage that passes everything on to `inner`, counts it, and fails where it was told to.

    quota: the bytes that all files below the root may take together; what goes beyond raises
    NoSpace, with `free`. `log` lists the operations in the order in which they were asked for.
    Rules are checked in the order in which they were made; each of `fail`, `short`, `kill`, `block`
    and `delay` counts the operations that match its `kind` (one name, or a tuple of them; None:
    all) and `path` (a shell pattern over the whole path below the root, where `*` matches `/` too),
    and acts at the `at`-th of them, before it takes effect.
    """

    def __init__(self, inner: Storage, *, quota: int | None = None) -> None:
        self.inner = inner
        self.url = inner.url
        self.atomic_rename = inner.atomic_rename
        self.positional_writes = inner.positional_writes
        self.create_only = inner.create_only
        self.hard_links = inner.hard_links
        self.request_bytes = inner.request_bytes
        self.log: list[Operation] = []
        self.quota = quota
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._dead = False
        self._history: ListingHistory | None = None
        self._stale: Callable[[Operation], list[Entry] | None] = lambda _: None
        self._sizes: dict[str, int] = {} if quota is None else dict(_file_sizes(inner, ""))

    def count(self, kind: str | tuple[str, ...] | None = None, path: str = "*") -> int:
        """How many operations of that kind and path there were so far."""
        kinds = kinds_of(kind)
        with self._lock:
            return sum(op.kind in kinds and fnmatchcase(op.path, path) for op in self.log)

    def fail(
        self,
        at: int = 1,
        *,
        error: int | Exception = errno.EIO,
        kind: str | tuple[str, ...] | None = None,
        path: str = "*",
        times: int | None = 1,
        after: bool = False,
    ) -> None:
        """Raise at the `at`-th matching operation, and at the ones after it up to `times` (None: at
        all of them).

        error: an errno, raised as the StorageError (or NoSpace) that a storage makes of it, or the
        error itself.
        after: the operation takes effect and still fails, like a request whose answer was lost.
        `abort`, which never raises, does not count.
        """

        def act(operation: Operation) -> None:
            raise self._error(operation, error) if isinstance(error, int) else error

        kinds = tuple(k for k in kinds_of(kind) if k != "abort")
        self._rules.append(Rule(act, at, kinds, path, times, after))

    def short(
        self,
        at: int = 1,
        *,
        keep: float = 0.5,
        error: int | Exception | None = errno.EIO,
        path: str = "*",
        times: int | None = 1,
    ) -> None:
        """Let the `at`-th matching `write_at` write only the fraction `keep` of its bytes, and then
        raise `error`.

        error=None: it claims that all is well, and the rest of the bytes is missing (or zeros, when
        later parts of the file follow).
        """

        def act(operation: Operation) -> None:
            if error is not None:
                raise self._error(operation, error) if isinstance(error, int) else error

        self._rules.append(Rule(act, at, ("write_at",), path, times, True, keep))

    def stale(
        self,
        by: int,
        at: int = 1,
        *,
        hide_new: bool = True,
        show_removed: bool = True,
        path: str = "*",
        times: int | None = None,
    ) -> None:
        """Answer `list` from the `at`-th matching one on as it was `by` operations (of any kind)
        ago.

        hide_new: names that came since are missing (also those of files replaced, with their old
        sizes, when show_removed is given too). show_removed: names that went since are still there.
        What was changed before this call, or by others than this object, is always seen as it is.
        """
        rule = Rule(lambda _: None, at, ("list",), path, times, False)
        self._history = history = ListingHistory(self.inner)

        def answer(operation: Operation) -> list[Entry] | None:
            with self._lock:
                if not rule.takes(operation):
                    return None
            number = operation.number - by
            return history.listing(
                operation.path, number, hide_new=hide_new, show_removed=show_removed
            )

        self._stale = answer

    def kill(
        self,
        at: int = 1,
        *,
        how: Literal["exit", "raise"] = "exit",
        kind: str | tuple[str, ...] | None = None,
        path: str = "*",
    ) -> None:
        """End the process at the `at`-th matching operation: at once, without cleaning up, with
        KILLED_EXIT_CODE.

        how="raise" raises `Killed` instead, there and in every later operation of this object. When
        `inner` is a VolatileStorage, the machine loses power: what was not made durable is lost.
        """

        def act(_: Operation) -> None:
            if isinstance(self.inner, VolatileStorage):
                self.inner.lose_power()
            if how == "exit":
                os._exit(KILLED_EXIT_CODE)
            self._dead = True
            raise Killed

        self._rules.append(Rule(act, at, kinds_of(kind), path, None, False))

    def block(
        self, at: int = 1, *, kind: str | tuple[str, ...] | None = None, path: str = "*"
    ) -> Gate:
        """Make the `at`-th matching operation, and all after it, wait until the returned gate is
        opened."""
        gate = Gate()
        self._rules.append(Rule(lambda _: gate._pass(), at, kinds_of(kind), path, None, False))
        return gate

    def delay(
        self,
        seconds: float,
        at: int = 1,
        *,
        kind: str | tuple[str, ...] | None = None,
        path: str = "*",
    ) -> None:
        """Make the `at`-th matching operation, and all after it, take `seconds` longer."""
        self._rules.append(
            Rule(lambda _: time.sleep(seconds), at, kinds_of(kind), path, None, False)
        )

    def clear(self) -> None:
        """Forget all rules; the log and the quota stay."""
        with self._lock:
            self._rules.clear()
            self._stale = lambda _: None

    def used_bytes(self) -> int:
        """Bytes of all files below the root, as far as the quota counts them (0 without a
        quota)."""
        with self._lock:
            return sum(self._sizes.values())

    @contextmanager
    def _operation(self, kind: str, path: str, source: str | None = None) -> Iterator[_Asked]:
        with self._lock:
            if self._dead:
                raise Killed
            operation = Operation(len(self.log) + 1, kind, path)
            self.log.append(operation)
            due = [rule for rule in self._rules if rule.takes(operation)]
        for rule in due:
            if not rule.after:
                rule.act(operation)
        if self._history is not None and kind in (*WRITE_OPERATIONS, "abort"):
            for changed in (path, source):
                if changed is not None:
                    self._history.note(operation.number, changed)
        yield _Asked(
            operation, min((rule.keep for rule in due if rule.keep is not None), default=None)
        )
        for rule in due:
            if rule.after:
                rule.act(operation)

    def _error(self, operation: Operation, number: int) -> StorageError:
        what = (
            f"{self.at(operation.path)}: {operation.kind} failed: {os.strerror(number)} (made by "
            "FaultStorage)"
        )
        if number in FULL:
            return NoSpace(what, path=operation.path, errno=number, free=self.free_bytes())
        return StorageError(what, path=operation.path, errno=number)

    def _take(self, path: str, end: int) -> None:
        """Count a file as `end` bytes long. Raises NoSpace when that is more than the quota
        allows."""
        if self.quota is None:
            return
        with self._lock:
            before = self._sizes.get(path, 0)
            free = self.quota - sum(self._sizes.values())
            if end - before > free:
                what = (
                    f"{self.at(path)}: writing failed: the quota of {self.quota:,} bytes is used up"
                )
                raise NoSpace(what, path=path, free=max(0, free))
            self._sizes[path] = max(before, end)

    def _gone(self, path: str) -> None:
        with self._lock:
            self._sizes.pop(path, None)

    def _moved(self, source: str, target: str) -> None:
        with self._lock:
            for path in [p for p in self._sizes if p == source or p.startswith(f"{source}/")]:
                self._sizes[target + path[len(source) :]] = self._sizes.pop(path)

    def create(self, path: str, size: int) -> FileWriter:
        with self._operation("create", path):
            return _Writer(self, path, self.inner.create(path, size))

    def open(self, path: str) -> FileReader:
        with self._operation("open", path):
            return _Reader(self, path, self.inner.open(path))

    def list(self, path: str = "") -> list[Entry]:
        with self._operation("list", path) as asked:
            old = self._stale(asked.operation)
            return self.inner.list(path) if old is None else old

    def make_folder(self, path: str) -> None:
        with self._operation("make_folder", path):
            self.inner.make_folder(path)

    def sync_folder(self, path: str) -> None:
        with self._operation("sync_folder", path):
            self.inner.sync_folder(path)

    def identity(self, path: str) -> str | None:
        return self.inner.identity(path)

    def link(self, source: str, target: str, identity: str) -> bool:
        with self._operation("link", target):
            return self.inner.link(source, target, identity)

    def rename(self, source: str, target: str) -> None:
        with self._operation("rename", target, source):
            self.inner.rename(source, target)
            self._moved(source, target)

    def remove(self, path: str) -> None:
        with self._operation("remove", path):
            self.inner.remove(path)
            self._gone(path)

    def remove_folder(self, path: str) -> None:
        with self._operation("remove_folder", path):
            self.inner.remove_folder(path)

    def drop_uploads(self, path: str) -> None:
        with self._operation("drop_uploads", path):
            self.inner.drop_uploads(path)

    def free_bytes(self) -> int | None:
        if self.quota is None:
            return self.inner.free_bytes()
        with self._lock:
            return max(0, self.quota - sum(self._sizes.values()))


class _Writer(FileWriter):
    def __init__(self, storage: FaultStorage, path: str, inner: FileWriter) -> None:
        self.storage, self.path, self.inner = storage, path, inner

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self.storage._operation("write_at", self.path) as asked:
            if asked.keep is not None:
                buffers = _beginning(buffers, int(sum(b.nbytes for b in buffers) * asked.keep))
            self.storage._take(self.path, offset + sum(b.nbytes for b in buffers))
            self.inner.write_at(offset, buffers)

    def close(self) -> None:
        with self.storage._operation("close", self.path):
            self.inner.close()

    def abort(self) -> None:
        with self.storage._operation("abort", self.path):
            self.inner.abort()
            self.storage._gone(self.path)


class _Reader(FileReader):
    def __init__(self, storage: FaultStorage, path: str, inner: FileReader) -> None:
        self.storage, self.path, self.inner = storage, path, inner
        self.size = inner.size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self.storage._operation("read_into", self.path):
            self.inner.read_into(offset, buffers)

    def close(self) -> None:
        self.inner.close()


def _beginning(buffers: Sequence[memoryview], length: int) -> list[memoryview]:
    result = []
    for buffer in buffers:
        result.append(buffer.cast("B")[:length])
        length -= len(result[-1])
    return result


def _file_sizes(storage: Storage, folder: str) -> Iterator[tuple[str, int]]:
    try:
        entries = storage.list(folder)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return
    for entry in entries:
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_folder:
            yield from _file_sizes(storage, path)
        else:
            yield path, entry.size or 0
