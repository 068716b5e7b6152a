"""A restart on the machine that saved: `python -m benchmarks restart [--device cuda]`.

Saves past the page cache, as they are by default, and through it
(`storage_options={"keep_cached": True}`): what each costs training, and how long the load takes
that follows it, with nothing done to the page cache in between.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptcore import CheckpointManager

from .frame import Report, Row
from .ground import settle, size_text
from .training import Trainee, check_device, wait_for

__all__ = ["run"]

WAYS: dict[str, dict[str, Any]] = {
    "past the page cache (default)": {},
    "through the page cache": {"keep_cached": True},
}


@dataclass
class _Found:
    """Seconds of each round: that the save added to training, until it was written, and of the
    load."""

    cost: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


def run(
    folder: Path,
    *,
    size: int,
    rounds: int = 3,
    device: str = "cuda",
    step_seconds: float = 0.04,
    window: int = 120,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Rows: for each way of writing, the cost to training and the load."""
    check_device(device)
    progress("making the training run")
    trainee = Trainee(size, device)
    step = trainee.calibrate(step_seconds)
    managers = {
        name: CheckpointManager(folder / str(number), storage_options=options)
        for number, (name, options) in enumerate(WAYS.items())
    }
    found = {name: _Found() for name in WAYS}
    for manager in managers.values():
        manager.prewarm(trainee.state())
    order, chance = list(WAYS), random.Random(0)
    for number in range(rounds + 1):
        chance.shuffle(order)
        for name in order:
            progress(f"round {number}: {name}")
            into = found[name] if number else _Found()
            _measure(managers[name], trainee, number + 1, window, into)
    for manager in managers.values():
        manager.close()
    rows = [
        Row(f"{what}, {name}", statistics.median(seconds), min(seconds), max(seconds), kind="ours")
        for name, each in found.items()
        for what, seconds in (
            ("seconds of training lost by a save", each.cost),
            ("save_async, until written", each.written),
            ("load right after it", each.load),
        )
    ]
    return Report(
        "restart",
        f"A restart on the machine that saved {size_text(trainee.nbytes)}, on {device}",
        rows,
        {"size": size, "rounds": rounds, "window": window, "step_seconds": step},
        [
            f"{rounds} interleaved rounds after one that is not counted; {window} steps of "
            f"{step * 1000:.1f} ms after each call, against the median of as many before it."
        ],
    )


def _measure(
    manager: CheckpointManager, trainee: Trainee, step: int, window: int, into: _Found
) -> None:
    settle(0)
    base = statistics.median(trainee.timed_steps(window, warm=2))
    wait_for(trainee.device)
    began = time.perf_counter()
    handle = manager.save_async(step, trainee.state())
    written = 0.0
    for _ in range(window):
        trainee.step()
        if not written and handle.done():
            written = time.perf_counter() - began
    into.cost.append(time.perf_counter() - began - window * base)
    handle.result(120)
    into.written.append(written or time.perf_counter() - began)
    began = time.perf_counter()
    manager.load(trainee.state(), step)
    wait_for(trainee.device)
    into.load.append(time.perf_counter() - began)
    manager.delete(step)
