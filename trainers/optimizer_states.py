"""States of optimizers whose moments have few bits, taken apart so that they come back to the last
bit."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptcore import OptimizerState, Shard, StateMismatch

from .optim import parameter_names

__all__ = ["QuantizedOptimizerState", "optimizer_state"]

# Only these are made anew from a checkpoint, whatever it says.
_HOMES = {
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
_KEYS = {"quantized", "context", "tensors"}
_TABLE = "qmap"  # the one part that is no sequence of codes or scales: it is whole on every rank


def optimizer_state(optimizer: torch.optim.Optimizer, models: Any) -> OptimizerState:
    """The optimizer's state as a checkpoint takes it: moments that are quantized tensors by their
    parts."""
    if type(optimizer).__module__.startswith("torchao."):
        return QuantizedOptimizerState(optimizer, models)
    return OptimizerState(optimizer, models)


@dataclass(frozen=True)
class _Slice:
    """What this rank has of a parameter that is cut along its first dimension."""

    shape: tuple[int, ...]  # of the whole
    local: tuple[int, ...]
    row: int  # the first of this rank

    def part(self, tensor: torch.Tensor) -> Shard:
        """One part of the moment here, as a slice of that part of the whole moment."""
        if tuple(tensor.shape) == self.local:
            return Shard(tensor, self.shape, (self.row, *[0] * (len(self.shape) - 1)))
        values = prod(self.local) // max(1, tensor.numel())  # that one item stands for
        return Shard(tensor, (prod(self.shape) // values,), (self.start // values,))

    @property
    def start(self) -> int:
        return self.row * prod(self.shape[1:])

    def empty(self, name: str, shape: tuple[int, ...], like: dict[str, Any]) -> Shard:
        """Memory for this rank's slice of a part that is of `shape` as a whole."""
        if shape == self.shape:
            return self.part(torch.empty(self.local, **like))
        values = prod(self.shape) // max(1, prod(shape))
        if self.start % values or prod(self.local) % values:
            raise StateMismatch(
                f"{name} is quantized in blocks of {values} values, and {list(self.local)} of "
                f"{list(self.shape)} on this rank "
                "do not begin and end with a block; resume on the number of ranks that saved it",
                key=name,
            )
        return self.part(torch.empty(prod(self.local) // values, **like))


def _slice_of(parameter: Any) -> _Slice | None:
    if not hasattr(parameter, "placements"):
        return None
    if len(parameter.placements) != 1 or not parameter.placements[0].is_shard(0):
        raise StateMismatch(
            f"quantized moments of a parameter with placements {parameter.placements} cannot be "
            "saved: only those cut along the first dimension can"
        )
    shape, local = tuple(parameter.shape), tuple(parameter.to_local().shape)
    each = -(-shape[0] // parameter.device_mesh.size())
    return _Slice(shape, local, min(parameter.device_mesh.get_local_rank() * each, shape[0]))


class QuantizedOptimizerState(OptimizerState):
    """OptimizerState that stores a quantized moment as codes, scales and table, and puts it
    together again.

    Under FSDP2 these are slices of the parts of the whole moment, so that a checkpoint fits any
    number of ranks whose slices of a parameter are whole blocks. Raises StateMismatch for other
    numbers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, models: Any) -> None:
        super().__init__(optimizer, models)
        self._parameters: dict[str, Any] = dict(parameter_names(models))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        moments = {
            name: {key: _apart(self._parameters.get(name), value) for key, value in own.items()}
            for name, own in state["state"].items()
        }
        return {**state, "state": moments}

    def allocate(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
        parts = [part.replace("~1", "/").replace("~0", "~") for part in name.split("/")]
        if len(parts) != 5 or parts[0] != "state" or parts[3] != "tensors":
            return super().allocate(name, dtype, shape)
        parameter = self._parameters.get(parts[1])
        if parameter is None:
            return None
        cut, like = _slice_of(parameter), {"dtype": dtype, "device": parameter.device}
        return (
            torch.empty(shape, **like)
            if cut is None or parts[4] == _TABLE
            else cut.empty(name, tuple(shape), like)
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        moments = {
            name: {
                key: _together(name, self._parameters.get(name), value)
                for key, value in own.items()
            }
            for name, own in state_dict.get("state", {}).items()
        }
        super().load_state_dict({**state_dict, "state": moments})


def _apart(parameter: Any, value: Any) -> Any:
    whole = value.to_local() if hasattr(value, "placements") else value
    if not isinstance(whole, torch.Tensor) or not is_traceable_wrapper_subclass(whole):
        return value
    if parameter is None or type(whole).__name__ not in _HOMES:
        return value
    names, context = whole.__tensor_flatten__()
    cut = _slice_of(parameter)
    parts = {name: getattr(whole, name) for name in names}
    if cut is not None:
        parts = {name: part if name == _TABLE else cut.part(part) for name, part in parts.items()}
    return {
        "quantized": type(whole).__name__,
        "context": [_plain(item) for item in context],
        "tensors": parts,
    }


def _together(name: str, parameter: Any, value: Any) -> Any:
    if parameter is None or not isinstance(value, Mapping) or value.keys() != _KEYS:
        return value
    kind = value["quantized"]
    try:
        cls = getattr(importlib.import_module(_HOMES[kind]), kind)
    except (KeyError, ImportError, AttributeError):
        raise StateMismatch(
            f"{name}: the saved state is of type {kind}, which needs torchao; install it, or "
            "train on with the optimizer that was saved"
        ) from None
    parts = {
        key: part.tensor if isinstance(part, Shard) else part
        for key, part in value["tensors"].items()
    }
    cut = _slice_of(parameter)
    local = torch.Size(parameter.shape if cut is None else cut.local)
    made = cls.__tensor_unflatten__(parts, [_meant(item, local) for item in value["context"]])
    if cut is None:
        return made
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        made,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _plain(item: Any) -> Any:
    if isinstance(item, torch.dtype):
        return str(item)
    return (
        "shape" if isinstance(item, tuple) else item
    )  # that of this rank's slice, which the parameter tells


def _meant(item: Any, shape: torch.Size) -> Any:
    if item == "shape":
        return shape
    return getattr(torch, item.removeprefix("torch.")) if isinstance(item, str) else item
