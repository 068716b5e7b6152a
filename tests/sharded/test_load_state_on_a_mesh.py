"""load_state(mesh=): tensors that were saved in slices come back as DTensors, of which each rank reads
its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptcore import CheckpointManager, InvalidState, SharingPattern, StateComponent, load_state
from ckptcore.format.layout import Mesh, MeshLayout
from ckptcore.loading import placement
from ckptcore.loading.reader import StoredFiles
from ckptcore.testing.ranks import run_ranks

FULL = {
    "odd": torch.arange(35.0).reshape(7, 5),
    "wide": torch.arange(48.0).reshape(4, 12),
    "small": torch.arange(2.0),
    "step": torch.tensor(3.0),
}
# Like FSDP2 over tensor parallelism, on 2 x 2 ranks.
SAVED = {"odd": ("S0", "S1"), "wide": ("s0", "S0"), "small": ("S0", "R")}


@contextmanager
def on_rank(rank: int, *shape: int) -> Iterator[Any]:
    world = torch.Size(shape).numel()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def url(tmp_path: Path, mesh_shard: Any) -> str:
    mesh = Mesh((2, 2), (0, 1, 2, 3))

    def program(comm: Any) -> str:
        state: dict[str, Any] = {
            name: mesh_shard(FULL[name], MeshLayout(mesh, placements), comm.rank)
            for name, placements in SAVED.items()
        }
        state |= {"step": FULL["step"], "tied": state["odd"], "epoch": 4}
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            return ckpt.save(1, [StateComponent("model", state, SharingPattern.SHARDED)]).url

    return run_ranks(4, program)[0]


def put_together(name: str, parts: Sequence[Any]) -> torch.Tensor:
    """A tensor out of its slices on all ranks, which must lie where torch says."""
    whole = torch.full(FULL[name].shape, -1.0, dtype=parts[0][0].dtype)
    for local, shape, offset in parts:
        assert tuple(local.shape) == tuple(shape)
        whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = local
    return whole


def loaded(url: str, *shape: int, **how: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The placements of each tensor, and it put together, of all ranks of a mesh."""
    parts: dict[str, list[Any]] = {}
    placements: dict[str, Any] = {}
    for rank in range(torch.Size(shape).numel()):
        with on_rank(rank, *shape) as mesh:
            state = load_state(url, mesh=mesh, **how)
            for name, tensor in state.items():
                if hasattr(tensor, "placements"):
                    assert tensor.device_mesh is mesh and tensor.shape == FULL[name].shape
                    assert tensor.stride() == FULL[name].stride()
                    placements[name] = tensor.placements
                    where = place(FULL[name].shape, mesh, tensor.placements)
                    parts.setdefault(name, []).append((tensor.to_local(), *where))
    return placements, {name: put_together(name, found) for name, found in parts.items()}


@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (4,), (3,), (1,), (2, 2, 2)])
def test_on_any_mesh_each_rank_has_its_part(url: str, shape: tuple[int, ...]) -> None:
    placements, whole = loaded(url, *shape, keys=["odd", "wide", "small"])
    assert placements.keys() == SAVED.keys()
    assert all(torch.equal(whole[name], FULL[name]) for name in SAVED)
    if len(shape) == 1:
        assert set(placements.values()) == {(Cut(0),)}
    else:
        ones = (Replicate(),) * (len(shape) - 2)
        assert placements["odd"] == (*ones, Cut(0), Cut(1))
        assert placements["small"] == (*ones, Cut(0), Replicate())
        assert placements["wide"][-2].split_factor == shape[-1]


def test_what_was_not_cut_is_whole_and_ties_stay(url: str) -> None:
    with on_rank(1, 2) as mesh:
        state = load_state(url, mesh=mesh)
        assert torch.equal(state["step"], FULL["step"]) and state["epoch"] == 4
        assert state["tied"] is state["odd"] and not hasattr(state["step"], "placements")
        assert state["odd"].to_local().tolist() == FULL["odd"][4:].tolist()
        meta = load_state(url, mesh=mesh, device="meta")
        assert meta["odd"].is_meta and meta["odd"].to_local().shape == (3, 5)
        half = load_state(url, mesh=mesh, dtype="bfloat16")["odd"]
        assert half.dtype == torch.bfloat16 and half.to_local().tolist()[0] == [20, 21, 22, 23, 24]


def test_converted_in_portions(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "CONVERTED_BYTES", 16)
    _, whole = loaded(url, 2, 2, keys=[*SAVED], dtype=torch.float64)
    assert all(torch.equal(whole[name], FULL[name].double()) for name in SAVED)


def test_placements_of_the_user(url: str) -> None:
    placements, whole = loaded(url, 2, keys="odd", placements=[Cut(1)])
    assert placements == {"odd": (Cut(1),)} and torch.equal(whole["odd"], FULL["odd"])
    asked = {}

    def choose(name: str, shape: torch.Size) -> Any:
        asked[name] = shape
        return {"wide": [Cut(1), Replicate()], "step": [Replicate(), Replicate()]}.get(name)

    placements, whole = loaded(url, 2, 2, placements=choose)
    assert asked == {name: tensor.shape for name, tensor in FULL.items()}
    assert placements == {"wide": (Cut(1), Replicate()), "step": (Replicate(), Replicate())}
    assert all(torch.equal(whole[name], FULL[name]) for name in whole)


def test_only_its_part_is_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    plain: Callable[..., Any] = StoredFiles.read

    def counted(self: Any, reads: Any, threads: int) -> None:
        read.append(sum(part.entry.nbytes for part in reads))
        plain(self, reads, threads)

    monkeypatch.setattr(StoredFiles, "read", counted)
    with on_rank(0, 2, 2) as mesh:
        load_state(url, mesh=mesh, keys="wide")
    assert read == [48]


def test_a_rank_outside_of_the_mesh_reads_nothing(url: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    with on_rank(2, 3):
        mesh = DeviceMesh("cpu", [0, 1])
        odd = load_state(url, mesh=mesh, keys="odd")["odd"]
        assert odd.shape == (7, 5) and odd.to_local().numel() == 0


def test_wrong_arguments(url: str) -> None:
    with pytest.raises(InvalidState, match="placements are those on a mesh"):
        load_state(url, placements=[Cut(0)])
    with pytest.raises(InvalidState, match="mesh must be a DeviceMesh, not 2"):
        load_state(url, mesh=2)
    with on_rank(0, 2) as mesh:
        for bad in ([], [Cut(0), Cut(1)], [0], "S0", [Cut(7)], lambda name, shape: 3):
            with pytest.raises(InvalidState, match=r"placements .*'odd'"):
                load_state(url, mesh=mesh, keys="odd", placements=bad)
        with pytest.raises(InvalidState, match=r"placements fails for 'odd' \(KeyError"):
            load_state(url, mesh=mesh, keys="odd", placements=lambda name, shape: {}[name])
