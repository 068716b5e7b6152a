"""The ranks of one job, and how they agree: in rounds.

Every rank brings its part to a round, rank 0 decides, all get the same verdict. Joins, receipts and
errors travel in no other way. See rounds.py for how several processes do it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from ..errors import InvalidState, RanksDisagree

__all__ = ["Communicator", "Local", "Round", "SingleProcess", "Turn", "check_same_call"]

T = TypeVar("T")
Local = Callable[[], Any]
Decide = Callable[[list[Any]], Any]


class Round:
    """One round, inside its `with` block. leads: whether this rank is rank 0, which decides.
    verdict: what it has decided, on every rank, after the block."""

    leads = True
    verdict: Any = None

    def gather(self, value: Any = None) -> list[Any]:
        """What all ranks bring, in order of rank, on rank 0; elsewhere `value` alone.

        Once in a round; without it a rank brings None. Raises, on rank 0, what another rank has
        failed with. Values must be plain, or messages (see messages.py).
        """
        return [value]


class Communicator(ABC):
    """The ranks of one job. `nodes` lists the ranks of every node, in order of their lowest rank
    (known from the first round on). number: of the call that is being made."""

    rank: int
    world_size: int
    nodes: list[list[int]]
    number: int = 0

    @contextmanager
    def call(self, what: str, *, number: int | None = None) -> Iterator[None]:
        """All rounds of one call that every rank makes: `what`, in words. Other threads wait for
        their turn.

        number: where it has one; else it is the next one. Raises InvalidState on a thread that is
        in a call already.
        """
        with _turn_of(self).taken(what):
            yield

    def exclusively(self, what: str, work: Callable[[], T], *, number: int | None = None) -> T:
        """Do `work` in a call of its own."""
        with self.call(what, number=number):
            return work()

    def leave(self, number: int, error: BaseException) -> None:  # noqa: B027
        """This rank does not make the call of that number, because of `error`: the others hear of
        it there."""

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """This rank has work of its own to do before its next call, and comes to it when that is
        done."""
        yield

    @abstractmethod
    def round(self, topic: str, *, joining: bool = False) -> AbstractContextManager[Round]:
        """A round of all ranks: `with comm.round("capture") as r`.

        Every rank brings its part by `r.gather`, rank 0 sets `r.verdict`, and after the block
        every rank has it. What is raised in the block on any rank, every rank raises when the
        block is left: errors of ckptcore in their own type, others as RankFailed, with `causes` by
        rank.

        topic: what is done, for messages; the same on all ranks. joining: ranks may not be here
        yet; they have `join_timeout` to come (JoinTimeout). Other rounds wait for as long as the
        others live (RankLost).
        """

    def together(self, topic: str, local: Local, decide: Decide, *, joining: bool = False) -> Any:
        """A round in which every rank brings `local()`, and rank 0 decides with `decide`."""
        with self.round(topic, joining=joining) as r:
            values = r.gather(local())
            if r.leads:
                r.verdict = decide(values)
        return r.verdict

    def share(self, buffer: memoryview, source: int) -> None:
        """Fill `buffer` on every rank with what it holds on rank `source`; it has the same length
        on all."""
        if self.world_size > 1:
            with self.round("share") as r:
                parts = r.gather(bytes(buffer) if self.rank == source else b"")
                if r.leads:
                    r.verdict = parts[source]
            buffer[:] = r.verdict

    def branch(self, name: str) -> Communicator:
        """The same ranks in a conversation of their own, for another thread; every rank makes one
        of that `name`.

        One that returns itself has none, and then rounds of saves in the background mix with those
        of other calls.
        """
        return self

    def close(self) -> None:  # noqa: B027
        """Leave. Ranks that still wait for this one are told so."""


class Turn:
    """One call at a time, whichever threads they come from. doing: what it is, in words."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.doing: str | None = None

    @contextmanager
    def taken(self, what: str) -> Iterator[None]:
        with self.lock:
            if self.doing is not None:  # this thread's own, for the lock is held by it
                raise InvalidState(
                    f"{what}: a {self.doing} is under way on this thread, so a signal handler or "
                    "a state_dict() cannot begin another call; note that it is wanted, and make "
                    "it when that one has returned"
                )
            try:
                self.doing = what
                yield
            finally:
                self.doing = None


def _turn_of(comm: Communicator) -> Turn:
    turn: Turn = comm.__dict__.setdefault("_turn", Turn())
    return turn


class SingleProcess(Communicator):
    """One rank: nothing to agree about."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.nodes = [[0]]

    @contextmanager
    def round(self, topic: str, *, joining: bool = False) -> Iterator[Round]:
        yield Round()

    @contextmanager
    def call(self, what: str, *, number: int | None = None) -> Iterator[None]:
        yield  # nobody else takes part, so a call in the middle of another one is fine


def check_same_call(reports: Sequence[Any]) -> None:
    """Raises RanksDisagree unless all ranks call for the same, by the words of their reports."""
    first = reports[0].words
    if wrong := [rank for rank, report in enumerate(reports) if report.words != first]:
        what = f"rank 0 calls for a {first}, rank {wrong[0]} for a {reports[wrong[0]].words}"
        raise RanksDisagree(what, ranks=wrong)
