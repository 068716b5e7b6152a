"""From the whole vocabulary to the arguments of one trainer: aliases, names without effect,
refusals, types."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from ..arguments import vocabulary as words
from .accelerator import accelerator_settings
from .errors import HIDDEN, InvalidArgument
from .fsdp import apply_fsdp
from .native import (
    AccelTrainingArguments,
    BaseTrainingArguments,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    MinimalTrainingArguments,
    PipelineTrainingArguments,
    TrainingArguments,
)
from .typed import converted, nested_class

__all__ = ["known_names", "native_name", "resolve_arguments"]

logger = logging.getLogger("ckpt_trainers.arguments")

A = TypeVar("A", bound=MinimalTrainingArguments)

_FAMILY = (
    MinimalTrainingArguments,
    BaseTrainingArguments,
    TrainingArguments,
    AccelTrainingArguments,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    PipelineTrainingArguments,
)


def resolve_arguments(
    cls: type[A], given: Mapping[str, Any] | MinimalTrainingArguments | None = None
) -> A:
    """Arguments of class `cls` from a mapping in the whole vocabulary, or from arguments of any
    class.

    Raises InvalidArgument: an unknown, refused or contradictory name, or a value that does not fit.
    """
    if isinstance(given, MinimalTrainingArguments):
        if isinstance(given, cls) and (type(given) is cls or type(given) not in _FAMILY):
            return given
        given = given.changed()  # what a plainer, or another trainer's, arguments say
    values = {str(name): _plain_enum(value) for name, value in dict(given or {}).items()}
    native = {field.name for field in fields(cls)}
    _check_names(values, native)
    values = {
        name: value
        for name, value in values.items()
        if not (value is None and name in words.UNSET_IN_HF)
    }
    _resolve_aliases(cls, values, native)
    _note_no_effect(values)
    for name, (reason, instead) in words.REJECTED.items():
        if name in values and not words.at_default(name, values.pop(name)):
            raise InvalidArgument(name, dict(given or {})[name], reason, instead)
    made: A = converted(cls, values)
    return made


def known_names(cls: type[MinimalTrainingArguments]) -> list[str]:
    """All names that `resolve_arguments` understands for a class, if only to refuse them."""
    native = [field.name for field in fields(cls)]
    return [
        *native,
        *words.ALIASES,
        *words.TRANSLATED,
        *words.OF_ONE_TRAINER,
        *words.NO_EFFECT,
        *words.REJECTED,
    ]


def native_name(name: str) -> str:
    """The native argument that a name of the whole vocabulary sets; the name itself where there is
    none."""
    return words.ALIASES.get(name) or words.TRANSLATED.get(name) or name


def _plain_enum(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _check_names(values: Mapping[str, Any], native: set[str]) -> None:
    others = {
        *words.ALIASES,
        *words.TRANSLATED,
        *words.OF_ONE_TRAINER,
        *words.NO_EFFECT,
        *words.REJECTED,
    }
    for name in values:
        if name in native or name in others:
            continue
        for owner in (
            DDPTrainingArguments,
            FSDP2TrainingArguments,
            PipelineTrainingArguments,
            AccelTrainingArguments,
        ):
            if name in {field.name for field in fields(owner)}:
                trainer = owner.__name__.replace("ingArguments", "er")
                raise InvalidArgument(
                    name,
                    values[name],
                    f"an argument of {trainer} only",
                    f"use {trainer}, or leave it out",
                )
        usable = (native | others) - words.REJECTED.keys() - words.NO_EFFECT.keys()
        close = close_names(name, usable - {n for n in words.ALIASES if n.startswith("per_gpu_")})
        instead = (
            f"did you mean {', '.join(close)}?"
            if close
            else f"leave it out, or see {LIST_OF_NAMES}"
        )
        if not close and (
            refused := difflib.get_close_matches(name, sorted(words.REJECTED), n=1, cutoff=0.8)
        ):
            instead = f"{refused[0]} would be refused: {'; '.join(words.REJECTED[refused[0]])}"
        secret = any(
            "token" in word
            for word in difflib.get_close_matches(name, sorted(native | others), n=3)
        )
        raise InvalidArgument(name, HIDDEN if secret else values[name], "unknown name", instead)


LIST_OF_NAMES = "ckpt_trainers.arguments.known_names(TrainingArguments)"


def close_names(name: str, names: set[str]) -> list[str]:
    """At most three names that were perhaps meant: those that contain it as a whole, or are spelt
    much like it."""
    stem = f"_{name.lower().removesuffix('s')}"
    inside = sorted(n for n in names if stem in f"_{n}" and len(name) > 2)
    return list(dict.fromkeys([*inside, *difflib.get_close_matches(name, sorted(names), n=3)]))[:3]


def _resolve_aliases(
    cls: type[MinimalTrainingArguments], values: dict[str, Any], native: set[str]
) -> None:
    """Replaces every name that another stands for, in place."""
    untouched = cls()

    def put(alias: str, name: str, value: Any, shown: Any = None) -> None:
        if name not in native:
            raise InvalidArgument(
                alias, value, f"{cls.__name__} has no {name}", "use TrainingArguments"
            )
        if (
            name in values
            and not _equal(values[name], getattr(untouched, name))
            and not _equal(values[name], value)
        ):
            raise _contradiction(alias, value if shown is None else shown, name, values[name])
        values[name] = value

    for alias, name in words.ALIASES.items():
        if alias in values and not words.at_default(alias, value := values.pop(alias)):
            put(alias, name, value)
    _precision(values, put)
    if (backend := values.pop("torchdynamo", None)) is not None:
        put("torchdynamo", "torch_compile_backend", backend)
        values["torch_compile"] = True
    if _flag(values, "adafactor"):
        put("adafactor", "optim", "adafactor", True)
    for name, (reason, instead) in words.OF_ONE_TRAINER.items():
        if name in values and name not in native and not _understands(cls, name):
            if words.at_default(name, value := values.pop(name)) or _says_nothing(name, value):
                continue
            raise InvalidArgument(name, value, reason, instead)
    if issubclass(cls, DDPTrainingArguments):
        for alias, name in words.DDP_ALIASES.items():
            if (value := values.pop(alias, None)) is not None:
                _put_nested(values, "ddp", alias, name, value, nested_class(cls, "ddp"))
    if issubclass(cls, FSDP2TrainingArguments):
        apply_fsdp(values)
    if issubclass(cls, AccelTrainingArguments):
        values["accelerator_config"] = accelerator_settings(values)


def _understands(cls: type, name: str) -> bool:
    if name in words.DDP_ALIASES:
        return issubclass(cls, DDPTrainingArguments)
    if name in ("fsdp", "fsdp_config"):
        return issubclass(cls, FSDP2TrainingArguments)
    return issubclass(cls, AccelTrainingArguments)


def _says_nothing(name: str, value: Any) -> bool:
    """A dump holds the Accelerator's settings in full, each at its default."""
    if name != "accelerator_config" or not isinstance(value, Mapping):
        return False
    plain = words.ACCELERATOR_KEYS | words.ACCELERATOR_ELSEWHERE
    return all(key in plain and _equal(inner, plain[key]) for key, inner in value.items())


def _precision(values: dict[str, Any], put: Callable[..., None]) -> None:
    wanted = [name for name in ("bf16", "fp16") if _flag(values, name)]
    if len(wanted) == 2:
        raise InvalidArgument(
            "bf16", True, "fp16=True was given too", "give one of the two, or mixed_precision"
        )
    for name in wanted:
        put(name, "mixed_precision", name, True)
    tf32 = values.pop("tf32", None)
    if tf32 is not None:
        _check_flag("tf32", tf32)
        put("tf32", "float32_matmul_precision", "high" if tf32 else "highest", tf32)


def _flag(values: dict[str, Any], name: str) -> bool:
    value = values.pop(name, None)
    if value is not None:
        _check_flag(name, value)
    return bool(value)


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(
            name, value, f"is of type {type(value).__name__}", "give True or False"
        )


def _put_nested(
    values: dict[str, Any], group: str, alias: str, name: str, value: Any, cls: type | None
) -> None:
    inner = values.get(group, {})
    if is_dataclass(inner) and not isinstance(inner, type):
        inner = {field.name: getattr(inner, field.name) for field in fields(inner)}
    if not isinstance(inner, Mapping):
        return  # of the wrong type, which is said when the types are checked
    default = getattr(cls(), name) if cls is not None else None
    if name in inner and not _equal(inner[name], default) and not _equal(inner[name], value):
        raise _contradiction(alias, value, f"{group}.{name}", inner[name])
    values[group] = {**inner, name: value}


def _contradiction(alias: str, value: Any, name: str, other: Any) -> InvalidArgument:
    return InvalidArgument(
        alias, value, f"contradicts {name}={other!r}", f"give one of {alias} and {name}"
    )


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _note_no_effect(values: dict[str, Any]) -> None:
    said = [
        f"{name} ({reason})"
        for name, reason in words.NO_EFFECT.items()
        if name in values and not words.at_default(name, values.pop(name))
    ]
    if said and os.environ.get("RANK", "0") == "0":
        logger.info("arguments without effect: %s", "; ".join(said))
