"""What the engine says, as the documents that `--json` prints. The keys here are the command's
contract.

checkpoint  name url status reason pinned step run_id sequence, and when the manifest could be read:
attempt_id
            checkpoint_id format_version created world_size nodes groups size_bytes files components
            digest versions environment metrics metrics_step metadata training_args_hash timings
            extra storage_mode ("shared" or "node") node (whose part it is; null for a whole
            checkpoint)
entry       name url step status reason latest pinned abandoned (the run went back behind it and
saved again, so that
            it is never the newest or the best) size_bytes created run_id sequence metrics node
component   key pattern tensors size_bytes (of tensors) values_bytes (of plain values; null: not
known) files
            writers copies group partition group_keys required checksum metadata
file        name size_bytes digest writer
tensor      component name full_name dtype shape size_bytes file alias_of
copy        copy (its number) copies (how many) of ("rank 3", "group 0 of dp", "node 1", "all
ranks") ranks problem     file kind ("missing" "size" "digest" "header" "format" "storage"
"version") tensor expected actual
            expected_size actual_size expected_digest actual_digest message
fallback    name url step run_id created verified: the nearest older checkpoint that is usable, or
null

Values: None, bool, int, float, str, list and dict with str keys stand for themselves (NaN and the
infinities as strings); everything else is an object with "$type": tuple, set, frozenset and dict
with "items", bytes with "hex", tensor with "name", "dtype" and "shape", and any other type with its
text as "value". Large bytes and texts, and what a codec of a user's own stored, have what was
stored (a tensor, a value) as "value".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptcore import CheckpointInfo, CheckpointManifest, Problem, TensorInfo


def entry(info: CheckpointInfo, latest: bool) -> dict[str, Any]:
    return {
        "name": info.name,
        "url": info.url,
        "step": info.step,
        "status": info.status,
        "reason": info.reason,
        "latest": latest,
        "pinned": info.pinned,
        "abandoned": info.abandoned,
        "size_bytes": info.size_bytes,
        "created": info.created,
        "run_id": info.run_id,
        "sequence": info.sequence,
        "metrics": dict(info.metrics or {}),
        "node": info.manifest.node if info.manifest else None,
    }


def checkpoint(manifest: CheckpointManifest) -> dict[str, Any]:
    """The header: everything in the manifest but the components' and files' own tables."""
    return {
        "step": manifest.step,
        "run_id": manifest.run_id,
        "sequence": manifest.sequence,
        "attempt_id": manifest.attempt_id,
        "checkpoint_id": manifest.checkpoint_id,
        "format_version": manifest.format_version,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "nodes": manifest.nodes,
        "storage_mode": manifest.storage_mode,
        "node": manifest.node,
        "groups": manifest.groups,
        "size_bytes": manifest.size_bytes,
        "files": len(manifest.files),
        "components": len(manifest.components),
        "digest": manifest.digest,
        "versions": manifest.versions,
        "environment": manifest.environment,
        "metrics": manifest.metrics,
        "metrics_step": manifest.metrics_step,
        "metadata": manifest.metadata,
        "training_args_hash": manifest.training_args_hash,
        "timings": manifest.timings,
        "extra": manifest.extra,
    }


def components(
    manifest: CheckpointManifest, extents: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """extents: size of plain values, and dtypes, of the components where they are known."""
    known = extents or {}
    return [
        {
            "key": key,
            "pattern": str(item.pattern),
            "tensors": item.tensors,
            "size_bytes": item.size_bytes,
            "values_bytes": known[key].values_bytes if key in known else None,
            "dtypes": known[key].dtypes if key in known else None,
            "files": list(item.files),
            "writers": list(item.writers),
            "copies": len(manifest.copies(item.key)),
            "group": item.group,
            "partition": item.partition,
            "group_keys": item.group_keys,
            "required": item.required,
            "checksum": item.checksum,
            "metadata": item.metadata,
        }
        for key, item in manifest.components.items()
    ]


def files(manifest: CheckpointManifest) -> list[dict[str, Any]]:
    return [
        {"name": name, "size_bytes": record.size, "digest": record.digest, "writer": record.writer}
        for name, record in sorted(manifest.files.items())
    ]


def tensor(info: TensorInfo) -> dict[str, Any]:
    return {
        "component": info.component,
        "name": info.name,
        "full_name": info.full_name,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "size_bytes": info.nbytes,
        "file": info.file,
        "alias_of": info.alias_of,
        "layout": info.layout,
    }


def problem(found: Problem, manifest: CheckpointManifest | None) -> dict[str, Any]:
    return problem_of(
        found.file,
        found.kind,
        found.message,
        found.expected,
        found.actual,
        found.tensor,
        manifest=manifest,
    )


def problem_of(
    file: str | None,
    kind: str,
    message: str,
    expected: str | int | None = None,
    actual: str | int | None = None,
    tensor: str | None = None,
    *,
    manifest: CheckpointManifest | None = None,
) -> dict[str, Any]:
    """What the engine found, and beside it the size and digest that the manifest promises for the
    file."""
    record = manifest.files.get(file) if manifest and file else None
    size, digest = (record.size, record.digest) if record else (None, None)
    found_size: str | int | None = None
    found_digest: str | int | None = None
    if kind == "size":
        found_size = actual
    elif kind in ("digest", "header"):
        found_size = size  # the engine looks at the content of a file only when its size is right
    if kind == "digest" and tensor is None:
        digest, found_digest = str(expected), actual
    return {
        "file": file,
        "kind": kind,
        "tensor": tensor,
        "expected": expected,
        "actual": actual,
        "expected_size": size,
        "actual_size": found_size,
        "expected_digest": digest,
        "actual_digest": found_digest,
        "message": message,
    }


# ---------------------------------------------------------------- plain values


def is_tensor(value: Any) -> bool:
    return hasattr(value, "full_name") and hasattr(value, "dtype")


def is_opaque(value: Any) -> bool:
    """Whether it is a value whose codec is not registered here, or large bytes or text, which lie
    among the tensors."""
    return hasattr(value, "codec") and hasattr(value, "payload")


def _type_name(value: Any) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def value(item: Any) -> Any:
    """A nested Python value as JSON, types kept (see the module's text)."""
    kind = type(item)
    if kind is int and item.bit_length() > LONG_INT:
        return {"$type": "int", "hex": hex(item)}
    if item is None or kind in (bool, int, float, str):
        return item
    if kind is list:
        return [value(each) for each in item]
    if kind is dict and all(type(key) is str for key in item) and "$type" not in item:
        return {key: value(each) for key, each in item.items()}
    if is_tensor(item):
        return {
            "$type": "tensor",
            "name": item.full_name,
            "dtype": item.dtype,
            "shape": list(item.shape),
        }
    tagged: dict[str, Any] = {"$type": _type_name(item)}
    if isinstance(item, dict):
        tagged["items"] = [[value(key), value(each)] for key, each in item.items()]
    elif isinstance(item, (set, frozenset)):
        tagged["items"] = [value(each) for each in sorted(item, key=_repr)]
    elif isinstance(item, tuple):
        tagged["items"] = [value(each) for each in item]
    elif isinstance(item, (bytes, bytearray)):
        tagged["hex"] = item.hex()
    elif kind.__module__ == "numpy":
        tagged |= {
            "dtype": str(item.dtype),
            "shape": list(item.shape),
            "items": value(item.tolist()),
        }
    elif is_opaque(item):
        tagged = {"$type": str(item.codec), "value": value(item.payload)}
    else:
        tagged["value"] = _decimal(item, str)
    return tagged


def leaves(item: Any) -> Iterator[tuple[str, str]]:
    """(path, text) of every leaf of a nested Python value; a sequence of scalars is one leaf."""
    return ((path, text(leaf)) for path, leaf in leaf_items(item))


def leaf_items(item: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of a nested Python value; a sequence of scalars is one, and so is what is
    empty."""
    children: list[tuple[Any, Any]] = []
    if isinstance(item, dict):
        children = list(item.items())
    elif isinstance(item, (list, tuple)) and not all(map(_is_scalar, item)):
        children = list(enumerate(item))
    if not children:
        yield path, item
    for key, child in children:
        name = escaped(key)
        yield from leaf_items(child, f"{path}/{name}" if path else name)


def escaped(key: Any) -> str:
    """A key of a dict, or a place in a list, as a part of a path."""
    return (key if type(key) is str else _repr(key)).replace("~", "~0").replace("/", "~1")


LONG_INT = 13_000  # bits; Python writes no longer ones in decimal


def _repr(item: Any) -> str:
    return _decimal(item, repr)


def _decimal(item: Any, form: Callable[[Any], str]) -> str:
    try:
        return form(item)
    except ValueError:  # a long int, or something with one inside
        return (
            hex(item)
            if type(item) is int
            else f"a {type(item).__name__} with numbers of thousands of digits"
        )


def _is_scalar(item: Any) -> bool:
    return item is None or isinstance(item, (bool, int, float, complex, str, bytes))


def text(item: Any, limit: int = 100) -> str:
    if is_tensor(item):
        return f"tensor {item.dtype} {list(item.shape)}"
    if is_opaque(item):
        if is_tensor(item.payload):
            return (
                f"{item.codec}, stored as tensor {item.payload.full_name} {item.payload.dtype} "
                f"{list(item.payload.shape)}"
            )
        return _shorten(f"{item.codec}: {text(item.payload, limit)}", limit)
    if type(item).__module__ == "numpy":
        return (
            f"{_type_name(item)} {item.dtype} {list(item.shape)} "
            f"{_shorten(str(item.tolist()), limit)}"
        )
    count = f" ({len(item)} items)" if isinstance(item, (list, tuple, set, frozenset)) else ""
    full = _repr(item)
    return full if len(full) <= limit else _shorten(full, limit) + count


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
