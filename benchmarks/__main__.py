"""`python -m benchmarks NAME`: ours, the peers and the machine's own limit, measured in one run.

Examples:  python -m benchmarks save --size 2GiB --rounds 7
           python -m benchmarks cost --device cuda --only tc --only ours-auto
           python -m benchmarks all --json results.json --markdown results.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .frame import Report
from .ground import GIB, MIB, parse_size, work_folder
from .report import as_json, as_markdown, machine, show

__all__ = ["main"]

SAVERS_BY_NAME = [
    "torch",
    "dcp",
    "dcp-async",
    "dcp-kept",
    "dcp-pinned",
    "tc",
    "ours",
    "ours-copy",
    "ours-overlap",
    "ours-auto",
]


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


# What --quick makes of options that are not given: a run of seconds that shows whether everything
# works.
QUICK = {
    "size": 2 * MIB,
    "memory_size": 0,
    "settle": 0.0,
    "rounds": 1,
    "tensors": 50,
    "checkpoints": 20,
    "counts": [50],
    "window": 4,
    "saves": 3,
    "step_ms": 2.0,
}


def quick(context: click.Context, _: click.Parameter, value: bool) -> bool:
    if value:
        context.default_map = {**(context.default_map or {}), **QUICK}
    return value


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every benchmark takes."""
    options = [
        click.option(
            "--json",
            "json_file",
            type=click.Path(path_type=Path),
            help="Write all figures here as JSON.",
        ),
        click.option(
            "--markdown",
            "markdown_file",
            type=click.Path(path_type=Path),
            help="Write the tables here as Markdown.",
        ),
        click.option(
            "--rounds",
            type=click.IntRange(1),
            help="Counted rounds [default: by benchmark, 2 to 7].",
        ),
        click.option(
            "--dir",
            "parent",
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            help="Folder on the disk to be measured [default: the temp folder].",
        ),
        click.option(
            "--quick",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=quick,
            help="Tiny sizes and one round: shows that everything works, its figures mean nothing.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


size_option = click.option(
    "--size",
    type=Size(),
    help="Bytes of state [default: 1GiB; on a GPU 6GiB; cost on the CPU 48MiB; memory 256MiB].",
)
memory_option = click.option(
    "--memory-size",
    type=Size(),
    default=2 * GIB,
    show_default="2GiB",
    help="State of the memory check; 0: none.",
)
settle_option = click.option(
    "--settle",
    type=click.FloatRange(0),
    help="Seconds of rest before each round [default: 3, or 1 for saves in the background].",
)
tensors_option = click.option(
    "--tensors", type=click.IntRange(1), default=10_000, show_default=True
)
counts_option = click.option(
    "--counts",
    type=click.IntRange(1),
    multiple=True,
    help="Tensors of `calls`; may be given several times [default: 100, 1000, 10000].",
)
device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True
)
only_option = click.option(
    "--only",
    multiple=True,
    type=click.Choice(SAVERS_BY_NAME),
    help="These savers only; may be given several times.",
)
window_option = click.option(
    "--window", type=click.IntRange(2), default=270, show_default=True, help="Steps a window."
)
step_option = click.option(
    "--step-ms",
    type=click.FloatRange(0.1),
    help="What a training step is to take [default: 40; background on the CPU 30].",
)
limit_option = click.option(
    "--limit-seconds",
    type=click.FloatRange(1),
    default=470.0,
    show_default=True,
    help="No further round of `cost` is begun that would end later than this.",
)
saves_option = click.option("--saves", type=click.IntRange(2), default=50, show_default=True)

Measure = Callable[[Path, dict[str, Any]], Report]


def size_of(given: dict[str, Any], cpu: int = GIB, gpu: int = 6 * GIB) -> int:
    size = given["size"] or (cpu if device_of(given) == "cpu" else gpu)
    return int(size)


def device_of(given: dict[str, Any]) -> str:
    return str(given.get("device", "cpu"))


def settle_of(given: dict[str, Any], default: float) -> float:
    return default if given["settle"] is None else float(given["settle"])


def run_save(folder: Path, given: dict[str, Any]) -> Report:
    from . import cuda, save

    size, rest = size_of(given), settle_of(given, 3.0)
    if device_of(given) != "cpu":
        return cuda.run_save(
            folder, size=size, rounds=given["rounds"] or 3, settle_seconds=rest, progress=progress
        )
    return save.run(
        folder,
        size=size,
        rounds=given["rounds"] or 5,
        settle=rest,
        memory_size=given["memory_size"] or None,
        progress=progress,
    )


def run_load(folder: Path, given: dict[str, Any]) -> Report:
    from . import cuda, load

    size = size_of(given)
    if device_of(given) != "cpu":
        return cuda.run_load(
            folder,
            size=size,
            rounds=given["rounds"] or 5,
            settle_seconds=settle_of(given, 0.0),
            cold=given.get("cold", False),
            progress=progress,
        )
    return load.run(
        folder,
        size=size,
        rounds=given["rounds"] or 7,
        settle_seconds=settle_of(given, 3.0),
        progress=progress,
    )


def run_stall(folder: Path, given: dict[str, Any]) -> Report:
    from . import stall

    return stall.run(
        folder,
        size=size_of(given),
        rounds=given["rounds"] or (7 if device_of(given) == "cpu" else 3),
        device=device_of(given),
        settle_seconds=settle_of(given, 1.0),
        only=given.get("only", ()),
        progress=progress,
    )


def run_cost(folder: Path, given: dict[str, Any]) -> Report:
    from . import cost

    return cost.run(
        folder,
        size=size_of(given, cpu=48 * MIB),
        rounds=given["rounds"] or 2,
        device=device_of(given),
        window=given["window"],
        step_seconds=(given["step_ms"] or 40.0) / 1000,
        limit_seconds=given["limit_seconds"],
        settle_seconds=settle_of(given, 0.0),
        only=given.get("only", ()),
        progress=progress,
    )


def run_background(folder: Path, given: dict[str, Any]) -> Report:
    from . import background

    cpu = device_of(given) == "cpu"
    return background.run(
        folder,
        size=size_of(given),
        rounds=given["rounds"] or (7 if cpu else 3),
        device=device_of(given),
        step_seconds=(given["step_ms"] or (30.0 if cpu else 40.0)) / 1000,
        settle_seconds=settle_of(given, 1.0),
        only=given.get("only", ()),
        progress=progress,
    )


def run_memory(folder: Path, given: dict[str, Any]) -> Report:
    from . import held

    return held.run(
        folder,
        size=size_of(
            {**given, "size": given.get("held_size") or given["size"]}, GIB // 4, GIB // 4
        ),
        saves=given["saves"],
        device=device_of(given),
        only=given.get("only", ()),
        progress=progress,
    )


def run_inspect(folder: Path, given: dict[str, Any]) -> Report:
    from . import inspect

    return inspect.run(
        folder, tensors=given["tensors"], rounds=given["rounds"] or 7, progress=progress
    )


def run_command(folder: Path, given: dict[str, Any]) -> Report:
    from . import command

    return command.run(
        folder,
        checkpoints=given.get("checkpoints") or 1000,
        size=given["size"] or 2 * GIB,
        rounds=given["rounds"] or 5,
        progress=progress,
    )


def run_reshard(folder: Path, given: dict[str, Any]) -> Report:
    from . import reshard

    return reshard.run(folder, size=size_of(given), rounds=given["rounds"] or 5, progress=progress)


def run_remote(folder: Path, given: dict[str, Any]) -> Report:
    from . import remote

    return remote.run(folder, size=size_of(given), rounds=given["rounds"] or 5, progress=progress)


def run_calls(folder: Path, given: dict[str, Any]) -> Report:
    from . import calls

    counts = given.get("counts") or calls.COUNTS
    return calls.run(folder, counts=counts, rounds=given["rounds"] or 5, progress=progress)


def run_gpu_calls(folder: Path, given: dict[str, Any]) -> Report:
    from . import gpu_calls

    return gpu_calls.run(
        folder,
        size=size_of(given, cpu=MIB, gpu=GIB),
        counts=given.get("counts") or gpu_calls.COUNTS,
        rounds=given["rounds"] or 5,
        device=device_of(given),
        progress=progress,
    )


def run_large(folder: Path, given: dict[str, Any]) -> Report:
    from . import large

    return large.run(
        folder,
        size=size_of(given, cpu=GIB // 4, gpu=30 * 10**9),
        device=device_of(given),
        progress=progress,
    )


def run_left(folder: Path, given: dict[str, Any]) -> Report:
    from . import left

    return left.run(
        folder,
        size=size_of(given, cpu=48 * MIB),
        rounds=given["rounds"] or 3,
        device=device_of(given),
        step_seconds=(given["step_ms"] or 40.0) / 1000,
        window=given["window"],
        progress=progress,
    )


def run_restart(folder: Path, given: dict[str, Any]) -> Report:
    from . import restart

    return restart.run(
        folder,
        size=size_of(given, cpu=48 * MIB),
        rounds=given["rounds"] or 3,
        device=device_of(given),
        step_seconds=(given["step_ms"] or 40.0) / 1000,
        window=given["window"],
        progress=progress,
    )


def run_plan(folder: Path, given: dict[str, Any]) -> Report:
    from . import plan

    return plan.run(rounds=given["rounds"] or 5, progress=progress)


def run_ranks(folder: Path, given: dict[str, Any]) -> Report:
    from . import ranks

    return ranks.run(
        folder, tensors=given["tensors"], rounds=given["rounds"] or 3, progress=progress
    )


def run_validate(folder: Path, given: dict[str, Any]) -> Report:
    from . import validate

    return validate.run(
        folder,
        size=min(size_of(given), GIB // 4),
        rounds=given["rounds"] or 7,
        settle_seconds=settle_of(given, 3.0),
        progress=progress,
    )


def run_reuse(folder: Path, given: dict[str, Any]) -> Report:
    from . import reuse

    return reuse.run(
        folder,
        size=size_of(given),
        rounds=given["rounds"] or 5,
        settle=settle_of(given, 2.0),
        progress=progress,
    )


ALL: list[Measure] = [
    run_save,
    run_load,
    run_stall,
    run_background,
    run_memory,
    run_reshard,
    run_calls,
    run_plan,
    run_validate,
    run_reuse,
    run_inspect,
]
ON_GPU: list[Measure] = [run_save, run_load, run_stall, run_cost, run_background, run_memory]


def on_gpu(measure: Measure) -> Measure:
    return lambda folder, given: measure(folder, {**given, "device": "cuda"})


def carry_out(measures: list[Measure], given: dict[str, Any]) -> None:
    """Run, print and write; the exit code says nothing about targets, only whether it could be
    measured."""
    from .training import folder_of_all, in_job, is_first_rank

    where = machine()
    reports: list[Report] = []
    try:
        with in_job(device_of(given)), work_folder(given["parent"]) as folder:
            for measure in measures:
                report = measure(folder_of_all(folder), given)
                if not is_first_rank():
                    continue
                progress("")
                show(report)
                reports.append(report)
                # After each, so that a run which is cut short leaves what it found.
                if given["json_file"]:
                    given["json_file"].write_text(as_json(reports, where))
                if given["markdown_file"]:
                    given["markdown_file"].write_text(as_markdown(reports, where))
            if is_first_rank():
                before, after = where["load"][0], machine()["load"][0]
                click.echo(f"load average at the start {before}, at the end {after}")
    except ValueError as error:
        raise click.ClickException(str(error)) from error


@click.group(
    help=(__doc__ or "").partition("\n")[0],
    context_settings={"help_option_names": ["-h", "--help"]},
)
def main() -> None:
    pass


@main.command("save")
@common
@device_option
@size_option
@memory_option
@settle_option
def save_command(**given: Any) -> None:
    """Durable saves, and the memory that they add."""
    carry_out([run_save], given)


@main.command("load")
@common
@device_option
@size_option
@settle_option
@click.option(
    "--cold",
    is_flag=True,
    help="On a GPU: from the disk too, with the page cache dropped before each load.",
)
def load_command(**given: Any) -> None:
    """Loads into live tensors, page cache warm."""
    carry_out([run_load], given)


@main.command("stall")
@common
@device_option
@size_option
@settle_option
@only_option
def stall_command(**given: Any) -> None:
    """Seconds that an async save holds training."""
    carry_out([run_stall], given)


@main.command("cost")
@common
@device_option
@size_option
@settle_option
@only_option
@window_option
@step_option
@limit_option
def cost_command(**given: Any) -> None:
    """Seconds of training that one checkpoint costs."""
    carry_out([run_cost], given)


@main.command("background")
@common
@device_option
@size_option
@settle_option
@only_option
@step_option
def background_command(**given: Any) -> None:
    """Longer steps while a save is written in the background."""
    carry_out([run_background], given)


@main.command("memory")
@common
@device_option
@size_option
@only_option
@saves_option
def memory_command(**given: Any) -> None:
    """Host memory that async saves hold, and add over many saves."""
    carry_out([run_memory], given)


@main.command("inspect")
@common
@tensors_option
def inspect_command(**given: Any) -> None:
    """`ckpt inspect` on many small tensors: time, bytes read, memory."""
    carry_out([run_inspect], given)


@main.command("command")
@common
@size_option
@click.option("--checkpoints", type=click.IntRange(1), default=1000, show_default=True)
def command_command(**given: Any) -> None:
    """`ckpt` on many checkpoints, on 4,096 ranks, and `diff` of two of 2 GiB."""
    carry_out([run_command], given)


@main.command("reshard")
@common
@size_option
def reshard_command(**given: Any) -> None:
    """Loads onto another layout with real processes, against dcp.load."""
    carry_out([run_reshard], given)


@main.command("calls")
@common
@counts_option
def calls_command(**given: Any) -> None:
    """Work per tensor: the call of an async save, and a load, over many small ones."""
    carry_out([run_calls], given)


@main.command("gpu-calls")
@common
@device_option
@size_option
@counts_option
def gpu_calls_command(**given: Any) -> None:
    """The call of an async save on a GPU, by staging, and the first one with and without
    prewarm."""
    carry_out([run_gpu_calls], given)


@main.command("large")
@common
@device_option
@size_option
def large_command(**given: Any) -> None:
    """30 GB on one GPU: save, kill, load."""
    carry_out([run_large], given)


@main.command("left")
@common
@device_option
@size_option
@window_option
@step_option
def left_command(**given: Any) -> None:
    """Where the seconds of training go that a save costs after its call has returned."""
    carry_out([run_left], given)


@main.command("restart")
@common
@device_option
@size_option
@window_option
@step_option
def restart_command(**given: Any) -> None:
    """Saves past the page cache and through it: their cost, and the load that follows."""
    carry_out([run_restart], given)


@main.command("gpu")
@common
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True)
@click.option(
    "--limit-seconds",
    type=click.FloatRange(1),
    default=520.0,
    show_default=True,
    help="Parts that are left then are not begun.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    help="Parts whose name begins so: cost, calls, tests, load [default: these]; restart, "
    "left, large, stress.",
)
@click.pass_context
def gpu_command(context: click.Context, **given: Any) -> None:
    """Everything that needs a GPU, on all cards: tests, costs, calls, loads; one table at the
    end."""
    from . import gpu
    from .training import has_cuda

    if given["device"] == "cuda" and not has_cuda():
        click.echo("there is no GPU here: nothing was run; --device cpu shows the same in tiny")
        return
    small = given["device"] == "cpu" or context.default_map is not None
    where = machine()
    report = gpu.run(
        device=given["device"],
        limit_seconds=given["limit_seconds"],
        quick=small,
        only=given["parts"],
        output=lambda text: click.echo(text),
    )
    show(report)
    if given["json_file"]:
        given["json_file"].write_text(as_json([report], where))
    if given["markdown_file"]:
        given["markdown_file"].write_text(as_markdown([report], where))


@main.command("remote")
@common
@size_option
def remote_command(**given: Any) -> None:
    """Saves to and loads from S3, against boto3 and s3fs."""
    carry_out([run_remote], given)


@main.command("plan")
@common
def plan_command(**given: Any) -> None:
    """Planning and metadata at 8, 256 and 4,096 ranks, simulated."""
    carry_out([run_plan], given)


@main.command("ranks")
@common
@click.option("--tensors", type=click.IntRange(1), default=1000, show_default=True)
def ranks_command(**given: Any) -> None:
    """64 virtual ranks that save tensors cut over all of them, and what they say to each other."""
    carry_out([run_ranks], given)


@main.command("validate")
@common
@size_option
@settle_option
def validate_command(**given: Any) -> None:
    """What comparing replicas adds to a save (256 MiB at most), by level."""
    carry_out([run_validate], given)


@main.command("reuse")
@common
@size_option
@settle_option
def reuse_command(**given: Any) -> None:
    """The second save of a state of which little has changed."""
    carry_out([run_reuse], given)


@main.command("all")
@common
@size_option
@memory_option
@settle_option
@tensors_option
@counts_option
@only_option
@window_option
@step_option
@limit_option
@saves_option
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Only what runs there [default: everything that can run].",
)
def all_command(device: str | None, **given: Any) -> None:
    """Every benchmark, one after another."""
    from .training import has_cuda

    measures = [] if device == "cuda" else list(ALL)
    if device == "cuda" or (device is None and has_cuda()):
        measures += [on_gpu(measure) for measure in ON_GPU]
    # The memory check has a size of its own: it saves many times.
    carry_out(measures, {**given, "held_size": min(given["size"] or GIB // 4, GIB // 4)})


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
