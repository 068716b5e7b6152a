"""The blackboard that ranks talk through: keys and values that all of them see."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass


class BoardLost(ConnectionError):
    """The blackboard does not answer any more."""


class Board(ABC):
    """A key-value blackboard that all ranks see. Failures of the board itself are BoardLost.

    Any thread, and a signal handler, may use it at any time: each gets the answer to its own call.
    """

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Write a value; every rank sees it when this returns."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value, or None when there is none (yet)."""

    @abstractmethod
    def wait(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        """The values of `keys` as soon as all have one; None after `seconds`."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Remove what there is of `keys`. Nobody waits for it."""

    def put_all(self, keys: Sequence[str], value: bytes) -> None:
        """`put`, for each of `keys`."""
        for key in keys:
            self.put(key, value)

    def post(self, key: str, value: bytes) -> None:
        """`put`, that nobody waits for and that raises nothing."""
        with suppress(BoardLost):
            self.put(key, value)

    def offer(self, key: str, value: bytes) -> None:
        """`post`, unless there is a value already."""
        with suppress(BoardLost):
            if self.get(key) is None:
                self.put(key, value)

    def give_up(self, keys: Sequence[str]) -> None:  # noqa: B027
        """Nobody waits for `keys` any more, which no other rank reads; they may get a value."""

    def close(self) -> None:  # noqa: B027
        """Give up all connections."""


class MemoryBoard(Board):
    """A blackboard for ranks that are threads of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.RLock()
        self.awaited: dict[str, list[_Waiter]] = {}

    def put(self, key: str, value: bytes) -> None:
        with self.lock:
            self.values[key] = value
            for waiter in self.awaited.pop(key, ()):
                waiter.missing.discard(key)
                if not waiter.missing:
                    waiter.event.set()

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def wait(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        with self.lock:
            if self.values.keys() >= {*keys}:
                return [self.values[key] for key in keys]
            waiter = _Waiter({key for key in keys if key not in self.values}, threading.Event())
            for key in waiter.missing:
                self.awaited.setdefault(key, []).append(waiter)
        try:
            waiter.event.wait(seconds)
        finally:
            self._forget(waiter)
        with self.lock:
            found = [value for key in keys if (value := self.values.get(key)) is not None]
            return found if len(found) == len(keys) else None

    def _forget(self, waiter: _Waiter) -> None:
        with self.lock:
            for key in waiter.missing:
                self.awaited[key].remove(waiter)
                if not self.awaited[key]:
                    del self.awaited[key]

    def delete(self, keys: Sequence[str]) -> None:
        with self.lock:
            for key in keys:
                self.values.pop(key, None)


@dataclass(eq=False, slots=True)
class _Waiter:
    """A thread that waits, woken when no key is missing any more: many ranks in one process do not
    wake each other with every word."""

    missing: set[str]
    event: threading.Event


class PartOfBoard(Board):
    """The keys of another board that begin with `prefix`: a conversation of its own."""

    def __init__(self, board: Board, prefix: str) -> None:
        self.board, self.prefix = board, prefix

    def put(self, key: str, value: bytes) -> None:
        self.board.put(f"{self.prefix}/{key}", value)

    def put_all(self, keys: Sequence[str], value: bytes) -> None:
        self.board.put_all([f"{self.prefix}/{key}" for key in keys], value)

    def get(self, key: str) -> bytes | None:
        return self.board.get(f"{self.prefix}/{key}")

    def wait(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        return self.board.wait([f"{self.prefix}/{key}" for key in keys], seconds)

    def delete(self, keys: Sequence[str]) -> None:
        self.board.delete([f"{self.prefix}/{key}" for key in keys])

    def post(self, key: str, value: bytes) -> None:
        self.board.post(f"{self.prefix}/{key}", value)

    def offer(self, key: str, value: bytes) -> None:
        self.board.offer(f"{self.prefix}/{key}", value)

    def give_up(self, keys: Sequence[str]) -> None:
        self.board.give_up([f"{self.prefix}/{key}" for key in keys])
