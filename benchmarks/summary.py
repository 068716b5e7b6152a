"""The one small table of the README: what each saver and loader took, gathered from the reports of
a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .frame import Report, Row

__all__ = ["as_table"]

COLUMNS = ("ckptcore", "machine's limit", "dcp", "torch", "safetensors", "torch_checkpointing")


@dataclass(frozen=True)
class _Line:
    """One line: the figures of `report`; ours is the row of that name, limit the fastest of its
    kind. Of each peer, the fastest row whose name begins with that of the column."""

    report: str
    what: str
    ours: str
    peers: bool = True  # whether the peers' rows measure the same


LINES = (
    _Line("save", "durable save", "ckptcore save"),
    _Line("load", "verified load into live tensors", "ckptcore load, verified"),
    _Line("stall", "stall of an async save", "ckptcore save_async, from the second on"),
    _Line(
        "stall", "stall of the first one, prewarmed", "ckptcore save_async, first, prewarmed", False
    ),
    _Line(
        "background",
        "longer steps while it is written (ours net of the bytes' own CPU cost)",
        "ckptcore save_async",
    ),
    _Line("memory", "host memory held by async saves", "ckptcore save_async"),
    _Line("save-cuda", "GPU: durable save", "ckptcore save"),
    _Line("load-cuda", "GPU: verified load", "ckptcore load, verified"),
    _Line("stall-cuda", 'GPU: stall, staging="copy"', "ckptcore save_async, from the second on"),
    _Line(
        "cost",
        'seconds of training that one async save costs, "overlap"',
        'ckptcore save_async, "overlap"',
    ),
    _Line("cost", 'the same, "auto"', 'ckptcore save_async, "auto"'),
    _Line(
        "background-cuda", "GPU: longer steps while it is written", 'ckptcore save_async, "auto"'
    ),
    _Line("reshard", "reshard S(0) on 4 -> S(0) on 2", "ckptcore: S(0) on 4 -> S(0) on 2"),
    _Line("reshard", "reshard S(0) on 4 -> S(1) on 2", "ckptcore: S(0) on 4 -> S(1) on 2"),
)


def as_table(reports: Sequence[Report]) -> str:
    """Markdown; empty where nothing of it was measured."""
    found = {report.name: report for report in reports}
    lines = []
    for line in LINES:
        report = found.get(line.report)
        ours = next((row for row in report.rows if row.name == line.ours), None) if report else None
        if report is not None and ours is not None and ours.median is not None:
            lines.append(
                f"| {line.what} | "
                + " | ".join(_cell(column, report, ours, line.peers) for column in COLUMNS)
                + " |"
            )
    if not lines:
        return ""
    return "\n".join(
        ["| what | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 1), *lines]
    )


def _cell(column: str, report: Report, ours: Row, peers: bool) -> str:
    if column == "ckptcore":
        return _figure(ours)
    if column == "machine's limit":
        rows = [row for row in report.rows if row.kind == "limit"]
    else:
        rows = [
            row
            for row in report.rows
            if peers and row.kind == "peer" and _of(row.name) == column and _same_task(row, ours)
        ]
    best = min(
        (row for row in rows if row.median is not None),
        key=lambda row: row.median or 0.0,
        default=None,
    )
    return "" if best is None else f"{_figure(best)}, {best.name.partition(': ')[0]}"


def _of(name: str) -> str:
    """The column of a peer's row: torch_checkpointing is not torch."""
    return next(
        (column for column in sorted(COLUMNS, key=len, reverse=True) if name.startswith(column)), ""
    )


def _same_task(row: Row, ours: Row) -> bool:
    """Rows such as "dcp: S(0) on 4 -> S(1) on 2" have a task in their name."""
    return row.name.partition(": ")[2] == ours.name.partition(": ")[2]


def _figure(row: Row) -> str:
    median = row.median or 0.0
    text = f"{median:.2f}" if abs(median) >= 0.2 else f"{median:.3f}"
    return f"{text} {row.unit}".rstrip()
