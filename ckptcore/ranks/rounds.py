"""Rounds over a blackboard, without collectives.

Ranks talk on connections of their own, so neither side of a save can interleave with, or wait for,
the training's communication. What one rank raises, all ranks raise; a rank that dies, stops or
never comes is named within a bounded time.

A call has a number, and its rounds are counted from 1. A rank that leaves a call by an error that
is not everybody's, Ctrl-C above all, posts that error in its place, in the round that it is in and
in the next one, so that nobody waits for it; and the next call has the same number on all ranks,
whatever became of this one.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import CheckpointError, InvalidState, JoinTimeout, RankLost, RanksDisagree
from .board import Board, BoardLost, PartOfBoard
from .communicator import Communicator, Round, Turn
from .liveness import Heart, Watch
from .messages import Failure, message, packed, unpacked

log = logging.getLogger("ckptcore")

# A call that waits for ranks says so, once, after this many seconds.
PATIENT_SECONDS = 30.0
# A verdict that is longer is posted once, not once for each rank.
LARGE_BYTES = 4096
# How long rank 0 lets the others read that a call has failed before it raises: its program may end
# then, and the board with it.
READ_SECONDS = 2.0


@message
@dataclass(frozen=True, slots=True, order=True)
class RoundId:
    """A round, and where on the board it is held. number: in its call; 0 before the first."""

    call: int
    number: int

    @property
    def verdict(self) -> str:
        """Where rank 0 posts a large verdict, once for all."""
        return f"{self.call}/{self.number}/out"

    def to_rank(self, rank: int) -> str:
        """Where rank 0 posts the verdict for a rank, or b"" for a large one. It is read by that
        rank alone, which can therefore end its own wait."""
        return f"{self.call}/{self.number}/out/{rank}"

    def of_rank(self, rank: int) -> str:
        """Where a rank posts what it brings."""
        return f"{self.call}/{self.number}/in/{rank}"

    def read_by(self, rank: int) -> str:
        """Where a rank posts that it has the verdict: of rounds that failed, and of last ones."""
        return f"{self.call}/{self.number}/read/{rank}"

    def next_round(self) -> RoundId:
        return RoundId(self.call, self.number + 1)

    def next_call(self) -> RoundId:
        return RoundId(self.call + 1, self.number)


@message
@dataclass(frozen=True, slots=True)
class Report:
    """What a rank brings to a round. call: of which call, in words; None where it has no words.
    left: it has left the call. late: it has given up waiting for rank 0."""

    topic: str
    call: str | None
    node: str
    value: Any = None
    failure: Failure | None = None
    left: bool = False
    late: bool = False


@message
@dataclass(frozen=True, slots=True)
class Verdict:
    """What rank 0 answers. call: in words. absent: ranks that did not come to it. over: all have
    left this call before; each goes on to the next one."""

    nodes: list[list[int]]
    call: str | None
    value: Any = None
    failure: Failure | None = None
    absent: list[int] = field(default_factory=list)
    over: bool = False


@message
@dataclass(frozen=True, slots=True)
class Leader:
    """Where rank 0 is."""

    at: RoundId
    call: str | None


NOWHERE = packed(Leader(RoundId(0, 0), None))


class BoardCommunicator(Communicator):
    """The ranks of a job that share a board.

    node: any name that equals that of the other ranks on this rank's node.
    join_timeout: seconds that a rank may come later than the others.
    error_join_timeout: the same, where it is less, for a call that is made while an exception is
    being handled: others may well not come to it, and the exception is not to be hidden for long.
    liveness_timeout: seconds without a heartbeat after which a rank counts as lost.
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
        trunk: BoardCommunicator | None = None,
    ) -> None:
        self.board, self.rank, self.world_size, self.node = board, rank, world_size, node
        self.join_timeout, self.error_join_timeout = join_timeout, error_join_timeout
        self.liveness_timeout, self.work_timeout = liveness_timeout, work_timeout
        self.nodes = [] if trunk is None else trunk.nodes
        self.at = RoundId(0, 0)
        self._turn = Turn()
        self._in_round = False
        self._answered = True  # whether this rank has the verdict of its round, or has given it
        self._answering: Verdict | None = None  # which some ranks may have, and others not yet
        self._last = self.at  # the last round that rank 0 answered, or that this rank has read
        self._patience = join_timeout  # that of this call
        self._unread: list[str] = []  # to be removed when all ranks have gone on
        self._lost: set[int] = set()
        self._branches: list[BoardCommunicator] = []
        self._named: Counter[str] = Counter()
        self._trunk, self._closed, self._pid = trunk, False, os.getpid()
        self.heart: Heart = (
            Heart(board, rank, liveness_timeout / 8) if trunk is None else trunk.heart
        )
        self._watch = Watch(self.heart.board, board, liveness_timeout)
        _open.add(self)

    @property
    def number(self) -> int:  # type: ignore[override]
        return self.at.call

    # Coming and going.

    def branch(self, name: str) -> BoardCommunicator:
        # What an earlier branch of that name left on the board is none of this one's.
        number = self._named[name] + 1
        made = BoardCommunicator(
            PartOfBoard(self.board, f"{name}/{number}"),
            self.rank,
            self.world_size,
            node=self.node,
            join_timeout=self.join_timeout,
            error_join_timeout=self.error_join_timeout,
            liveness_timeout=self.liveness_timeout,
            work_timeout=self.work_timeout,
            trunk=self,
        )
        self._named[name] = number  # now that it is made: one that was interrupted does not count
        self._branches = [*(branch for branch in self._branches if not branch._closed), made]
        return made

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # a forked child has none of the threads, and the connections are its parent's
        for branch in self._branches:
            branch.close()
        if self._closed:
            return
        if self.rank == 0:
            self._wait_for_readers(min(10.0, self.liveness_timeout))
        self._closed = True
        if self._trunk is None:
            self.heart.stop()
            self.heart.join(self.liveness_timeout)
            self.board.close()
        elif not self.heart.stopped.is_set():
            self._watch.board.post(f"left/{self.rank}", b"1")

    def fall_silent(self) -> None:
        """End like a process that was killed: no word to anybody. For tests."""
        self.heart.stop(silent=True)
        for communicator in (*self._branches, self):
            communicator._closed = True

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        with self.heart.works(self.board):
            yield

    def _wait_for_readers(self, seconds: float, gone: Collection[int] = ()) -> None:
        """The process of rank 0 often hosts the board: it stays until the others have read the last
        verdict."""
        others = {*range(1, self.world_size)} - self._lost - {*gone}
        waiting = {rank: self._last.read_by(rank) for rank in sorted(others)}
        keys = list(waiting.values()) if self._last.call else []
        deadline = time.monotonic() + seconds
        with suppress(BoardLost):
            while keys and self.board.wait(keys, min(0.05, deadline - time.monotonic())) is None:
                unread = [r for r, key in waiting.items() if self.board.get(key) is None]
                if time.monotonic() > deadline or all(map(self._watch.has_left, unread)):
                    break
            else:
                return
            self.board.give_up(keys)

    # Calls and rounds.

    @contextmanager
    def call(self, what: str, *, number: int | None = None) -> Iterator[None]:
        if self._pid != os.getpid():
            raise InvalidState(
                f"{what}: the connections of this communicator are the parent process's; save there"
            )
        with self._turn.taken(what):
            self._in_round = False
            try:
                if not self.heart.lives():
                    self.heart.start()
                if number is None or number != self.number:
                    self.at = RoundId(self.number + 1 if number is None else number, 0)
                    self._answered, self._answering = True, None
                in_error = sys.exc_info()[1] is not None
                shorter = min(self.join_timeout, self.error_join_timeout)
                self._patience = shorter if in_error else self.join_timeout
                yield
            except BaseException as error:
                self.leave(self.number, error)
                raise
            self._say_read()

    def leave(self, number: int, error: BaseException) -> None:
        """Have the others fail in the round where they wait for this rank, with what it failed
        with.

        That is this round, or the next one if they have gone on. Nothing when all ranks have raised
        this already.
        """
        at = self.at if number == self.number else RoundId(number, 0)
        if at == self.at:
            if self._answering is not None:
                with suppress(BoardLost):
                    self._answer(self._answering)
            self._say_read()
        if getattr(error, "raised_in", None) == at:
            return
        failure, call = Failure.of(error), self._turn.doing
        rounds = [at.next_round()] if self._answered or not at.number else [at, at.next_round()]
        for now in rounds:
            if self.rank == 0:  # what was said before stays: some may have read it
                data = packed(Verdict(self.nodes, call, failure=failure.of_rank(0)))
                for rank in range(1, self.world_size):
                    self.board.offer(now.to_rank(rank), data)
                    self._unread.append(now.to_rank(rank))
                self._unread += self._reports(now)
            else:
                report = Report("", call or "", self.node, failure=failure, left=True)
                self.board.post(now.of_rank(self.rank), packed(report))
                self._unread.append(now.of_rank(self.rank))
        if self.rank == 0:
            self._last = rounds[0]
            if rounds[0] == at:
                self.board.give_up(self._reports(at))

    def conclude(self, verdict: Any) -> None:
        if self.rank == 0 and not self._answered:
            with suppress(BoardLost):
                self._answer(Verdict(self.nodes, self._turn.doing, verdict))

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
            raised: Exception | None = None
            try:
                self._in_round, self._answered = True, False
                self.at = self.at.next_round()
                now = _BoardRound(self, topic, joining)
                try:
                    yield now
                except Exception as error:
                    raised = error
                now.end(raised)
            except BaseException as error:
                if raised is not None:  # what takes its place has come about where it has
                    error.__context__ = raised.__context__
                raise
            finally:
                self._in_round = False

    def _say_read(self) -> None:
        """Say, once, that this rank has the verdict of this round; rank 0 removes it later."""
        if not self._answered or self.at in (self._last, RoundId(self.number, 0)):
            return
        if self.rank == 0:
            self._unread += [self.at.read_by(rank) for rank in range(1, self.world_size)]
        else:
            self.board.post(self.at.read_by(self.rank), b"1")
        self._last = self.at

    def _answer(self, verdict: Verdict) -> None:
        """Post the verdict of this round to all. Raises UnsupportedValue before anything is
        posted. Where it is interrupted, `leave` posts it to the rest."""
        data = packed(verdict)
        self._answering = None if verdict.over else verdict
        keys = [self.at.to_rank(rank) for rank in range(1, self.world_size)]
        try:
            if len(data) > LARGE_BYTES:
                self.board.put(self.at.verdict, data)
                self._unread.append(self.at.verdict)
                data = b""
            self.board.put_all(keys, data)
        except BoardLost:  # nobody gets it
            self._answering = None
            raise
        self._unread += keys
        self._answered, self._answering = not verdict.over, None

    def _reports(self, at: RoundId) -> list[str]:
        """Where the others post what they bring to a round."""
        return [at.of_rank(rank) for rank in range(1, self.world_size)]

    def _forget(self, others: Collection[str] = ()) -> None:
        """Remove what was posted in earlier calls and rounds: all ranks have gone on."""
        self.board.delete([*others, *self._unread])
        self._unread = []

    def _named_as(self, topic: str) -> str:
        """What is being done, for messages: the call that the user has made, and which part of
        it."""
        what = self._turn.doing or topic
        return what if what == topic else f"{what} ({topic})"

    def _seconds(self, deadline: float) -> float:
        """How long to wait before the next look at who lives."""
        shortest = min(self.liveness_timeout / 4, self._patience / 4, PATIENT_SECONDS / 2)
        return max(0.0, min(shortest, deadline - time.monotonic()))

    def _absent(self, topic: str, ranks: list[int], joining: bool) -> CheckpointError:
        who = _rank_names(ranks)
        if joining:
            return JoinTimeout(
                f"{self._turn.doing}: {who} did not join within {self._patience:g} s; the call "
                "must be made on every rank, not only on some "
                f"(the other {self.world_size - len(ranks)} of {self.world_size} ranks are here)",
                ranks=ranks,
            )
        what = f"{self._named_as(topic)}: {who} did not finish within {self.work_timeout:g} s"
        return RankLost(what, ranks=ranks)

    def _check_alive(self, topic: str, ranks: list[int]) -> None:
        """RankLost when the heartbeat of one of `ranks` stopped, or it said that it leaves."""
        lost, left = self._watch.lost_and_left(ranks)
        if lost or left:
            self._lost.update(lost, left)
            what = (
                f"the heartbeat of {_rank_names(lost)} stopped {self.liveness_timeout:g} s ago: "
                "dead, stopped or cut off"
                if lost
                else f"{_rank_names(left)} left the job: its manager was closed before this call, "
                "by an error (see its log) or because the call is not made on every rank"
            )
            raise RankLost(f"{self._named_as(topic)}: {what}", ranks=lost or left)


class _BoardRound(Round):
    """A round over a board. Every rank but 0 posts what it brings, rank 0 its verdict; on every
    path out of the block, and not before it, so that a rank that fails in the block brings that."""

    def __init__(self, comm: BoardCommunicator, topic: str, joining: bool) -> None:
        self.comm, self.topic, self.joining, self.leads = comm, topic, joining, comm.rank == 0
        self.first = joining and comm.at.number == 1
        self.call = comm._turn.doing
        self.report: Report | None = None  # what this rank brings, from `gather` on
        self.data = b""
        self.reports: list[Report] = []  # on rank 0: of all
        self.failed: Exception | None = None  # on rank 0: in `gather`
        self.warned, self.began = not joining, time.monotonic()

    def gather(self, value: Any = None) -> list[Any]:
        if self.report is not None:
            raise InvalidState(f"{self.topic}: a rank can gather once in a round")
        self._bring(value=value)
        return self._gathered() if self.leads else [value]

    def _bring(self, **what: Any) -> None:
        report = Report(self.topic, self.call, self.comm.node, **what)
        self.data = packed(report)
        self.report = report

    def end(self, raised: Exception | None) -> None:
        """Post what is due when the block is left, by `raised` if by an error; and raise what all
        ranks raise."""
        comm = self.comm
        try:
            if self.report is None and raised is None:
                try:
                    self.gather()
                except Exception as error:
                    raised = error
            if raised is not None and (self.report is None or not self.leads):
                self._bring(failure=Failure.of(raised))
            verdict = self._lead(raised) if self.leads else self._follow()
        except BoardLost as error:
            raise RankLost(
                f"{comm._named_as(self.topic)}: rank {comm.rank} lost the connection to the store "
                f"of this job ({error}); the process that hosts it (rank 0) has probably died",
                ranks=[0],
            ) from error
        comm.nodes = verdict.nodes or comm.nodes
        if verdict.failure is None:
            self.verdict = verdict.value
            return
        failed = verdict.failure.error()
        if isinstance(raised, CheckpointError):
            # It says the same as the one that takes its place, and would be printed twice.
            for note in getattr(raised, "__notes__", ()):
                failed.add_note(note)
            raised = raised.__cause__  # type: ignore[assignment]
        raise self._of_all(failed) from raised

    def _of_all(self, error: CheckpointError) -> CheckpointError:
        """Mark what all ranks raise, so that it is not posted once more when the call is left."""
        error.raised_in = self.comm.at  # type: ignore[attr-defined]
        return error

    def _say_whom(self, ranks: list[int]) -> None:
        """Say once, when it has been long enough, whom this call waits for."""
        seconds = time.monotonic() - self.began
        if not self.warned and seconds >= PATIENT_SECONDS and ranks:
            self.warned = True
            who = _rank_names(ranks)
            log.warning("%s: waiting for %s since %.0f s", self.call, who, seconds)

    # Rank 0.

    def _gathered(self) -> list[Any]:
        """The values of all ranks. Raises what any has failed with."""
        comm = self.comm
        try:
            while True:
                if self.joining:
                    comm.board.put("leader", packed(Leader(comm.at, self.call)))
                self.reports = self._all_reports()
                if not self.first or not self._are_over():
                    break
                comm._answer(Verdict([], self.call, over=True))
                comm.at = comm.at.next_call()
            comm.nodes = _nodes([report.node for report in self.reports])
            _raise_failures(self.topic, self.reports, self.joining)
            return [report.value for report in self.reports]
        except Exception as error:
            self.failed = error
            raise

    def _lead(self, raised: Exception | None) -> Verdict:
        """Post the verdict, or the failure."""
        comm = self.comm
        if not self.reports and self.failed is None:
            # It failed before it heard of the others; what they bring is read all the same.
            with suppress(CheckpointError):
                self._gathered()
        if isinstance(self.failed, BoardLost):
            raise self.failed
        error = self.failed or raised
        verdict = Verdict(comm.nodes, self.call, self.verdict)
        if error is None:
            try:
                comm._answer(verdict)
            except BoardLost:
                raise
            except Exception as unfit:
                error = unfit
        if error is not None:
            absent = error.ranks or [] if isinstance(error, JoinTimeout) else []
            failure = Failure.of(error)
            verdict = Verdict(comm.nodes, self.call, failure=failure, absent=absent)
            comm._answer(verdict)
        if error is not None:
            comm._say_read()
            gone = [r for r, report in enumerate(self.reports) if report.left or report.late]
            comm._wait_for_readers(READ_SECONDS, gone)
        return verdict

    def _all_reports(self) -> list[Report]:
        """All ranks' reports of this round, in order of rank."""
        comm = self.comm
        deadline = time.monotonic() + (comm._patience if self.joining else comm.work_timeout)
        keys = comm._reports(comm.at)
        while (found := comm.board.wait(keys, comm._seconds(deadline))) is None:
            missing = [r for r, key in enumerate(keys, 1) if comm.board.get(key) is None]
            try:
                comm._check_alive(self.topic, missing)
                now = time.monotonic()
                if self.joining and any(map(comm._watch.works, missing)):
                    deadline = max(deadline, now + comm._patience)
                self._say_whom(missing)
                if missing and now > deadline:
                    comm._lost.update(missing)
                    raise comm._absent(self.topic, missing, self.joining)
            except CheckpointError:
                comm._unread += keys
                comm.board.give_up(keys)
                raise
        # That all have come proves that everybody has read what was said in the rounds before.
        comm._lost.clear()
        comm._forget(keys)
        return [unpacked(data) for data in (self.data, *found)]

    def _are_over(self) -> bool:
        """Whether these reports are of a call in which ranks gave up waiting for rank 0: another
        one than it makes now, or this one, which they make again already."""
        comm = self.comm
        for rank, report in enumerate(self.reports):
            if report.late:
                again = comm.board.get(comm.at.next_call().of_rank(rank))
                if report.call != self.call or (
                    again is not None and unpacked(again).call == self.call
                ):
                    return True
        return False

    # The other ranks.

    def _follow(self) -> Verdict:
        """Post what this rank brings, and wait for the verdict."""
        comm = self.comm
        while True:
            comm.board.put(comm.at.of_rank(comm.rank), self.data)
            try:
                verdict = self._awaited()
            except BaseException:
                comm.board.give_up([comm.at.to_rank(comm.rank)])
                raise
            if [key for key in comm._unread if int(key.split("/")[0]) < comm.number]:
                comm._forget()  # rank 0 has gone on to another call
            if verdict.failure is not None:
                comm._say_read()
            if not verdict.over and not (self.first and self._was_alone(verdict)):
                return verdict
            comm.at = comm.at.next_call()

    def _awaited(self) -> Verdict:
        comm, at, started = self.comm, self.comm.at, time.monotonic()
        end = started + comm.work_timeout + comm.liveness_timeout
        keys = [at.to_rank(comm.rank)]
        while (found := comm.board.wait(keys, comm._seconds(end))) is None:
            comm._check_alive(self.topic, [0])
            now = time.monotonic()
            if self.joining and self._leader().at < at:
                self._say_whom([0])
                started = now if comm._watch.works(0) else started
                if now - started > comm._patience:
                    self._give_up()
            if now > end:
                raise comm._absent(self.topic, [0], joining=False)
        verdict: Verdict = unpacked(found[0] or comm.board.get(at.verdict) or b"")
        comm._answered = True
        return verdict

    def _leader(self) -> Leader:
        leader: Leader = unpacked(self.comm.board.get("leader") or NOWHERE)
        return leader

    def _was_alone(self, verdict: Verdict) -> bool:
        """Whether this is the failure of a call that others made without this rank and that is
        over: another one than this rank makes now, or rank 0 makes this one again already. A rank
        that comes late to it shares the failure."""
        if self.comm.rank not in verdict.absent:
            return False
        leader = self._leader()
        again = leader.at > RoundId(self.comm.number, 1) and leader.call == self.call
        return verdict.call != self.call or again

    def _give_up(self) -> None:
        """Raise JoinTimeout for rank 0, unless it has come.

        Rank 0 says that it is here before it reads what the others brought. So either it finds this
        report and fails too when it comes, or it has come by now and its verdict is waited for.
        """
        comm, absent = self.comm, self.comm._absent(self.topic, [0], joining=True)
        self._bring(failure=Failure.of(absent), late=True)
        comm.board.put(comm.at.of_rank(comm.rank), self.data)
        if self._leader().at < comm.at:
            raise self._of_all(absent)


def _rank_names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:16]))
    return f"ranks {shown}{f' and {len(ranks) - 16} more' if len(ranks) > 16 else ''}"


def _nodes(names: list[str]) -> list[list[int]]:
    """Ranks by node, nodes in order of their lowest rank."""
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return list(nodes.values())


def _raise_failures(topic: str, reports: list[Report], joining: bool) -> None:
    """The failure of the lowest rank that has one; RanksDisagree for calls that do not belong to
    each other.

    A rank that fails in the middle of a call may be in another round than the others; what it
    failed with counts.
    """
    failed = {rank: r.failure for rank, r in enumerate(reports) if r.failure is not None}
    topics = {report.topic for report in reports if not report.left}
    if len(topics) > 1 and (joining or not failed):
        calls = "; ".join(
            f"{t}: {_rank_names([rank for rank, r in enumerate(reports) if r.topic == t])}"
            for t in sorted(topics)
        )
        raise RanksDisagree(
            f"the ranks make different calls: {calls}",
            ranks=[rank for rank, report in enumerate(reports) if report.topic != topic],
        )
    if failed:
        rank, first = next(iter(failed.items()))
        rest = [other for other in failed if other != rank]
        more = f" (also failed: {_rank_names(rest)})" if rest else ""
        causes = {rank: failure.cause() for rank, failure in failed.items()}
        raise replace(first, message=f"rank {rank}: {first.message}{more}", causes=causes).error()


_open: weakref.WeakSet[BoardCommunicator] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """At the end of a program that has not closed them: threads that go on into the end of the
    interpreter can crash it."""
    found = [comm for comm in _open if comm._pid == os.getpid() and not comm._closed]
    deadline = time.monotonic() + READ_SECONDS
    for comm in found:
        if comm.rank == 0:  # an error that ends this program is the others' error, too
            comm._wait_for_readers(deadline - time.monotonic())
    for comm in found:
        comm.heart.stop()
    for comm in found:
        comm.heart.join(1.0)
    for comm in found:
        comm.board.close()
