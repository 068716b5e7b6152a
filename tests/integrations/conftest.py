"""Real processes for the libraries: forked from one that has imported them already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptcore.testing.processes import RankProcesses, RanksDied


@pytest.fixture
def two_processes(tmp_path: Path) -> Callable[..., list[Any]]:
    """two_processes("accelerate_ranks.py", program, name=value, ...): what the program returned on
    either rank, or -9 where it killed itself."""

    def run(file: str, program: str, **arguments: Any) -> list[Any]:
        ranks = RankProcesses(Path(__file__).with_name(file))
        found = ranks.outcomes(program, 2, arguments, folder=tmp_path, backend="gloo")
        if not {outcome.state for outcome in found} <= {"returned", "died"}:
            raise RanksDied(program, found)
        return [o.value if o.state == "returned" else o.exit_code for o in found]

    return run
