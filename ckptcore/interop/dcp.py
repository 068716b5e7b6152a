"""Folders of torch.distributed.checkpoint: read box by box, written by torch itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from .pickles import Refused, load_bytes, load_file, load_metadata
from .scratch import SMALL, Scratch

__all__ = ["read_dcp"]

PORTION = 1 << 20  # bytes that are copied at a time


def read_dcp(folder: Path, scratch: Scratch, left: list[str]) -> Any:
    """The state that was saved, nested as it was, optimizers by parameter name. Tensors are put
    together from their parts in `scratch`; what could not be read is added to `left`. Raises
    Refused."""
    metadata = load_metadata(folder / ".metadata")
    leaves: dict[tuple[Any, ...], Any] = {}
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    for fqn, entry in metadata.state_dict_metadata.items():
        path = paths.get(fqn) or (fqn,)
        try:
            leaves[tuple(path)] = _leaf(folder, metadata, fqn, entry, scratch)
        except Refused as error:
            left.append(f"{fqn}: {error.message}")
    return _by_component(_nested(leaves))


def _leaf(folder: Path, metadata: Metadata, fqn: str, entry: Any, scratch: Scratch) -> Any:
    if isinstance(entry, BytesStorageMetadata):
        ((_, only),) = _stored(metadata, fqn)
        return load_bytes(b"".join(_portions(folder, only)), f"{folder}: {fqn}")
    if not isinstance(entry, TensorStorageMetadata):
        raise Refused(f"{fqn!r} is of a kind that is not known")
    tensor = scratch.empty(tuple(entry.size), entry.properties.dtype)
    items = 0
    for offset, info in _stored(metadata, fqn):
        piece = _loaded(folder, info, fqn, scratch)
        if not isinstance(piece, torch.Tensor) or piece.dtype != tensor.dtype:
            raise Refused(f"{fqn!r} is not made of tensors of {tensor.dtype}")
        at = tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))
        if tensor[at].shape != piece.shape:
            raise Refused(f"a part of {fqn!r} lies outside of it")
        tensor[at] = piece
        items += piece.numel()
    if items < tensor.numel():
        raise Refused(f"parts of {fqn!r} are missing: {items} of {tensor.numel()} items are there")
    return tensor


def _stored(metadata: Metadata, fqn: str) -> Iterator[tuple[tuple[int, ...], Any]]:
    """(offset, where the bytes are) of each part, each once."""
    offsets = set()
    for index, info in (metadata.storage_data or {}).items():
        if index.fqn == fqn and (offset := tuple(index.offset or ())) not in offsets:
            offsets.add(offset)
            yield offset, info


def _loaded(folder: Path, info: Any, fqn: str, scratch: Scratch) -> Any:
    """A large one is mapped from a file of its own: what torch.load reads from memory stays in the
    heap, piece by piece."""
    portions, about = _portions(folder, info), f"{folder}: {fqn}"
    if info.length <= SMALL:
        return load_bytes(b"".join(portions), about)
    path = scratch.path()
    try:
        with open(path, "wb") as file:
            file.writelines(portions)
        return load_file(path, about)
    finally:
        path.unlink(missing_ok=True)


def _portions(folder: Path, info: Any) -> Iterator[bytes]:
    name = info.relative_path
    if Path(name).name != name:
        raise Refused(f"{name!r} is not a file of this folder")
    if getattr(info, "transform_descriptors", None):
        raise Refused(f"{name!r} is compressed or otherwise transformed, which is not read")
    with open(folder / name, "rb") as file:
        file.seek(info.offset)
        left = info.length
        while left:
            data = file.read(min(left, PORTION))
            if not data:
                raise Refused(f"{name!r} is shorter than its metadata say")
            left -= len(data)
            yield data


def _nested(leaves: Mapping[tuple[Any, ...], Any]) -> Any:
    """Dicts by text, lists by number."""
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        at = tree
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = leaf
    return _with_lists(tree)


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    found = {key: _with_lists(item) for key, item in value.items()}
    if found and all(type(key) is int for key in found) and sorted(found) == [*range(len(found))]:
        return [found[number] for number in range(len(found))]
    return found


def _by_component(tree: Any) -> Any:
    """Gather what stands by dotted names at the top, as torchtitan writes it; and optimizers in the
    form that OptimizerState loads."""
    if not isinstance(tree, dict):
        return tree
    found: dict[Any, Any] = {}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(key, str) and isinstance(value, torch.Tensor):
            flat[key] = value
        else:
            found[key] = value
    weights = {k: v for k, v in flat.items() if not k.startswith(("optimizer.", "optim."))}
    moments = {k: v for k, v in flat.items() if k not in weights}
    options = {
        key: found.pop(key)
        for key in [*found]
        if isinstance(key, str) and key.startswith(("optimizer.param_groups.", "optimizer.state."))
    }
    if weights and not found and not moments:
        return weights
    if weights:
        found.setdefault("model", {}).update(weights)
    if moments or options:
        found["optimizer"] = _flattened({**moments, **options}, weights)
    return {key: _by_names(value) if _is_by_names(value) else value for key, value in found.items()}


def _is_by_names(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and "param_groups" in value
        and isinstance(value.get("state", {}), dict)
    )


def _by_names(value: dict[str, Any]) -> dict[str, Any]:
    """{"state": {name: values}, "param_groups": [{"params": names}]} as OptimizerState has it."""
    groups = value["param_groups"]
    listed = groups if isinstance(groups, list) else [groups]
    if not all(
        isinstance(group, dict) and all(isinstance(n, str) for n in group.get("params", [0]))
        for group in listed
    ):
        return value
    state = value.get("state", {})
    found: dict[str, Any] = {"state": state, "group_of": {}, "shapes": {}, "groups": {}}
    for number, group in enumerate(listed):
        found["groups"][number] = {k: v for k, v in group.items() if k != "params"}
        for name in group["params"]:
            found["group_of"][name] = number
            found["shapes"][name] = _shape(state.get(name))
    return found


def _shape(held: Any) -> list[int] | None:
    tensors = [v for v in (held or {}).values() if isinstance(v, torch.Tensor) and v.dim()]
    return list(max(tensors, key=lambda t: t.dim()).shape) if tensors else None


def _flattened(leaves: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """optimizer.state.<name>.<key> and optimizer.param_groups.<name>.<option>: by the longest name
    that is known."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for leaf, value in leaves.items():
        _, kind, rest = leaf.split(".", 2)
        name = rest.rpartition(".")[0]
        while name and name not in weights:
            name = name.rpartition(".")[0]
        name = name or rest.rpartition(".")[0]
        where = state if kind == "state" else options
        where.setdefault(name, {})[rest[len(name) + 1 :]] = value
    groups: list[dict[str, Any]] = []
    group_of: dict[str, int] = {}
    for name in dict.fromkeys([*options, *state]):
        mine = options.get(name, {})
        if mine not in groups:
            groups.append(mine)
        group_of[name] = groups.index(mine)
    return {
        "state": state,
        "group_of": group_of,
        "shapes": {name: _shape(state.get(name)) for name in group_of},
        "groups": dict(enumerate(groups)),
    }
