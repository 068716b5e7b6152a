"""Recipes of torchao for weights in few bits, by the names that the trainers have for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ..errors import InvalidArgument, InvalidState
from .optimizer_names import made

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

# Those that torchao computes on a GPU alone.
ON_GPU = frozenset({"int4-weight-only", "float8-dynamic-act-float8-weight"})


def quantization_config(recipe: str) -> Any:
    """The configuration of torchao that a recipe stands for: what `quantize_` takes after training,
    and `QATConfig` while a model is trained for it.

    recipe: "int8-dynamic-act-int4-weight" (groups of 32), "int4-weight-only" (groups of 128) or
        "float8-dynamic-act-float8-weight" (by row).

    Raises InvalidState for another name, ModuleNotFoundError where torchao is not installed.
    """
    if recipe not in RECIPES:
        raise InvalidArgument(f"quantisation recipe {recipe!r} is none of {', '.join(RECIPES)}")
    home = import_module("torchao.quantization")
    name, options = RECIPES[recipe]
    made = {
        key: getattr(home, value[0])(*value[1:]) if isinstance(value, tuple) else value
        for key, value in options.items()
    }
    return getattr(home, name)(**made)


def linear_weights(model: Callable[[], nn.Module] | str) -> list[str]:
    """Names of the weights of all `nn.Linear` of a model. It is built without memory.

    model: what makes it without arguments; or as text, "module:function".

    Raises InvalidState, and what the function raises.
    """
    layers = made(model).named_modules()
    return [f"{name}.weight".lstrip(".") for name, m in layers if isinstance(m, nn.Linear)]


class Quantizer:
    """Weights of linear layers in few bits, one after the other."""

    def __init__(
        self,
        recipe: str,
        model: Callable[[], nn.Module] | str | None,
        linear: Iterable[str],
        trained: Mapping[str, Any],
    ) -> None:
        """linear: patterns of names, where there is no model; trained: the checkpoint's
        metadata."""
        asked = (trained.get("training_args") or {}).get("qat_recipe")
        if asked not in (None, recipe):
            raise InvalidState(
                f"the model was trained for the recipe {asked!r}, not for {recipe!r}: "
                f"quantise it as {asked!r}"
            )
        try:
            self.config = quantization_config(recipe)
        except ModuleNotFoundError as error:
            raise InvalidState(
                f"quantising needs the package {error.name}: pip install 'ckptcore[torchao]'"
            ) from error
        self.recipe = recipe
        self.patterns = [*linear] if model is None else linear_weights(model)
        if not self.patterns:
            raise InvalidState(
                "which weights are of linear layers, nothing here says: give the model, or "
                "patterns of their names"
            )
        granularity = getattr(self.config, "weight_granularity", None)
        default = getattr(granularity, "group_size", 1)
        self.group = int(getattr(self.config, "group_size", default))

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and any(fnmatchcase(name, each) for each in self.patterns)

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Why a layer stays as it is."""
        whole = shape[1] % self.group == 0
        return None if whole else f"{shape[1]} inputs, no multiple of {self.group}"

    def quantized(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Raises InvalidState where this machine cannot."""
        if "." not in name:
            reason = f"{name!r} is the model's only layer, for which torchao has no name in a file"
            raise InvalidState(reason, key=name)
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.in_features, layer.out_features = weight.shape[1], weight.shape[0]
        device = "cuda" if self.recipe in ON_GPU and torch.cuda.is_available() else "cpu"
        layer.weight = nn.Parameter(weight.to(device), requires_grad=False)
        holder = nn.Sequential(layer)
        try:
            import_module("torchao.quantization").quantize_(holder, self.config)
        except (ImportError, NotImplementedError, RuntimeError, AssertionError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise InvalidState(
                f"{name!r} cannot be quantised by {self.recipe!r} on this machine: {reason}",
                key=name,
            ) from error
        return holder.get_parameter("0.weight").detach().to("cpu")

    def flattened(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What a safetensors file holds of them, and its header says, as torchao reads it."""
        support = import_module("torchao.prototype.safetensors.safetensors_support")
        found, header = support.flatten_tensor_state_dict(tensors)
        return found, {"format": "pt", "quantization_recipe": self.recipe, **header}

    def described(self) -> dict[str, Any]:
        """For the config.json of the model, as transformers reads it."""
        to_dict = import_module("torchao.core.config").config_to_dict
        return {"quant_method": "torchao", "quant_type": {"default": to_dict(self.config)}}
