from __future__ import annotations

import io
import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.callbacks import InfoCallback, ProgressCallback
from torch import nn

from .callback_run import FakeTrainer

STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def start(
    stream: io.StringIO | None = None, args: dict[str, Any] | None = None, **options: Any
) -> FakeTrainer:
    callback = ProgressCallback(output_stream=stream or io.StringIO(), **options)
    trainer = FakeTrainer([callback], **(args or {}))
    trainer.fire("on_train_begin")
    return trainer


def progress(trainer: FakeTrainer) -> ProgressCallback:
    found: ProgressCallback = trainer.handler.callbacks[0]
    return found


def lines(trainer: FakeTrainer) -> list[str]:
    """The lines without their times."""
    written = progress(trainer).stream.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(STAMP.match(line) for line in written)
    return [line[20:] for line in written]


def cells(trainer: FakeTrainer) -> list[list[str]]:
    return [re.split(r"\s{2,}|(?<=\S) (?=\S)", line.strip()) for line in lines(trainer)]


def log(trainer: FakeTrainer, **values: Any) -> None:
    trainer.state.global_step += 1
    trainer.log(values)


def test_a_table_of_the_columns_that_there_are() -> None:
    trainer = start()
    log(trainer, loss=1.23456789, learning_rate=1e-4, tokens=5)
    log(
        trainer,
        loss=0.5,
        learning_rate=1e-4,
        tok_per_sec=12345,
        mfu=0.4567,
        peak_mem=[2**30, 3 * 2**29],
    )
    log(
        trainer,
        loss=0.25,
        learning_rate=1e-4,
        tok_per_sec=12345,
        mfu=0.4567,
        peak_mem=[2**30, 3 * 2**29],
    )
    assert lines(trainer) == [
        "    step    epoch       loss         lr",
        "       1    0.000    1.23457   1.00e-04",
        "    step    epoch       loss         lr       tok/s     mfu    peak mem",
        "       2    0.000    0.50000   1.00e-04      12,345   45.7%    1.50 GiB",
        "       3    0.000    0.25000   1.00e-04      12,345   45.7%    1.50 GiB",
    ]


def test_a_record_without_a_column_to_show_prints_nothing() -> None:
    trainer = start(step_columns={"epoch": None})
    log(trainer, **{"checkpoint/step": 3, "checkpoint/bytes": 10})
    assert lines(trainer) == []


def test_the_header_comes_again() -> None:
    trainer = start(header_interval=3)
    for _ in range(7):
        log(trainer, loss=1.0)
    assert [line.split()[0] for line in lines(trainer)] == [
        "step",
        "1",
        "2",
        "3",
        "step",
        "4",
        "5",
        "6",
        "step",
        "7",
    ]


def test_columns_are_changed_field_by_field() -> None:
    trainer = start(
        step_columns={
            "loss": {"fmt": ".1f", "width": 5},
            "grad_norm": None,
            "accuracy": {"width": 6, "fmt": lambda value: f"<{value}>"},
        }
    )
    log(trainer, loss=torch.tensor(1.25), grad_norm=3.0, accuracy=0.5)
    log(trainer, loss=None, accuracy="high")
    assert lines(trainer) == [
        "    step    epoch  loss accuracy".replace("accuracy", "accuracy"),
        "       1    0.000   1.2  <0.5>",
        "       2    0.000     - <high>",
    ]


def test_the_final_record() -> None:
    trainer = start(
        final_metrics={
            "train_loss": None,
            "train_runtime": {"label": "took"},
            "own": {"suffix": "x"},
        }
    )
    log(trainer, train_runtime=12.34, train_samples=12000, train_loss=1.0, own=3)
    assert lines(trainer) == ["finished: took 12.3 s, samples 12,000, own 3x"]


def test_evaluations_are_summed_up_in_a_line() -> None:
    trainer = start()
    trainer.state.global_step = 4
    trainer.evaluate(eval_loss=1.23456789, eval_accuracy=0.5)
    trainer.fire("on_predict", metrics={"test_loss": 2.0})
    assert lines(trainer) == [
        "eval at step 4: eval_loss 1.23457, eval_accuracy 0.5",
        "predict at step 4: test_loss 2",
    ]


@pytest.mark.parametrize(
    ("use_tqdm", "terminal", "disable_tqdm", "bar"),
    [
        (None, True, None, True),
        (None, True, False, True),
        (None, True, True, False),
        (None, False, None, False),
        (None, False, False, False),
        (True, False, True, True),
        (False, True, False, False),
    ],
)
def test_a_bar_or_lines(
    use_tqdm: bool | None, terminal: bool, disable_tqdm: bool | None, bar: bool
) -> None:
    stream = Terminal() if terminal else io.StringIO()
    trainer = start(stream, {"disable_tqdm": disable_tqdm}, use_tqdm=use_tqdm)
    trainer.fire("on_prediction_step", eval_dataloader=[1])
    assert (progress(trainer)._train_bar is not None, progress(trainer)._eval_bar is not None) == (
        bar,
        bar,
    )
    log(trainer, loss=1.0)
    assert bool(STAMP.search(stream.getvalue())) is not bar
    assert "   1.00000" in stream.getvalue()
    trainer.handler.close()


def test_the_bar_starts_where_the_run_does_and_follows_its_length() -> None:
    callback = ProgressCallback(use_tqdm=True, output_stream=io.StringIO())
    trainer = FakeTrainer([callback])
    trainer.state.global_step = 7
    trainer.fire("on_train_begin")
    bar = callback._train_bar
    assert (bar.n, bar.total) == (7, 20)
    trainer.state.global_step, trainer.state.max_steps = 9, 30
    trainer.fire("on_step_end")
    assert (bar.n, bar.total) == (9, 30)
    trainer.fire("on_train_end")
    assert callback._train_bar is None and bar.disable


class Unsized:
    pass


@pytest.mark.parametrize(
    ("loader", "cap", "total"),
    [([0] * 5, -1, 5), ([0] * 5, 3, 3), ([0] * 2, 3, 2), (Unsized(), 3, None), (None, -1, None)],
)
def test_the_length_of_an_evaluation(loader: Sequence[Any], cap: int, total: int | None) -> None:
    trainer = start(use_tqdm=True)
    trainer.state.max_eval_steps = cap
    trainer.fire("on_prediction_step", eval_dataloader=loader)
    bar = progress(trainer)._eval_bar
    assert (bar.total, bar.n) == (total, 1)
    trainer.fire("on_prediction_step", eval_dataloader=loader)
    trainer.evaluate(eval_loss=1.0)
    text = progress(trainer).stream.getvalue()  # type: ignore[attr-defined]
    assert progress(trainer)._eval_bar is None and "eval at step 0: eval_loss 1\n" in text
    # From now on it is known.
    trainer.fire("on_prediction_step", eval_dataloader=loader)
    assert progress(trainer)._eval_bar.total == 2
    trainer.handler.close()


def test_other_ranks_are_silent_and_streams_have_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidArgument, match="output_stream='file'"):
        ProgressCallback(output_stream="file")
    for name in ("stdout", "stderr", None):
        trainer = FakeTrainer([ProgressCallback(output_stream=name, use_tqdm=False)])
        log(trainer, loss=1.0)
    captured = capsys.readouterr()
    assert (len(captured.out.splitlines()), len(captured.err.splitlines())) == (4, 2)
    trainer = FakeTrainer([ProgressCallback(use_tqdm=True), InfoCallback()])
    trainer.state.is_world_process_zero = False
    trainer.fire("on_train_begin")
    log(trainer, loss=1.0, train_runtime=2)
    trainer.fire("on_prediction_step")
    trainer.evaluate(eval_loss=1.0)
    trainer.fire("on_train_end")
    assert capsys.readouterr() == ("", "")


def test_the_facts_of_the_run(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    for verbose in (False, True):
        trainer = FakeTrainer(
            [InfoCallback(verbose)],
            model=model,
            output_dir="out",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            mixed_precision="bf16",
        )
        trainer.state.train_batch_size, trainer.state.global_step = 8, 5 if verbose else 0
        with caplog.at_level(logging.DEBUG):
            trainer.fire("on_train_begin")
        out = capsys.readouterr().out
        assert "[INFO|info_logger] model: Linear, 8 parameters (6 trained), 0.0 MiB\n" in out
        assert (
            "[INFO|info_logger] batches: 4 per device, 2 accumulated, 8 samples for a step\n" in out
        )
        start = "resumed at step 5" if verbose else "from the beginning"
        assert f"[INFO|info_logger] steps: 20, {start}\n" in out
        assert "[INFO|info_logger] world size: 1, device: cpu, precision: bf16\n" in out
        assert "[INFO|info_logger] output_dir: out\n" in out
        assert out.count("steps: 20") == 1  # a second instance does not double the lines
        assert (
            "Linear(in_features=3" in out and '"per_device_train_batch_size": 4' in out
        ) is verbose
    assert caplog.records == [] and logging.getLogger("info_logger").handlers == []
