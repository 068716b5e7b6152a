"""`ckpt diff`: what changed between two checkpoints, by the digests in their indexes; with --stats
by how much, which reads what changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from json import dumps
from typing import Any, NamedTuple

import click

from ckptcore import CheckpointView, StoredBox, TensorInfo, restore_candidates

from . import facts, render
from .cli import LOCATION, command, flag
from .copies import stored_copies
from .failures import BAD, GOOD, USAGE, Failure, bad
from .lookup import Root, opened, resolve
from .render import Block, Cell, Facts, Line, Report, count, first_rows
from .subject import Options, Subject

CHUNK, DIGEST = 4 << 20, 8  # bytes that one digest stands for, and its own


@command("ckpt diff runs/a", "ckpt diff runs/a/checkpoint-100 runs/b/checkpoint-100 --stats")
@click.argument("a", type=LOCATION)
@click.argument("b", required=False, type=LOCATION)
@flag("--stats", "Read what changed, and say by how much.")
@flag("--exit-code", "Exit with 1 where they differ.")
def diff_command(a: str, b: str | None, stats: bool, exit_code: bool, options: Options) -> Report:
    """What changed from the checkpoint A to the checkpoint B: components, tensors and values. When
    A is a root and B is not given, from its last but one checkpoint to the last.

    By digests: no tensor is read unless --stats is given.
    """
    left, right = _pair(a, b, options)
    with left, right:
        document = compared(left, right, stats)
    code = BAD if exit_code and not document["same"] else GOOD
    return Report(document, describe(document), code)


def _pair(url: str, other: str | None, options: Options) -> tuple[Subject, Subject]:
    found = resolve(url, options)
    if other is not None:
        return opened(found), opened(resolve(other, options))
    if not isinstance(found, Root):
        found.readable()
        what = f"{found.url} is one checkpoint: give another to compare it with"
        raise Failure("usage", USAGE, what)
    usable = [info for info in restore_candidates(found.entries) if info.status == "committed"]
    if len(usable) < 2:
        there = count(len(usable), "usable checkpoint")
        raise bad(f"{found.url} has {there} of the run that saved last: give two")
    new, old = (opened(found.subject(info)) for info in usable[:2])
    return old, new


def compared(a: Subject, b: Subject, stats: bool) -> dict[str, Any]:
    """The whole JSON document."""
    views = a.readable(), b.readable()
    left, right = (view.manifest.components for view in views)
    components: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    values: list[dict[str, Any]] = []
    for key in sorted({*left, *right}):
        row = {"key": key, "changed": 0, "values": 0}
        if key not in left or key not in right:
            row["change"] = "only_b" if key not in left else "only_a"
            components.append(row | {"tensors": (left.get(key) or right[key]).tensors})
            continue
        total, others, mine = 0, len(tensors), len(values)
        for of, sides in copies_of(*views, key):
            common = {"component": key, "of": of}
            names = sorted({name for side in sides for name in side.tensors})
            rows = (changed_tensor(name, sides, stats) for name in names)
            tensors += [common | row for row in rows if row is not None]
            values += [common | row for row in changed_values(sides)]
            total += len(names)
        known = len(values) > mine or any(row["change"] != "layout" for row in tensors[others:])
        row |= {"tensors": total, "changed": len(tensors) - others, "values": len(values) - mine}
        unknown = "unknown" if row["changed"] else "same"
        components.append(row | {"change": "changed" if known else unknown})
    return {
        "a": facts.fields(a.info, SIDE),
        "b": facts.fields(b.info, SIDE),
        "same": all(item["change"] == "same" for item in components),
        "components": components,
        "tensors": tensors,
        "values": values,
    }


class Side(NamedTuple):
    """A copy of a component in one of the two checkpoints; without anything where it has none."""

    view: CheckpointView
    tensors: Mapping[str, TensorInfo]
    boxes: Mapping[str, list[StoredBox]]
    values: Mapping[str, Any]


def copies_of(a: CheckpointView, b: CheckpointView, key: str) -> Iterator[tuple[str, list[Side]]]:
    """(Whose, that of `a` and of `b`) of all copies of a component, by rank, group or node."""
    known = [{copy.name: copy.number for copy in stored_copies(v.manifest, key)} for v in (a, b)]
    for of in sorted({*known[0], *known[1]}):
        sides = []
        for view, numbers in zip((a, b), known, strict=True):
            if of not in numbers:
                sides.append(Side(view, {}, {}, {}))
                continue
            leaves = list(facts.leaves(view.values(key, numbers[of])))
            held = (facts.tensor_in(leaf) for _, leaf in leaves)
            tensors = {tensor.name: tensor for tensor in held if tensor is not None}
            values = {path: leaf for path, leaf in leaves if not facts.is_tensor(leaf)}
            sides.append(Side(view, tensors, view.boxes(key, numbers[of]), values))
        yield of, sides


def changed_tensor(name: str, sides: list[Side], stats: bool) -> dict[str, Any] | None:
    """How a tensor changed; None when it is the same."""
    one, other = (side.tensors.get(name) for side in sides)
    there = one or other
    assert there is not None
    row = {"name": name} | {k: v for k, v in facts.tensor(there).items() if k in SHOWN_OF_TENSORS}
    row |= {"changed_bytes": there.nbytes}
    if one is None or other is None:
        return row | {"change": "only_b" if one is None else "only_a"}
    if one.shape != other.shape:
        return row | {"change": "shape", "to": list(other.shape)}
    left, right = ({(box.offset, box.shape): box for box in side.boxes[name]} for side in sides)
    if one.dtype != other.dtype:
        row |= {"change": "dtype", "to": other.dtype}
    elif left.keys() != right.keys():
        row |= {"change": "layout", "changed_bytes": None}
    else:
        changed = sum(_bytes_that_differ(left[at], right[at]) for at in left)
        if not changed:
            return None
        row |= {"change": "changed", "changed_bytes": changed}
    if stats:
        # numpy takes longer to load than all else that is done here.
        arrays = import_module(".arrays", __package__)
        row |= arrays.difference(sides[0].view, sides[1].view, one, other)
        if row["change"] == "layout":  # now it is known
            row["change"] = "changed"
            return row if row["items_differ"] else None
    return row


SIDE = "name url step run_id"
SHOWN_OF_TENSORS = ("dtype", "shape", "size_bytes")


def _bytes_that_differ(a: StoredBox, b: StoredBox) -> int:
    """Of the chunks whose digests are not the same."""
    return sum(
        min(CHUNK, a.nbytes - at // DIGEST * CHUNK)
        for at in range(0, len(a.digests), DIGEST)
        if a.digests[at : at + DIGEST] != b.digests[at : at + DIGEST]
    )


def changed_values(sides: list[Side]) -> Iterator[dict[str, Any]]:
    """Plain values of a component that are not the same in both."""
    left, right = (side.values for side in sides)
    for path in dict.fromkeys([*left, *right]):
        change = "only_b" if path not in left else "only_a" if path not in right else "changed"
        a, b = facts.value(left.get(path)), facts.value(right.get(path))
        if change != "changed" or _text(a) != _text(b):
            yield {"path": path, "change": change, "a": a, "b": b}


def _text(item: Any) -> str:
    return str(dumps(render.strict(item), sort_keys=True, ensure_ascii=False))


# ---------------------------------------------------------------- for people

STYLES = {"same": "dim", "only_a": "red", "only_b": "green"}


def describe(document: dict[str, Any]) -> list[Block]:
    a, b = document["a"], document["b"]
    blocks: list[Block] = [Line(f"{a['url']} (step {a['step']}) -> {b['url']} (step {b['step']})")]
    if document["same"]:
        frozen = ": a frozen run?" * (a["step"] != b["step"])
        return [*blocks, Line(f"nothing changed{frozen}", "yellow")]
    components = [
        (item["key"], Cell(summary(item), STYLES.get(item["change"], "")))
        for item in document["components"]
    ]
    columns = f"value=name, step {a['step']}=a, step {b['step']}=b"
    return [
        *blocks,
        Facts(Cell("components", "bold"), components),
        *tensor_table(document["tensors"]),
        *first_rows("values", columns, [value_row(item) for item in document["values"]], "diff"),
    ]


def summary(item: dict[str, Any]) -> str:
    if item["change"] in ("only_a", "only_b"):
        return "only in the first" if item["change"] == "only_a" else "only in the second"
    if item["change"] == "same":
        return "unchanged"
    if item["change"] == "unknown":
        return f"cut over ranks in another way ({item['changed']} tensors): --stats reads them"
    tensors = f"{item['changed']} of {count(item['tensors'], 'tensor')} changed"
    values = f"{count(item['values'], 'value')} changed"
    return ", ".join([tensors] * bool(item["tensors"]) + [values] * bool(item["values"]))


def tensor_table(tensors: list[dict[str, Any]]) -> list[Block]:
    columns = "tensor=name, change, dtype, bytes>=shown"
    if any("max_abs" in item for item in tensors):
        columns += ", differ>=items_differ, max>=max_abs, mean>=mean_abs, NaN>=nan"
    rows = []
    for item in tensors:
        to = f" -> {item['to']}" if "to" in item else ""
        changed = item["changed_bytes"]
        row = {
            "name": full_name(item, item["name"]),
            "change": item["change"].replace("_", " ") + to,
        }
        row["shown"] = "?" if changed is None else render.size(changed)
        row["nan"] = f"{item['nan_a']}/{item['nan_b']}" if "nan_a" in item else "-"
        rows.append(item | row)
    return first_rows("tensors", columns, rows, "diff")


def value_row(item: dict[str, Any]) -> dict[str, Any]:
    texts = {side: facts.shortened(_text(item[side]), 60) for side in "ab"}
    missing = {"only_a": "b", "only_b": "a"}.get(item["change"], "")
    return {"name": full_name(item, item["path"])} | texts | {missing: "-"}


def full_name(item: dict[str, Any], path: str) -> str:
    of = "" if item["of"] == "all ranks" else f" ({item['of']})"
    return f"{item['component']}/{path}{of}"
