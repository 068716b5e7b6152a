"""VolatileStorage itself: what outlives the loss of power, and what does not."""

import errno

import pytest

from ckptcore import StorageError, open_storage
from ckptcore.storage.remote import FsspecStorage
from ckptcore.testing import FaultStorage, Killed, Unsynced, VolatileStorage
from ckptcore.testing.contract import StorageContract


class TestVolatileStorageOverLocal(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return VolatileStorage(open_storage(tmp_path / "root"))


class TestVolatileStorageOverFsspec(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return VolatileStorage(FsspecStorage(f"file://{tmp_path}/root", {}))


@pytest.fixture
def disk(tmp_path):
    """A storage with two durable files, for a machine that is about to lose power."""
    disk = open_storage(tmp_path / "root")
    disk.make_folder("a")
    disk.write("a/one", b"1")
    disk.write("a/two", b"22")
    return disk


def tree(storage, folder=""):
    """Everything in a storage: path -> bytes, None for a folder."""
    found = {}
    for entry in storage.list(folder):
        path = f"{folder}/{entry.name}" if folder else entry.name
        found |= (
            {path: None, **tree(storage, path)} if entry.is_folder else {path: storage.read(path)}
        )
    return found


BEFORE = {"a": None, "a/one": b"1", "a/two": b"22"}


def lost(disk, work, survives=lambda change: False):
    machine = VolatileStorage(disk, survives)
    work(machine)
    after = tree(disk)
    machine.lose_power()
    return after, tree(disk)


def create(storage, path, data, close=True):
    writer = storage.create(path, len(data))
    writer.write_at(0, [memoryview(data)])
    if close:
        writer.close()
    return writer


CHANGES = {
    "create": (lambda s: create(s, "a/new", b"n"), {**BEFORE, "a/new": b"n"}),
    "folder": (lambda s: s.make_folder("a/b"), {**BEFORE, "a/b": None}),
    "remove": (lambda s: s.remove("a/one"), {"a": None, "a/two": b"22"}),
    "rename": (
        lambda s: s.rename("a/one", "a/three"),
        {"a": None, "a/three": b"1", "a/two": b"22"},
    ),
    "replace": (lambda s: s.rename("a/one", "a/two"), {"a": None, "a/two": b"1"}),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_names_are_lost_until_their_folder_is_synced(disk, name):
    work, after = CHANGES[name]
    assert lost(disk, work) == (after, BEFORE)
    # Another folder's sync is none of this one; that of the folder itself is.
    assert lost(disk, lambda s: (work(s), s.sync_folder(""))) == (after, BEFORE)
    assert lost(disk, lambda s: (work(s), s.sync_folder("a"))) == (after, after)


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_may_survive_all_the_same(disk, name):
    work, after = CHANGES[name]
    assert lost(disk, work, lambda change: True) == (after, after)


def test_the_bytes_of_a_file_are_lost_until_it_is_closed(disk):
    def work(storage):
        create(storage, "a/open", b"half", close=False)
        create(storage, "a/closed", b"all")
        storage.sync_folder("a")

    assert lost(disk, work)[1] == {**BEFORE, "a/open": b"", "a/closed": b"all"}
    disk.remove("a/open")
    disk.remove("a/closed")
    survived = lost(disk, work, lambda change: change.kind == "data")[1]
    assert survived == {**BEFORE, "a/open": b"half", "a/closed": b"all"}


def test_a_folder_that_was_renamed_before_it_was_durable(disk):
    def work(storage):
        storage.make_folder("b")
        create(storage, "b/x", b"x")
        storage.sync_folder("b")
        storage.rename("b", "c")
        create(storage, "c/late", b"l")

    after, left = lost(disk, work)
    assert after == {**BEFORE, "c": None, "c/x": b"x", "c/late": b"l"}
    assert left == BEFORE
    assert lost(disk, lambda s: (work(s), s.sync_folder("")))[1] == {
        **BEFORE,
        "c": None,
        "c/x": b"x",
    }


def test_changes_survive_in_any_order(disk):
    """The second of two removals without the first; what cannot be without an earlier change, is
    not."""

    def work(storage):
        storage.remove("a/one")
        storage.remove("a/two")
        storage.rename("a", "b")
        storage.make_folder("a")

    only = {number: lost_copy(disk, work, number) for number in (1, 2, 3, 4)}
    assert only == {
        1: {"a": None, "a/two": b"22"},
        2: {"a": None, "a/one": b"1"},
        3: {"b": None, "b/one": b"1", "b/two": b"22"},
        4: BEFORE,  # the name was not free
    }


def lost_copy(disk, work, number):
    copy = open_storage(f"{disk.url}-{number}")
    copy.make_folder("a")
    copy.write("a/one", b"1")
    copy.write("a/two", b"22")
    return lost(copy, work, lambda change: change.number == number)[1]


def test_a_file_that_was_removed_and_made_again(disk):
    def work(storage):
        storage.remove("a/one")
        create(storage, "a/one", b"another")
        storage.rename("a/one", "a/other")

    assert lost(disk, work)[1] == BEFORE
    assert lost(disk, lambda s: (work(s), s.sync_folder("a")))[1] == {
        "a": None,
        "a/two": b"22",
        "a/other": b"another",
    }


def test_a_rename_between_folders_is_one_change(disk):
    disk.make_folder("b")

    def work(storage):
        storage.rename("a/one", "b/one")

    assert lost(disk, work)[1] == {**BEFORE, "b": None}
    assert lost(disk, lambda s: (work(s), s.sync_folder("b")))[1] == {
        "a": None,
        "a/two": b"22",
        "b": None,
        "b/one": b"1",
    }


def test_what_is_unsynced_is_told(disk):
    machine = VolatileStorage(disk)
    create(machine, "a/new", b"n")
    machine.make_folder("c/d")
    machine.rename("a/one", "c/d/one")
    machine.remove("a/two")
    machine.remove("a/nothing")
    create(machine, "a/given up", b"", close=False).abort()
    told = [
        "create a/new",
        "make_folder c",
        "make_folder c/d",
        "rename c/d/one",
        "remove a/two",
        "create a/given up",
        "remove a/given up",
    ]
    assert [f"{change.kind} {change.path}" for change in machine.unsynced()] == told
    assert machine.unsynced()[0] == Unsynced(1, "create", "a/new")
    machine.sync_folder("c/d")
    assert [change.number for change in machine.unsynced()] == [1, 2, 3, 5, 6, 7]
    machine.sync_folder("a")
    machine.sync_folder("c")
    machine.sync_folder("")
    assert machine.unsynced() == []


def test_nothing_works_without_power(disk):
    machine = VolatileStorage(disk)
    writer = create(machine, "a/open", b"half", close=False)
    machine.lose_power()
    machine.lose_power()
    calls = (
        machine.list,
        lambda: machine.open("a/one"),
        lambda: machine.create("a/x", 1),
        writer.close,
        writer.abort,
        lambda: machine.make_folder("b"),
        lambda: machine.sync_folder("a"),
        lambda: machine.remove("a/one"),
        lambda: machine.rename("a/one", "b"),
        lambda: machine.remove_folder("a"),
        lambda: writer.write_at(0, [memoryview(b"x")]),
    )
    for call in calls:
        with pytest.raises(Killed):
            call()
    assert tree(disk) == BEFORE


def test_an_object_store_loses_only_what_was_not_complete(tmp_path):
    store = FsspecStorage(f"file://{tmp_path}/root", {})
    machine = VolatileStorage(store)
    machine.make_folder("a")
    create(machine, "a/x", b"x")
    create(machine, "a/open", b"half", close=False)
    machine.rename("a/x", "a/y")
    assert machine.unsynced() == []
    machine.lose_power()
    assert tree(store) == {"a": None, "a/y": b"x"}


def test_a_kill_of_a_fault_storage_is_the_loss_of_power(disk):
    faults = FaultStorage(VolatileStorage(disk))
    faults.kill(2, kind="remove", how="raise")
    faults.remove("a/one")
    with pytest.raises(Killed):
        faults.remove("a/two")
    assert tree(disk) == BEFORE


def test_errors_are_those_of_the_storage(disk):
    with pytest.raises(StorageError) as caught:
        VolatileStorage(disk).remove_folder("a")
    assert caught.value.errno in (errno.ENOTEMPTY, errno.EEXIST)
