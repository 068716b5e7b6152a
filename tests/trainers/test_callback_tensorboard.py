from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_trainers.callbacks import ResumableSummaryWriter, TBLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog

from ckptcore.testing.processes import patience

from .callback_run import FakeTrainer


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 5)) for event in read(folder).Scalars(tag)]


def text(folder: Path, tag: str) -> list[tuple[int, str]]:
    events = read(folder).Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events]


def purge_marks(folder: Path) -> list[int]:
    return [
        event.step
        for file in sorted(folder.iterdir())
        for event in EventFileLoader(str(file)).Load()
        if event.HasField("session_log") and event.session_log.status == SessionLog.START
    ]


def start(folder: Path | None, checkpoint: Any = None, *, first: Any = None) -> FakeTrainer:
    writer = ResumableSummaryWriter()
    callbacks = [TBLogger(writer), writer] if first is None else [first(writer), writer]
    trainer = FakeTrainer(callbacks, folder)
    if checkpoint is not None:
        trainer.restore(checkpoint)
    return trainer


def run(trainer: FakeTrainer, to: int, offset: float = 0.0) -> FakeTrainer:
    trainer.train(to, lambda step: trainer.log({"loss": step + offset}))
    return trainer


def test_b17_steps_after_the_checkpoint_are_logged_once(tmp_path: Path) -> None:
    """Every step to 15, checkpoint at 10, killed; resumed to 20."""
    folder = tmp_path / "run" / "tb"
    trainer = run(start(folder), 10)
    checkpoint = trainer.save()
    assert checkpoint["callbacks"]["ResumableSummaryWriter"] == {"place": "tb", "step": 10}
    run(trainer, 15, offset=0.5)
    # The new process would log elsewhere.
    resumed = run(start(tmp_path / "run" / "other", checkpoint), 20, offset=0.25)
    resumed.fire("on_train_end")
    assert purge_marks(folder) == [11]
    expected = [(step, float(step)) for step in range(1, 11)] + [
        (step, step + 0.25) for step in range(11, 21)
    ]
    assert scalars(folder, "train-loss") == expected
    steps = [entry["step"] for entry in resumed.state.log_history]
    assert steps == list(range(1, 21))
    assert not (tmp_path / "run" / "other").exists()


def test_an_evaluation_at_the_start_of_a_resumed_run_is_one_value(tmp_path: Path) -> None:
    trainer = run(start(tmp_path / "tb"), 3)
    trainer.state.log_history[-1]["eval_loss"] = 1.5
    trainer.evaluate(eval_loss=1.5)
    resumed = start(tmp_path / "tb", trainer.save())
    resumed.fire("on_train_begin")
    resumed.evaluate(eval_loss=1.5)
    resumed.state.global_step = 4
    resumed.evaluate(eval_loss=1.25)
    assert scalars(tmp_path / "tb", "eval-loss") == [(3, 1.5), (4, 1.25)]


def test_the_purge_is_right_whoever_writes_first(tmp_path: Path) -> None:
    class WritesAtOnce:
        def __init__(self, writer: Any) -> None:
            self.writer = writer

        def on_train_begin(self, state: Any, **kwargs: Any) -> None:
            self.writer.add_scalar("begun", 1.0, state.global_step)
            self.writer.flush()

    folder = tmp_path / "tb"
    trainer = run(start(folder, first=WritesAtOnce), 7)
    checkpoint = trainer.save()
    run(start(folder, checkpoint, first=WritesAtOnce), 9)
    assert purge_marks(folder) == [8]
    assert [step for step, _ in scalars(folder, "begun")] == [0, 7]


def test_what_was_written_first_after_the_checkpoint_is_hidden_too(tmp_path: Path) -> None:
    """Nothing was logged before the checkpoint: the writer had no directory yet."""
    folder = tmp_path / "tb"
    trainer = start(folder, first=TBLogger)
    trainer.handler.remove(TBLogger)
    trainer.train(3, lambda step: None)
    checkpoint = trainer.save()
    assert checkpoint["callbacks"]["ResumableSummaryWriter"] == {"place": None, "step": 3}
    trainer.handler.callbacks[0].add_scalar("train-loss", 99.0, 5)
    trainer.handler.close()
    resumed = run(start(folder, checkpoint), 6)
    resumed.handler.close()
    assert purge_marks(folder) == [4]
    assert scalars(folder, "train-loss") == [(4, 4.0), (5, 5.0), (6, 6.0)]


def test_a_run_from_step_0_hides_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tb"
    checkpoint = run(start(folder), 0).save()
    run(start(folder, checkpoint), 2)
    assert purge_marks(folder) == []


def test_a_directory_that_is_gone_and_one_that_was_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = run(start(tmp_path / "run" / "tb"), 2)
    checkpoint = trainer.save()
    trainer.handler.close()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    run(start(tmp_path / "copy" / "tb", checkpoint), 4).handler.close()
    assert [step for step, _ in scalars(tmp_path / "copy" / "tb", "train-loss")] == [1, 2, 3, 4]
    assert [step for step, _ in scalars(tmp_path / "run" / "tb", "train-loss")] == [1, 2]
    shutil.rmtree(tmp_path / "run")
    run(start(tmp_path / "third" / "tb", checkpoint), 3)
    assert "is gone; a new one is started" in caplog.text
    assert [step for step, _ in scalars(tmp_path / "third" / "tb", "train-loss")] == [3]


def test_a_run_from_the_beginning_takes_a_directory_of_its_own(tmp_path: Path) -> None:
    trainer = run(start(tmp_path / "a"), 2)
    trainer.handler.reset()
    trainer.state.global_step, trainer.logging_dir, trainer.begun = 0, str(tmp_path / "b"), False
    run(trainer, 1)
    assert [step for step, _ in scalars(tmp_path / "a", "train-loss")] == [1, 2]
    assert [step for step, _ in scalars(tmp_path / "b", "train-loss")] == [1]


def test_a_writer_that_is_not_used_leaves_nothing(tmp_path: Path) -> None:
    writer = ResumableSummaryWriter(tmp_path / "tb")
    trainer = FakeTrainer([writer, TBLogger(writer)], tmp_path / "logs")
    trainer.state.is_world_process_zero = False
    run(trainer, 2)
    trainer.evaluate(eval_loss=1.0)
    trainer.fire("on_train_end")
    writer.flush()
    writer.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AttributeError):
        writer.add_nonsense  # noqa: B018
    writer.add_scalars("both", {"a": 1.0, "b": 2.0}, 3)
    writer.add_histogram("weights", torch.arange(4.0), 3)
    assert writer.get_logdir() == str(tmp_path / "tb")
    writer.close()
    assert read(tmp_path / "tb").Tags()["histograms"] == ["weights"]
    with pytest.raises(ValueError, match="no log_dir"):
        ResumableSummaryWriter().add_scalar("x", 1.0, 1)


def test_tensorboard_is_imported_only_by_who_writes() -> None:
    program = (
        "import sys, ckpt_trainers.callbacks as c; w = c.ResumableSummaryWriter('x'); h = "
        "c.CallbackHandler([w]); "
        "h.has('on_log'); h.state_dict(); w.flush(); assert not [m for m in sys.modules if "
        "m.startswith('tensorboard')]; "
        "sys.modules['torch.utils.tensorboard'] = None\n"
        "try: w.add_scalar('a', 1, 1)\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100 * patience()
    )
    assert (
        done.stdout.strip() == "ResumableSummaryWriter needs tensorboard: pip install tensorboard"
    ), done.stderr


def test_what_is_logged_under_which_tag(tmp_path: Path) -> None:
    writer = ResumableSummaryWriter()
    logger = TBLogger(
        writer,
        scalars={
            "mfu": None,
            "train-loss": {"transform": lambda value, record: value * record["tokens"]},
            "perplexity": {"source": "loss"},
            "extra": {},
            "skipped": {"source": "loss", "transform": lambda value, record: None},
        },
        experiment_info={"who": "me"},
    )
    trainer = FakeTrainer([writer, logger], tmp_path / "tb", learning_rate=0.5)
    trainer.fire("on_train_begin")
    trainer.state.global_step, trainer.state.epoch = 4, 0.5
    trainer.log(
        {
            "loss": torch.tensor(2.0),
            "tokens": 3,
            "grad_norm": 0.25,
            "mfu": 0.4,
            "learning_rate": 0.125,
            "extra": 7,
            "tok_per_sec": 99,
            "peak_mem": [2**30, 2**31],
            "weight_norm": None,
            "checkpoint/bytes": 12,
            "other": "text",
        }
    )
    trainer.evaluate(eval_loss=1.5)
    trainer.evaluate(eval_loss=9.0)  # again at this step: once is enough
    trainer.fire("on_train_end")
    folder = tmp_path / "tb"
    tags = sorted(read(folder).Tags()["scalars"])
    expected = {
        "train-loss": 6.0,
        "perplexity": 2.0,
        "extra": 7.0,
        "grad-norm": 0.25,
        "learning-rate": 0.125,
        "epoch": 0.5,
        "tokens/s": 99.0,
        "peak-mem": 2.0,
        "checkpoint/bytes": 12.0,
        "eval-loss": 1.5,
    }
    assert tags == sorted(expected)
    assert {tag: scalars(folder, tag) for tag in tags} == {
        tag: [(4, value)] for tag, value in expected.items()
    }
    assert text(folder, "experiment") == [(0, '```\n{\n  "who": "me"\n}\n```')]
    ((step, info),) = text(folder, "training_info")
    assert step == 0 and '"learning_rate": 0.5' in info and info.startswith("```\n")
    ((step, results),) = text(folder, "train_results")
    assert step == 4 and '"tokens": 3' in results
    with pytest.raises(ValueError, match="key"):
        TBLogger(writer, scalars={"x": {"key": "loss"}})


def test_the_end_of_a_run_without_a_log(tmp_path: Path) -> None:
    for zero in (True, False):
        writer = ResumableSummaryWriter()
        trainer = FakeTrainer([TBLogger(writer), writer], tmp_path / str(zero))
        trainer.state.is_world_process_zero = zero
        trainer.fire("on_train_begin")
        trainer.fire("on_train_end")
    assert list(read(tmp_path / "True").Tags()["tensors"]) == ["training_info/text_summary"]
    assert not (tmp_path / "False").exists()


def test_it_works_with_a_plain_writer(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    trainer = run(FakeTrainer([TBLogger(SummaryWriter(str(tmp_path / "tb")))], tmp_path), 2)
    assert trainer.handler.state_dict() == {}
    assert scalars(tmp_path / "tb", "train-loss") == [(1, 1.0), (2, 2.0)]
