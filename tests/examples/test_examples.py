"""The examples of the documents: stopped by a signal, killed, and gone on with to the last bit."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
import warnings
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckptcore
from ckptcore import open_checkpoint, scan_root
from ckptcore.testing.processes import patience

DOCS = Path(ckptcore.__file__).parent.parent / "docs"
EXAMPLES = DOCS / "examples"
EVERY, ENDLESS = 4, 10**6
FORK = multiprocessing.get_context("fork")  # torch is imported already


@pytest.fixture(autouse=True, scope="module")
def imported_once() -> None:
    """What every process would import by itself, for seconds."""
    for name in ("ckptcore.manager", "ckptcore.preemption", "torch._dynamo"):
        import_module(name)
    for name in ("torch.distributed.fsdp", "torch.optim.swa_utils"):
        import_module(name)


def rank_of(example: str, root: Path, steps: int, rank: int, ranks: int, port: int) -> None:
    """One process, as torchrun starts it (alone: as it is started without)."""
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    torch.set_num_threads(1)
    warnings.simplefilter("default")  # they are errors in these tests, and not for users
    sys.argv = [example, str(root), "--steps", str(steps), "--every", str(EVERY)]
    runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")


def host_store(ports: Connection) -> None:
    """As under torchrun, the store of the ranks is in a process that outlives them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports.send(store.port)
    ports.recv()


class Job:
    """An example on some ranks."""

    def __init__(self, example: str, root: Path, ranks: int, steps: int = ENDLESS) -> None:
        self.root = root
        ports, theirs = FORK.Pipe()
        FORK.Process(target=host_store, args=(theirs,), daemon=True).start()
        port = ports.recv()
        self.host = ports
        self.ranks: list[BaseProcess] = [
            FORK.Process(
                target=rank_of, args=(example, root, steps, rank, ranks, port), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in self.ranks:
            process.start()

    def wait_for_a_save(self, after: int) -> None:
        deadline = time.monotonic() + 60 * patience()
        while self.newest() <= after:
            assert time.monotonic() < deadline and all(rank.is_alive() for rank in self.ranks)
            time.sleep(0.005)

    def newest(self) -> int:
        names = (path.parent.name for path in self.root.glob("*/checkpoint_manifest.json"))
        steps = [re.fullmatch(r"checkpoint-(\d+)", name) for name in names]
        return max((int(step[1]) for step in steps if step), default=0)

    def send(self, number: signal.Signals, ranks: int) -> list[int | None]:
        for process in self.ranks[:ranks]:
            assert process.pid is not None
            os.kill(process.pid, number)
        return self.codes()

    def codes(self) -> list[int | None]:
        for process in self.ranks:
            process.join(60 * patience())
        self.host.send("over")
        return [process.exitcode for process in self.ranks]


def contents(checkpoint: Path) -> dict[str, bytes]:
    with open_checkpoint(str(checkpoint)) as view:
        return {info.full_name: view.read(info.full_name).tobytes() for info in view.tensors()}


@pytest.mark.parametrize(("example", "ranks"), [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("gan", 2)])
def test_a_run_that_is_stopped_and_killed_is_the_run_that_was_not(
    example: str, ranks: int, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    job = Job(example, root, ranks)
    job.wait_for_a_save(0)
    assert job.send(signal.SIGTERM, 1) == [0] * ranks  # one rank gets it, all stop
    stopped = job.newest()
    assert [info.status for info in scan_root(str(root))][-1] == "committed"
    job = Job(example, root, ranks)
    job.wait_for_a_save(stopped)
    assert job.send(signal.SIGKILL, ranks) == [-signal.SIGKILL] * ranks
    last = job.newest() + EVERY
    assert Job(example, root, ranks, last).codes() == [0] * ranks
    assert Job(example, tmp_path / "whole", ranks, last).codes() == [0] * ranks
    found = contents(root / f"checkpoint-{last}")
    assert len(found) > 5 and found == contents(tmp_path / "whole" / f"checkpoint-{last}")


def test_slices_of_two_ranks_are_those_of_three(tmp_path: Path) -> None:
    """Sums are made in another order, so it is the restored state that is compared."""
    assert Job("fsdp2", tmp_path, 2, EVERY).codes() == [0, 0]
    assert Job("fsdp2", tmp_path, 3, EVERY).codes() == [0, 0, 0]  # restores, and has nothing to do
    assert Job("fsdp2", tmp_path, 3, 2 * EVERY).codes() == [0, 0, 0]
    with open_checkpoint(str(tmp_path / f"checkpoint-{2 * EVERY}")) as view:
        assert (view.manifest.step, view.manifest.world_size) == (2 * EVERY, 3)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short_and_shown_in_the_guide(path: Path) -> None:
    text = path.read_text()
    assert 40 <= len(text.splitlines()) <= 80
    for needed in ("restore(", "save_async(", "Keep", "PreemptionGuard("):
        assert needed in text
    assert f"examples/{path.name}" in re.sub(r"\s+", " ", (DOCS / "guide.md").read_text())
