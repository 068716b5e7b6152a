"""`ckpt ls`: every checkpoint-like entry of a root, and which one is the latest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ckptcore import shared_files

from . import facts
from .cli import command, flag
from .failures import BAD, GOOD
from .lookup import Found, Root, on_path
from .render import Block, Cell, Line, Report, Table, status_cell, table

COLUMNS = "step>, name!, status!, size>!=size_bytes, {}created!, run=run_id, metrics"
SHARED = "alone>!=unshared_bytes, shared with, "


@command("ckpt ls runs/a", "ckpt ls s3://bucket/run --json | jq '.checkpoints[] | select(.latest)'")
@partial(on_path, metavar="ROOT")
@flag("--shared", "Show which checkpoints have files in common.")
def ls_command(found: Found, shared: bool) -> Report:
    """List every checkpoint of ROOT, oldest first, with status and metrics, and why one is not
    usable. ROOT may be one checkpoint, which is then listed alone.

    Exits with 0 when at least one checkpoint is usable.
    """
    if isinstance(found, Root):
        latest, infos = found.newest()[0], found.entries
        sharing = shared_files(found.typed, found.options) if shared else {}
    else:
        if found.error is not None:
            raise found.error
        latest, infos, sharing = None, [found.info], {}
    entries = [facts.entry(info, info is latest, sharing.get(info.name)) for info in infos]
    name = latest.name if latest else None
    document = {"root": found.url, "latest": name, "checkpoints": entries}
    # Reasons are sentences with paths: under the table they can be read, in a cell of it they
    # cannot.
    reasons: list[Block] = [
        Line(f"{e['name']}: {e['reason']}", "yellow") for e in entries if e["reason"]
    ]
    blocks = [run_table(entries, COLUMNS.format(SHARED if shared else "")), *reasons]
    if any(entry["status"] == "committed" for entry in entries):
        return Report(document, blocks, GOOD)
    why = f"no usable checkpoint among the {len(entries)} at {found.url}"
    return Report(document, blocks, BAD, why)


def run_table(entries: Sequence[dict[str, Any]], columns: str) -> Table:
    def status(entry: dict[str, Any]) -> Cell:
        marks = [mark for mark in ("latest", "pinned", "abandoned") if entry[mark]]
        marks += [] if entry["node"] is None else [f"the part of node {entry['node']}"]
        return status_cell(entry["status"], "".join(f" ({mark})" for mark in marks))

    return table("", columns, (entry | {"status": status(entry)} for entry in entries))
