"""The Trainer of transformers: stopped and started again, it makes the steps of one that went on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from ckptcore import (  # noqa: E402
    CheckpointExists,
    CheckpointManager,
    CheckpointWarning,
    InvalidState,
    KeepLast,
    NoUsableCheckpoint,
    export_checkpoint,
    open_checkpoint,
    scan_root,
)
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


def base() -> Any:
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def trainer(
    root: Path,
    init: int,
    accumulate: int = 1,
    stop_at: int = -1,
    eval_dataset: Any = None,
    keep: Any = None,
    **more: Any,
) -> Any:
    """Six batches an epoch, of a model with dropout."""
    torch.manual_seed(init)
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
        model=base(),
        args=args,
        train_dataset=Samples(),
        eval_dataset=eval_dataset,
        callbacks=[StopAt(stop_at)],
        checkpoints={"keep": KeepLast(2)} if keep is None else keep,
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


def bits(tensors: Any) -> str:
    """As `digest` of two_ranks.py."""
    return sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def test_stock_readers_read_a_checkpoint(tmp_path: Path) -> None:
    done = trainer(tmp_path, 0)
    done.train()
    folder = tmp_path / "checkpoint-10"
    read = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert bits(read.parameters()) == bits(done.model.parameters())
    other = trainer(tmp_path / "other", 1).model
    safetensors.torch.load_model(other, folder / "model.safetensors")
    assert bits(other.parameters()) == bits(done.model.parameters())


def test_of_a_model_with_lora_the_adapter_is_stored(tmp_path: Path) -> None:
    def with_lora(root: Path, init: int, stop_at: int = -1) -> Any:
        made = trainer(root, 0, stop_at=stop_at)
        torch.manual_seed(init)
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        made.model = made.model_wrapped = peft.get_peft_model(made.model, config)
        torch.manual_seed(42)  # from which the order of the samples comes
        return made

    whole = with_lora(tmp_path / "whole", 1)
    whole.train()
    with pytest.raises(Stopped):
        with_lora(tmp_path / "run", 1, 7).train()
    resumed = with_lora(tmp_path / "run", 2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.resumed == 6
    assert bits(resumed.model.parameters()) == bits(whole.model.parameters())
    info = scan_root(tmp_path / "run")[-1]
    assert "adapter_model" in info.manifest.components and "model" not in info.manifest.components
    read = peft.PeftModel.from_pretrained(trainer(tmp_path / "x", 0).model, info.url)
    assert bits(read.parameters()) == bits(whole.model.parameters())


def test_a_newest_checkpoint_with_damaged_weights_is_passed_over(tmp_path: Path) -> None:
    done = trainer(tmp_path, 0)
    done.train()
    expected = outcome(done)
    path = tmp_path / "checkpoint-10" / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    again = trainer(tmp_path, 1)
    with pytest.warns(CheckpointWarning, match="restored checkpoint-9 .*; skipped checkpoint-10"):
        again.train(resume_from_checkpoint=True)
    assert again.resumed == 9
    assert outcome(again) == expected
    with CheckpointManager(tmp_path) as ckpt:
        assert ckpt.verify(10) == []


def test_the_best_model_at_the_end_and_the_limit(tmp_path: Path) -> None:
    strategy = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    more = {**strategy, "save_total_limit": 2, "greater_is_better": True}
    done = trainer(tmp_path, 0, eval_dataset=Samples(), keep={}, **more)
    done.train()
    assert done.state.best_global_step == 3  # the largest loss of all
    assert done.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")
    assert [info.step for info in scan_root(tmp_path)] == [3, 10]
    assert done.args.save_total_limit is None
    best, last = trainer(tmp_path, 1).model, done.model
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.load({"model": best}, 3)
    assert [p.tolist() for p in last.parameters()] == [p.tolist() for p in best.parameters()]


def test_a_best_evaluation_between_two_saves_has_no_checkpoint(tmp_path: Path) -> None:
    strategy = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    done = trainer(tmp_path, 0, eval_dataset=Samples(), greater_is_better=True, **strategy)
    done.train()
    assert done.state.best_global_step == 1 and done.state.best_model_checkpoint is None
    last = trainer(tmp_path, 1).model
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.load({"model": last}, 10)
    assert bits(last.parameters()) == bits(done.model.parameters())


def test_what_is_in_the_way_is_said_before_the_first_step(tmp_path: Path) -> None:
    stopped = trainer(tmp_path, 0, 1, 7)
    with pytest.raises(Stopped):
        stopped.train()
    again = trainer(tmp_path, 1)
    with pytest.raises(CheckpointExists, match=r"has checkpoint-3, checkpoint-6 already.*step 0"):
        again.train()
    assert again.state.global_step == 0
    trainer(tmp_path, 1, save_strategy="no").train()

    def stock(folder: Path) -> None:
        made = trainer(folder, 0)
        transformers.Trainer(
            model=made.model, args=replace(made.args, max_steps=3), train_dataset=Samples()
        ).train()

    stock(tmp_path / "stock")
    warned = pytest.warns(CheckpointWarning, match=r"checkpoint-3 are in the way of.*Hugging Face")
    with warned, pytest.raises(CheckpointExists, match="checkpoint-3"):
        trainer(tmp_path / "stock", 1).train()
    with pytest.raises(NoUsableCheckpoint) as caught:
        trainer(tmp_path / "stock", 1).train(resume_from_checkpoint=True)
    assert "`ckpt import` makes a checkpoint" in caught.value.__notes__[0]


def test_ctrl_c_writes_what_is_on_its_way(tmp_path: Path) -> None:
    class Interrupt(StopAt):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.step:
                raise KeyboardInterrupt

    whole = trainer(tmp_path / "whole", 0)
    whole.train()
    expected = outcome(whole)
    run = trainer(tmp_path / "run", 0)
    run.add_callback(Interrupt(3))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    resumed = trainer(tmp_path / "run", 1)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.resumed == 3 and outcome(resumed) == expected


def test_a_limit_is_said_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidState, match="both say what stays"):
        trainer(tmp_path, 0, save_total_limit=2)


@pytest.mark.parametrize(
    ("mode", "lora"),
    [("one", False), ("ddp", False), ("fsdp2", False), ("one", True), ("ddp", True)],
)
def test_processes_that_were_killed_go_on(
    tmp_path: Path, processes: Any, mode: str, lora: bool
) -> None:
    number = 1 if mode == "one" else 2
    run = partial(
        processes, "transformers_ranks.py", "transformers_run", number, mode=mode, lora=lora
    )
    expected = run(root=str(tmp_path / "whole"), seed=0)
    killed = run(root=str(tmp_path / "run"), seed=0, kill_at=9)
    assert killed == [-9] * number
    resumed = run(root=str(tmp_path / "run"), seed=1)
    assert resumed == [{**found, "resumed": 8} for found in expected]
    assert len({str(found["draw"]) for found in expected}) == number
    folder = tmp_path / "run" / "checkpoint-10"
    stored = open_checkpoint(folder).manifest.components
    if lora:
        assert "model" not in stored
        torch.manual_seed(0)
        read = peft.PeftModel.from_pretrained(base(), folder, is_trainable=True)
    else:
        wanted = {"one": "GLOBAL", "ddp": "REPLICATED", "fsdp2": "SHARDED"}
        assert stored["model"].pattern == wanted[mode]
        if mode == "fsdp2":
            export_checkpoint(folder, folder := tmp_path / "exported")
        read = transformers.AutoModelForCausalLM.from_pretrained(folder)
        other = base()
        files = sorted(folder.glob("model*.safetensors"))
        for file in files:
            safetensors.torch.load_model(other, file, strict=len(files) == 1)
        assert bits(other.parameters()) == resumed[0]["weights"]
    assert bits(read.parameters()) == resumed[0]["weights"]
