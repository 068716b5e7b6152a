"""Runs in few bits, in a process of their own for test_lowbit.py.

Arguments: folder, last step, step of the save, device, names of runs. Each goes on from the newest
checkpoint in its folder. What it found goes to <folder>/<name>.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from ckpt_trainers.arguments import GPTArguments
from ckpt_trainers.model import ByteGPT, next_byte_loss
from ckpt_trainers.trainer import Trainer
from torch import Tensor
from torch.utils.data import Dataset

# Wide enough that moments of torchao's optimizers are in few bits, and groups of 32 fit.
GPT = GPTArguments(n_layer=1, n_head=2, n_embd=32, block_size=8, dropout=0.1)
# What float8 multiplies on a GPU has dimensions of 16 and more.
GPU_GPT = GPTArguments(n_layer=2, n_head=2, n_embd=128, block_size=8, dropout=0.1)
RUNS: dict[str, dict[str, Any]] = {
    "8bit": {"optim": "adamw_torch_8bit"},
    "4bit": {"optim": "adamw_torch_4bit"},
    "qat": {"qat_recipe": "int8-dynamic-act-int4-weight"},
    "fp8": {"fp8_recipe": "tensorwise", "fp8_emulate": True},
    "fp8-rowwise": {"fp8_recipe": "rowwise", "fp8_emulate": True, "fp8_dim_alignment": 0},
}


class Bytes(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        text = torch.tensor([(number * number + 7 * i) % 251 for i in range(9)])
        return {"input_ids": text[:-1], "labels": text[1:]}


class Losses:
    """Of each step, to the last bit."""

    def __init__(self) -> None:
        self.steps: dict[str, str] = {}

    def on_train_metrics(self, state: Any, control: Any, **what: Any) -> None:
        self.steps[str(state.global_step)] = float(what["metrics"]["loss"]).hex()


def model_for(name: str, device: str) -> ByteGPT:
    if device == "cpu":
        return ByteGPT(GPT)
    model = ByteGPT(GPU_GPT)
    # A scaled product of rows gives bfloat16 alone.
    return model.bfloat16() if name == "fp8-rowwise" else model


def arguments_of(name: str, device: str) -> dict[str, Any]:
    """On a GPU float8 is real, and every kernel gives the same bits again."""
    if device == "cpu":
        return {**RUNS[name], "use_cpu": True}
    real = {key: value for key, value in RUNS[name].items() if key != "fp8_emulate"}
    return {**real, "full_determinism": True, "per_device_train_batch_size": 4}


def run(
    name: str, folder: Path, last: int, every: int, resume: bool, device: str = "cpu"
) -> dict[str, str]:
    """Losses by step of a run that ends at step `last`, and saves every `every` steps."""
    losses = Losses()
    arguments = {
        "output_dir": str(folder / name),
        "seed": 5,
        "max_steps": last,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_steps": every,
        "save_total_limit": None,
        "logging_steps": 1000,
        "resume_from_checkpoint": resume,
        **arguments_of(name, device),
    }
    trainer = Trainer(
        arguments,
        model_init=lambda: model_for(name, device),
        train_dataset=Bytes(),
        compute_loss_func=next_byte_loss,
        callbacks=[losses],
    )
    trainer.train()
    return losses.steps


def main(folder: str, last: str, every: str, device: str, *names: str) -> None:
    torch.set_num_threads(1)
    if "compiled" not in device:
        # torchao compiles its steps, which takes longer than all of these runs.
        torch.compile = lambda function, **options: function  # type: ignore[assignment]
    kind = device.partition("-")[0]
    for name in names:
        resume = any(Path(folder, name).glob("checkpoint-*"))
        found = run(name, Path(folder), int(last), int(every), resume, kind)
        Path(folder, f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
