"""A run that goes on from an earlier step than the newest: what is in its way, what it has of the
data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ckptcore import CheckpointExists, CheckpointManager, CheckpointNotFound, CheckpointWarning

TEN = {"max_steps": 10, "save_steps": 2, "logging_strategy": "no"}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_steps_that_are_in_the_way_are_named_before_anything_is_trained(tiny: Any) -> None:
    whole = tiny.notes()
    tiny.trainer(notes=whole, **TEN).train()
    before = contents(tiny.root())
    back = {**TEN, "resume_from_checkpoint": str(tiny.root() / "checkpoint-4")}
    notes = tiny.notes()
    said = (
        re.escape(str(tiny.root()))
        + " holds steps 6, 8, 10, .* from step 4 .* another output_dir, or "
        "overwrite_output_dir=True"
    )
    with pytest.raises(CheckpointExists, match=said):
        tiny.trainer(notes=notes, **back).train()
    assert notes.steps == {} and contents(tiny.root()) == before
    # Not in the way: of a run that saves nothing, that ends before them or writes elsewhere.
    assert tiny.trainer(**{**back, "save_strategy": "no"}).train().steps_run == 6
    with pytest.raises(CheckpointExists, match="holds step 6, which"):
        tiny.trainer(**{**back, "max_steps": 7}).train()
    with pytest.warns(CheckpointWarning, match="gone back behind what it saved of steps 6, 8, 10"):
        assert tiny.trainer(**{**back, "max_steps": 5}).train().steps_run == 1
    assert tiny.steps() == [2, 4, 5, 6, 8, 10]
    assert tiny.trainer(**{**TEN, "save_strategy": "no"}).train().resumed_from == 5
    assert tiny.trainer("elsewhere", **back).train().steps_run == 6 and tiny.steps("elsewhere") == [
        6,
        8,
        10,
    ]
    replaced = tiny.notes()
    with pytest.warns(CheckpointWarning, match="gone back behind what it saved of steps 5"):
        result = tiny.trainer(notes=replaced, overwrite_output_dir=True, **back).train()
    assert (result.resumed_from, result.steps_run) == (4, 6)
    assert replaced.steps == {step: seen for step, seen in whole.steps.items() if step > 4}


def test_what_the_run_has_abandoned_before_is_replaced_unless_it_is_pinned(tiny: Any) -> None:
    tiny.trainer(**TEN).train()
    back = {
        **TEN,
        "resume_from_checkpoint": str(tiny.root() / "checkpoint-4"),
        "overwrite_output_dir": True,
    }
    notes = tiny.notes()
    notes.die_at = 7
    with pytest.warns(CheckpointWarning, match="saved of steps 8, 10"), pytest.raises(tiny.died):
        tiny.trainer(notes=notes, **back).train()
    with CheckpointManager(tiny.root()) as ckpt:
        ckpt.pin(8)
    with pytest.raises(
        CheckpointExists, match="holds step 8, which the run that goes on from step 6"
    ):
        tiny.trainer(**TEN).train()
    with CheckpointManager(tiny.root()) as ckpt:
        ckpt.unpin(8)
    assert tiny.trainer(**TEN).train().resumed_from == 6
    with CheckpointManager(tiny.root()) as ckpt:
        assert [info.step for info in ckpt.list()] == [2, 4, 6, 8, 10]


def test_a_run_beside_later_steps_of_an_older_one_is_refused_when_it_goes_on(tiny: Any) -> None:
    tiny.trainer(**TEN).train()
    notes = tiny.notes()
    notes.die_at = 5
    with pytest.raises(tiny.died):
        tiny.trainer(
            notes=notes, resume_from_checkpoint=False, overwrite_output_dir=True, **TEN
        ).train()
    later = tiny.notes()
    with pytest.raises(
        CheckpointExists, match="holds steps 6, 8, 10, which the run that goes on from step 4"
    ):
        tiny.trainer(notes=later, **TEN).train()
    assert later.steps == {}
    assert tiny.trainer(overwrite_output_dir=True, **TEN).train().resumed_from == 4


def test_a_damaged_newest_one_is_not_in_the_way(tiny: Any) -> None:
    tiny.trainer(**{**TEN, "max_steps": 6}).train()
    file = tiny.root() / "checkpoint-6" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\1\2\3")
    with pytest.warns(CheckpointWarning, match="checkpoint-6"):
        result = tiny.trainer(**{**TEN, "max_steps": 6}).train()
    assert (result.resumed_from, result.steps_run) == (4, 2)
    assert tiny.trainer(**{**TEN, "max_steps": 6}).train().resumed_from == 6


def test_the_best_one_may_be_gone_on_from(tiny: Any) -> None:
    values = [3.0, 1.0, 2.0]
    options: dict[str, Any] = {
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "logging_strategy": "no",
    }
    trainer = tiny.trainer(**options)
    trainer.measure = lambda dataset, prefix: {"eval_loss": values[trainer.state.global_step - 1]}
    trainer.train()
    result = tiny.trainer(
        resume_from_checkpoint="best", overwrite_output_dir=True, **options
    ).train()
    assert (result.resumed_from, result.steps_run) == (2, 1)
    with pytest.raises(
        CheckpointNotFound, match=r"'best': .* holds no checkpoint with eval_accuracy"
    ):
        tiny.trainer(
            resume_from_checkpoint="best", metric_for_best_model="accuracy", **options
        ).train()


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_start_over_are_those_of_the_epoch(tiny: Any, workers: int) -> None:
    options = {
        "max_steps": 16,
        "logging_strategy": "no",
        "dataloader_num_workers": workers,
    }  # 6 steps an epoch
    whole = tiny.notes()
    tiny.trainer("whole", whole, save_steps=4, **options).train()
    for at, epoch in ((8, 1), (12, 2)):
        path = str(tiny.root("whole") / f"checkpoint-{at}")
        notes = tiny.notes()
        trainer = tiny.trainer(
            "other",
            notes,
            resume_from_checkpoint=path,
            ignore_data_skip=True,
            save_strategy="no",
            **options,
        )
        trainer.train()
        first = epoch * 6 + 1
        steps = range(at + 1, 17)
        assert [notes.steps[step]["samples"] for step in steps][:4] == [
            whole.steps[step]["samples"] for step in range(first, first + 4)
        ]
        assert notes.steps[at + 1]["epoch"] == pytest.approx(epoch + 1 / 6)
