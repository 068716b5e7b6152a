"""The same training on several ranks: DistributedDataParallel, and every rank its own share of the data."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ckptcore import CheckpointManager, RNGState, SharingPattern, StateComponent

from .arguments import InvalidArgument, TrainingArguments
from .trainer import Trainer, seed_everything

__all__ = ["DDPTrainer"]


class DDPTrainer(Trainer):
    """A `Trainer` on every rank of the running process group. Each makes one, and calls `train()`."""

    def __init__(self, args: TrainingArguments, **what: Any) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        super().__init__(args, **what)
        self.settle_buckets()
        # The model is the same everywhere; from here on every rank has random streams of its own.
        if args.seed >= 0:
            seed_everything(args.seed + self.rank)
        elif self.rank:
            # Unseeded, torch starts at the same number in every process.
            torch.manual_seed((torch.initial_seed() + self.rank) % 2**63)

    def choose_device(self) -> torch.device:
        if not self.args.use_cpu and torch.cuda.is_available() and self.args.device in (None, "cuda"):
            local, devices = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
            if local >= devices:
                reason = f"process {local + 1} of this machine, which has {devices} of them"
                raise InvalidArgument("device", "cuda", reason, "start one process per device, or train on the cpu")
            torch.cuda.set_device(local)
        return super().choose_device()

    def choose_data_seed(self) -> int:
        seed = torch.tensor(super().choose_data_seed(), device=self.device)
        dist.broadcast(seed, 0)  # a random one is the same everywhere, too
        return int(seed)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        model = super().prepare_model(model)
        return DistributedDataParallel(model, gradient_as_bucket_view=True) if self.world_size > 1 else model

    def get_state_components(self) -> list[StateComponent]:
        return self.components(SharingPattern.REPLICATED)

    def settle_buckets(self) -> None:
        """One backward pass that is thrown away.

        After its first one DDP sorts the gradients into other buckets, and where in a bucket a number lies decides
        in which order the ranks' parts of it are added up. So without this, on more than two ranks, the first step
        of a resumed run would not be that of the run that did not stop, to the last bit.
        """
        if self.world_size == 1:
            return
        streams, position = RNGState(), self.loader.state_dict()
        before, buffers = streams.state_dict(), [buffer.clone() for buffer in self.model.buffers()]
        self.model.train()
        torch.autograd.backward(self.compute_loss(self.move_batch(self.loader.next_batch())))
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, value in zip(self.model.buffers(), buffers, strict=True):
            buffer.data.copy_(value)
        self.loader.load_state_dict(position)
        streams.load_state_dict(before)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        model = self.model
        return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()

    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        model = self.model
        if isinstance(model, DistributedDataParallel) and not model.training:
            model = model.module  # ranks evaluate different numbers of batches, so none may wait for another
        loss: Tensor = model(**batch).loss
        return loss

    def sum_over_ranks(self, *values: float) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        result: list[float] = sums.tolist()
        return result

    def evaluate(self) -> float:
        self.share_buffers()
        return super().evaluate()

    def save(self, checkpoints: CheckpointManager, logging_dir: str, wait: bool) -> None:
        self.share_buffers()
        super().save(checkpoints, logging_dir, wait)

    def share_buffers(self) -> None:
        """Such as running statistics: rank 0's count, as DDP has it in the next forward pass anyway."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)
