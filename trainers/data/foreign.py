"""Loaders that somebody else built, behind the interface of ResumableLoader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckptcore import Stateful, StateMismatch

from ..arguments import InvalidArgument
from .position import (
    Counted,
    Loader,
    is_stream,
    random_state,
    refuse_mismatch,
    rows_of,
    seed_random,
    seeded_random,
    set_random_state,
    shut_down,
)


def counted_by_rows(batch: Any) -> Counted:
    rows = rows_of(batch)
    return Counted(batch, rows, rows)


class ForeignLoader(Loader):
    """An iterable that gives one epoch of batches each time it is iterated: torch's DataLoader,
    torchdata's StatefulDataLoader, or anything like them.

    It runs under random numbers of its own, seeded by (seed, epoch, rank) when an epoch begins, so
    it shuffles by them unless it has generators, whose states are kept. Samplers and data sets with
    `set_epoch` are told the epoch. A position is reached again through the `state_dict()` of the
    loader if it has one, else by reading on from the start of the epoch: exact in both ways, but
    for random numbers drawn in workers that persist, or that belong to a loader that has a
    `state_dict()`: these are its own affair. On several ranks every rank has its own shard: put it
    into `Agreed`.

    counted: an item of the loader -> the batch with its samples (default: an item is a batch).
    draws: whether what it gives depends on this process's random numbers (default True).
    """

    state_per_rank = True

    def __init__(
        self,
        loader: Any,
        *,
        seed: int,
        rank: int = 0,
        counted: Callable[[Any], Counted] = counted_by_rows,
        call_set_epoch: bool = True,
        draws: bool = True,
    ) -> None:
        dataset = getattr(loader, "dataset", None)
        try:
            # The length of a stream is a guess.
            length = None if dataset is not None and is_stream(dataset) else len(loader)
        except (TypeError, NotImplementedError):
            length = None
        super().__init__(length)
        self.loader, self.counted, self.seed, self.rank = loader, counted, seed, rank
        self.call_set_epoch, self.draws = call_set_epoch, draws
        self.stateful = isinstance(loader, Stateful)
        self._primed = False
        self._iterator: Any = None
        self._ahead: list[Any] = []
        # What belongs to the position, if the loader has read on since.
        self._here: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None
        self._random: Any = None
        self._began = self._generator_states()

    def _parts(self) -> list[Any]:
        batches = getattr(self.loader, "batch_sampler", None)
        found = [batches, getattr(batches, "sampler", None)]
        found += [getattr(self.loader, name, None) for name in ("sampler", "dataset")]
        return list({id(part): part for part in found if part is not None}.values())

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(part, "generator", None) for part in [self.loader, *self._parts()]]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_generators(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)

    def next_group(self, count: int) -> list[Counted]:
        taken: list[Counted] = []
        with seeded_random():
            if self._iterator is None:
                self._open()
            else:
                set_random_state(self._random)
            while len(taken) < count and self._read():
                taken.append(self.counted(self._ahead.pop()))
                self.position += 1
            if not taken:
                kind = type(self.loader).__name__
                raise InvalidArgument("train_dataset", kind, "gives no batch", "give it data")
            if self.stateful:
                random = random_state() if self.draws else None
                state = copy.deepcopy(self.loader.state_dict())
                self._here = {"loader": state, "random": random}
            # Also at the length that it has: loaders clean up when they are read to their end.
            if (self._length is None or self.position >= self._length) and not self._read():
                self.go_to_epoch(self.epoch + 1)
            self._random = random_state()
        return taken

    def _read(self) -> bool:
        if not self._ahead:
            try:
                self._ahead.append(next(self._iterator))
            except StopIteration:
                return False
        return True

    def _open(self) -> None:
        """Begin the epoch, or go on in it."""
        persists = getattr(self.loader, "persistent_workers", False) and not self.stateful
        if persists and not self._primed:
            # The first iteration alone draws a seed for the workers: make it a later one.
            seed_random(self.seed)
            before = self._generator_states()
            iter(self.loader)
            self._set_generators(before)
        self._primed = True
        if self.position > 0:
            self._set_generators(self._began)
        self._began = self._generator_states()
        for part in self._parts() if self.call_set_epoch else ():
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(self.epoch)
        seed_random(self.seed, self.epoch, self.rank)
        resume, self._resume = self._resume, None
        if resume is not None and self.stateful:
            self.loader.load_state_dict(copy.deepcopy(resume["loader"]))
        self._iterator = iter(self.loader)
        if resume is not None:
            if resume["random"] is not None:
                set_random_state(resume["random"])
            return
        for done in range(self.position):
            if next(self._iterator, None) is None:
                raise StateMismatch(
                    f"the checkpoint's data position is after batch {self.position} of an epoch, "
                    f"but the data end after {done}",
                    mismatched={"batches": (f"at least {self.position}", str(done))},
                )

    def go_to_epoch(self, epoch: int) -> None:
        super().go_to_epoch(epoch)
        self._iterator = self._resume = self._here = None
        self._ahead = []
        self._began = self._generator_states()

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "seed": self.seed,
            "batches_per_epoch": self._length,
            "generators": [state.clone() for state in self._began],
            "within": copy.deepcopy(self._here or self._resume) if self.position else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a stored position. One of another length or other generators is refused."""
        stored = state["generators"]
        refuse_mismatch(
            {"batches_per_epoch": state["batches_per_epoch"], "generators": len(stored)},
            {"batches_per_epoch": self._length, "generators": len(self._began)},
        )
        self.seed = state["seed"]
        self._set_generators(stored)
        self.go_to_epoch(state["epoch"])
        self.position = state["position"]
        self._resume = copy.deepcopy(state["within"]) if self.stateful else None

    def close(self) -> None:
        """End the workers of the current epoch."""
        kept, self._iterator, self._ahead = self._iterator, None, []
        self._primed = False
        shut_down(kept)
