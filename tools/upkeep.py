"""`ckpt pin`, `unpin`, `rm` and `prune`: what stays in a root and what goes. Nothing is deleted
without --yes.

JSON: docs/cli.md. Exit code: 0; 1 where something could not be deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    kept_by,
    pin_checkpoint,
    scan_root,
    sweep_root,
    unpin_checkpoint,
)

from .failures import BAD, GOOD, USAGE, Failure
from .lookup import Root, child, one_checkpoint, resolve
from .render import Block, Cell, Column, Line, Report, Table, count, size
from .subject import Options

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def pin(urls: tuple[str, ...], options: Options, wanted: bool) -> Report:
    """Pin checkpoints, or let retention have them again."""
    subjects = [one_checkpoint(url, options) for url in urls]
    for subject in subjects:
        (pin_checkpoint if wanted else unpin_checkpoint)(subject.typed, options)
    rows = [{"name": each.name, "url": each.url, "pinned": wanted} for each in subjects]
    said = "pinned: retention and delete leave it alone" if wanted else "not pinned"
    return Report({"checkpoints": rows}, [Line(f"{row['name']}  {said}") for row in rows])


def rm(urls: tuple[str, ...], options: Options, damaged: bool, yes: bool) -> Report:
    """Delete checkpoints. damaged: also what has no manifest that says what is its own."""
    subjects = [one_checkpoint(url, options) for url in urls]
    rows: list[dict[str, Any]] = []
    for subject in subjects:
        if subject.pinned:
            raise Failure("bad", BAD, f"{subject.url} is pinned: ckpt unpin {subject.url}")
        if not subject.good and not damaged:
            raise Failure(
                "bad",
                BAD,
                f"{subject.url} is {subject.status}: --damaged removes what is named like ours",
                path=subject.url,
            )
        nbytes = subject.manifest.size_bytes if subject.manifest else None
        rows.append(
            {
                "name": subject.name,
                "url": subject.url,
                "step": subject.step,
                "status": subject.status,
                "size_bytes": nbytes,
                "removed": yes,
            }
        )
    for subject in subjects if yes else ():
        delete_checkpoint(subject.typed, options, damaged=damaged)
    word = "removed" if yes else "would be removed"
    blocks: list[Block] = [
        Line(f"{row['name']}  {word}, {size(row['size_bytes'])}") for row in rows
    ]
    document = {
        "dry_run": not yes,
        "checkpoints": rows,
        "frees_bytes": sum(row["size_bytes"] or 0 for row in rows),
    }
    return Report(document, [*blocks, *_dry(yes)])


def prune(
    url: str, options: Options, keep: tuple[str, ...], partials: bool, run: str | None, yes: bool
) -> Report:
    """Delete what the rules do not keep, and with `partials` what interrupted saves have left."""
    if not keep and not partials:
        raise click.UsageError("say what stays (--keep last=3), or give --partials")
    rules = {text: rule_of(text) for text in split_rules(keep)}
    found = resolve(url, options)
    if not isinstance(found, Root):
        raise Failure("usage", USAGE, f"{found.url} is one checkpoint, not a root: ckpt rm")
    kept = kept_by(found.entries, rules, run) if rules else {}
    if rules and not kept:
        raise Failure("not_found", 3, f"no committed checkpoint of that run in {found.url}")
    rows: list[dict[str, Any]] = [
        {
            "name": info.name,
            "step": info.step,
            "size_bytes": info.size_bytes,
            "keep": bool(kept[info.name]),
            "reasons": kept[info.name],
        }
        for info in found.entries
        if info.name in kept
    ]
    leftovers: list[dict[str, Any]] = [
        {
            "name": left.name,
            "reason": left.reason,
            "size_bytes": left.nbytes,
            "writer": left.writer,
            "abandoned": left.abandoned,
        }
        for left in (find_leftovers(found.typed, options) if partials else ())
    ]
    going = [row for row in rows if not row["keep"]]
    removed, failed = _remove(found, going, partials, options) if yes else ([], [])
    document = {
        "root": found.url,
        "dry_run": not yes,
        "rules": list(rules),
        "checkpoints": rows,
        "leftovers": leftovers,
        "frees_bytes": sum(row["size_bytes"] for row in going)
        + sum(left["size_bytes"] for left in leftovers if left["abandoned"]),
        "removed": removed,
        "failed": failed,
    }
    complaint = f"{count(len(failed), 'deletion')} failed" if failed else None
    return Report(document, describe(document), BAD if failed else GOOD, complaint)


def _remove(
    root: Root, going: list[dict[str, Any]], partials: bool, options: Options
) -> tuple[list[str], list[str]]:
    """What was removed, and what could not be, in words."""
    removed: list[str] = []
    failed: list[str] = []
    for row in going:
        try:
            delete_checkpoint(child(root.typed, row["name"]), options)
            removed.append(row["name"])
        except CheckpointError as error:
            failed.append(f"{row['name']}: {error}")
    if partials:
        before = {info.name for info in scan_root(root.typed, options)}
        _, told = sweep_root(root.typed, options)
        # Some entries are only mended: one that was put aside by an overwrite takes its place.
        removed += sorted(before - {info.name for info in scan_root(root.typed, options)})
        failed += told
    return removed, failed


def split_rules(texts: Iterable[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def rule_of(text: str) -> RetentionPolicy:
    """last=N, best=METRIC[:min|max][:N], every=STEPS or every=6h (s, min, h, d). Raises
    click.UsageError."""
    kind, _, rest = text.partition("=")
    try:
        if kind == "last":
            return KeepLast(int(rest))
        if kind == "every":
            unit = next((u for u in ("min", "s", "h", "d") if rest.endswith(u)), None)
            if unit is None:
                return KeepEvery(steps=int(rest))
            return KeepEvery(seconds=float(rest.removesuffix(unit)) * UNITS[unit])
        if kind == "best" and rest:
            metric, *more = rest.split(":")
            words = [word for word in more if word in ("min", "max")]
            numbers = [int(word) for word in more if word not in ("min", "max")]
            mode = words[0] if words else "min"
            return KeepBest(metric, mode, *numbers[:1])  # type: ignore[arg-type]
    except (ValueError, CheckpointError) as error:
        raise click.UsageError(f"--keep {text}: {error}") from None
    raise click.UsageError(
        f"--keep {text}: rules are last=N, best=METRIC[:min|max][:N], every=STEPS, every=6h"
    )


def _dry(yes: bool) -> list[Block]:
    return [] if yes else [Line("nothing was removed: --yes does it", "yellow")]


COLUMNS = [
    Column("step", right=True),
    Column("name", whole=True),
    Column("size", right=True),
    Column("fate", whole=True),
    Column("kept by"),
]


def describe(document: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    gone = "removed" if not document["dry_run"] else "would go"
    if document["checkpoints"]:
        rows: list[list[Cell | str]] = [
            [
                "-" if row["step"] is None else str(row["step"]),
                row["name"],
                size(row["size_bytes"]),
                Cell("stays", "green") if row["keep"] else Cell(gone, "red"),
                ", ".join(row["reasons"]) or "-",
            ]
            for row in document["checkpoints"]
        ]
        blocks.append(Table("", COLUMNS, rows))
    for left in document["leftovers"]:
        fate = gone if left["abandoned"] else "stays"
        blocks.append(
            Line(
                f"{left['name']}  {fate}, {size(left['size_bytes'])}: {left['reason']}; "
                f"{left['writer']}"
            )
        )
    frees = "freed" if not document["dry_run"] else "would be freed"
    blocks.append(Line(f"{size(document['frees_bytes'])} {frees}"))
    blocks += [Line(text, "red") for text in document["failed"]]
    return blocks + _dry(not document["dry_run"])
