"""A job as a rank of it sees it. Programs get one; the harness (ckptcore.testing.processes) calls
`in_a_job`, which runs the program and turns what it raises into facts."""

from __future__ import annotations

import os
import socket
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

SECONDS = timedelta(seconds=60)


def host_store() -> tuple[Any, int]:
    """A store in this process, and its port. The socket is of IPv4: for one of IPv6 torch asks a
    name server, which may not answer for seconds."""
    made = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = made.getsockname()[1]
    how = {"wait_for_workers": False, "master_listen_fd": made.detach()}
    return dist.TCPStore("127.0.0.1", port, None, True, SECONDS, **how), port


class Job:
    """One rank's view of the job: its numbers, a folder, and process groups over gloo."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, Path(folder)
        self.store: Any = None
        self.ports = 0  # how many were passed on

    def port(self, mine: int | None) -> int:
        """A port that one rank has, on all ranks. It goes by the launcher's store, which no rank
        hosts."""
        self.ports += 1
        key = f"port {self.ports}"
        if self.world_size > 1:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            launcher = dist.TCPStore(*address, None, False, SECONDS, wait_for_workers=False)
            if mine is not None:
                launcher.set(key, str(mine))
            return int(launcher.get(key))
        assert mine is not None
        return mine

    def join(
        self, rank: int | None = None, world_size: int | None = None, timeout: float = 60
    ) -> None:
        """Make a process group, of all ranks or of those that are left, on a store that its rank 0
        hosts."""
        rank = self.rank if rank is None else rank
        world_size = world_size or self.world_size
        store, mine = host_store() if rank == 0 else (None, None)
        port = self.port(mine)
        self.store = store or dist.TCPStore("127.0.0.1", port, None, False, SECONDS, False)
        dist.init_process_group(
            "gloo",
            store=self.store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def told(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    facts = {name: getattr(error, name, None) for name in ("ranks", "file", "causes")}
    return {"error": type(error).__name__, "message": str(error), **facts}


def in_a_job(
    rank: int, world_size: int, modules: list[str], call: str, folder: str, how: dict[str, Any]
) -> Any:
    """Run the function `call` of one of the modules."""
    try:
        job = Job(rank, world_size, folder)
        found = (getattr(import_module(module), call, None) for module in modules)
        result = next(filter(None, found))(job, **how)
        job.leave()
        return result
    except BaseException as error:
        traceback.print_exc()
        return told(error)
