"""A fast root and a durable one, states that tell which save they are from, and managers that are
watched."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from ckptcore import (
    CheckpointManager,
    CheckpointView,
    CheckpointWarning,
    SaveEvent,
    Storage,
    Tier,
    open_storage,
)
from ckptcore.catalog.catalog import scan
from ckptcore.storage.remote import FsspecStorage
from ckptcore.testing import FaultStorage


class Ground:
    """`fast` and `slow` are storages that fail on demand; what they hold outlives a manager, as
    after a restart."""

    def __init__(self, fast: Storage, slow: Storage) -> None:
        self.disks = fast, slow
        self.restart()

    def restart(self) -> None:
        """New storages on the same disks, without the faults of the old ones."""
        self.fast, self.slow = map(FaultStorage, self.disks)
        self.events: list[SaveEvent] = []

    def manager(self, *, every: int = 1, keep_far: Any = None, **how: Any) -> CheckpointManager:
        tiers = [Tier(self.slow, every=every, keep=keep_far)]
        how = {"io_threads": 1, "drain_timeout": 20.0, "on_event": self.events.append, **how}
        return CheckpointManager(self.fast, tiers=tiers, **how)

    def lose_fast(self) -> None:
        """The machine is gone."""
        for entry in self.disks[0].list():
            for file in self.disks[0].list(entry.name):
                self.disks[0].remove(f"{entry.name}/{file.name}")
            self.disks[0].remove_folder(entry.name)

    @staticmethod
    def state(mark: int) -> dict[str, Any]:
        return {
            "model": {f"w{n}": torch.arange(300) * 0.5 + mark + n for n in range(3)},
            "progress": {"mark": mark},
        }

    @staticmethod
    def mark(state: dict[str, Any], report: Any) -> int:
        """Which save a restored state is from, all of it."""
        mark: int = report.values["progress"]["mark"]
        for name, tensor in Ground.state(mark)["model"].items():
            assert torch.equal(state["model"][name], tensor), (
                f"a mix: progress is of {mark}, {name} is not"
            )
        return mark

    def restored(self, which: int | str = "auto", **how: Any) -> tuple[int, int, str] | None:
        """(step, mark, root) of what a new process would restore; None for a fresh start."""
        state = self.state(-1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            ckpt = self.manager(**how)
            report = ckpt.restore(state, which)
            ckpt.wait(20)
            ckpt.close()
        if report.fresh:
            return None
        return report.step, self.mark(state, report), (report.path or "").rpartition("/")[0]

    def steps(self, where: str) -> list[int]:
        """Steps of the checkpoints there, each verified to the last byte; nothing else may lie
        there."""
        storage = self.disks[where == "slow"]
        infos = scan(storage)
        assert [info.status for info in infos] == ["committed"] * len(infos)
        for info in infos:
            assert CheckpointView(storage, info.name).verify() == []
        return [info.step or 0 for info in infos]

    def told(self, *kinds: str) -> list[tuple[str, int, str | None]]:
        return [
            (event.kind, event.step, event.root) for event in self.events if event.kind in kinds
        ]


@pytest.fixture(params=["local", "memory"])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    """The fast root is a disk; the durable one a disk or a store of objects."""
    url = f"memory://tiers-{uuid.uuid4().hex}"
    slow = open_storage(tmp_path / "slow") if request.param == "local" else FsspecStorage(url, {})
    yield Ground(open_storage(tmp_path / "fast"), slow)
    fs = fsspec.filesystem("memory")
    if fs.exists(url):
        fs.rm(url, recursive=True)
