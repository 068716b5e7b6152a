"""Training through an Accelerator of Hugging Face's accelerate, with this project's checkpoints."""

from __future__ import annotations

import copy
import importlib.util
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ..arguments import AccelTrainingArguments, InvalidArgument, resolve_arguments
from ..data.position import Loader
from .ddp import DDPTrainer
from .environment import DistributedEnvironment

log = logging.getLogger(__name__)

# Those of accelerate's ways to train that keep a whole model on each process.
_WHOLE = (
    "NO",
    "MULTI_CPU",
    *(f"MULTI_{name}" for name in ("GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU")),
)


class AccelTrainer(DDPTrainer):
    """A `Trainer` on every process of a configured Accelerator, which prepares the model and
    computes the gradients.

    Its precision and gradient accumulation are those of the Accelerator, whatever the arguments
    say. Of its loader configuration `split_batches` (per_device_train_batch_size is then the batch
    of all processes) and `dispatch_batches` (rank 0 reads for all; by default for streams only)
    hold; the loaders are this project's own, since those of accelerate cannot go on in the middle
    of an epoch to the last bit.
    """

    kind = "accel"
    arguments_class = AccelTrainingArguments

    def __init__(self, args: Any, *, accelerator: Any = None, **what: Any) -> None:
        if accelerator is None:
            there = importlib.util.find_spec("accelerate") is not None
            raise InvalidArgument(
                "accelerator",
                None,
                "AccelTrainer trains through one"
                if there
                else "the package accelerate is not installed",
                "give a configured accelerate.Accelerator"
                if there
                else "install ckptcore[accelerate], or use DDPTrainer",
            )
        self.accelerator = accelerator
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        if kind not in _WHOLE:
            raise InvalidArgument(
                "accelerator",
                kind,
                "it does not keep a whole model on each process",
                "use FSDP2Trainer or PipelineTrainer",
            )
        self.scaler_beginning = (
            accelerator.scaler.state_dict() if accelerator.scaler is not None else None
        )
        env = what.get("distributed_env") or DistributedEnvironment(
            accelerator.process_index,
            accelerator.local_process_index,
            accelerator.num_processes,
            device=accelerator.device,
        )
        if (env.rank, env.world_size) != (accelerator.process_index, accelerator.num_processes):
            raise InvalidArgument(
                "distributed_env",
                f"rank {env.rank} of {env.world_size}",
                f"the Accelerator is process {accelerator.process_index} of "
                f"{accelerator.num_processes}",
                "leave it out",
            )
        given = copy.copy(resolve_arguments(self.arguments_class, args))
        super().__init__(self.settled(given, env), **{**what, "distributed_env": env})

    def settled(self, args: Any, env: DistributedEnvironment) -> Any:
        """The arguments with what the Accelerator decides in their place."""
        accelerator, config = self.accelerator, self.accelerator.dataloader_config
        for name, value in args.accelerator_config.items():
            setattr(config, name, value)
        its = {"no": None, "fp8": None}.get(
            accelerator.mixed_precision, accelerator.mixed_precision
        )
        own = None if args.mixed_precision == "no" else args.mixed_precision
        self.override(args, env, "mixed_precision", its, ignored=own not in (None, its))
        self.override(args, env, "fp8_recipe", None, ignored=args.fp8_recipe is not None)
        its = accelerator.gradient_accumulation_steps
        self.override(
            args,
            env,
            "gradient_accumulation_steps",
            its,
            ignored=args.gradient_accumulation_steps != its,
        )
        if config.split_batches:
            if args.per_device_train_batch_size % env.world_size:
                raise InvalidArgument(
                    "accelerator_config.split_batches",
                    True,
                    f"per_device_train_batch_size={args.per_device_train_batch_size} is no "
                    f"multiple of {env.world_size} processes",
                    "make it one, or do not split",
                )
            args.per_device_train_batch_size //= env.world_size
        return args

    @staticmethod
    def override(
        args: Any, env: DistributedEnvironment, name: str, value: Any, ignored: bool
    ) -> None:
        if ignored and env.rank == 0:
            log.warning(
                "%s=%r is not used: the Accelerator's is %r", name, getattr(args, name), value
            )
        setattr(args, name, value)

    def make_train_loader(self) -> Loader:
        self.args.dispatch_batches = self.accelerator.dataloader_config.dispatch_batches
        return super().make_train_loader()

    def build_model(self) -> None:
        self.model = self.build_bare(self.device)
        compiled = self.builder.compile(self.model)
        self.wrapped = self.parallel = self.accelerator.prepare_model(compiled)

    def build_optimizer(self) -> None:
        self.scaler = self.accelerator.scaler
        if self.scaler is not None and self.scaler_beginning is not None:
            self.scaler.load_state_dict(self.scaler_beginning)
        super().build_optimizer()

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        held: AbstractContextManager[Any] = (
            nullcontext() if last else self.accelerator.no_sync(self.wrapped)
        )
        return held

    def backward(self, loss: Tensor) -> None:
        # Losses are shares of the mean of the step already.
        self.accelerator.backward(loss * self.accelerator.gradient_accumulation_steps)
