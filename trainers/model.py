"""A small GPT over bytes: pre-norm blocks, causal attention, one matrix for embedding and head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .arguments import GPTArguments

VOCABULARY = 256


class GPTOutput(NamedTuple):
    logits: Tensor
    loss: Tensor | None  # mean cross entropy in nats per byte, where labels were given


class Attention(nn.Module):
    def __init__(self, args: GPTArguments) -> None:
        super().__init__()
        self.n_head = args.n_head
        self.qkv = nn.Linear(args.n_embd, 3 * args.n_embd)
        self.out = nn.Linear(args.n_embd, args.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        # No dropout on the attention weights: that would rule out the fused kernel on the CPU and
        # make the whole step a third slower.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return mixed


class Block(nn.Module):
    def __init__(self, args: GPTArguments) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.n_embd)
        self.attention = Attention(args)
        self.mlp_norm = nn.LayerNorm(args.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(args.n_embd, 4 * args.n_embd),
            nn.GELU(),
            nn.Linear(4 * args.n_embd, args.n_embd),
        )
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class ByteGPT(nn.Module):
    """`model(input_ids)` gives logits for each next byte; with `labels` (those) also the loss."""

    saves_memory = False

    def __init__(self, args: GPTArguments | None = None) -> None:
        super().__init__()
        self.args = args = args or GPTArguments()
        self.embedding = nn.Embedding(VOCABULARY, args.n_embd)
        self.position = nn.Embedding(args.block_size, args.n_embd)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.n_layer))
        self.norm = nn.LayerNorm(args.n_embd)
        self.head = nn.Linear(args.n_embd, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                # What is added to the residual stream is scaled down with depth, as GPT-2 does.
                residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                depth = 2 * len(self.blocks) if residual else 1
                nn.init.normal_(parameter, std=0.02 / depth**0.5)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Blocks are computed again in the backward pass; Hugging Face's name of it."""
        self.saves_memory = True

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> GPTOutput:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.embedding(input_ids) + self.position(places))
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.saves_memory and self.training
                else block(x)
            )
        logits = self.head(self.norm(x))
        if labels is None:
            return GPTOutput(logits, None)
        return GPTOutput(logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def next_byte_loss(outputs: GPTOutput, labels: Tensor, items: float) -> Tensor:
    """A loss for accumulated batches: the sum over these bytes by the bytes of the step."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum") / items
