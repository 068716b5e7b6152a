"""What the part of one node does not have of a checkpoint, where nodes share no storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import StateMismatch
from ..format.layout import Box, LogicalTensor, intersection, volume
from ..format.manifest import CheckpointManifest

__all__ = ["cuts_here", "not_here"]


def not_here(
    url: str, manifest: CheckpointManifest, what: str, saved_by: Sequence[int] = ()
) -> StateMismatch:
    """The error for something that only the storage of other nodes has. saved_by: the ranks that
    had it."""
    here = ", ".join(map(str, manifest.here[:8])) + (", ..." if len(manifest.here) > 8 else "")
    others = [
        str(node)
        for node, ranks in enumerate(manifest.nodes)
        if not set(ranks).isdisjoint(saved_by)
    ]
    where = f", but on node {', '.join(others[:8])}" if others else ""
    return StateMismatch(
        f"{url}: {what} is not on this node, whose storage has the part that node {manifest.node} "
        f"of {len(manifest.nodes)} "
        f"(ranks {here}) saved{where}. With storage_mode='node' every rank restores from its own "
        "node alone: start as many ranks "
        "on each node as at the save, on the same nodes (or copy each node's folder to the node "
        "that takes its place); to change "
        "the layout, save with storage_mode='shared' where all nodes see the files",
        path=url,
    )


def cuts_here(
    url: str, manifest: CheckpointManifest, key: str, tensor: LogicalTensor, box: Box
) -> Iterator[tuple[int, Box]]:
    """(writer, its box) for what is stored of `box` of a tensor that has a layout. Raises
    StateMismatch when some of it is on other nodes."""
    assert tensor.layout is not None
    if manifest.node is None:
        yield from tensor.layout.cuts(tensor.shape, box)
        return
    found = list(tensor.layout.cuts(tensor.shape, box))
    common = (intersection(held, box) for _, held in found)
    if sum(volume(part[1]) for part in common if part is not None) != volume(box[1]):
        raise not_here(
            url,
            manifest,
            f"component {key!r}: all of the part at {list(box[0])} of shape {list(box[1])} of "
            f"tensor {tensor.name!r}",
        )
    yield from found
