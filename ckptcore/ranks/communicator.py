"""The ranks of one job, their nodes and groups, and how they decide: in rounds.

Every rank brings its part to a round, rank 0 decides, all get the same verdict. Joins, receipts and
errors travel in no other way. See rounds.py for how several processes do it.
"""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ..arguments import shown
from ..errors import InvalidState


class Round:
    """One round, inside its `with` block. leads: whether this rank is rank 0, which decides.
    verdict: what it has decided, on every rank, after the block."""

    leads = True
    verdict: Any = None

    def gather(self, value: Any = None) -> list[Any]:
        """What all ranks bring, in order of rank, on rank 0; elsewhere `value` alone.

        Once in a round; without it a rank brings None. Raises, on rank 0, what another rank has
        failed with. Values must be plain, or messages (see messages.py).
        """
        return [value]


class Communicator(ABC):
    """The ranks of one job, and how they talk. Made by CheckpointManager where `comm` is None.

    rank: int, of this process.
    world_size: int, number of ranks.
    nodes: list of the ranks of each node, in order of their lowest rank; known from the first round
        on.
    number: int, of the call that is being made.
    """

    rank: int
    world_size: int
    nodes: list[list[int]]
    number: int = 0

    @property
    def node_number(self) -> int:
        """Which of `nodes` this rank is on."""
        return group_index(self.nodes, self.rank)

    @property
    def leads_node(self) -> bool:
        """Whether this rank is the lowest of its node."""
        return self.rank == self.nodes[self.node_number][0]

    def call(self, what: str, *, number: int | None = None) -> AbstractContextManager[None]:
        """All rounds of one call that every rank makes: `what`, in words. Other threads wait for
        their turn.

        number: where it has one; else it is the next one. Raises InvalidState on a thread that is
        in a call already.
        """
        turn: Turn = self.__dict__.setdefault("_turn", Turn())
        return turn.taken(what)

    def leave(self, number: int, error: BaseException) -> None:  # noqa: B027
        """This rank does not make the call of that number, because of `error`: the others hear of
        it there."""

    def conclude(self, verdict: Any) -> None:  # noqa: B027
        """On rank 0, when Ctrl-C has left a round although what it decides has come about: the
        others get `verdict` all the same."""

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """This rank has work of its own to do before its next call, and comes to it when that is
        done."""
        yield

    @abstractmethod
    def round(self, topic: str, *, joining: bool = False) -> AbstractContextManager[Round]:
        """A round of all ranks: `with comm.round("capture") as r`.

        Every rank brings its part by `r.gather`, rank 0 sets `r.verdict`, and after the block
        every rank has it. What is raised in the block on any rank, every rank raises when the
        block is left: errors of ckptcore in their own type, others as RankFailed, with `causes` by
        rank.

        topic: what is done, for messages; the same on all ranks. joining: ranks may not be here
        yet; they have `join_timeout` to come (JoinTimeout). Other rounds wait for as long as the
        others live (RankLost).
        """

    def share(self, buffer: memoryview, source: int) -> None:
        """Fill `buffer` on every rank with what it holds on rank `source`; it has the same length
        on all."""
        if self.world_size > 1:
            with self.round("share") as r:
                parts = r.gather(bytes(buffer) if self.rank == source else b"")
                if r.leads:
                    r.verdict = parts[source]
            buffer[:] = r.verdict

    def branch(self, name: str) -> Communicator:
        """The same ranks in a conversation of their own, for another thread; every rank makes one
        of that `name`.

        One that returns itself has none, and then rounds of saves in the background mix with those
        of other calls.
        """
        return self

    def close(self) -> None:  # noqa: B027
        """Leave. Ranks that still wait for this one are told so."""


class Turn:
    """One call at a time, whichever threads they come from. doing: what it is, in words."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.doing: str | None = None

    @contextmanager
    def taken(self, what: str) -> Iterator[None]:
        with self.lock:
            if self.doing is not None:  # this thread's own, for the lock is held by it
                raise InvalidState(
                    f"{what}: a {self.doing} is under way on this thread, so a signal handler or "
                    "a state_dict() cannot begin another call; note that it is wanted, and make "
                    "it when that one has returned"
                )
            try:
                self.doing = what
                yield
            finally:
                self.doing = None


class SingleProcess(Communicator):
    """The communicator of a single process, which waits for nobody."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.nodes = [[0]]

    def round(self, topic: str, *, joining: bool = False) -> AbstractContextManager[Round]:
        return nullcontext(Round())

    def call(self, what: str, *, number: int | None = None) -> AbstractContextManager[None]:
        return nullcontext()  # nobody else takes part, so one in the middle of another is fine


# Process groups by name: what each rank knows of one, and the partition that this makes.


def view_of_group(name: str, group: Any, rank: int, world_size: int) -> list[list[int]]:
    """What one rank knows of a group: the whole partition when it was given as lists, else its own
    ranks alone.

    group: a list of rank lists, a ProcessGroup, a one-dimensional DeviceMesh (`mesh["dp"]`), or
    (DeviceMesh, name of a dimension). Raises InvalidState.
    """
    if _is_list(group) and all(_is_list(part) and all(_is_rank(r) for r in part) for part in group):
        return [sorted(operator.index(r) for r in part) for part in group]
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[1], str):
        try:
            group = group[0][group[1]]
        except Exception as error:  # of whatever was given for a mesh
            raise InvalidState(
                f"process group {name!r}: {shown(group[0])} has no dimension {group[1]!r} ({error})"
            ) from None
    mesh = getattr(group, "mesh", None)
    if mesh is not None:
        if mesh.ndim != 1:
            raise InvalidState(
                f"process group {name!r}: the mesh has {mesh.ndim} dimensions; pass one, as "
                "mesh['dp']"
            )
        return [sorted(int(r) for r in mesh.tolist())]
    if hasattr(group, "rank") and hasattr(group, "size"):
        import torch.distributed as dist

        return [sorted(dist.get_process_group_ranks(group))]
    if _is_list(group) and group and all(_is_rank(r) for r in group):
        ranks = [operator.index(r) for r in group]
        raise InvalidState(
            f"process group {name!r} is {ranks}, the ranks of one group; give the ranks of all "
            "groups, in the same way on "
            f"every rank: [{ranks}, ...], as in {{'dp': [[0, 2], [1, 3]]}}"
        )
    raise InvalidState(
        f"process group {name!r} must be lists of ranks ([[0, 2], [1, 3]]), a ProcessGroup or a "
        "DeviceMesh dimension, "
        f"not {shown(group)}, a {type(group).__qualname__}"
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_rank(value: Any) -> bool:
    return (
        not isinstance(value, bool)
        and hasattr(value, "__index__")
        and getattr(value, "ndim", 0) == 0
    )


def partitions(views: Sequence[Mapping[str, list[list[int]]]]) -> dict[str, list[list[int]]]:
    """The partition of all ranks for every name, from what each rank knows; groups in order of
    their lowest rank.

    Raises InvalidState, with the ranks, when a rank is in no group of a name or in several.
    """
    world = range(len(views))
    result: dict[str, list[list[int]]] = {}
    for name in sorted({name for view in views for name in view}):
        if absent := [rank for rank in world if name not in views[rank]]:
            raise InvalidState(
                f"process group {name!r} is not known on ranks {absent}; pass it on every rank",
                ranks=absent,
            )
        groups = sorted({tuple(group) for view in views for group in view[name] if group})
        count = [sum(group.count(rank) for group in groups) for rank in world]
        outside = sorted({rank for group in groups for rank in group} - set(world))
        if outside:
            raise InvalidState(
                f"process group {name!r} names ranks {outside} of a job of {len(views)} ranks",
                ranks=outside,
            )
        if wrong := [rank for rank in world if count[rank] != 1]:
            raise InvalidState(
                f"process group {name!r} must put every rank in exactly one group; it has "
                f"{[list(g) for g in groups]}, so "
                + "; ".join(f"rank {r} is in {count[r]} groups" for r in wrong[:8]),
                ranks=wrong,
            )
        result[name] = [list(group) for group in groups]
    return result


def group_index(partition: Sequence[Sequence[int]], rank: int) -> int:
    """Which group a rank belongs to."""
    return next(index for index, group in enumerate(partition) if rank in group)


def node_name(nodes: Sequence[Sequence[int]], number: int) -> str:
    """How messages name a node."""
    ranks = ", ".join(map(str, nodes[number][:8])) + (", ..." if len(nodes[number]) > 8 else "")
    return f"node {number} (rank{'s' if len(nodes[number]) > 1 else ''} {ranks})"
