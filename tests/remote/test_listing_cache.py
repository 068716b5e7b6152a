"""B27: filesystems cache listings; what others do is seen at the next call all the same."""

import threading
import uuid

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from ckptcore import CheckpointManager, KeepLast, open_storage


class Cached(AbstractFileSystem):
    """One storage for all instances; each keeps its own listings, and the sizes in them, for
    ever."""

    protocol = "cached"
    root_marker = "/"
    cachable = False
    behind = MemoryFileSystem(skip_instance_cache=True)

    def __init__(self, **options):
        super().__init__(**options)
        self.dircache = self.seen = {}  # a plain dict, as that of hf:// is

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("cached://", "memory://"))

    def ls(self, path, detail=True, refresh=False, **kwargs):
        path = self._strip_protocol(path)
        found = self.seen.get(path)
        if refresh or found is None:
            found = self.seen[path] = self.behind.ls(path, detail=True)
        return found if detail else [item["name"] for item in found]

    def invalidate_cache(self, path=None):
        self.seen.clear()

    def info(self, path, **kwargs):
        # As s3fs does: what a listing said is believed.
        path = self._strip_protocol(path)
        for item in self.seen.get(self._parent(path), ()):
            if item["name"] == path:
                return item
        return self.behind.info(path)

    def _open(self, path, mode="rb", **kwargs):
        return self.behind.open(path, mode)

    def pipe_file(self, path, value, **kwargs):
        self.behind.pipe_file(path, value)

    def cat_file(self, path, start=None, end=None, **kwargs):
        return self.behind.cat_file(path, start=start, end=end)

    def cp_file(self, one, two, **kwargs):
        self.behind.cp_file(one, two)

    def rm_file(self, path):
        self.behind.rm_file(path)

    def makedirs(self, path, exist_ok=False):
        self.behind.makedirs(path, exist_ok=exist_ok)

    def rmdir(self, path):
        self.behind.rmdir(path)


fsspec.register_implementation("cached", Cached, clobber=True)


def state(value=-1.0):
    return {"m": {"a": torch.full((3,), float(value)), "n": value}}


@pytest.fixture(params=["cached", "s3"])
def two(request, s3):
    """Two managers in the place of two processes: each with a filesystem of its own over the same
    storage."""
    if request.param == "s3":
        root, options = (
            s3.new_root(),
            [{**s3.options, "listings_expiry_time": 1000 + n} for n in range(2)],
        )
    else:
        root, options = f"cached://{uuid.uuid4().hex}/run", [{}, {}]
    a, b = (CheckpointManager(root, storage_options=how, run_id="run") for how in options)
    assert a.storage.fs is not b.storage.fs
    return a, b


def test_b27_what_another_process_commits_and_deletes_is_seen_at_the_next_call(two):
    a, b = two
    b.save(10, state(10))
    assert [info.step for info in a.list()] == [10]
    b.save(20, state(20))
    assert a.latest().step == 20
    b.delete(10)
    assert [info.step for info in a.list()] == [20]
    live = state()
    report = a.restore(live)
    assert (report.step, live["m"]["a"].tolist()) == (20, [20.0] * 3)
    b.delete(20)
    assert a.latest() is None
    assert a.restore(state()).fresh


def test_b27_a_file_that_was_written_longer_is_read_whole(two):
    a, b = two
    b.storage.make_folder("folder")
    b.storage.write("folder/file", b"short")
    assert a.storage.read("folder/file") == b"short"
    assert [(entry.name, entry.size) for entry in a.storage.list("folder")] == [("file", 5)]
    b.storage.remove("folder/file")
    b.storage.write("folder/file", b"very much longer")
    with a.storage.open("folder/file") as reader:
        found = bytearray(reader.size)
        reader.read_into(0, [memoryview(found)])
    assert found == b"very much longer"
    assert a.storage.read("folder/file") == b"very much longer"
    assert [(entry.name, entry.size) for entry in a.storage.list("folder")] == [("file", 16)]


def test_b27_retention_counts_what_is_there_now(two):
    a, b = two
    keeping = CheckpointManager(a.storage, keep=KeepLast(2), run_id="run")
    keeping.list()
    b.save(10, state(10))
    b.save(20, state(20))
    b.delete(10)
    keeping.save(30, state(30))  # from a cached listing 20 would be missing, or 10 be counted
    assert [info.step for info in b.list()] == [20, 30]
    keeping.save(40, state(40))
    assert [info.step for info in b.list()] == [30, 40]


def test_b27_an_overwrite_is_verified_as_it_is(two):
    a, b = two
    b.save(10, state(10))
    assert a.verify(10) == []
    b.save(10, {"m": {"a": torch.arange(5000.0), "n": 1}}, overwrite=True)
    assert a.verify(10) == []
    assert [info.size_bytes for info in a.list()] == [info.size_bytes for info in b.list()]


def test_b27_threads_that_list_at_the_same_time_see_what_is_there(two):
    a, b = two
    missed = []
    written = [0]
    done = threading.Event()

    def look():
        while not done.is_set():
            at_least = written[0]
            there = len(a.storage.list("folder"))
            if there < at_least:
                missed.append((at_least, there))

    b.storage.make_folder("folder")
    b.storage.write("folder/file-0", b"")
    written[0] = 1
    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1, 20):
        b.storage.write(f"folder/file-{number}", b"")
        written[0] += 1
    done.set()
    for thread in threads:
        thread.join(60)
    assert missed == []


def test_the_fake_does_cache():
    root = f"cached://{uuid.uuid4().hex}"
    storage, fs = open_storage(root), Cached()
    storage.make_folder("folder")
    storage.write("folder/a", b"1")
    assert len(fs.ls(f"{root}/folder")) == 1
    storage.write("folder/b", b"1")
    assert len(fs.ls(f"{root}/folder")) == 1
    assert len(storage.list("folder")) == 2
