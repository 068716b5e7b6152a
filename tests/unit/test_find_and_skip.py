"""Finding a checkpoint before there is a state, steps that are there already, and steps to come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptcore import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointManager,
    CheckpointWarning,
    InvalidState,
    NoUsableCheckpoint,
    RanksDisagree,
    load_state,
    open_checkpoint,
)
from ckptcore.testing.ranks import run_ranks


def state(n: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), float(n))}, "progress": {"step": n}}


def damage(root: Path, step: int) -> None:
    file = root / f"checkpoint-{step}" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_before_there_is_a_state(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        assert ckpt.find() is None and ckpt.find("latest") is None and ckpt.find(3) is None
        ckpt.save(1, state(1), metrics={"loss": 1.0})
        ckpt.save(2, state(2), metrics={"loss": 2.0})
    with CheckpointManager(tmp_path) as ckpt:
        info = ckpt.find()
        assert info is not None and (info.step, info.name) == (2, "checkpoint-2")
        assert load_state(info, "progress") == {"step": 2}
        with open_checkpoint(info) as view:
            assert view.values("progress") == {"step": 2}
        live = state(0)
        assert ckpt.restore(live, info).step == 2 and live["progress"] == {"step": 2}
        ckpt.save(3, state(3))
        assert [i.step for i in ckpt.list()] == [1, 2, 3]
        assert [getattr(ckpt.find(which), "step", None) for which in ("latest", 1, 9)] == [
            3,
            1,
            None,
        ]


def test_a_damaged_newest_is_passed_over_only_where_its_bytes_are_read(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
    damage(tmp_path, 2)
    with CheckpointManager(tmp_path) as ckpt:
        with pytest.warns(CheckpointWarning, match=r"found checkpoint-1; skipped checkpoint-2"):
            info = ckpt.find()
        assert info is not None and info.step == 1
        sizes = ckpt.find(verify="sizes")
        assert sizes is not None and sizes.step == 2
        with pytest.raises(CheckpointCorrupt, match="model/w"):
            ckpt.find(2)
        damage(tmp_path, 1)
        with pytest.raises(NoUsableCheckpoint, match="holds no checkpoint that can be restored"):
            ckpt.find()


def test_wrong_arguments_of_find(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        for bad in (None, -1, 1.5, "1", "./a", "", tmp_path):
            with pytest.raises(InvalidState, match="step"):
                ckpt.find(bad)  # type: ignore[arg-type]
        for bad in (None, "all", True):
            with pytest.raises(InvalidState, match="verify must be one of"):
                ckpt.find(verify=bad)  # type: ignore[arg-type]
        for bad in (None, -1, "1", True):
            with pytest.raises(InvalidState, match="step"):
                ckpt.conflicts(bad)  # type: ignore[arg-type]
        for bad in (None, "never", True):
            with pytest.raises(InvalidState, match="exists must be one of"):
                ckpt.save(1, state(1), exists=bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidState, match="contradict each other"):
            ckpt.save(1, state(1), exists="skip", overwrite=True)
        assert [*tmp_path.iterdir()] == []


def test_a_step_that_is_there(tmp_path: Path) -> None:
    events: list[str] = []
    with CheckpointManager(tmp_path, on_event=lambda e: events.append(e.kind)) as ckpt:
        first = ckpt.save(1, state(1), exists="skip")
        with pytest.raises(CheckpointExists):
            ckpt.save(1, state(7), exists="error")
        again = ckpt.save(1, state(8), exists="skip")
        assert again.manifest is not None and first.manifest is not None
        assert again.manifest.digest == first.manifest.digest
        assert load_state(again)["w"].tolist() == [1.0] * 3
        handle = ckpt.save_async(1, state(9), exists="skip")
        assert handle.skipped and handle.done() and "skipped" in repr(handle)
        result = handle.result()
        assert result is not None and result.step == 1
        assert events == ["committed", "failed", "skipped", "skipped"]
        ckpt.save_async(1, state(5), exists="replace").result()
        assert load_state(again)["w"].tolist() == [5.0] * 3


def test_a_step_that_is_being_written(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save_async(1, state(1))
        assert ckpt.save_async(1, state(2), exists="skip").skipped
        assert ckpt.save(1, state(3), exists="skip").step == 1
        assert load_state(f"{tmp_path}/checkpoint-1")["w"].tolist() == [1.0] * 3


@pytest.mark.filterwarnings("ignore:.*abandoned")
def test_what_the_run_has_left_is_no_reason_to_skip(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
        assert [info.step for info in ckpt.conflicts(1)] == [2, 3]
        ckpt.load(state(0), 1)
        assert ckpt.conflicts(1) == []
        assert ckpt.save(2, state(7), exists="skip").step == 2
        assert load_state(f"{tmp_path}/checkpoint-2")["w"].tolist() == [7.0] * 3
        assert [info.step for info in ckpt.conflicts(0)] == [1, 2]
    with CheckpointManager(tmp_path, run_id="another") as ckpt:
        # 3 is of a branch that the other run has left: a save of it would be refused all the same.
        assert [info.step for info in ckpt.conflicts(1)] == [2, 3]
        with pytest.raises(CheckpointExists):
            ckpt.save(3, state(3))


@pytest.mark.filterwarnings("ignore:.*found checkpoint-1")
@pytest.mark.parametrize("mode", ["shared", "node"])
def test_on_ranks(tmp_path: Path, mode: Any) -> None:
    def program(comm: Any) -> Any:
        root = tmp_path / (f"node{comm.rank // 2}" if mode == "node" else "root")
        with CheckpointManager(root, comm=comm, storage_mode=mode) as ckpt:
            assert ckpt.find() is None
            ckpt.save(1, state(1))
            ckpt.save(2, state(2))
            found = ckpt.find()
            assert found is not None and found.url == str(root / "checkpoint-2")
            assert ckpt.save(2, state(5), exists="skip").step == 2
            assert [info.step for info in ckpt.conflicts(0)] == [1, 2]
            with pytest.raises(RanksDisagree):
                ckpt.find(1 + comm.rank % 2)
            if comm.rank == comm.world_size - 1:
                damage(root, 2)
            with comm.round("damage"):
                pass
            found = ckpt.find()
            return found and found.step

    if mode == "node":
        assert run_ranks(4, program, nodes=[[0, 1], [2, 3]]) == [1] * 4
    else:
        assert run_ranks(2, program) == [1] * 2
