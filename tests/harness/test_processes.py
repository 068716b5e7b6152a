"""The harness for real ranks: what it returns, and that it neither hangs nor hides how a rank ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ckptcore.testing.process_server import STACKS
from ckptcore.testing.processes import RankCrashed, RankProcesses, RanksDied

PROGRAMS = Path(__file__).with_name("programs.py")


@pytest.fixture
def ranks() -> RankProcesses:
    return RankProcesses(PROGRAMS, environment={"COLOUR": "blue"})


def test_ranks_make_a_process_group_as_under_torchrun(ranks: RankProcesses) -> None:
    found = ranks.run("add", 3, {"more": 10})
    assert [result["total"] for result in found] == [33] * 3
    assert len({result["pid"] for result in found} | {os.getpid()}) == 4
    assert ranks.run("add_in_a_group", 2, backend="gloo") == [1, 1]
    assert ranks.run("add_in_a_group", 1, backend="gloo") == [0]


def test_environment_and_folder(ranks: RankProcesses, tmp_path: Path) -> None:
    alone = ranks.run("environment", 1, folder=tmp_path)
    assert alone == [[None, None, "blue", str(tmp_path)]]
    first, second = ranks.run("environment", 2, folder=tmp_path)
    assert (first[0], second[0]) == ("0", "1") and first[1] == second[1] is not None


def test_the_error_of_a_rank_ends_the_others(ranks: RankProcesses) -> None:
    with pytest.raises(RanksDied) as caught:
        ranks.run("raise_on", 2, {"bad": 1}, deadline=600)
    first, second = caught.value.outcomes
    assert (first.state, second.state) == ("ended", "raised")
    assert "ValueError: rank 1 does not like it" in second.error
    assert "this is rank 0" in first.output and "wait_for_ever" in first.output  # its stack
    text = str(caught.value)
    assert text.index("does not like it") < text.index("rank 0 ended")


def test_a_deadline_ends_the_job_and_shows_the_stacks(ranks: RankProcesses) -> None:
    returned, late = ranks.outcomes("wait", 2, deadline=2)
    assert (returned.state, late.state, late.exit_code) == ("returned", "late", -STACKS)
    assert "waiting" in late.output and "in wait_for_ever" in late.output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_death_of_a_rank_ends_the_others(ranks: RankProcesses, number: int) -> None:
    first, second = ranks.outcomes("end_by", 2, {"number": int(number)}, deadline=600)
    assert (first.state, second.state, second.exit_code) == ("ended", "died", -number)
    if number == signal.SIGSEGV:
        assert "Fatal Python error" in second.output and "in end_by" in second.output


def test_survivors_may_live(ranks: RankProcesses) -> None:
    first, second = ranks.outcomes("leave", 2, {"code": 9}, survivors="live")
    assert (first.state, first.value, second.state, second.exit_code) == ("returned", 0, "died", 9)


def test_a_stopped_rank_is_not_waited_for(ranks: RankProcesses) -> None:
    first, second = ranks.outcomes("stop", 2, deadline=600)
    assert (first.value, second.state) == ("went on", "stopped")


def test_a_crash_in_native_code_repeats_the_job_in_the_folder_as_it_was(tmp_path: Path) -> None:
    folder, crashed = tmp_path / "work", tmp_path / "crashed"
    folder.mkdir()
    (folder / "kept").write_text("before")
    ranks = RankProcesses(PROGRAMS, environment={"CRASHED": str(crashed)})
    with pytest.warns(RankCrashed, match=r"repeated(.|\n)*exit code -6(.|\n)*in crash_once"):
        assert ranks.run("crash_once", 2, folder=folder)[0] == ["kept"]
    crashed.unlink()
    outcomes = ranks.outcomes("crash_once", 2, folder=folder, expected_signals=[signal.SIGABRT])
    assert outcomes[0].exit_code == -signal.SIGABRT


def test_a_second_crash_is_the_result(ranks: RankProcesses, tmp_path: Path) -> None:
    with pytest.warns(RankCrashed), pytest.raises(RanksDied, match="exit code -11"):
        ranks.run("end_by", 2, {"number": int(signal.SIGSEGV)}, folder=tmp_path)


def test_signals_reach_a_job_that_runs(ranks: RankProcesses, tmp_path: Path) -> None:
    job = ranks.start("say_and_wait", 2, {"told": str(tmp_path)}, survivors="live")
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.005)
    job.send(signal.SIGTERM, [0])
    job.send(signal.SIGKILL, [1])
    first, second = job.outcomes()
    assert "SystemExit: 3" in first.error and second.exit_code == -signal.SIGKILL


def test_a_file_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "broken_programs.py").write_text("import nothing_of_this_name")
    with pytest.raises(RuntimeError, match="nothing_of_this_name"):
        RankProcesses(tmp_path / "broken_programs.py").run("any", 1)
    assert RankProcesses(PROGRAMS).run("add_in_a_group", 1, backend="gloo") == [0]
