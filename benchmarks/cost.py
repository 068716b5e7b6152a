"""Seconds of training that one checkpoint costs: `python -m benchmarks cost [--device cuda] [--size
6GiB]`.

A window is `window` training steps with a save at its start; what it takes longer than the same
steps without one is what the checkpoint costs. Plain windows stand between the others in every
round. Savers that do all of their work in the call get shorter windows: nothing of theirs is left
after it.

`torchrun --nproc-per-node 2 -m benchmarks cost ...` measures a job whose state is cut over all
ranks. Seconds are those of the slowest rank. There a saver that fails ends the run: each peer is
best measured by itself.
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

from .asyncs import AsyncSaver, savers_for
from .frame import Check, Report, Row, problem_of
from .ground import settle, size_text
from .training import Trainee, check_device, local_part, of_all_ranks, ranks, wait_for

__all__ = ["Costs", "Window", "judge", "run"]

PEER = "torch_checkpointing async"
SYNC_SHARE = 9  # a synchronous saver's windows are this much shorter
PLAIN = 2  # plain windows in each round
DEFAULT = (
    "torch",
    "dcp",
    "dcp-async",
    "dcp-pinned",
    "tc",
    "ours",
    "ours-copy",
    "ours-overlap",
    "ours-auto",
)
MARGIN = 1 << 30  # of device memory, beyond a snapshot of the state
# Seconds of training that a checkpoint of 6 GiB may cost on a GPU.
LIMITS = {"auto": 0.02, "overlap": 0.06}
FULL_SIZE = 6 << 30


@dataclass(frozen=True)
class Window:
    """seconds: of all of it; call: until the save returned; written: until it was durable, from the
    window's start."""

    steps: int
    seconds: float
    call: float = 0.0
    written: float = 0.0
    first: bool = False


@dataclass
class Costs:
    """All windows of one saver, by round, with the plain seconds a step of the same round."""

    saver: AsyncSaver
    windows: list[tuple[Window, float]] = field(default_factory=list)
    problem: str | None = None
    checked: int = 0
    prewarm: float | None = None

    def added(self, first: bool = False) -> list[float]:
        """Seconds that each save added to its window."""
        return [w.seconds - w.steps * plain for w, plain in self.windows if w.first == first]

    def median(self, first: bool = False) -> float | None:
        added = self.added(first)
        return statistics.median(added) if added and self.problem is None else None


def run(
    folder: Path,
    *,
    size: int,
    rounds: int = 2,
    device: str = "cuda",
    window: int = 270,
    step_seconds: float = 0.04,
    limit_seconds: float = 470.0,
    settle_seconds: float = 0.0,
    only: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Rows: one for each saver of `only` (DEFAULT). No round is begun that would end later than
    `limit_seconds`."""
    began = time.perf_counter()
    check_device(device)
    progress("making the training run")
    trainee = Trainee(size, device)
    step = trainee.calibrate(step_seconds)
    roomy = device != "cpu" and torch.cuda.mem_get_info()[0] > trainee.nbytes + MARGIN
    copy = _host_copy(trainee) if device != "cpu" else None
    all_costs = [
        Costs(make())
        for short, make in savers_for(device).items()
        if short in (only or DEFAULT) and not (short == "torch" and ranks() > 1)
    ]
    plain: list[list[float]] = []
    try:
        _start(all_costs, trainee, folder, progress)
        done, taken = 0, 0.0  # counted rounds, seconds of the last one
        for number in range(rounds + 1):
            if number > 1 and of_all_ranks(time.perf_counter() - began) + taken > limit_seconds:
                break
            round_began = time.perf_counter()
            plain += [_round(number, all_costs, trainee, window, settle_seconds, progress)]
            taken, done = of_all_ranks(time.perf_counter() - round_began), number
    finally:
        for costs in all_costs:
            with suppress(Exception):
                costs.saver.stop()
    counted = [seconds for each in plain[1:] or plain for seconds in each]
    base, noise = statistics.median(counted), window * (max(counted) - min(counted)) / 2
    rows = [_row(costs) for costs in all_costs]
    judge(rows, all_costs, roomy=roomy, noise=noise)
    if device != "cpu" and size == FULL_SIZE:
        judge_seconds(rows)
    if copy is not None:
        rows.insert(0, Row("copy of the state into pinned memory", copy, kind="note"))
    return Report(
        "cost",
        f"Seconds of training that one checkpoint of {size_text(trainee.nbytes)} costs, on "
        f"{device}{f', {ranks()} ranks' * (ranks() > 1)}",
        rows,
        {
            "ranks": ranks(),
            "size": size,
            "rounds": done,
            "device": device,
            "window": window,
            "step_seconds": step,
            "plain": plain,
        },
        [
            f"AdamW on fp32 weights, {len(trainee.tensors())} tensors saved; a step takes "
            f"{base * 1000:.1f} ms (asked for: "
            f"{step_seconds * 1000:g}) and ends with a look at the loss. {window} steps a window, "
            "with a save at its start, "
            f"against windows without in the same round: {done} interleaved rounds after two "
            "warm-up saves.",
            f"Plain windows differ by +-{noise:.3f} s: differences below that are noise, and "
            "where "
            "torch_checkpointing costs less than that nothing is said of its targets. Synchronous "
            "savers have windows of "
            f"{_steps_of(all_costs, window)} steps. First save: after a prewarm, where the saver "
            "has one, outside its window.",
            "same bytes: some tensors as they were at the call were compared with what was saved.",
        ],
    )


def judge(rows: Sequence[Row], all_costs: Sequence[Costs], *, roomy: bool, noise: float) -> None:
    """Put the targets to our rows, where the peer costs more than the noise.

    roomy: there was free device memory for a snapshot of the state.
    """
    found = {costs.saver.name: costs for costs in all_costs}
    peer = found[PEER].median() if PEER in found else None
    if peer is not None and peer <= noise:
        peer = None
    for row in rows:
        costs = found[row.name]
        mine, first = costs.median(), costs.median(first=True)
        if (ratio := _over(mine, peer)) is not None:
            row.extra["x torch_checkpointing"] = f"{ratio:.2f}"
        if row.kind != "ours" or not costs.saver.in_background or row.name.endswith('"copy"'):
            continue
        bound = 0.2 if row.name.endswith('"auto"') and roomy else 1.0
        row.checks.append(
            Check("torch_checkpointing", bound, _over(mine, peer), at_least=False, unit="x")
        )
        if row.name.endswith('"auto"'):
            row.checks.append(
                Check(
                    "torch_checkpointing, first save",
                    2 * bound,
                    _over(first, peer),
                    at_least=False,
                    unit="x",
                )
            )


def judge_seconds(rows: Sequence[Row]) -> None:
    """Put the targets in seconds to our rows. What the noise hides counts as nothing."""
    for row in rows:
        for staging, bound in LIMITS.items():
            if row.kind == "ours" and row.name.endswith(f'"{staging}"') and row.median is not None:
                added = max(row.median, 0.0)
                row.checks.append(Check("of training", bound, added, at_least=False, unit=" s"))


def _over(mine: float | None, peer: float | None) -> float | None:
    """A save that is lost in the noise costs nothing; against a peer of which that is true nothing
    can be said."""
    return max(mine, 0.0) / peer if mine is not None and peer is not None and peer > 0 else None


def _steps(saver: AsyncSaver, window: int) -> int:
    return window if saver.in_background else max(2, window // SYNC_SHARE)


def _steps_of(all_costs: Sequence[Costs], window: int) -> int:
    return next((_steps(c.saver, window) for c in all_costs if not c.saver.in_background), window)


def _start(
    all_costs: Sequence[Costs], trainee: Trainee, folder: Path, progress: Callable[[str], None]
) -> None:
    for number, costs in enumerate(all_costs):
        progress(f"starting {costs.saver.name}")
        costs.problem = costs.saver.missing(trainee)
        if costs.problem is None:
            with _noting(costs):
                costs.saver.start(trainee, folder / f"cost-{number}")
                began = time.perf_counter()
                costs.saver.prewarm()
                costs.prewarm = time.perf_counter() - began


class _noting:
    """A saver that fails is left out from then on, with its reason."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or ranks() > 1:
            return False  # the other ranks would wait for this one
        self.costs.problem = problem_of(error)
        return True


def _round(
    number: int,
    all_costs: Sequence[Costs],
    trainee: Trainee,
    window: int,
    rest: float,
    progress: Callable[[str], None],
) -> list[float]:
    """One window for every saver, and plain ones among them; seconds a step of the plain ones.

    Round 0 has the first save of each, in a window that is half as long, and then a second one that
    is not counted.
    """
    order: list[Costs | None] = [costs for costs in all_costs if costs.problem is None]
    random.Random(number).shuffle(order)
    for position in range(PLAIN):
        order.insert(position * len(order) // max(1, PLAIN - 1), None)
    plain, found = [], []
    length = window if number else max(1, window // 2)
    for costs in order:
        settle(rest)
        gc.collect()
        if costs is None:
            progress(f"round {number}: without a save")
            plain.append(_plain_window(trainee, length))
            continue
        progress(f"round {number}: {costs.saver.name}")
        with _noting(costs):
            steps = _steps(costs.saver, length)
            found.append(
                (costs, _saved_window(costs, trainee, steps, 3 * number + 1, first=number == 0))
            )
            if number == 0:
                _saved_window(costs, trainee, 2, 2)
        if costs.problem is not None:
            with suppress(Exception):
                costs.saver.clear()
    base = statistics.mean(plain)
    for costs, measured in found:
        costs.windows.append((measured, base))
    return plain


def _plain_window(trainee: Trainee, steps: int) -> float:
    """Seconds a step."""
    trainee.step()
    wait_for(trainee.device)
    began = time.perf_counter()
    for _ in range(steps):
        trainee.step()
    wait_for(trainee.device)
    return of_all_ranks(time.perf_counter() - began) / steps


def _saved_window(
    costs: Costs, trainee: Trainee, steps: int, step: int, first: bool = False
) -> Window:
    saver = costs.saver
    trainee.step()
    wait_for(trainee.device)
    truth = trainee.sample() if saver.checked else {}
    began = time.perf_counter()
    saver.begin(step)
    call = time.perf_counter() - began
    written = 0.0
    for _ in range(steps):
        trainee.step(saver.guard())
        if not written and saver.done():
            written = time.perf_counter() - began
    wait_for(trainee.device)
    seconds = time.perf_counter() - began
    saver.wait()
    written = of_all_ranks(written or time.perf_counter() - began)
    seconds, call = of_all_ranks(seconds), of_all_ranks(call)
    for name, tensor in truth.items():
        if not saver.same(name, tensor):
            raise AssertionError(f"{name} was not saved as it was at the call")
        costs.checked += 1
    of_all_ranks(0.0)  # every rank has looked
    saver.clear()
    os.sync()
    return Window(steps, seconds, call, written, first)


def _row(costs: Costs) -> Row:
    row = Row(
        costs.saver.name,
        costs.median(),
        kind=costs.saver.kind,
        problem=costs.problem,
        rounds=costs.added(),
    )
    if first := costs.added(first=True):
        row.extra["first save adds"] = f"{first[0]:.3f} s"
    if costs.checked:
        row.extra["same bytes"] = "yes"
    if row.median is None:
        row.problem = row.problem or "not measured"
        return row
    row.low, row.high = min(row.rounds), max(row.rounds)
    counted = [w for w, _ in costs.windows if not w.first]
    row.extra["call returns after"] = f"{statistics.median(w.call for w in counted):.3f} s"
    if costs.saver.in_background:
        late = any(w.written > w.seconds for w in counted)
        row.extra["written after"] = (
            f"{statistics.median(w.written for w in counted):.2f} s{' (window ended)' * late}"
        )
    return row


def _host_copy(trainee: Trainee) -> float:
    """Seconds of a copy of the state into pinned memory."""
    live = map(local_part, trainee.tensors().values())
    sources = [tensor for tensor in live if tensor.device.type != "cpu"]
    targets = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in sources]
    times = []
    for _ in range(4):
        wait_for(trainee.device)
        began = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        wait_for(trainee.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
