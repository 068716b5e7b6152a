"""What a save of a state would refuse, all of it at once, before the first save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from ..errors import CheckpointError, InvalidState
from ..format.values import MAX_DEPTH, keyed
from .component import (
    StateComponent,
    StatefulProvider,
    as_components,
    metadata_of,
    refuse_fixed_values,
)
from .layout import memory_span, same_view_key
from .modules import one_walk
from .tree import StateSnapshot, TensorLeaf, capture


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that a save would refuse.

    component: text, key of the component; None where it is the state as a whole.
    key: text, name of the part in it, as in the checkpoint; None for all of it.
    type_name: text, module and class of the value, where that is what is refused; else None.
    message: text, what is wrong and what to do.
    """

    component: str | None
    key: str | None
    type_name: str | None
    message: str

    @classmethod
    def of(cls, error: CheckpointError, component: str | None) -> Refusal:
        of = component or getattr(error, "component", None)
        key, type_name = getattr(error, "key", None), getattr(error, "type_name", None)
        return cls(of, key, type_name, error.message)

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """What `preflight` found. As text it is one line a finding.

    refusals: list of Refusal, all that a save would refuse on this rank.
    notes: list of text, what a save takes and what may not be meant.
    tensors: int, how many tensors a save would hold.
    size_bytes: int, bytes of them on this rank, memory that several share counted once.
    """

    refusals: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tensors: int = 0
    size_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing would be refused."""
        return not self.refusals

    def __str__(self) -> str:
        first = f"{self.tensors} tensors, {self.size_bytes:,} bytes"
        verdict = "a save takes it" if self.ok else f"a save refuses {len(self.refusals)} parts"
        lines = [f"refused: {each}" for each in self.refusals] + [f"note: {n}" for n in self.notes]
        return "\n".join([f"{verdict}: {first}", *lines])


def preflight(state: Any, *, world_size: int | None = None) -> PreflightReport:
    """Find all that a save of `state` would refuse on this rank, and what to do: tensors
    of unknown classes, values of unknown types, slices in state that is not SHARDED, parameters
    without names, keys that cannot name files, values that a restore could not put back.

    It asks each component for its state_dict(), as a save does; on several ranks call it on all of
    them. No tensor's data are read, nothing is written, and no other rank is asked: whether
    replicas are equal, a save finds out.

    state: as `CheckpointManager.save` takes it.
    world_size: int, number of ranks that the state is for (default None: that of the running
        torch.distributed job, or 1).
    """
    if world_size is None:
        running = torch.distributed.is_available() and torch.distributed.is_initialized()
        world_size = torch.distributed.get_world_size() if running else 1
    report = PreflightReport()
    snapshots = []
    with one_walk():
        for component in _components(state, world_size, report.refusals):
            found = _snapshot(component, report.refusals)
            snapshots += [] if found is None else [found]
    leaves = [
        (f"{snapshot.key}/{leaf.spec.name}", leaf)
        for snapshot in snapshots
        for leaf in snapshot.tensors
    ]
    once = {same_view_key(leaf.tensor): leaf.spec.nbytes for _, leaf in leaves}
    report.notes.extend(_overlaps(leaves))
    return PreflightReport(report.refusals, report.notes, len(leaves), sum(once.values()))


def _components(state: Any, world_size: int, refusals: list[Refusal]) -> list[StateComponent]:
    """The components that are well declared; the others are refused, one after the other."""
    try:
        if isinstance(state, StatefulProvider) and not isinstance(state, type):
            state = state.get_state_components()
        if isinstance(state, Mapping):
            state = dict(state)
    except Exception as error:
        refusals.append(_failed("get_state_components()", None, error))
        return []
    while True:
        try:
            return as_components(state, world_size)
        except InvalidState as error:
            refusals.append(Refusal.of(error, None))
            state = _without(state, error.component)
        except Exception as error:  # code of the user's own
            refusals.append(_failed("what a component says of itself", None, error))
            return []
        if not state:
            return []


def _without(state: Any, key: Any) -> Any:
    """A state without the component of this key; None where that is not to be had."""
    if isinstance(state, dict):
        left: Any = {
            name: value for name, value in state.items() if name != key and str(name) != key
        }
    elif isinstance(state, Sequence):
        left = [each for each in state if getattr(each, "key", None) != key]
    else:
        return None
    return left if len(left) < len(state) else None


def _failed(call: str, component: str | None, error: Exception) -> Refusal:
    of = "" if component is None else f"component {component!r}: "
    message = f"{of}{call} fails ({type(error).__name__}: {error}); a save raises the same"
    return Refusal(component, None, None, message)


def _snapshot(component: StateComponent, refusals: list[Refusal]) -> StateSnapshot | None:
    """The component's state, taken apart, or else what is wrong with it."""
    try:
        refuse_fixed_values([component])
        state = component.stateful.state_dict()
    except CheckpointError as error:
        refusals.append(Refusal.of(error, component.key))
        return None
    except Exception as error:  # code of the user's own
        refusals.append(_failed("its state_dict()", component.key, error))
        return None
    try:
        metadata = metadata_of(component.stateful)
        return capture(component.key, state, sharded=component.sharded, metadata=metadata)
    except CheckpointError as error:
        refusals.extend(
            _parts(component, state, (), frozenset()) or [Refusal.of(error, component.key)]
        )
        return None


Path = tuple[Any, ...]


def _parts(
    component: StateComponent, value: Any, path: Path, above: frozenset[int]
) -> list[Refusal]:
    """What of a value is refused: its smallest parts that are."""
    error = _refused(component, value, path)
    if error is None:
        return []
    found: list[Refusal] = []
    if len(path) < MAX_DEPTH and id(value) not in above:
        for key, item in _culprits(component, _items(value), path):
            found += _parts(component, item, (*path, key), above | {id(value)})
    return found or [Refusal.of(error, component.key)]


def _items(value: Any) -> list[tuple[Any, Any]]:
    items = keyed(value)
    if items is not None:
        return [*items.items()]
    return [*enumerate(value)] if type(value) in (list, tuple) else []


def _culprits(
    component: StateComponent, items: list[tuple[Any, Any]], path: Path
) -> Iterator[tuple[Any, Any]]:
    """Those of many items that are refused, found by halves."""
    if not items or _refused(component, dict(items), path) is None:
        return
    if len(items) == 1:
        yield items[0]
        return
    half = len(items) // 2
    yield from _culprits(component, items[:half], path)
    yield from _culprits(component, items[half:], path)


def _refused(component: StateComponent, value: Any, path: Path) -> CheckpointError | None:
    """Why a part of a component's state is not taken, with the name that it has there."""
    for key in reversed(path):
        value = {key: value}
    try:
        capture(component.key, value, sharded=component.sharded)
    except CheckpointError as error:
        return error
    return None


def _overlaps(leaves: list[tuple[str, TensorLeaf]]) -> Iterator[str]:
    """Of tensors that share a part of their memory."""
    spans = sorted(
        (*span, name, same_view_key(leaf.tensor))
        for name, leaf in leaves
        if leaf.spec.layout != "box" and (span := memory_span(leaf.tensor)) is not None
    )
    for one, other in pairwise(spans):
        if one[0] == other[0] and other[1] < one[2] and one[4] != other[4]:
            yield (
                f"{one[3]!r} and {other[3]!r} share a part of their memory: the checkpoint has "
                "both in full, and a load into tensors of their own makes them independent"
            )
