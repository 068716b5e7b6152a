"""Plain nested state put back where it is: the same dicts, lists, sets, arrays and tensors, with
what was saved in them."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from ..format.values import (
    BY_NAME,
    Opaque,
    TensorRef,
    encode,
    join_path,
    key_leaves,
    key_names,
    keyed,
    part_of,
)
from .containers import is_flattened
from .layout import Shard, is_dtensor
from .tree import Differences, holds_tensors

_CONTAINERS = (dict, list, deque, set, bytearray)
_NOTHING = object()


class PlainState:
    """Plain nested values and tensors, put back where they are: in the same dicts, lists, sets,
    arrays and tensors."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.loaded: Any = None
        self.strict = True
        self._inside: set[int] = set()

    def state_dict(self) -> Any:
        return self.value

    def differences(self, saved: Any, *, sharded: bool = False) -> Differences:
        """Values come back as they were saved, whatever is there now. Names count where a live
        tensor is known to be used by something else, which another tensor in its place would not
        reach; in the state of a module; of tensors, where each rank has a part of them (sharded);
        and where not all need be there (not strict)."""
        fixed = fixed_parts(self.value, every_tensor=sharded)
        self._inside = fixed.inside
        there = dict.fromkeys(key_names(self.value))
        held = {name: item for name, _, item in key_leaves(saved)}
        missing = [n for n in (fixed.names if self.strict else there) if n not in held]
        strays: list[str] = []
        tolerated: list[str] = []
        for name, leaf in held.items():
            if name in there:
                continue
            strict = any(not path or name.startswith(f"{path}/") for path in fixed.modules)
            if sharded and not strict:
                parts = name.split("/")
                above = ("/".join(parts[:n]) for n in range(1, len(parts)))
                strict = holds_tensors(leaf) and not any(name in there for name in above)
            (strays if strict else tolerated).append(name)
        others = len(there) > len(fixed.names) or not fixed.names
        matched = sum(name in held for name in fixed.names) + others
        return Differences(missing, strays, matched, self._kind_differs(saved), tolerated)

    def _kind_differs(self, saved: Any) -> dict[str, tuple[str, str]]:
        """Where the value as a whole cannot take what was saved, and nothing can be put in its
        place."""
        live, form = self.value, ""
        if isinstance(saved, TensorRef) or is_flattened(saved):
            fits, kind = isinstance(live, torch.Tensor | Shard | np.ndarray), "Tensor"
        else:
            codec = BY_NAME.get(saved.codec) if type(saved) is Opaque else None
            cls = type(saved) if codec is None else codec.cls
            fits = cls is type(live) or (isinstance(live, dict) and issubclass(cls, dict))
            kind = cls.__qualname__
            if fits and isinstance(live, np.ndarray):
                fits = (live.shape, live.dtype) == (saved.shape, saved.dtype)
                kind = f"{kind} {saved.dtype} {list(saved.shape)}"
        if fits or not changeable(live):
            return {}
        if isinstance(live, np.ndarray):
            form = f" {live.dtype} {list(live.shape)}"
        now = f"one of type {type(live).__qualname__}{form}"
        return {"value": (f"a value of type {kind}", now)}

    def may_replace(self, live: Any) -> bool:
        """Whether a tensor may be another object after a load."""
        whole = isinstance(self.value, torch.Tensor | Shard | np.ndarray)
        return not (whole or has_other_owner(live) or id(live) in self._inside)

    def put_back(self, state_dict: Any, filled: dict[int, tuple[Any, Any]]) -> None:
        """filled: shared by one load. Where the value itself cannot be changed, `loaded` alone
        has what was saved."""
        self.loaded = put_back(self.value, state_dict, filled, keep=not self.strict)

    def load_state_dict(self, state_dict: Any) -> None:
        self.put_back(state_dict, {})


class Value:
    """A holder of one value that cannot be changed in place: `{"epoch": Value(0)}`.

    value: anything that a checkpoint holds; a load sets it. Checkpoints that have the bare value
    load into it too.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Value({self.value!r})"

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state_dict: Any) -> None:
        self.value = state_dict


def changeable(value: Any) -> bool:
    """Whether a value can be given another content and stay the same object."""
    return isinstance(value, (*_CONTAINERS, np.ndarray, torch.Tensor, Shard))


class _PutBack:
    """One restore of plain state. `filled`: live containers that have their content, and what they
    were given: two names of one list need not have been saved with equal content."""

    def __init__(self, filled: dict[int, tuple[Any, Any]], keep: bool) -> None:
        self.filled, self.keep = filled, keep

    def value(self, live: Any, saved: Any, *, top: bool = False) -> Any:
        """What takes the place of `live`: itself, filled with what was saved, wherever its type
        allows that."""
        if saved is live:
            return live
        fits = type(saved) is type(live) or (
            top and isinstance(live, dict) and isinstance(saved, Mapping)
        )
        if isinstance(live, _CONTAINERS) and fits and (top or _room(live) == _room(saved)):
            if (before := self.filled.get(id(live))) is not None:
                return live if _equal(before[1], saved) else saved
            self.filled[id(live)] = live, saved
            self.fill(live, saved)
            return live
        if isinstance(live, np.ndarray) and isinstance(saved, np.ndarray):
            return _array(live, saved)
        if type(live) is type(saved) is tuple and len(live) == len(saved):
            items = tuple(map(self.value, live, saved))
            return live if all(a is b for a, b in zip(items, live, strict=True)) else items
        return saved

    def fill(self, live: Any, saved: Any) -> None:
        if isinstance(live, dict):
            named = {key: self.value(live.get(key, _NOTHING), item) for key, item in saved.items()}
            if self.keep:
                named |= {key: item for key, item in live.items() if key not in named}
            live.clear()
            for key, item in named.items():
                live[key] = item
        elif isinstance(live, list):
            live[:] = self.items(live, saved)
        elif isinstance(live, bytearray):
            live[:] = saved
        else:
            new = self.items(live, saved) if isinstance(live, deque) else list(saved)
            live.clear()
            (live.extend if isinstance(live, deque) else live.update)(new)

    def items(self, live: Iterable[Any], saved: Iterable[Any]) -> list[Any]:
        return [
            self.value(item, new)
            for item, new in zip(chain(live, repeat(_NOTHING)), list(saved), strict=False)
        ]


def put_back(
    live: Any, saved: Any, filled: dict[int, tuple[Any, Any]], *, keep: bool = False
) -> Any:
    """Give `live` the content of `saved`, at every level where the types are the same; the result
    is `live` where that could be done. Tensors of `saved` that are those of `live` have been read
    into already. filled: shared by one load. keep: keys of dicts that were not saved stay."""
    return _PutBack(filled, keep).value(live, saved, top=True)


def _room(value: Any) -> Any:
    return value.maxlen if isinstance(value, deque) else None


def _array(live: np.ndarray, saved: np.ndarray) -> np.ndarray:
    if type(live) is not type(saved) or (live.dtype, live.shape) != (saved.dtype, saved.shape):
        return saved
    one, other = (array.__array_interface__["data"][0] for array in (live, saved))
    if one == other and live.strides == saved.strides:
        return live  # its memory was read into
    if not live.flags.writeable:
        return saved
    live[...] = saved
    return live


def _equal(a: Any, b: Any) -> bool:
    def by_identity(_: Any, x: Any) -> TensorRef | None:
        return TensorRef(id(x)) if isinstance(x, torch.Tensor | Shard) else None

    try:
        return encode(a, by_identity) == encode(b, by_identity)
    except CheckpointError:
        return False


def has_other_owner(value: Any) -> bool:
    """Whether a tensor is certainly memory that something else uses, so that another one in its
    place would not do: one that is trained, a slice, a view of more."""
    tensor = value.tensor if isinstance(value, Shard) else value
    if not isinstance(tensor, torch.Tensor):
        return False
    special = isinstance(value, torch.nn.Parameter | Shard) or is_dtensor(tensor)
    if special or tensor.requires_grad or tensor._base is not None:
        return True
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


@dataclass(frozen=True, slots=True)
class Fixed:
    """Of plain live state what must be there as it is. names: of tensors that something else uses;
    modules: paths of the states of modules; inside: ids of the tensors in those."""

    names: list[str]
    modules: list[str]
    inside: set[int]


def fixed_parts(state: Any, *, every_tensor: bool = False) -> Fixed:
    found = Fixed([], [], set())

    def walk(value: Any, path: tuple[Any, ...], inside: bool) -> None:
        if type(value) is OrderedDict and getattr(value, "_metadata", None) is not None:
            found.modules.append(join_path(path))
            inside = True
        items = keyed(value)
        if items is not None:
            for key, item in items.items():
                walk(item, (*path, part_of(key)), inside)
            return
        if inside:
            found.inside.add(id(value))
        wanted = every_tensor and isinstance(value, torch.Tensor | Shard)
        if inside or wanted or has_other_owner(value):
            found.names.append(join_path(path) if path else "value")

    walk(state, (), False)
    return found


def only_own(
    saved: Any, live: Any, on_no_rank: Callable[[str], bool], path: tuple[Any, ...] = ()
) -> Any:
    """Of a sharded state what this rank has keys for, and what no rank has a key for."""
    if type(saved) not in (dict, OrderedDict, Counter) or not isinstance(live, Mapping):
        return saved
    kept = {}
    for key, item in saved.items():
        at = (*path, part_of(key))
        if key in live:
            kept[key] = only_own(item, live[key], on_no_rank, at)
        elif all(on_no_rank(name) for name in key_names(item, at)):
            kept[key] = item
    return type(saved)(kept)
