"""Optimizers and schedules from arguments, and parameters into groups by their names."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from .arguments import InvalidArgument, MinimalTrainingArguments
from .arguments.optimizer_options import ADAM, SCHEDULES, options_in

logger = logging.getLogger(__name__)
debugging = logging.getLogger("ckpt_trainers.debugging")

DEFAULT_GROUP = "default"

Groups = Mapping[str, Mapping[str, Any] | None]
Models = nn.Module | Sequence[nn.Module]

_CLASSES = {
    "adamw_torch": "torch.optim.AdamW",
    "adamw_torch_fused": "torch.optim.AdamW",
    "adamw_torch_8bit": "torchao.optim.AdamW8bit",
    "adamw_torch_4bit": "torchao.optim.AdamW4bit",
    "adafactor": "torch.optim.Adafactor",
    "sgd": "torch.optim.SGD",
    "adagrad": "torch.optim.Adagrad",
    "rmsprop": "torch.optim.RMSprop",
}

# Wrappers of torch that keep the wrapped module under a name of their own: class name -> that name.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}


def optimizer_class(
    args: MinimalTrainingArguments,
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class that `optim` names, and its keyword arguments. Raises InvalidArgument."""
    package, _, name = _CLASSES[args.optim].rpartition(".")
    try:
        cls = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError):
        reason = f"needs {package}, and it is not there"
        instead = "install torchao >= 0.4, or use adamw_torch"
        raise InvalidArgument("optim", args.optim, reason, instead) from None
    options = options_in(args.optim_args)
    _refuse_unknown("optim_args", options, set(inspect.signature(cls).parameters), name)
    kwargs: dict[str, Any] = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if args.optim in ADAM:
        kwargs |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optim == "adamw_torch_fused":
        kwargs["fused"] = True
    return cls, kwargs | options


def make_optimizer(
    args: MinimalTrainingArguments,
    model: Models,
    *,
    factory: Callable[[Any], torch.optim.Optimizer] | None = None,
    cls_and_kwargs: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | None = None,
    groups: Groups | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of a model, or of the stages of one, from the first of: factory, class and
    kwargs, arguments.

    The optimizer gets groups of parameters, each with its `name`. Of several modules (the stages of
    a pipeline, of which every rank has others) empty groups stay, so that a group has the same
    number on all ranks.
    """
    made_of = parameter_groups(model, groups, keep_empty=not isinstance(model, nn.Module))
    if getattr(args, "debug_optimizer_groups", False):
        of = {id(p): group["name"] for group in made_of for p in group["params"]}
        for name, p in parameter_names(model):
            debugging.info("optimizer group %s: %s %s", of[id(p)], name, list(p.shape))
    if factory is not None:
        optimizer = factory(made_of)
    else:
        cls, kwargs = cls_and_kwargs if cls_and_kwargs is not None else optimizer_class(args)
        optimizer = cls(made_of, **kwargs)
    # torch takes any name into a group, and ignores those that the optimizer does not read.
    for name, spec in (groups or {}).items() if hasattr(optimizer, "defaults") else ():
        config = (spec or {}).get("config") or {}
        where = f"optimizer_groups.{name}.config"
        _refuse_unknown(where, config, set(optimizer.defaults), type(optimizer).__name__)
    return optimizer


def _refuse_unknown(where: str, options: Mapping[str, Any], known: set[str], of: str) -> None:
    known = known - {"self", "params"}
    for option, value in options.items():
        if option not in known:
            reason, instead = f"{of} has no such option", f"there are {', '.join(sorted(known))}"
            raise InvalidArgument(f"{where}.{option}", value, reason, instead)


def parameter_groups(
    model: Models, groups: Groups | None = None, *, keep_empty: bool = False
) -> list[dict[str, Any]]:
    """Trainable parameters, each in the first group whose regex is found in its name, else in the
    default group.

    The default group comes first, the others in the order of `groups`.
    """
    patterns = dict(_patterns(groups or {}))
    found: dict[str, dict[str, Any]] = {DEFAULT_GROUP: {"params": [], "name": DEFAULT_GROUP}}
    found |= {
        name: {"params": [], "name": name, **config} for name, (_, config) in patterns.items()
    }
    for name, parameter in parameter_names(model):
        first = (group for group, (pattern, _) in patterns.items() if pattern.search(name))
        found[next(first, DEFAULT_GROUP)]["params"].append(parameter)
    if not any(group["params"] for group in found.values()):
        kind, reason = type(model).__name__, "no parameter of it is trainable"
        raise InvalidArgument("model", kind, reason, "set requires_grad on some")
    return [group for group in found.values() if group["params"] or keep_empty]


def _patterns(groups: Groups) -> Iterator[tuple[str, tuple[re.Pattern[str], dict[str, Any]]]]:
    for name, spec in groups.items():
        where = f"optimizer_groups.{name}"
        if name == DEFAULT_GROUP:
            reason = "the name of the group of all other parameters"
            raise InvalidArgument(where, spec, reason, "choose another name")
        if spec is None:
            continue
        well = isinstance(spec, Mapping) and isinstance(spec.get("regex"), str)
        if not well or spec.keys() - {"regex", "config"}:
            instead = "give {'regex': pattern, 'config': {option: value}}, or None to remove it"
            raise InvalidArgument(where, spec, "not a group", instead)
        config = spec.get("config") or {}
        if not isinstance(config, Mapping) or config.keys() & {"params", "name"}:
            reason = "not a mapping of options"
            raise InvalidArgument(f"{where}.config", config, reason, "give {option: value}")
        try:
            yield name, (re.compile(spec["regex"]), dict(config))
        except re.error as error:
            reason = f"not a regular expression: {error}"
            raise InvalidArgument(f"{where}.regex", spec["regex"], reason, "mend it") from None


def parameter_names(model: Models) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters by their names in the unwrapped model; a tied one once, by its first."""
    seen: set[int] = set()
    for module in [model] if isinstance(model, nn.Module) else model:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield _unwrapped(module, name), parameter


def _unwrapped(module: nn.Module, name: str) -> str:
    kept: list[str] = []
    inner: Any = module
    for part in name.split("."):
        bases = [cls for cls in type(inner).__mro__ if cls.__module__.startswith("torch.")]
        if part not in (_WRAPPERS.get(cls.__name__) for cls in bases):
            kept.append(part)
        inner = getattr(inner, part)
    return ".".join(kept)


Factor = Callable[[int], float]


def schedule(
    kind: str, warmup_steps: int, total_steps: int, kwargs: Mapping[str, Any] | None = None
) -> Factor:
    """Factor on the base learning rate after t completed steps: of w steps of warm-up and T steps
    in all,

        t < w:   t / w, unless the kind is "constant", which has no warm-up
        t >= w:  a function of p = (t - w) / max(1, T - w), at most 1, of the kind:

        linear                1 - p
        cosine                (1 + cos(pi p)) / 2, one period of eq. 5 of Loshchilov and Hutter
        cosine_with_restarts  (1 + cos(pi frac(n p))) / 2, and 0 at p = 1; n = num_cycles
        constant, constant_with_warmup  1
        polynomial            (1 - p) ** power

    The first step runs at 0 where there is a warm-up.
    """
    if kind not in SCHEDULES:
        instead = "give the trainer a lr_scheduler_factory"
        raise InvalidArgument("lr_scheduler_type", kind, "unknown", instead)
    options = {**SCHEDULES[kind], **(kwargs or {})}
    if unknown := sorted(options.keys() - SCHEDULES[kind].keys()):
        reason = f"{kind} has no {unknown[0]}"
        raise InvalidArgument("lr_scheduler_kwargs", kwargs, reason, "leave it out")
    span = max(1, total_steps - warmup_steps)

    def factor(step: int) -> float:
        if step < warmup_steps and kind != "constant":
            return step / warmup_steps
        done = step - warmup_steps
        progress = min(max(done / span, 0.0), 1.0)
        if kind == "linear":
            return 1.0 - progress
        if kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        if kind == "cosine_with_restarts":
            # The remainder is taken before the division, so that a restart falls on its very step.
            within = options["num_cycles"] * done % span / span
            return 0.0 if done >= span else 0.5 * (1.0 + math.cos(math.pi * within))
        if kind == "polynomial":
            return float((1.0 - progress) ** options["power"])
        return 1.0

    return factor


class StepSchedule(LambdaLR):
    """LambdaLR whose whole state is the number of completed steps.

    A resumed run gets the learning rates that its own arguments give at that step: neither the old
    total number of steps nor the old base rates come back with the state. Rates that are tensors
    are changed in place.
    """

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = self.last_epoch + 1
        # The optimizer's state, loaded before this, had the rates of the run that was saved.
        for group, base, factor in zip(
            self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True
        ):
            _set(group, "initial_lr", base)
            _set(group, "lr", base * factor(self.last_epoch))
        self._last_lr = [_value(group["lr"]) for group in self.optimizer.param_groups]


def _set(group: dict[str, Any], name: str, value: float | torch.Tensor) -> None:
    if isinstance(group.get(name), torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = _value(value)


def _value(value: float | torch.Tensor) -> float | torch.Tensor:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def make_scheduler(
    args: MinimalTrainingArguments,
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    factory: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
) -> LRScheduler:
    """The scheduler of a run of so many steps; it is stepped once per optimizer step."""
    if factory is not None:
        return factory(optimizer)
    warmup = args.warmup(total_steps)
    if args.lr_scheduler_type == "constant" and warmup:
        text = "the schedule 'constant' has no warm-up: %d warm-up steps have no effect"
        logger.info(text, warmup)
    kind, kwargs = args.lr_scheduler_type, args.lr_scheduler_kwargs
    return StepSchedule(optimizer, schedule(kind, warmup, total_steps, kwargs))
