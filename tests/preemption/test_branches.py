"""What ends with one object, and is begun again with the next on the same communicator, has nothing
left in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptcore import (
    AsyncSaveError,
    CheckpointManager,
    SharingPattern,
    StateComponent,
    open_storage,
    scan_root,
)
from ckptcore.testing.faults import FaultStorage
from ckptcore.testing.ranks import run_ranks


def test_the_second_branch_of_a_name_does_not_hear_what_was_said_in_the_first() -> None:
    def program(comm: Any) -> list[int]:
        heard = []
        for number in (1, 2, 3):
            branch = comm.branch("talk")
            with branch.round("number") as r:
                numbers = r.gather(number)
                if r.leads:
                    r.verdict = sum(numbers)
            heard.append(r.verdict)
            with comm.round("heard"):
                pass
            branch.close()
        return heard

    assert run_ranks(2, program) == [[2, 4, 6], [2, 4, 6]]


def test_a_save_that_fails_on_rank_0_is_no_success_of_rank_1_in_a_second_manager_either(
    tmp_path: Path,
) -> None:
    """The verdict on the last save of the first manager is not the one on the first save of the
    second."""

    def program(comm: Any) -> Any:
        state = [StateComponent("m", {"rank": torch.tensor(comm.rank)}, SharingPattern.PER_RANK)]
        with CheckpointManager(tmp_path / "one", comm=comm) as first:
            assert first.save_async(1, state).result(20).step == 1
        storage = FaultStorage(open_storage(tmp_path / "two"))
        if comm.rank == 0:
            storage.fail(kind="rename", times=None)
        second = CheckpointManager(storage, comm=comm)
        with pytest.raises(AsyncSaveError, match="the save of step 2 in the background failed"):
            second.save_async(2, state).result(20)
        second.close()
        return second.failed_steps

    assert run_ranks(2, program) == [(2,), (2,)]
    assert [(entry.step, entry.status) for entry in scan_root(str(tmp_path / "one"))] == [
        (1, "committed")
    ]
    assert [
        entry for entry in scan_root(str(tmp_path / "two")) if entry.status == "committed"
    ] == []
