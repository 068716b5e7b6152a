"""A training run to be saved: linear layers under AdamW, on the CPU or on a GPU, its step as long
as wanted.

Used by the benchmarks of saves that go on while training does: `stall`, `cost`, `background`,
`memory`.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from .ground import make_state

__all__ = [
    "Trainee",
    "check_device",
    "folder_of_all",
    "has_cuda",
    "in_job",
    "is_first_rank",
    "local_part",
    "of_all_ranks",
    "ranks",
    "wait_for",
]

LAYERS = 64  # with two moments each: 192 tensors
LEARNING_RATE = (
    1e-6  # every step changes every tensor, thousands of them leave the run where it was
)


def has_cuda() -> bool:
    return torch.cuda.is_available()


def check_device(device: str) -> None:
    """Raise ValueError when `device` is not here."""
    if device != "cpu" and not has_cuda():
        raise ValueError("there is no GPU here; --device cpu measures the same in small")


def wait_for(device: str) -> None:
    """Return when the device has done everything that was asked of it so far."""
    if device != "cpu":
        torch.cuda.synchronize()


@contextmanager
def in_job(device: str) -> Iterator[None]:
    """Be one of the ranks that `torchrun` has started; alone without it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    yield  # after a failure torchrun ends the others
    dist.barrier()
    dist.destroy_process_group()


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def folder_of_all(folder: Path) -> Path:
    """The first rank's folder, on every rank."""
    named = [str(folder)]
    if ranks() > 1:
        dist.broadcast_object_list(named, src=0, device=torch.device("cpu"))
    return Path(named[0])


def of_all_ranks(seconds: float) -> float:
    """The most that any rank gives. Every rank waits here for the others."""
    if ranks() == 1:
        return seconds
    most = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


class Trainee:
    """fp32 weights and AdamW's moments of about `size` bytes together, half-way through a run.
    On several ranks each layer is cut over all of them (FSDP2).

    ballast: bytes of further tensors that are saved with them and that no step touches.
    """

    def __init__(
        self, size: int, device: str = "cpu", *, layers: int = LAYERS, ballast: int = 0
    ) -> None:
        self.device = device
        torch.manual_seed(0)
        self.width = max(8, 8 * round(math.sqrt(size / (12 * layers * 2)) / 8))
        shapes = [(self.width, 2 * self.width), (2 * self.width, self.width)]
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(*shapes[n % 2], bias=False, device=device) for n in range(layers))
        )
        with (
            torch.no_grad()
        ):  # each layer keeps the size of its activations: no number vanishes or overflows
            for layer in self.model:
                layer.weight.normal_(0, layer.in_features**-0.5)
        if ranks() > 1:
            mesh = dist.init_device_mesh(device, (ranks(),))
            for layer in [*self.model, self.model]:
                fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.ballast = {
            n: t.to(device) for n, t in (make_state(ballast) if ballast else {}).items()
        }
        self.use_rows(8)
        self.step()  # the moments come to be
        wait_for(device)

    def use_rows(self, rows: int) -> None:
        """Train on batches of `rows` rows from now on."""
        self.batch = torch.randn(rows, self.width, device=self.device)

    def step(self, guard: AbstractContextManager[Any] | None = None) -> float:
        """One step, to its end. guard: entered before the optimizer changes anything."""
        loss = self.model(self.batch).square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        with guard if guard is not None else nullcontext():
            self.optimizer.step()
        return loss.item()  # waits for the device, as a loop does that logs its loss

    def calibrate(self, seconds: float) -> float:
        """Choose a batch with which a step takes about `seconds`, as far as the optimizer leaves a
        choice; what it takes."""
        unit = 1 if self.device == "cpu" else 256
        if self.device != "cpu":
            torch.set_float32_matmul_precision("high")  # tensor cores
        rows, most = 4 * unit, 256 * unit
        taken = self._timed(rows)
        few, little = unit, self._timed(unit)
        for _ in range(3):
            each = max((taken - little) / (rows - few), 1e-7) if rows != few else 1e-7
            wanted = rows + (seconds - taken) / each
            rows = unit * min(most // unit, max(2, round(min(wanted, 4.0 * rows) / unit)))
            taken = self._timed(rows)
        return taken

    def _timed(self, rows: int) -> float:
        self.use_rows(rows)
        return of_all_ranks(statistics.median(self.timed_steps(5, warm=2)))

    def timed_steps(
        self, count: int, warm: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> list[float]:
        """Seconds of each of `count` steps, after `warm` that are not counted."""
        for _ in range(warm):
            self.step()
        wait_for(self.device)
        times = []
        for _ in range(count):
            start = clock()
            self.step()
            times.append(clock() - start)
        return times

    def state(self) -> dict[str, Any]:
        """The live objects, as ours takes them."""
        state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        return {**state, "ballast": self.ballast} if self.ballast else state

    def plain(self) -> dict[str, Any]:
        """Plain dicts of the live tensors, as the peers take them."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        return {**state, "ballast": dict(self.ballast)} if self.ballast else state

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names that ours stores them by."""
        found = {f"model/{name}": p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            found |= {
                f"optimizer/state/{name}/{key}": value
                for key, value in self.optimizer.state[p].items()
            }
        return found | {f"ballast/{name}": tensor for name, tensor in self.ballast.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def sample(self) -> dict[str, torch.Tensor]:
        """Host copies of some tensors, to compare with what was saved: of the first layer, the
        middle and the last."""
        layers = (0, len(self.model) // 2, len(self.model) - 1)
        names = [f"model/{n}.weight" for n in layers]
        names += [
            f"optimizer/state/{n}.weight/{key}" for n in layers for key in ("exp_avg", "exp_avg_sq")
        ]
        live = self.tensors()
        whole = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in ((name, live[name]) for name in names)
        }
        return {name: tensor.to("cpu", copy=True) for name, tensor in whole.items()}
