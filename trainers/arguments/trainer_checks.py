"""What only the kind of trainer, the number of ranks and the other parts of a trainer decide about
arguments."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from .checks import only_of_pipeline
from .errors import InvalidArgument, one_of, whole
from .nested import DDPArguments

if TYPE_CHECKING:
    from .native import BaseTrainingArguments, MinimalTrainingArguments

__all__ = ["KINDS", "check_parts", "check_trainer"]

KINDS = ("single", "ddp", "fsdp2", "pipeline", "accel")
_TRAINERS = {
    "single": "Trainer",
    "ddp": "DDPTrainer",
    "fsdp2": "FSDP2Trainer",
    "pipeline": "PipelineTrainer",
    "accel": "AccelTrainer",
}
_ZERO_BUBBLE = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
_NEED_DATA = ("eval_on_start", "load_best_model_at_end", "eval_on_save", "preserve_best_model")


def check_trainer(args: MinimalTrainingArguments, kind: str, world_size: int) -> None:
    """What only the kind of trainer and the number of ranks decide: the support matrix, and what is
    installed."""
    one_of("trainer", kind, KINDS)
    trainer = _TRAINERS[kind]
    whole("world_size", world_size, at_least=1)
    if kind == "single" and world_size > 1:
        raise InvalidArgument(
            "world_size",
            world_size,
            "Trainer is for one process",
            "use DDPTrainer, FSDP2Trainer or PipelineTrainer",
        )
    if kind == "pipeline" and world_size == 1:
        raise InvalidArgument("world_size", 1, "a pipeline needs more than one rank", "use Trainer")
    if kind in ("ddp", "fsdp2", "accel") and getattr(args, "fuse_optim_with_backward", False):
        raise InvalidArgument(
            "fuse_optim_with_backward",
            True,
            f"{trainer} needs whole gradients",
            "use Trainer or PipelineTrainer, or do not fuse",
        )
    if kind in ("single", "pipeline") and getattr(args, "dispatch_batches", True) is not True:
        raise InvalidArgument(
            "dispatch_batches",
            False,
            f"{trainer} has no other ranks to hand batches to",
            "use DDPTrainer, FSDP2Trainer or AccelTrainer",
        )
    if kind == "pipeline":
        only_of_pipeline(args)  # type: ignore[arg-type]
    if kind == "ddp" and hasattr(args, "ddp"):
        _check_ddp_options(args.ddp)
    shards = getattr(getattr(args, "fsdp2", None), "reshard_after_forward", True)
    if kind == "fsdp2" and not isinstance(shards, bool) and world_size % shards:
        raise InvalidArgument(
            "fsdp2.reshard_after_forward",
            shards,
            f"does not divide the {world_size} ranks",
            "give one that does, or True or False",
        )
    if kind != "single" and world_size > 1 and args.ddp_backend is not None:
        _check_backend(args.ddp_backend)
    if (
        getattr(args, "fp8_recipe", None) is not None
        or getattr(args, "qat_recipe", None) is not None
    ):
        _check_low_precision(args)  # type: ignore[arg-type]


def _check_ddp_options(options: DDPArguments) -> None:
    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel.__init__).parameters
    for field in fields(options):
        if field.name not in known and getattr(options, field.name) != field.default:
            raise InvalidArgument(
                f"ddp.{field.name}",
                getattr(options, field.name),
                "the installed torch has no such option",
                f"leave it at {field.default}, or install a newer torch",
            )


def _check_backend(name: str) -> None:
    import torch.distributed as dist

    if not dist.is_backend_available(name):
        raise InvalidArgument(
            "ddp_backend", name, "this build of torch has no such backend", "leave it at None"
        )


def _check_low_precision(args: BaseTrainingArguments) -> None:
    name = "fp8_recipe" if args.fp8_recipe is not None else "qat_recipe"
    if importlib.util.find_spec("torchao") is None:
        raise InvalidArgument(
            name,
            getattr(args, name),
            "needs the package torchao",
            "install torchao, or leave it at None",
        )
    if name == "fp8_recipe":
        import torch

        on_cuda = (
            torch.cuda.is_available() and not args.use_cpu and "cuda" in str(args.device or "cuda")
        )
        have = (
            torch.cuda.get_device_capability(args.device if args.device is not None else None)
            if on_cuda
            else None
        )
        if have is None or have < (8, 9):
            where = "the CPU" if have is None else f"{have[0]}.{have[1]}"
            raise InvalidArgument(
                name,
                args.fp8_recipe,
                f"needs CUDA compute capability 8.9, and this is {where}",
                "leave it at None",
            )


def check_parts(
    args: MinimalTrainingArguments,
    kind: str,
    *,
    model: object = None,
    model_init: Callable[..., object] | None = None,
    eval_dataset: object = None,
    compute_loss_func: object = None,
    fused_loss_factory: object = None,
    optimizer_factory: object = None,
    optimizer_cls_and_kwargs: object = None,
    enable_activation_checkpoint_fn: object = None,
    pipe_schedule: type | None = None,
) -> None:
    """What the constructor's other arguments decide. `pipe_schedule` is the schedule's class."""
    _check_model(args, kind, model, model_init)
    losses = {"compute_loss_func": compute_loss_func, "fused_loss_factory": fused_loss_factory}
    _check_losses(args, {name: given for name, given in losses.items() if given is not None})
    if optimizer_factory is not None and optimizer_cls_and_kwargs is not None:
        raise InvalidArgument(
            "optimizer_cls_and_kwargs",
            optimizer_cls_and_kwargs,
            "optimizer_factory was given too",
            "give one of the two",
        )
    if optimizer_factory is None and optimizer_cls_and_kwargs is None:
        from ..optim import optimizer_class

        optimizer_class(args)  # its package is there, and its class has the options
    if args.gradient_checkpointing_kwargs and enable_activation_checkpoint_fn is not None:
        raise InvalidArgument(
            "gradient_checkpointing_kwargs",
            args.gradient_checkpointing_kwargs,
            "enable_activation_checkpoint_fn does it and does not get them",
            "put them there",
        )
    if eval_dataset is None:
        found = [name for name in _NEED_DATA if getattr(args, name, False)]
        if args.eval_strategy != "no":
            raise InvalidArgument(
                "eval_strategy", args.eval_strategy, "no eval_dataset", "give one, or use 'no'"
            )
        if found:
            raise InvalidArgument(
                found[0], True, "no eval_dataset", f"give one, or set {found[0]} to False"
            )
    if pipe_schedule is not None:
        _check_pipe_schedule(args, pipe_schedule)


def _check_model(
    args: MinimalTrainingArguments,
    kind: str,
    model: object,
    model_init: Callable[..., object] | None,
) -> None:
    if model is not None and model_init is not None:
        raise InvalidArgument(
            "model", type(model).__name__, "model_init was given too", "give one of the two"
        )
    if model is None and model_init is None:
        raise InvalidArgument("model", None, "nothing to train", "give model or model_init")
    if kind == "pipeline" and model is not None:
        raise InvalidArgument(
            "model", type(model).__name__, "a pipeline builds its stages itself", "give model_init"
        )
    if model_init is None and getattr(args, "construct_model_on", "default") == "meta":
        raise InvalidArgument(
            "construct_model_on",
            "meta",
            "a model that exists is not built again",
            "give model_init",
        )


def _check_losses(args: MinimalTrainingArguments, given: dict[str, object]) -> None:
    if len(given) == 2:
        raise InvalidArgument(
            "fused_loss_factory",
            given["fused_loss_factory"],
            "compute_loss_func was given too",
            "give one of the two",
        )
    if args.gradient_accumulation_steps > 1 and not given:
        raise InvalidArgument(
            "gradient_accumulation_steps",
            args.gradient_accumulation_steps,
            "the loss of a step must be normalised over all its micro-batches",
            "give compute_loss_func or fused_loss_factory",
        )
    if args.label_smoothing_factor and given:
        raise InvalidArgument(
            "label_smoothing_factor",
            args.label_smoothing_factor,
            f"{next(iter(given))} computes the loss",
            "set it to 0, and smooth there",
        )


def _check_pipe_schedule(args: Any, schedule: type) -> None:
    bases = [base.__name__ for base in schedule.__mro__]
    multi = "PipelineScheduleMulti" in bases
    if multi != args.is_multistage:
        raise InvalidArgument(
            "is_multistage",
            args.is_multistage,
            f"{schedule.__name__} is for {'several stages' if multi else 'one stage'} a rank",
            f"set {multi}, or use another schedule",
        )
    if args.torch_compile and any(name in bases for name in _ZERO_BUBBLE):
        raise InvalidArgument(
            "torch_compile",
            True,
            f"the split backward of {schedule.__name__} cannot walk a compiled stage",
            "use another schedule, or do not compile",
        )
    if ("ScheduleZBVZeroBubble" in bases) != (args.pp_stage_type == "v"):
        wanted = "v" if args.pp_stage_type == "loop" else "loop"
        raise InvalidArgument(
            "pp_stage_type",
            args.pp_stage_type,
            f"{schedule.__name__} has its stages in another order",
            f"set {wanted!r}",
        )
