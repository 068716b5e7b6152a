"""`ckpt cp`: copy a checkpoint between any two storages, verified on the way.

Where DST is decided by its last name alone, whatever lies there: `checkpoint-<number>` is the
folder that the copy becomes; anything else is a root, and the copy gets the name of SRC in it.

JSON: {"source": url, "target": url, "checkpoint": as in facts.py, "already": whether all was there
before, "copied_bytes", "kept_bytes" (of an interrupted copy, or of a whole one), "warnings": [text,
...], "newer": [entry, ...], "seconds"}. "newer" is what lies in the root SRC and was passed over,
as `restore` would, because it is not usable; then a line on standard error says so. Exit code: 0
when the target holds the checkpoint, whether it was copied now or before; also with "newer".
"""

from __future__ import annotations

import errno
import re
import warnings
from time import perf_counter
from typing import TYPE_CHECKING, Any

from . import facts
from .failures import BAD, GOOD, STORAGE, Failure, not_found
from .lookup import Root, child, newest, normal, settled, split, subject_of
from .output import progress_bar
from .render import Block, Line, Report, size
from .subject import Options, Subject

if TYPE_CHECKING:
    from ckptcore import CheckpointInfo

CHECKPOINT_NAME = re.compile(r"checkpoint-(?:0|[1-9][0-9]*)")


def cp(
    source: str,
    target: str,
    options: Options,
    target_options: Options,
    threads: int | None,
    overwrite: bool,
    pins: bool,
) -> Report:
    """`source` is a checkpoint, or a root: then its newest committed one."""

    def work(found: Subject | Root) -> Report:
        return _copy(found, target, options, target_options, threads, overwrite, pins)

    return settled(source, options, work)


def _copy(
    found: Subject | Root,
    target: str,
    options: Options,
    target_options: Options,
    threads: int | None,
    overwrite: bool,
    pins: bool,
) -> Report:
    from ckptcore import CheckpointWarning, StorageError, copy_checkpoint

    subject, newer = _source(found, options)
    url = _target(target, subject)
    counts = [0, 0]
    before = _digest(url, options if target_options is None else target_options)
    start = perf_counter()
    with warnings.catch_warnings(record=True) as told, progress_bar(subject.name) as advance:
        warnings.simplefilter("always", CheckpointWarning)

        def progress(copied: int, kept: int, total: int) -> None:
            counts[:] = copied, kept
            advance(copied + kept, total)

        try:
            info = copy_checkpoint(
                subject.typed,
                url,
                storage_options=options,
                target_options=target_options,
                threads=threads,
                overwrite=overwrite,
                pins=pins,
                progress=progress,
            )
        except StorageError as error:
            if error.errno in (
                errno.ENOENT,
                errno.ENOTDIR,
            ):  # the source was there: the target cannot be made
                raise Failure("storage", STORAGE, str(error), path=error.path) from None
            raise
    document = {
        "source": subject.url,
        "target": info.url,
        "checkpoint": _checkpoint(info),
        "already": counts[0] == 0 and before == _digest(subject.typed, options),
        "copied_bytes": counts[0],
        "kept_bytes": counts[1],
        "warnings": [str(warning.message) for warning in told],
        "newer": [facts.entry(info, latest=False) for info in newer],
        "seconds": round(perf_counter() - start, 6),
    }
    passed = "; ".join(
        f"{info.name} is {info.status} ({info.reason or 'no reason known'})" for info in newer
    )
    return Report(
        document,
        describe(document),
        GOOD,
        f"warning: took {subject.name}: {passed}" if newer else None,
    )


def _source(found: Subject | Root, options: Options) -> tuple[Subject, list[CheckpointInfo]]:
    """What to copy, and what is newer in its root and cannot be."""
    newer: list[CheckpointInfo] = []
    if isinstance(found, Root):
        info, newer = newest(found.entries)
        if info is None:
            why = "".join(f"; {each.name} is {each.status}: {each.reason}" for each in newer)
            what = f"no committed checkpoint of the run that saved last in {found.url}{why}"
            raise Failure("bad", BAD, what, path=found.url)
        found = subject_of(info, options, found.typed)
    if found.error is not None:
        raise found.error
    if found.view is None:
        raise Failure("bad", BAD, f"{found.url} is {found.status}: {found.reason}", path=found.url)
    found.view.__exit__(None, None, None)
    return found, newer


def _target(url: str, subject: Subject) -> str:
    if not url:
        raise not_found("the path to copy to is empty", path=url)
    url = normal(url)
    if CHECKPOINT_NAME.fullmatch(split(url)[1]):
        return url
    # One that has a name of its own, or was put aside by an overwrite, is found in a root by this
    # one only.
    return child(
        url,
        subject.name if CHECKPOINT_NAME.fullmatch(subject.name) else f"checkpoint-{subject.step}",
    )


def _digest(url: str, options: Options) -> str | None:
    """That of the manifest of the checkpoint there; None where there is none that can be read."""
    from ckptcore import CheckpointError, open_checkpoint

    try:
        return open_checkpoint(url, storage_options=options).manifest.digest
    except CheckpointError:
        return None


def _checkpoint(info: CheckpointInfo) -> dict[str, Any]:
    header = {
        "name": info.name,
        "url": info.url,
        "status": info.status,
        "reason": None,
        "pinned": info.pinned,
    }
    return header | (facts.checkpoint(info.manifest) if info.manifest else {})


def describe(document: dict[str, Any]) -> list[Block]:
    name, target = document["checkpoint"]["name"], document["target"]
    copied, kept = size(document["copied_bytes"]), size(document["kept_bytes"])
    if document["already"]:
        blocks: list[Block] = [Line(f"{name}  is there already: {target}", "green")]
    else:
        rest = f", {kept} were there" if document["kept_bytes"] else ""
        blocks = [Line(f"{name}  copied and verified, {copied}{rest}: {target}", "green")]
    return blocks + [Line(text, "yellow") for text in document["warnings"]]
