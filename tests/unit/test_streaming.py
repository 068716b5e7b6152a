"""Large files stream to the disk while they are written: same bytes, and no failure of the disk is
lost."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import pytest
import torch

import ckptcore.storage.local as local
from ckptcore import CheckpointManager, NoSpace, StorageError, open_checkpoint

pytestmark = pytest.mark.skipif(local._sync_range is None, reason="Linux only")


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {f"w{n}": torch.randn(1_500_000, generator=generator) for n in range(4)}


@pytest.mark.parametrize("threads", [1, 4])
def test_streamed_files_have_the_same_bytes(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*args: int) -> int:
        calls.append(args[1:])
        return sync(*args)

    sync = local._sync_range
    # Not past the page cache: a tensor that happens to lie in memory as it will in the file would
    # not be streamed.
    with CheckpointManager(
        tmp_path, io_threads=threads, storage_options={"direct_io": False}
    ) as ckpt:
        ckpt.save(1, {"m": state()})
        monkeypatch.setattr(local, "STREAM_BYTES", 5 << 20)
        monkeypatch.setattr(local, "_sync_range", counted)
        info = ckpt.save(2, {"m": state()})
    whole, streamed = (tmp_path / f"checkpoint-{n}" / "m.safetensors" for n in (1, 2))
    assert whole.read_bytes() == streamed.read_bytes()
    assert open_checkpoint(info.url).verify() == []
    started = sorted(range_[:2] for range_ in calls if range_[2] == local.WRITE)
    waited = [range_[:2] for range_ in calls if range_[2] != local.WRITE]
    # Every byte is started once; all but the last 5 MiB are waited for before the fsync.
    assert sum(length for _, length in started) == whole.stat().st_size and len(
        set(started)
    ) == len(started)
    assert whole.stat().st_size - sum(length for _, length in waited) <= 5 << 20
    assert set(waited) < set(started)


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, StorageError), (errno.ENOSPC, NoSpace)])
@pytest.mark.parametrize("flags", ["starting", "waiting"])
def test_a_disk_that_fails_in_mock_calls_is_reported(
    number: int,
    kind: type[StorageError],
    flags: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A mock, because no disk here fails in write-back on demand.
    def failing(fd: int, offset: int, length: int, how: int) -> int:
        if (how == local.WRITE) != (flags == "starting"):
            return 0
        ctypes.set_errno(number)
        return -1

    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"m": {"w": torch.ones(3)}})
        monkeypatch.setattr(local, "STREAM_BYTES", 5 << 20)
        monkeypatch.setattr(local, "_sync_range", failing)
        with pytest.raises(kind) as caught:
            ckpt.save(2, {"m": state()})
        assert caught.value.errno == number
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_filesystems_without_it_are_fine_in_mock_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: int) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(local, "STREAM_BYTES", 5 << 20)
    monkeypatch.setattr(local, "_sync_range", lacking)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"m": state()})
        assert ckpt.verify() == []
