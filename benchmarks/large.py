"""A state of 30 GB on one GPU: saved, killed in the middle of the next save, and loaded by a new
process: `python -m benchmarks large`.

Seconds and rates of each step; what was loaded is compared with what was saved, item by item.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ckptcore import CheckpointManager

from .frame import Report, Row
from .ground import size_text
from .training import check_device, wait_for

__all__ = ["run"]

TENSORS = 100
DEADLINE = 240.0  # seconds that each process may take


def run(
    folder: Path,
    *,
    size: int,
    device: str = "cuda",
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Rows: the save, the kill, and the loads of a new process from the disk and from the page
    cache."""
    check_device(device)
    progress("saving, until it is killed")
    saved = _child("save", folder, size, device)
    progress("loading")
    loaded = _child("load", folder, size, device)
    rows = [_row(name, seconds, size) for name, seconds in {**saved, **loaded}.items()]
    left = sorted(path.name for path in (folder / "run").iterdir())
    return Report(
        "large",
        f"{size_text(size)} in {TENSORS} tensors on {device}: save, kill, load",
        rows,
        {"size": size, "device": device, "left": left},
        [
            "The process is killed (SIGKILL) while it writes its second checkpoint; a new one "
            "finds the first and compares every item."
        ],
    )


def _row(name: str, seconds: float, size: int) -> Row:
    row = Row(name, seconds, kind="ours")
    if "written" in name or "load" in name or "staged" in name:
        row.extra["GB/s"] = f"{size / seconds / 1e9:.2f}"
    return row


def _child(task: str, folder: Path, size: int, device: str) -> dict[str, float]:
    """What a process printed before it ended, or was killed."""
    words = [sys.executable, "-m", "benchmarks.large", task, str(folder), str(size), device]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = {}
    assert child.stdout is not None
    try:
        for line in _lines(child.stdout):
            if line == "kill\n":
                child.send_signal(signal.SIGKILL)
                break
            name, _, seconds = line.rpartition(" ")
            found[name] = float(seconds)
        code = child.wait(DEADLINE)
    finally:
        child.kill()
        child.wait()
    if code != (-signal.SIGKILL if task == "save" else 0):
        raise RuntimeError(f"the process that was to {task} ended with exit code {code}")
    return found


def _lines(pipe: Any) -> Iterator[str]:
    yield from iter(pipe.readline, "")


def _state(size: int, device: str, seed: int) -> dict[str, Any]:
    """The same numbers from the same seed, in any process."""
    generator = torch.Generator(device).manual_seed(seed)
    count = size // TENSORS // 4
    return {
        "model": {
            f"layers.{n}.w": torch.empty(count, device=device).uniform_(-1, 1, generator=generator)
            for n in range(TENSORS)
        }
    }


def _say(name: str, began: float) -> None:
    print(name, time.perf_counter() - began, flush=True)


def _save(root: Path, size: int, device: str) -> None:
    state = _state(size, device, 1)
    wait_for(device)
    manager = CheckpointManager(root)
    began = time.perf_counter()
    manager.prewarm(state)
    _say("prewarm", began)
    written = 0.0
    for step in (1, 2):
        began = time.perf_counter()
        handle = manager.save_async(step, state)
        if step == 2:
            time.sleep(min(3.0, 0.3 * written))
            print("kill", flush=True)
            time.sleep(DEADLINE)
        _say("save_async: the call", began)
        while not handle.staged():
            time.sleep(0.002)
        _say("save_async: staged on the host", began)
        handle.result(DEADLINE)
        written = time.perf_counter() - began
        _say("save_async: written", began)


def _load(root: Path, size: int, device: str) -> None:
    live = {"model": {k: torch.zeros_like(t) for k, t in _state(size, device, 1)["model"].items()}}
    wait_for(device)
    began = time.perf_counter()
    with CheckpointManager(root) as manager:
        report = manager.restore(live)
        wait_for(device)
        _say("load by a new process after the kill, verified", began)
        assert report is not None and report.step == 1, report
        for name, tensor in _state(size, device, 1)["model"].items():
            if not torch.equal(tensor, live["model"][name]):
                raise AssertionError(f"{name} is not what was saved")
        for file in (root / "checkpoint-1").iterdir():  # as another process has read them
            with open(file, "rb", buffering=0) as reader:
                while reader.read(16 << 20):
                    pass
        began = time.perf_counter()
        manager.load(live, 1)
        wait_for(device)
        _say("load once more, from the page cache", began)


if __name__ == "__main__":
    task, folder, size, device = sys.argv[1:]
    {"save": _save, "load": _load}[task](Path(folder) / "run", int(size), device)
    sys.stdout.flush()
    os._exit(0)
