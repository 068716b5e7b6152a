"""`ckpt verify`: read every byte of checkpoints and say what is not as it was saved.

JSON: {"path", "ok", "restores": name or null, "checkpoints": [{"checkpoint", "ok", "problems",
"fallback", "seconds"}, ...], "skipped": [entry, ...]}, parts as in facts.py. Of a root,
"checkpoints" are those that `restore` would pass over, the newest first, then the one that it would
take; with --all all, the oldest first. "restores" is the name of that one; null where there is
none, and where PATH is no root. "skipped" are leftovers of saves that never became a checkpoint.
Exit code: 0 when all that was looked at is good, 4 when the storage alone was in the way, else 1.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from . import facts
from .failures import BAD, GOOD
from .lookup import PUBLISHED, Root, fallback, settled, subject_of
from .output import progress_bar
from .problems import problem_lines
from .render import Block, Line, Report, count, size
from .subject import Options, Subject

if TYPE_CHECKING:
    from ckptcore import CheckpointInfo


def verify(url: str, options: Options, everything: bool = False) -> Report:
    """`url` is a checkpoint, or a root: then what `restore` would take and what it would pass over
    for that, or all checkpoints with `everything`."""
    return settled(url, options, lambda found: verify_found(found, options, everything))


def verify_found(found: Subject | Root, options: Options, everything: bool) -> Report:
    skipped: list[CheckpointInfo] = []
    taken: Subject | None = None
    seconds: dict[str, float] = {}
    if isinstance(found, Root):
        passed, taken = tried(found, options, seconds)
        subjects = [*passed, *([taken] if taken else [])]
        if everything:
            names = {subject.name for subject in subjects}
            rest = [
                info
                for info in found.entries
                if info.status in PUBLISHED and info.name not in names
            ]
            subjects += [checked(subject_of(info, options, found.typed), seconds) for info in rest]
            order = [info.name for info in found.entries]
            subjects.sort(key=lambda subject: order.index(subject.name))
        # What was committed and is damaged now is a finding; what was never committed is a
        # leftover, unless it is what `restore` would look at first.
        names = {subject.name for subject in subjects}
        skipped = [i for i in found.entries if i.status not in PUBLISHED and i.name not in names]
    else:
        subjects = [checked(found, seconds)]
    if len(subjects) == 1 and subjects[0].error is not None:
        raise subjects[0].error
    bad = [subject for subject in subjects if not subject.good]
    document = {
        "path": found.url,
        "ok": bool(subjects) and not bad,
        "restores": taken.name if taken else None,
        "checkpoints": [outcome(subject, subjects, seconds) for subject in subjects],
        "skipped": [facts.entry(info, latest=False) for info in skipped],
    }
    if not subjects:
        return Report(document, describe(document), BAD, f"no committed checkpoint in {found.url}")
    # Damage is certain, a storage that refuses may be a passing matter: the former decides the exit
    # code.
    code = min((subject.exit_code for subject in bad), default=GOOD)
    complaint = ", ".join(f"{subject.name} is {subject.status}" for subject in bad)
    return Report(document, describe(document), code, complaint or None)


def tried(
    root: Root, options: Options, seconds: dict[str, float]
) -> tuple[list[Subject], Subject | None]:
    """What `restore` would look at before it finds one whose bytes verify, and that one."""
    from ckptcore import restore_candidates

    passed: list[Subject] = []
    for info in restore_candidates(root.entries):
        subject = checked(subject_of(info, options, root.typed), seconds)
        if subject.good:
            return passed, subject
        passed.append(subject)
    return passed, None


def checked(subject: Subject, seconds: dict[str, float]) -> Subject:
    """The subject, after every byte of it was read. seconds: gets how long that took, by name."""
    start = perf_counter()
    with subject, progress_bar(subject.name) as advance:
        subject.verify(advance)
    seconds[subject.name] = perf_counter() - start
    return subject


def outcome(subject: Subject, known: list[Subject], seconds: dict[str, float]) -> dict[str, Any]:
    by_name = {each.name: each for each in known}
    return {
        "checkpoint": subject.document(),
        "ok": subject.good,
        "problems": subject.problems,
        "fallback": None if subject.good else fallback(subject, True, by_name),
        "seconds": round(seconds[subject.name], 6),
    }


def describe(document: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for each in document["checkpoints"]:
        checkpoint = each["checkpoint"]
        if each["ok"]:
            what = f"{size(checkpoint['size_bytes'])} in {count(checkpoint['files'], 'file')}"
            blocks.append(Line(f"{checkpoint['name']}  ok  {what}", "green"))
        else:
            blocks.append(Line(f"{checkpoint['name']}  {checkpoint['status']}", "bold red"))
            blocks += problem_lines(each["problems"], each["fallback"], checkpoint)
    if document["restores"] and any(not each["ok"] for each in document["checkpoints"]):
        blocks.append(Line(f"restore would take {document['restores']}"))
    for entry in document["skipped"]:
        blocks.append(
            Line(
                f"{entry['name']}  {entry['status']}, not checked: "
                f"{entry['reason'] or 'no manifest'}",
                "yellow",
            )
        )
    return blocks
