"""What real ranks do in the tests of saves in the background: every process of a job runs one of
these (see tests/distributed/job.py)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from job import Job, told
from programs import PER_RANK, REPLICATED, Trap, attempt, components
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor import distribute_tensor, init_device_mesh

from ckptcore import (
    AsyncSaveError,
    CheckpointManager,
    SharingPattern,
    SingleProcess,
    StateComponent,
    open_storage,
)
from ckptcore.saving import background
from ckptcore.testing.faults import FaultStorage


def b34_async(job: Job, steps: int, seed: int) -> dict[str, Any]:
    """An all_reduce a step while saves overlap; the storage of each rank is slow in places of its
    own."""
    job.join()
    draw = random.Random(seed * 10 + job.rank)
    faults = FaultStorage(open_storage(job.folder))
    for kind in ("create", "write_at", "close", "sync_folder", "rename"):
        faults.delay(draw.random() * 0.01, kind=kind)
    wrong, handles, overlapped = 0, [], 0
    weight = torch.zeros(4096)
    with CheckpointManager(faults) as ckpt:
        for step in range(steps):
            value = torch.full((4,), float(step * (job.rank + 1)))
            dist.all_reduce(value)
            wrong += value.tolist() != [step * job.world_size * (job.world_size + 1) / 2] * 4
            weight.fill_(step)
            overlapped += bool(handles) and not handles[-1].done()
            if step % 10 == 0:
                state = [
                    StateComponent("own", {"x": torch.full((8,), step + job.rank / 4)}, PER_RANK),
                    StateComponent("model", {"w": weight}, REPLICATED),
                ]
                handles.append(ckpt.save_async(step, state))
        done = [handle.result(60).step for handle in handles]  # type: ignore[union-attr]
        right = []
        for step in done:
            live = {"x": torch.zeros(8)}, {"w": torch.zeros(4096)}
            ckpt.load(
                [
                    StateComponent("own", live[0], PER_RANK),
                    StateComponent("model", live[1], REPLICATED),
                ],
                step,
            )
            right.append(
                live[0]["x"].tolist() == [step + job.rank / 4] * 8
                and set(live[1]["w"].tolist()) == {float(step)}
            )
        listed = [info.step for info in ckpt.list()]
    left = sorted(entry.name for entry in job.folder.iterdir())
    return {
        "wrong": wrong,
        "done": done,
        "right": right,
        "listed": listed,
        "overlapped": overlapped,
        "left": left,
    }


def dtensors(job: Job, rounds: int) -> dict[str, Any]:
    """Uneven slices, changed at once after `save_async` returned and while the write is held."""
    job.join()
    mesh = init_device_mesh("cpu", (job.world_size,))
    faults = FaultStorage(open_storage(job.folder))
    live = {
        name: distribute_tensor(torch.zeros(shape), mesh, [Cut(0)])
        for name, shape in (("a", (7, 300)), ("b", (1,)), ("c", (2, 5)))
    }
    state = [StateComponent("m", live, SharingPattern.SHARDED)]

    def fill(value: float) -> None:
        for tensor in live.values():
            tensor.to_local().fill_(value)

    found = []
    with CheckpointManager(faults, drain_timeout=20) as ckpt:
        for step in range(1, rounds + 1):
            faults.clear()
            gate = faults.block(kind="write_at")
            fill(step)
            handle = ckpt.save_async(step, state)
            fill(-1.0 - job.rank)
            gate.wait_reached(20)
            fill(-2.0 - job.rank)
            gate.open()
            handle.result(30)
            ckpt.load(state, step)
            found.append(
                sorted(
                    {v for tensor in live.values() for v in tensor.full_tensor().flatten().tolist()}
                )
            )
    return {"found": found, "kind": type(live["a"]).__name__}


def killed_in_the_background(job: Job, victim: int) -> dict[str, Any]:
    """Step 1 is saved; the victim is killed while it writes step 2, the other trains on and asks
    later."""
    job.join()
    faults = FaultStorage(open_storage(job.folder))
    events: list[str] = []
    ckpt = CheckpointManager(
        faults,
        join_timeout=5,
        liveness_timeout=5,
        on_event=lambda e: events.append(f"{e.kind} {e.step}"),
    )
    own = Trap(job.rank)
    ckpt.save(1, components(job, own, 1.0))
    if job.rank == victim:
        gate = faults.block(kind="write_at")
        ckpt.save_async(2, components(job, own, 2.0))
        gate.wait_reached()
        os.kill(os.getpid(), signal.SIGKILL)
    handle = ckpt.save_async(2, components(job, own, 2.0))
    start = time.monotonic()
    outcome: dict[str, Any] = {"error": None}
    try:
        handle.result(40)
    except AsyncSaveError as error:
        outcome = {**(told(error) or {}), "step": error.step, "cause": told(error.__cause__)}
    outcome["seconds"] = time.monotonic() - start
    outcome["again"] = attempt(lambda: ckpt.save(3, components(job, own, 3.0)))
    outcome["closing"] = attempt(ckpt.close)
    outcome["events"], outcome["failed"] = events, list(ckpt.failed_steps)
    outcome["latest"] = (
        CheckpointManager(open_storage(job.folder), comm=SingleProcess()).latest().step
    )  # type: ignore[union-attr]
    return outcome


def never_closed(job: Job) -> dict[str, Any]:
    """Both programs end without a word. The one of rank 0, which hosts the store, is through
    first."""
    job.join()
    faults = FaultStorage(open_storage(job.folder))
    ckpt = CheckpointManager(faults, join_timeout=5, liveness_timeout=5)
    handle = ckpt.save_async(1, components(job, Trap(job.rank), 1.0))
    if job.rank != 0:
        # Asks late for the verdict, as a rank on a busy machine does.
        board = ckpt._saves._branch.board.board  # type: ignore[union-attr]
        wait = board.wait

        def late(keys: Sequence[str], seconds: float) -> list[bytes] | None:
            if "/out/" in keys[0] and int(keys[0].rsplit("/", 3)[-3]) >= 2:
                time.sleep(0.5)
            return wait(keys, seconds)

        board.wait = late
    background._drain()
    return {"error": str(handle.error) if handle.error else None}


def forked(job: Job) -> dict[str, Any]:
    """A child of each rank closes the manager it came with, while a save is held up; then the save
    goes on."""
    job.join()
    faults = FaultStorage(open_storage(job.folder))
    ckpt = CheckpointManager(faults, join_timeout=10, liveness_timeout=6, drain_timeout=20)
    gate = faults.block(kind="write_at")
    handle = ckpt.save_async(1, components(job, Trap(job.rank), 1.0))
    gate.wait_reached(20)
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            ckpt.close()
            os._exit(0)
        except BaseException:
            os._exit(9)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seconds = time.monotonic() - start
    gate.open()
    info = handle.result(30)
    again = ckpt.save(2, components(job, Trap(job.rank), 2.0))
    ckpt.close()
    return {"child": code, "seconds": seconds, "steps": [info.step if info else None, again.step]}
