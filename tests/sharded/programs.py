"""What real ranks do in the tests of sharded state: each function is a program that every process
of a job runs.

Processes are forked by ckptcore.testing.processes, which makes the process group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptcore import CheckpointManager, OptimizerState, SharingPattern, StateComponent
from ckptcore.state.layout import local_shard

torch.set_num_threads(1)

Full = dict[str, str]


class Net(nn.Module):
    """Uneven and tiny parameters, a tied embedding, and layers that tensor parallelism knows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.empty(s)) for s in ((7, 3), (1,), (2, 5)))
        self.emb, self.head = nn.Embedding(9, 3), nn.Linear(3, 9, bias=False)
        self.head.weight = self.emb.weight
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        self.never = nn.Parameter(torch.empty(5))  # never has a gradient
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(tokens) @ (self.a.t() @ self.a)
        wide = self.norm(self.down(torch.relu(self.up(torch.cat([hidden, hidden], -1)))))
        return self.head(hidden * self.b).pow(2).mean() + self.c.pow(2).sum() + wide.pow(3).mean()


class Pipe(nn.Module):
    """Some of eight layers, under their names in the whole model."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in layers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def values(name: str, step: int, shape: Any) -> torch.Tensor:
    """Numbers that depend on nothing but name and step."""
    own = torch.Generator().manual_seed(
        7919 * step + sum(n * ord(c) for n, c in enumerate(name, 1))
    )
    return torch.randn(tuple(shape), generator=own)


def fill(model: nn.Module, number: float | None) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                values(name, 0, parameter.shape)
            ) if number is None else parameter.fill_(number)


def cut(model: nn.Module, mesh: Any, dim: int) -> None:
    """Every matrix cut along `dim`, everything else replicated: DTensors without FSDP. Ties
    stay."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = [Shard(dim) if parameter.ndim == 2 else Replicate()]
            if parameter not in made:
                whole = parameter.detach()
                made[parameter] = nn.Parameter(
                    distribute_tensor(whole, mesh, placement, src_data_rank=None)
                )
            setattr(module, name, made[parameter])


def build(kind: str, rank: int, world: int, number: float | None) -> nn.Module:
    """The model in one of the layouts; its values are those of step 0, or all `number`."""
    if kind.startswith("pipe"):
        return build_pipe(kind, rank, world, number)
    model = Net()
    fill(model, number)
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "hsdp":
        fully_shard(
            model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "dp"))
        )
    elif kind in ("rows", "columns"):
        cut(model, init_device_mesh("cpu", (world,)), ["rows", "columns"].index(kind))
    elif kind == "fsdp over tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(
            model,
            mesh["tp"],
            {"up": ColwiseParallel(), "down": RowwiseParallel()},
            src_data_rank=None,
        )
        fully_shard(model, mesh=mesh["dp"])
    else:
        assert kind == "plain" and rank >= 0
    return model


def build_pipe(kind: str, rank: int, world: int, number: float | None) -> nn.Module:
    """ "pipe" (as many stages as ranks), "pipe of 2" (virtual stages a rank), "pipe x fsdp" (2
    stages)."""
    if kind == "pipe x fsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
        stage = mesh["pp"].get_local_rank()
        model = Pipe(list(range(4 * stage, 4 * stage + 4)))
        fill(model, number)
        return fully_shard(model, mesh=mesh["dp"])
    virtual = 2 if kind == "pipe of 2" else 1
    size = 8 // (world * virtual)
    model = Pipe(
        [
            n
            for v in range(virtual)
            for n in range((rank + v * world) * size, (rank + v * world + 1) * size)
        ]
    )
    fill(model, number)
    if kind == "pipe fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Gradients by name and step alone, so that every layout must make the same steps, bit for
    bit."""
    for step in range(first, first + steps):
        for name, parameter in model.named_parameters():
            if name == "never":
                continue
            gradient: Any = values(name, step, parameter.shape)
            if isinstance(parameter, DTensor):
                box = local_shard(parameter).box
                assert box is not None
                local = gradient[
                    tuple(slice(o, o + n) for o, n in zip(*box, strict=True))
                ].contiguous()
                gradient = DTensor.from_local(
                    local.reshape(parameter.to_local().shape),
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            parameter.grad = gradient
        optimizer.step()
        if hasattr(model, "seen"):
            model.seen += step


def hexed(tensor: Any) -> str:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return f"{list(full.shape)} {full.detach().contiguous().numpy().tobytes().hex()}"


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Full:
    """Full parameters, buffers and moments by name; the same on all ranks that hold a name."""
    found = {name: hexed(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            found[f"{name}: {key}"] = hexed(value)
    return found


def components(model: nn.Module, optimizer: Any, plain: bool) -> Any:
    if plain:
        return {"model": model, "opt": optimizer}
    return [
        StateComponent("model", model, SharingPattern.SHARDED, validation_level="TENSOR"),
        StateComponent(
            "opt",
            OptimizerState(optimizer, model),
            SharingPattern.SHARDED,
            validation_level="TENSOR",
        ),
    ]


def save(rank: int, world: int, kind: str, root: str, real: bool = False) -> dict[str, Any]:
    """Three steps, a checkpoint, and one step more: the state then and later."""
    model = build(kind, rank, world, None)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, amsgrad=True)
    if real:
        for step in range(3):
            tokens = torch.arange(4 * step, 4 * step + 4) % 9
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        train(model, optimizer, 1, 3)
    with CheckpointManager(root) as ckpt:
        info = ckpt.save(3, components(model, optimizer, plain=kind in ("fsdp", "plain", "hsdp")))
    then = snapshot(model, optimizer)
    train(model, optimizer, 4, 1)
    patterns = {key: component.pattern for key, component in info.manifest.components.items()}
    return {
        "then": then,
        "later": snapshot(model, optimizer),
        "patterns": patterns,
        "bytes": {key: component.size_bytes for key, component in info.manifest.components.items()},
    }


def load(
    rank: int,
    world: int,
    kind: str,
    root: str,
    how: dict[str, Any] | None = None,
    again: str | None = None,
) -> dict[str, Any]:
    """Into fresh objects of other values: the state then, and after one step more. again: root to
    save to."""
    model = build(kind, rank, world, -3.0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.9, amsgrad=True)
    state = components(model, optimizer, plain=kind in ("fsdp", "plain", "hsdp"))
    with CheckpointManager(root, load_broadcast=bool((how or {}).pop("broadcast", False))) as ckpt:
        ckpt.load(state, **(how or {}))
    if again is not None:
        with CheckpointManager(again) as ckpt:
            ckpt.save(3, state)
    then = snapshot(model, optimizer)
    tied = not hasattr(model, "emb") or model.emb.weight is model.head.weight
    assert all(parameter.grad is None for parameter in model.parameters())
    train(model, optimizer, 4, 1)
    return {
        "then": then,
        "later": snapshot(model, optimizer),
        "tied": tied,
        "lr": optimizer.param_groups[0]["lr"],
    }


def pipeline_run(rank: int, world: int, root: str) -> dict[str, Any]:
    """Two real stages of torch's pipelining, trained by 1F1B, saved, and restored into one model on
    every rank."""
    device, stages = torch.device("cpu"), world
    model = Pipe([n for n in range(8) if n * stages // 8 == rank])
    fill(model, None)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    stage = PipelineStage(model, rank, stages, device)
    schedule = Schedule1F1B(
        stage, n_microbatches=2, loss_fn=lambda out, target: (out - target).pow(2).mean()
    )
    for step in range(2):
        batch = values("batch", step, (4, 3))
        if rank == 0:
            schedule.step(batch)
        elif rank == stages - 1:
            schedule.step(target=batch * 0.5)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    with CheckpointManager(root) as ckpt:
        ckpt.save(2, components(model, optimizer, plain=False))
    whole = Pipe(list(range(8)))
    fill(whole, -1.0)
    other = torch.optim.AdamW(whole.parameters(), 0.05)
    with CheckpointManager(root) as ckpt:
        ckpt.load(components(whole, other, plain=False))
    return {"mine": snapshot(model, optimizer), "whole": snapshot(whole, other)}
