"""Checks that every parser of the format makes: nothing is taken for what it is not."""

from __future__ import annotations

from typing import Any

__all__ = ["unique", "whole"]


def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The dict of `pairs`. Raises ValueError when a key appears twice: readers would not agree on which one counts."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def whole(value: Any, below: int = 2**62) -> int:
    """`value` if it is an int (and no bool) from 0 to `below`, itself excluded. Raises ValueError."""
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{value!r} is not a whole number below {below}")
    return value
