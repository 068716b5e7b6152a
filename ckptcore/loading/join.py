"""Joining a load: all ranks mean the same checkpoint, see the same manifest, and know the groups of
now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointCorrupt, CheckpointNotFound, InvalidState, RanksDisagree
from ..nodes.agreement import StorageMode
from ..ranks.communicator import Communicator
from ..ranks.groups import node_name, own_node, own_view, partitions
from ..state.component import StateComponent, differing_components
from ..storage.base import Storage
from .keys import Keys, Selection
from .view import CheckpointView

__all__ = ["join_load"]


def join_load(
    comm: Communicator,
    storage: Storage,
    name: str,
    components: Sequence[StateComponent],
    groups: Mapping[str, Any],
    mode: StorageMode = "shared",
    keys: Keys | None = None,
) -> tuple[CheckpointView, dict[str, list[list[int]]], Selection | None]:
    """The view of the checkpoint, the partitions of the groups as they are now, and what `keys` ask
    for. mode: whether nodes share their storage; where they do not, each has a view of its own
    part, and may have it under another name.

    Raises CheckpointNotFound, CheckpointCorrupt, UnsupportedVersion, StorageError, RanksDisagree,
    InvalidState.
    """
    opened: list[CheckpointView] = []
    selections: list[Selection | None] = []

    def local() -> dict[str, Any]:
        selections.append(None if keys is None else Selection(keys))
        opened.append(_opened(comm, storage, name, mode))
        views = {
            group: own_view(group, ranks, comm.rank, comm.world_size)
            for group, ranks in groups.items()
        }
        named = [component.key for component in components]
        manifest = opened[0].manifest
        asked = None if selections[0] is None else selections[0].text
        said = {
            "name": name,
            "components": named,
            "keys": asked,
            "digest": manifest.digest,
            "groups": views,
        }
        return said | (
            {"name": "", "id": manifest.checkpoint_id, "node": manifest.node}
            if mode == "node"
            else {}
        )

    def decide(calls: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
        if mode == "node":
            _check_parts(comm, storage.at(name), calls)
        for what in ("name", "components", "keys", *(() if mode == "node" else ("digest",))):
            wrong = [rank for rank, call in enumerate(calls) if call[what] != calls[0][what]]
            if wrong and what == "digest":
                raise CheckpointCorrupt(
                    f"{storage.at(name)}: ranks {wrong} read another manifest than rank 0: do "
                    "they "
                    "see the same storage?",
                    path=storage.at(name),
                    kind="digest",
                )
            if wrong:
                first, other = calls[0][what], calls[wrong[0]][what]
                differs = f"{what} is {first!r} on rank 0 and {other!r} on rank {wrong[0]}"
                if what == "components":
                    differs = differing_components(first, other, wrong[0])
                raise RanksDisagree(f"the ranks make different loads: {differs}", ranks=wrong)
        return partitions([call["groups"] for call in calls])

    found = comm.together("load", local, decide, joining=True)
    return opened[0], found, selections[0]


def _opened(comm: Communicator, storage: Storage, name: str, mode: StorageMode) -> CheckpointView:
    try:
        view = CheckpointView(storage, name)
    except CheckpointNotFound as error:
        if mode == "node":
            error.message = (
                f"{node_name(comm.nodes, own_node(comm))} has no part of it: {error.message}"
            )
        raise
    saved = view.manifest.storage_mode
    if saved != mode:
        raise InvalidState(
            f"{view.url} was saved with storage_mode={saved!r}, and is to be loaded with "
            f"storage_mode={mode!r}: "
            + (
                "it is the part of one node; load it on the nodes that saved it with "
                "storage_mode='node'"
                if saved == "node"
                else "it lies whole in storage that all nodes see; load it with "
                "storage_mode='shared'"
            )
        )
    return view


def _check_parts(comm: Communicator, where: str, calls: list[dict[str, Any]]) -> None:
    """Raises CheckpointCorrupt unless all nodes have parts of one checkpoint."""
    first = calls[0]
    for number, ranks in enumerate(comm.nodes):
        for rank in ranks:
            call, lowest = calls[rank], calls[ranks[0]]
            if call["id"] != first["id"] or call["digest"] != lowest["digest"]:
                raise CheckpointCorrupt(
                    f"{where}: rank {rank} on {node_name(comm.nodes, number)} has a part of "
                    "another checkpoint "
                    f"({call['id']}) than rank 0 ({first['id']})",
                    path=where,
                    kind="digest",
                )
