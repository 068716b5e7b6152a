"""Memory that bytes pass through on their way between storage and what is not contiguous host
memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..format.digest import CHUNK_BYTES

__all__ = ["MakeMemory", "Scratch"]

MakeMemory = Callable[[int], memoryview]


class Scratch(threading.local):
    """`size` bytes for each thread, and as many for bytes from or to an accelerator, which is fast
    from pinned memory."""

    def __init__(self, size: int = CHUNK_BYTES) -> None:
        self.size = size
        self.plain: memoryview | None = None
        self.pinned: memoryview | None = None

    def take(self, start: int, length: int, make_pinned: MakeMemory | None) -> memoryview:
        """Bytes `start` to `start + length` of this thread's memory; `make_pinned` where pinned
        memory is wanted."""
        assert start + length <= self.size
        if make_pinned is None:
            self.plain = self.plain or memoryview(bytearray(self.size))
            return self.plain[start : start + length]
        self.pinned = self.pinned or make_pinned(self.size)
        return self.pinned[start : start + length]
