"""`ckpt inspect`: what one checkpoint holds, by its manifest; tensors and plain values when asked for.

JSON: {"checkpoint", "components": [...], "files": [...], "foreign_files": [name, ...], "tensors": [...] or
null, "values": {component: value} or null, "verified": bool, "problems": [...], "fallback": {...} or null,
"newer": [entry, ...]}; the parts as in facts.py. "tensors" and "values" are null unless asked for; "fallback"
is null while the checkpoint is good; "newer" is what a root holds, unusable, beyond the one chosen there.
Exit code: 0 when the checkpoint is good, 1 when it is damaged or uncommitted.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from . import facts, render
from .failures import not_found
from .lookup import Root, fallback, newest, resolve, subject_of
from .problems import problem_lines
from .render import Block, Cell, Column, Facts, Line, Report, Table, count, size, status_cell
from .subject import Options, Subject

if TYPE_CHECKING:
    from ckptcore import CheckpointInfo, CheckpointView


def inspect(
    url: str, options: Options, tensors: str | None = None, values: tuple[str, ...] = (), verify: bool = False
) -> Report:
    """`tensors` is a pattern (see `matching`), `values` names components."""
    found = resolve(url, options)
    newer: list[CheckpointInfo] = []
    if isinstance(found, Root):
        subject, newer = choose(found, options)
    else:
        subject = found
    if subject.error is not None:
        raise subject.error
    foreign: list[str] | None = None
    listed = plain = None
    with subject:
        if verify:
            subject.verify()
        view = subject.view
        if view is not None:
            # An index that cannot be read is one more problem of the checkpoint, not the end of the command.
            foreign = view.foreign_files()
            listed = subject.attempt(lambda: matching(view, tensors)) if tensors is not None else None
            plain = subject.attempt(lambda: values_of(view, values)) if values else None
    manifest = subject.manifest
    document = {
        "checkpoint": subject.document(),
        "components": facts.components(manifest) if manifest else [],
        "files": facts.files(manifest) if manifest else [],
        "foreign_files": sorted(foreign or []),
        "tensors": listed,
        "values": plain and {component: facts.value(value) for component, value in plain.items()},
        "verified": verify and view is not None,
        "problems": subject.problems,
        "fallback": None if subject.good else fallback(subject, verify),
        "newer": [facts.entry(info, latest=False) for info in newer],
    }
    complaint = None if subject.good else f"{subject.name} is {subject.status}"
    return Report(document, describe(document, plain), subject.exit_code, complaint)


def choose(root: Root, options: Options) -> tuple[Subject, list[CheckpointInfo]]:
    """The newest committed checkpoint (else the newest entry), and the unusable ones that are newer."""
    chosen = newest(root.entries, "committed") or root.entries[-1]
    later = root.entries[root.entries.index(chosen) + 1 :]
    return subject_of(chosen, options, root.typed), [info for info in later if info.status != "committed"]


def matching(view: CheckpointView, pattern: str) -> list[dict[str, Any]]:
    """Tensors whose full name ("component/name") or name is `pattern`, or matches it as a shell pattern.

    Raises Failure when there is none.
    """
    everything = view.tensors()
    found = [
        facts.tensor(info)
        for info in everything
        if pattern in ("*", info.full_name, info.name)
        or fnmatchcase(info.full_name, pattern)
        or fnmatchcase(info.name, pattern)
    ]
    if not found and (everything or pattern != "*"):
        where = f"{len(everything)} tensors in {', '.join(view.manifest.components)}"
        raise not_found(f"no tensor matches {pattern!r}: {where}", path=view.url, pattern=pattern)
    return found


def values_of(view: CheckpointView, components: tuple[str, ...]) -> dict[str, Any]:
    """Python values by component. Raises Failure when there is no such component."""
    for name in components:
        if name not in view.manifest.components:
            known = ", ".join(view.manifest.components) or "none"
            raise not_found(f"no component {name!r} in {view.url}: it has {known}", path=view.url, component=name)
    return {name: view.values(name) for name in components}


# ---------------------------------------------------------------- for people

COMPONENTS = [
    Column("component"),
    Column("pattern"),
    Column("tensors", right=True),
    Column("size", right=True),
    Column("files"),
    Column("writers"),
]
FILES = [Column("file"), Column("size", right=True), Column("writer", right=True), Column("digest")]
TENSORS = [Column("tensor"), Column("dtype"), Column("shape"), Column("size", right=True), Column("file")]


def describe(document: dict[str, Any], values: dict[str, Any] | None) -> list[Block]:
    checkpoint = document["checkpoint"]
    blocks: list[Block] = [header(checkpoint, document["verified"] and not document["problems"])]
    blocks += problem_lines(document["problems"], document["fallback"], checkpoint)
    if document["components"]:
        rows = [
            [
                item["key"],
                item["pattern"],
                str(item["tensors"]),
                size(item["size_bytes"]),
                file_cell(item["files"]),
                render.ranks(item["writers"]),
            ]
            for item in document["components"]
        ]
        blocks.append(Table("components", COMPONENTS, rows))
    if document["files"]:
        rows = [
            [item["name"], size(item["size_bytes"]), str(item["writer"]), item["digest"]] for item in document["files"]
        ]
        blocks.append(Table("files", FILES, rows))
    if document["foreign_files"]:
        blocks.append(
            Facts(Cell("foreign files: not part of this checkpoint, ignored when it is loaded", "yellow"), [])
        )
        blocks += [Line(f"  {name}") for name in document["foreign_files"]]
    if document["tensors"] is not None:
        blocks.append(Table("tensors", TENSORS, [tensor_row(item) for item in document["tensors"]]))
    for component, value in (values or {}).items():
        pairs: list[tuple[str, Cell | str]] = [(path or ".", text) for path, text in facts.leaves(value)]
        blocks.append(Facts(Cell(f"values of {component}", "bold"), pairs))
    for entry in document["newer"]:
        why = entry["reason"] or "no reason known"
        blocks.append(Line(f"newer, not usable: {entry['name']} is {entry['status']}: {why}", "yellow"))
    return blocks


def header(checkpoint: dict[str, Any], verified: bool) -> Facts:
    title = status_cell(checkpoint["status"])
    status = title._replace(text=title.text + (", every byte verified" if verified else ""))
    pairs: list[tuple[str, Cell | str]] = [("status", status), ("path", checkpoint["url"])]
    for name in ("step", "run_id", "sequence", "checkpoint_id", "attempt_id"):
        if checkpoint.get(name) is not None:
            pairs.append((name.removesuffix("_id").replace("_", " "), str(checkpoint[name])))
    if "format_version" in checkpoint:
        pairs += _manifest_pairs(checkpoint)
    return Facts(Cell(checkpoint["name"], "bold"), pairs)


def _manifest_pairs(checkpoint: dict[str, Any]) -> list[tuple[str, Cell | str]]:
    nodes, created = checkpoint["nodes"], render.moment(checkpoint["created"])
    pairs: list[tuple[str, Cell | str]] = [
        ("created", created._replace(terminal=f"{created.text} ({created.terminal})" if created.terminal else "")),
        ("size", f"{size(checkpoint['size_bytes'])} in {count(checkpoint['files'], 'file')}"),
        ("world size", f"{checkpoint['world_size']}" + (f" on {len(nodes)} nodes" if len(nodes) > 1 else "")),
        *([("storage mode", _part(checkpoint))] if checkpoint["node"] is not None else []),
        ("format", checkpoint["format_version"]),
        ("versions", _words(checkpoint["versions"])),
    ]
    if checkpoint["environment"]:
        pairs.append(("environment", _words(checkpoint["environment"])))
    for name, partition in checkpoint["groups"].items():
        pairs.append((f"group {name}", " ".join(f"{{{render.ranks(group)}}}" for group in partition)))
    if checkpoint["metrics"]:
        at = checkpoint["metrics_step"]
        other = "" if at in (None, checkpoint["step"]) else f" (measured at step {at})"
        pairs.append(("metrics", render.metrics(checkpoint["metrics"]) + other))
    if checkpoint["metadata"]:
        pairs.append(("metadata", json.dumps(checkpoint["metadata"], ensure_ascii=False, sort_keys=True)))
    if checkpoint["training_args_hash"]:
        pairs.append(("training args", checkpoint["training_args_hash"]))
    if checkpoint["timings"]:
        pairs.append(("timings", " ".join(f"{name}={value:.3g}s" for name, value in checkpoint["timings"].items())))
    if checkpoint["extra"]:
        pairs.append(("other fields", ", ".join(checkpoint["extra"])))
    return pairs


def _part(checkpoint: dict[str, Any]) -> str:
    node, nodes = checkpoint["node"], checkpoint["nodes"]
    return f"node: this is the part of node {node} of {len(nodes)} (ranks {render.ranks(nodes[node])})"


def _words(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def file_cell(names: list[str]) -> str:
    return count(len(names), "file") if len(names) > 1 else "".join(names) or "-"


def tensor_row(item: dict[str, Any]) -> list[Cell | str]:
    shape = "x".join(map(str, item["shape"])) or "scalar"
    file = f"same as {item['alias_of']}" if item["alias_of"] else item["file"] or "-"
    return [item["full_name"], item["dtype"], shape, size(item["size_bytes"]), file]
