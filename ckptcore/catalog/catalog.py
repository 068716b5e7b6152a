"""What lies under a root."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import CheckpointCorrupt, CheckpointNotFound, InvalidState, StorageError
from ..storage.base import Entry, Storage
from ..storage.opening import open_storage
from ..storage.urls import split_url
from .attempt import Attempt
from .branches import committed, mark_abandoned, newest_run
from .folder import (
    DELETING,
    FOLDER,
    LEFTOVER_OF_OTHERS,
    LOOKS,
    CheckpointInfo,
    attempts_among,
    delete_checkpoint,
    entries_in,
    finish_deletion,
    inspect_folder,
    remove_attempt,
    remove_checkpoint_folder,
    step_of,
    unmark_attempts,
)
from .retention import KeepBest, RetentionPolicy, surplus

__all__ = [
    "best_of",
    "candidates",
    "choice",
    "clean_up",
    "copies",
    "delete_all",
    "entry",
    "find",
    "restore_candidates",
    "scan",
    "scan_root",
    "sweep",
    "with_commit",
]


def scan(
    storage: Storage, *, sure: bool = False, known: Iterable[CheckpointInfo] = ()
) -> list[CheckpointInfo]:
    """Every checkpoint-like entry, ordered by (step, commit sequence). A root that does not exist
    has none.

    Somebody else may save and delete meanwhile, and a listing may take its time: an entry that is
    gone, or on its way out, when it is looked at proves that the listing is out of date, so the
    root is listed again until nothing new is in it.
    sure: list it a second time where none is committed, for callers that conclude something from
    that.
    known: committed checkpoints that are taken as they are where their names are still there,
    without reading them again. Raises StorageError, also where the root changes faster than it can
    be looked at.
    """
    found = {info.name: info for info in known if info.status == "committed"}
    before: set[str] = set()
    lost_before: set[str] = set()
    for again in range(LOOKS):
        listed = _checkpoint_folders(storage)
        found = {name: info for name, info in found.items() if name in listed}
        new = [name for name in listed if name not in found]
        for name in sorted(new, key=_newest_first):  # these are the first that others replace
            info = inspect_folder(storage, name, listed[name])
            if info is not None:
                found[name] = info
        lost = listed.keys() - found.keys()
        fading = [name for name in new if name in found and found[name].reason == DELETING]
        if again == 0:
            none = not any(info.status == "committed" for info in found.values())
            settled = not (lost or fading or (sure and none))
        else:
            settled = not (lost or fading) or (listed.keys() <= before and lost <= lost_before)
        if settled:
            return _in_order(found)
        before, lost_before = set(listed), lost
    newest = max(
        (info.order for info in found.values() if info.status == "committed"), default=None
    )
    if newest is None or any(step_of(name) >= newest[0] for name in lost_before):
        what = (
            f"{storage.url} changes faster than it can be looked at: after {LOOKS} looks its "
            "newest checkpoint is not known"
        )
        raise StorageError(what, path=storage.url, errno=errno.EAGAIN)
    return _in_order(found)


def _checkpoint_folders(storage: Storage) -> dict[str, Sequence[Entry] | None]:
    try:
        folders = storage.list_folders("checkpoint-")
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return {}
    return {name: listed for name, listed in folders.items() if FOLDER.fullmatch(name)}


def _newest_first(name: str) -> tuple[int, str]:
    return -step_of(name), name


def _in_order(found: dict[str, CheckpointInfo]) -> list[CheckpointInfo]:
    whole = {name for name, info in found.items() if info.status == "committed"}
    result = []
    for info in found.values():
        base = info.name.partition(".replaced-")[0]
        if base != info.name and base in whole:
            info = CheckpointInfo(
                info.name,
                info.url,
                "partial",
                info.step,
                "left over from an overwrite",
                info.manifest,
            )
        result.append(info)
    return mark_abandoned(sorted(result, key=lambda info: (*info.order, info.name)))


def with_commit(infos: Iterable[CheckpointInfo], saved: CheckpointInfo) -> list[CheckpointInfo]:
    """The entries of `scan` when `saved` has come to them, or has taken the place of one."""
    return _in_order({**{info.name: info for info in infos}, saved.name: saved})


def scan_root(
    url: str | os.PathLike[str], storage_options: dict[str, Any] | None = None
) -> list[CheckpointInfo]:
    """What lies in a root, in order of (step, commit sequence): checkpoints, and what became of
    others.

    url: local path or fsspec URL of the root.
    storage_options: dict for its filesystem (default None).

    Raises CheckpointNotFound when there is no such folder, StorageError.
    """
    storage = open_storage(url, storage_options)
    try:
        storage.list()
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointNotFound(f"{storage.url}: no such folder", path=storage.url) from None
        raise
    return scan(storage, sure=True)


def restore_candidates(
    infos: Sequence[CheckpointInfo], run_id: str | None = None
) -> list[CheckpointInfo]:
    """What `CheckpointManager.restore` would try, in its order: the newest first, also what is
    damaged. It takes the first that is committed and whose bytes verify.

    infos: sequence of CheckpointInfo, what `scan_root` returns.
    run_id: text, the run to go on with (default None: the one that committed last).
    """
    run = run_id or newest_run(infos)
    return [
        info
        for info in reversed(infos)
        if info.status != "partial"
        and not info.abandoned
        and (run is None or info.run_id in (None, run))
    ]


def candidates(infos: Sequence[CheckpointInfo], run_id: str | None) -> list[list[str]]:
    """[name, status, reason, digest of the manifest] of `restore_candidates`."""
    found = restore_candidates(infos, run_id)
    return [[info.name, info.status, info.reason or info.status, _digest(info)] for info in found]


def _digest(info: CheckpointInfo) -> str:
    return info.manifest.digest if info.manifest else ""


def choice(infos: Sequence[CheckpointInfo], info: CheckpointInfo | None) -> list[Any]:
    """What all ranks have to know of the checkpoint to load: names of its copies, its step, its
    manifest's digest."""
    return [[], None, ""] if info is None else [copies(infos, info), info.step, _digest(info)]


def best_of(
    infos: Sequence[CheckpointInfo], run_id: str | None, rule: KeepBest
) -> CheckpointInfo | None:
    """The best committed checkpoint of a run, None when none has the metric."""
    return next(iter(rule.ranked(committed(infos, run_id or newest_run(infos)))), None)


def find(
    url: str, infos: Sequence[CheckpointInfo], run_id: str | None, step: int | str
) -> CheckpointInfo:
    """The checkpoint of `step`, or the newest for "latest". Raises CheckpointNotFound.

    What is there and damaged, or cannot be read, is not passed over: opening it says what is wrong.
    A step that only another run of this root has is good enough when it is asked for.
    """
    passed_over = (
        ("partial", "uncommitted", "elsewhere") if step == "latest" else ("partial", "elsewhere")
    )
    found = [i for i in infos if i.status not in passed_over]
    stray = [i for i in infos if i.status == "elsewhere" and step in ("latest", i.step)]
    run = run_id or newest_run(found)
    infos = [i for i in found if run is None or i.run_id in (None, run)]
    if step == "latest":
        matching = [i for i in infos if not i.abandoned][-1:]
    else:
        matching = [i for i in infos if i.step == step] or [i for i in found if i.step == step]
        matching = [i for i in matching if not i.abandoned] or matching
    if not matching:
        steps = [i.step for i in infos if i.step is not None]
        what = "no checkpoint yet" if step == "latest" else f"no checkpoint of step {step}"
        lacking = "".join(f"; {i.name}: {i.reason}" for i in stray)
        raise CheckpointNotFound(
            f"{url} has {what}; steps there: {', '.join(map(str, steps)) or 'none'}{lacking}",
            path=url,
            step=step if isinstance(step, int) else None,
            available=steps,
        )
    return matching[-1]


def entry(infos: Sequence[CheckpointInfo], name: str) -> CheckpointInfo | None:
    """The entry of that name, of the first root that has one."""
    found = [
        i for i in infos if split_url(i.url)[1] == name and i.status not in ("partial", "elsewhere")
    ]
    return found[-1] if found else None


def copies(infos: Sequence[CheckpointInfo], info: CheckpointInfo) -> list[str]:
    """Names of a checkpoint and of other copies of the same commit, the one to prefer first."""
    if info.manifest is None:
        return [info.name]
    same = [
        i for i in infos if i.manifest is not None and i.manifest.digest == info.manifest.digest
    ]
    return [i.name for i in reversed(same)]


def clean_up(
    storage: Storage,
    policy: RetentionPolicy | None,
    run_id: str,
    saved: CheckpointInfo,
    tell: Callable[[str], None],
    deleted: Callable[[CheckpointInfo], None],
    listed: Sequence[CheckpointInfo] | None = None,
) -> None:
    """Retention and sweeping, after the commit of `saved`. What fails is told, and no error: the
    checkpoint is safe.

    listed: what `scan` has found before that commit, so that nothing is read again. None: it looks
    now.
    """
    try:
        infos = scan(storage) if listed is None else with_commit(listed, saved)
        going = surplus(infos, policy, run_id, saved.name)
        fresh: set[str] = set() if listed is not None else {info.name for info in going}
        while again := {info.name for info in going} - fresh:
            # Others may have saved, deleted, replaced or pinned meanwhile: what is to go is read
            # again, the rest listed.
            fresh |= again
            infos = scan(storage, known=[info for info in infos if info.name not in again])
            going = surplus(infos, policy, run_id, saved.name)
        delete_all(storage, going, tell, deleted)
        sweep(storage, infos, run_id, tell)
    except Exception as error:  # a policy of the user's own may raise anything
        tell(f"{storage.url}: cleaning up after step {saved.step} failed: {error!r}")


def delete_all(
    storage: Storage,
    infos: Sequence[CheckpointInfo],
    tell: Callable[[str], None],
    deleted: Callable[[CheckpointInfo], None],
) -> None:
    """Delete checkpoints; what fails is told, and no error."""
    for info in infos:
        try:
            delete_checkpoint(storage, info.name)
            deleted(info)
        except (
            StorageError,
            CheckpointCorrupt,
            InvalidState,
        ) as error:  # pinned meanwhile, or refused
            tell(f"{info.url} could not be deleted: {error}")


def sweep(
    storage: Storage, infos: Iterable[CheckpointInfo], run_id: str, tell: Callable[[str], None]
) -> list[str]:
    """Finish deletions and overwrites that were interrupted, and remove attempts that are provably
    abandoned.

    Returns the names removed. What cannot be removed is told, and no error.
    """
    swept = []
    for info in infos:
        match = FOLDER.fullmatch(info.name)
        if match is None or (
            info.status != "partial" and match.group(2) != "replaced" and not info.marked
        ):
            continue
        kind, attempt = match.group(2), match.group(3)
        if (info.reason or "").startswith(LEFTOVER_OF_OTHERS):
            continue
        try:
            if info.marked and kind is None:
                unmark_attempts(storage, info.name)
                continue
            if info.status == "committed":
                # An overwrite died between its two renames: what it put aside takes its place
                # again.
                if Attempt.parse(attempt).is_abandoned(run_id):
                    storage.rename(info.name, info.name.partition(".replaced-")[0])
                    storage.sync_folder("")
                continue
            if kind == "replaced":
                remove_checkpoint_folder(storage, info.name)
            else:
                attempts = [attempt] if kind else attempts_among(entries_in(storage, info.name))
                if not all(Attempt.parse(attempt).is_abandoned(run_id) for attempt in attempts):
                    continue
                # Looked at after the marks: what another job has committed since the scan is no
                # leftover.
                there = inspect_folder(storage, info.name)
                if there is None or there.status != "partial":
                    continue
                try:
                    (remove_attempt if attempts else finish_deletion)(storage, info.name)
                except (
                    CheckpointCorrupt
                ):  # of the withdrawn manifest: what is left goes by its name
                    remove_attempt(storage, info.name)
            swept.append(info.name)
        except (StorageError, CheckpointCorrupt) as error:
            tell(f"could not remove leftovers {info.url}: {error}")
    return swept
