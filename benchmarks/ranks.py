"""Many virtual ranks in one process: `python -m benchmarks ranks`.

Threads that are the ranks of one job save tensors that are cut over all of them. The figure is that
of all ranks on one machine's cores; what it shows is how the talking grows.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

from ckptcore import CheckpointManager, Shard, SharingPattern, StateComponent
from ckptcore.ranks.board import MemoryBoard
from ckptcore.ranks.communicator import Communicator
from ckptcore.testing.ranks import run_ranks

from .frame import Report, Row

__all__ = ["run"]

RANKS = 64
ITEMS = 16  # of each tensor on each rank


def run(
    folder: Path,
    *,
    tensors: int = 1000,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Rows: the first save, and later ones, with the messages that ranks posted."""
    progress(f"{RANKS} virtual ranks")
    seconds, messages = _saves(folder, tensors, 1 + rounds)
    rows = []
    for name, part in (("first save", slice(0, 1)), ("later saves", slice(1, None))):
        found = seconds[part]
        row = Row(
            f"{name}, {RANKS} virtual ranks, {tensors:,} sharded tensors",
            statistics.median(found),
            min(found),
            max(found),
            kind="ours",
            rounds=found,
        )
        row.extra = {"messages": f"{statistics.median(messages[part]):,.0f}"}
        rows.append(row)
    return Report(
        "ranks",
        f"{RANKS} virtual ranks save {tensors:,} tensors cut over all of them",
        rows,
        {"rounds": rounds, "tensors": tensors, "ranks": RANKS},
        ["all ranks are threads of one process, and share its interpreter."],
    )


def _saves(folder: Path, tensors: int, saves: int) -> tuple[list[float], list[int]]:
    """Seconds and messages of each save, on rank 0."""
    root = Path(tempfile.mkdtemp(dir=folder))
    gate = threading.Barrier(RANKS)
    posted = 0
    put = MemoryBoard.put

    def counted(self: MemoryBoard, key: str, value: bytes) -> None:
        nonlocal posted
        posted += not key.startswith("alive/")
        put(self, key, value)

    def program(comm: Communicator) -> tuple[list[float], list[int]]:
        live = {
            f"layers.{n // 8}.block.{n % 8}.weight": Shard(
                torch.full((1, ITEMS), float(n)), (RANKS, ITEMS), (comm.rank, 0)
            )
            for n in range(tensors)
        }
        state = [StateComponent("model", live, SharingPattern.SHARDED)]
        seconds, messages = [], []
        with CheckpointManager(root, comm=comm, io_threads=1) as manager:
            for step in range(saves):
                gate.wait()
                before, start = posted, time.perf_counter()
                manager.save(step, state)
                gate.wait()
                seconds.append(time.perf_counter() - start)
                messages.append(posted - before)
        return seconds, messages

    try:
        with patch.object(MemoryBoard, "put", counted):
            patient = {"join_timeout": 1800.0, "liveness_timeout": 1800.0, "deadline": 3600.0}
            found: tuple[list[float], list[int]] = run_ranks(RANKS, program, **patient)[0]
            return found
    finally:
        shutil.rmtree(root)
