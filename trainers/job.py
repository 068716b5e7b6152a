"""This process among those that `torchrun` started; alone without it."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["Job"]


class Job:
    """Rank and size are known at once, the process group (and torch) come with `start`."""

    def __init__(self) -> None:
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.world_size > 1 else 0
        self._store: Any = None

    def start(self) -> None:
        if self.world_size == 1:
            return
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        self._store, _, _ = next(rendezvous("env://"))
        # No backend named: gloo for tensors on the CPU and, where there is CUDA, nccl for those on it.
        dist.init_process_group(store=self._store, rank=self.rank, world_size=self.world_size)

    def finish(self) -> None:
        """At a good end only: after a failure this could wait for ranks that never come."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

    def speaks(self, text: str) -> bool:
        """Whether this process is to say `text`: what several ranks have to say, one of them says."""
        if self._store is None:
            return True
        me = str(self.rank)
        try:
            return bool(self._store.compare_set(f"ckpt-train said: {text}", "", me) == me.encode())
        except RuntimeError:  # the store went with the process that hosts it
            return True
