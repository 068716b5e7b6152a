"""The example that newcomers copy does what it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckptcore

README = Path(ckptcore.__file__).parent.parent / "README.md"
MARK = "# example: embed in your loop"


def example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    marked = [block for block in blocks if MARK in block]
    assert len(marked) == 1, f"one python block of README.md has the line {MARK!r}"
    return marked[0]


def test_the_example_runs_and_resumes(tmp_path: Path, run_script: Callable[..., Any]) -> None:
    for _ in range(2):
        done = run_script(example(), cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stderr
        found = [p.parent for p in tmp_path.rglob("checkpoint_manifest.json")]
        assert found
        roots = {folder.parent for folder in found}
        assert len(roots) == 1
        infos = ckptcore.scan_root(roots.pop())
        assert {info.status for info in infos} == {"committed"}
        assert len({info.run_id for info in infos}) == 1
        assert ckptcore.open_checkpoint(infos[-1].url).verify() == []


def test_the_example_is_short() -> None:
    lines = [
        line for line in example().splitlines() if line.strip() and not line.strip().startswith("#")
    ]
    assert len(lines) <= 25


def test_the_readme_names_the_commands_and_folders() -> None:
    text = README.read_text()
    for word in (
        "make demo",
        "make test",
        "ckptcore",
        "trainers",
        "tools",
        "tests",
        "benchmarks",
        "docs",
    ):
        assert word in text, word
