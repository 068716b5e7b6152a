"""A stranger's reader and writer, made from docs/format.md alone: the document says enough, and
says what is so.

The first half imports nothing of ckptcore. Section numbers are those of the document.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash

MANIFEST = "checkpoint_manifest.json"
CHUNK = 4 * 1024 * 1024
NATIVE = {
    1: "BOOL U8 I8 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ",
    2: "U16 I16 F16 BF16",
    4: "U32 I32 F32",
    8: "U64 I64 F64 C64",
}
AS_BYTES = {
    "bits16": 2,
    "complex32": 4,
    "complex128": 16,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bits8": 1,
}
ITEM = {name: size for size, names in NATIVE.items() for name in names.split()} | AS_BYTES
PLAIN_NAME = re.compile(r"[^/\\:\x00-\x1f\x7f]{1,255}")
KINDS = {7: "time", 8: "path", 9: "numpy scalar", 11: "registered"}


class Refused(Exception):
    """The checkpoint is damaged, or not one."""


def check(fine: Any, what: str) -> None:
    if not fine:
        raise Refused(what)


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Tagged:
    """A value of a type that the reader leaves to others."""

    kind: str
    payload: Any


def box_of(
    layout: Any, meshes: list[Any], shape: list[int], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Section 9: offset and shape of the box that a rank of the mesh holds."""
    mesh, ranks = meshes[layout[0]]
    place, placements = np.unravel_index(ranks.index(rank), mesh), layout[1].split()
    box = []
    for dim, n in enumerate(shape):
        start = 0
        cuts = [m for m, p in enumerate(placements) if p == f"S{dim}"]
        for m in cuts + [m for m, p in reversed(list(enumerate(placements))) if p == f"s{dim}"]:
            c = -(-n // mesh[m])
            low = min(int(place[m]) * c, n)
            start, n = start + low, min(c, n - low)
        box.append((start, n))
    return tuple(start for start, _ in box), tuple(n for _, n in box)


def writers_of(layout: Any, meshes: list[Any], shape: list[int]) -> Iterator[tuple[int, Any]]:
    """Section 9: every rank that has a piece, and its box."""
    if isinstance(layout, int):
        yield layout, ((0,) * len(shape), tuple(shape))
    elif isinstance(layout, dict):
        yield from (
            (writer, (tuple(offset), tuple(size))) for writer, offset, size in layout["boxes"]
        )
    else:
        mesh, ranks = meshes[layout[0]]
        for rank, place in zip(ranks, product(*map(range, mesh)), strict=True):
            replica = 0
            for size, at, placement in zip(mesh, place, layout[1].split(), strict=True):
                replica = replica * size + at if placement == "R" else replica
            box = box_of(layout, meshes, shape, rank)
            if replica == layout[2] and math.prod(box[1]):
                yield rank, box


class Reader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = self.read_manifest((folder / MANIFEST).read_bytes())
        self.indexes: dict[int, Any] = {}

    def read_manifest(self, data: bytes) -> Any:
        """Section 3."""
        body, ending = data[:-50], data[-50:]
        found = re.fullmatch(rb',\n "digest": "([0-9a-f]{32})"\n}\n', ending)
        check(
            found and found[1].decode() == xxhash.xxh3_128_hexdigest(body), "the manifest's digest"
        )
        manifest = json.loads(body + b"\n}")
        check(manifest["format"] == "ckptcore", "the manifest's format")
        version = manifest["format_version"]
        check(int(version.split(".")[0]) <= 1, f"format version {version} is newer than 1")
        for name in [
            *manifest["files"],
            *(n for c in manifest["components"].values() for n in c["files"]),
        ]:
            check(
                PLAIN_NAME.fullmatch(name) and name not in (".", "..", MANIFEST),
                f"the name {name!r}",
            )
        return manifest

    def copies(self, key: str) -> list[tuple[str, list[int]]]:
        """Section 4: labels and members."""
        component, world = self.manifest["components"][key], range(self.manifest["world_size"])
        if component["pattern"] == "PER_RANK":
            return [(f".rank{rank:05d}", [rank]) for rank in world]
        if component["pattern"] == "PER_NODE":
            return [
                (f".node{number:05d}", ranks) for number, ranks in enumerate(self.manifest["nodes"])
            ]
        if component["pattern"] == "PER_GROUP":
            names = component["group_keys"] or [
                f"{n:05d}" for n in range(len(component["partition"]))
            ]
            return [
                (f".{component['group']}-{n}", p)
                for n, p in zip(names, component["partition"], strict=True)
            ]
        return [("", list(world))]

    def index(self, writer: int) -> Any:
        """Sections 6 and 8: an index, checked down to the digests of its tensor files."""
        if writer not in self.indexes:
            name = f"index.rank{writer:05d}.msgpack"
            data = (self.folder / name).read_bytes()
            check(
                [len(data), xxhash.xxh3_128_hexdigest(data), writer]
                == self.manifest["files"][name],
                f"digest {name}",
            )
            index = msgpack.unpackb(data, unicode_errors="surrogatepass")
            check(
                (index["format"], index["version"], index["writer"])
                == ("ckptcore.index", 1, writer),
                name,
            )
            parts: dict[str, list[tuple[int, bytes]]] = {file: [] for file in index["files"]}
            for component in index["components"].values():
                for row in component.get("tensors", []):
                    if row[8] is None:
                        parts[row[4]].append((row[6], row[7]))
                for _, file, start, digests in component.get("pieces", []):
                    parts[file].append((start, digests))
            for file, (size, header_size, digest) in index["files"].items():
                together = b"".join([digest, *(digests for _, digests in sorted(parts[file]))])
                check(
                    [size, xxhash.xxh3_128_hexdigest(together), writer]
                    == self.manifest["files"][file],
                    f"digest {file}",
                )
                content = (self.folder / file).read_bytes()
                check(len(content) == size, f"size of {file}")
                check(xxhash.xxh3_128_digest(content[:header_size]) == digest, f"header of {file}")
                self.check_tensor_file(content, header_size)
            self.indexes[writer] = index
        return self.indexes[writer]

    def check_tensor_file(self, content: bytes, header_size: int) -> None:
        """Section 5: what the tables say of every tensor file."""
        check(
            header_size % 4096 == 0 and header_size == 8 + int.from_bytes(content[:8], "little"),
            "padding",
        )
        header = json.loads(content[8:header_size])
        check(next(iter(header.items())) == ("__metadata__", {"format": "pt"}), "metadata")
        del header["__metadata__"]
        check(list(header) == sorted(header, key=lambda n: (-ITEM[header[n]["dtype"]], n)), "order")
        at = 0
        for entry in header.values():
            size = ITEM[entry["dtype"]]
            check(
                entry["data_offsets"] == [at, at + size * math.prod(entry["shape"])]
                and at % size == 0,
                "place",
            )
            at = entry["data_offsets"][1]
        check(header_size + at == len(content), "end")

    def bytes_of(self, file: str, start: int, digests: bytes, size: int) -> bytes:
        """Section 8: the bytes of one tensor or box, every chunk checked."""
        data = (self.folder / file).read_bytes()[start : start + size]
        chunks = [data[at : at + CHUNK] for at in range(0, size, CHUNK)]
        check(
            len(data) == size and b"".join(map(xxhash.xxh3_64_digest, chunks)) == digests,
            f"a chunk of {file}",
        )
        return data

    def component(self, key: str, copy: int = 0) -> Any:
        """Sections 4, 6 and 7: the state of one copy."""
        component, members = self.manifest["components"][key], self.copies(key)[copy][1]
        if component["pattern"] == "SHARDED":
            first = self.index(0)["components"][key]
            tensors = self.sharded(key, first["layouts"])
            return self.value(first["tree"], tensors)
        parts = {w: self.index(w)["components"][key] for w in component["writers"] if w in members}
        rows = {row[0]: row for part in parts.values() for row in part["tensors"]}
        check(
            sorted(rows) == list(range(sum(len(p["tensors"]) for p in parts.values()))),
            "numbers of tensors",
        )
        tensors = []
        for number in range(len(rows)):
            _, _, dtype, shape, _, _, _, _, alias = rows[number]
            file, _, start, digests, _ = rows[number if alias is None else alias][4:]
            data = self.bytes_of(file, start, digests, ITEM[dtype] * math.prod(shape))
            tensors.append(Tensor(dtype, tuple(shape), data))
        return self.value(parts[min(members)]["tree"], tensors)

    def sharded(self, key: str, table: Any) -> list[Tensor]:
        found: list[Tensor] = []
        pieces = {
            (w, piece[0]): piece[1:]
            for w in self.manifest["components"][key]["writers"]
            for piece in self.index(w)["components"][key]["pieces"]
        }
        for number, (_, dtype, shape, alias, layout) in enumerate(table["tensors"]):
            if alias is not None:
                number, layout = alias, table["tensors"][alias][4]
            whole = np.zeros(shape, f"V{ITEM[dtype]}")
            for writer, (offset, size) in writers_of(layout, table["meshes"], shape):
                data = self.bytes_of(*pieces[writer, number], ITEM[dtype] * math.prod(size))
                place = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
                whole[place] = (
                    np.frombuffer(data, whole.dtype).reshape(size) if data else whole[place]
                )
            found.append(Tensor(dtype, tuple(shape), whole.tobytes()))
        told = {
            (w, n)
            for n, row in enumerate(table["tensors"])
            if row[3] is None
            for w, _ in writers_of(row[4], table["meshes"], row[2])
        }
        check(told == set(pieces), "pieces that the table does not tell, or lacks")
        return found

    def value(self, data: bytes, tensors: list[Tensor]) -> Any:
        """Section 7."""

        def extension(code: int, payload: bytes) -> Any:
            if code == 1:
                return int.from_bytes(payload, "big", signed=True)
            if code == 6:
                return complex(*struct.unpack(">dd", payload))
            inner = self.value(payload, tensors)
            if code in (2, 3):
                return tuple(inner) if code == 2 else {key: item for key, item in inner}  # noqa: C416
            if code in (4, 5):
                check(inner == sorted(inner), "order of a set")
                items = [self.value(item, tensors) for item in inner]
                return set(items) if code == 4 else frozenset(items)
            if code == 10:
                return np.frombuffer(inner[2], inner[0]).reshape(inner[1])
            if code == 12:
                return Tagged("numpy", tensors[inner[0]]) if inner[1] else tensors[inner[0]]
            check(code in KINDS, f"extension {code}")
            return Tagged(KINDS[code], inner)

        return msgpack.unpackb(
            data, ext_hook=extension, strict_map_key=False, unicode_errors="surrogatepass"
        )

    def check_checksums(self) -> None:
        """Section 8: the checksums of components, and the digests of files that no index
        describes."""
        for key, component in self.manifest["components"].items():
            lowest = [min(members) for _, members in self.copies(key)]
            if component["pattern"] == "SHARDED":
                lowest = list(range(self.manifest["world_size"]))
            trees = [
                self.index(w)["components"].get(key, {}).get("tree")
                if w in component["writers"]
                else None
                for w in lowest
            ]
            parts = [xxhash.xxh3_128_digest(tree or b"") for tree in trees]
            parts += [bytes.fromhex(self.manifest["files"][name][1]) for name in component["files"]]
            check(
                xxhash.xxh3_128_hexdigest(b"".join(parts)) == component["checksum"],
                f"checksum of {key}",
            )
        for name, (size, digest, _) in self.manifest["files"].items():
            if name.endswith(".json"):
                data = (self.folder / name).read_bytes()
                check(
                    (len(data), xxhash.xxh3_128_hexdigest(data)) == (size, digest), f"digest {name}"
                )


def ended(document: dict[str, Any]) -> bytes:
    """Section 3: a manifest file."""
    body = json.dumps(document, indent=1, sort_keys=True).removesuffix("\n}").encode()
    return body + b',\n "digest": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()


def write_checkpoint(
    folder: Path, tree: bytes, tensors: list[tuple[str, str, list[int], bytes]]
) -> None:
    """A checkpoint of one component, "model", by one process; no two bytes decided by ckptcore."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, dtype, shape, raw in sorted(tensors, key=lambda t: (-ITEM[t[1]], t[0])):
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    head = len(text).to_bytes(8, "little") + text
    digest = xxhash.xxh3_128_digest(head)
    rows, digests = [], {}
    for number, (name, dtype, shape, raw) in enumerate(tensors):
        chunks = b"".join(
            xxhash.xxh3_64_digest(raw[at : at + CHUNK]) for at in range(0, len(raw), CHUNK)
        )
        start = len(head) + header[name]["data_offsets"][0]
        rows.append([number, name, dtype, shape, "m.safetensors", None, start, chunks, None])
        digests[start] = chunks
    together = xxhash.xxh3_128_hexdigest(
        digest + b"".join(digests[start] for start in sorted(digests))
    )
    size = len(head) + len(data)
    index = msgpack.packb(
        {
            "format": "ckptcore.index",
            "version": 1,
            "writer": 0,
            "files": {"m.safetensors": [size, len(head), digest]},
            "components": {"model": {"tree": tree, "tensors": rows}},
        }
    )
    component = {
        "pattern": "GLOBAL",
        "writers": [0],
        "group": None,
        "partition": None,
        "group_keys": None,
        "files": ["m.safetensors"],
        "size_bytes": len(data),
        "tensors": len(rows),
        "required": True,
        "metadata": {},
        "checksum": xxhash.xxh3_128_hexdigest(
            xxhash.xxh3_128_digest(tree) + bytes.fromhex(together)
        ),
        "of tomorrow": 1,
    }
    manifest = {
        "format": "ckptcore",
        "format_version": "1.7",
        "checkpoint_id": "1",
        "step": 7,
        "run_id": "r",
        "attempt_id": "a",
        "sequence": 1,
        "created": "2026-01-31T12:00:00.000Z",
        "world_size": 1,
        "nodes": [[0]],
        "groups": {},
        "components": {"model": component},
        "metrics": {"loss": "nan"},
        "metrics_step": 7,
        "training_args_hash": None,
        "files": {
            "m.safetensors": [size, together, 0],
            "index.rank00000.msgpack": [len(index), xxhash.xxh3_128_hexdigest(index), 0],
        },
        "versions": {},
        "environment": {},
        "timings": {},
        "metadata": {"note": "é"},
        "of tomorrow": [1],
    }
    folder.mkdir(parents=True)
    (folder / "m.safetensors").write_bytes(head + data)
    (folder / "index.rank00000.msgpack").write_bytes(index)
    (folder / MANIFEST).write_bytes(ended(manifest))


# From here on ckptcore is asked.

import datetime as dt  # noqa: E402
import pathlib  # noqa: E402
from collections import OrderedDict, deque  # noqa: E402
from decimal import Decimal  # noqa: E402
from uuid import UUID  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate  # noqa: E402
from torch.distributed.tensor import Shard as Cut  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

from ckptcore import (  # noqa: E402
    CheckpointManager,
    OptimizerState,
    Shard,
    SharingPattern,
    StateComponent,
    UnsupportedVersion,
    open_checkpoint,
)
from ckptcore.testing.ranks import run_ranks  # noqa: E402

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.bool: "BOOL",
    torch.complex128: "complex128",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint16: "U16",
}


@pytest.fixture
def stored(bits: Callable[[torch.Tensor], bytes]) -> Callable[[Any], Any]:
    """A state as the reader shows it: tensors by their bytes."""

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Tensor(NAMES[value.dtype], tuple(value.shape), bits(value))
        if isinstance(value, dict):
            return {key: of(item) for key, item in value.items()}
        return type(value)(map(of, value)) if isinstance(value, list | tuple) else value

    return of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(9, 5), nn.Linear(5, 9, bias=False)
        self.head.weight = self.emb.weight
        self.norm = nn.LayerNorm(5, dtype=torch.bfloat16)
        self.register_buffer(
            "large", torch.arange(1_300_000, dtype=torch.float32)
        )  # more than one chunk
        self.register_buffer("none", torch.zeros(0, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.emb(tokens).bfloat16()).float()).pow(2).mean()


VALUES = {
    "int": [0, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**40],
    "text": "é\ud800",
    "tuple": (1, ("x", b"y"), []),
    "keys": {0: "a", "0": "b", (1, 2): None, True: 1.5},
    "sets": [{1, 2, "x"}, frozenset({b"z"}), set()],
    "complex": complex(1, -0.0),
    "array": np.arange(6, dtype=">i2").reshape(2, 3),
}
TAGGED = {
    "when": (
        dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC),
        Tagged("time", ["datetime", "2026-01-31T12:00:00", 0, ["timezone", 0, 0, 0, "UTC"]]),
    ),
    "day": (dt.date(2026, 1, 31), Tagged("time", ["date", "2026-01-31"])),
    "span": (dt.timedelta(1, 2, 3), Tagged("time", ["timedelta", 1, 2, 3])),
    "path": (pathlib.PurePosixPath("a/b"), Tagged("path", ["PurePosixPath", "a/b"])),
    "scalar": (np.float32(1.5), Tagged("numpy scalar", ["<f4", b"\0\0\xc0\x3f"])),
    "ordered": (OrderedDict(b=1, a=2), Tagged("registered", ["OrderedDict", {"b": 1, "a": 2}])),
    "deque": (deque([1], 4), Tagged("registered", ["deque", [[1], 4]])),
    "decimal": (Decimal("1.50"), Tagged("registered", ["Decimal", "1.50"])),
    "uuid": (UUID(int=3), Tagged("registered", ["UUID", UUID(int=3).bytes])),
    "range": (range(1, 9, 2), Tagged("registered", ["range", [1, 9, 2]])),
    "size": (torch.Size([2, 3]), Tagged("registered", ["torch.Size", [2, 3]])),
    "dtype": (torch.bfloat16, Tagged("registered", ["torch.dtype", "bfloat16"])),
}


@pytest.fixture
def single(tmp_path: Path) -> tuple[Path, Any, Any, Any]:
    """Folder, model, optimizer and nested state of a checkpoint of one process."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(9)).backward()
    optimizer.step()
    nested = {
        "a/b~c": {0: torch.tensor([True, False]), "0": torch.tensor(2.5, dtype=torch.float64)},
        "list": [
            torch.zeros(3, dtype=torch.complex128),
            (torch.ones(2, 2).to(torch.float8_e4m3fn),),
        ],
        "big array": np.arange(1000, dtype=np.float64),
    }
    state = {"model": model, "optimizer": optimizer, "nested": nested, "values": VALUES}
    state["tagged"] = {name: value for name, (value, _) in TAGGED.items()}
    with CheckpointManager(tmp_path, run_id="r") as manager:
        manager.save(3, state, metrics={"loss": math.inf})
    return tmp_path / "checkpoint-3", model, optimizer, nested


def test_a_stranger_reads_a_checkpoint_of_one_process(single, stored, same) -> None:
    folder, model, optimizer, nested = single
    reader = Reader(folder)
    reader.check_checksums()
    found = reader.component("model")
    assert found == stored(dict(model.state_dict()))
    assert reader.component("optimizer") == stored(OptimizerState(optimizer, model).state_dict())
    rows = {row[1]: row for row in reader.index(0)["components"]["model"]["tensors"]}
    assert (
        rows["head.weight"][8] == rows["emb.weight"][0]
        or rows["emb.weight"][8] == rows["head.weight"][0]
    )
    assert list(rows) == sorted(rows) and len(rows["large"][7]) == 16
    array = nested.pop("big array")
    found = reader.component("nested")
    assert found.pop("big array") == Tagged("numpy", Tensor("F64", (1000,), array.tobytes()))
    assert found == stored(nested)
    names = [row[1] for row in reader.index(0)["components"]["nested"]["tensors"]]
    assert names == ["a~1b~0c/0", "a~1b~0c/0~2int", "big array", "list/0", "list/1/0"]
    found = reader.component("values")
    assert str(found["complex"]) == str(VALUES["complex"])
    same({**found, "sets": None}, {**VALUES, "sets": None})
    assert found["sets"] == VALUES["sets"]
    assert reader.component("tagged") == {name: tagged for name, (_, tagged) in TAGGED.items()}
    assert reader.manifest["metrics"] == {"loss": "inf"}


def test_a_stranger_finds_every_damaged_file(single) -> None:
    folder = single[0]
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(Refused):
                reader = Reader(folder)
                for key in reader.manifest["components"]:
                    reader.component(key)
        path.write_bytes(whole)


FULL = {
    "column": torch.arange(30.0).reshape(10, 3),
    "row": torch.arange(30.0).reshape(3, 10).to(torch.bfloat16),
    "hsdp": torch.arange(5),
    "twice": torch.arange(26).to(torch.uint16).reshape(13, 2),
    "complex": torch.arange(7).to(torch.complex128),
    "boxes": torch.arange(24, dtype=torch.int8).reshape(4, 6),
    "rows/1": torch.arange(5.0),
    "plain": torch.arange(4.0),
    "tied": torch.arange(4.0),
    "empty": torch.zeros(0, 2),
    "stage": torch.arange(3.0) + 0.5,
}
CUTS = {"column": "s0 S0", "row": "S0 S1", "hsdp": "R S0", "twice": "S0 S0", "complex": "S0 R"}
BOXES = [
    ((0, 0), (1, 6)),
    ((1, 0), (3, 2)),
    ((1, 2), (3, 3)),
    ((1, 5), (3, 1)),
]  # one for each rank
GROUPS = [[0, 2], [1, 3]]
SPLIT = {name: torch.full((3,), float(number)) for number, name in enumerate("abcdef")}


def dtensor(full: torch.Tensor, placements: str, rank: int) -> DTensor:
    """A DTensor as rank `rank` of a 2 x 2 mesh holds it; no process group is needed."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False, _rank=rank)
    offset, size = box_of([0, placements], [[[2, 2], [0, 1, 2, 3]]], list(full.shape), rank)
    local = full[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].clone()
    kinds = {
        "R": lambda _: Replicate(),
        "S": lambda d: Cut(int(d)),
        "s": lambda d: _StridedShard(int(d), split_factor=2),
    }
    cuts = [kinds[p[0]](p[1:]) for p in placements.split()]
    return DTensor.from_local(
        local, mesh, cuts, run_check=False, shape=full.shape, stride=full.stride()
    )


@pytest.fixture
def sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of four ranks with every sharing pattern; replicated state is split over the
    ranks."""
    monkeypatch.setattr("ckptcore.saving.plan.MIN_SHARE_BYTES", 1)

    def program(comm: Any) -> None:
        rank = comm.rank
        state: dict[str, Any] = {name: dtensor(FULL[name], cut, rank) for name, cut in CUTS.items()}
        offset, size = BOXES[rank]
        part = FULL["boxes"][
            tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        ].clone()
        state["boxes"] = Shard(part, (4, 6), offset)
        state["rows/1"] = Shard(FULL["rows/1"][rank : rank + 1 + rank // 3].clone(), (5,), (rank,))
        state["plain"] = state["tied"] = FULL["plain"].clone()
        state["empty"] = FULL["empty"].clone()
        state["values"] = {"steps": (1, 2)}
        if rank == 2:
            state["stage"] = FULL["stage"].clone()
        components = [
            StateComponent("model", state, SharingPattern.SHARDED),
            StateComponent(
                "own", {"rank": rank, "t": torch.full((2,), float(rank))}, SharingPattern.PER_RANK
            ),
            StateComponent(
                "loader",
                {"group": rank % 2, "t": torch.full((2,), float(rank % 2))},
                SharingPattern.PER_GROUP,
                process_group_name="dp",
                group_key=["even", "odd"][rank % 2],
            ),
            StateComponent("cache", {"node": torch.tensor(rank)}, SharingPattern.PER_NODE),
            StateComponent("args", {"lr": 0.1}, SharingPattern.REPLICATED),
            StateComponent("split", SPLIT, SharingPattern.REPLICATED),
        ]
        with CheckpointManager(
            tmp_path, comm=comm, run_id="r", process_groups={"dp": GROUPS}
        ) as manager:
            manager.save(3, components)

    run_ranks(4, program, nodes=[[0, 1], [2, 3]])
    return tmp_path / "checkpoint-3"


def test_a_stranger_reads_a_checkpoint_of_four_ranks(sharded, stored) -> None:
    reader = Reader(sharded)
    reader.check_checksums()
    components = reader.manifest["components"]
    assert reader.component("model") == stored({**FULL, "values": {"steps": (1, 2)}})
    table = reader.index(0)["components"]["model"]["layouts"]
    rows = {name: (alias, layout) for name, _, _, alias, layout in table["tensors"]}
    assert {name for name, (_, layout) in rows.items() if isinstance(layout, list)} == set(CUTS)
    assert all(rows[name][1][1] == cut for name, cut in CUTS.items())
    assert len(rows["boxes"][1]["boxes"]) == 4 and rows["stage"] == (None, 2) and "rows~11" in rows
    assert [alias for alias, _ in (rows["plain"], rows["tied"])].count(None) == 1
    assert components["model"]["tensors"] == len(FULL)
    for rank in range(4):
        expected = {"rank": rank, "t": torch.full((2,), float(rank))}
        assert reader.component("own", rank) == stored(expected)
    for number, label in enumerate(["even", "odd"]):
        assert reader.component("loader", number) == stored(
            {"group": number, "t": torch.full((2,), float(number))}
        )
        assert components["loader"]["files"][number] == f"loader.dp-{label}.safetensors"
    assert [reader.component("cache", node) for node in (0, 1)] == [
        stored({"node": torch.tensor(0)}),
        stored({"node": torch.tensor(2)}),
    ]
    assert reader.component("args") == {"lr": 0.1}
    assert reader.component("split") == stored(SPLIT)
    assert {
        writer: [row[1] for row in reader.index(writer)["components"]["split"]["tensors"]]
        for writer in range(4)
    } == {0: ["a", "e"], 1: ["b", "f"], 2: ["c"], 3: ["d"]}
    weights = json.loads((sharded / "split.safetensors.index.json").read_text())
    assert (
        weights["metadata"] == {"total_size": 72}
        and weights["weight_map"]["c"] == "split-00003-of-00004.safetensors"
    )
    assert sorted({*reader.manifest["files"], MANIFEST}) == sorted(
        path.name for path in sharded.iterdir()
    )


def test_the_worked_example() -> None:
    mesh = [[[2, 2], [0, 1, 2, 3]], [[2, 4], list(range(8))]]
    text = DOCUMENT.read_text().split("### Worked example")[1].split("\n## ")[0]
    column, row, hsdp = (
        re.findall(r"^\| \d.*\|$", table, re.M) for table in re.split(r"layout\s`\[", text)[1:]
    )
    for line, rank in zip(column, range(4), strict=True):
        offset, size = box_of([0, "s0 S0"], mesh, [10, 3], rank)
        place = np.unravel_index(rank, (2, 2))
        tensor_parallel = f"rows {place[1] * 5} to {place[1] * 5 + 5}"
        rows = f"rows {offset[0]} to {offset[0] + size[0]}"
        cells = [
            rank,
            f"{place[0]}, {place[1]}",
            tensor_parallel,
            rows,
            str(offset)[1:-1],
            str(size)[1:-1],
        ]
        assert line == f"| {' | '.join(map(str, cells))} |"
    for line, rank in zip(row, range(4), strict=True):
        offset, size = box_of([0, "S0 S1"], mesh, [3, 10], rank)
        assert line == f"| {rank} | {str(offset)[1:-1]} | {str(size)[1:-1]} |"
    pieces = dict(writers_of([1, "R S0", 1], mesh, [5]))
    for line, rank in zip(hsdp, range(4), strict=True):
        assert box_of([1, "R S0"], mesh, [5], rank) == box_of([1, "R S0"], mesh, [5], rank + 4)
        offset, size = box_of([1, "R S0"], mesh, [5], rank)
        held = f"{offset[0]} to {offset[0] + size[0]}" if size[0] else "none"
        who = rank + 4 if rank + 4 in pieces else "nobody"
        assert line == f"| {rank} and {rank + 4} | {held} | {who} |"


def test_the_real_example(tmp_path: Path) -> None:
    """What the document shows of a checkpoint is what is saved today."""
    text = DOCUMENT.read_text().split("### A real example")[1]
    source = re.search(r"```python\n(.*?)```", text, re.S)
    assert source
    with CheckpointManager(tmp_path, run_id="r") as manager:
        manager.save(500, eval(source[1], {"torch": torch}), metrics={"loss": 0.25})
    folder = tmp_path / "checkpoint-500"
    reader = Reader(folder)
    content = (folder / "model.safetensors").read_bytes()
    shown = re.findall(r"```\n(.*?)\n```", text[source.end() :], re.S)
    assert shown[0] == content[8:4096].decode().rstrip(" ")
    assert shown[1].replace(" ", "") == content[4096:].hex()
    as_json = re.sub(r"\b([0-9a-f]{16,})\b", r'"\1"', shown[2]).replace("nil", "null")

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return (
            value.hex()
            if isinstance(value, bytes)
            else list(map(plain, value))
            if isinstance(value, list)
            else value
        )

    assert json.loads(as_json) == plain(reader.index(0))
    for component in reader.manifest["components"].values():
        assert not component["files"] or f'"checksum": "{component["checksum"]}"' in shown[3]
    for name, (size, digest, writer) in reader.manifest["files"].items():
        assert f'"{name}": [\n   {size},\n   "{digest}",\n   {writer}\n  ]' in shown[3]


def test_ckptcore_reads_what_a_stranger_wrote(tmp_path: Path, stored, bits) -> None:
    state = {
        "b": torch.arange(6.0).reshape(2, 3),
        "a": torch.tensor([1, 0], dtype=torch.bool),
        "n": (1, 2),
    }
    tree = msgpack.packb(
        {
            "a": msgpack.ExtType(12, msgpack.packb([1, False])),
            "b": msgpack.ExtType(12, msgpack.packb([0, False])),
            "n": msgpack.ExtType(2, msgpack.packb([1, 2])),
        }
    )
    rows = [
        (name, NAMES[state[name].dtype], list(state[name].shape), bits(state[name]))
        for name in "ba"
    ]
    folder = tmp_path / "checkpoint-7"
    write_checkpoint(folder, tree, rows)
    assert Reader(folder).component("model") == stored(state)
    view = open_checkpoint(folder)
    assert view.verify() == []
    assert view.manifest.extra == {"of tomorrow": [1]} and math.isnan(view.manifest.metrics["loss"])
    live = {"b": torch.zeros(2, 3), "a": torch.zeros(2, dtype=torch.bool), "n": (0, 0)}
    with CheckpointManager(tmp_path) as manager:
        report = manager.restore({"model": live})
    assert report.step == 7 and report.values["model"]["n"] == (1, 2)
    assert torch.equal(live["b"], state["b"]) and torch.equal(live["a"], state["a"])


def test_newer_major_versions_are_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path / "c",
        msgpack.packb({"t": msgpack.ExtType(12, b"\x92\0\xc2")}),
        [("t", "U8", [1], b"x")],
    )
    manifest = json.loads((tmp_path / "c" / MANIFEST).read_text())
    del manifest["digest"]
    (tmp_path / "c" / MANIFEST).write_bytes(ended({**manifest, "format_version": "2.0"}))
    with pytest.raises(Refused, match=r"2\.0"):
        Reader(tmp_path / "c")
    with pytest.raises(UnsupportedVersion, match=r"2\.0"):
        open_checkpoint(tmp_path / "c")
