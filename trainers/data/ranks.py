"""Loaders of several ranks: one reads for all, or they agree when an epoch ends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ckptcore import StateMismatch

from .position import Counted, Loader


class Exchange(Protocol):
    """What these loaders need of a DistributedEnvironment."""

    rank: int
    world_size: int

    def scatter_objects(self, objects: list[Any] | None) -> Any: ...

    def gather_objects(self, value: Any) -> list[Any]: ...


def share_of(batch: Any, rows: int, rank: int, size: int) -> Any:
    """A rank's samples of a batch, dealt like cards; the first one for a rank without any.

    Of a collated batch tensors, arrays and lists of plain values that are `rows` long are cut;
    everything else goes to all.
    """
    if isinstance(batch, Shares):
        return batch[rank]
    mine = slice(rank, None, size) if rank < rows else slice(0, 1)

    def of(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {name: of(value) for name, value in part.items()}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(of, part))
        nested = (torch.Tensor, Mapping, list, tuple)
        if isinstance(part, list | tuple) and any(isinstance(item, nested) for item in part):
            return type(part)(map(of, part))
        if not (getattr(part, "ndim", 0) or isinstance(part, list | tuple)) or len(part) != rows:
            return part
        cut = part[mine]
        # A view would be sent with all of the tensor that it is a view of.
        return cut.clone() if isinstance(cut, torch.Tensor) else copy.copy(cut)

    return of(batch)


class Shares(list[Any]):
    """The batches of all ranks, each collated by itself."""


@dataclass(frozen=True)
class CollateShares:
    """Deals the samples of all ranks out like cards and makes a batch of each rank's, so that
    nothing has to be cut afterwards; a rank without any gets the first sample."""

    collate: Callable[[list[Any]], Any]
    ranks: int

    def __call__(self, samples: list[Any]) -> Shares:
        dealt = (samples[rank :: self.ranks] or samples[:1] for rank in range(self.ranks))
        return Shares(map(self.collate, dealt))


class DispatchedLoader(Loader):
    """Rank 0 reads the batches of all ranks at once and hands each rank its share.

    loader: on rank 0, one of world_size 1 whose batches are as large as those of all ranks
    together; what the others give is not used. For data that cannot be cut into shards, and for the
    order of samples that one process has. Every method that reads or moves must be called on all
    ranks, as must the constructor. What rank 0 raises, all ranks raise. The state is rank 0's, on
    every rank.
    """

    def __init__(self, loader: Any, env: Exchange) -> None:
        super().__init__()
        self.env = env
        self.loader: Any = loader if env.rank == 0 else None
        self._left: int | None = None
        self._state: dict[str, Any] = {}
        self._lead(lambda: None)

    def _lead(self, act: Callable[[], list[Counted] | None]) -> list[Counted]:
        """Rank 0 acts; each rank gets its share of what came of it, or what it raised."""
        env, messages = self.env, None
        if env.rank == 0:
            try:
                messages = self._messages(act() or [])
            except Exception as error:
                what = f"rank 0 failed: {type(error).__name__}: {error}"
                raised = error if isinstance(error, StateMismatch) else RuntimeError(what)
                env.scatter_objects([raised] * env.world_size)
                raise
        message = env.scatter_objects(messages)
        if isinstance(message, Exception):
            raise message
        shares, (self.epoch, self.position, self._length, self._left, self._state) = message
        return list(shares)

    def _messages(self, group: list[Counted]) -> list[tuple[list[Counted], Any]]:
        """For each rank: its shares, and how far the loader is."""
        size, of = self.env.world_size, self.loader
        standing = (of.epoch, of.position, of.batches_per_epoch, of.batches_left, of.state_dict())

        def share(rank: int, batch: Any, rows: int) -> Counted:
            return Counted(share_of(batch, rows, rank, size), len(range(rank, rows, size)), rows)

        return [
            ([share(rank, batch, rows) for batch, _, rows in group], standing)
            for rank in range(size)
        ]

    @property
    def batches_left(self) -> int | None:
        return self._left

    def next_group(self, count: int) -> list[Counted]:
        return self._lead(lambda: self.loader.next_group(count))

    def go_to_epoch(self, epoch: int) -> None:
        self._lead(lambda: self.loader.go_to_epoch(epoch))

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lead(lambda: self.loader.load_state_dict(state))

    def close(self) -> None:
        if self.loader is not None:
            self.loader.close()


class Agreed(Loader):
    """Every rank reads its own shard; an epoch ends on all ranks at the step at which the first
    one's ends.

    What longer shards hold beyond that is left out of the epoch. The state belongs to the rank.
    """

    state_per_rank = True

    def __init__(self, loader: Any, env: Exchange) -> None:
        self.loader, self.env = loader, env
        lengths = env.gather_objects(loader.batches_per_epoch)
        super().__init__(None if None in lengths else min(lengths))

    def next_group(self, count: int) -> list[Counted]:
        """Equally many on all ranks."""
        own = self.loader.next_group(count)
        ended = self.loader.epoch > self.epoch
        every = self.env.gather_objects((ended, [item.samples for item in own]))
        number = min(len(samples) for _, samples in every)
        self.position += number
        if any(ended for ended, _ in every):
            self.epoch, self.position = self.epoch + 1, 0
            if not ended or number < len(own):
                self.loader.go_to_epoch(self.epoch)
        return [
            Counted(item.batch, item.samples, sum(samples[place] for _, samples in every))
            for place, item in enumerate(own[:number])
        ]

    def go_to_epoch(self, epoch: int) -> None:
        super().go_to_epoch(epoch)
        self.loader.go_to_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        super().load_state_dict(state)

    def close(self) -> None:
        self.loader.close()
