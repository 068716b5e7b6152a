"""`ckpt import` and `ckpt export`: from and to what other libraries write. Needs torch.

JSON: docs/cli.md. Exit code: 0; what was left out is listed, and is no error.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict
from time import perf_counter
from typing import Any

import click

from ckptcore import (
    CheckpointWarning,
    ExportReport,
    ImportReport,
    export_checkpoint,
    import_checkpoint,
)

from .failures import not_found
from .lookup import opened, resolve
from .render import Block, Cell, Column, Line, Report, Table, count, size
from .subject import Options


def pairs(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """OLD=NEW by OLD. Raises click.UsageError."""
    found = {}
    for text in texts:
        old, equals, new = text.partition("=")
        if not equals or not old:
            raise click.UsageError(f"{option} {text!r} is not OLD=NEW")
        found[old] = new
    return found


def import_from(
    source: str,
    root: str,
    options: Options,
    kind: str,
    step: int | None,
    maps: tuple[str, ...],
    components: tuple[str, ...],
    overwrite: bool,
    dry_run: bool,
) -> Report:
    """Make a checkpoint in `root` of what another library wrote."""
    if not source or not root:
        raise not_found("the path is empty", path="")
    beginnings = pairs(maps, "--map")

    def rename(name: str) -> str:
        for old, new in beginnings.items():
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    start = perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        found = import_checkpoint(
            source,
            root,
            format=kind,
            step=step,
            components=pairs(components, "--component"),
            rename=rename if beginnings else None,
            storage_options=options,
            overwrite=overwrite,
            dry_run=dry_run,
        )
    return Report(*_imported(found, dry_run, perf_counter() - start))


def _imported(
    found: ImportReport, dry_run: bool, took: float
) -> tuple[dict[str, Any], list[Block]]:
    document = {
        "source": found.source,
        "format": found.format,
        "step": found.step,
        "dry_run": dry_run,
        "checkpoint": None
        if found.info is None
        else {"name": found.info.name, "url": found.info.url, "step": found.info.step},
        "components": [asdict(component) for component in found.components],
        "checks": found.checks,
        "left": found.left,
        "verified": found.verified,
        "seconds": round(took, 6),
    }
    columns = [Column("component"), Column("pattern"), Column("tensors", right=True)]
    columns += [Column("size", right=True), Column("from")]
    rows: list[list[Cell | str]] = [
        [c.key, c.pattern, str(c.tensors), size(c.size_bytes), c.origin] for c in found.components
    ]
    blocks: list[Block] = [
        Line(f"{found.source}  is of the format {found.format}, step {found.step}"),
        Table("", columns, rows),
        *(Line(f"checked: {text}", "dim") for text in found.checks),
        *(Line(f"left out: {text}", "yellow") for text in found.left),
    ]
    if found.info is None:
        blocks.append(Line("nothing was written: without --dry-run it is", "yellow"))
    else:
        said = f"{count(found.verified, 'tensor')} read back and compared; no pickle was executed"
        blocks.append(Line(f"{found.info.url}  imported, {said}", "green"))
    return document, blocks


def export_to(
    url: str,
    folder: str,
    options: Options,
    kind: str,
    component: str | None,
    dtype: str | None,
    keys: tuple[str, ...],
    maps: tuple[str, ...],
    max_shard_size: str,
    dry_run: bool,
) -> Report:
    """`url` is a checkpoint, or a root: then what restore would take."""
    if not folder:
        raise not_found("the path to write to is empty", path="")
    subject = opened(resolve(url, options), options)
    start = perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a save without a process group
        found = export_checkpoint(
            subject.typed,
            folder,
            format=kind,
            component=component,
            dtype=dtype,
            keys=keys,
            rename=pairs(maps, "--map"),
            max_shard_size=max_shard_size,
            storage_options=options,
            dry_run=dry_run,
        )
    found.source = subject.url
    return Report(*_exported(found, dry_run, perf_counter() - start))


def _exported(
    found: ExportReport, dry_run: bool, took: float
) -> tuple[dict[str, Any], list[Block]]:
    files = [{"name": name, "size_bytes": nbytes} for name, nbytes in found.files.items()]
    document = asdict(found) | {"files": files, "dry_run": dry_run, "seconds": round(took, 6)}
    columns = [Column("file"), Column("size", right=True)]
    rows: list[list[Cell | str]] = [[name, size(nbytes)] for name, nbytes in found.files.items()]
    cast = f", {found.cast} in another dtype" if found.cast else ""
    what = f"{count(found.tensors, 'tensor')} of {', '.join(found.components)}"
    blocks: list[Block] = [
        Line(f"{found.source}  {what}, {size(found.size_bytes)}{cast}"),
        *([Table("", columns, rows)] if rows else []),
        *(Line(f"left out: {text}", "yellow") for text in found.left),
    ]
    if dry_run:
        blocks.append(Line("nothing was written: without --dry-run it is", "yellow"))
    else:
        said = f"{count(found.verified, 'tensor')} read back and compared"
        blocks.append(Line(f"{found.folder}  written, {said}", "green"))
    return document, blocks
