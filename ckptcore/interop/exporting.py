"""What other libraries read, out of a checkpoint in any layout, without a process group."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save as safetensors_bytes
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ..arguments import check_path
from ..errors import InvalidArgument, InvalidState, StorageError
from ..format.values import Opaque
from ..loading.view import CheckpointView, TensorInfo, open_checkpoint
from ..storage.urls import masked_url
from .dcp import read_dcp
from .optimizer_names import with_parameter_lists
from .pickles import load_file
from .quantization import Quantizer
from .scratch import TORCH_DTYPES, Scratch, from_numpy, torch_dtype
from .transfer import Target, check_free, made_locally, opened_target

__all__ = ["FORMATS", "ExportReport", "export_checkpoint"]

T = TypeVar("T")
FORMATS = ("hf", "torch", "dcp")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_WORDS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}


@dataclass(slots=True)
class ExportReport:
    """What an export wrote, or would write.

    source: text, path or URL of the checkpoint.
    folder: text, path or URL of what was written.
    format: text, "hf", "torch" or "dcp".
    components: list of the keys that were taken.
    tensors: int, how many.
    size_bytes: int, bytes of all of them.
    files: dict of name -> size in bytes.
    left: list of text, what was not taken, and why.
    cast: int, how many tensors have another dtype than in the checkpoint.
    quantized: int, how many weights of linear layers are in few bits.
    verified: int, how many tensors were read back and compared.
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
    storage_options: dict for the filesystem of `source` (default None).
    target_options: dict for the filesystem of `folder` (default None: that of `source`).
    dry_run: bool, only report what would be written (default False).
    scratch: a folder for what "torch" and "dcp" pass through (default: that of temporary files).

    Raises InvalidState, CheckpointExists, CheckpointNotFound, CheckpointCorrupt, StorageError,
    OSError.
    """
    target = check_path("folder", folder)
    options = storage_options if target_options is None else target_options
    if format not in FORMATS:
        raise InvalidArgument(f"format {format!r} is not one of {', '.join(FORMATS)}")
    if quantize is not None and format != "hf":
        raise InvalidArgument(f"what is quantised is written as 'hf', not as {format!r}")
    wanted, limit = _dtype(dtype), _bytes(max_shard_size)
    if not dry_run:
        check_free(target, options)
    report = ExportReport(str(source), masked_url(target), format)
    with open_checkpoint(source, storage_options=storage_options) as view, Scratch(scratch) as held:
        export = _Export(view, report, held, wanted, tuple(keys), dict(rename or {}), dry_run)
        if format != "hf":
            state = export.whole(component)
            if not dry_run:
                with made_locally(target, options, scratch) as made:
                    export.write_whole(made, state)
        elif quantize is not None:
            quantizer = Quantizer(quantize, model, linear, view.manifest.metadata)
            tensors = export.quantized(component, quantizer)
            if not dry_run:
                with opened_target(target, options) as into:
                    export.write_quantized(into, tensors, quantizer)
        else:
            shards = export.shards(component, limit)
            if not dry_run:
                with opened_target(target, options) as into:
                    export.write_shards(into, shards)
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


Tensors = dict[str, TensorInfo]  # by the names that they get


@dataclass(slots=True)
class _Export:
    """One export: which tensors, under which names, in which dtype; what it did is in `report`."""

    view: CheckpointView
    report: ExportReport
    scratch: Scratch
    dtype: torch.dtype | None
    keys: tuple[str, ...]
    rename: Mapping[str, str]
    dry_run: bool

    def takes(self, name: str) -> bool:
        return not self.keys or any(fnmatchcase(name, key) for key in self.keys)

    def renamed(self, name: str) -> str:
        for old, new in self.rename.items():
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def dtype_of(self, info: TensorInfo) -> torch.dtype:
        saved = torch_dtype(info.dtype)
        floating = saved.is_floating_point and saved.itemsize > 1
        return self.dtype if self.dtype is not None and floating else saved

    def nbytes(self, info: TensorInfo) -> int:
        return info.nbytes // torch_dtype(info.dtype).itemsize * self.dtype_of(info).itemsize

    def tensor(self, info: TensorInfo) -> torch.Tensor:
        """As it is written, in a mapped file where it is large."""
        tensor = self.scratch.empty(info.shape, self.dtype_of(info))
        for box, array in self.view.portions(info.full_name):
            tensor[box] = from_numpy(array, info.dtype).to(tensor.dtype)
        return tensor

    def model_key(self, component: str | None) -> str:
        key, known = component or "model", self.view.manifest.components
        if key not in known:
            hint = "it has" if component else "say which of"
            raise InvalidState(
                f"{self.view.url} has no component {key!r}; {hint} {', '.join(known)}"
            )
        return key

    def only_first(self, key: str) -> None:
        """Of several copies of a component one is taken, and that is said."""
        if (count := len(self.view.manifest.copies(key))) > 1:
            text = f"{key}: {count - 1} of {count} copies; the first is taken"
            self.report.left.append(text)

    # ------------------------------------------------------------ Hugging Face

    def chosen(self, component: str | None) -> Tensors:
        """Tensors of one copy of a component; tied ones once."""
        key = self.model_key(component)
        self.report.components = [key]
        self.only_first(key)
        found: Tensors = {}
        for info in _leaves(self.view.values(key), TensorInfo):
            if not self.takes(info.name):
                continue
            name = self.renamed(_plain(info.name))
            if info.alias_of is not None:
                self.report.left.append(f"{name}: tied to {info.alias_of}, which is written")
                continue
            if name in found:
                raise InvalidState(f"two tensors of {key!r} would be called {name!r}", key=name)
            if info.dtype not in TORCH_DTYPES:
                raise InvalidState(f"{name!r} is {info.dtype}, which safetensors files do not know")
            found[name] = info
        if not found:
            raise InvalidState(f"no tensor of {key!r} is chosen: nothing to write")
        self.report.tensors = len(found)
        self.report.size_bytes = sum(map(self.nbytes, found.values()))
        casts = (self.dtype_of(info) != torch_dtype(info.dtype) for info in found.values())
        self.report.cast = sum(casts)
        return found

    def shards(self, component: str | None, limit: int) -> dict[str, Tensors]:
        """Tensors by file: in the order of names, as many into a file as fit."""
        shards: list[Tensors] = [{}]
        held = 0
        for name, info in sorted(self.chosen(component).items()):
            if shards[-1] and held + self.nbytes(info) > limit:
                shards.append({})
                held = 0
            shards[-1][name] = info
            held += self.nbytes(info)
        count = len(shards)
        names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
        found = dict(zip(names if count > 1 else ["model.safetensors"], shards, strict=True))
        sizes = {name: sum(map(self.nbytes, shard.values())) for name, shard in found.items()}
        self.report.files = sizes | {name: len(data) for name, data in self.files().items()}
        return found

    def write_shards(self, into: Target, shards: dict[str, Tensors]) -> None:
        """The weights first, and what says what they are after them."""
        for file, shard in shards.items():
            # Large items first: so every tensor is aligned, as stock readers want it.
            order = sorted(shard.items(), key=lambda p: (-self.dtype_of(p[1]).itemsize, p[0]))
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            at = 0
            for name, info in order:
                ends = [at, at := at + self.nbytes(info)]
                header[name] = {"dtype": _NAMES[self.dtype_of(info)], "shape": list(info.shape)}
                header[name]["data_offsets"] = ends
            head = json.dumps(header, separators=(",", ":")).encode()
            head += b" " * (-len(head) % 8)
            data = self.data_of(info for _, info in order)
            parts = chain([len(head).to_bytes(8, "little"), head], data)
            into.write(file, 8 + len(head) + at, parts)
            self.report.verified += len(shard)
        files = self.files()
        if len(shards) > 1:
            weights = {tensor: name for name, shard in shards.items() for tensor in shard}
            index = {"metadata": {"total_size": self.report.size_bytes}, "weight_map": weights}
            files["model.safetensors.index.json"] = _json(index)
        self.write_files(into, files)

    def data_of(self, tensors: Iterable[TensorInfo]) -> Iterator[bytes]:
        """The bytes of tensors, portion by portion."""
        for info in tensors:
            cast = self.dtype_of(info) != torch_dtype(info.dtype)
            for _, array in self.view.portions(info.full_name):
                if cast:
                    part = from_numpy(array, info.dtype).to(self.dtype_of(info))
                    array = part.contiguous().reshape(-1).view(torch.uint8).numpy()
                yield array.tobytes()

    def quantized(self, component: str | None, quantizer: Quantizer) -> dict[str, torch.Tensor]:
        """All tensors, the weights of linear layers in few bits."""
        found: dict[str, torch.Tensor] = {}
        for name, info in self.chosen(component).items():
            tensor = self.tensor(info)
            if quantizer.takes(_plain(info.name), tuple(tensor.shape)):
                if (why := quantizer.misfit(tuple(tensor.shape))) is not None:
                    self.report.left.append(f"{name}: not quantised ({why})")
                else:
                    tensor = quantizer.quantized(name, tensor)
                    self.report.quantized += 1
            found[name] = tensor
        if not self.report.quantized:
            key = self.report.components[0]
            raise InvalidState(
                f"no weight of {key!r} is quantised: no linear layer fits the recipe"
            )
        return found

    def write_quantized(
        self, into: Target, tensors: dict[str, torch.Tensor], quantizer: Quantizer
    ) -> None:
        parts, header = quantizer.flattened(tensors)
        data = safetensors_bytes(parts, metadata=header)
        into.write("model.safetensors", len(data), iter([data]))
        self.report.verified = len(tensors)
        self.report.size_bytes = sum(part.nbytes for part in parts.values())
        files = self.files()
        if "config.json" in files:
            config = {"quantization_config": quantizer.described()}
            files["config.json"] = _json(json.loads(files["config.json"]) | config)
        self.write_files(into, files)

    def write_files(self, into: Target, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            into.write(name, len(data), iter([data]))
        self.report.files = dict(sorted(into.files.items()))

    def files(self) -> dict[str, bytes]:
        """What describes the model: files given to the save, and what an import has brought
        along."""
        view = self.view
        found = {name: view.read_file(name) for name in view.manifest.user_files}
        imported = view.values("files") if "files" in view.manifest.components else {}
        for name, data in imported.items():
            data = getattr(data, "payload", data)
            if isinstance(data, TensorInfo):  # a large text lies among the tensors
                data = b"".join(array.tobytes() for _, array in view.portions(data.full_name))
            if isinstance(name, str) and Path(name).name == name and isinstance(data, str | bytes):
                found[name] = data.encode() if isinstance(data, str) else data
        if self.dtype is not None and "config.json" in found:
            found["config.json"] = _with_dtype(found["config.json"], self.dtype)
        return found

    # ------------------------------------------------------------ torch

    def whole(self, component: str | None) -> dict[str, Any]:
        """The state of one component, or of all by key, its tensors in mapped files."""
        known = self.view.manifest.components
        self.report.components = [self.model_key(component)] if component else [*known]
        state: dict[str, Any] = {}
        for key in self.report.components:
            self.only_first(key)
            found = self.state(key, self.view.values(key), {})
            by_name = isinstance(found, dict) and "group_of" in found
            state[key] = found
            if self.report.format == "dcp" and by_name:
                state[key] = with_parameter_lists(found)
        if self.report.format == "dcp" and (empty := [*_empty_dicts(state)]):
            what = f"empty dicts ({', '.join(empty[:3])}{', ...' * (len(empty) > 3)})"
            self.report.left.append(f"{what}: torch.distributed.checkpoint keeps none")
        if self.report.format == "torch" and component:
            return dict(state[component])
        return state

    def state(self, key: str, value: Any, loaded: dict[str, torch.Tensor]) -> Any:
        """Values as they are, with tensors in the place of their descriptions; tied ones tied."""
        if isinstance(value, TensorInfo):
            return self.loaded(value, loaded)
        if isinstance(value, Mapping):
            found = {}
            for name, item in value.items():
                is_tensor = isinstance(item, TensorInfo)
                if not is_tensor or self.takes(item.name):
                    new = self.renamed(name) if is_tensor and isinstance(name, str) else name
                    found[new] = self.state(key, item, loaded)
            return found
        if isinstance(value, list | tuple):
            items = [self.state(key, item, loaded) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, Opaque):
            text = f"{key}: a value of codec {value.codec!r}, as what it is stored as"
            self.report.left.append(text)
            return self.state(key, value.payload, loaded)
        return value

    def loaded(self, info: TensorInfo, known: dict[str, torch.Tensor]) -> torch.Tensor | None:
        self.report.tensors += 1
        held = info.alias_of or info.name
        if held not in known:
            self.report.size_bytes += self.nbytes(info)
            if self.dry_run:
                return None
            self.report.cast += self.dtype_of(info) != torch_dtype(info.dtype)
            known[held] = self.tensor(info)
        return known[held]

    def write_whole(self, made: Path, state: dict[str, Any]) -> None:
        if self.report.format == "torch":
            torch.save(state, made)
            self.report.verified = _equal(state, load_file(made))
            self.report.files = {made.name: made.stat().st_size}
            return
        save(state, storage_writer=FileSystemWriter(str(made)), no_dist=True)
        again = read_dcp(made, self.scratch, self.report.left)
        self.report.verified = _equal_tensors(state, again)
        self.report.files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}


_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def _plain(name: str) -> str:
    """A stored name as users know it."""
    return name.replace("/", ".").replace("~1", "/").replace("~0", "~")


def _json(document: Any) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()


def _with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """A configuration that says what the weights are by now."""
    try:
        document = json.loads(config)
    except ValueError:
        return config
    for name in ("dtype", "torch_dtype"):
        if name in document:
            document[name] = str(dtype).removeprefix("torch.")
    return _json(document)


def _empty_dicts(value: Mapping[Any, Any], path: str = "") -> Iterator[str]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _empty_dicts(item, f"{path}{key}/")
        elif isinstance(item, Mapping):
            yield f"{path}{key}"


def _leaves(value: Any, kind: type[T]) -> Iterator[T]:
    """Those of a kind, however deep."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item, kind)


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
            count += sum(1 for _ in _leaves(value, torch.Tensor))
    return count
