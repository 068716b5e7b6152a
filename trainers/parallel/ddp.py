"""The same training on several ranks, each with its share of the data: DDP."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from ckptcore import SharingPattern, StateComponent

from ..arguments import DDPArguments, DDPTrainingArguments
from ..build import seed_everything, without_trace
from ..data.position import Loader, has_its_part, is_stream
from ..data.ranks import Agreed, DispatchedLoader
from ..trainer import Trainer


class RanksTrainer(Trainer):
    """What trainers have in common whose ranks hold the same model and take different data."""

    arguments_class: ClassVar[type[Any]] = DDPTrainingArguments

    def __init__(self, args: Any, **what: Any) -> None:
        super().__init__(args, **what)
        # The model is the same everywhere; from here on every rank has random streams of its own.
        if self.args.seed >= 0 and self.world_size > 1:
            seed_everything(self.args.seed + self.rank)
        elif self.rank:
            # Unseeded, torch starts at the same number in every process.
            torch.manual_seed((torch.initial_seed() + self.rank) % 2**63)

    def share_state(self) -> None:
        """Buffers such as running statistics are on no rank in slices: rank 0's count, as DDP has
        it in the next forward pass anyway."""
        if self.world_size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)

    def make_train_loader(self) -> Loader:
        """dispatch_batches: rank 0 reads for all. Else every rank reads its part, and they agree on
        an epoch's end. By default it is so where every rank can find its part by itself: in
        map-style data, with the same batches, and through a sampler that deals them out."""
        rank, ranks = self.data_parallel
        if ranks == 1:
            return super().make_train_loader()
        size, dispatch = self.args.per_device_train_batch_size, self.args.dispatch_batches
        reads_on = is_stream(self.train_dataset)
        if dispatch is None:
            dispatch = reads_on and not has_its_part(self.train_dataset)
        if dispatch:
            of_all = self.make_loader(0, 1, size * ranks, shares=ranks) if rank == 0 else None
            return DispatchedLoader(of_all, self.env)
        if reads_on:
            return Agreed(self.make_loader(0, 1, size), self.env)
        return self.make_loader(rank, ranks, size)


class DDPTrainer(RanksTrainer):
    """A `Trainer` on every rank of the running process group: each makes one and trains."""

    kind = "ddp"
    averager: PeriodicModelAverager | None = None

    def build_model(self) -> None:
        super().build_model()
        if self.world_size == 1:
            return
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        # Not what is its default in any case: names come and go between versions of torch.
        given, ours = asdict(self.args.ddp), asdict(DDPArguments())
        options = {
            name: value
            for name, value in given.items()
            if value != ours[name] or (name in known and known[name].default is (not value))
        }
        device = [self.device] if self.device.type == "cuda" else None
        self.wrapped = self.parallel = DistributedDataParallel(
            self.model, device_ids=device, **options
        )
        local = self.args.post_local_sgd
        if local.enabled:
            self.local_sgd = PostLocalSGDState(  # type: ignore[no-untyped-call]
                dist.group.WORLD,
                dist.group.WORLD,
                local.start_step,
                local.post_local_gradient_allreduce,
            )
            self.parallel.register_comm_hook(self.local_sgd, post_localSGD_hook)
            self.averager = PeriodicModelAverager(
                period=local.period, warmup_steps=local.start_step
            )

    def build_optimizer(self) -> None:
        super().build_optimizer()
        if self.world_size > 2:
            self.settle_buckets()
        if self.averager is not None:
            self.averager.step, self.local_sgd.iter = 0, 0

    def settle_buckets(self) -> None:
        """One backward pass that is thrown away.

        After its first one DDP sorts the gradients into other buckets, and where in a bucket a
        number lies decides in which order the ranks' parts of it are added up. So without this, on
        more than two ranks, the first step of a resumed run would not be that of the run that did
        not stop, to the last bit.
        """
        self.wrapped.train()
        with without_trace(self.model):
            batch, samples, _ = self.loader.next_group(1)[0]
            with self.computing():
                torch.autograd.backward(self.loss_share(batch, samples, 1.0))
        self.loader.load_state_dict(self.beginning)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or self.world_size == 1 else self.parallel.no_sync()

    def forward(self, batch: Any) -> Any:
        if self.world_size > 1 and not self.wrapped.training:
            # Ranks evaluate different numbers of batches, so none may wait for another.
            return self.model(**batch) if isinstance(batch, Mapping) else self.model(*batch)
        return super().forward(batch)

    def optimizer_step(self) -> bool:
        done = super().optimizer_step()
        if self.averager is not None:
            self.averager.average_parameters(self.model.parameters())
        return done

    def share_state(self) -> None:
        """Between two averages of Post-Local SGD each rank keeps its own."""
        if self.averager is None:
            super().share_state()

    def model_components(self) -> list[StateComponent]:
        if self.averager is None:
            return super().model_components()
        averaging = StateComponent("averager", Averaging(self.averager, self.local_sgd))
        return [*super().model_components(), averaging]

    def get_state_components(self) -> list[StateComponent]:
        """Between two averages of Post-Local SGD the replicas differ, and so do the steps that
        their scalers leave out: then each rank keeps its own."""
        found = super().get_state_components()
        for part in found if self.averager is not None else ():
            if part.key in ("model", "optimizer", "scaler", "scheduler"):
                part.sharing_pattern = SharingPattern.PER_RANK
        return found


class Averaging:
    """How far Post-Local SGD has come."""

    def __init__(self, averager: PeriodicModelAverager, hook: PostLocalSGDState) -> None:
        self.averager, self.hook = averager, hook

    def state_dict(self) -> dict[str, int]:
        return {"step": self.averager.step, "iter": self.hook.iter}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.averager.step, self.hook.iter = state["step"], state["iter"]
