"""How facts reach the reader: drawn on a terminal, plain aligned text in a pipe, JSON for programs.

A command makes one document; its tables name keys of that, and how a value is written follows from
its key. JSON is strict: NaN and the infinities are strings, and it is pure ASCII whatever the
locale.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from textwrap import wrap
from time import monotonic
from typing import Any, NamedTuple, TextIO
from unicodedata import combining, east_asian_width

import click

NAME_WIDTH = 48  # names longer than this do not push the facts of all others to the right
NARROW = 8  # a column is folded to no less than this
SHOWN = 20  # rows of a long table that people get
METRICS = 5  # of one checkpoint that fit on a line
STATUS_STYLES = {
    "committed": "green",
    "damaged": "bold red",
    "uncommitted": "yellow",
    "partial": "yellow",
}


class Cell(NamedTuple):
    """A text with a style. terminal: shown instead on a terminal: such as an age, which plain text
    cannot repeat tomorrow."""

    text: str
    style: str = ""
    terminal: str = ""


class Column(NamedTuple):
    name: str
    right: bool = False  # numbers are aligned on their last digit
    whole: bool = False  # a terminal too narrow for all columns folds others


class Table(NamedTuple):
    title: str
    columns: list[Column]
    rows: Sequence[Sequence[Cell | str]]


class Facts(NamedTuple):
    title: Cell
    pairs: Sequence[tuple[str, Cell | str]]


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


# ---------------------------------------------------------------- values


def cell(key: str, value: Any) -> Cell | str:
    """A value of a document as a person reads it."""
    if isinstance(value, Cell):
        return value
    if key == "created":
        return moment(value)
    if isinstance(value, str):
        return value or "-"
    if key == "shape":
        return "x".join(map(str, value)) or "scalar"
    if value is None or value == [] or value == {}:
        return "-"
    if key.endswith("bytes"):
        return size(value)
    if key in ("writers", "ranks"):
        return ranks(value)
    if isinstance(value, dict):
        return metrics(value)
    if isinstance(value, list):
        return ("," if key == "dtypes" else ", ").join(map(str, value))
    return ("no", "yes")[value] if isinstance(value, bool) else number(value)


def cells(key: str, values: list[Any]) -> list[Any]:
    """The same of a column, which may have many thousand rows: texts are as they are."""
    if key != "created" and {*map(type, values)} == {str} and "" not in values:
        return values
    return [cell(key, value) for value in values]


def status_cell(status: str, note: str = "") -> Cell:
    return Cell(f"{status}{note}", STATUS_STYLES.get(status, ""))


def named(names: str) -> Iterator[tuple[str, str]]:
    """(Name, key) of "name, name=key, ...". The key is the name where none is given."""
    for part in names.split(","):
        name, _, key = part.strip().partition("=")
        yield name, key or name.rstrip(">!").replace(" ", "_")


def table(title: str, columns: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """Documents as rows. columns: "name, name=key, ..."; that of one of numbers ends in ">", of one
    that is not folded in "!"."""
    pairs, rows = list(named(columns)), list(rows)
    made = [Column(name.rstrip(">!"), ">" in name, "!" in name) for name, _ in pairs]
    texts = (cells(key, [row.get(key) for row in rows]) for _, key in pairs)
    return Table(title, made, list(zip(*texts, strict=True)))


def pairs_of(document: Mapping[str, Any], names: str) -> list[tuple[str, Cell | str]]:
    """What is known of "name, name=key, ..."."""
    known = ((name, key) for name, key in named(names) if document.get(key) not in (None, ""))
    return [(name, cell(key, document[key])) for name, key in known]


def first_rows(
    title: str, columns: str, rows: Sequence[Mapping[str, Any]], command: str
) -> list[Block]:
    """The first rows of a table, and which command has all of them; nothing where there is none."""
    more = f"  ... and {len(rows) - SHOWN} more: ckpt {command} --json has all"
    rest: list[Block] = [Line(more)] if len(rows) > SHOWN else []
    return [table(title, columns, rows[:SHOWN]), *rest] if rows else []


def size(nbytes: float | None) -> str:
    """Bytes in the unit that a person would choose."""
    if nbytes is None:
        return "-"
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.2f} TiB"


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def ranks(members: Iterable[int]) -> str:
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


def metrics(values: Mapping[str, Any]) -> str:
    shown = [f"{name}={number(value)}" for name, value in [*values.items()][:METRICS]]
    return " ".join([*shown, f"... {len(values)} in all"] if len(values) > METRICS else shown)


def seconds(timings: Mapping[str, float]) -> str:
    """The phases of a save."""
    return " ".join(f"{name}={value:.3g}s" for name, value in timings.items())


def moment(created: str | None) -> Cell:
    """An ISO 8601 time to the second, in UTC; on a terminal as its age."""
    try:
        when = datetime.fromisoformat(created or "")
        when = when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return Cell(created or "-")
    past = (datetime.now(UTC) - when).total_seconds()
    return Cell(f"{when:%Y-%m-%d %H:%M:%S}", "", f"{age(past)} ago" if past >= 0 else "")


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


def text_of(value: Cell | str) -> str:
    return printable(value.text if isinstance(value, Cell) else value)


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


def show_json(document: dict[str, Any]) -> None:
    limit = sys.getrecursionlimit()
    # What could be read can be written: a level takes several calls here.
    sys.setrecursionlimit(4 * limit)
    try:
        text = json.dumps(strict(document), allow_nan=False, indent=2)
    finally:
        sys.setrecursionlimit(limit)
    sys.stdout.write(text + "\n")


# ---------------------------------------------------------------- text


class Screen(NamedTuple):
    """What text is drawn for. width: of a terminal, where columns are folded and times are ages;
    None: a pipe, where text stays the same for the same facts."""

    width: int | None = None
    colour: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Screen:
        if not stream.isatty() and not os.environ.get("FORCE_COLOR"):
            return cls()
        given = os.environ.get("COLUMNS", "")
        try:
            width = int(given) if given.isdecimal() else os.get_terminal_size(stream.fileno())[0]
        except OSError:  # colours were asked for where there is no terminal
            width = 0
        return cls(width or 80, not os.environ.get("NO_COLOR"))

    def texts(self, values: Sequence[Cell | str]) -> Sequence[str]:
        """What is shown of the cells of a column."""
        found = [
            value if isinstance(value, str) else (self.width and value.terminal) or value.text
            for value in values
        ]
        return found if "".join(found).isprintable() else [*map(printable, found)]

    def styled(self, text: str, style: str) -> str:
        if not self.colour or not style:
            return text
        words = style.split()
        colour = next((word for word in words if word not in ("bold", "dim")), None)
        return click.style(text, colour, bold="bold" in words or None, dim="dim" in words or None)


def drawn(blocks: Sequence[Block], screen: Screen) -> str:
    out: list[str] = []
    for at, block in enumerate(blocks):
        if isinstance(block, Line):
            out.append(screen.styled(printable(block.text), block.style))
            continue
        out += [""] * bool(at)
        out += _facts(block, screen) if isinstance(block, Facts) else _table(block, screen)
    return "\n".join([*out, ""])


def _facts(block: Facts, screen: Screen) -> Iterator[str]:
    if block.title.text:
        yield screen.styled(printable(block.title.text), block.title.style)
    names = screen.texts([name for name, _ in block.pairs])
    values = [value for _, value in block.pairs]
    width = max((len(name) for name in names if len(name) <= NAME_WIDTH), default=0)
    for name, text, value in zip(names, screen.texts(values), values, strict=True):
        style = value.style if isinstance(value, Cell) else ""
        label = screen.styled(f"  {name:{width}}", "dim")
        yield f"{label}  {screen.styled(text, style)}".rstrip()


def _table(block: Table, screen: Screen) -> Iterator[str]:
    """Columns; folded where the terminal is narrower, and one below the other where it is too
    narrow for that. Each step is one of a whole column: there may be many thousand rows."""
    heads = [column.name for column in block.columns]
    cells: list[Any] = [*zip(*block.rows, strict=True)] or [()] * len(heads)
    texts = [[head, *screen.texts(values)] for head, values in zip(heads, cells, strict=True)]
    widths = [_width(column) for column in texts]
    indent = "  " if block.title else ""
    if block.title:
        yield screen.styled(printable(block.title), "bold")
    room = screen.width and screen.width - len(indent) - 2 * (len(heads) - 1)
    rows = [*range(len(block.rows) + 1)]  # of the table, by line
    if room is not None and sum(widths) > room:
        if not _fit(widths, block.columns, room):
            for row in block.rows:
                yield from _facts(Facts(Cell(""), list(zip(heads, row, strict=True))), screen)
            return
        folded = [
            (at, line)
            for at, row in enumerate(zip(*texts, strict=True))
            for line in zip_longest(*map(wrap, row, widths), fillvalue="")
        ]
        rows = [at for at, _ in folded]
        texts = [*map(list, zip(*(line for _, line in folded), strict=True))]
    padded = [*map(_padded, texts, widths, block.columns)]
    if screen.colour:
        for column, values in zip(padded, cells, strict=True):
            styles = ["bold", *(getattr(value, "style", "") for value in values)]
            column[:] = [screen.styled(t, styles[at]) for t, at in zip(column, rows, strict=True)]
    lines = [(indent + "  ".join(row)).rstrip() for row in zip(*padded, strict=True)]
    yield lines[0]
    if screen.width:
        yield indent + screen.styled("─" * (sum(widths) + 2 * (len(heads) - 1)), "dim")
    yield from lines[1:]


def _fit(widths: list[int], columns: list[Column], room: int) -> bool:
    """Narrow the widest of the columns that may be folded until all fit; whether they do."""
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda n: 0 if columns[n].whole else widths[n])
        if columns[widest].whole or widths[widest] <= max(NARROW, len(columns[widest].name)):
            return False
        widths[widest] -= 1
    return True


def _width(texts: Sequence[str]) -> int:
    """Of the widest, as a terminal counts."""
    measure = len if "".join(texts).isascii() else _cells_of
    return max(map(measure, texts))


def _cells_of(text: str) -> int:
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _padded(texts: Sequence[str], width: int, column: Column) -> list[str]:
    if "".join(texts).isascii():
        return [*map(str.rjust if column.right else str.ljust, texts, [width] * len(texts))]
    spaces = [" " * (width - _cells_of(text)) for text in texts]
    pairs = zip(spaces, texts, strict=True)
    return [space + text if column.right else text + space for space, text in pairs]


def for_programs() -> bool:
    """Whether the running command is to print JSON."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().obj)


class Progress:
    """A line on standard error that says how far it is, where that is a terminal and no JSON is
    asked for."""

    def __init__(self, name: str) -> None:
        self.name, self.start, self.last = printable(name), monotonic(), 0.0
        self.shown = sys.stderr.isatty() and not for_programs()

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, total: int) -> None:
        now = monotonic()
        if not self.shown or (now - self.last < 0.1 and done < total):
            return
        self.last = now
        part, rate = f"{done / (total or 1):.0%}", size(done / max(now - self.start, 0.001))
        sys.stderr.write(f"\r\x1b[K{self.name}  {part} of {size(total)}, {rate}/s")
        sys.stderr.flush()

    def __exit__(self, *exception: Any) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
