"""One save in flight: the next one waits, is skipped or raises, and all ranks do the same."""

import threading

import pytest
import torch

from ckptcore import (
    AsyncSaveError,
    CheckpointManager,
    InvalidState,
    KeepLast,
    SharingPattern,
    StateComponent,
    open_storage,
)
from ckptcore.testing import FaultStorage
from ckptcore.testing.processes import patience
from ckptcore.testing.ranks import run_ranks


def state(mark):
    return {"m": {"w": torch.full((500,), float(mark))}}


def test_wait_is_the_default_and_loses_nothing(tmp_path):
    faults = FaultStorage(open_storage(tmp_path))
    with CheckpointManager(faults, drain_timeout=20) as ckpt:
        gate = faults.block(kind="write_at")
        first = ckpt.save_async(1, state(1))
        gate.wait_reached(20)
        opener = threading.Timer(0.05, gate.open)
        opener.start()
        second = ckpt.save_async(2, state(2))
        assert first.done() and first.result().step == 1
        assert second.result(30).step == 2
        assert [handle.skipped for handle in (first, second)] == [False, False]
        assert [info.step for info in ckpt.list()] == [1, 2]
        opener.join()


def test_skip(tmp_path):
    faults, events = FaultStorage(open_storage(tmp_path)), []
    with CheckpointManager(
        faults, when_busy="skip", on_event=events.append, drain_timeout=20
    ) as ckpt:
        gate = faults.block(kind="write_at")
        first = ckpt.save_async(1, state(1))
        gate.wait_reached(20)
        before = faults.count()
        skipped = [ckpt.save_async(step, state(step)) for step in (2, 3)]
        assert faults.count() == before
        for step, handle in zip((2, 3), skipped, strict=True):
            assert (handle.skipped, handle.step) == (True, step)
            assert (
                handle.done()
                and handle.staged()
                and handle.result(0) is None
                and handle.progress == (0, 0)
            )
        assert not first.done() and not first.skipped
        gate.open()
        assert first.result(30).step == 1
        assert ckpt.save_async(4, state(4)).result(30).step == 4
        assert ckpt.save(5, state(5)).step == 5
        assert [info.step for info in ckpt.list()] == [1, 4, 5]
        assert ckpt.failed_steps == ()
    kinds = [(event.kind, event.step) for event in events]
    assert [kind for kind in kinds if kind[0] == "skipped"] == [("skipped", 2), ("skipped", 3)]
    assert kinds.index(("skipped", 3)) < kinds.index(("committed", 1))
    assert {event.step for event in events} == {1, 2, 3, 4, 5}


def test_raise(tmp_path):
    faults, events = FaultStorage(open_storage(tmp_path)), []
    with CheckpointManager(
        faults, when_busy="raise", on_event=events.append, drain_timeout=20
    ) as ckpt:
        gate = faults.block(kind="write_at")
        first = ckpt.save_async(1, state(1))
        gate.wait_reached(20)
        with pytest.raises(AsyncSaveError, match="still being written") as caught:
            ckpt.save_async(2, state(2))
        assert caught.value.step == 2
        gate.open()
        assert first.result(30).step == 1
        assert ckpt.save_async(3, state(3)).result(30).step == 3
        assert [info.step for info in ckpt.list()] == [1, 3]
    assert 2 not in {event.step for event in events}


@pytest.mark.parametrize("when_busy", ["skip", "raise"])
def test_a_save_at_once_always_waits(tmp_path, when_busy):
    faults = FaultStorage(open_storage(tmp_path))
    with CheckpointManager(faults, when_busy=when_busy, drain_timeout=20) as ckpt:
        gate = faults.block(kind="write_at")
        first = ckpt.save_async(1, state(1))
        gate.wait_reached(20)
        opener = threading.Timer(0.05, gate.open)
        opener.start()
        assert ckpt.save(2, state(2)).step == 2
        assert first.result(0).step == 1
        opener.join()


@pytest.mark.parametrize("argument", ["when_busy", "on_error", "staging"])
def test_words_that_mean_nothing(tmp_path, argument):
    with pytest.raises(InvalidState, match=f"{argument} must be one of .*, not 'sometimes'"):
        CheckpointManager(tmp_path, **{argument: "sometimes"})


SIZE = 4


def parts(comm, mark):
    return [
        StateComponent(
            "own", {"x": torch.full((4,), float(mark + comm.rank))}, SharingPattern.PER_RANK
        ),
        StateComponent("all", {"y": torch.full((900,), float(mark))}, SharingPattern.REPLICATED),
    ]


def check_parts(ckpt, comm, step):
    live = parts(comm, -100)
    assert ckpt.load(live, step).step == step
    assert live[0].stateful["x"].tolist() == [float(step + comm.rank)] * 4
    assert set(live[1].stateful["y"].tolist()) == {float(step)}


@pytest.mark.parametrize("when_busy", ["wait", "skip", "raise"])
@pytest.mark.parametrize("slow", [0, 3])
def test_one_rank_writes_slowly(tmp_path, when_busy, slow):
    """The disk of one rank holds up the save; all ranks wait, skip or raise, and all say the
    same."""
    meet = threading.Barrier(SIZE, timeout=30 * patience())
    gates = []

    def program(comm):
        faults = FaultStorage(open_storage(tmp_path))
        with CheckpointManager(faults, comm=comm, when_busy=when_busy, drain_timeout=20) as ckpt:
            if comm.rank == slow:
                gates.append(faults.block(kind="write_at"))
            first = ckpt.save_async(1, parts(comm, 1))
            meet.wait()
            gates[0].wait_reached(20)
            if when_busy == "wait" and comm.rank == (slow + 1) % SIZE:
                threading.Timer(0.05, gates[0].open).start()
            try:
                second = ckpt.save_async(2, parts(comm, 2))
                said = "skipped" if second.skipped else "done"
            except AsyncSaveError as error:
                said = f"raised {error.step}"
            meet.wait()
            if when_busy == "wait":
                assert first.done() and second.result(30).step == 2
            else:
                assert not first.done()
                gates[0].open()
            assert first.result(30).step == 1
            steps = [1, 2] if when_busy == "wait" else [1, 3]
            if when_busy != "wait":
                assert ckpt.save_async(3, parts(comm, 3)).result(30).step == 3
            check_parts(ckpt, comm, steps[-1])
            assert [info.step for info in ckpt.list()] == steps
        return said

    assert (
        run_ranks(SIZE, program)
        == [{"wait": "done", "skip": "skipped", "raise": "raised 2"}[when_busy]] * SIZE
    )


@pytest.mark.parametrize("when_busy", ["wait", "skip", "raise"])
def test_only_rank_0_is_still_busy(tmp_path, when_busy):
    """Rank 0 deletes old checkpoints when the others have done all that they have to do."""
    meet = threading.Barrier(SIZE, timeout=30 * patience())
    gates = []

    def program(comm):
        faults = FaultStorage(open_storage(tmp_path))
        with CheckpointManager(
            faults, comm=comm, when_busy=when_busy, keep=KeepLast(1), drain_timeout=20
        ) as ckpt:
            ckpt.save(1, parts(comm, 1))
            if comm.rank == 0:
                gates.append(faults.block(kind=("remove", "remove_folder")))
            first = ckpt.save_async(2, parts(comm, 2))
            meet.wait()
            gates[0].wait_reached(20)
            if comm.rank != 0:
                assert first.result(30).step == 2
            assert first.done() == (comm.rank != 0)
            meet.wait()
            if when_busy == "wait" and comm.rank == 0:
                threading.Timer(0.05, gates[0].open).start()
            try:
                second = ckpt.save_async(3, parts(comm, 3))
                said = "skipped" if second.skipped else "done"
            except AsyncSaveError as error:
                said = f"raised {error.step}"
            meet.wait()
            gates[0].open()
            assert first.result(30).step == 2
            assert ckpt.save(4, parts(comm, 4)).step == 4
            check_parts(ckpt, comm, 4)
            assert [info.step for info in ckpt.list()] == [4]
            assert ckpt.failed_steps == ()
        return said

    assert (
        run_ranks(SIZE, program)
        == [{"wait": "done", "skip": "skipped", "raise": "raised 3"}[when_busy]] * SIZE
    )


@pytest.mark.parametrize("when_busy", ["skip", "raise"])
def test_b16_a_failure_is_told_once_though_rank_0_is_still_busy_with_it(tmp_path, when_busy):
    """Rank 0 removes what the failed save left; the others know of the failure already. All are
    told once, not twice."""
    meet = threading.Barrier(SIZE, timeout=30 * patience())
    gates = []

    def program(comm):
        faults = FaultStorage(open_storage(tmp_path))
        with CheckpointManager(faults, comm=comm, when_busy=when_busy, drain_timeout=20) as ckpt:
            if comm.rank == 0:
                gates.append(faults.block(kind=("remove", "remove_folder")))
            if comm.rank == 2:
                faults.fail(kind="create")
            first = ckpt.save_async(20, parts(comm, 20))
            meet.wait()
            gates[0].wait_reached(20)
            assert first.wait(30 if comm.rank else 0) == (comm.rank != 0)
            meet.wait()
            if comm.rank == 0:
                threading.Timer(
                    0.3, gates[0].open
                ).start()  # the next call may wait for it, or say at once what it knows
            told = []
            for step in (30, 40):
                try:
                    assert ckpt.save_async(step, parts(comm, step)).result(30).step == step
                except AsyncSaveError as error:
                    told.append(error.step)
                assert first.wait(30)
                meet.wait()
            assert [info.step for info in ckpt.list()] == [40]
        return told

    assert run_ranks(SIZE, program) == [[20]] * SIZE
