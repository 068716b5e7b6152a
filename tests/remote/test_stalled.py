"""Servers that neither answer nor break the connection: they are left, in time, and nothing half
done is published."""

import errno
import gc
import socket
import threading
import warnings

import pytest
import torch

from ckptcore import CheckpointManager, StorageError

DEADLINE = 60.0


def within_deadline(call):
    """What `call` returns or raises, as long as it does so in time; a server that is waited for
    without end fails a test."""
    outcome = []

    def run():
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert outcome, f"it did not come back within {DEADLINE} s"
    return outcome[0]


def state_of_bytes(size):
    return {"model": {"w": torch.arange(size >> 2, dtype=torch.int32)}}


def names_and_uploads(s3, root):
    prefix = root.removeprefix(f"s3://{s3.bucket}/")
    found = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix=prefix).get("Contents", [])
    begun = s3.client().list_multipart_uploads(Bucket=s3.bucket, Prefix=prefix).get("Uploads", [])
    return [item["Key"].removeprefix(prefix).strip("/") for item in [*found, *begun]]


@pytest.mark.parametrize(
    ("stalled", "size"), [("put", 7 << 20), ("part", 40 << 20)]
)  # sockets take 4 MiB in unread
def test_a_server_that_stops_reading(s3, proxy, through, stalled, size):
    root, state = s3.new_root(), state_of_bytes(size)
    ckpt = CheckpointManager(root, storage_options=through(retry_deadline=1), run_id="run")
    ckpt.save(1, {"model": {"w": torch.ones(3)}})
    before = names_and_uploads(s3, root)
    proxy.rate, proxy.kinds = 1.0, ("stall",)
    proxy.only = lambda name, key: name == stalled and key.endswith("-2/model.safetensors")
    error = within_deadline(lambda: ckpt.save(2, state))
    assert type(error) is StorageError
    assert error.path == "checkpoint-2/model.safetensors"
    assert error.errno != errno.EIO  # which would say that what is stored is damaged
    assert "given up after" in str(error)
    assert proxy.faults["stall"] >= 2  # it was tried again
    assert [info.step for info in ckpt.list()] == [1]
    assert names_and_uploads(s3, root) == before
    proxy.rate = 0.0
    assert within_deadline(lambda: ckpt.save(2, state)).step == 2
    assert ckpt.verify(2) == []
    live = state_of_bytes(size)
    live["model"]["w"].zero_()
    assert ckpt.restore(live).step == 2
    assert torch.equal(live["model"]["w"], state["model"]["w"])


def test_a_server_that_lets_in_and_never_answers(s3):
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = s3.options_at(server.getsockname()[1], retry_deadline=1)
        for ask in (lambda ckpt: ckpt.list(), lambda ckpt: ckpt.save(1, state_of_bytes(40))):
            ckpt = CheckpointManager(s3.new_root(), storage_options=options)
            error = within_deadline(lambda ckpt=ckpt, ask=ask: ask(ckpt))
            assert type(error) is StorageError
            assert error.errno != errno.EIO
            assert ckpt.root in str(error) and "given up after" in str(error)


def test_parts_are_sent_without_a_warning(s3):
    """aiohttp warns of large bodies, and where warnings are errors that would end the save."""
    ckpt = CheckpointManager(
        s3.new_root(), storage_options=s3.options_at(s3.port, retry_deadline=5)
    )
    gc.collect()  # what others have left open is not to be told here
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        ckpt.save(1, state_of_bytes(24 << 20))
        assert ckpt.verify(1) == []
