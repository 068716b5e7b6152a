"""The benchmark of work per tensor: structure of its report and arithmetic of its verdicts. Asserts
no timing."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are run from the repository, they are not installed

from benchmarks import calls  # noqa: E402
from benchmarks.frame import Row  # noqa: E402


def test_each_layout_has_a_row_for_every_task(tmp_path: Path) -> None:
    report = calls.run(tmp_path, counts=(6,), rounds=1)
    ours = [row for row in report.rows if row.kind == "ours"]
    tasks = ("ckptcore save_async, first", "ckptcore save_async, later", "ckptcore load")
    assert [row.name for row in ours] == [
        f"{task}: 6 {layout}" for layout in ("plain", "DTensor") for task in tasks
    ]
    assert all(
        row.median and row.extra["us a tensor"] == f"{1e6 * row.median / 6:.1f}" for row in ours
    )
    assert {row.name.partition(":")[0] for row in report.rows if row.kind == "peer"} >= {
        "dcp async save, later",
        "dcp load",
    }


def test_targets_are_for_the_largest_count_only() -> None:
    def row(name: str, seconds: float) -> Row:
        return Row(name, seconds, kind="ours")

    rows = [
        row("ckptcore save_async, first: 1,000 plain", 0.030),
        row("ckptcore save_async, later: 1,000 plain", 0.005),
        row("ckptcore load: 1,000 plain", 0.061),
        row("ckptcore save_async, later: 100 plain", 0.500),
        row("ckptcore save_async, later: 1,000 DTensor", 0.015),
    ]
    calls.judge(rows, 1_000)
    assert [[(round(c.actual or 0, 6), c.bound, c.met) for c in r.checks] for r in rows] == [
        [(6.0, 5.0, False)],
        [(5.0, 8.0, True)],
        [(61.0, 60.0, False)],
        [],
        [(15.0, 15.0, True)],
    ]
