"""What a signal does: the first is a wish to stop, with its doubles; the second is what it was
before."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import ckptcore.preemption
from ckptcore import PreemptionGuard, open_checkpoint, scan_root
from ckptcore.testing.processes import patience

Handled = list[signal.Signals]


@pytest.fixture
def handled() -> Iterator[Handled]:
    """What reaches the handlers that were there before a guard was."""
    seen: Handled = []
    before = {
        number: signal.signal(number, lambda number, _: seen.append(signal.Signals(number)))
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    }
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_after_the_step_at_hand(handled: Handled, number: signal.Signals) -> None:
    with PreemptionGuard() as guard:
        assert guard.should_stop(0) is False
        signal.raise_signal(number)
        assert guard.should_stop(1) is True
    assert handled == []


def test_handlers_are_those_of_before_when_the_guard_is_left(handled: Handled) -> None:
    before = [
        signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    ]
    with pytest.raises(KeyError), PreemptionGuard():
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] != before[
            :2
        ]
        assert signal.getsignal(signal.SIGUSR2) == before[2]
        raise KeyError("the loop fails")
    assert [
        signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    ] == before
    signal.raise_signal(signal.SIGTERM)
    assert handled == [signal.SIGTERM]


def test_only_the_signals_asked_for_are_caught(handled: Handled) -> None:
    with PreemptionGuard(signals=[signal.SIGUSR2]) as guard:
        signal.raise_signal(signal.SIGTERM)
        assert guard.should_stop(0) is False
        signal.raise_signal(signal.SIGUSR2)
        assert guard.should_stop(1) is True
    assert handled == [signal.SIGTERM]


def test_a_second_signal_of_the_same_kind_is_for_the_handler_of_before(handled: Handled) -> None:
    with PreemptionGuard(repeat_after=0) as guard:
        signal.raise_signal(signal.SIGUSR1)
        assert handled == [] and guard.should_stop(0) is True
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
        assert handled == [signal.SIGUSR1, signal.SIGUSR1]
    signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1] * 3


def test_a_warning_and_then_the_request_are_of_two_kinds(handled: Handled) -> None:
    """Schedulers send SIGUSR1 some time before SIGTERM: the second is no impatience, the save may
    be under way."""
    with PreemptionGuard(repeat_after=0) as guard:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert guard.should_stop(0) is True
        assert handled == []
        signal.raise_signal(signal.SIGTERM)
        assert handled == [signal.SIGTERM]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is for guards."""
    now = [1000.0]
    monkeypatch.setattr(ckptcore.preemption, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_same_signal_twice_at_once_is_one_request(
    handled: Handled, clock: list[float], number: signal.Signals
) -> None:
    """A scheduler signals every process of a job, and torchrun passes on what it gets: the save
    must not die of that."""
    with PreemptionGuard() as guard:
        for seconds in (0.0, 0.0, 0.02, 4.9):
            clock[0] = 1000.0 + seconds
            signal.raise_signal(number)
            assert guard.should_stop(0) is True
        assert handled == []
        clock[0] = 1005.1
        signal.raise_signal(number)
        assert handled == [number]
        signal.raise_signal(number)
        assert handled == [number] * 2


def test_each_signal_has_a_time_of_its_own(handled: Handled, clock: list[float]) -> None:
    """SIGTERM that comes long after SIGUSR1 is the first of its kind, and what comes with it is its
    double."""
    with PreemptionGuard(repeat_after=2.0) as guard:
        signal.raise_signal(signal.SIGUSR1)
        clock[0] += 60
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert handled == [] and guard.should_stop(0) is True
        signal.raise_signal(signal.SIGUSR1)
        assert handled == [signal.SIGUSR1]
        clock[0] += 1.9
        signal.raise_signal(signal.SIGTERM)
        assert handled == [signal.SIGUSR1]
        clock[0] += 0.2
        signal.raise_signal(signal.SIGTERM)
        assert handled == [signal.SIGUSR1, signal.SIGTERM]


def test_a_guard_does_not_know_of_signals_before_its_time(
    handled: Handled, clock: list[float]
) -> None:
    """In a second run of the same process the first signal is a first one."""
    for _ in range(2):
        with PreemptionGuard(repeat_after=2.0) as guard:
            assert guard.should_stop(0) is False
            signal.raise_signal(signal.SIGTERM)
            assert guard.should_stop(0) is True
        clock[0] += 60
    assert handled == []


# Real processes.


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("loop.py")), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise AssertionError(process.communicate())


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Programs that are ended with the test."""
    processes: list[subprocess.Popen[str]] = []

    def make(*words: object) -> subprocess.Popen[str]:
        processes.append(start(*words))
        return processes[-1]

    yield make
    for process in processes:
        process.kill()
        process.communicate()


def test_two_processes_save_the_same_step_when_one_is_told_to_stop(
    started: Callable[..., Any], tmp_path: Path
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [started(tmp_path, rank, 2, store.port) for rank in range(2)]
    for process in ranks:
        ready(process)
    time.sleep(random.random() * 0.3)
    ranks[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=60 * patience()) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    (said,) = {said for said, _ in outputs}
    stopped = int(said.removeprefix("stopped after "))
    (entry,) = scan_root(str(tmp_path))
    assert (entry.status, entry.step) == ("committed", stopped)
    with open_checkpoint(tmp_path / entry.name) as view:
        assert view.manifest.world_size == 2
        assert view.read("state/done").tolist() == [2.0 * stopped]


def test_a_process_is_saved_at_the_first_sigterm_and_killed_by_the_second(
    started: Callable[..., Any], tmp_path: Path
) -> None:
    saves, holds = started(tmp_path / "saves"), started(tmp_path / "holds", "hold")
    for process in (saves, holds):
        ready(process)
        process.send_signal(signal.SIGTERM)
    said, errors = saves.communicate(timeout=60 * patience())
    assert saves.returncode == 0, errors
    (entry,) = scan_root(str(tmp_path / "saves"))
    assert (entry.status, said) == ("committed", f"stopped after {entry.step}\n")
    assert holds.stdout.readline() == "caught\n"
    holds.send_signal(signal.SIGTERM)
    holds.communicate(timeout=60 * patience())
    assert holds.returncode == -signal.SIGTERM


@pytest.mark.parametrize("forked", ["child", "before it could forget"])
def test_forked_children_die_of_the_signal_and_the_parents_request_still_counts(
    forked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the workers of a loader and of a pool do without a guard."""
    if forked != "child":
        monkeypatch.setattr(ckptcore.preemption, "_active", set())
    with PreemptionGuard() as guard:
        if forked != "child":
            ckptcore.preemption._active.clear()
        pid = os.fork()
        if pid == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert guard.should_stop(0) is False
        signal.raise_signal(signal.SIGTERM)
        assert guard.should_stop(1) is True


def test_a_pool_ends() -> None:
    with PreemptionGuard() as guard:
        pool = multiprocessing.get_context("fork").Pool(2)
        assert pool.map(abs, [-1, 2]) == [1, 2]
        workers = list(pool._pool)  # type: ignore[attr-defined]
        pool.map_async(time.sleep, [600, 600])
        ending = threading.Thread(target=pool.terminate, daemon=True)
        ending.start()
        # It joins them, and nobody else may: of two threads that wait for a process one learns nothing.
        ending.join(20)
        assert not ending.is_alive()
        assert not any(worker.is_alive() for worker in workers)
        assert guard.should_stop(1) is False
