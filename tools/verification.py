"""`ckpt verify`: read every byte of checkpoints and say what is not as it was saved."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from ckptcore import restore_candidates

from . import facts
from .cli import command, flag
from .failures import BAD, GOOD
from .lookup import Found, Root, fallback, on_path
from .render import Block, Line, Progress, Report, count, size
from .sharing import mends, same_files
from .subject import PUBLISHED, Subject, problem_lines

Checked = dict[str, tuple[Subject, float]]  # by name; seconds that it took


@command("ckpt verify runs/a", "ckpt verify runs/a --all --json")
@on_path
@flag("--all", "Every checkpoint of a root, not only what restore would look at.", "everything")
def verify_command(found: Found, everything: bool) -> Report:
    """Read and check every byte of the checkpoint PATH. When PATH is a root, of the checkpoint that
    restore would take.

    What restore would pass over for it, because it is damaged or was never committed, is named, and
    the exit code is 1.
    """
    checked: Checked = {}
    skipped = []
    taken = None
    if isinstance(found, Root):
        for info in restore_candidates(found.entries):
            if check(found.subject(info), checked).good:
                taken = info.name
                break
        for info in found.entries if everything else ():
            if info.status in PUBLISHED and info.name not in checked:
                check(found.subject(info), checked)
        # What was committed and is damaged now is a finding; what was never committed is a
        # leftover, unless it is what `restore` would look at first.
        skipped = [i for i in found.entries if i.status not in PUBLISHED and i.name not in checked]
        if everything:
            checked = {i.name: checked[i.name] for i in found.entries if i.name in checked}
    else:
        check(found, checked)
    subjects = [subject for subject, _ in checked.values()]
    if len(subjects) == 1 and subjects[0].error is not None:
        raise subjects[0].error
    wrong = [subject for subject in subjects if not subject.good]
    document = {
        "path": found.url,
        "ok": bool(subjects) and not wrong,
        "restores": taken,
        "checkpoints": [verified(subject, checked) for subject in subjects],
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


def check(subject: Subject, checked: Checked) -> Subject:
    start = perf_counter()
    with subject, Progress(subject.name) as progress:
        subject.verify(progress)
    checked[subject.name] = subject, perf_counter() - start
    return subject


def verified(subject: Subject, checked: Checked) -> dict[str, Any]:
    same = same_files(subject)
    return {
        "checkpoint": facts.checkpoint(subject.info),
        "ok": subject.good,
        "problems": subject.problems,
        "same_files": same,
        "mend": mends(subject, same),
        "fallback": None if subject.good else fallback(subject, True, checked),
        "seconds": round(checked[subject.name][1], 6),
    }


def describe(document: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for each in document["checkpoints"]:
        checkpoint, name = each["checkpoint"], each["checkpoint"]["name"]
        if each["ok"]:
            what = f"{size(checkpoint['size_bytes'])} in {count(checkpoint['files'], 'file')}"
            blocks.append(Line(f"{name}  ok  {what}", "green"))
            continue
        blocks += [Line(f"{name}  {checkpoint['status']}", "bold red"), *problem_lines(each)]
        for file, others in each["same_files"].items():
            text = f"  {file} is one file with {', '.join(others)}: damaged there, too"
            blocks.append(Line(text, "red"))
        blocks += [Line(f"  mend: {mend}", "green") for mend in each["mend"]]
    if document["restores"] and any(not each["ok"] for each in document["checkpoints"]):
        blocks.append(Line(f"restore would take {document['restores']}"))
    for entry in document["skipped"]:
        why = f"{entry['status']}, not checked: {entry['reason'] or 'no manifest'}"
        blocks.append(Line(f"{entry['name']}  {why}", "yellow"))
    return blocks
