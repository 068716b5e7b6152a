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


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.2 where 1.1 surprises: `no` and 1:30 are words, 5e-5 is a number. A key that comes
    twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for place, key in enumerate(keys):
            if isinstance(key, str) and key in keys[:place]:
                mark = node.value[place][0].start_mark
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} comes twice", mark
                )
        return dict(super().construct_mapping(node, deep))


_NUMBER = r"""^(?: [-+]? (?: \.[0-9]+ | [0-9]+\.[0-9]* ) (?: [eE][-+]?[0-9]+ )?
    | [-+]? [0-9]+ [eE][-+]?[0-9]+ | [-+]? \.(?:inf|Inf|INF) | \.(?:nan|NaN|NAN) )$"""
_RESOLVERS = {
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$", "-+0123456789"),
    "float": (_NUMBER, "-+0123456789."),
    "timestamp": None,
}
_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in resolvers if entry[0].rpartition(":")[2] not in _RESOLVERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _how in _RESOLVERS.items():
    if _how is not None:
        _pattern = re.compile(_how[0], re.VERBOSE)
        _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_how[1]))


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
        loaded, reason = None, "holds no mapping of names to values"
        try:
            loaded = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader) or {}
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            reason = f"is not YAML: {error}"
        if not isinstance(loaded, Mapping):
            instead = "write name: value lines"
            raise InvalidArgument("configuration", str(path), reason, instead)
        values = {str(name): value for name, value in loaded.items()}
    for word in overrides:
        name, equals, text = word.partition("=")
        if not equals:
            instead = "write max_steps=10 or ddp.static_graph=true"
            raise InvalidArgument("override", word, "not of the form name=value", instead)
        override(values, name.strip(), parse_value(text, name))
    return values


def parse_value(text: str, name: str = "value") -> Any:
    """A value as it would be read from a file. Raises InvalidArgument."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise InvalidArgument(name, text, "is not a YAML value", "quote it") from None


def override(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a value in place; a dotted path leads into mappings. Raises InvalidArgument."""
    names = path.split(".")
    if not all(names):
        instead = "write max_steps=10 or ddp.static_graph=true"
        raise InvalidArgument("override", path, "not of the form name=value", instead)
    inner = values
    for depth, name in enumerate(names[:-1], start=1):
        below = inner.get(name)
        if not isinstance(below, Mapping | None):
            reason = f"{'.'.join(names[:depth])} is {below!r}, which has no names inside"
            raise InvalidArgument(path, value, reason, "set it as a whole")
        inner[name] = dict(below or {})
        inner = inner[name]
    inner[names[-1]] = value


def print_configuration(args: Any) -> str:
    """Arguments (or any mapping of them) as YAML that `load_configuration` reads back."""
    values = args if isinstance(args, Mapping) else args.as_dict()
    text: str = yaml.safe_dump(plain(values), sort_keys=False, allow_unicode=True)
    return text
