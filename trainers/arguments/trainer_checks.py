"""What only the kind of trainer, the number of ranks and the other parts of a trainer decide about
arguments."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from .errors import InvalidArgument
from .kinds import arguments_of

KINDS = {
    "single": "Trainer",
    "ddp": "DDPTrainer",
    "fsdp2": "FSDP2Trainer",
    "pipeline": "PipelineTrainer",
    "accel": "AccelTrainer",
}
_ZERO_BUBBLE = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
_NEED_DATA = ("eval_on_start", "load_best_model_at_end", "eval_on_save", "preserve_best_model")
Faults = Iterator[InvalidArgument]


def trainer_conflicts(args: Any, kind: str, world_size: int) -> Faults:
    """What only the kind of trainer and the number of ranks decide: the support matrix, and what is
    installed."""
    trainer = KINDS.get(kind)
    if trainer is None or world_size < 1:
        raise ValueError(f"no trainer {kind!r} of {world_size} ranks: there are {', '.join(KINDS)}")
    if kind == "single" and world_size > 1:
        instead = "use DDPTrainer, FSDP2Trainer or PipelineTrainer"
        yield InvalidArgument("world_size", world_size, "Trainer is for one process", instead)
    if kind == "pipeline" and world_size == 1:
        reason = "a pipeline needs more than one rank"
        yield InvalidArgument("world_size", 1, reason, "use Trainer")
    if kind in ("ddp", "fsdp2", "accel") and getattr(args, "fuse_optim_with_backward", False):
        instead = "use Trainer or PipelineTrainer, or do not fuse"
        yield args.fault("fuse_optim_with_backward", f"{trainer} needs whole gradients", instead)
    if kind in ("single", "pipeline") and getattr(args, "dispatch_batches", None) is not None:
        reason = f"{trainer} has no other ranks to hand batches to"
        instead = "use DDPTrainer, FSDP2Trainer or AccelTrainer"
        yield args.fault("dispatch_batches", reason, instead)
    if kind == "pipeline":
        yield from pipeline_conflicts(args)
    if kind == "ddp" and hasattr(args, "ddp"):
        yield from _ddp_conflicts(args.ddp)
    shards = getattr(getattr(args, "fsdp2", None), "reshard_after_forward", True)
    if kind == "fsdp2" and not isinstance(shards, bool) and world_size % shards:
        reason, instead = f"does not divide the {world_size} ranks", "give one that does"
        yield InvalidArgument(
            "fsdp2.reshard_after_forward", shards, reason, f"{instead}, or True or False"
        )
    if kind != "single" and world_size > 1 and args.ddp_backend is not None:
        import torch.distributed as dist

        if not dist.is_backend_available(args.ddp_backend):
            reason = "this build of torch has no such backend"
            yield args.fault("ddp_backend", reason, "leave it at None")
    for recipe in ("fp8_recipe", "qat_recipe"):
        if getattr(args, recipe, None) is not None:
            yield from _low_precision_conflicts(args, recipe)


def pipeline_conflicts(args: Any) -> Faults:
    if args.mixed_precision == "fp16":
        reason = "not with a pipeline: stages cannot agree on a loss scale"
        yield args.fault("mixed_precision", reason, "use bf16")
    if args.torch_compile_mode == "max-autotune":
        reason = "its CUDA graphs do not go with micro-batches"
        yield args.fault("torch_compile_mode", reason, "use 'max-autotune-no-cudagraphs'")


def _ddp_conflicts(options: Any) -> Faults:
    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel.__init__).parameters
    cls: type = type(options)
    for name, argument in arguments_of(cls).items():
        value = getattr(options, name)
        if name not in known and value != argument.default:
            instead = f"leave it at {argument.default}, or install a newer torch"
            reason = "the installed torch has no such option"
            yield InvalidArgument(f"ddp.{name}", value, reason, instead)


def _low_precision_conflicts(args: Any, name: str) -> Faults:
    if importlib.util.find_spec("torchao") is None:
        instead = "install ckptcore[torchao], or leave it at None"
        yield args.fault(name, "needs the package torchao", instead)
    elif name == "fp8_recipe" and not args.fp8_emulate:
        import torch

        on_cuda = (
            torch.cuda.is_available() and not args.use_cpu and "cuda" in str(args.device or "cuda")
        )
        have = torch.cuda.get_device_capability(args.device) if on_cuda else None
        if have is None or have < (8, 9):
            where = "the CPU" if have is None else f"{have[0]}.{have[1]}"
            reason = f"needs CUDA compute capability 8.9, and this is {where}"
            instead = "leave it at None, or try the recipe with fp8_emulate=True"
            yield args.fault(name, reason, instead)


def part_conflicts(
    args: Any,
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
) -> Faults:
    """What the constructor's other arguments decide. `pipe_schedule` is the schedule's class."""
    yield from _model_conflicts(args, kind, model, model_init)
    losses = {"compute_loss_func": compute_loss_func, "fused_loss_factory": fused_loss_factory}
    yield from _loss_conflicts(args, {k: given for k, given in losses.items() if given is not None})
    if optimizer_factory is not None and optimizer_cls_and_kwargs is not None:
        given, reason = optimizer_cls_and_kwargs, "optimizer_factory was given too"
        yield InvalidArgument("optimizer_cls_and_kwargs", given, reason, "give one of the two")
    if args.gradient_checkpointing_kwargs and enable_activation_checkpoint_fn is not None:
        reason = "enable_activation_checkpoint_fn does it and does not get them"
        yield args.fault("gradient_checkpointing_kwargs", reason, "put them there")
    if eval_dataset is None:
        if args.eval_strategy != "no":
            yield args.fault("eval_strategy", "no eval_dataset", "give one, or use 'no'")
        for name in _NEED_DATA:
            if getattr(args, name, False) and (args.eval_strategy == "no"):
                yield args.fault(name, "no eval_dataset", f"give one, or set {name} to False")
    if pipe_schedule is not None:
        yield from _pipe_schedule_conflicts(args, pipe_schedule)


def _model_conflicts(args: Any, kind: str, model: object, model_init: object) -> Faults:
    if model is None and model_init is None:
        yield InvalidArgument("model", None, "nothing to train", "give model or model_init")
    shown = type(model).__name__
    if model is not None and model_init is not None:
        yield InvalidArgument("model", shown, "model_init was given too", "give one of the two")
    elif model is not None and kind == "pipeline":
        reason = "a pipeline builds its stages itself"
        yield InvalidArgument("model", shown, reason, "give model_init")
    elif model is not None and getattr(args, "construct_model_on", "default") == "meta":
        reason = "a model that exists is not built again"
        yield args.fault("construct_model_on", reason, "give model_init")


def _loss_conflicts(args: Any, given: dict[str, object]) -> Faults:
    if len(given) == 2:
        name, reason = "fused_loss_factory", "compute_loss_func was given too"
        yield InvalidArgument(name, given[name], reason, "give one of the two")
    if args.gradient_accumulation_steps > 1 and not given and not args.label_smoothing_factor:
        reason = "the loss of a step must be normalised over all its micro-batches"
        instead = (
            "give compute_loss_func (causal_lm_loss for Hugging Face's language models) or "
            "fused_loss_factory"
        )
        yield args.fault("gradient_accumulation_steps", reason, instead)
    if args.label_smoothing_factor and given:
        instead = "set it to 0, and smooth there"
        yield args.fault(
            "label_smoothing_factor", f"{next(iter(given))} computes the loss", instead
        )


def _pipe_schedule_conflicts(args: Any, schedule: type) -> Faults:
    bases = [base.__name__ for base in schedule.__mro__]
    multi = "PipelineScheduleMulti" in bases
    if multi != args.is_multistage:
        reason = f"{schedule.__name__} is for {'several stages' if multi else 'one stage'} a rank"
        yield args.fault("is_multistage", reason, f"set {multi}, or use another schedule")
    if args.torch_compile and any(name in bases for name in _ZERO_BUBBLE):
        reason = f"the split backward of {schedule.__name__} cannot walk a compiled stage"
        yield args.fault("torch_compile", reason, "use another schedule, or do not compile")
    if ("ScheduleZBVZeroBubble" in bases) != (args.pp_stage_type == "v"):
        wanted = "v" if args.pp_stage_type == "loop" else "loop"
        reason = f"{schedule.__name__} has its stages in another order"
        yield args.fault("pp_stage_type", reason, f"set {wanted!r}")
