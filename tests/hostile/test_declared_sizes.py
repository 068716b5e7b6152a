"""Small files that declare large things: the error comes before the memory is asked for. All
digests are right."""

from __future__ import annotations

import msgpack
import pytest

from ckptcore.format.digest import content_hash
from ckptcore.format.manifest import SIZE_LIMIT

FILE = "plain.safetensors"


def entry(raw, name="a"):
    return next(row for row in raw["components"]["plain"]["tensors"] if row[1] == name)


def test_an_untouched_checkpoint_is_read_in_little_memory(crafted, bounded):
    crafted.index(lambda raw: None)
    assert set(bounded(crafted).values()) == {""}


def header_of_exabytes(raw):
    raw["files"] = {**raw["files"], "x.safetensors": [100, 2**61, b"h" * 16]}


def header_longer_than_the_file(raw):
    raw["files"][FILE][1] = 2**40
    raw["components"]["plain"]["tensors"] = []


def tensor_of_a_terabyte(raw):
    """The file is said to be as large as the tensor; on the disk it is not."""
    row = entry(raw)
    row[3] = [2**38]
    row[7] = b"d" * (8 * 2**40 // (4 << 20))
    raw["files"][FILE][0] = row[6] + 2**40


def tensors_on_the_same_bytes(raw):
    """Each is inside its file, and all together would be a hundred times as large as the file."""
    file = raw["files"][FILE]
    size = 4 << 20
    file[0] = file[1] + size
    rows = raw["components"]["plain"]["tensors"]
    rows[:] = [[n, f"t{n}", "U8", [size], FILE, None, file[1], b"d" * 8, None] for n in range(500)]


def sharded_tensor_of_an_exabyte(raw):
    table = raw["components"]["cut"]["layouts"]["tensors"]
    table.append(["v", "F32", [2**58], None, 0])


def sharded_tensor_without_items(raw):
    table = raw["components"]["cut"]["layouts"]["tensors"]
    table.append(["v", "F32", [2**61, 2**61, 0], None, 0])


def tensor_without_items(raw):
    start = raw["files"][FILE][1]
    row = [2, "c", "F32", [2**61, 2**61, 0], FILE, None, start, b"", None]
    raw["components"]["plain"]["tensors"].append(row)


def tensor_of_many_dimensions(raw):
    entry(raw)[3] = [1] * 5000 + [4]


def sharded_tensor_of_many_dimensions(raw):
    raw["components"]["cut"]["layouts"]["tensors"][0][2] = [1] * 5000 + [6]


def sizes_whose_product_is_vast(raw):
    raw["components"]["cut"]["layouts"]["tensors"].append(["v", "F32", [2**61] * 10_000, None, 0])


def mesh_of_many_dimensions(raw):
    layouts = raw["components"]["cut"]["layouts"]
    layouts["meshes"] = [[[1] * 5000, [0]]]
    layouts["tensors"][0][4] = [0, " ".join(["S0"] * 5000), 0]


INDEXES = [
    header_of_exabytes,
    header_longer_than_the_file,
    tensor_of_a_terabyte,
    tensors_on_the_same_bytes,
    sharded_tensor_of_an_exabyte,
    sharded_tensor_without_items,
    tensor_without_items,
    tensor_of_many_dimensions,
    sharded_tensor_of_many_dimensions,
    sizes_whose_product_is_vast,
    mesh_of_many_dimensions,
]


@pytest.mark.parametrize("change", INDEXES, ids=lambda f: f.__name__)
def test_indexes(crafted, bounded, change):
    crafted.index(change)
    found = bounded(crafted)
    assert found["load"] in ("CheckpointCorrupt", "StateMismatch") or change is header_of_exabytes
    assert found["verify"] == ""


def many_boxes(raw):
    """Each writer has one item of a row: as many boxes as ranks, and none of them overlap."""
    boxes = [[n, [n], [1]] for n in range(4_000)]
    raw["components"]["cut"]["layouts"]["tensors"][0][2:] = [[4_000], None, {"boxes": boxes}]


def test_many_boxes_take_no_quadratic_time(crafted, bounded):
    crafted.manifest(lambda d: d.update(world_size=4_000))
    crafted.index(many_boxes)
    assert bounded(crafted)["load"] in ("CheckpointCorrupt", "StateMismatch")


def vast_world(document):
    document["world_size"] = 1 << 22
    document["components"]["plain"]["pattern"] = "PER_RANK"


def vast_sizes(document):
    document["files"][FILE][0] = 10**4000
    document["components"]["plain"]["size_bytes"] = 10**4000


def a_group_of_nobody(document):
    document["components"]["plain"].update(pattern="PER_GROUP", group="g", partition=[[]])


def a_node_of_nobody(document):
    document["nodes"] = [[]]
    document["components"]["plain"]["pattern"] = "PER_NODE"


def no_nodes(document):
    document["nodes"] = []
    document["components"]["plain"]["pattern"] = "PER_NODE"


def ranks_beyond_the_world(document):
    document["components"]["plain"].update(
        pattern="PER_GROUP", group="g", partition=[[10**4000]], writers=[10**4000]
    )


def writers_without_end(document):
    document["components"]["plain"]["writers"] = [10**4000, 2**63, 2**31]


def a_name_that_no_file_can_have(document):
    document["files"]["\ud800.safetensors"] = [1, "0" * 32, 0]


def a_name_of_too_many_bytes(document):
    document["files"]["\U0001f980" * 255] = [1, "0" * 32, 0]


def a_step_of_thousands_of_digits(document):
    document["step"] = document["sequence"] = 10**4000


def long_texts(document):
    document["step"] = "x" * MANY


def long_names(document):
    document["files"]["a/" * (MANY // 2)] = [1, "0" * 32, 0]


def long_lists(document):
    document["components"]["plain"]["files"] = [f"{n}.safetensors" for n in range(MANY // 10)]


MANY = 2_000_000
MANIFESTS = [
    vast_world,
    vast_sizes,
    a_group_of_nobody,
    a_node_of_nobody,
    no_nodes,
    ranks_beyond_the_world,
    writers_without_end,
    a_name_that_no_file_can_have,
    a_name_of_too_many_bytes,
    a_step_of_thousands_of_digits,
    long_texts,
    long_names,
    long_lists,
]


@pytest.mark.parametrize("change", MANIFESTS, ids=lambda f: f.__name__)
def test_manifests(crafted, bounded, change):
    crafted.manifest(change)
    bounded(crafted)


@pytest.mark.parametrize("file", ["index.rank00000.msgpack", "checkpoint_manifest.json"])
def test_files_of_holes(crafted, bounded, file):
    """Files whose size costs nothing on the disk: more zeros than such a file may have bytes."""
    size = SIZE_LIMIT + 1
    with (crafted.folder / file).open("wb") as hole:
        hole.truncate(size)
    if file.startswith("index"):
        crafted.manifest(lambda d: d["files"].update({file: [size, "0" * 32, 0]}))
    assert bounded(crafted)["load"] in ("CheckpointCorrupt", "StorageError")


def lists_of_declared_length(depth: int, length: int) -> bytes:
    """Nested arrays, each of which says that it has as many items as there are bytes."""
    return (b"\xdd" + length.to_bytes(4, "big")) * depth + b"\x00" * length


def test_nested_lists_of_declared_length_in_an_index(crafted, bounded):
    crafted.index_bytes(lists_of_declared_length(1000, 400_000))
    assert bounded(crafted, resident=128 << 20)["load"] == "CheckpointCorrupt"


def test_nested_lists_of_declared_length_in_values(crafted, bounded):
    tree = lists_of_declared_length(1000, 400_000)
    crafted.index(lambda raw: raw["components"]["plain"].update(tree=tree))
    found = bounded(crafted, resident=128 << 20)
    assert found["load"] == found["values"] == "CheckpointCorrupt"


def test_a_header_whose_digest_is_right_is_not_believed_either(crafted, bounded):
    """Header bytes are hashed, not read: whatever they say, the places are those of the index."""
    file = crafted.folder / FILE
    data = bytearray(file.read_bytes())
    data[:8] = (2**62).to_bytes(8, "little")
    file.write_bytes(data)

    def change(raw):
        raw["files"][FILE][2] = content_hash(bytes(data[: raw["files"][FILE][1]]))

    crafted.index(change)
    assert set(bounded(crafted).values()) <= {"", "CheckpointCorrupt"}
    assert msgpack.unpackb((crafted.folder / "index.rank00000.msgpack").read_bytes())["files"][
        FILE
    ][0] == len(data)
