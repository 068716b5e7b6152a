"""At TENSOR level a replica inside a sharded component is hashed when it is compared, and not again
when it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptcore.saving.writer as writer
from ckptcore import (
    CheckpointManager,
    SharingPattern,
    StateComponent,
    ValidationLevel,
    open_checkpoint,
)
from ckptcore.testing.ranks import run_ranks


@pytest.mark.parametrize(
    ("level", "hashed"), [(ValidationLevel.TENSOR, 0), (ValidationLevel.QUICK, 1)]
)
def test_a_replica_is_hashed_once(
    level: ValidationLevel, hashed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = torch.arange(3000.0)
    lengths: list[int] = []
    digest = writer.chunk_digest

    def counted(data: memoryview) -> bytes:
        lengths.append(len(data))
        return digest(data)

    monkeypatch.setattr(writer, "chunk_digest", counted)

    def save(comm) -> str:
        part = StateComponent(
            "m", {"norm": state.clone()}, SharingPattern.SHARDED, validation_level=level
        )
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            return ckpt.save(1, [part]).url

    url = run_ranks(2, save)[0]
    assert lengths == [12_000] * hashed
    with open_checkpoint(url) as view:
        assert view.verify() == [] and view.read("m/norm").tolist() == state.tolist()
