"""Positions in map-style data, and what they share with those in streams.

A map-style data set is read in a global order of its samples, a pure function of (seed, epoch).
Every batch is made under random numbers of its own, so that it is the same in whatever process it
is made and whatever was made before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ..arguments import InvalidArgument
from .position import BatchLoader, Counted
from .randomness import seed_random, seeded_random

__all__ = ["MapReader", "Options", "as_it_is", "is_stream", "shut_down", "torch_loader"]


@dataclass
class Options:
    """How batches are made; the same for both kinds of readers."""

    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    rank: int
    world_size: int
    collate: Callable[[list[Any]], Any]
    epoch_steps: int | None
    call_set_epoch: bool
    loader: dict[str, Any]  # what torch's DataLoader is given besides

    @property
    def of_all_ranks(self) -> int:
        """Samples of a batch on all ranks."""
        return self.batch_size * self.world_size

    @property
    def num_workers(self) -> int:
        return int(self.loader["num_workers"])

    def batches(self, samples: int) -> int:
        """Batches in that many samples."""
        if self.drop_last:
            return samples // self.of_all_ranks
        return -(-samples // self.of_all_ranks)


def is_stream(dataset: Any) -> bool:
    """Whether data can only be read from their beginning on; a DataLoader is so, too."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def as_it_is(item: Any) -> Any:
    return item


def torch_loader(dataset: Any, options: Options, sampler: Any = None) -> DataLoader[Any]:
    # Without a generator of its own torch's loader draws one number from the process's at the start
    # of each epoch.
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        collate_fn=as_it_is,
        generator=torch.Generator(),
        **options.loader,
    )


def shut_down(iterator: Any) -> None:
    """End the workers of an iterator of torch's loader now, not when it is collected."""
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


Key = tuple[int, int, int, list[int]]  # epoch, position, seed, indices


class _Batches(Dataset[Any]):
    """Makes whole batches, in a worker or in the training process."""

    def __init__(self, dataset: Any, options: Options) -> None:
        self.dataset = dataset
        self.collate = options.collate
        self.rank = options.rank
        self.call_set_epoch = options.call_set_epoch and hasattr(dataset, "set_epoch")
        self.epoch: int | None = None  # that the data set in this process was told

    def __getitem__(self, key: Key) -> Any:
        epoch, position, seed, indices = key
        if self.call_set_epoch and self.epoch != epoch:
            self.dataset.set_epoch(epoch)
            self.epoch = epoch
        if get_worker_info() is not None:
            seed_random(seed, epoch, position, self.rank)
            return self._make(indices)
        with seeded_random(seed, epoch, position, self.rank):
            return self._make(indices)

    def _make(self, indices: list[int]) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        return self.collate(many(indices) if many else [self.dataset[index] for index in indices])


class MapReader(BatchLoader):
    """Positions in the order of a map-style data set: the epoch, and how many of its samples all
    ranks had."""

    def __init__(self, dataset: Any, options: Options) -> None:
        self.samples = len(dataset)
        super().__init__(options.batches(self.samples))
        self.options = options
        self._order: tuple[tuple[int, int, bool], np.ndarray] | None = None
        self._loader = torch_loader(_Batches(dataset, options), options, sampler=self)
        self._iterator: Any = None
        if options.batches(self.samples) == 0:
            raise InvalidArgument(
                "per_device_train_batch_size",
                options.batch_size,
                f"{self.samples} samples do not fill one batch"
                + (" on every rank" if options.world_size > 1 else ""),
                "give a smaller batch or more data",
            )

    def order(self, epoch: int) -> np.ndarray:
        """Sample indices of an epoch: a sort by random keys.

        numpy promises the stream of a bit generator for good, other than that of its `permutation`,
        so the order stays the same after an upgrade and on another machine.
        """
        wanted = (self.options.seed, epoch, self.options.shuffle)
        if self._order is None or self._order[0] != wanted:
            if self.options.shuffle:
                source = np.random.Philox(np.random.SeedSequence((self.options.seed, epoch)))
                order = np.argsort(source.random_raw(self.samples), kind="stable")
            else:
                order = np.arange(self.samples)
            self._order = wanted, order
        return self._order[1]

    def __iter__(self) -> Iterator[Key]:
        """The batches that are left of this epoch, as torch's loader asks for them (it reads
        ahead)."""
        order, epoch, options = self.order(self.epoch), self.epoch, self.options
        for position in range(
            self.position,
            self.position + (self.batches_left * options.of_all_ranks),
            options.of_all_ranks,
        ):
            every = order[position : position + options.of_all_ranks]
            mine = every[options.rank :: options.world_size]
            yield epoch, position, options.seed, (mine if len(mine) else every[:1]).tolist()

    @property
    def batches_left(self) -> int:
        return self.options.batches(self.samples - self.position)

    def next_group(self, count: int) -> list[Counted]:
        taken: list[Counted] = []
        for _ in range(min(count, self.batches_left)):
            if self._iterator is None:
                self._iterator = iter(self._loader)
            batch = next(self._iterator)
            every = min(self.options.of_all_ranks, self.samples - self.position)
            taken.append(
                (batch, len(range(self.options.rank, every, self.options.world_size)), every)
            )
            self._go_to(self.epoch, self.position + every)
        return taken

    def _go_to(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        if self.batches_left == 0:
            self.epoch, self.position = epoch + 1, 0
            self._drop()

    def _drop(self) -> None:
        """Let go of what was read ahead."""
        if self._iterator is not None and not self._loader.persistent_workers:
            shut_down(self._iterator)
        self._iterator = None

    def go_to_epoch(self, epoch: int) -> None:
        self._drop()
        self._go_to(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drop()
        self._go_to(state["epoch"], state["position"])

    def close(self) -> None:
        kept = self._loader._iterator if self._iterator is None else self._iterator
        self._iterator = self._loader._iterator = None
        shut_down(kept)
