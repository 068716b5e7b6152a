"""What travels between ranks: plain values, and dataclasses that are marked as messages.

A message is built in the same class on the rank that gets it, so both sides read fields by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, TypeVar

import msgpack

from .. import errors
from ..errors import CheckpointError, RankFailed
from ..format.values import TensorRef, decode, encode

M = TypeVar("M", bound=type)

_classes: dict[str, type] = {}
_fields: dict[type, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {}  # name, and its values


def message(cls: M) -> M:
    """Mark a frozen dataclass as one that ranks may send to each other, alone or in lists, tuples
    and dicts, with plain values or other messages in its fields."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    _classes[name], names = cls, [field.name for field in fields(cls)]
    # attrgetter of two names or more gives a tuple
    _fields[cls] = name, attrgetter("__class__", *names)
    return cls


def packed(value: Any) -> bytes:
    """Bytes of `value`: the value itself, in which numbers stand for its messages, and then each
    message. Raises UnsupportedValue for what can not travel."""
    found: list[Any] = []

    def number_of(_: tuple[Any, ...], item: Any) -> TensorRef | None:
        if type(item) not in _fields:
            return None
        found.append(item)
        return TensorRef(len(found) - 1)

    if number_of((), value) is None:
        parts = [encode(value, number_of)]
    else:
        parts = [b""]  # the first message
    for item in found:  # it grows: messages hold messages
        name, values = _fields[type(item)]
        parts.append(encode([name, *values(item)[1:]], number_of))
    return bytes(msgpack.packb(parts))


def unpacked(data: bytes) -> Any:
    """The value that `packed` was given."""
    first, *rest = msgpack.unpackb(data)
    made: dict[int, Any] = {}
    for number in reversed(range(len(rest))):  # those that a message holds come after it
        name, *values = decode(rest[number], lambda ref: made[ref.index])
        made[number] = _classes[name](*values)
    return decode(first, lambda ref: made[ref.index]) if first else made[0]


@message
@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way to other ranks. kind: its class in the tree of errors; "" for others.
    facts: its attributes that can travel. causes: what failed, by rank."""

    kind: str
    message: str
    facts: dict[str, Any]
    causes: dict[int, str]

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kind = type(error).__name__
        if not isinstance(error, CheckpointError) or getattr(errors, kind, None) is not type(error):
            return cls("", f"{kind}: {_text(error)}", {}, {})
        facts = {}
        for name in error.facts:
            try:
                packed(value := getattr(error, name))
            except CheckpointError:
                continue
            facts[name] = value
        return cls(kind, _text(error), facts, error.causes or {})

    def cause(self) -> str:
        return f"{self.kind}: {self.message}" if self.kind else self.message

    def of_rank(self, rank: int) -> Failure:
        """The same, where it is not known to all by its words which rank has failed."""
        return replace(self, message=f"rank {rank}: {self.message}", causes={rank: self.cause()})

    def error(self) -> CheckpointError:
        kind = getattr(errors, self.kind) if self.kind else RankFailed
        error: CheckpointError = kind(self.message, **self.facts)
        error.causes = self.causes or None
        return error


def _text(error: BaseException) -> str:
    """What an error says, in words that can be posted: one that cannot say it must not keep the
    others waiting."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception as again:
        return f"(its text cannot be had: {type(again).__name__})"
