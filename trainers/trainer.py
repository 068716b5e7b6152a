"""The training loop: train, look, save; and go on from any checkpoint bit for bit."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptcore import CheckpointManager

from .arguments import InvalidArgument
from .boundary import Boundary, stop_signal
from .build import seed_everything
from .data.evaluation import mean_loss
from .export import write_model
from .losses import labels_in
from .trainer_parts import Micro, TrainerParts

__all__ = ["Micro", "TrainResult", "Trainer", "seed_everything"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    global_step: int
    steps_run: int  # by this call; 0 when the run was finished already
    resumed_from: int | None  # step of the checkpoint that was restored
    log_history: list[dict[str, Any]]  # of the whole run
    metrics: dict[str, Any] = field(default_factory=dict)  # the final record
    stop_reason: str | None = None  # "sigterm", "requested" or "aborted" where it ended early
    failed_steps: tuple[int, ...] = ()  # saves in the background that failed

    @property
    def training_loss(self) -> float | None:
        return self.metrics.get("train_loss")


class Trainer(TrainerParts):
    """Trains a model on a dataset, in one process. Subclasses change how the model is prepared, how
    a batch reaches it, and who shares which state (see TrainerParts).

    A trainer is a `StatefulProvider`: it can itself be given to a CheckpointManager. Raises
    InvalidArgument for what cannot work, before anything is built.
    """

    def train(self) -> TrainResult:
        """Train to the end, from the newest usable checkpoint of output_dir if there is one."""
        if self.loader is None:
            raise InvalidArgument("train_dataset", None, "nothing to train on", "give one")
        with ExitStack() as until_the_end:
            checkpoints = until_the_end.enter_context(self.saves.open())
            resumed_from = self.prepare_run(checkpoints)
            if self.is_over():
                if self.rank == 0:
                    log.info(
                        "nothing to do: step %d of %d is reached",
                        self.state.global_step,
                        self.state.max_steps,
                    )
                self.best.load(checkpoints)
                return TrainResult(self.state.global_step, 0, resumed_from, self.state.log_history)
            until_the_end.callback(self.loader.close)
            try:
                guard = until_the_end.enter_context(stop_signal(self, checkpoints))
                if self.args.detect_anomaly:
                    until_the_end.enter_context(torch.autograd.set_detect_anomaly(True))
                return self.run(Boundary(self, guard, checkpoints), checkpoints, resumed_from)
            except BaseException:
                self.callbacks.close()
                raise

    def run(
        self, boundary: Boundary, checkpoints: CheckpointManager, resumed_from: int | None
    ) -> TrainResult:
        state = self.state
        self.meters.start(state.global_step)
        self.fire("on_train_begin")
        if self.args.eval_on_start and resumed_from is None:
            self.evaluate_now(ranks=False)
        while state.global_step < state.max_steps and not boundary.stopped:
            self.control.should_epoch_stop = False
            self.fire("on_epoch_begin")
            epoch_is_over = False
            while not epoch_is_over and not boundary.stopped:
                self.training_step()
                if state.steps_run == 1:
                    self.saves.prepare(checkpoints)
                epoch_is_over = boundary.after_step()
            self.fire("on_epoch_end")
            if epoch_is_over:
                boundary.after_epoch()
        self.saves.finish(checkpoints)
        if not self.control.should_abort_without_save:
            self.best.load(checkpoints)
        metrics = self.meters.summary(self)
        self.log(metrics)
        self.fire("on_train_end")
        return TrainResult(
            state.global_step,
            state.steps_run,
            resumed_from,
            state.log_history,
            metrics,
            state.stop_reason,
            checkpoints.failed_steps,
        )

    def training_step(self) -> None:
        """One optimizer step."""
        args, state = self.args, self.state
        self.wrapped.train()
        # An epoch ends with a step of its own, shorter if need be, so that epochs have whole steps.
        group = self.loader.next_group(args.gradient_accumulation_steps)
        self.fire("on_step_begin")
        tokens = self.meters.count(group, self.model)
        loss = self.forward_backward(group, self.items_of(group))
        metrics: dict[str, Any] = {"loss": loss * self.data_parallel[1], "tokens": tokens}
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if args.max_grad_norm is not None:
            metrics["grad_norm"] = self.meters.grad_norm = self.clip_gradients(args.max_grad_norm)
        self.fire("on_pre_optimizer_step")
        metrics["learning_rate"] = self.learning_rate()
        done = self.optimizer_step()
        self.fire("on_optimizer_step")
        if done:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        state.global_step += 1
        state.steps_run += 1
        state.epoch = self.epochs_done()
        self.meters.add(loss, state.steps_run, state.global_step)
        self.free_memory(state.global_step)
        self.fire("on_train_metrics", metrics=metrics)
        self.fire("on_step_end")

    def items_of(self, group: list[Micro]) -> float:
        """What the loss of the step is averaged over: labels where there is a loss function, else
        samples."""
        if self.loss_function is None:
            return float(sum(of_all_ranks for _, _, of_all_ranks in group))
        mine = float(sum(labels_in(batch) for batch, samples, _ in group if samples))
        return max(self.reduce([mine])[0] if self.data_parallel[1] > 1 else mine, 1.0)

    # Looking.

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Mean loss over the evaluation data, or over other data."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise InvalidArgument("eval_dataset", None, "nothing to evaluate", "give one")
        self.fill_weights()
        metrics = self.measure(dataset, "eval")
        self.fire("on_evaluate", metrics=metrics)
        self.note(metrics)  # with what callbacks have added
        return metrics

    def evaluate_now(self, ranks: bool = True) -> bool:
        """Evaluate as a part of training. Whether it was the best so far; ranks: whether it counts
        for that."""
        metrics = self.measure(self.eval_dataset, "eval")
        self.measured_step = self.state.global_step
        self.fire("on_evaluate", metrics=metrics)
        self.note(metrics)  # with what callbacks have added
        return ranks and self.best.note(metrics)

    def predict(self, dataset: Any) -> dict[str, float]:
        """Mean loss over any data, told as a prediction."""
        self.fill_weights()
        metrics = self.measure(dataset, "test")
        self.fire("on_predict", metrics=metrics)
        return metrics

    def measure(self, dataset: Any, prefix: str) -> dict[str, float]:
        self.share_state()
        return mean_loss(self, dataset, prefix)

    def log_training(self) -> None:
        self.log(self.meters.take(self))

    def log(self, values: dict[str, Any]) -> None:
        """Let callbacks add to a record of this step and write it; it becomes part of the
        history."""
        logs = {**values, "epoch": self.state.epoch}
        self.fire("on_log_step", logs=logs)
        self.note(logs)
        self.fire("on_log", logs=logs)

    def note(self, values: dict[str, Any]) -> None:
        """Keep values in the history, where each step has one entry."""
        history, state = self.state.log_history, self.state
        if not history or history[-1]["step"] != state.global_step:
            history.append({"step": state.global_step, "epoch": state.epoch})
        history[-1].update(values)

    def save_model(self, path: str | None = None) -> None:
        """Write the weights (and what belongs to the processing class) to a folder, for use outside
        of training."""
        self.fill_weights()
        self.share_state()
        write_model(self, path or self.args.output_dir)
