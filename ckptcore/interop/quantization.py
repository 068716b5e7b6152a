"""Recipes of torchao for weights in few bits, by the names that the trainers have for them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from ..errors import InvalidState

__all__ = ["RECIPES", "quantization_config"]

# Classes of torchao.quantization, and what they are given: a value, or such a class with its own.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8-dynamic-act-int4-weight": (
        "Int8DynamicActivationIntxWeightConfig",
        {"weight_dtype": vars(torch)["int4"], "weight_granularity": ("PerGroup", 32)},
    ),
    "int4-weight-only": ("Int4WeightOnlyConfig", {"group_size": 128}),
    "float8-dynamic-act-float8-weight": (
        "Float8DynamicActivationFloat8WeightConfig",
        {"granularity": ("PerRow",)},
    ),
}


def quantization_config(recipe: str) -> Any:
    """The configuration of torchao that a recipe stands for: what `quantize_` takes after training,
    and `QATConfig` while a model is trained for it.

    recipe: "int8-dynamic-act-int4-weight" (groups of 32), "int4-weight-only" (groups of 128) or
        "float8-dynamic-act-float8-weight" (by row).

    Raises InvalidState for another name, ModuleNotFoundError where torchao is not installed.
    """
    if recipe not in RECIPES:
        raise InvalidState(f"quantisation recipe {recipe!r} is none of {', '.join(RECIPES)}")
    home = import_module("torchao.quantization")
    name, options = RECIPES[recipe]
    made = {
        key: getattr(home, value[0])(*value[1:]) if isinstance(value, tuple) else value
        for key, value in options.items()
    }
    return getattr(home, name)(**made)
