"""`ckpt report`: one checkpoint and its run as one self-contained page. It has no script, so that
it works from the keyboard, in print, and wherever scripts are not let run.

JSON: docs/cli.md. Exit code: 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ckptcore import CheckpointInfo, KeepBest, StorageError, kept_by, restore_candidates

from . import facts, render
from .diff import compared, summary
from .failures import not_found
from .inspection import by_module, extents, written_by
from .lookup import opened, resolve, scan, split, subject_of
from .render import Line, Report, moment, printable, size, status_cell
from .subject import Options, Subject

WIDTH, HEIGHT = 960.0, 360.0  # of the treemap and, but for their height, of charts
TILES = 400  # the smallest modules are drawn together
ROWS = 60
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")

Box = tuple[float, float, float, float]  # left, top, width, height


def report(url: str, options: Options, target: str) -> Report:
    """Write the page of a checkpoint, of a root of the one that restore would take."""
    path = Path(target)
    if path.is_dir() or not path.parent.is_dir():
        raise not_found(f"{path} cannot be written: it is a folder, or in none", path=target)
    subject = opened(resolve(url, options), options)
    folder, _ = split(subject.typed)
    try:
        entries = scan(folder, options) if folder else []
    except StorageError:  # the folder around a checkpoint need not be readable
        entries = []
    before = _previous(subject, entries)
    with subject:
        document = gathered(subject, entries)
        document["changes"] = None
        if before is not None:
            with opened(subject_of(before, options, folder or ""), options) as older:
                document["changes"] = compared(older, subject, stats=False)
    page = html(document)
    building = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        building.write_text(page, encoding="utf-8")
        os.replace(building, path)
    finally:
        building.unlink(missing_ok=True)
    nbytes = len(page.encode())
    result = {
        "checkpoint": {"name": subject.name, "url": subject.url, "step": subject.step},
        "report": str(path.absolute()),
        "size_bytes": nbytes,
        "compared_with": before.name if before else None,
    }
    return Report(result, [Line(f"{path}  written, {size(nbytes)}", "green")])


def _previous(subject: Subject, entries: list[CheckpointInfo]) -> CheckpointInfo | None:
    usable = [info for info in restore_candidates(entries) if info.status == "committed"]
    mine = (subject.step or 0, subject.sequence or 0)
    return next((info for info in usable if info.order < mine), None)


def gathered(subject: Subject, entries: list[CheckpointInfo]) -> dict[str, Any]:
    """All that the page shows."""
    assert subject.view is not None
    manifest = subject.view.manifest
    tensors = [facts.tensor(info) for info in subject.view.tensors()]
    names = sorted({name for info in entries for name in info.metrics})
    rules = {
        f"best {name} ({mode})": KeepBest(name, mode) for name in names for mode in ("min", "max")
    }
    kept = kept_by(entries, rules, manifest.run_id) if entries else {}
    return {
        "checkpoint": subject.document(),
        "components": facts.components(manifest, extents(subject.view)),
        "modules": by_module(tensors, 2),
        "ranks": written_by(manifest),
        "entries": [
            facts.entry(info, False) | {"kept": kept.get(info.name, [])} for info in entries
        ],
        "metrics": names,
    }


# ---------------------------------------------------------------- drawing


def squarified(items: Sequence[tuple[Any, float]], box: Box) -> Iterable[tuple[Any, Box]]:
    """Rectangles of areas in proportion, as square as can be (Bruls, Huizing and van Wijk, 2000).
    Items are sorted, the largest first, and positive."""
    items = [*items]
    while items:
        left, top, width, height = box
        scale = width * height / sum(value for _, value in items)
        side = min(width, height)
        row: list[tuple[Any, float]] = []
        while items and (
            not row or _worst([*row, items[0]], side, scale) <= _worst(row, side, scale)
        ):
            row.append(items.pop(0))
        depth = sum(value for _, value in row) * scale / side
        at = 0.0
        for item, value in row:
            length = value * scale / depth
            yield (
                item,
                (
                    (left, top + at, depth, length)
                    if width >= height
                    else (left + at, top, length, depth)
                ),
            )
            at += length
        box = (
            (left + depth, top, width - depth, height)
            if width >= height
            else (left, top + depth, width, height - depth)
        )
        if min(box[2], box[3]) <= 1e-9:
            break


def _worst(row: list[tuple[Any, float]], side: float, scale: float) -> float:
    areas = [value * scale for _, value in row]
    total = sum(areas)
    return max(side * side * max(areas) / total**2, total**2 / (side * side * min(areas)))


def treemap(document: dict[str, Any]) -> str:
    """Bytes by component, and in it by module."""
    modules: dict[str, list[tuple[str, int]]] = {}
    for row in document["modules"]:
        if row["size_bytes"]:
            modules.setdefault(row["component"], []).append((row["module"], row["size_bytes"]))
    for item in document["components"]:
        if item["values_bytes"] and not any(
            key.partition(".rank")[0] == item["key"] for key in modules
        ):
            modules[item["key"]] = [("plain values", item["values_bytes"])]
    if not modules:
        return "<p>no bytes</p>"
    totals = sorted(
        ((key, float(sum(n for _, n in rows))) for key, rows in modules.items()),
        key=lambda p: -p[1],
    )
    parts = []
    for number, (key, area) in enumerate(squarified(totals, (0, 0, WIDTH, HEIGHT))):
        rows = sorted(modules[key], key=lambda pair: -pair[1])
        if len(rows) > TILES:
            rows = [*rows[:TILES], ("others", sum(n for _, n in rows[TILES:]))]
        colour = COLOURS[number % len(COLOURS)]
        for (name, nbytes), tile in squarified([((n, b), float(b)) for n, b in rows], area):
            label = text(f"{key}/{name}: {size(nbytes)}")
            x, y, width, height = tile
            parts.append(
                f'<g tabindex="0" role="img" aria-label="{label}"><title>{label}</title>'
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'fill="{colour}"/>{_label(name if len(rows) > 1 else key, tile)}</g>'
            )
    view = f"0 0 {WIDTH:.0f} {HEIGHT:.0f}"
    return f'<svg viewBox="{view}" aria-label="bytes by module">{"".join(parts)}</svg>'


def _label(name: str, tile: Box) -> str:
    x, y, width, height = tile
    letters = int(width / 7)
    if height < 16 or letters < 3:
        return ""
    shown = name if len(name) <= letters else name[: letters - 1] + "…"
    return f'<text x="{x + 4:.1f}" y="{y + 13:.1f}">{text(shown)}</text>'


def phases(timings: dict[str, float]) -> str:
    most = max(timings.values(), default=0) or 1
    rows = [[name, f"{value:.4g} s", _bar(value / most)] for name, value in timings.items()]
    return table(["phase", "seconds", ""], rows, raw=(2,)) if rows else "<p>not recorded</p>"


def _bar(part: float) -> str:
    return f'<span class="bar" style="width:{max(part * 100, 0.5):.1f}%"></span>'


def matrix(document: dict[str, Any]) -> str:
    """Ranks that wrote the same are one row."""
    keys = [item["key"] for item in document["components"]] + ["index"]
    most = max((n for row in document["ranks"] for n in row["components"].values()), default=1)
    groups: list[tuple[list[int], dict[str, int]]] = []
    for row in document["ranks"]:
        if groups and groups[-1][1] == row["components"]:
            groups[-1][0].append(row["rank"])
        else:
            groups.append(([row["rank"]], row["components"]))
    body = []
    for ranks, written in groups:
        cells = "".join(
            f'<td style="--part:{(written.get(key, 0) / most) ** 0.5:.2f}" class="heat">'
            f"{size(written[key]) if key in written else ''}</td>"
            for key in keys
        )
        body.append(f'<tr><th scope="row">{text(render.ranks(ranks))}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{text(key)}</th>' for key in ["rank", *keys])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def curve(document: dict[str, Any], metric: str) -> str:
    """A metric over the checkpoints of the run; the best are marked."""
    run = document["checkpoint"]["run_id"]
    points = [
        (entry["step"], entry["metrics"][metric], entry)
        for entry in document["entries"]
        if entry["run_id"] == run
        and entry["status"] == "committed"
        and isinstance(entry["metrics"].get(metric), (int, float))
        and abs(entry["metrics"][metric]) < float("inf")
    ]
    if len(points) < 2:
        return ""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    wide, high = (max(xs) - min(xs)) or 1, (max(ys) - min(ys)) or 1
    place = [
        (20 + (x - min(xs)) / wide * (WIDTH - 40), 130 - (y - min(ys)) / high * 110)
        for x, y in zip(xs, ys, strict=True)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in place)
    dots = []
    for (x, y), (step, value, entry) in zip(place, points, strict=True):
        best = any(metric in reason for reason in entry["kept"])
        label = text(f"step {step}: {render.number(value)}{', best' if best else ''}")
        dots.append(
            f'<circle tabindex="0" role="img" aria-label="{label}" cx="{x:.1f}" cy="{y:.1f}" '
            f'r="{6 if best else 4}" class="{"best" if best else "dot"}">'
            f"<title>{label}</title></circle>"
        )
    ends = f"{render.number(min(ys))} to {render.number(max(ys))}"
    return (
        f"<h3>{text(metric)} <small>{ends}</small></h3>"
        f'<svg viewBox="0 0 {WIDTH:.0f} 150" aria-label="{text(metric)} by step">'
        f'<polyline points="{line}"/>{"".join(dots)}</svg>'
    )


def text(value: Any) -> str:
    return escape(printable(str(value)), quote=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], raw: tuple[int, ...] = ()) -> str:
    """raw: columns that are markup already."""
    top = "".join(f'<th scope="col">{text(name)}</th>' for name in head)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{c if n in raw else text(c)}</td>" for n, c in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def more(rows: list[Any]) -> str:
    return f"<p>and {len(rows) - ROWS} more</p>" if len(rows) > ROWS else ""


def changes(document: dict[str, Any]) -> str:
    found = document["changes"]
    if found is None:
        return "<p>there is no checkpoint before it</p>"
    since = f"<p>since {text(found['a']['name'])} (step {text(found['a']['step'])})</p>"
    if found["same"]:
        return f"{since}<p><strong>nothing changed</strong></p>"
    components = table(
        ["component", "change"], [[item["key"], summary(item)] for item in found["components"]]
    )
    tensors = [
        [f"{t['component']}/{t['name']}", t["change"], size(t["changed_bytes"])]
        for t in found["tensors"]
    ]
    values = [
        [f"{v['component']}/{v['path']}", str(v["a"])[:80], str(v["b"])[:80]]
        for v in found["values"]
    ]
    parts = [since, components]
    if tensors:
        parts.append(
            f"<details><summary>{len(tensors)} tensors</summary>"
            f"{table(['tensor', 'change', 'bytes'], tensors[:ROWS])}{more(tensors)}</details>"
        )
    if values:
        parts.append(
            f"<details open><summary>{len(values)} values</summary>"
            f"{table(['value', 'before', 'now'], values[:ROWS])}{more(values)}</details>"
        )
    return "".join(parts)


def run_table(document: dict[str, Any]) -> str:
    rows = []
    for entry in document["entries"]:
        marks = [mark for mark in ("pinned", "abandoned") if entry[mark]]
        rows.append(
            [
                "-" if entry["step"] is None else str(entry["step"]),
                entry["name"],
                ", ".join([status_cell(entry["status"]).text, *marks]),
                size(entry["size_bytes"]),
                moment(entry["created"]).text,
                entry["run_id"] or "-",
                render.metrics(entry["metrics"]),
                ", ".join(entry["kept"]),
            ]
        )
    head = ["step", "name", "status", "size", "created", "run", "metrics", "kept as"]
    return table(head, rows) if rows else "<p>it lies alone</p>"


STYLE = """
:root{color-scheme:light dark}body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:
62rem;padding:0 1rem}h1{margin-bottom:.2rem}h2{margin-top:2rem;border-bottom:1px solid #8886}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}td,th{text-align:left;
padding:.2rem .6rem .2rem 0;border-bottom:1px solid #8883;vertical-align:top;overflow-wrap:anywhere}
svg{width:100%;height:auto}svg text{font-size:11px;fill:#fff;pointer-events:none}rect{stroke:#fff}
g:focus rect,circle:focus{stroke:#000;stroke-width:3;outline:none}polyline{fill:none;stroke:#4c78a8;
stroke-width:2}.dot{fill:#4c78a8}.best{fill:#e45756}.bar{display:inline-block;height:.8em;
background:#4c78a8}.heat{background:rgb(76 120 168/var(--part))}nav a{margin-right:1rem}
small{font-weight:normal;opacity:.7}td .bar{min-width:1px}td:last-child{min-width:6rem}
@media print{body{margin:0;max-width:none}nav{display:none}section{break-inside:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""


def html(document: dict[str, Any]) -> str:
    """The whole page."""
    checkpoint = document["checkpoint"]
    head = [
        ("status", checkpoint["status"] + (", pinned" if checkpoint["pinned"] else "")),
        ("path", checkpoint["url"]),
        ("run", checkpoint["run_id"]),
        ("created", moment(checkpoint["created"]).text),
        ("size", f"{size(checkpoint['size_bytes'])} in {checkpoint['files']} files"),
        ("ranks", f"{checkpoint['world_size']} on {len(checkpoint['nodes'])} nodes"),
        ("versions", ", ".join(f"{k} {v}" for k, v in checkpoint["versions"].items())),
    ]
    components = [
        [
            item["key"],
            item["pattern"],
            ",".join(item["dtypes"] or []) or "-",
            str(item["tensors"]),
            size(item["size_bytes"] + (item["values_bytes"] or 0)),
            str(item["copies"]),
            render.ranks(item["writers"]),
        ]
        for item in document["components"]
    ]
    columns = ["component", "pattern", "dtype", "tensors", "size", "copies", "written by ranks"]
    curves = "".join(curve(document, metric) for metric in document["metrics"])
    sections = [
        ("components", "Components", table(columns, components)),
        ("bytes", "Bytes by component and module", treemap(document)),
        ("ranks", "Who wrote what", matrix(document)),
        ("phases", "Phases of the save", phases(checkpoint["timings"])),
        ("changes", "What changed", changes(document)),
        ("run", "The run", curves + run_table(document)),
    ]
    nav = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
    body = "".join(
        f'<section id="{key}"><h2>{title}</h2>{content}</section>'
        for key, title, content in sections
    )
    title = text(f"{checkpoint['name']}, step {checkpoint['step']}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>"
        f"<nav>{nav}</nav><section>{table(['', ''], [[n, str(v)] for n, v in head])}</section>"
        f"{body}</body></html>\n"
    )
