"""`python -m benchmarks NAME`: ours, the peers and the machine's own limit, measured in one run.

Examples:  python -m benchmarks save --size 2GiB --rounds 7
           python -m benchmarks all --json results.json --markdown results.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .frame import Report
from .ground import GIB, parse_size, work_folder
from .report import as_json, as_markdown, machine, show

__all__ = ["main"]


class Size(click.ParamType):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def progress(text: str) -> None:
    """One line that is overwritten, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every benchmark takes."""
    options = [
        click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures here as JSON."),
        click.option(
            "--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the tables here as Markdown."
        ),
        click.option("--rounds", type=click.IntRange(1), help="Counted rounds [default: by benchmark, 5 to 7]."),
        click.option(
            "--dir",
            "parent",
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            help="Folder on the disk to be measured [default: the temp folder].",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


size_option = click.option("--size", type=Size(), default=GIB, show_default="1GiB", help="Bytes of state.")
memory_option = click.option(
    "--memory-size", type=Size(), default=2 * GIB, show_default="2GiB", help="State of the memory check; 0: none."
)
settle_option = click.option(
    "--settle", type=click.FloatRange(0), default=3.0, show_default=True, help="Seconds of rest before each round."
)
tensors_option = click.option("--tensors", type=click.IntRange(1), default=10_000, show_default=True)

Measure = Callable[[Path, dict[str, Any]], Report]


def run_save(folder: Path, given: dict[str, Any]) -> Report:
    from . import save

    return save.run(
        folder, size=given["size"], rounds=given["rounds"] or 5, settle=given["settle"],
        memory_size=given["memory_size"] or None, progress=progress,
    )  # fmt: skip


def run_load(folder: Path, given: dict[str, Any]) -> Report:
    from . import load

    return load.run(
        folder, size=given["size"], rounds=given["rounds"] or 7, settle_seconds=given["settle"], progress=progress
    )


def run_inspect(folder: Path, given: dict[str, Any]) -> Report:
    from . import inspect

    return inspect.run(folder, tensors=given["tensors"], rounds=given["rounds"] or 7, progress=progress)


def run_reshard(folder: Path, given: dict[str, Any]) -> Report:
    from . import reshard

    return reshard.run(folder, size=given["size"], rounds=given["rounds"] or 5, progress=progress)


def run_plan(folder: Path, given: dict[str, Any]) -> Report:
    from . import plan

    return plan.run(rounds=given["rounds"] or 5, progress=progress)


def run_validate(folder: Path, given: dict[str, Any]) -> Report:
    from . import validate

    return validate.run(
        folder,
        size=min(given["size"], GIB // 4),
        rounds=given["rounds"] or 7,
        settle_seconds=given["settle"],
        progress=progress,
    )


ALL: list[Measure] = [run_save, run_load, run_reshard, run_plan, run_validate, run_inspect]


def carry_out(measures: list[Measure], given: dict[str, Any]) -> None:
    """Run, print and write; the exit code says nothing about targets, only whether it could be measured."""
    where = machine()
    reports = []
    try:
        with work_folder(given["parent"]) as folder:
            for measure in measures:
                report = measure(folder, given)
                progress("")
                show(report)
                reports.append(report)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"load average at the start {where['load'][0]}, at the end {machine()['load'][0]}")
    if given["json_file"]:
        given["json_file"].write_text(as_json(reports, where))
    if given["markdown_file"]:
        given["markdown_file"].write_text(as_markdown(reports, where))


@click.group(help=(__doc__ or "").partition("\n")[0], context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    pass


@main.command("save")
@common
@size_option
@memory_option
@settle_option
def save_command(**given: Any) -> None:
    """Durable saves of CPU tensors, and the memory that each adds."""
    carry_out([run_save], given)


@main.command("load")
@common
@size_option
@settle_option
def load_command(**given: Any) -> None:
    """Loads into live CPU tensors, page cache warm."""
    carry_out([run_load], given)


@main.command("inspect")
@common
@tensors_option
def inspect_command(**given: Any) -> None:
    """`ckpt inspect` on many small tensors: time, bytes read, memory."""
    carry_out([run_inspect], given)


@main.command("reshard")
@common
@size_option
def reshard_command(**given: Any) -> None:
    """Loads onto another layout with real processes, against dcp.load."""
    carry_out([run_reshard], given)


@main.command("plan")
@common
def plan_command(**given: Any) -> None:
    """Planning and metadata at 8, 256 and 4,096 ranks, simulated."""
    carry_out([run_plan], given)


@main.command("validate")
@common
@size_option
@settle_option
def validate_command(**given: Any) -> None:
    """What comparing replicas adds to a save (256 MiB at most), by level."""
    carry_out([run_validate], given)


@main.command("all")
@common
@size_option
@memory_option
@settle_option
@tensors_option
def all_command(**given: Any) -> None:
    """Every benchmark, one after another."""
    carry_out(ALL, given)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
