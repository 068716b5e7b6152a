"""Which stored copy of a component belongs to this rank, now that ranks, nodes and groups may be
others."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import CheckpointWarning, StateMismatch
from ..format.checks import short
from ..format.manifest import CheckpointManifest, ComponentManifest
from ..ranks.groups import group_index
from ..state.component import StateComponent

__all__ = ["Place", "copy_for"]

# One state for all ranks.
_COMMON = ("GLOBAL", "REPLICATED", "SHARDED")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in the job that loads."""

    rank: int
    world_size: int
    nodes: list[list[int]]
    partitions: Mapping[str, list[list[int]]]


def copy_for(manifest: CheckpointManifest, component: StateComponent, place: Place) -> int | None:
    """The number of the copy to restore on this rank; None when the live state is to stay.

    What was saved decides: global and replicated state goes to every rank. State of a rank, node or
    group goes to the same one while their number (or the group's key) is the same and, on as many
    ranks, their ranks are the same. All else is up to the component's `on_resize`. Another sharing
    pattern than the saved one is a CheckpointWarning where it makes a difference. Raises
    StateMismatch with what was saved and what there is now.
    """
    saved = manifest.components[component.key]
    count = len(manifest.copies(component.key))
    copy = _copy_for(manifest, saved, count, component, place)
    if copy is not None and place.rank == 0:
        _warn_of_pattern(saved, count, component, place)
    return copy


def _copy_for(
    manifest: CheckpointManifest,
    saved: ComponentManifest,
    count: int,
    component: StateComponent,
    place: Place,
) -> int | None:
    resized = _Resized(component, place, saved.pattern, count)
    if saved.pattern in _COMMON:
        return 0
    if saved.pattern == "PER_RANK":
        same = place.world_size == count
        return place.rank if same else resized.by_count(place.rank, place.world_size)
    if saved.pattern == "PER_NODE":
        own, now = group_index(place.nodes, place.rank), len(place.nodes)
        if (
            now == count > 1
            and place.world_size == manifest.world_size
            and place.nodes != manifest.nodes
        ):
            return resized.by_members(
                own, now, f"the nodes {short(manifest.nodes)}", f"they are {short(place.nodes)}"
            )
        return own if now == count else resized.by_count(own, now)
    return _group_copy(manifest, saved, count, component, place, resized)


def _group_copy(
    manifest: CheckpointManifest,
    saved: ComponentManifest,
    count: int,
    component: StateComponent,
    place: Place,
    resized: _Resized,
) -> int | None:
    """A key that was given at the save and now decides. Else groups are known by name and number,
    and where there are as many ranks as there were, by their members too: one partition has nothing
    to do with another of as many groups."""
    name = component.process_group_name or ""
    partition = place.partitions.get(name)
    if partition is None:
        if count == 1:
            return 0
        raise StateMismatch(
            f"component {component.key!r} was saved PER_GROUP over {saved.group!r} ({count} "
            "groups); declare it so, "
            "with process_group_name and process_groups, to say which of them this rank is in"
        )
    own, now = group_index(partition, place.rank), len(partition)
    if saved.group_keys and component.group_key is not None:
        if component.group_key in saved.group_keys:
            return saved.group_keys.index(component.group_key)
        names = f" ({', '.join(saved.group_keys)}; this rank's is {component.group_key})"
        return resized.by_count(own, now, names)
    if now != count:
        return resized.by_count(own, now)
    same_members = place.world_size != manifest.world_size or partition == saved.partition
    if count > 1 and not (name == saved.group and same_members):
        was = f"the groups {short(saved.partition)} of {saved.group!r}"
        return resized.by_members(own, now, was, f"{name!r} is {short(partition)}")
    return own


def _warn_of_pattern(
    saved: ComponentManifest, count: int, component: StateComponent, place: Place
) -> None:
    """Say so where another pattern than the saved one makes a difference: where ranks get states of
    their own, or may want such."""
    now = component.sharing_pattern.value
    one_state = saved.pattern in _COMMON or count == 1
    one_wanted = now in _COMMON or place.world_size == 1
    if saved.pattern == now or (one_state and one_wanted):
        return
    owner = saved.pattern.removeprefix("PER_").lower()
    gets = (
        "every rank gets the one state that was saved"
        if one_state
        else f"each rank gets the state of its own {owner}"
    )
    warnings.warn(
        f"component {component.key!r} was saved {saved.pattern} and is declared {now} now: {gets}",
        CheckpointWarning,
        stacklevel=2,
    )


@dataclass(frozen=True, slots=True)
class _Resized:
    """What becomes of a component whose ranks, nodes or groups are not those that were saved:
    `on_resize` decides."""

    component: StateComponent
    place: Place
    pattern: str
    count: int

    def by_count(self, own: int, now: int, names: str = "") -> int | None:
        """Another number of them, or names that were not saved."""
        what = f"{self.count} {self.what}s{names}, there are {now} now"
        return self.chosen(own, now, what, "", everywhere=bool(names))

    def by_members(self, own: int, now: int, was: str, now_is: str) -> int | None:
        """As many of them, and not the same ones."""
        hint = (
            "declare the group that it was saved over, or give group_key at the save and at the "
            "load; "
        )
        return self.chosen(
            own, now, f"{was}, and now {now_is}", hint if self.what == "group" else ""
        )

    @property
    def what(self) -> str:
        return self.pattern.removeprefix("PER_").lower()

    def chosen(
        self, own: int, now: int, changed: str, hint: str, *, everywhere: bool = False
    ) -> int | None:
        component, policy = self.component, self.component.on_resize
        if policy == "keep":
            if self.place.rank == 0 or everywhere:  # once, not once per rank
                warnings.warn(
                    f"component {component.key!r} was saved for {changed}: the live state stays "
                    "(on_resize='keep')",
                    CheckpointWarning,
                    stacklevel=2,
                )
            return None
        if policy == "error":
            rng = getattr(component.stateful, "restore_last", False)
            where = (
                "RNGState(on_resize='keep')"
                if rng
                else f"StateComponent({component.key!r}, ..., on_resize='keep')"
            )
            raise StateMismatch(
                f"component {component.key!r} was saved for {changed}; {hint}set on_resize='keep' "
                "to go on with the "
                f"live state ({where}), or to a function (new {self.what}, new size, old size) -> "
                f"old {self.what}"
            )
        answer = policy(own, now, self.count)
        if type(answer) is not int or not 0 <= answer < self.count:
            raise StateMismatch(
                f"component {component.key!r}: on_resize gave {answer!r} for {self.what} {own} of "
                f"{now}; "
                f"it must be a whole number below {self.count}"
            )
        return answer
