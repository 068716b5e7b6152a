"""`ckpt ls`: every checkpoint-like entry of a root, and which one is the latest.

JSON: {"root", "latest": name or null, "checkpoints": [entry, ...]}, entries as in facts.py, oldest
first. Exit code: 0 when at least one checkpoint is usable, 1 when there are entries and none is.
"""

from __future__ import annotations

from typing import Any

from . import facts
from .failures import BAD, GOOD
from .lookup import Root, newest, resolve
from .render import Block, Column, Line, Report, Table, metrics, moment, size, status_cell
from .subject import Options


def ls(url: str, options: Options) -> Report:
    """`url` is a root, or one checkpoint, which is then listed alone."""
    found = resolve(url, options)
    if isinstance(found, Root):
        url = found.url
        newest_one, _ = newest(found.entries)
        latest = newest_one.name if newest_one else None
        entries = [facts.entry(info, info is newest_one) for info in found.entries]
    else:
        if found.error is not None:
            raise found.error
        url, latest, entries = found.url, None, [found.entry()]
    document = {"root": url, "latest": latest, "checkpoints": entries}
    if any(entry["status"] == "committed" for entry in entries):
        return Report(document, describe(document), GOOD)
    return Report(
        document, describe(document), BAD, f"no usable checkpoint among the {len(entries)} at {url}"
    )


COLUMNS = [
    Column("step", right=True, whole=True),
    Column("name", whole=True),
    Column("status", whole=True),
    Column("size", right=True, whole=True),
    Column("created", whole=True),
    Column("run"),
    Column("metrics"),
]


def marks(entry: dict[str, Any]) -> list[str]:
    found = [mark for mark in ("latest", "pinned", "abandoned") if entry[mark]]
    return found if entry["node"] is None else [*found, f"the part of node {entry['node']}"]


def describe(document: dict[str, Any]) -> list[Block]:
    rows = []
    for entry in document["checkpoints"]:
        rows.append(
            [
                "-" if entry["step"] is None else str(entry["step"]),
                entry["name"],
                status_cell(entry["status"], "".join(f" ({mark})" for mark in marks(entry))),
                size(entry["size_bytes"]),
                moment(entry["created"]),
                entry["run_id"] or "-",
                metrics(entry["metrics"]),
            ]
        )
    blocks: list[Block] = [Table("", COLUMNS, rows)]
    # Reasons are sentences with paths: under the table they can be read, in a cell of it they
    # cannot.
    for entry in document["checkpoints"]:
        if entry["reason"]:
            blocks.append(Line(f"{entry['name']}: {entry['reason']}", "yellow"))
    return blocks
