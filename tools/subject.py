"""One checkpoint that a command looks at: its facts, and everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ckptcore import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointInfo,
    CheckpointView,
    Problem,
    StorageError,
    UnsupportedVersion,
    masked_url,
    open_checkpoint,
)

from . import facts
from .failures import BAD, GOOD, STORAGE, bad
from .render import Block, Line

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
        self.info = replace(info, url=masked_url(typed))
        self.view: CheckpointView | None = None
        self.problems: list[dict[str, Any]] = []
        self.error: CheckpointError | None = None

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
            subject.view = open_checkpoint(typed, storage_options=options)
            manifest = subject.view.manifest
            subject.info = replace(subject.info, step=manifest.step, manifest=manifest)
            subject.check_sizes(subject.view)
        except CheckpointCorrupt as error:
            subject.add(problem_of(error))
        except (StorageError, UnsupportedVersion) as error:
            kind = "storage" if isinstance(error, StorageError) else "version"
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

    def readable(self) -> CheckpointView:
        """Its view. Raises why there is none."""
        if self.error is not None:
            raise self.error
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
        problems = []
        for name, record in view.manifest.files.items():
            size = found.get(name)
            if size is None:
                what = "is not a file" if name in found else "is missing"
                problems.append(Problem(name, "missing", f"{name} {what}", None, record.size))
            elif size != record.size:
                message = f"{name} has {size} bytes, {record.size} were saved"
                problems.append(Problem(name, "size", message, None, record.size, size))
        self.add(*problems)

    def attempt(self, read: Callable[[], T]) -> T | None:
        """What `read` returns; None when damage prevents it, which is then one of the problems."""
        try:
            return read()
        except CheckpointCorrupt as error:
            if error.file not in {problem["file"] for problem in self.problems}:
                self.add(problem_of(error))
            return None

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every byte of a checkpoint that could be opened. progress: see
        CheckpointView.verify."""
        if (view := self.view) is not None:
            self.add(*(self.attempt(lambda: view.verify(progress=progress)) or []))


def problem_of(error: CheckpointCorrupt) -> Problem:
    where, kind = error.file or MANIFEST, error.kind or "format"
    return Problem(where, kind, str(error), error.tensor, error.expected, error.actual)


def problem_lines(document: dict[str, Any]) -> list[Block]:
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
