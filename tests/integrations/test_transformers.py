"""The Trainer of transformers: stopped and started again, it makes the steps of one that went on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from ckptcore import InvalidState, KeepLast, open_checkpoint, scan_root  # noqa: E402
from ckptcore.integrations.transformers import EngineTrainer  # noqa: E402


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(6) + number) % 16
        return {"input_ids": words, "labels": words}


class Stopped(RuntimeError):
    pass


class StopAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Stopped


def trainer(root: Path, init: int, accumulate: int = 1, stop_at: int = -1, **more: Any) -> Any:
    """Six batches an epoch, of a model with dropout."""
    torch.manual_seed(init)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    args = transformers.TrainingArguments(
        output_dir=str(root),
        max_steps=10,
        save_steps=3 if accumulate == 1 else 2,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    return EngineTrainer(
        model=transformers.GPT2LMHeadModel(config),
        args=args,
        train_dataset=Samples(),
        callbacks=[StopAt(stop_at)],
        checkpoints={"keep": KeepLast(2)},
    )


def outcome(done: Any) -> list[Any]:
    moments = done.optimizer.optimizer.state
    timed = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss")
    logged = [{k: v for k, v in e.items() if k not in timed} for e in done.state.log_history]
    return [
        [p.tolist() for p in done.model.parameters()],
        [moments[p]["exp_avg_sq"].tolist() for p in done.model.parameters()],
        logged,
        done.state.total_flos,
        done.lr_scheduler.get_last_lr(),
        torch.rand(3).tolist(),
    ]


@pytest.mark.parametrize(
    ("stop_at", "accumulate", "last"), [(5, 1, 3), (7, 1, 6), (5, 2, 4)], ids=str
)
def test_a_resumed_run_is_the_run_that_went_on(
    tmp_path: Path, stop_at: int, accumulate: int, last: int
) -> None:
    whole = trainer(tmp_path / "whole", 0, accumulate)
    whole.train(resume_from_checkpoint=True)
    expected = outcome(whole)
    with pytest.raises(Stopped):
        trainer(tmp_path / "run", 0, accumulate, stop_at).train()
    assert [info.step for info in scan_root(tmp_path / "run")][-1] == last
    resumed = trainer(tmp_path / "run", 1, accumulate)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.resumed == last
    assert outcome(resumed) == expected


def test_the_parts_and_metrics_of_a_checkpoint(tmp_path: Path) -> None:
    done = trainer(tmp_path, 0)
    done.train()
    assert [info.step for info in scan_root(tmp_path)] == [9, 10]
    manifest = open_checkpoint(tmp_path / "checkpoint-10").manifest
    assert set(manifest.components) == {"model", "optimizer", "scheduler", "trainer_state", "rng"}
    assert manifest.metrics["loss"] == done.state.log_history[-2]["loss"]


def test_going_back_to_a_step(tmp_path: Path) -> None:
    done = trainer(tmp_path, 0)
    done.train()
    expected = outcome(done)
    again = trainer(tmp_path, 1)
    again.train(resume_from_checkpoint=9)
    assert again.resumed == 9
    assert outcome(again) == expected


def test_the_limit_of_the_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidState, match="give checkpoints="):
        trainer(tmp_path, 0, save_total_limit=2)
