"""`ckpt doctor`: what is wrong in a root, what `restore` would do, and the command that mends
it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ckptcore import (
    CheckpointError,
    CheckpointInfo,
    Leftover,
    find_leftovers,
    join_url,
    open_storage,
    scan_root,
)

from .cli import command, flag, repeated
from .failures import BAD, GOOD
from .lookup import Found, Root, around, on_path
from .render import Block, Line, Report, count, size
from .sharing import mends, same_files
from .subject import Options, Subject

Finding = dict[str, Any]
# By name and digest of the manifest, where else a checkpoint lies.
Elsewhere = dict[tuple[str, str], str]


@command("ckpt doctor runs/a", "ckpt doctor runs/a --tier s3://bucket/run-a --verify")
@partial(on_path, metavar="ROOT")
@flag("--verify", "Read every byte of what restore would take.")
@repeated("--tier", "ROOT", "Another root with the same checkpoints.", "tiers")
def doctor_command(found: Found, verify: bool, tiers: tuple[str, ...]) -> Report:
    """What is wrong in ROOT, what restore would do now, and the command that mends it. Changes
    nothing. Exits with 0 when nothing needs doing."""
    taken, runs = None, []
    if isinstance(found, Root):
        taken = found.newest()[0]
        runs = sorted({info.run_id for info in found.entries if info.run_id})
        elsewhere = in_tiers(tiers, found.options)
        findings = [*in_root(found, taken, elsewhere)]
        if taken is not None and verify:
            findings = read(found.subject(taken), elsewhere) + findings
        restores = taken.name if taken else None
    else:
        if found.status == "unreadable" and found.error is not None:
            raise found.error
        findings = read(found, {}, verify)
        restores = found.name if found.good else None
    needs = [finding for finding in findings if finding["severity"] == "problem"]
    if restores is None and not needs:
        needs = findings
    document = {
        "path": found.url,
        "ok": not needs and restores is not None,
        "restores": restores,
        "run_id": taken.run_id if taken else None,
        "runs": runs,
        "findings": findings,
    }
    blocks = describe(document)
    if document["ok"]:
        unread = "" if verify else ", as far as names and sizes show: --verify reads every byte"
        blocks.append(Line(f"nothing needs doing{unread}", "green"))
    complaint = None if document["ok"] else f"{count(len(needs), 'finding')} in {found.url}"
    return Report(document, blocks, BAD if complaint else GOOD, complaint)


def in_tiers(tiers: tuple[str, ...], options: Options) -> Elsewhere:
    return {
        (info.name, info.manifest.digest): join_url(tier, info.name)
        for tier in reversed(tiers)
        for info in scan_root(tier, options)
        if info.status == "committed" and info.manifest is not None
    }


def in_root(root: Root, taken: CheckpointInfo | None, elsewhere: Elsewhere) -> Iterator[Finding]:
    """What a listing shows."""
    for info in root.entries:
        if info.status not in ("committed", "partial"):
            yield damage(root.subject(info), taken, elsewhere)
    yield from (_leftover(root, left) for left in find_leftovers(root.typed, root.options))
    if left := [info for info in root.entries if info.abandoned]:
        steps = ", ".join(str(info.step) for info in left)
        message = f"steps {steps} are of a branch that the run went back behind: never the newest"
        nbytes = sum(info.size_bytes or 0 for info in left)
        yield _finding(left[0].name, "abandoned", message, problem=False, nbytes=nbytes)
    try:
        free = open_storage(root.typed, root.options).free_bytes()
    except CheckpointError:
        free = None
    if taken is not None and free is not None and free < 2 * (taken.size_bytes or 0):
        message = f"{size(free)} are free, less than two more saves of {size(taken.size_bytes)}"
        mend = f"ckpt prune {shlex.quote(root.typed)} --keep last=2"
        yield _finding(taken.name, "space", message, mend, nbytes=free)


def read(subject: Subject, elsewhere: Elsewhere, every_byte: bool = True) -> list[Finding]:
    """What is damaged in a checkpoint, and those beside it that have the same file."""
    with subject:
        if every_byte:
            subject.verify()
    if subject.good:
        return []
    same = same_files(subject)
    first = mends(subject, same)
    reason = subject.info.reason or ""
    for file, others in same.items():
        reason += f"; {file} is one file with {', '.join(others)}: damaged there, too"
    subject.info = replace(subject.info, reason=reason)
    findings = [damage(subject, None, elsewhere, first)]
    by_folder: dict[str, list[str]] = {}
    for file, paths in same.items():
        for path in paths:
            by_folder.setdefault(path.partition("/")[0], []).append(f"{subject.name}/{file}")
    root = around(subject)
    for info in root.entries:
        if files := by_folder.get(info.name):
            why = f"it has the damaged {', '.join(files)}, too"
            other = replace(info, status="damaged", reason=why)
            beside = Subject(join_url(root.typed, info.name), other, subject.options)
            findings.append(damage(beside, None, elsewhere, first))
    return findings


def damage(
    subject: Subject, taken: CheckpointInfo | None, elsewhere: Elsewhere, first: Sequence[str] = ()
) -> Finding:
    """first: commands that mend it, before those that are known of every damage."""
    name, status, info = subject.name, subject.status, subject.info
    here, reason = shlex.quote(subject.typed), info.reason or "no reason known"
    if status == "unreadable":
        return _finding(name, status, reason)
    if status == "unsupported":
        return _finding(name, status, reason, "pip install --upgrade ckptcore")
    if "looks like" in reason:
        into = f"ckpt import {here} {shlex.quote(f'{subject.typed}-imported')}"
        return _finding(name, "foreign", f"{reason}; restore passes over it", into, problem=False)
    # Another commit of this name is no cure.
    cures = [
        at
        for (other, digest), at in elsewhere.items()
        if other == name and digest == (info.manifest.digest if info.manifest else digest)
    ]
    mend = [*first, *(f"ckpt cp {shlex.quote(at)} {here} --overwrite" for at in cures)]
    mend += [f"ckpt unpin {here}"] * info.pinned
    if taken is not None:
        after = f"the next save of step {info.step} replaces it"
        reason += f"; restore goes on from step {taken.step}, and {after}"
    return _finding(name, status, reason, *mend, f"ckpt rm {here} --damaged --yes")


def _leftover(root: Root, left: Leftover) -> Finding:
    message = f"{left.reason}; its writer: {left.writer}"
    if not left.abandoned:
        message += "; it stays until it is sure that nobody writes it"
        return _finding(left.name, "in_progress", message, problem=False, nbytes=left.nbytes)
    mend = f"ckpt prune {shlex.quote(root.typed)} --partials --yes"
    return _finding(left.name, "leftover", message, mend, nbytes=left.nbytes)


def _finding(
    name: str, kind: str, message: str, *mend: str, problem: bool = True, nbytes: int | None = None
) -> Finding:
    severity = "problem" if problem else "note"
    known = {"name": name, "kind": kind, "severity": severity, "message": message}
    return known | {"mend": list(mend), "size_bytes": nbytes}


def describe(document: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for finding in document["findings"]:
        style = "bold red" if finding["severity"] == "problem" else "yellow"
        nbytes = "" if finding["size_bytes"] is None else f", {size(finding['size_bytes'])}"
        kind = finding["kind"].replace("_", " ")
        blocks += [
            Line(f"{finding['name']}  {kind}{nbytes}", style),
            Line(f"  {finding['message']}"),
        ]
        for number, line in enumerate(finding["mend"]):
            blocks.append(Line(f"  {'mend:' if number == 0 else 'else:'} {line}", "green"))
    runs = document["runs"]
    if len(runs) > 1:
        marks = (f"{run} (saved last)" if run == document["run_id"] else run for run in runs)
        blocks.append(Line(f"runs: {', '.join(marks)}"))
    if document["restores"] is None:
        return [*blocks, Line("there is nothing here that restore could take", "bold red")]
    of = f" of run {document['run_id']}" if document["run_id"] else ""
    return [*blocks, Line(f"restore would take {document['restores']}{of}", "green")]
