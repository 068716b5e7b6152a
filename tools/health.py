"""`ckpt verify` and `ckpt doctor`: what is not as it was saved, what is wrong in a root, what
`restore` would do, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from shlex import quote
from time import perf_counter
from typing import Any

import ckptcore as engine
from ckptcore import CheckpointInfo, Leftover

from . import facts
from .cli import command, flag, repeated
from .failures import BAD, GOOD
from .lookup import PUBLISHED, Found, Options, Subject, around, fallback, on_path, problem_lines
from .render import Block, Line, Progress, Report, count, size

Row = dict[str, Any]


@command("ckpt verify runs/a", "ckpt verify runs/a --all --json")
@on_path
@flag("--all", "Every checkpoint of a root, not only what restore would look at.", "everything")
def verify_command(found: Found, everything: bool) -> Report:
    """Read and check every byte of the checkpoint PATH. When PATH is a root, of the checkpoint that
    restore would take.

    What restore would pass over for it, because it is damaged or was never committed, is named, and
    the exit code is 1.
    """
    checked: dict[str, Subject] = {}
    seconds: dict[str, float] = {}

    def check(info: CheckpointInfo) -> bool:
        start, subject = perf_counter(), found.subject(info)
        with subject, Progress(subject.name) as progress:
            subject.verify(progress)
        checked[info.name], seconds[info.name] = subject, perf_counter() - start
        return subject.good

    taken = None
    if found.one is not None:
        check(found.one.info)
    else:
        candidates = engine.restore_candidates(found.entries)
        taken = next((info.name for info in candidates if check(info)), None)
    left = [info for info in found.entries if info.name not in checked]
    for info in left if everything else ():
        if info.status in PUBLISHED:
            check(info)
    # What was committed and is damaged now is a finding; what was never committed is a leftover,
    # unless it is what `restore` would look at first.
    skipped = [info for info in left if info.status not in PUBLISHED]
    subjects = [*checked.values()]
    if everything:
        subjects = [checked[info.name] for info in found.entries if info.name in checked]
    if len(subjects) == 1:
        subjects[0].check_known()
    wrong = [subject for subject in subjects if not subject.good]
    document = {
        "path": found.url,
        "ok": bool(subjects) and not wrong,
        "restores": taken,
        "checkpoints": [verified(each, checked, seconds[each.name]) for each in subjects],
        "skipped": [facts.entry(info) for info in skipped],
    }
    if not subjects:
        why = f"no committed checkpoint in {found.url}"
        return Report(document, verify_blocks(document), BAD, why)
    # Damage is certain, a storage that refuses may be a passing matter: the former decides the exit
    # code.
    code = min((subject.exit_code for subject in wrong), default=GOOD)
    complaint = ", ".join(f"{subject.name} is {subject.status}" for subject in wrong)
    return Report(document, verify_blocks(document), code, complaint or None)


def verified(subject: Subject, checked: dict[str, Subject], seconds: float) -> Row:
    same = same_files(subject)
    return {
        "checkpoint": facts.checkpoint(subject.info),
        "ok": subject.good,
        "problems": subject.problems,
        "same_files": same,
        "mend": mends(subject, same),
        "fallback": None if subject.good else fallback(subject, True, checked),
        "seconds": round(seconds, 6),
    }


def verify_blocks(document: Row) -> list[Block]:
    blocks: list[Block] = []
    for each in document["checkpoints"]:
        checkpoint, name = each["checkpoint"], each["checkpoint"]["name"]
        if each["ok"]:
            what = f"{size(checkpoint['size_bytes'])} in {count(checkpoint['files'], 'file')}"
            blocks.append(Line(f"{name}  ok  {what}", "green"))
            continue
        blocks += [Line(f"{name}  {checkpoint['status']}", "bold red"), *problem_lines(each)]
        for file, others in each["same_files"].items():
            blocks.append(Line(f"  {shared_text(file, others)}", "red"))
        blocks += [Line(f"  mend: {mend}", "green") for mend in each["mend"]]
    if document["restores"] and any(not each["ok"] for each in document["checkpoints"]):
        blocks.append(Line(f"restore would take {document['restores']}"))
    for entry in document["skipped"]:
        why = f"{entry['status']}, not checked: {entry['reason'] or 'no manifest'}"
        blocks.append(Line(f"{entry['name']}  {why}", "yellow"))
    return blocks


# ------------------------------------- files that several checkpoints have in common (`reuse=True`)


def shared_text(file: str, others: Sequence[str]) -> str:
    return f"{file} is one file with {', '.join(others)}: damaged there, too"


def same_files(subject: Subject) -> dict[str, list[str]]:
    """By damaged file of a checkpoint, the paths in its root that are the same file."""
    damaged = {p["file"] for p in subject.problems if p["kind"] in ("size", "digest", "header")}
    if not damaged:
        return {}
    try:
        found = engine.shared_files(around(subject).typed, subject.options).get(subject.name)
    except engine.CheckpointError:  # nobody can say
        return {}
    files = found.same_files if found else {}
    return {file: files[file] for file in sorted(damaged & files.keys())}


def mends(subject: Subject, same: dict[str, list[str]]) -> list[str]:
    """A command that puts the bytes back in all checkpoints that share them, where the root has
    them a second time: written anew, with the same digest, and verified."""
    manifest = subject.info.manifest
    if manifest is None or not same:
        return []
    copies, root = [], around(subject)
    storage = engine.open_storage(root.typed, root.options)
    for file, others in same.items():
        record, mine = manifest.files[file], f"{subject.name}/{file}"
        source = whole_copy(root, (record.size, record.digest), {mine, *others})
        if source is None:
            return []
        copies.append(f"cp {quote(storage.at(source))} {quote(storage.at(mine))}")
    return [" && ".join(copies)]


def whole_copy(root: Found, wanted: tuple[int, str], damaged: set[str]) -> str | None:
    """The path in a root of a file of this size and digest that is whole, and none of `damaged`."""
    for info in root.entries:
        for file, record in info.manifest.files.items() if info.manifest else ():
            if (record.size, record.digest) != wanted or f"{info.name}/{file}" in damaged:
                continue
            with root.subject(info) as subject:
                subject.verify()
            if subject.view and file not in {problem["file"] for problem in subject.problems}:
                return f"{info.name}/{file}"
    return None


# ---------------------------------------------------------------- a whole root


@command("ckpt doctor runs/a", "ckpt doctor runs/a --tier s3://bucket/run-a --verify")
@partial(on_path, metavar="ROOT")
@flag("--verify", "Read every byte of what restore would take.")
@repeated("--tier", "ROOT", "Another root with the same checkpoints.", "tiers")
def doctor_command(found: Found, verify: bool, tiers: tuple[str, ...]) -> Report:
    """What is wrong in ROOT, what restore would do now, and the command that mends it. Changes
    nothing. Exits with 0 when nothing needs doing."""
    taken: CheckpointInfo | None = None
    if found.one is None:
        taken = found.newest()[0]
        mend = Mend(taken, in_tiers(tiers, found.options))
        findings = [*in_root(found, mend)]
        if taken is not None and verify:
            findings = in_checkpoint(found.subject(taken), mend, True) + findings
        restores = taken.name if taken else None
    else:
        if found.one.status == "unreadable":
            found.one.check_known()
        findings = in_checkpoint(found.one, Mend(None, {}), verify)
        restores = found.one.name if found.one.good else None
    needs = [finding for finding in findings if finding["severity"] == "problem"]
    if restores is None and not needs:
        needs = findings
    runs = {info.run_id for info in found.entries if info.run_id and found.one is None}
    document = {
        "path": found.url,
        "ok": not needs and restores is not None,
        "restores": restores,
        "run_id": taken.run_id if taken else None,
        "runs": sorted(runs),
        "findings": findings,
    }
    blocks = doctor_blocks(document)
    if document["ok"]:
        unread = "" if verify else ", as far as names and sizes show: --verify reads every byte"
        return Report(document, [*blocks, Line(f"nothing needs doing{unread}", "green")])
    complaint = f"{count(len(needs), 'finding')} in {found.url}"
    return Report(document, blocks, BAD, complaint)


def in_tiers(tiers: tuple[str, ...], options: Options) -> dict[tuple[str, str], str]:
    """Where other roots have a checkpoint, by its name and the digest of its manifest."""
    return {
        (info.name, info.manifest.digest): engine.join_url(tier, info.name)
        for tier in reversed(tiers)
        for info in engine.scan_root(tier, options)
        if info.status == "committed" and info.manifest is not None
    }


def in_root(root: Found, mend: Mend) -> Iterator[Row]:
    """What a listing shows."""
    for info in root.entries:
        if info.status not in ("committed", "partial"):
            yield mend.damage(root.subject(info))
    yield from (leftover(root, left) for left in engine.find_leftovers(root.typed, root.options))
    if left := [info for info in root.entries if info.abandoned]:
        steps = ", ".join(str(info.step) for info in left)
        message = f"steps {steps} are of a branch that the run went back behind: never the newest"
        nbytes = sum(info.size_bytes or 0 for info in left)
        yield finding(left[0].name, "abandoned", message, problem=False, nbytes=nbytes)
    try:
        free = engine.open_storage(root.typed, root.options).free_bytes()
    except engine.CheckpointError:
        free = None
    taken = mend.taken
    if taken is not None and free is not None and free < 2 * (taken.size_bytes or 0):
        message = f"{size(free)} are free, less than two more saves of {size(taken.size_bytes)}"
        how = f"ckpt prune {quote(root.typed)} --keep last=2"
        yield finding(taken.name, "space", message, how, nbytes=free)


def in_checkpoint(subject: Subject, mend: Mend, every_byte: bool) -> list[Row]:
    """What is damaged in a checkpoint, and those beside it that have the same file."""
    with subject:
        if every_byte:
            subject.verify()
    if subject.good:
        return []
    same = same_files(subject)
    texts = [subject.info.reason or "", *(shared_text(f, others) for f, others in same.items())]
    subject.info = replace(subject.info, reason="; ".join(texts))
    mend = replace(mend, taken=None, first=mends(subject, same))
    findings, root = [mend.damage(subject)], around(subject)
    for info in root.entries:
        inside = {
            file for file, paths in same.items() for p in paths if p.startswith(f"{info.name}/")
        }
        if inside:
            why = ", ".join(f"{subject.name}/{file}" for file in sorted(inside))
            other = replace(info, status="damaged", reason=f"it has the damaged {why}, too")
            url = engine.join_url(root.typed, info.name)
            findings.append(mend.damage(Subject(url, other, subject.options)))
    return findings


@dataclass(frozen=True, slots=True)
class Mend:
    """What is known of ways to mend. taken: what `restore` takes instead; elsewhere: by name and
    digest of the manifest, where else a checkpoint lies; first: commands before all others."""

    taken: CheckpointInfo | None
    elsewhere: dict[tuple[str, str], str]
    first: Sequence[str] = ()

    def damage(self, subject: Subject) -> Row:
        name, status, info = subject.name, subject.status, subject.info
        here, reason = quote(subject.typed), info.reason or "no reason known"
        if status == "unreadable":
            return finding(name, status, reason)
        if status == "unsupported":
            return finding(name, status, reason, "pip install --upgrade ckptcore")
        if "looks like" in reason:
            into = f"ckpt import {here} {quote(f'{subject.typed}-imported')}"
            reason += "; restore passes over it"
            return finding(name, "foreign", reason, into, problem=False)
        # Another commit of this name is no cure.
        cures = [
            f"ckpt cp {quote(at)} {here} --overwrite"
            for (other, digest), at in self.elsewhere.items()
            if other == name and digest == (info.manifest.digest if info.manifest else digest)
        ]
        if self.taken is not None:
            after = f"the next save of step {info.step} replaces it"
            reason += f"; restore goes on from step {self.taken.step}, and {after}"
        mend = [*self.first, *cures, *[f"ckpt unpin {here}"] * info.pinned]
        return finding(name, status, reason, *mend, f"ckpt rm {here} --damaged --yes")


def leftover(root: Found, left: Leftover) -> Row:
    message = f"{left.reason}; its writer: {left.writer}"
    if not left.abandoned:
        message += "; it stays until it is sure that nobody writes it"
        return finding(left.name, "in_progress", message, problem=False, nbytes=left.nbytes)
    mend = f"ckpt prune {quote(root.typed)} --partials --yes"
    return finding(left.name, "leftover", message, mend, nbytes=left.nbytes)


def finding(
    name: str, kind: str, message: str, *mend: str, problem: bool = True, nbytes: int | None = None
) -> Row:
    severity = "problem" if problem else "note"
    known = {"name": name, "kind": kind, "severity": severity, "message": message}
    return known | {"mend": list(mend), "size_bytes": nbytes}


def doctor_blocks(document: Row) -> list[Block]:
    blocks: list[Block] = []
    for each in document["findings"]:
        style = "bold red" if each["severity"] == "problem" else "yellow"
        nbytes = "" if each["size_bytes"] is None else f", {size(each['size_bytes'])}"
        blocks.append(Line(f"{each['name']}  {each['kind'].replace('_', ' ')}{nbytes}", style))
        blocks.append(Line(f"  {each['message']}"))
        for at, line in enumerate(each["mend"]):
            blocks.append(Line(f"  {'else:' if at else 'mend:'} {line}", "green"))
    runs, run = document["runs"], document["run_id"]
    if len(runs) > 1:
        marks = (f"{each} (saved last)" if each == run else each for each in runs)
        blocks.append(Line(f"runs: {', '.join(marks)}"))
    if document["restores"] is None:
        return [*blocks, Line("there is nothing here that restore could take", "bold red")]
    of = f" of run {run}" if run else ""
    return [*blocks, Line(f"restore would take {document['restores']}{of}", "green")]
