"""The load plan: which chunks of which stored boxes fill a part of a tensor, and where their bytes
go.

A stored piece is a box of the logical tensor in C order. Of a piece that is needed in part, the
chunks that hold needed items are read whole, so that their digests can be checked, and cut
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

from ..format.digest import CHUNK_BYTES
from ..format.layout import Box, intersection
from ..format.manifest import TensorEntry
from ..storage.chunks import MakeMemory
from .reader import TensorRead

__all__ = ["Words", "needed_chunks", "numpy_words", "read_of"]


@dataclass(frozen=True, slots=True)
class Words:
    """Memory of a part of a tensor as an array of integers as wide as its items (numpy or torch,
    any strides).

    flat(bytes) gives bytes as a flat array of the same kind; memory(array) the bytes of a
    contiguous host array, else None; flattened(array) the same items in one dimension and the same
    memory, None where there is no such view.
    pinned: how to make memory that is fast to copy from; moving: what copies are made in.
    """

    array: Any
    itemsize: int
    flat: Callable[[memoryview], Any]
    memory: Callable[[Any], memoryview | None]
    flattened: Callable[[Any], Any] = lambda _: None
    pinned: MakeMemory | None = None
    moving: Callable[[], AbstractContextManager[Any]] = nullcontext


def numpy_words(array: Any) -> Words:
    """Words over a numpy array of unsigned integers."""
    import numpy as np

    def memory(part: Any) -> memoryview | None:
        return (
            memoryview(part.reshape(-1).view(np.uint8).data)
            if part.flags.c_contiguous and part.size
            else None
        )

    return Words(array, array.itemsize, lambda data: np.frombuffer(data, array.dtype), memory)


def read_of(component: str, entry: TensorEntry, wanted: Box, words: Words) -> TensorRead:
    """Read what `wanted` needs of a stored piece into `words`, which is the memory of `wanted`.

    The piece must have something of it.
    """
    held = entry.offset or (0,) * len(entry.shape), entry.local_shape
    common = intersection(held, wanted)
    if common is None:
        raise ValueError(f"the piece at {held[0]} of {held[1]} has nothing of {wanted}")
    # With an ellipsis: a 0-d numpy array gives a view of itself then, and a copy otherwise.
    place = (*(slice(o - w, o - w + n) for o, n, w in zip(*common, wanted[0], strict=True)), ...)
    region = words.array[place]
    # Items wider than a word (complex128) have a last dimension of words.
    extra = tuple(words.array.shape[len(wanted[1]) :])
    inner = tuple(o - h for o, h in zip(common[0], held[0], strict=True)) + (0,) * len(extra)
    target = _PartTarget(region, held[1] + extra, inner, common[1] + extra, words)
    whole = common == held
    chunks = (
        None if whole else needed_chunks(held[1] + extra, inner, common[1] + extra, words.itemsize)
    )
    return TensorRead(component, entry, target, chunks)


def needed_chunks(
    shape: Sequence[int], offset: Sequence[int], size: Sequence[int], itemsize: int
) -> list[int]:
    """The chunks of a C-order array of `shape` that hold something of the box at `offset` of
    `size`."""
    rows = _row_ranges(shape, offset, size)
    chunks: dict[int, None] = {}
    for first, count in rows:
        start, end = first * itemsize, (first + count) * itemsize
        chunks.update(dict.fromkeys(range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES))))
    return list(chunks)


def _row_ranges(
    shape: Sequence[int], offset: Sequence[int], size: Sequence[int]
) -> list[tuple[int, int]]:
    """Flat ranges (first item, count) that cover the box: whole inner parts at once, rows apart
    only where that can leave a chunk out."""
    if not shape:
        return [(0, 1)]
    row = prod(shape[1:])
    span = row * 8 > CHUNK_BYTES and len(shape) > 1
    if not span:
        low = offset[0] * row + _flat(shape[1:], offset[1:])
        last = [o + n - 1 for o, n in zip(offset, size, strict=True)]
        return [(low, _flat(shape, last) - low + 1)]
    return [
        (index * row + first, count)
        for index in range(offset[0], offset[0] + size[0])
        for first, count in _row_ranges(shape[1:], offset[1:], size[1:])
    ]


def _flat(shape: Sequence[int], index: Sequence[int]) -> int:
    at = 0
    for n, i in zip(shape, index, strict=True):
        at = at * n + i
    return at


class _PartTarget:
    """A Target for a stored piece of which a box is wanted: `region` is the box's memory."""

    def __init__(
        self,
        region: Any,
        shape: tuple[int, ...],
        offset: tuple[int, ...],
        size: tuple[int, ...],
        words: Words,
    ) -> None:
        self.region, self.shape, self.offset, self.words = region, shape, offset, words
        # Where the box is one run of the piece and of the memory, bytes go straight in.
        split = next((d for d in reversed(range(len(shape))) if size[d] != shape[d]), 0)
        run = all(size[d] == 1 for d in range(split)) and size[split + 1 :] == shape[split + 1 :]
        self.memory = words.memory(region) if run else None
        self.items: Any = words.flattened(region) if run and self.memory is None else None
        self.first = _flat(shape, offset) * words.itemsize
        self.pinned = words.pinned

    def view(self, start: int, stop: int) -> memoryview | None:
        if self.memory is None or start < self.first or stop > self.first + len(self.memory):
            return None
        return self.memory[start - self.first : stop - self.first]

    def put(self, start: int, data: memoryview) -> None:
        with self.words.moving():
            if self.items is not None:
                self._put_run((start - self.first) // self.words.itemsize, self.words.flat(data))
                return
            _scatter(
                self.region,
                self.shape,
                self.offset,
                start // self.words.itemsize,
                self.words.flat(data),
            )

    def _put_run(self, at: int, flat: Any) -> None:
        """Put what is wanted of the items from `at` of the box on, as one block copy."""
        low, high = max(0, at), min(len(self.items), at + len(flat))
        if low < high:
            self.items[low:high] = flat[low - at : high - at]


def _scatter(
    region: Any, shape: Sequence[int], offset: Sequence[int], start: int, flat: Any
) -> None:
    """Put items `start` ... of a C-order piece into the part of it that `region` is, in as few
    block copies."""
    if not shape:
        region[...] = flat.reshape(region.shape)
        return
    row, count, at = prod(shape[1:]), len(flat), 0
    low, high = offset[0], offset[0] + region.shape[0]
    while at < count:
        index, within = divmod(start + at, row)
        if within or count - at < row:
            n = min(row - within, count - at)
            if low <= index < high:
                _scatter(region[index - low], shape[1:], offset[1:], within, flat[at : at + n])
        else:
            n = (count - at) // row * row
            first, last = max(index, low), min(index + n // row, high)
            if first < last:
                block = flat[at + (first - index) * row : at + (last - index) * row].reshape(
                    last - first, *shape[1:]
                )
                inner = tuple(
                    slice(o, o + s) for o, s in zip(offset[1:], region.shape[1:], strict=True)
                )
                region[first - low : last - low] = block[(slice(None), *inner)]
        at += n
