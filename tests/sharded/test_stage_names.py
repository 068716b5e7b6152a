"""B41: stages that call their layers by the same names, and tell nobody, lose nothing without a
word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointManager,
    InvalidState,
    OptimizerState,
    ReplicationMismatch,
    SharingPattern,
    StateComponent,
    open_checkpoint,
)
from ckptcore.testing.ranks import run_ranks


class Local(nn.Module):
    """Four layers of a stage under names that every stage has."""

    def __init__(self, stage: int | None, width: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 2) for _ in range(4))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.fill_(0.0 if stage is None else 10.0 * stage + number)


def trained(stage: int, width: int = 2) -> tuple[Local, torch.optim.Optimizer]:
    model = Local(stage, width)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, stage + 1.0)
    optimizer.step()
    return model, optimizer


def declared(model: Any, optimizer: Any, pattern: str, **how: Any) -> list[StateComponent]:
    kind = SharingPattern(pattern)
    return [
        StateComponent("model", model, kind, **how),
        StateComponent("opt", OptimizerState(optimizer, model), kind, **how),
    ]


def test_b41_the_same_names_in_a_sharded_component_are_refused(
    tmp_path: Path, errors_of, on_all
) -> None:
    def program(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, declared(*trained(comm.rank), "SHARDED"))

    error = on_all(errors_of(2, program), ReplicationMismatch)
    assert (error.component, error.ranks) == ("model", [1])
    assert error.keys == sorted(
        f"layers.{n}.{kind}" for n in range(4) for kind in ("weight", "bias")
    )
    assert not list(tmp_path.glob("checkpoint-*/*manifest*"))


def test_b41_the_same_names_for_other_shapes_are_refused(tmp_path: Path, errors_of, on_all) -> None:
    def program(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, declared(*trained(comm.rank, width=2 + comm.rank), "SHARDED"))

    error = on_all(errors_of(2, program), InvalidState)
    assert (error.component, error.key) == ("model", "layers.0.weight")
    assert "[0]" in error.message and "[1]" in error.message


def test_b41_the_same_names_in_a_global_component_are_refused_when_compared(
    tmp_path: Path, errors_of, on_all
) -> None:
    def program(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, declared(*trained(comm.rank), "GLOBAL", validate_replication=True))

    error = on_all(errors_of(2, program), ReplicationMismatch)
    assert (error.component, error.ranks) == ("model", [1])
    assert "layers.0.weight" in error.keys


@pytest.mark.parametrize("dp", [1, 2])
def test_b41_the_same_names_per_group_come_back_to_each_stage(tmp_path: Path, dp: int) -> None:
    # Ranks of a (dp, pp=2) mesh: a stage's state is the same across dp.
    groups = {"dp": [[stage + 2 * replica for replica in range(dp)] for stage in range(2)]}

    def save(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm, process_groups=groups) as ckpt:
            ckpt.save(1, declared(*trained(comm.rank % 2), "PER_GROUP", process_group_name="dp"))

    def load(comm: Any) -> None:
        model = Local(None)
        optimizer = torch.optim.AdamW(model.parameters())
        with CheckpointManager(tmp_path, comm=comm, process_groups=groups) as ckpt:
            ckpt.load(declared(model, optimizer, "PER_GROUP", process_group_name="dp"))
        expected, other = trained(comm.rank % 2)
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert torch.equal(optimizer.state[mine]["exp_avg"], other.state[theirs]["exp_avg"])

    run_ranks(2 * dp, save)
    run_ranks(2 * dp, load)


@pytest.mark.parametrize("virtual", [1, 2])
def test_b41_stages_as_a_dict_have_names_of_their_own(tmp_path: Path, virtual: int) -> None:
    """The documented way out: models in a dict, whose keys become prefixes; here for the optimizer
    of each stage."""

    def make(comm: Any, fresh: bool) -> tuple[dict[str, Local], torch.optim.Optimizer]:
        numbers = [comm.rank + 2 * n for n in range(virtual)]
        models = {f"stage{n}": Local(None if fresh else n) for n in numbers}
        optimizer = torch.optim.AdamW(p for model in models.values() for p in model.parameters())
        if not fresh:
            for number, model in zip(numbers, models.values(), strict=True):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, number + 1.0)
            optimizer.step()
        return models, optimizer

    def parts(models: dict[str, Local], optimizer: Any) -> list[StateComponent]:
        state = {name: dict(model.named_parameters()) for name, model in models.items()}
        return [
            StateComponent("model", state, SharingPattern.SHARDED),
            StateComponent("opt", OptimizerState(optimizer, models), SharingPattern.SHARDED),
        ]

    def save(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, parts(*make(comm, fresh=False)))

    def load(comm: Any) -> None:
        models, optimizer = make(comm, fresh=True)
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.load(parts(models, optimizer))
        expected, other = make(comm, fresh=False)
        for name, model in models.items():
            for mine, theirs in zip(model.parameters(), expected[name].parameters(), strict=True):
                assert torch.equal(mine, theirs)
                assert torch.equal(optimizer.state[mine]["exp_avg"], other.state[theirs]["exp_avg"])

    run_ranks(2, save)
    run_ranks(2, load)
    names = {
        t.name
        for t in open_checkpoint(tmp_path / "checkpoint-1").tensors()
        if t.component == "model"
    }
    assert names == {
        f"stage{n}/layers.{i}.{kind}"
        for n in range(2 * virtual)
        for i in range(4)
        for kind in ("weight", "bias")
    }
