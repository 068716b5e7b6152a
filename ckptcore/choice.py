"""Loading what was chosen, or the next one where that is damaged, deleted or replaced meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from .catalog.domain import ScanRound
from .catalog.folder import MOST_SCANS
from .errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    StorageError,
    UnsupportedVersion,
)
from .loading.report import PARTLY_OVERWRITTEN, LoadReport

__all__ = ["load_chosen", "newest_that_loads"]

# What the storage says of bytes that are lost, and of a file that went, or became something else,
# meanwhile: another checkpoint may still be whole. Anything else (no permission, no connection) is
# no verdict on this one.
_LOST = frozenset({errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR})


def first_that_loads(names: Sequence[str], load: Callable[[str], LoadReport]) -> LoadReport:
    """What `load` says of the first copy that is whole. Raises what it raises of the last one."""
    for name in names[:-1]:
        try:
            return load(name)
        except (CheckpointCorrupt, CheckpointNotFound):
            pass
    return load(names[-1])


def load_chosen(
    seen: ScanRound,
    scan_again: Callable[[], ScanRound],
    load: Callable[[ScanRound, str, int | None], LoadReport],
    *,
    whole: bool,
) -> LoadReport:
    """What `load` says of a `choice`. Where that was deleted or replaced meanwhile, the next choice
    is loaded.

    whole: the next one replaces all that was read of the one before. Raises what `load` raises of a
    checkpoint that is still the one to choose, and what `scan_again` raises.
    """
    for _ in range(MOST_SCANS):
        names, step, digest = seen.verdict
        try:
            return first_that_loads(names, lambda name: load(seen, name, step))  # noqa: B023
        except (CheckpointCorrupt, CheckpointNotFound, StorageError) as error:
            if isinstance(error, StorageError) and error.errno not in _LOST:
                raise
            try:
                after = scan_again()
            except CheckpointNotFound as gone:  # deleted while it was read, and nothing follows
                if PARTLY_OVERWRITTEN in str(error):
                    gone.message += PARTLY_OVERWRITTEN
                raise gone from error
            if after.verdict[2] in (digest, "") or (PARTLY_OVERWRITTEN in str(error) and not whole):
                raise
            seen = after
    raise StorageError(
        f"{names[0]} and what came after it were deleted while they were read", errno=errno.EAGAIN
    )


def newest_that_loads(
    seen: ScanRound,
    scan_again: Callable[[], ScanRound],
    load: Callable[[ScanRound, str], LoadReport],
) -> tuple[LoadReport | None, dict[str, str]]:
    """What `load` says of the first of `candidates` that verifies; and which were passed over
    before it, and why.

    After a failure the root is looked at again: what was deleted while it was read has a newer one
    to follow. Where it has none, and an older one is loaded, it counts as passed over. That there
    is none takes two equal looks. Raises what `load` raises beside damage, and StorageError where
    it cannot be known whether there is a newer one.
    """
    failed: dict[tuple[str, str], str] = {}
    older: dict[str, set[str]] = {}  # than one that failed, by its name
    before: list[list[str]] | None = None
    for _ in range(MOST_SCANS):
        skipped: dict[str, str] = {}
        for name, status, reason, digest in seen.verdict:
            if status == "unreadable":
                raise StorageError(
                    f"{name} might be the newest checkpoint and cannot be read: {reason}", path=name
                )
            if status == "committed" and (name, digest) not in failed:
                break
            skipped[name] = failed.get((name, digest), reason)
        else:
            if seen.verdict == before:
                return None, skipped
            before = seen.verdict
            seen = scan_again()
            continue
        try:
            report = load(seen, name)
        except (CheckpointCorrupt, CheckpointNotFound, UnsupportedVersion, StorageError) as error:
            if isinstance(error, StorageError) and error.errno not in _LOST:
                raise
            failed[name, digest] = str(error)
            names = [candidate[0] for candidate in seen.verdict]
            older[name] = {*names[names.index(name) + 1 :]}
            seen = scan_again()
        except CheckpointError as error:
            if touched := [n for (n, _), why in failed.items() if why.endswith(PARTLY_OVERWRITTEN)]:
                error.message += (
                    f"; live state was partly overwritten by {touched[0]}, which is damaged, "
                    "before that"
                )
            raise
        else:
            gone = {lost: why for (lost, _), why in failed.items() if name in older[lost]}
            skipped = {
                n: why.replace(PARTLY_OVERWRITTEN, "") for n, why in (gone | skipped).items()
            }
            report.skipped = skipped
            return report, skipped
    raise StorageError("checkpoints are deleted faster than they can be read", errno=errno.EAGAIN)
