"""How long the call of `save_async` holds training on a GPU, by number of tensors and by staging.

`python -m benchmarks gpu-calls`, or under `torchrun`, where every tensor is a DTensor that is cut
over all ranks. Seconds are those of the slowest rank.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from ckptcore import CheckpointManager

from .frame import Check, Report, Row
from .ground import size_text
from .training import check_device, is_first_rank, of_all_ranks, ranks, wait_for

__all__ = ["COUNTS", "run"]

COUNTS = (96, 200)
COLUMNS = 1024
STAGINGS: tuple[Literal["auto", "overlap", "copy"], ...] = ("auto", "overlap", "copy")
# Seconds: the most that a later call may take on one card, and on several. A first save after a
# prewarm may take FIRST times as long as a later one.
TARGETS = {False: 0.005, True: 0.008}
FIRST = 2.0


def run(
    folder: Path,
    *,
    size: int,
    counts: Sequence[int] = COUNTS,
    rounds: int = 5,
    device: str = "cuda",
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Rows: for each count and staging the later calls, and the first call of a manager with and
    without a prewarm."""
    check_device(device)
    rows: list[Row] = []
    for count in counts:
        state = {"model": _tensors(size, count, device)}
        for staging in STAGINGS if device != "cpu" else ("copy",):
            progress(f"{count} tensors, {staging}")
            warm, later = _calls(folder / "warm", state, staging, device, 1 + rounds, prewarm=True)
            cold, _ = _calls(folder / "cold", state, staging, device, 1, prewarm=False)
            what = f'{count} tensors, "{staging}"'
            rows += _rows(what, warm, cold, later)
        del state
        gc.collect()
    return Report(
        "gpu-calls",
        f"The call of save_async of {size_text(size)} on {device}, {ranks()} rank"
        f"{'s' * (ranks() > 1)}",
        rows,
        {"size": size, "counts": list(counts), "rounds": rounds, "ranks": ranks()},
        ["each save has ended before the next one. first: of a new manager."],
    )


def _tensors(size: int, count: int, device: str) -> dict[str, torch.Tensor]:
    rows = max(1, size // count // COLUMNS // 4 // ranks())
    made = {f"layers.{n}.w": torch.randn(rows, COLUMNS, device=device) for n in range(count)}
    if ranks() == 1:
        return made
    mesh = dist.init_device_mesh(device, (ranks(),))
    return {k: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for k, t in made.items()}


def _calls(
    root: Path,
    state: dict[str, Any],
    staging: Literal["auto", "overlap", "copy"],
    device: str,
    saves: int,
    *,
    prewarm: bool,
) -> tuple[float, list[float]]:
    """Seconds of the first call, and of the later ones."""
    seconds = []
    with CheckpointManager(root, staging=staging) as manager:
        if prewarm:
            manager.prewarm(state)
        for step in range(1, saves + 1):
            wait_for(device)
            of_all_ranks(0.0)  # all ranks begin together
            began = time.perf_counter()
            handle = manager.save_async(step, state)
            seconds.append(of_all_ranks(time.perf_counter() - began))
            handle.result(120)
            if is_first_rank():
                shutil.rmtree(root / f"checkpoint-{step - 1}", ignore_errors=True)
    of_all_ranks(0.0)
    if is_first_rank():
        shutil.rmtree(root)
    of_all_ranks(0.0)
    return seconds[0], seconds[1:]


def _rows(what: str, warm: float, cold: float, later: list[float]) -> list[Row]:
    base = statistics.median(later)
    rows = [
        Row(f"{what}: call", base, min(later), max(later), kind="ours", rounds=later),
        Row(f"{what}: first call, prewarmed", warm, kind="ours"),
        Row(f"{what}: first call", cold, kind="ours"),
    ]
    if "copy" not in what:
        bound = 1000 * TARGETS[ranks() > 1]
        rows[0].checks.append(Check("", bound, 1000 * base, at_least=False, unit=" ms"))
        rows[1].checks.append(Check("a later call", FIRST, warm / base, at_least=False, unit="x"))
    return rows
