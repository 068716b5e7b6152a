"""How a model becomes the stages of a pipeline: what a splitter promises, and the one of the
byte-level GPT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

from ..arguments import InvalidArgument
from ..model import ByteGPT, next_byte_loss


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
    """The rank of each stage: "loop" deals them out in turn, "v" goes down the ranks and back
    up."""
    down = list(range(ranks))
    return [
        rank
        for turn in range(per_rank)
        for rank in (down[::-1] if kind == "v" and turn % 2 else down)
    ]


class ByteGPTStage(nn.Module):
    """Some consecutive blocks of a `ByteGPT`; the first stage has the embeddings too, the last one
    norm and head."""

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
