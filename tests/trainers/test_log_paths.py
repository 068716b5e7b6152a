"""A run writes and cuts logs in its own root only, whatever a checkpoint says."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckpt_trainers import trainer as trainer_module
from ckpt_trainers.callbacks import ResumableSummaryWriter, read_json_array
from ckpt_trainers.callbacks.logs import JsonRecords, path_in_root, relative_to_root
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LOGGED: dict[str, Any] = {
    "max_steps": 6,
    "logging_steps": 1,
    "save_steps": 2,
    "report_to": ["json", "tensorboard"],
}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def log_folders(root: Path) -> list[Path]:
    return sorted((root / "runs").iterdir())


def logged(folder: Path) -> tuple[list[int], list[int]]:
    """Steps in the JSON log, and those that TensorBoard shows."""
    found = [r["global_step"] for r in read_json_array(folder / "trainer_logs.json") if "loss" in r]
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return found, [event.step for event in events.Scalars("train-loss")]


def test_a_run_from_another_ones_checkpoint_leaves_that_ones_logs_alone(tiny: Any) -> None:
    tiny.trainer("a", **LOGGED).train()
    (theirs,) = log_folders(tiny.root("a"))
    assert logged(theirs) == ([*range(1, 7)],) * 2
    before = contents(tiny.root("a"))
    tiny.trainer("b", resume_from_checkpoint=str(tiny.root("a") / "checkpoint-2"), **LOGGED).train()
    assert contents(tiny.root("a")) == before
    (ours,) = log_folders(tiny.root("b"))
    assert logged(ours) == ([*range(3, 7)],) * 2
    # Its own checkpoints name its own logs.
    tiny.trainer("b", **{**LOGGED, "max_steps": 8}).train()
    assert log_folders(tiny.root("b")) == [ours] and logged(ours) == ([*range(3, 9)],) * 2
    assert contents(tiny.root("a")) == before


def test_a_root_that_was_copied_goes_on_in_the_copy(tiny: Any) -> None:
    tiny.trainer("a", **LOGGED).train()
    shutil.copytree(tiny.root("a"), tiny.root("b"))
    before = contents(tiny.root("a"))
    tiny.trainer("b", **{**LOGGED, "max_steps": 8}).train()
    assert contents(tiny.root("a")) == before
    (ours,) = log_folders(tiny.root("b"))
    assert logged(ours) == ([*range(1, 9)],) * 2


def test_a_logging_dir_that_is_given_again_goes_on_outside_of_the_root(
    tiny: Any, tmp_path: Path
) -> None:
    given = {**LOGGED, "logging_dir": str(tmp_path / "logs")}
    tiny.trainer("a", **given).train()
    tiny.trainer("a", **{**given, "max_steps": 8}).train()
    assert logged(tmp_path / "logs") == ([*range(1, 9)],) * 2
    assert not (tiny.root("a") / "runs").exists()
    # Not given again, it is nobody's to write in.
    before = contents(tmp_path / "logs")
    tiny.trainer("a", **{**LOGGED, "max_steps": 9}).train()
    assert contents(tmp_path / "logs") == before
    (new,) = log_folders(tiny.root("a"))
    assert logged(new) == ([9],) * 2


@pytest.fixture
def outside(tiny: Any, tmp_path: Path) -> Iterator[Path]:
    """Logs of somebody else, of a later step than any that is restored, and a link to them in the
    root of a run."""
    tiny.trainer("theirs", **{**LOGGED, "max_steps": 9}).train()
    (folder,) = log_folders(tiny.root("theirs"))
    folder.rename(tmp_path / "outside")
    tiny.root("run").mkdir()
    (tiny.root("run") / "link").symlink_to(tmp_path / "outside", target_is_directory=True)
    yield tmp_path / "outside"


@pytest.mark.parametrize("kind", ["absolute", "up", "link", "checkpoint"])
def test_what_a_crafted_checkpoint_names_is_ignored(
    tiny: Any,
    outside: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    named = {
        "absolute": str(outside),
        "up": "../outside",
        "link": "link",
        "checkpoint": "checkpoint-2",
    }[kind]
    with monkeypatch.context() as patch:

        def json_state(self: Any) -> dict[str, Any]:
            file = f"{named}/trainer_logs.json"
            return {
                "written": True,
                "path": f"{outside}/trainer_logs.json",
                "place": file,
                "step": 2,
            }

        def writer_state(self: Any) -> dict[str, Any]:
            return {"log_dir": str(outside), "place": named, "step": 2}

        patch.setattr(JsonRecords, "state_dict", json_state)
        patch.setattr(ResumableSummaryWriter, "state_dict", writer_state)
        patch.setattr(trainer_module, "relative_to_root", lambda folder, root: named)
        tiny.trainer(**{**LOGGED, "max_steps": 2}).train()
    theirs, checkpoint = contents(outside), contents(tiny.root() / "checkpoint-2")
    tiny.trainer(**{**LOGGED, "max_steps": 3}).train()
    assert contents(outside) == theirs and contents(tiny.root() / "checkpoint-2") == checkpoint
    ignored = [r.getMessage() for r in caplog.records if "is ignored" in r.getMessage()]
    assert len(ignored) == 3 and all(
        f"'{named}" in message for message in ignored
    )  # folder, JSON, TensorBoard
    assert [3] in [logged(folder)[0] for folder in log_folders(tiny.root())]


def test_a_log_of_that_name_alone_is_cut(tmp_path: Path) -> None:
    (tmp_path / "losses.json").touch()
    assert path_in_root("losses.json", tmp_path, "trainer_logs.json") is None
    assert path_in_root("runs/x/trainer_logs.json", tmp_path, "trainer_logs.json") == (
        tmp_path / "runs" / "x" / "trainer_logs.json"
    )
    assert path_in_root(".", tmp_path) == tmp_path


names = st.lists(
    st.sampled_from(["..", ".", "a", "link", "/", "checkpoint-1", "\0", "~"]), max_size=5
)


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a folder, and with a link that leads out of it."""
    root = tmp_path_factory.mktemp("linked") / "root"
    (root / "a").mkdir(parents=True)
    (root / "link").symlink_to(root.parent, target_is_directory=True)
    return root


@given(st.one_of(names.map("/".join), st.integers(), st.none(), st.lists(st.text()), st.text()))
def test_whatever_is_named_no_path_leads_out(linked: Path, named: Any) -> None:
    found = path_in_root(named, linked)
    assert found is None or found.resolve().is_relative_to(linked.resolve())


def test_what_is_stored_is_relative(tiny: Any) -> None:
    trainer = tiny.trainer(**LOGGED)
    trainer.train()
    stored = relative_to_root(trainer.logging_dir, trainer.args.output_dir)
    assert stored == f"runs/{log_folders(tiny.root())[0].name}"
    assert relative_to_root("/somewhere/else", trainer.args.output_dir) is None
    states = trainer.callbacks.state_dict()
    assert states["JsonLogger"]["place"] == f"{stored}/trainer_logs.json"
    assert states["ResumableSummaryWriter"] == {"place": stored, "step": 6}
    assert str(tiny.root()) not in str([states["JsonLogger"], states["ResumableSummaryWriter"]])
