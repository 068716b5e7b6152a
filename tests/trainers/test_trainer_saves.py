"""A trainer's checkpoints: when there is one, which stay, what a run goes on from."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.callbacks import CheckpointMetrics, EarlyStopping

from ckptcore import (
    AsyncSaveError,
    CheckpointExists,
    CheckpointManager,
    CheckpointWarning,
    open_storage,
    scan_root,
)
from ckptcore.testing.faults import FaultStorage


def fingerprint(folder: Path) -> dict[str, tuple[str, int]]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files
    }


# Case B46.
@pytest.mark.parametrize("killed", [None, 22])
def test_b46_the_last_step_is_saved_exactly_once(tiny: Any, killed: int | None) -> None:
    options = {"max_steps": 25, "save_steps": 10, "logging_strategy": "no"}
    notes = tiny.notes()
    notes.die_at = killed
    if killed is not None:
        with pytest.raises(tiny.died):
            tiny.trainer(notes=notes, **options).train()
        assert tiny.steps() == [10, 20]
        notes = tiny.notes()
    result = tiny.trainer(notes=notes, **options).train()
    assert result.steps_run == (25 if killed is None else 5)
    assert tiny.steps() == [10, 20, 25]
    assert [step for _, step in notes.of("on_save")] == ([10, 20, 25] if killed is None else [25])
    before = fingerprint(tiny.root())
    again = tiny.trainer(
        notes=(notes := tiny.notes()), report_to=["json", "tensorboard"], **options
    ).train()
    assert (again.steps_run, again.global_step, again.resumed_from) == (0, 25, 25)
    assert names_of(notes) == ["on_init_end"] and fingerprint(tiny.root()) == before


def names_of(notes: Any) -> list[str]:
    return [name for name, _ in notes.events]


@pytest.mark.parametrize("options", [{"save_steps": 6}, {"save_strategy": "epoch"}])
def test_b46_a_last_step_that_is_due_is_saved_once(tiny: Any, options: dict[str, Any]) -> None:
    notes = tiny.notes()
    tiny.trainer(notes=notes, max_steps=12, **options).train()
    assert [step for _, step in notes.of("on_save")] == [6, 12] and tiny.steps() == [6, 12]
    assert [(record.step, record.ok, record.error) for record in notes.records] == [
        (6, True, None),
        (12, True, None),
    ]


# Case B44.
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_b44_rates_of_a_resumed_run_are_those_of_the_run(
    tiny: Any, schedule: str, warmup: int
) -> None:
    options = {
        "max_steps": 10,
        "lr_scheduler_type": schedule,
        "warmup_steps": warmup,
        "save_steps": 1,
        "logging_strategy": "no",
    }
    whole = tiny.notes()
    tiny.trainer("whole", whole, **options).train()
    rates = {step: seen["rate"] for step, seen in whole.steps.items()}
    assert len(set(rates.values())) >= 9
    for stop in range(1, 10):
        folder = tiny.root(f"from-{stop}")
        folder.mkdir()
        shutil.copytree(tiny.root("whole") / f"checkpoint-{stop}", folder / f"checkpoint-{stop}")
        notes = tiny.notes()
        tiny.trainer(f"from-{stop}", notes, **{**options, "save_strategy": "no"}).train()
        assert {step: seen["rate"] for step, seen in notes.steps.items()} == {
            step: rate for step, rate in rates.items() if step > stop
        }


def test_b44_live_arguments_win_and_changes_are_told(
    tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = tiny.notes()
    stopped.die_at = 7
    with pytest.raises(tiny.died):
        tiny.trainer(notes=stopped, max_steps=10, save_steps=5, logging_steps=5).train()
    notes = tiny.notes()
    tiny.trainer(notes=notes, max_steps=20, save_steps=2, logging_steps=3).train()
    assert [step for _, step in notes.of("on_save")] == [6, 8, 10, 12, 14, 16, 18, 20]
    assert [step for _, step in notes.of("on_log")][:3] == [6, 9, 12]
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "max_steps 10 -> 20" in told and "save_steps" not in told and "logging_steps" not in told
    caplog.clear()
    tiny.trainer(max_steps=22, learning_rate=0.5, save_steps=2).train()
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "max_steps 20 -> 22" in told and "learning_rate 0.01 -> 0.5" in told


# Case B43.
def test_b43_an_early_stop_is_the_same_after_any_resume(tiny: Any) -> None:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "learning_rate": 0.0,
        "weight_decay": 0.0,
        "max_steps": 30,
    }
    whole = tiny.trainer("whole", callbacks=(EarlyStopping(patience=3),), **options).train()
    assert (whole.global_step, whole.stop_reason) == (
        8,
        "requested",
    )  # the first counts as the best
    for stop in (2, 4, 6):
        notes = tiny.notes()
        notes.die_at = stop
        with pytest.raises(tiny.died):
            tiny.trainer(
                "stopped", notes, callbacks=(EarlyStopping(patience=3),), **options
            ).train()
    resumed = tiny.trainer("stopped", callbacks=(EarlyStopping(patience=3),), **options)
    assert resumed.train().global_step == 8
    before = fingerprint(tiny.root("stopped"))
    notes = tiny.notes()
    again = tiny.trainer(
        "stopped", notes, callbacks=(EarlyStopping(patience=3),), **options
    ).train()
    assert (again.steps_run, again.resumed_from) == (0, 8)
    assert names_of(notes) == ["on_init_end"] and fingerprint(tiny.root("stopped")) == before
    patient = tiny.trainer("stopped", callbacks=(EarlyStopping(patience=5),), **options).train()
    assert patient.global_step == 12


def test_b43_a_trainer_that_is_used_again_counts_from_the_start(tiny: Any) -> None:
    stopping = EarlyStopping(patience=2)
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "learning_rate": 0.0,
        "weight_decay": 0.0,
    }
    trainer = tiny.trainer(
        callbacks=(stopping,),
        max_steps=30,
        resume_from_checkpoint=False,
        overwrite_output_dir=True,
        **options,
    )
    for _ in range(2):
        result = trainer.train()
        assert (result.global_step, result.steps_run, stopping.counter) == (3, 3, 2)
        assert [entry["step"] for entry in result.log_history] == [1, 2, 3]


# Case B16.
@pytest.mark.parametrize("last", [False, True])
def test_b16_a_save_that_fails_is_told_to_callbacks_and_raised(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    failing = 12 if last else 4

    def make(root: str, **how: Any) -> CheckpointManager:
        storage = FaultStorage(open_storage(root))
        storage.fail(kind="write_at", path=f"*checkpoint-{failing}*", times=None)
        return CheckpointManager(storage, **how)

    monkeypatch.setattr("ckpt_trainers.checkpoints.CheckpointManager", make)
    notes = tiny.notes()
    with pytest.raises(AsyncSaveError) as caught:
        tiny.trainer(notes=notes, max_steps=12, save_steps=4, logging_strategy="no").train()
    assert caught.value.step == failing
    ok = {record.step: record.ok for record in notes.records}
    assert ok == ({4: True, 8: True, 12: False} if last else {4: False})
    assert tiny.steps() == ([4, 8] if last else [])
    assert ("on_train_end", 12) not in notes.events


def test_commits_are_told_with_their_numbers(tiny: Any) -> None:
    for save_async in (True, False):
        run = f"async-{save_async}"
        notes = tiny.notes()
        result = tiny.trainer(
            run,
            notes,
            callbacks=(CheckpointMetrics(),),
            max_steps=6,
            save_steps=3,
            save_async=save_async,
            logging_strategy="no",
        ).train()
        assert [(record.step, record.ok) for record in notes.records] == [(3, True), (6, True)]
        infos = scan_root(str(tiny.root(run)))
        assert [record.bytes for record in notes.records] == [info.size_bytes for info in infos]
        assert all(record.stall_ms > 0 and record.save_s > 0 for record in notes.records)
        told = [entry for entry in result.log_history if "checkpoint/bytes" in entry]
        assert told and all(entry["checkpoint/stall_ms"] > 0 for entry in told)


# What a run goes on from.


def test_a_fresh_run_does_not_touch_what_is_there_unless_told(tiny: Any) -> None:
    tiny.trainer(max_steps=4, save_steps=2).train()
    before = fingerprint(tiny.root())
    with pytest.raises(CheckpointExists, match="up to step 4"):
        tiny.trainer(max_steps=4, resume_from_checkpoint=False).train()
    assert fingerprint(tiny.root()) == before
    result = tiny.trainer(
        max_steps=2, save_steps=2, resume_from_checkpoint=False, overwrite_output_dir=True, seed=6
    ).train()
    assert (result.steps_run, result.resumed_from) == (2, None)
    assert tiny.trainer(max_steps=3, save_steps=3).train().resumed_from == 2


def test_a_run_may_go_on_from_a_checkpoint_elsewhere(tiny: Any) -> None:
    whole = tiny.notes()
    tiny.trainer("whole", whole, max_steps=6, save_steps=2).train()
    notes = tiny.notes()
    path = str(tiny.root("whole") / "checkpoint-2")
    result = tiny.trainer(
        "branch", notes, max_steps=6, save_steps=2, resume_from_checkpoint=path
    ).train()
    assert (result.resumed_from, result.steps_run) == (2, 4) and tiny.steps("branch") == [4, 6]
    assert notes.steps == {step: seen for step, seen in whole.steps.items() if step > 2}


def test_weights_alone_are_not_gone_on_from(tiny: Any) -> None:
    tiny.trainer(max_steps=3, save_steps=3).train()
    tiny.trainer(max_steps=6, save_steps=6, save_only_model=True).train()
    assert tiny.steps() == [3, 6]
    with pytest.raises(InvalidArgument, match="weights alone"):
        path = str(tiny.root() / "checkpoint-6")
        tiny.trainer("other", resume_from_checkpoint=path).train()
    with pytest.warns(CheckpointWarning, match="checkpoint-6: weights alone"):
        result = tiny.trainer(
            max_steps=6, save_steps=6, save_only_model=True, overwrite_output_dir=True
        ).train()
    assert (result.resumed_from, result.steps_run) == (3, 3)
    tiny.trainer("weights", max_steps=2, save_steps=1, save_only_model=True).train()
    with pytest.warns(CheckpointWarning, match="checkpoint-1, checkpoint-2: weights alone"):
        result = tiny.trainer("weights", max_steps=2, save_steps=1, save_only_model=True).train()
    assert (result.resumed_from, result.steps_run) == (None, 2)


def test_the_position_in_the_data_may_be_left_behind(tiny: Any) -> None:
    whole = tiny.notes()
    tiny.trainer("whole", whole, max_steps=3, save_steps=3).train()
    notes = tiny.notes()
    tiny.trainer("whole", notes, max_steps=6, ignore_data_skip=True, save_strategy="no").train()
    assert [notes.steps[step]["samples"] for step in (4, 5, 6)] == [
        whole.steps[step]["samples"] for step in (1, 2, 3)
    ]


def test_the_states_of_callbacks_may_be_left_behind(tiny: Any) -> None:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "learning_rate": 0.0,
        "weight_decay": 0.0,
        "save_steps": 1,
    }
    tiny.trainer(callbacks=(EarlyStopping(patience=3),), max_steps=3, **options).train()
    fresh = EarlyStopping(patience=3)
    again = tiny.trainer(
        callbacks=(fresh,), max_steps=5, restore_callback_states_from_checkpoint=False, **options
    )
    assert again.train().global_step == 5 and fresh.counter == 1


# Which one is best.


def limits(tiny: Any, values: list[float], **options: Any) -> tuple[Any, Any]:
    """A run whose evaluations give these values, one a step."""
    notes = tiny.notes()
    trainer = tiny.trainer(
        notes=notes,
        max_steps=len(values),
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        logging_strategy="no",
        **options,
    )
    trainer.measure = lambda dataset, prefix: {"eval_loss": values[trainer.state.global_step - 1]}
    return trainer, notes


@pytest.mark.parametrize(
    ("greater", "limit", "kept", "best"),
    [(None, 1, [3, 6], 3), (None, 2, [3, 5, 6], 3), (True, 1, [2, 6], 2), (True, 2, [2, 5, 6], 2)],
)
def test_b13_the_best_one_stays_beside_the_newest(
    tiny: Any, greater: bool | None, limit: int, kept: list[int], best: int
) -> None:
    values = [3.0, 5.0, 1.0, 4.0, 1.0, 2.0]
    trainer, _ = limits(
        tiny, values, save_total_limit=limit, load_best_model_at_end=True, greater_is_better=greater
    )
    weights: dict[int, torch.Tensor] = {}
    trainer.callbacks.add(keeps_weights(weights))
    trainer.train()
    assert tiny.steps() == kept
    assert (trainer.state.best_step, trainer.state.best_metric) == (best, values[best - 1])
    assert torch.equal(trainer.model.head.weight, weights[best]) and not torch.equal(
        weights[best], weights[6]
    )


def keeps_weights(found: dict[int, torch.Tensor]) -> Any:
    class Keeps:
        def on_step_end(self, state: Any, model: Any, **_: Any) -> None:
            found[state.global_step] = model.head.weight.detach().clone()

    return Keeps()


def test_several_best_ones_may_stay(tiny: Any) -> None:
    trainer, _ = limits(
        tiny,
        [3.0, 1.0, 2.0, 5.0, 4.0],
        save_total_limit=1,
        preserve_best_model=True,
        preserve_n_best=2,
    )
    trainer.train()
    assert tiny.steps() == [2, 3, 5]


def test_saving_when_it_is_the_best_so_far(tiny: Any) -> None:
    trainer, notes = limits(
        tiny, [3.0, 4.0, 2.0, 2.0, 1.0, 1.5], save_strategy="best", load_best_model_at_end=True
    )
    trainer.train()
    assert [step for _, step in notes.of("on_save")] == [1, 3, 5] == tiny.steps()


def test_evaluating_whenever_a_checkpoint_is_made(tiny: Any) -> None:
    notes = tiny.notes()
    trainer = tiny.trainer(
        notes=notes,
        eval_on_save=True,
        save_steps=4,
        max_steps=10,
        eval_strategy="steps",
        eval_steps=8,
        eval_on_start=True,
    )
    trainer.train()
    seen = notes.of("on_evaluate", "on_save")
    assert [step for name, step in seen if name == "on_evaluate"] == [0, 4, 8, 10]
    assert [step for name, step in seen if name == "on_save"] == [4, 8, 10]
    assert trainer.state.best_step != 0
    assert all("eval_loss" in info.metrics for info in scan_root(str(tiny.root())))


# Case B32.
@pytest.mark.parametrize("gone", [False, True])
def test_b32_the_best_one_is_found_after_a_move_and_replaced_when_it_is_gone(
    tiny: Any, gone: bool
) -> None:
    best_at_2 = [2.0, 1.0, 3.0, 4.0]
    trainer, _ = limits(tiny, best_at_2, save_total_limit=1, load_best_model_at_end=True)
    trainer.train()
    assert tiny.steps() == [2, 4]
    shutil.move(tiny.root(), moved := tiny.root("moved"))
    if gone:
        shutil.rmtree(moved / "checkpoint-2")
    shutil.copytree(moved, tiny.root())
    shutil.rmtree(moved)
    trainer, _ = limits(
        tiny, [*best_at_2, 6.0, 5.0], save_total_limit=1, load_best_model_at_end=True
    )
    if gone:
        with pytest.warns(
            CheckpointWarning,
            match="checkpoint-2, the best checkpoint so far, is not there any more",
        ):
            result = trainer.train()
    else:
        result = trainer.train()
    assert (result.resumed_from, result.global_step) == (4, 6)
    best = 4 if gone else 2
    assert trainer.state.best_step == best and tiny.steps() == [best, 6]
    reader = tiny.trainer(
        "reader", resume_from_checkpoint=str(tiny.root() / f"checkpoint-{best}"), max_steps=best
    )
    reader.train()
    assert torch.equal(trainer.model.head.weight, reader.model.head.weight)


@pytest.mark.parametrize(
    ("options", "moments"),
    [
        ({}, 3),
        ({"save_only_model": True}, 1),
        ({"save_async": False}, 0),
        ({"save_strategy": "no"}, 0),
    ],
)
def test_the_first_save_is_prepared_after_the_first_step(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], moments: int
) -> None:
    """With all the state that there is by then, and before anything is saved; also in a run that
    goes on."""
    steps, sizes = [], []
    real = CheckpointManager.prewarm

    def prewarm(manager: CheckpointManager, state: Any) -> None:
        steps.append(trainer.state.global_step)
        real(manager, state)
        sizes.append(manager._saves._pool.block.numel())

    monkeypatch.setattr(CheckpointManager, "prewarm", prewarm)
    trainer = tiny.trainer(max_steps=4, save_steps=4, **options)
    trainer.train()
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert steps == ([1] if moments else [])
    assert [size >= moments * weights for size in sizes] == [True] * len(steps)
    if moments == 3:
        trainer = tiny.trainer(max_steps=6, save_steps=4)
        trainer.train()
        assert steps == [1, 5]
