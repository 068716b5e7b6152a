"""Guards on ranks that are threads, and a schedule that decides in which order they get to the
blackboard."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import ckptcore.preemption
from ckptcore.preemption import PreemptionGuard
from ckptcore.ranks.board import Board
from ckptcore.testing.processes import patience
from ckptcore.testing.ranks import run_ranks


class Instant:
    """An event that nobody waits for: the schedule decides who goes on, not a clock."""

    def wait(self, seconds: float) -> bool:
        return False


@pytest.fixture
def main_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards may be made in the threads of virtual ranks, and wait without sleeping."""
    fake = SimpleNamespace(
        current_thread=threading.main_thread, main_thread=threading.main_thread, Event=Instant
    )
    monkeypatch.setattr(ckptcore.preemption, "threading", fake)


class Schedule:
    """One rank runs at a time; at every word on the board a seeded choice says which. None is
    further ahead of the last one than `skew` steps, and how eager each is differs by a factor of up
    to 50."""

    def __init__(self, seed: int, world_size: int, skew: int, first: int) -> None:
        self.random, self.skew = random.Random(seed), skew
        self.steps = dict.fromkeys(range(world_size), first)
        self.eager = [50 ** self.random.random() for _ in range(world_size)]
        self.turns = [threading.Semaphore(0) for _ in range(world_size)]
        self.widest = 0

    def start(self) -> None:
        self._choose()

    def _choose(self) -> None:
        last = min(self.steps.values())
        able = [rank for rank, step in self.steps.items() if step - last <= self.skew]
        (chosen,) = self.random.choices(able, [self.eager[rank] for rank in able])
        self.turns[chosen].release()

    def wait(self, rank: int) -> None:
        """For this rank's first turn."""
        assert self.turns[rank].acquire(timeout=30 * patience())

    def give(self, rank: int) -> None:
        """Let the choice fall on anybody, and go on when it falls on this rank again."""
        self._choose()
        self.wait(rank)

    def begin(self, rank: int, step: int) -> None:
        self.steps[rank] = step
        self.widest = max(self.widest, step - min(self.steps.values()))
        self.give(rank)

    def leave(self, rank: int) -> None:
        del self.steps[rank]
        if self.steps:
            self._choose()


class Scheduled(Board):
    """A board at which every word waits for its turn, and a signal may come just before it."""

    def __init__(
        self, board: Board, before: Callable[[], None], decided: Callable[[int], None]
    ) -> None:
        self.board, self.before, self.decided = board, before, decided

    def put(self, key: str, value: bytes) -> None:
        self.before()
        if key == "stop" and value.isdigit():
            self.decided(int(value))
        self.board.put(key, value)

    def get(self, key: str) -> bytes | None:
        self.before()
        return self.board.get(key)

    def delete(self, keys: Sequence[str]) -> None:
        self.board.delete(keys)

    def wait(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        return self.board.wait(keys, seconds)

    def close(self) -> None:
        self.board.close()


class Run:
    """A run of ranks that call `should_stop` after every step. signals: (rank, step, words before
    it comes)."""

    def __init__(
        self,
        seed: int,
        world_size: int,
        skew: int,
        steps: range,
        signals: set[tuple[int, int, int]],
    ) -> None:
        self.schedule = Schedule(seed, world_size, skew, steps.start)
        self.steps, self.signals = steps, signals
        self.furthest: int | None = (
            None  # where the furthest rank was when the step to stop at was named
        )
        self.stopped: list[int | None] = self._run(world_size)

    def _run(self, world_size: int) -> list[int | None]:
        ready = threading.Barrier(world_size, action=self.schedule.start)
        return run_ranks(world_size, lambda comm: self._rank(comm, ready))

    def _rank(self, comm: Any, ready: threading.Barrier) -> int | None:
        rank, schedule = comm.rank, self.schedule
        guard = PreemptionGuard(comm)
        words = 0

        def word() -> None:
            nonlocal words
            schedule.give(rank)
            words += 1
            if (rank, schedule.steps[rank], words) in self.signals:
                guard.signaled = True

        def decided(_: int) -> None:
            self.furthest = max(schedule.steps.values())

        guard.comm.board = Scheduled(guard.comm.board, word, decided)  # type: ignore[attr-defined]
        ready.wait(30)
        schedule.wait(rank)
        try:
            for step in self.steps:
                schedule.begin(rank, step)
                words = 0
                if any(signal[:2] == (rank, step) and signal[2] == 0 for signal in self.signals):
                    guard.signaled = True
                if guard.should_stop(step):
                    return step
            return None
        finally:
            schedule.leave(rank)


@pytest.fixture
def scheduled(main_threads: None) -> Callable[..., Run]:
    return Run
