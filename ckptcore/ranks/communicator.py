"""How ranks agree, without collectives: every rank brings its part, rank 0 decides, all get the
same answer.

One operation carries joins, receipts, verdicts and errors: a round, `with comm.round(...)`. Ranks
talk through a small blackboard on a connection of its own, so neither side of a save can interleave
with, or wait for, the training's communication. What one rank raises, all ranks raise; a rank that
dies, stops or never comes is named within a bounded time.

A public call (`with comm.call(...)`) has a number, and its rounds are counted from 1. A rank that
leaves a call by an error that is not everybody's, Ctrl-C above all, posts that error in its place,
in the round that it is in and in the next one, so that nobody waits for it; and the next call has
the same number on all ranks, whatever became of this one.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import errors
from ..errors import CheckpointError, InvalidState, JoinTimeout, RankFailed, RankLost, RanksDisagree
from .board import Board, BoardLost, MemoryBoard, PartOfBoard
from .messages import packed, unpacked

__all__ = [
    "Board",
    "BoardCommunicator",
    "BoardLost",
    "Communicator",
    "Local",
    "MemoryBoard",
    "Round",
    "SingleProcess",
]

log = logging.getLogger("ckptcore")

T = TypeVar("T")
Local = Callable[[], Any]
Decide = Callable[[list[Any]], Any]

# A call that waits for ranks says so, once, after this many seconds.
PATIENT_SECONDS = 30.0
# How long rank 0 lets the others read that a call has failed before it raises: its program may end
# then, and the board with it.
READ_SECONDS = 2.0


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


class _Turn:
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


def _turn_of(comm: Communicator) -> _Turn:
    turn: _Turn = comm.__dict__.setdefault("_turn", _Turn())
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


GONE = b"gone"
Message = dict[str, Any]


@dataclass(slots=True)
class _Pulse:
    value: bytes | None
    since: float
    seen: float


class BoardCommunicator(Communicator):
    """Rounds over a Board. node: any name that equals that of the other ranks on this rank's
    node.

    join_timeout: seconds that a rank may come later than the others. error_join_timeout: the same,
    where it is less, for a call that is made while an exception is being handled: others may well
    not come to it, and the exception is not to be hidden for long. liveness_timeout: seconds
    without a heartbeat after which a rank counts as lost.
    work_timeout: seconds after which even a living rank is not waited for.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        *,
        node: str = "",
        join_timeout: float = 600.0,
        error_join_timeout: float = 30.0,
        liveness_timeout: float = 60.0,
        work_timeout: float = 6 * 3600.0,
    ) -> None:
        self.board, self.rank, self.world_size, self.node = board, rank, world_size, node
        self.join_timeout, self.error_join_timeout = join_timeout, error_join_timeout
        self.liveness_timeout, self.work_timeout = liveness_timeout, work_timeout
        self.nodes: list[list[int]] = []
        self.number = self._round = 0
        self._turn = _Turn()
        self._in_round = False
        self._answered = True  # whether this rank has the verdict of its round, or has given it
        self._patient = join_timeout  # that of this call
        self._unread: list[str] = []
        self._pulses: dict[str, _Pulse] = {}
        self._branches: list[BoardCommunicator] = []
        self._named: Counter[str] = Counter()
        self._lost: set[int] = set()
        self._working, self._counting = 0, threading.RLock()
        self._stop = threading.Event()
        self._silent = False
        self._pid = os.getpid()
        self._heart = threading.Thread(
            target=self._beat, args=(board.second(),), name="ckptcore-heartbeat", daemon=True
        )
        self._heart.start()
        _beating.add(self)

    def _beat(self, board: Board) -> None:
        """Say that this rank lives, and works, until it leaves. A board that is lost may be found
        again."""
        count, heard = 0, True
        try:
            while True:
                try:
                    board.put(f"alive/{self.rank}", b"%d" % count)
                    if self._working:
                        board.put(f"works/{self.rank}", b"%d" % count)
                    heard = True
                except BoardLost:
                    heard = False  # whoever waits finds out on its own connection
                count += 1
                if self._stop.wait(self.liveness_timeout / 8):
                    break
            if heard and not self._silent:
                with suppress(BoardLost):
                    board.put(f"alive/{self.rank}", GONE)
        finally:
            board.close()

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # a forked child has none of the threads, and the connections are its parent's
        for branch in self._branches:
            branch.close()
        if self._stop.is_set():
            return
        if self.rank == 0:
            self._wait_for_readers(min(10.0, self.liveness_timeout))
        self._stop.set()
        self._heart.join(self.liveness_timeout)
        self.board.close()

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        with self._counting:
            self._working += 1
        self.board.post(f"works/{self.rank}", b"now")
        try:
            yield
        finally:
            with self._counting:
                self._working -= 1
            if not self._working:
                self.board.post(f"works/{self.rank}", b"")

    def branch(self, name: str) -> BoardCommunicator:
        # What an earlier branch of that name left on the board is none of this one's.
        number = self._named[name] + 1
        made = BoardCommunicator(
            PartOfBoard(self.board.second(), f"{name}/{number}"),
            self.rank,
            self.world_size,
            node=self.node,
            join_timeout=self.join_timeout,
            error_join_timeout=self.error_join_timeout,
            liveness_timeout=self.liveness_timeout,
            work_timeout=self.work_timeout,
        )
        made.nodes = self.nodes
        self._named[name] = number  # now that it is made: one that was interrupted does not count
        self._branches = [*(branch for branch in self._branches if not branch._stop.is_set()), made]
        return made

    def fall_silent(self) -> None:
        """End like a process that was killed: no word to anybody. For tests."""
        for communicator in (*self._branches, self):
            communicator._silent = True
            communicator._stop.set()

    def _wait_for_readers(self, seconds: float, ranks: Iterable[int] | None = None) -> None:
        """The process of rank 0 often hosts the board: it stays until the others have read the last
        verdict."""
        deadline = time.monotonic() + seconds
        everybody = range(1, self.world_size) if self.number else ()
        waiting = set(everybody if ranks is None else ranks) - self._lost
        with suppress(BoardLost):
            while waiting and time.monotonic() < deadline:
                for rank in sorted(waiting):
                    done, alive = (
                        _place(self.board.get(f"done/{rank}")),
                        self.board.get(f"alive/{rank}"),
                    )
                    if done >= (self.number, self._round) or alive in (GONE, None):
                        waiting.discard(rank)
                self._stop.wait(0.01)

    @contextmanager
    def call(self, what: str, *, number: int | None = None) -> Iterator[None]:
        if self._pid != os.getpid():
            raise InvalidState(
                f"{what}: the connections of this communicator are the parent process's; save there"
            )
        with self._turn.taken(what):
            try:
                if number is None or number != self.number:
                    self._round, self._answered = 0, True
                    self.number = self.number + 1 if number is None else number
                in_error = sys.exc_info()[1] is not None
                shorter = min(self.join_timeout, self.error_join_timeout)
                self._patient = shorter if in_error else self.join_timeout
                yield
            except BaseException as error:
                self.leave(self.number, error)
                raise

    def leave(self, number: int, error: BaseException) -> None:
        """Have the others fail in the round where they wait for this rank, with what it failed
        with.

        That is this round, or the next one if they have gone on. Nothing when all ranks have raised
        this already.
        """
        now = self._round if number == self.number else 0
        if getattr(error, "of_round", None) == (number, now):
            return
        failure = _failure(error)
        if self.rank == 0:
            text = {"message": f"rank 0: {failure['message']}", "causes": {0: _cause_text(failure)}}
            data = packed({"nodes": self.nodes, "failure": {**failure, **text}})
        else:
            what = {"topic": "", "call": self._turn.doing or "", "node": self.node, "left": True}
            data = packed({**what, "failure": failure})
        rounds = [now + 1] if self._answered or not now else [now, now + 1]
        for key in [self._key(n, number) for n in rounds]:
            if self.rank == 0:  # what was said before stays: some may have read it
                self.board.offer(key, data)
            else:
                self.board.post(key, data)
            self._unread.append(key)
        if self.rank == 0:
            self._unread += [
                self._key(n, number, rank) for n in rounds for rank in range(self.world_size)
            ]

    def _key(self, number_of_round: int, call: int | None = None, rank: int | None = None) -> str:
        """Where this rank, or `rank`, writes in a round: rank 0 the verdict, the others what they
        bring."""
        at = f"{self.number if call is None else call}/{number_of_round}"
        if rank is None and self.rank == 0:
            return f"{at}/out"
        return f"{at}/in/{self.rank if rank is None else rank}"

    @contextmanager
    def round(self, topic: str, *, joining: bool = False) -> Iterator[Round]:
        with ExitStack() as stack:
            if self._pid == os.getpid():
                stack.enter_context(self._turn.lock)
            if self._pid != os.getpid() or self._turn.doing is None:
                stack.enter_context(self.call(topic))
            if self._in_round:
                raise InvalidState(
                    f"{topic}: a {self._turn.doing} is under way on this thread, in the middle of "
                    "a round"
                )
            now = _BoardRound(self, topic, joining)
            own: Exception | None = None
            try:
                self._in_round = True
                try:
                    yield now
                except Exception as error:
                    own = error
                now.end(own)
            except BaseException as error:
                if own is not None:  # what takes its place has come about where it has
                    error.__context__ = own.__context__
                raise
            finally:
                self._in_round = False

    def _everybodys(self, error: CheckpointError) -> CheckpointError:
        """Mark what all ranks raise, so that it is not posted once more when the call is left."""
        error.of_round = (self.number, self._round)  # type: ignore[attr-defined]
        return error

    def _tidy(self) -> None:
        """Remove what this rank posted when it left earlier calls; rank 0 has gone on, so it is
        read."""
        for key in [key for key in self._unread if int(key.split("/")[0]) < self.number]:
            self.board.delete(key)
            self._unread.remove(key)

    def _named_as(self, topic: str) -> str:
        """What is being done, for messages: the call that the user has made, and which part of
        it."""
        what = self._turn.doing or topic
        return what if what == topic else f"{what} ({topic})"

    def _say(self, started: float, missing: list[int]) -> bool:
        """Say, when it has been long enough, whom this call waits for."""
        seconds = time.monotonic() - started
        if seconds < PATIENT_SECONDS or not missing:
            return False
        log.warning(
            "%s: waiting for %s since %.0f s", self._turn.doing, _rank_names(missing), seconds
        )
        return True

    def _patience(self, deadline: float) -> float:
        shortest = min(self.liveness_timeout / 4, self._patient / 4, PATIENT_SECONDS / 2)
        return max(0.0, min(shortest, deadline - time.monotonic()))

    def _absent(self, topic: str, ranks: list[int], joining: bool) -> CheckpointError:
        who = _rank_names(ranks)
        if joining:
            return JoinTimeout(
                f"{self._turn.doing}: {who} did not join within {self._patient:g} s; the call "
                "must be made on every rank, not "
                f"only on some (the other {self.world_size - len(ranks)} of {self.world_size} "
                "ranks are here)",
                ranks=ranks,
            )
        what = f"{self._named_as(topic)}: {who} did not finish within {self.work_timeout:g} s"
        return RankLost(what, ranks=ranks)

    def _still(self, key: str, beat: bytes | None) -> float:
        """For how many seconds `key` has been seen to hold the same. A time in which nobody looked
        does not count: this process may have been stopped itself."""
        now = time.monotonic()
        pulse = self._pulses.get(key)
        if pulse is None or pulse.value != beat or now - pulse.seen > self.liveness_timeout / 2:
            pulse = self._pulses[key] = _Pulse(beat, now, now)
        pulse.seen = now
        return now - pulse.since

    def _works(self, rank: int) -> bool:
        """Whether a rank has work of its own to do before it comes, and does it: it says so again
        and again."""
        beat = self.board.get(f"works/{rank}")
        return bool(beat) and self._still(f"works/{rank}", beat) <= self.liveness_timeout

    def _check_alive(self, topic: str, ranks: Iterable[int]) -> None:
        """RankLost when the heartbeat of one of `ranks` stopped, or it said that it leaves."""
        lost, left = [], []
        for rank in ranks:
            beat = self.board.get(f"alive/{rank}")
            if beat == GONE:
                left.append(rank)
            elif self._still(f"alive/{rank}", beat) > self.liveness_timeout and beat is not None:
                lost.append(rank)
        if lost or left:
            self._lost.update(lost, left)
            what = (
                f"the heartbeat of {_rank_names(lost)} stopped {self.liveness_timeout:g} s ago: "
                "dead, stopped or cut off"
            )
            raise RankLost(
                f"{self._named_as(topic)}: {what if lost else _rank_names(left) + ' left the job'}",
                ranks=lost or left,
            )


class _BoardRound(Round):
    """A round over a board. Every rank but 0 posts what it brings, rank 0 its verdict; on every
    path out of the block, and not before it, so that a rank that fails in the block brings that."""

    def __init__(self, comm: BoardCommunicator, topic: str, joining: bool) -> None:
        self.comm, self.topic, self.joining, self.leads = comm, topic, joining, comm.rank == 0
        self.verdict: Any = None
        self.message: Message = {"topic": topic, "call": comm._turn.doing, "node": comm.node}
        self.data: bytes | None = None  # what this rank brings, from `gather` on
        self.messages: list[Message] = []
        self.failed: Exception | None = None  # of other ranks, as rank 0 found it
        comm._answered = False
        comm._round += 1

    def gather(self, value: Any = None) -> list[Any]:
        if self.data is not None:
            raise InvalidState(f"{self.topic}: a rank can gather once in a round")
        self.data = packed({**self.message, "value": value})
        return self._gathered() if self.leads else [value]

    def end(self, own: Exception | None) -> None:
        """Post what is due when the block is left, by `own` if by an error; and raise what all
        ranks raise."""
        try:
            if self.data is None and own is None:
                try:
                    self.gather()
                except Exception as error:
                    own = error
            if own is not None and (self.data is None or not self.leads):
                self.data = packed({**self.message, "failure": _failure(own)})
            verdict = self._lead(own) if self.leads else self._follow()
        except BoardLost as error:
            raise self._lost_connection(error) from error
        comm = self.comm
        comm.nodes = verdict["nodes"] or comm.nodes
        if "failure" in verdict:
            raise comm._everybodys(_rebuilt(verdict["failure"], own)) from _cause_of(own)
        self.verdict = verdict["value"]

    def _lost_connection(self, error: BoardLost) -> RankLost:
        return RankLost(
            f"{self.comm._named_as(self.topic)}: rank {self.comm.rank} lost the connection to the "
            f"store of this job ({error}); the process that hosts it (rank 0) has probably died",
            ranks=[0],
        )

    # Rank 0.

    def _gathered(self) -> list[Any]:
        """The values of all ranks. Raises what any has failed with."""
        try:
            comm, first = self.comm, self.joining and self.comm._round == 1
            while True:
                where = f"{comm.number} {comm._round} {comm._turn.doing}"
                comm.board.put("leader", where.encode("utf-8", "backslashreplace"))
                self.messages = self._all_messages()
                if not first or not self._are_over():
                    break
                comm.board.put(out := comm._key(1), packed({"over": True}))
                comm._unread.append(out)
                comm.number += 1
            comm.nodes = _nodes([message["node"] for message in self.messages])
            _raise_failures(self.topic, self.messages, self.joining)
            return [message["value"] for message in self.messages]
        except Exception as error:
            self.failed = error
            raise

    def _lead(self, own: Exception | None) -> dict[str, Any]:
        """Post the verdict, or the failure."""
        comm = self.comm
        if not self.messages and self.failed is None:
            # It failed before it heard of the others; what they bring is read all the same.
            with suppress(CheckpointError):
                self._gathered()
        if isinstance(self.failed, BoardLost):
            raise self.failed
        error = self.failed or own
        verdict: dict[str, Any] = {"nodes": comm.nodes, "value": self.verdict}
        if error is None:
            try:
                data = packed(verdict)
            except Exception as unfit:
                error = unfit
        if error is not None:
            verdict = {"nodes": comm.nodes, "failure": _failure(error)}
            if isinstance(error, JoinTimeout):
                verdict |= {"absent": error.ranks or [], "call": comm._turn.doing}
            data = packed(verdict)
        comm.board.put(out := comm._key(comm._round), data)
        comm._answered = True
        comm._unread.append(out)
        if error is not None:
            gone = {r for r, m in enumerate(self.messages) if "left" in m or "late" in m}
            comm._wait_for_readers(READ_SECONDS, {*range(1, comm.world_size)} - gone)
        return verdict

    def _all_messages(self) -> list[Message]:
        """All ranks' messages of this round, in order of rank; and the keys of the rounds before
        are removed."""
        comm, started = self.comm, time.monotonic()
        deadline = started + (comm._patient if self.joining else comm.work_timeout)
        keys = [comm._key(comm._round, rank=rank) for rank in range(comm.world_size)]
        assert self.data is not None
        # A round whose messages have all come proves that the rounds before it were read by
        # everybody.
        found: list[Message] = [unpacked(self.data)]
        said = not self.joining
        for rank, key in enumerate(keys[1:], 1):
            while (data := comm.board.wait(key, comm._patience(deadline))) is None:
                missing = [
                    r for r in range(rank, comm.world_size) if comm.board.get(keys[r]) is None
                ]
                comm._check_alive(self.topic, missing)
                now = time.monotonic()
                if self.joining and any(comm._works(r) for r in missing):
                    deadline = max(deadline, now + comm._patient)
                said = said or comm._say(started, missing)
                if missing and now > deadline:
                    comm._lost.update(missing)
                    comm._unread += keys[1:]
                    raise comm._absent(self.topic, missing, self.joining)
            found.append(unpacked(data))
        comm._lost.clear()
        for key in (*keys[1:], *comm._unread):
            comm.board.delete(key)
        comm._unread = []
        return found

    def _are_over(self) -> bool:
        """Whether these messages are of a call in which ranks gave up waiting for rank 0: another
        one than it makes now, or this one, which they make again already."""
        comm = self.comm
        for rank, message in enumerate(self.messages):
            if "late" in message:
                if message["call"] != comm._turn.doing:
                    return True
                later = comm.board.get(comm._key(1, comm.number + 1, rank))
                if later is not None and unpacked(later)["call"] == comm._turn.doing:
                    return True
        return False

    # The other ranks.

    def _follow(self) -> dict[str, Any]:
        """Post what this rank brings, and wait for the verdict."""
        comm, first = self.comm, self.joining and self.comm._round == 1
        assert self.data is not None
        while True:
            comm.board.put(comm._key(comm._round), self.data)
            verdict = self._waited_for()
            comm.board.put(f"done/{comm.rank}", b"%d %d" % (comm.number, comm._round))
            comm._tidy()
            if "over" not in verdict and not (first and self._was_alone(verdict)):
                return verdict
            comm.number += 1

    def _waited_for(self) -> dict[str, Any]:
        comm, began = self.comm, time.monotonic()
        started = began
        key, place = f"{comm.number}/{comm._round}/out", (comm.number, comm._round)
        said = not self.joining
        while (data := comm.board.wait(key, comm._patience(started + comm.work_timeout))) is None:
            comm._check_alive(self.topic, [0])
            now = time.monotonic()
            if self.joining and _place(comm.board.get("leader")) < place:
                said = said or comm._say(began, [0])
                started = now if comm._works(0) else started
                if now - started > comm._patient:
                    self._give_up()
            if now > began + comm.work_timeout + comm.liveness_timeout:
                raise comm._absent(self.topic, [0], joining=False)
        verdict: dict[str, Any] = unpacked(data)
        comm._answered = True
        return verdict

    def _was_alone(self, verdict: dict[str, Any]) -> bool:
        """Whether this is the failure of a call that others made without this rank and that is
        over: another one than this rank makes now, or rank 0 makes this one again already. A rank
        that comes late to it shares the failure."""
        comm = self.comm
        if comm.rank not in verdict.get("absent", ()):
            return False
        leader = comm.board.get("leader")
        again = _place(leader) > (comm.number, 1) and _words(leader) == comm._turn.doing
        return verdict["call"] != comm._turn.doing or again

    def _give_up(self) -> None:
        """Raise JoinTimeout for rank 0, unless it has come.

        Rank 0 says that it is here before it reads what the others brought. So either it finds this
        message and fails too when it comes, or it has come by now and its verdict is waited for.
        """
        comm, absent = self.comm, self.comm._absent(self.topic, [0], joining=True)
        late = {**self.message, "failure": _failure(absent), "late": True}
        comm.board.put(comm._key(comm._round), packed(late))
        if _place(comm.board.get("leader")) < (comm.number, comm._round):
            raise comm._everybodys(absent)


_beating: weakref.WeakSet[BoardCommunicator] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """At the end of a program that has not closed them: a heart that beats into the end of the
    interpreter can crash it."""
    hearts = [comm for comm in _beating if comm._pid == os.getpid() and not comm._stop.is_set()]
    deadline = time.monotonic() + READ_SECONDS
    for comm in hearts:
        if comm.rank == 0:  # an error that ends this program is the others' error, too
            comm._wait_for_readers(deadline - time.monotonic())
    for comm in hearts:
        comm._stop.set()
    for comm in hearts:
        comm._heart.join(1.0)


def _rank_names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:16]))
    return f"ranks {shown}{f' and {len(ranks) - 16} more' if len(ranks) > 16 else ''}"


def _place(value: bytes | None) -> tuple[int, int]:
    """Call and round, as a rank writes where it is."""
    call, number, *_ = (value or b"0 0").split(maxsplit=2)
    return int(call), int(number)


def _words(value: bytes | None) -> str:
    """Which call that is."""
    return (value or b"").decode().split(maxsplit=2)[-1] if value else ""


def _nodes(names: list[str]) -> list[list[int]]:
    """Ranks by node, nodes in order of their lowest rank."""
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return list(nodes.values())


def _failure(error: BaseException) -> dict[str, Any]:
    """An error as plain values: type, message, those of its facts that are plain, and what other
    ranks told."""
    kind = type(error).__name__
    if not isinstance(error, CheckpointError) or getattr(errors, kind, None) is not type(error):
        return {"type": "", "message": f"{kind}: {_text(error)}", "facts": {}, "causes": {}}
    facts = {}
    for name in error.facts:
        try:
            packed(value := getattr(error, name))
        except CheckpointError:
            continue
        facts[name] = value
    return {"type": kind, "message": _text(error), "facts": facts, "causes": error.causes or {}}


def _text(error: BaseException) -> str:
    """What an error says, in words that can be posted: one that cannot say it must not keep the
    others waiting."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception as again:
        return f"(its text cannot be had: {type(again).__name__})"


def _raise_failures(topic: str, messages: list[Message], joining: bool) -> None:
    """The failure of the lowest rank that has one; RanksDisagree for calls that do not belong
    together.

    A rank that fails in the middle of a call may be in another round than the others; what it
    failed with counts.
    """
    failed = {rank: m["failure"] for rank, m in enumerate(messages) if "failure" in m}
    topics = {message["topic"] for message in messages if "left" not in message}
    if len(topics) > 1 and (joining or not failed):
        calls = "; ".join(
            f"{t}: {_rank_names([r for r, m in enumerate(messages) if m['topic'] == t])}"
            for t in sorted(topics)
        )
        raise RanksDisagree(
            f"the ranks make different calls: {calls}",
            ranks=[r for r, m in enumerate(messages) if m["topic"] != topic],
        )
    if failed:
        causes = {rank: _cause_text(failure) for rank, failure in failed.items()}
        rank, first = next(iter(failed.items()))
        more = (
            f" (also failed: {_rank_names([r for r in failed if r != rank])})"
            if len(failed) > 1
            else ""
        )
        raise _rebuilt(
            {**first, "message": f"rank {rank}: {first['message']}{more}", "causes": causes}
        )


def _cause_text(failure: dict[str, Any]) -> str:
    return (
        f"{failure['type']}: {failure['message']}" if failure["type"] else str(failure["message"])
    )


def _cause_of(own: BaseException | None) -> BaseException | None:
    """What is shown above an error that all ranks raise: what failed in the user's own code on this
    rank, if anything.

    An error of ckptcore says the same as the one that takes its place, and would only be printed
    twice.
    """
    return own.__cause__ if isinstance(own, CheckpointError) else own


def _rebuilt(failure: dict[str, Any], own: BaseException | None = None) -> CheckpointError:
    kind = getattr(errors, failure["type"]) if failure["type"] else RankFailed
    error: CheckpointError = kind(failure["message"], **failure["facts"])
    error.causes = failure["causes"] or None
    for note in getattr(own, "__notes__", ()) if isinstance(own, CheckpointError) else ():
        error.add_note(note)
    return error
