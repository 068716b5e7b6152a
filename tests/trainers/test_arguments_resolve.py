"""Aliases, contradictions, types, nested arguments, fsdp and accelerator settings, and a whole
pasted dump."""

from __future__ import annotations

import dataclasses
import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import ckpt_trainers.arguments as arguments
import pytest
from ckpt_trainers.arguments import (
    AccelTrainingArguments,
    DDPArguments,
    DDPTrainingArguments,
    FSDP2Arguments,
    FSDP2TrainingArguments,
    InvalidArgument,
    MinimalTrainingArguments,
    PipelineTrainingArguments,
    TrainingArguments,
    resolve_arguments,
)

DUMP: dict[str, Any] = json.loads(Path(__file__).with_name("hf_dump.json").read_text())
LEAVES = [
    "TrainingArguments",
    "AccelTrainingArguments",
    "DDPTrainingArguments",
    "FSDP2TrainingArguments",
    "PipelineTrainingArguments",
]


def refused(cls: Any, given: dict[str, Any]) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        resolve_arguments(cls, given)
    assert isinstance(caught.value, ValueError)
    return caught.value


@pytest.mark.parametrize("name", LEAVES)
def test_a_pasted_dump_of_untouched_hugging_face_arguments_loads_but_for_two_names(
    name: str,
) -> None:
    cls = getattr(arguments, name)
    assert refused(cls, DUMP).name in ("remove_unused_columns", "report_to")
    first = refused(cls, {**DUMP, "report_to": "none"})
    assert (first.name, first.value) == ("remove_unused_columns", True)
    assert refused(cls, {**DUMP, "remove_unused_columns": False}).name == "report_to"
    args = resolve_arguments(cls, {**DUMP, "remove_unused_columns": False, "report_to": "none"})
    assert type(args) is cls
    # Theirs where they say something, ours where they leave it open.
    assert (
        args.per_device_train_batch_size,
        args.num_train_epochs,
        args.seed,
        args.max_grad_norm,
    ) == (8, 3.0, 42, 1.0)
    assert (args.logging_steps, args.save_steps, args.save_total_limit) == (500, 500, None)
    assert (args.eval_steps, args.metric_for_best_model, args.resume_from_checkpoint) == (
        100,
        "loss",
        True,
    )
    assert (args.logging_nan_inf_filter, args.include_num_input_tokens_seen) == (True, False)
    assert args.mixed_precision is None and args.torch_compile is False
    for group in ("ddp", "fsdp2", "post_local_sgd"):
        if hasattr(args, group):
            assert getattr(args, group) == getattr(cls(), group)
    if cls is AccelTrainingArguments:
        assert args.accelerator_config == {
            "split_batches": False,
            "even_batches": True,
            "use_seedable_sampler": True,
            "non_blocking": False,
        }


@pytest.mark.parametrize(
    "values", [{"bf16": True, "torchdynamo": "eager", "lr": 1e-3, "evaluation_strategy": "epoch"}]
)
def test_several_aliases_at_once(values: dict[str, Any]) -> None:
    args = resolve_arguments(TrainingArguments, values)
    assert (args.mixed_precision, args.torch_compile, args.torch_compile_backend) == (
        "bf16",
        True,
        "eager",
    )
    assert (args.learning_rate, args.eval_strategy) == (1e-3, "epoch")
    assert not any(hasattr(args, name) for name in values)  # only the canonical names are stored


@pytest.mark.parametrize(
    ("cls", "given", "names"),
    [
        (TrainingArguments, {"lr": 1e-3, "learning_rate": 1e-2}, ("lr", "learning_rate")),
        (
            TrainingArguments,
            {"per_gpu_train_batch_size": 4, "per_device_train_batch_size": 8},
            ("per_gpu_train_batch_size", "per_device_train_batch_size"),
        ),
        (TrainingArguments, {"bf16": True, "fp16": True}, ("bf16", "fp16")),
        (TrainingArguments, {"bf16": True, "mixed_precision": "fp16"}, ("bf16", "mixed_precision")),
        (TrainingArguments, {"fp16": True, "mixed_precision": "no"}, ("fp16", "mixed_precision")),
        (
            TrainingArguments,
            {"tf32": True, "float32_matmul_precision": "medium"},
            ("tf32", "float32_matmul_precision"),
        ),
        (
            TrainingArguments,
            {"torchdynamo": "eager", "torch_compile_backend": "aot_eager"},
            ("torchdynamo", "torch_compile_backend"),
        ),
        (
            TrainingArguments,
            {"evaluation_strategy": "epoch", "eval_strategy": "steps"},
            ("evaluation_strategy", "eval_strategy"),
        ),
        (
            TrainingArguments,
            {"best_model_metric": "f1", "metric_for_best_model": "acc"},
            ("best_model_metric", "metric_for_best_model"),
        ),
        (
            TrainingArguments,
            {"greater_is_better": True, "best_model_greater_is_better": False},
            ("greater_is_better", "best_model_greater_is_better"),
        ),
        (
            DDPTrainingArguments,
            {"ddp_bucket_cap_mb": 4, "ddp": {"bucket_cap_mb": 5}},
            ("ddp_bucket_cap_mb", "ddp.bucket_cap_mb"),
        ),
        (
            DDPTrainingArguments,
            {"ddp_bucket_cap_mb": 4, "ddp": DDPArguments(bucket_cap_mb=5)},
            ("ddp_bucket_cap_mb", "ddp.bucket_cap_mb"),
        ),
        (
            AccelTrainingArguments,
            {
                "split_batches": True,
                "accelerator_config": {"dispatch_batches": False},
                "dispatch_batches": True,
            },
            ("dispatch_batches", "accelerator_config.dispatch_batches"),
        ),
        (
            FSDP2TrainingArguments,
            {"fsdp": "full_shard", "fsdp2": {"reshard_after_forward": False}},
            ("fsdp", "fsdp2.reshard_after_forward"),
        ),
        (
            FSDP2TrainingArguments,
            {"fsdp": "offload", "fsdp2": {"cpu_offload": False}},
            ("fsdp", "fsdp2.cpu_offload"),
        ),
        (
            FSDP2TrainingArguments,
            {"fsdp": "full_shard", "fsdp2": FSDP2Arguments(reshard_after_forward=2)},
            ("fsdp", "fsdp2.reshard_after_forward"),
        ),
        (
            FSDP2TrainingArguments,
            {"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": False}},
            ("fsdp_config.reshard_after_forward", "fsdp=full_shard"),
        ),
        (
            FSDP2TrainingArguments,
            {"fsdp": "full_shard shard_grad_op"},
            ("fsdp=shard_grad_op", "fsdp=full_shard"),
        ),
    ],
)
def test_contradictions_name_both(cls: type, given: dict[str, Any], names: tuple[str, str]) -> None:
    message = str(refused(cls, given))
    assert all(name in message for name in names), message


def test_an_alias_may_repeat_what_its_target_says_or_fill_in_a_default() -> None:
    assert (
        resolve_arguments(TrainingArguments, {"lr": 1e-3, "learning_rate": 1e-3}).learning_rate
        == 1e-3
    )
    assert (
        resolve_arguments(TrainingArguments, {"lr": 5e-5, "learning_rate": 1e-3}).learning_rate
        == 1e-3
    )
    assert (
        resolve_arguments(
            TrainingArguments, {"bf16": False, "mixed_precision": "fp16"}
        ).mixed_precision
        == "fp16"
    )
    assert (
        resolve_arguments(TrainingArguments, {"tf32": False}).float32_matmul_precision == "highest"
    )
    assert (
        resolve_arguments(TrainingArguments, {"best_model_metric": "f1"}).metric_for_best_model
        == "f1"
    )
    assert TrainingArguments(greater_is_better=True).best_model_greater_is_better is True
    assert resolve_arguments(TrainingArguments, {"adafactor": True}).optim == "adafactor"


@pytest.mark.parametrize(
    "name",
    [
        "ddp_bucket_cap_mb",
        "ddp_find_unused_parameters",
        "ddp_broadcast_buffers",
        "ddp_gradient_as_bucket_view",
    ],
)
@pytest.mark.parametrize(
    "cls",
    [TrainingArguments, FSDP2TrainingArguments, PipelineTrainingArguments, AccelTrainingArguments],
)
def test_settings_of_ddp_are_for_ddp(cls: type, name: str) -> None:
    assert resolve_arguments(cls, {name: None}) == cls()
    assert "DDPTrainer" in refused(cls, {name: 4}).instead


@pytest.mark.parametrize(
    ("name", "value", "owners"),
    [
        ("fsdp", True, ["FSDP2TrainingArguments"]),
        ("fsdp_config", {"version": 2}, ["FSDP2TrainingArguments"]),
        ("accelerator_config", {"even_batches": False}, ["AccelTrainingArguments"]),
        ("split_batches", True, ["AccelTrainingArguments"]),
        (
            "dispatch_batches",
            False,
            ["AccelTrainingArguments", "DDPTrainingArguments", "FSDP2TrainingArguments"],
        ),
    ],
)
@pytest.mark.parametrize("leaf", LEAVES)
def test_what_only_some_trainers_take(
    leaf: str, name: str, value: object, owners: list[str]
) -> None:
    cls = getattr(arguments, leaf)
    if leaf in owners:
        assert type(resolve_arguments(cls, {name: value})) is cls
    else:
        error = refused(cls, {name: value})
        assert error.name == name and owners[0].replace("ingArguments", "er") in error.instead


@pytest.mark.parametrize(
    ("fsdp", "config", "expected"),
    [
        (True, None, {"reshard_after_forward": True}),
        (
            "full_shard auto_wrap offload",
            None,
            {"cpu_offload": True, "shard_transformer_layers": True},
        ),
        (["shard_grad_op", "auto_wrap"], {}, {"reshard_after_forward": False}),
        ("hybrid_shard", None, {"reshard_after_forward": 4}),
        (
            "",
            {"fsdp_reshard_after_forward": False, "fsdp_cpu_offload": True, "fsdp_version": 2},
            {"reshard_after_forward": False, "cpu_offload": True},
        ),
        (
            None,
            {"reshard_after_forward": 2, "min_num_params": 0, "backward_prefetch": None},
            {"reshard_after_forward": 2},
        ),
    ],
)
def test_fsdp(
    fsdp: Any,
    config: Any,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    wanted = dataclasses.replace(FSDP2Arguments(), **expected)
    assert (
        resolve_arguments(FSDP2TrainingArguments, {"fsdp": fsdp, "fsdp_config": config}).fsdp2
        == wanted
    )
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps(config or {}))
    assert (
        resolve_arguments(FSDP2TrainingArguments, {"fsdp": fsdp, "fsdp_config": str(path)}).fsdp2
        == wanted
    )


def test_fsdp_activation_checkpointing_is_gradient_checkpointing() -> None:
    given = {"fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": False}
    assert resolve_arguments(FSDP2TrainingArguments, given).gradient_checkpointing is True


@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        ({"fsdp": "no_shard"}, "fsdp", "use DDPTrainer"),
        ({"fsdp": "full_shard hybrid_shard_zero2"}, "fsdp", "hybrid_shard"),
        ({"fsdp": 3}, "fsdp", "is of type int"),
        ({"fsdp": "hybrid_shard"}, "fsdp", "set fsdp2.reshard_after_forward"),
        ({"fsdp_config": {"version": 1}}, "fsdp_config.version", "version 2"),
        (
            {"fsdp_config": {"fsdp_min_num_params": 9}},
            "fsdp_config.fsdp_min_num_params",
            "fsdp2.transformer_layers_path",
        ),
        (
            {"fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"]}},
            "fsdp_config.transformer_layer_cls_to_wrap",
            "fsdp2.transformer_layers_path",
        ),
        (
            {"fsdp_config": {"backward_prefetch": "backward_pre"}},
            "fsdp_config.backward_prefetch",
            "no such setting",
        ),
        (
            {"fsdp_config": {"limit_all_gathers": True}},
            "fsdp_config.limit_all_gathers",
            "no such setting",
        ),
        ({"fsdp_config": "nowhere.json"}, "fsdp_config", "cannot be read"),
        ({"fsdp_config": [1]}, "fsdp_config", "is of type list"),
    ],
)
def test_what_fsdp_cannot_be(
    given: dict[str, Any], name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    error = refused(FSDP2TrainingArguments, given)
    assert error.name == name and words in str(error)


def test_settings_of_an_accelerator(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Config:
        even_batches: bool = False
        gradient_accumulation_kwargs: dict[str, Any] | None = None

    def settings(**given: Any) -> dict[str, Any]:
        return resolve_arguments(AccelTrainingArguments, given).accelerator_config

    path = tmp_path / "accelerator.json"
    path.write_text('{"non_blocking": true}')
    assert settings() == {}
    assert settings(accelerator_config=Config()) == {"even_batches": False}
    assert settings(accelerator_config=str(path), split_batches=True) == {
        "non_blocking": True,
        "split_batches": True,
    }
    assert settings(dispatch_batches=False) == {"dispatch_batches": False}
    error = refused(AccelTrainingArguments, {"accelerator_config": {"evn_batches": True}})
    assert error.name == "accelerator_config.evn_batches" and "even_batches" in error.instead
    assert refused(AccelTrainingArguments, {"accelerator_config": {"even_batches": 1}}).value == 1
    pytest.importorskip("accelerate")
    assert settings(accelerator_config={"use_stateful_dataloader": True}) == {
        "use_stateful_dataloader": True
    }


@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        ({"max_steps": "10"}, "max_steps", "is of type str; give a whole number"),
        ({"max_steps": True}, "max_steps", "is of type bool"),
        ({"learning_rate": "1e-4"}, "learning_rate", "give a number"),
        ({"learning_rate": None}, "learning_rate", "is of type NoneType"),
        ({"torch_compile": "yes"}, "torch_compile", "give True or False"),
        (
            {"eval_strategy": False},
            "eval_strategy",
            "is of type bool; give one of no, steps, epoch",
        ),
        ({"lr_scheduler_kwargs": [1]}, "lr_scheduler_kwargs", "give a mapping or None"),
        ({"bf16": "true"}, "bf16", "give True or False"),
        ({"ddp": 3}, "ddp", "a mapping or DDPArguments"),
        ({"ddp": {"static_graph": 1}}, "ddp.static_graph", "is of type int"),
        ({"ddp": {"bucket_cap": 1}}, "ddp.bucket_cap", "bucket_cap_mb"),
        ({"ddp": {"bucket_cap_mb": 0}}, "ddp.bucket_cap_mb", "out of range"),
        ({"post_local_sgd": {"period": 0}}, "post_local_sgd.period", "out of range"),
    ],
)
def test_types_are_checked(given: dict[str, Any], name: str, words: str) -> None:
    error = refused(DDPTrainingArguments, given)
    assert error.name == name and words in str(error)


def test_values_are_made_plain() -> None:
    class Strategy(StrEnum):
        EPOCH = "epoch"

    args = resolve_arguments(
        DDPTrainingArguments,
        {
            "eval_strategy": Strategy.EPOCH,
            "output_dir": Path("a/b"),
            "num_train_epochs": 2,
            "ddp": {"static_graph": True},
            "lr_scheduler_kwargs": None,
            "include_num_input_tokens_seen": "all",
            "report_to": ("json",),
        },
    )
    assert type(args.eval_strategy) is str and args.eval_strategy == "epoch"
    assert (args.output_dir, args.num_train_epochs, args.lr_scheduler_kwargs) == ("a/b", 2.0, {})
    assert type(args.num_train_epochs) is float
    assert args.ddp == DDPArguments(static_graph=True)
    assert args.include_num_input_tokens_seen is True and args.report_to == ["json"]
    assert DDPTrainingArguments(ddp={"static_graph": True}).ddp.static_graph is True  # type: ignore[arg-type]


def test_arguments_of_another_class_keep_what_they_say() -> None:
    plain = TrainingArguments(max_steps=7, mixed_precision="bf16")
    assert resolve_arguments(TrainingArguments, plain) is plain
    assert resolve_arguments(DDPTrainingArguments, plain) == DDPTrainingArguments(
        max_steps=7, mixed_precision="bf16"
    )
    pipeline = resolve_arguments(PipelineTrainingArguments, plain)
    assert type(pipeline) is PipelineTrainingArguments and pipeline.dataloader_drop_last is True
    assert resolve_arguments(
        TrainingArguments, DDPTrainingArguments(max_steps=7)
    ) == TrainingArguments(max_steps=7)
    assert resolve_arguments(TrainingArguments, MinimalTrainingArguments(seed=3)).seed == 3
    with pytest.raises(InvalidArgument, match=r"ddp=.*an argument of DDPTrainer only"):
        resolve_arguments(
            TrainingArguments, DDPTrainingArguments(ddp=DDPArguments(static_graph=True))
        )
    with pytest.raises(InvalidArgument, match="dispatch_batches=False"):
        resolve_arguments(TrainingArguments, DDPTrainingArguments(dispatch_batches=False))


def test_arguments_of_a_class_derived_by_a_user_stay_as_they_are() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Mine(TrainingArguments):
        temperature: float = 1.0

    mine = Mine(temperature=2)
    assert resolve_arguments(TrainingArguments, mine) is mine
    assert resolve_arguments(Mine, {"temperature": 3.0, "bf16": True}) == Mine(
        temperature=3.0, mixed_precision="bf16"
    )


def test_the_argument_that_was_given_is_left_alone() -> None:
    given = {"lr": 1e-3, "ddp": {"static_graph": True}, "ddp_bucket_cap_mb": 3, "do_train": True}
    before = json.dumps(given)
    resolve_arguments(DDPTrainingArguments, given)
    assert json.dumps(given) == before
