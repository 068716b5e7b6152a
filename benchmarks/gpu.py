"""Everything that needs a GPU, in one call of minutes: `python -m benchmarks gpu --json all.json`.

Each part is a process of its own with a time limit of its own, so that one that hangs or dies costs
its own rows alone. With several cards the parts that are about a job run on one card and on all.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .frame import Check, Report, Row

__all__ = ["Part", "parts_for", "run"]

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("call returns after", "first save adds", "same bytes", "GB/s")  # columns of the last table


@dataclass(frozen=True)
class Part:
    """One process. seconds: its limit; words: of `python -m`, those of a benchmark without
    --json; long: it is run only when it is named."""

    name: str
    seconds: float
    words: tuple[str, ...]
    ranks: int = 1
    long: bool = False

    def command(self, result: Path) -> list[str]:
        if self.words[0] == "pytest":
            return [sys.executable, "-m", *self.words]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)]
        start = [sys.executable, *(launcher if self.ranks > 1 else [])]
        return [*start, "-m", *self.words, "--json", str(result)]


def parts_for(cards: int, device: str = "cuda", *, quick: bool = False) -> list[Part]:
    """In the order of what matters most."""
    small = ("--quick",) if quick else ()

    def bench(*words: str) -> tuple[str, ...]:
        return ("benchmarks", *words, "--device", device, *small)

    def cost(*savers: str) -> tuple[str, ...]:
        chosen = [word for saver in savers for word in ("--only", saver)]
        window = () if quick else ("--window", "150")
        return bench("cost", *chosen, *window, "--limit-seconds", "200")

    stagings = ("ours-copy",) if device == "cpu" else ("ours-auto", "ours-overlap", "ours-copy")
    tests = ("pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--durations=8")
    load_size = () if quick else ("--size", "4GiB", "--rounds", "2")
    parts = [
        Part("cost", 240, cost(*stagings, "tc", "dcp-async")),
        Part("calls", 75, bench("gpu-calls")),
        Part("tests", 150, (*tests, "tests/gpu", "-m", "not stress", "-n", "6")),
    ]
    if cards > 1:
        parts += [
            Part(f"cost, {cards} ranks", 180, cost(*stagings), cards),
            Part(f"cost of torch_checkpointing, {cards} ranks", 240, cost("tc"), cards),
            Part(f"calls, {cards} ranks", 90, bench("gpu-calls"), cards),
        ]
    parts.append(Part("load", 150, bench("load", *load_size, "--cold")))
    if cards > 1:
        # It may hang there, and nothing waits behind it.
        several = f"cost of dcp.async_save, {cards} ranks"
        parts.append(Part(several, 120, cost("dcp-async"), cards))
    return parts + _long_parts(tests, bench, quick)


def _long_parts(
    tests: tuple[str, ...], bench: Callable[..., tuple[str, ...]], quick: bool
) -> list[Part]:
    """What is run only when it is named."""
    lowbit = "tests/trainers/test_lowbit.py::"
    lowbit += "test_fifty_steps_on_a_gpu_and_ten_more_in_a_new_process"
    some = () if quick else ("--window", "100", "--rounds", "2")
    return [
        Part("restart", 120, bench("restart", *some), long=True),
        Part("left", 170, bench("left", *some), long=True),
        Part("large", 170, bench("large"), long=True),
        Part(
            "stress", 260, (*tests, "tests/gpu", lowbit, "-m", "stress", "-n", "6", "-s"), long=True
        ),
    ]


def run(
    *,
    device: str = "cuda",
    limit_seconds: float = 520.0,
    quick: bool = False,
    only: Sequence[str] = (),
    output: Callable[[str], None] = print,
) -> Report:
    """Run all parts that are not long, or those whose name begins with one of `only`, until
    `limit_seconds` are used; rows of all of them.

    Each part's own output goes to `output` as it ends.
    """
    began = time.perf_counter()
    cards = torch.cuda.device_count() if device != "cpu" else 1
    rows: list[Row] = []
    parts = parts_for(cards, device, quick=quick)
    for part in (p for p in parts if (p.name.startswith(tuple(only)) if only else not p.long)):
        left = limit_seconds - (time.perf_counter() - began)
        if left < min(part.seconds, 20):
            rows.append(Row(part.name, None, problem=f"not begun: {limit_seconds:g} s were used"))
            continue
        output(f"=== {part.name} (at most {min(part.seconds, left):.0f} s)")
        started = time.perf_counter()
        rows += _rows_of(part, min(part.seconds, left), output)
        output(f"=== {part.name}: {time.perf_counter() - started:.0f} s")
    name = torch.cuda.get_device_name(0) if device != "cpu" else "the CPU"
    return Report(
        "gpu",
        f"On {f'{cards} x ' * (cards > 1)}{name}, torch {torch.__version__}",
        rows,
        {"cards": cards, "device": device, "seconds": time.perf_counter() - began},
    )


def _rows_of(part: Part, seconds: float, output: Callable[[str], None]) -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        text, problem = _ended(part.command(result), seconds)
        output(text)
        found = _read(result)
    if part.words[0] == "pytest":
        found = [_of_tests(text, problem)]
    for row in found:
        row.name = f"{part.name}: {row.name}"
        row.extra = {key: value for key, value in row.extra.items() if key in KEPT}
    if problem is not None and part.words[0] != "pytest":
        found.append(Row(part.name, None, problem=problem))
    return found


def _ended(command: list[str], seconds: float) -> tuple[str, str | None]:
    """What a command printed, and what is wrong with how it ended. All that it started is ended
    with it."""
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        problem = None
        try:
            code = process.wait(seconds)
            problem = f"ended with exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            problem = f"did not end within {seconds:.0f} s"
        finally:
            _end(process)
        file.seek(0)
        return file.read().decode(errors="replace"), problem


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left of it
    process.wait()


def _read(result: Path) -> list[Row]:
    """The rows that a benchmark has written."""
    if not result.exists():
        return []
    rows = []
    for report in json.loads(result.read_text())["benchmarks"]:
        for plain in report["rows"]:
            checks = [_check(each) for each in plain.pop("checks")]
            rows.append(Row(**plain, checks=checks))
    return rows


def _check(plain: dict[str, Any]) -> Check:
    names = ("text", "bound", "actual", "at_least", "unit")
    return Check(**{name: plain[name] for name in names})


def _of_tests(text: str, problem: str | None) -> Row:
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error|skipped)", text)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    total = sum(counts.values())
    passed = counts.get("passed", 0) if counts else None
    row = Row("passed", passed, unit=f"of {total}", kind="ours", problem=problem)
    row.checks.append(Check("failed", 0, failed if counts else None, at_least=False))
    return row
