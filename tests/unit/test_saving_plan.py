"""The save plan: every tensor once, the same on every rank, balanced, in files that stock readers
take."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.errors import InvalidState
from ckptcore.format.tensorfile import tensor_nbytes
from ckptcore.saving import plan as saving_plan
from ckptcore.saving.plan import TensorSpec, file_stem, hugging_face_index, plan_component


def spec(number: int, name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(number, name, dtype, shape, tensor_nbytes(dtype, shape))


specs = st.dictionaries(
    st.text(max_size=10),
    st.tuples(
        st.sampled_from(["F32", "U8", "BF16", "I64", "complex128"]),
        st.lists(st.integers(0, 9), max_size=3),
    ),
    max_size=20,
).map(lambda named: [spec(n, name, d, tuple(s)) for n, (name, (d, s)) in enumerate(named.items())])
writers = st.lists(st.integers(0, 30), min_size=1, max_size=5, unique=True).map(sorted)


@pytest.fixture(autouse=True)
def share_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving_plan, "MIN_SHARE_BYTES", 1)


@given(specs, writers, st.integers(1, 2000), st.integers(9000, 12000))
@settings(max_examples=150)
def test_every_tensor_once_within_all_limits(
    tensors, ranks, max_file_bytes: int, header_limit: int
) -> None:
    files = plan_component(
        "model", tensors, ranks, max_file_bytes=max_file_bytes, header_limit=header_limit
    )
    assert sorted(number for file in files for number, _ in file.contents) == list(
        range(len(tensors))
    )
    assert len({file.name for file in files}) == len(files)
    for file in files:
        assert file.component == "model"
        assert file.writer in ranks
        assert len(file.header) <= header_limit + 8
        data = sum(place.nbytes for _, place in file.contents)
        assert data <= max_file_bytes or sum(place.nbytes > 0 for _, place in file.contents) == 1
        assert file.size == len(file.header) + data
        assert len(json.loads(file.header[8:])) == 1 + len(file.contents), "and the metadata"
        for number, place in file.contents:
            wanted = tensors[number]
            assert (place.name, place.dtype, place.shape) == (
                wanted.stored_name,
                wanted.dtype,
                wanted.shape,
            )


@given(specs, writers)
def test_plan_is_deterministic(tensors, ranks) -> None:
    assert plan_component("model", tensors, ranks) == plan_component(
        "model", list(tensors), list(ranks)
    )


@given(specs, writers)
def test_writers_share_the_bytes(tensors, ranks) -> None:
    loads = dict.fromkeys(ranks, 0)
    for file in plan_component("model", tensors, ranks):
        loads[file.writer] += sum(place.nbytes for _, place in file.contents)
    total, largest = sum(t.nbytes for t in tensors), max((t.nbytes for t in tensors), default=0)
    if total >= len(ranks):
        assert max(loads.values()) - min(loads.values()) <= largest
    assert max(loads.values()) <= total / len(ranks) + largest


def test_small_components_are_not_worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving_plan, "MIN_SHARE_BYTES", 100)
    tensors = [spec(n, f"t{n}", "U8", (30,)) for n in range(6)]
    assert {file.writer for file in plan_component("m", tensors[:3], [4, 5, 6])} == {4}
    assert {file.writer for file in plan_component("m", tensors, [4, 5, 6])} == {4}
    assert {
        file.writer
        for file in plan_component(
            "m", [spec(n, f"t{n}", "U8", (50,)) for n in range(4)], [4, 5, 6]
        )
    } == {4, 5}


def test_names_of_files() -> None:
    tensors = [spec(n, f"t{n}", "U8", (10,)) for n in range(3)]
    assert [f.name for f in plan_component("model", tensors, [0])] == ["model.safetensors"]
    assert [f.name for f in plan_component("opt", tensors, [3], ".rank00003")] == [
        "opt.rank00003.safetensors"
    ]
    split = plan_component("model", tensors, [0], max_file_bytes=10)
    assert [f.name for f in split] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert plan_component("model", [], [0]) == []


@pytest.mark.parametrize(
    ("key", "stem"),
    [
        ("model", "model"),
        ("a.b-c_D9", "a.b-c_D9"),
        ("a b", "a%20b"),
        ("ü", "%C3%BC"),
        (".hidden", "%2Ehidden"),
        ("..", "%2E."),
        ("a%b", "a%25b"),
        ("a:b\\c", "a%3Ab%5Cc"),
    ],
)
def test_keys_as_file_names(key: str, stem: str) -> None:
    assert file_stem(key) == stem


@given(st.lists(st.text(min_size=1, max_size=5), unique=True, min_size=2, max_size=5))
def test_different_keys_have_different_files(keys: list[str]) -> None:
    assert len({file_stem(key) for key in keys}) == len(keys)


def test_hugging_face_index() -> None:
    tensors = [spec(0, "b", "F32", (2,)), spec(1, "a", "F32", (2,)), spec(2, "ü", "U8", (3,))]
    document = json.loads(
        hugging_face_index(plan_component("model", tensors, [0], max_file_bytes=8))
    )
    assert document["metadata"] == {"total_size": 19}
    assert document["weight_map"] == {
        "a": "model-00002-of-00003.safetensors",
        "b": "model-00001-of-00003.safetensors",
        "ü": "model-00003-of-00003.safetensors",
    }
    assert list(document["weight_map"]) == ["a", "b", "ü"]


def test_a_name_too_long_for_any_header() -> None:
    with pytest.raises(InvalidState, match="too long") as caught:
        plan_component("model", [spec(0, "x" * 3000, "F32", (1,))], [0], header_limit=9000)
    assert caught.value.component == "model"
