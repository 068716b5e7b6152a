"""slow_tail.toml names tests that are there, with cases that are there, and says what stays."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TAILS = tomllib.loads((HERE / "slow_tail.toml").read_text())


@pytest.mark.parametrize("name", TAILS)
def test_an_entry_names_a_test_and_what_states_its_property_in_ci(name: str) -> None:
    file, _, test = name.partition("::")
    tree = ast.parse((HERE / file).read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert test in functions
    assert len(TAILS[name]["says"]) > 10
    has_cases = any("parametrize" in ast.unparse(d) for d in functions[test].decorator_list)
    takes_cases = any(
        arg.arg in ("make_storage", "new_storage") for arg in functions[test].args.args
    )
    assert bool(TAILS[name]["stays"]) == (has_cases or takes_cases)


def test_cases_that_stay_are_cases(request: pytest.FixtureRequest) -> None:
    """Of the files that were collected with this one: with all of them in `make test`."""
    collected: dict[str, set[str]] = {}
    for item in request.session.items:
        name, _, case = item.nodeid.removeprefix("tests/").partition("[")
        collected.setdefault(name, set()).add(case.removesuffix("]"))
    wrong = {
        name: set(tail["stays"]) - collected[name]
        for name, tail in TAILS.items()
        if name in collected and not set(tail["stays"]) <= collected[name]
    }
    assert wrong == {}
