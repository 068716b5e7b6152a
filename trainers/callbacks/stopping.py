"""Ending a run that gets no better."""

from __future__ import annotations

import logging
import math
from typing import Any

from ..arguments import InvalidArgument
from .protocol import KeptCallback, TrainerControl, TrainerState

__all__ = ["EarlyStopping"]

log = logging.getLogger(__name__)


class EarlyStopping(KeptCallback):
    """Stops when `patience` evaluations one after another were not better than the best by more
    than `threshold`.

    metric: by default args.metric_for_best_model; "eval_" may be left out. greater_is_better: by
    default as in the arguments. What was counted is kept in checkpoints, so a resumed run stops at
    the same step, and a run that was stopped is over.
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
            raise InvalidArgument(
                "patience", patience, "no evaluation to wait for", "give 1 or more"
            )
        if not threshold >= 0:
            raise InvalidArgument(
                "threshold", threshold, "less than no improvement", "give 0 or more"
            )
        self.patience = patience
        self.threshold = threshold
        self.metric = metric
        self.greater_is_better = greater_is_better
        self._missing = False
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self.best: float | None = None
        self.counter = 0
        self.last_step = -1

    def on_train_begin(self, args: Any, **kwargs: Any) -> None:
        if args.eval_strategy == "no" and not getattr(args, "eval_on_save", False):
            raise InvalidArgument(
                "eval_strategy",
                args.eval_strategy,
                f"{self.name} sees no evaluation",
                "give 'steps' or 'epoch'",
            )

    def key(self, args: Any) -> str:
        """The name of the metric in the records of evaluations."""
        name = str(
            self.metric
            if self.metric is not None
            else getattr(args, "metric_for_best_model", None) or "loss"
        )
        return name if name.startswith("eval_") else f"eval_{name}"

    def _greater(self, args: Any, key: str) -> bool:
        given = self.greater_is_better
        if given is None and self.metric is None:
            given = getattr(args, "greater_is_better", None)
        return not key.endswith("loss") if given is None else given

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        key = self.key(args)
        value = metrics.get(key)
        if value is None:
            if not self._missing and state.is_world_process_zero:
                log.warning(
                    "%s: evaluations have no %s; they have %s",
                    self.name,
                    key,
                    ", ".join(sorted(metrics)),
                )
            self._missing = True
            return
        if state.global_step != self.last_step:
            self.last_step = state.global_step
            self._count(float(value), self._greater(args, key))
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
