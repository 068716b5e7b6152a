"""What lies at the path that a user typed: a checkpoint, something that fails to be one, or a root;
which one of a root is meant, and everything that is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

import click

import ckptcore as engine
from ckptcore import CheckpointInfo, CheckpointView, Problem

from . import facts
from .cli import LOCATION
from .failures import BAD, GOOD, STORAGE, USAGE, Failure, bad, not_found
from .render import Block, Line, Report

LOOKS = 20  # how often a root that changes while a command reads it is read again
MANIFEST = "checkpoint_manifest.json"
PIN = "checkpoint.pinned"
# A manifest is there, so these were committed once: what is wrong with them now is a finding, not a
# leftover.
PUBLISHED = ("committed", "damaged", "unsupported", "unreadable")
NO_DAMAGE = {"storage": "unreadable", "version": "unsupported"}

Options = dict[str, Any] | None
T = TypeVar("T")


class Subject:
    """A checkpoint, opened (`view`), or as much as is known about why it cannot be.

    typed: where it is; `info` has the URL as it may be shown. info: what the engine lists of it,
    with the status that was found here. error: why it could not be opened, where that is no damage.
    Leaving the context closes the view.
    """

    def __init__(self, typed: str, info: CheckpointInfo, options: Options) -> None:
        self.typed, self.options = typed, options
        self.info = replace(info, url=engine.masked_url(typed))
        self.view: CheckpointView | None = None
        self.problems: list[dict[str, Any]] = []
        self.error: engine.CheckpointError | None = None

    @classmethod
    def open(cls, typed: str, listed: CheckpointInfo, options: Options) -> Subject:
        """Open a checkpoint, or describe why it cannot be. listed: what is known of it. Raises
        CheckpointNotFound where its manifest has gone."""
        subject = cls(typed, listed, options)
        if listed.status not in PUBLISHED:
            reason = listed.reason or "the save or the copy did not finish"
            subject.info = replace(subject.info, reason=reason)
            subject.problems = [facts.problem(Problem(MANIFEST, "missing", reason), None)]
            return subject
        subject.info = replace(subject.info, status="committed", reason=None)
        try:
            subject.view = engine.open_checkpoint(typed, storage_options=options)
            manifest = subject.view.manifest
            subject.info = replace(subject.info, step=manifest.step, manifest=manifest)
            subject.check_sizes(subject.view)
        except engine.CheckpointCorrupt as error:
            subject.add(problem_of(error))
        except (engine.StorageError, engine.UnsupportedVersion) as error:
            kind = "storage" if isinstance(error, engine.StorageError) else "version"
            subject.error = error
            subject.add(Problem(MANIFEST, kind, str(error)))
        if listed.status != "committed" and subject.good:
            subject.info = replace(subject.info, status=listed.status, reason=listed.reason)
        return subject

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.view is not None:
            self.view.__exit__(*exception)

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def url(self) -> str:
        return self.info.url

    @property
    def status(self) -> str:
        return self.info.status

    @property
    def good(self) -> bool:
        return self.status == "committed"

    @property
    def exit_code(self) -> int:
        return GOOD if self.good else STORAGE if self.status == "unreadable" else BAD

    def check_known(self) -> None:
        """Raises why nothing is known of it, where that is no damage."""
        if self.error is not None:
            raise self.error

    def readable(self) -> CheckpointView:
        """Its view. Raises why there is none."""
        self.check_known()
        if self.view is None:
            raise bad(f"{self.url} is {self.status}: {self.info.reason}", path=self.url)
        return self.view

    def add(self, *found: Problem) -> None:
        """What is wrong with it; which replaces what was known of the same files."""
        if not found:
            return
        again = {problem.file for problem in found}
        self.problems = [problem for problem in self.problems if problem["file"] not in again]
        self.problems += [facts.problem(problem, self.info.manifest) for problem in found]
        kinds = {problem["kind"] for problem in self.problems}
        status = NO_DAMAGE.get(kinds.pop(), "damaged") if len(kinds) == 1 else "damaged"
        self.info = replace(self.info, status=status, reason=self.info.reason or found[0].message)

    def check_sizes(self, view: CheckpointView) -> None:
        """Every listed file must be there with its size: one listing, so even without --verify."""
        found = {entry.name: entry.size for entry in view.storage.list(view.folder)}
        self.info = replace(self.info, pinned=PIN in found)
        for name, record in view.manifest.files.items():
            size = found.get(name)
            if size is None:
                what = "is not a file" if name in found else "is missing"
                self.add(Problem(name, "missing", f"{name} {what}", None, record.size))
            elif size != record.size:
                message = f"{name} has {size} bytes, {record.size} were saved"
                self.add(Problem(name, "size", message, None, record.size, size))

    def attempt(self, read: Callable[[], T]) -> T | None:
        """What `read` returns; None when damage prevents it, which is then one of the problems."""
        try:
            return read()
        except engine.CheckpointCorrupt as error:
            if error.file not in {problem["file"] for problem in self.problems}:
                self.add(problem_of(error))
            return None

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every byte of a checkpoint that could be opened. progress: see
        CheckpointView.verify."""
        if (view := self.view) is not None:
            self.add(*(self.attempt(lambda: view.verify(progress=progress)) or []))


def problem_of(error: engine.CheckpointCorrupt) -> Problem:
    where, kind = error.file or MANIFEST, error.kind or "format"
    return Problem(where, kind, str(error), error.tensor, error.expected, error.actual)


def problem_lines(document: Mapping[str, Any]) -> list[Block]:
    """Lines for what is wrong with a checkpoint, and for the nearest older usable one; none when it
    is good. document: with "checkpoint", "problems" and "fallback"."""
    checkpoint, problems, instead = (document[k] for k in ("checkpoint", "problems", "fallback"))
    if checkpoint["status"] == "committed" and not problems:
        return []
    texts = [f"{problem['kind']}: {problem['message']}" for problem in problems]
    texts += [checkpoint["reason"]] if not problems and checkpoint["reason"] else []
    lines: list[Block] = [Line(f"  {text}", "red") for text in texts]
    if instead is None:
        return [*lines, Line("  no older usable checkpoint beside it", "yellow")]
    how = "every byte verified" if instead["verified"] else "by its manifest"
    which = f"{instead['step']} of run {instead['run_id']} ({how})"
    return [*lines, Line(f"  nearest older usable step: {which}: {instead['url']}", "green")]


@dataclass(frozen=True, slots=True)
class Found:
    """What lies at a path. entries: of a root, oldest first; one: the checkpoint that lies there
    itself, None for a root."""

    typed: str
    options: Options
    entries: list[CheckpointInfo]
    one: Subject | None = None

    @property
    def url(self) -> str:
        return engine.masked_url(self.typed)

    def subject(self, info: CheckpointInfo) -> Subject:
        """The subject for one of the entries, opened where that is possible."""
        if self.one is not None:
            return self.one
        url = engine.join_url(self.typed, info.name)
        try:
            return Subject.open(url, info, self.options)
        except engine.CheckpointNotFound:
            gone = f"it was deleted while {info.url} was looked at"
            info = replace(info, status="uncommitted", reason=gone)
            return Subject.open(url, info, self.options)

    def newest(self) -> tuple[CheckpointInfo | None, list[CheckpointInfo]]:
        """The entry that `restore` would take, as far as a listing says, and what it would pass
        over for it (oldest first). A checkpoint that was named is itself."""
        if self.one is not None:
            return self.one.info, []
        passed: list[CheckpointInfo] = []
        for info in engine.restore_candidates(self.entries):
            if info.status == "committed":
                return info, passed[::-1]
            passed.append(info)
        return None, passed[::-1]

    def opened(self) -> Subject:
        """The checkpoint that `restore` would take, where it can be read. Raises Failure, and why
        it cannot be read."""
        info, passed = self.newest()
        if info is None:
            why = "".join(f"; {each.name} is {each.status}: {each.reason}" for each in passed)
            what = f"no committed checkpoint of the run that saved last in {self.url}{why}"
            raise bad(what, path=self.url)
        subject = self.subject(info)
        subject.readable()
        return subject

    def warning(self, subject: Subject) -> str | None:
        """What is said where a newer checkpoint of a root cannot be used, and this one was
        taken."""
        known = ((info, info.reason or "no reason known") for info in self.newest()[1])
        texts = "; ".join(f"{info.name} is {info.status} ({reason})" for info, reason in known)
        return f"warning: took {subject.name}: {texts}" if texts else None

    def has_changed(self) -> bool:
        """Whether it is a root where somebody has saved or deleted since."""
        if self.one is not None:
            return False
        now = scan(self.typed, self.options)
        return [*map(_state, now)] != [*map(_state, self.entries)]


def _state(info: CheckpointInfo) -> tuple[str, str, str | None]:
    return info.name, info.status, info.manifest.digest if info.manifest else None


def resolve(url: str, options: Options) -> Found:
    """What lies at `url`; the path of a manifest means its folder. Raises Failure when there is
    nothing, and what the storage raises."""
    url = normal(url)
    folder, name = split(url)
    if name == MANIFEST and folder:
        url = folder
        folder, name = split(url)
    try:
        subject = Subject.open(url, CheckpointInfo(name, url, "committed"), options)
    except engine.CheckpointNotFound as error:
        if entries := scan(url, options):
            return Found(url, options, entries)
        if info := _beside(folder, name, options):
            # It looks like a checkpoint and is none: no manifest.
            subject = Found(folder or "", options, [info]).subject(info)
            return Found(url, options, [subject.info], subject)
        raise _nothing(url, str(error)) from None
    # A storage that did not answer is not asked again: each time may take all of retry_deadline.
    unknown = subject.error is None and subject.info.step is None
    if unknown and (info := _beside(folder, name, options)):
        subject.info = replace(subject.info, step=info.step, pinned=info.pinned)
    return Found(url, options, [subject.info], subject)


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
        with found.opened() as subject:
            report = work(subject=subject, **how)
        return report._replace(complaint=report.complaint or found.warning(subject))

    return run


def retried(url: str, options: Options, work: Callable[[Found], Report]) -> Report:
    """What `work` finds of what lies at `url`. Raises what `resolve` and `work` raise of a root
    that stays as it is."""
    for _ in range(LOOKS - 1):
        found = resolve(url, options)
        try:
            report = work(found)
        except (Failure, engine.CheckpointError):
            if not found.has_changed():
                raise
        else:
            if report.exit_code == GOOD or not found.has_changed():
                return report
    return work(resolve(url, options))


def normal(url: str) -> str:
    """Absolute, where it is a local path, and without a slash at the end. Raises Failure where it
    is empty."""
    if not url:
        raise not_found("the path is empty", path=url)
    folder, name = split(url)
    return url if folder is None else engine.join_url(folder, name)


def split(url: str) -> tuple[str | None, str]:
    """(folder around, last name) of a path or URL; the folder is None at the top of a storage."""
    folder, name = engine.split_url(url)
    return (None if not name or folder.endswith("://") else folder), name


def scan(url: str, options: Options) -> list[CheckpointInfo]:
    """Every checkpoint-like entry of a root, oldest first; none when there is no such folder."""
    try:
        return list(engine.scan_root(url, storage_options=options))
    except engine.CheckpointNotFound:
        return []


def around(subject: Subject) -> Found:
    """The root that a checkpoint is in; without entries where that may not be read."""
    folder = split(subject.typed)[0] or ""
    try:
        entries = scan(folder, subject.options) if folder else []
    except engine.StorageError:
        entries = []
    return Found(folder, subject.options, entries)


def _beside(folder: str | None, name: str, options: Options) -> CheckpointInfo | None:
    try:
        found = scan(folder, options) if folder else []
    except engine.StorageError:
        return None  # the folder around a checkpoint need not be readable
    return next((info for info in found if info.name == name), None)


def _nothing(url: str, reason: str) -> Failure:
    """reason: the engine's, which knows what other libraries write."""
    shown = engine.masked_url(url)
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


def one_checkpoint(url: str, options: Options) -> Subject:
    """What lies at `url`, where that must be one checkpoint, whatever its state. Raises Failure for
    a root."""
    found = resolve(url, options)
    if found.one is None:
        names = ", ".join(info.name for info in found.entries[-5:])
        what = f"{found.url} is a root with {names}: say which one"
        raise Failure("usage", USAGE, what, path=found.url)
    return found.one


def fallback(
    subject: Subject, verify: bool, known: Mapping[str, Subject] | None = None
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
        candidate = (known or {}).get(info.name)
        if candidate is None:
            with (candidate := root.subject(info)):
                if verify:
                    candidate.verify()
        if candidate.good:
            return facts.fields(info, "name url step run_id created") | {"verified": verify}
    return None
