"""What a checkpoint says of itself, and the rules by which that is read.

**The manifest** is strict JSON, written last. Its presence and its own digest are the commit. The
file is the JSON object with sorted keys and one-space indentation, in UTF-8, whose last member (out
of order, so that it can be cut off) is "digest": the xxh3-128, in hex, of every byte of the file
before that member. A single changed byte anywhere is found without a common spelling of numbers or
strings.

**An index** is what one writer wrote, in msgpack: {"format", "version", "writer", "files": {name:
[size, header size, header digest]}, "components": {key: {"tree": bytes or nil, "tensors": [row,
...]}}}. A row is [number, name, dtype, shape, file, name in file, start, chunk digests, alias]:
`number` is what the tree calls the tensor; its bytes are C order in `file` from byte `start` on,
with 8 bytes of digest per 4 MiB. `alias` (else nil) is the number of the tensor that holds the
bytes; then file, start and digests are nil. A component that several ranks wrote has its tree, and
its aliases, in the index of the lowest of them. A sharded component has {"tree", "layouts",
"pieces"} instead: the table of layout.py beside the tree, and for each box that this writer wrote
[number, file, start, chunk digests]; the rest follows from the table. Beside a tree there may be
"versions": bytes of what torch keeps beside the state of modules in it, by path in the tree and
name of the module, where that is not {"version": 1}.

**Records** of both are described once: the annotations of a dataclass say what a file may hold.

int                  a whole number from 0 to 2**62, itself excluded; a bool is none
float                a number, or one of the texts "nan", "inf" and "-inf", which JSON lacks
str, bool, bytes     exactly that; Any: whatever the file has
Literal["a", "b"]    one of these texts
Annotated[T, check]  a T that `check` gives back, or refuses with a ValueError
T | None, list[T], dict[str, T]
a NamedTuple         a list of its fields, in order
a dataclass          an object. Its field `extra` keeps what is not known, so that fields of a
                     newer minor version survive; NOT_STORED fields are not in the file, and
                     OPTIONAL ones only where they differ from their default.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from math import prod
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgpack

from ..errors import (
    CheckpointCorrupt,
    CheckpointError,
    InvalidState,
    UnsafePath,
    UnsupportedVersion,
)
from .digest import CHUNK_BYTES, DIGEST_BYTES, content_digest
from .tensorfile import DTYPES, HEADER_LIMIT

DIMENSIONS = 64  # as many as numpy has; each costs a level of recursion where boxes are cut


def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The dict of `pairs`. Raises ValueError when a key appears twice: readers would not agree on
    which one counts."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def read_json(text: str) -> Any:
    """What strict JSON says. Raises ValueError for a name that an object has twice, and for the
    constants that JSON lacks."""
    return json.loads(text, object_pairs_hook=unique, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def whole(value: Any, below: int = 2**62) -> int:
    """`value` if it is an int (and no bool) from 0 to `below`, itself excluded. Raises
    ValueError."""
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{short(value)} is not a whole number below {below}")
    return value


def sizes(value: Any, below: int = 2**62) -> tuple[int, ...]:
    """A shape whose items can be counted, also when one of its sizes is 0. Raises ValueError,
    TypeError."""
    if len(value) > DIMENSIONS:
        raise ValueError(f"{len(value)} dimensions are more than {DIMENSIONS}")
    shape = tuple([whole(n) for n in value])
    whole(prod([n or 1 for n in shape]), below)
    return shape


def exact(value: Any, *kinds: type) -> Any:
    """`value` if it is of exactly one of these types: what a codec is given may be crafted, and
    then be anything."""
    if type(value) not in kinds:
        raise TypeError(f"a {type(value).__name__} is stored where a {kinds[0].__name__} belongs")
    return value


def exact_items(value: Any, *kinds: type) -> list[Any]:
    """`value` if it is a list of items of these types."""
    return [exact(item, *kinds) for item in exact(value, list)]


def short(value: Any, limit: int = 200) -> str:
    """`value` for a message: what a file says may be of any length."""
    text = repr(value[:limit] if isinstance(value, str | bytes | list) else value)
    return text if len(text) <= limit else text[:limit] + "..."


MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    struct.error,
    msgpack.UnpackException,
)


def malformed(
    message: str, error: Exception, file: str | None, path: str | None = None, kind: str = "format"
) -> CheckpointError:
    """What to raise where a parser failed, with one of MALFORMED, on bytes that are not what they
    should be: `message`, and why."""
    if isinstance(error, CheckpointError):
        return error
    why = f"{message} ({type(error).__name__}: {short(str(error))})"
    return CheckpointCorrupt(why, path=path, file=file, kind=kind)


NOT_STORED = {"not_stored": True}
OPTIONAL = {"optional": True}


def typed(kind: Any, value: Any) -> Any:
    """`value`, as a file has it, made into what the annotation `kind` says. Objects are emptied, so
    that a long list is not there twice. Raises ValueError, TypeError or OverflowError, which says
    the field that is wrong."""
    if kind is int:
        return whole(value)
    if kind in (str, bool, bytes):
        return exact(value, kind)
    origin, args = _parts(kind)
    if origin is list:
        return [typed(args[0], item) for item in exact(value, list)]
    if origin is dict:
        return {
            typed(args[0], key): _named(key, args[1], item)
            for key, item in exact(value, dict).items()
        }
    if origin is UnionType:
        return None if value is None else typed(args[0], value)
    if origin is Annotated:
        return args[1](typed(args[0], value))
    if origin is Literal:
        return _one_of(value, args)
    if origin is tuple:
        if len(exact(value, list)) != len(args):
            raise ValueError(f"{short(value)} has not {len(args)} items")
        return kind(*map(typed, args, value))
    if origin is None:
        return value if kind is Any else _number(value)
    found = exact(value, dict)
    if lacking := [n for n, _, optional in args if n not in found and not optional]:
        raise ValueError(f"{', '.join(lacking)} must be there")
    known = {n: _named(n, part, found.pop(n)) for n, part, _ in args if n in found}
    return kind(**known, extra=found)


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """What kind of annotation this is, and what it is made of. Of a dataclass (name, annotation,
    whether it may lack) of each field."""
    if args := get_args(kind):
        return get_origin(kind), args
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return kind, tuple((f.name, hints[f.name], bool(f.metadata)) for f in _stored(kind))
    if hasattr(kind, "_fields"):
        return tuple, tuple(get_type_hints(kind, include_extras=True).values())
    return None, ()  # Any, float


def written(record: Any) -> dict[str, Any]:
    """The object that a file has for a record; records in it are left as they are. Raises TypeError
    for what is none, as JSON does."""
    if not hasattr(record, "extra"):
        raise TypeError(f"a {type(record).__name__} is not JSON")
    found = {f.name: getattr(record, f.name) for f in _stored(type(record))}
    for f in fields(record):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if f.metadata == OPTIONAL and found[f.name] == default:
            del found[f.name]
    return {**record.extra, **found}


def _stored(cls: Any) -> list[Field[Any]]:
    return [f for f in fields(cls) if f.name != "extra" and f.metadata != NOT_STORED]


def _named(name: str, kind: Any, value: Any) -> Any:
    try:
        return typed(kind, value)
    except CheckpointError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name[:100]}: {error}") from None


def _one_of(value: Any, words: tuple[str, ...]) -> Any:
    if value not in words:
        raise ValueError(f"{short(value)} is not one of {', '.join(words)}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        raise ValueError(f"{short(value)} is not a number")
    return float(exact(value, float, int, str))


MANIFEST_NAME = "checkpoint_manifest.json"
FORMAT = "ckptcore"
VERSION = "1.0"
SIZE_LIMIT = 1 << 30
WORLD_LIMIT = 1 << 22

_PLAIN_NAME = re.compile(r"[^/\\:\x00-\x1f\x7f]{1,255}")
_TAIL = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n}\n\Z')


def check_file_name(name: Any, file: str = MANIFEST_NAME) -> str:
    """`name` when it is a plain name inside a checkpoint. Raises UnsafePath for anything else."""
    if (
        not isinstance(name, str)
        or not _PLAIN_NAME.fullmatch(name)
        or name in (".", "..", MANIFEST_NAME)
        or not _fits(name)
    ):
        raise UnsafePath(
            f"{file}: {short(name)} is not a plain file name inside the checkpoint; refused",
            file=file,
            kind="format",
        )
    return name


def _fits(name: str) -> bool:
    """Whether file systems can hold the name: UTF-8 of at most 255 bytes, which lone surrogates are
    not."""
    try:
        return len(name.encode()) <= 255
    except UnicodeEncodeError:
        return False


Pattern = Literal["GLOBAL", "REPLICATED", "PER_RANK", "PER_GROUP", "PER_NODE", "SHARDED"]
FileName = Annotated[str, check_file_name]
Partition = list[list[int]]


def _world(size: int) -> int:
    if not 1 <= size <= WORLD_LIMIT:
        raise ValueError(f"a world of {size} ranks is not one that was ever saved")
    return size


def _ranges(ranges: Partition) -> Partition:
    if any(len(ends) != 2 or ends[0] > ends[1] for ends in ranges):
        raise ValueError(f"{short(ranges)} are no ranges of commit sequences")
    return ranges


class FileRecord(NamedTuple):
    """One file of the checkpoint: size in bytes, digest (see format/digest.py), rank that wrote
    it."""

    size: int
    digest: str
    writer: int


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """The ranks that share one stored copy of a component, and the label in the names of its
    files."""

    label: str
    members: Sequence[int]


def replica_groups(
    pattern: str,
    world_size: int,
    nodes: list[list[int]],
    group: str | None = None,
    partition: list[list[int]] | None = None,
    group_keys: list[str] | None = None,
) -> list[ReplicaGroup]:
    """The replica groups of a component with this sharing pattern, in order of their lowest rank,
    which has the values."""
    if pattern == "PER_RANK":
        return [ReplicaGroup(f".rank{rank:05d}", (rank,)) for rank in range(world_size)]
    if pattern == "PER_NODE":
        return [
            ReplicaGroup(f".node{number:05d}", tuple(ranks)) for number, ranks in enumerate(nodes)
        ]
    if pattern == "PER_GROUP":
        names = group_keys or [f"{number:05d}" for number in range(len(partition or []))]
        return [
            ReplicaGroup(f".{group}-{name}", tuple(ranks))
            for name, ranks in zip(names, partition or [], strict=True)
        ]
    return [ReplicaGroup("", range(world_size))]


@dataclass(slots=True)
class ComponentManifest:
    """One component: who shares it and who wrote it.

    key: text, its name; it is the name that the manifest has it under.
    pattern: text, its sharing pattern, "GLOBAL" (default) and so on.
    writers: list of ranks whose index has something of it.
    group: text, name of the process group (PER_GROUP); None for others.
    partition: list of the group's groups, each a list of ranks (PER_GROUP); None for others.
    group_keys: list of the user's names for them, in the same order; None where there are none.
    size_bytes: int, bytes of tensor data in all stored copies.
    checksum: text, digest over the plain values and the digests of the files, in order.
    files: list of names of its tensor files.
    required: bool, a load must have it (default True).
    tensors: int, how many.
    metadata: dict of what the user has given.
    extra: dict of fields that this version does not know.

    `replicated_across` is not in the file: the groups of ranks whose state was the same by what the
    user declared (REPLICATED: one of all ranks; PER_GROUP: the partition).
    """

    key: str = field(default="", metadata=NOT_STORED)
    pattern: Pattern = "GLOBAL"
    writers: list[int] = field(default_factory=lambda: [0])
    group: str | None = None
    partition: Partition | None = None
    group_keys: list[str] | None = None
    size_bytes: int = 0
    checksum: str = ""
    files: list[FileName] = field(default_factory=list)
    required: bool = True
    tensors: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    replicated_across: list[Sequence[int]] = field(
        default_factory=list, init=False, compare=False, metadata=NOT_STORED
    )


@dataclass(slots=True)
class CheckpointManifest:
    """Everything about one checkpoint but its tensors and values. Raises ValueError for fields that
    do not fit each other.

    checkpoint_id: text, the same in every copy of the checkpoint.
    step: int, 0 to 2**62.
    run_id: text, the run that it belongs to.
    attempt_id: text, of the attempt that wrote it.
    sequence: int, of the commits of the root, growing by one.
    created: text, UTC time of the commit in ISO 8601.
    world_size: int, number of ranks (default 1).
    nodes: list of nodes, each a list of ranks.
    groups: dict of process group name -> its groups, each a list of ranks.
    components: dict of key -> ComponentManifest.
    files: dict of name -> (size in bytes, digest, rank that wrote it).
    metrics: dict of name -> number.
    metrics_step: int, the step that they were measured at; None where there are none.
    training_args_hash: text that the user has given; None where it was not.
    versions: dict of program -> version.
    environment: dict of what is known of machine and job.
    timings: dict of phase -> seconds, on rank 0.
    timings_by_rank: dict of phase -> list of seconds, one for each of `stored_ranks`, None for one
        that had no such phase; empty for a save of one rank.
    metadata: dict of what the user has given.
    format_version: text, "major.minor".
    node: int, where nodes share no storage the one whose part this is; None for a checkpoint that
        is whole.
    abandoned: list of [first, last] commit sequences of the run that it had gone back behind by
        then.
    user_files: list of the names of files that the user gave to the save; they are among `files`.
    label: text, the `name` that the save was given, which its folder's name ends with; "" for none.
    extra: dict of fields that this version does not know.
    digest: text, that of the encoded manifest; "" before it is encoded.
    """

    checkpoint_id: str
    step: int
    run_id: str
    attempt_id: str
    sequence: int
    created: str
    world_size: Annotated[int, _world] = 1
    nodes: Partition = field(default_factory=lambda: [[0]])
    groups: dict[str, Partition] = field(default_factory=dict)
    components: dict[str, ComponentManifest] = field(default_factory=dict)
    files: dict[FileName, FileRecord] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_step: int | None = None
    training_args_hash: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    format_version: str = VERSION
    node: int | None = field(default=None, metadata=OPTIONAL)
    abandoned: Annotated[Partition, _ranges] = field(default_factory=list, metadata=OPTIONAL)
    user_files: list[FileName] = field(default_factory=list, metadata=OPTIONAL)
    timings_by_rank: dict[str, list[float | None]] = field(default_factory=dict, metadata=OPTIONAL)
    label: str = field(default="", metadata=OPTIONAL)
    extra: dict[str, Any] = field(default_factory=dict)
    digest: str = field(default="", metadata=NOT_STORED)

    def __post_init__(self) -> None:
        if self.node is not None:
            ranks = sorted(rank for members in self.nodes for rank in members)
            if len(ranks) != self.world_size or any(rank != n for n, rank in enumerate(ranks)):
                raise ValueError("the nodes are not a partition of the ranks")
            if self.node >= len(self.nodes) or not self.nodes[self.node]:
                raise ValueError(f"there is no node {self.node} with ranks")
        if unlisted := [name for name in self.user_files if name not in self.files]:
            raise ValueError(f"user files are not listed: {short(unlisted)}")
        if any(len(row) != len(self.stored_ranks) for row in self.timings_by_rank.values()):
            raise ValueError("timings_by_rank has not one number for each rank")
        for key, component in self.components.items():
            component.key = key
            self._check_component(component)
            everybody: list[Sequence[int]] = [range(self.world_size)]
            parts: list[Sequence[int]] = [*(component.partition or [])]
            component.replicated_across = {"REPLICATED": everybody, "PER_GROUP": parts}.get(
                component.pattern, []
            )

    def _check_component(self, component: ComponentManifest) -> None:
        groups, names = component.partition, component.group_keys
        if (component.pattern == "PER_GROUP") != (groups is not None) or (
            names and len(names) != len(groups or [])
        ):
            raise ValueError(f"component {component.key!r} lacks its groups, or has wrong ones")
        members = {"PER_GROUP": groups, "PER_NODE": self.nodes}.get(component.pattern)
        if members is not None and not (members and all(members)):
            raise ValueError(f"a group or node of component {component.key!r} has no ranks")
        if unlisted := [name for name in component.files if name not in self.files]:
            raise ValueError(
                f"component {component.key!r} names files that are not listed: {short(unlisted)}"
            )

    @property
    def size_bytes(self) -> int:
        """Bytes of all files that the manifest lists (without itself)."""
        return sum(record.size for record in self.files.values())

    @property
    def storage_mode(self) -> str:
        """Either "shared", or "node" for the part of one node."""
        return "shared" if self.node is None else "node"

    @property
    def stored_ranks(self) -> Sequence[int]:
        """The ranks whose state is in this checkpoint, in order: all, or those of the node."""
        return range(self.world_size) if self.node is None else self.nodes[self.node]

    def holds(self, copy: ReplicaGroup) -> bool:
        """Whether a stored copy, or the node's part in it, is in this checkpoint."""
        return self.node is None or any(rank in self.stored_ranks for rank in copy.members)

    def copies(self, key: str) -> list[ReplicaGroup]:
        """The stored copies of a component. KeyError when there is no such component;
        CheckpointCorrupt when there are fewer writers than copies."""
        c = self.components[key]
        if c.pattern == "PER_RANK" and len(set(c.writers)) < len(self.stored_ranks):
            what = (
                f"component {key!r} is said to be that of {len(self.stored_ranks)} ranks, and "
                f"{len(c.writers)} wrote it"
            )
            raise CheckpointCorrupt(f"{MANIFEST_NAME}: {what}", file=MANIFEST_NAME, kind="format")
        return replica_groups(
            c.pattern, self.world_size, self.nodes, c.group, c.partition, c.group_keys
        )

    def encode(self) -> bytes:
        """The manifest file. Sets `digest`. Raises InvalidState for metadata that JSON cannot
        hold."""
        document = written(self) | {"format": FORMAT}
        if self.node is not None:
            document["storage_mode"] = "node"
        # Strict JSON has no NaN or infinity, and a metric may well be one.
        document["metrics"] = {
            k: v if math.isfinite(v) else str(v) for k, v in self.metrics.items()
        }
        body = strict_json(document).removesuffix(b"\n}")
        self.digest = content_digest(body)
        return body + b',\n "digest": "%s"\n}\n' % self.digest.encode()

    @classmethod
    def decode(cls, data: bytes, path: str = "") -> CheckpointManifest:
        """Raises CheckpointCorrupt, UnsafePath (a kind of it) or UnsupportedVersion."""
        where = f"{path}/{MANIFEST_NAME}" if path else MANIFEST_NAME

        def bad(message: str, kind: str = "format", **facts: Any) -> CheckpointCorrupt:
            return CheckpointCorrupt(
                f"{where}: {message}", path=path or None, file=MANIFEST_NAME, kind=kind, **facts
            )

        tail = _TAIL.search(data[-64:])
        if tail is None:
            raise bad(f"not a complete manifest ({len(data)} bytes without a digest at the end)")
        expected = tail.group(1).decode()
        body = memoryview(data)[: -len(tail.group(0))]
        actual = content_digest(body)
        if actual != expected:
            raise bad(
                f"digest is {actual}, the manifest says {expected}",
                "digest",
                expected=expected,
                actual=actual,
            )
        failure = None
        try:
            manifest = cls._parsed(body, where, path)
        except MALFORMED as error:
            what = f"{where}: not a valid manifest"
            failure = malformed(what, error, MANIFEST_NAME, path or None)
        if failure is not None:  # an error that is kept keeps neither bytes nor half a document
            del data, body
            raise failure
        manifest.digest = expected
        return manifest

    @classmethod
    def _parsed(cls, body: memoryview, where: str, path: str) -> CheckpointManifest:
        document = read_json(str(body, "utf-8") + "\n}")
        if document.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT!r}")
        version = document["format_version"]
        if int(version.split(".")[0]) > int(VERSION.split(".")[0]):
            raise UnsupportedVersion(
                f"{where}: format version {version} is newer than {VERSION}, the newest that "
                "this ckptcore reads; install a newer ckptcore",
                path=path or None,
                found=version,
                supported=VERSION,
            )
        mode = document.pop("storage_mode", "shared")
        manifest: CheckpointManifest = typed(cls, document)
        if mode != manifest.storage_mode:
            raise ValueError(f"storage mode {short(mode)} with node {manifest.node} makes no sense")
        return manifest


def check_readable(
    encoded: bytes, name: str = "the manifest", decode: Callable[[bytes], Any] | None = None
) -> Any:
    """What every reader makes of a manifest, or of what `decode` reads, before it is published.
    Raises InvalidState."""
    try:
        if len(encoded) > SIZE_LIMIT:
            raise ValueError(f"it has {len(encoded):,} bytes, and readers take {SIZE_LIMIT:,}")
        return (decode or CheckpointManifest.decode)(encoded)
    except (CheckpointCorrupt, UnsupportedVersion, ValueError) as error:
        raise InvalidState(
            f"{name} could not be read back, so it is not published: {error}"
        ) from None


def strict_json(document: Any) -> bytes:
    """Raises InvalidState for what JSON cannot hold."""
    try:
        return json.dumps(
            document, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False, default=written
        ).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidState(
            f"metadata that is not JSON cannot go into a manifest: {error}"
        ) from None


JSON_DEPTH = 100  # readers have a stack of their own
JSON_INT = 2048  # bits; Python can be set to read no ints of more than 640 digits
JSON_ITEMS = 10_000_000


def private_json(name: str, document: Any) -> Any:
    """A copy of what a user gives for a manifest, as it will be read. Raises InvalidState for what
    JSON cannot hold, or what the limits of another reader would refuse."""
    try:
        _check_json(document)
        text = json.dumps(document, sort_keys=True, ensure_ascii=False, allow_nan=False)
        text.encode()  # lone surrogates are no UTF-8
        return read_json(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidState(f"{name} is not JSON, and cannot go into a manifest: {error}") from None


def _check_json(document: Any) -> None:
    """Raises ValueError for what is nested deeply, or contains itself, and for ints of very many
    digits."""
    level = [document]
    for _ in range(JSON_DEPTH + 1):
        if not level:
            return
        inner: list[Any] = []
        for item in level:
            if isinstance(item, int) and item.bit_length() > JSON_INT:
                raise ValueError(
                    f"an int of {item.bit_length():,} bits has too many digits; store it as text"
                )
            if isinstance(item, dict | list | tuple):
                inner += item.values() if isinstance(item, dict) else item
        if len(inner) > JSON_ITEMS:
            raise ValueError(f"it has more than {JSON_ITEMS:,} items")
        level = inner
    raise ValueError(f"it is nested deeper than {JSON_DEPTH} levels")


INDEX_FORMAT = "ckptcore.index"
INDEX_VERSION = 1


def index_file_name(writer: int) -> str:
    return f"index.rank{writer:05d}.msgpack"


def chunk_count(nbytes: int) -> int:
    """Number of chunks of a tensor of `nbytes` bytes; an empty tensor has none."""
    return -(-nbytes // CHUNK_BYTES)


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
    file: str | None = None
    stored_name: str | None = None
    start: int = 0
    digests: bytes = b""
    alias_of: int | None = None

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].itemsize * prod(self.local_shape)

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
            name: content_digest(
                self.files[name].header_digest
                + b"".join([e.digests for e in sorted(entries, key=attrgetter("start"))])
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
                if entry.file is not None and (nbytes := entry.nbytes):
                    held[entry.file].append((entry.start, nbytes))
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
            "format": INDEX_FORMAT,
            "version": INDEX_VERSION,
            "writer": self.writer,
            "files": self.files,
            "components": components,
        }
        return bytes(msgpack.packb(packed, use_bin_type=True, unicode_errors="surrogatepass"))

    @classmethod
    def decode(cls, data: bytes, file: str = "index") -> Index:
        """Raises CheckpointCorrupt when `data` is not an index whose parts fit together."""
        try:
            raw = msgpack.unpackb(
                data, raw=False, unicode_errors="surrogatepass", object_pairs_hook=unique
            )
            if raw["format"] != INDEX_FORMAT or raw["version"] != INDEX_VERSION:
                raise ValueError(
                    f"format {raw['format']!r} version {raw['version']!r} is not known"
                )
            index = cls(whole(raw["writer"]), typed(_Files, raw["files"]))
            for key, component in raw["components"].items():
                index.components[exact(key, str)] = _component(key, component, index.files)
            index.starts()
            return index
        except MALFORMED as error:
            raise malformed(f"{file} is not a valid index", error, file) from None


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
    if not isinstance(stored_name, str | None):
        raise ValueError(f"tensor {name!r} is stored under {stored_name!r}, which is no text")
    shape = sizes(shape, 2**57)
    if alias is not None:
        if whole(alias) == number or file is not None:
            raise ValueError(f"tensor {name!r}: alias of number {alias} is not valid")
        return TensorEntry(whole(number), name, dtype, shape, None, shape, alias_of=alias)
    nbytes = DTYPES[dtype].itemsize * prod(shape)
    known = files[file]
    if not known.header_size <= whole(start) <= start + nbytes <= known.size:
        raise ValueError(
            f"tensor {name!r}: bytes {start} to {start + nbytes} are not inside {file}"
        )
    if type(digests) is not bytes or len(digests) != DIGEST_BYTES * chunk_count(nbytes):
        raise ValueError(f"tensor {name!r}: not the digests of {nbytes} bytes of data")
    where = file, stored_name or name, start, digests
    return TensorEntry(whole(number), name, dtype, shape, None, shape, *where)
