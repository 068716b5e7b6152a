"""Storage that says no: EIO and ENOSPC at every operation that writes, quotas, full disks."""

import errno
import os
import subprocess
import uuid
import warnings
from pathlib import Path

import fsspec
import pytest
import torch

from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    KeepLast,
    ModelState,
    NoSpace,
    StorageError,
    UnsupportedValue,
    open_storage,
)
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.saving.plan import plan_component
from ckptcore.storage.remote import FsspecStorage
from ckptcore.testing import FaultStorage
from ckptcore.testing.faults import WRITE_OPERATIONS


def state_of(mark, items=500):
    return {
        "model": {f"w{n}": torch.arange(items) * 0.5 + mark + n for n in range(3)},
        "progress": {"mark": mark},
    }


def mark_of(values):
    mark = values["progress"]["mark"]
    for name, tensor in state_of(mark, values["model"]["w0"].numel())["model"].items():
        assert torch.equal(values["model"][name], tensor), (mark, name)
    return mark


def restored(root, items=500):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        report = CheckpointManager(root).restore(state_of(-1, items))
    return None if report.fresh else (report.step, mark_of(report.values))


def names(storage):
    """All that lies in the root: folder -> files."""
    return {
        entry.name: {inner.name for inner in storage.list(entry.name)} for entry in storage.list()
    }


def whole(storage, steps):
    """What must lie in the root when exactly these steps are there, and they are complete."""
    expected = {}
    for info in CheckpointManager(storage).list():
        assert CheckpointManager(storage).verify(info.step) == []
        expected[info.name] = {*info.manifest.files, MANIFEST_NAME}
    assert [*expected] == [f"checkpoint-{step}" for step in steps]
    return expected


@pytest.fixture(
    params=[
        "local",
        "memory",
        "folder",
        pytest.param("s3", marks=[pytest.mark.stress, pytest.mark.timeout(1800)]),
    ]
)
def make_storage(request, quick_folder, monkeypatch):
    """A function that gives a new empty storage at each call."""
    monkeypatch.setitem(plan_component.__kwdefaults__, "max_file_bytes", 3000)
    base = f"memory://faults-{uuid.uuid4().hex}"

    def make():
        name = uuid.uuid4().hex
        if request.param == "memory":
            return open_storage(f"{base}/{name}")
        if request.param == "folder":
            return FsspecStorage(f"file://{quick_folder}/{name}", {})
        if request.param == "s3":
            s3 = request.getfixturevalue("s3")
            return open_storage(s3.new_root(), s3.options)
        return open_storage(quick_folder / name)

    yield make
    fs = fsspec.filesystem("memory")
    if fs.exists(base):
        fs.rm(base, recursive=True)


def save_with_fault(make_storage, at, error, how, after=False):
    """A save of step 20 over step 10 whose `at`-th writing operation fails: storage, error raised,
    warnings."""
    storage = make_storage()
    CheckpointManager(storage, run_id="run").save(10, state_of(10))
    if how.get("overwrite"):
        CheckpointManager(storage, run_id="run").save(20, state_of(19))
    faults = FaultStorage(storage)
    faults.fail(at, error=error, kind=WRITE_OPERATIONS, after=after)
    manager = CheckpointManager(
        faults, run_id="run", io_threads=1, keep=KeepLast(1) if how.get("keep") else None
    )
    raised = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        try:
            manager.save(20, state_of(20), overwrite=how.get("overwrite", False))
        except StorageError as found:
            raised = found
    done = faults.count(WRITE_OPERATIONS) < at
    return storage, raised, [str(w.message) for w in caught], done


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize(
    "how", [{}, {"overwrite": True}, {"keep": True}], ids=["save", "overwrite", "retention"]
)
def test_b48_a_failure_at_every_writing_operation(make_storage, error, how):
    """Before the commit: a typed error, no partial bytes, and what was there is there. After it: at
    most a warning."""
    at, done, failed, troubles = 0, False, 0, {}
    while not done:
        at += 1
        storage, raised, told, done = save_with_fault(make_storage, at, error, how)
        try:
            if raised is not None:
                failed += 1
                assert type(raised) is (NoSpace if error == errno.ENOSPC else StorageError)
                assert raised.errno == error
                assert raised.path is not None
                if error == errno.ENOSPC:
                    assert raised.needed >= 3 * 500 * 4
                if how.get("overwrite") and not storage.atomic_rename:
                    # The old manifest was withdrawn first, as the docs say of object stores.
                    assert restored(storage) in ((20, 19), (10, 10))
                else:
                    assert restored(storage) == ((20, 19) if how.get("overwrite") else (10, 10))
                    assert names(storage) == whole(
                        storage, [10, 20] if how.get("overwrite") else [10]
                    )
            else:
                assert restored(storage) == (20, 20)
                assert len(told) <= 1
            # The next save of the step works as if nothing had been.
            if raised is not None:
                CheckpointManager(storage, run_id="run").save(
                    20, state_of(21), overwrite=how.get("overwrite", False)
                )
                assert restored(storage) == (20, 21)
            manager = CheckpointManager(
                storage, run_id="run", keep=KeepLast(1) if how.get("keep") else None
            )
            manager.save(30, state_of(30))
            assert restored(storage) == (30, 30)
            assert names(storage) == whole(storage, [30] if how.get("keep") else [10, 20, 30])
        except (Exception, pytest.fail.Exception) as trouble:
            troubles.setdefault(f"{type(trouble).__name__}: {trouble}"[:250], []).append(at)
    print(
        f"\n{storage.url.partition(':')[0][:8]} {how}: {at - 1} writing operations failed in "
        f"turn, {failed} saves with them"
    )
    assert failed >= 8
    assert troubles == {}


@pytest.mark.parametrize("after", [False, True], ids=["refused", "done but reported as failed"])
def test_b48_the_storage_dies_for_good(make_storage, after):
    """Every writing operation from the k-th on fails, those that clean up too: the error is the
    first one's."""
    at, more = 0, True
    while more:
        at += 1
        storage = make_storage()
        CheckpointManager(storage, run_id="run").save(10, state_of(10))
        faults = FaultStorage(storage)
        faults.fail(at, kind=WRITE_OPERATIONS, times=None, after=after)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            try:
                CheckpointManager(faults, run_id="run", io_threads=1).save(20, state_of(20))
            except StorageError as error:
                assert type(error) is StorageError
                assert error.errno == errno.EIO
        more = faults.count(WRITE_OPERATIONS) >= at
        assert all("checkpoint-20" in str(w.message) for w in caught)
        assert restored(storage) in ((10, 10), (20, 20))
        after_all = CheckpointManager(storage, run_id="run")
        after_all.save(20, state_of(20), overwrite=True)
        after_all.save(30, state_of(30))
        assert restored(storage) == (30, 30)
        assert names(storage) == whole(storage, [10, 20, 30])
    assert at > 8


def test_b48_a_quota_of_one_and_a_half_checkpoints(make_storage):
    storage = make_storage()
    faults = FaultStorage(storage)
    first = CheckpointManager(faults, keep=KeepLast(1), run_id="run").save(10, state_of(10))
    size = first.size_bytes + len(storage.read(f"{first.name}/{MANIFEST_NAME}"))
    faults = FaultStorage(storage, quota=size * 3 // 2)
    assert faults.used_bytes() == size
    manager = CheckpointManager(faults, keep=KeepLast(1), run_id="run")
    for _ in range(3):
        with pytest.raises(NoSpace) as caught:
            manager.save(20, state_of(20))
        assert 0 <= caught.value.free < size // 2
        assert caught.value.needed > caught.value.free
        assert f"{caught.value.needed:,} bytes" in str(caught.value)
        assert faults.used_bytes() == size
        assert names(storage) == whole(storage, [10])
        assert restored(storage) == (10, 10)
    faults.quota = 2 * size + 500
    manager.save(20, state_of(20))
    assert names(storage) == whole(storage, [20])
    assert restored(storage) == (20, 20)
    assert abs(faults.used_bytes() - size) < 500


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_b48_a_full_disk(small_disk):
    items = 1 << 18  # three tensors of 1 MiB
    root = small_disk / "run"
    filler = small_disk / "filler"
    manager = CheckpointManager(root)
    manager.save(10, state_of(10, items))
    filler.write_bytes(bytes(3 << 20))
    used = os.statvfs(small_disk).f_bavail
    with pytest.raises(NoSpace) as caught:
        manager.save(20, state_of(20, items))
    error = caught.value
    assert error.errno == errno.ENOSPC
    assert isinstance(error, OSError)
    assert error.needed >= 3 << 20
    assert 0 <= error.free < 2 << 20
    assert f"{error.needed:,}" in str(error)
    assert f"{error.free:,} bytes free" in str(error)
    assert [path.name for path in root.iterdir()] == ["checkpoint-10"]
    assert os.statvfs(small_disk).f_bavail == used
    assert manager.verify(10) == []
    assert restored(root, items) == (10, 10)
    filler.unlink()
    manager.save(20, state_of(20, items))
    assert restored(root, items) == (20, 20)
    assert sorted(path.name for path in root.iterdir()) == ["checkpoint-10", "checkpoint-20"]


def test_b48_a_full_disk_refuses_even_a_folder(small_disk):
    """No inodes or blocks for the first thing that a save makes."""
    manager = CheckpointManager(small_disk / "run")
    manager.save(10, state_of(10))
    filler = small_disk / "filler"
    with filler.open("wb") as file, pytest.raises(OSError, match="space"):
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    with pytest.raises(NoSpace) as caught:
        manager.save(20, state_of(20))
    assert caught.value.free < 1 << 16
    assert [path.name for path in (small_disk / "run").iterdir()] == ["checkpoint-10"]
    assert restored(small_disk / "run") == (10, 10)


class Unstorable:
    pass


@pytest.mark.parametrize("overwrite", [False, True])
def test_b20_a_state_that_cannot_be_stored_leaves_no_trace(make_storage, overwrite):
    storage = make_storage()
    CheckpointManager(storage, run_id="run").save(10, state_of(10))
    CheckpointManager(storage, run_id="run").save(20, state_of(19))
    before = names(storage)
    faults = FaultStorage(storage)
    step = 20 if overwrite else 30
    state = {**state_of(20), "progress": {"deep": [{"inner": Unstorable()}]}}
    with pytest.raises(UnsupportedValue) as caught:
        CheckpointManager(faults, run_id="run").save(step, state, overwrite=overwrite)
    assert (caught.value.component, caught.value.key) == ("progress", "deep/0/inner")
    assert caught.value.type_name.endswith("Unstorable")
    assert names(storage) == before == whole(storage, [10, 20])
    assert restored(storage) == (20, 19)
    assert (
        faults.count(("create", "write_at", "make_folder", "rename", "remove", "remove_folder"))
        == 0
    )


def test_b20_an_unstorable_first_save_makes_nothing(tmp_path):
    with pytest.raises(UnsupportedValue):
        CheckpointManager(tmp_path / "run").save(1, {"a": {"x": Unstorable()}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0o022, 0o007, 0o077, 0o002])
def test_b50_files_and_folders_follow_the_umask(tmp_path, mask, monkeypatch):
    monkeypatch.setitem(plan_component.__kwdefaults__, "max_file_bytes", 3000)
    root = tmp_path / "new" / "run"
    before = os.umask(mask)
    try:
        manager = CheckpointManager(root, keep=KeepLast(1))
        module = torch.nn.Linear(30, 30)
        for step in (1, 2):
            manager.save(
                step, {"model": ModelState(module), "progress": {"big": torch.zeros(5), "small": 1}}
            )
    finally:
        during = os.umask(before)
    assert during == mask
    modes = {
        str(path.relative_to(tmp_path)): path.stat().st_mode & 0o7777
        for path in tmp_path.rglob("*")
    }
    folders = {"new", "new/run", "new/run/checkpoint-2"}
    assert {name for name, mode in modes.items() if (tmp_path / name).is_dir()} == folders
    assert len(modes) > 6
    assert modes == {name: (0o777 if name in folders else 0o666) & ~mask for name in modes}


def test_reading_needs_no_write(tmp_path):
    """A root that only others may write (a read-only mount) can be listed, verified, restored; a
    save says why not."""
    root = tmp_path / "run"
    CheckpointManager(root).save(10, state_of(10))
    made = subprocess.run(["mount", "--bind", str(root), str(root)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no bind mount can be made here: {made.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(root)], check=True)
        assert restored(root) == (10, 10)
        assert CheckpointManager(root).verify() == []
        with pytest.raises(StorageError) as caught:
            CheckpointManager(root).save(20, state_of(20))
        assert caught.value.errno == errno.EROFS
        assert "checkpoint-20" in caught.value.path
        assert restored(root) == (10, 10)
        with pytest.raises(StorageError) as caught:
            CheckpointManager(root).delete(10)
        assert caught.value.errno == errno.EROFS
        assert restored(root) == (10, 10)
    finally:
        subprocess.run(["umount", str(root)], check=True)
    assert [path.name for path in root.iterdir()] == ["checkpoint-10"]


def test_a_file_in_the_place_of_the_root(tmp_path):
    (tmp_path / "run").write_text("mine")
    for call in (
        lambda m: m.save(10, state_of(10)),
        lambda m: m.restore(state_of(1)),
        lambda m: m.list(),
        lambda m: m.load(state_of(1)),
    ):
        with pytest.raises(StorageError) as caught:
            call(CheckpointManager(tmp_path / "run"))
        assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)
        assert str(tmp_path / "run") in str(caught.value)
    assert Path(tmp_path / "run").read_text() == "mine"
