"""What a load or restore tells whoever asked for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..format.manifest import CheckpointManifest

__all__ = ["PARTLY_OVERWRITTEN", "LoadReport"]

# Ends the message of a load that failed halfway; no longer true when another checkpoint was loaded over it.
PARTLY_OVERWRITTEN = "; live state is partly overwritten, do not train on it (transactional=True avoids this)"


@dataclass(slots=True, repr=False)
class LoadReport:
    """What a load or restore did. As text it is one line.

    fresh: there was no checkpoint and nothing was touched. values: the loaded plain values by component key.
    missing, unexpected: full names that only the live state, or only the checkpoint, has (not strict). cast: full
    name -> "saved dtype -> live dtype". skipped: newer entries that `restore` passed over, and why.
    """

    fresh: bool = False
    step: int | None = None
    path: str | None = None
    manifest: CheckpointManifest | None = None
    values: dict[str, Any] = field(default_factory=dict)
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
