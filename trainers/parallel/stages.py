"""How a model becomes the stages of a pipeline: what a splitter promises, the stages of one rank
and what they exchange with those of other ranks, and the splitter of the byte-level GPT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

from ..arguments import InvalidArgument
from ..model import ByteGPT, next_byte_loss
from .environment import DistributedEnvironment


class ModelSplitter(Protocol):
    """Cuts a model that has no storage yet into the stages of one rank.

    model: built on the meta device; it may be taken apart. stage_indices: the stages of this rank,
    out of `n_stages`. Returns the modules of these stages and a PipelineStage around each. The
    trainer gives the modules storage and values afterwards, in place, so the splitter must not copy
    them.

    Names are the model's own: a stage with the model's third block has it as `blocks.2`, whatever
    stage it is. That is what makes a checkpoint of four stages one of two stages, or of none. A
    parameter that the model uses in several stages goes by its first name in each of them, and by
    its other names too where the model has them there; the trainer adds up the gradients of its
    copies. Stages of one rank share a module or parameter rather than have two of one name.

    The first stage is called with `input_ids`, every other one with what the stage before it
    returned (a tensor or a tuple of them), and all with the other entries of the batch, but the
    labels, by name; those that have one row for each sample are cut into micro-batches. A splitter
    names in `shared_inputs` what only happens to have as many rows as there are samples. What the
    last one returns goes to the loss function. A splitter may bring that:
    `loss(outputs, labels, num_items_in_batch)`, used where the trainer is given none.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        n_stages: int,
        stage_indices: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> tuple[list[nn.Module], list[PipelineStage]]: ...


def place_stages(ranks: int, per_rank: int, kind: str) -> list[int]:
    """The rank of each stage: "loop" deals them out in turn, "v" goes down and back up."""
    down = list(range(ranks))
    return [
        rank
        for turn in range(per_rank)
        for rank in (down[::-1] if kind == "v" and turn % 2 else down)
    ]


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
        every = env.gather_objects((list(self.tensors()), list(self.parameters())))
        self.holders: dict[str, list[int]] = {}  # name of a tensor -> the ranks that have it
        # The same for parameters, each under its first name only.
        self.trained_by: dict[str, list[int]] = {}
        for rank, (tensors, parameters) in enumerate(every):
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
        unknown = sorted(self.holders.keys() - self.first_name.keys())
        lost = [group[0] for group in names.values() if not self.holders.keys() & set(group)]
        trained = ([n for n in group if n in self.trained_by] for group in names.values())
        twice = [names[1] for names in trained if len(names) > 1]
        for wrong, reason, instead in (
            (unknown, "the model has no tensor of this name", "give stages the names of the model"),
            (lost, "is in no stage", "put it in one"),
            (
                twice,
                "is another name of a parameter of another rank",
                "have it under its first name there too",
            ),
        ):
            if wrong:
                raise InvalidArgument("model_splitter", wrong[0], reason, instead)

    # Memory and values.

    def allocate(self, device: torch.device) -> None:
        """Memory in the place of what has none; what was one tensor stays one."""
        # Old and new: an old one must live, or its id might be used again.
        made: dict[int, tuple[Tensor, Tensor]] = {}
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
        values: dict[str, Tensor] = {}
        if whole is not None:
            values |= {n: p.detach() for n, p in whole.named_parameters(remove_duplicate=False)}
            values |= dict(whole.named_buffers(remove_duplicate=False))
        mine = self.tensors()
        with torch.no_grad():
            for name in self.holders:
                value = self._broadcast(values.get(name), 0)
                if name in mine:
                    mine[name].copy_(value)

    def gather(self) -> dict[str, Tensor]:
        """Parameters and kept buffers of all stages, on rank 0's CPU; nothing on other ranks."""
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


class ByteGPTStage(nn.Module):
    """Some blocks of a `ByteGPT`; the first stage has embeddings too, the last norm and head."""

    def __init__(
        self, model: ByteGPT, layers: range, *, first: bool, last: bool, own_embedding: bool
    ) -> None:
        super().__init__()
        self.first, self.last, self.saves_memory = first, last, model.saves_memory
        if first or own_embedding:
            # Before the head, so that the matrix which they share goes by the model's name for it.
            self.embedding = model.embedding
        if first:
            self.position, self.dropout = model.position, model.dropout
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in layers})
        if last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.dropout(self.embedding(x) + self.position(places))
        for block in self.blocks.values():
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.saves_memory and self.training
                else block(x)
            )
        return self.head(self.norm(x)) if self.last else x


class ByteGPTSplitter:
    """Stages with equally many blocks, give or take one. Embedding and head stay one matrix: where
    they are on different ranks, each has a copy, and the trainer adds up their gradients."""

    loss = staticmethod(next_byte_loss)

    def __call__(
        self,
        model: nn.Module,
        *,
        n_stages: int,
        stage_indices: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> tuple[list[nn.Module], list[PipelineStage]]:
        if not isinstance(model, ByteGPT):
            reason = f"the model is a {type(model).__name__}"
            raise InvalidArgument("model_splitter", "ByteGPTSplitter", reason, "give one for it")
        blocks, last = len(model.blocks), n_stages - 1
        if blocks < n_stages:
            stages = n_stages // dist.get_world_size(group)
            reason = f"{n_stages} stages, and the model has {blocks} blocks"
            instead = "use fewer ranks or stages, or a model with more blocks"
            raise InvalidArgument("stages_per_rank", stages, reason, instead)
        modules: list[nn.Module] = [
            ByteGPTStage(
                model,
                range(index * blocks // n_stages, (index + 1) * blocks // n_stages),
                first=index == 0,
                last=index == last,
                own_embedding=index == last and 0 not in stage_indices,
            )
            for index in stage_indices
        ]
        return modules, [
            PipelineStage(module, index, n_stages, device, group=group)
            for module, index in zip(modules, stage_indices, strict=True)
        ]
