"""`accelerator_config`, `split_batches` and `dispatch_batches` of AccelTrainer, as settings of its
loaders."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from .errors import InvalidArgument
from .vocabulary import ACCELERATOR_ELSEWHERE, ACCELERATOR_KEYS

__all__ = ["accelerator_settings", "read_mapping"]


def accelerator_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given, taken out of `values`. Those at None are none."""
    given = read_mapping("accelerator_config", values.pop("accelerator_config", None))
    known = {*ACCELERATOR_KEYS, *_of_installed()}
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name in ACCELERATOR_ELSEWHERE and (
            value is None or value == ACCELERATOR_ELSEWHERE[name]
        ):
            continue
        if name not in known:
            raise InvalidArgument(
                f"accelerator_config.{name}",
                value,
                "unknown to the installed Accelerator's loaders",
                f"there are {', '.join(sorted(known))}",
            )
        if value is not None:
            _check_flag(f"accelerator_config.{name}", name, value)
            settings[name] = value
    for name in ("split_batches", "dispatch_batches"):
        value = values.pop(name, None)
        if value is None:
            continue
        _check_flag(name, name, value)
        unset = ACCELERATOR_KEYS[name]
        if name in settings and settings[name] not in (unset, value) and value != unset:
            raise InvalidArgument(
                name,
                value,
                f"contradicts accelerator_config.{name}={settings[name]!r}",
                f"give one of {name} and accelerator_config.{name}",
            )
        if name not in settings or value != unset:
            settings[name] = value
    return settings


def _check_flag(shown: str, name: str, value: Any) -> None:
    if name in ACCELERATOR_KEYS and not isinstance(value, bool):
        raise InvalidArgument(
            shown, value, f"is of type {type(value).__name__}", "give True or False"
        )


def _of_installed() -> list[str]:
    if importlib.util.find_spec("accelerate") is None:
        return []
    from accelerate.utils import DataLoaderConfiguration

    return [field.name for field in fields(DataLoaderConfiguration)]


def read_mapping(name: str, value: Any) -> dict[str, Any]:
    """A mapping given as such, as a JSON file's path, or as an object with fields."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(
                value if value.lstrip().startswith("{") else Path(value).read_text(encoding="utf-8")
            )
        except OSError as error:
            raise InvalidArgument(
                name,
                value,
                f"cannot be read: {error.strerror}",
                "give a mapping or the path of a JSON file",
            ) from None
        except ValueError as error:
            raise InvalidArgument(
                name, value, f"is not JSON: {error}", "give a mapping or the path of a JSON file"
            ) from None
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    elif not isinstance(value, Mapping) and hasattr(value, "__dict__") and not callable(value):
        value = vars(value)
    if not isinstance(value, Mapping):
        raise InvalidArgument(
            name,
            value,
            f"is of type {type(value).__name__}",
            "give a mapping or the path of a JSON file",
        )
    return {str(key): inner for key, inner in value.items()}
