"""What `on_event` may call from the thread that writes: nothing that waits for the save which it is
told of."""

import os
import queue

import pytest
import torch

import ckptcore.saving.save
from ckptcore import (
    CheckpointManager,
    InvalidState,
    KeepLast,
    SharingPattern,
    StateComponent,
    Tier,
    open_storage,
)
from ckptcore.testing import FaultStorage
from ckptcore.testing.ranks import run_ranks


def state(mark):
    return {"m": {"w": torch.full((500,), float(mark))}}


def check(ckpt, *steps):
    for step in steps:
        live = state(-1)
        assert ckpt.load(live, step).step == step
        assert live["m"]["w"].tolist() == [float(step)] * 500


WAITING = {
    "save": lambda ckpt, handle: ckpt.save(20, state(20)),
    "save_async": lambda ckpt, handle: ckpt.save_async(20, state(20)),
    "prewarm": lambda ckpt, handle: ckpt.prewarm(state(20)),
    "load": lambda ckpt, handle: ckpt.load(state(20)),
    "restore": lambda ckpt, handle: ckpt.restore(state(20)),
    "result": lambda ckpt, handle: handle.result(),
    "result in time": lambda ckpt, handle: handle.result(0),
    "wait": lambda ckpt, handle: ckpt.wait(),
    "wait in time": lambda ckpt, handle: ckpt.wait(0),
}


@pytest.mark.parametrize("kind", ["staged", "committed"])
@pytest.mark.parametrize("call", WAITING)
def test_a_watcher_that_waits_for_what_calls_it_is_told(tmp_path, call, kind):
    """It would wait for itself without end, and so would everybody else. The save is none the
    worse."""
    handles, seen = queue.SimpleQueue(), []

    def watch(event):
        if (event.kind, event.step) == (kind, 10):
            handle = handles.get(timeout=20)
            try:
                seen.append(WAITING[call](ckpt, handle))
            except Exception as error:
                seen.append(error)

    ckpt = CheckpointManager(tmp_path, on_event=watch, drain_timeout=2)
    handle = ckpt.save_async(10, state(10))
    handles.put(handle)
    assert handle.wait(10)
    assert [type(error) for error in seen] == [InvalidState]
    assert (
        str(seen[0])
        == "the save of step 10 cannot be waited for by what it calls itself (on_event)"
    )
    assert handle.result().step == 10 and ckpt.wait(10)
    assert ckpt.save_async(30, state(30)).result(10).step == 30
    assert ckpt.failed_steps == ()
    ckpt.close()
    check(ckpt, 10, 30)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-30"]


def test_closing_is_no_business_of_a_watcher_either(tmp_path):
    """What it is told of is committed all the same, and so is what comes after it."""
    seen = []

    def watch(event):
        if (event.kind, event.step) == ("staged", 10):
            try:
                ckpt.close()
            except Exception as error:
                seen.append(type(error))

    ckpt = CheckpointManager(tmp_path, on_event=watch, drain_timeout=2)
    handle = ckpt.save_async(10, state(10))
    assert handle.wait(10) and seen == [InvalidState]
    assert handle.result().step == 10
    assert ckpt.save_async(20, state(20)).result(10).step == 20
    ckpt.close()
    check(ckpt, 10, 20)


def test_what_a_watcher_may_call(tmp_path):
    """Looking at the root, and at the handle, waits for nobody; nor does a save of one thread
    concern another manager."""
    seen = []
    with CheckpointManager(tmp_path / "other") as other:
        before = other.save_async(1, state(1))

        def watch(event):
            if (event.kind, event.step) == ("committed", 10):
                ckpt.pin(10)
                seen.append(
                    ([info.step for info in ckpt.list()], ckpt.latest().pinned, ckpt.verify(10))
                )
                seen.append((before.result(10).step, other.wait(10), other.save(2, state(2)).step))

        with CheckpointManager(tmp_path / "run", keep=KeepLast(1), on_event=watch) as ckpt:
            assert ckpt.save_async(10, state(10)).result(20).step == 10
            assert seen == [([10], True, []), (1, True, 2)]
            assert ckpt.save_async(20, state(20)).result(20).step == 20
            check(ckpt, 10, 20)
        check(other, 1, 2)


@pytest.mark.parametrize("kind", ["failed", "deleted"])
def test_of_a_failure_and_of_a_deletion(tmp_path, kind):
    faults, seen = FaultStorage(open_storage(tmp_path)), []

    def watch(event):
        if event.kind == kind:
            try:
                seen.append(ckpt.wait(10))
            except Exception as error:
                seen.append(type(error))

    with CheckpointManager(faults, on_event=watch, keep=KeepLast(1), drain_timeout=2) as ckpt:
        assert ckpt.save_async(10, state(10)).result(10).step == 10
        if kind == "failed":
            faults.fail(kind="write_at")
        handle = ckpt.save_async(20, state(20))
        assert handle.wait(10)
        assert seen == [InvalidState]
        if kind == "failed":
            with pytest.raises(RuntimeError, match="Input/output error"):
                handle.result()
        check(ckpt, 10 if kind == "failed" else 20)


def test_of_an_upload(tmp_path):
    seen = []

    def watch(event):
        if event.kind == "uploaded":
            try:
                seen.append(ckpt.wait(10))
            except Exception as error:
                seen.append(type(error))

    with CheckpointManager(
        tmp_path / "fast", tiers=[Tier(tmp_path / "safe")], on_event=watch, drain_timeout=5
    ) as ckpt:
        ckpt.save_async(10, state(10))
        assert ckpt.wait(20)
    assert seen == [InvalidState]
    assert os.listdir(tmp_path / "safe") == ["checkpoint-10"]


def test_on_several_ranks(tmp_path):
    """The watcher of one rank makes a call that the others do not; it is refused there, and none of
    them waits for it."""

    def program(comm):
        seen = []

        def watch(event):
            if comm.rank == 1 and event.kind in ("staged", "committed") and event.step == 10:
                try:
                    seen.append(ckpt.save(20, own))
                except Exception as error:
                    seen.append(type(error))

        own = [
            StateComponent(
                "own", {"x": torch.full((8,), float(comm.rank))}, SharingPattern.PER_RANK
            )
        ]
        with CheckpointManager(tmp_path, comm=comm, on_event=watch, drain_timeout=5) as ckpt:
            steps = [ckpt.save_async(step, own).result(20).step for step in (10, 30)]
            live = [StateComponent("own", {"x": torch.zeros(8)}, SharingPattern.PER_RANK)]
            ckpt.load(live, 10)
            return steps, seen, live[0].stateful["x"].tolist()

    assert run_ranks(2, program) == [
        ([10, 30], [], [0.0] * 8),
        ([10, 30], [InvalidState] * 2, [1.0] * 8),
    ]


# What is told of a save that failed.


class Refuses:
    def state_dict(self):
        raise ValueError("not now")

    def load_state_dict(self, state_dict):
        raise AssertionError


def run_out(*_):
    raise MemoryError("for the copy")


FAILING = {
    "write, async": ("write", {"capture", "layouts", "plan", "stage", "validate"}),
    "stage, async": ("stage", {"capture", "layouts", "plan"}),
    "write": ("write", {"capture", "layouts", "plan", "validate"}),
    "capture": ("capture", set()),
}


@pytest.mark.parametrize("case", FAILING)
def test_the_phase_that_failed_has_a_time(tmp_path, monkeypatch, case):
    """The longest of all may be the one that ran into the limit of a storage."""
    phase, before = FAILING[case]
    faults, events = FaultStorage(open_storage(tmp_path)), []
    ckpt = CheckpointManager(faults, on_event=events.append)
    if phase == "write":
        faults.delay(0.02, kind="create")
        faults.fail(kind="write_at")
    if phase == "stage":
        monkeypatch.setattr(ckptcore.saving.save, "copy_into_pool", run_out)
    with pytest.raises(RuntimeError if "async" in case else (OSError, ValueError)):
        if "async" in case:
            ckpt.save_async(10, state(10)).result(20)
        else:
            ckpt.save(10, {"m": Refuses()} if phase == "capture" else state(10))
    ckpt.close()
    failed = events[-1]
    assert (failed.kind, failed.step) == ("failed", 10)
    assert set(failed.timings) == before | {phase}
    assert failed.timings[phase] >= (0.02 if phase == "write" else 0.0)


def test_replicas_that_differ(tmp_path):
    """The comparison takes its time too, on every rank."""

    def program(comm):
        events = []
        own = [
            StateComponent(
                "m", {"w": torch.full((8,), float(comm.rank))}, SharingPattern.REPLICATED
            )
        ]
        ckpt = CheckpointManager(tmp_path, comm=comm, on_event=events.append)
        with pytest.raises(RuntimeError):
            ckpt.save_async(10, own).result(20)
        ckpt.close()
        return events[-1].kind, sorted(events[-1].timings)

    phases = ["capture", "layouts", "plan", "stage", "validate"]
    assert run_ranks(2, program) == [("failed", phases)] * 2
