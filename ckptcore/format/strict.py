"""Checks that every parser of the format makes: nothing is taken for what it is not."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

__all__ = ["DIMENSIONS", "exact", "exact_items", "only_plain", "short", "sizes", "unique", "whole"]

DIMENSIONS = 64  # as many as numpy has; each costs a level of recursion where boxes are cut


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def only_plain(items: Iterable[Any]) -> bool:
    """Whether nothing is in any of `items`: none is a container, a tensor or an object. Without a
    step of Python for each, for a list may have millions."""
    return _PLAIN.issuperset(map(type, items))


def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The dict of `pairs`. Raises ValueError when a key appears twice: readers would not agree on
    which one counts."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def whole(value: Any, below: int = 2**62) -> int:
    """`value` if it is an int (and no bool) from 0 to `below`, itself excluded. Raises
    ValueError."""
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{short(value)} is not a whole number below {below}")
    return value


def sizes(value: Any, below: int = 2**62) -> tuple[int, ...]:
    """A shape whose items can be counted, also when one of its sizes is 0. Raises ValueError,
    TypeError."""
    if len(value) > DIMENSIONS:
        raise ValueError(f"{len(value)} dimensions are more than {DIMENSIONS}")
    shape = tuple([whole(n) for n in value])
    whole(prod([n or 1 for n in shape]), below)
    return shape


def exact(value: Any, *kinds: type) -> Any:
    """`value` if it is of exactly one of these types: what a codec is given may be crafted, and
    then be anything."""
    if type(value) not in kinds:
        raise TypeError(f"a {type(value).__name__} is stored where a {kinds[0].__name__} belongs")
    return value


def exact_items(value: Any, *kinds: type) -> list[Any]:
    """`value` if it is a list of items of these types."""
    return [exact(item, *kinds) for item in exact(value, list)]


def short(value: Any, limit: int = 200) -> str:
    """`value` for a message: what a file says may be of any length."""
    text = repr(value[:limit] if isinstance(value, str | bytes | list) else value)
    return text if len(text) <= limit else text[:limit] + "..."
