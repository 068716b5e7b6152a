"""Checkpoints of what other libraries wrote."""

from __future__ import annotations

import datetime
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ..arguments import check_path
from ..catalog.folder import CheckpointInfo
from ..errors import CheckpointCorrupt, InvalidState
from ..loading.load import LoadReport
from ..loading.view import CheckpointView, TensorInfo, open_checkpoint
from ..manager import CheckpointManager
from ..ranks.communicator import SingleProcess
from ..state.component import SharingPattern, StateComponent
from ..storage.urls import masked_url, split_url
from .optimizer_names import made
from .pickles import Foreign
from .scratch import Scratch, from_numpy
from .sources import Part, Reading, Source, read_source
from .transfer import fetched

__all__ = ["ImportReport", "ImportedComponent", "import_checkpoint", "load_foreign"]

_REQUIRED = re.compile(r"(model|optimizer|scheduler|scaler)\d*")
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    np.ndarray,
    np.generic,
    datetime.datetime,
)


@dataclass(frozen=True, slots=True)
class ImportedComponent:
    """key, pattern: of the component; origin: the file that it comes from."""

    key: str
    pattern: str
    origin: str
    tensors: int
    size_bytes: int


@dataclass(slots=True)
class ImportReport:
    """What an import found, or would do.

    source: text, path or URL of what was read.
    format: text, the format as it was recognised.
    step: int, of the checkpoint.
    components: list of ImportedComponent, those of the checkpoint.
    left: list of text, what was not taken, and why.
    checks: list of text, what was compared.
    info: CheckpointInfo, what was made; None for a dry run.
    verified: int, how many tensors were read back and compared.
    """

    source: str
    format: str
    step: int
    components: list[ImportedComponent] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    info: CheckpointInfo | None = None
    verified: int = 0


def import_checkpoint(
    source: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    format: str = "auto",
    step: int | None = None,
    model: nn.Module | Callable[[], nn.Module] | str | None = None,
    names: Sequence[Sequence[str]] | None = None,
    components: Mapping[str, str] | None = None,
    rename: Callable[[str], str] | None = None,
    storage_options: dict[str, Any] | None = None,
    source_options: dict[str, Any] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    scratch: str | os.PathLike[str] | None = None,
    max_download: int | None = None,
) -> ImportReport:
    """Make a checkpoint of what another library wrote; verified bit by bit against it afterwards.

    source: a folder or file: a local path, or a URL, which is downloaded to `scratch` first.
    root: the root that gets the checkpoint, or its folder where the last name is
        checkpoint-<number>.
    format: "auto" (default), or one of `ckptcore.interop.sources.FORMATS`.
    step: int, of the checkpoint (default None: what the source says, else 0).
    model: the model whose state it is, or what makes it, also as text "module:function"; on the
        meta device is enough. It says the names of an optimizer's parameters, and which are tied.
        Default: by config.json, where transformers knows it.
    names: sequence of groups, each a sequence of the names of the optimizer's parameters, where
        there is no model to give them (default None).
    components: dict of the key that the import gives a component -> another key; "" leaves it out
        (default None).
    rename: function of the name of a model's tensor that returns the name to store it by (default
        None: as it is).
    storage_options: dict for the filesystem of `root` (default None).
    source_options: dict for the filesystem of `source` (default None: that of `root`).
    overwrite: bool, replace a checkpoint that is there (default False).
    dry_run: bool, only report what would be done (default False).
    scratch: a folder for what is downloaded or put together from parts (default: that of temporary
        files).
    max_download: bytes; a remote source with more is refused (default: nine tenths of what is free
        in `scratch`).

    Raises InvalidState, CheckpointNotFound, CheckpointExists, StorageError, OSError. No file is
    ever executed: what could not be read without is in `left`.
    """
    root = check_path("root", root)
    options = storage_options if source_options is None else source_options
    known = model if model is None or isinstance(model, nn.Module) else made(model)
    with fetched(source, options, scratch, max_download) as local, Scratch(scratch) as mapped:
        shown = masked_url(os.fspath(source))
        found = read_source(local.path, shown, format, Reading(mapped, known, names))
        if local.downloaded is not None:
            found.checks.insert(0, local.downloaded)
        parts = [_renamed(part, components or {}, rename) for part in found.parts]
        parts = [
            Part(p.key, _storable(p.state, p.key, found.left), p.origin, p.per_rank)
            for p in parts
            if p.key
        ]
        target, number = _root_and_step(root, found.step if step is None else step)
        report = ImportReport(
            found.shown, found.format, number, left=found.left, checks=found.checks
        )
        report.components = [_described(part) for part in parts]
        if dry_run:
            return report
        _save(report, parts, found, target, storage_options, overwrite)
        return report


def _save(
    report: ImportReport,
    parts: list[Part],
    source: Source,
    target: str,
    options: dict[str, Any] | None,
    overwrite: bool,
) -> None:
    state = [
        StateComponent(
            part.key,
            part.state,
            SharingPattern.PER_RANK if part.per_rank else SharingPattern.GLOBAL,
            required=_REQUIRED.fullmatch(part.key) is not None,
        )
        for part in parts
    ]
    about = {"imported_from": source.shown, "format": source.format, "left": source.left}
    with CheckpointManager(target, comm=SingleProcess(), storage_options=options) as manager:
        report.info = manager.save(report.step, state, metadata=about, overwrite=overwrite)
    with open_checkpoint(report.info.url, storage_options=options) as view:
        report.verified = sum(_compare(view, part) for part in parts)


def load_foreign(
    state: Any,
    source: str | os.PathLike[str],
    *,
    format: str = "auto",
    model: nn.Module | Callable[[], nn.Module] | str | None = None,
    names: Sequence[Sequence[str]] | None = None,
    strict: bool = True,
    cast: bool = False,
    storage_options: dict[str, Any] | None = None,
    scratch: str | os.PathLike[str] | None = None,
) -> LoadReport:
    """Load into live `state` what another library wrote, without keeping a checkpoint of it.

    state: as of `CheckpointManager.load`.
    source: a folder or file: a local path, or a URL.
    format, model, names: as of `import_checkpoint`.
    strict, cast: as of `CheckpointManager.load`.
    storage_options: of `source` (default None).
    scratch: a folder with room for the whole of it (default: that of temporary files).

    Raises what `import_checkpoint` and `CheckpointManager.load` do.
    """
    with tempfile.TemporaryDirectory(prefix="ckptcore-", dir=scratch) as folder:
        report = import_checkpoint(
            source,
            folder,
            format=format,
            model=model,
            names=names,
            storage_options={},
            source_options=storage_options or {},
            scratch=scratch,
        )
        with CheckpointManager(folder, comm=SingleProcess()) as manager:
            return manager.load(state, report.step, strict=strict, cast=cast)


def _root_and_step(root: str, step: int | None) -> tuple[str, int]:
    """The root, and the step. Raises InvalidState where the folder says another one."""
    around, name = split_url(root)
    match = re.fullmatch(r"checkpoint-(0|[1-9][0-9]*)", name)
    if match is None:
        return root, 0 if step is None else step
    number = int(match[1])
    if step not in (None, number):
        raise InvalidState(f"step {step} cannot become {name}: give the root, or another step")
    return around, number


def _renamed(part: Part, keys: Mapping[str, str], rename: Callable[[str], str] | None) -> Part:
    state = part.state
    if rename is not None and part.key.startswith("model"):
        state = {rename(name): value for name, value in state.items()}
        if len(state) < len(part.state):
            raise InvalidState(f"rename gives two tensors of {part.origin} the same name")
    return Part(keys.get(part.key, part.key), state, part.origin, part.per_rank)


def _storable(value: Any, path: str, left: list[str]) -> Any:
    """`value` in types that a checkpoint holds; what it cannot hold is listed, and gone."""
    if isinstance(value, torch.Tensor):
        plain = value.layout == torch.strided and not value.is_quantized and not value.is_meta
        if type(value) not in (torch.Tensor, nn.Parameter) or not plain:
            left.append(f"{path}: a {type(value).__qualname__} that is not a plain tensor")
            return None
        return value.detach()
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, _PLAIN) else str(key): _storable(item, f"{path}/{key}", left)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_storable(item, f"{path}/{number}", left) for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(_storable(item, f"{path}/{number}", left) for number, item in enumerate(value))
    if isinstance(value, _PLAIN) or (
        isinstance(value, set | frozenset) and all(isinstance(item, _PLAIN) for item in value)
    ):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    what = value.of if isinstance(value, Foreign) else kind
    left.append(f"{path}: an object of {what}, which is not read")
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _described(part: Part) -> ImportedComponent:
    tensors = {
        (t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.dtype): t.nbytes
        for t in _tensors(part.state)
    }
    pattern = SharingPattern.PER_RANK if part.per_rank else SharingPattern.GLOBAL
    count = sum(1 for _ in _tensors(part.state))
    return ImportedComponent(part.key, pattern.value, part.origin, count, sum(tensors.values()))


def _compare(view: CheckpointView, part: Part) -> int:
    """Read back all tensors of a component, and count them. Raises CheckpointCorrupt."""
    count = 0
    for info, tensor in _pairs(view.values(part.key), part.state):
        count += 1
        for box, array in view.portions(info.full_name):
            if not _same_bytes(from_numpy(array, info.dtype), tensor[box]):
                raise CheckpointCorrupt(
                    f"{view.url}: tensor {info.full_name!r} is not what {part.origin} holds",
                    path=view.url,
                    tensor=info.name,
                )
    return count


def _pairs(saved: Any, state: Any) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield saved, state
    elif isinstance(state, Mapping):
        for key, item in state.items():
            yield from _pairs(saved[key], item)
    elif isinstance(state, list | tuple):
        for before, item in zip(saved, state, strict=True):
            yield from _pairs(before, item)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(left, right)
