"""Arguments from a YAML file and from `name=value` words of a command line, and back to YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from .errors import InvalidArgument
from .exactness import plain

__all__ = ["load_configuration", "parse_value", "print_configuration"]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.2 where 1.1 surprises: `no` and 1:30 are words, 5e-5 is a number. A key that comes
    twice is an error."""


_BOOL, _INT, _FLOAT, _TIME = (
    f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "timestamp")
)
_NUMBER = re.compile(
    r"""^(?: [-+]? (?: \.[0-9]+ | [0-9]+\.[0-9]* ) (?: [eE][-+]?[0-9]+ )?
         | [-+]? [0-9]+ [eE][-+]?[0-9]+
         | [-+]? \.(?:inf|Inf|INF)
         | \.(?:nan|NaN|NAN) )$""",
    re.VERBOSE,
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _INT, _FLOAT, _TIME)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    _INT, re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(_FLOAT, _NUMBER, list("-+0123456789."))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, str) and key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} comes twice", key_node.start_mark
            )
        if isinstance(key, str):
            seen.add(key)
    return dict(loader.construct_mapping(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load_configuration(
    path: str | PathLike[str] | None, overrides: Iterable[str] = ()
) -> dict[str, Any]:
    """The mapping in a YAML (or JSON) file, with overrides such as "ddp.static_graph=true" or
    "max_steps=10" laid over.

    Raises InvalidArgument when the file is no mapping or an override is not of this form, OSError
    without a file.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                "configuration", str(path), f"is not YAML: {error}", "mend the file"
            ) from None
        if loaded is not None and not isinstance(loaded, Mapping):
            raise InvalidArgument(
                "configuration",
                str(path),
                "holds no mapping of names to values",
                "write name: value lines",
            )
        values = {str(name): value for name, value in (loaded or {}).items()}
    for override in overrides:
        _override(values, override)
    return values


def parse_value(text: str) -> Any:
    """A value as it would be read from a file."""
    return yaml.load(text, _Loader)


def _override(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise InvalidArgument(
            "override",
            override,
            "not of the form name=value",
            "write max_steps=10 or ddp.static_graph=true",
        )
    try:
        value = parse_value(text)
    except yaml.YAMLError:
        raise InvalidArgument(path, text, "is not a YAML value", "quote it") from None
    inner = values
    for depth, name in enumerate(names[:-1], start=1):
        below = inner.get(name)
        if below is None:
            below = {}
        elif not isinstance(below, Mapping):
            raise InvalidArgument(
                path,
                text,
                f"{'.'.join(names[:depth])} is {below!r}, which has no names inside",
                "set it as a whole",
            )
        inner[name] = dict(below)
        inner = inner[name]
    inner[names[-1]] = value


def print_configuration(args: Any) -> str:
    """Arguments (or any mapping of them) as YAML that `load_configuration` reads back."""
    values = args if isinstance(args, Mapping) else args.as_dict()
    text: str = yaml.safe_dump(plain(values), sort_keys=False, allow_unicode=True)
    return text
