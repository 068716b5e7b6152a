"""Positions in iterable data: a stream that is cut into batches as it comes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ckptcore import StateMismatch

from ..arguments import InvalidArgument
from .mapped import Options, shut_down, torch_loader
from .position import BatchLoader, Counted
from .randomness import seeded_random

__all__ = ["StreamReader"]


class _Stream(IterableDataset[Any]):
    """Cuts a stream into batches, in each worker the part of the stream that the data set gives
    it."""

    def __init__(self, dataset: Any, options: Options) -> None:
        self.dataset = dataset
        self.options = options
        # Seed, which pass, its first batch, batches to skip. Shared: workers that persist must see
        # it change.
        self.start = torch.zeros(4, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def start_at(self, *values: int) -> None:
        """Where the next iteration starts."""
        self.start.copy_(
            torch.from_numpy(np.array([v & (2**64 - 1) for v in values], np.uint64).view(np.int64))
        )

    def __iter__(self) -> Iterator[Counted | None]:
        options, info = self.options, get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        seed, number, first, skip = self.start.tolist()
        if options.call_set_epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(number)
        with seeded_random(seed, number, worker):
            stream = iter(self.dataset)
        place = (
            first + worker
        )  # of the batch in the pass, or after it: workers that have no more data are passed over
        while True:
            # The stream is the same on all ranks, so the rank counts only from here on.
            with seeded_random(seed, number, place, 0):
                every = list(islice(stream, options.of_all_ranks))
            if not every or (options.drop_last and len(every) < options.of_all_ranks):
                return
            if place < first + skip:
                made = None
            else:
                mine = every[options.rank :: options.world_size]
                with seeded_random(seed, number, place, 1, options.rank):
                    made = options.collate(mine or every[:1]), len(mine), len(every)
            yield made
            place += workers


class StreamReader(BatchLoader):
    """Positions in a stream: the epoch and its batches so far, the pass over the data and its
    batches so far.

    An epoch is a pass, or `epoch_steps` batches of passes that follow one another.
    """

    def __init__(self, dataset: Any, options: Options) -> None:
        try:
            length = options.batches(len(dataset))
        except TypeError:
            length = None
        self.epoch_steps = options.epoch_steps if length is None else None
        super().__init__(length or self.epoch_steps)
        self.dataset, self.options = dataset, options
        self.passes = 0
        self.batches = 0
        self.own_state = options.num_workers == 0 and all(
            callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")
        )
        self._beginning = copy.deepcopy(dataset.state_dict()) if self.own_state else None
        # The data set's state after the batches handed out, if it had to read on since.
        self._here: Any = None
        self._stream = _Stream(dataset, options)
        self._loader = torch_loader(self._stream, options)
        self._iterator: Any = None
        self._ahead: Counted | None = None
        self._resume: Any = None

    def next_group(self, count: int) -> list[Counted]:
        taken: list[Counted] = []
        epoch = self.epoch
        while len(taken) < count and self.epoch == epoch:
            item, self._ahead = self._ahead, None
            item = item or self._pull()
            if item is None:
                if self.batches == 0:
                    raise InvalidArgument(
                        "train_dataset",
                        type(self.dataset).__name__,
                        "gives no batch",
                        "give it data",
                    )
                self._next_pass()
                epoch = self.epoch if not taken else epoch
                continue
            taken.append(item)
            self.position += 1
            self.batches += 1
            if self.position == self.epoch_steps:
                self.epoch, self.position = self.epoch + 1, 0
        if taken and self.batches and (self.own_state or self.epoch_steps is None):
            # Only reading on tells whether this was the end: of the epoch, and of what the data's
            # own state is about.
            self._here = copy.deepcopy(self.dataset.state_dict()) if self.own_state else None
            self._ahead = self._pull()
            if self._ahead is None:
                self._next_pass()
        return taken

    def _next_pass(self) -> None:
        self._drop()
        self.passes, self.batches, self._resume = self.passes + 1, 0, None
        if self.epoch_steps is None:
            self.epoch, self.position = self.epoch + 1, 0

    def _pull(self) -> Counted | None:
        if self._iterator is None:
            self._open()
        item: Counted | None = next(self._iterator, None)
        return item

    def _open(self) -> None:
        direct = self._resume is not None
        if self.own_state:
            self.dataset.load_state_dict(copy.deepcopy(self._resume if direct else self._beginning))
        skip = 0 if direct else self.batches
        self._stream.start_at(self.options.seed, self.passes, self.batches if direct else 0, skip)
        self._iterator = iter(self._loader)
        self._resume = None
        for done in range(skip):
            try:
                next(self._iterator)
            except StopIteration:
                facts = {"batches": (f"at least {skip}", str(done))}
                raise StateMismatch(
                    f"the checkpoint's data position is after batch {skip} of a pass, but the "
                    f"data end after {done}",
                    mismatched=facts,
                ) from None

    def _drop(self) -> None:
        if self._iterator is not None and not self._loader.persistent_workers:
            shut_down(self._iterator)
        self._iterator = self._ahead = self._here = None

    def go_to_epoch(self, epoch: int) -> None:
        self._drop()
        self.epoch = self.passes = epoch
        self.position = self.batches = 0
        self._resume = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "position": self.position,
            "passes": self.passes,
            "batches": self.batches,
            "world_size": self.options.world_size,
            "num_workers": self.options.num_workers,
        }
        here = self._resume if self._resume is not None else self._here
        if here is None and self.own_state and self._iterator is not None:
            here = self.dataset.state_dict()
        if here is not None and self.batches:
            state["dataset_state"] = copy.deepcopy(here)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drop()
        self.epoch, self.position = state["epoch"], state["position"]
        self.passes, self.batches = state["passes"], state["batches"]
        self._resume = copy.deepcopy(state.get("dataset_state")) if self.own_state else None

    def close(self) -> None:
        kept = self._loader._iterator if self._iterator is None else self._iterator
        self._iterator = self._ahead = self._loader._iterator = None
        shut_down(kept)
