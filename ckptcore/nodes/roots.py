"""Roots that are one on every node: each node holds its part of every checkpoint, and one exists
where all of them committed it.

The lowest rank of a node says what lies in its storage. A checkpoint is known by its id, for after
a crash in the middle of an overwrite it may have different names on two nodes. What is not on every
node is "incomplete": it is never restored, and replaced or removed by a later save of its run.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..catalog.catalog import (
    Catalog,
    CleanUp,
    Destination,
    Location,
    Ranges,
    Target,
    left_by_last,
    mark_abandoned,
    newest_run,
    surplus,
    within,
)
from ..catalog.domain import ActingRound, Entries, ScanRound, StorageDomains
from ..catalog.folder import CheckpointInfo, still_there
from ..catalog.transaction import Transaction, check_target
from ..errors import CheckpointExists, InvalidState, StorageError
from ..format.manifest import CheckpointManifest, ReplicaGroup
from ..ranks.communicator import Communicator, node_name
from ..ranks.messages import message
from .parts import on_node, part_of, pass_on

StorageMode = Literal["shared", "node"]

LEFT_OVER = "left over from an overwrite"


def domains_of(comm: Communicator, catalog: Catalog, mode: StorageMode) -> StorageDomains:
    return (NodeLocalRoots if mode == "node" else StorageDomains)(comm, catalog)


@message
@dataclass(frozen=True, slots=True)
class _Fact:
    """What one node says of one entry of its root. id: of the checkpoint, if it has one."""

    name: str
    status: str
    step: int | None
    reason: str | None
    id: str | None
    sequence: int
    pinned: bool

    @classmethod
    def of(cls, info: CheckpointInfo) -> _Fact:
        identity = info.manifest.checkpoint_id if info.manifest else None
        return cls(
            info.name,
            info.status,
            info.step,
            info.reason,
            identity,
            info.sequence or 0,
            info.pinned,
        )

    @property
    def whole(self) -> bool:
        aside = self.status == "partial" and ".replaced-" in self.name
        return self.id is not None and (self.status == "committed" or aside)


@message
@dataclass(frozen=True, slots=True)
class _Lacking:
    """A checkpoint that is not whole on every node, as the first node that has it calls it. nodes:
    that have it."""

    name: str
    status: str
    step: int | None
    reason: str
    nodes: list[int]


@message
@dataclass(frozen=True, slots=True)
class _Held:
    """What the nodes hold together. names: of each checkpoint that is on all nodes, its name on
    each. whole: ids of all that are, also where a newer one has the name. lacking: the others, by
    id. nameless: what has no id. pinned: ids, somewhere. sequence: the highest on any node."""

    names: list[list[str]]
    whole: list[str]
    lacking: dict[str, _Lacking]
    nameless: list[_Lacking]
    pinned: list[str]
    sequence: int

    @property
    def doubtful(self) -> bool:
        """Whether a second look may show more: nodes look at different times."""
        return bool(self.lacking) or not self.names

    def revised(
        self, catalog: Catalog, entries: Sequence[CheckpointInfo], node: int
    ) -> list[CheckpointInfo]:
        """One node's entries with the status that they have on all nodes together, and those that
        only others have."""
        here = {row[node] for row in self.names}
        result = [self._revised(info, info.name in here) for info in entries]
        there = {info.name for info in entries}
        others = [each for each in self.lacking.values() if node not in each.nodes]
        result += [
            CheckpointInfo(o.name, catalog.storage.at(o.name), o.status, o.step, o.reason)
            for o in (*others, *self.nameless)
            if o.name not in there
        ]
        return mark_abandoned(sorted(result, key=lambda info: (*info.order, info.name)))

    def _revised(self, info: CheckpointInfo, counts: bool) -> CheckpointInfo:
        fact = _Fact.of(info)
        if not fact.whole or fact.id is None:
            return info
        pinned = fact.id in self.pinned
        if counts:
            return replace(info, status="committed", reason=None, pinned=pinned)
        if fact.id in self.whole:
            return replace(info, status="partial", reason=LEFT_OVER)
        why = self.lacking[fact.id]
        return replace(info, status=why.status, reason=why.reason, pinned=pinned)


class NodeScanRound(ScanRound):
    """The round of the caller, which ends before rank 0 looks; then rounds in which the nodes say
    what they hold; and one in which rank 0 decides."""

    _held: _Held | None = None
    _entries: Sequence[CheckpointInfo] = ()

    def _complete(self) -> None:
        self.held()

    def held(self) -> _Held:
        """What the nodes hold together. Where a checkpoint is not on all of them, or none is, until
        two looks are the same, because nodes look at different times."""
        if self._held is None:
            self._stack.close()
            before = None
            while self._held is None:
                with self.comm.round("look") as r:
                    if self.comm.leads_node:
                        self._entries = self._listed()
                    facts = r.gather([_Fact.of(info) for info in self._entries])
                    if r.leads:
                        nodes = self.comm.nodes
                        r.verdict = _held_by(nodes, [facts[ranks[0]] for ranks in nodes])
                found: _Held = r.verdict
                if self._recall or not found.doubtful or found == before:
                    self._held = found
                before = found
            self._enter("choice")
        return self._held

    @property
    def infos(self) -> list[CheckpointInfo]:
        """On the lowest rank of each node, the entries of its storage as all nodes see them."""
        self.held()
        return self.revised(self._entries)

    def revised(self, entries: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        return self.held().revised(self._catalog, entries, self.comm.node_number)

    @property
    def sequence(self) -> int:
        return self.held().sequence

    def locate(self, name: str) -> Location:
        return self._catalog.locate(self._local_name(name))

    def find(self, name: str) -> CheckpointInfo | None:
        if not self.comm.leads_node:
            return None
        here = self._local_name(name)
        return next(info for info in self.infos if info.name == here)

    def _local_name(self, name: str) -> str:
        names = self.held().names
        return next((row[self.comm.node_number] for row in names if row[0] == name), name)


class NodeActingRound(ActingRound):
    """A round that ends with the verdict, and another one in which the lowest rank of each node
    acts on it."""

    def acts(self) -> bool:
        self._round.verdict = self.verdict
        self._stack.close()
        self.verdict = self._round.verdict
        self._enter(f"{self.topic} on each node")
        return self.comm.leads_node


class NodeLocalRoots(StorageDomains):
    """One domain a node. Every method is a call of all ranks."""

    _scan_round, _acting_round = NodeScanRound, NodeActingRound
    words = " with storage_mode='node'"
    in_rounds = marked = True

    def ranks(self, comm: Communicator) -> Sequence[Sequence[int]]:
        return comm.nodes

    def describe(self, text: str) -> str:
        return f"{node_name(self.comm.nodes, self.comm.node_number)}: {text}"

    def without(self, text: str) -> str:
        return f"{node_name(self.comm.nodes, self.comm.node_number)} has no part of it: {text}"

    def check_part(self, manifest: CheckpointManifest, url: str) -> None:
        if manifest.node is None:
            raise InvalidState(
                f"{url} was saved with storage_mode='shared', and is to be loaded with "
                "storage_mode='node': it lies whole in storage that all nodes see; load it with "
                "storage_mode='shared'"
            )

    def check(self, target: Target) -> None:
        """Nothing yet: one node does not say what there is."""

    def destination_by_rounds(self, target: Target, comm: Communicator) -> Destination:
        """What is not on every node gives way without being asked. Raises CheckpointExists,
        StorageError."""
        with self.scan("destination", comm, recall=True) as r:
            if comm.leads_node:
                check_target(self.catalog.storage, replace(target, overwrite=True, abandoned=()))
            r.gather()
            if r.leads:
                sequence = max(r.sequence, target.after_sequence) + 1
                r.verdict = [sequence, *self._gives_way(target, r.infos)]
        sequence, overwrites, abandoned = r.verdict
        made = replace(target, overwrite=overwrites, abandoned=abandoned)
        return Destination(made, sequence, r.infos if r.leads else [])

    def _gives_way(self, target: Target, infos: Sequence[CheckpointInfo]) -> tuple[bool, Ranges]:
        """Whether what has the name gives way, and what the run has left behind."""
        behind = target.abandoned
        if behind is None:
            behind = [[*ends] for ends in left_by_last(infos, target.run_id)]
        named = [info for info in infos if info.name == target.name]
        left = [
            i
            for i in named
            if i.manifest and i.run_id == target.run_id and within(i.manifest.sequence, behind)
        ]
        committed = any(i.status == "committed" and i not in left for i in named)
        if committed and not target.overwrite:
            where = self.catalog.storage.at(target.name)
            what = f"{where} is a committed checkpoint; pass overwrite=True to replace it"
            raise CheckpointExists(what, path=where, step=target.step)
        useless = [i for i in named if i.status in ("incomplete", "damaged") or i in left]
        return target.overwrite or any(not i.pinned for i in useless), behind

    def begin(self, transaction: Transaction) -> None:
        try:
            transaction.begin()
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            nodes, number = self.comm.nodes, self.comm.node_number
            where = f"{transaction.storage.url} on {node_name(nodes, number)}"
            raise InvalidState(
                f"{where} is the storage of another node too, and storage_mode is 'node': pass "
                "storage_mode='shared' for storage that all nodes share, or a root of its own on "
                "every node",
                ranks=nodes[number],
            ) from None

    def check_begun(self, transaction: Transaction, comm: Communicator) -> None:
        """Nothing: every node has begun its own."""

    def node_of(self, domain: int) -> int | None:
        return domain

    def tables(self, tables: dict[str, Any], comm: Communicator, *, spread: bool) -> dict[str, Any]:
        ranks = self.domain_ranks(comm)
        return {key: on_node(table, ranks, spread=spread) for key, table in tables.items()}

    def pass_on(self, snapshots: Mapping[str, Any], comm: Communicator) -> dict[str, Any]:
        """On the lowest rank of every node but that of rank 0."""
        return pass_on(comm, snapshots if comm.rank == 0 else {})

    def groups(
        self, groups: Mapping[str, Sequence[ReplicaGroup]], comm: Communicator
    ) -> Mapping[str, Sequence[ReplicaGroup]]:
        ranks = self.domain_ranks(comm)
        return {key: [part_of(each, ranks) for each in found] for key, found in groups.items()}

    def entries(self) -> Entries:
        with self.scan("look", joining=True) as r:
            if r.leads:
                r.verdict = newest_run(r.infos)
        with self.comm.round("look again"):
            # Not before the lowest rank has: it may still have been cleaning up.
            infos = r.infos if self.comm.leads_node else r.revised(self.catalog.scan())
        return Entries(infos, r.verdict)

    def clean_up(self, comm: Communicator, after: CleanUp) -> None:
        """What is of this run and not on all nodes goes, too."""
        catalog, saved, warn = self.catalog, after.saved, after.warn
        try:
            with self.scan("clean up", comm, recall=True) as r:
                if r.leads:
                    going = surplus(r.infos, after.policy, after.run_id, saved.name)
                    r.verdict = [info.name for info in going]
            if comm.leads_node:
                infos = r.infos
                stray = [i for i in infos if i.status == "incomplete"]
                mine = [i for i in stray if i.run_id == after.run_id and i.name != saved.name]
                with self.comm.keep_alive():
                    found = [info for name in r.verdict if (info := r.find(name)) is not None]
                    # It went by what it remembers; what is to go is read again.
                    storage = catalog.storage
                    sure = [i for i in found if still_there(storage, i.name, i.manifest)]
                    catalog.delete_all(sure, warn, after.deleted if comm.rank == 0 else None)
                    catalog.delete_all([i for i in mine if not i.pinned], warn)
                    catalog.sweep([i for i in infos if i not in stray], after.run_id, warn)
        except Exception as error:  # a policy of the user's own may raise anything
            warn(f"{catalog.storage.url}: cleaning up after step {saved.step} failed: {error!r}")


def _held_by(nodes: Sequence[Sequence[int]], by_node: Sequence[Sequence[_Fact]]) -> _Held:
    held: dict[str, dict[int, _Fact]] = {}
    for node, facts in enumerate(by_node):
        for fact in facts:
            if fact.id is not None:
                first = held.setdefault(fact.id, {}).get(node)
                if first is None or (fact.whole and not first.whole):
                    held[fact.id][node] = fact
    whole = [
        i
        for i, at in held.items()
        if len(at) == len(nodes) and all(fact.whole for fact in at.values())
    ]
    newest: dict[str, str] = {}
    for identity in whole:
        base = held[identity][0].name.partition(".replaced-")[0]
        if base not in newest or held[newest[base]][0].sequence < held[identity][0].sequence:
            newest[base] = identity
    names = {fact.name for facts in by_node for fact in facts if fact.id is not None}
    nameless = {
        fact.name: _Lacking(
            fact.name, fact.status, fact.step, f"on {node_name(nodes, node)}: {fact.reason}", []
        )
        for node, facts in enumerate(by_node)
        for fact in facts
        if fact.id is None and fact.status != "partial" and fact.name not in names
    }
    return _Held(
        [[held[i][node].name for node in range(len(nodes))] for i in newest.values()],
        whole,
        {i: _lacking(nodes, by_node, at) for i, at in held.items() if i not in whole},
        [*nameless.values()],
        [i for i, at in held.items() if any(fact.pinned for fact in at.values())],
        max((fact.sequence for facts in by_node for fact in facts), default=0),
    )


def _lacking(
    nodes: Sequence[Sequence[int]], by_node: Sequence[Sequence[_Fact]], at: dict[int, _Fact]
) -> _Lacking:
    """Why a checkpoint is not whole on every node."""
    first = at[min(at)]
    broken: list[str] = []
    absent: list[str] = []
    status = "damaged"
    for node, facts in enumerate(by_node):
        same = at.get(node) or next(
            (f for f in facts if f.name == first.name and f.status in _UNUSABLE), None
        )
        if same is None:
            absent.append(node_name(nodes, node))
        elif not same.whole:
            broken.append(f"{same.status} on {node_name(nodes, node)}: {same.reason}")
            status = "unreadable" if same.status == "unreadable" else status
    reason = "; ".join(([f"not on {', '.join(absent)}"] if absent else []) + broken)
    return _Lacking(first.name, "incomplete" if absent else status, first.step, reason, sorted(at))


_UNUSABLE = ("damaged", "unsupported", "unreadable")
