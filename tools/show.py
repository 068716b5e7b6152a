"""`ckpt show`: one tensor or one value of a checkpoint, whole; with --stats what its numbers
are like."""

from __future__ import annotations

from difflib import get_close_matches
from json import dumps
from typing import Any

import click

from ckptcore import CheckpointView, TensorInfo

from . import arrays, facts, render
from .cli import command, flag, number
from .copies import StoredCopy, Which, choose_copy, stored_copies, which_options
from .failures import not_found
from .lookup import Subject, on_checkpoint
from .render import Block, Cell, Facts, Line, Report, first_rows, pairs_of

WIDTH = 40  # of a bar of the histogram
LETTERS = 2000  # of one value that people get


@command("ckpt show runs/a model/layers.0.weight --stats", "ckpt show runs/a rng/torch --rank 3")
@on_checkpoint
@click.argument("name")
@which_options
@flag("--stats", "Read all of it: range, mean, NaN, a histogram.")
@number("--first", 0, "How many of its numbers are shown.", 10_000, default=8)
def show_command(subject: Subject, name: str, which: Which, stats: bool, first: int) -> Report:
    """Show the tensor or the value NAME of the checkpoint PATH, whole: NAME is COMPONENT,
    COMPONENT/TENSOR or COMPONENT/path/of/a/value.

    Where each rank, group or node has its own, the first, unless --rank, --group or --node choose.
    Of a tensor: dtype, shape, how it is cut over ranks, who wrote which part, and its first
    numbers. Memory is bounded, whatever its size.
    """
    view = subject.readable()
    key, copy, path = coordinates(view, name, which)
    item = find(view.values(key, copy.number), path)
    if item is MISSING:
        raise _unknown(view, key, copy, name)
    item = text_in(view, item)
    tensor = facts.tensor_in(item)
    document: dict[str, Any] = {
        "checkpoint": facts.head(subject.info),
        "name": name,
        "component": key,
        "of": copy.document(),
        "tensor": described(view, key, copy, tensor, stats, first) if tensor else None,
        "value": None if tensor else facts.value(item),
    }
    title = f"{name}  of {subject.name}"
    title += f",{copy.title()}" if copy.total > 1 else ""
    if tensor:
        return Report(document, tensor_blocks(title, document["tensor"]))
    leaves = list(facts.leaves(item))
    if len(leaves) > 1 or leaves[0][0]:
        pairs = [(path, facts.text(leaf)) for path, leaf in leaves]
        return Report(document, [Facts(Cell(title, "bold"), pairs)])
    text = dumps(render.strict(document["value"]), ensure_ascii=False)
    rest = f" ({len(text)} letters: --json has all)" if len(text) > LETTERS else ""
    line = Line(f"  {facts.shortened(text, LETTERS)}{rest}")
    return Report(document, [Facts(Cell(title, "bold"), []), line])


MISSING = object()


def text_in(view: CheckpointView, item: Any) -> Any:
    """A text that was so long that it is stored as a tensor, as text; all else as it is."""
    held = facts.tensor_in(item)
    if held is None or held is item or item.codec != "str":
        return item
    return b"".join(array.tobytes() for _, array in view.portions(held.full_name)).decode()


def coordinates(view: CheckpointView, name: str, which: Which) -> tuple[str, StoredCopy, str]:
    """The component that a name begins with, whose copy of it, and the path inside it. A name with
    the label of a copy ("rng.rank00001/torch") says that itself."""
    manifest = view.manifest
    for key in sorted(manifest.components, key=len, reverse=True):
        if name == key or name.startswith(f"{key}/"):
            return key, choose_copy(view, key, which), name[len(key) + 1 :]
        labels = [key + copy.label for copy in manifest.copies(key) if copy.label]
        if not labels or not name.startswith(f"{key}."):
            continue
        for copy in stored_copies(manifest, key):
            label = key + manifest.copies(key)[copy.number].label
            if name == label or name.startswith(f"{label}/"):
                return key, copy, name[len(label) + 1 :]
    known = ", ".join(manifest.components) or "none"
    what = f"{name!r} begins with no component of {view.url}: it has {known}"
    raise not_found(what, path=view.url, name=name)


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
    names = [f"{key}/{path}" for path, _ in facts.leaves(view.values(key, copy.number))]
    near = get_close_matches(name, names, 3) if len(names) <= 5000 else []
    hint = f": did you mean {' or '.join(near)}?" if near else ""
    return not_found(f"nothing in {view.url} is called {name!r}{hint}", path=view.url, name=name)


def described(
    view: CheckpointView, key: str, copy: StoredCopy, info: TensorInfo, stats: bool, count: int
) -> dict[str, Any]:
    boxes = view.boxes(key, copy.number)[info.name]
    filled = info.nbytes > 0
    return facts.tensor(info) | {
        "boxes": [
            facts.fields(box, "file start writer")
            | {"offset": [*box.offset], "shape": [*box.shape], "size_bytes": box.nbytes}
            for box in boxes
        ],
        "first": [facts.value(item) for item in arrays.first(view, info, count)] if filled else [],
        "statistics": arrays.statistics(view, info) if stats and filled else None,
    }


def tensor_blocks(title: str, tensor: dict[str, Any]) -> list[Block]:
    boxes, found = tensor["boxes"], tensor["statistics"]
    one = boxes[0]["file"] if len(boxes) == 1 else None
    names = "dtype, shape, size=size_bytes, same as=alias_of, layout, file"
    pairs = pairs_of(tensor | {"file": one}, names)
    if found:
        odd = [f"{found[name]} {name}" for name in ("nan", "infinite", "zero") if found[name]]
        style = "red" if found["nan"] or found["infinite"] else ""
        items = Cell(", ".join([f"{found['items']}", *odd]), style)
        pairs += pairs_of(found | {"items": items}, "min, max, mean, std, items")
    pairs.append(("first", " ".join(map(render.number, tensor["first"])) or "-"))
    blocks: list[Block] = [Facts(Cell(title, "bold"), pairs)]
    if found and found["histogram"]:
        blocks += bars(found)
    rows = [box | {"offset": ",".join(map(str, box["offset"]))} for box in boxes]
    columns = "offset, shape, size>=size_bytes, rank>=writer, file"
    return blocks + (first_rows("boxes", columns, rows, "show") if len(rows) > 1 else [])


def bars(found: dict[str, Any]) -> list[Block]:
    """The histogram: a line for each bin."""
    counts, low, high = found["histogram"], found["min"], found["max"]
    step, most = (high - low) / len(counts), max(counts)
    lines: list[Block] = [Line("histogram")]
    for n, items in enumerate(counts):
        bar = "#" * max(round(items / most * WIDTH), 1 if items else 0)
        lines.append(Line(f"  {low + n * step:>12.5g}  {bar:{WIDTH}}  {items}".rstrip()))
    return lines
