"""Programs for the ranks of test_ddp.py. What the ranks saw is in <output_dir>.rank<N>.jsonl."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ckpt_trainers.arguments import GPTArguments
from ckpt_trainers.main import main
from ckpt_trainers.model import ByteGPT, next_byte_loss
from ckpt_trainers.parallel.ddp import DDPTrainer
from loss_record import LossRecord
from torch import Tensor, nn
from torch.utils.data import Dataset

DIED = 9


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
        yield value.detach().numpy().tobytes()
    else:
        yield (value.hex() if isinstance(value, float) else repr(value)).encode()


def streams() -> dict[str, str]:
    return {
        "python": bits(random.getstate()),
        "numpy": bits([np.random.get_state()[1].tolist(), *np.random.get_state()[2:]]),
        "torch": bits(torch.get_rng_state()),
    }


class Windows(Dataset[dict[str, Tensor]]):
    """The first byte of a sample is its number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        text = torch.tensor([number, *((number * number + 7 * i) % 251 for i in range(16))])
        return {"input_ids": text[:-1], "labels": text[1:]}


class Normed(ByteGPT):
    """Has running statistics too: buffers that DDP lets differ between the ranks until the next
    step."""

    def __init__(self, args: GPTArguments) -> None:
        super().__init__(args)
        self.input_norm = nn.BatchNorm1d(args.n_embd)
        self.embedding.register_forward_hook(self.normed)

    def normed(self, embedding: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        result: Tensor = self.input_norm(embedded.flatten(0, 1)).view_as(embedded)
        return result


class Watched(DDPTrainer):
    """Writes down what its rank does, and dies at the start of a step; its losses draw random
    numbers of all kinds."""

    stop: int | None = None
    forgotten: str | None = None
    sigterm: tuple[int, float] | None = None

    def __init__(self, args: Any, **what: Any) -> None:
        self.watching = False
        super().__init__(args, **what)
        self.watching = True
        self.notes = Path(f"{self.args.output_dir}.rank{self.rank}.jsonl")

    def is_restored(self, component: str) -> bool:
        return component != self.forgotten and super().is_restored(component)

    def training_step(self) -> None:
        if self.state.global_step == self.stop:
            os._exit(DIED)
        if self.sigterm is not None and self.rank == self.sigterm[0]:
            seconds, self.sigterm = self.sigterm[1], None
            if seconds:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
            else:
                os.kill(os.getpid(), signal.SIGTERM)
        self.own_losses: list[str] = []
        seen: dict[str, Any] = {
            "step": self.state.global_step,
            "streams": streams(),
            "epoch": self.loader.epoch,
        }
        super().training_step()
        model = self.model.state_dict()
        seen |= {
            "samples": self.samples,
            "own_losses": self.own_losses,
            "loss": self.reduce([self.share])[0].hex(),
            "norm": float(self.meters.grad_norm or 0.0),
            "rate": self.learning_rate().hex(),
            "weights": bits(
                {name: value for name, value in model.items() if "input_norm.running" not in name}
            ),
            "moments": bits(list(self.optimizer.state.values())),
        }
        with self.notes.open("a") as file:
            file.write(json.dumps(seen) + "\n")

    def forward_backward(self, group: Any, items: float) -> Tensor:
        self.samples = [
            i for batch, samples, _ in group for i in batch["input_ids"][:samples, 0].tolist()
        ]
        self.share = super().forward_backward(group, items)
        return self.share

    def loss_share(self, batch: Any, samples: int, items: float) -> Tensor:
        loss = super().loss_share(batch, samples, items)
        if self.watching and self.wrapped.training:
            loss = loss * (1 + 0.01 * random.random() + 0.01 * np.random.random())
            self.own_losses.append(loss.item().hex())
        return loss


class Asking:
    """Sets flags on one rank, and writes down on all what comes of them."""

    def __init__(self, asks: list[tuple[int, int, str]]) -> None:
        self.asks = asks

    def on_step_end(self, state: Any, control: Any, trainer: Any, **_: Any) -> None:
        for rank, step, flag in self.asks:
            if (rank, step) == (trainer.rank, state.global_step):
                setattr(control, flag, True)

    def note(self, name: str, state: Any, trainer: Any, **more: Any) -> None:
        with Path(f"{trainer.args.output_dir}.asked{trainer.rank}.jsonl").open("a") as file:
            file.write(json.dumps([name, state.global_step, *more.values()]) + "\n")

    def on_save(self, state: Any, trainer: Any, **_: Any) -> None:
        self.note("save", state, trainer)

    def on_evaluate(self, state: Any, trainer: Any, metrics: dict[str, float], **_: Any) -> None:
        self.note("evaluate", state, trainer, loss=metrics["eval_loss"])
        if trainer.args.metric_for_best_model == "luck" and trainer.rank == 0:
            metrics["eval_luck"] = state.global_step * (
                7 - state.global_step
            )  # of 2, 4 and 6 that of 4 is best

    def on_log(self, state: Any, trainer: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            self.note("log", state, trainer, loss=logs["loss"])

    def on_epoch_end(self, state: Any, trainer: Any, **_: Any) -> None:
        self.note("epoch", state, trainer)

    def on_checkpoint_commit(self, state: Any, trainer: Any, record: Any, **_: Any) -> None:
        self.note(
            "commit",
            state,
            trainer,
            step=record.step,
            ok=record.ok,
            stall=record.stall_ms,
            save=record.save_s,
        )

    def on_train_end(self, state: Any, trainer: Any, **_: Any) -> None:
        self.note("end", state, trainer, reason=state.stop_reason, by=state.stop_requested_by)


def train(
    arguments: dict[str, Any],
    stop: int | None,
    forgotten: str | None,
    sigterm: tuple[int, float] | None,
    asks: list[tuple[int, int, str]] | None = None,
) -> int:
    Watched.stop, Watched.forgotten, Watched.sigterm = stop, forgotten, sigterm
    gpt = GPTArguments(n_layer=2, n_head=2, n_embd=16, block_size=16, dropout=0.2)
    trainer = Watched(
        arguments,
        model_init=lambda: Normed(gpt),
        train_dataset=Windows(27),
        eval_dataset=Windows(5),
        compute_loss_func=next_byte_loss,
        callbacks=[LossRecord(), Asking(asks or [])],
    )
    trainer.train()
    trainer.env.close()
    return 0


def command(words: list[str], output: str) -> int:
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    code = main(words)
    sys.stdout.flush(), sys.stderr.flush()
    return code


def on_a_rank(rank: int, world_size: int, what: str, how: dict[str, Any]) -> int:
    """What the harness (ckptcore.testing.processes) runs; its exit code."""
    return {"train": train, "command": command}[what](**how)
