"""Copies between storages of all kinds: the same bytes, the same commit, and what is in the way."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptcore import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointView,
    InvalidState,
    KeepLast,
    Shard,
    SharingPattern,
    StateComponent,
    copy_checkpoint,
    open_checkpoint,
    open_storage,
)
from ckptcore.catalog.catalog import scan
from ckptcore.catalog.folder import pin_checkpoint
from ckptcore.copy.checkpoint import copy_between
from ckptcore.testing import FaultStorage
from ckptcore.testing.ranks import run_ranks
from ckptcore.testing.rules import WRITE_OPERATIONS

KINDS = ["local", "memory", "folder"]
MIB = 1 << 20


@pytest.mark.parametrize("target_kind", KINDS)
@pytest.mark.parametrize("source_kind", KINDS)
def test_from_any_storage_to_any_other(
    make_root: Any, copies: Any, source_kind: str, target_kind: str
) -> None:
    between, target = make_root(source_kind), make_root(target_kind)
    copies.make(between)
    copies.check(between)
    seen: list[tuple[int, int, int]] = []
    info = copies.make(target, between, progress=lambda *counts: seen.append(counts))
    copies.check(target)
    assert (info.name, info.url, info.status, info.step) == (
        copies.name,
        target.at(copies.name),
        "committed",
        500,
    )
    assert info.manifest == CheckpointView(target, copies.name).manifest
    total = copies.total()
    assert seen[-1] == (total, 0, total)
    assert [copied for copied, _, _ in seen] == sorted(copied for copied, _, _ in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_is_there_is_left_alone(make_root: Any, copies: Any, kind: str) -> None:
    target = FaultStorage(make_root(kind))
    first = copies.make(target)
    target.log.clear()
    seen: list[tuple[int, int, int]] = []
    again = copies.make(target, progress=lambda *counts: seen.append(counts))
    assert again == first
    assert seen == [(0, copies.total(), copies.total())]
    assert target.count(WRITE_OPERATIONS) == target.count("read_into", "*.safetensors") == 0
    assert copies.make(target, overwrite=True) == first
    assert target.count(WRITE_OPERATIONS) == 0
    assert (
        target.count("read_into", "*.safetensors") > 0
    )  # asked for by hand, it is checked to the last byte
    copies.check(target)


@pytest.mark.parametrize("kind", KINDS)
def test_another_checkpoint_in_its_place(make_root: Any, copies: Any, kind: str) -> None:
    target = make_root(kind)
    copies.make(target, "b")
    with pytest.raises(CheckpointExists, match="overwrite=True"):
        copies.make(target)
    copies.check(target, "b")
    copies.make(target, overwrite=True)
    copies.check(target, "a")
    pin_checkpoint(target, copies.name)
    with pytest.raises(CheckpointExists, match="pinned"):
        copies.make(target, "b", overwrite=True)
    assert copies.never_torn(target) == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_copy_is_replaced(make_root: Any, copies: Any, kind: str) -> None:
    target = make_root(kind)
    copies.make(target)
    target.remove(f"{copies.name}/index.rank00001.msgpack")
    copies.make(target)  # its sizes are not right, so it is no checkpoint that could be in the way
    copies.check(target)
    data = bytearray(target.read(path := f"{copies.name}/own.rank00001.safetensors"))
    data[-1] ^= 1
    target.remove(path)
    target.write(path, bytes(data))
    copies.make(target)
    assert target.read(path) == bytes(data)  # nobody has looked
    copies.make(target, overwrite=True)
    copies.check(target)


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_files_are_refused_and_left(make_root: Any, copies: Any, kind: str) -> None:
    target = make_root(kind)
    target.make_folder(copies.name)
    target.write(f"{copies.name}/notes.txt", b"mine")
    with pytest.raises(CheckpointExists, match=r"notes\.txt"):
        copies.make(target)
    assert copies.bytes_of(target) == {"notes.txt": b"mine"}
    assert [entry.name for entry in target.list()] == [copies.name]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_pins_come_along_when_asked_for(make_root: Any, copies: Any, kind: str) -> None:
    pinned, target, other = make_root(kind), make_root(kind), make_root(kind)
    copies.make(pinned)
    pin_checkpoint(pinned, copies.name)
    copies.make(target, pinned)
    copies.check(target)
    copies.make(other, pinned, pins=True)
    assert [info.pinned for info in scan(other)] == [True]
    copies.make(target, pinned, pins=True)  # also where all else is there
    assert [info.pinned for info in scan(target)] == [True]


def test_the_public_function(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"memory://public-{tmp_path.name}/deep/er/best"
    info = copy_checkpoint(sources / "a" / "checkpoint-500", url, storage_options={"ignored": 1})
    assert (info.name, info.url.rstrip("/")) == ("best", url)
    assert open_checkpoint(url).verify() == []
    back = copy_checkpoint(url, "here", target_options={})
    assert back.url == str(tmp_path / "here")
    assert {p.name: p.read_bytes() for p in (tmp_path / "here").iterdir()} == {
        p.name: p.read_bytes() for p in (sources / "a" / "checkpoint-500").iterdir()
    }
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


def test_what_cannot_be_copied(sources: Path, tmp_path: Path) -> None:
    one = sources / "a" / "checkpoint-500"
    with pytest.raises(CheckpointNotFound):
        copy_checkpoint(sources / "a", tmp_path / "x")
    with pytest.raises(InvalidState, match="where it is"):
        copy_checkpoint(one, one)
    (tmp_path / "link").symlink_to(sources / "a")
    with pytest.raises(InvalidState, match="where it is"):
        copy_checkpoint(one, tmp_path / "link" / "checkpoint-500", overwrite=True)
    with pytest.raises(InvalidState, match="top of a storage"):
        copy_checkpoint(one, "memory://")
    assert open_checkpoint(one).verify() == []
    assert [p.name for p in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_can_be_trained_from(make_root: Any, kind: str) -> None:
    """Retention, `latest` and the next save take it for what it is."""
    source, target = make_root("local"), make_root(kind)
    with CheckpointManager(source, io_threads=1) as ckpt:
        info = ckpt.save(7, {"m": {"w": torch.arange(4.0)}})
    copy_between(source, info.name, target, info.name)
    with CheckpointManager(target, io_threads=1, keep=KeepLast(1)) as ckpt:
        state = {"m": {"w": torch.zeros(4)}}
        assert ckpt.restore(state).step == 7
        assert state["m"]["w"].tolist() == [0, 1, 2, 3]
        after = ckpt.save(8, state)
        assert (after.run_id, after.sequence) == (info.run_id, 2)
        assert [i.step for i in ckpt.list()] == [8]


def large(root: Path, items: int) -> None:
    with CheckpointManager(root, io_threads=2) as ckpt:
        ckpt.save(
            500,
            {
                "m": {
                    "w": torch.arange(items, dtype=torch.int32),
                    "b": torch.arange(1000),
                    "s": torch.ones(3),
                }
            },
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_large_files_in_pieces(
    make_root: Any, quick_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, threads: int
) -> None:
    """A tensor of five chunks, the last of them short: in pieces side by side, or in order."""
    large(quick_folder / "large", 18 * MIB // 4 + 1)
    target = make_root(kind)
    source = open_storage(quick_folder / "large")
    copy_between(source, "checkpoint-500", target, "checkpoint-500", threads=threads)
    for entry in source.list("checkpoint-500"):
        assert target.read(f"checkpoint-500/{entry.name}") == source.read(
            f"checkpoint-500/{entry.name}"
        )


def test_memory_is_bounded(quick_folder: Path) -> None:
    large(quick_folder / "large", 64 * MIB // 4)
    tracemalloc.start()
    try:
        copy_checkpoint(quick_folder / "large/checkpoint-500", quick_folder / "copy", threads=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * MIB
    assert open_checkpoint(quick_folder / "copy").verify() == []


def test_a_file_with_bytes_that_no_digest_covers(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(sources / "a" / "checkpoint-500", tmp_path / "one")
    reads = CheckpointView.reads_of
    monkeypatch.setattr(
        CheckpointView, "reads_of", lambda self, index: list(reads(self, index))[:-1]
    )
    with pytest.raises(CheckpointCorrupt, match="no digest covers"):
        copy_checkpoint(tmp_path / "one", tmp_path / "two")
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_part_of_a_node(make_root: Any, quick_folder: Path, kind: str) -> None:
    """Where nodes share no storage, the part of each is a checkpoint of its own to a copy."""

    def program(comm: Any) -> None:
        root = quick_folder / f"node{comm.rank // 2}"
        with CheckpointManager(root, comm=comm, storage_mode="node", io_threads=1) as ckpt:
            parts = [
                StateComponent("model", {"w": torch.arange(100.0)}, SharingPattern.REPLICATED),
                StateComponent(
                    "own", {"x": torch.full((5,), float(comm.rank))}, SharingPattern.PER_RANK
                ),
                StateComponent(
                    "rows",
                    {"r": Shard(torch.ones(2, 3) * comm.rank, (8, 3), (2 * comm.rank, 0))},
                    SharingPattern.SHARDED,
                ),
            ]
            ckpt.save(5, parts)

    run_ranks(4, program, nodes=[[0, 1], [2, 3]])
    for node in (0, 1):
        source, target = open_storage(quick_folder / f"node{node}"), make_root(kind)
        copy_between(source, "checkpoint-5", target, "checkpoint-5", threads=2)
        assert CheckpointView(target, "checkpoint-5").verify() == []
        for entry in source.list("checkpoint-5"):
            assert target.read(f"checkpoint-5/{entry.name}") == source.read(
                f"checkpoint-5/{entry.name}"
            )
