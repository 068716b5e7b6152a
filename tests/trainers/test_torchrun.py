"""The real launcher: `torchrun` stops, kills and restarts ranks, and the run is the run that was
left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckpt_trainers.callbacks import read_json_array

from ckptcore import scan_root
from ckptcore.testing.processes import patience

from .comparison import compare_checkpoints

TIMES = ("tok_per_sec",)


@pytest.fixture
def words(text: Path) -> list[str]:
    model = [
        f"model.{name}={value}"
        for name, value in (("n_layer", 1), ("n_head", 1), ("n_embd", 8), ("block_size", 8))
    ]
    values = {
        "data": text,
        "per_device_train_batch_size": 2,
        "use_cpu": "true",
        "report_to": "json",
        "logging_steps": 1,
        "eval_strategy": "no",
        "save_total_limit": "null",
    }
    return [*model, *(f"{name}={value}" for name, value in values.items())]


def torchrun(words: list[str], *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                *options,
            ),
            *("-m", "ckpt_trainers.main", "--threads", "1", *words),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    try:
        out, errors = process.communicate(timeout=100 * patience())
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    return out


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 90 * patience()
    while not happened():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.01)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The workers of a launcher."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [
        int(pid)
        for pid in children
        if "ckpt_trainers.main" in Path(f"/proc/{pid}/cmdline").read_text()
    ]


def read_losses(folder: Path) -> dict[int, float]:
    """The loss of each step, to the last bit, from the logs of a run."""
    path = folder.with_suffix(".logs") / "trainer_logs.json"
    records = read_json_array(path) if path.exists() else []
    return {record["global_step"]: record["loss"] for record in records if "loss" in record}


def folders(output_dir: Path) -> list[str]:
    return [f"output_dir={output_dir}", f"logging_dir={output_dir.with_suffix('.logs')}"]


def assert_same(one: Path, other: Path, step: int) -> None:
    parts = compare_checkpoints(
        str(one / f"checkpoint-{step}"), str(other / f"checkpoint-{step}"), TIMES
    )
    assert {part.name: part.differences for part in parts if part.differences} == {}
    assert read_losses(one) == read_losses(other) and len(read_losses(one)) == step


@pytest.mark.timeout(400)
def test_a_rank_that_is_killed_is_started_again_and_the_result_is_the_same(
    ranks: Any, words: list[str], tmp_path: Path
) -> None:
    steps = 120
    words += [f"max_steps={steps}", "save_steps=10"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = torchrun([*folders(killed), *words], "--max-restarts", "1")
    wait_until((killed / "checkpoint-10" / "checkpoint_manifest.json").exists, process)
    os.kill(max(ranks_of(process)), signal.SIGKILL)
    out = ended(process)
    resumed = re.findall(r"resumed from step (\d+)", out)
    assert len(resumed) == 1 and int(resumed[0]) >= 10 and int(resumed[0]) % 10 == 0
    assert out.count(f"to step {steps}") == 1
    assert ranks.command(2, ["--threads", "1", *folders(whole), *words], tmp_path / "log") == [0, 0]
    assert_same(killed, whole, steps)
    assert [info.status for info in scan_root(str(killed))] == ["committed"] * (steps // 10)


def terminate(words: list[str], folder: Path, step: int) -> int:
    """SIGTERM to the launcher, as a cluster sends it: it passes it on to the ranks, which save and
    end well."""
    process = torchrun(
        [
            *folders(folder),
            "max_steps=100000",
            "save_steps=100000",
            "enable_jit_checkpoint=true",
            *words,
        ]
    )
    wait_until(lambda: max(read_losses(folder), default=0) >= step, process)
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=100 * patience())
    (info,) = scan_root(str(folder))
    assert info.status == "committed" and info.step == max(read_losses(folder)) >= step
    assert f"stopped by SIGTERM: {info.step} steps" in out
    return info.step or 0


@pytest.mark.timeout(400)
def test_a_sigterm_to_the_launcher_is_a_checkpoint_to_go_on_from(
    ranks: Any, words: list[str], tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"
    step = terminate(words, stopped, 5)
    length = [f"max_steps={step + 5}", "save_steps=100000", "lr_scheduler_type=constant", *words]
    assert ranks.command(2, ["--threads", "1", *folders(stopped), *length], tmp_path / "log") == [
        0,
        0,
    ]
    assert sorted(read_losses(stopped)) == list(range(1, step + 6))


@pytest.mark.stress
@pytest.mark.timeout(1500)
def test_a_sigterm_to_the_launcher_at_any_time(words: list[str], tmp_path: Path) -> None:
    for attempt in range(1, 21):
        terminate(words, tmp_path / str(attempt), attempt)
