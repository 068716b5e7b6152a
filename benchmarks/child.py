"""Runs a command in a child process and reports what it cost. Used by `python -m benchmarks
inspect`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cost", "Reads", "cost_of", "imports_torch", "reads_below"]

# A child starts with the peak memory of the process that forked it, so a small one has to do the
# forking.
LAUNCHER = """
import json, os, subprocess, sys, time
with open(os.devnull, "wb") as sink:
    start = time.perf_counter()
    child = subprocess.Popen(sys.argv[1:], stdout=sink, stderr=subprocess.PIPE)
    error = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
code = os.waitstatus_to_exitcode(status)
cpu = usage.ru_utime + usage.ru_stime
print(json.dumps([seconds, usage.ru_maxrss * 1024, cpu, code, error.decode()[-2000:]]))
"""

# pread64(5</path/file>, ..., count, offset) = result
CALL = re.compile(r"^(?:\d+ +)?(read|pread64|readv|preadv2?|mmap)\((.*)\) = (0x[0-9a-f]+|\d+)")
ON_FILE = re.compile(r"\d+<([^>]+)>")


@dataclass(frozen=True)
class Cost:
    """seconds: on the clock; cpu_seconds: of work, whatever else the machine does meanwhile."""

    seconds: float
    peak_bytes: int
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Reads:
    """Bytes read of files below a folder, by file name; a mapping of a file counts in full."""

    how: str
    by_file: dict[str, int]


def cost_of(command: Sequence[str]) -> Cost:
    """Wall time and peak resident memory of `command`. Raises RuntimeError when it does not end
    with code 0."""
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", LAUNCHER, *command],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds, peak, cpu, code, error = json.loads(done.stdout)
    if code != 0:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {code}: {error.strip()}")
    return Cost(seconds, peak, cpu)


def reads_below(command: Sequence[str], folder: Path) -> Reads | None:
    """What `command` reads of the files in `folder`, by strace; None where strace is not there or
    may not trace."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        log = os.path.join(scratch, "calls")
        calls = "trace=read,pread64,readv,preadv,preadv2,mmap"
        done = subprocess.run(
            [strace, "-f", "-y", "-s", "0", "-e", calls, "-o", log, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode != 0 or not os.path.exists(log):
            return None
        return Reads("strace", _sum_reads(Path(log).read_text(errors="replace"), folder.resolve()))


def _sum_reads(log: str, folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in log.splitlines():
        match = CALL.match(line)
        if match is None:
            continue
        call, arguments, result = match.groups()
        file = ON_FILE.search(arguments)
        if file is None or Path(file.group(1)).parent != folder:
            continue
        count = int(arguments.split(",")[1]) if call == "mmap" else int(result)
        name = Path(file.group(1)).name
        found[name] = found.get(name, 0) + count
    return found


def imports_torch(command: Sequence[str]) -> bool:
    """Whether `command` (a Python program, started as `python ...`) imports torch."""
    times = subprocess.run(
        [command[0], "-X", "importtime", *command[1:]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    names = {
        line.rpartition("|")[2].strip()
        for line in times.stderr.splitlines()
        if line.startswith("import time:")
    }
    return "torch" in names
