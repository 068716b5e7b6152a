"""Programs of real ranks that train, or save many times, on storage that is slow."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from job import Job
from programs import PER_RANK, REPLICATED, Trap, components

from ckptcore import CheckpointManager, RNGState, StateComponent, open_storage
from ckptcore.storage.local import LocalStorage
from ckptcore.testing.faults import FaultStorage


class JitterStorage(LocalStorage):
    """Every operation takes 0 to 20 ms longer, differently on every rank."""

    def __init__(self, root: Path, seed: int, most: float = 0.02) -> None:
        super().__init__(root)
        self.random, self.most = random.Random(seed), most


def _jittered(name: str) -> Any:
    operation = getattr(LocalStorage, name)

    def slowed(self: JitterStorage, *arguments: Any) -> Any:
        time.sleep(self.random.random() * self.most)
        return operation(self, *arguments)

    return slowed


for _name in (
    "create",
    "open",
    "list",
    "make_folder",
    "sync_folder",
    "rename",
    "remove",
    "remove_folder",
):
    setattr(JitterStorage, _name, _jittered(_name))


def train_while_saving(job: Job, steps: int, seeds: list[int]) -> dict[str, Any]:
    """An all_reduce a step, in the main thread, while another thread saves over and over with
    random delays."""
    job.join()
    wrong, saves = 0, []
    for seed in seeds:
        finished = threading.Event()
        failed: list[BaseException] = []
        storage = JitterStorage(job.folder / str(seed), seed * 10 + job.rank, most=0.004)
        ckpt = CheckpointManager(storage)

        def saving(ckpt: Any = ckpt, finished: Any = finished, failed: Any = failed) -> None:
            try:
                step = 0
                over = False
                while not over:
                    ckpt.save(step, components(job, Trap(job.rank), float(step)))
                    step += 1
                    # One rank decides, through the engine's own channel, when all stop.
                    with ckpt.comm.round("enough") as r:
                        answers = r.gather(finished.is_set())
                        if r.leads:
                            r.verdict = all(answers)
                    over = r.verdict
                saves.append(step)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=saving)
        thread.start()
        pauses = random.Random(seed * 100 + job.rank)
        for step in range(steps):
            value = torch.full((4,), float(step * (job.rank + 1)))
            if pauses.random() < 0.1:
                time.sleep(pauses.random() * 0.01)
            dist.all_reduce(value)
            wrong += value.tolist() != [step * job.world_size * (job.world_size + 1) / 2] * 4
        finished.set()
        thread.join(60)
        assert not thread.is_alive()
        if failed:
            raise failed[0]
        ckpt.close()
    return {"wrong": wrong, "saves": saves}


def slow_save(job: Job, group_timeout: float, seconds: float) -> dict[str, Any]:
    """The process group's timeout is shorter than what rank 0's storage takes."""
    job.join(timeout=group_timeout)
    storage = FaultStorage(open_storage(job.folder))
    if job.rank == 0:
        storage.delay(seconds, kind="write_at", path="*model*")
    with CheckpointManager(storage, io_threads=8) as ckpt:
        start = time.monotonic()
        ckpt.save(1, [StateComponent("model", {"x": torch.ones(64)}, REPLICATED)])
        took = time.monotonic() - start
    value = torch.ones(1)
    dist.all_reduce(value)
    return {"took": took, "sum": value.item()}


def b14(job: Job, epochs: int, batches: int, stops: list[int]) -> dict[str, Any]:
    """Training with dropout and shuffling, stopped mid-epoch and at the end of an epoch, against
    the run that went on."""
    job.join()

    def seeded(seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    class Run:
        def __init__(self) -> None:
            generator = torch.Generator().manual_seed(7)
            self.weight = torch.randn(6, 1, generator=generator).requires_grad_()
            self.order: list[int] = []
            self.at, self.losses = 0, {}

        def state(self) -> dict[str, Any]:
            return {"weight": {"w": self.weight}, "rng": RNGState(), "loader": self}

        def components(self) -> list[StateComponent]:
            return [
                StateComponent("rng", RNGState(), PER_RANK),
                StateComponent("weight", {"w": self.weight}, REPLICATED),
                StateComponent("loader", self, PER_RANK),
            ]

        def state_dict(self) -> dict[str, Any]:
            torch.rand(3)  # capturing and applying must not change what comes next
            return {"order": self.order, "at": self.at}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            torch.rand(3)
            self.order, self.at = state_dict["order"], state_dict["at"]

        def step(self, number: int) -> None:
            if self.at == len(self.order):
                self.order, self.at = torch.randperm(batches).tolist(), 0
            x = torch.full((4, 6), self.order[self.at] + 1.0) * random.random() + np.random.rand()
            self.at += 1
            loss = torch.nn.functional.dropout(x @ self.weight, 0.5).square().mean()
            loss.backward()
            dist.all_reduce(self.weight.grad)
            with torch.no_grad():
                self.weight -= 1e-3 * self.weight.grad
            self.weight.grad = None
            self.losses[number] = loss.item()

    def draws() -> list[float]:
        kept = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        drawn = (
            [random.random() for _ in range(5)]
            + np.random.rand(5).tolist()
            + torch.rand(5).tolist()
        )
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
        return drawn

    seeded(100 + job.rank)
    whole, found = Run(), {}
    total = epochs * batches
    with CheckpointManager(job.folder) as ckpt:
        for number in range(total):
            whole.step(number)
            if number + 1 in stops:
                ckpt.save(number + 1, whole.components())
                # Saving drew from torch's generator (the loader does): what was saved is from
                # before that.
                ckpt.load(whole.components(), step=number + 1)
                found[str(number + 1)] = {"expected": draws()}
        for stop in stops:
            seeded(999)
            resumed = Run()
            ckpt.load(resumed.components(), step=stop)
            found[str(stop)]["drawn"] = draws()
            for number in range(stop, total):
                resumed.step(number)
            after = {n: loss for n, loss in whole.losses.items() if n >= stop}
            found[str(stop)]["same losses"] = (
                list(after.values()) == list(resumed.losses.values()) and len(after) > 0
            )
            found[str(stop)]["same weights"] = torch.equal(whole.weight, resumed.weight)
    return {**found, "losses": list(whole.losses.values())}


def b15(job: Job, saves: int) -> dict[str, Any]:
    job.join()
    with CheckpointManager(JitterStorage(job.folder, job.rank)) as ckpt:
        for step in range(saves):
            assert (
                ckpt.save(step, components(job, Trap(job.rank), float(step))).status == "committed"
            )
        steps = [info.step for info in ckpt.list()]
    return {"steps": steps, "left": sorted(p.name for p in job.folder.iterdir() if "." in p.name)}
