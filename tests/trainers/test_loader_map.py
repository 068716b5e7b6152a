from __future__ import annotations

import multiprocessing
import random
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.data.corpus import ByteWindows
from ckpt_trainers.data.loader import ResumableLoader
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import StateMismatch
from ckptcore.testing.processes import patience


class Numbers:
    """Sample i is the number i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Numbers):
    """Sample i with random numbers of every kind that a data set draws."""

    def __getitem__(self, index: int) -> Any:
        drawn = [
            random.randrange(2**30),
            int(np.random.randint(2**30)),
            int(torch.randint(2**30, ())),
        ]
        return torch.tensor([index, *drawn])


class Epochal(Numbers):
    """Sample i of epoch e is 1000 * e + i."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 1000 * self.epoch + index


def take(loader: Any, batches: int) -> list[Any]:
    return [loader.next_group(1)[0][0].tolist() for _ in range(batches)]


loaders = st.builds(
    lambda samples, batch, seed, drop, shuffle: ResumableLoader(
        Numbers(max(samples, batch)), batch, seed=seed, drop_last=drop, shuffle=shuffle
    ),
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.booleans(),
)


def like(loader: ResumableLoader, seed: int | None = None, **changes: Any) -> ResumableLoader:
    options = loader.options
    return ResumableLoader(
        loader.dataset,
        options.batch_size,
        seed=options.seed if seed is None else seed,
        drop_last=options.drop_last,
        shuffle=options.shuffle,
        **changes,
    )


def order(loader: ResumableLoader, epoch: int) -> list[int]:
    return loader.order(epoch).tolist()  # type: ignore[attr-defined, no-any-return]


@given(loaders, st.integers(0, 5))
def test_an_epoch_holds_every_sample_once(loader: ResumableLoader, epoch: int) -> None:
    samples = len(loader.dataset)
    assert sorted(order(loader, epoch)) == list(range(samples))
    if not loader.options.shuffle:
        assert order(loader, epoch) == list(range(samples))
    take(loader, epoch * len(loader))
    assert loader.epoch_ended == (epoch > 0) and loader.batches_left == len(loader)
    batches = [batch.tolist() for batch in loader]
    assert len(batches) == len(loader) == loader.batches_per_epoch
    seen = [index for batch in batches for index in batch]
    whole = len(loader) * loader.options.batch_size if loader.options.drop_last else samples
    assert seen == order(loader, epoch)[:whole]
    assert (loader.epoch, loader.state_dict()["position"], loader.epoch_ended) == (
        epoch + 1,
        0,
        True,
    )


@given(loaders, st.integers(0, 40), st.integers(1, 40), st.integers(1, 5))
def test_stopping_anywhere_changes_nothing(
    loader: ResumableLoader, before: int, after: int, group: int
) -> None:
    whole = take(like(loader), before + after)
    assert take(loader, before) == whole[:before]
    # The seed of the new process does not matter: the position brings its own.
    again = like(loader, seed=0)
    again.load_state_dict(loader.state_dict())
    assert again.state_dict() == loader.state_dict()
    rest: list[Any] = []
    while len(rest) < after:
        left = again.batches_left
        got = again.next_group(group)
        assert left is not None and len(got) == min(
            group, left
        )  # never none, never past the end of the epoch
        rest += [batch.tolist() for batch, _, _ in got]
    assert rest[:after] == whole[before:]


@given(st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_order_is_a_pure_function_of_seed_and_epoch(seed: int, epoch: int) -> None:
    used = ResumableLoader(Numbers(50), 7, seed=seed)
    take(used, 20)
    torch.rand(3), np.random.rand(3)
    assert order(used, epoch) == order(ResumableLoader(Numbers(50), 3, seed=seed), epoch)
    assert order(used, epoch) != order(used, epoch + 1)
    assert order(used, epoch) != order(ResumableLoader(Numbers(50), 7, seed=seed + 1), epoch)


def test_order_is_the_same_for_good() -> None:
    """A resumed run meets the order of the run that it goes on from, after any upgrade."""
    loader = ResumableLoader(Numbers(10), 1, seed=7)
    assert order(loader, 0) == [8, 4, 3, 6, 2, 1, 0, 5, 9, 7]
    assert order(loader, 1) == [7, 9, 6, 1, 4, 8, 3, 2, 5, 0]


def ranks_of(loader: ResumableLoader, world_size: int) -> list[ResumableLoader]:
    return [like(loader, rank=rank, world_size=world_size) for rank in range(world_size)]


@given(loaders, st.integers(1, 8))
def test_ranks_share_an_epoch_and_end_it_together(loader: ResumableLoader, world_size: int) -> None:
    if loader.options.drop_last and len(loader.dataset) < loader.options.batch_size * world_size:
        return
    ranks = ranks_of(loader, world_size)
    count = len(ranks[0])
    seen: list[int] = []
    for number in range(count):
        groups = [rank.next_group(1)[0] for rank in ranks]
        for batch, here, every in groups:
            assert len(batch) == max(here, 1) and every == sum(own for _, own, _ in groups)
            seen += batch.tolist()[:here]
        sizes = [here for _, here, _ in groups]
        assert max(sizes) - min(sizes) <= 1 and max(sizes) <= loader.options.batch_size
        assert len({str(rank.state_dict()) for rank in ranks}) == 1
        assert all(rank.epoch_ended is (number == count - 1) for rank in ranks)
    whole = (
        count * ranks[0].options.of_all_ranks if loader.options.drop_last else len(loader.dataset)
    )
    assert sorted(seen) == sorted(order(loader, 0)[:whole])  # disjoint, and all of them


@given(loaders, st.integers(1, 5), st.integers(1, 5), st.integers(0, 12))
def test_a_position_means_the_same_for_any_number_of_ranks(
    loader: ResumableLoader, before: int, after: int, batches: int
) -> None:
    loader.options.drop_last = False
    old, new = ranks_of(loader, before), ranks_of(loader, after)
    take(old[0], batches)
    epoch, position = old[0].epoch, old[0].state_dict()["position"]
    for rank in new:
        rank.load_state_dict(old[0].state_dict())
    rest: list[int] = []
    while new[0].epoch == epoch:
        for rank in new:
            batch, here, _ = rank.next_group(1)[0]
            rest += batch.tolist()[:here]
    assert sorted(rest) == sorted(order(loader, epoch)[position:])


def test_a_position_in_what_another_number_of_ranks_drops_is_the_next_epoch() -> None:
    old = ResumableLoader(Numbers(10), 1, seed=0, drop_last=True, world_size=3)
    take(old, 2)
    new = ResumableLoader(Numbers(10), 1, seed=0, drop_last=True, world_size=5)
    new.load_state_dict(old.state_dict())
    assert (old.epoch, old.state_dict()["position"]) == (0, 6)
    assert (new.epoch, new.state_dict()["position"], new.epoch_ended) == (1, 0, True)


def loader_on(text: bytes, block: int = 4, batch: int = 2) -> ResumableLoader:
    return ResumableLoader(
        ByteWindows(torch.frombuffer(bytearray(text), dtype=torch.uint8), block), batch, seed=1
    )


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        (loader_on(bytes(99) + b"x"), "data xxh3_128"),
        (loader_on(bytes(101)), "data bytes"),
        (loader_on(bytes(100), block=5), "data block_size"),
    ],
)
def test_a_position_in_other_data_is_refused(other: ResumableLoader, fact: str) -> None:
    loader = loader_on(bytes(100))
    loader.next_group(1)
    other.next_group(1)
    before = other.state_dict()
    with pytest.raises(StateMismatch, match=fact) as raised:
        other.load_state_dict(loader.state_dict())
    assert raised.value.mismatched is not None and fact in raised.value.mismatched
    assert other.state_dict() == before


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4)])
def test_another_batch_size_goes_on_at_the_same_sample(before: int, after: int) -> None:
    """A position is so many samples: the rest of the epoch comes in the same order, in other
    batches."""

    def rest(loader: ResumableLoader) -> list[int]:
        found: list[int] = []
        while not found or not loader.epoch_ended:
            for batch, samples, _ in loader.next_group(1):
                found += batch["input_ids"][:samples, 0].tolist()
        return found

    text = bytes(range(100))
    reference, other = loader_on(text, batch=before), loader_on(text, batch=after)
    reference.next_group(2)
    other.load_state_dict(reference.state_dict())
    expected = rest(reference)
    assert len(expected) == 24 - 2 * before
    assert rest(other) == expected


def test_too_few_samples_for_a_batch() -> None:
    with pytest.raises(InvalidArgument, match="per_device_train_batch_size=4"):
        ResumableLoader(Numbers(3), 4, seed=0, drop_last=True)
    assert len(ResumableLoader(Numbers(3), 4, seed=0)) == 1


@pytest.mark.parametrize(
    ("workers", "every"), [(0, 1), (2, 5), pytest.param(2, 1, marks=pytest.mark.stress)]
)
def test_b09_stop_and_resume_anywhere_sees_what_an_uninterrupted_run_sees(
    workers: int, every: int
) -> None:
    """12 samples, batches of 2, shuffled, 3 epochs; stopped after every step, or every fifth, and
    resumed in another process."""
    loader = ResumableLoader(Augmented(12), 2, seed=11, num_workers=workers)
    states, reference = [], []
    for _ in range(18):
        reference += take(loader, 1)
        states.append(loader.state_dict())
    assert [sorted(row[0] for b in reference[e : e + 6] for row in b) for e in (0, 6, 12)] == [
        [*range(12)]
    ] * 3
    assert reference[:6] != reference[6:12] != reference[12:]
    stops = range(1, 18, every)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=resume_all, args=(states, stops, workers, results))
    process.start()
    resumed = results.get(timeout=60 * patience())
    process.join(30 * patience())
    assert [reference[:k] + rest for k, rest in zip(stops, resumed, strict=True)] == [
        reference
    ] * len(stops)


def resume_all(states: list[dict[str, Any]], stops: range, workers: int, results: Any) -> None:
    found = []
    for done in stops:
        loader = ResumableLoader(Augmented(12), 2, seed=0, num_workers=workers)
        loader.load_state_dict(states[done - 1])
        found.append(take(loader, 18 - done))
        loader.close()
    results.put(found)


@pytest.mark.parametrize("persistent", [False, True])
def test_b09_with_workers_at_every_stop(persistent: bool) -> None:
    """Augmented by random numbers in the workers; the one loader goes back and forth."""
    reference = take(ResumableLoader(Augmented(12), 2, seed=11), 18)
    loader = ResumableLoader(
        Augmented(12), 2, seed=11, num_workers=2, persistent_workers=persistent, prefetch_factor=3
    )
    states = [loader.state_dict()]
    seen = []
    for _ in range(18):
        seen += take(loader, 1)
        states.append(loader.state_dict())
    assert seen == reference
    for stop in (3, 5, 6, 7, 11, 12, 13, 17):
        loader.load_state_dict(states[stop])
        steps = min(7, 18 - stop)
        assert take(loader, steps) == reference[stop : stop + steps], stop
        assert loader.state_dict() == states[stop + steps]
    loader.close()
    assert not multiprocessing.active_children()


@settings(max_examples=6, deadline=None)
@given(
    st.integers(8, 30), st.integers(1, 4), st.integers(0, 2), st.integers(0, 9), st.integers(1, 9)
)
def test_workers_and_ranks_change_nothing(
    samples: int, batch: int, rank: int, before: int, after: int
) -> None:
    def make(workers: int, seed: int = 5) -> ResumableLoader:
        return ResumableLoader(
            Augmented(samples),
            batch,
            seed=seed,
            rank=rank,
            world_size=3,
            num_workers=workers,
            persistent_workers=True,
        )

    whole = take(make(0), before + after)
    worked, again = make(1), make(2, seed=0)
    assert take(worked, before) == whole[:before]
    again.load_state_dict(worked.state_dict())
    assert take(again, after) == whole[before:]
    worked.close(), again.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_random_numbers_of_the_process_are_left_alone(workers: int) -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    loader = ResumableLoader(Augmented(9), 2, seed=1, num_workers=workers)
    first = take(loader, 12)
    loader.close()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[index]
    torch.rand(5), random.random()
    # And what the process draws does not reach the data; no two samples are given the same numbers.
    assert take(ResumableLoader(Augmented(9), 2, seed=1), 12) == first
    drawn = [number for batch in first for row in batch for number in row[1:]]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, True)])
def test_the_data_set_knows_the_epoch_everywhere(workers: int, persistent: bool) -> None:
    def make(**changes: Any) -> ResumableLoader:
        return ResumableLoader(
            Epochal(4), 2, seed=0, num_workers=workers, persistent_workers=persistent, **changes
        )

    loader = make(shuffle=False)
    assert take(loader, 6) == [
        [0, 1],
        [2, 3],
        [1000, 1001],
        [1002, 1003],
        [2000, 2001],
        [2002, 2003],
    ]
    loader.go_to_epoch(7)
    assert take(loader, 1) == [[7000, 7001]]
    again = make(shuffle=False)
    again.load_state_dict(loader.state_dict())
    assert take(again, 2) == [[7002, 7003], [8000, 8001]]
    untold = make(shuffle=False, call_set_epoch=False)
    assert take(untold, 3)[2] == [0, 1]
    for each in (loader, again, untold):
        each.close()


class Many(Numbers):
    """Gives many samples at once, as data sets of tables do."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        assert all(type(index) is int for index in indices)
        return [index * 10 for index in indices]


def test_many_samples_at_once_and_a_collate_function_of_ones_own() -> None:
    loader = ResumableLoader(
        Many(5), 2, seed=0, shuffle=False, collate_fn=lambda samples: {"sum": sum(samples)}
    )
    assert loader.next_group(9) == [({"sum": 10}, 2, 2), ({"sum": 50}, 2, 2), ({"sum": 40}, 1, 1)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_reaches_the_caller(workers: int) -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise ValueError("sample 3 is broken")
            return index

    loader = ResumableLoader(Broken(6), 2, seed=0, shuffle=False, num_workers=workers)
    assert take(loader, 1) == [[0, 1]]
    with pytest.raises(ValueError, match="sample 3 is broken"):
        loader.next_group(1)
    assert loader.state_dict()["position"] == 2
    loader.close()
