from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.data.loader import ResumableLoader
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from ckptcore import StateMismatch


class Stream(IterableDataset[Any]):
    """Numbers with what was drawn for them; workers share them like cards. Pass p starts at 1000 *
    p."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for index in range(worker, self.count, workers):
            drawn = [
                random.randrange(2**30),
                int(np.random.randint(2**30)),
                int(torch.randint(2**30, ())),
            ]
            yield torch.tensor([1000 * self.epoch + index, *drawn])


class Resumable(Stream):
    """One with a position of its own; it counts what it has to read."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.next = 0
        self.reads = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.count:
            self.next, index = self.next + 1, self.next
            self.reads += 1
            yield torch.tensor([1000 * self.epoch + index, random.randrange(2**30)])
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Sized(Stream):
    def __len__(self) -> int:
        return self.count


def take(loader: ResumableLoader, batches: int) -> list[Any]:
    return [loader.next_group(1)[0][0].tolist() for _ in range(batches)]


def numbers(batches: list[Any]) -> list[list[int]]:
    return [[row[0] for row in batch] for batch in batches]


def test_an_epoch_is_a_pass_that_ends_where_the_data_end() -> None:
    loader = ResumableLoader(Stream(5), 2, seed=0)
    assert (loader.batches_per_epoch, loader.batches_left) == (None, None)
    with pytest.raises(TypeError):
        len(loader)
    seen = []
    for ends in (False, False, True, False, False, True, False):
        seen += take(loader, 1)
        assert loader.epoch_ended is ends
    assert numbers(seen) == [[0, 1], [2, 3], [4], [1000, 1001], [1002, 1003], [1004], [2000, 2001]]
    assert [len(loader.next_group(9)) for _ in range(2)] == [2, 3]  # to the end of the epoch
    assert ResumableLoader(Stream(5), 2, seed=0, drop_last=True).next_group(9)[-1][1:] == (2, 2)
    assert len(ResumableLoader(Sized(5), 2, seed=0)) == 3


def test_an_epoch_of_so_many_batches_goes_on_in_the_stream() -> None:
    loader = ResumableLoader(Stream(7), 2, seed=0, epoch_steps=3)
    assert (loader.batches_per_epoch, loader.batches_left) == (3, 3)
    assert numbers([batch.tolist() for batch in loader]) == [[0, 1], [2, 3], [4, 5]]
    assert (loader.epoch, loader.epoch_ended) == (1, True)
    # The stream ends in the middle of the epoch and starts again.
    assert numbers([batch.tolist() for batch in loader]) == [[6], [1000, 1001], [1002, 1003]]


@given(
    st.sampled_from([Stream, Resumable]),
    st.integers(1, 25),
    st.integers(1, 4),
    st.sampled_from([None, 1, 3, 5]),
    st.integers(0, 15),
    st.integers(1, 10),
    st.integers(1, 3),
)
def test_stopping_anywhere_changes_nothing(
    kind: type[Stream],
    count: int,
    batch: int,
    steps: int | None,
    before: int,
    after: int,
    group: int,
) -> None:
    whole = take(ResumableLoader(kind(count), batch, seed=4, epoch_steps=steps), before + after)
    loader = ResumableLoader(kind(count), batch, seed=4, epoch_steps=steps)
    assert take(loader, before) == whole[:before]
    again = ResumableLoader(kind(count), batch, seed=0, epoch_steps=steps)
    again.load_state_dict(loader.state_dict())
    assert again.state_dict() == loader.state_dict()
    rest: list[Any] = []
    while len(rest) < after:
        got = again.next_group(group)
        assert got
        rest += [batch.tolist() for batch, _, _ in got]
    assert rest[:after] == whole[before:]


def test_data_with_a_position_of_their_own_are_not_read_again() -> None:
    loader = ResumableLoader(Resumable(100), 2, seed=4)
    whole = take(loader, 40)
    state = loader.state_dict()
    assert "{'next': 80}" in str(
        state["reader"]["within"]
    )  # the batch that was read ahead does not count
    rest = take(loader, 15)
    data = Resumable(100)
    again = ResumableLoader(data, 2, seed=4)
    again.load_state_dict(state)
    assert take(again, 5) == rest[:5]
    assert data.reads == 5 * 2 + 2
    # Back in the same loader, to the start of an epoch too, though the data remember where they
    # are.
    again.load_state_dict(state)
    assert take(again, 15) == rest
    again.go_to_epoch(0)
    assert take(again, 40) == whole


def test_data_with_positions_of_their_own_are_not_read_again_in_workers_either() -> None:
    """Each of two workers has the whole stream here, and goes on where it was."""
    loader = ResumableLoader(Resumable(40), 2, seed=4, num_workers=2)
    whole = take(loader, 30)
    first = ResumableLoader(Resumable(40), 2, seed=4, num_workers=2)
    take(first, 7)
    state = first.state_dict()
    assert "{'next': 8}" in str(state["reader"]["within"]) and "{'next': 6}" in str(
        state["reader"]["within"]
    )
    again = ResumableLoader(Resumable(40), 2, seed=0, num_workers=2)
    again.load_state_dict(state)
    assert take(again, 23) == whole[7:]
    for opened in (loader, first, again):
        opened.close()


def test_a_position_that_counts_batches_alone_is_refused() -> None:
    loader = ResumableLoader(Stream(9), 2, seed=8)
    state = loader.state_dict()
    del state["reader"]
    with pytest.raises(StateMismatch, match="loader was with_a_state, is that counts batches"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_share_a_stream_and_stop_anywhere(persistent: bool) -> None:
    """9 numbers for two workers: batches of 2, 2, 2, 2 and 1, in turns."""

    def make(seed: int) -> ResumableLoader:
        return ResumableLoader(
            Stream(9), 2, seed=seed, num_workers=2, persistent_workers=persistent
        )

    loader = make(8)
    states, whole = [loader.state_dict()], []
    for _ in range(12):
        whole += take(loader, 1)
        states.append(loader.state_dict())
    assert numbers(whole[:6]) == [[0, 2], [1, 3], [4, 6], [5, 7], [8], [1000, 1002]]
    again = make(0)
    for stop in (1, 4, 5, 6, 9, 10):
        again.load_state_dict(states[stop])
        assert take(again, 12 - stop) == whole[stop:], stop
    loader.close(), again.close()


@given(st.integers(1, 30), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_ranks_deal_out_the_stream_and_end_together(
    count: int, batch: int, world: int, drop: bool
) -> None:
    if drop and count < batch * world:
        return
    ranks = [
        ResumableLoader(Stream(count), batch, seed=1, drop_last=drop, rank=rank, world_size=world)
        for rank in range(world)
    ]
    seen: list[int] = []
    while ranks[0].epoch == 0:
        groups = [rank.next_group(1)[0] for rank in ranks]
        assert {every for _, _, every in groups} == {sum(here for _, here, _ in groups)}
        for rows, here, _ in groups:
            assert len(rows) == max(here, 1)
            seen += rows[:here, 0].tolist()
    whole = count - count % (batch * world) if drop else count
    assert sorted(seen) == list(range(whole))
    assert all(rank.epoch_ended for rank in ranks)
    assert len({str(rank.state_dict()) for rank in ranks}) == 1


def test_the_random_numbers_of_the_process_are_left_alone() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    take(ResumableLoader(Stream(5), 2, seed=0), 7)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[index]


def test_what_does_not_fit_is_refused() -> None:
    loader = ResumableLoader(Stream(20), 2, seed=0)
    take(loader, 4)
    state = loader.state_dict()
    for changes in ({"world_size": 2}, {"num_workers": 1}):
        with pytest.raises(StateMismatch) as raised:
            ResumableLoader(Stream(20), 2, seed=0, **changes).load_state_dict(state)  # type: ignore[arg-type]
        assert raised.value.mismatched is not None and set(raised.value.mismatched) == set(changes)
    shorter = ResumableLoader(Stream(5), 2, seed=0)
    shorter.load_state_dict(state)
    with pytest.raises(StateMismatch, match="after batch 4 of a pass, but the data end after 3"):
        shorter.next_group(1)
    for steps in (None, 3):
        with pytest.raises(InvalidArgument, match="gives no batch"):
            ResumableLoader(Stream(0), 2, seed=0, epoch_steps=steps).next_group(1)
