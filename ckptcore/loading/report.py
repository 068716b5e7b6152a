"""What a load or restore tells whoever asked for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ..format.checks import containers_copied
from ..format.manifest import CheckpointManifest

__all__ = ["PARTLY_OVERWRITTEN", "LoadReport"]

# Ends the message of a load that failed halfway; no longer true when another checkpoint was loaded
# over it.
PARTLY_OVERWRITTEN = (
    "; live state is partly overwritten, do not train on it (transactional=True avoids this)"
)


class LoadedValues(dict[str, Any]):
    """Loaded plain values by component key: the live objects, which have what was loaded.

    One that was emptied since is given as a copy of what was loaded: `d.clear();
    d.update(report.values["d"])` loses nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[str, Any] = {}

    def keep(self, key: str, value: Any) -> None:
        self[key], self._copies[key] = value, containers_copied(value)

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        emptied = isinstance(value, dict | list | set | deque) and not value
        return (self._copies.get(key) or value) if emptied else value


@dataclass(slots=True, repr=False)
class LoadReport:
    """What a load or restore did. As text it is one line.

    fresh: bool, there was no checkpoint and nothing was touched.
    step: int, of the checkpoint; None for a fresh start.
    path: text, path or URL of the checkpoint; None for a fresh start.
    manifest: CheckpointManifest; None for a fresh start.
    values: dict of component key -> loaded plain values; dicts, lists and the like are those of the
        state, filled in place.
    missing: list of full names that only the live state has (with strict=False).
    unexpected: list of full names that only the checkpoint has (with strict=False).
    cast: dict of full name -> "saved dtype -> live dtype".
    skipped: dict of newer entries that `restore` passed over -> why.
    """

    fresh: bool = False
    step: int | None = None
    path: str | None = None
    manifest: CheckpointManifest | None = None
    values: LoadedValues = field(default_factory=LoadedValues)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        more = [f"skipped {', '.join(self.skipped)}"] if self.skipped else []
        if self.fresh or self.manifest is None:
            return "; ".join(["nothing restored: a fresh start", *more])
        counts = {"missing": self.missing, "unexpected": self.unexpected, "cast": self.cast}
        more = [f"{len(names)} {what}" for what, names in counts.items() if names] + more
        name = (self.path or "").rstrip("/").rpartition("/")[2]
        count = len(self.manifest.components)
        what = f"step {self.step}, {count} component{'s' if count != 1 else ''}"
        return "; ".join([f"restored {name} ({what})", *more])

    def __repr__(self) -> str:
        return f"<LoadReport: {self}>"
