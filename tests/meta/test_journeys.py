"""How far a reader has to go, and how much the ranks say. Limits that only go down: lower them when
a change allows it.

DESIGN: at most 18 modules, 140 moves and 6 closures to the first byte, and 4 rounds of a save and
of a restore.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptcore.testing.processes import patience

LIMITS = {
    "save to the first byte": {"modules": 19, "moves": 140, "closures": 4},
    "restore": {"modules": 20, "moves": 256, "closures": 4},
    "talk": {
        "rounds of a save": 4,
        "messages of a save": 13,
        "rounds of a restore": 4,
        "messages of a restore": 12,
    },
    "manifests read": {
        "save 2, keeping 5": 0,
        "save 10, keeping 5": 1,
        "save 30, keeping 5": 1,
        "save 2, keeping all": 0,
        "save 10, keeping all": 0,
        "save 30, keeping all": 0,
    },
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, int]]:
    program = Path(__file__).with_name("journeys.py")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=110 * patience()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("journey", LIMITS)
def test_no_way_gets_longer(found: dict[str, dict[str, int]], journey: str) -> None:
    assert found[journey].keys() == LIMITS[journey].keys()
    longer = {
        what: (n, LIMITS[journey][what])
        for what, n in found[journey].items()
        if n > LIMITS[journey][what]
    }
    assert longer == {}, "now, and at most"


@pytest.mark.parametrize("journey", LIMITS)
def test_limits_follow_what_became_shorter(found: dict[str, dict[str, int]], journey: str) -> None:
    """A limit that is a tenth too high lets as much slip back in."""
    slack = {
        what: (n, LIMITS[journey][what])
        for what, n in found[journey].items()
        if n < 0.9 * LIMITS[journey][what]
    }
    assert slack == {}, "now, and the limit to be lowered"
