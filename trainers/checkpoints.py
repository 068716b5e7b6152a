"""A trainer's checkpoints: where a run goes on, and what is told of each save."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptcore import (
    CheckpointError,
    CheckpointExists,
    CheckpointInfo,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    KeepBest,
    KeepLast,
    RetentionPolicy,
    SaveEvent,
    SaveHandle,
    StateComponent,
    StateMismatch,
    open_checkpoint,
    scan_root,
)

from .arguments import InvalidArgument
from .records import stored_logging_dir

if TYPE_CHECKING:
    from .trainer_parts import TrainerParts

__all__ = ["CommitRecord", "Saves"]

log = logging.getLogger(__name__)

PATIENCE = (
    10.0  # seconds that a rank which fails waits for a save that others may not be there to finish
)


@dataclass(frozen=True)
class CommitRecord:
    """What on_checkpoint_commit tells of a save that is over."""

    step: int
    path: str
    ok: bool
    error: str | None
    stall_ms: float  # the longest time that a rank's training waited for it
    save_s: float  # from the request to the commit, the longest of the ranks
    bytes: int  # of all ranks


@dataclass
class Pending:
    step: int
    path: str
    began: float
    stall_s: float
    saved: SaveHandle | CheckpointInfo  # a handle where it goes on in the background

    @property
    def handle(self) -> SaveHandle | None:
        return self.saved if isinstance(self.saved, SaveHandle) else None


class Saves:
    """The checkpoints of one trainer in its output_dir."""

    def __init__(self, trainer: TrainerParts) -> None:
        self.trainer = trainer
        self.last_step: int | None = None  # that was saved, or restored
        self.announced = 0  # saves of which all ranks know how they ended
        self._pending: list[Pending] = []
        self._ended: dict[int, float] = {}  # when a save was over, by its step
        self._replace = False

    @property
    def looks(self) -> bool:
        """Whether this rank lists checkpoints: where nodes share no disk, no rank sees them all."""
        return self.trainer.rank == 0 or bool(self.trainer.args.save_on_each_node)

    def committed(self) -> list[CheckpointInfo]:
        """The committed checkpoints in output_dir, of whatever run, as this rank sees them."""
        try:
            return [
                info
                for info in scan_root(self.trainer.args.output_dir)
                if info.status == "committed"
            ]
        except CheckpointNotFound:
            return []

    def weights(self) -> list[StateComponent]:
        return [part for part in self.trainer.model_components() if part.key == "model"]

    def policy(self) -> RetentionPolicy | None:
        args = self.trainer.args
        if args.save_total_limit is None:
            return None
        newest, best = KeepLast(args.save_total_limit), self.trainer.best.rule
        return newest if best is None else newest | best

    @contextmanager
    def open(self) -> Iterator[CheckpointManager]:
        """The manager for the time of a run. An error that ends the run stays the one that
        counts."""
        self._pending.clear()
        self.announced = 0
        manager = CheckpointManager(
            self.trainer.args.output_dir,
            keep=self.policy(),
            process_groups=self.trainer.get_process_groups(),
            storage_mode="node" if self.trainer.args.save_on_each_node else "shared",
            on_event=self._saw,
        )
        try:
            yield manager
        except BaseException as error:
            self.leave(manager, error)
            raise
        manager.close()

    def leave(self, manager: CheckpointManager, error: BaseException) -> None:
        """After an error: a save that is staged may finish, but nobody waits long for ranks that
        may be gone."""
        try:
            ended = manager.wait(None if self.trainer.world_size == 1 else PATIENCE)
            if ended:
                manager.close()
            for pending in self._pending:
                if pending.handle is not None:
                    pending.handle.give_up()  # nor at the end of the program
        except Exception as also:
            error.add_note(f"and also: {type(also).__name__}: {also}")

    def _saw(self, event: SaveEvent) -> None:
        if event.kind in ("committed", "failed"):
            self._ended[event.step] = time.perf_counter()

    def restorable(self) -> bool:
        """Whether the run will go on from a checkpoint; known before the model is built."""
        args = self.trainer.args
        wanted = args.resume_from_checkpoint
        found: Any = bool(wanted)
        if wanted is True and self.trainer.rank == 0:
            found = any(map(_resumable, self.committed()))
        return bool(self.trainer.env.broadcast_object(found))

    def restore(self, checkpoints: CheckpointManager) -> tuple[int | None, dict[str, Any]]:
        """Step that was restored, if any, and the metadata of its checkpoint."""
        trainer, args = self.trainer, self.trainer.args
        wanted = args.resume_from_checkpoint
        self.last_step, self._replace = None, args.overwrite_output_dir
        if wanted is False:
            present = checkpoints.latest()
            if present is not None and not args.overwrite_output_dir:
                raise CheckpointExists(
                    f"{args.output_dir} holds checkpoints up to step {present.step} and the run "
                    "is not to "
                    "resume from them: give another output_dir, or overwrite_output_dir to "
                    "replace them",
                    path=args.output_dir,
                    step=present.step,
                )
            return None, {}
        chosen = self.which(checkpoints, wanted)
        if chosen is None:
            self._replace = True
            return None, {}
        self.check_optimizer(checkpoints, chosen)
        report = checkpoints.restore(trainer, chosen)
        if report.fresh or report.manifest is None:
            return None, {}
        self.last_step = trainer.state.global_step if wanted is True else None
        self.refuse_to_run_into(report.skipped, report.manifest.run_id)
        metadata = dict(report.manifest.metadata)
        if Path(report.path or "").resolve().parent != Path(args.output_dir).resolve():
            trainer.callbacks.resumed_elsewhere()
            metadata.pop("logging_dir", None)
        if trainer.rank == 0:
            log.info("resumed from step %d (%s)", trainer.state.global_step, report.path)
            self.tell_changes(report.manifest.world_size, metadata)
        trainer.best.check(checkpoints)
        return trainer.state.global_step, metadata

    def check_optimizer(self, checkpoints: CheckpointManager, chosen: int | str) -> None:
        """Before anything is loaded: the moments of one optimizer are nothing for another. Raises
        StateMismatch."""
        trainer = self.trainer
        listed = isinstance(chosen, int) or chosen == "auto"
        infos = checkpoints.list() if listed and self.looks else []
        wrong = None
        if trainer.rank == 0:
            path, metadata = stored_metadata(infos, chosen)
            was, now = metadata.get("optimizer"), class_name(trainer.optimizer)
            if was not in (None, now):
                optim = metadata.get("training_args", {}).get("optim")
                wrong = (
                    path,
                    f"{path} holds the state of the optimizer {was} (optim={optim!r}), and this "
                    f"run has {now}",
                )
        if (told := trainer.env.broadcast_object(wrong)) is not None:
            path, what = told
            raise StateMismatch(
                f"{what}: go on with the same optimizer, or start another run from its weights",
                path=path,
            )

    def refuse_to_run_into(self, damaged: Iterable[str], run_id: str) -> None:
        """Later steps than the one that was restored may be there already, those of another run or
        of another end of this
        one: then nothing is trained that could not be saved, or would replace them without being
        asked. What the run has abandoned before gives way: that it is to go back was decided then.
        Raises CheckpointExists."""
        trainer, args = self.trainer, self.trainer.args
        if self._replace or args.save_strategy == "no" or trainer.is_over():
            return
        span = range(trainer.state.global_step + 1, trainer.state.max_steps + 1)
        infos = self.committed() if self.looks else []
        gives_way = {
            *damaged,
            *(i.name for i in infos if i.abandoned and i.run_id == run_id and not i.pinned),
        }
        mine = [info.step for info in infos if info.step in span and info.name not in gives_way]
        steps = sorted({step for steps in trainer.env.gather_objects(mine) for step in steps})
        if steps:
            raise CheckpointExists(
                f"{args.output_dir} holds step{'s' * (len(steps) > 1)} "
                f"{', '.join(map(str, steps))}, which the run that goes "
                f"on from step {trainer.state.global_step} would come to again: give another "
                "output_dir, or "
                "overwrite_output_dir=True to replace them",
                path=args.output_dir,
                step=steps[0],
            )

    def which_is_best(self, checkpoints: CheckpointManager) -> int:
        """For resume_from_checkpoint="best". Raises CheckpointNotFound."""
        best, root = self.trainer.best, self.trainer.args.output_dir
        ranked = KeepBest(best.metric, best.mode).ranked(checkpoints.list()) if self.looks else []
        step = self.trainer.env.broadcast_object(
            next((info.step for info in ranked if _resumable(info)), None)
        )
        if step is None:
            raise CheckpointNotFound(
                f"resume_from_checkpoint='best': {root} holds no checkpoint of a whole run with "
                f"{best.metric}; name one, "
                "or another metric_for_best_model",
                path=root,
            )
        return int(step)

    def which(self, checkpoints: CheckpointManager, wanted: bool | str) -> int | str | None:
        """What to restore: weights alone are no run to go on with. None: there is nothing else."""
        if wanted == "best":
            return self.which_is_best(checkpoints)
        if isinstance(wanted, str):
            refused = False
            if self.trainer.rank == 0:
                try:
                    with open_checkpoint(wanted) as view:
                        refused = view.manifest.metadata.get("resumable") is False
                except CheckpointNotFound:
                    pass  # the manager says so, on all ranks
            if self.trainer.env.broadcast_object(refused):
                raise InvalidArgument(
                    "resume_from_checkpoint",
                    wanted,
                    "it was made with save_only_model and holds weights alone",
                    "load it as a model, or name one that holds a whole run",
                )
            return wanted
        chosen: Any = "auto"
        infos = checkpoints.list() if self.looks else []
        if self.trainer.rank == 0:
            skipped = [info for info in infos if not _resumable(info)]
            whole = [info for info in infos if _resumable(info)]
            if skipped and (not whole or skipped[-1].order > whole[-1].order):
                chosen = whole[-1].step if whole else None
                warnings.warn(
                    f"{', '.join(info.name for info in skipped)}: weights alone "
                    "(save_only_model), not resumed from",
                    CheckpointWarning,
                    stacklevel=2,
                )
        return self.trainer.env.broadcast_object(chosen)  # type: ignore[no-any-return]

    def tell_changes(self, ranks: int, metadata: dict[str, Any]) -> None:
        """One warning for all that makes the run another one than it was."""
        args = self.trainer.args
        changed = list(args.differences(metadata.get("training_args", {})))
        if ranks != self.trainer.world_size:
            changed.append(
                f"number of ranks {ranks} -> {self.trainer.world_size} (random streams start anew)"
            )
        if changed:
            log.warning(
                "changed since the checkpoint: %s. The states of optimizer, schedule and data "
                "position come from the "
                "checkpoint all the same",
                ", ".join(changed),
            )

    # Saving.

    def prepare(self, checkpoints: CheckpointManager) -> None:
        """After the first step, when all of the state has come to be: have ready what the first
        save would wait for."""
        if self.trainer.args.save_async and self.trainer.args.save_strategy != "no":
            checkpoints.prewarm(self.settled_state())

    def settled_state(self) -> Any:
        """What is saved, with nothing of it under way any more."""
        self.trainer.meters.settle(self.trainer)
        self.trainer.share_state()
        return self.weights() if self.trainer.args.save_only_model else self.trainer

    def save(self, checkpoints: CheckpointManager, wait: bool = False) -> None:
        """Save this step, once. wait: until it is committed; else it is written in the
        background."""
        trainer, args = self.trainer, self.trainer.args
        step = trainer.state.global_step
        if self.last_step == step:
            return
        began = time.perf_counter()
        self.settle()
        trainer.best.note_save()
        state = self.settled_state()
        wait = wait or not args.save_async
        call: Any = checkpoints.save if wait else checkpoints.save_async
        out = call(
            step,
            state,
            metrics=self.metrics(),
            metadata={
                "training_args": args.as_dict(),
                "optimizer": class_name(trainer.optimizer),
                "logging_dir": stored_logging_dir(args, trainer.logging_dir),
                **({"resumable": False} if args.save_only_model else {}),
            },
            training_args_hash=args.digest(),
            overwrite=self._replace,
        )
        stall = time.perf_counter() - began
        self.last_step = step
        path = os.path.join(args.output_dir, f"checkpoint-{step}")
        self._pending.append(Pending(step, path, began, stall, out))
        trainer.fire("on_save", checkpoint_path=path, checkpoint_step=step)
        if wait:
            self.announce(self.announced + len(self._pending))

    def metrics(self) -> dict[str, float]:
        """What was measured at this step."""
        history, step = self.trainer.state.log_history, self.trainer.state.global_step
        found = history[-1] if history and history[-1]["step"] == step else {}
        names = ("loss", "grad_norm", "learning_rate", "epoch")
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, int | float) and (name in names or name.startswith("eval_"))
        }

    def count_ended(self) -> int:
        """Saves of which this rank knows how they ended."""
        ended = self.announced
        for pending in self._pending:
            if pending.handle is not None and not pending.handle.done():
                break
            ended += 1
        return ended

    def announce(self, count: int) -> None:
        """on_checkpoint_commit, for the first `count` saves of the run. On all ranks."""
        while self.announced < count:
            pending = self._pending.pop(0)
            self.announced += 1
            self.trainer.fire("on_checkpoint_commit", record=self.record_of(pending))

    def record_of(self, pending: Pending) -> CommitRecord:
        handle = pending.handle
        error = handle.error if handle is not None else None
        seconds = self._ended.pop(pending.step, pending.began) - pending.began
        failed, stall, took = self.trainer.env.max_flags(
            [error is not None, int(pending.stall_s * 1e6), int(seconds * 1e6)]
        )
        texts = self.trainer.env.gather_objects(str(error) if error else None) if failed else []
        size = 0
        if not failed:
            info = (
                pending.saved
                if isinstance(pending.saved, CheckpointInfo)
                else pending.saved.result(0)
            )
            size = 0 if info is None else info.size_bytes or 0
        text = next((text for text in texts if text), None)
        return CommitRecord(
            pending.step, pending.path, not failed, text, stall / 1e3, took / 1e6, size
        )

    def settle(self) -> None:
        """Wait for the save in the background, as the next one would, and tell how it ended before
        that raises it."""
        for pending in self._pending:
            if pending.handle is not None:
                pending.handle.wait(None)
        self.announce(self.announced + len(self._pending))

    def finish(self, checkpoints: CheckpointManager) -> None:
        """The final wait. Raises AsyncSaveError when a save failed and nobody was told."""
        self.settle()
        checkpoints.wait()


def stored_metadata(
    infos: Sequence[CheckpointInfo], chosen: int | str
) -> tuple[str, dict[str, Any]]:
    """Path and metadata of the checkpoint that is to be restored; none where restoring it will say
    what is wrong."""
    if isinstance(chosen, int) or chosen == "auto":
        fits = [
            info for info in infos if chosen in ("auto", info.step) and info.manifest is not None
        ]
        return (
            (fits[-1].url, fits[-1].manifest.metadata) if fits and fits[-1].manifest else ("", {})
        )
    try:
        with open_checkpoint(chosen) as view:
            return view.url, view.manifest.metadata
    except CheckpointError:
        return chosen, {}


def class_name(optimizer: Any) -> str:
    return type(optimizer).__qualname__


def _resumable(info: CheckpointInfo) -> bool:
    return info.manifest is None or info.manifest.metadata.get("resumable") is not False
