"""The stages of one rank of a pipeline, and what they exchange with those of other ranks besides
training itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..arguments import InvalidArgument
from .environment import DistributedEnvironment


class Stages:
    """modules: of this rank, by number of the stage. place: the rank of each stage. model: what was
    split, for its names.

    Made on every rank at once. Raises InvalidArgument where the parts are not those of the model.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        place: Sequence[int],
        env: DistributedEnvironment,
        model: nn.Module,
    ) -> None:
        self.modules, self.place, self.env = dict(modules), list(place), env
        told = env.gather_objects((list(self.tensors()), list(self.parameters())))
        self.holders: dict[str, list[int]] = {}  # name of a tensor -> the ranks that have it
        # The same for parameters, each under its first name only.
        self.trained_by: dict[str, list[int]] = {}
        for rank, (tensors, parameters) in enumerate(told):
            for names, by_name in ((tensors, self.holders), (parameters, self.trained_by)):
                for name in names:
                    by_name.setdefault(name, []).append(rank)
        self._check_names(model)
        kept = {name for module in self.modules.values() for name in module.state_dict()}
        # Whether some rank has buffers that no checkpoint holds.
        self.has_derived = any(env.gather_objects(bool(self.tensors().keys() - kept)))
        self.shared = {name: ranks for name, ranks in self.trained_by.items() if len(ranks) > 1}
        # Every rank takes part in making every group.
        self._groups = {
            ranks: dist.new_group(list(ranks))
            for ranks in sorted({tuple(r) for r in self.shared.values()})
        }
        self._metas: dict[Any, list[tuple[torch.Size, torch.dtype]]] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by all names that they have in the whole model."""
        found: dict[str, Tensor] = {}
        for module in self.modules.values():
            for named in (module.named_parameters, module.named_buffers):
                for name, tensor in named(remove_duplicate=False):
                    if found.setdefault(name, tensor) is not tensor:
                        reason = "two stages of one rank have different tensors of this name"
                        raise InvalidArgument("model_splitter", name, reason, "let them share it")
        return found

    def parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter once, under its first name."""
        found: dict[nn.Parameter, str] = {}
        for module in self.modules.values():
            for name, parameter in module.named_parameters():
                found.setdefault(parameter, name)
        return {name: parameter for parameter, name in found.items()}

    @property
    def last(self) -> nn.Module | None:
        """The last stage, on the rank that has it."""
        return self.modules.get(len(self.place) - 1)

    def _check_names(self, model: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                names.setdefault(id(tensor), []).append(name)
        self.first_name = {name: group[0] for group in names.values() for name in group}
        unknown = self.holders.keys() - self.first_name.keys()
        lost = [group[0] for group in names.values() if not self.holders.keys() & set(group)]
        twice = [
            n
            for group in names.values()
            for n in group[1:]
            if n in self.trained_by and group[0] in self.trained_by
        ]
        if unknown:
            reason = "the model has no tensor of this name"
            instead = "give stages the names of the model"
            raise InvalidArgument("model_splitter", min(unknown), reason, instead)
        if lost:
            raise InvalidArgument("model_splitter", lost[0], "is in no stage", "put it in one")
        if twice:
            reason = "is another name of a parameter of another rank"
            instead = "have it under its first name there too"
            raise InvalidArgument("model_splitter", twice[0], reason, instead)

    # Memory and values.

    def allocate(self, device: torch.device) -> None:
        """Memory in the place of what has none; what was one tensor stays one."""
        made: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # old and new: an old one must live, or its id might be used again
        for module in {part: None for stage in self.modules.values() for part in stage.modules()}:
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        new = torch.empty_like(tensor, device=device)
                        if isinstance(tensor, nn.Parameter):
                            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                        made[id(tensor)] = tensor, new
                    held[name] = made[id(tensor)][1]  # type: ignore[assignment]

    def fill(self, whole: nn.Module | None) -> None:
        """Give every stage its values out of a whole model, which is on rank 0."""
        values = {} if whole is None else dict(_named(whole))
        mine = self.tensors()
        with torch.no_grad():
            for name in self.holders:
                value = self._broadcast(values.get(name), 0)
                if name in mine:
                    mine[name].copy_(value)

    def gather(self) -> dict[str, Tensor]:
        """The parameters and kept buffers of all stages, on the CPU of rank 0; nothing on other
        ranks."""
        mine, rank = self.tensors(), self.env.rank
        kept = {name for module in self.modules.values() for name in module.state_dict()}
        kept = set().union(*self.env.gather_objects(kept & mine.keys()))
        found: dict[str, Tensor] = {}
        for name, (holder, *_) in self.holders.items():
            first = self.first_name[name]
            if name in kept and first not in found:
                value = self._broadcast(mine[name].detach() if rank == holder else None, holder)
                found[first] = value if rank == 0 else torch.empty(0)
            if name in kept:
                found[name] = found[first]
        return found if rank == 0 else {}

    def _broadcast(self, value: Tensor | None, source: int) -> Tensor:
        """The value of one rank, on the CPU of all: gloo does not send every dtype, but bytes."""
        shape, dtype = self.env.broadcast_object(
            value is not None and (value.shape, value.dtype), source
        )
        value = torch.empty(shape, dtype=dtype) if value is None else value.cpu().contiguous()
        dist.broadcast(value.reshape(-1).view(torch.uint8), source, group=self.env.cpu_group)
        return value

    # Gradients of what several ranks have a copy of.

    def add_up_gradients(self) -> None:
        mine = self.parameters()
        for name, ranks in self.shared.items():
            parameter = mine.get(name)
            if parameter is not None and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self._groups[tuple(ranks)])

    def gradients(self) -> list[Tensor]:
        """Of this rank; a copy counts on the first rank that has it."""
        return [
            parameter.grad
            for name, parameter in self.parameters().items()
            if parameter.grad is not None and self.trained_by[name][0] == self.env.rank
        ]

    # Looking, without gradients.

    def forward(
        self, modules: Mapping[int, Any], chunks: Sequence[tuple[Any, dict[str, Any]]]
    ) -> list[Any]:
        """What the last stage makes of each (input, other inputs); an empty list on ranks without
        it.

        Unlike the schedules of torch, this takes inputs of any shape and stages in any order.
        modules: how each stage of this rank is called.
        """
        outputs, under_way, rank = [], [], self.env.rank
        for first, others in chunks:
            x: Any = first
            for number, place in enumerate(self.place):
                if place != rank:
                    continue
                key = number, first.shape  # the shapes of all stages follow from that of the input
                before = self.place[number - 1] if number else rank
                if before != rank:
                    x = self._receive((number - 1, first.shape), before)
                inputs = x if isinstance(x, tuple) else (x,)
                x = modules[number](*inputs, **others)
                if number + 1 == len(self.place):
                    outputs.append(x)
                elif self.place[number + 1] != rank:
                    under_way += self._send(key, x, self.place[number + 1])
        for work, _ in under_way:
            work.wait()
        return outputs

    def _send(self, key: Any, x: Any, target: int) -> list[tuple[Any, Tensor]]:
        tensors = [t.contiguous() for t in (x if isinstance(x, tuple) else (x,))]
        if key not in self._metas:
            self._metas[key] = [(t.shape, t.dtype) for t in tensors]
            dist.send_object_list([self._metas[key]], target, group=self.env.cpu_group)
        return [(dist.isend(t, target), t) for t in tensors]

    def _receive(self, key: Any, source: int) -> Any:
        if key not in self._metas:
            told: list[Any] = [None]
            dist.recv_object_list(told, source, group=self.env.cpu_group)
            self._metas[key] = told[0]
        metas, device = self._metas[key], self.env.device
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in metas]
        for tensor in tensors:
            dist.recv(tensor, source)
        return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return [*((name, p.detach()) for name, p in parameters), *buffers]
