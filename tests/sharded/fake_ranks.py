"""Prints what torch says of layouts on many meshes, and what ckptcore reads from real DTensors, one
rank after another.

Run as a program by test_torch_layouts.py: torch's "fake" process group makes any rank of any world
in one process.
"""

from __future__ import annotations

import json
import os
import random
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptcore.state.layout import local_shard

MESHES = [
    (1,),
    (2,),
    (3,),
    (5,),
    (8,),
    (2, 2),
    (2, 3),
    (3, 2),
    (4, 4),
    (2, 2, 2),
    (2, 3, 2),
    (1, 4),
    (64,),
    (8, 16),
]
SHAPES = [(), (0,), (1,), (2, 5), (7, 3), (16,), (3, 1, 4), (0, 3), (65, 2), (33, 17)]


def told(tensor: Any) -> dict[str, Any]:
    part = local_shard(tensor)
    assert part.layout is not None and part.layout != "box"
    return {
        "mesh": part.layout.mesh.shape,
        "ranks": part.layout.mesh.ranks,
        "placements": part.layout.placements,
        "shape": part.shape,
        "box": part.box,
        "local": list(part.tensor.shape),
    }


def holds_its_box(full: torch.Tensor, tensor: Any) -> bool:
    part = local_shard(tensor)
    assert part.box is not None
    expected = full[tuple(slice(o, o + n) for o, n in zip(*part.box, strict=True))]
    return part.tensor.numel() == expected.numel() == 0 or torch.equal(part.tensor, expected)


def plain_layouts(shape: tuple[int, ...], rank: int, chance: random.Random) -> list[dict[str, Any]]:
    """Shard and Replicate in every order, on tensors whose items say where they belong."""
    mesh = init_device_mesh("cpu", shape)
    rows = []
    for size in SHAPES:
        cuts = [Replicate(), *(Shard(d) for d in range(len(size))), *(Shard(-1) for d in size[:1])]
        placements = [chance.choice(cuts) for _ in shape]
        full = torch.arange(prod(size)).reshape(size)
        tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
        local, offset = compute_local_shape_and_global_offset(
            torch.Size(size), mesh, tensor.placements
        )
        rows.append(
            {
                **told(tensor),
                "torch": [list(offset), list(local)],
                "holds": holds_its_box(full, tensor),
                "rank": rank,
            }
        )
    return rows


class Block(nn.Module):
    def __init__(self, wide: int, deep: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(deep, wide), nn.Linear(wide, deep)
        self.norm = nn.LayerNorm(deep)


def models(
    shape: tuple[int, ...], names: tuple[str, ...], sizes: tuple[int, int], rank: int
) -> list[dict[str, Any]]:
    """FSDP2, over tensor parallelism where the mesh has "tp", with replicas where it has "rep"."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = Block(*sizes)
    full = {}
    for name, parameter in model.named_parameters():
        full[name] = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
        parameter.data = full[name].clone()
    if "tp" in names:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    data = tuple(name for name in names if name != "tp")
    if data:
        fully_shard(model, mesh=mesh[data] if len(data) > 1 else mesh[data[0]])
    rows = []
    for name, parameter in model.state_dict().items():
        if isinstance(parameter, DTensor):
            local, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            row = {
                **told(parameter),
                "torch": [list(offset), list(local)],
                "rank": rank,
                "name": name,
            }
            rows.append({**row, "holds": holds_its_box(full[name], parameter)})
    return rows


def at_rank(rank: int, world: int, call: Any) -> list[dict[str, Any]]:
    """In a process of its own, because torch caches meshes, and with them the rank that it was
    first."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        with os.fdopen(write, "w") as out:
            json.dump(call(), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    assert os.waitpid(child, 0)[1] == 0, f"rank {rank} of {world} failed"
    rows: list[dict[str, Any]] = json.loads(text)
    return rows


def main() -> None:
    chance = random.Random(5)
    # Imports what torch imports late, once and not in every rank; the one rank of a world of one
    # stays the same.
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    plain_layouts((1,), 0, random.Random(0))
    models((1,), ("dp",), (4, 4), 0)
    dist.destroy_process_group()
    found: dict[str, list[dict[str, Any]]] = {
        "plain": [],
        "fsdp": [],
        "tp": [],
        "hsdp": [],
        "fsdp over tp": [],
    }
    for shape in MESHES:
        world = prod(shape)
        for rank in sorted({0, world - 1, *chance.sample(range(world), min(world, 4))}):
            found["plain"] += at_rank(
                rank, world, lambda s=shape, r=rank: plain_layouts(s, r, chance)
            )
    jobs = [
        ("fsdp", (4,), ("dp",), (7, 3)),
        ("tp", (4,), ("tp",), (8, 4)),
        ("hsdp", (2, 2), ("rep", "dp"), (7, 3)),
        ("fsdp over tp", (2, 2), ("dp", "tp"), (8, 6)),
        ("fsdp over tp", (2, 2), ("dp", "tp"), (10, 3)),
        ("fsdp over tp", (4, 2), ("dp", "tp"), (12, 6)),
        ("fsdp over tp", (2, 2, 2), ("rep", "dp", "tp"), (8, 6)),
    ]
    for kind, shape, names, sizes in jobs:
        for rank in range(prod(shape)):
            found[kind] += at_rank(
                rank, prod(shape), lambda j=(shape, names, sizes, rank): models(*j)
            )
    print(json.dumps(found))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
