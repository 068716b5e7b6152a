"""What is printed of reports, checkpoints and handles: one line that says what happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptcore import (
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    InvalidState,
    scan_root,
)


def state(**more) -> dict:
    return {"model": {"w": torch.ones(4)}, "counters": {"seen": 1}, **more}


def test_one_line_each(tmp_path: Path) -> None:
    ckpt = CheckpointManager(tmp_path)
    fresh = ckpt.restore(state())
    assert (str(fresh), repr(fresh)) == (
        "nothing restored: a fresh start",
        "<LoadReport: nothing restored: a fresh start>",
    )
    info = ckpt.save(30, state())
    assert (
        str(info) == f"checkpoint-30 (committed, step 30, 2 components, {info.size_bytes:,} bytes)"
    )
    assert repr(info) == f"<CheckpointInfo: {info}>"
    assert str(ckpt.restore(state())) == "restored checkpoint-30 (step 30, 2 components)"
    ckpt.save(40, state())
    (tmp_path / "checkpoint-40" / "model.safetensors").write_bytes(b"")
    with pytest.warns(CheckpointWarning):
        report = ckpt.restore(state())
    assert (
        repr(report)
        == "<LoadReport: restored checkpoint-30 (step 30, 2 components); skipped checkpoint-40>"
    )
    live = {"model": {"w": torch.zeros(4, dtype=torch.float64), "extra": 1}}
    report = ckpt.load(live, 30, strict=False, cast=True)
    assert (
        str(report)
        == "restored checkpoint-30 (step 30, 2 components); 1 missing; 1 unexpected; 1 cast"
    )
    damaged = scan_root(tmp_path)[-1]
    assert str(damaged).startswith("checkpoint-40 (damaged, step 40") and "\n" not in repr(damaged)
    handle = ckpt.save_async(50, state())
    assert repr(handle).startswith("<SaveHandle: step 50 (") and "\n" not in repr(handle)
    handle.result()
    assert repr(handle) == "<SaveHandle: step 50 (committed)>"
    ckpt.close()


def test_names_of_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name is an entry of the root, whatever the working directory; else a folder there."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    with CheckpointManager(root) as ckpt, CheckpointManager(elsewhere) as other:
        for step in (1, 2):
            ckpt.save(step, {"m": {"w": torch.full((2,), float(step))}})
        for step in (1, 7):
            other.save(step, {"m": {"w": torch.full((2,), 10.0 + step)}})
        monkeypatch.chdir(elsewhere)
        for call in (ckpt.load, ckpt.restore):
            for name, value in (
                ("checkpoint-1", 1.0),
                ("checkpoint-2", 2.0),
                ("checkpoint-7", 17.0),
            ):
                live = {"m": {"w": torch.zeros(2)}}
                call(live, name)
                assert live["m"]["w"].tolist() == [value] * 2
            live = {"m": {"w": torch.zeros(2)}}
            call(live, "./checkpoint-1")
            assert live["m"]["w"].tolist() == [11.0] * 2
            with pytest.raises(
                CheckpointNotFound,
                match=r"elsewhere/checkpoint-9.*root has no entry 'checkpoint-9'",
            ):
                call(live, "checkpoint-9")


def test_best_of_a_fresh_manager_names_the_metrics(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, state(), metrics={"eval_loss": 1.0, "acc": 0.5})
    ckpt = CheckpointManager(tmp_path)
    for ask in (ckpt.best, lambda: ckpt.load(state(), "best")):
        with pytest.raises(InvalidState, match="metrics in the checkpoints: acc, eval_loss"):
            ask()
    assert ckpt.best("acc", "max").step == 1
