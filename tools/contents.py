"""`ckpt ls` and `ckpt inspect`: what is in a root, and what in one checkpoint by its manifest, on
one screen; one more answer for each question: tensors, plain values, files, who wrote what,
metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from typing import Any

import click

from ckptcore import CheckpointError, CheckpointManifest, CheckpointView, TensorInfo, shared_files

from . import facts, render
from .cli import LOCATION, command, flag, number, repeated
from .copies import StoredCopy, Which, check_fits, choose_copy, which_options
from .failures import BAD, GOOD, Failure, not_found
from .lookup import Found, fallback, normal, on_path, problem_lines, retried, split
from .render import Block, Cell, Column, Facts, Line, Report, Table, count, pairs_of, size, table

# Indexes of at most so many bytes, in so many files, are read to say how large plain values are and
# which dtypes there are.
INDEX_LIMIT, INDEX_FILES = 16 << 20, 64
QUESTIONS = ("tensors", "depth", "values", "ranks", "files", "metadata")
ENTRIES = "step>, name!, status!, size>!=size_bytes, {}created!, run=run_id, metrics"
SHARED = "alone>!=unshared_bytes, shared with, "
Row = dict[str, Any]
Values = Mapping[str, tuple[StoredCopy, Any]]


@command("ckpt ls runs/a", "ckpt ls s3://bucket/run --json | jq '.checkpoints[] | select(.latest)'")
@partial(on_path, metavar="ROOT")
@flag("--shared", "Show which checkpoints have files in common.")
def ls_command(found: Found, shared: bool) -> Report:
    """List every checkpoint of ROOT, oldest first, with status and metrics, and why one is not
    usable. ROOT may be one checkpoint, which is then listed alone.

    Exits with 0 when at least one checkpoint is usable.
    """
    latest = None
    if found.one is not None:
        found.one.check_known()
    else:
        latest = found.newest()[0]
    sharing = shared_files(found.typed, found.options) if shared and found.one is None else {}
    entries = [facts.entry(i, i is latest, sharing.get(i.name)) for i in found.entries]
    name = latest.name if latest else None
    document = {"root": found.url, "latest": name, "checkpoints": entries}
    blocks: list[Block] = [entry_table(entries, ENTRIES.format(SHARED if shared else ""))]
    # Reasons are sentences with paths: under the table they can be read, in a cell they cannot.
    blocks += [Line(f"{e['name']}: {e['reason']}", "yellow") for e in entries if e["reason"]]
    if any(entry["status"] == "committed" for entry in entries):
        return Report(document, blocks)
    why = f"no usable checkpoint among the {len(entries)} at {found.url}"
    return Report(document, blocks, BAD, why)


def entry_table(entries: Sequence[Row], columns: str) -> Table:
    def status(entry: Row) -> Cell:
        marks = [mark for mark in ("latest", "pinned", "abandoned") if entry[mark]]
        marks += [] if entry["node"] is None else [f"the part of node {entry['node']}"]
        return render.status_cell(entry["status"], "".join(f" ({mark})" for mark in marks))

    return table("", columns, (entry | {"status": status(entry)} for entry in entries))


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
def inspect_command(path: str | None, options: Any, which: Which, **asked: Any) -> Report:
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
    if which != Which() and not asked["values"]:
        raise click.UsageError(
            "--rank, --group and --node choose among the values of a component: give --values too"
        )
    try:
        return retried(path, options, lambda found: inspected(found, None, which, asked))
    except Failure as failure:
        folder, file = split(normal(path))
        if failure.kind != "not_found" or not folder or not file.endswith(".safetensors"):
            raise
    return retried(folder, options, lambda found: inspected(found, file, which, asked))


def inspected(found: Found, file: str | None, which: Which, asked: Row) -> Report:
    info, newer = found.newest()
    if info is None:
        # `restore` would find nothing: the newest of what it would try, else of all.
        info, newer = newer[-1] if newer else found.entries[-1], newer[:0]
    subject = found.subject(info)
    subject.check_known()
    overview = file is None and not any(asked[name] for name in QUESTIONS)
    tensors: list[Row] | None = None
    values: Values | None = None
    foreign: list[str] = []
    extent: Row = {}
    with subject:
        if asked["verify"]:
            subject.verify()
        if (view := subject.view) is not None:
            foreign = sorted(view.foreign_files())
            # An index that cannot be read is one more problem of the checkpoint, not the end of the
            # command.
            if asked["tensors"] is not None or asked["depth"] or file is not None:
                tensors = subject.attempt(lambda: matching(view, asked["tensors"] or "*", file))
            if asked["values"]:
                values = subject.attempt(lambda: values_of(view, asked["values"], which))
            extent = extents(view) if overview or render.for_programs() else {}
    manifest, grouped = subject.info.manifest, asked["depth"] and tensors is not None
    listed = asked["files"] or render.for_programs()
    document = {
        "checkpoint": facts.checkpoint(subject.info),
        "components": facts.components(manifest, extent) if manifest else [],
        "files": facts.files(manifest) if manifest and listed else [],
        "foreign_files": foreign,
        "tensors": tensors,
        "modules": by_module(tensors or (), asked["depth"]) if grouped else None,
        "ranks": written_by(manifest) if manifest and asked["ranks"] else None,
        "values": {k: facts.value(value) for k, (_, value) in values.items()} if values else None,
        "values_of": {k: copy.document() for k, (copy, _) in values.items()} if values else None,
        "verified": asked["verify"] and subject.view is not None,
        "problems": subject.problems,
        "fallback": None if subject.good else fallback(subject, asked["verify"]),
        "newer": [facts.entry(info) for info in newer],
    }
    blocks = describe(document) if overview else answers(document, values or {}, asked)
    complaint = None if subject.good else f"{subject.name} is {subject.status}"
    return Report(document, blocks, subject.exit_code if complaint else GOOD, complaint)


def extents(view: CheckpointView) -> Row:
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


def by_module(tensors: Iterable[Row], depth: int) -> list[Row]:
    """Totals of the tensors of each component by the first `depth` parts of their names: of
    modules, and of nested dicts and lists."""

    def module(item: Row) -> tuple[str, str]:
        parts = item["name"].replace("/", ".").split(".")
        return item["component"], ".".join(parts[: min(depth, len(parts) - 1)] or parts)

    rows = []
    for (component, name), group in groupby(sorted(tensors, key=module), key=module):
        members = list(group)
        row = {"component": component, "module": name, "tensors": len(members)}
        row["dtypes"] = sorted({item["dtype"] for item in members})
        rows.append(row | {"size_bytes": stored_bytes(members)})
    return rows


def named_modules(rows: Iterable[Row]) -> list[Row]:
    return [row | {"module": f"{row['component']}/{row['module']}"} for row in rows]


def stored_bytes(tensors: Iterable[Row]) -> int:
    """Of several names of one tensor, once."""
    return sum(item["size_bytes"] for item in tensors if item["alias_of"] is None)


def written_by(manifest: CheckpointManifest) -> list[Row]:
    """What each rank that wrote anything wrote: bytes by component, and of its index."""
    owner = {name: key for key, item in manifest.components.items() for name in item.files}
    node_of = {rank: number for number, ranks in enumerate(manifest.nodes) for rank in ranks}
    found: dict[int, dict[str, int]] = {}
    for name, record in manifest.files.items():
        row = found.setdefault(record.writer, {})
        key = owner.get(name, "index")
        row[key] = row.get(key, 0) + record.size
    return [
        {"rank": n, "node": node_of.get(n), "size_bytes": sum(row.values()), "components": row}
        for n, row in sorted(found.items())
    ]


def matching(view: CheckpointView, pattern: str, file: str | None) -> list[Row]:
    """Tensors whose full name ("component/name") or name is `pattern`, or matches it as a shell
    pattern; of `file` alone where it is given.

    A tensor that each rank, group or node has one of is found under its component's own key, too.
    Raises Failure when there is none.
    """
    manifest, everything = view.manifest, view.tensors()
    if file is not None and file not in manifest.files:
        raise not_found(f"{file} is no file of the checkpoint {view.url}", path=view.url)
    if file is not None:
        reads = view.reads_of(view.index(manifest.files[file].writer))
        inside = {(read.component, read.entry.name) for read in reads if read.entry.file == file}
        everything = [t for t in everything if t.file == file or (t.component, t.name) in inside]
    keys = {key + copy.label: key for key in manifest.components for copy in manifest.copies(key)}

    def matches(tensor: TensorInfo) -> bool:
        names = tensor.full_name, tensor.name, f"{keys.get(tensor.component)}/{tensor.name}"
        return pattern in names or any(fnmatchcase(name, pattern) for name in names)

    found = [facts.tensor(info) for info in everything if pattern == "*" or matches(info)]
    if not found and (everything or pattern != "*"):
        where = f"{len(everything)} tensors in {', '.join(manifest.components)}"
        raise not_found(f"no tensor matches {pattern!r}: {where}", path=view.url, pattern=pattern)
    return found


def values_of(view: CheckpointView, components: tuple[str, ...], which: Which) -> Values:
    """Python values by component, and whose they are. Raises Failure when there is no such copy,
    UnknownName when there is no such component."""
    for name in components:
        view.check_copy(name, 0)
    check_fits(view, components, which)
    copies = {name: choose_copy(view, name, which) for name in components}
    return {name: (copy, view.values(name, copy.number)) for name, copy in copies.items()}


# ---------------------------------------------------------------- for people


def describe(document: Row) -> list[Block]:
    """The overview."""
    checkpoint = document["checkpoint"]
    blocks: list[Block] = [header(document), *problem_lines(document)]
    if document["components"]:
        blocks.append(component_table(document["components"]))
    at = checkpoint.get("metrics_step")
    other = "" if at in (None, checkpoint["step"]) else f" (measured at step {at})"
    metrics = (checkpoint.get("metrics") or {}).items()
    rows = [{"metric": name, "value": value} for name, value in metrics]
    blocks += render.first_rows(f"metrics{other}", "metric, value>", rows, "inspect")
    if document["foreign_files"]:
        title = "foreign files: not part of this checkpoint, ignored when it is loaded"
        blocks.append(Facts(Cell(title, "yellow"), []))
        blocks += [Line(f"  {name}") for name in document["foreign_files"]]
    return blocks


def answers(document: Row, values: Values, asked: Row) -> list[Block]:
    """What was asked beside the overview."""
    checkpoint, tensors = document["checkpoint"], document["tensors"]
    status = render.status_cell(checkpoint["status"], verified(document))
    title = f"{checkpoint['name']}  {status.text}"
    blocks: list[Block] = [Facts(Cell(title, status.style), not_usable(document))]
    blocks += problem_lines(document)
    if asked["metadata"] and "format_version" in checkpoint:
        blocks.append(metadata(checkpoint))
    if document["ranks"] is not None:
        blocks.append(rank_table(document["components"], document["ranks"]))
    if asked["files"] and document["files"]:
        names = "file=name, size>=size_bytes, writer>, digest"
        blocks.append(table("files", names, document["files"]))
    if document["modules"] is not None:
        rows = named_modules(document["modules"])
        blocks.append(table("modules", "module, tensors>, dtype=dtypes, size>=size_bytes", rows))
    elif tensors is not None:
        names = "tensor=full_name, dtype, shape, size>=size_bytes, file"
        blocks.append(table("tensors", names, map(_with_file, tensors)))
    if tensors is not None:
        total = f"{count(len(tensors), 'tensor')}, {size(stored_bytes(tensors))}"
        blocks.append(Line(f"  total: {total}"))
    for component, (copy, value) in values.items():
        pairs = [(path or ".", facts.text(leaf)) for path, leaf in facts.leaves(value)]
        blocks.append(Facts(Cell(f"values of {component}{copy.title()}", "bold"), pairs))
    return blocks


def verified(document: Row) -> str:
    return ", every byte verified" * (document["verified"] and not document["problems"])


def _with_file(tensor: Row) -> Row:
    if tensor["alias_of"]:
        return tensor | {"file": f"same as {tensor['alias_of']}"}
    return tensor if tensor["file"] else tensor | {"file": tensor["layout"]}


def component_table(components: Sequence[Row]) -> Table:
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


def rank_table(components: Iterable[Row], ranks: Iterable[Row]) -> Table:
    keys = [*(item["key"] for item in components), "index"]
    columns = [Column("rank"), *(Column(key, right=True) for key in (*keys, "total"))]
    rows = [
        [members, *(size(parts.get(key)) for key in keys), size(total)]
        for members, parts, total in like_ranks(ranks)
    ]
    return Table("who wrote what", columns, rows)


def like_ranks(ranks: Iterable[Row]) -> Iterator[tuple[str, dict[str, int], int]]:
    """(Ranks, bytes of each of them by component, bytes of them all): ranks that follow one another
    and wrote the same, to the digits that are shown, are one."""

    def shown(row: Row) -> dict[str, str]:
        return {key: size(nbytes) for key, nbytes in row["components"].items()}

    for _, group in groupby(ranks, key=shown):
        members = list(group)
        name = render.ranks(row["rank"] for row in members) + " each" * (len(members) > 1)
        yield name, members[0]["components"], sum(row["size_bytes"] for row in members)


def not_usable(document: Row) -> list[tuple[str, Cell | str]]:
    """What restore would pass over."""
    known = ((e, e["reason"] or "no reason known") for e in reversed(document["newer"]))
    texts = (f"{entry['name']} is {entry['status']}: {reason}" for entry, reason in known)
    return [("newer, not usable", Cell(text, "yellow")) for text in texts]


def header(document: Row) -> Facts:
    checkpoint = document["checkpoint"]
    status = render.status_cell(checkpoint["status"], verified(document))
    kept = "yes: retention and delete leave it alone" if checkpoint["pinned"] else None
    pairs = [("status", status), *not_usable(document)]
    pairs += pairs_of(checkpoint | {"pinned": kept}, "path=url, pinned, step, run=run_id")
    title = Cell(checkpoint["name"], "bold")
    if "format_version" not in checkpoint:
        return Facts(title, pairs)
    nodes, node = checkpoint["nodes"], checkpoint["node"]
    created = render.moment(checkpoint["created"])
    age = f"{created.text} ({created.terminal})" if created.terminal else ""
    known: Row = {
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


def metadata(checkpoint: Row) -> Facts:
    """All that a person seldom asks for; the user's own metadata one line for each leaf."""
    words = {
        name: ", ".join(f"{what} {value}" for what, value in checkpoint[name].items())
        for name in ("versions", "environment")
    }
    words["timings"] = render.seconds(checkpoint["timings"])
    words["extra"] = ", ".join(checkpoint["extra"])
    names = "sequence, checkpoint id, attempt id, format version, digest, versions, environment, "
    names += "training args=training_args_hash, timings, other fields=extra"
    leaves = _json_leaves(checkpoint["metadata"], "metadata")
    return Facts(Cell("metadata", "bold"), [*pairs_of(checkpoint | words, names), *leaves])


def _json_leaves(document: Any, path: str) -> Iterator[tuple[str, str]]:
    """Without recursion: metadata may be nested as deeply as its writer liked."""
    todo = [(path, document)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, dict) and item:
            todo += [(f"{path}/{key}", item[key]) for key in sorted(item, reverse=True)]
        elif not (isinstance(item, dict) and path == "metadata"):
            yield path, json.dumps(item, ensure_ascii=False)
