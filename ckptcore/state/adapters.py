"""What torch's own objects need to be saved well: canonical keys, names instead of positions, random streams."""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import CheckpointWarning, InvalidState, StateMismatch
from .component import SharingPattern, StateComponent, Stateful, StatefulProvider
from .tree import capture, key_names

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


class ModelState:
    """A module's state under canonical keys: those of the bare module, however it is compiled or wrapped."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def _raw(self) -> tuple[dict[str, Any], dict[str, str]]:
        names = _Names(self.module)
        # keep_vars: the parameters themselves, so that what was read into them in place need not be copied again.
        raw = self.module.state_dict(keep_vars=True)
        to_raw: dict[str, str] = {}
        for key in raw:
            name = names.canonical(key)
            if name in to_raw:
                raise InvalidState(
                    f"{to_raw[name]!r} and {key!r} of a model are both {name!r} without wrappers", key=name
                )
            to_raw[name] = key
        return raw, to_raw

    def state_dict(self) -> dict[str, Any]:
        raw, to_raw = self._raw()
        return {name: raw[key] for name, key in to_raw.items()}

    def differences(self, saved: Any) -> tuple[list[str], list[str]]:
        return _differences(saved, self.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        _, to_raw = self._raw()
        # Not strict: missing and unexpected keys were judged before anything was read.
        self.module.load_state_dict({to_raw[n]: v for n, v in state_dict.items() if n in to_raw}, strict=False)


class OptimizerState:
    """An optimizer's state keyed by parameter name, so that order, stages and sharding may change.

    models: the module that holds the parameters, several of them with distinct names (pipeline stages), or a dict
    whose keys become prefixes ("generator.0.weight"). Tied parameters go by their first name.
    Raises InvalidState when a parameter of the optimizer is in none of them, or two share a name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        models: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module],
    ) -> None:
        self.optimizer = optimizer
        if isinstance(models, nn.Module):
            models = [models]
        parts = models.items() if isinstance(models, Mapping) else [("", module) for module in models]
        self._models = [(f"{prefix}." if prefix else "", module) for prefix, module in parts]
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
        names = self._parameter_names()
        groups = [
            {"params": [names[p] for p in group["params"]],
             **{k: v for k, v in group.items() if k not in ("params", "param_names")}}
            for group in self.optimizer.param_groups
        ]  # fmt: skip
        state = {
            names[p]: dict(self.optimizer.state[p])
            for group in self.optimizer.param_groups
            for p in group["params"]
            if self.optimizer.state.get(p)
        }
        return {"state": state, "groups": groups}

    def differences(self, saved: Any) -> tuple[list[str], list[str]]:
        """Names that only the live groups, or only the saved groups, have. Raises StateMismatch for a regrouping."""
        try:
            stored = [list(group["params"]) for group in saved["groups"]]
            saved["state"].keys()
        except (TypeError, KeyError, AttributeError):
            raise StateMismatch(
                "the saved state is not that of an OptimizerState (no groups of named parameters)"
            ) from None
        live = [group["params"] for group in self.state_dict()["groups"]]
        at = {name: number for number, group in enumerate(live) for name in group}
        was = {name: number for number, group in enumerate(stored) for name in group}
        moved = sorted(name for name in at.keys() & was.keys() if at[name] != was[name])
        if moved or len(live) != len(stored):
            shown = ", ".join(f"{n} (group {was[n]} -> {at[n]})" for n in moved[:5])
            raise StateMismatch(
                f"the optimizer has {len(live)} parameter groups, {len(stored)} were saved; parameters that moved: "
                f"{shown or 'none'}{' ...' if len(moved) > 5 else ''}; rebuild the groups as they were at the save",
                mismatched={n: (f"group {was[n]}", f"group {at[n]}") for n in moved})  # fmt: skip
        missing = [f"groups/{n}" for n in sorted(at.keys() - was.keys())]
        unexpected = [f"groups/{n}" for n in sorted(was.keys() - at.keys())]
        return missing, unexpected

    def allocate(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Memory for a moment that the live optimizer does not have yet: where its parameter is."""
        parts = [part.replace("~1", "/").replace("~0", "~") for part in name.split("/")]
        if len(parts) < 3 or parts[0] != "state" or not shape:
            return None
        for parameter, known in self._parameter_names().items():
            if known == parts[1]:
                return torch.empty(shape, dtype=dtype, device=parameter.device)
        return None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets state and options directly: torch's own loading would cast moments to the parameter's dtype."""
        names = self._parameter_names()
        by_name = {name: p for p, name in names.items()}
        state: defaultdict[Any, Any] = defaultdict(dict)
        for name, values in state_dict["state"].items():
            if name in by_name:
                state[by_name[name]] = dict(values)
        for parameter in by_name.values():
            live = self.optimizer.state.get(parameter)
            if (
                live
                and parameter not in state
                and not any(names[parameter] in g["params"] for g in state_dict["groups"])
            ):
                state[parameter] = live  # not in the checkpoint at all (not strict): stays as it is
        for number, (group, saved) in enumerate(zip(self.optimizer.param_groups, state_dict["groups"], strict=True)):
            lacking = group.keys() - saved.keys() - {"param_names"}
            extra = saved.keys() - group.keys()
            if lacking or extra:
                warnings.warn(
                    f"optimizer group {number}: options not in the checkpoint keep their live values: {sorted(lacking)}; "
                    f"options that only the checkpoint has: {sorted(extra)}", CheckpointWarning, stacklevel=2)  # fmt: skip
            group.update({k: v for k, v in saved.items() if k != "params"})
        self.optimizer.__setstate__({"state": state, "param_groups": self.optimizer.param_groups})


class RNGState:
    """The random streams of python, numpy and torch: CPU and every accelerator. One of its own per rank.

    Restored after everything else, so that nothing draws between restoring and the first step.
    """

    sharing_pattern = SharingPattern.PER_RANK
    restore_last = True

    def state_dict(self) -> dict[str, Any]:
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        accelerator = _accelerator()
        return {
            "python": random.getstate(),
            "numpy": {"kind": kind, "keys": keys, "position": position, "has_gauss": has_gauss, "cached": cached},
            "torch": torch.get_rng_state(),
            "accelerator": None if accelerator is None else [accelerator[0], accelerator[1].get_rng_state_all()],
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        accelerator = _accelerator()
        saved = state_dict["accelerator"]
        if saved is not None:
            kind, states = saved
            if accelerator is None or accelerator[0] != kind or len(accelerator[1].get_rng_state_all()) != len(states):
                warnings.warn(
                    f"random streams of {len(states)} {kind} devices are in the checkpoint; this process has other devices, "
                    "whose streams stay as they are", CheckpointWarning, stacklevel=2)  # fmt: skip
            else:
                accelerator[1].set_rng_state_all(states)
        n = state_dict["numpy"]
        np.random.set_state((n["kind"], n["keys"], n["position"], n["has_gauss"], n["cached"]))
        random.setstate(state_dict["python"])
        torch.set_rng_state(state_dict["torch"])


def _accelerator() -> tuple[str, Any] | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = getattr(torch, device.type, None) if device is not None else None
    return None if device is None or not hasattr(module, "get_rng_state_all") else (device.type, module)


class PlainState:
    """Plain nested values and tensors. Tensors are restored in place; the values come back in the report."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.loaded: Any = None

    def state_dict(self) -> Any:
        return self.value

    def differences(self, saved: Any) -> tuple[list[str], list[str]]:
        return _differences(saved, self.value)

    def load_state_dict(self, state_dict: Any) -> None:
        self.loaded = state_dict
        live = {tensor.name: tensor for tensor in capture("", self.value).tensors}
        for tensor in capture("", state_dict).tensors:
            if tensor.name in live and live[tensor.name].live is not tensor.live:
                live[tensor.name].tensor.detach().copy_(tensor.tensor)


def _differences(saved: Any, live: Any) -> tuple[list[str], list[str]]:
    """(names that only the live state has, names that only the checkpoint has), in their own order."""
    held, wanted = dict.fromkeys(key_names(saved)), dict.fromkeys(key_names(live))
    return [n for n in wanted if n not in held], [n for n in held if n not in wanted]


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
    modules = {c.key: c.stateful for c in declared if isinstance(c.stateful, nn.Module)}
    return [_adapted(component, modules) for component in declared]


def _pattern(value: Any, world_size: int) -> SharingPattern:
    """An object may say its pattern itself; else one process has global state, and several have replicas."""
    own = getattr(value, "sharing_pattern", None)
    if own is not None and not isinstance(value, nn.Module):
        return SharingPattern(own)
    return SharingPattern.GLOBAL if world_size == 1 else SharingPattern.REPLICATED


def _adapted(component: StateComponent, modules: dict[str, nn.Module]) -> StateComponent:
    stateful = component.stateful
    if isinstance(stateful, nn.Module):
        adapter: Any = ModelState(stateful)
    elif isinstance(stateful, torch.optim.Optimizer):
        adapter = _optimizer_state(stateful, modules)
    elif isinstance(stateful, Stateful) and not isinstance(stateful, type):
        adapter = stateful
    else:
        adapter = PlainState(stateful)
    adapted = StateComponent(**{name: getattr(component, name) for name in component.__slots__})
    adapted.stateful = adapter
    return adapted


def _optimizer_state(optimizer: torch.optim.Optimizer, modules: dict[str, nn.Module]) -> OptimizerState:
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    holders = {k: m for k, m in modules.items() if any(id(p) in mine for p in m.parameters())}
    return OptimizerState(optimizer, holders if len(holders) > 1 else list(holders.values()))
