"""How arguments come to be: from the whole vocabulary, checked, with all that is wrong at once."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from .conflicts import conflicts
from .errors import HIDDEN, InvalidArgument, raise_any
from .exactness import plain
from .hugging_face import NAMES, UNSET_IN_HF, Wish, accelerator_faults, accelerator_silent, wishes
from .kinds import Argument, arguments_of

log = logging.getLogger("ckpt_trainers.arguments")


class _Built(type):
    """Makes instances by `_build`: a class takes every name, and what exists is valid."""

    def __call__(cls, **given: Any) -> Any:
        return _build(cls, given)  # type: ignore[arg-type]


class Arguments(metaclass=_Built):
    """Base of all classes of arguments, which are dataclasses whose fields are as kinds.py says."""

    takes_hugging_face: ClassVar[bool] = False  # its names, in this class and those derived
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True
    )

    def conflicts(self) -> Iterator[InvalidArgument]:
        """What does not go together."""
        return conflicts(self)

    def fault(self, name: str, reason: str, instead: str) -> InvalidArgument:
        return InvalidArgument(name, getattr(self, name), reason, instead)

    def as_dict(self) -> dict[str, Any]:
        """Plain values only."""
        return {name: plain(getattr(self, name)) for name in arguments_of(type(self))}

    def changed(self) -> dict[str, Any]:
        """The arguments that are not at their default; nested ones as mappings of the same."""
        untouched, found = type(self)(), {}
        for name in arguments_of(type(self)):
            value, default = getattr(self, name), getattr(untouched, name)
            if isinstance(value, Arguments):
                value, default = value.changed(), {}
            if not _equal(value, default):
                found[name] = value
        return found

    @classmethod
    def from_hf(cls, theirs: Any) -> Self:
        """From a `transformers.TrainingArguments`, or its `to_dict()`.

        Their values hold, their defaults included. Raises one InvalidArgument for all that cannot
        be followed.
        """
        values = dict(theirs if isinstance(theirs, Mapping) else theirs.to_dict())
        untouched = {f.name: f.default for f in (fields(theirs) if is_dataclass(theirs) else ())}
        ours = arguments_of(cls)
        for name, value in list(values.items()):
            row = NAMES.get(name)
            at_default = name in untouched and _equal(value, untouched[name])
            if name not in ours and (row is None or row.kind != "alias") and at_default:
                del values[name]  # nobody asked for it
        if untouched.get("remove_unused_columns") and theirs.remove_unused_columns:
            log.info("remove_unused_columns: columns are never removed; drop them in the dataset")
        warmup = values.get("warmup_steps")
        if isinstance(warmup, float):  # steps, or below 1 a share of them
            del values["warmup_steps"]
            values |= {"warmup_ratio": warmup} if warmup < 1 else {"warmup_steps": int(warmup)}
        return cls(**values)


A = TypeVar("A", bound=Arguments)


def resolve_arguments(cls: type[A], given: Mapping[str, Any] | Arguments | None = None) -> A:
    """Arguments of class `cls` from a mapping in the whole vocabulary, or from arguments of any
    class.

    Raises InvalidArgument: unknown, refused or contradictory names, and values that do not fit.
    """
    if isinstance(given, Arguments):
        if isinstance(given, cls) and (type(given) is cls or not _is_ours(type(given))):
            return given
        given = given.changed()  # what a plainer, or another trainer's, arguments say
    return cls(**{str(name): value for name, value in dict(given or {}).items()})


def _is_ours(cls: type) -> bool:
    """Whether a class of arguments is this project's; others are derived from it by its user."""
    return cls.__module__.startswith(__package__ or __name__)


def known_names(cls: type[Arguments]) -> list[str]:
    """All names that a class understands, if only to refuse them."""
    return list(dict.fromkeys([*arguments_of(cls), *NAMES]))


def native_name(name: str) -> str:
    """The native argument that a name of the whole vocabulary sets; itself where there is none."""
    row = NAMES.get(name)
    return row.target if row is not None and row.kind == "alias" else name


adapter = cache(TypeAdapter)


def _build(cls: type[Arguments], given: Mapping[str, Any]) -> Any:
    values = {name: _plain(value) for name, value in given.items()}
    faults = list(_translate(cls, values))
    try:
        made = adapter(cls).validate_python(values)
    except ValidationError as error:
        raise_any([*faults, *_faults_of(error, cls, values)])
        raise
    if not faults:
        faults += made.conflicts()
        for name in arguments_of(cls):
            group = getattr(made, name)
            faults += [
                InvalidArgument(f"{name}.{fault.name}", fault.value, fault.reason, fault.instead)
                for fault in (group.conflicts() if isinstance(group, Arguments) else ())
            ]
    raise_any(faults)
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _translate(cls: type[Arguments], values: dict[str, Any]) -> Iterator[InvalidArgument]:
    """Leave native names only in `values`; what is wrong with the others."""
    ours, asked, silent = arguments_of(cls), list[Wish](), list[str]()
    for name in list(values):
        row = NAMES.get(name) if cls.takes_hugging_face else None
        if row is None or (name in ours and name != "accelerator_config"):
            if name not in ours:
                yield _not_ours(cls, name, values.pop(name))
            elif values[name] is None and name in UNSET_IN_HF and cls.takes_hugging_face:
                del values[name]
            continue
        value = values.pop(name)
        untouched = row.is_untouched(value)
        is_ours = row.target.partition(".")[0] in ours
        if is_ours and (not untouched or (value and name == "accelerator_config")):
            found = list(wishes(row, value))
            asked += [wish for wish in found if isinstance(wish, Wish)]
            yield from (fault for fault in found if isinstance(fault, InvalidArgument))
        elif row.kind == "no effect" and not untouched:
            silent.append(f"{name} ({row.reason})")
        elif row.kind == "refused" and not untouched:
            yield InvalidArgument(name, value, row.reason, row.instead)
        elif not untouched:
            yield _not_ours(cls, name, value)
    yield from _grant(cls, sorted(asked, key=lambda wish: "." in wish.target), values)
    if "accelerator_config" in values:
        given = values["accelerator_config"]
        settings = {k: v for k, v in given.items() if v is not None}
        values["accelerator_config"] = settings
        yield from accelerator_faults(settings)
        silent += accelerator_silent(settings)
    if silent and os.environ.get("RANK", "0") == "0":
        log.info("arguments without effect: %s", "; ".join(silent))


def _grant(
    cls: type[Arguments], asked: Iterable[Wish], values: dict[str, Any]
) -> Iterator[InvalidArgument]:
    """Put what aliases ask for into `values`, unless something else was given."""
    granted: dict[str, Wish] = {}
    for wish in asked:
        group, _, name = wish.target.rpartition(".")
        inside = _inside(values, group) if group else values
        if inside is None:
            continue  # of the wrong type, which is said when types are checked
        earlier = granted.get(wish.target)
        said = name in inside and not _equal(inside[name], wish.value)
        if earlier is not None and not _equal(earlier.value, wish.value):
            other = earlier.source
            other += "" if "=" in other else f"={earlier.given!r}"
        elif said and (wish.firm or not _equal(inside[name], _default(cls, wish.target))):
            other = f"{wish.target}={inside[name]!r}"
        else:
            inside[name] = wish.value
            granted[wish.target] = wish
            continue
        alternatives = f"give one of {wish.source} and {other.partition('=')[0]}"
        yield InvalidArgument(wish.source, wish.given, f"contradicts {other}", alternatives)


def _inside(values: dict[str, Any], group: str) -> dict[str, Any] | None:
    """What was given for a group, as a mapping of its own that can be added to."""
    given = values.get(group, {})
    if isinstance(given, Arguments):
        given = given.changed()  # of an instance only what differs is known to be meant
    if not isinstance(given, Mapping):
        return None
    values[group] = dict(given)
    return values[group]  # type: ignore[no-any-return]


def _default(cls: type[Arguments], target: str) -> Any:
    group, _, name = target.rpartition(".")
    inner = arguments_of(cls)[group].group if group else cls
    if inner is None:  # accelerator_config, of groups the one that is a plain mapping
        return False if name == "split_batches" else None
    return arguments_of(inner)[name].default


def _not_ours(cls: type[Arguments], name: str, value: Any) -> InvalidArgument:
    """A name that is another trainer's, or nobody's."""
    if not cls.takes_hugging_face:
        return unknown_name(name, value, arguments_of(cls), prefix="")
    target = native_name(name).partition(".")[0]
    owners = [
        owner.__name__.replace("ingArguments", "er")
        for owner in _family(Arguments)
        if name in owner.__annotations__ or target in owner.__annotations__
    ]
    if not owners:
        return unknown_name(name, value, arguments_of(cls))
    listed = " and ".join([", ".join(owners[:-1]), *owners[-1:]]).removeprefix(" and ")
    instead = f"use {listed.replace(' and ', ' or ')}, or leave it out"
    return InvalidArgument(name, value, f"an argument of {listed} only", instead)


def _family(cls: type[Arguments]) -> Iterator[type[Arguments]]:
    """This project's classes of arguments of trainers."""
    for derived in cls.__subclasses__():
        if derived.takes_hugging_face and _is_ours(derived):
            yield derived
            yield from _family(derived)


# What people call things elsewhere: part of a name, and what is meant.
_ELSEWHERE = {
    "epoch": "num_train_epochs",
    "batch": "per_device_train_batch_size",
    "clip": "max_grad_norm",
    "precision": "mixed_precision",
    "scheduler": "lr_scheduler_type",
    "optimizer": "optim",
}


def unknown_name(
    name: str, value: Any, ours: Mapping[str, Argument], prefix: str | None = None
) -> InvalidArgument:
    """The refusal of a name, with those that were perhaps meant; with all that there are inside a
    group, which has a prefix."""
    aliases = [n for n, row in NAMES.items() if row.kind == "alias" and "per_gpu" not in n]
    usable, low = sorted({*ours, *aliases}), name.lower().removesuffix("s")
    meant = [target for word, target in _ELSEWHERE.items() if word in low]
    inside = [n for n in usable if len(name) > 2 and f"_{low}" in f"_{n}"]
    close = list(dict.fromkeys([*meant, *inside, *difflib.get_close_matches(name, usable)]))[:3]
    refused = difflib.get_close_matches(name, sorted(NAMES), n=1, cutoff=0.8)
    if prefix is not None:
        instead = f"there are {', '.join(ours)}"
    elif close:
        instead = f"did you mean {', '.join(close)}?"
    elif refused and (row := NAMES[refused[0]]).kind == "refused":
        instead = f"{row.name} would be refused: {row.reason}; {row.instead}"
    else:
        instead = "leave it out, or see docs/arguments.md and `ckpt-train --help`"
    like = difflib.get_close_matches(name, [*usable, *NAMES])
    shown = HIDDEN if any("token" in word for word in like) else value
    return InvalidArgument(f"{prefix or ''}{name}", shown, "unknown name", instead)


def _faults_of(
    error: ValidationError, cls: type[Arguments], values: Mapping[str, Any]
) -> list[InvalidArgument]:
    """pydantic's findings, one for each argument, in our words."""
    found: dict[str, InvalidArgument] = {}
    for finding in error.errors(include_url=False):
        path, owner = "", arguments_of(cls)
        value: Any = values
        for part in map(str, finding["loc"]):
            if part not in owner or not isinstance(value, Mapping):
                break
            argument, path, value = owner[part], f"{path}.{part}".lstrip("."), value.get(part)
            if argument.group is None:
                break
            owner = arguments_of(argument.group)
        if finding["type"] == "unexpected_keyword_argument":
            key = str(finding["loc"][-1])
            fault = unknown_name(key, value.get(key), owner, f"{path}.".lstrip("."))
        elif isinstance(own := finding.get("ctx", {}).get("error"), InvalidArgument):
            fault = InvalidArgument(path, value, own.reason, own.instead)
        else:
            meaning = f" ({argument.text})" if argument.text else ""
            instead = f"give {argument.allowed}{meaning}"
            fault = InvalidArgument(path, value, argument.reason_against(value), instead)
        found.setdefault(fault.name, fault)
    return list(found.values())


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
