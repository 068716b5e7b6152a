"""Manifests: strict JSON under a digest."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.errors import (
    CheckpointCorrupt,
    CheckpointError,
    InvalidState,
    UnsafePath,
    UnsupportedVersion,
)
from ckptcore.format.digest import content_digest
from ckptcore.format.manifest import (
    CheckpointManifest,
    ComponentManifest,
    FileRecord,
    check_file_name,
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
counts = st.integers(0, 2**60)
partitions = st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3)
metadata = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
digests = st.text("0123456789abcdef", min_size=32, max_size=32)
FILES = ["a.safetensors", "index.rank00000.msgpack", "ü b-1.safetensors"]
components = st.builds(
    ComponentManifest,
    key=st.just(""),
    pattern=st.sampled_from(["GLOBAL", "REPLICATED", "PER_RANK", "PER_NODE", "SHARDED"]),
    writers=st.lists(st.integers(0, 9), max_size=3),
    size_bytes=counts,
    checksum=digests,
    required=st.booleans(),
    tensors=counts,
    metadata=metadata,
)


@st.composite
def manifests(draw) -> CheckpointManifest:
    files = draw(st.lists(st.sampled_from(FILES), unique=True))
    parts = draw(st.dictionaries(st.text(max_size=5), components, max_size=3))
    for key, part in parts.items():
        if draw(st.booleans()):
            part.pattern, part.group, part.partition = "PER_GROUP", "dp", [[0, 2], [1, 3]]
            part.group_keys = draw(st.none() | st.just(["even", "odd"]))
        part.key, part.files = (
            key,
            draw(st.lists(st.sampled_from(files), unique=True)) if files else [],
        )
    known = set(CheckpointManifest.__slots__) | {"format", "digest"}
    return CheckpointManifest(
        checkpoint_id=draw(st.text(max_size=8)),
        step=draw(counts),
        run_id=draw(st.text(max_size=8)),
        attempt_id=draw(st.text(max_size=8)),
        sequence=draw(counts),
        created="2026-01-01T00:00:00.000Z",
        world_size=4,
        nodes=draw(st.sampled_from([[[0, 1, 2, 3]], [[0, 1], [2, 3]]])),
        groups=draw(st.dictionaries(st.text(max_size=4), partitions, max_size=2)),
        components=parts,
        files={name: FileRecord(draw(counts), draw(digests), draw(counts)) for name in files},
        metrics=draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3)),
        metrics_step=draw(st.none() | counts),
        training_args_hash=draw(st.none() | st.text(max_size=5)),
        versions=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)),
        timings=draw(st.dictionaries(st.text(max_size=5), st.floats(0, 1e9), max_size=2)),
        timings_by_rank=draw(
            st.dictionaries(
                st.text(max_size=5),
                st.lists(st.none() | st.floats(0, 1e9), min_size=4, max_size=4),
                max_size=2,
            )
        ),
        metadata=draw(metadata),
        extra={k: v for k, v in draw(metadata).items() if k not in known},
    )


@given(manifests())
def test_manifest_comes_back(manifest: CheckpointManifest) -> None:
    data = manifest.encode()
    found = CheckpointManifest.decode(data)
    assert found == manifest
    assert found.encode() == data
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def plain(**changes) -> CheckpointManifest:
    part = ComponentManifest(
        "model", files=["model.safetensors"], size_bytes=16, checksum="c" * 32, tensors=1
    )
    values = {
        "checkpoint_id": "id",
        "step": 5,
        "run_id": "run",
        "attempt_id": "a",
        "sequence": 1,
        "created": "now",
        "components": {"model": part},
        "files": {"model.safetensors": FileRecord(16, "d" * 32, 0)},
        "metrics": {"loss": 0.5},
        "metadata": {"note": "é"},
    }
    return CheckpointManifest(**{**values, **changes})


def test_every_flipped_bit_is_found() -> None:
    data = plain().encode()
    for at in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(CheckpointCorrupt):
            CheckpointManifest.decode(bytes(damaged))


def test_every_cut_is_found() -> None:
    data = plain().encode()
    for at in range(len(data)):
        with pytest.raises(CheckpointCorrupt):
            CheckpointManifest.decode(data[:at])
    for more in (b"\n", b" ", b"\0", data):
        with pytest.raises(CheckpointCorrupt):
            CheckpointManifest.decode(data + more)


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        CheckpointManifest.decode(data)
    with pytest.raises(CheckpointError):
        CheckpointManifest.decode(signed(data))


def signed(body: bytes) -> bytes:
    return body + b',\n "digest": "%s"\n}\n' % content_digest(body).encode()


def resigned(change) -> bytes:
    document = json.loads(plain().encode())
    del document["digest"]
    change(document)
    return signed(json.dumps(document, indent=1, sort_keys=True).removesuffix("\n}").encode())


@given(st.sampled_from(sorted(json.loads(plain().encode()))), json_values)
@settings(max_examples=300)
def test_any_value_in_any_field(field: str, value) -> None:
    if field == "digest":
        return
    try:
        found = CheckpointManifest.decode(
            resigned(lambda document: document.update({field: value}))
        )
    except CheckpointError:
        return
    # JSON has one kind of number: what was accepted is what was there.
    assert json.loads(found.encode())[field] == value


@given(st.sampled_from(sorted(json.loads(plain().encode())["components"]["model"])), json_values)
def test_any_value_in_any_field_of_a_component(field: str, value) -> None:
    try:
        found = CheckpointManifest.decode(
            resigned(lambda document: document["components"]["model"].update({field: value}))
        )
    except CheckpointError:
        return
    assert json.loads(found.encode())["components"]["model"][field] == value


@pytest.mark.parametrize("field", sorted(json.loads(plain().encode())))
def test_missing_fields_are_refused(field: str) -> None:
    if field == "digest":
        body = plain().encode().rpartition(b',\n "digest"')[0] + b"\n}\n"
        with pytest.raises(CheckpointCorrupt, match="not a complete manifest"):
            CheckpointManifest.decode(body)
        return
    with pytest.raises(CheckpointCorrupt):
        CheckpointManifest.decode(resigned(lambda document: document.pop(field)))


UNSAFE = [
    "../a",
    "a/b",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a\\b",
    "C:a",
    "s3://b/a",
    "a\0",
    "a\nb",
    "checkpoint_manifest.json",
    "a" * 256,
    5,
    None,
    True,
]


@pytest.mark.parametrize("name", UNSAFE, ids=repr)
def test_unsafe_file_names(name) -> None:
    with pytest.raises(UnsafePath) as caught:
        check_file_name(name)
    assert caught.value.file == "checkpoint_manifest.json"


@pytest.mark.parametrize("name", [name for name in UNSAFE if isinstance(name, str)], ids=repr)
def test_unsafe_file_names_in_a_manifest(name: str) -> None:
    with pytest.raises(UnsafePath):
        CheckpointManifest.decode(
            resigned(lambda document: document["files"].update({name: [1, "d" * 32, 0]}))
        )
    with pytest.raises(UnsafePath):
        CheckpointManifest.decode(
            resigned(lambda document: document["components"]["model"].update(files=[name]))
        )


@pytest.mark.parametrize("name", ["model.safetensors", "a b", "..a", "a..", "ü", "%2Fa", "-"])
def test_plain_file_names(name: str) -> None:
    assert check_file_name(name) == name


@pytest.mark.parametrize(
    "text",
    [
        b'{"format": "ckptcore", "step": 1, "step": 2',
        b'{"a": {"b": 1, "b": 1}',
        b'{"step": NaN',
        b'{"step": Infinity',
        b"[1",
        b'"text',
        b"{",
        b"",
        b'{"step": \xff',
        b"[" * 100_000,
        b'{"a": 1e5000, "b": ' + b"9" * 9999,
    ],
    ids=range(11),
)
def test_text_that_is_not_strict_json(text: bytes) -> None:
    with pytest.raises(CheckpointCorrupt):
        CheckpointManifest.decode(signed(text))


def test_repeated_names_and_constants_in_an_otherwise_good_manifest() -> None:
    body = plain().encode().rpartition(b',\n "digest"')[0]
    assert CheckpointManifest.decode(signed(body)).step == 5
    for old, new in [
        (b'"step": 5', b'"step": 5,\n "step": 6'),
        (b'"loss": 0.5', b'"loss": 0.5, "loss": 0.6'),
        (b'"note": "\xc3\xa9"', b'"note": NaN'),
        (b'"loss": 0.5', b'"loss": Infinity'),
    ]:
        changed = body.replace(old, new)
        assert changed != body
        with pytest.raises(CheckpointCorrupt, match=r"twice|not JSON"):
            CheckpointManifest.decode(signed(changed))


def test_newer_major_version_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedVersion, match=r"2\.0.*newer ckptcore") as caught:
        CheckpointManifest.decode(
            resigned(lambda document: document.update(format_version="2.0")), "runs/a/checkpoint-5"
        )
    error = caught.value
    assert (error.found, error.supported, error.path) == ("2.0", "1.0", "runs/a/checkpoint-5")


def test_newer_major_version_of_any_shape_is_refused_by_name() -> None:
    def change(document) -> None:
        document.clear()
        document.update(format="ckptcore", format_version="3.1", anything=[1])

    with pytest.raises(UnsupportedVersion):
        CheckpointManifest.decode(resigned(change))


def test_fields_of_a_newer_minor_version_are_kept() -> None:
    def change(document) -> None:
        document.update(format_version="1.7", shiny={"a": [1, None]})

    found = CheckpointManifest.decode(resigned(change))
    assert found.extra == {"shiny": {"a": [1, None]}}
    again = json.loads(found.encode())
    assert again["shiny"] == {"a": [1, None]}
    assert again["format_version"] == "1.7"


def test_fields_of_a_newer_minor_version_in_components_are_kept() -> None:
    def change(document) -> None:
        document["format_version"] = "1.7"
        document["components"]["model"]["shiny"] = 3

    found = CheckpointManifest.decode(resigned(change))
    assert json.loads(found.encode())["components"]["model"]["shiny"] == 3


def test_metrics_that_json_lacks() -> None:
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": -0.0}
    found = CheckpointManifest.decode(plain(metrics=metrics).encode()).metrics
    assert math.isnan(found["a"])
    assert (found["b"], found["c"], math.copysign(1, found["d"])) == (math.inf, -math.inf, -1)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"a", math.nan, "\ud800", {(1, 2): 3}],
    ids=["object", "set", "bytes", "nan", "surrogate", "tuple key"],
)
def test_metadata_that_json_lacks(value) -> None:
    with pytest.raises(InvalidState, match="JSON"):
        plain(metadata={"m": value}).encode()


def test_component_files_are_listed() -> None:
    with pytest.raises(CheckpointCorrupt, match=r"other\.safetensors"):
        CheckpointManifest.decode(
            resigned(
                lambda document: document["components"]["model"].update(files=["other.safetensors"])
            )
        )


def test_size_is_that_of_all_files() -> None:
    files = {"a": FileRecord(10, "d" * 32, 0), "b": FileRecord(5, "d" * 32, 1)}
    assert plain(files=files, components={}).size_bytes == 15
