"""One committed checkpoint, read-only and without torch: manifest, indexes, values, tensors, verification."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import CheckpointCorrupt, StorageError
from ..format.digest import content_digest
from ..format.index import Index, TensorEntry, index_file_name
from ..format.manifest import MANIFEST_NAME, CheckpointManifest
from ..format.tensorfile import DTYPES
from ..format.values import TensorRef, decode
from ..root import join, read_manifest
from ..storage.base import Storage, open_storage
from .reader import TensorRead, check_header, open_member, read_tensors

__all__ = ["CheckpointView", "Problem", "TensorInfo", "open_checkpoint"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One logical tensor. `path` is its name in parts; `alias_of` the name of the tensor that holds its bytes."""

    component: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str | None
    alias_of: str | None

    @property
    def full_name(self) -> str:
        return f"{self.component}/{self.name}"

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(part.replace("~1", "/").replace("~0", "~") for part in self.name.split("/"))


@dataclass(frozen=True, slots=True)
class MergedComponent:
    """One copy of a component: encoded values, and the tensors that its TensorRefs number."""

    tree: bytes
    tensors: list[TensorEntry]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one file: kind is "missing", "size", "digest", "header", "format" or "storage"."""

    file: str
    kind: str
    message: str
    tensor: str | None = None
    expected: str | int | None = None
    actual: str | int | None = None


def open_checkpoint(url: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> CheckpointView:
    """The checkpoint in the folder `url`.

    Raises CheckpointNotFound, CheckpointCorrupt (the manifest is damaged), UnsupportedVersion, StorageError.
    """
    return CheckpointView(open_storage(url, storage_options), "")


class CheckpointView:
    """A committed checkpoint. Its manifest has been verified; indexes are read and verified when first asked for."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self.storage, self.folder = storage, folder
        self.url = storage.at(folder).rstrip("/")
        self.name = self.url.rsplit("/", 1)[-1]
        self.manifest: CheckpointManifest = read_manifest(storage, folder)
        self._indexes: dict[int, Index] = {}

    def __enter__(self) -> CheckpointView:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def index(self, writer: int) -> Index:
        """What rank `writer` wrote; verified against the manifest, down to the digests of its tensor files."""
        if writer not in self._indexes:
            name = index_file_name(writer)
            record = self.manifest.files.get(name)
            if record is None:
                raise self._corrupt(MANIFEST_NAME, f"lists no {name}, which a component needs")
            data = self._checked(name)
            index = Index.decode(data, self.storage.at(join(self.folder, name)))
            for file, digest in index.file_digests().items():
                known = self.manifest.files.get(file)
                if known is None or known.digest != digest or known.size != index.files[file].size:
                    raise self._corrupt(name, f"and the manifest disagree about {file}")
            self._indexes[writer] = index
        return self._indexes[writer]

    def _corrupt(self, file: str, what: str, kind: str = "format", **facts: Any) -> CheckpointCorrupt:
        where = self.storage.at(join(self.folder, file))
        return CheckpointCorrupt(f"{where} {what}", path=self.url, file=file, kind=kind, **facts)

    def _checked(self, name: str) -> bytes:
        """A whole small file that the manifest has a digest of."""
        record = self.manifest.files[name]
        with open_member(self.storage, self.folder, name, record.size) as reader:
            data = bytearray(record.size)
            reader.read_into(0, [memoryview(data)])
        actual = content_digest(data)
        if actual != record.digest:
            raise self._corrupt(name, f"is damaged: digest {actual}, the manifest says {record.digest}", "digest",
                                expected=record.digest, actual=actual)  # fmt: skip
        return bytes(data)

    def component(self, key: str, copy: int = 0) -> MergedComponent:
        """Values and tensors of one stored copy of a component, put together from the indexes of its writers.

        KeyError when there is no such component, IndexError when it has fewer copies; CheckpointCorrupt.
        """
        members = self.manifest.copies(key)[copy].members
        writers = [w for w in self.manifest.components[key].writers if w in members]
        parts = [part for w in writers if (part := self.index(w).components.get(key)) is not None]
        tree = next((part.tree for part in parts if part.tree is not None), None)
        found = sorted((entry for part in parts for entry in part.tensors), key=lambda entry: entry.number)
        numbers = [entry.number for entry in found]
        broken = numbers != list(range(len(found))) or any(
            e.alias_of is not None and (e.alias_of >= len(found) or found[e.alias_of].alias_of is not None)
            for e in found
        )
        if tree is None or broken:
            name = index_file_name(members[0])
            raise self._corrupt(name, f"and those of ranks {writers} do not make up a whole of component {key!r}")
        return MergedComponent(tree, found)

    def entries(self) -> Iterator[tuple[str, TensorEntry, TensorEntry]]:
        """(component, tensor, the tensor that holds its bytes: itself or its alias target) for all copies of all.

        Where a component has several copies, its name here is followed by the label of the copy: "rng.rank00001".
        """
        for key in self.manifest.components:
            copies = self.manifest.copies(key)
            for number, copy in enumerate(copies):
                tensors = self.component(key, number).tensors
                for entry in tensors:
                    yield key + copy.label, entry, entry if entry.alias_of is None else tensors[entry.alias_of]

    def tensors(self) -> list[TensorInfo]:
        """All tensors, component by component. Reads the indexes, and no tensor bytes."""
        return [_info(key, entry, held) for key, entry, held in self.entries()]

    def values(self, component: str, copy: int = 0) -> Any:
        """The component's state as it was saved, with TensorInfo where there was a tensor.

        copy: which of several (one per rank, group or node), in order of their lowest rank. KeyError when there is no such component. Values of unregistered codecs come as `Opaque`.
        """
        held = self.component(component, copy)
        infos = [
            _info(component, e, e if e.alias_of is None else held.tensors[e.alias_of]) for e in held.tensors
        ]  # fmt: skip
        return decode(held.tree, lambda ref: _pick(infos, ref), lenient=True, file=self.url)

    def read(self, name: str, box: Sequence[slice] | None = None) -> Any:
        """A tensor as a numpy array, verified; `box`: one slice (of step 1) per dimension.

        `name` is "component/name". Dtypes that numpy lacks come as unsigned integers of the same width.
        KeyError when there is no such tensor, CheckpointCorrupt, StorageError.
        """
        import numpy as np

        for key, entry, held in self.entries():
            if f"{key}/{entry.name}" == name:
                array = np.empty(entry.shape, _numpy_dtype(entry.dtype))
                flat = memoryview(array.reshape(-1).view(np.uint8).data) if array.size else memoryview(b"")
                self.check_files([held.file] if held.file else [])
                read_tensors(self.storage, self.folder, [TensorRead(key, held, _Memory(flat))], io_threads=2)
                return array if box is None else array[tuple(box)].copy()
        raise KeyError(f"{self.url} has no tensor {name!r}")

    def check_files(self, files: Iterable[str]) -> None:
        """Sizes and headers of tensor files whose indexes were read. Raises CheckpointCorrupt, StorageError."""
        known = {name: entry for index in self._indexes.values() for name, entry in index.files.items()}
        for file in sorted(set(files)):
            check_header(self.storage, self.folder, file, known[file])

    def _check_size(self, file: str) -> None:
        open_member(self.storage, self.folder, file, self.manifest.files[file].size).close()

    def foreign_files(self) -> list[str]:
        """Names in the folder that the manifest does not list. Loading ignores them."""
        listed = {*self.manifest.files, MANIFEST_NAME}
        return [e.name + ("/" if e.is_folder else "") for e in self.storage.list(self.folder) if e.name not in listed]

    def verify(self, io_threads: int = 2) -> list[Problem]:
        """Read and check every byte that the manifest lists. Empty when all is as it was saved."""
        problems: list[Problem] = []
        checked: set[str] = set()
        reads: list[TensorRead] = []

        def attempt(file: str, check: Callable[[], Any]) -> bool:
            try:
                check()
            except (CheckpointCorrupt, StorageError) as error:
                problems.append(_problem(error, file))
                return False
            return True

        for writer in sorted({w for c in self.manifest.components.values() for w in c.writers}):
            name = index_file_name(writer)
            checked.add(name)
            if not attempt(name, partial(self.index, writer)):
                # What only this index describes is not to blame; its size is all that can be checked.
                for file, record in self.manifest.files.items():
                    if record.writer == writer and file.endswith(".safetensors"):
                        checked.add(file)
                        attempt(file, partial(self._check_size, file))
                continue
            index = self.index(writer)
            checked.update(index.files)
            whole = {f for f, known in index.files.items()
                     if attempt(f, partial(check_header, self.storage, self.folder, f, known))
                     or problems[-1].kind == "header"}  # fmt: skip
            reads += [TensorRead(key, entry, None) for key, component in index.components.items()
                      for entry in component.tensors if entry.file in whole]  # fmt: skip
        for name in self.manifest.files.keys() - checked:
            attempt(name, partial(self._checked, name))
        for file in sorted({read.entry.file or "" for read in reads}):
            mine = [read for read in reads if read.entry.file == file]
            attempt(file, lambda mine=mine: read_tensors(  # type: ignore[misc]
                self.storage, self.folder, mine, io_threads, lambda e: problems.append(_problem(e, e.file or ""))))  # fmt: skip
        return sorted(problems, key=lambda p: (p.file, p.tensor or "", p.message))


def _problem(error: CheckpointCorrupt | StorageError, file: str) -> Problem:
    if isinstance(error, StorageError):
        return Problem(file, "storage", str(error))
    return Problem(error.file or file, error.kind or "format", str(error), error.tensor, error.expected, error.actual)


def _info(component: str, entry: TensorEntry, held: TensorEntry) -> TensorInfo:
    alias = None if held is entry else held.name
    return TensorInfo(component, entry.name, entry.dtype, entry.shape, entry.nbytes, held.file, alias)


def _pick(infos: list[TensorInfo], ref: TensorRef) -> TensorInfo:
    if not 0 <= ref.index < len(infos):
        raise ValueError(f"the tree refers to tensor {ref.index} of {len(infos)}")
    return infos[ref.index]


class _Memory:
    """A Target of contiguous bytes."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    def view(self, start: int, stop: int) -> memoryview:
        return self.memory[start:stop]

    def put(self, start: int, data: memoryview) -> None:
        self.memory[start : start + len(data)] = data


_NUMPY = {"BOOL": "bool", "F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8", "complex128": "c16"}


def _numpy_dtype(dtype: str) -> str:
    if dtype in _NUMPY:
        return _NUMPY[dtype]
    kind = "i" if dtype in ("I8", "I16", "I32", "I64") else "u"
    return f"{kind}{DTYPES[dtype].itemsize}"
