"""Every storage that comes with the engine keeps the contract; so does a FaultStorage without
rules."""

import errno
import uuid
from pathlib import Path

import fsspec
import pytest

from ckptcore import StorageError, open_storage
from ckptcore.storage.local import LocalStorage
from ckptcore.storage.remote import FsspecStorage
from ckptcore.testing import FaultStorage
from ckptcore.testing.contract import StorageContract, put


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return open_storage(tmp_path / "root")

    def test_a_reader_keeps_its_file(self, storage):
        put(storage, "folder/file", b"the old one")
        with storage.open("folder/file") as reader:
            storage.remove("folder/file")
            put(storage, "folder/file", b"a new other")
            buffer = bytearray(11)
            reader.read_into(0, [memoryview(buffer)])
        assert buffer == b"the old one"

    def test_an_empty_folder_is_not_replaced_either(self, storage):
        put(storage, "one/file", b"1")
        storage.make_folder("two")
        with pytest.raises(StorageError) as caught:
            storage.rename("one", "two")
        assert caught.value.errno in (errno.EEXIST, errno.ENOTEMPTY)
        assert storage.read("one/file") == b"1"

    def test_urls(self, tmp_path):
        for url in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}"):
            storage = open_storage(url)
            assert type(storage) is LocalStorage
            assert storage.url == str(tmp_path)


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self):
        name = f"contract-{uuid.uuid4().hex}"
        yield open_storage(f"memory://{name}")
        fs = fsspec.filesystem("memory")
        if fs.exists(f"/{name}"):
            fs.rm(f"/{name}", recursive=True)

    def test_a_root_with_glob_characters(self, storage):
        inside = open_storage(f"{storage.url}/run[1]")
        put(inside, "folder/old", b"moved")
        inside.rename("folder/old", "folder/new")
        assert inside.read("folder/new") == b"moved"


class TestFsspecOverAFolder(StorageContract):
    """Object-store rules over a real folder: no rename of folders, parts in order, files that
    appear when complete."""

    @pytest.fixture
    def storage(self, tmp_path):
        return FsspecStorage(f"file://{tmp_path}/root", {})


class TestS3(StorageContract):
    """Over HTTP, from a server in another process."""

    @pytest.fixture
    def storage(self, s3):
        return open_storage(s3.new_root(), s3.options)


class TestS3AtTheTopOfABucket(StorageContract):
    @pytest.fixture
    def storage(self, s3):
        bucket = f"contract-{uuid.uuid4().hex}"
        s3.client().create_bucket(Bucket=bucket)
        return open_storage(f"s3://{bucket}", s3.options)


class TestFaultStorageOverLocal(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return FaultStorage(LocalStorage(tmp_path / "root"), quota=64 << 20)


class TestFaultStorageOverFsspec(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return FaultStorage(FsspecStorage(f"file://{tmp_path}/root", {}))


def test_unknown_schemes_are_refused():
    with pytest.raises(StorageError) as caught:
        open_storage("nosuchscheme://bucket/run")
    assert caught.value.errno == errno.EINVAL
    assert "nosuchscheme" in str(caught.value)


def test_nothing_local_appears_for_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = open_storage("memory://bucket-of-no-folder/run")
    put(storage, "folder/file", b"1")
    storage.remove("folder/file")
    assert list(Path().iterdir()) == []
