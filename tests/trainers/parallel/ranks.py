"""What the harness (ckptcore.testing.processes) runs on the ranks of the tests in this folder."""

from __future__ import annotations

from typing import Any

import programs

programs.warm_up()


def on_a_rank(rank: int, world_size: int, program: str, arguments: dict[str, Any]) -> Any:
    """Run a program of programs.py."""
    return getattr(programs, program)(**arguments)
