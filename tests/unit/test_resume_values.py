"""B29: plain values keep their types and go on where they were, however often a run is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptcore import CheckpointManager
from ckptcore.testing.processes import RankProcesses


class Ema:
    """An average whose decay warms up with a counter kept as a plain int."""

    def __init__(self) -> None:
        self.shadow = torch.zeros(2)
        self.updates = 0

    def update(self, value: torch.Tensor) -> float:
        self.updates += 1
        decay = min(0.99, (1 + self.updates) / (10 + self.updates))
        self.shadow.mul_(decay).add_(value, alpha=1 - decay)
        return decay

    def state_dict(self) -> dict:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


class Progress:
    def __init__(self) -> None:
        self.__dict__.update(
            step=0, ratio=0.0, name="start", flag=False, none=None, lst=[], big=0, nested={}
        )

    def advance(self) -> None:
        self.step += 1
        self.ratio = self.step / 3
        self.name, self.flag, self.big = f"step {self.step}", self.step % 2 == 1, 2**70 + self.step
        self.lst.append((self.step, [self.ratio]))
        self.nested = {"a": {self.step, -1}, self.step: b"x"}

    def state_dict(self) -> dict:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict) -> None:
        self.__dict__.update(state)


def run(root: Path, until: int) -> tuple[Progress, Ema, list[float]]:
    """A new start of the run: restores what is there, goes on to `until`, and saves."""
    progress, ema = Progress(), Ema()
    decays = []
    with CheckpointManager(root) as ckpt:
        ckpt.restore({"progress": progress, "ema": ema})
        while progress.step < until:
            progress.advance()
            decays.append(ema.update(torch.tensor([progress.step, 1.0])))
        ckpt.save(progress.step, {"progress": progress, "ema": ema})
    return progress, ema, decays


def test_b29_values_and_averages_over_repeated_resumes(tmp_path: Path, same) -> None:
    whole, average, expected = run(tmp_path / "whole", 15)
    decays = []
    for until in (5, 10, 15):
        progress, ema, more = run(tmp_path / "parts", until)
        decays += more
        assert progress.step == until
    assert decays == expected
    same(progress.state_dict(), whole.state_dict())
    same(ema.state_dict(), average.state_dict())
    assert ema.updates == 15


def in_a_process(_rank: int, _world_size: int, root: str, until: int) -> list[object]:
    progress, ema, decays = run(Path(root), until)
    return [progress.step, str(progress.big), ema.updates, ema.shadow.tolist(), decays]


def test_b29_in_new_processes(tmp_path: Path) -> None:
    _whole, average, expected = run(tmp_path / "whole", 9)
    decays = []
    for until in (3, 6, 9):
        arguments = {"root": str(tmp_path / "parts"), "until": until}
        (found,) = RankProcesses(__file__).run("in_a_process", 1, arguments)
        step, big, updates, shadow, more = found
        decays += more
        assert (step, big, updates) == (until, str(2**70 + until), until)
    assert decays == expected
    assert shadow == average.shadow.tolist()


@pytest.mark.parametrize("transactional", [False, True])
def test_b29_bare_values_are_in_the_report(tmp_path: Path, same, transactional: bool) -> None:
    values = {
        "step": 5,
        "ratio": 0.5,
        "name": "x",
        "flag": True,
        "none": None,
        "lst": [1, [2.0, "a"]],
        "big": 2**70,
        "tup": (1, 2),
        "set": {1},
        "count": torch.tensor(3),
    }
    live = {**dict.fromkeys(values), "count": torch.tensor(0)}
    with CheckpointManager(tmp_path) as ckpt:
        for _ in range(3):
            ckpt.save(1, {"v": values}, overwrite=True)
            report = ckpt.load({"v": live}, transactional=transactional)
            same(report.values["v"], {**values, "count": torch.tensor(3)})
            assert live["count"].item() == 3
            values = report.values["v"]


def test_loaded_values_are_copies(tmp_path: Path) -> None:
    values = {"lst": [1]}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"v": values})
        values["lst"].append(2)
        assert ckpt.load({"v": {"lst": []}}).values["v"] == {"lst": [1]}
