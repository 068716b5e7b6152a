"""How facts reach the reader: rich tables on a terminal, plain aligned text in a pipe, JSON for
programs.

A command describes its output once, as a list of blocks; both people's forms are drawn from those.
JSON is strict: NaN and the infinities are strings, and it is pure ASCII whatever the locale.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TextIO
from unicodedata import combining, east_asian_width

NAME_WIDTH = 48  # names longer than this do not push the facts of all others to the right


class Cell(NamedTuple):
    text: str
    style: str = ""
    terminal: str = (
        ""  # shown instead on a terminal: such as an age, which plain text cannot repeat tomorrow
    )


class Column(NamedTuple):
    name: str
    right: bool = False  # numbers are aligned on their last digit
    whole: bool = False  # a terminal too narrow for all columns folds others first


Row = Sequence["Cell | str"]


class Table(NamedTuple):
    title: str
    columns: list[Column]
    rows: Sequence[Row]


def table(title: str, columns: str, rows: Iterable[Row]) -> Table:
    """columns: their names with commas between them; one of numbers ends in ">", one that is not
    folded in "!"."""
    names = [name.strip() for name in columns.split(",")]
    made = [Column(name.rstrip(">!"), ">" in name, "!" in name) for name in names]
    return Table(title, made, [*rows])


class Facts(NamedTuple):
    title: Cell
    pairs: list[tuple[str, Cell | str]]


class Line(NamedTuple):
    text: str
    style: str = ""


Block = Table | Facts | Line


class Report(NamedTuple):
    """What a command found: for programs, for people, the exit code, and a line for stderr when it
    is bad."""

    document: dict[str, Any]
    blocks: list[Block]
    exit_code: int = 0
    complaint: str | None = None


STATUS_STYLES = {
    "committed": "green",
    "ok": "green",
    "damaged": "bold red",
    "uncommitted": "yellow",
    "partial": "yellow",
}


def status_cell(status: str, note: str = "") -> Cell:
    return Cell(f"{status}{note}", STATUS_STYLES.get(status, ""))


def size(nbytes: int | None) -> str:
    """Bytes in the unit that a person would choose."""
    if nbytes is None:
        return "-"
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def ranks(members: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5'."""
    runs: list[list[int]] = []
    for rank in sorted(members):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"


def number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def metrics(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={number(value)}" for name, value in values.items()) or "-"


def seconds(timings: dict[str, float]) -> str:
    """The phases of a save."""
    return " ".join(f"{name}={value:.3g}s" for name, value in timings.items())


def moment(created: str | None) -> Cell:
    """An ISO 8601 time to the second, in UTC; on a terminal as its age."""
    try:
        when = datetime.fromisoformat(created or "")
        when = when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return Cell(created or "-")
    seconds = (datetime.now(UTC) - when).total_seconds()
    return Cell(f"{when:%Y-%m-%d %H:%M:%S}", "", f"{age(seconds)} ago" if seconds >= 0 else "")


def age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


def printable(text: str) -> str:
    """`text` on one line and without control characters: names come from files that others
    wrote."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _text(cell: Cell | str) -> str:
    return printable(cell.text if isinstance(cell, Cell) else cell)


# ---------------------------------------------------------------- JSON


def strict(value: Any) -> Any:
    """`value` with floats that JSON lacks as strings, tuples as lists and keys as strings."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def show_json(document: dict[str, Any], stream: TextIO | None = None) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(
        4 * limit
    )  # what could be read can be written: a level takes several calls here
    try:
        text = json.dumps(strict(document), allow_nan=False, indent=2)
    finally:
        sys.setrecursionlimit(limit)
    (stream or sys.stdout).write(text + "\n")


# ---------------------------------------------------------------- plain text


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int, right: bool) -> str:
    if text.isascii():
        return text.rjust(width) if right else text.ljust(width)
    space = " " * (width - _width(text))
    return space + text if right else text + space


def plain(blocks: list[Block]) -> str:
    """Text that stays the same for the same facts: no colour, no width of a window, no ages."""
    out: list[str] = []
    for number, block in enumerate(blocks):
        if isinstance(block, Line):
            out.append(printable(block.text))
            continue
        if number:
            out.append("")
        if isinstance(block, Facts):
            out.append(_text(block.title))
            pairs = [(printable(name), cell) for name, cell in block.pairs]
            width = max((len(name) for name, _ in pairs if len(name) <= NAME_WIDTH), default=0)
            out += [f"  {name:{width}}  {_text(cell)}".rstrip() for name, cell in pairs]
        else:
            out += plain_table(block)
    return "".join(f"{line}\n" for line in out)


def plain_table(block: Table) -> list[str]:
    lines = [[column.name for column in block.columns]]
    lines += [[_text(cell) for cell in row] for row in block.rows]
    widths = [max(map(_width, cells)) for cells in zip(*lines, strict=True)]
    shape = list(zip(widths, (column.right for column in block.columns), strict=True))
    title = [printable(block.title)] if block.title else []
    indent = "  " if block.title else ""
    for cells in lines:
        padded = (
            _pad(text, width, right) for text, (width, right) in zip(cells, shape, strict=True)
        )
        title.append((indent + "  ".join(padded)).rstrip())
    return title
