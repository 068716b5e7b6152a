"""How far a reader has to go in the trainers. Limits that only go down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ckptcore.testing.processes import patience

FILES = 15
MOVES = 587


def test_one_step_and_its_checkpoint_are_read_in_few_files() -> None:
    program = Path(__file__).with_name("trainer_journey.py")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=110 * patience()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found["files"]) <= FILES, found["files"]
    assert found["moves"] <= MOVES
    assert len(found["files"]) >= FILES and found["moves"] >= 0.9 * MOVES, "lower the limit"
