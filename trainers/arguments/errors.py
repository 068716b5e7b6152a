"""What is wrong with an argument, said in full: its name, the value, why it cannot be, and what to
give instead."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence

from ckptcore import CheckpointError

__all__ = ["DataNotFound", "InvalidArgument", "one_of", "real", "whole"]

HIDDEN = "<hidden>"
_SECRET = ("token", "secret", "password", "api_key")

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200
_shown.maxdict = _shown.maxlist = _shown.maxtuple = 10


class InvalidArgument(ValueError):
    """An argument that cannot work: its name, the value given, why, and what to give instead.

    Values that are secret by their name, or look like a token, are neither printed nor kept.
    """

    def __init__(self, name: str, value: object, reason: str, instead: str) -> None:
        secret = isinstance(value, str) and (
            any(word in name.lower() for word in _SECRET) or value.startswith("hf_")
        )
        shown = HIDDEN if secret else _shown.repr(value)
        super().__init__(f"{name}={shown}: {reason}; {instead}")
        self.name = name
        self.value = HIDDEN if secret else value
        self.reason = reason
        self.instead = instead


class DataNotFound(CheckpointError, FileNotFoundError):
    """A `data` entry, or a configuration, that names no file."""

    facts = ("path",)
    path: str | None


def whole(
    name: str, value: object, at_least: int, at_most: int | None = None, instead: str = ""
) -> None:
    span = f"give a whole number from {at_least}" + (
        f" to {at_most}" if at_most is not None else " up"
    )
    if instead:
        span += f" ({instead})"
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(name, value, "not a whole number", span)
    if value < at_least or (at_most is not None and value > at_most):
        raise InvalidArgument(name, value, "out of range", span)


def real(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    above_low: bool = False,
    below_high: bool = False,
    instead: str = "",
) -> None:
    span = f"give a number {'above' if above_low else 'from'} {low:g}"
    span += "" if high == math.inf else f" {'and below' if below_high else 'to'} {high:g}"
    if instead:
        span += f" ({instead})"
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidArgument(name, value, "not a finite number", span)
    if (
        value < low
        or value > high
        or (above_low and value == low)
        or (below_high and value == high)
    ):
        raise InvalidArgument(name, value, "out of range", span)


def one_of(name: str, value: object, choices: Sequence[object], instead: str = "") -> None:
    # Compared by type too, since 0 and False are equal.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        names = ", ".join("None" if choice is None else str(choice) for choice in choices)
        raise InvalidArgument(
            name, value, "unknown", f"give one of {names}{f', or {instead}' if instead else ''}"
        )
