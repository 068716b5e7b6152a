"""What lies at the path that a user typed: a checkpoint, something that fails to be one, or a
root."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from .failures import BAD, GOOD, USAGE, Failure, not_found
from .render import Report
from .subject import MANIFEST, Options, Subject

if TYPE_CHECKING:
    from ckptcore import CheckpointInfo


class Root(NamedTuple):
    """A folder of checkpoints; `entries` is never empty. typed: where it is; url: the same as it
    may be shown."""

    typed: str
    url: str
    entries: list[CheckpointInfo]


# A manifest is there, so these were committed once: what is wrong with them now is a finding, not a
# leftover.
PUBLISHED = ("committed", "damaged", "unsupported", "unreadable")


def resolve(url: str, options: Options) -> Subject | Root:
    """What lies at `url`; the path of a manifest means its folder. Raises Failure when there is
    nothing, and what the storage raises."""
    from ckptcore import CheckpointNotFound, masked_url

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
        pass
    else:
        # A storage that did not answer is not asked again: each time may take all of
        # retry_deadline.
        if (
            subject.error is None
            and subject.step is None
            and folder
            and (info := _beside(folder, name, options))
        ):
            subject.learn(info)
        return subject
    if entries := scan(url, options):
        return Root(url, masked_url(url), entries)
    if folder and (info := _beside(folder, name, options)):
        return subject_of(
            info, options, folder
        )  # it looks like a checkpoint and is none: no manifest
    raise _nothing(url, masked_url(url))


# How often a root that changes while a command looks at it is looked at again.
LOOKS = 20


def settled(url: str, options: Options, work: Callable[[Subject | Root], Report]) -> Report:
    """What `work` finds of what lies at `url`. What was bad in a root that has changed since is
    looked for again: a job that saves and deletes there is no damage. Raises what `resolve` and
    `work` raise of a root that stays as it is."""
    from ckptcore import CheckpointError

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
    if not isinstance(found, Root):
        return False

    def state(entries: list[CheckpointInfo]) -> list[tuple[str, str, str | None]]:
        return [(i.name, i.status, i.manifest.digest if i.manifest else None) for i in entries]

    return state(scan(found.typed, options)) != state(found.entries)


def normal(url: str) -> str:
    """Absolute, where it is a local path, and without a slash at the end."""
    folder, name = split(url)
    return url if folder is None else child(folder, name)


def split(url: str) -> tuple[str | None, str]:
    """(folder around, last name) of a path or URL; the folder is None at the top of a storage."""
    from ckptcore import split_url

    folder, name = split_url(url)
    return (None if not name or folder.endswith("://") else folder), name


def child(folder: str, name: str) -> str:
    """What is called `name` in a folder."""
    from ckptcore import join_url

    return join_url(folder, name)


def scan(url: str, options: Options) -> list[CheckpointInfo]:
    """Every checkpoint-like entry of a root, oldest first; none when there is no such folder."""
    from ckptcore import CheckpointNotFound, scan_root

    try:
        return list(scan_root(url, storage_options=options))
    except CheckpointNotFound:
        return []


def _beside(folder: str, name: str, options: Options) -> CheckpointInfo | None:
    from ckptcore import StorageError

    try:
        return next((info for info in scan(folder, options) if info.name == name), None)
    except StorageError:
        return None  # the folder around a checkpoint need not be readable


def _nothing(typed: str, url: str) -> Failure:
    if "://" not in typed:
        if not os.path.lexists(url):
            return not_found(f"no such file or folder: {url}", path=url)
        if not os.path.isdir(url):
            hint = "give a checkpoint's folder, or the one around it"
            return not_found(f"not a folder: {url}; {hint}", path=url)
        if not os.listdir(url):
            return not_found(f"the folder is empty: {url}", path=url)
    what = f"no {MANIFEST} in it, and no folder that holds one"
    return not_found(f"no checkpoint at {url}: {what}", path=url)


def subject_of(info: CheckpointInfo, options: Options, root: str) -> Subject:
    """The subject for an entry of a root, opened where that is possible."""
    from ckptcore import CheckpointNotFound

    url = child(root, info.name)
    if info.status in PUBLISHED:
        try:
            subject = Subject.open(url, info.name, options)
        except CheckpointNotFound:
            subject = Subject(url, info.name, options)
            gone = replace(
                info, status="uncommitted", reason=f"it was deleted while {info.url} was looked at"
            )
            subject.not_committed(gone)
        if info.status != "committed" and subject.good:
            subject.status, subject.reason = info.status, info.reason
    else:
        subject = Subject(url, info.name, options)
        subject.not_committed(info)
    subject.learn(info)
    return subject


def opened(found: Subject | Root, options: Options) -> Subject:
    """A checkpoint that can be read, of a root the one that `restore` would take. Raises Failure,
    and why it cannot be read."""
    if isinstance(found, Root):
        info, passed = newest(found.entries)
        if info is None:
            why = "".join(f"; {each.name} is {each.status}: {each.reason}" for each in passed)
            what = f"no committed checkpoint of the run that saved last in {found.url}{why}"
            raise Failure("bad", BAD, what, path=found.url)
        found = subject_of(info, options, found.typed)
    if found.error is not None:
        raise found.error
    if found.view is None:
        raise Failure("bad", BAD, f"{found.url} is {found.status}: {found.reason}", path=found.url)
    return found


def one_checkpoint(url: str, options: Options) -> Subject:
    """What lies at `url`, where that must be one checkpoint, whatever its state. Raises Failure for
    a root."""
    found = resolve(url, options)
    if isinstance(found, Root):
        names = ", ".join(info.name for info in found.entries[-5:])
        raise Failure(
            "usage", USAGE, f"{found.url} is a root with {names}: say which one", path=found.url
        )
    return found


# ---------------------------------------------------------------- choosing among the entries of a
# root


def newest(entries: list[CheckpointInfo]) -> tuple[CheckpointInfo | None, list[CheckpointInfo]]:
    """The checkpoint that `restore` would take, as far as a listing says, and what it would pass
    over for it (oldest first). None where it would find nothing that is usable."""
    from ckptcore import restore_candidates

    passed: list[CheckpointInfo] = []
    for info in restore_candidates(entries):
        if info.status == "committed":
            return info, passed[::-1]
        passed.append(info)
    return None, passed[::-1]


def fallback(
    subject: Subject, verify: bool, known: dict[str, Subject] | None = None
) -> dict[str, object] | None:
    """The nearest older usable checkpoint beside this one, of the same run where there is one.

    With `verify`, every byte of a candidate is checked before it is named. known: what was checked
    already, by name.
    """
    from ckptcore import StorageError

    folder, name = split(subject.typed)
    try:
        entries = scan(folder, subject.options) if folder else []
    except StorageError:
        entries = []
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
            return {
                "name": info.name,
                "url": info.url,
                "step": info.step,
                "run_id": info.run_id,
                "created": info.created,
                "verified": verify,
            }
    return None
