"""How ranks agree, without collectives: every rank brings its part, rank 0 decides, all get the
same answer.

One operation carries joins, receipts, verdicts and errors: `together`, a round. Ranks talk through
a small blackboard on a connection of its own, so neither side of a save can interleave with, or
wait for, the training's communication. What one rank raises, all ranks raise; a rank that dies,
stops or never comes is named within a bounded time.

A public call (`exclusively`) has a number, and its rounds are counted from 1. A rank that leaves a
call by an error that is not everybody's, Ctrl-C above all, posts that error in its place, in the
round that it is in and in the next one, so that nobody waits for it; and the next call has the same
number on all ranks, whatever became of this one.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from .. import errors
from ..errors import CheckpointError, InvalidState, JoinTimeout, RankFailed, RankLost, RanksDisagree
from ..format.values import decode, encode
from .board import Board, BoardLost, MemoryBoard, PartOfBoard

__all__ = [
    "Board",
    "BoardCommunicator",
    "BoardLost",
    "Communicator",
    "Local",
    "MemoryBoard",
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


class _Turn:
    """One call at a time, whichever threads they come from. doing: what it is, in words."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.doing: str | None = None

    def take(self, what: str, work: Callable[[], T]) -> T:
        with self.lock:
            if self.doing is not None:  # this thread's own, for the lock is held by it
                raise InvalidState(
                    f"{what}: a {self.doing} is under way on this thread, so a signal handler or "
                    "a state_dict() cannot "
                    "begin another call; note that it is wanted, and make it when that one has "
                    "returned"
                )
            try:
                self.doing = what
                return work()
            finally:
                self.doing = None


class Communicator(ABC):
    """The ranks of one job. `nodes` lists the ranks of every node, in order of their lowest rank
    (known from the first `together` on). number: of the call that is being made."""

    rank: int
    world_size: int
    nodes: list[list[int]]
    number: int = 0

    def exclusively(self, what: str, work: Callable[[], T], *, number: int | None = None) -> T:
        """Do `work`, all rounds of one call that every rank makes: `what`, in words. Other threads
        wait for their turn.

        number: where it has one; else it is the next one. Raises InvalidState on a thread that is
        in a call already.
        """
        turn: _Turn = self.__dict__.setdefault("_turn", _Turn())
        return turn.take(what, work)

    def leave(self, number: int, error: BaseException) -> None:  # noqa: B027
        """This rank does not make the call of that number, because of `error`: the others hear of
        it there."""

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """This rank has work of its own to do before its next call, and comes to it when that is
        done."""
        yield

    @abstractmethod
    def together(self, topic: str, local: Local, decide: Decide, *, joining: bool = False) -> Any:
        """Run `local` on every rank, then `decide` on rank 0 with all results by rank; its result
        is everybody's.

        What any rank raises, every rank raises: errors of ckptcore in their own type, others as
        RankFailed, with `causes` by rank. joining: ranks may not be here yet; they have
        `join_timeout` to come (JoinTimeout). Later rounds wait for as long as the others live
        (RankLost). Results must be plain values.
        """

    def share(self, buffer: memoryview, source: int) -> None:
        """Fill `buffer` on every rank with what it holds on rank `source`; it has the same length
        on all."""
        if self.world_size > 1:
            data = self.together(
                "share",
                lambda: bytes(buffer) if self.rank == source else b"",
                lambda parts: parts[source],
            )
            buffer[:] = data

    def branch(self, name: str) -> Communicator:
        """The same ranks in a conversation of their own, for another thread; every rank makes one
        of that `name`.

        One that returns itself has none, and then rounds of saves in the background mix with those
        of other calls.
        """
        return self

    def close(self) -> None:  # noqa: B027
        """Leave. Ranks that still wait for this one are told so."""


class SingleProcess(Communicator):
    """One rank: nothing to agree about."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.nodes = [[0]]

    def together(self, topic: str, local: Local, decide: Decide, *, joining: bool = False) -> Any:
        return decide([local()])

    def exclusively(self, what: str, work: Callable[[], T], *, number: int | None = None) -> T:
        return work()  # nobody else takes part, so a call in the middle of another one is fine


GONE = b"gone"
Message = dict[str, Any]


@dataclass(slots=True)
class _Pulse:
    value: bytes | None
    since: float
    seen: float


class BoardCommunicator(Communicator):
    """`together` over a Board. node: any name that equals that of the other ranks on this rank's
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

    def exclusively(self, what: str, work: Callable[[], T], *, number: int | None = None) -> T:
        if self._pid != os.getpid():
            raise InvalidState(
                f"{what}: the connections of this communicator are the parent process's; save there"
            )
        return self._turn.take(what, partial(self._whole_call, work, number))

    def _whole_call(self, work: Callable[[], T], number: int | None) -> T:
        try:
            if number is None or number != self.number:
                self._round, self._answered = 0, True
                self.number = self.number + 1 if number is None else number
            in_error = sys.exc_info()[1] is not None
            self._patient = (
                min(self.join_timeout, self.error_join_timeout) if in_error else self.join_timeout
            )
            return work()
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
            data = encode({"nodes": self.nodes, "failure": {**failure, **text}})
        else:
            what = {"topic": "", "call": self._turn.doing or "", "node": self.node, "left": True}
            data = encode({**what, "failure": failure})
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

    def together(self, topic: str, local: Local, decide: Decide, *, joining: bool = False) -> Any:
        run = partial(self._together, topic, local, decide, joining)
        if self._pid == os.getpid():
            with self._turn.lock:
                if self._turn.doing is not None:
                    return run()
        return self.exclusively(topic, run)

    def _together(self, topic: str, local: Local, decide: Decide, joining: bool) -> Any:
        if self._in_round:
            raise InvalidState(
                f"{topic}: a {self._turn.doing} is under way on this thread, in the middle of a "
                "round"
            )
        try:
            self._in_round = True
            return self._one_round(topic, local, decide, joining)
        finally:
            self._in_round = False

    def _one_round(self, topic: str, local: Local, decide: Decide, joining: bool) -> Any:
        self._answered = False
        self._round += 1
        own: BaseException | None = None
        message: Message = {"topic": topic, "call": self._turn.doing, "node": self.node}
        try:
            data = encode({**message, "value": local()})
        except Exception as error:
            own = error
            data = encode({**message, "failure": _failure(error)})
        verdict: dict[str, Any] = {"over": True}
        try:
            while "over" in verdict:
                self.board.put(self._key(self._round, rank=self.rank), data)
                if self.rank == 0:
                    verdict, failed = self._lead(topic, decide, joining)
                    own = own or failed
                else:
                    verdict = self._follow(topic, joining, message)
                    self.board.put(f"done/{self.rank}", b"%d %d" % (self.number, self._round))
                    self._tidy()
                    if joining and self._round == 1 and self._was_alone(verdict):
                        verdict = {"over": True}
                if "over" in verdict:
                    self.number += 1
        except BoardLost as error:
            raise RankLost(
                f"{self._named_as(topic)}: rank {self.rank} lost the connection to the store of "
                f"this job ({error}); "
                "the process that hosts it (rank 0) has probably died",
                ranks=[0],
            ) from error
        self.nodes = verdict["nodes"] or self.nodes
        if "failure" in verdict:
            raise self._everybodys(_rebuilt(verdict["failure"], own)) from _cause_of(own)
        return verdict["value"]

    def _was_alone(self, verdict: dict[str, Any]) -> bool:
        """Whether this is the failure of a call that others made without this rank and that is
        over: another one than this rank makes now, or rank 0 makes this one again already. A rank
        that comes late to it shares the failure."""
        if self.rank not in verdict.get("absent", ()):
            return False
        leader = self.board.get("leader")
        again = _place(leader) > (self.number, 1) and _words(leader) == self._turn.doing
        return verdict["call"] != self._turn.doing or again

    def _are_over(self, messages: list[Message]) -> bool:
        """The same of calls that ranks gave up waiting for rank 0."""
        for rank, message in enumerate(messages):
            if "late" in message:
                if message["call"] != self._turn.doing:
                    return True
                later = self.board.get(self._key(1, self.number + 1, rank))
                if later is not None and decode(later)["call"] == self._turn.doing:
                    return True
        return False

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

    def _lead(
        self, topic: str, decide: Decide, joining: bool
    ) -> tuple[dict[str, Any], BaseException | None]:
        verdict: dict[str, Any] = {"nodes": self.nodes}
        cause: BaseException | None = None
        messages: list[Message] = []
        try:
            where = f"{self.number} {self._round} {self._turn.doing}"
            self.board.put("leader", where.encode("utf-8", "backslashreplace"))
            messages = self._gather(topic, joining)
            if joining and self._round == 1 and self._are_over(messages):
                self.board.put(out := self._key(1), encode({"over": True}))
                self._unread.append(out)
                return {"over": True}, None
            self.nodes = verdict["nodes"] = _nodes([message["node"] for message in messages])
            _raise_failures(topic, messages, joining)
            verdict["value"] = decide([message["value"] for message in messages])
            data = encode(verdict)
        except BoardLost:
            raise
        except Exception as error:
            cause = error
            verdict = {"nodes": verdict["nodes"], "failure": _failure(error)}
            if isinstance(error, JoinTimeout):
                verdict |= {"absent": error.ranks or [], "call": self._turn.doing}
            data = encode(verdict)
        self.board.put(out := self._key(self._round), data)
        self._answered = True
        self._unread.append(out)
        if cause is not None:
            gone = [
                rank
                for rank, message in enumerate(messages)
                if "left" in message or "late" in message
            ]
            self._wait_for_readers(READ_SECONDS, {*range(1, self.world_size)} - {*gone})
        return verdict, cause

    def _gather(self, topic: str, joining: bool) -> list[Message]:
        """All ranks' messages of a round, in order of rank; and the keys of the rounds before are
        removed."""
        started = time.monotonic()
        deadline = started + (self._patient if joining else self.work_timeout)
        keys = [self._key(self._round, rank=rank) for rank in range(self.world_size)]
        # A round whose messages have all come proves that the rounds before it were read by
        # everybody.
        found: list[Message] = []
        said = not joining
        for rank, key in enumerate(keys):
            while (data := self.board.wait(key, self._patience(deadline))) is None:
                missing = [
                    r for r in range(rank, self.world_size) if self.board.get(keys[r]) is None
                ]
                self._check_alive(topic, missing)
                now = time.monotonic()
                if joining and any(self._works(r) for r in missing):
                    deadline = max(deadline, now + self._patient)
                said = said or self._say(started, missing)
                if missing and now > deadline:
                    self._lost.update(missing)
                    self._unread += keys
                    raise self._absent(topic, missing, joining)
            found.append(decode(data))
        self._lost.clear()
        for key in (*keys, *self._unread):
            self.board.delete(key)
        self._unread = []
        return found

    def _say(self, started: float, missing: list[int]) -> bool:
        """Say, when it has been long enough, whom this call waits for."""
        seconds = time.monotonic() - started
        if seconds < PATIENT_SECONDS or not missing:
            return False
        log.warning(
            "%s: waiting for %s since %.0f s", self._turn.doing, _rank_names(missing), seconds
        )
        return True

    def _follow(self, topic: str, joining: bool, message: Message) -> dict[str, Any]:
        began = started = time.monotonic()
        key, place = f"{self.number}/{self._round}/out", (self.number, self._round)
        said = not joining
        while (data := self.board.wait(key, self._patience(started + self.work_timeout))) is None:
            self._check_alive(topic, [0])
            now = time.monotonic()
            if joining and _place(self.board.get("leader")) < place:
                said = said or self._say(began, [0])
                started = now if self._works(0) else started
                if now - started > self._patient:
                    self._give_up(topic, message)
            if now > began + self.work_timeout + self.liveness_timeout:
                raise self._absent(topic, [0], joining=False)
        verdict: dict[str, Any] = decode(data)
        self._answered = True
        return verdict

    def _give_up(self, topic: str, message: Message) -> None:
        """Raise JoinTimeout for rank 0, unless it has come.

        Rank 0 says that it is here before it reads what the others brought. So either it finds this
        message and fails too when it comes, or it has come by now and its verdict is waited for.
        """
        absent = self._absent(topic, [0], joining=True)
        self.board.put(
            self._key(self._round), encode({**message, "failure": _failure(absent), "late": True})
        )
        if _place(self.board.get("leader")) < (self.number, self._round):
            raise self._everybodys(absent)

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
            encode(value := getattr(error, name))
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
