"""Every name of the table of arguments: that it is there, its default, where it leads, or why it is
refused."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import ckpt_trainers.arguments as arguments
import pytest
import yaml
from ckpt_trainers.arguments import (
    InvalidArgument,
    TrainingArguments,
    known_names,
    resolve_arguments,
)

FACTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("argument_facts.yaml").read_text())
CLASSES = list(FACTS["native"])
LINE = "arguments without effect"


def attribute(args: Any, path: str) -> Any:
    for name in path.split("."):
        args = getattr(args, name)
    return (
        dataclasses.asdict(args)
        if dataclasses.is_dataclass(args) and not isinstance(args, type)
        else args
    )


def own_and_inherited(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(getattr(arguments, name).__mro__):
        found |= FACTS["native"].get(base.__name__, {})
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_the_fields_of_the_table_with_their_defaults_and_no_others(name: str) -> None:
    made = getattr(arguments, name)()
    expected = own_and_inherited(name)
    assert {field.name for field in dataclasses.fields(made)} == set(expected)
    for field, default in expected.items():
        found = attribute(made, field)
        assert (type(found), found) == (type(default), default), field


def test_the_hierarchy() -> None:
    leaves = (
        "AccelTrainingArguments",
        "DDPTrainingArguments",
        "FSDP2TrainingArguments",
        "PipelineTrainingArguments",
    )
    for leaf in leaves:
        assert getattr(arguments, leaf).__bases__ == (TrainingArguments,)
    names = [base.__name__ for base in TrainingArguments.__mro__]
    assert names == [
        "TrainingArguments",
        "BaseTrainingArguments",
        "MinimalTrainingArguments",
        "Arguments",
        "object",
    ]


@pytest.mark.parametrize("name", FACTS["alias"])
def test_an_alias_sets_its_target_and_at_its_default_nothing(name: str) -> None:
    _, default, class_name, value, target, expected = FACTS["alias"][name]
    cls = getattr(arguments, class_name)
    assert attribute(resolve_arguments(cls, {name: value}), target) == expected
    assert resolve_arguments(cls, {name: default}) == cls()
    assert resolve_arguments(cls, {name: None}) == cls()


@pytest.mark.parametrize("name", FACTS["no_effect"])
def test_a_name_without_effect_says_so_in_one_line_of_rank_0(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, default, other, words = FACTS["no_effect"][name]
    caplog.set_level(logging.INFO, logger="ckpt_trainers.arguments")
    monkeypatch.delenv("RANK", raising=False)
    assert resolve_arguments(TrainingArguments, {name: default}) == TrainingArguments()
    assert caplog.records == []
    assert resolve_arguments(TrainingArguments, {name: other}) == TrainingArguments()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert LINE in record.message and name in record.message and words in record.message
    monkeypatch.setenv("RANK", "1")
    resolve_arguments(TrainingArguments, {name: other})
    assert len(caplog.records) == 1


def test_all_names_without_effect_share_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ckpt_trainers.arguments")
    resolve_arguments(TrainingArguments, {name: row[2] for name, row in FACTS["no_effect"].items()})
    (record,) = caplog.records
    assert all(f"{name} (" in record.message for name in FACTS["no_effect"])


@pytest.mark.parametrize("class_name", CLASSES)
@pytest.mark.parametrize("name", FACTS["reject"])
def test_a_refused_name_says_why_and_what_to_use_unless_it_is_at_its_default(
    name: str, class_name: str
) -> None:
    _, default, other, instead = FACTS["reject"][name]
    cls = getattr(arguments, class_name)
    if name != "remove_unused_columns":
        assert resolve_arguments(cls, {name: default}) == cls()
    with pytest.raises(InvalidArgument) as caught:
        resolve_arguments(cls, {name: other})
    assert caught.value.name == name
    assert str(caught.value).startswith(f"{name}=")
    assert instead in caught.value.instead
    assert caught.value.reason and caught.value.reason in str(caught.value)


def test_columns_are_never_removed() -> None:
    assert (
        resolve_arguments(TrainingArguments, {"remove_unused_columns": False})
        == TrainingArguments()
    )
    with pytest.raises(InvalidArgument, match="columns are never removed"):
        resolve_arguments(TrainingArguments, {"remove_unused_columns": True})


@pytest.mark.parametrize(
    "name", ["hub_token", "push_to_hub_token", "hub_tokens", "learning_rate", "made_up"]
)
def test_secrets_are_not_repeated(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve_arguments(TrainingArguments, {name: "hf_SeCrEt"})
    assert "SeCrEt" not in str(caught.value) + repr(caught.value) + str(caught.value.value)
    assert name in str(caught.value)


def test_the_global_batch_is_no_input() -> None:
    with pytest.raises(InvalidArgument, match="set per_device_train_batch_size"):
        resolve_arguments(TrainingArguments, {"train_batch_size": 16})


@pytest.mark.parametrize("given", ["all", "wandb", ["tensorboard", "mlflow"]])
def test_another_reporter_is_refused_with_the_choices(given: object) -> None:
    with pytest.raises(InvalidArgument, match="tensorboard, json or none"):
        resolve_arguments(TrainingArguments, {"report_to": given})


def test_reporters() -> None:
    for given, expected in (
        ("none", ()),
        ([], ()),
        (None, ()),
        ("json", ("json",)),
        (["tensorboard", "json"], ("tensorboard", "json")),
    ):
        assert resolve_arguments(TrainingArguments, {"report_to": given}).reporters == expected


def sources(kind: str) -> dict[str, str]:
    return {name: row if isinstance(row, str) else row[0] for name, row in FACTS[kind].items()}


def test_every_name_of_both_lists_is_known() -> None:
    native = set(FACTS["of_hugging_face"].split())
    assert native <= set(own_and_inherited("TrainingArguments"))
    of = {kind: sources(kind) for kind in ("implement", "alias", "no_effect", "reject")}
    distinct = native | {
        name for rows in of.values() for name, source in rows.items() if source != "X"
    }
    elsewhere = {name for rows in of.values() for name, source in rows.items() if source == "X"}
    assert elsewhere == {
        "enable_jit_checkpoint",
        "no_cuda",
        "per_gpu_train_batch_size",
        "per_gpu_eval_batch_size",
    }
    assert distinct | elsewhere <= set(known_names(TrainingArguments))


def test_the_names_of_optimizers() -> None:
    taken = FACTS["optimizers"]["taken"]
    refused = {
        name: package for package, names in FACTS["optimizers"]["refused"].items() for name in names
    }
    assert (len(taken), len(refused)) == (8, 35)
    for name in taken:
        assert TrainingArguments(optim=name).optim == name
    for name, package in refused.items():
        with pytest.raises(InvalidArgument) as caught:
            TrainingArguments(optim=name)
        assert caught.value.name == "optim" and caught.value.value == name
        assert package in str(caught.value) and "optimizer_factory" in caught.value.instead
        if package == "bitsandbytes" and "adamw" in name:
            assert "use adamw_torch_8bit" in caught.value.instead
    with pytest.raises(InvalidArgument, match=r"unknown.*adamw_torch_fused.*optimizer_factory"):
        TrainingArguments(optim="adamw")


@pytest.mark.parametrize(
    ("given", "close"),
    [
        ("learningrate", "learning_rate"),
        ("max_step", "max_steps"),
        ("evaluation_stratgy", "evaluation_strategy"),
        ("ddp_bucket_cap", "ddp_bucket_cap_mb"),
    ],
)
def test_an_unknown_name_is_refused_with_close_ones(given: str, close: str) -> None:
    with pytest.raises(InvalidArgument, match="unknown name") as caught:
        resolve_arguments(TrainingArguments, {given: 1})
    assert caught.value.name == given
    offered = caught.value.instead.removeprefix("did you mean ").removesuffix("?").split(", ")
    assert close in offered and 1 <= len(offered) <= 3


def test_a_name_that_is_like_a_refused_one_alone_is_answered_with_the_refusal() -> None:
    with pytest.raises(
        InvalidArgument,
        match="push_to_hub would be refused: nothing is uploaded; upload output_dir",
    ):
        resolve_arguments(TrainingArguments, {"push_to_hubb": 1})


def test_an_unknown_name_like_no_other() -> None:
    with pytest.raises(
        InvalidArgument, match=r"zzqqxx=1: unknown name; leave it out, or see docs/arguments\.md"
    ):
        resolve_arguments(TrainingArguments, {"zzqqxx": 1})


@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        ("ddp", "DDPTrainer"),
        ("fsdp2", "FSDP2Trainer"),
        ("n_microbatches", "PipelineTrainer"),
        ("post_local_sgd", "DDPTrainer"),
    ],
)
def test_an_argument_of_another_trainer_names_it(name: str, trainer: str) -> None:
    with pytest.raises(InvalidArgument, match=f"an argument of {trainer} only"):
        resolve_arguments(TrainingArguments, {name: {}})
