"""Ctrl-C, or any other way out, in the middle of `save_async`: nobody waits for a save that never
began."""

import os
import signal
import threading

import pytest
import torch

import ckptcore.saving.save
from ckptcore import AsyncSaveError, CheckpointManager, SharingPattern, StateComponent
from ckptcore.saving.background import Background
from ckptcore.testing.ranks import run_ranks

stage = ckptcore.saving.save.copy_into_pool


def state(mark):
    return {"m": {"w": torch.full((500,), float(mark))}}


def interrupted_once(monkeypatch, error, rank=0):
    """Staging is interrupted, on one rank, the first time."""
    left = [error]

    def interrupted(pool, plan, *rest):
        if plan.rank == rank and left:
            raise left.pop()
        return stage(pool, plan, *rest)

    monkeypatch.setattr("ckptcore.saving.save.copy_into_pool", interrupted)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit], ids=["Ctrl-C", "exit"])
def test_while_the_state_is_copied(tmp_path, monkeypatch, error):
    interrupted_once(monkeypatch, error())
    ckpt = CheckpointManager(tmp_path, drain_timeout=5)
    with pytest.raises(error):
        ckpt.save_async(1, state(1))
    assert ckpt.wait(5) in (True, False)
    try:
        saved = ckpt.save_async(2, state(2))
    except AsyncSaveError as failed:  # what was interrupted may be told of as a save that failed
        assert failed.step == 1
        saved = ckpt.save_async(2, state(2))
    assert saved.result(10).step == 2
    ckpt.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-2"]


def test_memory_that_cannot_be_had_is_a_failed_save(tmp_path, monkeypatch):
    interrupted_once(monkeypatch, MemoryError("3 bytes"))
    with CheckpointManager(tmp_path) as ckpt:
        handle = ckpt.save_async(1, state(1))
        with pytest.raises(AsyncSaveError, match=r"step 1.*3 bytes"):
            handle.result(30)
        assert ckpt.save_async(2, state(2)).result(30).step == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_watcher_that_is_interrupted(tmp_path):
    """Ctrl-C comes while the program's own function is told "queued"."""

    def watch(event):
        if event.kind == "queued" and event.step == 1:
            raise KeyboardInterrupt

    ckpt = CheckpointManager(tmp_path, on_event=watch, drain_timeout=5)
    with pytest.raises(KeyboardInterrupt):
        ckpt.save_async(1, state(1))
    try:
        saved = ckpt.save_async(2, state(2))
    except AsyncSaveError as failed:
        assert failed.step == 1
        saved = ckpt.save_async(2, state(2))
    assert saved.result(10).step == 2
    ckpt.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_on_one_rank_of_several(tmp_path, monkeypatch, victim):
    """The others are not left waiting for the part of a rank that will not come: the save fails on
    all of them."""
    interrupted_once(monkeypatch, KeyboardInterrupt(), victim)
    meet, on_time = threading.Barrier(3, timeout=40), []

    def program(comm):
        own = [
            StateComponent(
                "own", {"x": torch.full((8,), float(comm.rank))}, SharingPattern.PER_RANK
            )
        ]
        ckpt = CheckpointManager(tmp_path, comm=comm, drain_timeout=5)
        if comm.rank == victim:
            with pytest.raises(KeyboardInterrupt):
                ckpt.save_async(1, own)
            on_time.append(True)
        else:
            on_time.append(ckpt.save_async(1, own).wait(5))
        meet.wait()
        if not all(on_time):
            return "the others wait for ever"
        try:
            ckpt.wait(10)
        except AsyncSaveError as error:
            assert error.step == 1
        else:
            assert comm.rank == victim
        meet.wait()
        try:
            ckpt.save_async(2, own).result(10)
        except AsyncSaveError as error:
            assert error.step == 1
            ckpt.save_async(2, own).result(10)
        ckpt.close()
        return [info.step for info in ckpt.list()]

    assert run_ranks(3, program, join_timeout=15, liveness_timeout=10) == [[2]] * 3


def test_a_program_that_is_interrupted_there_ends_at_once(tmp_path, run_script):
    code = """
import sys, torch, ckptcore.saving.save
from ckptcore import CheckpointManager
def stage(*arguments):
    raise KeyboardInterrupt
ckptcore.saving.save.copy_into_pool = stage
CheckpointManager(sys.argv[1]).save_async(1, {"m": {"w": torch.ones(3)}})
"""
    done = run_script(code, tmp_path / "run", timeout=15)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.count("Traceback") == 1 and "KeyboardInterrupt\n" in done.stderr
    assert not os.path.exists(tmp_path / "run" / "checkpoint-1")


def test_while_threads_are_started(tmp_path, monkeypatch):
    """Whichever of them it is: the next save starts what lacks, and closing waits for no thread
    that never began."""
    start = threading.Thread.start
    count = 0

    def interrupted(thread):
        nonlocal count
        if thread.name.startswith("ckptcore"):
            count += 1
            if count == at:
                raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    for at in range(1, 20):
        count = 0
        with CheckpointManager(tmp_path / str(at), io_threads=2) as ckpt:
            try:
                ckpt.save_async(1, state(1)).result(30)
            except KeyboardInterrupt:
                assert ckpt.save_async(2, state(2)).result(30).step == 2
            else:
                break
    assert at == 5  # two threads that write, one of low priority, and the one that finishes
    count, at = 0, 1
    with CheckpointManager(tmp_path / "closed") as ckpt, pytest.raises(KeyboardInterrupt):
        ckpt.save_async(1, state(1))


def test_threads_that_begin_the_background_at_once_begin_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As uploads of three threads do: the second start of a thread ends in a KeyError of its own."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def slow(thread: threading.Thread) -> None:
        if thread.name == "ckptcore-race":
            started.append(thread)
            entered.set()
            other.join(0.2)  # the other one is at the same point, if nothing keeps it away
        start(thread)

    background = Background("ckptcore-race")
    entered = threading.Event()
    other = threading.Thread(target=lambda: entered.wait(10) and background.start())
    other.start()
    monkeypatch.setattr(threading.Thread, "start", slow)
    background.start()
    other.join()
    background.close(10)
    assert len(started) == 1
