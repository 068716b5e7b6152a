"""Nested state <-> a tree of plain values and a list of tensors."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ..errors import InvalidState, UnsupportedValue
from ..format.digest import content_hash
from ..format.layout import Box, MeshLayout
from ..format.manifest import SIZE_LIMIT, exact
from ..format.values import (
    Opaque,
    TensorRef,
    encode,
    join_path,
    key_names,
    largest_part,
    register_codec,
    tensor_wires,
    tensors_wire,
)
from .containers import flattened, holds_containers
from .layout import ORDINARY, LocalShard, Shard, TensorFacts, describe, forms_of, same_view_key

_TENSORS = (torch.Tensor, Shard)
# What torch says of a module that says nothing of its own.
DEFAULT_METADATA = {"version": 1}
# Larger arrays are stored like tensors: with chunk digests, and without a copy.
INLINE_ARRAY_BYTES = 4096
# Readers take no index of more than SIZE_LIMIT; a sixteenth of that is left to what it says of
# tensors.
VALUES_LIMIT = SIZE_LIMIT - SIZE_LIMIT // 16

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def _dtype_of(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"this torch has no dtype {name!r}")
    return _DTYPES[name]


register_codec(torch.Size, list, lambda items: torch.Size(exact(items, list)), name="torch.Size")
register_codec(torch.device, str, torch.device, name="torch.device")
register_codec(torch.dtype, lambda d: str(d).removeprefix("torch."), _dtype_of, name="torch.dtype")


class LeafSpec(NamedTuple):
    """What stays of a tensor leaf from save to save.

    stored_name: what the tensor file calls it. dtype to layout: see TensorFacts. alias_of: the
    number of the leaf that is the same view of the same memory.
    """

    name: str
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    global_shape: tuple[int, ...]
    box: Box | None
    layout: MeshLayout | Literal["box"] | None
    alias_of: int | None

    @classmethod
    def of(
        cls, name: str, shard: LocalShard, stored_name: str | None = None, alias: int | None = None
    ) -> LeafSpec:
        return cls(name, stored_name or name, *TensorFacts.of(shard), alias)


class TensorLeaf:
    """A tensor leaf. tensor: the memory on this rank; live: the leaf itself; digest: what replicas
    are compared by, where it was taken before the memory may change."""

    __slots__ = ("digest", "live", "spec", "tensor")

    def __init__(
        self, spec: LeafSpec, tensor: torch.Tensor, live: Any = None, digest: bytes | None = None
    ) -> None:
        self.spec, self.tensor, self.live, self.digest = spec, tensor, live, digest


@dataclass(frozen=True, slots=True)
class _Node:
    """A dict of nothing but tensors, as the walk met it: its name, its keys, and what stands for it
    in the encoded tree."""

    name: str
    keys: list[str]
    wire: bytes


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Structure:
    """What stays of a component's state while its names, dtypes, shapes, layouts and aliases do:
    the same object from save to save. leaves: in order of their names.

    The rest is by the order of the walk, and serves to know the structure again. forms: what must
    be the same of each tensor; names: with whether it was a numpy array; refs: what stands for it
    in the tree; nodes: by the number of their first tensor.
    """

    leaves: list[LeafSpec]
    order: list[int]
    sharded: bool
    flat: bool
    forms: list[Any]
    names: list[tuple[str, bool]]
    refs: list[bytes]
    nodes: dict[int, _Node]


@dataclass(slots=True)
class StateSnapshot:
    """A component's state, taken apart: `tree` is the encoded values, its TensorRefs number
    `tensors`.

    versions: encoded, what torch says of modules beside their state (see `module_versions`); None
    without modules. structure: None where nobody is going to know it again. containers: by name,
    tensors that are made of others, which are among `tensors`; of a live state alone."""

    key: str
    tree: bytes
    tensors: list[TensorLeaf]
    versions: bytes | None = None
    structure: Structure | None = None
    containers: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def collector_paused() -> Iterator[None]:
    """While a state is taken apart or put together thousands of small objects are made, in no
    cycles: the collector would walk through all of the process several times, which takes longer
    than making them, in the middle of a step."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Changed(Exception):
    """A state does not have the structure that it had."""


class _Walk:
    """The tensors of a state in the order in which the encoder meets them. last: the structure that
    it may have; _Changed is raised where it does not."""

    def __init__(
        self,
        key: str,
        metadata: Mapping[str, Any] | None,
        live_only: bool,
        last: Structure | None = None,
    ) -> None:
        self.key, self.live_only, self.last = key, live_only, last
        self.versions = {} if metadata is None else {"": _other_than_default(metadata)}
        self.values: list[Any] = []  # also those that a codec made, so that nothing gets their ids
        self.tensors: list[Any] = []
        self.names: list[tuple[str, bool]] = []
        self.flat: list[str] | None = []  # the keys, where all tensors lie at the top of a dict
        self.keys: dict[int, tuple[str, list[str]]] = {}
        self.digests: dict[int, bytes] = {}
        self.same: dict[int, int] = {}
        self.order: list[int] = []
        self.containers: dict[str, Any] = {}

    def leaf(self, path: tuple[Any, ...], value: Any) -> Any:
        if type(value) is OrderedDict and isinstance(
            facts := getattr(value, "_metadata", None), Mapping
        ):
            self.versions[join_path(path)] = _other_than_default(facts)
            return None
        array = _array_as_tensor(value) if isinstance(value, np.ndarray) else None
        tensor = value if array is None else array
        if not isinstance(tensor, _TENSORS):
            return None
        if array is not None or type(value) in ORDINARY:
            return self.add(path, value, tensor)
        return self.subclass(path, value)

    def subclass(self, path: tuple[Any, ...], value: Any) -> Any:
        """A tensor itself, or what it is made of, whose names are below its own."""
        try:
            parts = flattened(value)
        except InvalidState as error:
            name = join_path(path)
            raise InvalidState(
                f"component {self.key!r}, key {name!r}: {error.message}",
                component=self.key,
                key=name,
            ) from None
        if parts is None:
            return self.add(path, value, value)
        if self.live_only:
            self.containers[join_path(path)] = value
        return parts

    def large(self, path: tuple[Any, ...], value: str | bytes) -> Any:
        if self.live_only:
            return None
        number = len(self.values)
        first = self.same.setdefault(id(value), number)
        if first != number:
            return self.add(path, value, self.tensors[first])
        data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        # Plain values are compared in full, whatever the level.
        self.digests[number] = content_hash(data)
        return self.add(path, value, torch.from_numpy(np.frombuffer(data, np.uint8).copy()))

    def add(self, path: tuple[Any, ...], value: Any, tensor: Any) -> Any:
        number = len(self.values)
        name = join_path(path) if path else "value", tensor is not value
        if self.flat is not None and len(path) == 1 and isinstance(path[0], str):
            self.flat.append(path[0])
        else:
            self.flat = None
        self.values.append(value)
        self.tensors.append(tensor)
        if self.last is None:
            self.names.append(name)
            return TensorRef(number, name[1])
        if number >= len(self.last.names) or self.last.names[number] != name:
            raise _Changed
        return self.last.refs[number]

    def many(self, path: tuple[Any, ...], items: dict[str, Any]) -> list[TensorRef] | bytes | None:
        """All of a dict at once, where it has nothing but tensors."""
        kinds = set(map(type, items.values()))
        if not all(issubclass(kind, _TENSORS) for kind in kinds):
            return None
        if not ORDINARY.issuperset(kinds) and holds_containers(kinds, items.values()):
            return None
        number, name = len(self.values), join_path(path) if path else ""
        self.flat = None if self.flat is None or path else [*self.flat, *items]
        self.values += items.values()
        self.tensors += items.values()
        if self.last is not None:
            node = self.last.nodes.get(number)
            if node is None or node.name != name or node.keys != list(items):
                raise _Changed
            return node.wire
        self.keys[number] = name, list(items)
        above = f"{name}/" if name else ""
        for key in items:
            # Nearly all keys are as they stand, and there may be very many.
            plain = key.isascii() and "/" not in key and "~" not in key
            self.names.append((above + key if plain else join_path((*path, key)), False))
        return [TensorRef(at) for at in range(number, number + len(items))]

    def renumber(self) -> list[int]:
        # By name, not by where a dict happens to have them: replicas that were built in another
        # order agree.
        self.order = sorted(range(len(self.names)), key=lambda n: (self.names[n][0], n))
        numbers = [0] * len(self.order)
        for now, was in enumerate(self.order):
            numbers[was] = now
        return numbers

    def live(self, number: int) -> Any:
        """The leaf itself: of an array that cannot be read into, its copy."""
        value, tensor = self.values[number], self.tensors[number]
        return value if tensor is value else tensor.numpy()


@torch.no_grad()  # a DTensor gives its own memory then, and not a view with a history
def capture(
    key: str,
    state: Any,
    *,
    sharded: bool = False,
    metadata: Mapping[str, Any] | None = None,
    live_only: bool = False,
    last: Structure | None = None,
) -> StateSnapshot:
    """Take `state` apart. Tensors are referenced, not copied; large texts and bytes become tensors.

    sharded: slices (DTensor, Shard) are allowed. metadata: the `_metadata` of a module's state.
    live_only: what matters is which tensors there are to load into; large values are left out.
    last: the structure that the state probably has, because it had it at the save before.

    Raises UnsupportedValue, with component, key and type, for what cannot be stored and for plain
    values that are more than an index holds, InvalidState for slices that are not expected or not
    complete.
    """
    if last is not None and last.sharded == sharded and not live_only:
        # What fails there is found out again, and told, below.
        with suppress(_Changed, RuntimeError):
            return _known_again(key, state, metadata, last)
    walk = _Walk(key, metadata, live_only)
    renumber = None if live_only else walk.renumber
    tree = encode(
        state, walk.leaf, component=key, renumber=renumber, large=walk.large, many=walk.many
    )
    if live_only:
        walk.renumber()
    else:
        check_values_fit(key, tree, len(tree))
    names = [name for name, _ in walk.names]
    forms, memory, facts = describe(key, names, walk.tensors, sharded=sharded, loading=live_only)
    structure = _structure(key, walk, sharded, forms, facts, _aliases(walk.values, memory, facts))
    tensors = [
        TensorLeaf(spec, memory[at], walk.live(at), walk.digests.get(at))
        for spec, at in zip(structure.leaves, structure.order, strict=True)
    ]
    versions = _encoded(walk.versions)
    return StateSnapshot(key, tree, tensors, versions, structure, walk.containers)


def _known_again(
    key: str, state: Any, metadata: Mapping[str, Any] | None, last: Structure
) -> StateSnapshot:
    """The same of a state that has the structure `last`. Raises _Changed where it has another."""
    walk = _Walk(key, metadata, False, last)
    tree = encode(state, walk.leaf, component=key, large=walk.large, many=walk.many)
    forms, memory = forms_of(walk.tensors)
    if (
        (walk.flat is None) == last.flat
        or forms != last.forms
        or not _same_aliases(walk, memory, last)
    ):
        raise _Changed
    check_values_fit(key, tree, len(tree))
    values, digests, leaves = walk.values, walk.digests, zip(last.leaves, last.order, strict=True)
    tensors = [TensorLeaf(spec, memory[at], values[at], digests.get(at)) for spec, at in leaves]
    return StateSnapshot(key, tree, tensors, _encoded(walk.versions), last)


def _same_aliases(walk: _Walk, memory: list[torch.Tensor], last: Structure) -> bool:
    """Whether just those leaves are the same view of the same memory that are so in `last`, whose
    forms these have."""
    values = walk.values
    own, viewed = [], []
    for spec, at in zip(last.leaves, last.order, strict=True):
        if spec.alias_of is None:
            own.append(id(values[at]))
            if spec.nbytes and spec.layout != "box":
                viewed.append(memory[at])
        else:
            first = last.order[spec.alias_of]
            view = same_view_key(memory[at]) if spec.layout != "box" else None
            if values[at] is not values[first] and (
                view is None or view != same_view_key(memory[first])
            ):
                return False
    # Nearly always no two tensors begin at one address.
    return len({*own}) == len(own) and (
        len({*map(torch.Tensor.data_ptr, viewed)}) == len(viewed)
        or len({*map(same_view_key, viewed)}) == len(viewed)
    )


def _structure(
    key: str,
    walk: _Walk,
    sharded: bool,
    forms: list[Any],
    facts: list[TensorFacts],
    aliases: list[int | None],
) -> Structure:
    """The structure of a state that was taken apart; the lists are in the order of the walk. Raises
    InvalidState for two tensors of one name."""
    numbers = [0] * len(forms)
    for now, was in enumerate(walk.order):
        numbers[was] = now
    ordered = [walk.names[at][0] for at in walk.order]
    if twice := next((name for name, following in pairwise(ordered) if name == following), None):
        what = f"two tensors are named {twice!r}; rename one of the keys"
        raise InvalidState(f"component {key!r}: {what}", component=key, key=twice)
    leaves = []
    for name, stored, at in zip(ordered, _stored_names(ordered, walk), walk.order, strict=True):
        first = aliases[at]
        leaves.append(LeafSpec(name, stored, *facts[at], None if first is None else numbers[first]))
    made = Structure(leaves, walk.order, sharded, walk.flat is not None, forms, walk.names, [], {})
    if not walk.live_only:
        refs = tensor_wires(TensorRef(numbers[at], n) for at, (_, n) in enumerate(walk.names))
        made.refs.extend(refs)
        for at, (name, keys) in walk.keys.items():
            wire = tensors_wire(keys, refs[at : at + len(keys)])
            made.nodes[at] = _Node(name, keys, wire)
    return made


def _aliases(
    values: list[Any], memory: list[torch.Tensor], facts: list[TensorFacts]
) -> list[int | None]:
    """For each leaf the first one that is the same view of the same memory."""
    if len({*map(id, values)}) == len(values) == len({*map(torch.Tensor.data_ptr, memory)}):
        return [None] * len(values)  # nearly always no two tensors begin at one address
    found: list[int | None] = []
    by_id: dict[int, int] = {}
    by_view: dict[Any, int] = {}
    for number, (value, tensor, fact) in enumerate(zip(values, memory, facts, strict=True)):
        # A leaf that was met before is an alias even where its part here is empty, so that all
        # ranks see the same aliases.
        first = by_id.setdefault(id(value), number)
        view = None if first != number or fact.layout == "box" else same_view_key(tensor)
        if view is not None:
            first = by_view.setdefault((view, fact.global_shape, fact.box), number)
        found.append(None if first == number else first)
    return found


def _stored_names(ordered: list[str], walk: _Walk) -> list[str]:
    """What tensor files call the leaves."""
    stored = ordered
    if walk.flat is not None:
        # A flat state dict: files have the very names that stock readers look for.
        stored = [walk.flat[at].encode("utf-8", "backslashreplace").decode() for at in walk.order]
    taken = set(stored)
    if "__metadata__" in taken:  # the one name that a safetensors file cannot hold
        free = "__metadata__"
        while free in taken:
            free += "~2"
        stored = [free if name == "__metadata__" else name for name in stored]
    return stored


def _encoded(versions: dict[str, Any]) -> bytes | None:
    """versions: by the path of a module's state; of nearly all modules, none but the default."""
    return DEFAULT_VERSIONS if versions == {"": {}} else encode(versions) if versions else None


DEFAULT_VERSIONS = encode({"": {}})


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
    several = enumerate(state) if type(state) in (list, tuple) else ()
    for key, item in state.items() if isinstance(state, dict) else several:
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


def holds_tensors(saved: Any) -> bool:
    """Whether there is a reference to a tensor in saved values, at any depth."""
    if isinstance(saved, TensorRef):
        return True
    if type(saved) is Opaque:
        return holds_tensors(saved.payload)
    if isinstance(saved, dict):
        saved = saved.values()
    elif not isinstance(saved, list | tuple | deque):
        return False
    return any(map(holds_tensors, saved))
