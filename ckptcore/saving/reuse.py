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
    """The files that this process wrote into the last checkpoint.

    refresh_every: after so many checkpoints a file is written anew, so that damage in one place is
    in no more checkpoints than that.
    """

    def __init__(self, refresh_every: int) -> None:
        self.refresh_every = refresh_every
        self._kept: list[_Kept] = []
        self._taken: dict[str, int] = {}

    def take_over(
        self,
        transaction: Transaction,
        plans: Sequence[FilePlan],
        sources: Mapping[str, ByteSource],
        workers: Workers,
        known: Known,
    ) -> list[WrittenFile]:
        """Those of `plans` that are in the new checkpoint now. Raises StorageError."""
        self._taken = {}
        found = []
        # By what is in them: names number the files of a component.
        kept = {
            (each.written.plan.component, each.written.plan.header): each
            for each in self._kept
            if each.times + 1 < self.refresh_every
        }
        pairs = [(plan, kept.get((plan.component, plan.header))) for plan in plans]
        earlier = {plan.name: each for plan, each in pairs if each is not None}
        written = {name: each.written for name, each in earlier.items()}
        for each in unchanged_files(plans, written, sources, workers, known):
            name, before = each.plan.name, earlier[each.plan.name]
            target = join(transaction.folder, name)
            if before.path == target:  # it gives way to this one
                continue
            if transaction.storage.link(before.path, target, before.identity):
                self._taken[name] = before.times + 1
                found.append(each)
        return found

    def committed(self, storage: Storage, folder: str, files: Sequence[WrittenFile]) -> None:
        """Remember what this process has in the checkpoint `folder`."""
        self._kept = []
        for each in files:
            path = join(folder, each.plan.name)
            identity = storage.identity(path)
            if identity is not None:
                times = self._taken.get(each.plan.name, 0)
                self._kept.append(_Kept(path, identity, each, times))
        self._taken = {}
