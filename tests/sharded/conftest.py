"""What the tests of sharded state share: slices by any layout on virtual ranks, counted reads, real
ranks by fork."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptcore import CheckpointError, Shard, Storage, open_storage
from ckptcore.format.layout import MeshLayout
from ckptcore.state.layout import LocalShard, local_shard
from ckptcore.storage.base import FileReader, FileWriter
from ckptcore.testing.processes import RankProcesses
from ckptcore.testing.ranks import run_ranks

HERE = Path(__file__).parent
CHUNK = 64


class MeshShard(Shard):
    """A slice with a layout over a mesh: a DTensor on a virtual rank, where torch has no process
    group."""

    __slots__ = ("layout", "outside")

    def __init__(self, full: torch.Tensor, layout: MeshLayout, rank: int) -> None:
        at = layout.mesh.coordinates(rank)
        nothing = (0,) * full.ndim
        offset, size = (nothing, nothing) if at is None else layout.box_at(tuple(full.shape), at)
        local = full[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].clone()
        super().__init__(local if at is not None else local.new_empty(0), tuple(full.shape), offset)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "outside", at is None)

    def __post_init__(self) -> None:
        pass

    @property
    def box(self) -> Any:
        return None if self.outside else (self.offset, tuple(self.tensor.shape))


def _local_part(leaf: Any) -> LocalShard:
    if isinstance(leaf, MeshShard):
        return LocalShard(leaf.tensor, leaf.global_shape, leaf.box, leaf.layout)
    return local_shard(leaf)


@pytest.fixture
def mesh_shard(monkeypatch: pytest.MonkeyPatch) -> type[MeshShard]:
    """MeshShard(full, layout, rank): leaves that the engine takes for DTensors."""
    for module in ("ckptcore.state.layout", "ckptcore.loading.placement"):
        monkeypatch.setattr(f"{module}.local_shard", _local_part)
    return MeshShard


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of a few bytes, so that small tensors have many."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ckptcore.") and hasattr(module, "CHUNK_BYTES"):
            monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    return CHUNK


class CountingStorage(Storage):
    """A storage that remembers (file, first byte, end) of every read, and the files that were
    opened."""

    def __init__(self, url: Any) -> None:
        self.inner = open_storage(url)
        self.url, self.atomic_rename = self.inner.url, self.inner.atomic_rename
        self.positional_writes = self.inner.positional_writes
        self.reads: list[tuple[str, int, int]] = []
        self.opened: list[str] = []

    def create(self, path: str, size: int) -> FileWriter:
        return self.inner.create(path, size)

    def open(self, path: str) -> FileReader:
        self.opened.append(path.rsplit("/", 1)[-1])
        return _CountingReader(self, path.rsplit("/", 1)[-1], self.inner.open(path))

    def list(self, path: str = "") -> Any:
        return self.inner.list(path)

    def make_folder(self, path: str) -> None:
        self.inner.make_folder(path)

    def sync_folder(self, path: str) -> None:
        self.inner.sync_folder(path)

    def rename(self, source: str, target: str) -> None:
        self.inner.rename(source, target)

    def remove(self, path: str) -> None:
        self.inner.remove(path)

    def remove_folder(self, path: str) -> None:
        self.inner.remove_folder(path)


class _CountingReader(FileReader):
    def __init__(self, storage: CountingStorage, name: str, inner: FileReader) -> None:
        self.storage, self.name, self.inner, self.size = storage, name, inner, inner.size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self.storage.reads.append((self.name, offset, offset + sum(len(b) for b in buffers)))
        self.inner.read_into(offset, buffers)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def counting() -> type[CountingStorage]:
    return CountingStorage


@pytest.fixture
def on_all() -> Callable[..., Any]:
    """on_all(results, kind): every rank raised exactly `kind`, with one message; rank 0's error."""

    def check(results: list[Any], kind: type[BaseException]) -> Any:
        assert [type(result) for result in results] == [kind] * len(results), results
        assert {str(result) for result in results} == {str(results[0])}
        return results[0]

    return check


@pytest.fixture
def errors_of() -> Callable[..., list[Any]]:
    """errors_of(world_size, program): what every rank returned, or the error of ours that it
    raised."""

    def run(world_size: int, program: Callable[[Any], Any]) -> list[Any]:
        def caught(comm: Any) -> Any:
            try:
                return program(comm)
            except CheckpointError as error:
                return error

        return run_ranks(world_size, caught)

    return run


@pytest.fixture
def words() -> Callable[[Any], np.ndarray]:
    """The items of a tensor or array as integers of the same width (complex128: pairs), to compare
    to the bit."""

    def of(value: Any) -> np.ndarray:
        if isinstance(value, torch.Tensor):
            plain = (
                torch.view_as_real(value.detach())
                if value.dtype == torch.complex128
                else value.detach()
            )
            kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
            return plain.view(kinds[plain.element_size()]).numpy()
        array = np.asarray(value)
        if array.dtype == np.complex128:
            return np.stack([array.real, array.imag], -1).view(np.int64)
        return array.view(f"i{array.itemsize}" if array.itemsize > 1 else np.uint8)

    return of


class Gang:
    """Runs the programs of programs.py on real ranks, with a process group over gloo."""

    def __init__(self) -> None:
        self.ranks = RankProcesses(HERE / "programs.py", environment={"CUDA_VISIBLE_DEVICES": ""})

    def run(self, program: str, world: int, **arguments: Any) -> dict[int, Any]:
        """What the program returned on every rank."""
        # With the folder that it writes to, a crash in torch's own code is no failure.
        folder = Path(arguments.get("again") or arguments["root"])
        folder = folder if folder.exists() else folder.parent
        return dict(
            enumerate(self.ranks.run(program, world, arguments, folder=folder, backend="gloo"))
        )


@pytest.fixture(scope="session")
def gang() -> Gang:
    """gang.run(program, world_size, ...): programs of tests/sharded/programs.py on real ranks over
    gloo."""
    return Gang()
