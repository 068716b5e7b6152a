"""Damage to a file that several checkpoints of a root have in common (`reuse=True`) is in all of
them."""

from __future__ import annotations

import shlex

from ckptcore import CheckpointError, join_url, open_checkpoint, open_storage, shared_files

from .lookup import Root, around
from .subject import Subject


def same_files(subject: Subject) -> dict[str, list[str]]:
    """By damaged file of a checkpoint, the paths in its root that are the same file."""
    damaged = {p["file"] for p in subject.problems if p["kind"] in ("size", "digest", "header")}
    if not damaged:
        return {}
    try:
        found = shared_files(around(subject).typed, subject.options).get(subject.name)
    except CheckpointError:  # nobody can say
        return {}
    files = {} if found is None else found.same_files
    return {file: files[file] for file in sorted(damaged & files.keys())}


def mends(subject: Subject, same: dict[str, list[str]]) -> list[str]:
    """A command that puts the bytes back in all checkpoints that share them, where the root has
    them a second time: written anew, with the same digest, and verified."""
    manifest = subject.info.manifest
    if manifest is None or not same:
        return []
    copies, root = [], around(subject)
    storage = open_storage(root.typed, root.options)
    for file, others in same.items():
        record, mine = manifest.files[file], f"{subject.name}/{file}"
        source = _verified(root, (record.size, record.digest), {mine, *others})
        if source is None:
            return []
        copies.append(f"cp {shlex.quote(storage.at(source))} {shlex.quote(storage.at(mine))}")
    return [" && ".join(copies)]


def _verified(root: Root, wanted: tuple[int, str], damaged: set[str]) -> str | None:
    """The path in a root of a file of this size and digest that is whole, and none of `damaged`."""
    for info in root.entries:
        for file, record in info.manifest.files.items() if info.manifest else ():
            if (record.size, record.digest) != wanted or f"{info.name}/{file}" in damaged:
                continue
            try:
                with open_checkpoint(join_url(root.typed, info.name), root.options) as view:
                    if file not in {problem.file for problem in view.verify()}:
                        return f"{info.name}/{file}"
            except CheckpointError:
                continue
    return None
