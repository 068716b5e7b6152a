from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.callbacks import DivergenceDetector
from hypothesis import given
from hypothesis import strategies as st

from .callback_run import FakeTrainer


def observe(
    values: list[float], **options: Any
) -> tuple[DivergenceDetector, FakeTrainer, list[bool]]:
    """Whether a stop was asked for at each value."""
    callback = DivergenceDetector(**options)
    trainer = FakeTrainer([callback])
    stops = []
    for value in values:
        trainer.state.global_step += 1
        trainer.control.should_training_stop = False
        trainer.log({"loss": value})
        stops.append(trainer.control.should_training_stop)
    return callback, trainer, stops


def test_the_defaults_catch_a_jump_within_three_logs() -> None:
    callback, trainer, stops = observe([3.8] * 12 + [9.7] * 4)
    assert stops == [False] * 14 + [True, True]  # and again while it lasts
    assert (trainer.control.should_save, trainer.control.should_abort_without_save) == (True, False)
    assert trainer.state.stop_requested_by == "DivergenceDetector"
    assert (callback.count, callback.streak, callback.best) == (16, 4, pytest.approx(3.8))
    assert callback.ema == pytest.approx(3.8 + 5.9 * (1 - 0.7**4))


@pytest.mark.parametrize(
    ("values", "options", "first"),
    [
        ([1.0, 5.0, 5.0], {"smoothing": 1.0, "patience": 1, "warmup": 0}, 2),
        ([1.0, 2.0], {"smoothing": 1.0, "patience": 1, "warmup": 0}, 2),  # exactly the threshold
        ([1.0, 1.99], {"smoothing": 1.0, "patience": 1, "warmup": 0}, None),
        ([1.0, 5.0, 5.0, 5.0], {"smoothing": 1.0, "patience": 1, "warmup": 3}, 4),
        (
            [1.0, 5.0, 1.0, 5.0, 5.0],
            {"smoothing": 1.0, "patience": 2, "warmup": 0},
            5,
        ),  # the streak begins anew
        ([1.0, 1.5], {"smoothing": 1.0, "patience": 1, "warmup": 0, "relative_threshold": 1.5}, 2),
        (
            [1.0, 9.0],
            {
                "smoothing": 1.0,
                "patience": 1,
                "warmup": 0,
                "threshold": None,
                "relative_threshold": 10,
            },
            None,
        ),
        (
            [-1.0, -0.5],
            {"smoothing": 1.0, "patience": 1, "warmup": 0, "relative_threshold": 1.1},
            None,
        ),
    ],
)
def test_when_it_is_divergence(
    values: list[float], options: dict[str, Any], first: int | None
) -> None:
    _, _, stops = observe(values, **options)
    assert (stops.index(True) + 1 if True in stops else None) == first


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stops_at_once(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    callback, trainer, stops = observe(
        [1.0, 1.5, bad], action="abort", warmup=10, patience=9, smoothing=1.0
    )
    assert stops == [False, False, True]
    assert (trainer.control.should_save, trainer.control.should_abort_without_save) == (False, True)
    assert callback.state_dict() == {
        "ema": 1.5,
        "best": 1.0,
        "count": 2,
        "streak": 0,
        "last_step": 3,
    }
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    observe([bad])


def test_which_metric(caplog: pytest.LogCaptureFixture) -> None:
    callback = DivergenceDetector(use_eval_loss=True)
    trainer = FakeTrainer([callback])
    trainer.log({"loss": math.nan})
    trainer.evaluate(eval_loss=2.0)
    trainer.log({"eval_loss": 2.0})  # the same value by the other way
    assert (callback.count, trainer.control.should_training_stop) == (1, False)
    other = FakeTrainer([DivergenceDetector(metric_key="grad_norm")])
    other.log({"loss": 1.0})
    other.fire("on_train_end")
    other.state.is_world_process_zero = False
    other.fire("on_train_end")
    trainer.fire("on_train_end")
    assert [record.message for record in caplog.records] == [
        "DivergenceDetector: no record had grad_norm"
    ]


def test_messages_come_from_rank_0_and_stops_from_all(caplog: pytest.LogCaptureFixture) -> None:
    trainer = FakeTrainer([DivergenceDetector()])
    trainer.state.is_world_process_zero = False
    with caplog.at_level(logging.INFO):
        trainer.log({"loss": math.nan})
    assert trainer.control.should_training_stop and caplog.records == []


@pytest.mark.parametrize(
    "options",
    [
        {"smoothing": 0},
        {"smoothing": 1.1},
        {"threshold": 0},
        {"relative_threshold": 1},
        {"threshold": None},
        {"patience": 0},
        {"warmup": -1},
        {"action": "save"},
    ],
)
def test_what_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=f"{next(iter(options))}="):
        DivergenceDetector(**options)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.integers(0, 20))
def test_resuming_anywhere_changes_nothing(values: list[float], stop: int) -> None:
    options = {"warmup": 2, "patience": 2, "threshold": 0.5}
    whole, _, stops = observe(values, **options)
    first, _, _ = observe(values[:stop], **options)
    second = DivergenceDetector(**options)  # type: ignore[arg-type]
    trainer = FakeTrainer([second])
    second.load_state_dict(first.state_dict())
    for step, value in enumerate(values[stop:], start=len(values[:stop]) + 1):
        trainer.state.global_step, trainer.control.should_training_stop = step, False
        trainer.log({"loss": value})
        assert trainer.control.should_training_stop is stops[step - 1]
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("key", "filtered", "warned"),
    [(None, True, True), (None, False, False), ("eval_loss", True, False)],
)
def test_a_filter_that_hides_what_it_watches_for_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str | None, filtered: bool, warned: bool
) -> None:
    detector = DivergenceDetector(metric_key=key)
    FakeTrainer([detector], tmp_path / "logs", logging_nan_inf_filter=filtered).fire(
        "on_train_begin"
    )
    assert ("logging_nan_inf_filter puts the mean in the place of a loss" in caplog.text) is warned
