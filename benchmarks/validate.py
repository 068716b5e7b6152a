"""The cost of comparing replicas, as a share of the save: `python -m benchmarks validate [--size
256MiB]`.

Two ranks (threads of this process, each with its own copy of the state) save a REPLICATED component
at every level.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ckptcore import (
    CheckpointManager,
    Communicator,
    SharingPattern,
    StateComponent,
    ValidationLevel,
)
from ckptcore.testing.ranks import run_ranks

from .frame import Contender, Report, measure, rows_of
from .ground import MIB, make_state, settle, size_text

__all__ = ["run"]


def run(
    folder: Path,
    *,
    size: int = 256 * MIB,
    rounds: int = 7,
    settle_seconds: float = 0.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Rows: the save at NONE, QUICK, TENSOR and FULL; extra: what the level adds to the save
    without it."""
    states = [make_state(size), make_state(size)]

    def contender(level: ValidationLevel) -> Contender:
        root = folder / level.value

        def save(comm: Communicator) -> None:
            part = StateComponent(
                "model", states[comm.rank], SharingPattern.REPLICATED, validation_level=level
            )
            with CheckpointManager(root, comm=comm) as manager:
                manager.save(1, [part])

        return Contender(
            f"save, {level.value}",
            lambda: _save_on_two(save),
            "limit" if level is ValidationLevel.NONE else "ours",
            prepare=lambda: settle(settle_seconds),
            finish=lambda: shutil.rmtree(root),
        )

    samples = measure([contender(level) for level in ValidationLevel], rounds, progress=progress)
    rows = rows_of(samples)
    base = rows[0].median
    for row in rows:
        if row.median and base:
            row.extra["adds"] = f"{100 * (row.median / base - 1):+.1f} % of the save"
    return Report(
        "validate",
        f"Replication validation of {size_text(size)} on 2 virtual ranks, durable saves",
        rows,
        {"size": size, "rounds": rounds},
        [
            f"{rounds} interleaved rounds after one that is not counted; equal replicas, so FULL "
            "has nothing to compare closely."
        ],
    )


def _save_on_two(save: Callable[[Communicator], None]) -> None:
    run_ranks(2, save)
