"""Which stored copy of a component is shown, where each rank, group or node has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NamedTuple

import click

from ckptcore import CheckpointManifest, CheckpointView

from .cli import number
from .failures import USAGE, Failure, not_found
from .render import Report
from .render import ranks as ranks_text

# The option that names a copy of a component with this sharing pattern.
OPTIONS = {"PER_RANK": "rank", "PER_GROUP": "group", "PER_NODE": "node"}


class Which(NamedTuple):
    """What `--rank`, `--group` and `--node` say; None: not given."""

    rank: int | None = None
    group: str | None = None
    node: int | None = None


def which_options(work: Callable[..., Report]) -> Callable[..., Report]:
    """The options that make the argument `which`."""

    @number("--rank", 0, "Whose values: those that rank N restores.")
    @click.option("--group", metavar="G", help="Whose values: a group's number, or its key.")
    @number("--node", 0, "Whose values: those of node N.")
    @wraps(work)
    def run(rank: int | None, group: str | None, node: int | None, **how: Any) -> Report:
        return work(which=Which(rank, group, node), **how)

    found: Callable[..., Report] = run
    return found


class StoredCopy(NamedTuple):
    """One of `total` copies of a component. name: such as "rank 3"; option: that chooses among
    them, None where there is one copy for all; key: of its group."""

    number: int
    total: int
    name: str
    ranks: list[int]
    option: str | None
    key: str | None

    def document(self) -> dict[str, Any]:
        return {"copy": self.number, "copies": self.total, "of": self.name, "ranks": self.ranks}

    def title(self) -> str:
        """Whose it is; nothing where there is one for all."""
        if self.option is None:
            return ""
        members = f" (ranks {ranks_text(self.ranks)})" if self.option != "rank" else ""
        another = f"; --{self.option} shows another" if self.total > 1 else ""
        return f" for {self.name}{members}: one of {self.total}{another}"

    def answers(self, option: str, wanted: Any) -> bool:
        if option == "rank":
            return wanted in self.ranks
        return wanted in (self.key, self.number, str(self.number), f"{self.number:05d}")


def stored_copies(manifest: CheckpointManifest, key: str) -> list[StoredCopy]:
    """The copies of a component that this checkpoint holds."""
    component, found = manifest.components[key], manifest.copies(key)
    option = OPTIONS.get(str(component.pattern))
    copies = []
    for n, copy in enumerate(found):
        group = str(component.group_keys[n]) if component.group_keys else None
        names = {"rank": f"rank {copy.members[0]}", "node": f"node {n}"}
        names["group"] = f"group {group or n} of {component.group}"
        name = names[option] if option else "all ranks"
        if manifest.holds(copy):
            copies.append(StoredCopy(n, len(found), name, list(copy.members), option, group))
    return copies


def choose_copy(view: CheckpointView, key: str, which: Which) -> StoredCopy:
    """The copy of a component that `which` says, by default the first. Raises Failure when there is
    no such copy.

    `--rank` fits every pattern: what that rank would restore. An option for another pattern than
    the component's is ignored here.
    """
    held = stored_copies(view.manifest, key)
    for option, wanted in which._asdict().items():
        if wanted is None or option not in ("rank", held[0].option):
            continue
        fits = [copy for copy in held if copy.answers(option, wanted)]
        if fits:  # the key of one group may be the number of another
            return next((copy for copy in fits if copy.key == wanted), fits[0])
        there = ", ".join(copy.name for copy in held[:16]) + ", ..." * (len(held) > 16)
        what = f"component {key!r} of {view.url} has nothing for {option} {wanted}: it has {there}"
        raise not_found(what, path=view.url)
    return held[0]


def check_fits(view: CheckpointView, components: Iterable[str], which: Which) -> None:
    """Raises Failure when `--group` or `--node` is given and no component has a copy for each of
    them."""
    patterns = {name: str(view.manifest.components[name].pattern) for name in components}
    for option in ("group", "node"):
        if getattr(which, option) is not None and option not in map(OPTIONS.get, patterns.values()):
            kinds = ", ".join(f"{name} is {pattern}" for name, pattern in patterns.items())
            what = f"--{option} is for components with a copy for each {option}: {kinds}"
            raise Failure("usage", USAGE, what)
