"""What travels between ranks: plain values, and dataclasses that are marked as messages.

A message is built in the same class on the rank that gets it, so both sides read fields by name.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import msgpack

from ..format.values import TensorRef, decode, encode

__all__ = ["message", "packed", "unpacked"]

M = TypeVar("M", bound=type)

_classes: dict[str, type] = {}
_names: dict[type, str] = {}


def message(cls: M) -> M:
    """Mark a frozen dataclass as one that ranks may send to each other, alone or in lists, tuples
    and dicts, with plain values or other messages in its fields."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    _classes[name], _names[cls] = cls, name
    return cls


def packed(value: Any) -> bytes:
    """Bytes of `value`: the value itself, in which numbers stand for its messages, and then each
    message. Raises UnsupportedValue for what can not travel."""
    found: list[Any] = []

    def number_of(_: tuple[Any, ...], item: Any) -> TensorRef | None:
        if type(item) not in _names:
            return None
        found.append(item)
        return TensorRef(len(found) - 1)

    parts = [encode(value, number_of)]
    for item in found:  # it grows: messages hold messages
        names = [field.name for field in fields(item)]
        parts.append(encode([_names[type(item)], *(getattr(item, n) for n in names)], number_of))
    return bytes(msgpack.packb(parts))


def unpacked(data: bytes) -> Any:
    """The value that `packed` was given."""
    first, *rest = msgpack.unpackb(data)
    made: dict[int, Any] = {}
    for number in reversed(range(len(rest))):  # those that a message holds come after it
        name, *values = decode(rest[number], lambda ref: made[ref.index])
        made[number] = _classes[name](*values)
    return decode(first, lambda ref: made[ref.index])
