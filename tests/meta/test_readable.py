"""What a reader has to bear: the length of functions and lines, and words. Lists only shrink."""

from __future__ import annotations

import ast
import re
from collections import Counter
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
LONG_FUNCTIONS = {"CheckpointManager.__init__": 80}


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


def test_the_list_of_long_functions_has_none_that_became_short() -> None:
    found: Counter[str] = Counter()
    for path in PRODUCT:
        for name, lines in functions(ast.parse(path.read_text())):
            found[name] = max(found[name], lines)
    shorter = {name for name, lines in LONG_FUNCTIONS.items() if found[name] < lines}
    assert shorter == set(), "to be lowered, or taken out"


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


# Words that DESIGN section 8 replaces: in any name of the engine, and in names of functions,
# classes, parameters and fields only, where they serve well for a variable of three lines. How often
# each may still stand there; at 0 the word is gone.
OLD_WORDS: dict[str, int] = {
    "agree": 0,
    "apart": 0,
    "captured": 0,
    "choice": 0,
    "elsewhere": 0,
    "judge": 0,
    "look": 0,
    "looked": 0,
    "meet": 0,
    "modest": 0,
    "place": 2,
    "places": 0,
    "said": 0,
    "seen": 3,
    "settle": 0,
    "settled": 0,
    "stay": 0,
    "tell": 0,
    "together": 0,
    "told": 0,
    "truth": 0,
}
OLD_WORDS_IN_DEFINITIONS: dict[str, int] = {
    "copies": 4,
    "found": 14,
    "here": 0,
    "its": 0,
    "own": 8,
    "piece": 2,
    "pieces": 3,
    "share": 2,
    "shares": 0,
    "what": 14,
}


def names(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """(name, whether it is defined here and seen from elsewhere) of all identifiers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, True
            if isinstance(node, ast.ClassDef):
                fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                yield from ((target.id, True) for target in fields if isinstance(target, ast.Name))
        elif isinstance(node, ast.arg):
            yield node.arg, node.arg != "self"
        elif isinstance(node, ast.Name):
            yield node.id, False
        elif isinstance(node, ast.Attribute):
            yield node.attr, False


def words_of(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def test_old_words_go() -> None:
    everywhere: Counter[str] = Counter()
    defined: Counter[str] = Counter()
    for path in PRODUCT:
        if path.parts[len(REPO.parts)] != "ckptcore":
            continue
        everywhere.update(words_of(path.stem))
        for name, is_definition in names(ast.parse(path.read_text())):
            everywhere.update(words_of(name))
            defined.update(words_of(name) if is_definition else ())
    for found, most in ((everywhere, OLD_WORDS), (defined, OLD_WORDS_IN_DEFINITIONS)):
        more = {word: (found[word], n) for word, n in most.items() if found[word] > n}
        assert more == {}, "now, and at most"
        fewer = {word: (found[word], n) for word, n in most.items() if found[word] < 0.9 * n}
        assert fewer == {}, "now, and the limit to be lowered"
