"""A job killed at every storage operation: what is restored is the old or the new state, never a
mix, never nothing.

`make test` takes every operation of the scenarios that matter most and a part of the others,
another part each day (of saves in the background, which go through the same operations, a smaller
one, while the state is changing); KILL_ROTATION=<number> in the environment repeats that of a
certain day. `make stress` takes all of them.
"""

import json
import os
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Kinds in which what was committed may be undone until it is durable.
UNDECIDED = ("local-some", "local-newest", "job-some", "job-newest")
# How many operations a scenario has at least (fewer: something is not counted).
ONE = {
    "first": 25,
    "second": 28,
    "retention": 40,
    "overwrite": 45,
    "repair": 45,
    "delete": 12,
    "sweep": 45,
}
LEAST = {
    **{
        f"{kind}/{name}": least
        for kind in ("local", "local-lost", "local-some", "local-newest")
        for name, least in ONE.items()
    },
    **{
        f"folder/{name}": least
        for name, least in {**ONE, "sweep-objects": 45}.items()
        if name != "sweep"
    },
    "memory/first": 20,
    "memory/second": 25,
    "memory/delete": 10,
}
FOUR = {"first": 60, "second": 65, "retention": 80, "overwrite": 90, "sweep": 95}
LEAST_OF_FOUR = {
    f"{kind}/{name}": least
    for kind in ("job-lost", "job-folder", "rank-local", "rank-folder")
    for name, least in FOUR.items()
}
# In the background, of what really ends a process. Deletion is the caller's own work, also then.
IN_BACKGROUND = {name: least for name, least in ONE.items() if name != "delete"} | {"busy": 75}
LEAST_IN_BACKGROUND = {
    **{
        f"{kind}/{name}": least
        for kind in ("local", "local-lost", "local-some", "local-newest")
        for name, least in IN_BACKGROUND.items()
    },
    **{
        f"folder/{name}": least
        for name, least in {**IN_BACKGROUND, "sweep-objects": 45}.items()
        if name != "sweep"
    },
}
LEAST_OF_FOUR_IN_BACKGROUND = {
    f"{kind}/{name}": least
    for kind in ("job-local", "job-lost", "job-some", "job-newest", "job-folder")
    for name, least in {**FOUR, "busy": 140}.items()
}
# As objects on a server, where a process has connections, and threads for them.
LEAST_ON_S3 = {
    f"s3/{name}": least for name, least in {**ONE, "sweep-objects": 45}.items() if name != "sweep"
}
LEAST_ON_S3_IN_BACKGROUND = {
    f"s3/{name}": least
    for name, least in {**IN_BACKGROUND, "sweep-objects": 45}.items()
    if name != "sweep"
}
# Of these more operations are killed than of the others in every run of the tests.
ESSENTIAL = (
    "local-lost/retention",
    "local-lost/overwrite",
    "local-newest/retention",
    "folder/overwrite",
)
ESSENTIAL_OF_FOUR = ("job-lost/second",)


def rotation_of_today():
    return int(os.environ.get("KILL_ROTATION", date.today().toordinal()))


def turn(least, of):
    """Those whose turn it is, one of so many; `of` and the number of scenarios should have no
    common divisor."""
    return {
        item: least[item]
        for number, item in enumerate(least)
        if (rotation_of_today() + number) % of == 0
    }


def turn_with(least, of, essential):
    """Those whose turn it is, and what is essential."""
    today = turn(least, of)
    return {item: least[item] for item in least if item in today or item in essential}


def kill(
    run_script,
    script,
    folder,
    least,
    every,
    save="sync",
    more=None,
    essential=(),
    essential_every=1,
):
    """The results by "kind/scenario", of each `every`-th kill point; other ones tomorrow."""
    rotation = rotation_of_today() if every > 1 else 0
    steps = [essential_every if item in essential else every for item in least]
    items = [
        f"{item}/{step}/{1 + (rotation + number) % step}"
        for number, (item, step) in enumerate(zip(least, steps, strict=True))
    ]
    # fsspec keeps what is not committed yet in the folder for temporary files: a killed process
    # leaves it there.
    (folder / "tmp").mkdir()
    environment = {"TMPDIR": str(folder / "tmp"), **(more or {})}
    words = [folder, "--save", save, *items]
    ran = run_script(HERE / script, *words, timeout=1700, environment=environment)
    assert ran.returncode == 0, ran.stderr[-4000:]
    results = {}
    for line in ran.stdout.splitlines():
        results |= json.loads(line)
    assert list(results) == list(least)
    kinds = {}
    for item, result in results.items():
        kind, name = item.split("/")
        kinds.setdefault(kind, []).append((name, len(result["points"]), result["operations"]))
    print(f"\nkill points covered by {script}, {save} saves, rotation {rotation}:")
    for kind, found in kinds.items():
        listed = ", ".join(f"{name} {covered} of {there}" for name, covered, there in found)
        print(
            f"  {kind}: {sum(c for _, c, _ in found)} of {sum(n for _, _, n in found)} ({listed})"
        )
    training = sum(result["training"] for result in results.values())
    print(f"  together: {sum(len(result['points']) for result in results.values())}")
    print(f"  after save_async had returned: {training}")
    assert {
        item: r["operations"] for item, r in results.items() if r["operations"] < least[item]
    } == {}
    return results


def check(results):
    """No trouble anywhere; only the old state before the commit, only the new one after it."""
    troubles = {}
    for item, result in results.items():
        for point, text in result["problems"].items():
            troubles.setdefault(item, {}).setdefault(text.strip().splitlines()[-1], []).append(
                point
            )
    assert troubles == {}
    for item, result in results.items():
        check_marks(item, result)


def check_marks(item, result):
    order = {mark: number for number, mark in enumerate(result["old"])} | {result["new"]: 2}
    if item in (
        "folder/overwrite",
        "job-folder/overwrite",
        "rank-folder/overwrite",
        "s3/overwrite",
    ):
        order[10] = (
            1  # the old manifest is withdrawn first, as the docs say: step 10 is what remains meanwhile
        )
    *marks, last = result["marks"]
    assert last == result["new"], item
    assert set(marks) <= set(order), (item, marks)
    if item.split("/")[0] not in UNDECIDED:
        for (a, mark), (b, later) in pairwise(zip(result["points"], marks, strict=True)):
            # Ranks other than the first have done all of theirs before the commit.
            assert order[mark] <= order[later] or (isinstance(a, list) and a[0] != b[0]), (
                item,
                a,
                b,
            )


def check_in_background(results):
    """In addition: nearly all of it is done while the state is changing; before are only questions
    to the storage."""
    check(results)
    early = {item: (r["training"], len(r["points"])) for item, r in results.items()}
    assert {item: both for item, both in early.items() if both[0] < 0.75 * both[1]} == {}


def test_b01_killed_at_operations_of_one_rank(run_script, quick_folder):
    today = turn_with(LEAST, 9, ESSENTIAL)
    how = {"essential": ESSENTIAL, "essential_every": 7}
    check(kill(run_script, "kill_points.py", quick_folder, today, every=17, **how))


def test_b01_killed_at_operations_of_four_ranks(run_script, quick_folder):
    today = turn_with(LEAST_OF_FOUR, 7, ESSENTIAL_OF_FOUR)
    how = {"essential": ESSENTIAL_OF_FOUR, "essential_every": 16}
    check(kill(run_script, "rank_kill_points.py", quick_folder, today, every=41, **how))


def test_b01_killed_at_operations_of_saves_in_the_background(run_script, quick_folder):
    (quick_folder / "four").mkdir()
    check(
        kill(
            run_script,
            "kill_points.py",
            quick_folder,
            turn(LEAST_IN_BACKGROUND, 9),
            every=23,
            save="async",
        )
    )
    four = turn(LEAST_OF_FOUR_IN_BACKGROUND, 11)
    check(
        kill(run_script, "rank_kill_points.py", quick_folder / "four", four, every=83, save="async")
    )


def on_server(s3):
    return {"KILL_S3": json.dumps([s3.new_root(), s3.options])}


@pytest.mark.timeout(300)
def test_b01_killed_at_operations_on_s3(run_script, quick_folder, s3):
    """Each killed process and each restarted one makes a client, which takes longer than a save."""
    check(
        kill(
            run_script,
            "kill_points.py",
            quick_folder,
            turn(LEAST_ON_S3, 7),
            every=47,
            more=on_server(s3),
        )
    )


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("save", ["sync", "async"])
def test_b01_killed_at_every_operation_on_s3(run_script, quick_folder, s3, save):
    least = LEAST_ON_S3 if save == "sync" else LEAST_ON_S3_IN_BACKGROUND
    checked = check if save == "sync" else check_in_background
    checked(
        kill(
            run_script,
            "kill_points.py",
            quick_folder,
            least,
            every=1,
            save=save,
            more=on_server(s3),
        )
    )


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_b01_killed_at_every_operation_of_one_rank(run_script, quick_folder):
    check(kill(run_script, "kill_points.py", quick_folder, LEAST, every=1))


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_b01_killed_at_every_operation_of_four_ranks(run_script, quick_folder):
    check(kill(run_script, "rank_kill_points.py", quick_folder, LEAST_OF_FOUR, every=1))


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_b01_killed_at_every_operation_of_one_rank_in_the_background(run_script, quick_folder):
    check_in_background(
        kill(run_script, "kill_points.py", quick_folder, LEAST_IN_BACKGROUND, every=1, save="async")
    )


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["job-lost", "job-folder", "job-local", "job-newest", "job-some"])
def test_b01_killed_at_every_operation_of_four_ranks_in_the_background(
    run_script, quick_folder, kind
):
    least = {
        item: least for item, least in LEAST_OF_FOUR_IN_BACKGROUND.items() if item.startswith(kind)
    }
    check_in_background(
        kill(run_script, "rank_kill_points.py", quick_folder, least, every=1, save="async")
    )
