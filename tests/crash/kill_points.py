"""Kill a process in every storage operation of a save in turn, and look at what is left.

    python kill_points.py FOLDER [--save NAME] KIND/SCENARIO/EVERY/FIRST ...

Run in a process of its own: it imports torch once and forks a child for each kill point, which
saves and dies there; then it restores and goes on as a restarted job would. Takes each EVERY-th
kill point from the FIRST on, and prints a line of JSON for each argument. --save says how to save
(see kill_saves.py).

KIND is "local", the same on a machine that loses power ("local-lost": all that was not made
durable; "local-some": a random part of it; "local-newest": all but the last change), "folder"
(object-store rules over a real folder), "s3" (a server over HTTP: KILL_S3 in the environment has
[URL, storage options]) or "memory" (whose bytes die with the process: the child's death is
`Killed`, raised in it, and the same child goes on as the restarted job).
"""

import argparse
import gc
import json
import os
import random
import shutil
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from kill_objects import Objects
from kill_saves import SAVES, begin, chosen, held, in_training, saved

from ckptcore import CheckpointManager, CheckpointWarning, KeepLast, open_storage
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.saving.plan import plan_component
from ckptcore.storage.remote import FsspecStorage
from ckptcore.testing import KILLED_EXIT_CODE, FaultStorage, Killed, Unsynced, VolatileStorage

torch.set_num_threads(1)
# Several files per component, so that there is something between the first and the last.
plan_component.__kwdefaults__["max_file_bytes"] = 3000


def state_of(mark: int) -> dict:
    """A state in which every value tells which save it is from."""
    g = torch.Generator().manual_seed(mark)
    return {
        "model": {
            "w0": torch.randn(20, 30, generator=g),
            "w1": torch.randn(20, 30, generator=g),
            "b": torch.ones(3) * mark,
        },
        "optimizer": {
            "state": {"w0": {"step": torch.tensor(float(mark)), "m": torch.randn(7, generator=g)}},
            "lr": 1 / mark,
        },
        "progress": {
            "mark": mark,
            "ids": list(range(mark, mark + 5)),
            "big": 2**70 + mark,
            "name": f"mark {mark}",
        },
    }


def blank() -> dict:
    state = state_of(1)
    for value in (*state["model"].values(), *state["optimizer"]["state"]["w0"].values()):
        value.fill_(-1)
    return state


def mark_of(values: dict) -> int:
    """Which save a restored state is from, all of it; AssertionError for a mix."""
    mark = values["progress"]["mark"]
    assert same(dict(values), state_of(mark)), (
        f"a mix: progress is of {mark}, the rest is not: {values}"
    )
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
    """prepare: what was saved before. act: what is killed; it calls `arm` when the next operation
    is number one.

    old, new: marks that a restore may give before and after the commit (None: a fresh start).
    after: the steps that the root holds when the restarted job has made its next save, by the mark
    that was restored.
    """

    prepare: Callable
    act: Callable
    old: tuple
    new: int
    after: dict
    keep: int | None = None


def save(root, step: int, mark: int, keep: int | None = None, **how) -> None:
    manager = CheckpointManager(
        root, keep=KeepLast(keep) if keep else None, io_threads=1, run_id="run", on_event=held
    )
    saved(manager, step, state_of(mark), **how)


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
    die_in(root, "write_at", 4, lambda manager: manager.save(20, state_of(20)))
    die_in(root, "remove", 2, lambda manager: manager.delete(5))
    die_in(root, "remove", 2, lambda manager: manager.save(10, state_of(10), overwrite=True))


def leave_leftovers_in_objects(root) -> None:
    """The same where an overwrite withdraws first: what it was to replace is gone. The step of the
    save will be another one, so that nothing but the sweep takes the leftovers away."""
    for step in (5, 10, 15):
        save(root, step, step)
    die_in(root, "write_at", 4, lambda manager: manager.save(12, state_of(12)))
    die_in(root, "remove", 2, lambda manager: manager.delete(5))
    die_in(root, "remove", 2, lambda manager: manager.save(15, state_of(15), overwrite=True))


def die_in(root, kind: str, at: int, work: Callable) -> None:
    faults = FaultStorage(root)
    faults.kill(at, kind=kind, how="raise")
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
    manager = CheckpointManager(root, io_threads=1, run_id="run", on_event=held)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        assert manager.restore(blank()).step == 10
    arm()
    saved(manager, 20, state_of(20))


def save_while_busy(root) -> None:
    """Save, train, and save again when the first save may not have ended; only in the
    background."""
    manager = CheckpointManager(root, keep=KeepLast(1), io_threads=1, run_id="run", on_event=held)
    begin(manager, 20, state_of(20))
    saved(manager, 30, state_of(30))
    in_training[0][0][1] = in_training[0][1][0]


def acting(call: Callable) -> Callable:
    def act(root, arm) -> None:
        arm()
        call(root)

    return act


SCENARIOS = {
    "first": Scenario(
        nothing, acting(lambda r: save(r, 10, 10)), (None,), 10, {None: [10], 10: [10, 20]}
    ),
    "second": Scenario(
        first, acting(lambda r: save(r, 20, 20)), (10,), 20, {10: [10, 20], 20: [10, 20, 30]}
    ),
    "retention": Scenario(
        first, acting(lambda r: save(r, 20, 20, keep=1)), (10,), 20, {10: [20], 20: [30]}, keep=1
    ),
    "overwrite": Scenario(
        two,
        acting(lambda r: save(r, 20, 20, overwrite=True)),
        (19,),
        20,
        {19: [10, 20, 30], 20: [10, 20, 30], 10: [10, 20]},
    ),
    "repair": Scenario(torn, resume_and_save, (10,), 20, {10: [10, 20], 20: [10, 20, 30]}),
    "delete": Scenario(
        two,
        acting(lambda r: CheckpointManager(r, io_threads=1, run_id="run").delete(20)),
        (19,),
        10,
        {19: [10, 20, 30], 10: [10, 20]},
    ),
    "sweep": Scenario(
        leave_leftovers,
        acting(lambda r: save(r, 20, 20)),
        (10,),
        20,
        {10: [10, 20], 20: [10, 20, 30]},
    ),
    "sweep-objects": Scenario(
        leave_leftovers_in_objects,
        acting(lambda r: save(r, 20, 20)),
        (10,),
        20,
        {10: [10, 20], 20: [10, 20, 30]},
    ),
    "busy": Scenario(
        first, acting(save_while_busy), (10, 20), 30, {10: [20], 20: [30], 30: [40]}, keep=1
    ),
}


def volatile(storage, kind: str, seed: str) -> VolatileStorage:
    """The storage on a machine that loses power; `kind` says what outlives it although nobody made
    it durable."""

    def survives(change: Unsynced) -> bool:
        if kind.endswith("-some"):
            return random.Random(f"{seed} {change}").random() < 0.5
        return kind.endswith("-newest") and change == machine.unsynced()[-1]

    machine = VolatileStorage(storage, survives)
    return machine


class Ground:
    """Where a scenario happens: fresh storages over the same bytes, and the bytes of a prepared
    root."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.objects = Objects(folder.name) if kind == "s3" else None
        self.root = folder / "run"
        self.template = folder / "template"

    @property
    def local(self) -> bool:
        return self.kind.startswith("local")

    def storage(self):
        if self.kind == "memory":
            return open_storage("memory://kill-points/run")
        if self.kind == "folder":
            return FsspecStorage(f"file://{self.root}", {})
        if self.objects:
            return open_storage(f"{self.objects.url}/run", self.objects.options)
        return open_storage(self.root)

    def mortal(self, seed: str):
        """The storage for those who will die: on a machine that loses power, where the kind says
        so."""
        storage = self.storage()
        return (
            volatile(storage, self.kind, seed) if self.local and self.kind != "local" else storage
        )

    def reset(self) -> None:
        if self.objects:
            self.objects.copy("template/", "run/")
        elif self.kind != "memory":  # there a fork of the prepared process is the copy
            shutil.rmtree(self.root, ignore_errors=True)
            if self.template.exists():
                shutil.copytree(self.template, self.root)

    def keep(self) -> None:
        if self.objects:
            self.objects.copy("run/", "template/")
        elif self.kind != "memory" and self.root.exists():
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


def done_in_child(work: Callable):
    code, text = forked(work)
    if code:
        raise RuntimeError(text)
    return json.loads(text)


def attempted(work: Callable[[], int | None]) -> dict:
    """The mark that a restarted job found, or what went wrong with it."""
    try:
        return {"mark": work(), "problem": ""}
    except Exception:
        return {"mark": None, "problem": traceback.format_exc()}


def check_root(storage, manager: CheckpointManager, expected: list[int]) -> None:
    """Nothing but the checkpoints of these steps, whole, and nothing in them but their files."""
    names = [f"checkpoint-{step}" for step in expected]
    there = [entry.name for entry in storage.list()]
    assert there == names, f"the root holds {', '.join(there)}"
    for info in manager.list():
        files = {entry.name for entry in storage.list(info.name)}
        assert files == {*info.manifest.files, MANIFEST_NAME}, (info.name, files)
        assert manager.verify(info.step) == [], info.name
    assert [info.name for info in manager.list()] == names


def restart(ground: Ground, scenario: Scenario) -> int | None:
    """What a restarted job does: restore, save on, clean up. Returns the mark restored (None:
    fresh)."""
    storage = ground.storage()
    keep = KeepLast(scenario.keep) if scenario.keep else None
    # Closed before the next child is forked, which would lack its threads.
    with CheckpointManager(storage, keep=keep, io_threads=1, on_event=held) as manager:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            report = manager.restore(blank(), "auto")
        told = [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]
        assert len(told) == (1 if report.skipped else 0), told
        assert not ground.local or scenario.prepare is torn or not told, told
        mark = None if report.fresh else mark_of(report.values)
        step = next_step(report)
        with warnings.catch_warnings():
            warnings.simplefilter("error", CheckpointWarning)
            saved(manager, step, state_of(step))
        check_root(storage, manager, scenario.after[mark])
    again = CheckpointManager(ground.storage(), io_threads=1).restore(blank(), "auto")
    assert (again.step, mark_of(again.values)) == (step, step)
    return mark


def next_step(report) -> int:
    return 10 if report.fresh else report.step + 10


def die_and_restart(ground: Ground, scenario: Scenario, k: int) -> dict:
    """Kill the k-th operation (0: none). operations: how many there were; mark, problem: of the
    restarted job."""

    def die() -> dict:
        faults = FaultStorage(ground.mortal(str(k)))
        started = [0]
        in_training[0].clear()

        def arm() -> None:
            started[0] = faults.count()
            if k:
                faults.kill(at=k, how="raise" if ground.kind == "memory" else "exit")

        try:
            scenario.act(faults, arm)
        except Killed:
            pass
        ranges = [[number - started[0] for number in ends] for ends in in_training[0]]
        found = {"operations": faults.count() - started[0], "training": ranges}
        return (
            {**found, **attempted(lambda: restart(ground, scenario))}
            if ground.kind == "memory"
            else found
        )

    ground.reset()
    code, text = forked(die)
    if code != (KILLED_EXIT_CODE if k and ground.kind != "memory" else 0):
        raise RuntimeError(f"exit code {code} {text}")
    found = json.loads(text) if text else {"operations": k}
    if ground.kind == "memory":
        return found
    # Where that starts threads, the next child would be forked without them.
    again = partial(attempted, lambda: restart(ground, scenario))
    return {**found, **(done_in_child(again) if ground.objects else again())}


def run(scenario: Scenario, ground: Ground, every: int, first_point: int) -> dict:
    """points: the operations killed; training: how many of them after `save_async` had returned;
    marks: what was restored then, and at last after the work that nobody killed."""
    if ground.kind == "memory":
        scenario.prepare(ground.storage())
    else:
        done_in_child(lambda: scenario.prepare(ground.storage()))
        ground.keep()
    whole = die_and_restart(ground, scenario, 0)
    points = list(range(first_point, whole["operations"] + 1, every))
    found = [die_and_restart(ground, scenario, k) for k in points]
    problems = {
        k: result["problem"]
        for k, result in zip([*points, 0], [*found, whole], strict=True)
        if result["problem"]
    }
    marks = [result["mark"] for result in (*found, whole)]
    training = sum(first < k <= last for k in points for first, last in whole["training"])
    return {
        "operations": whole["operations"],
        "points": points,
        "training": training,
        "marks": marks,
        "problems": problems,
        "old": scenario.old,
        "new": scenario.new,
    }


def main(run_scenario: Callable[[str, str, Path, int, int], dict]) -> None:
    """Do what the command line says, each scenario in a process of its own: the bytes of "memory"
    die with it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("items", nargs="+")
    parser.add_argument("--save", choices=list(SAVES), default="sync")
    given = parser.parse_args()
    chosen["save"] = given.save
    if given.save != "sync" and any(item.startswith(("memory/", "rank-")) for item in given.items):
        parser.error(f"--save {given.save} needs kinds that end the process")
    gc.freeze()  # children that never collect what the parent made copy far fewer pages
    for item in given.items:
        kind, name, every, first_point = item.split("/")
        at = given.folder / f"{kind}-{name}"
        work = partial(run_scenario, name, kind, at, int(every), int(first_point))
        print(json.dumps({f"{kind}/{name}": done_in_child(work)}), flush=True)
        shutil.rmtree(at, ignore_errors=True)


if __name__ == "__main__":
    main(
        lambda name, kind, at, every, first_point: run(
            SCENARIOS[name], Ground(kind, at), every, first_point
        )
    )
