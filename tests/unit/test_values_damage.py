"""Bytes that are no stored values give errors of our tree, in bounded memory, and run nothing."""

from __future__ import annotations

import datetime as dt
import pickle
import subprocess
import sys
import tracemalloc
from collections import Counter, OrderedDict, deque
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptcore.state.tree  # noqa: F401  (registers torch's own plain types)
from ckptcore.errors import CheckpointError
from ckptcore.format import values as format_values
from ckptcore.format.values import decode, encode
from ckptcore.testing.processes import patience

RICH = encode(
    {
        "a": [
            1,
            2**70,
            -1.5,
            "text",
            b"bytes",
            None,
            True,
            (1, (2, 3)),
            {4, 5},
            frozenset("ab"),
            1 + 2j,
        ],
        5: OrderedDict(x=1),
        "c": Counter("aab"),
        "d": deque([1, 2], 5),
        "e": range(3),
        "f": slice(1, 2),
        "t": [
            dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
            dt.date(2020, 1, 1),
            dt.time(1),
            dt.timedelta(1),
        ],
        "n": [
            np.arange(5, dtype=np.int16),
            np.float32(2.5),
            np.array(["a", "bc"]),
            np.datetime64("2020-01-01"),
        ],
        "p": Path("a/b"),
        "z": bytearray(b"abc"),
        "q": [torch.Size([1]), torch.device("cpu"), torch.float32],
    }
)


def check(data: bytes) -> None:
    """Decodes, or raises one of our errors; either way without much more memory than the data
    have."""
    tracemalloc.start()
    try:
        decode(data, lambda ref: ref)
    except CheckpointError as error:
        assert str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 * 1024 * 1024, f"{peak} bytes to read {len(data)}"


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes(data: bytes) -> None:
    check(data)


@given(
    st.integers(0, len(RICH) - 1),
    st.integers(0, 255),
    st.sampled_from(["set", "insert", "delete", "cut"]),
)
@settings(max_examples=400)
def test_mutated_bytes(at: int, byte: int, how: str) -> None:
    data = bytearray(RICH)
    if how == "set":
        data[at] = byte
    elif how == "insert":
        data.insert(at, byte)
    elif how == "delete":
        del data[at]
    else:
        del data[at:]
    check(bytes(data))


@given(
    st.integers(1, 14),
    st.binary(max_size=60) | st.sampled_from([b"\xc0", b"\x90", b"\x80", b"\x01"]),
)
@settings(max_examples=200)
def test_random_extensions(code: int, payload: bytes) -> None:
    check(msgpack.packb(msgpack.ExtType(code, payload)))


def ext(code: int, payload) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb(payload))


def codec(name: str, payload) -> msgpack.ExtType:
    return ext(format_values.REGISTERED, [name, payload])


CRAFTED = {
    "device of no kind": codec("torch.device", "bogus"),
    "dtype of no kind": codec("torch.dtype", "nn"),
    "fraction over zero": codec("Fraction", [1, 0]),
    "decimal of letters": codec("Decimal", "abc"),
    "bytes by their number": codec("bytearray", 3),
    "tuple of a range": ext(format_values.TUPLE, codec("range", [0, 3, 1])),
    "set of a range": ext(format_values.SET, codec("range", [0, 3, 1])),
    "deque of a range": codec("deque", [codec("range", [0, 3, 1]), None]),
    "counter of a range": codec("Counter", codec("range", [0, 3, 1])),
    "slice of a range": codec("slice", codec("range", [0, 3, 1])),
    "size of a range": codec("torch.Size", codec("range", [0, 3, 1])),
    "zone that is a folder": ext(format_values.TIME, ["zone", "America"]),
    "zone that leaves": ext(format_values.TIME, ["zone", "../../etc/passwd"]),
    "array of objects": ext(format_values.NUMPY_ARRAY, ["|O", [1], b"12345678"]),
    "array of fields": ext(format_values.NUMPY_ARRAY, ["i4,f4", [1], b"12345678"]),
    "array of nothing": ext(format_values.NUMPY_ARRAY, ["|S0", [1000], b""]),
    "array of odd dtype": ext(format_values.NUMPY_ARRAY, ["({", [1], b"1"]),
    "array of negative shape": ext(format_values.NUMPY_ARRAY, ["<i4", [-1, -1], b"1234"]),
    "array of a vast shape": ext(format_values.NUMPY_ARRAY, ["<i4", [2**62], b"1234"]),
    "tensor by name": ext(format_values.TENSOR, ["a", True]),
    "unknown kind": msgpack.ExtType(99, b""),
    "key twice": b"\x82\xa1a\x01\xa1a\x02",
    "key twice, numbers": ext(format_values.DICT, [[1, 2], [1, 3]]),
    "key that is a list": ext(format_values.DICT, [[[1], 2]]),
    "pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("crafted", CRAFTED.values(), ids=CRAFTED.keys())
def test_crafted_values_are_refused(crafted) -> None:
    # Sizes are small here: whatever takes 3 items from a range would as well take 2**60.
    with pytest.raises(CheckpointError):
        decode(crafted if isinstance(crafted, bytes) else msgpack.packb(crafted))


@pytest.mark.parametrize(
    "head",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
)
def test_vast_lengths_are_refused(head: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode(head + b"\x00" * 100)
    check(head + b"\x00" * 100)


@pytest.mark.parametrize("kind", [b"\x91", b"\x81\xa1a"])
def test_vast_depth_is_refused_or_read(kind: bytes) -> None:
    check(kind * 5000 + b"\x00")


DEEP = """
import msgpack
from ckptcore.errors import CheckpointError
from ckptcore.format.values import TUPLE, decode

data = b"\\x90"
for _ in range(1000):
    data = msgpack.packb(msgpack.ExtType(TUPLE, b"\\x91" + data))
try:
    decode(data)
except CheckpointError as error:
    print(type(error).__name__)
"""


def test_vast_depth_of_extensions_is_refused() -> None:
    # In a process of its own, as a stack that overflows ends the process.
    done = subprocess.run(
        [sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=60 * patience()
    )
    assert (done.returncode, done.stdout.strip()) == (0, "CheckpointCorrupt"), done.stderr[:500]


def test_reading_a_dtype_imports_nothing() -> None:
    before = set(sys.modules)
    with pytest.raises(CheckpointError):
        decode(msgpack.packb(codec("torch.dtype", "_inductor")))
    assert {
        name for name in set(sys.modules) - before if name.startswith("torch._inductor")
    } == set()


def test_the_file_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"index\.rank00000\.msgpack") as caught:
        decode(b"\xc1", file="index.rank00000.msgpack")
    assert caught.value.file == "index.rank00000.msgpack"
    assert caught.value.kind == "format"
