"""Linear layers that compute in float8, or train as if they were quantised: torchao's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ckptcore import quantization_config

from .arguments.conflicts import low_precision_conflicts
from .arguments.errors import raise_any

log = logging.getLogger(__name__)


def lower_precision(model: nn.Module, args: Any) -> nn.Module:
    """The model with the linear layers that `fp8_recipe` or `qat_recipe` want. Names of parameters
    and their values stay. Raises InvalidArgument."""
    for argument, convert in (("fp8_recipe", to_float8), ("qat_recipe", to_fake_quantised)):
        if getattr(args, argument) is not None:
            raise_any(low_precision_conflicts(args, argument))
            return convert(model, args)
    return model


def to_float8(model: nn.Module, args: Any) -> nn.Module:
    """Linear layers whose dimensions are multiples of fp8_dim_alignment (0: all), in float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe, alignment = args.fp8_recipe, args.fp8_dim_alignment

    def misfit(layer: nn.Linear) -> str | None:
        sizes = (layer.in_features, layer.out_features)
        aligned = not alignment or not any(size % alignment for size in sizes)
        return None if aligned else f"{sizes[0]} x {sizes[1]}, no multiples of {alignment}"

    wanted = _chosen(model, f"fp8_recipe={recipe!r}", misfit)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=args.fp8_emulate)
    made: nn.Module = convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name in wanted
    )
    return made


def to_fake_quantised(model: nn.Module, args: Any) -> nn.Module:
    """Linear layers train as if quantised; `ckpt export --quantize` makes them so afterwards."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    base = quantization_config(args.qat_recipe)
    granularity = getattr(base, "weight_granularity", None)
    group = getattr(base, "group_size", getattr(granularity, "group_size", 1))

    def misfit(layer: nn.Linear) -> str | None:
        whole = layer.in_features % group == 0
        return None if whole else f"{layer.in_features} inputs, no multiple of {group}"

    wanted = _chosen(model, f"qat_recipe={args.qat_recipe!r}", misfit)
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
