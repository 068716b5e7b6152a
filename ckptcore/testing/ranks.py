"""Virtual ranks: threads that are ranks of one job, for testing what several processes would do in milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..ranks.communicator import BoardCommunicator, Communicator, MemoryBoard

__all__ = ["Killed", "run_ranks"]


class Killed(BaseException):
    """Raised in a virtual rank, it ends it as SIGKILL ends a process: nobody is told."""


def run_ranks(
    world_size: int,
    program: Callable[[Communicator], Any],
    *,
    nodes: Sequence[Sequence[int]] | None = None,
    errors: bool = False,
    join_timeout: float = 20.0,
    liveness_timeout: float = 20.0,
    deadline: float = 60.0,
) -> list[Any]:
    """Run `program(comm)` on `world_size` ranks that are threads; the results by rank.

    nodes: ranks by node, for PER_NODE state. errors: put what a rank raised in the place of its result; else the first
    rank's error is raised. Ranks that have not ended after `deadline` seconds: TimeoutError.
    """
    board = MemoryBoard()
    node_of = {rank: str(number) for number, ranks in enumerate(nodes or []) for rank in ranks}
    results: list[Any] = [None] * world_size
    failed: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        comm = BoardCommunicator(
            board, rank, world_size, node=node_of.get(rank, ""),
            join_timeout=join_timeout, liveness_timeout=liveness_timeout)  # fmt: skip
        try:
            results[rank] = program(comm)
        except BaseException as error:
            results[rank] = failed[rank] = error
            if isinstance(error, Killed):
                comm.fall_silent()
        finally:
            comm.close()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank{rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline)
    if late := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
        raise TimeoutError(f"ranks {late} have not ended after {deadline:g} s")
    if failed and not errors:
        raise failed[min(failed)]
    return results
