"""Who takes part, and what counts: the rules of a round, without clocks and connections.

Each fragment of the parameters has rounds of its own. In synchronous mode a pseudo-gradient counts
in the round whose parameters its worker started from, once, and only if the worker was expected
there; whoever is late gets the parameters of the round that is under way, and begins anew with it.
In asynchronous mode everything counts, once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..arguments import InvalidArgument

__all__ = ["Contribution", "Member", "Round", "Rounds", "Rules"]


@dataclass(frozen=True)
class Rules:
    """What the server was told.

    workers: whom the first round waits for. min_workers: fewer left of more end the run.
    round_timeout: seconds from the first pseudo-gradient of a round to its end without the others.
    heartbeat_timeout: seconds without a sign of life after which a worker is gone. max_workers:
    more are refused, so that memory is bounded.
    grace_period: seconds for which an asynchronous step waits for more. dylu: whether workers are
    advised to go on for as long as the fastest one.

    Raises InvalidArgument for numbers that no run can have.
    """

    workers: int = 1
    min_workers: int = 1
    max_workers: int = 64
    round_timeout: float = 540.0
    heartbeat_timeout: float = 120.0
    asynchronous: bool = False
    grace_period: float = 0.0
    dylu: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.workers <= self.max_workers:
            counts = f"{self.min_workers}, {self.workers}, {self.max_workers}"
            instead = "give 1 <= min_workers <= workers <= max_workers"
            raise InvalidArgument("workers", counts, "no run has such numbers", instead)
        for name in ("round_timeout", "heartbeat_timeout", "grace_period"):
            seconds = getattr(self, name)
            if not (seconds > 0 or (seconds == 0 and name == "grace_period")):
                raise InvalidArgument(name, seconds, "no time to wait", "give seconds above 0")


@dataclass
class Member:
    """A worker that is registered."""

    last_seen: float
    host: str = ""
    sync_every: int = 0
    beats: bool = True  # whether it sends heartbeats
    steps_per_second: float = 0.0
    staleness: int = 0  # outer steps between the parameters of its last contribution and its end


@dataclass(frozen=True)
class Contribution:
    """A worker's pseudo-gradient of one fragment.

    base: the round whose parameters it started from.
    """

    base: int
    gradient: dict[str, Tensor]


@dataclass
class Round:
    """One round of one fragment."""

    number: int = 0
    expected: set[str] = field(default_factory=set)
    received: dict[str, Contribution] = field(default_factory=dict)
    applied: dict[str, int] = field(default_factory=dict)  # worker -> base of its last step
    began: float | None = None  # when the first contribution came

    def drop(self, worker: str) -> None:
        self.received.pop(worker, None)
        self.began = self.began if self.received else None


class Rounds:
    """The workers, and the round of each fragment."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.members: dict[str, Member] = {}
        self.fragments: list[Round] = []
        self.open = True  # whether whoever registers is still expected in the round under way
        self.stopping = False
        self.evicted = 0

    # Who is there.

    def join(self, worker: str, member: Member, fragments: int) -> None:
        """Register a worker. One that comes while a round is under way is expected in the next."""
        if not self.fragments:
            self.fragments = [Round() for _ in range(fragments)]
        if worker not in self.members and self.open:
            for held in self.fragments:
                held.expected.add(worker)
            self.open = len(self.fragments[0].expected) < self.rules.workers
        self.members[worker] = member
        if len(self.members) >= self.rules.min_workers:
            self.stopping = False

    def leave(self, worker: str) -> None:
        """A worker that is gone is waited for no longer, and what it sent is dropped."""
        if self.members.pop(worker, None) is None:
            return
        for held in self.fragments:
            held.expected.discard(worker)
            held.drop(worker)
        if not self.members:  # whoever comes now starts as the first ones did
            self.open, self.stopping = True, False
        for held in self.fragments:
            if not held.expected and not self.open:
                held.expected = set(self.members)

    def refuse(self, worker: str, fragment: int) -> None:
        """What a worker sent cannot be used: the others do not wait for something better."""
        held = self.fragments[fragment]
        if len(held.expected) > 1 and not self.open:
            held.expected.discard(worker)

    def expire(self, now: float) -> list[str]:
        """Evict those without a sign of life; the run ends where too few are left."""
        limit = self.rules.heartbeat_timeout
        gone = [n for n, m in self.members.items() if m.beats and now - m.last_seen > limit]
        for worker in gone:
            self.leave(worker)
        self.evicted += len(gone)
        if gone and 0 < len(self.members) < self.rules.min_workers:
            self.stopping = True
        return gone

    # What counts.

    def counted(self, worker: str, fragment: int, base: int) -> bool:
        """Whether the worker's pseudo-gradient on these parameters is in the global ones."""
        return self.fragments[fragment].applied.get(worker) == base

    def wanted(self, worker: str, fragment: int, base: int) -> bool:
        """Whether what started from the parameters of round `base` may still count."""
        held = self.fragments[fragment]
        if self.counted(worker, fragment, base):
            return False
        return base <= held.number if self.rules.asynchronous else base == held.number

    def add(self, worker: str, fragment: int, contribution: Contribution, now: float) -> None:
        """Keep it for the next step, in place of one that the worker sent before."""
        held = self.fragments[fragment]
        held.received[worker] = contribution
        held.began = now if held.began is None else held.began

    def take(self, fragment: int) -> dict[str, Contribution]:
        """What a step made now would be made of, by worker, in an order that does not vary."""
        held = self.fragments[fragment]
        who = held.received.keys() if self.rules.asynchronous else held.expected
        return {worker: held.received[worker] for worker in sorted(who & held.received.keys())}

    def deadline(self, fragment: int) -> float:
        """When a step is due with whatever is there by then."""
        began = self.fragments[fragment].began
        if began is None or self.waits_for_first:
            return math.inf
        rules = self.rules
        return began + (rules.grace_period if rules.asynchronous else rules.round_timeout)

    @property
    def waits_for_first(self) -> bool:
        """Whether the workers of the first round are not all there."""
        return self.open and not self.rules.asynchronous

    def ready(self, fragment: int, now: float) -> bool:
        """Whether a step is due."""
        taken, held = self.take(fragment).keys(), self.fragments[fragment]
        if not taken or self.stopping or self.waits_for_first:
            return False
        if not self.rules.asynchronous and held.expected <= taken:
            return True
        few = not self.rules.asynchronous and len(taken) < self.rules.min_workers
        return not few and now >= self.deadline(fragment)

    def advance(self, fragment: int, taken: Mapping[str, Contribution]) -> None:
        """A step was made of what was taken: the next round begins, with all who are there now."""
        held = self.fragments[fragment]
        for worker, contribution in taken.items():
            held.applied[worker] = contribution.base
            if worker in self.members:
                self.members[worker].staleness = held.number - contribution.base
            held.drop(worker)
        if not self.rules.asynchronous:
            held.received.clear()  # of those who were not expected
        held.applied = {w: b for w, b in held.applied.items() if w in self.members or w in taken}
        held.number += 1
        held.expected = set(self.members)
        held.began = None if not held.received else held.began

    def recommended(self, worker: str) -> int | None:
        """Steps between two rounds for a worker of this speed: the fastest has all of its own."""
        member = self.members[worker]
        fastest = max(m.steps_per_second for m in self.members.values())
        if not self.rules.dylu or fastest <= 0 or member.steps_per_second <= 0:
            return None
        return max(1, math.floor(member.steps_per_second / fastest * member.sync_every))

    # State.

    @property
    def version(self) -> int:
        """Outer steps of all fragments together."""
        return sum(held.number for held in self.fragments)

    def state_dict(self) -> dict[str, Any]:
        return {
            "fragments": [
                {
                    "number": held.number,
                    "expected": sorted(held.expected),
                    "applied": dict(held.applied),
                }
                for held in self.fragments
            ],
            "members": {
                name: {"host": m.host, "sync_every": m.sync_every, "beats": m.beats}
                for name, m in self.members.items()
            },
            "open": self.open,
        }

    def load_state_dict(self, state: Mapping[str, Any], now: float = 0.0) -> None:
        self.fragments = [
            Round(entry["number"], set(entry["expected"]), applied=dict(entry["applied"]))
            for entry in state["fragments"]
        ]
        self.members = {name: Member(now, **entry) for name, entry in state["members"].items()}
        self.open = state["open"]
