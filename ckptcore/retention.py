"""Which committed checkpoints of a run stay. A policy sees manifests only, and can be wrong about nothing else: the
newest and the one just committed always stay, whatever it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .root import CheckpointInfo

__all__ = ["KeepLast", "RetentionPolicy"]


class RetentionPolicy(Protocol):
    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        """Names to keep, of the run's committed checkpoints ordered by (step, commit sequence)."""


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The newest `count` checkpoints, by step. Raises ValueError for a count below one."""

    count: int

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise ValueError(f"KeepLast({self.count!r}): the number of checkpoints to keep must be a whole number >= 1")

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        return {info.name for info in checkpoints[-self.count :]}
