"""A job killed at every storage operation: what is restored is the old or the new state, never a mix, never nothing.

`make test` takes every operation of the scenarios that matter most and a part of the others, another part each day;
KILL_ROTATION=<number> in the environment repeats that of a certain day. `make stress` takes all of them.
"""

import json
import os
import subprocess
import sys
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# How many operations a scenario has at least (fewer: something is not counted).
ONE = {"first": 25, "second": 30, "retention": 40, "overwrite": 45, "repair": 45, "delete": 12, "sweep": 45}
LEAST = {
    **{f"{kind}/{name}": least for kind in ("local", "local-lost", "local-some", "local-newest") for name, least in ONE.items()},
    **{f"folder/{name}": least for name, least in {**ONE, "sweep-objects": 45}.items() if name != "sweep"},
    "memory/first": 20, "memory/second": 25, "memory/delete": 10,
}  # fmt: skip
FOUR = {"first": 60, "second": 65, "retention": 80, "overwrite": 90, "sweep": 95}
LEAST_OF_FOUR = {
    f"{kind}/{name}": least for kind in ("job-lost", "job-folder", "rank-local", "rank-folder") for name, least in FOUR.items()
}  # fmt: skip
# Each operation of these is killed in every run of the tests.
ESSENTIAL = ("local-lost/retention", "local-lost/overwrite", "local-newest/retention", "folder/overwrite")
ESSENTIAL_OF_FOUR = ("job-lost/second",)


def kill(script, folder, least, essential, every):
    """The results by "kind/scenario", of each `every`-th kill point of what is not essential."""
    rotation = int(os.environ.get("KILL_ROTATION", date.today().toordinal())) if every > 1 else 0
    items = [
        f"{item}/1/1" if item in essential else f"{item}/{every}/{1 + (rotation + number) % every}"
        for number, item in enumerate(least)
    ]
    # fsspec keeps what is not committed yet in the folder for temporary files: a killed process leaves it there.
    (folder / "tmp").mkdir()
    command = [sys.executable, str(HERE / script), str(folder), *items]
    where = {"cwd": HERE.parents[1], "env": {**os.environ, "TMPDIR": str(folder / "tmp")}}
    ran = subprocess.run(command, capture_output=True, text=True, **where)
    assert ran.returncode == 0, ran.stderr[-4000:]
    results = {}
    for line in ran.stdout.splitlines():
        results |= json.loads(line)
    assert list(results) == list(least)
    kinds = {}
    for item, result in results.items():
        kind, name = item.split("/")
        kinds.setdefault(kind, []).append((name, len(result["points"]), result["operations"]))
    print(f"\nkill points covered by {script}, rotation {rotation}:")
    for kind, found in kinds.items():
        listed = ", ".join(f"{name} {covered} of {there}" for name, covered, there in found)
        print(f"  {kind}: {sum(c for _, c, _ in found)} of {sum(n for _, _, n in found)} ({listed})")
    print(f"  together: {sum(len(result['points']) for result in results.values())}")
    assert {item: r["operations"] for item, r in results.items() if r["operations"] < least[item]} == {}
    return results


def check(results):
    """No trouble anywhere; only the old state before the commit, only the new one after it."""
    troubles = {}
    for item, result in results.items():
        for point, text in result["problems"].items():
            troubles.setdefault(item, {}).setdefault(text.strip().splitlines()[-1], []).append(point)
    assert troubles == {}
    for item, result in results.items():
        check_marks(item, result)


def check_marks(item, result):
    order = dict.fromkeys(result["old"], 0) | {result["new"]: 2}
    if item in ("folder/overwrite", "job-folder/overwrite", "rank-folder/overwrite"):
        order[10] = 1  # the old manifest is withdrawn first, as the docs say: step 10 is what remains meanwhile
    *marks, last = result["marks"]
    assert last == result["new"], item
    assert set(marks) <= set(order), (item, marks)
    if item.split("/")[0] not in ("local-some", "local-newest"):  # there it may be undone until it is durable
        for (a, mark), (b, later) in pairwise(zip(result["points"], marks, strict=True)):
            # Ranks other than the first have done all of theirs before the commit.
            assert order[mark] <= order[later] or (isinstance(a, list) and a[0] != b[0]), (item, a, b)


def test_b01_killed_at_operations_of_one_rank(quick_folder):
    check(kill("kill_points.py", quick_folder, LEAST, ESSENTIAL, every=8))


def test_b01_killed_at_operations_of_four_ranks(quick_folder):
    check(kill("rank_kill_points.py", quick_folder, LEAST_OF_FOUR, ESSENTIAL_OF_FOUR, every=18))


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_b01_killed_at_every_operation_of_one_rank(quick_folder):
    check(kill("kill_points.py", quick_folder, LEAST, (), every=1))


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_b01_killed_at_every_operation_of_four_ranks(quick_folder):
    check(kill("rank_kill_points.py", quick_folder, LEAST_OF_FOUR, (), every=1))
