"""One checkpoint, all ranks: the flow of a save and of a load, from top to bottom."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from .arguments import check_name, check_one_of, check_path, check_threads, shown
from .catalog.catalog import Catalog, Location
from .catalog.folder import CheckpointInfo
from .errors import CheckpointWarning, InvalidState
from .loading.keys import Keys
from .loading.load import LoadJob, LoadReport, LoadRequest, load, same_call
from .nodes.roots import StorageMode, domains_of
from .ranks.communicator import Communicator
from .ranks.store import shared_communicator
from .saving.background import JOIN_SECONDS, warn_all
from .saving.plan import KeptPlans
from .saving.save import RunFacts, SaveCall, SaveJob, SaveRecord, StagedSave, capture, finish, join
from .state.component import StateComponent, ValidationLevel, as_components, process_groups_of
from .storage.base import Storage
from .storage.chunks import Workers, default_threads
from .storage.opening import open_storage
from .storage.urls import split_url

__all__ = ["CheckpointCoordinator"]

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
            return self._save(storage, call, RunFacts(run))

    def _save(self, storage: Storage, call: SaveCall, run: RunFacts) -> CheckpointInfo:
        """A save from the join to the commit. A failure leaves nothing behind."""
        domains = domains_of(self.comm, Catalog(storage), self.storage_mode)
        job = SaveJob(self.comm, domains, self.process_groups, self.workers, self._kept)
        record = SaveRecord()
        try:
            joined = join(job, call, run, record)
            saved = finish(StagedSave(capture(job, joined, record)))
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
        storage_options: dict for the filesystem of `path` (default None).

        Raises what `CheckpointManager.load` raises.
        """
        comm, components, groups = self.comm, self.components, self.process_groups
        with comm.round("join", joining=True) as r:
            request = LoadRequest(strict, cast, transactional, keys=keys)
            storage = open_storage(check_path("path", path), storage_options)
            domains = domains_of(comm, Catalog(storage), self.storage_mode)
            job = LoadJob(comm, domains, components, groups, self.io_threads)
            calls = r.gather(job.call("load_checkpoint", request))
            if r.leads:
                r.verdict = same_call(calls)
        return load(job, r.verdict, Location(storage, ""), request)


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
