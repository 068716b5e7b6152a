"""Are two checkpoints the same, to the last bit? Read through `open_checkpoint`, without torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptcore import CheckpointView, TensorInfo, open_checkpoint

__all__ = ["ComponentComparison", "compare_checkpoints", "differing_values"]


@dataclass
class ComponentComparison:
    """What of one component was compared, and what of it differs."""

    name: str
    tensors: int = 0
    tensor_bytes: int = 0
    values: int = 0
    differences: list[str] = field(default_factory=list)


def compare_checkpoints(
    expected: str, found: str, apart_from: Collection[str] = ()
) -> list[ComponentComparison]:
    """One entry per component of either checkpoint. apart_from: keys of values that no two runs
    share, such as times."""
    with open_checkpoint(expected) as one, open_checkpoint(found) as other:
        names = sorted(one.manifest.components.keys() | other.manifest.components.keys())
        return [_compare_component(name, one, other, apart_from) for name in names]


def _compare_component(
    name: str, one: CheckpointView, other: CheckpointView, apart_from: Collection[str]
) -> ComponentComparison:
    result = ComponentComparison(name)
    for view, rival in ((one, other), (other, one)):
        if name not in view.manifest.components:
            result.differences.append(f"component {name} is in {rival.url} only")
            return result
    labels, rival_labels = (
        [copy.label for copy in view.manifest.copies(name)] for view in (one, other)
    )
    if labels != rival_labels:
        result.differences.append(f"{name}: {len(labels)} and {len(rival_labels)} copies")
        return result
    for number, label in enumerate(labels):  # one per rank or group, where each has its own
        _compare_copy(result, name + label, one, other)
        left_values, right_values = (
            _without(view.values(name, number), apart_from) for view in (one, other)
        )
        result.values += sum(1 for _ in _leaves(left_values))
        result.differences += differing_values(left_values, right_values, name + label)
    return result


def _compare_copy(
    result: ComponentComparison, label: str, one: CheckpointView, other: CheckpointView
) -> None:
    ours = {info.full_name: info for info in one.tensors() if info.component == label}
    theirs = {info.full_name: info for info in other.tensors() if info.component == label}
    result.differences += [
        f"{key}: in one of the two only" for key in sorted(ours.keys() ^ theirs.keys())
    ]
    for key in sorted(ours.keys() & theirs.keys()):
        a, b = ours[key], theirs[key]
        result.tensors += 1
        result.tensor_bytes += 0 if a.alias_of else a.nbytes  # tied tensors are one
        if (a.dtype, list(a.shape)) != (b.dtype, list(b.shape)):
            result.differences.append(
                f"{key}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
            )
            continue
        left, right = (np.ascontiguousarray(view.read(key)) for view in (one, other))
        if left.tobytes() != right.tobytes():
            left_bytes, right_bytes = (x.reshape(-1).view(np.uint8) for x in (left, right))
            count = np.count_nonzero(left_bytes != right_bytes)
            result.differences.append(f"{key}: {count} of {a.nbytes} bytes differ")


def differing_values(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two nested values differ in type or bits; tensors are left to their bytes."""
    if isinstance(one, TensorInfo) and isinstance(other, TensorInfo):
        return []
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, dict):
        found = [f"{path}: key {key!r} in one of the two only" for key in one.keys() ^ other.keys()]
        for key in one.keys() & other.keys():
            found += differing_values(one[key], other[key], f"{path}/{key}")
        return sorted(found)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} items"]
        return [
            line
            for index, (a, b) in enumerate(zip(one, other, strict=True))
            for line in differing_values(a, b, f"{path}/{index}")
        ]
    return [] if _same_leaf(one, other) else [f"{path}: {one!r:.60} and {other!r:.60}"]


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, float):
        return bool(one.hex() == other.hex())  # tells 0.0 from -0.0, and takes a NaN for itself
    if isinstance(one, np.ndarray | np.generic):
        return bool(
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    return bool(one == other)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif not isinstance(value, TensorInfo):
        yield value


def _without(value: Any, keys: Collection[str]) -> Any:
    """Nested values without some keys of their dicts."""
    if not keys:
        return value
    if isinstance(value, dict):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    if isinstance(value, list | tuple):
        return type(value)(_without(item, keys) for item in value)
    return value
