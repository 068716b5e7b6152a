from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ckpt_trainers.callbacks import CheckpointMetrics, DefaultMetrics

from .callback_run import FakeTrainer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def start(peak: float | None = None, total_flos: float = 0.0) -> tuple[FakeTrainer, Clock]:
    callback, clock = DefaultMetrics(peak), Clock()
    callback.clock = clock  # type: ignore[method-assign]
    trainer = FakeTrainer([callback])
    trainer.state.total_flos = total_flos
    trainer.fire("on_train_begin")
    return trainer, clock


def step(trainer: FakeTrainer, clock: Clock, seconds: float, flos: float = 0.0) -> None:
    trainer.fire("on_step_begin")
    clock.now += seconds
    trainer.state.total_flos += flos
    trainer.state.global_step += 1
    trainer.fire("on_step_end")


def log(trainer: FakeTrainer, **values: Any) -> dict[str, Any]:
    trainer.log(values)
    return trainer.state.log_history[-1]


def test_tokens_per_second_since_the_log_before() -> None:
    trainer, clock = start()
    step(trainer, clock, 2)
    assert "tok_per_sec" not in log(trainer, tokens=100)
    clock.now += 3
    assert log(trainer, tokens=100)["tok_per_sec"] == 33
    clock.now += 1
    # A record that is not one of training does not begin the interval anew.
    assert "tok_per_sec" not in log(trainer, **{"checkpoint/step": 1})
    clock.now += 1
    assert log(trainer, tokens=100)["tok_per_sec"] == 50
    trainer.fire("on_train_begin")
    clock.now += 1
    assert "tok_per_sec" not in log(trainer, tokens=100)


def test_use_of_the_hardware_counts_the_time_in_steps_only() -> None:
    trainer, clock = start(peak=1000.0, total_flos=1e9)  # a resumed run
    step(trainer, clock, 2, 500)
    clock.now += 50  # an evaluation
    step(trainer, clock, 2, 700)
    assert log(trainer, tokens=1)["mfu"] == pytest.approx(1200 / 4 / 1000)
    step(trainer, clock, 1, 250)
    assert "mfu" not in log(trainer, loss=1.0)
    assert log(trainer, tokens=1)["mfu"] == pytest.approx(0.25)
    trainer, clock = start()
    step(trainer, clock, 2, 500)
    assert "mfu" not in log(trainer, tokens=1)


def test_peak_memory_and_other_ranks() -> None:
    trainer, _ = start()
    assert log(trainer, tokens=1, peak_mem_allocated=[5, 7])["peak_mem"] == [5, 7]
    assert "peak_mem" not in log(trainer, tokens=1)
    trainer.state.is_world_process_zero = False
    assert set(log(trainer, tokens=1, peak_mem_allocated=[5, 7])) == {
        "tokens",
        "peak_mem_allocated",
        "step",
        "epoch",
    }


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_what_a_checkpoint_cost(kind: Any) -> None:
    trainer = FakeTrainer([CheckpointMetrics(), DefaultMetrics()])
    record = {
        "step": 5,
        "path": "p",
        "ok": True,
        "error": None,
        "stall_ms": 12.5,
        "save_s": 0.5,
        "bytes": 4 * 10**9,
    }
    trainer.fire("on_checkpoint_commit", record=kind(**record))
    trainer.fire("on_checkpoint_commit", record=kind(**{**record, "save_s": 0.0}))
    trainer.fire(
        "on_checkpoint_commit",
        record=kind(**{**record, "step": 6, "ok": False, "error": "disk full"}),
    )
    found = [
        {k: v for k, v in entry.items() if k.startswith("checkpoint/")}
        for entry in trainer.state.log_history
    ]
    assert found == [
        {
            "checkpoint/step": 5,
            "checkpoint/stall_ms": 12.5,
            "checkpoint/save_s": 0.5,
            "checkpoint/bytes": 4 * 10**9,
            "checkpoint/gb_per_s": 8.0,
        },
        {
            "checkpoint/step": 5,
            "checkpoint/stall_ms": 12.5,
            "checkpoint/save_s": 0.0,
            "checkpoint/bytes": 4 * 10**9,
            "checkpoint/gb_per_s": 0.0,
        },
        {"checkpoint/step": 6, "checkpoint/failed": 1},
    ]
