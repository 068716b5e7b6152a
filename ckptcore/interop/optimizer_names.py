"""Optimizer states by number, as torch writes them, into states by parameter name, and back.

By name is what OptimizerState saves and loads: {"state": {name: values}, "group_of": {name: group
number}, "shapes": {name: shape}, "groups": {group number: options}}. Numbers count parameters over
all groups in their order, so that names must be known in that order: a guess by shapes would take
one moment for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ..errors import InvalidArgument, InvalidState

__all__ = ["by_name", "is_by_number", "made", "names_of", "shapes_of", "with_parameter_lists"]


# Moments that have the shape of their parameter.
_ALIKE = {
    "acc_delta",
    "ax",
    "exp_avg",
    "exp_avg_sq",
    "exp_inf",
    "max_exp_avg_sq",
    "momentum_buffer",
    "prev",
    "square_avg",
    "step_size",
    "sum",
}


def is_by_number(state: Any) -> bool:
    """Whether it is what an optimizer's own state_dict() returns."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        return False
    groups = state["param_groups"]
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def made(model: Callable[[], nn.Module] | str) -> nn.Module:
    """A model without memory, of what makes it without arguments; or as text, "module:function".
    Raises InvalidArgument, and what the function raises."""
    if isinstance(model, str):
        home, _, name = model.partition(":")
        try:
            make: Callable[[], nn.Module] = getattr(import_module(home), name)
        except (ImportError, AttributeError, ValueError) as error:
            reason = f"model {model!r} is no function as in package.module:function ({error})"
            raise InvalidArgument(reason) from error
    else:
        make = model
    with torch.device("meta"):
        return make()


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    """The parameters that are trained, tied ones once, by their first name."""
    return {
        name: list(parameter.shape)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def names_of(state: Mapping[str, Any], model: nn.Module | None) -> list[list[str]]:
    """The parameters' names, group by group.

    Those that the groups have themselves, else those of the model: in its order for one group, and
    for two in that of Hugging Face's Trainer, all that decay before all that do not. Raises
    InvalidState where neither is known to fit.
    """
    groups = state["param_groups"]
    if all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
        return [list(group["param_names"]) for group in groups]
    if all(isinstance(member, str) for group in groups for member in group["params"]):
        return [list(group["params"]) for group in groups]
    sizes = [len(group["params"]) for group in groups]
    if model is None:
        raise InvalidState(
            f"the optimizer numbers its {sum(sizes)} parameters, and no model says their names: "
            "give model= (ckpt import --model), or names="
        )
    known = list(shapes_of(model))
    if len(groups) == 1:
        found = [known]
    elif len(groups) == 2:
        decays = _decaying(model)
        found = [[n for n in known if n in decays], [n for n in known if n not in decays]]
    else:
        raise InvalidState(f"the optimizer has {len(groups)} groups: give names= for each")
    if [len(names) for names in found] != sizes:
        raise InvalidState(
            f"the optimizer has {sizes} parameters by group, and the model "
            f"{[len(names) for names in found]}: give names="
        )
    return found


def _decaying(model: nn.Module) -> set[str]:
    """What Hugging Face's Trainer lets decay. Raises InvalidState where it is not installed."""
    try:
        from transformers import Trainer
    except ImportError:
        raise InvalidState(
            "which parameters decay is known to transformers, which is not installed: give names="
        ) from None
    return set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]


def by_name(
    state: Mapping[str, Any], names: Sequence[Sequence[str]], shapes: Mapping[str, Any]
) -> dict[str, Any]:
    """The state by name. names: by group; shapes: of the parameters, where they are known.

    Raises InvalidState where the moments of a parameter have another shape than it has: then the
    names are not those of this optimizer.
    """
    groups = state["param_groups"]
    if [len(group["params"]) for group in groups] != [len(each) for each in names]:
        raise InvalidState("there are not as many names as parameters in the optimizer's groups")
    found: dict[str, Any] = {"state": {}, "group_of": {}, "shapes": {}, "groups": {}}
    for number, (group, mine) in enumerate(zip(groups, names, strict=True)):
        found["groups"][number] = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        for member, name in zip(group["params"], mine, strict=True):
            if name in found["group_of"]:
                raise InvalidState(f"two parameters of the optimizer are called {name!r}")
            found["group_of"][name] = number
            held = state["state"].get(member)
            shape = shapes.get(name)
            if held:
                found["state"][name] = dict(held)
                shape = _checked_shape(name, held, shape)
            found["shapes"][name] = shape
    return found


def _checked_shape(name: str, held: Mapping[str, Any], shape: Any) -> Any:
    for key, value in held.items():
        if not isinstance(value, torch.Tensor) or value.numel() <= 1:
            continue
        if shape is None:
            shape = list(value.shape)
        # What other optimizers keep may have other dimensions, as Adafactor's rows and columns.
        alike = key in _ALIKE or value.dim() == len(shape)
        if alike and list(value.shape) != list(shape):
            raise InvalidState(
                f"{key!r} of parameter {name!r} has shape {list(value.shape)}, the parameter "
                f"{list(shape)}: the names are not those of this optimizer"
            )
    return shape


def with_parameter_lists(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state by name as torch's own functions for distributed states write it: groups with lists
    of names."""
    groups = []
    for number in sorted(state["groups"]):
        mine = [name for name, at in state["group_of"].items() if at == number]
        groups.append({**state["groups"][number], "params": mine})
    return {"state": dict(state["state"]), "param_groups": groups}
