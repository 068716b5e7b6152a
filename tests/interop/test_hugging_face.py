"""Real transformers and Accelerate: weights there and back, and their checkpoints resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from ckpt_trainers.trainer import Trainer  # noqa: E402

from ckptcore import (  # noqa: E402
    CheckpointManager,
    RNGState,
    export_checkpoint,
    import_checkpoint,
    open_checkpoint,
)

WORDS = torch.arange(8)


class Same(torch.utils.data.Dataset[Any]):
    """The same sample over and over: the order says nothing."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": WORDS, "labels": WORDS}


def new_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def arguments(folder: Path, steps: int) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=8,
        save_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of the stock Trainer, with a checkpoint after each fourth."""
    folder = tmp_path_factory.mktemp("run")
    trainer = transformers.Trainer(new_model(), arguments(folder, 4), train_dataset=Same())
    trainer.train()
    return folder


def test_weights_go_in_and_out_bit_by_bit(tmp_path: Path) -> None:
    model = new_model()
    model.save_pretrained(tmp_path / "in", max_shard_size="2KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    report = import_checkpoint(tmp_path / "in", tmp_path / "root", step=5)
    assert report.format == "hf" and report.info is not None
    out = export_checkpoint(report.info.url, tmp_path / "out", max_shard_size="2KB")
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(back.state_dict()[k], v) for k, v in model.state_dict().items())
    assert back.lm_head.weight.data_ptr() == back.model.embed_tokens.weight.data_ptr()
    before, after = (
        json.loads((tmp_path / side / "model.safetensors.index.json").read_text())
        for side in ("in", "out")
    )
    assert before["weight_map"].keys() == after["weight_map"].keys()
    assert {"config.json", "generation_config.json"} <= out.files.keys()
    live = new_model(7)
    with CheckpointManager(tmp_path / "root") as manager:
        manager.load({"model": live})
    assert all(torch.equal(live.state_dict()[k], v) for k, v in model.state_dict().items())
    half = export_checkpoint(report.info.url, tmp_path / "half", dtype="bf16")
    assert half.cast == half.tensors
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert again.dtype == torch.bfloat16


def test_bin_files_are_read_as_weights_only(tmp_path: Path) -> None:
    model = new_model()
    model.config.save_pretrained(tmp_path / "in")
    torch.save(model.state_dict(), tmp_path / "in" / "pytorch_model.bin")
    report = import_checkpoint(tmp_path / "in", tmp_path / "root")
    assert report.info is not None and report.components[0].tensors == len(model.state_dict())


def test_a_checkpoint_of_the_trainer_trains_on_with_the_same_weights(
    run: Path, tmp_path: Path
) -> None:
    report = import_checkpoint(run / "checkpoint-4", tmp_path / "root")
    assert (report.format, report.step) == ("hf-trainer", 4)
    keys = {c.key for c in report.components}
    assert keys == {"model", "optimizer", "scheduler", "trainer_state", "rng", "files"}
    assert report.left == ["training_args.bin: a pickled object, never read"]

    model = new_model(11)
    trainer = transformers.Trainer(model, arguments(tmp_path / "x", 100), train_dataset=Same())
    trainer.create_optimizer_and_scheduler(8)
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    with CheckpointManager(tmp_path / "root") as manager:
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RNGState()}
        loaded = manager.load(state)
    assert loaded.step == 4 and scheduler.last_epoch == 4
    losses = []
    for _ in range(4):
        loss = model(input_ids=WORDS.expand(2, -1), labels=WORDS.expand(2, -1)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stock = transformers.LlamaForCausalLM.from_pretrained(run / "checkpoint-8").state_dict()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in stock.items())
    history = json.loads((run / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    said = [entry["loss"] for entry in history if "loss" in entry][4:]
    assert losses == pytest.approx(said, abs=1e-3)


class GoesOn:
    """A callback that takes up what was imported when the run begins."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.losses: dict[int, float] = {}

    def on_train_begin(self, state: Any, trainer: Any, **_: Any) -> None:
        parts = {"model": trainer.model, "optimizer": trainer.optimizer}
        with CheckpointManager(self.root) as manager:
            loaded = manager.load(parts | {"scheduler": trainer.scheduler, "rng": RNGState()})
        state.global_step = loaded.step

    def on_train_metrics(self, state: Any, metrics: Any, **_: Any) -> None:
        self.losses[state.global_step] = metrics["loss"]


@pytest.mark.filterwarnings("ignore:optimizer group")  # groups have names there
def test_a_checkpoint_of_the_trainer_goes_on_in_the_reference_trainer(
    run: Path, tmp_path: Path
) -> None:
    import_checkpoint(run / "checkpoint-4", tmp_path / "root")
    goes_on = GoesOn(tmp_path / "root")
    same = {
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "output_dir": str(tmp_path / "out"),
    }
    trainer = Trainer(
        same,
        model=new_model(11),
        train_dataset=Same(),
        callbacks=[goes_on],
        optimizer_groups={"norms": {"regex": "norm", "config": {"weight_decay": 0.0}}},
    )
    assert trainer.train().steps_run == 4
    stock = transformers.LlamaForCausalLM.from_pretrained(run / "checkpoint-8").state_dict()
    found = trainer.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in stock.items())
    history = json.loads((run / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    said = {entry["step"]: entry["loss"] for entry in history if entry.get("step", 0) > 4}
    assert goes_on.losses == pytest.approx(said, abs=1e-4)


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        scheduler.step()
    accelerator.save_state(str(tmp_path / "state"))
    live = torch.nn.Linear(4, 2)
    report = import_checkpoint(tmp_path / "state", tmp_path / "root", model=live)
    assert report.format == "accelerate" and report.info is not None
    assert {"model", "optimizer", "scheduler", "rng"} <= {c.key for c in report.components}
    other = torch.optim.AdamW(live.parameters())
    torch.optim.lr_scheduler.StepLR(other, 2)
    with CheckpointManager(tmp_path / "root") as manager:
        manager.load({"model": live, "optimizer": other, "rng": RNGState()})
    raw = accelerator.unwrap_model(model)
    assert torch.equal(live.weight, raw.weight)
    mine, its = other.state_dict()["state"][0], optimizer.state_dict()["state"][0]
    assert torch.equal(mine["exp_avg"], its["exp_avg"]) and torch.equal(mine["step"], its["step"])
    assert set(open_checkpoint(report.info.url).values("scheduler")) >= {"last_epoch", "step_size"}
