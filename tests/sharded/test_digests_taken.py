"""Which tensors of a sharded state are digested, so that their replicas can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptcore import CheckpointManager, StateComponent
from ckptcore.replicas import compare
from ckptcore.saving import staging
from ckptcore.testing.ranks import run_ranks


def test_what_one_rank_holds_is_not_digested_with_the_cpu_taken_for_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[list[float]] = []
    fingerprints = compare.fingerprints

    def counted(tensors: list[torch.Tensor], *, sampled: bool) -> list[bytes]:
        taken.extend(tensor.tolist() for tensor in tensors)
        return fingerprints(tensors, sampled=sampled)

    for module in (compare, staging):
        monkeypatch.setattr(module, "on_accelerator", lambda tensor: True)
    monkeypatch.setattr(compare, "fingerprints", counted)

    def program(comm: Any) -> None:
        state = {f"only.{comm.rank}": torch.tensor([1.0]), "both": torch.tensor([2.0])}
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save_async(1, [StateComponent("m", state, "SHARDED")])

    run_ranks(2, program)
    assert taken == [[2.0], [2.0]]
