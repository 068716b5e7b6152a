"""One save on one rank, in the steps between which the ranks agree.

`begin` is what a save needs the live state for: when it returns the state is captured, and after
`stage` it is private. `finish` does the rest: compare, write, commit. It may run in another thread,
over a conversation of its own.
"""

from __future__ import annotations

import platform
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

import torch

from ..catalog.attempt import Attempt
from ..catalog.branches import left_by_last
from ..catalog.catalog import Catalog
from ..catalog.folder import CheckpointInfo
from ..catalog.transaction import Transaction, check_place, open_transaction
from ..errors import InvalidState, NoSpace, RankLost
from ..format.manifest import CheckpointManifest, Copy, check_readable, private_json
from ..nodes.agreement import StorageMode
from ..nodes.parts import on_node, part_of, pass_on
from ..ranks.communicator import Communicator
from ..ranks.groups import own_node
from ..replicas.compare import Replicas, validate
from ..replicas.shard_table import PlainValues, ShardTable, ShardTables, agree_layouts
from ..state.adapters import metadata_of
from ..state.component import SharingPattern, StateComponent, ValidationLevel
from ..state.names import one_walk
from ..state.streams import synchronize
from ..state.tree import StateSnapshot, Structure, capture, check_values_fit
from ..storage.base import Storage
from ..storage.workers import Workers
from ..version import __version__
from .apart import agree_place, check_seen, commit_apart
from .commit import Receipt, Share, check_tree, files_and_components, write_share
from .devices import warm_up
from .join import JoinedSave, SaveRequest, join_save
from .plan import TensorSpec, plan_component
from .staging import HostPool, StagedCopy, stage

__all__ = ["Progress", "Saving"]


class Progress:
    """Bytes of tensor files that this rank has written so far, of those that it has to."""

    def __init__(self) -> None:
        self.written = self.total = 0
        self._lock = threading.Lock()

    def wrote(self, nbytes: int) -> None:
        with self._lock:
            self.written += nbytes


@dataclass(slots=True)
class Saving:
    """What one rank knows of one save. `told` collects what to warn of when all is done; seconds:
    by phase. mode: "node" where nodes share no storage, so that each keeps all that its ranks
    need."""

    comm: Communicator
    components: Sequence[StateComponent]
    process_groups: Mapping[str, Any]
    writers: Literal["split", "lowest"]
    storage: Storage
    name: str
    request: SaveRequest
    workers: Workers
    catalog: Catalog
    mode: StorageMode = "shared"
    told: list[str] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    seconds: dict[str, float] = field(default_factory=dict)
    number: int = 0  # of the call that it is, among those of the communicator that it began on
    joined: JoinedSave = field(init=False)
    captured: dict[str, StateSnapshot] = field(default_factory=dict)
    # What outlives the save, where another one may follow.
    tables: ShardTables | None = None
    structures: dict[str, Structure] = field(default_factory=dict)
    sharded: dict[str, ShardTable] = field(default_factory=dict)
    values: dict[str, PlainValues] = field(default_factory=dict)  # of sharded components
    truths: dict[str, StateSnapshot] = field(
        default_factory=dict
    )  # global state that rank 0 has passed on to this node
    replaces: bool = (
        False  # what is in the place of this checkpoint is on some nodes alone, and gives way
    )
    seen: list[CheckpointInfo] | None = None  # in the root, before anything was written; on rank 0
    shares: list[Share] = field(default_factory=list)
    staged: StagedCopy | None = None
    failed: Exception | None = None

    def begin(self, *, rehearsal: bool = False) -> None:
        """Join, capture, agree on layouts. rehearsal: nothing is going to be saved, so the place
        does not matter."""
        comm = self.comm
        self.number = comm.number
        self.joined = join_save(
            comm,
            self.name,
            self.request,
            self.components,
            self.process_groups,
            (lambda: "") if rehearsal else self._attempt,
            self.mode,
        )
        # Private from here on, like the state.
        self.components = [
            replace(c, metadata=private_json(c.key, c.metadata)) for c in self.components
        ]
        if self.mode == "node" and not rehearsal:
            self.joined.sequence, self.replaces = agree_place(self)
        with self._phase("capture"):
            comm.together("capture", self._capture, _nothing)
        slices = {c.key: self.captured[c.key] for c in self.components if c.sharded}
        with self._phase("layouts"):
            tables = self.tables or ShardTables(spread=self.writers == "split")
            self.sharded, self.values = agree_layouts(comm, slices, tables)
        if self.mode == "node":
            for key, table in self.sharded.items():
                self.sharded[key] = on_node(table, self._here, spread=self.writers == "split")
            one_truth = [
                c.key for c in self.components if c.sharing_pattern is SharingPattern.GLOBAL
            ]
            if one_truth and len(comm.nodes) > 1:
                self.truths = pass_on(
                    comm, {k: self.captured[k] for k in one_truth} if comm.rank == 0 else {}
                )

    def plan(self) -> None:
        """Who writes what into which file. Pure. Raises InvalidState, UnsupportedValue."""
        with self._phase("plan"):
            found = [self._share(c) for c in self.components]
            self.shares = [share for share in found if share is not None]
            trees = {share.key: share.tree or b"" for share in self.shares}
            largest = max(trees, key=lambda key: len(trees[key]), default=None)
            if largest is not None:
                check_values_fit(largest, trees[largest], sum(map(len, trees.values())))
            self.progress.total = sum(
                p.size for s in self.shares for p in s.files if p.writer == self.comm.rank
            )

    def stage(self, pool: HostPool) -> None:
        """Copy what this rank has to write, so that the live state may change. A failure is
        everybody's in `finish`."""
        try:
            self.plan()
            with self._phase("stage"):
                compared = [c for c in self.components if self._compared(c)]
                self.staged = stage(
                    pool,
                    self.comm.rank,
                    compared,
                    self.captured,
                    self.shares,
                    self._whole(),
                    self.workers,
                )
        except Exception as error:
            self.failed = error

    def _whole(self) -> set[str]:
        """Components of which this rank keeps everything: they may have to be compared item by
        item."""
        return {
            c.key
            for c in self.components
            if self._compared(c) and c.validated is ValidationLevel.FULL
        }

    def rehearse(self, pool: HostPool) -> None:
        """Have the pool ready, and all else that the first save would have to wait for, by copying
        the state once."""
        self.begin(rehearsal=True)
        warm_up(self._devices())
        pool.large_pages = True
        self.stage(pool)
        pool.large_pages = False
        self.comm.together("stage", self._complete, _nothing)

    def finish(self, comm: Communicator) -> CheckpointInfo:
        """Compare the replicas, write, commit. What one rank raises, all raise, and nothing of it
        stays."""
        self.comm = comm
        if self.staged is not None or self.failed is not None:
            comm.together("stage", self._complete, _nothing)
        else:
            synchronize(self._devices())
        with self._phase("validate"):
            replicas = Replicas(
                comm.rank,
                comm.world_size,
                self.components,
                self.captured,
                self.joined.copies,
                self.sharded,
            )
            validate(comm, replicas)
            known = replicas.chunks
        if self.truths:  # written in the place of what this rank has, which may have other bytes
            known = {
                place: digests for place, digests in known.items() if place[0] not in self.truths
            }
        transaction = self._transaction()
        published = False

        def make_way(names: list[list[str]]) -> None:
            for ranks in comm.nodes if self.mode == "node" else [range(comm.world_size)]:
                _check_distinct([name for rank in ranks for name in names[rank]])
            if self.mode == "shared":
                # Here and not at the join: it reads what is in the root, for which training need
                # not wait.
                with self.needing():
                    self.joined.sequence = self._next_sequence()
                    transaction.abandoned = self.request.abandoned or ()
                    transaction.begin()

        def write() -> dict[str, Any]:
            if self.mode == "shared":
                check_seen(comm, transaction)
            with self._phase("write"), self.needing():
                return write_share(
                    self.storage,
                    transaction.folder,
                    comm.rank,
                    self.shares,
                    self.workers,
                    known,
                    self.progress.wrote,
                ).plain()

        def commit(receipts: list[dict[str, Any]]) -> bytes:
            nonlocal published
            manifest = self._manifest([Receipt.of(r) for r in receipts])
            with self.needing():
                transaction.commit(manifest)
            published = True
            transaction.remove_replaced()
            return manifest.encode()

        def manifests(receipts: Sequence[dict[str, Any]]) -> list[bytes]:
            found = [
                self._manifest([Receipt.of(receipts[rank]) for rank in ranks])
                for ranks in comm.nodes
            ]
            for node, manifest in enumerate(found):
                manifest.node = node
                manifest.checkpoint_id, manifest.created = found[0].checkpoint_id, found[0].created
            encoded = [manifest.encode() for manifest in found]
            for each in encoded:  # here, where it fails on all nodes before one of them publishes
                check_readable(each)
            return encoded

        with Attempt.parse(self.joined.attempt).in_flight():
            comm.together("plan", self._planned_files, make_way)
            try:
                if self.mode == "node":
                    encoded = commit_apart(self, comm, transaction, write, manifests)
                else:
                    encoded = comm.together("write", write, commit)
            except BaseException as error:
                if self.mode == "shared" and comm.rank == 0 and not published:
                    # When a rank is lost, or this one is on its way out, the others were not waited
                    # for.
                    early = isinstance(error, RankLost) or not isinstance(error, Exception)
                    transaction.abort(others_write=early)
                raise
        manifest = CheckpointManifest.decode(encoded, self.storage.at(self.name))
        return CheckpointInfo(
            self.name, self.storage.at(self.name), "committed", manifest.step, None, manifest
        )

    @property
    def overwrites(self) -> bool:
        """Whether a committed checkpoint in its place gives way."""
        return self.request.overwrite or self.replaces

    @property
    def _here(self) -> Sequence[int]:
        """The ranks that write to the same storage as this one."""
        return (
            self.comm.nodes[own_node(self.comm)]
            if self.mode == "node"
            else range(self.comm.world_size)
        )

    def _attempt(self) -> str:
        if self.mode == "shared":  # else it is agreed on later, when the nodes are known
            request = self.request
            check_place(
                self.storage,
                self.name,
                request.step,
                request.run_id,
                self.overwrites,
                abandoned=request.abandoned or (),
            )
        return str(Attempt.new(self.request.run_id))

    def _next_sequence(self) -> int:
        self.seen = self.catalog.recall()
        self.follow(self.seen)
        last = max((info.sequence or 0 for info in self.seen), default=0)
        return max(last, self.request.after_sequence) + 1

    def follow(self, infos: Sequence[CheckpointInfo]) -> None:
        """What nobody says of the way of the run is what its last commit says."""
        if self.request.abandoned is None:
            self.request.abandoned = [[*ends] for ends in left_by_last(infos, self.request.run_id)]

    @one_walk()
    def _capture(self) -> None:
        """Ask every component for its state, in the same order on all ranks, because that may
        itself be collective."""
        for component in self.components:
            state = component.stateful.state_dict()
            if self._looked_at(component):
                self.captured[component.key] = capture(
                    component.key,
                    state,
                    sharded=component.sharded,
                    metadata=metadata_of(component.stateful),
                    last=self.structures.get(component.key),
                )
        found = {key: state.structure for key, state in self.captured.items()}
        self.structures.clear()
        self.structures.update((key, kept) for key, kept in found.items() if kept is not None)

    def _looked_at(self, component: StateComponent) -> bool:
        one_truth = component.sharing_pattern in (SharingPattern.GLOBAL, SharingPattern.PER_NODE)
        compared = component.validated is not ValidationLevel.NONE
        own = any(copy.members[0] == self.comm.rank for copy in self.joined.copies[component.key])
        return not one_truth or compared or own

    def _compared(self, component: StateComponent) -> bool:
        """Whether this rank's state may be compared with that of others."""
        several = (
            any(len(c.members) > 1 for c in self.joined.copies[component.key]) or component.sharded
        )
        return (
            component.validated is not ValidationLevel.NONE and self.comm.world_size > 1 and several
        )

    def _share(self, component: StateComponent) -> Share | None:
        """What this rank writes of a component; None when that is nothing."""
        key, rank = component.key, self.comm.rank
        if key in self.sharded:
            first = rank == self._here[0]
            return _sharded_share(
                key, rank, self.captured[key], self.sharded[key], self.values[key], first
            )
        copy: Copy = next(c for c in self.joined.copies[key] if rank in c.members)
        if self.mode == "node":
            copy = part_of(copy, self._here)
        one_truth = component.sharing_pattern in (SharingPattern.GLOBAL, SharingPattern.PER_NODE)
        writers = copy.members[:1] if one_truth or self.writers == "lowest" else copy.members
        if rank not in writers:
            return None
        state = self.truths.get(key) or self.captured[key]
        stored = [(n, t.spec) for n, t in enumerate(state.tensors) if t.spec.alias_of is None]
        specs = [TensorSpec(n, s.stored_name, s.dtype, s.shape, s.nbytes) for n, s in stored]
        files = plan_component(key, specs, writers, copy.label)
        first = rank == copy.members[0]
        return Share(
            key,
            dict(enumerate(state.tensors)),
            files,
            state.tree if first else None,
            versions=state.versions if first else None,
        )

    def _devices(self) -> set[torch.device]:
        return {t.tensor.device for state in self.captured.values() for t in state.tensors}

    def _complete(self) -> None:
        if self.failed is not None:
            raise self.failed
        if self.staged is not None:
            self.staged.wait()

    def _planned_files(self) -> list[str]:
        if self.staged is None:
            self.plan()
        for share in self.shares:
            check_tree(share)
        return [
            plan.name
            for share in self.shares
            for plan in share.files
            if plan.writer == self.comm.rank
        ]

    def _transaction(self) -> Transaction:
        request = self.request
        return open_transaction(
            self.storage,
            self.name,
            self.joined.attempt,
            self.joined.run_id,
            request.step,
            overwrite=self.overwrites,
            abandoned=request.abandoned or (),
            marked=self.mode == "node",
            warn=self.told.append,
        )

    def _manifest(self, receipts: Sequence[Receipt]) -> CheckpointManifest:
        request, joined = self.request, self.joined
        files, components = files_and_components(self.components, joined, receipts)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return CheckpointManifest(
            checkpoint_id=request.checkpoint_id or secrets.token_hex(16),
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
            environment={"platform": _system(), "host": platform.node()},
            timings=self.seconds,
            metadata=request.metadata,
            abandoned=request.abandoned or [],
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:  # a phase that fails has taken its time as well
            self.seconds[name] = round(time.perf_counter() - start, 6)

    @contextmanager
    def needing(self) -> Iterator[None]:
        """A full disk is reported with what this rank's part of the checkpoint needs."""
        try:
            yield
        except NoSpace as error:
            error.needed = sum(p.size for s in self.shares for p in s.files)
            error.message += f"; this part of the checkpoint needs {error.needed:,} bytes"
            raise


def _nothing(*_: Any) -> None:
    return None


def _check_distinct(names: list[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InvalidState(f"two components would both be stored as {twice}; rename one of them")


def _sharded_share(
    key: str,
    rank: int,
    captured: StateSnapshot,
    merged: ShardTable,
    values: PlainValues,
    first: bool,
) -> Share:
    held = {t.spec.name: t for t in captured.tensors}
    specs, tensors = [], {}
    for number, logical in enumerate(merged.tensors):
        box = None if logical.layout is None else logical.layout.box_of(logical.shape, rank)
        if box is not None and logical.name in held:
            tensors[number] = held[logical.name]
            spec = held[logical.name].spec
            specs.append(TensorSpec(number, spec.stored_name, spec.dtype, spec.shape, spec.nbytes))
    files = plan_component(key, specs, [rank], f".rank{rank:05d}")
    tree, versions = (values.tree, values.versions) if first else (None, None)
    return Share(key, tensors, files, tree, merged.tensors, versions)


def _system() -> str:
    """Not platform.platform(), which starts `uname -p`: a loader's worker that is forked meanwhile
    holds the pipe open, and the thread that saves would wait for as long as the worker lives."""
    return f"{platform.system()}-{platform.release()}-{platform.machine()}"


def _versions() -> dict[str, str]:
    return {
        "ckptcore": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
