"""Quantized moments go through a checkpoint to the last bit."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import TrainingArguments
from ckpt_trainers.optim import make_optimizer, make_scheduler
from torch import nn

from ckptcore import (
    CheckpointManager,
    OptimizerState,
    StateMismatch,
    UnsupportedValue,
    register_tensor_class,
)
from ckptcore.testing.processes import RankProcesses


class OptimState8bit(torch.Tensor):
    """Laid out as torchao's class of this name: a float tensor in appearance, made of codes and a
    scale."""

    codes: torch.Tensor
    scale: torch.Tensor
    signed: bool

    @staticmethod
    def __new__(
        cls: Any, codes: torch.Tensor, scale: torch.Tensor, signed: bool, dtype: torch.dtype
    ) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)  # type: ignore[attr-defined]
        made.codes, made.scale, made.signed = codes, scale, signed
        return made

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.signed, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: list[Any]) -> Any:
        return cls(parts["codes"], parts["scale"], *context)  # type: ignore[call-arg]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].signed, args[0].dtype)  # type: ignore[call-arg]
        raise NotImplementedError(func)


OptimState8bit.__module__ = "torchao.optim.subclass_8bit"


class Quantized(torch.optim.Optimizer):
    """One moment: the last gradient in 8 bits."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = parameter.grad.abs().max().reshape(1) / 255
                codes = (parameter.grad.abs() / scale).to(torch.uint8)
                self.state[parameter] = {
                    "exp_avg": OptimState8bit(codes, scale, True, torch.bfloat16)
                }  # type: ignore[call-arg]


Quantized.__module__ = "torchao.optim.adam"


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    home = ModuleType("torchao.optim.subclass_8bit")
    home.OptimState8bit = OptimState8bit  # type: ignore[attr-defined]
    for name in ("torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, home.__name__, home)
    return home


def test_moments_are_taken_apart_and_put_together(torchao: ModuleType, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = Quantized(model.parameters())
    model(torch.arange(6.0).reshape(2, 3)).sum().backward()
    optimizer.step()
    kept = OptimizerState(optimizer, model)
    moment = kept.state_dict()["state"]["weight"]["exp_avg"]
    assert moment["quantized"] == "OptimState8bit" and moment["context"] == [True, "torch.bfloat16"]
    assert moment["tensors"]["codes"] is optimizer.state[model.weight]["exp_avg"].codes
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"optimizer": kept})
    other = nn.Linear(3, 2)
    fresh = Quantized(other.parameters())
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.load({"optimizer": OptimizerState(fresh, other)})
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        was, now = optimizer.state[mine]["exp_avg"], fresh.state[theirs]["exp_avg"]
        assert type(now) is OptimState8bit and now.dtype is torch.bfloat16 and now.signed is True
        assert torch.equal(was.codes, now.codes) and torch.equal(was.scale, now.scale)


def test_only_known_classes_are_made_anew(
    torchao: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(1, 1)
    state = OptimizerState(torch.optim.SGD(model.parameters()), model)
    saved = state.state_dict()

    def load(kind: str, context: list[Any], **tensors: torch.Tensor) -> None:
        parts = {"quantized": kind, "context": context, "tensors": tensors}
        state.load_state_dict({**saved, "state": {"weight": {"exp_avg": parts}}})

    codes, scale = torch.ones(1, 1, dtype=torch.uint8), torch.ones(1)
    load("OptimState8bit", [True, "torch.bfloat16"], codes=codes, scale=scale)
    with pytest.raises(StateMismatch, match=r"class pathlib.Path, which is not registered"):
        load("pathlib.Path", [])
    for context, tensors in (
        ([True, "torch.bfloat16"], {"codes": codes}),
        ([True, "torch.load"], {"codes": codes, "scale": scale}),
        ([True], {"codes": codes, "scale": scale}),
        ([True, "torch.float32"], {"codes": codes.expand(2, 1), "scale": scale}),
    ):
        with pytest.raises(StateMismatch, match="weight: what is stored makes no OptimState8bit"):
            load("OptimState8bit", context, **tensors)
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(
        StateMismatch, match=r"class torchao.optim.*OptimState8bit; install torchao"
    ):
        load("OptimState8bit", [True, "torch.bfloat16"], codes=codes, scale=scale)


class Packed(OptimState8bit):
    """A class that nobody knows."""


def test_a_class_of_ones_own_is_refused_until_it_is_registered(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, fresh = (torch.optim.SGD(m.parameters(), momentum=0.9) for m in (model, other))
    for number, parameter in enumerate(model.parameters(), start=2):
        codes = torch.full(parameter.shape, number, dtype=torch.uint8)
        packed = Packed(codes, torch.ones(1), True, torch.float32)  # type: ignore[call-arg]
        optimizer.state[parameter] = {"momentum_buffer": packed}
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(
            UnsupportedValue, match=r"Packed is not supported.*register_tensor_class"
        ):
            checkpoints.save(1, {"model": model, "optimizer": optimizer})
        with pytest.raises(TypeError, match=r"register_tensor_class.Linear.: it has no"):
            register_tensor_class(nn.Linear)  # type: ignore[arg-type]
        register_tensor_class(Packed)
        checkpoints.save(1, {"model": model, "optimizer": optimizer})
        checkpoints.load({"model": other, "optimizer": fresh})
    for number, parameter in enumerate(other.parameters(), start=2):
        moment: Any = fresh.state[parameter]["momentum_buffer"]
        assert type(moment) is Packed and moment.codes.unique().tolist() == [number]


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_resuming_with_few_bits_is_exact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    def make(seed: int) -> SimpleNamespace:
        torch.manual_seed(seed)
        model = nn.Linear(256, 256)  # large enough for its moments to be quantized
        args = TrainingArguments(optim=name, learning_rate=1e-2)
        groups = {"biases": {"regex": "bias", "config": {"weight_decay": 0.0}}}
        optimizer = make_optimizer(args, model, groups=groups)
        scheduler = make_scheduler(args, optimizer, 10)
        state = {
            "model": model,
            "optimizer": OptimizerState(optimizer, model),
            "scheduler": scheduler,
        }
        return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, state=state)

    def steps(run: SimpleNamespace, *seeds: int) -> None:
        for seed in seeds:
            given = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))
            run.model(given).square().mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.scheduler.step()

    whole, resumed = make(0), make(1)
    steps(whole, 0, 1, 2)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(3, whole.state)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.load(resumed.state)
    steps(whole, 3, 4, 5)
    steps(resumed, 3, 4, 5)
    assert "OptimState" in type(resumed.optimizer.state[resumed.model.weight]["exp_avg"]).__name__
    assert torch.equal(whole.model.weight, resumed.model.weight) and torch.equal(
        whole.model.bias, resumed.model.bias
    )
    assert isinstance(resumed.optimizer.param_groups[0]["lr"], torch.Tensor)


def launch(phase: str, optim: str, folder: Path, world_size: int) -> list[dict[str, Any]]:
    ranks = RankProcesses(Path(__file__).with_name("quantized_ranks.py"), imports=["torchao.optim"])
    arguments = {"phase": phase, "optim": optim, "folder": str(folder)}
    ranks.run("run", world_size, arguments, folder=folder, backend="gloo")
    return [torch.load(folder / f"{phase}-{world_size}-{rank}.pt") for rank in range(world_size)]


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_slices_with_few_bits_come_back_on_the_same_and_on_other_numbers_of_ranks(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    saved = launch("save", name, tmp_path, 2)
    again = launch("resume", name, tmp_path, 2)
    alone = launch("resume", name, tmp_path, 1)[0]
    assert "OptimState" in alone["kind"]
    for was, now in zip(saved, again, strict=True):
        assert was["kind"] == now["kind"] == alone["kind"]
        for part in ("codes", "scale", "qmap", "weight"):
            assert torch.equal(was[part], now[part]), part
    for part in ("codes", "scale"):
        assert torch.equal(torch.cat([was[part] for was in saved]), alone[part]), part
    assert torch.equal(
        saved[0]["weight"], alone["weight"]
    )  # each step's blocks are the same blocks
