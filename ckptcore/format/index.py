"""What one writer wrote: for each component the tree of its plain values, and where its tensors'
bytes lie.

An index is msgpack: {"format", "version", "writer", "files": {name: [size, header size, header
digest]}, "components": {key: {"tree": bytes or nil, "tensors": [row, ...]}}}. A row is [number,
name, dtype, shape, file, name in file, start, chunk digests, alias]: `number` is what the tree
calls the tensor; its bytes are C order in `file` from byte `start` on, with 8 bytes of digest per 4
MiB. `alias` (else nil) is the number of the tensor that holds the bytes; then file, start and
digests are nil. A component that several ranks wrote has its tree, and its aliases, in the
index of the lowest of them.

A sharded component has {"tree", "layouts", "pieces"} instead: the table of layout.py beside the
tree, and for each box that this writer wrote [number, file, start, chunk digests]; the rest follows
from the table.

Beside a tree there may be "versions": bytes of what torch keeps beside the state of modules in it,
by path in the tree and name of the module, where that is not {"version": 1}.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import msgpack

from .checks import exact, parsing, sizes, typed, unique, whole
from .digest import CHUNK_BYTES, DIGEST_BYTES, chunk_count, combined_digest
from .manifest import FileName
from .tensorfile import DTYPES, HEADER_LIMIT, tensor_nbytes

__all__ = ["ComponentIndex", "FileEntry", "Index", "StoredShard", "TensorEntry", "index_file_name"]

FORMAT = "ckptcore.index"
VERSION = 1


def index_file_name(writer: int) -> str:
    return f"index.rank{writer:05d}.msgpack"


@dataclass(slots=True)
class TensorEntry:
    """One tensor, or the piece of a sharded one at `offset` (else None). Shapes in items, `start`,
    `nbytes` in bytes."""

    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...] | None
    local_shape: tuple[int, ...]
    file: str | None
    stored_name: str | None
    start: int
    digests: bytes
    alias_of: int | None

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.dtype, self.local_shape)

    def chunk(self, number: int) -> tuple[int, int, bytes]:
        """Start in the file, length, and digest of chunk `number`."""
        at = number * CHUNK_BYTES
        return (
            self.start + at,
            min(CHUNK_BYTES, self.nbytes - at),
            self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES],
        )


class StoredShard(NamedTuple):
    """One box of a sharded tensor, where this writer put it."""

    number: int
    file: str
    start: int
    digests: bytes


class FileEntry(NamedTuple):
    """A tensor file: its size, and the length and 16-byte digest of its header (with the length
    field)."""

    size: int
    header_size: int
    header_digest: bytes


@dataclass(slots=True)
class ComponentIndex:
    """`tree`: encoded plain values with TensorRefs that number the tensors; None where another
    writer has it.

    layouts: the table of a sharded component, beside its tree; pieces: what this writer has of it,
    else None.
    versions: of modules, encoded; None where there are none, or the writer did not know of them.
    """

    tree: bytes | None
    tensors: list[TensorEntry] = field(default_factory=list)
    layouts: dict[str, Any] | None = None
    pieces: list[StoredShard] | None = None
    versions: bytes | None = None


@dataclass(slots=True)
class Index:
    writer: int
    files: dict[str, FileEntry] = field(default_factory=dict)
    components: dict[str, ComponentIndex] = field(default_factory=dict)

    def file_digests(self) -> dict[str, str]:
        """What the manifest must say of each tensor file: over header digest and chunk digests in
        file order."""
        held: dict[str, list[TensorEntry | StoredShard]] = {name: [] for name in self.files}
        for component in self.components.values():
            for entry in (*component.tensors, *(component.pieces or ())):
                if entry.file is not None:
                    held[entry.file].append(entry)
        return {
            name: combined_digest(
                [
                    self.files[name].header_digest,
                    *(e.digests for e in sorted(entries, key=lambda e: e.start)),
                ]
            )
            for name, entries in held.items()
        }

    def starts(self) -> dict[str, list[int]]:
        """Where in each file something starts, in order. Raises ValueError when two tensors lie on
        the same bytes: then a small file would fill a lot of memory. How long a box is, is known
        with the table of layouts only."""
        held: dict[str, list[tuple[int, int]]] = {name: [] for name in self.files}
        for component in self.components.values():
            for entry in component.tensors:
                if entry.file is not None and entry.nbytes:
                    held[entry.file].append((entry.start, entry.nbytes))
            for piece in component.pieces or ():
                if piece.digests:
                    held[piece.file].append(
                        (piece.start, CHUNK_BYTES * (len(piece.digests) // DIGEST_BYTES - 1) + 1)
                    )
        for name, ranges in held.items():
            ranges.sort()
            if any(start + nbytes > after for (start, nbytes), (after, _) in pairwise(ranges)):
                raise ValueError(f"two tensors lie on the same bytes of {name}")
        return {name: [start for start, _ in ranges] for name, ranges in held.items()}

    def encode(self) -> bytes:
        components: dict[str, dict[str, Any]] = {}
        for key, component in self.components.items():
            rows = []
            for e in component.tensors:
                location = (
                    [None, None, None, None]
                    if e.file is None
                    else [
                        e.file,
                        None if e.stored_name == e.name else e.stored_name,
                        e.start,
                        e.digests,
                    ]
                )
                rows.append([e.number, e.name, e.dtype, e.shape, *location, e.alias_of])
            if component.pieces is None:
                components[key] = {"tree": component.tree, "tensors": rows}
            else:
                components[key] = {
                    "tree": component.tree,
                    "layouts": component.layouts,
                    "pieces": component.pieces,
                }
            if component.versions is not None:
                components[key]["versions"] = component.versions
        packed = {
            "format": FORMAT,
            "version": VERSION,
            "writer": self.writer,
            "files": self.files,
            "components": components,
        }
        return bytes(msgpack.packb(packed, use_bin_type=True, unicode_errors="surrogatepass"))

    @classmethod
    def decode(cls, data: bytes, file: str = "index") -> Index:
        """Raises CheckpointCorrupt when `data` is not an index whose parts fit together."""
        with parsing(f"{file} is not a valid index", file):
            raw = msgpack.unpackb(
                data, raw=False, unicode_errors="surrogatepass", object_pairs_hook=unique
            )
            if raw["format"] != FORMAT or raw["version"] != VERSION:
                raise ValueError(
                    f"format {raw['format']!r} version {raw['version']!r} is not known"
                )
            index = cls(whole(raw["writer"]), typed(_Files, raw["files"]))
            for key, component in raw["components"].items():
                index.components[exact(key, str)] = _component(key, component, index.files)
            index.starts()
            return index


def _file(entry: FileEntry) -> FileEntry:
    if len(entry.header_digest) != 16:
        raise ValueError("a header digest is not 16 bytes")
    if not 8 <= entry.header_size <= min(entry.size, HEADER_LIMIT + 8):
        raise ValueError(
            f"a header of {entry.header_size} bytes is not that of a file of {entry.size}"
        )
    return entry


_Files = dict[FileName, Annotated[FileEntry, _file]]


def _component(key: str, found: dict[str, Any], files: dict[str, FileEntry]) -> ComponentIndex:
    tree, versions = typed(bytes | None, found["tree"]), typed(bytes | None, found.get("versions"))
    if "pieces" in found:
        pieces = [_piece(row, files) for row in found["pieces"]]
        return ComponentIndex(tree, [], found["layouts"], pieces, versions)
    entries = [_entry(row, files) for row in found["tensors"]]
    if len({e.name for e in entries}) != len(entries):
        raise ValueError(f"two tensors of component {key!r} have one name")
    return ComponentIndex(tree, entries, versions=versions)


def _piece(row: list[Any], files: dict[str, FileEntry]) -> StoredShard:
    number, file, start, digests = row  # checked by hand, as a tensor's: there are very many
    known = files[file]
    if not known.header_size <= whole(start) <= known.size or type(digests) is not bytes:
        raise ValueError(f"a piece of tensor {number} is not inside {file}")
    return StoredShard(whole(number), file, start, digests)


def _entry(row: list[Any], files: dict[str, FileEntry]) -> TensorEntry:
    number, name, dtype, shape, file, stored_name, start, digests, alias = row
    if not isinstance(name, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name!r} has an unknown dtype {dtype!r}")
    shape = sizes(shape, 2**57)
    if alias is not None:
        if whole(alias) == number or file is not None:
            raise ValueError(f"tensor {name!r}: alias of number {alias} is not valid")
        return TensorEntry(
            whole(number), name, dtype, shape, None, shape, None, None, 0, b"", alias
        )
    nbytes = tensor_nbytes(dtype, shape)
    known = files[file]
    if not known.header_size <= whole(start) <= start + nbytes <= known.size:
        raise ValueError(
            f"tensor {name!r}: bytes {start} to {start + nbytes} are not inside {file}"
        )
    if len(digests) != DIGEST_BYTES * chunk_count(nbytes):
        raise ValueError(f"tensor {name!r}: {len(digests)} digest bytes for {nbytes} bytes of data")
    return TensorEntry(
        whole(number),
        name,
        dtype,
        shape,
        None,
        shape,
        file,
        stored_name or name,
        start,
        bytes(digests),
        None,
    )
