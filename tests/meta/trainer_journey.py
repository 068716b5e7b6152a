"""Prints the files of the trainers that a reader must open for one training step and its
checkpoint: those that `train()` enters, and the moves between them.

Run as a program by test_trainer_journey.py.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from types import FrameType
from typing import Any

import ckpt_trainers
import torch
from ckpt_trainers import Trainer

ROOT = os.path.dirname(ckpt_trainers.__file__) + "/"


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input": torch.full((2,), float(number)), "labels": torch.ones(2)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, input: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.linear(input) - labels) ** 2).mean()}


def main() -> None:
    entered: set[str] = set()
    moves, here = -1, ""

    def step(frame: FrameType, event: str, _: Any) -> None:
        nonlocal moves, here
        while frame is not None and event == "return":
            frame, event = frame.f_back, "call"  # type: ignore[assignment]
        file = frame.f_code.co_filename if frame is not None else ""
        if event == "call" and file.startswith(ROOT):
            name = file.removeprefix(ROOT)
            moves += name != here
            here = name
            entered.add(name)

    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "output_dir": folder,
            "use_cpu": True,
            "max_steps": 1,
            "save_steps": 1,
            "save_async": False,
            "per_device_train_batch_size": 2,
        }
        trainer = Trainer(arguments, model=Model(), train_dataset=Samples(), callbacks=[])
        sys.setprofile(step)
        trainer.train()
        sys.setprofile(None)
        assert os.path.exists(f"{folder}/checkpoint-1/checkpoint_manifest.json")
    print(json.dumps({"files": sorted(entered), "moves": moves}))


main()
