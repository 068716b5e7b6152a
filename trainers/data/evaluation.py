"""Losses on data that the model is not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from ..losses import samples_in

if TYPE_CHECKING:
    from ..trainer import Trainer

__all__ = ["mean_loss"]


@torch.no_grad()
def mean_loss(trainer: Trainer, dataset: Any, prefix: str) -> dict[str, float]:
    """Mean loss over a dataset, always the same samples in the same order, each rank its share."""
    model = trainer.wrapped
    was_training = model.training
    model.eval()
    total, items = 0.0, 0.0
    sums: list[
        tuple[torch.Tensor, torch.Tensor]
    ] = []  # read at the end, so that the device is not waited for
    trainer.eval_loader = batches = Batches(trainer, dataset)
    try:
        for batch, counts in batches:
            sums += [trainer.evaluate_batch(trainer.move_batch(batch))][: int(counts)]
            trainer.fire("on_prediction_step")
    finally:
        model.train(was_training)
    for loss, number in sums:
        total, items = total + float(loss), items + float(number)
    all_loss, all_items = trainer.reduce([total, items])
    trainer.eval_loader = None
    return {f"{prefix}_loss": all_loss / all_items if all_items else float("nan")}


class Batches:
    """(batch, whether it counts) of this rank; its length is known where that of the data is.

    Batches are dealt to the ranks in turn. Where all ranks must take part in each, the last round
    is made full with batches that do not count.
    """

    def __init__(self, trainer: Trainer, dataset: Any) -> None:
        self.trainer, self.dataset = trainer, dataset
        self.rank, self.ranks = trainer.data_parallel
        self.size = trainer.args.per_device_eval_batch_size
        self.limit = trainer.args.max_eval_steps if trainer.args.max_eval_steps > 0 else None
        self.together = trainer.evaluates_together and self.ranks > 1
        self.mapped = hasattr(dataset, "__getitem__") and not isinstance(dataset, DataLoader)

    def __len__(self) -> int:
        return len(self.mine())

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        if not self.mapped:
            yield from self.dealt()
            return
        size, samples, batches = self.size, len(self.dataset), self.count()
        spans = [
            range(start := min(n, batches - 1) * size, min(start + size, samples))
            for n in self.mine()
        ]
        for number, batch in zip(self.mine(), self.loader(batch_sampler=spans), strict=True):
            yield batch, number < batches

    def count(self) -> int:
        """Batches of all ranks."""
        if isinstance(self.dataset, DataLoader):
            batches = len(self.dataset)
        else:
            samples = len(self.dataset)
            batches = (
                samples // self.size if self.trainer.fixed_shapes else -(-samples // self.size)
            )
        return batches if self.limit is None else min(batches, self.limit)

    def mine(self) -> list[int]:
        batches = self.count()
        numbers = (first + self.rank for first in range(0, batches, self.ranks))
        return [number for number in numbers if number < batches or self.together]

    def dealt(self) -> Iterator[tuple[Any, bool]]:
        """From data that can only be read through."""
        loader = (
            self.dataset
            if isinstance(self.dataset, DataLoader)
            else self.loader(batch_size=self.size)
        )
        drops = self.trainer.fixed_shapes
        stream = (
            batch
            for batch in islice(loader, self.limit)
            if not (drops and samples_in(batch) < self.size)
        )
        while held := list(islice(stream, self.ranks)):
            if self.rank < len(held) or self.together:
                yield held[min(self.rank, len(held) - 1)], self.rank < len(held)

    def loader(self, **how: Any) -> DataLoader[Any]:
        args = self.trainer.args
        return DataLoader(
            self.dataset,
            collate_fn=self.trainer.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and self.trainer.device.type == "cuda",
            # Of its own: making an iterator draws a number, and training must not depend on
            # evaluations.
            generator=torch.Generator(),
            **how,
        )
