"""The training loop: train, evaluate, save; and go on from any checkpoint bit for bit.

One class, from top to bottom: the constructor, `train()`, a step, what happens between two steps,
evaluation, and the methods that trainers for several processes change.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ckptcore import (
    CheckpointNotFound,
    OptimizerState,
    PreemptionGuard,
    RNGState,
    SharingPattern,
    StateComponent,
)

from . import callbacks as shipped
from .arguments import InvalidArgument, Process, TrainingArguments, resolve_arguments, steps_of
from .boundary import Agreement, due, lasting_interrupt, preemption_guard
from .build import ModelBuilder, apply_settings, computing, free_memory, fuse_optimizer
from .callbacks.logs import choose_logging_dir, relative_to_root
from .callbacks.protocol import CallbackHandler, TrainerControl, TrainerState
from .checkpoints import Checkpoints, Part, best_rule, is_restorable, write_model
from .data.evaluation import EvaluationBatches
from .data.foreign import ForeignLoader
from .data.loader import ResumableLoader, collate
from .data.position import Counted, Loader, has_its_part, rows_of, seeded_random
from .data.ranks import CollateShares
from .losses import count_labels, labels_of, loss_of, make_loss_function, shifts_labels
from .meters import Meters, plain_numbers
from .optim import make_optimizer, make_scheduler, optimizer_class
from .parallel.environment import DistributedEnvironment, choose_workspace

log = logging.getLogger(__name__)

# What Hugging Face's Trainer takes and this one does not, and what does it here.
INSTEAD = {
    "compute_metrics": "add to the metrics in a callback's on_evaluate",
    "preprocess_logits_for_metrics": "look at outputs in a callback, or in compute_loss_func",
    "optimizers": "give optimizer_factory and lr_scheduler_factory",
    "tokenizer": "give processing_class",
}


@dataclass(frozen=True)
class TrainResult:
    """What a call of train() did."""

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


class Trainer:
    """Trains a model on a dataset, in one process. Subclasses change how the model is prepared, how
    a batch reaches it, and who shares which state.

    A trainer is a `StatefulProvider`: it can itself be given to a CheckpointManager.

    args: arguments of the class `arguments_class`, or a mapping.
    model, model_init: the module, or a function that makes it; one of the two.
    data_collator: list of samples -> batch (default None: torch's, and lists of numbers become
        tensors).
    train_dataset: map-style, iterable, or a DataLoader, which is used as it is.
    eval_dataset: the same, or a mapping of names to several, whose metrics are eval_<name>_loss.
    processing_class: tokenizer or the like, saved beside the model.
    callbacks: any objects with on_... methods (default None: `default_callbacks()`).
    compute_loss_func: (outputs, labels, items) -> the sum over a batch divided by `items`, the
        labels of the whole step; without it the model's own loss counts. For Hugging Face's causal
        language models there is `causal_lm_loss`.
    distributed_env: by default what the launcher says.
    optimizer_factory: parameter groups -> optimizer; optimizer_cls_and_kwargs: class and arguments;
        optimizer_groups: name -> {"regex", "config"}.
    lr_scheduler_factory: optimizer -> scheduler.
    enable_activation_checkpoint_fn: (rank, model) -> None.
    fused_loss_factory: model -> function like compute_loss_func.
    manager_options: what its CheckpointManager is given besides: `tiers`, `storage_options`, an
        `on_event` such as TensorBoardEvents.

    Raises InvalidArgument for what cannot work, before anything is built.
    """

    kind: ClassVar[str] = "single"
    arguments_class: ClassVar[type[Any]] = TrainingArguments
    evaluates_in_step: ClassVar[bool] = False  # ranks must run equally many evaluation batches
    fixed_shapes: ClassVar[bool] = False  # batches shorter than the others cannot be used
    pipe_schedule_factory: Any = None

    # What is not there until something makes it.
    optimizer: Any = None
    scheduler: Any = None
    fused: Sequence[Any] = ()  # hooks that step the optimizer in the backward pass
    eval_loader: Any = None
    logging_dir: str | None = None

    def __init__(
        self,
        args: Any,
        *,
        model: nn.Module | None = None,
        model_init: Callable[[], nn.Module] | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        distributed_env: DistributedEnvironment | None = None,
        optimizer_factory: Callable[[Any], torch.optim.Optimizer] | None = None,
        optimizer_cls_and_kwargs: tuple[type[Any], dict[str, Any]] | None = None,
        optimizer_groups: Mapping[str, Any] | None = None,
        lr_scheduler_factory: Callable[[torch.optim.Optimizer], Any] | None = None,
        enable_activation_checkpoint_fn: Callable[[int, nn.Module], Any] | None = None,
        fused_loss_factory: Callable[[nn.Module], Callable[..., Tensor]] | None = None,
        manager_options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        refuse_others(others)
        self.args = args = resolve_arguments(self.arguments_class, args)
        choose_workspace(args)
        self.env = env = distributed_env or DistributedEnvironment.from_environ(args)
        self.device, self.rank, self.world_size = env.device, env.rank, env.world_size
        self.builder = ModelBuilder(
            args, model, model_init, enable_activation_checkpoint_fn, self.rank
        )
        self.data_collator, self.processing_class = data_collator or collate, processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.fused_loss_factory = compute_loss_func, fused_loss_factory
        self.optimizer_choice: dict[str, Any] = {
            "factory": optimizer_factory,
            "cls_and_kwargs": optimizer_cls_and_kwargs,
            "groups": optimizer_groups,
        }
        self.lr_scheduler_factory = lr_scheduler_factory
        self.manager_options = dict(manager_options or {})
        self.check()
        apply_settings(args, self.rank)
        seed = args.seed if args.data_seed is None else args.data_seed
        self.data_seed = int(env.broadcast_object(seed if seed >= 0 else secrets.randbits(32)))
        self.loader: Any = None if train_dataset is None else self.make_train_loader()
        self.beginning = None if self.loader is None else self.loader.state_dict()
        self.args_in_use = self.use_args()
        self.callbacks = CallbackHandler(
            self.default_callbacks() if callbacks is None else callbacks,
            context=self.callback_extras,
        )
        add_reporters(self.callbacks, args.reporters)
        self.build_model()
        self.filled = self.builder.filled  # False: without values, which a checkpoint is to bring
        self.loss_function = make_loss_function(
            self.model, compute_loss_func, self.fused_loss_factory, args.label_smoothing_factor
        )
        self.shifts_labels = shifts_labels(self.model, self.loss_function)
        self.begin_anew()
        self.fire("on_init_end")

    def check(self) -> None:
        """What the arguments cannot know by themselves. Raises InvalidArgument."""
        self.args.check_trainer(self.kind, self.world_size)
        if not self.args.save_safetensors and self.rank == 0:
            why = "nothing here pickles, so weights are safetensors always"
            log.warning("save_safetensors=False has no effect: %s", why)
        factory, kwargs = self.optimizer_choice["factory"], self.optimizer_choice["cls_and_kwargs"]
        self.args.check_parts(
            self.kind,
            model=self.builder.model,
            model_init=self.builder.model_init,
            eval_dataset=self.eval_dataset,
            compute_loss_func=self.compute_loss_func,
            fused_loss_factory=self.fused_loss_factory,
            optimizer_factory=factory,
            optimizer_cls_and_kwargs=kwargs,
            enable_activation_checkpoint_fn=self.builder.enable_checkpointing,
            pipe_schedule=self.pipe_schedule_factory,
        )
        if factory is None and kwargs is None:
            optimizer_class(self.args)  # its package is there, and its class has the options

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """What a trainer has where it is given none."""
        return [shipped.DefaultMetrics(), shipped.ProgressCallback(), shipped.InfoCallback()]

    def begin_anew(self) -> None:
        """As before the first step; the weights stay what they are."""
        args, env = self.args, self.env
        self.control, self.meters, self.measured_step = TrainerControl(), Meters(args), -1
        self.state = TrainerState(
            is_world_process_zero=env.rank == 0,
            is_local_process_zero=env.local_rank == 0,
            max_eval_steps=args.max_eval_steps,
            num_train_epochs=args.num_train_epochs,
        )
        self.scaler: Any = None
        if args.mixed_precision == "fp16":
            self.scaler = torch.amp.GradScaler(self.device.type)
        self.used = False
        if self.loader is None:
            return
        total = self.state.max_steps = self.count_steps()
        self.state.train_batch_size = args.global_batch(self.data_parallel[1])
        for name in ("logging_steps", "eval_steps", "save_steps"):
            setattr(self.state, name, steps_of(getattr(args, name), total))
        self.build_optimizer()

    def count_steps(self) -> int:
        """Optimizer steps of the whole run."""
        args, batches = self.args, self.loader.batches_per_epoch
        if args.max_steps > 0:
            return int(args.max_steps)
        per_epoch = args.epoch_train_steps
        if batches is not None:
            per_epoch = -(-batches // args.gradient_accumulation_steps)
        return math.ceil(float(args.num_train_epochs) * int(per_epoch))

    # The run.

    def train(self) -> TrainResult:
        """Train to the end, from the newest usable checkpoint of output_dir if there is one."""
        if self.loader is None:
            raise InvalidArgument("train_dataset", None, "nothing to train on", "give one")
        with ExitStack() as until_the_end:
            self.checkpoints = until_the_end.enter_context(self.open_checkpoints())
            resumed_from = self.go_on()
            if self.is_over():
                done, last = self.state.global_step, self.state.max_steps
                if self.rank == 0:
                    log.info("nothing to do: step %d of %d is reached", done, last)
                self.load_best()
                return TrainResult(done, 0, resumed_from, self.state.log_history)
            until_the_end.callback(self.loader.close)
            self.check_interrupt = until_the_end.enter_context(lasting_interrupt())
            try:
                self.guard: PreemptionGuard | None = until_the_end.enter_context(
                    preemption_guard(self.args, self.checkpoints.manager)
                )
                if self.args.detect_anomaly:
                    until_the_end.enter_context(torch.autograd.set_detect_anomaly(True))
                return self.run(resumed_from)
            except BaseException:
                self.callbacks.close()
                raise

    def open_checkpoints(self) -> Checkpoints:
        return Checkpoints(self.args, self.env, self.get_process_groups(), self.manager_options)

    def go_on(self) -> int | None:
        """Go back to the start, then on to the checkpoint that there is, if any: its step."""
        if self.used:
            self.begin_anew()
            self.loader.load_state_dict(self.beginning)
            self.callbacks.reset()
        self.used = True
        metadata: dict[str, Any] = {}
        report = self.checkpoints.restore(self, self.is_restored)
        if report is not None and report.manifest is not None:
            self.checkpoints.refuse_later_steps(report, self.state)
            if self.args.ignore_data_skip:
                self.loader.go_to_epoch(int(self.state.epoch))
            metadata = dict(report.manifest.metadata)
            if Path(report.path or "").resolve().parent != Path(self.args.output_dir).resolve():
                self.callbacks.resumed_elsewhere()
                metadata.pop("logging_dir", None)
            if self.rank == 0:
                log.info("resumed from step %d (%s)", self.state.global_step, report.path)
                self.warn_of_changes(report.manifest.world_size, metadata)
            self.checkpoints.check_best(self.state)
        elif not self.filled:
            text = "the checkpoint that was to fill the model is gone"
            raise CheckpointNotFound(text, path=self.args.output_dir)
        self.filled = True
        if not self.is_over():
            self.logging_dir = choose_logging_dir(self.args, self.env, metadata)
            self.args_in_use = self.use_args()
        return None if report is None else self.state.global_step

    def is_restored(self, component: str) -> bool:
        """What a run that goes on takes from its checkpoint."""
        if component == "loader":
            return not self.args.ignore_data_skip
        if component in ("callbacks", "callbacks_per_rank"):
            return bool(self.args.restore_callback_states_from_checkpoint)
        return True

    def warn_of_changes(self, ranks: int, metadata: dict[str, Any]) -> None:
        """One warning for all that makes the run another one than it was."""
        changed = list(self.args.differences(metadata.get("training_args", {})))
        if ranks != self.world_size:
            now = f"{self.world_size} (random streams start anew)"
            changed.append(f"number of ranks {ranks} -> {now}")
        if changed:
            kept = "The states of optimizer, schedule and data position come from the checkpoint"
            text = "changed since the checkpoint: %s. %s all the same"
            log.warning(text, ", ".join(changed), kept)

    def is_over(self) -> bool:
        """Whether nothing is left to do: at the last step, or where a callback ended the run."""
        asked = (getattr(callback, "run_is_over", None) for callback in self.callbacks.callbacks)
        ended = [bool(over(self.args, self.state)) for over in asked if over is not None]
        return self.state.global_step >= self.state.max_steps or any(ended)

    def run(self, resumed_from: int | None) -> TrainResult:
        state = self.state
        self.agreement, self.stopped = Agreement(self.env), False
        self.meters.start(state.global_step)
        self.fire("on_train_begin")
        if self.args.eval_on_start and resumed_from is None:
            self.evaluate_now(counts=False)
        while state.global_step < state.max_steps and not self.stopped:
            self.control.should_epoch_stop = False
            self.fire("on_epoch_begin")
            epoch_is_over = False
            while not epoch_is_over and not self.stopped:
                self.training_step()
                if (
                    state.steps_run == 1
                    and self.args.save_async
                    and self.args.save_strategy != "no"
                ):
                    # All of the state has come to be: have ready what the first save would wait
                    # for.
                    self.checkpoints.manager.prewarm(self.settled_state())
                epoch_is_over = self.after_step()
            self.fire("on_epoch_end")
            if epoch_is_over:
                self.after_epoch()
        self.announce(self.checkpoints.wait())
        self.checkpoints.manager.wait()  # raises where a save failed and nobody was told
        if not self.control.should_abort_without_save:
            self.load_best()
        metrics = self.meters.summary(self.reduce, state)
        self.log(metrics)
        self.fire("on_train_end")
        return TrainResult(
            state.global_step,
            state.steps_run,
            resumed_from,
            state.log_history,
            metrics,
            state.stop_reason,
            self.checkpoints.manager.failed_steps,
        )

    # One step.

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
        self.meters.add(loss, state)
        free_memory(args, self.device, state.global_step)
        self.fire("on_train_metrics", metrics=metrics)
        self.fire("on_step_end")

    def items_of(self, group: list[Counted]) -> float:
        """What the loss of the step is averaged over, on all ranks: the labels that count; samples
        where the batches have none."""
        if self.loss_function is None and all(labels_of(batch) is None for batch, _, _ in group):
            return float(sum(of_all_ranks for _, _, of_all_ranks in group))
        mine = float(sum(self.items_in(batch) for batch, samples, _ in group if samples))
        return max(self.reduce([mine])[0] if self.data_parallel[1] > 1 else mine, 1.0)

    def items_in(self, batch: Any) -> int:
        """Labels of a batch that count; its samples where it has none."""
        labels = labels_of(batch)
        return rows_of(batch) if labels is None else count_labels(labels, self.shifts_labels)

    def learning_rate(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def epochs_done(self) -> float:
        loader = self.loader
        done, left = float(loader.epoch), loader.batches_left
        if loader.epoch_ended or left is None:
            return done
        return done + 1 - float(left / loader.batches_per_epoch)

    # Between two steps.

    def after_step(self) -> bool:
        """Do what is due. Whether the epoch is over; then its saves are left to `after_epoch`, so
        that they have all of the epoch."""
        state = self.state
        ends = self.loader.epoch_ended or state.global_step >= state.max_steps
        now = due(self.args, state, "steps")
        self.agree(now, at_once=ends or bool(now))
        if self.control.should_epoch_stop and not ends:
            self.loader.go_to_epoch(self.loader.epoch + 1)
            state.epoch = self.epochs_done()
        over = bool(ends or self.control.should_epoch_stop)
        self.act(may_save=not over)
        return over

    def after_epoch(self) -> None:
        """The same after on_epoch_end, for what is due once per epoch."""
        state = self.state
        whole = self.loader.epoch_ended or state.global_step >= state.max_steps
        self.agree(due(self.args, state, "epoch") if whole else set())
        self.act(may_save=True)

    def agree(self, flags: Collection[str] = (), at_once: bool = True) -> None:
        """Let `control` be what all ranks know of: what any asked for, and what is due."""
        control = self.control
        self.check_interrupt()
        self.agreement.reach(control, flags, self.checkpoints.ended(), at_once)
        stops = self.guard is not None and self.guard.should_stop(self.state.global_step)
        if stops and not control.should_abort_without_save:
            self.state.stop_reason = "sigterm"
            control.should_training_stop = control.should_save = True
        if self.agreement.saves > self.checkpoints.announced:
            self.announce(self.agreement.saves)
            if self.world_size > 1 and self.callbacks.has("on_checkpoint_commit"):
                self.agree()

    def act(self, may_save: bool) -> None:
        """Log, evaluate, save, stop: whatever is asked for."""
        control = self.control
        if control.should_log:
            control.should_log = False
            values = self.meters.take(self.reduce, self.state, self.learning_rate())
            if self.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(self.device)
                values["peak_mem_allocated"] = self.env.gather_objects(peak)
            self.log(values)
            self.agree()
        saves = may_save and (self.control.should_save or self.ends_with_a_save())
        wanted = self.control.should_evaluate or (
            saves and self.args.eval_on_save and self.measured_step != self.state.global_step
        )
        if wanted and not self.control.should_abort_without_save:
            improved = self.evaluate_now()
            self.control.should_save |= improved and self.args.save_strategy == "best"
            self.control.should_evaluate = False
            self.agree()
        saves = may_save and (self.control.should_save or self.ends_with_a_save())
        if saves and not self.control.should_abort_without_save:
            self.control.should_save = False
            self.save()
        if self.control.should_training_stop and may_save:
            self.stop_here()

    def ends_with_a_save(self) -> bool:
        """At the last boundary, where saves are scheduled at all."""
        last = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        return bool(last and self.args.save_strategy in ("steps", "epoch"))

    def stop_here(self) -> None:
        state = self.state
        self.stopped = True
        if state.stop_reason is None:
            state.stop_reason = "requested"
            if self.control.should_abort_without_save:
                state.stop_reason = "aborted"
        names = self.env.gather_objects(state.stop_requested_by)
        state.stop_requested_by = next((name for name in names if name), None)
        if self.rank == 0:
            who = state.stop_requested_by or state.stop_reason
            log.info("stopping at step %d: %s", state.global_step, who)

    # Saving.

    def settled_state(self) -> Any:
        """What is saved, with nothing of it under way any more."""
        self.meters.settle(self.reduce, self.state)
        self.share_state()
        return self.weights() if self.args.save_only_model else self

    def weights(self) -> list[StateComponent]:
        return [part for part in self.model_components() if part.key == "model"]

    def save(self) -> None:
        """Save this step, once."""
        state, began = self.state, time.perf_counter()
        if self.checkpoints.last_step == state.global_step:
            return
        # How the save before ended is announced before the next call raises it.
        self.announce(self.checkpoints.wait())
        if state.best_step == state.global_step:
            state.best_checkpoint = f"checkpoint-{state.global_step}"
        wait = state.stop_reason == "sigterm" or not self.args.save_async
        folder = self.logging_dir
        path = self.checkpoints.save(
            state.global_step,
            self.settled_state(),
            metrics=self.measured(),
            metadata={
                "training_args": self.args.as_dict(),
                "logging_dir": folder and relative_to_root(folder, self.args.output_dir),
            },
            wait=wait,
            began=began,
        )
        self.fire("on_save", checkpoint_path=path, checkpoint_step=state.global_step)
        if wait:
            self.announce(self.checkpoints.ended())

    def measured(self) -> dict[str, float]:
        """What was measured at this step, for the manifest."""
        history = self.state.log_history
        found = history[-1] if history and history[-1]["step"] == self.state.global_step else {}
        kept = ("loss", "grad_norm", "learning_rate", "epoch", "eval_")
        numbers = {name: v for name, v in found.items() if isinstance(v, int | float)}
        return {name: v for name, v in numbers.items() if name.startswith(kept)}

    def announce(self, count: int) -> None:
        """on_checkpoint_commit, where the last of `count` saves was not announced. On all ranks."""
        if (record := self.checkpoints.record(count)) is not None:
            self.fire("on_checkpoint_commit", record=record)

    def load_best(self) -> None:
        if self.args.load_best_model_at_end:
            self.checkpoints.load_best(self.weights(), self.state)

    def save_model(self, path: str | None = None) -> None:
        """Write weights, config and processing class to a folder, for use outside of training."""
        self.fill_weights()
        self.share_state()
        state = self.export_state()
        if self.rank == 0:
            write_model(path or self.args.output_dir, state, self.model, self.processing_class)
        self.env.max_flags([0])  # nobody goes on before it is there

    def fill_weights(self) -> None:
        """A model that was built without values gets those of the checkpoint."""
        if self.filled:
            return
        with self.open_checkpoints() as checkpoints:
            checkpoints.restore(self.weights(), "model")
        self.filled = True

    # Evaluation, and what is logged.

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Mean loss over the evaluation data, or over other data."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise InvalidArgument("eval_dataset", None, "nothing to evaluate", "give one")
        self.fill_weights()
        metrics: dict[str, Any] = self.measure(dataset, "eval")
        self.fire("on_evaluate", metrics=metrics)
        metrics = plain_numbers(metrics, "on_evaluate")  # with what callbacks have added
        self.state.note(metrics)
        return metrics

    def evaluate_now(self, counts: bool = True) -> bool:
        """Evaluate as a part of training: whether it was the best; counts: whether it may be."""
        metrics = self.evaluate()
        self.measured_step = self.state.global_step
        return counts and self.note_best(metrics)

    def predict(self, dataset: Any) -> dict[str, float]:
        """Mean loss over any data, as a prediction."""
        self.fill_weights()
        metrics = self.measure(dataset, "test")
        self.fire("on_predict", metrics=metrics)
        return metrics

    def measure(self, dataset: Any, prefix: str) -> dict[str, float]:
        """Mean loss over a data set; over each of several that have names."""
        self.share_state()
        if isinstance(dataset, Mapping):
            found: dict[str, float] = {}
            for name, data in dataset.items():
                found |= self.measure(data, f"{prefix}_{name}")
            return found
        return {f"{prefix}_loss": self.mean_loss(dataset)}

    @torch.no_grad()
    def mean_loss(self, dataset: Any) -> float:
        """Over a data set, each rank its share. Training does not notice: the random streams are
        others, and the same at each evaluation."""
        was_training, on_device = self.wrapped.training, self.device.type == "cuda"
        sums: list[tuple[Tensor, Tensor]] = []  # read at the end: the device is not waited for
        self.eval_loader = self.evaluation_batches(dataset)
        self.wrapped.eval()
        try:
            devices = [self.device] if on_device else []
            with torch.random.fork_rng(devices), seeded_random(self.data_seed):
                for batch, counts in self.eval_loader:
                    sums += [self.evaluate_batch(batch)][: int(counts)]
                    self.fire("on_prediction_step")
        finally:
            self.wrapped.train(was_training)
            self.eval_loader = None
        total, items = self.reduce([sum(float(pair[i]) for pair in sums) for i in (0, 1)])
        return total / items if items else float("nan")

    def evaluation_batches(self, dataset: Any) -> EvaluationBatches:
        args = self.args
        rank, ranks = (0, 1) if has_its_part(dataset) else self.data_parallel
        return EvaluationBatches(
            dataset,
            args.per_device_eval_batch_size,
            rank,
            ranks,
            limit=args.max_eval_steps if args.max_eval_steps > 0 else None,
            in_step=self.evaluates_in_step,
            fixed_shapes=self.fixed_shapes,
            loader={
                "collate_fn": self.data_collator,
                "num_workers": args.dataloader_num_workers,
                "pin_memory": args.dataloader_pin_memory and self.device.type == "cuda",
            },
        )

    def note_best(self, metrics: Mapping[str, Any]) -> bool:
        """Whether these metrics, those of rank 0, are the best so far. On all ranks.

        Raises InvalidArgument where the metric is not among them and something depends on it.
        """
        state, args, rule = self.state, self.args, best_rule(self.args)
        # What callbacks add may be known on rank 0 alone.
        value, names = self.env.broadcast_object((metrics.get(rule.metric), sorted(metrics)))
        keeps = args.load_best_model_at_end or args.preserve_best_model
        if value is None and (keeps or args.save_strategy == "best"):
            given, reason = args.metric_for_best_model, f"evaluations give {', '.join(names)}"
            instead = f"name one of these, or let a callback add {rule.metric} in on_evaluate"
            raise InvalidArgument("metric_for_best_model", given, reason, instead)
        if value is None or value != value:
            return False
        best = state.best_metric
        if best is not None and not (value < best if rule.mode == "min" else value > best):
            return False
        state.best_metric, state.best_step = float(value), state.global_step
        state.best_checkpoint = None  # until this step is saved, if it is
        return True

    def log(self, values: dict[str, Any]) -> None:
        """Let callbacks add to a record of this step and write it, also into the history."""
        logs = {**values, "epoch": self.state.epoch}
        self.fire("on_log_step", logs=logs)
        logs = plain_numbers(logs, "on_log_step")
        self.state.note(logs)
        self.fire("on_log", logs=logs)

    def fire(self, event: str, **extra: Any) -> None:
        args = self.args_in_use
        self.control = self.callbacks.fire(event, args, self.state, self.control, **extra)

    def use_args(self) -> Any:
        """The arguments as callbacks see them: with what was left open filled in."""
        env, ranks = self.env, self.data_parallel[1]
        here = (env.rank, env.local_rank, env.world_size, ranks, self.device, self.logging_dir)
        return self.args.as_seen_by_callbacks(Process(*here))

    def callback_extras(self) -> dict[str, Any]:
        return {
            "model": getattr(self, "model", None),
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "train_dataloader": self.loader,
            "eval_dataloader": self.eval_loader,
            "trainer": self,
        }

    # What trainers for several processes change: how things are built,

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) among those that take different data."""
        return self.rank, self.world_size

    @property
    def restorable(self) -> bool:
        """Whether a checkpoint will fill the model; the same on all ranks."""
        return is_restorable(self.args, self.env)

    def build_model(self) -> None:
        """Set `model`, the bare module, and `wrapped`, what forward is called on."""
        self.model = self.build_bare(self.device)
        self.wrapped: nn.Module = self.builder.compile(self.model)

    def build_bare(self, device: torch.device | str) -> nn.Module:
        """Without values where the arguments want that and a checkpoint brings them."""
        empty = self.args.construct_model_on == "meta" and self.restorable
        return self.builder.build(device, empty=empty)

    def build_optimizer(self) -> None:
        """Set `optimizer` and `scheduler`."""
        self.optimizer = make_optimizer(self.args, self.model, **self.optimizer_choice)
        self.build_scheduler()
        for hook in self.fused:  # of an optimizer that was made before
            hook.remove()
        self.fused = fuse_optimizer(self.optimizer) if self.args.fuse_optim_with_backward else ()

    def build_scheduler(self) -> None:
        self.scheduler = make_scheduler(
            self.args, self.optimizer, self.state.max_steps, self.lr_scheduler_factory
        )

    def make_train_loader(self) -> Loader:
        rank, size = self.data_parallel
        return self.make_loader(rank, size, self.args.per_device_train_batch_size)

    def make_loader(self, rank: int, size: int, batch_size: int, shares: int = 1) -> Loader:
        """What hands out the training batches of one of `size` data-parallel ranks. shares: a batch
        is that of so many ranks, to be handed out."""
        args, dataset = self.args, self.train_dataset
        if isinstance(dataset, torch.utils.data.DataLoader):
            return ForeignLoader(
                dataset, seed=self.data_seed, rank=rank, call_set_epoch=args.set_dataset_epoch
            )
        collator = self.data_collator
        collator = CollateShares(collator, shares) if shares > 1 else collator
        return ResumableLoader(
            dataset,
            batch_size,
            seed=self.data_seed,
            drop_last=args.dataloader_drop_last or self.fixed_shapes,
            rank=rank,
            world_size=size,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and self.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            collate_fn=collator,
            epoch_steps=args.epoch_train_steps * args.gradient_accumulation_steps,
            call_set_epoch=args.set_dataset_epoch,
        )

    # how a batch becomes a gradient and a gradient a step,

    def move_batch(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return {name: self.move_batch(value) for name, value in batch.items()}
        if isinstance(batch, tuple | list):
            return type(batch)(self.move_batch(value) for value in batch)
        return batch.to(self.device, non_blocking=True) if isinstance(batch, Tensor) else batch

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around each batch of a step; `last`: the gradient is complete after it."""
        return nullcontext()

    def computing(self, training: bool = True) -> AbstractContextManager[Any]:
        """Around each forward pass."""
        return computing(self.args, self.device, training)

    def forward_backward(self, group: list[Counted], items: float) -> Tensor:
        """Gradients of one step. Returns this rank's share of the mean loss: the sum over the ranks
        is that of the step.

        items: what the loss is averaged over, on all ranks.
        """
        total = torch.zeros((), device=self.device)
        _, ranks = self.data_parallel
        for number, (batch, samples, _) in enumerate(group, start=1):
            last = number == len(group)
            self.fire("on_forward_backward_begin")
            with self.accumulating(last):
                with self.computing():
                    share = self.loss_share(batch, samples, items)
                # The gradient of a step is the mean of those of the ranks.
                self.backward(share * ranks)
            total += share.detach()
            self.fire("on_forward_backward_end")
            if not last:
                self.fire("on_substep_end")
        return total

    def loss_share(self, batch: Any, samples: int, items: float) -> Tensor:
        """A batch's part in the mean loss over `items`."""
        if self.loss_function is None:
            weight = self.items_in(batch) / items if samples else 0.0
            return loss_of(self.forward(self.move_batch(batch))) * weight
        batch = self.move_batch(batch)
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        loss: Tensor = self.loss_function(self.forward(inputs), batch["labels"], items)
        return loss if samples else loss * 0

    def forward(self, batch: Any) -> Any:
        return self.wrapped(**batch) if isinstance(batch, Mapping) else self.wrapped(*batch)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def clip_gradients(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def optimizer_step(self) -> bool:
        """Whether it was done; False where the scaler left it out."""
        if self.scaler is None:
            self.optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return bool(self.scaler.get_scale() >= before)

    def evaluate_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(sum of the loss, number of what it was summed over) of one batch."""
        count = self.items_in(batch)
        with self.computing(training=False):
            loss = self.loss_share(batch, 1, max(count, 1))
        return loss.double() * max(count, 1), torch.tensor(float(count), device=loss.device)

    def reduce(self, values: Sequence[Any]) -> list[float]:
        """Sums over the data-parallel ranks."""
        return self.env.sums([float(value) for value in values])

    # and who shares which state.

    def model_components(self) -> list[StateComponent]:
        alone = self.world_size == 1
        shared = SharingPattern.GLOBAL if alone else SharingPattern.REPLICATED
        return self.components_of(self.model, self.model, shared)

    def components_of(
        self, model: Any, modules: Any, pattern: SharingPattern
    ) -> list[StateComponent]:
        """Model and optimizer. modules: whose parameters the optimizer has."""
        found = [StateComponent("model", model, pattern)]
        if self.optimizer is not None:
            state = OptimizerState(self.optimizer, modules)
            found.append(StateComponent("optimizer", state, pattern))
        return found

    def get_state_components(self) -> list[StateComponent]:
        """Everything that a run needs to go on as if it had never stopped."""
        args = self.args
        goes_on = args.on_world_size_change == "continue"
        shared, own = SharingPattern.GLOBAL, SharingPattern.PER_RANK
        # Always there, so that a checkpoint of a run with such callbacks can be read without them.
        kept = self.callbacks.per_rank()
        per_rank = StateComponent("callbacks_per_rank", Part(kept), own)
        per_rank.on_resize = ("keep" if goes_on else "error") if kept else (lambda *_: 0)
        found = [
            *self.model_components(),
            StateComponent("scheduler", Part(self.scheduler), shared),
            StateComponent("scaler", Part(self.scaler), shared),
            StateComponent("trainer", self, shared),
            StateComponent("callbacks", self.callbacks, shared),
            # A position in the data means the same on any number of ranks; no random stream does.
            StateComponent("rng", RNGState(), own, on_resize="keep" if goes_on else "error"),
            per_rank,
        ]
        if self.loader is not None:
            pattern = own if self.loader.state_per_rank else shared
            found.append(StateComponent("loader", self.loader, pattern))
        return found

    def state_dict(self) -> dict[str, Any]:
        """The trainer's own numbers."""
        return {"state": self.state.state_dict(), "meters": self.meters.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state.load_state_dict(state["state"])
        self.meters.load_state_dict(state["meters"])

    def get_process_groups(self) -> dict[str, Any]:
        return {}

    def share_state(self) -> None:
        """Before a save or an evaluation: let all ranks hold what one of them is right about."""

    def export_state(self) -> dict[str, Tensor]:
        """The whole weights, on every rank that is to write them."""
        return dict(self.model.state_dict())


def refuse_others(others: Mapping[str, Any]) -> None:
    """Names that no trainer has. Raises InvalidArgument for Hugging Face's, TypeError else."""
    for name, value in others.items():
        if name not in INSTEAD:
            raise TypeError(f"a trainer takes no argument {name!r}")
        raise InvalidArgument(name, value, "a trainer does not take it", INSTEAD[name])


def add_reporters(handler: CallbackHandler, names: Sequence[str]) -> None:
    """The loggers that `report_to` names, unless there are some of the kind."""
    kinds = {"json": "JsonLogger", "tensorboard": "TBLogger"}
    for name in names:
        logger = getattr(shipped, kinds[name])
        if any(isinstance(callback, logger) for callback in handler.callbacks):
            continue
        if name == "tensorboard":
            handler.add(logger(handler.add(shipped.ResumableSummaryWriter(None))))
        else:
            handler.add(logger())
