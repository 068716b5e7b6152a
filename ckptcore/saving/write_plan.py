"""Which bytes of a state one rank writes into which files, and what is kept of that from save to
save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..errors import NoSpace
from ..format.manifest import ReplicaGroup
from ..replicas.shard_table import ShardTable, ShardTables
from ..state.component import SharingPattern, StateComponent
from ..state.tree import StateSnapshot, Structure, TensorLeaf
from . import plan
from .plan import FilePlan, TensorSpec

__all__ = ["KeptPlans", "PlannedComponent", "WritePlan"]


@dataclass(frozen=True, slots=True)
class PlannedComponent:
    """What this rank has to do with one component, or with its replica group.

    files: all of the group's (of a sharded component: this rank's). has_values: whether this rank
    writes the plain values. table: of a sharded component; its tensors are numbered as there, and
    held pairs these numbers with this rank's own, where they are not the same.
    """

    key: str
    files: tuple[FilePlan, ...]
    has_values: bool
    table: ShardTable | None = None
    held: tuple[tuple[int, int], ...] | None = None

    def tensors(self, snapshot: StateSnapshot) -> dict[int, TensorLeaf]:
        """This rank's tensors by their numbers in `files`."""
        leaves = snapshot.tensors
        return (
            dict(enumerate(leaves)) if self.held is None else {n: leaves[at] for n, at in self.held}
        )


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Which bytes one rank writes into which files. The same object from save to save, while the
    structure of the state stays. files: this rank's; names: theirs."""

    rank: int
    components: tuple[PlannedComponent, ...]
    files: tuple[FilePlan, ...] = field(init=False)
    names: list[str] = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        files = tuple(f for c in self.components for f in c.files if f.writer == self.rank)
        object.__setattr__(self, "files", files)
        object.__setattr__(self, "names", [file.name for file in files])
        object.__setattr__(self, "nbytes", sum(file.size for file in files))

    @contextmanager
    def needing(self) -> Iterator[None]:
        """A full disk is reported with what the files of the plan need."""
        try:
            yield
        except NoSpace as error:
            error.needed = sum(file.size for c in self.components for file in c.files)
            error.message += f"; this part of the checkpoint needs {error.needed:,} bytes"
            raise


class KeptPlans:
    """What is kept from save to save while the structure of the state stays: names, dtypes, shapes,
    aliases and layouts, but never where in memory anything is.

    split: replicas share the writing, else the lowest rank does it. tables: of sharded components;
    structures: of all, as they were at the last save.
    """

    def __init__(self, *, split: bool = True) -> None:
        self.split = split
        self.tables = ShardTables(spread=split)
        self.structures: dict[str, Structure] = {}
        self._structure: list[Any] | None = None
        self._plan: WritePlan | None = None

    def plan(
        self,
        rank: int,
        components: Sequence[StateComponent],
        groups: Mapping[str, Sequence[ReplicaGroup]],
        snapshots: Mapping[str, StateSnapshot],
        tables: Mapping[str, ShardTable],
        *,
        first: int = 0,
    ) -> WritePlan:
        """groups: the ranks that store the same of each component; tables: of sharded ones. first:
        the lowest rank that writes to the same storage. Raises InvalidState."""
        structure: list[Any] = [rank]
        mine: list[_Wanted] = []
        for c in components:
            if (table := tables.get(c.key)) is not None:
                wanted = _Wanted(c.key, snapshots[c.key], rank == first, (rank,), table=table)
            else:
                group = next(group for group in groups[c.key] if rank in group.members)
                writers = self._writers(c, group)
                if rank not in writers:
                    continue
                lowest = rank == group.members[0]
                wanted = _Wanted(c.key, snapshots[c.key], lowest, writers, group.label)
            mine.append(wanted)
            structure.append(wanted.structure)
        if self._plan is None or structure != self._structure:
            self._plan = WritePlan(rank, tuple(wanted.planned() for wanted in mine))
            self._structure = structure
        return self._plan

    def _writers(self, component: StateComponent, group: ReplicaGroup) -> tuple[int, ...]:
        one = component.sharing_pattern in (SharingPattern.GLOBAL, SharingPattern.PER_NODE)
        return tuple(group.members[:1] if one or not self.split else group.members)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A component that a rank writes a part of."""

    key: str
    snapshot: StateSnapshot
    has_values: bool
    writers: tuple[int, ...]
    label: str = ""
    table: ShardTable | None = None

    @property
    def structure(self) -> tuple[Any, ...]:
        """Equal where `planned` would be."""
        if self.table is not None:
            return self.key, self.has_values, self.table.signature
        of = self.snapshot.structure  # the same object while it stays
        known: Any = [leaf.spec for leaf in self.snapshot.tensors] if of is None else id(of)
        return self.key, self.has_values, self.writers, self.label, known

    def planned(self) -> PlannedComponent:
        tensors = [leaf.spec for leaf in self.snapshot.tensors]
        if self.table is None:
            numbers = [(n, n) for n, t in enumerate(tensors) if t.alias_of is None]
        else:
            numbered = {t.name: n for n, t in enumerate(tensors)}
            numbers = [
                (number, numbered[t.name])
                for number, t in enumerate(self.table.tensors)
                if t.name in numbered
                and t.layout is not None
                and t.layout.box_of(t.shape, self.writers[0]) is not None
            ]
        specs = [
            TensorSpec(number, t.stored_name, t.dtype, t.shape, t.nbytes)
            for number, t in ((number, tensors[at]) for number, at in numbers)
        ]
        label = self.label if self.table is None else f".rank{self.writers[0]:05d}"
        files = tuple(plan.plan_component(self.key, specs, self.writers, label))
        held = None if self.table is None else tuple(numbers)
        return PlannedComponent(self.key, files, self.has_values, self.table, held)
