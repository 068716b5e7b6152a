"""Seconds that an async save holds training: `python -m benchmarks stall [--size 1GiB] [--device
cuda]`.

The limit is the same bytes copied to where they are needed: by memcpy into warm memory, or from the
device into pinned memory. The background work of every round is waited for before the next one,
outside the timed part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

from .asyncs import AsyncSaver, DcpAsync, OursAsync, TorchCheckpointing, savers_for
from .frame import Check, Contender, Report, Row, Sample, best_limit, measure, rows_of
from .ground import MIB, memory_of, settle, size_text
from .savers import in_threads
from .training import Trainee, check_device, wait_for

__all__ = ["judge", "run"]

PIECE = 16 * MIB
SECOND = "ckptcore save_async, from the second on"
FIRST = "ckptcore save_async, first, prewarmed"
COLD = "ckptcore save_async, first, not prewarmed"


class _Held:
    """A contender made of a saver: timed is what training waits for, until it may change the
    state."""

    def __init__(
        self, name: str, saver: AsyncSaver, trainee: Trainee, folder: Path, first: str, rest: float
    ) -> None:
        self.name, self.saver, self.trainee, self.folder = name, saver, trainee, folder
        self.first, self.rest = (
            first,
            rest,
        )  # first: "", "cold" or "prewarmed", of a saver that is new in each round
        self.started = False
        self.saves = 0

    def contender(self) -> Contender:
        return Contender(
            self.name,
            self.run,
            self.saver.kind,
            prepare=self.prepare,
            finish=self.finish,
            missing=self.saver.missing(self.trainee),
        )

    def prepare(self) -> None:
        if not self.started:
            self.started = True
            self.saver.start(self.trainee, self.folder)
            if self.first == "prewarmed":
                self.saver.prewarm()
        settle(self.rest)
        wait_for(self.trainee.device)

    def run(self) -> None:
        self.saves += 1
        self.saver.begin(self.saves)
        with self.saver.guard():
            pass

    def finish(self) -> None:
        self.saver.wait()
        wait_for(self.trainee.device)
        self.saver.clear()
        if self.first:
            self.stop()

    def stop(self) -> None:
        if self.started:
            self.started = False
            self.saver.stop()


def run(
    folder: Path,
    *,
    size: int,
    rounds: int = 7,
    device: str = "cpu",
    settle_seconds: float = 1.0,
    only: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Rows: the copy that nothing can do without, ours (from the second save on, first saves), the
    peers."""
    check_device(device)
    progress("making the state")
    trainee = Trainee(size, device)
    held = [
        _Held(name, saver, trainee, folder / f"stall-{number}", first, settle_seconds)
        for number, (name, saver, first) in enumerate(_savers(device, only))
    ]
    contenders = [*_limits(trainee, settle_seconds), *(h.contender() for h in held)]
    try:
        samples = measure(contenders, rounds, progress=progress, strict=device == "cpu")
    finally:
        for each in held:
            with suppress(Exception):
                each.stop()
    rows = rows_of(samples)
    for row in rows:
        if row.median:
            row.extra["GB/s"] = f"{trainee.nbytes / row.median / 1e9:.1f}"
    judge(rows, samples, device)
    notes = [
        f"{rounds} interleaved rounds after one that is not counted. Timed: from the call until "
        "the state may be changed "
        "(torch_checkpointing and dcp's async stager return before; their copy has to end before "
        "the optimizer's step).",
        f"limit: {_limit_name(samples)}.",
    ]
    if device != "cpu":
        notes.append(
            '"overlap" and "auto": the call alone; `cost` has what they cost a training run.'
        )
    return Report(
        "stall" if device == "cpu" else "stall-cuda",
        f"Stall of an async save of {size_text(trainee.nbytes)} in {len(trainee.tensors())} "
        f"tensors on {device}",
        rows,
        {"size": size, "rounds": rounds, "device": device, "settle": settle_seconds},
        notes,
    )


def judge(rows: Sequence[Row], samples: dict[str, Sample], device: str) -> None:
    """Put the targets to the rows that they are for."""
    limit = best_limit(samples)
    copy = "memcpy" if device == "cpu" else "the pinned copy"
    bounds = {SECOND: 1.2 if device == "cpu" else 1.15, FIRST: 3.0}
    for row in rows:
        if row.name in bounds:
            ratio = row.median / limit if row.median is not None and limit else None
            row.checks.append(Check(copy, bounds[row.name], ratio, at_least=False, unit="x"))


def _savers(device: str, only: Sequence[str]) -> list[tuple[str, AsyncSaver, str]]:
    """Name of the row, saver, what kind of first save each round is."""
    found: list[tuple[str, AsyncSaver, str]] = []
    for short, make in savers_for(device).items():
        saver = make()
        if not saver.in_background or (only and short not in only):
            continue
        name = saver.name
        if isinstance(saver, OursAsync) and saver.staging == "copy":
            found += [
                (SECOND, saver, ""),
                (FIRST, OursAsync("", "copy"), "prewarmed"),
                (COLD, OursAsync("", "copy"), "cold"),
            ]
            continue
        if isinstance(saver, TorchCheckpointing) or (
            isinstance(saver, DcpAsync) and "async" in name.partition(",")[2]
        ):
            name += ", until the copy is made"
        found.append((name, saver, ""))
    return sorted(found, key=lambda each: each[1].kind != "ours")


def _limit_name(samples: dict[str, Sample]) -> str:
    limit = best_limit(samples)
    return next(
        (
            f"{s.contender.name}, the fastest of its kind"
            for s in samples.values()
            if s.contender.kind == "limit" and s.median == limit
        ),
        "not measured",
    )


def _limits(trainee: Trainee, rest: float) -> list[Contender]:
    def prepare() -> None:
        settle(rest)
        wait_for(trainee.device)

    tensors = list(trainee.tensors().values())
    if trainee.device == "cpu":
        pairs = [(np.zeros(t.nbytes, dtype=np.uint8), np.asarray(memory_of(t))) for t in tensors]
        for target, source in pairs:
            np.copyto(target, source)  # zeros alone are not yet memory
        return [
            Contender(
                f"memcpy into a warm buffer, {threads} thread{'s' * (threads > 1)}",
                partial(_copy, pairs, threads),
                "limit",
                prepare=prepare,
            )
            for threads in (1, 2)
        ]
    device = [t for t in tensors if t.device.type != "cpu"]
    pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in device]

    def to_host() -> None:
        for target, source in zip(pinned, device, strict=True):
            target.copy_(source, non_blocking=True)
        wait_for(trainee.device)

    return [Contender("copy into pinned memory", to_host, "limit", prepare=prepare)]


def _copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]], threads: int) -> None:
    pieces = [
        (a[at : at + PIECE], b[at : at + PIECE]) for a, b in pairs for at in range(0, len(a), PIECE)
    ]

    def work(number: int) -> None:
        for target, source in pieces[number::threads]:
            np.copyto(target, source)

    in_threads(threads, work)
