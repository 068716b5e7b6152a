"""What lies at the path that a user typed: a checkpoint, something that fails to be one, or a
root; and which one of a root is meant."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import click

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

from .cli import LOCATION
from .facts import head
from .failures import GOOD, USAGE, Failure, bad, not_found
from .render import Report
from .subject import MANIFEST, Options, Subject

LOOKS = 20  # how often a root that changes while a command reads it is read again


@dataclass(frozen=True, slots=True)
class Root:
    """A folder of checkpoints. typed: where it is; `url`: the same as it may be shown."""

    typed: str
    entries: list[CheckpointInfo]
    options: Options

    @property
    def url(self) -> str:
        return masked_url(self.typed)

    def subject(self, info: CheckpointInfo) -> Subject:
        """The subject for one of the entries, opened where that is possible."""
        url = join_url(self.typed, info.name)
        try:
            return Subject.open(url, info, self.options)
        except CheckpointNotFound:
            gone = f"it was deleted while {info.url} was looked at"
            info = replace(info, status="uncommitted", reason=gone)
            return Subject.open(url, info, self.options)

    def newest(self) -> tuple[CheckpointInfo | None, list[CheckpointInfo]]:
        """The entry that `restore` would take, as far as a listing says, and what it would pass
        over for it (oldest first)."""
        passed: list[CheckpointInfo] = []
        for info in restore_candidates(self.entries):
            if info.status == "committed":
                return info, passed[::-1]
            passed.append(info)
        return None, passed[::-1]

    def has_changed(self) -> bool:
        """Whether somebody has saved or deleted here since."""
        now = scan(self.typed, self.options)
        return [_state(info) for info in now] != [_state(info) for info in self.entries]


def _state(info: CheckpointInfo) -> tuple[str, str, str | None]:
    return info.name, info.status, info.manifest.digest if info.manifest else None


Found = Subject | Root


def resolve(url: str, options: Options) -> Found:
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
        subject = Subject.open(url, CheckpointInfo(name, url, "committed"), options)
    except CheckpointNotFound as error:
        if entries := scan(url, options):
            return Root(url, entries, options)
        if info := _beside(folder, name, options):
            # It looks like a checkpoint and is none: no manifest.
            return Root(folder or "", [info], options).subject(info)
        raise _nothing(url, str(error)) from None
    # A storage that did not answer is not asked again: each time may take all of retry_deadline.
    unknown = subject.error is None and subject.info.step is None
    if unknown and (info := _beside(folder, name, options)):
        subject.info = replace(subject.info, step=info.step, pinned=info.pinned)
    return subject


def on_path(work: Callable[..., Report], metavar: str = "PATH") -> Callable[..., Report]:
    """A command with the argument PATH: it gets what lies there.

    What was bad in a root that has changed since is read again: a job that saves and deletes there
    is no damage."""

    @click.argument("path", metavar=metavar, type=LOCATION)
    @wraps(work)
    def run(path: str, options: Options, **how: Any) -> Report:
        return retried(path, options, lambda found: work(found=found, **how))

    return run


def on_checkpoint(work: Callable[..., Report]) -> Callable[..., Report]:
    """The same of one that can be read, and is open: of a root what restore would take, and a line
    on standard error says what it would pass over."""

    @on_path
    @wraps(work)
    def run(found: Found, **how: Any) -> Report:
        with opened(found) as subject:
            report = work(subject=subject, **how)
        return report._replace(complaint=report.complaint or warning_of(found, subject))

    return run


def retried(url: str, options: Options, work: Callable[[Found], Report]) -> Report:
    """What `work` finds of what lies at `url`. Raises what `resolve` and `work` raise of a root
    that stays as it is."""
    for _ in range(LOOKS - 1):
        found = resolve(url, options)
        try:
            report = work(found)
        except (Failure, CheckpointError):
            if isinstance(found, Subject) or not found.has_changed():
                raise
        else:
            if report.exit_code == GOOD or isinstance(found, Subject) or not found.has_changed():
                return report
    return work(resolve(url, options))


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


def around(subject: Subject) -> Root:
    """The root that a checkpoint is in; without entries where that may not be read."""
    folder, _ = split(subject.typed)
    try:
        entries = scan(folder, subject.options) if folder else []
    except StorageError:
        entries = []
    return Root(folder or "", entries, subject.options)


def _beside(folder: str | None, name: str, options: Options) -> CheckpointInfo | None:
    try:
        found = scan(folder, options) if folder else []
    except StorageError:
        return None  # the folder around a checkpoint need not be readable
    return next((info for info in found if info.name == name), None)


def _nothing(url: str, reason: str) -> Failure:
    """reason: the engine's, which knows what other libraries write."""
    shown = masked_url(url)
    what = f"no checkpoint at {shown}: no {MANIFEST} in it, and no folder that holds one"
    hint = reason.partition("; ")[2]
    what += f"; {hint}" if hint else ""
    if "://" not in url:
        if not os.path.lexists(shown):
            what = f"no such file or folder: {shown}"
        elif not os.path.isdir(shown):
            what = f"not a folder: {shown}; give a checkpoint's folder, or the one around it"
            what += "; ckpt import reads what other libraries wrote"
        elif not os.listdir(shown):
            what = f"the folder is empty: {shown}"
    return not_found(what, path=shown)


def chosen(found: Found) -> Subject | None:
    """The checkpoint that `restore` would take; None where it would find nothing that is usable. A
    checkpoint that was named is itself."""
    if isinstance(found, Subject):
        return found
    info = found.newest()[0]
    return found.subject(info) if info else None


def passed_over(found: Found) -> list[CheckpointInfo]:
    """What `restore` would pass over for `chosen`, oldest first."""
    return found.newest()[1] if isinstance(found, Root) else []


def opened(found: Found) -> Subject:
    """`chosen`, where it can be read. Raises Failure, and why it cannot be read."""
    subject = chosen(found)
    if subject is None:
        passed = passed_over(found)
        why = "".join(f"; {each.name} is {each.status}: {each.reason}" for each in passed)
        what = f"no committed checkpoint of the run that saved last in {found.url}{why}"
        raise bad(what, path=found.url)
    subject.readable()
    return subject


def warning_of(found: Found, subject: Subject) -> str | None:
    """What is said where a newer checkpoint of a root cannot be used, and this one was taken."""
    known = ((info, info.reason or "no reason known") for info in passed_over(found))
    texts = "; ".join(f"{info.name} is {info.status} ({reason})" for info, reason in known)
    return f"warning: took {subject.name}: {texts}" if texts else None


def one_checkpoint(url: str, options: Options) -> Subject:
    """What lies at `url`, where that must be one checkpoint, whatever its state. Raises Failure for
    a root."""
    found = resolve(url, options)
    if isinstance(found, Root):
        names = ", ".join(info.name for info in found.entries[-5:])
        what = f"{found.url} is a root with {names}: say which one"
        raise Failure("usage", USAGE, what, path=found.url)
    return found


def fallback(
    subject: Subject, verify: bool, known: Mapping[str, tuple[Subject, float]] | None = None
) -> dict[str, Any] | None:
    """The nearest older usable checkpoint beside this one, of the same run where there is one.

    With `verify`, every byte of a candidate is checked before it is named. known: what was checked
    already, by name.
    """
    root, mine = around(subject), subject.info
    older = [i for i in root.entries if i.status == "committed" and i.name != subject.name]
    if mine.step is not None:
        older = [info for info in older if info.order < mine.order]
    # A stable sort: oldest first within "other run" and within "same run".
    older.sort(key=lambda info: info.run_id == mine.run_id)
    for info in reversed(older):
        candidate, _ = (known or {}).get(info.name, (None, 0.0))
        if candidate is None:
            with (candidate := root.subject(info)):
                if verify:
                    candidate.verify()
        if candidate.good:
            return head(info) | {"run_id": info.run_id, "created": info.created, "verified": verify}
    return None
