"""The catalog of a run as its ranks see it together.

A storage domain is a set of ranks that see one storage. A root that all ranks share is one domain;
roots that are one on every node are one a node (nodes/roots.py). Of each domain the lowest rank
looks and acts for the others, and rank 0 decides for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeVar

from ..errors import InvalidState, RanksDisagree
from ..format.manifest import CheckpointManifest, ReplicaGroup
from ..ranks.communicator import Communicator, node_name
from .catalog import Catalog, CleanUp, Destination, Location, Target, last_sequence, newest_run
from .folder import CheckpointInfo
from .transaction import Transaction, check_target

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entries:
    """infos: what lies in this rank's storage, as all domains together see it. run: the one that
    committed last."""

    infos: Sequence[CheckpointInfo]
    run: str | None


class DomainRound:
    """A round of all ranks in which domains take part. leads, gather, verdict: of a Round."""

    verdict: Any = None

    def __init__(self, comm: Communicator) -> None:
        self.comm, self._stack = comm, ExitStack()

    @contextmanager
    def begun(self, topic: str, joining: bool = False) -> Iterator[Self]:
        with self._stack:
            self._enter(topic, joining)
            yield self
            self._complete()
            self._round.verdict = self.verdict
        self.verdict = self._round.verdict

    def _enter(self, topic: str, joining: bool = False) -> None:
        self._round = self._stack.enter_context(self.comm.round(topic, joining=joining))
        self.topic, self.leads, self.gather = topic, self._round.leads, self._round.gather

    def _complete(self) -> None:
        """On every rank, at the end of the block: what not every one of them has asked for."""


class ActingRound(DomainRound):
    """A round in which rank 0 decides, and then one rank of each domain acts."""

    def acts(self) -> bool:
        """Whether this rank is to act on the verdict, for its domain, before the block ends. Every
        rank asks once; what fails then, fails on all."""
        return self.leads


class ScanRound(DomainRound):
    """A round in which rank 0 knows what lies in all domains.

    infos: on rank 0, the entries of its storage as all domains together see them; of each commit
    one.
    """

    def __init__(self, comm: Communicator, catalog: Catalog, recall: bool) -> None:
        super().__init__(comm)
        self._catalog, self._recall = catalog, recall

    def _listed(self) -> list[CheckpointInfo]:
        """What lies in this rank's storage."""
        return self._catalog.recall() if self._recall else self._catalog.scan()

    @cached_property
    def infos(self) -> list[CheckpointInfo]:
        return self._listed()

    @property
    def sequence(self) -> int:
        """The highest commit sequence among all entries."""
        return last_sequence(self.infos)

    def locate(self, name: str) -> Location:
        """Where this rank finds a checkpoint that rank 0 calls `name`. After the block."""
        return self._catalog.locate(name)

    def revised(self, entries: Sequence[CheckpointInfo]) -> Sequence[CheckpointInfo]:
        """Entries of this rank's storage as all domains together see them."""
        return entries

    def find(self, name: str) -> CheckpointInfo | None:
        """The entry that rank 0 calls `name`, on the lowest rank of each domain; elsewhere None."""
        return next(info for info in self.infos if info.name == name) if self.leads else None


class StorageDomains:
    """One domain: a root that all ranks share. Every method is a call of all ranks, but for
    `entries`.

    comm: of the calls that the run makes. catalog: of this rank's storage.
    """

    words = ""  # what a call adds to its words, so that all ranks mean the same
    in_rounds = False  # whether `entries` is a call of all ranks, too
    marked = False  # see Transaction
    _scan_round: type[ScanRound] = ScanRound
    _acting_round: type[ActingRound] = ActingRound

    def __init__(self, comm: Communicator, catalog: Catalog) -> None:
        self.comm, self.catalog = comm, catalog

    def ranks(self, comm: Communicator) -> Sequence[Sequence[int]]:
        """The ranks of each domain."""
        return [range(comm.world_size)]

    def domain_ranks(self, comm: Communicator) -> Sequence[int]:
        """The ranks that see the same storage as this one."""
        return next(ranks for ranks in self.ranks(comm) if comm.rank in ranks)

    def leads(self, comm: Communicator) -> bool:
        """Whether this rank acts for its domain."""
        return comm.rank == self.domain_ranks(comm)[0]

    def describe(self, text: str) -> str:
        """What happened in this domain, where there are several."""
        return text

    @contextmanager
    def scan(
        self,
        topic: str,
        comm: Communicator | None = None,
        *,
        joining: bool = False,
        recall: bool = False,
    ) -> Iterator[ScanRound]:
        """A round in which rank 0 may know what lies there: `with domains.scan("pin") as r`.

        comm: default that of the run. joining: see Communicator.round. recall: see Catalog.recall;
        good enough to count by, not to load by.
        """
        with self._scan_round(comm or self.comm, self.catalog, recall).begun(topic, joining) as r:
            yield r

    @contextmanager
    def round(self, topic: str, comm: Communicator) -> Iterator[ActingRound]:
        """A round in which the domains act: `with domains.round("write", comm) as r`."""
        with self._acting_round(comm).begun(topic) as r:
            yield r

    def without(self, text: str) -> str:
        """`text`, which says that a checkpoint is not there, of this domain's storage."""
        return text

    def check_part(self, manifest: CheckpointManifest, url: str) -> None:
        """Raises InvalidState where the checkpoint at `url` is not the part that one domain
        stores."""
        if manifest.node is not None:
            raise InvalidState(
                f"{url} was saved with storage_mode='node', and is to be loaded with "
                "storage_mode='shared': it is the part of one node; load it on the nodes that "
                "saved it with storage_mode='node'"
            )

    def check(self, target: Target) -> None:
        """On rank 0, long before anything is written: raises CheckpointExists, StorageError."""
        check_target(self.catalog.storage, target)

    def destination_by_rounds(self, target: Target, comm: Communicator) -> Destination | None:
        """The destination, where it takes rounds to know it; else None, and rank 0 asks the
        catalog for it just before anything is written."""
        return None

    def begin(self, transaction: Transaction) -> None:
        """On the rank that acts for its domain. Raises as Transaction.begin does."""
        transaction.begin()

    def check_begun(self, transaction: Transaction, comm: Communicator) -> None:
        """Raises InvalidState where this rank, the lowest of its node, does not see the storage
        that the acting rank writes to."""
        if comm.rank == 0 or not comm.leads_node or transaction.is_visible():
            return
        number = comm.node_number
        where = f"{transaction.storage.url} on {node_name(comm.nodes, number)}"
        raise InvalidState(
            f"{where} is not the storage that rank 0 writes to, and storage_mode is 'shared': pass "
            "storage_mode='node' where nodes do not share their disks, or a root that all nodes "
            "see",
            ranks=comm.nodes[number],
        )

    def node_of(self, domain: int) -> int | None:
        """Which node a domain is; None where all nodes share the storage."""
        return None

    def tables(self, tables: dict[str, T], comm: Communicator, *, spread: bool) -> dict[str, T]:
        """Shard tables as this domain stores them. spread: over ranks that hold the same."""
        return tables

    def pass_on(self, snapshots: Mapping[str, T], comm: Communicator) -> dict[str, T]:
        """Rank 0's snapshots of global state, where another rank has to write them too."""
        return {}

    def groups(
        self, groups: Mapping[str, Sequence[ReplicaGroup]], comm: Communicator
    ) -> Mapping[str, Sequence[ReplicaGroup]]:
        """Replica groups, by component, as this domain stores them."""
        return groups

    def entries(self) -> Entries:
        """What lies there."""
        infos = self.catalog.distinct(self.catalog.scan())
        return Entries(infos, newest_run(infos))

    def act(
        self,
        topic: str,
        wanted: Callable[[], int | str],
        choose: Callable[[list[CheckpointInfo], int | str], CheckpointInfo],
        work: Callable[[CheckpointInfo], Any],
    ) -> list[Any]:
        """Do `work` with the checkpoint that is `wanted`, once in each domain.

        What it returns there, which must be plain values, is for all, in order of the domains; and
        what one raises, all raise. Raises RanksDisagree for different steps.
        """
        with self.scan(topic, joining=True) as r:
            steps = r.gather(wanted())
            if r.leads:
                r.verdict = choose(self.catalog.distinct(r.infos), same_step(topic, steps)).name
        info = r.find(r.verdict)
        with self.comm.round(topic) as each:
            found = each.gather(None if info is None else work(info))
            if each.leads:
                each.verdict = [found[ranks[0]] for ranks in self.ranks(self.comm)]
        results: list[Any] = each.verdict
        return results

    def clean_up(self, comm: Communicator, after: CleanUp) -> None:
        """Retention and sweeping in every domain; rank 0 decides, talking over `comm`. A failure is
        a warning."""
        if self.leads(comm):
            with self.comm.keep_alive():
                self.catalog.clean_up(after)


def same_step(topic: str, steps: Sequence[T]) -> T:
    """What all ranks say. Raises RanksDisagree."""
    if wrong := [rank for rank, step in enumerate(steps) if step != steps[0]]:
        calls = (
            f"rank 0 calls for a {topic} of step {steps[0]}, rank {wrong[0]} for one of step "
            f"{steps[wrong[0]]}"
        )
        raise RanksDisagree(calls, ranks=wrong)
    return steps[0]
