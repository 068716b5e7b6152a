"""Virtual ranks: threads that are ranks of one job, for testing what several processes would do in
milliseconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..ranks.board import MemoryBoard
from ..ranks.communicator import Communicator
from ..ranks.liveness import GONE
from ..ranks.rounds import BoardCommunicator
from .killed import Killed
from .processes import patience

__all__ = ["Killed", "run_ranks"]


class _Board(MemoryBoard):
    """A rank that was Killed writes nothing on it any more; the others can be told to look
    around."""

    def __init__(self) -> None:
        super().__init__()
        self._woken = 0
        self._seen = threading.local()

    def put(self, key: str, value: bytes) -> None:
        # What runs in a `finally` while Killed passes would not run in a process that is dead.
        if not isinstance(sys.exc_info()[1], Killed):
            super().put(key, value)

    def offer(self, key: str, value: bytes) -> None:
        with self.lock:
            if key not in self.values:
                self.put(key, value)

    def gone(self, rank: int) -> None:
        with self.lock:
            self.values[f"alive/{rank}"] = GONE
            self._woken += 1
            for waiter in {waiter for found in self.awaited.values() for waiter in found}:
                waiter.event.set()

    def wait(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        woken = self._woken
        looks = woken > getattr(self._seen, "count", 0)
        found = super().wait(keys, 0 if looks else seconds)
        if found is None:
            self._seen.count = woken
        return found


def run_ranks(
    world_size: int,
    program: Callable[[Communicator], Any],
    *,
    nodes: Sequence[Sequence[int]] | None = None,
    errors: bool = False,
    notice: bool = False,
    join_timeout: float | None = None,
    liveness_timeout: float | None = None,
    deadline: float = 60.0,
) -> list[Any]:
    """Run `program(comm)` on `world_size` ranks that are threads; the results by rank.

    nodes: ranks by node, for PER_NODE state. errors: put what a rank raised in the place of its
    result; else the first rank's error is raised. notice: the others see at once that a rank was
    Killed, as if its heartbeat had stopped long ago; else after `liveness_timeout`. Ranks that have
    not ended after `deadline` seconds, times `patience()`: TimeoutError. join_timeout,
    liveness_timeout: those of a manager, in seconds; None: 20, times `patience()`.
    """
    deadline *= patience()
    board = _Board()
    node_of = {rank: str(number) for number, ranks in enumerate(nodes or []) for rank in ranks}
    results: list[Any] = [None] * world_size
    failed: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        comm = BoardCommunicator(
            board,
            rank,
            world_size,
            node=node_of.get(rank, ""),
            join_timeout=20.0 * patience() if join_timeout is None else join_timeout,
            liveness_timeout=20.0 * patience() if liveness_timeout is None else liveness_timeout,
        )
        try:
            results[rank] = program(comm)
        except BaseException as error:
            results[rank] = failed[rank] = error
            if isinstance(error, Killed):
                comm.fall_silent()
                if notice:
                    comm.heart.join(deadline)
                    board.gone(rank)
        finally:
            comm.close()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(world_size)
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
