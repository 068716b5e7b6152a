"""Memory of the device and pinned memory of the host after a thousand saves, many of which
fail."""

import gc
import random
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from ckptcore import CheckpointManager, KeepLast
from ckptcore.saving import devices
from ckptcore.testing.faults import FaultStorage

pytestmark = [pytest.mark.stress, pytest.mark.timeout(200)]
SAVES = 1000
KINDS = ["write_at", "create", "rename", "close", "list", "sync_folder", "make_folder"]


def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def locked():
    """Host memory that the driver has pinned; 0 where the system does not count it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("VmPin", "VmLck")))


@pytest.fixture
def root():
    folder = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    yield Path(folder) / "run"
    shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore::ckptcore.CheckpointWarning")
@pytest.mark.parametrize("staging", ["auto", "overlap"])
def test_memory_is_flat_over_saves_that_fail_at_random(root, device, staging, monkeypatch):
    chance = random.Random(7)
    weights = [torch.nn.Parameter(torch.randn(1 << 17, device=device)) for _ in range(8)]
    optimizer = torch.optim.AdamW(weights, fused=True)
    jobs = "ckptcore.saving.staging._copy_jobs"
    faults = FaultStorage(CheckpointManager(root).storage)
    found, failed = [], 0

    def fails(*_):
        raise chance.choice([RuntimeError, MemoryError, KeyboardInterrupt])("by chance")

    def step():
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()

    state = {"w": {str(n): w for n, w in enumerate(weights)}, "optimizer": optimizer}
    with CheckpointManager(faults, staging=staging, keep=KeepLast(1), on_error="warn") as ckpt:
        step()
        for number in range(1, SAVES + 1):
            step()
            how = chance.random()
            with monkeypatch.context() as patched:
                if how < 0.2:
                    patched.setattr(jobs, fails)
                elif how < 0.4:
                    faults.fail(chance.randrange(1, 4), kind=chance.choice(KINDS))
                try:
                    ckpt.save_async(number, state).result(60)
                except (Exception, KeyboardInterrupt):
                    failed += 1
            faults.clear()
            faults.log.clear()
            assert not devices._fences
            if number % 100 == 0:
                gc.collect()  # the state of the test before, too
                torch.cuda.synchronize()
                found.append((torch.cuda.memory_allocated(), resident(), locked()))
                print(staging, number, failed, *found[-1])
    assert SAVES // 5 < failed < SAVES // 2
    allocated, grown, pinned = zip(*found, strict=True)
    assert len(set(allocated)) == 1
    assert len(set(pinned)) == 1
    assert grown[-1] - grown[2] < 16 << 20
