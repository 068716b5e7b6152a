"""`ckpt inspect`: what one checkpoint holds, by its manifest, on one screen; one more
answer for each question: tensors, plain values, files, who wrote what, metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import click

from ckptcore import (
    CheckpointError,
    CheckpointManifest,
    CheckpointNotFound,
    CheckpointView,
    TensorInfo,
)

from . import facts, render
from .cli import ITEM, LOCATION, command
from .copies import StoredCopy, Which, check_fits, choose_copy
from .failures import not_found
from .lookup import Root, chosen, fallback, normal, settled, split, subject_of
from .output import for_programs
from .render import Block, Cell, Facts, Line, Report, Table, count, size, status_cell, table
from .subject import Options, Subject, problem_lines

# Indexes of at most so many bytes, in so many files, are read to say how large plain values are and
# which dtypes there are.
INDEX_LIMIT, INDEX_FILES = 16 << 20, 64


@dataclass(frozen=True, slots=True)
class Questions:
    """What `inspect` is asked beside the overview: the options of the command."""

    tensors: str | None
    depth: int | None
    values: tuple[str, ...]
    which: Which
    ranks: bool
    files: bool
    metadata: bool
    verify: bool

    @property
    def overview(self) -> bool:
        asked = self.tensors is not None or self.depth or self.values
        return not (asked or self.files or self.ranks or self.metadata)


@command("ckpt inspect runs/a", "ckpt inspect runs/a/checkpoint-500 --tensors 'model/*' --depth 2")
@click.argument("path", required=False, type=LOCATION)
@click.option(
    "--tensors",
    metavar="[PATTERN]",
    is_flag=False,
    flag_value="*",
    help="List tensors whose name matches, with their total.",
)
@click.option(
    "--depth",
    type=click.IntRange(1),
    metavar="N",
    help="Tensors by the first N parts of their names, with totals.",
)
@click.option("--values", metavar="COMPONENT", multiple=True, help="Plain values (repeatable).")
@click.option("--rank", type=ITEM, metavar="N", help="Whose values: those that rank N restores.")
@click.option("--group", metavar="G", help="Whose values: a group's number, or its key.")
@click.option("--node", type=ITEM, metavar="N", help="Whose values: those of node N.")
@click.option("--ranks", is_flag=True, help="Which rank wrote how much of each component.")
@click.option("--files", is_flag=True, help="List files with size, writer and digest.")
@click.option("--metadata", is_flag=True, help="Ids, versions, phases, and the user's metadata.")
@click.option("--verify", is_flag=True, help="Check every byte too.")
def inspect_command(
    path: str | None,
    tensors: str | None,
    options: Options,
    rank: int | None,
    group: str | None,
    node: int | None,
    **asked: Any,
) -> Report:
    """Show what the checkpoint PATH holds. When PATH is a root, the checkpoint that restore would
    take, and first what is newer and cannot be used. PATH may also be a checkpoint's manifest, or
    one of its tensor files.

    Without options it is an overview; each option answers one more question, alone. Where each
    rank, group or node has values of its own, --values shows those of the first and says so;
    --rank, --group and --node choose. Reads no tensor data unless --verify is given.
    """
    if path is None:
        # `--tensors PATH`: the path was taken for the option's pattern.
        path, tensors = tensors, "*"
    if path is None:
        raise click.UsageError("Missing argument 'PATH'.")
    which = Which(rank, group, node)
    if which.given and not asked["values"]:
        raise click.UsageError(
            "--rank, --group and --node choose among the values of a component: give --values too"
        )
    questions = Questions(tensors, which=which, **asked)
    subject, file = file_of(path, options)
    if subject is not None:
        return inspected(subject, file, options, questions)
    return settled(path, options, lambda found: inspected(found, None, options, questions))


def inspected(
    found: Subject | Root, file: str | None, options: Options, asked: Questions
) -> Report:
    subject, newer = chosen(found, options)
    if subject is None:
        # `restore` would find nothing: the newest of what it would look at, else of all.
        assert isinstance(found, Root)
        subject = subject_of(newer.pop() if newer else found.entries[-1], options, found.typed)
        newer = []
    if subject.error is not None:
        raise subject.error
    foreign: list[str] = []
    listed = plain = modules = None
    extent: dict[str, Extent] = {}
    with subject:
        if asked.verify:
            subject.verify()
        view = subject.view
        if view is not None:
            # An index that cannot be read is one more problem of the checkpoint, not the end of the
            # command.
            foreign = view.foreign_files()
            if asked.tensors is not None or asked.depth or file is not None:
                listed = subject.attempt(lambda: matching(view, asked.tensors or "*", file))
            if listed is not None and asked.depth:
                modules = by_module(listed, asked.depth)
            if asked.values:
                plain = subject.attempt(lambda: values_of(view, asked.values, asked.which))
            extent = extents(view) if asked.overview or for_programs() else {}
    manifest = subject.manifest
    document = {
        "checkpoint": subject.document(),
        "components": facts.components(manifest, extent) if manifest else [],
        "files": facts.files(manifest) if manifest and (asked.files or for_programs()) else [],
        "foreign_files": sorted(foreign),
        "tensors": listed,
        "modules": modules,
        "ranks": written_by(manifest) if manifest and asked.ranks else None,
        "values": {k: facts.value(value) for k, (_, value) in plain.items()} if plain else None,
        "values_of": {k: copy.document() for k, (copy, _) in plain.items()} if plain else None,
        "verified": asked.verify and view is not None,
        "problems": subject.problems,
        "fallback": None if subject.good else fallback(subject, asked.verify),
        "newer": [facts.entry(info) for info in newer],
    }
    complaint = None if subject.good else f"{subject.name} is {subject.status}"
    blocks = describe(document, plain, asked, file)
    return Report(document, blocks, subject.exit_code, complaint)


def file_of(url: str, options: Options) -> tuple[Subject, str] | tuple[None, None]:
    """The checkpoint and the file's name where `url` is the path of one of its tensor files."""
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


@dataclass(frozen=True, slots=True)
class Extent:
    """How large the plain values of a component are, and which dtypes its tensors have."""

    values_bytes: int
    dtypes: list[str]


def extents(view: CheckpointView) -> dict[str, Extent]:
    """By component; none where it would take long to find out, or cannot be known."""
    files = view.manifest.files.items()
    sizes = {record.writer: record.size for name, record in files if name.endswith(".msgpack")}
    found = {}
    for key, component in view.manifest.components.items():
        # Of a sharded component one index says it all; of another one, those that wrote it.
        writers = component.writers[: 1 if str(component.pattern) == "SHARDED" else None]
        needed = sum(sizes.get(writer, 0) for writer in writers)
        if len(writers) > INDEX_FILES or needed > INDEX_LIMIT:
            continue
        try:
            found[key] = Extent(view.values_bytes(key), view.dtypes(key))
        except CheckpointError:  # a finding for `verify`, or for who asks for the values
            continue
    return found


def parts_of(name: str) -> list[str]:
    """The parts of a tensor's name: of modules, and of nested dicts and lists."""
    return [part for level in name.split("/") for part in level.split(".")]


def by_module(tensors: list[dict[str, Any]], depth: int) -> list[dict[str, Any]]:
    """Totals of the tensors of each component by the first `depth` parts of their names."""

    def module(item: dict[str, Any]) -> tuple[str, str]:
        parts = parts_of(item["name"])
        return item["component"], ".".join(parts[: min(depth, len(parts) - 1)] or parts)

    rows = []
    for (component, name), group in groupby(sorted(tensors, key=module), key=module):
        members = list(group)
        own = [item for item in members if item["alias_of"] is None]
        rows.append(
            {
                "component": component,
                "module": name,
                "tensors": len(members),
                "dtypes": sorted({item["dtype"] for item in members}),
                "size_bytes": sum(item["size_bytes"] for item in own),
            }
        )
    return rows


def written_by(manifest: CheckpointManifest) -> list[dict[str, Any]]:
    """What each rank that wrote anything wrote: bytes by component, and of its index."""
    owner = {name: key for key, item in manifest.components.items() for name in item.files}
    node_of = {rank: number for number, ranks in enumerate(manifest.nodes) for rank in ranks}
    rows: dict[int, dict[str, int]] = {}
    for name, record in manifest.files.items():
        row = rows.setdefault(record.writer, {})
        key = owner.get(name, "index")
        row[key] = row.get(key, 0) + record.size
    return [
        {
            "rank": rank,
            "node": node_of.get(rank),
            "size_bytes": sum(row.values()),
            "components": row,
        }
        for rank, row in sorted(rows.items())
    ]


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


def describe(
    document: dict[str, Any],
    values: dict[str, tuple[StoredCopy, Any]] | None,
    asked: Questions,
    file: str | None,
) -> list[Block]:
    checkpoint = document["checkpoint"]
    problems = problem_lines(document, document["fallback"])
    if not asked.overview or file is not None:
        blocks: list[Block] = [short_header(checkpoint, document), *problems]
        return blocks + answers(document, values, asked)
    blocks = [header(checkpoint, document), *problems]
    if document["components"]:
        blocks.append(component_table(document["components"]))
    if checkpoint.get("metrics"):
        at = checkpoint["metrics_step"]
        other = "" if at in (None, checkpoint["step"]) else f" (measured at step {at})"
        rows = [[name, render.number(value)] for name, value in checkpoint["metrics"].items()]
        blocks.append(table(f"metrics{other}", "metric, value>", rows))
    if document["foreign_files"]:
        title = "foreign files: not part of this checkpoint, ignored when it is loaded"
        blocks.append(Facts(Cell(title, "yellow"), []))
        blocks += [Line(f"  {name}") for name in document["foreign_files"]]
    return blocks


def answers(
    document: dict[str, Any], values: dict[str, tuple[StoredCopy, Any]] | None, asked: Questions
) -> list[Block]:
    """What was asked beside the overview."""
    blocks: list[Block] = []
    if asked.metadata and "format_version" in document["checkpoint"]:
        blocks.append(metadata(document["checkpoint"]))
    if asked.ranks and document["ranks"] is not None:
        blocks.append(rank_table(document))
    if asked.files and document["files"]:
        rows = [
            [item["name"], size(item["size_bytes"]), str(item["writer"]), item["digest"]]
            for item in document["files"]
        ]
        blocks.append(table("files", "file, size>, writer>, digest", rows))
    if document["modules"] is not None:
        modules = map(module_row, document["modules"])
        blocks.append(table("modules", "module, tensors>, dtype, size>", modules))
    elif document["tensors"] is not None:
        tensors = map(tensor_row, document["tensors"])
        blocks.append(table("tensors", "tensor, dtype, shape, size>, file", tensors))
    if document["tensors"] is not None:
        own = [item for item in document["tensors"] if item["alias_of"] is None]
        total = size(sum(item["size_bytes"] for item in own))
        blocks.append(Line(f"  total: {count(len(document['tensors']), 'tensor')}, {total}"))
    for component, (copy, value) in (values or {}).items():
        pairs: list[tuple[str, Cell | str]] = [
            (path or ".", text) for path, text in facts.leaves(value)
        ]
        blocks.append(Facts(Cell(copy.title(component), "bold"), pairs))
    return blocks


def component_table(components: Sequence[dict[str, Any]]) -> Table:
    """A group, or copies, are a column where there are any."""
    groups = any(item["group"] for item in components)
    copies = any(item["copies"] > 1 for item in components)
    columns = "component!, pattern, dtype, tensors>, size>"
    columns += ", copies>" * copies + ", group" * groups + ", written by ranks"
    rows = []
    for item in components:
        dtypes = item["dtypes"]
        row = [item["key"], item["pattern"] + ("" if item["required"] else ", optional")]
        row.append("?" if dtypes is None else ",".join(dtypes) or "-")
        row += [str(item["tensors"]), size(item["size_bytes"] + (item["values_bytes"] or 0))]
        row += [str(item["copies"])] * copies + [item["group"] or "-"] * groups
        rows.append([*row, render.ranks(item["writers"])])
    return table("components", columns, rows)


def rank_table(document: dict[str, Any]) -> Table:
    """Ranks that follow one another and wrote the same are one row."""
    keys = [*(item["key"] for item in document["components"]), "index"]

    def cells(row: dict[str, Any]) -> list[str]:
        return [size(row["components"].get(key)) for key in keys]

    rows = []
    for same, group in groupby(document["ranks"], key=cells):
        members = list(group)
        ranks = render.ranks([row["rank"] for row in members]) + " each" * (len(members) > 1)
        rows.append([ranks, *same, size(sum(row["size_bytes"] for row in members))])
    columns = [render.Column(key, right=True) for key in [*keys, "total"]]
    return Table("who wrote what", [render.Column("rank"), *columns], rows)


def short_header(checkpoint: dict[str, Any], document: dict[str, Any]) -> Facts:
    """One line, and what restore would pass over."""
    status = checkpoint["status"]
    verified = ", every byte verified" if document["verified"] and not document["problems"] else ""
    title = f"{checkpoint['name']}  {status}{verified}"
    return Facts(Cell(title, status_cell(status).style), not_usable(document["newer"]))


def not_usable(newer: list[dict[str, Any]]) -> list[tuple[str, Cell | str]]:
    return [
        (
            "newer, not usable",
            Cell(
                f"{entry['name']} is {entry['status']}: {entry['reason'] or 'no reason known'}",
                "yellow",
            ),
        )
        for entry in reversed(newer)
    ]


def header(checkpoint: dict[str, Any], document: dict[str, Any]) -> Facts:
    title = status_cell(checkpoint["status"])
    verified = document["verified"] and not document["problems"]
    status = title._replace(text=title.text + (", every byte verified" if verified else ""))
    pairs: list[tuple[str, Cell | str]] = [("status", status), *not_usable(document["newer"])]
    pairs.append(("path", checkpoint["url"]))
    if checkpoint["pinned"]:
        pairs.append(("pinned", "yes: retention and delete leave it alone"))
    for name in ("step", "run_id"):
        if checkpoint.get(name) is not None:
            pairs.append((name.removesuffix("_id").replace("_", " "), str(checkpoint[name])))
    if "format_version" not in checkpoint:
        return Facts(Cell(checkpoint["name"], "bold"), pairs)
    nodes, created = checkpoint["nodes"], render.moment(checkpoint["created"])
    age = f"{created.text} ({created.terminal})" if created.terminal else ""
    pairs += [
        ("created", created._replace(terminal=age)),
        ("size", f"{size(checkpoint['size_bytes'])} in {count(checkpoint['files'], 'file')}"),
        (
            "world size",
            f"{checkpoint['world_size']}" + (f" on {len(nodes)} nodes" if len(nodes) > 1 else ""),
        ),
        *([("storage mode", _part(checkpoint))] if checkpoint["node"] is not None else []),
    ]
    for name, partition in checkpoint["groups"].items():
        text = " ".join(f"{{{render.ranks(group)}}}" for group in partition)
        pairs.append((f"group {name}", text if len(text) <= 100 else text[:97] + "..."))
    return Facts(Cell(checkpoint["name"], "bold"), pairs)


def metadata(checkpoint: dict[str, Any]) -> Facts:
    """All that a person seldom asks for; the user's own metadata one line for each leaf."""
    pairs: list[tuple[str, Cell | str]] = [
        (name.replace("_", " "), str(checkpoint[name]))
        for name in ("sequence", "checkpoint_id", "attempt_id", "format_version", "digest")
    ]
    pairs.append(("versions", _words(checkpoint["versions"])))
    if checkpoint["environment"]:
        pairs.append(("environment", _words(checkpoint["environment"])))
    if checkpoint["training_args_hash"]:
        pairs.append(("training args", checkpoint["training_args_hash"]))
    if checkpoint["timings"]:
        pairs.append(("timings", render.seconds(checkpoint["timings"])))
    if checkpoint["extra"]:
        pairs.append(("other fields", ", ".join(checkpoint["extra"])))
    found = _json_leaves(checkpoint["metadata"], "metadata")
    return Facts(Cell("metadata", "bold"), pairs + found)


def _json_leaves(document: Any, path: str) -> list[tuple[str, Cell | str]]:
    """Without recursion: metadata may be nested as deeply as its writer liked."""
    pairs: list[tuple[str, Cell | str]] = []
    todo = [(path, document)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, dict) and item:
            todo += [(f"{path}/{key}", item[key]) for key in sorted(item, reverse=True)]
        elif not (isinstance(item, dict) and path == "metadata"):
            pairs.append((path, json.dumps(item, ensure_ascii=False)))
    return pairs


def _part(checkpoint: dict[str, Any]) -> str:
    node, nodes = checkpoint["node"], checkpoint["nodes"]
    return (
        f"node: this is the part of node {node} of {len(nodes)} (ranks {render.ranks(nodes[node])})"
    )


def _words(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def module_row(item: dict[str, Any]) -> list[Cell | str]:
    name = f"{item['component']}/{item['module']}"
    return [name, str(item["tensors"]), ",".join(item["dtypes"]), size(item["size_bytes"])]


def tensor_row(item: dict[str, Any]) -> list[Cell | str]:
    shape = "x".join(map(str, item["shape"])) or "scalar"
    place = item["layout"] or item["file"] or "-"
    file = f"same as {item['alias_of']}" if item["alias_of"] else place
    return [item["full_name"], item["dtype"], shape, size(item["size_bytes"]), file]
