"""Coverage-guided fuzzing of the parsers from a kept corpus, for some seconds in CI and for minutes
in `make stress`; see fuzz_parsers.py."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptcore.testing.processes import patience

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"

# Two lanes run side by side; seconds for each target in turn. Values have the most to say.
LANES = [[("manifest", 1), ("index", 1)], [("layouts", 1), ("values", 2)]]
TARGETS = sorted(name for lane in LANES for name, _ in lane)

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris, which guides the fuzzing, has no wheel for this Python",
)


def test_the_corpus_is_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sorted(path.name for path in CORPUS.iterdir()) == TARGETS
    assert len(files) < 200
    assert sum(path.stat().st_size for path in files) < 300_000
    assert max(path.stat().st_size for path in files) <= 8192


def fuzz(name: str, seconds: int, new: Path) -> tuple[str, int, str]:
    """(target, exit code, everything that was printed)."""
    command = [
        sys.executable,
        str(HERE / "fuzz_parsers.py"),
        name,
        str(seconds),
        str(CORPUS / name),
        str(new),
    ]
    # Through a shell that stays: a process begins with the peak memory of the one that starts it,
    # and this one's is large.
    done = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=(seconds + 45) * patience(),
    )
    return name, done.returncode, done.stdout


def told(output: str) -> tuple[int, int, int]:
    """Inputs tried, edges and features reached, as libFuzzer counts them."""
    count = re.search(r"stat::number_of_executed_units:\s*(\d+)", output)
    cover = re.findall(r"cov: (\d+) ft: (\d+)", output)
    assert count and cover, output[-3000:]
    return int(count.group(1)), int(cover[-1][0]), int(cover[-1][1])


@needs_atheris
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "times", [1, pytest.param(80, marks=pytest.mark.stress)], ids=["seconds", "minutes"]
)
def test_parsers_take_any_bytes(tmp_path: Path, times: int) -> None:
    def run(lane: list[tuple[str, int]]) -> list[tuple[str, int, str]]:
        return [fuzz(name, seconds * times, tmp_path / name) for name, seconds in lane]

    with ThreadPoolExecutor(len(LANES)) as pool:
        results = [result for lane in pool.map(run, LANES) for result in lane]
    findings = []
    print(f"\n{'target':10}{'inputs':>10}{'edges':>8}{'features':>10}")
    for name, code, output in results:
        if code:
            kept = {path.name: path.read_bytes() for path in (tmp_path / name).glob("finding-*")}
            findings.append(f"{name} (exit code {code}): {kept}\n{output[-3000:]}")
            continue
        count, edges, features = told(output)
        print(f"{name:10}{count:10,}{edges:8}{features:10}")
        assert count > 100
    assert not findings, "\n".join(findings)
