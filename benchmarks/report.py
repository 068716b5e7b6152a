"""Shows reports: a table on a terminal, plain text elsewhere, JSON and Markdown files. Used by
`python -m benchmarks`."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from .frame import Report, Row
from .summary import as_table

__all__ = ["as_json", "as_markdown", "as_text", "machine", "show"]

PACKAGES = ("torch", "safetensors", "torch_checkpointing", "xxhash", "numpy")


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, memory, system, versions, and how busy the machine is
    right now."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _first_value("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first_value("/proc/meminfo", "MemTotal"),
        "gpu": _gpu(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def show(report: Report, out: TextIO = sys.stdout) -> None:
    """Print the report as a rich table on a terminal and as plain text elsewhere."""
    if not out.isatty():
        out.write(as_text(report))
        out.flush()
        return
    from rich.console import Console
    from rich.table import Table

    head, body = _cells(report)
    table = Table(title=report.title, title_justify="left", title_style="bold")
    for position, name in enumerate(head):
        table.add_column(
            name, justify="left" if position == 0 or name in ("target", "verdict") else "right"
        )
    for row, cells in zip(report.rows, body, strict=True):
        missed = any(not check.met for check in row.checks)
        style = {"ours": "bold red" if missed else "bold green", "limit": "cyan"}.get(row.kind, "")
        table.add_row(*cells, style="dim" if row.problem else style)
    console = Console(file=out)
    console.print(table)
    for note in report.notes:
        console.print(f"  {note}", style="dim", highlight=False, markup=False)


def as_text(report: Report) -> str:
    """The same table in plain characters."""
    head, body = _cells(report)
    split = [[cell.split("\n") for cell in cells] for cells in [head, *body]]
    widths = [max(len(line) for row in split for line in row[n]) for n in range(len(head))]
    lines = [report.title]
    for number, row in enumerate(split):
        for part in range(max(len(cell) for cell in row)):
            texts = [cell[part] if part < len(cell) else "" for cell in row]
            lines.append("  ".join(t.ljust(w) for t, w in zip(texts, widths, strict=True)).rstrip())
        if number == 0:
            lines.append("  ".join("-" * w for w in widths))
    return "\n".join([*lines, *(f"  {note}" for note in report.notes), ""]) + "\n"


def as_markdown(reports: Sequence[Report], where: dict[str, Any]) -> str:
    """All reports as Markdown tables, the README's small one before them, with the machine that
    gave the figures."""
    parts = [
        f"Measured {where['time']} on {where['cores']} cores ({where['processor']}), "
        f"{where['system']}, "
        f"Python {where['python']}, "
        + ", ".join(f"{name} {version}" for name, version in where["versions"].items())
        + (f", {where['gpu']}" if where.get("gpu") else "")
        + f"; load average at the start {where['load'][0]}."
    ]
    if table := as_table(reports):
        parts.append(table)
    for report in reports:
        head, body = _cells(report)
        lines = [
            f"**{report.title}**",
            "",
            "| " + " | ".join(head) + " |",
            "|" + "---|" * len(head),
        ]
        lines += [
            "| " + " | ".join(c.replace("|", "\\|").replace("\n", "<br>") for c in row) + " |"
            for row in body
        ]
        parts.append("\n".join(lines))
        if report.notes:
            parts.append("\n".join(f"- {note}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


def as_json(reports: Sequence[Report], where: dict[str, Any]) -> str:
    """Everything that was measured, every round included."""
    found = []
    for report in reports:
        plain = asdict(report)
        for row, full in zip(plain["rows"], report.rows, strict=True):
            row["checks"] = [
                {**asdict(c), "target": c.target, "met": c.met, "verdict": c.verdict}
                for c in full.checks
            ]
        found.append(plain)
    return json.dumps({"machine": where, "benchmarks": found}, indent=1, default=str) + "\n"


def _cells(report: Report) -> tuple[list[str], list[list[str]]]:
    extras = list(dict.fromkeys(name for row in report.rows for name in row.extra))
    head = ["contender", "median", "ratio to limit", "min..max", *extras, "target", "verdict"]
    return head, [_row_cells(row, extras) for row in report.rows]


def _row_cells(row: Row, extras: Sequence[str]) -> list[str]:
    if row.median is None:
        figures = [row.problem or "not measured", "", ""]
    else:
        span = (
            ""
            if row.low is None or row.high is None
            else f"{_number(row.low)}..{_number(row.high)}"
        )
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        figures = [f"{_number(row.median)} {row.unit}".rstrip(), ratio, span]
    targets = "\n".join(check.target for check in row.checks)
    verdicts = "\n".join(check.verdict for check in row.checks)
    return [row.name, *figures, *(row.extra.get(name, "") for name in extras), targets, verdicts]


def _number(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def _gpu() -> str | None:
    """Name of the first GPU; None without one."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _first_value(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
