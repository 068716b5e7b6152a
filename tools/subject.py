"""One checkpoint that a command looks at: its facts, and everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ckptcore import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointInfo,
    CheckpointManifest,
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

NO_DAMAGE = {"storage": "unreadable", "version": "unsupported"}

Options = dict[str, Any] | None
T = TypeVar("T")


class Subject:
    """A checkpoint, opened (`view`), or as much as is known about why it cannot be.

    status: "committed", "damaged", "uncommitted" or "partial" as the engine says, "unreadable" when
    only the storage stands in the way, "unsupported" when a newer ckptcore wrote it. error: why it
    could not be opened, where that is no damage. Leaving the context closes the view.
    """

    def __init__(self, url: str, name: str, options: Options) -> None:
        self.typed, self.url, self.name = url, masked_url(url), name  # url: as it may be shown
        self.options = options
        self.status = "committed"
        self.reason: str | None = None
        self.step: int | None = None
        self.sequence: int | None = None
        self.run_id: str | None = None
        self.pinned = False
        self.manifest: CheckpointManifest | None = None
        self.view: CheckpointView | None = None
        self.problems: list[dict[str, Any]] = []
        self.error: CheckpointError | None = None

    @classmethod
    def open(cls, url: str, name: str, options: Options) -> Subject:
        """Open a checkpoint, or describe why it cannot be. Raises CheckpointNotFound without a
        manifest."""
        subject = cls(url, name, options)
        try:
            subject.view = open_checkpoint(url, storage_options=options)
            subject.manifest = subject.view.manifest
            subject.learn(subject.manifest)
            subject.check_sizes(subject.view)
        except CheckpointCorrupt as error:
            subject.add(problem_of(error))
        except (StorageError, UnsupportedVersion) as error:
            kind = "storage" if isinstance(error, StorageError) else "version"
            subject.error = error
            subject.add(Problem(MANIFEST, kind, str(error)))
        return subject

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.view is not None:
            self.view.__exit__(*exception)

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
            raise bad(f"{self.url} is {self.status}: {self.reason}", path=self.url)
        return self.view

    def learn(self, source: CheckpointInfo | CheckpointManifest) -> None:
        """Step, sequence and run, where they are not known from the manifest itself; and whether it
        is pinned."""
        self.pinned = self.pinned or getattr(source, "pinned", False)
        if self.manifest is None or source is self.manifest:
            self.step, self.sequence, self.run_id = source.step, source.sequence, source.run_id

    def not_committed(self, status: str, reason: str | None) -> None:
        self.status = status
        self.reason = reason or "the save or the copy did not finish"
        self.problems = [facts.problem(Problem(MANIFEST, "missing", self.reason))]

    def add(self, *found: Problem) -> None:
        """What is wrong with it; which replaces what was known of the same files."""
        if not found:
            return
        again = {problem.file for problem in found}
        self.problems = [problem for problem in self.problems if problem["file"] not in again]
        self.problems += [facts.problem(problem, self.manifest) for problem in found]
        kinds = {problem["kind"] for problem in self.problems}
        self.status = NO_DAMAGE.get(kinds.pop(), "damaged") if len(kinds) == 1 else "damaged"
        self.reason = self.reason or found[0].message

    def check_sizes(self, view: CheckpointView) -> None:
        """Every listed file must be there with its size: one listing, so even without --verify."""
        found = {entry.name: entry.size for entry in view.storage.list(view.folder)}
        self.pinned = PIN in found
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

    def document(self) -> dict[str, Any]:
        """docs/cli.md: checkpoint."""
        header = facts.fields(self, "name url status reason pinned step run_id sequence")
        return header | facts.checkpoint(self.manifest) if self.manifest else header

    def head(self) -> dict[str, Any]:
        return facts.fields(self, "name url step")

    def entry(self) -> dict[str, Any]:
        """docs/cli.md: entry."""
        known = self.document()
        names = "name url step status reason pinned size_bytes created run_id sequence node"
        found = {name: known.get(name) for name in names.split()}
        return found | {"latest": False, "abandoned": False, "metrics": known.get("metrics", {})}


def problem_of(error: CheckpointCorrupt) -> Problem:
    where, kind = error.file or MANIFEST, error.kind or "format"
    return Problem(where, kind, str(error), error.tensor, error.expected, error.actual)


def problem_lines(document: dict[str, Any], instead: dict[str, Any] | None) -> list[Block]:
    """Lines for what is wrong with a checkpoint, and for the nearest older usable one; none when it
    is good. document: with "checkpoint" and "problems"."""
    checkpoint, problems = document["checkpoint"], document["problems"]
    if checkpoint["status"] == "committed" and not problems:
        return []
    lines: list[Block] = []
    for problem in problems:
        lines += one_problem(problem)
    if not problems and checkpoint["reason"]:
        lines.append(Line(f"  {checkpoint['reason']}", "red"))
    if instead is None:
        lines.append(Line("  no older usable checkpoint beside it", "yellow"))
    else:
        how = "every byte verified" if instead["verified"] else "by its manifest"
        which = f"{instead['step']} of run {instead['run_id']} ({how})"
        lines.append(Line(f"  nearest older usable step: {which}: {instead['url']}", "green"))
    return lines


def one_problem(problem: dict[str, Any]) -> list[Block]:
    tensor = f", tensor {problem['tensor']}" if problem["tensor"] else ""
    lines: list[Block] = [
        Line(f"  {problem['kind']}: {problem['message']}", "red"),
        Line(f"    file {problem['file']}{tensor}"),
    ]
    told = set()
    for what, unit in (("size", " bytes"), ("digest", "")):
        expected, actual = problem[f"expected_{what}"], problem[f"actual_{what}"]
        told.add(actual)
        if expected is not None or actual is not None:
            but = "" if actual is None else f", actual {actual}{unit}"
            lines.append(Line(f"    {what}: expected {expected}{unit}{but}"))
    if problem["actual"] is not None and problem["actual"] not in told:
        parts = {"digest": "digest of the chunk: ", "header": "digest of the header: "}
        part = parts.get(problem["kind"], "")
        lines.append(Line(f"    {part}expected {problem['expected']}, actual {problem['actual']}"))
    return lines
