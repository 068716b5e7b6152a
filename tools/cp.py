"""`ckpt cp`: copy a checkpoint between any two storages, verified on the way."""

from __future__ import annotations

import re
import warnings
from functools import partial
from time import perf_counter
from typing import Any

import click

import ckptcore as engine

from . import facts
from .cli import LOCATION, command, flag, number, storage_option
from .failures import GOOD, writing
from .lookup import Found, Options, Subject, normal, on_path, split
from .render import Block, Line, Progress, Report, size

CHECKPOINT_NAME = re.compile(r"checkpoint-(?:0|[1-9][0-9]*)")


@command(
    "ckpt cp runs/a s3://bucket/run-a",
    "ckpt cp runs/a/checkpoint-500 /mnt/b/checkpoint-500 --overwrite",
)
@partial(on_path, metavar="SRC")
@click.argument("target", metavar="DST", type=LOCATION)
@flag("--overwrite", "Replace another one, or a damaged copy, there.")
@flag("--pins", "Pin the copy when SRC is pinned.")
@number("--threads", 1, "How many read and write; by default one for each core.", 256)
@storage_option("--target-option", "As --storage-option, for DST alone and instead of those.")
def cp_command(found: Found, target: str, target_option: tuple[Any, ...], **how: Any) -> Report:
    """Copy the checkpoint SRC to DST, verified on the way. When SRC is a root, the checkpoint that
    restore would take; when a newer one cannot be used, a line on standard error says so, and the
    exit code is 0.

    When the last name of DST is checkpoint-<number>, that is the folder that the copy becomes.
    Anything else is a root, and the copy gets the name of SRC in it.

    An interrupted copy is no checkpoint; the same command takes up what it had finished. A damaged
    SRC is refused. When DST is the same checkpoint already, nothing is done; with --overwrite every
    byte of it is checked.
    """
    with found.opened() as subject:
        url = target_of(target, subject)
    sources, targets = found.options, dict(target_option) or None
    counts = [0, 0]
    before = digest_at(url, targets or sources)
    start = perf_counter()
    with (
        warnings.catch_warnings(record=True) as caught,
        writing(),
        Progress(subject.name) as progress,
    ):
        warnings.simplefilter("always", engine.CheckpointWarning)

        def advance(copied: int, kept: int, total: int) -> None:
            counts[:] = copied, kept
            progress(copied + kept, total)

        info = engine.copy_checkpoint(
            subject.typed,
            url,
            storage_options=sources,
            target_options=targets,
            progress=advance,
            **how,
        )
    document = {
        "source": subject.url,
        "target": info.url,
        "checkpoint": facts.checkpoint(info),
        "already": counts[0] == 0 and before == digest_at(subject.typed, sources),
        "copied_bytes": counts[0],
        "kept_bytes": counts[1],
        "warnings": [str(warning.message) for warning in caught],
        "newer": [facts.entry(info) for info in found.newest()[1]],
        "seconds": round(perf_counter() - start, 6),
    }
    said = f"{info.name}  is there already: {info.url}"
    if not document["already"]:
        rest = f", {size(counts[1])} were there" if counts[1] else ""
        said = f"{info.name}  copied and verified, {size(counts[0])}{rest}: {info.url}"
    blocks: list[Block] = [Line(said, "green")]
    blocks += [Line(str(warning.message), "yellow") for warning in caught]
    return Report(document, blocks, GOOD, found.warning(subject))


def target_of(url: str, subject: Subject) -> str:
    url, label = normal(url), subject.info.label
    last = split(url)[1]
    if CHECKPOINT_NAME.fullmatch(last) or (label and last == subject.name):
        return url
    if CHECKPOINT_NAME.fullmatch(subject.name):
        return engine.join_url(url, subject.name)
    # One that was renamed, or put aside by an overwrite, is found in a root by this name only.
    return engine.join_url(url, f"checkpoint-{subject.info.step}" + f"-{label}" * bool(label))


def digest_at(url: str, options: Options) -> str | None:
    """That of the manifest of the checkpoint there; None where there is none that can be read."""
    try:
        return engine.open_checkpoint(url, storage_options=options).manifest.digest
    except engine.CheckpointError:
        return None
