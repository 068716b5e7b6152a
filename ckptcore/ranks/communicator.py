"""How ranks agree: every rank brings its part, one of them decides, and all get the same answer or the same error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

__all__ = ["Communicator", "SingleProcess"]


class Communicator(ABC):
    """The ranks of one job. `nodes` lists the ranks of every node, in order of their lowest rank."""

    rank: int
    world_size: int
    nodes: list[list[int]]

    @abstractmethod
    def together(self, topic: str, local: Callable[[], Any], decide: Callable[[list[Any]], Any]) -> Any:
        """Run `local` on every rank, then `decide` once with all results by rank; its result is everybody's.

        What any rank raises, in `local` or in `decide`, every rank raises. Results must be plain values.
        """


class SingleProcess(Communicator):
    """One rank: nothing to agree about."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.nodes = [[0]]

    def together(self, topic: str, local: Callable[[], Any], decide: Callable[[list[Any]], Any]) -> Any:
        return decide([local()])
