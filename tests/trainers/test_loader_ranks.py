"""Loaders of several ranks: threads that exchange through a table, and once real processes over
gloo."""

from __future__ import annotations

import multiprocessing
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ckpt_trainers.data.foreign import ForeignLoader
from ckpt_trainers.data.loader import ResumableLoader
from ckpt_trainers.data.position import has_its_part
from ckpt_trainers.data.ranks import Agreed, DispatchedLoader, share_of
from ckpt_trainers.parallel.environment import DistributedEnvironment
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ckptcore import StateMismatch
from ckptcore.testing.processes import patience


class Numbers:
    def __init__(self, count: int, broken: int = -1) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index == self.broken:
            raise ValueError(f"sample {index} is broken")
        return index


class Shard(IterableDataset[Any]):
    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Any:
        return iter(self.numbers)


class Table:
    """An Exchange between threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20 * patience())
        self.cells: list[Any] = [None] * size

    def seat(self, rank: int) -> Any:
        table = self

        class Seat:
            world_size = table.size

            def __init__(self) -> None:
                self.rank = rank

            def _swap(self, mine: Any, fill: Callable[[Any], None]) -> list[Any]:
                fill(mine)
                table.barrier.wait()
                found = list(table.cells)
                table.barrier.wait()
                return found

            def scatter_objects(self, objects: list[Any] | None) -> Any:
                def fill(objects: list[Any] | None) -> None:
                    if objects is not None:
                        table.cells[:] = objects

                return self._swap(objects, fill)[rank]

            def gather_objects(self, value: Any) -> list[Any]:
                return self._swap(value, lambda mine: table.cells.__setitem__(rank, mine))

        return Seat()


def together(size: int, program: Callable[[int, Any], Any]) -> list[Any]:
    table, results, errors = Table(size), [None] * size, {}

    def run(rank: int) -> None:
        try:
            results[rank] = program(rank, table.seat(rank))
        except BaseException as error:
            errors[rank] = error
            table.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30 * patience())
    if errors:
        raise errors[min(errors)]
    return results


def steps(loader: Any, count: int, group: int = 2) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += [
            (batch.tolist(), here, every, loader.epoch)
            for batch, here, every in loader.next_group(group)
        ]
    return found[:count]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.booleans())
def test_dispatched_batches_are_those_that_ranks_would_read_themselves(
    samples: int, batch: int, size: int, count: int, drop: bool
) -> None:
    if drop and samples < batch * size:
        return

    def program(rank: int, seat: Any) -> Any:
        shared = ResumableLoader(Numbers(samples), batch * size, seed=1, drop_last=drop)
        loader = DispatchedLoader(shared if rank == 0 else None, seat)
        length = loader.batches_per_epoch
        seen = steps(loader, count)
        own = ResumableLoader(
            Numbers(samples), batch, seed=1, drop_last=drop, rank=rank, world_size=size
        )
        assert (length, len(loader)) == (own.batches_per_epoch, len(own))
        assert seen == steps(own, count)
        assert (loader.epoch, loader.epoch_ended, loader.batches_left) == (
            own.epoch,
            own.epoch_ended,
            own.batches_left,
        )
        return loader.state_dict()

    states = together(size, program)
    assert all(state == states[0] for state in states)


@settings(max_examples=15, deadline=None)
@given(st.integers(4, 30), st.integers(1, 3), st.integers(0, 12), st.integers(1, 8))
def test_a_dispatched_position_is_taken_up_by_any_number_of_ranks(
    samples: int, size: int, before: int, after: int
) -> None:
    def loader_of(rank: int, seat: Any, seed: int) -> DispatchedLoader:
        return DispatchedLoader(ResumableLoader(Numbers(samples), 4, seed=seed), seat)

    def whole(rank: int, seat: Any) -> Any:
        return steps(loader_of(rank, seat, 1), before + after, group=1)

    def start(rank: int, seat: Any) -> Any:
        loader = loader_of(rank, seat, 1)
        steps(loader, before, group=1)
        return loader.state_dict()

    (state, *_) = together(2, start)

    def resume(rank: int, seat: Any) -> Any:
        loader = loader_of(rank, seat, 0)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        return steps(loader, after, group=1)

    reference = together(size, whole)
    assert together(size, resume) == [rank[before:] for rank in reference]


def test_what_rank_0_raises_all_ranks_raise() -> None:
    def read(rank: int, seat: Any) -> str:
        loader = DispatchedLoader(
            ResumableLoader(Numbers(8, broken=5), 4, seed=0, shuffle=False), seat
        )
        assert steps(loader, 1, group=1)[0][0] == [[0, 2], [1, 3]][rank]
        with pytest.raises(
            ValueError if rank == 0 else RuntimeError, match="sample 5 is broken"
        ) as raised:
            loader.next_group(1)
        other = ResumableLoader(Numbers(9), 4, seed=0).state_dict()
        with pytest.raises(StateMismatch) as refused:
            loader.load_state_dict(other)
        assert refused.value.mismatched == {
            "data samples": ("9", "8"),
            "shuffle": ("True", "False"),
        }
        loader.go_to_epoch(3)
        assert (loader.epoch, loader.state_dict()["position"]) == (3, 0)
        return str(raised.value)

    assert together(2, read) == [
        "sample 5 is broken",
        "rank 0 failed: ValueError: sample 5 is broken",
    ]


def test_how_a_batch_is_cut() -> None:
    Pair = namedtuple("Pair", "left right")
    batch = {
        "ids": torch.arange(10).view(5, 2),
        "scalar": torch.tensor(3.0),
        "names": ["a", "b", "c", "d", "e"],
        "pair": Pair(torch.arange(5), np.arange(5)),
        "both": [torch.arange(5), torch.arange(4)],
        "whole": "text",
    }
    first, second = share_of(batch, 5, 0, 2), share_of(batch, 5, 1, 2)
    assert first["ids"].tolist() == [[0, 1], [4, 5], [8, 9]] and second["ids"].tolist() == [
        [2, 3],
        [6, 7],
    ]
    assert (second["scalar"], second["names"], second["whole"]) == (3.0, ["b", "d"], "text")
    assert isinstance(second["pair"], Pair) and second["pair"].right.tolist() == [1, 3]
    assert [part.tolist() for part in second["both"]] == [[1, 3], [0, 1, 2, 3]]
    assert second["ids"].untyped_storage().nbytes() == 4 * 8  # not the whole batch
    assert share_of(torch.arange(2), 2, 3, 4).tolist() == [
        0
    ]  # a rank without samples gets the first one


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 14), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(1, 9),
)
def test_shards_of_different_lengths_end_their_epochs_together(
    lengths: list[int], batch: int, group: int, before: int, after: int
) -> None:
    size = len(lengths)
    shortest = min(-(-length // batch) for length in lengths)

    def loader_of(rank: int, seat: Any) -> Agreed:
        numbers = [100 * rank + number for number in range(lengths[rank])]
        return Agreed(ResumableLoader(Shard(numbers), batch, seed=0), seat)

    def whole(rank: int, seat: Any) -> Any:
        return steps(loader_of(rank, seat), before + after, group=1)

    reference = together(size, whole)
    for rank, seen in enumerate(reference):
        for number, (batch_seen, here, every, _) in enumerate(seen):
            first = number % shortest * batch
            assert (
                batch_seen == [100 * rank + n for n in range(lengths[rank])][first : first + batch]
            )
            assert every == sum(other[number][1] for other in reference) and here == len(batch_seen)
    epochs = [[entry[3] for entry in seen] for seen in reference]
    assert all(
        epoch == [(number + 1) // shortest for number in range(before + after)] for epoch in epochs
    )

    def resumed(rank: int, seat: Any) -> Any:
        first = loader_of(rank, seat)
        steps(first, before, group=1)
        second = loader_of(rank, seat)
        second.load_state_dict(first.state_dict())
        assert (second.epoch, second.epoch_ended) == (first.epoch, first.epoch_ended)
        return [entry[:3] for entry in steps(second, after, group)]

    assert together(size, resumed) == [[entry[:3] for entry in seen[before:]] for seen in reference]


def test_agreed_on_what_is_known() -> None:
    def program(rank: int, seat: Any) -> Any:
        known = Agreed(ResumableLoader(Numbers(4 + 4 * rank), 2, seed=0), seat)
        unknown = Agreed(ResumableLoader(Shard([1, 2]) if rank else Numbers(4), 2, seed=0), seat)
        known.next_group(1)
        known_left = known.batches_left
        known.go_to_epoch(2)
        return len(known), known_left, known.epoch, unknown.batches_per_epoch

    assert together(2, program) == [(2, 1, 2, None)] * 2


def process(rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        env = DistributedEnvironment(rank, world_size=2)
        loader = DispatchedLoader(ResumableLoader(Numbers(7), 4, seed=1), env)
        seen = steps(loader, 3, group=1)
        agreed = Agreed(ResumableLoader(Shard(list(range(3 + 2 * rank))), 2, seed=0), env)
        results.put((rank, seen, steps(agreed, 3), loader.state_dict()))
    finally:
        dist.destroy_process_group()


def test_over_gloo(tmp_path: Any) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [
        context.Process(target=process, args=(rank, str(tmp_path / "store"), results))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    found = sorted(results.get(timeout=60 * patience()) for _ in range(2))
    for rank in ranks:
        rank.join(30 * patience())
    assert [rank.exitcode for rank in ranks] == [0, 0]
    whole = ResumableLoader(Numbers(7), 4, seed=1)
    batches = [whole.next_group(1)[0][0].tolist() for _ in range(3)]
    assert [[entry[0] for entry in seen] for _, seen, _, _ in found] == [
        [b[r::2] for b in batches] for r in (0, 1)
    ]
    assert [[entry[:3] for entry in agreed] for _, _, agreed, _ in found] == [
        [([0, 1], 2, 4), ([2], 1, 3), ([0, 1], 2, 4)],
        [([0, 1], 2, 4), ([2, 3], 2, 3), ([0, 1], 2, 4)],
    ]
    assert found[0][3] == found[1][3] == whole.state_dict()


def test_a_sampler_that_deals_out_is_left_to_each_rank() -> None:
    """A DataLoader with torch's DistributedSampler has its part on every rank already: nobody reads
    for the others, and a stopped run goes on in the same epoch."""

    def program(rank: int, seat: Any) -> Any:
        def make() -> Agreed:
            sampler: Any = DistributedSampler(Numbers(10), 2, rank, seed=3)
            data = DataLoader(Numbers(10), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
            assert has_its_part(data) and not has_its_part(DataLoader(Numbers(10)))  # type: ignore[arg-type]
            return Agreed(ForeignLoader(data, seed=1), seat)

        whole = steps(make(), 6, group=1)
        stopped = make()
        steps(stopped, 4, group=1)
        resumed = make()
        resumed.load_state_dict(stopped.state_dict())
        return whole, steps(resumed, 2, group=1)

    (first, resumed), (second, _) = together(2, program)
    assert sorted(number for batch, *_ in first[:3] + second[:3] for number in batch) == [
        *range(10)
    ]
    assert sorted(number for batch, *_ in first[3:] + second[3:] for number in batch) == [
        *range(10)
    ]
    assert first[:3] != first[3:] and resumed == first[4:]
