"""A loop of plain torch around a model with LoRA, on one process or several, with DDP or FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from two_ranks import die, facts

from ckptcore import CheckpointManager, OptimizerState, RNGState, hf_files
from ckptcore.integrations.peft import Adapters


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return LlamaForCausalLM(config)


def peft_loop(
    rank: int, world_size: int, mode: str, root: str, seed: int, kill_at: int = -1
) -> dict[str, Any]:
    """Ten steps, saved after the fifth."""
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.5
    )
    base_model = base()
    torch.manual_seed(seed)
    model: Any = peft.get_peft_model(base_model, config)
    if mode == "fsdp2":
        fully_shard(model)
    wrapped = nn.parallel.DistributedDataParallel(model) if mode == "ddp" else model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    state = {
        "adapter_model": Adapters(wrapped),
        "optimizer": OptimizerState(optimizer, wrapped),
        "rng": RNGState(),
    }
    torch.rand(1 + rank + 2 * seed)
    losses = {}
    with CheckpointManager(Path(root)) as ckpt:
        for step in range((ckpt.restore(state).step or 0) + 1, 11):
            words = torch.randint(64, (2, 8))
            loss = wrapped(input_ids=words, labels=words).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            if step in (5, 10):
                ckpt.save_async(step, state, files=hf_files(wrapped))
            if step == kill_at:
                ckpt.wait()
                die()
    return {"losses": losses, "world": dist.get_world_size(), **facts(model, optimizer)}
