"""The frame of the benchmarks: arithmetic, verdicts, tables, and one tiny run from end to end.
Asserts no timing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from ckptcore.testing.processes import patience

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are run from the repository, they are not installed

from benchmarks.child import _sum_reads, cost_of  # noqa: E402
from benchmarks.frame import (  # noqa: E402
    Check,
    Contender,
    Report,
    Row,
    best_limit,
    measure,
    rows_of,
    times_faster,
)
from benchmarks.ground import GIB, MIB, make_state, parse_size, size_text  # noqa: E402
from benchmarks.report import as_json, as_markdown, as_text, machine, show  # noqa: E402


class Clock:
    """Time passes only when a contender says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, *seconds: float):
        left = list(seconds)

        def run() -> None:
            self.now += left.pop(0)

        return run


def test_medians_ratios_and_extremes() -> None:
    clock = Clock()
    contenders = [
        Contender("slow limit", clock.taking(9, 4, 4, 4), "limit"),
        Contender("limit", clock.taking(9, 2, 1, 3), "limit"),
        Contender("ours", clock.taking(9, 2, 4, 8), "ours"),
    ]
    samples = measure(contenders, 3, clock=clock)
    assert sorted(samples["ours"].seconds) == [2, 4, 8]  # the warm-up of 9 is not counted
    assert best_limit(samples) == 2
    row = rows_of(samples)[2]
    assert (row.median, row.low, row.high, row.ratio) == (4, 2, 8, 0.5)
    assert times_faster(samples, "ours", "slow limit") == 1.0


def test_rounds_are_interleaved_and_shuffled() -> None:
    seen: list[str] = []
    contenders = [Contender(name, lambda name=name: seen.append(name)) for name in "abcd"]
    measure(contenders, 3, warmup=0)
    rounds = [seen[n : n + 4] for n in range(0, 12, 4)]
    assert all(sorted(r) == list("abcd") for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_preparation_is_not_timed_and_finishing_always_happens() -> None:
    clock, finished = Clock(), []

    def fail() -> None:
        raise OSError("disk on fire\nand more")

    contenders = [
        Contender(
            "good",
            clock.taking(1),
            prepare=clock.taking(50),
            finish=lambda: finished.append("good"),
        ),
        Contender("bad", fail, finish=lambda: finished.append("bad")),
        Contender("absent", fail, missing="not installed"),
    ]
    samples = measure(contenders, 1, warmup=0, clock=clock)
    assert samples["good"].seconds == [1]
    assert sorted(finished) == ["bad", "good"]
    assert samples["bad"].problem == "failed: OSError: disk on fire"
    assert samples["absent"].problem == "not installed"
    assert times_faster(samples, "good", "bad") is None


def test_an_error_of_ours_is_not_hidden() -> None:
    def fail() -> None:
        raise OSError("ours")

    with pytest.raises(OSError, match="ours"):
        measure([Contender("ours", fail, "ours")], 1)


@pytest.mark.parametrize(
    ("check", "met", "verdict"),
    [
        (Check("of the limit", 0.95, 0.95), True, "met (0.95)"),
        (Check("of the limit", 0.95, 0.9), False, "MISSED (0.90)"),
        (Check("memory", 96, 12.34, at_least=False, unit=" MiB"), True, "met (12.3 MiB)"),
        (Check("memory", 96, 97, at_least=False, unit=" MiB"), False, "MISSED (97 MiB)"),
        (Check("of the limit", 0.95, None), False, "not measured"),
    ],
)
def test_verdicts(check: Check, met: bool, verdict: str) -> None:
    assert (check.met, check.verdict) == (met, verdict)


def test_tables() -> None:
    rows = [
        Row("limit", 0.5, 0.4, 0.6, 1.0, kind="limit"),
        Row(
            "ours",
            1.0,
            0.9,
            1.1,
            0.5,
            kind="ours",
            extra={"GB/s": "2.00"},
            checks=[Check("of the limit", 0.95, 0.5), Check("memory", 96, 1, at_least=False)],
        ),
        Row("peer", None, problem="not installed"),
    ]
    report = Report("x", "A title", rows, {"rounds": 3}, ["a note"])
    text = as_text(report)
    assert (
        ">= 0.95 of the limit" in text
        and "MISSED (0.50)" in text
        and "not installed" in text
        and "a note" in text
    )
    out = StringIO()  # not a terminal: plain characters
    show(report, out)
    assert out.getvalue() == text
    assert "| peer | not installed |" in as_markdown([report], machine())
    found = json.loads(as_json([report], machine()))
    assert found["benchmarks"][0]["rows"][1]["checks"][0]["met"] is False
    assert found["machine"]["cores"] >= 1


def test_sizes() -> None:
    assert (parse_size("2GiB"), parse_size("512 MiB"), parse_size("0.5MiB"), parse_size("7")) == (
        2 * GIB,
        512 * MIB,
        MIB // 2,
        7,
    )
    for wrong in ("", "12 parsecs", "GiB", "1.2.3MiB"):
        with pytest.raises(ValueError, match="not a size"):
            parse_size(wrong)
    assert (size_text(2 * GIB), size_text(96 * MIB), size_text(100)) == ("2 GiB", "96 MiB", "100 B")
    state = make_state(MIB)
    assert sum(t.nbytes for t in state.values()) == MIB
    assert len({bytes(t.numpy().tobytes()) for t in state.values()}) == len(state)


def test_what_a_child_costs() -> None:
    cost = cost_of([sys.executable, "-S", "-c", "x = bytearray(40 << 20)"])
    assert cost.peak_bytes > 40 * MIB
    with pytest.raises(RuntimeError, match="exit code 3"):
        cost_of([sys.executable, "-S", "-c", "raise SystemExit(3)"])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux only")
def test_peak_memory_counts_what_is_freed_again() -> None:
    # In a process of its own: other tests' threads may give memory back meanwhile.
    program = (
        "from benchmarks.memory import peak_added; print(peak_added(lambda: bytearray(b'x' * (48 "
        "<< 20))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 95 * MIB < int(done.stdout) < 104 * MIB  # the text and its copy


def test_system_calls_are_added_up_by_file() -> None:
    log = """\
12 openat(AT_FDCWD</>, "/c/a", O_RDONLY) = 3</c/a>
12 read(3</c/a>, ""..., 100) = 60
12 pread64(3</c/a>, ""..., 100, 8) = 40
12 mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, 4</c/b>, 0) = 0x7f0000000000
12 read(5</elsewhere/a>, ""..., 100) = 100
12 read(3</c/a>, 0x1, 5) = -1 EINTR (Interrupted system call)
"""
    assert _sum_reads(log, Path("/c")) == {"a": 100, "b": 4096}


@pytest.mark.timeout(400)
def test_all_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    files = [f"--json={tmp_path / 'r.json'}", f"--markdown={tmp_path / 'r.md'}"]
    tiny = ["--quick", "--size", "1MiB", "--only", "ours-copy", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "all", *tiny, *files],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=380 * patience(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "r.json").read_text())["benchmarks"]
    assert [report["name"] for report in found] == [
        "save",
        "load",
        "stall",
        "background",
        "memory",
        "reshard",
        "calls",
        "plan",
        "validate",
        "reuse",
        "inspect",
    ]
    for report in found:
        ours = [row for row in report["rows"] if row["kind"] == "ours"]
        assert ours
        if (
            report["name"] != "background"
        ):  # may be over before a step is, and a step may be shorter by chance
            assert all(row["median"] > 0 and row["problem"] is None for row in ours)
    assert "ckptcore save" in done.stdout
    assert "| ckptcore load, verified |" in (tmp_path / "r.md").read_text()
    assert not list(tmp_path.glob("ckptcore-bench-*"))  # cleaned up
