"""What the engine says, as the documents that `--json` prints: docs/cli.md describes their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptcore import CheckpointInfo, CheckpointManifest, Problem, Sharing, TensorInfo


def fields(source: Any, names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names.split()}


def entry(
    info: CheckpointInfo, latest: bool = False, sharing: Sharing | None = None
) -> dict[str, Any]:
    known = fields(info, "name url step status reason pinned abandoned created run_id sequence")
    node = info.manifest.node if info.manifest else None
    metrics = dict(info.metrics or {})
    rest = {"latest": latest, "size_bytes": info.size_bytes, "metrics": metrics, "node": node}
    shared = {
        "unshared_bytes": None if sharing is None else sharing.unshared_bytes,
        "shared_with": None if sharing is None else sharing.shared_with,
    }
    return known | rest | shared


def checkpoint(manifest: CheckpointManifest) -> dict[str, Any]:
    """The header: everything in the manifest but the components' and files' own tables."""
    known = fields(
        manifest,
        "step run_id sequence attempt_id checkpoint_id format_version created world_size nodes "
        "storage_mode node groups size_bytes digest versions environment metrics metrics_step "
        "metadata training_args_hash timings extra",
    )
    return known | {"files": len(manifest.files), "components": len(manifest.components)}


def components(
    manifest: CheckpointManifest, extents: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """extents: size of plain values, and dtypes, of the components where they are known."""
    known = extents or {}
    return [
        fields(item, "key tensors size_bytes group partition group_keys required checksum metadata")
        | {
            "pattern": str(item.pattern),
            "values_bytes": known[key].values_bytes if key in known else None,
            "dtypes": known[key].dtypes if key in known else None,
            "files": list(item.files),
            "writers": list(item.writers),
            "copies": len(manifest.copies(item.key)),
        }
        for key, item in manifest.components.items()
    ]


def files(manifest: CheckpointManifest) -> list[dict[str, Any]]:
    return [
        {"name": name, "size_bytes": record.size, "digest": record.digest, "writer": record.writer}
        for name, record in sorted(manifest.files.items())
    ]


def tensor(info: TensorInfo) -> dict[str, Any]:
    known = fields(info, "component name full_name dtype file alias_of layout")
    return known | {"shape": list(info.shape), "size_bytes": info.nbytes}


def problem(found: Problem, manifest: CheckpointManifest | None = None) -> dict[str, Any]:
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
