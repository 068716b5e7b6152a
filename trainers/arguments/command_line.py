"""The options of `ckpt-train`: one for each argument, by name, and its help."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonargparse

from .building import Arguments
from .configuration import load_configuration, override, parse_value
from .errors import DataNotFound, InvalidArgument
from .hugging_face import NAMES
from .kinds import Argument, arguments_of

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
    options = _options(classes)
    flags, files, given, others = set(), [], [], []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if word == "-h" or (word.startswith("--") and not equals and name in _FLAGS):
            flags.add("help" if word == "-h" else name)
        elif not word.startswith("-") and not equals:
            files.append(word)
        else:
            alone = name in options and options[name].may_stand_alone
            following = waiting[0] if waiting else "--"
            # After an option that may stand alone, name=value is the next option.
            if not equals and not following.startswith("--") and not (alone and "=" in following):
                text, equals = waiting.pop(0), "="
            if name == "config":
                files.append(text)
            elif name in options:
                given.append(f"--{name}{equals}{text}")
            else:
                others.append((name, text))
    if flags & {"help", "version"}:
        return CommandLine({}, False, frozenset(flags))
    values: dict[str, Any] = {}
    for file in files:
        if not file:
            raise InvalidArgument("config", None, "no file", "write --config FILE")
        if not os.path.exists(file):
            hint = "no such file (and no argument: these are --name value)"
            raise DataNotFound(f"{file}: {hint}", path=file)
        values |= load_configuration(file)
    try:
        spoken = _parser(options).parse_args(given, defaults=False)
    except argparse.ArgumentError as error:
        reason = " ".join(str(error).split())
        raise InvalidArgument("options", " ".join(given), reason, "see --help") from None
    for name, value in [*spoken.items(), *((n, parse_value(t, n)) for n, t in others)]:
        override(values, name, value)
    return CommandLine(values, bool(files), frozenset(flags))


def show_help(classes: Sequence[type[Arguments]]) -> str:
    """The text of `ckpt-train --help`."""
    return str(_parser(_options(classes)).format_help())


@dataclass(frozen=True)
class _Option:
    """name: with dots, for what is inside a group. section: of the help; "" shows it nowhere."""

    name: str
    section: str
    text: str
    argument: Argument | None = None

    @property
    def kinds(self) -> frozenset[Any]:
        return self.argument.kinds if self.argument is not None else frozenset({bool})

    @property
    def may_stand_alone(self) -> bool:
        return bool in self.kinds

    def add_to(self, parser: Any) -> None:
        kinds = self.kinds
        type_ = str if kinds == {str} else _text_or_none if kinds == {str, type(None)} else _value
        more = {"nargs": "?", "const": True} if self.may_stand_alone else {}
        shown = self.text.replace("%", "%%") if self.section else argparse.SUPPRESS
        parser.add_argument(f"--{self.name}", type=type_, metavar="VALUE", help=shown, **more)


def _options(classes: Sequence[type[Arguments]]) -> dict[str, _Option]:
    found: dict[str, _Option] = {}
    for cls in classes:
        section = (cls.__doc__ or "").partition("\n\n")[0].replace("\n    ", " ").rstrip(".")
        for name, argument in arguments_of(cls).items():
            inner = arguments_of(argument.group) if argument.group is not None else {"": argument}
            for key, field in inner.items():
                path = f"{name}.{key}" if key else name
                found.setdefault(path, _Option(path, section, _described(field), field))
            found.setdefault(name, _Option(name, "", "", argument))
    for row in NAMES.values():
        alias = "Other names of the same, as Hugging Face has them" if row.kind == "alias" else ""
        found.setdefault(row.name, _Option(row.name, alias, f"sets {row.target}"))
    return found


def _value(text: Any) -> Any:
    """As it would be read from a file; what YAML cannot read is itself."""
    try:
        return parse_value(text) if isinstance(text, str) else text
    except InvalidArgument:
        return text


def _text_or_none(text: Any) -> Any:
    return None if text == "null" else text


def _described(argument: Argument) -> str:
    return f"{argument.text} ({argument.allowed}; default: {argument.default})"


def _parser(options: Mapping[str, _Option]) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(
        prog="ckpt-train",
        usage=_USAGE,
        description=_TEXT,
        print_config=None,
        exit_on_error=False,
        allow_abbrev=False,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML of names and values; may come again."
    )
    for name, text in _FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    sections: dict[str, Any] = {"": parser}
    for option in options.values():
        if option.section not in sections:
            sections[option.section] = parser.add_argument_group(option.section)
        option.add_to(sections[option.section])
    return parser
