"""Every parameter of what is public is described where it is, on a line of its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest

import ckptcore

# By callable, what is not described yet. This list may only shrink.
UNDESCRIBED: dict[str, set[str]] = {}


# What calls of these take is described, too; of other classes only how they are made.
METHODS_OF = {
    "CheckpointCoordinator",
    "CheckpointManager",
    "CheckpointView",
    "PreemptionGuard",
    "RetentionPolicy",
    "SaveHandle",
}
# Nobody outside makes these: contracts, and what the engine hands out.
NOT_MADE = {
    "CheckpointView",
    "Communicator",
    "RetentionPolicy",
    "SaveHandle",
    "Stateful",
    "StatefulProvider",
    "Storage",
}


def public_callables() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """(name, what takes the parameters, docstring that describes them)."""
    for name in ckptcore.__all__:
        found = getattr(ckptcore, name)
        if inspect.isfunction(found):
            yield name, found, inspect.getdoc(found) or ""
        elif inspect.isclass(found) and not issubclass(found, BaseException | Enum):
            if name not in NOT_MADE:
                yield name, found, found.__doc__ or ""
            for member, method in vars(found).items() if name in METHODS_OF else ():
                method = inspect.unwrap(getattr(method, "__func__", method))
                if inspect.isfunction(method) and not member.startswith("_"):
                    yield f"{name}.{member}", method, inspect.getdoc(method) or ""


def parameters(function: Callable[..., Any]) -> list[str]:
    try:
        found = inspect.signature(function).parameters
    except ValueError:
        return []
    return [name for name in found if name not in ("self", "cls", "_") and name[0] != "_"]


def undescribed(function: Callable[..., Any], text: str) -> set[str]:
    described = {
        name
        for line in text.splitlines()
        if (match := re.match(r"\s*(\*{0,2}\w+(?:, \*{0,2}\w+)*): \S", line))
        for name in re.split(r", ", match.group(1).replace("*", ""))
    }
    return set(parameters(function)) - described


CALLABLES = {name: (function, text) for name, function, text in public_callables()}


@pytest.mark.parametrize("name", CALLABLES)
def test_every_parameter_has_a_line(name: str) -> None:
    assert undescribed(*CALLABLES[name]) <= UNDESCRIBED.get(name, set())


def test_the_list_has_nothing_that_is_described() -> None:
    """Of callables that are gone, too."""
    left = {name: undescribed(*CALLABLES[name]) for name in UNDESCRIBED if name in CALLABLES}
    assert left == UNDESCRIBED
