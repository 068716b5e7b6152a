"""A job that takes its process group apart while a save is pending: the store, which ends with the
group, is still needed."""

import pytest
import torch

from ckptcore import CheckpointManager, SharingPattern, StateComponent
from ckptcore.testing.ranks import run_ranks

# Two ranks over gloo, forked from here; rank 0 hosts the store. What they say to each other past it
# goes through pipes.
JOB = """
import os, signal, socket, sys, torch
import torch.distributed as dist
from datetime import timedelta
from ckptcore import CheckpointManager, SharingPattern, StateComponent, open_storage
from ckptcore.testing import FaultStorage

listening = socket.socket()
listening.bind(("127.0.0.1", 0))
listening.listen(8)
pipes = [os.pipe(), os.pipe()]

def join(rank):
    port, seconds = listening.getsockname()[1], timedelta(seconds=20)
    listens = {} if rank else {"master_listen_fd": listening.detach()}
    listening.close()
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, seconds, wait_for_workers=False, **listens)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=seconds)

def together(rank):
    os.write(pipes[1 - rank][1], b"x")
    assert os.read(pipes[rank][0], 1) == b"x"

def state(rank, step):
    return [StateComponent("own", {"x": torch.full((1000,), step + rank / 2)}, SharingPattern.PER_RANK)]

def program(rank):
    faults = FaultStorage(open_storage(sys.argv[1]))
    ckpt = CheckpointManager(faults, join_timeout=10, liveness_timeout=5, drain_timeout=15)
    ckpt.save(1, state(rank, 1))
    gate = faults.block(kind="write_at")
    handle = ckpt.save_async(2, state(rank, 2))
    if rank in held:
        gate.wait_reached(20)
    dist.destroy_process_group()
    together(rank)
    assert rank not in held or not handle.done()
    gate.open()
    end(ckpt, handle, rank)

def run(rank):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        join(rank)
        program(rank)
        sys.exit()  # as a program ends, with all that is registered for its end
    return pid

"""
RUN = """
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in [run(0), run(1)]]
print(codes, flush=True)
os._exit(0)
"""
# What a rank does when both have taken the group apart.
ENDS = {
    "nothing": "pass",
    "close": "assert handle.result(20).step == 2\n    ckpt.close()",
    "save": "assert ckpt.save(3, state(rank, 3)).step == 3",
}


def check(folder, *steps):
    assert sorted(entry.name for entry in folder.iterdir()) == [
        f"checkpoint-{step}" for step in steps
    ]

    def program(comm):
        found = []
        with CheckpointManager(folder, comm=comm) as ckpt:
            for step in steps:
                live = [StateComponent("own", {"x": torch.zeros(1000)}, SharingPattern.PER_RANK)]
                ckpt.load(live, step)
                found.append(set(live[0].stateful["x"].tolist()))
        return found

    assert run_ranks(2, program) == [[{step + rank / 2} for step in steps] for rank in (0, 1)]


@pytest.mark.parametrize(
    ("held", "end"),
    [((0, 1), "nothing"), ((1,), "nothing"), ((1,), "close"), ((0, 1), "save")],
    ids=str,
)
def test_a_pending_save_is_committed_all_the_same(tmp_path, run_script, held, end):
    """held: the ranks that have something to write yet when both have taken the group apart."""
    code = f"held = {held}\ndef end(ckpt, handle, rank):\n    {ENDS[end]}\n"
    done = run_script(JOB + code + RUN, tmp_path / "run", timeout=45)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 0]\n", "")
    check(tmp_path / "run", *((1, 2, 3) if end == "save" else (1, 2)))


def test_b16_a_save_that_fails_then_is_the_exit_code_of_both(tmp_path, run_script):
    fails = (
        "    if rank == 1:\n        faults.fail(kind='close', times=None)\n    gate = faults.block"
    )
    code = "held = (0, 1)\ndef end(ckpt, handle, rank):\n    pass\n"
    done = run_script(
        JOB.replace("    gate = faults.block", fails) + code + RUN, tmp_path / "run", timeout=45
    )
    assert (done.returncode, done.stdout) == (0, "[1, 1]\n")
    assert done.stderr.count("ckptcore: the save of step 2 in the background failed: rank 1: ") == 2
    check(tmp_path / "run", 1)
