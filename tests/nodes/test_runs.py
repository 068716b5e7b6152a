"""A run on two nodes with disks of their own: retention, best, pins, deletion, overwriting, saves
in the background."""

from __future__ import annotations

import errno

import pytest

from ckptcore import (
    AsyncSaveError,
    CheckpointExists,
    CheckpointNotFound,
    CheckpointWarning,
    InvalidState,
    KeepBest,
    KeepLast,
    NoSpace,
    RetentionPolicy,
    open_storage,
)
from ckptcore.testing import FaultStorage


def test_both_disks_keep_the_same_by_every_policy(job):
    losses = {1: 0.5, 2: 0.1, 3: 0.7, 4: 0.6, 5: 0.9}

    def program(comm):
        with job.manager(comm, keep=KeepLast(2) | KeepBest("loss", "min")) as ckpt:
            for step, loss in losses.items():
                # Metrics are known to rank 0 alone.
                ckpt.save(
                    step,
                    job.state(step, comm.rank),
                    metrics={"loss": loss} if comm.rank == 0 else None,
                )
            best = ckpt.best()
            assert job.restored(ckpt, "load", "best") == 2
            return [info.step for info in ckpt.list()], best.step, best.metrics

    assert job.run(program) == [([2, 4, 5], 2, {"loss": 0.1})] * 4
    assert job.names() == [["checkpoint-2", "checkpoint-4", "checkpoint-5"]] * 2


def test_a_pinned_one_stays_on_both_disks_until_it_is_unpinned(job):
    def program(comm):
        with job.manager(comm, keep=KeepLast(1)) as ckpt:
            ckpt.save(1, job.state(1, comm.rank))
            ckpt.pin(1)
            ckpt.save(2, job.state(2, comm.rank))
            with pytest.raises(InvalidState, match="pinned"):
                ckpt.delete(1)
            with pytest.raises(CheckpointExists, match="pinned"):
                ckpt.save(1, job.state(1, comm.rank), overwrite=True)
            there = [info.step for info in ckpt.list()], [info.pinned for info in ckpt.list()]
            with pytest.raises(CheckpointNotFound):
                ckpt.pin(7)
            ckpt.unpin(1)
            ckpt.save(3, job.state(3, comm.rank))
            return there, [info.step for info in ckpt.list()]

    assert job.run(program) == [((([1, 2]), [True, False]), [3])] * 4
    assert job.names() == [["checkpoint-3"]] * 2


def test_one_that_is_pinned_on_one_disk_stays_on_both(job):
    job.save(1)
    (job.roots[1] / "checkpoint-1" / "checkpoint.pinned").touch()
    job.save(2, 3, keep=KeepLast(1))
    assert job.names() == [["checkpoint-1", "checkpoint-3"]] * 2


def test_deleting_and_overwriting_reach_both_disks(job):
    def program(comm):
        with job.manager(comm) as ckpt:
            for step in (1, 2):
                ckpt.save(step, job.state(step, comm.rank))
            ckpt.delete(1)
            with pytest.raises(CheckpointExists, match="committed checkpoint"):
                ckpt.save(2, job.state(3, comm.rank))
            assert job.restored(ckpt) == 2
            info = ckpt.save(2, job.state(4, comm.rank), overwrite=True)
            assert job.restored(ckpt) == 4
            return info.sequence, [found.sequence for found in ckpt.list()]

    assert job.run(program) == [(3, [3])] * 4
    assert job.names() == [["checkpoint-2"]] * 2


class Whimsical(RetentionPolicy):
    """Keeps what it likes, which differs between ranks."""

    def __init__(self, rank):
        self.rank = rank

    def keep(self, checkpoints):
        return {checkpoints[0].name} if self.rank == 0 else set()


def test_rank_0_decides_what_goes(job):
    def program(comm):
        with job.manager(comm, keep=Whimsical(comm.rank)) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step, job.state(step, comm.rank))

    job.run(program)
    assert job.names() == [["checkpoint-1", "checkpoint-3"]] * 2


def test_a_policy_that_fails_is_a_warning_and_no_error(job):
    class Broken(RetentionPolicy):
        def keep(self, checkpoints):
            raise RuntimeError("no idea")

    with pytest.warns(CheckpointWarning, match="no idea"):
        job.save(1, keep=Broken())
    assert job.names() == [["checkpoint-1"]] * 2


def test_another_runs_checkpoints_are_left_alone(job):
    job.save(100, 200, run_id="a")
    job.save(1, 2, 3, run_id="b", keep=KeepLast(1))
    assert job.names() == [["checkpoint-100", "checkpoint-200", "checkpoint-3"]] * 2
    assert job.restores(run_id="a") == 200
    assert job.restores(run_id=None) == 3


def test_saves_in_the_background_commit_on_both_disks(job):
    def program(comm):
        events = []
        with job.manager(
            comm, keep=KeepLast(2), on_event=lambda event: events.append((event.kind, event.step))
        ) as ckpt:
            for step in (1, 2, 3, 4):
                live = job.state(step, comm.rank)
                handle = ckpt.save_async(step, live)
                for component in live:  # what is changed now is not what is saved
                    for value in component.stateful.values():
                        if hasattr(value, "zero_"):
                            value.zero_()
            assert handle.result().manifest.node == comm.rank // 2
            assert ckpt.wait()
            assert job.restored(ckpt) == 4
            return [step for kind, step in events if kind == "committed"], [
                i.step for i in ckpt.list()
            ]

    assert job.run(program) == [([1, 2, 3, 4], [3, 4])] * 4
    assert job.names() == [["checkpoint-3", "checkpoint-4"]] * 2


def test_a_failure_in_the_background_on_one_node_is_everybodys(job):
    def program(comm):
        disk = FaultStorage(open_storage(job.roots[comm.rank // 2]))
        with job.manager(comm, root=disk) as ckpt:
            ckpt.save(1, job.state(1, comm.rank))
            if comm.rank == 2:
                disk.fail(kind="rename", path="checkpoint-2", error=errno.EIO)
            handle = ckpt.save_async(2, job.state(2, comm.rank))
            with pytest.raises(AsyncSaveError, match="step 2") as raised:
                handle.result()
            # What can be told before anything is written is told at once.
            with pytest.raises(CheckpointExists):
                ckpt.save_async(1, job.state(1, comm.rank))
            assert job.restored(ckpt) == 1
            ckpt.save_async(3, job.state(3, comm.rank)).result()
            return (
                sorted(raised.value.causes),
                ckpt.failed_steps,
                [info.step for info in ckpt.list()],
            )

    assert job.run(program) == [([2], (2,), [1, 3])] * 4
    assert job.names() == [["checkpoint-1", "checkpoint-3"]] * 2


def test_a_full_disk_on_one_node_fails_the_save_on_all_and_leaves_nothing(job):
    def program(comm):
        disk = FaultStorage(open_storage(job.roots[comm.rank // 2]))
        with job.manager(comm, root=disk) as ckpt:
            ckpt.save(1, job.state(1, comm.rank))
            if comm.rank == 3:
                disk.fail(kind="write_at", error=errno.ENOSPC)
            with pytest.raises(NoSpace, match="rank 3") as raised:
                ckpt.save(2, job.state(2, comm.rank))
            assert job.restored(ckpt) == 1
            ckpt.save(2, job.state(2, comm.rank))
            return sorted(raised.value.causes)

    assert job.run(program) == [[3]] * 4
    assert job.names() == [["checkpoint-1", "checkpoint-2"]] * 2


def test_prewarming_needs_no_storage(job):
    def program(comm):
        with job.manager(comm) as ckpt:
            ckpt.prewarm(job.state(1, comm.rank))

    job.run(program)
    assert [root.exists() for root in job.roots] == [False, False]


def test_broadcasting_loads_the_same(job):
    job.save(1)
    assert job.restores(load_broadcast=True) == 1
