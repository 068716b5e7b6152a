"""One committed checkpoint, read-only and without torch: manifest, indexes, values, tensors,
verification."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from ..arguments import check_count, shown
from ..catalog.folder import PIN_NAME, checkpoints_in, foreign_format, read_manifest
from ..errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    InvalidState,
    StateMismatch,
    StorageError,
    UnknownName,
)
from ..format.digest import DIGEST_BYTES, content_digest
from ..format.layout import Box, LogicalTensor, decode_layouts, intersection, volume
from ..format.manifest import (
    MANIFEST_NAME,
    SIZE_LIMIT,
    CheckpointManifest,
    Index,
    StoredShard,
    TensorEntry,
    chunk_count,
    index_file_name,
)
from ..format.tensorfile import DTYPES, tensor_nbytes
from ..format.values import TensorRef, decode
from ..storage.base import Storage
from ..storage.opening import open_storage
from ..storage.urls import masked_url, split_url
from .reader import StoredFiles, TensorRead, read_of

PORTION = 256 << 20  # bytes that `verify` checks between two words of progress


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One logical tensor.

    component: text, the key of its component.
    name: text, its path in the component, joined with `/`.
    dtype: text, as safetensors files have it.
    shape: tuple of int, items of the whole tensor.
    nbytes: int, bytes of the whole tensor.
    file: text, the file that has it; None for one that is stored in several, or an alias.
    alias_of: text, the tensor that holds its bytes; None where it has its own.
    layout: text, how a sharded one is cut over ranks; None for others.
    """

    component: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str | None
    alias_of: str | None
    layout: str | None = None

    @property
    def full_name(self) -> str:
        return f"{self.component}/{self.name}"

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(part.replace("~1", "/").replace("~0", "~") for part in self.name.split("/"))


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, as it lies in a file.

    offset: tuple of int, where it begins in the tensor, in items.
    shape: tuple of int, in items.
    nbytes: int, its bytes.
    file: text, the name of the file.
    start: int, the byte of the file where it begins.
    writer: int, the rank that wrote it.
    digests: bytes, 8 for each 4 MiB.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    file: str
    start: int
    writer: int
    digests: bytes


@dataclass(frozen=True, slots=True)
class StoredComponent:
    """One copy of a component: encoded values, the tensors that its TensorRefs number, and where
    their bytes are.

    of: the component of each tensor, where it is made of parts of others.
    versions: of the modules in it, encoded; None where nothing is known of them.
    """

    tree: bytes
    tensors: list[LogicalTensor]
    find: Callable[[int, Box], Iterator[TensorEntry]]
    of: Sequence[str] = ()
    versions: bytes | None = None

    def pieces(self, number: int, box: Box) -> Iterator[TensorEntry]:
        """What is stored of a tensor (of the one that it is an alias of) and meets `box`."""
        target = self.tensors[number].alias_of
        return self.find(number if target is None else target, box)


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one file.

    file: text, its name in the checkpoint.
    kind: "missing", "size", "digest", "header", "format" or "storage".
    message: text, for people.
    tensor: text, the tensor that it is about; None for a whole file.
    expected: size in bytes or digest that the manifest or index has; None where there is none.
    actual: size in bytes or digest that was found; None where there is none.
    """

    file: str
    kind: str
    message: str
    tensor: str | None = None
    expected: str | int | None = None
    actual: str | int | None = None


def open_checkpoint(
    url: str | os.PathLike[str], storage_options: dict[str, Any] | None = None
) -> CheckpointView:
    """The checkpoint in the folder `url`, to read without torch.

    url: local path or fsspec URL of the checkpoint's folder.
    storage_options: dict for its filesystem (default None).

    Raises CheckpointNotFound, CheckpointCorrupt (the manifest is damaged), UnsupportedVersion,
    StorageError.
    """
    return CheckpointView(open_storage(url, storage_options), "")


class CheckpointView:
    """A committed checkpoint. Its manifest has been verified; indexes are read and verified when
    first asked for."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self.storage, self.folder = storage, folder
        self.files = StoredFiles(storage, folder)
        self.url = self.files.url
        try:
            self.manifest: CheckpointManifest = read_manifest(storage, folder)
        except CheckpointNotFound as error:
            if names := checkpoints_in(storage, folder):
                error.message += (
                    f"; it is a root with {', '.join(names)}: say which one "
                    "(CheckpointManager(root).find() gives the newest that verifies)"
                )
            elif foreign := foreign_format(storage, folder):
                kind, file = foreign
                error.message += (
                    f"; {file} looks like {kind}: `ckpt import {masked_url(self.url)} ROOT` makes "
                    "a checkpoint of it, and ckptcore.load_foreign(state, ...) loads it as it is"
                )
            raise
        self._indexes: dict[int, Index] = {}
        self._pieces: dict[tuple[str, int], dict[int, StoredShard]] = {}
        self._tables: dict[str, StoredComponent] = {}
        self._starts: dict[int, dict[str, list[int]]] = {}
        self._found: dict[str, tuple[str, StoredComponent, int]] = {}

    @property
    def name(self) -> str:
        """The name of its folder."""
        return split_url(self.url)[1]

    def __enter__(self) -> CheckpointView:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def index(self, writer: int) -> Index:
        """What one rank wrote; verified against the manifest, down to the digests of its tensor
        files.

        writer: int, the rank.
        """
        if writer not in self._indexes:
            name = index_file_name(writer)
            record = self.manifest.files.get(name)
            if record is None:
                raise self._corrupt(MANIFEST_NAME, f"lists no {name}, which a component needs")
            data = self.read_file(name)
            try:
                index = Index.decode(data, name)
            except CheckpointCorrupt as error:
                error.message = self.files.at(name) + error.message.removeprefix(name)
                error.path = self.url
                raise
            for file, digest in index.file_digests().items():
                known = self.manifest.files.get(file)
                if known is None or known.digest != digest or known.size != index.files[file].size:
                    raise self._corrupt(name, f"and the manifest disagree about {file}")
            self._indexes[writer] = index
        return self._indexes[writer]

    def forget(self, writer: int) -> None:
        """Free what was read of an index: those of thousands of writers are gigabytes.

        writer: int, the rank that wrote it.
        """
        self._indexes.pop(writer, None)
        self._starts.pop(writer, None)
        for key in [key for key in self._pieces if key[1] == writer]:
            del self._pieces[key]

    def _corrupt(
        self, file: str, message: str, kind: str = "format", **facts: Any
    ) -> CheckpointCorrupt:
        return self.files.corrupt(file, f" {message}", kind, **facts)

    def read_file(self, name: str) -> bytes:
        """All of a file that is no tensor file, verified.

        name: text, as in the manifest.

        Raises UnknownName, InvalidState for a tensor file, CheckpointCorrupt, StorageError.
        """
        self._check_file(name)
        record = self.manifest.files[name]
        if record.size > SIZE_LIMIT:
            raise self._corrupt(
                name, f"of {record.size:,} bytes is larger than such a file ever is", "size"
            )
        data = self.files.first_bytes(name, record.size, record.size)
        actual = content_digest(data)
        if actual != record.digest:
            raise self._corrupt(
                name,
                f"is damaged: digest {actual}, the manifest says {record.digest}",
                "digest",
                expected=record.digest,
                actual=actual,
            )
        return bytes(data)

    def _check_file(self, name: Any) -> None:
        """Whether it may be read as it is."""
        users = self.manifest.user_files
        if not isinstance(name, str) or name not in self.manifest.files:
            raise UnknownName(
                f"{self.url} has no file {shown(name)}; the save was given "
                f"{', '.join(users) or 'no files'}",
                path=self.url,
                key=shown(name),
                available=users,
            )
        if name.endswith(".safetensors") and name not in users:
            raise InvalidState(
                f"{self.url}: {name} is a file of tensors; read(name) reads each of them"
            )

    def component(self, key: str, copy: int = 0) -> StoredComponent:
        """Values and tensors of one stored copy of a component. Of a sharded one, only the first
        index is read here.

        key: text, of the component.
        copy: int, which stored copy, in order of their lowest rank (default 0).

        KeyError when there is no such component, IndexError when it has fewer copies;
        CheckpointCorrupt; StateMismatch where nodes share no storage, and this is not the one that
        has it.
        """
        if self.manifest.components[key].pattern == "SHARDED":
            return self._sharded(key)
        stored_copy = self.manifest.copies(key)[copy]
        members = stored_copy.members
        if not self.manifest.holds(stored_copy):
            raise _on_other_nodes(
                self.url, self.manifest, f"component {key + stored_copy.label!r}", members
            )
        writers = [w for w in self.manifest.components[key].writers if w in members]
        parts = [part for w in writers if (part := self.index(w).components.get(key)) is not None]
        tree, versions = next(
            ((p.tree, p.versions) for p in parts if p.tree is not None), (None, None)
        )
        entries = (entry for part in parts for entry in part.tensors)
        found = sorted(entries, key=attrgetter("number"))
        numbers = [entry.number for entry in found]
        broken = numbers != list(range(len(found))) or any(
            not _sound_alias(e, found) for e in found
        )
        if tree is None or broken:
            name = index_file_name(members[0])
            raise self._corrupt(
                name, f"and those of ranks {writers} do not make up a whole of component {key!r}"
            )
        tensors = [LogicalTensor(e.name, e.dtype, e.shape, None, e.alias_of) for e in found]
        return StoredComponent(tree, tensors, partial(_whole, found), versions=versions)

    def _sharded(self, key: str) -> StoredComponent:
        if key not in self._tables:
            self._tables[key] = self._sharded_table(key)
        return self._tables[key]

    def _sharded_table(self, key: str) -> StoredComponent:
        lowest = self.manifest.stored_ranks[0]
        first = self.index(lowest).components.get(key)
        name = index_file_name(lowest)
        if first is None or first.tree is None or first.layouts is None:
            raise self._corrupt(name, f"has no table of the sharded component {key!r}")
        try:
            tensors = decode_layouts(
                first.layouts, self.manifest.world_size, holes=self.manifest.node is not None
            )
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise self._corrupt(
                name, f"has a table of component {key!r} that makes no sense ({error})"
            ) from None

        # Thousands of tensors are cut in the same way; what is alike is one object in the table.
        known: dict[tuple[int, tuple[int, ...], Box], list[tuple[int, Box]]] = {}

        def find(number: int, box: Box) -> Iterator[TensorEntry]:
            tensor = tensors[number]
            if tensor.layout is None:
                return
            like = id(tensor.layout), tensor.shape, box
            if (cuts := known.get(like)) is None:
                cuts = known[like] = _stored_cuts(self.url, self.manifest, key, tensor, box)
            for writer, held in cuts:
                yield self._piece(key, number, tensor, writer, held)

        return StoredComponent(first.tree, tensors, find, versions=first.versions)

    def _piece(
        self, key: str, number: int, tensor: LogicalTensor, writer: int, box: Box
    ) -> TensorEntry:
        """One box of a sharded tensor, where its writer put it."""
        name = index_file_name(writer)
        if (key, writer) not in self._pieces:
            part = self.index(writer).components.get(key)
            self._pieces[key, writer] = {p.number: p for p in (part.pieces if part else None) or ()}
        piece = self._pieces[key, writer].get(number)
        if piece is None:
            raise self._corrupt(
                name,
                f"lacks the box at {box[0]} of tensor {key + '/' + tensor.name!r}",
                tensor=tensor.name,
            )
        where = piece.file, tensor.name, piece.start, piece.digests
        entry = TensorEntry(number, tensor.name, tensor.dtype, tensor.shape, box[0], box[1], *where)
        end = self.index(writer).files[piece.file].size
        if writer not in self._starts:
            self._starts[writer] = self.index(writer).starts()
        starts = self._starts[writer][piece.file]
        after = bisect_right(starts, piece.start)
        nbytes = tensor_nbytes(tensor.dtype, box[1])
        if nbytes and after < len(starts):
            end = starts[after]  # what comes next: two boxes on the same bytes would be a trick
        if len(piece.digests) != DIGEST_BYTES * chunk_count(nbytes) or piece.start + nbytes > end:
            raise self._corrupt(
                name,
                f"and the table disagree about tensor {key + '/' + tensor.name!r}",
                tensor=tensor.name,
            )
        return entry

    def _stored(self, keys: Iterable[str] | None = None) -> Iterator[tuple[str, StoredComponent]]:
        """All copies of some components (None: of all) that this storage has. Where there are
        several, the label follows the name: "rng.rank00001"."""
        for key in self.manifest.components if keys is None else keys:
            for number, copy in enumerate(self.manifest.copies(key)):
                if self.manifest.holds(copy):
                    yield key + copy.label, self.component(key, number)

    def tensors(self) -> list[TensorInfo]:
        """All tensors, component by component. Reads the indexes, and no tensor bytes."""
        return [info for name, stored in self._stored() for info in _infos(name, stored)]

    def boxes(self, component: str, copy: int = 0) -> dict[str, list[StoredBox]]:
        """The boxes that each tensor of a component is stored in, by the tensor's name; those of
        the tensor that it is an alias of. Reads indexes, and no tensor bytes.

        component: text, its key.
        copy: int, which stored copy (one a rank, group or node), in order of their lowest rank
            (default 0).

        Raises what `values` raises.
        """
        self.check_copy(component, copy)
        stored = self.component(component, copy)
        return {
            tensor.name: [
                StoredBox(
                    piece.offset or (0,) * len(tensor.shape),
                    piece.local_shape,
                    piece.nbytes,
                    piece.file,
                    piece.start,
                    self.manifest.files[piece.file].writer,
                    piece.digests,
                )
                for piece in stored.pieces(number, tensor.whole)
                if piece.file is not None
            ]
            for number, tensor in enumerate(stored.tensors)
        }

    def dtypes(self, component: str, copy: int = 0) -> list[str]:
        """The dtypes of a component's tensors. Raises what `values` raises.

        component: text, its key.
        copy: int, which stored copy, as for `values` (default 0).
        """
        self.check_copy(component, copy)
        return sorted({tensor.dtype for tensor in self.component(component, copy).tensors})

    def values(self, component: str, copy: int = 0) -> Any:
        """The component's state as it was saved, with TensorInfo where there was a tensor, and
        Opaque where no codec is registered.

        component: text, its key.
        copy: int, which stored copy (one a rank, group or node), in order of their lowest rank
            (default 0).

        Raises UnknownName (a KeyError, and an IndexError) where there is no such component or copy,
        InvalidState for a copy that is no whole number, CheckpointCorrupt, StorageError.
        """
        self.check_copy(component, copy)
        stored = self.component(component, copy)
        infos = _infos(component + self.manifest.copies(component)[copy].label, stored)
        return decode(stored.tree, lambda ref: _pick(infos, ref), lenient=True, file=self.url)

    def check_copy(self, component: Any, copy: Any) -> None:
        """Raises UnknownName where there is no such component or copy, InvalidState for a copy that
        is no whole number.

        component: text, the key of a component.
        copy: int, which stored copy, as for `values`.
        """
        known = self.manifest.components
        if not isinstance(component, str) or component not in known:
            raise UnknownName(
                f"{self.url} has no component {shown(component)}; it has "
                f"{', '.join(known) or 'none'}",
                path=self.url,
                key=shown(component),
                available=[*known],
            )
        if check_count("copy", copy, 0) >= (count := len(self.manifest.copies(component))):
            raise UnknownName(
                f"{self.url}: component {component!r} has copies 0 to {count - 1}, and no {copy}",
                path=self.url,
                key=component,
                available=[str(n) for n in range(min(count, 1000))],
            )

    def values_bytes(self, component: str) -> int:
        """Bytes of a component's plain values as they are stored, of all its copies that this
        storage has. Reads their indexes.

        component: text, its key.

        Raises UnknownName when there is no such component, CheckpointCorrupt, StorageError.
        """
        return sum(len(stored.tree) for _, stored in self._stored([component]))

    def read(self, name: str, box: Sequence[slice] | None = None) -> Any:
        """A tensor, or a box of it, as a verified numpy array. Only what is needed is read,
        whatever layout it was saved in.

        Dtypes that numpy lacks come as unsigned integers of the same width
        (`torch.from_numpy(array).view(dtype)` gives values).

        name: text, "component/name".
        box: sequence of slices of step 1, one a dimension (default None: all).

        Raises UnknownName (a KeyError) where there is no such tensor, InvalidState (a ValueError)
        for a box that does not fit, CheckpointCorrupt, StorageError.
        """
        import numpy as np

        if not isinstance(name, str):
            raise InvalidState(f"the name of a tensor is text, 'component/name', not {shown(name)}")
        key, stored, number = self._locate(name)
        tensor = stored.tensors[number]
        wanted = _box(box, tensor.shape)
        # First that the bytes are there, then memory for them.
        pieces = list(stored.pieces(number, wanted))
        self.check_files(piece.file for piece in pieces if piece.file)
        array = np.empty(wanted[1], _numpy_dtype(tensor.dtype))
        # Items wider than a word get a last dimension of words.
        words = (
            array[..., None].view("u8") if array.itemsize > 8 else array.view(f"u{array.itemsize}")
        )
        reads = [read_of(key, piece, wanted, words) for piece in pieces]
        self.files.read(reads, io_threads=2)
        return array

    def portions(
        self, name: str, nbytes: int = 16 << 20
    ) -> Iterator[tuple[tuple[slice, ...], Any]]:
        """A whole tensor bit by bit: boxes in C order, and what `read` says of each.

        name: "component/name".
        nbytes: how much is read at a time, about (default 16 MiB).

        Raises what `read` does.
        """
        _, stored, number = self._locate(name)
        whole = stored.tensors[number]
        for box in portions_of(whole.shape, tensor_nbytes(whole.dtype, (1,)), nbytes):
            yield tuple(box), self.read(name, box)

    def _locate(self, name: str) -> tuple[str, StoredComponent, int]:
        """The copy of a component that a tensor is in, and its number there. Raises UnknownName."""
        if name not in self._found:
            self._found = {
                f"{key}/{tensor.name}": (key, stored, number)
                for key, stored in self._stored()
                for number, tensor in enumerate(stored.tensors)
            }
        if name in self._found:
            return self._found[name]
        names = [*self._found]
        few = len(names) <= 5000 and len(name) <= 1000  # more would take seconds
        near = get_close_matches(name, names, 3) if few else []
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else "tensors() lists those that it has"
        )
        raise UnknownName(
            f"{self.url} has no tensor {shown(name)}; {hint}",
            path=self.url,
            key=shown(name),
            available=names,
        )

    def check_files(self, files: Iterable[str], *, others: bool = False) -> None:
        """Check sizes and headers of tensor files whose indexes were read. Raises
        CheckpointCorrupt, StorageError.

        files: names, as in the manifest.
        others: bool, check what the manifest lists beside tensors and indexes, too (default False).
        """
        wanted = sorted(set(files))  # which may read indexes
        known = {name: f for index in self._indexes.values() for name, f in index.files.items()}
        for file in wanted:
            self.files.check_header(file, known[file])
        if others:
            self.check_small_files()

    def check_small_files(self) -> None:
        """Files that the manifest lists beside tensors and indexes. Raises CheckpointCorrupt,
        StorageError."""
        for name in self.manifest.files:
            if name.endswith(".safetensors.index.json"):
                self.read_file(name)

    def _check_size(self, file: str) -> None:
        self.files.open(file, self.manifest.files[file].size).close()

    def reads_of(self, index: Index) -> Iterator[TensorRead]:
        """Every stored byte of one writer, to be read and verified only.

        index: Index, that of the writer.
        """
        writer = index.writer
        for key, part in index.components.items():
            yield from (TensorRead(key, entry, None) for entry in part.tensors)
            tensors = self._sharded(key).tensors if part.pieces else []
            for number in (piece.number for piece in part.pieces or ()):
                what = f"has a piece of tensor {number} of {len(tensors)}"
                box = None
                if number < len(tensors):
                    tensor, what = tensors[number], f"has a piece of {tensors[number].name!r} that"
                    what += " is not its own"
                    layout = tensor.layout
                    box = None if layout is None else layout.box_of(tensor.shape, writer)
                if box is None:
                    raise self._corrupt(index_file_name(writer), what)
                yield TensorRead(key, self._piece(key, number, tensor, writer, box), None)

    def foreign_files(self) -> list[str]:
        """Names in the folder that the manifest does not list. Loading ignores them."""
        listed = {*self.manifest.files, MANIFEST_NAME, PIN_NAME}
        return [
            e.name + ("/" if e.is_folder else "")
            for e in self.storage.list(self.folder)
            if e.name not in listed
        ]

    def verify(
        self, io_threads: int = 2, progress: Callable[[int, int], None] | None = None
    ) -> list[Problem]:
        """Read and check every byte that the manifest lists. Empty when all is as it was saved.

        io_threads: int, how many threads read (default 2).
        progress: function of tensor bytes checked and tensor bytes in all (default None).
        """
        checks = _Checks()
        checked: set[str] = set()
        reads: list[TensorRead] = []
        for writer in sorted({w for c in self.manifest.components.values() for w in c.writers}):
            name = index_file_name(writer)
            checked.add(name)
            if not checks.attempt(name, self.index, writer):
                # What only this index describes is not to blame; its size is all that can be
                # checked.
                for file, record in self.manifest.files.items():
                    if record.writer == writer and file.endswith(".safetensors"):
                        checked.add(file)
                        checks.attempt(file, self._check_size, file)
                continue
            index, whole = self.index(writer), set()
            checked.update(index.files)
            for file, known in index.files.items():
                # Bytes behind a damaged header can be checked, those of a shorter file cannot.
                found = checks.attempt(file, self.files.check_header, file, known)
                if found or checks.problems[-1].kind == "header":
                    whole.add(file)
            found_reads: list[TensorRead] = []
            checks.attempt(
                name, lambda into, of: into.extend(self.reads_of(of)), found_reads, index
            )
            reads += [read for read in found_reads if read.entry.file in whole]
        for name in self.manifest.files.keys() - checked:
            checks.attempt(name, self.read_file, name)
        done, total, unreadable = 0, sum(read.entry.nbytes for read in reads), ""
        for batch in _batches(reads):
            file, done = _file_of(batch[0]), done + sum(read.entry.nbytes for read in batch)
            if file != unreadable:
                whole_batch = checks.attempt(file, self.files.read, batch, io_threads, checks.add)
                unreadable = unreadable if whole_batch else file
            if progress is not None:
                progress(done, total)
        return sorted(checks.problems, key=lambda p: (p.file, p.tensor or "", p.message))


class _Checks:
    """What was checked and found wrong."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def attempt(self, file: str, check: Callable[..., Any], *args: Any) -> bool:
        """Whether a check goes well; else what it raises is a problem of the file."""
        try:
            check(*args)
        except StorageError as error:
            self.problems.append(Problem(file, "storage", str(error)))
            return False
        except CheckpointCorrupt as error:
            self.add(error, file)
            return False
        return True

    def add(self, error: CheckpointCorrupt, file: str = "") -> None:
        where, kind = error.file or file, error.kind or "format"
        facts = error.tensor, error.expected, error.actual
        self.problems.append(Problem(where, kind, str(error), *facts))


def _batches(reads: Iterable[TensorRead]) -> Iterator[list[TensorRead]]:
    """By file, in portions after which somebody who waits can be told."""
    for _, mine in groupby(sorted(reads, key=_file_of), key=_file_of):
        batch: list[TensorRead] = []
        nbytes = 0
        for read in mine:
            batch.append(read)
            nbytes += read.entry.nbytes
            if nbytes >= PORTION:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch


def _file_of(read: TensorRead) -> str:
    return read.entry.file or ""


def _on_other_nodes(
    url: str, manifest: CheckpointManifest, what: str, saved_by: Sequence[int] = ()
) -> StateMismatch:
    """The error for something that only the storage of other nodes has. saved_by: the ranks that
    had it."""
    ranks, more = manifest.stored_ranks[:8], ", ..." if len(manifest.stored_ranks) > 8 else ""
    others = [str(n) for n, on in enumerate(manifest.nodes) if not set(on).isdisjoint(saved_by)]
    where = f", but on node {', '.join(others[:8])}" if others else ""
    return StateMismatch(
        f"{url}: {what} is not on this node, whose storage has the part that node {manifest.node} "
        f"of {len(manifest.nodes)} (ranks {', '.join(map(str, ranks))}{more}) saved{where}. With "
        "storage_mode='node' every rank restores from its own node alone: start as many ranks on "
        "each node as at the save, on the same nodes (or copy each node's folder to the node that "
        "takes its place); to change the layout, save with storage_mode='shared' where all nodes "
        "see the files",
        path=url,
    )


def _stored_cuts(
    url: str, manifest: CheckpointManifest, key: str, tensor: LogicalTensor, box: Box
) -> list[tuple[int, Box]]:
    """(writer, its box) for what is stored of `box` of a tensor that has a layout. Raises
    StateMismatch when some of it is on other nodes."""
    assert tensor.layout is not None
    found = list(tensor.layout.cuts(tensor.shape, box))
    if manifest.node is None:
        return found
    common = (intersection(held, box) for _, held in found)
    if sum(volume(part[1]) for part in common if part is not None) != volume(box[1]):
        raise _on_other_nodes(
            url,
            manifest,
            f"component {key!r}: all of the part at {list(box[0])} of shape {list(box[1])} of "
            f"tensor {tensor.name!r}",
        )
    return found


def _whole(entries: Sequence[TensorEntry], number: int, box: Box) -> Iterator[TensorEntry]:
    """What is stored of a tensor that is not sharded and meets `box`."""
    return iter([entries[number]] if volume(box[1]) else [])


def _sound_alias(entry: TensorEntry, found: Sequence[TensorEntry]) -> bool:
    """Whether an alias is one of a tensor of the same kind that has bytes of its own."""
    if entry.alias_of is None:
        return True
    target = found[entry.alias_of] if entry.alias_of < len(found) else entry
    return target.alias_of is None and (target.dtype, target.shape) == (entry.dtype, entry.shape)


def _infos(component: str, stored: StoredComponent) -> list[TensorInfo]:
    infos = []
    for number, t in enumerate(stored.tensors):
        held = t if t.alias_of is None else stored.tensors[t.alias_of]
        file = alias = layout = None
        if held.layout is None:
            file = next((piece.file for piece in stored.pieces(number, t.whole)), None)
        else:  # which files have it the indexes of all its writers say, which are not read for this
            layout = held.layout.words()
        if t.alias_of is not None:
            alias = held.name
        nbytes = tensor_nbytes(t.dtype, t.shape)
        infos.append(TensorInfo(component, t.name, t.dtype, t.shape, nbytes, file, alias, layout))
    return infos


def _pick(infos: list[TensorInfo], ref: TensorRef) -> TensorInfo:
    if not 0 <= ref.index < len(infos):
        raise ValueError(f"the tree refers to tensor {ref.index} of {len(infos)}")
    return infos[ref.index]


def portions_of(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[list[slice]]:
    """Boxes of at most about `limit` bytes that make up a tensor, in C order."""
    if not shape or volume(shape) * itemsize <= limit:
        yield [slice(0, n) for n in shape]
        return
    row = volume(shape[1:]) * itemsize
    if row > limit:
        for number in range(shape[0]):
            for box in portions_of(shape[1:], itemsize, limit):
                yield [slice(number, number + 1), *box]
        return
    step = max(1, limit // max(row, 1))
    for start in range(0, shape[0], step):
        yield [slice(start, min(start + step, shape[0])), *(slice(0, n) for n in shape[1:])]


def _box(box: Sequence[slice] | None, shape: tuple[int, ...]) -> Box:
    if box is None:
        return (0,) * len(shape), shape
    ends = (int, type(None))
    slices = isinstance(box, list | tuple) and all(
        isinstance(s, slice)
        and isinstance(s.start, ends)
        and isinstance(s.stop, ends)
        and s.step in (None, 1)
        for s in box
    )
    if not slices or len(box) != len(shape):
        raise InvalidState(
            f"a box of a tensor of shape {shape} is one slice of step 1 per dimension, not "
            f"{shown(box)}"
        )
    ranges = [range(n)[s] for s, n in zip(box, shape, strict=True)]
    return tuple(r.start for r in ranges), tuple(len(r) for r in ranges)


_NUMPY = {"BOOL": "bool", "F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8", "complex128": "c16"}


def _numpy_dtype(dtype: str) -> str:
    if dtype in _NUMPY:
        return _NUMPY[dtype]
    kind = "i" if dtype in ("I8", "I16", "I32", "I64") else "u"
    return f"{kind}{DTYPES[dtype].itemsize}"
