"""Which stored copy of a component is shown, where each rank, group or node has its own."""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptcore import CheckpointManifest, CheckpointView

from .failures import USAGE, Failure, not_found
from .render import ranks as ranks_text


class Which(NamedTuple):
    """What `--rank`, `--group` and `--node` say; None: not given."""

    rank: int | None = None
    group: str | None = None
    node: int | None = None

    @property
    def given(self) -> bool:
        return any(value is not None for value in self)


FIRST = Which()

# The option that names a copy of a component with this sharing pattern, and what there is one of
# each.
OPTIONS = {
    "PER_RANK": ("rank", "rank"),
    "PER_GROUP": ("group", "group"),
    "PER_NODE": ("node", "node"),
}


class StoredCopy(NamedTuple):
    """One of `total` copies of a component. name: such as "rank 3"."""

    number: int
    total: int
    name: str
    ranks: list[int]
    option: str | None  # that chooses among them; None where there is one copy for all

    def document(self) -> dict[str, Any]:
        return {"copy": self.number, "copies": self.total, "of": self.name, "ranks": self.ranks}

    def title(self, component: str) -> str:
        if self.option is None:
            return f"values of {component}"
        members = f" (ranks {ranks_text(self.ranks)})" if self.option != "rank" else ""
        another = f"; --{self.option} shows another" if self.total > 1 else ""
        return f"values of {component} for {self.name}{members}: one of {self.total}{another}"


def stored_copies(manifest: CheckpointManifest, key: str) -> list[StoredCopy]:
    """The copies of a component that this checkpoint holds."""
    component, found = manifest.components[key], manifest.copies(key)
    option, noun = OPTIONS.get(str(component.pattern), (None, "all ranks"))
    keys = component.group_keys

    def name(number: int, first: int) -> str:
        if option == "rank":
            return f"rank {first}"
        if option == "node":
            return f"node {number}"
        return f"group {keys[number] if keys else number} of {component.group}" if option else noun

    return [
        StoredCopy(n, len(found), name(n, copy.members[0]), list(copy.members), option)
        for n, copy in enumerate(found)
        if manifest.holds(copy)
    ]


def choose_copy(view: CheckpointView, key: str, which: Which) -> StoredCopy:
    """The copy of a component that `which` says, by default the first. Raises Failure when there is
    no such copy.

    `--rank` fits every pattern: what that rank would restore. An option for another pattern than
    the component's is ignored here.
    """
    held = stored_copies(view.manifest, key)
    component = view.manifest.components[key]
    if which.rank is not None:
        fits = [copy for copy in held if which.rank in copy.ranks]
        wanted = f"rank {which.rank}"
    elif which.group is not None and component.pattern == "PER_GROUP":
        keys = component.group_keys or []
        by_key = [copy for copy in held if keys and keys[copy.number] == which.group]
        fits = by_key or [
            copy for copy in held if which.group in (str(copy.number), f"{copy.number:05d}")
        ]
        wanted = f"group {which.group}"
    elif which.node is not None and component.pattern == "PER_NODE":
        fits = [copy for copy in held if copy.number == which.node]
        wanted = f"node {which.node}"
    else:
        return held[0]
    if not fits:
        there = ", ".join(copy.name for copy in held[:16]) + (", ..." if len(held) > 16 else "")
        raise not_found(
            f"component {key!r} of {view.url} has nothing for {wanted}: it has {there}",
            path=view.url,
        )
    return fits[0]


def check_fits(view: CheckpointView, components: tuple[str, ...], which: Which) -> None:
    """Raises Failure when `--group` or `--node` is given and no component has a copy for each of
    them."""
    for option, pattern in (("group", "PER_GROUP"), ("node", "PER_NODE")):
        patterns = {str(view.manifest.components[name].pattern) for name in components}
        if getattr(which, option) is not None and pattern not in patterns:
            said = ", ".join(
                f"{name} is {view.manifest.components[name].pattern}" for name in components
            )
            raise Failure(
                "usage",
                USAGE,
                f"--{option} is for components with a copy for each {option}: {said}",
            )
