"""What the tests of many ranks share: what all ranks must agree on, and real processes that start
in milliseconds."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptcore.testing.ranks import run_ranks

HERE = Path(__file__).parent


@pytest.fixture
def files() -> Callable[[Path], set[str]]:
    """The names in a folder."""
    return lambda folder: {entry.name for entry in folder.iterdir()}


@pytest.fixture
def on_all() -> Callable[..., Any]:
    """on_all(results, kind): every rank raised exactly `kind`, with the same message and causes;
    rank 0's error."""

    def check(results: list[Any], kind: type[BaseException]) -> Any:
        assert [type(result) for result in results] == [kind] * len(results), results
        assert {str(result) for result in results} == {str(results[0])}
        assert [result.causes for result in results] == [results[0].causes] * len(results)
        return results[0]

    return check


@pytest.fixture
def errors_of() -> Callable[..., list[Any]]:
    """errors_of(world_size, program, ...): what every rank returned or raised, caught inside the
    rank.

    The rank lives on after its error, as in a program that catches it: nobody is helped by its
    leaving the job.
    """

    def run(world_size: int, program: Callable[..., Any], **how: Any) -> list[Any]:
        def caught(comm: Any) -> Any:
            try:
                return program(comm)
            except Exception as error:
                return error
            finally:
                with comm.round("every rank has its verdict", joining=True):
                    pass

        return run_ranks(world_size, caught, **how)

    return run


@pytest.fixture
def split_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest replicated state is split over its ranks."""
    monkeypatch.setattr("ckptcore.saving.plan.MIN_SHARE_BYTES", 1)


class Processes:
    """Runs the programs of programs.py and training.py on real ranks, forked from one process that
    has imported torch already."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE / "zygote.py")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def run(
        self, program: str, world_size: int, folder: Path, *, deadline: float = 60, **arguments: Any
    ) -> dict[int, Any]:
        """What every rank's program returned: a dict for an error, {"signal": n} for one that was
        killed.

        TimeoutError, after all were killed, when a rank other than a stopped one has not ended
        after `deadline` s.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        order = {
            "program": program,
            "world": world_size,
            "folder": str(folder),
            "deadline": deadline,
        }
        self.process.stdin.write(json.dumps({**order, "arguments": arguments}).encode() + b"\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], deadline + 45)
        assert ready, "the zygote does not answer"
        answer = json.loads(self.process.stdout.readline())
        if answer["late"]:
            raise TimeoutError(
                f"ranks {answer['late']} of {program} have not ended; the others: "
                f"{answer['results']}"
            )
        return {int(rank): result for rank, result in answer["results"].items()}

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()
