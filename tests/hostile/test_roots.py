"""Roots that somebody else can write to: what retention, deletion and sweeping may touch, and what
ends them."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from ckptcore import (
    CheckpointError,
    CheckpointManager,
    CheckpointWarning,
    InvalidState,
    KeepLast,
    open_storage,
    scan_root,
)
from ckptcore.catalog.folder import WITHDRAWN_NAME
from ckptcore.format.digest import content_digest
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.testing import FaultStorage


def tree(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder; links by where they lead."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = (
            os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else "folder"
        )
    return found


def state(mark: float) -> dict:
    return {"model": {"w": torch.arange(8.0) * mark, "mark": mark}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    manager = CheckpointManager(folder, run_id="run")
    for step in (1, 2):
        manager.save(step, state(step))
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the root with files of the names that checkpoints have."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("model.safetensors", "x", "index.rank00000.msgpack"):
        (folder / name).write_bytes(b"somebody else's")
    return folder


def save_quietly(storage, step: int, **how) -> list[str]:
    """Save a step with retention and sweeping: the warnings told. It must succeed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        info = CheckpointManager(storage, run_id="run", **how).save(step, state(step))
    assert info.step == step
    return [str(w.message) for w in caught]


def resigned(folder: Path, change) -> bytes:
    document = json.loads((folder / MANIFEST_NAME).read_bytes())
    del document["digest"]
    change(document)
    body = json.dumps(document, indent=1, sort_keys=True).removesuffix("\n}").encode()
    return body + b',\n "digest": "%s"\n}\n' % content_digest(body).encode()


NAMES = [
    "../outside.safetensors",
    "../checkpoint-1/model.safetensors",
    "/etc/passwd",
    "..",
    "",
    "\ud800",
    "\udc80.safetensors",
    "x" * 256,
    "é" * 200,
    "a\0b",
    "a\nb",
    "C:x",
    "s3://b/k",
    ".",
    "a/../b",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_withdrawn_manifest_deletes_nothing_outside_and_ends_no_save(root, name):
    """An interrupted deletion is finished at the next save, by what its withdrawn manifest
    names."""
    folder = root / "checkpoint-1"
    data = resigned(folder, lambda d: d["files"].update({name: [1, "0" * 32, 0]}))
    (folder / MANIFEST_NAME).unlink()
    (folder / WITHDRAWN_NAME).write_bytes(data)
    (root / "outside.safetensors").write_bytes(b"mine")
    (folder / "notes.txt").write_bytes(b"mine")
    before = tree(root / "checkpoint-2")
    told = save_quietly(root, 3)
    assert not [text for text in told if "cleaning up" in text], (
        "one bad folder keeps all others from being swept"
    )
    assert (root / "outside.safetensors").read_bytes() == b"mine"
    assert (folder / "notes.txt").read_bytes() == b"mine"
    assert tree(root / "checkpoint-2") == before
    report = CheckpointManager(root).restore(state(0))
    assert (report.step, report.values["model"]["mark"]) == (3, 3)


BAD_WITHDRAWN = {
    "nothing": b"",
    "no manifest": b"x" * 100,
    "another version": b"2.0",
    "a list": b"[]",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("data", BAD_WITHDRAWN.values(), ids=BAD_WITHDRAWN.keys())
def test_a_withdrawn_manifest_that_is_none(root, data):
    folder = root / "checkpoint-1"
    if data == b"2.0":
        data = resigned(folder, lambda d: d.update(format_version="2.0"))
    elif data[:1] == b"[":
        data += b',\n "digest": "%s"\n}\n' % content_digest(data).encode()
    (folder / MANIFEST_NAME).unlink()
    (folder / WITHDRAWN_NAME).write_bytes(data)
    (folder / "notes.txt").write_bytes(b"mine")
    save_quietly(root, 3)
    assert (folder / "notes.txt").read_bytes() == b"mine"
    assert [i.step for i in scan_root(root) if i.status == "committed"] == [2, 3]


def test_a_manifest_that_names_the_files_of_another_checkpoint(root):
    """Names are names in its own folder: the other one's files stay."""
    other = tree(root / "checkpoint-2")
    folder = root / "checkpoint-1"
    manifest = resigned(root / "checkpoint-2", lambda d: d.update(step=1, sequence=1))
    (folder / MANIFEST_NAME).write_bytes(manifest)
    save_quietly(root, 3, keep=KeepLast(2))
    assert not folder.exists()
    assert tree(root / "checkpoint-2") == other


def test_a_manifest_that_names_the_files_of_deletion_itself(root):
    """The withdrawn manifest says what is left to delete, so it goes last whatever it says."""
    folder = root / "checkpoint-1"
    data = resigned(
        folder, lambda d: d.update(files={WITHDRAWN_NAME: [1, "0" * 32, 0], **d["files"]})
    )
    (folder / MANIFEST_NAME).unlink()
    (folder / WITHDRAWN_NAME).write_bytes(data)
    storage = FaultStorage(open_storage(root))
    save_quietly(storage, 3)
    removed = [
        op.path for op in storage.log if op.kind == "remove" and op.path.startswith("checkpoint-1/")
    ]
    assert removed.index(f"checkpoint-1/{WITHDRAWN_NAME}") >= removed.index(
        "checkpoint-1/model.safetensors"
    )


@pytest.mark.parametrize(
    "name", ["checkpoint-7", "checkpoint-7.partial-run-x-1-1-1", "checkpoint-2.replaced-a-b-1-1-1"]
)
def test_folders_that_are_links(root, outside, name):
    (root / name).symlink_to(outside)
    before = tree(outside)
    save_quietly(root, 3, keep=KeepLast(1))
    assert tree(outside) == before
    assert (root / name).is_symlink()
    manager = CheckpointManager(root, run_id="run")
    with pytest.raises(CheckpointError):
        manager.delete(7)
    assert tree(outside) == before


def test_files_that_are_links_are_removed_themselves(root, outside):
    folder = root / "checkpoint-1.partial-0-0-1-1-1"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(outside / "model.safetensors")
    (folder / "index.rank00000.msgpack").symlink_to(outside)
    before = tree(outside)
    save_quietly(root, 3, keep=KeepLast(1))
    assert tree(outside) == before


FOLDERS = [
    "checkpoint-" + "9" * 240,
    "checkpoint-5.partial-",
    "checkpoint-5.partial-....",
    "checkpoint-5.partial-a-b-" + "9" * 200 + "-0-0",
    "checkpoint-5.replaced-----",
    "checkpoint-05",
    "checkpoint--1",
    "checkpoint-1e3",
    "checkpoint-٣",
    "checkpoint-6\n",
    "checkpoint-5.partial-a-b-0-0-0",
    "checkpoint-5.partial-a-b--1-0-0",
]


@pytest.mark.parametrize("name", FOLDERS, ids=lambda n: ascii(n)[:40])
def test_folder_names(root, name):
    (root / name).mkdir()
    (root / name / "notes.txt").write_bytes(b"mine")
    assert isinstance(scan_root(root), list)
    save_quietly(root, 3, keep=KeepLast(1))
    assert (root / name / "notes.txt").read_bytes() == b"mine"
    assert CheckpointManager(root, run_id="run").latest().step == 3


class Endless(BaseException):
    """What no handler of errors takes for a failure that it can report."""


@pytest.mark.timeout(20)
def test_an_attempt_mark_that_is_a_folder_ends(tmp_path):
    """On an object store, a key below the mark makes it look like a folder, which removing does not
    remove."""
    storage = open_storage(f"memory://{tmp_path.name}")
    manager = CheckpointManager(storage, run_id="run")
    manager.save(1, state(1))
    storage.write("checkpoint-1/attempt.x.partial/inside", b"mine")
    listed = []
    inner = FaultStorage(storage)
    real = inner.list

    def counted(path=""):
        listed.append(path)
        if len(listed) > 500:
            raise Endless(f"{path} is listed without end")
        return real(path)

    inner.list = counted
    save_quietly(inner, 2)
    assert storage.read("checkpoint-1/attempt.x.partial/inside") == b"mine"


def test_a_step_that_a_manifest_claims_does_not_move_its_files(root):
    """The folder's name only says where to look; deleting goes by the folder."""
    folder = root / "checkpoint-1"
    (folder / MANIFEST_NAME).write_bytes(
        resigned(folder, lambda d: d.update(step=2, sequence=2**61))
    )
    before, other = tree(folder), tree(root / "checkpoint-2")
    with pytest.raises(InvalidState, match="say which one by its name"):
        CheckpointManager(root, run_id="run").delete(2)
    assert (tree(folder), tree(root / "checkpoint-2")) == (before, other)
    CheckpointManager(root, run_id="run").delete("checkpoint-1")
    assert not folder.exists()
    assert tree(root / "checkpoint-2") == other


class Swapping(FaultStorage):
    """Replaces a checkpoint's folder by a link to another place, right before the k-th operation
    that deletes in it."""

    def __init__(self, inner, folder: Path, target: Path, at: int) -> None:
        super().__init__(inner)
        self.folder, self.target, self.left, self.swapped = folder, target, at, False

    def look(self, path: str) -> None:
        if path.startswith(self.folder.name) and not self.swapped:
            self.left -= 1
            if self.left == 0:
                self.swapped = True
                shutil.move(self.folder, self.folder.with_name("moved away"))
                self.folder.symlink_to(self.target)

    def rename(self, source: str, target: str) -> None:
        self.look(source)
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self.look(path)
        super().remove(path)

    def remove_folder(self, path: str) -> None:
        self.look(path)
        super().remove_folder(path)

    def sync_folder(self, path: str) -> None:
        self.look(path)
        super().sync_folder(path)


@pytest.mark.parametrize("at", range(1, 6))
def test_a_folder_that_becomes_a_link_while_it_is_deleted(root, outside, at):
    """Between the look at a folder and the deletion in it, somebody puts a link in its place."""
    (outside / MANIFEST_NAME).write_bytes((root / "checkpoint-1" / MANIFEST_NAME).read_bytes())
    before = tree(outside)
    storage = Swapping(open_storage(root), root / "checkpoint-1", outside, at)
    save_quietly(storage, 3, keep=KeepLast(2))
    assert storage.swapped
    assert tree(outside) == before
