"""Imports and exports from and to what is no local folder, on an S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from ckptcore import (
    CheckpointExists,
    CheckpointManager,
    CheckpointNotFound,
    InvalidState,
    export_checkpoint,
    import_checkpoint,
    load_foreign,
    open_checkpoint,
)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {"a.w": torch.randn(300, 300), "b.w": torch.randn(7).bfloat16()}


def put(s3: Any, url: str, folder: Path) -> None:
    prefix = url.removeprefix(f"s3://{s3.bucket}/")
    for path in folder.rglob("*"):
        if path.is_file():
            name = f"{prefix}/{path.relative_to(folder)}"
            s3.client().upload_file(str(path), s3.bucket, name)


def same(found: Any, state: dict[str, torch.Tensor]) -> bool:
    return found.keys() == state.keys() and all(torch.equal(found[k], state[k]) for k in state)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["hf", "dcp", "torch"])
def test_from_s3_and_to_s3(
    s3: Any, state: dict[str, torch.Tensor], tmp_path: Path, kind: str
) -> None:
    source, root = s3.new_root(), s3.new_root()
    if kind == "hf":
        (tmp_path / "in").mkdir()
        save_file(state, tmp_path / "in" / "model.safetensors")
        (tmp_path / "in" / "config.json").write_text("{}")
    elif kind == "dcp":
        dcp.save({"model": state}, checkpoint_id=str(tmp_path / "in"), no_dist=True)
    else:
        (tmp_path / "in").mkdir()
        torch.save({"model": state, "step": 3}, tmp_path / "in" / "all.pt")
    put(s3, source, tmp_path / "in")
    file = f"{source}/all.pt" if kind == "torch" else source
    report = import_checkpoint(file, root, storage_options=s3.options, scratch=tmp_path)
    assert report.info is not None and report.format == kind and report.verified == 2
    assert "downloaded from s3://" in report.checks[0] and report.source == file

    out = f"{s3.new_root()}/there"
    made = export_checkpoint(
        report.info.url,
        out,
        format=kind,
        component="model" if kind == "torch" else None,
        storage_options=s3.options,
        scratch=tmp_path,
    )
    assert made.verified >= 2 and made.files and made.folder == out
    with pytest.raises(CheckpointExists):
        export_checkpoint(report.info.url, out, format=kind, storage_options=s3.options)
    back = import_checkpoint(out, tmp_path / "back", step=1, source_options=s3.options)
    view = open_checkpoint(tmp_path / "back" / "checkpoint-1")
    assert back.left == [] and view.verify() == []
    live = {"model": {name: torch.zeros_like(tensor) for name, tensor in state.items()}}
    with CheckpointManager(tmp_path / "back") as manager:
        manager.load(live, strict=False)
    assert same(live["model"], state)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "in"]  # no scratch is left


def test_a_download_has_a_bound_and_nothing_is_said_to_be_nothing(
    s3: Any, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "model.safetensors")
    source = s3.new_root()
    put(s3, source, tmp_path / "in")
    with pytest.raises(InvalidState, match="at most 1,000 may be downloaded"):
        import_checkpoint(source, tmp_path / "root", storage_options=s3.options, max_download=1000)
    with pytest.raises(CheckpointNotFound, match="nothing is there"):
        import_checkpoint(f"{source}/none", tmp_path / "root", storage_options=s3.options)
    live = {"model": {name: torch.zeros_like(tensor) for name, tensor in state.items()}}
    load_foreign(live, source, storage_options=s3.options)
    assert same(live["model"], state)


def test_a_failed_export_leaves_nothing(
    s3: Any, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, {"model": state})
    source = tmp_path / "root" / "checkpoint-1"
    stored = source / "model.safetensors"
    data = bytearray(stored.read_bytes())
    data[-1] ^= 1
    stored.write_bytes(data)
    out = s3.new_root()
    with pytest.raises(Exception, match="damaged"):
        export_checkpoint(source, out, max_shard_size=1, target_options=s3.options)
    found = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix=out.split("/", 3)[3] + "/")
    assert found["KeyCount"] == 0
    export_checkpoint(source, tmp_path / "some", keys=["a.*"])
    assert torch.equal(load_file(tmp_path / "some" / "model.safetensors")["a.w"], state["a.w"])
