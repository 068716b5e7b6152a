"""Ending a run that gets no better."""

from __future__ import annotations

import logging
import math
from typing import Any

from ..arguments import InvalidArgument
from .protocol import KeptCallback, TrainerControl, TrainerState

log = logging.getLogger(__name__)


class EarlyStopping(KeptCallback):
    """Stops when `patience` evaluations one after another were not better than the best by more
    than `threshold`. What was counted is kept in checkpoints, so a resumed run stops at the same
    step, and a run that was stopped is over.

    patience: evaluations to wait for (default 1).
    threshold: gain that counts must be above it (default 0).
    metric: what to look at; "eval_" may be left out (default: args.metric_for_best_model).
    greater_is_better: its direction (default: as in the arguments for their metric; else that of
        its name, of which those that end in loss are better when smaller).

    Raises InvalidArgument for values out of range, and in a run without evaluations.
    """

    kept = ("best", "counter", "last_step")

    def __init__(
        self,
        patience: int = 1,
        threshold: float = 0.0,
        metric: str | None = None,
        greater_is_better: bool | None = None,
    ) -> None:
        if patience < 1:
            reason = "no evaluation to wait for"
            raise InvalidArgument("patience", patience, reason, "give 1 or more")
        if not threshold >= 0:
            reason = "less than no improvement"
            raise InvalidArgument("threshold", threshold, reason, "give 0 or more")
        self.patience, self.threshold = patience, threshold
        self.metric, self.greater_is_better = metric, greater_is_better
        self._missing = False
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self.best: float | None = None
        self.counter, self.last_step = 0, -1

    def on_train_begin(self, args: Any, **kwargs: Any) -> None:
        if args.eval_strategy == "no" and not getattr(args, "eval_on_save", False):
            reason, instead = f"{self.name} sees no evaluation", "give 'steps' or 'epoch'"
            raise InvalidArgument("eval_strategy", args.eval_strategy, reason, instead)

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        name, greater = self.metric, self.greater_is_better
        if name is None:
            name = str(getattr(args, "metric_for_best_model", None) or "loss")
            greater = getattr(args, "greater_is_better", None) if greater is None else greater
        key = name if name.startswith("eval_") else f"eval_{name}"
        if metrics.get(key) is None:
            if not self._missing and state.is_world_process_zero:
                there = ", ".join(sorted(metrics))
                log.warning("%s: evaluations have no %s; they have %s", self.name, key, there)
            self._missing = True
            return
        if state.global_step != self.last_step:
            self.last_step = state.global_step
            self._count(
                float(metrics[key]), not key.endswith("loss") if greater is None else greater
            )
        if self.counter >= self.patience:
            control.should_training_stop = True

    def _count(self, value: float, greater: bool) -> None:
        gain = math.inf if self.best is None else (value - self.best) * (1 if greater else -1)
        if not math.isnan(value) and gain > self.threshold:
            self.best, self.counter = value, 0
        else:
            self.counter += 1

    def run_is_over(self, args: Any, state: TrainerState) -> bool:
        """Whether a restored run had been stopped."""
        return self.counter >= self.patience
