"""Who lives: every rank says again and again that it does, and whoever waits for one looks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from .board import Board, BoardLost

GONE = b"gone"


class Heart:
    """Says every `period` seconds that `rank` lives, in a thread of its own, until it leaves."""

    def __init__(self, board: Board, rank: int, period: float) -> None:
        self.board, self.rank, self.period = board, rank, period
        self.stopped, self.silent = threading.Event(), False
        self.working: Counter[Board] = Counter()  # where others wait for this rank, which works
        self._counting = threading.RLock()
        self.start()

    def start(self) -> None:
        """Beat, and beat again when it was interrupted."""
        self.thread = threading.Thread(target=self._beat, name="ckptcore-heartbeat", daemon=True)
        self.thread.start()

    def lives(self) -> bool:
        return self.thread.is_alive() or self.stopped.is_set()

    @contextmanager
    def works(self, board: Board) -> Iterator[None]:
        """Say on `board`, too, that this rank works, and will come."""
        with self._counting:
            self.working[board] += 1
        board.post(f"works/{self.rank}", b"now")
        try:
            yield
        finally:
            with self._counting:
                self.working[board] -= 1
                if not self.working[board]:
                    del self.working[board]
                    board.post(f"works/{self.rank}", b"")

    def _beat(self) -> None:
        heard = True
        while True:
            beat = b"%d" % time.monotonic_ns()
            try:
                self.board.put(f"alive/{self.rank}", beat)
                with self._counting:
                    for board in self.working:
                        board.post(f"works/{self.rank}", beat)
                heard = True
            except BoardLost:
                heard = False  # it may be found again; whoever waits finds out on its own
            if self.stopped.wait(self.period):
                break
        if heard and not self.silent:
            with suppress(BoardLost):
                self.board.put(f"alive/{self.rank}", GONE)

    def stop(self, *, silent: bool = False) -> None:
        """Leave the job. silent: without a word, like a process that was killed."""
        self.silent = self.silent or silent
        self.stopped.set()

    def join(self, seconds: float) -> None:
        if self.thread.ident is not None:  # its start may have been interrupted
            self.thread.join(seconds)


@dataclass(slots=True)
class _Pulse:
    value: bytes | None
    since: float
    checked: float


class Watch:
    """What one rank sees of the others' hearts, in one conversation.

    alive: the board that hearts beat on. board: that of the conversation, which a rank can leave
    alone. seconds: without a beat, after which a rank counts as lost.
    """

    def __init__(self, alive: Board, board: Board, seconds: float) -> None:
        self.alive, self.board, self.seconds = alive, board, seconds
        self._pulses: dict[str, _Pulse] = {}

    def _still(self, key: str, beat: bytes | None) -> float:
        """For how many seconds `key` has been seen to hold the same. A time in which nobody looked
        does not count: this process may have been stopped itself."""
        now = time.monotonic()
        pulse = self._pulses.get(key)
        if pulse is None or pulse.value != beat or now - pulse.checked > self.seconds / 2:
            pulse = self._pulses[key] = _Pulse(beat, now, now)
        pulse.checked = now
        return now - pulse.since

    def works(self, rank: int) -> bool:
        """Whether a rank has work of its own to do before it comes, and does it."""
        beat = self.board.get(f"works/{rank}")
        return bool(beat) and self._still(f"works/{rank}", beat) <= self.seconds

    def has_left(self, rank: int) -> bool:
        """Whether it has said so."""
        gone = self.alive.get(f"alive/{rank}") in (GONE, None)
        return gone or self.board.get(f"left/{rank}") is not None

    def lost_and_left(self, ranks: Iterable[int]) -> tuple[list[int], list[int]]:
        """Those of `ranks` whose heart has stopped, and those that said that they leave."""
        lost, left = [], []
        for rank in ranks:
            beat = self.alive.get(f"alive/{rank}")
            if beat == GONE or self.board.get(f"left/{rank}") is not None:
                left.append(rank)
            elif self._still(f"alive/{rank}", beat) > self.seconds and beat is not None:
                lost.append(rank)
        return lost, left
