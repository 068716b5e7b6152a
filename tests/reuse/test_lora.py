"""LoRA adapters of peft under FSDP2 on two real ranks: killed inside a save, resumed on two ranks and
on one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptcore

pytest.importorskip("peft")
PROGRAM = Path(__file__).with_name("lora_program.py")


def run(ranks: int, root: Path, *words: str) -> dict[str, Any] | None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"),
            *("--master-port=0", "--standalone", str(PROGRAM), str(root), *words),
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if done.returncode == 0:
        return json.loads(found[0].removeprefix("FOUND "))
    assert "Signal 9" in done.stderr or "exitcode: -9" in done.stderr, done.stderr[-3000:]
    return None


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_killed_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole = run(2, tmp_path / "whole", "--until", "4")
    assert whole is not None
    assert whole["reused"][0] == 0
    assert all(n > 0 for n in whole["reused"][1:])  # the frozen base
    assert run(2, tmp_path / "killed", "--until", "4", "--kill", "3") is None
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path / "killed", alone)
    resumed = run(2, tmp_path / "killed", "--until", "4")
    assert resumed is not None
    assert resumed["first"] == 3
    assert (resumed["weights"], resumed["moments"]) == (whole["weights"], whole["moments"])
    one = run(1, alone, "--until", "4")
    assert one is not None
    assert one["first"] == 3
    assert (one["weights"], one["moments"]) == (whole["weights"], whole["moments"])
    for step in (1, 2, 3, 4):
        url = tmp_path / "killed" / f"checkpoint-{step}"
        assert ckptcore.open_checkpoint(url).verify() == []
