"""`ckpt verify`: read every byte of checkpoints and say what is not as it was saved."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import click

from ckptcore import restore_candidates

from . import facts
from .cli import command
from .failures import BAD, GOOD
from .lookup import PUBLISHED, Found, Root, fallback, on_path
from .output import progress_bar
from .render import Block, Line, Report, count, size
from .sharing import shared_damage, shared_lines
from .subject import Subject, problem_lines


@command("ckpt verify runs/a", "ckpt verify runs/a --all --json")
@on_path
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Every checkpoint of a root, not only what restore would look at.",
)
def verify_command(found: Found, everything: bool) -> Report:
    """Read and check every byte of the checkpoint PATH. When PATH is a root, of the checkpoint that
    restore would take.

    What restore would pass over for it, because it is damaged or was never committed, is named, and
    the exit code is 1.
    """
    seconds: dict[str, float] = {}
    skipped = []
    taken: Subject | None = None
    if isinstance(found, Root):
        subjects = tried(found, seconds)
        taken = subjects[-1] if subjects and subjects[-1].good else None
        if everything:
            known = {subject.name: subject for subject in subjects}
            subjects = [
                known.get(info.name) or checked(found.subject(info), seconds)
                for info in found.entries
                if info.status in PUBLISHED or info.name in known
            ]
        # What was committed and is damaged now is a finding; what was never committed is a
        # leftover, unless it is what `restore` would look at first.
        names = {subject.name for subject in subjects}
        skipped = [i for i in found.entries if i.status not in PUBLISHED and i.name not in names]
    else:
        subjects = [checked(found, seconds)]
    if len(subjects) == 1 and subjects[0].error is not None:
        raise subjects[0].error
    wrong = [subject for subject in subjects if not subject.good]
    by_name = {subject.name: subject for subject in subjects}
    document = {
        "path": found.url,
        "ok": bool(subjects) and not wrong,
        "restores": taken.name if taken else None,
        "checkpoints": [
            {
                "checkpoint": facts.checkpoint(subject.info),
                "ok": subject.good,
                "problems": subject.problems,
                **shared_damage(subject),
                "fallback": None if subject.good else fallback(subject, True, by_name),
                "seconds": round(seconds[subject.name], 6),
            }
            for subject in subjects
        ],
        "skipped": [facts.entry(info) for info in skipped],
    }
    blocks = describe(document)
    if not subjects:
        return Report(document, blocks, BAD, f"no committed checkpoint in {found.url}")
    # Damage is certain, a storage that refuses may be a passing matter: the former decides the exit
    # code.
    code = min((subject.exit_code for subject in wrong), default=GOOD)
    complaint = ", ".join(f"{subject.name} is {subject.status}" for subject in wrong)
    return Report(document, blocks, code, complaint or None)


def tried(root: Root, seconds: dict[str, float]) -> list[Subject]:
    """What `restore` would read until it finds one whose bytes verify, that one last."""
    subjects: list[Subject] = []
    for info in restore_candidates(root.entries):
        subjects.append(checked(root.subject(info), seconds))
        if subjects[-1].good:
            break
    return subjects


def checked(subject: Subject, seconds: dict[str, float]) -> Subject:
    """The subject, after every byte of it was read. seconds: gets how long that took, by name."""
    start = perf_counter()
    with subject, progress_bar(subject.name) as advance:
        subject.verify(advance)
    seconds[subject.name] = perf_counter() - start
    return subject


def describe(document: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for each in document["checkpoints"]:
        checkpoint = each["checkpoint"]
        if each["ok"]:
            what = f"{size(checkpoint['size_bytes'])} in {count(checkpoint['files'], 'file')}"
            blocks.append(Line(f"{checkpoint['name']}  ok  {what}", "green"))
        else:
            blocks.append(Line(f"{checkpoint['name']}  {checkpoint['status']}", "bold red"))
            blocks += problem_lines(each)
            blocks += shared_lines(each)
    if document["restores"] and any(not each["ok"] for each in document["checkpoints"]):
        blocks.append(Line(f"restore would take {document['restores']}"))
    for entry in document["skipped"]:
        why = f"{entry['status']}, not checked: {entry['reason'] or 'no manifest'}"
        blocks.append(Line(f"{entry['name']}  {why}", "yellow"))
    return blocks
