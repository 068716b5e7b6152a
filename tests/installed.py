"""What a wheel does in a fresh environment: `make test-installed` runs it there, outside the checkout.

alone: with what the engine itself asks for. whole: with the extras [cli] and [trainers], too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import ckptcore
from ckptcore import CheckpointManager, KeepLast, RNGState, SaveHandle

REPO = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def saved(root: str) -> list[int | None]:
    """As the types promise: mypy reads this with the installed package's own."""
    state = {"model": torch.nn.Linear(2, 2), "rng": RNGState()}
    with CheckpointManager(root, keep=KeepLast(1)) as ckpt:
        handle: SaveHandle = ckpt.save_async(1, state, metrics={"loss": 0.5})
        handle.result()
        return [info.step for info in ckpt.list()]


def alone() -> None:
    assert Path(sys.prefix) in Path(ckptcore.__file__).parents, ckptcore.__file__
    assert run(sys.executable, "-c", "import ckptcore").returncode == 0
    assert saved("alone") == [1]
    example = re.findall(r"```python\n(# example:.*?)```", (REPO / "README.md").read_text(), re.S)
    for _ in range(2):
        done = run(sys.executable, "-c", example[0])
        assert done.returncode == 0, done.stderr
    assert [info.step for info in ckptcore.scan_root("runs/example")] == [50, 100]
    for command, extra in (("ckpt", "cli"), ("ckpt-train", "trainers")):
        done = run(str(BIN / command), "--help")
        needs = f"pip install 'ckptcore[{extra}]'"
        assert done.returncode == 2 and needs in done.stderr, done.stderr


def whole() -> None:
    for command in ("ckpt", "ckpt-train"):
        done = run(str(BIN / command), "--help")
        assert done.returncode == 0 and "Usage" in done.stdout.title(), done.stderr
    assert saved("whole") == [1]
    done = run(str(BIN / "ckpt"), "verify", "whole")
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        {"alone": alone, "whole": whole}[sys.argv[1]]()
        os.chdir("/")
    print(f"installed, {sys.argv[1]}: good")
