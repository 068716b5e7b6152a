"""Upkeep of a root by one process, without torch and without a job: pin, delete, thin out, and find
what interrupted saves have left.

Every function takes the URL of a checkpoint or of a root, and does what the manager of a run does.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arguments import check_path
from .catalog.catalog import committed, left_behind, newest_run, scan, sweep
from .catalog.folder import Attempt, CheckpointInfo, attempts_among, delete_for_good, read_manifest
from .catalog.folder import pin_checkpoint as pin_folder
from .catalog.folder import remove_checkpoint_folder as remove_folder
from .catalog.folder import unpin_checkpoint as unpin_folder
from .catalog.retention import RetentionPolicy
from .errors import CheckpointCorrupt, CheckpointNotFound, InvalidState
from .storage.base import Storage
from .storage.opening import open_storage
from .storage.urls import split_url

Options = dict[str, Any] | None
Url = str | os.PathLike[str]


def pin_checkpoint(url: Url, storage_options: Options = None) -> None:
    """Keep a checkpoint, whatever a retention policy says, until `unpin_checkpoint`.

    url: local path or fsspec URL of the checkpoint's folder.
    storage_options: dict for its filesystem (default None).

    Raises CheckpointNotFound, CheckpointCorrupt, StorageError.
    """
    pin_folder(*_checked(url, storage_options))


def unpin_checkpoint(url: Url, storage_options: Options = None) -> None:
    """Let retention and `delete_checkpoint` have a checkpoint again.

    url: local path or fsspec URL of the checkpoint's folder.
    storage_options: dict for its filesystem (default None).

    Raises CheckpointNotFound, CheckpointCorrupt, StorageError.
    """
    unpin_folder(*_checked(url, storage_options))


def delete_checkpoint(url: Url, storage_options: Options = None, *, damaged: bool = False) -> None:
    """Remove a checkpoint: its manifest first, then the files that it names; what others have put
    there is left alone.

    url: local path or fsspec URL of the checkpoint's folder.
    storage_options: dict for its filesystem (default None).
    damaged: bool, also one without a manifest; then what has a name that only ckptcore gives goes
        (default False).

    Raises InvalidState for a pinned one, CheckpointNotFound, CheckpointCorrupt, StorageError.
    """
    storage, name = _location(url, storage_options)
    if not damaged:
        read_manifest(storage, name)
        delete_for_good(storage, name)
        return
    found = next((info for info in scan(storage) if info.name == name), None)
    if found is None:
        raise CheckpointNotFound(f"{storage.at(name)}: nothing there", path=storage.at(name))
    if found.status == "partial":
        raise InvalidState(
            f"{found.url} is what a save, a copy or a deletion did not finish; sweep_root removes "
            "it once nobody is at it"
        )
    if found.pinned:
        raise InvalidState(f"{found.url} is pinned; unpin it before it is deleted")
    try:
        delete_for_good(storage, name)
    except CheckpointCorrupt:
        pass
    remove_folder(storage, name)


def kept_by(
    infos: Sequence[CheckpointInfo],
    policies: Mapping[str, RetentionPolicy],
    run_id: str | None = None,
) -> dict[str, list[str]]:
    """Why each committed checkpoint of a run is kept, by its name: the names of the policies that
    keep it, "newest" and "pinned". An empty list: retention by these policies would delete it. A
    branch that the run has left has the same policies, for itself.

    infos: sequence of CheckpointInfo, what `scan_root` returns.
    policies: dict of names -> RetentionPolicy.
    run_id: text, the run (default None: the one that committed last).
    """
    run = run_id or newest_run(infos)
    mine = committed(infos, run) if run else []
    left = left_behind(infos, run)
    reasons: dict[str, list[str]] = {info.name: [] for info in [*mine, *left]}
    for label, policy in policies.items():
        for name in policy.keep(mine) | (policy.keep(left) if left else set()):
            reasons[name].append(label)
    if mine:
        reasons[mine[-1].name].append("newest")
    for info in [*mine, *left]:
        reasons[info.name] += ["pinned"] if info.pinned else []
    return reasons


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a save, a copy or a deletion did not finish.

    name: text, the entry of the root.
    reason: text, why it is no checkpoint.
    nbytes: int, bytes that lie in it.
    writer: text, who made it, in words.
    abandoned: bool, its writer is provably gone, so that `sweep_root` removes it.
    """

    name: str
    reason: str
    nbytes: int
    writer: str
    abandoned: bool


def find_leftovers(url: Url, storage_options: Options = None) -> list[Leftover]:
    """What interrupted saves, copies and deletions have left in a root.

    url: local path or fsspec URL of the root.
    storage_options: dict for its filesystem (default None).

    Raises StorageError.
    """
    storage = open_storage(url, storage_options)
    found = []
    for info in scan(storage):
        if info.status != "partial" and not info.marked:
            continue
        entries = storage.entries(info.name) or ()
        _, _, attempt = info.name.partition(".partial-")
        attempts = [Attempt.parse(text) for text in ([attempt] if attempt else [])]
        attempts += [Attempt.parse(text) for text in attempts_among(entries)]
        found.append(
            Leftover(
                info.name,
                info.reason or "the mark of an attempt that was committed",
                sum(entry.size or 0 for entry in entries),
                "; ".join(_writer(each) for each in attempts) or "nobody",
                all(each.is_abandoned("") for each in attempts),
            )
        )
    return found


def _writer(attempt: Attempt) -> str:
    if not attempt.pid:
        return "a process that is not known"
    here = attempt.machine == Attempt.new("").machine
    if not here:
        return f"process {attempt.pid} of another machine, or before a restart of this one"
    gone = attempt.is_abandoned("")
    return f"process {attempt.pid} of this machine, which {'is gone' if gone else 'is running'}"


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a checkpoint has in common with others of its root (see `reuse` of CheckpointManager).

    unshared_bytes: int, in files that no other checkpoint has: what deleting it frees.
    shared_with: list of the names of those that have some of its files, too.
    same_files: dict of the names of these files -> paths in the root that are the same file.
    """

    unshared_bytes: int
    shared_with: list[str]
    same_files: dict[str, list[str]]


def shared_files(url: Url, storage_options: Options = None) -> dict[str, Sharing]:
    """By name, what the committed checkpoints of a root have in common. Where a file cannot have
    two names, as in object stores, each has all of its bytes for itself.

    url: local path or fsspec URL of the root.
    storage_options: dict for its filesystem (default None).

    Raises StorageError.
    """
    storage = open_storage(url, storage_options)
    sizes: dict[str, dict[str, int]] = {}
    paths: dict[str, list[str]] = defaultdict(list)  # of each file, by what the storage knows it by
    identities: dict[str, str] = {}
    for info in scan(storage):
        if info.status != "committed" or info.manifest is None:
            continue
        sizes[info.name] = {file: record.size for file, record in info.manifest.files.items()}
        for file in sizes[info.name]:
            path = f"{info.name}/{file}"
            same = (storage.identity(path) if storage.hard_links else None) or path
            identities[path] = same
            paths[same].append(path)
    found = {}
    for name, files in sizes.items():
        others = {
            file: [path for path in paths[identities[f"{name}/{file}"]] if path != f"{name}/{file}"]
            for file in files
        }
        found[name] = Sharing(
            sum(size for file, size in files.items() if not others[file]),
            sorted({path.partition("/")[0] for some in others.values() for path in some}),
            {file: some for file, some in others.items() if some},
        )
    return found


def sweep_root(url: Url, storage_options: Options = None) -> tuple[list[str], list[str]]:
    """Remove what `find_leftovers` calls abandoned, and finish what an overwrite or a deletion has
    left. Returns the names that were removed, and what could not be done, in words.

    url: local path or fsspec URL of the root.
    storage_options: dict for its filesystem (default None).

    Raises StorageError.
    """
    storage = open_storage(url, storage_options)
    failed: list[str] = []
    return sweep(storage, scan(storage), "", failed.append), failed


def _location(url: Url, options: Options) -> tuple[Storage, str]:
    around, name = split_url(check_path("url", url))
    return open_storage(around, options), name


def _checked(url: Url, options: Options) -> tuple[Storage, str]:
    storage, name = _location(url, options)
    read_manifest(storage, name)
    return storage, name
