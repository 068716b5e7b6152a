"""Several jobs write to one root: kept apart by the id of their run, in turn, at once, and from
other processes."""

import threading
import warnings
from pathlib import Path

import pytest

from ckptcore import (
    CheckpointExists,
    CheckpointManager,
    CheckpointWarning,
    KeepBest,
    KeepLast,
    StorageError,
    open_storage,
)
from ckptcore.testing.processes import RankProcesses, patience

STEPS = range(1, 13)


def run_at_once(*programs):
    """Run the programs in threads, from one start; what each returned or raised."""
    start = threading.Barrier(len(programs), timeout=30 * patience())
    results = [None] * len(programs)

    def run(number):
        start.wait()
        try:
            results[number] = programs[number]()
        except BaseException as error:
            results[number] = error

    threads = [
        threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(programs))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60 * patience())
    assert not any(thread.is_alive() for thread in threads)
    return results


def job(storage, marked, run, offset, keep, steps=STEPS):
    """Save ten times `step` plus `offset`, so that two runs never want one name, and look at
    each."""
    with CheckpointManager(storage, run_id=run, keep=keep, io_threads=1) as ckpt:
        for step in steps:
            number = step * 10 + offset
            ckpt.save(number, marked.state(number + 1000), metrics={"loss": float(abs(step - 4))})
            assert ckpt.latest().step == number
        return [info.step for info in ckpt.list()]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_b21_two_runs_in_turn(make_root, marked, kind):
    """Each keeps its own number; neither sees, counts or removes what is the other's."""
    storage = make_root(kind)
    storage.make_folder("")
    jobs = {"A": (KeepLast(2), {}), "B": (KeepLast(1) | KeepBest("loss"), {})}
    managers = {
        run: CheckpointManager(storage, run_id=run, keep=keep, io_threads=1)
        for run, (keep, _) in jobs.items()
    }
    # B's steps are lower, then higher, than those of A.
    saves = [
        ("A", 100),
        ("B", 1),
        ("A", 110),
        ("B", 2),
        ("B", 300),
        ("A", 120),
        ("B", 310),
        ("A", 50),
        ("B", 320),
    ]
    for number, (run, step) in enumerate(saves, 1):
        before = {
            name: files for name, files in marked.files(storage).items() if name not in jobs[run][1]
        }
        info = managers[run].save(step, marked.state(step), metrics={"loss": float(step)})
        assert info.sequence == number
        owned = jobs[run][1]
        owned[info.name] = step
        newest = {"A": 2, "B": 1}[run]
        stay = {*sorted(owned.values())[-newest:], step} | (
            {min(owned.values())} if run == "B" else set()
        )
        for name in [name for name, there in owned.items() if there not in stay]:
            del owned[name]
        left = marked.files(storage)
        assert {name: left[name] for name in left if name not in owned} == before
        for name in jobs:
            assert [i.step for i in managers[name].list()] == sorted(jobs[name][1].values())
            assert managers[name].latest() is None or managers[name].latest().step == max(
                jobs[name][1].values()
            )
    assert (
        managers["A"].latest().step,
        managers["B"].latest().step,
        managers["B"].best().step,
    ) == (120, 320, 1)
    assert marked.restored(storage, run_id="A") == (120, 120)
    assert marked.restored(storage, run_id="B") == (320, 320)
    assert marked.restored(storage) == (320, 320), (
        "whose run is not told, the one that committed last is meant"
    )


@pytest.mark.parametrize("kind", ["local", "memory", "folder"])
def test_two_runs_at_once_in_threads(make_root, marked, kind):
    storage = make_root(kind)
    results = run_at_once(
        lambda: job(storage, marked, "A", 0, KeepLast(2)),
        lambda: job(storage, marked, "B", 5, KeepLast(1) | KeepBest("loss")),
    )
    assert results == [[110, 120], [45, 125]], results
    for run, steps in (("A", [110, 120]), ("B", [45, 125])):
        manager = CheckpointManager(storage, run_id=run)
        assert [info.step for info in manager.list()] == steps
        assert [marked.restored(storage, which=step, run_id=run) for step in steps] == [
            (s, s + 1000) for s in steps
        ]
    assert sorted(marked.files(storage)) == sorted(
        f"checkpoint-{step}" for step in (45, 110, 120, 125)
    )


def processes_at_once(root, *runs):
    """Two real processes that start to save when both are ready; what each had."""
    ranks = RankProcesses(Path(__file__).with_name("two_jobs.py"))
    arguments = {"root": str(root), "runs": [list(run) for run in runs]}
    return ranks.run("saves", len(runs), arguments, backend="gloo")


def test_two_runs_at_once_in_real_processes(quick_folder, marked):
    root = quick_folder / "run"
    results = processes_at_once(root, ("A", 0), ("B", 5))
    for result, offset in zip(results, (0, 5), strict=True):
        assert [error for _, error, _ in result["saves"]] == [None] * 20, result
        assert result["left"] == [190 + offset, 200 + offset]
    assert sorted(p.name for p in root.iterdir()) == [
        f"checkpoint-{step}" for step in (190, 195, 200, 205)
    ]
    assert marked.restored(root, run_id="A") == (200, 1200)
    assert marked.restored(root, run_id="B") == (205, 1205)


# One run is one job. Two that claim the same run are a mistake (a job that was thought dead and is
# not), which must not cost a checkpoint: a step goes to the one that publishes it first, the other
# is told.


def check_one_winner(outcomes, steps):
    """For every step at least one of the jobs saved it, and an error says that the other did."""
    for step, tries in zip(steps, zip(*outcomes, strict=True), strict=True):
        assert any(error is None for error in tries), (step, tries)


def test_the_same_run_twice_at_once_same_steps_in_threads(quick_folder, marked):
    storage = open_storage(quick_folder / "run")

    def program(mark):
        outcome = []
        with CheckpointManager(storage, run_id="run", io_threads=1) as ckpt:
            for step in STEPS:
                try:
                    ckpt.save(step, marked.state(step * 10 + mark))
                    outcome.append(None)
                except (CheckpointExists, StorageError) as error:
                    assert type(error) is CheckpointExists, error
                    assert error.step == step
                    outcome.append(error)
        return outcome

    outcomes = run_at_once(lambda: program(1), lambda: program(2))
    assert [type(outcome) for outcome in outcomes] == [list] * 2, outcomes
    check_one_winner(outcomes, STEPS)
    assert all((a is None) != (b is None) for a, b in zip(*outcomes, strict=True)), (
        "each step has one winner"
    )
    winners = [1 if a is None else 2 for a in outcomes[0]]
    assert marked.files(storage) == marked.whole(storage, [*STEPS])
    for step, winner in zip(STEPS, winners, strict=True):
        assert marked.restored(storage, which=step) == (step, step * 10 + winner)


def test_the_same_run_twice_at_once_in_real_processes(quick_folder, marked):
    """With retention on top: none fails for another reason than the other's being first, and the
    newest is whole."""
    root = quick_folder / "run"
    results = processes_at_once(root, ("run", 0), ("run", 0))
    for result in results:
        assert {error for _, error, _ in result["saves"]} <= {None, "CheckpointExists"}, result
    check_one_winner(
        [[error for _, error, _ in result["saves"]] for result in results], range(10, 201, 10)
    )
    storage = open_storage(root)
    assert marked.restored(root) == (200, 1200)
    CheckpointManager(root, run_id="run", keep=KeepLast(2)).save(210, marked.state(1210))
    assert marked.files(storage) == marked.whole(storage, [200, 210])
