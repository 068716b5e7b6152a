from __future__ import annotations

import math
from typing import Any

import pytest
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.callbacks import EarlyStopping
from hypothesis import given
from hypothesis import strategies as st

from .callback_run import FakeTrainer


def observe(values: list[float], **options: Any) -> tuple[EarlyStopping, list[bool]]:
    """What is asked for after each of the values."""
    callback = EarlyStopping(**options)
    trainer = FakeTrainer([callback])
    stops = []
    for value in values:
        trainer.state.global_step += 1
        trainer.evaluate(eval_loss=value, eval_accuracy=value)
        stops.append(trainer.control.should_training_stop)
    return callback, stops


def test_it_stops_after_so_many_evaluations_without_improvement() -> None:
    callback, stops = observe([3.0, 2.0, 2.5, 1.9, 2.0, 1.9, 1.95], patience=3)
    assert stops == [False] * 6 + [True]
    assert callback.state_dict() == {"best": 1.9, "counter": 3, "last_step": 7}


@pytest.mark.parametrize(
    ("values", "options", "best", "counter"),
    [
        ([1.0, 0.95, 0.85], {"threshold": 0.1, "patience": 9}, 0.85, 0),
        ([1.0, 0.95, 0.91], {"threshold": 0.1, "patience": 9}, 1.0, 2),
        ([0.1, 0.2, 0.15], {"metric": "accuracy", "patience": 9}, 0.2, 1),
        (
            [0.1, 0.2],
            {"metric": "eval_accuracy", "greater_is_better": False, "patience": 9},
            0.1,
            1,
        ),
        ([math.nan, 2.0, math.nan, math.nan], {"patience": 9}, 2.0, 2),
        ([math.nan, math.nan], {"patience": 2}, None, 2),
    ],
)
def test_what_is_better(
    values: list[float], options: dict[str, Any], best: float | None, counter: int
) -> None:
    callback, _ = observe(values, **options)
    assert (callback.best, callback.counter) == (best, counter)


def test_by_default_the_arguments_say_what_is_better() -> None:
    callback = EarlyStopping(patience=9)
    trainer = FakeTrainer([callback], metric_for_best_model="eval_loss", greater_is_better=True)
    for step, value in enumerate([1.0, 2.0, 1.5], start=1):
        trainer.state.global_step = step
        trainer.evaluate(eval_loss=value)
    assert (callback.best, callback.counter) == (2.0, 1)


def test_one_observation_for_a_step() -> None:
    callback = EarlyStopping(patience=2)
    trainer = FakeTrainer([callback])
    for _ in range(3):
        trainer.evaluate(eval_loss=1.0)
    assert callback.counter == 0
    checkpoint = trainer.save()
    again = EarlyStopping(patience=2)
    resumed = FakeTrainer([again])
    resumed.restore(checkpoint)
    resumed.evaluate(eval_loss=1.0)  # eval_on_start
    assert (again.counter, again.best) == (0, 1.0)


def test_a_missing_metric_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    callback = EarlyStopping(metric="bleu")
    trainer = FakeTrainer([callback])
    trainer.evaluate(eval_loss=1.0)
    trainer.evaluate(eval_loss=1.0)
    assert [record.message for record in caplog.records] == [
        "EarlyStopping: evaluations have no eval_bleu; they have eval_loss"
    ]
    assert callback.counter == 0


def test_what_cannot_work() -> None:
    for options in ({"patience": 0}, {"threshold": -0.1}, {"threshold": math.nan}):
        with pytest.raises(InvalidArgument):
            EarlyStopping(**options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="sees no evaluation"):
        FakeTrainer([EarlyStopping()], eval_strategy="no").fire("on_train_begin")
    FakeTrainer([EarlyStopping()], eval_strategy="no", eval_on_save=True).fire("on_train_begin")


def test_b43_patience_goes_on_over_resumes_and_a_stopped_run_stays_stopped() -> None:
    """patience 3, no improvement; killed and resumed after every evaluation."""

    def start() -> tuple[EarlyStopping, FakeTrainer]:
        callback = EarlyStopping(patience=3)
        return callback, FakeTrainer([callback])

    _, whole = start()
    stop = whole.train(20, lambda step: whole.evaluate(eval_loss=2.0))
    assert stop == 4
    checkpoint: dict[str, Any] | None = None
    ran = []
    for _ in range(4):
        callback, trainer = start()
        if checkpoint is not None:
            trainer.restore(checkpoint)
        assert not callback.run_is_over(trainer.args, trainer.state)
        ran.append(
            trainer.train(
                trainer.state.global_step + 1,
                lambda step: trainer.evaluate(eval_loss=2.0),  # noqa: B023
            )
        )
        checkpoint = trainer.save()
    assert ran == [1, 2, 3, 4] and trainer.control.should_training_stop
    assert checkpoint == whole.save()
    callback, trainer = start()
    trainer.restore(checkpoint)
    assert callback.run_is_over(trainer.args, trainer.state)
    # The same object in a run from the beginning.
    trainer.handler.reset()
    assert callback.state_dict() == {"best": None, "counter": 0, "last_step": -1}
    assert not callback.run_is_over(trainer.args, trainer.state)


@given(
    st.lists(st.one_of(st.just(math.nan), st.integers(0, 4)), min_size=1, max_size=15),
    st.integers(0, 14),
)
def test_resuming_anywhere_changes_nothing(values: list[float], stop: int) -> None:
    whole, stops = observe(values, patience=2)
    first, _ = observe(values[:stop], patience=2)
    second = EarlyStopping(patience=2)
    trainer = FakeTrainer([second])
    second.load_state_dict(first.state_dict())
    rest = []
    for step, value in enumerate(values[stop:], start=len(values[:stop]) + 1):
        trainer.state.global_step = step
        trainer.evaluate(eval_loss=value)
        rest.append(trainer.control.should_training_stop)
    assert second.state_dict() == whole.state_dict()
    if True not in stops[:stop]:
        assert rest == stops[stop:]
