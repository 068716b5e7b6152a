"""A loader whose position can be stored after any batch and taken up again bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import default_collate

from ..arguments import InvalidArgument
from .mapped import MapReader, Options, is_stream
from .position import BatchLoader, Counted, refuse_mismatch
from .streams import StreamReader

__all__ = ["ResumableLoader", "collate"]


def collate(samples: list[Any]) -> Any:
    """torch's way to make a batch of samples, and columns that are lists of numbers become tensors,
    as Hugging Face's does."""
    return default_collate([_with_tensors(sample) for sample in samples])


def _with_tensors(sample: Any) -> Any:
    if not isinstance(sample, Mapping) or not any(map(is_numbers, sample.values())):
        return sample
    return {
        name: torch.tensor(value) if is_numbers(value) else value for name, value in sample.items()
    }


def is_numbers(value: Any) -> bool:
    """Whether this is a list of numbers, or of such lists."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int | float) or is_numbers(item) for item in value)
    )


class ResumableLoader(BatchLoader):
    """Batches without end, epoch after epoch; on several ranks, this rank's share of them.

    Map-style data: the order of an epoch is a pure function of (seed, epoch), so a position is two
    numbers: the epoch and how many of its samples all ranks together have used. Ranks are dealt
    each `batch_size * world_size` samples of the order like cards: their samples are disjoint,
    their epochs end at the same batch, and a position means the same for any number of ranks and
    workers. Where an epoch ends with fewer samples than ranks, those without one get one of another
    rank, counted as none, and can take part in the step all the same.

    Iterable data: every rank reads the whole stream and keeps what is dealt to it. A position is a
    number of batches and the state of a StatefulDataLoader: it is reached again through the
    `state_dict()` of the data set if it has one, in workers too, else by reading on. With workers
    the data set shares the stream among them, as torch wants it. Data that are cut into shards of
    different lengths by rank are read with world_size 1 and a loader of ranks.py around it.

    Random numbers drawn while a batch is made (augmentation, masking in `collate_fn`) are a
    function of (seed, epoch, batch), in workers as in this process, whose own generators are left
    alone. A data set with `set_epoch` is told the epoch, in workers too.

    epoch_steps: batches of an epoch where the data have no length; the stream goes on over the end
    of such an epoch, and starts again when it ends. Without it, an epoch of such data lasts until
    they end.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        epoch_steps: int | None = None,
        call_set_epoch: bool = True,
    ) -> None:
        if batch_size < 1:
            raise InvalidArgument(
                "per_device_train_batch_size", batch_size, "no samples in a batch", "give 1 or more"
            )
        if epoch_steps is not None and epoch_steps < 1:
            raise InvalidArgument(
                "epoch_train_steps", epoch_steps, "no steps in an epoch", "give 1 or more"
            )
        self.dataset = dataset
        options = Options(
            batch_size,
            seed,
            shuffle,
            drop_last,
            rank,
            world_size,
            collate_fn or collate,
            epoch_steps,
            call_set_epoch,
            loader={
                "num_workers": num_workers,
                "pin_memory": pin_memory and torch.cuda.is_available(),
                "persistent_workers": persistent_workers and num_workers > 0,
                "prefetch_factor": prefetch_factor if num_workers > 0 else None,
            },
        )
        self.options = options
        reads_on = is_stream(dataset)
        self._reader = (StreamReader if reads_on else MapReader)(dataset, options)
        fingerprint = getattr(dataset, "fingerprint", None)
        self._data: dict[str, Any] = dict(fingerprint()) if callable(fingerprint) else self._size()

    def _size(self) -> dict[str, Any]:
        return {"samples": len(self.dataset)} if isinstance(self._reader, MapReader) else {}

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self._reader.epoch

    @property
    def position(self) -> int:  # type: ignore[override]
        return self._reader.position

    @property
    def batches_per_epoch(self) -> int | None:
        """With workers that share a stream the ends of their parts may make it some more."""
        return self._reader.batches_per_epoch

    @property
    def batches_left(self) -> int | None:
        return self._reader.batches_left

    def next_group(self, count: int) -> list[Counted]:
        return self._reader.next_group(count)

    def go_to_epoch(self, epoch: int) -> None:
        self._reader.go_to_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        options = self.options
        return {
            **self._reader.state_dict(),
            "seed": options.seed,
            "shuffle": options.shuffle,
            "batch_size": options.batch_size,
            "drop_last": options.drop_last,
            "data": dict(self._data),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a stored position, and on in its order: the seed is taken over. Other data are
        refused."""
        here = self.state_dict()
        names = ["shuffle", "drop_last"]
        if isinstance(self._reader, StreamReader):
            # Who reads which part of a stream is a matter of their number; of other data a position
            # is so many samples.
            names += ["batch_size", "world_size", "num_workers"]
        then, now = (
            {name: found.get(name) for name in names}
            | {f"data {name}": value for name, value in found["data"].items()}
            for found in (state, here)
        )
        refuse_mismatch(then, now)
        self.options.seed = state["seed"]
        self._reader.load_state_dict(state)

    def close(self) -> None:
        """End the workers."""
        self._reader.close()
