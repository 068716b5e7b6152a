"""Real ranks that start in milliseconds: forked from one process per session that has imported
torch and the trainers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptcore import open_checkpoint
from ckptcore.testing.processes import RankProcesses, RanksDied

HERE = Path(__file__).parent


class Ranks:
    """Runs the programs of programs.py."""

    processes = RankProcesses(HERE / "ranks.py")
    with_texts = RankProcesses(HERE / "ranks.py", imports=["torch.utils.tensorboard", "texts"])

    def run(self, program: str, world: int, *, deadline: float = 90, **arguments: Any) -> list[Any]:
        """What the program returned on each rank, None where it left. RanksDied when one raised, or
        has not ended."""
        ranks = self.with_texts if program == "recorded" else self.processes
        outcomes = ranks.start(
            "on_a_rank",
            world,
            {"program": program, "arguments": arguments},
            deadline=deadline,
            backend="gloo" if world > 1 else None,
        ).outcomes()
        ended = [outcome.state == "returned" or outcome.exit_code == 0 for outcome in outcomes]
        if not all(ended) or any(outcome.error for outcome in outcomes):
            raise RanksDied(program, outcomes)
        return [outcome.value for outcome in outcomes]


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    return Ranks()


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
        # No more checkpoints than those that are resumed from, and what comes at the same distance.
        cases = [
            (kind, {"save_steps": math.gcd(*steps), **args}, steps) for kind, args, steps in cases
        ]
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
