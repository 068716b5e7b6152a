"""A stand-in for a trainer: it fires events in the order of the specification and keeps what a
checkpoint keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ckpt_trainers.callbacks.protocol import CallbackHandler, TrainerControl, TrainerState


class FakeTrainer:
    rank, world_size, device = 0, 1, "cpu"

    def __init__(
        self,
        callbacks: Sequence[Any],
        logging_dir: Path | None = None,
        *,
        model: Any = None,
        **args: Any,
    ) -> None:
        self.logging_dir = None if logging_dir is None else str(logging_dir)
        defaults = {
            "output_dir": str(logging_dir.parent) if logging_dir else ".",
            "eval_strategy": "steps",
            "eval_delay": 0,
            "eval_on_save": False,
            "metric_for_best_model": "loss",
            "greater_is_better": None,
            "disable_tqdm": None,
            "fuse_optim_with_backward": False,
        }
        self.args = SimpleNamespace(**{**defaults, **args})
        self.model = model
        self.state = TrainerState(max_steps=20, eval_steps=1, logging_steps=1)
        self.control = TrainerControl()
        self.begun = False
        self.handler = CallbackHandler(
            callbacks, context=lambda: {"trainer": self, "model": self.model}
        )
        self.fire("on_init_end")

    def fire(self, event: str, **extra: Any) -> TrainerControl:
        self.control = self.handler.fire(event, self.args, self.state, self.control, **extra)
        return self.control

    def log(self, values: dict[str, Any]) -> None:
        logs = {**values, "epoch": self.state.epoch}
        self.fire("on_log_step", logs=logs)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    def evaluate(self, **metrics: float) -> None:
        self.fire("on_evaluate", metrics=metrics)

    def save(self) -> dict[str, Any]:
        return copy.deepcopy(
            {"state": self.state.state_dict(), "callbacks": self.handler.state_dict()}
        )

    def restore(self, checkpoint: dict[str, Any]) -> None:
        self.state.load_state_dict(checkpoint["state"])
        self.handler.load_state_dict(checkpoint["callbacks"])

    def train(self, to: int, each: Callable[[int], None]) -> int:
        """Step by step to `to`, or to where a callback stops it; the last step. Called again, it
        goes on."""
        if not self.begun:
            self.fire("on_train_begin")
        self.begun = True
        while self.state.global_step < to and not self.control.should_training_stop:
            self.fire("on_step_begin")
            self.state.global_step += 1
            self.state.epoch = self.state.global_step / 10
            self.fire("on_step_end")
            each(self.state.global_step)
        return self.state.global_step
