"""Which checkpoint of a root is meant: the newest, the best, a step; and what a run may be restored from."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence

from .errors import CheckpointCorrupt, CheckpointNotFound, StorageError, UnsupportedVersion
from .loading.report import PARTLY_OVERWRITTEN, LoadReport
from .retention import KeepBest
from .root import CheckpointInfo, committed, newest_run, scan
from .storage.base import Storage

__all__ = ["best_of", "candidates", "find", "newest_that_loads"]

# What the storage says of bytes that are lost, and of a file that went, or became something else, meanwhile: another
# checkpoint may still be whole. Anything else (no permission, no connection) is no verdict on this one.
_LOST = frozenset({errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR})


def candidates(storage: Storage, run_id: str | None) -> Sequence[Sequence[str]]:
    """[name, status, reason] of what a run might be restored from, newest first."""
    infos = scan(storage)
    run = run_id or newest_run(infos)
    return [
        [info.name, info.status, info.reason or info.status]
        for info in reversed(infos)
        if info.status != "partial" and (run is None or info.run_id in (None, run))
    ]


def best_of(storage: Storage, run_id: str | None, rule: KeepBest) -> CheckpointInfo | None:
    """The best committed checkpoint of a run, None when none has the metric."""
    infos = scan(storage)
    return next(iter(rule.ranked(committed(infos, run_id or newest_run(infos)))), None)


def find(storage: Storage, run_id: str | None, step: int | str) -> CheckpointInfo:
    """The checkpoint of `step`, or the newest for "latest". Raises CheckpointNotFound.

    What is there and damaged, or cannot be read, is not passed over: opening it says what is wrong. A step that only
    another run of this root has is good enough when it is asked for.
    """
    passed_over = ("partial", "uncommitted") if step == "latest" else ("partial",)
    found = [i for i in scan(storage) if i.status not in passed_over]
    run = run_id or newest_run(found)
    infos = [i for i in found if run is None or i.run_id in (None, run)]
    matching = infos[-1:] if step == "latest" else [i for i in infos if i.step == step] or [
        i for i in found if i.step == step]  # fmt: skip
    if not matching:
        steps = [i.step for i in infos if i.step is not None]
        what = "no checkpoint yet" if step == "latest" else f"no checkpoint of step {step}"
        raise CheckpointNotFound(
            f"{storage.url} has {what}; steps there: {', '.join(map(str, steps)) or 'none'}",
            path=storage.url, step=step if isinstance(step, int) else None, available=steps)  # fmt: skip
    return matching[-1]


def newest_that_loads(
    storage: Storage, found: Iterable[Sequence[str]], load: Callable[[str], LoadReport]
) -> tuple[LoadReport | None, dict[str, str]]:
    """What `load` says of the first of `candidates` that verifies; and which were passed over before it, and why.

    Raises what `load` raises beside damage, and StorageError where it cannot be known whether there is a newer one.
    """
    skipped: dict[str, str] = {}
    for name, status, reason in found:
        if status == "committed":
            try:
                report = load(name)
            except (CheckpointCorrupt, CheckpointNotFound, UnsupportedVersion, StorageError) as error:
                if isinstance(error, StorageError) and error.errno not in _LOST:
                    raise
                reason = str(error)
            else:
                skipped = {name: why.replace(PARTLY_OVERWRITTEN, "") for name, why in skipped.items()}
                report.skipped = skipped
                return report, skipped
        elif status == "unreadable":
            raise StorageError(f"{name} might be the newest checkpoint and cannot be read: {reason}", path=name)
        skipped[name] = reason
    return None, skipped
