"""What the engine asks of a storage, as tests. A backend's test is a subclass with a fixture:

    from ckptcore.testing.contract import StorageContract

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(tmp_path / "root")

Call `pytest.register_assert_rewrite("ckptcore.testing.contract")` in a conftest.py before the
import to see the values of failing assertions. Needs pytest, which ckptcore itself does not depend
on.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ..errors import StorageError
from ..storage.base import Storage

__all__ = ["StorageContract"]

NO_SUCH = (errno.ENOENT, errno.ENOTDIR)
NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
NAMES = (
    "plain",
    "with space",
    "ünïcödé",
    "日本語.bin",
    "per%cent",
    "per%20cent",
    "hash#1",
    "a+b",
    "a&b=c",
    "[1]",
    "a[1-3]b",
    "star*",
    "question?",
    "quote'\"",
    "semi;colon",
    "~tilde",
    "-dash",
    "...",
    ".hidden",
    "UPPER",
    "comma,",
    "{a,b}",
)


class StorageContract:
    """Each test gets a `storage` that holds nothing; its root need not exist."""

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError("a subclass provides the storage")

    # Writing.

    def test_what_is_written_is_read(self, storage: Storage) -> None:
        put(storage, "folder/file", b"some bytes")
        assert storage.read("folder/file") == b"some bytes"
        with storage.open("folder/file") as reader:
            assert reader.size == 10

    def test_an_empty_file(self, storage: Storage) -> None:
        put(storage, "folder/empty", b"")
        assert storage.read("folder/empty") == b""
        with storage.open("folder/empty") as reader:
            assert reader.size == 0
            reader.read_into(0, [])

    def test_write_in_pieces_and_many_buffers(self, storage: Storage) -> None:
        data = pattern(10_000)
        storage.make_folder("folder")
        writer = storage.create("folder/file", len(data))
        writer.write_at(0, [memoryview(data[:1])])
        writer.write_at(1, [])
        writer.write_at(1, [memoryview(b""), memoryview(data[1:100]), memoryview(b"")])
        # More buffers than one system call takes.
        writer.write_at(100, [memoryview(data[at : at + 3]) for at in range(100, len(data), 3)])
        writer.close()
        assert storage.read("folder/file") == data

    def test_a_file_of_many_megabytes(self, storage: Storage) -> None:
        data = pattern((9 << 20) + 7)
        storage.make_folder("folder")
        writer = storage.create("folder/file", len(data))
        for at in range(0, len(data), 4 << 20):
            writer.write_at(at, [memoryview(data)[at : at + (4 << 20)]])
        writer.close()
        assert sizes(storage, "folder") == {"file": len(data)}
        assert storage.read("folder/file") == data

    def test_positional_writes(self, storage: Storage) -> None:
        if not storage.positional_writes:
            pytest.skip("this storage takes the parts of a file in order only")
        data = pattern(64 * 1000)
        storage.make_folder("folder")
        writer = storage.create("folder/file", len(data))
        with ThreadPoolExecutor(8) as pool:
            parts = [
                (at, [memoryview(data)[at : at + 1000]])
                for at in reversed(range(0, len(data), 1000))
            ]
            list(pool.map(lambda part: writer.write_at(*part), parts))
        writer.close()
        assert storage.read("folder/file") == data

    def test_several_files_at_once(self, storage: Storage) -> None:
        storage.make_folder("folder")
        datas = {f"file{n}": pattern(5000 + n, n) for n in range(8)}
        writers = {
            name: storage.create(f"folder/{name}", len(data)) for name, data in datas.items()
        }

        def fill(name: str) -> None:
            for at in range(0, len(datas[name]), 700):
                writers[name].write_at(at, [memoryview(datas[name])[at : at + 700]])
            writers[name].close()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(fill, datas))
        assert {name: storage.read(f"folder/{name}") for name in datas} == datas

    def test_create_refuses_a_name_that_is_taken(self, storage: Storage) -> None:
        put(storage, "folder/file", b"first")
        error = refused(lambda: storage.write("folder/file", b"second"))
        assert error.errno == errno.EEXIST
        assert storage.read("folder/file") == b"first"

    @pytest.mark.parametrize("size", [6, 9 << 20])
    def test_of_two_who_create_one_name_only_one_succeeds(
        self, storage: Storage, size: int
    ) -> None:
        if not storage.create_only:
            pytest.skip("this storage looks whether a name is taken, and then writes")
        storage.make_folder("folder")
        one, two = pattern(size, 1), pattern(size, 2)
        writers = [storage.create("folder/file", size) for _ in range(2)]
        for writer, data in zip(writers, (one, two), strict=True):
            writer.write_at(0, [memoryview(data)])
        writers[0].close()
        assert refused(writers[1].close).errno == errno.EEXIST
        writers[1].abort()
        assert storage.read("folder/file") == one

    def test_abort_leaves_nothing(self, storage: Storage) -> None:
        storage.make_folder("folder")
        put(storage, "folder/other", b"stays")
        for data in (b"", b"half of the fi", pattern(6 << 20)):
            writer = storage.create("folder/file", 8 << 20)
            if data:
                writer.write_at(0, [memoryview(data)])
            writer.abort()
            assert sizes(storage, "folder") == {"other": 5}
            assert refused(lambda: storage.open("folder/file")).errno in NO_SUCH
        put(storage, "folder/file", b"now it works")
        assert storage.read("folder/file") == b"now it works"

    def test_abort_never_raises(self, storage: Storage) -> None:
        storage.make_folder("folder")
        writer = storage.create("folder/file", 4)
        writer.abort()
        writer.abort()
        writer = storage.create("folder/file", 4)
        writer.write_at(0, [memoryview(b"done")])
        writer.close()
        writer.abort()

    # Reading.

    def test_ranges(self, storage: Storage) -> None:
        data = pattern(10_000)
        put(storage, "folder/file", data)
        with storage.open("folder/file") as reader:
            for start, lengths in (
                (0, [1]),
                (9_999, [1]),
                (0, [10_000]),
                (5, [0, 3, 0, 4000, 1]),
                (10_000, [0]),
            ):
                buffers = [bytearray(length) for length in lengths]
                reader.read_into(start, [memoryview(b) for b in buffers])
                assert b"".join(buffers) == data[start : start + sum(lengths)]
            many = [bytearray(3) for _ in range(3000)]
            reader.read_into(500, [memoryview(b) for b in many])
            assert b"".join(many) == data[500:9500]

    def test_a_range_beyond_the_end_is_an_error(self, storage: Storage) -> None:
        put(storage, "folder/file", b"0123456789")
        with storage.open("folder/file") as reader:
            for start, length in ((0, 11), (9, 2), (10, 1), (500, 1)):
                error = refused(
                    lambda s=start, n=length: reader.read_into(s, [memoryview(bytearray(n))])  # type: ignore[misc]
                )
                assert error.errno == errno.EIO
                assert error.path == "folder/file"

    def test_reads_from_many_threads(self, storage: Storage) -> None:
        data = pattern(300_000)
        put(storage, "folder/file", data)
        start = threading.Barrier(8)

        def run(number: int) -> bool:
            start.wait(60)
            for at in range(number * 1000, 290_000, 8000):
                buffer = bytearray(5000)
                reader.read_into(at, [memoryview(buffer)])
                if buffer != data[at : at + 5000]:
                    return False
            return True

        with storage.open("folder/file") as reader, ThreadPoolExecutor(8) as pool:
            assert list(pool.map(run, range(8))) == [True] * 8

    def test_read_has_a_limit(self, storage: Storage) -> None:
        put(storage, "folder/file", b"0123456789")
        assert storage.read("folder/file", limit=10) == b"0123456789"
        assert refused(lambda: storage.read("folder/file", limit=9)).errno == errno.EFBIG

    def test_what_is_not_there(self, storage: Storage) -> None:
        put(storage, "folder/file", b"x")
        for path in ("nothing", "folder/nothing", "nothing/nothing"):
            error = refused(lambda p=path: storage.open(p))  # type: ignore[misc]
            assert error.errno == errno.ENOENT
            assert error.path == path
            assert storage.at(path) in str(error)
        assert refused(lambda: storage.open("folder/file/below")).errno in NO_SUCH
        assert refused(lambda: storage.list("nothing")).errno == errno.ENOENT
        assert refused(lambda: storage.rename("folder/nothing", "folder/new")).errno == errno.ENOENT
        assert sizes(storage, "folder") == {"file": 1}

    def test_a_folder_is_not_a_file(self, storage: Storage) -> None:
        put(storage, "folder/file", b"x")
        assert refused(lambda: storage.open("folder")).errno in (errno.EISDIR, errno.ENOENT)

    # Folders.

    def test_list(self, storage: Storage) -> None:
        put(storage, "folder/b", b"12")
        put(storage, "folder/a", b"1")
        put(storage, "folder/c/inside", b"123")
        put(storage, "folder2/file", b"1234")
        assert [(e.name, e.is_folder, e.size) for e in storage.list("folder")] == [
            ("a", False, 1),
            ("b", False, 2),
            ("c", True, None),
        ]
        assert [(e.name, e.is_folder, e.size) for e in storage.list()] == [
            ("folder", True, None),
            ("folder2", True, None),
        ]

    def test_entries_of_a_folder_and_of_none(self, storage: Storage) -> None:
        assert storage.entries("folder") is None
        put(storage, "folder/file", b"x")
        assert [entry.name for entry in storage.entries("folder") or ()] == ["file"]
        assert storage.entries("folder/none") is None

    def test_a_list_is_never_old(self, storage: Storage) -> None:
        put(storage, "folder/a", b"1")
        assert sizes(storage, "folder") == {"a": 1}
        put(storage, "folder/b", b"12")
        assert sizes(storage, "folder") == {"a": 1, "b": 2}
        storage.remove("folder/a")
        put(storage, "folder/a", b"longer")
        assert sizes(storage, "folder") == {"a": 6, "b": 2}
        storage.rename("folder/a", "folder/c")
        assert sizes(storage, "folder") == {"b": 2, "c": 6}

    def test_folders_by_the_beginning_of_their_names(self, storage: Storage) -> None:
        put(storage, "run-2/b", b"12")
        put(storage, "run-2/a", b"1")
        put(storage, "run-10/c/inside", b"123")
        put(storage, "other/file", b"1")
        found = storage.list_folders("run-")
        assert list(found) == ["run-10", "run-2"]
        for name, inside in found.items():
            assert inside is None or inside == storage.list(name)
        assert list(storage.list_folders("other")) == ["other"]
        assert storage.list_folders("nothing") == {}

    def test_nothing_there_yet(self, storage: Storage) -> None:
        try:
            assert storage.list() == []
        except StorageError as error:
            assert error.errno == errno.ENOENT

    def test_make_folder(self, storage: Storage) -> None:
        storage.make_folder("a/b/c")
        storage.make_folder("a/b/c")
        storage.make_folder("a")
        put(storage, "a/b/c/file", b"x")
        storage.make_folder("a/b/c")
        assert sizes(storage, "a/b/c") == {"file": 1}
        storage.sync_folder("a/b/c")
        storage.sync_folder("")

    def test_remove(self, storage: Storage) -> None:
        put(storage, "folder/a", b"1")
        put(storage, "folder/b", b"1")
        storage.remove("folder/a")
        assert sizes(storage, "folder") == {"b": 1}
        storage.remove("folder/a")
        storage.remove("folder/never")
        storage.remove("nowhere/never")
        assert sizes(storage, "folder") == {"b": 1}

    def test_remove_many(self, storage: Storage) -> None:
        for name in "abc":
            put(storage, f"folder/{name}", b"1")
        storage.remove_all(["folder/a", "folder/never", "folder/c"])
        assert sizes(storage, "folder") == {"b": 1}
        storage.remove_all([])

    def test_remove_folder(self, storage: Storage) -> None:
        put(storage, "folder/inner/file", b"1")
        storage.remove("folder/inner/file")
        storage.remove_folder("folder/inner")
        storage.remove_folder("folder")
        assert not listed(storage, "folder")
        storage.remove_folder("folder")
        storage.remove_folder("never")

    def test_a_folder_with_something_in_it_is_not_removed(self, storage: Storage) -> None:
        put(storage, "folder/file", b"1")
        try:
            storage.remove_folder("folder")
        except StorageError as error:
            assert error.errno in NOT_EMPTY
        assert sizes(storage, "folder") == {"file": 1}
        assert storage.read("folder/file") == b"1"

    # Renaming.

    def test_rename_a_file(self, storage: Storage) -> None:
        put(storage, "folder/old", b"moved")
        storage.rename("folder/old", "folder/new")
        assert sizes(storage, "folder") == {"new": 5}
        assert storage.read("folder/new") == b"moved"
        assert refused(lambda: storage.open("folder/old")).errno == errno.ENOENT

    def test_rename_replaces_a_file(self, storage: Storage) -> None:
        put(storage, "folder/old", b"moved")
        put(storage, "folder/new", b"what was there before")
        storage.rename("folder/old", "folder/new")
        assert sizes(storage, "folder") == {"new": 5}
        assert storage.read("folder/new") == b"moved"

    def test_link(self, storage: Storage) -> None:
        """A second name for the same bytes, which outlives the first one."""
        storage.make_folder("folder")
        storage.write("folder/a", b"content")
        identity = storage.identity("folder/a")
        assert storage.identity("folder/missing") is None
        if identity is None:
            assert not storage.link("folder/a", "folder/b", "")
            assert sizes(storage, "folder") == {"a": 7}
            pytest.skip("this storage cannot have one file under two names")
        assert identity == storage.identity("folder/a")
        assert storage.link("folder/a", "folder/b", identity)
        with pytest.raises(StorageError) as taken:
            storage.link("folder/a", "folder/b", identity)
        assert taken.value.errno == errno.EEXIST
        storage.remove("folder/a")
        assert storage.read("folder/b") == b"content"
        assert not storage.link("folder/a", "folder/c", identity)
        storage.write("folder/a", b"CONTENT")
        assert not storage.link("folder/a", "folder/c", identity)
        assert sizes(storage, "folder") == {"a": 7, "b": 7}

    def test_rename_a_folder(self, storage: Storage) -> None:
        if not storage.atomic_rename:
            pytest.skip("this storage has no rename of folders")
        put(storage, "old/file", b"1")
        put(storage, "old/inner/file", b"22")
        storage.rename("old", "new")
        assert [entry.name for entry in storage.list()] == ["new"]
        assert storage.read("new/file") == b"1"
        assert storage.read("new/inner/file") == b"22"
        assert refused(lambda: storage.list("old")).errno == errno.ENOENT

    def test_rename_never_replaces_a_folder(self, storage: Storage) -> None:
        if not storage.atomic_rename:
            pytest.skip("this storage has no rename of folders")
        put(storage, "one/file", b"1")
        put(storage, "two/file", b"22")
        assert refused(lambda: storage.rename("one", "two")).errno in NOT_EMPTY
        assert storage.read("one/file") == b"1"
        assert storage.read("two/file") == b"22"
        assert refused(lambda: storage.rename("nothing", "three")).errno == errno.ENOENT

    # Names and messages.

    @pytest.mark.parametrize("name", NAMES)
    def test_names(self, storage: Storage, name: str) -> None:
        put(storage, f"{name}/{name}", name.encode())
        put(storage, f"{name}/other", b"")
        assert [entry.name for entry in storage.list()] == [name]
        assert sizes(storage, name) == {name: len(name.encode()), "other": 0}
        assert storage.read(f"{name}/{name}") == name.encode()
        storage.rename(f"{name}/{name}", f"{name}/{name} 2")
        assert sizes(storage, name) == {f"{name} 2": len(name.encode()), "other": 0}
        storage.rename(f"{name}/{name} 2", f"{name}/{name}")
        storage.remove(f"{name}/other")
        assert sizes(storage, name) == {name: len(name.encode())}
        storage.remove(f"{name}/{name}")
        storage.remove_folder(name)
        assert not listed(storage, name)

    def test_errors_say_what_and_where(self, storage: Storage) -> None:
        error = refused(lambda: storage.open("checkpoint-1/model.safetensors"))
        assert isinstance(error, OSError)
        assert storage.at("checkpoint-1/model.safetensors").endswith(
            "/checkpoint-1/model.safetensors"
        )
        assert storage.at("checkpoint-1/model.safetensors") in str(error)
        assert storage.at("") == storage.url

    def test_free_bytes(self, storage: Storage) -> None:
        free = storage.free_bytes()
        assert free is None or free >= 0


def put(storage: Storage, path: str, data: bytes) -> None:
    storage.make_folder(path.rpartition("/")[0])
    storage.write(path, data)


def pattern(length: int, seed: int = 0) -> bytes:
    """Bytes that differ everywhere within a few hundred, and between seeds."""
    block = bytes((n * n + seed * 37 + (n >> 3)) % 251 for n in range(4001))
    return (block * (length // len(block) + 1))[:length]


def sizes(storage: Storage, folder: str) -> dict[str, int | None]:
    return {entry.name: entry.size for entry in storage.list(folder)}


def listed(storage: Storage, name: str) -> bool:
    try:
        return any(entry.name == name for entry in storage.list())
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return False


def refused(call: Callable[[], object]) -> StorageError:
    """The StorageError that `call` must raise."""
    with pytest.raises(StorageError) as caught:
        call()
    return caught.value
