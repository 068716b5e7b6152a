"""Which checkpoints are on the way that a run went: one that goes back and saves again leaves what
came after as a branch of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .folder import CheckpointInfo

__all__ = [
    "Ranges",
    "committed",
    "left_by_going_back",
    "left_by_last",
    "mark_abandoned",
    "merged",
    "newest_run",
    "within",
]

Ranges = Sequence[Sequence[int]]  # [first, last] commit sequences


def newest_run(infos: Iterable[CheckpointInfo]) -> str | None:
    """The run that committed last in this root, by commit sequence; also when what it committed is
    damaged now."""
    last = max(
        (i for i in infos if i.manifest), key=lambda i: (i.sequence or 0, *i.order), default=None
    )
    return last.run_id if last else None


def committed(infos: Iterable[CheckpointInfo], run_id: str | None) -> list[CheckpointInfo]:
    """The committed checkpoints of one run that it has not abandoned, oldest first; of all runs
    with None."""
    return [
        i
        for i in infos
        if i.status == "committed" and not i.abandoned and run_id in (None, i.run_id)
    ]


def mark_abandoned(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """The same with `abandoned` set: what the run had gone back behind, by the last commit of
    it."""
    infos = list(infos)
    last = {
        run: left_by_last(infos, run) for run in {info.run_id for info in infos if info.manifest}
    }
    result = []
    for info in infos:
        left = info.manifest is not None and within(info.manifest.sequence, last[info.run_id])
        result.append(info if info.abandoned == left else replace(info, abandoned=left))
    return result


def left_by_last(infos: Iterable[CheckpointInfo], run_id: str | None) -> Ranges:
    """The commit sequences that a run had abandoned when it committed last."""
    counted = [
        i
        for i in infos
        if i.manifest and i.run_id == run_id and i.status in ("committed", "damaged")
    ]
    last = max(counted, key=lambda info: info.sequence or 0, default=None)
    return last.manifest.abandoned if last and last.manifest else []


def within(sequence: int, ranges: Ranges) -> bool:
    return any(first <= sequence <= last for first, last in ranges)


def left_by_going_back(origin: int, before: Ranges, last: int) -> list[list[int]]:
    """What a run has abandoned that goes on from the commit `origin`, which itself had abandoned
    `before`, when there are commits up to `last`. Others that are made later are of another job."""
    ranges = [[first, min(end, origin)] for first, end in before if first <= origin]
    return merged([*ranges, [origin + 1, last]] if last > origin else ranges)


def merged(ranges: Ranges) -> list[list[int]]:
    """The same sequences in as few ranges as can be, in order."""
    result: list[list[int]] = []
    for first, last in sorted(map(tuple, ranges)):
        if result and first <= result[-1][1] + 1:
            result[-1][1] = max(result[-1][1], last)
        else:
            result.append([first, last])
    return result
