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
from .lookup import Options, Subject, resolve
from .render import Block, Cell, Facts, Line, Report, count, first_rows

Row = dict[str, Any]
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
    left, right = pair_of(a, b, options)
    with left, right:
        document = compared(left, right, stats)
    code = BAD if exit_code and not document["same"] else GOOD
    return Report(document, describe(document), code)


def pair_of(url: str, other: str | None, options: Options) -> tuple[Subject, Subject]:
    found = resolve(url, options)
    if other is not None:
        return found.opened(), resolve(other, options).opened()
    if found.one is not None:
        found.one.readable()
        what = f"{found.url} is one checkpoint: give another to compare it with"
        raise Failure("usage", USAGE, what)
    usable = [info for info in restore_candidates(found.entries) if info.status == "committed"]
    if len(usable) < 2:
        there = count(len(usable), "usable checkpoint")
        raise bad(f"{found.url} has {there} of the run that saved last: give two")
    new, old = (found.subject(info) for info in usable[:2])
    return old, new


def compared(a: Subject, b: Subject, stats: bool) -> dict[str, Any]:
    """The whole JSON document."""
    views = a.readable(), b.readable()
    left, right = (view.manifest.components for view in views)
    components: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    values: list[dict[str, Any]] = []
    for key in sorted({*left, *right}):
        if key not in left or key not in right:
            row: Row = {"key": key, "change": "only_b" if key not in left else "only_a"}
            row |= {"tensors": (left.get(key) or right[key]).tensors, "changed": 0, "values": 0}
        else:
            row, changed_tensors, changed = component(key, views, stats)
            tensors += changed_tensors
            values += changed
        components.append(row)
    side = "name url step run_id"
    return {
        "a": facts.fields(a.info, side),
        "b": facts.fields(b.info, side),
        "same": all(row["change"] == "same" for row in components),
        "components": components,
        "tensors": tensors,
        "values": values,
    }


def component(
    key: str, views: tuple[CheckpointView, CheckpointView], stats: bool
) -> tuple[Row, list[Row], list[Row]]:
    """What is said of a component that both have, and its tensors and values that are not the
    same."""
    tensors: list[Row] = []
    values: list[Row] = []
    total = 0
    numbers = [{copy.name: copy.number for copy in stored_copies(v.manifest, key)} for v in views]
    for of in sorted({*numbers[0], *numbers[1]}):
        a, b = (side(view, key, n.get(of)) for view, n in zip(views, numbers, strict=True))
        names = sorted({*a.tensors, *b.tensors})
        rows = [changed_tensor(name, a, b, stats) for name in names]
        tensors += [{"component": key, "of": of} | row for row in rows if row is not None]
        values += [{"component": key, "of": of} | row for row in changed_values(a, b)]
        total += len(names)
    known = values or any(row["change"] != "layout" for row in tensors)
    change = "changed" if known else "unknown" if tensors else "same"
    row: Row = {"key": key, "change": change, "tensors": total}
    return row | {"changed": len(tensors), "values": len(values)}, tensors, values


class Side(NamedTuple):
    """A copy of a component in one of the two checkpoints; without anything where it has none."""

    view: CheckpointView
    tensors: Mapping[str, TensorInfo]
    boxes: Mapping[str, list[StoredBox]]
    values: Mapping[str, Any]


def side(view: CheckpointView, key: str, copy: int | None) -> Side:
    if copy is None:
        return Side(view, {}, {}, {})
    leaves = list(facts.leaves(view.values(key, copy)))
    tensors = {held.name: held for _, leaf in leaves if (held := facts.tensor_in(leaf))}
    values = {path: leaf for path, leaf in leaves if not isinstance(leaf, TensorInfo)}
    return Side(view, tensors, view.boxes(key, copy), values)


def changed_tensor(name: str, a: Side, b: Side, stats: bool) -> Row | None:
    """How a tensor changed; None when it is the same."""
    one, other = a.tensors.get(name), b.tensors.get(name)
    there = one or other
    assert there is not None
    row: Row = {"name": name, "dtype": there.dtype, "shape": there.shape}
    row |= {"size_bytes": there.nbytes, "changed_bytes": there.nbytes}
    if one is None or other is None:
        return row | {"change": "only_b" if one is None else "only_a"}
    if one.shape != other.shape:
        return row | {"change": "shape", "to": [*other.shape]}
    left, right = ({(box.offset, box.shape): box for box in s.boxes[name]} for s in (a, b))
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
        row |= import_module(".arrays", __package__).difference(a.view, b.view, one, other)
        if row["change"] == "layout":  # now it is known
            row["change"] = "changed"
            return row if row["items_differ"] else None
    return row


def _bytes_that_differ(a: StoredBox, b: StoredBox) -> int:
    """Of the chunks whose digests are not the same."""
    return sum(
        min(CHUNK, a.nbytes - at // DIGEST * CHUNK)
        for at in range(0, len(a.digests), DIGEST)
        if a.digests[at : at + DIGEST] != b.digests[at : at + DIGEST]
    )


def changed_values(a: Side, b: Side) -> Iterator[Row]:
    """Plain values of a component that are not the same in both."""
    for path in dict.fromkeys([*a.values, *b.values]):
        only = "only_a" if path in a.values else "only_b"
        change = "changed" if path in a.values and path in b.values else only
        one, other = facts.value(a.values.get(path)), facts.value(b.values.get(path))
        if change != "changed" or _text(one) != _text(other):
            yield {"path": path, "change": change, "a": one, "b": other}


def _text(item: Any) -> str:
    return dumps(render.strict(item), sort_keys=True, ensure_ascii=False)


# ---------------------------------------------------------------- for people

ONLY = {"only_a": "only in the first", "only_b": "only in the second"}
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
    tensors = "tensor=name, change, dtype, bytes>=shown"
    if any("max_abs" in item for item in document["tensors"]):
        tensors += ", differ>=items_differ, max>=max_abs, mean>=mean_abs, NaN>=nan"
    values = f"value=name, step {a['step']}=a, step {b['step']}=b"
    return [
        *blocks,
        Facts(Cell("components", "bold"), components),
        *first_rows("tensors", tensors, [tensor_row(i) for i in document["tensors"]], "diff"),
        *first_rows("values", values, [value_row(i) for i in document["values"]], "diff"),
    ]


def summary(item: Row) -> str:
    if item["change"] in ONLY:
        return ONLY[item["change"]]
    if item["change"] == "unknown":
        return f"cut over ranks in another way ({item['changed']} tensors): --stats reads them"
    tensors = [f"{item['changed']} of {count(item['tensors'], 'tensor')} changed"]
    values = [f"{count(item['values'], 'value')} changed"]
    return ", ".join(tensors * bool(item["changed"]) + values * bool(item["values"])) or "unchanged"


def tensor_row(item: Row) -> Row:
    changed = item["changed_bytes"]
    return item | {
        "name": full_name(item, item["name"]),
        "change": item["change"].replace("_", " ") + (f" -> {item['to']}" if "to" in item else ""),
        "shown": "?" if changed is None else render.size(changed),
        "nan": f"{item['nan_a']}/{item['nan_b']}" if "nan_a" in item else "-",
    }


def value_row(item: Row) -> Row:
    texts = {side: facts.shortened(_text(item[side]), 60) for side in "ab"}
    missing = {"only_a": "b", "only_b": "a"}.get(item["change"], "")
    return {"name": full_name(item, item["path"])} | texts | {missing: "-"}


def full_name(item: Row, path: str) -> str:
    of = "" if item["of"] == "all ranks" else f" ({item['of']})"
    return f"{item['component']}/{path}{of}"
