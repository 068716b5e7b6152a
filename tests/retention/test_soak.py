"""Thousands of saves with retention in one process: open files, threads, memory and the root stay as they were."""

import ctypes
import gc
import math
import os
import random
import threading
from pathlib import Path

import pytest

from ckptcore import CheckpointManager, KeepBest, KeepLast

WARM_UP = 20
ITEMS = 1 << 15  # 3 x 128 KiB of replicated state: a save that is not let go of would show after some dozens
RANKS = 4
KEEP = KeepLast(3) | KeepBest("loss", count=2) | KeepBest("accuracy", mode="max")
MOST = 3 + 2 + 1
GROWTH = 8 << 20
# Caches of the interpreter and of the allocator still settle after the warm-up, by far fewer objects than saves.
OBJECTS = 60

if not Path("/proc/self/statm").exists():
    pytest.skip("the system does not tell what a process uses", allow_module_level=True)


def usage():
    """What the process holds now: open files, threads, resident bytes, objects that the garbage collector knows."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(threading.enumerate()),
        "resident": resident,
        "objects": len(gc.get_objects()),
    }


def shown(name, saves, first, last):
    said = ", ".join(f"{key} {first[key]:,} -> {last[key]:,}" for key in first)
    print(f"\n{name}, {saves} saves after {WARM_UP}: {said}")


def check_flat(first, last):
    assert last["files"] == first["files"]
    assert last["threads"] == first["threads"]
    assert last["resident"] - first["resident"] < GROWTH
    assert last["objects"] - first["objects"] < OBJECTS


def metrics_of(step, rng):
    """Now and then a best one, a missing one, one that is no number."""
    loss = rng.choice([math.nan, rng.random(), rng.random() / (step + 1)])
    return {"loss": loss} if rng.random() < 0.5 else {"loss": loss, "accuracy": rng.random()}


@pytest.mark.parametrize("saves", [100, pytest.param(2000, marks=pytest.mark.stress)])
@pytest.mark.parametrize("kind", ["local", "folder", "memory"])
@pytest.mark.timeout(600)
def test_soak_one_rank(make_root, marked, kind, saves):
    storage = make_root(kind)
    rng = random.Random(saves)
    best = {"loss": math.inf}
    with CheckpointManager(storage, keep=KEEP, run_id="run", io_threads=2) as ckpt:
        for step in range(1, WARM_UP + saves + 1):
            metrics = metrics_of(step, rng)
            info = ckpt.save(step, marked.state(step, ITEMS), metrics=metrics)
            if metrics["loss"] < best["loss"]:
                best = {"loss": metrics["loss"], "step": step}
            assert info.step == step
            if step == WARM_UP:
                assert len(ckpt.list()) <= MOST
                first = usage()
        last = usage()
        shown(f"1 rank, {kind}", saves, first, last)
        check_flat(first, last)
        assert (ckpt.latest().step, ckpt.best().step) == (step, best["step"])
        kept = [info.step for info in ckpt.list()]
        assert {step - 2, step - 1, step, best["step"]} <= {*kept}
        assert len(kept) <= MOST
    assert marked.files(storage) == marked.whole(storage, kept)
    assert marked.restored(storage, ITEMS) == (step, step)
    assert marked.restored(storage, ITEMS, best["step"]) == (best["step"], best["step"])


@pytest.mark.parametrize("saves", [100, pytest.param(500, marks=pytest.mark.stress)])
@pytest.mark.usefixtures("split_everything")
@pytest.mark.timeout(600)
def test_soak_four_ranks(make_root, marked, errors_of, saves):
    storage = make_root("local")
    seen = {}

    def program(comm):
        rng = random.Random(saves)
        with CheckpointManager(storage, keep=KEEP, run_id="run", comm=comm, io_threads=1) as ckpt:
            for step in range(1, WARM_UP + saves + 1):
                ckpt.save(step, marked.parts(step, comm.rank, ITEMS // RANKS), metrics=metrics_of(step, rng))
                if step in (WARM_UP, WARM_UP + saves):
                    # On rank 0 while the others wait for its answer.
                    comm.together("usage", lambda: None, lambda _, step=step: seen.update({step: usage()}))
            assert marked.loaded(ckpt.restore, comm.rank, ITEMS // RANKS) == (step, step)
            best = ckpt.best().step
            assert marked.loaded(lambda s: ckpt.load(s, "best"), comm.rank, ITEMS // RANKS) == (best, best)
        return [info.step for info in ckpt.list()]

    results = errors_of(RANKS, program, deadline=500)
    assert [type(result) for result in results] == [list] * RANKS, results
    shown("4 ranks", saves, seen[WARM_UP], seen[WARM_UP + saves])
    check_flat(seen[WARM_UP], seen[WARM_UP + saves])
    kept = results[0]
    assert {*range(WARM_UP + saves - 2, WARM_UP + saves + 1)} <= {*kept}
    assert len(kept) <= MOST
    assert marked.files(storage) == marked.whole(storage, kept)
