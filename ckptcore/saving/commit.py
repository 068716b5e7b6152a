"""What a rank writes and says of it: tensor files, index, receipt; and the manifest's account of
all receipts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..catalog.folder import join
from ..errors import CheckpointCorrupt, CoordinationError, InvalidState, UnsupportedValue
from ..format.digest import combined_digest, content_digest
from ..format.index import ComponentIndex, FileEntry, Index, Piece, TensorEntry, index_file_name
from ..format.layout import LogicalTensor, encode_layouts
from ..format.manifest import SIZE_LIMIT, ComponentManifest, FileRecord
from ..format.values import decode
from ..state.component import StateComponent
from ..state.layout import TensorSource
from ..state.tree import TensorLeaf
from ..storage.base import Storage
from ..storage.workers import Workers
from .join import JoinedSave
from .plan import FilePlan, hugging_face_index
from .writer import InFolder, WrittenFile, write_files

__all__ = ["Receipt", "Share", "check_tree", "files_and_components", "write_share"]


@dataclass(slots=True)
class CopyReceipt:
    """What the lowest rank of a copy says about it: its planned files as [name, size, writer].
    whole: of a sharded component, the bytes that all ranks together have to write."""

    values: str
    tensors: int
    nbytes: int
    files: list[list[Any]]
    whole: int = 0


@dataclass(slots=True)
class Receipt:
    """What one rank wrote: files as [size, digest], components that its index has, copies that it
    is the lowest of."""

    rank: int
    files: dict[str, list[Any]] = field(default_factory=dict)
    components: list[str] = field(default_factory=list)
    copies: dict[str, CopyReceipt] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Receipt:
        copies = {key: CopyReceipt(**copy) for key, copy in plain["copies"].items()}
        return cls(plain["rank"], plain["files"], plain["components"], copies)


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part in one copy of a component.

    tensors: what it holds, by number; files: the whole plan of the copy (of a sharded component:
    this rank's part);
    tree: the plain values, on the lowest rank of the copy; table: the tensors of a sharded
    component; versions: those of modules, beside the tree.
    """

    key: str
    tensors: Mapping[int, TensorLeaf]
    files: list[FilePlan]
    tree: bytes | None
    table: list[LogicalTensor] | None = None
    versions: bytes | None = None


def write_share(
    storage: Storage,
    folder: str,
    rank: int,
    shares: Sequence[Share],
    workers: Workers,
    known: Mapping[tuple[str, int], bytes],
    progress: Callable[[int], None],
) -> Receipt:
    """Write this rank's tensor files, its index, and the Hugging Face indexes of components split
    over files."""
    mine = [plan for share in shares for plan in share.files if plan.writer == rank]
    held = {
        share.key: TensorSource({n: t.part.tensor for n, t in share.tensors.items()})
        for share in shares
    }
    sources = {plan.name: held[plan.component] for plan in mine}
    target = InFolder(storage, folder)
    written = write_files(target, mine, sources, workers, known, progress)
    index, receipt, small = Index(rank), Receipt(rank), {}
    for file in written:
        index.files[file.plan.name] = FileEntry(
            file.plan.size, len(file.plan.header), file.header_digest
        )
    for share in shares:
        part = _indexed(share, [f for f in written if f.plan.component == share.key])
        if part.tensors or part.pieces or share.tree is not None:
            index.components[share.key] = part
            receipt.components.append(share.key)
        if share.tree is not None or share.table is not None:
            receipt.copies[share.key] = _copy_receipt(share)
        if share.tree is not None and share.table is None and len(share.files) > 1:
            stem = share.files[0].name.rsplit("-", 3)[0]
            small[f"{stem}.safetensors.index.json"] = hugging_face_index(share.files)
    if index.components:
        small[index_file_name(rank)] = _readable(index)
    for name, digest in index.file_digests().items():
        receipt.files[name] = [index.files[name].size, digest]
    for name, data in small.items():
        storage.write(join(folder, name), data)
        receipt.files[name] = [len(data), content_digest(data)]
    storage.sync_folder(folder)
    return receipt


def check_tree(share: Share) -> None:
    """What every reader does with the plain values of a component, before anything is written: of
    values with tensors in them, whose codec wants real ones, only the form. Raises
    UnsupportedValue."""
    if share.tree is None:
        return
    try:
        if len(share.tree) > SIZE_LIMIT:
            raise ValueError(
                f"its plain values have {len(share.tree):,} bytes, and readers take {SIZE_LIMIT:,}"
            )
        decode(share.tree, lenient=True, opaque=True, file="the index")
    except (CheckpointCorrupt, ValueError) as error:
        raise UnsupportedValue(
            f"component {share.key!r} could not be read back, so it is not saved: {error}",
            component=share.key,
        ) from None


def _readable(index: Index) -> bytes:
    """The bytes of an index, after what every reader does with them. Raises InvalidState."""
    encoded = index.encode()
    try:
        if len(encoded) > SIZE_LIMIT:
            raise ValueError(f"it has {len(encoded):,} bytes, and readers take {SIZE_LIMIT:,}")
        found = Index.decode(encoded, index_file_name(index.writer))
        if found.file_digests() != index.file_digests():
            raise ValueError("it says other digests than those of the files")
    except (CheckpointCorrupt, ValueError) as error:
        name = index_file_name(index.writer)
        raise InvalidState(
            f"{name} could not be read back, so it is not published: {error}"
        ) from None
    return encoded


def _copy_receipt(share: Share) -> CopyReceipt:
    files = [[plan.name, plan.size, plan.writer] for plan in share.files]
    nbytes = sum(place.nbytes for plan in share.files for _, place in plan.places)
    count = len(share.tensors if share.table is None else share.table)
    first = share.tree is not None
    whole = sum(t.stored_nbytes for t in share.table) if first and share.table is not None else 0
    return CopyReceipt(
        content_digest(share.tree or b""), count if first else 0, nbytes, files, whole
    )


def _indexed(share: Share, written: Sequence[WrittenFile]) -> ComponentIndex:
    """What the index says of a share: rows, or pieces, of what this rank wrote, and aliases beside
    the values."""
    places = [
        (file.plan.name, number, place, digests)
        for file in written
        for number, place, digests in file.tensors()
    ]
    if share.table is not None:
        pieces = [
            Piece(number, name, place.start, digests) for name, number, place, digests in places
        ]
        layouts = encode_layouts(share.table) if share.tree is not None else None
        return ComponentIndex(
            share.tree, [], layouts, sorted(pieces, key=lambda piece: piece.number), share.versions
        )
    entries = []
    for file, number, place, digests in places:
        t = share.tensors[number].spec
        entries.append(
            TensorEntry(
                number,
                t.name,
                t.dtype,
                t.shape,
                None,
                t.shape,
                file,
                place.name,
                place.start,
                digests,
                None,
            )
        )
    for number, leaf in share.tensors.items():
        t = leaf.spec
        if t.alias_of is not None and share.tree is not None:
            entries.append(
                TensorEntry(
                    number, t.name, t.dtype, t.shape, None, t.shape, None, None, 0, b"", t.alias_of
                )
            )
    return ComponentIndex(
        share.tree, sorted(entries, key=lambda entry: entry.number), versions=share.versions
    )


def files_and_components(
    components: Sequence[StateComponent], joined: JoinedSave, receipts: Sequence[Receipt]
) -> tuple[dict[str, FileRecord], dict[str, ComponentManifest]]:
    """The manifest's account of what the ranks wrote: all of them, or those of a node that keeps a
    part of its own.

    Raises CoordinationError unless the receipts cover every planned file exactly once.
    """
    ranks = {receipt.rank for receipt in receipts}
    files: dict[str, FileRecord] = {}
    for receipt in receipts:
        for name, (size, digest) in receipt.files.items():
            if name in files:
                raise CoordinationError(
                    f"{name} was written by ranks {files[name].writer} and {receipt.rank}"
                )
            files[name] = FileRecord(size, digest, receipt.rank)
    planned = set()
    manifests = {}
    for component in components:
        copies = [
            receipt.copies[component.key] for receipt in receipts if component.key in receipt.copies
        ]
        expected = len(receipts)
        if not component.sharded:
            expected = sum(
                not ranks.isdisjoint(copy.members) for copy in joined.copies[component.key]
            )
        if len(copies) != expected:
            raise CoordinationError(
                f"component {component.key!r}: {len(copies)} copies were written, not {expected}"
            )
        if component.sharded:
            whole = sum(copy.whole for copy in copies)
            if (stored := sum(copy.nbytes for copy in copies)) != whole:
                raise CoordinationError(
                    f"component {component.key!r}: {stored:,} bytes were written of {whole:,}"
                )
        names = []
        for name, size, writer in (file for copy in copies for file in copy.files):
            record = files.get(name)
            if record is None or (record.size, record.writer) != (size, writer) or name in planned:
                raise CoordinationError(
                    f"{name} ({size:,} bytes) of rank {writer} is not what was written under that "
                    "name"
                )
            planned.add(name)
            names.append(name)
        digests = (*(copy.values for copy in copies), *(files[name].digest for name in names))
        grouped = component.process_group_name
        manifests[component.key] = ComponentManifest(
            component.key,
            component.sharing_pattern.value,
            writers=[receipt.rank for receipt in receipts if component.key in receipt.components],
            group=grouped,
            partition=joined.partitions[grouped] if grouped else None,
            group_keys=joined.group_keys.get(component.key),
            size_bytes=sum(copy.nbytes for copy in copies),
            checksum=combined_digest(bytes.fromhex(digest) for digest in digests),
            files=names,
            required=component.required,
            tensors=sum(copy.tensors for copy in copies),
            metadata=component.metadata,
        )
    return files, manifests
