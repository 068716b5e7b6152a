"""Batches of data that the model is not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from .position import rows_of


@dataclass(frozen=True)
class EvaluationBatches:
    """(batch, whether it counts) of one rank, always the same samples in the same order; its length
    is known where that of the data is.

    Batches are dealt to the ranks in turn. Where all ranks must take part in each, the last round
    is made full with batches that do not count.

    dataset: map-style, iterable, or a DataLoader, which is used as it is. limit: batches of all
    ranks at most. in_step: all ranks run the same number of batches. fixed_shapes: a batch that is
    shorter than the others is left out. loader: what torch's DataLoader is given besides.
    """

    dataset: Any
    size: int
    rank: int = 0
    ranks: int = 1
    limit: int | None = None
    in_step: bool = False
    fixed_shapes: bool = False
    loader: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._numbers())

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        if isinstance(self.dataset, DataLoader) or not hasattr(self.dataset, "__getitem__"):
            yield from self._dealt()
            return
        samples, batches = len(self.dataset), self._batches()
        numbers = self._numbers()
        starts = [min(number, batches - 1) * self.size for number in numbers]
        spans = [range(start, min(start + self.size, samples)) for start in starts]
        for number, batch in zip(numbers, self._loader(batch_sampler=spans), strict=True):
            yield batch, number < batches

    def _batches(self) -> int:
        """Of all ranks."""
        batches = len(self.dataset)
        if not isinstance(self.dataset, DataLoader):
            batches = batches // self.size if self.fixed_shapes else -(-batches // self.size)
        return batches if self.limit is None else min(batches, self.limit)

    def _numbers(self) -> list[int]:
        """Of this rank's batches; those from `_batches` on do not count."""
        batches = self._batches()
        numbers = (first + self.rank for first in range(0, batches, self.ranks))
        return [n for n in numbers if n < batches or (self.in_step and self.ranks > 1)]

    def _dealt(self) -> Iterator[tuple[Any, bool]]:
        """From data that can only be read through."""
        foreign = isinstance(self.dataset, DataLoader)
        loader = self.dataset if foreign else self._loader(batch_size=self.size)
        stream = (
            batch
            for batch in islice(loader, self.limit)
            if not (self.fixed_shapes and rows_of(batch) < self.size)
        )
        while held := list(islice(stream, self.ranks)):
            if self.rank < len(held) or self.in_step:
                yield held[min(self.rank, len(held) - 1)], self.rank < len(held)

    def _loader(self, **how: Any) -> DataLoader[Any]:
        # A generator of its own: making an iterator draws a number, which training must not notice.
        return DataLoader(self.dataset, generator=torch.Generator(), **self.loader, **how)
