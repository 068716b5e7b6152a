"""The benchmarks of saves that go on while training does: structure of each report and arithmetic
of its verdicts, in tiny. Asserts no timing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptcore.testing.processes import patience

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are run from the repository, they are not installed

from benchmarks import background, cost, cuda, held, stall  # noqa: E402
from benchmarks.asyncs import Ours, OursAsync, TorchCheckpointing, savers_for  # noqa: E402
from benchmarks.background import Effect  # noqa: E402
from benchmarks.cost import Costs, Window  # noqa: E402
from benchmarks.frame import Contender, Report, Row, Sample, measure  # noqa: E402
from benchmarks.ground import MIB  # noqa: E402
from benchmarks.summary import as_table  # noqa: E402
from benchmarks.training import Trainee  # noqa: E402


def by_name(report: Report) -> dict[str, Row]:
    return {row.name: row for row in report.rows}


def sample(name: str, kind: str, *seconds: float) -> Sample:
    return Sample(Contender(name, lambda: None, kind), list(seconds))  # type: ignore[arg-type]


def test_the_training_run_is_as_large_as_asked_and_every_step_changes_every_tensor() -> None:
    trainee = Trainee(4 * MIB, layers=8, ballast=MIB)
    assert abs(trainee.nbytes - 5 * MIB) < 0.25 * MIB
    kinds = [name.partition("/")[0] for name in trainee.tensors()]
    assert (kinds.count("model"), kinds.count("optimizer"), kinds.count("ballast")) == (8, 24, 64)
    before = trainee.sample()
    trainee.step()
    live = trainee.tensors()
    assert len(before) == 9 and not any(
        torch.equal(live[name], tensor) for name, tensor in before.items()
    )
    assert len(trainee.timed_steps(3, warm=1)) == 3
    assert trainee.calibrate(0.001) > 0 and trainee.batch.shape[1] == trainee.width


@pytest.mark.parametrize("short", [name for name in savers_for("cpu") if name != "tc"])
def test_every_saver_saves_what_it_was_given_and_cleans_up(short: str, tmp_path: Path) -> None:
    trainee = Trainee(MIB, layers=4)
    saver = savers_for("cpu")[short]()
    saver.start(trainee, tmp_path / "s")
    saver.prewarm()
    for number in (1, 2):  # the second save of a saver is another path in some
        truth = trainee.sample()
        saver.begin(number)
        with saver.guard():
            trainee.step()
        saver.wait()
        assert saver.done() and saver.private()
        if saver.checked:
            assert all(saver.same(name, tensor) for name, tensor in truth.items())
            assert not saver.same("model/0.weight", trainee.sample()["model/0.weight"])
        written = sum(path.stat().st_size for path in (tmp_path / "s").rglob("*") if path.is_file())
        assert written >= trainee.nbytes
        saver.clear()
        assert saver.place is not None and not saver.place.exists()
    saver.stop()


def test_stall(tmp_path: Path) -> None:
    report = stall.run(
        tmp_path, size=MIB, rounds=1, settle_seconds=0, only=["ours-copy", "dcp-kept"]
    )
    rows = by_name(report)
    assert list(rows) == [
        "memcpy into a warm buffer, 1 thread",
        "memcpy into a warm buffer, 2 threads",
        stall.SECOND,
        stall.FIRST,
        stall.COLD,
        next(name for name in rows if name.startswith("dcp.async_save, kept stager")),
    ]
    assert all(row.median is not None and row.median > 0 for row in rows.values())
    best = min(row.median for row in report.rows if row.kind == "limit" and row.median)
    for name, bound in ((stall.SECOND, 1.2), (stall.FIRST, 3.0)):
        (check,) = rows[name].checks
        assert (check.bound, check.at_least) == (bound, False)
        assert check.actual == pytest.approx((rows[name].median or 0) / best)
    assert rows[stall.COLD].checks == []


@pytest.mark.parametrize(("device", "bound"), [("cpu", 1.2), ("cuda", 1.15)])
def test_verdicts_of_the_stall(device: str, bound: float) -> None:
    samples = {"a": sample("a", "limit", 4.0), "b": sample("b", "limit", 2.0)}
    rows = [
        Row(stall.SECOND, 2.2, kind="ours"),
        Row(stall.FIRST, 6.2, kind="ours"),
        Row("peer", 1.0),
    ]
    stall.judge(rows, samples, device)
    assert [(c.bound, c.actual, c.met) for row in rows for c in row.checks] == [
        (bound, pytest.approx(1.1), True),
        (3.0, pytest.approx(3.1), False),
    ]


def costs_of(saver: object, added: float, first: float) -> Costs:
    """Windows of 10 steps of 1 s, one of them with a first save."""
    windows = [
        (Window(5, 5 + first, first=True), 1.0),
        (Window(10, 10 + added), 1.0),
        (Window(10, 10 + added), 1.0),
    ]
    return Costs(saver, windows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("roomy", "noise", "want"),
    [
        (
            True,
            0.1,
            [("overlap", 1.0, 0.75, True), ("auto", 0.2, 0.25, False), ("auto", 0.4, 0.3, True)],
        ),
        (
            False,
            0.1,
            [("overlap", 1.0, 0.75, True), ("auto", 1.0, 0.25, True), ("auto", 2.0, 0.3, True)],
        ),
        (
            True,
            5.0,
            [("overlap", 1.0, None, False), ("auto", 0.2, None, False), ("auto", 0.4, None, False)],
        ),
    ],
)
def test_verdicts_of_the_cost(
    roomy: bool, noise: float, want: list[tuple[str, float, float | None, bool]]
) -> None:
    peer = costs_of(TorchCheckpointing(cost.PEER), 4.0, 9.0)
    ours = {
        s: costs_of(OursAsync(f'ckptcore save_async, "{s}"', s), added, first)  # type: ignore[arg-type]
        for s, added, first in (("copy", 8.0, 8.0), ("overlap", 3.0, 3.0), ("auto", 1.0, 1.2))
    }
    sync = costs_of(Ours("ckptcore save"), 9.0, 9.0)
    everything = [peer, sync, *ours.values()]
    assert (peer.median(), peer.median(first=True)) == (4.0, 9.0)
    rows = [Row(c.saver.name, c.median(), kind=c.saver.kind) for c in everything]
    cost.judge(rows, everything, roomy=roomy, noise=noise)
    found = [
        (row.name.rpartition(" ")[2].strip('"'), c.bound, c.actual, c.met)
        for row in rows
        for c in row.checks
    ]
    assert found == [
        (name, bound, actual if actual is None else pytest.approx(actual), met)
        for name, bound, actual, met in want
    ]
    assert [row.extra.get("x torch_checkpointing") for row in rows][:2] == (
        [None] * 2 if noise > 4 else ["1.00", "2.25"]
    )


def test_cost_from_end_to_end_and_a_saver_that_fails_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.asyncs import DcpAsync

    real = DcpAsync.begin

    def fails_on_the_second(self: DcpAsync, step: int) -> None:
        if step > 1:
            raise KeyError("storage 7")
        real(self, step)

    monkeypatch.setattr(DcpAsync, "begin", fails_on_the_second)
    report = cost.run(
        tmp_path,
        size=MIB,
        rounds=2,
        device="cpu",
        window=4,
        step_seconds=0.001,
        only=["torch", "dcp-async", "ours", "ours-copy"],
    )
    rows = by_name(report)
    failed = rows["dcp.async_save, default"]
    assert (failed.median, failed.problem) == (None, "failed: KeyError: 'storage 7'")
    for name in ("torch.save + fsync", "ckptcore save", "ckptcore save_async"):
        assert rows[name].problem is None and len(rows[name].rounds) == 2
        assert float(rows[name].extra["call returns after"].split()[0]) >= 0
        assert "first save adds" in rows[name].extra
    assert [rows[n].extra.get("same bytes") for n in ("ckptcore save", "ckptcore save_async")] == [
        "yes",
        "yes",
    ]
    (check,) = rows["ckptcore save_async"].checks  # torch_checkpointing was not asked for
    assert (check.actual, check.verdict) == (None, "not measured")
    assert report.options["rounds"] == 2 and [len(each) for each in report.options["plain"]] == [
        2,
        2,
        2,
    ]


def test_cost_stops_before_its_time_is_over(tmp_path: Path) -> None:
    report = cost.run(
        tmp_path,
        size=MIB,
        rounds=50,
        device="cpu",
        window=2,
        step_seconds=0.001,
        limit_seconds=0.01,
        only=["torch"],
    )
    assert report.options["rounds"] == 1


def test_cost_says_when_what_was_saved_is_not_what_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OursAsync, "same", lambda self, name, tensor: False)
    report = cost.run(
        tmp_path, size=MIB, rounds=1, device="cpu", window=2, step_seconds=0.001, only=["ours-copy"]
    )
    assert (
        report.rows[0].problem
        == "failed: AssertionError: model/0.weight was not saved as it was at the call"
    )


def test_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MODEL", MIB)
    threads = torch.get_num_threads()
    report = background.run(
        tmp_path,
        size=8 * MIB,
        rounds=1,
        step_seconds=0.001,
        settle_seconds=0,
        only=["ours-copy", "dcp-async"],
    )
    rows = by_name(report)
    ours = rows["ckptcore save_async"]
    assert list(rows) == [
        "dcp.async_save, default",
        "ckptcore save_async",
        "the bytes alone, by another process",
    ]
    assert [len(row.checks) for row in rows.values()] == [0, 1, 0]
    assert float(report.title.partition(" while ")[2].split()[0]) == pytest.approx(
        8, rel=0.1
    )  # MiB, with the ballast
    (check,) = ours.checks
    assert (check.bound, check.at_least, check.actual) == (5.0, False, ours.median)
    assert ours.problem is None or "before the first step" in ours.problem
    assert torch.get_num_threads() == threads


def test_arithmetic_of_longer_steps() -> None:
    effect = Effect(steps=10, seconds=12.0, plain=1.0)
    assert (effect.extra, effect.percent(), effect.percent(own=1.5)) == (2.0, 20.0, 5.0)


def test_memory_that_is_held(tmp_path: Path) -> None:
    report = held.run(tmp_path, size=16 * MIB, saves=3, only=["ours-copy"])
    (row,) = report.rows
    assert row.problem is None and 0.5 < (row.median or 0) < 4
    assert [(c.bound, c.actual is not None) for c in row.checks] == [(1.05, True), (0.05, True)]
    assert row.checks[0].actual == row.median


def test_arithmetic_of_memory() -> None:
    found = {
        "state": 100 * MIB,
        "before": 50 * MIB,
        "second": 152 * MIB,
        "last": 160 * MIB,
        "peak": 154 * MIB,
    }
    row = held.row_of("ours", "ours", found, 50)
    assert row.median == pytest.approx(1.04)
    assert [(c.actual, c.met) for c in row.checks] == [
        (pytest.approx(1.04), True),
        (pytest.approx(0.08), False),
    ]
    assert (row.extra["between saves"], row.extra["growth"]) == ("1.10 x", "+8.0 MiB in 48 saves")
    broken = held.row_of("ours", "ours", {"problem": "failed: OSError: no"}, 50)
    assert (
        broken.problem == "failed: OSError: no"
        and [c.verdict for c in broken.checks] == ["not measured"] * 2
    )


def test_saves_and_loads_of_a_device_on_the_cpu(tmp_path: Path) -> None:
    report = cuda.run_save(tmp_path, size=3 * MIB, rounds=1, settle_seconds=0, device="cpu")
    ours = by_name(report)[cuda.OURS_SAVE]
    assert ours.median and [c.bound for c in ours.checks] == [96.0] and ours.checks[0].met
    report = cuda.run_load(tmp_path, size=3 * MIB, rounds=1, device="cpu")
    rows = by_name(report)
    assert all(row.problem is None and row.median for row in rows.values()), report.rows
    (check,) = rows[cuda.OURS_LOAD].checks
    assert check.actual == pytest.approx(
        (rows[cuda.SAFETENSORS].median or 0) / (rows[cuda.OURS_LOAD].median or 1)
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    for run in (cost.run, background.run, stall.run, held.run, cuda.run_save, cuda.run_load):
        with pytest.raises(ValueError, match="no GPU here"):
            run(tmp_path, size=MIB, device="cuda")


def test_an_error_of_ours_is_a_row_where_time_is_short() -> None:
    def fail() -> None:
        raise OSError("ours")

    samples = measure(
        [Contender("ours", fail, "ours"), Contender("limit", lambda: None, "limit")],
        1,
        strict=False,
    )
    assert (
        samples["ours"].problem == "failed: OSError: ours" and samples["limit"].median is not None
    )


def test_the_small_table() -> None:
    save = Report(
        "save",
        "",
        [
            Row("raw, 1", 3.0, kind="limit"),
            Row("raw, 2", 2.0, kind="limit"),
            Row("ckptcore save", 1.5, kind="ours"),
            Row("torch.save + fsync", 4.0),
            Row("torch_checkpointing sync", 5.0),
            Row("dcp.save, default", 7.0),
            Row("dcp.save, 2 threads", 6.0),
            Row("safetensors save_file", None, problem="not installed"),
        ],
    )
    reshard = Report(
        "reshard",
        "",
        [
            Row("ckptcore: S(0) on 4 -> S(1) on 2", 0.01, kind="ours"),
            Row("dcp: S(0) on 4 -> S(0) on 2", 1.0),
            Row("dcp: S(0) on 4 -> S(1) on 2", 2.0),
        ],
    )
    assert as_table([save, reshard]).splitlines()[2:] == [
        "| durable save | 1.50 s | 2.00 s, raw, 2 | 6.00 s, dcp.save, 2 threads | 4.00 s, "
        "torch.save + fsync |  | "
        "5.00 s, torch_checkpointing sync |",
        "| reshard S(0) on 4 -> S(1) on 2 | 0.010 s |  | 2.00 s, dcp |  |  |  |",
    ]
    assert as_table([]) == ""


def test_quick_and_only_on_the_command_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "stall",
        "--quick",
        "--only",
        "ours-copy",
        "--rounds",
        "2",
    ]
    done = subprocess.run(
        [*command, f"--json={tmp_path / 'r.json'}", f"--markdown={tmp_path / 'r.md'}"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100 * patience(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (report,) = json.loads((tmp_path / "r.json").read_text())["benchmarks"]
    assert (
        report["name"] == "stall"
        and report["options"]["size"] == 2 * MIB
        and report["options"]["rounds"] == 2
    )
    assert "| stall of an async save |" in (tmp_path / "r.md").read_text()
