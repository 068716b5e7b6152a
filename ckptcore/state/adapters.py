"""What torch's own objects need to be saved well: canonical keys, names instead of positions,
random streams."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..arguments import shown
from ..errors import InvalidState, StateMismatch
from ..format.checks import PLAIN_TYPES, only_plain
from ..format.codecs import BY_NAME, Opaque
from ..format.values import TensorRef
from .component import SharingPattern, StateComponent, Stateful, StatefulProvider
from .layout import Shard, is_dtensor_class
from .names import EXTRA_STATE, Models, Names, one_walk, parameter_table, prefixed
from .optimizers import OptimizerState, OwnOptimizerState, inside, is_ordinary, split_over_ranks
from .plain import changeable, fixed_parts, owned_elsewhere, put_back
from .randomness import RNGState
from .tree import DEFAULT_METADATA, Differences, differences, holds_tensors, key_leaves, key_names

__all__ = [
    "ModelState",
    "OptimizerState",
    "PlainState",
    "RNGState",
    "Value",
    "as_components",
    "is_optimizer",
    "metadata_of",
    "owner_of",
    "refuse_fixed_values",
]


class ModelState:
    """A module's state under canonical keys: those of the bare module, however it is compiled or
    wrapped.

    models: a module, several with distinct names (pipeline stages of a rank), or a dict of them,
        whose keys become prefixes.

    Raises InvalidState when two tensors have one name.
    """

    def __init__(self, models: Models) -> None:
        self._models = prefixed(models)
        self.strict = True
        self._raw()

    def _raw(self) -> dict[str, tuple[nn.Module, str, Any]]:
        """Canonical name -> (module, key as it is, value)."""
        found: dict[str, tuple[nn.Module, str, Any]] = {}
        self._own_loading: set[str] = set()
        self.metadata: dict[str, Any] = {}
        for prefix, module in self._models:
            names = Names(module)
            self._own_loading |= {prefix + name for name in names.own_loading}
            # keep_vars: the parameters themselves, so that what was read into them in place need
            # not be copied again.
            state = module.state_dict(keep_vars=True)
            for path, facts in (getattr(state, "_metadata", None) or {}).items():
                # A wrapper comes before what it wraps, whose version is the one that counts.
                at = f"{path}." if path else ""
                self.metadata[(prefix + names.prefixes.get(at, at))[:-1]] = facts
            for key, value in state.items():
                name = prefix + names.canonical(key)
                if name in found:
                    raise InvalidState(
                        f"{found[name][1]!r} and {key!r} are both {name!r} without wrappers; pass "
                        "several models as a dict, "
                        "whose keys become prefixes",
                        key=name,
                    )
                found[name] = module, key, value
        return found

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers, without asking for a state_dict."""
        for _, module in self._models:
            yield from _tensors_in(module)

    def state_dict(self) -> dict[str, Any]:
        """The parameters and buffers themselves. `metadata` has the versions of the modules
        then."""
        return {name: value for name, (_, _, value) in self._raw().items()}

    def decides(self, name: str) -> bool:
        """Whether code of the module's own decides how `name` is loaded: it is handed what was
        saved, and may resize."""
        first = name.split("/", 1)[0]
        if first.rpartition(".")[2] == EXTRA_STATE:
            return True
        ends = [0, *(at + 1 for at, letter in enumerate(first) if letter == ".")]
        return any(first[:end] in self._own_loading for end in ends)

    def differences(self, saved: Any) -> Differences:
        """By the names, and whether there is a tensor where the module has one. What a module's own
        code decides about is left to it."""
        live = self.state_dict()
        shown = {n: None if n.rpartition(".")[2] == EXTRA_STATE else v for n, v in live.items()}
        if isinstance(saved, Mapping):
            saved = {
                n: None if str(n).rpartition(".")[2] == EXTRA_STATE else v for n, v in saved.items()
            }
        found = differences(saved, shown)
        for name, value in live.items() if isinstance(saved, Mapping) else ():
            kept = saved.get(name)
            if (
                isinstance(value, torch.Tensor)
                and name in saved
                and not self.decides(name)
                and not (isinstance(kept, TensorRef) and not kept.numpy)
            ):
                kind = "numpy.ndarray" if isinstance(kept, TensorRef) else type(kept).__qualname__
                found.mismatched[name] = (f"a value of type {kind}", "a tensor")
        left = [
            [n for n in names if not self.decides(n) or n.rpartition(".")[2] == EXTRA_STATE]
            for names in (found.missing, found.unexpected)
        ]
        return found._replace(missing=left[0], unexpected=left[1])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raw = self._raw()
        versions = getattr(state_dict, "_metadata", None)
        for prefix, module in self._models:
            names = Names(module)
            mine: OrderedDict[str, Any] = OrderedDict()
            for name, value in state_dict.items():
                if name in raw:
                    if raw[name][0] is module:
                        mine[raw[name][1]] = value
                elif (
                    self.decides(name) and (key := names.raw(name.removeprefix(prefix))) is not None
                ):
                    mine[key] = value
            if versions is not None:
                mine._metadata = {  # type: ignore[attr-defined]
                    at[:-1]: dict(versions.get((prefix + name)[:-1], DEFAULT_METADATA))
                    for at, name in names.prefixes.items()
                }
            # Not strict: missing and unexpected keys were judged before anything was read.
            found = module.load_state_dict(mine, strict=False)
            self._check_own(names, prefix, found)

    def _check_own(self, names: Names, prefix: str, found: Any) -> None:
        """Names that only code of the module's own could judge. Raises StateMismatch."""
        lists = [
            [
                n
                for key in getattr(found, kind, None) or ()
                if (n := prefix + names.canonical(key)) is not None
                and self.decides(n)
                and n.rpartition(".")[2] != EXTRA_STATE
            ]
            for kind in ("missing_keys", "unexpected_keys")
        ]
        if self.strict and (lists[0] or lists[1]):
            raise StateMismatch(
                f"its own loading code found missing keys: {lists[0][:5] or 'none'}, and "
                "unexpected ones: "
                f"{lists[1][:5] or 'none'}; strict=False loads the rest",
                missing=lists[0],
                unexpected=lists[1],
            )


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
        there, held = dict.fromkeys(key_names(self.value)), dict(key_leaves(saved))
        needed = fixed.names if self.strict else there
        missing = [name for name in needed if name not in held]
        strays: list[str] = []
        tolerated: list[str] = []
        for name, leaf in held.items():
            if name in there:
                continue
            strict = any(not path or name.startswith(f"{path}/") for path in fixed.modules)
            if sharded and not strict:
                parts = name.split("/")
                strict = holds_tensors(leaf) and not any(
                    "/".join(parts[:n]) in there for n in range(1, len(parts))
                )
            (strays if strict else tolerated).append(name)
        others = len(there) > len(fixed.names) or not fixed.names
        matched = sum(name in held for name in fixed.names) + others
        return Differences(missing, strays, matched, self._kind_differs(saved), tolerated)

    def _kind_differs(self, saved: Any) -> dict[str, tuple[str, str]]:
        """Where the value as a whole cannot take what was saved, and nothing can be put in its
        place."""
        live = self.value
        if isinstance(saved, TensorRef):
            fits, kind = isinstance(live, torch.Tensor | Shard | np.ndarray), "Tensor"
        else:
            cls = (
                codec.cls
                if type(saved) is Opaque and (codec := BY_NAME.get(saved.codec))
                else type(saved)
            )
            fits, kind = (
                cls is type(live) or (isinstance(live, dict) and issubclass(cls, dict)),
                cls.__qualname__,
            )
            if fits and isinstance(live, np.ndarray):
                fits = (live.shape, live.dtype) == (saved.shape, saved.dtype)
                kind = f"{kind} {saved.dtype} {list(saved.shape)}"
        if fits or not changeable(live):
            return {}
        form = f" {live.dtype} {list(live.shape)}" if isinstance(live, np.ndarray) else ""
        return {
            "value": (f"a value of type {kind}", f"one of type {type(live).__qualname__}{form}")
        }

    def may_replace(self, live: Any) -> bool:
        """Whether a tensor may be another object after a load."""
        whole = isinstance(self.value, torch.Tensor | Shard | np.ndarray)
        return not (whole or owned_elsewhere(live) or id(live) in self._inside)

    def put_back(self, state_dict: Any, seen: dict[int, tuple[Any, Any]]) -> None:
        """seen: shared by all of one load. Where the value itself cannot be changed, `loaded` alone
        has what was saved."""
        self.loaded = put_back(self.value, state_dict, seen, keep=not self.strict)

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


def refuse_fixed_values(components: Iterable[StateComponent]) -> None:
    """Raise InvalidState for a component whose value a restore could not put back: a number, a
    text, None, a tuple."""
    for component in components:
        held = component.stateful
        if isinstance(held, PlainState) and not changeable(held.value):
            key, text = component.key, shown(held.value)
            raise InvalidState(
                f"component {key!r} is {text}, a value of type {type(held.value).__qualname__}, "
                "which a restore cannot change in "
                f"place: put it into a dict, as in {{'progress': {{{key!r}: {text}}}}}, or into a "
                "ckptcore.Value(...), and use "
                "it from there",
                component=key,
            )


def owner_of(stateful: Any) -> Any:
    """Whose state it is, where `stateful` stands for a part of it."""
    return (
        getattr(stateful, "whole", stateful)
        if type(stateful).__module__.startswith("ckptcore.")
        else stateful
    )


def is_optimizer(owner: Any) -> bool:
    """Whether it takes an optimizer's state by name, and allocates what is not there yet."""
    return isinstance(owner, OptimizerState | OwnOptimizerState) and hasattr(owner, "allocate")


def metadata_of(stateful: Any) -> dict[str, Any] | None:
    """What torch keeps beside the state of a module that was just asked for it."""
    owner = owner_of(stateful)
    return owner.metadata if isinstance(owner, ModelState) else None


@one_walk()
def as_components(state: Any, world_size: int = 1) -> list[StateComponent]:
    """The components that `state` declares, each with a Stateful that the engine can ask.

    `state` is a StatefulProvider, a list of StateComponent, or a dict of modules, optimizers,
    Stateful objects and plain values. Raises InvalidState.
    """
    if isinstance(state, StatefulProvider) and not isinstance(state, type):
        state = state.get_state_components()
    if isinstance(state, Mapping):
        declared = [_in_dict(key, value, world_size) for key, value in state.items()]
    elif isinstance(state, Sequence) and not isinstance(state, str | bytes | bytearray):
        declared = list(state)
        for number, item in enumerate(declared):
            if not isinstance(item, StateComponent):
                raise InvalidState(
                    f"a list as state has StateComponents only, and item {number} of "
                    f"{len(declared)} is "
                    f"{shown(item)}, a {type(item).__qualname__}; write StateComponent(key, ...), "
                    "or pass a dict"
                )
    else:
        raise InvalidState(
            "a state is a dict, a list of StateComponent, or an object with "
            "get_state_components(), not "
            f"{shown(state)}, a {type(state).__qualname__}"
        )
    if not declared:
        raise InvalidState("the state has no components: nothing to save or load")
    keys = [component.key for component in declared]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise InvalidState(f"two components have the key {twice[0]!r}", component=twice[0])
    modules = {c.key: c.stateful for c in declared if _is_model(c.stateful)}
    plain = {c.key: c.stateful for c in declared if isinstance(c.stateful, torch.Tensor | Mapping)}
    return [_adapted(component, modules, plain, world_size) for component in declared]


def _in_dict(key: Any, value: Any, world_size: int) -> StateComponent:
    """The component that a value of a dict is, with all that was not said taken from the value."""
    component = value if isinstance(value, StateComponent) else StateComponent(key, value)
    if component.key != key:
        raise InvalidState(
            f"the dict calls a component {shown(key)}, and the StateComponent says "
            f"{component.key!r}: give it one name",
            component=component.key,
        )
    if component.inferred:
        component = replace(component, sharing_pattern=_pattern(component.stateful, world_size))
        component.inferred = _own_pattern(component.stateful) is None
    return component


def _own_pattern(value: Any) -> Any:
    return None if isinstance(value, nn.Module) else getattr(value, "sharing_pattern", None)


def _pattern(value: Any, world_size: int) -> SharingPattern:
    """An object may say its pattern itself, and slices are sharded; else one process has global
    state, and several have replicas."""
    if (own := _own_pattern(value)) is not None:
        return SharingPattern.of(own)
    kinds: Any = set(map(type, _tensors_of(value)))
    sharded = any(issubclass(kind, Shard) or is_dtensor_class(kind) for kind in kinds)
    if sharded or (world_size > 1 and _is_split(value)):
        return SharingPattern.SHARDED
    return SharingPattern.GLOBAL if world_size == 1 else SharingPattern.REPLICATED


def _tensors_of(value: Any, above: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Tensors of modules, optimizers and plain nested values, without asking anybody for a
    state_dict."""
    if isinstance(value, nn.Module):
        yield from _tensors_in(value)
    elif isinstance(value, torch.optim.Optimizer):
        groups = getattr(value, "param_groups", None) or [
            g for o in inside(value) for g in o.param_groups
        ]
        yield from (p for group in groups for p in group["params"])
    elif isinstance(value, OptimizerState):
        yield from _tensors_of(value.optimizer)
    elif isinstance(value, ModelState):
        yield from value.tensors()
    elif isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        kinds = set(map(type, items))
        if all(issubclass(kind, torch.Tensor | Shard) for kind in kinds):
            yield from items
        # What contains itself is refused by name by whoever takes it apart.
        elif not kinds <= PLAIN_TYPES and id(value) not in above:
            within = above | {id(value)}
            for item in items:
                if type(item) not in (list, tuple) or not only_plain(item):
                    yield from _tensors_of(item, within)
    elif isinstance(value, Value):
        yield from _tensors_of(value.value, above)
    elif isinstance(value, torch.Tensor | Shard):
        yield value


def _tensors_in(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers; one that two modules have comes twice."""
    for inner in module.modules():
        for held in (inner._parameters, inner._buffers):
            yield from (tensor for tensor in held.values() if tensor is not None)


def _is_model(value: Any) -> bool:
    """A module, or a list of them: the stages of a pipeline."""
    several = (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(item, nn.Module) for item in value)
    )
    return isinstance(value, nn.Module) or bool(several)


def _is_split(value: Any) -> bool:
    """Whether it is an optimizer that deals its state out over the ranks."""
    return split_over_ranks(value.optimizer if isinstance(value, OptimizerState) else value)


def _are_optimizers(value: Any) -> bool:
    """An optimizer, or a list of them."""
    several = value if isinstance(value, list | tuple) else [value]
    return bool(several) and all(isinstance(item, torch.optim.Optimizer) for item in several)


def _adapted(
    component: StateComponent, modules: dict[str, Any], plain: dict[str, Any], world_size: int
) -> StateComponent:
    stateful = component.stateful
    whole = component.sharing_pattern in (
        SharingPattern.GLOBAL,
        SharingPattern.REPLICATED,
        SharingPattern.PER_NODE,
    )
    if whole and world_size > 1 and _is_split(stateful):
        raise InvalidState(
            f"component {component.key!r}: each rank has only a part of the optimizer's state, "
            "and "
            f"{component.sharing_pattern.value} would store that of one; declare it SHARDED",
            component=component.key,
        )
    if _is_model(stateful):
        adapter: Any = ModelState(stateful)
    elif _are_optimizers(stateful):
        adapter = _optimizer_state(stateful, modules, plain)
    elif isinstance(stateful, Stateful) and not isinstance(stateful, type):
        adapter = stateful
    else:
        adapter = PlainState(stateful)
    adapted = replace(component, stateful=adapter)
    if isinstance(stateful, RNGState) and component.on_resize == "error":
        adapted.on_resize = stateful.on_resize
    return adapted


def _optimizer_state(optimizer: Any, modules: dict[str, Any], plain: dict[str, Any]) -> Any:
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    trained = {id(p) for p in _tensors_of(optimizer)}
    holders = {
        k: held
        for k, held in modules.items()
        if not trained.isdisjoint(parameter_table(held).names)
    }
    trained = trained.difference(*(parameter_table(held).names for held in holders.values()))
    for key, value in plain.items() if trained else ():
        # Tensors that are trained without a module go by the names that they have in the state.
        found = _named_tensors(value, trained)
        if found is not None:
            holders[key] = found
    models: Any = holders
    if len(holders) == 1:
        (only,) = holders.values()
        models = holders if isinstance(only, torch.Tensor) else only
    if len(several) > 1 or is_ordinary(several[0]):
        return OptimizerState(optimizer, models)
    return OwnOptimizerState(several[0], models)


def _named_tensors(value: Any, wanted: set[int]) -> Any:
    """Of a tensor, or of nested dicts of them, those that are wanted."""
    if isinstance(value, torch.Tensor):
        return value if id(value) in wanted else None
    if not isinstance(value, Mapping):
        return None
    found = {key: _named_tensors(item, wanted) for key, item in value.items()}
    return {key: item for key, item in found.items() if item is not None} or None
