"""What lies under a root and its tiers: which checkpoints there are, which one is meant, and how
one is pinned, deleted or cleaned up after.

`ckpt`, the manager and the trainers all go by this, so they cannot disagree on which checkpoint is
the newest.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CheckpointCorrupt, CheckpointNotFound, InvalidState, StorageError
from ..format.manifest import CheckpointManifest
from ..storage.base import Entry, Storage
from ..storage.opening import open_storage
from ..storage.urls import join_url, split_url
from .folder import (
    DELETING,
    FOLDER,
    FOREIGN,
    LEFTOVER_OF_OTHERS,
    MOST_SCANS,
    Attempt,
    CheckpointInfo,
    FolderName,
    Memory,
    attempts_among,
    delete_checkpoint,
    delete_for_good,
    finish_deletion,
    inspect_folder,
    pin_checkpoint,
    remove_attempt,
    remove_checkpoint_folder,
    step_of,
    unmark_attempts,
    unpin_checkpoint,
)
from .retention import KeepBest, RetentionPolicy

Warn = Callable[[str], None]
Ranges = Sequence[Sequence[int]]  # [first, last] commit sequences


@dataclass(frozen=True, slots=True)
class Location:
    """Where a checkpoint lies: a storage, and its folder there."""

    storage: Storage
    folder: str


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be made under a root: the checkpoint `name`, by a run.

    overwrite: a committed checkpoint gives way to it. abandoned: commits of the run that do so,
    because it went back behind them; None: those that its last commit says. digest: of its
    manifest, where that is known. after_sequence: commits up to this one are known elsewhere.
    """

    name: str
    run_id: str
    step: int | None = None
    overwrite: bool = False
    abandoned: Ranges | None = ()
    digest: str | None = None
    after_sequence: int = 0


@dataclass(frozen=True, slots=True)
class Destination:
    """What is known before a checkpoint is written. target: with all that gives way to it;
    sequence: of its commit; listed: the entries that there are, on rank 0."""

    target: Target
    sequence: int
    listed: list[CheckpointInfo]


@dataclass(frozen=True, slots=True)
class CleanUp:
    """What is to be cleaned up after the commit of `saved`.

    policy: which checkpoints of the run stay. warn: is given what could not be done; deleted: is
    called for each checkpoint that went. listed: what was found before that commit (default: look
    now).
    """

    policy: RetentionPolicy | None
    run_id: str
    saved: CheckpointInfo
    warn: Warn
    deleted: Callable[[CheckpointInfo], None]
    listed: Sequence[CheckpointInfo] | None = None


class Catalog:
    """What lies under a root and its tiers, as one process sees it. Threads may use it at once.

    storage: the root; tiers: other storages of the same checkpoints. An entry of a tier has its URL
    for a name.
    """

    def __init__(self, storage: Storage, tiers: Sequence[Storage] = ()) -> None:
        self.storage, self.tiers = storage, tuple(tiers)
        self._memory = Memory()
        self._tier_sequence: int | None = None

    def scan(self) -> list[CheckpointInfo]:
        """All entries of all storages, read anew, for callers that conclude something from what is
        missing. Of equal ones that of the root is last, so that it is preferred."""
        self._memory = Memory()
        infos = scan(self.storage, sure=True, memory=self._memory)
        if not self.tiers:
            return infos
        found = [(info, 0) for info in infos]
        far = [
            (replace(info, name=info.url), number)
            for number, tier in enumerate(self.tiers, 1)
            for info in scan(tier)
        ]
        self._tier_sequence = last_sequence(info for info, _ in far)
        found += far
        found.sort(key=lambda pair: (*pair[0].order, pair[0].status == "committed", -pair[1]))
        return mark_abandoned(info for info, _ in found)

    def recall(self) -> list[CheckpointInfo]:
        """The entries of the root, of which only those are read that the listing does not show as
        they were when they were read last. Good enough to count by; what is to be deleted, or
        loaded, is read again."""
        return scan(self.storage, memory=self._memory)

    def remember(self, name: str, file: Entry, manifest: CheckpointManifest) -> None:
        """The manifest that was just committed as `file`, for `recall`."""
        self._memory.files[name] = file, manifest

    def destination(self, target: Target) -> Destination:
        """Of a checkpoint that is to be written now. Raises StorageError."""
        infos, abandoned = self.recall(), target.abandoned
        if abandoned is None:
            abandoned = left_by_last(infos, target.run_id)
        sequence = max(last_sequence(infos), target.after_sequence) + 1
        return Destination(replace(target, abandoned=abandoned), sequence, infos)

    def distinct(self, infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
        """Those of `scan`, of each commit one."""
        if not self.tiers:
            return infos
        return [i for i in infos if i.status != "committed" or copies(infos, i)[0] == i.name]

    def locate(self, name: str) -> Location:
        """Where an entry of `scan` lies."""
        for tier in self.tiers:
            folder = split_url(name)[1]
            if tier.at(folder) == name:
                return Location(tier, folder)
        return Location(self.storage, name)

    def locate_url(self, url: str) -> Location | None:
        """Where what is called `url` lies, if that is here."""
        around, folder = split_url(url)
        for storage in (self.storage, *self.tiers):
            if storage.at(folder) == join_url(around, folder):
                return Location(storage, folder)
        return None

    def has(self, storage: Storage) -> bool:
        return storage in (self.storage, *self.tiers)

    def tier_sequence(self, warn: Warn) -> int:
        """The highest commit sequence that is known of in a tier. Only a warning where that cannot
        be known: a save does not need a tier, and does not wait for it again."""
        if self._tier_sequence is None:
            try:
                self.scan()
            except StorageError as error:
                self._tier_sequence = 0
                warn(f"which commits a tier of {self.storage.url} holds is not known: {error}")
        return self._tier_sequence or 0

    def pin(self, info: CheckpointInfo) -> None:
        """Raises CheckpointNotFound, StorageError."""
        self._each_copy(info, pin_checkpoint)

    def unpin(self, info: CheckpointInfo) -> None:
        """Raises StorageError."""
        self._each_copy(info, unpin_checkpoint)

    def delete(self, info: CheckpointInfo) -> None:
        """Raises InvalidState for a checkpoint that is pinned, StorageError, CheckpointCorrupt."""
        if info.pinned:
            raise InvalidState(f"{info.url} is pinned; unpin it before it is deleted")
        self._each_copy(info, delete_for_good)

    def _each_copy(self, info: CheckpointInfo, work: Callable[[Storage, str], None]) -> None:
        for name in copies(self.scan(), info) if self.tiers else [info.name]:
            at = self.locate(name)
            work(at.storage, at.folder)

    def delete_all(
        self,
        infos: Iterable[CheckpointInfo],
        warn: Warn,
        deleted: Callable[[CheckpointInfo], None] | None = None,
    ) -> None:
        """Delete checkpoints of the root; a failure is a warning. deleted: is called for each."""
        for info in infos:
            try:
                delete_checkpoint(self.storage, info.name)
                if deleted is not None:
                    deleted(info)
            except (StorageError, CheckpointCorrupt, InvalidState) as error:
                # pinned meanwhile, or refused
                warn(f"{info.url} could not be deleted: {error}")

    def sweep(self, infos: Iterable[CheckpointInfo], run_id: str, warn: Warn) -> list[str]:
        """See `sweep` below."""
        return sweep(self.storage, infos, run_id, warn)

    def clean_up(self, after: CleanUp) -> None:
        """Retention and sweeping in the root. A failure is a warning: the checkpoint is safe."""
        policy, run_id, saved, warn = after.policy, after.run_id, after.saved, after.warn
        try:
            infos = self.recall() if after.listed is None else with_commit(after.listed, saved)
            going = surplus(infos, policy, run_id, saved.name)
            read: set[str] = set()
            while again := {info.name for info in going} - read:
                # Others may have saved, deleted, replaced or pinned meanwhile: what is to go is
                # read again, the rest listed.
                read |= again
                kept = [info for info in infos if info.name not in again]
                infos = scan(self.storage, known=kept)
                going = surplus(infos, policy, run_id, saved.name)
            # What gave way to a checkpoint goes before it: alone it would count again.
            sweep(self.storage, infos, run_id, warn)
            self.delete_all(going, warn, after.deleted)
        except Exception as error:  # a policy of the user's own may raise anything
            warn(f"{self.storage.url}: cleaning up after step {saved.step} failed: {error!r}")


def scan(
    storage: Storage,
    *,
    sure: bool = False,
    known: Iterable[CheckpointInfo] = (),
    memory: Memory | None = None,
) -> list[CheckpointInfo]:
    """Every checkpoint-like entry, ordered by (step, commit sequence). A root that does not exist
    has none.

    Somebody else may save and delete meanwhile, and a listing may take its time: an entry that is
    gone, or on its way out, when it is looked at proves that the listing is out of date, so the
    root is listed again until nothing new is in it.
    sure: list it a second time where none is committed, for callers that conclude something from
    that.
    known: committed checkpoints that are taken as they are where their names are still there,
    without reading them again. memory: manifests that were read before. Raises StorageError,
    also where the root changes faster than it can be looked at.
    """
    found = {info.name: info for info in known if info.status == "committed"}
    before: set[str] = set()
    lost_before: set[str] = set()
    for again in range(MOST_SCANS):
        listed = _checkpoint_folders(storage)
        if memory is not None:
            memory.files = {n: read for n, read in memory.files.items() if n in listed}
        found = {name: info for name, info in found.items() if name in listed}
        new = [name for name in listed if name not in found]
        for name in new:
            info = inspect_folder(storage, name, listed[name], memory)
            if info is not None:
                found[name] = info
        lost = listed.keys() - found.keys()
        fading = [name for name in new if name in found and found[name].reason == DELETING]
        if again == 0:
            none = not any(info.status == "committed" for info in found.values())
            stable = not (lost or fading or (sure and none))
        else:
            stable = not (lost or fading) or (listed.keys() <= before and lost <= lost_before)
        if stable:
            return _in_order(found)
        before, lost_before = set(listed), lost
    newest = max(
        (info.order for info in found.values() if info.status == "committed"), default=None
    )
    if newest is None or any(step_of(name) >= newest[0] for name in lost_before):
        what = (
            f"{storage.url} changes faster than it can be looked at: after {MOST_SCANS} looks its "
            "newest checkpoint is not known"
        )
        raise StorageError(what, path=storage.url, errno=errno.EAGAIN)
    return _in_order(found)


def _checkpoint_folders(storage: Storage) -> dict[str, Sequence[Entry] | None]:
    """The newest first: these are the first that others replace."""
    try:
        folders = storage.list_folders("checkpoint-")
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return {}
    ours = [found for name in folders if (found := FOLDER.fullmatch(name))]
    names = [name for _, name in sorted((-int(found[1]), found[0]) for found in ours)]
    return {name: folders[name] for name in names}


def _in_order(found: dict[str, CheckpointInfo]) -> list[CheckpointInfo]:
    whole = {name for name, info in found.items() if info.status == "committed"}
    result = []
    for info in found.values():
        if info.status == FOREIGN:
            continue
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


def sweep(storage: Storage, infos: Iterable[CheckpointInfo], run_id: str, warn: Warn) -> list[str]:
    """Finish deletions and overwrites that were interrupted, and remove attempts that are provably
    abandoned.

    Returns the names removed. What cannot be removed is a warning.
    """
    swept = []
    for info in infos:
        try:
            if _swept(storage, info, run_id):
                swept.append(info.name)
        except (StorageError, CheckpointCorrupt) as error:
            warn(f"could not remove leftovers {info.url}: {error}")
    return swept


def _swept(storage: Storage, info: CheckpointInfo, run_id: str) -> bool:
    """Whether an entry was a leftover, and is removed now."""
    parsed = FolderName.parse(info.name)
    if parsed is None or (info.reason or "").startswith(LEFTOVER_OF_OTHERS):
        return False
    kind, attempt = parsed.kind, parsed.attempt
    if info.marked and not kind:
        unmark_attempts(storage, info.name)
        return False
    if info.status == "committed":
        # An overwrite died between its two renames: what it put aside takes its place again.
        if kind == "replaced" and Attempt.parse(attempt).is_abandoned(run_id):
            storage.rename(info.name, info.name.partition(".replaced-")[0])
            storage.sync_folder("")
        return False
    if kind == "replaced":
        remove_checkpoint_folder(storage, info.name)
        return True
    if info.status != "partial":
        return False
    attempts = [attempt] if kind else attempts_among(storage.entries(info.name))
    if not all(Attempt.parse(each).is_abandoned(run_id) for each in attempts):
        return False
    # Looked at after the marks: what another job has committed since the scan is no leftover.
    there = inspect_folder(storage, info.name)
    if there is None or there.status != "partial":
        return False
    try:
        (remove_attempt if attempts else finish_deletion)(storage, info.name)
    except CheckpointCorrupt:  # of the withdrawn manifest: what is left goes by its name
        remove_attempt(storage, info.name)
    return True


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


def commit_to_load(infos: Sequence[CheckpointInfo], info: CheckpointInfo | None) -> list[Any]:
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
    """The checkpoint of `step`, or of that name, or the newest for "latest"; of several the last.
    Raises CheckpointNotFound.

    What is there and damaged, or cannot be read, is not passed over: opening it says what is wrong.
    A step that only another run of this root has is good enough when it is asked for.
    """
    passed_over = (
        ("partial", "uncommitted", "incomplete") if step == "latest" else ("partial", "incomplete")
    )
    found = [i for i in infos if i.status not in passed_over]
    stray = [i for i in infos if i.status == "incomplete" and step in ("latest", i.step)]
    run = run_id or newest_run(found)
    infos = [i for i in found if run is None or i.run_id in (None, run)]
    if step == "latest":
        matching = [i for i in infos if not i.abandoned][-1:]
    else:
        matching = [i for i in infos if is_meant(i, step)]
        matching = matching or [i for i in found if is_meant(i, step)]
        matching = [i for i in matching if not i.abandoned] or matching
    if not matching:
        steps = [i.step for i in infos if i.step is not None]
        what = f"no checkpoint of step {step}"
        if isinstance(step, str):
            what = "no checkpoint yet" if step == "latest" else f"no checkpoint {step!r}"
        lacking = "".join(f"; {i.name}: {i.reason}" for i in stray)
        raise CheckpointNotFound(
            f"{url} has {what}; steps there: {', '.join(map(str, steps)) or 'none'}{lacking}",
            path=url,
            step=step if isinstance(step, int) else None,
            available=steps,
        )
    return matching[-1]


def is_meant(info: CheckpointInfo, step: int | str) -> bool:
    """Whether a checkpoint is of a step, or has that name, as a folder or from its save."""
    return info.step == step if isinstance(step, int) else step in (entry_name(info), info.label)


def entry_name(info: CheckpointInfo) -> str:
    """The name of its folder, in whichever root it is."""
    return split_url(info.url)[1]


def entry(infos: Sequence[CheckpointInfo], run_id: str | None, name: str) -> CheckpointInfo | None:
    """The entry of that name, of the first root that has one; or the last one of the run whose save
    was given that name."""
    found = [i for i in infos if is_meant(i, name) and i.status not in ("partial", "incomplete")]
    of_run = [i for i in found if i.run_id == run_id and not i.abandoned]
    folders = [i for i in found if entry_name(i) == name]
    return next(reversed(folders or of_run or found), None)


def copies(infos: Sequence[CheckpointInfo], info: CheckpointInfo) -> list[str]:
    """Names of a checkpoint and of other copies of the same commit, the one to prefer first."""
    if info.manifest is None:
        return [info.name]
    same = [
        i for i in infos if i.manifest is not None and i.manifest.digest == info.manifest.digest
    ]
    return [i.name for i in reversed(same)]


# Branches: a run that goes back and saves again leaves what came after as a branch of its own.


def newest_run(infos: Iterable[CheckpointInfo]) -> str | None:
    """The run that committed last in this root, by commit sequence; also when what it committed is
    damaged now."""
    commits = [info.manifest for info in infos if info.manifest]
    last = max(commits, key=lambda commit: (commit.sequence, commit.step), default=None)
    return last.run_id if last else None


def committed(infos: Iterable[CheckpointInfo], run_id: str | None) -> list[CheckpointInfo]:
    """The committed checkpoints of one run that it has not abandoned, oldest first; of all runs
    with None."""
    found = [info for info in infos if info.status == "committed" and not info.abandoned]
    return found if run_id is None else [info for info in found if info.run_id == run_id]


def mark_abandoned(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """The same with `abandoned` set: what the run had gone back behind, by the last commit of
    it."""
    infos = list(infos)
    last, result = _last_commits(infos), []
    for info in infos:
        commit = info.manifest
        of_run = None if commit is None else last.get(commit.run_id)
        left = bool(commit and of_run and within(commit.sequence, of_run.abandoned))
        result.append(info if info.abandoned == left else replace(info, abandoned=left))
    return result


def left_by_last(infos: Iterable[CheckpointInfo], run_id: str) -> Ranges:
    """The commit sequences that a run had abandoned when it committed last."""
    last = _last_commits(infos).get(run_id)
    return last.abandoned if last else []


def _last_commits(infos: Iterable[CheckpointInfo]) -> dict[str, CheckpointManifest]:
    """The manifest that each run committed last."""
    last: dict[str, CheckpointManifest] = {}
    for info in infos:
        found = info.manifest
        if found is not None and info.status in ("committed", "damaged"):
            before = last.get(found.run_id)
            if before is None or before.sequence < found.sequence:
                last[found.run_id] = found
    return last


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


@dataclass(frozen=True, slots=True)
class Branch:
    """Where what a run saves from now on comes from. last: the highest commit sequence that it has;
    abandoned: see Ranges; left: the checkpoints that are abandoned now."""

    last: int = 0
    abandoned: Ranges | None = None
    left: Sequence[CheckpointInfo] = ()


def branch_from(
    loaded: CheckpointManifest | None, infos: Iterable[CheckpointInfo], run_id: str, *, back: bool
) -> Branch:
    """The branch of a run that goes on from the checkpoint `loaded`, or begins anew with None.

    back: all that was committed after it is left; else what is newer, and could not be restored.
    """
    mine = [info for info in infos if info.manifest and info.manifest.run_id == run_id]
    last = last_sequence(mine)
    if loaded is None or back:
        origin, before = (loaded.sequence, loaded.abandoned) if loaded else (0, [])
        abandoned = left_by_going_back(origin, before, last)
    else:
        newer = [i.sequence or 0 for i in mine if i.order > (loaded.step, loaded.sequence)]
        abandoned = merged([*left_by_last(mine, run_id), *([number, number] for number in newer)])
    left = [i for i in committed(mine, None) if within(i.sequence or 0, abandoned)]
    return Branch(last, abandoned, left)


def last_sequence(infos: Iterable[CheckpointInfo]) -> int:
    """The highest commit sequence among them; 0 where none has one."""
    return max((info.manifest.sequence for info in infos if info.manifest), default=0)


def left_behind(infos: Iterable[CheckpointInfo], run_id: str | None) -> list[CheckpointInfo]:
    """The committed checkpoints of one run that it has abandoned."""
    return [i for i in infos if i.status == "committed" and i.abandoned and i.run_id == run_id]


def surplus(
    infos: Sequence[CheckpointInfo], policy: RetentionPolicy | None, run_id: str, saved: str
) -> list[CheckpointInfo]:
    """Which of a root's checkpoints need not stay, after the commit of `saved`."""
    if policy is None:
        return []
    mine, left = committed(infos, run_id), left_behind(infos, run_id)
    # A branch that was left has the same policy, for itself: it neither counts against the new one
    # nor grows.
    keep = policy.keep(mine) | (policy.keep(left) if left else set())
    keep |= {saved, *(info.name for info in mine[-1:])}
    return [info for info in [*mine, *left] if info.name not in keep and not info.pinned]
