"""Which operations a fault is for, and what happens there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = ["OPERATIONS", "WRITE_OPERATIONS", "Gate", "Operation", "Rule", "kinds_of"]

OPERATIONS = (
    "abort",
    "close",
    "create",
    "link",
    "list",
    "make_folder",
    "open",
    "read_into",
    "remove",
    "remove_folder",
    "rename",
    "sync_folder",
    "write_at",
)
# Those that can change what is stored.
WRITE_OPERATIONS = tuple(
    kind for kind in OPERATIONS if kind not in ("list", "open", "read_into", "abort")
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation as it was asked for: its number from 1, its kind, its path (the new one for
    `rename`)."""

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
class Rule:
    """What to do from the `at`-th matching operation on, `times` times (None: for ever)."""

    act: Callable[[Operation], None]
    at: int
    kinds: tuple[str, ...]
    path: str
    times: int | None
    after: bool
    keep: float | None = None
    matched: int = 0

    def takes(self, operation: Operation) -> bool:
        if operation.kind not in self.kinds or not fnmatchcase(operation.path, self.path):
            return False
        self.matched += 1
        return self.matched >= self.at and (
            self.times is None or self.matched < self.at + self.times
        )


def kinds_of(kind: str | tuple[str, ...] | None) -> tuple[str, ...]:
    kinds = OPERATIONS if kind is None else (kind,) if isinstance(kind, str) else kind
    if unknown := [name for name in kinds if name not in OPERATIONS]:
        raise ValueError(
            f"no operation of a storage is named {unknown[0]!r}; there are {', '.join(OPERATIONS)}"
        )
    return kinds
