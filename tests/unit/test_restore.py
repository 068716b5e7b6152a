"""restore("auto"), B06 and B05: the newest checkpoint that verifies, else a fresh start, else a
clear error."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from ckptcore import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    NoUsableCheckpoint,
    StateMismatch,
    UnsupportedVersion,
)
from ckptcore.format.digest import content_digest

MANIFEST = "checkpoint_manifest.json"


def state(value: float = 0.0) -> dict:
    return {"m": {"a": torch.full((3,), value), "b": torch.full((2,), value), "n": value}}


def held(live: dict) -> list[float]:
    return [*live["m"]["a"].tolist(), *live["m"]["b"].tolist()]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path, run_id="run") as ckpt:
        ckpt.save(1, state(1.0))
        ckpt.save(2, state(2.0))
    return tmp_path


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def rewrite(root: Path, step: int, change) -> None:
    """Change a manifest and give it a digest that fits."""
    file = root / f"checkpoint-{step}" / MANIFEST
    document = json.loads(file.read_bytes())
    del document["digest"]
    change(document)
    body = json.dumps(document, indent=1, sort_keys=True).removesuffix("\n}").encode()
    file.write_bytes(body + b',\n "digest": "%s"\n}\n' % content_digest(body).encode())


def test_b06a_newest_without_any_pointer(root: Path) -> None:
    assert sorted(p.name for p in root.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    live = state()
    report = CheckpointManager(root).restore(live)
    assert (report.step, report.fresh, report.skipped) == (2, False, {})
    assert held(live) == [2.0] * 5
    assert report.values["m"]["n"] == 2.0


def test_b06b_only_unusable_ones_raise_and_nothing_is_touched(root: Path) -> None:
    for step in (1, 2):
        (root / f"checkpoint-{step}" / MANIFEST).unlink()
    before, live = snapshot(root), state()
    with pytest.raises(
        NoUsableCheckpoint, match=r"checkpoint-2.*checkpoint-1.*fresh_ok=True"
    ) as caught:
        CheckpointManager(root).restore(live)
    assert set(caught.value.reasons) == {"checkpoint-1", "checkpoint-2"}
    assert isinstance(caught.value, CheckpointNotFound)
    assert snapshot(root) == before
    assert held(live) == [0.0] * 5
    with pytest.warns(CheckpointWarning, match="starting fresh") as warned:
        report = CheckpointManager(root).restore(live, fresh_ok=True)
    assert len(warned) == 1
    assert report.fresh
    assert set(report.skipped) == {"checkpoint-1", "checkpoint-2"}
    assert snapshot(root) == before


@pytest.mark.parametrize("exists", [True, False])
def test_b06c_empty_root_starts_fresh(
    exists: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    if exists:
        root.mkdir()
    live = state(5.0)
    with caplog.at_level(logging.INFO, "ckptcore"):
        report = CheckpointManager(root).restore(live)
    assert (report.fresh, report.step, report.values) == (True, None, {})
    assert held(live) == [5.0] * 5
    assert "starting fresh" in caplog.text
    assert root.exists() == exists


def test_foreign_files_and_folders_do_not_count(tmp_path: Path) -> None:
    for name in ("checkpoint-x", "checkpoint-01", "checkpoint-1.bak", "tensorboard", "checkpoint-"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert CheckpointManager(tmp_path).restore(state()).fresh


def flip(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "data": lambda folder: flip(folder / "m.safetensors"),
    "header": lambda folder: flip(folder / "m.safetensors", 20),
    "index": lambda folder: flip(folder / "index.rank00000.msgpack", 30),
    "manifest": lambda folder: flip(folder / MANIFEST, 30),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "empty manifest": lambda folder: (folder / MANIFEST).write_bytes(b""),
    "no data": lambda folder: (folder / "m.safetensors").unlink(),
    "no index": lambda folder: (folder / "index.rank00000.msgpack").unlink(),
    "cut": lambda folder: (folder / "m.safetensors").write_bytes(
        (folder / "m.safetensors").read_bytes()[:-1]
    ),
    "longer": lambda folder: (folder / "m.safetensors").write_bytes(
        (folder / "m.safetensors").read_bytes() + b"\0"
    ),
    "zeroed": lambda folder: (folder / "m.safetensors").write_bytes(
        bytes((folder / "m.safetensors").stat().st_size)
    ),
    "link": lambda folder: link(folder / "m.safetensors"),
    "folder": lambda folder: (
        (folder / "m.safetensors").unlink(),
        (folder / "m.safetensors").mkdir(),
    ),
    "swapped": lambda folder: shutil.copy(
        folder.parent / "checkpoint-1" / "m.safetensors", folder / "m.safetensors"
    ),
    "newer format": lambda folder: rewrite(
        folder.parent, 2, lambda document: document.update(format_version="2.0")
    ),
    "no digest of a file": lambda folder: rewrite(
        folder.parent,
        2,
        lambda document: document["files"].update({"m.safetensors": [4116, "", 0]}),
    ),
    "file not listed": lambda folder: rewrite(
        folder.parent,
        2,
        lambda document: (
            document["files"].pop("m.safetensors"),
            document["components"]["m"].update(files=[]),
        ),
    ),
}


def link(file: Path) -> None:
    target = file.parent.parent / "elsewhere"
    file.rename(target)
    file.symlink_to(target)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_b05_damage_falls_back_with_one_warning(root: Path, damage) -> None:
    damage(root / "checkpoint-2")
    before, live = snapshot(root), state()
    with pytest.warns(
        CheckpointWarning, match=r"restored checkpoint-1 \(step 1\); skipped checkpoint-2: "
    ) as warned:
        report = CheckpointManager(root).restore(live)
    assert len(warned) == 1
    assert (report.step, list(report.skipped)) == (1, ["checkpoint-2"])
    assert held(live) == [1.0] * 5
    assert report.values["m"]["n"] == 1.0
    assert snapshot(root) == before, "nothing is deleted on the quiet"


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_b05_damage_of_an_explicit_step_raises(
    root: Path, damage, request: pytest.FixtureRequest
) -> None:
    damage(root / "checkpoint-2")
    live = state()
    kinds = {"no manifest": CheckpointNotFound, "newer format": UnsupportedVersion}
    with pytest.raises(kinds.get(request.node.callspec.id, CheckpointCorrupt)):
        CheckpointManager(root).load(live, 2, transactional=True)
    assert held(live) == [0.0] * 5


REPLACEABLE = {
    name: damage for name, damage in DAMAGE.items() if name not in ("newer format", "folder")
}


@pytest.mark.parametrize("damage", REPLACEABLE.values(), ids=REPLACEABLE.keys())
def test_the_next_save_of_a_damaged_step_replaces_it(root: Path, damage) -> None:
    damage(root / "checkpoint-2")
    ckpt = CheckpointManager(root)
    with pytest.warns(CheckpointWarning):
        ckpt.restore(state())
    ckpt.save(2, state(2.5))
    live = state()
    assert CheckpointManager(root).restore(live).step == 2
    assert held(live) == [2.5] * 5
    assert ckpt.verify() == []


def test_a_newer_format_is_never_replaced(root: Path) -> None:
    DAMAGE["newer format"](root / "checkpoint-2")
    ckpt = CheckpointManager(root)
    with pytest.warns(CheckpointWarning, match=r"2\.0"):
        ckpt.restore(state())
    before = snapshot(root / "checkpoint-2")
    for overwrite in (False, True):
        with pytest.raises(CheckpointExists, match=r"2\.0"):
            ckpt.save(2, state(3.0), overwrite=overwrite)
    assert snapshot(root / "checkpoint-2") == before


def test_fresh_start_after_damage_leaves_live_state_as_it_was(tmp_path: Path) -> None:
    # The damaged tensor is the last one: the others could be read before the damage shows.
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state(1.0))
    DAMAGE["data"](tmp_path / "checkpoint-1")
    live = state(7.0)
    with pytest.warns(CheckpointWarning, match="starting fresh"):
        report = CheckpointManager(tmp_path).restore(live, fresh_ok=True)
    assert report.fresh
    assert held(live) == [7.0] * 5


def test_nothing_of_a_damaged_checkpoint_remains_after_the_fallback(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"m": {"b": torch.ones(2)}})
        ckpt.save(2, {"m": {"a": torch.full((3,), 2.0), "b": torch.full((2,), 2.0)}})
    flip(tmp_path / "checkpoint-2" / "m.safetensors")
    live = {"m": {"a": torch.zeros(3), "b": torch.zeros(2)}}
    with pytest.warns(CheckpointWarning):
        report = CheckpointManager(tmp_path).restore(live, strict=False)
    assert (report.step, report.missing) == (1, ["m/a"])
    assert live["m"]["b"].tolist() == [1.0, 1.0]
    assert live["m"]["a"].tolist() == [0.0] * 3, (
        "a tensor of step 2 beside those of step 1 is a wrong restore"
    )


def test_mismatch_is_no_damage(root: Path) -> None:
    live = {"m": torch.nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(2)})}
    with pytest.raises(StateMismatch):
        CheckpointManager(root).restore(live)
    assert live["m"]["b"].tolist() == [0.0, 0.0]


def test_explicit_choices(root: Path) -> None:
    ckpt = CheckpointManager(root)
    for which, value in [
        ("latest", 2.0),
        (1, 1.0),
        (str(root / "checkpoint-1"), 1.0),
        (root / "checkpoint-2", 2.0),
    ]:
        live = state()
        ckpt.restore(live, which)
        assert held(live) == [value] * 5, which
    with pytest.raises(CheckpointNotFound):
        ckpt.restore(state(), 3)


def test_a_fallback_does_not_warn_of_what_it_has_overwritten(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"m": {"a": torch.full((3,), float(step))}})
    flip(tmp_path / "checkpoint-2" / "m.safetensors")
    live = {"m": {"a": torch.zeros(3)}}
    with pytest.warns(CheckpointWarning, match="is damaged") as told:
        report = CheckpointManager(tmp_path).restore(live)
    assert (report.step, live["m"]["a"].tolist()) == (1, [1.0, 1.0, 1.0])
    assert "do not train on it" not in str(told[0].message) + report.skipped["checkpoint-2"]
    with pytest.raises(CheckpointCorrupt, match="do not train on it"):
        CheckpointManager(tmp_path).load(live, 2)
