"""Optimizers from arguments, and parameters into groups by name."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import DDPTrainingArguments, InvalidArgument, TrainingArguments
from ckpt_trainers.optim import (
    DEFAULT_GROUP,
    make_optimizer,
    optimizer_class,
    parameter_groups,
    parameter_names,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptcore.state.optimizers import OptimizerState


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2)
        )
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).sum()  # type: ignore[no-any-return]


NO_DECAY = {"no_decay": {"regex": r"embedding|bias|\.0\.weight$", "config": {"weight_decay": 0.0}}}


def names_in(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, set[str]]:
    of = {parameter: name for name, parameter in model.named_parameters()}
    return {
        group["name"]: {of[parameter] for parameter in group["params"]}
        for group in optimizer.param_groups
    }


@pytest.mark.parametrize(
    ("given", "cls", "expected"),
    [
        (
            {},
            torch.optim.AdamW,
            {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "fused": None},
        ),
        (
            {
                "learning_rate": 0.1,
                "adam_beta1": 0.5,
                "adam_beta2": 0.6,
                "adam_epsilon": 0.01,
                "weight_decay": 0.2,
            },
            torch.optim.AdamW,
            {"lr": 0.1, "betas": (0.5, 0.6), "eps": 0.01, "weight_decay": 0.2},
        ),
        ({"optim": "adamw_torch_fused"}, torch.optim.AdamW, {"fused": True, "betas": (0.9, 0.999)}),
        (
            {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True"},
            torch.optim.SGD,
            {"lr": 5e-5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
        ),
        (
            {"optim": "adagrad", "optim_args": {"lr_decay": 0.1, "eps": 0.5}},
            torch.optim.Adagrad,
            {"lr_decay": 0.1, "eps": 0.5},
        ),
        (
            {"optim": "rmsprop", "optim_args": "alpha=0.5", "weight_decay": 0.1},
            torch.optim.RMSprop,
            {"alpha": 0.5, "weight_decay": 0.1},
        ),
        (
            {"optim": "adafactor"},
            torch.optim.Adafactor,
            {"beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "lr": 5e-5},
        ),
        (
            {"optim": "adafactor", "optim_args": "beta2_decay=-0.5,eps=(1e-9,1e-2),d=2.0"},
            torch.optim.Adafactor,
            {"beta2_decay": -0.5, "eps": (1e-9, 1e-2), "d": 2.0},
        ),
    ],
)
def test_optimizers_by_name(given: dict[str, Any], cls: type, expected: dict[str, Any]) -> None:
    model = Tiny()
    optimizer = make_optimizer(TrainingArguments(**given), model)
    assert type(optimizer) is cls
    (group,) = optimizer.param_groups
    assert group["name"] == DEFAULT_GROUP and len(group["params"]) == 9
    assert {name: group[name] for name in expected} == expected
    model(torch.arange(5)).backward()
    optimizer.step()


def test_an_option_that_the_class_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(
        InvalidArgument,
        match=r"optim_args.nesterov=True: AdamW has no such option; there are amsgrad",
    ):
        optimizer_class(TrainingArguments(optim_args="nesterov=True"))
    with pytest.raises(
        InvalidArgument, match=r"optim_args.fused=False: adamw_torch_fused is fused"
    ):
        optimizer_class(TrainingArguments(optim="adamw_torch_fused", optim_args="fused=False"))
    with pytest.raises(InvalidArgument, match=r"optim_args.params"):
        optimizer_class(TrainingArguments(optim_args="params=1"))


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_optimizers_of_few_bits_without_their_package(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(
        InvalidArgument, match=r"needs torchao.optim.*install torchao >= 0.4, or use adamw_torch"
    ):
        make_optimizer(TrainingArguments(optim=name), Tiny())


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_optimizers_of_few_bits_have_rates_in_tensors(name: str) -> None:
    from ckpt_trainers.optim import make_scheduler

    args = TrainingArguments(optim=name, learning_rate=0.5)
    optimizer = make_optimizer(args, Tiny(), groups=NO_DECAY)
    assert [group["name"] for group in optimizer.param_groups] == [DEFAULT_GROUP, "no_decay"]
    held = optimizer.param_groups[0]["lr"]
    scheduler = make_scheduler(args, optimizer, 4)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is held and held.item() == 0.375


def test_groups_by_name() -> None:
    model = Tiny()
    optimizer = make_optimizer(TrainingArguments(weight_decay=0.1), model, groups=NO_DECAY)
    assert names_in(optimizer, model) == {
        "default": {"layers.0.1.weight", "layers.1.1.weight"},
        "no_decay": {
            "embedding.weight",
            "layers.0.0.weight",
            "layers.0.0.bias",
            "layers.0.1.bias",
            "layers.1.0.weight",
            "layers.1.0.bias",
            "layers.1.1.bias",
        },
    }
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert len(optimizer.param_groups[1]["params"]) == 7


def test_the_first_group_in_the_order_of_the_mapping_wins() -> None:
    groups = {
        "late": {"regex": r"layers\.1"},
        "biases": {"regex": "bias$", "config": None},
        "layers": {"regex": "layers"},
    }
    found = names_in(make_optimizer(TrainingArguments(), model := Tiny(), groups=groups), model)
    assert list(found) == ["default", "late", "biases", "layers"]
    assert found["default"] == {"embedding.weight"}
    assert found["late"] == {f"layers.1.{n}.{w}" for n in (0, 1) for w in ("weight", "bias")}
    assert found["biases"] == {"layers.0.0.bias", "layers.0.1.bias"}
    assert found["layers"] == {"layers.0.0.weight", "layers.0.1.weight"}


def test_a_group_at_none_is_gone_and_an_empty_one_dropped() -> None:
    inherited: dict[str, Any] = {**NO_DECAY, "other": {"regex": "nothing here"}}
    assert [g["name"] for g in parameter_groups(Tiny(), {**inherited, "no_decay": None})] == [
        "default"
    ]
    redefined = parameter_groups(Tiny(), {**inherited, "no_decay": {"regex": "bias"}})
    assert redefined[1].keys() == {"params", "name"}  # the whole spec is replaced, config too
    everything = parameter_groups(Tiny(), {"all": {"regex": ""}})
    assert [g["name"] for g in everything] == ["all"]


def test_frozen_parameters_are_skipped() -> None:
    model = Tiny()
    model.layers[0].requires_grad_(False)
    names = [name for name, _ in parameter_names(model)]
    assert len(names) == 5 and not any(name.startswith("layers.0") for name in names)
    with pytest.raises(InvalidArgument, match="no parameter of it is trainable"):
        make_optimizer(TrainingArguments(), model.requires_grad_(False))


@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.sampled_from([r"\.0\.", "bias", "weight", "^layers", "head", "norm", "1", "layers.1.1"]),
        max_size=4,
    ),
    st.sets(st.integers(0, 8)),
)
def test_no_trainable_parameter_is_lost_or_taken_twice(
    patterns: dict[str, str], frozen: set[int]
) -> None:
    model = Tiny()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number not in frozen)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = {name: {"regex": pattern} for name, pattern in patterns.items()}
    if not trainable:
        return
    made = parameter_groups(model, groups)
    taken = [id(parameter) for group in made for parameter in group["params"]]
    assert sorted(taken) == sorted(id(parameter) for parameter in trainable.values())
    of = {id(parameter): group["name"] for group in made for parameter in group["params"]}
    for name, parameter in trainable.items():
        matching = [group for group, pattern in patterns.items() if re.search(pattern, name)]
        assert of[id(parameter)] == (matching[0] if matching else DEFAULT_GROUP)
    assert all(group["params"] for group in made)


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        ({"a": {"regex": "("}}, "optimizer_groups.a.regex"),
        ({"a": {"regex": "x", "lr": 1}}, "optimizer_groups.a"),
        ({"a": {"config": {}}}, "optimizer_groups.a"),
        ({"a": "x"}, "optimizer_groups.a"),
        ({"default": {"regex": "x"}}, "optimizer_groups.default"),
        (
            {"a": {"regex": "bias", "config": {"weight_dekay": 0.0}}},
            "optimizer_groups.a.config.weight_dekay",
        ),
        ({"a": {"regex": "bias", "config": {"name": "b"}}}, "optimizer_groups.a.config"),
        (
            {"a": {"regex": "nothing", "config": {"momentum": 0.0}}},
            "optimizer_groups.a.config.momentum",
        ),
    ],
)
def test_groups_that_make_no_sense(groups: Any, name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_optimizer(TrainingArguments(), Tiny(), groups=groups)
    assert caught.value.name == name


def test_a_factory_comes_first_and_gets_the_groups() -> None:
    given: list[Any] = []

    def factory(params: Any) -> torch.optim.Optimizer:
        given.extend(params)
        return torch.optim.SGD(params, lr=0.5, momentum=0.9)

    optimizer = make_optimizer(TrainingArguments(), Tiny(), factory=factory, groups=NO_DECAY)
    assert [group["name"] for group in given] == ["default", "no_decay"]
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.5, 0),
        (0.5, 0.0),
    ]
    with pytest.raises(InvalidArgument, match="SGD has no such option"):
        make_optimizer(
            TrainingArguments(),
            Tiny(),
            factory=factory,
            groups={"a": {"regex": "b", "config": {"betas": 1}}},
        )


def test_a_class_and_its_arguments_come_second() -> None:
    choice = (torch.optim.SGD, {"lr": 0.25})
    optimizer = make_optimizer(
        TrainingArguments(learning_rate=1.0), Tiny(), cls_and_kwargs=choice, groups=NO_DECAY
    )
    assert type(optimizer) is torch.optim.SGD and [g["lr"] for g in optimizer.param_groups] == [
        0.25,
        0.25,
    ]
    with pytest.raises(InvalidArgument, match="give one of the two"):
        TrainingArguments().check_parts(
            "single",
            model=Tiny(),
            optimizer_factory=torch.optim.SGD,
            optimizer_cls_and_kwargs=choice,
        )


def test_names_are_those_of_the_unwrapped_model() -> None:
    class WithModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)  # a name of its own, no wrapper

    wrapped = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    assert [name for name, _ in parameter_names(wrapped)] == ["0.weight", "0.bias"]  # type: ignore[arg-type]
    assert [name for name, _ in parameter_names(WithModule())] == ["module.weight", "module.bias"]
    inner = nn.Sequential(nn.Linear(2, 2))
    inner[0] = torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper(
        inner[0]
    )
    assert [name for name, _ in parameter_names(inner)] == ["0.weight", "0.bias"]


def test_stages_keep_empty_groups_so_that_numbers_agree() -> None:
    model = Tiny()
    groups = {"embedding": {"regex": "weight", "config": {"lr": 1.0}}, "nothing": {"regex": "zzz"}}
    optimizer = make_optimizer(
        TrainingArguments(), [model.layers[0], model.layers[1]], groups=groups
    )  # type: ignore[list-item]
    assert [(group["name"], len(group["params"])) for group in optimizer.param_groups] == [
        ("default", 4),
        ("embedding", 4),
        ("nothing", 0),
    ]
    model(torch.arange(5)).backward()
    optimizer.step()
    shared = parameter_groups([model, model.layers[0]])  # type: ignore[list-item]
    assert len(shared[0]["params"]) == 9  # what two modules share is counted once


def test_the_names_of_groups_are_in_the_saved_state() -> None:
    model = Tiny()
    optimizer = make_optimizer(TrainingArguments(), model, groups=NO_DECAY)
    saved = OptimizerState(optimizer, model).state_dict()
    assert {number: options["name"] for number, options in saved["groups"].items()} == {
        0: "default",
        1: "no_decay",
    }
    assert (
        saved["group_of"]["layers.0.1.weight"] == 0 and saved["group_of"]["embedding.weight"] == 1
    )


def test_which_parameter_went_where_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make_optimizer(DDPTrainingArguments(debug_optimizer_groups=True), Tiny(), groups=NO_DECAY)
    assert len(caplog.records) == 9
    assert "optimizer group no_decay: embedding.weight [5, 4]" in caplog.messages
    make_optimizer(TrainingArguments(), Tiny())
    assert len(caplog.records) == 9
