"""Nested state <-> a tree of plain values and a list of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import InvalidState, UnsupportedValue
from ..format.values import TensorRef, encode, join_path, register_codec
from .layout import dtype_name, same_view_key, why_not_storable

__all__ = ["Captured", "CapturedTensor", "capture", "key_names"]

# Larger arrays are stored like tensors: with chunk digests, and without a copy.
INLINE_ARRAY_BYTES = 4096

register_codec(torch.Size, list, torch.Size, name="torch.Size")
register_codec(torch.device, str, torch.device, name="torch.device")
register_codec(torch.dtype, lambda d: str(d).removeprefix("torch."), lambda name: _dtype_of(name), name="torch.dtype")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype


@dataclass(slots=True)
class CapturedTensor:
    """A tensor leaf. `live` is the leaf itself; alias_of: number of the leaf that is the same view of the same memory;
    stored_name: what the tensor file calls it."""

    name: str
    stored_name: str
    tensor: torch.Tensor
    dtype: str
    alias_of: int | None
    live: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(slots=True)
class Captured:
    """A component's state, taken apart: `tree` is the encoded values, its TensorRefs number `tensors`."""

    key: str
    tree: bytes
    tensors: list[CapturedTensor]


def capture(key: str, state: Any) -> Captured:
    """Take `state` apart. Tensors are referenced, not copied.

    Raises UnsupportedValue, with component, key and type, for what cannot be stored.
    """
    tensors: list[CapturedTensor] = []
    paths: list[tuple[Any, ...]] = []
    seen: dict[tuple[Any, ...], int] = {}

    def leaf(path: tuple[Any, ...], value: Any) -> TensorRef | None:
        tensor, is_array = _as_tensor(value)
        if tensor is None:
            return None
        name = join_path(path) if path else "value"
        why = why_not_storable(tensor)
        if why is not None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise UnsupportedValue(f"component {key!r}, key {name!r}: {why}", component=key, key=name, type_name=kind)
        identity = same_view_key(tensor)
        first = seen.setdefault(identity, len(tensors)) if identity is not None else len(tensors)
        alias = None if first == len(tensors) else first
        tensors.append(CapturedTensor(name, name, tensor, dtype_name(tensor.dtype) or "", alias, value))
        paths.append(path)
        return TensorRef(len(tensors) - 1, is_array)

    tree = encode(state, leaf, component=key)
    if all(len(path) == 1 and isinstance(path[0], str) for path in paths):
        # A flat state dict: files have the very names that stock readers look for.
        for captured, path in zip(tensors, paths, strict=True):
            captured.stored_name = path[0].encode("utf-8", "backslashreplace").decode()
    names: set[str] = set()
    for captured in tensors:
        if captured.stored_name == "__metadata__":
            captured.stored_name = "__metadata__~2"  # the one name that a safetensors file cannot hold
        if captured.name in names:
            raise InvalidState(
                f"component {key!r}: two tensors are named {captured.name!r}; rename one of the keys",
                component=key, key=captured.name)  # fmt: skip
        names.add(captured.name)
    return Captured(key, tree, tensors)


def _as_tensor(value: Any) -> tuple[torch.Tensor | None, bool]:
    if isinstance(value, torch.Tensor):
        return value, False
    if type(value) is np.ndarray and value.nbytes > INLINE_ARRAY_BYTES:
        if not value.flags.writeable or any(stride < 0 for stride in value.strides):
            value = value.copy()
        try:
            return torch.from_numpy(value), True
        except (TypeError, ValueError):
            pass  # a dtype or byte order that torch lacks is stored with the values
    return None, False


def key_names(state: Any, path: tuple[Any, ...] = ()) -> Iterator[str]:
    """Names of all leaves of nested dicts; lists and everything else count as leaves."""
    if isinstance(state, Mapping) and (state or not path):
        for key, item in state.items():
            yield from key_names(item, (*path, key))
    else:
        yield join_path(path) if path else "value"
