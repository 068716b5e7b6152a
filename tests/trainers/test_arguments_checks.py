"""Every constraint on native arguments, the support matrix, and what is compared when a run is
resumed."""

from __future__ import annotations

import json
from typing import Any

import ckpt_trainers.arguments as arguments
import pytest
import torch
import yaml
from ckpt_trainers.arguments import (
    BaseTrainingArguments,
    DDPArguments,
    DDPTrainingArguments,
    FSDP2Arguments,
    FSDP2TrainingArguments,
    InvalidArgument,
    MinimalTrainingArguments,
    PipelineTrainingArguments,
    TrainingArguments,
    load_configuration,
    print_configuration,
    resolve_arguments,
    steps_of,
)
from ckpt_trainers.arguments.exactness import NOT_COMPUTED
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

STEPS = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}

# Class, what is given, the argument that is named, a part of the message.
INVALID: list[tuple[type, dict[str, Any], str, str]] = [
    (
        MinimalTrainingArguments,
        {"num_train_epochs": -1.0},
        "num_train_epochs",
        "set max_steps above 0",
    ),
    (MinimalTrainingArguments, {"num_train_epochs": 0.0}, "num_train_epochs", "above 0"),
    (MinimalTrainingArguments, {"num_train_epochs": float("nan")}, "num_train_epochs", "finite"),
    (
        MinimalTrainingArguments,
        {"per_device_train_batch_size": 0},
        "per_device_train_batch_size",
        "from 1 up",
    ),
    (
        MinimalTrainingArguments,
        {"per_device_eval_batch_size": -1},
        "per_device_eval_batch_size",
        "from 1 up",
    ),
    (
        MinimalTrainingArguments,
        {"gradient_accumulation_steps": 0},
        "gradient_accumulation_steps",
        "from 1 up",
    ),
    (MinimalTrainingArguments, {"seed": -2}, "seed", "-1 does not seed"),
    (MinimalTrainingArguments, {"max_grad_norm": 0.0}, "max_grad_norm", "None does not clip"),
    (
        MinimalTrainingArguments,
        {"dataloader_persistent_workers": True},
        "dataloader_persistent_workers",
        "dataloader_num_workers above 0",
    ),
    (
        MinimalTrainingArguments,
        {"dataloader_prefetch_factor": 2},
        "dataloader_prefetch_factor",
        "dataloader_num_workers above 0",
    ),
    (MinimalTrainingArguments, {"eval_strategy": "often"}, "eval_strategy", "no, steps, epoch"),
    (
        MinimalTrainingArguments,
        {"logging_strategy": "best"},
        "logging_strategy",
        "no, steps, epoch",
    ),
    (
        MinimalTrainingArguments,
        {"save_strategy": "often"},
        "save_strategy",
        "no, steps, epoch, best",
    ),
    (MinimalTrainingArguments, {"save_strategy": "best"}, "save_strategy", "set eval_strategy"),
    (MinimalTrainingArguments, {"save_steps": 0}, "save_steps", "above 0"),
    (MinimalTrainingArguments, {"eval_steps": 2.5}, "eval_steps", "no whole number of steps"),
    (MinimalTrainingArguments, {"logging_steps": -0.1}, "logging_steps", "above 0"),
    (MinimalTrainingArguments, {"eval_delay": -1}, "eval_delay", "from 0"),
    (MinimalTrainingArguments, {"save_total_limit": 0}, "save_total_limit", "None keeps all"),
    (
        MinimalTrainingArguments,
        {"torch_compile_mode": "fast"},
        "torch_compile_mode",
        "max-autotune-no-cudagraphs",
    ),
    (
        MinimalTrainingArguments,
        {"torch_compile_mode": "max-autotune", "gradient_accumulation_steps": 2},
        "torch_compile_mode",
        "max-autotune-no-cudagraphs",
    ),
    (MinimalTrainingArguments, {"learning_rate": -1.0}, "learning_rate", "from 0"),
    (MinimalTrainingArguments, {"adam_beta1": 1.0}, "adam_beta1", "below 1"),
    (
        MinimalTrainingArguments,
        {"label_smoothing_factor": 1.0},
        "label_smoothing_factor",
        "below 1",
    ),
    (MinimalTrainingArguments, {"warmup_ratio": 1.5}, "warmup_ratio", "to 1"),
    (MinimalTrainingArguments, {"warmup_steps": -1}, "warmup_steps", "from 0 up"),
    (
        MinimalTrainingArguments,
        {"lr_scheduler_type": "inverse_sqrt"},
        "lr_scheduler_type",
        "lr_scheduler_factory",
    ),
    (
        MinimalTrainingArguments,
        {"lr_scheduler_kwargs": {"power": 2.0}},
        "lr_scheduler_kwargs.power",
        "linear takes none",
    ),
    (
        MinimalTrainingArguments,
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.1}},
        "lr_scheduler_kwargs.lr_end",
        "takes power only",
    ),
    (
        MinimalTrainingArguments,
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 0}},
        "lr_scheduler_kwargs.num_cycles",
        "above 0",
    ),
    (MinimalTrainingArguments, {"full_determinism": True}, "full_determinism", "set seed"),
    (
        MinimalTrainingArguments,
        {"log_level": "loud"},
        "log_level",
        "passive, debug, info, warning, error, critical",
    ),
    (MinimalTrainingArguments, {"log_level_replica": "loud"}, "log_level_replica", "critical"),
    (MinimalTrainingArguments, {"ddp_backend": "tcp"}, "ddp_backend", "nccl, gloo, mpi, ccl, hccl"),
    (MinimalTrainingArguments, {"ddp_timeout": 0}, "ddp_timeout", "from 1 up"),
    (
        MinimalTrainingArguments,
        {"torch_empty_cache_steps": 0},
        "torch_empty_cache_steps",
        "from 1 up",
    ),
    (
        MinimalTrainingArguments,
        {"include_num_input_tokens_seen": "some"},
        "include_num_input_tokens_seen",
        "non_padding",
    ),
    (
        MinimalTrainingArguments,
        {"on_world_size_change": "continue"},
        "on_world_size_change",
        "set max_steps",
    ),
    (MinimalTrainingArguments, {"optim_args": "momentum"}, "optim_args", "key=value"),
    (MinimalTrainingArguments, {"optim_args": "a=1)(b=2"}, "optim_args", "key=value"),
    (
        MinimalTrainingArguments,
        {"optim_args": "amsgrad=true"},
        "optim_args.amsgrad",
        "not a Python literal",
    ),
    (MinimalTrainingArguments, {"optim_args": "lr=1"}, "optim_args.lr", "set learning_rate"),
    (
        MinimalTrainingArguments,
        {"optim_args": {"weight_decay": 1}},
        "optim_args.weight_decay",
        "set weight_decay",
    ),
    (
        MinimalTrainingArguments,
        {"optim_args": "betas=(0.9, 0.9)"},
        "optim_args.betas",
        "set adam_beta1 and adam_beta2",
    ),
    (MinimalTrainingArguments, {"optim_args": "eps=1e-6"}, "optim_args.eps", "set adam_epsilon"),
    (
        MinimalTrainingArguments,
        {"load_best_model_at_end": True},
        "load_best_model_at_end",
        "do not match",
    ),
    (
        MinimalTrainingArguments,
        {"load_best_model_at_end": True, "save_strategy": "no"},
        "load_best_model_at_end",
        "do not match",
    ),
    (
        MinimalTrainingArguments,
        {**STEPS, "save_strategy": "epoch"},
        "load_best_model_at_end",
        "do not match",
    ),
    (
        MinimalTrainingArguments,
        {**STEPS, "save_steps": 25, "eval_steps": 10},
        "load_best_model_at_end",
        "no multiple",
    ),
    (
        MinimalTrainingArguments,
        {**STEPS, "save_steps": 5, "eval_steps": 10},
        "load_best_model_at_end",
        "no multiple",
    ),
    (
        MinimalTrainingArguments,
        {**STEPS, "save_steps": 0.5, "eval_steps": 10},
        "load_best_model_at_end",
        "no multiple",
    ),
    (
        BaseTrainingArguments,
        {"default_dtype": "int8"},
        "default_dtype",
        "float32, bfloat16, float16",
    ),
    (BaseTrainingArguments, {"mixed_precision": "fp8"}, "mixed_precision", "bf16, fp16"),
    (
        BaseTrainingArguments,
        {"float32_matmul_precision": "low"},
        "float32_matmul_precision",
        "highest, high, medium",
    ),
    (BaseTrainingArguments, {"fp8_recipe": "blockwise"}, "fp8_recipe", "rowwise_with_gw_hp"),
    (BaseTrainingArguments, {"qat_recipe": "int4"}, "qat_recipe", "int4-weight-only"),
    (
        BaseTrainingArguments,
        {"fp8_recipe": "rowwise", "qat_recipe": "int4-weight-only"},
        "fp8_recipe",
        "excludes qat_recipe",
    ),
    (BaseTrainingArguments, {"max_eval_steps": 0}, "max_eval_steps", "-1 evaluates on all"),
    (BaseTrainingArguments, {"preserve_n_best": 0}, "preserve_n_best", "from 1 up"),
    (
        BaseTrainingArguments,
        {"sdpa_backend": "xformers"},
        "sdpa_backend",
        "math, flash, efficient, cudnn",
    ),
    (BaseTrainingArguments, {"sdpa_backend": ["math", "x"]}, "sdpa_backend", "or a list"),
    (
        BaseTrainingArguments,
        {"sdpa_set_priority": True, "sdpa_backend": "math"},
        "sdpa_set_priority",
        "a list",
    ),
    (BaseTrainingArguments, {"dynamo_recompile_limit": 0}, "dynamo_recompile_limit", "from 1 up"),
    (TrainingArguments, {"gc_threshold": 1.5}, "gc_threshold", "to 1"),
    (
        TrainingArguments,
        {"construct_model_on": "gpu"},
        "construct_model_on",
        "default, device, meta",
    ),
    (
        TrainingArguments,
        {"activation_memory_budget": 0.5},
        "activation_memory_budget",
        "set torch_compile",
    ),
    (
        TrainingArguments,
        {"activation_memory_budget": 2.0, "torch_compile": True},
        "activation_memory_budget",
        "to 1",
    ),
    (
        TrainingArguments,
        {"fuse_optim_with_backward": True, "max_grad_norm": 1.0},
        "fuse_optim_with_backward",
        "max_grad_norm",
    ),
    (
        TrainingArguments,
        {"fuse_optim_with_backward": True, "gradient_accumulation_steps": 2},
        "fuse_optim_with_backward",
        "gradient_accumulation_steps",
    ),
    (
        TrainingArguments,
        {"fuse_optim_with_backward": True, "mixed_precision": "fp16"},
        "fuse_optim_with_backward",
        "fp16",
    ),
    (
        FSDP2TrainingArguments,
        {"fsdp2": {"reshard_after_forward": 0}},
        "fsdp2.reshard_after_forward",
        "from 1 up",
    ),
    (FSDP2TrainingArguments, {"fsdp2": {"param_dtype": "bf16"}}, "fsdp2.param_dtype", "bfloat16"),
    (
        PipelineTrainingArguments,
        {"n_microbatches": 3},
        "n_microbatches",
        "does not divide per_device_train_batch_size=16",
    ),
    (
        PipelineTrainingArguments,
        {"per_device_eval_batch_size": 6},
        "n_microbatches",
        "does not divide per_device_eval_batch_size=6",
    ),
    (PipelineTrainingArguments, {"stages_per_rank": 2}, "stages_per_rank", "is_multistage"),
    (PipelineTrainingArguments, {"pp_stage_type": "w"}, "pp_stage_type", "loop, v"),
    (PipelineTrainingArguments, {"mixed_precision": "fp16"}, "mixed_precision", "use bf16"),
    (
        PipelineTrainingArguments,
        {"torch_compile_mode": "max-autotune"},
        "torch_compile_mode",
        "max-autotune-no-cudagraphs",
    ),
]


@pytest.mark.parametrize("number", range(len(INVALID)))
def test_what_cannot_work_is_said_with_name_value_reason_and_replacement(number: int) -> None:
    cls, given, name, words = INVALID[number]
    with pytest.raises(InvalidArgument) as caught:
        cls(**given)
    assert caught.value.name == name and str(caught.value).startswith(f"{name}=")
    assert words in str(caught.value) and caught.value.reason and caught.value.instead
    with pytest.raises(ValueError, match=r".*"):
        resolve_arguments(cls, given)


@pytest.mark.parametrize(
    "given",
    [
        {"num_train_epochs": -1.0, "max_steps": 5},
        {**STEPS, "save_steps": 20, "eval_steps": 10},
        {**STEPS, "save_steps": 25, "eval_steps": 10, "eval_on_save": True},
        {**STEPS, "save_steps": 0.3, "eval_steps": 0.1},
        {"load_best_model_at_end": True, "save_strategy": "best", "eval_strategy": "epoch"},
        {"torch_compile_mode": "max-autotune"},
        {"activation_memory_budget": 0.5, "torch_compile": True},
        {"sdpa_backend": ["flash", "math"], "sdpa_set_priority": True},
        {"fuse_optim_with_backward": True},
        {"optim": "adafactor", "optim_args": "eps=(None, 1e-3),d=2.0"},
        {"optim_args": "amsgrad=True"},
        {
            "dataloader_num_workers": 2,
            "dataloader_prefetch_factor": 4,
            "dataloader_persistent_workers": True,
        },
        {"on_world_size_change": "continue", "max_steps": 5},
        {"save_steps": 1.0},
        {"full_determinism": True, "seed": 0},
    ],
)
def test_what_works(given: dict[str, Any]) -> None:
    args = TrainingArguments(**given)
    assert {name: getattr(args, name) for name in given} == given


def test_short_last_batches_are_always_dropped_by_a_pipeline() -> None:
    assert PipelineTrainingArguments(dataloader_drop_last=False).dataloader_drop_last is True


CLASS_OF = {
    "single": "TrainingArguments",
    "ddp": "DDPTrainingArguments",
    "fsdp2": "FSDP2TrainingArguments",
    "pipeline": "PipelineTrainingArguments",
    "accel": "AccelTrainingArguments",
}
KINDS = tuple(CLASS_OF)
# option -> what is given, and by kind whether it may be
MATRIX: dict[str, tuple[dict[str, Any], tuple[bool, bool, bool, bool, bool]]] = {
    "fuse_optim_with_backward": (
        {"fuse_optim_with_backward": True},
        (True, False, False, True, False),
    ),
    "fp16": ({"mixed_precision": "fp16"}, (True, True, True, False, True)),
    "max-autotune, accumulating": (
        {"torch_compile_mode": "max-autotune", "gradient_accumulation_steps": 2},
        (False,) * 5,
    ),
    "max-autotune": ({"torch_compile_mode": "max-autotune"}, (True, True, True, False, True)),
    "meta": ({"construct_model_on": "meta"}, (True,) * 5),
    "dispatch_batches": ({"dispatch_batches": False}, (False, True, True, False, True)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", MATRIX)
def test_the_support_matrix(option: str, kind: str) -> None:
    given, allowed = MATRIX[option]

    def make() -> None:
        args = resolve_arguments(getattr(arguments, CLASS_OF[kind]), given)
        args.check_trainer(kind, 1 if kind == "single" else 2)

    if allowed[KINDS.index(kind)]:
        make()
    else:
        with pytest.raises(InvalidArgument, match=next(iter(given))):
            make()


@pytest.mark.parametrize(
    ("kind", "one", "two"),
    [
        ("single", True, False),
        ("ddp", True, True),
        ("fsdp2", True, True),
        ("pipeline", False, True),
        ("accel", True, True),
    ],
)
def test_the_number_of_ranks(kind: str, one: bool, two: bool) -> None:
    for world_size, allowed in ((1, one), (2, two)):
        args = getattr(arguments, CLASS_OF[kind])()
        if allowed:
            args.check_trainer(kind, world_size)
            assert args.train_batch_size == 16 * (1 if kind == "pipeline" else world_size)
        else:
            with pytest.raises(InvalidArgument, match="world_size"):
                args.check_trainer(kind, world_size)


def test_batches_of_all_ranks() -> None:
    args = TrainingArguments(per_device_train_batch_size=3, gradient_accumulation_steps=5)
    assert (args.global_batch(1), args.global_batch(4), args.train_batch_size) == (15, 60, 15)
    with pytest.raises(AttributeError):
        args.train_batch_size = 3  # type: ignore[misc]


def test_a_group_of_shards_divides_the_ranks() -> None:
    args = FSDP2TrainingArguments(fsdp2=FSDP2Arguments(reshard_after_forward=3))
    args.check_trainer("fsdp2", 6)
    with pytest.raises(InvalidArgument, match="does not divide the 4 ranks"):
        args.check_trainer("fsdp2", 4)


def test_what_the_installed_torch_lacks_is_refused_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Old:
        def __init__(self, module: object, broadcast_buffers: bool = True) -> None: ...

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Old)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "gloo")
    DDPTrainingArguments(ddp_backend="gloo").check_trainer("ddp", 2)
    with pytest.raises(
        InvalidArgument, match=r"ddp.init_sync=False: the installed torch has no such option"
    ):
        DDPTrainingArguments(ddp=DDPArguments(init_sync=False)).check_trainer("ddp", 2)
    with pytest.raises(InvalidArgument, match=r"ddp_backend='mpi': this build of torch"):
        DDPTrainingArguments(ddp_backend="mpi").check_trainer("ddp", 2)


def test_low_precision_needs_its_package_and_its_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InvalidArgument, match=r"qat_recipe='int4-weight-only': needs the package torchao"
    ):
        TrainingArguments(qat_recipe="int4-weight-only").check_trainer("single", 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    TrainingArguments(qat_recipe="int4-weight-only").check_trainer("single", 1)
    with pytest.raises(
        InvalidArgument, match=r"fp8_recipe='rowwise': needs CUDA compute capability 8.9"
    ):
        TrainingArguments(fp8_recipe="rowwise", use_cpu=True).check_trainer("single", 1)


MODEL = torch.nn.Linear(1, 1)
# kind, arguments, parts, the argument that is named (None: fine)
PARTS: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("single", {}, {"model": MODEL}, None),
    ("single", {}, {"model_init": lambda: MODEL}, None),
    ("single", {}, {}, "model"),
    ("single", {}, {"model": MODEL, "model_init": lambda: MODEL}, "model"),
    ("pipeline", {}, {"model": MODEL}, "model"),
    ("pipeline", {}, {"model_init": lambda: MODEL}, None),
    ("single", {"construct_model_on": "meta"}, {"model": MODEL}, "construct_model_on"),
    ("single", {"construct_model_on": "meta"}, {"model_init": lambda: MODEL}, None),
    ("single", {"gradient_accumulation_steps": 2}, {"model": MODEL}, "gradient_accumulation_steps"),
    (
        "single",
        {"gradient_accumulation_steps": 2},
        {"model": MODEL, "compute_loss_func": print},
        None,
    ),
    (
        "single",
        {"gradient_accumulation_steps": 2},
        {"model": MODEL, "fused_loss_factory": print},
        None,
    ),
    (
        "single",
        {},
        {"model": MODEL, "compute_loss_func": print, "fused_loss_factory": print},
        "fused_loss_factory",
    ),
    (
        "single",
        {"label_smoothing_factor": 0.1},
        {"model": MODEL, "compute_loss_func": print},
        "label_smoothing_factor",
    ),
    (
        "single",
        {"label_smoothing_factor": 0.1},
        {"model": MODEL, "fused_loss_factory": print},
        "label_smoothing_factor",
    ),
    ("single", {"label_smoothing_factor": 0.1}, {"model": MODEL}, None),
    (
        "single",
        {},
        {"model": MODEL, "optimizer_factory": print, "optimizer_cls_and_kwargs": (print, {})},
        "optimizer_cls_and_kwargs",
    ),
    (
        "single",
        {"gradient_checkpointing_kwargs": {"a": 1}},
        {"model": MODEL, "enable_activation_checkpoint_fn": print},
        "gradient_checkpointing_kwargs",
    ),
    ("single", {"eval_strategy": "steps"}, {"model": MODEL}, "eval_strategy"),
    ("single", {"eval_strategy": "steps"}, {"model": MODEL, "eval_dataset": [1]}, None),
    ("single", {"eval_on_save": True}, {"model": MODEL}, "eval_on_save"),
    ("single", {"preserve_best_model": True}, {"model": MODEL}, "preserve_best_model"),
    ("single", {"eval_on_start": True}, {"model": MODEL}, "eval_on_start"),
    (
        "single",
        {**STEPS, "save_steps": 100, "eval_strategy": "steps"},
        {"model": MODEL},
        "eval_strategy",
    ),
    ("pipeline", {}, {"model_init": print, "pipe_schedule": ScheduleGPipe}, None),
    (
        "pipeline",
        {"is_multistage": True},
        {"model_init": print, "pipe_schedule": Schedule1F1B},
        "is_multistage",
    ),
    (
        "pipeline",
        {},
        {"model_init": print, "pipe_schedule": ScheduleInterleaved1F1B},
        "is_multistage",
    ),
    (
        "pipeline",
        {"is_multistage": True, "stages_per_rank": 2},
        {"model_init": print, "pipe_schedule": ScheduleInterleaved1F1B},
        None,
    ),
    (
        "pipeline",
        {"is_multistage": True, "torch_compile": True},
        {"model_init": print, "pipe_schedule": ScheduleInterleavedZeroBubble},
        "torch_compile",
    ),
    (
        "pipeline",
        {"is_multistage": True, "torch_compile": True, "pp_stage_type": "v"},
        {"model_init": print, "pipe_schedule": ScheduleZBVZeroBubble},
        "torch_compile",
    ),
    (
        "pipeline",
        {"is_multistage": True, "torch_compile": True},
        {"model_init": print, "pipe_schedule": ScheduleInterleaved1F1B},
        None,
    ),
    (
        "pipeline",
        {"is_multistage": True},
        {"model_init": print, "pipe_schedule": ScheduleZBVZeroBubble},
        "pp_stage_type",
    ),
    (
        "pipeline",
        {"is_multistage": True, "pp_stage_type": "v"},
        {"model_init": print, "pipe_schedule": ScheduleZBVZeroBubble},
        None,
    ),
]


@pytest.mark.parametrize("number", range(len(PARTS)))
def test_what_the_other_parts_of_a_trainer_decide(number: int) -> None:
    kind, given, parts, name = PARTS[number]
    args = getattr(arguments, CLASS_OF[kind])(**given)
    if name is None:
        args.check_parts(kind, **parts)
    else:
        with pytest.raises(InvalidArgument) as caught:
            args.check_parts(kind, **parts)
        assert caught.value.name == name and caught.value.instead


@pytest.mark.parametrize(
    ("value", "total", "steps"),
    [
        (100, 7, 100),
        (0.1, 100, 10),
        (0.07, 100, 7),
        (0.01, 7, 1),
        (0.5, 7, 4),
        (0.001, 1, 1),
        (1.0, 50, 1),
        (1, 50, 1),
        (20.0, 7, 20),
    ],
)
def test_ratios_of_all_steps(value: float, total: int, steps: int) -> None:
    assert steps_of(value, total) == steps and type(steps_of(value, total)) is int


def test_warmup_and_dtypes() -> None:
    assert [TrainingArguments(warmup_ratio=0.1).warmup(total) for total in (10, 11, 100)] == [
        1,
        2,
        10,
    ]
    assert TrainingArguments(warmup_ratio=0.5, warmup_steps=3).warmup(100) == 3
    assert TrainingArguments().warmup(100) == 0
    assert TrainingArguments(default_dtype="bfloat16").default_dtype == "bfloat16"
    with pytest.raises(InvalidArgument, match="default_dtype='Tensor': unknown"):
        TrainingArguments(default_dtype="Tensor")
    assert TrainingArguments(metric_for_best_model="accuracy").best_is_greater is True
    assert TrainingArguments(metric_for_best_model="eval_loss").best_is_greater is False


# --- what is compared when a run is resumed ---

CHANGES: dict[
    str, tuple[Any, bool]
] = {  # name: (another value, whether it changes what is computed)
    "max_steps": (20, True),
    "per_device_train_batch_size": (4, True),
    "gradient_accumulation_steps": (2, True),
    "seed": (1, True),
    "data_seed": (1, True),
    "lr_scheduler_type": ("cosine", True),
    "warmup_steps": (1, True),
    "warmup_ratio": (0.5, True),
    "learning_rate": (0.1, True),
    "weight_decay": (0.1, True),
    "adam_beta1": (0.5, True),
    "adam_beta2": (0.5, True),
    "adam_epsilon": (1e-3, True),
    "optim": ("sgd", True),
    "optim_args": ({"amsgrad": True}, True),
    "mixed_precision": ("bf16", True),
    "max_grad_norm": (1.0, True),
    "dataloader_drop_last": (True, True),
    "label_smoothing_factor": (0.1, True),
    "num_train_epochs": (2.0, True),
    "full_determinism": (True, True),
    "save_steps": (2, False),
    "eval_steps": (2, False),
    "logging_steps": (2, False),
    "output_dir": ("b", False),
    "logging_dir": ("b", False),
    "run_name": ("b", False),
    "dataloader_num_workers": (2, False),
    "save_async": (False, False),
    "report_to": ("json", False),
    "save_total_limit": (5, False),
    "eval_strategy": ("epoch", False),
    "log_level": ("info", False),
    "disable_tqdm": (True, False),
    "resume_from_checkpoint": (False, False),
    "per_device_eval_batch_size": (3, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_b44_what_a_resumed_run_is_told_about(name: str) -> None:
    value, matters = CHANGES[name]
    changed = {name: value} | ({"seed": 0} if name == "full_determinism" else {})
    old, new = (
        TrainingArguments(seed=changed.get("seed", -1) if name != "seed" else -1),
        TrainingArguments(**changed),
    )
    stored = json.loads(json.dumps(old.as_dict()))  # as it comes back from a checkpoint
    expected = [f"{name} {getattr(old, name)!r} -> {value!r}"] if matters else []
    assert new.differences(stored) == expected
    assert old.differences(stored) == []
    assert (new.digest() != old.digest()) is matters
    assert (name in NOT_COMPUTED) is not matters


def test_every_name_that_does_not_count_is_an_argument() -> None:
    known = {name for cls in CLASS_OF.values() for name in getattr(arguments, cls)().as_dict()}
    assert known >= NOT_COMPUTED


def test_what_another_argument_overrules_does_not_count() -> None:
    one, other = TrainingArguments(max_steps=5), TrainingArguments(max_steps=5, num_train_epochs=3)
    assert one.digest() == other.digest() and one.differences(other.as_dict()) == []
    one, other = (
        TrainingArguments(optim_args="amsgrad=True"),
        TrainingArguments(optim_args={"amsgrad": True}),
    )
    assert one.digest() == other.digest() and one.differences(other.as_dict()) == []
    assert (
        TrainingArguments(device="cuda:1").digest()
        == TrainingArguments(device=torch.device("cuda", 0)).digest()
    )
    old = DDPTrainingArguments()
    assert DDPTrainingArguments(ddp=DDPArguments(static_graph=True)).differences(old.as_dict()) == [
        "ddp.static_graph False -> True"
    ]
    assert TrainingArguments(max_steps=10).differences(
        TrainingArguments(num_train_epochs=3).as_dict()
    ) == ["num_train_epochs 3.0 -> 1.0", "max_steps -1 -> 10"]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_as_plain_values_come_back_equal(kind: str) -> None:
    cls = getattr(arguments, CLASS_OF[kind])
    args = cls(device="cpu", sdpa_backend=["math"], lr_scheduler_kwargs={}, learning_rate=1e-5)
    assert resolve_arguments(cls, json.loads(json.dumps(args.as_dict()))) == args
    assert resolve_arguments(cls, yaml.safe_load(print_configuration(args))) == args


# --- files ---


def test_a_file_and_overrides(tmp_path: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "learning_rate: 5e-5\neval_strategy: no\nddp:\n  static_graph: true\nmodel: {n_layer: "
        "2}\ndata: [a, b]\n"
    )
    values = load_configuration(
        path,
        [
            "ddp.bucket_cap_mb=4",
            "model.n_head=1",
            "max_steps=10",
            "lr_scheduler_kwargs.power=1e0",
            "run_name=a=b",
        ],
    )
    assert values == {
        "learning_rate": 5e-5,
        "eval_strategy": "no",
        "ddp": {"static_graph": True, "bucket_cap_mb": 4},
        "model": {"n_layer": 2, "n_head": 1},
        "data": ["a", "b"],
        "max_steps": 10,
        "lr_scheduler_kwargs": {"power": 1.0},
        "run_name": "a=b",
    }
    assert load_configuration(None, ["optim_args=momentum=0.9,nesterov=True"]) == {
        "optim_args": "momentum=0.9,nesterov=True"
    }
    assert load_configuration(None) == {}


def test_print_configuration_is_read_back_equal(tmp_path: Any) -> None:
    args = FSDP2TrainingArguments(
        learning_rate=1e-12,
        eval_strategy="no",
        run_name="12:30",
        fsdp2=FSDP2Arguments(cpu_offload=True),
    )
    path = tmp_path / "run.yaml"
    path.write_text(print_configuration(args))
    assert resolve_arguments(FSDP2TrainingArguments, load_configuration(path)) == args


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("a: 1\na: 2\n", [], "comes twice"),
        ("[1, 2]", [], "no mapping"),
        ("a: [", [], "is not YAML"),
        ("", ["max_steps"], "name=value"),
        ("", ["=3"], "name=value"),
        ("a: 3", ["a.b=1"], "no names inside"),
        ("", ["a=[1"], "not a YAML value"),
        ("", ["a..b=1"], "name=value"),
    ],
)
def test_files_and_overrides_that_make_no_sense(
    text: str, overrides: list[str], words: str, tmp_path: Any
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        load_configuration(path, overrides)
