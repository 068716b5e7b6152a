"""Numbers of tensors, read in portions: huge ones take no more memory than small ones."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from ckptcore import CheckpointView, TensorInfo

BINS = 24

Box = list[slice]


def numbers(array: Any, dtype: str) -> Any:
    """The values of what `CheckpointView.read` returned, as numpy can count with them: those of
    float8 and other dtypes that numpy lacks as float32, with torch's help."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith(("F8", "F4")):
        torch = import_module("torch")
        kind = getattr(torch, {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}.get(dtype, ""))
        return torch.from_numpy(array).view(kind).float().numpy()
    return array


def read(view: CheckpointView, info: TensorInfo, box: Box | None = None) -> Any:
    """Of an alias, the tensor that holds its bytes."""
    return numbers(view.read(info.full_name, box), info.dtype).reshape(-1)


def first(view: CheckpointView, info: TensorInfo, count: int) -> list[Any]:
    """The first few numbers of a tensor, in C order."""
    box: Box = []
    left = count
    for n in reversed(info.shape):
        box.insert(0, slice(0, min(n, max(left, 1))))
        left = -(-left // max(n, 1)) if n else 1
    found: list[Any] = read(view, info, box)[:count].tolist()
    return found


def statistics(view: CheckpointView, info: TensorInfo) -> dict[str, Any]:
    """Of all items of a tensor; range, mean, deviation and histogram of its finite ones. Reads it
    twice."""

    def portions() -> Iterator[tuple[Any, Any]]:
        for _, portion in view.portions(info.full_name):
            values = numbers(portion, info.dtype).reshape(-1)
            values = (np.abs(values) if values.dtype.kind == "c" else values).astype(np.float64)
            yield values, values[np.isfinite(values)]

    found = dict.fromkeys(("items", "nan", "infinite", "zero"), 0)
    count, total, low, high = 0, 0.0, float("inf"), float("-inf")
    for values, finite in portions():
        found["items"] += values.size
        found["nan"] += int(np.isnan(values).sum())
        found["infinite"] += int(np.isinf(values).sum())
        found["zero"] += int((values == 0).sum())
        count, total = count + finite.size, total + float(finite.sum())
        low = min(low, float(finite.min(initial=np.inf)))
        high = max(high, float(finite.max(initial=-np.inf)))
    names = ("min", "max", "mean", "std", "histogram")
    if not count:
        return {**found, **dict.fromkeys(names)}
    mean, squares, bins = total / count, 0.0, np.zeros(BINS, np.int64)
    for _, finite in portions():
        squares += float(((finite - mean) ** 2).sum())
        if low < high:
            bins += np.histogram(finite, BINS, (low, high))[0]
    deviation, histogram = (squares / count) ** 0.5, bins.tolist() if low < high else None
    return {**found, **dict(zip(names, (low, high, mean, deviation, histogram), strict=True))}


def difference(
    a: CheckpointView, b: CheckpointView, left: TensorInfo, right: TensorInfo
) -> dict[str, Any]:
    """How far two tensors of the same shape are apart: items that differ, the largest and the mean
    distance, and how many are NaN in each."""
    differ = items = nan_a = nan_b = 0
    largest = total = 0.0
    for box, array in a.portions(left.full_name):
        x, y = numbers(array, left.dtype).reshape(-1), read(b, right, [*box])
        kind = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
        x, y = x.astype(kind), y.astype(kind)
        nan_a, nan_b = nan_a + int(np.isnan(x).sum()), nan_b + int(np.isnan(y).sum())
        differ += int(((x != y) & ~(np.isnan(x) & np.isnan(y))).sum())
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(x - y)
        apart = apart[np.isfinite(apart)]
        items += apart.size
        largest, total = max(largest, float(apart.max(initial=0))), total + float(apart.sum())
    return {
        "items_differ": differ,
        "max_abs": largest,
        "mean_abs": total / items if items else 0.0,
        "nan_a": nan_a,
        "nan_b": nan_b,
    }
