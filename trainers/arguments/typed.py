"""Types of the fields of dataclasses, checked at run time. Stricter than isinstance: True is no
number."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import dacite

from .errors import InvalidArgument

__all__ = ["check_types", "converted", "nested_class", "type_hints"]


@cache
def type_hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def nested_class(cls: type, name: str) -> type | None:
    hint = type_hints(cls).get(name)
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def converted(cls: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """An instance of a dataclass from a mapping, nested mappings included."""
    values = dict(values)
    for name, value in values.items():
        nested = nested_class(cls, name)
        if nested is not None and isinstance(value, Mapping):
            values[name] = converted(nested, value, f"{prefix}{name}.")
    try:
        return dacite.from_dict(cls, values, dacite.Config(strict=True, check_types=False))
    except dacite.UnexpectedDataError as error:
        name = min(str(key) for key in error.keys)
        choices = ", ".join(field.name for field in fields(cls))
        raise InvalidArgument(
            f"{prefix}{name}", values.get(name), "unknown name", f"there are {choices}"
        ) from None


def check_types(instance: Any, prefix: str = "") -> None:
    """Mappings become the dataclass that their field has, enumeration members their value, paths
    strings, whole numbers floats where the field is one; the rest must fit."""
    cls: Any = type(instance)
    for name, hint in type_hints(cls).items():
        if name not in instance.__dataclass_fields__:
            continue
        value = getattr(instance, name)
        if isinstance(value, Enum):
            value = value.value
        nested = nested_class(cls, name)
        if nested is not None and isinstance(value, Mapping):
            value = converted(nested, value, f"{prefix}{name}.")
        members = _members(hint)
        if isinstance(value, os.PathLike) and str in members:
            value = os.fspath(value)
        elif isinstance(value, tuple) and list in members:
            value = list(value)
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and float in members
            and int not in members
        ):
            value = float(value)
        if not _fits(value, hint):
            raise InvalidArgument(
                f"{prefix}{name}",
                value,
                f"is of type {type(value).__name__}",
                f"give {_spelled(hint)}",
            )
        setattr(instance, name, value)


def _members(hint: Any) -> tuple[Any, ...]:
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(get_origin(member) or member for member in members)


def _fits(value: Any, hint: Any) -> bool:
    for member in _members(hint):
        if member is Any:
            return True
        if isinstance(value, bool):
            if member is bool:
                return True
        elif isinstance(value, member) or (member is float and isinstance(value, int)):
            return True
    return False


def _spelled(hint: Any) -> str:
    words = {
        str: "a string",
        int: "a whole number",
        float: "a number",
        bool: "True or False",
        dict: "a mapping",
        list: "a list",
        type(None): "None",
    }
    return " or ".join(
        words.get(member, f"a mapping or {member.__name__}") for member in _members(hint)
    )
