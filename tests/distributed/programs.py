"""What real ranks do in the tests: each function is a program that every process of a job runs (see
job.py)."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from job import Job, told

import ckptcore.saving.plan
from ckptcore import (
    CheckpointCoordinator,
    CheckpointManager,
    RNGState,
    SharingPattern,
    StateComponent,
    open_storage,
)
from ckptcore.testing.faults import FaultStorage

torch.set_num_threads(1)
ckptcore.saving.plan.MIN_SHARE_BYTES = 1  # every rank writes a part of replicated state

PER_RANK, REPLICATED = SharingPattern.PER_RANK, SharingPattern.REPLICATED
LIVENESS = JOIN = 5.0


def attempt(call: Any) -> dict[str, Any]:
    """What a call raised, or nothing, and the seconds that it took."""
    start = time.monotonic()
    try:
        call()
        outcome = {"error": None}
    except Exception as error:
        outcome = told(error) or {}
    return {**outcome, "seconds": time.monotonic() - start}


class Trap:
    """State of a rank's own, that ends or stops its process when it is asked for."""

    def __init__(self, rank: int, signal: int | None = None) -> None:
        self.value, self.signal = torch.full((8,), float(rank)), signal

    def state_dict(self) -> dict[str, Any]:
        if self.signal is not None:
            os.kill(os.getpid(), self.signal)
        return {"x": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["x"]


def components(
    job: Job, own: Any, value: float, survivors: list[int] | None = None
) -> list[StateComponent]:
    model = {f"w{n}": torch.full((16,), value + n) for n in range(4)}
    resized: Any = "error" if survivors is None else lambda new, size, old: survivors[new]
    return [
        StateComponent("model", model, REPLICATED),
        StateComponent("own", own, PER_RANK, on_resize=resized),
    ]


def fault(job: Job, victim: int, how: str, where: str) -> dict[str, Any]:
    """Step 1 is saved; in step 2 something happens to the victim. The survivors then go on, alone
    where they must."""
    job.join()
    faults = FaultStorage(open_storage(job.folder))
    ckpt = CheckpointManager(faults, join_timeout=JOIN, liveness_timeout=LIVENESS)
    own = Trap(job.rank)
    ckpt.save(1, components(job, own, 1.0))
    if job.rank == victim:
        arm(ckpt, faults, own, how, where)
    if how == "other step" and job.rank == victim:
        outcome = attempt(lambda: ckpt.save(7, components(job, own, 2.0)))
    elif how == "absent" and job.rank == victim:
        for rank in range(job.world_size):
            if rank != victim:
                job.store.wait([f"gave up {rank}"], timedelta(seconds=40))
        outcome = attempt(lambda: ckpt.save(2, components(job, own, 2.0)))
    else:
        outcome = attempt(lambda: ckpt.save(2, components(job, own, 2.0)))
        if how == "absent":
            job.store.set(f"gave up {job.rank}", b"")
    if where == "after the receipt" and outcome["error"] is None:
        outcome = {**attempt(lambda: ckpt.save(3, components(job, own, 3.0))), "committed": True}
    faults.clear()
    outcome["steps"] = sorted(entry.name for entry in job.folder.iterdir())
    if how in ("SIGKILL", "SIGSTOP"):
        ckpt.close()
        ckpt = new_job(job, victim)
    return {**outcome, **go_on(job, ckpt, victim, own)}


def arm(ckpt: CheckpointManager, faults: FaultStorage, own: Trap, how: str, where: str) -> None:
    if how == "raise":
        faults.fail(kind="write_at")
    if how not in ("SIGKILL", "SIGSTOP"):
        return
    number = getattr(signal, how)
    if where == "capture":
        own.signal = number
    elif where == "after the receipt":
        put = ckpt.comm.board.put  # type: ignore[attr-defined]

        def last_words(key: str, value: bytes) -> None:
            put(key, value)
            if "/in/" in key and b"index.rank" in value:
                os.kill(os.getpid(), number)

        ckpt.comm.board.put = last_words  # type: ignore[attr-defined]
    else:
        gate = faults.block(kind={"write": "write_at", "before the receipt": "sync_folder"}[where])

        def fire() -> None:
            gate.wait_reached()
            os.kill(os.getpid(), number)

        threading.Thread(target=fire, daemon=True).start()


def new_job(job: Job, victim: int) -> CheckpointManager:
    survivors = [rank for rank in range(job.world_size) if rank != victim]
    dist.destroy_process_group()
    job.join(survivors.index(job.rank), len(survivors))
    return CheckpointManager(job.folder, join_timeout=JOIN, liveness_timeout=LIVENESS)


def go_on(job: Job, ckpt: CheckpointManager, victim: int, own: Trap) -> dict[str, Any]:
    """The newest checkpoint restores, bit for bit, and the next save works."""
    survivors = [
        rank
        for rank in range(job.world_size)
        if rank != victim or dist.get_world_size() == job.world_size
    ]
    own.value.fill_(-1)
    state = components(job, own, -1.0, survivors)
    report = ckpt.load(state)
    model = {name: tensor[0].item() for name, tensor in state[0].stateful.items()}
    assert all(len(set(tensor.tolist())) == 1 for tensor in state[0].stateful.values())
    saved = ckpt.save(9, state)
    verified = ckpt.verify()
    ckpt.close()
    return {
        "restored": report.step,
        "model": model,
        "own": own.value.tolist(),
        "next": saved.step,
        "world": saved.manifest.world_size if saved.manifest else None,
        "problems": len(verified),
    }


def host_dies(job: Job, how: str) -> dict[str, Any]:
    """Rank 0, whose process hosts the store, dies or stops in a save: whoever is left says so."""
    job.join()
    ckpt = CheckpointManager(job.folder, join_timeout=JOIN, liveness_timeout=LIVENESS)
    own = Trap(job.rank)
    ckpt.save(1, components(job, own, 1.0))
    if job.rank == 0:
        own.signal = getattr(signal, how)
    outcome = attempt(lambda: ckpt.save(2, components(job, own, 2.0)))
    again = attempt(lambda: ckpt.save(3, components(job, own, 2.0)))
    closing = attempt(ckpt.close)
    return {**outcome, "again": again, "closing": closing}


def b07(job: Job) -> dict[str, Any]:
    """Rank 1's shard cannot be opened; then it cannot be written; in between and after, all is
    well."""
    job.join(timeout=300)
    faults = FaultStorage(open_storage(job.folder))
    own = Trap(job.rank)
    with CheckpointManager(faults) as ckpt:
        ckpt.save(1, components(job, own, 1.0))
        if job.rank == 1:
            faults.fail(kind="open", path="*own.rank00001.safetensors", times=None)
        reading = attempt(lambda: ckpt.load(components(job, Trap(job.rank), 0.0)))
        faults.clear()
        after = attempt(lambda: ckpt.load(components(job, own, 0.0)))
        if job.rank == 1:
            faults.fail(kind="create", path="*own.rank00001.safetensors")
        writing = attempt(lambda: ckpt.save(2, components(job, own, 2.0)))
        faults.clear()
        last = attempt(lambda: ckpt.save(2, components(job, own, 2.0)))
    return {
        "reading": reading,
        "after": after,
        "writing": writing,
        "last": last,
        "own": own.value.tolist(),
    }


def b35(job: Job) -> dict[str, Any]:
    """Only rank 0 saves, rank 1 is at a barrier of the training; then both save, different steps;
    then both the same."""
    job.join()
    ckpt = CheckpointManager(job.folder, join_timeout=1.5)
    only = None
    if job.rank == 0:
        only = attempt(lambda: ckpt.save(1, components(job, Trap(0), 1.0)))
    dist.barrier()
    entries = sorted(p.name for p in job.folder.iterdir()) if job.folder.exists() else []
    if job.rank == 1:
        only = attempt(lambda: ckpt.save(1, components(job, Trap(1), 1.0)))
    dist.barrier()
    other = attempt(lambda: ckpt.save(1 + job.rank, components(job, Trap(job.rank), 1.0)))
    last = attempt(lambda: ckpt.save(3, components(job, Trap(job.rank), 1.0)))
    ckpt.close()
    return {"only": only, "entries": entries, "other": other, "last": last}


def meshes(job: Job) -> dict[str, Any]:
    """The same partition, said with a mesh dimension, a ProcessGroup, a mesh and a name, and lists
    of ranks."""
    job.join()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    groups = {
        "mesh": mesh["dp"],
        "group": mesh["dp"].get_group(),
        "named": (mesh, "dp"),
        "lists": [[0, 2], [1, 3]],
        "pp": mesh["pp"],
    }
    stage = mesh.get_local_rank("pp")

    def state(value: float) -> list[StateComponent]:
        return [
            StateComponent(name, {"x": torch.full((8,), value)}, SharingPattern.PER_GROUP, name)
            for name in ("mesh", "group", "named", "lists")
        ]

    with CheckpointManager(job.folder, process_groups=groups) as ckpt:
        info = ckpt.save(1, state(float(stage)))
        live = state(-1.0)
        ckpt.load(live)
    with CheckpointManager(job.folder, process_groups={**groups, "whole": mesh}) as ckpt:
        two = attempt(lambda: ckpt.save(2, state(0.0)))
    return {
        "groups": info.manifest.groups,
        "loaded": [c.stateful["x"].tolist() for c in live],
        "two": two,
    }


def coordinators(job: Job, saves: int) -> dict[str, Any]:
    """A new coordinator for every checkpoint, as its signature suggests."""
    job.join()
    counts = []
    for step in range(saves):
        state = components(job, Trap(job.rank), float(step))
        CheckpointCoordinator(state).save_checkpoint(job.folder / f"c{step}", step=step)
        dist.barrier()
        if step in (4, saves - 1):
            counts.append([job.store.num_keys(), threading.active_count()])
        dist.barrier()
    return {"counts": counts}


def zero(job: Job, saves: bool) -> dict[str, Any]:
    """DDP and ZeroRedundancyOptimizer: train, save, train on; or restore what was saved, and train
    on.

    All ranks see the same data, so that the result is that of one process, on 1, 2 and 4 ranks.
    """
    job.join()
    model, optimizer = zero_model(job)
    state = {"model": model, "optimizer": optimizer}
    refused: Any = {}
    with CheckpointManager(job.folder) as ckpt:
        if saves:
            zero_train(model, optimizer, 0, 3)
            for pattern in ("REPLICATED", "GLOBAL", "PER_NODE"):
                parts = [StateComponent(key, value, pattern) for key, value in state.items()]  # type: ignore[arg-type]
                refused[pattern] = attempt(lambda parts=parts: ckpt.save(3, parts))  # type: ignore[misc]
            ckpt.save(3, state)
        else:
            zero_train(
                model, optimizer, 7, 8
            )  # other weights and moments than those that were saved
            ckpt.restore(state)
    mine = len(getattr(optimizer, "optim", optimizer).state)
    zero_train(model, optimizer, 3, 6)
    return {
        "mine": mine,
        "refused": refused,
        "lr": optimizer.param_groups[0]["lr"],
        "weights": [p.tolist() for p in model.parameters()],
    }


def zero_model(job: Job) -> tuple[Any, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    if job.world_size == 1:
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    model = torch.nn.parallel.DistributedDataParallel(model)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


def zero_train(model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        data = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()


def part(job: Job, saves: bool) -> dict[str, Any]:
    """FSDP2: train a step and save; or load one layer with its moments, then keys that differ
    between ranks."""
    from torch.distributed.fsdp import fully_shard

    job.join()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 if saves else 0.0)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if saves else 0.25)
    state = {"model": model, "optimizer": optimizer, "rng": RNGState(on_resize="keep")}
    with CheckpointManager(job.folder, load_broadcast=True) as ckpt:
        if saves:
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            ckpt.save(1, state)
            other: Any = None
        else:
            ckpt.load(state, "checkpoint-1", keys=["model/0.*", "optimizer/0.*"])
            # Both mean a part that the other one does not.
            other = attempt(
                lambda: ckpt.load(
                    state, 1, keys=lambda name: name.startswith(f"model/{job.rank % 2}")
                )
            )
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ckpt.load(state, keys="rng")
            other["warned"] = [str(warning.message) for warning in caught]
    weights = [p.full_tensor().detach().tolist() for p in model.parameters()]
    moments = [
        optimizer.state[p]["exp_avg"].full_tensor().tolist() if optimizer.state.get(p) else None
        for p in model.parameters()
    ]
    return {
        "weights": weights,
        "moments": moments,
        "lr": optimizer.param_groups[0]["lr"],
        "other": other,
    }
