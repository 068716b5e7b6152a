"""Writes past the page cache: the same bytes in the file, whatever lies where, and a way back where
it is not possible."""

import errno
import mmap
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import CheckpointManager, open_checkpoint
from ckptcore.storage import local
from ckptcore.storage.local import PAGE, LocalStorage

MIB = 1 << 20


@pytest.fixture
def direct(tmp_path, monkeypatch):
    """What was written past the page cache, as (offset, length); skipped where the filesystem
    cannot do that."""
    probe = os.open(tmp_path, os.O_RDONLY)
    os.close(probe)
    written = []
    real = os.pwrite

    def pwrite(fd, data, offset):
        done = real(fd, data, offset)
        written.append((offset, done))
        return done

    monkeypatch.setattr(local.os, "pwrite", pwrite)
    memory = mmap.mmap(-1, PAGE)
    try:
        fd = os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        real(fd, memory, 0)
        os.close(fd)
    except (OSError, AttributeError):
        pytest.skip("this filesystem has no O_DIRECT")
    (tmp_path / "probe").unlink()
    return written


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 3 * MIB), max_size=6),
    total=st.integers(1, 3 * MIB),
    head=st.sampled_from([0, 1, 4096, 5000]),
    shift=st.sampled_from([0, 64, 4095]),
    parts=st.integers(1, 5),
)
def test_the_file_is_what_was_written(tmp_path_factory, cuts, total, head, shift, parts):
    """Any cutting of any bytes into writes and buffers, congruent with the file's pages or not."""
    folder = tmp_path_factory.mktemp("direct")
    storage = LocalStorage(folder)
    memory = np.frombuffer(mmap.mmap(-1, total + 3 * PAGE), dtype=np.uint8)
    start = head % PAGE + shift
    memory[: total + start] = np.random.default_rng(total).integers(
        0, 256, total + start, dtype=np.uint8
    )
    header = os.urandom(head)
    writer = storage.create("f", head + total)
    edges = sorted({0, total, *(c for c in cuts if c < total)})
    for a, b in pairwise(edges):
        pieces = np.array_split(memory[start + a : start + b], parts)
        buffers = [memoryview(piece) for piece in pieces]
        if a == 0 and head:
            buffers.insert(0, memoryview(header))
        writer.write_at(0 if a == 0 else head + a, buffers)
    writer.close()
    assert (folder / "f").read_bytes() == header + memory[start : start + total].tobytes()


def test_a_background_save_writes_whole_pages_directly(tmp_path, direct):
    tensors = {
        f"t{i}": torch.randint(0, 256, (size,), dtype=torch.uint8)
        for i, size in enumerate([5 * MIB + 1, 3, 4 * MIB, 77, 2 * MIB - 5])
    }
    with CheckpointManager(tmp_path / "root") as ckpt:
        ckpt.save_async(1, {"m": tensors}).result(30)
        total = sum(t.nbytes for t in tensors.values())
        assert sum(length for _, length in direct) > 0.95 * total
        assert all(offset % PAGE == 0 and length % PAGE == 0 for offset, length in direct)
        direct.clear()
        ckpt.save_async(2, {"m": tensors}).result(30)
        assert direct  # the pool stays where it is
    view = open_checkpoint(tmp_path / "root" / "checkpoint-2")
    for name, tensor in tensors.items():
        assert bytes(view.read(f"m/{name}").tobytes()) == tensor.numpy().tobytes()


def test_direct_io_can_be_turned_off(tmp_path, direct):
    with CheckpointManager(tmp_path / "root", storage_options={"direct_io": False}) as ckpt:
        ckpt.save_async(1, {"m": {"t": torch.ones(MIB)}}).result(30)
    assert direct == []


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_to_be_kept_goes_through_the_page_cache_and_stays(
    tmp_path, direct, monkeypatch, keeps
):
    dropped = []
    monkeypatch.setattr(local, "STREAM_BYTES", 1 * MIB)
    monkeypatch.setattr(local.os, "posix_fadvise", lambda *given: dropped.append(given))
    options = {"keep_cached": True} if keeps else {"direct_io": False}
    live = torch.randn(4 * MIB)
    with CheckpointManager(tmp_path / "root", storage_options=options) as ckpt:
        ckpt.save_async(1, {"m": {"t": live}}).result(30)
        assert ckpt.verify(1) == []
    assert direct == []
    assert (dropped == []) == keeps


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT], ids=["EINVAL", "EFAULT"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_filesystem_that_refuses_gets_ordinary_writes(tmp_path, monkeypatch, number, at):
    calls, real = [], os.pwrite

    def pwrite(fd, data, offset):
        calls.append(offset)
        if len(calls) > at:
            raise OSError(number, os.strerror(number))
        return real(fd, data, offset)

    monkeypatch.setattr(local.os, "pwrite", pwrite)
    live = torch.randn(6 * MIB)
    with CheckpointManager(tmp_path / "root", io_threads=1) as ckpt:
        ckpt.save_async(1, {"m": {"t": live}}).result(30)
        assert len(calls) <= at + 1  # asked once, not for every piece
        restored = {"m": {"t": torch.zeros(6 * MIB)}}
        ckpt.restore(restored)
    assert torch.equal(restored["m"]["t"], live)


def test_a_short_direct_write_is_completed(tmp_path, monkeypatch, direct):
    real = os.pwrite
    monkeypatch.setattr(
        local.os,
        "pwrite",
        lambda fd, data, offset: real(fd, data[: len(data) // 2 // 512 * 512], offset),
    )
    live = torch.randn(4 * MIB + 7)
    with CheckpointManager(tmp_path / "root") as ckpt:
        ckpt.save_async(1, {"m": {"t": live}}).result(30)
        assert ckpt.verify(1) == []
        restored = {"m": {"t": torch.zeros(4 * MIB + 7)}}
        ckpt.restore(restored)
    assert torch.equal(restored["m"]["t"], live)


def test_a_full_disk_is_told_by_a_direct_write_too(tmp_path, monkeypatch):
    def full(fd, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local.os, "pwrite", full)
    with CheckpointManager(tmp_path / "root", on_error="warn") as ckpt:
        with pytest.warns(UserWarning, match="No space left"):
            ckpt.save_async(1, {"m": {"t": torch.ones(MIB)}}).wait(30)
            ckpt.wait()
        assert ckpt.failed_steps == (1,)
    assert [entry.name for entry in (tmp_path / "root").iterdir()] == []
