from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from ckpt_trainers.arguments import DataNotFound, InvalidArgument
from ckpt_trainers.data import ByteWindows, ResumableLoader, find_files, read_corpus, split_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import StateMismatch


class Numbers:
    """Sample i is the number i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def take(loader: ResumableLoader, batches: int) -> list[list[int]]:
    return [loader.next_batch().tolist() for _ in range(batches)]


loaders = st.builds(
    lambda samples, batch, seed, drop: ResumableLoader(Numbers(max(samples, batch)), batch, seed, drop),
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)


@given(loaders, st.integers(0, 5))
def test_an_epoch_holds_every_sample_once(loader: ResumableLoader, epoch: int) -> None:
    assert sorted(loader.order(epoch)) == list(range(len(loader.dataset)))
    take(loader, epoch * len(loader))
    batches = [batch.tolist() for batch in loader]
    assert len(batches) == len(loader)
    seen = [index for batch in batches for index in batch]
    whole = len(loader) * loader.batch_size if loader.drop_last else len(loader.dataset)
    assert seen == loader.order(epoch)[:whole].tolist()
    assert (loader.epoch, loader.position) == (epoch + 1, 0)


@given(loaders, st.integers(0, 40), st.integers(1, 40))
def test_stopping_anywhere_changes_nothing(loader: ResumableLoader, before: int, after: int) -> None:
    whole = take(ResumableLoader(loader.dataset, loader.batch_size, loader.seed, loader.drop_last), before + after)
    assert take(loader, before) == whole[:before]
    # The seed of the new process does not matter: the position brings its own.
    again = ResumableLoader(loader.dataset, loader.batch_size, 0, loader.drop_last)
    again.load_state_dict(loader.state_dict())
    assert take(again, after) == whole[before:]


@given(loaders, st.integers(0, 3))
def test_at_an_epoch_boundary_the_position_is_the_start_of_the_next(loader: ResumableLoader, epochs: int) -> None:
    take(loader, epochs * len(loader))
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (epochs, 0)
    assert loader.left_in_epoch == len(loader)


@given(st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_order_is_a_pure_function_of_seed_and_epoch(seed: int, epoch: int) -> None:
    used = ResumableLoader(Numbers(50), 7, seed)
    take(used, 20)
    torch.rand(3), np.random.rand(3)
    assert (used.order(epoch) == ResumableLoader(Numbers(50), 3, seed).order(epoch)).all()
    assert (used.order(epoch) != used.order(epoch + 1)).any()
    assert (used.order(epoch) != ResumableLoader(Numbers(50), 7, seed + 1).order(epoch)).any()


def test_order_is_the_same_for_good() -> None:
    """A resumed run meets the order of the run that it goes on from, after any upgrade."""
    loader = ResumableLoader(Numbers(10), 1, seed=7)
    assert loader.order(0).tolist() == [8, 4, 3, 6, 2, 1, 0, 5, 9, 7]
    assert loader.order(1).tolist() == [7, 9, 6, 1, 4, 8, 3, 2, 5, 0]


def ranks_of(loader: ResumableLoader, world_size: int) -> list[ResumableLoader]:
    data, batch, seed = loader.dataset, loader.batch_size, loader.seed
    return [ResumableLoader(data, batch, seed, rank=rank, world_size=world_size) for rank in range(world_size)]


@given(loaders, st.integers(1, 8))
def test_ranks_share_an_epoch_and_end_it_together(loader: ResumableLoader, world_size: int) -> None:
    ranks = ranks_of(loader, world_size)
    count = len(ranks[0])
    sizes = [rank.next_sizes(count) for rank in ranks]
    seen: list[list[int]] = [[] for _ in ranks]
    for number in range(count):
        for rank, own, size in zip(ranks, seen, sizes, strict=True):
            (batch,) = take(rank, 1)
            assert len(batch) == max(size[number][0], 1)
            own += batch[: size[number][0]]
        assert len({tuple(rank.state_dict().items())[:2] for rank in ranks}) == 1
        assert sum(size[number][0] for size in sizes) == sizes[0][number][1]
        own_sizes = [size[number][0] for size in sizes]
        assert max(own_sizes) - min(own_sizes) <= 1 and max(own_sizes) <= loader.batch_size
    assert sorted(i for own in seen for i in own) == list(range(len(loader.dataset)))  # disjoint, and all of them
    assert all((rank.epoch, rank.position) == (1, 0) for rank in ranks)


@given(loaders, st.integers(1, 5), st.integers(1, 5), st.integers(0, 12))
def test_a_position_means_the_same_for_any_number_of_ranks(
    loader: ResumableLoader, before: int, after: int, batches: int
) -> None:
    old, new = ranks_of(loader, before), ranks_of(loader, after)
    take(old[0], batches)
    epoch, position = old[0].epoch, old[0].position
    for rank in new:
        rank.load_state_dict(old[0].state_dict())
    rest: list[int] = []
    while new[0].epoch == epoch:
        for rank in new:
            ((own, _),) = rank.next_sizes(1)
            rest += take(rank, 1)[0][:own]
    assert sorted(rest) == sorted(loader.order(epoch)[position:])


def test_a_position_in_what_another_number_of_ranks_drops_is_the_next_epoch() -> None:
    old = ResumableLoader(Numbers(10), 1, 0, drop_last=True, rank=0, world_size=3)
    take(old, 2)
    new = ResumableLoader(Numbers(10), 1, 0, drop_last=True, rank=0, world_size=5)
    new.load_state_dict(old.state_dict())
    assert (old.epoch, old.position, new.epoch, new.position) == (0, 6, 1, 0)


@settings(max_examples=20)
@given(st.integers(2, 300), st.integers(1, 40))
def test_windows_follow_one_another_and_labels_are_one_byte_on(length: int, block: int) -> None:
    corpus = torch.arange(length).to(torch.uint8)
    windows = ByteWindows(corpus, block)
    assert len(windows) == (length - 1) // block
    for i in range(len(windows)):
        item = windows[i]
        assert item["input_ids"].tolist() == [j % 256 for j in range(i * block, (i + 1) * block)]
        assert item["labels"].tolist() == [j % 256 for j in range(i * block + 1, (i + 1) * block + 1)]
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_no_byte_is_trained_on_and_validated_on() -> None:
    corpus = torch.arange(200, dtype=torch.uint8)
    train, validation = split_corpus(corpus, 8, validation=0.2)
    assert torch.equal(torch.cat([train.corpus, validation.corpus]), corpus)
    assert len(validation.corpus) == 40
    with pytest.raises(InvalidArgument, match=r"17 bytes.*block_size"):
        split_corpus(corpus[:17], 8)
    assert [len(part) for part in split_corpus(corpus[:18], 8)] == [1, 1]


def test_the_default_corpus_is_the_standard_library() -> None:
    files = find_files()
    library = Path(sysconfig.get_path("stdlib"))
    assert library / "argparse.py" in files
    assert all(file.suffix == ".py" and "site-packages" not in file.parts for file in files)
    names = [file.relative_to(library).as_posix() for file in files]
    assert names == sorted(names)
    corpus = read_corpus(max_bytes=100_000)
    assert corpus.dtype == torch.uint8 and len(corpus) == 100_000
    first = files[0].read_bytes()
    assert bytes(corpus[: len(first)].tolist()) == first


def test_data_takes_files_folders_and_globs_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "b/.hidden", "a.txt", "c[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def names(*entries: str) -> list[str]:
        return [file.relative_to(tmp_path).as_posix() for file in find_files([str(tmp_path / e) for e in entries])]

    assert names("b") == ["b/1.txt", "b/2.txt"]
    assert names("**/*.txt") == ["a.txt", "b/1.txt", "b/2.txt", "c[1].txt"]
    assert names("b/2.txt", "b") == ["b/2.txt", "b/1.txt"]
    assert names("c[1].txt") == ["c[1].txt"]  # a file of that very name goes before the pattern
    assert bytes(read_corpus([str(tmp_path / "b")]).tolist()) == b"b/1.txtb/2.txt"
    assert bytes(read_corpus([str(tmp_path / "b")], max_bytes=9).tolist()) == b"b/1.txtb/"
    with pytest.raises(DataNotFound, match="nothing-here") as raised:
        names("nothing-here")
    assert raised.value.path == str(tmp_path / "nothing-here")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataNotFound, match="empty"):
        names("empty")


def loader_on(text: bytes, block: int = 4, batch: int = 2) -> ResumableLoader:
    return ResumableLoader(ByteWindows(torch.frombuffer(bytearray(text), dtype=torch.uint8), block), batch, seed=1)


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        (loader_on(bytes(99) + b"x"), "data xxh3_128"),
        (loader_on(bytes(101)), "data bytes"),
        (loader_on(bytes(100), block=5), "data block_size"),
        (loader_on(bytes(100), batch=3), "batch_size"),
    ],
)
def test_a_position_in_other_data_is_refused(other: ResumableLoader, fact: str) -> None:
    loader = loader_on(bytes(100))
    loader.next_batch()
    other.next_batch()
    before = other.state_dict()
    with pytest.raises(StateMismatch, match=fact) as raised:
        other.load_state_dict(loader.state_dict())
    assert raised.value.mismatched is not None and fact in raised.value.mismatched
    assert other.state_dict() == before


def test_too_few_samples_for_a_batch() -> None:
    with pytest.raises(InvalidArgument, match="per_device_train_batch_size=4"):
        ResumableLoader(Numbers(3), 4, seed=0, drop_last=True)
    assert len(ResumableLoader(Numbers(3), 4, seed=0)) == 1
