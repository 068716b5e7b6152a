"""What lies at the path that a user typed: a checkpoint, something that fails to be one, or a
root; and which one of a root is meant."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptcore import (
    CheckpointError,
    CheckpointInfo,
    CheckpointNotFound,
    StorageError,
    join_url,
    masked_url,
    restore_candidates,
    scan_root,
    split_url,
)

from .failures import GOOD, USAGE, Failure, bad, not_found
from .render import Report
from .subject import MANIFEST, Options, Subject

# A manifest is there, so these were committed once: what is wrong with them now is a finding, not a
# leftover.
PUBLISHED = ("committed", "damaged", "unsupported", "unreadable")
LOOKS = 20  # how often a root that changes while a command looks at it is looked at again


@dataclass(frozen=True, slots=True)
class Root:
    """A folder of checkpoints; `entries` is never empty. typed: where it is; url: the same as it
    may be shown."""

    typed: str
    url: str
    entries: list[CheckpointInfo]


def resolve(url: str, options: Options) -> Subject | Root:
    """What lies at `url`; the path of a manifest means its folder. Raises Failure when there is
    nothing, and what the storage raises."""
    if not url:
        raise not_found("the path is empty", path=url)
    url = normal(url)
    folder, name = split(url)
    if name == MANIFEST and folder:
        url = folder
        folder, name = split(url)
    try:
        subject = Subject.open(url, name, options)
    except CheckpointNotFound:
        if entries := scan(url, options):
            return Root(url, masked_url(url), entries)
        if folder and (info := _beside(folder, name, options)):
            # It looks like a checkpoint and is none: no manifest.
            return subject_of(info, options, folder)
        raise _nothing(url) from None
    # A storage that did not answer is not asked again: each time may take all of retry_deadline.
    unknown = subject.error is None and subject.step is None
    if unknown and folder and (info := _beside(folder, name, options)):
        subject.learn(info)
    return subject


def settled(url: str, options: Options, work: Callable[[Subject | Root], Report]) -> Report:
    """What `work` finds of what lies at `url`. What was bad in a root that has changed since is
    looked for again: a job that saves and deletes there is no damage. Raises what `resolve` and
    `work` raise of a root that stays as it is."""
    for _ in range(LOOKS - 1):
        found = resolve(url, options)
        try:
            report = work(found)
        except (Failure, CheckpointError):
            if not _has_changed(found, options):
                raise
        else:
            if report.exit_code == GOOD or not _has_changed(found, options):
                return report
    return work(resolve(url, options))


def _has_changed(found: Subject | Root, options: Options) -> bool:
    def state(entries: list[CheckpointInfo]) -> list[tuple[str, str, str | None]]:
        return [(i.name, i.status, i.manifest.digest if i.manifest else None) for i in entries]

    return isinstance(found, Root) and state(scan(found.typed, options)) != state(found.entries)


def normal(url: str) -> str:
    """Absolute, where it is a local path, and without a slash at the end."""
    folder, name = split(url)
    return url if folder is None else join_url(folder, name)


def split(url: str) -> tuple[str | None, str]:
    """(folder around, last name) of a path or URL; the folder is None at the top of a storage."""
    folder, name = split_url(url)
    return (None if not name or folder.endswith("://") else folder), name


def scan(url: str, options: Options) -> list[CheckpointInfo]:
    """Every checkpoint-like entry of a root, oldest first; none when there is no such folder."""
    try:
        return list(scan_root(url, storage_options=options))
    except CheckpointNotFound:
        return []


def around(subject: Subject) -> list[CheckpointInfo]:
    """What lies in the root of a checkpoint; nothing where that may not be read."""
    folder, _ = split(subject.typed)
    try:
        return scan(folder, subject.options) if folder else []
    except StorageError:
        return []


def _beside(folder: str, name: str, options: Options) -> CheckpointInfo | None:
    try:
        return next((info for info in scan(folder, options) if info.name == name), None)
    except StorageError:
        return None  # the folder around a checkpoint need not be readable


def _nothing(url: str) -> Failure:
    shown = masked_url(url)
    what = f"no checkpoint at {shown}: no {MANIFEST} in it, and no folder that holds one"
    if "://" not in url:
        if not os.path.lexists(shown):
            what = f"no such file or folder: {shown}"
        elif not os.path.isdir(shown):
            what = f"not a folder: {shown}; give a checkpoint's folder, or the one around it"
        elif not os.listdir(shown):
            what = f"the folder is empty: {shown}"
    return not_found(what, path=shown)


def subject_of(info: CheckpointInfo, options: Options, root: str) -> Subject:
    """The subject for an entry of a root, opened where that is possible."""
    url = join_url(root, info.name)
    if info.status in PUBLISHED:
        try:
            subject = Subject.open(url, info.name, options)
        except CheckpointNotFound:
            subject = Subject(url, info.name, options)
            gone = f"it was deleted while {info.url} was looked at"
            subject.not_committed("uncommitted", gone)
        if info.status != "committed" and subject.good:
            subject.status, subject.reason = info.status, info.reason
    else:
        subject = Subject(url, info.name, options)
        subject.not_committed(info.status, info.reason)
    subject.learn(info)
    return subject


def chosen(found: Subject | Root, options: Options) -> tuple[Subject | None, list[CheckpointInfo]]:
    """The checkpoint that `restore` would take, and what it would pass over for it, oldest first;
    None where it would find nothing that is usable. A checkpoint that was named is itself."""
    if not isinstance(found, Root):
        return found, []
    info, passed = newest(found.entries)
    return (subject_of(info, options, found.typed) if info else None), passed


def opened(found: Subject | Root, options: Options) -> Subject:
    """`chosen`, where it can be read. Raises Failure, and why it cannot be read."""
    subject, passed = chosen(found, options)
    if subject is None:
        raise none_usable(found.url, passed)
    subject.readable()
    return subject


def none_usable(url: str, passed: list[CheckpointInfo]) -> Failure:
    why = "".join(f"; {each.name} is {each.status}: {each.reason}" for each in passed)
    return bad(f"no committed checkpoint of the run that saved last in {url}{why}", path=url)


def one_checkpoint(url: str, options: Options) -> Subject:
    """What lies at `url`, where that must be one checkpoint, whatever its state. Raises Failure for
    a root."""
    found = resolve(url, options)
    if isinstance(found, Root):
        names = ", ".join(info.name for info in found.entries[-5:])
        what = f"{found.url} is a root with {names}: say which one"
        raise Failure("usage", USAGE, what, path=found.url)
    return found


def newest(entries: list[CheckpointInfo]) -> tuple[CheckpointInfo | None, list[CheckpointInfo]]:
    """The entry that `restore` would take, as far as a listing says, and what it would pass over
    for it (oldest first)."""
    passed: list[CheckpointInfo] = []
    for info in restore_candidates(entries):
        if info.status == "committed":
            return info, passed[::-1]
        passed.append(info)
    return None, passed[::-1]


def fallback(
    subject: Subject, verify: bool, known: dict[str, Subject] | None = None
) -> dict[str, Any] | None:
    """The nearest older usable checkpoint beside this one, of the same run where there is one.

    With `verify`, every byte of a candidate is checked before it is named. known: what was checked
    already, by name.
    """
    folder, name = split(subject.typed)
    entries = around(subject)
    older = [info for info in entries if info.status == "committed" and info.name != name]
    if subject.step is not None:
        mine = (subject.step, subject.sequence or 0)
        older = [info for info in older if (info.step or 0, info.sequence or 0) < mine]
    # A stable sort: oldest first within "other run" and within "same run".
    older.sort(key=lambda info: info.run_id == subject.run_id)
    for info in reversed(older):
        candidate = (known or {}).get(info.name)
        if candidate is None:
            with (candidate := subject_of(info, subject.options, folder or "")):
                if verify:
                    candidate.verify()
        if candidate.good:
            head = {"name": info.name, "url": info.url, "step": info.step, "run_id": info.run_id}
            return head | {"created": info.created, "verified": verify}
    return None
