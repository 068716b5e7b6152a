"""Training goes on while a disk is slow, and what watchers and handles say of it is true."""

import logging
import threading
import warnings

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    KeepLast,
    SharingPattern,
    StateComponent,
    TensorBoardEvents,
    open_storage,
)
from ckptcore.testing import FaultStorage
from ckptcore.testing.ranks import run_ranks

MIB = 1 << 20
PHASES = {"capture", "layouts", "plan", "stage", "validate", "write"}


def state(mark, items=1000):
    return {"m": {f"w{n}": torch.full((items,), float(mark)) for n in range(3)}}


def test_training_goes_on_while_the_disk_does_nothing(tmp_path):
    """200 steps and 20 skipped saves while the first one is held up: nothing in `save_async` waits
    for the disk."""
    faults = FaultStorage(open_storage(tmp_path))
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with CheckpointManager(faults, when_busy="skip", drain_timeout=20) as ckpt:
        gate = faults.block(kind="write_at")
        at_save = [p.detach().clone() for p in model.parameters()]
        handle = ckpt.save_async(0, {"m": dict(model.named_parameters())})
        gate.wait_reached(20)
        for step in range(1, 201):
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            if step % 10 == 0:
                assert ckpt.save_async(step, {"m": dict(model.named_parameters())}).skipped
        assert not handle.done() and handle.staged()
        gate.open()
        assert handle.result(30).step == 0
        found = {"m": {name: torch.zeros_like(p) for name, p in model.named_parameters()}}
        ckpt.load(found, 0)
    assert all(torch.equal(a, b) for a, b in zip(found["m"].values(), at_save, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), at_save, strict=True))


def test_what_is_told_and_when(tmp_path):
    faults, events, threads = FaultStorage(open_storage(tmp_path)), [], {}

    def watch(event):
        events.append(event)
        threads[event.kind, event.step] = threading.current_thread().name

    with CheckpointManager(faults, keep=KeepLast(1), on_event=watch, drain_timeout=20) as ckpt:
        gate = faults.block(kind="rename")
        handle = ckpt.save_async(10, state(10))
        gate.wait_reached(20)
        assert [event.kind for event in events] == ["queued", "staged"]
        gate.open()
        first = handle.result(30)
        second = ckpt.save_async(20, state(20)).result(30)
        third = ckpt.save(30, state(30))
        faults.fail(kind="write_at")
        assert ckpt.save_async(40, state(40)).wait(30)
        with pytest.raises(RuntimeError):
            ckpt.wait()
    assert [(event.kind, event.step) for event in events] == [
        ("queued", 10),
        ("staged", 10),
        ("committed", 10),
        ("queued", 20),
        ("staged", 20),
        ("committed", 20),
        ("deleted", 10),
        ("committed", 30),
        ("deleted", 20),
        ("queued", 40),
        ("staged", 40),
        ("failed", 40),
    ]
    assert {event.name for event in events} == {f"checkpoint-{step}" for step in (10, 20, 30, 40)}
    assert [event.time for event in events] == sorted(event.time for event in events)
    for info in (first, second, third):
        found = {event.kind: event for event in events if event.step == info.step}
        assert (
            found["committed"].nbytes
            == info.size_bytes
            == sum(f.size for f in info.manifest.files.values())
        )
        assert found["committed"].error is None and found["committed"].seconds > 0
        assert set(found["committed"].timings) == PHASES - ({"stage"} if info is third else set())
        if info is not third:
            assert found["staged"].nbytes == 3 * 4000  # as they lie in the file
            assert (
                0
                <= found["queued"].seconds
                <= found["staged"].seconds
                <= found["committed"].seconds
            )
            assert set(found["queued"].timings) == {"capture", "layouts"}
            assert threads["committed", info.step] == "ckptcore-save"
            assert threads["queued", info.step] == threading.main_thread().name
    assert next(e for e in events if e.kind == "deleted").nbytes == first.size_bytes
    failed = events[-1]
    assert (type(failed.error).__name__, failed.nbytes) == ("StorageError", 0)
    assert "committed" not in {event.kind for event in events if event.step == 40}


@pytest.mark.parametrize("url", ["local", "memory"])
def test_progress_grows_to_its_total(tmp_path, url):
    """The write is held after each batch in turn; progress is what was written by then, never
    more."""
    storage = open_storage(tmp_path if url == "local" else f"memory://progress-{tmp_path.name}")
    faults = FaultStorage(storage)
    with CheckpointManager(faults, io_threads=1, drain_timeout=20) as ckpt:
        gates = [
            faults.block(number, kind="write_at", path="*.safetensors") for number in range(1, 5)
        ]
        end = faults.block(kind="write_at", path="*index*")
        handle = ckpt.save_async(1, state(1, 5 * MIB // 4))
        seen = []
        for gate in [*gates, end]:
            gate.wait_reached(20)
            seen.append(handle.progress)
            gate.open()
        info = handle.result(30)
    total = sum(f.size for name, f in info.manifest.files.items() if name.endswith(".safetensors"))
    written = [done for done, _ in seen]
    assert {of for _, of in seen} == {total} and total > 15 * MIB
    assert written[0] == 0 and written == sorted(set(written)) and written[-1] == total
    assert handle.progress == (total, total)


def test_progress_of_a_save_that_failed(tmp_path):
    faults = FaultStorage(open_storage(tmp_path))
    with CheckpointManager(faults, io_threads=1) as ckpt:
        faults.fail(3, kind="write_at")
        handle = ckpt.save_async(1, state(1, 5 * MIB // 4))
        with pytest.raises(RuntimeError):
            handle.result(30)
        written, total = handle.progress
        assert 0 < written < total


def test_tensorboard_reads_what_happened(tmp_path):
    faults = FaultStorage(open_storage(tmp_path / "run"))
    watch = TensorBoardEvents(tmp_path / "board")
    with CheckpointManager(
        faults, keep=KeepLast(1), when_busy="skip", on_event=watch, drain_timeout=20
    ) as ckpt:
        first = ckpt.save_async(10, state(10)).result(30)
        gate = faults.block(kind="write_at")
        held = ckpt.save_async(20, state(20))
        gate.wait_reached(20)
        assert ckpt.save_async(25, state(25)).skipped
        gate.open()
        second = held.result(30)
        faults.fail(kind="write_at")
        ckpt.save_async(30, state(30)).wait(30)
        with pytest.raises(RuntimeError):
            ckpt.wait()
        # Read while the writer is still open: what is told survives the death of the process.
        reader = EventAccumulator(str(tmp_path / "board"))
        reader.Reload()
    points = {
        tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }
    assert points["checkpoint/queued"] == [(10, 1.0), (20, 1.0), (30, 1.0)]
    assert points["checkpoint/staged"] == [(10, 1.0), (20, 1.0), (30, 1.0)]
    assert points["checkpoint/committed"] == [(10, 1.0), (20, 1.0)]
    assert points["checkpoint/failed"] == [(30, 1.0)]
    assert points["checkpoint/skipped"] == [(25, 1.0)]
    assert points["checkpoint/deleted"] == [(10, 1.0)]
    sizes = [(info.step, pytest.approx(info.size_bytes / 1e6)) for info in (first, second)]
    assert points["checkpoint/megabytes"] == sizes
    assert [step for step, _ in points["checkpoint/seconds"]] == [10, 20, 30]
    for phase in PHASES - {"write"}:
        assert [step for step, _ in points[f"checkpoint/seconds_{phase}"]] == [10, 20, 30]
    assert [step for step, _ in points["checkpoint/seconds_write"]][:2] == [10, 20]
    watch.writer.close()


def test_a_watcher_that_raises_is_logged_and_ignored(tmp_path, caplog):
    def watch(event):
        raise ValueError(f"of {event.kind}")

    with (
        caplog.at_level(logging.WARNING, "ckptcore"),
        CheckpointManager(tmp_path, on_event=watch) as ckpt,
    ):
        assert ckpt.save_async(1, state(1)).result(30).step == 1
        assert ckpt.save(2, state(2)).step == 2
    assert [r.args[1:] for r in caplog.records] == [
        ("queued", 1),
        ("staged", 1),
        ("committed", 1),
        ("committed", 2),
    ]


@pytest.mark.parametrize("kind", ["committed", "staged", "failed"])
def test_a_watcher_that_leaves_the_program_keeps_nobody_waiting(tmp_path, kind):
    """sys.exit() in a thread ends that thread alone; whoever waits for the save is told how it
    ended."""
    faults = FaultStorage(open_storage(tmp_path))

    def watch(event):
        if event.kind == kind and event.step == 1:
            raise SystemExit(3)

    ckpt = CheckpointManager(faults, on_event=watch, drain_timeout=5)
    if kind == "failed":
        faults.fail(kind="write_at")
    handle = ckpt.save_async(1, state(1))
    assert handle.wait(5)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CheckpointWarning)
        if kind == "committed":
            assert handle.result(0).step == 1
        else:
            with pytest.raises(RuntimeError):
                handle.result(0)
            assert not [w for w in told if "is committed" in str(w.message)]
    assert ckpt.save_async(2, state(2)).result(10).step == 2
    ckpt.close()
    assert [entry.name for entry in sorted(tmp_path.iterdir())][-1] == "checkpoint-2"
    assert (tmp_path / "checkpoint-1").exists() == (kind == "committed")


def test_events_of_several_ranks(tmp_path):
    seen = {}

    def program(comm):
        events = seen[comm.rank] = []
        own = [
            StateComponent(
                "own", {"x": torch.full((8,), float(comm.rank))}, SharingPattern.PER_RANK
            )
        ]
        with CheckpointManager(
            tmp_path, comm=comm, keep=KeepLast(1), on_event=events.append
        ) as ckpt:
            return [ckpt.save_async(step, own).result(30).size_bytes for step in (1, 2)]

    sizes = run_ranks(3, program)
    assert sizes[0] == sizes[1] == sizes[2]
    for rank, events in seen.items():
        assert {event.rank for event in events} == {rank}
        kinds = [(event.kind, event.step) for event in events]
        expected = [(kind, step) for step in (1, 2) for kind in ("queued", "staged", "committed")]
        assert kinds == expected + ([("deleted", 1)] if rank == 0 else [])
        assert [event.nbytes for event in events if event.kind == "committed"] == sizes[0]
