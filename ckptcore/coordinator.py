"""One checkpoint, all ranks: the flow of a save and of a load, from top to bottom."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from .errors import CoordinationError, InvalidState, NoSpace
from .format.digest import combined_digest
from .format.manifest import CheckpointManifest, ComponentManifest
from .loading.apply import LoadReport, load_components
from .loading.view import CheckpointView
from .ranks.communicator import Communicator, SingleProcess
from .root import Attempt, CheckpointInfo, remove_attempt, remove_checkpoint_folder, scan
from .saving.commit import Receipt, check_place, coverage_error, discard, publish, write_index
from .saving.plan import FilePlan, TensorSpec, plan_component
from .saving.writer import write_files
from .state.adapters import as_components
from .state.component import StateComponent
from .state.layout import TensorBytes
from .state.tree import Captured, capture
from .storage.base import Storage, open_storage

__all__ = ["CheckpointCoordinator", "SaveRequest"]


@dataclass(slots=True)
class SaveRequest:
    """What the caller says about one checkpoint, beside the state."""

    step: int
    run_id: str
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    training_args_hash: str | None = None
    overwrite: bool = False


class CheckpointCoordinator:
    """Saves and loads single checkpoints of the given components.

    state_components: a list of StateComponent, a dict of objects, or a StatefulProvider. io_threads: how many threads
    read and write, by default as many as the process may use cores, at most 8.
    """

    def __init__(
        self,
        state_components: Any,
        process_groups: Mapping[str, Any] | None = None,
        *,
        comm: Communicator | None = None,
        io_threads: int | None = None,
    ) -> None:
        self.components: list[StateComponent] = as_components(state_components)
        self.process_groups = dict(process_groups or {})
        self.comm = comm or SingleProcess()
        self.io_threads = io_threads or default_io_threads()

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        step: int = 0,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        storage_options: dict[str, Any] | None = None,
    ) -> CheckpointInfo:
        """Save to the folder `path`, which becomes the checkpoint. Raises what `save` raises."""
        parent, _, name = os.fspath(path).rstrip("/").rpartition("/")
        storage = open_storage(parent or ".", storage_options)
        request = SaveRequest(step, run_id=secrets.token_hex(8), metadata=metadata or {}, overwrite=overwrite)
        return self.save(storage, name, request)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        strict: bool = True,
        *,
        storage_options: dict[str, Any] | None = None,
        **how: Any,
    ) -> LoadReport:
        """Load from the folder `path`. Raises what `load` raises."""
        return self.load(open_storage(path, storage_options), "", strict=strict, **how)

    def save(self, storage: Storage, name: str, request: SaveRequest) -> CheckpointInfo:
        """Save the components as the checkpoint `name` of `storage`. Nothing is left behind on failure.

        Raises CheckpointExists, UnsupportedValue and InvalidState before a byte is written; StorageError, NoSpace.
        """
        clock = _Clock()
        attempt, sequence = self.comm.together("begin", lambda: None, lambda _: self._begin(storage, name, request))
        folder = f"{name}.partial-{attempt}" if storage.atomic_rename else name
        with Attempt.parse(attempt).in_flight():
            try:
                with clock.phase("capture"):
                    captured = [capture(c.key, c.stateful.state_dict()) for c in self.components]
                with clock.phase("plan"):
                    plans = {c.key: plan_component(c.key, _specs(c), [0]) for c in captured}
                    _check_names([plan for files in plans.values() for plan in files])

                def write() -> Receipt:
                    with clock.phase("write"):
                        self._make_way(storage, name, folder, request)
                        return self._write(storage, folder, captured, plans)

                def commit(receipts: list[Receipt]) -> CheckpointManifest:
                    manifest = self._manifest(request, attempt, sequence, receipts, captured, plans, clock)
                    publish(storage, attempt, folder, name, manifest, request.overwrite)
                    return manifest

                manifest = self.comm.together("commit", write, commit)
            except BaseException as error:
                discard(storage, folder)
                _say_how_much_space(error, self._planned_bytes(locals().get("plans")))
                raise
        return CheckpointInfo(name, storage.at(name), "committed", request.step, None, manifest)

    def _begin(self, storage: Storage, name: str, request: SaveRequest) -> tuple[str, int]:
        check_place(storage, name, request.step, request.overwrite)
        last = max((info.sequence or 0 for info in scan(storage)), default=0)
        return str(Attempt.new(request.run_id)), last + 1

    def _make_way(self, storage: Storage, name: str, folder: str, request: SaveRequest) -> None:
        storage.make_folder(folder)
        if not storage.atomic_rename and check_place(storage, name, request.step, request.overwrite):
            # Files go to their final keys here, so the old manifest has to be withdrawn first.
            remove_checkpoint_folder(storage, name)
            remove_attempt(storage, name)

    def _write(
        self, storage: Storage, folder: str, captured: Sequence[Captured], plans: dict[str, list[FilePlan]]
    ) -> Receipt:
        rank = self.comm.rank
        mine = [plan for files in plans.values() for plan in files if plan.writer == rank]
        sources = {c.key: [TensorBytes(t.tensor) for t in c.tensors] for c in captured}
        written = write_files(storage, folder, mine, sources, self.io_threads)
        return write_index(storage, folder, rank, captured, written, plans if rank == 0 else {})

    def _manifest(
        self,
        request: SaveRequest,
        attempt: str,
        sequence: int,
        receipts: Sequence[Receipt],
        captured: Sequence[Captured],
        plans: dict[str, list[FilePlan]],
        clock: _Clock,
    ) -> CheckpointManifest:
        wrong = coverage_error([plan for files in plans.values() for plan in files], receipts)
        if wrong is not None:
            raise CoordinationError(f"step {request.step}: {wrong}; nothing was committed", step=request.step)
        files = {name: record for receipt in receipts for name, record in receipt.files.items()}
        components = {}
        for component, state in zip(self.components, captured, strict=True):
            names = [plan.name for plan in plans[component.key]]
            values = [r.values[component.key] for r in receipts if component.key in r.values]
            components[component.key] = ComponentManifest(
                component.key,
                component.sharing_pattern.value,
                writers=sorted({plan.writer for plan in plans[component.key]}),
                size_bytes=sum(t.nbytes for t in state.tensors if t.alias_of is None),
                checksum=combined_digest([bytes.fromhex(d) for d in (*values, *(files[n].digest for n in names))]),
                files=names,
                required=component.required,
                tensors=len(state.tensors),
                metadata=component.metadata,
            )
        now = datetime.now(UTC)
        return CheckpointManifest(
            checkpoint_id=secrets.token_hex(16),
            step=request.step,
            run_id=request.run_id,
            attempt_id=attempt,
            sequence=sequence,
            created=now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            world_size=self.comm.world_size,
            nodes=self.comm.nodes,
            components=components,
            files=files,
            metrics=request.metrics,
            metrics_step=request.step if request.metrics else None,
            training_args_hash=request.training_args_hash,
            versions=_versions(),
            environment={"platform": platform.platform(), "host": platform.node()},
            timings=clock.seconds,
            metadata=request.metadata,
        )

    def _planned_bytes(self, plans: dict[str, list[FilePlan]] | None) -> int | None:
        return None if plans is None else sum(plan.size for files in plans.values() for plan in files)

    def load(
        self,
        storage: Storage,
        name: str,
        *,
        strict: bool = True,
        cast: bool = False,
        transactional: bool = False,
    ) -> LoadReport:
        """Load the components from the checkpoint `name` of `storage`, verified.

        Raises CheckpointNotFound, CheckpointCorrupt, UnsupportedVersion, StateMismatch, StorageError.
        """
        view = self.comm.together("resolve", lambda: CheckpointView(storage, name), lambda views: views[0])
        return load_components(
            view, self.components, self.io_threads, strict=strict, cast=cast, transactional=transactional
        )


class _Clock:
    """Seconds spent in each phase of a save, for the manifest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Any:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 6)


def default_io_threads() -> int:
    return min(8, max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2))


def _specs(captured: Captured) -> list[TensorSpec]:
    return [
        TensorSpec(number, t.stored_name, t.dtype, t.shape, t.nbytes)
        for number, t in enumerate(captured.tensors)
        if t.alias_of is None
    ]


def _check_names(plans: Sequence[FilePlan]) -> None:
    names = [plan.name for plan in plans]
    if twice := [plan for plan in plans if names.count(plan.name) > 1]:
        keys = sorted({plan.component for plan in twice})
        raise InvalidState(f"components {keys} would both be stored as {twice[0].name}; rename one", component=keys[0])


def _say_how_much_space(error: BaseException, planned: int | None) -> None:
    if isinstance(error, NoSpace) and planned is not None:
        error.needed = planned
        error.message += f"; the checkpoint needs {planned:,} bytes"


def _versions() -> dict[str, str]:
    from . import __version__

    return {"ckptcore": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
