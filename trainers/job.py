"""This process among those that `torchrun` started; alone without it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .parallel.environment import DistributedEnvironment


class Job:
    """Rank and size are known at once, the process group (and torch) come with `start`."""

    def __init__(self) -> None:
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.world_size > 1 else 0
        self.environment: DistributedEnvironment | None = None
        self._first_here = self.world_size == 1 or os.environ.get("LOCAL_RANK", "0") == "0"
        self._starting = False

    def start(self, args: Any) -> DistributedEnvironment:
        from .parallel.environment import DistributedEnvironment

        self._starting = True
        self.environment = DistributedEnvironment.from_environ(args)
        return self.environment

    def finish(self) -> None:
        """At a good end only: after a failure this could wait for ranks that never come."""
        if self.environment is not None:
            self.environment.close()

    def say(self, text: str) -> None:
        """On stderr, once for all ranks that have the same to say."""
        if self.speaks(text):
            print(text, file=sys.stderr)

    def speaks(self, text: str) -> bool:
        """Whether this process is to say `text`: what several ranks have to say, one of them says.

        Before the ranks know each other it is the first of each machine: all have the same
        arguments and the same files.
        """
        store = self.environment.store if self.environment is not None else None
        if store is None:
            return self._starting or self._first_here
        me = str(self.rank)
        try:
            return bool(store.compare_set(f"ckpt-train said: {text}", "", me) == me.encode())
        except RuntimeError:  # the store went with the process that hosts it
            return True
