"""Types of arguments with their constraints, and how a type is spelled for a reader.

A field is `name: Type = arg(default, "what it means")`. The text is used in errors, in `--help` and
in docs/arguments.md. Types are strict: True is no number, "3" is none either.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, StrictBool, StrictFloat, StrictInt, StrictStr

from .errors import InvalidArgument

_LARGEST_SEED = 2**32 - 1  # numpy's generator takes 32 bits


def arg(default: Any, text: str) -> Any:
    """A field of a class of arguments. default: its value, or what makes one (dict, a class)."""
    how = {"default_factory": default} if callable(default) else {"default": default}
    return field(**how, metadata={"text": text})


def _steps(value: int | float) -> int | float:
    if value >= 1 and value != int(value):
        reason, instead = "no whole number of steps", "give a whole number, or a share below 1.0"
        raise InvalidArgument("", value, reason, instead)
    return value


Flag = StrictBool
Whole = StrictInt
Real = StrictFloat
Text = StrictStr
Options = dict[str, Any]
Count = Annotated[StrictInt, Ge(1)]
Natural = Annotated[StrictInt, Ge(0)]
Seed = Annotated[StrictInt, Ge(0), Le(_LARGEST_SEED)]
SeedOrNone = Annotated[StrictInt, Ge(-1), Le(_LARGEST_SEED)]
Number = Annotated[StrictFloat, Ge(0)]
Positive = Annotated[StrictFloat, Gt(0)]
Share = Annotated[StrictFloat, Ge(0), Le(1)]
Below1 = Annotated[StrictFloat, Ge(0), Lt(1)]
Period = Annotated[StrictInt | StrictFloat, Gt(0), AfterValidator(_steps)]
Strategy = Literal["no", "steps", "epoch"]
Level = Literal["passive", "debug", "info", "warning", "error", "critical"]
DType = Literal["float32", "bfloat16", "float16"]

_WORDS = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    dict: "a mapping",
    list: "a list of them",
    type(None): "None",
    Any: "anything",
}


@dataclass(frozen=True)
class Argument:
    """A field of a class of arguments.

    hint: its type with constraints. text: what it means. default: as an untouched instance has it.
    group: the class of the arguments inside, for a nested one.
    """

    name: str
    hint: Any
    text: str
    default: Any
    group: type | None

    @property
    def kinds(self) -> frozenset[Any]:
        """The alternatives of its type, without constraints."""
        return frozenset(get_origin(member) or member for member, _ in _members(self.hint))

    @property
    def allowed(self) -> str:
        """What may be given, in words."""
        words = [_spelled(hint, limits) for hint, limits in _members(self.hint)]
        if "a number above 0" in words:
            words = [word.replace("a whole number above 0", "a number above 0") for word in words]
        return " or ".join(dict.fromkeys(words)) if words[1:] else words[0].removesuffix(" of them")

    def reason_against(self, value: Any) -> str:
        """Why a value that was refused is none of those."""
        kinds = self.kinds
        if type(value) in (int, float) and kinds & {int, float}:
            if not math.isfinite(value):
                return "not a finite number"
            return "out of range" if float in kinds or isinstance(value, int) else "not whole"
        of_choices = isinstance(value, str) and Literal in kinds
        if of_choices or (isinstance(value, list | tuple) and list in kinds):
            return "unknown"
        return f"is of type {type(value).__name__}"


@cache
def arguments_of(cls: type) -> Mapping[str, Argument]:
    """The fields of a class of arguments, by name, in their order."""
    hints, found = get_type_hints(cls, include_extras=True), {}
    for one in fields(cls):
        hint = hints[one.name]
        default = one.default if one.default_factory is MISSING else one.default_factory()
        group = hint if isinstance(hint, type) and is_dataclass(hint) else None
        text = one.metadata.get("text", "")
        found[one.name] = Argument(one.name, hint, text, default, group)
    return found


def _members(hint: Any, limits: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The alternatives of a type, each with the constraints that hold for it."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        yield from _members(inner, (*limits, *more))
    elif get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _members(member, limits)
    else:
        yield hint, limits


def _spelled(hint: Any, limits: tuple[Any, ...]) -> str:
    origin = get_origin(hint) or hint
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if is_dataclass(origin):
        return f"a mapping or {getattr(origin, '__name__', origin)}"
    word = _WORDS.get(origin, str(origin))
    if origin not in (int, float):
        return word
    low = next((m for m in limits if isinstance(m, Ge | Gt)), None)
    high = next((m for m in limits if isinstance(m, Le | Lt)), None)
    if low is not None:
        word += f" from {low.ge}" if isinstance(low, Ge) else f" above {low.gt}"
        if high is None and isinstance(low, Ge):
            word += " up"
    if high is not None:
        word += f" to {high.le}" if isinstance(high, Le) else f" and below {high.lt}"
    return word
