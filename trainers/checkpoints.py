"""A trainer's checkpoints: which one a run goes on from, what is saved, and which one is the
best."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptcore import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointInfo,
    CheckpointManager,
    CheckpointManifest,
    CheckpointNotFound,
    CheckpointWarning,
    KeepBest,
    KeepLast,
    LoadReport,
    RetentionPolicy,
    SaveEvent,
    SaveHandle,
    StateComponent,
    StateMismatch,
    open_checkpoint,
    scan_root,
)

from .arguments import InvalidArgument
from .callbacks.protocol import TrainerState
from .parallel.environment import DistributedEnvironment

log = logging.getLogger(__name__)

# Seconds that a rank which fails waits for a save that others may not be there to finish.
PATIENCE = 10.0
OTHER_ROOT = "give another output_dir, or overwrite_output_dir=True to replace them"


# What is in a checkpoint besides the model and what belongs to it.


class Part:
    """A component that any checkpoint of a trainer has, used here or not.

    of: what it holds (None: nothing, in this run). restored: whether a load brings it back.
    """

    def __init__(self, of: Any, restored: bool = True) -> None:
        self.of, self.restored = of, restored

    def state_dict(self) -> Any:
        return {} if self.of is None else self.of.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self.restored and self.of is not None and state:
            self.of.load_state_dict(state)


class EpochAlone(Part):
    """The loader of a run that goes on, where the data of the epoch are to start over."""

    def load_state_dict(self, state: Any) -> None:
        self.of.go_to_epoch(state["epoch"])


class Progress:
    """The trainer's own numbers."""

    def __init__(self, state: TrainerState, meters: Any) -> None:
        self.state, self.meters = state, meters

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state.state_dict(), "meters": self.meters.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state["state"])
        self.meters.load_state_dict(state["meters"])


@dataclass(frozen=True)
class CommitRecord:
    """What on_checkpoint_commit tells of a save that is over."""

    step: int
    path: str
    ok: bool
    error: str | None
    stall_ms: float  # the longest time that a rank's training waited for it
    save_s: float  # from the call to the commit, the longest of the ranks
    bytes: int  # of all ranks


@dataclass(frozen=True)
class _Pending:
    """A save that not all ranks know the end of."""

    step: int
    path: str
    stall_s: float
    saved: SaveHandle | CheckpointInfo  # a handle where it goes on in the background


@dataclass(frozen=True)
class _Start:
    """What a run goes on from. which: for CheckpointManager.restore; None: there is nothing."""

    which: int | str | None
    path: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


def best_rule(args: Any) -> KeepBest:
    """By what evaluations measure, which checkpoints are the best."""
    metric: str = args.metric_for_best_model
    metric = metric if metric.startswith("eval_") else f"eval_{metric}"
    return KeepBest(metric, "max" if args.best_is_greater else "min", args.preserve_n_best)


def retention(args: Any) -> RetentionPolicy | None:
    """Which checkpoints stay."""
    if args.save_total_limit is None:
        return None
    newest = KeepLast(args.save_total_limit)
    keeps_best = args.preserve_best_model or args.load_best_model_at_end
    return newest | best_rule(args) if keeps_best else newest


def is_restorable(args: Any, env: DistributedEnvironment) -> bool:
    """Whether the run will go on from a checkpoint; known before the model is built."""
    wanted = args.resume_from_checkpoint
    found = bool(wanted)
    if wanted is True and env.rank == 0:
        found = any(is_whole(info.manifest) for info in committed(args.output_dir))
    return bool(env.broadcast_object(found))


def committed(root: str) -> list[CheckpointInfo]:
    """The committed checkpoints in a root, of whatever run."""
    try:
        return [info for info in scan_root(root) if info.status == "committed"]
    except CheckpointNotFound:
        return []


def is_whole(manifest: CheckpointManifest | None) -> bool:
    """Whether a run can go on from a checkpoint: weights alone (save_only_model) are no run."""
    return manifest is None or manifest.metadata.get("resumable") is not False


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """Those in a trainer's output_dir, for the time of a run. Made on every rank.

    process_groups, options: what the CheckpointManager is given besides.
    """

    def __init__(
        self,
        args: Any,
        env: DistributedEnvironment,
        process_groups: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self.args, self.env, self.rule = args, env, best_rule(args)
        self.root: str = args.output_dir
        # Where nodes share no disk, no rank sees all of them; else one rank lists for all.
        self.lists = env.rank == 0 or bool(args.save_on_each_node)
        self.last_step: int | None = None  # that was saved, or restored
        self.announced = 0  # saves of which all ranks know how they ended
        self._pending: list[_Pending] = []
        self._seconds: dict[int, float] = {}  # that a save took, by its step
        self._replace = bool(args.overwrite_output_dir)
        self._watcher = options.get("on_event")
        self.manager = CheckpointManager(
            self.root,
            keep=retention(args),
            process_groups=process_groups,
            storage_mode="node" if args.save_on_each_node else "shared",
            **{**options, "on_event": self._saw},
        )

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an error, which stays the one that counts, a save that is staged may finish, but
        nobody waits long for ranks that may be gone."""
        if error is None:
            self.manager.close()
            return
        try:
            if self.manager.wait(None if self.env.world_size == 1 else PATIENCE):
                self.manager.close()
            for pending in self._pending:
                if isinstance(pending.saved, SaveHandle):
                    pending.saved.give_up()  # nor at the end of the program
        except Exception as also:
            error.add_note(f"and also: {type(also).__name__}: {also}")

    def _saw(self, event: SaveEvent) -> None:
        if event.kind in ("committed", "failed"):
            self._seconds[event.step] = event.seconds
        if self._watcher is not None:
            self._watcher(event)

    def present(self) -> list[CheckpointInfo]:
        """Of this run, oldest first, on the ranks that list."""
        return self.manager.list() if self.lists else []

    # Going on.

    def restore(self, state: Any, optimizer: str) -> LoadReport | None:
        """Restore what the arguments want; None for a fresh start. On all ranks.

        state: the trainer. optimizer: the class of its optimizer.

        Raises CheckpointExists, CheckpointNotFound, InvalidArgument, StateMismatch, and what
        CheckpointManager.restore raises.
        """
        wanted = self.args.resume_from_checkpoint
        if wanted is False:
            present = self.manager.latest()
            if present is not None and not self._replace:
                there = f"{self.root} holds checkpoints up to step {present.step}"
                text = f"{there} and the run is not to resume from them: {OTHER_ROOT}"
                raise CheckpointExists(text, path=self.root, step=present.step)
            return None
        start = self.start()
        if start.which is None:
            self._replace = True
            return None
        was = start.metadata.get("optimizer")
        if was not in (None, optimizer):
            optim = start.metadata.get("training_args", {}).get("optim")
            text = (
                f"{start.path} holds the state of the optimizer {was} (optim={optim!r}), and this "
                f"run has {optimizer}: go on with it, or start another run from its weights"
            )
            raise StateMismatch(text, path=start.path)
        report = self.manager.restore(state, start.which)
        if report.fresh or report.manifest is None:
            return None
        self.last_step = report.step if wanted is True else None
        return report

    def start(self) -> _Start:
        """What to go on from, as rank 0 sees it. On all ranks. Raises CheckpointNotFound,
        InvalidArgument."""
        wanted = self.args.resume_from_checkpoint
        infos = self.present() if wanted is True else []
        best = None
        if wanted == "best" and self.lists:
            best = self.manager.best(self.rule.metric, self.rule.mode)
        found: _Start | None = None
        if self.env.rank == 0:
            if wanted is True:
                found = newest_whole(infos)
            elif wanted != "best":
                found = named(wanted)
            elif best is not None and best.manifest is not None and best.step is not None:
                weights = not is_whole(best.manifest)
                found = _Start(None if weights else best.step, best.url, best.manifest.metadata)
        found = self.env.broadcast_object(found)
        if found is None:
            text = f"{self.root} holds no checkpoint with {self.rule.metric}"
            instead = "name one, or another metric_for_best_model"
            text = f"resume_from_checkpoint='best': {text}; {instead}"
            raise CheckpointNotFound(text, path=self.root)
        if wanted is not True and found.which is None:
            reason = "it was made with save_only_model and holds weights alone"
            instead = "load it as a model, or name one that holds a whole run"
            raise InvalidArgument("resume_from_checkpoint", wanted, reason, instead)
        return found

    def refuse_collision(self, report: LoadReport, state: TrainerState) -> None:
        """Later steps than the one that was restored may be there already, those of another run or
        of another end of this one: then nothing is trained that could not be saved, or would
        replace them without being asked. What the run has abandoned before gives way: that it is to
        go back was decided then. Raises CheckpointExists."""
        if self._replace or self.args.save_strategy == "no" or report.manifest is None:
            return
        run_id = report.manifest.run_id
        coming = range(state.global_step + 1, state.max_steps + 1)
        mine = [
            info.step
            for info in (committed(self.root) if self.lists else [])
            if info.step in coming
            and info.name not in report.skipped
            and (info.pinned or not info.abandoned or info.run_id != run_id)
        ]
        steps = sorted({step for steps in self.env.gather_objects(mine) for step in steps})
        if steps:
            named = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
            again = f"the run that goes on from step {state.global_step} would come to again"
            text = f"{self.root} holds {named}, which {again}: {OTHER_ROOT}"
            raise CheckpointExists(text, path=self.root, step=steps[0])

    # Saving.

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float],
        metadata: Mapping[str, Any],
        wait: bool,
        began: float,
    ) -> str:
        """Save a step; its path. wait: until it is committed; else it is written in the background.
        began: when training began to wait for it."""
        if self.args.save_only_model:
            metadata = {**metadata, "resumable": False}
        how: dict[str, Any] = {
            "metrics": metrics,
            "metadata": metadata,
            "training_args_hash": self.args.digest(),
            "overwrite": self._replace,
        }
        manager = self.manager
        saved: SaveHandle | CheckpointInfo = (
            manager.save(step, state, **how) if wait else manager.save_async(step, state, **how)
        )
        self.last_step = step
        path = os.path.join(self.root, f"checkpoint-{step}")
        self._pending.append(_Pending(step, path, time.perf_counter() - began, saved))
        return path

    def ended(self) -> int:
        """Saves of which this rank knows how they ended."""
        count = self.announced
        for pending in self._pending:
            if isinstance(pending.saved, SaveHandle) and not pending.saved.done():
                break
            count += 1
        return count

    def wait(self) -> int:
        """Until all saves have ended, however that was; how many there were."""
        for pending in self._pending:
            if isinstance(pending.saved, SaveHandle):
                pending.saved.wait(None)
        return self.ended()

    def records(self, count: int) -> Iterator[CommitRecord]:
        """Of the first `count` saves, those that were not announced yet. On all ranks."""
        while self.announced < count:
            pending = self._pending.pop(0)
            self.announced += 1
            yield self._record_of(pending)

    def _record_of(self, pending: _Pending) -> CommitRecord:
        saved, seconds = pending.saved, self._seconds.pop(pending.step, 0.0)
        error = saved.error if isinstance(saved, SaveHandle) else None
        failed, stall, took = self.env.max_flags(
            [error is not None, int(pending.stall_s * 1e6), int(seconds * 1e6)]
        )
        texts = self.env.gather_objects(str(error) if error else None) if failed else []
        text = next((text for text in texts if text), None)
        size = 0
        if not failed:
            info = saved.result(0) if isinstance(saved, SaveHandle) else saved
            size = 0 if info is None else info.size_bytes or 0
        return CommitRecord(
            pending.step, pending.path, not failed, text, stall / 1e3, took / 1e6, size
        )

    # The best.

    def _ranked(self, infos: list[CheckpointInfo], state: TrainerState) -> list[CheckpointInfo]:
        """Those that have the metric, best first, as far as the run has come."""
        return self.rule.ranked([i for i in infos if (i.step or 0) <= state.global_step])

    def check_best(self, state: TrainerState) -> None:
        """The best checkpoint may have gone since: then the best of those present takes its
        place."""
        args = self.args
        if state.best_checkpoint is None or not (
            args.load_best_model_at_end or args.preserve_best_model
        ):
            return
        there = self.present()
        found: Any = None
        if self.env.rank == 0 and all(info.step != state.best_step for info in there):
            best = next(iter(self._ranked(there, state)), None)
            found = (None, None, None)
            instead = "there is no other"
            if best is not None:
                found = (best.name, best.step, best.metrics[self.rule.metric])
                instead = f"{best.name} is the best of those present"
            gone = f"{state.best_checkpoint}, the best checkpoint so far, is not there any more"
            warn(f"{gone}; {instead}")
        found = self.env.broadcast_object(found)
        if found is not None:
            state.best_checkpoint, state.best_step, state.best_metric = found

    def load_best(self, weights: list[StateComponent], state: TrainerState) -> None:
        """Put the best checkpoint's weights into the model; those of the next best where it is
        damaged."""
        ranked = [info.step for info in self._ranked(self.present(), state)]
        failed: list[str] = []
        loaded = None
        for step in self.env.broadcast_object(ranked):
            try:
                self.manager.load(weights, step, transactional=True)
            except (CheckpointCorrupt, CheckpointNotFound) as error:
                failed.append(str(error))
            else:
                loaded = step
                break
        if self.env.rank != 0:
            return
        if failed:
            now = "the final weights stay"
            if loaded is not None:
                now = f"those of checkpoint-{loaded} are the best of the others"
            warn(f"the best weights cannot be loaded ({'; '.join(failed)}); {now}")
        elif loaded is None:
            what = f"no checkpoint has {self.rule.metric}; the model stays as it is"
            log.warning("load_best_model_at_end: %s", what)
        if loaded is not None:
            log.info("loaded the best weights, those of step %d", loaded)


def warn(text: str) -> None:
    warnings.warn(text, CheckpointWarning, stacklevel=3)


def newest_whole(infos: list[CheckpointInfo]) -> _Start:
    """For resume_from_checkpoint=True: the newest that verifies, but for weights alone."""
    whole = [info for info in infos if is_whole(info.manifest)]
    weights = [info for info in infos if not is_whole(info.manifest)]
    newest = whole[-1] if whole else None
    metadata = newest.manifest.metadata if newest and newest.manifest else {}
    start = _Start("auto", newest.url if newest else "", metadata)
    if not weights or (newest is not None and newest.order > weights[-1].order):
        return start
    names = ", ".join(info.name for info in weights)
    warn(f"{names}: weights alone (save_only_model), not resumed from")
    return _Start(None if newest is None else newest.step, start.path, metadata)


def named(path: str) -> _Start:
    """For a checkpoint that is named by its path."""
    try:
        with open_checkpoint(path) as view:
            manifest = view.manifest
            return _Start(path if is_whole(manifest) else None, view.url, manifest.metadata)
    except CheckpointError:
        return _Start(path)  # the manager says so, on all ranks


def is_elsewhere(report: LoadReport, root: str) -> bool:
    """Whether what was restored lies in another root: its log files are another run's."""
    return Path(report.path or "").resolve().parent != Path(root).resolve()
