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
from click.shell_completion import CompletionItem, get_completion_class

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
    """Look at checkpoints; compare, copy, convert, mend and delete them.

    Paths are local folders or any fsspec URL."""


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


@command(
    "show", "ckpt show runs/a model/layers.0.weight --stats", "ckpt show runs/a rng/torch --rank 3"
)
@click.argument("path", type=Place())
@click.argument("name")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="That which rank N restores.")
@click.option("--group", metavar="G", help="Of a PER_GROUP component: a group's number or key.")
@click.option("--node", type=click.IntRange(0), metavar="N", help="Of a PER_NODE component.")
@click.option("--stats", is_flag=True, help="Read all of it: range, mean, NaN, a histogram.")
@click.option(
    "--first",
    "count",
    type=click.IntRange(0, 10_000),
    default=8,
    help="How many of its numbers are shown (default 8).",
)
@shared
def show_command(
    path: str,
    name: str,
    rank: int | None,
    group: str | None,
    node: int | None,
    stats: bool,
    count: int,
    options: Options,
) -> Report:
    """Show the tensor or the value NAME of the checkpoint PATH, whole: NAME is COMPONENT,
    COMPONENT/TENSOR or COMPONENT/path/of/a/value.

    Where each rank, group or node has its own, the first, unless --rank, --group or --node choose.
    Of a tensor: dtype, shape, how it is cut over ranks, who wrote which part, and its first
    numbers. Memory is bounded, whatever its size.
    """
    from .show import show

    return show(path, name, options, Which(rank, group, node), stats, count)


@command(
    "diff", "ckpt diff runs/a", "ckpt diff runs/a/checkpoint-100 runs/b/checkpoint-100 --stats"
)
@click.argument("a", type=Place())
@click.argument("b", required=False, type=Place())
@click.option("--stats", is_flag=True, help="Read what changed, and say by how much.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 where they differ.")
@shared
def diff_command(a: str, b: str | None, stats: bool, exit_code: bool, options: Options) -> Report:
    """What changed from the checkpoint A to the checkpoint B: components, tensors and values. When
    A is a root and B is not given, from its last but one checkpoint to the last.

    By digests: no tensor is read unless --stats is given.
    """
    from .diff import diff

    return diff(a, b, options, stats, exit_code)


@command("pin", "ckpt pin runs/a/checkpoint-500", "ckpt pin s3://bucket/run/checkpoint-500")
@click.argument("paths", nargs=-1, required=True, type=Place())
@shared
def pin_command(paths: tuple[str, ...], options: Options) -> Report:
    """Keep the checkpoints PATHS, whatever retention says, until they are unpinned."""
    from .upkeep import pin

    return pin(paths, options, True)


@command("unpin", "ckpt unpin runs/a/checkpoint-500", "ckpt unpin runs/a/checkpoint-{100,200}")
@click.argument("paths", nargs=-1, required=True, type=Place())
@shared
def unpin_command(paths: tuple[str, ...], options: Options) -> Report:
    """Let retention have the checkpoints PATHS again."""
    from .upkeep import pin

    return pin(paths, options, False)


@command("rm", "ckpt rm runs/a/checkpoint-500", "ckpt rm runs/a/checkpoint-{100,200} --yes")
@click.argument("paths", nargs=-1, required=True, type=Place())
@click.option("--damaged", is_flag=True, help="Also what is damaged, or was never committed.")
@click.option("--yes", is_flag=True, help="Do it; without, only say what would go.")
@shared
def rm_command(paths: tuple[str, ...], damaged: bool, yes: bool, options: Options) -> Report:
    """Delete the checkpoints PATHS: their manifests first, then their own files. What others have
    put in the folder stays. A pinned one is refused."""
    from .upkeep import rm

    return rm(paths, options, damaged, yes)


@command(
    "prune",
    "ckpt prune runs/a --keep last=3 --keep best=eval_loss:min:2",
    "ckpt prune runs/a --partials --yes",
)
@click.argument("root", type=Place())
@click.option(
    "--keep",
    metavar="RULE",
    multiple=True,
    help="last=N, best=METRIC[:min|max][:N], every=STEPS or every=6h (repeatable).",
)
@click.option("--partials", is_flag=True, help="What interrupted saves and copies have left.")
@click.option("--run", metavar="RUN", help="Of this run, not of the one that saved last.")
@click.option("--yes", is_flag=True, help="Do it; without, only say what would go.")
@shared
def prune_command(
    root: str, keep: tuple[str, ...], partials: bool, run: str | None, yes: bool, options: Options
) -> Report:
    """Delete the checkpoints of ROOT that no RULE keeps. The newest and pinned ones always stay.

    Partials go where nobody can be writing them any more; those of another machine stay.
    """
    from .upkeep import prune

    return prune(root, options, keep, partials, run, yes)


@command(
    "plan", "ckpt plan runs/a --world-size 16", "ckpt plan runs/a --world-size 1 --layout whole"
)
@click.argument("path", type=Place())
@click.option("--world-size", type=click.IntRange(1), required=True, help="Ranks to restore on.")
@click.option(
    "--layout",
    type=click.Choice(["same", "whole"]),
    default="same",
    help="Sharded tensors are cut as they are in the checkpoint (default), or wanted whole.",
)
@shared
def plan_command(path: str, world_size: int, layout: str, options: Options) -> Report:
    """What a restore of PATH on another number of ranks would read, at most, and which components
    it would refuse."""
    from .plan import plan

    return plan(path, options, world_size, layout)


@command("doctor", "ckpt doctor runs/a", "ckpt doctor runs/a --tier s3://bucket/run-a --verify")
@click.argument("path", metavar="ROOT", type=Place())
@click.option("--verify", is_flag=True, help="Read every byte of what restore would take.")
@click.option(
    "--tier", "tiers", multiple=True, metavar="ROOT", help="Another root with the same checkpoints."
)
@shared
def doctor_command(path: str, verify: bool, tiers: tuple[str, ...], options: Options) -> Report:
    """What is wrong in ROOT, what restore would do now, and the command that mends it. Changes
    nothing. Exits with 0 when nothing needs doing."""
    from .doctor import doctor

    return doctor(path, options, verify, tiers)


@command("watch", "ckpt watch runs/a", "ckpt watch s3://bucket/run --interval 30 --json")
@click.argument("root", type=Place())
@click.option(
    "--interval",
    type=click.FloatRange(0.01),
    default=2.0,
    help="Seconds between looks (default 2).",
)
@click.option("--timeout", type=click.FloatRange(0), help="Seconds after which it ends.")
@click.option("--events", type=click.IntRange(1), help="How many events to wait for.")
@shared
@click.pass_context
def watch_command(
    context: click.Context,
    root: str,
    interval: float,
    timeout: float | None,
    events: int | None,
    options: Options,
) -> Report:
    """Follow a run: a line for each checkpoint that is committed in ROOT, with the seconds of each
    phase of the save, and for each that is begun, deleted or damaged. Until Ctrl-C."""
    from .watch import watch

    as_json = bool(context.find_root().obj)
    return watch(root, options, interval, timeout, events, as_json, SCHEMA)


IMPORT_FORMATS = (
    "auto",
    "dcp",
    "hf",
    "hf-trainer",
    "accelerate",
    "lightning",
    "torch",
    "legacy",
    "deepspeed-universal",
)


@command(
    "import",
    "ckpt import outputs/checkpoint-500 runs/a --dry-run",
    "ckpt import weights/llama runs/base --step 0 --map model.=",
)
@click.argument("source", type=Place())
@click.argument("root", type=Place())
@click.option("--format", "kind", type=click.Choice(IMPORT_FORMATS), default="auto")
@click.option("--step", type=click.IntRange(0), help="By default what SOURCE says, else 0.")
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="OLD=NEW",
    help="Names of the model's tensors that begin with OLD begin with NEW (repeatable).",
)
@click.option(
    "--component",
    "components",
    multiple=True,
    metavar="KEY=NEW",
    help="Another key for a component; KEY= leaves it out (repeatable).",
)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is there.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@shared
def import_command(
    source: str,
    root: str,
    kind: str,
    step: int | None,
    maps: tuple[str, ...],
    components: tuple[str, ...],
    overwrite: bool,
    dry_run: bool,
    options: Options,
) -> Report:
    """Make a checkpoint in ROOT of what another library wrote in SOURCE: a Hugging Face folder, a
    checkpoint of its Trainer, what Accelerate or Lightning saved, a folder of
    torch.distributed.checkpoint, a file of torch.save or a folder of them, a universal folder of
    DeepSpeed.

    An optimizer that numbers its parameters is stored by their names, where config.json and
    transformers, or the file itself, say them. No pickle is ever executed; what is not understood
    is listed. When the last name of ROOT is checkpoint-<number>, that is the folder.
    """
    from .convert import import_from

    return import_from(source, root, options, kind, step, maps, components, overwrite, dry_run)


@command(
    "export",
    "ckpt export runs/a hf-model --dtype bf16",
    "ckpt export runs/a/checkpoint-500 state.pt --to torch",
)
@click.argument("path", type=Place())
@click.argument("folder", type=Place())
@click.option(
    "--to",
    "kind",
    type=click.Choice(["hf", "torch", "dcp"]),
    default="hf",
    help="A Hugging Face folder (default), a file of torch.save, or a folder of "
    "torch.distributed.checkpoint.",
)
@click.option("--component", metavar="KEY", help="By default model for hf, else all of them.")
@click.option("--dtype", metavar="DTYPE", help="Of floating point tensors: bf16, fp16, fp32.")
@click.option("--keys", multiple=True, metavar="PATTERN", help="Which tensors (repeatable).")
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="OLD=NEW",
    help="Names that begin with OLD begin with NEW (repeatable).",
)
@click.option(
    "--max-shard-size", default="5GB", metavar="SIZE", help="Of a safetensors file (default 5GB)."
)
@click.option("--dry-run", is_flag=True, help="Only say what would be written.")
@shared
def export_command(
    path: str,
    folder: str,
    kind: str,
    component: str | None,
    dtype: str | None,
    keys: tuple[str, ...],
    maps: tuple[str, ...],
    max_shard_size: str,
    dry_run: bool,
    options: Options,
) -> Report:
    """Write the checkpoint PATH as another library reads it, in whatever layout it was saved: what
    was sharded is put together. FOLDER must not be there yet, or be empty; with --to torch it is
    the file."""
    from .convert import export_to

    return export_to(
        path, folder, options, kind, component, dtype, keys, maps, max_shard_size, dry_run
    )


@command("report", "ckpt report runs/a -o report.html", "ckpt report runs/a/checkpoint-5 -o a.html")
@click.argument("path", type=Place())
@click.option(
    "-o", "--output", "target", required=True, metavar="FILE", help="The page that is written."
)
@shared
def report_command(path: str, target: str, options: Options) -> Report:
    """Write the checkpoint PATH and its run as one self-contained HTML page: bytes by module, who
    wrote what, phases of the save, metrics over the run, what changed since the one before."""
    from .report import report

    return report(path, options, target)


COMPLETION = """\b
Examples:
  eval "$(ckpt completion bash)"
  ckpt completion fish > ~/.config/fish/completions/ckpt.fish
"""


@cli.command("completion", epilog=COMPLETION)
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
    except expected_errors() as error:
        outcome = report_of(error)
    if not isinstance(outcome, Report):
        return int(outcome or 0)  # --help and --version
    if as_json and outcome.document:
        show_json({"schema": SCHEMA} | outcome.document)
    elif not as_json:
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
