"""A training loop under a guard, as a program: `loop.py FOLDER [RANK WORLD_SIZE PORT]`.

Says "ready" when its first step is done, then what it stopped after; with "hold" in the place of
RANK it never stops.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ckptcore import CheckpointManager, PreemptionGuard

LAST = 100_000


def main(folder: str, rank: str = "", world_size: str = "1", port: str = "0") -> None:
    torch.set_num_threads(1)
    several = int(world_size) > 1
    if several:
        store = dist.TCPStore(
            "127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=60)
        )
        dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world_size))
    repeat_after = 0.0 if rank == "hold" else 5.0
    with (
        CheckpointManager(folder) as ckpt,
        PreemptionGuard(ckpt, repeat_after=repeat_after) as guard,
    ):
        for step in range(LAST):
            done = torch.full((1,), float(step))
            if several:
                dist.all_reduce(done)
            time.sleep(0.001)
            stop = guard.should_stop(step)
            if step == 0 or (rank == "hold" and stop):
                print("caught" if stop else "ready", flush=True)
            if rank == "hold" and stop:
                time.sleep(60)
            if stop:
                ckpt.save(step, {"state": {"done": done}})
                print(f"stopped after {step}", flush=True)
                break
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
