"""A loop as torchtitan's Trainer has it, with FSDP2, around our checkpoint manager."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from two_ranks import die, digest, facts

from ckptcore.integrations.torchtitan import EngineCheckpointManager

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers:
    """As torchtitan's container: the state of several optimizers, flat and by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.inside = model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def state_dict(self) -> Any:
        return get_optimizer_state_dict(self.model, self.inside, options=FLAT)

    def load_state_dict(self, state_dict: Any) -> None:
        set_optimizer_state_dict(self.model, self.inside, state_dict, options=FLAT)


class Schedulers:
    """As torchtitan's: the last epoch says everything."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inside = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)

    def state_dict(self) -> dict[str, int]:
        return {"last_epoch": self.inside.last_epoch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.inside.last_epoch = state_dict["last_epoch"]
        self.inside._last_lr = self.inside.get_lr()


class Loader:
    """As torchtitan's: bytes under the name of the rank."""

    def __init__(self, rank: int, world: int) -> None:
        self.key, self.world, self.rank, self.next = f"dp_rank_{rank}", world, rank, 0

    def batch(self) -> torch.Tensor:
        self.next += 1
        return (torch.arange(6.0).view(2, 3) + self.next + 7 * self.rank) % 11 / 11

    def state_dict(self) -> dict[str, Any]:
        return {self.key: pickle.dumps({"next": self.next}), "world_size": self.world}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["world_size"] == self.world
        self.next = pickle.loads(state_dict[self.key])["next"]


class Progress:
    """As torchtitan's Trainer."""

    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]


class Adapter:
    """From names of torchtitan to those of Hugging Face."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state_dict.items()}


def titan_loop(
    rank: int,
    world_size: int,
    root: str,
    seed: int,
    kill_at: int = -1,
    steps: int = 10,
    **settings: Any,
) -> dict[str, Any]:
    """Saved every third step, and at the last."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    if world_size > 1:
        fully_shard(model)
    optimizers, progress = Optimizers(model), Progress()
    schedulers, loader = Schedulers(optimizers.inside), Loader(rank, world_size)
    torch.rand(1 + rank + 2 * seed)
    config = EngineCheckpointManager.Config(enable=True, interval=3, **settings)
    manager = EngineCheckpointManager(
        config,
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=Adapter(),
        base_folder=root,
    )
    loaded, losses = manager.load(step=config.load_step), {}
    start = [progress.step, loader.next, digest(model.parameters())]
    while progress.step < steps:
        progress.step += 1
        loss = model(loader.batch()).square().mean()
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizers.inside.step()
        optimizers.inside.zero_grad()
        schedulers.inside.step()
        losses[progress.step] = loss.item()
        manager.save(progress.step, last_step=progress.step == steps)
        if progress.step == kill_at:
            manager.maybe_wait_for_saving()
            die()
    found = facts(model, optimizers.inside) if losses else {}
    rates = schedulers.inside.get_last_lr()
    manager.close()
    dist.barrier()
    return {"loaded": loaded, "start": start, "losses": losses, "rates": rates, **found}
