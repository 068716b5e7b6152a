"""Parameters, gradients and optimizer state in slices, one on each rank: `fully_shard` of torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from ckptcore import SharingPattern, StateComponent

from ..arguments import FSDP2TrainingArguments, InvalidArgument
from ..build import derived_buffers
from .ddp import RanksTrainer

log = logging.getLogger(__name__)


class FSDP2Trainer(RanksTrainer):
    """A `Trainer` on every rank, each with a slice of every parameter. On one rank it is a
    `Trainer`.

    The layers at `fsdp2.transformer_layers_path` are sharded one by one, then the rest as one; the
    optimizer is made of what that leaves, so its state is in slices too. Checkpoints hold slices of
    whole tensors, and may be read on any number of ranks.
    """

    kind = "fsdp2"
    arguments_class = FSDP2TrainingArguments
    evaluates_in_step = True  # a forward pass gathers parameters from all ranks

    def check(self) -> None:
        super().check()
        given = self.optimizer_choice["factory"] or self.optimizer_choice["cls_and_kwargs"]
        if self.args.optim == "adafactor" and given is None and self.world_size > 1:
            reason = "torch's Adafactor cannot compute on slices"
            raise InvalidArgument("optim", "adafactor", reason, "use adamw_torch")

    def build_model(self) -> None:
        if self.world_size == 1:
            super().build_model()
            return
        options = self.args.fsdp2
        self.model = model = self.build_on_no_more_than_one_device()
        empty = any(parameter.is_meta for parameter in model.parameters())
        if not empty and self.args.seed < 0 and not self.restorable:
            for tensor in (*model.parameters(), *model.buffers()):  # every rank drew its own
                group = self.env.cpu_group if tensor.is_cpu else None
                dist.broadcast(tensor.detach(), 0, group=group)
        names = (options.param_dtype, options.reduce_dtype)
        dtypes = [name and getattr(torch, name) for name in names]
        policies = {
            "mesh": init_device_mesh(self.device.type, (self.world_size,)),
            "reshard_after_forward": options.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(*dtypes),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
            if options.cpu_offload
            else OffloadPolicy(),
        }
        for layer in self.layers():
            fully_shard(layer, **policies)
        fully_shard(model, **policies)
        if empty:
            model.to_empty(device="cpu" if options.cpu_offload else self.device)
            self.builder.filled = False
        dtype = options.buffer_dtype and getattr(torch, options.buffer_dtype)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    cast = dtype if buffer.is_floating_point() else None
                    module._buffers[name] = buffer.to(self.device, cast or None)
        self.wrapped = self.builder.compile(model)

    def build_on_no_more_than_one_device(self) -> nn.Module:
        """Sharding moves a layer at a time, so that the device never holds more than one whole."""
        if self.args.construct_model_on == "meta" and self.restorable:
            model = self.builder.build("meta")
            if not derived_buffers(model):
                return model
        on_device = self.args.construct_model_on == "device"
        return self.builder.build(self.device if on_device else "cpu")

    def layers(self) -> list[nn.Module]:
        """Those that are sharded one by one."""
        options = self.args.fsdp2
        path, found = options.transformer_layers_path, list[nn.Module]()
        if options.shard_transformer_layers and path:
            with suppress(AttributeError):
                found = list(self.model.get_submodule(path).children())
        if options.shard_transformer_layers and not found and self.rank == 0:
            why = "has no layers there, so it is sharded as one piece, and a forward pass holds all"
            kind = type(self.model).__name__
            log.warning("fsdp2.transformer_layers_path=%r: %s %s of it", path, kind, why)
        return found

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or self.world_size == 1 else self.unsynchronised()

    @contextmanager
    def unsynchronised(self) -> Iterator[None]:
        root: Any = self.model
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def clip_gradients(self, max_norm: float) -> Tensor:
        norm = super().clip_gradients(max_norm)
        return norm.full_tensor().to(self.device) if isinstance(norm, DTensor) else norm

    def evaluate_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        found = super().evaluate_batch(batch)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # there is no backward pass to do it, and all else expects slices
        return found

    def model_components(self) -> list[StateComponent]:
        if self.world_size == 1:
            return super().model_components()
        return self.components_of(self.model, self.model, SharingPattern.SHARDED)

    def export_state(self) -> dict[str, Tensor]:
        """Gathered one at a time; kept by rank 0."""
        found: dict[str, Tensor] = {}
        gathered: dict[int, Tensor] = {}  # tied ones are gathered once, and stay tied
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) not in gathered:
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                gathered[id(value)] = whole.detach().cpu() if self.rank == 0 else torch.empty(0)
            found[name] = gathered[id(value)]
        return found
