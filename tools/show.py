"""`ckpt show`: one tensor or one value of a checkpoint, whole; with --stats what its numbers
are like."""

from __future__ import annotations

from difflib import get_close_matches
from json import dumps
from typing import Any

import click

from ckptcore import CheckpointView, TensorInfo

from . import facts, render
from .arrays import first, statistics
from .cli import ITEM, LOCATION, command
from .copies import StoredCopy, Which, choose_copy, stored_copies
from .failures import not_found
from .lookup import opened, settled
from .render import Block, Cell, Facts, Line, Report, size, table
from .subject import Options, Subject

BOXES = 20  # rows for people; all are in the JSON
WIDTH = 40  # of a bar of the histogram


@command("ckpt show runs/a model/layers.0.weight --stats", "ckpt show runs/a rng/torch --rank 3")
@click.argument("path", type=LOCATION)
@click.argument("name")
@click.option("--rank", type=ITEM, metavar="N", help="That which rank N restores.")
@click.option("--group", metavar="G", help="Of a PER_GROUP component: a group's number or key.")
@click.option("--node", type=ITEM, metavar="N", help="Of a PER_NODE component.")
@click.option("--stats", is_flag=True, help="Read all of it: range, mean, NaN, a histogram.")
@click.option(
    "--first",
    "count",
    type=click.IntRange(0, 10_000),
    default=8,
    help="How many of its numbers are shown (default 8).",
)
def show_command(
    path: str,
    name: str,
    rank: int | None,
    group: str | None,
    node: int | None,
    stats: bool,
    count: int,
    options: Options,
) -> Report:
    """Show the tensor or the value NAME of the checkpoint PATH, whole: NAME is COMPONENT,
    COMPONENT/TENSOR or COMPONENT/path/of/a/value.

    Where each rank, group or node has its own, the first, unless --rank, --group or --node choose.
    Of a tensor: dtype, shape, how it is cut over ranks, who wrote which part, and its first
    numbers. Memory is bounded, whatever its size.
    """
    which = Which(rank, group, node)
    return settled(
        path, options, lambda found: shown(opened(found, options), name, which, stats, count)
    )


def shown(subject: Subject, name: str, which: Which, stats: bool, count: int) -> Report:
    with subject.readable() as view:
        key, copy, path = place_of(view, name, which)
        item = find(view.values(key, copy.number), path)
        if item is MISSING:
            raise _unknown(view, key, copy, name)
        tensor = item.payload if facts.is_opaque(item) else item
        found = (
            described(view, key, copy, tensor, stats, count) if facts.is_tensor(tensor) else None
        )
        document = {
            "checkpoint": subject.head(),
            "name": name,
            "component": key,
            "of": copy.document(),
            "tensor": found,
            "value": None if found else facts.value(item),
        }
    return Report(document, describe(document, copy, item))


MISSING = object()


def place_of(view: CheckpointView, name: str, which: Which) -> tuple[str, StoredCopy, str]:
    """The component that a name begins with, whose copy of it, and the path inside it. A name with
    the label of a copy ("rng.rank00001/torch") says that itself."""
    for key in sorted(view.manifest.components, key=len, reverse=True):
        if name == key or name.startswith(f"{key}/"):
            return key, choose_copy(view, key, which), name[len(key) + 1 :]
        for number, copy in enumerate(view.manifest.copies(key)):
            label = key + copy.label
            if copy.label and (name == label or name.startswith(f"{label}/")):
                held = {each.number: each for each in stored_copies(view.manifest, key)}
                if number in held:
                    return key, held[number], name[len(label) + 1 :]
    known = ", ".join(view.manifest.components) or "none"
    raise not_found(
        f"{name!r} begins with no component of {view.url}: it has {known}", path=view.url, name=name
    )


def find(value: Any, path: str) -> Any:
    """What lies at a path of nested values: names as they are, or as `ckpt inspect` writes them;
    MISSING where nothing does."""
    if not path:
        return value
    children: Any = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    for key, child in children:
        for text in (facts.escaped(key), str(key)):
            if path == text or path.startswith(f"{text}/"):
                found = find(child, path[len(text) + 1 :])
                if found is not MISSING:
                    return found
    return MISSING


def _unknown(view: CheckpointView, key: str, copy: StoredCopy, name: str) -> Exception:
    names = [f"{key}/{path}" for path, _ in facts.leaf_items(view.values(key, copy.number))]
    near = get_close_matches(name, names, 3) if len(names) <= 5000 else []
    hint = f": did you mean {' or '.join(near)}?" if near else ""
    return not_found(f"nothing in {view.url} is called {name!r}{hint}", path=view.url, name=name)


def described(
    view: CheckpointView, key: str, copy: StoredCopy, info: TensorInfo, stats: bool, count: int
) -> dict[str, Any]:
    boxes = view.boxes(key, copy.number)[info.name]
    small = info.nbytes > 0
    return facts.tensor(info) | {
        "boxes": [
            facts.fields(box, "file start writer")
            | {"offset": [*box.offset], "shape": [*box.shape], "size_bytes": box.nbytes}
            for box in boxes
        ],
        "first": [facts.value(item) for item in first(view, info, count)] if small else [],
        "statistics": statistics(view, info) if stats and small else None,
    }


# ---------------------------------------------------------------- for people


def describe(document: dict[str, Any], copy: StoredCopy, item: Any) -> list[Block]:
    tensor, at = document["tensor"], document["checkpoint"]
    title = f"{document['name']}  of {at['name']}"
    if copy.total > 1:
        title += f", {copy.title('').removeprefix('values of  ')}"
    if tensor is None:
        if isinstance(item, (dict, list, tuple)) and item:
            pairs: list[tuple[str, Cell | str]] = list(facts.leaves(item))
            return [Facts(Cell(title, "bold"), pairs)]
        text = dumps(render.strict(document["value"]), ensure_ascii=False, indent=2)
        return [Facts(Cell(title, "bold"), []), *(Line(f"  {line}") for line in text.splitlines())]
    pairs = [
        ("dtype", tensor["dtype"]),
        ("shape", "x".join(map(str, tensor["shape"])) or "scalar"),
        ("size", size(tensor["size_bytes"])),
    ]
    if tensor["alias_of"]:
        pairs.append(("same as", tensor["alias_of"]))
    if tensor["layout"]:
        pairs.append(("layout", tensor["layout"]))
    if len(tensor["boxes"]) == 1:
        pairs.append(("file", tensor["boxes"][0]["file"]))
    found = tensor["statistics"]
    if found:
        for name in ("min", "max", "mean", "std"):
            pairs.append((name, "-" if found[name] is None else f"{found[name]:.6g}"))
        odd = [f"{found[name]} {name}" for name in ("nan", "infinite", "zero") if found[name]]
        bad = found["nan"] or found["infinite"]
        pairs.append(("items", Cell(", ".join([f"{found['items']}", *odd]), "red" if bad else "")))
    first_ones = " ".join(render.number(value) for value in tensor["first"])
    pairs.append(("first", first_ones or "-"))
    blocks: list[Block] = [Facts(Cell(title, "bold"), pairs)]
    if found and found["histogram"]:
        blocks += bars(found)
    if len(tensor["boxes"]) > 1:
        blocks += box_table(tensor["boxes"])
    return blocks


def bars(found: dict[str, Any]) -> list[Block]:
    """The histogram: a line for each bin."""
    counts, low, high = found["histogram"], found["min"], found["max"]
    step, most = (high - low) / len(counts), max(counts)
    lines: list[Block] = [Line("histogram")]
    for number, items in enumerate(counts):
        bar = "#" * max(round(items / most * WIDTH), 1 if items else 0)
        lines.append(Line(f"  {low + number * step:>12.5g}  {bar:{WIDTH}}  {items}".rstrip()))
    return lines


def box_table(boxes: list[dict[str, Any]]) -> list[Block]:
    rows = [
        [
            ",".join(map(str, box["offset"])),
            "x".join(map(str, box["shape"])),
            size(box["size_bytes"]),
            str(box["writer"]),
            box["file"],
        ]
        for box in boxes[:BOXES]
    ]
    more = len(boxes) - BOXES
    rest: list[Block] = [Line(f"  ... and {more} more: --json has all")] if more > 0 else []
    return [table("boxes", "offset, shape, size>, rank>, file", rows), *rest]
