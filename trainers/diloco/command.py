"""`ckpt-train diloco`: the server of training islands, an island, and what is going on.

Exit codes: 0 good, 1 bad (refused, or a damaged checkpoint), 2 usage, 3 not found, 4 no answer, or
storage.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ckptcore import CheckpointError, CheckpointNotFound, StorageError

from ..arguments import DataNotFound, InvalidArgument

__all__ = ["Training", "diloco"]

BAD, USAGE, NOT_FOUND, NO_ANSWER = 1, 2, 3, 4


@dataclass(frozen=True)
class Training:
    """What `ckpt-train` lends this command: the model that its words train, and itself."""

    build: Callable[[tuple[str, ...]], Any]
    train: Callable[[Sequence[str]], int]


@contextmanager
def failures() -> Iterator[None]:
    """Ends the command with what an error says, in one line."""
    if find_spec("aiohttp") is None:
        raise click.ClickException("this needs aiohttp: pip install 'ckptcore[trainers,diloco]'")
    try:
        yield
    except (CheckpointNotFound, DataNotFound, FileNotFoundError) as error:
        fail(error, NOT_FOUND)
    except InvalidArgument as error:
        fail(error, USAGE)
    except (StorageError, OSError) as error:  # ServerUnreachable among them
        fail(error, NO_ANSWER)
    except CheckpointError as error:
        fail(error, BAD)


def fail(error: Exception, code: int) -> None:
    click.echo(f"ckpt-train diloco: {' '.join(str(error).split())}", err=True)
    sys.exit(code)


def token_of(path: Path | None) -> str | None:
    """The token in a file, else the environment's."""
    if path is None:
        return os.environ.get("DILOCO_TOKEN") or None
    return path.read_text(encoding="utf-8").strip()


def shared(function: Callable[..., None]) -> Callable[..., None]:
    """The options of all who talk to a server."""
    for add in (
        click.option(
            "--ca-file", envvar="DILOCO_CA_FILE", help="Certificates to trust (PEM), for TLS."
        ),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path),
            help="Holds the server's token.  [default: DILOCO_TOKEN of the environment]",
        ),
        click.option(
            "--server",
            "address",
            envvar="DILOCO_SERVER",
            default="127.0.0.1:8512",
            show_default=True,
            help="HOST:PORT or URL of the server.",
        ),
    ):
        function = add(function)
    return function


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def diloco() -> None:
    """Islands that train by themselves, and meet on a server every few hundred steps."""


@diloco.command()
@click.argument("words", nargs=-1)
@click.option("-n", "--workers", default=1, show_default=True, help="The first round waits for.")
@click.option("--min-workers", default=1, show_default=True, help="Fewer left end the run.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8512, show_default=True)
@click.option("--token-file", type=click.Path(path_type=Path), help="Holds the token.")
@click.option("--certificate", help="PEM file, for TLS.")
@click.option("--key", help="PEM file of its key.")
@click.option("--outer-lr", default=0.7, show_default=True)
@click.option("--outer-momentum", default=0.9, show_default=True)
@click.option("--nesterov/--no-nesterov", default=True, show_default=True)
@click.option("--float64", is_flag=True, help="Compute in float64.  [default: float32]")
@click.option("--asynchronous", is_flag=True, help="Take what comes, and wait for nobody.")
@click.option("--delay", default=1, show_default=True, help="Of Nesterov's momentum.")
@click.option("--grace-period", default=0.0, show_default=True, help="Seconds to collect for.")
@click.option("--dylu", is_flag=True, help="Advise slow workers to sync after fewer steps.")
@click.option("--round-timeout", default=540.0, show_default=True, help="Seconds for slow ones.")
@click.option("--heartbeat-timeout", default=120.0, show_default=True, help="Seconds of silence.")
@click.option("--from", "start", help="A checkpoint whose model the run starts from.")
@click.option("--save-dir", help="For checkpoints of the server.  [default: none]")
@click.option("--save-every", default=1, show_default=True, help="Outer steps.")
@click.option("--keep", default=3, show_default=True, help="Checkpoints that stay.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --save-dir.")
@click.option("--resume-version", type=int, help="From the one after so many outer steps.")
@click.pass_obj
def server(training: Training, /, words: tuple[str, ...], **options: Any) -> None:
    """Serve the global parameters of the model that `ckpt-train WORDS` trains."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    with failures():
        found = make_server(training.build(words), **options)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with found:
                found.wait()
        except KeyboardInterrupt:
            click.echo("stopped; --resume goes on from the last checkpoint", err=True)


def make_server(model: Any, start: str | None, token_file: Path | None, **given: Any) -> Any:
    """The server that the options say."""
    import torch

    from ckptcore import CheckpointCoordinator

    from .outer import DelayedNesterov
    from .rounds import Rules
    from .server import Access, DiLoCoServer

    def taken(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    lr, momentum = given["outer_lr"], given["outer_momentum"]
    nesterov = given["nesterov"] and momentum > 0
    outer: Any = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov)
    if given["delay"] != 1:
        outer = partial(DelayedNesterov, lr=lr, momentum=momentum, delay=given["delay"])
    if start is not None:
        CheckpointCoordinator({"model": model}).load_checkpoint(start)
    rules = taken("workers", "min_workers", "asynchronous", "grace_period", "dylu")
    rules |= taken("round_timeout", "heartbeat_timeout")
    rules["max_workers"] = max(rules["workers"], Rules.max_workers)
    version = given["resume_version"]
    return DiLoCoServer(
        model,
        Rules(**rules),
        Access(token=token_of(token_file), **taken("host", "port", "certificate", "key")),
        outer_optimizer=outer,
        dtype=torch.float64 if given["float64"] else torch.float32,
        resume=given["resume"] if version is None else version,
        **taken("save_dir", "save_every", "keep"),
    )


@diloco.command()
@shared
@click.option("--sync-every", type=int, help="Local steps between syncs.  [default: 500]")
@click.option("--worker-id", help="Its name.  [default: made up]")
@click.option("--num-fragments", type=int, help="Parts that travel in the background.")
@click.option("--heartbeat-interval", type=float, help="Seconds.  [default: 30]")
@click.option("--bf16/--no-bf16", "bf16_comm", default=None, help="On the wire.  [default: bf16]")
@click.option("--dylu/--no-dylu", default=None, help="Follow the server's advice.")
@click.argument("words", nargs=-1)
@click.pass_obj
def worker(
    training: Training,
    /,
    address: str,
    token_file: Path | None,
    words: tuple[str, ...],
    **options: Any,
) -> None:
    """Train an island: `ckpt-train WORDS`, with the server's parameters every so many steps."""
    with failures():
        said = {"server": address, "token": token_of(token_file), **options}
    for name, value in said.items():  # DiLoCoCallback reads them, on every rank
        if value is not None:
            os.environ[f"DILOCO_{name.upper()}"] = str(value)
    sys.exit(training.train(words))


@diloco.command()
@shared
@click.option("--checksum", is_flag=True, help="Of the global parameters, too.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(
    address: str, token_file: Path | None, ca_file: str | None, checksum: bool, as_json: bool
) -> None:
    """Show the round and the workers of a server."""
    with failures():
        from .client import Target, server_status

        target = Target(address, token_of(token_file), ca_file)
        found = server_status(target, checksum)
    click.echo(json.dumps(found, indent=2) if as_json else table(found))


COLUMNS = ("worker", "host", "last_seen_s", "steps_per_second", "sync_every", "staleness")


def table(found: dict[str, Any]) -> str:
    """A server's status for people."""
    rounds = ", ".join(str(number) for number in found["rounds"]) or "none yet"
    lines = [
        f"{found['mode']}, {found['state']}: {found['version']} outer steps, round {rounds}, "
        f"{found['parameters']:,} parameters",
        f"{found['evicted']} evicted, {found['failed_saves']} failed saves, "
        f"{found['bytes_received']:,} bytes received",
    ]
    if found.get("checksum"):
        lines.append(f"checksum {found['checksum']}")
    rows = [COLUMNS, *([str(w[name]) for name in COLUMNS] for w in found["workers"])]
    widths = [max(len(row[n]) for row in rows) for n in range(len(COLUMNS))]
    states = ["", *("waits" if w["waits"] else "trains" for w in found["workers"])]
    for row, state in zip(rows, states, strict=True):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([*cells, state]).rstrip())
    return "\n".join(lines)
