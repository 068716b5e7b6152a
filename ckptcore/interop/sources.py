"""What lies in a folder or file of another library, as components: recognised by its files, read
without executing anything, and what was not understood is listed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..catalog.folder import FOLDER
from ..errors import CheckpointNotFound, InvalidArgument, InvalidState
from .dcp import read_dcp
from .optimizer_names import by_name, is_by_number, names_of, shapes_of
from .pickles import Refused, load_file
from .scratch import Scratch

__all__ = ["FORMATS", "Part", "Reading", "Source", "read_source", "recognised"]

FILE_LIMIT = 64 << 20  # bytes of a file beside the weights that is taken along
# Files of a model that have no tensors: its configuration, and its tokenizer.
_ALONG = re.compile(
    r".*\.(json|txt|model|jinja|md)|merges\.txt|vocab\..*|tokenizer.*|special_tokens.*"
)
_NOT_ALONG = re.compile(r".*\.index\.json|trainer_state\.json|checkpoint_manifest\.json")
_WHY_NOT = {"training_args.bin": "a pickled object, never read"}
_WEIGHTS = (
    "model.safetensors",
    "adapter_model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
    "adapter_model.bin",
)
_CALLED = {
    "module": "model",
    "net": "model",
    "optim": "optimizer",
    "lr_scheduler": "scheduler",
    "sched": "scheduler",
    "dataset": "loader",
    "dataloader": "loader",
    "random": "rng",
    "global_step": "values",
    "state_dict": "model",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A component to be: its key, its state, where it comes from; per_rank: one rank's own."""

    key: str
    state: Any
    origin: str
    per_rank: bool = False


@dataclass(slots=True)
class Reading:
    """How to read. model: says the names, shapes and ties of parameters; names: of the optimizer's
    parameters by group, where the model cannot tell."""

    scratch: Scratch
    model: nn.Module | None = None
    names: Sequence[Sequence[str]] | None = None


@dataclass(slots=True)
class Source:
    """What is read of a folder or file. shown: its path as it is said; left: what was not read, and
    why; checks: what was compared, in words; read: names of files that were looked at."""

    format: str
    path: Path
    shown: str
    how: Reading
    parts: list[Part] = field(default_factory=list)
    step: int | None = None
    left: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def add(self, key: str, state: Any, origin: str, per_rank: bool = False) -> None:
        taken = {part.key for part in self.parts}
        names = [key, *(f"{key}{number}" for number in range(1, len(taken) + 1))]
        unique = next(name for name in names if name not in taken)
        self.parts.append(Part(unique, state, origin, per_rank))

    def load(self, path: Path) -> Any:
        """What a file of torch.save holds; None, and it is listed, where it is not read."""
        self.read.add(path.name)
        try:
            return load_file(path)
        except Refused as error:
            self.left.append(f"{path.name}: {error.message}")
            return None

    def take(self, name: str, key: str) -> None:
        """One component of a file of torch.save that may be there."""
        if (self.path / name).is_file():
            self.add_state(self.load(self.path / name), key, name)

    def add_state(self, state: Any, key: str, origin: str) -> None:
        """One component; an optimizer by its parameters' names. None is what was not read."""
        if state is None:
            return
        if not is_by_number(state):
            plain = isinstance(state, Mapping | list | tuple)
            self.add(key, state if plain else {"value": state}, origin)
            return
        model = self.how.model
        weights: Any = next((part.state for part in self.parts if part.key == "model"), {})
        tensors = {n: t for n, t in weights.items() if isinstance(t, torch.Tensor)}
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        try:
            names = self.how.names or names_of(state, model)
            found = by_name(state, names, shapes | (shapes_of(model) if model is not None else {}))
        except InvalidState as error:
            self.left.append(f"{origin}: {error.message}")
            return
        groups = len(found["groups"])
        self.checks.append(
            f"{origin}: {len(found['group_of'])} parameters by name, in {groups} "
            f"group{'s' * (groups != 1)}, moments of their shapes"
        )
        self.add(key, found, origin)

    def add_tree(self, tree: Any, origin: str) -> None:
        """A whole state: weights alone, or components by key, and values beside them."""
        if _is_weights(tree):
            self.add("model", {k: v.detach() for k, v in tree.items()}, origin)
            return
        if is_by_number(tree):
            self.add_state(tree, "optimizer", origin)
            return
        if not isinstance(tree, Mapping):
            self.add("values", {"value": tree}, origin)
            return
        values = {}
        first = ("model", "state_dict", "module")  # whose shapes those of an optimizer must have
        for key in sorted(tree, key=lambda key: not str(key).startswith(first)):
            value = tree[key]
            if not isinstance(value, Mapping):
                values[key] = value
            elif value and isinstance(key, str):
                self.add_state(value, _called(key), origin)
        if values:
            self.add("values", values, origin)
            steps = (values.get(name) for name in ("global_step", "step"))
            self.step = next((step for step in steps if type(step) is int), self.step)

    def add_weights(self) -> bool:
        """The weights of a model, with what its configuration or the given model says of them;
        whether there are any."""
        found = weights_in(self.path)
        if found is None:
            return False
        weights, origin, files = found
        self.read |= files
        again = (name for name in _WEIGHTS if (self.path / name).is_file() and name not in files)
        for name in again:
            self.read.add(name)
            self.left.append(f"{name}: more weights; those of {origin} were taken")
        if self.how.model is None:
            self.how.model = model_of(self.path, self)
        if self.how.model is not None:
            if tied := with_ties(weights, self.how.model):
                self.checks.append(f"tied to others, and named again: {', '.join(tied[:5])}")
            _compare_shapes(weights, self.how.model, self)
        self.add("model", weights, origin)
        return True

    def add_random(self, stem: str, suffix: str) -> None:
        """Random streams of rank 0; those of others are left, and that is said."""
        found = {}
        for path in self.path.glob(f"{stem}*{suffix}"):
            if match := re.fullmatch(rf"{stem}(?:_(\d+))?{re.escape(suffix)}", path.name):
                found[int(match[1] or 0)] = path
        if not found:
            return
        self.read |= {path.name for path in found.values()}
        if len(found) > 1:
            self.left.append(f"random streams of {len(found)} ranks: an import has one, rank 0's")
        path = found[min(found)]
        streams = self.load(path)
        state = random_streams(streams)
        if state is not None:
            self.add("rng", state, path.name, per_rank=True)
        elif streams is not None:
            self.left.append(f"{path.name}: not the random streams that are known")

    def add_files(self) -> None:
        """Take along what describes a model, and list the rest."""
        files: dict[str, str | bytes] = {}
        for path in sorted(self.path.iterdir()):
            name = path.name
            if name in self.read or name.startswith("."):
                continue
            small = path.is_file() and path.stat().st_size <= FILE_LIMIT
            if small and _ALONG.fullmatch(name) and not _NOT_ALONG.fullmatch(name):
                data = path.read_bytes()
                try:
                    files[name] = data.decode()
                except UnicodeDecodeError:
                    files[name] = data
            else:
                self.left.append(f"{name}: {_WHY_NOT.get(name, 'not known')}")
        if files:
            self.add("files", files, f"{len(files)} file{'s' * (len(files) > 1)}")


def recognised(path: Path) -> str:
    """The format of what lies at `path`. Raises CheckpointNotFound, InvalidState."""
    if not path.exists():
        raise CheckpointNotFound(f"{path}: no such file or folder", path=str(path))
    if path.is_file():
        return "safetensors" if path.suffix == ".safetensors" else "torch"
    names = {entry.name for entry in path.iterdir()}
    if "checkpoint_manifest.json" in names:
        raise InvalidState(f"{path} is a checkpoint of ckptcore: load or copy it")
    if ours := sorted(name for name in names if FOLDER.fullmatch(name)):
        raise InvalidState(
            f"{path} is a root of ckptcore, with {', '.join(ours[:5])}: load or copy one of them, "
            "or import one that another library wrote by its own path"
        )
    if ".metadata" in names:
        return "dcp"
    if "latest_universal" in names or "zero" in names:
        return "deepspeed-universal"
    if any(re.fullmatch(r".*(zero_pp_rank|mp_rank)_.*\.pt", name) for name in names) or (
        "latest" in names and any(name.startswith("global_step") for name in names)
    ):
        raise InvalidState(
            f"{path} is a folder of DeepSpeed: make a universal one of it first "
            "(python -m deepspeed.checkpoint.ds_to_universal --input_folder ... --output_folder "
            "...), or the weights alone with its zero_to_fp32.py, and import that"
        )
    if "trainer_state.json" in names:
        return "hf-trainer"
    accelerated = any(re.fullmatch(r"random_states_\d+\.pkl", name) for name in names)
    if accelerated or {"optimizer.bin", "pytorch_model_fsdp_0", "optimizer_0"} & names:
        return "accelerate"
    if any(name in names or f"{name}.index.json" in names for name in _WEIGHTS) or (
        any(name.endswith(".safetensors") for name in names) and "config.json" in names
    ):
        states = any(re.fullmatch(r".*_state(_\w+)?\.(pt|pth|bin)", name) for name in names)
        return "legacy" if states else "hf"
    if any(name.endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors")) for name in names):
        return "legacy"
    listed = ", ".join(sorted(names)[:5]) or "nothing"
    raise InvalidState(f"{path} is nothing that an import knows: it holds {listed}")


def read_source(path: Path, shown: str, kind: str, how: Reading) -> Source:
    """What lies at `path`. kind: one of FORMATS, or "auto". Raises InvalidState, Refused, OSError,
    CheckpointNotFound."""
    found = recognised(path)
    kind = found if kind == "auto" else kind
    if kind not in _READERS:
        raise InvalidArgument(f"format {kind!r} is not one of auto, {', '.join(FORMATS)}")
    source = Source(kind, path, shown, how)
    try:
        _READERS[kind](source)
    except SafetensorError as error:
        raise Refused(f"{path}: a file that is no safetensors file, or damaged ({error})") from None
    if not source.parts:
        raise InvalidState(
            f"nothing of {path} could be read: {'; '.join(source.left) or 'it holds no state'}"
        )
    return source


# ---------------------------------------------------------------- weights


def weights_in(folder: Path) -> tuple[dict[str, torch.Tensor], str, set[str]] | None:
    """The weights of a model by name, the file that lists or holds them, and all files of them;
    None without any."""
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
                files = sorted(set(weight_map.values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise Refused(f"{index} is no index of weights ({error})") from None
            if wrong := [f for f in files if not isinstance(f, str) or Path(f).name != f]:
                raise Refused(f"{index} names {wrong[0]!r}, which is not beside it")
            found = _merged(folder, files)
            if missing := sorted(weight_map.keys() - found.keys()):
                raise Refused(f"{index} names {missing[0]!r}, which is in none of the files")
            return found, index.name, {index.name, *files}
        if (folder / name).is_file():
            return weights_of(folder / name), name, {name}
    loose = sorted(path.name for path in folder.glob("*.safetensors"))
    return (_merged(folder, loose), loose[0], {*loose}) if loose else None


def _merged(folder: Path, files: Sequence[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for file in files for name, tensor in weights_of(folder / file).items()}


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """Of one file; mapped, so that they take memory only while they are looked at."""
    if path.suffix == ".safetensors":
        with safe_open(str(path), "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = load_file(path)
    if not _is_weights(found):
        raise Refused(f"{path} holds more than tensors by name")
    return {name: tensor.detach() for name, tensor in found.items()}


def _is_weights(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(
            isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in value.items()
        )
    )


def model_of(folder: Path, source: Source) -> nn.Module | None:
    """A model without memory, from config.json, where transformers is installed and knows it."""
    if not (folder / "config.json").is_file():
        return None
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        (name, *_) = config.architectures or [""]
        kind = getattr(transformers, name, None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            source.checks.append(f"config.json: transformers has no {name!r}, so no names from it")
            return None
        with torch.device("meta"):
            model: nn.Module = kind(config)
    except Exception as error:  # a config of another version raises anything
        what = f"{type(error).__name__}: {str(error)[:100]}"
        source.checks.append(f"config.json: no model could be made of it ({what})")
        return None
    source.checks.append(f"names, shapes and ties are those of {name} as config.json says")
    return model


def with_ties(weights: dict[str, torch.Tensor], model: nn.Module) -> list[str]:
    """Add the names of tied parameters that a file leaves out; returns them."""
    first: dict[int, str] = {}
    added = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in weights:
            first.setdefault(id(parameter), name)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in weights and id(parameter) in first:
            weights[name] = weights[first[id(parameter)]]
            added.append(name)
    return added


def _compare_shapes(weights: Mapping[str, torch.Tensor], model: nn.Module, source: Source) -> None:
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        if name in wanted and wanted[name] != tensor.shape:
            raise InvalidState(
                f"{name!r} has shape {list(tensor.shape)}, the model {list(wanted[name])}"
            )
    missing = sorted(wanted.keys() - weights.keys())
    more = sorted(weights.keys() - wanted.keys())
    both = len(wanted.keys() & weights.keys())
    summary = f"{both} tensors have the names and shapes of the model"
    summary += f"; not in the file: {', '.join(missing[:5])}" if missing else ""
    summary += f"; not in the model: {', '.join(more[:5])}" if more else ""
    source.checks.append(summary)


# ---------------------------------------------------------------- the formats


def _hugging_face(source: Source) -> None:
    _need_weights(source)
    source.add_files()


def _need_weights(source: Source) -> None:
    if not source.add_weights():
        source.left.append("no weights: neither safetensors files nor pytorch_model.bin")


def _trainer(source: Source) -> None:
    if (source.path / "pytorch_model_fsdp_0").is_dir():
        _fsdp(source)
    else:
        _need_weights(source)
    for name in ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"):
        source.take(name, name.partition(".")[0])
    file = source.path / "trainer_state.json"
    try:
        state = json.loads(file.read_text())
        source.step = int(state["global_step"])
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"{file} says no global_step ({error})") from None
    source.add("trainer_state", state, file.name)
    source.read.add(file.name)
    source.add_random("rng_state", ".pth")
    source.add_files()


def _accelerate(source: Source) -> None:
    folder = source.path
    _fsdp(source)
    if not any(part.key == "model" for part in source.parts):
        _need_weights(source)
    stems = {"optimizer": "optimizer", "scheduler": "scheduler", "sampler": "sampler"}
    for number in range(100):
        for stem, key in {**stems, "dl_state_dict": "loader"}.items():
            source.take(f"{stem}_{number}.bin" if number else f"{stem}.bin", key)
        source.take(f"custom_checkpoint_{number}.pkl", "custom")
        more = folder / f"model_{number}.safetensors"
        if more.is_file() and more.name not in source.read:
            source.read.add(more.name)
            source.add("model", weights_of(more), more.name)
    source.take("scaler.pt", "scaler")
    source.add_random("random_states", ".pkl")
    if match := re.fullmatch(r"checkpoint_(\d+)", folder.name):
        source.step = int(match[1])
    source.add_files()


def _fsdp(source: Source) -> None:
    """The folders of torch.distributed.checkpoint that Accelerate writes for FSDP."""
    for pattern in ("pytorch_model_fsdp_*", "optimizer_*"):
        for path in sorted(source.path.glob(pattern)):
            if (path / ".metadata").is_file():
                source.read.add(path.name)
                source.add_tree(read_dcp(path, source.how.scratch, source.left), path.name)


def _dcp(source: Source) -> None:
    tree = read_dcp(source.path, source.how.scratch, source.left)
    source.add_tree(tree, source.path.name)


def _safetensors_file(source: Source) -> None:
    source.add("model", weights_of(source.path), source.path.name)


def _torch_file(source: Source) -> None:
    if source.path.is_dir():
        _legacy(source)
        return
    found = load_file(source.path)
    if isinstance(found, Mapping) and "pytorch-lightning_version" in found:
        source.format = "lightning"
        found = dict(found)
        source.add("model", found.pop("state_dict", {}), source.path.name)
        for name, key in (("optimizer_states", "optimizer"), ("lr_schedulers", "scheduler")):
            for state in found.pop(name, None) or []:
                source.add_state(state, key, name)
    source.add_tree(found, source.path.name)


def _legacy(source: Source) -> None:
    """Files without a manifest, one or more for each component: model.safetensors,
    optimizer_state.pt, rng_state_0.pt."""
    source.add_weights()
    by_rank: dict[str, dict[int, Path]] = {}
    for path in sorted(source.path.iterdir()):
        match = re.fullmatch(r"(.+?)(?:_rank)?(?:[_-]?(\d+))?\.(?:pt|pth|bin|ckpt)", path.name)
        known = path.name in source.read or path.name in _WHY_NOT
        if match is not None and path.is_file() and not known:
            source.read.add(path.name)
            by_rank.setdefault(match[1], {})[int(match[2] or 0)] = path
    for stem, paths in by_rank.items():
        if len(paths) > 1:
            summary = f"those of {len(paths)} ranks: an import has one; the first is taken"
            source.left.append(f"{stem}: {summary}")
        path = paths[min(paths)]
        source.add_state(source.load(path), _called(stem), path.name)
    states = [part.state for part in source.parts if isinstance(part.state, Mapping)]
    steps = (state.get("global_step", state.get("step")) for state in states)
    source.step = next((step for step in steps if type(step) is int), None)
    source.add_files()


def _universal(source: Source) -> None:
    """A universal folder of DeepSpeed: fp32 weights and moments by parameter name."""
    folder = source.path
    tag = folder / "latest_universal"
    base = folder / tag.read_text().strip() if tag.is_file() else folder
    if base.parent not in (folder, folder.parent) or not (base / "zero").is_dir():
        raise Refused(f"{folder}: latest_universal names no folder with zero/ in it")
    weights: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {}
    for path in sorted((base / "zero").iterdir()):
        if not path.is_dir():
            if path.name != "optimizer_state.pt":
                source.left.append(f"zero/{path.name}: not known")
            continue
        for file in sorted(path.glob("*.pt")):
            found = load_file(file)
            value = found.get("param") if isinstance(found, Mapping) else found
            if file.stem == "fp32" and isinstance(value, torch.Tensor):
                weights[path.name] = value
            elif isinstance(value, torch.Tensor | int | float):
                state.setdefault(path.name, {})[file.stem] = value
    source.add("model", weights, "zero/*/fp32.pt")
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    whole = {"state": state, "group_of": dict.fromkeys(weights, 0), "shapes": shapes}
    if state:
        source.add("optimizer", {**whole, "groups": {0: {}}}, "zero/*/exp_avg*.pt")
        source.left.append("the optimizer's options: a universal folder has none that fit")
    if match := re.search(r"(\d+)", base.name):
        source.step = int(match[1])


_READERS: dict[str, Callable[[Source], None]] = {
    "dcp": _dcp,
    "hf": _hugging_face,
    "hf-trainer": _trainer,
    "accelerate": _accelerate,
    "lightning": _torch_file,
    "safetensors": _safetensors_file,
    "torch": _torch_file,
    "legacy": _legacy,
    "deepspeed-universal": _universal,
}
FORMATS = (*_READERS,)


# ---------------------------------------------------------------- states


def _called(name: str) -> str:
    """The key of a component that others call so."""
    stem = re.sub(r"(_state_dict|_state|_states|_dict)$", "", name)
    return _CALLED.get(stem, stem or name)


def random_streams(streams: Any) -> dict[str, Any] | None:
    """What Hugging Face's Trainer or Accelerate saved, as RNGState has it."""
    if not isinstance(streams, Mapping):
        return None
    python = streams.get("python", streams.get("random_state"))
    array = streams.get("numpy", streams.get("numpy_random_seed"))
    cpu = streams.get("cpu", streams.get("torch_manual_seed"))
    device = streams.get("cuda", streams.get("torch_cuda_manual_seed"))
    if not (isinstance(python, tuple) and isinstance(array, tuple) and len(array) == 5):
        return None
    if not isinstance(cpu, torch.Tensor):
        return None
    kind, keys, position, has_gauss, cached = array
    several = [device] if isinstance(device, torch.Tensor) else list(device or [])
    return {
        "python": python,
        "numpy": {
            "kind": kind,
            "keys": np.array(keys, np.uint32),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": cpu,
        "accelerator": ["cuda", several] if several else None,
    }
