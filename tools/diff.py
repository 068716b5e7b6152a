"""`ckpt diff`: what changed between two checkpoints, by the digests in their indexes; with --stats
by how much, which reads what changed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from json import dumps
from typing import Any

import click

from ckptcore import CheckpointView, StoredBox, TensorInfo, restore_candidates

from . import facts, render
from .cli import LOCATION, command
from .copies import stored_copies
from .failures import BAD, GOOD, USAGE, Failure, bad
from .lookup import Root, opened, resolve, subject_of
from .render import Block, Cell, Facts, Line, Report, count, size, table
from .subject import Options, Subject

CHUNK, DIGEST = 4 << 20, 8  # bytes that one digest stands for, and its own
SHOWN = 20  # rows of a table for people; all are in the JSON


@command("ckpt diff runs/a", "ckpt diff runs/a/checkpoint-100 runs/b/checkpoint-100 --stats")
@click.argument("a", type=LOCATION)
@click.argument("b", required=False, type=LOCATION)
@click.option("--stats", is_flag=True, help="Read what changed, and say by how much.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 where they differ.")
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
        return opened(found, options), opened(resolve(other, options), options)
    if not isinstance(found, Root):
        found.readable()
        raise Failure(
            "usage", USAGE, f"{found.url} is one checkpoint: give another to compare it with"
        )
    usable = [info for info in restore_candidates(found.entries) if info.status == "committed"]
    if len(usable) < 2:
        there = count(len(usable), "usable checkpoint")
        raise bad(f"{found.url} has {there} of the run that saved last: give two")
    new, old = (subject_of(info, options, found.typed) for info in usable[:2])
    return opened(old, options), opened(new, options)


def compared(a: Subject, b: Subject, stats: bool) -> dict[str, Any]:
    """The whole JSON document."""
    first, second = a.readable(), b.readable()
    left, right = first.manifest.components, second.manifest.components
    components: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    values: list[dict[str, Any]] = []
    for key in sorted({*left, *right}):
        if key not in left or key not in right:
            only = "only_b" if key not in left else "only_a"
            there = (left.get(key) or right[key]).tensors
            components.append(
                {"key": key, "change": only, "tensors": there, "changed": there, "values": 0}
            )
            continue
        rows, total = changed_tensors(first, second, key, stats)
        found = changed_values(first, second, key)
        differs = any(row["change"] != "layout" for row in rows) or found
        change = "changed" if differs else "unknown" if rows else "same"
        components.append(
            {
                "key": key,
                "change": change,
                "tensors": total,
                "changed": len(rows),
                "values": len(found),
            }
        )
        tensors += rows
        values += found
    return {
        "a": facts.fields(a, "name url step run_id"),
        "b": facts.fields(b, "name url step run_id"),
        "same": all(item["change"] == "same" for item in components),
        "components": components,
        "tensors": tensors,
        "values": values,
    }


def _copies(view: CheckpointView, key: str) -> dict[str, int]:
    """The copies of a component by what they are of: rank, group or node."""
    return {copy.name: copy.number for copy in stored_copies(view.manifest, key)}


def changed_tensors(
    a: CheckpointView, b: CheckpointView, key: str, stats: bool
) -> tuple[list[dict[str, Any]], int]:
    """Those of a component that are not the same in both, and how many there are in all."""
    mine, its = _copies(a, key), _copies(b, key)
    rows: list[dict[str, Any]] = []
    total = 0
    for of in sorted({*mine, *its}):
        left = dict(_tensors(a, key, mine[of])) if of in mine else {}
        right = dict(_tensors(b, key, its[of])) if of in its else {}
        boxes = [
            view.boxes(key, numbers[of]) if of in numbers else {}
            for view, numbers in ((a, mine), (b, its))
        ]
        total += len({*left, *right})
        for name in sorted({*left, *right}):
            one, other = left.get(name), right.get(name)
            row = _changed(name, one, other, boxes)
            if row is None:
                continue
            if stats and one and other and row["change"] in ("changed", "layout", "dtype"):
                # numpy takes longer to load than all else that is done here.
                row |= import_module(".arrays", __package__).difference(a, b, one, other)
                if row["change"] == "layout":  # now it is known
                    row["change"] = "changed"
                    if not row["items_differ"]:
                        continue
            rows.append({"component": key, "of": of, **row})
    return rows, total


def _tensors(view: CheckpointView, key: str, number: int) -> Iterator[tuple[str, TensorInfo]]:
    for _, leaf in facts.leaf_items(view.values(key, number)):
        item = leaf.payload if facts.is_opaque(leaf) else leaf
        if facts.is_tensor(item):
            yield item.name, item


def _changed(
    name: str,
    one: TensorInfo | None,
    other: TensorInfo | None,
    boxes: list[dict[str, list[StoredBox]]],
) -> dict[str, Any] | None:
    """How a tensor changed; None when it is the same."""
    there = one or other
    assert there is not None
    row = {
        "name": name,
        "dtype": there.dtype,
        "shape": list(there.shape),
        "size_bytes": there.nbytes,
        "changed_bytes": there.nbytes,
    }
    if one is None or other is None:
        return {**row, "change": "only_b" if one is None else "only_a"}
    if one.shape != other.shape:
        return {**row, "change": "shape", "to": list(other.shape)}
    if one.dtype != other.dtype:
        return {**row, "change": "dtype", "to": other.dtype}
    left, right = ({(box.offset, box.shape): box for box in side[name]} for side in boxes)
    if left.keys() != right.keys():
        return {**row, "change": "layout", "changed_bytes": None}
    changed = sum(_bytes_that_differ(left[place], right[place]) for place in left)
    return {**row, "change": "changed", "changed_bytes": changed} if changed else None


def _bytes_that_differ(a: StoredBox, b: StoredBox) -> int:
    """Of the chunks whose digests are not the same."""
    return sum(
        min(CHUNK, a.nbytes - at // DIGEST * CHUNK)
        for at in range(0, len(a.digests), DIGEST)
        if a.digests[at : at + DIGEST] != b.digests[at : at + DIGEST]
    )


def changed_values(a: CheckpointView, b: CheckpointView, key: str) -> list[dict[str, Any]]:
    """Plain values of a component that are not the same in both."""
    mine, its = _copies(a, key), _copies(b, key)
    found = []
    for of in sorted({*mine, *its}):
        left, right = (
            {
                path: leaf
                for path, leaf in facts.leaf_items(view.values(key, numbers[of]))
                if not facts.is_tensor(leaf)
            }
            if of in numbers
            else {}
            for view, numbers in ((a, mine), (b, its))
        )
        for path in [*left, *(path for path in right if path not in left)]:
            there = [side.get(path, None) for side in (left, right)]
            same = path in left and path in right and _text(there[0]) == _text(there[1])
            if not same:
                found.append(
                    {
                        "component": key,
                        "of": of,
                        "path": path,
                        "change": "changed"
                        if path in left and path in right
                        else ("only_a" if path in left else "only_b"),
                        "a": facts.value(there[0]),
                        "b": facts.value(there[1]),
                    }
                )
    return found


def _text(item: Any) -> str:
    return dumps(render.strict(facts.value(item)), sort_keys=True)


# ---------------------------------------------------------------- for people


def describe(document: dict[str, Any]) -> list[Block]:
    a, b = document["a"], document["b"]
    blocks: list[Block] = [Line(f"{a['url']} (step {a['step']}) -> {b['url']} (step {b['step']})")]
    if document["same"]:
        what = "nothing changed"
        frozen = a["step"] != b["step"]
        return [*blocks, Line(what + (": a frozen run?" if frozen else ""), "yellow")]
    pairs: list[tuple[str, Cell | str]] = []
    for item in document["components"]:
        styles = {"same": "dim", "only_a": "red", "only_b": "green"}
        pairs.append((item["key"], Cell(summary(item), styles.get(item["change"], ""))))
    blocks.append(Facts(Cell("components", "bold"), pairs))
    if document["tensors"]:
        blocks += tensor_table(document["tensors"])
    if document["values"]:
        columns = f"value, step {a['step']}, step {b['step']}"
        rows = [
            [named(item, item["path"]), _side(item, "a"), _side(item, "b")]
            for item in document["values"][:SHOWN]
        ]
        blocks.append(table("values", columns, rows))
        blocks += _more(len(document["values"]))
    return blocks


def summary(item: dict[str, Any]) -> str:
    if item["change"] in ("only_a", "only_b"):
        return "only in the first" if item["change"] == "only_a" else "only in the second"
    if item["change"] == "same":
        return "unchanged"
    said = []
    if item["change"] == "unknown":
        return f"cut over ranks in another way ({item['changed']} tensors): --stats reads them"
    if item["tensors"]:
        said.append(f"{item['changed']} of {count(item['tensors'], 'tensor')} changed")
    if item["values"]:
        said.append(f"{count(item['values'], 'value')} changed")
    return ", ".join(said)


def tensor_table(tensors: list[dict[str, Any]]) -> list[Block]:
    stats = any("max_abs" in item for item in tensors)
    columns = "tensor, change, dtype, bytes>" + ", differ>, max>, mean>, NaN>" * stats
    rows: list[list[Cell | str]] = []
    for item in tensors[:SHOWN]:
        change = item["change"].replace("_", " ")
        change += f" -> {item['to']}" if "to" in item else ""
        row: list[Cell | str] = [named(item, item["name"]), change, item["dtype"]]
        row.append("?" if item["changed_bytes"] is None else size(item["changed_bytes"]))
        if stats and "max_abs" in item:
            row += [str(item["items_differ"]), render.number(item["max_abs"])]
            row += [render.number(item["mean_abs"]), f"{item['nan_a']}/{item['nan_b']}"]
        elif stats:
            row += ["-"] * 4
        rows.append(row)
    return [table("tensors", columns, rows), *_more(len(tensors))]


def _more(total: int) -> list[Block]:
    return [Line(f"  ... and {total - SHOWN} more: --json has all")] if total > SHOWN else []


def named(item: dict[str, Any], path: str) -> str:
    of = "" if item["of"] in ("all ranks",) else f" ({item['of']})"
    return f"{item['component']}/{path}{of}"


def _side(item: dict[str, Any], side: str) -> str:
    missing = {"only_a": "b", "only_b": "a"}.get(item["change"])
    text = dumps(render.strict(item[side]), ensure_ascii=False)
    return "-" if side == missing else text if len(text) <= 60 else text[:57] + "..."
