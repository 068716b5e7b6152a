"""The manifest: strict JSON, written last. Its presence and its own digest are the commit.

The file is the JSON object with sorted keys and one-space indentation, in UTF-8, whose last member
(out of order, so that it can be cut off) is "digest": the xxh3-128, in hex, of every byte of the
file before that member. A single changed byte anywhere is found without agreeing on how numbers or
strings are spelled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from ..errors import CheckpointCorrupt, InvalidState, UnsafePath, UnsupportedVersion
from .checks import NOT_STORED, OPTIONAL, parsing, read_json, short, typed, written
from .digest import content_digest

__all__ = [
    "MANIFEST_NAME",
    "CheckpointManifest",
    "ComponentManifest",
    "FileRecord",
    "ReplicaGroup",
    "check_file_name",
    "check_readable",
    "private_json",
    "replica_groups",
]

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
    timings: dict of phase -> seconds.
    metadata: dict of what the user has given.
    format_version: text, "major.minor".
    node: int, where nodes share no storage the one whose part this is; None for a checkpoint that
        is whole.
    abandoned: list of [first, last] commit sequences of the run that it had gone back behind by
        then.
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
    extra: dict[str, Any] = field(default_factory=dict)
    digest: str = field(default="", metadata=NOT_STORED)

    def __post_init__(self) -> None:
        if self.node is not None:
            ranks = sorted(rank for members in self.nodes for rank in members)
            if len(ranks) != self.world_size or any(rank != n for n, rank in enumerate(ranks)):
                raise ValueError("the nodes are not a partition of the ranks")
            if self.node >= len(self.nodes) or not self.nodes[self.node]:
                raise ValueError(f"there is no node {self.node} with ranks")
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

        def bad(what: str, kind: str = "format", **facts: Any) -> CheckpointCorrupt:
            return CheckpointCorrupt(
                f"{where}: {what}", path=path or None, file=MANIFEST_NAME, kind=kind, **facts
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
        with parsing(f"{where}: not a valid manifest", MANIFEST_NAME, path or None):
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
                raise ValueError(
                    f"storage mode {short(mode)} with node {manifest.node} makes no sense"
                )
        manifest.digest = expected
        return manifest


def check_readable(encoded: bytes, what: str = "the manifest") -> None:
    """What every reader does with a manifest, before it is published. Raises InvalidState."""
    try:
        if len(encoded) > SIZE_LIMIT:
            raise ValueError(f"it has {len(encoded):,} bytes, and readers take {SIZE_LIMIT:,}")
        CheckpointManifest.decode(encoded)
    except (CheckpointCorrupt, UnsupportedVersion, ValueError) as error:
        raise InvalidState(
            f"{what} could not be read back, so it is not published: {error}"
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


def private_json(what: str, document: Any) -> Any:
    """A copy of what a user gives for a manifest, as it will be read. Raises InvalidState for what
    JSON cannot hold, or what the limits of another reader would refuse."""
    try:
        _check_json(document)
        text = json.dumps(document, sort_keys=True, ensure_ascii=False, allow_nan=False)
        text.encode()  # lone surrogates are no UTF-8
        return read_json(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidState(f"{what} is not JSON, and cannot go into a manifest: {error}") from None


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
