"""What a trainer takes as its training data: batches without end, and a position among them; and
random numbers of their own for every batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ckptcore import StateMismatch


class Counted(NamedTuple):
    """A batch, with its samples here and those of all ranks together."""

    batch: Any
    samples: int
    of_all_ranks: int


class Loader:
    """Batches without end, epoch after epoch: the base of all loaders.

    A position is a number of epochs that are finished and what was handed out of the next one, in
    batches unless a subclass counts otherwise. The position after the last batch of an epoch is the
    start of the next one, so equal positions have equal states. What was read ahead does not count.

    length: batches of an epoch on this rank (default None: not known).
    """

    state_per_rank = False  # else the state is the same on all ranks

    def __init__(self, length: int | None = None) -> None:
        self.epoch = 0
        self.position = 0
        self._length = length

    @property
    def epoch_ended(self) -> bool:
        """Whether the batches handed out so far complete an epoch."""
        return self.position == 0 and self.epoch > 0

    @property
    def batches_per_epoch(self) -> int | None:
        """Of this rank; None where it is not known."""
        return self._length

    @property
    def batches_left(self) -> int | None:
        """In the current epoch."""
        return None if self._length is None else max(self._length - self.position, 0)

    def next_group(self, count: int) -> list[Counted]:
        """The next batches, up to `count` and up to the end of the epoch. Never none: after the end
        of an epoch the next one begins."""
        raise NotImplementedError

    def go_to_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]

    def close(self) -> None:
        """End the workers."""

    def __len__(self) -> int:
        if (length := self.batches_per_epoch) is None:
            raise TypeError("the data have no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left of the current epoch."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next_group(1)[0].batch


def is_stream(dataset: Any) -> bool:
    """Whether data can only be read from their beginning on; a DataLoader is so, too."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def rows_of(batch: Any) -> int:
    """Samples of a collated batch: the length of the first tensor in it, or of the batch itself."""
    for leaf in _leaves(batch):
        if getattr(leaf, "ndim", 0) > 0:
            return int(leaf.shape[0])
    return len(batch)


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for value in batch:
            yield from _leaves(value)
    else:
        yield batch


def has_its_part(loader: Any) -> bool:
    """Whether a DataLoader's sampler gives each rank other samples, as DistributedSampler does."""
    batches = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return any(getattr(sampler, "num_replicas", 1) > 1 for sampler in found)


def shut_down(iterator: Any) -> None:
    """End the workers of an iterator of torch's loader now, not when it is collected."""
    getattr(iterator, "_shutdown_workers", lambda: None)()


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


# Random numbers.


def seed_random(*key: int) -> None:
    """Seed what data sets draw from (random, numpy, torch on the CPU) from some numbers."""
    sequence = np.random.SeedSequence([number & (2**64 - 1) for number in key])
    first, second = sequence.generate_state(2, np.uint64)
    random.seed(int(first))
    np.random.seed(int(second) & 0xFFFFFFFF)
    # Not torch.manual_seed: that one seeds the accelerators too.
    torch.default_generator.manual_seed(int(first))


def random_state() -> tuple[Any, Any, torch.Tensor]:
    """The state of the three generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_state(state: tuple[Any, Any, torch.Tensor]) -> None:
    """Go back to a state that `random_state` gave."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


@contextmanager
def seeded_random(*key: int) -> Iterator[None]:
    """Within it the random numbers are a function of `key`, if there is one; the process's
    generators are left as they were found."""
    before = random_state()
    try:
        if key:
            seed_random(*key)
        yield
    finally:
        set_random_state(before)
