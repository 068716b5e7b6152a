"""Optimizers by parameter name: which of several nested ones hold the state, and how it comes
back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from ..arguments import shown
from ..errors import CheckpointWarning, InvalidState, StateMismatch
from .containers import Moment, stored_moments
from .layout import dtensor_of, is_dtensor, same_view_key, words
from .modules import ModelState, ParameterTable, last_table, parameter_table
from .tree import Differences

_NOT_OPTIONS = ("params", "param_names")
_PARTS = ("state", "group_of", "shapes", "groups")  # of what is stored
# Options that torch gave its optimizers over the years, and fills in for older checkpoints.
_ADDED_LATER = {
    "amsgrad",
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "maximize",
    "nesterov",
}
# What a step of torch's own optimizers cannot do without, where a parameter has state at all.
_NEEDED: dict[str, set[str]] = {
    "ASGD": {"ax", "eta", "mu"},
    "Adadelta": {"acc_delta", "square_avg"},
    "Adafactor": set(),
    "Adagrad": {"sum"},
    "Adam": {"exp_avg", "exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq"},
    "Adamax": {"exp_avg", "exp_inf"},
    "Muon": set(),
    "NAdam": {"exp_avg", "exp_avg_sq", "mu_product"},
    "RAdam": {"exp_avg", "exp_avg_sq"},
    "RMSprop": {"square_avg"},
    "Rprop": {"prev", "step_size"},
    "SGD": set(),
    "SparseAdam": {"exp_avg", "exp_avg_sq"},
}


@dataclass(frozen=True, slots=True)
class _Part:
    """An optimizer that holds the state of its parameters, and the groups that hold its options."""

    optimizer: Optimizer
    groups: list[dict[str, Any]]

    @property
    def held(self) -> set[int]:
        """The parameters whose state is here: all of them, unless they are dealt out over ranks."""
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    def packed(self) -> dict[str, Any]:
        """Its state as torch's own state_dict() has it, of references."""
        numbers: dict[Any, int] = {}
        groups = []
        for group in self.groups:
            for parameter in group["params"]:
                numbers.setdefault(parameter, len(numbers))
            groups.append({**group, "params": [numbers[p] for p in group["params"]]})
        state = {numbers.get(key, key): values for key, values in self.optimizer.state.items()}
        return {"state": state, "param_groups": groups}


def inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that it has as attributes, also in lists and dicts, each of them once."""
    found: dict[int, Optimizer] = {}
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults"):
            continue
        several = value.values() if isinstance(value, Mapping) else value
        for item in several if isinstance(value, Mapping | list | tuple) else (value,):
            if isinstance(item, Optimizer) and item is not optimizer:
                found[id(item)] = item
    mine = _ids(_groups(optimizer)) if found else set()
    # One that trains nothing of this one's is somebody else's.
    return [item for item in found.values() if not mine or mine & _ids(_groups(item))]


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """None where a container has not called the constructor of its base class."""
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    return groups


def _ids(groups: list[dict[str, Any]]) -> set[int]:
    return {id(p) for group in groups for p in group["params"]}


def _is_zero(optimizer: Optimizer) -> bool:
    """Whether it is torch's ZeroRedundancyOptimizer, without importing it."""
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)


def split_over_ranks(value: Any) -> bool:
    """Whether a rank has only its part of the optimizer's state."""
    several = value if isinstance(value, list | tuple) else (value,)
    optimizers = [item for item in several if isinstance(item, Optimizer)]
    zeros = [item for item in optimizers if _is_zero(item) and getattr(item, "world_size", 1) > 1]
    return bool(zeros) or any(split_over_ranks(inside(item)) for item in optimizers)


def is_ordinary(optimizer: Optimizer) -> bool:
    """Whether all there is to it is its `state` and `param_groups`, as in torch's own classes."""
    return not (_has_own("state_dict", optimizer) or inside(optimizer) or _is_zero(optimizer))


def _has_own(method: str, optimizer: Optimizer) -> bool:
    """Whether the class has a state_dict() or load_state_dict() of its own, or there are hooks on
    it."""
    names = (f"_optimizer_{method}_{when}_hooks" for when in ("pre", "post"))
    hooks = (getattr(optimizer, name, None) for name in names)
    return getattr(type(optimizer), method) is not getattr(Optimizer, method) or any(hooks)


def _parts(optimizer: Optimizer) -> list[_Part]:
    """The optimizers that hold the state: itself, or those inside it.

    Raises InvalidState when it has something of its own besides.
    """
    kind = type(optimizer).__qualname__
    if _is_zero(optimizer):
        if not hasattr(optimizer, "optim"):
            raise InvalidState(f"{kind} has not made its local optimizer yet; run one step first")
        return [_Part(optimizer.optim, optimizer.param_groups)]
    within = inside(optimizer)
    if not within:
        if optimizer.state is not optimizer.state:
            raise InvalidState(
                f"{kind}.state is another object each time it is asked for: nothing can be put "
                "into it"
            )
        return [_Part(optimizer, optimizer.param_groups)]
    parts = [part for item in within for part in _parts(item)]
    state, groups = getattr(optimizer, "state", None), _groups(optimizer)
    if any(item.state is state for item in within):
        return parts  # it hands on what the one inside has
    names = ", ".join(sorted({type(item).__qualname__ for item in within}))
    if state:
        raise InvalidState(f"{kind} keeps state of its own besides that of the {names} inside")
    shared = [group for part in parts for group in part.groups]
    alone = [group for group in groups if not any(group is other for other in shared)]
    if any(group.keys() - _NOT_OPTIONS for group in alone):
        raise InvalidState(f"{kind} has options of its own besides those of the {names} inside")
    if _ids(groups) - _ids(shared):
        raise InvalidState(f"{kind} has parameters that the {names} inside do not train")
    return parts


def _same(a: Any, b: Any) -> bool:
    """Whether two values are the same; tensors only when they are the same memory."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        view = None if is_dtensor(a) or is_dtensor(b) else same_view_key(a)
        return view is not None and view == same_view_key(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and bool(a == b)


def _beyond(own: Any, packed: list[dict[str, Any]], path: str = "") -> str | None:
    """Where a state_dict holds something that none of the packed ones does."""
    if isinstance(own, Mapping):
        forms = ("state", "param_groups")
        equal = (all(_same(own[k], one[k]) for k in forms) for one in packed)
        known = own.keys() >= set(forms) and any(equal)
        items = [(key, value) for key, value in own.items() if not (known and key in forms)]
    elif isinstance(own, list | tuple):
        items = list(enumerate(own))
    else:
        return path or "a value"
    found = (_beyond(value, packed, f"{path}/{key}" if path else str(key)) for key, value in items)
    return next((where for where in found if where is not None), None)


def _not_stored(optimizer: Optimizer) -> str | None:
    """What a state_dict() of the class's own holds beyond the state of the optimizers inside."""
    for item in inside(optimizer):
        if (found := _not_stored(item)) is not None:
            return found
    if not _has_own("state_dict", optimizer) or split_over_ranks(optimizer) or _is_zero(optimizer):
        return None
    # Of those that hold no state of their own, too: a state_dict() may go through any of them.
    packed = [part.packed() for part in [*_parts(optimizer), *_nested(optimizer)]]
    where = _beyond(optimizer.state_dict(), packed)
    return where and (
        f"{type(optimizer).__qualname__} has a state_dict() of its own, or hooks on it, which hold "
        f"more than the state and param_groups of what makes the steps: {where!r}"
    )


def _nested(optimizer: Optimizer) -> list[_Part]:
    """All that an optimizer holds, at any depth, as far as they are complete."""
    within = [part for item in inside(optimizer) for part in _nested(item)]
    whole = hasattr(optimizer, "state") and _groups(optimizer)
    return [_Part(optimizer, optimizer.param_groups), *within] if whole else within


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


class OptimizerState:
    """An optimizer's state keyed by parameter name, so that order, stages and sharding may change.

    Tied parameters go by their first name. An optimizer that wraps or holds others is stored by the
    state of those.

    optimizer: an optimizer, or several that train the models as one and are one state.
    models: module with the parameters, several with distinct names (pipeline stages), or dict of
        modules and tensors whose keys become prefixes, "generator.0.weight" (default: the names
        that the optimizer was given with its parameters).

    Raises InvalidState when a parameter has no name, two share one, or the class keeps state that
    this does not store.
    """

    _hint = (
        "; give the optimizer itself as the component, whose own state_dict() is then stored, or "
        "the optimizers inside it: OptimizerState([...], models)"
    )

    def __init__(self, optimizer: Optimizer | Sequence[Optimizer], models: Any = ()) -> None:
        self.optimizer = optimizer
        made: Any = optimizer
        several = isinstance(made, Iterable) and not isinstance(made, Optimizer)
        self._optimizers: list[Optimizer] = list(made) if several else [made]
        if other := [held for held in self._optimizers if not isinstance(held, Optimizer)]:
            raise InvalidState(
                f"OptimizerState takes a torch optimizer, or a list of them, not {shown(other[0])}"
            )
        if not isinstance(models, nn.Module | Iterable | ModelState):
            raise InvalidState(
                "OptimizerState: models must be modules, or a dict of tensors by name, not "
                f"{shown(models)}"
            )
        self._models = models
        self._by_name: dict[str, tuple[torch.Tensor, dict[str, Any]]] | None = None
        # What was known of the module a moment ago does, where it has all of these parameters: a
        # save looks again.
        last = last_table(models)
        known = last is not None and all(
            id(p) in last.names for group in self._groups() for p in group["params"]
        )
        self._parameter_names(last if known else None)

    def _parts(self) -> list[_Part]:
        try:
            parts = {id(p.optimizer): p for one in self._optimizers for p in _parts(one)}
        except InvalidState as error:
            error.message += self._hint
            raise
        return list(parts.values())

    def _groups(self) -> list[dict[str, Any]]:
        """Of all the optimizers; their place is their number."""
        return [group for part in self._parts() for group in part.groups]

    def _parameter_names(self, table: ParameterTable | None = None) -> dict[int, str]:
        """Names of the parameters, by id; not to be changed. table: what is known of the models."""
        groups = self._groups()
        table = table or parameter_table(self._models)
        names, taken, twice = table.names, table.parameters, table.twice
        given = [
            (name, parameter)
            for group in groups
            for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False)
            if id(parameter) not in table.names  # else the model's own name counts
        ]
        if given:
            names, taken = dict(names), dict(taken)
        for name, parameter in given:
            if taken.setdefault(name, parameter) is not parameter:
                twice = twice or name
            names.setdefault(id(parameter), name)
        if twice is not None:
            hint = "pass the models as a dict, whose keys become prefixes"
            raise InvalidState(f"two parameters are named {twice!r}; {hint}", key=twice)
        number_of: dict[int, int] = {}
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise InvalidState(
                        f"the optimizer's group {number} has a parameter of shape "
                        f"{list(parameter.shape)} that is in none of the models; wrap it as "
                        "OptimizerState(optimizer, models) with all models that it trains, or with "
                        "a dict of its tensors by name"
                    )
                if number_of.setdefault(id(parameter), number) != number:
                    name = names[id(parameter)]
                    what = f"parameter {name!r} is in several groups or optimizers"
                    raise InvalidState(what, key=name)
        return names

    def state_dict(self) -> dict[str, Any]:
        """{"state": {name: values}, "group_of": {name: group number},
        "shapes": {name: shape of the parameter}, "groups": {group number: options}}, and "other":
        state that is of no parameter, where there is any (by the number of the optimizer, of
        several).

        By name throughout, so that the states of pipeline stages make up the state of the whole
        model.
        """
        for optimizer in self._optimizers:
            if (where := _not_stored(optimizer)) is not None:
                raise InvalidState(where + self._hint)
        names, parts = self._parameter_names(), self._parts()
        stored: dict[str, Any] = {"state": {}, "group_of": {}, "shapes": {}, "groups": {}}
        state, group_of, shapes, groups = stored.values()
        other: dict[Any, Any] = {}
        for number, part in enumerate(parts):
            held = part.optimizer.state
            for group in part.groups:
                at = len(groups)
                groups[at] = {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    group_of[name], shapes[name] = at, _shape_of(parameter)
                    if values := held.get(parameter):
                        state[name] = stored_moments(name, parameter, values)
            mine = {k: v for k, v in held.items() if not isinstance(k, torch.Tensor)}
            if mine:
                other |= mine if len(parts) == 1 else {number: mine}
        return {**stored, "other": other} if other else stored

    @staticmethod
    def saved_parts(saved: Any) -> dict[str, dict[Any, Any]]:
        """The parts of a saved state. Raises StateMismatch where it has not all of them."""
        parts: dict[str, Any] = dict.fromkeys(_PARTS)
        if isinstance(saved, dict):
            parts |= {name: saved[name] for name in _PARTS if name in saved}
        whole = all(isinstance(part, dict) for part in parts.values())
        groups = parts["groups"] if whole else {}
        values = [*parts["state"].values(), *map(groups.get, range(len(groups)))] if whole else []
        if not whole or not all(isinstance(value, dict) for value in values):
            raise StateMismatch(
                "the saved state is not that of an OptimizerState (no groups of named parameters)"
            )
        return parts

    def differences(self, saved: Any) -> Differences:
        """By the names and shapes of parameters.

        Raises StateMismatch for a regrouping, and for another kind of optimizer.
        """
        parts = self.saved_parts(saved)
        was, shapes, saved_groups = parts["group_of"], parts["shapes"], len(parts["groups"])
        live = self.state_dict()
        at = live["group_of"]
        moved = sorted(name for name in at.keys() & was.keys() if at[name] != was[name])
        live_groups = len(live["groups"])
        if moved or live_groups != saved_groups:
            shown = ", ".join(f"{n} (group {was[n]} -> {at[n]})" for n in moved[:5])
            raise StateMismatch(
                f"the optimizer has {live_groups} parameter groups, {saved_groups} were saved; "
                f"parameters that moved: {shown or 'none'}{' ...' if len(moved) > 5 else ''}; "
                "rebuild the groups as they were at the save",
                mismatched={n: (f"group {was[n]}", f"group {at[n]}") for n in moved},
            )
        for part, number in self._numbered():
            _check_kind(part, number, saved)
        reshaped = {
            n: (f"parameter {shapes[n]}", f"parameter {shape}")
            for n, shape in live["shapes"].items()
            if shape is not None and shapes.get(n, shape) not in (shape, None)
        }
        both = [n for n in at if n in was]
        missing, unexpected = [n for n in at if n not in was], [n for n in was if n not in at]
        return Differences(missing, unexpected, len(both), reshaped)

    def _numbered(self) -> Iterator[tuple[_Part, int]]:
        """Each optimizer with the number of its first group."""
        number = 0
        for part in self._parts():
            yield part, number
            number += len(part.groups)

    def allocate(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
        """Memory for a moment that the live optimizer does not have yet, laid out like its
        parameter."""
        keys = [key.replace("~1", "/").replace("~0", "~") for key in name.split("/")]
        if keys[0] == "other":
            # Every rank's, in a sharded state, too.
            return torch.empty(shape, dtype=dtype, device="cpu")
        if len(keys) < 3 or keys[0] != "state":
            return None
        if self._by_name is None:
            names = self._parameter_names()
            self._by_name = {
                names[id(p)]: (p, group)
                for part in self._parts()
                for held in [part.held]
                for group in part.groups
                for p in group["params"]
                if id(p) in held
            }
        if keys[1] not in self._by_name:
            return None
        parameter: Any
        parameter, group = self._by_name[keys[1]]
        if len(keys) == 5 and keys[3] == "tensors":
            return Moment(keys[1], parameter).allocate(keys[4], name, dtype, tuple(shape))
        if is_dtensor(parameter) and tuple(parameter.shape) == shape:
            local = torch.empty_like(parameter.to_local().detach(), dtype=dtype)
            return _like_dtensor(parameter, local)
        # torch keeps step counters on the host unless the step itself runs on the device.
        on_host = not shape and not (group.get("capturable") or group.get("fused"))
        return torch.empty(shape, dtype=dtype, device="cpu" if on_host else parameter.device)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets state and options directly: torch's own loading would cast moments to the
        parameter's dtype.

        Raises StateMismatch when the optimizer that makes the steps does not have then what was
        loaded.
        """
        names = self._parameter_names()
        several = len(self._parts()) > 1
        for number, (part, first) in enumerate(self._numbered()):
            other = state_dict.get("other", {})
            mine = other.get(number, {}) if several else other
            state = self._state_of(part, state_dict, names) | mine
            for at, group in enumerate(part.groups, first):
                _update_group(at, group, state_dict["groups"][at])
            _fill(part, state)
        self._check_loaded(state_dict)

    def load_part(self, part: Mapping[str, Any]) -> None:
        """Takes the state of some parameters, and the options of some groups; the others stay as
        they are."""
        live = self.state_dict()
        groups = {n: part["groups"].get(n) or options for n, options in live["groups"].items()}
        self.load_state_dict({**live, "state": {}, **part, "groups": groups})

    def _state_of(
        self, part: _Part, state_dict: Mapping[str, Any], names: dict[int, str]
    ) -> dict[Any, Any]:
        """The state that one optimizer is to have, by parameter."""
        saved = state_dict.get("state", {})  # absent where no parameter here has state
        state: dict[Any, Any] = {}
        held = part.held
        for group in part.groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                if id(parameter) in held and name in saved:
                    moment = Moment(name, parameter)
                    state[parameter] = {
                        key: _whole_moment(parameter, value, moment.made(value))
                        for key, value in saved[name].items()
                    }
        for parameter, values in part.optimizer.state.items():
            name = names.get(id(parameter), "")
            if isinstance(parameter, torch.Tensor) and name not in state_dict["group_of"]:
                # Not in the checkpoint at all (not strict): stays as it is.
                state[parameter] = values
        return state

    def _check_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Raises StateMismatch unless the state is where the optimizer that makes the steps has
        it."""
        names, now = self._parameter_names(), OptimizerState.state_dict(self)
        pairs = {
            f"groups/{n}": (state_dict["groups"][n], group) for n, group in now["groups"].items()
        }
        held = {names[key] for part in self._parts() for key in part.held if key in names}
        for name, values in state_dict.get("state", {}).items():
            if name in held:
                pairs[f"state/{name}"] = values, now["state"].get(name, {})
        lost = [
            f"{where}/{key}"
            for where, (saved, found) in pairs.items()
            for key, value in saved.items()
            if not _came_back(value, found.get(key))
        ]
        if lost:
            kinds = ", ".join(sorted({type(one).__qualname__ for one in self._optimizers}))
            raise StateMismatch(
                f"{kinds} did not take what was loaded: {_few(lost)} of the checkpoint is not in "
                "its state now; live state was changed; give the optimizer that it wraps",
                missing=lost,
            )


def _update_group(number: int, group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    lacking = group.keys() - saved.keys() - set(_NOT_OPTIONS)
    extra = saved.keys() - group.keys()
    if lacking or extra:
        warnings.warn(
            f"optimizer group {number}: options not in the checkpoint keep their live values: "
            f"{sorted(lacking)}; options that only the checkpoint has: {sorted(extra)}",
            CheckpointWarning,
            stacklevel=3,
        )
    group.update(saved)


def _fill(part: _Part, state: dict[Any, Any]) -> None:
    """Puts the state where it lies: wrappers share the dict with the optimizer that they wrap."""
    optimizer = part.optimizer
    if part.groups is not optimizer.param_groups:
        for group, whole in zip(optimizer.param_groups, part.groups, strict=True):
            group.update({key: value for key, value in whole.items() if key not in _NOT_OPTIONS})

    def put() -> None:
        live = optimizer.state
        live.clear()
        live.update(state)

    put()
    if _has_own("load_state_dict", optimizer):
        # What else it makes of its state is its own affair; then the very bits again.
        optimizer.load_state_dict(_Part(optimizer, optimizer.param_groups).packed())
        put()
    if "state" in vars(optimizer):  # else it hands on what another has, and must not keep a copy
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _came_back(value: Any, now: Any) -> bool:
    if isinstance(now, torch.Tensor) and not isinstance(value, torch.Tensor):
        return True  # counters of older torch, which __setstate__ makes tensors
    if value is now:
        return True
    if isinstance(value, torch.Tensor):
        same_kind = isinstance(now, torch.Tensor) and now.dtype == value.dtype
        return same_kind and now.shape == value.shape
    return type(value) is type(now) or value == now


def _check_kind(part: _Part, first: int, saved: Mapping[str, Any]) -> None:
    """Raises StateMismatch when the saved state is that of an optimizer of another kind."""
    groups = {number: saved["groups"][number] for number in range(first, first + len(part.groups))}
    mine = [name for name in saved["state"] if saved["group_of"].get(name) in groups]
    moments = [saved["state"][name] for name in mine if saved["state"][name]]
    if not moments:
        return
    cls = type(part.optimizer)
    of_torch = (each for each in cls.__mro__ if each.__module__.startswith("torch.optim."))
    torch_kind = next(of_torch, Optimizer)
    own_step = cls is not torch_kind and "step" in vars(cls)
    known = not own_step and torch_kind.__name__ in _NEEDED
    needed = _NEEDED[torch_kind.__name__] if known else set()
    keys = {key for values in moments for key in values if isinstance(key, str)}
    lacking = {key for values in moments for key in needed - values.keys()}
    foreign = set().union(*_NEEDED.values()) - needed if known else set()
    for number, group in enumerate(part.groups, first):
        options = groups[number].keys() - group.keys()
        wanted = part.optimizer.defaults.keys() & group.keys()
        wanted = wanted - groups[number].keys() - _ADDED_LATER
        if lacking or (options and wanted) or foreign & keys:
            kind = cls.__qualname__
            raise StateMismatch(
                f"the saved state is that of another kind of optimizer than {kind}: it has "
                f"{sorted(keys)} of each parameter and options that {kind} lacks: "
                f"{sorted(options)}; what {kind} needs and the checkpoint lacks: "
                f"{sorted(wanted | lacking)}; resume with the optimizer that was saved, or load "
                "the model alone"
            )


def _whole_moment(parameter: Any, stored: Any, made: Any) -> Any:
    """A moment that was put together here, laid out like its parameter."""
    return made if made is stored or not is_dtensor(parameter) else _like_dtensor(parameter, made)


def _like_dtensor(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    mesh, placements = parameter.device_mesh, parameter.placements
    return dtensor_of(local, mesh, placements, parameter.shape, parameter.stride())


class _Inside(OptimizerState):
    """Of an optimizer that was given itself."""

    _hint = "; name the optimizers that make the steps: OptimizerState([...], models)"


class OwnOptimizerState:
    """An optimizer whose class has a state_dict() of its own, or that holds others.

    By parameter name, like any other, where that is all of its state; else what its own
    state_dict() gives, as of any object, which its own load_state_dict() takes.
    """

    def __init__(self, optimizer: Optimizer, models: Any) -> None:
        self._optimizer, self._models = optimizer, models
        self._named: OptimizerState | None = None

    def state_dict(self) -> Any:
        """Raises InvalidState for a class whose state cannot be stored whole, or not put back."""
        self._named = None
        try:
            named = _Inside(self._optimizer, self._models)
            state = named.state_dict()
        except InvalidState as error:
            if _has_own("state_dict", self._optimizer) and not split_over_ranks(self._optimizer):
                return self._own(error)
            raise
        self._named = named
        return state

    def _own(self, error: InvalidState) -> Any:
        """What the class itself stores. error: why it is not stored by name."""
        kind = type(self._optimizer).__qualname__
        if not _has_own("load_state_dict", self._optimizer):
            error.message += f"; or give {kind} a load_state_dict(), too, which puts that back"
            raise error
        own = self._optimizer.state_dict()
        if own or not _on_ranks():  # else another rank has it all
            forgotten = _forgotten(self._optimizer, list(_tensors(own)))
            if forgotten is not None:
                raise InvalidState(
                    f"{kind} and the optimizers inside it hold state that its state_dict() does "
                    f"not: {forgotten}{_Inside._hint}"
                )
        return own

    def __getattr__(self, name: str) -> Any:
        # A state by name is compared by name; the class's own, its load_state_dict() judges.
        named = vars(self).get("_named")
        if name == "allocate" and named is not None:
            return named.allocate
        if name == "differences" and named is not None:
            return self._differences
        raise AttributeError(name)

    def _differences(self, saved: Any) -> Differences:
        assert self._named is not None
        if is_by_name(saved) or not _has_own("load_state_dict", self._optimizer):
            return self._named.differences(saved)
        # There was more than names can say when it was saved, as there is not in a fresh optimizer.
        return Differences([], [], 1, {})

    def load_state_dict(self, state_dict: Any) -> None:
        """Raises StateMismatch when the class's own state_dict() does not have then what was
        loaded."""
        if is_by_name(state_dict):
            OptimizerState(self._optimizer, self._models).load_state_dict(state_dict)
            return
        names = set(_paths(state_dict))
        self._optimizer.load_state_dict(state_dict)
        lost = sorted(names - set(_paths(self._optimizer.state_dict())))
        if lost:
            kind = type(self._optimizer).__qualname__
            raise StateMismatch(
                f"{kind}.load_state_dict() did not take what was loaded: its state_dict() lacks "
                f"{_few(lost)} now; live state was changed",
                missing=lost,
            )


def is_by_name(state: Any) -> bool:
    return isinstance(state, Mapping) and state.keys() >= {"group_of", "shapes", "groups"}


def _forgotten(optimizer: Optimizer, stored: list[torch.Tensor]) -> str | None:
    """State of an optimizer, or of one inside it, that is not among what a state_dict() gives, nor
    a copy of it."""
    known = {id(t) for t in stored} | {same_view_key(t) for t in stored if not is_dtensor(t)}
    known.discard(None)
    by_form: dict[Any, list[torch.Tensor]] = {}
    for tensor in stored:
        by_form.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
    within = [part.optimizer for one in inside(optimizer) for part in _nested(one)]
    for item in (optimizer, *within):
        states = [v for v in getattr(item, "state", {}).values() if isinstance(v, Mapping)]
        tensors = [kv for each in states for kv in each.items() if isinstance(kv[1], torch.Tensor)]
        if item is optimizer and len(tensors) <= len(stored):
            continue  # in which form it stores what is its own, is its own affair
        for key, tensor in tensors:
            if id(tensor) in known or (not is_dtensor(tensor) and same_view_key(tensor) in known):
                continue
            alike = by_form.get((tensor.shape, tensor.dtype), ())
            if not any(_equal(tensor, other) for other in alike):
                return f"{key!r} of the {type(item).__qualname__}"
    return None


def _equal(a: Any, b: Any) -> bool:
    one, other = (t.to_local() if is_dtensor(t) else t for t in (a, b))
    return one.shape == other.shape and torch.equal(words(one), words(other.to(one.device)))


def _paths(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _paths(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, Mapping | list | tuple):
        return  # what is empty or a list may have another length
    else:
        yield path


def _on_ranks() -> bool:
    running = distributed.is_available() and distributed.is_initialized()
    return running and distributed.get_world_size() > 1


def _shape_of(parameter: torch.Tensor) -> list[int] | None:
    """None of a parameter that has none before its module's first step."""
    return None if torch.nn.parameter.is_lazy(parameter) else list(parameter.shape)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
