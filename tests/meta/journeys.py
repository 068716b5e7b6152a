"""Prints what a reader must follow from a call to the disk, what the ranks say to each other on
the way, and how many manifests a save reads.

Run as a program by test_journeys.py. modules: of ckptcore that are entered. moves: from one file to
another and back, as a debugger steps, in each thread for itself; entering a thread is one more.
closures: functions made in functions, lambdas too, among those that are entered: each place of the
source once, however often it is called.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

import ckptcore
from ckptcore import CheckpointManager, KeepLast
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.ranks.board import MemoryBoard
from ckptcore.ranks.communicator import Communicator
from ckptcore.ranks.rounds import BoardCommunicator
from ckptcore.storage.base import Storage
from ckptcore.testing.ranks import run_ranks

ROOT = os.path.dirname(ckptcore.__file__) + "/"
FIRST_WRITE = ("storage/local.py", "_Writer._write")


def journey(work: Callable[[], Any], stop: tuple[str, str] | None = None) -> dict[str, int]:
    """What `work` enters of ckptcore, in this thread and those it starts, until `stop` (file,
    function) is entered."""
    modules: set[str] = set()
    closures: set[CodeType] = set()
    where: dict[int, str] = {}  # thread -> the file that it is in
    moves = -1  # entering the first file is none
    ended = stop is None

    def step(frame: FrameType, event: str, _: Any) -> None:
        nonlocal moves, ended
        if event not in ("call", "return") or (file := file_of(frame)) is None:
            return
        if ended and stop is not None:
            return
        if event == "return":
            back = frame.f_back
            while back is not None and file_of(back) is None:
                back = back.f_back
            file = file if back is None else file_of(back) or file
        elif "<locals>" in frame.f_code.co_qualname:
            closures.add(frame.f_code)
        thread = threading.get_ident()
        moves += where.get(thread) != file
        where[thread] = file
        modules.add(file)
        ended = ended or (event == "call" and (file, frame.f_code.co_qualname) == stop)

    threading.setprofile(step)
    sys.setprofile(step)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert ended, f"{stop} was never entered"
    return {"modules": len(modules), "moves": moves, "closures": len(closures)}


def file_of(frame: FrameType) -> str | None:
    """The module of ckptcore that a frame is in; None for others and for comprehensions."""
    file, name = frame.f_code.co_filename, frame.f_code.co_qualname
    if not file.startswith(ROOT) or "/testing/" in file or "<genexpr>" in name or "comp>" in name:
        return None
    return file.removeprefix(ROOT)


def talk() -> dict[str, int]:
    """Rounds that rank 0 leads, and messages to the board, of the second background save and of a
    restore on two ranks."""
    rounds: Counter[str] = Counter()
    messages: Counter[str] = Counter()
    what = ""
    one_round, put = BoardCommunicator.round, MemoryBoard.put

    def counted_round(self: BoardCommunicator, *args: Any, **kwargs: Any) -> Any:
        rounds[what] += self.rank == 0
        return one_round(self, *args, **kwargs)

    def counted(self: MemoryBoard, key: str, value: bytes) -> None:
        messages[what] += "alive/" not in key
        put(self, key, value)

    BoardCommunicator.round, MemoryBoard.put = counted_round, counted  # type: ignore[method-assign]
    gate = threading.Barrier(2)

    def program(comm: Communicator) -> None:
        nonlocal what
        state = {"model": torch.nn.Linear(4, 4)}
        state["model"].load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
        with CheckpointManager(root, comm=comm, keep=KeepLast(2)) as manager:
            manager.save_async(1, state).result(60)
            manager.wait()
            for name, work in (
                ("save", lambda: manager.save_async(2, state).result(60)),
                ("restore", lambda: manager.restore(state)),
            ):
                gate.wait(60)
                what = name
                gate.wait(60)
                work()
                gate.wait(60)

    root = tempfile.mkdtemp()
    run_ranks(2, program)
    return {
        f"{kind} of a {name}": count[name]
        for name in ("save", "restore")
        for kind, count in (("rounds", rounds), ("messages", messages))
    }


def manifests_read() -> dict[str, int]:
    """By the 2nd, 10th and 30th save of a manager, with retention and without."""
    found: dict[str, int] = {}
    reads = 0
    read = Storage.read

    def counted(self: Storage, path: str, *args: Any) -> bytes:
        nonlocal reads
        reads += path.endswith(MANIFEST_NAME)
        return read(self, path, *args)

    Storage.read = counted  # type: ignore[method-assign]
    for keep, name in ((KeepLast(5), "keeping 5"), (None, "keeping all")):
        with CheckpointManager(tempfile.mkdtemp(), keep=keep) as manager:
            for step in range(1, 31):
                reads = 0
                manager.save(step, {"x": torch.zeros(4)})
                if step in (2, 10, 30):
                    found[f"save {step}, {name}"] = reads
    Storage.read = read  # type: ignore[method-assign]
    return found


def main() -> None:
    state = {"model": torch.nn.Linear(4, 4)}
    manager = CheckpointManager(tempfile.mkdtemp(), keep=KeepLast(2))
    manager.save(1, state)  # what is imported late is there now
    found = {
        "save to the first byte": journey(lambda: manager.save(2, state), FIRST_WRITE),
        "restore": journey(lambda: manager.restore(state)),
        "talk": talk(),
        "manifests read": manifests_read(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
