"""The run: names, the newest checkpoint, restoring past damaged ones, retention."""

from __future__ import annotations

import errno
import logging
import operator
import os
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from .coordinator import CheckpointCoordinator, default_io_threads
from .errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointWarning,
    InvalidState,
    NoUsableCheckpoint,
    RanksDisagree,
    StorageError,
    UnsupportedVersion,
)
from .loading.apply import LoadReport
from .loading.view import CheckpointView, Problem
from .ranks.communicator import Communicator
from .ranks.store import default_communicator
from .retention import RetentionPolicy, best_rule
from .root import (
    CheckpointInfo,
    checkpoint_name,
    committed,
    delete_checkpoint,
    newest_run,
    pin_checkpoint,
    scan,
    sweep,
    unpin_checkpoint,
)
from .saving.join import SaveRequest
from .storage.base import Storage, open_storage

__all__ = ["CheckpointManager"]

log = logging.getLogger("ckptcore")

Checkpoints = list[CheckpointInfo]


class CheckpointManager:
    """Saves and restores one training run in one root.

    root: a local path, an fsspec URL, or a Storage; run_id: name of the run, by default that of the checkpoint restored, or a new
    one. keep: which checkpoints stay after a save (default: all). process_groups, writers: see CheckpointCoordinator.
    load_broadcast: read what all ranks need once, and pass it on.
    join_timeout: seconds that a rank may come later than the others; liveness_timeout: seconds of silence after which
    it counts as lost. On several ranks make it at the same point of the program, and save and load on every rank.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        *,
        keep: RetentionPolicy | None = None,
        comm: Communicator | None = None,
        process_groups: Mapping[str, Any] | None = None,
        storage_options: dict[str, Any] | None = None,
        io_threads: int | None = None,
        run_id: str | None = None,
        writers: Literal["split", "lowest"] = "split",
        load_broadcast: bool = False,
        join_timeout: float = 600.0,
        liveness_timeout: float = 60.0,
    ) -> None:
        self.storage_options = storage_options
        self.storage = open_storage(root, storage_options)
        if keep is not None and not isinstance(keep, RetentionPolicy):
            raise InvalidState(f"keep must be a RetentionPolicy such as KeepLast(3), not {keep!r}")
        self.keep = keep
        self._own_comm = comm is None
        self.comm = comm or default_communicator(join_timeout, liveness_timeout)
        self.process_groups = process_groups
        self.writers = writers
        self.load_broadcast = load_broadcast
        self.io_threads = io_threads or default_io_threads()
        self._run_id = run_id
        self._found_damaged: set[str] = set()

    @property
    def root(self) -> str:
        return self.storage.url

    @property
    def run_id(self) -> str:
        """The run that new checkpoints belong to."""
        if self._run_id is None:
            self._run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        return self._run_id

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave the job's blackboard. Nothing else is pending after a synchronous save."""
        if self._own_comm:
            self.comm.close()

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        training_args_hash: str | None = None,
    ) -> CheckpointInfo:
        """Write the checkpoint of `step`; when this returns it is committed and survives a crash.

        metrics: numbers measured at this step (0-d tensors are fine). metadata: anything that JSON holds.
        Raises CheckpointExists, UnsupportedValue, InvalidState, StorageError, NoSpace; earlier checkpoints stay.
        """
        requests: list[SaveRequest] = []

        def request() -> str:
            number = _checked_step(step)
            replaces = overwrite or checkpoint_name(number) in self._found_damaged
            requests.append(
                SaveRequest(
                    number, self.run_id, _numbers(metrics or {}), dict(metadata or {}), training_args_hash, replaces
                )
            )
            return f"save of step {number}"

        coordinator, _ = self._call(state, request, lambda: None)
        info = coordinator.save(self.storage, checkpoint_name(requests[0].step), requests[0])
        self._found_damaged.discard(info.name)
        self._run_id = info.run_id
        if self.comm.rank == 0:
            self.comm.stay()
            self._clean_up(info)
        return info

    def load(
        self,
        state: Any,
        step: int | str | os.PathLike[str] = "latest",
        *,
        strict: bool = True,
        cast: bool = False,
        transactional: bool = False,
    ) -> LoadReport:
        """Restore `state` from one checkpoint: "latest", "best", a step of this root, or a path or URL of a checkpoint.

        Raises CheckpointNotFound, CheckpointCorrupt, UnsupportedVersion, StateMismatch, StorageError.
        """
        how: dict[str, Any] = {"strict": strict, "cast": cast, "transactional": transactional}
        how["broadcast"] = self.load_broadcast
        elsewhere = isinstance(step, str | os.PathLike) and step not in ("latest", "best")
        coordinator, name = self._call(
            state,
            lambda: f"load of {step}",
            lambda: "" if elsewhere else self._find(step).name,  # type: ignore[arg-type]
        )
        if elsewhere:
            return coordinator.load(open_storage(step, self.storage_options), "", **how)  # type: ignore[arg-type]
        report = coordinator.load(self.storage, name, **how)
        self._adopt(report)
        return report

    def restore(
        self,
        state: Any,
        which: int | str | os.PathLike[str] = "auto",
        *,
        fresh_ok: bool = False,
        strict: bool = True,
        cast: bool = False,
        transactional: bool = False,
    ) -> LoadReport:
        """Restore where a run left off. "auto": the newest checkpoint that verifies, else a fresh start.

        Damaged or unfinished ones are skipped with one CheckpointWarning. A root without any checkpoint starts fresh
        (`report.fresh`); one with only unusable ones raises NoUsableCheckpoint, unless `fresh_ok`. Other values of
        `which` are those of `load`. Raises what `load` raises, but never CheckpointCorrupt for "auto".
        """
        how: dict[str, Any] = {"strict": strict, "cast": cast, "transactional": transactional}
        if which != "auto":
            return self.load(state, which, **how)
        how["broadcast"] = self.load_broadcast
        # A damaged checkpoint is found while it is read. Where the next one, or a fresh start, would not replace all
        # of what was read by then, live state is touched only after everything was verified.
        how["transactional"] = transactional or fresh_ok or not strict
        coordinator, candidates = self._call(state, lambda: "restore", self._candidates)
        skipped: dict[str, str] = {}
        for name, status, reason in candidates:
            if status == "committed":
                try:
                    report = coordinator.load(self.storage, name, **how)
                except (CheckpointCorrupt, CheckpointNotFound, UnsupportedVersion, StorageError) as error:
                    if isinstance(error, StorageError) and error.errno != errno.EIO:
                        raise
                    reason = str(error)
                else:
                    report.skipped = skipped
                    self._adopt(report)
                    self._warn_skipped(skipped, f"restored {name} (step {report.step})")
                    return report
            elif status == "unreadable":
                raise StorageError(f"{name} might be the newest checkpoint and cannot be read: {reason}", path=name)
            skipped[name] = reason
            self._found_damaged.add(name)
        if skipped and not fresh_ok:
            listed = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
            raise NoUsableCheckpoint(
                f"{self.root} holds no checkpoint that can be restored: {listed}; repair or remove them, or pass fresh_ok=True "
                "to start again", path=self.root, reasons=skipped)  # fmt: skip
        self._warn_skipped(skipped, "starting fresh")
        log.info("%s holds no checkpoint of this run: starting fresh", self.root)
        return LoadReport(fresh=True, skipped=skipped)

    def list(self) -> Checkpoints:
        """The committed checkpoints of this run, oldest first; of the run that committed last if none is known yet."""
        infos = scan(self.storage)
        return committed(infos, self._run_id or newest_run(infos))

    def latest(self) -> CheckpointInfo | None:
        """The newest committed checkpoint of this run, by (step, commit sequence)."""
        return next(reversed(self.list()), None)

    def best(self, metric: str | None = None, mode: Literal["min", "max"] | None = None) -> CheckpointInfo | None:
        """The committed checkpoint with the best value of `metric`, by default that of the first KeepBest in `keep`.

        None when no checkpoint has the metric. Raises InvalidState when it is not known what to go by.
        """
        rule = best_rule(self.keep, metric, mode)
        return next(iter(rule.ranked(self.list())), None)

    def pin(self, step: int) -> None:
        """Keep the checkpoint of `step`, whatever the policy says, until `unpin`. Raises CheckpointNotFound."""
        pin_checkpoint(self.storage, self._find(step).name)

    def unpin(self, step: int) -> None:
        """Let retention have the checkpoint of `step` again. Raises CheckpointNotFound."""
        unpin_checkpoint(self.storage, self._find(step).name)

    def verify(self, step: int | str = "latest") -> Sequence[Problem]:
        """Read and check every byte of a checkpoint. Empty when all is well. Raises CheckpointNotFound."""
        return CheckpointView(self.storage, self._find(step).name).verify(self.io_threads)

    def delete(self, step: int) -> None:
        """Remove the checkpoint of `step`. Raises CheckpointNotFound, InvalidState for a pinned one, StorageError."""
        info = self._find(step)
        if info.pinned:
            raise InvalidState(f"{info.url} is pinned; unpin it before it is deleted")
        delete_checkpoint(self.storage, info.name)

    def _call(
        self, state: Any, what: Callable[[], str], decide: Callable[[], Any]
    ) -> tuple[CheckpointCoordinator, Any]:
        """Meet the other ranks, which must make the same call; rank 0 decides what they need to know first.

        A state or an argument that one rank cannot make sense of fails here, on all ranks.
        """
        made: list[CheckpointCoordinator] = []

        def local() -> str:
            made.append(
                CheckpointCoordinator(
                    state, self.process_groups, comm=self.comm, io_threads=self.io_threads, writers=self.writers
                )
            )
            return what()

        def agree(calls: list[str]) -> Any:
            wrong = [rank for rank, call in enumerate(calls) if call != calls[0]]
            if wrong:
                raise RanksDisagree(
                    f"rank 0 calls for a {calls[0]}, rank {wrong[0]} for a {calls[wrong[0]]}", ranks=wrong
                )
            return decide()

        decided = self.comm.together("checkpoint", local, agree, joining=True)
        return made[0], decided

    def _candidates(self) -> Sequence[Sequence[str]]:
        """[name, status, reason] of what a run might be restored from, newest first."""
        infos = scan(self.storage)
        run = self._run_id or newest_run(infos)
        return [
            [info.name, info.status, info.reason or info.status]
            for info in reversed(infos)
            if info.status != "partial" and (run is None or info.run_id in (None, run))
        ]

    def _find(self, step: int | str) -> CheckpointInfo:
        if step == "best":
            if (best := self.best()) is None:
                metric = best_rule(self.keep, None, None).metric
                raise CheckpointNotFound(f"{self.root} has no checkpoint with a metric {metric!r}", path=self.root)
            return best
        passed_over = ("partial", "uncommitted") if step == "latest" else ("partial",)
        found = [i for i in scan(self.storage) if i.status not in passed_over]
        run = self._run_id or newest_run(found)
        infos = [i for i in found if run is None or i.run_id in (None, run)]
        # What is there and damaged, or cannot be read, is not passed over: opening it says what is wrong. A step that
        # only another run of this root has is good enough when it is asked for.
        matching = infos[-1:] if step == "latest" else [i for i in infos if i.step == step] or [
            i for i in found if i.step == step]  # fmt: skip
        if not matching:
            steps = [i.step for i in infos if i.step is not None]
            what = "no checkpoint yet" if step == "latest" else f"no checkpoint of step {step}"
            raise CheckpointNotFound(
                f"{self.root} has {what}; steps there: {', '.join(map(str, steps)) or 'none'}",
                path=self.root, step=step if isinstance(step, int) else None, available=steps)  # fmt: skip
        return matching[-1]

    def _adopt(self, report: LoadReport) -> None:
        if self._run_id is None and report.manifest is not None:
            self._run_id = report.manifest.run_id

    def _warn_skipped(self, skipped: dict[str, str], outcome: str) -> None:
        if skipped and self.comm.rank == 0:
            listed = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
            warnings.warn(f"{self.root}: {outcome}; skipped {listed}", CheckpointWarning, stacklevel=3)

    def _clean_up(self, saved: CheckpointInfo) -> None:
        """Retention and sweeping, after a commit only. What fails is a warning: the checkpoint is safe."""
        try:
            infos = scan(self.storage)
            if self.keep is not None:
                mine = committed(infos, self.run_id)
                keep = self.keep.keep(mine) | {saved.name} | {info.name for info in mine[-1:]}
                for info in mine:
                    if info.name not in keep and not info.pinned:
                        self._delete_or_warn(info)
            sweep(self.storage, infos, self.run_id)
        except Exception as error:  # a policy of the user's own may raise anything
            warnings.warn(
                f"{self.root}: cleaning up after step {saved.step} failed: {error!r}", CheckpointWarning, stacklevel=3
            )

    def _delete_or_warn(self, info: CheckpointInfo) -> None:
        try:
            delete_checkpoint(self.storage, info.name)
        except (StorageError, CheckpointCorrupt) as error:
            warnings.warn(f"{info.url} could not be deleted: {error}", CheckpointWarning, stacklevel=4)


def _checked_step(step: Any) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except (TypeError, ValueError, RuntimeError):
        number = -1
    if number < 0:
        raise InvalidState(f"step must be a whole number >= 0, not {step!r}")
    return number


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InvalidState(f"metric {name!r} is not a number: {error}", key=str(name)) from None
    return numbers
