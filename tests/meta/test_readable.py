"""What a reader has to bear: the length of functions and lines, and words. Lists only shrink."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import ckptcore

REPO = Path(ckptcore.__file__).parent.parent
PRODUCT = [
    path
    for room in ("ckptcore", "trainers", "tools")
    for path in sorted((REPO / room).rglob("*.py"))
]
EVERYWHERE = [
    *PRODUCT,
    *(path for room in ("tests", "benchmarks") for path in sorted((REPO / room).rglob("*.py"))),
]

MOST_LINES = 60
LONG_FUNCTIONS = {
    "CheckpointManager.__init__": 81,
    "CheckpointManager._load": 61,
    "CheckpointManager.restore": 68,
    "Saving.finish": 105,
    "_Decoder.ext_value": 62,
    "_copy": 62,
    "capture": 103,
    "check_minimal": 76,
    "check_parts": 84,
    "join_load": 61,
    "join_save": 65,
}


def functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, int]]:
    """(qualified name, lines without its docstring) of every function in a module."""
    for child in ast.iter_child_nodes(node):
        name = f"{outer}{getattr(child, 'name', '')}"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            assert child.end_lineno is not None
            yield name, child.end_lineno - child.lineno + 1 - docstring_lines(child)
            yield from functions(child, f"{name}.")
        else:
            yield from functions(child, f"{name}." if isinstance(child, ast.ClassDef) else outer)


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(function) is None:
        return 0
    first = function.body[0]
    assert first.end_lineno is not None
    return first.end_lineno - first.lineno + 1


def test_functions_fit_on_a_screen() -> None:
    long = {
        f"{path.relative_to(REPO)}: {name}": lines
        for path in PRODUCT
        for name, lines in functions(ast.parse(path.read_text()))
        if lines > LONG_FUNCTIONS.get(name, MOST_LINES)
    }
    assert long == {}, f"at most {MOST_LINES} lines beside the docstring"


# Neither can be broken: what a tool is to read on the line, and a part of a regular expression.
UNBROKEN = re.compile(r'  # (type: ignore|noqa).*|^ *r[bf]?"[^"]*"$')


def test_lines_are_short_and_formatted() -> None:
    wide = [
        f"{path.relative_to(REPO)}:{number}"
        for path in PRODUCT  # in tests whole programs stand in strings
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(UNBROKEN.sub("", line)) > 100
    ]
    assert wide == []
    skipped = [
        str(path.relative_to(REPO))
        for path in EVERYWHERE
        if re.search(r"# fmt: (skip|off)\b", path.read_text()) and path != Path(__file__)
    ]
    assert skipped == []
