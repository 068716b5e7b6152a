"""At TENSOR level a replica inside a sharded component is hashed when it is compared, and not again
when it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptcore.saving.writer as writer
from ckptcore import (
    CheckpointManager,
    Shard,
    SharingPattern,
    StateComponent,
    ValidationLevel,
    open_checkpoint,
)
from ckptcore.saving import staging
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


def test_only_what_several_ranks_hold_is_compared_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator every leaf that is compared is hashed in the call, by the device."""
    asked: list[set[str]] = []
    monkeypatch.setattr(staging, "on_accelerator", lambda tensor: True)
    monkeypatch.setattr(
        staging, "take_digests", lambda c, leaves: asked.append({t.spec.name for t in leaves})
    )

    def program(comm: Any) -> None:
        cut = Shard(torch.full((2, 3), float(comm.rank)), (4, 3), (2 * comm.rank, 0))
        state = [StateComponent("m", {"cut": cut, "same": torch.ones(5)}, SharingPattern.SHARDED)]
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            for step in (1, 2):
                ckpt.save_async(step, state).result(60)

    run_ranks(2, program)
    assert asked == [{"same"}] * 4
