"""Records on disk, described once: the annotations of a dataclass say what a file may hold.

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

from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from ..errors import CheckpointError
from .checks import exact, short, whole

__all__ = ["NOT_STORED", "OPTIONAL", "reader", "written"]

NOT_STORED = {"not_stored": True}
OPTIONAL = {"optional": True}

Reader = Callable[[Any], Any]


@cache
def reader(kind: Any) -> Reader:
    """What makes a value of this annotation of what a file has. It raises ValueError, TypeError or
    KeyError, and says which field is wrong."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return lambda value: _one_of(value, args)
    if args:
        inner = reader(args[0])
        return {
            Annotated: lambda value: args[1](inner(value)),
            UnionType: lambda value: None if value is None else inner(value),
            list: lambda value: [inner(item) for item in exact(value, list)],
            dict: lambda value: {
                inner(key): _at(key, reader(args[1]), item)
                for key, item in exact(value, dict).items()
            },
        }[origin]
    if is_dataclass(kind):
        return _record_reader(kind)
    if hasattr(kind, "_fields"):
        each = [reader(hint) for hint in get_type_hints(kind, include_extras=True).values()]
        return lambda value: kind(
            *(read(item) for read, item in zip(each, exact(value, list), strict=True))
        )
    return {Any: lambda value: value, int: whole, float: _number}.get(
        kind, lambda value: exact(value, kind)
    )


def _record_reader(cls: Any) -> Reader:
    hints = get_type_hints(cls, include_extras=True)
    readers = {f.name: (reader(hints[f.name]), bool(f.metadata)) for f in _stored(cls)}

    def read(value: Any) -> Any:
        rest = exact(value, dict)  # emptied, so that a long list is not there twice
        known = {
            name: _at(name, read_field, rest.pop(name))
            for name, (read_field, optional) in readers.items()
            if name in rest or not optional
        }
        return cls(**known, extra=rest)

    return read


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


def _at(name: str, read: Reader, value: Any) -> Any:
    try:
        return read(value)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{short(name)}: {error}") from None


def _one_of(value: Any, words: tuple[str, ...]) -> Any:
    if value not in words:
        raise ValueError(f"{short(value)} is not one of {', '.join(words)}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        raise ValueError(f"{short(value)} is not a number")
    return float(exact(value, float, int, str))
