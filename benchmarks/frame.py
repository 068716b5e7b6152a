"""The frame of every benchmark: interleaved rounds, medians, ratio to the machine's limit, targets
and verdicts.

Used by each `python -m benchmarks NAME`; it measures nothing by itself.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "Check",
    "Contender",
    "Kind",
    "Report",
    "Row",
    "Sample",
    "best_limit",
    "measure",
    "problem_of",
    "rows_of",
]

Kind = Literal["limit", "ours", "peer", "note"]

# What a peer may reasonably raise; our own errors derive from these too, and are let through.
PEER_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Contender:
    """Something to be timed. `prepare` and `finish` run around every round and are not timed."""

    name: str
    run: Callable[[], None]
    kind: Kind = "peer"
    prepare: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None
    missing: str | None = None  # why it cannot run here, shown in its row


@dataclass
class Sample:
    """The seconds of every counted round of one contender, or why there are none."""

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    problem: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds and self.problem is None else None


@dataclass(frozen=True)
class Check:
    """A target, with the figure that was measured for it in this run (None: it could not be
    measured)."""

    text: str
    bound: float
    actual: float | None
    at_least: bool = True
    unit: str = ""

    @property
    def met(self) -> bool:
        if self.actual is None:
            return False
        return self.actual >= self.bound if self.at_least else self.actual <= self.bound

    @property
    def target(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{sign} {_plain(self.bound)}{self.unit} {self.text}".rstrip()

    @property
    def verdict(self) -> str:
        word = "not measured" if self.actual is None else "met" if self.met else "MISSED"
        return word if self.actual is None else f"{word} ({_plain(self.actual)}{self.unit})"


@dataclass
class Row:
    """One line of a report. `low` and `high` are the extremes of the rounds that `median` is of."""

    name: str
    median: float | None
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    unit: str = "s"
    kind: str = "peer"
    checks: list[Check] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    problem: str | None = None
    rounds: list[float] = field(default_factory=list)


@dataclass
class Report:
    """What one benchmark found: rows for one table, with what is needed to judge them."""

    name: str
    title: str
    rows: list[Row]
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def checks(self) -> list[Check]:
        return [check for row in self.rows for check in row.checks]


def measure(
    contenders: Sequence[Contender],
    rounds: int,
    *,
    warmup: int = 1,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
    strict: bool = True,
) -> dict[str, Sample]:
    """Time all contenders in interleaved rounds, each round in another order, so that drift meets
    all of them alike.

    The first `warmup` rounds are not counted. A peer that fails is left out from then on, with its
    reason; an error of ours or of the machine's limit is raised, unless `strict` is False: on a
    machine that is there for minutes the other rows are worth having.
    """
    samples = {c.name: Sample(c, problem=c.missing) for c in contenders}
    if len(samples) != len(contenders):
        raise ValueError("two contenders have the same name")
    order = random.Random(seed)
    for number in range(-warmup, rounds):
        which = [c for c in contenders if samples[c.name].problem is None]
        order.shuffle(which)
        for contender in which:
            progress(
                f"round {number + 1 if number >= 0 else 'warm-up'} of {rounds}: {contender.name}"
            )
            try:
                seconds = _timed(contender, clock)
            except PEER_ERRORS as error:
                if strict and contender.kind not in ("peer", "note"):
                    raise
                samples[contender.name].problem = problem_of(error)
                continue
            if number >= 0:
                samples[contender.name].seconds.append(seconds)
    return samples


def problem_of(error: BaseException) -> str:
    """What a row says of a failure."""
    return f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _timed(contender: Contender, clock: Callable[[], float]) -> float:
    if contender.prepare is not None:
        contender.prepare()
    gc.collect()  # what earlier contenders left behind is not paid for by this one
    try:
        start = clock()
        contender.run()
        return clock() - start
    finally:
        if contender.finish is not None:
            contender.finish()


def best_limit(samples: Mapping[str, Sample]) -> float | None:
    """The median of the fastest contender that stands for the machine's own limit."""
    medians = [
        s.median for s in samples.values() if s.contender.kind == "limit" and s.median is not None
    ]
    return min(medians, default=None)


def rows_of(samples: Mapping[str, Sample]) -> list[Row]:
    """One row for each contender, in the order given; `ratio` is its speed over that of the
    machine's limit."""
    limit = best_limit(samples)
    rows = []
    for name, sample in samples.items():
        median = sample.median
        row = Row(
            name,
            median,
            kind=sample.contender.kind,
            problem=sample.problem,
            rounds=list(sample.seconds),
        )
        if median is not None:
            row.low, row.high = min(sample.seconds), max(sample.seconds)
            row.ratio = limit / median if limit is not None and median > 0 else None
        rows.append(row)
    return rows


def times_faster(samples: Mapping[str, Sample], ours: str, other: str) -> float | None:
    """How many times faster `ours` is than `other`, by medians; None when one of them has no
    figure."""
    mine, theirs = samples[ours].median, samples[other].median
    return theirs / mine if mine and theirs is not None else None


def _plain(value: float) -> str:
    if value == int(value) and abs(value) >= 10:
        return str(int(value))
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
