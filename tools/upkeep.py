"""`ckpt pin`, `unpin`, `rm` and `prune`: what stays in a root and what goes. Nothing is deleted
without --yes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

import ckptcore as engine
from ckptcore import KeepBest, KeepEvery, KeepLast, RetentionPolicy, delete_checkpoint

from . import facts
from .cli import LOCATION, command, flag, repeated
from .failures import BAD, GOOD, USAGE, Failure, bad, not_found
from .lookup import Found, Options, one_checkpoint, resolve
from .render import Block, Cell, Line, Report, count, size, table

UNITS = {"min": 60, "s": 1, "h": 3600, "d": 86400}
RULES = "last=N, best=METRIC[:min|max][:N], every=STEPS, every=6h"
PATHS = click.argument("paths", nargs=-1, required=True, type=LOCATION)
YES = flag("--yes", "Do it; without, only say what would go.")
DRY = Line("nothing was removed: --yes does it", "yellow")
Row = dict[str, Any]


@command("ckpt pin runs/a/checkpoint-500", "ckpt pin s3://bucket/run/checkpoint-500")
@PATHS
def pin_command(paths: tuple[str, ...], options: Options) -> Report:
    """Keep the checkpoints PATHS, whatever retention says, until they are unpinned."""
    text = "pinned: retention and delete leave it alone"
    return with_pins(paths, options, engine.pin_checkpoint, True, text)


@command("ckpt unpin runs/a/checkpoint-500", "ckpt unpin runs/a/checkpoint-{100,200}")
@PATHS
def unpin_command(paths: tuple[str, ...], options: Options) -> Report:
    """Let retention have the checkpoints PATHS again."""
    return with_pins(paths, options, engine.unpin_checkpoint, False, "not pinned")


def with_pins(
    paths: tuple[str, ...],
    options: Options,
    change: Callable[[str, Options], None],
    pinned: bool,
    text: str,
) -> Report:
    subjects = [one_checkpoint(path, options) for path in paths]
    for subject in subjects:
        change(subject.typed, options)
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
        each.check_known()
        if each.info.pinned:
            raise bad(f"{each.url} is pinned: ckpt unpin {each.url}")
        if not each.good and not damaged:
            what = f"{each.url} is {each.status}: --damaged deletes it too, but for files that "
            raise bad(f"{what}ckptcore did not write", path=each.url)
    for each in subjects if yes else ():
        delete_checkpoint(each.typed, options, damaged=damaged)
    names = "name url step status size_bytes"
    rows = [facts.fields(each.info, names) | {"removed": yes} for each in subjects]
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
    if found.one is not None:
        found.one.check_known()
        raise Failure("usage", USAGE, f"{found.url} is one checkpoint, not a root: ckpt rm")
    check_metrics(found, rules)
    kept = engine.kept_by(found.entries, rules, run) if rules else {}
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
        for left in (engine.find_leftovers(found.typed, options) if partials else ())
    ]
    going = [row for row in rows if not row["keep"]]
    removed, failed = remove(found, going, partials) if yes else ([], [])
    going += [left for left in leftovers if left["abandoned"]]
    document = {
        "root": found.url,
        "dry_run": not yes,
        "rules": texts,
        "checkpoints": rows,
        "leftovers": leftovers,
        "frees_bytes": sum(x["size_bytes"] for x in going if not yes or x["name"] in removed),
        "removed": removed,
        "failed": failed,
    }
    complaint = f"{count(len(failed), 'deletion')} failed" if failed else None
    return Report(document, prune_blocks(document), BAD if failed else GOOD, complaint)


def check_metrics(root: Found, rules: Mapping[str, RetentionPolicy]) -> None:
    """Raises Failure for a metric that no checkpoint has: such a rule would keep nothing."""
    known = sorted({name for info in root.entries for name in info.metrics})
    for text, rule in rules.items():
        if isinstance(rule, KeepBest) and rule.metric not in known:
            what = f"no checkpoint of {root.url} has {rule.metric!r}"
            what += f"; they have {', '.join(known) or 'none'}"
            raise not_found(f"--keep {text}: {what}", path=root.url)


def remove(root: Found, going: list[Row], partials: bool) -> tuple[list[str], list[str]]:
    """What was removed, and what could not be, in words."""
    removed: list[str] = []
    failed: list[str] = []
    for row in going:
        try:
            delete_checkpoint(engine.join_url(root.typed, row["name"]), root.options)
            removed.append(row["name"])
        except engine.CheckpointError as error:
            failed.append(f"{row['name']}: {error}")
    if partials:
        before = {info.name for info in engine.scan_root(root.typed, root.options)}
        _, warned = engine.sweep_root(root.typed, root.options)
        # Some entries are only mended: one that was put aside by an overwrite takes its place.
        after = {info.name for info in engine.scan_root(root.typed, root.options)}
        removed += sorted(before - after)
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
            return KeepBest(metric, *(words or ["min"])[:1], *numbers[:1])  # type: ignore[arg-type]
    except engine.CheckpointError as error:
        raise click.UsageError(f"--keep {text}: {error}") from None
    except ValueError:
        pass  # what should be a number is none
    raise click.UsageError(f"--keep {text}: rules are {RULES}")


def prune_blocks(document: Row) -> list[Block]:
    dry, removed = document["dry_run"], document["removed"]

    def fate(name: str, stays: bool) -> Cell:
        if stays:
            return Cell("stays", "green")
        return Cell("would go" if dry else "removed" if name in removed else "still there", "red")

    rows = [row | {"fate": fate(row["name"], row["keep"])} for row in document["checkpoints"]]
    left = [x | {"fate": fate(x["name"], not x["abandoned"])} for x in document["leftovers"]]
    columns = "step>, name!, size>=size_bytes, fate!, kept by=reasons"
    blocks: list[Block] = [table("", columns, rows)] if rows else []
    for each in left:
        what = f"{size(each['size_bytes'])}: {each['reason']}; its writer: {each['writer']}"
        blocks.append(Line(f"{each['name']}  {each['fate'].text}, {what}"))
    if all(each["fate"].text == "stays" for each in (*rows, *left)):
        return [*blocks, Line("there is nothing to remove", "green")]
    freed = "would be freed" if dry else "freed"
    blocks.append(Line(f"{size(document['frees_bytes'])} {freed}"))
    blocks += [Line(text, "red") for text in document["failed"]]
    return [*blocks, DRY] if dry else blocks
