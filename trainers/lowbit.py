"""Linear layers that compute in float8, or train as if they were quantised: torchao's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckptcore import quantization_config

from .arguments import InvalidArgument

log = logging.getLogger(__name__)


def lower_precision(model: nn.Module, args: Any) -> nn.Module:
    """The model with the linear layers that `fp8_recipe` or `qat_recipe` want. Names of parameters
    and their values stay. Raises InvalidArgument."""
    if args.fp8_recipe is not None:
        return to_float8(model, args.fp8_recipe, args.fp8_dim_alignment, args.fp8_emulate)
    if args.qat_recipe is not None:
        return to_fake_quantised(model, args.qat_recipe)
    return model


def to_float8(model: nn.Module, recipe: str, alignment: int, emulate: bool) -> nn.Module:
    """Linear layers whose dimensions are multiples of `alignment` (0: all) compute in float8."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise _not_installed("fp8_recipe", recipe) from None
    if not emulate and (
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)
    ):
        raise InvalidArgument(
            "fp8_recipe",
            recipe,
            "needs a CUDA device of capability 8.9 or above",
            "leave it out, or try the recipe with fp8_emulate=True",
        )

    def misfit(layer: nn.Linear) -> str | None:
        sizes = (layer.in_features, layer.out_features)
        aligned = not alignment or not any(size % alignment for size in sizes)
        return None if aligned else f"{sizes[0]} x {sizes[1]}, no multiples of {alignment}"

    wanted = _chosen(model, f"fp8_recipe={recipe!r}", misfit)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    made: nn.Module = convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name in wanted
    )
    return made


def to_fake_quantised(model: nn.Module, recipe: str) -> nn.Module:
    """Linear layers train as if they were quantised. `ckpt export --quantize` makes them so after
    training."""
    try:
        from torchao.quantization import quantize_
        from torchao.quantization.qat import QATConfig

        base = quantization_config(recipe)
    except ImportError:
        raise _not_installed("qat_recipe", recipe) from None
    granularity = getattr(base, "weight_granularity", None)
    group = getattr(base, "group_size", getattr(granularity, "group_size", 1))

    def misfit(layer: nn.Linear) -> str | None:
        whole = layer.in_features % group == 0
        return None if whole else f"{layer.in_features} inputs, no multiple of {group}"

    wanted = _chosen(model, f"qat_recipe={recipe!r}", misfit)
    # A model that is one layer is replaced, which torchao does only inside of another module.
    holder = nn.ModuleList([model])
    names = {f"0.{name}".rstrip(".") for name in wanted}
    config = QATConfig(base, step="prepare")
    quantize_(holder, config, filter_fn=lambda _, name: name in names)
    return holder[0]


def _chosen(model: nn.Module, argument: str, misfit: Callable[[nn.Linear], str | None]) -> set[str]:
    """The names of the linear layers that are converted. Logs which are not, and why."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    kept = {name: why for name, layer in layers.items() if (why := misfit(layer)) is not None}
    for name, why in kept.items():
        log.info("%s: %s stays as it is (%s)", argument, name or "the model", why)
    converted = len(layers) - len(kept)
    level = logging.INFO if converted else logging.WARNING
    log.log(level, "%s: converted %d/%d Linear layers", argument, converted, len(layers))
    return layers.keys() - kept.keys()


def _not_installed(argument: str, recipe: str) -> InvalidArgument:
    return InvalidArgument(
        argument,
        recipe,
        "torchao is not installed",
        "pip install ckptcore[torchao], or leave it out",
    )
