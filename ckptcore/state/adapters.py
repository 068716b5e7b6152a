"""What torch's own objects need to be saved well: canonical keys, names instead of positions, random streams."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointWarning, InvalidState, StateMismatch
from ..format.values import TensorRef
from .component import SharingPattern, StateComponent, Stateful, StatefulProvider
from .layout import Shard, is_dtensor
from .randomness import RNGState
from .tree import Differences, differences

__all__ = ["ModelState", "OptimizerState", "PlainState", "RNGState", "as_components"]

# Wrappers that put the wrapped module under a name of their own: class name -> that name.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}


def _inner_name(module: nn.Module) -> str | None:
    for cls in type(module).__mro__:
        name = _WRAPPERS.get(cls.__name__)
        if name is not None and cls.__module__.startswith("torch.") and name in module._modules:
            return name
    return None


def _prefixes(module: nn.Module, raw: str = "", canonical: str = "") -> Iterator[tuple[str, str]]:
    """(prefix of keys as they are, the same without wrappers) for a module and all modules inside."""
    yield raw, canonical
    inner = _inner_name(module)
    for name, child in module._modules.items():
        if child is not None:
            kept = canonical if name == inner else f"{canonical}{name}."
            yield from _prefixes(child, f"{raw}{name}.", kept)


class _Names:
    """Keys of a module's state without the prefixes of wrappers."""

    def __init__(self, module: nn.Module) -> None:
        self.prefixes = dict(_prefixes(module))

    def canonical(self, key: str) -> str:
        prefix = key[: key.rfind(".") + 1]
        return self.prefixes.get(prefix, prefix) + key[len(prefix) :]


Models = nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module | Iterable[nn.Module]]


def _prefixed(models: Models) -> list[tuple[str, nn.Module]]:
    """Modules with the prefix of their names: none, or the key of the dict that they came in."""
    if isinstance(models, nn.Module):
        return [("", models)]
    if isinstance(models, Mapping):
        return [(f"{key}.", module) for key, held in models.items() for _, module in _prefixed(held)]
    return [("", module) for module in models]


class ModelState:
    """A module's state under canonical keys: those of the bare module, however it is compiled or wrapped.

    models: a module, several with distinct names (the stages of one rank of a pipeline), or a dict of them, whose keys
    become prefixes. Raises InvalidState when two tensors have one name.
    """

    def __init__(self, models: Models) -> None:
        self._models = _prefixed(models)
        self._raw()

    def _raw(self) -> dict[str, tuple[nn.Module, str, Any]]:
        """Canonical name -> (module, key as it is, value)."""
        found: dict[str, tuple[nn.Module, str, Any]] = {}
        for prefix, module in self._models:
            names = _Names(module)
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


class OptimizerState:
    """An optimizer's state keyed by parameter name, so that order, stages and sharding may change.

    models: the module that holds the parameters, several of them with distinct names (pipeline stages), or a dict
    whose keys become prefixes ("generator.0.weight"). Tied parameters go by their first name.
    Raises InvalidState when a parameter of the optimizer is in none of them, or two share a name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, models: Models) -> None:
        self.optimizer = optimizer
        self._models = _prefixed(models)
        self._by_name: dict[str, torch.Tensor] | None = None
        self._parameter_names()

    def _parameter_names(self) -> dict[torch.Tensor, str]:
        names: dict[torch.Tensor, str] = {}
        taken: dict[str, torch.Tensor] = {}
        for prefix, module in self._models:
            canonical = _Names(module).canonical
            for key, parameter in module.named_parameters():
                name = prefix + canonical(key)
                if taken.setdefault(name, parameter) is not parameter:
                    raise InvalidState(
                        f"two parameters are named {name!r}; pass the models as a dict, whose keys become prefixes", key=name)  # fmt: skip
                names.setdefault(parameter, name)
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    raise InvalidState(
                        f"the optimizer's group {number} has a parameter of shape {list(parameter.shape)} that is in none of "
                        "the models; wrap it as OptimizerState(optimizer, models) with all models that it trains")  # fmt: skip
        return names

    def state_dict(self) -> dict[str, Any]:
        """{"state": {name: values}, "group_of": {name: group number}, "shapes": {name: shape of the parameter},
        "groups": {group number: options}}, and "other": state that is of no parameter, where there is any.

        By name throughout, so that the states of pipeline stages put together are the state of the whole model.
        """
        names = self._parameter_names()
        groups = self.optimizer.param_groups
        other = {k: v for k, v in self.optimizer.state.items() if not isinstance(k, torch.Tensor)}
        return {
            "state": {names[p]: dict(values) for group in groups for p in group["params"]
                      if (values := self.optimizer.state.get(p))},
            "group_of": {names[p]: number for number, group in enumerate(groups) for p in group["params"]},
            "shapes": {names[p]: list(p.shape) for group in groups for p in group["params"]},
            "groups": {number: {k: v for k, v in group.items() if k not in ("params", "param_names")}
                       for number, group in enumerate(groups)},
            **({"other": other} if other else {}),
        }  # fmt: skip

    def differences(self, saved: Any) -> Differences:
        """By the names and shapes of parameters. Raises StateMismatch for a regrouping."""
        try:
            was, saved_groups, shapes = dict(saved["group_of"]), len(saved["groups"]), dict(saved["shapes"])
            parts = [saved["state"], *saved["state"].values(), *(saved["groups"][n] for n in range(saved_groups))]
            if not all(isinstance(part, dict) for part in parts):
                raise TypeError
        except (TypeError, KeyError, AttributeError, ValueError):
            raise StateMismatch(
                "the saved state is not that of an OptimizerState (no groups of named parameters)"
            ) from None
        live = self.state_dict()
        at = live["group_of"]
        moved = sorted(name for name in at.keys() & was.keys() if at[name] != was[name])
        live_groups = len(self.optimizer.param_groups)
        if moved or live_groups != saved_groups:
            shown = ", ".join(f"{n} (group {was[n]} -> {at[n]})" for n in moved[:5])
            raise StateMismatch(
                f"the optimizer has {live_groups} parameter groups, {saved_groups} were saved; parameters that moved: "
                f"{shown or 'none'}{' ...' if len(moved) > 5 else ''}; rebuild the groups as they were at the save",
                mismatched={n: (f"group {was[n]}", f"group {at[n]}") for n in moved})  # fmt: skip
        reshaped = {n: (f"parameter {shapes[n]}", f"parameter {live['shapes'][n]}") for n in at
                    if n in shapes and shapes[n] != live["shapes"][n]}  # fmt: skip
        both = [n for n in at if n in was]
        return Differences([n for n in at if n not in was], [n for n in was if n not in at], len(both), reshaped)

    def allocate(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Memory for a moment that the live optimizer does not have yet: laid out and placed like its parameter."""
        parts = [part.replace("~1", "/").replace("~0", "~") for part in name.split("/")]
        if parts[0] == "other":
            return torch.empty(shape, dtype=dtype, device="cpu")  # every rank's, in a sharded state, too
        if len(parts) < 3 or parts[0] != "state":
            return None
        if self._by_name is None:
            self._by_name = {known: parameter for parameter, known in self._parameter_names().items()}
        parameter = self._by_name.get(parts[1])
        if parameter is None:
            return None
        if is_dtensor(parameter) and tuple(parameter.shape) == shape:
            return _like_dtensor(parameter, dtype)
        group = next((g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"])), {})
        # torch keeps step counters on the host unless the step itself runs on the device.
        on_host = not shape and not (group.get("capturable") or group.get("fused"))
        return torch.empty(shape, dtype=dtype, device="cpu" if on_host else parameter.device)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets state and options directly: torch's own loading would cast moments to the parameter's dtype."""
        names = self._parameter_names()
        by_name = {name: p for p, name in names.items()}
        state: defaultdict[Any, Any] = defaultdict(dict)
        for name, values in state_dict.get("state", {}).items():  # absent where no parameter here has state
            if name in by_name:
                state[by_name[name]] = dict(values)
        for parameter, values in self.optimizer.state.items():
            if isinstance(parameter, torch.Tensor) and names.get(parameter) not in state_dict["group_of"]:
                state[parameter] = values  # not in the checkpoint at all (not strict): stays as it is
        state.update(state_dict.get("other", {}))
        for number, group in enumerate(self.optimizer.param_groups):
            saved = state_dict["groups"][number]
            lacking = group.keys() - saved.keys() - {"params", "param_names"}
            extra = saved.keys() - group.keys()
            if lacking or extra:
                warnings.warn(
                    f"optimizer group {number}: options not in the checkpoint keep their live values: {sorted(lacking)}; "
                    f"options that only the checkpoint has: {sorted(extra)}", CheckpointWarning, stacklevel=2)  # fmt: skip
            group.update(saved)
        self.optimizer.__setstate__({"state": state, "param_groups": self.optimizer.param_groups})


def _like_dtensor(parameter: Any, dtype: torch.dtype) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    local = torch.empty_like(parameter.to_local().detach(), dtype=dtype)
    made: torch.Tensor = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


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


def as_components(state: Any, world_size: int = 1) -> list[StateComponent]:
    """The components that `state` declares, each with a Stateful that the engine can ask.

    `state` is a StatefulProvider, a list of StateComponent, or a dict of modules, optimizers, Stateful objects and
    plain values. Raises InvalidState.
    """
    if isinstance(state, StatefulProvider):
        state = list(state.get_state_components())
    if isinstance(state, Mapping):
        declared = [StateComponent(key, value, _pattern(value, world_size)) for key, value in state.items()]
    elif isinstance(state, Sequence) and all(isinstance(item, StateComponent) for item in state):
        declared = list(state)
    else:
        raise InvalidState(
            f"a state is a dict, a list of StateComponent, or an object with get_state_components(), not "
            f"{type(state).__qualname__}")  # fmt: skip
    if not declared:
        raise InvalidState("the state has no components: nothing to save or load")
    keys = [component.key for component in declared]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise InvalidState(f"two components have the key {twice[0]!r}", component=twice[0])
    modules = {c.key: c.stateful for c in declared if _is_model(c.stateful)}
    return [_adapted(component, modules) for component in declared]


def _pattern(value: Any, world_size: int) -> SharingPattern:
    """An object may say its pattern itself, and slices are sharded; else one process has global state, and several
    have replicas."""
    own = getattr(value, "sharing_pattern", None)
    if own is not None and not isinstance(value, nn.Module):
        return SharingPattern(own)
    if any(is_dtensor(leaf) or isinstance(leaf, Shard) for leaf in _tensors_of(value)):
        return SharingPattern.SHARDED
    return SharingPattern.GLOBAL if world_size == 1 else SharingPattern.REPLICATED


def _tensors_of(value: Any, above: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Tensors of modules, optimizers and plain nested values, without asking anybody for a state_dict."""
    within = above | {id(value)}
    if id(value) in above:
        return  # it contains itself; whoever takes it apart refuses it by name
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        yield from (p for group in value.param_groups for p in group["params"])
    elif isinstance(value, OptimizerState):
        yield from _tensors_of(value.optimizer)
    elif isinstance(value, ModelState):
        yield from value.tensors()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_of(item, within)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_of(item, within)
    elif isinstance(value, torch.Tensor | Shard):
        yield value


def _state_hooks(optimizer: torch.optim.Optimizer) -> bool:
    names = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return any(getattr(optimizer, name, None) for name in names)


def _is_model(value: Any) -> bool:
    """A module, or a list of them: the stages of a pipeline."""
    several = isinstance(value, list | tuple) and value and all(isinstance(item, nn.Module) for item in value)
    return isinstance(value, nn.Module) or bool(several)


def _adapted(component: StateComponent, modules: dict[str, Any]) -> StateComponent:
    stateful = component.stateful
    if _is_model(stateful):
        adapter: Any = ModelState(stateful)
    elif isinstance(stateful, torch.optim.Optimizer):
        adapter = _optimizer_state(stateful, modules)
    elif isinstance(stateful, Stateful) and not isinstance(stateful, type):
        adapter = stateful
    else:
        adapter = PlainState(stateful)
    adapted = StateComponent(**{name: getattr(component, name) for name in component.__slots__})
    adapted.stateful = adapter
    if isinstance(stateful, RNGState) and component.on_resize == "error":
        adapted.on_resize = stateful.on_resize
    return adapted


# Optimizers of which was said that they may keep more than is stored.
_warned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _optimizer_state(optimizer: torch.optim.Optimizer, modules: dict[str, Any]) -> OptimizerState:
    plain = type(optimizer).state_dict is torch.optim.Optimizer.state_dict and not _state_hooks(optimizer)
    # That of Accelerate's wrapper is the one of what it wraps.
    if not (plain or type(optimizer).__module__.startswith("accelerate.")) and optimizer not in _warned:
        _warned.add(optimizer)
        warnings.warn(
            f"{type(optimizer).__qualname__} has a state_dict() of its own, or hooks on it, which are not asked: stored are its "
            "state and param_groups; keep more in a component of its own, whose object is not an Optimizer",
            CheckpointWarning, stacklevel=4)  # fmt: skip
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    holders = {k: held for k, held in modules.items()
               if any(id(p) in mine for _, m in _prefixed(held) for p in m.parameters())}  # fmt: skip
    only: Any = next(iter(holders.values()), [])
    return OptimizerState(optimizer, holders if len(holders) > 1 else only)
