"""One checkpoint that a command looks at: its facts, and everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from . import facts
from .failures import BAD, GOOD, STORAGE

if TYPE_CHECKING:
    from ckptcore import CheckpointError, CheckpointInfo, CheckpointManifest, CheckpointView

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
        from ckptcore import masked_url

        self.typed = url
        self.url = masked_url(url)  # as it may be shown
        self.name = name
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
        from ckptcore import CheckpointCorrupt, StorageError, UnsupportedVersion, open_checkpoint

        subject = cls(url, name, options)
        try:
            subject.view = open_checkpoint(url, storage_options=options)
            subject.manifest = subject.view.manifest
            subject.learn(subject.manifest)
            subject.check_sizes(subject.view)
        except CheckpointCorrupt as error:
            subject.add([problem_of_error(error, None)])
        except (StorageError, UnsupportedVersion) as error:
            kind = "storage" if isinstance(error, StorageError) else "version"
            subject.error = error
            subject.add([facts.problem_of(MANIFEST, kind, str(error))])
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

    def learn(self, source: CheckpointInfo | CheckpointManifest) -> None:
        """Step, sequence and run, where they are not known from the manifest itself; and whether it
        is pinned."""
        self.pinned = self.pinned or getattr(source, "pinned", False)
        if self.manifest is None or source is self.manifest:
            self.step, self.sequence, self.run_id = source.step, source.sequence, source.run_id

    def not_committed(self, info: CheckpointInfo) -> None:
        reason = info.reason or "the save or the copy did not finish"
        self.status, self.reason = info.status, reason
        self.problems = [facts.problem_of(MANIFEST, "missing", reason)]

    def add(self, problems: list[dict[str, Any]]) -> None:
        if not problems:
            return
        self.problems += problems
        kinds = {problem["kind"] for problem in self.problems}
        self.status = (
            NO_DAMAGE[kinds.pop()] if kinds <= NO_DAMAGE.keys() and len(kinds) == 1 else "damaged"
        )
        self.reason = self.reason or problems[0]["message"]

    def check_sizes(self, view: CheckpointView) -> None:
        """Every listed file must be there with its size: one listing, so even without --verify."""
        found = {entry.name: entry.size for entry in view.storage.list(view.folder)}
        self.pinned = PIN in found
        for name, record in view.manifest.files.items():
            if name not in found:
                problem = facts.problem_of(
                    name, "missing", f"{name} is missing", record.size, manifest=view.manifest
                )
            elif found[name] is None:
                problem = facts.problem_of(
                    name, "missing", f"{name} is not a file", record.size, manifest=view.manifest
                )
            elif found[name] != record.size:
                message = f"{name} has {found[name]} bytes, {record.size} were saved"
                problem = facts.problem_of(
                    name, "size", message, record.size, found[name], manifest=view.manifest
                )
            else:
                continue
            self.add([problem])

    def attempt(self, read: Callable[[], T]) -> T | None:
        """What `read` returns; None when damage prevents it, which is then one of the problems."""
        from ckptcore import CheckpointCorrupt

        try:
            return read()
        except CheckpointCorrupt as error:
            if error.file not in {problem["file"] for problem in self.problems}:
                self.add([problem_of_error(error, self.manifest)])
            return None

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every byte of a checkpoint that could be opened. progress: see
        CheckpointView.verify."""
        view = self.view
        if view is None:
            return
        found = [
            facts.problem(problem, self.manifest)
            for problem in self.attempt(lambda: view.verify(progress=progress)) or []
        ]
        # What the look at the sizes found is found again, with more to say.
        again = {problem["file"] for problem in found}
        self.problems = [problem for problem in self.problems if problem["file"] not in again]
        self.add(found)

    def document(self) -> dict[str, Any]:
        """The `checkpoint` document of facts.py."""
        header: dict[str, Any] = {
            "name": self.name,
            "url": self.url,
            "status": self.status,
            "reason": self.reason,
            "pinned": self.pinned,
            "step": self.step,
            "run_id": self.run_id,
            "sequence": self.sequence,
        }
        return header | facts.checkpoint(self.manifest) if self.manifest else header

    def entry(self) -> dict[str, Any]:
        """The `entry` document of facts.py."""
        known = self.document()
        names = "name url step status reason pinned size_bytes created run_id sequence node"
        found = {name: known.get(name) for name in names.split()}
        return found | {"latest": False, "abandoned": False, "metrics": known.get("metrics", {})}


def problem_of_error(error: Any, manifest: CheckpointManifest | None) -> dict[str, Any]:
    """A CheckpointCorrupt as a `problem` document."""
    return facts.problem_of(
        error.file or MANIFEST,
        error.kind or "format",
        str(error),
        error.expected,
        error.actual,
        error.tensor,
        manifest=manifest,
    )
