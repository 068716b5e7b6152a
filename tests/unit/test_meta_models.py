"""Models on the meta device get memory and weights; names of wrappers of one's own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    InvalidState,
    ModelState,
    OptimizerState,
    StateMismatch,
    canonical_names,
    register_wrapper,
)
from ckptcore.state import modules


class Net(nn.Module):
    def __init__(self, cache: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        if cache:
            self.register_buffer("cache", torch.ones(3), persistent=False)


@pytest.fixture
def ckpt(tmp_path: Path) -> Any:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": Net()})
        yield manager


def on_meta(cache: bool = False) -> Net:
    with torch.device("meta"):
        return Net(cache)


def test_weights_of_a_model_on_meta(ckpt: CheckpointManager) -> None:
    live, saved = on_meta(), Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.load({"model": ModelState(live, device="cpu")})
    for name, tensor in saved.state_dict().items():
        assert torch.equal(live.state_dict()[name], tensor)
    assert live.head.weight is live.embedding.weight
    assert not live.scale.requires_grad and live.head.weight.requires_grad
    optimizer = torch.optim.SGD(live.parameters(), momentum=0.9)
    live.head(live.norm(live.embedding(torch.arange(6)))).sum().backward()
    optimizer.step()
    ckpt.save(2, {"model": live, "optimizer": optimizer})


def test_an_optimizer_goes_by_the_names_of_a_model_state(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer})
        with torch.device("meta"):
            live = nn.Linear(2, 2)
        state = ModelState(live, device="cpu")
        for names in (None, state, live):
            other = torch.optim.SGD(live.parameters(), momentum=0.9)
            held = other if names is None else OptimizerState(other, names)
            ckpt.load({"model": state, "optimizer": held})
            moment = other.state[live.weight]["momentum_buffer"]
            assert torch.equal(moment, optimizer.state[model.weight]["momentum_buffer"])


def test_in_another_dtype_without_cast(ckpt: CheckpointManager) -> None:
    live = on_meta()
    report = ckpt.load({"model": ModelState(live, device="cpu", dtype="bfloat16")})
    assert live.head.weight.dtype == torch.bfloat16
    assert torch.equal(live.head.weight, Net().head.weight.bfloat16())
    assert live.norm.num_batches_tracked.dtype == torch.int64
    assert report.cast["model/norm.weight"] == "F32 -> BF16"
    with pytest.raises(StateMismatch, match="cast=True converts dtypes"):
        ckpt.load({"model": Net().bfloat16()})


def test_what_is_not_on_meta_stays(ckpt: CheckpointManager) -> None:
    live = on_meta()
    live.norm = nn.BatchNorm1d(4)
    norm = live.norm.weight
    state = ModelState(live, device="cpu", dtype=torch.float32)
    assert live.norm.weight is norm
    ckpt.load({"model": state})


def test_buffers_that_no_checkpoint_has(ckpt: CheckpointManager) -> None:
    live = on_meta(cache=True)
    with pytest.warns(CheckpointWarning, match="no checkpoint has the buffers cache, which"):
        state = ModelState(live, device="cpu")
    assert live.cache.is_meta
    ckpt.load({"model": state})


def test_a_load_says_how_to_get_memory(ckpt: CheckpointManager) -> None:
    with pytest.raises(InvalidState, match=r"give ModelState\(module, device=\.\.\.\)"):
        ckpt.load({"model": on_meta()})


def test_wrong_devices_and_dtypes() -> None:
    for bad in (3, "", "nowhere", "meta"):
        with pytest.raises(InvalidState, match="device"):
            ModelState(on_meta(), device=bad)  # type: ignore[arg-type]
    for bad in (3, "", "int8", torch.int64):
        with pytest.raises(InvalidState, match="dtype"):
            ModelState(on_meta(), device="cpu", dtype=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidState, match="give device, too"):
        ModelState(on_meta(), dtype=torch.float16)
    live = on_meta()
    with pytest.raises(InvalidState):
        ModelState(live, device="cpu", dtype="nothing")
    assert live.head.weight.is_meta, "nothing is done before all arguments are known to be right"


class Mine(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = model


def test_a_wrapper_of_ones_own(ckpt: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "_REGISTERED", {})
    assert "inside.norm.bias" in canonical_names(Mine(Net()))
    register_wrapper(Mine, "inside")
    wrapped = Mine(Net())
    names = canonical_names(nn.Sequential(wrapped))
    assert names["0.norm.bias"] is wrapped.inside.norm.bias
    nn.init.zeros_(wrapped.inside.head.weight)
    optimizer = torch.optim.SGD(wrapped.parameters(), momentum=0.9)
    ckpt.load({"model": wrapped})
    assert torch.equal(wrapped.inside.head.weight, Net().head.weight)
    wrapped.inside.head(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    ckpt.save(2, {"model": wrapped, "optimizer": optimizer})
    bare = Net()
    again = torch.optim.SGD(bare.parameters(), momentum=0.9)
    ckpt.load({"model": bare, "optimizer": again})
    assert torch.equal(
        again.state[bare.head.weight]["momentum_buffer"],
        optimizer.state[wrapped.inside.head.weight]["momentum_buffer"],
    )


def test_what_is_no_wrapper() -> None:
    for bad in (nn.Module, nn.Linear(1, 1), dict, None, "Mine"):
        with pytest.raises(InvalidState, match="takes a class of modules that wrap"):
            register_wrapper(bad, "inside")  # type: ignore[arg-type]
    for name in ("", "a.b", 3, None):
        with pytest.raises(InvalidState, match="inner must be the name of an attribute"):
            register_wrapper(Mine, name)  # type: ignore[arg-type]
    with pytest.raises(InvalidState, match="module must be a torch module"):
        canonical_names({"a": torch.ones(1)})  # type: ignore[arg-type]
