"""What the tests of retention and of the corners of a commit share: states that tell which save
they are from, storages."""

from __future__ import annotations

import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    SharingPattern,
    StateComponent,
    Storage,
    open_storage,
)
from ckptcore.catalog.catalog import newest_run, scan
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.storage.remote import FsspecStorage
from ckptcore.testing.ranks import run_ranks


class Marked:
    """States in which every value tells which save (and rank) it is from; and what must lie in a
    root."""

    @staticmethod
    def state(mark: int, items: int = 4) -> dict[str, Any]:
        return {
            "model": {f"w{n}": torch.arange(items) * 0.5 + mark + n for n in range(3)},
            "progress": {"mark": mark, "big": 2**70 + mark},
        }

    @staticmethod
    def mark(values: dict[str, Any]) -> int:
        """Which save a restored state is from, all of it; AssertionError for a mix."""
        mark = values["progress"]["mark"]
        expected = Marked.state(mark, values["model"]["w0"].numel())
        assert values["progress"] == expected["progress"]
        assert values["model"].keys() == expected["model"].keys()
        for name, tensor in expected["model"].items():
            assert torch.equal(values["model"][name], tensor), (
                f"a mix: progress is of {mark}, {name} is not"
            )
        return mark

    @staticmethod
    def parts(mark: int, rank: int, items: int = 4) -> list[StateComponent]:
        """The same for one of several ranks: something that all have, and something of each rank's
        own."""
        state = Marked.state(mark, items)
        own = {"x": torch.full((items,), mark * 100.0 + rank)}
        return [
            StateComponent("model", state["model"], SharingPattern.REPLICATED),
            StateComponent("progress", state["progress"], SharingPattern.GLOBAL),
            StateComponent("own", own, SharingPattern.PER_RANK),
        ]

    @staticmethod
    def loaded(
        load: Callable[[list[StateComponent]], Any], rank: int, items: int = 4
    ) -> tuple[int | None, int | None]:
        """(step, mark) of what `load` puts into the parts of one rank, all of it; (None, None) for
        a fresh start."""
        live = Marked.parts(-1, rank, items)
        report = load(live)
        if report.fresh:
            return None, None
        values = {"model": live[0].stateful, "progress": report.values["progress"]}
        mark = Marked.mark(values)
        assert torch.equal(live[2].stateful["x"], torch.full((items,), mark * 100.0 + rank))
        return report.step, mark

    @staticmethod
    def restored(
        root: Any, items: int = 4, which: int | str = "auto", **how: Any
    ) -> tuple[int, int] | None:
        """(step, mark) of what a new process would restore; None for a fresh start."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            report = CheckpointManager(root, io_threads=1, **how).restore(
                Marked.state(-1, items), which
            )
        return None if report.fresh else (report.step, Marked.mark(report.values))

    @staticmethod
    def files(storage: Storage) -> dict[str, set[str] | None]:
        """All that lies in the root: folder -> names in it; None for a file."""
        return {
            e.name: {i.name for i in storage.list(e.name)} if e.is_folder else None
            for e in storage.list()
        }

    @staticmethod
    def whole(storage: Storage, steps: list[int], run: str | None = None) -> dict[str, set[str]]:
        """What `files` must say when these steps of the run, and nothing else, are there; each is
        verified."""
        manager = CheckpointManager(storage, run_id=run, io_threads=1)
        infos = [
            i for i in scan(storage) if i.status == "committed"
        ]  # also what the run has gone back behind
        infos = [info for info in infos if info.run_id == (run or newest_run(infos))]
        assert [info.step for info in infos] == steps
        for info in infos:
            assert manager.verify(info.step) == []
        return {f"checkpoint-{info.step}": {*info.manifest.files, MANIFEST_NAME} for info in infos}


@pytest.fixture(scope="session")
def marked() -> type[Marked]:
    return Marked


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
    """make_root(kind): a new empty root at each call. "local", "memory" and "folder", the latter
    two by the rules of object stores."""
    base = f"memory://retention-{uuid.uuid4().hex}"

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


@pytest.fixture
def split_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest replicated state is split over its ranks."""
    monkeypatch.setattr("ckptcore.saving.plan.MIN_SHARE_BYTES", 1)


@pytest.fixture
def errors_of() -> Callable[..., list[Any]]:
    """errors_of(world_size, program, ...): what every rank returned or raised, caught inside the
    rank, which lives on."""

    def run(world_size: int, program: Callable[..., Any], **how: Any) -> list[Any]:
        def caught(comm: Any) -> Any:
            try:
                return program(comm)
            except Exception as error:
                return error
            finally:
                with comm.round("every rank has its verdict", joining=True):
                    pass

        return run_ranks(world_size, caught, **how)

    return run
