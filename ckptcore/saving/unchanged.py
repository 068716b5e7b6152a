"""Tensors whose bytes are those of the save before, by the digests that a checkpoint has anyway.

Two things follow from them. Parameters that should train and do not are warned of
(`CheckpointManager(unchanged="warn")`). And tensors that stay as they are get files of their own,
so that these can be taken over (`reuse=True`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..format.manifest import CheckpointManifest
from ..format.tensorfile import tensor_nbytes
from ..replicas.shard_table import ShardTable
from ..state.tree import TensorLeaf
from .writer import WrittenFile

# So many saves in a row a tensor has to stay as it is, before it gets into a file of its own.
STABLE_AFTER = 2
# Fewer bytes than this are not worth another layout of the files.
WORTH_BYTES = 1 << 20
NAMES_SHOWN = 10

# By component and name, the bytes that a rank writes of parameters that should train, and are as
# they were at the save before.
Suspects = Mapping[str, Mapping[str, int]]


@dataclass(slots=True)
class _Component:
    """What is known of a component's tensors, by their stored names. digests: at the last save.
    times: of those that were as at the save before, how often in a row. stable: in files of their
    own; left: changed again after that, and never stable again."""

    digests: dict[str, bytes] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    stable: frozenset[str] = frozenset()
    left: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Content:
    """What a manifest says of a component. files: names and sizes."""

    files: list[tuple[str, int]]
    checksum: str


class Unchanged:
    """What one rank remembers of its last committed save.

    warns: parameters that should train and do not are warned of, once each. separates: tensors
    that stay as they are are to be found out. trained: by component,
    names of parameters that should train, in the save that is being made.
    """

    def __init__(self, *, warns: bool, separates: bool) -> None:
        self.warns, self.separates = warns, separates
        self.trained: dict[str, frozenset[str]] = {}
        self._last: dict[str, _Component] = {}
        self._next: dict[str, _Component] = {}
        self._named: set[tuple[str, str]] = set()
        self._contents: dict[str, _Content] = {}
        self._step = 0

    def stable(self, component: str) -> frozenset[str]:
        """Stored names of tensors that belong into files of their own: the same object while they
        are the same names."""
        known = self._last.get(component)
        return frozenset() if known is None else known.stable

    def compared(
        self, files: Sequence[WrittenFile], leaves: Mapping[str, Mapping[int, TensorLeaf]]
    ) -> dict[str, dict[str, int]]:
        """The suspects among what this rank has in the new checkpoint. leaves: its tensors, by
        component and number in the files."""
        suspects: dict[str, dict[str, int]] = {}
        self._next = {}
        for file in files:
            key = file.plan.component
            before = self._last.get(key) or _Component()
            now = self._next.setdefault(key, _Component())
            for number, stored, digests in file.tensors():
                name = stored.name
                now.digests[name] = digests
                if not digests or before.digests.get(name) != digests:
                    continue
                now.times[name] = before.times.get(name, 0) + 1
                known_as = leaves[key][number].spec.name
                if self.warns and known_as in self.trained[key]:
                    suspects.setdefault(key, {})[known_as] = stored.nbytes
        return suspects

    def committed(self, files: Sequence[WrittenFile], manifest: CheckpointManifest) -> None:
        """Remember what was compared: it is the last save now."""
        for key, now in self._next.items() if self.separates else ():
            plans = [file.plan for file in files if file.plan.component == key]
            sizes = {stored.name: stored.nbytes for plan in plans for _, stored in plan.contents}
            _classify(self._last.get(key) or _Component(), now, sizes)
        self._last, self._next = self._next, {}
        self._contents, self._step = _contents(manifest), manifest.step

    def warnings(
        self,
        reports: Sequence[Suspects],
        manifest: CheckpointManifest,
        tables: Mapping[str, ShardTable],
        domain: Collection[int],
    ) -> list[str]:
        """On rank 0, before `committed`: what is to be said of a new checkpoint. reports: the
        suspects of all ranks. tables: of sharded components as `domain`, the ranks that see the
        storage of rank 0, stores them.

        Where nothing at all has changed, there was no training, and nothing is said.
        """
        if not any(reports) or not self._trained(manifest):
            return []
        found = {(key, name) for each in reports for key, names in each.items() for name in names}
        for key in {key for key, _ in found} & tables.keys():
            found -= _partly_changed(key, tables[key], reports, domain)
        new = sorted(found - self._named)
        if not new:
            return []
        self._named.update(new)
        shown = ", ".join(f"{key}/{name}" for key, name in new[:NAMES_SHOWN])
        more = f" and {len(new) - NAMES_SHOWN:,} more" if len(new) > NAMES_SHOWN else ""
        one = len(new) == 1
        return [
            f"{len(new):,} parameter{'' if one else 's'} with requires_grad=True "
            f"{'has' if one else 'have'} in step {manifest.step} the bytes of step {self._step}: "
            f"{shown}{more}. Look whether the optimizer has them, and whether they get gradients; "
            "set requires_grad=False for what is not to train, or pass unchanged='ignore'. Each is "
            "named once."
        ]

    def _trained(self, manifest: CheckpointManifest) -> bool:
        """Whether anything has changed in the files that a component had before, too."""
        return any(
            before.files == now.files and before.checksum != now.checksum
            for key, now in _contents(manifest).items()
            if (before := self._contents.get(key)) is not None
        )


def _partly_changed(
    key: str, table: ShardTable, reports: Sequence[Suspects], domain: Collection[int]
) -> set[tuple[str, str]]:
    """Sharded tensors of which some rank writes a part that has changed, or that is not known to be
    the same."""
    everywhere: Counter[str] = Counter()
    here: Counter[str] = Counter()
    for rank, report in enumerate(reports):
        everywhere.update(report.get(key, {}))
        if rank in domain:
            here.update(report.get(key, {}))
    tensors = {tensor.name: tensor for tensor in table.tensors}
    return {
        (key, name)
        for name, nbytes in everywhere.items()
        if nbytes < tensor_nbytes(tensors[name].dtype, tensors[name].shape)
        or here[name] < tensors[name].stored_nbytes
    }


def _classify(before: _Component, now: _Component, sizes: Mapping[str, int]) -> None:
    """Say which tensors are stable now, and which no longer. Each becomes so once at most, so that
    the layout of the files does not go to and fro."""
    now.left = before.left | (before.stable & now.digests.keys() - now.times.keys())
    now.stable = before.stable
    if before.stable - now.times.keys():
        now.stable = before.stable & now.times.keys()
    ready = {name for name, times in now.times.items() if times >= STABLE_AFTER}
    ready -= now.stable | now.left
    if sum(sizes[name] for name in ready) >= WORTH_BYTES:
        now.stable |= ready


def _contents(manifest: CheckpointManifest) -> dict[str, _Content]:
    return {
        key: _Content([(name, manifest.files[name].size) for name in c.files], c.checksum)
        for key, c in manifest.components.items()
    }
