"""Step boundaries: what is due, what ranks ask for, and doing it in one order on all of them."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptcore import CheckpointManager, PreemptionGuard

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["Boundary", "Signals", "stop_signal"]

log = logging.getLogger(__name__)


class Signals:
    """No signal is waited for."""

    signaled = False


@contextmanager
def stop_signal(trainer: Trainer, checkpoints: CheckpointManager) -> Iterator[Any]:
    """Catches SIGTERM where the arguments want it; the ranks agree on it at step boundaries."""
    if not trainer.args.enable_jit_checkpoint:
        yield Signals()
        return
    if threading.current_thread() is not threading.main_thread():
        log.warning("enable_jit_checkpoint has no effect: signals reach the main thread alone")
        yield Signals()
        return
    if trainer.args.save_only_model:
        log.warning(
            "enable_jit_checkpoint with save_only_model: what SIGTERM saves cannot be resumed from"
        )
    with PreemptionGuard(checkpoints, [signal.SIGTERM]) as guard:
        yield guard


class Boundary:
    """What happens between two steps. `stopped`: training is to end here.

    Any rank may set a flag; it counts when all ranks know of it. Flags travel in the background and
    are read one step later, everywhere the same; at once where a log, an evaluation, a save or an
    end is due.
    """

    def __init__(self, trainer: Trainer, signals: Any, checkpoints: CheckpointManager) -> None:
        self.trainer, self.signals, self.checkpoints = trainer, signals, checkpoints
        self.stopped = False
        self._sent: list[Callable[[], list[int]]] = []

    def after_step(self) -> bool:
        """Whether the epoch is over; then its saves are left to `after_epoch`, so that they have
        all of the epoch."""
        trainer, state = self.trainer, self.trainer.state
        ends = trainer.loader.epoch_ended or state.global_step >= state.max_steps
        due = self.due_by_step()
        self.agree(due, at_once=ends or any(due.values()))
        control = trainer.control
        if control.should_epoch_stop and not ends:
            trainer.loader.go_to_epoch(trainer.loader.epoch + 1)
            state.epoch = trainer.epochs_done()
        over = bool(ends or control.should_epoch_stop)
        self.act(may_save=not over)
        return over

    def after_epoch(self) -> None:
        """The same after on_epoch_end, for what is due once per epoch."""
        args, state = self.trainer.args, self.trainer.state
        whole = self.trainer.loader.epoch_ended or state.global_step >= state.max_steps
        late_enough = state.epoch >= args.eval_delay
        self.agree(
            {
                "should_log": whole and args.logging_strategy == "epoch",
                "should_evaluate": whole and args.eval_strategy == "epoch" and late_enough,
                "should_save": whole and args.save_strategy == "epoch",
            },
            at_once=True,
        )
        self.act(may_save=True)

    def due_by_step(self) -> dict[str, bool]:
        args, state = self.trainer.args, self.trainer.state
        step = state.global_step

        def due(strategy: str, period: int) -> bool:
            return strategy == "steps" and step % period == 0

        first = args.logging_first_step and step == 1
        return {
            "should_log": due(args.logging_strategy, state.logging_steps) or first,
            "should_evaluate": due(args.eval_strategy, state.eval_steps)
            and step >= args.eval_delay,
            "should_save": due(args.save_strategy, state.save_steps),
        }

    def act(self, may_save: bool) -> None:
        """Log, evaluate, save, stop: whatever is asked for."""
        trainer = self.trainer
        if trainer.control.should_log:
            trainer.control.should_log = False
            trainer.log_training()
            self.agree({}, at_once=True)
        saving = may_save and (trainer.control.should_save or self.ends_with_a_save())
        wanted = trainer.control.should_evaluate or (saving and trainer.args.eval_on_save)
        if wanted and not trainer.control.should_abort_without_save:
            if not (
                trainer.measured_step == trainer.state.global_step
                and not trainer.control.should_evaluate
            ):
                improved = trainer.evaluate_now()
                trainer.control.should_save |= improved and trainer.args.save_strategy == "best"
            trainer.control.should_evaluate = False
            self.agree({}, at_once=True)
        control = trainer.control
        if (
            may_save
            and not control.should_abort_without_save
            and (control.should_save or self.ends_with_a_save())
        ):
            control.should_save = False
            trainer.saves.save(self.checkpoints, wait=trainer.state.stop_reason == "sigterm")
        if control.should_training_stop and may_save:
            self.stop()

    def ends_with_a_save(self) -> bool:
        """At the last boundary, where saves are scheduled at all."""
        trainer, state = self.trainer, self.trainer.state
        last = trainer.control.should_training_stop or state.global_step >= state.max_steps
        return bool(last and trainer.args.save_strategy in ("steps", "epoch"))

    def stop(self) -> None:
        trainer, state = self.trainer, self.trainer.state
        self.stopped = True
        if state.stop_reason is None:
            aborted = trainer.control.should_abort_without_save
            state.stop_reason = "aborted" if aborted else "requested"
        names = trainer.env.gather_objects(state.stop_requested_by)
        state.stop_requested_by = next((name for name in names if name), None)
        if trainer.rank == 0:
            who = state.stop_requested_by or state.stop_reason
            log.info("stopping at step %d: %s", state.global_step, who)

    def agree(self, due: dict[str, bool], at_once: bool) -> None:
        """Let `control` be what all ranks know of: what any of them asked for, and what is due
        everywhere."""
        trainer, control = self.trainer, self.trainer.control
        self._sent.append(
            trainer.env.begin_max(
                [*control.flags(), self.signals.signaled, -trainer.saves.count_ended()]
            )
        )
        read = self._sent if at_once or trainer.world_size == 1 else self._sent[:-1]
        self._sent = self._sent[len(read) :]
        found = [end() for end in read]
        if not found:  # the first message is on its way
            found = [[False] * len(control.flags()) + [False, -trainer.saves.announced]]
        *flags, signaled, ended = (max(column) for column in zip(*found, strict=True))
        control.set_flags(flags)
        for name, is_due in due.items():
            setattr(control, name, is_due or getattr(control, name))
        if signaled and not control.should_abort_without_save:
            trainer.state.stop_reason = "sigterm"
            control.should_training_stop = control.should_save = True
        if -ended > trainer.saves.announced:
            trainer.saves.announce(-ended)
            if trainer.world_size > 1 and trainer.callbacks.has("on_checkpoint_commit"):
                self.agree({}, at_once=True)
