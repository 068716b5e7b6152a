"""A Trainer of Lightning's on one rank or two, with DDP, or FSDP2 by its ModelParallelStrategy."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from two_ranks import die, facts

from ckptcore import CheckpointWarning, KeepLast
from ckptcore.integrations.lightning import EngineCheckpoint


class Module(lightning.LightningModule):
    """kill_at: the batch before which its process is killed. drawn: how much is drawn before."""

    def __init__(self, keeper: EngineCheckpoint, kill_at: int, sharded: bool, drawn: int) -> None:
        super().__init__()
        self.drawn = drawn
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.kept_by, self.kill_at, self.sharded, self.losses = [keeper], kill_at, sharded, {}

    def setup(self, stage: str) -> None:
        torch.rand(self.drawn)  # Lightning has given all ranks the same stream

    def configure_model(self) -> None:
        if self.sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        number = self.trainer.fit_loop.total_batch_idx
        if number == self.kill_at:
            self.kept_by[0].manager.wait()
            die()
        loss = self.net(batch).square().mean()
        self.losses[number] = [batch.tolist(), loss.item()]
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def lightning_fit(
    rank: int,
    world_size: int,
    mode: str,
    root: str,
    seed: int,
    every: int,
    order: str,
    kill_at: int = -1,
) -> dict[str, Any]:
    """Three epochs of ten batches. order: who makes it, torchdata, torch or Lightning, which may
    lose it."""
    lightning.seed_everything(5, verbose=False)
    keeper = EngineCheckpoint(root, every, keep=KeepLast(2))
    module = Module(keeper, kill_at, mode == "fsdp2", 1 + rank + 2 * seed)
    data = torch.arange(120.0).view(40, 3) / 60
    if order == "lost":
        loader: Any = StatefulDataLoader(data, batch_size=2, shuffle=True)
    elif order == "Lightning":
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    else:
        kind = StatefulDistributedSampler if order == "torchdata" else DistributedSampler
        sampler = kind(data, world_size, rank, shuffle=True, seed=3)
        loader = StatefulDataLoader(data, batch_size=2, sampler=sampler)
    strategies = {"one": "auto", "ddp": DDPStrategy(), "fsdp2": ModelParallelStrategy(2, 1)}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategies[mode],
        max_epochs=3,
        callbacks=[keeper],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.1 + seed)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(module, loader)
    engine = [str(w.message) for w in caught if w.category is CheckpointWarning]
    warned = [text.split(" of a loader")[0].split()[-1] for text in engine]
    return {"losses": module.losses, "warned": warned, **facts(module, trainer.optimizers[0])}
