"""Plain values come back in their exact type, order and bits."""

from __future__ import annotations

import datetime as dt
import pathlib
import struct
import subprocess
import sys
import time
import zoneinfo
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from fractions import Fraction
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckptcore import register_codec
from ckptcore.errors import CheckpointCorrupt, UnsupportedValue
from ckptcore.format import values as encoding
from ckptcore.format.values import Opaque, TensorRef, decode, encode, join_path
from ckptcore.testing.processes import patience

any_float = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("<d", n.to_bytes(8, "little"))[0])
any_text = st.text(st.characters(exclude_categories=()), max_size=8)
any_int = (
    st.integers()
    | st.integers(-(2**300), 2**300)
    | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)])
)
timezones = (
    st.none()
    | st.timezones()
    | st.integers(-1439, 1439).map(lambda m: dt.timezone(dt.timedelta(minutes=m)))
)
numpy_dtypes = st.sampled_from(
    [
        "?",
        "i1",
        "u1",
        "<i2",
        ">i2",
        "<u4",
        ">i8",
        "<u8",
        "<f2",
        ">f2",
        "<f4",
        "<f8",
        ">f8",
        "<c8",
        "<c16",
        "<g",
        "S5",
        "<U3",
        ">U2",
        "<M8[ns]",
        "<M8[D]",
        "<m8[us]",
    ]
)
hashable = st.recursive(
    st.none()
    | st.booleans()
    | any_int
    | any_float
    | any_text
    | st.binary(max_size=8)
    | st.complex_numbers()
    | st.dates()
    | st.uuids()
    | st.sampled_from([pathlib.PurePosixPath("/a/b"), dt.UTC, Fraction(1, 3)]),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
leaves = (
    hashable
    | st.datetimes(timezones=timezones)
    | st.times(timezones=timezones)
    | st.timedeltas()
    | st.timezones()
    | any_text.map(lambda text: pathlib.Path(text.replace("\0", "")))
    | st.decimals()
    | numpy_dtypes.flatmap(
        lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    )
    | st.sampled_from(
        ["?", "i1", "u2", "<i4", "<u8", "<f2", "<f4", "<f8", "<c8", "<M8[ns]", "<m8[s]"]
    ).flatmap(lambda d: hnp.arrays(d, ()).map(lambda array: array[()]))
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(any_text, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.sets(hashable, max_size=4)
        | st.lists(st.tuples(hashable, inner), max_size=3).map(OrderedDict)
        | st.lists(hashable, max_size=4).map(Counter)
        | st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=5))
    ),
    max_leaves=12,
)


@given(values)
@example(float("nan"))
@example(-0.0)
@example({1: "a", "1": "b", (1,): "c", None: "d", b"1": "e", 2.5: "f"})
@example({"z": 1, "a": 2, "": 3})
def test_any_nested_value_comes_back_with_its_types_and_bits(same, value) -> None:
    same(decode(encode(value)), value)


@given(values)
def test_equal_values_give_equal_bytes(value) -> None:
    once = encode(value)
    assert encode(decode(once)) == once


def test_order_of_sets_does_not_reach_the_bytes() -> None:
    # 0, 8 and 16 belong into the same slot of a small set, which lists them in the order they came.
    one, other = set(), set()
    for number in (0, 8, 16):
        one.add(number)
        other.add(16 - number)
    assert list(one) != list(other)
    assert encode(one) == encode(other)


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        -(2**70),
        2**63,
        -(2**63) - 1,
        2**5000,
        True,
        False,
        0,
        0.0,
        -0.0,
        float("inf"),
        float("-inf"),
        complex(-0.0, float("nan")),
        "\ud800",
        "a\0b",
        b"",
        "",
        (),
        [],
        {},
        set(),
        frozenset(),
        (None,),
        [()],
        range(3, 9, 2),
        slice(1, None, 2),
        bytearray(b"ab"),
        Decimal("-0"),
        Decimal("sNaN12"),
        Fraction(-1, 3),
        UUID(int=5),
        deque([1], maxlen=3),
        deque([1]),
        Counter("abca"),
        OrderedDict(b=1, a=2),
        dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        dt.datetime.max,
        dt.date.min,
        dt.time(1, 2, 3, 4, fold=1),
        dt.timedelta(-1, 1, 1),
        dt.UTC,
        zoneinfo.ZoneInfo("UTC"),
        pathlib.Path("/a/../b"),
        pathlib.PurePosixPath("a"),
        pathlib.PureWindowsPath("C:/a"),
        np.float32(1.5),
        np.bool_(True),
        np.int64(-1),
        np.str_("ab"),
        np.bytes_(b"ab"),
        np.datetime64("NaT"),
        np.longdouble("1.1"),
        np.zeros((2, 0, 3), "<f4"),
        np.array(5),
        np.array(["ab", "c"]),
        np.frombuffer(b"abcdef", "V3"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6)[::-2],
        torch.Size([2, 3]),
        torch.device("cpu", 1),
        torch.bfloat16,
    ],
    ids=lambda value: f"{type(value).__name__}-{repr(value)[:24]}",
)
def test_named_values_come_back(same, value) -> None:
    import ckptcore.state.tree  # noqa: F401  (registers torch's own plain types)

    same(decode(encode({"k": [value]})), {"k": [value]})


def test_named_time_zone_keeps_its_name() -> None:
    zone = dt.timezone(dt.timedelta(hours=1), "work")
    found = decode(encode(dt.datetime(2020, 1, 1, tzinfo=zone)))
    assert found.tzname() == "work"
    assert found.utcoffset() == dt.timedelta(hours=1)


def test_nan_payload_survives(same) -> None:
    odd = struct.unpack("<d", struct.pack("<Q", 0xFFF4_0000_0000_BEEF))[0]
    assert struct.pack("<d", decode(encode(odd))) == struct.pack("<Q", 0xFFF4_0000_0000_BEEF)


def test_numpy_arrays_come_back_writable() -> None:
    frozen = np.arange(3)
    frozen.flags.writeable = False
    found = decode(encode(frozen))
    found += 1
    assert found.tolist() == [1, 2, 3]


@pytest.mark.parametrize("value", [np.bytes_(b"a\0"), np.str_("a\0")], ids=["bytes", "str"])
def test_numpy_strings_keep_zeros_at_the_end(same, value) -> None:
    same(decode(encode(value)), value)


class Color(Enum):
    RED = 1
    BLUE = "b"


class Level(IntEnum):
    LOW = 1


class Access(Flag):
    READ = 1
    WRITE = 2


@pytest.mark.parametrize(
    "value", [Color.RED, Color.BLUE, Level.LOW, Access.READ, Access.READ | Access.WRITE, Access(0)]
)
def test_enum_through_a_codec(value) -> None:
    register_codec(type(value))
    assert decode(encode({value: [value]})) == {value: [value]}
    assert decode(encode(value)) is value


class Average:
    def __init__(self, count: int, mean: torch.Tensor) -> None:
        self.count, self.mean = count, mean


def test_codec_may_hold_tensors() -> None:
    register_codec(
        Average,
        lambda a: {"count": a.count, "mean": a.mean},
        lambda p: Average(p["count"], p["mean"]),
    )
    mean = torch.tensor([1.5, 2.5])
    seen = []

    def leaf(path, value):
        if isinstance(value, torch.Tensor):
            seen.append(path)
            return TensorRef(len(seen) - 1)
        return None

    found = decode(encode({"avg": Average(7, mean)}, leaf), lambda ref: [mean][ref.index])["avg"]
    assert (type(found), found.count) == (Average, 7)
    assert found.mean is mean
    assert [path[0] for path in seen] == ["avg"]


def test_codec_that_is_not_registered_when_reading() -> None:
    class Gone:
        pass

    register_codec(Gone, lambda _: {"a": 1}, lambda _: Gone(), name="tests.gone")
    data = encode([Gone()]).replace(b"tests.gone", b"tests.lost")
    with pytest.raises(CheckpointCorrupt, match=r"tests\.lost.*register_codec"):
        decode(data)
    assert decode(data, lenient=True) == [Opaque("tests.lost", {"a": 1})]


def test_codec_registration_is_checked() -> None:
    class Other:
        pass

    with pytest.raises(TypeError, match="needs encode= and decode="):
        register_codec(Other)
    with pytest.raises(TypeError, match=r"needs encode= and decode=, functions"):
        register_codec(Other, 1, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a class, not 'Other'"):
        register_codec("Other", str, str)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="'OrderedDict' is taken"):
        register_codec(Other, str, str, name="OrderedDict")


# In a process of its own, as a stack that overflows ends the process.
DEPTHS = """
import sys
from collections import OrderedDict, deque
from ckptcore.errors import UnsupportedValue
from ckptcore.format.values import decode, encode

wrap = {"list": lambda v: [v], "tuple": lambda v: (v,), "frozenset": lambda v: frozenset([v]), "deque": lambda v:
        deque([v]), "dict": lambda v: {"k": v}, "numbered": lambda v: {1: v}, "ordered": lambda v: OrderedDict(k=v)}
value, depth, seen = 1, 0, []
while True:
    try:
        seen.append(encode(value))
    except UnsupportedValue:
        break
    value, depth = wrap[sys.argv[1]](value), depth + 1
assert depth < 1000, "no limit"
value = 1
for data in seen:
    assert encode(decode(data)) == data
print("refused at", depth)
"""


@pytest.mark.parametrize(
    "wrap", ["list", "tuple", "frozenset", "deque", "dict", "numbered", "ordered"]
)
def test_whatever_depth_is_accepted_comes_back(wrap: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEPTHS, wrap],
        capture_output=True,
        text=True,
        timeout=60 * patience(),
    )
    assert done.returncode == 0, done.stderr[:500]
    assert int(done.stdout.split()[-1]) > 20


@given(
    st.lists(
        st.dictionaries(
            any_text | st.integers(0, 3) | st.integers(0, 3).map(str), st.none(), min_size=1
        ),
        max_size=3,
    )
)
def test_names_of_text_and_number_keys_differ(parts) -> None:
    paths: list = [()]
    for keys in parts:
        paths = [(*path, key) for path in paths for key in keys if isinstance(key, str)]
    names = [join_path(path).encode() for path in paths]
    # Surrogates are written as escapes, which a text may spell out too; all other names are
    # distinct.
    plain = [
        n
        for n, p in zip(names, paths, strict=True)
        if not any("\ud800" <= c <= "\udfff" for k in p for c in k)
    ]
    assert len(set(plain)) == len(plain)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("a", "b"), "a/b"),
        (("a/b",), "a~1b"),
        (("a~1b",), "a~01b"),
        (("", "a"), "/a"),
        (("a", 0), "a/0"),
        (("\ud800",), "\\ud800"),
        ((("x", 1),), "('x', 1)"),
    ],
)
def test_names_are_json_pointers(path, name) -> None:
    assert join_path(path) == name


@given(values)
def test_what_is_packed_at_once_has_the_bytes_of_what_is_packed_one_by_one(value: Any) -> None:
    at_once = encode(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_as_they_are", lambda *_: False)
        patch.setattr(encoding, "_plain", lambda *_: False)
        assert encode(value) == at_once


def test_what_contains_itself_is_refused_at_once() -> None:
    """A look ahead that follows every way through it would take a thousand steps for each step."""
    endless: list[Any] = []
    endless += [endless] * 1000
    endless.append([endless] * 1000)
    for value in (endless, {"a": endless, "b": {"c": endless}}, ([endless],)):
        start = time.thread_time()
        with pytest.raises(UnsupportedValue, match="contains itself"):
            encode(value)
        assert time.thread_time() - start < 5
