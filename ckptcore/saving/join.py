"""Joining a save: what every rank says about its call, and what they agree on before anything else
happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..arguments import check_flag, check_hash, check_mapping, checked_step, shown
from ..errors import InvalidState, RanksDisagree
from ..format.manifest import (
    CheckpointManifest,
    ComponentManifest,
    Copy,
    check_readable,
    copies,
    private_json,
)
from ..ranks.communicator import Communicator
from ..ranks.groups import group_index, own_view, partitions
from ..state.adapters import refuse_fixed_values
from ..state.component import StateComponent, differing_components

__all__ = ["JoinedSave", "SaveRequest", "join_save"]

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(slots=True)
class SaveRequest:
    """What the caller says about one checkpoint, beside the state. Valid, and private, once it is
    made.

    Raises InvalidState for what the manifest cannot hold.
    """

    step: int
    run_id: str
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    training_args_hash: str | None = None
    overwrite: bool = False
    found_damaged: bool = (
        False  # what is in its place was passed over by a restore, and gives way where rank 0 knows
    )
    after_sequence: int = 0  # another root of the run has commits up to this one
    checkpoint_id: str | None = None
    # [first, last] commit sequences that the run has abandoned; None: those that its last commit
    # says.
    abandoned: list[list[int]] | None = None

    def __post_init__(self) -> None:
        self.step = checked_step(self.step)
        self.metrics = _numbers(self.metrics)
        self.metadata = private_json("metadata", _dict("metadata", self.metadata))
        self.overwrite = check_flag("overwrite", self.overwrite)
        check_hash(self.training_args_hash)
        given = self.checkpoint_id
        if given is not None and not (isinstance(given, str) and _ID.fullmatch(given)):
            what = "checkpoint_id must be 1 to 64 letters, digits, '_', '-' or '.'"
            raise InvalidState(f"{what}, not {shown(given)}")


@dataclass(slots=True)
class JoinedSave:
    """What all ranks hold to be true for one save."""

    attempt: str
    run_id: str
    partitions: dict[str, list[list[int]]]
    group_keys: dict[str, list[str]]
    copies: dict[str, list[Copy]]
    sequence: int = 0  # known to the committing rank before anything is written


def join_save(
    comm: Communicator,
    name: str,
    request: SaveRequest,
    components: Sequence[StateComponent],
    groups: Mapping[str, Any],
    begin: Callable[[], str],
    mode: str = "shared",
) -> JoinedSave:
    """Agree on the call, the groups and the attempt; `begin` gives the latter on rank 0. mode:
    whether nodes share their storage.

    Raises RanksDisagree, InvalidState (groups that are no partition) and what `begin` raises, on
    every rank.
    """
    used = {c.process_group_name for c in components if c.process_group_name is not None}

    def local() -> dict[str, Any]:
        if unknown := sorted(used - groups.keys()):
            raise InvalidState(
                f"process group {unknown[0]!r} is not among process_groups (which has "
                f"{sorted(groups) or 'none'})"
            )
        refuse_fixed_values(components)
        # Before anything is withdrawn or written: what no reader would take in the end.
        _check_manifest(request, components)
        views = {
            name: own_view(name, group, comm.rank, comm.world_size)
            for name, group in groups.items()
        }
        return {
            "call": {**_call(name, request, components), "storage_mode": mode},
            "groups": views,
            "group_keys": {
                c.key: c.group_key for c in components if c.process_group_name is not None
            },
        }

    def decide(calls: list[dict[str, Any]]) -> dict[str, Any]:
        _check_equal(request, [call["call"] for call in calls])
        request.overwrite |= (
            request.found_damaged
        )  # a rank that was interrupted in the restore does not know
        found = partitions([call["groups"] for call in calls])
        keys = {
            c.key: _group_keys(c, found, [call["group_keys"][c.key] for call in calls])
            for c in components
            if c.process_group_name is not None
        }
        return {
            "attempt": begin(),
            "run_id": request.run_id,
            "partitions": found,
            "overwrite": request.overwrite,
            "group_keys": {key: names for key, names in keys.items() if names is not None},
        }

    agreed = comm.together("save", local, decide, joining=True)
    request.overwrite = agreed.pop("overwrite")
    made = {}
    for c in components:
        partition = agreed["partitions"].get(c.process_group_name)
        made[c.key] = copies(
            c.sharing_pattern.value,
            comm.world_size,
            comm.nodes,
            c.process_group_name,
            partition,
            agreed["group_keys"].get(c.key),
        )
    return JoinedSave(**agreed, copies=made)


def _call(name: str, request: SaveRequest, components: Sequence[StateComponent]) -> dict[str, Any]:
    # The rest of the request is rank 0's to say: a new run has no name yet, and metrics may well be
    # known there alone.
    asked: dict[str, Any] = {"step": request.step, "overwrite": request.overwrite}
    for c in components:
        asked[f"component {c.key!r}"] = [
            c.sharing_pattern.value,
            c.process_group_name,
            c.validated.value,
            c.atol,
            c.rtol,
        ]
    return {"name": name, "components": [c.key for c in components], **asked}


def _check_equal(request: SaveRequest, calls: list[dict[str, Any]]) -> None:
    first = calls[0]
    wrong = [rank for rank, call in enumerate(calls) if call != first]
    if wrong:
        rank = wrong[0]
        both = (
            first.keys() & calls[rank].keys()
        )  # what only one has is a component, and named as such
        what = [key for key in first if key in both and first[key] != calls[rank][key]]
        said = "; ".join(
            f"{key} is {first.get(key)!r} on rank 0 and {calls[rank].get(key)!r} on rank {rank}"
            if key != "components"
            else differing_components(first[key], calls[rank][key], rank)
            for key in what[:3]
        )
        raise RanksDisagree(
            f"the ranks make different saves: {said}; ranks that differ from rank 0: {wrong}",
            ranks=wrong,
            step=request.step,
        )


def _group_keys(
    component: StateComponent, found: dict[str, list[list[int]]], keys: list[str | None]
) -> list[str] | None:
    """The names of a component's groups, when the user gave them: equal in a group, distinct
    between groups."""
    if all(key is None for key in keys):
        return None
    partition = found[component.process_group_name or ""]
    names = [keys[group[0]] for group in partition]
    wrong = [
        rank
        for rank, key in enumerate(keys)
        if key is None or key != names[group_index(partition, rank)]
    ]
    given = [name for name in names if name is not None]
    if wrong or len(set(given)) != len(partition):
        raise InvalidState(
            f"component {component.key!r}: group_key must be given on every rank, be the same "
            "within a group and differ "
            f"between groups; the groups {partition} have {names}",
            component=component.key,
            ranks=wrong or None,
        )
    return given


def _check_manifest(request: SaveRequest, components: Sequence[StateComponent]) -> None:
    """Raises InvalidState unless readers can decode a manifest with all that the caller said in
    it."""
    parts = {}
    for c in components:
        parts[c.key] = ComponentManifest(
            c.key,
            c.sharing_pattern.value,
            group=c.process_group_name,
            partition=None if c.process_group_name is None else [[0]],
            required=c.required,
            metadata=private_json(f"the metadata of component {c.key!r}", c.metadata),
        )
    manifest = CheckpointManifest(
        checkpoint_id=request.checkpoint_id or "",
        step=request.step,
        run_id=request.run_id,
        attempt_id="",
        sequence=request.after_sequence,
        created="",
        components=parts,
        metrics=request.metrics,
        training_args_hash=request.training_args_hash,
        metadata=request.metadata,
    )
    check_readable(manifest.encode(), "a manifest with what this save was given")


def _dict(name: str, value: Any) -> dict[Any, Any]:
    """A copy of a dict, {} for None. Names that are no text are for JSON to judge."""
    if value is not None and not isinstance(value, Mapping):
        raise InvalidState(f"{name} must be a dict, not {shown(value)}")
    return dict(value or {})


def _numbers(metrics: Any) -> dict[str, float]:
    """Metrics as floats; 0-d tensors, numpy numbers and True (1.0) are fine, and so is what is not
    finite."""
    numbers = {}
    for name, value in check_mapping("metrics", metrics).items():
        kind = getattr(
            getattr(value, "dtype", None), "kind", "f"
        )  # numpy's; text and times convert to floats, too
        try:
            if isinstance(value, str | bytes | bytearray) or kind in "SUMm":
                raise TypeError(f"it is {shown(value)}")
            numbers[name] = float(value.detach() if hasattr(value, "detach") else value)
        except Exception as error:  # a type of the user's own may raise anything
            raise InvalidState(f"metric {name!r} is not a number: {error}", key=name) from None
    return numbers
