"""Nested state <-> a tree of plain values and a list of tensors."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import InvalidState, UnsupportedValue
from ..format.codecs import Opaque, keyed, register_codec
from ..format.digest import content_hash
from ..format.manifest import SIZE_LIMIT
from ..format.values import Numbered, TensorRef, encode, join_path, largest_part
from .layout import (
    LocalShard,
    Shard,
    dtype_name,
    is_dtensor,
    local_shard,
    same_view_key,
    why_not_storable,
)

__all__ = [
    "DEFAULT_METADATA",
    "StateSnapshot",
    "TensorLeaf",
    "Differences",
    "capture",
    "check_values_fit",
    "differences",
    "holds_tensors",
    "key_leaves",
    "key_names",
    "part_of",
    "with_versions",
]

_TENSORS = (torch.Tensor, Shard)
# What torch says of a module that says nothing of its own.
DEFAULT_METADATA = {"version": 1}
# Larger arrays are stored like tensors: with chunk digests, and without a copy.
INLINE_ARRAY_BYTES = 4096
# Readers take no index of more than SIZE_LIMIT; a sixteenth of that is left to what it says of
# tensors.
VALUES_LIMIT = SIZE_LIMIT - SIZE_LIMIT // 16

register_codec(torch.Size, list, lambda payload: _size_of(payload), name="torch.Size")
register_codec(torch.device, str, torch.device, name="torch.device")
register_codec(
    torch.dtype,
    lambda d: str(d).removeprefix("torch."),
    lambda name: _dtype_of(name),
    name="torch.dtype",
)


def _size_of(payload: Any) -> torch.Size:
    if type(payload) is not list:
        raise TypeError("a torch.Size is stored as a list")
    return torch.Size(payload)


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def _dtype_of(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"this torch has no dtype {name!r}")
    return _DTYPES[name]


@dataclass(slots=True)
class TensorLeaf:
    """A tensor leaf. `live` is the leaf itself, `part` what this rank holds of it; alias_of: number
    of the leaf that is the same view of the same memory; stored_name: what the tensor file calls
    it; digest: what replicas are compared by, where it was taken before the memory may change."""

    name: str
    stored_name: str
    part: LocalShard
    dtype: str
    alias_of: int | None
    live: Any
    digest: bytes | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The memory on this rank."""
        return self.part.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.part.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.part.tensor.nbytes


@dataclass(slots=True)
class StateSnapshot:
    """A component's state, taken apart: `tree` is the encoded values, its TensorRefs number
    `tensors`.

    versions: encoded, what torch says of modules beside their state (see `module_versions`); None
    without modules."""

    key: str
    tree: bytes
    tensors: list[TensorLeaf]
    versions: bytes | None = None


def capture(
    key: str,
    state: Any,
    *,
    sharded: bool = False,
    metadata: Mapping[str, Any] | None = None,
    live_only: bool = False,
) -> StateSnapshot:
    """Take `state` apart. Tensors are referenced, not copied; large texts and bytes become tensors.
    sharded: slices (DTensor, Shard) are allowed. metadata: the `_metadata` of a module's state.
    live_only: what matters is which tensors there are to load into; large values are left out.

    Raises UnsupportedValue, with component, key and type, for what cannot be stored and for plain
    values that are more than an index holds, InvalidState for slices that are not expected or not
    complete.
    """
    tensors: list[TensorLeaf] = []
    paths: list[tuple[Any, ...]] = []
    seen: dict[tuple[Any, ...], int] = {}
    same: dict[int, int] = {}
    kept: list[Any] = []  # what a codec made, so that nothing else gets its id
    versions = {} if metadata is None else {"": _other_than_default(metadata)}

    def leaf(path: tuple[Any, ...], value: Any) -> TensorRef | None:
        if type(value) is OrderedDict and isinstance(
            facts := getattr(value, "_metadata", None), Mapping
        ):
            versions[join_path(path)] = _other_than_default(facts)
            return None
        array = _array_as_tensor(value) if isinstance(value, np.ndarray) else None
        tensor = value if array is None else array
        if not isinstance(tensor, _TENSORS):
            return None
        return add(path, value, tensor, array)

    def large(path: tuple[Any, ...], value: str | bytes) -> TensorRef | None:
        if live_only:
            return None
        if id(value) in same:
            array = tensors[same[id(value)]].tensor
            return add(path, value, array, array)
        data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        array = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        ref = add(path, value, array, array)
        tensors[-1].digest = content_hash(
            data
        )  # plain values are compared in full, whatever the level
        return ref

    def add(
        path: tuple[Any, ...], value: Any, tensor: Any, array: torch.Tensor | None
    ) -> TensorRef:
        kept.append(value)
        name = join_path(path) if path else "value"
        part = _shard_of(tensor, value, key, name, sharded, live_only)
        # A leaf seen before is an alias even where its part here is empty, so that all ranks see
        # the same aliases.
        number = len(tensors)
        first = same.setdefault(id(value), number)
        if (
            first == number
            and part.layout != "box"
            and (view := same_view_key(part.tensor)) is not None
        ):
            first = seen.setdefault((view, part.shape, part.box), number)
        live = array.numpy() if array is not None else value
        alias = None if first == number else first
        tensors.append(
            TensorLeaf(name, name, part, dtype_name(part.tensor.dtype) or "", alias, live)
        )
        paths.append(path)
        return TensorRef(number, array is not None)

    order: list[int] = []

    def renumber() -> list[int]:
        # By name, not by where a dict happens to have them: replicas that were built in another
        # order agree.
        order.extend(sorted(range(len(tensors)), key=lambda n: (tensors[n].name, n)))
        place = [0] * len(order)
        for now, was in enumerate(order):
            place[was] = now
        for captured in tensors:
            captured.alias_of = None if captured.alias_of is None else place[captured.alias_of]
        return place

    tree = encode(state, leaf, component=key, renumber=renumber, large=large)
    if not live_only:
        check_values_fit(key, tree, len(tree))
    tensors, paths = [tensors[n] for n in order], [paths[n] for n in order]
    if all(len(path) == 1 and isinstance(path[0], str) for path in paths):
        # A flat state dict: files have the very names that stock readers look for.
        for captured, path in zip(tensors, paths, strict=True):
            captured.stored_name = path[0].encode("utf-8", "backslashreplace").decode()
    names: set[str] = set()
    stored = {captured.stored_name for captured in tensors}
    for captured in tensors:
        if (
            captured.stored_name == "__metadata__"
        ):  # the one name that a safetensors file cannot hold
            while captured.stored_name in stored:
                captured.stored_name += "~2"
        if captured.name in names:
            raise InvalidState(
                f"component {key!r}: two tensors are named {captured.name!r}; rename one of the "
                "keys",
                component=key,
                key=captured.name,
            )
        names.add(captured.name)
    return StateSnapshot(key, tree, tensors, encode(versions) if versions else None)


def _other_than_default(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Of what torch keeps beside a module's state, per submodule, that which can be stored and is
    not the default."""
    found: dict[str, Any] = {}
    for path, facts in metadata.items():
        if facts == DEFAULT_METADATA or not isinstance(facts, Mapping):
            continue
        kept = {}
        for name, value in facts.items():
            with suppress(UnsupportedValue):
                encode({name: value})
                kept[name] = value
        found[path] = kept
    return found


def with_versions(state: Any, versions: Mapping[str, Any], path: tuple[Any, ...] = ()) -> Any:
    """`state` with the `_metadata` that the states of modules in it had when they were saved."""
    items = (
        state.items()
        if isinstance(state, dict)
        else enumerate(state)
        if type(state) in (list, tuple)
        else ()
    )
    for key, item in items:
        with_versions(item, versions, (*path, key))
    table = versions.get(join_path(path))
    if type(state) is OrderedDict and isinstance(table, dict):
        # Every module that has something in it, and those around it.
        names = {""} | {
            ".".join(parts[:n])
            for key in state
            if isinstance(key, str) and (parts := key.split("."))
            for n in range(1, len(parts))
        }
        state._metadata = {  # type: ignore[attr-defined]
            name: dict(table.get(name, DEFAULT_METADATA)) for name in {*names, *table}
        }
    return state


def _shard_of(
    tensor: Any, value: Any, key: str, name: str, sharded: bool, loading: bool
) -> LocalShard:
    """What this rank holds of a leaf. Raises UnsupportedValue and InvalidState, as `capture`
    says."""
    inner = tensor if isinstance(tensor, torch.Tensor) else tensor.tensor
    why = None if is_dtensor(inner) else why_not_storable(inner)
    if loading and inner.is_meta:
        raise InvalidState(
            f"component {key!r}, key {name!r} is on the meta device, and a load has no memory to "
            "read into: call "
            "module.to_empty(device=...) before it",
            component=key,
            key=name,
        )
    try:
        part = local_shard(tensor) if why is None else None
    except InvalidState as error:
        raise InvalidState(
            f"component {key!r}, key {name!r}: {error.message}", component=key, key=name
        ) from None
    if part is not None and part.layout is not None and not sharded:
        raise InvalidState(
            f"component {key!r}, key {name!r} is a slice of a tensor ({type(value).__name__}); "
            "declare the component SHARDED",
            component=key,
            key=name,
        )
    if part is not None and part.tensor is not inner:
        why = why_not_storable(part.tensor)
    if why is not None or part is None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UnsupportedValue(
            f"component {key!r}, key {name!r}: {why}", component=key, key=name, type_name=kind
        )
    return part


def _array_as_tensor(value: Any) -> torch.Tensor | None:
    """The array's own memory as a tensor; a copy's, where torch cannot use it. None for those
    stored as values."""
    if type(value) is not np.ndarray or value.nbytes <= INLINE_ARRAY_BYTES:
        return None
    if not value.flags.writeable or any(stride < 0 for stride in value.strides):
        value = value.copy()
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError):
        return None  # a dtype or byte order that torch lacks


def check_values_fit(key: str, tree: bytes, nbytes: int) -> None:
    """Raises UnsupportedValue when an index of `nbytes`, most of which are the plain values of
    component `key`, would be larger than readers take."""
    if nbytes > VALUES_LIMIT:
        name, size = largest_part(tree)
        raise UnsupportedValue(
            f"component {key!r}, key {name!r}: plain values of {size:,} bytes are there, and the "
            f"{nbytes:,} bytes of plain "
            f"values that this rank would store are more than the {VALUES_LIMIT:,} that a "
            "checkpoint holds of them; keep "
            "them as a tensor or as a numpy array",
            component=key,
            key=name,
        )


class Differences(NamedTuple):
    """Names that only the live state has, names that only the checkpoint has, how many both have;
    and names whose (saved, live) forms do not fit together. tolerated: names that only the
    checkpoint has, and that need not be here."""

    missing: list[str]
    unexpected: list[str]
    matched: int
    mismatched: dict[str, tuple[str, str]]
    tolerated: Sequence[str] = ()


def differences(saved: Any, live: Any) -> Differences:
    """By the names of their leaves, in their own order."""
    held, wanted = dict.fromkeys(key_names(saved)), dict.fromkeys(key_names(live))
    missing = [n for n in wanted if n not in held]
    return Differences(
        missing, [n for n in held if n not in wanted], len(wanted) - len(missing), {}
    )


def key_names(state: Any, path: tuple[Any, ...] = ()) -> Iterator[str]:
    """Names of all leaves of nested dicts; lists and everything else count as leaves."""
    for name, _ in key_leaves(state, path):
        yield name


def key_leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The same with the leaves."""
    items = keyed(state)
    if items is not None and (items or not path):
        for key, item in items.items():
            yield from key_leaves(item, (*path, part_of(key)))
    else:
        yield join_path(path) if path else "value", state


def part_of(key: Any) -> Any:
    """A key as a part of a name: 0 and "0" are different keys, though tensors below them have the
    same name in a file."""
    return key if isinstance(key, str) else Numbered(key)


def holds_tensors(saved: Any) -> bool:
    """Whether there is a reference to a tensor in saved values, at any depth."""
    if isinstance(saved, TensorRef):
        return True
    if type(saved) is Opaque:
        return holds_tensors(saved.payload)
    items = (
        saved.values()
        if isinstance(saved, dict)
        else saved
        if isinstance(saved, list | tuple | deque)
        else ()
    )
    return any(holds_tensors(item) for item in items)
