"""Tensor files: the layout that is written."""

from __future__ import annotations

import json

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.format import tensorfile
from ckptcore.format.tensorfile import DTYPES, HEADER_LIMIT, lay_out, tensor_nbytes

NATIVE = sorted(name for name, kind in DTYPES.items() if kind.native)
tensors = st.dictionaries(
    st.text(max_size=12).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    max_size=12,
).map(lambda named: [(name, dtype, shape) for name, (dtype, shape) in named.items()])


@given(tensors, st.randoms(use_true_random=False))
def test_layout(listed, random) -> None:
    head, placed = lay_out(listed)
    at = len(head)
    for place in placed:
        kind = DTYPES[place.dtype]
        assert place.start == at, "no holes, in file order"
        assert not kind.native or place.start % kind.itemsize == 0
        assert place.nbytes == tensor_nbytes(place.dtype, place.shape)
        at += place.nbytes
    assert sorted((p.name, p.dtype, p.shape) for p in placed) == sorted(listed)
    assert len(head) % tensorfile.ALIGNMENT == 0
    shuffled = listed[:]
    random.shuffle(shuffled)
    assert lay_out(shuffled) == (head, placed), "the order of the tensors does not matter"
    for width in {1, 2, 4, 8}:
        names = [
            p.name
            for p in placed
            if DTYPES[p.dtype].native and DTYPES[p.dtype].itemsize == width > 1
        ]
        assert names == sorted(names)


@given(tensors)
def test_header_is_read_back(listed) -> None:
    head, placed = lay_out(listed)
    assert int.from_bytes(head[:8], "little") == len(head) - 8
    found = json.loads(head[8:])
    assert found.pop("__metadata__") == {"format": "pt"}
    expected = {
        p.name: (p.dtype, [*p.shape])
        if DTYPES[p.dtype].native
        else ("U8", [*p.shape, DTYPES[p.dtype].itemsize])
        for p in placed
    }
    assert {name: (t["dtype"], t["shape"]) for name, t in found.items()} == expected
    starts = {name: [at + len(head) for at in t["data_offsets"]] for name, t in found.items()}
    assert starts == {p.name: [p.start, p.start + p.nbytes] for p in placed}


@given(tensors)
def test_stock_reader_takes_any_layout(listed) -> None:
    head, placed = lay_out(listed)
    data = bytes(sum(p.nbytes for p in placed))
    assert {name for name, _ in safetensors.deserialize(head + data)} == {p.name for p in placed}


@pytest.mark.parametrize("dtype", NATIVE)
def test_stock_reader_gives_equal_bytes_for_every_native_dtype(dtype: str) -> None:
    head, placed = lay_out([("a", "U8", (3,)), ("t", dtype, (2, 3))])
    data = {p.name: bytes(i % 2 for i in range(p.nbytes)) for p in placed}
    blob = head + b"".join(data[p.name] for p in placed)
    found = dict(safetensors.deserialize(blob))
    assert bytes(found["t"]["data"]) == data["t"]
    assert (found["t"]["dtype"], found["t"]["shape"]) == (dtype, [2, 3])


def test_stock_torch_loader(tmp_path) -> None:
    head, placed = lay_out([("w", "F32", (2, 2)), ("b", "BF16", (3,))])
    assert [p.name for p in placed] == ["w", "b"]
    path = tmp_path / "model.safetensors"
    values = torch.tensor([1.0, -0.0, 2.5, float("inf")])
    path.write_bytes(head + values.numpy().tobytes() + bytes([0x80, 0x3F] * 3))
    found = safetensors.torch.load_file(path)
    assert found["w"].flatten().tolist() == [1.0, 0.0, 2.5, float("inf")]
    assert torch.equal(found["b"], torch.ones(3, dtype=torch.bfloat16))
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_two_tensors_of_one_name() -> None:
    with pytest.raises(ValueError, match="'a'"):
        lay_out([("a", "F32", (1,)), ("a", "F32", (2,))])


def test_header_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HEADER_LIMIT == 100_000_000
    monkeypatch.setattr(tensorfile, "HEADER_LIMIT", 5000)
    lay_out([(f"t{i:03d}", "F32", (1,)) for i in range(40)])
    with pytest.raises(ValueError, match="5,000"):
        lay_out([(f"t{i:03d}", "F32", (1,)) for i in range(200)])


def test_sixteen_byte_and_small_dtypes_are_stored_as_bytes() -> None:
    head, placed = lay_out([("c", "complex128", (2,)), ("d", "F64", (1,))])
    assert [p.name for p in placed] == ["d", "c"]
    document = json.loads(head[8:])
    assert document["c"] == {"dtype": "U8", "shape": [2, 16], "data_offsets": [8, 40]}
