"""Roots that somebody gives by mistake, or has for good reasons: an error of ours before anything is
written, or a run as in any other."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from ckptcore import (
    CheckpointError,
    CheckpointExists,
    CheckpointManager,
    StorageError,
    copy_checkpoint,
    open_checkpoint,
    scan_root,
)


def state(value: float = -1.0) -> dict[str, dict[str, torch.Tensor]]:
    return {"m": {"a": torch.full((3,), value)}}


@pytest.mark.parametrize(
    "name", ["with space", "ünï/côdé 日本", "100%", "a#b?c", "[x]*", "new\nline", "trail ", "a::b"]
)
def test_a_root_may_be_called_anything(tmp_path: Path, name: str) -> None:
    root, live = tmp_path / name, state()
    with CheckpointManager(root) as ckpt:
        ckpt.save(1, state(1.0))
        ckpt.save_async(2, state(2.0)).result(60)
        ckpt.save(2, state(3.0), overwrite=True)
        newest = ckpt.latest()
    assert newest is not None and open_checkpoint(newest.url).verify() == []
    copied = copy_checkpoint(newest.url, tmp_path / "copies" / name / "checkpoint-2")
    assert copied.step == 2
    for url in (root, f"file://{root}", tmp_path / "copies" / name):
        assert CheckpointManager(url).restore(live).step == 2
    assert live["m"]["a"].tolist() == [3.0] * 3


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_root_that_is_a_file(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with CheckpointManager(f"{tmp_path}/file{below}") as ckpt:
        for work in (lambda: ckpt.save(1, state()), lambda: ckpt.restore(state()), ckpt.list):
            with pytest.raises(StorageError, match="Not a directory") as refused:
                work()
            assert refused.value.errno == errno.ENOTDIR
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("below", ["", "/runs/a"])
def test_a_link_to_a_disk_that_is_not_mounted_is_no_empty_root(tmp_path: Path, below: str) -> None:
    disk, link = tmp_path / "disk", tmp_path / "link"
    link.symlink_to("disk")
    says = r"link is a symbolic link to disk, which is not there; mount the disk"
    with CheckpointManager(f"{link}{below}") as ckpt:
        for work in (
            lambda: ckpt.restore(state()),
            lambda: ckpt.save(1, state()),
            ckpt.latest,
            ckpt.find,
            lambda: scan_root(f"{link}{below}"),
        ):
            with pytest.raises(StorageError, match=says) as refused:
                work()
            assert refused.value.errno == errno.ENXIO
        assert os.listdir(tmp_path) == ["link"]
        disk.mkdir()
        assert ckpt.restore(state()).fresh
        assert ckpt.save(1, state()).step == 1
        assert os.listdir(f"{disk}{below}") == ["checkpoint-1"]


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    """Nor by root, whom a missing permission does not keep."""
    with CheckpointManager(tmp_path / ("n" * 300)) as ckpt:
        with pytest.raises(StorageError, match="File name too long"):
            ckpt.save(1, state())
        with pytest.raises(StorageError, match="File name too long"):
            ckpt.restore(state())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_of_two_runs_that_save_the_same_step_at_once_one_does(tmp_path: Path, kind: str) -> None:
    root = str(tmp_path) if kind == "local" else f"memory://two-runs{tmp_path}"
    managers = [CheckpointManager(root, run_id=run) for run in ("a", "b")]
    for step in range(8):
        won, failed = save_at_once(managers, step)
        view = open_checkpoint(f"{root}/checkpoint-{step}")
        assert view.verify() == [] and [view.manifest.run_id] == won
        assert view.read("m/a").tolist() == [float(ord(won[0]))] * 3
        assert [type(error) for error in failed] == [CheckpointExists]


def save_at_once(
    managers: list[CheckpointManager], step: int
) -> tuple[list[str], list[CheckpointError]]:
    """The runs whose save of this step succeeded, and the errors of the others."""
    gate = threading.Barrier(len(managers))
    won: list[str] = []
    failed: list[CheckpointError] = []

    def save(manager: CheckpointManager) -> None:
        gate.wait(60)
        try:
            manager.save(step, state(float(ord(manager.run_id))))
            won.append(manager.run_id)
        except CheckpointError as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(manager,)) for manager in managers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return won, failed
