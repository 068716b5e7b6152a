"""`ckpt ls`: every checkpoint-like entry of a root, and which one is the latest."""

from __future__ import annotations

from typing import Any

import click

from ckptcore import shared_files

from . import facts
from .cli import LOCATION, command
from .failures import BAD, GOOD
from .lookup import Root, newest, resolve
from .render import Block, Line, Report, metrics, moment, size, status_cell, table
from .subject import Options


@command("ckpt ls runs/a", "ckpt ls s3://bucket/run --json | jq '.checkpoints[] | select(.latest)'")
@click.argument("root", type=LOCATION)
@click.option("--shared", is_flag=True, help="Show which checkpoints have files in common.")
def ls_command(root: str, options: Options, shared: bool) -> Report:
    """List every checkpoint of ROOT, oldest first, with status and metrics, and why one is not
    usable. ROOT may be one checkpoint, which is then listed alone.

    Exits with 0 when at least one checkpoint is usable.
    """
    found = resolve(root, options)
    latest = None
    if isinstance(found, Root):
        latest, _ = newest(found.entries)
        sharing = shared_files(root, options) if shared else {}
        entries = [
            facts.entry(info, info is latest, sharing.get(info.name)) for info in found.entries
        ]
    else:
        if found.error is not None:
            raise found.error
        entries = [found.entry()]
    name = latest.name if latest else None
    document = {"root": found.url, "latest": name, "checkpoints": entries}
    if any(entry["status"] == "committed" for entry in entries):
        return Report(document, describe(entries, shared), GOOD)
    why = f"no usable checkpoint among the {len(entries)} at {found.url}"
    return Report(document, describe(entries), BAD, why)


def unshared_bytes(entry: dict[str, Any]) -> str:
    return "-" if entry["unshared_bytes"] is None else size(entry["unshared_bytes"])


def row(entry: dict[str, Any], shared: bool) -> list[Any]:
    marks = [mark for mark in ("latest", "pinned", "abandoned") if entry[mark]]
    if entry["node"] is not None:
        marks.append(f"the part of node {entry['node']}")
    return [
        "-" if entry["step"] is None else str(entry["step"]),
        entry["name"],
        status_cell(entry["status"], "".join(f" ({mark})" for mark in marks)),
        size(entry["size_bytes"]),
        *([unshared_bytes(entry), ", ".join(entry["shared_with"] or "-")] if shared else []),
        moment(entry["created"]),
        entry["run_id"] or "-",
        metrics(entry["metrics"]),
    ]


def describe(entries: list[dict[str, Any]], shared: bool = False) -> list[Block]:
    """Reasons are sentences with paths: under the table they can be read, in a cell of it they
    cannot."""
    more = "alone>!, shared with, " if shared else ""
    columns = f"step>!, name!, status!, size>!, {more}created!, run, metrics"
    reasons = [Line(f"{e['name']}: {e['reason']}", "yellow") for e in entries if e["reason"]]
    return [table("", columns, [row(entry, shared) for entry in entries]), *reasons]
