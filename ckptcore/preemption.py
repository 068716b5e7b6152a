"""Turning a signal to stop into a save of the same step on every rank.

with PreemptionGuard(ckpt) as guard:
    for step in range(first, last):
        train(step)
        if guard.should_stop(step):
            ckpt.save(step, state)
            break
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from .arguments import check_number, shown
from .errors import CoordinationError, InvalidState, RankLost
from .manager import CheckpointManager
from .ranks.board import Board, BoardLost
from .ranks.communicator import Communicator
from .ranks.messages import message
from .ranks.rounds import BoardCommunicator
from .ranks.store import shared_communicator

PENDING = b"pending"
NEVER_CAUGHT = frozenset({"SIGKILL", "SIGSTOP"})


class PreemptionGuard:
    """Catches signals, and has all ranks stop after the same step, without a collective.

    Make it on every rank at the same point of the program, in the main thread. After each step ask
    `should_stop(step)`; when it is True, save and leave the loop. As a context manager it puts the
    former handlers back at the end.

    of: the CheckpointManager, or Communicator, of the job (default None: the running
        torch.distributed job).
    signals: sequence of signals that mean "save and stop" (default SIGTERM and SIGUSR1).
    repeat_after: seconds for which more signals are the same request; later ones act as without a
        guard (default 5).

    Raises InvalidState in any thread but the main one.
    """

    # Every rank posts its step, then reads whether there is something to stop for. When a signal
    # came to any rank, rank 0 first announces that, then reads the steps of the others, and names
    # the step after the furthest. A rank that asked before the announcement had posted its step
    # before it, too, so it is counted.

    def __init__(
        self,
        of: CheckpointManager | Communicator | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        *,
        repeat_after: float = 5.0,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise InvalidState(
                "signals reach the main thread alone; make the PreemptionGuard there"
            )
        if not isinstance(of, CheckpointManager | Communicator | None):
            raise InvalidState(
                "a PreemptionGuard is one of a CheckpointManager or a Communicator, not "
                f"{shown(of)}"
            )
        signals, repeat_after = (
            _checked_signals(signals),
            check_number("repeat_after", repeat_after),
        )
        if isinstance(of, CheckpointManager):
            of = of.comm
        comm = shared_communicator() if of is None else of
        self.comm = comm.branch("preemption") if comm.world_size > 1 else comm
        self._own_comm = self.comm is not comm
        self._pid = os.getpid()
        self.signals, self.repeat_after = signals, repeat_after
        self.signaled = False
        self._posted = False
        self._stop_at: int | None = None
        self._before: dict[int, Any] = {}
        self._caught_at: dict[int, float] = {}

    def __enter__(self) -> PreemptionGuard:
        for number in self.signals:
            self._before[number] = signal.signal(number, self._caught)
        _active.add(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self.restore_handlers()
        if self._own_comm:
            self.comm.close()

    def restore_handlers(self) -> None:
        """Have the signals do what they did before."""
        _active.discard(self)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def should_stop(self, step: int) -> bool:
        """Whether this step is the last one: save it, and leave. The same answer at the same step
        on every rank, after each of which it is called.

        step: int, the one just done; from call to call it grows by one.

        Raises RankLost, CoordinationError.
        """
        if self.comm.world_size == 1:
            return self.signaled
        if not isinstance(self.comm, BoardCommunicator):
            with self.comm.round("stop") as r:
                reports = r.gather(_Asked(step, self.signaled))
                if r.leads:
                    r.verdict = _stop(reports)
            return bool(r.verdict)
        try:
            return self._agreed(self.comm, self.comm.board, step)
        except BoardLost as error:
            raise RankLost(
                f"step {step}: the connection to the store of this job is lost ({error})", ranks=[0]
            ) from error

    def _agreed(self, comm: BoardCommunicator, board: Board, step: int) -> bool:
        board.put(f"step/{comm.rank}", b"%d" % step)
        if self.signaled and not self._posted:
            board.put("signal", b"%d" % comm.rank)
            self._posted = True
        if self._stop_at is None and comm.rank == 0 and board.get("signal") is not None:
            board.put("stop", PENDING)
            steps = [int(board.get(f"step/{rank}") or b"0") for rank in range(comm.world_size)]
            board.put("stop", b"%d" % (max(steps) + 1))
        if self._stop_at is None and (announced := self._announced(comm, board)) is not None:
            self._stop_at = int(announced)
        if self._stop_at is not None and step > self._stop_at:
            raise CoordinationError(
                f"rank {comm.rank} is at step {step} and the ranks stop after {self._stop_at}: "
                "should_stop must be called "
                "after every step, on every rank",
                ranks=[comm.rank],
                step=step,
            )
        return step == self._stop_at

    def _announced(self, comm: BoardCommunicator, board: Board) -> bytes | None:
        """What rank 0 says, waiting while it is about to say it."""
        found = board.get("stop")
        pause = threading.Event()
        patience = int(comm.liveness_timeout / 0.001)
        while found == PENDING and patience > 0:
            pause.wait(0.001)
            patience -= 1
            found = board.get("stop")
        if found == PENDING:
            raise RankLost("rank 0 began to say at which step to stop, and did not end", ranks=[0])
        return found

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self._pid != os.getpid():  # a forked child that could not forget about the guard yet
            self.restore_handlers()
            signal.raise_signal(signal.Signals(number))
            return
        now = time.monotonic()
        if now - self._caught_at.setdefault(number, now) > self.repeat_after:  # it is asked again
            before = self._before.get(number, signal.SIG_DFL)
            signal.signal(number, before)
            signal.raise_signal(signal.Signals(number))
        self.signaled = True


def _checked_signals(signals: Any) -> tuple[signal.Signals, ...]:
    """Signals that a program can catch. Raises InvalidState."""
    try:
        found = tuple(signal.Signals(number) for number in signals)
    except (TypeError, ValueError):
        what = "signals must be a list of signals such as (signal.SIGTERM, signal.SIGUSR1)"
        raise InvalidState(f"{what}, not {shown(signals)}") from None
    if never := [number.name for number in found if number.name in NEVER_CAUGHT]:
        raise InvalidState(f"signals: no program can catch {never[0]}")
    return found


@message
@dataclass(frozen=True, slots=True)
class _Asked:
    """What a rank says after a step. signaled: whether a signal came to it."""

    step: int
    signaled: bool


def _stop(reports: list[_Asked]) -> bool:
    """Whether a signal came to any rank."""
    steps = [report.step for report in reports]
    if len(set(steps)) > 1:
        raise CoordinationError(
            f"should_stop must be called after every step, on every rank; they are at {steps}"
        )
    return any(report.signaled for report in reports)


# Guards that have handlers installed in this process.
_active: set[PreemptionGuard] = set()


def _forget_guards() -> None:
    """In a forked child: a pool, or a loader's worker, ends by SIGTERM as it would without a guard
    in its parent."""
    for guard in list(_active):
        guard.restore_handlers()


os.register_at_fork(after_in_child=_forget_guards)
