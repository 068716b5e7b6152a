"""Real ranks: processes of one job, that start in milliseconds and never hang.

    # programs.py
    def train(rank: int, world_size: int, folder: str) -> int:
        dist.init_process_group("gloo")          # as under torchrun
        ...
        return step                              # anything that JSON can hold

    # test_programs.py
    def test_a_run_goes_on(tmp_path):
        ranks = RankProcesses(Path(__file__).with_name("programs.py"))
        assert ranks.run("train", 2, {"folder": str(tmp_path)}) == [10, 10]

One process imports torch once; every rank is a fork of it, with the environment that `torchrun`
would give it. The store of the job lives in a process of its own, so it outlives every rank. For
threads instead of processes, which is what most tests need, see `run_ranks`.

A job has a deadline. When a rank fails, the others are ended a little later. What did not end by
itself says where every thread of it is (`faulthandler`), in `RankOutcome.output`.

torch itself dies in native code once in some thousand jobs (FSDP2 over gloo on a CPU aborts). Such
a job is repeated once, with a warning: see `run`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "PATIENCE",
    "RankCrashed",
    "RankJob",
    "RankOutcome",
    "RankProcesses",
    "RanksDied",
    "patience",
]

PATIENCE = "CKPTCORE_TEST_PATIENCE"
NATIVE_DEATHS = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV})
# Imported once for all jobs; what else a program needs is imported once for its file.
WARM = ("torch.distributed.fsdp", "torch._dynamo", "ckptcore.manager", "ckptcore.testing.faults")
# torch asks for the name of the address that it connects to, and goes on without.
RESOLVER = "timeout:1 attempts:1"
ANSWER_SECONDS = 60.0  # for all that is not the program: imports, forks, ends


def patience() -> float:
    """What every deadline is multiplied with: the environment variable CKPTCORE_TEST_PATIENCE,
    1 without it. A machine whose cores are busy needs more."""
    return float(os.environ.get(PATIENCE, "1"))


class RankCrashed(RuntimeWarning):
    """A rank died in native code, by a signal that nobody sent; the job was repeated."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended.

    state: "returned"; "raised"; "died" (of a signal, or it left with a code); "stopped" (by SIGSTOP
    when no other rank ran any more); "late" (it ran when the deadline passed); "ended" (it ran when
    another rank had failed).
    """

    rank: int
    state: str
    value: Any  # what the program returned
    error: str  # the traceback of what it raised
    exit_code: int  # negative: the signal that ended it
    output: str  # the end of what it printed on both streams, stacks of its threads included

    def describe(self) -> str:
        """Its end in words."""
        what = f"{self.output}{self.error}"
        return f"rank {self.rank} {self.state}, exit code {self.exit_code}\n{what}"


class RanksDied(AssertionError):
    """Not every rank returned; the message has the traceback, output and stacks of each.

    outcomes: all of them, in order of rank.
    """

    def __init__(self, program: str, outcomes: Sequence[RankOutcome]) -> None:
        self.outcomes = list(outcomes)
        failed = sorted(outcomes, key=lambda outcome: ORDER.index(outcome.state))
        parts = [found.describe() for found in failed if found.state != "returned"]
        super().__init__("\n".join([f"{program} did not return on {len(parts)} ranks", *parts]))


ORDER = ("died", "raised", "late", "stopped", "ended", "returned")  # causes before consequences


class _Server:
    """The process that forks the ranks (`process_server.py`), and its two pipes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pending = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ckptcore.testing.process_server", *WARM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": RESOLVER},
        )

    def send(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, seconds: float) -> Any:
        assert self.process.stdout is not None
        pipe, end = self.process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self.pending:
            if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                self.close(kill=True)
                raise TimeoutError(f"the process that forks ranks is silent for {seconds:g} s")
            if not (part := os.read(pipe, 1 << 20)):
                self.close()
                raise RuntimeError(f"the process that forks ranks ended: {self.process.wait(10)}")
            self.pending += part
        line, _, self.pending = self.pending.partition(b"\n")
        found = json.loads(line)
        if "broken" in found:
            raise RuntimeError(found["broken"])
        return found

    def close(self, kill: bool = False) -> None:
        _servers.discard(self)
        assert self.process.stdin is not None
        self.process.stdin.close()
        if kill:
            self.process.kill()


_servers: set[_Server] = set()  # at most one, for all jobs of this process
_starting = threading.Lock()


def _server() -> _Server:
    with _starting:
        if not _servers:
            _servers.add(_Server())
        return next(iter(_servers))


@atexit.register
def _close_servers() -> None:
    for server in list(_servers):
        server.close()
        server.process.wait()


class RankJob:
    """A job whose ranks run: made by `RankProcesses.start`."""

    def __init__(self, server: _Server, program: str, seconds: float) -> None:
        self._server, self._seconds = server, seconds
        self.program = program
        self.pids: list[int] = server.answer(ANSWER_SECONDS * patience())["pids"]
        self._outcomes: list[RankOutcome] | None = None

    def send(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal.

        number: the signal. ranks: who gets it; None: all.
        """
        for rank, pid in enumerate(self.pids):
            if ranks is None or rank in ranks:
                os.kill(pid, number)

    def outcomes(self) -> list[RankOutcome]:
        """Wait until the job has ended; how each rank did, in order of rank."""
        if self._outcomes is None:
            try:
                found = self._server.answer(self._seconds + ANSWER_SECONDS * patience())
            finally:
                self._server.lock.release()
            self._outcomes = [RankOutcome(**outcome) for outcome in found["outcomes"]]
        return self._outcomes

    def values(self) -> list[Any]:
        """Wait until the job has ended; what each rank returned. RanksDied where one did not."""
        found = self.outcomes()
        if any(outcome.state != "returned" for outcome in found):
            raise RanksDied(self.program, found)
        return [outcome.value for outcome in found]


class RankProcesses:
    """Runs the functions of some files on real ranks, each a process of its own.

    files: Python files. Every function in them is a program: it gets the rank, the number of ranks
        and the arguments of `run`, and returns what JSON can hold. A file is imported once, before
        the ranks are forked; it may import its neighbours.
    imports: names of modules to import before the ranks are forked.
    environment: variables that every rank has besides those of `torchrun`.
    """

    def __init__(
        self,
        *files: str | Path,
        imports: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.files = [str(Path(file).resolve()) for file in files]
        self.imports = list(imports)
        self.environment = dict(environment or {})

    def start(
        self,
        program: str,
        world_size: int,
        arguments: Mapping[str, Any] | None = None,
        *,
        folder: str | Path | None = None,
        deadline: float = 60.0,
        backend: str | None = None,
        survivors: str = "end",
    ) -> RankJob:
        """Start a job and return; one job runs at a time.

        program: name of a function in the files.
        world_size: number of ranks. One rank has no environment of `torchrun`, except with a
            backend.
        arguments: by name, what JSON can hold.
        folder: working folder of the ranks.
        deadline: seconds until the ranks that still run are ended, times `patience()`.
        backend: of a process group of all ranks that is made before the program, as "gloo"; None:
            the program makes it.
        survivors: "end" or "live". What the others do when a rank has failed: they have some
            seconds more, or as long as the job.
        """
        server = _server()
        server.lock.acquire()
        order = {
            "files": self.files,
            "imports": self.imports,
            "environment": self.environment,
            "program": program,
            "world_size": world_size,
            "arguments": dict(arguments or {}),
            "folder": None if folder is None else str(folder),
            "deadline": deadline * patience(),
            "grace": None if survivors == "live" else 2.0 * patience(),
            "backend": backend,
        }
        try:
            server.send(order)
            return RankJob(server, program, deadline * patience())
        except BaseException:
            server.lock.release()
            raise

    def outcomes(
        self,
        program: str,
        world_size: int,
        arguments: Mapping[str, Any] | None = None,
        *,
        folder: str | Path | None = None,
        expected_signals: Collection[int] = (),
        **how: Any,
    ) -> list[RankOutcome]:
        """Run a job to its end; how each rank ended, in order of rank.

        folder: all that the ranks change, and their working folder. With it, a job in which a rank
            died by SIGABRT, SIGBUS or SIGSEGV is repeated once, with a RankCrashed warning, after
            the folder is put back as it was.
        expected_signals: signals that the program sends itself: no reason to repeat.
        program, world_size, arguments, how: as for `start`.
        """
        with ExitStack() as stack:
            kept = None
            if folder is not None:
                kept = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "before"
                shutil.copytree(folder, kept, symlinks=True)
            found = self.start(program, world_size, arguments, folder=folder, **how).outcomes()
            crashed = [
                outcome
                for outcome in found
                if -outcome.exit_code in NATIVE_DEATHS - set(expected_signals)
            ]
            if not crashed or kept is None:
                return found
            warnings.warn(
                f"{program} is repeated, because torch died in native code\n"
                + "\n".join(outcome.describe() for outcome in crashed),
                RankCrashed,
                stacklevel=3,
            )
            _put_back(kept, Path(str(folder)))
            return self.start(program, world_size, arguments, folder=folder, **how).outcomes()

    def run(
        self, program: str, world_size: int, arguments: Mapping[str, Any] | None = None, **how: Any
    ) -> list[Any]:
        """Run a job to its end; what each rank returned. RanksDied when one did not.

        program, world_size, arguments, how: as for `outcomes`.
        """
        found = self.outcomes(program, world_size, arguments, **how)
        if any(outcome.state != "returned" for outcome in found):
            raise RanksDied(program, found)
        return [outcome.value for outcome in found]


def _put_back(kept: Path, folder: Path) -> None:
    """Make what is in `folder` what is in `kept`."""
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    shutil.copytree(kept, folder, symlinks=True, dirs_exist_ok=True)
