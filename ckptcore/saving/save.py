"""One save of one checkpoint on one rank, from the call to the commit.

    joined = join(job, call, run, record)   the same call on all ranks? groups, attempt
    save = capture(job, joined, record) the state of each component, and how the ranks hold it
    staged = stage(save, pool)          a private copy, for a save that goes on in background
    saved = finish(staged)                  replicas equal? room made; written; committed

Each but `stage` is one or two rounds of the ranks: what one of them raises, all raise. The first
three need the live state; `finish` may run in another thread, over a branch of the communicator.
"""

from __future__ import annotations

import platform
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import torch

from ..arguments import check_flag, check_hash, check_mapping, check_one_of, checked_step, shown
from ..catalog.catalog import Destination, Ranges, Target
from ..catalog.domain import StorageDomains
from ..catalog.folder import (
    CheckpointInfo,
    checked_label,
    folder_name,
    in_flight,
    is_ours,
    new_attempt,
)
from ..catalog.transaction import Transaction, open_transaction
from ..errors import (
    AsyncSaveError,
    CheckpointCorrupt,
    InvalidState,
    NoSpace,
    RankLost,
    UnsupportedValue,
)
from ..format.digest import content_digest
from ..format.manifest import (
    CheckpointManifest,
    ComponentManifest,
    Index,
    ReplicaGroup,
    check_readable,
    index_file_name,
    private_json,
    replica_groups,
)
from ..format.values import decode
from ..ranks.communicator import Communicator, group_index, partitions, view_of_group
from ..ranks.messages import message
from ..replicas import compare, shard_table
from ..replicas.compare import ReplicaReport, Replicas, ReplicaVerdict, compared_leaves
from ..replicas.shard_table import Description, PlainValues, ShardTable, StructureVerdict
from ..state.component import (
    SharingPattern,
    StateComponent,
    ValidationLevel,
    as_components,
    check_equal,
    metadata_of,
    process_groups_of,
    refuse_fixed_values,
)
from ..state.layout import TensorSource, synchronize
from ..state.modules import one_walk
from ..state.tree import StateSnapshot, check_values_fit
from ..state.tree import capture as take_snapshot
from ..storage.chunks import Workers
from ..version import __version__
from .devices import warm_up
from .plan import (
    FileReceipt,
    KeptPlans,
    RankReceipt,
    WritePlan,
    files_and_components,
    group_receipts,
    hugging_face_indexes,
    index_of,
    seconds_by_phase,
)
from .staging import HostPool, StagedCopy
from .staging import stage as copy_into_pool
from .unchanged import Suspects
from .user_files import read_user_files
from .writer import ByteSource, WrittenFile, write_files

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Of these one rank of each group has the state that counts, and others need not look at theirs.
_ONE_HOLDER = (SharingPattern.GLOBAL, SharingPattern.PER_NODE)


@dataclass(frozen=True, slots=True)
class SaveJob:
    """What all saves of one manager, or one coordinator, have in common. domains: which ranks see
    the same storage. kept: what is computed anew only where the structure of the state changes."""

    comm: Communicator
    domains: StorageDomains
    process_groups: Mapping[str, Any] | None
    workers: Workers
    kept: KeptPlans


@dataclass(frozen=True, slots=True)
class SaveCall:
    """The arguments of a call, as the caller gave them: they are checked in the join, where what is
    wrong on one rank is an error on all. folder: its name, by default that of step and `name`."""

    state: Any
    step: Any
    metrics: Any = None
    metadata: Any = None
    overwrite: Any = False
    training_args_hash: Any = None
    checkpoint_id: Any = None
    folder: str | None = None
    exists: Any = "error"
    files: Any = None
    name: Any = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run knows when it saves. Rank 0's counts.

    known_damaged: names that a restore passed over, and that give way. after_sequence: another root
    of the run has commits up to this one. abandoned: [first, last] commit sequences that the run
    has left behind; None: those that its last commit says. busy, failed: of the save in the
    background; when_busy: what becomes of this one then. branch: the name of the conversation in
    the background, "" before there is one.
    """

    run_id: str
    known_damaged: frozenset[str] = frozenset()
    after_sequence: int = 0
    abandoned: Ranges | None = None
    busy: bool = False
    failed: bool = False
    when_busy: Literal["wait", "skip", "raise"] = "wait"
    branch: str = ""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What the caller says about one checkpoint, beside the state. Valid, and private, once it is
    made. Raises InvalidState for what the manifest cannot hold."""

    name: str
    label: str
    step: int
    run_id: str
    metrics: dict[str, float]
    metadata: dict[str, Any]
    overwrite: bool
    training_args_hash: str | None
    checkpoint_id: str | None
    files: dict[str, bytes]

    @classmethod
    def of(cls, call: SaveCall, run: RunFacts) -> SaveRequest:
        step = checked_step(call.step)
        name, label = f"checkpoint-{step}", ""
        if call.name is not None:
            label = checked_label(call.name)
            name = folder_name(step, label)
        if call.training_args_hash is not None:
            check_hash(call.training_args_hash)
        given = call.checkpoint_id
        if given is not None and not (isinstance(given, str) and _ID.fullmatch(given)):
            what = "checkpoint_id must be 1 to 64 letters, digits, '_', '-' or '.'"
            raise InvalidState(f"{what}, not {shown(given)}")
        return cls(
            call.folder or name,
            label,
            step,
            run.run_id,
            _numbers(call.metrics),
            _private("metadata", _dict("metadata", call.metadata)),
            overwrites(call),
            call.training_args_hash,
            given,
            {} if call.files is None else read_user_files(call.files),
        )


def overwrites(call: SaveCall) -> bool:
    """Whether a committed checkpoint gives way. Raises InvalidState."""
    if not isinstance(call.exists, str) or call.exists != "error":
        check_one_of("exists", call.exists, ("error", "skip", "replace"))
    if check_flag("overwrite", call.overwrite) and call.exists == "skip":
        raise InvalidState("overwrite=True and exists='skip' contradict each other: give one")
    return bool(call.overwrite) or call.exists == "replace"


class SaveRecord:
    """What is to be told of one save: warnings, seconds by phase, and bytes of tensor files that
    this rank has written of those that it has to. step, name: known from the join on. retries: what
    the storage had tried again before it. files: what became of this rank's tensor files; reused:
    bytes of those that were taken over from the checkpoint before. suspects: on rank 0, those of
    each rank (see Unchanged). manifest: from the commit on."""

    def __init__(self, retries: int = 0) -> None:
        self.step, self.name = 0, ""
        self.started, self.retries = time.perf_counter(), retries
        self.warnings: list[str] = []
        self.seconds: dict[str, float] = {}
        self.written = self.total = self.reused = 0
        self.files: list[WrittenFile] = []
        self.suspects: list[Suspects] = []
        self.manifest: CheckpointManifest | None = None
        self._lock = threading.Lock()

    @property
    def elapsed(self) -> float:
        """Seconds since the save was called for."""
        return time.perf_counter() - self.started

    def wrote(self, nbytes: int) -> None:
        with self._lock:
            self.written += nbytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:  # a phase that fails has taken its time as well
            self.seconds[name] = round(time.perf_counter() - start, 6)


@message
@dataclass(frozen=True, slots=True)
class JoinReport:
    """What a rank says of its call. words: what is called for; asked: what must be equal on all
    ranks; groups: what it knows of each process group; group_keys: its name for its own one."""

    words: str
    asked: dict[str, Any]
    groups: dict[str, list[list[int]]]
    group_keys: dict[str, str | None]
    busy: bool
    failed: bool


@message
@dataclass(frozen=True, slots=True)
class JoinVerdict:
    """outcome: "go", "skip", or "failed" where the failure of an earlier save is to be raised
    first. partitions: of all ranks, by name of the group; group_keys: names of the groups, by
    component."""

    outcome: str
    branch: str
    attempt: str = ""
    run_id: str = ""
    overwrite: bool = False
    partitions: dict[str, list[list[int]]] = field(default_factory=dict)
    group_keys: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JoinedSave:
    """What all ranks hold to be true for one save. number: of the call that it is; groups: of each
    component, the ranks that hold the same; domains: the ranks that see the same storage, and those
    of this rank's; destination: where it is known before the state is."""

    request: SaveRequest
    run: RunFacts
    components: list[StateComponent]
    verdict: JoinVerdict
    number: int
    groups: dict[str, list[ReplicaGroup]]
    domains: Sequence[Sequence[int]]
    domain: Sequence[int]
    target: Target | None = None
    destination: Destination | None = None


def join(
    job: SaveJob, call: SaveCall, run: RunFacts, record: SaveRecord, *, rehearsal: bool = False
) -> JoinedSave:
    """Agree on the call, the groups and the attempt. rehearsal: nothing is going to be saved, so
    what is in its place does not matter.

    Raises RanksDisagree, InvalidState, CheckpointExists, AsyncSaveError (an earlier save is still
    being written, and `when_busy` is "raise"), on every rank.
    """
    comm = job.comm
    with comm.round("join", joining=True) as r:
        request = SaveRequest.of(call, run)
        components = as_components(call.state, comm.world_size)
        report = _join_report(
            job, request, components, process_groups_of(call.state, job.process_groups), run
        )
        record.step, record.name = request.step, request.name
        reports = r.gather(report)
        if r.leads:
            r.verdict = _decide(job, request, run, components, reports, rehearsal=rehearsal)
    verdict: JoinVerdict = r.verdict
    groups = {c.key: _groups_of(c, comm, verdict) for c in components}
    domains = job.domains.ranks(comm)
    mine = next(ranks for ranks in domains if comm.rank in ranks)
    joined = JoinedSave(request, run, components, verdict, comm.number, groups, domains, mine)
    if rehearsal or verdict.outcome != "go":
        return joined
    target = _target(request, run, overwrite=verdict.overwrite, run_id=verdict.run_id)
    return replace(
        joined, target=target, destination=job.domains.destination_by_rounds(target, comm)
    )


def _target(request: SaveRequest, run: RunFacts, *, overwrite: bool, run_id: str) -> Target:
    return Target(
        request.name,
        run_id,
        request.step,
        overwrite,
        run.abandoned,
        after_sequence=run.after_sequence,
    )


def _join_report(
    job: SaveJob,
    request: SaveRequest,
    components: Sequence[StateComponent],
    groups: Mapping[str, Any],
    run: RunFacts,
) -> JoinReport:
    used = {c.process_group_name for c in components if c.process_group_name is not None}
    if unknown := sorted(used - groups.keys()):
        raise InvalidState(
            f"process group {unknown[0]!r} is not among process_groups (which has "
            f"{sorted(groups) or 'none'})"
        )
    refuse_fixed_values(components)
    for c in components:
        c.metadata = _private(f"the metadata of component {c.key!r}", c.metadata)
    if request.metadata or any(c.metadata for c in components):
        # Before anything is withdrawn or written: what no reader would take in the end. The rest
        # of a request is checked by itself.
        _check_manifest(request, components)
    comm = job.comm
    # The rest of the request is rank 0's to say: a new run has no name yet, and metrics may well be
    # known there alone.
    asked: dict[str, Any] = {"name": request.name, "components": [c.key for c in components]}
    asked["overwrite"] = request.overwrite
    for c in components:
        pattern, level = c.sharing_pattern.value, c.validated.value
        facts = [pattern, c.process_group_name, level, c.atol, c.rtol, *c.ignore]
        asked[f"component {c.key!r}"] = facts
    return JoinReport(
        f"save of step {request.step}{job.domains.words}",
        asked,
        {name: view_of_group(name, of, comm.rank, comm.world_size) for name, of in groups.items()},
        {c.key: c.group_key for c in components if c.process_group_name is not None},
        run.busy,
        run.failed,
    )


def _decide(
    job: SaveJob,
    request: SaveRequest,
    run: RunFacts,
    components: Sequence[StateComponent],
    reports: Sequence[JoinReport],
    *,
    rehearsal: bool,
) -> JoinVerdict:
    """On rank 0: what becomes of the call."""
    check_equal("saves", reports, request.step)
    branch = run.branch or f"save-{job.comm.number}"
    if any(report.failed for report in reports):
        return JoinVerdict("failed", branch)
    if any(report.busy for report in reports) and run.when_busy != "wait":
        if run.when_busy == "raise":
            what = f"a save is still being written; step {request.step} is not saved"
            raise AsyncSaveError(what, step=request.step)
        return JoinVerdict("skip", branch)
    found = partitions([report.groups for report in reports])
    keys = {
        c.key: _group_keys(c, found, [report.group_keys[c.key] for report in reports])
        for c in components
        if c.process_group_name is not None
    }
    # A rank that was interrupted in the restore does not know.
    overwrite = request.overwrite or request.name in run.known_damaged
    if not rehearsal:
        run_id = request.run_id
        job.domains.check(_target(request, run, overwrite=overwrite, run_id=run_id))
    return JoinVerdict(
        "go",
        branch,
        "" if rehearsal else new_attempt(request.run_id),
        request.run_id,
        overwrite,
        found,
        {key: names for key, names in keys.items() if names is not None},
    )


def _group_keys(
    component: StateComponent, found: dict[str, list[list[int]]], keys: list[str | None]
) -> list[str] | None:
    """The names of a component's groups, when the user gave them: equal in a group, distinct
    between groups."""
    if all(key is None for key in keys):
        return None
    partition = found[component.process_group_name or ""]
    names = [keys[group[0]] for group in partition]
    wrong = [
        rank
        for rank, key in enumerate(keys)
        if key is None or key != names[group_index(partition, rank)]
    ]
    given = [name for name in names if name is not None]
    if wrong or len(set(given)) != len(partition):
        raise InvalidState(
            f"component {component.key!r}: group_key must be given on every rank, be the same "
            f"within a group and differ between groups; the groups {partition} have {names}",
            component=component.key,
            ranks=wrong or None,
        )
    return given


def _groups_of(
    component: StateComponent, comm: Communicator, verdict: JoinVerdict
) -> list[ReplicaGroup]:
    group = component.process_group_name
    return replica_groups(
        component.sharing_pattern.value,
        comm.world_size,
        comm.nodes,
        group,
        verdict.partitions.get(group or ""),
        verdict.group_keys.get(component.key),
    )


@dataclass(frozen=True, slots=True)
class Shards:
    """How the ranks hold the components that are sharded. described: by this rank; structure: what
    rank 0 has made of that; tables: as this rank's domain stores them."""

    described: dict[str, Description]
    structure: StructureVerdict
    tables: dict[str, ShardTable]


@dataclass(frozen=True, slots=True)
class SnapshottedSave:
    """A save whose state is known, and still in the caller's memory.

    snapshots: this rank's, by component. shards: how the ranks hold those that are sharded; None
    where none is. passed_on: global state of rank 0, on a rank that stores it for its node.
    stored: what is written of each component, if anything is.
    """

    job: SaveJob
    joined: JoinedSave
    record: SaveRecord
    snapshots: dict[str, StateSnapshot]
    shards: Shards | None
    passed_on: dict[str, StateSnapshot]
    stored: dict[str, StateSnapshot] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stored", {**self.snapshots, **self.passed_on})

    @property
    def tables(self) -> dict[str, ShardTable]:
        return {} if self.shards is None else self.shards.tables

    @property
    def devices(self) -> set[torch.device]:
        return {t.tensor.device for state in self.snapshots.values() for t in state.tensors}

    @property
    def compared(self) -> list[StateComponent]:
        """Components of which several ranks may hold the same that is to be equal: the same ones on
        all ranks."""
        if self.job.comm.world_size == 1:
            return []
        return [
            c
            for c in self.joined.components
            if c.validated is not ValidationLevel.NONE
            and (c.sharded or any(len(g.members) > 1 for g in self.joined.groups[c.key]))
        ]

    def values(self, plan: WritePlan) -> dict[str, PlainValues]:
        """The plain values that this rank writes, as it has them itself."""
        states = {c.key: self.stored[c.key] for c in plan.components if c.has_values}
        return {key: PlainValues(state.tree, state.versions) for key, state in states.items()}

    def replicas(self, comm: Communicator) -> Replicas | None:
        """What this rank compares with others; None where no rank compares anything."""
        if not (compared := self.compared):
            return None
        groups, tables = self.joined.groups, self.tables
        return Replicas(comm.rank, comm.world_size, compared, self.snapshots, groups, tables)


def capture(job: SaveJob, joined: JoinedSave, record: SaveRecord) -> SnapshottedSave:
    """Ask every component for its state, and find out how the ranks hold what is sharded. Raises
    what a state_dict() raises, UnsupportedValue, InvalidState."""
    comm, patterns = job.comm, {c.key: c.sharing_pattern for c in joined.components}
    sharded = [key for key, pattern in patterns.items() if pattern is SharingPattern.SHARDED]
    with comm.round("capture") as r:
        with record.phase("capture"):
            snapshots = _snapshots(job, joined)
            described = {key: shard_table.describe(snapshots[key]) for key in sharded}
        if sharded:
            reports = r.gather(job.kept.tables.report(described))
            if r.leads:
                r.verdict = shard_table.decide(reports, spread=job.kept.split)
    with record.phase("layouts"):
        shards = _shards(job, described, r.verdict) if sharded else None
    one = [key for key, pattern in patterns.items() if pattern is SharingPattern.GLOBAL]
    passed_on: dict[str, StateSnapshot] = {}
    if one and len(joined.domains) > 1:  # rank 0 has it, and each domain stores it
        passed_on = job.domains.pass_on({k: snapshots[k] for k in one if k in snapshots}, comm)
    return SnapshottedSave(job, joined, record, snapshots, shards, passed_on)


def _shards(job: SaveJob, described: dict[str, Description], structure: StructureVerdict) -> Shards:
    """The tables of sharded components, after a round where the ranks do not have them."""
    comm = job.comm
    structures: dict[str, list[bytes]] = {}
    if structure.incomplete:
        with comm.round("layout") as r:
            sent = r.gather(shard_table.descriptions(described, structure, comm.rank))
            if r.leads:
                r.verdict = shard_table.structures_of(sent, structure)
        structures = r.verdict
    # Pure, so that every rank has the same tables or the same error.
    tables = job.kept.tables.update(described, structure, structures)
    return Shards(described, structure, job.domains.tables(tables, comm, spread=job.kept.split))


@one_walk()
def _snapshots(job: SaveJob, joined: JoinedSave) -> dict[str, StateSnapshot]:
    """Ask in the same order on all ranks, because a state_dict() may itself be collective."""
    found = {}
    for component in joined.components:
        state = component.stateful.state_dict()
        pattern, groups = component.sharing_pattern, joined.groups[component.key]
        has_it = pattern not in _ONE_HOLDER or any(g.members[0] == job.comm.rank for g in groups)
        if has_it or component.validated is not ValidationLevel.NONE:
            found[component.key] = take_snapshot(
                component.key,
                state,
                sharded=pattern is SharingPattern.SHARDED,
                metadata=metadata_of(component.stateful),
                last=job.kept.structures.get(component.key),
            )
    job.kept.structures = {
        key: state.structure for key, state in found.items() if state.structure is not None
    }
    return found


@dataclass(frozen=True, slots=True)
class StagedSave:
    """A save that may go on while training does. plan, copy: None where the state is written from
    where it is. failure: what kept this rank from being ready; it is for all to raise."""

    save: SnapshottedSave
    plan: WritePlan | None = None
    copy: StagedCopy | None = None
    failure: Exception | None = None

    def wait(self) -> None:
        """Return when the memory to write from holds the state, and stays as it is."""
        if self.failure is not None:
            raise self.failure
        if self.copy is not None:
            self.copy.wait()
            self.copy.refuse_changed()
        else:
            synchronize(self.save.devices)


def stage(save: SnapshottedSave, pool: HostPool) -> StagedSave:
    """Copy what this rank has to write, so that the live state may change. A failure is everybody's
    in `finish`."""
    plan: WritePlan | None = None
    try:
        plan = _planned(save)
        replicas = save.replicas(save.job.comm)
        compared = (
            [(c, compared_leaves(replicas, c)) for c in replicas.components] if replicas else []
        )
        # They may have to be compared item by item, so everything of them is kept.
        whole = {c.key for c, _ in compared if c.validated is ValidationLevel.FULL}
        with save.record.phase("stage"):
            copy = copy_into_pool(
                pool, plan, save.stored, save.snapshots, compared, whole, save.job.workers
            )
    except Exception as error:
        return StagedSave(save, plan, failure=error)
    return StagedSave(save, plan, copy)


def _planned(save: SnapshottedSave) -> WritePlan:
    """Who writes what into which file. Raises InvalidState, UnsupportedValue."""
    job, joined, record = save.job, save.joined, save.record
    comm, stored = job.comm, save.stored
    with record.phase("plan"):
        plan = job.kept.plan(
            comm.rank,
            joined.components,
            job.domains.groups(joined.groups, comm),
            stored,
            save.tables,
            first=joined.domain[0],
        )
        _check_values_fit({c.key: stored[c.key].tree for c in plan.components if c.has_values})
    record.total = plan.nbytes
    return plan


def _check_values_fit(trees: Mapping[str, bytes]) -> None:
    """Raises UnsupportedValue where the plain values are more than an index holds."""
    largest = max(trees, key=lambda key: len(trees[key]), default=None)
    if largest is not None:
        check_values_fit(largest, trees[largest], sum(map(len, trees.values())))


def rehearse(job: SaveJob, joined: JoinedSave, pool: HostPool) -> None:
    """Have the pool ready, and all else that the first save would have to wait for, by copying the
    state once."""
    save = capture(job, joined, SaveRecord())
    warm_up(save.devices)
    pool.large_pages = True
    staged = stage(save, pool)
    pool.large_pages = False
    with job.comm.round("stage"):
        staged.wait()


@message
@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What a rank is about to write. replicas: what its replicas are compared by, if anything is;
    values: plain values of sharded components that differ between ranks; files: names."""

    replicas: ReplicaReport | None
    values: dict[str, PlainValues]
    files: list[str]


@message
@dataclass(frozen=True, slots=True)
class PrepareVerdict:
    """replicas: which differ, if any do; values: those of sharded components, where they had to be
    merged."""

    replicas: ReplicaVerdict | None
    values: dict[str, PlainValues]


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """A save that may write: its replicas are equal, and on rank 0 nothing is in its way.

    values: the plain values that this rank writes; chunks: digests that were computed on the way,
    by component and number of the tensor. destination: where this rank knows it.
    """

    save: SnapshottedSave
    comm: Communicator
    workers: Workers
    plan: WritePlan
    values: dict[str, PlainValues]
    chunks: dict[tuple[str, int], bytes]
    transaction: Transaction
    destination: Destination | None

    def write(self) -> RankReceipt:
        """Write this rank's tensor files, the Hugging Face indexes of components that are split
        over files, and its own index."""
        stored, plan, transaction = self.save.stored, self.plan, self.transaction
        record = self.save.record
        with record.phase("write"), _needing(plan):
            leaves = {c.key: c.tensors(stored[c.key]) for c in plan.components}
            held = {
                key: TensorSource({n: t.tensor for n, t in mine.items()})
                for key, mine in leaves.items()
            }
            sources = {file.name: held[file.component] for file in plan.files}
            taken = self._take_over(sources)
            new = [file for file in plan.files if file.name not in taken]
            written = write_files(
                transaction, new, sources, self.workers, self.chunks, record.wrote
            )
            made = taken | {each.plan.name: each for each in written}
            record.files = [made[name] for name in plan.names]
            index = index_of(plan, stored, self.values, record.files)
            small = hugging_face_indexes(plan, self.values)
            if plan.rank == self.save.joined.domain[0]:
                small |= self.save.joined.request.files
            if index.components:
                small[index_file_name(plan.rank)] = _readable(index)
            for name, data in small.items():
                transaction.write(name, data)
            transaction.storage.sync_folder(transaction.folder)
        files = [
            FileReceipt(name, index.files[name].size, plan.rank, digest)
            for name, digest in index.file_digests().items()
        ]
        for name, data in small.items():
            files.append(FileReceipt(name, len(data), plan.rank, content_digest(data)))
        groups = group_receipts(plan, stored, self.values)
        last = self.save.job.kept.unchanged
        suspects = {} if last is None else last.compared(record.files, leaves)
        components, seconds = list(index.components), dict(record.seconds)
        return RankReceipt(plan.rank, files, components, groups, seconds, suspects)

    def _take_over(self, sources: Mapping[str, ByteSource]) -> dict[str, WrittenFile]:
        """By name, the files that are as they were in the checkpoint before: this one has them
        now."""
        reuse, record = self.save.job.kept.reuse, self.save.record
        if reuse is None:
            return {}
        found = reuse.take_over(
            self.transaction, self.plan.files, sources, self.workers, self.chunks
        )
        record.reused = sum(each.plan.size for each in found)
        record.wrote(record.reused)
        return {each.plan.name: each for each in found}

    def manifest(
        self, receipts: Sequence[RankReceipt], node: int | None, checkpoint_id: str, created: str
    ) -> CheckpointManifest:
        """What the ranks of a domain have written. node: see StorageDomains.node_of."""
        joined, comm, destination = self.save.joined, self.comm, self.destination
        request, verdict = joined.request, joined.verdict
        assert destination is not None  # it is rank 0 that asks
        account = files_and_components(
            joined.components, joined.groups, verdict.partitions, verdict.group_keys, receipts
        )
        return CheckpointManifest(
            checkpoint_id=checkpoint_id,
            step=request.step,
            run_id=verdict.run_id,
            attempt_id=verdict.attempt,
            sequence=destination.sequence,
            created=created,
            world_size=comm.world_size,
            nodes=comm.nodes,
            groups=verdict.partitions,
            components=account.components,
            files=account.files,
            metrics=request.metrics,
            metrics_step=request.step if request.metrics else None,
            training_args_hash=request.training_args_hash,
            versions=_versions(),
            environment={"platform": _system(), "host": platform.node()},
            timings=self.save.record.seconds,
            timings_by_rank=seconds_by_phase(receipts) if comm.world_size > 1 else {},
            metadata=request.metadata,
            node=node,
            abandoned=[[*ends] for ends in destination.target.abandoned or ()],
            user_files=sorted(name for name in account.files if not is_ours(name)),
            label=request.label,
        )


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """listed: what rank 0 had found in the root before it was written. warnings: what is to be
    told of it, to which what comes after it adds."""

    info: CheckpointInfo
    listed: list[CheckpointInfo] | None
    warnings: list[str]


def finish(
    staged: StagedSave, comm: Communicator | None = None, workers: Workers | None = None
) -> SavedCheckpoint:
    """Compare the replicas, write, commit. What one rank raises, all raise, and nothing of it
    stays. comm, workers: of the thread that does it."""
    save = staged.save
    job, joined = save.job, save.joined
    comm, workers = comm or job.comm, workers or job.workers
    with in_flight(joined.verdict.attempt):
        prepared = _prepare(staged, comm, workers)
        manifest = _commit(prepared)
    catalog, name, destination = job.domains.catalog, joined.request.name, prepared.destination
    record, where = save.record, catalog.storage.at(joined.request.name)
    if job.kept.reuse is not None:
        job.kept.reuse.committed(catalog.storage, name, record.files)
    if (file := prepared.transaction.file) is not None:
        catalog.remember(name, file, manifest)
    if (last := job.kept.unchanged) is not None:
        record.warnings += last.warnings(record.suspects, manifest, save.tables, joined.domain)
        last.committed(record.files, manifest)
    info = CheckpointInfo(name, where, "committed", manifest.step, None, manifest)
    listed = None if destination is None else destination.listed
    return SavedCheckpoint(info, listed, save.record.warnings)


def save_now(job: SaveJob, joined: JoinedSave, record: SaveRecord) -> SavedCheckpoint:
    """The rest of a save that has joined, from where the state is."""
    return finish(StagedSave(capture(job, joined, record)))


def _prepare(staged: StagedSave, comm: Communicator, workers: Workers) -> PreparedSave:
    """Compare what has to be equal, and have rank 0 begin the transaction."""
    save, shards = staged.save, staged.save.shards
    replicas = save.replicas(comm)
    merged: dict[str, PlainValues] = {}
    destination = save.joined.destination
    with comm.round("prepare") as r:
        staged.wait()
        plan = staged.plan or _planned(save)
        values = save.values(plan)
        for key, each in values.items():
            _check_tree(key, each.tree)
        with save.record.phase("validate"):
            found = None if replicas is None else compare.report(replicas)
        differing: dict[str, PlainValues] = {}
        if shards is not None:
            differing = shard_table.values_of(shards.described, shards.structure, comm.rank)
        reports = r.gather(PrepareReport(found, differing, plan.names))
        if r.leads:
            merged = _merged_values(save, reports)
            unequal: ReplicaVerdict | None = None
            if replicas is not None:
                unequal = compare.decide(replicas, [each.replicas for each in reports])
            _check_distinct(save.joined.domains, reports)
            if unequal is None:
                destination = _begin(save, plan)
            # Where each domain has an index of its own, all of them need the values.
            r.verdict = PrepareVerdict(unequal, merged if len(save.joined.domains) > 1 else {})
    if replicas is not None and r.verdict.replicas is not None:
        compare.explain(comm, replicas, r.verdict.replicas)
        with comm.round("begin") as again:  # they are equal but for what is tolerated
            again.gather()
            if again.leads:
                destination = _begin(save, plan)
    merged = {**merged, **r.verdict.values}
    chunks = {} if replicas is None else replicas.chunks
    return PreparedSave(
        save,
        comm,
        workers,
        plan,
        {key: merged.get(key, each) for key, each in values.items()},
        # What was passed on takes the place of what this rank has, which may have other bytes.
        {at: each for at, each in chunks.items() if at[0] not in save.passed_on},
        _transaction(save, destination),
        destination,
    )


def _merged_values(
    save: SnapshottedSave, reports: Sequence[PrepareReport]
) -> dict[str, PlainValues]:
    """Raises ReplicationMismatch where ranks have different plain values of one sharded state."""
    if save.shards is None:
        return {}
    merged = shard_table.merged_values(
        save.tables, save.shards.structure, [report.values for report in reports]
    )
    _check_values_fit({key: values.tree for key, values in merged.items()})
    for key, values in merged.items():
        _check_tree(key, values.tree)
    return merged


def _check_distinct(domains: Sequence[Sequence[int]], reports: Sequence[PrepareReport]) -> None:
    """Raises InvalidState where two files of one storage would have the same name."""
    for ranks in domains:
        names = Counter(name for rank in ranks for name in reports[rank].files)
        if twice := [name for name, count in names.items() if count > 1]:
            what = f"two components would both be stored as {twice[0]}; rename one of them"
            raise InvalidState(what)


def _begin(save: SnapshottedSave, plan: WritePlan) -> Destination:
    """On rank 0: look what is there, and have a folder for the files and nothing in their way; but
    for domains whose destination is known by now, which each begin on their own. Raises
    CheckpointExists, StorageError."""
    joined = save.joined
    if joined.destination is not None:
        return joined.destination
    assert joined.target is not None
    # Here and not at the join: it reads what is in the root, for which training need not wait.
    with _needing(plan):
        destination = save.job.domains.catalog.destination(joined.target)
        _transaction(save, destination).begin()
    return destination


@contextmanager
def _needing(plan: WritePlan) -> Iterator[None]:
    """A full disk is reported with what the files of the plan need."""
    try:
        yield
    except NoSpace as error:
        error.needed = sum(file.size for c in plan.components for file in c.files)
        error.message += f"; this part of the checkpoint needs {error.needed:,} bytes"
        raise


def _transaction(save: SnapshottedSave, destination: Destination | None) -> Transaction:
    joined, domains = save.joined, save.job.domains
    target = joined.target if destination is None else destination.target
    assert target is not None
    return open_transaction(
        domains.catalog.storage,
        target,
        joined.verdict.attempt,
        marked=domains.marked,
        warn=save.record.warnings.append,
        user_files=[*joined.request.files],
    )


def _commit(prepared: PreparedSave) -> CheckpointManifest:
    """Write, and commit in every domain what its ranks have written; this domain's manifest."""
    save, comm, transaction = prepared.save, prepared.comm, prepared.transaction
    domains, record, committed = save.job.domains, save.record, False
    leads = comm.rank == save.joined.domain[0]
    of_domain = itemgetter(save.joined.domains.index(save.joined.domain))
    verdict: list[bytes] = []
    try:
        if save.joined.destination is not None:  # not begun by rank 0
            with comm.round("begin on each node"):
                if leads:
                    with _needing(prepared.plan):
                        domains.begin(transaction)
        with domains.round("write", comm) as r:
            domains.check_begun(transaction, comm)
            receipts = r.gather(prepared.write())
            if r.leads:
                r.verdict = verdict = _manifests(prepared, receipts)
            if r.acts():
                with _needing(prepared.plan):
                    transaction.commit(of_domain(r.verdict))
                committed = True
        where = transaction.storage.at(transaction.name)
        record.manifest = manifest = CheckpointManifest.decode(of_domain(r.verdict), where)
    except BaseException as error:
        # When a rank is lost, or this one is on its way out, the others were not waited for.
        interrupted = not isinstance(error, Exception)
        if interrupted and len(save.joined.domains) == 1:
            record.manifest = transaction.published()
            if record.manifest is not None:
                comm.conclude(verdict)
                raise
        early = interrupted or isinstance(error, RankLost)
        if leads and not committed:
            transaction.abort(others_write=early)
        elif leads and len(save.joined.domains) > 1 and not early:
            transaction.take_back()  # else the next look tells whether others have committed
        raise
    if leads:
        transaction.remove_replaced()
    return manifest


def _manifests(prepared: PreparedSave, receipts: Sequence[RankReceipt]) -> list[bytes]:
    """On rank 0: that of each domain."""
    joined, node_of = prepared.save.joined, prepared.save.job.domains.node_of
    prepared.save.record.suspects = [receipt.suspects for receipt in receipts]
    checkpoint_id = joined.request.checkpoint_id or secrets.token_hex(16)
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    encoded = [
        prepared.manifest(
            [receipts[rank] for rank in ranks], node_of(n), checkpoint_id, now
        ).encode()
        for n, ranks in enumerate(joined.domains)
    ]
    for each in encoded if len(encoded) > 1 else ():  # before one of them is published
        check_readable(each)
    return encoded


def _check_manifest(request: SaveRequest, components: Sequence[StateComponent]) -> None:
    """Raises InvalidState unless readers can decode a manifest with all that the caller said in
    it."""
    parts = {}
    for c in components:
        parts[c.key] = ComponentManifest(
            c.key,
            c.sharing_pattern.value,
            group=c.process_group_name,
            partition=None if c.process_group_name is None else [[0]],
            required=c.required,
            metadata=c.metadata,
        )
    manifest = CheckpointManifest(
        checkpoint_id=request.checkpoint_id or "",
        step=request.step,
        run_id=request.run_id,
        attempt_id="",
        sequence=0,
        created="",
        components=parts,
        metrics=request.metrics,
        training_args_hash=request.training_args_hash,
        metadata=request.metadata,
    )
    check_readable(manifest.encode(), "a manifest with what this save was given")


def _private(name: str, document: dict[Any, Any]) -> dict[str, Any]:
    """A copy of what goes into a manifest."""
    return private_json(name, document) if document else {}


def _dict(name: str, value: Any) -> dict[Any, Any]:
    """A copy of a dict, {} for None. Names that are no text are for JSON to judge."""
    if value is not None and not isinstance(value, Mapping):
        raise InvalidState(f"{name} must be a dict, not {shown(value)}")
    return dict(value or {})


def _numbers(metrics: Any) -> dict[str, float]:
    """Metrics as floats; 0-d tensors, numpy numbers and True (1.0) are fine, and so is what is not
    finite."""
    numbers: dict[str, float] = {}
    if metrics is None:
        return numbers
    for name, value in check_mapping("metrics", metrics).items():
        # numpy's; text and times convert to floats, too
        kind = getattr(getattr(value, "dtype", None), "kind", "f")
        try:
            if isinstance(value, str | bytes | bytearray) or kind in "SUMm":
                raise TypeError(f"it is {shown(value)}")
            numbers[name] = float(value.detach() if hasattr(value, "detach") else value)
        except Exception as error:  # a type of the user's own may raise anything
            raise InvalidState(f"metric {name!r} is not a number: {error}", key=name) from None
    return numbers


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


def _check_tree(key: str, tree: bytes) -> None:
    """What every reader does with the plain values of a component, before anything is written: of
    values with tensors in them, whose codec wants real ones, only the form. Raises
    UnsupportedValue."""
    try:
        decode(tree, lenient=True, opaque=True, file="the index")
    except (CheckpointCorrupt, ValueError) as error:
        raise UnsupportedValue(
            f"component {key!r} could not be read back, so it is not saved: {error}", component=key
        ) from None


def _readable(index: Index) -> bytes:
    """The bytes of an index, after what every reader does with them. Raises InvalidState."""
    encoded, name = index.encode(), index_file_name(index.writer)
    found = check_readable(encoded, name, partial(Index.decode, file=name))
    if found.file_digests() != index.file_digests():
        what = "it says other digests than those of the files"
        raise InvalidState(f"{name} could not be read back, so it is not published: {what}")
    return encoded
