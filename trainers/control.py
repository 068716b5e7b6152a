"""`ckpt-train control`: the running jobs of this user, and telling one to save, stop or abort.

Exit codes: 0 good, 1 the job refused, 2 usage, 3 no such job, 4 the job does not answer.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from .arguments import InvalidArgument
from .callbacks.jobs import announced_jobs, find_job

REFUSED, USAGE, NOT_FOUND, NO_ANSWER = 1, 2, 3, 4
PATIENCE = 10.0  # seconds for an answer
MOST_BYTES = 2**20  # of an answer


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token is for nobody else."""

    def redirect_request(self, *_: Any) -> None:
        return None


# Straight to the machine that is meant: never by way of a proxy.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect)


def fail(text: str, code: int) -> NoReturn:
    click.echo(f"ckpt-train control: {text}", err=True)
    sys.exit(code)


def ask_job(
    job_id: str, url: str | None, token_file: Path | None, path: str, body: Any = None
) -> dict[str, Any]:
    """What a job of this machine, or the one at `url`, answers: to a POST where there is a body.
    Ends the command where that fails."""
    try:
        token = None if token_file is None else token_file.read_text(encoding="ascii").strip()
        if url is None:
            job = find_job(job_id)
            if job is None:
                fail(f"no job {job_id} is running here; see `ckpt-train control list`", NOT_FOUND)
            url, token = job.url, token or job.token()
        headers = {"Content-Type": "application/json"}
        headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
        data = None if body is None else json.dumps(body).encode()
        where = f"{url.rstrip('/')}/jobs/{job_id}/{path}"
        request = urllib.request.Request(where, data, headers)
        with OPENER.open(request, timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.loads(answer.read(MOST_BYTES))
        return found
    except InvalidArgument as error:
        fail(str(error), USAGE)
    except urllib.error.HTTPError as error:
        with error:
            fail(f"{url} refused ({error.code}): {_reason(error.read(MOST_BYTES))}", REFUSED)
    except (OSError, ValueError) as error:
        fail(f"{url or job_id} does not answer: {error}", NO_ANSWER)


def _reason(body: bytes) -> str:
    try:
        found = json.loads(body)
        return str(found.get("error") or found.get("detail"))
    except (ValueError, AttributeError):
        return body[:200].decode(errors="replace")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def control() -> None:
    """Jobs that are training now: those with a TrainerControlCallback, started by this user."""


@control.command("list")
def list_jobs() -> None:
    """Show the running jobs."""
    jobs = [job for job in announced_jobs() if job.is_alive()]
    for job in jobs:
        click.echo(f"{job.job_id}  {job.hostname} pid {job.pid}  {job.url}  {job.output_dir}")
    if not jobs:
        click.echo("no job is running", err=True)


@control.command()
def cleanup() -> None:
    """Remove what jobs that were killed have left."""
    for job in announced_jobs():
        if not job.is_alive():
            job.withdraw()
            click.echo(f"removed {job.job_id}")


def of_a_job(function: Callable[..., None]) -> Callable[..., None]:
    """The words that every command for one job has."""
    file, text = click.Path(path_type=Path), "With --url: holds its token."
    function = click.option("--token-file", type=file, help=text)(function)
    function = click.option("--url", help="Of a job on another machine: http://HOST:PORT")(function)
    return click.argument("job_id")(function)


@control.command()
@of_a_job
def status(job_id: str, url: str | None, token_file: Path | None) -> None:
    """Show how far a job is, and what it logged last, as JSON."""
    click.echo(json.dumps(ask_job(job_id, url, token_file, "status"), indent=2))


def _command(name: str, sends: str, text: str, question: str | None = None) -> None:
    @control.command(name, help=text)
    @of_a_job
    @click.option("--yes", is_flag=True, hidden=question is None, help="Do not ask.")
    def command(job_id: str, url: str | None, token_file: Path | None, yes: bool) -> None:
        if question is not None and not yes:
            click.confirm(f"{job_id}: {question}", abort=True, err=True)
        answer = ask_job(job_id, url, token_file, "control", {"command": sends})
        click.echo(answer["message"])


LOSES = "end now, and lose what was trained since the last checkpoint?"
_command("save", "save_checkpoint", "Save a checkpoint at the next step.")
_command("stop", "graceful_stop", "End at the next step, with the save that the end has.")
_command("save-stop", "save_and_stop", "Save a checkpoint at the next step, and end.")
_command("abort", "abort", "End at the next step and save nothing.", LOSES)
