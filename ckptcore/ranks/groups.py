"""Process groups by name: how each rank says which ranks are its group, and the partition that this
makes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import shown
from ..errors import InvalidState
from .communicator import Communicator

__all__ = ["group_index", "leads_node", "node_name", "own_node", "own_view", "partitions"]


def own_view(name: str, group: Any, rank: int, world_size: int) -> list[list[int]]:
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
        own = [operator.index(r) for r in group]
        raise InvalidState(
            f"process group {name!r} is {own}, the ranks of one group; give the ranks of all "
            "groups, in the same way on "
            f"every rank: [{own}, ...], as in {{'dp': [[0, 2], [1, 3]]}}"
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


def own_node(comm: Communicator) -> int:
    """The number of the node that this rank is on. Nodes are known after the first round."""
    return group_index(comm.nodes, comm.rank)


def leads_node(comm: Communicator) -> bool:
    """Whether this rank is the lowest of its node."""
    return comm.rank == comm.nodes[own_node(comm)][0]
