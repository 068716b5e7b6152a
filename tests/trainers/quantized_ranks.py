"""Ranks of test_optimizer_states.py: quantized moments in slices, saved and resumed.

phase is save or resume. What the ranks found goes to <folder>/<phase>-<world size>-<rank>.pt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ckpt_trainers.arguments import TrainingArguments
from ckpt_trainers.optim import make_optimizer, make_scheduler
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptcore import CheckpointManager, OptimizerState, SharingPattern, StateComponent


def step(model: nn.Module, optimizer: Any, scheduler: Any, number: int) -> None:
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        sharded = isinstance(parameter, DTensor)
        parameter.grad = (
            distribute_tensor(whole, parameter.device_mesh, [Shard(0)]) if sharded else whole
        )  # type: ignore[attr-defined]
    optimizer.step()
    scheduler.step()


def run(rank: int, world_size: int, phase: str, optim: str, folder: str) -> None:
    torch.compile = lambda function, **options: function  # type: ignore[assignment]
    torch.manual_seed(0 if phase == "save" else 1)
    model = nn.Linear(256, 256)
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        for name, parameter in list(model.named_parameters()):
            setattr(
                model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            )
    args = TrainingArguments(optim=optim, learning_rate=1e-2)
    optimizer = make_optimizer(args, model)
    scheduler = make_scheduler(args, optimizer, 10)
    components = [
        StateComponent("model", model, SharingPattern.SHARDED),
        StateComponent("optimizer", OptimizerState(optimizer, model), SharingPattern.SHARDED),
        StateComponent("scheduler", scheduler, SharingPattern.REPLICATED),
    ]
    with CheckpointManager(Path(folder, "checkpoints")) as checkpoints:
        if phase == "save":
            for number in range(3):
                step(model, optimizer, scheduler, number)
            checkpoints.save(3, components)
        else:
            checkpoints.load(components)
    moment: Any = optimizer.state[model.weight]["exp_avg"]
    moment = moment.to_local() if world_size > 1 else moment
    found = {
        "kind": type(moment).__name__,
        "codes": moment.codes,
        "scale": moment.scale,
        "qmap": moment.qmap,
    }
    for number in range(3, 6):
        step(model, optimizer, scheduler, number)
    weight: Any = model.weight
    found |= {"weight": weight.full_tensor().detach() if world_size > 1 else weight.detach()}
    torch.save(found, Path(folder, f"{phase}-{world_size}-{rank}.pt"))
