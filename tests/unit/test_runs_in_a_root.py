"""B21: which checkpoint is newest, whose it is, and which may go."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import (
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    KeepLast,
    NoUsableCheckpoint,
    scan_root,
)


def state(value: float = 0.0) -> dict:
    return {"m": {"a": torch.tensor([float(value)])}}


def names(root: Path) -> set[str]:
    return {entry.name for entry in root.iterdir()}


def test_b21_retention_and_latest_keep_to_the_run(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, run_id="A") as ckpt:
        for step in (500, 600, 700):
            ckpt.save(step, state(step))
    for folder in tmp_path.iterdir():
        os.utime(folder, (4e9, 4e9))
    with CheckpointManager(tmp_path, run_id="B", keep=KeepLast(1)) as ckpt:
        assert ckpt.latest() is None
        assert ckpt.restore(state()).fresh
        ckpt.save(100, state(100))
        assert names(tmp_path) == {
            "checkpoint-100",
            "checkpoint-500",
            "checkpoint-600",
            "checkpoint-700",
        }
        ckpt.save(200, state(200))
        assert names(tmp_path) == {
            "checkpoint-200",
            "checkpoint-500",
            "checkpoint-600",
            "checkpoint-700",
        }
        assert ckpt.latest().step == 200
    live = state()
    again = CheckpointManager(tmp_path)
    assert again.restore(live).step == 200
    assert live["m"]["a"].item() == 200
    assert again.run_id == "B"
    assert [info.step for info in again.list()] == [200]
    assert CheckpointManager(tmp_path, run_id="A").latest().step == 700
    # An explicit step of another run is found when it is asked for.
    assert again.load(live, 600).step == 600


def test_b21_order_is_by_number_not_by_text_or_time(tmp_path: Path) -> None:
    steps = [1000, 9, 100, 10]
    with CheckpointManager(tmp_path) as ckpt:
        for step in steps:
            ckpt.save(step, state(step))
        (tmp_path / "checkpoint-000100").mkdir()
        (tmp_path / "000100").mkdir()
        for age, step in enumerate(steps):
            os.utime(tmp_path / f"checkpoint-{step}", (age, age))
        assert [info.step for info in ckpt.list()] == [9, 10, 100, 1000]
        assert ckpt.latest().step == 1000
        assert [info.sequence for info in ckpt.list()] == [2, 4, 3, 1]
        ckpt.keep = KeepLast(2)
        ckpt.save(50, state(50))
    assert names(tmp_path) == {
        "checkpoint-50",
        "checkpoint-100",
        "checkpoint-1000",
        "checkpoint-000100",
        "000100",
    }


def test_a_renamed_folder_is_still_the_step_that_its_manifest_says(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(5, state(5))
        ckpt.save(6, state(6))
    (tmp_path / "checkpoint-5").rename(tmp_path / "checkpoint-99")
    ckpt = CheckpointManager(tmp_path)
    assert [(info.name, info.step) for info in ckpt.list()] == [
        ("checkpoint-99", 5),
        ("checkpoint-6", 6),
    ]
    assert ckpt.latest().step == 6


@given(st.permutations(range(6)), st.integers(1, 3))
@settings(max_examples=10)
def test_keep_last(tmp_path_factory: pytest.TempPathFactory, steps: list[int], count: int) -> None:
    root = tmp_path_factory.mktemp("root")
    kept: list[int] = []
    with CheckpointManager(root, keep=KeepLast(count)) as ckpt:
        for step in steps:
            ckpt.save(step, state(step))
            # The newest by step stay, and the one that was just committed in any case.
            kept = sorted({*sorted([*kept, step])[-count:], step})
            assert names(root) == {f"checkpoint-{n}" for n in kept}
            assert [info.step for info in ckpt.list()] == kept


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None, "2"])
def test_keep_last_needs_a_number(count) -> None:
    with pytest.raises(ValueError, match="KeepLast"):
        KeepLast(count)


def test_retention_never_removes_foreign_files(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=KeepLast(1)) as ckpt:
        ckpt.save(1, state())
        (tmp_path / "checkpoint-1" / "notes.txt").write_text("mine")
        (tmp_path / "other").mkdir()
        ckpt.save(2, state())
        assert [p.name for p in (tmp_path / "checkpoint-1").iterdir()] == ["notes.txt"]
        assert [info.step for info in ckpt.list()] == [2]
        assert ckpt.restore(state()).step == 2


def test_a_deletion_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptcore import StorageError

    with CheckpointManager(tmp_path, keep=KeepLast(1)) as ckpt:
        ckpt.save(1, state())

        def refuse(path: str) -> None:
            raise StorageError("no", path=path, errno=13)

        monkeypatch.setattr(ckpt.storage, "remove", refuse)
        with pytest.warns(CheckpointWarning, match="checkpoint-1"):
            info = ckpt.save(2, state())
        assert info.step == 2
        assert ckpt.latest().step == 2
        monkeypatch.undo()
        ckpt.save(3, state())
    assert names(tmp_path) == {"checkpoint-3"}, "what was left is removed later"


def test_delete(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state())
        ckpt.save(2, state())
        ckpt.delete(1)
        assert names(tmp_path) == {"checkpoint-2"}
        with pytest.raises(CheckpointNotFound):
            ckpt.delete(1)


def test_a_run_takes_the_name_of_what_it_resumes(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path)
    first.save(1, state())
    assert first.latest().run_id == first.run_id
    second = CheckpointManager(tmp_path)
    second.restore(state())
    assert second.run_id == first.run_id
    second.save(2, state())
    third = CheckpointManager(tmp_path)
    assert third.run_id != first.run_id, "nothing was resumed"
    assert CheckpointManager(tmp_path, run_id="mine").run_id == "mine"
    assert [info.run_id for info in second.list()] == [first.run_id] * 2


def test_scan_lists_everything_that_looks_like_a_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state())
    (tmp_path / "checkpoint-1" / "checkpoint_manifest.json").unlink()
    (tmp_path / "checkpoint-2" / "m.safetensors").unlink()
    (tmp_path / "checkpoint-4.partial-x").mkdir()
    found = scan_root(tmp_path)
    assert [(i.name, i.status) for i in found] == [
        ("checkpoint-1", "uncommitted"),
        ("checkpoint-2", "damaged"),
        ("checkpoint-3", "committed"),
        ("checkpoint-4.partial-x", "partial"),
    ]
    assert "m.safetensors" in found[1].reason
    with pytest.raises(CheckpointNotFound):
        scan_root(tmp_path / "none")


def test_attempts_of_dead_processes_are_swept_and_others_are_not(tmp_path: Path) -> None:
    from ckptcore.catalog.folder import Attempt, in_flight

    mine = Attempt.new("run")
    dead = Attempt(mine.run, mine.machine, 2**22 + 5, "1", 1)
    elsewhere = Attempt("otherrun", "otherbox", 1, "1", 1)
    for attempt in (mine, dead, elsewhere, "unreadable"):
        folder = tmp_path / f"checkpoint-9.partial-{attempt}"
        folder.mkdir()
        (folder / "m.safetensors").write_bytes(b"half")
    (tmp_path / f"checkpoint-9.partial-{dead}" / "notes.txt").write_text("foreign")
    with in_flight(str(mine)), CheckpointManager(tmp_path, run_id="run") as ckpt:
        ckpt.save(1, state())
    left = {name.partition(".partial-")[2]: name for name in names(tmp_path) if "partial" in name}
    assert set(left) == {str(mine), str(dead), str(elsewhere), "unreadable"}
    assert [p.name for p in (tmp_path / left[str(dead)]).iterdir()] == ["notes.txt"]
    assert [p.name for p in (tmp_path / left[str(elsewhere)]).iterdir()] == ["m.safetensors"]
    assert [p.name for p in (tmp_path / left[str(mine)]).iterdir()] == ["m.safetensors"]
    with CheckpointManager(tmp_path, run_id="run") as ckpt:
        ckpt.save(2, state())
    assert f"checkpoint-9.partial-{mine}" not in names(tmp_path), "this process has moved on"


@given(st.lists(st.tuples(st.sampled_from("AB"), st.integers(0, 3)), min_size=1, max_size=6))
@settings(max_examples=15)
def test_latest_is_the_highest_step_of_the_run(
    tmp_path_factory: pytest.TempPathFactory, saves
) -> None:
    root = tmp_path_factory.mktemp("root")
    owners: dict[int, str] = {}
    for run, step in saves:
        CheckpointManager(root, run_id=run).save(step, state(random.random()), overwrite=True)
        owners[step] = run
    for run in "AB":
        mine = sorted(step for step, owner in owners.items() if owner == run)
        latest = CheckpointManager(root, run_id=run).latest()
        assert (latest.step if latest else None) == (mine[-1] if mine else None)
    assert CheckpointManager(root).latest().run_id == saves[-1][0]


def test_a_damaged_checkpoint_does_not_hand_over_to_another_run(tmp_path: Path) -> None:
    for run, step in (("old", 1), ("new", 2)):
        with CheckpointManager(tmp_path, run_id=run) as ckpt:
            ckpt.save(step, {"m": {"w": torch.full((3,), float(step))}})
    with (tmp_path / "checkpoint-2" / "m.safetensors").open("ab") as file:
        file.write(b"x")
    live = {"m": {"w": torch.zeros(3)}}
    with pytest.raises(NoUsableCheckpoint) as caught:
        CheckpointManager(tmp_path).restore(live)
    assert list(caught.value.reasons) == ["checkpoint-2"]
    assert torch.equal(live["m"]["w"], torch.zeros(3))
    assert CheckpointManager(tmp_path, run_id="old").restore(live).step == 1
