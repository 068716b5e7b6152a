"""What faults of the storage show of the engine, beside the kill matrix: durability, short writes,
jobs side by side."""

import os
import threading

import pytest
import torch

from ckptcore import (
    CheckpointError,
    CheckpointManager,
    CheckpointWarning,
    RankLost,
    SharingPattern,
    StateComponent,
    open_storage,
)
from ckptcore.storage.remote import FsspecStorage
from ckptcore.testing import FaultStorage, Killed, VolatileStorage
from ckptcore.testing.ranks import run_ranks


def state_of(mark):
    return {"m": {"w": torch.arange(100.0) + mark}}


def save(storage, step, run="run"):
    return CheckpointManager(storage, io_threads=1, run_id=run).save(step, state_of(step))


def restored(storage):
    """The step that a new manager restores, all of it."""
    live = state_of(-1)
    report = CheckpointManager(storage).restore(live)
    assert torch.equal(live["m"]["w"], state_of(report.step)["m"]["w"])
    return report.step


def test_b01_a_saved_checkpoint_needs_no_more_syncing(tmp_path):
    """When save returns, the loss of all that is not durable takes nothing of it."""
    machine = VolatileStorage(open_storage(tmp_path / "run"))
    save(machine, 1)
    machine.lose_power()
    assert restored(tmp_path / "run") == 1


def test_b01_a_deletion_that_loses_power_is_finished_later(tmp_path):
    """The file that says what is to be deleted may not go before what it names: nobody would know
    what that is."""
    disk = open_storage(tmp_path)
    save(disk, 1)
    save(disk, 2)
    faults = FaultStorage(
        VolatileStorage(disk, lambda change: change.path.endswith("withdrawn.json"))
    )
    faults.kill(kind="remove_folder", how="raise")
    with pytest.raises(Killed):
        CheckpointManager(faults, run_id="run").delete(1)
    save(disk, 3)
    assert [entry.name for entry in disk.list()] == ["checkpoint-2", "checkpoint-3"]
    assert restored(disk) == 3


def test_b01_a_new_root_is_durable(tmp_path, monkeypatch):
    """Each folder on the way to a root that is new has its name synced in the folder above."""
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("this system does not tell what a descriptor is of")
    synced = set()
    fsync = os.fsync

    def noted(fd):
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    save(tmp_path / "runs" / "a", 1)
    assert {str(tmp_path), f"{tmp_path}/runs", f"{tmp_path}/runs/a"} - synced == set()


def test_b01_all_of_a_checkpoint_is_synced(tmp_path, monkeypatch):
    """Each file before it is named, the folder before its rename, and the root after it."""
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("this system does not tell what a descriptor is of")
    save(tmp_path, 1)
    synced, fsync, rename = [], os.fsync, os.rename

    def noted(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def renamed(*args, **how):
        synced.append("rename")
        rename(*args, **how)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", renamed)
    save(tmp_path, 2)
    before, after = synced[: synced.index("rename")], synced[synced.index("rename") + 1 :]
    (partial,) = {path for path in before if ".partial-" in os.path.basename(path)}
    files = {entry.name for entry in (tmp_path / "checkpoint-2").iterdir()}
    assert {f"{partial}/{name}" for name in files} - set(before) == set()
    assert before[-1] == partial and str(tmp_path) in after


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_file_that_was_cut_unnoticed_is_never_restored(tmp_path, keep):
    faults = FaultStorage(open_storage(tmp_path))
    save(faults, 1)
    faults.short(keep=keep, error=None, path="*.safetensors")
    save(faults, 2)
    with pytest.warns(
        CheckpointWarning, match=r"skipped checkpoint-2: .*m\.safetensors has \d+ bytes"
    ):
        assert restored(tmp_path) == 1


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path):
    faults = FaultStorage(open_storage(tmp_path))
    save(faults, 1)
    writes = faults.count("write_at")
    for at in range(1, writes + 1):
        faults.clear()
        faults.short(at)
        with pytest.raises(OSError, match="made by FaultStorage"):
            save(faults, 2)
        assert [entry.name for entry in faults.inner.list()] == ["checkpoint-1"]
        assert restored(tmp_path) == 1


@pytest.mark.parametrize("kind", ["local", "folder"])
def test_two_jobs_that_save_the_same_step_leave_one_whole_checkpoint(tmp_path, kind):
    """One comes between another's look at the place and its first file: whoever fails removes
    nothing of the winner."""

    def storage():
        return (
            open_storage(tmp_path / "run")
            if kind == "local"
            else FsspecStorage(f"file://{tmp_path}/run", {})
        )

    faults = FaultStorage(storage())
    gate = faults.block(kind="create", path="*.safetensors")
    outcomes = {}

    def first():
        try:
            outcomes["first"] = save(faults, 20, "first").run_id
        except CheckpointError as error:
            outcomes["first"] = error

    thread = threading.Thread(target=first)
    thread.start()
    gate.wait_reached(20)
    try:
        outcomes["second"] = save(storage(), 20, "second").run_id
    except CheckpointError as error:
        outcomes["second"] = error
    gate.open()
    thread.join(20)
    won = [who for who, outcome in outcomes.items() if outcome == who]
    assert len(won) == 1, outcomes
    assert CheckpointManager(storage()).latest().run_id == won[0]
    assert restored(storage()) == 20
    assert [entry.name for entry in storage().list()] == ["checkpoint-20"]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_rank_that_still_writes_when_another_is_lost_leaves_nothing_for_good(tmp_path, kind):
    """Rank 0 hears that rank 1 is lost and cleans up while rank 2 writes: what that leaves is
    swept, and told by nobody."""

    def storage():
        # Objects need no folder that is there, so the file of rank 2 comes to be.
        return open_storage(
            tmp_path / "run" if kind == "local" else f"memory://late-{tmp_path.name}/run"
        )

    def state(comm, mark=0.0):
        return [
            StateComponent(
                "own", {"w": torch.full((9,), mark + comm.rank)}, SharingPattern.PER_RANK
            )
        ]

    faults = [FaultStorage(storage()) for _ in range(3)]
    gate = faults[2].block(kind="create", path="*.safetensors")
    faults[1].kill(kind="close", how="raise")

    def program(comm):
        manager = CheckpointManager(faults[comm.rank], comm=comm, io_threads=1, run_id="run")
        try:
            manager.save(10, state(comm))
        finally:
            if comm.rank == 0:
                gate.open()

    first, victim, late = run_ranks(3, program, errors=True, notice=True)
    assert isinstance(victim, Killed)
    assert [(type(error), error.ranks) for error in (first, late)] == [(RankLost, [1])] * 2

    def again(comm):
        manager = CheckpointManager(storage(), comm=comm, io_threads=1)
        fresh = manager.restore(state(comm)).fresh
        manager.save(20, state(comm, 5.0))
        return fresh

    assert run_ranks(3, again) == [True] * 3
    assert [entry.name for entry in storage().list()] == ["checkpoint-20"]
