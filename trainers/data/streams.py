"""Positions in iterable data: a stream that is cut into batches as it comes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptcore import StateMismatch

from ..arguments import InvalidArgument
from .mapped import Options, as_it_is, shut_down
from .position import BatchLoader, Counted, refuse_mismatch
from .randomness import seeded_random

__all__ = ["StreamReader"]


class _Stream(IterableDataset[Any]):
    """Cuts a stream into batches, in each worker the part of the stream that the data set gives
    it. Its state, one in each worker, is how many it has made, and that of the data set."""

    def __init__(self, dataset: Any, options: Options) -> None:
        self.dataset, self.options = dataset, options
        self.stateful = all(
            callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")
        )
        self.beginning = copy.deepcopy(dataset.state_dict()) if self.stateful else None
        self.made = 0
        self.resume: dict[str, Any] | None = None
        # Seed and which pass. Shared: workers that persist must see it change.
        self.start = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def start_at(self, *values: int) -> None:
        """Where the next iteration starts."""
        unsigned = np.array([value & (2**64 - 1) for value in values], np.uint64)
        self.start.copy_(torch.from_numpy(unsigned.view(np.int64)))

    def state_dict(self) -> dict[str, Any]:
        data = copy.deepcopy(self.dataset.state_dict()) if self.stateful else None
        return {"made": self.made, "data": data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume = state

    def __iter__(self) -> Iterator[Counted]:
        options, info = self.options, get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        seed, number = self.start.tolist()
        resume, self.resume = self.resume or {"made": 0, "data": self.beginning}, None
        if self.stateful:
            self.dataset.load_state_dict(copy.deepcopy(resume["data"]))
        if options.call_set_epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(number)
        with seeded_random(seed, number, worker):
            stream = iter(self.dataset)
        self.made = resume["made"] if self.stateful else 0  # else it is read again up to there
        while True:
            # Of the batch in the pass, or after it: workers without data are passed over. The
            # stream is the same on all ranks, so the rank counts only from there on.
            place = worker + self.made * workers
            with seeded_random(seed, number, place, 0):
                every = list(islice(stream, options.of_all_ranks))
            if not every or (options.drop_last and len(every) < options.of_all_ranks):
                break
            self.made += 1
            if self.made > resume["made"]:
                mine = every[options.rank :: options.world_size]
                with seeded_random(seed, number, place, 1, options.rank):
                    batch = options.collate(mine or every[:1]), len(mine), len(every)
                yield batch
        if self.made < resume["made"]:
            facts = {"batches": (f"at least {resume['made']}", str(self.made))}
            raise StateMismatch(
                f"the checkpoint's data position is after batch {resume['made']} of a pass, but "
                f"the data end after {self.made}",
                mismatched=facts,
            )


class StreamReader(BatchLoader):
    """Positions in a stream: the epoch and its batches so far, the pass over the data, its batches
    so far, and what a StatefulDataLoader says of that.

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
        self._stream = _Stream(dataset, options)
        self._loader = StatefulDataLoader(
            self._stream,
            batch_size=None,
            collate_fn=as_it_is,
            generator=torch.Generator(),
            # torchdata 0.11 gets the turns of workers that persist wrong from the second pass on.
            **{**options.loader, "persistent_workers": False},
        )
        self._iterator: Any = None
        self._ahead: Counted | None = None
        self._here: Any = None  # the loader's state after the batches handed out, if it read on
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
            self._here = None
            self.position += 1
            self.batches += 1
            if self.position == self.epoch_steps:
                self.epoch, self.position = self.epoch + 1, 0
        if taken and self.batches:
            # Only reading on tells whether this was the end: of the epoch, and of the pass.
            self._here = self._loader.state_dict()
            self._ahead = self._pull()
            if self._ahead is None:
                self._next_pass()
        return taken

    def _next_pass(self) -> None:
        self._drop()
        self.passes, self.batches = self.passes + 1, 0
        if self.epoch_steps is None:
            self.epoch, self.position = self.epoch + 1, 0

    def _pull(self) -> Counted | None:
        if self._iterator is None:
            self._stream.start_at(self.options.seed, self.passes)
            if self._resume is not None:
                self._loader.load_state_dict(copy.deepcopy(self._resume))
            self._iterator, self._resume = iter(self._loader), None
        item: Counted | None = next(self._iterator, None)
        return item

    def _drop(self) -> None:
        """Let go of what was read ahead, and of the workers."""
        shut_down(self._iterator)
        self._iterator = self._loader._iterator = None
        self._ahead = self._here = self._resume = None

    def go_to_epoch(self, epoch: int) -> None:
        self._drop()
        self.epoch = self.passes = epoch
        self.position = self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "passes": self.passes,
            "batches": self.batches,
            "world_size": self.options.world_size,
            "num_workers": self.options.num_workers,
            "within": copy.deepcopy(self._resume or self._here) if self.batches else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        refuse_mismatch({"loader": "with_a_state"}, {"loader": _kind(state)})
        self._drop()
        self.epoch, self.position = state["epoch"], state["position"]
        self.passes, self.batches = state["passes"], state["batches"]
        self._resume = copy.deepcopy(state["within"])

    def close(self) -> None:
        self._drop()


def _kind(state: dict[str, Any]) -> str:
    """Positions of an earlier version count batches alone."""
    return "with_a_state" if "within" in state else "that counts batches"
