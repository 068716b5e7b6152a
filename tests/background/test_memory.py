"""What saves in the background cost: one copy of the state, taken once, however many saves there
are."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest

MIB = 1 << 20
PROGRAM = """
import json, sys, torch
from ckptcore import CheckpointManager, KeepLast

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

root, mib, saves, warm = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
# of 1/16 each, and many small ones
model = {f"w{n}": torch.zeros(mib * 1024 * 16) for n in range(15)}
model |= {f"s{n}": torch.zeros(mib * 16) for n in range(1000)}
model["rest"] = torch.zeros(mib * 16 * 24)
step = torch.tensor(0)
resident, peaks = [], []
with CheckpointManager(root, keep=KeepLast(1), io_threads=2) as ckpt:
    baseline = status("VmRSS")
    forget_peak()
    if warm:
        ckpt.prewarm({"m": model, "step": {"n": step}})
    for number in range(1, saves + 1):
        for tensor in model.values():
            tensor.add_(1)
        step.add_(1)
        handle = ckpt.save_async(number, {"m": model, "step": {"n": step}})
        for tensor in model.values():
            tensor.mul_(1)
        handle.result(60)
        resident.append(status("VmRSS") - baseline)
        peaks.append(status("VmHWM") - baseline)
    found = {"m": {"w3": torch.zeros(mib * 1024 * 16), "rest": torch.zeros(mib * 16 * 24)}}
    ckpt.load(found, keys=["m/w3", "m/rest"])
    after = [set(t.tolist()[:: 1 << 14]) == {float(saves)} for t in found["m"].values()]
del found
closed = status("VmRSS") - baseline
print(json.dumps({"resident": resident, "peaks": peaks, "right": after, "closed": closed,
                  "state": sum(t.nbytes for t in model.values())}))
"""


@pytest.fixture
def quick_root():
    """A folder in memory where there is one: what counts here is not the disk."""
    folder = tempfile.mkdtemp(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None, prefix="ckptcore-test-"
    )
    yield Path(folder) / "run"
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("mib", "saves", "warm"),
    [
        (64, 25, False),
        pytest.param(64, 50, False, marks=pytest.mark.stress),
        pytest.param(64, 50, True, marks=pytest.mark.stress),
        pytest.param(512, 30, False, marks=[pytest.mark.stress, pytest.mark.timeout(600)]),
    ],
)
def test_memory_is_one_copy_and_stays_so(quick_root, run_script, mib, saves, warm):
    done = run_script(PROGRAM, quick_root, mib, saves, warm, timeout=55 if mib < 100 else 500)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    state = found["state"]
    assert abs(state - mib * MIB) < MIB and found["right"] == [True, True]
    peak, resident = max(found["peaks"]), found["resident"]
    first, last = max(resident[:10]), max(resident[-10:])
    print(
        f"\nstate {state / MIB:.1f} MiB, {saves} saves: peak {peak / MIB:.1f} MiB above the "
        "baseline, "
        f"resident {first / MIB:.1f} (first 10), {last / MIB:.1f} (last 10), "
        f"{found['closed'] / MIB:.1f} when closed"
    )
    assert peak <= state * 1.05 + 96 * MIB
    assert abs(last - first) <= 8 * MIB
    assert max(found["peaks"][-10:]) - max(found["peaks"][:10]) <= 8 * MIB
    assert resident[0] >= state * 0.95  # there is a copy, and it is what was measured
    assert found["closed"] <= 64 * MIB  # of the state, nothing
