"""Checkpoints of several ranks to be copied, storages of every kind, and what must be true of a
copy."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from ckptcore import (
    CheckpointCoordinator,
    CheckpointInfo,
    CheckpointView,
    SharingPattern,
    StateComponent,
    Storage,
    open_storage,
    scan_root,
)
from ckptcore.catalog.catalog import scan
from ckptcore.copy.checkpoint import copy_between
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.storage.remote import FsspecStorage
from ckptcore.testing.ranks import run_ranks

KINDS = ["local", "memory", "folder"]


def parts(rank: int, mark: int, items: int) -> list[StateComponent]:
    """State that is split over files, and state of each rank's own."""
    model = {f"w{n}": torch.arange(items) * 0.5 + mark + n for n in range(3)} | {
        "empty": torch.zeros(0)
    }
    own = {"x": torch.full((items,), mark * 100.0 + rank), "when": {mark, rank}}
    stage = {"s": torch.full((3,), float(mark + (rank == 2)), dtype=torch.bfloat16)}
    return [
        StateComponent("model", model, SharingPattern.REPLICATED),
        StateComponent("own", own, SharingPattern.PER_RANK),
        StateComponent("stage", stage, SharingPattern.PER_GROUP, process_group_name="dp"),
        StateComponent("progress", {"mark": mark}, SharingPattern.GLOBAL),
    ]


def save_on_ranks(path: str, mark: int, items: int = 100) -> None:
    def program(comm: Any) -> None:
        groups = {"dp": [[0, 1], [2]]}
        CheckpointCoordinator(
            parts(comm.rank, mark, items), groups, comm=comm, io_threads=1
        ).save_checkpoint(path, step=500)

    run_ranks(3, program)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a/checkpoint-500 and b/checkpoint-500, which is another commit of the same step."""
    root = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "ckptcore.saving.plan.MIN_SHARE_BYTES", 1
        )  # even small state is split over the ranks
        for name, mark in (("a", 1), ("b", 2)):
            save_on_ranks(str(root / name / "checkpoint-500"), mark)
    names = {p.name for p in (root / "a" / "checkpoint-500").iterdir()}
    assert {
        "model.safetensors.index.json",
        "index.rank00002.msgpack",
        "own.rank00001.safetensors",
    } <= names
    return root


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what is tested here is the order of operations, not
    the disk."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shm, prefix="ckptcore-test-") as folder:
        yield Path(folder)


@pytest.fixture
def make_root(quick_folder: Path) -> Iterator[Callable[[str], Storage]]:
    """make_root(kind): a new empty root. "memory" and "folder" are used by the rules of object
    stores."""
    base = f"memory://copying-{uuid.uuid4().hex}"

    def make(kind: str) -> Storage:
        name = uuid.uuid4().hex
        if kind == "memory":
            return FsspecStorage(f"{base}/{name}", {})
        if kind == "folder":
            return FsspecStorage(f"file://{quick_folder}/{name}", {})
        return open_storage(quick_folder / name)

    yield make
    fs = fsspec.filesystem("memory")
    if fs.exists(base):
        fs.rm(base, recursive=True)


class Copies:
    """What the tests ask of copies."""

    name = "checkpoint-500"

    def __init__(self, sources: Path) -> None:
        self.sources = sources

    def source(self, which: str = "a") -> Storage:
        return open_storage(self.sources / which)

    def make(self, target: Storage, which: str | Storage = "a", **how: Any) -> CheckpointInfo:
        storage = which if isinstance(which, Storage) else self.source(which)
        return copy_between(storage, self.name, target, self.name, **{"threads": 2, **how})

    def bytes_of(self, storage: Storage) -> dict[str, bytes]:
        """Every file of the checkpoint."""
        return {e.name: storage.read(f"{self.name}/{e.name}") for e in storage.list(self.name)}

    def check(self, target: Storage, which: str = "a") -> None:
        """The target holds this checkpoint, to the last byte, and nothing else."""
        assert [entry.name for entry in target.list()] == [self.name]
        assert self.bytes_of(target) == self.bytes_of(self.source(which))
        view = CheckpointView(target, self.name)
        assert view.verify() == []
        assert view.values("progress") == {"mark": 1 if which == "a" else 2}

    def never_torn(self, target: Storage) -> list[int]:
        """What counts as a checkpoint in the target is whole; marks of those that do."""
        marks = []
        for info in scan(target):
            if info.status == "committed":
                view = CheckpointView(target, info.name)
                assert view.verify() == []
                marks.append(view.values("progress")["mark"])
        return marks

    def total(self, which: str = "a") -> int:
        (info,) = scan_root(self.sources / which)
        assert info.size_bytes is not None
        return info.size_bytes

    manifest = f"{name}/{MANIFEST_NAME}"


@pytest.fixture
def copies(sources: Path) -> Copies:
    return Copies(sources)
