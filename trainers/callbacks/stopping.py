"""Ending a run whose loss climbs away, or that gets no better."""

from __future__ import annotations

import logging
import math
from typing import Any

from ..arguments import InvalidArgument
from .protocol import KeptCallback, Logs, TrainerControl, TrainerState

log = logging.getLogger(__name__)


class DivergenceDetector(KeptCallback):
    """Watches a smoothed metric rise above its best value, and for NaN.

    smoothing: weight of a new value (default 0.3).
    threshold: rise that counts (default 1.0); None looks at relative_threshold alone.
    relative_threshold: ratio to the best that counts (default None: none does).
    patience: values one after another above (default 3).
    warmup: first values that never count (default 10).
    action: "stop" (default) saves, then stops; "abort" ends at once and saves nothing, which is
        better against NaN: weights that are spoilt push out good ones.
    use_eval_loss: look at "eval_loss" (default False: at "loss").
    metric_key: what to look at instead (default None).

    Raises InvalidArgument for values that are out of range.
    """

    kept = ("ema", "best", "count", "streak", "last_step")
    ema: float | None = None
    best: float | None = None
    count = streak = 0
    last_step = -1

    def __init__(
        self,
        smoothing: float = 0.3,
        threshold: float | None = 1.0,
        relative_threshold: float | None = None,
        patience: int = 3,
        warmup: int = 10,
        action: str = "stop",
        use_eval_loss: bool = False,
        metric_key: str | None = None,
    ) -> None:
        rise = math.inf if threshold is None else threshold
        ratio = math.inf if relative_threshold is None else relative_threshold
        for name, value, fits, instead in (
            ("smoothing", smoothing, 0 < smoothing <= 1, "give a number above 0, at most 1"),
            ("threshold", threshold, rise > 0, "give a number above 0, or None"),
            ("relative_threshold", relative_threshold, ratio > 1, "give a number above 1, or None"),
            ("patience", patience, patience >= 1, "give 1 or more"),
            ("warmup", warmup, warmup >= 0, "give 0 or more"),
            ("action", action, action in ("stop", "abort"), "give 'stop' or 'abort'"),
        ):
            if not fits:
                raise InvalidArgument(name, value, "out of range", instead)
        if rise == ratio == math.inf:
            reason = "relative_threshold is None, too"
            raise InvalidArgument("threshold", threshold, reason, "give one of them")
        self.smoothing, self.rise, self.ratio = smoothing, rise, ratio
        self.patience, self.warmup, self.action = patience, warmup, action
        self.metric_key = metric_key or ("eval_loss" if use_eval_loss else "loss")
        self._seen = False

    def on_train_begin(self, args: Any, state: TrainerState, **_: Any) -> None:
        hides = getattr(args, "logging_nan_inf_filter", False) and self.metric_key == "loss"
        if hides and state.is_world_process_zero:
            log.warning(
                "%s: logging_nan_inf_filter puts the mean in the place of a loss that is NaN or "
                "infinite, so that this callback never sees one; leave the filter out",
                self.name,
            )

    def on_log(self, state: TrainerState, control: TrainerControl, logs: Logs, **_: Any) -> None:
        value = logs.get(self.metric_key)
        if value is None:
            return
        self._seen = True
        if state.global_step == self.last_step:
            return  # the same value by another way
        self.last_step = state.global_step
        what = f"is {value}"
        if math.isfinite(value):
            if not self._observe(float(value)):
                return
            what = f"diverges: smoothed {self.ema:.4g}, best {self.best:.4g}, {self.streak} values"
        if state.is_world_process_zero:
            log.error("%s: %s %s, at step %d", self.name, self.metric_key, what, state.global_step)
        control.should_training_stop = True
        if self.action == "stop":
            control.should_save = True
        else:
            control.should_abort_without_save = True

    def on_evaluate(
        self, state: TrainerState, control: TrainerControl, metrics: Logs, **_: Any
    ) -> None:
        self.on_log(state, control, metrics)

    def _observe(self, value: float) -> bool:
        """Whether it has diverged."""
        self.count += 1
        if self.ema is None or self.best is None:
            self.ema = self.best = value
            return False
        self.ema = self.smoothing * value + (1 - self.smoothing) * self.ema
        self.best = min(self.best, self.ema)
        if self.count <= self.warmup:
            return False
        above = self.ema - self.best >= self.rise
        above = above or (self.best > 0 and self.ema / self.best >= self.ratio)
        self.streak = self.streak + 1 if above else 0
        return self.streak >= self.patience

    def on_train_end(self, state: TrainerState, **_: Any) -> None:
        if not self._seen and state.is_world_process_zero:
            log.warning("%s: no record had %s", self.name, self.metric_key)


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
    best: float | None = None
    counter, last_step = 0, -1

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

    def on_train_begin(self, args: Any, **_: Any) -> None:
        if args.eval_strategy == "no" and not getattr(args, "eval_on_save", False):
            reason, instead = f"{self.name} sees no evaluation", "give 'steps' or 'epoch'"
            raise InvalidArgument("eval_strategy", args.eval_strategy, reason, instead)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Logs, **_: Any
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
            is_greater = not key.endswith("loss") if greater is None else greater
            self._count(float(metrics[key]), is_greater)
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
