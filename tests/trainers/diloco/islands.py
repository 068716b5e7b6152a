"""Islands small enough to be trained dozens of times: threads of this process, and their server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ckpt_trainers.diloco import Access, DiLoCoServer, DiLoCoWorker
from torch import Tensor, nn

PLAIN = partial(torch.optim.SGD, lr=1.0)
QUICK: dict[str, Any] = {"backoff": 0.02, "timeout": 30.0}


class Net(nn.Module):
    """Two blocks between two layers: 300 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.leave = nn.Linear(8, 2)
        generator = torch.Generator().manual_seed(7)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.leave(x)
        return out


class Island:
    """A model and its training; batch `step` is the same however often it is asked for."""

    def __init__(self, seed: int = 1) -> None:
        self.model, self.seed, self.step = Net(), seed, 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, steps: int, after: Callable[[int], None] = lambda step: None) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 * self.seed + self.step)
            x = torch.randn(6, 4, generator=generator)
            loss = (self.model(x) - torch.stack([x.sin().sum(1), x.prod(1)], 1)).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            after(self.step)

    def worker(self, server: DiLoCoServer | str, **options: Any) -> DiLoCoWorker:
        address = server if isinstance(server, str) else server.address
        return DiLoCoWorker(self.model, self.optimizer, address, **{**QUICK, **options})

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def serve(**options: Any) -> DiLoCoServer:
    """A server on a free port, from the weights that every island starts with."""
    return DiLoCoServer(Net(), **{"access": Access(port=0, patience=5.0), **options})


def at_once(work: dict[str, Callable[[], Any]], seconds: float = 60.0) -> dict[str, Any]:
    """Run each in a thread; what they return, by name. What one raises is raised here."""
    found: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            found[name] = work[name]()
        except BaseException as error:
            found[name] = error

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a worker did not end"
    for value in found.values():
        if isinstance(value, BaseException):
            raise value
    return found


def trained(server: DiLoCoServer | str, seed: int, name: str, steps: int, **options: Any) -> Island:
    """An island that has trained as a worker of this server."""
    island = Island(seed)
    with island.worker(server, worker_id=name, **options):
        island.train(steps)
    return island


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait for what another thread is about to do."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """To the last bit."""
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)
