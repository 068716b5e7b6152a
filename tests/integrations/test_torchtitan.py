"""torchtitan's own Trainer on CPUs; and its protocol BaseCheckpointManager in a smaller loop, whose
optimizers, schedulers and loader keep their state as torchtitan's do."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("torchtitan")

from ckptcore import open_checkpoint, scan_root

PARTS = {"model", "optimizer", "lr_scheduler", "dataloader", "train_state", "rng"}


def steps_in(root: Path) -> list[int | None]:
    return [info.step for info in scan_root(root / "checkpoint")]


@pytest.mark.parametrize("number", [1, 2])
def test_the_real_trainer_on_cpus_goes_on_after_a_kill(
    tmp_path: Path, processes: Any, number: int
) -> None:
    run = partial(processes, "torchtitan_trainer_ranks.py", "titan_trainer", number)
    run = partial(run, last_save_model_only=False)
    expected = run(root=str(tmp_path / "whole"), seed=0)
    assert run(root=str(tmp_path / "run"), seed=0, kill_at=5) == [-9] * number
    resumed = run(root=str(tmp_path / "run"), seed=1)
    for before, after in zip(expected, resumed, strict=True):
        logged = {step: x for step, x in before["logged"].items() if int(step) > 4}
        assert len(logged) == 2 and after == {**before, "logged": logged}
    assert steps_in(tmp_path / "run") == [2, 4, 6]
    stored = open_checkpoint(tmp_path / "run" / "checkpoint" / "checkpoint-6").manifest.components
    assert set(stored) == PARTS


@pytest.mark.parametrize("number", [1, 2])
def test_by_the_protocol_a_killed_run_goes_on(tmp_path: Path, processes: Any, number: int) -> None:
    run = partial(processes, "torchtitan_ranks.py", "titan_loop", number)
    run = partial(run, last_save_model_only=False)
    expected = run(root=str(tmp_path / "whole"), seed=0)
    assert run(root=str(tmp_path / "run"), seed=0, kill_at=8) == [-9] * number
    resumed = run(root=str(tmp_path / "run"), seed=1)
    for before, after in zip(expected, resumed, strict=True):
        losses = {step: x for step, x in before["losses"].items() if int(step) > 6}
        start = after["start"]
        assert start[:2] == [6, 6]
        assert after == {**before, "loaded": True, "losses": losses, "start": start}
    assert steps_in(tmp_path / "run") == [3, 6, 9, 10]
    stored = open_checkpoint(tmp_path / "run" / "checkpoint" / "checkpoint-10").manifest.components
    assert set(stored) == PARTS


def test_by_the_protocol_the_settings_do_what_they_say(tmp_path: Path, processes: Any) -> None:
    run = partial(processes, "torchtitan_ranks.py", "titan_loop")
    root = str(tmp_path)
    first = run(2, root=root, seed=0, keep_latest_k=2, export_dtype="bfloat16")
    assert first[0]["loaded"] is False
    assert steps_in(tmp_path) == [9, 10]
    last = open_checkpoint(tmp_path / "checkpoint" / "checkpoint-10")
    assert set(last.manifest.components) == {"model"}
    assert {info.dtype for info in last.tensors()} == {"BF16"}
    # On another number of ranks, with a loader that begins anew.
    left = ["dataloader", "lr_scheduler"]
    (one,) = run(1, root=root, seed=1, steps=9, load_step=9, exclude_from_loading=left)
    two = run(2, root=root, seed=2, steps=9, load_step=9, load_only=True)
    assert one["start"][:2] == [9, 0] and two[0]["start"][:2] == [9, 9]
    assert one["start"][2] == two[0]["start"][2]
    # Of the weights alone, another run begins.
    other, path = str(tmp_path / "other"), str(tmp_path / "checkpoint" / "checkpoint-9")
    (begun,) = run(1, root=other, seed=3, steps=0, initial_load_path=path)
    assert begun["start"] == [0, 0, one["start"][2]]


def test_by_the_protocol_the_last_save_is_a_hugging_face_folder(
    tmp_path: Path, processes: Any
) -> None:
    run = partial(processes, "torchtitan_ranks.py", "titan_loop", 2)
    done = run(root=str(tmp_path), seed=0, last_save_in_hf=True, enable_first_step_checkpoint=True)
    assert steps_in(tmp_path) == [1, 3, 6, 9]
    folder = tmp_path / "checkpoint" / "step-10"
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    read = safetensors.torch.load_file(folder / "model.safetensors")
    names = ["model.0.weight", "model.0.bias", "model.2.weight", "model.2.bias"]
    assert sorted(read) == sorted(names)
    bits = b"".join(read[name].contiguous().numpy().tobytes() for name in names)
    assert sha256(bits).hexdigest() == done[0]["weights"]
    assert {value.dtype for value in read.values()} == {torch.float32}
    assert {path.name for path in folder.parent.iterdir() if "sharded" in path.name} == set()
