"""The blackboard on a torch.distributed store, and the communicator of the running job."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import CoordinationError
from .board import Board, BoardLost
from .communicator import BoardCommunicator, Communicator, SingleProcess

__all__ = ["StoreCommunicator", "default_communicator", "shared_communicator"]

T = TypeVar("T")
_created = itertools.count()


# How long a call waits for a connection that is being made anew. Longer waits are for `patience`.
RECONNECT_SECONDS = 2.0


class _Call:
    """One call and its answer, which nobody else can get."""

    __slots__ = ("answer", "dropped", "work")

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work, self.dropped = work, False
        self.answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()


class _Connection:
    """A connection to the store, and the one thread that uses it: nobody else gets hold of it.

    connect: makes it, in that thread. tried: whether it has answered before.
    """

    def __init__(self, connect: Callable[[], Any], *, tried: bool) -> None:
        self.connect, self.tried, self.lost = connect, tried, False
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="ckptcore-store", daemon=True).start()

    def _serve(self) -> None:
        store: Any = None
        while (call := self.calls.get()) is not None:
            if call.dropped:
                continue
            try:
                if self.lost:
                    raise ConnectionError("the connection is lost")
                store = self.connect() if store is None else store
                call.answer.put((call.work(store), None))
                self.tried = True
            except Exception as error:  # DistStoreError, DistNetworkError and their kin
                self.lost = True
                call.answer.put((None, error))

    def close(self) -> None:
        self.calls.put(None)


class StoreBoard(Board):
    """Keys under `prefix` in a store; `store` is a connection of our own, so waiting blocks nobody
    else.

    patience: seconds that a call may take. A store that has not answered for that long is connected
    to anew, so that it is found again when it answers again.
    """

    def __init__(self, store: Any, prefix: str, world_size: int, patience: float) -> None:
        self.store, self.prefix, self.patience = store, prefix, patience
        self._lock = threading.RLock()
        self._connection: _Connection | None = None
        # All ranks together ask at most some 20,000 times a second, which a store answers easily.
        self.poll = max(0.02, world_size / 20_000)

    def _connected(self) -> _Connection:
        with self._lock:
            found = self._connection
            if found is None or found.lost:
                connect = self.store.clone if found is not None else lambda: self.store
                if found is not None:
                    found.close()
                try:
                    found = self._connection = _Connection(connect, tried=found is None)
                except RuntimeError as error:  # no thread can be started at the end of a program
                    raise BoardLost(str(error)) from None
            return found

    def _do(self, work: Callable[[Any], T]) -> T:
        """Make a call that may never come back (a host that is stopped, not dead), and wait for it
        no longer than `patience`. The connection is not used again then, and its thread, a daemon,
        may be stuck."""
        connection = self._connected()
        seconds = self.patience if connection.tried else min(self.patience, RECONNECT_SECONDS)
        call = _Call(work)
        connection.calls.put(call)
        try:
            value, error = call.answer.get(timeout=seconds)
        except queue.Empty:
            call.dropped = True
            connection.lost = connection.tried  # else it is still being made
            raise BoardLost(f"no answer for {seconds:g} s") from None
        if error is not None:
            raise BoardLost(
                str(error).splitlines()[0] if str(error) else type(error).__name__
            ) from error
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        with self._lock:
            found, self._connection = self._connection, None
        if found is not None:
            found.close()

    def put(self, key: str, value: bytes) -> None:
        full = f"{self.prefix}/{key}"
        self._do(lambda store: store.set(full, value))

    def post(self, key: str, value: bytes) -> None:
        full = f"{self.prefix}/{key}"
        self._send(lambda store: store.set(full, value))

    def offer(self, key: str, value: bytes) -> None:
        full = f"{self.prefix}/{key}"
        self._send(lambda store: store.compare_set(full, "", value))

    def _send(self, work: Callable[[Any], Any]) -> None:
        with suppress(BoardLost):
            self._connected().calls.put(_Call(work))

    def get(self, key: str) -> bytes | None:
        full = f"{self.prefix}/{key}"
        return self._do(lambda store: bytes(store.get(full)) if store.check([full]) else None)

    def delete(self, key: str) -> None:
        full = f"{self.prefix}/{key}"
        self._do(lambda store: store.delete_key(full))

    def wait(self, key: str, seconds: float) -> bytes | None:
        # Asked for again and again rather than waited for: a store's own wait logs a warning
        # whenever it times out.
        deadline = time.monotonic() + seconds
        pause = 0.0005
        while (value := self.get(key)) is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, self.poll)
        return value

    def second(self) -> Board:
        board = StoreBoard(self.store.clone(), self.prefix, 1, self.patience)
        board.poll = self.poll
        return board


class StoreCommunicator(BoardCommunicator):
    """The ranks of a torch.distributed job, over its store (or `store`), whatever the backend.

    Make one (or one CheckpointManager) at the same point of the program on every rank: the n-th of
    one rank talks to the n-th of the others. node: by default CKPTCORE_NODE, else torchrun's
    GROUP_RANK, else the host's name.
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
        board = StoreBoard(own, prefix, world_size, liveness_timeout)
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
