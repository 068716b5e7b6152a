"""What a trainer is made of: its constructor, and what the trainers for several processes change of
it."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ckptcore import CheckpointManager, CheckpointNotFound, SharingPattern, StateComponent

from .arguments import TrainingArguments, resolve_arguments, steps_of
from .best import BestModel
from .build import Models, apply_settings
from .callbacks.protocol import CallbackHandler, TrainerControl, TrainerState
from .checkpoints import Saves
from .data.foreign import ForeignLoader
from .data.loader import ResumableLoader
from .losses import labels_in, loss_of, make_loss_function, samples_in
from .meters import Meters
from .optim import make_optimizer, optimizer_class
from .optimizer_states import optimizer_state
from .parallel.environment import DistributedEnvironment, choose_workspace
from .records import add_reporters, choose_logging_dir, set_log_level
from .run_state import run_components
from .schedules import make_scheduler

__all__ = ["Micro", "TrainerParts"]

log = logging.getLogger(__name__)

Micro = tuple[Any, int, int]  # a batch, its samples, and those of all data-parallel ranks


class TrainerParts(Models):
    """All of a trainer but the loop. A subclass for several processes changes how the model is
    prepared, how a batch reaches it, and who shares which state.

    args: arguments of the class `arguments_class`, or a mapping. train_dataset, eval_dataset:
    map-style, iterable, or a DataLoader, which is used as it is. compute_loss_func: (outputs,
    labels, items) -> the sum over a batch divided by `items`, the labels of the whole step; without
    it the model's own loss counts. fused_loss_factory: makes such a function of the model.
    distributed_env: by default what the launcher says.
    """

    kind: ClassVar[str] = "single"
    arguments_class: ClassVar[type[Any]] = TrainingArguments
    evaluates_together: ClassVar[bool] = (
        False  # all ranks must run the same number of evaluation batches
    )
    fixed_shapes: ClassVar[bool] = False  # batches shorter than the others cannot be used

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
    ) -> None:
        self.args = args = resolve_arguments(self.arguments_class, args)
        choose_workspace(args)
        self.env = env = distributed_env or DistributedEnvironment.from_environ(args)
        self.device, self.rank, self.world_size = env.device, env.rank, env.world_size
        self.given_model, self.model_init = model, model_init
        self.data_collator, self.processing_class = data_collator, processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.fused_loss_factory = compute_loss_func, fused_loss_factory
        self.optimizer_factory, self.optimizer_cls_and_kwargs = (
            optimizer_factory,
            optimizer_cls_and_kwargs,
        )
        self.optimizer_groups, self.lr_scheduler_factory = optimizer_groups, lr_scheduler_factory
        self.enable_activation_checkpoint_fn = enable_activation_checkpoint_fn
        self.check()
        set_log_level(args, env)
        apply_settings(args)
        self.saves, self.best = Saves(self), BestModel(self)
        self.data_seed = self.choose_data_seed()
        self.loader: Any = None if train_dataset is None else self.make_train_loader()
        self.beginning = None if self.loader is None else self.loader.state_dict()
        self.logging_dir: str | None = None
        self.eval_loader: Any = None
        self.scheduler: Any = None
        self.optimizer = None
        self.callbacks = CallbackHandler(
            self.default_callbacks() if callbacks is None else callbacks,
            context=self.callback_extras,
        )
        add_reporters(self)
        self.build_model()
        self.loss_function = make_loss_function(
            self.model, self.compute_loss_func, self.fused_loss_factory, args.label_smoothing_factor
        )
        self.begin_anew()
        self.fire("on_init_end")

    def check(self) -> None:
        """What the arguments cannot know by themselves. Raises InvalidArgument."""
        self.args.check_trainer(self.kind, self.world_size)
        if not self.args.save_safetensors and self.rank == 0:
            log.warning(
                "save_safetensors=False has no effect: nothing here pickles, so weights are "
                "safetensors always"
            )
        self.args.check_parts(
            self.kind,
            model=self.given_model,
            model_init=self.model_init,
            eval_dataset=self.eval_dataset,
            compute_loss_func=self.compute_loss_func,
            fused_loss_factory=self.fused_loss_factory,
            optimizer_factory=self.optimizer_factory,
            optimizer_cls_and_kwargs=self.optimizer_cls_and_kwargs,
            enable_activation_checkpoint_fn=self.enable_activation_checkpoint_fn,
        )
        if self.optimizer_factory is None and self.optimizer_cls_and_kwargs is None:
            optimizer_class(self.args)  # its package is there, and its class has the options

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        from .callbacks import DefaultMetrics, InfoCallback, ProgressCallback

        return [DefaultMetrics(), ProgressCallback(), InfoCallback()]

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
        self.scaler = (
            torch.amp.GradScaler(self.device.type) if args.mixed_precision == "fp16" else None
        )
        self.used = False
        if self.loader is not None:
            total = self.state.max_steps = self.count_steps()
            self.state.train_batch_size = args.global_batch(self.data_parallel[1])
            for name in ("logging_steps", "eval_steps", "save_steps"):
                setattr(self.state, name, steps_of(getattr(args, name), total))
            self.build_optimizer()

    def count_steps(self) -> int:
        args, batches = self.args, self.loader.batches_per_epoch
        if args.max_steps > 0:
            return int(args.max_steps)
        per_epoch = (
            args.epoch_train_steps
            if batches is None
            else -(-batches // args.gradient_accumulation_steps)
        )
        return math.ceil(float(args.num_train_epochs) * int(per_epoch))

    def prepare_run(self, checkpoints: CheckpointManager) -> int | None:
        """Go back to the start, then on to the checkpoint that there is, if any: its step."""
        if self.used:
            self.begin_anew()
            self.loader.load_state_dict(self.beginning)
            self.callbacks.reset()
        self.used = True
        resumed_from: int | None
        resumed_from, metadata = self.saves.restore(checkpoints)
        if resumed_from is None and not self.filled:
            raise CheckpointNotFound(
                "the checkpoint that was to fill the model is gone", path=self.args.output_dir
            )
        self.filled = True
        if not self.is_over():
            self.logging_dir = choose_logging_dir(self.args, self.env, metadata)
        return resumed_from

    def is_over(self) -> bool:
        """Whether there is nothing left to do: the last step is reached, or a callback had ended
        the run before it."""
        asked = (getattr(callback, "run_is_over", None) for callback in self.callbacks.callbacks)
        ended = [bool(over(self.args, self.state)) for over in asked if over is not None]
        return self.state.global_step >= self.state.max_steps or any(ended)

    def fill_weights(self) -> None:
        """A model that was built without values gets those of the checkpoint."""
        if not self.filled:
            with self.saves.open() as checkpoints:
                wanted = self.args.resume_from_checkpoint
                step = "latest" if wanted is True else wanted
                step = self.saves.which_is_best(checkpoints) if wanted == "best" else step
                checkpoints.load(self.saves.weights(), step)
            self.filled = True

    def fire(self, event: str, **extra: Any) -> None:
        self.control = self.callbacks.fire(event, self.args, self.state, self.control, **extra)

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

    def learning_rate(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def epochs_done(self) -> float:
        loader = self.loader
        done, left = float(loader.epoch), loader.batches_left
        return (
            done
            if loader.epoch_ended or left is None
            else done + 1 - left / loader.batches_per_epoch
        )

    def choose_data_seed(self) -> int:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return int(self.env.broadcast_object(seed if seed >= 0 else secrets.randbits(32)))

    # What subclasses change.

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) among those that take different data."""
        return self.rank, self.world_size

    def build_model(self) -> None:
        """Set `model`, the bare module, and `wrapped`, what forward is called on."""
        self.model = self.construct()
        self.wrapped: nn.Module = self.compile(self.model)

    def build_optimizer(self) -> None:
        """Set `optimizer` and `scheduler`."""
        self.optimizer = make_optimizer(
            self.args,
            self.model,
            factory=self.optimizer_factory,
            cls_and_kwargs=self.optimizer_cls_and_kwargs,
            groups=self.optimizer_groups,
        )
        self.scheduler = make_scheduler(
            self.args, self.optimizer, self.state.max_steps, self.lr_scheduler_factory
        )
        self.fuse_optimizer()

    def make_train_loader(self) -> Any:
        rank, size = self.data_parallel
        return self.make_loader(rank, size, self.args.per_device_train_batch_size)

    def make_loader(self, rank: int, size: int, batch_size: int) -> Any:
        """What hands out the training batches of one of `size` data-parallel ranks."""
        args, dataset = self.args, self.train_dataset
        if isinstance(dataset, torch.utils.data.DataLoader):
            return ForeignLoader(
                dataset, seed=self.data_seed, rank=rank, call_set_epoch=args.set_dataset_epoch
            )
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
            collate_fn=self.data_collator,
            epoch_steps=args.epoch_train_steps * args.gradient_accumulation_steps,
            call_set_epoch=args.set_dataset_epoch,
        )

    def move_batch(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return {name: self.move_batch(value) for name, value in batch.items()}
        if isinstance(batch, tuple | list):
            return type(batch)(self.move_batch(value) for value in batch)
        return batch.to(self.device, non_blocking=True) if isinstance(batch, Tensor) else batch

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around each batch of a step; `last`: the gradient is complete after it."""
        return nullcontext()

    def forward_backward(self, group: list[Micro], items: float) -> Tensor:
        """Gradients of one step. Returns this rank's share of the mean loss: the sum over the ranks
        is that of the step.

        items: labels (where there is a loss function), else samples, of the step on all ranks.
        """
        total = torch.zeros((), device=self.device)
        _, ranks = self.data_parallel
        for number, (batch, samples, _) in enumerate(group, start=1):
            batch, last = self.move_batch(batch), number == len(group)
            self.fire("on_forward_backward_begin")
            with self.accumulating(last):
                with self.computing():
                    share = self.loss_share(batch, samples, items)
                self.backward(
                    share * ranks
                )  # the gradient of a step is the mean of those of the ranks
            total += share.detach()
            self.fire("on_forward_backward_end")
            if not last:
                self.fire("on_substep_end")
        return total

    def loss_share(self, batch: Any, samples: int, items: float) -> Tensor:
        """A batch's part in the mean loss over `items`."""
        if self.loss_function is None:
            return loss_of(self.forward(batch)) * (samples / items)
        labels, inputs = (
            batch["labels"],
            {name: value for name, value in batch.items() if name != "labels"},
        )
        loss: Tensor = self.loss_function(self.forward(inputs), labels, items)
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
        count = samples_in(batch) if self.loss_function is None else labels_in(batch)
        with self.computing(training=False):
            loss = self.loss_share(batch, 1, 1 if self.loss_function is None else max(count, 1))
        return loss.double() * count, torch.tensor(float(count), device=loss.device)

    def reduce(self, values: Sequence[Any]) -> list[float]:
        """Sums over the data-parallel ranks."""
        return self.env.sums([float(value) for value in values])

    def model_components(self) -> list[StateComponent]:
        shared = SharingPattern.GLOBAL if self.world_size == 1 else SharingPattern.REPLICATED
        found = [StateComponent("model", self.model, shared)]
        if self.optimizer is not None:
            found.append(
                StateComponent("optimizer", optimizer_state(self.optimizer, self.model), shared)
            )
        return found

    def get_process_groups(self) -> dict[str, Any]:
        return {}

    def share_state(self) -> None:
        """Before a save or an evaluation: let all ranks hold what only one of them is right
        about."""

    def get_state_components(self) -> list[StateComponent]:
        """Everything that a run needs to go on as if it had never stopped."""
        return [*self.model_components(), *run_components(self)]

    def export_state(self) -> dict[str, Tensor]:
        """The whole weights, on every rank that is to write them."""
        return dict(self.model.state_dict())
