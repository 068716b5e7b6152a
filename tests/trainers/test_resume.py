"""A run that was stopped and resumed is the run that was not stopped."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument, TrainingArguments
from ckpt_trainers.compare import compare_checkpoints
from ckpt_trainers.progress import read_losses
from ckpt_trainers.trainer import Trainer, TrainResult

from ckptcore import CheckpointExists, CheckpointNotFound, StateComponent, StateMismatch, scan_root

MakeArgs = Callable[..., TrainingArguments]


class Killed(BaseException):
    """Ends a run as abruptly as can be within one process: nothing catches it."""


class Stopping(Trainer):
    """Dies after `last` steps, counted from the start of the run."""

    last = 10**9

    def training_step(self) -> tuple[float, float | None]:
        if self.progress.step == self.last:
            raise Killed
        return super().training_step()


def run(args: TrainingArguments, last: int | None = None) -> TrainResult | None:
    torch.rand(random.randrange(5))  # whatever an earlier run left in the generators must not matter
    trainer = Stopping(args)
    if last is None:
        return trainer.train()
    trainer.last = last
    with pytest.raises(Killed):
        trainer.train()
    return None


def committed(folder: str | Path) -> list[int | None]:
    return [entry.step for entry in scan_root(str(folder)) if entry.status == "committed"]


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash and time of every file, time of every folder."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mtime_ns,
        )
        for path in [folder, *folder.rglob("*")]
    }


def assert_same_run(one: Path, other: Path, step: int) -> None:
    parts = compare_checkpoints(str(one / f"checkpoint-{step}"), str(other / f"checkpoint-{step}"))
    assert [part.name for part in parts] == ["loader", "model", "optimizer", "progress", "rng", "scheduler"]
    assert {part.name: part.differences for part in parts if part.differences} == {}
    weights = next(part for part in parts if part.name == "model")
    assert weights.tensors > 20 and weights.tensor_bytes > 10_000
    assert {s: loss.hex() for s, loss in read_losses(one).items()} == {
        s: loss.hex() for s, loss in read_losses(other).items()
    }
    assert sorted(read_losses(one)) == list(range(1, step + 1))


@pytest.fixture
def reference(make_args: MakeArgs, tmp_path: Path) -> Path:
    run(make_args("reference"))
    return tmp_path / "reference"


# 7 batches to an epoch, 2 to a step: 4 steps to an epoch, the last of them of 1 batch. With save_steps=4 a
# run goes on from exactly the end of an epoch; with 5 from the middle of one; 3 is in the last, short step.
@pytest.mark.parametrize(
    ("save_steps", "stops", "epoch_and_position", "save_async"),
    [
        (4, [9], (2, 0), False),
        (5, [6], (1, 8), False),
        (5, [14, 19], (3, 24), False),
        (5, [14, 19], (3, 24), True),
        (3, [3, 4], (0, 24), False),
        (4, [3], (0, 0), False),
    ],
)
def test_resuming_is_exact_wherever_the_run_stopped(
    make_args: MakeArgs,
    reference: Path,
    tmp_path: Path,
    save_steps: int,
    stops: list[int],
    epoch_and_position: tuple[int, int],
    save_async: bool,
) -> None:
    args = make_args("stopped", save_steps=save_steps, save_async=save_async)
    for stop in stops:
        run(args, stop)
    trainer = Trainer(args)
    position: list[tuple[int, int]] = []
    step = trainer.training_step
    trainer.training_step = lambda: (position.append((trainer.loader.epoch, trainer.loader.position)), step())[1]  # type: ignore[method-assign]
    result = trainer.train()
    restored = stops[-1] // save_steps * save_steps
    assert position[0] == epoch_and_position
    assert result.resumed_from == (restored or None)
    assert (result.global_step, result.steps_run) == (20, 20 - restored)
    assert_same_run(reference, tmp_path / "stopped", 20)


def test_the_reference_is_sensitive_to_what_a_resume_could_lose(
    make_args: MakeArgs, reference: Path, tmp_path: Path
) -> None:
    """A comparison that nothing can fail shows nothing: each thing left out of the state is noticed."""
    for lost in ("optimizer", "scheduler", "loader", "rng"):

        class Forgetful(Stopping):
            def get_state_components(self) -> list[StateComponent]:
                return [part for part in super().get_state_components() if part.key != lost]  # noqa: B023

        args = make_args(f"without-{lost}")
        trainer = Forgetful(args)
        trainer.last = 12
        with pytest.raises(Killed):
            trainer.train()
        np.random.seed(1), torch.manual_seed(1)
        resumed = Forgetful(args)
        torch.manual_seed(2)
        resumed.train()
        ours, theirs = read_losses(reference), read_losses(Path(args.output_dir))
        assert all(ours[step] == theirs[step] for step in range(1, 11)), lost
        assert any(ours[step] != theirs[step] for step in range(11, 21)), lost


def test_two_runs_with_one_seed_are_one_run(make_args: MakeArgs, reference: Path, tmp_path: Path) -> None:
    run(make_args("again"))
    assert_same_run(reference, tmp_path / "again", 20)
    run(make_args("other", seed=6))
    assert read_losses(tmp_path / "other")[1] != read_losses(reference)[1]


def test_a_run_without_a_seed_resumes_exactly_too(make_args: MakeArgs, tmp_path: Path) -> None:
    args = make_args("run", seed=-1)
    torch.manual_seed(11)
    trainer = Stopping(args)
    trainer.last = 7
    with pytest.raises(Killed):
        trainer.train()
    before = [trainer.loader.order(epoch).tolist() for epoch in range(4)]
    resumed = Trainer(args)
    resumed.train()
    assert [resumed.loader.order(epoch).tolist() for epoch in range(4)] == before


def test_accumulation_is_the_mean_over_all_samples_of_a_step(make_args: MakeArgs) -> None:
    """One step over batches of unequal size, against one batch of all of them."""
    plain = {"warmup_steps": 0, "max_grad_norm": None, "eval_strategy": "no"}
    trainer = Trainer(make_args(**plain, gradient_accumulation_steps=9))
    trainer.model.eval = trainer.model.train  # type: ignore[method-assign]
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batches = [trainer.loader.dataset[int(i)] for i in trainer.loader.order(0)]
    whole = {name: torch.stack([b[name] for b in batches]) for name in batches[0]}
    expected = trainer.compute_loss(whole).item()
    loss, norm = trainer.training_step()
    assert len(batches) % 4 != 0 and norm is None
    assert loss == pytest.approx(expected, rel=1e-5)
    assert (trainer.loader.epoch, trainer.loader.position) == (1, 0)


def test_evaluation_leaves_no_trace_in_the_training(make_args: MakeArgs, reference: Path, tmp_path: Path) -> None:
    run(make_args("no-eval", eval_strategy="no"))
    assert read_losses(tmp_path / "no-eval") == read_losses(reference)


def test_training_learns(make_args: MakeArgs) -> None:
    result = run(make_args(max_steps=60, save_steps=60))
    assert result is not None
    assert sum(result.losses[-5:]) < 0.8 * sum(result.losses[:5])
    evaluations = [entry["eval_loss"] for entry in result.log_history if "eval_loss" in entry]
    assert len(evaluations) == 15


def test_log_history_is_cut_at_the_checkpoint(make_args: MakeArgs) -> None:
    args = make_args(logging_steps=1)
    run(args, 8)
    result = run(args)
    assert result is not None
    assert [entry["step"] for entry in result.log_history] == list(range(1, 21))


# Case B46: the end of a run is saved, exactly once.


@pytest.mark.parametrize("killed_at", [None, 22])
def test_b46_the_last_step_is_saved_and_a_finished_run_is_left_alone(
    make_args: MakeArgs, tmp_path: Path, killed_at: int | None
) -> None:
    args = make_args(max_steps=25, save_steps=10, report_to="tensorboard")
    if killed_at is not None:
        run(args, killed_at)
        assert committed(args.output_dir) == [10, 20]
    run(args)
    assert committed(args.output_dir) == [10, 20, 25]
    before = contents(tmp_path / "run")
    result = run(args)
    assert result is not None
    assert (result.steps_run, result.global_step, result.resumed_from, result.losses) == (0, 25, 25, [])
    assert contents(tmp_path / "run") == before


def test_b46_a_total_that_is_a_multiple_is_saved_once(make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = Trainer.save
    monkeypatch.setattr(Trainer, "save", lambda self, *rest: (saved.append(self.progress.step), save(self, *rest)))
    args = make_args(max_steps=20, save_steps=10)
    run(args)
    assert saved == [10, 20] and committed(args.output_dir) == [10, 20]


def test_a_finished_run_can_be_made_longer(make_args: MakeArgs) -> None:
    run(make_args(max_steps=10))
    result = run(make_args(max_steps=13))
    assert result is not None
    assert (result.resumed_from, result.steps_run) == (10, 3)


def test_epochs_give_the_number_of_steps(make_args: MakeArgs) -> None:
    result = run(make_args(max_steps=-1, num_train_epochs=1.5))
    assert result is not None and result.global_step == 6  # 4 steps to an epoch


# Where to go on from.


def test_save_total_limit_keeps_the_newest(make_args: MakeArgs) -> None:
    args = make_args(save_total_limit=2)
    run(args)
    assert committed(args.output_dir) == [15, 20]


def test_resuming_from_a_given_checkpoint(make_args: MakeArgs, reference: Path, tmp_path: Path) -> None:
    args = make_args("elsewhere", resume_from_checkpoint=str(reference / "checkpoint-10"))
    result = run(args)
    assert result is not None and (result.resumed_from, result.steps_run) == (10, 10)
    assert compare_all_equal(reference / "checkpoint-20", tmp_path / "elsewhere" / "checkpoint-20")
    with pytest.raises(CheckpointNotFound):
        run(make_args("nowhere", resume_from_checkpoint=str(tmp_path / "no-such-checkpoint")))


def compare_all_equal(one: Path, other: Path) -> bool:
    return not any(part.differences for part in compare_checkpoints(str(one), str(other)))


def test_starting_over_beside_checkpoints_must_be_asked_for(make_args: MakeArgs, reference: Path) -> None:
    before = contents(reference)
    with pytest.raises(CheckpointExists, match="overwrite_output_dir") as raised:
        run(make_args("reference", resume_from_checkpoint=False))
    assert raised.value.step == 20
    assert contents(reference) == before
    result = run(make_args("reference", resume_from_checkpoint=False, overwrite_output_dir=True, seed=8))
    assert result is not None and (result.resumed_from, result.steps_run) == (None, 20)
    assert sorted(read_losses(reference)) == list(range(1, 21))


def test_other_data_and_batch_sizes_are_refused(make_args: MakeArgs, text: Path, reference: Path) -> None:
    before = contents(reference)
    with pytest.raises(StateMismatch, match="batch_size was 4, is 5"):
        run(make_args("reference", per_device_train_batch_size=5, max_steps=30))
    text.write_bytes(text.read_bytes()[:-30] + b"changed" + text.read_bytes()[-23:])
    with pytest.raises(StateMismatch, match="data xxh3_128 was"):
        run(make_args("reference", max_steps=30))
    text.write_bytes(text.read_bytes() + b"longer")
    with pytest.raises(StateMismatch, match="data bytes was"):
        run(make_args("reference", max_steps=30))
    assert contents(reference) == before


def test_what_the_trainer_cannot_work_with(make_args: MakeArgs, text: Path) -> None:
    with pytest.raises(InvalidArgument, match="device='no-such-device'"):
        Trainer(make_args(device="no-such-device"))
    with pytest.raises(InvalidArgument, match="eval_strategy='steps': no eval_dataset"):
        Trainer(make_args(), train_dataset=Trainer(make_args()).loader.dataset)
    text.write_bytes(b"short")
    with pytest.raises(InvalidArgument, match="data='5 bytes'"):
        Trainer(make_args())
