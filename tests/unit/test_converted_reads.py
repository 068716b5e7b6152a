"""Weights that are converted while they are loaded are in memory once, and a portion of them twice."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointCorrupt,
    CheckpointManager,
    ModelState,
    Shard,
    SharingPattern,
    StateComponent,
)
from ckptcore.loading import placement
from ckptcore.testing.ranks import run_ranks

PORTION = 64


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of the tensors that are made to read into, in each portion."""
    found: list[int] = []
    plain = placement._batches

    def counted(parts: Any) -> Any:
        for batch in plain(parts):
            found.append(sum(placement.volume(b[1]) * p.dtype.itemsize for p, b in batch))
            yield batch

    monkeypatch.setattr(placement, "_batches", counted)
    monkeypatch.setattr(placement, "CONVERTED_BYTES", PORTION)
    return found


@pytest.mark.parametrize("how", ["cast", "meta"])
def test_portion_by_portion(tmp_path: Path, made: list[int], how: str) -> None:
    saved = net(1)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": saved})
        if how == "cast":
            live: nn.Module = net(2).to(torch.bfloat16)
            report = ckpt.load({"model": live}, 1, cast=True)
        else:
            with torch.device("meta"):
                live = net(2)
            report = ckpt.load({"model": ModelState(live, device="cpu", dtype="bfloat16")}, 1)
    expected = net(1).to(torch.bfloat16).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in live.state_dict().items())
    assert all(p.requires_grad for p in live.parameters())
    total = sum(t.nbytes for n, t in saved.state_dict().items() if t.is_floating_point())
    assert sum(made) == total and max(made) <= PORTION
    assert set(report.cast.values()) == {"F32 -> BF16"}


def test_the_memory_of_a_portion_is_free_before_the_next(
    tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    held: list[weakref.ref[torch.Tensor]] = []
    batches, reads_into = placement._batches, placement._reads_into

    def counted(parts: Any) -> Any:
        for batch in batches(parts):
            alive.append(sum(memory() is not None for memory in held))
            held.clear()
            yield batch

    def noted(fill: Any, box: Any, memory: torch.Tensor) -> Any:
        held.append(weakref.ref(memory))
        return reads_into(fill, box, memory)

    monkeypatch.setattr(placement, "_batches", counted)
    with CheckpointManager(tmp_path, io_threads=1) as ckpt:
        ckpt.save(1, {"model": net(1)})
        live = net(2).double()
        monkeypatch.setattr(placement, "_reads_into", noted)
        ckpt.load({"model": live}, 1, cast=True)
    # The first time the tensor of integers is there, which is not converted.
    assert len(made) > 3 and alive[1:] == [0] * (len(made) - 1)


def test_slices_are_converted_where_they_lie(tmp_path: Path, made: list[int]) -> None:
    full = torch.arange(60.0).reshape(12, 5)

    def program(comm: Any) -> list[Any]:
        def part(size: int, dtype: torch.dtype) -> dict[str, Any]:
            low = comm.rank * size
            return {"w": Shard(full[low : low + size].to(dtype), (12, 5), (low, 0))}

        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            if comm.world_size == 2:
                state = part(6, torch.float32)
                ckpt.save(1, [StateComponent("s", state, SharingPattern.SHARDED)])
                return []
            state = part(4, torch.float64)
            state["w"].tensor.zero_()
            ckpt.load([StateComponent("s", state, SharingPattern.SHARDED)], 1, cast=True)
            return state["w"].tensor.tolist()

    run_ranks(2, program)
    assert [row for rows in run_ranks(3, program) for row in rows] == full.tolist()
    assert sum(made) == full.nbytes and max(made) <= PORTION


def test_all_or_nothing_stays_so(tmp_path: Path, made: list[int]) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        path = Path(ckpt.save(1, {"model": net(1)}).url) / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        for transactional in (True, False):
            live = net(2).double()
            before = [p.tolist() for p in live.parameters()]
            with pytest.raises(CheckpointCorrupt) as caught:
                ckpt.load({"model": live}, 1, cast=True, transactional=transactional)
            said = "partly overwritten" in str(caught.value)
            assert said is not transactional
            if transactional:
                assert [p.tolist() for p in live.parameters()] == before and made == []
