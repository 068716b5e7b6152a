"""Callbacks in runs of several real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from ckptcore import scan_root


@pytest.mark.parametrize(
    ("at", "step", "reason", "saved"),
    [
        ({"3": ["save_checkpoint"], "6": ["save_and_stop"]}, 8, "requested", [3, 4, 6, 8]),
        ({"4": ["save_checkpoint", "abort"]}, 6, "aborted", [3]),  # 6 is a scheduled save
        ({"5": ["abort"]}, 6, "aborted", [3]),
    ],
)
def test_every_rank_obeys_at_the_same_step(
    at: dict[str, list[str]], step: int, reason: str, saved: list[int], ranks: Any, run: Any
) -> None:
    """At once where something is due (step 4 ends an epoch), else one step later (7 -> 8)."""
    args = {"max_steps": 9, "save_steps": 3, "logging_steps": 3}
    given = run("run", "ddp", **args)
    first, second = ranks.run("controlled", 2, at=at, **given)
    assert first == second
    assert (first["step"], first["reason"], first["by"]) == (step, reason, "TrainerControlCallback")
    found = [info.step for info in scan_root(given["args"]["output_dir"])]
    assert found == [event[1] for event in first["events"]] == saved
