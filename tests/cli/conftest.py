"""A root of three real checkpoints, and `ckpt` called in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from ckpt_tools.cli import cli
from ckpt_tools.main import main
from ckpt_tools.render import Report


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is not strict JSON")

        found: dict[str, Any] = json.loads(self.out, parse_constant=refuse)
        return found


Ckpt = Callable[..., Outcome]


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Ckpt:
    def run(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Outcome(code, captured.out, captured.err)

    return run


def report_of(*words: str | Path) -> Report:
    """What a command finds, before it is printed."""
    with click.Context(cli, obj=False, **cli.context_settings) as context:
        name, arguments = str(words[0]), [str(word) for word in words[1:]]
        command = cli.get_command(context, name)
        assert command is not None
        with command.make_context(name, arguments, parent=context) as inner:
            report: Report = command.invoke(inner)
    return report


def values_of_step(step: int) -> dict[str, Any]:
    """Plain values of many types."""
    return {
        "step": step,
        "big": 2**70,
        "nan": float("nan"),
        "pair": (1, "x"),
        "raw": b"\x00\xff",
        "names": {"b", "a"},
        "by_rank": {0: "zero"},
        "nested": {"list": [{"deep/er": True}], "none": None},
    }


def state_of_step(step: int) -> dict[str, Any]:
    import torch

    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3) + step
    model = {
        "layer.weight": weight,
        "layer.bias": torch.full((3,), float(step), dtype=torch.bfloat16),
        "tied.weight": weight,
    }
    return {"model": model, "train": values_of_step(step)}


def save_run(root: str | Path, steps: tuple[int, ...] = (10, 20, 30), **options: Any) -> None:
    from ckptcore import CheckpointManager

    with CheckpointManager(root, **options) as manager:
        for step in steps:
            metrics = {"loss": 1 / step, "accuracy": float("nan")}
            manager.save(
                step, state_of_step(step), metrics=metrics, metadata={"note": f"step {step} é"}
            )


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "root"
    save_run(root, run_id="run-a")
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A private copy, in a path with a space and a letter that is not ASCII."""
    copy = tmp_path / "my rüns"
    shutil.copytree(saved, copy)
    return copy
