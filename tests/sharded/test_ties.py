"""Tied tensors of sharded state: stored once, compared, and restored into whatever is tied now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointManager,
    OptimizerState,
    ReplicationMismatch,
    SharingPattern,
    StateComponent,
    open_checkpoint,
)
from ckptcore.testing.ranks import run_ranks

SHARDED = SharingPattern.SHARDED


class Tied(nn.Module):
    """The first and the last layer share a weight; `split` makes two of it, as stages on different
    ranks have."""

    def __init__(self, parts: str = "embhead", split: bool = False) -> None:
        super().__init__()
        if "emb" in parts:
            self.emb = nn.Embedding(5, 2)
        if "head" in parts:
            self.head = nn.Linear(2, 5, bias=False)
        if parts == "embhead" and not split:
            self.head.weight = self.emb.weight


def of_tied(parts: list[str], fill: float | None = None) -> Any:
    def make(comm: Any) -> list[StateComponent]:
        model = Tied(parts[comm.rank])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(
                    torch.arange(10.0).reshape(5, 2)
                ) if fill is None else parameter.fill_(fill)
        optimizer = torch.optim.AdamW(model.parameters())
        if fill is None:
            for parameter in model.parameters():
                parameter.grad = torch.ones(5, 2)
            optimizer.step()
        return [
            StateComponent("model", model, SHARDED, validation_level="TENSOR"),
            StateComponent(
                "opt", OptimizerState(optimizer, model), SHARDED, validation_level="TENSOR"
            ),
        ]

    return make


@pytest.mark.parametrize(
    "parts", [["embhead"], ["embhead", "embhead"], ["embhead", "head"], ["emb", "embhead"]], ids=str
)
def test_tied_weights_are_loaded_into_tied_and_into_one_of_them(
    tmp_path: Path, parts: list[str]
) -> None:
    def keeping(comm: Any) -> Any:
        made = of_tied(parts)(comm)
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, made[:1])
        return next(made[0].stateful.parameters()).detach().clone()

    expected = run_ranks(len(parts), keeping)[0]
    for into in (["embhead"], ["emb", "head"], ["head", "emb", "embhead"], ["embhead", "emb"]):

        def load(comm: Any, into: list[str] = into) -> Any:
            made = of_tied(into, fill=0.0)(comm)[:1]
            with CheckpointManager(tmp_path, comm=comm) as ckpt:
                ckpt.load(made)
            return made[0].stateful

        for model in run_ranks(len(into), load):
            assert all(torch.equal(parameter, expected) for parameter in model.parameters())
            if hasattr(model, "emb") and hasattr(model, "head"):
                assert model.emb.weight is model.head.weight
    size = open_checkpoint(tmp_path / "checkpoint-1").manifest.components["model"].size_bytes
    assert size == (80 if "head" in parts else 40)


def test_a_tie_on_one_rank_is_compared_with_its_replica_on_another(
    tmp_path: Path, errors_of, on_all
) -> None:
    def program(comm: Any) -> None:
        tied = torch.zeros(4)
        state = {"emb": tied, "head": tied} if comm.rank == 0 else {"head": torch.ones(4)}
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, [StateComponent("s", state, SHARDED)])

    error = on_all(errors_of(2, program), ReplicationMismatch)
    assert (error.keys, error.ranks) == (["head"], [1])


def test_ties_are_found_whatever_the_order_on_each_rank(tmp_path: Path) -> None:
    def program(comm: Any) -> None:
        tied = torch.arange(4.0)
        state = {"emb": tied, "head": tied} if comm.rank == 0 else {"head": tied, "emb": tied}
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, [StateComponent("s", state, SHARDED, validation_level="TENSOR")])

    run_ranks(2, program)
    with open_checkpoint(tmp_path / "checkpoint-1") as view:
        assert view.read("s/emb").tolist() == view.read("s/head").tolist() == [0, 1, 2, 3]
        assert view.manifest.components["s"].size_bytes == 16


def test_replicas_in_another_order_are_equal(tmp_path: Path) -> None:
    def program(comm: Any) -> None:
        state = {name: torch.arange(3.0) + ord(name) for name in ("ab" if comm.rank else "ba")}
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, [StateComponent("s", state, SHARDED)])

    run_ranks(2, program)
    assert open_checkpoint(tmp_path / "checkpoint-1").read("s/b").tolist() == [98, 99, 100]
