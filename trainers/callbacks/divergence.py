"""Ending a run whose loss climbs away."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ..arguments import InvalidArgument
from .protocol import KeptCallback, TrainerControl, TrainerState

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
        rise, ratio = (
            math.inf if given is None else given for given in (threshold, relative_threshold)
        )
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
        self.reset()

    def reset(self) -> None:
        """Forget what was observed."""
        self.ema: float | None = None
        self.best: float | None = None
        self.count = self.streak = 0
        self.last_step = -1

    def on_train_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        hides = getattr(args, "logging_nan_inf_filter", False) and self.metric_key == "loss"
        if hides and state.is_world_process_zero:
            log.warning(
                "%s: logging_nan_inf_filter puts the mean in the place of a loss that is NaN or "
                "infinite, so that this callback never sees one; leave the filter out",
                self.name,
            )

    def on_log(
        self, state: TrainerState, control: TrainerControl, logs: Mapping[str, Any], **kwargs: Any
    ) -> None:
        value = logs.get(self.metric_key)
        if value is None:
            return
        self._seen = True
        if state.global_step == self.last_step:
            return  # the same value by another way
        self.last_step = state.global_step
        what = f"is {value}"
        if diverges := math.isfinite(value):
            diverges = self._observe(float(value))
            what = f"diverges: smoothed {self.ema:.4g}, best {self.best:.4g}, {self.streak} values"
        if math.isfinite(value) and not diverges:
            return
        if state.is_world_process_zero:
            log.error("%s: %s %s, at step %d", self.name, self.metric_key, what, state.global_step)
        control.should_training_stop = True
        if self.action == "stop":
            control.should_save = True
        else:
            control.should_abort_without_save = True

    def on_evaluate(
        self,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        **kwargs: Any,
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

    def on_train_end(self, state: TrainerState, **kwargs: Any) -> None:
        if not self._seen and state.is_world_process_zero:
            log.warning("%s: no record had %s", self.name, self.metric_key)
