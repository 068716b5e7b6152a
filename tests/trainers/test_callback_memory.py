from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_trainers.callbacks import PeakMemory

from .callback_run import FakeTrainer

GIB = 2**30


class Writer:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of a GPU that is not there."""
    calls: list[Any] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **k: calls.append(("record", k))
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(("dump", path))
    )
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated": 7})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * GIB)
    return calls


def start(callback: PeakMemory, device: str = "cuda:0", rank: int = 0) -> FakeTrainer:
    trainer = FakeTrainer([callback])
    trainer.device, trainer.rank = device, rank
    trainer.state.is_world_process_zero = rank == 0
    trainer.fire("on_train_begin")
    return trainer


def test_every_rank_keeps_its_own_peak(cuda: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    callback = PeakMemory()
    trainer = start(callback, rank=1)
    with caplog.at_level(logging.INFO):
        for peaks in ([GIB, 6 * GIB], [9 * GIB, 2 * GIB]):
            trainer.log({"peak_mem_allocated": peaks})
        trainer.log({"loss": 1.0})
        assert callback.peak == 6 * GIB and caplog.records == []
        trainer.fire("on_train_end")
        other = start(PeakMemory())
        other.log({"peak_mem_allocated": [GIB, GIB]})
        other.fire("on_train_end")
    assert [record.message for record in caplog.records] == [
        "peak memory of rank 1: 6.000 GiB",
        "peak memory of rank 0: 5.000 GiB",  # the counter of torch knows of more
    ]
    assert cuda == []


def test_what_rank_0_tells_of_all(cuda: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer()
    trainer = start(PeakMemory(writer, show_details=True, do_log=True))
    trainer.state.global_step = 3
    with caplog.at_level(logging.INFO):
        trainer.log({"peak_mem_allocated": [GIB, 3 * GIB // 2]})
    assert writer.calls == [
        ("add_scalar", "peak_memory_rank0", GIB, 3),
        ("add_scalar", "peak_memory_rank1", 3 * GIB // 2, 3),
        ("add_text", "memory_stats", "```\nallocated: 7\n```", 3),
        ("flush",),
    ]
    assert caplog.messages == ["peak memory by rank (GiB): 1.000, 1.500"]
    caplog.clear()
    quiet = start(PeakMemory(show_details=True))
    with caplog.at_level(logging.INFO):
        quiet.log({"peak_mem_allocated": [GIB]})
        assert caplog.messages == []
        quiet.fire("on_train_end")
    assert caplog.messages == [
        "peak memory of rank 0: 5.000 GiB",
        "memory of rank 0:\nallocated: 7",
    ]


@pytest.mark.parametrize("logs", [True, False])
def test_a_snapshot_at_the_first_log_or_at_the_end(cuda: list[Any], logs: bool) -> None:
    trainer = start(PeakMemory(enable_memory_snapshot=True, file_prefix="snap"), rank=2)
    assert cuda == [("record", {})]
    if logs:
        trainer.log({"loss": 1.0})
        assert len(cuda) == 3
        trainer.log({"loss": 1.0})
    trainer.fire("on_train_end")
    assert cuda[1:] == [("dump", "snap_rank2.pickle"), ("record", {"enabled": None})]


def test_a_snapshot_that_fails_and_an_end_by_error(
    cuda: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fail)
    start(PeakMemory(enable_memory_snapshot=True)).log({"loss": 1.0})
    assert cuda[1:] == [("record", {"enabled": None})] and "disk full" in caplog.text
    trainer = start(PeakMemory(enable_memory_snapshot=True))
    trainer.handler.close()
    assert cuda[2:] == [("record", {}), ("record", {"enabled": None})]


def test_elsewhere_it_is_off(
    cuda: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer()
    trainer = start(PeakMemory(writer, True, True, True), device="cpu")
    with caplog.at_level(logging.INFO):
        trainer.log({"peak_mem_allocated": [GIB]})
        trainer.fire("on_train_end")
    assert (cuda, writer.calls, caplog.messages) == ([], [], [])
