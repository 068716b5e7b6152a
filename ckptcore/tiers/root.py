"""The roots of a run as one: the manager's own, and the tiers that its checkpoints are uploaded
to."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..arguments import shown
from ..catalog.catalog import Catalog, CleanUp
from ..catalog.folder import CheckpointInfo
from ..catalog.retention import RetentionPolicy
from ..errors import InvalidState
from ..events import SaveEvent
from ..saving.background import Uploading
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
) -> tuple[Catalog, Uploading]:
    """The catalog of a root with its tiers, and the uploads to them, which are rank 0's."""
    if not tiers:
        return Catalog(storage), Uploading()
    # Writing elsewhere is slow anyway: with half as many threads it takes less from the training.
    threads = max(1, threads // 2)
    uploads = Uploads(storage, tiers if uploading else (), on_error, drain_timeout, threads, tell)
    return UploadingCatalog(storage, tiers, uploads), uploads


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
        self._last: CleanUp | None = None
        uploads.on_release = self._released

    def delete(self, info: CheckpointInfo) -> None:
        if not info.pinned:
            self.uploads.forget(split_url(info.url)[1])
        super().delete(info)

    def clean_up(self, after: CleanUp) -> None:
        self.uploads.committed(after.saved)
        self._last = after
        self._clean(after)

    def _clean(self, after: CleanUp) -> None:
        """But for what is still to be uploaded."""
        with self._cleaning:
            if after.policy is not None:
                after = replace(after, policy=_Holding(after.policy, self.uploads.held))
            super().clean_up(after)

    def _released(self, warn: Callable[[str], None]) -> None:
        """What was held may go, too."""
        if self._last is not None:
            self._clean(replace(self._last, warn=warn, listed=None))
