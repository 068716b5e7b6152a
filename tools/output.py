"""Where output goes: drawn on a terminal, plain in a pipe; and a progress bar beside it.

rich takes longer to load than most commands take in a pipe, so it is loaded for a terminal alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import click

from .render import Block, plain, printable


def on_terminal(stream: TextIO) -> bool:
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR"))


def show(blocks: list[Block], stream: TextIO | None = None) -> None:
    """Draw the blocks in the form that suits the stream (standard output when not given)."""
    stream = stream or sys.stdout
    if on_terminal(stream):
        from .terminal import draw

        draw(blocks, stream)
    else:
        stream.write(plain(blocks))


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """What to call with bytes done and bytes in all: it moves a bar on standard error, where
    that is a terminal and no JSON is asked for."""
    context = click.get_current_context(silent=True)
    as_json = context is not None and context.find_root().obj
    if as_json or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from .terminal import bar

    with bar(printable(name)) as advance:
        yield advance
