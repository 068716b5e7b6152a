"""Saves of real ranks that get a signal after the commit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from job import Job

import ckptcore
from ckptcore import CheckpointManager, KeepLast, SharingPattern, StateComponent

PLACES = (str(Path(ckptcore.__file__).parent), contextlib.__file__)
LONG = 60.0


class SignalAfterCommit:
    """Sends this process SIGINT at the `at`-th call of a function of the engine, or of contextlib
    for it, that its main thread comes to once `manifest` is there: at their beginnings Python looks
    for signals. calls: how many it came to; where: that of the signal."""

    def __init__(self, manifest: Path, at: int) -> None:
        self.manifest, self.at, self.calls, self.where = manifest, at, 0, ""

    def __enter__(self) -> SignalAfterCommit:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if file.startswith(PLACES) and (self.calls or self.manifest.exists()):
            self.calls += 1
            if self.calls == self.at:
                self.where = f"{file}:{frame.f_lineno}"
                os.kill(os.getpid(), signal.SIGINT)


def own(rank: int, mark: int) -> list[StateComponent]:
    value = torch.full((8,), float(mark + rank))
    return [StateComponent("own", {"x": value}, SharingPattern.PER_RANK)]


def interrupted_after_commit(job: Job, victim: int, points: list[int]) -> list[Any]:
    """For each of `points`: what came of a save of step 2 and the events of it, where the signal
    came, and what the next save and a load of step 2 gave. Ends where no such call is reached."""
    job.join()
    outcomes: list[Any] = []
    for at in points:
        root, kinds = job.folder / str(at), []
        with CheckpointManager(
            root,
            keep=KeepLast(2),
            on_event=lambda event, kinds=kinds: kinds.append([event.kind, event.step]),
            join_timeout=LONG,
            liveness_timeout=LONG,
        ) as ckpt:
            ckpt.save(1, own(job.rank, 10))
            trap = SignalAfterCommit(root / "checkpoint-2" / "checkpoint_manifest.json", at)
            outcome: Any = None
            try:
                if job.rank == victim:
                    with trap:
                        outcome = ckpt.save(2, own(job.rank, 20)).step
                else:
                    outcome = ckpt.save(2, own(job.rank, 20)).step
            except (KeyboardInterrupt, Exception) as error:
                outcome = f"{type(error).__name__}: {error}"
            kinds_of_2 = [kind for kind, step in kinds if step == 2]
            later, state = ckpt.save(3, own(job.rank, 30)).step, own(job.rank, 0)
            step = ckpt.load(state, 2).step
            value = float(state[0].stateful["x"][0])
            outcomes.append([at, outcome, kinds_of_2, trap.where, later, step, value])
            with ckpt.comm.round("whether it came") as r:
                reached = r.gather(bool(trap.where))
                if r.leads:
                    r.verdict = reached[victim]
            if not r.verdict:
                break
    return outcomes
