"""Real processes for the libraries: forked from one that has imported them already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptcore.testing.processes import RankProcesses, RanksDied


@pytest.fixture
def processes(tmp_path: Path) -> Callable[..., list[Any]]:
    """processes("accelerate_ranks.py", program, number, name=value, ...): what the program returned
    on each rank, or -9 where it killed itself."""

    def run(file: str, program: str, number: int, **arguments: Any) -> list[Any]:
        ranks = RankProcesses(Path(__file__).with_name(file))
        found = ranks.outcomes(program, number, arguments, folder=tmp_path, backend="gloo")
        if not {outcome.state for outcome in found} <= {"returned", "died"}:
            raise RanksDied(program, found)
        return [o.value if o.state == "returned" else o.exit_code for o in found]

    return run
