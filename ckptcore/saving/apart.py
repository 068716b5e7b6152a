"""Committing on nodes that share no storage: each publishes its part, and all of them do or none.

The lowest rank of a node makes the attempt there, publishes and cleans up. Everything is on the
disks of all nodes before the first one publishes. A crash between two of them leaves a checkpoint
on some nodes, which is none (nodes/agreement.py); a failure without a crash is taken back. What an
overwrite puts aside stays until all nodes have published.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..catalog.branches import within
from ..catalog.folder import CheckpointInfo
from ..catalog.transaction import Transaction, check_place
from ..errors import CheckpointExists, InvalidState, RankLost, StorageError
from ..format.manifest import CheckpointManifest
from ..nodes.agreement import NodeLocalRoots
from ..ranks.communicator import Communicator
from ..ranks.groups import leads_node, node_name, own_node

if TYPE_CHECKING:
    from .flow import Saving

__all__ = ["agree_place", "begin_on_node", "check_seen", "commit_apart"]


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
            (i.status in ("incomplete", "damaged") or i in left) and not i.pinned for i in there
        )

    with NodeLocalRoots(comm, saving.catalog).scan("place", recall=True) as r:
        if leads_node(comm):
            check_place(storage, name, step, saving.joined.run_id, True)
        r.gather()
        if r.leads:
            sequence = max(r.sequence, saving.request.after_sequence) + 1
            r.verdict = [sequence, choose(r.infos)]
    sequence, gives_way = r.verdict
    return sequence, gives_way


def begin_on_node(comm: Communicator, transaction: Transaction) -> None:
    """Begin the attempt of this node. Raises InvalidState where another node's mark is there
    already."""
    try:
        transaction.begin()
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        where = f"{transaction.storage.url} on {node_name(comm.nodes, own_node(comm))}"
        raise InvalidState(
            f"{where} is the storage of another node too, and storage_mode is "
            "'node': pass storage_mode='shared' for storage that all nodes share, or a root of "
            "its own on every node",
            ranks=comm.nodes[own_node(comm)],
        ) from None


def check_seen(comm: Communicator, transaction: Transaction) -> None:
    """Raise InvalidState where nodes are said to share the storage, and rank 0's attempt is not
    seen on this one."""
    node = own_node(comm)
    if node == 0 or comm.rank != comm.nodes[node][0]:
        return
    if transaction.is_here():
        return
    where = f"{transaction.storage.url} on {node_name(comm.nodes, node)}"
    raise InvalidState(
        f"{where} is not the storage that rank 0 writes to, and storage_mode is "
        "'shared': pass storage_mode='node' where nodes do not share their disks, or a root that "
        "all nodes see",
        ranks=comm.nodes[node],
    )


def commit_apart(
    saving: Saving,
    comm: Communicator,
    transaction: Transaction,
    write: Callable[[], dict[str, Any]],
    manifests: Callable[[Sequence[dict[str, Any]]], list[bytes]],
) -> bytes:
    """Write and publish the parts of all nodes; this node's manifest. What one rank raises, all
    raise."""
    lowest = leads_node(comm)
    encoded: list[bytes] = []
    placed = False

    def begin() -> None:
        if lowest:
            with saving.needing():
                begin_on_node(comm, transaction)

    def publish() -> None:
        nonlocal placed
        if lowest:
            manifest = CheckpointManifest.decode(encoded[0], saving.storage.at(transaction.folder))
            transaction.commit(manifest, encoded[0])
            placed = True

    try:
        comm.together("place", begin, _nothing)
        encoded.append(comm.together("write", write, manifests)[own_node(comm)])
        comm.together("publish", publish, _nothing)
    except BaseException as error:
        if lowest:
            # When a rank is lost, or this one is on its way out, the others were not waited for.
            early = isinstance(error, RankLost) or not isinstance(error, Exception)
            if not placed:
                transaction.abort(others_write=early)
            elif (
                not early
            ):  # else nobody knows whether the others have published too: the next look tells
                transaction.take_back()
        raise
    transaction.remove_replaced()
    return encoded[0]


def _nothing(*_: Any) -> None:
    return None
