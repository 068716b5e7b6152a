"""What only a terminal gets: tables drawn by rich, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table as RichTable
from rich.text import Text

from .render import Block, Cell, Facts, Line, plain_table, printable

# rich lays out a table in about 1 ms a row; beyond this, columns of plain text serve the reader
# better.
RICH_ROWS = 400


@contextmanager
def bar(name: str) -> Iterator[Callable[[int, int], None]]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, total=total, completed=done)


def draw(blocks: list[Block], stream: TextIO | Console) -> None:
    """Draw the blocks with rich. Texts are never read as markup."""
    console = stream if isinstance(stream, Console) else Console(file=stream, highlight=False)

    def rich_text(value: Cell | str) -> Text:
        cell = value if isinstance(value, Cell) else Cell(value)
        return Text(printable(cell.terminal or cell.text), cell.style)

    for number, block in enumerate(blocks):
        if isinstance(block, Line):
            console.print(rich_text(Cell(*block)), soft_wrap=True)
            continue
        if number:
            console.print()
        if isinstance(block, Facts):
            console.print(rich_text(block.title))
            grid = RichTable.grid(padding=(0, 2))
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(overflow="fold")
            for name, value in block.pairs:
                grid.add_row(Text(f"  {printable(name)}"), rich_text(value))
            console.print(grid)
        elif len(block.rows) > RICH_ROWS:
            console.print(Text("\n".join(plain_table(block))), soft_wrap=True)
        else:
            if block.title:
                console.print(Text(printable(block.title), "bold"))
            table = RichTable(
                box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
            )
            for column in block.columns:
                side: Literal["left", "right"] = "right" if column.right else "left"
                table.add_column(column.name, justify=side, overflow="fold", no_wrap=column.whole)
            for row in block.rows:
                table.add_row(*map(rich_text, row))
            console.print(table)
