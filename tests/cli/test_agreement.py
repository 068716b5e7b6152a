"""`ckpt` and the engine mean the same checkpoint by the newest one, and the same ones by
damaged."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckpt_tools.lookup import Subject
from hypothesis import given
from hypothesis import strategies as st

from ckptcore import CheckpointInfo, CheckpointManager, CheckpointWarning, NoUsableCheckpoint

from .conftest import Ckpt, report_of, save_run, state_of_step

# In the order of their commits: two runs in one root, each of which goes back, too.
COMMITS = [("a", 10), ("b", 20), ("a", 30), ("b", 25), ("a", 40), ("b", 5)]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "none": lambda folder: None,
    "short": lambda folder: cut(folder / "model.safetensors"),
    "flipped": lambda folder: flip(folder / "model.safetensors"),
    "flipped index": lambda folder: flip(folder / "index.rank00000.msgpack"),
    "no manifest": lambda folder: (folder / "checkpoint_manifest.json").unlink(),
    "half a manifest": lambda folder: cut(folder / "checkpoint_manifest.json"),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pool")
    for run, step in COMMITS:
        save_run(root, (step,), run_id=run)
    return root


def restored(root: Path) -> tuple[str | None, set[str]]:
    """What `restore` takes, and what it passes over."""
    with warnings.catch_warnings(), CheckpointManager(root) as manager:
        warnings.simplefilter("ignore")
        try:
            report = manager.restore(state_of_step(0))
        except NoUsableCheckpoint as error:
            return None, set(error.reasons)
    return Path(report.path or "").name, set(report.skipped)


@given(
    st.lists(st.sampled_from(sorted(DAMAGES)), min_size=len(COMMITS), max_size=len(COMMITS)),
    st.data(),
)
def test_the_command_says_what_a_restore_does(
    pool: Path, damages: list[str], data: st.DataObject
) -> None:
    kept = data.draw(st.sets(st.sampled_from(range(len(COMMITS))), min_size=1))
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "root"
        for number in kept:
            folder = root / f"checkpoint-{COMMITS[number][1]}"
            shutil.copytree(pool / folder.name, folder)
            DAMAGES[damages[number]](folder)
        check(root)


def check(root: Path) -> None:
    taken, passed = restored(root)
    report = report_of("verify", root)
    document = report.document
    assert document["restores"] == taken
    assert {c["checkpoint"]["name"] for c in document["checkpoints"] if not c["ok"]} == passed
    assert [c["checkpoint"]["name"] for c in document["checkpoints"] if c["ok"]] == (
        [taken] if taken else []
    )
    assert (report.exit_code == 0) == document["ok"] == (taken is not None and not passed)
    # These two go by a listing: a flipped byte is found only where all are read.
    with CheckpointManager(root) as manager:
        latest = manager.latest()
    assert report_of("ls", root).document["latest"] == (latest and latest.name)
    shown = report_of("inspect", root).document
    if latest is not None:
        assert shown["checkpoint"]["name"] == latest.name
        assert {entry["name"] for entry in shown["newer"]} <= passed
    if latest is not None and latest.name == taken:
        assert {entry["name"] for entry in shown["newer"]} == passed
        copied = report_of("cp", root, root.parent / "copy", "--threads", "1")
        assert copied.document["checkpoint"]["name"] == taken and copied.exit_code == 0
        assert (copied.complaint is None) == (not passed)
        assert {entry["name"] for entry in copied.document["newer"]} == passed


def two_runs(root: Path) -> Path:
    save_run(root, (10, 20), run_id="old")
    save_run(root, (15,), run_id="new")
    cut(root / "checkpoint-15" / "model.safetensors")
    return root


def test_a_damaged_checkpoint_of_the_last_run_is_no_success(ckpt: Ckpt, tmp_path: Path) -> None:
    root = two_runs(tmp_path)
    with CheckpointManager(root) as manager, pytest.raises(NoUsableCheckpoint):
        manager.restore(state_of_step(0))
    done = ckpt("verify", root)
    assert (done.code, done.err) == (1, "ckpt: checkpoint-15 is damaged\n")
    assert (
        "nearest older usable step: 10 of run old" in done.out
    )  # of another run: `restore` does not take it
    assert ckpt("ls", root, "--json").document["latest"] is None
    assert ckpt("inspect", root).err == "ckpt: checkpoint-15 is damaged\n"
    done = ckpt("cp", root, tmp_path / "copy")
    assert (
        done.code == 1
        and "of the run that saved last" in done.err
        and "checkpoint-15 is damaged" in done.err
    )


def test_a_copy_of_an_older_one_says_so_on_stderr(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    cut(root / "checkpoint-30" / "model.safetensors")
    done = ckpt("cp", root, tmp_path / "copy")
    assert done.code == 0 and done.err.count("\n") == 1
    assert done.err.startswith("ckpt: warning: took checkpoint-20: checkpoint-30 is damaged (")
    document: dict[str, Any] = ckpt("cp", root, tmp_path / "copy", "--json").document
    assert [(entry["name"], entry["status"]) for entry in document["newer"]] == [
        ("checkpoint-30", "damaged")
    ]
    assert document["checkpoint"]["name"] == "checkpoint-20"
    named = ckpt("cp", root / "checkpoint-20", tmp_path / "copy")
    assert (named.code, named.err) == (0, "")


def test_verify_says_what_restore_would_take(ckpt: Ckpt, root: Path) -> None:
    flip(root / "checkpoint-30" / "model.safetensors")
    done = ckpt("verify", root)
    assert done.code == 1 and done.err == "ckpt: checkpoint-30 is damaged\n"
    lines = done.out.splitlines()
    assert lines[0] == "checkpoint-30  damaged" and lines[-1] == "restore would take checkpoint-20"
    assert any(line.startswith("checkpoint-20  ok") for line in lines)
    document = ckpt("verify", root, "--json").document
    assert document["restores"] == "checkpoint-20"
    assert [c["checkpoint"]["step"] for c in document["checkpoints"]] == [30, 20]
    assert document["checkpoints"][0]["fallback"]["verified"] is True


@pytest.mark.parametrize("command", ["verify", "inspect", "inspect --verify", "cp"])
@pytest.mark.parametrize("when", ["before it is opened", "while it is read"])
def test_a_job_that_saves_and_deletes_meanwhile_is_no_damage(
    ckpt: Ckpt, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, when: str
) -> None:
    """The checkpoint that the command has chosen goes, and a newer one has come."""
    name, open_subject = "checkpoint-30", Subject.open

    def replaced(url: str, info: CheckpointInfo, options: Any) -> Subject:
        if info.name != name or not (root / name).exists():
            return open_subject(url, info, options)
        subject = open_subject(url, info, options) if when == "while it is read" else None
        save_run(root, (40,), run_id="run-a")
        with CheckpointManager(root) as manager:
            manager.delete(30)
        return subject or open_subject(url, info, options)

    monkeypatch.setattr(Subject, "open", replaced)
    target = [tmp_path / "copy"] if command == "cp" else []
    done = ckpt(*command.split(), root, *target, "--json")
    assert done.code == 0, done.out
    found = done.document["checkpoints"][0] if command == "verify" else done.document
    assert found["checkpoint"]["step"] == 40


def test_a_root_that_changes_and_stays_damaged_is_damaged(
    ckpt: Ckpt, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_subject, steps = Subject.open, iter(range(100, 1000))

    def damaged(url: str, info: CheckpointInfo, options: Any) -> Subject:
        if info.name != root.name:
            step = next(steps)
            save_run(root, (step,), run_id="run-a")
            for folder in (root / f"checkpoint-{step}", root / info.name):
                (folder / "model.safetensors").write_bytes(b"damaged")
        return open_subject(url, info, options)

    monkeypatch.setattr(Subject, "open", damaged)
    monkeypatch.setattr("ckpt_tools.lookup.LOOKS", 3)
    assert ckpt("inspect", root, "--verify").code == 1


def test_what_a_run_has_gone_back_behind_is_never_the_newest(ckpt: Ckpt, tmp_path: Path) -> None:
    root = tmp_path / "root"
    save_run(root, (10, 20, 30), run_id="run-a")
    with CheckpointManager(root, run_id="run-a") as manager:
        manager.load(state_of_step(0), 10)
        with pytest.warns(CheckpointWarning, match="steps 20, 30: that is abandoned"):
            manager.save(15, state_of_step(15))
    assert restored(root) == ("checkpoint-15", set())
    check(root)
    entries = ckpt("ls", root, "--json").document["checkpoints"]
    assert [entry["step"] for entry in entries if entry["abandoned"]] == [20, 30]
    (line,) = (line for line in ckpt("ls", root).out.splitlines() if "checkpoint-30" in line)
    assert "committed (abandoned)" in line
