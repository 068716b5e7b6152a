"""`ckpt cp`: copy a checkpoint between any two storages, verified on the way."""

from __future__ import annotations

import re
import warnings
from functools import partial
from time import perf_counter
from typing import Any

import click

from ckptcore import CheckpointError, CheckpointWarning, copy_checkpoint, join_url, open_checkpoint

from . import facts
from .cli import LOCATION, command, flag, number, storage_option
from .failures import GOOD, not_found, writing
from .lookup import Found, normal, on_path, opened, passed_over, split, warning_of
from .render import Block, Line, Progress, Report, size
from .subject import Options, Subject

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
    subject, options = opened(found), found.options
    subject.__exit__(None, None, None)
    url, targets = _target(target, subject), dict(target_option) or None
    counts = [0, 0]
    before = _digest(url, targets or options)
    start = perf_counter()
    with (
        warnings.catch_warnings(record=True) as caught,
        writing(),
        Progress(subject.name) as progress,
    ):
        warnings.simplefilter("always", CheckpointWarning)

        def advance(copied: int, kept: int, total: int) -> None:
            counts[:] = copied, kept
            progress(copied + kept, total)

        info = copy_checkpoint(
            subject.typed,
            url,
            storage_options=options,
            target_options=targets,
            progress=advance,
            **how,
        )
    document = {
        "source": subject.url,
        "target": info.url,
        "checkpoint": facts.checkpoint(info),
        "already": counts[0] == 0 and before == _digest(subject.typed, options),
        "copied_bytes": counts[0],
        "kept_bytes": counts[1],
        "warnings": [str(warning.message) for warning in caught],
        "newer": [facts.entry(info) for info in passed_over(found)],
        "seconds": round(perf_counter() - start, 6),
    }
    return Report(document, describe(document), GOOD, warning_of(found, subject))


def _target(url: str, subject: Subject) -> str:
    if not url:
        raise not_found("the path to copy to is empty", path=url)
    url = normal(url)
    last = split(url)[1]
    if CHECKPOINT_NAME.fullmatch(last) or (subject.info.label and last == subject.name):
        return url
    # One that was renamed, or put aside by an overwrite, is found in a root by this name only.
    name = f"checkpoint-{subject.info.step}"
    if label := subject.info.label:
        name += f"-{label}"
    return join_url(url, subject.name if CHECKPOINT_NAME.fullmatch(subject.name) else name)


def _digest(url: str, options: Options) -> str | None:
    """That of the manifest of the checkpoint there; None where there is none that can be read."""
    try:
        return open_checkpoint(url, storage_options=options).manifest.digest
    except CheckpointError:
        return None


def describe(document: dict[str, Any]) -> list[Block]:
    name, target = document["checkpoint"]["name"], document["target"]
    copied, kept = size(document["copied_bytes"]), size(document["kept_bytes"])
    rest = f", {kept} were there" if document["kept_bytes"] else ""
    said = f"{name}  copied and verified, {copied}{rest}: {target}"
    if document["already"]:
        said = f"{name}  is there already: {target}"
    return [Line(said, "green"), *(Line(text, "yellow") for text in document["warnings"])]
