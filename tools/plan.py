"""`ckpt plan`: what a restore on another number of ranks would read, and what it would refuse."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import click

from ckptcore import CheckpointView, StoredBox

from .cli import command
from .facts import head
from .failures import BAD, GOOD
from .lookup import Found, on_path, opened, warning_of
from .render import Block, Cell, Line, Report, count, size, table

CHUNK = 4 << 20  # bytes that are verified, and so read, together
WORK = 400_000  # tensors times ranks beyond which some ranks stand for all
SAMPLES = 16
ON_RESIZE = 'on_resize="keep", or a function from the new rank to an old one'


class Load(NamedTuple):
    """What one rank reads."""

    nbytes: int = 0
    reads: int = 0

    def plus(self, nbytes: int, reads: int) -> Load:
        return Load(self.nbytes + nbytes, self.reads + reads)


@command("ckpt plan runs/a --world-size 16", "ckpt plan runs/a --world-size 1 --layout whole")
@on_path
@click.option("--world-size", type=click.IntRange(1), required=True, help="Ranks to restore on.")
@click.option(
    "--layout",
    type=click.Choice(["same", "whole"]),
    default="same",
    help="Sharded tensors are cut as they are in the checkpoint (default), or wanted whole.",
)
def plan_command(found: Found, world_size: int, layout: str) -> Report:
    """What a restore of PATH on another number of ranks would read, at most, and which components
    it would refuse."""
    subject = opened(found)
    with subject.readable() as view:
        manifest = view.manifest
        ranks = chosen_ranks(world_size, sum(c.tensors for c in manifest.components.values()))
        loads = dict.fromkeys(ranks, Load())
        rows: list[dict[str, Any]] = []
        for key, component in manifest.components.items():
            verdict, why = verdict_on(view, key, world_size)
            mine = component_loads(view, key, ranks, world_size, layout, verdict)
            for rank, load in mine.items():
                loads[rank] = loads[rank].plus(*load)
            rows.append(
                {
                    "key": key,
                    "pattern": str(component.pattern),
                    "restores": verdict,
                    "why": why,
                    "stored_bytes": component.size_bytes,
                    "most_bytes": max(load.nbytes for load in mine.values()),
                    "most_reads": max(load.reads for load in mine.values()),
                }
            )
        document = {
            "checkpoint": head(subject.info),
            "saved_world_size": manifest.world_size,
            "world_size": world_size,
            "layout": layout,
            "sampled": len(ranks) < world_size,
            "components": rows,
            "ranks": [
                {"rank": rank, "size_bytes": load.nbytes, "reads": load.reads}
                for rank, load in loads.items()
            ],
        }
    refused = [row["key"] for row in rows if row["restores"] == "no"]
    complaint = warning_of(found, subject)
    if refused:
        complaint = f"{', '.join(refused)} would not restore"
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


def component_loads(
    view: CheckpointView, key: str, ranks: Sequence[int], world_size: int, layout: str, verdict: str
) -> dict[int, Load]:
    """By rank. Where a rank's own copy is not known, the largest stands for it."""
    if verdict == "no":
        return dict.fromkeys(ranks, Load())
    manifest = view.manifest
    if str(manifest.components[key].pattern) == "SHARDED":
        boxes = [held for held in view.boxes(key).values() if held]
        return {rank: _sharded(boxes, rank, world_size, layout) for rank in ranks}
    loads = []
    copies = manifest.copies(key)
    for number in range(len(copies)):
        distinct = {(b.file, b.start): b for held in view.boxes(key, number).values() for b in held}
        loads.append(Load(sum(box.nbytes for box in distinct.values()), len(distinct)))
    if world_size != manifest.world_size:
        return dict.fromkeys(ranks, max(loads))
    owner = {rank: number for number, copy in enumerate(copies) for rank in copy.members}
    return {rank: loads[owner.get(rank, 0)] for rank in ranks}


def _sharded(boxes: list[list[StoredBox]], rank: int, world_size: int, layout: str) -> Load:
    load = Load()
    for held in boxes:
        dims = range(len(held[0].shape))
        along = next((d for d in dims if len({box.offset[d] for box in held}) > 1), None)
        for box in held:
            if along is None or layout == "whole":
                load = load.plus(box.nbytes, 1)
                continue
            length = max(each.offset[along] + each.shape[along] for each in held)
            step = -(-length // world_size)
            low, high = min(rank * step, length), min((rank + 1) * step, length)
            first = max(low - box.offset[along], 0)
            last = min(high - box.offset[along], box.shape[along])
            if last > first and box.nbytes:
                load = load.plus(_span(box, along, first, last), 1)
    return load


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
    saved, wanted = document["saved_world_size"], document["world_size"]
    head = f"{document['checkpoint']['name']}, saved on {count(saved, 'rank')}, on {wanted}"
    loads = [row["size_bytes"] for row in document["ranks"]]
    of = f"{len(loads)} of {wanted} ranks" if document["sampled"] else count(wanted, "rank")
    total = f"{of}: {size(min(loads))} to {size(max(loads))} each, {size(sum(loads))} together"
    columns = "component!=key, pattern, restores, stored>=stored_bytes, a rank reads>=most_bytes, "
    columns += "in reads>=most_reads, why"
    return [Line(head), table("", columns, rows), Line(total)]
