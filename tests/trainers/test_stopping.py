"""A run that is told to stop saves where it is; what is saved in the background is what would have been saved at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from ckpt_trainers.arguments import TrainingArguments
from ckpt_trainers.compare import compare_checkpoints
from ckpt_trainers.progress import read_losses
from ckpt_trainers.trainer import Trainer

from ckptcore import CheckpointManager, InvalidState, scan_root

MakeArgs = Callable[..., TrainingArguments]


class Terminated(Trainer):
    """Gets a SIGTERM in the middle of the step after `at`."""

    at = -1

    def training_step(self) -> tuple[float, float | None]:
        if self.progress.step == self.at:
            signal.raise_signal(signal.SIGTERM)
        return super().training_step()


def saved(folder: str) -> list[tuple[str, int | None]]:
    return [(entry.status, entry.step) for entry in scan_root(folder)]


def differences(one: Path, other: Path) -> list[str]:
    return [line for part in compare_checkpoints(str(one), str(other)) for line in part.differences]


# The stop is between two saves, at one, before the first, and at the last step.
@pytest.mark.parametrize(
    ("at", "steps", "save_async"),
    [(6, [5, 7], True), (6, [5, 7], False), (9, [5, 10], True), (0, [1], True), (19, [5, 10, 15, 20], True)],
)
def test_a_sigterm_saves_the_step_at_hand_and_the_run_goes_on_from_it(
    make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch, at: int, steps: list[int], save_async: bool
) -> None:
    monkeypatch.setattr(Terminated, "at", at)
    calls: list[int] = []
    save = Trainer.save
    monkeypatch.setattr(Trainer, "save", lambda self, *rest: (calls.append(self.progress.step), save(self, *rest)))
    before = signal.getsignal(signal.SIGTERM)
    args = make_args("stopped", save_async=save_async, enable_jit_checkpoint=True)
    result = Terminated(args).train()
    assert (result.global_step, result.steps_run, result.stop_reason) == (at + 1, at + 1, "sigterm")
    assert signal.getsignal(signal.SIGTERM) is before
    assert calls == steps and saved(args.output_dir) == [("committed", step) for step in steps]

    monkeypatch.setattr(Terminated, "at", -1)
    resumed = Terminated(args).train()
    assert (resumed.resumed_from, resumed.global_step, resumed.stop_reason) == (at + 1, 20, None)
    reference = make_args("reference")
    Trainer(reference).train()
    assert differences(reference.root / "checkpoint-20", args.root / "checkpoint-20") == []
    assert read_losses(args.root) == read_losses(reference.root) and len(read_losses(args.root)) == 20


def test_the_same_is_saved_in_the_background_and_at_once(make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name in ("save", "save_async"):
        method = getattr(CheckpointManager, name)
        monkeypatch.setattr(
            CheckpointManager,
            name,
            lambda *a, name=name, method=method, **how: (used.append(name), method(*a, **how))[1],
        )
    for run, save_async in (("once", False), ("background", True)):
        used.clear()
        Trainer(make_args(run, save_async=save_async)).train()
        # The last one is waited for, so that the run ends with all of it committed.
        assert used == ["save_async" if save_async else "save"] * 3 + ["save"]
    once, background = make_args("once").root, make_args("background").root
    assert saved(str(background)) == [("committed", step) for step in (5, 10, 15, 20)]
    for step in (5, 10, 15, 20):
        assert differences(once / f"checkpoint-{step}", background / f"checkpoint-{step}") == []


def test_nothing_is_caught_unless_it_was_asked_for(make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []
    step = Trainer.training_step
    monkeypatch.setattr(
        Trainer, "training_step", lambda self: (seen.append(signal.getsignal(signal.SIGTERM) is before), step(self))[1]
    )
    Trainer(make_args("plain", max_steps=2)).train()
    Trainer(make_args("asked", max_steps=2, enable_jit_checkpoint=True)).train()
    assert seen == [True, True, False, False]


def test_a_thread_cannot_be_told_to_stop(make_args: MakeArgs) -> None:
    raised: list[BaseException] = []

    def train() -> None:
        try:
            Trainer(make_args(enable_jit_checkpoint=True)).train()
        except InvalidState as error:
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(60)
    assert len(raised) == 1 and "main thread" in str(raised[0])


def test_how_a_run_is_saved_is_no_part_of_what_it_computes(make_args: MakeArgs) -> None:
    plain, other = make_args(), make_args(save_async=True, enable_jit_checkpoint=True)
    assert (plain.save_async, plain.enable_jit_checkpoint) == (False, False)
    assert plain.digest() == other.digest() and other.differences(plain.as_dict()) == []
