"""Which stored copy of a component belongs to this rank, now that ranks, nodes and groups may be others."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import CheckpointWarning, StateMismatch
from ..format.manifest import CheckpointManifest
from ..ranks.groups import group_index
from ..state.component import StateComponent

__all__ = ["Place", "copy_for"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in the job that loads."""

    rank: int
    world_size: int
    nodes: list[list[int]]
    partitions: Mapping[str, list[list[int]]]


def copy_for(manifest: CheckpointManifest, component: StateComponent, place: Place) -> int | None:
    """The number of the copy to restore on this rank; None when the live state is to stay.

    What was saved decides: global and replicated state goes to every rank. State of a rank, node or group goes to the
    same one while their number (or the group's key) is the same, and by the component's `on_resize` otherwise.
    Raises StateMismatch with the sizes saved and now.
    """
    saved = manifest.components[component.key]
    count = len(manifest.copies(component.key))
    if saved.pattern in ("GLOBAL", "REPLICATED", "SHARDED"):
        return 0
    if saved.pattern == "PER_RANK":
        what, own, now = "rank", place.rank, place.world_size
    elif saved.pattern == "PER_NODE":
        what, own, now = "node", group_index(place.nodes, place.rank), len(place.nodes)
    else:
        what = "group"
        partition = place.partitions.get(component.process_group_name or "")
        if partition is None:
            if count == 1:
                return 0
            raise StateMismatch(
                f"component {component.key!r} was saved PER_GROUP over {saved.group!r} ({count} groups); declare it so, "
                "with process_group_name and process_groups, to say which of them this rank is in")  # fmt: skip
        own, now = group_index(partition, place.rank), len(partition)
        if saved.group_keys and component.group_key is not None:
            if component.group_key in saved.group_keys:
                return saved.group_keys.index(component.group_key)
            names = f" ({', '.join(saved.group_keys)}; this rank's is {component.group_key})"
            return _resized(component, place, what, own, now, count, names)
    if now == count:
        return own
    return _resized(component, place, what, own, now, count)


def _resized(
    component: StateComponent, place: Place, what: str, own: int, now: int, saved: int, names: str = ""
) -> int | None:
    policy = component.on_resize
    if policy == "keep":
        if place.rank == 0 or names:  # once, not once per rank
            warnings.warn(f"component {component.key!r} was saved for {saved} {what}s{names}, there are {now} now: the live state "
                      "stays (on_resize='keep')", CheckpointWarning, stacklevel=2)  # fmt: skip
        return None
    if policy == "error":
        raise StateMismatch(
            f"component {component.key!r} was saved for {saved} {what}s{names}, there are {now} now; set on_resize='keep' to go on "
            f"with the live state, or to a function (new {what}, new size, old size) -> old {what}")  # fmt: skip
    chosen = policy(own, now, saved)
    if type(chosen) is not int or not 0 <= chosen < saved:
        raise StateMismatch(f"component {component.key!r}: on_resize gave {chosen!r} for {what} {own} of {now}; "
                            f"it must be a whole number below {saved}")  # fmt: skip
    return chosen
