"""How ranks agree, without collectives: every rank brings its part, rank 0 decides, all get the same answer.

One operation carries joins, receipts, verdicts and errors: `together`. Ranks talk through a small blackboard on a
connection of its own, so neither side of a save can interleave with, or wait for, the training's communication. What
one rank raises, all ranks raise; a rank that dies, stops or never comes is named within a bounded time.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .. import errors
from ..errors import CheckpointError, CoordinationError, JoinTimeout, RankFailed, RankLost, RanksDisagree
from ..format.values import decode, encode
from .board import Board, BoardLost, MemoryBoard, PartOfBoard

__all__ = ["Board", "BoardCommunicator", "BoardLost", "Communicator", "Local", "MemoryBoard", "SingleProcess"]

Local = Callable[[], Any]
Decide = Callable[[list[Any]], Any]


class Communicator(ABC):
    """The ranks of one job. `nodes` lists the ranks of every node, in order of their lowest rank (known from the
    first `together` on)."""

    rank: int
    world_size: int
    nodes: list[list[int]]

    def stay(self) -> None:  # noqa: B027
        """Rank 0 has work of its own to do before the next `together`, and will come to it whatever that takes."""

    @abstractmethod
    def together(self, topic: str, local: Local, decide: Decide, *, joining: bool = False) -> Any:
        """Run `local` on every rank, then `decide` on rank 0 with all results by rank; its result is everybody's.

        What any rank raises, every rank raises: errors of ckptcore in their own type, others as RankFailed, with
        `causes` by rank. joining: ranks may not be here yet; they have `join_timeout` to come (JoinTimeout). Later
        rounds wait for as long as the others live (RankLost). Results must be plain values.
        """

    def share(self, buffer: memoryview, source: int) -> None:
        """Fill `buffer` on every rank with what it holds on rank `source`; it has the same length on all."""
        if self.world_size > 1:
            data = self.together(
                "share", lambda: bytes(buffer) if self.rank == source else b"", lambda parts: parts[source]
            )
            buffer[:] = data

    def branch(self, name: str) -> Communicator:
        """The same ranks in a conversation of their own, for another thread; every rank makes one of that `name`."""
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


GONE = b"gone"


@dataclass(slots=True)
class _Pulse:
    value: bytes | None
    since: float


class BoardCommunicator(Communicator):
    """`together` over a Board. node: any name that equals that of the other ranks on this rank's node.

    join_timeout: seconds that a rank may come later than the others. liveness_timeout: seconds without a heartbeat
    after which a rank counts as lost. work_timeout: seconds after which even a living rank is not waited for.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        *,
        node: str = "",
        join_timeout: float = 600.0,
        liveness_timeout: float = 60.0,
        work_timeout: float = 6 * 3600.0,
    ) -> None:
        self.board, self.rank, self.world_size, self.node = board, rank, world_size, node
        self.join_timeout, self.liveness_timeout, self.work_timeout = join_timeout, liveness_timeout, work_timeout
        self.nodes: list[list[int]] = []
        self._round = 0
        self._unread: list[str] = []
        self._pulses: dict[int, _Pulse] = {}
        self._branches: list[BoardCommunicator] = []
        self._named: Counter[str] = Counter()
        self._lost: set[int] = set()
        self._stop = threading.Event()
        self._silent = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._heart = threading.Thread(
            target=self._beat, args=(board.second(),), name="ckptcore-heartbeat", daemon=True
        )
        self._heart.start()
        _beating.add(self)

    def _beat(self, board: Board) -> None:
        count = 0
        try:
            while True:
                board.put(f"alive/{self.rank}", b"%d" % count)
                count += 1
                if self._stop.wait(self.liveness_timeout / 8):
                    if not self._silent:
                        board.put(f"alive/{self.rank}", GONE)
                    return
        except BoardLost:
            return  # whoever waits finds out on its own connection
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
            self._wait_for_readers()
        self._stop.set()
        self._heart.join(self.liveness_timeout)
        self.board.close()

    def stay(self) -> None:
        if self.rank == 0:
            self.board.put("leader", b"%d" % (self._round + 1))

    def branch(self, name: str) -> BoardCommunicator:
        # What an earlier branch of that name left on the board is none of this one's.
        self._named[name] += 1
        made = BoardCommunicator(
            PartOfBoard(self.board.second(), f"{name}/{self._named[name]}"), self.rank, self.world_size, node=self.node,
            join_timeout=self.join_timeout, liveness_timeout=self.liveness_timeout, work_timeout=self.work_timeout)  # fmt: skip
        made.nodes = self.nodes
        self._branches.append(made)
        return made

    def fall_silent(self) -> None:
        """End like a process that was killed: no word to anybody. For tests."""
        for communicator in (*self._branches, self):
            communicator._silent = True
            communicator._stop.set()

    def _wait_for_readers(self) -> None:
        """The process of rank 0 often hosts the board: it stays until the others have read the last verdict."""
        deadline = time.monotonic() + min(10.0, self.liveness_timeout)
        waiting = set(range(1, self.world_size)) - self._lost if self._round else set()
        try:
            while waiting and time.monotonic() < deadline:
                for rank in sorted(waiting):
                    done, alive = self.board.get(f"done/{rank}"), self.board.get(f"alive/{rank}")
                    if int(done or b"0") >= self._round or alive in (GONE, None):
                        waiting.discard(rank)
                self._stop.wait(0.01)
        except BoardLost:
            pass

    def together(self, topic: str, local: Local, decide: Decide, *, joining: bool = False) -> Any:
        with self._lock:
            self._round += 1
            return self._together(self._round, topic, local, decide, joining)

    def _together(self, number: int, topic: str, local: Local, decide: Decide, joining: bool) -> Any:
        own: BaseException | None = None
        message: dict[str, Any] = {"topic": topic, "node": self.node}
        try:
            message["value"] = local()
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            own = error
            message["failure"] = _failure(error)
        try:
            self.board.put(f"{number}/in/{self.rank}", encode(message))
            if own is not None and not isinstance(own, Exception):
                raise own  # on the way out of the process: the others are told, and not waited for
            if self.rank == 0:
                verdict, failed = self._lead(number, topic, decide, joining)
                own = own or failed
            else:
                verdict = self._follow(number, topic, joining)
                self.board.put(f"done/{self.rank}", b"%d" % number)
        except BoardLost as error:
            raise RankLost(
                f"{topic}: rank {self.rank} lost the connection to the store of this job ({error}); "
                "the process that hosts it (rank 0) has probably died", ranks=[0]) from error  # fmt: skip
        self.nodes = verdict["nodes"]
        if "failure" in verdict:
            raise _rebuilt(verdict["failure"], own) from _cause_of(own)
        return verdict["value"]

    def _lead(
        self, number: int, topic: str, decide: Decide, joining: bool
    ) -> tuple[dict[str, Any], BaseException | None]:
        verdict: dict[str, Any] = {"nodes": self.nodes, "failure": _failure(CoordinationError(f"{topic}: rank 0 left"))}
        cause: BaseException | None = None
        try:
            self.board.put("leader", b"%d" % number)
            messages = self._gather(number, topic, joining)
            self.nodes = verdict["nodes"] = _nodes([message["node"] for message in messages])
            _raise_failures(topic, messages)
            value = decide([message["value"] for message in messages])
            encode(value)
            verdict = {"nodes": self.nodes, "value": value}
        except BoardLost:
            raise
        except Exception as error:
            cause = error
            verdict["failure"] = _failure(error)
        finally:
            self.board.put(f"{number}/out", encode(verdict))
        return verdict, cause

    def _gather(self, number: int, topic: str, joining: bool) -> list[dict[str, Any]]:
        """All ranks' messages of a round, in order of rank; and the keys of the round before are removed."""
        deadline = time.monotonic() + (self.join_timeout if joining else self.work_timeout)
        keys = [f"{number}/in/{rank}" for rank in range(self.world_size)]
        # A round whose messages have all come proves that the rounds before it were read by everybody.
        self._unread += [f"{number - 1}/out"]
        found: list[dict[str, Any]] = []
        for rank, key in enumerate(keys):
            while (data := self.board.wait(key, self._patience(deadline))) is None:
                missing = [r for r in range(rank, self.world_size) if self.board.get(keys[r]) is None]
                self._check_alive(topic, missing)
                if missing and time.monotonic() > deadline:
                    self._lost.update(missing)
                    self._unread += keys
                    raise self._absent(topic, missing, joining)
            found.append(decode(data))
        self._lost.clear()
        for old in (*keys, *self._unread):
            self.board.delete(old)
        self._unread = []
        return found

    def _follow(self, number: int, topic: str, joining: bool) -> dict[str, Any]:
        started = time.monotonic()
        key = f"{number}/out"
        deadline = started + self.work_timeout
        while (data := self.board.wait(key, self._patience(deadline))) is None:
            self._check_alive(topic, [0])
            late = time.monotonic() - started > self.join_timeout
            if late and joining and int(self.board.get("leader") or b"0") < number:
                # Rank 0 says that it is here before it reads what the others brought. So either it finds this message
                # and fails too when it comes, or it has come by now and its verdict is waited for.
                absent = self._absent(topic, [0], joining)
                message = {"topic": topic, "node": self.node, "failure": _failure(absent)}
                self.board.put(f"{number}/in/{self.rank}", encode(message))
                if int(self.board.get("leader") or b"0") < number:
                    raise absent
            if time.monotonic() > deadline + self.liveness_timeout:
                raise self._absent(topic, [0], joining=False)
        verdict: dict[str, Any] = decode(data)
        return verdict

    def _patience(self, deadline: float) -> float:
        return max(0.0, min(self.liveness_timeout / 4, self.join_timeout / 4, deadline - time.monotonic()))

    def _absent(self, topic: str, ranks: list[int], joining: bool) -> CoordinationError:
        who = _rank_names(ranks)
        if joining:
            return JoinTimeout(
                f"{topic}: {who} did not join within {self.join_timeout:g} s; the call must be made on every rank, not "
                f"only on some (the other {self.world_size - len(ranks)} of {self.world_size} ranks are here)", ranks=ranks)  # fmt: skip
        return RankLost(f"{topic}: {who} did not finish within {self.work_timeout:g} s", ranks=ranks)

    def _check_alive(self, topic: str, ranks: Iterable[int]) -> None:
        """RankLost when the heartbeat of one of `ranks` stopped, or it said that it leaves."""
        now = time.monotonic()
        lost, left = [], []
        for rank in ranks:
            beat = self.board.get(f"alive/{rank}")
            pulse = self._pulses.get(rank)
            if beat is not None and beat == GONE:
                left.append(rank)
            elif pulse is None or pulse.value != beat:
                self._pulses[rank] = _Pulse(beat, now)
            elif beat is not None and now - pulse.since > self.liveness_timeout:
                lost.append(rank)
        if lost or left:
            self._lost.update(lost, left)
            what = f"the heartbeat of {_rank_names(lost)} stopped {self.liveness_timeout:g} s ago: dead, stopped or cut off"
            raise RankLost(f"{topic}: {what if lost else _rank_names(left) + ' left the job'}", ranks=lost or left)


_beating: weakref.WeakSet[BoardCommunicator] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """At the end of a program that has not closed them: a heart that beats into the end of the interpreter can crash it."""
    hearts = list(_beating)
    for comm in hearts:
        comm._stop.set()
    for comm in hearts:
        comm._heart.join(1.0)


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


def _failure(error: BaseException) -> dict[str, Any]:
    """An error as plain values: type, message, those of its facts that are plain, and what other ranks told."""
    kind = type(error).__name__
    if not isinstance(error, CheckpointError) or getattr(errors, kind, None) is not type(error):
        return {"type": "", "message": f"{kind}: {error}", "facts": {}, "causes": {}}
    facts = {}
    for name in error.facts:
        try:
            encode(value := getattr(error, name))
        except CheckpointError:
            continue
        facts[name] = value
    return {"type": kind, "message": error.message, "facts": facts, "causes": error.causes or {}}


def _raise_failures(topic: str, messages: list[dict[str, Any]]) -> None:
    """RanksDisagree for calls that do not belong together; else the failure of the lowest rank that has one."""
    topics = {message["topic"] for message in messages}
    if len(topics) > 1:
        calls = "; ".join(
            f"{t}: {_rank_names([r for r, m in enumerate(messages) if m['topic'] == t])}" for t in sorted(topics)
        )
        raise RanksDisagree(f"the ranks make different calls: {calls}",
                            ranks=[r for r, m in enumerate(messages) if m["topic"] != topic])  # fmt: skip
    failed = {rank: m["failure"] for rank, m in enumerate(messages) if "failure" in m}
    if failed:
        causes = {rank: _cause_text(failure) for rank, failure in failed.items()}
        rank, first = next(iter(failed.items()))
        more = f" (also failed: {_rank_names([r for r in failed if r != rank])})" if len(failed) > 1 else ""
        raise _rebuilt({**first, "message": f"rank {rank}: {first['message']}{more}", "causes": causes})


def _cause_text(failure: dict[str, Any]) -> str:
    return f"{failure['type']}: {failure['message']}" if failure["type"] else str(failure["message"])


def _cause_of(own: BaseException | None) -> BaseException | None:
    """What is shown above an error that all ranks raise: what failed in the user's own code on this rank, if anything.

    An error of ckptcore says the same as the one that takes its place, and would only be printed twice.
    """
    return own.__cause__ if isinstance(own, CheckpointError) else own


def _rebuilt(failure: dict[str, Any], own: BaseException | None = None) -> CheckpointError:
    kind = getattr(errors, failure["type"]) if failure["type"] else RankFailed
    error: CheckpointError = kind(failure["message"], **failure["facts"])
    error.causes = failure["causes"] or None
    for note in getattr(own, "__notes__", ()) if isinstance(own, CheckpointError) else ():
        error.add_note(note)
    return error
