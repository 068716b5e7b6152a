"""Where output goes: drawn on a terminal, plain in a pipe; and a progress bar beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import click

from .render import Block, plain, printable


def coloured(stream: TextIO) -> bool:
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR"))


def show(blocks: list[Block], stream: TextIO | None = None) -> None:
    """Draw the blocks in the form that suits the stream (standard output when not given). rich
    takes longer to load than most commands take in a pipe, so it is for a terminal alone."""
    stream = stream or sys.stdout
    if coloured(stream):
        from .terminal import draw

        draw(blocks, stream)
    else:
        stream.write(plain(blocks))


def for_programs() -> bool:
    """Whether the running command is to print JSON."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().obj)


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """What to call with bytes done and bytes in all: it moves a bar on standard error, where
    that is a terminal and no JSON is asked for."""
    if for_programs() or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from .terminal import bar

    with bar(printable(name)) as advance:
        yield advance
