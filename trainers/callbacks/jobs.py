"""The running jobs of this user that take commands: the files by which they are found.

`<config>/jobs/<job_id>/` holds `endpoint.json` (where the job listens) and `auth_token`, both
readable by their user alone from the moment they exist.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..arguments import InvalidArgument

log = logging.getLogger(__name__)

ENDPOINT, TOKEN = "endpoint.json", "auth_token"


def jobs_directory() -> Path:
    """Where running jobs announce themselves, one folder each."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get("TRAINERS_CONFIG_DIR") or Path(home) / "trainers") / "jobs"


def check_job_id(job_id: str) -> str:
    """A name that is safe as that of a folder and in a URL. Raises InvalidArgument."""
    if not isinstance(job_id, str) or not re.fullmatch(r"(?!\.)[A-Za-z0-9._-]{1,200}", job_id):
        instead = "use letters, digits, '.', '_' and '-', and begin with none of '.'"
        raise InvalidArgument("job_id", job_id, "not usable as the name of a folder", instead)
    return job_id


@dataclass(frozen=True)
class Endpoint:
    """Where a job listens.

    host: the address that it is bound to; hostname: the machine on which `pid` is its process.
    """

    job_id: str
    host: str
    port: int
    pid: int
    hostname: str
    started_at: float
    output_dir: str | None = None
    logging_dir: str | None = None
    run_name: str | None = None

    def __post_init__(self) -> None:
        check_job_id(self.job_id)
        for name, kind in (("host", str), ("port", int), ("pid", int), ("hostname", str)):
            if type(getattr(self, name)) is not kind:
                raise ValueError(f"{name} is {getattr(self, name)!r}")
        if not (0 < self.port < 2**16 and 0 < self.pid < 2**31):
            raise ValueError(f"port {self.port} and pid {self.pid}")

    @classmethod
    def read(cls, path: Path) -> Endpoint:
        """Raises OSError, ValueError (InvalidArgument, too)."""
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name for field in fields(cls)}
        try:
            return cls(**{name: value for name, value in found.items() if name in known})
        except (AttributeError, TypeError) as error:
            raise ValueError(f"not an endpoint: {error}") from None

    @property
    def folder(self) -> Path:
        return jobs_directory() / self.job_id

    @property
    def url(self) -> str:
        """As a client on the same machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def is_alive(self) -> bool:
        """Whether its process runs; what another machine runs is not known here, and counts."""
        if self.hostname == platform.node():
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            except PermissionError:  # another user's
                return True
        return True

    def token(self) -> str | None:
        """None for a job that asks for none."""
        with suppress(FileNotFoundError):
            return (self.folder / TOKEN).read_text(encoding="ascii").strip()
        return None

    def announce(self, token: str | None) -> None:
        """Write both files. Raises OSError, and FileExistsError where a job of that name runs."""
        other = None
        with suppress(OSError, ValueError):
            other = Endpoint.read(self.folder / ENDPOINT)
        if other is not None and other.is_alive() and other.pid != self.pid:
            raise FileExistsError(f"job {self.job_id} is running already, as pid {other.pid}")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self.withdraw(keep_folder=True)
        if token is not None:
            _write_private(self.folder / TOKEN, token)
        _write_private(self.folder / ENDPOINT, json.dumps(asdict(self)))

    def withdraw(self, keep_folder: bool = False) -> None:
        """Remove the files, and the folder if there is nothing else in it."""
        for name in (ENDPOINT, TOKEN):
            with suppress(OSError):
                (self.folder / name).unlink()
        if not keep_folder:
            with suppress(OSError):
                self.folder.rmdir()


def _write_private(path: Path, text: str) -> None:
    """Nobody else can read it at any moment, and nobody reads half of it."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def announced_jobs() -> Iterator[Endpoint]:
    """All that announced themselves and did not withdraw, those of dead processes too; what cannot
    be read is skipped with a warning."""
    folder = jobs_directory()
    for path in sorted(folder.glob(f"*/{ENDPOINT}")) if folder.is_dir() else ():
        try:
            endpoint = Endpoint.read(path)
            if endpoint.job_id != path.parent.name:
                raise ValueError(f"it is of job {endpoint.job_id}")
            yield endpoint
        except FileNotFoundError:
            continue  # it ended just now
        except (OSError, ValueError) as error:
            log.warning("%s is skipped: %s", path, error)


def find_job(job_id: str) -> Endpoint | None:
    """The job of this name, if its process runs."""
    named = (job for job in announced_jobs() if job.job_id == check_job_id(job_id))
    return next((job for job in named if job.is_alive()), None)
