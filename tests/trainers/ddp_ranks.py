"""Ranks for test_ddp.py: real processes, forked as torchrun would start them from one that imported torch already.

Reads one JSON order per line, answers with the exit codes. What the ranks saw is in <output_dir>.rank<N>.jsonl.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ckpt_trainers.arguments import GPTArguments, TrainingArguments
from ckpt_trainers.ddp import DDPTrainer
from ckpt_trainers.main import main
from ckpt_trainers.model import ByteGPT
from torch import Tensor, nn

from ckptcore import StateComponent

DIED = 9
SECONDS = 60  # for a job; one takes two


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


class Normed(ByteGPT):
    """Has running statistics too: buffers that DDP lets differ between the ranks until the next step."""

    def __init__(self, args: GPTArguments) -> None:
        super().__init__(args)
        self.input_norm = nn.BatchNorm1d(args.n_embd)
        self.embedding.register_forward_hook(self.normed)

    def normed(self, embedding: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        result: Tensor = self.input_norm(embedded.flatten(0, 1)).view_as(embedded)
        return result


class Forgetful:
    """Saves the state of an object and does not restore it."""

    def __init__(self, whose: Any) -> None:
        self.whose = whose

    def state_dict(self) -> Any:
        return self.whose.state_dict()

    def load_state_dict(self, state: Any) -> None:
        pass


class Watched(DDPTrainer):
    """Writes down what its rank does, and dies at the start of a step; its data draw random numbers of all kinds."""

    stop: int | None = None
    forgotten: str | None = None
    sigterm: tuple[int, float] | None = None

    def __init__(self, args: TrainingArguments, **what: Any) -> None:
        self.watching = False
        super().__init__(args, **what)
        self.watching = True
        self.notes = Path(f"{args.output_dir}.rank{self.rank}.jsonl")

    def get_state_components(self) -> list[StateComponent]:
        parts = super().get_state_components()
        for part in parts:
            if part.key == self.forgotten:
                # The optimizer's tensors are read in place; a copy of it has its own.
                part.stateful = Forgetful(copy.deepcopy(part.stateful))
        return parts

    def note(self, **seen: Any) -> None:
        with self.notes.open("a") as file:
            file.write(json.dumps({"step": self.progress.step, **seen}) + "\n")

    def training_step(self) -> tuple[float, float | None]:
        if self.progress.step == self.stop:
            os._exit(DIED)
        if self.sigterm is not None and self.rank == self.sigterm[0]:
            seconds, self.sigterm = self.sigterm[1], None
            if seconds:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
            else:
                os.kill(os.getpid(), signal.SIGTERM)
        self.own_losses: list[str] = []
        seen: dict[str, Any] = {"streams": streams(), "epoch": self.loader.epoch}
        seen["samples"] = self.samples_of_step()
        loss, norm = super().training_step()
        model, moments = getattr(self.model, "module", self.model).state_dict(), list(self.optimizer.state.values())
        self.note(
            **seen,
            own_losses=self.own_losses,
            loss=loss.hex(),
            norm=norm,
            rate=self.scheduler.get_last_lr()[0].hex(),
            weights=bits({name: value for name, value in model.items() if "input_norm.running" not in name}),
            moments=bits(moments),
        )
        return loss, norm

    def samples_of_step(self) -> list[int]:
        loader, count = self.loader, min(self.args.gradient_accumulation_steps, self.loader.left_in_epoch)
        found, start = [], loader.position
        for own, of_all in loader.next_sizes(count):
            mine = loader.order(loader.epoch)[start : start + of_all][loader.rank :: loader.world_size]
            assert len(mine) == own
            found += mine.tolist()
            start += of_all
        return found

    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().compute_loss(batch)
        if self.watching and self.model.training:
            loss = loss * (1 + 0.01 * random.random() + 0.01 * np.random.random())
            self.own_losses.append(loss.item().hex())
        return loss


def train(arguments: dict[str, Any], stop: int | None, forgotten: str | None, sigterm: tuple[int, float] | None) -> int:
    dist.init_process_group()
    args = TrainingArguments(**arguments)
    Watched.stop, Watched.forgotten, Watched.sigterm = stop, forgotten, sigterm
    Watched(args, model_init=lambda: Normed(args.model)).train()
    dist.destroy_process_group()
    return 0


def command(words: list[str], output: str) -> int:
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    try:
        main(words, prog_name="ckpt-train")
    except SystemExit as left:
        sys.stdout.flush(), sys.stderr.flush()
        return int(left.code or 0)
    raise AssertionError("a command ends with SystemExit")


def child(order: dict[str, Any], rank: int) -> int:
    # As under torchrun, the store belongs to the launcher and outlives the ranks.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(order["world_size"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(order["port"]),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    return {"train": train, "command": command}[order["what"]](**order["how"])


def run(order: dict[str, Any]) -> list[int]:
    running: dict[int, int] = {}
    for rank in range(order["world_size"]):
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = child(order, rank)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
        running[pid] = rank
    codes = [0] * len(running)
    until = time.monotonic() + SECONDS
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > until:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            until += SECONDS
        else:
            time.sleep(0.005)
    return codes


if __name__ == "__main__":
    import torch._dynamo

    torch.set_num_threads(1)
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        os.write(answers, json.dumps(run(json.loads(line))).encode() + b"\n")
