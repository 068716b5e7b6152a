"""`ckpt doctor`: what is wrong in a root, what `restore` would do, and the command that mends
it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from ckptcore import (
    CheckpointError,
    CheckpointInfo,
    Leftover,
    find_leftovers,
    join_url,
    open_storage,
    scan_root,
)

from .cli import LOCATION, command, flag, repeated
from .failures import BAD, GOOD
from .lookup import Root, around, resolve
from .render import Block, Line, Report, count, size
from .sharing import mends, same_files
from .subject import Options, Subject

# By root and digest of the manifest, where a checkpoint of this name lies elsewhere.
Elsewhere = dict[str, dict[str, str]]


@command("ckpt doctor runs/a", "ckpt doctor runs/a --tier s3://bucket/run-a --verify")
@click.argument("path", metavar="ROOT", type=LOCATION)
@flag("--verify", "Read every byte of what restore would take.")
@repeated("--tier", "ROOT", "Another root with the same checkpoints.", "tiers")
def doctor_command(path: str, verify: bool, tiers: tuple[str, ...], options: Options) -> Report:
    """What is wrong in ROOT, what restore would do now, and the command that mends it. Changes
    nothing. Exits with 0 when nothing needs doing."""
    found = resolve(path, options)
    taken, runs = None, []
    if isinstance(found, Root):
        taken = found.newest()[0]
        runs = sorted({info.run_id for info in found.entries if info.run_id})
        findings = in_root(found, taken, verify, _in_tiers(tiers, options))
        restores = taken.name if taken else None
    elif found.status == "unreadable" and found.error is not None:
        raise found.error
    else:
        with found:
            if verify:
                found.verify()
            findings = [] if found.good else _with_damage(found, {})
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


def in_root(
    root: Root, taken: CheckpointInfo | None, verify: bool, elsewhere: Elsewhere
) -> list[dict[str, Any]]:
    findings = []
    for info in root.entries:
        if info.status not in ("committed", "partial"):
            findings.append(damage(root.subject(info), taken, elsewhere))
    if taken is not None and verify:
        with root.subject(taken) as subject:
            subject.verify()
            if not subject.good:
                findings += _with_damage(subject, elsewhere)
    findings += [_leftover(root, left) for left in find_leftovers(root.typed, root.options)]
    return findings + _notes(root, taken)


def _in_tiers(tiers: tuple[str, ...], options: Options) -> Elsewhere:
    """Where committed checkpoints lie in other roots, by name and digest of the manifest."""
    found: Elsewhere = {}
    for tier in tiers:
        for info in scan_root(tier, options):
            if info.status == "committed" and info.manifest is not None:
                at = join_url(tier, info.name)
                found.setdefault(info.name, {}).setdefault(info.manifest.digest, at)
    return found


def _finding(
    name: str, kind: str, message: str, *mend: str, problem: bool = True, nbytes: int | None = None
) -> dict[str, Any]:
    severity = "problem" if problem else "note"
    known = {"name": name, "kind": kind, "severity": severity, "message": message}
    return known | {"mend": list(mend), "size_bytes": nbytes}


def _with_damage(subject: Subject, elsewhere: Elsewhere) -> list[dict[str, Any]]:
    """What was read and is damaged, and the checkpoints beside it that have the same file."""
    same = same_files(subject)
    first = mends(subject, same)
    reason = subject.info.reason or ""
    for file, others in same.items():
        reason += f"; {file} is one file with {', '.join(others)}: damaged there, too"
    subject.info = replace(subject.info, reason=reason)
    findings = [damage(subject, None, elsewhere, first)]
    root = around(subject)
    for info in root.entries:
        inside = [f for f, others in same.items() if any(_in(info.name, path) for path in others)]
        if inside:
            files = ", ".join(f"{subject.name}/{file}" for file in inside)
            info = replace(info, status="damaged", reason=f"it has the damaged {files}, too")
            other = Subject(join_url(root.typed, info.name), info, subject.options)
            findings.append(damage(other, None, elsewhere, first))
    return findings


def _in(folder: str, path: str) -> bool:
    return path.partition("/")[0] == folder


def damage(
    subject: Subject, taken: CheckpointInfo | None, elsewhere: Elsewhere, first: Sequence[str] = ()
) -> dict[str, Any]:
    """first: commands that mend it, before those that are known of every damage."""
    name, status, info, here = (
        subject.name,
        subject.status,
        subject.info,
        shlex.quote(subject.typed),
    )
    reason = info.reason or "no reason known"
    if status == "unreadable":
        return _finding(name, status, reason)
    if status == "unsupported":
        return _finding(name, status, reason, "pip install --upgrade ckptcore")
    if "looks like" in reason:
        target = shlex.quote(f"{subject.typed}-imported")
        what = f"{reason}; restore passes over it"
        return _finding(name, "foreign", what, f"ckpt import {here} {target}", problem=False)
    there = elsewhere.get(name, {})
    if info.manifest is not None:  # another commit of this name is no cure
        there = {digest: at for digest, at in there.items() if digest == info.manifest.digest}
    mend = [*first]
    mend += [f"ckpt cp {shlex.quote(at)} {here} --overwrite" for at in there.values()]
    mend += [f"ckpt unpin {here}"] * info.pinned
    if taken is not None:
        after = f"the next save of step {info.step} replaces it"
        reason += f"; restore goes on from step {taken.step}, and {after}"
    return _finding(name, status, reason, *mend, f"ckpt rm {here} --damaged --yes")


def _leftover(root: Root, left: Leftover) -> dict[str, Any]:
    message = f"{left.reason}; {left.writer}"
    if not left.abandoned:
        message += "; it is left alone until nobody can be at it"
        return _finding(left.name, "in_progress", message, problem=False, nbytes=left.nbytes)
    mend = f"ckpt prune {shlex.quote(root.typed)} --partials --yes"
    return _finding(left.name, "leftover", message, mend, nbytes=left.nbytes)


def _notes(root: Root, taken: CheckpointInfo | None) -> list[dict[str, Any]]:
    """What is no damage, and good to know."""
    notes = []
    if left := [info for info in root.entries if info.abandoned]:
        steps = ", ".join(str(info.step) for info in left)
        message = f"steps {steps} are of a branch that the run went back behind: never the newest"
        nbytes = sum(info.size_bytes or 0 for info in left)
        notes.append(_finding(left[0].name, "abandoned", message, problem=False, nbytes=nbytes))
    try:
        free = open_storage(root.typed, root.options).free_bytes()
    except CheckpointError:
        free = None
    if taken is not None and free is not None and free < 2 * (taken.size_bytes or 0):
        message = f"{size(free)} are free, less than two more saves of {size(taken.size_bytes)}"
        mend = f"ckpt prune {shlex.quote(root.typed)} --keep last=2"
        notes.append(_finding(taken.name, "space", message, mend, nbytes=free))
    return notes


def describe(document: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for finding in document["findings"]:
        style = "bold red" if finding["severity"] == "problem" else "yellow"
        nbytes = "" if finding["size_bytes"] is None else f", {size(finding['size_bytes'])}"
        blocks.append(
            Line(f"{finding['name']}  {finding['kind'].replace('_', ' ')}{nbytes}", style)
        )
        blocks.append(Line(f"  {finding['message']}"))
        for number, line in enumerate(finding["mend"]):
            blocks.append(Line(f"  {'mend:' if number == 0 else 'else:'} {line}", "green"))
    runs = document["runs"]
    if len(runs) > 1:
        marks = (f"{run} (saved last)" if run == document["run_id"] else run for run in runs)
        blocks.append(Line(f"runs: {', '.join(marks)}"))
    if document["restores"] is None:
        blocks.append(Line("there is nothing here that restore could take", "bold red"))
    else:
        of = f" of run {document['run_id']}" if document["run_id"] else ""
        blocks.append(Line(f"restore would take {document['restores']}{of}", "green"))
    return blocks
