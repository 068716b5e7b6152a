"""Bodies: plain safetensors, read into memory that was due, and refused before any was taken."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest
import safetensors.torch
import torch
from ckpt_trainers.diloco.wire import (
    PIECE,
    Body,
    DiLoCoError,
    Layout,
    Refused,
    body_pieces,
    checksum,
    read_body,
)
from torch import Tensor

TENSORS = {
    "b": torch.randn(3, 4).bfloat16(),
    "a.weight": torch.randn(2, 5, dtype=torch.float64),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "half": torch.randn(4, 4).half().t(),
}


class Source:
    """A connection that brings its bytes in small pieces, then ends, or says nothing more."""

    def __init__(self, content: bytes, piece: int = 7, silent: bool = False) -> None:
        self.content, self.piece, self.silent, self.asked = content, piece, silent, 0

    async def read(self, n: int = -1) -> bytes:
        if not self.content and self.silent:
            await asyncio.sleep(60)
        found, self.content = self.content[: min(n, self.piece)], self.content[self.piece :]
        self.asked += 1
        return found


def body(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    return b"".join(body_pieces(Layout.of(tensors), tensors, metadata or {}))


def read(
    content: bytes, layout: Layout, length: int | None = -1, check: bool = False, **how: Any
) -> Body:
    length = len(content) if length == -1 else length
    # A piece must not be longer than what is asked for, or bytes are lost.
    source = Source(content, piece=1, **how)
    return asyncio.run(read_body(source, length, layout, 0.05, check))


def test_a_body_is_a_safetensors_file() -> None:
    content = body(TENSORS, {"rounds": "[3]"})
    found = safetensors.torch.load(content)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_what_is_sent_is_what_is_read() -> None:
    found = read(body(TENSORS, {"rounds": "[3]"}), Layout.of(TENSORS))
    assert found.metadata == {"rounds": "[3]"}
    for name, tensor in TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_pieces_are_bounded_and_nothing_is_copied() -> None:
    large = {"w": torch.zeros(3 * PIECE // 4)}
    pieces = list(body_pieces(Layout.of(large), large, {}))
    assert [len(piece) for piece in pieces[1:]] == [PIECE] * 3
    large["w"][0] = 1.0
    assert bytes(pieces[1][:4]) == struct.pack("<f", 1.0)


def test_a_header_spaced_in_another_way_is_the_same() -> None:
    layout = Layout.of({"w": torch.ones(2)})
    content = body({"w": torch.ones(2)})
    header = json.dumps(json.loads(content[8:-8]), indent=4).encode()
    again = struct.pack("<Q", len(header)) + header + content[-8:]
    assert torch.equal(read(again, layout).tensors["w"], torch.ones(2))


LAYOUT = Layout.of({"w": torch.ones(4, 2)})
GOOD = body({"w": torch.ones(4, 2)})


def with_header(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + GOOD[-32:]


def entry(**changes: Any) -> bytes:
    return json.dumps(
        {"w": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32], **changes}}
    ).encode()


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (struct.pack("<Q", 2**60) + GOOD[8:], 400, "bad_body"),
        (struct.pack("<Q", 2**64 - 1) + GOOD[8:], 400, "bad_body"),
        (struct.pack("<Q", 1) + GOOD[8:], 400, "bad_body"),
        (GOOD + b"\0" * 5000, 413, "wrong_length"),
        (GOOD[:20], 400, "bad_body"),
        (b"", 400, "cut"),
        (with_header(entry(shape=[2, 4])), 400, "other_tensors"),
        (with_header(entry(shape=[4, 2, 1])), 400, "other_tensors"),
        (with_header(entry(dtype="BF16")), 400, "other_tensors"),
        (with_header(entry(data_offsets=[32, 0])), 400, "other_tensors"),
        (with_header(entry(data_offsets=[0, 2**60])), 400, "other_tensors"),
        (with_header(entry().replace(b'"w"', b'"v"')), 400, "other_tensors"),
        (with_header(b"{}"), 400, "other_tensors"),
        (with_header(b"[1, 2]"), 400, "bad_body"),
        (with_header(b'{"__metadata__": 5}'), 400, "bad_body"),
        (with_header(b'{"w"'), 400, "bad_body"),
        (with_header(b"[" * 3000), 400, "bad_body"),
        (with_header(b"\xff\xfe"), 400, "bad_body"),
    ],
)
def test_another_body_is_refused(content: bytes, status: int, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        read(content, LAYOUT)
    assert (caught.value.status, caught.value.reason) == (status, reason)


def test_a_body_of_any_other_length_is_refused_before_its_data_are_read() -> None:
    for length in (None, 0, 10, 2**60, len(GOOD) - 1, len(GOOD) + 1):
        source = Source(GOOD, piece=1)
        with pytest.raises(Refused) as caught:
            asyncio.run(read_body(source, length, LAYOUT, 0.05))
        assert caught.value.status in (400, 411, 413) and len(source.content) >= LAYOUT.nbytes


def test_a_cut_body_and_one_that_stops() -> None:
    with pytest.raises(Refused, match="ended before its last byte") as cut:
        read(GOOD[:-3], LAYOUT, len(GOOD))
    with pytest.raises(Refused, match=r"no byte of the body for 0.05 s") as slow:
        read(GOOD[:-3], LAYOUT, len(GOOD), silent=True)
    assert (cut.value.status, slow.value.status) == (400, 408)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_name(value: float) -> None:
    tensor = torch.ones(4, 2)
    tensor[3, 1] = value
    with pytest.raises(Refused, match="'w' has values that are not finite") as caught:
        read(body({"w": tensor}), LAYOUT, check=True)
    assert caught.value.status == 422
    assert torch.equal(read(body({"w": tensor}), LAYOUT).tensors["w"].isfinite(), tensor.isfinite())


def test_a_dtype_that_cannot_travel_is_named() -> None:
    with pytest.raises(DiLoCoError, match=r"parameter w is torch.complex64"):
        Layout.of({"w": torch.ones(2, dtype=torch.complex64)})


def test_checksums_are_of_names_and_bits() -> None:
    left = {"a": torch.tensor([0.0, 1.0]), "b": torch.ones(2)}
    assert checksum(left) == checksum(dict(reversed(left.items())))
    assert checksum(left) != checksum({**left, "a": torch.tensor([-0.0, 1.0])})
    assert checksum(left) != checksum({"a": left["b"], "b": left["a"]})
