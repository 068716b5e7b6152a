"""All ranks stop after the same step, however far they are apart when a signal comes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest

from ckptcore import CoordinationError, InvalidState, PreemptionGuard, RankLost
from ckptcore.ranks.board import Board, BoardLost, MemoryBoard
from ckptcore.ranks.communicator import Communicator, Round
from ckptcore.ranks.rounds import BoardCommunicator
from ckptcore.testing.ranks import run_ranks

Scheduled = Callable[..., Any]


@pytest.mark.parametrize("first", [0, 1001])
@pytest.mark.parametrize("skew", [0, 1, 7, 50])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_all_stop_after_the_same_step_soon_after_the_signal(
    scheduled: Scheduled, world_size: int, skew: int, first: int
) -> None:
    """The signal comes to any rank at any step, before its call or between any two words that it
    says."""
    chance = random.Random(f"{world_size} {skew} {first}")
    steps = range(first, first + 2 * skew + 12)
    widest, moments = 0, set()
    for _ in range(5):
        rank, step, words = (
            chance.randrange(world_size),
            first + chance.randrange(skew + 6),
            chance.choice([0, 0, 1, 2]),
        )
        run = scheduled(chance.randrange(2**32), world_size, skew, steps, {(rank, step, words)})
        (stopped,) = set(run.stopped)
        assert stopped is not None and step <= stopped <= step + 2 * skew + 3
        # Nobody could have stopped much earlier: somebody had begun the step before, or this one.
        assert run.furthest is not None and stopped <= run.furthest + 1
        widest, moments = max(widest, run.schedule.widest), moments | {stopped - step}
    assert skew // 2 <= widest <= skew + 1  # the schedule did what it is for


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_signals_to_several_ranks_are_one(scheduled: Scheduled, world_size: int) -> None:
    chance = random.Random(world_size)
    for _ in range(10):
        signals = {
            (rank, chance.randrange(10), chance.choice([0, 1, 2])) for rank in range(world_size)
        }
        run = scheduled(chance.randrange(2**32), world_size, 5, range(40), signals)
        (stopped,) = set(run.stopped)
        earliest = min(step for _, step, _ in signals)
        assert stopped is not None and earliest <= stopped <= earliest + 2 * 5 + 3


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_without_a_signal_nobody_stops(scheduled: Scheduled, world_size: int) -> None:
    for seed in range(3):
        run = scheduled(seed, world_size, 10, range(30), set())
        assert run.stopped == [None] * world_size and run.furthest is None


def test_a_signal_at_the_end_stops_all_or_none(scheduled: Scheduled) -> None:
    chance = random.Random(0)
    seen = set()
    for _ in range(40):
        step = chance.randrange(14, 20)
        run = scheduled(chance.randrange(2**32), 3, 2, range(20), {(chance.randrange(3), step, 0)})
        (stopped,) = set(run.stopped)
        assert stopped is None or step <= stopped < 20
        seen.add(stopped is None)
    assert seen == {True, False}


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_all_stop_after_the_same_step_whatever_the_order(scheduled: Scheduled) -> None:
    chance = random.Random()
    for _ in range(2000):
        seed, world_size, skew = (
            chance.randrange(2**32),
            chance.choice([2, 3, 4, 8]),
            chance.choice([0, 1, 2, 5, 20]),
        )
        signals = {
            (chance.randrange(world_size), chance.randrange(20), chance.randrange(4))
            for _ in range(2)
        }
        run = scheduled(seed, world_size, skew, range(20 + 2 * skew + 6), signals)
        assert len(set(run.stopped)) == 1, (seed, world_size, skew, signals, run.stopped)


def test_one_process_stops_at_once(main_threads: None) -> None:
    guard = PreemptionGuard()
    assert [guard.should_stop(step) for step in range(3)] == [False] * 3
    guard.signaled = True
    assert guard.should_stop(3)


def test_a_rank_that_skipped_calls_is_told(main_threads: None) -> None:
    asked = threading.Barrier(2)

    def program(comm: Any) -> Any:
        guard = PreemptionGuard(comm)
        if comm.rank == 0:
            guard.signaled = True
            stops = [guard.should_stop(step) for step in (0, 1)]
            asked.wait(20)
            return stops
        asked.wait(20)
        with pytest.raises(
            CoordinationError,
            match=r"rank 1 is at step 5 and the ranks stop after 1: .* every step",
        ) as raised:
            guard.should_stop(5)
        return raised.value.ranks, raised.value.step

    assert run_ranks(2, program) == [[False, True], ([1], 5)]


class Dying(Board):
    """A board whose host dies after so many words."""

    def __init__(self, board: Board, words: int) -> None:
        self.board, self.words = board, words

    def _word(self) -> None:
        self.words -= 1
        if self.words < 0:
            raise BoardLost("connection reset")

    def put(self, key: str, value: bytes) -> None:
        self._word()
        self.board.put(key, value)

    def get(self, key: str) -> bytes | None:
        self._word()
        return self.board.get(key)

    def delete(self, keys: Sequence[str]) -> None: ...

    def wait(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        return self.board.wait(keys, seconds)


@pytest.mark.parametrize("words", range(9))
def test_a_lost_board_is_a_lost_rank_wherever_it_is_noticed(main_threads: None, words: int) -> None:
    comm = BoardCommunicator(MemoryBoard(), 0, 2)
    guard = PreemptionGuard(comm)
    guard.signaled = True
    guard.comm.board = Dying(guard.comm.board, words)  # type: ignore[attr-defined]
    # Its step, the signal, the signal read back, "about to say", two steps, the step to stop at,
    # and that read back.
    if words < 8:
        with pytest.raises(
            RankLost, match=r"step 7: the connection to the store .* is lost .connection reset"
        ) as raised:
            guard.should_stop(7)
        assert raised.value.ranks == [0] and isinstance(raised.value.__cause__, BoardLost)
    else:
        assert guard.should_stop(7) is False
    comm.close()


def test_a_rank_0_that_dies_while_it_names_the_step_is_lost(main_threads: None) -> None:
    comm = BoardCommunicator(MemoryBoard(), 1, 2, liveness_timeout=0.5)
    guard = PreemptionGuard(comm)
    assert guard.should_stop(0) is False
    guard.comm.board.put("stop", b"pending")  # type: ignore[attr-defined]
    with pytest.raises(RankLost, match="rank 0 began to say at which step to stop") as raised:
        guard.should_stop(1)
    assert raised.value.ranks == [0]
    comm.close()


def test_a_run_after_the_one_that_was_stopped_is_not_stopped_by_the_same_signal(
    main_threads: None,
) -> None:
    """A notebook, or a trainer that is called again: the n-th guard of one rank talks to the n-th
    of the others."""

    def program(comm: Any) -> list[int | None]:
        stops = []
        for steps, signaled in ((range(50), True), (range(10, 60), False), (range(50), False)):
            guard = PreemptionGuard(comm)
            guard.signaled = signaled and comm.rank == 1
            stopped = None
            for step in steps:
                with comm.round("a step"):
                    pass
                if guard.should_stop(step):
                    stopped = step
                    break
            with comm.round("all have stopped"):
                pass
            guard.__exit__()
            stops.append(stopped)
        return stops

    first, second = run_ranks(2, program)
    assert first == second and first[0] in (1, 2)
    assert first[1:] == [None, None]


def test_guards_are_made_in_the_main_thread_only() -> None:
    def program(comm: Any) -> None:
        with pytest.raises(InvalidState, match="signals reach the main thread alone"):
            PreemptionGuard(comm)

    run_ranks(1, program)


class Own(Communicator):
    """A user's own, with rounds and nothing else."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.world_size, self.nodes = comm, comm.rank, comm.world_size, []
        self.closed = False

    def round(self, topic: str, *, joining: bool = False) -> AbstractContextManager[Round]:
        return self.comm.round(topic, joining=joining)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("signaled", [[], [0], [1], [0, 2]])
def test_the_ranks_of_a_users_own_communicator_agree(
    main_threads: None, signaled: list[int]
) -> None:
    def program(comm: Any) -> tuple[list[bool], bool]:
        own = Own(comm)
        guard = PreemptionGuard(own)
        first = guard.should_stop(1)
        guard.signaled = comm.rank in signaled
        second = guard.should_stop(2)
        guard.__exit__()
        return [first, second], own.closed  # it is not the guard's to close

    assert run_ranks(3, program) == [([False, bool(signaled)], False)] * 3


def test_a_rank_of_a_users_own_communicator_that_skipped_calls_is_told(main_threads: None) -> None:
    def program(comm: Any) -> Any:
        with pytest.raises(
            CoordinationError, match=r"after every step, on every rank; they are at \[3, 4\]"
        ):
            PreemptionGuard(Own(comm)).should_stop(3 + comm.rank)

    run_ranks(2, program)
