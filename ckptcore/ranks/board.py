"""The blackboard that ranks talk through: keys and values that all of them see."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import suppress

__all__ = ["Board", "BoardLost", "MemoryBoard", "PartOfBoard"]


class Board(ABC):
    """A key-value blackboard that all ranks see. Failures of the board itself are BoardLost.

    Any thread, and a signal handler, may use it at any time: each gets the answer to its own call.
    """

    @abstractmethod
    def put(self, key: str, value: bytes) -> None: ...

    def post(self, key: str, value: bytes) -> None:
        """`put`, that nobody waits for and that raises nothing: a rank that is on its way out says
        so."""
        with suppress(BoardLost):
            self.put(key, value)

    def offer(self, key: str, value: bytes) -> None:
        """`post`, unless there is a value already."""
        with suppress(BoardLost):
            if self.get(key) is None:
                self.put(key, value)

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value, or None when there is none (yet)."""

    @abstractmethod
    def delete(self, key: str) -> None: ...

    @abstractmethod
    def wait(self, key: str, seconds: float) -> bytes | None:
        """The value as soon as there is one; None after `seconds`."""

    @abstractmethod
    def second(self) -> Board:
        """The same board on another connection, for another thread."""

    def close(self) -> None:  # noqa: B027
        """Give up this connection."""


class BoardLost(ConnectionError):
    """The blackboard does not answer any more."""


class MemoryBoard(Board):
    """A blackboard for ranks that are threads of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes | None:
        with self.changed:
            return self.values.get(key)

    def delete(self, key: str) -> None:
        with self.changed:
            self.values.pop(key, None)

    def wait(self, key: str, seconds: float) -> bytes | None:
        with self.changed:
            self.changed.wait_for(lambda: key in self.values, seconds)
            return self.values.get(key)

    def second(self) -> Board:
        return self


class PartOfBoard(Board):
    """The keys of another board that begin with `prefix`: a conversation of its own."""

    def __init__(self, board: Board, prefix: str) -> None:
        self.board, self.prefix = board, prefix

    def put(self, key: str, value: bytes) -> None:
        self.board.put(f"{self.prefix}/{key}", value)

    def post(self, key: str, value: bytes) -> None:
        self.board.post(f"{self.prefix}/{key}", value)

    def offer(self, key: str, value: bytes) -> None:
        self.board.offer(f"{self.prefix}/{key}", value)

    def get(self, key: str) -> bytes | None:
        return self.board.get(f"{self.prefix}/{key}")

    def delete(self, key: str) -> None:
        self.board.delete(f"{self.prefix}/{key}")

    def wait(self, key: str, seconds: float) -> bytes | None:
        return self.board.wait(f"{self.prefix}/{key}", seconds)

    def second(self) -> Board:
        return PartOfBoard(self.board.second(), self.prefix)

    def close(self) -> None:
        self.board.close()
