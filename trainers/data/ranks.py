"""Loaders of several ranks: one that reads for all of them, and one on which they agree when an
epoch ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ckptcore import StateMismatch

from .position import BatchLoader, Counted

__all__ = ["Agreed", "CollateShares", "DispatchedLoader", "Exchange", "GroupExchange", "share_of"]


class Exchange(Protocol):
    """What the ranks of these loaders need of one another."""

    rank: int
    size: int

    def scatter_objects(self, objects: list[Any] | None) -> Any:
        """Rank 0 gives one object for each rank; every rank gets its own."""

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of every rank, equally many on each."""


class GroupExchange:
    """Over a process group of torch that works on the CPU (gloo)."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._source = 0 if group is None else dist.get_global_rank(group, 0)

    def scatter_objects(self, objects: list[Any] | None) -> Any:
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, objects, src=self._source, group=self.group)
        return mine[0]

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        own = torch.tensor(numbers, dtype=torch.int64)
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.group)
        return [part.tolist() for part in every]


def _exchange(group: Any) -> Exchange:
    return group if hasattr(group, "gather_numbers") else GroupExchange(group)


def part_of(batch: Any, rows: int, rank: int, size: int) -> Any:
    """What a rank gets of the batch of all."""
    return batch[rank] if isinstance(batch, Shares) else share_of(batch, rows, rank, size)


def share_of(batch: Any, rows: int, rank: int, size: int) -> Any:
    """A rank's samples of a collated batch, dealt like cards; the first one for a rank without any.

    Tensors, arrays and lists of plain values that are `rows` long are cut; everything else goes to
    all.
    """
    cut = slice(rank, None, size) if rank < rows else slice(0, 1)

    def of(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            # A view would be sent with all of the tensor that it is a view of.
            return part[cut].clone() if part.ndim and len(part) == rows else part
        if isinstance(part, Mapping):
            return {name: of(value) for name, value in part.items()}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(of, part))
        if isinstance(part, list | tuple):
            plain = not any(
                isinstance(item, torch.Tensor | Mapping | list | tuple) for item in part
            )
            return (
                part[cut] if plain and len(part) == rows else type(part)(of(item) for item in part)
            )
        if getattr(part, "ndim", 0) and len(part) == rows:
            return part[cut].copy()
        return part

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


class DispatchedLoader(BatchLoader):
    """Rank 0 reads the batches of all ranks at once and hands each rank its share.

    loader: on rank 0, one of world_size 1 whose batches are as large as those of all ranks
    together; what the others give is not used. For data that cannot be cut into shards, and for the
    order of samples that one process has. Every method that reads or moves must be called on all
    ranks, as must the constructor. What rank 0 raises, all ranks raise. The state is rank 0's, on
    every rank.
    """

    def __init__(self, loader: Any, group: Any = None) -> None:
        self.exchange = _exchange(group)
        self.loader: Any = loader if self.exchange.rank == 0 else None
        self._facts: tuple[int, bool, int | None, int | None] = (0, False, None, None)
        self._state: dict[str, Any] = {}
        self._tell(lambda: None)

    def _tell(self, act: Callable[[], list[Counted] | None]) -> list[Counted]:
        """Rank 0 acts and tells the others what came of it: their share of batches, the position,
        or an error."""
        if self.exchange.rank != 0:
            failed, shares, facts, state = self.exchange.scatter_objects(None)
            if failed is not None:
                mismatch, text = failed
                raise (
                    StateMismatch(text, mismatched=mismatch)
                    if mismatch is not None
                    else RuntimeError(text)
                )
        else:
            try:
                messages, error = self._messages(act() or []), None
            except Exception as raised:
                mismatch = (raised.mismatched or {}) if isinstance(raised, StateMismatch) else None
                text = (
                    str(raised)
                    if mismatch is not None
                    else f"rank 0 failed: {type(raised).__name__}: {raised}"
                )
                messages, error = (
                    [((mismatch, text), None, None, None)] * self.exchange.size,
                    raised,
                )
            _, shares, facts, state = self.exchange.scatter_objects(messages)
            if error is not None:
                raise error
        self._facts, self._state = facts, state
        return [tuple(share) for share in shares]

    def _messages(self, group: list[Counted]) -> list[Any]:
        loader, size = self.loader, self.exchange.size
        facts = loader.epoch, loader.epoch_ended, loader.batches_per_epoch, loader.batches_left
        state = loader.state_dict()
        return [
            (
                None,
                [
                    (part_of(batch, rows, rank, size), len(range(rank, rows, size)), rows)
                    for batch, _, rows in group
                ],
                facts,
                state,
            )
            for rank in range(size)
        ]

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self._facts[0]

    @property
    def epoch_ended(self) -> bool:
        return self._facts[1]

    @property
    def batches_per_epoch(self) -> int | None:
        return self._facts[2]

    @property
    def batches_left(self) -> int | None:
        return self._facts[3]

    def next_group(self, count: int) -> list[Counted]:
        return self._tell(lambda: self.loader.next_group(count))

    def go_to_epoch(self, epoch: int) -> None:
        self._tell(lambda: self.loader.go_to_epoch(epoch))

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tell(lambda: self.loader.load_state_dict(state))

    def close(self) -> None:
        if self.loader is not None:
            self.loader.close()


class Agreed(BatchLoader):
    """Every rank reads its own shard; an epoch ends on all ranks at the step at which the first
    one's ends.

    What longer shards hold beyond that is left out of the epoch. The state belongs to the rank.
    """

    state_per_rank = True

    def __init__(self, loader: Any, group: Any = None) -> None:
        self.loader = loader
        self.exchange = _exchange(group)
        length = loader.batches_per_epoch
        every = self.exchange.gather_numbers([-1 if length is None else length])
        lengths = [numbers[0] for numbers in every]
        super().__init__(None if -1 in lengths else min(lengths))

    def next_group(self, count: int) -> list[Counted]:
        """Equally many on all ranks."""
        own = self.loader.next_group(count)
        ended = self.loader.epoch > self.epoch
        samples = [here for _, here, _ in own]
        every = self.exchange.gather_numbers([len(own), ended, *samples, *[0] * (count - len(own))])
        number = min(numbers[0] for numbers in every)
        self.position += number
        if any(numbers[1] for numbers in every):
            self.epoch, self.position = self.epoch + 1, 0
            if not ended or number < len(own):
                self.loader.go_to_epoch(self.epoch)
        return [
            (batch, here, sum(numbers[2 + place] for numbers in every))
            for place, (batch, here, _) in enumerate(own[:number])
        ]

    def go_to_epoch(self, epoch: int) -> None:
        self.epoch, self.position = epoch, 0
        self.loader.go_to_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        self.epoch, self.position = state["epoch"], state["position"]

    def close(self) -> None:
        self.loader.close()
