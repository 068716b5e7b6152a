"""Nodes that share no storage: each holds its part of every checkpoint, and one exists where all of
them committed it.

The lowest rank of a node says what lies in its storage. A checkpoint is known by its id, for after
a crash in the middle of an overwrite it may have different names on two nodes. What is not on every
node is told as "elsewhere": it is never restored, and replaced or removed by a later save of its
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..catalog.branches import mark_abandoned, newest_run
from ..catalog.catalog import scan
from ..catalog.folder import LOOKS, CheckpointInfo
from ..ranks.communicator import Communicator
from ..ranks.groups import group_index
from ..storage.base import Storage

__all__ = ["Agreed", "StorageMode", "know_nodes", "leads", "look", "node_name", "own_node"]

StorageMode = Literal["shared", "node"]

LEFT_OVER = "left over from an overwrite"


def know_nodes(comm: Communicator) -> None:
    """Have `comm.nodes` known. On every rank."""
    if not comm.nodes:
        comm.together("nodes", _nothing, _nothing, joining=True)


def own_node(comm: Communicator) -> int:
    return group_index(comm.nodes, comm.rank)


def leads(comm: Communicator, mode: StorageMode) -> bool:
    """Whether this rank makes, publishes and removes checkpoints: rank 0, or the lowest rank of its
    node."""
    return comm.rank in [ranks[0] for ranks in comm.nodes] if mode == "node" else comm.rank == 0


def node_name(nodes: Sequence[Sequence[int]], number: int) -> str:
    """How messages name a node."""
    ranks = ", ".join(map(str, nodes[number][:8])) + (", ..." if len(nodes[number]) > 8 else "")
    return f"node {number} (rank{'s' if len(nodes[number]) > 1 else ''} {ranks})"


@dataclass(slots=True)
class Agreed:
    """infos: what lies in this rank's storage, as all nodes together see it, and what only others
    have. run: the one that committed last; sequence: the highest there is on any node; chosen: by
    rank 0."""

    infos: list[CheckpointInfo]
    run: str | None
    sequence: int
    chosen: Any
    _names: dict[str, str] = field(default_factory=dict)

    def here(self, name: str) -> str:
        """What a checkpoint that rank 0 calls `name` is called in this rank's storage."""
        return self._names.get(name, name)


@dataclass(slots=True)
class _Fact:
    """What one node says of one entry of its root."""

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

    def plain(self) -> list[Any]:
        return [self.name, self.status, self.step, self.reason, self.id, self.sequence, self.pinned]

    @property
    def whole(self) -> bool:
        aside = self.status == "partial" and ".replaced-" in self.name
        return self.id is not None and (self.status == "committed" or aside)


def look(
    comm: Communicator,
    storage: Storage,
    choose: Callable[[list[CheckpointInfo]], Any] = lambda _: None,
    *,
    everyone: bool = True,
    check: Callable[[], None] = lambda: None,
    sure: bool = False,
    joining: bool = False,
) -> Agreed:
    """What the storages of all nodes hold together; rank 0 chooses from it. On every rank.

    everyone: every rank gets the `infos` of its storage; else only the lowest of each node. check:
    what may raise there first. joining: ranks may not be here yet. sure: where a checkpoint is not
    on all nodes, or none is, look until two looks agree, because nodes look at different times.
    What one rank raises, all raise.
    """
    if not comm.nodes:
        know_nodes(comm)
        joining = False
    previous: Any = None
    for _ in range(LOOKS if sure else 1):
        seen, doubtful = _look_once(comm, storage, choose, everyone, check, sure, joining)
        joining = False
        if doubtful is None or doubtful == previous:
            break
        previous = doubtful
    return seen


def _look_once(
    comm: Communicator,
    storage: Storage,
    choose: Callable[[list[CheckpointInfo]], Any],
    everyone: bool,
    check: Callable[[], None],
    sure: bool,
    joining: bool,
) -> tuple[Agreed, Any]:
    """One look, and what leaves doubts in it, if anything does."""
    own: list[CheckpointInfo] = []
    lowest = leads(comm, "node")

    def local() -> list[list[Any]]:
        if lowest:
            check()
            own.extend(scan(storage, sure=sure))
        return [_Fact.of(info).plain() for info in own]

    def decide(found: list[list[list[Any]]]) -> dict[str, Any]:
        by_node = [[_Fact(*fact) for fact in found[ranks[0]]] for ranks in comm.nodes]
        verdict = _judge(comm.nodes, by_node)
        infos = _revised(storage, own, 0, verdict)
        newest = max((fact.sequence for facts in by_node for fact in facts), default=0)
        return {**verdict, "run": newest_run(infos), "sequence": newest, "chosen": choose(infos)}

    verdict = comm.together("look", local, decide, joining=joining)
    if everyone:  # not before the lowest rank has: it may still have been cleaning up
        comm.together("look again", lambda: None if lowest else own.extend(scan(storage)), _nothing)
    node = own_node(comm)
    names = {row[0]: row[node] for row in verdict["whole"]}
    doubtful = (
        [verdict["whole"], verdict["lacking"]]
        if verdict["lacking"] or not verdict["whole"]
        else None
    )
    seen = Agreed(
        _revised(storage, own, node, verdict),
        verdict["run"],
        verdict["sequence"],
        verdict["chosen"],
        names,
    )
    return seen, doubtful


def _judge(nodes: Sequence[Sequence[int]], by_node: Sequence[Sequence[_Fact]]) -> dict[str, Any]:
    """whole: of each checkpoint that is on all nodes, its name on each. lacking: id -> [status,
    reason, name, step, nodes that have it] of the others. known: ids on all nodes. pinned: ids,
    somewhere. apart: what has no id, by name."""
    held: dict[str, dict[int, _Fact]] = {}
    for node, facts in enumerate(by_node):
        for fact in facts:
            if fact.id is not None:
                first = held.setdefault(fact.id, {}).get(node)
                if first is None or (fact.whole and not first.whole):
                    held[fact.id][node] = fact
    known = [
        i
        for i, at in held.items()
        if len(at) == len(nodes) and all(fact.whole for fact in at.values())
    ]
    newest: dict[str, str] = {}
    for identity in known:
        base = held[identity][0].name.partition(".replaced-")[0]
        if base not in newest or held[newest[base]][0].sequence < held[identity][0].sequence:
            newest[base] = identity
    lacking = {
        i: [*_why(nodes, by_node, at), sorted(at)] for i, at in held.items() if i not in known
    }
    names = {fact.name for facts in by_node for fact in facts if fact.id is not None}
    apart = {
        fact.name: [fact.status, f"on {node_name(nodes, node)}: {fact.reason}", fact.step]
        for node, facts in enumerate(by_node)
        for fact in facts
        if fact.id is None and fact.status != "partial" and fact.name not in names
    }
    return {
        "whole": [
            [held[identity][node].name for node in range(len(nodes))]
            for identity in newest.values()
        ],
        "known": known,
        "lacking": lacking,
        "pinned": [i for i, at in held.items() if any(fact.pinned for fact in at.values())],
        "apart": apart,
    }


def _why(
    nodes: Sequence[Sequence[int]], by_node: Sequence[Sequence[_Fact]], at: dict[int, _Fact]
) -> list[Any]:
    """Status, reason, name and step of a checkpoint that is not whole on every node."""
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
    return ["elsewhere" if absent else status, reason, first.name, first.step]


_UNUSABLE = ("damaged", "unsupported", "unreadable")


def _revised(
    storage: Storage, own: Sequence[CheckpointInfo], node: int, verdict: dict[str, Any]
) -> list[CheckpointInfo]:
    """One storage's entries with the status that they have on all nodes together, and those that
    only others have."""
    names = {row[node] for row in verdict["whole"]}
    result = []
    for info in own:
        fact = _Fact.of(info)
        if fact.whole and info.name in names:
            info = replace(
                info, status="committed", reason=None, pinned=fact.id in verdict["pinned"]
            )
        elif fact.whole and fact.id in verdict["known"]:
            info = replace(info, status="partial", reason=LEFT_OVER)
        elif fact.whole and fact.id in verdict["lacking"]:
            status, reason, *_ = verdict["lacking"][fact.id]
            info = replace(info, status=status, reason=reason, pinned=fact.id in verdict["pinned"])
        result.append(info)
    there = {info.name for info in own}
    others = [
        [name, status, reason, step]
        for status, reason, name, step, has in verdict["lacking"].values()
        if node not in has and name not in there
    ]
    others += [[name, *rest] for name, rest in verdict["apart"].items() if name not in there]
    result += [
        CheckpointInfo(name, storage.at(name), status, step, reason)
        for name, status, reason, step in others
    ]
    return mark_abandoned(sorted(result, key=lambda info: (*info.order, info.name)))


def _nothing(*_: Any) -> None:
    return None
