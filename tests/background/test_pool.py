"""The pool of host memory: allocated and touched once, for all saves of a run."""

from pathlib import Path

import pytest
import torch

from ckptcore import (
    AsyncSaveError,
    CheckpointManager,
    SharingPattern,
    StateComponent,
    ValidationLevel,
    open_storage,
)
from ckptcore.saving import staging
from ckptcore.testing import FaultStorage
from ckptcore.testing.ranks import run_ranks

PATTERNS = SharingPattern
MIB = 1 << 20


def state(mark, items=50_000):
    return {
        "m": {f"w{n}": torch.full((items + n,), float(mark)) for n in range(3)},
        "o": {"step": torch.tensor(mark)},
    }


def block(ckpt):
    pool = ckpt._saves._pool.block
    return pool.data_ptr(), pool.numel()


def resident(address, nbytes):
    """Bytes of a block that have a page behind them."""
    total = 0
    with open("/proc/self/smaps") as maps:
        inside = False
        for line in maps:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                start, stop = (int(part, 16) for part in head.split("-"))
                inside = start < address + nbytes and stop > address
            elif inside and head == "Rss:":
                total += int(line.split()[1]) * 1024
    return total


def test_prewarm_allocates_and_touches_once(tmp_path):
    faults = FaultStorage(open_storage(tmp_path))
    with CheckpointManager(faults) as ckpt:
        assert block(ckpt)[1] == 0
        ckpt.prewarm(state(0, 4 * MIB))
        warm = block(ckpt)
        nbytes = sum(t.nbytes for part in state(0, 4 * MIB).values() for t in part.values())
        assert nbytes <= warm[1] < nbytes + 4 * 4096  # each file from a page on
        assert resident(*warm) >= nbytes  # every page is there, before a byte was copied
        assert faults.count() == 0 and list(tmp_path.iterdir()) == []
        for step in range(1, 6):
            ckpt.save_async(step, state(step, 4 * MIB)).result(30)
            assert block(ckpt) == warm
        ckpt.prewarm(state(0, 4 * MIB))
        ckpt.save_async(6, state(6)).result(30)
        assert block(ckpt) == warm  # a smaller one fits into it
        assert [info.step for info in ckpt.list()] == [1, 2, 3, 4, 5, 6]
    assert block(ckpt)[1] == 0


def test_without_prewarm_the_first_save_does_it(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        blocks = set()
        for step in range(1, 5):
            ckpt.save_async(step, state(step)).result(30)
            blocks.add(block(ckpt))
        assert len(blocks) == 1
        ckpt.save(5, state(5, 80_000))  # copies nothing
        assert {block(ckpt)} == blocks
        ckpt.save_async(6, state(6, 80_000)).result(30)
        assert {block(ckpt)} != blocks and block(ckpt)[1] >= 3 * 80_000 * 4


def test_prewarm_starts_the_threads(tmp_path):
    import threading

    with CheckpointManager(tmp_path, io_threads=3) as ckpt:
        ckpt.prewarm(state(0))
        before = set(threading.enumerate())
        assert sum(thread.name.startswith("ckptcore-io") for thread in before) >= 3
        ckpt.save_async(1, state(1)).result(30)
        assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("pattern", "level"),
    [
        *((PATTERNS.REPLICATED, level) for level in ValidationLevel),
        (PATTERNS.PER_GROUP, ValidationLevel.FULL),
        (PATTERNS.PER_RANK, None),
        (PATTERNS.GLOBAL, None),
        (PATTERNS.SHARDED, ValidationLevel.QUICK),
        (PATTERNS.SHARDED, ValidationLevel.FULL),
    ],
)
def test_prewarm_on_several_ranks(tmp_path, sharded_part, monkeypatch, pattern, level):
    """What a rank keeps depends on what it writes and on how closely replicas are compared: the
    pool is for all of it."""
    monkeypatch.setattr("ckptcore.saving.plan.MIN_SHARE_BYTES", 1)
    group = "dp" if pattern is PATTERNS.PER_GROUP else None

    def program(comm):
        live = sharded_part(comm.rank, 4, 1) if pattern is PATTERNS.SHARDED else state(1)["m"]
        declared = [StateComponent("m", live, pattern, group, validation_level=level or "QUICK")]
        with CheckpointManager(
            tmp_path, comm=comm, process_groups={"dp": [[0, 2], [1, 3]]}
        ) as ckpt:
            ckpt.prewarm(declared)
            warm = block(ckpt)
            found = set()
            for step in (1, 2, 3):
                ckpt.save_async(step, declared).result(30)
                found.add(block(ckpt))
            return warm, found

    results = run_ranks(4, program)
    assert [found for _, found in results] == [{warm} for warm, _ in results]
    whole = sum(t.nbytes for t in state(1)["m"].values())
    # A block is as long as its bytes, up to the next multiple of 64, with as much before each
    # tensor that is in no file.
    sizes = [size for (_, size), _ in results]
    assert all(size % 64 == 0 for size in sizes)
    if pattern is PATTERNS.GLOBAL:
        assert sizes == [-(-whole // 64) * 64, 0, 0, 0]
    elif pattern is PATTERNS.PER_RANK or (
        level is ValidationLevel.FULL and pattern is not PATTERNS.SHARDED
    ):
        assert all(whole <= size < whole + 4 * 64 for size in sizes)
    elif pattern is PATTERNS.REPLICATED:
        assert whole <= sum(sizes) < whole + 4 * 64


def test_what_is_trained_does_not_remember_its_copy(tmp_path: Path) -> None:
    """The copies are the same tensors from save to save: a history would grow, and make the next
    copy fail."""
    small, large = torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(70_000))
    turned = torch.nn.Parameter(torch.randn(300, 300).t())
    state = {"small": small, "large": large, "turned": turned}
    with CheckpointManager(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save_async(step, {"m": state}).result()
            kept = ckpt._saves._pool._kept
            assert kept is not None and not any(t.requires_grad for t in kept.targets)
            saved = {name: parameter.detach().clone() for name, parameter in state.items()}
            with torch.no_grad():
                for parameter in state.values():
                    parameter.add_(1.0)
        live = {name: torch.zeros_like(parameter) for name, parameter in state.items()}
        ckpt.load({"m": live}, step=3)
        for name, parameter in state.items():
            assert torch.equal(live[name], saved[name]) and parameter.requires_grad


def test_memory_that_is_not_there_is_said_so_and_the_next_save_goes_on(tmp_path, monkeypatch):
    def refuse(size, large_pages):
        raise RuntimeError("can't allocate memory")

    with CheckpointManager(tmp_path) as ckpt:
        with monkeypatch.context() as without:
            without.setattr(staging, "_new_memory", refuse)
            handle = ckpt.save_async(1, state(1))
            with pytest.raises(
                AsyncSaveError, match=r"and 602,176 bytes of host memory for that"
            ) as e:
                handle.result(60)
            assert isinstance(e.value.__cause__, MemoryError)
        assert ckpt.save(2, state(2)).step == 2
        assert ckpt.save_async(3, state(3)).result(60).step == 3
        assert [info.step for info in ckpt.list()] == [2, 3]
