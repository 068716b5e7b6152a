"""`reuse=True` and a job that dies in each operation of a save in turn: what is restored is one of
the two states, and every checkpoint that is left is whole.

The tests of every day take a part of the operations, another part each day; `-m stress` takes all
of them, and a server over HTTP.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ckptcore
from ckptcore import CheckpointManager, CheckpointWarning, KeepLast, StateComponent, StorageError
from ckptcore.storage.base import Storage
from ckptcore.testing.faults import WRITE_OPERATIONS, FaultStorage, Killed
from ckptcore.testing.power import VolatileStorage
from ckptcore.testing.ranks import run_ranks
from tests.reuse.test_reuse import Tuned, values

stress = pytest.mark.stress
# Of what is not durable: nothing survives, everything, or what chance leaves.
SURVIVES: dict[str, Callable[[Any], bool]] = {
    "nothing": lambda _: False,
    "everything": lambda _: True,
    "some": lambda change: random.Random(change.number * 7919).random() < 0.5,
}
# How the last save is made, and what the checkpoints of before it may become.
SCENARIOS: dict[str, dict[str, Any]] = {
    "third": {},
    "retention": {"keep": KeepLast(2)},  # it removes the first owner of the base
    "overwrite": {"overwrite": True},
}


def points(count: int, every: int) -> list[int]:
    """Which of so many operations are tried: each `every`-th, others on another day."""
    first = 1 + date.today().toordinal() % every
    return list(range(first, count + 1, every))


def program(storage: Storage, scenario: str, arm: Callable[[], None]) -> None:
    """Two saves, and a third one, before which `arm` is called. The weights of the adapter are the
    number of the save."""
    how = dict(SCENARIOS[scenario])
    overwrite = how.pop("overwrite", False)
    model = Tuned(0.0)
    with CheckpointManager(storage, reuse=True, io_threads=1, **how) as ckpt:
        for step in (10, 20):
            adapt(model, step)
            ckpt.save(step, {"model": model})
        adapt(model, 30)
        arm()
        if overwrite:
            ckpt.save(20, {"model": model}, overwrite=True)
        else:
            ckpt.save(30, {"model": model})


def adapt(model: Tuned, number: int) -> None:
    model.b_adapter.weight.data.fill_(number)


def check(storage: Storage, scenario: str, expected: set[int], keep: Any = None) -> int:
    """Go on as a restarted job: the number of the save that it finds."""
    model = Tuned(-1.0)
    with CheckpointManager(storage, reuse=True, keep=keep) as ckpt:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            assert not ckpt.restore({"model": model}).fresh
        found = int(values(model)[2])
        assert found in expected
        assert values(model) == [0.0, 1.0, found, 3.0, 4.0, 5.0]
        for info in ckpt.list():
            assert ckpt.verify(info.step) == []
        ckpt.save(40, {"model": model})
        ckpt.save(50, {"model": model})
        assert [ckpt.verify(info.step) for info in ckpt.list()] == [[] for _ in ckpt.list()]
    return found


def operations(make: Callable[[str], Storage], scenario: str) -> int:
    faults = FaultStorage(make("counted"))
    before: list[int] = []
    program(faults, scenario, lambda: before.append(faults.count()))
    return faults.count() - before[0]


def killed_everywhere(
    make: Callable[[str], Storage], scenario: str, every: int, wrap: Any = lambda storage: storage
) -> set[int]:
    """Die in each `every`-th operation of the third save: the numbers that were found after it."""
    found = set()
    # A save over a committed one on an object store withdraws that one first.
    both = {20, 30} if scenario != "overwrite" else {10, 20, 30}
    for at in points(operations(make, scenario), every):
        storage = make(f"killed-{at}")
        faults = FaultStorage(wrap(storage))
        with pytest.raises(Killed):
            program(faults, scenario, partial(faults.kill, at=at, how="raise"))
        found.add(check(make(f"killed-{at}"), scenario, both))
    return found


@pytest.mark.parametrize("survives", SURVIVES)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("every", [pytest.param(1, marks=stress), 11], ids=["all", "some"])
def test_killed_in_a_save(tmp_path: Path, scenario: str, survives: str, every: int) -> None:
    found = killed_everywhere(
        lambda name: ckptcore.open_storage(tmp_path / name),
        scenario,
        every,
        lambda storage: VolatileStorage(storage, SURVIVES[survives]),
    )
    if every == 1:
        # A third save ends with making its name durable: only a crash that keeps everything is sure
        # to find it after a kill in that.
        unsure = {30} if scenario == "third" and survives != "everything" else set()
        assert {20, 30} - unsure <= found


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_in_a_save_to_objects(s3: Any, scenario: str) -> None:
    root = s3.new_root()
    found = killed_everywhere(
        lambda name: ckptcore.open_storage(f"{root}/{name}", s3.options), scenario, 1
    )
    assert found == ({10, 20, 30} if scenario == "overwrite" else {20, 30})


def rank_state(rank: int, number: int) -> list[StateComponent]:
    """What each rank writes for itself, with a frozen part, and what both have."""
    own, common = Tuned(100.0 * rank), Tuned(7.0)
    adapt(own, number)
    adapt(common, number)
    return [StateComponent("own", own, "PER_RANK"), StateComponent("common", common, "REPLICATED")]


@pytest.mark.parametrize("every", [pytest.param(1, marks=stress), 17], ids=["all", "some"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_in_a_save(tmp_path: Path, victim: int, every: int) -> None:
    """The other one gives up; the job that is started again finds one of the two states."""

    def saves(root: Path, comm: Any, at: int | None) -> int:
        faults = FaultStorage(ckptcore.open_storage(root))
        with CheckpointManager(faults, comm=comm, reuse=True, io_threads=1) as ckpt:
            for step in (10, 20):
                ckpt.save(step, rank_state(comm.rank, step))
            before = faults.count()
            if at is not None and comm.rank == victim:
                faults.kill(at=at, how="raise")
            ckpt.save(30, rank_state(comm.rank, 30))
            return faults.count() - before

    def restarted(root: Path, comm: Any) -> tuple[int, list[float], list[float]]:
        state = rank_state(comm.rank, -1)
        with CheckpointManager(root, comm=comm, reuse=True) as ckpt:
            step = ckpt.restore(state).step or 0
            for more in (40, 50):
                ckpt.save(more, rank_state(comm.rank, more))
            assert all(ckpt.verify(done) == [] for done in (10, 20, step, 40, 50))
        return step, values(state[0].stateful), values(state[1].stateful)

    count = run_ranks(2, lambda comm: saves(tmp_path / "counted", comm, None))[victim]
    for at in points(count, every):
        root = tmp_path / f"killed-{at}"
        ends = run_ranks(2, lambda comm: saves(root, comm, at), errors=True, notice=True)  # noqa: B023
        assert isinstance(ends[victim], Killed)
        for rank, (step, own, common) in enumerate(
            run_ranks(2, lambda comm: restarted(root, comm))  # noqa: B023
        ):
            first = 100.0 * rank
            assert step in (20, 30)
            assert own == [first, first + 1, float(step), first + 3, first + 4, first + 5]
            assert common == [7.0, 8.0, float(step), 10.0, 11.0, 12.0]


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("after", [False, True], ids=["refused", "done and refused"])
def test_every_operation_on_objects_fails_once(s3: Any, after: bool) -> None:
    """A save that fails leaves nothing, and the next one takes over what the last good one has."""
    url = s3.new_root()
    faults = FaultStorage(ckptcore.open_storage(url, s3.options))
    model, step, good, at, failed = Tuned(0.0), 1, 1, 1, 0
    with CheckpointManager(faults, reuse=True, keep=KeepLast(2), refresh_every=10_000) as ckpt:
        adapt(model, 1)
        ckpt.save(1, {"model": model})
        while True:
            step += 1
            adapt(model, step)
            before = faults.count(WRITE_OPERATIONS)
            faults.fail(at, kind=WRITE_OPERATIONS, after=after)
            with warnings.catch_warnings(), suppress(StorageError):
                warnings.simplefilter("ignore", CheckpointWarning)
                failed += 1
                ckpt.save(step, {"model": model})
                failed -= 1
                good = step
            done = faults.count(WRITE_OPERATIONS) - before
            faults.clear()
            latest = ckpt.latest()
            assert latest is not None and latest.step == good
            assert ckpt.verify(good) == []
            if done < at:
                break
            at += 1
    assert failed >= 4
    found = Tuned(-1.0)
    with CheckpointManager(url, storage_options=s3.options) as ckpt:
        assert ckpt.restore({"model": found}).step == good
    assert values(found) == [0.0, 1.0, float(good), 3.0, 4.0, 5.0]
