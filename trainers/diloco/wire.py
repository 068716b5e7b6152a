"""What travels between a worker and the server: named tensors as one safetensors body.

Both sides know the layout that is due before the first byte comes. So a body whose size, names,
dtypes or shapes differ is refused before memory is taken for it, and nothing is ever decoded but
JSON of a bounded length.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from ckptcore import CheckpointError

__all__ = [
    "Body",
    "DiLoCoError",
    "Layout",
    "Refused",
    "ServerUnreachable",
    "TensorSpec",
    "body_pieces",
    "checksum",
    "read_body",
]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PIECE = 1 << 20  # bytes that are handed to the connection at a time
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class DiLoCoError(CheckpointError, RuntimeError):
    """Training islands and their server did not come together."""


class ServerUnreachable(DiLoCoError, ConnectionError):
    """No answer from the server: refused, cut, or too late."""


class Refused(DiLoCoError):
    """The server, or the reader of a body, says no.

    status: the HTTP status. reason: one word for programs ("not_registered", "non_finite", ...).
    """

    facts = ("status", "reason")
    status: int
    reason: str


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that is due."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise DiLoCoError(
                f"parameter {self.name} is {self.dtype}: parameters that islands share are one of "
                f"{', '.join(str(dtype) for dtype in DTYPES)}; freeze it (requires_grad=False)"
            )

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Layout:
    """The tensors of a body, in the order in which their bytes follow one another."""

    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """That of these tensors, ordered by name."""
        return cls(
            tuple(TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in sorted(tensors.items()))
        )

    def select(self, names: set[str] | frozenset[str]) -> Layout:
        """Of some of the tensors."""
        return Layout(tuple(spec for spec in self.specs if spec.name in names))

    def to(self, dtype: torch.dtype) -> Layout:
        """The same tensors in one dtype."""
        return Layout(tuple(TensorSpec(spec.name, dtype, spec.shape) for spec in self.specs))

    @cached_property
    def nbytes(self) -> int:
        """Of the data, without the header."""
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def most_header(self) -> int:
        """Bytes that a header of this layout may have, however it is spaced and ordered."""
        return 2 * len(self.header({})) + 4096

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Length and JSON of a safetensors file."""
        entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for spec in self.specs:
            begin, end = end, end + spec.nbytes
            entries[spec.name] = {
                "dtype": DTYPES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def check(self, header: bytes) -> dict[str, str]:
        """The metadata of a header that says just this layout. Raises Refused naming the first
        tensor that differs."""
        try:
            entries = json.loads(header)
            metadata = {str(k): str(v) for k, v in entries.pop("__metadata__", {}).items()}
            missing = [spec.name for spec in self.specs if spec.name not in entries]
            known = {spec.name for spec in self.specs}
            unknown = [name for name in entries if name not in known]
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise refused(
                400, "bad_body", f"the header is no safetensors header: {error}"
            ) from None
        if missing or unknown:
            what = f"lacks {missing[0]!r}" if missing else f"has {unknown[0][:200]!r}"
            raise refused(400, "other_tensors", f"the body {what}: not the same model")
        end = 0
        for spec in self.specs:
            begin, end = end, end + spec.nbytes
            due = {
                "dtype": DTYPES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [begin, end],
            }
            if entries[spec.name] != due:
                text = f"tensor {spec.name!r} is {_short(entries[spec.name])} instead of {due}"
                raise refused(400, "other_tensors", text)
        return metadata


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def refused(status: int, reason: str, text: str) -> Refused:
    return Refused(text, status=status, reason=reason)


@dataclass(frozen=True)
class Body:
    """What came: tensors in memory of their own, and what was said beside them."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


class Stream(Protocol):
    """Where bytes come from: aiohttp's StreamReader on either side."""

    async def read(self, n: int = -1) -> bytes: ...


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def body_pieces(
    layout: Layout, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """A body in pieces; nothing is copied."""
    yield layout.header(metadata)
    for spec in layout.specs:
        memory = memory_of(tensors[spec.name].contiguous())
        for begin in range(0, len(memory), PIECE):
            yield memory[begin : begin + PIECE]


async def read_body(
    stream: Stream, length: int | None, layout: Layout, patience: float, check_finite: bool = False
) -> Body:
    """Read a body of `length` bytes, each byte straight to where it belongs.

    Memory is taken when the header is known to be the right one. patience: seconds without a byte
    after which the sender counts as gone. Raises Refused: 411 without a length, 413 for another one
    than the layout has, 400 for another layout, 408 for a sender that stopped, 422 for a tensor
    that is not finite, where that is checked.
    """
    if length is None:
        raise refused(411, "no_length", "a body needs a Content-Length")
    (declared,) = struct.unpack("<Q", await _read(stream, 8, patience))
    if declared > min(length, layout.most_header):
        raise refused(400, "bad_body", f"a header of {declared} bytes: the model's is shorter")
    metadata = layout.check(await _read(stream, declared, patience))
    if length != 8 + declared + layout.nbytes:
        text = f"a body of {length} bytes, where {8 + declared + layout.nbytes} are due"
        raise refused(413, "wrong_length", text)
    tensors = {}
    for spec in layout.specs:
        tensor = tensors[spec.name] = torch.empty(spec.shape, dtype=spec.dtype)
        memory, done = memory_of(tensor), 0
        while done < len(memory):
            piece = await _some(stream, min(PIECE, len(memory) - done), patience)
            memory[done : done + len(piece)] = piece
            done += len(piece)
        if check_finite and not tensor.isfinite().all():
            text = f"{spec.name!r} has values that are not finite: this worker's training diverged"
            raise refused(422, "non_finite", text)
    return Body(tensors, metadata)


async def _read(stream: Stream, length: int, patience: float) -> bytes:
    found = b""
    while len(found) < length:
        found += await _some(stream, length - len(found), patience)
    return found


async def _some(stream: Stream, most: int, patience: float) -> bytes:
    try:
        async with asyncio.timeout(patience):
            piece = await stream.read(most)
    except TimeoutError:
        raise refused(408, "too_slow", f"no byte of the body for {patience:g} s") from None
    if not piece:
        raise refused(400, "cut", "the body ended before its last byte")
    return piece


async def asynchronous(pieces: Iterator[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    """The same pieces, as a client sends them."""
    for piece in pieces:
        yield piece


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """xxh3-128 over names and bytes: equal for equal parameters, wherever they are."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(memory_of(tensors[name].detach().cpu().contiguous()))
    return digest.hexdigest()
