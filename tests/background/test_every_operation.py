"""At every storage operation of a save in the background: what others see there, and what is left
when it fails there."""

import errno
import uuid
import warnings

import pytest
import torch

from ckptcore import (
    AsyncSaveError,
    CheckpointManager,
    CheckpointWarning,
    KeepLast,
    NoSpace,
    StorageError,
    open_storage,
)
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.testing import FaultStorage
from ckptcore.testing.rules import WRITE_OPERATIONS


def state(mark):
    return {
        "m": {f"w{n}": torch.full((300,), float(mark + n)) for n in range(3)},
        "p": {"mark": mark},
    }


@pytest.fixture(params=["local", "memory"])
def new_storage(request, tmp_path):
    base = f"memory://background-{uuid.uuid4().hex}"

    def make():
        name = uuid.uuid4().hex
        return open_storage(tmp_path / name if request.param == "local" else f"{base}/{name}")

    return make


def mark_of(storage):
    """Step and mark of what `latest` loads, every tensor looked at."""
    report = CheckpointManager(storage, run_id="run").load(live := state(-1))
    mark = report.values["p"]["mark"]
    assert [set(live["m"][f"w{n}"].tolist()) for n in range(3)] == [
        {float(mark + n)} for n in range(3)
    ]
    return report.step, mark


def check_whole(storage, steps):
    """Exactly these checkpoints are there, every byte of them, and nothing else is."""
    manager = CheckpointManager(storage, run_id="run")
    expected = {info.name: {*info.manifest.files, MANIFEST_NAME} for info in manager.list()}
    assert [*expected] == [f"checkpoint-{step}" for step in steps]
    assert {
        entry.name: {file.name for file in storage.list(entry.name)} for entry in storage.list()
    } == expected
    assert all(manager.verify(step) == [] for step in steps)


@pytest.mark.parametrize("overwrite", [False, True], ids=["next", "again"])
def test_latest_never_shows_what_is_not_committed(new_storage, overwrite):
    """The background is held at each writing operation in turn, while another manager looks."""
    at, more, seen = 0, True, set()
    while more:
        at += 1
        storage = new_storage()
        CheckpointManager(storage, run_id="run").save(10, state(10))
        faults, events = FaultStorage(storage), Kinds()
        step = 10 if overwrite else 20
        with CheckpointManager(
            faults,
            run_id="run",
            keep=KeepLast(1),
            io_threads=1,
            drain_timeout=20,
            on_event=events.append,
        ) as ckpt:
            gate = faults.block(at, kind=WRITE_OPERATIONS)
            handle = ckpt.save_async(step, state(20), overwrite=overwrite)
            more = reached(gate, handle)
            infos = {info.step: info for info in CheckpointManager(storage, run_id="run").list()}
            committed = "committed" in events
            if more:
                assert not handle.done()
            if overwrite and not infos:
                # An object store has nothing between the withdrawal of the old manifest and the new
                # one's put.
                assert not storage.atomic_rename
                seen.add("none")
            else:
                found = mark_of(storage)
                assert found in ((10, 10), (step, 20))
                assert not committed or found == (step, 20)
                assert ckpt.latest().step == found[0]
                # The one before goes only when the new one is there.
                assert 10 in infos or 20 in infos
                seen.add((found[1], committed, len(infos)))
            gate.open()
            assert handle.result(30).step == step
        check_whole(storage, [step])
    assert (10, False, 1) in seen  # before, ...
    if overwrite:
        assert (20, True, 1) in seen
    else:
        assert (20, True, 2) in seen  # ... and committed while the old one is being deleted
    print(
        f"\n{storage.url[:8]}: held at {at - 1} operations in turn; seen {sorted(map(str, seen))}"
    )
    assert at > 8


class Kinds(list):
    """What kinds of events there were."""

    def append(self, event):
        super().append(event.kind)


def reached(gate, handle):
    """Whether the save is held at the gate; False when it ended without."""
    while not handle.wait(0.001):
        if gate._reached.is_set():
            return True
    return gate._reached.is_set()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("keep", [None, KeepLast(1)], ids=["all", "last"])
def test_b48_a_failure_at_every_operation(new_storage, error, keep):
    """The older one loads, nothing of the attempt stays, the next save works. After the commit: a
    warning at most."""
    at, more, outcomes = 0, True, []
    while more:
        at += 1
        storage = new_storage()
        CheckpointManager(storage, run_id="run").save(10, state(10))
        faults, events = FaultStorage(storage), Kinds()
        ckpt = CheckpointManager(
            faults, run_id="run", keep=keep, io_threads=1, drain_timeout=20, on_event=events.append
        )
        faults.fail(at, error=error)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", CheckpointWarning)
            try:
                handle = ckpt.save_async(20, state(20))
                assert handle.wait(30)
                more = faults._rules[0].matched >= at
                faults.clear()
                handle.result()
                outcomes.append("committed")
            except StorageError as failed:
                assert failed.errno == error and events == []
                outcomes.append("raised")
            except AsyncSaveError as failed:
                assert type(failed.__cause__) is (
                    NoSpace if error == errno.ENOSPC else StorageError
                )
                assert (failed.step, failed.__cause__.errno) == (20, error)
                assert error != errno.ENOSPC or failed.__cause__.needed >= 3 * 300 * 4
                outcomes.append("failed")
            faults.clear()
        if outcomes[-1] == "committed":
            assert "committed" in events and "failed" not in events
            assert ckpt.failed_steps == () and mark_of(storage) == (20, 20)
            assert len(told) <= 1
        else:
            assert "committed" not in events and events[-1:] == (
                ["failed"] if outcomes[-1] == "failed" else []
            )
            assert ckpt.failed_steps == ((20,) if outcomes[-1] == "failed" else ())
            assert mark_of(storage) == (10, 10) and told == []
            check_whole(storage, [10])
        if outcomes[-1] == "committed":
            assert ckpt.save_async(30, state(30)).result(30).step == 30
            assert mark_of(storage) == (30, 30)
        else:
            assert ckpt.save_async(20, state(21)).result(30).step == 20
            assert mark_of(storage) == (20, 21)
            ckpt.save_async(30, state(30)).result(30)
        ckpt.close()
        check_whole(storage, [30] if keep else [10, 20, 30])
    counts = {outcome: outcomes.count(outcome) for outcome in sorted({*outcomes})}
    print(f"\n{storage.url[:8]} {keep}: {at - 1} operations failed in turn: {counts}")
    assert counts["failed"] > 8 and counts["raised"] >= 1
