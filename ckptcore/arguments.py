"""Checks of what users pass in: each raises InvalidState that names the argument, what it was, and
what it may be.

An argument is checked where it comes in. What is wrong with one then shows in the line that the
user wrote, and never as a checkpoint that nobody can read.
"""

from __future__ import annotations

import math
import operator
import os
import re
import threading
from collections.abc import Callable, KeysView, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from .errors import InvalidState

COUNT_LIMIT = 2**62  # of every whole number in a manifest; see docs/format.md
NAME_BYTES = 255
MOST_THREADS = 1024


def shown(value: Any, limit: int = 100) -> str:
    """`value` for a message, whatever it is: of any length, and with a repr that fails."""
    try:
        text = repr(value)
    except Exception:  # a long int, or code of the user's
        text = f"a {type(value).__qualname__}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else f"{text[:limit]}..."


def check_flag(name: str, value: Any) -> bool:
    """`value` if it is True or False."""
    if type(value) is not bool:
        raise InvalidState(f"{name} must be True or False, not {shown(value)}")
    return value


def check_flags(**flags: Any) -> None:
    """Each is True or False."""
    for name, value in flags.items():
        check_flag(name, value)


def check_one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    """`value` if it is one of these words."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidState(
            f"{name} must be one of {', '.join(map(repr, allowed))}, not {shown(value)}"
        )
    return value


def check_count(name: str, value: Any, least: int = 1, most: int = COUNT_LIMIT - 1) -> int:
    """`value` if it is an int of at least `least`, and at most `most`."""
    if type(value) is not int or not least <= value <= most:
        limit = "" if most == COUNT_LIMIT - 1 else f" and <= {most}"
        raise InvalidState(f"{name} must be a whole number >= {least}{limit}, not {shown(value)}")
    return value


def check_threads(name: str, value: Any) -> int | None:
    """`value` if it is a number of threads, or None for the default."""
    return None if value is None else check_count(name, value, 1, MOST_THREADS)


def check_number(name: str, value: Any) -> float:
    """`value` as a float if it is a finite number of at least 0."""
    number = _as_number(value)
    if not 0 <= number < math.inf:
        raise InvalidState(f"{name} must be a number >= 0, not {shown(value)}")
    return number


def _as_number(value: Any) -> float:
    """NaN for what is no number."""
    try:
        return math.nan if isinstance(value, bool | str | bytes | bytearray) else float(value)
    except Exception:  # a type of the user's own may raise anything
        return math.nan


def check_seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """`value` as a float if it is a time that threads can wait for. zero: 0 is one."""
    number = check_number(name, value)
    if not (number > 0 or zero) or number > threading.TIMEOUT_MAX:
        raise InvalidState(
            f"{name} must be a number of seconds {'>= 0' if zero else '> 0'}, not {shown(value)}"
        )
    return number


def checked_timeout(value: Any) -> float | None:
    """A time to wait for: None for as long as it takes; what is less than 0 is 0, as for
    threads."""
    if value is None:
        return None
    number = _as_number(value)
    if math.isnan(number):
        raise InvalidState(f"timeout must be None or a number of seconds, not {shown(value)}")
    return min(max(number, 0.0), threading.TIMEOUT_MAX)


def check_callable(name: str, value: Any) -> None:
    """None, or something that can be called."""
    if value is not None and not callable(value):
        raise InvalidState(
            f"{name} must be None or something that can be called, not {shown(value)}"
        )


def check_mapping(name: str, value: Any) -> dict[str, Any]:
    """A dict of its own with what is in `value`, whose keys are text; empty for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidState(f"{name} must be a dict, not {shown(value)}")
    made = dict(value)
    for key in made:
        if not isinstance(key, str):
            raise InvalidState(
                f"{name}: the name {shown(key)} must be text, not a {type(key).__qualname__}"
            )
        _check_text(f"{name}: the name {shown(key)}", key)
    return made


def _check_text(name: str, text: str) -> None:
    """Raises InvalidState for lone surrogates, which no file can have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidState(f"{name} has characters that UTF-8 lacks") from None


def checked_options(name: str, value: Any) -> dict[str, Any] | None:
    """Options of a storage, or None."""
    return None if value is None else check_mapping(name, value)


def check_hash(value: Any) -> None:
    """Raises InvalidState for a hash of arguments that is neither text nor None."""
    if value is not None and not isinstance(value, str):
        raise InvalidState(
            f"training_args_hash must be text, not {shown(value)}; pass str(...) of it"
        )
    _check_text("training_args_hash", value or "")


def check_name(name: str, value: Any) -> str:
    """`value` if it is printable text that is not empty, of at most 255 bytes in UTF-8."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise InvalidState(f"{name} must be printable text that is not empty, not {shown(value)}")
    if len(value.encode()) > NAME_BYTES:  # printable text has no lone surrogates
        raise InvalidState(
            f"{name} must have at most {NAME_BYTES} bytes, not {len(value.encode()):,}: "
            f"{shown(value)}"
        )
    return value


def check_path(name: str, value: Any) -> str:
    """The text of a path or URL."""
    try:
        text = os.fspath(value)
        if not isinstance(text, str):
            raise TypeError
    except Exception:  # a type of the user's own may raise anything
        what = f"{name} must be a path or a URL (text or a PathLike), not {shown(value)}"
        raise InvalidState(what) from None
    if not text.strip():
        hint = "" if name == "step" else " Pass '.' for the working directory"
        raise InvalidState(f"{name} is empty ({shown(value)}): is a variable not set?{hint}")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise InvalidState(
            f"{name} has characters that no file name can have: {shown(value)}"
        ) from None
    if "\0" in text:
        raise InvalidState(
            f"{name} has a null character, which no file name can have: {shown(value)}"
        )
    return text


def checked_step(step: Any) -> int:
    """A step as an int, from anything that is a whole number (numpy and 0-d tensors too)."""
    try:
        number = -1 if isinstance(step, bool) or _is_bool(step) else operator.index(step)
    except Exception:  # a type of the user's own may raise anything
        number = -1
    if not 0 <= number < COUNT_LIMIT:
        raise InvalidState(f"step must be a whole number >= 0 and < 2**62, not {shown(step)}")
    return number


def _is_bool(value: Any) -> bool:
    return str(getattr(value, "dtype", "")).endswith("bool")


def is_plain_name(text: Any) -> bool:
    """Whether a text may be the name of an entry of a root, and need not be a path."""
    return isinstance(text, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.=+-]*", text) is not None


def checked_which(step: Any, *, paths: bool = True) -> int | str:
    """Which checkpoint is meant: a step as an int, "latest", "best", a name, or (with `paths`) the
    text of a path or URL."""
    if isinstance(step, str) and step in ("latest", "best"):
        return step
    if isinstance(step, str | os.PathLike):
        if not paths and not (is_plain_name(step) and not str(step).isdecimal()):
            raise InvalidState(
                "a step is a whole number, 'latest', 'best' or the name that a save was given, not "
                f"{shown(step)}"
            )
        return check_path("step", step)
    return checked_step(step)


class Names:
    """What a user asks for by name: a name or pattern, several of them, or a function of a name.

    A pattern asks for the names that it matches and for all that lies below them: "model",
    "model/*" and "m*" ask for the component "model". `*` matches `/`, too.
    """

    def __init__(self, argument: str, value: Any, name: str = "a name") -> None:
        self.argument, self.function = argument, value if callable(value) else None
        found: Any = () if callable(value) else (value,) if isinstance(value, str) else value
        several = isinstance(found, list | tuple | set | frozenset | KeysView)
        if not several or not (
            callable(value) or (found and all(isinstance(n, str) and n for n in found))
        ):
            raise InvalidState(
                f"{argument} must be {name}, a pattern, a list of them or a function of a name, "
                f"not {shown(value)}"
            )
        self.patterns: list[str] = [*found]
        self.unused = {*self.patterns}

    def asks_for(self, name: str) -> bool:
        """Whether a pattern matches; functions are asked by `answer`."""
        return any(matches(pattern, name) for pattern in self.patterns)

    def answer(self, name: str) -> Any:
        """What the function says of a name, or whether a pattern matches, which is used then."""
        if self.function is not None:
            return answer_of(self.argument, self.function, name)
        matching = {pattern for pattern in self.patterns if matches(pattern, name)}
        self.unused -= matching
        return bool(matching)


def matches(pattern: str, name: str) -> bool:
    if name == pattern or name.startswith(f"{pattern}/") or fnmatchcase(name, pattern):
        return True
    above = pattern.removesuffix("/*")
    return above != pattern and fnmatchcase(name, above)


def answer_of(argument: str, function: Callable[..., Any], name: str, *more: Any) -> Any:
    """What a function that the user has given as `argument` answers of a name."""
    try:
        return function(name, *more)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise InvalidState(
            f"the function given as {argument} fails for {name!r} ({what})"
        ) from error
