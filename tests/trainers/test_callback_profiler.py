"""Profiles of a run's steps, read as the viewers read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ckpt_trainers.callbacks import ProfilerCallback


def steps_in(path: Path) -> int:
    """How many steps of an optimizer a trace holds."""
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event["name"].startswith("Optimizer.step#") for event in events)


def profiled(tiny: Any, folder: Path, die_at: int | None = None, **args: Any) -> Any:
    notes = tiny.notes()
    notes.die_at = die_at
    callback = ProfilerCallback(3, 2, str(folder), with_stack=False)  # stacks take a minute to read
    return tiny.trainer(notes=notes, callbacks=(callback,), **{"max_steps": 7, **args})


def test_some_steps_are_profiled(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(tiny, tmp_path / "profiles").train()
    (path,) = (tmp_path / "profiles").iterdir()
    assert path.name == "trace_rank0.json" and steps_in(path) == 2
    out = capsys.readouterr().out
    assert out.count("Self CPU time total") == 1  # no accelerator, no table of one
    assert "Optimizer.step#AdamW.step" in out and f"profile: {path}" in out


def test_a_run_that_ends_in_the_window_writes_what_there_is(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(tiny.died):
        profiled(tiny, tmp_path / "dead", die_at=4).train()
    assert steps_in(tmp_path / "dead" / "trace_rank0.json") == 1
    # It goes on from step 4: the window begins at once.
    profiled(tiny, tmp_path / "resumed").train()
    assert steps_in(tmp_path / "resumed" / "trace_rank0.json") == 2
    profiled(tiny, tmp_path / "longer", max_steps=8).train()
    assert steps_in(tmp_path / "longer" / "trace_rank0.json") == 1


def test_training_goes_on_where_no_trace_can_be_written(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    trainer = profiled(tiny, tmp_path / "file" / "profiles")
    assert trainer.train().global_step == 7
    assert "no trace in" in caplog.text
