"""The command line of `ckpt`: its commands and options, and one run of it from words to exit code.

What a command found is printed here and nowhere else, so an error in the middle leaves no half
document behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from io import TextIOWrapper
from json import loads
from typing import Any

import click
from click.shell_completion import CompletionItem

from ckptcore import __version__

from .copies import Which
from .cp import cp
from .failures import USAGE, expected_errors, failure_of
from .inspection import Questions, inspect
from .ls import ls
from .output import show
from .render import Report, printable, show_json
from .subject import Options
from .verification import verify

SCHEMA = 1  # of what --json prints: see docs/cli.md

EXIT_CODES = """\b
Exit codes:
  0    good
  1    bad: damaged, uncommitted, of a newer format, or problems were found
  2    usage
  3    not found
  4    storage error: permission denied, unreachable
  130  interrupted;  141  the reader of the output went away
"""


def option_pair(text: str, option: str = "--storage-option") -> tuple[str, Any]:
    """KEY=VALUE; VALUE is decoded where it is JSON, otherwise it is text. Raises
    click.BadParameter."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE", param_hint=option)
    try:
        return key, loads(value)
    except ValueError:
        return key, value


def shared(command: Callable[..., Report]) -> Callable[..., Report]:
    """The options that every command has. `--storage-option` reaches it as the dict `options`, or
    None."""

    @click.option("--json", is_flag=True, help="One JSON document instead of tables; errors too.")
    @click.option(
        "--storage-option",
        multiple=True,
        metavar="KEY=VALUE",
        help="Passed to the storage of a URL (repeatable). VALUE is JSON where it can be, else "
        "text.",
    )
    @wraps(command)
    def run(storage_option: tuple[str, ...], json: bool, **arguments: Any) -> Report:
        return command(options=dict(map(option_pair, storage_option)) or None, **arguments)

    return run


@click.group(
    no_args_is_help=True,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--json",
    is_flag=True,
    help="One JSON document instead of tables; may stand after the command too.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda *a: _version(*a),
    help="Show the version and exit.",
)
def cli(json: bool) -> None:
    """Look at checkpoints, check and copy them. Paths are local folders or any fsspec URL."""


class Place(click.ParamType[str]):
    """A local path or a URL; a shell completes it as a path."""

    name = "path"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def command(name: str, *examples: str) -> Callable[[Callable[..., Report]], click.Command]:
    """A command of `ckpt`, whose help ends with examples."""
    shown = "".join(f"  {example}\n" for example in examples)
    return cli.command(name, epilog=f"{EXIT_CODES}\n\b\nExamples:\n{shown}")


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    click.echo(f"ckpt {__version__}")
    context.exit()


@command(
    "ls", "ckpt ls runs/a", "ckpt ls s3://bucket/run --json | jq '.checkpoints[] | select(.latest)'"
)
@click.argument("root", type=Place())
@shared
def ls_command(root: str, options: Options) -> Report:
    """List every checkpoint of ROOT, oldest first, with status and metrics, and why one is not
    usable.

    Exits with 0 when at least one checkpoint is usable.
    """
    return ls(root, options)


@command(
    "inspect",
    "ckpt inspect runs/a",
    "ckpt inspect runs/a/checkpoint-500 --tensors 'model/*' --depth 2",
)
@click.argument("path", required=False, type=Place())
@click.option(
    "--tensors",
    metavar="[PATTERN]",
    is_flag=False,
    flag_value="*",
    help="List tensors whose name matches, with their total.",
)
@click.option(
    "--depth",
    type=click.IntRange(1),
    metavar="N",
    help="Tensors by the first N parts of their names, with totals.",
)
@click.option(
    "--values",
    metavar="COMPONENT",
    multiple=True,
    help="Print the plain values of a component (repeatable).",
)
@click.option(
    "--rank",
    type=click.IntRange(0),
    metavar="N",
    help="Whose values: those that rank N would restore.",
)
@click.option(
    "--group",
    metavar="G",
    help="Whose values, of a PER_GROUP component: a group's number, or its key.",
)
@click.option(
    "--node",
    type=click.IntRange(0),
    metavar="N",
    help="Whose values, of a PER_NODE component: node N's.",
)
@click.option("--ranks", is_flag=True, help="Which rank wrote how much of each component.")
@click.option("--files", is_flag=True, help="List files with size, writer and digest.")
@click.option("--metadata", is_flag=True, help="Ids, versions, phases, and the user's metadata.")
@click.option("--verify", is_flag=True, help="Check every byte too.")
@shared
def inspect_command(
    path: str | None,
    tensors: str | None,
    depth: int | None,
    values: tuple[str, ...],
    rank: int | None,
    group: str | None,
    node: int | None,
    ranks: bool,
    files: bool,
    metadata: bool,
    verify: bool,
    options: Options,
) -> Report:
    """Show what the checkpoint PATH holds. When PATH is a root, the checkpoint that restore would
    take, and first what is newer and cannot be used. PATH may also be a checkpoint's manifest, or
    one of its tensor files.

    Without options it is an overview; each option answers one more question, alone. Where each
    rank, group or node has values of its own, --values shows those of the first and says so;
    --rank, --group and --node choose. Reads no tensor data unless --verify is given.
    """
    if path is None:
        # `--tensors PATH`: the path was taken for the option's pattern.
        path, tensors = tensors, "*"
    if path is None:
        raise click.UsageError("Missing argument 'PATH'.")
    which = Which(rank, group, node)
    if which.given and not values:
        raise click.UsageError(
            "--rank, --group and --node choose among the values of a component: give --values too"
        )
    asked = Questions(tensors, depth, values, which, files, ranks, metadata, verify)
    return inspect(path, options, asked)


@command("verify", "ckpt verify runs/a", "ckpt verify runs/a --all --json")
@click.argument("path", type=Place())
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Every checkpoint of a root, not only what restore would look at.",
)
@shared
def verify_command(path: str, everything: bool, options: Options) -> Report:
    """Read and check every byte of the checkpoint PATH. When PATH is a root, of the checkpoint that
    restore would take.

    What restore would pass over for it, because it is damaged or was never committed, is named, and
    the exit code is 1.
    """
    return verify(path, options, everything)


@command(
    "cp",
    "ckpt cp runs/a s3://bucket/run-a",
    "ckpt cp runs/a/checkpoint-500 /mnt/b/checkpoint-500 --overwrite",
)
@click.argument("source", metavar="SRC", type=Place())
@click.argument("target", metavar="DST", type=Place())
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace another checkpoint, or a damaged copy, that is in the place.",
)
@click.option("--pins", is_flag=True, help="Pin the copy when SRC is pinned.")
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    help="How many read and write; by default one for each core.",
)
@click.option(
    "--target-option",
    multiple=True,
    metavar="KEY=VALUE",
    help="As --storage-option, for DST alone and instead of those (repeatable).",
)
@shared
def cp_command(
    source: str,
    target: str,
    overwrite: bool,
    pins: bool,
    threads: int | None,
    target_option: tuple[str, ...],
    options: Options,
) -> Report:
    """Copy the checkpoint SRC to DST, verified on the way. When SRC is a root, the checkpoint that
    restore would take; when a newer one cannot be used, a line on standard error says so, and the
    exit code is 0.

    When the last name of DST is checkpoint-<number>, that is the folder that the copy becomes.
    Anything else is a root, and the copy gets the name of SRC in it.

    An interrupted copy is no checkpoint; the same command takes up what it had finished. A damaged
    SRC is refused. When DST is the same checkpoint already, nothing is done; with --overwrite every
    byte of it is checked.
    """
    own = dict(option_pair(pair, "--target-option") for pair in target_option)
    return cp(source, target, options, own or None, threads, overwrite, pins)


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
    except expected_errors() as error:
        outcome = report_of(error)
    if not isinstance(outcome, Report):
        return int(outcome or 0)  # --help and --version
    if as_json:
        show_json({"schema": SCHEMA} | outcome.document)
    else:
        show(outcome.blocks)
    sys.stdout.flush()
    if outcome.complaint and not as_json:
        sys.stderr.write(f"ckpt: {printable(outcome.complaint)}\n")
    return outcome.exit_code


def report_of(error: Exception) -> Report:
    """An error as the report of the command that met it."""
    failure = failure_of(error)
    message = failure.message
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message = f"{message.rstrip('.')} (see {error.ctx.command_path} --help)"
    return Report(failure.document(), [], failure.exit_code, message)
