"""What can be judged from arguments alone. trainer_checks.py has what the trainer and its parts
decide.

Each constraint is checked once, before a model is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InvalidArgument, one_of, real, whole
from .nested import DTYPES
from .optimizer_options import check_optimizer_name, parse_options
from .vocabulary import SCHEDULES

if TYPE_CHECKING:
    from .native import (
        BaseTrainingArguments,
        MinimalTrainingArguments,
        PipelineTrainingArguments,
        TrainingArguments,
    )

__all__ = ["check_base", "check_memory", "check_minimal", "check_pipeline", "only_of_pipeline"]

_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_NO_CUDAGRAPHS = "use 'max-autotune-no-cudagraphs'"
_LEVELS = ("debug", "info", "warning", "error", "critical")
_BACKENDS = ("nccl", "gloo", "mpi", "ccl", "hccl")
_SDPA = ("math", "flash", "efficient", "cudnn")
_SEEDS = 2**32 - 1  # numpy's generator takes 32 bits


def check_minimal(args: MinimalTrainingArguments) -> None:
    _check_numbers(args)
    _check_words(args)
    _check_length(args)
    _check_loading(args)
    _check_schedule_kwargs(args)
    check_optimizer_name(args.optim)
    parse_options(args.optim, args.optim_args)
    if args.full_determinism and args.seed < 0:
        raise InvalidArgument(
            "full_determinism", True, "nothing is determined without a seed", "set seed, from 0 up"
        )
    if args.torch_compile_mode == "max-autotune" and args.gradient_accumulation_steps > 1:
        raise InvalidArgument(
            "torch_compile_mode",
            "max-autotune",
            "its CUDA graphs do not go with gradient_accumulation_steps > 1",
            _NO_CUDAGRAPHS,
        )
    if args.save_strategy == "best" and args.eval_strategy == "no":
        raise InvalidArgument(
            "save_strategy",
            "best",
            "without evaluations no checkpoint is the best",
            "set eval_strategy",
        )
    _check_best(args)


def _check_numbers(args: MinimalTrainingArguments) -> None:
    for name in (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "epoch_train_steps",
        "ddp_timeout",
    ):
        whole(name, getattr(args, name), at_least=1)
    whole("seed", args.seed, at_least=-1, at_most=_SEEDS, instead="-1 does not seed")
    for name, least, instead in (
        ("data_seed", 0, "None uses seed"),
        ("save_total_limit", 1, "None keeps all"),
        ("torch_empty_cache_steps", 1, "None never empties it"),
        ("dataloader_prefetch_factor", 1, "None leaves it to the loader"),
    ):
        if getattr(args, name) is not None:
            whole(
                name, getattr(args, name), least, _SEEDS if name == "data_seed" else None, instead
            )
    whole("warmup_steps", args.warmup_steps, at_least=0)
    whole("dataloader_num_workers", args.dataloader_num_workers, at_least=0)
    for name in ("learning_rate", "weight_decay", "adam_epsilon", "eval_delay"):
        real(name, getattr(args, name), 0.0)
    for name in ("adam_beta1", "adam_beta2", "label_smoothing_factor"):
        real(name, getattr(args, name), 0.0, 1.0, below_high=True)
    real("warmup_ratio", args.warmup_ratio, 0.0, 1.0, instead="of all steps")
    if args.max_grad_norm is not None:
        real("max_grad_norm", args.max_grad_norm, 0.0, above_low=True, instead="None does not clip")
    for name in ("save_steps", "eval_steps", "logging_steps"):
        _period(name, getattr(args, name))


def _check_words(args: MinimalTrainingArguments) -> None:
    one_of("eval_strategy", args.eval_strategy, ("no", "steps", "epoch"))
    one_of("logging_strategy", args.logging_strategy, ("no", "steps", "epoch"))
    one_of("save_strategy", args.save_strategy, ("no", "steps", "epoch", "best"))
    one_of("on_world_size_change", args.on_world_size_change, ("error", "continue"))
    one_of("log_level", args.log_level, ("passive", *_LEVELS))
    one_of("log_level_replica", args.log_level_replica, ("passive", *_LEVELS))
    one_of("ddp_backend", args.ddp_backend, (None, *_BACKENDS))
    one_of("torch_compile_mode", args.torch_compile_mode, (None, *_COMPILE_MODES))
    one_of(
        "include_num_input_tokens_seen",
        args.include_num_input_tokens_seen,
        (False, True, "all", "non_padding", "no"),
    )
    for reporter in [args.report_to] if isinstance(args.report_to, str) else args.report_to:
        if reporter not in ("tensorboard", "json", "none"):
            raise InvalidArgument(
                "report_to",
                args.report_to,
                f"there is no reporter {reporter!r}",
                "give tensorboard, json or none, or a list of them",
            )


def _period(name: str, value: int | float) -> None:
    real(name, value, 0.0, above_low=True, instead="below 1.0 it is a share of all steps")
    if value >= 1 and value != int(value):
        raise InvalidArgument(
            name, value, "no whole number of steps", "give a whole number, or a share below 1.0"
        )


def _check_length(args: MinimalTrainingArguments) -> None:
    if args.max_steps > 0:
        return
    if args.num_train_epochs < 0:
        raise InvalidArgument(
            "num_train_epochs",
            args.num_train_epochs,
            "no limit of epochs, and max_steps is not set",
            "set max_steps above 0, or num_train_epochs above 0",
        )
    real("num_train_epochs", args.num_train_epochs, 0.0, above_low=True, instead="or set max_steps")
    if args.on_world_size_change == "continue":
        # The steps of an epoch depend on the number of ranks, so those done would count for more,
        # or for less.
        raise InvalidArgument(
            "on_world_size_change",
            "continue",
            "num_train_epochs is no fixed number of steps then",
            "set max_steps",
        )


def _check_loading(args: MinimalTrainingArguments) -> None:
    if args.dataloader_num_workers > 0:
        return
    for name, unset in (
        ("dataloader_persistent_workers", False),
        ("dataloader_prefetch_factor", None),
    ):
        if getattr(args, name) != unset:
            raise InvalidArgument(
                name,
                getattr(args, name),
                "there are no workers",
                f"set dataloader_num_workers above 0, or {name} to {unset}",
            )


def _check_schedule_kwargs(args: MinimalTrainingArguments) -> None:
    one_of(
        "lr_scheduler_type",
        args.lr_scheduler_type,
        tuple(SCHEDULES),
        "give the trainer a lr_scheduler_factory",
    )
    known = SCHEDULES[args.lr_scheduler_type]
    for name, value in (args.lr_scheduler_kwargs or {}).items():
        if name not in known:
            takes = f"takes {', '.join(known)} only" if known else "takes none"
            raise InvalidArgument(
                f"lr_scheduler_kwargs.{name}",
                value,
                f"unknown: the schedule {args.lr_scheduler_type} {takes}",
                "leave it out, or give the trainer a lr_scheduler_factory",
            )
        real(f"lr_scheduler_kwargs.{name}", value, 0.0, above_low=True)


def _check_best(args: MinimalTrainingArguments) -> None:
    """Hugging Face's rules: the best model must be among those saved."""
    if not args.load_best_model_at_end or args.save_strategy == "best":
        return
    if args.save_strategy != args.eval_strategy or args.save_strategy == "no":
        raise InvalidArgument(
            "load_best_model_at_end",
            True,
            f"save_strategy={args.save_strategy!r} and eval_strategy={args.eval_strategy!r} do "
            "not match",
            "make both 'steps' or both 'epoch', or set save_strategy='best'",
        )
    if args.save_strategy != "steps" or getattr(args, "eval_on_save", False):
        return
    save, evaluate = args.save_steps, args.eval_steps
    multiple = (save < 1) == (evaluate < 1) and abs(
        save / evaluate - max(1, round(save / evaluate))
    ) < 1e-9
    if not multiple:
        raise InvalidArgument(
            "load_best_model_at_end",
            True,
            f"save_steps={save} is no multiple of eval_steps={evaluate}",
            "make it one, or set eval_on_save or save_strategy='best'",
        )


def check_base(args: BaseTrainingArguments) -> None:
    one_of("default_dtype", args.default_dtype, (None, *DTYPES))
    one_of("mixed_precision", args.mixed_precision, (None, "no", "bf16", "fp16"))
    one_of(
        "float32_matmul_precision",
        args.float32_matmul_precision,
        (None, "highest", "high", "medium"),
    )
    one_of("fp8_recipe", args.fp8_recipe, (None, "tensorwise", "rowwise", "rowwise_with_gw_hp"))
    one_of(
        "qat_recipe",
        args.qat_recipe,
        (
            None,
            "int8-dynamic-act-int4-weight",
            "int4-weight-only",
            "float8-dynamic-act-float8-weight",
        ),
    )
    if args.fp8_recipe is not None and args.qat_recipe is not None:
        raise InvalidArgument(
            "fp8_recipe",
            args.fp8_recipe,
            f"excludes qat_recipe={args.qat_recipe!r}",
            "give one of the two",
        )
    if args.max_eval_steps != -1:
        whole("max_eval_steps", args.max_eval_steps, at_least=1, instead="-1 evaluates on all")
    whole("preserve_n_best", args.preserve_n_best, at_least=1)
    whole("fp8_dim_alignment", args.fp8_dim_alignment, at_least=1)
    if args.dynamo_recompile_limit is not None:
        whole(
            "dynamo_recompile_limit",
            args.dynamo_recompile_limit,
            at_least=1,
            instead="None leaves torch's",
        )
    backends = [args.sdpa_backend] if isinstance(args.sdpa_backend, str) else args.sdpa_backend
    if backends is not None and (not backends or any(name not in _SDPA for name in backends)):
        raise InvalidArgument(
            "sdpa_backend",
            args.sdpa_backend,
            "unknown",
            f"give one of {', '.join(_SDPA)}, or a list of them",
        )
    if args.sdpa_set_priority and not isinstance(args.sdpa_backend, list):
        raise InvalidArgument(
            "sdpa_set_priority",
            True,
            f"sdpa_backend={args.sdpa_backend!r} is no list to take an order from",
            "give sdpa_backend a list",
        )


def check_memory(args: TrainingArguments) -> None:
    real("gc_threshold", args.gc_threshold, 0.0, 1.0)
    one_of("construct_model_on", args.construct_model_on, ("default", "device", "meta"))
    whole("speed_metrics_start_step", args.speed_metrics_start_step, at_least=0)
    if args.activation_memory_budget is not None:
        real("activation_memory_budget", args.activation_memory_budget, 0.0, 1.0)
        if not args.torch_compile:
            raise InvalidArgument(
                "activation_memory_budget",
                args.activation_memory_budget,
                "a setting of the compiler, and the model is not compiled",
                "set torch_compile",
            )
    if args.fuse_optim_with_backward:
        for name, given, instead in (
            ("max_grad_norm", args.max_grad_norm is not None, "set max_grad_norm to None"),
            (
                "gradient_accumulation_steps > 1",
                args.gradient_accumulation_steps > 1,
                "set it to 1",
            ),
            ("mixed_precision='fp16'", args.mixed_precision == "fp16", "use bf16"),
        ):
            if given:
                raise InvalidArgument(
                    "fuse_optim_with_backward",
                    True,
                    f"excludes {name}, since no gradient outlives its step",
                    f"{instead}, or do not fuse",
                )


def check_pipeline(args: PipelineTrainingArguments) -> None:
    whole("n_microbatches", args.n_microbatches, at_least=1)
    whole("stages_per_rank", args.stages_per_rank, at_least=1)
    one_of("pp_stage_type", args.pp_stage_type, ("loop", "v"))
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if getattr(args, name) % args.n_microbatches:
            raise InvalidArgument(
                "n_microbatches",
                args.n_microbatches,
                f"does not divide {name}={getattr(args, name)}",
                "give one that does",
            )
    if args.stages_per_rank > 1 and not args.is_multistage:
        raise InvalidArgument(
            "stages_per_rank",
            args.stages_per_rank,
            "a rank has one stage unless is_multistage=True",
            "set is_multistage, with a schedule derived from PipelineScheduleMulti",
        )
    only_of_pipeline(args)


def only_of_pipeline(args: TrainingArguments) -> None:
    if args.mixed_precision == "fp16":
        raise InvalidArgument(
            "mixed_precision",
            "fp16",
            "not with a pipeline: stages cannot agree on a loss scale",
            "use bf16",
        )
    if args.torch_compile_mode == "max-autotune":
        raise InvalidArgument(
            "torch_compile_mode",
            "max-autotune",
            "its CUDA graphs do not go with micro-batches",
            _NO_CUDAGRAPHS,
        )
