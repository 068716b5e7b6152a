"""Several ranks share the fast root: one of them uploads, all of them hear of failures, and all
restore the same."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ckptcore import AsyncSaveError, KeepLast, SharingPattern, StateComponent
from ckptcore.testing.ranks import run_ranks


def parts(mark: int, rank: int) -> list[StateComponent]:
    return [
        StateComponent("model", {"w": torch.arange(50.0) + mark}, SharingPattern.REPLICATED),
        StateComponent(
            "own", {"x": torch.full((5,), mark * 100.0 + rank)}, SharingPattern.PER_RANK
        ),
    ]


@pytest.fixture(autouse=True)
def split_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptcore.saving.plan.MIN_SHARE_BYTES", 1)


def test_one_rank_uploads_and_all_restore(ground: Any) -> None:
    def save(comm: Any) -> list[str]:
        with ground.manager(comm=comm, keep=KeepLast(1), on_event=None) as ckpt:
            for step in (10, 20):
                ckpt.save_async(step, parts(step, comm.rank)).result(20)
            return [t.name for t in threading.enumerate() if t.name == "ckptcore-upload"]

    names = run_ranks(3, save)
    assert (
        max(map(len, names)) <= 1
    )  # one thread in all of this process, in which the ranks are threads
    assert ground.steps("slow") == [10, 20]
    ground.lose_fast()
    ground.restart()

    def restore(comm: Any) -> tuple[Any, ...]:
        with ground.manager(comm=comm, on_event=None) as ckpt:
            live = parts(-1, comm.rank)
            report = ckpt.restore(live)
            own = live[1].stateful["x"].tolist()
            info = ckpt.save(30, parts(30, comm.rank))
            return (
                report.step,
                (report.path or "").rpartition("/")[0],
                live[0].stateful["w"][0].item(),
                own,
                info.sequence,
            )

    for rank, found in enumerate(run_ranks(3, restore)):
        assert found == (20, ground.slow.url, 20.0, [2000.0 + rank] * 5, 3)
    assert ground.steps("slow") == [10, 20, 30]


def test_all_ranks_hear_of_a_failed_upload(ground: Any) -> None:
    ground.slow.fail(kind="create", path="*.safetensors")

    def program(comm: Any) -> Any:
        ckpt = ground.manager(comm=comm, on_event=None)
        ckpt.save(10, parts(10, comm.rank))
        ckpt._saves.uploads.wait(20)
        told = None
        try:
            ckpt.save(20, parts(20, comm.rank))
        except AsyncSaveError as error:
            told = error
        ckpt.save(20, parts(20, comm.rank))
        ckpt.close()
        return told

    told = run_ranks(3, program)
    assert [type(error) for error in told] == [AsyncSaveError] * 3
    assert all("upload of step 10" in str(error) and error.step == 10 for error in told)
    assert ground.steps("slow") == [10, 20]
    assert ground.steps("fast") == [10, 20]


def test_a_rank_that_leaves_is_not_kept_by_uploads(ground: Any) -> None:
    """Rank 0 drains; the others are done when their saves are."""
    gate = ground.slow.block(kind="write_at")
    left = [threading.Event() for _ in range(3)]

    def program(comm: Any) -> None:
        ckpt = ground.manager(comm=comm, on_event=None)
        ckpt.save(10, parts(10, comm.rank))
        if comm.rank == 0:
            gate.wait_reached(20)
            assert all(event.wait(20) for event in left[1:])
            gate.open()
        ckpt.close()
        left[comm.rank].set()

    run_ranks(3, program)
    assert ground.steps("slow") == [10]
