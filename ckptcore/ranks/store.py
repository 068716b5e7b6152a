"""The blackboard on a torch.distributed store, and the communicator of the running job."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import CoordinationError
from .board import Board, BoardLost
from .communicator import Communicator, SingleProcess
from .rounds import BoardCommunicator

T = TypeVar("T")
_created = itertools.count()


# How long a call waits for a connection that is being made anew. Longer waits are for `patience`.
RECONNECT_SECONDS = 2.0
# How long closing waits for the threads of connections.
CLOSE_SECONDS = 1.0
# A store logs a warning when a wait times out. This one never does: who no longer wants the answer
# leaves the connection to its thread.
ENDLESS = timedelta(days=7)


class _Call(Generic[T]):
    """One call and its answer, which nobody else can get."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        self.work, self.dropped = work, False
        self._answer: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def do(self, store: Any) -> None:
        self._answer.put((self.work(store), None))

    def fail(self, error: Exception) -> None:
        self._answer.put((None, error))

    def result(self, seconds: float) -> T:
        """Raises queue.Empty after `seconds`, and BoardLost."""
        value, error = self._answer.get(timeout=seconds)
        if error is not None:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BoardLost(text) from error
        return cast(T, value)


class _Connection:
    """A connection to the store, and the one thread that uses it: nobody else gets hold of it.

    connect: makes it, in that thread. first: whether there was none before.
    """

    def __init__(self, connect: Callable[[], Any], *, first: bool = True) -> None:
        self.connect, self.answers, self.lost = connect, first, False
        self.calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        try:
            self.thread = threading.Thread(target=self._serve, name="ckptcore-store", daemon=True)
            self.thread.start()
        except RuntimeError as error:  # no thread can be started at the end of a program
            raise BoardLost(str(error)) from None

    def ask(self, work: Callable[[Any], T]) -> _Call[T]:
        call = _Call(work)
        self.calls.put(call)
        return call

    def close(self) -> None:
        self.calls.put(None)

    def join(self, seconds: float) -> None:
        """Wait for its thread to end, which may be stuck."""
        if self.thread is not threading.current_thread():
            self.thread.join(max(0.0, seconds))

    def _serve(self) -> None:
        store: Any = None
        while (call := self.calls.get()) is not None:
            if call.dropped:
                continue
            try:
                if self.lost:
                    raise ConnectionError("the connection is lost")
                store = self.connect() if store is None else store
                call.do(store)
                self.answers = True
            except Exception as error:  # DistStoreError, DistNetworkError and their kin
                self.lost = True
                call.fail(error)


@dataclass(frozen=True, slots=True)
class _Wait:
    """Keys that a thread waits for, and the connection that is busy with it."""

    keys: list[str]
    connection: _Connection
    call: _Call[list[bytes]]


class StoreBoard(Board):
    """Keys under `prefix` in a store.

    store: a connection of our own, which is only cloned. One clone serves the short calls of all
    threads, in their order, and each thread that waits has one to itself meanwhile.
    patience: seconds that a short call may take. A store that has not answered for that long is
    connected to anew, so that it is found again when it answers again.
    """

    def __init__(self, store: Any, prefix: str, patience: float) -> None:
        self.store, self.prefix, self.patience = store, prefix, patience
        self._lock = threading.RLock()
        self._talking: _Connection | None = None
        self._idle: list[_Connection] = []  # that threads have waited on
        self._waits: dict[int, _Wait] = {}  # by thread: those that it has come back from

    def _connected(self) -> _Connection:
        with self._lock:
            found = self._talking
            if found is None or found.lost:
                if found is not None:
                    found.close()
                found = self._talking = _Connection(self.store.clone, first=found is None)
            return found

    def _do(self, work: Callable[[Any], T]) -> T:
        """Make a call that may never come back (a host that is stopped, not dead), and wait for it
        no longer than `patience`. The connection is not used again then, and its thread, a daemon,
        may be stuck."""
        connection = self._connected()
        seconds = self.patience if connection.answers else min(self.patience, RECONNECT_SECONDS)
        call = connection.ask(work)
        try:
            return call.result(seconds)
        except queue.Empty:
            call.dropped = True
            connection.lost = connection.answers  # else it is still being made
            raise BoardLost(f"no answer for {seconds:g} s") from None

    def _send(self, work: Callable[[Any], Any]) -> None:
        with suppress(BoardLost):
            self._connected().ask(work)

    def put(self, key: str, value: bytes) -> None:
        self.put_all([key], value)

    def put_all(self, keys: Sequence[str], value: bytes) -> None:
        if not keys:
            return
        full = [f"{self.prefix}/{key}" for key in keys]
        # A store does not say that it has set a value; the answer to the next question does.
        self._do(lambda store: ([store.set(key, value) for key in full], store.check(full)))

    def get(self, key: str) -> bytes | None:
        full = f"{self.prefix}/{key}"
        return self._do(lambda store: bytes(store.get(full)) if store.check([full]) else None)

    def post(self, key: str, value: bytes) -> None:
        full = f"{self.prefix}/{key}"
        self._send(lambda store: store.set(full, value))

    def offer(self, key: str, value: bytes) -> None:
        full = f"{self.prefix}/{key}"
        self._send(lambda store: store.compare_set(full, "", value))

    def delete(self, keys: Sequence[str]) -> None:
        full = [f"{self.prefix}/{key}" for key in keys]
        self._send(lambda store: [store.delete_key(key) for key in full])

    def wait(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        if seconds <= 0 or not keys:
            found = [self.get(key) for key in keys]
            return [value for value in found if value is not None] if None not in found else None
        thread, full = threading.get_ident(), [f"{self.prefix}/{key}" for key in keys]
        wait = self._waits.pop(thread, None)
        if wait is not None and wait.keys != full:
            wait.connection.close()  # for ever: it may still be busy
            wait = None
        if wait is None:
            with self._lock:
                free = self._idle.pop() if self._idle else _Connection(self.store.clone)
            wait = _Wait(full, free, free.ask(lambda store: _values(store, full)))
        try:
            values = wait.call.result(seconds)
        except queue.Empty:
            self._waits[thread] = wait
            return None
        except BaseException:
            wait.connection.close()
            raise
        self._idle.append(wait.connection)
        return values

    def give_up(self, keys: Sequence[str]) -> None:
        # A thread that is waiting still, when the interpreter ends, can crash it.
        for key in keys:
            self.offer(key, b"")

    def close(self) -> None:
        with self._lock:
            waits = [self._waits.popitem()[1] for _ in range(len(self._waits))]
            found = [self._talking, *self._idle, *(wait.connection for wait in waits)]
            self._talking, self._idle = None, []
        open_ones = [connection for connection in found if connection is not None]
        for connection in open_ones:
            connection.close()
        # A thread that comes out of a call of the store, when the interpreter ends, can crash it.
        deadline = time.monotonic() + CLOSE_SECONDS
        for connection in open_ones:
            if not connection.lost:
                connection.join(deadline - time.monotonic())


def _values(store: Any, keys: list[str]) -> list[bytes]:
    store.wait(keys, ENDLESS)
    return [bytes(value) for value in store.multi_get(keys)]


class StoreCommunicator(BoardCommunicator):
    """The ranks of a torch.distributed job, over its store, whatever the backend.

    Make one (or one CheckpointManager) at the same point of the program on every rank: the n-th of
    one rank talks to the n-th of the others.

    store: torch.distributed.Store (default None: that of the running job).
    rank: int, of this process (default None: that of the running job).
    world_size: int, number of ranks (default None: that of the running job).
    name: text, of the conversation (default None: a number that counts up).
    node: text, the same on all ranks of one node (default None: CKPTCORE_NODE, else torchrun's
        GROUP_RANK, else the host's name).
    join_timeout: seconds that a rank may come to a call later than others (default 600).
    error_join_timeout: seconds as join_timeout, for a call made while an exception is handled
        (default 30).
    liveness_timeout: seconds of silence after which a rank counts as lost (default 60).
    work_timeout: seconds that ranks which live may work on one round (default 21600).
    """

    def __init__(
        self,
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        name: str | None = None,
        node: str | None = None,
        join_timeout: float = 600.0,
        error_join_timeout: float = 30.0,
        liveness_timeout: float = 60.0,
        work_timeout: float = 6 * 3600.0,
    ) -> None:
        if store is None:
            if not dist.is_initialized():
                raise CoordinationError(
                    "there is no process group: call torch.distributed.init_process_group first"
                )
            store = dist.distributed_c10d._get_default_store()
            rank, world_size = dist.get_rank(), dist.get_world_size()
        if rank is None or world_size is None:
            raise ValueError("StoreCommunicator(store) needs rank= and world_size= too")
        self._group: Any = None
        self._served_by = store  # rank 0's may be the server; destroy_process_group must not end it
        own = store.clone()
        prefix = f"ckptcore/{name if name is not None else next(_created)}"
        node = (
            node
            or os.environ.get("CKPTCORE_NODE")
            or os.environ.get("GROUP_RANK")
            or socket.gethostname()
        )
        board = StoreBoard(own, prefix, liveness_timeout)
        super().__init__(
            board,
            rank,
            world_size,
            node=node,
            join_timeout=join_timeout,
            error_join_timeout=error_join_timeout,
            liveness_timeout=liveness_timeout,
            work_timeout=work_timeout,
        )

    def share(self, buffer: memoryview, source: int) -> None:
        """Through a gloo group of our own, which nothing of the training uses; bytes do not go over
        the store."""
        if not dist.is_initialized() or dist.get_world_size() != self.world_size:
            super().share(buffer, source)
            return
        if self._group is None:
            self._group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=max(self.liveness_timeout, 10.0))
            )
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=source, group=self._group)


def default_communicator(
    join_timeout: float = 600.0, liveness_timeout: float = 60.0, error_join_timeout: float = 30.0
) -> Communicator:
    """A new one for the running torch.distributed job; a single process without one.

    Raises CoordinationError when a launcher started several processes and no process group was
    made.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return SingleProcess()
        return StoreCommunicator(
            join_timeout=join_timeout,
            error_join_timeout=error_join_timeout,
            liveness_timeout=liveness_timeout,
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CoordinationError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and there is no process group: call "
            "torch.distributed.init_process_group before making a CheckpointManager, or pass comm="
        )
    return SingleProcess()


_shared: tuple[Any, Communicator] | None = None


def shared_communicator() -> Communicator:
    """One for everybody who brings none, made at the first call and kept while the process group
    lives."""
    global _shared
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if _shared is None or _shared[0] is not group:
        if _shared is not None:
            _shared[1].close()
        _shared = (group, default_communicator())
    return _shared[1]
