"""The best checkpoint of a run: noticed at evaluations, looked for again after a resume, loaded at the end."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, Literal

from ckptcore import CheckpointInfo, CheckpointManager, CheckpointWarning, KeepBest

if TYPE_CHECKING:
    from .trainer_parts import TrainerParts

__all__ = ["BestModel"]

log = logging.getLogger(__name__)


class BestModel:
    """By what the evaluations of one trainer measure. It is known by its step, so that the root may be moved."""

    def __init__(self, trainer: TrainerParts) -> None:
        self.trainer = trainer

    @property
    def metric(self) -> str:
        name: str = self.trainer.args.metric_for_best_model
        return name if name.startswith("eval_") else f"eval_{name}"

    @property
    def mode(self) -> Literal["min", "max"]:
        return "max" if self.trainer.args.best_is_greater else "min"

    @property
    def rule(self) -> KeepBest | None:
        """What retention is to leave alone."""
        args = self.trainer.args
        wanted = args.preserve_best_model or args.load_best_model_at_end
        return KeepBest(self.metric, self.mode, args.preserve_n_best) if wanted else None

    def note(self, metrics: dict[str, Any]) -> bool:
        """Whether these metrics are the best so far."""
        value, state = metrics.get(self.metric), self.trainer.state
        best = state.best_metric
        if not isinstance(value, int | float) or value != value:
            return False
        if best is not None and not (value < best if self.mode == "min" else value > best):
            return False
        state.best_metric, state.best_step = float(value), state.global_step
        state.best_checkpoint = f"checkpoint-{state.global_step}"
        return True

    def present(self, checkpoints: CheckpointManager) -> CheckpointInfo | None:
        return checkpoints.best(self.metric, self.mode)

    def check(self, checkpoints: CheckpointManager) -> None:
        """The best checkpoint may have gone since: then the best of those present takes its place."""
        trainer, state = self.trainer, self.trainer.state
        args = trainer.args
        if state.best_step is None or not (args.load_best_model_at_end or args.preserve_best_model):
            return
        found: Any = None
        if trainer.saves.looks:
            best = self.present(checkpoints)
            gone = all(info.step != state.best_step for info in checkpoints.list())
            if gone and trainer.rank == 0:
                now = "there is no other" if best is None else f"{best.name} is the best of those present"
                message = f"{state.best_checkpoint}, the best checkpoint so far, is not there any more; {now}"
                warnings.warn(message, CheckpointWarning, stacklevel=2)
                found = (None, None) if best is None else (best.metrics[self.metric], best.step)
        found = trainer.env.broadcast_object(found)
        if found is not None:
            state.best_metric, state.best_step = found
            state.best_checkpoint = None if state.best_step is None else f"checkpoint-{state.best_step}"

    def load(self, checkpoints: CheckpointManager) -> None:
        """Put the best checkpoint's weights into the model, where that is wanted."""
        trainer = self.trainer
        if not trainer.args.load_best_model_at_end:
            return
        best = self.present(checkpoints) if trainer.saves.looks else None
        step = trainer.env.broadcast_object(None if best is None else best.step)
        if step is None:
            log.warning("load_best_model_at_end: no checkpoint has %s; the model stays as it is", self.metric)
            return
        checkpoints.load(trainer.saves.weights(), step, strict=False)
        if trainer.rank == 0:
            log.info("loaded the best weights, those of step %d", step)
