"""Optimizers from arguments, and parameters into groups by their names."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .arguments import InvalidArgument, MinimalTrainingArguments
from .arguments.optimizer_options import ADAM, options_in

__all__ = [
    "DEFAULT_GROUP",
    "make_optimizer",
    "optimizer_class",
    "parameter_groups",
    "parameter_names",
]

logger = logging.getLogger(__name__)

DEFAULT_GROUP = "default"

Groups = Mapping[str, Mapping[str, Any] | None]
Models = nn.Module | Sequence[nn.Module]

_CLASSES = {
    "adamw_torch": ("torch.optim", "AdamW"),
    "adamw_torch_fused": ("torch.optim", "AdamW"),
    "adamw_torch_8bit": ("torchao.optim", "AdamW8bit"),
    "adamw_torch_4bit": ("torchao.optim", "AdamW4bit"),
    "adafactor": ("torch.optim", "Adafactor"),
    "sgd": ("torch.optim", "SGD"),
    "adagrad": ("torch.optim", "Adagrad"),
    "rmsprop": ("torch.optim", "RMSprop"),
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
    package, name = _CLASSES[args.optim]
    try:
        cls = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError):
        raise InvalidArgument(
            "optim",
            args.optim,
            f"needs {package}, and it is not there",
            "install torchao >= 0.4, or use adamw_torch",
        ) from None
    options = options_in(args.optim_args)
    known = set(inspect.signature(cls).parameters) - {"self", "params"}
    for option, value in options.items():
        if option not in known:
            raise InvalidArgument(
                f"optim_args.{option}",
                value,
                f"{name} has no such option",
                f"there are {', '.join(sorted(known))}",
            )
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
    if factory is not None and cls_and_kwargs is not None:
        raise InvalidArgument(
            "optimizer_cls_and_kwargs",
            cls_and_kwargs,
            "optimizer_factory was given too",
            "give one of the two",
        )
    made_of = parameter_groups(model, groups, keep_empty=not isinstance(model, nn.Module))
    if getattr(args, "debug_optimizer_groups", False):
        _log_groups(model, made_of)
    if factory is not None:
        optimizer = factory(made_of)
    else:
        cls, kwargs = cls_and_kwargs if cls_and_kwargs is not None else optimizer_class(args)
        optimizer = cls(made_of, **kwargs)
    _check_options(groups or {}, optimizer)
    return optimizer


def _check_options(groups: Groups, optimizer: torch.optim.Optimizer) -> None:
    """torch takes any name into a group, and ignores those that the optimizer does not read."""
    known = getattr(optimizer, "defaults", None)
    if known is None:
        return
    for name, spec in groups.items():
        for option, value in ((spec or {}).get("config") or {}).items():
            if option not in known:
                raise InvalidArgument(
                    f"optimizer_groups.{name}.config.{option}",
                    value,
                    f"{type(optimizer).__name__} has no such option",
                    f"there are {', '.join(sorted(known))}",
                )


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
        of = next(
            (group for group, (pattern, _) in patterns.items() if pattern.search(name)),
            DEFAULT_GROUP,
        )
        found[of]["params"].append(parameter)
    if not any(group["params"] for group in found.values()):
        raise InvalidArgument(
            "model",
            type(model).__name__,
            "no parameter of it is trainable",
            "set requires_grad on some",
        )
    return [group for group in found.values() if group["params"] or keep_empty]


def _patterns(groups: Groups) -> Iterator[tuple[str, tuple[re.Pattern[str], dict[str, Any]]]]:
    for name, spec in groups.items():
        where = f"optimizer_groups.{name}"
        if name == DEFAULT_GROUP:
            raise InvalidArgument(
                where, spec, "the name of the group of all other parameters", "choose another name"
            )
        if spec is None:
            continue
        if (
            not isinstance(spec, Mapping)
            or not isinstance(spec.get("regex"), str)
            or spec.keys() - {"regex", "config"}
        ):
            raise InvalidArgument(
                where,
                spec,
                "not a group",
                "give {'regex': pattern, 'config': {option: value}}, or None to remove it",
            )
        config = spec.get("config") or {}
        if not isinstance(config, Mapping) or config.keys() & {"params", "name"}:
            raise InvalidArgument(
                f"{where}.config", config, "not a mapping of options", "give {option: value}"
            )
        try:
            yield name, (re.compile(spec["regex"]), dict(config))
        except re.error as error:
            raise InvalidArgument(
                f"{where}.regex", spec["regex"], f"not a regular expression: {error}", "mend it"
            ) from None


def parameter_names(model: Models) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters with their names in the unwrapped model; a tied one once, under its
    first name."""
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
        wrappers = [
            _WRAPPERS.get(cls.__name__)
            for cls in type(inner).__mro__
            if cls.__module__.startswith("torch.")
        ]
        if part not in wrappers:
            kept.append(part)
        inner = getattr(inner, part)
    return ".".join(kept)


def _log_groups(model: Models, groups: Iterable[Mapping[str, Any]]) -> None:
    of = {id(parameter): group["name"] for group in groups for parameter in group["params"]}
    for name, parameter in parameter_names(model):
        logger.info("optimizer group %s: %s %s", of[id(parameter)], name, list(parameter.shape))
