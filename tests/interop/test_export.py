"""What other libraries read, out of checkpoints in any layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptcore import (
    CheckpointExists,
    CheckpointManager,
    Communicator,
    InvalidState,
    Shard,
    SharingPattern,
    StateComponent,
    export_checkpoint,
)
from ckptcore.testing.ranks import run_ranks


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    weight = torch.randn(6, 4)
    return {"emb.w": weight, "head.w": weight, "layer.w": torch.randn(3, 3), "n": torch.tensor(4)}


@pytest.fixture
def source(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, {"model": state, "other": {"x": 1}})
    return tmp_path / "root" / "checkpoint-1"


def test_one_file_without_ties(
    source: Path, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    report = export_checkpoint(source, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(found) == {"emb.w", "layer.w", "n"} and report.verified == 3
    assert all(torch.equal(found[name], state[name]) for name in found)
    assert any("head.w: tied to emb.w" in text for text in report.left)
    with pytest.raises(CheckpointExists):
        export_checkpoint(source, tmp_path / "hf")
    assert not list(tmp_path.glob("*.partial-*"))


def test_many_files_names_keys_and_dtypes(
    source: Path, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    report = export_checkpoint(
        source, tmp_path / "hf", dtype="bf16", rename={"layer.": "blocks.0."}, max_shard_size=50
    )
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"emb.w", "blocks.0.w", "n"}
    assert index["metadata"]["total_size"] == report.size_bytes == 48 + 18 + 8 and report.cast == 2
    found = {}
    for name in set(index["weight_map"].values()):
        found |= load_file(tmp_path / "hf" / name)
    assert (
        torch.equal(found["emb.w"], state["emb.w"].bfloat16()) and found["n"].dtype == torch.int64
    )
    few = export_checkpoint(source, tmp_path / "few", keys=["layer.*"], dry_run=True)
    assert few.tensors == 1 and not (tmp_path / "few").exists()
    with pytest.raises(InvalidState, match="would be called"):
        export_checkpoint(source, tmp_path / "two", rename={"layer.w": "n"})
    with pytest.raises(InvalidState, match="nothing to write"):
        export_checkpoint(source, tmp_path / "none", keys=["zzz"])
    for wrong in (
        {"dtype": "int8"},
        {"max_shard_size": "huge"},
        {"format": "x"},
        {"component": "y"},
    ):
        with pytest.raises(InvalidState):
            export_checkpoint(source, tmp_path / "wrong", **wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "wrong").exists()


def test_what_four_ranks_sharded_is_one_file(tmp_path: Path) -> None:
    grid = torch.randn(8, 3)

    def save(comm: Communicator) -> None:
        low = comm.rank * 2
        part = Shard(grid[low : low + 2].clone(), (8, 3), (low, 0))
        components = [
            StateComponent("model", {"grid": part}, SharingPattern.SHARDED),
            StateComponent("rng", {"s": torch.full((2,), comm.rank)}, SharingPattern.PER_RANK),
        ]
        with CheckpointManager(tmp_path / "root", comm=comm) as manager:
            manager.save(1, components)

    run_ranks(4, save)
    source = tmp_path / "root" / "checkpoint-1"
    export_checkpoint(source, tmp_path / "hf")
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["grid"], grid)
    report = export_checkpoint(source, tmp_path / "all.pt", format="torch")
    assert any(text.startswith("rng: 3 of 4 copies") for text in report.left)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(found["model"]["grid"], grid) and found["rng"]["s"].tolist() == [0, 0]


def test_large_tensors_pass_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a portion, and more than what is kept in memory."""
    big = torch.randn(3000, 3000)
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, {"model": {"big": big}})
    source = tmp_path / "root" / "checkpoint-1"
    export_checkpoint(source, tmp_path / "hf")
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["big"], big)
    export_checkpoint(source, tmp_path / "b.pt", format="torch", scratch=tmp_path)
    assert torch.equal(torch.load(tmp_path / "b.pt", weights_only=True)["model"]["big"], big)
    assert not list(tmp_path.glob("ckptcore-*"))


def test_empty_dicts_that_a_dcp_folder_does_not_keep_are_said(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "root") as manager:
        info = manager.save(1, {"m": {"w": torch.ones(2)}, "loops": {"fit": {}, "n": 1, "l": []}})
    dry = export_checkpoint(info, tmp_path / "d", format="dcp", dry_run=True)
    assert dry.left == ["empty dicts (loops/fit): torch.distributed.checkpoint keeps none"]
    assert export_checkpoint(info, tmp_path / "d", format="dcp").left == dry.left
