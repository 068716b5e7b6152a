"""What `save` is asked: steps, metrics, metadata, and places that are taken."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptcore import (
    CheckpointCoordinator,
    CheckpointExists,
    CheckpointManager,
    CheckpointWarning,
    InvalidState,
    UnsupportedValue,
    open_checkpoint,
    open_storage,
)


def state(value: float = 1.0) -> dict:
    return {"m": {"a": torch.tensor([value])}}


def held(root: Path, step: int) -> float:
    return open_checkpoint(root / f"checkpoint-{step}").read("m/a").item()


@pytest.mark.parametrize(
    "step", [0, 5, 10**12, np.int64(7), np.uint8(3), torch.tensor(4)], ids=repr
)
def test_steps_are_whole_numbers_of_any_type(step, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        info = ckpt.save(step, state())
        assert (info.step, type(info.step), info.name) == (
            int(step),
            int,
            f"checkpoint-{int(step)}",
        )
        assert ckpt.latest().step == int(step)


@pytest.mark.parametrize(
    "step",
    [
        -1,
        True,
        1.0,
        "5",
        None,
        2.5,
        math.nan,
        torch.tensor(2.5),
        torch.tensor([1, 2]),
        np.float64(3),
        [1],
    ],
    ids=repr,
)
def test_steps_that_are_none(step, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt, pytest.raises(InvalidState, match="step"):
        ckpt.save(step, state())
    assert list(tmp_path.iterdir()) == []


def test_metrics_become_numbers(tmp_path: Path) -> None:
    metrics = {
        "loss": torch.tensor(0.5),
        "bf16": torch.tensor(2.0, dtype=torch.bfloat16),
        "one": torch.tensor([3.0]),
        "np": np.float32(0.25),
        "int": 7,
        "flag": True,
        "nan": math.nan,
        "inf": -math.inf,
        "grad": torch.tensor(1.5, requires_grad=True),
    }
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state(), metrics=metrics)
        found = ckpt.latest().metrics
        assert ckpt.latest().manifest.metrics_step == 1
    assert math.isnan(found.pop("nan"))
    assert found == {
        "loss": 0.5,
        "bf16": 2.0,
        "one": 3.0,
        "np": 0.25,
        "int": 7.0,
        "flag": 1.0,
        "inf": -math.inf,
        "grad": 1.5,
    }
    assert {type(value) for value in found.values()} == {float}


@pytest.mark.parametrize(
    "value",
    [None, "high", [1.0], {"a": 1}, torch.ones(2), 1j, object(), 10**400],
    ids=lambda v: type(v).__name__,
)
def test_metrics_that_are_no_numbers(value, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt, pytest.raises(InvalidState, match="'loss'") as caught:
        ckpt.save(1, state(), metrics={"ok": 1.0, "loss": value})
    assert caught.value.key == "loss"
    assert list(tmp_path.iterdir()) == []


def test_metadata_is_kept(tmp_path: Path) -> None:
    metadata = {"note": "é", "list": [1, 2.5, None, True], "deep": {"a": {"b": "c"}}}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state(), metadata=metadata, training_args_hash="abc")
        manifest = ckpt.latest().manifest
    assert manifest.metadata == metadata
    assert manifest.training_args_hash == "abc"
    text = (tmp_path / "checkpoint-1" / "checkpoint_manifest.json").read_text()
    assert json.loads(text)["metadata"] == metadata


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"a", math.nan, torch.ones(1), "\ud800"],
    ids=lambda v: type(v).__name__,
)
def test_metadata_that_is_no_json_leaves_nothing(value, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt, pytest.raises(InvalidState, match="JSON"):
        ckpt.save(1, state(), metadata={"m": {"deep": value}})
    assert list(tmp_path.iterdir()) == []


def test_metadata_and_metrics_are_copies(tmp_path: Path) -> None:
    metadata, metrics = {"a": [1]}, {"loss": 1.0}
    with CheckpointManager(tmp_path) as ckpt:
        info = ckpt.save(1, state(), metadata=metadata, metrics=metrics)
        metrics["loss"] = 2.0
        assert info.metrics == {"loss": 1.0}


def test_a_committed_checkpoint_is_in_the_way(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state(1.0))
        with pytest.raises(CheckpointExists, match="overwrite=True") as caught:
            ckpt.save(1, state(2.0))
        assert isinstance(caught.value, FileExistsError)
        assert caught.value.step == 1
        assert caught.value.path == str(tmp_path / "checkpoint-1")
        assert held(tmp_path, 1) == 1.0
        ckpt.save(1, state(3.0), overwrite=True)
        assert held(tmp_path, 1) == 3.0
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
        assert ckpt.latest().sequence == 2


def test_overwriting_leaves_no_file_of_the_old_one(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"m": {"a": torch.ones(1)}, "gone": {"a": torch.ones(1)}})
        ckpt.save(1, state(2.0), overwrite=True)
    assert sorted(p.name for p in (tmp_path / "checkpoint-1").iterdir()) == [
        "checkpoint_manifest.json",
        "index.rank00000.msgpack",
        "m.safetensors",
    ]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("content", ["notes.txt", "folder/"])
def test_foreign_things_are_in_the_way(overwrite: bool, content: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "folder").mkdir() if content == "folder/" else (folder / content).write_text("mine")
    with (
        CheckpointManager(tmp_path) as ckpt,
        pytest.raises(CheckpointExists, match="move the folder away"),
    ):
        ckpt.save(1, state(), overwrite=overwrite)
    assert [p.name for p in tmp_path.rglob("*")] == ["checkpoint-1", content.rstrip("/")]


@pytest.mark.parametrize("content", [None, "m.safetensors", "index.rank00000.msgpack"])
def test_a_folder_that_does_not_say_whose_it_is_gives_way_to_overwrite(
    content: str | None, tmp_path: Path
) -> None:
    """It may be a copy that is going on, or another program's: only what somebody asks to replace
    is replaced."""
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    if content:
        (folder / content).write_bytes(b"half")
    (folder / "old.safetensors").write_bytes(b"half")
    before = sorted(p.name for p in folder.iterdir())
    with CheckpointManager(tmp_path) as ckpt:
        with pytest.raises(CheckpointExists, match="may be somebody else's"):
            ckpt.save(1, state(4.0))
        assert sorted(p.name for p in folder.iterdir()) == before
        ckpt.save(1, state(4.0), overwrite=True)
        assert ckpt.verify() == []
    assert held(tmp_path, 1) == 4.0
    assert "old.safetensors" not in {p.name for p in folder.iterdir()}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


@pytest.mark.parametrize("damage", ["a file is missing", "manifest", "no manifest", "withdrawn"])
@pytest.mark.parametrize("run", ["mine", "other"])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_save_replaces_only_what_is_provably_its_own(
    damage: str, run: str, kind: str, tmp_path: Path
) -> None:
    root = tmp_path if kind == "local" else f"memory://{tmp_path.name}-{damage.replace(' ', '')}"
    storage = open_storage(root)
    with CheckpointManager(root, run_id=run) as ckpt:
        ckpt.save(1, state(1.0))
    manifest = "checkpoint-1/checkpoint_manifest.json"
    if damage == "a file is missing":
        storage.remove("checkpoint-1/m.safetensors")
    elif damage == "withdrawn":
        storage.rename(manifest, "checkpoint-1/checkpoint_manifest.withdrawn.json")
    else:
        storage.remove(manifest)
        if damage == "manifest":
            storage.write(manifest, b"{}")
    own = damage == "withdrawn" or (damage == "a file is missing" and run == "mine")
    with CheckpointManager(root, run_id="mine") as ckpt:
        if not own:
            before = {entry.name: entry.size for entry in storage.list("checkpoint-1")}
            with pytest.raises(CheckpointExists, match="may be somebody else's"):
                ckpt.save(1, state(2.0))
            assert {entry.name: entry.size for entry in storage.list("checkpoint-1")} == before
        ckpt.save(1, state(2.0), overwrite=not own)
        assert (ckpt.verify(1), ckpt.latest().run_id) == ([], "mine")


def test_somebody_elses_model_stays_also_after_a_restore_that_passed_it_over(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights of a month")
    with CheckpointManager(tmp_path) as ckpt:
        with pytest.warns(CheckpointWarning, match="looks like a Hugging Face folder"):
            assert ckpt.restore(state(), fresh_ok=True).fresh
        with pytest.raises(CheckpointExists, match="may be somebody else's"):
            ckpt.save(1, state(4.0))
    assert (folder / "model.safetensors").read_bytes() == b"weights of a month"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_has_the_name_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    from ckptcore import CheckpointError

    place = tmp_path / "root" / "checkpoint-1"
    place.parent.mkdir()
    target = tmp_path / "elsewhere"
    target.mkdir()
    place.write_text("mine") if kind == "file" else place.symlink_to(target)
    with CheckpointManager(tmp_path / "root") as ckpt:
        try:
            ckpt.save(1, state())
        except CheckpointError:
            assert place.is_symlink() if kind == "link" else place.read_text() == "mine"
            assert [p.name for p in (tmp_path / "root").iterdir()] == ["checkpoint-1"]
        else:
            assert kind == "link"
            assert ckpt.latest().step == 1
    assert list(target.iterdir()) == []


def test_a_failed_save_leaves_the_earlier_ones_alone(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state(1.0))
        for step in (1, 2):
            with pytest.raises(UnsupportedValue):
                ckpt.save(step, {"m": {"a": torch.ones(1), "bad": object()}}, overwrite=True)
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
        assert held(tmp_path, 1) == 1.0
        assert ckpt.verify() == []


def test_single_checkpoints_without_a_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "one", "two", "deep/er/three/"):
        info = CheckpointCoordinator(state(6.0)).save_checkpoint(path, step=4, metadata={"k": 1})
        assert (info.step, info.manifest.metadata) == (4, {"k": 1})
        live = state(0.0)
        assert CheckpointCoordinator(live).load_checkpoint(path).step == 4
        assert live["m"]["a"].item() == 6.0
        with pytest.raises(CheckpointExists):
            CheckpointCoordinator(state()).save_checkpoint(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "one", "two"]


@pytest.mark.parametrize("url", ["memory://single-checkpoint", "memory://single/deep"])
def test_single_checkpoints_at_urls(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    CheckpointCoordinator(state(6.0)).save_checkpoint(url, overwrite=True)
    live = state(0.0)
    CheckpointCoordinator(live).load_checkpoint(url)
    assert live["m"]["a"].item() == 6.0
    assert list(tmp_path.iterdir()) == []


def test_manifest_says_who_and_with_what(tmp_path: Path) -> None:
    import platform

    import ckptcore

    with CheckpointManager(tmp_path, run_id="r") as ckpt:
        one = ckpt.save(1, state()).manifest
        two = ckpt.save(2, state()).manifest
    assert one.versions["ckptcore"] == ckptcore.__version__
    assert one.versions["torch"] == str(torch.__version__)
    assert one.versions["python"] == platform.python_version()
    assert (one.world_size, one.nodes, one.run_id) == (1, [[0]], "r")
    assert (one.sequence, two.sequence) == (1, 2)
    assert len({one.checkpoint_id, two.checkpoint_id, one.attempt_id, two.attempt_id}) == 4
    assert one.created.endswith("Z")
    assert set(one.timings) >= {"capture", "plan", "write"}
    part = one.components["m"]
    assert (part.pattern, part.writers, part.tensors, part.size_bytes) == ("GLOBAL", [0], 1, 4)
    assert all(len(f.digest) == 32 for f in one.files.values())
    for name, record in one.files.items():
        assert (tmp_path / "checkpoint-1" / name).stat().st_size == record.size
