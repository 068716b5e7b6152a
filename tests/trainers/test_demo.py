"""`make demo`, small: a real process, really killed inside two of its saves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from ckpt_trainers import demo

from ckptcore import CheckpointManager


@pytest.mark.timeout(180)
def test_a_run_killed_twice_inside_a_save_is_the_uninterrupted_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckpt_trainers.demo", "--steps", "30"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    shown = result.stdout
    assert result.returncode == 0, shown + result.stderr
    kills = re.findall(r"SIGKILL .* into save (\d+) of this process", shown)
    assert len(kills) == 2 and int(kills[0]) >= 2
    assert len(re.findall(r"on disk at the kill: checkpoint-\d+\.partial-\S+/", shown)) == 2
    assert len(re.findall(r"resumed from step \d+", shown)) == 2
    assert "EQUAL: the killed and resumed run" in shown and "DIFFER" not in shown
    assert re.search(r"weights +53 tensors +3,337,216 bytes", shown)
    assert re.search(r"optimizer moments +156 tensors +6,674,640 bytes", shown)
    assert re.search(r"step, losses, log .* equal", shown)
    assert re.findall(r"^\$ ckpt (\w+)", shown, re.MULTILINE) == ["ls", "inspect", "verify"]
    killed = tmp_path / "demo-runs" / "killed"
    assert sorted(p.name for p in killed.iterdir() if p.name.startswith("checkpoint")) == [
        "checkpoint-26",
        "checkpoint-28",
        "checkpoint-30",
    ]


def make_run(folder: Path, weight: float = 1.0, loss: float = 0.5, steps: int = 2) -> Path:
    history = [{"step": step, "loss": loss} for step in range(1, steps + 1)]
    trainer = {"log_history": history, "tok_per_sec": time.perf_counter()}
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(2, {"model": {"w": [weight]}, "trainer": trainer})
    return folder


def test_the_verdict_is_no_when_anything_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_run(tmp_path / "one")
    assert demo.compare(one, make_run(tmp_path / "same"), 2)
    assert "DIFFER" not in capsys.readouterr().out
    assert not demo.compare(one, make_run(tmp_path / "weight", weight=1.0000000000000002), 2)
    assert "1 DIFFER" in capsys.readouterr().out
    assert not demo.compare(one, make_run(tmp_path / "loss", loss=0.5000000000000001), 2)
    assert "2 DIFFER" in capsys.readouterr().out
    assert not demo.compare(one, make_run(tmp_path / "short", steps=1), 2)
    assert "2 DIFFER" in capsys.readouterr().out


def test_only_the_folder_of_an_earlier_demo_is_emptied(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").touch()
    with pytest.raises(click.UsageError, match="not of an earlier demo"):
        demo.fresh(mine)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    for _ in range(2):
        demo.fresh(tmp_path / "demo")
        assert [path.name for path in (tmp_path / "demo").iterdir()] == [demo.MARKER]
        (tmp_path / "demo" / "reference").mkdir()


def test_a_run_that_ends_too_soon_is_reported(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    with pytest.raises(SystemExit, match="before a save was hit"):
        demo.kill_inside_a_save(process, tmp_path / "run", 1, demo.random.Random(0))
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
