"""Programs that end with uploads on their way, and a durable root on a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptcore import CheckpointManager, CheckpointWarning, KeepLast, Tier, open_storage
from ckptcore.catalog.catalog import scan
from ckptcore.testing import FaultStorage, Killed

PROGRAM = """
import sys, torch
from ckptcore import CheckpointManager, Tier, open_storage
from ckptcore.testing import FaultStorage
faults = FaultStorage(open_storage(sys.argv[1] + "/slow"))
faults.delay(0.02)
if sys.argv[2] == "fail":
    faults.fail(kind="create")
if sys.argv[2] == "kill":
    faults.kill(kind="close", path="*.safetensors", at=2)
ckpt = CheckpointManager(sys.argv[1] + "/fast", tiers=[Tier(faults)], drain_timeout=30)
for step in (10, 20):
    handle = ckpt.save_async(step, {"m": {f"w{n}": torch.full((100,), float(step)) for n in range(3)}, "n": {"n": step}})
print("the end")
"""


def test_the_end_of_a_program_waits_for_uploads(tmp_path: Path, run_script: Any) -> None:
    """Also for those that begin only when a save in the background ends; nobody has closed
    anything."""
    done = run_script(PROGRAM, tmp_path, "well")
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")
    assert [(info.step, info.status) for info in scan(open_storage(tmp_path / "slow"))] == [
        (10, "committed"),
        (20, "committed"),
    ]


def test_a_program_whose_upload_failed_ends_with_1(tmp_path: Path, run_script: Any) -> None:
    done = run_script(PROGRAM, tmp_path, "fail")
    assert done.returncode == 1
    assert "ckptcore: the upload of step 10 to" in done.stderr
    assert [info.step for info in scan(open_storage(tmp_path / "fast"))] == [10, 20]


def test_a_process_that_is_killed_while_it_uploads(tmp_path: Path, run_script: Any) -> None:
    done = run_script(PROGRAM, tmp_path, "kill")
    assert done.returncode == 137
    assert [info.status for info in scan(open_storage(tmp_path / "slow"))] == ["partial"]
    with CheckpointManager(
        tmp_path / "fast", tiers=[Tier(tmp_path / "slow")], io_threads=1
    ) as ckpt:
        step = ckpt.restore({"n": {"n": 0}}, strict=False).step
        assert ckpt.wait(20)
    assert step in (10, 20)
    infos = scan(open_storage(tmp_path / "slow"))
    assert {info.status for info in infos} == {"committed"}
    assert infos[-1].step == max(info.step or 0 for info in scan(open_storage(tmp_path / "fast")))


@pytest.mark.parametrize("at", [5, 15])
def test_on_a_server(s3: Any, tmp_path: Path, at: int) -> None:
    """Killed while it uploads; finished by the next process; then the machine is lost and the run
    goes on elsewhere."""
    url = s3.new_root()
    state = {"m": {"w": torch.arange(100.0)}, "progress": {"step": 10}}
    faults = FaultStorage(open_storage(url, s3.options))
    faults.kill(at, how="raise")
    ckpt = CheckpointManager(
        tmp_path / "fast", tiers=[Tier(faults)], run_id="run", on_error="warn", drain_timeout=20
    )
    try:
        ckpt.save(10, state)
    except Killed:
        pytest.fail("only the upload dies")
    with pytest.warns(CheckpointWarning, match="upload of step 10"):
        ckpt.close()
    tiers = [Tier(url, keep=KeepLast(2), storage_options=s3.options)]
    with CheckpointManager(tmp_path / "fast", tiers=tiers, drain_timeout=20) as ckpt:
        assert ckpt.restore(state).step == 10
        assert ckpt.wait(20)
    assert [info.status for info in scan(open_storage(url, s3.options))] == ["committed"]
    with CheckpointManager(
        tmp_path / "elsewhere", tiers=tiers, keep=KeepLast(1), drain_timeout=20
    ) as ckpt:
        live = {"m": {"w": torch.zeros(100)}, "progress": {"step": 0}}
        report = ckpt.restore(live)
        assert (report.step, report.path, ckpt.run_id) == (10, f"{url}/checkpoint-10", "run")
        assert torch.equal(live["m"]["w"], state["m"]["w"]) and report.values["progress"] == {
            "step": 10
        }
        for step in (20, 30):
            assert ckpt.save(step, state).sequence == step // 10
    assert [info.step for info in scan(open_storage(url, s3.options))] == [20, 30]
