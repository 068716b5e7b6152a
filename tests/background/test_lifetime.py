"""The end of the program, of a `with` block, of the manager: a pending save is never dropped, and
never holds up the end."""

import gc
import signal
import threading
import time
import weakref

import pytest
import torch

from ckptcore import AsyncSaveError, CheckpointManager, open_checkpoint, open_storage
from ckptcore.testing import FaultStorage
from ckptcore.testing.processes import patience

START = """
import sys, torch
from ckptcore import CheckpointManager, open_storage
from ckptcore.testing import FaultStorage

root = sys.argv[1]
faults = FaultStorage(open_storage(root))
def state(mark):
    return {"m": {"w": torch.full((1000,), float(mark))}}
"""
# The program goes on to its end while the disk is slow: what it saved is there, though it never
# closed the manager.
SLOW = 'faults.delay(0.03, kind=("create", "write_at", "close"))\n'
FAILS = 'faults.fail(kind="write_at", path="*.safetensors")\n'
SAVE = "ckpt = CheckpointManager(faults)\nckpt.save_async(7, state(7))\n"


def check_committed(root, step=7):
    view = open_checkpoint(root / f"checkpoint-{step}")
    assert view.verify() == [] and set(view.read("m/w").tolist()) == {float(step)}
    assert [entry.name for entry in root.iterdir() if "partial" in entry.name] == []


ENDS = {
    "falls off the end": ("", 0),
    "sys.exit()": ("sys.exit()", 0),
    "sys.exit(3)": ("sys.exit(3)", 3),
    "the manager is forgotten": ("del ckpt\nimport gc\ngc.collect()", 0),
    "in a function": (
        "def main():\n    CheckpointManager(root + '/b').save_async(8, state(8))\nmain()",
        0,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_never_closes_leaves_its_last_save_committed(tmp_path, run_script, end):
    code, expected = ENDS[end]
    whole = end == "falls off the end"
    done = run_script(START + SLOW + SAVE + code, tmp_path / "run", whole=whole)
    assert (done.returncode, done.stdout, done.stderr) == (expected, "", "")
    check_committed(tmp_path / "run")
    if end == "in a function":
        check_committed(tmp_path / "run" / "b", 8)


BUSY_TO_THE_END = """
from ckptcore.saving.background import Saves
finish = Saves._finish
def and_more(*arguments):
    try:
        return finish(*arguments)
    finally:
        for _ in range(30_000):
            torch.ones(300).add_(1)
Saves._finish = and_more
"""


@pytest.mark.parametrize("end", ["", "ckpt.close()"], ids=["end", "close"])
def test_no_thread_is_in_the_middle_of_something_when_the_interpreter_goes(
    tmp_path, run_script, end
):
    """A thread that comes back from C++ code into an interpreter that is gone aborts the process
    (SIGABRT)."""
    done = run_script(START + BUSY_TO_THE_END + SAVE + end, tmp_path / "run", whole=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    check_committed(tmp_path / "run")


@pytest.mark.parametrize(
    "programs", [3, pytest.param(300, marks=[pytest.mark.stress, pytest.mark.timeout(900)])]
)
def test_programs_end_in_order(tmp_path, run_script, programs):
    """The same, left to chance: large and small states, with and without a word of farewell."""
    for number in range(programs):
        items = (3_000_000, 1000)[number % 2]
        code = (
            START.replace("1000", str(items)) + SAVE + ("", "ckpt.close()", "del ckpt")[number % 3]
        )
        done = run_script(code, tmp_path / f"{number}", whole=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), number
        check_committed(tmp_path / f"{number}")
    print(f"\n{programs} programs ended with code 0 and their save committed")


@pytest.mark.parametrize("end", ["", "sys.exit(0)"])
def test_b16_the_last_save_failed(tmp_path, run_script, end):
    """Training that ended "successfully" without its checkpoint is no success."""
    done = run_script(START + SLOW + FAILS + SAVE + "print('trained')\n" + end, tmp_path / "run")
    assert done.returncode == 1
    assert done.stdout == "trained\n"
    assert (
        "the save of step 7 in the background failed" in done.stderr
        and "Input/output error" in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "run").iterdir()) == []


def test_b16_the_last_save_failed_and_was_told_of(tmp_path, run_script):
    told = (
        "try:\n    ckpt.wait()\nexcept Exception as error:\n    print(type(error).__name__, "
        "error.step)\n"
    )
    done = run_script(START + FAILS + SAVE + told, tmp_path / "run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "AsyncSaveError 7\n", "")


def test_b16_the_last_save_failed_and_only_warns(tmp_path, run_script):
    save = SAVE.replace("(faults)", "(faults, on_error='warn')")
    done = run_script(START + FAILS + save, tmp_path / "run")
    assert done.returncode == 0
    assert (
        done.stderr.count("\n") == 1
        and "the save of step 7 in the background failed" in done.stderr
    )


@pytest.mark.parametrize("fails", [False, True])
def test_an_exception_that_nobody_caught_has_the_last_word(tmp_path, run_script, fails):
    code = (
        START
        + SLOW
        + (FAILS if fails else "")
        + SAVE
        + "raise ZeroDivisionError('of the training')\n"
    )
    done = run_script(code, tmp_path / "run")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert (
        done.stderr.count("Traceback") == 1
        and "ZeroDivisionError: of the training\n" in done.stderr
    )
    after = done.stderr.partition("ZeroDivisionError: of the training\n")[2]
    assert after.count("\n") == fails and ("in the background failed" in after) == fails
    if not fails:
        check_committed(tmp_path / "run")


def test_leaving_the_context_with_an_exception(tmp_path, run_script):
    """The exception stays what it is, with a note; the exit waits for the save either way."""
    code = """
    try:
        with CheckpointManager(faults) as ckpt:
            ckpt.save_async(7, state(7))
            raise ZeroDivisionError("of the training")
    except ZeroDivisionError as error:
        print(error, getattr(error, "__notes__", []), [i.step for i in CheckpointManager(root).list()])
    """
    code = "\n".join(line[4:] for line in code.splitlines())
    good = run_script(START + SLOW + code, tmp_path / "a")
    assert (good.returncode, good.stdout, good.stderr) == (0, "of the training [] [7]\n", "")
    bad = run_script(START + FAILS + code, tmp_path / "b")
    assert (bad.returncode, bad.stderr) == (0, "")
    assert bad.stdout.startswith(
        "of the training ['and also: AsyncSaveError: the save of step 7 in the background failed: "
    )
    assert bad.stdout.endswith(" []\n")


def test_the_context_in_this_process(tmp_path):
    faults = FaultStorage(open_storage(tmp_path))
    faults.fail(kind="write_at")
    with pytest.raises(KeyboardInterrupt) as caught, CheckpointManager(faults) as ckpt:
        ckpt.save_async(7, {"m": {"w": torch.ones(3)}})
        raise KeyboardInterrupt
    assert len(caught.value.__notes__) == 1 and "step 7" in caught.value.__notes__[0]
    with pytest.raises(AsyncSaveError), CheckpointManager(faults) as ckpt:
        faults.fail(kind="write_at")
        ckpt.save_async(8, {"m": {"w": torch.ones(3)}})
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_save_is_pending(tmp_path, run_script):
    code = (
        SLOW
        + SAVE
        + "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    done = run_script(START + code, tmp_path / "run")
    assert done.returncode == -signal.SIGINT
    assert (
        done.stderr.rstrip().endswith("KeyboardInterrupt") and done.stderr.count("Traceback") == 1
    )
    check_committed(tmp_path / "run")


STUCK = "gate = faults.block(kind='write_at')\n"


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("", 1, "ckptcore: the save of step 7 has not ended after 0.2 s\n"),
        (
            "ckpt.close()",
            1,
            "AsyncSaveError: the save of step 7 has not ended after 0.2 s and is given up\n",
        ),
        (
            "with ckpt: pass",
            1,
            "AsyncSaveError: the save of step 7 has not ended after 0.2 s and is given up\n",
        ),
        ("raise ZeroDivisionError", 1, "ckptcore: the save of step 7 has not ended after 0.2 s\n"),
    ],
    ids=["end", "close", "with", "exception"],
)
def test_a_stuck_disk_holds_up_nobody(tmp_path, run_script, end, code, says):
    """The disk never answers again; the program ends all the same (within the deadline of the
    test), and not with 0."""
    save = SAVE.replace("(faults)", "(faults, drain_timeout=0.2)")
    done = run_script(
        START + STUCK + save + "gate.wait_reached()\n" + end, tmp_path / "run", timeout=30
    )
    assert done.returncode == code
    assert done.stderr.endswith(says)
    assert ("ZeroDivisionError" in done.stderr) == ("Zero" in end)
    assert [entry.name.partition(".")[0] for entry in (tmp_path / "run").iterdir()] == [
        "checkpoint-7"
    ]


def test_close_is_bounded_and_what_is_given_up_is_not_told_again(tmp_path):
    faults = FaultStorage(open_storage(tmp_path))
    gate = faults.block(kind="write_at")
    ckpt = CheckpointManager(faults, drain_timeout=0.2)
    handle = ckpt.save_async(7, {"m": {"w": torch.ones(3)}})
    gate.wait_reached(20)
    assert ckpt.wait(0.05) is False
    with pytest.raises(TimeoutError):
        handle.result(0.05)
    with pytest.raises(AsyncSaveError, match="given up") as caught:
        ckpt.close()
    assert caught.value.step == 7
    gate.open()
    assert handle.result(30).step == 7  # it was only slow, and nothing stands in its way


def test_a_manager_that_nobody_holds_any_more(tmp_path):
    faults = FaultStorage(open_storage(tmp_path))
    gate = faults.block(kind="write_at")
    ckpt = CheckpointManager(faults)
    gone = weakref.ref(ckpt)
    pool = weakref.ref(ckpt._saves._pool)
    before = {thread.name for thread in threading.enumerate()}
    handle = ckpt.save_async(7, {"m": {"w": torch.full((100,), 7.0)}})
    gate.wait_reached(20)
    del ckpt
    gc.collect()
    gate.open()
    assert handle.result(30).step == 7
    check_committed(tmp_path)
    deadline = time.monotonic() + 20 * patience()
    while (
        gone() or pool() or {t.name for t in threading.enumerate()} - before
    ) and time.monotonic() < deadline:
        gc.collect()
    assert gone() is None and pool() is None
    assert not {thread.name for thread in threading.enumerate()} - before


def test_two_managers_at_once(tmp_path):
    """Two runs of one process, each with a save in flight, one of them held up."""
    kept = []
    for name in ("a", "b"):
        faults = FaultStorage(open_storage(tmp_path / name))
        kept.append((CheckpointManager(faults, drain_timeout=20), faults))
    (first, slow), (second, _) = kept
    gate = slow.block(kind="write_at")
    held = first.save_async(7, {"m": {"w": torch.full((1000,), 7.0)}})
    gate.wait_reached(20)
    for step in (1, 2, 3):
        assert (
            second.save_async(step, {"m": {"w": torch.full((1000,), float(step))}}).result(30).step
            == step
        )
    second.close()
    assert not held.done()
    gate.open()
    first.close()
    assert held.done()
    check_committed(tmp_path / "a")
    check_committed(tmp_path / "b", 3)


def test_two_managers_in_one_root(tmp_path):
    """The second run neither takes the first one's attempt for abandoned nor waits for it."""
    faults = FaultStorage(open_storage(tmp_path))
    gate = faults.block(kind="write_at")
    with (
        CheckpointManager(faults, run_id="a", drain_timeout=20) as first,
        CheckpointManager(tmp_path, run_id="b") as second,
    ):
        held = first.save_async(7, {"m": {"w": torch.full((10,), 7.0)}})
        gate.wait_reached(20)
        assert second.save_async(8, {"m": {"w": torch.full((10,), 8.0)}}).result(30).step == 8
        assert second.save(9, {"m": {"w": torch.full((10,), 9.0)}}).step == 9
        gate.open()
        assert held.result(30).step == 7
        assert [info.step for info in first.list()] == [7]
        assert [info.step for info in second.list()] == [8, 9]
    check_committed(tmp_path)
