"""`ckpt report`: one checkpoint and its run as one self-contained page. It has no script, so that
it works from the keyboard, in print, and wherever scripts are not let run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import click

from ckptcore import CheckpointInfo, KeepBest, kept_by, restore_candidates

from . import facts, render
from .cli import LOCATION, command
from .diff import compared, named, summary
from .failures import not_found
from .inspection import by_module, extents, written_by
from .lookup import around, opened, resolve, split, subject_of
from .render import Line, Report, count, moment, printable, size, status_cell
from .subject import Options, Subject

WIDTH, HEIGHT = 960.0, 360.0  # of the treemap and, but for their height, of charts
TILES = 60  # of a component: the smallest modules are drawn together
ROWS = 24
# Dark enough for white letters on them (WCAG AA), and of much the same lightness.
COLOURS = ("#3b6ea5", "#b3541e", "#3f7d3a", "#8a4f8f", "#b23a48", "#2a7f7f", "#7a5c3e", "#666a70")

Box = tuple[float, float, float, float]  # left, top, width, height


@command("ckpt report runs/a -o report.html", "ckpt report runs/a/checkpoint-5 -o a.html")
@click.argument("path", type=LOCATION)
@click.option(
    "-o", "--output", "target", required=True, metavar="FILE", help="The page that is written."
)
def report_command(path: str, target: str, options: Options) -> Report:
    """Write the checkpoint PATH and its run as one self-contained HTML page: bytes by module, who
    wrote what, phases of the save, metrics over the run, what changed since the one before."""
    file = Path(target)
    if file.is_dir() or not file.parent.is_dir():
        raise not_found(f"{file} cannot be written: it is a folder, or in none", path=target)
    subject = opened(resolve(path, options), options)
    entries = around(subject)
    before = _previous(subject, entries)
    with subject:
        document = gathered(subject, entries)
        document["changes"] = None
        if before is not None:
            folder = split(subject.typed)[0] or ""
            with opened(subject_of(before, options, folder), options) as older:
                document["changes"] = compared(older, subject, stats=False)
    page = html(document)
    building = file.with_name(f"{file.name}.partial-{os.getpid()}")
    try:
        building.write_text(page, encoding="utf-8")
        os.replace(building, file)
    finally:
        building.unlink(missing_ok=True)
    nbytes = len(page.encode())
    result = {
        "checkpoint": subject.head(),
        "report": str(file.absolute()),
        "size_bytes": nbytes,
        "compared_with": before.name if before else None,
    }
    return Report(result, [Line(f"{file}  written, {size(nbytes)}", "green")])


def _previous(subject: Subject, entries: list[CheckpointInfo]) -> CheckpointInfo | None:
    usable = [info for info in restore_candidates(entries) if info.status == "committed"]
    mine = (subject.step or 0, subject.sequence or 0)
    return next((info for info in usable if info.order < mine), None)


def gathered(subject: Subject, entries: list[CheckpointInfo]) -> dict[str, Any]:
    """All that the page shows."""
    view = subject.readable()
    manifest = view.manifest
    keys = {k + copy.label: k for k in manifest.components for copy in manifest.copies(k)}
    tensors = [facts.tensor(info) | {"component": keys[info.component]} for info in view.tensors()]
    names = sorted({name for info in entries for name in info.metrics})
    rules = {
        **{f"lowest {name}": KeepBest(name, "min") for name in names},
        **{f"highest {name}": KeepBest(name, "max") for name in names},
    }
    kept = kept_by(entries, rules, manifest.run_id) if entries else {}
    return {
        "checkpoint": subject.document(),
        "components": facts.components(manifest, extents(view)),
        "modules": modules_of(tensors),
        "ranks": written_by(manifest),
        "entries": [facts.entry(info) | {"kept": kept.get(info.name, [])} for info in entries],
        "metrics": names,
    }


def modules_of(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Totals by module, of each component as deep as there are not too many to be told apart."""
    found: list[dict[str, Any]] = []
    for key in dict.fromkeys(item["component"] for item in tensors):
        mine = [item for item in tensors if item["component"] == key]
        deeper = (by_module(mine, depth) for depth in (4, 3, 2))
        found += next((rows for rows in deeper if len(rows) <= TILES), by_module(mine, 1))
    return found


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
        if item["values_bytes"] and item["key"] not in modules:
            modules[item["key"]] = [("plain values", item["values_bytes"])]
    if not modules:
        return "<p>no bytes</p>"
    totals = sorted(
        ((key, float(sum(n for _, n in rows))) for key, rows in modules.items()),
        key=lambda p: -p[1],
    )
    tiles, legend = [], []
    for number, (key, area) in enumerate(squarified(totals, (0, 0, WIDTH, HEIGHT))):
        rows = sorted(modules[key], key=lambda pair: -pair[1])
        if len(rows) > TILES:
            rows = [*rows[:TILES], ("others", sum(n for _, n in rows[TILES:]))]
        colour = COLOURS[number % len(COLOURS)]
        total = size(sum(nbytes for _, nbytes in rows))
        legend.append(f'<span><b style="background:{colour}"></b>{text(key)} {total}</span>')
        for (name, nbytes), tile in squarified([((n, b), float(b)) for n, b in rows], area):
            label = text(f"{key}/{name}: {size(nbytes)}")
            x, y, width, height = tile
            tiles.append(
                f'<g tabindex="0" role="img" aria-label="{label}"><title>{label}</title>'
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'fill="{colour}"/>{_label(name if len(rows) > 1 else key, tile)}'
                f'<text class="tip" y="{HEIGHT + 17:.0f}">{label}</text></g>'
            )
    view = f"0 0 {WIDTH:.0f} {HEIGHT + 24:.0f}"
    found = [(f"{key}/{n}", b) for key, rows in modules.items() for n, b in rows]
    largest = sorted(found, key=lambda row: -row[1])
    listed = table(["module", "size>"], [[name, size(n)] for name, n in largest[:ROWS]])
    return (
        f'<p class="legend">{"".join(legend)}</p><div class="wide">'
        f'<svg viewBox="{view}" aria-label="bytes by module">{"".join(tiles)}</svg></div>'
        f"<details><summary>the same as a table</summary>{listed}{more(largest)}</details>"
    )


def _label(name: str, tile: Box) -> str:
    x, y, width, height = tile
    letters = int((width - 6) / 7)
    if height < 16 or letters < 5:
        return ""
    shown = name if len(name) <= letters else "…" + name[1 - letters :]
    return f'<text x="{x + 4:.1f}" y="{y + 13:.1f}">{text(shown)}</text>'


def phases(checkpoint: dict[str, Any]) -> str:
    timings, nbytes = checkpoint["timings"], checkpoint["size_bytes"]
    if not timings:
        return "<p>the manifest says nothing of the seconds that the save took</p>"
    most, took = max(timings.values()) or 1, sum(timings.values())
    rows = [[name, f"{value:.3g} s", _bar(value / most)] for name, value in timings.items()]
    rows.append(["together", f"{took:.3g} s", f"{size(round(nbytes / took))}/s" if took else ""])
    note = "" if checkpoint["world_size"] == 1 else RANK_ZERO
    return note + table(["phase", "seconds>", ""], rows, raw=(2,))


RANK_ZERO = (
    "<p>Of rank 0, which waits in each phase for the slowest rank: a manifest has no other rank's "
    "seconds. The events of a save (<code>on_event</code>) have them, on each rank.</p>"
)


def _bar(part: float) -> str:
    return f'<span class="bar" style="width:{max(part * 100, 0.5):.1f}%"></span>'


def matrix(document: dict[str, Any]) -> str:
    """Ranks that follow one another and wrote the same, to the digits that are shown, are one
    row."""
    keys = [item["key"] for item in document["components"]] + ["index"]
    most = max((n for row in document["ranks"] for n in row["components"].values()), default=1)
    groups: list[tuple[list[str], list[dict[str, Any]]]] = []
    for row in document["ranks"]:
        shown = [size(row["components"][k]) if k in row["components"] else "" for k in keys]
        if groups and groups[-1][0] == shown:
            groups[-1][1].append(row)
        else:
            groups.append((shown, [row]))
    body = []
    for shown, members in groups:
        written = members[0]["components"]
        cells = "".join(
            f'<td class="heat" style="--part:{(written.get(key, 0) / most) ** 0.5:.2f}">{cell}</td>'
            for key, cell in zip(keys, shown, strict=True)
        )
        ranks = render.ranks([row["rank"] for row in members]) + " each" * (len(members) > 1)
        total = size(sum(row["size_bytes"] for row in members))
        body.append(f'<tr><th scope="row">{ranks}</th>{cells}<td class="number">{total}</td></tr>')
    names = "".join(f'<th scope="col" class="number">{text(key)}</th>' for key in [*keys, "total"])
    head = f'<tr><th scope="col">rank</th>{names}</tr>'
    rows = "".join(body)
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


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
    at = [
        (20 + (x - min(xs)) / wide * (WIDTH - 40), 120 - (y - min(ys)) / high * 100)
        for x, y in zip(xs, ys, strict=True)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    dots = []
    for (x, y), (step, value, entry) in zip(at, points, strict=True):
        marks = [reason for reason in entry["kept"] if reason.endswith(f" {metric}")]
        marks += ["pinned"] * entry["pinned"]
        label = text(", ".join([f"step {step}: {render.number(value)}", *marks]))
        kind, radius = ("mark", 6) if marks else ("dot", 4)
        dots.append(
            f'<g tabindex="0" role="img" aria-label="{label}"><title>{label}</title>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}"/>'
            f'<text class="tip" y="12" x="20">{label}</text></g>'
        )
    ends = f"{render.number(min(ys))} to {render.number(max(ys))}"
    steps = f'<text x="20" y="146">step {min(xs)}</text>'
    steps += f'<text x="{WIDTH - 20:.0f}" y="146" text-anchor="end">step {max(xs)}</text>'
    return (
        f'<h3>{text(metric)} <small>{ends}</small></h3><div class="wide">'
        f'<svg viewBox="0 0 {WIDTH:.0f} 150" class="curve" aria-label="{text(metric)} by step">'
        f'<polyline points="{line}"/>{steps}{"".join(dots)}</svg></div>'
    )


def text(value: Any) -> str:
    return escape(printable(str(value)), quote=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], raw: tuple[int, ...] = ()) -> str:
    """head: names of columns, those of numbers with a ">". raw: columns that are markup already."""
    kinds = [' class="number"' if name.endswith(">") else "" for name in head]
    top = "".join(
        f'<th scope="col"{kind}>{text(name.rstrip(">"))}</th>'
        for kind, name in zip(kinds, head, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{kind}>{cell if n in raw else text(cell)}</td>"
            for n, (kind, cell) in enumerate(zip(kinds, row, strict=True))
        )
        + "</tr>"
        for row in rows
    )
    head_row = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table>{head_row}<tbody>{body}</tbody></table></div>'


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
        [named(t, t["name"]), t["change"], size(t["changed_bytes"])] for t in found["tensors"]
    ]
    values = [[named(v, v["path"]), str(v["a"])[:80], str(v["b"])[:80]] for v in found["values"]]
    parts = [since, components]
    if tensors:
        parts.append(
            f"<details><summary>{len(tensors)} tensors</summary>"
            f"{table(['tensor', 'change', 'bytes>'], tensors[:ROWS])}{more(tensors)}</details>"
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
    head = ["step>", "name", "status", "size>", "created", "run", "metrics", "stands out as"]
    return table(head, rows) if rows else "<p>it lies alone</p>"


STYLE = """
:root{color-scheme:light dark;--line:#8884;--mark:#d03b4d;--ink:#3b6ea5}
@media(prefers-color-scheme:dark){:root{--ink:#7fb0e6;--mark:#ff7b89}}
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem}
h1{margin-bottom:.2rem;overflow-wrap:anywhere}
h2{margin-top:2rem;border-bottom:1px solid var(--line)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}
td,th{text-align:left;padding:.2rem .9rem .2rem 0;border-bottom:1px solid var(--line);
vertical-align:top;overflow-wrap:break-word;max-width:32rem}th{white-space:nowrap}
.number,.heat{text-align:right;white-space:nowrap}
.heat{background:rgb(59 110 165/calc(var(--part)*.6));padding:.2rem .6rem}
svg{width:100%;min-width:40rem;height:auto;display:block}svg text{font-size:11px;fill:#fff}
svg text{pointer-events:none}.curve text,svg .tip{fill:currentColor}svg .tip{display:none}
svg .tip{font-size:13px}g:focus .tip,g:hover .tip{display:block}rect{stroke:Canvas;stroke-width:1.5}
g:focus{outline:none}g:focus rect,g:focus circle{stroke:CanvasText;stroke-width:3}
polyline{fill:none;stroke:var(--ink);stroke-width:2}.dot{fill:var(--ink)}.mark{fill:var(--mark)}
.bar{display:inline-block;height:.8em;background:var(--ink);min-width:1px}td:has(.bar){width:50%}
.legend span{margin-right:1.2rem;white-space:nowrap}summary{cursor:pointer;margin:.4rem 0}
.legend b{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
nav a{margin-right:1rem;white-space:nowrap}nav{line-height:1.9}small{font-weight:normal;opacity:.7}
@media print{body{margin:0;max-width:none;font-size:12px}nav,summary{display:none}h2,h3
{break-after:avoid}tr,svg{break-inside:avoid}.wide{overflow:visible}svg{min-width:0}
details::details-content{content-visibility:visible!important;block-size:auto!important}
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
        ("ranks", f"{checkpoint['world_size']} on {count(len(checkpoint['nodes']), 'node')}"),
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
    columns = ["component", "pattern", "dtype", "tensors>", "size>", "copies>", "written by ranks"]
    curves = "".join(curve(document, metric) for metric in document["metrics"])
    sections = [
        ("components", "Components", table(columns, components)),
        ("bytes", "Bytes by component and module", treemap(document)),
        ("ranks", "Who wrote what", matrix(document)),
        ("phases", "Phases of the save", phases(checkpoint)),
        ("changes", "What changed", changes(document)),
        ("run", "The run", curves + run_table(document)),
    ]
    nav = " ".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
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
