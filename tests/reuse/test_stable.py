"""`reuse=True` for tensors that stay as they are and are no frozen parameters: after some saves they
get files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptcore
from ckptcore import CheckpointManager, SaveEvent, StateComponent
from ckptcore.saving import unchanged
from ckptcore.testing.ranks import run_ranks

ITEMS = unchanged.WORTH_BYTES // 4


class Reused:
    """An `on_event` that keeps what each commit has taken over."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def __call__(self, event: SaveEvent) -> None:
        if event.kind == "committed":
            self.found.append(event.reused // 4 // ITEMS)  # in tensors of ITEMS items


def saves(root: Path, changes: list[str], names: str, **how: Any) -> list[int]:
    """How many tensors each save takes over. changes: the names that change before each."""
    state = {name: torch.zeros(ITEMS) for name in names}
    reused = Reused()
    with CheckpointManager(root, reuse=True, on_event=reused, **how) as ckpt:
        for step, changed in enumerate(changes, 1):
            for name in changed:
                state[name] += 1
            ckpt.save(step, {"state": state})
    for step in range(1, len(changes) + 1):
        view = ckptcore.open_checkpoint(root / f"checkpoint-{step}")
        assert view.verify() == []
        for name in names:
            expected = sum(name in changed for changed in changes[:step])
            assert set(view.read(f"state/{name}").tolist()) == {expected}, (step, name)
    return reused.found


def files(root: Path, step: int) -> int:
    return len(list((root / f"checkpoint-{step}").glob("*.safetensors")))


def test_what_stays_as_it_is_gets_a_file_of_its_own(tmp_path: Path) -> None:
    """a changes each time. b is written with it until it was the same twice, and then once more."""
    assert saves(tmp_path, ["a"] * 6, "ab") == [0, 0, 0, 0, 1, 1]
    assert [files(tmp_path, step) for step in (1, 3, 4, 6)] == [1, 1, 2, 2]


def test_what_changes_again_leaves_for_good(tmp_path: Path) -> None:
    """c changes in the sixth save: its file is written then, and again without it. It does not come
    back, however long it stays as it is; so files do not go to and fro."""
    changes = ["a", "a", "a", "a", "a", "ac", "a", "a", "a", "a", "a"]
    assert saves(tmp_path, changes, "abc") == [0, 0, 0, 0, 2, 0, 0, 1, 1, 1, 1]


def test_a_tensor_that_comes_later_joins_once(tmp_path: Path) -> None:
    """b stays from the start, c from the fifth save on."""
    changes = ["ac", "ac", "ac", "ac", "ac", "a", "a", "a", "a"]
    assert saves(tmp_path, changes, "abc") == [0, 0, 0, 0, 1, 1, 1, 0, 2]


def test_few_bytes_are_not_worth_it(tmp_path: Path) -> None:
    state = {"a": torch.zeros(ITEMS), "b": torch.zeros(ITEMS - 1), "c": torch.zeros(1)}
    with CheckpointManager(tmp_path, reuse=True) as ckpt:
        for step in range(1, 7):
            state["a"] += 1
            if step < 4:
                state["c"] += 1
            ckpt.save(step, {"state": state})
    # Together they are, once c stays as it is, too.
    assert [files(tmp_path, step) for step in range(1, 7)] == [1, 1, 1, 1, 1, 2]


def test_a_frozen_file_is_taken_over_though_its_number_changes(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Parameter(torch.zeros(ITEMS), requires_grad=False)
            self.mistake = nn.Parameter(torch.zeros(ITEMS))  # should train, and does not
            self.head = nn.Parameter(torch.zeros(ITEMS))

    model, reused = Model(), Reused()
    with CheckpointManager(tmp_path, reuse=True, on_event=reused) as ckpt:
        for step in range(1, 7):
            model.head.data += 1
            ckpt.save(step, {"model": model})
            assert ckpt.verify(step) == []
    assert reused.found == [0, 1, 1, 1, 2, 2]
    assert [files(tmp_path, step) for step in (3, 4)] == [2, 3]


@pytest.mark.parametrize("pattern", ["PER_RANK", "SHARDED"])
def test_a_rank_sorts_what_it_writes_alone(tmp_path: Path, pattern: str) -> None:
    """Each rank by itself: what stays on rank 0 changes on rank 1."""

    def program(comm: Any) -> list[int]:
        mine = {name: torch.zeros(ITEMS) for name in "ab"}
        names = mine if pattern == "PER_RANK" else {f"{n}{comm.rank}": t for n, t in mine.items()}
        reused = Reused()
        with CheckpointManager(tmp_path, comm=comm, reuse=True, on_event=reused) as ckpt:
            for step in range(1, 7):
                mine["ab"[comm.rank]] += 1
                ckpt.save(step, [StateComponent("state", names, pattern)])
                assert ckpt.verify(step) == []
        return reused.found

    assert run_ranks(2, program) == [[0, 0, 0, 0, 1, 1]] * 2


def test_replicas_that_share_the_writing_keep_their_layout(tmp_path: Path) -> None:
    """No rank knows the digests of what others write, and all have to plan the same files."""

    def program(comm: Any) -> None:
        state = {name: torch.zeros(5 << 20) for name in "abcd"}
        with CheckpointManager(tmp_path, comm=comm, reuse=True) as ckpt:
            for step in range(1, 6):
                state["a"] += 1
                ckpt.save(step, [StateComponent("state", state, "REPLICATED")])

    run_ranks(2, program)
    assert {files(tmp_path, step) for step in range(1, 6)} == {2}
