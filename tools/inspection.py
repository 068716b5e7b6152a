"""`ckpt inspect`: what one checkpoint holds, by its manifest, on one screen; one more
answer for each question: tensors, plain values, files, who wrote what, metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from .cli import LOCATION, command, flag, number, repeated
from .copies import StoredCopy, Which, check_fits, choose_copy, which_options
from .failures import not_found
from .lookup import Found, Root, chosen, fallback, normal, passed_over, retried, split
from .output import for_programs
from .render import (
    Block,
    Cell,
    Column,
    Facts,
    Line,
    Report,
    Table,
    count,
    pairs_of,
    size,
    status_cell,
    table,
)
from .subject import Options, Subject, problem_lines

# Indexes of at most so many bytes, in so many files, are read to say how large plain values are and
# which dtypes there are.
INDEX_LIMIT, INDEX_FILES = 16 << 20, 64
QUESTIONS = ("tensors", "depth", "values", "ranks", "files", "metadata")
Values = Mapping[str, tuple[StoredCopy, Any]]


@command("ckpt inspect runs/a", "ckpt inspect runs/a/checkpoint-500 --tensors 'model/*' --depth 2")
@click.argument("path", required=False, type=LOCATION)
@click.option(
    "--tensors",
    metavar="[PATTERN]",
    is_flag=False,
    flag_value="*",
    help="List tensors whose name matches, with their total.",
)
@number("--depth", 1, "Tensors by the first N parts of their names, with totals.")
@repeated("--values", "COMPONENT", "Plain values.")
@which_options
@flag("--ranks", "Which rank wrote how much of each component.")
@flag("--files", "List files with size, writer and digest.")
@flag("--metadata", "Ids, versions, phases, and the user's metadata.")
@flag("--verify", "Check every byte too.")
def inspect_command(
    path: str | None,
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
        path, asked["tensors"] = asked["tensors"], "*"
    if path is None:
        raise click.UsageError("Missing argument 'PATH'.")
    which = Which(rank, group, node)
    if which != Which() and not asked["values"]:
        raise click.UsageError(
            "--rank, --group and --node choose among the values of a component: give --values too"
        )
    subject, file = file_of(path, options)
    if subject is not None:
        return inspected(subject, file, which, asked)
    return retried(path, options, lambda found: inspected(found, None, which, asked))


def inspected(found: Found, file: str | None, which: Which, asked: dict[str, Any]) -> Report:
    subject, newer = chosen(found), passed_over(found)
    if subject is None:
        # `restore` would find nothing: the newest of what it would try, else of all.
        assert isinstance(found, Root)
        subject = found.subject(newer.pop() if newer else found.entries[-1])
        newer = []
    if subject.error is not None:
        raise subject.error
    answers: dict[str, Any] = dict.fromkeys(("foreign_files", "tensors", "values"))
    overview = file is None and not any(asked[name] for name in QUESTIONS)
    extent: dict[str, Any] = {}
    with subject:
        if asked["verify"]:
            subject.verify()
        if (view := subject.view) is not None:
            # An index that cannot be read is one more problem of the checkpoint, not the end of the
            # command.
            answers = read_answers(subject, view, file, which, asked)
            extent = extents(view) if overview or for_programs() else {}
    manifest, tensors, values = subject.info.manifest, answers["tensors"], answers["values"]
    files = manifest is not None and (asked["files"] or for_programs())
    document = {
        "checkpoint": facts.checkpoint(subject.info),
        "components": facts.components(manifest, extent) if manifest else [],
        "files": facts.files(manifest) if manifest and files else [],
        "foreign_files": sorted(answers["foreign_files"] or []),
        "tensors": tensors,
        "modules": by_module(tensors, asked["depth"])
        if tensors is not None and asked["depth"]
        else None,
        "ranks": written_by(manifest) if manifest and asked["ranks"] else None,
        "values": {k: facts.value(value) for k, (_, value) in values.items()} if values else None,
        "values_of": {k: copy.document() for k, (copy, _) in values.items()} if values else None,
        "verified": asked["verify"] and subject.view is not None,
        "problems": subject.problems,
        "fallback": None if subject.good else fallback(subject, asked["verify"]),
        "newer": [facts.entry(info) for info in newer],
    }
    complaint = None if subject.good else f"{subject.name} is {subject.status}"
    if overview:
        blocks = describe(document)
    else:
        verified = ", every byte verified" * (document["verified"] and not subject.problems)
        title = Cell(
            f"{subject.name}  {subject.status}{verified}", status_cell(subject.status).style
        )
        blocks = [Facts(title, not_usable(document)), *problem_lines(document)]
        blocks += answer_blocks(document, values or {}, asked)
    return Report(document, blocks, subject.exit_code, complaint)


def file_of(url: str, options: Options) -> tuple[Subject, str] | tuple[None, None]:
    """The checkpoint and the file's name where `url` is the path of one of its tensor files."""
    folder, name = split(normal(url)) if url else (None, "")
    if not folder or not name.endswith(".safetensors"):
        return None, None
    try:
        subject = Subject.open(folder, split(folder)[1], options)
    except CheckpointNotFound:
        return None, None
    if subject.view is None or name in subject.view.manifest.files:
        return subject, name
    subject.view.__exit__(None, None, None)
    raise not_found(f"{name} is no file of the checkpoint {subject.url}", path=normal(url))


def read_answers(
    subject: Subject, view: CheckpointView, file: str | None, which: Which, asked: dict[str, Any]
) -> dict[str, Any]:
    """What the indexes say; None for what was not asked, or cannot be read."""
    pattern, tensors, values = asked["tensors"], None, None
    if pattern is not None or asked["depth"] or file is not None:
        tensors = subject.attempt(lambda: matching(view, pattern or "*", file))
    if asked["values"]:
        values = subject.attempt(lambda: values_of(view, asked["values"], which))
    return {"foreign_files": view.foreign_files(), "tensors": tensors, "values": values}


def extents(view: CheckpointView) -> dict[str, Any]:
    """How large the plain values of a component are, and which dtypes its tensors have, by
    component; nothing where it would take long to find out, or cannot be known."""
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
            found[key] = {"values_bytes": view.values_bytes(key), "dtypes": view.dtypes(key)}
        except CheckpointError:  # a finding for `verify`, or for who asks for the values
            continue
    return found


def by_module(tensors: Sequence[dict[str, Any]], depth: int) -> list[dict[str, Any]]:
    """Totals of the tensors of each component by the first `depth` parts of their names: of
    modules, and of nested dicts and lists."""

    def module(item: dict[str, Any]) -> tuple[str, str]:
        parts = item["name"].replace("/", ".").split(".")
        return item["component"], ".".join(parts[: min(depth, len(parts) - 1)] or parts)

    rows = []
    for (component, name), group in groupby(sorted(tensors, key=module), key=module):
        members = list(group)
        row = {"component": component, "module": name, "tensors": len(members)}
        row["dtypes"] = sorted({item["dtype"] for item in members})
        rows.append(row | {"size_bytes": stored_bytes(members)})
    return rows


def stored_bytes(tensors: Iterable[dict[str, Any]]) -> int:
    """Of several names of one tensor, once."""
    return sum(item["size_bytes"] for item in tensors if item["alias_of"] is None)


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


def matching(view: CheckpointView, pattern: str, file: str | None) -> list[dict[str, Any]]:
    """Tensors whose full name ("component/name") or name is `pattern`, or matches it as a shell
    pattern; of `file` alone where it is given.

    A tensor that each rank, group or node has one of is found under its component's own key, too.
    Raises Failure when there is none.
    """
    manifest = view.manifest
    keys = {key + copy.label: key for key in manifest.components for copy in manifest.copies(key)}
    everything = view.tensors()
    if file is not None:
        reads = view.reads_of(view.index(manifest.files[file].writer))
        inside = {(read.component, read.entry.name) for read in reads if read.entry.file == file}
        everything = [t for t in everything if t.file == file or (t.component, t.name) in inside]

    def matches(tensor: TensorInfo) -> bool:
        names = tensor.full_name, tensor.name, f"{keys.get(tensor.component)}/{tensor.name}"
        return pattern in ("*", *names) or any(fnmatchcase(name, pattern) for name in names)

    found = [facts.tensor(info) for info in everything if matches(info)]
    if not found and (everything or pattern != "*"):
        where = f"{len(everything)} tensors in {', '.join(manifest.components)}"
        raise not_found(f"no tensor matches {pattern!r}: {where}", path=view.url, pattern=pattern)
    return found


def values_of(view: CheckpointView, components: tuple[str, ...], which: Which) -> Values:
    """Python values by component, and whose they are. Raises Failure when there is no such
    component, or copy."""
    for name in components:
        if name not in view.manifest.components:
            known = ", ".join(view.manifest.components) or "none"
            what = f"no component {name!r} in {view.url}: it has {known}"
            raise not_found(what, path=view.url, component=name)
    check_fits(view, components, which)
    copies = {name: choose_copy(view, name, which) for name in components}
    return {name: (copy, view.values(name, copy.number)) for name, copy in copies.items()}


# ---------------------------------------------------------------- for people


def describe(document: dict[str, Any]) -> list[Block]:
    """The overview."""
    checkpoint = document["checkpoint"]
    blocks: list[Block] = [header(document), *problem_lines(document)]
    if document["components"]:
        blocks.append(component_table(document["components"]))
    if checkpoint.get("metrics"):
        at = checkpoint["metrics_step"]
        other = "" if at in (None, checkpoint["step"]) else f" (measured at step {at})"
        rows = [{"metric": name, "value": value} for name, value in checkpoint["metrics"].items()]
        blocks.append(table(f"metrics{other}", "metric, value>", rows))
    if document["foreign_files"]:
        title = "foreign files: not part of this checkpoint, ignored when it is loaded"
        blocks.append(Facts(Cell(title, "yellow"), []))
        blocks += [Line(f"  {name}") for name in document["foreign_files"]]
    return blocks


def answer_blocks(document: dict[str, Any], values: Values, asked: dict[str, Any]) -> list[Block]:
    """What was asked beside the overview."""
    blocks: list[Block] = []
    tensors = document["tensors"]
    if asked["metadata"] and "format_version" in document["checkpoint"]:
        blocks.append(metadata(document["checkpoint"]))
    if document["ranks"] is not None:
        keys = [*(item["key"] for item in document["components"]), "index"]
        columns = [Column("rank"), *(Column(key, right=True) for key in (*keys, "total"))]
        rows = [
            [ranks, *(size(parts.get(key)) for key in keys), size(total)]
            for ranks, parts, total in like_ranks(document["ranks"])
        ]
        blocks.append(Table("who wrote what", columns, rows))
    if asked["files"] and document["files"]:
        columns_of_files = "file=name, size>=size_bytes, writer>, digest"
        blocks.append(table("files", columns_of_files, document["files"]))
    if document["modules"] is not None:
        modules = [
            row | {"module": f"{row['component']}/{row['module']}"} for row in document["modules"]
        ]
        columns_of_modules = "module, tensors>, dtype=dtypes, size>=size_bytes"
        blocks.append(table("modules", columns_of_modules, modules))
    elif tensors is not None:
        columns_of_tensors = "tensor=full_name, dtype, shape, size>=size_bytes, file"
        blocks.append(table("tensors", columns_of_tensors, map(_with_file, tensors)))
    if tensors is not None:
        blocks.append(
            Line(f"  total: {count(len(tensors), 'tensor')}, {size(stored_bytes(tensors))}")
        )
    for component, (copy, value) in values.items():
        pairs = [(path or ".", facts.text(leaf)) for path, leaf in facts.leaves(value)]
        blocks.append(Facts(Cell(f"values of {component}{copy.title()}", "bold"), pairs))
    return blocks


def _with_file(tensor: dict[str, Any]) -> dict[str, Any]:
    same = f"same as {tensor['alias_of']}" if tensor["alias_of"] else None
    return tensor | {"file": same or tensor["layout"] or tensor["file"]}


def component_table(components: Sequence[dict[str, Any]]) -> Table:
    """A group, or copies, are a column where there are any."""
    columns = "component!=key, pattern, dtype=dtypes, tensors>, size>=size_bytes"
    columns += ", copies>" * any(item["copies"] > 1 for item in components)
    columns += ", group" * any(item["group"] for item in components)
    rows = [
        item
        | {
            "pattern": item["pattern"] + ", optional" * (not item["required"]),
            "dtypes": "?" if item["dtypes"] is None else item["dtypes"],
            "size_bytes": item["size_bytes"] + (item["values_bytes"] or 0),
        }
        for item in components
    ]
    return table("components", f"{columns}, written by ranks=writers", rows)


def like_ranks(ranks: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, int], int]]:
    """(Ranks, bytes of each of them by component, bytes of them all): ranks that follow one another
    and wrote the same, to the digits that are shown, are one."""

    def shown(row: dict[str, Any]) -> dict[str, str]:
        return {key: size(nbytes) for key, nbytes in row["components"].items()}

    for _, group in groupby(ranks, key=shown):
        members = list(group)
        name = render.ranks(row["rank"] for row in members) + " each" * (len(members) > 1)
        yield name, members[0]["components"], sum(row["size_bytes"] for row in members)


def not_usable(document: dict[str, Any]) -> list[tuple[str, Cell | str]]:
    """What restore would pass over."""
    known = ((e, e["reason"] or "no reason known") for e in reversed(document["newer"]))
    texts = (f"{entry['name']} is {entry['status']}: {reason}" for entry, reason in known)
    return [("newer, not usable", Cell(text, "yellow")) for text in texts]


def header(document: dict[str, Any]) -> Facts:
    checkpoint = document["checkpoint"]
    note = ", every byte verified" * (document["verified"] and not document["problems"])
    pairs = [("status", status_cell(checkpoint["status"], note)), *not_usable(document)]
    kept = "yes: retention and delete leave it alone" if checkpoint["pinned"] else None
    pairs += pairs_of(checkpoint | {"pinned": kept}, "path=url, pinned, step, run=run_id")
    title = Cell(checkpoint["name"], "bold")
    if "format_version" not in checkpoint:
        return Facts(title, pairs)
    nodes, node, created = (
        checkpoint["nodes"],
        checkpoint["node"],
        render.moment(checkpoint["created"]),
    )
    age = f"{created.text} ({created.terminal})" if created.terminal else ""
    known: dict[str, Any] = {
        "created": created._replace(terminal=age),
        "size": f"{size(checkpoint['size_bytes'])} in {count(checkpoint['files'], 'file')}",
        "world_size": str(checkpoint["world_size"]) + f" on {len(nodes)} nodes" * (len(nodes) > 1),
    }
    if node is not None:
        part = f"the part of node {node} of {len(nodes)} (ranks {render.ranks(nodes[node])})"
        known["storage_mode"] = f"node: this is {part}"
    pairs += pairs_of(known, "created, size, world size, storage mode")
    for name, partition in checkpoint["groups"].items():
        text = " ".join(f"{{{render.ranks(group)}}}" for group in partition)
        pairs.append((f"group {name}", facts.shortened(text, 100)))
    return Facts(title, pairs)


def metadata(checkpoint: dict[str, Any]) -> Facts:
    """All that a person seldom asks for; the user's own metadata one line for each leaf."""
    words = {
        name: ", ".join(f"{what} {value}" for what, value in checkpoint[name].items())
        for name in ("versions", "environment")
    }
    words["timings"] = render.seconds(checkpoint["timings"])
    words["extra"] = ", ".join(checkpoint["extra"])
    names = "sequence, checkpoint id, attempt id, format version, digest, versions, environment, "
    names += "training args=training_args_hash, timings, other fields=extra"
    return Facts(
        Cell("metadata", "bold"),
        [*pairs_of(checkpoint | words, names), *_json_leaves(checkpoint["metadata"], "metadata")],
    )


def _json_leaves(document: Any, path: str) -> Iterator[tuple[str, str]]:
    """Without recursion: metadata may be nested as deeply as its writer liked."""
    todo = [(path, document)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, dict) and item:
            todo += [(f"{path}/{key}", item[key]) for key in sorted(item, reverse=True)]
        elif not (isinstance(item, dict) and path == "metadata"):
            yield path, json.dumps(item, ensure_ascii=False)
