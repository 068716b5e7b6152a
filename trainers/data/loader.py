"""A loader whose position can be stored after any batch and taken up again bit for bit.

Map-style data are read in a global order of their samples, a pure function of (seed, epoch); a
stream is cut into batches as it comes. Either way a batch is made under random numbers of its own,
so that it is the same in whatever process it is made and whatever was made before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptcore import Stateful, StateMismatch

from ..arguments import InvalidArgument
from .foreign import ForeignLoader
from .position import Counted, Loader, is_stream, refuse_mismatch, seeded_random, shut_down


def collate(samples: list[Any]) -> Any:
    """torch's way to make a batch of samples, and columns that are lists of numbers become tensors,
    as Hugging Face's does."""
    return default_collate(
        [
            {name: torch.tensor(v) if _is_numbers(v) else v for name, v in sample.items()}
            if isinstance(sample, Mapping) and any(map(_is_numbers, sample.values()))
            else sample
            for sample in samples
        ]
    )


def _is_numbers(value: Any) -> bool:
    """Whether this is a list of numbers, or of such lists."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int | float) or _is_numbers(item) for item in value)
    )


@dataclass
class Options:
    """How batches are made, in workers as in the training process."""

    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    rank: int
    world_size: int
    collate: Callable[[list[Any]], Any]
    call_set_epoch: bool

    @property
    def of_all_ranks(self) -> int:
        """Samples of a batch on all ranks."""
        return self.batch_size * self.world_size

    def batches(self, samples: int) -> int:
        """Batches in that many samples."""
        return (samples if self.drop_last else samples + self.of_all_ranks - 1) // self.of_all_ranks


class ResumableLoader(Loader):
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
    the data set shares the stream among them, as torch wants it, and the ends of their parts may
    make some batches more. Data that are cut into shards of different lengths by rank are read with
    world_size 1 and a loader of ranks.py around it.

    Random numbers drawn while a batch is made (augmentation, masking in `collate_fn`) are a
    function of (seed, epoch, batch), in workers as in this process, whose own generators are left
    alone. A data set with `set_epoch` is told the epoch, in workers too.

    epoch_steps: batches of an epoch where the data have no length; the stream goes on over the end
    of such an epoch, and starts again when it ends. Without it, an epoch of such data lasts until
    they end.
    """

    fixed: tuple[str, ...] = ("shuffle", "drop_last")  # what has to be as it was stored

    def __new__(cls, dataset: Any, *_: Any, **__: Any) -> ResumableLoader:
        return super().__new__(StreamLoader if is_stream(dataset) else MapLoader)

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
        for name, value, reason in (
            ("per_device_train_batch_size", batch_size, "no samples in a batch"),
            ("epoch_train_steps", epoch_steps, "no steps in an epoch"),
        ):
            if value is not None and value < 1:
                raise InvalidArgument(name, value, reason, "give 1 or more")
        super().__init__()
        collate_fn = collate_fn or collate
        self.dataset, self.num_workers = dataset, num_workers
        self.options = Options(
            batch_size, seed, shuffle, drop_last, rank, world_size, collate_fn, call_set_epoch
        )
        self._iterator: Any = None
        size = self._open(
            epoch_steps,
            batch_size=None,
            collate_fn=_as_it_is,
            # Without one torch's loader draws a number from the process's at each epoch's start.
            generator=torch.Generator(),
            num_workers=num_workers,
            pin_memory=pin_memory and torch.cuda.is_available(),
            persistent_workers=persistent_workers and num_workers > 0,
            prefetch_factor=prefetch_factor if num_workers > 0 else None,
        )
        fingerprint = getattr(dataset, "fingerprint", None)
        self._data: dict[str, Any] = dict(fingerprint()) if callable(fingerprint) else size

    def _open(self, epoch_steps: int | None, **how: Any) -> dict[str, Any]:
        """Make torch's loader; how: what it is given. Returns what tells these data from others,
        where they do not say it themselves."""
        raise NotImplementedError

    def _drop(self) -> None:
        """Let go of what was read ahead."""

    def state_dict(self) -> dict[str, Any]:
        options = self.options
        return {
            **super().state_dict(),
            "seed": options.seed,
            "shuffle": options.shuffle,
            "batch_size": options.batch_size,
            "drop_last": options.drop_last,
            "data": dict(self._data),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a stored position, and on in its order: the seed counts. Other data are refused."""
        then, now = (
            {name: found.get(name) for name in self.fixed}
            | {f"data {name}": value for name, value in found["data"].items()}
            for found in (state, self.state_dict())
        )
        refuse_mismatch(then, now)
        self._drop()
        self.options.seed = state["seed"]
        super().load_state_dict(state)


def _as_it_is(item: Any) -> Any:
    return item


# Map-style data.


Key = tuple[int, int, int, list[int]]  # epoch, position, seed, indices


class _Batches(Dataset[Any]):
    """Makes whole batches, in a worker or in the training process."""

    def __init__(self, dataset: Any, options: Options) -> None:
        self.dataset, self.collate, self.rank = dataset, options.collate, options.rank
        self.call_set_epoch = options.call_set_epoch and hasattr(dataset, "set_epoch")
        self.epoch: int | None = None  # that the data set in this process was told

    def __getitem__(self, key: Key) -> Any:
        epoch, position, seed, indices = key
        if self.call_set_epoch and self.epoch != epoch:
            self.dataset.set_epoch(epoch)
            self.epoch = epoch
        many = getattr(self.dataset, "__getitems__", None)
        with seeded_random(seed, epoch, position, self.rank):
            samples = many(indices) if many else [self.dataset[index] for index in indices]
            return self.collate(samples)


class MapLoader(ResumableLoader):
    """A position is the epoch, and how many of its samples all ranks had."""

    def _open(self, epoch_steps: int | None, **how: Any) -> dict[str, Any]:
        self.samples, options = len(self.dataset), self.options
        self._length = options.batches(self.samples)
        self._order: tuple[tuple[int, int, bool], np.ndarray] | None = None
        if self._length == 0:
            everywhere = " on every rank" if options.world_size > 1 else ""
            raise InvalidArgument(
                "per_device_train_batch_size",
                options.batch_size,
                f"{self.samples} samples do not fill one batch{everywhere}",
                "give a smaller batch or more data",
            )
        self._loader = DataLoader(_Batches(self.dataset, options), sampler=_Sampler(self), **how)
        return {"samples": self.samples}

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

    def keys(self) -> Iterator[Key]:
        """The batches that are left of this epoch."""
        order, epoch, options = self.order(self.epoch), self.epoch, self.options
        end = self.position + self.batches_left * options.of_all_ranks
        for position in range(self.position, end, options.of_all_ranks):
            every = order[position : position + options.of_all_ranks]
            mine = every[options.rank :: options.world_size]
            yield epoch, position, options.seed, (mine if len(mine) else every[:1]).tolist()

    @property
    def batches_left(self) -> int:
        return self.options.batches(self.samples - self.position)

    def next_group(self, count: int) -> list[Counted]:
        taken: list[Counted] = []
        options = self.options
        for _ in range(min(count, self.batches_left)):
            if self._iterator is None:
                self._iterator = iter(self._loader)
            batch = next(self._iterator)
            every = min(options.of_all_ranks, self.samples - self.position)
            mine = len(range(options.rank, every, options.world_size))
            taken.append(Counted(batch, mine, every))
            self.position += every
            if self.batches_left == 0:
                self.go_to_epoch(self.epoch + 1)
        return taken

    def _drop(self) -> None:
        if self._iterator is not None and not self._loader.persistent_workers:
            shut_down(self._iterator)
        self._iterator = None

    def go_to_epoch(self, epoch: int) -> None:
        self._drop()
        super().go_to_epoch(epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.batches_left == 0:  # it was stored by another number of ranks
            self.go_to_epoch(self.epoch + 1)

    def close(self) -> None:
        kept = self._loader._iterator if self._iterator is None else self._iterator
        self._iterator = self._loader._iterator = None
        shut_down(kept)


@dataclass(frozen=True)
class _Sampler:
    """The batches of a loader, as torch's asks for them (it reads ahead)."""

    of: MapLoader

    def __iter__(self) -> Iterator[Key]:
        return self.of.keys()


# Streams.


class _Stream(IterableDataset[Any]):
    """Cuts a stream into batches, in each worker the part of the stream that the data set gives
    it. Its state, one in each worker, is how many it has made, and that of the data set."""

    def __init__(self, dataset: Any, options: Options) -> None:
        self.dataset, self.options = dataset, options
        self.stateful = isinstance(dataset, Stateful)
        self.beginning = copy.deepcopy(dataset.state_dict()) if self.stateful else None
        self.made = self.number = 0
        self.resume: dict[str, Any] | None = None

    def set_epoch(self, number: int) -> None:
        """Which pass over the data the next iteration is."""
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        data = copy.deepcopy(self.dataset.state_dict()) if self.stateful else None
        return {"made": self.made, "data": data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume = state

    def __iter__(self) -> Iterator[Counted]:
        options, info = self.options, get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        seed, number = options.seed, self.number
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
                    batch = Counted(options.collate(mine or every[:1]), len(mine), len(every))
                yield batch
        if self.made < resume["made"]:
            facts = {"batches": (f"at least {resume['made']}", str(self.made))}
            raise StateMismatch(
                f"the checkpoint's data position is after batch {resume['made']} of a pass, but "
                f"the data end after {self.made}",
                mismatched=facts,
            )


class StreamLoader(ResumableLoader):
    """A position is the epoch and its batches so far, and where the reader of the stream is, whose
    epochs are passes over the data.

    An epoch is a pass, or `epoch_steps` batches of passes that follow one another.
    """

    # Who reads which part of a stream is a matter of their number.
    fixed = (*ResumableLoader.fixed, "batch_size", "world_size", "num_workers")

    def _open(self, epoch_steps: int | None, **how: Any) -> dict[str, Any]:
        try:
            self._length, self.epoch_steps = self.options.batches(len(self.dataset)) or None, None
        except TypeError:
            self._length = self.epoch_steps = epoch_steps
        # torchdata 0.11 gets the turns of workers that persist wrong from the second pass on.
        how |= {"persistent_workers": False, "generator": None}
        reader = StatefulDataLoader(_Stream(self.dataset, self.options), **how)
        self.reader = ForeignLoader(reader, seed=self.options.seed, counted=_as_it_is, draws=False)
        return {}

    def next_group(self, count: int) -> list[Counted]:
        if self.epoch_steps is None:
            taken = self.reader.next_group(count)
            self.epoch, self.position = self.reader.epoch, self.reader.position
            return taken
        taken, count = [], min(count, self.epoch_steps - self.position)
        while len(taken) < count:
            taken += self.reader.next_group(count - len(taken))
        self.position += count
        if self.position == self.epoch_steps:
            self.epoch, self.position = self.epoch + 1, 0
        return taken

    def go_to_epoch(self, epoch: int) -> None:
        self.close()
        self.reader.go_to_epoch(epoch)
        super().go_to_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "world_size": self.options.world_size,
            "num_workers": self.num_workers,
            "reader": self.reader.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Positions of an earlier version are no states of a reader.
        kind = "with_a_state" if "reader" in state else "that counts batches"
        refuse_mismatch({"loader": "with_a_state"}, {"loader": kind})
        super().load_state_dict(state)
        self.reader.load_state_dict(state["reader"])

    def close(self) -> None:
        self.reader.close()

    _drop = close
