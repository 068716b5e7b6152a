"""How the site is made from the project's own texts: hooks of mkdocs and of griffe, so that nothing
is written twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

README = Path(__file__).parent.parent / "README.md"
# A parameter of a docstring: its name, and text that may go on in indented lines.
PARAMETER = re.compile(r"^([a-z_]+): (.*(?:\n    .*)*)$", re.MULTILINE)


def on_page_read_source(page: Any, **_: Any) -> str | None:
    """The README, its links as they are from within docs/, for index.md; None for other pages."""
    if page.file.src_path != "index.md":
        return None
    return README.read_text(encoding="utf-8").replace("](docs/", "](")


def as_list(docstring: str) -> str:
    """The parameters of a docstring, one a line, as items of a Markdown list."""
    return PARAMETER.sub(lambda found: f"* **`{found[1]}`**: {found[2]}", docstring)


class ParametersAsList(griffe.Extension):
    """Shows the parameters of each docstring as a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)
