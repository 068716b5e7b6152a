"""Input that is not what it should be: typed errors, nothing followed, nothing executed, nothing
lost."""

import errno
import json
import os
import pickle
import shutil
import socket
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptcore import (
    CheckpointCoordinator,
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointManager,
    CheckpointNotFound,
    KeepLast,
    StorageError,
    UnsafePath,
    UnsupportedVersion,
    open_checkpoint,
    open_storage,
    scan_root,
)
from ckptcore.format.digest import content_digest
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.storage.remote import FsspecStorage
from ckptcore.testing import FaultStorage, Killed


def state_of(mark):
    return {
        "model": {"w": torch.arange(40.0) + mark, "b": torch.ones(3) * mark},
        "progress": {"mark": mark},
    }


def restored(root):
    report = CheckpointManager(root).restore(state_of(-1))
    mark = report.values["progress"]["mark"]
    assert torch.equal(report.values["model"]["w"], state_of(mark)["model"]["w"])
    return report.step, mark


def tree(root):
    found = {}
    for path in sorted(Path(root).rglob("*")):
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
        found[str(path.relative_to(root))] = (
            kind,
            path.read_bytes() if kind == "file" and path.is_file() else None,
        )
    return found


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "run"
    manager = CheckpointManager(folder, run_id="run")
    for step in (1, 2):
        manager.save(step, state_of(step))
    return folder


# Places where no checkpoint is.


def test_wrong_paths(tmp_path, root):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    (tmp_path / "a file").write_text("text")
    for place in ("nowhere", "empty", "other", "a file"):
        path = str(tmp_path / place)
        for call in (
            lambda p=path: open_checkpoint(p),
            lambda p=path: CheckpointCoordinator(state_of(0)).load_checkpoint(p),
            lambda p=path: CheckpointManager(root).load(state_of(0), p),
        ):
            with pytest.raises(CheckpointNotFound) as caught:
                call()
            assert path in str(caught.value)
            assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(CheckpointNotFound) as caught:
        scan_root(tmp_path / "nowhere")
    assert "nowhere" in str(caught.value)
    assert scan_root(tmp_path / "empty") == scan_root(tmp_path / "other") == []
    assert not (tmp_path / "nowhere").exists()


def test_steps_that_are_not_there(root):
    with pytest.raises(CheckpointNotFound) as caught:
        CheckpointManager(root).load(state_of(0), 3)
    assert (caught.value.step, caught.value.available) == (3, [1, 2])
    for call in (lambda m: m.verify(3), lambda m: m.delete(3), lambda m: m.restore(state_of(0), 3)):
        with pytest.raises(CheckpointNotFound):
            call(CheckpointManager(root))
    with pytest.raises(CheckpointNotFound) as caught:
        CheckpointManager(root.parent / "empty").load(state_of(0))
    assert caught.value.available == []


def rewrite(manifest, change):
    """The manifest with `change` made to its document, and a digest that is right again."""
    document = json.loads(manifest.read_bytes())
    document.pop("digest")
    change(document)
    body = (
        json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False)
        .removesuffix("\n}")
        .encode()
    )
    manifest.write_bytes(body + b',\n "digest": "%s"\n}\n' % content_digest(body).encode())


def test_a_newer_format_is_refused_by_name(root):
    rewrite(
        root / "checkpoint-2" / MANIFEST_NAME,
        lambda d: d.update(format_version="2.0", unheard={"of": 1}),
    )
    before = tree(root)
    for call in (
        lambda m: m.load(state_of(0), 2),
        lambda m: m.load(state_of(0), str(root / "checkpoint-2")),
    ):
        with pytest.raises(UnsupportedVersion) as caught:
            call(CheckpointManager(root))
        assert (caught.value.found, caught.value.supported.split(".")[0]) == ("2.0", "1")
        assert "checkpoint-2" in str(caught.value)
    with pytest.warns(match="2.0"):
        assert restored(root) == (1, 1)
    for overwrite in (False, True):
        with pytest.raises(CheckpointExists):
            CheckpointManager(root, run_id="run").save(2, state_of(3), overwrite=overwrite)
    assert tree(root) == before


def test_fields_of_a_newer_minor_version_are_kept(root):
    rewrite(
        root / "checkpoint-2" / MANIFEST_NAME,
        lambda d: d.update(format_version="1.7", unheard={"of": 1}),
    )
    assert open_checkpoint(root / "checkpoint-2").manifest.extra == {"unheard": {"of": 1}}
    assert restored(root) == (2, 2)


# Something else in the place of a file.


def replacements():
    def fifo(path, _):
        os.mkfifo(path)

    def folder(path, _):
        path.mkdir()
        (path / "inside").write_text("x")

    def link_outside(path, data):
        target = path.parent.parent.parent / "outside"
        target.write_bytes(data)
        path.symlink_to(target)

    def link_inside(path, data):
        target = path.parent / "the-real-one.safetensors"
        target.write_bytes(data)
        path.symlink_to(target.name)

    def broken_link(path, _):
        path.symlink_to("nowhere")

    def link_to_itself(path, _):
        path.symlink_to(path.name)

    def endless(path, _):
        path.symlink_to("/dev/zero")

    def unix_socket(path, _):
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            with socket.socket(socket.AF_UNIX) as s:
                s.bind(path.name)
        finally:
            os.chdir(here)

    return [
        fifo,
        folder,
        link_outside,
        link_inside,
        broken_link,
        link_to_itself,
        endless,
        unix_socket,
    ]


@pytest.mark.parametrize("replace", replacements(), ids=lambda f: f.__name__)
@pytest.mark.parametrize("which", ["model.safetensors", "index.rank00000.msgpack", MANIFEST_NAME])
@pytest.mark.timeout(30)
def test_not_a_regular_file(root, which, replace):
    """Neither followed nor waited for; named; and the checkpoint before it is restored."""
    path = root / "checkpoint-2" / which
    data = path.read_bytes()
    path.unlink()
    replace(path, data)
    before = tree(root)
    with pytest.raises((CheckpointCorrupt, CheckpointNotFound)) as caught:
        CheckpointManager(root).load(state_of(0), 2)
    assert which in str(caught.value)
    # A link to nothing, in the place of a manifest, is no manifest.
    if isinstance(caught.value, CheckpointNotFound):
        assert (which, replace.__name__) == (MANIFEST_NAME, "broken_link")
    else:
        assert caught.value.file == which
        if which != MANIFEST_NAME:
            assert {p.file for p in CheckpointManager(root).verify(2)} == {which}
    with pytest.warns(match="checkpoint-2"):
        assert restored(root) == (1, 1)
    assert tree(root) == before
    # And the save of that step replaces it, without a step outside.
    manager = CheckpointManager(root, run_id="run")
    with pytest.warns(match="checkpoint-2"):
        manager.restore(state_of(-1))
    outside = root.parent / "outside"
    if replace.__name__ not in ("folder", "link_inside"):
        manager.save(2, state_of(22))
        assert restored(root) == (2, 22)
    assert not outside.exists() or outside.read_bytes() == data


def test_a_folder_that_is_a_link_is_not_deleted_through(root, tmp_path):
    """A checkpoint that was linked into the root belongs to somebody else: retention does not touch
    its files."""
    elsewhere = tmp_path / "elsewhere"
    (root / "checkpoint-1").rename(elsewhere)
    (root / "checkpoint-1").symlink_to(elsewhere)
    before = tree(elsewhere)
    manager = CheckpointManager(root, keep=KeepLast(1), run_id="run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.save(3, state_of(3))
    assert tree(elsewhere) == before
    assert restored(root) == (3, 3)
    assert not (root / "checkpoint-2").exists()


HOSTILE = [
    "../outside.safetensors",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/b.safetensors",
    "a\\b",
    "file:///etc/passwd",
    "s3://b/k",
    "C:\\x",
    "x\0y",
    "x\ny",
    "../checkpoint-1/model.safetensors",
    MANIFEST_NAME,
    "n" * 256,
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda n: repr(n)[:30])
def test_paths_that_leave_the_checkpoint_are_refused(root, tmp_path, name):
    outside = tmp_path / "run" / "outside.safetensors"
    outside.write_bytes(b"not yours")

    def change(document):
        record = document["files"].pop("model.safetensors")
        document["files"][name] = record
        document["components"]["model"]["files"] = [name]

    rewrite(root / "checkpoint-2" / MANIFEST_NAME, change)
    before = tree(root)
    with pytest.raises(UnsafePath) as caught:
        CheckpointManager(root).load(state_of(0), 2)
    assert caught.value.file == MANIFEST_NAME
    with pytest.raises(UnsafePath):
        open_checkpoint(root / "checkpoint-2")
    with pytest.warns(match="checkpoint-2"):
        assert restored(root) == (1, 1)
    assert tree(root) == before
    # Nothing that such a manifest names is ever deleted.
    with pytest.raises((CheckpointCorrupt, CheckpointNotFound)):
        CheckpointManager(root).delete(2)
    assert outside.read_bytes() == b"not yours"
    assert restored_quietly(root) == (1, 1)


def restored_quietly(root):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return restored(root)


# Pickles.


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_b20_no_pickle_is_ever_loaded(root, tmp_path):
    pwned = tmp_path / "pwned"
    evil = pickle.dumps(Evil(str(pwned)))
    folder = root / "checkpoint-2"
    for name in ("rng.pt", "optimizer.bin", "training_state.pkl", "model.safetensors.bak"):
        (folder / name).write_bytes(evil)
    assert restored(root) == (2, 2)
    assert CheckpointManager(root).verify(2) == []
    assert set(open_checkpoint(folder).foreign_files()) == {
        "rng.pt",
        "optimizer.bin",
        "training_state.pkl",
        "model.safetensors.bak",
    }
    for name in ("model.safetensors", "index.rank00000.msgpack", MANIFEST_NAME):
        data = (folder / name).read_bytes()
        for new in (evil, evil.ljust(len(data), b"\0")[: max(len(data), len(evil))]):
            (folder / name).write_bytes(new)
            with pytest.raises(CheckpointCorrupt) as caught:
                CheckpointManager(root).load(state_of(0), 2)
            assert caught.value.file == name
            with pytest.warns(match="checkpoint-2"):
                assert restored(root) == (1, 1)
        (folder / name).write_bytes(data)
    assert not pwned.exists()
    assert restored(root) == (2, 2)


def test_b20_a_pickle_with_right_digests_is_not_loaded_either(root, tmp_path):
    """xxh3 is no protection from malice: whoever can write the files can write the digests."""
    pwned = tmp_path / "pwned"
    evil = pickle.dumps(Evil(str(pwned)))
    folder = root / "checkpoint-2"
    (folder / "index.rank00000.msgpack").write_bytes(evil)
    record = [len(evil), content_digest(evil), 0]
    rewrite(
        folder / MANIFEST_NAME, lambda d: d["files"].update({"index.rank00000.msgpack": record})
    )
    with pytest.raises(CheckpointCorrupt) as caught:
        CheckpointManager(root).load(state_of(0), 2)
    assert caught.value.file == "index.rank00000.msgpack"
    assert caught.value.kind == "format"
    with pytest.warns(match="checkpoint-2"):
        assert restored(root) == (1, 1)
    assert {p.file for p in CheckpointManager(root).verify(2)} >= {"index.rank00000.msgpack"}
    assert not pwned.exists()


# Surplus files and mixed generations.


def test_b30_surplus_files_are_ignored_and_reported(root):
    save_file({"w": torch.zeros(40)}, root / "checkpoint-2" / "model-00001-of-00002.safetensors")
    save_file({"extra": torch.zeros(2)}, root / "checkpoint-2" / "zzz.safetensors")
    (root / "checkpoint-2" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "zzz.safetensors"}}'
    )
    (root / "checkpoint-2" / "folder").mkdir()
    assert restored(root) == (2, 2)
    assert CheckpointManager(root).verify(2) == []
    assert open_checkpoint(root / "checkpoint-2").foreign_files() == [
        "folder/",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "zzz.safetensors",
    ]


@pytest.mark.parametrize("kind", ["local", "object store"])
def test_b30_a_step_saved_again_never_mixes_generations(tmp_path, kind):
    """A first attempt with other components and more files dies; the second has only its own."""
    storage = open_storage(tmp_path) if kind == "local" else FsspecStorage(f"file://{tmp_path}", {})
    CheckpointManager(storage, run_id="run").save(10, state_of(10))
    for k in (3, 6, 9, 12):
        faults = FaultStorage(storage)
        faults.kill(at=k, kind=("create", "write_at", "close"), how="raise")
        with pytest.raises(Killed):
            CheckpointManager(faults, run_id="run").save(
                20, {**state_of(19), "z": {"t": torch.ones(4)}, "a": {"x": 1}}
            )
    manager = CheckpointManager(storage, run_id="run")
    manager.save(20, state_of(20))
    assert restored(storage) == (20, 20)
    assert manager.verify(20) == []
    view = open_checkpoint(tmp_path / "checkpoint-20")
    assert sorted(view.manifest.components) == ["model", "progress"]
    assert view.foreign_files() == []
    assert sorted(e.name for e in storage.list()) == ["checkpoint-10", "checkpoint-20"]


def test_foreign_files_are_never_deleted(root):
    for place in (root, root / "checkpoint-1", root / "checkpoint-2"):
        (place / "notes.txt").write_text("mine")
        (place / "logs").mkdir()
    (root / "checkpoint-abc").mkdir()
    (root / "000100").mkdir()
    (root / "checkpoint-7").mkdir()
    (root / "checkpoint-7" / "mine.bin").write_bytes(b"mine")
    manager = CheckpointManager(root, keep=KeepLast(1), run_id="run")
    manager.save(3, state_of(3))
    manager.delete(3)
    left = set(tree(root))
    assert {"notes.txt", "logs", "checkpoint-abc", "000100", "checkpoint-7/mine.bin"} <= left
    assert {f"checkpoint-{n}/{name}" for n in (1, 2) for name in ("notes.txt", "logs")} <= left
    assert not any(name.endswith((".safetensors", ".msgpack", ".json")) for name in left)
    with pytest.raises(CheckpointExists) as caught:
        manager.save(7, state_of(7), overwrite=True)
    assert "mine.bin" in str(caught.value)


def test_a_committed_checkpoint_is_not_overwritten_unasked(root):
    before = tree(root)
    with pytest.raises(CheckpointExists) as caught:
        CheckpointManager(root, run_id="run").save(2, state_of(3))
    assert caught.value.step == 2
    assert isinstance(caught.value, FileExistsError)
    assert tree(root) == before


def test_a_file_in_the_place_of_a_checkpoint(root):
    (root / "checkpoint-3").write_text("mine")
    with pytest.raises((StorageError, CheckpointExists)) as caught:
        CheckpointManager(root, run_id="run").save(3, state_of(3), overwrite=True)
    assert "checkpoint-3" in str(caught.value)
    assert getattr(caught.value, "errno", None) in (None, errno.ENOTDIR, errno.EEXIST)
    assert (root / "checkpoint-3").read_text() == "mine"
    assert restored(root) == (2, 2)
    assert sorted(path.name for path in root.iterdir()) == [
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-3",
    ]


def test_a_copied_root_stays_valid(root, tmp_path):
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(root)
    assert restored(tmp_path / "copy") == (2, 2)
    assert restored(f"file://{tmp_path}/copy") == (2, 2)
