"""The exit code when the last save has failed, whatever else is broken; and what else a program has
open then."""

import os
import signal

import pytest

from ckptcore import open_checkpoint

START = """
import os, sys, torch
from ckptcore import CheckpointManager, open_storage
from ckptcore.testing import FaultStorage

def state(mark):
    return {"m": {"w": torch.full((1000,), float(mark))}}
def save(root, fails):
    faults = FaultStorage(open_storage(root))
    faults.delay(0.02, kind=("create", "close"))
    if fails:
        faults.fail(kind="write_at", path="*.safetensors")
    ckpt = CheckpointManager(faults, drain_timeout=20)
    ckpt.save_async(7, state(7))
    return ckpt
"""
SAVE = "\nckpt = save(sys.argv[1], True)\n"
FAILED = "ckptcore: the save of step 7 in the background failed: "


def check_committed(root, step=7):
    view = open_checkpoint(root / f"checkpoint-{step}")
    assert view.verify() == [] and set(view.read("m/w").tolist()) == {float(step)}
    assert [entry.name for entry in root.iterdir() if "partial" in entry.name] == []


FULL = "os.dup2(os.open('/dev/full', os.O_WRONLY), {})\n"
BROKEN = {
    "stdout is closed": "sys.stdout.close()\n",
    "stderr is closed": "sys.stderr.close()\n",
    "both are closed": "sys.stdout.close()\nsys.stderr.close()\n",
    "neither is there": "sys.stdout = sys.stderr = None\n",
    "their files are closed": "os.close(1)\nos.close(2)\n",
    "stdout is full": FULL.format(1),
    "stderr is full": FULL.format(2),
    "both are full": FULL.format(1) + FULL.format(2),
    "stdout is full and not empty": "sys.stdout = open('/dev/full', 'w')\nprint('lost')\n",
    "nobody reads": "r, w = os.pipe()\nos.dup2(w, 1)\nos.dup2(w, 2)\nos.close(r)\nos.close(w)\n",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_b16_a_failure_is_the_exit_code_even_if_nobody_can_be_told(tmp_path, run_script, broken):
    done = run_script(START + SAVE + BROKEN[broken], tmp_path / "run")
    assert done.returncode == 1
    assert list((tmp_path / "run").iterdir()) == []
    if broken.startswith("stdout"):
        assert done.stderr.startswith(FAILED) and done.stderr.count("\n") == 1


def test_a_save_that_is_committed_is_no_failure_then(tmp_path, run_script):
    done = run_script(
        START + SAVE.replace("True", "False") + BROKEN["both are closed"], tmp_path / "run"
    )
    assert (done.returncode, done.stderr) == (0, "")
    check_committed(tmp_path / "run")


# As in a session in which something was typed that raised, long before.
STALE = (
    "import code\ncode.InteractiveConsole().runsource('1/0')\nassert type(sys.last_value) is "
    "ZeroDivisionError\n"
)


@pytest.mark.parametrize("fails", [True, False])
def test_b16_an_exception_of_before_the_save_ended_no_program(tmp_path, run_script, fails):
    done = run_script(START + STALE + SAVE.replace("True", str(fails)), tmp_path / "run")
    assert done.returncode == int(fails)
    said = done.stderr.partition("ZeroDivisionError: division by zero\n")[2]
    assert said.startswith(FAILED) if fails else said == ""


ENDS = {
    "exception": ("raise KeyError('of the training')", 1, "\nKeyError: 'of the training'\n"),
    "Ctrl-C": ("raise KeyboardInterrupt", -signal.SIGINT, "\nKeyboardInterrupt\n"),
    "hook": (
        "sys.excepthook = lambda *e: print('hook', *e[:1], file=sys.stderr)\n1/0",
        1,
        "hook <class 'ZeroDivisionError'>\n",
    ),
}


@pytest.mark.parametrize(
    ("end", "stale"),
    [("exception", False), ("Ctrl-C", False), ("hook", False), ("exception", True)],
)
def test_an_exception_that_nobody_caught_comes_first(tmp_path, run_script, end, stale):
    """It is what ended the program: its traceback and its exit code, and the failure of the save
    after it."""
    code, expected, last = ENDS[end]
    done = run_script(START + (STALE if stale else "") + SAVE + code, tmp_path / "run")
    assert done.returncode == expected
    said, _, after = done.stderr.partition(last)
    assert said.count("Traceback") == (end != "hook") + stale
    assert after.startswith(FAILED) and after.count("\n") == 1


@pytest.mark.parametrize("end", ["exception", "Ctrl-C"])
def test_and_stays_the_exit_code_when_nobody_can_be_told(tmp_path, run_script, end):
    code, expected, _ = ENDS[end]
    done = run_script(START + SAVE + BROKEN["both are closed"] + code, tmp_path / "run")
    assert (done.returncode, done.stdout) == (expected, "")
    assert (
        "ckptcore" not in done.stderr
    )  # the interpreter has words of its own, past what is closed


# What is open, and not yet in its file, when the program ends.
OPEN = """
import logging, logging.handlers
folder = sys.argv[1] + "-files"
os.makedirs(folder, exist_ok=True)
metrics = open(folder + "/metrics.txt", "w")
metrics.write("step 7: 0.5\\n")
raw = open(folder + "/raw.bin", "wb")
raw.write(b"seven")
both = open(folder + "/both.bin", "w+b")
both.write(b"8")
log = logging.getLogger("training")
log.propagate = False
log.addHandler(logging.handlers.MemoryHandler(100, target=logging.FileHandler(folder + "/train.log")))
log.warning("trained up to step 7")
closed = open(folder + "/closed.txt", "w")
closed.close()
print("to be read by whoever started this")
"""
FILES = {
    "metrics.txt": "step 7: 0.5\n",
    "raw.bin": "seven",
    "both.bin": "8",
    "train.log": "trained up to step 7\n",
    "closed.txt": "",
}


def files(root):
    return {path.name: path.read_text() for path in root.with_name(root.name + "-files").iterdir()}


@pytest.mark.parametrize("broken", ["", "stderr is full", "both are closed"])
def test_files_that_are_open_and_lines_that_are_logged_are_not_lost(tmp_path, run_script, broken):
    done = run_script(START + OPEN + SAVE + BROKEN.get(broken, ""), tmp_path / "run")
    assert done.returncode == 1
    assert done.stdout == "to be read by whoever started this\n"
    assert files(tmp_path / "run") == FILES


CHILDREN = """
import multiprocessing, signal, time
def last_words(path):
    signal.alarm(30)
    time.sleep(0.2)
    open(path, "w").close()
def for_ever():
    signal.alarm(30)
    time.sleep(60)
fork = multiprocessing.get_context("fork")
daemon, other = fork.Process(target=for_ever, daemon=True), fork.Process(target=last_words, args=(sys.argv[1] + "-said",))
daemon.start()
other.start()
print(daemon.pid, flush=True)
"""


def test_children_are_waited_for_or_ended_as_at_any_end(tmp_path, run_script):
    """Those that are daemons would otherwise go on for ever, with nobody to stop them."""
    done = run_script(START + CHILDREN + SAVE, tmp_path / "run")
    assert done.returncode == 1 and done.stderr.startswith(FAILED)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
    assert (tmp_path / "run-said").exists()


# Children of multiprocessing end without what is registered for the end of other programs.
CHILD = """
import multiprocessing, signal
def child(root, fails, end):
    signal.alarm(30)
    save(root, fails)
    exec(end)
def run(fails, end, root=sys.argv[1]):
    process = multiprocessing.get_context("fork").Process(target=child, args=(root, fails, end))
    process.start()
    process.join(40)
    print(process.exitcode, flush=True)
"""
LEAVE = "\nsys.stdout.flush()\nos._exit(0)\n"  # quick: it is not the parent's end that matters


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit()", 0), ("sys.exit(5)", 5), ("raise KeyError('mine')", 1)]
)
@pytest.mark.parametrize("fails", [False, True])
def test_b16_a_child_of_multiprocessing(tmp_path, run_script, fails, end, code):
    """Its pending save is committed; when that fails the child does, unless it ends with an error
    anyway."""
    done = run_script(START + CHILD + f"run({fails}, {end!r})" + LEAVE, tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, f"{code or int(fails)}\n")
    raises = end.startswith("raise")
    assert done.stderr.count("Traceback") == done.stderr.count("KeyError: 'mine'\n") == raises
    assert done.stderr.count(FAILED) == done.stderr.count("ckptcore: ") == fails
    if fails:
        assert list((tmp_path / "run").iterdir()) == []
    else:
        check_committed(tmp_path / "run")


def test_a_child_of_a_program_that_has_saved_itself(tmp_path, run_script):
    """The parent's pending save is not the child's to wait for. Each has its own, and a child's
    child as well."""
    code = """
faults = FaultStorage(open_storage(sys.argv[1]))
gate = faults.block(kind="write_at")
handle = CheckpointManager(faults, drain_timeout=20).save_async(7, state(7))
gate.wait_reached(20)
run(False, "run(False, '', root + '-child')", sys.argv[1] + "-first")
run(True, "run(False, '', root + '-child')", sys.argv[1] + "-second")
print(handle.done())
gate.open()
print(handle.result(20).step)
"""
    done = run_script(START + CHILD + code + LEAVE, tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, "0\n0\n0\n1\nFalse\n7\n")
    assert done.stderr.startswith(FAILED) and done.stderr.count("\n") == 1
    for name in ("run", "run-first", "run-first-child", "run-second-child"):
        check_committed(tmp_path / name)


def test_what_a_child_has_open_when_its_save_fails(tmp_path, run_script):
    code = f"OPEN = {OPEN!r}\n" + CHILD.replace(
        "    save(root", "    exec(OPEN, globals())\n    save(root"
    )
    done = run_script(START + code + "run(True, '')" + LEAVE, tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, "to be read by whoever started this\n1\n")
    assert done.stderr.startswith(FAILED)
    assert files(tmp_path / "run") == FILES


def test_children_of_torch_multiprocessing(tmp_path, run_script):
    code = """
import signal, torch.multiprocessing
def rank(number, root, fails):
    signal.alarm(30)
    save(f"{root}-{number}", number == fails)
for name, fails in (("-good", None), ("-bad", 1)):
    try:
        torch.multiprocessing.start_processes(rank, (sys.argv[1] + name, fails), nprocs=2, start_method="fork")
        print("all is well")
    except torch.multiprocessing.ProcessExitedException as error:
        print(f"rank {error.error_index}: {error.exit_code}")
"""
    done = run_script(START + code + LEAVE, tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, "all is well\nrank 1: 1\n")
    check_committed(tmp_path / "run-good-0")
    check_committed(tmp_path / "run-good-1")
    assert list((tmp_path / "run-bad-1").iterdir()) == []
