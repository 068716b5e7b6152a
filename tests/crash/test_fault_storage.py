"""FaultStorage itself: what it counts, and that each fault does what it says and no more."""

import errno
import os
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import ckptcore.testing.faults
import ckptcore.testing.power
import ckptcore.testing.ranks
from ckptcore import CheckpointManager, NoSpace, StorageError, open_storage
from ckptcore.storage.remote import FsspecStorage
from ckptcore.testing import KILLED_EXIT_CODE, FaultStorage, Killed, Operation, VolatileStorage


@pytest.fixture(params=["local", "folder"])
def inner(request, tmp_path):
    if request.param == "local":
        return open_storage(tmp_path / "root")
    return FsspecStorage(f"file://{tmp_path}/root", {})


@pytest.fixture
def faults(inner):
    return FaultStorage(inner)


def names(storage, folder=""):
    return [entry.name for entry in storage.list(folder)]


def refused(call, number=errno.EIO):
    with pytest.raises(StorageError) as caught:
        call()
    assert caught.value.errno == number
    return caught.value


def test_there_is_one_killed():
    assert (
        ckptcore.testing.faults.Killed
        is ckptcore.testing.ranks.Killed
        is ckptcore.testing.power.Killed
        is Killed
    )
    assert not issubclass(Killed, Exception)


@pytest.mark.parametrize(
    "module", [ckptcore.testing.faults, ckptcore.testing.power], ids=["faults", "power"]
)
def test_the_examples_in_the_docstrings_run(module, tmp_path):
    state = {"model": {"w": torch.arange(6.0)}, "progress": {"done": 3}}
    blocks = module.__doc__.split("\n\n")
    code = [
        textwrap.dedent(block)
        for block in blocks
        if block.startswith("    ") and "faults = " in block
    ]
    assert len(code) >= 1
    known = {
        "errno": errno,
        "os": os,
        "pytest": pytest,
        "state": state,
        "CheckpointManager": CheckpointManager,
        "StorageError": StorageError,
        "open_storage": open_storage,
        "FaultStorage": FaultStorage,
        "Killed": Killed,
        "VolatileStorage": VolatileStorage,
        "KILLED_EXIT_CODE": KILLED_EXIT_CODE,
    }
    for number, block in enumerate(code):
        root = tmp_path / str(number)
        if "restore" in block and "killed-" not in block:
            CheckpointManager(root / "run").save(10, state)
        exec(block.replace("/tmp/", f"{root}/"), known)
        assert (root / "run").is_dir() or len(list(root.iterdir())) > 15


def test_every_operation_is_counted(faults):
    faults.make_folder("a")
    writer = faults.create("a/x", 3)
    writer.write_at(0, [memoryview(b"12")])
    writer.write_at(2, [memoryview(b"3")])
    writer.close()
    faults.sync_folder("a")
    faults.rename("a/x", "a/y")
    assert faults.read("a/y") == b"123"
    faults.create("a/z", 1).abort()
    assert names(faults, "a") == ["y"]
    faults.remove("a/y")
    faults.remove_folder("a")
    assert faults.log == [
        Operation(number, kind, path)
        for number, (kind, path) in enumerate(
            [
                ("make_folder", "a"),
                ("create", "a/x"),
                ("write_at", "a/x"),
                ("write_at", "a/x"),
                ("close", "a/x"),
                ("sync_folder", "a"),
                ("rename", "a/y"),
                ("open", "a/y"),
                ("read_into", "a/y"),
                ("create", "a/z"),
                ("abort", "a/z"),
                ("list", "a"),
                ("remove", "a/y"),
                ("remove_folder", "a"),
            ],
            1,
        )
    ]
    assert faults.count() == 14
    assert faults.count("write_at") == 2
    assert faults.count(("create", "abort"), "*/z") == 2
    with pytest.raises(ValueError, match="no operation of a storage is named 'delete'"):
        faults.count("delete")


def test_fail_at_some_operations_of_a_kind(faults):
    faults.make_folder("a")
    faults.fail(2, kind="create", path="a/*", times=2)
    faults.write("a/1", b"1")
    for name in ("a/2", "a/3"):
        assert "made by FaultStorage" in str(refused(lambda n=name: faults.write(n, b"1")))
    faults.write("a/4", b"1")
    assert names(faults.inner, "a") == ["1", "4"]


def test_fail_for_good_with_an_error_of_your_own(faults):
    faults.fail(3, error=PermissionError("mine"), times=None)
    faults.make_folder("a")
    assert names(faults) == ["a"]
    for _ in range(3):
        with pytest.raises(PermissionError, match="mine"):
            faults.list()
    faults.clear()
    assert names(faults) == ["a"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_fail_without_space(faults, number):
    faults.fail(error=number)
    with pytest.raises(NoSpace) as caught:
        faults.make_folder("a")
    assert caught.value.errno == number


def test_success_reported_as_failure(faults):
    faults.fail(kind=("close", "rename", "remove", "make_folder"), times=None, after=True)
    refused(lambda: faults.make_folder("a"))
    writer = faults.create("a/x", 2)
    writer.write_at(0, [memoryview(b"12")])
    refused(writer.close)
    assert faults.inner.read("a/x") == b"12"
    refused(lambda: faults.rename("a/x", "a/y"))
    assert names(faults.inner, "a") == ["y"]
    refused(lambda: faults.remove("a/y"))
    assert names(faults.inner, "a") == [] or not faults.inner.atomic_rename


@pytest.mark.parametrize(("keep", "left"), [(0.0, b""), (0.5, b"01234"), (0.99, b"012345678")])
def test_a_short_write_that_fails(faults, keep, left):
    faults.make_folder("a")
    faults.short(2, keep=keep, path="a/*")
    writer = faults.create("a/x", 12)
    writer.write_at(0, [memoryview(b"ab")])
    refused(lambda: writer.write_at(2, [memoryview(b"012"), memoryview(b"3456789")]))
    writer.close()
    assert faults.inner.read("a/x") == b"ab" + left


def test_a_short_write_that_nobody_is_told_of(faults):
    faults.make_folder("a")
    faults.short(keep=0.5, error=None, times=None)
    faults.write("a/x", b"0123456789")
    assert faults.inner.read("a/x") == b"01234"


def test_kill_ends_the_process_at_once(inner):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        faults = FaultStorage(inner)
        faults.kill(3, kind=("make_folder", "create"))
        try:
            faults.make_folder("a")
            faults.make_folder("b")
            faults.make_folder("c")
        finally:
            os.write(write, b"cleaned up")
            os._exit(1)
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == KILLED_EXIT_CODE
    assert os.read(read, 100) == b""
    os.close(read)
    assert names(inner) == ["a", "b"]


def test_killed_raises_in_every_later_operation(faults):
    faults.kill(2, how="raise")
    faults.make_folder("a")
    with pytest.raises(Killed):
        faults.write("a/x", b"1")
    for call in (
        faults.list,
        lambda: faults.remove("a/x"),
        lambda: faults.sync_folder("a"),
        lambda: faults.open("a/x"),
    ):
        with pytest.raises(Killed):
            call()
    assert names(faults.inner, "a") == []


def test_block_and_delay(faults):
    faults.make_folder("a")
    gate = faults.block(kind="create")
    faults.delay(0.001, kind="close")
    thread = threading.Thread(target=faults.write, args=("a/x", b"1"))
    thread.start()
    gate.wait_reached(20)
    assert names(faults.inner, "a") == []
    gate.open()
    thread.join(20)
    assert faults.inner.read("a/x") == b"1"
    with pytest.raises(TimeoutError):
        faults.block(kind="rename").wait_reached(0.001)


def test_a_quota_counts_all_that_is_stored(inner):
    inner.make_folder("a")
    inner.write("a/old", b"1234")
    faults = FaultStorage(inner, quota=10)
    assert (faults.used_bytes(), faults.free_bytes()) == (4, 6)
    faults.write("a/x", b"12345")
    with pytest.raises(NoSpace) as caught:
        faults.write("a/y", b"12")
    assert caught.value.free == 1
    assert names(inner, "a") == ["old", "x"]
    faults.rename("a/x", "a/z")
    faults.remove("a/old")
    assert faults.used_bytes() == 5
    faults.write("a/y", b"12345")
    assert faults.free_bytes() == 0


def test_stale_listings(faults):
    faults.make_folder("a")
    faults.write("a/early", b"1")
    faults.stale(by=5)
    assert names(faults, "a") == ["early"]
    faults.write("a/new", b"1")  # create, write, close
    faults.remove("a/early")
    assert names(faults.inner, "a") == ["new"]
    assert names(faults, "a") == ["early"]
    for _ in range(5):
        faults.sync_folder("a")
    assert [(entry.name, entry.size) for entry in faults.list("a")] == [("new", 1)]


@pytest.mark.parametrize(
    ("hide_new", "show_removed", "seen"),
    [
        (True, True, ["early", "stays"]),
        (True, False, ["stays"]),
        (False, True, ["early", "new", "stays"]),
    ],
)
def test_what_a_stale_listing_hides_and_shows(faults, hide_new, show_removed, seen):
    faults.make_folder("a")
    faults.write("a/early", b"1")
    faults.write("a/stays", b"1")
    faults.stale(by=100, at=2, hide_new=hide_new, show_removed=show_removed, path="a", times=1)
    faults.write("a/new", b"1")
    faults.remove("a/early")
    assert names(faults, "a") == ["new", "stays"]
    assert names(faults, "a") == seen
    assert names(faults, "a") == ["new", "stays"]
    assert faults.read("a/new") == b"1"


def test_a_stale_listing_of_a_folder_that_is_new(faults):
    faults.make_folder("before")
    faults.stale(by=100)
    faults.make_folder("a")
    faults.write("a/x", b"1")
    refused(lambda: faults.list("a"), errno.ENOENT)
    assert names(faults) == ["before"]
    faults.clear()
    assert names(faults, "a") == ["x"]


def test_it_is_the_storage_that_it_wraps(faults, inner):
    assert (faults.url, faults.atomic_rename, faults.positional_writes) == (
        inner.url,
        inner.atomic_rename,
        inner.positional_writes,
    )
    assert faults.at("a/x") == inner.at("a/x")
    assert Path(faults.url.removeprefix("file://")).name == "root"
