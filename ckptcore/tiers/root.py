"""The roots of a run as one: the manager's own, and the tiers that its checkpoints are uploaded
to."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..arguments import shown
from ..catalog.branches import mark_abandoned
from ..catalog.catalog import clean_up, copies, scan
from ..catalog.folder import CheckpointInfo
from ..catalog.retention import RetentionPolicy
from ..choice import Root
from ..errors import InvalidState, StorageError
from ..events import SaveEvent
from ..nodes.agreement import StorageMode
from ..ranks.communicator import Communicator
from ..storage.base import Storage
from ..storage.local import LocalStorage
from ..storage.urls import split_url
from .uploads import Tier, Uploads

__all__ = ["TieredRoot", "checked_tiers", "open_root"]

log = logging.getLogger("ckptcore")


def open_root(
    comm: Communicator,
    storage: Storage,
    mode: StorageMode,
    tiers: Sequence[Tier],
    on_error: Literal["raise", "warn"],
    drain_timeout: float,
    threads: int,
    tell: Callable[[SaveEvent], None],
) -> tuple[Root, Uploads]:
    """The root of a run, with its tiers, and the uploads to them, which are rank 0's."""
    # Writing elsewhere is slow anyway: with half as many threads it takes less from the training.
    threads = max(1, threads // 2)
    uploads = Uploads(
        storage, tiers if comm.rank == 0 else (), on_error, drain_timeout, threads, tell
    )
    return (
        TieredRoot(comm, storage, tiers, uploads) if tiers else Root(comm, storage, mode)
    ), uploads


def checked_tiers(storage: Storage, tiers: Any, mode: str) -> tuple[Tier, ...]:
    """The tiers of a root, none for None. Raises InvalidState for what is no tier, or no root of
    its own."""
    if not isinstance(tiers, Sequence | None) or isinstance(tiers, str | bytes):
        raise InvalidState(f"tiers must be a list of Tier(root), not {shown(tiers)}")
    found = tuple(tiers or ())
    if wrong := [tier for tier in found if not isinstance(tier, Tier)]:
        raise InvalidState(f"tiers are Tier(root), not {shown(wrong[0])}")
    if found and mode != "shared":
        raise InvalidState(
            "tiers need a root that all ranks share; with storage_mode='node' no rank sees all "
            "files"
        )
    roots = [storage, *(tier.storage for tier in found)]
    places = [
        os.path.realpath(s.url) if isinstance(s, LocalStorage) else s.url.rstrip("/") for s in roots
    ]
    if len(set(places)) < len(places):
        twice = next(place for place in places if places.count(place) > 1)
        raise InvalidState(
            f"{twice} is given twice: a tier is another root than the manager's own, and than "
            "other tiers"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Holding(RetentionPolicy):
    """A policy that keeps what is still to be uploaded, too."""

    policy: RetentionPolicy
    held: set[str]

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        return self.policy.keep(checkpoints) | self.held


class TieredRoot(Root):
    """The manager's own root and its tiers as one. An entry of a tier has its URL for a name."""

    def __init__(
        self, comm: Communicator, storage: Storage, tiers: Sequence[Tier], uploads: Uploads
    ) -> None:
        super().__init__(comm, storage, "shared")
        self.tiers, self.uploads = [tier.storage for tier in tiers], uploads
        self._last: int | None = None
        self._cleaning = threading.Lock()
        self._again: Callable[[Callable[[str], None]], None] = lambda _: None
        uploads.on_release = lambda tell: self._again(tell)

    def scan(self) -> list[CheckpointInfo]:
        """All entries of all roots. Of equal ones that of the own root is last, so that it is
        preferred."""
        found = [(info, 0) for info in super().scan()]
        far = [
            (replace(info, name=info.url), n)
            for n, tier in enumerate(self.tiers, 1)
            for info in scan(tier)
        ]
        self._last = max((info.sequence or 0 for info, _ in far), default=0)
        found += far
        found.sort(key=lambda pair: (*pair[0].order, pair[0].status == "committed", -pair[1]))
        return mark_abandoned(info for info, _ in found)

    def entries(self) -> list[CheckpointInfo]:
        infos = self.scan()
        return [i for i in infos if i.status != "committed" or copies(infos, i)[0] == i.name]

    @property
    def storages(self) -> list[Storage]:
        return [self.storage, *self.tiers]

    def place(self, name: str) -> tuple[Storage, str]:
        folder = split_url(name)[1]
        for storage in self.tiers:
            if storage.at(folder) == name:
                return storage, folder
        return self.storage, name

    def last_sequence(self) -> int:
        if self.comm.rank == 0 and self._last is None:
            try:
                self.scan()
            except (
                StorageError
            ) as error:  # a save does not need a tier, and does not wait for it again
                self._last = 0
                log.warning(
                    "which commits a tier of %s holds is not known: %s", self.storage.url, error
                )
        return self._last or 0

    def _delete(self, info: CheckpointInfo) -> None:
        self.uploads.forget(split_url(info.url)[1])
        super()._delete(info)

    def _each(self, info: CheckpointInfo, work: Callable[[Storage, str], None]) -> None:
        for name in copies(self.scan(), info):
            work(*self.place(name))

    def clean_up(
        self,
        comm: Communicator,
        policy: RetentionPolicy | None,
        run_id: str,
        saved: CheckpointInfo,
        tell: Callable[[str], None],
        deleted: Callable[[CheckpointInfo], None],
        listed: Sequence[CheckpointInfo] | None = None,
    ) -> None:
        if comm.rank != 0:
            return
        self.uploads.committed(saved)

        def clean(
            tell: Callable[[str], None], listed: Sequence[CheckpointInfo] | None = None
        ) -> None:
            with self._cleaning:
                holding = None if policy is None else _Holding(policy, self.uploads.held)
                clean_up(self.storage, holding, run_id, saved, tell, deleted, listed)

        self._again = clean  # when one that was held goes, too
        with self.comm.keep_alive():
            clean(tell, listed)
