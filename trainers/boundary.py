"""Between two steps: what is due, and what all ranks agree on."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ckptcore import CheckpointManager, PreemptionGuard

from .callbacks.protocol import TrainerControl, TrainerState
from .parallel.environment import DistributedEnvironment

log = logging.getLogger(__name__)


def due(args: Any, state: TrainerState, when: str) -> set[str]:
    """Flags of TrainerControl that the arguments set after a step (when: "steps") or at the end of
    a whole epoch ("epoch")."""
    step, of_epoch = state.global_step, when == "epoch"
    plans = {
        "should_log": (args.logging_strategy, state.logging_steps),
        "should_evaluate": (args.eval_strategy, state.eval_steps),
        "should_save": (args.save_strategy, state.save_steps),
    }
    found = {
        flag
        for flag, (strategy, period) in plans.items()
        if strategy == when and (of_epoch or step % period == 0)
    }
    if args.logging_first_step and step == 1 and not of_epoch:
        found.add("should_log")
    if (state.epoch if of_epoch else step) < args.eval_delay:
        found.discard("should_evaluate")
    return found


class Agreement:
    """What any rank asked for, and all of them know of.

    Flags travel in the background and are read one step later, everywhere the same; at once where a
    log, an evaluation, a save or an end is due.
    """

    def __init__(self, env: DistributedEnvironment) -> None:
        self.env = env
        self.saves = 0  # of which all ranks know how they ended
        self._sent: list[Callable[[], list[int]]] = []

    def reach(
        self, control: TrainerControl, due: Collection[str], saves: int, at_once: bool
    ) -> None:
        """Let `control` be what all ranks know of, and what is due everywhere; and `saves` how many
        have ended on all of them. saves: those that have ended here."""
        self._sent.append(self.env.begin_max([*control.flags(), -saves]))
        read = self._sent if at_once or self.env.world_size == 1 else self._sent[:-1]
        self._sent = self._sent[len(read) :]
        found = [end() for end in read]
        if not found:  # the first message is on its way
            found = [[0] * len(control.flags()) + [-self.saves]]
        *flags, ended = (max(column) for column in zip(*found, strict=True))
        control.set_flags(flags)
        for flag in due:
            setattr(control, flag, True)
        self.saves = max(self.saves, -ended)


@contextmanager
def lasting_interrupt() -> Iterator[Callable[[], None]]:
    """Ctrl-C raises KeyboardInterrupt at once. Python prints and drops one that comes inside a
    `__del__` or a callback of native code; what this gives raises it again at the next step."""
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is not signal.default_int_handler:
        yield lambda: None
        return
    came = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.default_int_handler(number, frame)

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def preemption_guard(args: Any, manager: CheckpointManager) -> Iterator[PreemptionGuard | None]:
    """Catches SIGTERM where the arguments want it, for as long as training goes on."""
    if not args.enable_jit_checkpoint:
        yield None
    elif threading.current_thread() is not threading.main_thread():
        log.warning("enable_jit_checkpoint has no effect: signals reach the main thread alone")
        yield None
    else:
        if args.save_only_model:
            why = "what SIGTERM saves cannot be resumed from"
            log.warning("enable_jit_checkpoint with save_only_model: %s", why)
        with PreemptionGuard(manager, [signal.SIGTERM]) as guard:
            yield guard
