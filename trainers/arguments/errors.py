"""What is wrong with arguments: name, value, why it cannot be, and what to give instead."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

from ckptcore import CheckpointError

HIDDEN = "<hidden>"
_SECRET = ("token", "secret", "password", "api_key")

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200
_shown.maxdict = _shown.maxlist = _shown.maxtuple = 10


class InvalidArgument(ValueError):
    """Arguments that cannot work: of the first its name, the value given, why it cannot be, and
    what to give instead.

    Values that are secret by their name, or look like a token, are neither printed nor kept.

    faults: one InvalidArgument for each argument that is wrong, this one first. The message has a
        line for each.
    """

    def __init__(
        self,
        name: str,
        value: object,
        reason: str,
        instead: str,
        others: Iterable[InvalidArgument] = (),
    ) -> None:
        secret = isinstance(value, str) and (
            any(word in name.lower() for word in _SECRET) or value.startswith("hf_")
        )
        line = f"{name}={HIDDEN if secret else _shown.repr(value)}: {reason}; {instead}"
        self.name, self.value = name, HIDDEN if secret else value
        self.reason, self.instead = reason, instead
        self.faults: tuple[InvalidArgument, ...] = (self, *others)
        super().__init__("\n".join([line, *(str(other) for other in self.faults[1:])]))


def raise_any(faults: Iterable[InvalidArgument]) -> None:
    """Raise one InvalidArgument for all of these, where there are any."""
    found = list(faults)
    if len(found) == 1:
        raise found[0]
    if found:
        first = found[0]
        raise InvalidArgument(first.name, first.value, first.reason, first.instead, found[1:])


class DataNotFound(CheckpointError, FileNotFoundError):
    """A `data` entry, or a configuration, that names no file."""

    facts = ("path",)
    path: str | None
