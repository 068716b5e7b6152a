"""What ranks do in the tests of the harness itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def add(rank: int, world_size: int, more: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    total = torch.tensor(rank + more)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return {"total": total.item(), "pid": os.getpid()}


def add_in_a_group(rank: int, world_size: int) -> int:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return int(total)


def environment(rank: int, world_size: int) -> list[str | None]:
    return [os.environ.get(name) for name in ("RANK", "MASTER_PORT", "COLOUR")] + [os.getcwd()]


def raise_on(rank: int, world_size: int, bad: int) -> str:
    print(f"this is rank {rank}")
    if rank == bad:
        raise ValueError(f"rank {bad} does not like it")
    if world_size > 1:
        wait_for_ever()
    return "well"


def wait_for_ever() -> None:
    print("waiting", file=sys.stderr, flush=True)
    while True:
        time.sleep(60)


def wait(rank: int, world_size: int) -> None:
    if rank:
        wait_for_ever()


def end_by(rank: int, world_size: int, number: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), number)
    wait_for_ever()


def leave(rank: int, world_size: int, code: int) -> int:
    if rank == 1:
        os._exit(code)
    return rank


def crash_once(rank: int, world_size: int) -> list[str]:
    """In the working folder: what is there before this attempt, and one file more."""
    found = sorted(path.name for path in Path().iterdir())
    again = os.environ.get("CRASHED")
    if rank == 0:  # the other one may be quicker than this listing
        Path("of-0").write_text("x")
    Path("kept").write_text("changed")
    if rank == 0 and again and not Path(again).exists():
        Path(again).touch()
        os.abort()
    return found


def stop(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return "went on"


def say_and_wait(rank: int, world_size: int, told: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    Path(told, str(rank)).touch()
    wait_for_ever()
