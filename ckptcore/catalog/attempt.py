"""Who tries to write a checkpoint, so that what is left of dead attempts can be told from work in
progress."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..format.digest import content_digest

__all__ = ["Attempt"]


@cache
def _machine() -> str:
    """8 hex digits for this boot of this machine and its process ids (containers number theirs
    afresh)."""
    parts = [socket.gethostname()]
    if os.path.exists("/proc/sys/kernel/random/boot_id"):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    if os.path.exists("/proc/self/ns/pid"):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return content_digest("|".join(parts).encode())[:8]


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; "0" where the system does not tell; None
    when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else fields[19]
    except (OSError, IndexError):
        if os.path.exists("/proc/self/stat"):
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "0"


def _run(run_id: str) -> str:
    """8 hex digits for a run. The id may be one that another program has written."""
    return content_digest(run_id.encode("utf-8", "surrogatepass"))[:8]


_numbers = itertools.count(1)
_in_flight: set[str] = set()


@dataclass(frozen=True, slots=True)
class Attempt:
    """Who tries to write a checkpoint: run, machine and process, so that leftovers can be told from
    work in progress."""

    run: str
    machine: str
    pid: int
    started: str
    number: int

    @classmethod
    def new(cls, run_id: str) -> Attempt:
        pid = os.getpid()
        run = _run(run_id)
        return cls(run, _machine(), pid, _started(pid) or "0", next(_numbers))

    @classmethod
    def parse(cls, text: str) -> Attempt:
        parts = text.split("-")
        if len(parts) != 5 or not (parts[2].isdecimal() and parts[4].isdecimal()):
            return cls("", "", 0, "", 0)
        return cls(parts[0], parts[1], int(parts[2]), parts[3], int(parts[4]))

    def __str__(self) -> str:
        return f"{self.run}-{self.machine}-{self.pid}-{self.started}-{self.number}"

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """While it lasts, this process does not take the attempt for abandoned."""
        _in_flight.add(str(self))
        try:
            yield
        finally:
            _in_flight.discard(str(self))

    def is_abandoned(self, run_id: str) -> bool:
        """True when nobody can still be writing: its process is gone, or is this one and has moved
        on; from another machine, only when it belongs to this very run, which has one job at a
        time."""
        if self.machine != _machine():
            return self.run == _run(run_id)
        if self.pid == os.getpid() and self.started == (_started(self.pid) or "0"):
            return str(self) not in _in_flight
        return _started(self.pid) != self.started
