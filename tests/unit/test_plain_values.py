"""Plain values by the million: the bytes that the format says, whatever way they were packed, and
no step of Python for each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptcore import CheckpointManager
from ckptcore.format.values import decode, encode

BIG_INT, TUPLE, DICT, SET, FROZENSET = 1, 2, 3, 4, 5


def packed(value: Any) -> bytes:
    return msgpack.packb(reference(value), use_bin_type=True, unicode_errors="surrogatepass")


def reference(value: Any) -> Any:
    """Item by item what docs/format.md says of plain values."""
    kind = type(value)
    if kind is int and not -(2**63) <= value < 2**64:
        return msgpack.ExtType(
            BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
        )
    if kind is list:
        return [reference(item) for item in value]
    if kind is tuple:
        return msgpack.ExtType(TUPLE, packed(list(value)))
    if kind in (set, frozenset):
        items = sorted(packed(item) for item in value)
        return msgpack.ExtType(SET if kind is set else FROZENSET, msgpack.packb(items))
    if kind is dict and not all(type(key) is str for key in value):
        return msgpack.ExtType(DICT, packed([[key, item] for key, item in value.items()]))
    if kind is dict:
        return {key: reference(item) for key, item in value.items()}
    return value


edges = st.sampled_from(
    [-(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 2**63, 10**40, -1, 0, 127, 128, 65536]
)
atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | edges
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
)
keys = (
    st.integers(-3, 3)
    | edges
    | st.text(max_size=2)
    | st.binary(max_size=2)
    | st.tuples(st.integers(0, 2), st.text(max_size=1))
)
alike = st.one_of(
    [
        st.lists(one, max_size=5)
        for one in (st.integers(), edges, st.floats(), st.text(max_size=3), st.booleans())
    ]
)
values = st.recursive(
    atoms
    | alike
    | alike.map(tuple)
    | st.lists(alike, max_size=4)
    | st.lists(alike.map(tuple), max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=4)
        | st.sets(keys, max_size=4)
        | st.frozensets(edges | st.integers(), max_size=4)
    ),
    max_leaves=12,
)


@given(values)
def test_any_plain_value_has_the_bytes_of_the_format(value: Any) -> None:
    assert encode(value) == packed(value)


@given(st.data())
def test_any_plain_value_comes_back_with_its_types(same, data: st.DataObject) -> None:
    value = data.draw(values)
    same(decode(encode(value)), value)


class Whole(int):
    pass


class Text(str):
    pass


@pytest.mark.parametrize(
    "strange", [Whole(3), Text("a"), object(), torch.nn.Parameter(torch.ones(1))]
)
@pytest.mark.parametrize(
    "around",
    [
        lambda x: [1, 2, x],
        lambda x: [[1], [x]],
        lambda x: [(1,), (x,)],
        lambda x: {"a": x},
        lambda x: {"a": 1, 5: x},
        lambda x: (x,),
    ],
)
def test_what_only_looks_like_a_plain_value_is_refused_wherever_it_is(
    strange: Any, around: Any
) -> None:
    from ckptcore import UnsupportedValue

    with pytest.raises(UnsupportedValue):
        encode(around(strange))


MANY = {
    "ints": lambda: list(range(300_000)),
    "floats": lambda: [n / 7 for n in range(300_000)],
    "texts": lambda: [f"sample-{n}" for n in range(300_000)],
    "mixed": lambda: [n if n % 2 else n / 3 for n in range(300_000)],
    "pairs": lambda: [[n, n + 1] for n in range(150_000)],
    "numbers by number": lambda: {n: 2 * n for n in range(150_000)},
}


@pytest.mark.parametrize("kind", MANY)
def test_no_step_of_python_for_each_of_many_alike(kind: str, tmp_path: Path) -> None:
    """Calls that `save_async` makes before it returns are counted, so that no busy machine
    matters."""
    many = MANY[kind]()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"order": many, "w": torch.ones(3)})
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            handle = ckpt.save_async(2, {"order": many, "w": torch.ones(3)})
        finally:
            sys.setprofile(None)
        handle.result()
    # _tensors_of looks into each of many lists, and nothing else does.
    assert calls < (1_000_000 if kind == "pairs" else 20_000)
