"""Taking over files of the last checkpoint whose bytes have not changed, instead of writing them
again (`CheckpointManager(reuse=True)`).

A file is taken over by a hard link, or by a copy that the server of an object store makes. Every
checkpoint stays whole by itself: it has all of its files, and readers, copies and deletions know
nothing of this. What this process did not write itself, and what anybody has touched since, is
never taken over. The bytes in memory are hashed each time, so that no guess about what has changed
can make a wrong checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..catalog.folder import join
from ..catalog.transaction import Transaction
from ..storage.base import Storage
from ..storage.chunks import Workers
from .writer import ByteSource, FilePlan, Known, WrittenFile, unchanged_files


@dataclass(frozen=True, slots=True)
class _Kept:
    """A file of the last checkpoint. identity: by which the storage tells whether it was touched
    since; times: how often it was taken over since it was written."""

    path: str
    identity: str
    written: WrittenFile
    times: int


class Reuse:
    """The files that this process wrote into the last checkpoint, by name.

    refresh_every: after so many checkpoints a file is written anew, so that damage in one place is
    in no more checkpoints than that.
    """

    def __init__(self, refresh_every: int) -> None:
        self.refresh_every = refresh_every
        self._kept: dict[str, _Kept] = {}
        self._taken: set[str] = set()

    def take_over(
        self,
        transaction: Transaction,
        plans: Sequence[FilePlan],
        sources: Mapping[str, ByteSource],
        workers: Workers,
        known: Known,
    ) -> list[WrittenFile]:
        """Those of `plans` that are in the new checkpoint now. Raises StorageError."""
        self._taken = set()
        found = []
        earlier = {
            name: kept.written
            for name, kept in self._kept.items()
            if kept.times + 1 < self.refresh_every
        }
        for each in unchanged_files(plans, earlier, sources, workers, known):
            name, kept = each.plan.name, self._kept[each.plan.name]
            target = join(transaction.folder, name)
            if kept.path == target:  # it gives way to this one
                continue
            if transaction.storage.link(kept.path, target, kept.identity):
                self._taken.add(name)
                found.append(each)
        return found

    def committed(self, storage: Storage, folder: str, files: Sequence[WrittenFile]) -> None:
        """Remember what this process has in the checkpoint `folder`."""
        before, self._kept = self._kept, {}
        for each in files:
            name = each.plan.name
            path = join(folder, name)
            identity = storage.identity(path)
            if identity is not None:
                times = before[name].times + 1 if name in self._taken else 0
                self._kept[name] = _Kept(path, identity, each, times)
        self._taken = set()
