"""`ckpt ls`: every entry with its facts, the latest marked, the unusable explained."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckptcore import CheckpointManager

from .conftest import Ckpt, save_run


def test_lists_every_checkpoint_oldest_first(ckpt: Ckpt, root: Path) -> None:
    done = ckpt("ls", root, "--json")
    assert done.code == 0 and done.err == ""
    document = done.document
    assert document["root"] == str(root)
    assert document["latest"] == "checkpoint-30"
    entries = document["checkpoints"]
    assert [entry["step"] for entry in entries] == [10, 20, 30]
    assert [entry["latest"] for entry in entries] == [False, False, True]
    last = entries[-1]
    assert last["name"] == "checkpoint-30"
    assert last["url"] == str(root / "checkpoint-30")
    assert last["status"] == "committed" and last["reason"] is None
    assert last["run_id"] == "run-a"
    assert last["metrics"] == {"loss": 1 / 30, "accuracy": "NaN"}
    files = [f for f in (root / "checkpoint-30").iterdir() if f.name != "checkpoint_manifest.json"]
    assert last["size_bytes"] == sum(f.stat().st_size for f in files)
    assert last["created"].startswith("20") and entries[0]["sequence"] < last["sequence"]


def test_plain_text_is_aligned_and_the_same_twice(ckpt: Ckpt, root: Path) -> None:
    first, second = ckpt("ls", root), ckpt("ls", root)
    assert first == second
    lines = first.out.splitlines()
    assert lines[0].split() == ["step", "name", "status", "size", "created", "run", "metrics"]
    assert lines[3].split()[:4] == ["30", "checkpoint-30", "committed", "(latest)"]
    assert "loss=0.0333333" in lines[3] and "accuracy=nan" in lines[3]
    assert lines[1].index("checkpoint-10") == lines[0].index("name")
    assert all(line == line.rstrip() for line in lines) and "\x1b" not in first.out


def test_unusable_entries_are_listed_with_the_reason(ckpt: Ckpt, root: Path) -> None:
    (root / "checkpoint-30" / "checkpoint_manifest.json").unlink()
    shard = root / "checkpoint-20" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    (root / "checkpoint-40.partial-abc").mkdir()
    (root / "notes").mkdir()
    done = ckpt("ls", root, "--json")
    assert done.code == 0
    entries = {entry["name"]: entry for entry in done.document["checkpoints"]}
    assert done.document["latest"] == "checkpoint-10"
    assert entries["checkpoint-10"]["latest"]
    assert entries["checkpoint-20"]["status"] == "damaged"
    assert "model.safetensors" in entries["checkpoint-20"]["reason"]
    assert entries["checkpoint-30"]["status"] == "uncommitted"
    assert entries["checkpoint-30"]["step"] == 30
    assert entries["checkpoint-40.partial-abc"]["status"] == "partial"
    assert "notes" not in entries
    text = ckpt("ls", root).out
    assert f"checkpoint-20: {entries['checkpoint-20']['reason']}" in text.splitlines()


def test_a_root_without_any_usable_checkpoint_is_bad(ckpt: Ckpt, root: Path) -> None:
    for manifest in root.glob("*/checkpoint_manifest.json"):
        manifest.unlink()
    done = ckpt("ls", root)
    assert done.code == 1
    assert done.out.count("uncommitted") == 3
    assert done.err.startswith("ckpt: no usable checkpoint") and done.err.count("\n") == 1


def test_latest_is_that_of_the_run_which_committed_last(ckpt: Ckpt, tmp_path: Path) -> None:
    save_run(tmp_path / "runs", (500, 600), run_id="old")
    save_run(tmp_path / "runs", (100, 550), run_id="new")
    document = ckpt("ls", tmp_path / "runs", "--json").document
    assert [entry["step"] for entry in document["checkpoints"]] == [100, 500, 550, 600]
    assert document["latest"] == "checkpoint-550"
    assert ckpt("inspect", tmp_path / "runs", "--json").document["checkpoint"]["step"] == 550
    assert "checkpoint-550  ok" in ckpt("verify", tmp_path / "runs").out


def test_a_checkpoint_is_listed_alone(ckpt: Ckpt, root: Path) -> None:
    shutil.move(root / "checkpoint-20", root.parent / "best")
    done = ckpt("ls", root.parent / "best", "--json")
    assert done.code == 0
    (entry,) = done.document["checkpoints"]
    assert (entry["name"], entry["step"], entry["status"]) == ("best", 20, "committed")
    assert entry["metrics"]["loss"] == 1 / 20


def test_a_pinned_checkpoint_is_marked(ckpt: Ckpt, root: Path) -> None:
    CheckpointManager(root).pin(10)
    entries = ckpt("ls", root, "--json").document["checkpoints"]
    assert [(entry["step"], entry["pinned"]) for entry in entries] == [
        (10, True),
        (20, False),
        (30, False),
    ]
    assert "(pinned)" in next(
        line for line in ckpt("ls", root).out.splitlines() if "checkpoint-10" in line
    )
    assert ckpt("inspect", root / "checkpoint-10", "--json").document["foreign_files"] == []
