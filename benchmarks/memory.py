"""How much resident memory a save adds, for each saver in a child process of its own.

Launch by hand: `python -m benchmarks.memory --size 2GiB --dir /some/disk`. `python -m benchmarks
save` does it. Prints one JSON object: by saver name, {"added": bytes} or {"problem": text}.

One process makes the state and then forks a child for each saver, so that all of them save the same
pages. The child saves once in small (imports, pools), resets the kernel's high-water mark, saves
the state and reads the mark.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from .frame import PEER_ERRORS
from .ground import MIB, make_state, parse_size
from .savers import SAVERS, Saver, State

__all__ = ["added_by_saves", "high_water", "peak_added", "resident"]


def added_by_saves(size: int, folder: Path) -> dict[str, dict[str, int | str]]:
    """Run the measurement in a fresh process; raises RuntimeError when it fails."""
    command = [sys.executable, "-m", "benchmarks.memory", "--size", str(size), "--dir", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"the memory measurement ended with exit code {done.returncode}; its error is above"
        )
    found: dict[str, dict[str, int | str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def peak_added(work: Callable[[], None]) -> int:
    """Bytes by which `work` raised this process's resident set at its highest. Linux only."""
    before = resident()
    return max(0, high_water(work) - before)


def high_water(work: Callable[[], None]) -> int:
    """The highest resident set of this process while `work` ran. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from what is resident now
    work()
    return _status("VmHWM")


def resident() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def _in_child(saver: Saver, state: State, small: State, folder: Path) -> dict[str, int | str]:
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        status = 1
        try:
            found: dict[str, int | str]
            try:
                with tempfile.TemporaryDirectory(dir=folder) as warm:
                    saver.save(small, Path(warm))
                with tempfile.TemporaryDirectory(dir=folder) as target:
                    found = {"added": peak_added(lambda: saver.save(state, Path(target)))}
            except PEER_ERRORS as error:
                found = {"problem": f"{type(error).__name__}: {error}"}
            os.write(sender, json.dumps(found).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return dict(json.loads(data)) if data else {"problem": "the child process died"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--size", type=parse_size, default=parse_size("2GiB"))
    parser.add_argument("--dir", type=Path, required=True)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # a fork must not find a thread pool
    state = make_state(options.size)
    small = make_state(MIB)
    folder = options.dir / "memory"
    folder.mkdir(parents=True)
    results = {}
    for saver in SAVERS:
        results[saver.name] = (
            {"problem": saver.missing} if saver.missing else _in_child(saver, state, small, folder)
        )
        os.sync()
    shutil.rmtree(folder)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
