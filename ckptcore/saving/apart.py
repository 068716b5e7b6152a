"""Committing on nodes that share no storage: each publishes its part, and all of them do or none.

The lowest rank of a node makes the attempt there, publishes and cleans up. Everything is on the
disks of all nodes before the first one publishes. A crash between two of them leaves a checkpoint
on some nodes, which is none (ranks/nodes.py); a failure without a crash is taken back. What an
overwrite puts aside stays until all nodes have published.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointExists, InvalidState, RankLost, StorageError
from ..format.manifest import CheckpointManifest
from ..ranks.communicator import Communicator
from ..ranks.nodes import leads, look, node_name, own_node
from ..root import CheckpointInfo, attempts_among, join, mark_attempt, mark_name, within
from ..storage.base import Storage
from .publish import check_place, discard, put_in_place, remove_aside, take_back

if TYPE_CHECKING:
    from .flow import Saving

__all__ = ["agree_place", "check_seen", "commit_apart", "mark_apart"]


def agree_place(saving: Saving) -> tuple[int, bool]:
    """The sequence of the checkpoint that is to be, and whether what is in its place gives way
    without being asked: where it is not on every node. Raises CheckpointExists, StorageError."""
    comm, storage, name, step = saving.comm, saving.storage, saving.name, saving.request.step

    def choose(infos: list[CheckpointInfo]) -> bool:
        there = [info for info in infos if info.name == name]
        request = saving.request
        saving.seen = infos
        saving.follow(infos)
        left = [
            i
            for i in there
            if i.manifest
            and i.run_id == request.run_id
            and within(i.manifest.sequence, request.abandoned or ())
        ]
        if any(i.status == "committed" and i not in left for i in there) and not request.overwrite:
            where = storage.at(name)
            what = f"{where} is a committed checkpoint; pass overwrite=True to replace it"
            raise CheckpointExists(what, path=where, step=step)
        return any(
            (i.status in ("elsewhere", "damaged") or i in left) and not i.pinned for i in there
        )

    def check() -> None:
        check_place(storage, name, step, saving.joined.run_id, True)

    agreed = look(comm, storage, choose, everyone=False, check=check)
    return max(agreed.sequence, saving.request.after_sequence) + 1, bool(agreed.chosen)


def mark_apart(comm: Communicator, storage: Storage, folder: str, attempt: str) -> None:
    """Make and mark the attempt of this node. Raises InvalidState where another node's mark is
    there already."""
    try:
        mark_attempt(storage, folder, attempt)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        raise InvalidState(
            f"{storage.url} on {node_name(comm.nodes, own_node(comm))} is the storage of another "
            "node too, and storage_mode is "
            "'node': pass storage_mode='shared' for storage that all nodes share, or a root of "
            "its own on every node",
            ranks=comm.nodes[own_node(comm)],
        ) from None


def check_seen(comm: Communicator, storage: Storage, folder: str, attempt: str) -> None:
    """Raise InvalidState where nodes are said to share the storage, and rank 0's attempt is not
    seen on this one."""
    node = own_node(comm)
    if node == 0 or comm.rank != comm.nodes[node][0]:
        return
    try:
        entries = storage.list(folder)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
    else:
        if storage.atomic_rename or attempt in attempts_among(entries):
            return
    raise InvalidState(
        f"{storage.url} on {node_name(comm.nodes, node)} is not the storage that rank 0 writes "
        "to, and storage_mode is "
        "'shared': pass storage_mode='node' where nodes do not share their disks, or a root that "
        "all nodes see",
        ranks=comm.nodes[node],
    )


def commit_apart(
    saving: Saving,
    comm: Communicator,
    folder: str,
    write: Callable[[], dict[str, Any]],
    manifests: Callable[[Sequence[dict[str, Any]]], list[bytes]],
) -> bytes:
    """Write and publish the parts of all nodes; this node's manifest. What one rank raises, all
    raise."""
    storage, attempt, tell = saving.storage, saving.joined.attempt, saving.told.append
    lowest = leads(comm, "node")
    encoded: list[bytes] = []
    aside: str | None = None
    placed = False

    def make_way() -> None:
        if lowest:
            saving.make_way(folder)

    def publish() -> None:
        nonlocal aside, placed
        if lowest:
            if storage.atomic_rename:
                storage.remove(join(folder, mark_name(attempt)))
            manifest = CheckpointManifest.decode(encoded[0], storage.at(folder))
            aside = put_in_place(
                storage, attempt, folder, saving.name, manifest, saving.overwrites, tell, encoded[0]
            )
            placed = True

    try:
        comm.together("place", make_way, _nothing)
        encoded.append(comm.together("write", write, manifests)[own_node(comm)])
        comm.together("publish", publish, _nothing)
    except BaseException as error:
        if lowest:
            # When a rank is lost, or this one is on its way out, the others were not waited for.
            early = isinstance(error, RankLost) or not isinstance(error, Exception)
            if not placed:
                discard(storage, attempt, folder, tell, others_write=early)
            elif (
                not early
            ):  # else nobody knows whether the others have published too: the next look tells
                take_back(storage, attempt, folder, saving.name, aside, tell)
        raise
    if aside is not None:
        remove_aside(storage, aside, tell)
    return encoded[0]


def _nothing(*_: Any) -> None:
    return None
