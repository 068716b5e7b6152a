"""A save starts no process: a data loader's worker that is forked meanwhile would hold its pipes
open, and the save would wait for them for as long as the worker lives."""

from __future__ import annotations

import json

PROGRAM = """
import json, sys
import torch
from ckptcore import CheckpointManager

started = []
sys.addaudithook(lambda event, args: started.append(event) if event in {
    "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"} else None)
with CheckpointManager(sys.argv[1]) as ckpt:
    ckpt.restore({"m": {"w": torch.zeros(3)}})
    ckpt.save_async(1, {"m": {"w": torch.ones(3)}}).result(30)
    ckpt.save(2, {"m": {"w": torch.ones(3)}})
    ckpt.load({"m": {"w": torch.zeros(3)}})
    steps = [info.step for info in ckpt.list()]
print(json.dumps([steps, started]))
"""


def test_a_save_starts_no_process(run_script, tmp_path):
    done = run_script(PROGRAM, tmp_path / "root", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [[1, 2], []]
