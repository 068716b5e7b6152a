"""A run small enough to be trained dozens of times: a byte-level GPT of 2,000 weights on a handful
of samples."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_trainers.arguments import GPTArguments
from ckpt_trainers.model import ByteGPT, next_byte_loss
from ckpt_trainers.trainer import Trainer
from torch import Tensor
from torch.utils.data import Dataset

from ckptcore import scan_root
from ckptcore.testing.processes import RankProcesses

from .comparison import compare_checkpoints

RAISED = 70  # what stands for the exit code of a rank that raised
GPT = GPTArguments(n_layer=1, n_head=2, n_embd=8, block_size=8, dropout=0.2)
TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "tok_per_sec")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are the same to the last bit only when they are split in the same way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """460 bytes: 437 to train on, 23 to validate."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes((i * i + 7 * i) % 251 for i in range(460)))
    return path


class Windows(Dataset[dict[str, Tensor]]):
    """The first byte of a sample is its number; two others are noise of three generators."""

    def __init__(self, samples: int, noisy: bool = True) -> None:
        self.samples, self.noisy = samples, noisy

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if number >= self.samples:
            raise IndexError(number)
        text = torch.tensor([number, *((number * number + 7 * i) % 251 for i in range(8))])
        if self.noisy:
            text[1 + np.random.randint(8)] = random.randrange(256)
            text[1 + int(torch.randint(8, ()))] = 255
        return {"input_ids": text[:-1], "labels": text[1:]}


def bits(value: Any) -> str:
    """Digest of tensors and numbers, nested in dicts and sequences, to the last bit."""
    digest = hashlib.sha256()
    for leaf in leaves(value):
        digest.update(leaf)
    return digest.hexdigest()


def leaves(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, Tensor):
        yield value.detach().contiguous().numpy().tobytes()
    else:
        yield (value.hex() if isinstance(value, float) else repr(value)).encode()


class Notes:
    """A callback that writes down what happens, to the last bit, and may end the run at the
    beginning of a step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}
        self.events: list[tuple[str, int]] = []
        self.records: list[Any] = []
        self.die_at: int | None = None
        self.do: Callable[..., Any] | None = None  # (event, state, control, trainer)
        for name in EVENTS:
            setattr(self, name, lambda name=name, **what: self.saw(name, **what))

    def saw(self, name: str, state: Any, control: Any, trainer: Any, **what: Any) -> None:
        self.events.append((name, state.global_step))
        if name == "on_checkpoint_commit":
            self.records.append(what["record"])
        if name == "on_train_metrics":
            self.steps[state.global_step] = facts(trainer, what["metrics"])
        if self.do is not None:
            self.do(name, state=state, control=control, trainer=trainer, **what)
        if name == "on_step_begin" and state.global_step == self.die_at:
            raise Died(state.global_step)

    def of(self, *names: str) -> list[tuple[str, int]]:
        return [event for event in self.events if event[0] in names]


class Died(Exception):
    """The end of a process, as far as one process can end inside another."""


EVENTS = (
    *(
        "on_init_end",
        "on_train_begin",
        "on_train_end",
        "on_epoch_begin",
        "on_epoch_end",
        "on_step_begin",
        "on_step_end",
    ),
    *(
        "on_forward_backward_begin",
        "on_forward_backward_end",
        "on_substep_end",
        "on_pre_optimizer_step",
        "on_predict",
    ),
    *(
        "on_optimizer_step",
        "on_train_metrics",
        "on_log_step",
        "on_log",
        "on_prediction_step",
        "on_evaluate",
        "on_save",
    ),
    "on_checkpoint_commit",
)


def facts(trainer: Trainer, metrics: dict[str, Any]) -> dict[str, Any]:
    return {
        "samples": trainer.handed,  # type: ignore[attr-defined]
        "loss": float(metrics["loss"]).hex(),
        "norm": float(metrics.get("grad_norm", 0.0)).hex(),
        "rate": float(metrics["learning_rate"]).hex(),
        "weights": bits(dict(trainer.model.state_dict())),
        "moments": bits([list(state.values()) for state in trainer.optimizer.state.values()]),
        "streams": bits([random.getstate(), np.random.get_state()[1:], torch.get_rng_state()]),
        "epoch": trainer.state.epoch,
    }


class Watched(Trainer):
    """Knows which samples a step had."""

    def forward_backward(self, group: Any, items: float) -> Tensor:
        self.handed = [batch["input_ids"][:samples, 0].tolist() for batch, samples, _ in group]
        return super().forward_backward(group, items)


class Tiny:
    """Makes trainers of one small run in folders of its own. 11 samples: 6 batches an epoch, the
    last one short."""

    notes = Notes
    died = Died
    windows = Windows
    gpt = GPT

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def root(self, run: str = "run") -> Path:
        return self.folder / run

    def arguments(self, run: str = "run", **changes: Any) -> dict[str, Any]:
        return {
            "output_dir": str(self.root(run)),
            "use_cpu": True,
            "seed": 5,
            "num_train_epochs": 3,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "logging_steps": 4,
            "save_steps": 1,
            "save_total_limit": None,
            **changes,
        }

    def trainer(
        self,
        run: str = "run",
        notes: Any = None,
        *,
        callbacks: tuple[Any, ...] = (),
        samples: int = 11,
        **changes: Any,
    ) -> Watched:
        parts: dict[str, Any] = {
            "model_init": lambda: ByteGPT(GPT),
            "train_dataset": Windows(samples),
            "eval_dataset": Windows(3, noisy=False),
            "compute_loss_func": next_byte_loss,
            "processing_class": None,
            "callbacks": [*callbacks, *([] if notes is None else [notes])],
        }
        names = [
            name
            for name in changes
            if name in parts
            or name.endswith(("_factory", "_fn", "_groups", "_and_kwargs", "_options"))
        ]
        parts |= {name: changes.pop(name) for name in names}
        return Watched(self.arguments(run, **changes), **parts)

    def steps(self, run: str = "run") -> list[int | None]:
        """Of the committed checkpoints; there is nothing else."""
        infos = scan_root(str(self.root(run))) if self.root(run).exists() else []
        assert {info.status for info in infos} <= {"committed"}
        return [info.step for info in infos]

    def differences(self, one: str, other: str, step: int) -> dict[str, list[str]]:
        folders = (str(self.root(run) / f"checkpoint-{step}") for run in (one, other))
        parts = compare_checkpoints(*folders, TIMES)
        assert {part.name for part in parts} >= {
            "model",
            "optimizer",
            "rng",
            "loader",
            "scheduler",
            "trainer",
        }
        return {part.name: part.differences for part in parts if part.differences}


class Ranks:
    """Jobs of several ranks, one after the other; see ddp_ranks.py."""

    processes = RankProcesses(Path(__file__).with_name("ddp_ranks.py"))

    def _run(self, world_size: int, what: str, **how: Any) -> list[int]:
        outcomes = self.processes.start(
            "on_a_rank", world_size, {"what": what, "how": how}, survivors="live"
        ).outcomes()
        for outcome in outcomes:
            print(outcome.describe())
        return [
            outcome.value if outcome.state == "returned" else outcome.exit_code or RAISED
            for outcome in outcomes
        ]

    def train(
        self,
        world_size: int,
        args: dict[str, Any],
        stop: int | None = None,
        forgotten: str | None = None,
        sigterm: tuple[int, float] | None = None,
        asks: list[tuple[int, int, str]] | None = None,
    ) -> list[int]:
        """Exit codes. stop: the ranks die when so many steps are done. forgotten: a component not
        to be restored.
        sigterm: the rank that gets one, and so many seconds after its first step. asks: (rank,
        step, flag)."""
        how = {"stop": stop, "forgotten": forgotten, "sigterm": sigterm, "asks": asks}
        return self._run(world_size, "train", arguments=args, **how)

    def command(self, world_size: int, words: list[str], output: Path) -> list[int]:
        return self._run(world_size, "command", words=words, output=str(output))


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path)
