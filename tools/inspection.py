"""`ckpt inspect`: what one checkpoint holds, by its manifest; tensors and plain values when asked
for.

JSON: {"checkpoint", "components": [...], "files": [...], "foreign_files": [name, ...], "tensors":
[...] or null, "values": {component: value} or null, "values_of": {component: copy} or null,
"verified": bool, "problems": [...], "fallback": {...} or null, "newer": [entry, ...]}; the parts as
in facts.py. "tensors", "values" and "values_of" (which copy of a component the values are) are null
unless asked for; "fallback" is null while the checkpoint is good; "newer" is what `restore` would
pass over, too, for the one chosen in a root. Exit code: 0 when the checkpoint is good, 1 when it is
damaged or uncommitted.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from . import facts, render
from .copies import FIRST, StoredCopy, Which, check_fits, choose_copy
from .failures import not_found
from .lookup import Root, fallback, newest, normal, settled, split, subject_of
from .problems import problem_lines
from .render import Block, Cell, Column, Facts, Line, Report, Table, count, size, status_cell
from .subject import Options, Subject

if TYPE_CHECKING:
    from ckptcore import CheckpointInfo, CheckpointView, TensorInfo


# Indexes of at most so many bytes are read to say how large plain values are.
INDEX_LIMIT = 16 << 20


def inspect(
    url: str,
    options: Options,
    tensors: str | None = None,
    values: tuple[str, ...] = (),
    verify: bool = False,
    which: Which = FIRST,
) -> Report:
    """`tensors` is a pattern (see `matching`), `values` names components, `which` says whose copy
    of them."""
    subject, file = file_of(url, options)
    if subject is not None:
        return inspect_found(subject, file, options, tensors, values, verify, which)
    return settled(
        url,
        options,
        lambda found: inspect_found(found, None, options, tensors, values, verify, which),
    )


def inspect_found(
    found: Subject | Root,
    file: str | None,
    options: Options,
    tensors: str | None,
    values: tuple[str, ...],
    verify: bool,
    which: Which,
) -> Report:
    newer: list[CheckpointInfo] = []
    if isinstance(found, Root):
        subject, newer = choose(found, options)
    else:
        subject = found
    if subject.error is not None:
        raise subject.error
    foreign: list[str] | None = None
    listed = plain = sizes = None
    with subject:
        if verify:
            subject.verify()
        view = subject.view
        if view is not None:
            # An index that cannot be read is one more problem of the checkpoint, not the end of the
            # command.
            foreign = view.foreign_files()
            if tensors is not None or file is not None:
                listed = subject.attempt(lambda: matching(view, tensors or "*", file))
            plain = subject.attempt(lambda: values_of(view, values, which)) if values else None
            sizes = values_bytes(view)
    manifest = subject.manifest
    document = {
        "checkpoint": subject.document(),
        "components": facts.components(manifest, sizes) if manifest else [],
        "files": facts.files(manifest) if manifest else [],
        "foreign_files": sorted(foreign or []),
        "tensors": listed,
        "values": {name: facts.value(value) for name, (_, value) in plain.items()}
        if plain
        else None,
        "values_of": {name: copy.document() for name, (copy, _) in plain.items()}
        if plain
        else None,
        "verified": verify and view is not None,
        "problems": subject.problems,
        "fallback": None if subject.good else fallback(subject, verify),
        "newer": [facts.entry(info, latest=False) for info in newer],
    }
    complaint = None if subject.good else f"{subject.name} is {subject.status}"
    return Report(document, describe(document, plain), subject.exit_code, complaint)


def file_of(url: str, options: Options) -> tuple[Subject, str] | tuple[None, None]:
    """The checkpoint and the file's name where `url` is the path of one of its tensor files."""
    from ckptcore import CheckpointNotFound

    folder, name = split(normal(url)) if url else (None, "")
    if folder and name.endswith(".safetensors"):
        try:
            subject = Subject.open(folder, split(folder)[1], options)
        except CheckpointNotFound:
            pass
        else:
            if subject.view is None or name in subject.view.manifest.files:
                return subject, name
            subject.view.__exit__(None, None, None)
            raise not_found(f"{name} is no file of the checkpoint {subject.url}", path=normal(url))
    return None, None


def choose(root: Root, options: Options) -> tuple[Subject, list[CheckpointInfo]]:
    """What `restore` would take, and what is newer and would be passed over. Where it would find
    nothing that is usable, the newest of what it would look at (else of all entries)."""
    chosen, passed = newest(root.entries)
    if chosen is None:
        chosen = passed.pop() if passed else root.entries[-1]
        passed = []
    return subject_of(chosen, options, root.typed), passed


def values_bytes(view: CheckpointView) -> dict[str, int] | None:
    """How large the plain values of each component are; None where it would take long to find out,
    or cannot be known."""
    from ckptcore import CheckpointError

    files = view.manifest.files.items()
    if sum(record.size for name, record in files if name.endswith(".msgpack")) > INDEX_LIMIT:
        return None
    try:
        return {key: view.values_bytes(key) for key in view.manifest.components}
    except CheckpointError:  # a finding for `verify`, or for who asks for the values
        return None


def matching(view: CheckpointView, pattern: str, file: str | None = None) -> list[dict[str, Any]]:
    """Tensors whose full name ("component/name") or name is `pattern`, or matches it as a shell
    pattern; of `file` alone where it is given.

    A tensor that each rank, group or node has one of is found under its component's own key, too.
    Raises Failure when there is none.
    """
    manifest = view.manifest
    keys = {key + copy.label: key for key in manifest.components for copy in manifest.copies(key)}
    everything = view.tensors()
    if file is not None:
        inside = members(view, file)
        everything = [t for t in everything if t.file == file or (t.component, t.name) in inside]

    def matches(tensor: TensorInfo) -> bool:
        names = tensor.full_name, tensor.name, f"{keys.get(tensor.component)}/{tensor.name}"
        return pattern == "*" or any(
            pattern == name or fnmatchcase(name, pattern) for name in names
        )

    found = [facts.tensor(info) for info in everything if matches(info)]
    if not found and (everything or pattern != "*"):
        where = f"{len(everything)} tensors in {', '.join(view.manifest.components)}"
        raise not_found(f"no tensor matches {pattern!r}: {where}", path=view.url, pattern=pattern)
    return found


def members(view: CheckpointView, file: str) -> set[tuple[str, str]]:
    """(component, tensor) of the boxes of sharded tensors that lie in a file."""
    index = view.index(view.manifest.files[file].writer)
    return {
        (read.component, read.entry.name)
        for read in view.reads_of(index)
        if read.entry.file == file
    }


def values_of(
    view: CheckpointView, components: tuple[str, ...], which: Which
) -> dict[str, tuple[StoredCopy, Any]]:
    """Python values by component, and whose they are. Raises Failure when there is no such
    component, or copy."""
    for name in components:
        if name not in view.manifest.components:
            known = ", ".join(view.manifest.components) or "none"
            raise not_found(
                f"no component {name!r} in {view.url}: it has {known}",
                path=view.url,
                component=name,
            )
    check_fits(view, components, which)
    found = {}
    for name in components:
        copy = choose_copy(view, name, which)
        found[name] = copy, view.values(name, copy.number)
    return found


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
TENSORS = [
    Column("tensor"),
    Column("dtype"),
    Column("shape"),
    Column("size", right=True),
    Column("file"),
]


def describe(
    document: dict[str, Any], values: dict[str, tuple[StoredCopy, Any]] | None
) -> list[Block]:
    checkpoint = document["checkpoint"]
    verified = document["verified"] and not document["problems"]
    blocks: list[Block] = [header(checkpoint, verified, document["newer"])]
    blocks += problem_lines(document["problems"], document["fallback"], checkpoint)
    if document["components"]:
        rows = [
            [
                item["key"],
                item["pattern"],
                str(item["tensors"]),
                size(item["size_bytes"] + (item["values_bytes"] or 0)),
                file_cell(item["files"]),
                render.ranks(item["writers"]),
            ]
            for item in document["components"]
        ]
        blocks.append(Table("components", COMPONENTS, rows))
    if document["files"]:
        rows = [
            [item["name"], size(item["size_bytes"]), str(item["writer"]), item["digest"]]
            for item in document["files"]
        ]
        blocks.append(Table("files", FILES, rows))
    if document["foreign_files"]:
        blocks.append(
            Facts(
                Cell(
                    "foreign files: not part of this checkpoint, ignored when it is loaded",
                    "yellow",
                ),
                [],
            )
        )
        blocks += [Line(f"  {name}") for name in document["foreign_files"]]
    if document["tensors"] is not None:
        blocks.append(Table("tensors", TENSORS, [tensor_row(item) for item in document["tensors"]]))
    for component, (copy, value) in (values or {}).items():
        pairs: list[tuple[str, Cell | str]] = [
            (path or ".", text) for path, text in facts.leaves(value)
        ]
        blocks.append(Facts(Cell(copy.title(component), "bold"), pairs))
    return blocks


def header(checkpoint: dict[str, Any], verified: bool, newer: list[dict[str, Any]]) -> Facts:
    title = status_cell(checkpoint["status"])
    status = title._replace(text=title.text + (", every byte verified" if verified else ""))
    pairs: list[tuple[str, Cell | str]] = [("status", status)]
    for entry in reversed(newer):
        why = f"{entry['name']} is {entry['status']}: {entry['reason'] or 'no reason known'}"
        pairs.append(("newer, not usable", Cell(why, "yellow")))
    pairs.append(("path", checkpoint["url"]))
    if checkpoint["pinned"]:
        pairs.append(("pinned", "yes: retention and delete leave it alone"))
    for name in ("step", "run_id", "sequence", "checkpoint_id", "attempt_id"):
        if checkpoint.get(name) is not None:
            pairs.append((name.removesuffix("_id").replace("_", " "), str(checkpoint[name])))
    if "format_version" in checkpoint:
        pairs += _manifest_pairs(checkpoint)
    return Facts(Cell(checkpoint["name"], "bold"), pairs)


def _manifest_pairs(checkpoint: dict[str, Any]) -> list[tuple[str, Cell | str]]:
    nodes, created = checkpoint["nodes"], render.moment(checkpoint["created"])
    pairs: list[tuple[str, Cell | str]] = [
        (
            "created",
            created._replace(
                terminal=f"{created.text} ({created.terminal})" if created.terminal else ""
            ),
        ),
        ("size", f"{size(checkpoint['size_bytes'])} in {count(checkpoint['files'], 'file')}"),
        (
            "world size",
            f"{checkpoint['world_size']}" + (f" on {len(nodes)} nodes" if len(nodes) > 1 else ""),
        ),
        *([("storage mode", _part(checkpoint))] if checkpoint["node"] is not None else []),
        ("format", checkpoint["format_version"]),
        ("versions", _words(checkpoint["versions"])),
    ]
    if checkpoint["environment"]:
        pairs.append(("environment", _words(checkpoint["environment"])))
    for name, partition in checkpoint["groups"].items():
        pairs.append(
            (f"group {name}", " ".join(f"{{{render.ranks(group)}}}" for group in partition))
        )
    if checkpoint["metrics"]:
        at = checkpoint["metrics_step"]
        other = "" if at in (None, checkpoint["step"]) else f" (measured at step {at})"
        pairs.append(("metrics", render.metrics(checkpoint["metrics"]) + other))
    if checkpoint["metadata"]:
        pairs.append(
            ("metadata", json.dumps(checkpoint["metadata"], ensure_ascii=False, sort_keys=True))
        )
    if checkpoint["training_args_hash"]:
        pairs.append(("training args", checkpoint["training_args_hash"]))
    if checkpoint["timings"]:
        pairs.append(
            (
                "timings",
                " ".join(f"{name}={value:.3g}s" for name, value in checkpoint["timings"].items()),
            )
        )
    if checkpoint["extra"]:
        pairs.append(("other fields", ", ".join(checkpoint["extra"])))
    return pairs


def _part(checkpoint: dict[str, Any]) -> str:
    node, nodes = checkpoint["node"], checkpoint["nodes"]
    return (
        f"node: this is the part of node {node} of {len(nodes)} (ranks {render.ranks(nodes[node])})"
    )


def _words(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def file_cell(names: list[str]) -> str:
    return count(len(names), "file") if len(names) > 1 else "".join(names) or "-"


def tensor_row(item: dict[str, Any]) -> list[Cell | str]:
    shape = "x".join(map(str, item["shape"])) or "scalar"
    file = f"same as {item['alias_of']}" if item["alias_of"] else item["file"] or "-"
    return [item["full_name"], item["dtype"], shape, size(item["size_bytes"]), file]
