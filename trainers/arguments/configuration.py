"""Arguments from YAML files and from a command line, the help of `ckpt-train`, and back to YAML."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from .building import Arguments
from .errors import DataNotFound, InvalidArgument
from .exactness import plain
from .hugging_face import NAMES
from .kinds import arguments_of

_FORM = "write max_steps=10 or ddp.static_graph=true"
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.2: `no` and 1:30 are words, 5e-5 is a number. A key that comes twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if isinstance(key, str) and key in keys[:number]:
                where = node.value[number][0].start_mark
                text = f"the key {key!r} comes twice"
                raise yaml.constructor.ConstructorError(None, None, text, where)
        return dict(super().construct_mapping(node, deep))


_NUMBER = r"""^(?: [-+]? (?: \.[0-9]+ | [0-9]+\.[0-9]* ) (?: [eE][-+]?[0-9]+ )?
    | [-+]? [0-9]+ [eE][-+]?[0-9]+ | [-+]? \.(?:inf|Inf|INF) | \.(?:nan|NaN|NAN) )$"""
_RESOLVERS = {
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$", "-+0123456789"),
    "float": (_NUMBER, "-+0123456789."),
    "timestamp": (r"(?!)", ""),
}
_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in resolvers if entry[0].rpartition(":")[2] not in _RESOLVERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, (_how, _firsts) in _RESOLVERS.items():
    _pattern = re.compile(_how, re.VERBOSE)
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_firsts))


def load_configuration(
    path: str | PathLike[str] | None, overrides: Iterable[str] = ()
) -> dict[str, Any]:
    """The mapping in a YAML (or JSON) file, with overrides such as "ddp.static_graph=true" or
    "max_steps=10" laid over.

    Raises InvalidArgument when the file is no mapping or an override is not of this form, OSError
    without a file.
    """
    loaded: Any = None
    reason = "holds no mapping of names to values"
    try:
        loaded = path and yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except _NOT_YAML as error:
        loaded, reason = [], f"is not YAML: {error}"
    if not isinstance(loaded, Mapping | None):
        raise InvalidArgument("configuration", str(path), reason, "write name: value lines")
    values = {str(name): value for name, value in (loaded or {}).items()}
    for word in overrides:
        name, equals, text = word.partition("=")
        if not equals:
            raise InvalidArgument("override", word, "not of the form name=value", _FORM)
        override(values, name.strip(), parse_value(text, name))
    return values


def parse_value(text: str, name: str = "value") -> Any:
    """A value as it would be read from a file. Raises InvalidArgument."""
    try:
        return yaml.load(text, _Loader)
    except _NOT_YAML:
        raise InvalidArgument(name, text, "is not a YAML value", "quote it") from None


def override(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a value in place; a dotted path leads into mappings. Raises InvalidArgument."""
    *names, last = path.split(".")
    if not all([*names, last]):
        raise InvalidArgument("override", path, "not of the form name=value", _FORM)
    inner = values
    for depth, name in enumerate(names, start=1):
        below = inner.get(name)
        if not isinstance(below, Mapping | None):
            reason = f"{'.'.join(names[:depth])} is {below!r}, which has no names inside"
            raise InvalidArgument(path, value, reason, "set it as a whole")
        inner[name] = inner = dict(below or {})
    inner[last] = value


def print_configuration(args: Any) -> str:
    """Arguments (or any mapping of them) as YAML that `load_configuration` reads back."""
    values = args if isinstance(args, Mapping) else args.as_dict()
    text: str = yaml.safe_dump(plain(values), sort_keys=False, allow_unicode=True)
    return text


# The command line.

_FLAGS = {
    "help": "Show this, and train nothing.",
    "version": "Show the version.",
    "print_config": "Print the whole resolved configuration as YAML, and train nothing.",
    "show": "The same without what is at its default.",
}
_HELP = """\
usage: ckpt-train [--config FILE] [--NAME VALUE | NAME=VALUE]...

Train a byte-level GPT; stopped or killed at any moment, the same command goes on bit for bit.

Options win over the file. `name=value` is short for `--name value`, and a word alone for
`--config`. Without a file a small GPT is trained on the sources of Python's standard library.
Run the same command again after an interruption or a crash and it goes on from the newest good
checkpoint; on a finished run it does nothing. `ckpt-train control` lists the running jobs and
has one save, stop or abort; `ckpt-train diloco` lets several train as islands that meet on a
server. Look at the result with `ckpt ls`, `ckpt inspect` and `ckpt verify`.
On several processes:

    torchrun --nproc-per-node 2 -m ckpt_trainers.main --trainer fsdp2 ...

options:"""


@dataclass(frozen=True)
class CommandLine:
    """What was said: values by name, nested ones inside mappings, and which flags."""

    values: dict[str, Any]
    has_file: bool
    flags: frozenset[str]


def parse_command_line(words: Sequence[str], classes: Sequence[type[Arguments]]) -> CommandLine:
    """What words say, under any names: those that no class has are found when it is made.

    Raises InvalidArgument for what is no value, DataNotFound or OSError for the file.
    """
    options = {option.name: option for option in _options(classes)}
    flags, given, values = set(), [], dict[str, Any]()
    has_file, waiting = False, list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        option = options.get(name)
        alone = option is not None and option.may_stand_alone
        following = waiting[0] if waiting else "--"
        if word == "-h" or (word.startswith("--") and not equals and name in _FLAGS):
            flags.add("help" if word == "-h" else name)
            continue
        if not word.startswith("-") and not equals:
            name, text = "config", word
        # After an option that may stand alone, name=value is the next option.
        elif not equals and not following.startswith("--") and not (alone and "=" in following):
            text, equals = waiting.pop(0), "="
        if name == "config":
            has_file = True
            values |= {} if flags & {"help", "version"} else _read(text)
        elif option is None:
            given.append((name, parse_value(text, name)))
        elif not equals and not alone:
            raise InvalidArgument(name, None, "no value", f"write --{name} VALUE, see --help")
        else:
            given.append((name, option.read(text) if equals else True))
    for name, value in given:
        override(values, name, value)
    return CommandLine(values, has_file, frozenset(flags))


def _read(file: str) -> dict[str, Any]:
    if not file:
        raise InvalidArgument("config", None, "no file", "write --config FILE")
    if not os.path.exists(file):
        hint = "no such file (and no argument: these are --name value)"
        raise DataNotFound(f"{file}: {hint}", path=file)
    return load_configuration(file)


def show_help(classes: Sequence[type[Arguments]]) -> str:
    """The text of `ckpt-train --help`."""
    flags = {"config FILE": "YAML of names and values; may come again.", **_FLAGS}
    shown = [("", name, text) for name, text in flags.items()]
    for option in _options(classes):
        if option.section:
            value = "[VALUE]" if option.may_stand_alone else "VALUE"
            shown.append((option.section, f"{option.name} {value}", option.text))
    lines, before, indent = [_HELP], "", " " * 8
    for section, name, text in shown:
        lines += ["", f"{section}:"] if section != before else []
        before = section
        wrapped = textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=indent)
        lines += [f"  --{name}", wrapped]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Option:
    """name: with dots, for what is inside a group. section: of the help; "" shows it nowhere."""

    name: str
    section: str
    text: str
    kinds: frozenset[Any] = frozenset({bool})

    @property
    def may_stand_alone(self) -> bool:
        return bool in self.kinds

    def read(self, text: str) -> Any:
        """As it would be read from a file; what YAML cannot read is itself."""
        if self.kinds <= {str, type(None)}:
            return None if text == "null" and self.kinds != {str} else text
        try:
            return parse_value(text)
        except InvalidArgument:
            return text


def _options(classes: Sequence[type[Arguments]]) -> list[_Option]:
    """Each name once, as the first class that has it says, section by section."""
    found: dict[str, _Option] = {}
    for cls in classes:
        section = (cls.__doc__ or "").partition("\n\n")[0].replace("\n    ", " ").rstrip(".")
        for name, argument in arguments_of(cls).items():
            inner = {"": argument} if argument.group is None else arguments_of(argument.group)
            for key, field in inner.items():
                path = f"{name}.{key}" if key else name
                text = f"{field.text} ({field.allowed}; default: {field.default})"
                found.setdefault(path, _Option(path, section, text, field.kinds))
            found.setdefault(name, _Option(name, "", "", argument.kinds))
    for row in NAMES.values():
        alias = "Other names of the same, as Hugging Face has them" if row.kind == "alias" else ""
        found.setdefault(row.name, _Option(row.name, alias, f"sets {row.target}"))
    return list(found.values())
