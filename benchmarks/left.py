"""Where the seconds of training go that one save costs: `python -m benchmarks left --device cuda`.

Steps are timed one by one around saves. What they take beyond the median of the steps before counts
for the phase in which they began: while the device is copied to the host, while the files are
written, and after that. The call is timed by itself, and by function. Then parts of the work are
done without the others: the copy to the host alone (PCIe, the device's memory), hashing and writing
alone (threads of the host, Python's lock), and all of it with Python's lock handed on ten times as
often.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckptcore import CheckpointManager
from ckptcore.saving.devices import DeviceCopy, start_copies

from .frame import Report, Row
from .ground import settle, size_text
from .training import Trainee, check_device, wait_for

__all__ = ["run"]

PHASES = ("call", "to the host", "writing", "after")
SHOWN = 25  # functions of the call


@dataclass
class Work:
    """Something that goes on while training does."""

    name: str
    task: _Save | _Copy
    interval: float | None = None
    found: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})


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
    """Rows: for each kind of work, seconds added in each phase."""
    check_device(device)
    progress("making the training run")
    trainee = Trainee(size, device)
    step = trainee.calibrate(step_seconds)
    manager = CheckpointManager(folder / "run")
    manager.prewarm(trainee.state())
    works = _works(manager, trainee, folder)
    noise: list[float] = []
    try:
        for number in range(rounds + 1):
            for work in works:
                progress(f"round {number}: {work.name}")
                settle(0)
                _measure(work, trainee, window, number + 1, noise, counted=number > 0)
        profile = _profile(manager, trainee)
    finally:
        for work in works:
            work.task.close()
    rows = [_row(work, phase) for work in works for phase in PHASES if any(work.found[phase])]
    return Report(
        "left",
        f"Seconds of training that a save of {size_text(trainee.nbytes)} costs on {device}, by "
        "phase",
        rows,
        {"size": size, "rounds": rounds, "step_seconds": step, "noise": noise, "call": profile},
        [
            f"{rounds} rounds after one that is not counted, {window} steps after each call; a "
            f"step takes {step * 1000:.1f} ms; as many plain steps differ from their median by "
            f"{statistics.median(map(abs, noise)):.4f} s in sum.",
            "one call, by function (with the profiler's own cost):",
            *profile,
        ],
    )


def _row(work: Work, phase: str) -> Row:
    seconds = work.found[phase]
    row = Row(f"{work.name}: {phase}", statistics.median(seconds), min(seconds), max(seconds))
    row.kind, row.rounds = "ours" if work.name.startswith("save") else "note", seconds
    return row


def _works(manager: CheckpointManager, trainee: Trainee, folder: Path) -> list[Work]:
    host = {name: t.to("cpu") for name, t in trainee.tensors().items()}
    other = CheckpointManager(folder / "host")
    often = "save_async, Python's lock handed on every 0.5 ms"
    found = [
        Work("save_async", _Save(manager, trainee.state, 0)),
        Work(often, _Save(manager, trainee.state, 1000), 0.0005),
        Work("hashing and writing alone", _Save(other, lambda: {"all": host}, 0)),
    ]
    if trainee.device != "cpu":
        found.append(Work("copy to the host alone", _Copy(trainee)))
    return found


class _Save:
    def __init__(self, manager: CheckpointManager, state: Callable[[], Any], base: int) -> None:
        self.manager, self.state, self.base = manager, state, base
        self.handle: Any = None

    def begin(self, number: int) -> None:
        self.handle = self.manager.save_async(self.base + number, self.state())

    def phase(self) -> str:
        if self.handle.done():
            return "after"
        return "writing" if self.handle.staged() else "to the host"

    def wait(self) -> None:
        if self.handle is not None:
            step = self.handle.result(120).step
            self.handle = None
            self.manager.delete(step)

    def close(self) -> None:
        self.manager.close()


class _Copy:
    """The snapshot on the device, and its way to pinned memory."""

    def __init__(self, trainee: Trainee) -> None:
        live = [t for t in trainee.tensors().values() if t.is_cuda]
        self.items = [(t, torch.empty(t.shape, dtype=t.dtype, pin_memory=True)) for t in live]
        self.thread: threading.Thread | None = None

    def begin(self, number: int) -> None:
        self.thread = threading.Thread(target=self._drain, args=[start_copies(self.items, "auto")])
        self.thread.start()

    def _drain(self, copies: list[DeviceCopy]) -> None:
        for copy in copies:
            copy.wait()

    def phase(self) -> str:
        return "to the host" if self.thread is not None and self.thread.is_alive() else "after"

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def close(self) -> None:
        self.wait()


def _measure(
    work: Work, trainee: Trainee, window: int, number: int, noise: list[float], *, counted: bool
) -> None:
    before = trainee.timed_steps(window, warm=3)
    base = statistics.median(before[: window // 2])
    wait_for(trainee.device)
    old = sys.getswitchinterval()
    sys.setswitchinterval(work.interval or old)
    added = dict.fromkeys(PHASES, 0.0)
    try:
        began = time.perf_counter()
        work.task.begin(number)
        added["call"] = time.perf_counter() - began
        for _ in range(window):
            phase = work.task.phase()
            began = time.perf_counter()
            trainee.step()
            added[phase] += time.perf_counter() - began - base
    finally:
        sys.setswitchinterval(old)
    work.task.wait()
    if counted:
        noise.append(sum(before) - window * base)
        for phase, seconds in added.items():
            work.found[phase].append(seconds)


def _profile(manager: CheckpointManager, trainee: Trainee) -> list[str]:
    """The functions of one call that take longest, themselves and all they call."""
    state = trainee.state()
    trainee.step()
    wait_for(trainee.device)
    profile = cProfile.Profile()
    profile.enable()
    handle = manager.save_async(9000, state)
    profile.disable()
    handle.result(120)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(SHOWN)
    return [line for line in text.getvalue().splitlines() if line.strip()]
