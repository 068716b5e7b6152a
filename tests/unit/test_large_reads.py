"""Storages that want to be asked for more than one chunk at once: the same values, in fewer
reads."""

from pathlib import Path

import pytest
import torch

from ckptcore import CheckpointManager
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
    if not (
        request_bytes == 0 and not strided
    ):  # straight into its place a chunk comes in steps that stay in the cache
        assert large == sorted(reads)
    storage.reads.clear()
    assert manager.verify(1) == []
    assert sum(n for n in storage.reads if n >= MIB) == 13 * MIB
    data = bytearray((tmp_path / "checkpoint-1/m.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "checkpoint-1/m.safetensors").write_bytes(data)
    (problem,) = manager.verify(1)
    assert (problem.file, problem.kind, problem.tensor) == ("m.safetensors", "digest", "m/b")
