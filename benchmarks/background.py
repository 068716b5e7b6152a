"""What writing in the background does to the steps of a training run: `python -m benchmarks
background [--device cuda]`.

Steps are timed while a save is being written (its copy is made by then) and, just before and after,
while none is. On the CPU bytes have to be hashed and handed to the disk by the machine that trains,
whoever does it; another process that does nothing else shows what that takes from training, and
only what a save takes beyond it counts against the target.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .asyncs import AsyncSaver, BytesAlone, savers_for
from .frame import Check, Report, Row, problem_of
from .ground import MIB, settle, size_text
from .savers import cores
from .training import Trainee, check_device, wait_for

__all__ = ["Effect", "run"]

THREADS = 2  # that train on the CPU
MODEL = (
    24 * MIB
)  # on the CPU: of the state, the rest is ballast, so that a step is short against the save
LEAST, MOST = 10, 100  # plain steps around each save


@dataclass(frozen=True)
class Effect:
    """Steps while a save was written, and a plain step of the same round; all in seconds."""

    steps: int
    seconds: float
    plain: float

    @property
    def extra(self) -> float:
        return self.seconds - self.steps * self.plain

    def percent(self, own: float = 0.0) -> float:
        """By how much the steps were longer; own: seconds that the bytes themselves had to take
        from them."""
        return 100 * (self.extra - own) / (self.steps * self.plain)


@dataclass
class _Found:
    saver: AsyncSaver
    effects: list[Effect] = field(default_factory=list)
    problem: str | None = None
    steps: int = LEAST


def run(
    folder: Path,
    *,
    size: int,
    rounds: int = 7,
    device: str = "cpu",
    step_seconds: float = 0.03,
    settle_seconds: float = 1.0,
    only: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Rows: how much longer steps are while each saver writes; for ours the target."""
    check_device(device)
    progress("making the training run")
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(THREADS)
    try:
        return _run(folder, size, rounds, device, step_seconds, settle_seconds, only, progress)
    finally:
        torch.set_num_threads(before)


def _run(
    folder: Path,
    size: int,
    rounds: int,
    device: str,
    step_seconds: float,
    rest: float,
    only: Sequence[str],
    progress: Callable[[str], None],
) -> Report:
    if device == "cpu":
        trainee = Trainee(min(MODEL, size), device, layers=8, ballast=max(0, size - MODEL))
    else:
        trainee = Trainee(size, device)
    step = trainee.calibrate(step_seconds)
    makers = [make for short, make in savers_for(device).items() if not only or short in only]
    alone = _Found(BytesAlone("the bytes alone, by another process"))
    all_found = [_Found(saver) for make in makers if (saver := make()).in_background] + [alone] * (
        device == "cpu"
    )
    try:
        for number, found in enumerate(all_found):
            found.problem = found.saver.missing(trainee)
            if found.problem is None:
                _noted(
                    found,
                    lambda f=found, n=number: _start(f.saver, trainee, folder / f"background-{n}"),
                )  # type: ignore[misc]
        order = random.Random(0)
        for number in range(rounds + 1):
            which = [f for f in all_found if f.problem is None]
            order.shuffle(which)
            for found in which:
                progress(f"round {number}: {found.saver.name}")
                _noted(found, lambda f=found, n=number: _measure(f, trainee, n, rest))  # type: ignore[misc]
    finally:
        for found in all_found:
            with suppress(Exception):
                found.saver.stop()
    own = statistics.median(effect.extra for effect in alone.effects) if alone.effects else 0.0
    rows = [_row(found, max(0.0, own), device) for found in all_found]
    notes = [
        f"a step of {step * 1000:.1f} ms, {rounds} rounds after one that is not counted; counted "
        "are the steps from when the "
        "host has its copy until everything is written, against as many just before the save."
    ]
    if device == "cpu":
        notes.append(
            f"{THREADS} threads train on {cores()} cores. As many bytes hashed and written by "
            "another process take "
            f"{own:.3f} s from training; net: beyond that. Median: net for ours, gross for the "
            "others."
        )
    return Report(
        "background" if device == "cpu" else "background-cuda",
        f"Longer steps while {size_text(trainee.nbytes)} are written in the background, on "
        f"{device}",
        rows,
        {
            "size": size,
            "rounds": rounds,
            "device": device,
            "step_seconds": step,
            "own_seconds": own,
        },
        notes,
    )


def _start(saver: AsyncSaver, trainee: Trainee, folder: Path) -> None:
    saver.start(trainee, folder)
    saver.prewarm()


def _noted(found: _Found, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        found.problem = problem_of(error)


def _measure(found: _Found, trainee: Trainee, number: int, rest: float) -> None:
    """One save, with plain steps before it. The round of number 0 only counts the steps."""
    saver = found.saver
    settle(rest)
    gc.collect()
    half = -(-found.steps // 2)
    plain = trainee.timed_steps(half, warm=2)
    saver.begin(number + 1)
    with saver.guard():
        pass
    while not saver.private():
        trainee.step(saver.guard())
    wait_for(trainee.device)
    steps, began = 0, time.perf_counter()
    while not saver.done():
        trainee.step(saver.guard())
        steps += 1
    seconds = time.perf_counter() - began
    saver.wait()
    saver.clear()
    os.sync()
    plain += trainee.timed_steps(half, warm=1)
    if number and steps:
        found.effects.append(Effect(steps, seconds, statistics.mean(plain)))
    found.steps = min(max(LEAST, steps), MOST)


def _row(found: _Found, own: float, device: str) -> Row:
    ours = found.saver.kind == "ours"
    counted = (
        [effect.percent(own if ours else 0.0) for effect in found.effects]
        if found.problem is None
        else []
    )
    row = Row(
        found.saver.name,
        statistics.median(counted) if counted else None,
        kind=found.saver.kind,
        unit="%",
        problem=found.problem,
        rounds=counted,
    )
    if counted:
        row.low, row.high = min(counted), max(counted)
        gross = statistics.median(effect.percent() for effect in found.effects)
        row.extra["gross"] = f"{gross:+.1f} %"
        row.extra["taken from training"] = (
            f"{statistics.median(effect.extra for effect in found.effects):.3f} s"
        )
        plain = sorted(1000 * effect.plain for effect in found.effects)
        row.extra["plain steps"] = f"{plain[0]:.1f}..{plain[-1]:.1f} ms"
        row.extra["steps while writing"] = (
            f"{statistics.median(effect.steps for effect in found.effects):g}"
        )
    elif row.problem is None:
        row.problem = "not measured: everything was written before the first step"
    if ours:
        bound = 5.0 if device == "cpu" else 3.0
        what = "longer steps, net" if device == "cpu" else "longer steps"
        row.checks.append(Check(what, bound, row.median, at_least=False, unit=" %"))
    return row
