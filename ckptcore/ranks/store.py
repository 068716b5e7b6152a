"""The blackboard on a torch.distributed store, and the communicator of the running job."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
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


def _answer(calls: queue.SimpleQueue[Any], answers: queue.SimpleQueue[Any]) -> None:
    while (call := calls.get()) is not None:
        try:
            answers.put((call(), None))
        except RuntimeError as error:  # DistStoreError, DistNetworkError and their kin
            answers.put((None, error))


class StoreBoard(Board):
    """Keys under `prefix` in a store; `store` is a connection of our own, so waiting blocks nobody else."""

    def __init__(self, store: Any, prefix: str, world_size: int, patience: float) -> None:
        self.store, self.prefix, self.patience = store, prefix, patience
        self.lost = False
        self.calls: queue.SimpleQueue[Any] | None = None
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # All ranks together ask at most some 20,000 times a second, which a store answers easily.
        self.poll = max(0.02, world_size / 20_000)

    def _do(self, call: Callable[[], T]) -> T:
        """Make a call that may never come back (a host that is stopped, not dead) and wait for it no longer than
        `patience`. The thread that is stuck then is a daemon, and this board is not used again."""
        if self.lost:
            raise BoardLost("it did not answer before")
        if self.calls is None:
            self.calls, self.answers = queue.SimpleQueue(), queue.SimpleQueue()
            threading.Thread(
                target=_answer, args=(self.calls, self.answers), name="ckptcore-store", daemon=True
            ).start()
        self.calls.put(call)
        try:
            value, error = self.answers.get(timeout=self.patience)
        except queue.Empty:
            self.lost = True
            raise BoardLost(f"no answer for {self.patience:g} s") from None
        if error is not None:
            self.lost = True
            raise BoardLost(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        if self.calls is not None:
            self.calls.put(None)
            self.calls = None

    def put(self, key: str, value: bytes) -> None:
        self._do(lambda: self.store.set(f"{self.prefix}/{key}", value))

    def get(self, key: str) -> bytes | None:
        full = f"{self.prefix}/{key}"
        if not self._do(lambda: self.store.check([full])):
            return None
        return bytes(self._do(lambda: self.store.get(full)))

    def delete(self, key: str) -> None:
        self._do(lambda: self.store.delete_key(f"{self.prefix}/{key}"))

    def wait(self, key: str, seconds: float) -> bytes | None:
        # Asked for again and again rather than waited for: a store's own wait logs a warning whenever it times out.
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

    Make one (or one CheckpointManager) at the same point of the program on every rank: the n-th of one rank talks to
    the n-th of the others. node: by default CKPTCORE_NODE, else torchrun's GROUP_RANK, else the host's name.
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
        liveness_timeout: float = 60.0,
        work_timeout: float = 6 * 3600.0,
    ) -> None:
        if store is None:
            if not dist.is_initialized():
                raise CoordinationError("there is no process group: call torch.distributed.init_process_group first")
            store = dist.distributed_c10d._get_default_store()
            rank, world_size = dist.get_rank(), dist.get_world_size()
        if rank is None or world_size is None:
            raise ValueError("StoreCommunicator(store) needs rank= and world_size= too")
        self._group: Any = None
        self._served_by = store  # rank 0's may be the server; destroy_process_group must not end it
        own = store.clone()
        prefix = f"ckptcore/{name if name is not None else next(_created)}"
        node = node or os.environ.get("CKPTCORE_NODE") or os.environ.get("GROUP_RANK") or socket.gethostname()
        board = StoreBoard(own, prefix, world_size, liveness_timeout)
        super().__init__(
            board,
            rank,
            world_size,
            node=node,
            join_timeout=join_timeout,
            liveness_timeout=liveness_timeout,
            work_timeout=work_timeout,
        )

    def share(self, buffer: memoryview, source: int) -> None:
        """Through a gloo group of our own, which nothing of the training uses; bytes do not go over the store."""
        if not dist.is_initialized() or dist.get_world_size() != self.world_size:
            super().share(buffer, source)
            return
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(self.liveness_timeout, 10.0)))
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=source, group=self._group)


def default_communicator(join_timeout: float = 600.0, liveness_timeout: float = 60.0) -> Communicator:
    """A new one for the running torch.distributed job; a single process without one.

    Raises CoordinationError when a launcher started several processes and no process group was made.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return SingleProcess()
        return StoreCommunicator(join_timeout=join_timeout, liveness_timeout=liveness_timeout)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CoordinationError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and there is no process group: call "
            "torch.distributed.init_process_group before making a CheckpointManager, or pass comm=")  # fmt: skip
    return SingleProcess()


_shared: tuple[Any, Communicator] | None = None


def shared_communicator() -> Communicator:
    """One for everybody who brings none, made at the first call and kept while the process group lives."""
    global _shared
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if _shared is None or _shared[0] is not group:
        if _shared is not None:
            _shared[1].close()
        _shared = (group, default_communicator())
    return _shared[1]
