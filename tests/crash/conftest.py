"""Fixtures of the crash tests: a rich training state, two checkpoints of it, and files that damage
can be done to."""

import json
import random
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ckptcore import CheckpointManager, CheckpointWarning, ModelState, OptimizerState, RNGState
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.saving.plan import plan_component


@pytest.fixture
def quick_folder(tmp_path):
    """A folder in memory where there is one: what is tested here is the order of operations, not
    the disk."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shm, prefix="ckptcore-test-") as folder:
        yield Path(folder)


class Training:
    """A small training run with everything in its state: a model, an optimizer, random streams,
    plain values."""

    def __init__(self):
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
        # More than one chunk of 4 MiB.
        self.model.register_buffer("table", torch.randint(0, 256, (4_500_000,), dtype=torch.uint8))
        # Few parameters, so that its state stays in one file while the model's is split.
        self.optimizer = torch.optim.AdamW([self.model[0].bias, self.model[1].bias], lr=0.01)
        self.done = 0

    def train(self, steps=1):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 48)).square().mean().backward()
            self.optimizer.step()
            with torch.no_grad():
                self.model[0].weight.add_(0.125)
                self.model[1].weight.add_(0.25)
                self.model.table[::500_000] += 1
            self.done += 1

    def state(self):
        progress = {
            "done": self.done,
            "ids": list(range(self.done)),
            "seen": {self.done, 1},
            "big": 2**70,
            "none": None,
            "array": np.arange(300.0) * self.done,
            "small": np.float32(0.1),
            ("a", 1): b"bytes",
        }
        return {
            "model": ModelState(self.model),
            "optimizer": OptimizerState(self.optimizer, self.model),
            "rng": RNGState(),
            "progress": progress,
        }

    def snapshot(self):
        """Every bit of the tensors of model and optimizer."""
        tensors = dict(self.model.state_dict())
        for number, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
            tensors |= {
                f"{number}.{name}": value for name, value in self.optimizer.state[parameter].items()
            }
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@dataclass
class Ground:
    """A root with checkpoints of step 1 and 2, and what they hold."""

    root: Path
    training: Training
    at: dict[int, dict[str, bytes]]

    @property
    def folder(self):
        return self.root / "checkpoint-2"

    @property
    def files(self):
        return sorted(path.name for path in self.folder.iterdir())

    def manager(self, **how):
        return CheckpointManager(self.root, io_threads=1, **how)

    def restored(self):
        """Restore "auto": the report and the texts of the CheckpointWarnings."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            report = self.manager().restore(self.training.state(), "auto")
        return report, [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]

    def check_good(self):
        """Nothing is wrong with step 2, and it is what is restored."""
        assert self.manager().verify(2) == []
        report, told = self.restored()
        assert (report.step, told, self.training.snapshot() == self.at[2]) == (2, [], True)


@pytest.fixture
def ground(quick_folder, monkeypatch):
    # Files of few KiB each, so that a small model is split over several.
    monkeypatch.setitem(plan_component.__kwdefaults__, "max_file_bytes", 9_500)
    training = Training()
    ground = Ground(quick_folder / "run", training, {})
    manager = ground.manager()
    for step in (1, 2):
        training.train()
        manager.save(step, training.state())
        ground.at[step] = training.snapshot()
    training.train()
    assert ground.at[1] != ground.at[2] != training.snapshot()
    assert {"model.safetensors.index.json", "optimizer.safetensors", MANIFEST_NAME} <= {
        *ground.files
    }
    assert sum(name.startswith("model-") for name in ground.files) == 3
    return ground


def tensor_in(data, file, offset):
    """The full name of the tensor that a byte of a tensor file belongs to, read as a stranger
    would; else None."""
    if not file.endswith(".safetensors"):
        return None
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        if start <= offset - 8 - length < stop:
            return f"{file.partition('.')[0].partition('-')[0]}/{name}"
    return None


@pytest.fixture(name="tensor_in")
def tensor_in_fixture():
    return tensor_in


@pytest.fixture
def rng():
    return random.Random(20261127)
