"""A loop of Accelerate's on one rank or two, with DDP or FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    set_seed,
)
from torch import nn
from two_ranks import die, facts

from ckptcore import CheckpointManager
from ckptcore.integrations.accelerate import state_of


def made(mode: str) -> Accelerator:
    loading = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=5
    )
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    if mode == "fsdp2":  # Accelerate itself offers it on accelerators only
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        for state in (PartialState(), accelerator.state):
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def accelerate_loop(
    rank: int, world_size: int, mode: str, root: str, seed: int, save_at: int = 0, kill_at: int = 0
) -> dict[str, Any]:
    """24 batches, 10 an epoch."""
    accelerator = made(mode)
    set_seed(seed, device_specific=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.arange(120.0).view(40, 3) / 60
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    state, losses = state_of(accelerator), {}
    with CheckpointManager(Path(root)) as ckpt:
        step = ckpt.restore(state).step or 0
        while step < 24:
            for batch in loader:
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                losses[step] = [batch.tolist(), loss.item(), scheduler.get_last_lr()]
                if step == save_at:
                    ckpt.save_async(step, state)
                if step == kill_at:
                    ckpt.wait()
                    die()
                if step == 24:
                    break
    return {"losses": losses, **facts(model, optimizer.optimizer)}
