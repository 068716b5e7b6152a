"""What does not go together: rules in one place, for the arguments alone, for a kind of trainer,
and for what a trainer's constructor is given."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from .errors import InvalidArgument, raise_any
from .kinds import arguments_of
from .optimizer_options import SCHEDULES, option_conflicts

KINDS = {
    "single": "Trainer",
    "ddp": "DDPTrainer",
    "fsdp2": "FSDP2Trainer",
    "pipeline": "PipelineTrainer",
    "accel": "AccelTrainer",
}
_NO_CUDAGRAPHS = "use 'max-autotune-no-cudagraphs'"
Faults = Iterator[InvalidArgument]


class _Known(SimpleNamespace):
    """Arguments, and what else is known; None for what a class of arguments has not got."""

    def __getattr__(self, name: str) -> None:
        return None

    def no(self, name: str, text: str) -> InvalidArgument:
        """The refusal of an argument. text: why; what to do instead."""
        reason, _, instead = text.partition("; ")
        return InvalidArgument(name, getattr(self, name), reason, instead)


def conflicts(args: Any) -> Faults:
    """What does not go together, judged from arguments of any class alone."""
    a = _Known(**vars(args))
    if a.n_embd and a.n_embd % a.n_head:
        yield a.no("n_embd", f"not a multiple of n_head={a.n_head}; make it one")
    if a.lr_scheduler_type:  # arguments of a trainer
        yield from _of_a_run(a)
        yield from _of_the_best(a)
        yield from _of_the_schedule(a)
        yield from option_conflicts(a.optim, a.optim_args)
        yield from _of_memory(a)
    if a.n_microbatches:
        yield from _of_a_pipeline(a)


def _of_a_run(a: _Known) -> Faults:
    if a.full_determinism and a.seed < 0:
        yield a.no("full_determinism", "nothing is determined without a seed; set seed, from 0 up")
    if a.torch_compile_mode == "max-autotune" and a.gradient_accumulation_steps > 1:
        reason = "its CUDA graphs do not go with gradient_accumulation_steps > 1"
        yield a.no("torch_compile_mode", f"{reason}; {_NO_CUDAGRAPHS}")
    if a.save_strategy == "best" and a.eval_strategy == "no":
        text = "without evaluations no checkpoint is the best; set eval_strategy"
        yield a.no("save_strategy", text)
    if a.num_train_epochs < 0 and a.max_steps < 1:
        reason = "no limit of epochs, and max_steps is not set"
        instead = "set max_steps above 0, or num_train_epochs above 0"
        yield a.no("num_train_epochs", f"{reason}; {instead}")
    if a.num_train_epochs == 0 and a.max_steps < 1:
        yield a.no("num_train_epochs", "out of range; give a number above 0, or set max_steps")
    if a.on_world_size_change == "continue" and a.max_steps < 1:
        # The steps of an epoch depend on the number of ranks: those done would count for another
        # share of the run.
        text = "num_train_epochs is no fixed number of steps then; set max_steps"
        yield a.no("on_world_size_change", text)
    for name in ("dataloader_persistent_workers", "dataloader_prefetch_factor"):
        if getattr(a, name) and not a.dataloader_num_workers:
            instead = "set dataloader_num_workers above 0, or leave it out"
            yield a.no(name, f"there are no workers; {instead}")


def _of_the_best(a: _Known) -> Faults:
    """Hugging Face's rules: the best model must be among those saved."""
    name, save, evaluate = "load_best_model_at_end", a.save_strategy, a.eval_strategy
    if a.load_best_model_at_end and save != "best":
        times, same_kind = a.save_steps / a.eval_steps, (a.save_steps < 1) == (a.eval_steps < 1)
        fits = same_kind and abs(times - max(1, round(times))) <= 1e-9
        if save != evaluate or save == "no":
            reason = f"save_strategy={save!r} and eval_strategy={evaluate!r} do not match"
            instead = "make both 'steps' or both 'epoch', or set save_strategy='best'"
            yield a.no(name, f"{reason}; {instead}")
        elif save == "steps" and not a.eval_on_save and not fits:
            reason = f"save_steps={a.save_steps} is no multiple of eval_steps={a.eval_steps}"
            instead = "make it one, or set eval_on_save or save_strategy='best'"
            yield a.no(name, f"{reason}; {instead}")
    for one, other in (
        ("metric_for_best_model", "best_model_metric"),
        ("greater_is_better", "best_model_greater_is_better"),
    ):
        if a.best_model_metric is not None and getattr(a, one) != getattr(a, other):
            instead = f"give one of {other} and {one}"
            yield a.no(other, f"contradicts {one}={getattr(a, one)!r}; {instead}")


def _of_the_schedule(a: _Known) -> Faults:
    known = SCHEDULES[a.lr_scheduler_type]
    for name, value in (a.lr_scheduler_kwargs or {}).items():
        shown = f"lr_scheduler_kwargs.{name}"
        if name not in known:
            takes = f"takes {', '.join(known)} only" if known else "takes none"
            reason = f"unknown: the schedule {a.lr_scheduler_type} {takes}"
            instead = "leave it out, or give the trainer an lr_scheduler_factory"
            yield InvalidArgument(shown, value, reason, instead)
        elif type(value) not in (int, float) or not 0 < value < math.inf:
            yield InvalidArgument(shown, value, "out of range", "give a number above 0")


def _of_memory(a: _Known) -> Faults:
    if a.fp8_recipe and a.qat_recipe:
        yield a.no("fp8_recipe", f"excludes qat_recipe={a.qat_recipe!r}; give one of the two")
    if a.sdpa_set_priority and not isinstance(a.sdpa_backend, list):
        reason = f"sdpa_backend={a.sdpa_backend!r} is no list to take an order from"
        yield a.no("sdpa_set_priority", f"{reason}; give sdpa_backend a list")
    if a.activation_memory_budget is not None and not a.torch_compile:
        reason = "a setting of the compiler, and the model is not compiled"
        yield a.no("activation_memory_budget", f"{reason}; set torch_compile")
    for name, given, instead in (
        ("max_grad_norm", a.max_grad_norm, "set max_grad_norm to None"),
        ("gradient_accumulation_steps > 1", a.gradient_accumulation_steps > 1, "set it to 1"),
        ("mixed_precision='fp16'", a.mixed_precision == "fp16", "use bf16"),
    ):
        if a.fuse_optim_with_backward and given:
            reason = f"excludes {name}, since no gradient outlives its step"
            yield a.no("fuse_optim_with_backward", f"{reason}; {instead}, or do not fuse")


def _of_a_pipeline(a: _Known) -> Faults:
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if getattr(a, name) % a.n_microbatches:
            reason = f"does not divide {name}={getattr(a, name)}"
            yield a.no("n_microbatches", f"{reason}; give one that does")
    if a.stages_per_rank > 1 and not a.is_multistage:
        reason = "a rank has one stage unless is_multistage=True"
        instead = "set is_multistage, with a schedule derived from PipelineScheduleMulti"
        yield a.no("stages_per_rank", f"{reason}; {instead}")
    if a.mixed_precision == "fp16":
        reason = "not with a pipeline: stages cannot agree on a loss scale"
        yield a.no("mixed_precision", f"{reason}; use bf16")
    if a.torch_compile_mode == "max-autotune":
        reason = "its CUDA graphs do not go with micro-batches"
        yield a.no("torch_compile_mode", f"{reason}; {_NO_CUDAGRAPHS}")


def check_trainer(args: Any, kind: str, world_size: int) -> None:
    """What the kind of trainer, the ranks and what is installed decide. Raises InvalidArgument."""
    if kind not in KINDS or world_size < 1:
        raise ValueError(f"no trainer {kind!r} of {world_size} ranks: there are {', '.join(KINDS)}")
    raise_any(_of_a_trainer(_Known(**vars(args), world_size=world_size), kind))


def _of_a_trainer(a: _Known, kind: str) -> Faults:
    if kind == "single" and a.world_size > 1:
        instead = "use DDPTrainer, FSDP2Trainer or PipelineTrainer"
        yield a.no("world_size", f"Trainer is for one process; {instead}")
    if kind == "pipeline" and a.world_size == 1:
        yield a.no("world_size", "a pipeline needs more than one rank; use Trainer")
    if kind in ("ddp", "fsdp2", "accel") and a.fuse_optim_with_backward:
        instead = "use Trainer or PipelineTrainer, or do not fuse"
        yield a.no("fuse_optim_with_backward", f"{KINDS[kind]} needs whole gradients; {instead}")
    shards = a.fsdp2.reshard_after_forward if a.fsdp2 else True
    if kind == "fsdp2" and not isinstance(shards, bool) and a.world_size % shards:
        reason = f"does not divide the {a.world_size} ranks"
        name, instead = "fsdp2.reshard_after_forward", "give one that does, or True or False"
        yield InvalidArgument(name, shards, reason, instead)
    if kind == "ddp" and a.ddp:
        yield from _unknown_to_torch(a.ddp)
    if kind != "single" and a.world_size > 1 and a.ddp_backend is not None:
        import torch.distributed as dist

        if not dist.is_backend_available(a.ddp_backend):
            yield a.no("ddp_backend", "this build of torch has no such backend; leave it at None")
    for recipe in ("fp8_recipe", "qat_recipe"):
        if getattr(a, recipe) is not None:
            yield from low_precision_conflicts(a, recipe)


def check_parts(args: Any, kind: str, *, pipe_schedule: type | None = None, **parts: Any) -> None:
    """What decides that the constructor was given, by its names there. Raises InvalidArgument."""
    given = {name: value for name, value in parts.items() if value is not None}
    if "model" in given:
        given["model"] = type(given["model"]).__name__
    a = _Known(**vars(args), **given)
    of_schedule = () if pipe_schedule is None else _of_a_pipe_schedule(a, pipe_schedule)
    raise_any([*_of_the_model(a, kind), *_of_the_parts(a), *of_schedule])


def _of_the_model(a: _Known, kind: str) -> Faults:
    if a.model is None and a.model_init is None:
        yield a.no("model", "nothing to train; give model or model_init")
    elif a.model is not None and a.model_init is not None:
        yield a.no("model", "model_init was given too; give one of the two")
    elif a.model is not None and kind == "pipeline":
        yield a.no("model", "a pipeline builds its stages itself; give model_init")
    elif a.model is not None and a.construct_model_on == "meta":
        yield a.no("construct_model_on", "a model that exists is not built again; give model_init")


def _of_the_parts(a: _Known) -> Faults:
    names = ("compute_loss_func", "fused_loss_factory")
    losses = [name for name in names if getattr(a, name) is not None]
    if len(losses) == 2:
        yield a.no("fused_loss_factory", "compute_loss_func was given too; give one of the two")
    if a.gradient_accumulation_steps > 1 and not losses and not a.label_smoothing_factor:
        reason = "the loss of a step must be normalised over all its micro-batches"
        instead = "give compute_loss_func (causal_lm_loss for Hugging Face's language models)"
        yield a.no("gradient_accumulation_steps", f"{reason}; {instead} or fused_loss_factory")
    if a.label_smoothing_factor and losses:
        text = f"{losses[0]} computes the loss; set it to 0, and smooth there"
        yield a.no("label_smoothing_factor", text)
    if a.optimizer_factory is not None and a.optimizer_cls_and_kwargs is not None:
        text = "optimizer_factory was given too; give one of the two"
        yield a.no("optimizer_cls_and_kwargs", text)
    if a.gradient_checkpointing_kwargs and a.enable_activation_checkpoint_fn is not None:
        reason = "enable_activation_checkpoint_fn does it and does not get them"
        yield a.no("gradient_checkpointing_kwargs", f"{reason}; put them there")
    if a.eval_dataset is not None:
        return
    if a.eval_strategy != "no":
        yield a.no("eval_strategy", "no eval_dataset; give one, or use 'no'")
        return
    for name in ("eval_on_start", "load_best_model_at_end", "eval_on_save", "preserve_best_model"):
        if getattr(a, name):
            yield a.no(name, f"no eval_dataset; give one, or set {name} to False")


def _of_a_pipe_schedule(a: _Known, schedule: type) -> Faults:
    bases, name = [base.__name__ for base in schedule.__mro__], schedule.__name__
    multi, in_v = "PipelineScheduleMulti" in bases, "ScheduleZBVZeroBubble" in bases
    if multi != a.is_multistage:
        reason = f"{name} is for {'several stages' if multi else 'one stage'} a rank"
        yield a.no("is_multistage", f"{reason}; set {multi}, or use another schedule")
    if a.torch_compile and (in_v or "ScheduleInterleavedZeroBubble" in bases):
        reason = f"the split backward of {name} cannot walk a compiled stage"
        yield a.no("torch_compile", f"{reason}; use another schedule, or do not compile")
    if in_v != (a.pp_stage_type == "v"):
        instead = f"set {'v' if a.pp_stage_type == 'loop' else 'loop'!r}"
        yield a.no("pp_stage_type", f"{name} has its stages in another order; {instead}")


def _unknown_to_torch(options: Any) -> Faults:
    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel.__init__).parameters
    ours: type = type(options)
    for name, argument in arguments_of(ours).items():
        value = getattr(options, name)
        if name not in known and value != argument.default:
            instead = f"leave it at {argument.default}, or install a newer torch"
            reason = "the installed torch has no such option"
            yield InvalidArgument(f"ddp.{name}", value, reason, instead)


def low_precision_conflicts(args: Any, name: str) -> Faults:
    """Why fp8_recipe or qat_recipe cannot be followed here."""
    value = getattr(args, name)
    if importlib.util.find_spec("torchao") is None:
        instead = "install ckptcore[torchao], or leave it at None"
        yield InvalidArgument(name, value, "needs the package torchao", instead)
    elif name == "fp8_recipe" and not args.fp8_emulate:
        import torch

        named = not args.use_cpu and "cuda" in str(args.device or "cuda")
        on_cuda = named and torch.cuda.is_available()
        have = torch.cuda.get_device_capability(args.device) if on_cuda else None
        if have is None or have < (8, 9):
            where = "the CPU" if have is None else f"{have[0]}.{have[1]}"
            reason = f"needs CUDA compute capability 8.9, and this is {where}"
            instead = "leave it at None, or try the recipe with fp8_emulate=True"
            yield InvalidArgument(name, value, reason, instead)
