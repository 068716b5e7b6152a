"""The garbage collector rests while a load is planned, and only then."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from ckptcore import CheckpointManager, StateMismatch


class Watching:
    """A component that notes whether the collector is on when it is asked, and when it is given."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def state_dict(self) -> dict[str, int]:
        self.seen.append(gc.isenabled())
        return {"n": 1}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.seen.append(gc.isenabled())


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_as_it_was_after_a_load(tmp_path: Path, enabled: bool) -> None:
    watching = Watching()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": {"a": torch.ones(3)}, "watching": watching})
        watching.seen.clear()
        was = gc.isenabled()
        try:
            (gc.enable if enabled else gc.disable)()
            manager.load({"w": {"a": torch.zeros(3)}, "watching": watching})
            after = gc.isenabled()
            with pytest.raises(StateMismatch):
                manager.load({"w": torch.nn.Linear(2, 2)})
            failed = gc.isenabled()
        finally:
            (gc.enable if was else gc.disable)()
    assert watching.seen == [False, enabled]
    assert [after, failed] == [enabled, enabled]
