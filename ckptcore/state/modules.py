"""Modules: their parameters and buffers by the names that the bare model has for them, whatever it
is wrapped in."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..arguments import shown
from ..errors import CheckpointWarning, InvalidState, StateMismatch
from ..format.values import TensorRef, key_names
from .containers import is_flattened
from .tree import DEFAULT_METADATA, Differences

# Wrappers that put the wrapped module under a name of their own: class name -> that name.
_WRAPPERS: dict[str, str] = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "_FabricModule": "_forward_module",
}
EXTRA_STATE = "_extra_state"
_PACKAGES = ("torch.", "lightning.", "lightning_fabric.")

_REGISTERED: dict[type[nn.Module], str] = {}

Models = nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module | Iterable[nn.Module]]


def register_wrapper(cls: type[nn.Module], inner: str) -> None:
    """Have names of tensors that do not depend on a wrapper of your own: those of what it wraps.
    Programs that save and that load make the same call.

    cls: class of modules that wrap another one.
    inner: text, the attribute that has the wrapped module.

    Raises InvalidState for what is no class of modules, or no name.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)) or cls is nn.Module:
        raise InvalidState(
            f"register_wrapper takes a class of modules that wrap others, not {shown(cls)}"
        )
    if not isinstance(inner, str) or not inner.isidentifier():
        raise InvalidState(f"inner must be the name of an attribute, not {shown(inner)}")
    _REGISTERED[cls] = inner


def canonical_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a module by the names that a checkpoint has for
    them: those of the bare module, whatever it is wrapped in.

    module: torch module.

    Raises InvalidState when two tensors have one name.
    """
    if not isinstance(module, nn.Module):
        raise InvalidState(f"module must be a torch module, not {shown(module)}")
    state = ModelState(module).state_dict()
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _inner_name(module: nn.Module) -> str | None:
    for cls in type(module).__mro__:
        if (registered := _REGISTERED.get(cls)) in module._modules:
            return registered
        name = _WRAPPERS.get(cls.__name__)
        if name in module._modules and cls.__module__.startswith(_PACKAGES):
            return name
    return None


def bare_module(module: nn.Module) -> nn.Module:
    """What the wrappers around a module wrap."""
    while (name := _inner_name(module)) is not None:
        module = cast(nn.Module, module._modules[name])
    return module


def _prefixes(module: nn.Module, raw: str = "", canonical: str = "") -> Iterator[tuple[str, str]]:
    """(prefix of keys as they are, the same without wrappers) of a module and all modules
    inside."""
    yield raw, canonical
    inner = _inner_name(module)
    for name, child in module._modules.items():
        if child is None:
            continue
        kept = canonical if name == inner else f"{canonical}{name}."
        yield from _prefixes(child, f"{raw}{name}.", kept)
        if inner == "_forward_module" and name == "_original_module":
            # Fabric's parameters are named by the one, the keys of its state_dict by the other.
            yield from _prefixes(child, raw, canonical)


class Names:
    """Keys of a module's state without the prefixes of wrappers."""

    def __init__(self, module: nn.Module) -> None:
        self.prefixes = dict(_prefixes(module))
        # Canonical prefixes of modules that load by code of their own, and may change what is below
        # them.
        own = {at for at, inner in _modules(module) if _loads_itself(inner)}
        self.own_loading = {self.prefixes.get(at, at) for at in own}
        overridden = type(module).load_state_dict is not nn.Module.load_state_dict
        if overridden or "load_state_dict" in vars(module):
            self.own_loading.add("")

    def canonical(self, key: str) -> str:
        prefix = key[: key.rfind(".") + 1]
        return self.prefixes.get(prefix, prefix) + key[len(prefix) :]

    def raw(self, name: str) -> str | None:
        """The key of a canonical name that the module does not have yet; None where it has no such
        submodule."""
        prefix = name[: name.rfind(".") + 1]
        # The last is the innermost: a wrapper has no state of its own.
        found = [at for at, canonical in self.prefixes.items() if canonical == prefix]
        return found[-1] + name[len(prefix) :] if found else None


# Classes of torch whose own loading code only fills in what older versions did not have.
_COPYING = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")


def _modules(module: nn.Module, raw: str = "") -> Iterator[tuple[str, nn.Module]]:
    yield raw, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{raw}{name}.")


def _loads_itself(module: nn.Module) -> bool:
    """Whether a module loads by more than copying into its parameters and buffers: an override, or
    hooks."""
    load = type(module)._load_from_state_dict
    if "_load_from_state_dict" in vars(module) or (
        load is not nn.Module._load_from_state_dict
        and getattr(load, "__module__", "") not in _COPYING
    ):
        return True
    before, after = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    hooks = [getattr(hook, "hook", hook) for each in (before, after) for hook in each.values()]
    homes = [getattr(hook, "__module__", None) or "" for hook in hooks]
    # Those of torch's distributed wrappers only bring keys or shards into form.
    return not all(home.startswith("torch.distributed.") for home in homes)


def _prefixed(models: Models) -> list[tuple[str, nn.Module]]:
    """Modules with the prefix of their names: none, or the key of the dict that they came in."""
    if isinstance(models, nn.Module):
        return [("", models)]
    if isinstance(models, Mapping):
        return [
            (f"{key}.", module) for key, held in models.items() for _, module in _prefixed(held)
        ]
    several = list(models) if isinstance(models, Iterable) else [models]
    if other := [held for held in several if not isinstance(held, nn.Module)]:
        raise InvalidState(
            f"ModelState takes a module, or a list or dict of modules, not {shown(other[0])}"
        )
    return [("", module) for module in several]


def named_parameters(models: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Canonical names and parameters of modules, and of tensors in dicts under their names."""
    if isinstance(models, ModelState):
        for prefix, module in models.prefixed:
            yield from ((prefix + name, tensor) for name, tensor in named_parameters(module))
        return
    if isinstance(models, nn.Module):
        canonical = Names(models).canonical
        for key, parameter in models.named_parameters():
            yield canonical(key), parameter
    elif isinstance(models, Mapping):
        for key, held in models.items():
            if isinstance(held, torch.Tensor):
                yield str(key), held
            else:
                yield from ((f"{key}.{name}", tensor) for name, tensor in named_parameters(held))
    else:
        for held in models:
            yield from named_parameters(held)


@dataclass(slots=True)
class ParameterTable:
    """Names of parameters by their id, and parameters by name; twice: a name that two of them
    have."""

    names: dict[int, str] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    twice: str | None = None


class _Walked(threading.local):
    """Tables of models that are taken not to change, with the models, whose ids stay theirs so."""

    tables: dict[int, tuple[Any, ParameterTable]] | None = None


_walked = _Walked()
_last: WeakKeyDictionary[nn.Module, ParameterTable] = WeakKeyDictionary()


@contextmanager
def one_walk() -> Iterator[None]:
    """While it lasts, modules are walked once on this thread, and not once for each optimizer:
    there may be one for each parameter."""
    outer = _walked.tables
    if outer is None:
        _walked.tables = {}
    try:
        yield
    finally:
        _walked.tables = outer


def parameter_table(models: Any) -> ParameterTable:
    """What `models` have. Not to be changed."""
    tables = _walked.tables
    if tables is not None and id(models) in tables:
        return tables[id(models)][1]
    table = ParameterTable()
    for name, parameter in named_parameters(models):
        if table.parameters.setdefault(name, parameter) is not parameter:
            table.twice = table.twice or name
        table.names.setdefault(id(parameter), name)
    if tables is not None:
        tables[id(models)] = (models, table)
    if isinstance(models, nn.Module):
        _last[models] = table
    return table


def last_table(models: Any) -> ParameterTable | None:
    """What a module had when it was last walked. It may have changed since."""
    return _last.get(models) if isinstance(models, nn.Module) else None


class ModelState:
    """A module's state under canonical keys: those of the bare module, however it is compiled or
    wrapped.

    models: a module, several with distinct names (pipeline stages of a rank), or a dict of them,
        whose keys become prefixes.
    device: where what is on the meta device gets memory, at once; make optimizers after that
        (default None: nowhere).
    dtype: torch.dtype or its name, that floating-point tensors which get memory have, and that a
        load converts to without cast=True (default None: their own).

    Raises InvalidState when two tensors have one name, and for a device or dtype that is none.
    Buffers that are not persistent are in no checkpoint and stay on the meta device: a
    CheckpointWarning names them.
    """

    def __init__(
        self,
        models: Models,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        self.prefixed = _prefixed(models)
        self.strict = True
        # The dtype of a tensor here is what the caller has asked for.
        self.casts = dtype is not None
        if dtype is not None and device is None:
            raise InvalidState("dtype is for what gets memory: give device, too")
        if device is not None:
            target = checked_device("device", device)
            if target.type == "meta":
                raise InvalidState("device must be one that has memory, not 'meta'")
            kind = None if dtype is None else checked_dtype("dtype", dtype)
            for _, module in self.prefixed:
                _give_memory(module, target, kind)
        self._raw()

    def _raw(self) -> dict[str, tuple[nn.Module, str, Any]]:
        """Canonical name -> (module, key as it is, value)."""
        found: dict[str, tuple[nn.Module, str, Any]] = {}
        self._own_loading: set[str] = set()
        self.metadata: dict[str, Any] = {}
        for prefix, module in self.prefixed:
            names = Names(module)
            self._own_loading |= {prefix + name for name in names.own_loading}
            # keep_vars: the parameters themselves, so that what was read into them in place need
            # not be copied again.
            state = module.state_dict(keep_vars=True)
            for path, facts in (getattr(state, "_metadata", None) or {}).items():
                # A wrapper comes before what it wraps, whose version is the one that counts.
                at = f"{path}." if path else ""
                self.metadata[(prefix + names.prefixes.get(at, at))[:-1]] = facts
            for key, value in state.items():
                name = prefix + names.canonical(key)
                if name in found:
                    what = f"{found[name][1]!r} and {key!r} are both {name!r} without wrappers"
                    hint = "pass several models as a dict, whose keys become prefixes"
                    raise InvalidState(f"{what}; {hint}", key=name)
                found[name] = module, key, value
        self.decides_some = bool(self._own_loading) or any(map(is_extra, found))
        return found

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers, without asking for a state_dict."""
        for _, module in self.prefixed:
            yield from tensors_in(module)

    def state_dict(self) -> dict[str, Any]:
        """The parameters and buffers themselves. `metadata` has the versions of the modules
        then."""
        return {name: value for name, (_, _, value) in self._raw().items()}

    def decides(self, name: str) -> bool:
        """Whether code of the module's own decides how `name` is loaded: it is handed what was
        saved, and may resize."""
        first = name.split("/", 1)[0]
        if is_extra(first):
            return True
        ends = [0, *(at + 1 for at, letter in enumerate(first) if letter == ".")]
        return any(first[:end] in self._own_loading for end in ends)

    def differences(self, saved: Any) -> Differences:
        """By the names, and whether there is a tensor where the module has one. What a module's own
        code decides about is left to it."""
        live = self.state_dict()
        by_name = isinstance(saved, Mapping)
        held = dict.fromkeys(key_names(_without_extra(saved) if by_name else saved))
        wanted = dict.fromkeys(key_names(_without_extra(live)))
        missing, unexpected = (
            [n for n in names if n not in others and (is_extra(n) or not self.decides(n))]
            for names, others in ((wanted, held), (held, wanted))
        )
        mismatched: dict[str, tuple[str, str]] = {}
        for name, value in live.items() if by_name else ():
            if name not in saved or not isinstance(value, torch.Tensor) or self.decides(name):
                continue
            kept = saved[name]
            # What is made of others is compared part by part.
            if not (isinstance(kept, TensorRef) and not kept.numpy) and not is_flattened(kept):
                kind = "numpy.ndarray" if isinstance(kept, TensorRef) else type(kept).__qualname__
                mismatched[name] = (f"a value of type {kind}", "a tensor")
        matched = sum(name in held for name in wanted)
        return Differences(missing, unexpected, matched, mismatched)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raw = self._raw()
        versions = getattr(state_dict, "_metadata", None)
        for prefix, module in self.prefixed:
            names = Names(module)
            mine: OrderedDict[str, Any] = OrderedDict()
            for name, value in state_dict.items():
                if name in raw:
                    if raw[name][0] is module:
                        mine[raw[name][1]] = value
                elif (
                    self.decides(name) and (key := names.raw(name.removeprefix(prefix))) is not None
                ):
                    mine[key] = value
            if versions is not None:
                mine._metadata = {  # type: ignore[attr-defined]
                    at[:-1]: dict(versions.get((prefix + name)[:-1], DEFAULT_METADATA))
                    for at, name in names.prefixes.items()
                }
            # Not strict: missing and unexpected keys were judged before anything was read.
            found = module.load_state_dict(mine, strict=False)
            self._check_own(names, prefix, found)

    def _check_own(self, names: Names, prefix: str, found: Any) -> None:
        """Names that only code of the module's own could judge. Raises StateMismatch."""
        missing, unexpected = (
            [
                name
                for name in map(names.canonical, getattr(found, kind, None) or ())
                if self.decides(prefix + name) and not is_extra(name)
            ]
            for kind in ("missing_keys", "unexpected_keys")
        )
        if self.strict and (missing or unexpected):
            missing, unexpected = ([prefix + n for n in names] for names in (missing, unexpected))
            raise StateMismatch(
                f"its own loading code found missing keys: {missing[:5] or 'none'}, and unexpected "
                f"ones: {unexpected[:5] or 'none'}; strict=False loads the rest",
                missing=missing,
                unexpected=unexpected,
            )


def is_extra(name: str) -> bool:
    """Whether it is the extra state of a module, which may be anything."""
    return name.rpartition(".")[2] == EXTRA_STATE


def _without_extra(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if is_extra(str(name)) else value for name, value in state.items()}


def _give_memory(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Replace what is on the meta device, tied tensors by tied ones."""
    made: dict[int, torch.Tensor] = {}
    stays: list[str] = []

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            floating = tensor.is_floating_point() and tensor.dtype.itemsize > 1
            kind = dtype if dtype is not None and floating else tensor.dtype
            new = torch.empty_like(tensor, device=device, dtype=kind)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                new.__dict__.update(vars(tensor))
            made[id(tensor)] = new
        return made[id(tensor)]

    for at, inner in _modules(module):
        for name, value in inner._parameters.items():
            if value is not None and value.is_meta:
                inner._parameters[name] = cast(nn.Parameter, real(value))
        for name, buffer in inner._buffers.items():
            if buffer is not None and buffer.is_meta:
                if name in inner._non_persistent_buffers_set:
                    stays.append(at + name)
                else:
                    inner._buffers[name] = real(buffer)
    if made:
        apply: Callable[..., Any] = module._apply
        apply(lambda tensor: tensor)  # FSDP looks at its parameters again
    if stays:
        warnings.warn(
            f"no checkpoint has the buffers {', '.join(stays[:5])}"
            f"{' ...' if len(stays) > 5 else ''}, which are not persistent: they stay on the meta "
            "device; make them as the model does",
            CheckpointWarning,
            stacklevel=3,
        )


def checked_device(name: str, value: Any) -> torch.device:
    """Raises InvalidState for what torch has no device for."""
    if not isinstance(value, str | torch.device):
        raise InvalidState(f"{name} must be a device such as 'cpu' or 'cuda:0', not {shown(value)}")
    try:
        device = torch.device(value)
        if device.type not in ("cpu", "meta"):
            torch.empty(0, device=device)
        return device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise InvalidState(f"{name} {shown(value)} cannot be used here: {first}") from None


def checked_dtype(name: str, value: Any) -> torch.dtype:
    """A dtype of real floating-point numbers, from its name too. Raises InvalidState."""
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidState(
            f"{name} must be a floating-point dtype such as torch.bfloat16 or its name, not "
            f"{shown(value)}"
        )
    return found


def tensors_in(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers; one that two modules have comes twice."""
    held = [each for inner in module.modules() for each in (inner._parameters, inner._buffers)]
    return [tensor for each in held for tensor in each.values() if tensor is not None]
