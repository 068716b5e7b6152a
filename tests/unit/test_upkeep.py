"""Upkeep of a root by one process: pin, delete, what retention would keep, what may be swept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckptcore
from ckptcore import CheckpointManager, KeepBest, KeepLast, scan_root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "root", run_id="a") as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, {"m": {"w": torch.ones(4)}}, metrics={"loss": abs(step - 2.0)})
    return tmp_path / "root"


def names(root: Path) -> list[str]:
    return [info.name for info in scan_root(root)]


def test_pin_unpin_and_delete(root: Path) -> None:
    url = root / "checkpoint-2"
    ckptcore.pin_checkpoint(url)
    assert [info.pinned for info in scan_root(root)] == [False, True, False, False]
    with pytest.raises(ckptcore.InvalidState, match="pinned"):
        ckptcore.delete_checkpoint(url)
    ckptcore.unpin_checkpoint(url)
    ckptcore.delete_checkpoint(url)
    assert names(root) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"] and not url.exists()
    for call in (ckptcore.pin_checkpoint, ckptcore.unpin_checkpoint, ckptcore.delete_checkpoint):
        with pytest.raises(ckptcore.CheckpointNotFound):
            call(url)


def test_a_damaged_one_is_deleted_only_when_asked_and_leaves_what_is_not_ours(root: Path) -> None:
    url = root / "checkpoint-3"
    (url / "checkpoint_manifest.json").write_text("{}")
    (url / "notes.txt").write_text("mine")
    with pytest.raises(ckptcore.CheckpointCorrupt):
        ckptcore.delete_checkpoint(url)
    ckptcore.delete_checkpoint(url, damaged=True)
    assert os.listdir(url) == ["notes.txt"]
    with pytest.raises(ckptcore.CheckpointNotFound):
        ckptcore.delete_checkpoint(root / "checkpoint-77", damaged=True)


def test_what_policies_keep_and_why(root: Path) -> None:
    ckptcore.pin_checkpoint(root / "checkpoint-1")
    kept = ckptcore.kept_by(scan_root(root), {"best": KeepBest("loss"), "last": KeepLast(1)})
    assert kept == {
        "checkpoint-1": ["pinned"],
        "checkpoint-2": ["best"],
        "checkpoint-3": [],
        "checkpoint-4": ["last", "newest"],
    }
    assert ckptcore.kept_by(scan_root(root), {}, "another") == {}


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_stay(root: Path) -> None:
    from ckptcore.catalog.folder import Attempt, in_flight

    mine = Attempt.new("b")
    dead = f"{mine.run}-{mine.machine}-999999999-1-1"
    other = f"{mine.run}-00000000-7-1-1"
    for attempt in (str(mine), dead, other):
        folder = root / f"checkpoint-9.partial-{attempt}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * 10)
    with in_flight(str(mine)):
        found = {
            left.name.partition(".partial-")[2]: left for left in ckptcore.find_leftovers(root)
        }
        assert {key: left.abandoned for key, left in found.items()} == {
            str(mine): False,
            dead: True,
            other: False,
        }
        assert all(left.nbytes == 10 for left in found.values())
        assert "is running" in found[str(mine)].writer and "is gone" in found[dead].writer
        assert "another machine" in found[other].writer
        assert ckptcore.sweep_root(root) == ([f"checkpoint-9.partial-{dead}"], [])
    with pytest.raises(ckptcore.InvalidState, match="did not finish"):
        ckptcore.delete_checkpoint(root / f"checkpoint-9.partial-{other}", damaged=True)


def test_the_boxes_of_a_tensor_say_where_its_bytes_are(root: Path) -> None:
    view = ckptcore.open_checkpoint(root / "checkpoint-1")
    (box,) = view.boxes("m")["w"]
    assert (box.offset, box.shape, box.nbytes, box.writer) == ((0,), (4,), 16, 0)
    data = (root / "checkpoint-1" / box.file).read_bytes()[box.start : box.start + box.nbytes]
    assert data == torch.ones(4).numpy().tobytes() and len(box.digests) == 8
    other = ckptcore.open_checkpoint(root / "checkpoint-2").boxes("m")["w"]
    assert other[0].digests == box.digests
    with pytest.raises(KeyError, match="no component"):
        view.boxes("nothing")


def test_verify_tells_how_far_it_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptcore.loading.view.PORTION", 16)
    with CheckpointManager(root) as manager:
        manager.save(9, {"m": {name: torch.ones(4) for name in "abc"}})
    told: list[tuple[int, int]] = []
    view = ckptcore.open_checkpoint(root / "checkpoint-9")
    assert view.verify(progress=lambda done, total: told.append((done, total))) == []
    assert told == [(16, 48), (32, 48), (48, 48)]


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 4), (1, 100), (5, 0)])
def test_portions_make_up_the_tensor(tmp_path: Path, shape: tuple[int, ...]) -> None:
    whole = torch.arange(int(torch.ones(shape).numel()), dtype=torch.int32).reshape(shape)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"m": {"w": whole}})
    view = ckptcore.open_checkpoint(tmp_path / "checkpoint-1")
    for limit in (1, 8, 24, 10_000):
        parts = list(view.portions("m/w", limit))
        assert [n for _, part in parts for n in part.reshape(-1)] == whole.reshape(-1).tolist()
        assert all(whole[box].shape == part.shape for box, part in parts)
        assert all(part.nbytes <= max(limit, 4) for _, part in parts)
    with pytest.raises(KeyError, match="no tensor 'm/x'"):
        next(view.portions("m/x"))
