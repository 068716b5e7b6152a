"""Thousands of saves with retention in one process: open files, threads, memory and the root stay
as they were."""

import ctypes
import gc
import itertools
import math
import os
import random
import threading
from pathlib import Path

import pytest

from ckptcore import CheckpointManager, KeepBest, KeepLast

WARM_UP = 20
ITEMS = (
    1 << 15
)  # 3 x 128 KiB of replicated state: a save that is not let go of would show after some dozens
RANKS = 4
KEEP = KeepLast(3) | KeepBest("loss", count=2) | KeepBest("accuracy", mode="max")
MOST = 3 + 2 + 1
GROWTH = 8 << 20
# What the kernel and other threads of the process do to its memory (huge pages put together, say)
# comes once; a save that is not let go of adds to every window.
WINDOWS = 3
# Caches of the interpreter and of the allocator still settle after the warm-up, by far fewer
# objects than saves.
OBJECTS = 60

if not Path("/proc/self/statm").exists():
    pytest.skip("the system does not tell what a process uses", allow_module_level=True)


# Threads that were there before a test, of tests before it, say: they may end meanwhile.
OTHERS = set()


@pytest.fixture(autouse=True)
def know_the_others():
    OTHERS.update(threading.enumerate())
    yield
    OTHERS.clear()


def usage():
    """What the process holds now: open files, threads, resident bytes, objects that the garbage
    collector knows."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len({*threading.enumerate()} - OTHERS),
        "resident": resident,
        "objects": len(gc.get_objects()),
    }


def shown(name, saves, seen):
    said = ", ".join(f"{key} " + " -> ".join(f"{look[key]:,}" for look in seen) for key in seen[0])
    print(f"\n{name}, each {saves} saves after {WARM_UP}: {said}")


def check_flat(seen):
    """Files and threads at every look; memory and objects in one window between two looks at
    least."""
    assert [look["files"] for look in seen] == [seen[0]["files"]] * len(seen)
    assert [look["threads"] for look in seen] == [seen[0]["threads"]] * len(seen)
    assert any(flat(first, last) for first, last in itertools.pairwise(seen)), seen


def flat(first, last):
    return (
        last["resident"] - first["resident"] < GROWTH
        and last["objects"] - first["objects"] < OBJECTS
    )


def enough(seen):
    """Whether a window was flat, or as many were not as there may be."""
    return len(seen) > 1 and (flat(*seen[-2:]) or len(seen) > WINDOWS)


def metrics_of(step, rng):
    """Now and then a best one, a missing one, one that is no number. At first all: that one is
    missing is a warning."""
    loss = rng.choice([math.nan, rng.random(), rng.random() / (step + 1)])
    accuracy = rng.random()
    return (
        {"loss": loss} if rng.random() < 0.5 and step > 1 else {"loss": loss, "accuracy": accuracy}
    )


@pytest.mark.parametrize("saves", [100, pytest.param(2000, marks=pytest.mark.stress)])
@pytest.mark.parametrize("kind", ["local", "folder", "memory"])
@pytest.mark.timeout(600)
def test_soak_one_rank(make_root, marked, kind, saves):
    storage = make_root(kind)
    rng = random.Random(saves)
    best = {"loss": math.inf}
    seen = []
    with CheckpointManager(storage, keep=KEEP, run_id="run", io_threads=2) as ckpt:
        for step in itertools.count(1):
            metrics = metrics_of(step, rng)
            info = ckpt.save(step, marked.state(step, ITEMS), metrics=metrics)
            if metrics["loss"] < best["loss"]:
                best = {"loss": metrics["loss"], "step": step}
            assert info.step == step
            if step >= WARM_UP and (step - WARM_UP) % saves == 0:
                assert len(ckpt.list()) <= MOST
                seen.append(usage())
                if enough(seen):
                    break
        shown(f"1 rank, {kind}", saves, seen)
        check_flat(seen)
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
    seen = []

    def program(comm):
        rng = random.Random(saves)
        with CheckpointManager(storage, keep=KEEP, run_id="run", comm=comm, io_threads=1) as ckpt:
            for step in itertools.count(1):
                ckpt.save(
                    step,
                    marked.parts(step, comm.rank, ITEMS // RANKS),
                    metrics=metrics_of(step, rng),
                )
                if step >= WARM_UP and (step - WARM_UP) % saves == 0:
                    # On rank 0 while the others wait for its answer.
                    with comm.round("usage") as r:
                        r.gather()
                        if r.leads:
                            seen.append(usage())
                    if enough(seen):
                        break
            assert marked.loaded(ckpt.restore, comm.rank, ITEMS // RANKS) == (step, step)
            best = ckpt.best().step
            assert marked.loaded(lambda s: ckpt.load(s, "best"), comm.rank, ITEMS // RANKS) == (
                best,
                best,
            )
        return step, [info.step for info in ckpt.list()]

    results = errors_of(RANKS, program, deadline=500)
    assert [type(result) for result in results] == [tuple] * RANKS, results
    shown("4 ranks", saves, seen)
    check_flat(seen)
    last, kept = results[0]
    assert {last - 2, last - 1, last} <= {*kept}
    assert len(kept) <= MOST
    assert marked.files(storage) == marked.whole(storage, kept)
