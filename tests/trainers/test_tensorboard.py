from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ckpt_trainers.arguments import TrainingArguments
from ckpt_trainers.progress import read_losses
from ckpt_trainers.trainer import Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog


class Killed(BaseException):
    pass


class DiesAt15(Trainer):
    def training_step(self) -> tuple[float, float | None]:
        if self.progress.step == 15:
            raise Killed
        return super().training_step()


def test_b17_the_curve_of_a_resumed_run_is_one_line(make_args: Callable[..., TrainingArguments]) -> None:
    args = make_args(
        max_steps=20, save_steps=10, logging_steps=1, gradient_accumulation_steps=1, report_to="tensorboard"
    )
    with pytest.raises(Killed):
        DiesAt15(args).train()
    (folder,) = (Path(args.output_dir) / "runs").iterdir()
    assert [point[1] for point in points(folder, "train/loss")] == list(range(1, 16))

    result = Trainer(args).train()
    assert result.resumed_from == 10
    assert list((Path(args.output_dir) / "runs").iterdir()) == [folder]
    files = sorted(folder.iterdir())
    assert len(files) == 2
    marks = [
        event.step
        for event in EventFileLoader(str(files[1])).Load()
        if event.HasField("session_log") and event.session_log.status == SessionLog.START
    ]
    assert marks == [11]
    curve = points(folder, "train/loss")
    assert [step for _, step, _ in curve] == list(range(1, 21))
    assert [value for _, _, value in curve] == pytest.approx(
        [loss for _, loss in sorted(read_losses(Path(args.output_dir)).items())], rel=1e-6
    )
    assert [step for _, step, _ in points(folder, "eval/loss")] == [4, 8, 12, 16, 20]
    assert [step for _, step, _ in points(folder, "train/grad_norm")] == list(range(1, 21))
    assert [entry["step"] for entry in result.log_history] == list(range(1, 21))


def test_points_are_on_disk_before_the_checkpoint_that_a_resume_starts_from(
    make_args: Callable[..., TrainingArguments], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SIGKILL after a commit must not leave a gap before it: the writer's queue is flushed first."""
    args = make_args(max_steps=10, save_steps=5, logging_steps=1, report_to="tensorboard")
    seen: list[list[int]] = []

    def look(self: Trainer, *rest: object) -> None:
        (folder,) = (Path(args.output_dir) / "runs").iterdir()
        seen.append([step for _, step, _ in points(folder, "train/loss")])
        assert sorted(read_losses(Path(args.output_dir))) == seen[-1]

    monkeypatch.setattr(Trainer, "save", look)
    Trainer(args).train()
    assert seen == [list(range(1, 6)), list(range(1, 11))]


def points(folder: Path, tag: str) -> list[tuple[float, int, float]]:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return [(e.wall_time, e.step, e.value) for e in reader.Scalars(tag)]
