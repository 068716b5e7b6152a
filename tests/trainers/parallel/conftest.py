"""Real ranks that start in milliseconds: forked from one process per session that has imported
torch and the trainers."""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptcore import open_checkpoint

HERE = Path(__file__).parent


class Ranks:
    """Runs the programs of programs.py."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE / "ranks.py")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def run(self, program: str, world: int, *, deadline: float = 90, **arguments: Any) -> list[Any]:
        """What the program returned on each rank. AssertionError with the trace of the rank that
        failed first."""
        assert self.process.stdin is not None and self.process.stdout is not None
        order = {"program": program, "world": world, "deadline": deadline, "arguments": arguments}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], deadline + 30)
        assert ready, "the ranks' parent does not answer"
        answer = json.loads(self.process.stdout.readline())
        results = [answer["results"].get(str(rank)) for rank in range(world)]
        failed = [result for result in results if isinstance(result, dict) and "error" in result]
        assert not failed, failed[0]["trace"]
        assert not answer["late"], f"ranks {answer['late']} of {program} have not ended"
        return results

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A run for `train`: run(folder, kind, what=..., **args)."""

    def make(
        folder: str, kind: str, what: dict[str, Any] | None = None, **args: Any
    ) -> dict[str, Any]:
        return {
            "kind": kind,
            "args": {"output_dir": str(tmp_path / folder), **args},
            **(what or {}),
        }

    return make


@pytest.fixture
def resumed(ranks: Ranks, tmp_path: Path) -> Callable[..., int]:
    """resumed(world, [(kind, args, steps), ...]): runs each without a stop, and from its
    checkpoints at `steps`.

    Asserts that samples, losses, gradient norms, rates, random streams, weights, moments and the
    log are the same to the last bit on every rank; how many resumed runs there were.
    """

    calls = itertools.count()

    def check(world: int, cases: list[tuple[str, dict[str, Any], list[int]]], **what: Any) -> int:
        folder = tmp_path / f"call-{next(calls)}"
        whole = [
            {"kind": kind, "args": {**args, "output_dir": str(folder / f"whole-{number}")}, **what}
            for number, (kind, args, _) in enumerate(cases)
        ]
        references = ranks.run("train", world, deadline=60 + 20 * len(whole), runs=whole)
        parts = [
            (
                number,
                step,
                {
                    "kind": kind,
                    **what,
                    "args": {
                        **args,
                        "output_dir": str(folder / f"part-{number}-{step}"),
                        "resume_from_checkpoint": str(
                            folder / f"whole-{number}" / f"checkpoint-{step}"
                        ),
                    },
                },
            )
            for number, (kind, args, steps) in enumerate(cases)
            for step in steps
        ]
        results = ranks.run(
            "train", world, deadline=60 + 20 * len(parts), runs=[run for _, _, run in parts]
        )
        for reference, result in zip(references, results, strict=True):
            for (number, step, _), found in zip(parts, result, strict=True):
                expected = reference[number]
                left = {name: seen for name, seen in expected["steps"].items() if int(name) > step}
                assert left and found["from"] == step, (number, step)
                for name, seen in left.items():
                    assert found["steps"][name] == seen, (number, step, name)
                assert found["steps"].keys() == left.keys()
                assert (found["log"], found["step"]) == (expected["log"], expected["step"])
        return len(parts)

    return check


@pytest.fixture
def tensors() -> Callable[[Path], dict[str, bytes]]:
    """tensors(folder): the bytes of every tensor of model and optimizer, whole, by component and
    name."""

    def read(folder: Path) -> dict[str, bytes]:
        with open_checkpoint(str(folder)) as view:
            return {
                f"{info.component}/{info.name}": view.read(info.full_name).tobytes()
                for info in view.tensors()
                if info.component in ("model", "optimizer")
            }

    return read
