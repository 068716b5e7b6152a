"""Two jobs of one process each that save to one root at the same time; see test_jobs_in_a_root.py."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from ckptcore import CheckpointError, CheckpointManager, CheckpointWarning, KeepLast, SingleProcess


def state(mark: int) -> dict[str, Any]:
    model = {f"w{n}": torch.arange(4) * 0.5 + mark + n for n in range(3)}
    return {"model": model, "progress": {"mark": mark, "big": 2**70 + mark}}


def saves(rank: int, _world_size: int, root: str, runs: list[list[Any]]) -> dict[str, Any]:
    warnings.simplefilter("error", CheckpointWarning)
    run, offset = runs[rank]
    outcome: list[list[Any]] = []
    dist.barrier()  # both are ready
    with CheckpointManager(
        root, run_id=run, keep=KeepLast(2), io_threads=1, comm=SingleProcess()
    ) as ckpt:
        for step in range(1, 21):
            number = step * 10 + offset
            try:
                info = ckpt.save(number, state(number + 1000))
                outcome.append([number, None, info.manifest.attempt_id])
            except CheckpointError as error:
                outcome.append([number, type(error).__name__, str(error)])
    return {"saves": outcome, "left": [info.step for info in ckpt.list()]}
