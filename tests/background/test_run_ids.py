"""A run id that was made up before anything was committed must not hide the run that is in the
root."""

import pytest
import torch

from ckptcore import CheckpointExists, CheckpointManager, UnsupportedValue, open_storage
from ckptcore.testing import FaultStorage
from ckptcore.testing.ranks import run_ranks


def state(mark):
    return {"m": {"w": torch.full((100,), float(mark)), "step": mark}}


def refused(error, call):
    with pytest.raises(error):
        call()


def fails(ckpt):
    ckpt.storage.fail(kind="write_at")
    refused(RuntimeError, ckpt.save_async(6, state(6)).result)


# What a program may well do before it restores; none of it commits anything.
BEFORE = {
    "prewarm": lambda ckpt: ckpt.prewarm(state(0)),
    "run_id": lambda ckpt: ckpt.run_id,
    "prewarm, refused": lambda ckpt: refused(
        UnsupportedValue, lambda: ckpt.prewarm({"m": {"x": object()}})
    ),
    "save, taken": lambda ckpt: refused(CheckpointExists, lambda: ckpt.save(5, state(5))),
    "save_async, taken": lambda ckpt: refused(
        CheckpointExists, lambda: ckpt.save_async(5, state(5))
    ),
    "save, unsupported": lambda ckpt: refused(
        UnsupportedValue, lambda: ckpt.save(6, {"m": {"x": object()}})
    ),
    "save_async, unsupported": lambda ckpt: refused(
        UnsupportedValue, lambda: ckpt.save_async(6, {"m": {"x": object()}})
    ),
    "save_async, failed": fails,
}


@pytest.fixture
def first_run(tmp_path):
    """The id of a run that has left checkpoint-5 in the root."""
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(5, state(5))
        return ckpt.run_id


@pytest.mark.parametrize("before", BEFORE)
def test_restore_finds_the_run_that_is_there_and_goes_on_with_it(tmp_path, first_run, before):
    with CheckpointManager(FaultStorage(open_storage(tmp_path))) as ckpt:
        BEFORE[before](ckpt)
        assert [info.step for info in ckpt.list()] == [5] and ckpt.latest().run_id == first_run
        live = state(-1)
        report = ckpt.restore(live)
        assert (report.fresh, report.step) == (False, 5)
        assert live["m"]["w"].tolist() == [5.0] * 100
        assert ckpt.run_id == first_run
        assert ckpt.save_async(8, state(8)).result(30).run_id == first_run
        assert ckpt.save(9, state(9)).run_id == first_run
        assert [info.step for info in ckpt.list()] == [5, 8, 9]
    with CheckpointManager(tmp_path) as ckpt:
        assert ckpt.restore(live).step == 9 and live["m"]["w"].tolist() == [9.0] * 100


@pytest.mark.parametrize("before", ["prewarm", "run_id", "save, taken"])
@pytest.mark.parametrize("which", ["latest", 5])
def test_load_finds_it_too(tmp_path, first_run, before, which):
    with CheckpointManager(tmp_path) as ckpt:
        BEFORE[before](ckpt)
        live = state(-1)
        assert ckpt.load(live, which).step == 5
        assert live["m"]["w"].tolist() == [5.0] * 100
        assert ckpt.save_async(6, state(6)).result(30).run_id == ckpt.run_id == first_run


@pytest.mark.parametrize("saves", ["save", "save_async"])
@pytest.mark.parametrize("restores", [False, True])
def test_in_an_empty_root_the_id_that_was_read_is_the_one_that_comes(tmp_path, saves, restores):
    with CheckpointManager(FaultStorage(open_storage(tmp_path))) as ckpt:
        said = ckpt.run_id
        ckpt.prewarm(state(0))
        fails(ckpt)
        if restores:
            assert ckpt.restore(state(0)).fresh
        assert ckpt.run_id == said
        info = (
            ckpt.save(1, state(1)) if saves == "save" else ckpt.save_async(1, state(1)).result(30)
        )
        assert info.run_id == info.manifest.run_id == ckpt.run_id == said
        assert ckpt.save_async(2, state(2)).result(30).run_id == said
        assert [info.step for info in ckpt.list()] == [1, 2]


def test_who_does_not_restore_begins_a_run_of_its_own(tmp_path, first_run):
    with CheckpointManager(tmp_path) as ckpt:
        said = ckpt.run_id
        assert said != first_run and ckpt.latest().step == 5
        assert ckpt.save_async(1, state(1)).result(30).run_id == said == ckpt.run_id
        assert [info.step for info in ckpt.list()] == [
            1
        ]  # from its first commit on it is this run's manager
        assert ckpt.restore(live := state(-1)).step == 1 and live["m"]["w"].tolist() == [1.0] * 100


def test_an_id_that_was_given_is_the_run_whatever_is_there(tmp_path, first_run):
    with CheckpointManager(tmp_path, run_id="mine") as ckpt:
        ckpt.prewarm(state(0))
        assert ckpt.run_id == "mine" and ckpt.list() == []
        assert ckpt.restore(state(0)).fresh
        assert ckpt.save_async(1, state(1)).result(30).run_id == "mine"


def test_ranks_that_each_made_one_up(tmp_path):
    """What they read may differ before the first commit; from then on it is rank 0's, and a later
    job finds the run."""

    def program(comm):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            said = ckpt.run_id
            ckpt.prewarm(state(0))
            fresh = ckpt.restore(state(0)).fresh
            saved = ckpt.save_async(1, state(1)).result(30)
            return said, fresh, saved.run_id, ckpt.run_id

    def later(comm):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.prewarm(state(0))
            return (
                ckpt.run_id,
                ckpt.restore(live := state(-1)).step,
                ckpt.run_id,
                set(live["m"]["w"].tolist()),
            )

    results = run_ranks(2, program)
    first = results[0][0]
    assert [rest for _, *rest in results] == [[True, first, first]] * 2
    assert [rest for _, *rest in run_ranks(2, later)] == [[1, first, {1.0}]] * 2
