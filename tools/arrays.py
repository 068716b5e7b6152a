"""Numbers of tensors, read in portions: huge ones take no more memory than small ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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
    return numbers(view.read(info.full_name, box), info.dtype)


def portions(view: CheckpointView, info: TensorInfo) -> Iterator[Any]:
    return (numbers(array, info.dtype) for _, array in view.portions(info.full_name))


def first(view: CheckpointView, info: TensorInfo, count: int) -> list[Any]:
    """The first few numbers of a tensor, in C order."""
    box: Box = []
    left = count
    for n in reversed(info.shape):
        box.insert(0, slice(0, min(n, max(left, 1))))
        left = -(-left // max(n, 1)) if n else 1
    found: list[Any] = read(view, info, box).reshape(-1)[:count].tolist()
    return found


@dataclass
class Statistics:
    """Of a tensor whose portions were `add`ed. mean and deviation are of its finite items."""

    items: int = 0
    nan: int = 0
    infinite: int = 0
    zero: int = 0
    low: float | None = None
    high: float | None = None
    mean: float = 0.0
    squares: float = field(default=0.0, repr=False)

    def add(self, array: Any) -> None:
        values = array.reshape(-1)
        if values.dtype.kind == "c":
            values = np.abs(values)
        values = values.astype(np.float64)
        finite = values[np.isfinite(values)]
        before = self.items - self.nan - self.infinite
        self.items += values.size
        self.nan += int(np.isnan(values).sum())
        self.infinite += int(np.isinf(values).sum())
        self.zero += int((values == 0).sum())
        if not finite.size:
            return
        low, high, mean = float(finite.min()), float(finite.max()), float(finite.mean())
        self.low = low if self.low is None else min(low, self.low)
        self.high = high if self.high is None else max(high, self.high)
        together, delta = before + finite.size, mean - self.mean
        self.squares += float(((finite - mean) ** 2).sum())
        self.squares += delta * delta * before * finite.size / together
        self.mean += delta * finite.size / together

    def document(self) -> dict[str, Any]:
        count = self.items - self.nan - self.infinite
        return {
            "items": self.items,
            "nan": self.nan,
            "infinite": self.infinite,
            "zero": self.zero,
            "min": self.low,
            "max": self.high,
            "mean": self.mean if count else None,
            "std": (self.squares / count) ** 0.5 if count else None,
        }


def statistics(view: CheckpointView, info: TensorInfo) -> dict[str, Any]:
    """Of all items of a tensor, with a histogram of those that are finite. Reads it twice."""
    found = Statistics()
    for values in portions(view, info):
        found.add(values)
    counts = np.zeros(BINS, np.int64)
    low, high = found.low, found.high
    if low is not None and high is not None and low < high:
        for portion in portions(view, info):
            values = portion.reshape(-1)
            values = (np.abs(values) if values.dtype.kind == "c" else values).astype(np.float64)
            counts += np.histogram(values[np.isfinite(values)], BINS, (low, high))[0]
    return found.document() | {"histogram": counts.tolist() if counts.any() else None}


def difference(
    a: CheckpointView, b: CheckpointView, left: TensorInfo, right: TensorInfo
) -> dict[str, Any]:
    """How far two tensors of the same shape are apart: items that differ, the largest and the mean
    distance, and how many are NaN in each."""
    differ = items = 0
    largest = total = 0.0
    nans = [0, 0]
    for box, array in a.portions(left.full_name):
        x = numbers(array, left.dtype).reshape(-1)
        y = read(b, right, [*box]).reshape(-1)
        kind = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
        x, y = x.astype(kind), y.astype(kind)
        nans = [nans[0] + int(np.isnan(x).sum()), nans[1] + int(np.isnan(y).sum())]
        differ += int(((x != y) & ~(np.isnan(x) & np.isnan(y))).sum())
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(x - y)
        apart = apart[np.isfinite(apart)]
        items += apart.size
        if apart.size:
            largest, total = max(largest, float(apart.max())), total + float(apart.sum())
    return {
        "items_differ": differ,
        "max_abs": largest,
        "mean_abs": total / items if items else 0.0,
        "nan_a": nans[0],
        "nan_b": nans[1],
    }
