"""Ending a run whose loss climbs away."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ..arguments import InvalidArgument
from .protocol import KeptCallback, TrainerControl, TrainerState

__all__ = ["DivergenceDetector"]

log = logging.getLogger(__name__)


class DivergenceDetector(KeptCallback):
    """Watches a smoothed metric rise above its best value, and for NaN.

    smoothing: weight of a new value. threshold: rise that counts; relative_threshold: ratio to the
    best that does.
    patience: values one after another above; warmup: first values that never count. action: "stop"
    saves, then stops; "abort" ends at once and saves nothing, which is better against NaN: weights
    that are spoilt push out good ones.
    metric_key: by default "loss", or "eval_loss" with use_eval_loss.
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
        for name, value, fits, instead in (
            ("smoothing", smoothing, 0 < smoothing <= 1, "give a number above 0, at most 1"),
            (
                "threshold",
                threshold,
                threshold is None or threshold > 0,
                "give a number above 0, or None",
            ),
            (
                "relative_threshold",
                relative_threshold,
                relative_threshold is None or relative_threshold > 1,
                "give a number above 1, or None",
            ),
            ("patience", patience, patience >= 1, "give 1 or more"),
            ("warmup", warmup, warmup >= 0, "give 0 or more"),
            ("action", action, action in ("stop", "abort"), "give 'stop' or 'abort'"),
        ):
            if not fits:
                raise InvalidArgument(name, value, "out of range", instead)
        if threshold is None and relative_threshold is None:
            raise InvalidArgument(
                "threshold", None, "relative_threshold is None, too", "give one of them"
            )
        self.smoothing = smoothing
        self.threshold = threshold
        self.relative_threshold = relative_threshold
        self.patience = patience
        self.warmup = warmup
        self.action = action
        self.metric_key = metric_key or ("eval_loss" if use_eval_loss else "loss")
        self._seen = False
        self.reset()

    def reset(self) -> None:
        """Forget what was observed."""
        self.ema: float | None = None
        self.best: float | None = None
        self.count = 0
        self.streak = 0
        self.last_step = -1

    def on_train_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        hides = getattr(args, "logging_nan_inf_filter", False) and self.metric_key == "loss"
        if hides and state.is_world_process_zero:
            log.warning(
                "%s: logging_nan_inf_filter puts the mean in the place of a loss that is NaN or "
                "infinite, so that this "
                "callback never sees one; leave the filter out",
                self.name,
            )

    def on_log(
        self, state: TrainerState, control: TrainerControl, logs: Mapping[str, Any], **kwargs: Any
    ) -> None:
        self._look(state, control, logs)

    def on_evaluate(
        self,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        self._look(state, control, metrics)

    def _look(
        self, state: TrainerState, control: TrainerControl, record: Mapping[str, Any]
    ) -> None:
        value = record.get(self.metric_key)
        if value is None:
            return
        self._seen = True
        if state.global_step == self.last_step:
            return  # the same value by another way
        self.last_step = state.global_step
        speaks = state.is_world_process_zero
        value = float(value)
        if not math.isfinite(value):
            if speaks:
                log.error(
                    "%s: %s is %s at step %d", self.name, self.metric_key, value, state.global_step
                )
            self._trigger(control)
        elif self._observe(value):
            if speaks:
                log.error(
                    "%s: %s diverges: smoothed %.4g, best %.4g, for %d values, at step %d",
                    self.name,
                    self.metric_key,
                    self.ema,
                    self.best,
                    self.streak,
                    state.global_step,
                )
            self._trigger(control)

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
        above = self.threshold is not None and self.ema - self.best >= self.threshold
        if self.relative_threshold is not None and self.best > 0:
            above = above or self.ema / self.best >= self.relative_threshold
        self.streak = self.streak + 1 if above else 0
        return self.streak >= self.patience

    def _trigger(self, control: TrainerControl) -> None:
        control.should_training_stop = True
        if self.action == "stop":
            control.should_save = True
        else:
            control.should_abort_without_save = True

    def on_train_end(self, state: TrainerState, **kwargs: Any) -> None:
        if not self._seen and state.is_world_process_zero:
            log.warning("%s: no record had %s", self.name, self.metric_key)
