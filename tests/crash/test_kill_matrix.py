"""A process killed at every storage operation, not sampled: what is restored is the old or the new state, never a mix."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "kill_points.py"
# What goes on when the process dies, and how many operations that has at least (fewer: something is not counted).
LOCAL = {
    "writing": {"first": 25, "second": 30, "retention": 40, "delete": 12},
    "replacing": {"overwrite": 45, "repair": 45, "sweep": 45},
}
OBJECTS = {"memory": {"first": 20, "second": 25, "delete": 10}, "folder": {"retention": 30, "overwrite": 35}}


def kill_everywhere(kind, folder, least):
    # fsspec keeps what is not committed yet in the folder for temporary files: a killed process leaves it there.
    (folder / "tmp").mkdir()
    command = [sys.executable, str(SCRIPT), kind, str(folder), *least]
    where = {"cwd": Path(__file__).parents[2], "env": {**os.environ, "TMPDIR": str(folder / "tmp")}}
    ran = subprocess.run(command, capture_output=True, text=True, **where)
    assert ran.returncode == 0, ran.stderr[-4000:]
    results = {}
    for line in ran.stdout.splitlines():
        results |= json.loads(line)
    assert list(results) == list(least)
    total = sum(result["points"] for result in results.values())
    by_name = ", ".join(f"{name} {result['points']}" for name, result in results.items())
    print(f"\nkill points covered, {kind}: {total} ({by_name})")
    assert {name: result["points"] for name, result in results.items() if result["points"] < least[name]} == {}
    return results


def problems(results):
    """What went wrong, by scenario: the last lines of each different trouble, with the kill points that have it."""
    found = {}
    for name, result in results.items():
        for point, text in result["problems"].items():
            found.setdefault(name, {}).setdefault(text.strip().splitlines()[-1], []).append(int(point))
    return found


def check_marks(result, name, lost=()):
    """Only the old state before the commit and only the new one after it; `lost`: what may stand between the two."""
    order = dict.fromkeys(result["old"], 0) | dict.fromkeys(lost, 1) | {result["new"]: 2}
    marks = [mark for at, mark in enumerate(result["marks"], 1) if str(at) not in result["problems"]]
    assert set(marks) <= set(order), (name, marks)
    assert all(order[a] <= order[b] for a, b in pairwise(marks)), (name, marks)
    assert marks[0] in result["old"], (name, marks)
    assert marks[-1] == result["new"], (name, marks)


@pytest.mark.parametrize("group", list(LOCAL))
def test_b01_killed_at_every_operation_local(group, quick_folder):
    results = kill_everywhere("local", quick_folder, LOCAL[group])
    for name, result in results.items():
        check_marks(result, name)
    assert problems(results) == {}


@pytest.mark.parametrize("kind", list(OBJECTS))
def test_b01_killed_at_every_operation_object_store(kind, quick_folder):
    results = kill_everywhere(kind, quick_folder, OBJECTS[kind])
    for name, result in results.items():
        # An overwrite withdraws the old manifest first, as the docs say: step 10 is what remains meanwhile.
        check_marks(result, name, lost=(10,) if name == "overwrite" else ())
    assert problems(results) == {}
