"""What listings said some operations ago, as an object store with a cache may still say now."""

from __future__ import annotations

import threading

from ..errors import StorageError
from ..storage.base import Entry, Storage

__all__ = ["ListingHistory"]


class ListingHistory:
    """Remembers, before each change, what the folders above it held."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._lock = threading.Lock()
        # By folder: the number of an operation, and the listing just before it (an error, where it
        # had none).
        self._before: dict[str, list[tuple[int, list[Entry] | StorageError]]] = {}

    def note(self, number: int, path: str) -> None:
        """Operation `number` is about to change something at `path`."""
        parts = path.split("/")
        with self._lock:
            for folder in ("/".join(parts[:depth]) for depth in range(len(parts) + 1)):
                self._before.setdefault(folder, []).append((number, self._now(folder)))

    def listing(
        self, folder: str, number: int, *, hide_new: bool, show_removed: bool
    ) -> list[Entry]:
        """What `folder` held just before operation `number`, as far as that is asked for, and else
        what it holds now."""
        with self._lock:
            now = self._now(folder)
            then = next((found for at, found in self._before.get(folder, []) if at >= number), now)
        if hide_new and show_removed:
            return _entries(then)
        if hide_new:
            known = {} if isinstance(then, StorageError) else {entry.name for entry in then}
            return _entries(
                then
                if isinstance(then, StorageError)
                else [e for e in _entries(now) if e.name in known]
            )
        if isinstance(then, StorageError):
            return _entries(now)
        there = [] if isinstance(now, StorageError) else now
        names = {entry.name for entry in there}
        return sorted(
            [*there, *(e for e in then if e.name not in names)], key=lambda entry: entry.name
        )

    def _now(self, folder: str) -> list[Entry] | StorageError:
        try:
            return self.storage.list(folder)
        except StorageError as error:
            return error


def _entries(found: list[Entry] | StorageError) -> list[Entry]:
    if isinstance(found, StorageError):
        raise found
    return found
