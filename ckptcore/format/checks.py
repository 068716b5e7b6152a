"""Checks that every parser of the format makes: nothing is taken for what it is not, and no memory
or stack is spent on what bytes only claim about themselves.

Records on disk, described once: the annotations of a dataclass say what a file may hold.

int                  a whole number from 0 to 2**62, itself excluded; a bool is none
float                a number, or one of the texts "nan", "inf" and "-inf", which JSON lacks
str, bool, bytes     exactly that; Any: whatever the file has
Literal["a", "b"]    one of these texts
Annotated[T, check]  a T that `check` gives back, or refuses with a ValueError
T | None, list[T], dict[str, T]
a NamedTuple         a list of its fields, in order
a dataclass          an object. Its field `extra` keeps what is not known, so that fields of a
                     newer minor version survive; NOT_STORED fields are not in the file, and
                     OPTIONAL ones only where they differ from their default.
"""

from __future__ import annotations

import copy
import json
import re
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from math import prod
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgpack

from ..errors import CheckpointCorrupt, CheckpointError

__all__ = [
    "DIMENSIONS",
    "MAX_DEPTH",
    "NOT_STORED",
    "OPTIONAL",
    "check_declared",
    "check_depth",
    "containers_copied",
    "exact",
    "exact_items",
    "only_plain",
    "parsing",
    "read_json",
    "short",
    "sizes",
    "typed",
    "unique",
    "whole",
    "written",
]

DIMENSIONS = 64  # as many as numpy has; each costs a level of recursion where boxes are cut

PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})


def only_plain(items: Iterable[Any]) -> bool:
    """Whether nothing is in any of `items`: none is a container, a tensor or an object. Without a
    step of Python for each, for a list may have millions."""
    return PLAIN_TYPES.issuperset(map(type, items))


def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The dict of `pairs`. Raises ValueError when a key appears twice: readers would not agree on
    which one counts."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def read_json(text: str) -> Any:
    """What strict JSON says. Raises ValueError for a name that an object has twice, and for the
    constants that JSON lacks."""
    return json.loads(text, object_pairs_hook=unique, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


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


_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    struct.error,
    msgpack.UnpackException,
)


@contextmanager
def parsing(
    what: str, file: str | None, path: str | None = None, kind: str = "format"
) -> Iterator[None]:
    """Whatever a parser fails with on bytes that are not what they should be is CheckpointCorrupt:
    `what`, and why."""
    try:
        yield
    except CheckpointError:
        raise
    except _MALFORMED as error:
        raise CheckpointCorrupt(
            f"{what} ({type(error).__name__}: {short(str(error))})", path=path, file=file, kind=kind
        ) from None


MAX_DEPTH = 64  # each level of extensions costs some 50 KB of the C stack when it is read

# msgpack makes room for up to 10,000 items of a list, 80 KB, when it has read its length. So few
# lengths do no harm.
FEW = 8
_LONG = (b"\xdc", b"\xdd", b"\xde", b"\xdf")

# Tokens that hold nothing: numbers, nil, booleans, and extensions of fixed size. No more at once
# than the regular expression engine takes little memory for.
_PLAIN = re.compile(
    rb"(?:[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1\xd4]..|\xd5.{3}|[\xca\xce\xd2].{4}|\xd6.{5}|"
    rb"[\xcb\xcf\xd3].{8}|\xd7.{9}|\xd8.{17}){1,1000}+",
    re.DOTALL,
)
# First byte -> bytes of the length that follows, and bytes that come on top of that length.
_SKIPPED = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
}
# First byte -> bytes of the count that follows, and values for each.
_COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def check_declared(data: bytes) -> None:
    """Raises ValueError when lists and dicts in this msgpack say that they have more items than
    there are bytes.

    Each item takes a byte at least, so what is whole never does. Lists in lists that only say they
    are long would cost a thousand times the memory of the data, and that again for each level of
    extensions.
    """
    # Each length is three bytes at least.
    if len(data) < 3 * FEW or sum(map(data.count, _LONG)) <= FEW:
        return
    left, at, end = len(data), 0, len(data)
    while at < end:
        if plain := _PLAIN.match(data, at):
            at = plain.end()
            continue
        first = data[at]
        at += 1
        if first in _SKIPPED:
            width, more = _SKIPPED[first]
            at += width + more + int.from_bytes(data[at : at + width], "big")
        elif first in _COUNTED:
            width, each = _COUNTED[first]
            left -= each * int.from_bytes(data[at : at + width], "big")
            at += width
        elif 0xA0 <= first <= 0xBF:
            at += first & 0x1F
        elif first <= 0x8F:
            left -= 2 * (first & 0x0F)
        elif first <= 0x9F:
            left -= first & 0x0F
        else:
            return  # no msgpack, or cut off: the decoder says so, and there is nothing behind it
        if left < 0:
            raise ValueError("lists are said to have more items than there are bytes")


_NESTED = (list, dict, tuple, deque)


def check_depth(value: Any) -> None:
    """Raises ValueError for what is nested deeper than anything that is ever stored: it would
    overflow the stack of whoever walks through it."""
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(2 * MAX_DEPTH):
        if not level:
            return
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [
            part
            for parts in inner
            if not only_plain(parts)
            for part in parts
            if isinstance(part, _NESTED)
        ]
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def containers_copied(value: Any, leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """`value` with dicts, lists, tuples, sets and deques of its own, and `leaf(item)` for
    everything else."""
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = containers_copied(item, leaf)
        return made
    if type(value) in (list, tuple, set):
        return type(value)(containers_copied(item, leaf) for item in value)
    if type(value) is deque:
        return deque((containers_copied(item, leaf) for item in value), value.maxlen)
    return leaf(value)


NOT_STORED = {"not_stored": True}
OPTIONAL = {"optional": True}


def typed(kind: Any, value: Any) -> Any:
    """`value`, as a file has it, made into what the annotation `kind` says. Objects are emptied, so
    that a long list is not there twice. Raises ValueError, TypeError or OverflowError, which says
    the field that is wrong."""
    if kind is int:
        return whole(value)
    if kind in (str, bool, bytes):
        return exact(value, kind)
    origin, args = _parts(kind)
    if origin is list:
        return [typed(args[0], item) for item in exact(value, list)]
    if origin is dict:
        return {
            typed(args[0], key): _named(key, args[1], item)
            for key, item in exact(value, dict).items()
        }
    if origin is UnionType:
        return None if value is None else typed(args[0], value)
    if origin is Annotated:
        return args[1](typed(args[0], value))
    if origin is Literal:
        return _one_of(value, args)
    if origin is tuple:
        if len(exact(value, list)) != len(args):
            raise ValueError(f"{short(value)} has not {len(args)} items")
        return kind(*map(typed, args, value))
    if origin is None:
        return value if kind is Any else _number(value)
    found = exact(value, dict)
    if lacking := [n for n, _, optional in args if n not in found and not optional]:
        raise ValueError(f"{', '.join(lacking)} must be there")
    known = {n: _named(n, part, found.pop(n)) for n, part, _ in args if n in found}
    return kind(**known, extra=found)


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """What kind of annotation this is, and what it is made of. Of a dataclass (name, annotation,
    whether it may lack) of each field."""
    if args := get_args(kind):
        return get_origin(kind), args
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return kind, tuple((f.name, hints[f.name], bool(f.metadata)) for f in _stored(kind))
    if hasattr(kind, "_fields"):
        return tuple, tuple(get_type_hints(kind, include_extras=True).values())
    return None, ()  # Any, float


def written(record: Any) -> dict[str, Any]:
    """The object that a file has for a record; records in it are left as they are. Raises TypeError
    for what is none, as JSON does."""
    if not hasattr(record, "extra"):
        raise TypeError(f"a {type(record).__name__} is not JSON")
    found = {f.name: getattr(record, f.name) for f in _stored(type(record))}
    for f in fields(record):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if f.metadata == OPTIONAL and found[f.name] == default:
            del found[f.name]
    return {**record.extra, **found}


def _stored(cls: Any) -> list[Field[Any]]:
    return [f for f in fields(cls) if f.name != "extra" and f.metadata != NOT_STORED]


def _named(name: str, kind: Any, value: Any) -> Any:
    try:
        return typed(kind, value)
    except CheckpointError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name[:100]}: {error}") from None


def _one_of(value: Any, words: tuple[str, ...]) -> Any:
    if value not in words:
        raise ValueError(f"{short(value)} is not one of {', '.join(words)}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        raise ValueError(f"{short(value)} is not a number")
    return float(exact(value, float, int, str))
