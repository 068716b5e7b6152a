"""B02: whatever happens to the live state after `save_async` returned, the checkpoint is of one
step, bit for bit."""

import pytest
import torch

from ckptcore import CheckpointManager, open_checkpoint, open_storage
from ckptcore.testing import FaultStorage


def test_b02_no_byte_of_a_later_step_gets_into_a_checkpoint(tmp_path, holder):
    faults = FaultStorage(open_storage(tmp_path))
    gate = faults.block()
    w, step, hist = torch.ones(4), torch.tensor(1.0), [1]
    gate.open()
    with CheckpointManager(faults) as ckpt:
        writing = faults.block(kind=("make_folder", "create", "write_at", "rename"))
        handle = ckpt.save_async(1, {"c": holder({"w": w, "opt": {"step": step}, "hist": hist})})
        w.add_(1)
        step.add_(1)
        hist.append(2)
        writing.wait_reached(20)
        assert not handle.done() and handle.staged() and ckpt.latest() is None
        writing.open()
        assert handle.result(60).step == 1
        live = holder({"w": torch.zeros(4), "opt": {"step": torch.tensor(0.0)}, "hist": []})
        assert ckpt.load({"c": live}).step == 1
    assert live.state["w"].tolist() == [1.0] * 4
    assert live.state["opt"]["step"].item() == 1.0
    assert live.state["hist"] == [1]


@pytest.mark.parametrize(
    "rounds", [12, pytest.param(200, marks=[pytest.mark.stress, pytest.mark.timeout(900)])]
)
def test_b02_every_kind_of_leaf(tmp_path, everything, check_step, small_pieces, rounds):
    """The live state is another one at once, and again when the write has begun, wherever that is
    held up."""
    inner = open_storage(tmp_path)
    faults = FaultStorage(inner)
    live, blocks = everything(0), set()
    with CheckpointManager(faults, run_id="run", io_threads=3, drain_timeout=20) as ckpt:
        for step in range(1, rounds + 1):
            faults.clear()
            # Before anything is written, in the middle of the files, right before the commit.
            kind, at = [
                ("make_folder", 1),
                ("create", 2),
                ("write_at", 1 + step % 5),
                ("rename", 1),
            ][step % 4]
            gate = faults.block(at, kind=kind)
            state = live.at(step).components()
            handle = ckpt.save_async(step, state)
            live.at(step + 10_000)
            gate.wait_reached(20)
            live.at(step + 20_000)
            assert not handle.done() and [info.step for info in ckpt.list()] == list(range(1, step))
            gate.open()
            assert handle.result(60).step == step
            blocks.add(kind)
            check_step(ckpt, step)
        assert [info.step for info in ckpt.list()] == list(range(1, rounds + 1))
        assert all(ckpt.verify(step) == [] for step in (1, rounds))
    assert blocks == {"make_folder", "create", "write_at", "rename"}
    print(f"\n{rounds} rounds, each of one step to the last bit; held up at {sorted(blocks)}")


@pytest.mark.parametrize("prewarmed", [False, True])
def test_b02_states_that_grow_and_shrink(tmp_path, everything, check_step, small_pieces, prewarmed):
    """The pool is given back and taken anew: no checkpoint has bytes of the state before."""
    faults = FaultStorage(open_storage(tmp_path))
    with CheckpointManager(faults, run_id="run") as ckpt:
        for step, items in enumerate([3000, 6000, 600, 12_000, 3000, 12_000], start=1):
            faults.clear()
            gate = faults.block(kind="write_at")
            live = everything(step, items=items)
            if prewarmed:
                ckpt.prewarm(live.components())
            live.at(step)  # the random streams too, which the line before may have drawn from
            handle = ckpt.save_async(step, live.components())
            live.at(step + 10_000)
            gate.wait_reached(20)
            gate.open()
            handle.result(60)
            check_step(ckpt, step, items=items)


def test_a_save_at_once_after_one_in_the_background(tmp_path, everything, check_step):
    """`save` waits for the other, and both are whole."""
    faults = FaultStorage(open_storage(tmp_path))
    live = everything(1)
    with CheckpointManager(faults, run_id="run") as ckpt:
        faults.delay(0.002, kind="write_at")
        handle = ckpt.save_async(1, live.components())
        assert ckpt.save(2, live.at(2).components()).step == 2
        assert handle.done()
        live.at(3)
        assert [info.manifest.sequence for info in ckpt.list()] == [1, 2]
        check_step(ckpt, 1)
        check_step(ckpt, 2)


def test_tensors_that_are_freed_and_reused_at_once(tmp_path):
    """The state itself goes away with its memory; what comes into that memory next is another
    thing."""
    faults = FaultStorage(open_storage(tmp_path))
    with CheckpointManager(faults) as ckpt:
        gate = faults.block(kind="write_at")
        handle = ckpt.save_async(
            1, {"m": {f"t{n}": torch.full((50_000,), float(n)) for n in range(20)}}
        )
        later = [torch.full((50_000,), -1.0) for _ in range(20)]
        gate.open()
        handle.result(60)
    view = open_checkpoint(tmp_path / "checkpoint-1")
    for n in range(20):
        assert set(view.read(f"m/t{n}").ravel().tolist()) == {float(n)}
    assert all(t[0] == -1 for t in later)
