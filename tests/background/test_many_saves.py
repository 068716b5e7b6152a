"""What a process holds after hundreds of saves, many of which fail: no more than after the first
ones."""

import gc
import random
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from ckptcore import CheckpointManager, KeepLast
from ckptcore.testing.faults import FaultStorage

KINDS = ["write_at", "create", "rename", "close", "list", "sync_folder", "make_folder"]


@pytest.fixture
def quick_root():
    """A folder in memory where there is one: what counts here is not the disk."""
    folder = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    yield Path(folder) / "run"
    shutil.rmtree(folder)


def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@pytest.mark.filterwarnings("ignore::ckptcore.CheckpointWarning")
@pytest.mark.parametrize(
    "saves", [60, pytest.param(1000, marks=[pytest.mark.stress, pytest.mark.timeout(400)])]
)
def test_memory_is_flat_over_saves_that_fail_at_random(quick_root, saves, monkeypatch):
    chance = random.Random(7)
    weights = [torch.nn.Parameter(torch.randn(1 << 16)) for _ in range(8)]
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = {"w": {str(n): w for n, w in enumerate(weights)}, "optimizer": optimizer}
    faults = FaultStorage(CheckpointManager(quick_root).storage)
    found, failed = [], []

    def fails(*_):
        raise chance.choice([RuntimeError, MemoryError, KeyboardInterrupt])("by chance")

    with CheckpointManager(faults, keep=KeepLast(1), on_error="warn") as ckpt:
        for number in range(1, saves + 1):
            how = chance.random()
            with monkeypatch.context() as patched:
                if how < 0.2:
                    patched.setattr("ckptcore.saving.staging._copy_jobs", fails)
                elif how < 0.4:
                    faults.fail(chance.randrange(1, 4), kind=chance.choice(KINDS))
                try:
                    ckpt.save_async(number, state).result(60)
                except (Exception, KeyboardInterrupt) as error:
                    failed.append(type(error))
            faults.clear()
            faults.log.clear()
            if number % (saves // 5) == 0:
                gc.collect()
                found.append((len(gc.get_objects()), threading.active_count(), resident()))
        assert ckpt.save_async(saves + 1, state).result(60).step == saves + 1
    assert saves // 5 < len(failed) < saves // 2, found
    assert {KeyboardInterrupt} < set(failed)
    objects, threads, held = zip(*found[1:], strict=True)
    assert max(objects) - min(objects) < 500
    assert len(set(threads)) == 1
    assert held[-1] - held[0] < 8 << 20
    assert len(list(quick_root.iterdir())) == 1
