"""A run that was stopped anywhere and resumed is the run that was not stopped, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

REFERENCES: dict[tuple[int, int], Any] = {}


def reference(tiny: Any, workers: int, accumulation: int) -> Any:
    """The run that is not stopped; it does not depend on the number of workers, which a test says
    of its own."""
    if (workers, accumulation) not in REFERENCES:
        notes = tiny.notes()
        trainer = tiny.trainer(
            f"reference-{workers}",
            notes,
            save_steps=5,
            gradient_accumulation_steps=accumulation,
            dataloader_num_workers=workers,
        )
        trainer.train()
        state = trainer.loader.state_dict()
        REFERENCES[workers, accumulation] = notes.steps, trainer.state.log_history, state
    return REFERENCES[workers, accumulation]


def stopped_and_resumed(tiny: Any, workers: int, accumulation: int, stops: list[int]) -> None:
    steps, history, position = reference(tiny, workers, accumulation)
    options = {"gradient_accumulation_steps": accumulation, "dataloader_num_workers": workers}
    joined: dict[int, Any] = {}
    for stop in stops:
        notes = tiny.notes()
        notes.die_at = stop
        with pytest.raises(tiny.died):
            tiny.trainer("stopped", notes, save_steps=stop, **options).train()
        joined |= notes.steps
        assert max(joined) == stop == tiny.steps("stopped")[-1]
    notes = tiny.notes()
    trainer = tiny.trainer("stopped", notes, save_steps=100, **options)
    result = trainer.train()
    assert result.resumed_from == stops[-1] and result.steps_run == len(steps) - stops[-1]
    joined |= notes.steps
    assert joined == steps
    assert trainer.loader.state_dict() == position
    without_times = [
        {k: v for k, v in entry.items() if not k.startswith("train_")}
        for entry in result.log_history
    ]
    assert without_times == [
        {k: v for k, v in e.items() if not k.startswith("train_")} for e in history
    ]
    assert result.log_history[-1]["train_loss"] == history[-1]["train_loss"]


def test_the_number_of_workers_changes_nothing(tiny: Any) -> None:
    steps, history, _ = reference(tiny, 0, 3)
    others, other_history, _ = reference(tiny, 2, 3)
    assert sorted(steps) == [1, 2, 3, 4, 5, 6] and steps == others
    assert (
        [entry["step"] for entry in history] == [entry["step"] for entry in other_history] == [4, 6]
    )


def test_every_sample_is_seen_once_in_each_epoch(tiny: Any) -> None:
    steps, _, _ = reference(tiny, 0, 1)
    assert sorted(steps) == list(range(1, 19))
    epochs = [
        [i for step in range(first, first + 6) for b in steps[step]["samples"] for i in b]
        for first in (1, 7, 13)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(11))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [steps[step]["epoch"] for step in (6, 12, 18)] == [1.0, 2.0, 3.0]


# Case B09. In the middle of an epoch, at its end, and right after; several stops in one run.
@pytest.mark.parametrize(
    ("workers", "accumulation", "stops"),
    [
        *[(0, 1, [stop]) for stop in (1, 5, 6, 7, 12, 17)],
        *[(0, 3, [stop]) for stop in (1, 2, 3, 5)],
        (0, 1, [2, 6, 11, 13]),
        (2, 1, [6, 8]),
        (2, 3, [2, 3]),
    ],
)
def test_b09_a_stopped_run_is_the_same_run(
    tiny: Any, workers: int, accumulation: int, stops: list[int]
) -> None:
    stopped_and_resumed(tiny, workers, accumulation, stops)


@pytest.mark.stress
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_run_may_be_stopped_at_every_step(tiny: Any, workers: int, accumulation: int) -> None:
    for stop in range(1, 18 if accumulation == 1 else 6):
        inner = type(tiny)(tiny.folder / str(stop))
        stopped_and_resumed(inner, workers, accumulation, [stop])


def test_a_graceful_stop_at_every_step_of_an_epoch_too(tiny: Any) -> None:
    """The steps of one run, each in a life of its own that is asked to stop: saved once, and
    nothing else is different."""
    steps, history, _ = reference(tiny, 0, 1)
    joined: dict[int, Any] = {}

    def stop(name: str, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or name == "on_optimizer_step"

    for step in range(1, 8):
        notes = tiny.notes()
        notes.do = stop
        result = tiny.trainer("stopped", notes, save_steps=1000).train()
        assert (result.steps_run, result.global_step, result.stop_reason) == (1, step, "requested")
        joined |= notes.steps
    notes = tiny.notes()
    result = tiny.trainer("stopped", notes, save_steps=1000).train()
    assert joined | notes.steps == steps and result.stop_reason is None
    assert tiny.steps("stopped") == [*range(1, 8), 18]
    assert [entry["loss"] for entry in result.log_history if "loss" in entry] == [
        e["loss"] for e in history if "loss" in e
    ]


@pytest.mark.parametrize("lost", ["scheduler", "loader", "rng", "optimizer", "trainer"])
def test_the_comparison_notices_what_a_resume_could_lose(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    steps, _, _ = reference(tiny, 0, 1)
    notes = tiny.notes()
    notes.die_at = 5
    with pytest.raises(tiny.died):
        tiny.trainer("stopped", notes, save_steps=5).train()
    trainer = tiny.trainer("stopped", notes := tiny.notes(), save_strategy="no")
    monkeypatch.setattr(trainer, "is_restored", lambda component: component != lost)
    result = trainer.train()
    if lost == "trainer":
        assert result.steps_run == 18
    else:
        assert [step for step in (6, 7) if notes.steps[step] != steps[step]] != []
