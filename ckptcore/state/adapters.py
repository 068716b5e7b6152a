"""What torch's own objects need to be saved well: canonical keys, names instead of positions, random streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..arguments import shown
from ..errors import InvalidState
from ..format.strict import only_plain
from ..format.values import TensorRef
from .component import SharingPattern, StateComponent, Stateful, StatefulProvider
from .layout import Shard, is_dtensor
from .names import Models, Names, one_walk, parameter_table, prefixed
from .optimizers import OptimizerState, OwnOptimizerState, inside, is_ordinary, split_over_ranks
from .randomness import RNGState
from .tree import Differences, differences

__all__ = ["ModelState", "OptimizerState", "PlainState", "RNGState", "as_components"]


class ModelState:
    """A module's state under canonical keys: those of the bare module, however it is compiled or wrapped.

    models: a module, several with distinct names (the stages of one rank of a pipeline), or a dict of them, whose keys
    become prefixes. Raises InvalidState when two tensors have one name.
    """

    def __init__(self, models: Models) -> None:
        self._models = prefixed(models)
        self._raw()

    def _raw(self) -> dict[str, tuple[nn.Module, str, Any]]:
        """Canonical name -> (module, key as it is, value)."""
        found: dict[str, tuple[nn.Module, str, Any]] = {}
        for prefix, module in self._models:
            names = Names(module)
            # keep_vars: the parameters themselves, so that what was read into them in place need not be copied again.
            for key, value in module.state_dict(keep_vars=True).items():
                name = prefix + names.canonical(key)
                if name in found:
                    raise InvalidState(
                        f"{found[name][1]!r} and {key!r} are both {name!r} without wrappers; pass several models as a dict, "
                        "whose keys become prefixes", key=name)  # fmt: skip
                found[name] = module, key, value
        return found

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers, without asking for a state_dict."""
        for _, module in self._models:
            yield from module.parameters()
            yield from module.buffers()

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, (_, _, value) in self._raw().items()}

    def differences(self, saved: Any) -> Differences:
        """By the names, and whether there is a tensor where the module has one."""
        live = self.state_dict()
        found = differences(saved, live)
        for name, value in live.items() if isinstance(saved, Mapping) else ():
            kept = saved.get(name)
            if (
                isinstance(value, torch.Tensor)
                and name in saved
                and not (isinstance(kept, TensorRef) and not kept.numpy)
            ):
                kind = "numpy.ndarray" if isinstance(kept, TensorRef) else type(kept).__qualname__
                found.mismatched[name] = (f"a value of type {kind}", "a tensor")
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raw = self._raw()
        for _, module in self._models:
            mine = {raw[n][1]: v for n, v in state_dict.items() if n in raw and raw[n][0] is module}
            # Not strict: missing and unexpected keys were judged before anything was read.
            module.load_state_dict(mine, strict=False)


class PlainState:
    """Plain nested values and tensors. Tensors are restored in place; the values come back in the report."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.loaded: Any = None

    def state_dict(self) -> Any:
        return self.value

    def differences(self, saved: Any) -> Differences:
        return differences(saved, self.value)

    def load_state_dict(self, state_dict: Any) -> None:
        self.loaded = state_dict


@one_walk()
def as_components(state: Any, world_size: int = 1) -> list[StateComponent]:
    """The components that `state` declares, each with a Stateful that the engine can ask.

    `state` is a StatefulProvider, a list of StateComponent, or a dict of modules, optimizers, Stateful objects and
    plain values. Raises InvalidState.
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
                    f"a list as state has StateComponents only, and item {number} of {len(declared)} is "
                    f"{shown(item)}, a {type(item).__qualname__}; write StateComponent(key, ...), or pass a dict"
                )
    else:
        raise InvalidState(
            f"a state is a dict, a list of StateComponent, or an object with get_state_components(), not "
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
            f"the dict calls a component {shown(key)}, and the StateComponent says {component.key!r}: give it one name",
            component=component.key,
        )
    if component.inferred:
        component = replace(component, sharing_pattern=_pattern(component.stateful, world_size))
        component.inferred = _own_pattern(component.stateful) is None
    return component


def _own_pattern(value: Any) -> Any:
    return None if isinstance(value, nn.Module) else getattr(value, "sharing_pattern", None)


def _pattern(value: Any, world_size: int) -> SharingPattern:
    """An object may say its pattern itself, and slices are sharded; else one process has global state, and several
    have replicas."""
    if (own := _own_pattern(value)) is not None:
        return SharingPattern.of(own)
    sharded = any(is_dtensor(leaf) or isinstance(leaf, Shard) for leaf in _tensors_of(value))
    if sharded or (world_size > 1 and _is_split(value)):
        return SharingPattern.SHARDED
    return SharingPattern.GLOBAL if world_size == 1 else SharingPattern.REPLICATED


def _tensors_of(value: Any, above: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Tensors of modules, optimizers and plain nested values, without asking anybody for a state_dict."""
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        groups = getattr(value, "param_groups", None) or [g for o in inside(value) for g in o.param_groups]
        yield from (p for group in groups for p in group["params"])
    elif isinstance(value, OptimizerState):
        yield from _tensors_of(value.optimizer)
    elif isinstance(value, ModelState):
        yield from value.tensors()
    elif isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        # What contains itself is refused by name by whoever takes it apart.
        if not only_plain(items) and id(value) not in above:
            within = above | {id(value)}
            for item in items:
                if type(item) not in (list, tuple) or not only_plain(item):
                    yield from _tensors_of(item, within)
    elif isinstance(value, torch.Tensor | Shard):
        yield value


def _is_model(value: Any) -> bool:
    """A module, or a list of them: the stages of a pipeline."""
    several = isinstance(value, list | tuple) and value and all(isinstance(item, nn.Module) for item in value)
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
    whole = component.sharing_pattern in (SharingPattern.GLOBAL, SharingPattern.REPLICATED, SharingPattern.PER_NODE)
    if whole and world_size > 1 and _is_split(stateful):
        raise InvalidState(
            f"component {component.key!r}: each rank has only a part of the optimizer's state, and "
            f"{component.sharing_pattern.value} would store that of one; declare it SHARDED", component=component.key)  # fmt: skip
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
    holders = {k: held for k, held in modules.items() if not trained.isdisjoint(parameter_table(held).names)}
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
