"""Calls that real ranks make in odd ways: on one rank alone, with signals, threads and a store that
stops (see job.py)."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from job import Job, host_store
from programs import attempt

from ckptcore import CheckpointManager, KeepBest, KeepLast, SharingPattern, StateComponent
from ckptcore.ranks.store import StoreCommunicator

LONG = 60.0


class Own:
    """State of a rank's own; `act` is called whenever it is asked for."""

    def __init__(self, rank: int, step: int, act: Callable[[], None] = lambda: None) -> None:
        self.value, self.act = torch.full((64,), 1000.0 * step + rank), act

    def state_dict(self) -> dict[str, Any]:
        self.act()
        return {"x": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["x"]


def state(rank: int, step: int, act: Callable[[], None] = lambda: None) -> list[StateComponent]:
    model = {"w": torch.full((256,), float(step))}
    return [
        StateComponent("own", Own(rank, step, act), SharingPattern.PER_RANK),
        StateComponent("model", model, SharingPattern.REPLICATED),
    ]


def killed_before_joining(job: Job, victim: int, join: float, liveness: float) -> dict[str, Any]:
    """After a save of all, one is killed instead of making the next; each program ends as soon as
    it has its error."""
    job.join()
    ckpt = CheckpointManager(job.folder, join_timeout=join, liveness_timeout=liveness)
    ckpt.save(1, state(job.rank, 1))
    dist.barrier()
    if job.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt(lambda: ckpt.save(2, state(job.rank, 2)))


def table(job: Job) -> dict[str, Any]:
    """Every public call on one rank alone, for each rank, and on all; what came of it, in plain
    values."""
    job.join()
    ckpt = CheckpointManager(
        job.folder, keep=KeepLast(9) | KeepBest("loss"), join_timeout=LONG, liveness_timeout=LONG
    )
    rank, comm, at = job.rank, ckpt.comm, [10]

    def save(how: str) -> Any:
        made = getattr(ckpt, how)(at[0], state(rank, at[0]), metrics={"loss": float(at[0])})
        return made.step if how == "save" else made.result(LONG).step

    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: save("save"),
        "save_async": lambda: save("save_async"),
        "prewarm": lambda: ckpt.prewarm(state(rank, 0)),
        "wait": lambda: ckpt.wait(LONG),
        "load latest": lambda: ckpt.load(state(rank, 0)).step,
        "load step": lambda: ckpt.load(state(rank, 0), 1).step,
        "load path": lambda: ckpt.load(state(rank, 0), str(job.folder / "checkpoint-1")).step,
        "restore": lambda: ckpt.restore(state(rank, 0)).step,
        "list": lambda: [info.step for info in ckpt.list()],
        "latest": lambda: ckpt.latest().step,  # type: ignore[union-attr]
        "best": lambda: ckpt.best().step,  # type: ignore[union-attr]
        "pin": lambda: ckpt.pin(1),
        "unpin": lambda: ckpt.unpin(1),
        "verify": lambda: list(ckpt.verify(1)),
        "delete": lambda: ckpt.delete(2),
    }
    for step in (1, 2):
        ckpt.save(step, state(rank, step), metrics={"loss": float(step)})
    outcomes: dict[str, Any] = {}
    for alone in (*range(job.world_size), None):
        for name, call in calls.items():
            comm.join_timeout = LONG if alone is None else 0.3  # type: ignore[attr-defined]
            dist.barrier()
            if alone in (None, rank):
                outcomes[f"{name} {alone}"] = _outcome(call)
            dist.barrier()
            at[0] += 1
    comm.join_timeout = LONG  # type: ignore[attr-defined]
    outcomes["after"] = _outcome(lambda: ckpt.save(90, state(rank, 90)).step)
    if rank == 1:
        outcomes["close"] = _outcome(ckpt.close)
    dist.barrier()
    if rank != 1:
        outcomes["save after close"] = _outcome(lambda: ckpt.save(91, state(rank, 91)).step)
        outcomes["close"] = _outcome(ckpt.close)
    return outcomes


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return [type(error).__name__, getattr(error, "ranks", None)]


LIVENESS, JOIN = 2.0, 1.5


class Hosted:
    """A store in a process of its own, as torchrun has it, that can be stopped."""

    def __init__(self, job: Job) -> None:
        mine = None
        if job.rank == 0:
            read, write = os.pipe()
            self.pid = os.fork()
            if self.pid == 0:
                parent = os.getppid()
                server, port = host_store()
                os.write(write, str(port).encode())
                while server and os.getppid() == parent:
                    time.sleep(0.2)
                os._exit(0)
            mine = int(os.read(read, 16))
        port = job.port(mine)
        self.store = dist.TCPStore(
            "127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False
        )
        dist.init_process_group(
            "gloo",
            store=self.store,
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=LONG),
        )

    def stop_for(self, seconds: float) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.going_on = threading.Timer(seconds, os.kill, (self.pid, signal.SIGCONT))
        self.going_on.start()

    def end(self) -> None:
        dist.barrier()
        dist.destroy_process_group()
        if hasattr(self, "pid"):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


KINDS = {
    "save": 4,
    "thread": 4,
    "async": 6,
    "state_dict fails": 4,
    "Ctrl-C": 12,
    "Ctrl-C, async": 6,
    "signal, idle": 3,
    "signal, in a save": 3,
    "signal, any time": 3,
    "stop, short": 3,
    "stop, long": 1,
}


class Stress:
    """Random rounds on one rank. All ranks draw the same numbers, so they know who is to do
    what."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job, self.random = job, random.Random(seed)
        self.chance = random.Random(f"{seed} {job.rank}")  # of this rank alone
        self.host = Hosted(job)
        self.comm = StoreCommunicator(
            self.host.store,
            job.rank,
            job.world_size,
            name="stress",
            node="n",
            join_timeout=JOIN,
            liveness_timeout=LIVENESS,
        )
        self.ckpt = CheckpointManager(job.folder, comm=self.comm, keep=KeepLast(2))
        self.step, self.armed, self.handled = 0, False, [""]
        signal.signal(signal.SIGINT, self._interrupted)
        signal.signal(signal.SIGUSR1, self._asked)

    def _interrupted(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def _asked(self, *_: Any) -> None:
        self.handled.append(
            self._try(lambda: self.ckpt.save(self.step + 1, state(self.job.rank, self.step + 1)))
        )

    def _try(self, call: Callable[[], Any]) -> str:
        try:
            self.armed = True
            call()
            self.armed = False
            return "ok"
        except BaseException as error:
            return type(error).__name__
        finally:
            self.armed = False

    def save(self, act: Callable[[], None] = lambda: None, how: str = "save") -> None:
        made = getattr(self.ckpt, how)(self.step, state(self.job.rank, self.step, act))
        if how == "save_async":
            made.result(LONG)

    def one(self, kind: str) -> str:
        """What this rank's part of a round came to."""
        victim = self.random.randrange(self.job.world_size)
        mine = victim == self.job.rank
        if kind == "thread":
            found: list[str] = []
            thread = threading.Thread(target=lambda: found.append(self._try(self.save)))
            thread.start()
            thread.join()
            return found[0]
        if kind == "async":
            return self._busy()
        if kind == "state_dict fails":
            return self._try(lambda: self.save(_fails if mine else time.time))  # type: ignore[arg-type]
        if kind.startswith("Ctrl-C"):
            timer = threading.Timer(
                self.chance.random() * 0.06, os.kill, (os.getpid(), signal.SIGINT)
            )
            if mine:
                timer.start()
            how = "save_async" if "async" in kind else "save"
            found = [self._try(lambda: self.save(lambda: time.sleep(0.005), how))]
            timer.cancel()
            return found[0]
        if kind == "signal, idle":
            signal.raise_signal(signal.SIGUSR1)
            return self.handled[-1]
        if kind == "signal, in a save":
            outer = self._try(lambda: self.save(lambda: signal.raise_signal(signal.SIGUSR1)))
            return f"{outer}, {self.handled[-1]}"
        if kind == "signal, any time":
            timer = threading.Timer(
                self.chance.random() * 0.04, os.kill, (os.getpid(), signal.SIGUSR1)
            )
            timer.start()
            found = [self._try(self.save)]
            timer.join()
            return found[0]
        seconds = 0.4 if kind == "stop, short" else 2.5 * LIVENESS
        stops = (
            (lambda: self.host.stop_for(seconds))
            if self.job.rank == 0 and "stop" in kind
            else (lambda: None)
        )
        return self._try(lambda: self.save(stops))

    def _busy(self) -> str:
        """One save in the background, and another one before it has ended."""
        self.ckpt.when_busy = self.random.choice(["wait", "skip", "raise"])  # type: ignore[assignment]
        handles: list[Any] = []

        def both() -> None:
            handles.append(self.ckpt.save_async(self.step, state(self.job.rank, self.step)))
            handles.append(self.ckpt.save_async(self.step + 1, state(self.job.rank, self.step + 1)))

        found = self._try(both)
        ended = [self._try(handle.result) for handle in handles]
        return f"{found}, {ended}, {[handle.skipped for handle in handles]}"

    def run(self, rounds: int) -> list[list[Any]]:
        found = []
        for number in range(rounds):
            (kind,) = self.random.choices(list(KINDS), list(KINDS.values()))
            if kind == "stop, long" and rounds < 50:
                kind = "stop, short" if number else kind
            dist.barrier()
            started = time.monotonic()
            outcome = self.one(kind)
            seconds = time.monotonic() - started
            dist.barrier()
            if "stop" in kind and self.job.rank == 0:
                self.host.going_on.join()
            dist.barrier()
            self.step += 5
            again = time.monotonic()
            after = self._try(self.save)
            if after == "ok" and self.ckpt.latest().step != self.step:  # type: ignore[union-attr]
                after = "not the newest"
            found.append(
                [kind, outcome, round(seconds, 2), after, round(time.monotonic() - again, 2)]
            )
            self.step += 5
        return found


def _fails() -> None:
    raise ArithmeticError("not now")


def stress(job: Job, seed: int, rounds: int) -> list[list[Any]]:
    run = Stress(job, seed)
    found = run.run(rounds)
    run.ckpt.close()
    dist.barrier()
    run.comm.close()
    run.host.end()
    return found
