"""The options of `ckpt-train`: one for each argument, by name, and its help."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .building import Arguments
from .configuration import load_configuration, override, parse_value
from .errors import DataNotFound, InvalidArgument
from .hugging_face import NAMES
from .kinds import arguments_of

_FLAGS = {
    "help": "Show this, and train nothing.",
    "version": "Show the version.",
    "print_config": "Print the whole resolved configuration as YAML, and train nothing.",
    "show": "The same without what is at its default.",
}
_USAGE = "ckpt-train [--config FILE] [--NAME VALUE | NAME=VALUE]..."
_TEXT = """\
Train a byte-level GPT; stopped or killed at any moment, the same command goes on bit for bit.

Options win over the file. `name=value` is short for `--name value`, and a word alone for
`--config`. Without a file a small GPT is trained on the sources of Python's standard library.
Run the same command again after an interruption or a crash and it goes on from the newest good
checkpoint; on a finished run it does nothing. `ckpt-train control` lists the running jobs and
has one save, stop or abort; `ckpt-train diloco` lets several train as islands that meet on a
server. Look at the result with `ckpt ls`, `ckpt inspect` and `ckpt verify`.
On several processes:

    torchrun --nproc-per-node 2 -m ckpt_trainers.main --trainer fsdp2 ...
"""


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
    lines, section = [f"usage: {_USAGE}", "", _TEXT, "options:"], ""
    flags = {"config FILE": "YAML of names and values; may come again.", **_FLAGS}
    shown = [(name, text, "") for name, text in flags.items()]
    shown += [
        (f"{o.name} {'[VALUE]' if o.may_stand_alone else 'VALUE'}", o.text, o.section)
        for o in _options(classes)
        if o.section
    ]
    for name, text, its_section in shown:
        if its_section != section:
            lines += ["", f"{its_section}:"]
        section, indent = its_section, " " * 8
        lines += [
            f"  --{name}",
            textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=indent),
        ]
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
