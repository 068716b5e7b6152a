"""What the engine says, as the documents that `--json` prints (docs/cli.md describes their keys),
and plain values of a state as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptcore import CheckpointInfo, CheckpointManifest, Opaque, Problem, Sharing, TensorInfo


def fields(source: Any, names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names.split()}


def head(info: CheckpointInfo) -> dict[str, Any]:
    return fields(info, "name url step")


def entry(
    info: CheckpointInfo, latest: bool = False, sharing: Sharing | None = None
) -> dict[str, Any]:
    names = "name url step status reason pinned abandoned created run_id sequence size_bytes"
    return fields(info, names) | {
        "latest": latest,
        "metrics": dict(info.metrics or {}),
        "node": info.manifest.node if info.manifest else None,
        "unshared_bytes": sharing.unshared_bytes if sharing else None,
        "shared_with": sharing.shared_with if sharing else None,
    }


def checkpoint(info: CheckpointInfo) -> dict[str, Any]:
    """The header: everything in the manifest but the components' and files' own tables."""
    found = fields(info, "name url status reason pinned step run_id sequence")
    manifest = info.manifest
    if manifest is None:
        return found
    names = "attempt_id checkpoint_id format_version created world_size nodes storage_mode node "
    names += "groups size_bytes digest versions environment metrics metrics_step metadata "
    known = fields(manifest, names + "training_args_hash timings timings_by_rank extra")
    counts = {"files": len(manifest.files), "components": len(manifest.components)}
    return found | known | counts


def slowest(manifest: CheckpointManifest) -> dict[str, dict[str, Any]]:
    """By phase of the save, the seconds of the rank that took longest, and that rank; nothing where
    the manifest has only those of one rank."""
    found = {}
    for phase, row in manifest.timings_by_rank.items():
        seconds, at = max((value or 0.0, -n) for n, value in enumerate(row))
        found[phase] = {"seconds": seconds, "rank": manifest.stored_ranks[-at]}
    return found


def components(manifest: CheckpointManifest, extents: Mapping[str, Any]) -> list[dict[str, Any]]:
    """extents: size of plain values, and dtypes, of the components where they are known."""
    names = "key tensors size_bytes group partition group_keys required checksum metadata"
    return [
        fields(item, names)
        | {
            "pattern": str(item.pattern),
            "files": list(item.files),
            "writers": list(item.writers),
            "copies": len(manifest.copies(key)),
        }
        | extents.get(key, {"values_bytes": None, "dtypes": None})
        for key, item in manifest.components.items()
    ]


def files(manifest: CheckpointManifest) -> list[dict[str, Any]]:
    return [
        {"name": name, "size_bytes": record.size, "digest": record.digest, "writer": record.writer}
        for name, record in sorted(manifest.files.items())
    ]


def tensor(info: TensorInfo) -> dict[str, Any]:
    return {  # of ten thousand: not through `fields`
        "component": info.component,
        "name": info.name,
        "full_name": info.full_name,
        "dtype": info.dtype,
        "file": info.file,
        "alias_of": info.alias_of,
        "layout": info.layout,
        "shape": info.shape,
        "size_bytes": info.nbytes,
    }


def problem(found: Problem, manifest: CheckpointManifest | None) -> dict[str, Any]:
    """What the engine found, and beside it the size and digest that the manifest promises for the
    file."""
    record = manifest.files.get(found.file) if manifest and found.file else None
    size, digest = (record.size, record.digest) if record else (None, None)
    whole = found.kind == "digest" and found.tensor is None
    return fields(found, "file kind tensor expected actual message") | {
        "expected_size": size,
        # The engine looks at the content of a file only when its size is right.
        "actual_size": {"size": found.actual, "digest": size, "header": size}.get(found.kind),
        "expected_digest": str(found.expected) if whole else digest,
        "actual_digest": found.actual if whole else None,
    }


# ---------------------------------------------------------------- plain values

LONG_INT = 13_000  # bits; Python writes no longer ones in decimal
SCALARS = (bool, int, float, complex, str, bytes, type(None))


def tensor_in(value: Any) -> TensorInfo | None:
    """The tensor that a value is, or is stored as (large bytes or text); None where it is
    neither."""
    value = value.payload if isinstance(value, Opaque) else value
    return value if isinstance(value, TensorInfo) else None


def _type_name(value: Any) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def value(item: Any) -> Any:
    """A nested Python value as JSON, types kept (docs/cli.md: Values)."""
    kind = type(item)
    if kind is int and item.bit_length() > LONG_INT:
        return {"$type": "int", "hex": hex(item)}
    if item is None or kind in (bool, int, float, str):
        return item
    if kind is list:
        return [value(each) for each in item]
    if kind is dict and all(type(key) is str for key in item) and "$type" not in item:
        return {key: value(each) for key, each in item.items()}
    if isinstance(item, TensorInfo):
        known = {"name": item.full_name, "dtype": item.dtype, "shape": item.shape}
        return {"$type": "tensor"} | known
    if isinstance(item, Opaque):
        return {"$type": item.codec, "value": value(item.payload)}
    tagged: dict[str, Any] = {"$type": _type_name(item)}
    if isinstance(item, dict):
        tagged["items"] = [[value(key), value(each)] for key, each in item.items()]
    elif isinstance(item, (tuple, set, frozenset)):
        ordered = item if isinstance(item, tuple) else sorted(item, key=_written)
        tagged["items"] = [value(each) for each in ordered]
    elif isinstance(item, (bytes, bytearray)):
        tagged["hex"] = item.hex()
    elif kind.__module__ == "numpy":
        tagged |= {"dtype": str(item.dtype), "shape": item.shape, "items": value(item.tolist())}
    else:
        tagged["value"] = _written(item, str)
    return tagged


def leaves(item: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of a nested Python value; a sequence of scalars is one, and so is what is
    empty."""
    children: list[tuple[Any, Any]] = []
    if isinstance(item, dict):
        children = list(item.items())
    elif isinstance(item, (list, tuple)) and not all(isinstance(each, SCALARS) for each in item):
        children = list(enumerate(item))
    if not children:
        yield path, item
    for key, child in children:
        yield from leaves(child, f"{path}/{escaped(key)}" if path else escaped(key))


def escaped(key: Any) -> str:
    """A key of a dict, or a number in a list, as a part of a path."""
    text = key if type(key) is str else _written(key)
    return text.replace("~", "~0").replace("/", "~1")


def _written(item: Any, form: Any = repr) -> str:
    try:
        return str(form(item))
    except ValueError:  # a long int, or something with one inside
        if type(item) is int:
            return hex(item)
        return f"a {type(item).__name__} with numbers of thousands of digits"


def text(item: Any, limit: int = 100) -> str:
    """A leaf, on one line."""
    if isinstance(item, TensorInfo):
        return f"tensor {item.dtype} {[*item.shape]}"
    if isinstance(item, Opaque):
        held = tensor_in(item)
        if held is None:
            return shortened(f"{item.codec}: {text(item.payload, limit)}", limit)
        return f"{item.codec}, stored as tensor {held.full_name} {held.dtype} {[*held.shape]}"
    if type(item).__module__ == "numpy":
        values = shortened(str(item.tolist()), limit)
        return f"{_type_name(item)} {item.dtype} {[*item.shape]} {values}"
    many = isinstance(item, (list, tuple, set, frozenset))
    full = _written(item)
    more = f" ({len(item)} items)" if many and len(full) > limit else ""
    return shortened(full, limit) + more


def shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
