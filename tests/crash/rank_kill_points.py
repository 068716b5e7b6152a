"""Kill a job of four ranks, or one rank of it, in every storage operation of every rank in turn;
then start it again.

    python rank_kill_points.py FOLDER [--save NAME] KIND/SCENARIO/EVERY/FIRST ...

The ranks are threads. KIND says who dies and where: "job-local", "job-lost", "job-some",
"job-newest" and "job-folder" end the process of the whole job in the k-th operation of one rank (a
forked child; see kill_points.py for the storages); "rank-local" and "rank-folder" end that rank
only, the others are told that it is lost and give up. In both cases a job with fresh communicators
restores, saves on and cleans up.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from kill_points import (
    Ground,
    attempted,
    check_root,
    done_in_child,
    forked,
    main,
    next_step,
    volatile,
)
from kill_saves import begin, held, in_training, saved

import ckptcore.saving.plan
from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    KeepLast,
    RankLost,
    Shard,
    SharingPattern,
    StateComponent,
)
from ckptcore.testing import KILLED_EXIT_CODE, FaultStorage, Killed
from ckptcore.testing.ranks import run_ranks

RANKS = 4
ckptcore.saving.plan.MIN_SHARE_BYTES = 1  # every rank writes a part of replicated state


def values_of(mark: int, rank: int) -> dict:
    """A rank's state, in which every value tells which save it is from."""
    g = torch.Generator().manual_seed(mark)
    table = torch.randn(8, 6, generator=g)
    return {
        "model": {"w": [torch.randn(40, 5, generator=g) for _ in range(RANKS)], "mark": mark},
        "own": {"x": torch.full((9,), 100.0 * mark + rank), "seen": [mark, rank]},
        "table": {
            "rows": table[2 * rank : 2 * rank + 2].clone(),
            "all": table.sum(0),
            "mark": mark,
        },
    }


def components(values: dict, rank: int) -> list[StateComponent]:
    table = {**values["table"], "rows": Shard(values["table"]["rows"], (8, 6), (2 * rank, 0))}
    return [
        StateComponent("model", values["model"], SharingPattern.REPLICATED),
        StateComponent("own", values["own"], SharingPattern.PER_RANK),
        StateComponent("table", table, SharingPattern.SHARDED),
    ]


def restored(manager: CheckpointManager) -> tuple:
    """The report of a restore and the mark of all that this rank has now; AssertionError for a
    mix."""
    rank = manager.comm.rank
    live = values_of(1, rank)
    report = manager.restore(components(live, rank))
    if report.fresh:
        return report, None
    found = report.values
    mark = found["model"]["mark"]
    expected = values_of(mark, rank)
    tensors = [
        *zip(live["model"]["w"], expected["model"]["w"], strict=True),
        (live["own"]["x"], expected["own"]["x"]),
        (live["table"]["rows"], expected["table"]["rows"]),
        (live["table"]["all"], expected["table"]["all"]),
    ]
    wrong = [number for number, (a, b) in enumerate(tensors) if not torch.equal(a, b)]
    plain = [found["own"]["seen"], found["table"]["mark"]]
    assert (wrong, plain) == ([], [[mark, rank], mark]), (
        f"a mix: the model is of {mark}, the rest not: {wrong} {plain}"
    )
    return report, mark


def save(manager: CheckpointManager, step: int, mark: int, **how) -> None:
    rank = manager.comm.rank
    saved(manager, step, components(values_of(mark, rank), rank), **how)


def job(
    storage, work: Callable[[CheckpointManager], object], keep: int | None = None, **how
) -> list:
    """Run `work` with the manager of each rank, over the storage that `storage(rank)` gives it."""

    def program(comm):
        policy = KeepLast(keep) if keep else None
        how = {"comm": comm, "keep": policy, "io_threads": 1, "run_id": "run", "on_event": held}
        with CheckpointManager(storage(comm.rank), **how) as manager:
            return work(manager)

    return run_ranks(RANKS, program, **how)


@dataclass(frozen=True)
class Scenario:
    """As in kill_points.py; prepare: what was saved before, as [step, mark]; leftovers: a job died
    in a save of 12.
    busy: the step before was begun to be saved when this one is."""

    prepare: list[tuple[int, int]]
    step: int
    old: tuple
    steps: dict
    keep: int | None = None
    overwrite: bool = False
    leftovers: bool = False
    busy: bool = False


SCENARIOS = {
    "first": Scenario([], 10, (None,), {None: [10], 10: [10, 20]}),
    "second": Scenario([(10, 10)], 20, (10,), {10: [10, 20], 20: [10, 20, 30]}),
    "retention": Scenario([(10, 10)], 20, (10,), {10: [20], 20: [30]}, keep=1),
    "overwrite": Scenario(
        [(10, 10), (20, 19)],
        20,
        (19,),
        {19: [10, 20, 30], 20: [10, 20, 30], 10: [10, 20]},
        overwrite=True,
    ),
    "sweep": Scenario(
        [(5, 5), (10, 10)], 20, (10,), {10: [10, 20], 20: [10, 20, 30]}, leftovers=True
    ),
    "busy": Scenario([(10, 10)], 30, (10, 20), {10: [20], 20: [30], 30: [40]}, keep=1, busy=True),
}


def prepare(ground: Ground, scenario: Scenario) -> None:
    for step, mark in scenario.prepare:
        job(lambda _: ground.storage(), lambda manager, s=step, m=mark: save(manager, s, m))
    if scenario.leftovers:
        die(ground, "rank-local", {0: ("remove", 2)}, lambda m: m.delete(5))
        die(
            ground,
            "rank-local",
            dict.fromkeys(range(RANKS), ("write_at", 3)),
            lambda m: save(m, 12, 12),
        )


def die(ground: Ground, kind: str, where: dict, work: Callable, keep: int | None = None) -> dict:
    """Kill ranks at their n-th operation of a kind; "rank-..." ends those ranks only, else the
    process ends.

    Returns the number of operations by rank, those of them in which training went on, and what each
    rank raised.
    """
    shared = ground.storage()
    if kind in ("job-lost", "job-some", "job-newest"):
        shared = volatile(shared, kind, json.dumps(where))
    faults = [FaultStorage(shared) for _ in range(RANKS)]
    for ranges in in_training:
        ranges.clear()
    for rank, (what, number) in where.items():
        faults[rank].kill(number, kind=what, how="raise" if kind.startswith("rank") else "exit")
    # The others must see at once that a rank is lost: waiting for its heartbeat would take longer
    # than the deadline.
    results = job(
        faults.__getitem__, work, keep, errors=True, notice=True, liveness_timeout=60, deadline=40
    )
    return {"operations": [f.count() for f in faults], "training": in_training, "raised": results}


def check_survivors(victim: int, raised: list) -> None:
    """All survivors know that the victim is lost, or all were done when it died."""
    assert isinstance(raised[victim], Killed), raised
    others = [error for rank, error in enumerate(raised) if rank != victim]
    if any(others):
        assert [(type(error), getattr(error, "ranks", None)) for error in others] == [
            (RankLost, [victim])
        ] * 3, others


def restart(ground: Ground, scenario: Scenario) -> int | None:
    """What a restarted job does: restore, save on, clean up. Returns the mark restored (None:
    fresh)."""

    def work(manager: CheckpointManager) -> tuple:
        report, mark = restored(manager)
        step = next_step(report)
        save(manager, step, step)
        return mark, len(report.skipped), restored(manager)[1] - step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        results = job(lambda _: ground.storage(), work, scenario.keep)
    told = [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]
    marks, skipped, wrong = zip(*results, strict=True)
    assert len(set(marks)) == 1, f"the ranks restored different states: {marks}"
    assert wrong == (0,) * RANKS, "what was saved last was not restored then"
    assert len(told) == (1 if skipped[0] else 0), told
    assert not ground.local or not told, told
    storage = ground.storage()
    manager = CheckpointManager(storage, io_threads=1)
    check_root(storage, manager, scenario.steps[marks[0]])
    writers = {key: part.writers for key, part in manager.latest().manifest.components.items()}
    assert writers == {key: list(range(RANKS)) for key in ("model", "own", "table")}
    return marks[0]


def die_and_restart(ground: Ground, kind: str, scenario: Scenario, victim: int, k: int) -> dict:
    def work(manager: CheckpointManager) -> None:
        rank, before = manager.comm.rank, scenario.step - 10
        if scenario.busy:
            begin(manager, before, components(values_of(before, rank), rank))
        save(manager, scenario.step, scenario.step, overwrite=scenario.overwrite)
        if scenario.busy:
            in_training[rank][0][1] = in_training[rank][1][0]

    def perish() -> dict:
        return die(ground, kind, {victim: (None, k)} if k else {}, work, scenario.keep)

    ground.reset()
    if kind.startswith("rank"):
        done = perish()
        if not k and any(done["raised"]):
            raise RuntimeError(str(done["raised"]))
        outcome = attempted(lambda: check_survivors(victim, done["raised"]) if k else None)
        found = attempted(lambda: restart(ground, scenario))
        counted = {"operations": done["operations"], "training": done["training"]}
        return {**counted, **found, "problem": outcome["problem"] or found["problem"]}
    code, text = forked(lambda: {**perish(), "raised": None})
    if code != (KILLED_EXIT_CODE if k else 0):
        raise RuntimeError(f"exit code {code} {text}")
    return {**({} if k else json.loads(text)), **attempted(lambda: restart(ground, scenario))}


def run(name: str, kind: str, folder: Path, every: int, first: int) -> dict:
    """As in kill_points.py; a point is [rank, number of the operation of that rank]."""
    scenario = SCENARIOS[name]
    ground = Ground("folder" if kind.endswith("folder") else "local", folder)
    done_in_child(lambda: prepare(ground, scenario))
    ground.keep()
    whole = die_and_restart(ground, kind, scenario, 0, 0)
    every_point = [
        (rank, k) for rank in range(RANKS) for k in range(1, whole["operations"][rank] + 1)
    ]
    points = every_point[first - 1 :: every]
    found = [die_and_restart(ground, kind, scenario, *point) for point in points]
    problems = {
        str(point): result["problem"]
        for point, result in zip([*points, 0], [*found, whole], strict=True)
        if result["problem"]
    }
    marks = [result["mark"] for result in (*found, whole)]
    training = sum(start < k <= end for rank, k in points for start, end in whole["training"][rank])
    return {
        "operations": len(every_point),
        "points": points,
        "training": training,
        "marks": marks,
        "problems": problems,
        "old": scenario.old,
        "new": scenario.step,
    }


if __name__ == "__main__":
    main(run)
