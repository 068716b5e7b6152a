"""A part of sharded state, on other numbers of ranks, whose live names may differ from rank to
rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckptcore import CheckpointManager, Shard, SharingPattern, StateComponent, StateMismatch
from ckptcore.testing.ranks import run_ranks

W = torch.arange(24.0).reshape(8, 3)


def shard(tensor: torch.Tensor, rank: int, size: int) -> Shard:
    rows = len(tensor) // size
    return Shard(
        tensor[rank * rows : (rank + 1) * rows].clone(), tuple(tensor.shape), (rank * rows, 0)
    )


@pytest.fixture
def root(tmp_path):
    def save(comm):
        state = {
            "w": shard(W, comm.rank, 4),
            "v": shard(W + 100, comm.rank, 4),
            "n": {"at": 5, "k": 6},
        }
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, {"m": state})

    run_ranks(4, save)
    return tmp_path


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_some_tensors_of_a_sharded_state(root, size, broadcast) -> None:
    """One is read under another name, one under its own; a third, of another shape than was saved,
    is not asked for."""

    def load(comm):
        other = torch.full((2,), -1.0)
        state = {
            "u": shard(W * 0, comm.rank, size),
            "w": shard(W * 0, comm.rank, size),
            "v": other,
            "n": {"at": 0},
        }
        with CheckpointManager(root, comm=comm, load_broadcast=broadcast) as ckpt:
            table = {"m/u": "m/v", "m/w": True, "m/n/at": "m/n/k"}
            component = StateComponent("m", state, SharingPattern.SHARDED)
            report = ckpt.load([component], keys=table.get)
        assert (report.missing, report.unexpected) == ([], [])
        assert report.values["m"]["n"] == {"at": 6}
        return state["u"].tensor, state["w"].tensor, other

    found = run_ranks(size, load)
    assert torch.equal(torch.cat([u for u, _, _ in found]), W + 100)
    assert torch.equal(torch.cat([w for _, w, _ in found]), W)
    assert all(o.tolist() == [-1.0, -1.0] for _, _, o in found)


def test_strictness_is_over_all_ranks(root) -> None:
    """A name that is asked for is missing where a rank has it and the checkpoint has not, and
    unexpected where no rank has it."""

    def load(comm, keys):
        name = ["w", "v"][comm.rank]
        state = {name: torch.zeros(8, 3), "x" * comm.rank: torch.zeros(1)}
        with CheckpointManager(root, comm=comm) as ckpt:
            try:
                ckpt.load([StateComponent("m", state, SharingPattern.SHARDED)], keys=keys)
            except StateMismatch as error:
                return error.missing, error.unexpected
            return state[name][:, 0].sum().item()

    # Rank 0 has no "v", and rank 1 no "w": of what is asked for, no name is lacking on all of them.
    assert run_ranks(2, lambda comm: load(comm, ["m/w", "m/v"])) == [84.0, 884.0]
    # What one of them has alone may be all that is asked for.
    assert run_ranks(2, lambda comm: load(comm, "m/w")) == [84.0, 0.0]
    found = run_ranks(2, lambda comm: load(comm, "m/[nvw]*"), errors=True)
    assert found == [([], ["m/n/at", "m/n/k"])] * 2
    found = run_ranks(2, lambda comm: load(comm, ["m/w", "m/v", "m/x"]), errors=True)
    assert all(missing == ["m/x"] for missing, _ in found)


def test_moments_of_one_stage(tmp_path) -> None:
    """A pipeline's stages have their own names: layer 0 of two ranks comes to one, with its
    moments, and no other."""

    def made(names, number):
        model = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
        for parameter in model.parameters():
            nn.init.constant_(parameter, number)  # ranks are threads, and share the random stream
        optimizer = torch.optim.AdamW(model.parameters())
        for module in model.values():
            module(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    def parts(model, optimizer):
        sharded = {"model": model, "optimizer": optimizer}
        return [
            StateComponent(key, value, SharingPattern.SHARDED) for key, value in sharded.items()
        ]

    def save(comm):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, parts(*made([f"layer{comm.rank}"], float(comm.rank + 1))))

    run_ranks(2, save)
    model, optimizer = made(["layer0", "layer1"], 7.0)
    before = model["layer1"].weight.clone()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.load(parts(model, optimizer), keys="*/layer0.*")
    saved, moments = made(["layer0"], 1.0)
    assert torch.equal(model["layer0"].weight, saved["layer0"].weight)
    assert torch.equal(model["layer1"].weight, before)
    exp_avg = moments.state[saved["layer0"].weight]["exp_avg"]
    assert torch.equal(optimizer.state[model["layer0"].weight]["exp_avg"], exp_avg)
