"""The run: names, the newest checkpoint, restoring past damaged ones, retention, saves in the
background. And, without a run, single checkpoints by their paths."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from datetime import UTC, datetime
from functools import cached_property, partial, wraps
from typing import Any, Literal, TypeVar, cast

from .arguments import (
    COUNT_LIMIT,
    check_callable,
    check_flag,
    check_flags,
    check_hash,
    check_name,
    check_one_of,
    check_path,
    check_seconds,
    check_threads,
    checked_options,
    checked_step,
    checked_timeout,
    checked_which,
    is_plain_name,
    shown,
)
from .catalog.catalog import (
    Branch,
    Catalog,
    CleanUp,
    Location,
    best_of,
    branch_from,
    candidates,
    commit_to_load,
    committed,
    entry,
    find,
    newest_run,
    with_commit,
    within,
)
from .catalog.domain import Entries, ScanRound, same_step
from .catalog.folder import (
    MOST_SCANS,
    NOT_OURS,
    CheckpointInfo,
    checked_label,
    folder_name,
    still_there,
)
from .catalog.retention import RetentionPolicy, best_rule, check_policy, unknown_metric
from .errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    CheckpointWarning,
    InvalidState,
    NoUsableCheckpoint,
    StorageError,
    UnsupportedVersion,
)
from .events import OnEvent, SaveEvent
from .format.manifest import CheckpointManifest
from .loading.keys import Keys, Rename
from .loading.load import PARTLY_OVERWRITTEN, LoadJob, LoadReport, LoadRequest, load, same_call
from .loading.view import CheckpointView, Problem
from .nodes.roots import StorageMode, domains_of
from .ranks.communicator import Communicator
from .ranks.store import default_communicator, shared_communicator
from .saving.background import JOIN_SECONDS, SaveHandle, Saves, warn_all
from .saving.devices import Staging
from .saving.plan import KeptPlans, plans_as_asked
from .saving.save import (
    RunFacts,
    SaveCall,
    SavedCheckpoint,
    SaveJob,
    SaveRecord,
    join,
    overwrites,
    save_now,
)
from .state.component import (
    Only,
    StateComponent,
    ValidationLevel,
    as_components,
    chosen_of,
    process_groups_of,
)
from .storage.base import Storage
from .storage.chunks import Workers, default_threads
from .storage.opening import open_storage
from .storage.urls import masked_url, split_url
from .tiers.uploads import Tier, checked_tiers, open_catalog

log = logging.getLogger("ckptcore")

Checkpoints = list[CheckpointInfo]
Files = Mapping[str, bytes | str | os.PathLike[str]]

STEPS = "give a number, 'latest', 'best' or the name that a save was given"

# What the storage says of bytes that are lost, and of a file that went, or became something else,
# meanwhile: another checkpoint may still be whole. Anything else (no permission, no connection) is
# no verdict on this one.
LOST = frozenset({errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR})

F = TypeVar("F", bound=Callable[..., Any])


def one_call(what: str, at: int | None = None, default: Any = "") -> Callable[[F], F]:
    """For a method that is one call of all ranks, whose threads take turns: `what`, in words.

    at: which positional argument is the step that belongs to the words; `default` where it is not
    given.
    """

    def of(method: F) -> F:
        @wraps(method)
        def call(self: CheckpointManager, *args: Any, **named: Any) -> Any:
            self._saves.check_caller()
            step = default
            if at is not None:
                step = args[at] if len(args) > at else named.get("step", default)
            if isinstance(step, str):
                step = masked_url(step) if step else step
            elif type(step) is not int or abs(step) >= COUNT_LIMIT:
                step = shown(step)
            with self.comm.call(f"{what}{step}"):
                return method(self, *args, **named)

        return cast(F, call)

    return of


class CheckpointManager:
    """Saves and restores one training run in one root. On several ranks make it at the same point
    of the program.

    Every call is one of all ranks, with one outcome; only `list`, `latest`, `best`, `wait` and
    `close` are one rank's own (with storage_mode="node" only `wait`).

    root: local path, fsspec URL or Storage; it need not exist yet.
    keep: RetentionPolicy, which checkpoints stay after a save (default None: all).
    comm: Communicator of the ranks (default None: the running torch.distributed job, or a single
        process).
    process_groups: dict of group name -> lists of ranks, ProcessGroup or DeviceMesh dimension, for
        PER_GROUP (default None).
    storage_options: dict for the storage's filesystem, and into no message (default None).
    io_threads: int, threads that read and write (default None: one a core, at most 8).
    run_id: text, name of the run (default None: that of the checkpoint restored, or a new one).
    writers: "split" (default) spreads the bytes of replicated state over its ranks, "lowest" has
        its lowest rank write all.
    load_broadcast: bool, one rank reads what all need and passes it on (default False).
    storage_mode: "shared" (default): all ranks see one storage; "node": each node keeps on its own
        what its ranks need.
    tiers: sequence of Tier, durable roots that checkpoints are uploaded to and restored from
        (default none).
    when_busy: what a save does while the one before is written: "wait" (default), "skip" or
        "raise".
    on_error: "raise" (default): a failed background save raises at the next call; "warn": it is a
        CheckpointWarning.
    staging: how state leaves an accelerator: "auto" (default), "overlap" or "copy"; see
        docs/guide.md.
    reuse: bool, take over files of the run's last checkpoint whose bytes have not changed, by hard
        links or copies that the server makes, instead of writing them again (default False).
    refresh_every: int >= 1, with `reuse`, in how many checkpoints one after another the same bytes
        may be before they are written anew (default 20).
    unchanged: "warn" (default): a CheckpointWarning names, once, parameters with requires_grad=True
        whose bytes are those of the save before; "ignore": nothing is said.
    drain_timeout: seconds that closing, or the end of the program, waits for saves and uploads
        (default 1800).
    on_event: function that is called with each SaveEvent (default None).
    join_timeout: seconds that a rank may come to a call later than others (default 600).
    liveness_timeout: seconds of silence after which a rank counts as lost (default 60).
    error_join_timeout: seconds as join_timeout, for a call made while an exception is handled
        (default 30).

    Raises InvalidState for an argument that is none of these, StorageError for a URL that no
    filesystem knows.
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
        storage_mode: StorageMode = "shared",
        tiers: Sequence[Tier] = (),
        when_busy: Literal["wait", "skip", "raise"] = "wait",
        on_error: Literal["raise", "warn"] = "raise",
        staging: Staging = "auto",
        reuse: bool = False,
        refresh_every: int = 20,
        unchanged: Literal["warn", "ignore"] = "warn",
        drain_timeout: float = 1800.0,
        on_event: OnEvent | None = None,
        join_timeout: float = 600.0,
        liveness_timeout: float = 60.0,
        error_join_timeout: float = 30.0,
    ) -> None:
        # All of them before anything is opened, or begun that would have to be ended.
        check_policy("keep", keep)
        check_one_of("when_busy", when_busy, ("wait", "skip", "raise"))
        check_one_of("on_error", on_error, ("raise", "warn"))
        check_one_of("staging", staging, ("auto", "copy", "overlap"))
        check_flag("load_broadcast", load_broadcast)
        check_parts(comm, process_groups, io_threads, writers, storage_mode)
        check_callable("on_event", on_event)
        drain_timeout = check_seconds("drain_timeout", drain_timeout, zero=True)
        join_timeout = check_seconds("join_timeout", join_timeout)
        liveness_timeout = check_seconds("liveness_timeout", liveness_timeout)
        error_join_timeout = check_seconds("error_join_timeout", error_join_timeout)
        run_id = None if run_id is None else check_name("run_id", run_id)
        self._kept = plans_as_asked(writers, reuse, refresh_every, unchanged)
        self.storage_options = checked_options("storage_options", storage_options)
        self.storage = open_storage(root, self.storage_options)
        tiers = checked_tiers(self.storage, tiers, storage_mode)
        self.keep, self._own_comm = keep, comm is None
        if comm is None:
            comm = default_communicator(join_timeout, liveness_timeout, error_join_timeout)
        self.comm = comm
        self.process_groups, self.writers = process_groups, writers
        self.load_broadcast = load_broadcast
        self.io_threads, self.when_busy = io_threads or default_threads(), when_busy
        self.storage_mode: StorageMode = storage_mode
        self._run_id = run_id
        self._new_run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        self._known_damaged: set[str] = set()
        # Where what is saved next comes from; rank 0 knows what the run has committed after that,
        # and leaves behind.
        self._branch = Branch()
        self._scanned: Checkpoints = []
        self._left: Checkpoints = []
        self._metrics_known = False
        self._catalog, uploads = open_catalog(
            self.storage,
            tiers,
            self.comm.rank == 0,
            on_error,
            drain_timeout,
            self.io_threads,
            lambda event: self._saves.emit(event),
        )
        self._domains = domains_of(self.comm, self._catalog, storage_mode)
        self._saves = Saves(
            self.comm,
            self.io_threads,
            staging,
            on_error,
            drain_timeout,
            on_event,
            self._after_commit,
            uploads,
        )

    @cached_property
    def _job(self) -> SaveJob:
        groups, workers = self.process_groups, self._saves.workers
        return SaveJob(self.comm, self._domains, groups, workers, self._kept)

    def __reduce__(self) -> Any:
        raise one_per_process(self)

    @property
    def root(self) -> str:
        return self.storage.url

    @property
    def run_id(self) -> str:
        """The run that new checkpoints belong to."""
        # A new one is not this manager's run before it has committed: until then `restore` goes by
        # what is in the root.
        return self._new_run_id if self._run_id is None else self._run_id

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None:
            self.close()
            return
        try:  # what is in flight already stays the error that counts
            self.close()
        except Exception as also:
            error.add_note(f"and also: {type(also).__name__}: {also}")

    def close(self) -> None:
        """Wait for a save in the background, and leave the job's blackboard.

        Raises AsyncSaveError when that save failed and this was not raised before, or when it has
        not ended after `drain_timeout` seconds.
        """
        try:
            self._saves.close()
        finally:
            if self._own_comm:
                self.comm.close()

    @one_call("save of step ", 0)
    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        exists: Literal["error", "skip", "replace"] = "error",
        training_args_hash: str | None = None,
        files: Files | None = None,
        name: str | None = None,
    ) -> CheckpointInfo:
        """Write the checkpoint of `step`; when this returns it is committed and survives a crash.

        step: int, 0 to 2**62; for one that has a committed checkpoint see `exists`.
        state: dict of objects and plain values, list of StateComponent, or StatefulProvider.
        metrics: dict of numbers measured at this step, 0-d tensors too (default None).
        metadata: dict of anything that JSON holds, for the manifest (default None).
        overwrite: bool, as exists="replace" (default False).
        exists: what happens where the step has a committed checkpoint: "error" (default), "skip"
            (nothing is saved, and that checkpoint is the result) or "replace".
        training_args_hash: text that a restore compares with its own (default None).
        files: dict of name -> bytes, or path of a local file, which is read now: files that belong
            to the checkpoint beside its tensors, such as config.json, each of at most 1 GiB. Those
            of rank 0 count (storage_mode="node": of the lowest rank of each node; default None).
        name: text, up to 100 ASCII letters, digits and "-_.=+", that the folder's name ends with:
            "checkpoint-500-after-warmup", which is another checkpoint than that of the step alone.
            `load`, `pin` and others take it in the place of a step (default None).

        Raises CheckpointExists, UnsupportedValue, InvalidState and ReplicationMismatch before a
        byte is written; StorageError, NoSpace; AsyncSaveError of the save before. Earlier
        checkpoints are left as they are.
        """
        call = SaveCall(state, step, metrics, metadata, overwrite, training_args_hash)
        call = replace(call, exists=exists, files=files, name=name)
        if (there := self._kept_instead(call)) is not None:
            return self._saves.skip(self._job, there).result() or there
        return self._saves.now(self._job, call, self._run_facts())

    @one_call("save of step ", 0)
    def save_async(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        exists: Literal["error", "skip", "replace"] = "error",
        training_args_hash: str | None = None,
        files: Files | None = None,
        name: str | None = None,
    ) -> SaveHandle:
        """Copy the state, and write the checkpoint of `step` in the background.

        When this returns the state may be changed: on the CPU everything is copied; for what lies
        on an accelerator see `staging`.

        step: int, 0 to 2**62; for one that has a committed checkpoint see `exists`.
        state: dict of objects and plain values, list of StateComponent, or StatefulProvider.
        metrics: dict of numbers measured at this step, 0-d tensors too (default None).
        metadata: dict of anything that JSON holds, for the manifest (default None).
        overwrite: bool, as exists="replace" (default False).
        exists: what happens where the step has a committed checkpoint: "error" (default), "skip"
            (nothing is saved, and that checkpoint is the result) or "replace".
        training_args_hash: text that a restore compares with its own (default None).
        files: dict of name -> bytes, or path of a local file, which is read now: files that belong
            to the checkpoint beside its tensors, such as config.json, each of at most 1 GiB. Those
            of rank 0 count (storage_mode="node": of the lowest rank of each node; default None).
        name: text, up to 100 ASCII letters, digits and "-_.=+", that the folder's name ends with:
            "checkpoint-500-after-warmup", which is another checkpoint than that of the step alone.
            `load`, `pin` and others take it in the place of a step (default None).

        Raises CheckpointExists, UnsupportedValue and InvalidState, and AsyncSaveError of the save
        before. What fails later is raised by the SaveHandle, and by the next call.
        """
        call = SaveCall(state, step, metrics, metadata, overwrite, training_args_hash)
        call = replace(call, exists=exists, files=files, name=name)
        if (there := self._kept_instead(call)) is not None:
            return self._saves.skip(self._job, there)
        return self._saves.begin(self._job, call, self._run_facts(self.when_busy))

    def _kept_instead(self, call: SaveCall) -> CheckpointInfo | None:
        """The committed checkpoint of the step, where the call is to be skipped for it."""
        if not (isinstance(call.exists, str) and call.exists == "skip"):
            return None
        self._saves.wait_for_step(call.step)
        with self._domains.scan("step", joining=True, recall=True) as r:
            overwrites(call)
            step, label = checked_step(call.step), checked_label(call.name)
            calls = r.gather(f"{step} as {label!r}" if label else f"{step}")
            if r.leads:
                same_step("save", calls)
                folder = folder_name(step, label)
                r.verdict = folder if self._in_the_way(r.infos, folder) else None
        return None if r.verdict is None else self._info(r, r.verdict)

    def _in_the_way(self, infos: Checkpoints, folder: str) -> bool:
        """Whether a checkpoint is committed in `folder`, and does not give way."""
        return any(
            info.status == "committed"
            and info.name == folder
            and not (folder in self._known_damaged or self._left_behind(info))
            for info in infos
        )

    def _left_behind(self, info: CheckpointInfo) -> bool:
        """Whether this run has gone back behind a checkpoint of it."""
        ranges = self._branch.abandoned
        mine = info.run_id == self._run_id
        return mine and (info.abandoned if ranges is None else within(info.sequence or 0, ranges))

    def _info(self, listing: ScanRound, name: str) -> CheckpointInfo:
        """A committed checkpoint that rank 0 calls `name`, on every rank."""
        with self.comm.round("info"):
            at = listing.locate(name)
            view = CheckpointView(at.storage, at.folder)
        manifest = view.manifest
        return CheckpointInfo(at.folder, view.url, "committed", manifest.step, None, manifest)

    @one_call("prewarm")
    def prewarm(self, state: Any) -> None:
        """Allocate and touch the memory that the first `save_async` needs, and start its threads.

        state: as for `save`; it is copied once, and not written.
        """
        self._saves.rehearse(self._job, SaveCall(state, 0), self._run_facts())

    def wait(self, timeout: float | None = None) -> bool:
        """Return when no save is being written; False when one still is after `timeout`. Raises
        AsyncSaveError.

        timeout: seconds to wait (default None: for as long as it takes).
        """
        return self._saves.wait(checked_timeout(timeout))

    @property
    def failed_steps(self) -> tuple[int, ...]:
        """Steps whose save in the background failed."""
        return tuple(self._saves.failed_steps)

    @one_call("load of ", 1, "latest")
    def load(
        self,
        state: Any,
        step: int | str | os.PathLike[str] = "latest",
        *,
        strict: bool = True,
        cast: bool = False,
        transactional: bool = False,
        training_args_hash: str | None = None,
        keys: Keys | None = None,
        rename: Rename | None = None,
    ) -> LoadReport:
        """Load the components in `state` from one checkpoint. Others that it has are left alone.

        state: as for `save`; modules, optimizers and tensors are filled in place.
        step: "latest" (default), "best", a step (of several checkpoints of it the last), the name
            of an entry of this root, or the `name` that the save was given, or a path or URL of a
            checkpoint, or its CheckpointInfo.
        strict: bool, names that only one of both sides has are an error (default True), else they
            are in the report.
        cast: bool, convert dtypes that differ (default False: an error).
        transactional: bool, read all into host memory first; live state changes only when all is
            verified (default False).
        training_args_hash: text of now; another than was saved is a CheckpointWarning (default
            None: not compared).
        keys: names to load (default None: all): a name or pattern of "component/name" ("model",
            "model/layers.0.*"), a list of them, or a function of each such name of the live state
            that returns True, False or None, or the name to load it from. Names of an optimizer are
            those of its parameters. `strict` is about what is asked for.
        rename: dict of beginnings of names "component/name", saved -> live ({"ema/": "model/"};
            the first that fits counts), or a function of each saved name that gives the live one
            (default None: names are the same).

        Raises InvalidState (an argument), CheckpointNotFound, CheckpointCorrupt,
        UnsupportedVersion, StateMismatch, StorageError.
        """
        how: dict[str, Any] = {"strict": strict, "cast": cast, "transactional": transactional}
        how |= {"keys": keys, "rename": rename}
        report = self._load(state, step, how, training_args_hash)
        self._compare_hash(report, training_args_hash)
        return report

    def _load(
        self,
        state: Any,
        step: int | str | os.PathLike[str],
        how: dict[str, Any],
        args_hash: str | None,
        only: Only | None = None,
    ) -> LoadReport:
        self._saves.wait_for_pending()
        choose = partial(self._to_load, step)
        with self._domains.scan("join", joining=True) as r:
            request = LoadRequest(**how, broadcast=self.load_broadcast)
            check_hash(args_hash)
            which = checked_which(step)
            # A login that fails on one rank fails the call on all.
            location = self._location(step) if _is_path(step) else None
            job = self._load_job(state, only)
            calls = r.gather(job.call(f"load of {which}", request))
            if r.leads:
                groups = same_call(calls)
                r.verdict = [groups, choose(r.infos) if location is None else None]
        partitions, r.verdict = r.verdict
        loads = partial(load, job, partitions, request=request)
        goes_on = request.keys is None
        if location is not None:
            report = loads(location)
            if self._catalog.has(location.storage):
                # The load is done; where this fails nothing is known to be left behind.
                with suppress(StorageError):
                    self._scanned = self._catalog.scan() if self.comm.rank == 0 else []
                self._adopt(report, goes_on=goes_on)
            return report
        if not r.verdict[0]:  # no entry of the root, so it is a folder here
            try:
                return loads(Location(open_storage(step, self.storage_options), ""))  # type: ignore[arg-type]
            except CheckpointNotFound as error:
                error.message += f", and {self.root} has no entry {step!r}: {STEPS}"
                raise
        report = self._load_chosen(r, choose, loads, request)
        latest = isinstance(step, str) and step == "latest"
        self._adopt(report, goes_on=goes_on, back=not latest)
        return report

    def _load_job(self, state: Any, only: Only | None = None) -> LoadJob:
        components = as_components(state, self.comm.world_size)
        if only is not None:
            components = chosen_of(components, only)
        groups = process_groups_of(state, self.process_groups)
        return LoadJob(self.comm, self._domains, components, groups, self.io_threads)

    def _location(self, path: Any) -> Location:
        """Where a checkpoint is that is given by its path or URL."""
        known = self._catalog.locate_url(os.fspath(path))
        return known or Location(open_storage(path, self.storage_options), "")

    def _to_load(self, step: Any, infos: Checkpoints) -> Any:
        """On rank 0: the choice among what lies in the root."""
        self._scanned = infos
        which = checked_which(step)
        named = isinstance(step, str) and step not in ("latest", "best")
        run = self._run_id or newest_run(infos)
        return commit_to_load(
            infos, entry(infos, run, step) if named else self._chosen(infos, which)
        )

    def _to_restore(self, infos: Checkpoints) -> Any:
        self._scanned = infos
        return candidates(infos, self._run_id)

    def _load_chosen(
        self,
        listing: ScanRound,
        choose: Callable[[Checkpoints], Any],
        loads: Callable[..., LoadReport],
        request: LoadRequest,
    ) -> LoadReport:
        """Load a `choice`: the first of its copies that is whole. Where it was deleted or replaced
        meanwhile, the next choice is loaded.

        Raises what `loads` raises of a checkpoint that is still the one to choose, and
        CheckpointNotFound where there is none any more.
        """
        replaces_all = request.strict or request.transactional
        for _ in range(MOST_SCANS):
            names, step, digest = listing.verdict
            for name in names:
                try:
                    return loads(listing.locate(name), step=step)
                except (CheckpointCorrupt, CheckpointNotFound, StorageError) as error:
                    failed = error
                    if isinstance(error, StorageError) and error.errno not in LOST:
                        raise
                if isinstance(failed, StorageError):
                    break
            touched = PARTLY_OVERWRITTEN in str(failed)
            try:
                after = self._scan_again(choose)
            except CheckpointNotFound as gone:  # deleted while it was read, and nothing follows
                gone.message += PARTLY_OVERWRITTEN if touched else ""
                raise gone from failed
            if after.verdict[2] in (digest, "") or (touched and not replaces_all):
                raise failed
            listing = after
        raise StorageError(
            f"{names[0]} and what came after it were deleted while they were read",
            errno=errno.EAGAIN,
        )

    def _load_newest(
        self, listing: ScanRound, loads: Callable[..., LoadReport]
    ) -> tuple[LoadReport | None, dict[str, str]]:
        """Load the first of the `candidates` that verifies; and which were passed over before it,
        and why.

        After a failure the root is looked at again: what was deleted while it was read has a newer
        one to follow. Where it has none, and an older one is loaded, it counts as passed over. That
        there is none takes two equal looks. Raises what `loads` raises beside damage, and
        StorageError where it cannot be known whether there is a newer one.
        """
        failed: dict[tuple[str, str], str] = {}
        older: dict[str, set[str]] = {}  # than one that failed, by its name
        before: Any = None
        for _ in range(MOST_SCANS):
            name, digest, skipped = _first_whole(listing.verdict, failed)
            if name is None:
                if listing.verdict == before:
                    return None, skipped
                before = listing.verdict
                listing = self._scan_again(self._to_restore)
                continue
            try:
                report = loads(listing.locate(name))
            except (CheckpointCorrupt, CheckpointNotFound, UnsupportedVersion, StorageError) as e:
                if isinstance(e, StorageError) and e.errno not in LOST:
                    raise
                failed[name, digest] = str(e)
                names = [candidate[0] for candidate in listing.verdict]
                older[name] = {*names[names.index(name) + 1 :]}
                listing = self._scan_again(self._to_restore)
                continue
            except CheckpointError as error:
                if touched := [n for (n, _), why in failed.items() if _overwrote(why)]:
                    error.message += (
                        f"; live state was partly overwritten by {touched[0]}, which is damaged, "
                        "before that"
                    )
                raise
            gone = {lost: why for (lost, _), why in failed.items() if name in older[lost]}
            passed = {**gone, **skipped}
            report.skipped = {n: why.replace(PARTLY_OVERWRITTEN, "") for n, why in passed.items()}
            return report, report.skipped
        raise StorageError(
            "checkpoints are deleted faster than they can be read", errno=errno.EAGAIN
        )

    @one_call("restore")
    def restore(
        self,
        state: Any,
        which: int | str | os.PathLike[str] = "auto",
        *,
        fresh_ok: bool = False,
        strict: bool = True,
        cast: bool = False,
        transactional: bool = False,
        training_args_hash: str | None = None,
        keys: Keys | None = None,
        rename: Rename | None = None,
        only: Only | None = None,
    ) -> LoadReport:
        """Restore where a run left off: the newest checkpoint that verifies, or a fresh start
        (`report.fresh`).

        Damaged or unfinished ones are skipped with one CheckpointWarning. A component of the
        checkpoint that `state` lacks is an error (strict, and not left out by `keys` or `only`).

        state: as for `save`; modules, optimizers and tensors are filled in place.
        which: "auto" (default), or what `load` takes as its step.
        fresh_ok: bool, start fresh also where all checkpoints are unusable (default False:
            NoUsableCheckpoint).
        strict: bool, names that only one of both sides has are an error (default True), else they
            are in the report.
        cast: bool, convert dtypes that differ (default False: an error).
        transactional: bool, read all into host memory first; live state changes only when all is
            verified (default False).
        training_args_hash: text of now; another than was saved is a CheckpointWarning (default
            None: not compared).
        keys: names to load, as for `load` (default None: all).
        rename: as for `load` (default None: names are the same).
        only: components of `state` to restore: a name or pattern, a list of them, or a function of
            a name that returns True or False (default None: all). The others stay as they are.

        Raises what `load` raises, but never CheckpointCorrupt for "auto"; NoUsableCheckpoint.
        """
        how: dict[str, Any] = {"strict": strict, "cast": cast, "transactional": transactional}
        how |= {"keys": keys, "rename": rename, "whole": only is None}
        if not (isinstance(which, str) and which == "auto"):
            named = self._load(state, which, how, training_args_hash, only)
            self._compare_hash(named, training_args_hash)
            return named
        self._saves.wait_for_pending()
        with self._domains.scan("join", joining=True) as r:
            check_flags(fresh_ok=fresh_ok, strict=strict)
            check_hash(training_args_hash)
            job = self._load_job(state, only)
            # A damaged checkpoint is found while it is read. Where the next one, or a fresh start,
            # would not replace all of what was read by then, live state is touched only after
            # everything was verified.
            may_keep = any(not c.required or c.on_resize == "keep" for c in job.components)
            late = bool(fresh_ok or not strict or may_keep)
            request = LoadRequest(**how, host_first=late, broadcast=self.load_broadcast)
            calls = r.gather(job.call("restore", request))
            if r.leads:
                r.verdict = [same_call(calls), self._to_restore(r.infos)]
        partitions, r.verdict = r.verdict
        report, skipped = self._load_newest(r, partial(load, job, partitions, request=request))
        # Their steps may be saved again: but for folders that look like somebody else's.
        self._known_damaged.update(
            name for name, reason in skipped.items() if NOT_OURS not in reason
        )
        if report is None:
            return self._started_fresh(skipped, fresh_ok)
        self._adopt(report, goes_on=keys is None, back=False)
        self._compare_hash(report, training_args_hash)
        name = (report.path or "").rpartition("/")[2]
        self._warn_skipped(skipped, f"restored {name} (step {report.step})")
        return report

    def _started_fresh(self, skipped: dict[str, str], fresh_ok: bool) -> LoadReport:
        """Raises NoUsableCheckpoint where that is not to be."""
        if skipped and not fresh_ok:
            raise self._nothing_usable(skipped)
        self._warn_skipped(skipped, "starting fresh")
        log.info("%s holds no checkpoint of this run: starting fresh", self.root)
        self._begin_branch(None, True)
        return LoadReport(fresh=True, skipped=skipped)

    def _nothing_usable(self, skipped: dict[str, str]) -> NoUsableCheckpoint:
        listed = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        return NoUsableCheckpoint(
            f"{self.root} holds no checkpoint that can be restored: {listed}; repair or "
            "remove them, or pass fresh_ok=True to start again",
            path=self.root,
            reasons=skipped,
        )

    @one_call("find of ", 0, "auto")
    def find(
        self, which: int | str = "auto", *, verify: Literal["bytes", "sizes"] = "bytes"
    ) -> CheckpointInfo | None:
        """The checkpoint that `restore(state, which)` would take, before there is a state; None
        where it would start fresh. Give the result to `restore`, `load`, `load_state` or
        `open_checkpoint`. On every rank.

        which: "auto" (default): the newest that verifies; or a step, "latest", "best" or a name:
            that one, None where there is none.
        verify: "bytes" (default): all that it has is read and checked; "sizes": the manifest, and
            that its files are there.

        Raises InvalidState, CheckpointCorrupt for a `which` that is damaged, NoUsableCheckpoint,
        StorageError.
        """
        self._saves.wait_for_pending()
        failed: dict[tuple[str, str], str] = {}
        for _ in range(MOST_SCANS):
            with self._domains.scan("find", joining=True) as r:
                check_one_of("verify", verify, ("bytes", "sizes"))
                wanted = which if which == "auto" else checked_which(which, paths=False)
                calls = r.gather(f"{wanted}, checking {verify}")
                if r.leads:
                    same_step("find", calls)
                    r.verdict = self._meant(r.infos, which, failed)
            name, digest, skipped = r.verdict
            if name is None:
                if skipped:
                    raise self._nothing_usable(skipped)
                return None
            problem = self._first_problem(r, name) if verify == "bytes" else ""
            if not problem:
                self._warn_skipped(skipped, f"found {name}")
                return self._info(r, name)
            if which != "auto":
                raise CheckpointCorrupt(problem, path=name)
            failed[name, digest] = problem
        raise StorageError(
            "checkpoints are deleted faster than they can be read", errno=errno.EAGAIN
        )

    def _meant(
        self, infos: Checkpoints, which: int | str, failed: Mapping[tuple[str, str], str]
    ) -> Any:
        """On rank 0: name and digest of the checkpoint that is meant, and what is passed over."""
        if which == "auto":
            return _first_whole(candidates(infos, self._run_id), failed)
        try:
            info = self._chosen(self._catalog.distinct(infos), checked_which(which, paths=False))
        except CheckpointNotFound:
            return None, "", {}
        if info.manifest is None or info.status != "committed":
            raise CheckpointCorrupt(f"{info.url} is {info.status}: {info.reason}", path=info.url)
        return info.name, info.manifest.digest, {}

    def _first_problem(self, listing: ScanRound, name: str) -> str:
        """What is wrong with the bytes of a checkpoint on one of the nodes; "" where all is well.
        On every rank."""
        info = listing.find(name)
        with self.comm.round("verification") as r:
            found = r.gather([] if info is None else self._verify(info))
            if r.leads:
                r.verdict = next((rows[0][2] for rows in found if rows), "")
        problem: str = r.verdict
        return problem

    @one_call("conflicts after ", 0, 0)
    def conflicts(self, after: int = 0) -> Checkpoints:
        """Committed checkpoints of later steps than `after` that this run would come to and not
        replace: its save of such a step is a CheckpointExists. Empty where the run can go on. On
        every rank; ask after the restore.

        after: int, the step that the run goes on from (default 0).

        Raises InvalidState, StorageError.
        """
        self._saves.wait_for_pending()
        with self._domains.scan("conflicts", joining=True) as r:
            steps = r.gather(checked_step(after))
            if r.leads:
                later = same_step("conflicts", steps)
                steps = [i.step or 0 for i in r.infos if (i.step or 0) > later]
                folders = [folder_name(step, "") for step in dict.fromkeys(steps)]
                r.verdict = [name for name in folders if self._in_the_way(r.infos, name)]
        return [self._info(r, name) for name in r.verdict]

    def list(self) -> Checkpoints:
        """The committed checkpoints of this run, oldest first; of the run that committed last if
        none is known yet.

        One rank may ask alone, unless storage_mode is "node"; what it sees may be newer than what
        another one saw.
        """
        found = self._entries()
        return committed(found.infos, self._run_id or found.run)

    def latest(self) -> CheckpointInfo | None:
        """The newest committed checkpoint of this run, by (step, commit sequence). Who may ask: see
        `list`."""
        return next(reversed(self.list()), None)

    def best(
        self, metric: str | None = None, mode: Literal["min", "max"] | None = None
    ) -> CheckpointInfo | None:
        """The committed checkpoint with the best value of `metric`; None when none has it. Who may
        ask: see `list`.

        metric: text (default None: that of the first KeepBest in `keep`).
        mode: "min" or "max" (default None: that of the KeepBest of this metric, else "min").

        Raises InvalidState when no metric is known.
        """
        found = self._entries()
        rule = best_rule(self.keep, metric, mode, found.infos)
        return best_of(found.infos, self._run_id or found.run, rule)

    def _entries(self) -> Entries:
        return self._entries_of_all() if self._domains.in_rounds else self._domains.entries()

    @one_call("look")
    def _entries_of_all(self) -> Entries:
        return self._domains.entries()

    @one_call("pin of step ", 0)
    def pin(self, step: int | str) -> None:
        """Keep a checkpoint, whatever the policy says, until `unpin`. On every rank.

        step: int, of a committed checkpoint; or its name, as for `load`.

        Raises CheckpointNotFound, InvalidState for a step that has several, StorageError.
        """
        self._act("pin", step, self._catalog.pin)

    @one_call("unpin of step ", 0)
    def unpin(self, step: int | str) -> None:
        """Let retention have a checkpoint again. On every rank.

        step: int, of a committed checkpoint; or its name, as for `load`.

        Raises CheckpointNotFound, InvalidState for a step that has several, StorageError.
        """
        self._act("unpin", step, self._catalog.unpin)

    @one_call("verification of step ", 0, "latest")
    def verify(self, step: int | str = "latest") -> Sequence[Problem]:
        """Read and check every byte of a checkpoint; an empty list when all is well. On every rank.

        step: int, "latest" (default), "best" or a name, as for `load`.

        Raises CheckpointNotFound, InvalidState for a step that has several.
        """
        found = self._act("verification", step, self._verify)
        return [Problem(*row) for rows in found for row in rows]

    def _verify(self, info: CheckpointInfo) -> Sequence[Sequence[Any]]:
        at = self._catalog.locate(info.name)
        view = CheckpointView(at.storage, at.folder)
        found = view.verify(self.io_threads)
        if found and not still_there(at.storage, at.folder, view.manifest):
            raise CheckpointNotFound(
                f"{info.url} was deleted or replaced while it was verified", path=info.url
            )
        described = [replace(p, message=self._domains.describe(p.message)) for p in found]
        return [[*astuple(problem)] for problem in described]

    @one_call("deletion of step ", 0)
    def delete(self, step: int | str) -> None:
        """Remove a checkpoint. On every rank.

        step: int, of a committed checkpoint; or its name, as for `load`.

        Raises CheckpointNotFound, InvalidState for a pinned one and for a step that has several,
        StorageError.
        """
        self._act("deletion", step, self._catalog.delete)

    def _act(self, topic: str, step: Any, work: Callable[[CheckpointInfo], Any]) -> Sequence[Any]:
        wanted = partial(checked_which, step, paths=False)
        return self._domains.act(topic, wanted, self._the_one, work)

    def _the_one(self, infos: Checkpoints, step: int | str) -> CheckpointInfo:
        """What is to be acted on, which a step that has several does not say."""
        found = self._chosen(infos, step)
        of_run = [i for i in infos if i.status == "committed" and i.run_id == found.run_id]
        same = [i.name for i in of_run if i.step == step]
        if len(same) > 1:
            raise InvalidState(
                f"{self.root}: step {step} has {' and '.join(same)}: say which one by its name"
            )
        return found

    def _run_facts(self, when_busy: Literal["wait", "skip", "raise"] = "wait") -> RunFacts:
        # Sequences of what was deleted since are not used again: they may be among the abandoned.
        after = self._branch.last
        if self._catalog.tiers and self.comm.rank == 0:
            after = max(after, self._catalog.tier_sequence(log.warning))
        return RunFacts(
            self.run_id,
            frozenset(self._known_damaged),
            after,
            self._branch.abandoned,
            when_busy=when_busy,
        )

    def _after_commit(self, saved: SavedCheckpoint, comm: Communicator) -> None:
        """On the thread that committed. Nothing here can undo it."""
        info = saved.info
        self._known_damaged.discard(info.name)
        self._run_id = info.run_id
        # What has just been replaced is not left anywhere.
        now = (info.step, info.label)
        self._left = [left for left in self._left if (left.step, left.label) != now]
        if self._left:
            steps = ", ".join(map(str, sorted({left.step or 0 for left in self._left})))
            saved.warnings.append(
                f"{self.root}: step {info.step} was saved after the run had gone back behind what "
                f"it saved of steps {steps}: that is abandoned: "
                "never the newest or the best, and kept by retention as a set of its own"
            )
            self._left = []
        if self.comm.rank == 0 and info.metrics and not self._metrics_known:
            self._check_metrics(saved)
        warn = saved.warnings.append
        after = CleanUp(self.keep, self.run_id, info, warn, self._deleted, saved.listed)
        self._domains.clean_up(comm, after)

    def _check_metrics(self, saved: SavedCheckpoint) -> None:
        """At the first commit that has metrics. Before retention deletes anything by a metric that
        is misspelt."""
        self._metrics_known = True
        if unknown_metric(self.keep, [saved.info]):
            there = committed(with_commit(saved.listed or (), saved.info), self.run_id)
            if (what := unknown_metric(self.keep, there)) is not None:
                saved.warnings.append(f"{self.root}: {what}")

    def _deleted(self, info: CheckpointInfo) -> None:
        self._saves.emit(
            SaveEvent("deleted", info.step or 0, 0, info.name, nbytes=info.size_bytes or 0)
        )

    def _scan_again(self, choose: Callable[[Checkpoints], Any]) -> ScanRound:
        with self._domains.scan("look") as r:
            if r.leads:
                r.verdict = choose(r.infos)
        return r

    def _chosen(self, infos: Checkpoints, step: int | str) -> CheckpointInfo:
        if step != "best":
            return find(self.root, infos, self._run_id, step)
        rule = best_rule(self.keep, None, None, infos)
        if (best := best_of(infos, self._run_id, rule)) is None:
            metric = rule.metric
            raise CheckpointNotFound(
                f"{self.root} has no checkpoint with a metric {metric!r}", path=self.root
            )
        return best

    def _adopt(self, report: LoadReport, *, goes_on: bool, back: bool = True) -> None:
        if self._run_id is None and report.manifest is not None:
            self._run_id = report.manifest.run_id
        if goes_on:
            self._go_on_from(report, back)
        self._saves.uploads.catch_up(self._run_id, report.step or 0)

    def _go_on_from(self, report: LoadReport, back: bool) -> None:
        """What is saved from now on comes after the checkpoint that was loaded, if that is one of
        this run."""
        if report.manifest is not None and report.manifest.run_id == self._run_id:
            self._begin_branch(report.manifest, back)

    def _begin_branch(self, loaded: CheckpointManifest | None, back: bool) -> None:
        """loaded: None for a run that begins anew. back: all that was committed after it is left;
        else what is newer than the newest that could be restored."""
        self._branch = branch_from(loaded, self._scanned, self.run_id, back=back)
        damaged = self._known_damaged
        self._left = [info for info in self._branch.left if info.name not in damaged]
        self._scanned = []

    def _compare_hash(self, report: LoadReport, now: str | None) -> None:
        saved = None if report.manifest is None else report.manifest.training_args_hash
        if self.comm.rank == 0 and None not in (saved, now) and saved != now:
            warnings.warn(
                f"{report.path} was saved with training_args_hash {saved!r}, and is loaded with "
                f"{now!r}: the "
                "training arguments have changed",
                CheckpointWarning,
                stacklevel=3,
            )

    def _warn_skipped(self, skipped: dict[str, str], outcome: str) -> None:
        if skipped and self.comm.rank == 0:
            listed = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
            warnings.warn(
                f"{self.root}: {outcome}; skipped {listed}", CheckpointWarning, stacklevel=3
            )


def _is_path(step: Any) -> bool:
    """Whether what is to be loaded is given by its path or URL, and not as an entry of the root."""
    if not isinstance(step, str):
        return isinstance(step, os.PathLike)
    return step not in ("latest", "best") and not is_plain_name(step)


def _first_whole(
    chosen: Sequence[Any], failed: Mapping[tuple[str, str], str]
) -> tuple[str | None, str, dict[str, str]]:
    """Name and manifest digest of the first candidate that may be restored, and what is passed over
    before it. Raises StorageError for one that cannot be read."""
    skipped: dict[str, str] = {}
    for name, status, reason, digest in chosen:
        if status == "unreadable":
            raise StorageError(
                f"{name} might be the newest checkpoint and cannot be read: {reason}", path=name
            )
        if status == "committed" and (name, digest) not in failed:
            return name, digest, skipped
        skipped[name] = failed.get((name, digest), reason)
    return None, "", skipped


def _overwrote(why: str) -> bool:
    return why.endswith(PARTLY_OVERWRITTEN)


STEP_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,18})")


class CheckpointCoordinator:
    """Saves and loads single checkpoints of the given components, on all ranks.

    state_components: list of StateComponent, dict of objects, or StatefulProvider (whose process
        groups are used too).
    process_groups: dict of group name -> lists of ranks, ProcessGroup or DeviceMesh dimension
        (default None).
    comm: Communicator of the ranks (default None: the running torch.distributed job, or a single
        process).
    io_threads: int, threads that read and write (default None: one a core, at most 8).
    writers: "split" (default) spreads the bytes of replicated state over its ranks, "lowest" has
        its lowest rank write all.
    workers: threads to write with, where they are kept from save to save (default None: threads of
        its own).
    storage_mode: "shared" (default): all ranks see one storage; "node": every node has its own,
        under the same path.

    Raises InvalidState for an argument that is none of these.
    """

    def __init__(
        self,
        state_components: Any,
        process_groups: Mapping[str, Any] | None = None,
        *,
        comm: Communicator | None = None,
        io_threads: int | None = None,
        writers: Literal["split", "lowest"] = "split",
        workers: Workers | None = None,
        storage_mode: StorageMode = "shared",
    ) -> None:
        check_parts(comm, process_groups, io_threads, writers, storage_mode)
        self.comm = shared_communicator() if comm is None else comm
        self.components: list[StateComponent] = as_components(
            state_components, self.comm.world_size
        )
        self.process_groups = process_groups_of(state_components, process_groups)
        self.io_threads = io_threads or default_threads()
        self._own_workers = workers is None
        self.workers = workers or Workers(self.io_threads)
        self.writers = writers
        self.storage_mode: StorageMode = storage_mode

    def __reduce__(self) -> Any:
        raise one_per_process(self)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        checkpoint_id: str | None = None,
        validate: bool | str | ValidationLevel = True,
        step: int | None = None,
        run_id: str | None = None,
        *,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        files: Files | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> CheckpointInfo:
        """Save to the folder `path`, which becomes the checkpoint. A call of all ranks.

        path: local path or fsspec URL of the folder.
        checkpoint_id: text, its id in the manifest, 1 to 64 of `A-Z a-z 0-9 _ . -` (default None: a
            new one).
        validate: True (default): replicas are compared as each component says; False: not this
            time; or the level to compare at.
        step: int (default None: N where the folder is called checkpoint-N, else 0).
        run_id: text, the run that it belongs to; saves of one run share it (default None: a new
            one).
        metadata: dict of anything that JSON holds (default None).
        overwrite: bool, replace a checkpoint that is there (default False).
        files: as for `CheckpointManager.save` (default None).
        storage_options: dict for the filesystem of `path` (default None).

        Raises InvalidState, CheckpointExists, UnsupportedValue, ReplicationMismatch, StorageError,
        NoSpace, CoordinationError.
        """
        with self.comm.call("save_checkpoint"):
            with self.comm.round("save_checkpoint", joining=True):
                parent, name = split_url(check_path("path", path))
                numbered = STEP_NAME.fullmatch(name)
                if step is None:
                    step = int(numbered[1]) if numbered else 0
                run = secrets.token_hex(8) if run_id is None else check_name("run_id", run_id)
                components = [_validated(component, validate) for component in self.components]
                storage = open_storage(parent, storage_options)
            call = SaveCall(components, step, None, metadata, overwrite, None, checkpoint_id, name)
            call = replace(call, files=files)
            return self._save(storage, call, RunFacts(run))

    def _save(self, storage: Storage, call: SaveCall, run: RunFacts) -> CheckpointInfo:
        """A save from the join to the commit. A failure leaves nothing behind."""
        domains = domains_of(self.comm, Catalog(storage), self.storage_mode)
        job = SaveJob(self.comm, domains, self.process_groups, self.workers, self._kept)
        record = SaveRecord()
        try:
            saved = save_now(job, join(job, call, run, record), record)
        except BaseException:
            with suppress(CheckpointWarning):  # as an error it must not hide the one that counts
                warn_all(record.warnings)
            raise
        finally:
            if self._own_workers:
                self.workers.close(JOIN_SECONDS)
        warn_all(record.warnings)
        return saved.info

    @cached_property
    def _kept(self) -> KeptPlans:
        return KeptPlans(split=self.writers == "split")

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        strict: bool = True,
        *,
        cast: bool = False,
        transactional: bool = False,
        keys: Keys | None = None,
        rename: Rename | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> LoadReport:
        """Load from the folder `path`. A call of all ranks.

        path: local path or fsspec URL of a checkpoint.
        strict: bool, names that only one of both sides has are an error (default True), else they
            are in the report.
        cast: bool, convert dtypes that differ (default False: an error).
        transactional: bool, read all into host memory first; live state changes only when all is
            verified (default False).
        keys: names to load, as for `CheckpointManager.load` (default None: all).
        rename: as for `CheckpointManager.load` (default None: names are the same).
        storage_options: dict for the filesystem of `path` (default None).

        Raises what `CheckpointManager.load` raises.
        """
        comm, components, groups = self.comm, self.components, self.process_groups
        with comm.round("join", joining=True) as r:
            request = LoadRequest(strict, cast, transactional, keys=keys, rename=rename)
            storage = open_storage(check_path("path", path), storage_options)
            domains = domains_of(comm, Catalog(storage), self.storage_mode)
            job = LoadJob(comm, domains, components, groups, self.io_threads)
            calls = r.gather(job.call("load_checkpoint", request))
            if r.leads:
                r.verdict = same_call(calls)
        return load(job, r.verdict, Location(storage, ""), request)


def one_per_process(made: Any) -> InvalidState:
    """For what is to be pickled, or copied."""
    return InvalidState(
        f"a {type(made).__qualname__} cannot be pickled or copied: its threads and connections are "
        "those of this process; make one in each process"
    )


def check_parts(comm: Any, groups: Any, io_threads: Any, writers: Any, storage_mode: Any) -> None:
    """The options that a coordinator and a manager share. Raises InvalidState."""
    if not isinstance(comm, Communicator | None):
        raise InvalidState(
            f"comm must be a Communicator, not {shown(comm)}, a {type(comm).__qualname__}"
        )
    process_groups_of(None, groups)
    check_threads("io_threads", io_threads)
    check_one_of("writers", writers, ("split", "lowest"))
    check_one_of("storage_mode", storage_mode, ("shared", "node"))


def _validated(component: StateComponent, validate: Any) -> StateComponent:
    """A component for a save whose replicas are compared as `validate` says."""
    if validate is True:
        return component
    if validate is False:
        return replace(component, validate_replication=False)
    if not isinstance(validate, str):
        raise InvalidState(
            f"validate must be True, False or a ValidationLevel, not {shown(validate)}"
        )
    return replace(component, validation_level=ValidationLevel(validate))
