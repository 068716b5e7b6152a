"""`ckpt plan`: what a restore on another number of ranks would read, and what it would refuse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from ckptcore import CheckpointView, StoredBox

from .cli import choice, command, number
from .facts import head
from .failures import BAD, GOOD
from .lookup import Subject, on_checkpoint
from .render import Block, Cell, Line, Report, count, size, table

CHUNK = 4 << 20  # bytes that are verified, and so read, together
WORK = 400_000  # tensors times ranks beyond which some ranks stand for all
SAMPLES = 16
ON_RESIZE = 'on_resize="keep", or a function from the new rank to an old one'

Reads = list[int]  # bytes of each


@command("ckpt plan runs/a --world-size 16", "ckpt plan runs/a --world-size 1 --layout whole")
@on_checkpoint
@number("--world-size", 1, "Ranks to restore on.", required=True)
@choice("--layout", ["same", "whole"], "Sharded tensors are cut as they were (default), or whole.")
def plan_command(subject: Subject, world_size: int, layout: str) -> Report:
    """What a restore of PATH on another number of ranks would read, at most, and which components
    it would refuse."""
    view = subject.readable()
    manifest = view.manifest
    ranks = chosen_ranks(world_size, sum(c.tensors for c in manifest.components.values()))
    loads = [{"rank": rank, "size_bytes": 0, "reads": 0} for rank in ranks]
    rows: list[dict[str, Any]] = []
    for key, component in manifest.components.items():
        verdict, why = verdict_on(view, key, world_size)
        mine = [[]] if verdict == "no" else reads_of(view, key, ranks, world_size, layout)
        for at, load in enumerate(loads):
            reads = mine[at % len(mine)]
            load["size_bytes"] += sum(reads)
            load["reads"] += len(reads)
        row: dict[str, Any] = {"key": key}
        row |= {"pattern": str(component.pattern), "restores": verdict, "why": why}
        row |= {"stored_bytes": component.size_bytes, "most_bytes": max(map(sum, mine))}
        rows.append(row | {"most_reads": max(map(len, mine))})
    document = {
        "checkpoint": head(subject.info),
        "saved_world_size": manifest.world_size,
        "world_size": world_size,
        "layout": layout,
        "sampled": len(ranks) < world_size,
        "components": rows,
        "ranks": loads,
    }
    refused = ", ".join(row["key"] for row in rows if row["restores"] == "no")
    complaint = f"{refused} would not restore" if refused else None
    return Report(document, describe(document), BAD if refused else GOOD, complaint)


def chosen_ranks(world_size: int, tensors: int) -> list[int]:
    if world_size * max(tensors, 1) <= WORK or world_size <= SAMPLES:
        return list(range(world_size))
    return sorted({round(n * (world_size - 1) / (SAMPLES - 1)) for n in range(SAMPLES)})


def verdict_on(view: CheckpointView, key: str, world_size: int) -> tuple[str, str]:
    """Whether a component restores on so many ranks: "yes", "no", or "depends", and why."""
    manifest = view.manifest
    component = manifest.components[key]
    pattern, saved = str(component.pattern), manifest.world_size
    if pattern in ("GLOBAL", "REPLICATED"):
        return "yes", "every rank reads all of it"
    if pattern == "SHARDED":
        return "yes", "each rank reads what it holds"
    if world_size == saved and pattern != "PER_NODE":
        return "yes", "each rank reads its own"
    if pattern == "PER_RANK":
        return "no", f"saved for {saved} ranks: it needs {ON_RESIZE}"
    if pattern == "PER_GROUP":
        there = count(len(component.partition or []), "group")
        keys = " or the same group keys" if component.group_keys else ""
        return "depends", f"restores where {component.group!r} has {there}{keys}"
    return "depends", f"restores on {count(len(manifest.nodes), 'node')}, else it needs {ON_RESIZE}"


def reads_of(
    view: CheckpointView, key: str, ranks: Sequence[int], world_size: int, layout: str
) -> list[Reads]:
    """Of each rank, or of all of them: where a rank's own copy is not known, the largest."""
    manifest = view.manifest
    if str(manifest.components[key].pattern) == "SHARDED":
        boxes = [held for held in view.boxes(key).values() if held]
        if layout == "whole":
            return [[box.nbytes for held in boxes for box in held]]
        return [
            [nbytes for held in boxes for nbytes in _of_rank(held, rank, world_size)]
            for rank in ranks
        ]
    copies = []
    for n in range(len(manifest.copies(key))):
        distinct = {(b.file, b.start): b for held in view.boxes(key, n).values() for b in held}
        copies.append([box.nbytes for box in distinct.values()])
    if world_size != manifest.world_size:
        return [max(copies, key=sum)]
    of = {rank: n for n, copy in enumerate(manifest.copies(key)) for rank in copy.members}
    return [copies[of.get(rank, 0)] for rank in ranks]


def _of_rank(boxes: Sequence[StoredBox], rank: int, world_size: int) -> Iterable[int]:
    """Bytes that a rank reads of each box of a tensor that is cut evenly along the dimension that
    it was cut along."""
    dims = range(len(boxes[0].shape))
    along = next((d for d in dims if len({box.offset[d] for box in boxes}) > 1), None)
    if along is None:
        yield from (box.nbytes for box in boxes)
        return
    length = max(box.offset[along] + box.shape[along] for box in boxes)
    step = -(-length // world_size)
    low, high = min(rank * step, length), min((rank + 1) * step, length)
    for box in boxes:
        first = max(low - box.offset[along], 0)
        last = min(high - box.offset[along], box.shape[along])
        if last > first and box.nbytes:
            yield _span(box, along, first, last)


def _span(box: StoredBox, along: int, first: int, last: int) -> int:
    """Bytes of the chunks between the first and the last item that are wanted."""
    itemsize = box.nbytes // prod(box.shape)
    inner = prod(box.shape[along + 1 :])
    rows = prod(box.shape[:along])
    start = first * inner * itemsize
    end = ((rows - 1) * box.shape[along] * inner + last * inner) * itemsize
    return min(-(-end // CHUNK) * CHUNK, box.nbytes) - start // CHUNK * CHUNK


def describe(document: dict[str, Any]) -> list[Block]:
    styles = {"yes": "green", "no": "bold red", "depends": "yellow"}
    rows = [
        row | {"restores": Cell(row["restores"], styles[row["restores"]])}
        for row in document["components"]
    ]
    saved, wanted = (count(document[k], "rank") for k in ("saved_world_size", "world_size"))
    loads = [row["size_bytes"] for row in document["ranks"]]
    least, most = size(min(loads)), size(max(loads))
    each = most if least == most else f"{least} to {most}"
    of = f"{len(loads)} of {wanted}" if document["sampled"] else wanted
    columns = "component!=key, pattern, restores, stored>=stored_bytes, a rank reads>=most_bytes, "
    columns += "in reads>=most_reads, why"
    return [
        Line(f"{document['checkpoint']['name']}: saved by {saved}, restored on {wanted}"),
        table("", columns, rows),
        Line(f"{of}: {each} each, {size(sum(loads))} together"),
    ]
