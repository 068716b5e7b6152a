"""`ckpt report`: one checkpoint and its run as one self-contained page, drawn by the template
report.html."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ckptcore import CheckpointInfo, KeepBest, kept_by, restore_candidates

from . import contents, facts, render
from .cli import command
from .diff import compared
from .diff import describe as describe_changes
from .failures import STORAGE, Failure, not_found
from .lookup import Subject, around, on_checkpoint
from .render import SHOWN, Line, Report, size, table

WIDTH, HEIGHT = 960, 360  # of the treemap and, but for their height, of charts
TILES = 60  # of a component: the smallest modules are drawn together
# Dark enough for white letters on them (WCAG AA), and of much the same lightness.
COLOURS = ("#3b6ea5", "#b3541e", "#3f7d3a", "#8a4f8f", "#b23a48", "#2a7f7f", "#7a5c3e", "#666a70")
MODULES = "module, size>=size_bytes"
SECTIONS = {
    "components": "Components",
    "bytes": "Bytes by component and module",
    "ranks": "Who wrote what",
    "phases": "Phases of the save",
    "changes": "What changed",
    "run": "The run",
}

Box = tuple[float, float, float, float]  # left, top, width, height


@command("ckpt report runs/a -o report.html", "ckpt report runs/a/checkpoint-5 -o a.html")
@on_checkpoint
@click.option(
    "-o", "--output", "target", required=True, metavar="FILE", help="The page that is written."
)
def report_command(subject: Subject, target: str) -> Report:
    """Write the checkpoint PATH and its run as one self-contained HTML page: bytes by module, who
    wrote what, phases of the save, metrics over the run, what changed since the one before."""
    file = Path(target)
    if file.is_dir() or not file.parent.is_dir():
        raise not_found(f"{file} cannot be written: it is a folder, or in none", path=target)
    root = around(subject)
    document = gathered(subject, root.entries)
    document |= {"before": None, "changes": []}
    for info in restore_candidates(root.entries):
        if info.status == "committed" and info.order < subject.info.order:
            with root.subject(info) as older:
                changes = describe_changes(compared(older, subject, stats=False))
            document |= {"before": info, "changes": changes[1:]}
            break
    page = html(document)
    building = file.with_name(f"{file.name}.partial-{os.getpid()}")
    try:
        building.write_text(page, encoding="utf-8")
        os.replace(building, file)
    except OSError as error:
        what = f"{file} cannot be written: {error.strerror}"
        raise Failure("storage", STORAGE, what, path=target) from None
    finally:
        building.unlink(missing_ok=True)
    nbytes = len(page.encode())
    result = {
        "checkpoint": facts.head(subject.info),
        "report": str(file.absolute()),
        "size_bytes": nbytes,
        "compared_with": document["before"].name if document["before"] else None,
    }
    return Report(result, [Line(f"{file}  written, {size(nbytes)}", "green")])


def gathered(subject: Subject, entries: Sequence[CheckpointInfo]) -> dict[str, Any]:
    """All that the page shows, but for what changed."""
    view = subject.readable()
    manifest, checkpoint = view.manifest, facts.checkpoint(subject.info)
    keys = {k + copy.label: k for k in manifest.components for copy in manifest.copies(k)}
    tensors = [facts.tensor(info) | {"component": keys[info.component]} for info in view.tensors()]
    components = facts.components(manifest, contents.extents(view))
    ranks = contents.written_by(manifest)
    metrics = sorted({name for info in entries for name in info.metrics})
    rules = {f"lowest {name}": KeepBest(name, "min") for name in metrics}
    rules |= {f"highest {name}": KeepBest(name, "max") for name in metrics}
    kept = kept_by(entries, rules, manifest.run_id) if entries else {}
    rows = [facts.entry(info) | {"kept": kept.get(info.name, [])} for info in entries]
    run = [row for row in rows if (row["run_id"], row["status"]) == (manifest.run_id, "committed")]
    largest = sorted(modules_of(tensors, components), key=lambda row: -row["size_bytes"])
    names = {"verified": False, "problems": [], "newer": []}
    return {
        "checkpoint": checkpoint,
        "head": [contents.header(names | {"checkpoint": checkpoint})],
        "metadata": [contents.metadata(checkpoint)],
        "components": contents.component_table(components),
        "tiles": tiles_of(largest),
        "modules": table("", MODULES, contents.named_modules(largest[:SHOWN])),
        "keys": [*(item["key"] for item in components), "index"],
        "written": list(contents.like_ranks(ranks)),
        "slowest": facts.slowest(manifest),
        "stored_ranks": manifest.stored_ranks,
        "most": max((n for row in ranks for n in row["components"].values()), default=0) or 1,
        "curves": [curve for name in metrics if (curve := curve_of(name, run))],
        "entries": contents.entry_table(rows, f"{contents.ENTRIES.format('')}, remarks=kept"),
    }


def modules_of(
    tensors: Sequence[dict[str, Any]], components: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Totals by module, of each component as deep as there are not too many to be told apart; of a
    component without tensors, its plain values."""
    found: list[dict[str, Any]] = []
    for item in components:
        mine = [tensor for tensor in tensors if tensor["component"] == item["key"]]
        deeper = (contents.by_module(mine, depth) for depth in (4, 3, 2))
        rows = next((rows for rows in deeper if len(rows) <= TILES), contents.by_module(mine, 1))
        rows = [row for row in rows if row["size_bytes"]]
        if not rows and item["values_bytes"]:
            rows = [{"module": "plain values", "size_bytes": item["values_bytes"]}]
        found += [row | {"component": item["key"]} for row in rows]
    return found


def tiles_of(modules: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rectangles of components, and in them of modules; the largest come first."""
    parts: dict[str, list[tuple[str, int]]] = {}
    for row in modules:
        parts.setdefault(row["component"], []).append((row["module"], row["size_bytes"]))
    for rows in parts.values():
        rows[TILES:] = [("others", sum(n for _, n in rows[TILES:]))] * (len(rows) > TILES)
    totals = {key: sum(nbytes for _, nbytes in rows) for key, rows in parts.items()}
    ordered = sorted(totals.items(), key=lambda pair: -pair[1])
    return [
        {
            "key": key,
            "size_bytes": totals[key],
            "colour": COLOURS[number % len(COLOURS)],
            "tiles": [(*item, tile) for item, tile in cut([(i, i[1]) for i in parts[key]], area)],
        }
        for number, (key, area) in enumerate(cut(ordered, (0, 0, WIDTH, HEIGHT)))
    ]


def cut(items: Sequence[tuple[Any, float]], box: Box) -> Iterator[tuple[Any, Box]]:
    """Rectangles of areas in proportion: a box is cut across its longer side into two for about
    half of the total each, and so on."""
    if len(items) < 2:
        yield from ((item, box) for item, _ in items)
        return
    total, first, at = sum(value for _, value in items), items[0][1], 1
    while at < len(items) - 1 and first + items[at][1] / 2 < total / 2:
        first, at = first + items[at][1], at + 1
    (left, top, width, height), part = box, first / total
    if width >= height:
        one = (left, top, width * part, height)
        other = (left + width * part, top, width * (1 - part), height)
    else:
        one = (left, top, width, height * part)
        other = (left, top + height * part, width, height * (1 - part))
    yield from cut(items[:at], one)
    yield from cut(items[at:], other)


def fitting(name: str, letters: int) -> str:
    """As many of the last parts of a name as fit into so many letters; nothing where none does."""
    parts = name.split(".")
    shorter = [name, *("…" + ".".join(parts[n:]) for n in range(1, len(parts)))]
    return next((text for text in shorter if len(text) <= letters), "")


def curve_of(metric: str, entries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """A metric over the checkpoints of a run; the best are marked."""
    measured = ((entry, entry["metrics"].get(metric)) for entry in entries)
    numbers = (int, float)
    known = [(e, v) for e, v in measured if isinstance(v, numbers) and abs(v) < float("inf")]
    if len(known) < 2:
        return None
    steps, values = [entry["step"] for entry, _ in known], [value for _, value in known]
    wide, low, high = (steps[-1] - steps[0]) or 1, min(values), max(values)
    points = []
    for entry, value in known:
        marks = [reason for reason in entry["kept"] if reason.endswith(f" {metric}")]
        marks += ["pinned"] * entry["pinned"]
        label = ", ".join([f"step {entry['step']}: {render.number(value)}", *marks])
        x = 20 + (entry["step"] - steps[0]) / wide * (WIDTH - 40)
        points.append((x, 120 - (value - low) / ((high - low) or 1) * 100, label, bool(marks)))
    ends = {"low": low, "high": high, "first": steps[0], "last": steps[-1]}
    return {"name": metric, "points": points, **ends}


def html(document: dict[str, Any]) -> str:
    def shown(value: Any) -> Any:
        return value if isinstance(value, Markup) else render.printable(str(value))

    loader = FileSystemLoader(Path(__file__).parent)
    engine = Environment(
        autoescape=True, trim_blocks=True, loader=loader, undefined=StrictUndefined, finalize=shown
    )
    engine.filters |= {"size": size, "number": render.number, "text": render.text_of}
    engine.filters["fitting"] = fitting
    page = engine.get_template("report.html")
    return page.render(document, width=WIDTH, height=HEIGHT, sections=SECTIONS)
