"""Planning and metadata of sharded saves, simulated in one process: `python -m benchmarks plan`.

What one rank does at a save (merge the description of all ranks, choose writers, lay out its own
file) and what it must read at a load (manifest, table, its own index), for 2,500 DTensors cut over
all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ckptcore.format.digest import content_digest
from ckptcore.format.layout import Mesh, MeshLayout, decode_layouts, encode_layouts
from ckptcore.format.manifest import (
    CheckpointManifest,
    ComponentIndex,
    ComponentManifest,
    FileEntry,
    FileRecord,
    Index,
    StoredShard,
    chunk_count,
    index_file_name,
)
from ckptcore.format.values import TensorRef, encode
from ckptcore.replicas.shard_table import PlainValues, ShardTable, describe, table_of
from ckptcore.saving.plan import TensorSpec, plan_component
from ckptcore.saving.writer import FilePlan
from ckptcore.state.layout import LocalShard
from ckptcore.state.tree import LeafSpec, StateSnapshot, TensorLeaf

from .frame import Check, Report, Row

__all__ = ["example_metadata", "run"]

TENSORS = 2500
# Ranks -> seconds that planning on one rank may take, from the project's targets.
TARGETS = {8: None, 256: 0.3, 4096: 2.0}


def run(*, rounds: int = 5, progress: Callable[[str], None] = lambda _: None) -> Report:
    """Rows: planning and reading for 8, 256 and 4,096 ranks."""
    rows = []
    for ranks, bound in TARGETS.items():
        progress(f"{ranks} ranks")
        description, values = _description(ranks)
        planned = [
            _timed(lambda d=description, n=ranks: _plan(d, n, n // 2)) for _ in range(rounds)
        ]  # type: ignore[misc]
        row = _row(f"plan on one rank, {ranks:,} ranks", [seconds for seconds, _ in planned])
        if bound is not None:
            row.checks.append(Check("planning", bound, row.median, at_least=False, unit=" s"))
        rows.append(row)
        state, files = planned[0][1]
        parts = _metadata(state, values, files, ranks)
        # type: ignore[misc]
        read = [_timed(lambda p=parts, n=ranks: _read(p, n))[0] for _ in range(rounds)]
        row = _row(f"read what one rank needs, {ranks:,} ranks", read)
        needed = sum(len(data) for data in parts)
        stored = len(parts[0]) + len(parts[1]) + (ranks - 1) * len(parts[2])
        row.extra = {
            "bytes read": f"{needed / 1e6:.2f} MB",
            "all on disk": f"{stored / 1e6:.1f} MB",
        }
        if ranks == 4096:
            row.checks.append(
                Check("read by one rank", 2.0, needed / 1e6, at_least=False, unit=" MB")
            )
        rows.append(row)
    return Report(
        "plan",
        f"Planning and metadata, {TENSORS:,} DTensors cut over all ranks",
        rows,
        {"rounds": rounds, "tensors": TENSORS},
        [
            "simulated in one process; 'all on disk' takes every rank's index to be as large as "
            "the one that was made."
        ],
    )


def example_metadata(ranks: int) -> tuple[bytes, bytes, bytes]:
    """Manifest, rank 0's index and another one of a job that saved TENSORS tensors, each cut over
    all ranks. The first two agree about the files of rank 0."""
    description, values = _description(ranks)
    state, files = _plan(description, ranks, 0)
    encoded, first, other = _metadata(state, values, files, ranks)
    manifest = CheckpointManifest.decode(encoded)
    for name, record in manifest.files.items():
        if name == index_file_name(record.writer):
            data = first if record.writer == 0 else other
            manifest.files[name] = FileRecord(len(data), content_digest(data), record.writer)
    index = Index.decode(first)
    for name, digest in index.file_digests().items():
        manifest.files[name] = FileRecord(index.files[name].size, digest, 0)
    return manifest.encode(), first, other


def _row(name: str, seconds: list[float]) -> Row:
    return Row(
        name, statistics.median(seconds), min(seconds), max(seconds), kind="ours", rounds=seconds
    )


def _timed(call: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def _names() -> list[str]:
    return sorted(f"layers.{n // 8}.block.{n % 8}.weight" for n in range(TENSORS))


def _description(ranks: int) -> tuple[bytes, PlainValues]:
    """What every rank of an FSDP job says of its state: the same on all of them."""
    names = _names()
    tree = encode(
        {name: object() for name in names},
        lambda path, _: TensorRef(names.index(path[0])) if path else None,
    )
    layout = MeshLayout(Mesh((ranks,), tuple(range(ranks))), ("S0",))
    empty = torch.empty(0)
    part = LocalShard(empty, (4096, 1024), ((0, 0), (0, 1024)), layout)
    leaves = [TensorLeaf(LeafSpec.of(name, part)._replace(dtype="BF16"), empty) for name in names]
    return describe(StateSnapshot("model", tree, leaves)).structure, PlainValues(tree)


def _plan(structure: bytes, ranks: int, rank: int) -> tuple[ShardTable, list[FilePlan]]:
    """As at the first save of a run."""
    state = table_of("model", [structure], [list(range(ranks))])
    specs = []
    for number, tensor in enumerate(state.tensors):
        box = tensor.layout.box_of(tensor.shape, rank) if tensor.layout is not None else None
        if box is not None:
            specs.append(
                TensorSpec(number, tensor.name, tensor.dtype, box[1], 2 * box[1][0] * box[1][1])
            )
    return state, plan_component("model", specs, [rank], f".rank{rank:05d}")


def _metadata(
    state: ShardTable, values: PlainValues, files: list[FilePlan], ranks: int
) -> tuple[bytes, bytes, bytes]:
    """Manifest, rank 0's index (with the table) and another rank's index, as they would be
    stored."""
    pieces = [
        StoredShard(n, plan.name, place.start, bytes(8 * chunk_count(place.nbytes)))
        for plan in files
        for n, place in plan.contents
    ]
    entries = {plan.name: FileEntry(plan.size, len(plan.header), bytes(16)) for plan in files}
    first = Index(
        0,
        entries,
        {"model": ComponentIndex(values.tree, [], encode_layouts(state.tensors), pieces)},
    )
    other = Index(1, entries, {"model": ComponentIndex(None, [], None, pieces)})
    manifest = CheckpointManifest(
        "0" * 32, 1, "run", "attempt", 1, "2026-01-01T00:00:00.000Z", ranks, [list(range(ranks))]
    )
    for rank in range(ranks):
        manifest.files[index_file_name(rank)] = FileRecord(123456, "0" * 32, rank)
        manifest.files[f"model.rank{rank:05d}.safetensors"] = FileRecord(12345678, "0" * 32, rank)
    names = [f"model.rank{rank:05d}.safetensors" for rank in range(ranks)]
    manifest.components["model"] = ComponentManifest(
        "model", "SHARDED", list(range(ranks)), files=names
    )
    return manifest.encode(), first.encode(), other.encode()


def _read(parts: tuple[bytes, bytes, bytes], ranks: int) -> None:
    CheckpointManifest.decode(parts[0])
    for data in parts[1:]:
        index = Index.decode(data)
        index.file_digests()
        if index.components["model"].layouts is not None:
            decode_layouts(index.components["model"].layouts, ranks)
