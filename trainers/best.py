"""The best checkpoint of a run: noticed at evaluations, looked for again after a resume, loaded at
the end."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, Literal

from ckptcore import (
    CheckpointCorrupt,
    CheckpointInfo,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    KeepBest,
)

from .arguments import InvalidArgument

if TYPE_CHECKING:
    from .trainer_parts import TrainerParts

__all__ = ["BestModel"]

log = logging.getLogger(__name__)


class BestModel:
    """By what the evaluations of one trainer measure. It is known by its step, so that the root may
    be moved."""

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
        """Whether these metrics, those of rank 0, are the best so far. On all ranks.

        Raises InvalidArgument where the metric is not among them and something depends on it.
        """
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        # What callbacks add may be known on rank 0 alone.
        value, names = self.trainer.env.broadcast_object(
            (numbers.get(self.metric), sorted(numbers))
        )
        state, args = self.trainer.state, self.trainer.args
        best = state.best_metric
        if value is None and (self.rule is not None or args.save_strategy == "best"):
            raise InvalidArgument(
                "metric_for_best_model",
                args.metric_for_best_model,
                f"evaluations give {', '.join(names) or 'nothing'}",
                f"name one of these, or let a callback add {self.metric} to the metrics in "
                "on_evaluate",
            )
        if value is None or value != value:
            return False
        if best is not None and not (value < best if self.mode == "min" else value > best):
            return False
        state.best_metric, state.best_step = float(value), state.global_step
        state.best_checkpoint = None  # until this step is saved, if it is
        return True

    def note_save(self) -> None:
        """This step is about to be saved."""
        state = self.trainer.state
        if state.best_step == state.global_step:
            state.best_checkpoint = f"checkpoint-{state.global_step}"

    def present(self, checkpoints: CheckpointManager) -> list[CheckpointInfo]:
        """Those that have the metric, best first: of this run as far as it has come, and the best
        so far, which an earlier run may have made that this one goes on from."""
        state = self.trainer.state
        own = {info.name for info in checkpoints.list()}

        def counts(info: CheckpointInfo) -> bool:
            best = (
                info.step == state.best_step and info.metrics.get(self.metric) == state.best_metric
            )
            return (info.name in own or best) and (info.step or 0) <= state.global_step

        return KeepBest(self.metric, self.mode).ranked(
            [*filter(counts, self.trainer.saves.committed())]
        )

    def check(self, checkpoints: CheckpointManager) -> None:
        """The best checkpoint may have gone since: then the best of those present takes its
        place."""
        trainer, state = self.trainer, self.trainer.state
        args = trainer.args
        if state.best_checkpoint is None or not (
            args.load_best_model_at_end or args.preserve_best_model
        ):
            return
        found: Any = None
        if trainer.saves.looks:
            best = next(iter(self.present(checkpoints)), None)
            gone = all(info.step != state.best_step for info in trainer.saves.committed())
            if gone and trainer.rank == 0:
                now = (
                    "there is no other"
                    if best is None
                    else f"{best.name} is the best of those present"
                )
                message = (
                    f"{state.best_checkpoint}, the best checkpoint so far, is not there any more; "
                    f"{now}"
                )
                warnings.warn(message, CheckpointWarning, stacklevel=2)
                found = (None, None) if best is None else (best.metrics[self.metric], best.step)
        found = trainer.env.broadcast_object(found)
        if found is not None:
            state.best_metric, state.best_step = found
            state.best_checkpoint = (
                None if state.best_step is None else f"checkpoint-{state.best_step}"
            )

    def load(self, checkpoints: CheckpointManager) -> None:
        """Put the best checkpoint's weights into the model, where that is wanted."""
        trainer = self.trainer
        if not trainer.args.load_best_model_at_end:
            return
        present = [info.step for info in self.present(checkpoints)] if trainer.saves.looks else []
        failed: dict[str, str] = {}
        loaded = None
        for step in trainer.env.broadcast_object(present):
            try:
                checkpoints.load(trainer.saves.weights(), step, transactional=True)
            except (CheckpointCorrupt, CheckpointNotFound) as error:
                failed[f"checkpoint-{step}"] = str(error)
            else:
                loaded = step
                break
        if trainer.rank != 0:
            return
        if failed:
            now = (
                "the final weights stay"
                if loaded is None
                else f"those of checkpoint-{loaded} are the best of the others"
            )
            message = f"the best weights cannot be loaded ({'; '.join(failed.values())}); {now}"
            warnings.warn(message, CheckpointWarning, stacklevel=2)
        elif loaded is None:
            log.warning(
                "load_best_model_at_end: no checkpoint has %s; the model stays as it is",
                self.metric,
            )
        if loaded is not None:
            log.info("loaded the best weights, those of step %d", loaded)
