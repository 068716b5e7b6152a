"""Whatever mode torch is in, and whatever its default device, where a save is called for: the
threads that copy are in no such mode, and memory for it is always the host's."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointManager,
    ModelState,
    OptimizerState,
    SharingPattern,
    StateComponent,
    ValidationLevel,
)
from ckptcore.replicas.device_digest import _multipliers, fingerprints
from ckptcore.testing.ranks import run_ranks

# One that is copied by a thread of its own, and small ones that another thread takes together.
SIZES = {
    "large": (300_000,),
    "matrix": (7, 9),
    "one": (1,),
    "scalar": (),
    "empty": (0, 3),
    "wide": (600, 500),
}


@contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def both():
    with torch.inference_mode(), default_device("meta"):
        yield


MODES = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "default device": lambda: default_device("meta"),
    "device context": lambda: torch.device("meta"),
    "both": both,
}
all_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def state(mark):
    """On the host: training state is older than the mode that it is saved in."""
    made = {name: torch.full(size, float(mark), device="cpu") for name, size in SIZES.items()}
    made["turned"] = torch.full((50, 40), float(mark), device="cpu").t()
    made["count"] = torch.tensor(mark, device="cpu")
    made["bytes"] = torch.full((300_000,), mark, dtype=torch.uint8, device="cpu")
    return made


class Given:
    """State that takes what is loaded as new tensors."""

    def __init__(self, state=()):
        self.state = dict(state)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.state = state_dict


def check(same, ckpt, step):
    """What a checkpoint holds, read into tensors that are there, and into new ones."""
    there, new = {"m": state(0)}, {"m": Given()}
    assert (ckpt.load(there, step).step, ckpt.load(new, step, strict=False).step) == (step, step)
    same(there["m"], state(step))
    same(
        {name: tensor.contiguous() for name, tensor in new["m"].state.items()},
        {name: tensor.contiguous() for name, tensor in state(step).items()},
    )


@all_modes
@pytest.mark.parametrize("prewarmed", ["", "in it", "before"])
def test_save_async(tmp_path, same, mode, prewarmed):
    """The memory that one save was copied to serves the next one, in another mode, too."""
    with CheckpointManager(tmp_path) as ckpt:
        if prewarmed == "before":
            ckpt.prewarm({"m": state(0)})
        live = {"m": state(1)}
        for step, inside in enumerate((True, False, True, False), 1):
            with mode() if inside else torch.no_grad():
                if prewarmed == "in it" and step == 1:
                    ckpt.prewarm({"m": state(0)})
                for tensor in live["m"].values():
                    tensor.fill_(step)
                handle = ckpt.save_async(step, live)
                for tensor in live["m"].values():
                    tensor.fill_(99)
            assert handle.result(30).step == step
        for step in (1, 2, 3, 4):
            check(same, ckpt, step)
        assert ckpt.failed_steps == ()


@all_modes
def test_save_and_load_and_restore(tmp_path, same, mode):
    with CheckpointManager(tmp_path) as ckpt:
        with mode():
            assert ckpt.save(1, {"m": state(1)}).step == 1
            assert ckpt.save_async(2, {"m": state(2)}).result(30).step == 2
            check(same, ckpt, 1)
            check(same, ckpt, 2)
            live = {"m": state(0)}
            assert ckpt.restore(live).step == 2
            same(live["m"], state(2))
            assert ckpt.verify(1) == ckpt.verify(2) == []
        check(same, ckpt, 1)
        check(same, ckpt, 2)


@all_modes
def test_state_that_was_made_in_the_mode(tmp_path, same, mode):
    """Tensors that are changed in inference mode alone are saved from there, and from outside, and
    loaded into."""
    with mode():
        live = state(1)
    with CheckpointManager(tmp_path) as ckpt:
        with mode():
            assert ckpt.save_async(1, {"m": live}).result(30).step == 1
        assert ckpt.save_async(2, {"m": live}).result(30).step == 2
        with mode():
            for tensor in live.values():
                tensor.zero_()
            assert ckpt.load({"m": live}, 1).step == 1
        same(live, state(1))
        found = {"m": state(0)}
        ckpt.load(found, 2)
        same(found["m"], state(1))


def trained(draw):
    torch.manual_seed(draw)
    model = nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400), nn.Linear(400, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 300)).square().mean().backward()
    optimizer.step()
    return (
        model,
        optimizer,
        {"model": ModelState(model), "optimizer": OptimizerState(optimizer, model)},
    )


@all_modes
def test_model_and_optimizer_in_the_middle_of_an_evaluation(tmp_path, same, mode):
    model, optimizer, components = trained(1)
    expected = trained(1)
    with CheckpointManager(tmp_path) as ckpt:
        with mode():
            ckpt.prewarm(components)
            handle = ckpt.save_async(1, components)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9)
        assert handle.result(30).step == 1
        with mode():
            ckpt.load(components, 1)
    same(dict(model.state_dict()), dict(expected[0].state_dict()))
    same(optimizer.state_dict(), expected[1].state_dict())
    model(torch.ones(4, 300)).square().mean().backward()
    optimizer.step()  # they can be trained on


@all_modes
@pytest.mark.parametrize("nodes", [None, [[0], [1]]], ids=["shared", "node"])
def test_ranks_that_compare_and_pass_on(tmp_path, same, mode, nodes):
    """What rank 0 passes on to other nodes arrives on the host."""

    def program(comm):
        how = {"storage_mode": "node"} if nodes else {}

        def components(mark):
            return [
                StateComponent(
                    "all",
                    state(mark),
                    SharingPattern.REPLICATED,
                    validation_level=ValidationLevel.TENSOR,
                ),
                StateComponent("first", state(mark + comm.rank), SharingPattern.GLOBAL),
            ]

        folder = tmp_path / str(comm.rank if nodes else 0)
        with CheckpointManager(folder, comm=comm, **how) as ckpt:
            with mode():
                ckpt.prewarm(components(0))
                saved = [ckpt.save_async(step, components(step)).result(30).step for step in (1, 2)]
                saved.append(ckpt.save(3, components(3)).step)
                live = components(0)
                ckpt.load(live, 2)
            for step in saved:
                found = components(0)
                ckpt.load(found, step)
                for component in found:
                    same(component.stateful, state(step))
            same(live[0].stateful, state(2))
            return saved

    assert run_ranks(2, program, nodes=nodes) == [[1, 2, 3]] * 2


@all_modes
def test_what_replicas_are_compared_by(mode):
    """Computed where the tensors are, with numbers that are made on the host, once."""
    tensors = list(state(3).values())
    try:
        _multipliers.cache_clear()
        expected = fingerprints(tensors, sampled=False)
        _multipliers.cache_clear()
        with mode():
            assert fingerprints(tensors, sampled=False) == expected
        assert fingerprints(tensors, sampled=False) == expected
    finally:
        _multipliers.cache_clear()
