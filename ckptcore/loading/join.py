"""Joining a load: all ranks mean the same checkpoint, see the same manifest, and know the groups of now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointCorrupt, RanksDisagree
from ..ranks.communicator import Communicator
from ..ranks.groups import own_view, partitions
from ..state.component import StateComponent
from ..storage.base import Storage
from .view import CheckpointView

__all__ = ["join_load"]


def join_load(
    comm: Communicator, storage: Storage, name: str, components: Sequence[StateComponent], groups: Mapping[str, Any]
) -> tuple[CheckpointView, dict[str, list[list[int]]]]:
    """The view of the checkpoint, and the partitions of the groups as they are now.

    Raises CheckpointNotFound, CheckpointCorrupt, UnsupportedVersion, StorageError, RanksDisagree, InvalidState.
    """
    opened: list[CheckpointView] = []

    def local() -> dict[str, Any]:
        opened.append(CheckpointView(storage, name))
        views = {group: own_view(group, ranks, comm.rank, comm.world_size) for group, ranks in groups.items()}
        keys = [component.key for component in components]
        return {"name": name, "components": keys, "digest": opened[0].manifest.digest, "groups": views}

    def decide(calls: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
        for what in ("name", "components", "digest"):
            wrong = [rank for rank, call in enumerate(calls) if call[what] != calls[0][what]]
            if wrong and what == "digest":
                raise CheckpointCorrupt(f"{storage.at(name)}: ranks {wrong} read another manifest than rank 0: do they "
                                        "see the same storage?", path=storage.at(name), kind="digest")  # fmt: skip
            if wrong:
                raise RanksDisagree(
                    f"the ranks make different loads: {what} is {calls[0][what]!r} on rank 0 and "
                    f"{calls[wrong[0]][what]!r} on rank {wrong[0]}", ranks=wrong)  # fmt: skip
        return partitions([call["groups"] for call in calls])

    found = comm.together("load", local, decide, joining=True)
    return opened[0], found
