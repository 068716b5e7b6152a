"""`python -m benchmarks gpu`: its parts, and that one which hangs or dies costs its rows alone."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are run from the repository, they are not installed

from click.testing import CliRunner  # noqa: E402

from benchmarks import cost, gpu, gpu_calls, large, left, restart  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.frame import Check, Report, Row  # noqa: E402
from benchmarks.ground import MIB, drop_tree, read_tree  # noqa: E402
from benchmarks.report import as_json  # noqa: E402


@dataclass(frozen=True)
class Script(gpu.Part):
    """A part that runs a text of Python."""

    text: str = ""

    def command(self, result: Path) -> list[str]:
        return [sys.executable, "-c", self.text, str(result)]


def written(*rows: Row) -> str:
    text = as_json([Report("x", "x", list(rows))], {})
    return f"import sys; open(sys.argv[1], 'w').write({text!r})"


def test_a_part_that_hangs_or_dies_costs_its_own_rows_alone(monkeypatch) -> None:
    good = Row("a", 2.0, kind="ours", checks=[Check("of it", 1, 2.0)], extra={"GB/s": "3", "x": ""})
    parts = [
        Script("hangs", 1.0, ("x",), text=written(good) + "\nwhile True: pass"),
        Script("dies", 60.0, ("x",), text="raise SystemExit(7)"),
        Script("good", 60.0, ("x",), text=written(good)),
        Script("tests", 60.0, ("pytest",), text="print('3 passed, 1 failed in 2 s')"),
        Script("silent", 60.0, ("pytest",), text="raise SystemExit(2)"),
    ]
    monkeypatch.setattr(gpu, "parts_for", lambda *_, **__: parts)
    lines: list[str] = []
    report = gpu.run(device="cpu", output=lines.append)
    found = {row.name: row for row in report.rows}
    assert list(found) == [
        "hangs: a",  # what it had written is kept
        "hangs",
        "dies",
        "good: a",
        "tests: passed",
        "silent: passed",
    ]
    assert found["hangs"].problem == "did not end within 1 s"
    assert found["dies"].problem == "ended with exit code 7"
    row = found["good: a"]
    assert (row.median, row.kind, row.extra) == (2.0, "ours", {"GB/s": "3"})
    assert row.checks == good.checks
    assert (found["tests: passed"].median, found["tests: passed"].unit) == (3, "of 4")
    assert not found["tests: passed"].checks[0].met
    assert found["silent: passed"].median is None
    assert found["silent: passed"].problem == "ended with exit code 2"
    assert "3 passed, 1 failed" in "\n".join(lines)


def test_parts_are_not_begun_when_the_time_is_used_up(monkeypatch) -> None:
    parts = [Script("late", 60.0, ("x",), text="print('begun')")]
    monkeypatch.setattr(gpu, "parts_for", lambda *_, **__: parts)
    lines: list[str] = []
    (row,) = gpu.run(device="cpu", limit_seconds=5.0, output=lines.append).rows
    assert (row.median, row.problem, lines) == (None, "not begun: 5 s were used", [])


def test_the_parts_on_one_card_and_on_two() -> None:
    one, two = gpu.parts_for(1), gpu.parts_for(2)
    assert [part.name for part in one if not part.long] == ["cost", "calls", "tests", "load"]
    assert [part.name for part in one if part.long] == ["restart", "left", "large", "stress"]
    assert {part.ranks for part in one} == {1}
    assert {part.name for part in two if part.ranks == 2} == {
        "cost, 2 ranks",
        "cost of torch_checkpointing, 2 ranks",
        "cost of dcp.async_save, 2 ranks",
        "calls, 2 ranks",
    }
    words = two[-5].command(Path("r.json"))
    assert words[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert words[5:8] == ["-m", "benchmarks", "cost"] and words[-2:] == ["--json", "r.json"]


def test_without_a_gpu_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["gpu"])
    assert result.exit_code == 0
    assert result.output.startswith("there is no GPU here")


def test_calls_by_staging(tmp_path: Path) -> None:
    report = gpu_calls.run(tmp_path, size=MIB // 4, counts=[3], rounds=1, device="cpu")
    what = '3 tensors, "copy": '
    names = [what + each for each in ("call", "first call, prewarmed", "first call")]
    assert [row.name for row in report.rows] == names
    assert all(row.median is not None and row.median > 0 for row in report.rows)
    assert list(tmp_path.iterdir()) == []
    fast, slow = gpu_calls._rows('3 tensors, "auto"', 0.004, 1.0, [0.004]), 0.006
    assert [check.met for row in fast for check in row.checks] == [True, True]
    late = gpu_calls._rows('3 tensors, "auto"', 3 * slow, 1.0, [slow])
    assert [check.verdict for row in late for check in row.checks] == [
        "MISSED (6.00 ms)",
        "MISSED (3.00x)",
    ]


def test_seconds_of_training_have_targets_of_their_own() -> None:
    rows = [
        Row('ckptcore save_async, "auto"', 0.021, kind="ours"),
        Row('ckptcore save_async, "overlap"', -0.01, kind="ours"),
        Row('ckptcore save_async, "copy"', 0.1, kind="ours"),
        Row("torch_checkpointing async", 0.06),
    ]
    cost.judge_seconds(rows)
    assert [[check.verdict for check in row.checks] for row in rows] == [
        ["MISSED (0.02 s)"],
        ["met (0.00 s)"],
        [],
        [],
    ]


def test_files_leave_the_page_cache_whole(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a", "sub/b"):
        (tmp_path / name).write_bytes(bytes(10_000))
    assert drop_tree(tmp_path) == 2
    assert read_tree(tmp_path) == 20_000
    assert json.dumps(sorted(p.name for p in tmp_path.rglob("*"))) == '["a", "b", "sub"]'


@pytest.mark.stress
def test_a_large_state_is_found_again_after_a_kill(tmp_path: Path) -> None:
    report = large.run(tmp_path, size=MIB, device="cpu")
    names = [row.name for row in report.rows]
    assert names[0] == "prewarm" and names[-1] == "load once more, from the page cache"
    assert len(names) == 6 and all((row.median or 0) > 0 for row in report.rows)
    assert "checkpoint-1" in report.options["left"]


def test_what_is_left_after_the_call_is_told_by_phase(tmp_path: Path) -> None:
    report = left.run(tmp_path, size=MIB // 4, rounds=1, device="cpu", step_seconds=1e-3, window=2)
    found = {row.name: row.rounds for row in report.rows}
    assert len(found["save_async: call"]) == 1
    assert {name.partition(":")[0] for name in found} == {
        "save_async",
        "save_async, Python's lock handed on every 0.5 ms",
        "hashing and writing alone",
    }
    assert any("save_async" in line for line in report.options["call"])


def test_a_restart_after_both_ways_of_writing(tmp_path: Path) -> None:
    report = restart.run(tmp_path, size=MIB, rounds=1, device="cpu", step_seconds=1e-3, window=2)
    loads = [row for row in report.rows if row.name.startswith("load right after it")]
    assert [row.name.partition(", ")[2] for row in loads] == [*restart.WAYS]
    assert len(report.rows) == 6 and all((row.median or 0) > 0 for row in loads)
