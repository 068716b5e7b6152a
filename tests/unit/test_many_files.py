"""However many files a checkpoint has: no more of them are open than threads work on them, and live
state is safe."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckptcore import CheckpointManager, StorageError, copy_checkpoint
from ckptcore.storage.local import LocalStorage

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux only")

THREADS = 2
FILES = 120


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """peak(call): the most descriptors that were open during the call, beside those before; all are
    closed after it."""
    seen: list[int] = []

    def counting(original):
        def counted(self, *args):
            made = original(self, *args)
            seen.append(open_files())
            return made

        return counted

    for name in ("create", "open"):
        monkeypatch.setattr(LocalStorage, name, counting(getattr(LocalStorage, name)))

    def measure(call: Callable[[], object]) -> int:
        before = open_files()
        seen.clear()
        call()
        assert len(seen) >= FILES and open_files() <= before
        return max(seen) - before

    return measure


def state(value: float, tensors: int = FILES) -> dict[str, torch.Tensor]:
    return {f"layer{n}": torch.full((3,), value + n) for n in range(tensors)}


def test_few_files_are_open_at_once_whatever_is_done(peak, tmp_path: Path) -> None:
    few = (
        2 * THREADS + 2
    )  # a thread's own, the way to it, and one that the next thread has taken up
    live = state(0.0)
    with CheckpointManager(tmp_path / "run", io_threads=THREADS) as ckpt:
        assert peak(lambda: ckpt.save(1, state(1.0))) <= few
        assert peak(lambda: ckpt.save_async(2, state(2.0)).result()) <= few
        for how in ({}, {"transactional": True}, {"strict": False}):
            assert peak(lambda how=how: ckpt.load(live, 1, **how)) <= few
        assert [t.tolist() for t in live.values()] == [[1.0 + n] * 3 for n in range(FILES)]
        assert peak(lambda: ckpt.restore(live)) <= few
        assert peak(lambda: ckpt.verify()) <= few
        assert (
            peak(lambda: copy_checkpoint(ckpt.latest().url, tmp_path / "copies", threads=THREADS))
            <= 2 * few
        )
    assert [t.tolist() for t in live.values()] == [[2.0 + n] * 3 for n in range(FILES)]


def test_one_component_in_many_files(peak, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptcore.saving.plan.MAX_FILE_BYTES", 1)
    monkeypatch.setattr(
        "ckptcore.saving.plan.plan_component.__kwdefaults__",
        {"max_file_bytes": 1, "header_limit": 10**6},
    )
    live = state(0.0)
    with CheckpointManager(tmp_path, io_threads=THREADS) as ckpt:
        assert peak(lambda: ckpt.save(1, {"model": state(1.0)})) <= 2 * THREADS + 2
        assert peak(lambda: ckpt.load({"model": live})) <= 2 * THREADS + 2
    assert [t.tolist() for t in live.values()] == [[1.0 + n] * 3 for n in range(FILES)]


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    """few_descriptors(n): this process may have `n` files open from now on, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_four_times_as_many_tensors_as_descriptors(few_descriptors, tmp_path: Path) -> None:
    few_descriptors(256)
    live = state(0.0, 1200)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state(1.0, 1200))
        assert ckpt.restore(live).step == 1
    assert [t.tolist() for t in live.values()] == [[1.0 + n] * 3 for n in range(1200)]


def test_without_any_descriptor_left_nothing_is_touched(few_descriptors, tmp_path: Path) -> None:
    live = state(0.0)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state(1.0))
        held = []
        few_descriptors(open_files() + 20)
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        try:
            with pytest.raises(StorageError) as refused:
                ckpt.load(live)
            with pytest.raises(StorageError, match="ulimit -n"):
                ckpt.save(2, live)
        finally:
            for fd in held:
                os.close(fd)
        assert "overwritten" not in str(refused.value)
        assert os.listdir(tmp_path) == ["checkpoint-1"]
        assert [t.tolist() for t in live.values()] == [[float(n)] * 3 for n in range(FILES)]
        ckpt.load(live)
    assert [t.tolist() for t in live.values()] == [[1.0 + n] * 3 for n in range(FILES)]


def test_a_failed_save_of_many_files_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, made = LocalStorage.create, []

    def fails(self, path, size):
        if path.endswith("layer77.safetensors"):
            raise StorageError("no", path=path)
        made.append(path)
        return create(self, path, size)

    monkeypatch.setattr(LocalStorage, "create", fails)
    before = open_files()
    with CheckpointManager(tmp_path, io_threads=THREADS) as ckpt:
        with pytest.raises(StorageError):
            ckpt.save(1, state(1.0))
        assert made and list(tmp_path.iterdir()) == [] and open_files() == before
        monkeypatch.undo()
        assert ckpt.save(1, state(1.0)).status == "committed"
