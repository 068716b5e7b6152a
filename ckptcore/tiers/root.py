"""The roots of a run as one: the manager's own, and the tiers that its checkpoints are uploaded
to."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..arguments import shown
from ..catalog.catalog import Catalog
from ..catalog.folder import CheckpointInfo
from ..catalog.retention import RetentionPolicy
from ..errors import InvalidState
from ..events import SaveEvent
from ..storage.base import Storage
from ..storage.local import LocalStorage
from ..storage.urls import split_url
from .uploads import Tier, Uploads

__all__ = ["UploadingCatalog", "checked_tiers", "open_catalog"]


def open_catalog(
    storage: Storage,
    tiers: Sequence[Tier],
    uploading: bool,
    on_error: Literal["raise", "warn"],
    drain_timeout: float,
    threads: int,
    tell: Callable[[SaveEvent], None],
) -> tuple[Catalog, Uploads]:
    """The catalog of a root with its tiers, and the uploads to them, which are rank 0's."""
    # Writing elsewhere is slow anyway: with half as many threads it takes less from the training.
    threads = max(1, threads // 2)
    uploads = Uploads(storage, tiers if uploading else (), on_error, drain_timeout, threads, tell)
    return UploadingCatalog(storage, tiers, uploads) if tiers else Catalog(storage), uploads


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


class UploadingCatalog(Catalog):
    """The root of a manager and its tiers, which checkpoints are on their way to."""

    def __init__(self, storage: Storage, tiers: Sequence[Tier], uploads: Uploads) -> None:
        super().__init__(storage, [tier.storage for tier in tiers])
        self.uploads = uploads
        self._cleaning = threading.Lock()
        self._again: Callable[[Callable[[str], None]], None] = lambda _: None
        uploads.on_release = lambda warn: self._again(warn)

    def delete(self, info: CheckpointInfo) -> None:
        if not info.pinned:
            self.uploads.forget(split_url(info.url)[1])
        super().delete(info)

    def clean_up(
        self,
        policy: RetentionPolicy | None,
        run_id: str,
        saved: CheckpointInfo,
        warn: Callable[[str], None],
        deleted: Callable[[CheckpointInfo], None],
        listed: Sequence[CheckpointInfo] | None = None,
    ) -> None:
        self.uploads.committed(saved)

        def clean(
            warn: Callable[[str], None], listed: Sequence[CheckpointInfo] | None = None
        ) -> None:
            with self._cleaning:
                holding = None if policy is None else _Holding(policy, self.uploads.held)
                super(UploadingCatalog, self).clean_up(
                    holding, run_id, saved, warn, deleted, listed
                )

        self._again = clean  # when one that was held goes, too
        clean(warn, listed)
