"""What users declare: components of a training state, who shares each of them, and what the engine
asks each for its state."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch
from torch import nn

from ..arguments import (
    Names,
    check_flag,
    check_flags,
    check_mapping,
    check_name,
    check_number,
    shown,
)
from ..errors import InvalidState, RanksDisagree
from ..format.values import MAX_DEPTH, PLAIN_TYPES, encode, only_plain
from .layout import Shard, is_dtensor_class
from .modules import ModelState, one_walk, parameter_table, tensors_in
from .optimizers import OptimizerState, OwnOptimizerState, inside, is_ordinary, split_over_ranks
from .plain import PlainState, Value, changeable
from .words import Declared


class _Words(StrEnum):
    """Words that may be written in any case."""

    @classmethod
    def of(cls, value: Any) -> Self:
        """The word that a text is; what is no text is not compared with any."""
        return cls(value) if isinstance(value, str) else cls._missing_(value)

    @classmethod
    def _missing_(cls, value: object) -> Any:
        found = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        if found is None:
            words = ", ".join(repr(member.value) for member in cls)
            raise InvalidState(f"{cls.__name__} must be one of {words}, not {shown(value)}")
        return found


class SharingPattern(_Words):
    """Who holds which part of a component's state. Raises InvalidState for another word."""

    GLOBAL = "GLOBAL"  # rank 0's state is the truth
    REPLICATED = "REPLICATED"  # all ranks hold identical state
    PER_RANK = "PER_RANK"  # every rank has its own
    PER_GROUP = "PER_GROUP"  # identical within each group of a partition
    PER_NODE = "PER_NODE"  # one state per node: that of its lowest rank
    SHARDED = "SHARDED"  # one logical state; each rank holds some keys and slices


class ValidationLevel(_Words):
    """How closely replicas are compared before a save. Raises InvalidState for another word."""

    NONE = "NONE"
    QUICK = "QUICK"
    TENSOR = "TENSOR"
    FULL = "FULL"


@runtime_checkable
class Stateful(Protocol):
    """Anything with torch's state protocol: modules, optimizers, schedulers, loaders, scalers, your
    own."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


RESIZES = ("error", "keep")
OnResize = Literal["error", "keep"] | Callable[[int, int, int], int]


@dataclass(slots=True)
class StateComponent:
    """One named part of the state.

    key: text, its name in the checkpoint and in the names of its files.
    stateful: object with `state_dict()` and `load_state_dict()`, a module, an optimizer, or plain
        values and tensors.
    sharing_pattern: SharingPattern, who shares it (default GLOBAL; in a dict, what the dict's other
        values get).
    process_group_name: text, for PER_GROUP the group across which the state is the same (default
        None).
    required: bool, a load must find it in the checkpoint (default True).
    validate_replication: bool, compare replicas at a save (default None: for REPLICATED, PER_GROUP
        and SHARDED).
    validation_level: ValidationLevel, how closely replicas are compared (default QUICK).
    on_resize: what happens to state of a rank, node or group when their number changed: "error"
        (default), "keep" (live state stays, with a warning), or a function (new rank, new size, old
        size) -> old rank.
    group_key: text, this rank's name for its group, which finds it again when groups are numbered
        otherwise (default None).
    atol: float >= 0, absolute difference that FULL validation lets pass (default 0).
    rtol: float >= 0, relative difference that FULL validation lets pass (default 0).
    metadata: dict of anything that JSON holds, for the manifest (default empty).
    ignore: sequence of text, names or patterns of parts that are not compared, such as
        "*.running_mean" and "*.num_batches_tracked" of BatchNorm under DDP; the lowest rank of the
        replicas then stores all of the component, those parts too (default none).
    inferred: bool, set by the engine for what was given without a StateComponent (default False).

    Raises InvalidState for a key that cannot name files, a group that is missing or not used, and a
    value of another type.
    """

    key: str
    stateful: Any
    sharing_pattern: SharingPattern = None  # type: ignore[assignment]
    process_group_name: str | None = None
    required: bool = True
    validate_replication: bool | None = None
    validation_level: ValidationLevel = ValidationLevel.QUICK
    on_resize: OnResize = "error"
    group_key: str | None = None
    atol: float = 0.0
    rtol: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)
    ignore: Sequence[str] = field(default=(), kw_only=True)
    # Nobody said the pattern. Not for users to say; it is an argument so that it survives
    # dataclasses.replace.
    inferred: bool = field(default=False, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_key(self.key)
        try:
            self._check()
        except InvalidState as error:
            error.component = self.key
            error.message = f"component {self.key!r}: {error.message}"
            raise
        self._check_group()

    def _check(self) -> None:
        if self.sharing_pattern is None:
            self.sharing_pattern, self.inferred = SharingPattern.GLOBAL, True
        self.sharing_pattern = SharingPattern.of(self.sharing_pattern)
        self.validation_level = ValidationLevel.of(self.validation_level)
        if isinstance(self.stateful, type):
            raise InvalidState(
                f"its state is the class {self.stateful.__qualname__}; give an object of it"
            )
        if isinstance(self.stateful, StateComponent | Declared):
            what = type(self.stateful).__qualname__
            raise InvalidState(f"its state is a {what}; give its object")
        check_flags(inferred=self.inferred, required=self.required)
        if self.validate_replication is not None:
            check_flag("validate_replication", self.validate_replication)
        if not callable(self.on_resize) and not (
            isinstance(self.on_resize, str) and self.on_resize in RESIZES
        ):
            what = (
                "on_resize must be 'error', 'keep', or a function (new rank, new size, old size) "
                "-> old rank"
            )
            raise InvalidState(f"{what}, not {shown(self.on_resize)}")
        for name in ("atol", "rtol"):
            if type(value := getattr(self, name)) is not float or not 0 <= value < math.inf:
                setattr(self, name, check_number(name, value))
        if type(self.ignore) is not tuple or self.ignore:
            self.ignore = self._checked_ignore()
        if not isinstance(self.metadata, dict):
            check_mapping("metadata", self.metadata)
            self.metadata = dict(self.metadata or {})

    def _checked_ignore(self) -> tuple[str, ...]:
        found = self.ignore
        if not isinstance(found, list | tuple) or not all(isinstance(n, str) and n for n in found):
            raise InvalidState(
                "ignore must be a list of names or patterns of parts, such as ['*.running_mean'], "
                f"not {shown(found)}"
            )
        if found and self.sharded:
            raise InvalidState(
                "ignore is for state that every rank holds whole, and it is SHARDED: put parts "
                "that differ between ranks into a component of their own"
            )
        return tuple(found)

    def _check_group(self) -> None:
        grouped = self.sharing_pattern is SharingPattern.PER_GROUP
        if grouped != (self.process_group_name is not None):
            need = (
                "needs" if grouped else f"is {self.sharing_pattern.value}, and only PER_GROUP has"
            )
            raise InvalidState(
                f"component {self.key!r} {need} a process_group_name", component=self.key
            )
        for text in (self.process_group_name, self.group_key):
            if text is not None and not (
                isinstance(text, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text)
            ):
                raise InvalidState(
                    f"component {self.key!r}: {shown(text)} must be 1 to 64 letters, digits, '_', "
                    "'-' or '.'",
                    component=self.key,
                )

    @property
    def sharded(self) -> bool:
        """Whether slices of tensors are expected in its state."""
        return self.sharing_pattern is SharingPattern.SHARDED

    def ignores(self, name: str) -> bool:
        """Whether the part of its state with this name need not be equal in replicas."""
        return any(fnmatchcase(name, n) or fnmatchcase(name, f"{n}/*") for n in self.ignore)

    @property
    def validated(self) -> ValidationLevel:
        """The level at which its replicas are compared."""
        default = self.sharing_pattern.value in ("REPLICATED", "PER_GROUP", "SHARDED")
        wanted = default if self.validate_replication is None else self.validate_replication
        return self.validation_level if wanted else ValidationLevel.NONE


def _check_key(key: Any) -> None:
    if not isinstance(key, str) or not key or len(key.encode("utf-8", "replace")) > 80:
        raise InvalidState(
            f"component key {shown(key)} must be a text of 1 to 80 bytes", component=shown(key)
        )
    if "/" in key or not key.isprintable():
        raise InvalidState(
            f"component key {key!r} must be printable and without '/'", component=key
        )


@runtime_checkable
class StatefulProvider(Protocol):
    """An object that knows its own components; every trainer is one.

    Where it has `get_process_groups() -> Mapping[str, group]`, too, those groups are used.
    """

    def get_state_components(self) -> Sequence[StateComponent]: ...


def process_groups_of(state: Any, given: Any = None) -> dict[str, Any]:
    """Process groups by name: those given, else what a StatefulProvider says; none for None. What
    they are is for the ranks to find out together. Raises InvalidState."""
    if given is None and isinstance(state, StatefulProvider):
        given = getattr(state, "get_process_groups", dict)()
    if given is None:
        return {}
    found = check_mapping("process_groups", given)
    for name in found:
        check_name("process_groups: a name", name)
    return found


def check_equal(calls: str, reports: Sequence[Any], step: int | None = None) -> None:
    """Raises RanksDisagree unless all ranks make the same one of `calls` (loads, saves of `step`):
    by the words of their reports, and by what they `asked`."""
    words = reports[0].words
    if wrong := [rank for rank, report in enumerate(reports) if report.words != words]:
        differs = f"rank 0 calls for a {words}, rank {wrong[0]} for a {reports[wrong[0]].words}"
        raise RanksDisagree(differs, ranks=wrong)
    first = reports[0].asked
    wrong = [rank for rank, report in enumerate(reports) if report.asked != first]
    if not wrong:
        return
    other = reports[wrong[0]].asked
    # What only one has is a component, and named as such.
    differing = [key for key in first if key in other and first[key] != other[key]]
    differences = "; ".join(
        _differing_components(first[key], other[key], wrong[0])
        if key == "components"
        else f"{key} is {first[key]!r} on rank 0 and {other[key]!r} on rank {wrong[0]}"
        for key in differing[:3]
    )
    raise RanksDisagree(
        f"the ranks make different {calls}: {differences}; ranks that differ from rank 0: {wrong}",
        ranks=wrong,
        step=step,
    )


def _differing_components(first: Sequence[str], other: Sequence[str], rank: int) -> str:
    """How the components of `rank` differ from those of rank 0, in words."""
    found = [f"{k!r} is on rank 0 and not on rank {rank}" for k in first if k not in other]
    found += [f"{k!r} is on rank {rank} and not on rank 0" for k in other if k not in first]
    if not found:
        both = f"{list(first)} on rank 0 and {list(other)} on rank {rank}"
        return f"components are {both}: the order counts"
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"components differ: {', '.join(f'component {each}' for each in found[:3])}{more}"


def refuse_fixed_values(components: Iterable[StateComponent]) -> None:
    """Raise InvalidState for a component whose value a restore could not put back: a number, a
    text, None, a tuple. Raise UnsupportedValue for one that cannot be stored at all."""
    for component in components:
        held = component.stateful
        if isinstance(held, PlainState) and not changeable(held.value):
            key, text = component.key, shown(held.value)
            if not isinstance(held.value, tuple):
                encode(held.value, component=key)  # refuses what no dict can hold either
            raise InvalidState(
                f"component {key!r} is {text}, a value of type {type(held.value).__qualname__}, "
                "which a restore cannot change in place: put it into a dict, as in {'progress': "
                f"{{{key!r}: {text}}}}}, or into a ckptcore.Value(...), and use it from there",
                component=key,
            )


def owner_of(stateful: Any) -> Any:
    """Whose state it is, where `stateful` stands for a part of it."""
    own = type(stateful).__module__.startswith("ckptcore.")
    return getattr(stateful, "whole", stateful) if own else stateful


def is_optimizer(owner: Any) -> bool:
    """Whether it takes an optimizer's state by name, and allocates what is not there yet."""
    return isinstance(owner, OptimizerState | OwnOptimizerState) and hasattr(owner, "allocate")


def metadata_of(stateful: Any) -> dict[str, Any] | None:
    """What torch keeps beside the state of a module that was just asked for it."""
    owner = owner_of(stateful)
    return owner.metadata if isinstance(owner, ModelState) else None


def as_components(state: Any, world_size: int = 1) -> list[StateComponent]:
    """The components that `state` declares, each a copy with a Stateful that the engine can ask.

    `state` is a StatefulProvider, a list of StateComponent, or a dict of modules, optimizers,
    Stateful objects and plain values. Raises InvalidState.
    """
    if isinstance(state, StatefulProvider) and not isinstance(state, type):
        state = state.get_state_components()
    if isinstance(state, Mapping):
        found = [_in_dict(key, value, world_size) for key, value in state.items()]
    elif isinstance(state, Sequence) and not isinstance(state, str | bytes | bytearray):
        for number, item in enumerate(state):
            if not isinstance(item, StateComponent):
                raise InvalidState(
                    f"a list as state has StateComponents only, and item {number} of {len(state)} "
                    f"is {shown(item)}, a {type(item).__qualname__}; write StateComponent(key, "
                    "...), or pass a dict"
                )
        found = [replace(component) for component in state]
    else:
        raise InvalidState(
            "a state is a dict, a list of StateComponent, or an object with "
            f"get_state_components(), not {shown(state)}, a {type(state).__qualname__}"
        )
    if not found:
        raise InvalidState("the state has no components: nothing to save or load")
    keys = [component.key for component in found]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise InvalidState(f"two components have the key {twice[0]!r}", component=twice[0])
    held = {c.key: c.stateful for c in found}
    modules = {k: v for k, v in held.items() if _is_model(v) or isinstance(v, ModelState)}
    plain = {k: v for k, v in held.items() if isinstance(v, torch.Tensor | Mapping)}
    for component in found:
        with _named(component):
            _adapt(component, world_size)
    if optimizers := [c for c in found if _are_optimizers(c.stateful)]:
        with one_walk():
            for component in optimizers:
                with _named(component):
                    component.stateful = _optimizer_state(component.stateful, modules, plain)
    return found


Only = str | Collection[str] | Callable[[str], bool]


def chosen_of(components: Sequence[StateComponent], only: Only) -> list[StateComponent]:
    """The components that `only` asks for, by name or pattern. Raises InvalidState for a name that
    none has."""
    names = Names("only", only, "the name of a component")
    chosen = [component for component in components if names.answer(component.key)]
    if names.unused or not chosen:
        unknown = next((p for p in names.patterns if p in names.unused), None)
        which = "what" if unknown is None else f"{unknown!r}, which"
        has = ", ".join(component.key for component in components)
        raise InvalidState(f"only asks for {which} the state has not; it has {has}")
    return chosen


@contextmanager
def _named(component: StateComponent) -> Iterator[None]:
    """What is refused in it says of which component it is."""
    try:
        yield
    except InvalidState as error:
        if error.component is None:
            error.component = component.key
            error.message = f"component {component.key!r}: {error.message}"
        raise


def _in_dict(key: Any, value: Any, world_size: int) -> StateComponent:
    """The component that a value of a dict is, with all that was not said taken from the value."""
    if isinstance(value, Declared):
        component = StateComponent(key, value.stateful, **value.declared)
    elif not isinstance(value, StateComponent):
        component = StateComponent(key, value)
    elif value.key == key:
        component = replace(value)
    else:
        raise InvalidState(
            f"the dict calls a component {shown(key)}, and the StateComponent says "
            f"{value.key!r}: give it one name",
            component=value.key,
        )
    if component.inferred:
        component.sharing_pattern = _pattern(component.stateful, world_size)
        component._check_group()
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
        yield from tensors_in(value)
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
        # What contains itself, or is nested too deeply, is refused by whoever takes it apart.
        elif not kinds <= PLAIN_TYPES and id(value) not in above and len(above) <= MAX_DEPTH:
            within = above | {id(value)}
            for item in items:
                if type(item) not in (list, tuple) or not only_plain(item):
                    yield from _tensors_of(item, within)
    elif isinstance(value, Value):
        yield from _tensors_of(value.value, above)
    elif isinstance(value, torch.Tensor | Shard):
        yield value


def _is_model(value: Any) -> bool:
    """A module, or a list of them: the stages of a pipeline."""
    several = value if isinstance(value, list | tuple) else [value]
    return bool(several) and all(isinstance(item, nn.Module) for item in several)


def _is_split(value: Any) -> bool:
    """Whether it is an optimizer that deals its state out over the ranks."""
    return split_over_ranks(value.optimizer if isinstance(value, OptimizerState) else value)


def _are_optimizers(value: Any) -> bool:
    """An optimizer, or a list of them."""
    several = value if isinstance(value, list | tuple) else [value]
    return bool(several) and all(isinstance(item, torch.optim.Optimizer) for item in several)


def _adapt(component: StateComponent, world_size: int) -> None:
    """Have the engine ask for the state what knows how to give it; of optimizers, see below."""
    stateful = component.stateful
    pattern = component.sharing_pattern.value
    whole = pattern in ("GLOBAL", "REPLICATED", "PER_NODE")
    if whole and world_size > 1 and _is_split(stateful):
        raise InvalidState(
            f"each rank has only a part of the optimizer's state, and {pattern} would store that "
            "of one; declare it SHARDED"
        )
    # What says its pattern itself says this, too.
    on_resize = getattr(stateful, "on_resize", None)
    if on_resize and component.on_resize == "error" and _own_pattern(stateful) is not None:
        component.on_resize = on_resize
    if _is_model(stateful):
        component.stateful = ModelState(stateful)
    elif not _are_optimizers(stateful) and not isinstance(stateful, Stateful):
        component.stateful = PlainState(stateful)


def _optimizer_state(optimizer: Any, modules: dict[str, Any], plain: dict[str, Any]) -> Any:
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    trained = {id(p) for p in _tensors_of(optimizer)}
    tables = {key: parameter_table(held).names for key, held in modules.items()}
    holders = {k: held for k, held in modules.items() if not trained.isdisjoint(tables[k])}
    trained = trained.difference(*(tables[key] for key in holders))
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
