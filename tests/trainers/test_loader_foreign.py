from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.data.foreign import ForeignLoader
from ckpt_trainers.data.position import rows_of
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptcore import CheckpointManager, StateMismatch


class Augmented(Dataset[Any]):
    def __init__(self, count: int = 11) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(
            [
                index,
                random.randrange(2**30),
                int(np.random.randint(2**30)),
                int(torch.randint(9, ())),
            ]
        )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        yield from range(7)


def numbers(batches: list[Any]) -> list[Any]:
    return [batch[:, 0].tolist() if batch.ndim == 2 else batch.tolist() for batch in batches]


def take(loader: ForeignLoader, batches: int) -> list[Any]:
    return [loader.next_group(1)[0][0] for _ in range(batches)]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(17)


MAKERS: dict[str, tuple[Callable[[], Any], int]] = {
    "plain": (lambda: DataLoader(Augmented(), 3, shuffle=True), 4),
    "with a generator": (
        lambda: DataLoader(Augmented(), 3, shuffle=True, generator=generator()),
        4,
    ),
    "with workers": (lambda: DataLoader(Augmented(), 3, shuffle=True, num_workers=2), 4),
    "persistent": (
        lambda: DataLoader(range(11), 3, shuffle=True, num_workers=1, persistent_workers=True),
        4,
    ),
    "stream": (lambda: DataLoader(Stream(), 3), 3),
    "stateful": (lambda: StatefulDataLoader(Augmented(), 3, shuffle=True), 4),
    "stateful with workers": (
        lambda: StatefulDataLoader(range(11), 3, shuffle=True, num_workers=2),
        4,
    ),
    "stateful stream": (lambda: StatefulDataLoader(Stream(), 3), 3),
    "distributed": (
        lambda: DataLoader(
            Augmented(), 3, sampler=DistributedSampler(Augmented(), num_replicas=1, rank=0)
        ),
        4,
    ),
    "list of batches": (lambda: [torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5])], 3),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_b09_loaders_of_others_go_on_where_they_stopped(kind: str) -> None:
    make, length = MAKERS[kind]
    total = 3 * length
    loader = ForeignLoader(make(), seed=3)
    torch.manual_seed(1), random.seed(1)
    states, reference, ends = [loader.state_dict()], [], []
    for _ in range(total):
        reference += take(loader, 1)
        states.append(loader.state_dict())
        ends.append(loader.epoch_ended)
    assert ends == [number % length == 0 for number in range(1, total + 1)]
    epochs = [
        [n for batch in numbers(reference[e : e + length]) for n in batch]
        for e in range(0, total, length)
    ]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and len(
        set(epochs[0])
    ) == len(epochs[0])
    shuffled = kind not in ("stream", "stateful stream", "list of batches")
    assert (epochs[0] != epochs[1] != epochs[2]) is shuffled
    loader.close()
    stops = (
        range(1, total)
        if "workers" not in kind and kind != "persistent"
        else (1, length, length + 1, total - 1)
    )
    for stop in stops:
        torch.manual_seed(stop), random.seed(stop)  # a process in another state
        again = ForeignLoader(make(), seed=0)
        again.load_state_dict(states[stop])
        assert again.state_dict().keys() == states[stop].keys()
        assert same(take(again, total - stop), reference[stop:]), stop
        again.close()


@pytest.mark.parametrize("kind", ["plain", "stateful", "with workers"])
def test_the_random_numbers_of_the_process_are_left_alone(kind: str) -> None:
    made = MAKERS[kind][0]()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    loader = ForeignLoader(made, seed=3)
    take(loader, 5)
    loader.close()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[index]


@pytest.mark.parametrize("kind", ["with a generator", "stateful", "stateful with workers"])
def test_the_engine_keeps_their_positions(kind: str, tmp_path: Path) -> None:
    first, second = (ForeignLoader(MAKERS[kind][0](), seed=seed) for seed in (3, 0))
    take(first, 6)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(6, {"data": first})
        checkpoints.load({"data": second})
    assert same(take(second, 5), take(first, 5))
    first.close(), second.close()


def test_groups_end_with_the_epoch_and_samples_are_counted() -> None:
    loader = ForeignLoader(MAKERS["plain"][0](), seed=3)
    assert (len(loader), loader.batches_left, loader.epoch_ended) == (4, 4, False)
    assert [tuple(sizes) for _, *sizes in loader.next_group(3)] == [(3, 3)] * 3
    assert loader.batches_left == 1
    assert [tuple(sizes) for _, *sizes in loader.next_group(3)] == [(2, 2)]
    assert (loader.epoch, loader.epoch_ended, loader.batches_left) == (1, True, 4)
    unknown = ForeignLoader(DataLoader(Stream(), 3), seed=3)
    assert (unknown.batches_per_epoch, unknown.batches_left) == (None, None)
    assert numbers(list(unknown)) == [[0, 1, 2], [3, 4, 5], [6]]
    unknown.next_group(1)
    unknown.go_to_epoch(5)
    assert numbers(list(unknown)) == [[0, 1, 2], [3, 4, 5], [6]] and unknown.epoch == 6


def test_rows() -> None:
    assert rows_of({"text": ["a", "b"], "ids": torch.zeros(4, 2), "n": torch.tensor(9)}) == 4
    assert rows_of([torch.zeros(()), (torch.zeros(3),)]) == 3
    assert rows_of(["a", "b"]) == 2


def test_what_does_not_fit_is_refused() -> None:
    loader = ForeignLoader(DataLoader(Augmented(11), 3), seed=0)
    take(loader, 2)
    for other in (DataLoader(Augmented(6), 3), DataLoader(Augmented(11), 3, generator=generator())):
        with pytest.raises(StateMismatch) as raised:
            ForeignLoader(other, seed=0).load_state_dict(loader.state_dict())
        assert raised.value.mismatched in (
            {"batches_per_epoch": ("4", "2")},
            {"generators": ("0", "1")},
        )
    shorter = ForeignLoader(iter_of(1), seed=0)
    shorter.load_state_dict({**ForeignLoader(iter_of(3), seed=0).state_dict(), "position": 2})
    with pytest.raises(StateMismatch, match="after batch 2 of an epoch, but the data end after 1"):
        shorter.next_group(1)
    with pytest.raises(InvalidArgument, match="gives no batch"):
        ForeignLoader(iter_of(0), seed=0).next_group(1)


def iter_of(count: int) -> Any:
    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return (torch.tensor([number]) for number in range(count))

    return Batches()
