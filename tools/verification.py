"""`ckpt verify`: read every byte of checkpoints and say what is not as it was saved.

JSON: {"path", "ok", "checkpoints": [{"checkpoint", "ok", "problems", "fallback", "seconds"}, ...], "skipped":
[entry, ...]}, parts as in facts.py. "skipped" are leftovers of saves that never became a checkpoint.
Exit code: 0 when all that was looked at is good, 4 when the storage alone was in the way, else 1.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from . import facts
from .failures import BAD, GOOD
from .lookup import PUBLISHED, Root, fallback, newest, resolve, subject_of
from .problems import problem_lines
from .render import Block, Line, Report, count, size
from .subject import Options, Subject

if TYPE_CHECKING:
    from ckptcore import CheckpointInfo


def verify(url: str, options: Options, everything: bool = False) -> Report:
    """`url` is a checkpoint, or a root: then its newest checkpoint, or all of them with `everything`."""
    found = resolve(url, options)
    skipped: list[CheckpointInfo] = []
    if isinstance(found, Root):
        # What was committed and is damaged now is a finding; what was never committed is a leftover.
        whole = [info for info in found.entries if info.status in PUBLISHED]
        chosen = newest(found.entries, *PUBLISHED)
        subjects = [subject_of(info, options, found.typed) for info in whole if everything or info is chosen]
        skipped = [info for info in found.entries if info not in whole]
    else:
        subjects = [found]
    if len(subjects) == 1 and subjects[0].error is not None:
        raise subjects[0].error
    checks = [check(subject) for subject in subjects]
    bad = [subject for subject in subjects if not subject.good]
    document = {
        "path": found.url,
        "ok": bool(checks) and not bad,
        "checkpoints": checks,
        "skipped": [facts.entry(info, latest=False) for info in skipped],
    }
    if not checks:
        return Report(document, describe(document), BAD, f"no committed checkpoint in {found.url}")
    # Damage is certain, a storage that refuses may be a passing matter: the former decides the exit code.
    code = min((subject.exit_code for subject in bad), default=GOOD)
    complaint = ", ".join(f"{subject.name} is {subject.status}" for subject in bad)
    return Report(document, describe(document), code, complaint or None)


def check(subject: Subject) -> dict[str, Any]:
    start = perf_counter()
    with subject:
        subject.verify()
    seconds = perf_counter() - start
    return {
        "checkpoint": subject.document(),
        "ok": subject.good,
        "problems": subject.problems,
        "fallback": None if subject.good else fallback(subject, verify=True),
        "seconds": round(seconds, 6),
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
    for entry in document["skipped"]:
        blocks.append(
            Line(f"{entry['name']}  {entry['status']}, not checked: {entry['reason'] or 'no manifest'}", "yellow")
        )
    return blocks
