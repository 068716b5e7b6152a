"""Host memory that async saves hold: `python -m benchmarks memory [--size 256MiB] [--saves 50]
[--device cuda]`.

Each saver runs in a process of its own, which saves once in small before anything is measured
(imports, threads), and is asked for its resident memory by the kernel's own count. By hand: `python
-m benchmarks.held NAME --size 256MiB --dir D`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .asyncs import AsyncSaver, savers_for
from .frame import Check, Report, Row, problem_of
from .ground import MIB, parse_size, size_text
from .memory import high_water, resident
from .training import Trainee, check_device, wait_for

__all__ = ["row_of", "run"]

SMALL = MIB
PEER_SAVES = 5
BOUND = 1.05
GROWTH = 0.05  # of the state, over all saves after the second


def run(
    folder: Path,
    *,
    size: int,
    saves: int = 50,
    device: str = "cpu",
    only: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Rows: the most that a save held at any time, as a multiple of the state; what the saves after
    the second added."""
    check_device(device)
    rows = []
    for short, make in savers_for(device).items():
        saver = make()
        if not saver.in_background or (only and short not in only):
            continue
        progress(saver.name)
        count = saves if saver.kind == "ours" else min(saves, PEER_SAVES)
        rows.append(
            row_of(saver.name, saver.kind, _in_process(short, size, count, device, folder), count)
        )
    return Report(
        "memory" if device == "cpu" else "memory-cuda",
        f"Host memory that async saves of {size_text(size)} on {device} hold",
        rows,
        {"size": size, "saves": saves, "device": device},
        [
            "median: the highest resident memory in all saves, less that before the first one, as "
            "a multiple of the state; "
            "of the training process only.",
            "growth: resident memory after the last save, less that after the second.",
        ],
    )


def row_of(name: str, kind: str, found: dict[str, object], saves: int) -> Row:
    """The row of what a process found."""
    if "problem" in found:
        row = Row(name, None, kind=kind, problem=str(found["problem"]))
        held = growth = share = None
    else:
        size, before, after, peak = (
            int(str(found[key])) for key in ("state", "before", "last", "peak")
        )
        held, growth = (peak - before) / size, after - int(str(found["second"]))
        share = growth / size
        row = Row(name, held, kind=kind, unit="x state")
        row.extra["between saves"] = f"{(after - before) / size:.2f} x"
        row.extra["growth"] = f"{growth / MIB:+.1f} MiB in {max(0, saves - 2)} saves"
    if kind == "ours":
        row.checks.append(Check("of the state held", BOUND, held, at_least=False, unit="x"))
        row.checks.append(
            Check(f"growth over {saves} saves", GROWTH, share, at_least=False, unit="x")
        )
    return row


def _in_process(short: str, size: int, saves: int, device: str, folder: Path) -> dict[str, object]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.held",
        short,
        "--size",
        str(size),
        "--saves",
        str(saves),
        "--device",
        device,
        "--dir",
        str(folder / f"held-{short}"),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=900)
    if done.returncode != 0 or not done.stdout:
        return {"problem": f"failed: its process ended with exit code {done.returncode}"}
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(short: str, size: int, saves: int, device: str, folder: Path) -> dict[str, object]:
    small, trainee = Trainee(SMALL, device), Trainee(SMALL, device, ballast=size)
    saver = savers_for(device)[short]()
    if problem := saver.missing(trainee):
        return {"problem": problem}
    for run, number in ((small, 1), (small, 2)):
        saver.start(run, folder / f"small-{number}")
        _save(saver, number)
        saver.stop()
        saver = savers_for(device)[short]()
    saver.start(trainee, folder / "all")
    before, levels, peak = resident(), [], 0
    for number in range(saves):
        peak = max(peak, high_water(lambda n=number: _save(saver, n)))  # type: ignore[misc]
        levels.append(resident())
    saver.stop()
    second = levels[min(1, len(levels) - 1)]
    return {
        "state": trainee.nbytes,
        "before": before,
        "second": second,
        "last": levels[-1],
        "peak": peak,
    }


def _save(saver: AsyncSaver, number: int) -> None:
    saver.begin(number)
    with saver.guard():
        pass
    saver.wait()
    wait_for(saver.trainee.device)
    saver.clear()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.held", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--size", type=parse_size, default=parse_size("256MiB"))
    parser.add_argument("--saves", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dir", type=Path, required=True)
    options = parser.parse_args()
    try:
        found = _measure(options.name, options.size, options.saves, options.device, options.dir)
    except Exception as error:
        found = {"problem": problem_of(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
