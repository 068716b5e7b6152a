"""What other libraries read, out of a checkpoint in any layout, without a process group."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ..errors import InvalidArgument, InvalidState, StorageError
from ..loading.view import CheckpointView, TensorInfo, open_checkpoint
from ..storage.urls import masked_url
from .dcp import read_dcp
from .optimizer_names import with_parameter_lists
from .pickles import load_file
from .quantization import Quantizer
from .scratch import TORCH_DTYPES, Scratch, from_numpy, torch_dtype
from .transfer import Target, check_free, made_locally, opened_target

__all__ = ["FORMATS", "ExportReport", "export_checkpoint"]

FORMATS = ("hf", "torch", "dcp")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_WORDS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}


@dataclass(slots=True)
class ExportReport:
    """What an export wrote, or would write.

    source: the checkpoint.
    folder: where it went.
    format: that of the files.
    components: that were taken.
    tensors: how many.
    size_bytes: of them all.
    files: sizes in bytes by name.
    left: what was not taken, and why.
    cast: how many tensors have another dtype than in the checkpoint.
    quantized: how many weights of linear layers are in few bits.
    verified: how many tensors were read back and compared.
    """

    source: str
    folder: str
    format: str
    components: list[str] = field(default_factory=list)
    tensors: int = 0
    size_bytes: int = 0
    files: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    cast: int = 0
    quantized: int = 0
    verified: int = 0


@dataclass(frozen=True, slots=True)
class _Selection:
    """Which tensors, under which names, in which dtype."""

    dtype: torch.dtype | None
    keys: tuple[str, ...]
    rename: tuple[tuple[str, str], ...]

    def takes(self, name: str) -> bool:
        return not self.keys or any(fnmatchcase(name, key) for key in self.keys)

    def name(self, name: str) -> str:
        for old, new in self.rename:
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        floating = dtype.is_floating_point and dtype.itemsize > 1
        return self.dtype if self.dtype is not None and floating else dtype


def export_checkpoint(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    format: str = "hf",
    component: str | None = None,
    dtype: str | torch.dtype | None = None,
    keys: list[str] | tuple[str, ...] = (),
    rename: Mapping[str, str] | None = None,
    max_shard_size: int | str = "5GB",
    quantize: str | None = None,
    model: Callable[[], torch.nn.Module] | str | None = None,
    linear: list[str] | tuple[str, ...] = (),
    storage_options: dict[str, Any] | None = None,
    target_options: dict[str, Any] | None = None,
    dry_run: bool = False,
    scratch: str | os.PathLike[str] | None = None,
) -> ExportReport:
    """Write a checkpoint as another library reads it; what was written is read back and compared.

    source: the folder of a checkpoint, or its URL.
    folder: a local one, or a URL, that is not there yet, or empty; for "torch" the file. What
        goes to a URL as "hf" is streamed; "torch" and "dcp" are made in `scratch` first.
    format: "hf": a Hugging Face folder of safetensors files, of one component (default); "torch": a
        file of torch.save; "dcp": a folder of torch.distributed.checkpoint.
    component: the one to take. By default "model" for "hf", and else all of them.
    dtype: of floating point tensors: a torch dtype, or "bf16", "fp16", "fp32" (default: as saved).
    keys: patterns of names of tensors to take (default: all).
    rename: new beginnings of names, by old ones; the first that fits counts.
    max_shard_size: of a safetensors file: bytes, or as in "5GB" (default).
    quantize: a recipe for weights of linear layers, as `quantization_config` takes it (default
        None); for "hf". The one file has torchao's names, and the recipe in its header.
    model: what makes the model, or "module:function": it says which layers are linear.
    linear: patterns of names of their weights, where there is no `model`.
    storage_options: of `source` (default None).
    target_options: of `folder` (default: those of `source`).
    dry_run: only say what would be written (default False).
    scratch: a folder for what "torch" and "dcp" pass through (default: that of temporary files).

    Raises InvalidState, CheckpointExists, CheckpointNotFound, CheckpointCorrupt, StorageError,
    OSError.
    """
    target = os.fspath(folder)
    selection = _Selection(_dtype(dtype), tuple(keys), tuple((rename or {}).items()))
    report = ExportReport(str(source), masked_url(target), format)
    options = storage_options if target_options is None else target_options
    if format not in FORMATS:
        raise InvalidArgument(f"format {format!r} is not one of {', '.join(FORMATS)}")
    limit = _bytes(max_shard_size)
    if not dry_run:
        check_free(target, options)
    with open_checkpoint(source, storage_options=storage_options) as view, Scratch(scratch) as held:
        if quantize is not None:
            if format != "hf":
                raise InvalidArgument(f"what is quantised is written as 'hf', not as {format!r}")
            quantizer = Quantizer(quantize, model, linear, view.manifest.metadata)
            tensors = _quantized(view, component, selection, quantizer, report)
            if not dry_run:
                with opened_target(target, options) as into:
                    _write_quantized(view, into, tensors, quantizer, selection, report)
            return report
        if format == "hf":
            shards = _planned(view, component, selection, limit, report)
            if not dry_run:
                with opened_target(target, options) as into:
                    _hugging_face(view, into, shards, selection, report)
            return report
        state = _whole(view, component, selection, held, report, dry_run)
        if dry_run:
            return report
        with made_locally(target, options, scratch) as made:
            if format == "torch":
                torch.save(state, made)
                report.verified = _equal(state, load_file(made))
                report.files = {made.name: made.stat().st_size}
            else:
                save(state, storage_writer=FileSystemWriter(str(made)), no_dist=True)
                again = read_dcp(made, held, report.left)
                report.verified = _equal_tensors(state, again)
                report.files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    return report


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, _WORDS.get(dtype, dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidArgument(f"{dtype!r} is no floating point dtype: bf16, fp16, fp32, ...")
    return found


def _bytes(size: int | str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]i?B)?\s*", str(size), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise InvalidArgument(f"max_shard_size {size!r} is no size such as 5GB")
    return int(match[1]) * _UNITS[(match[2] or "").upper()]


# ---------------------------------------------------------------- Hugging Face


Shards = dict[str, dict[str, TensorInfo]]


def _planned(
    view: CheckpointView,
    component: str | None,
    selection: _Selection,
    limit: int,
    report: ExportReport,
) -> Shards:
    """Tensors by file and name."""
    key = _model_of(view, component)
    report.components = [key]
    shards = _sharded(_chosen(view, key, selection, report), selection, limit)
    count = len(shards)
    names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    found = dict(zip(names if count > 1 else ["model.safetensors"], shards, strict=True))
    report.files = {
        name: sum(_nbytes(info, selection) for info in shard.values())
        for name, shard in found.items()
    } | {name: len(data) for name, data in _files(view, selection).items()}
    return found


def _hugging_face(
    view: CheckpointView, into: Target, shards: Shards, selection: _Selection, report: ExportReport
) -> None:
    """The weights first, and what says what they are after them."""
    for name, shard in shards.items():
        _write_safetensors(view, into, name, shard, selection)
        report.verified += len(shard)
    files = _files(view, selection)
    if len(shards) > 1:
        weights = {tensor: name for name, shard in shards.items() for tensor in shard}
        index = {"metadata": {"total_size": report.size_bytes}, "weight_map": weights}
        files["model.safetensors.index.json"] = (json.dumps(index, indent=2) + "\n").encode()
    for name, data in files.items():
        into.write(name, len(data), iter([data]))
    report.files = dict(sorted(into.files.items()))


def _quantized(
    view: CheckpointView,
    component: str | None,
    selection: _Selection,
    quantizer: Quantizer,
    report: ExportReport,
) -> dict[str, torch.Tensor]:
    """All tensors, the weights of linear layers in few bits."""
    key = _model_of(view, component)
    report.components = [key]
    found: dict[str, torch.Tensor] = {}
    for name, info in _chosen(view, key, selection, report).items():
        dtype = selection.dtype_of(torch_dtype(info.dtype))
        tensor = torch.empty(info.shape, dtype=dtype)
        for box, array in view.portions(info.full_name):
            tensor[box] = from_numpy(array, info.dtype).to(dtype)
        if quantizer.takes(_plain(info.name), tuple(tensor.shape)):
            if (why := quantizer.misfit(tuple(tensor.shape))) is not None:
                report.left.append(f"{name}: not quantised ({why})")
            else:
                tensor = quantizer.quantized(name, tensor)
                report.quantized += 1
        found[name] = tensor
    if not report.quantized:
        raise InvalidState(f"no weight of {key!r} is quantised: no linear layer fits the recipe")
    return found


def _write_quantized(
    view: CheckpointView,
    into: Target,
    tensors: dict[str, torch.Tensor],
    quantizer: Quantizer,
    selection: _Selection,
    report: ExportReport,
) -> None:
    parts, header = quantizer.flattened(tensors)
    data = safetensors_bytes(parts, metadata=header)
    into.write("model.safetensors", len(data), iter([data]))
    report.verified = len(tensors)
    report.size_bytes = sum(part.nbytes for part in parts.values())
    files = _files(view, selection)
    if "config.json" in files:
        document = {
            **json.loads(files["config.json"]),
            "quantization_config": quantizer.described(),
        }
        files["config.json"] = (json.dumps(document, indent=2) + "\n").encode()
    for name, content in files.items():
        into.write(name, len(content), iter([content]))
    report.files = dict(sorted(into.files.items()))


def _plain(name: str) -> str:
    """A stored name as users know it."""
    return name.replace("/", ".").replace("~1", "/").replace("~0", "~")


def _model_of(view: CheckpointView, component: str | None) -> str:
    known = view.manifest.components
    if component is not None and component not in known:
        raise InvalidState(f"{view.url} has no component {component!r}; it has {', '.join(known)}")
    if component is None and "model" not in known:
        raise InvalidState(f"{view.url} has no component 'model': say which of {', '.join(known)}")
    return component or "model"


def _chosen(
    view: CheckpointView, key: str, selection: _Selection, report: ExportReport
) -> dict[str, TensorInfo]:
    """Tensors of one copy of a component by the names that they get; tied ones once."""
    copies = view.manifest.copies(key)
    if len(copies) > 1:
        report.left.append(f"{key}: {len(copies) - 1} of {len(copies)} copies; the first is taken")
    found: dict[str, TensorInfo] = {}
    for info in _infos(view.values(key)):
        if not selection.takes(info.name):
            continue
        name = selection.name(_plain(info.name))
        if info.alias_of is not None:
            report.left.append(f"{name}: tied to {info.alias_of}, which is written")
            continue
        if name in found:
            raise InvalidState(f"two tensors of {key!r} would be called {name!r}", key=name)
        if info.dtype not in TORCH_DTYPES:
            raise InvalidState(f"{name!r} is {info.dtype}, which safetensors files do not know")
        found[name] = info
    if not found:
        raise InvalidState(f"no tensor of {key!r} is chosen: nothing to write")
    report.tensors = len(found)
    report.size_bytes = sum(_nbytes(info, selection) for info in found.values())
    report.cast = sum(
        selection.dtype_of(torch_dtype(i.dtype)) != torch_dtype(i.dtype) for i in found.values()
    )
    return found


def _infos(value: Any) -> Iterator[TensorInfo]:
    if isinstance(value, TensorInfo):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _infos(item)


def _nbytes(info: TensorInfo, selection: _Selection) -> int:
    dtype = torch_dtype(info.dtype)
    return info.nbytes // dtype.itemsize * selection.dtype_of(dtype).itemsize


def _sharded(
    tensors: dict[str, TensorInfo], selection: _Selection, limit: int
) -> list[dict[str, TensorInfo]]:
    """In the order of names, as many into a file as fit."""
    shards: list[dict[str, TensorInfo]] = [{}]
    held = 0
    for name, info in sorted(tensors.items()):
        nbytes = _nbytes(info, selection)
        if shards[-1] and held + nbytes > limit:
            shards.append({})
            held = 0
        shards[-1][name] = info
        held += nbytes
    return shards


def _files(view: CheckpointView, selection: _Selection) -> dict[str, bytes]:
    """What describes the model: files given to the save, and what an import has brought along."""
    found = {name: view.read_file(name) for name in view.manifest.user_files}
    imported = view.values("files") if "files" in view.manifest.components else {}
    for name, data in imported.items():
        data = getattr(data, "payload", data)
        if isinstance(data, TensorInfo):  # a large text lies among the tensors
            data = b"".join(array.tobytes() for _, array in view.portions(data.full_name))
        if isinstance(name, str) and Path(name).name == name and isinstance(data, str | bytes):
            found[name] = data.encode() if isinstance(data, str) else data
    if selection.dtype is not None and "config.json" in found:
        found["config.json"] = _with_dtype(found["config.json"], selection.dtype)
    return found


def _with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """A configuration that says what the weights are by now."""
    try:
        document = json.loads(config)
    except ValueError:
        return config
    for name in ("dtype", "torch_dtype"):
        if name in document:
            document[name] = str(dtype).removeprefix("torch.")
    return (json.dumps(document, indent=2) + "\n").encode()


_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def _write_safetensors(
    view: CheckpointView,
    into: Target,
    file: str,
    tensors: Mapping[str, TensorInfo],
    selection: _Selection,
) -> None:
    """One file, portion by portion."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    # Large items first: so every tensor is aligned, as stock readers want it.
    order = sorted(
        tensors.items(),
        key=lambda pair: (-selection.dtype_of(torch_dtype(pair[1].dtype)).itemsize, pair[0]),
    )
    for name, info in order:
        nbytes = _nbytes(info, selection)
        header[name] = {
            "dtype": _NAMES[selection.dtype_of(torch_dtype(info.dtype))],
            "shape": list(info.shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    into.write(file, 8 + len(head) + at, _bytes_to_write(view, order, selection, head))


def _bytes_to_write(
    view: CheckpointView, order: list[tuple[str, TensorInfo]], selection: _Selection, head: bytes
) -> Iterator[bytes | memoryview]:
    yield len(head).to_bytes(8, "little")
    yield head
    for _, info in order:
        dtype = torch_dtype(info.dtype)
        for _, array in view.portions(info.full_name):
            if selection.dtype_of(dtype) != dtype:
                cast = from_numpy(array, info.dtype).to(selection.dtype_of(dtype))
                array = cast.contiguous().reshape(-1).view(torch.uint8).numpy()
            yield array.tobytes()


# ---------------------------------------------------------------- torch


def _whole(
    view: CheckpointView,
    component: str | None,
    selection: _Selection,
    scratch: Scratch,
    report: ExportReport,
    dry_run: bool,
) -> dict[str, Any]:
    """The state of one component, or of all by key, its tensors in mapped files."""
    report.components = [_model_of(view, component)] if component else [*view.manifest.components]
    state: dict[str, Any] = {}
    for key in report.components:
        if len(copies := view.manifest.copies(key)) > 1:
            text = f"{len(copies) - 1} of {len(copies)} copies; the first is taken"
            report.left.append(f"{key}: {text}")
        loaded: dict[str, torch.Tensor] = {}
        state[key] = _state(
            view, key, view.values(key), selection, scratch, report, loaded, dry_run
        )
        if report.format == "dcp" and isinstance(state[key], dict) and "group_of" in state[key]:
            state[key] = with_parameter_lists(state[key])
    if report.format == "torch" and component:
        found: dict[str, Any] = state[component]
        return found
    return state


def _state(
    view: CheckpointView,
    key: str,
    value: Any,
    selection: _Selection,
    scratch: Scratch,
    report: ExportReport,
    loaded: dict[str, torch.Tensor],
    dry_run: bool,
) -> Any:
    """Values as they are, with tensors in the place of their descriptions; tied ones tied."""

    def within(item: Any) -> Any:
        return _state(view, key, item, selection, scratch, report, loaded, dry_run)

    if isinstance(value, TensorInfo):
        report.tensors += 1
        held = value.alias_of or value.name
        if held in loaded:
            return loaded[held]
        report.size_bytes += _nbytes(value, selection)
        if dry_run:
            return None
        dtype = torch_dtype(value.dtype)
        wanted = selection.dtype_of(dtype)
        tensor = scratch.empty(value.shape, wanted)
        for box, array in view.portions(value.full_name):
            tensor[box] = from_numpy(array, value.dtype).to(wanted)
        report.cast += wanted != dtype
        loaded[held] = tensor
        return tensor
    if isinstance(value, Mapping):
        found = {}
        for name, item in value.items():
            if isinstance(item, TensorInfo) and not selection.takes(item.name):
                continue
            is_tensor = isinstance(item, TensorInfo) and isinstance(name, str)
            found[selection.name(name) if is_tensor else name] = within(item)
        return found
    if isinstance(value, list | tuple):
        items = [within(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if hasattr(value, "codec") and hasattr(value, "payload"):
        report.left.append(f"{key}: a value of codec {value.codec!r}, as what it is stored as")
        return within(value.payload)
    return value


def _equal(a: Any, b: Any) -> int:
    """How many tensors two states have, which must be the same. Raises StorageError."""
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
        left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        if not (same and torch.equal(left, right)):
            raise StorageError("a tensor does not read back as it was written")
        return 1
    if isinstance(a, Mapping):
        return sum(_equal(item, b[name]) for name, item in a.items())
    if isinstance(a, list | tuple):
        return sum(_equal(item, other) for item, other in zip(a, b, strict=True))
    return 0


def _equal_tensors(state: Mapping[str, Any], again: Any) -> int:
    """The same of what `read_dcp` made of it: optimizers come back by name."""
    count = 0
    for key, value in state.items():
        back = again.get(key, again)
        if isinstance(value, Mapping) and isinstance(value.get("param_groups"), list):
            count += _equal(value["state"], back["state"])
        elif isinstance(value, Mapping) and all(
            isinstance(item, torch.Tensor) for item in value.values()
        ):
            count += _equal(value, back)
        else:
            count += sum(1 for _ in _tensors_in(value))
    return count


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item)
