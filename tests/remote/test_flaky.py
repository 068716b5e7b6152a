"""A network and a service that fail: what is tried again, what is given up, and that nothing half
done is ever published."""

import errno
import time

import pytest
import torch

from ckptcore import CheckpointManager, KeepLast, StorageError, open_storage


def same(found, expected):
    return (
        all(torch.equal(found["model"][name], tensor) for name, tensor in expected["model"].items())
        and found["progress"] == expected["progress"]
    )


def saves_and_loads(s3, proxy, through, state_of, count, rate):
    """`count` saves, each loaded again, by way of a proxy that fails: the manager, and the events
    of the saves."""
    events = []
    manager = CheckpointManager(
        s3.new_root(),
        storage_options=through(retry_deadline=30),
        keep=KeepLast(2),
        run_id="run",
        on_event=events.append,
    )
    proxy.rate = rate
    for step in range(1, count + 1):
        manager.save(step, state_of(step))
        report = manager.restore(state_of(-1))
        assert report.step == step
        assert same(report.values, state_of(step))
    proxy.rate = 0.0
    straight = CheckpointManager(manager.root, storage_options=s3.options, run_id="run")
    assert [info.step for info in straight.list()] == [count - 1, count]
    assert [straight.verify(info.step) for info in straight.list()] == [[], []]
    assert [entry.name for entry in straight.storage.list()] == [
        f"checkpoint-{step}" for step in (count - 1, count)
    ]
    return manager, [event for event in events if event.kind == "committed"]


def check_counts(manager, proxy, committed):
    refused = sum(proxy.faults[kind] for kind in ("500", "503", "429"))
    failed = sum(count for kind, count in proxy.faults.items() if kind != "delay")
    # Where a connection that was used before turns out to be dead, the HTTP client below sends the
    # request again itself.
    assert refused <= manager.storage.retries <= failed
    assert 0 < sum(event.retries for event in committed) <= manager.storage.retries
    assert len(proxy.asked) - failed <= manager.storage.requests <= len(proxy.asked)


def test_saves_and_loads_while_three_of_ten_requests_fail(s3, proxy, through, state_of):
    manager, committed = saves_and_loads(s3, proxy, through, state_of, count=6, rate=0.3)
    assert len(committed) == 6
    check_counts(manager, proxy, committed)


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_fifty_saves_and_loads_while_three_of_ten_requests_fail(s3, proxy, through, state_of):
    manager, committed = saves_and_loads(s3, proxy, through, state_of, count=50, rate=0.3)
    assert len(committed) == 50
    check_counts(manager, proxy, committed)
    assert {"drop", "lost", "500", "503", "429", "truncate"} <= set(proxy.faults)


@pytest.mark.parametrize("kind", ["drop", "lost", "500", "503", "429"])
def test_a_storage_that_only_fails_is_given_up_within_the_deadline(
    s3, proxy, through, state_of, kind
):
    root = s3.new_root()
    before = CheckpointManager(root, storage_options=s3.options, run_id="run")
    before.save(1, state_of(1))
    manager = CheckpointManager(root, storage_options=through(retry_deadline=0.5), run_id="run")
    proxy.rate, proxy.kinds = 1.0, (kind,)
    started = time.monotonic()
    with pytest.raises(StorageError, match="given up after") as caught:
        manager.save(2, state_of(2))
    assert time.monotonic() - started < 30
    assert type(caught.value) is StorageError
    assert caught.value.errno != errno.EIO  # which would say that what is stored is damaged
    assert caught.value.path is not None
    with pytest.raises(StorageError):
        manager.restore(state_of(-1))
    assert [info.step for info in before.list()] == [1]
    assert [entry.name for entry in before.storage.list()] == ["checkpoint-1"]


@pytest.mark.parametrize("name", ["put", "part", "complete", "begin"])
def test_a_storage_that_stops_taking_data_publishes_nothing(s3, proxy, through, name):
    """It fails in the middle of a save; with the network back, nothing of that is there."""
    root = s3.new_root()
    state = {"model": {"w": torch.arange(5 << 20, dtype=torch.float32), "small": torch.ones(3)}}
    manager = CheckpointManager(
        root, storage_options=through(retry_deadline=0.3), run_id="run", io_threads=2
    )
    proxy.rate, proxy.kinds = 1.0, ("503",)
    proxy.only = lambda asked, key: asked == name and not key.endswith(".partial")
    with pytest.raises(StorageError, match="SlowDown"):
        manager.save(1, state)
    assert (
        not s3.client()
        .list_objects_v2(Bucket=s3.bucket, Prefix=root.removeprefix("s3://runs/"))
        .get("Contents")
    )
    prefix = root.removeprefix("s3://runs/")
    begun = s3.client().list_multipart_uploads(Bucket=s3.bucket).get("Uploads", [])
    assert not [upload for upload in begun if upload["Key"].startswith(prefix)]
    proxy.rate = 0.0
    manager.save(1, state)
    assert manager.verify(1) == []


@pytest.mark.parametrize("size", [10, 9 << 20])
def test_an_object_whose_put_was_done_and_answer_lost_is_ours(s3, proxy, through, size):
    storage = open_storage(s3.new_root(), through(retry_deadline=10))
    lost = iter([True])
    proxy.rate, proxy.kinds = 1.0, ("lost",)
    proxy.only = lambda asked, key: asked in ("put", "complete") and next(lost, False)
    storage.write("folder/file", bytes(size))
    assert proxy.faults == {"lost": 1}
    assert [name for name, _ in proxy.asked].count("head") >= 1  # whose is it?
    assert storage.read("folder/file") == bytes(size)


def test_somebody_elses_object_is_not_taken_for_ours(s3, proxy, through):
    root = s3.new_root()
    storage = open_storage(root, through(retry_deadline=10))
    writer = storage.create("folder/file", 4)
    writer.write_at(0, [memoryview(b"mine")])
    open_storage(root, s3.options).write("folder/file", b"theirs")
    failing = iter([True])
    proxy.rate, proxy.kinds = 1.0, ("drop",)
    proxy.only = lambda asked, key: asked == "put" and next(failing, False)
    with pytest.raises(StorageError) as caught:
        writer.close()
    assert caught.value.errno == errno.EEXIST
    writer.abort()
    assert storage.read("folder/file") == b"theirs"


def test_a_broken_range_goes_on_where_it_broke(s3, proxy, through):
    data = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8).numpy().tobytes()
    storage = open_storage(s3.new_root(), through(retry_deadline=10))
    storage.write("folder/file", data)
    breaks = iter([True, True, False])
    proxy.rate, proxy.kinds = 1.0, ("truncate",)
    proxy.only = lambda asked, key: asked == "get" and next(breaks, False)
    with storage.open("folder/file") as reader:
        found = bytearray(2 << 20)
        reader.read_into(1000, [memoryview(found)[:77], memoryview(found)[77:]])
    assert bytes(found) == data[1000 : 1000 + (2 << 20)]
    assert storage.retries == 2
    assert [name for name, _ in proxy.asked].count("get") == 3
    # Half, and half of the rest, came before: what is asked for again is the rest alone.
    starts = [int(header.removeprefix("bytes=").partition("-")[0]) for header in proxy.ranges]
    assert starts[0] == 1000
    assert starts[0] < starts[1] < starts[2]


def test_an_object_that_was_replaced_is_not_read_in_part(s3):
    storage = open_storage(s3.new_root(), s3.options)
    storage.write("folder/file", b"a" * 100)
    with storage.open("folder/file") as reader:
        storage.remove("folder/file")
        storage.write("folder/file", b"b" * 100)
        found = bytearray(50)
        with pytest.raises(StorageError, match="PreconditionFailed"):
            reader.read_into(0, [memoryview(found)])
    assert found == bytes(50)


def test_what_is_refused_for_good_is_asked_once(s3, proxy, through):
    storage = open_storage(f"s3://no-such-bucket-{s3.port}/run", through(retry_deadline=10))
    with pytest.raises(StorageError, match="no bucket") as caught:
        storage.list()
    assert caught.value.errno == errno.ENXIO
    with pytest.raises(StorageError, match="NoSuchBucket"):
        storage.write("folder/file", b"x")
    assert [name for name, _ in proxy.asked if name != "head"] == ["list", "put"]
    assert storage.retries == 0
