"""Tensor subclasses that are plain containers of other tensors, such as the moments of an optimizer
in 8 bits: taken apart at a save, put together at a load.

Only classes that are registered are taken apart, and only these are made anew, whatever a
checkpoint says.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..errors import InvalidState, StateMismatch
from .layout import Shard, is_dtensor

_KEYS = {"quantized", "context", "tensors"}
_ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, type(None)})


@dataclass(frozen=True)
class _Container:
    """A registered class. name: what the file calls it; home: its module and its name there."""

    name: str
    home: tuple[str, str]
    whole: frozenset[str]

    def load_class(self) -> Any:
        return getattr(importlib.import_module(self.home[0]), self.home[1])


_BY_HOME: dict[tuple[str, str], _Container] = {}
_BY_NAME: dict[str, _Container] = {}


def register_tensor_class(
    cls: type[torch.Tensor] | str, *, whole: Sequence[str] = (), name: str | None = None
) -> None:
    """Let checkpoints hold moments of optimizers that are tensors of this class, as their inner
    tensors. The process that loads must make the same call.

    cls: subclass with `__tensor_flatten__` and `__tensor_unflatten__`, whose context is plain
        values, dtypes and the shape; or its module and name, "package.module.Class", which is
        imported when it is needed.
    whole: names of inner tensors that every rank has whole where a parameter is in slices, such as
        tables (default none).
    name: text, what the file calls the class (default None: module and name).

    Raises TypeError for a class that cannot be taken apart.
    """
    if isinstance(cls, str):
        module, _, own_name = cls.rpartition(".")
    else:
        module, own_name = cls.__module__, cls.__qualname__
        if not (hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")):
            raise TypeError(
                f"register_tensor_class({own_name}): it has no __tensor_flatten__ and "
                "__tensor_unflatten__"
            )
    made = _Container(name or f"{module}.{own_name}", (module, own_name), frozenset(whole))
    _BY_HOME[made.home] = _BY_NAME[made.name] = made


for _kind, _module in (("4bit", "4bit"), ("8bit", "8bit"), ("Fp8", "fp8")):
    register_tensor_class(
        f"torchao.optim.subclass_{_module}.OptimState{_kind}",
        whole=["qmap"],
        name=f"OptimState{_kind}",
    )


@dataclass(frozen=True)
class _Slice:
    """What this rank has of a parameter that is cut along its first dimension."""

    shape: tuple[int, ...]  # of the whole
    local: tuple[int, ...]
    row: int  # the first of this rank

    @classmethod
    def of(cls, name: str, parameter: Any) -> _Slice | None:
        """None for a parameter that is here as a whole. Raises InvalidState."""
        if not is_dtensor(parameter):
            return None
        if len(parameter.placements) != 1 or not parameter.placements[0].is_shard(0):
            raise InvalidState(
                f"{name}: moments in few bits of a parameter with placements "
                f"{parameter.placements} cannot be stored: only those cut along the first "
                "dimension can",
                key=name,
            )
        shape, local = tuple(parameter.shape), tuple(parameter.to_local().shape)
        each = -(-shape[0] // parameter.device_mesh.size())
        return cls(shape, local, min(parameter.device_mesh.get_local_rank() * each, shape[0]))

    @property
    def start(self) -> int:
        return self.row * prod(self.shape[1:])

    def part(self, tensor: torch.Tensor) -> Shard:
        """One part of the moment here, as a slice of that part of the whole moment."""
        if tuple(tensor.shape) == self.local:
            return Shard(tensor, self.shape, (self.row, *[0] * (len(self.shape) - 1)))
        values = prod(self.local) // max(1, tensor.numel())  # that one item stands for
        return Shard(tensor, (prod(self.shape) // values,), (self.start // values,))

    def empty(self, name: str, shape: tuple[int, ...], like: dict[str, Any]) -> Shard:
        """Memory for this rank's slice of a part that is of `shape` as a whole."""
        if shape == self.shape:
            return self.part(torch.empty(self.local, **like))
        values = prod(self.shape) // max(1, prod(shape))
        if self.start % values or prod(self.local) % values:
            raise StateMismatch(
                f"{name} is stored in blocks of {values} values, and {list(self.local)} of "
                f"{list(self.shape)} on this rank do not begin and end with a block; resume on "
                "the number of ranks that saved it"
            )
        return self.part(torch.empty(prod(self.local) // values, **like))


def stored_moments(name: str, parameter: Any, values: Mapping[Any, Any]) -> dict[Any, Any]:
    """What a checkpoint has of an optimizer's state of one parameter: as a rule just that."""
    kinds = set(map(type, values.values()))
    if kinds <= _ORDINARY:
        return dict(values)
    moment = Moment(name, parameter)
    return {key: moment.stored(value) for key, value in values.items()}


@dataclass(frozen=True)
class Moment:
    """How a moment of one parameter is stored. name: of the parameter."""

    name: str
    parameter: Any

    def stored(self, value: Any) -> Any:
        """What stands for a moment in a checkpoint: itself, unless it is of a registered class."""
        if type(value) in _ORDINARY or not isinstance(value, torch.Tensor):
            return value
        inner: Any = value
        if is_dtensor(value):
            inner = value._local_tensor  # type: ignore[attr-defined]  # to_local() takes 10 times as long
        container = _BY_HOME.get((type(inner).__module__, type(inner).__qualname__))
        if container is None:
            return value
        names, context = inner.__tensor_flatten__()
        cut = _Slice.of(self.name, self.parameter)
        parts = {name: getattr(inner, name) for name in names}
        if cut is not None:
            parts = {n: p if n in container.whole else cut.part(p) for n, p in parts.items()}
        return {
            "quantized": container.name,
            "context": [_plain(item) for item in context],
            "tensors": parts,
        }

    def allocate(self, part: str, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
        """Memory for an inner tensor of a moment that the live optimizer does not have yet."""
        like = {"dtype": dtype, "device": self.parameter.device}
        cut = _Slice.of(self.name, self.parameter)
        if cut is None or any(part in container.whole for container in _BY_NAME.values()):
            return torch.empty(shape, **like)
        return cut.empty(name, shape, like)

    def made(self, value: Any) -> Any:
        """The moment again, or this rank's part of it; what was not taken apart stays as it is.

        Raises StateMismatch for a class that is not registered or not installed, and for parts
        that do not make up a moment of the parameter.
        """
        if not isinstance(value, Mapping) or value.keys() != _KEYS:
            return value
        container = _BY_NAME.get(value["quantized"])
        if container is None:
            raise StateMismatch(
                f"{self.name}: the saved state is a tensor of class {value['quantized']!s:.200}, "
                "which is not registered here; call register_tensor_class for it"
            )
        try:
            cls = container.load_class()
        except (ImportError, AttributeError):
            raise StateMismatch(
                f"{self.name}: the saved state is a tensor of class {'.'.join(container.home)}; "
                f"install {container.home[0].split('.')[0]}, or go on with the optimizer that was "
                "saved"
            ) from None
        shape = torch.Size(
            self.parameter.to_local().shape if is_dtensor(self.parameter) else self.parameter.shape
        )
        try:
            parts = {
                name: part.tensor if isinstance(part, Shard) else part
                for name, part in value["tensors"].items()
            }
            context = [_meant(item, shape) for item in value["context"]]
            whole: Any = cls.__tensor_unflatten__(parts, context)
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise self._misfit(container, f"{type(error).__name__}: {error}") from error
        if whole.shape != shape:
            raise self._misfit(container, f"{list(whole.shape)} instead of {list(shape)}")
        return whole

    def _misfit(self, container: _Container, why: str) -> StateMismatch:
        return StateMismatch(
            f"{self.name}: what is stored makes no {container.name} of this parameter ({why})"
        )


def _plain(item: Any) -> Any:
    if isinstance(item, torch.dtype):
        return str(item)
    # The shape is that of this rank's slice, which the parameter says.
    return "shape" if isinstance(item, tuple) else item


def _meant(item: Any, shape: torch.Size) -> Any:
    if item == "shape":
        return shape
    if not isinstance(item, str) or not item.startswith("torch."):
        return item
    found = getattr(torch, item.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this torch has no dtype {item!r}")
    return found
