"""Files that are replaced between the check and the read: what loads is what was saved, or an error
of ours."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptcore import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    StorageError,
    open_checkpoint,
    open_storage,
)
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.loading.view import CheckpointView
from ckptcore.storage.local import _Reader
from ckptcore.testing import FaultStorage

KINDS = ("open", "list", "read_into")
SIZE = (4 << 20) + 100  # two chunks


def state(step: int) -> dict:
    weights = torch.arange(SIZE, dtype=torch.int64).mul_(31 + step).to(torch.uint8)
    return {
        "model": {"w": weights, "b": torch.full((5,), float(step))},
        "progress": {"step": step, "log": [step] * 9},
    }


def live() -> dict:
    return {
        "model": {"w": torch.zeros(SIZE, dtype=torch.uint8), "b": torch.zeros(5)},
        "progress": {"step": -1, "log": [0] * 9},
    }


class Changing(FaultStorage):
    """Does something to the files right before, or right after, the k-th operation that reads."""

    def __init__(self, inner, at: int, change: Callable[[], None], after: bool) -> None:
        super().__init__(inner)
        self.left, self.change, self.after, self.changed = at, change, after, False

    def now(self, kind: str) -> bool:
        if kind not in KINDS or self.changed:
            return False
        self.left -= 1
        self.changed = self.left == 0
        return self.changed

    def open(self, path):
        due = self.now("open")
        if due and not self.after:
            self.change()
        reader = super().open(path)
        if due and self.after:
            self.change()
        return reader

    def list(self, path=""):
        due = self.now("list")
        if due and not self.after:
            self.change()
        entries = super().list(path)
        if due and self.after:
            self.change()
        return entries


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("changing") / "run"
    manager = CheckpointManager(root, run_id="run")
    for step in (1, 2):
        manager.save(step, state(step))
    return root


def put(path: Path, new: Path) -> None:
    """Replace a file the way that a rename does: who has it open goes on reading the old one."""
    twin = path.with_name("twin")
    shutil.copyfile(new, twin)
    os.replace(twin, path)


def in_place(path: Path, new: Path) -> None:
    """Replace what is in a file: who has it open reads the new bytes."""
    data = new.read_bytes()
    with path.open("r+b") as file:
        file.truncate(len(data))
        file.write(data)


def shorter(path: Path, new: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def link(path: Path, new: Path) -> None:
    path.unlink()
    path.symlink_to(new)


def gone(path: Path, new: Path) -> None:
    path.unlink()


FILES = ["model.safetensors", "index.rank00000.msgpack", MANIFEST_NAME]


def by_load(storage, name: str):
    target = live()
    report = CheckpointManager(storage, io_threads=1).load(target, 2)
    expected = state(2)
    assert report.values["progress"] == expected["progress"]
    for tensors in (target["model"], report.values["model"]):
        assert all(torch.equal(tensors[key], expected["model"][key]) for key in ("w", "b"))


def by_view(storage, name: str):
    view = CheckpointView(storage, name)
    expected = state(2)
    assert view.values("progress") == expected["progress"]
    for key in ("w", "b"):
        assert (view.read(f"model/{key}") == expected["model"][key].numpy()).all()


@pytest.mark.parametrize("change", [put, in_place, shorter, link, gone], ids=lambda f: f.__name__)
@pytest.mark.parametrize("read", [by_load, by_view], ids=lambda f: f.__name__)
def test_a_file_replaced_before_any_look_at_it(saved, tmp_path, read, change):
    """By that of step 1, whose name, size and form are right. The same before and after each open
    and list."""
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    folder, other = root / "checkpoint-2", root / "checkpoint-1"
    whole = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    outcomes = []
    for file in FILES:
        for after in (False, True):
            for at in range(1, 100):
                storage = Changing(
                    open_storage(root), at, lambda f=file: change(folder / f, other / f), after
                )
                try:
                    read(storage, "checkpoint-2")
                    outcomes.append("as saved")
                except CheckpointError as error:
                    assert isinstance(
                        error, CheckpointCorrupt | CheckpointNotFound | StorageError
                    ), error
                    assert "checkpoint-2" in str(error) or (file, type(error)) == (
                        MANIFEST_NAME,
                        CheckpointNotFound,
                    )
                    outcomes.append(type(error).__name__)
                for path, data in whole.items():
                    if path.is_symlink():
                        path.unlink()
                    if not path.exists() or path.read_bytes() != data:
                        path.write_bytes(data)
                if not storage.changed:
                    break
            else:
                raise AssertionError("a load of a hundred operations?")
            assert at > 3, "there was something to change"
    assert (
        "as saved" in outcomes
        and ("UnsafePath" if change is link else "CheckpointCorrupt") in outcomes
    )
    assert open_checkpoint(folder).verify() == []


class Vanishing(FaultStorage):
    """Runs `change` right before a file of this name is opened for the n-th time."""

    def __init__(self, inner, name: str, at: int, change: Callable[[], None]) -> None:
        super().__init__(inner)
        self.name, self.left, self.change = name, at, change

    def open(self, path):
        if path == self.name:
            self.left -= 1
            if self.left == 0:
                self.change()
        return super().open(path)


def as_folder(path: Path, new: Path) -> None:
    path.unlink()
    path.mkdir()


def folder_gone(path: Path, new: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))


def folder_a_file(path: Path, new: Path) -> None:
    folder_gone(path, new)
    path.parent.write_bytes(b"x")


@pytest.mark.parametrize(
    "change", [gone, as_folder, folder_gone, folder_a_file], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    "at", [1, 2], ids=["before its header is checked", "between that and the read"]
)
def test_a_file_that_vanishes_is_damage(saved, tmp_path, change, at):
    """No storage that refuses: `load` says what is missing, and `restore` takes the checkpoint
    before."""
    name = "checkpoint-2/model.safetensors"

    def storage(root: Path):
        shutil.copytree(saved, root)
        return Vanishing(open_storage(root), name, at, lambda: change(root / name, root / name))

    deleted = change in (folder_gone, folder_a_file)  # all of it, as by another job's retention
    kind = CheckpointNotFound if deleted else CheckpointCorrupt
    with pytest.raises(kind) as caught:
        CheckpointManager(storage(tmp_path / "a"), io_threads=1).load(live(), 2)
    cause = caught.value.__cause__ if deleted else caught.value
    assert re.search(r"checkpoint-2/model\.safetensors is (missing|not a file)", str(cause))
    assert (cause.kind, cause.file) == ("missing", "model.safetensors")
    assert ("live state is partly overwritten" in str(caught.value)) == (at == 2)
    target = live()
    with pytest.warns(
        CheckpointWarning, match=r"skipped checkpoint-2: .*model\.safetensors is "
    ) as told:
        report = CheckpointManager(storage(tmp_path / "b"), io_threads=1).restore(target)
    assert len(told) == 1
    assert (report.step, report.values["progress"]) == (1, state(1)["progress"])
    assert all(torch.equal(target["model"][key], state(1)["model"][key]) for key in ("w", "b"))


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO])
def test_what_the_storage_says_of_a_lost_file_is_no_end_of_a_restore(saved, number):
    """Object stores find out while they read."""

    class Losing(FaultStorage):
        def open(self, path):
            if path == "checkpoint-2/index.rank00000.msgpack":
                raise StorageError(f"{path}: lost", path=path, errno=number)
            return super().open(path)

    with pytest.warns(CheckpointWarning, match="skipped checkpoint-2"):
        assert CheckpointManager(Losing(open_storage(saved))).restore(live()).step == 1


def test_an_object_that_vanishes_while_it_is_read(saved, monkeypatch):
    """Object stores find out only then; a reader of a local file has it as long as it likes."""
    real = _Reader.read_into

    def read_into(self, offset, buffers):
        if self.path == "checkpoint-2/model.safetensors" and offset:
            raise StorageError(f"{self.path}: no such object", path=self.path, errno=errno.ENOENT)
        return real(self, offset, buffers)

    monkeypatch.setattr(_Reader, "read_into", read_into)
    with pytest.raises(
        CheckpointCorrupt, match=r"checkpoint-2/model\.safetensors is missing"
    ) as caught:
        CheckpointManager(saved).load(live(), 2)
    assert caught.value.kind == "missing"
    with pytest.warns(CheckpointWarning, match="skipped checkpoint-2"):
        assert CheckpointManager(saved).restore(live()).step == 1


def test_a_storage_that_refuses_is_no_reason_to_go_back(saved):
    class Refusing(FaultStorage):
        def open(self, path):
            if path == "checkpoint-2/model.safetensors":
                raise StorageError(f"{path}: not allowed", path=path, errno=errno.EACCES)
            return super().open(path)

    with pytest.raises(StorageError, match="not allowed"):
        CheckpointManager(Refusing(open_storage(saved))).restore(live())


def test_a_link_in_the_place_of_the_folder_is_not_read_through(saved, tmp_path):
    """After the root was looked through, the folder becomes a link to another checkpoint, valid in
    itself."""
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    other = tmp_path / "other"
    shutil.copytree(saved / "checkpoint-1", other)

    def change() -> None:
        (root / "checkpoint-2").rename(root / "moved")
        (root / "checkpoint-2").symlink_to(other)

    found = set()
    for at in range(1, 30):
        storage = Changing(open_storage(root), at, change, False)
        try:
            by_load(storage, "checkpoint-2")
            found.add("as saved")
        except CheckpointError:
            found.add("error")
        if not storage.changed:
            break
        (root / "checkpoint-2").unlink()
        (root / "moved").rename(root / "checkpoint-2")
    assert found == {"as saved", "error"}


@pytest.mark.parametrize("step", [2, "latest"])
def test_another_checkpoint_in_the_place_of_the_folder(saved, tmp_path, step):
    """The one of step 1, valid in itself, takes the place of the one that was asked for or
    found."""
    found = set()
    for at in range(1, 30):
        root = tmp_path / f"{at}"
        shutil.copytree(saved, root)

        def change(root: Path = root) -> None:
            (root / "checkpoint-2").rename(root / "moved")
            (root / "checkpoint-1").rename(root / "checkpoint-2")

        storage = Changing(open_storage(root), at, change, False)
        target = live()
        try:
            report = CheckpointManager(storage, io_threads=1).load(target, step)
            assert report.values["progress"]["log"] == [report.step] * 9
            # Asked for by name, it must be that step; the latest is what the root had when it was
            # looked through.
            assert report.step == 2 or step == "latest"
            found.add("as saved")
        except CheckpointError as error:
            found.add(
                f"{type(error).__name__} {error.actual}"
                if isinstance(error, CheckpointCorrupt)
                else "other"
            )
            assert isinstance(error, CheckpointCorrupt | CheckpointNotFound), error
        if not storage.changed:
            break
    # The root is looked at again: step 2 is gone, and the latest is step 1 now, whatever its folder
    # is called.
    assert found == ({"as saved", "other"} if step == 2 else {"as saved"})
