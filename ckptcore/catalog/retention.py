"""Which committed checkpoints of a run stay.

A policy sees manifests only, and can be wrong about nothing else: the newest, the one just
committed and pinned ones always stay, whatever it says. Policies are combined with `|`: what any of
them keeps, stays. So `KeepLast(3) | KeepBest("eval_loss")` keeps at most four.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from ..arguments import check_count, check_number, check_one_of, shown
from ..errors import InvalidState
from .folder import CheckpointInfo


class RetentionPolicy(ABC):
    """Says which checkpoints stay; subclass it for rules of your own."""

    @abstractmethod
    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        """Names of the checkpoints to keep.

        checkpoints: sequence of CheckpointInfo, the run's committed ones in order of (step, commit
            sequence).
        """

    def __or__(self, other: RetentionPolicy) -> RetentionPolicy:
        if not isinstance(other, RetentionPolicy):
            return NotImplemented
        return _Either(self, other)


@dataclass(frozen=True, slots=True)
class _Either(RetentionPolicy):
    first: RetentionPolicy
    second: RetentionPolicy

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        return self.first.keep(checkpoints) | self.second.keep(checkpoints)


@dataclass(frozen=True, slots=True)
class KeepLast(RetentionPolicy):
    """The newest checkpoints, by step.

    count: int >= 1, how many.

    Raises InvalidState for another count.
    """

    count: int

    def __post_init__(self) -> None:
        check_count("KeepLast: count", self.count)

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        return {info.name for info in checkpoints[-self.count :]}


@dataclass(frozen=True, slots=True)
class KeepBest(RetentionPolicy):
    """The checkpoints with the best values of a metric in their manifests.

    One without the metric, or where it is not a number, is never among them. Of equal values the
    earlier is better.

    metric: text, its name in `metrics`.
    mode: "min" (default) or "max", which values are better.
    count: int >= 1, how many (default 1).

    Raises InvalidState for another mode or count.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        check_count("KeepBest: count", self.count)
        check_one_of("KeepBest: mode", self.mode, ("min", "max"))
        if not isinstance(self.metric, str) or not self.metric:
            raise InvalidState(
                f"KeepBest: metric must be the name of a metric, not {shown(self.metric)}"
            )

    def ranked(self, checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Those that have the metric, best first."""
        sign = -1.0 if self.mode == "max" else 1.0
        measured = [
            info for info in checkpoints if not math.isnan(info.metrics.get(self.metric, math.nan))
        ]
        return sorted(measured, key=lambda info: (sign * info.metrics[self.metric], info.order))

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        return {info.name for info in self.ranked(checkpoints)[: self.count]}


@dataclass(frozen=True, slots=True)
class KeepEvery(RetentionPolicy):
    """One checkpoint for every so many steps, or seconds, of the run. Exactly one of both is given.

    steps: int >= 1, keeps the first checkpoint at or after each multiple of it, itself the first
        (default None).
    seconds: float > 0, keeps the first checkpoint, then each one committed at least so much later
        than the one kept before (default None).

    Raises InvalidState unless exactly one is given, and positive.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise InvalidState("KeepEvery: give either steps or seconds")
        if self.steps is not None:
            check_count("KeepEvery: steps", self.steps)
        elif check_number("KeepEvery: seconds", self.seconds) == 0:
            raise InvalidState("KeepEvery: seconds must be more than 0")

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        if self.steps is not None:
            firsts: dict[int, str] = {}
            for info in checkpoints:
                firsts.setdefault((info.step or 0) // self.steps, info.name)
            firsts.pop(0, None)
            return set(firsts.values())
        names: set[str] = set()
        last: datetime | None = None
        for created, info in sorted(
            ((_created(i), i) for i in checkpoints), key=lambda pair: (pair[0], pair[1].order)
        ):
            if last is None or (created - last).total_seconds() >= (self.seconds or 0):
                names.add(info.name)
                last = created
        return names


def best_rule(
    policy: RetentionPolicy | None,
    metric: str | None,
    mode: str | None,
    infos: Sequence[CheckpointInfo] = (),
) -> KeepBest:
    """What "best" means: the metric that is asked for, else that of the first KeepBest in `policy`.

    Raises InvalidState, with the metrics that `infos` have, when neither says.
    """
    rules = list(_best_rules(policy)) if policy is not None else []
    if metric is not None and (not isinstance(metric, str) or not metric):
        raise InvalidState(f"metric must be the name of a metric, not {shown(metric)}")
    if mode is not None:
        check_one_of("mode", mode, ("min", "max"))
    if metric is None and not rules:
        there = ", ".join(sorted({name for info in infos for name in info.metrics})) or "none"
        raise InvalidState(
            "which checkpoint is best? Give keep=... | KeepBest(metric, mode), or best(metric, "
            "mode); "
            f"metrics in the checkpoints: {there}"
        )
    known = next((rule for rule in rules if metric in (None, rule.metric)), None)

    return KeepBest(metric or rules[0].metric, mode or (known.mode if known else "min"))  # type: ignore[arg-type]


def unknown_metric(policy: RetentionPolicy | None, infos: Sequence[CheckpointInfo]) -> str | None:
    """What to warn of where a KeepBest goes by a metric that none of these checkpoints has, and
    they have others."""
    there = sorted({name for info in infos for name in info.metrics})
    missing = [
        rule.metric for rule in (_best_rules(policy) if policy else ()) if rule.metric not in there
    ]
    if not (there and missing):
        return None
    return (
        f"KeepBest goes by {missing[0]!r}, which no checkpoint has, so it keeps none; they have: "
        f"{', '.join(there)}"
    )


def _best_rules(policy: RetentionPolicy) -> Iterator[KeepBest]:
    if isinstance(policy, KeepBest):
        yield policy
    elif isinstance(policy, _Either):
        yield from _best_rules(policy.first)
        yield from _best_rules(policy.second)


def _created(info: CheckpointInfo) -> datetime:
    try:
        created = datetime.fromisoformat(info.created or "")
    except ValueError:  # a manifest that somebody else wrote
        created = datetime.min
    return created if created.tzinfo else created.replace(tzinfo=UTC)


def check_policy(name: str, value: Any) -> None:
    """Raises InvalidState for what is no policy, nor None."""
    if value is not None and not isinstance(value, RetentionPolicy):
        raise InvalidState(
            f"{name} must be a RetentionPolicy such as KeepLast(3), not {shown(value)}"
        )
