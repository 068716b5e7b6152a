"""Storages that want to be asked for more than one chunk at once: the same values, in fewer
reads."""

import os
from pathlib import Path

import pytest
import torch

from ckptcore import CheckpointManager
from ckptcore.loading.reader import STEP_BYTES
from ckptcore.storage.local import LocalStorage

MIB = 1 << 20


class Asked(LocalStorage):
    """A local folder that counts its reads of tensor files."""

    def __init__(self, root: Path, request_bytes: int) -> None:
        super().__init__(root)
        self.request_bytes = request_bytes
        self.reads: list[int] = []

    def open(self, path):
        reader = super().open(path)
        if path.endswith(".safetensors"):
            whole = reader.read_into

            def read_into(offset, buffers):
                self.reads.append(sum(len(buffer) for buffer in buffers))
                whole(offset, buffers)

            reader.read_into = read_into
        return reader


@pytest.mark.parametrize(
    ("request_bytes", "reads"),
    [(0, [4 * MIB, 4 * MIB, 4 * MIB, MIB]), (8 * MIB, [5 * MIB, 8 * MIB])],
)
@pytest.mark.parametrize("strided", [False, True])
def test_chunks_that_are_neighbours_come_together(
    tmp_path: Path, request_bytes: int, reads: list[int], strided: bool
) -> None:
    # 12 MiB and 1 MiB, in this order in the file.
    saved = {"a": torch.randn(1024, 3072), "b": torch.randn(512, 512)}
    CheckpointManager(tmp_path).save(1, {"m": saved})
    live = {
        name: torch.zeros(t.shape[::-1]).t() if strided else torch.zeros(t.shape)
        for name, t in saved.items()
    }
    storage = Asked(tmp_path, request_bytes)
    manager = CheckpointManager(storage, io_threads=1)
    manager.load({"m": live})
    assert all(torch.equal(live[name], saved[name]) for name in saved)
    large = sorted(n for n in storage.reads if n >= MIB)
    if strided or request_bytes:
        assert large == sorted(reads)
    else:  # straight into its place a chunk comes in steps that stay in the cache
        assert large == [STEP_BYTES] * (13 * MIB // STEP_BYTES)
    storage.reads.clear()
    assert manager.verify(1) == []
    assert sum(n for n in storage.reads if n >= MIB) == 13 * MIB
    data = bytearray((tmp_path / "checkpoint-1/m.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "checkpoint-1/m.safetensors").write_bytes(data)
    (problem,) = manager.verify(1)
    assert (problem.file, problem.kind, problem.tensor) == ("m.safetensors", "digest", "m/b")


def test_reads_and_writes_that_stop_early_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a signal, or at a limit of the system."""
    calls = {"preadv": 0, "pwritev": 0}

    def stopping(name: str) -> None:
        whole = getattr(os, name)

        def some(fd, buffers, offset):
            calls[name] += 1
            return whole(fd, [memoryview(buffers[0])[:1000]], offset)

        monkeypatch.setattr(os, name, some)

    storage = LocalStorage(tmp_path)
    data = [os.urandom(2500), b"", os.urandom(700), os.urandom(1300)]
    for name in calls:
        stopping(name)
    writer = storage.create("file", 4500)
    writer.write_at(0, [memoryview(part) for part in data])
    writer.close()
    assert (tmp_path / "file").read_bytes() == b"".join(data)
    buffers = [bytearray(1700), bytearray(2800)]
    reader = storage.open("file")
    reader.read_into(0, [memoryview(buffer) for buffer in buffers])
    reader.close()
    assert b"".join(buffers) == b"".join(data)
    assert calls == {"preadv": 5, "pwritev": 6}
