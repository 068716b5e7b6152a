"""One checkpoint, all ranks: the flow of a save and of a load, from top to bottom."""

from __future__ import annotations

import os
import platform
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

import torch

from .attempts import Attempt
from .errors import CheckpointWarning, InvalidState, NoSpace, StorageError
from .format.manifest import CheckpointManifest, Copy
from .loading.apply import Loading, LoadReport
from .loading.join import join_load
from .ranks.communicator import Communicator
from .ranks.replication import validate
from .ranks.sharding import ShardedState, agree_layouts, validate_shards
from .ranks.store import shared_communicator
from .root import CheckpointInfo, mark_attempt, remove_attempt, remove_checkpoint_folder, scan
from .saving.commit import Receipt, Share, check_place, discard, files_and_components, publish, write_share
from .saving.join import JoinedSave, SaveRequest, join_save
from .saving.plan import TensorSpec, plan_component
from .state.adapters import as_components
from .state.component import SharingPattern, StateComponent, StatefulProvider, ValidationLevel
from .state.tree import Captured, capture
from .storage.base import Storage, open_storage

__all__ = ["CheckpointCoordinator"]


class CheckpointCoordinator:
    """Saves and loads single checkpoints of the given components, on all ranks together.

    state_components: a list of StateComponent, a dict of objects, or a StatefulProvider (whose process groups are
    used too). process_groups: name -> lists of ranks, ProcessGroup, or DeviceMesh dimension. comm: by default the
    running torch.distributed job. io_threads: how many threads read and write, by default as many as the process may
    use cores, at most 8. writers: "split" spreads the bytes of replicated state over its ranks, "lowest" does not.
    """

    def __init__(
        self,
        state_components: Any,
        process_groups: Mapping[str, Any] | None = None,
        *,
        comm: Communicator | None = None,
        io_threads: int | None = None,
        writers: Literal["split", "lowest"] = "split",
    ) -> None:
        self.comm = comm or shared_communicator()
        self.components: list[StateComponent] = as_components(state_components, self.comm.world_size)
        if process_groups is None and isinstance(state_components, StatefulProvider):
            process_groups = state_components.get_process_groups()
        self.process_groups = dict(process_groups or {})
        self.io_threads = io_threads or default_io_threads()
        if writers not in ("split", "lowest"):
            raise InvalidState(f"writers must be 'split' or 'lowest', not {writers!r}")
        self.writers = writers

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
        parent, name = _split(os.fspath(path))
        storage = open_storage(parent, storage_options)
        request = SaveRequest(step, run_id=secrets.token_hex(8), metadata=metadata or {}, overwrite=overwrite)
        return self.save(storage, name, request)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        strict: bool = True,
        *,
        cast: bool = False,
        transactional: bool = False,
        storage_options: dict[str, Any] | None = None,
    ) -> LoadReport:
        """Load from the folder `path`. Raises what `load` raises."""
        return self.load(open_storage(path, storage_options), "", strict=strict, cast=cast, transactional=transactional)

    def save(self, storage: Storage, name: str, request: SaveRequest) -> CheckpointInfo:
        """Save the components as the checkpoint `name` of `storage`. A failure leaves nothing behind.

        What one rank raises, all raise: CheckpointExists, UnsupportedValue, InvalidState and ReplicationMismatch before
        a byte is written; StorageError, NoSpace; JoinTimeout, RankLost, RanksDisagree.
        """
        clock, comm = _Clock(), self.comm
        joined = join_save(
            comm, name, request, self.components, self.process_groups, lambda: self._begin(storage, name, request)
        )
        captured, states = self._capture(joined, clock)
        known = validate(comm, self.components, captured, states, joined.copies)
        slices = {c.key: captured[c.key] for c in self.components if c.sharded}
        sharded = agree_layouts(comm, slices, spread=self.writers == "split")
        known |= validate_shards(comm, self.components, captured, sharded)
        folder = f"{name}.partial-{joined.attempt}" if storage.atomic_rename else name
        shares: list[Share] = []
        leftovers: list[str] | None = None
        with Attempt.parse(joined.attempt).in_flight():

            def plan() -> list[str]:
                with clock.phase("plan"):
                    shares.extend(self._shares(joined, captured, sharded))
                return [plan.name for share in shares for plan in share.files if plan.writer == comm.rank]

            def make_way(names: list[list[str]]) -> None:
                _check_distinct([name for own in names for name in own])
                with _needing(sum(p.size for s in shares for p in s.files)):
                    self._make_way(storage, name, folder, joined.attempt, request)

            comm.together("plan", plan, make_way)
            needed = sum(p.size for s in shares for p in s.files)

            def write() -> dict[str, Any]:
                with clock.phase("write"), _needing(needed):
                    return write_share(storage, folder, comm.rank, shares, self.io_threads, known).plain()

            def commit(receipts: list[dict[str, Any]]) -> bytes:
                manifest = self._manifest(request, joined, [Receipt.of(r) for r in receipts], sharded, clock)
                nonlocal leftovers
                with _needing(needed):
                    leftovers = publish(storage, joined.attempt, folder, name, manifest, request.overwrite)
                return manifest.encode()

            try:
                encoded = comm.together("write", write, commit)
            except BaseException:
                if (
                    comm.rank == 0 and leftovers is None
                ):  # nothing was committed; the others have finished writing, or are lost
                    discard(storage, folder)
                raise
        for text in leftovers or ():
            warnings.warn(text, CheckpointWarning, stacklevel=2)
        manifest = CheckpointManifest.decode(encoded, storage.at(name))
        return CheckpointInfo(name, storage.at(name), "committed", manifest.step, None, manifest)

    def _begin(self, storage: Storage, name: str, request: SaveRequest) -> tuple[str, int]:
        check_place(storage, name, request.step, request.overwrite)
        last = max((info.sequence or 0 for info in scan(storage)), default=0)
        return str(Attempt.new(request.run_id)), last + 1

    def _capture(self, joined: JoinedSave, clock: _Clock) -> tuple[dict[str, Captured], dict[str, Any]]:
        """Every rank asks every component for its state, in the same order, because that may itself be collective."""
        captured: dict[str, Captured] = {}
        states: dict[str, Any] = {}

        def local() -> None:
            for component in self.components:
                state = component.stateful.state_dict()
                if self._looked_at(component, joined.copies[component.key]):
                    captured[component.key] = capture(component.key, state, sharded=component.sharded)
                    states[component.key] = state

        with clock.phase("capture"):
            self.comm.together("capture", local, _nothing)
        return captured, states

    def _looked_at(self, component: StateComponent, copies: Sequence[Copy]) -> bool:
        one_truth = component.sharing_pattern in (SharingPattern.GLOBAL, SharingPattern.PER_NODE)
        compared = component.validated is not ValidationLevel.NONE
        return not one_truth or compared or any(copy.members[0] == self.comm.rank for copy in copies)

    def _shares(
        self, joined: JoinedSave, captured: Mapping[str, Captured], sharded: Mapping[str, ShardedState]
    ) -> list[Share]:
        found = [self._share(c, joined.copies[c.key], captured, sharded.get(c.key)) for c in self.components]
        return [share for share in found if share is not None]

    def _share(
        self,
        component: StateComponent,
        copies: Sequence[Copy],
        captured: Mapping[str, Captured],
        merged: ShardedState | None,
    ) -> Share | None:
        """What this rank writes of a component; None when that is nothing."""
        key, rank = component.key, self.comm.rank
        if merged is not None:
            return _sharded_share(key, rank, captured[key], merged)
        copy = next(c for c in copies if rank in c.members)
        one_truth = component.sharing_pattern in (SharingPattern.GLOBAL, SharingPattern.PER_NODE)
        writers = copy.members[:1] if one_truth or self.writers == "lowest" else copy.members
        if rank not in writers:
            return None
        state = captured[key]
        stored = [t for t in enumerate(state.tensors) if t[1].alias_of is None]
        specs = [TensorSpec(n, t.stored_name, t.dtype, t.shape, t.nbytes) for n, t in stored]
        files = plan_component(key, specs, writers, copy.label)
        return Share(key, dict(enumerate(state.tensors)), files, state.tree if rank == copy.members[0] else None)

    def _make_way(self, storage: Storage, name: str, folder: str, attempt: str, request: SaveRequest) -> None:
        if not storage.atomic_rename and check_place(storage, name, request.step, request.overwrite):
            # Files go to their final keys here, so the old manifest has to be withdrawn first.
            remove_checkpoint_folder(storage, name)
            remove_attempt(storage, name)
        try:
            storage.make_folder(folder)
            if not storage.atomic_rename:
                mark_attempt(storage, folder, attempt)
        except StorageError:
            discard(storage, folder)
            raise

    def _manifest(
        self,
        request: SaveRequest,
        joined: JoinedSave,
        receipts: Sequence[Receipt],
        sharded: Mapping[str, ShardedState],
        clock: _Clock,
    ) -> CheckpointManifest:
        files, components = files_and_components(self.components, joined, receipts, sharded)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return CheckpointManifest(
            checkpoint_id=secrets.token_hex(16),
            step=request.step,
            run_id=joined.run_id,
            attempt_id=joined.attempt,
            sequence=joined.sequence,
            created=now.replace("+00:00", "Z"),
            world_size=self.comm.world_size,
            nodes=self.comm.nodes,
            groups=joined.partitions,
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

    def load(
        self,
        storage: Storage,
        name: str,
        *,
        strict: bool = True,
        cast: bool = False,
        transactional: bool = False,
        broadcast: bool = False,
    ) -> LoadReport:
        """Load the components from the checkpoint `name` of `storage`, verified, on all ranks or on none.

        broadcast: what every rank needs is read by one of them and passed on, for storage that is slow or billed.

        What one rank raises, all raise: CheckpointNotFound, CheckpointCorrupt, UnsupportedVersion, StateMismatch,
        StorageError. Live state is not touched before structure, sizes and every rank's agreement are checked.
        """
        comm = self.comm
        view, partitions = join_load(comm, storage, name, self.components, self.process_groups)
        loading = Loading(
            view,
            self.components,
            comm,
            partitions,
            self.io_threads,
            strict=strict,
            cast=cast,
            transactional=transactional,
        )
        on_no_rank = comm.together("check", loading.check, loading.on_no_rank)
        comm.together("judge", lambda: loading.judge(on_no_rank), _nothing)
        if broadcast:
            loading.read_once()
        comm.together("read", loading.read, _nothing)
        comm.together("apply", loading.apply, _nothing)
        return loading.report


def _nothing(*_: Any) -> None:
    return None


def _split(path: str) -> tuple[str, str]:
    """The folder that a checkpoint's folder lies in, and its name there; for local paths and URLs."""
    scheme, mark, rest = path.rpartition("://")
    parent, slash, name = rest.rstrip("/").rpartition("/")
    return (scheme + mark + parent if parent or mark else slash or "."), name


class _Clock:
    """Seconds spent in each phase of a save, for the manifest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 6)


def default_io_threads() -> int:
    return min(8, max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2))


def _check_distinct(names: list[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InvalidState(f"two components would both be stored as {twice}; rename one of them")


def _sharded_share(key: str, rank: int, captured: Captured, merged: ShardedState) -> Share:
    held = {t.name: t for t in captured.tensors}
    specs, tensors = [], {}
    for number, logical in enumerate(merged.tensors):
        box = None if logical.layout is None else logical.layout.box_of(logical.shape, rank)
        if box is not None and logical.name in held:
            tensors[number] = tensor = held[logical.name]
            specs.append(TensorSpec(number, tensor.stored_name, tensor.dtype, tensor.shape, tensor.nbytes))
    files = plan_component(key, specs, [rank], f".rank{rank:05d}")
    return Share(key, tensors, files, merged.tree if rank == 0 else None, merged.tensors)


@contextmanager
def _needing(nbytes: int) -> Iterator[None]:
    """A full disk is reported with what this rank's part of the checkpoint needs."""
    try:
        yield
    except NoSpace as error:
        error.needed = nbytes
        error.message += f"; this part of the checkpoint needs {nbytes:,} bytes"
        raise


def _versions() -> dict[str, str]:
    from . import __version__

    return {"ckptcore": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
