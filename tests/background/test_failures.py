"""B16: a save that fails in the background is told of once, wherever the program looks next;
nothing of it stays."""

import errno
import threading
import warnings

import pytest
import torch

from ckptcore import (
    AsyncSaveError,
    CheckpointManager,
    CheckpointWarning,
    KeepLast,
    SharingPattern,
    StateComponent,
    StorageError,
    UnsupportedValue,
    open_storage,
)
from ckptcore.testing import FaultStorage
from ckptcore.testing.processes import patience
from ckptcore.testing.ranks import run_ranks


def state(mark):
    return {"m": {"w": torch.full((500,), float(mark))}}


def mark_of(manager, step="latest"):
    live = state(-1)
    found = manager.load(live, step)
    assert len(set(live["m"]["w"].tolist())) == 1
    return found.step, live["m"]["w"][0].item()


def failing(ckpt, faults, step=20):
    """A save of `step` that has failed in the background and nobody was told of."""
    faults.fail(kind="write_at")
    handle = ckpt.save_async(step, state(step))
    assert handle.wait(30)
    faults.clear()
    return handle


def check_told(error, step=20):
    assert (type(error), error.step) == (AsyncSaveError, step)
    assert (type(error.__cause__), error.__cause__.errno) == (StorageError, errno.EIO)
    assert f"step {step}" in str(error) and "Input/output error" in str(error)


def test_b16_the_next_save_raises_and_nothing_was_purged_meanwhile(tmp_path):
    faults, events = FaultStorage(open_storage(tmp_path)), []
    with CheckpointManager(
        faults, keep=KeepLast(1), on_event=lambda e: events.append((e.kind, e.step))
    ) as ckpt:
        assert ckpt.save_async(10, state(10)).result(30).step == 10
        failing(ckpt, faults)
        assert (
            ("queued", 20) in events
            and ("failed", 20) in events
            and ("committed", 20) not in events
        )
        with pytest.raises(AsyncSaveError) as caught:
            ckpt.save_async(30, state(30))
        check_told(caught.value)
        assert not [event for event in events if event[1] == 30]
        assert mark_of(ckpt) == (10, 10.0)
        assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-10"]
        assert ckpt.save_async(30, state(30)).result(30).step == 30
        assert mark_of(ckpt) == (30, 30.0)
        assert ckpt.failed_steps == (20,)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-30"]
    assert events == [
        ("queued", 10),
        ("staged", 10),
        ("committed", 10),
        ("queued", 20),
        ("staged", 20),
        ("failed", 20),
        ("queued", 30),
        ("staged", 30),
        ("committed", 30),
        ("deleted", 10),
    ]


def test_b16_with_warnings_training_ends_and_the_result_says_what_failed(tmp_path):
    faults, committed = FaultStorage(open_storage(tmp_path)), []
    with CheckpointManager(
        faults,
        keep=KeepLast(1),
        on_error="warn",
        on_event=lambda e: committed.append(e.step) if e.kind == "committed" else None,
    ) as ckpt:
        ckpt.save_async(10, state(10))
        assert ckpt.wait(30)
        failing(ckpt, faults)
        assert mark_of(ckpt) == (10, 10.0)
        with pytest.warns(CheckpointWarning, match="step 20.*Input/output error") as caught:
            handle = ckpt.save_async(30, state(30))
        assert len(caught) == 1
        assert handle.result(30).step == 30
        failing(ckpt, faults, 40)
        assert ckpt.failed_steps == (20, 40)
        with pytest.warns(CheckpointWarning, match="step 40"):
            assert ckpt.wait() is True
        assert ckpt.wait() is True
    assert committed == [10, 30]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-30"]


def test_result_raises_what_failed_even_where_the_rest_only_warns(tmp_path):
    faults = FaultStorage(open_storage(tmp_path))
    with CheckpointManager(faults, on_error="warn") as ckpt:
        handle = failing(ckpt, faults)
        with pytest.raises(AsyncSaveError) as caught:
            handle.result(30)
        check_told(caught.value)
        assert ckpt.save_async(30, state(30)).result(30).step == 30  # and no warning


PLACES = {
    "save": lambda ckpt, handle: ckpt.save(30, state(30)),
    "save_async": lambda ckpt, handle: ckpt.save_async(30, state(30)),
    "prewarm": lambda ckpt, handle: ckpt.prewarm(state(30)),
    "result": lambda ckpt, handle: handle.result(30),
    "wait": lambda ckpt, handle: ckpt.wait(30),
    "close": lambda ckpt, handle: ckpt.close(),
    "exit": lambda ckpt, handle: ckpt.__exit__(None, None, None),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("when_busy", ["wait", "skip", "raise"])
def test_b16_told_once(tmp_path, place, when_busy):
    faults = FaultStorage(open_storage(tmp_path))
    ckpt = CheckpointManager(faults, when_busy=when_busy)
    handle = failing(ckpt, faults)
    with pytest.raises(AsyncSaveError) as caught:
        PLACES[place](ckpt, handle)
    check_told(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert ckpt.wait() is True
    if place not in ("close", "exit"):
        assert ckpt.save_async(30, state(30)).result(30).step == 30
        assert ckpt.save(40, state(40)).step == 40
        assert mark_of(ckpt, 30) == (30, 30.0)
    ckpt.close()
    ckpt.close()
    with pytest.raises(
        AsyncSaveError
    ) as again:  # whoever asks for this very save is told every time
        handle.result(30)
    check_told(again.value)
    assert ckpt.failed_steps == (20,)


def test_loading_is_no_place_to_be_told_of_a_save(tmp_path):
    """Restoring after a failure is the sensible thing to do; the failure is told at the next save
    all the same."""
    faults = FaultStorage(open_storage(tmp_path))
    with CheckpointManager(faults) as ckpt:
        ckpt.save(10, state(10))
        failing(ckpt, faults)
        assert mark_of(ckpt) == (10, 10.0)
        live = state(-1)
        assert ckpt.restore(live).step == 10
        with pytest.raises(AsyncSaveError):
            ckpt.save(30, state(30))


def test_what_can_be_told_at_once_is_raised_by_save_async(tmp_path):
    events = []
    with CheckpointManager(tmp_path, on_event=events.append) as ckpt:
        with pytest.raises(UnsupportedValue) as caught:
            ckpt.save_async(10, {"m": {"a": [object()]}})
        assert (caught.value.component, caught.value.key) == ("m", "a/0")
        ckpt.save(10, state(10))
        with pytest.raises(FileExistsError, match="checkpoint-10"):
            ckpt.save_async(10, state(11))
        assert mark_of(ckpt) == (10, 10.0)
        assert ckpt.save_async(10, state(11), overwrite=True).result(30).step == 10
        assert mark_of(ckpt) == (10, 11.0)
        assert ckpt.failed_steps == ()


def test_a_warning_of_the_background_is_told_by_whoever_looks(tmp_path):
    """A deletion that fails is a warning of the caller's thread, once, and the save has
    succeeded."""
    faults = FaultStorage(open_storage(tmp_path))
    with CheckpointManager(faults, keep=KeepLast(1)) as ckpt:
        ckpt.save(10, state(10))
        faults.fail(kind="remove", path="checkpoint-10*", times=None)
        handle = ckpt.save_async(20, state(20))
        assert handle.wait(30)
        faults.clear()
        with pytest.warns(CheckpointWarning, match="checkpoint-10 could not be deleted") as caught:
            assert handle.result().step == 20
        assert len(caught) == 1
        assert handle.result().step == 20
        assert ckpt.save_async(30, state(30)).result(30).step == 30
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-30"]


SIZE = 3


def parts(comm, mark):
    return [
        StateComponent(
            "own", {"x": torch.full((4,), float(mark + comm.rank))}, SharingPattern.PER_RANK
        )
    ]


@pytest.mark.parametrize("asks", [None, 0, 1, 2], ids=["none", "0", "1", "2"])
@pytest.mark.parametrize("place", ["save", "save_async", "prewarm"])
@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_b16_all_ranks_are_told_even_if_one_asked_before(tmp_path, asks, place, when_busy):
    """Rank 1's disk failed; rank `asks` has looked at its handle; the next save raises on all, and
    the one after works."""
    meet = threading.Barrier(SIZE, timeout=30 * patience())

    def program(comm):
        faults = FaultStorage(open_storage(tmp_path))
        ckpt = CheckpointManager(faults, comm=comm, when_busy=when_busy)
        ckpt.save(10, parts(comm, 10))
        if comm.rank == 1:
            faults.fail(kind="write_at")
        handle = ckpt.save_async(20, parts(comm, 20))
        told = []
        if comm.rank == asks:
            with pytest.raises(AsyncSaveError) as caught:
                handle.result(30)
            told.append(caught.value)
        assert handle.wait(30)
        meet.wait()
        faults.clear()
        call = {
            "save": lambda: ckpt.save(30, parts(comm, 30)),
            "save_async": lambda: ckpt.save_async(30, parts(comm, 30)),
            "prewarm": lambda: ckpt.prewarm(parts(comm, 30)),
        }[place]
        try:
            call()
        except AsyncSaveError as error:
            told.append(error)
        assert len(told) == 1 + (asks == comm.rank)
        for error in told:
            assert (
                error.step == 20 and "rank 1: " in str(error) and "Input/output error" in str(error)
            )
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-10"]
        meet.wait()
        assert ckpt.save_async(40, parts(comm, 40)).result(30).step == 40
        live = parts(comm, -100)
        assert (
            ckpt.load(live).step == 40 and live[0].stateful["x"].tolist() == [40.0 + comm.rank] * 4
        )
        assert ckpt.failed_steps == (20,)
        ckpt.close()
        return True

    assert run_ranks(SIZE, program) == [True] * SIZE


@pytest.mark.parametrize("place", ["result", "wait", "close"])
def test_b16_every_rank_is_told_by_itself(tmp_path, place):
    def program(comm):
        faults = FaultStorage(open_storage(tmp_path))
        ckpt = CheckpointManager(faults, comm=comm)
        if comm.rank == 2:
            faults.fail(kind="create")
        handle = ckpt.save_async(20, parts(comm, 20))
        with pytest.raises(AsyncSaveError) as caught:
            PLACES[place](ckpt, handle)
        ckpt.close()
        return caught.value

    errors = run_ranks(SIZE, program)
    assert len({str(error) for error in errors}) == 1
    assert [error.causes for error in errors] == [errors[0].causes] * SIZE and list(
        errors[0].causes
    ) == [2]
    assert [type(error.__cause__) for error in errors] == [StorageError] * SIZE
    assert list(tmp_path.iterdir()) == []


def test_b16_warnings_on_all_ranks(tmp_path):
    def program(comm):
        faults = FaultStorage(open_storage(tmp_path))
        with CheckpointManager(faults, comm=comm, on_error="warn") as ckpt:
            if comm.rank == 1:
                faults.fail(kind="create")
            assert ckpt.save_async(20, parts(comm, 20)).wait(30)
            assert ckpt.save_async(30, parts(comm, 30)).result(30).step == 30
            return ckpt.failed_steps

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        assert run_ranks(SIZE, program) == [(20,)] * SIZE
    assert len(caught) == SIZE and all("step 20" in str(w.message) for w in caught)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-30"]
