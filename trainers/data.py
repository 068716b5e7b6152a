"""Bytes of real text, cut into windows, in an order that can be taken up again anywhere."""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import default_collate

from ckptcore import StateMismatch

from .arguments import DataNotFound, InvalidArgument

__all__ = ["ByteWindows", "ResumableLoader", "find_files", "read_corpus", "split_corpus"]

_INSTALLED = {"site-packages", "dist-packages"}


def find_files(entries: Sequence[str] = ()) -> list[Path]:
    """The files that `entries` (files, folders, globs) name, each once, in an order that does not vary.

    A folder stands for all files below it but hidden ones. No entries: the sources of the Python
    standard library.
    """
    if not entries:
        library = Path(sysconfig.get_path("stdlib"))
        below = (path.relative_to(library) for path in library.rglob("*.py"))
        names = sorted(path.as_posix() for path in below if _INSTALLED.isdisjoint(path.parts))
        if not names:
            raise DataNotFound(f"no .py files in {library}; name the text with --data", path=str(library))
        return [library / name for name in names]
    found: dict[Path, None] = {}
    for entry in entries:
        matches = [Path(entry)] if Path(entry).exists() else sorted(map(Path, glob.glob(entry, recursive=True)))
        files = [file for match in matches for file in (_below(match) if match.is_dir() else [match])]
        if not files:
            raise DataNotFound(f"data: {entry!r} names no file", path=entry)
        found.update(dict.fromkeys(files))
    return list(found)


def _below(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file())
    shown = (f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts))
    return sorted(shown, key=lambda path: path.relative_to(folder).as_posix())


def read_corpus(entries: Sequence[str] = (), max_bytes: int | None = None) -> Tensor:
    """All bytes of the files, one after another, as one uint8 tensor of at most `max_bytes`."""
    text = bytearray()
    for file in find_files(entries):
        with file.open("rb") as stream:
            text += stream.read(-1 if max_bytes is None else max_bytes - len(text))
        if max_bytes is not None and len(text) >= max_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def split_corpus(corpus: Tensor, block_size: int, validation: float = 0.05) -> tuple[ByteWindows, ByteWindows]:
    """Training windows from the front, validation windows from the back; no byte is in both."""
    held_out = max(int(len(corpus) * validation), block_size + 1)
    if len(corpus) < held_out + block_size + 1:
        raise InvalidArgument(
            "data",
            f"{len(corpus)} bytes",
            f"too short for one training and one validation window of {block_size} bytes",
            "name more data or give a smaller block_size",
        )
    cut = len(corpus) - held_out
    return ByteWindows(corpus[:cut], block_size), ByteWindows(corpus[cut:], block_size)


class ByteWindows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Window i: bytes [i*n, i*n+n) as input and, one further on, as labels."""

    def __init__(self, corpus: Tensor, block_size: int) -> None:
        self.corpus = corpus
        self.block_size = block_size

    def __len__(self) -> int:
        return max(0, (len(self.corpus) - 1) // self.block_size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.block_size
        window = self.corpus[start : start + self.block_size + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}

    def fingerprint(self) -> dict[str, Any]:
        """What tells this data from other data."""
        digest = xxhash.xxh3_128_hexdigest(self.corpus.numpy().data)
        return {"bytes": len(self.corpus), "xxh3_128": digest, "block_size": self.block_size}


class SizedDataset(Protocol):
    """A map-style dataset. One that has a `fingerprint()` of plain values is known again by it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ResumableLoader:
    """Shuffled batches without end, epoch after epoch; on several ranks, this rank's share of them.

    The order of an epoch is a pure function of (seed, epoch), so a position is two numbers: the epoch and
    how many of its samples are used. The position after the last batch of an epoch is the start of the next
    one, so equal positions have equal states. Ranks are dealt each `batch_size * world_size` samples of the
    order like cards: their samples are disjoint, their epochs end at the same batch, and a position means the
    same for any number of ranks.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        batch_size: int,
        seed: int,
        drop_last: bool = False,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.drop_last = drop_last
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.position = 0  # samples of the epoch that all ranks together have had
        self._order: tuple[tuple[int, int], np.ndarray] | None = None  # of one (seed, epoch)
        if len(self) == 0:
            raise InvalidArgument(
                "per_device_train_batch_size",
                batch_size,
                f"{len(dataset)} samples do not fill one batch" + (" on every rank" if world_size > 1 else ""),
                "give a smaller batch or more data",
            )
        fingerprint = getattr(dataset, "fingerprint", None)
        self._data: dict[str, Any] = fingerprint() if fingerprint else {"samples": len(dataset)}

    def __len__(self) -> int:
        """Batches per epoch."""
        return self._batches(len(self.dataset))

    @property
    def left_in_epoch(self) -> int:
        return self._batches(len(self.dataset) - self.position)

    def _batches(self, samples: int) -> int:
        together = self.batch_size * self.world_size
        return samples // together if self.drop_last else -(-samples // together)

    def next_sizes(self, count: int) -> list[tuple[int, int]]:
        """Samples of this rank and of all ranks in each of the next `count` batches of this epoch."""
        together, left = self.batch_size * self.world_size, len(self.dataset) - self.position
        all_ranks = [min(together, left - number * together) for number in range(count)]
        return [(len(range(self.rank, samples, self.world_size)), samples) for samples in all_ranks]

    def order(self, epoch: int) -> np.ndarray:
        """Sample indices of an epoch: a sort by random keys.

        numpy promises the stream of a bit generator for good, other than that of its `permutation`, so
        the order stays the same after an upgrade and on another machine.
        """
        if self._order is None or self._order[0] != (self.seed, epoch):
            source = np.random.Philox(np.random.SeedSequence((self.seed, epoch)))
            keys = source.random_raw(len(self.dataset))
            self._order = (self.seed, epoch), np.argsort(keys, kind="stable")
        return self._order[1]

    def next_batch(self) -> Any:
        """This rank's next batch. Where an epoch ends with fewer samples than ranks, those without one get one of
        another rank: `next_sizes` counts it as none, and they can take part in the step all the same."""
        indices = self.order(self.epoch)[self.position : self.position + self.batch_size * self.world_size]
        mine = indices[self.rank :: self.world_size]
        batch = default_collate([self.dataset[int(index)] for index in (mine if len(mine) else indices[:1])])
        self._go_to(self.epoch, self.position + len(indices))
        return batch

    def _go_to(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        if self.left_in_epoch == 0:
            self.epoch, self.position = epoch + 1, 0

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left of the current epoch."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "data": dict(self._data),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a stored position, and on in its order: the seed is taken over. Other data are refused."""
        here = self.state_dict()
        mismatched = {
            name: (str(state[name]), str(here[name]))
            for name in ("batch_size", "drop_last")
            if state[name] != here[name]
        }
        then, now = state["data"], here["data"]
        mismatched |= {
            f"data {name}": (str(then.get(name)), str(now.get(name)))
            for name in sorted(then.keys() | now.keys())
            if then.get(name) != now.get(name)
        }
        if mismatched:
            facts = "; ".join(f"{name} was {old}, is {new}" for name, (old, new) in mismatched.items())
            raise StateMismatch(
                "the checkpoint's data position does not fit this data and batch size: "
                f"{facts}. Give the run the data and batch size that it was started with, "
                "or start another one in a new output_dir",
                mismatched=mismatched,
            )
        self.seed = state["seed"]
        self._go_to(state["epoch"], state["position"])
