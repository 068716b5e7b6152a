"""Forked children while a save is in flight: a child has none of the threads, so it must leave the
save alone."""

import pytest

from ckptcore import open_checkpoint

START = """
import multiprocessing, os, sys, torch
from ckptcore import AsyncSaveError, CheckpointManager, InvalidState, open_storage
from ckptcore.testing import FaultStorage

root = sys.argv[1]
faults = FaultStorage(open_storage(root))
ckpt = CheckpointManager(faults, when_busy=sys.argv[2], drain_timeout=5)
def state(mark):
    return {"m": {"w": torch.full((1000,), float(mark))}}
def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            sys.stdout.flush()
    if pid == 0:
        sys.exit(0)  # as a program ends, with all that is registered for its end
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def refused(call):
    try:
        call()
        return "not refused"
    except Exception as error:
        return type(error).__name__
ckpt.save(1, state(1))
gate = faults.block(kind="write_at")
handle = ckpt.save_async(7, state(7))
gate.wait_reached()
"""
END = """
assert not handle.done()
gate.open()
print(handle.result(30).step, ckpt.save(8, state(8)).step, ckpt.save_async(9, state(9)).result(30).step)
ckpt.close()
"""


def check(root, done, says=""):
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == says + "7 8 9\n"
    for step in (1, 7, 8, 9):
        view = open_checkpoint(root / f"checkpoint-{step}")
        assert view.verify() == [] and set(view.read("m/w").tolist()) == {float(step)}
    assert len(list(root.iterdir())) == 4


@pytest.mark.parametrize("when_busy", ["wait", "skip", "raise"])
def test_a_child_may_not_save(tmp_path, run_script, when_busy):
    """It says so at once: there is no thread in the child that would ever finish a save."""
    code = (
        START
        + """
def work():
    print("save", refused(lambda: ckpt.save(20, state(20))))
    print("save_async", refused(lambda: ckpt.save_async(20, state(20))))
    print("prewarm", refused(lambda: ckpt.prewarm(state(20))))
    print("load", refused(lambda: ckpt.load(state(20))))
    print("result", refused(lambda: handle.result(0.1)))
    print("done", handle.done(), "wait", ckpt.wait(0.1), [info.step for info in ckpt.list()])
print(child(work), flush=True)
"""
        + END
    )
    says = (
        "save InvalidState\nsave_async InvalidState\nprewarm InvalidState\nload "
        "InvalidState\nresult AsyncSaveError\n"
    )
    done = run_script(code, tmp_path / "run", when_busy)
    check(tmp_path / "run", done, says + "done False wait True [1]\n0\n")


@pytest.mark.parametrize("when_busy", ["skip", "raise"])
def test_a_child_may_not_save_when_nothing_is_in_flight_either(tmp_path, run_script, when_busy):
    code = (
        START.replace("gate.wait_reached()", "gate.open()\nckpt.wait(30)")
        + """
print(child(lambda: print("save_async", refused(lambda: ckpt.save_async(20, state(20)).result(5)))), flush=True)
print(ckpt.save(8, state(8)).step, ckpt.save_async(9, state(9)).result(30).step)
"""
    )
    done = run_script(code, tmp_path / "run", when_busy)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "save_async InvalidState\n0\n8 9\n",
        "",
    )


@pytest.mark.parametrize(
    "work",
    [
        "pass",
        "ckpt.close()",
        "ckpt.__exit__(None, None, None)",
        "os._exit(0)",
        "globals().pop('ckpt')",
    ],
    ids=["end", "close", "with", "_exit", "forget"],
)
def test_what_a_child_ends_with_does_nothing_to_the_save(tmp_path, run_script, work):
    code = START + f"def work():\n    {work}\nprint(child(work), child(work), flush=True)\n" + END
    check(tmp_path / "run", run_script(code, tmp_path / "run", "wait"), "0 0\n")


def test_a_manager_of_its_own_in_the_child(tmp_path, run_script):
    """The child may save, and fail, as any program does; what it ends with is its own."""
    code = (
        START
        + """
def good():
    own = CheckpointManager(root + "-child")
    print(own.save_async(20, state(20)).result(30).step)
    own.save_async(21, state(21))
def bad():
    storage = FaultStorage(open_storage(root + "-bad"))
    storage.fail(kind="write_at")
    CheckpointManager(storage).save_async(20, state(20))
print(child(good), child(bad), flush=True)
"""
        + END
    )
    done = run_script(code, tmp_path / "run", "wait")
    assert (
        "the save of step 20 in the background failed" in done.stderr
        and done.stderr.count("\n") == 1
    )
    check(tmp_path / "run", done._replace(stderr=""), "20\n0 1\n")
    assert sorted(entry.name for entry in (tmp_path / "run-child").iterdir()) == [
        "checkpoint-20",
        "checkpoint-21",
    ]


def test_workers_of_a_data_loader(tmp_path, run_script):
    code = (
        START
        + """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, n):
        return torch.tensor(n)
loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork")
print([batch.tolist() for batch in loader], flush=True)
process = multiprocessing.get_context("fork").Process(target=lambda: ckpt.close())
process.start()
process.join(30)
print(process.exitcode, flush=True)
"""
        + END
    )
    says = "[[0, 1], [2, 3], [4, 5], [6, 7]]\n0\n"
    check(tmp_path / "run", run_script(code, tmp_path / "run", "wait"), says)
