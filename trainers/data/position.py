"""What a loader of training batches promises, and what all loaders have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ckptcore import StateMismatch

__all__ = ["BatchLoader", "Counted", "Loader", "refuse_mismatch"]

Counted = tuple[Any, int, int]  # a batch, its samples here, and those of all ranks together


class Loader(Protocol):
    """Batches without end, epoch after epoch. What a trainer takes as its training data.

    The position after the last batch of an epoch is the start of the next one, so equal positions
    have equal states. What was read ahead does not count.
    """

    state_per_rank: bool  # else the state is the same on all ranks

    @property
    def epoch(self) -> int:
        """Epochs that are finished."""

    @property
    def epoch_ended(self) -> bool:
        """Whether the batches handed out so far complete an epoch."""

    @property
    def batches_per_epoch(self) -> int | None:
        """Of this rank; None where it is not known."""

    @property
    def batches_left(self) -> int | None:
        """In the current epoch."""

    def next_group(self, count: int) -> list[Counted]:
        """The next batches, up to `count` and up to the end of the epoch, each with its samples on
        this rank and on all ranks together. Never none: after the end of an epoch the next one
        begins."""

    def go_to_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """End the workers."""


class BatchLoader:
    """The base of loaders: a position is an epoch and what was handed out of it, in batches unless
    a subclass counts otherwise."""

    state_per_rank = False

    def __init__(self, length: int | None = None) -> None:
        self.epoch = 0
        self.position = 0
        self._length = length

    @property
    def epoch_ended(self) -> bool:
        return self.position == 0 and self.epoch > 0

    @property
    def batches_per_epoch(self) -> int | None:
        return self._length

    @property
    def batches_left(self) -> int | None:
        return None if self._length is None else max(self._length - self.position, 0)

    def __len__(self) -> int:
        if (length := self.batches_per_epoch) is None:
            raise TypeError("the data have no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left of the current epoch."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next_group(1)[0][0]

    def next_group(self, count: int) -> list[Counted]:
        raise NotImplementedError


def refuse_mismatch(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise StateMismatch where a stored position is one in other data.

    then, now: what has to be the same, as it was stored and as it is.
    """
    mismatched = {
        name: (str(then.get(name)), str(now.get(name)))
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    }
    if mismatched:
        facts = "; ".join(f"{name} was {old}, is {new}" for name, (old, new) in mismatched.items())
        raise StateMismatch(
            "the checkpoint's data position does not fit this data and batch size: "
            f"{facts}. Give the run the data and batch size that it was started with, or start "
            "another one in a new output_dir",
            mismatched=mismatched,
        )
