"""A trainer's checkpoints: which one a run goes on from, what is saved, which is the best."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

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


class Part:
    """A component that any checkpoint of a trainer has, used here or not. of: what it holds."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def state_dict(self) -> Any:
        return {} if self.of is None else self.of.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self.of is not None and state:
            self.of.load_state_dict(state)


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
    """A save that not all ranks know the end of. handle: None where it was waited for."""

    step: int
    stall_s: float
    handle: SaveHandle | None


def best_rule(args: Any) -> KeepBest:
    """By what evaluations measure, which checkpoints are the best."""
    metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    return KeepBest(metric, "max" if args.best_is_greater else "min", args.preserve_n_best)


def retention(args: Any) -> RetentionPolicy | None:
    """Which checkpoints stay."""
    if args.save_total_limit is None:
        return None
    newest = KeepLast(args.save_total_limit)
    keeps_best = args.preserve_best_model or args.load_best_model_at_end
    return newest | best_rule(args) if keeps_best else newest


def is_whole(manifest: CheckpointManifest | None) -> bool:
    """Whether a run can go on from a checkpoint: weights alone (save_only_model) are no run."""
    return manifest is None or manifest.metadata.get("resumable") is not False


def is_restorable(args: Any, env: DistributedEnvironment) -> bool:
    """Whether the run will go on from a checkpoint; known before the model is built."""
    found = bool(args.resume_from_checkpoint)
    if args.resume_from_checkpoint is True and env.rank == 0:
        found = any(is_whole(info.manifest) for info in committed(args.output_dir))
    return bool(env.broadcast_object(found))


def committed(root: str) -> list[CheckpointInfo]:
    """The committed checkpoints in a root, of whatever run."""
    try:
        return [info for info in scan_root(root) if info.status == "committed"]
    except CheckpointNotFound:
        return []


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
        # Where nodes share no disk, no rank sees all checkpoints; else one rank lists for all.
        self.lists = env.rank == 0 or bool(args.save_on_each_node)
        self.last_step: int | None = None  # that was saved, or restored
        self.announced = 0  # saves of which all ranks know how they ended
        self._pending: _Pending | None = None
        self._ends: dict[int, SaveEvent] = {}
        self._replace = bool(args.overwrite_output_dir)
        self._watcher = options.get("on_event")
        self.manager = CheckpointManager(
            self.root,
            keep=retention(args),
            process_groups=process_groups,
            storage_mode="node" if args.save_on_each_node else "shared",
            **{**options, "on_event": self._watch},
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
            if self._pending is not None and self._pending.handle is not None:
                self._pending.handle.give_up()  # nor at the end of the program
        except Exception as also:
            error.add_note(f"and also: {type(also).__name__}: {also}")

    def _watch(self, event: SaveEvent) -> None:
        if event.kind in ("committed", "failed"):
            self._ends[event.step] = event
        if self._watcher is not None:
            self._watcher(event)

    def present(self) -> list[CheckpointInfo]:
        """Of this run, oldest first, on the ranks that list."""
        return list(self.manager.list()) if self.lists else []

    # Going on.

    def restore(self, state: Any, only: Any = None) -> LoadReport | None:
        """Restore what the arguments want; None for a fresh start. On all ranks.

        state: the trainer. only: as `CheckpointManager.restore` takes it.

        Raises CheckpointExists, CheckpointNotFound, InvalidArgument, and what
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
        which = self.chosen()
        if which is None:
            self._replace = True
            return None
        report = self.manager.restore(state, which, only=only)
        if report.fresh or report.manifest is None:
            return None
        self.last_step = report.step if wanted is True else None
        return report

    def chosen(self) -> int | str | None:
        """Which checkpoint to restore; None for a fresh start. On all ranks, as rank 0 sees it."""
        wanted = self.args.resume_from_checkpoint
        infos = self.present() if wanted in (True, "best") else []
        which: int | str | None = None
        weights = False
        if self.env.rank == 0 and wanted is True:
            which = newest_whole(infos)
        elif self.env.rank == 0 and wanted == "best":
            for best in self.rule.ranked(infos)[:1]:
                which, weights = best.step, not is_whole(best.manifest)
        elif self.env.rank == 0:
            which, weights = wanted, holds_weights_alone(wanted)
        which, weights = self.env.broadcast_object((which, weights))
        if which is None and wanted == "best":
            held = f"{self.root} holds no checkpoint with {self.rule.metric}"
            instead = "name one, or another metric_for_best_model"
            text = f"resume_from_checkpoint='best': {held}; {instead}"
            raise CheckpointNotFound(text, path=self.root)
        if weights:
            reason = "it was made with save_only_model and holds weights alone"
            instead = "load it as a model, or name one that holds a whole run"
            raise InvalidArgument("resume_from_checkpoint", wanted, reason, instead)
        return which

    def refuse_later_steps(self, report: LoadReport, state: TrainerState) -> None:
        """Later steps are there that the run's saves would not replace. Raises CheckpointExists."""
        first, last = state.global_step + 1, state.max_steps
        if report.manifest is None or self._replace or self.args.save_strategy == "no":
            return
        run_id = report.manifest.run_id
        mine = [
            info.step
            for info in (committed(self.root) if self.lists and first <= last else [])
            # What the run had abandoned before gives way: that it is to go back was decided then.
            if info.step in range(first, last + 1)
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
        self, step: int, state: Any, *, wait: bool, began: float, metadata: Any, **how: Any
    ) -> str:
        """Save a step, after the one before has ended; its path.

        wait: until it is committed; else it is written in the background. began: when training
        began to wait for it. how: of CheckpointManager.save.
        """
        if self.args.save_only_model:
            metadata = {**metadata, "resumable": False}
        how |= {"training_args_hash": self.args.digest(), "overwrite": self._replace}
        save = self.manager.save if wait else self.manager.save_async
        saved = save(step, state, metadata=metadata, **how)
        self.last_step = step
        handle = saved if isinstance(saved, SaveHandle) else None
        self._pending = _Pending(step, time.perf_counter() - began, handle)
        return self._path(step)

    def _path(self, step: int) -> str:
        return str(Path(self.root) / f"checkpoint-{step}")

    def ended(self) -> int:
        """Saves of which this rank knows how they ended."""
        if self._pending is None:
            return self.announced
        handle = self._pending.handle
        return self.announced + (handle is None or handle.done())

    def wait(self) -> int:
        """Until all saves have ended, however that was; how many there were."""
        if self._pending is not None and self._pending.handle is not None:
            self._pending.handle.wait(None)
        return self.ended()

    def record(self, count: int) -> CommitRecord | None:
        """Of the last of the first `count` saves, if it was not announced yet. On all ranks."""
        pending = self._pending
        if pending is None or self.announced >= count:
            return None
        self._pending, self.announced = None, count
        end = self._ends.pop(pending.step, None) or SaveEvent("failed", pending.step)
        error = pending.handle and pending.handle.error
        failed, stall, took = self.env.max_flags(
            [error is not None, int(pending.stall_s * 1e6), int(end.seconds * 1e6)]
        )
        texts = self.env.gather_objects(str(error) if error else None) if failed else []
        text = next((text for text in texts if text), None)
        size = 0 if failed else end.nbytes
        path = self._path(pending.step)
        return CommitRecord(pending.step, path, not failed, text, stall / 1e3, took / 1e6, size)

    # The best.

    def ranked(self, state: TrainerState) -> list[CheckpointInfo]:
        """Those that have the metric, best first, as far as the run has come; on rank 0."""
        return self.rule.ranked([i for i in self.present() if (i.step or 0) <= state.global_step])

    def check_best(self, state: TrainerState) -> None:
        """The best checkpoint may have gone since: then the best of those present is it."""
        keeps = self.args.load_best_model_at_end or self.args.preserve_best_model
        if state.best_checkpoint is None or not keeps:
            return
        ranked = self.ranked(state)
        now: Any = (state.best_checkpoint, state.best_step, state.best_metric)
        if self.env.rank == 0 and all(info.step != state.best_step for info in ranked):
            now, instead = (None, None, None), "there is no other"
            for best in ranked[:1]:
                now = (best.name, best.step, best.metrics[self.rule.metric])
                instead = f"{best.name} is the best of those present"
            gone = f"{state.best_checkpoint}, the best checkpoint so far, is not there any more"
            warn(f"{gone}; {instead}")
        found = self.env.broadcast_object(now)
        state.best_checkpoint, state.best_step, state.best_metric = found

    def load_best(self, weights: list[StateComponent], state: TrainerState) -> None:
        """Put the best checkpoint's weights into the model; where it is damaged, the next one's."""
        failed: list[str] = []
        now = "the final weights stay"
        for step in self.env.broadcast_object([info.step for info in self.ranked(state)]):
            try:
                self.manager.load(weights, step, transactional=True)
            except (CheckpointCorrupt, CheckpointNotFound) as error:
                failed.append(str(error))
            else:
                now = f"those of checkpoint-{step} are the best of the others"
                if self.env.rank == 0:
                    log.info("loaded the best weights, those of step %d", step)
                break
        else:
            if self.env.rank == 0 and not failed:
                what = f"no checkpoint has {self.rule.metric}; the model stays as it is"
                log.warning("load_best_model_at_end: %s", what)
        if failed and self.env.rank == 0:
            warn(f"the best weights cannot be loaded ({'; '.join(failed)}); {now}")


def warn(text: str) -> None:
    warnings.warn(text, CheckpointWarning, stacklevel=3)


def newest_whole(infos: list[CheckpointInfo]) -> int | str | None:
    """For resume_from_checkpoint=True: the newest that verifies, but for weights alone."""
    whole = [info for info in infos if is_whole(info.manifest)]
    weights = [info for info in infos if not is_whole(info.manifest)]
    newest = whole[-1] if whole else None
    if not weights or (newest is not None and newest.order > weights[-1].order):
        return "auto"
    names = ", ".join(info.name for info in weights)
    warn(f"{names}: weights alone (save_only_model), not resumed from")
    return None if newest is None else newest.step


def holds_weights_alone(path: str) -> bool:
    """Of a checkpoint that is named by its path; what is wrong with it the manager finds."""
    try:
        with open_checkpoint(path) as view:
            return not is_whole(view.manifest)
    except CheckpointError:
        return False


def write_model(
    path: str, state: Mapping[str, Tensor], model: nn.Module, processing_class: Any
) -> None:
    """model.safetensors, and what model and processing class save of themselves, such as the
    config that `from_pretrained` needs. The file is whole or not there."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "model.safetensors"
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    first: dict[Any, str] = {}  # memory -> its first name: safetensors does not take it twice
    firsts = {
        name: first.setdefault(
            (value.data_ptr(), tuple(value.shape)) if value.numel() else name, name
        )
        for name, value in state.items()
    }
    weights = {
        name: state[name].detach().cpu().contiguous() for name in firsts if firsts[name] == name
    }
    aliases = {name: of for name, of in firsts.items() if of != name}
    save_file(weights, partial, metadata={"format": "pt", **aliases})
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(target)
    for part in (getattr(model, "config", None), processing_class):
        save = getattr(part, "save_pretrained", None)
        if save is not None:
            save(path)
