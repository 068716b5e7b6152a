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
            reason, instead = (
                "AccelTrainer trains through one",
                "give a configured accelerate.Accelerator",
            )
            if importlib.util.find_spec("accelerate") is None:
                reason = "the package accelerate is not installed"
                instead = "install ckptcore[accelerate], or use DDPTrainer"
            raise InvalidArgument("accelerator", None, reason, instead)
        self.accelerator = accelerator
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        if kind not in _WHOLE:
            reason = "it does not keep a whole model on each process"
            raise InvalidArgument(
                "accelerator", kind, reason, "use FSDP2Trainer or PipelineTrainer"
            )
        scaler = accelerator.scaler
        self.scaler_beginning = None if scaler is None else scaler.state_dict()
        mine = accelerator.process_index, accelerator.num_processes
        env = what.get("distributed_env") or DistributedEnvironment(
            mine[0], accelerator.local_process_index, mine[1], device=accelerator.device
        )
        if (env.rank, env.world_size) != mine:
            stands = f"rank {env.rank} of {env.world_size}"
            reason = f"the Accelerator is process {mine[0]} of {mine[1]}"
            raise InvalidArgument("distributed_env", stands, reason, "leave it out")
        given = copy.copy(resolve_arguments(self.arguments_class, args))
        super().__init__(self.settled(given, env), **{**what, "distributed_env": env})

    def settled(self, args: Any, env: DistributedEnvironment) -> Any:
        """The arguments with what the Accelerator decides in their place."""
        accelerator, config = self.accelerator, self.accelerator.dataloader_config
        for name, value in args.accelerator_config.items():
            setattr(config, name, value)
        precision = accelerator.mixed_precision
        for name, its in (
            ("mixed_precision", None if precision in ("no", "fp8") else precision),
            ("fp8_recipe", None),
            ("gradient_accumulation_steps", accelerator.gradient_accumulation_steps),
        ):
            given = getattr(args, name)
            if given not in (None, "no", its) and env.rank == 0:
                log.warning("%s=%r is not used: the Accelerator's is %r", name, given, its)
            setattr(args, name, its)
        size, ranks = args.per_device_train_batch_size, env.world_size
        if config.split_batches:
            if size % ranks:
                reason = f"per_device_train_batch_size={size} is no multiple of {ranks} processes"
                name, instead = "accelerator_config.split_batches", "make it one, or do not split"
                raise InvalidArgument(name, True, reason, instead)
            args.per_device_train_batch_size = size // ranks
        return args

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
