"""`ckpt pin`, `unpin`, `rm` and `prune`: what stays in a root and what goes. Nothing is deleted
without --yes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ckptcore import (
    CheckpointError,
    KeepBest,
    KeepEvery,
    KeepLast,
    RetentionPolicy,
    delete_checkpoint,
    find_leftovers,
    join_url,
    kept_by,
    pin_checkpoint,
    scan_root,
    sweep_root,
    unpin_checkpoint,
)

from . import facts
from .cli import LOCATION, command, flag, repeated
from .failures import BAD, GOOD, USAGE, Failure, bad, not_found
from .lookup import Root, one_checkpoint, resolve
from .render import Block, Cell, Line, Report, count, size, table
from .subject import Options, Subject

UNITS = {"min": 60, "s": 1, "h": 3600, "d": 86400}
RULES = "last=N, best=METRIC[:min|max][:N], every=STEPS, every=6h"
PATHS = click.argument("paths", nargs=-1, required=True, type=LOCATION)
YES = flag("--yes", "Do it; without, only say what would go.")
DRY = Line("nothing was removed: --yes does it", "yellow")


@command("ckpt pin runs/a/checkpoint-500", "ckpt pin s3://bucket/run/checkpoint-500")
@PATHS
def pin_command(paths: tuple[str, ...], options: Options) -> Report:
    """Keep the checkpoints PATHS, whatever retention says, until they are unpinned."""
    subjects = [one_checkpoint(path, options) for path in paths]
    for subject in subjects:
        pin_checkpoint(subject.typed, options)
    return now(subjects, True, "pinned: retention and delete leave it alone")


@command("ckpt unpin runs/a/checkpoint-500", "ckpt unpin runs/a/checkpoint-{100,200}")
@PATHS
def unpin_command(paths: tuple[str, ...], options: Options) -> Report:
    """Let retention have the checkpoints PATHS again."""
    subjects = [one_checkpoint(path, options) for path in paths]
    for subject in subjects:
        unpin_checkpoint(subject.typed, options)
    return now(subjects, False, "not pinned")


def now(subjects: list[Subject], pinned: bool, text: str) -> Report:
    rows = [facts.fields(subject.info, "name url") | {"pinned": pinned} for subject in subjects]
    return Report({"checkpoints": rows}, [Line(f"{row['name']}  {text}") for row in rows])


@command("ckpt rm runs/a/checkpoint-500", "ckpt rm runs/a/checkpoint-{100,200} --yes")
@PATHS
@flag("--damaged", "Also what is damaged, or was never committed.")
@YES
def rm_command(paths: tuple[str, ...], damaged: bool, yes: bool, options: Options) -> Report:
    """Delete the checkpoints PATHS: their manifests first, then their own files. What others have
    put in the folder stays. A pinned one is refused."""
    subjects = [one_checkpoint(path, options) for path in paths]
    for each in subjects:
        if each.error is not None:
            raise each.error
        if each.info.pinned:
            raise bad(f"{each.url} is pinned: ckpt unpin {each.url}")
        if not each.good and not damaged:
            what = f"{each.url} is {each.status}: --damaged deletes it too, but for files that "
            raise bad(f"{what}ckptcore did not write", path=each.url)
    rows = [
        facts.fields(each.info, "name url step status size_bytes") | {"removed": yes}
        for each in subjects
    ]
    for subject in subjects if yes else ():
        delete_checkpoint(subject.typed, options, damaged=damaged)
    word = "removed" if yes else "would be removed"
    blocks: list[Block] = [Line(f"{r['name']}  {word}, {size(r['size_bytes'])}") for r in rows]
    freed = sum(row["size_bytes"] or 0 for row in rows)
    document = {"dry_run": not yes, "checkpoints": rows, "frees_bytes": freed}
    return Report(document, blocks if yes else [*blocks, DRY])


@command(
    "ckpt prune runs/a --keep last=3 --keep best=eval_loss:min:2",
    "ckpt prune runs/a --partials --yes",
)
@click.argument("root", type=LOCATION)
@repeated("--keep", "RULE", "last=N, best=METRIC[:min|max][:N], every=STEPS or every=6h.")
@flag("--partials", "What interrupted saves and copies have left.")
@click.option("--run", metavar="RUN", help="Of this run, not of the one that saved last.")
@YES
def prune_command(
    root: str, keep: tuple[str, ...], partials: bool, run: str | None, yes: bool, options: Options
) -> Report:
    """Delete the checkpoints of ROOT that no RULE keeps. The newest and pinned ones always stay.

    Partials go where nobody can be writing them any more; those of another machine stay.
    """
    texts = [part.strip() for text in keep for part in text.split(",") if part.strip()]
    if not texts and not partials:
        raise click.UsageError("say what stays (--keep last=3), or give --partials")
    rules = {text: rule_of(text) for text in texts}
    found = resolve(root, options)
    if not isinstance(found, Root):
        if found.error is not None:
            raise found.error
        raise Failure("usage", USAGE, f"{found.url} is one checkpoint, not a root: ckpt rm")
    _check_metrics(found, rules)
    kept = kept_by(found.entries, rules, run) if rules else {}
    if rules and not kept:
        raise not_found(f"no committed checkpoint of that run in {found.url}")
    rows = [
        facts.fields(info, "name step size_bytes")
        | {"keep": bool(kept[info.name]), "reasons": kept[info.name]}
        for info in found.entries
        if info.name in kept
    ]
    leftovers = [
        facts.fields(left, "name reason writer abandoned") | {"size_bytes": left.nbytes}
        for left in (find_leftovers(found.typed, options) if partials else ())
    ]
    going = [row for row in rows if not row["keep"]]
    removed, failed = _remove(found, going, partials) if yes else ([], [])
    going += [left for left in leftovers if left["abandoned"]]
    freed = [each for each in going if each["name"] in removed] if yes else going
    document = {
        "root": found.url,
        "dry_run": not yes,
        "rules": list(rules),
        "checkpoints": rows,
        "leftovers": leftovers,
        "frees_bytes": sum(each["size_bytes"] for each in freed),
        "removed": removed,
        "failed": failed,
    }
    complaint = f"{count(len(failed), 'deletion')} failed" if failed else None
    return Report(document, describe(document), BAD if failed else GOOD, complaint)


def _check_metrics(root: Root, rules: Mapping[str, RetentionPolicy]) -> None:
    """Raises Failure for a metric that no checkpoint has: such a rule would keep nothing."""
    known = sorted({name for info in root.entries for name in info.metrics})
    for text, rule in rules.items():
        if isinstance(rule, KeepBest) and rule.metric not in known:
            there = f"they have {', '.join(known) or 'none'}"
            what = f"no checkpoint of {root.url} has {rule.metric!r}; {there}"
            raise not_found(f"--keep {text}: {what}", path=root.url)


def _remove(root: Root, going: list[dict[str, Any]], partials: bool) -> tuple[list[str], list[str]]:
    """What was removed, and what could not be, in words."""
    removed: list[str] = []
    failed: list[str] = []
    for row in going:
        try:
            delete_checkpoint(join_url(root.typed, row["name"]), root.options)
            removed.append(row["name"])
        except CheckpointError as error:
            failed.append(f"{row['name']}: {error}")
    if partials:
        before = {info.name for info in scan_root(root.typed, root.options)}
        _, warned = sweep_root(root.typed, root.options)
        # Some entries are only mended: one that was put aside by an overwrite takes its place.
        removed += sorted(before - {info.name for info in scan_root(root.typed, root.options)})
        failed += warned
    return removed, failed


def rule_of(text: str) -> RetentionPolicy:
    """One of RULES. Raises click.UsageError."""
    kind, _, rest = text.partition("=")
    try:
        if kind == "last":
            return KeepLast(int(rest))
        if kind == "every":
            unit = next((unit for unit in UNITS if rest.endswith(unit)), None)
            if unit is None:
                return KeepEvery(steps=int(rest))
            return KeepEvery(seconds=float(rest.removesuffix(unit)) * UNITS[unit])
        if kind == "best" and rest:
            metric, *more = rest.split(":")
            words = [word for word in more if word in ("min", "max")]
            numbers = [int(word) for word in more if word not in ("min", "max")]
            mode = words[0] if words else "min"
            return KeepBest(metric, mode, *numbers[:1])  # type: ignore[arg-type]
    except CheckpointError as error:
        raise click.UsageError(f"--keep {text}: {error}") from None
    except ValueError:
        pass  # what should be a number is none
    raise click.UsageError(f"--keep {text}: rules are {RULES}")


def describe(document: dict[str, Any]) -> list[Block]:
    dry, removed = document["dry_run"], document["removed"]
    blocks: list[Block] = []
    fates = {}
    for each in [*document["checkpoints"], *document["leftovers"]]:
        stays = each["keep"] if "keep" in each else not each["abandoned"]
        gone = "would go" if dry else "removed" if each["name"] in removed else "still there"
        fates[each["name"]] = Cell("stays", "green") if stays else Cell(gone, "red")
    if document["checkpoints"]:
        rows = [row | {"fate": fates[row["name"]]} for row in document["checkpoints"]]
        columns = "step>, name!, size>=size_bytes, fate!, kept by=reasons"
        blocks.append(table("", columns, rows))
    for left in document["leftovers"]:
        what = f"{size(left['size_bytes'])}: {left['reason']}; its writer: {left['writer']}"
        blocks.append(Line(f"{left['name']}  {fates[left['name']].text}, {what}"))
    if all(fate.text == "stays" for fate in fates.values()):
        return [*blocks, Line("there is nothing to remove", "green")]
    freed = "would be freed" if dry else "freed"
    blocks.append(Line(f"{size(document['frees_bytes'])} {freed}"))
    blocks += [Line(text, "red") for text in document["failed"]]
    return [*blocks, DRY] if dry else blocks
