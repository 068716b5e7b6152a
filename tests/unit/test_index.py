"""Indexes: what was encoded is decoded, and nothing else is accepted."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.errors import CheckpointCorrupt, CheckpointError, UnsafePath
from ckptcore.format.digest import CHUNK_BYTES, DIGEST_BYTES, combined_digest
from ckptcore.format.manifest import (
    ComponentIndex,
    FileEntry,
    Index,
    TensorEntry,
    chunk_count,
    index_file_name,
)
from ckptcore.format.tensorfile import DTYPES, tensor_nbytes

names = st.text(max_size=8)


@st.composite
def indexes(draw) -> Index:
    index = Index(draw(st.integers(0, 99999)))
    for file in draw(
        st.lists(st.sampled_from(["a.safetensors", "b.safetensors", "ü.safetensors"]), unique=True)
    ):
        index.files[file] = FileEntry(10**9, 4096, draw(st.binary(min_size=16, max_size=16)))
    free = dict.fromkeys(index.files, 4096)  # no two tensors lie on the same bytes
    for key in draw(st.lists(names, unique=True, max_size=3)):
        entries: list[TensorEntry] = []
        for name in draw(st.lists(names, unique=True, max_size=4)) if index.files else []:
            dtype = draw(st.sampled_from(sorted(DTYPES)))
            local = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
            owners = [n for n, e in enumerate(entries) if e.alias_of is None]
            if owners and draw(st.booleans()):
                first = draw(st.sampled_from(owners))
                held = entries[first]
                entries.append(
                    TensorEntry(
                        len(entries),
                        name,
                        held.dtype,
                        held.shape,
                        held.offset,
                        held.local_shape,
                        None,
                        None,
                        0,
                        b"",
                        first,
                    )
                )
                continue
            count = DIGEST_BYTES * chunk_count(tensor_nbytes(dtype, local))
            digests = draw(st.binary(min_size=count, max_size=count))
            file = draw(st.sampled_from(sorted(index.files)))
            start = free[file] + draw(st.integers(0, 10**6))
            free[file] = start + tensor_nbytes(dtype, local)
            stored = draw(st.sampled_from([name, "other"])) or name
            number = len(entries)
            entries.append(
                TensorEntry(
                    number, name, dtype, local, None, local, file, stored, start, digests, None
                )
            )
        index.components[key] = ComponentIndex(draw(st.none() | st.binary(max_size=20)), entries)
    return index


@given(indexes())
def test_index_comes_back(index: Index) -> None:
    data = index.encode()
    found = Index.decode(data)
    assert found == index
    assert found.encode() == data


def small() -> Index:
    held = TensorEntry(
        0, "w", "F32", (2, 2), None, (2, 2), "m.safetensors", "w", 4096, b"d" * 8, None
    )
    alias = TensorEntry(1, "v", "F32", (2, 2), None, (2, 2), None, None, 0, b"", 0)
    return Index(
        0,
        {"m.safetensors": FileEntry(4112, 4096, b"h" * 16)},
        {"m": ComponentIndex(b"\x80", [held, alias])},
    )


@pytest.mark.parametrize(
    ("start", "sound"), [(4111, False), (4112, True), (4097, False), (4096, False)]
)
def test_no_two_tensors_lie_on_the_same_bytes(start: int, sound: bool) -> None:
    index = small()
    index.files["m.safetensors"] = FileEntry(4128, 4096, b"h" * 16)
    second = TensorEntry(
        2, "x", "F32", (2, 2), None, (2, 2), "m.safetensors", "x", start, b"d" * 8, None
    )
    index.components["other"] = ComponentIndex(b"\x80", [second])
    if sound:
        assert Index.decode(index.encode()) == index
    else:
        with pytest.raises(
            CheckpointCorrupt, match=r"two tensors lie on the same bytes of m\.safetensors"
        ):
            Index.decode(index.encode())


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        Index.decode(data)


@given(
    st.integers(0, 10**6), st.integers(0, 255), st.sampled_from(["set", "insert", "delete", "cut"])
)
@settings(max_examples=400)
def test_mutated_bytes(at: int, byte: int, how: str) -> None:
    data = bytearray(small().encode())
    at %= len(data)
    if how == "set":
        data[at] = byte
    elif how == "insert":
        data.insert(at, byte)
    elif how == "delete":
        del data[at]
    else:
        del data[at:]
    try:
        found = Index.decode(bytes(data))
    except CheckpointError:
        return
    for component in found.components.values():
        for entry in component.tensors:
            assert len(entry.digests) == (
                0 if entry.file is None else DIGEST_BYTES * chunk_count(entry.nbytes)
            )


def changed(change) -> bytes:
    raw = msgpack.unpackb(small().encode())
    change(raw)
    return msgpack.packb(raw)


def row(number: int, column: int, value):
    return lambda raw: raw["components"]["m"]["tensors"][number].__setitem__(column, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.update(format="other"),
        lambda raw: raw.update(version=2),
        lambda raw: raw.pop("files"),
        lambda raw: raw.update(writer=-1),
        lambda raw: raw.update(writer=True),
        lambda raw: raw.update(writer="0"),
        lambda raw: raw["files"].update({"m.safetensors": [4112, 4096, b"short"]}),
        lambda raw: raw["components"]["m"].update(tree="text"),
        lambda raw: raw["components"]["m"].update(tensors=None),
        row(0, 0, "a"),
        row(0, 0, -1),
        row(0, 1, 5),
        row(0, 2, "F31"),
        row(0, 3, [-1, 2]),
        row(0, 3, [2, 3]),
        row(0, 4, "other.safetensors"),
        row(0, 5, float("nan")),
        row(0, 5, 7),
        row(0, 7, list(b"d" * 8)),
        row(0, 6, 0),
        row(0, 6, 4100),
        row(0, 6, 2**62),
        row(0, 7, b""),
        row(0, 7, b"d" * 16),
        row(0, 8, 1),
        row(0, 3, [2**40, 2**40]),
        row(1, 8, 1),
        row(1, 8, -1),
        row(1, 8, "w"),
    ],
)
def test_indexes_whose_parts_do_not_fit_are_refused(change) -> None:
    assert Index.decode(small().encode()) == small()
    with pytest.raises(CheckpointCorrupt) as caught:
        Index.decode(changed(change), "index.rank00000.msgpack")
    assert caught.value.file == "index.rank00000.msgpack"


@pytest.mark.parametrize(
    "name", ["../a", "a/b", "/a", "..", "", "checkpoint_manifest.json", "a\\b", "s3://a"]
)
def test_unsafe_file_names_are_refused(name: str) -> None:
    def change(raw) -> None:
        raw["files"] = {name: raw["files"]["m.safetensors"]}
        raw["components"]["m"]["tensors"][0][4] = name

    with pytest.raises(UnsafePath):
        Index.decode(changed(change))


def test_names_that_appear_twice_are_refused() -> None:
    data = small().encode()
    twice = data.replace(b"\x81\xa1m\x82", b"\x82\xa1m\xc0\xa1m\x82")
    assert twice != data
    with pytest.raises(CheckpointCorrupt):
        Index.decode(twice)


def test_numbers_that_appear_twice_are_refused() -> None:
    with pytest.raises(CheckpointCorrupt):
        Index.decode(changed(row(1, 0, 0)))


def test_chunks_and_digests() -> None:
    count = CHUNK_BYTES // 4 + 1
    entry = TensorEntry(
        0, "w", "F32", (count,), None, (count,), "m", "w", 4096, b"a" * 8 + b"b" * 8, None
    )
    assert entry.nbytes == CHUNK_BYTES + 4
    assert entry.chunk(0) == (4096, CHUNK_BYTES, b"a" * 8)
    assert entry.chunk(1) == (4096 + CHUNK_BYTES, 4, b"b" * 8)
    index = Index(
        0,
        {"m": FileEntry(4096 + entry.nbytes, 4096, b"h" * 16)},
        {"c": ComponentIndex(b"", [entry])},
    )
    assert index.file_digests() == {"m": combined_digest([b"h" * 16, b"a" * 8, b"b" * 8])}


def test_file_name() -> None:
    assert index_file_name(3) == "index.rank00003.msgpack"
    assert index_file_name(123456) == "index.rank123456.msgpack"
