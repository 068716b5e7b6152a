"""Makes the golden checkpoints again: `python tests/golden/make.py`. Only while format 1.0 is not
released.

What is saved is what test_golden.py expects. Times, ids and the machine are replaced, so that only
what a change of the engine changes differs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from test_golden import (
    BOXES,
    COMMON,
    CUTS,
    FULL,
    GROUP_KEYS,
    GROUPS,
    LEARNING_RATE,
    METADATA,
    METRICS,
    MOMENTS,
    NODES,
    ROOT,
    SHARDED,
    SINGLE,
    TENSORS,
    VALUES,
    WEIGHTS,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor.placement_types import _StridedShard

from ckptcore import CheckpointManager, CheckpointManifest, Shard, SharingPattern, StateComponent
from ckptcore.testing.ranks import run_ranks


def save_single(root: Path) -> None:
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(WEIGHTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = dict(MOMENTS[name])
    state = {"model": model, "optimizer": optimizer, "tensors": TENSORS, "values": VALUES}
    with CheckpointManager(root, run_id="golden") as manager:
        manager.save(7, state, metrics=METRICS, metadata=METADATA, training_args_hash="abc")


# Rows (and columns) that a rank holds, by name; the engine refuses a DTensor whose local part is
# not what it computes.
HELD = {
    "column": [slice(0, 3), slice(5, 8), slice(3, 5), slice(8, 10)],
    "row": [
        (slice(0, 2), slice(0, 5)),
        (slice(0, 2), slice(5, 10)),
        (slice(2, 3), slice(0, 5)),
        (slice(2, 3), slice(5, 10)),
    ],
    "hsdp": [slice(0, 3), slice(3, 5), slice(0, 3), slice(3, 5)],
}


def dtensor(name: str, rank: int) -> DTensor:
    """A DTensor as one rank of the 2 x 2 mesh holds it; no process group is needed."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False, _rank=rank)
    cuts: list[Any] = []
    for text in CUTS[name].split():
        dim = int(text[1:] or 0)
        cuts.append(
            {"R": Replicate(), "S": Cut(dim), "s": _StridedShard(dim, split_factor=2)}[text[0]]
        )
    full = FULL[name]
    local = full[HELD[name][rank]].clone()
    return DTensor.from_local(
        local, mesh, cuts, run_check=False, shape=full.shape, stride=full.stride()
    )


def save_sharded(root: Path) -> None:
    def program(comm: Any) -> None:
        rank = comm.rank
        state: dict[str, Any] = {name: dtensor(name, rank) for name in CUTS}
        offset, size = BOXES[rank]
        part = FULL["boxes"][
            tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        ].clone()
        state["boxes"] = Shard(part, tuple(FULL["boxes"].shape), offset)
        state["plain"] = state["tied"] = FULL["plain"].clone()
        if rank == 2:
            state["stage.2"] = FULL["stage.2"].clone()
        components = [
            StateComponent("model", {**state, "values": COMMON}, SharingPattern.SHARDED),
            StateComponent("own", {"rank": rank}, SharingPattern.PER_RANK),
            StateComponent(
                "loader",
                {"position": 100 + rank % 2},
                SharingPattern.PER_GROUP,
                "dp",
                group_key=GROUP_KEYS[rank % 2],
            ),
            StateComponent("cache", {"node": torch.tensor(rank // 2)}, SharingPattern.PER_NODE),
            StateComponent("args", {"lr": 0.5}, SharingPattern.REPLICATED),
        ]
        with CheckpointManager(root, comm=comm, process_groups=GROUPS, run_id="golden") as manager:
            manager.save(20, components)

    run_ranks(4, program, nodes=NODES)


def make_plain(folder: Path) -> None:
    """Replace what differs from run to run in the manifest."""
    path = folder / "checkpoint_manifest.json"
    manifest = CheckpointManifest.decode(path.read_bytes())
    manifest.checkpoint_id, manifest.attempt_id = "0" * 32, "00000000-00000000-1-0-1"
    manifest.created = "2026-01-31T12:00:00.000Z"
    manifest.environment = {"host": "golden", "platform": "any"}
    manifest.timings = dict.fromkeys(manifest.timings, 0.5)
    path.write_bytes(manifest.encode())


def main() -> None:
    shutil.rmtree(ROOT, ignore_errors=True)
    save_single(SINGLE.parent)
    save_sharded(SHARDED.parent)
    for folder in (SINGLE, SHARDED):
        make_plain(folder)
    total = sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file())
    print(f"{ROOT.name}: {total:,} bytes")


if __name__ == "__main__":
    main()
