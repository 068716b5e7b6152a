"""`ckpt doctor`: what is wrong in a root, what `restore` would do, and the command that mends
it."""

from __future__ import annotations

import shlex
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

from .cli import LOCATION, command
from .failures import BAD, GOOD
from .lookup import Root, newest, resolve, subject_of
from .render import Block, Line, Report, count, size
from .subject import Options, Subject

USABLE = "committed"


@command("ckpt doctor runs/a", "ckpt doctor runs/a --tier s3://bucket/run-a --verify")
@click.argument("path", metavar="ROOT", type=LOCATION)
@click.option("--verify", is_flag=True, help="Read every byte of what restore would take.")
@click.option(
    "--tier", "tiers", multiple=True, metavar="ROOT", help="Another root with the same checkpoints."
)
def doctor_command(path: str, verify: bool, tiers: tuple[str, ...], options: Options) -> Report:
    """What is wrong in ROOT, what restore would do now, and the command that mends it. Changes
    nothing. Exits with 0 when nothing needs doing."""
    found = resolve(path, options)
    if isinstance(found, Root):
        return _report(found, options, verify, tiers)
    root = Root(found.typed, found.url, [])
    with found:
        if verify:
            found.verify()
        findings = [] if found.good else [_damage(root, found, None, {}, found.typed)]
    return _finish(found.url, findings, None, [], found.name if found.good else None)


def _report(root: Root, options: Options, verify: bool, tiers: tuple[str, ...]) -> Report:
    taken, _ = newest(root.entries)
    elsewhere = _in_tiers(tiers, options)
    findings: list[dict[str, Any]] = []
    for info in root.entries:
        if info.status in (USABLE, "partial"):
            continue
        subject = subject_of(info, options, root.typed)
        findings.append(_damage(root, subject, taken, elsewhere, join_url(root.typed, info.name)))
    if taken is not None and verify:
        with subject_of(taken, options, root.typed) as subject:
            subject.verify()
            if not subject.good:
                place = join_url(root.typed, taken.name)
                findings.append(_damage(root, subject, None, elsewhere, place))
    findings += [_leftover(root, left) for left in find_leftovers(root.typed, options)]
    findings += _notes(root, taken, options)
    runs = sorted({info.run_id for info in root.entries if info.run_id})
    return _finish(root.url, findings, taken, runs, taken.name if taken else None)


def _finish(
    url: str,
    findings: list[dict[str, Any]],
    taken: CheckpointInfo | None,
    runs: list[str],
    restores: str | None,
) -> Report:
    needs = [finding for finding in findings if finding["severity"] == "problem"]
    if restores is None and not needs:
        needs = findings
    document = {
        "path": url,
        "ok": not needs and restores is not None,
        "restores": restores,
        "run_id": taken.run_id if taken else None,
        "runs": runs,
        "findings": findings,
    }
    good = document["ok"]
    complaint = None if good else f"{count(len(needs), 'finding')} in {url}"
    return Report(document, describe(document), GOOD if good else BAD, complaint)


def _in_tiers(tiers: tuple[str, ...], options: Options) -> dict[str, dict[str, str]]:
    """Where committed checkpoints lie in other roots, by name and digest of the manifest."""
    found: dict[str, dict[str, str]] = {}
    for tier in tiers:
        for info in scan_root(tier, options):
            if info.status == USABLE and info.manifest is not None:
                at = join_url(tier, info.name)
                found.setdefault(info.name, {}).setdefault(info.manifest.digest, at)
    return found


def _finding(
    name: str, kind: str, severity: str, message: str, mend: list[str], nbytes: int | None = None
) -> dict[str, Any]:
    known = {"name": name, "kind": kind, "severity": severity, "message": message}
    return known | {"mend": mend, "size_bytes": nbytes}


def _damage(
    root: Root,
    subject: Subject,
    taken: CheckpointInfo | None,
    elsewhere: dict[str, dict[str, str]],
    place: str,
) -> dict[str, Any]:
    with subject:
        reason = subject.reason or "no reason known"
        if subject.status == "unreadable":
            return _finding(subject.name, "unreadable", "problem", reason, [])
        if subject.status == "unsupported":
            return _finding(
                subject.name, "unsupported", "problem", reason, ["pip install --upgrade ckptcore"]
            )
        here = shlex.quote(place)
        if "looks like" in reason:
            message = f"{reason}; restore passes over it"
            target = shlex.quote(f"{place}-imported")
            return _finding(
                subject.name, "foreign", "note", message, [f"ckpt import {here} {target}"]
            )
        mend = []
        there = elsewhere.get(subject.name, {})
        if subject.manifest is not None:  # another commit of this name is no cure
            there = {d: at for d, at in there.items() if d == subject.manifest.digest}
        for place in there.values():
            mend.append(f"ckpt cp {shlex.quote(place)} {here} --overwrite")
        if taken is not None:
            step = subject.step
            message = (
                f"{reason}; restore goes on from step {taken.step}, and the next save of step "
                f"{step} replaces it"
            )
        else:
            message = reason
        if subject.pinned:
            mend.append(f"ckpt unpin {here}")
        mend.append(f"ckpt rm {here} --damaged --yes")
        return _finding(subject.name, subject.status, "problem", message, mend)


def _leftover(root: Root, left: Leftover) -> dict[str, Any]:
    message = f"{left.reason}; {left.writer}"
    if not left.abandoned:
        message += "; it is left alone until nobody can be at it"
        return _finding(left.name, "in_progress", "note", message, [], left.nbytes)
    mend = [f"ckpt prune {shlex.quote(root.typed)} --partials --yes"]
    return _finding(left.name, "leftover", "problem", message, mend, left.nbytes)


def _notes(root: Root, taken: CheckpointInfo | None, options: Options) -> list[dict[str, Any]]:
    """What is no damage, and good to know."""
    notes = []
    left = [info for info in root.entries if info.abandoned]
    if left:
        steps = ", ".join(str(info.step) for info in left)
        message = f"steps {steps} are of a branch that the run went back behind: never the newest"
        nbytes = sum(info.size_bytes or 0 for info in left)
        notes.append(_finding(left[0].name, "abandoned", "note", message, [], nbytes))
    try:
        free = open_storage(root.typed, options).free_bytes()
    except CheckpointError:
        free = None
    if taken is not None and free is not None and free < 2 * (taken.size_bytes or 0):
        message = f"{size(free)} are free, less than two more saves of {size(taken.size_bytes)}"
        mend = [f"ckpt prune {shlex.quote(root.typed)} --keep last=2"]
        notes.append(_finding(taken.name, "space", "problem", message, mend, free))
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
    if document["ok"]:
        blocks.append(Line("nothing needs doing", "green"))
    return blocks
