"""What each node keeps of one checkpoint, where nodes share no storage: all that its own ranks need
to go on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import CheckpointError
from ..format.layout import Box, BoxLayout, Layout, LogicalTensor, MeshLayout, WholeLayout, volume
from ..format.manifest import ReplicaGroup
from ..format.tensorfile import tensor_nbytes
from ..ranks.communicator import Communicator
from ..replicas.shard_table import ShardTable
from ..state.layout import LocalShard, TensorBytes, synchronize, torch_dtype
from ..state.tree import LeafSpec, StateSnapshot, TensorLeaf

WINDOW_BYTES = 4 << 20


def part_of(copy: ReplicaGroup, ranks: Sequence[int]) -> ReplicaGroup:
    """A copy as the node of `ranks` stores it: for those of its members that are there."""
    return replace(copy, members=[rank for rank in ranks if rank in copy.members])


def on_node(table: ShardTable, ranks: Sequence[int], *, spread: bool) -> ShardTable:
    """A sharded component as the node of `ranks` stores it: each distinct box that one of them
    holds, once.

    spread: of several holders, the one that has the least to write so far takes it, else the
    lowest. Pure.
    """
    load: defaultdict[int, int] = defaultdict(int)
    coordinates: dict[
        tuple[int, int], tuple[int, ...] | None
    ] = {}  # a rank's coordinates in a mesh, by the mesh's identity

    def box_of(
        shape: tuple[int, ...], claims: Sequence[tuple[list[int], Any]], rank: int
    ) -> Box | None:
        """What a rank holds of a tensor; None when that is nothing."""
        for members, layout in claims:
            if rank not in members:
                continue
            if not isinstance(layout, MeshLayout):
                return ((0,) * len(shape), shape) if layout is None else layout
            key = id(layout.mesh), rank
            if key not in coordinates:
                coordinates[key] = layout.mesh.coordinates(rank)
            at = coordinates[key]
            return None if at is None else layout.box_at(shape, at)
        return None

    def held(tensor: LogicalTensor, claims: Sequence[tuple[list[int], Any]]) -> Layout:
        holders: dict[Box, list[int]] = {}
        for rank in ranks:
            box = box_of(tensor.shape, claims, rank)
            if box is not None:
                holders.setdefault(box, []).append(rank)
        whole = (0,) * len(tensor.shape), tensor.shape
        writers: dict[Box, int] = {}
        for box in sorted(holders):
            if volume(box[1]) or box == whole:
                writers[box] = rank = (
                    min(holders[box], key=lambda r: (load[r], r)) if spread else holders[box][0]
                )
                load[rank] += tensor_nbytes(tensor.dtype, box[1])
        if whole in writers:
            return WholeLayout(writers[whole])
        return BoxLayout(tuple((rank, box) for box, rank in writers.items()))

    tensors = [
        replace(tensor, layout=None if tensor.layout is None else held(tensor, claims))
        for tensor, claims in zip(table.tensors, table.layouts, strict=True)
    ]
    return replace(table, tensors=tensors)


def pass_on(comm: Communicator, snapshots: Mapping[str, StateSnapshot]) -> dict[str, StateSnapshot]:
    """Rank 0's `snapshots`, on the lowest rank of every other node too, in host memory of its own.
    On every rank.

    Nothing on rank 0, which has it, and on ranks that do not write.
    """
    with comm.round("global state") as r:
        r.gather()
        if r.leads:
            r.verdict = _described(snapshots)
    rows = r.verdict
    keeps = comm.rank != 0 and comm.leads_node
    made = {key: _made(key, *row) for key, row in rows.items()} if keeps else {}
    state = snapshots if comm.rank == 0 else made
    synchronize(
        {t.tensor.device for part in state.values() for t in part.tensors} if comm.rank == 0 else ()
    )
    sizes = [
        (key, number, nbytes)
        for key, (_, _, tensors) in rows.items()
        for number, (*_, nbytes, alias) in enumerate(tensors)
        if alias is None
    ]

    failed: Exception | None = None
    try:
        for window in _windows(sizes):
            buffer = memoryview(bytearray(sum(length for *_, length in window)))
            if comm.rank == 0:
                _copy(state, window, buffer, out=True)
            comm.share(buffer, 0)
            if keeps:
                _copy(state, window, buffer, out=False)
    except CheckpointError:
        raise
    except Exception as error:  # of the transport: the round says on which ranks
        failed = error
    if sizes:
        with comm.round("global state is passed on"):
            if failed is not None:
                raise failed
    return made


def _described(snapshots: Mapping[str, StateSnapshot]) -> dict[str, Any]:
    return {
        key: [
            state.tree,
            state.versions,
            [
                [t.name, t.stored_name, t.dtype, list(t.shape), t.nbytes, t.alias_of]
                for t in (leaf.spec for leaf in state.tensors)
            ],
        ]
        for key, state in snapshots.items()
    }


def _made(
    key: str, tree: bytes, versions: bytes | None, rows: Sequence[Sequence[Any]]
) -> StateSnapshot:
    tensors: list[TensorLeaf] = []
    for name, stored_name, dtype, shape, _, alias in rows:
        tensor = torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
        size = tuple(shape)
        shard = LocalShard(tensor, size, ((0,) * len(size), size), None)
        tensors.append(TensorLeaf(LeafSpec.of(name, shard, stored_name, alias), tensor))
    return StateSnapshot(key, tree, tensors, versions)


def _windows(sizes: Sequence[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int, int]]]:
    """(component, tensor, first byte, bytes) of pieces that together are at most WINDOW_BYTES."""
    window: list[tuple[str, int, int, int]] = []
    left = WINDOW_BYTES
    for key, number, nbytes in sizes:
        start = 0
        while start < nbytes:
            length = min(left, nbytes - start)
            # Items are not cut in two: sizes of items are powers of two up to 16 bytes.
            length = length if length == nbytes - start else length // 16 * 16
            if length:
                window.append((key, number, start, length))
                start, left = start + length, left - length
            if not length or not left:
                yield window
                window, left = [], WINDOW_BYTES
    if window:
        yield window


def _copy(
    state: Mapping[str, StateSnapshot],
    window: Sequence[tuple[str, int, int, int]],
    buffer: memoryview,
    *,
    out: bool,
) -> None:
    at = 0
    for key, number, start, length in window:
        source = TensorBytes(state[key].tensors[number].tensor)
        part, memory = buffer[at : at + length], source.view(start, start + length)
        if not out:
            assert memory is not None  # it was made contiguous, in host memory
            memory[:] = part
        elif memory is not None:
            part[:] = memory
        else:
            source.fill(start, part)
        at += length
