"""The command line of `ckpt`: its commands by name, the options that all have, and one run of it
from words to exit code.

A command lies in the module that does it, which is imported when it is asked for. What it found is
printed here and nowhere else, so an error in the middle leaves no half document behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from io import TextIOWrapper
from json import loads
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from ckptcore import __version__

from .failures import EXPECTED, USAGE, failure_of
from .render import Report, Screen, drawn, printable, show_json

SCHEMA = 1  # of what --json prints: see docs/cli.md

# Each with its module, and what it answers.
COMMANDS = {
    "ls": ("contents", "Which checkpoints are there, which is the latest, why is one not usable."),
    "inspect": ("contents", "What does a checkpoint hold: an overview, or one question."),
    "show": ("show", "One tensor or one value, whole."),
    "diff": ("diff", "What changed from one checkpoint to another."),
    "plan": ("plan", "What would a restore on N ranks read, what would it refuse."),
    "verify": ("health", "Is every byte as it was saved."),
    "doctor": ("health", "What is wrong here, and the command that mends it."),
    "watch": ("watch", "What is being saved now, at which rate."),
    "report": ("report", "All of it as one HTML page."),
    "cp": ("cp", "Copy a checkpoint, verified on the way."),
    "pin": ("upkeep", "Keep checkpoints, whatever retention says."),
    "unpin": ("upkeep", "Let retention have them again."),
    "rm": ("upkeep", "Delete checkpoints."),
    "prune": ("upkeep", "Delete the checkpoints of a root that no rule keeps."),
    "import": ("convert", "Make a checkpoint of what another library wrote."),
    "export": ("convert", "Write a checkpoint as another library reads it."),
    "completion": ("cli", "Complete commands, options and paths in a shell."),
}

EXIT_CODES = """\b
Exit codes:
  0    good
  1    bad: damaged, uncommitted, of a newer format, or problems were found
  2    usage
  3    not found
  4    storage error: permission denied, unreachable
  130  interrupted;  141  the reader of the output went away
"""


class Commands(click.Group):
    """Those above, imported one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f".{COMMANDS[cmd_name][0]}", __package__)
        found: click.Command = getattr(module, f"{cmd_name}_command")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        unknown = bool(args) and not args[0].startswith("-") and args[0] not in COMMANDS
        if unknown and not ctx.resilient_parsing:
            near = get_close_matches(args[0], COMMANDS, 2)
            hint = f": did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, answer) for name, (_, answer) in COMMANDS.items()])


class Location(click.ParamType[str]):
    """A local path or a URL; a shell completes it as a path."""

    name = "path"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


LOCATION = Location()


class Pair(click.ParamType[tuple[str, Any]]):
    """KEY=VALUE. as_json: VALUE is decoded where it is JSON, otherwise it is text."""

    name = "pair"

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        key, equals, text = value.partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is not {param.metavar if param else 'KEY=VALUE'}", param, ctx)
        try:
            return key, loads(text) if self.as_json else text
        except ValueError:
            return key, text


Decorator = Callable[[Any], Any]


def flag(name: str, help: str, *names: str) -> Decorator:
    return click.option(name, *names, is_flag=True, help=help)


def repeated(name: str, metavar: str, help: str, *names: str, type: Any = None) -> Decorator:
    """An option that may be given several times."""
    help = f"{help.rstrip('.')} (repeatable)."
    return click.option(name, *names, multiple=True, metavar=metavar, type=type, help=help)


def number(name: str, least: float, help: str, most: float | None = None, **how: Any) -> Decorator:
    """Whole where `least` is."""
    kind: Any = click.IntRange if isinstance(least, int) else click.FloatRange
    help += f" Default {how['default']}." if "default" in how else ""
    return click.option(name, type=kind(least, most), metavar="N", help=help, **how)


def choice(name: str, values: list[str], help: str = "", *names: str) -> Decorator:
    """One of some words, the first where it is not given."""
    return click.option(name, *names, type=click.Choice(values), default=values[0], help=help)


def storage_option(name: str, help: str) -> Decorator:
    return repeated(name, "KEY=VALUE", help, type=Pair(as_json=True))


def command(*examples: str) -> Callable[[Callable[..., Report]], click.Command]:
    """A command of `ckpt`, named as in its examples, which end its help. `--storage-option` reaches
    it as the dict `options`, or None."""

    def made(function: Callable[..., Report]) -> click.Command:
        @wraps(function)
        def run(storage_option: tuple[Any, ...], json: bool, **arguments: Any) -> Report:
            return function(options=dict(storage_option) or None, **arguments)

        flag("--json", "One JSON document; errors too.")(run)
        what = "Passed to the storage of a URL; VALUE is JSON where it can be."
        storage_option("--storage-option", what)(run)
        shown = "".join(f"  {example}\n" for example in examples)
        epilog = f"{EXIT_CODES}\n\b\nExamples:\n{shown}"
        found = click.command(examples[0].split()[1], epilog=epilog)(run)
        found.params = found.params[2:] + found.params[:2]  # those of all commands last
        return found

    return made


@click.group(
    cls=Commands,
    no_args_is_help=True,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@flag("--json", "One JSON document; may stand after the command too.")
@click.version_option(__version__, message="ckpt %(version)s")
def cli(json: bool) -> None:
    """Look at checkpoints; compare, copy, convert, mend and delete them.

    Paths are local folders or any fsspec URL."""


COMPLETION = """\b
Examples:
  eval "$(ckpt completion bash)"
  ckpt completion fish > ~/.config/fish/completions/ckpt.fish
"""


@click.command("completion", epilog=COMPLETION)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> int:
    """Print what makes SHELL complete commands, options and paths."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "ckpt", "_CKPT_COMPLETE").source())
    return 0


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. Raises KeyboardInterrupt, and OSError for
    standard output."""
    as_json = "--json" in arguments
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is escaped, never an error.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        outcome = cli.main(arguments, prog_name="ckpt", standalone_mode=False, obj=as_json)
    except click.exceptions.NoArgsIsHelpError as error:  # `ckpt` alone
        click.echo(error.format_message())
        return USAGE
    except click.Abort:
        raise KeyboardInterrupt from None
    except EXPECTED as error:
        failure = failure_of(error)
        message = failure.message
        if isinstance(error, click.UsageError) and error.ctx is not None:
            message = f"{message.rstrip('.')} (see {error.ctx.command_path} --help)"
        outcome = Report(failure.document(), [], failure.exit_code, message)
    if not isinstance(outcome, Report):
        return int(outcome or 0)  # --help and --version
    if as_json and outcome.document:
        show_json({"schema": SCHEMA} | outcome.document)
    elif not as_json:
        sys.stdout.write(drawn(outcome.blocks, Screen.of(sys.stdout)))
    sys.stdout.flush()
    if outcome.complaint and not as_json:
        sys.stderr.write(f"ckpt: {printable(outcome.complaint)}\n")
    return outcome.exit_code
