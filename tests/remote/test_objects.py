"""Objects appear whole or not at all; how many requests that takes, and how much memory."""

import errno
import json
import os
import subprocess
import sys
import threading
from collections import Counter

import pytest
import torch

from ckptcore import CheckpointExists, CheckpointManager, KeepLast, StorageError, open_storage
from ckptcore.storage.remote import PIECE_BYTES, FsspecStorage
from ckptcore.storage.s3 import BUFFERED_BYTES, PartBuffers

MIB = 1 << 20


def keys(s3, root):
    found = s3.client().list_objects_v2(
        Bucket=s3.bucket, Prefix=root.removeprefix(f"s3://{s3.bucket}/")
    )
    return [item["Key"].rpartition("/run/")[2] for item in found.get("Contents", ())]


def begun(s3, root):
    prefix = root.removeprefix(f"s3://{s3.bucket}/")
    uploads = s3.client().list_multipart_uploads(Bucket=s3.bucket).get("Uploads", ())
    return [upload["Key"] for upload in uploads if upload["Key"].startswith(prefix)]


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES])
def test_nothing_is_there_before_it_is_complete(s3, size):
    root = s3.new_root()
    storage = open_storage(root, s3.options)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()
    writer = storage.create("folder/file", size)
    for at in range(0, size, MIB):
        writer.write_at(
            at, [memoryview(data)[at : at + 1000], memoryview(data)[at + 1000 : at + MIB]]
        )
        assert keys(s3, root) == []
    writer.close()
    assert keys(s3, root) == ["folder/file"]
    assert begun(s3, root) == []
    assert storage.read("folder/file") == data
    plain = s3.client().get_object(
        Bucket=s3.bucket, Key=f"{root.removeprefix('s3://runs/')}/folder/file"
    )
    assert plain["Body"].read() == data


def test_parts_are_sent_by_two_clients_that_all_storages_share(s3):
    one, other = (open_storage(s3.new_root(), s3.options) for _ in range(2))
    data = torch.randint(0, 256, (3 * PIECE_BYTES + 1,), dtype=torch.uint8).numpy().tobytes()
    one.write("folder/file", data)
    assert one.requests == 7  # is it there? begin, four parts, complete
    assert one.read("folder/file") == data
    assert [sender._s3 is not None for sender in one._senders] == [True, True]
    assert len({id(sender.loop) for storage in (one, other) for sender in storage._senders}) == 2


def test_a_file_that_is_not_what_was_announced_is_not_published(s3):
    root = s3.new_root()
    storage = open_storage(root, s3.options)
    for size in (10, 2 * PIECE_BYTES):
        writer = storage.create("folder/file", size)
        writer.write_at(0, [memoryview(bytes(size - 1))])
        with pytest.raises(StorageError, match="were written of"):
            writer.close()
        with pytest.raises(StorageError, match="more than"):
            writer.write_at(size - 1, [memoryview(b"12")])
        with pytest.raises(StorageError, match="is next"):
            writer.write_at(0, [memoryview(b"1")])
        writer.abort()
        assert (keys(s3, root), begun(s3, root)) == ([], [])


def test_what_a_killed_process_had_begun_goes_with_the_folder(s3):
    root = s3.new_root()
    storage = open_storage(root, {**s3.options, "retry_deadline": 0.3})
    storage.write("folder/attempt", b"")
    writer = storage.create("folder/file", 2 * PIECE_BYTES + 1)
    writer.write_at(0, [memoryview(bytes(PIECE_BYTES + 1))])
    other = storage.create("folder-2/file", 2 * PIECE_BYTES)
    other.write_at(0, [memoryview(bytes(PIECE_BYTES + 1))])
    assert len(begun(s3, root)) == 2
    storage.remove_folder("folder")  # not while something is in it
    assert len(begun(s3, root)) == 2
    storage.remove("folder/attempt")
    storage.remove_folder("folder")
    assert [key.rpartition("/run/")[2] for key in begun(s3, root)] == ["folder-2/file"]
    with pytest.raises(StorageError):
        writer.write_at(PIECE_BYTES + 1, [memoryview(bytes(PIECE_BYTES))])
        writer.close()
    with pytest.raises(StorageError, match="NoSuchKey"):
        storage.read(
            "folder/file"
        )  # an answer: it is not the whole storage that fails, so that what follows is tried
    writer.abort()
    other.abort()
    assert (keys(s3, root), begun(s3, root)) == ([], [])


def test_part_buffers_are_bounded_and_used_again():
    buffers = PartBuffers(limit=3 * PIECE_BYTES)
    held = [buffers.take(PIECE_BYTES) for _ in range(3)]
    got = threading.Event()
    waiting = threading.Thread(target=lambda: (buffers.take(PIECE_BYTES), got.set()))
    waiting.start()
    assert not got.wait(0.05)
    first = held.pop()
    buffers.give(first)
    assert got.wait(60)
    waiting.join(60)
    big = PartBuffers(limit=10)
    assert len(big.take(100)) == 100  # one is always to be had
    assert BUFFERED_BYTES <= 96 * MIB


def test_of_two_jobs_that_commit_one_step_one_succeeds(s3, state_of):
    """The second one finds out at the last moment: its look at the place was right, and then
    somebody was quicker."""
    root, name = s3.new_root(), "checkpoint-1/checkpoint_manifest.json"
    first = CheckpointManager(s3.new_root(), storage_options=s3.options, run_id="one")
    first.save(1, state_of(1))
    theirs = first.storage.read(name)
    second = CheckpointManager(root, storage_options=s3.options, run_id="two")
    create = second.storage.create

    def slower(path, size):
        if path == name:
            open_storage(root, s3.options).write(name, theirs)
        return create(path, size)

    second.storage.create = slower
    with pytest.raises(CheckpointExists, match="another job has just saved"):
        second.save(1, state_of(1))
    assert second.storage.read(name) == theirs


def test_a_server_that_does_not_know_create_only(s3, proxy, through, state_of):
    """It says 501, once; from then on names are looked at before."""
    proxy.refuse_conditions = True
    storage = open_storage(s3.new_root(), through(retry_deadline=5))
    assert storage.create_only
    storage.write("folder/file", b"first")
    assert not storage.create_only
    with pytest.raises(StorageError) as caught:
        storage.write("folder/file", b"second")
    assert caught.value.errno == errno.EEXIST
    assert storage.read("folder/file") == b"first"
    storage.write("folder/other", b"third")
    assert storage.retries == 0
    assert proxy.counted() == {"put": 3, "head": 3, "get": 1}


def test_requests_of_a_run(s3, proxy, through, state_of):
    manager = CheckpointManager(
        s3.new_root(), storage_options=through(), keep=KeepLast(2), run_id="run"
    )
    costs = []
    for step in range(1, 6):
        proxy.asked.clear()
        manager.save(step, state_of(step))
        costs.append(proxy.counted())
    # The mark of the attempt, a tensor file, an index, the manifest: one put for each and no
    # question before it.
    assert costs[0] == {"list": 5, "put": 4, "delete": 1}
    # With the older checkpoints' manifests read, and one of them deleted: no more from there on,
    # however many came before.
    assert costs[3] == costs[4]
    assert costs[4] == {
        "list": 8,
        "put": 5,
        "get": 3,
        "delete": 4,
        "delete many": 1,
        "list uploads": 1,
    }
    proxy.asked.clear()
    assert manager.latest().step == 5
    assert proxy.counted() == {"list": 1, "get": 2}
    proxy.asked.clear()
    manager.restore(state_of(-1))
    found = proxy.counted()
    assert found["list"] == 1
    assert set(found) == {"list", "get", "head"}
    assert manager.storage.retries == 0


def test_another_process_sees_a_commit_at_once(s3, state_of):
    """A child process lists, waits to be told that something was committed, and lists again."""
    root = s3.new_root()
    program = """
import sys, json
from ckptcore import CheckpointManager
manager = CheckpointManager(sys.argv[1], storage_options=json.loads(sys.argv[2]), run_id="run")
for _ in range(3):
    print(json.dumps([info.step for info in manager.list()]), flush=True)
    sys.stdin.readline()
"""
    manager = CheckpointManager(root, storage_options=s3.options, run_id="run")
    command = [sys.executable, "-c", program, root, json.dumps(s3.options)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            found = [json.loads(child.stdout.readline())]
            for act in (
                lambda: manager.save(1, state_of(1)),
                lambda: (manager.save(2, state_of(2)), manager.delete(1)),
            ):
                act()
                child.stdin.write("\n")
                child.stdin.flush()
                found.append(json.loads(child.stdout.readline()))
        finally:
            child.kill()
    assert found == [[], [1], [2]]


def test_a_forked_child_makes_its_own_connections(s3):
    storage = open_storage(s3.new_root(), s3.options)
    storage.write("folder/a", b"of the parent")
    pid = os.fork()
    if pid == 0:
        try:
            storage.write("folder/b", storage.read("folder/a"))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert storage.read("folder/b") == b"of the parent"


def test_a_save_in_the_background_at_the_end_of_a_program(s3, run_script):
    """By the name of a host, which is looked up for each connection while the interpreter is on its
    way out."""
    root = s3.new_root()
    anew = {"connector_args": {"use_dns_cache": False}}
    options = {**s3.options, "endpoint_url": f"http://localhost:{s3.port}", "config_kwargs": anew}
    program = """
import sys, json, torch
from ckptcore import CheckpointManager
manager = CheckpointManager(sys.argv[1], storage_options=json.loads(sys.argv[2]))
manager.save_async(7, {"m": {"w": torch.ones(3_000_000)}})
"""
    done = run_script(program, root, json.dumps(options))
    assert done.returncode == 0, done.stderr[-2000:]
    manager = CheckpointManager(root, storage_options=s3.options)
    assert [info.step for info in manager.list()] == [7]
    assert manager.verify(7) == []


def test_a_filesystem_that_renames_shows_no_half_file(tmp_path):
    storage = FsspecStorage(f"file://{tmp_path}/root", {})
    storage.make_folder("folder")
    for size in (100, PIECE_BYTES + 100):
        writer = storage.create("folder/file", size)
        writer.write_at(0, [memoryview(bytes(size - 10))])
        assert not (tmp_path / "root/folder/file").exists()
        writer.abort()
        assert list((tmp_path / "root/folder").iterdir()) == []
        writer = storage.create("folder/file", size)
        writer.write_at(0, [memoryview(bytes(size))])
        writer.close()
        assert Counter(entry.name for entry in storage.list("folder")) == {"file": 1}
        assert storage.read("folder/file") == bytes(size)
        storage.remove("folder/file")


def test_what_a_killed_upload_left_beside_its_place_is_swept(tmp_path, state_of):
    storage = FsspecStorage(f"file://{tmp_path}/root", {})
    manager = CheckpointManager(storage, run_id="run")
    manager.save(1, state_of(1))
    left = tmp_path / "root/checkpoint-2/upload.00112233aabbccdd.partial"
    left.parent.mkdir()
    left.write_bytes(b"half of")
    (left.parent / "mine.txt").write_text("foreign")
    with pytest.raises(CheckpointExists, match=r"mine\.txt"):
        manager.save(2, state_of(2))
    (left.parent / "mine.txt").unlink()
    manager.save(2, state_of(2))
    assert not left.exists()
    assert manager.verify(2) == []
