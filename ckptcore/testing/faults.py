"""A storage that fails on demand: count, delay, block, raise at or die in the k-th operation, and enforce a quota.

    faults = FaultStorage(open_storage("/tmp/run"))
    faults.fail(at=3, kind="write_at", path="*.safetensors", error=errno.EIO)
    with CheckpointManager(faults) as ckpt, pytest.raises(StorageError):
        ckpt.save(10, state)
    assert not [entry.name for entry in faults.inner.list()]

To kill a process in every operation of a save in turn, count them once and fork a child for each:

    for k in range(1, count + 1):
        pid = os.fork()
        if pid == 0:
            faults = FaultStorage(open_storage(root))
            faults.kill(at=k)
            CheckpointManager(faults).save(20, state)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == KILLED_EXIT_CODE

The kinds of operation are those of Storage (create, open, list, make_folder, sync_folder, rename, remove,
remove_folder), of the files it makes (write_at, close, abort) and reads (read_into). `close` is where a local file is
synced and a remote object appears.
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

__all__ = ["KILLED_EXIT_CODE", "OPERATIONS", "WRITE_OPERATIONS", "FaultStorage", "Gate", "Killed", "Operation"]

KILLED_EXIT_CODE = 137  # what a shell reports of a process that SIGKILL ended

OPERATIONS = (
    "abort", "close", "create", "list", "make_folder", "open", "read_into", "remove", "remove_folder", "rename",
    "sync_folder", "write_at",
)  # fmt: skip
# Those that can change what is stored.
WRITE_OPERATIONS = tuple(kind for kind in OPERATIONS if kind not in ("list", "open", "read_into", "abort"))


class Killed(BaseException):
    """Stands for the death of the process where a real one cannot be had (storage that lives in this process).

    Not an Exception, so that no error handling of the code under test takes it for a failure it can deal with; every
    later operation of the same FaultStorage raises it too, because a dead process cleans nothing up.
    """


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation as it was asked for: its number from 1, its kind, its path (the new one for `rename`)."""

    number: int
    kind: str
    path: str


class Gate:
    """Where an operation waits until the test opens it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()

    def wait_reached(self, timeout: float = 60) -> None:
        """Return when an operation waits here. Raises TimeoutError."""
        if not self._reached.wait(timeout):
            raise TimeoutError(f"no operation reached the gate within {timeout} s")

    def open(self) -> None:
        """Let the operation go on, and every later one."""
        self._opened.set()

    def _pass(self) -> None:
        self._reached.set()
        self._opened.wait()


@dataclass(slots=True)
class _Rule:
    """What to do from the `at`-th matching operation on, `times` times (None: for ever)."""

    act: Callable[[Operation], None]
    at: int
    kinds: tuple[str, ...]
    path: str
    times: int | None
    after: bool
    seen: int = 0

    def takes(self, operation: Operation) -> bool:
        if operation.kind not in self.kinds or not fnmatchcase(operation.path, self.path):
            return False
        self.seen += 1
        return self.seen >= self.at and (self.times is None or self.seen < self.at + self.times)


class FaultStorage(Storage):
    """A storage that passes everything on to `inner`, counts it, and fails where it was told to.

    quota: the bytes that all files below the root may take together; what goes beyond raises NoSpace, with `free`.
    `log` lists the operations in the order in which they were asked for. Rules are checked in the order in which they
    were made; each of `fail`, `kill`, `block` and `delay` counts the operations that match its `kind` (one name, or a
    tuple of them; None: all) and `path` (a shell pattern over the whole path below the root, where `*` matches `/`
    too), and acts at the `at`-th of them, before it takes effect.
    """

    def __init__(self, inner: Storage, *, quota: int | None = None) -> None:
        self.inner = inner
        self.url = inner.url
        self.atomic_rename = inner.atomic_rename
        self.positional_writes = inner.positional_writes
        self.log: list[Operation] = []
        self.quota = quota
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._dead = False
        self._sizes: dict[str, int] = {} if quota is None else dict(_file_sizes(inner, ""))

    def count(self, kind: str | tuple[str, ...] | None = None, path: str = "*") -> int:
        """How many operations of that kind and path there were so far."""
        kinds = _kinds(kind)
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
        """Raise at the `at`-th matching operation, and at the ones after it up to `times` (None: at all of them).

        error: an errno, raised as the StorageError (or NoSpace) that a storage makes of it, or the error itself.
        after: the operation takes effect and still fails, like a request whose answer was lost. `abort`, which
        never raises, does not count.
        """

        def act(operation: Operation) -> None:
            raise self._error(operation, error) if isinstance(error, int) else error

        kinds = tuple(k for k in _kinds(kind) if k != "abort")
        self._rules.append(_Rule(act, at, kinds, path, times, after))

    def kill(
        self,
        at: int = 1,
        *,
        how: Literal["exit", "raise"] = "exit",
        kind: str | tuple[str, ...] | None = None,
        path: str = "*",
    ) -> None:
        """End the process at the `at`-th matching operation: at once, without cleaning up, with KILLED_EXIT_CODE.

        how="raise" raises `Killed` instead, there and in every later operation of this object.
        """

        def act(_: Operation) -> None:
            if how == "exit":
                os._exit(KILLED_EXIT_CODE)
            self._dead = True
            raise Killed

        self._rules.append(_Rule(act, at, _kinds(kind), path, None, False))

    def block(self, at: int = 1, *, kind: str | tuple[str, ...] | None = None, path: str = "*") -> Gate:
        """Make the `at`-th matching operation, and all after it, wait until the returned gate is opened."""
        gate = Gate()
        self._rules.append(_Rule(lambda _: gate._pass(), at, _kinds(kind), path, None, False))
        return gate

    def delay(self, seconds: float, at: int = 1, *, kind: str | tuple[str, ...] | None = None, path: str = "*") -> None:
        """Make the `at`-th matching operation, and all after it, take `seconds` longer."""
        self._rules.append(_Rule(lambda _: time.sleep(seconds), at, _kinds(kind), path, None, False))

    def clear(self) -> None:
        """Forget all rules; the log and the quota stay."""
        with self._lock:
            self._rules.clear()

    def used_bytes(self) -> int:
        """Bytes of all files below the root, as far as the quota counts them (0 without a quota)."""
        with self._lock:
            return sum(self._sizes.values())

    @contextmanager
    def _operation(self, kind: str, path: str) -> Iterator[None]:
        with self._lock:
            if self._dead:
                raise Killed
            operation = Operation(len(self.log) + 1, kind, path)
            self.log.append(operation)
            due = [rule for rule in self._rules if rule.takes(operation)]
        for rule in due:
            if not rule.after:
                rule.act(operation)
        yield
        for rule in due:
            if rule.after:
                rule.act(operation)

    def _error(self, operation: Operation, number: int) -> StorageError:
        what = f"{self.at(operation.path)}: {operation.kind} failed: {os.strerror(number)} (made by FaultStorage)"
        if number in FULL:
            return NoSpace(what, path=operation.path, errno=number, free=self.free_bytes())
        return StorageError(what, path=operation.path, errno=number)

    def _take(self, path: str, end: int) -> None:
        """Count a file as `end` bytes long. Raises NoSpace when that is more than the quota allows."""
        if self.quota is None:
            return
        with self._lock:
            before = self._sizes.get(path, 0)
            free = self.quota - sum(self._sizes.values())
            if end - before > free:
                what = f"{self.at(path)}: writing failed: the quota of {self.quota:,} bytes is used up"
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
        with self._operation("list", path):
            return self.inner.list(path)

    def make_folder(self, path: str) -> None:
        with self._operation("make_folder", path):
            self.inner.make_folder(path)

    def sync_folder(self, path: str) -> None:
        with self._operation("sync_folder", path):
            self.inner.sync_folder(path)

    def rename(self, source: str, target: str) -> None:
        with self._operation("rename", target):
            self.inner.rename(source, target)
            self._moved(source, target)

    def remove(self, path: str) -> None:
        with self._operation("remove", path):
            self.inner.remove(path)
            self._gone(path)

    def remove_folder(self, path: str) -> None:
        with self._operation("remove_folder", path):
            self.inner.remove_folder(path)

    def free_bytes(self) -> int | None:
        if self.quota is None:
            return self.inner.free_bytes()
        with self._lock:
            return max(0, self.quota - sum(self._sizes.values()))


class _Writer(FileWriter):
    def __init__(self, storage: FaultStorage, path: str, inner: FileWriter) -> None:
        self.storage, self.path, self.inner = storage, path, inner

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self.storage._operation("write_at", self.path):
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


def _kinds(kind: str | tuple[str, ...] | None) -> tuple[str, ...]:
    kinds = OPERATIONS if kind is None else (kind,) if isinstance(kind, str) else kind
    if unknown := [name for name in kinds if name not in OPERATIONS]:
        raise ValueError(f"no operation of a storage is named {unknown[0]!r}; there are {', '.join(OPERATIONS)}")
    return kinds


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
