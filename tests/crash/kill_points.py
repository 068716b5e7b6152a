"""Kill a process in every storage operation of a save in turn, and look at what is left.

    python kill_points.py STORAGE FOLDER SCENARIO ...

Run in a process of its own: it imports torch once, starts no thread, and forks a child for each kill point, which
saves and dies there, and another one, which restores and goes on as a restarted job would. Prints a line of JSON for
each scenario. STORAGE is "local", "folder" (object-store rules over a real folder) or "memory" (whose bytes die with
the process: the child's death is `Killed`, raised in it, and the same child goes on as the restarted job).
"""

import gc
import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptcore import CheckpointManager, CheckpointWarning, KeepLast, open_storage
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.saving.plan import plan_component
from ckptcore.storage.remote import FsspecStorage
from ckptcore.testing import KILLED_EXIT_CODE, FaultStorage, Killed

torch.set_num_threads(1)
# Several files per component, so that there is something between the first and the last.
plan_component.__kwdefaults__["max_file_bytes"] = 3000


def state_of(mark: int) -> dict:
    """A state in which every value tells which save it is from."""
    g = torch.Generator().manual_seed(mark)
    return {
        "model": {"w0": torch.randn(20, 30, generator=g), "w1": torch.randn(20, 30, generator=g), "b": torch.ones(3) * mark},
        "optimizer": {"state": {"w0": {"step": torch.tensor(float(mark)), "m": torch.randn(7, generator=g)}}, "lr": 1 / mark},
        "progress": {"mark": mark, "ids": list(range(mark, mark + 5)), "big": 2**70 + mark, "name": f"mark {mark}"},
    }  # fmt: skip


def blank() -> dict:
    state = state_of(1)
    for value in (*state["model"].values(), *state["optimizer"]["state"]["w0"].values()):
        value.fill_(-1)
    return state


def mark_of(values: dict) -> int:
    """Which save a restored state is from, all of it; AssertionError for a mix."""
    mark = values["progress"]["mark"]
    assert same(values, state_of(mark)), f"a mix: progress is of {mark}, the rest is not: {values}"
    return mark


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@dataclass(frozen=True)
class Scenario:
    """prepare: what was saved before. act: what is killed; it calls `arm` when the next operation is number one.

    old, new: marks that a restore may give before and after the commit (None: a fresh start). after: the steps that
    the root holds when the restarted job has saved step 30, by the mark that was restored.
    """

    prepare: Callable
    act: Callable
    old: tuple
    new: int
    after: dict
    keep: int | None = None


def save(root, step: int, mark: int, keep: int | None = None, **how) -> None:
    manager = CheckpointManager(root, keep=KeepLast(keep) if keep else None, io_threads=1, run_id="run")
    manager.save(step, state_of(mark), **how)


def tear(storage) -> None:
    """Damage step 20 as an interrupted copy does: a file is too short."""
    name = next(e.name for e in storage.list("checkpoint-20") if e.name.startswith("model-00001-"))
    data = storage.read(f"checkpoint-20/{name}")
    storage.remove(f"checkpoint-20/{name}")
    storage.write(f"checkpoint-20/{name}", data[:100])


def leave_leftovers(root) -> None:
    """What a killed save, a killed deletion and a killed overwrite leave."""
    save(root, 5, 5)
    save(root, 10, 9)
    die_in(root, "write_at", lambda manager: manager.save(20, state_of(20)))
    die_in(root, "remove", lambda manager: manager.delete(5))
    die_in(root, "remove", lambda manager: manager.save(10, state_of(10), overwrite=True))


def die_in(root, kind: str, work: Callable) -> None:
    faults = FaultStorage(root)
    faults.kill(at=2, kind=kind, how="raise")
    try:
        work(CheckpointManager(faults, io_threads=1, run_id="run"))
    except Killed:
        return
    raise RuntimeError("was not killed")


def nothing(root) -> None:
    pass


def first(root) -> None:
    save(root, 10, 10)


def two(root) -> None:
    save(root, 10, 10)
    save(root, 20, 19)


def torn(root) -> None:
    two(root)
    tear(root)


def resume_and_save(root, arm) -> None:
    manager = CheckpointManager(root, io_threads=1, run_id="run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        assert manager.restore(blank()).step == 10
    arm()
    manager.save(20, state_of(20))


def acting(call: Callable) -> Callable:
    def act(root, arm) -> None:
        arm()
        call(root)

    return act


SCENARIOS = {
    "first": Scenario(nothing, acting(lambda r: save(r, 10, 10)), (None,), 10, {None: [10, 20, 30], 10: [10, 20, 30]}),
    "second": Scenario(first, acting(lambda r: save(r, 20, 20)), (10,), 20, {10: [10, 20, 30], 20: [10, 20, 30]}),
    "retention": Scenario(first, acting(lambda r: save(r, 20, 20, keep=1)), (10,), 20, {10: [30], 20: [30]}, keep=1),
    "overwrite": Scenario(two, acting(lambda r: save(r, 20, 20, overwrite=True)), (19,), 20,
                          {19: [10, 20, 30], 20: [10, 20, 30], 10: [10, 20, 30]}),
    "repair": Scenario(torn, resume_and_save, (10,), 20, {10: [10, 20, 30], 20: [10, 20, 30]}),
    "delete": Scenario(two, acting(lambda r: CheckpointManager(r, io_threads=1, run_id="run").delete(20)), (19,), 10,
                       {19: [10, 20, 30], 10: [10, 20, 30]}),
    "sweep": Scenario(leave_leftovers, acting(lambda r: save(r, 20, 20)), (10,), 20,
                      {10: [10, 20, 30], 20: [10, 20, 30]}),
}  # fmt: skip


class Ground:
    """Where a scenario happens: fresh storages over the same bytes, and the bytes of a prepared root."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.root = folder / "run"
        self.template = folder / "template"

    def storage(self):
        if self.kind == "memory":
            return open_storage("memory://kill-points/run")
        if self.kind == "folder":
            return FsspecStorage(f"file://{self.root}", {})
        return open_storage(self.root)

    def reset(self) -> None:
        if self.kind != "memory":  # there a fork of the prepared process is the copy
            shutil.rmtree(self.root, ignore_errors=True)
            if self.template.exists():
                shutil.copytree(self.template, self.root)

    def keep(self) -> None:
        if self.kind != "memory" and self.root.exists():
            shutil.copytree(self.root, self.template)


def forked(work: Callable) -> tuple[int, str]:
    """Exit code and what was reported by `work` in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        code = 0
        try:
            text = json.dumps(work())
        except BaseException:
            text, code = traceback.format_exc(), 1
        with os.fdopen(write, "w") as pipe:
            pipe.write(text)
        os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def restart(ground: Ground, scenario: Scenario) -> int | None:
    """What a restarted job does: restore, save on, clean up. Returns the mark restored (None: fresh)."""
    storage = ground.storage()
    manager = CheckpointManager(storage, keep=KeepLast(scenario.keep) if scenario.keep else None, io_threads=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        report = manager.restore(blank(), "auto")
    told = [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]
    assert len(told) == (1 if report.skipped else 0), told
    assert ground.kind != "local" or scenario.prepare is torn or not told, told
    mark = None if report.fresh else mark_of(report.values)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        if report.fresh:
            manager.save(10, state_of(10))
            manager.save(20, state_of(20))
        elif report.step == 10:
            manager.save(20, state_of(20))
        manager.save(30, state_of(30))
    expected = [f"checkpoint-{step}" for step in scenario.after[mark]]
    there = [entry.name for entry in storage.list()]
    assert there == expected, f"the root holds {', '.join(there)}"
    for info in manager.list():
        names = {entry.name for entry in storage.list(info.name)}
        assert names == {*info.manifest.files, MANIFEST_NAME}, (info.name, names)
        assert manager.verify(info.step) == [], info.name
    assert [info.name for info in manager.list()] == expected
    again = CheckpointManager(ground.storage(), io_threads=1).restore(blank(), "auto")
    assert (again.step, mark_of(again.values)) == (30, 30)
    return mark


def die_and_restart(ground: Ground, scenario: Scenario, k: int) -> tuple[bool, int | None, str]:
    """Whether the k-th operation existed (False: the work ended before it), the mark restored, and what went wrong."""

    def die() -> dict:
        faults = FaultStorage(ground.storage())

        def arm() -> None:
            faults.kill(at=k, how="raise" if ground.kind == "memory" else "exit")

        killed = False
        try:
            scenario.act(faults, arm)
        except Killed:
            killed = True
        return {"killed": killed, "came back": come_back() if ground.kind == "memory" else None}

    def come_back() -> dict:
        try:
            return {"mark": restart(ground, scenario), "problem": ""}
        except Exception:
            return {"mark": None, "problem": traceback.format_exc()}

    ground.reset()
    code, text = forked(die)
    if code not in (0, KILLED_EXIT_CODE):
        raise RuntimeError(text)
    if ground.kind == "memory":
        found = json.loads(text)
        return found["killed"], found["came back"]["mark"], found["came back"]["problem"]
    came_back = json.loads(forked(come_back)[1])
    return code == KILLED_EXIT_CODE, came_back["mark"], came_back["problem"]


def run(name: str, kind: str, folder: Path) -> dict:
    """marks: what was restored after a kill at operation 1, 2, ..., and after the work that nobody killed."""
    scenario, ground = SCENARIOS[name], Ground(kind, folder / name)
    if kind == "memory":
        scenario.prepare(ground.storage())
    else:
        code, text = forked(lambda: scenario.prepare(ground.storage()))
        if code:
            raise RuntimeError(text)
        ground.keep()
    marks, problems, killed = [], {}, True
    while killed:
        killed, mark, problem = die_and_restart(ground, scenario, len(marks) + 1)
        marks.append(mark)
        if problem:
            problems[len(marks)] = problem
    return {"points": len(marks) - 1, "marks": marks, "problems": problems, "old": scenario.old, "new": scenario.new}


def main(kind: str, folder: str, *names: str) -> None:
    gc.freeze()  # children that never collect what the parent made copy far fewer pages
    for name in names:
        # The bytes of "memory" are those of the process: each scenario has one of its own.
        code, text = forked(lambda name=name: run(name, kind, Path(folder)))
        if code:
            raise RuntimeError(text)
        print(json.dumps({name: json.loads(text)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
