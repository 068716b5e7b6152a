"""Tensor subclasses that are plain containers of other tensors, such as quantised weights and the
moments of an optimizer in 8 bits: taken apart at a save, put together at a load.

Only classes that are registered are taken apart, and only these are made anew, whatever a
checkpoint says.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from math import prod
from typing import Any

import torch

from ..errors import InvalidState, StateMismatch
from ..format.values import Opaque, register_codec
from .layout import Shard, is_dtensor, is_dtensor_class, local_shard

_KEYS = {"quantized", "context", "tensors"}
_ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, type(None)})


@dataclass(frozen=True)
class _Container:
    """A registered class. name: what the file calls it; home: its module and its name there."""

    name: str
    home: tuple[str, str]
    whole: frozenset[str]
    transposed: frozenset[str]

    @classmethod
    def named(cls, name: Any) -> _Container:
        """The class that a file calls so. Raises StateMismatch where it is not registered."""
        if (found := _BY_NAME.get(name)) is None:
            raise StateMismatch(
                f"the saved state has a tensor of class {name!s:.200}, which is not registered "
                "here; call register_tensor_class for it"
            )
        return found

    def load_class(self) -> Any:
        """Raises StateMismatch where it is not installed."""
        module, name = self.home
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            what = f"the saved state has a tensor of class {'.'.join(self.home)}"
            raise StateMismatch(f"{what}; install {module.split('.')[0]}") from None

    def made(
        self, parts: Mapping[str, Any], context: Any, shape: torch.Size, *geometry: Any, device: Any
    ) -> Any:
        """A tensor of the class. context: as it is stored; geometry: what else its class is given.
        Raises StateMismatch for parts that do not make up one of `shape`."""
        cls = self.load_class()
        try:
            meant = _context(context, shape, device)
            made: Any = cls.__tensor_unflatten__(parts, meant, *geometry)
        except _UNFIT as error:
            raise self.unfit(f"{type(error).__name__}: {error}") from error
        if made.shape != shape:
            raise self.unfit(f"it is of {list(made.shape)}, not of {list(shape)}")
        return made

    def unfit(self, why: str) -> StateMismatch:
        return StateMismatch(f"what is stored makes no {self.name} ({why})")


_UNFIT = (ImportError, KeyError, TypeError, ValueError, AttributeError, AssertionError)
_BY_HOME: dict[tuple[str, str], _Container] = {}
_BY_NAME: dict[str, _Container] = {}
# Classes of what stands in the context of a registered class: made anew as only these are.
_FACTS: set[str] = set()


def register_tensor_class(
    cls: type[torch.Tensor] | str,
    *,
    whole: Sequence[str] = (),
    transposed: Sequence[str] = (),
    context: Sequence[type | str] = (),
    name: str | None = None,
) -> None:
    """Let checkpoints hold tensors of this class as their inner tensors: weights, buffers, moments
    of optimizers, plain values. The process that loads must make the same call.

    cls: subclass with `__tensor_flatten__` and `__tensor_unflatten__`, whose context is plain
        values, dtypes, shapes, and objects of the classes in `context`; or its module and name,
        "package.module.Class", which is imported when it is needed.
    whole: names of inner tensors that every rank has whole where the outer one is in slices, such
        as tables (default none).
    transposed: names of inner tensors whose two dimensions are those of the outer one, the other
        way round (default none).
    context: dataclasses, named tuples and enums, or their modules and names, whose objects describe
        such a tensor (default none).
    name: text, what the file calls the class (default None: module and name).

    Raises TypeError for a class that cannot be taken apart.
    """
    if isinstance(cls, str):
        module, _, own_name = cls.rpartition(".")
    else:
        if not isinstance(cls, type):
            raise TypeError(f"register_tensor_class takes a class or its name, not {cls!r}")
        module, own_name = cls.__module__, cls.__qualname__
        if not (hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")):
            raise TypeError(
                f"register_tensor_class({own_name}): it has no __tensor_flatten__ and "
                "__tensor_unflatten__"
            )
    made = _Container(
        name or f"{module}.{own_name}", (module, own_name), frozenset(whole), frozenset(transposed)
    )
    _BY_HOME[made.home] = _BY_NAME[made.name] = made
    _FACTS.update(item if isinstance(item, str) else _home(item) for item in context)


def _home(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


for _kind, _module in (("4bit", "4bit"), ("8bit", "8bit"), ("Fp8", "fp8")):
    register_tensor_class(
        f"torchao.optim.subclass_{_module}.OptimState{_kind}",
        whole=["qmap"],
        name=f"OptimState{_kind}",
    )
for _name, _transposed in {
    "Float8Tensor": [],
    "Int4Tensor": ["scale", "zero_point"],
    "Int4PlainInt32Tensor": ["scale", "zero_point"],
    "Int4PreshuffledTensor": [],
    "Int4TilePackedTo4dTensor": [],
    "Int8Tensor": [],
    "IntxUnpackedToInt8Tensor": [],
}.items():
    register_tensor_class(
        f"torchao.quantization.{_name}",
        transposed=_transposed,
        context=[
            *(
                f"torchao.quantization.granularity.Per{each}"
                for each in ("Tensor", "Axis", "Group", "Row", "Token", "Block")
            ),
            "torchao.float8.inference.Float8MMConfig",
            "torchao.quantization.quant_primitives.MappingType",
            "torchao.quantization.quantize_.common.kernel_preference.KernelPreference",
            "torchao.quantization.quantize_.workflows.float8.float8_tensor"
            ".QuantizeTensorToFloat8Kwargs",
            "torchao.quantization.quantize_.workflows.int8.int8_tensor.QuantizeTensorToInt8Kwargs",
        ],
    )
register_tensor_class(
    "torchao.quantization.quantize_.workflows.nf4.nf4_tensor.NF4Tensor",
    whole=["nf4"],
    context=["torchao.quantization.quantize_.workflows.nf4.nf4_tensor.SubclassTensorArgs"],
)


# Any tensor of a registered class, at any place of a state.


@dataclass(frozen=True)
class TensorParts:
    """A tensor of a registered class, taken apart. payload: {"class": name of it, "shape": of the
    whole tensor, "context": what it says of itself, "tensors": the inner ones by name}."""

    payload: dict[str, Any]


CODEC = "tensor"
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_LOCAL_SHAPES = {"tuple": tuple, "list": list, "Size": torch.Size}


def _container_of(value: Any) -> _Container | None:
    return _BY_HOME.get((type(value).__module__, type(value).__qualname__))


def holds_containers(kinds: Collection[type], items: Iterable[Any]) -> bool:
    """Whether one of `items`, tensors of these `kinds`, is of a registered class, or has such a
    part on this rank."""
    if _ORDINARY.issuperset(kinds):
        return False
    special: list[Any] = [kind for kind in kinds if kind not in _ORDINARY]
    if any((kind.__module__, kind.__qualname__) in _BY_HOME for kind in special):
        return True
    if not any(issubclass(kind, Shard) or is_dtensor_class(kind) for kind in special):
        return False
    return any(_container_of(_local_part(tensor)) is not None for tensor in items)


def _local_part(tensor: Any) -> Any:
    """What this rank has of a tensor."""
    if isinstance(tensor, Shard):
        return tensor.tensor
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def flattened(value: Any) -> TensorParts | None:
    """The parts of a tensor of a registered class, slices where it is a slice; None for any other.

    Raises InvalidState for a slice that inner tensors cannot follow, and for a context that is not
    plain.
    """
    if type(value) in _ORDINARY:
        return None
    inner = _local_part(value)
    container = _container_of(inner)
    if container is None:
        return None
    with torch.no_grad():  # a DTensor gives its own memory then, and not a view
        outer = local_shard(value)
    names, context = inner.__tensor_flatten__()
    shape = tuple(inner.shape)
    parts = {name: getattr(inner, name) for name in names}
    if outer.layout is not None:
        if outer.box is None:
            raise InvalidState(f"this rank has no part of a {container.name} in slices")
        cut = _Cut(container, outer.shape, *outer.box)
        parts = {name: cut.part(name, part) for name, part in parts.items()}
    described = _described(context, shape, container)
    payload = {"class": container.name, "shape": list(outer.shape), "context": described}
    return TensorParts({**payload, "tensors": parts})


@dataclass(frozen=True)
class _Cut:
    """A slice of a tensor of a registered class. shape: of the whole; offset, local: of the
    slice."""

    container: _Container
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]

    def part(self, name: str, tensor: torch.Tensor) -> Any:
        """An inner tensor of the slice: as a slice of that of the whole, or whole itself."""
        cut = [n for n, whole in zip(self.local, self.shape, strict=True) if n != whole]
        # One value for several rows is one for all of them.
        if name in self.container.whole or (tensor.numel() == 1 and any(n > 1 for n in cut)):
            return tensor
        turned = name in self.container.transposed
        shape, offset, local = (
            tuple(reversed(sizes)) if turned else sizes
            for sizes in (self.shape, self.offset, self.local)
        )
        if tensor.ndim != len(local):
            raise self._refused(name, f"it has {tensor.ndim} dimensions")
        sizes, starts = [], []
        for whole, start, extent, items in zip(shape, offset, local, tensor.shape, strict=True):
            if extent in (whole, items):
                block = 1
            elif not items or extent % items:
                raise self._refused(name, f"its {items} items are no blocks of {extent}")
            else:
                block = extent // items
            if extent == whole:
                sizes.append(items)
                starts.append(0)
                continue
            if whole % block or start % block:
                raise self._refused(name, f"the slice cuts through its blocks of {block}")
            sizes.append(whole // block)
            starts.append(start // block)
        return Shard(tensor, tuple(sizes), tuple(starts))

    def _refused(self, name: str, why: str) -> InvalidState:
        return InvalidState(
            f"inner tensor {name!r} of a {self.container.name} of shape {list(self.shape)} cannot "
            f"be stored in slices of {list(self.local)}: {why}; cut it where blocks end, or store "
            "it whole"
        )


def _described(item: Any, shape: tuple[int, ...], container: _Container) -> Any:
    """What a context says, in plain values: shapes of the slice here and devices are left open.
    Raises InvalidState."""

    def within(inner: Any) -> Any:
        return _described(inner, shape, container)

    kind: Any = type(item)
    home = _home(kind)
    if isinstance(item, Enum) and home in _FACTS:
        return {"object": home, "member": item.name}
    if type(item) in _PLAIN:
        return item
    if isinstance(item, torch.device):
        return {"device": None}
    if type(item) in (tuple, list, torch.Size):
        if shape and tuple(item) == shape:
            return {"shape": type(item).__name__}
        found = [within(each) for each in item]
        return {"Size": found} if isinstance(item, torch.Size) else type(item)(found)
    if type(item) is dict and all(isinstance(key, str) for key in item):
        return {"dict": {key: within(each) for key, each in item.items()}}
    if home in _FACTS and is_dataclass(item):
        values = {each.name: within(getattr(item, each.name)) for each in fields(item)}
        return {"object": home, "fields": values}
    if home in _FACTS and hasattr(item, "_asdict"):
        return {"object": home, "fields": {k: within(v) for k, v in item._asdict().items()}}
    raise InvalidState(
        f"the context of a {container.name} has a value of type {home}; name its class as "
        "context= in register_tensor_class"
    )


def _context(stored: Any, shape: torch.Size, device: torch.device) -> Any:
    """The context of a tensor of this shape on this device. Raises ValueError for what none has."""

    def within(inner: Any) -> Any:
        return _context(inner, shape, device)

    if type(stored) in (tuple, list):
        return type(stored)(within(each) for each in stored)
    if not isinstance(stored, dict):
        return stored
    if stored.keys() == {"device"}:
        return device
    if stored.keys() == {"shape"}:
        return _LOCAL_SHAPES[stored["shape"]](shape)
    if stored.keys() == {"Size"}:
        return torch.Size(stored["Size"])
    if stored.keys() == {"dict"}:
        return {key: within(each) for key, each in stored["dict"].items()}
    home = stored["object"]
    if home not in _FACTS:
        raise ValueError(f"class {home!s:.200} is not registered as the context of a tensor")
    module, _, name = home.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    if "member" in stored:
        return kind[stored["member"]]
    return kind(**{key: within(each) for key, each in stored["fields"].items()})


def rebuilt(payload: Any) -> Any:
    """The tensor again, from inner tensors that are there now, whole. Raises StateMismatch."""
    shape, parts = torch.Size(payload["shape"]), payload["tensors"]
    stride = torch.empty(shape, device="meta").stride()
    device = next(iter(parts.values())).device
    container = known_container(payload)
    return container.made(parts, payload["context"], shape, shape, stride, device=device)


register_codec(TensorParts, lambda parts: parts.payload, rebuilt, name=CODEC)


def is_flattened(value: Any) -> bool:
    """Whether a decoded value is the parts of a tensor, which are yet to be read."""
    return type(value) is Opaque and value.codec == CODEC


def known_container(payload: Any) -> _Container:
    """The registered class of saved parts. Raises StateMismatch, ValueError where they are none."""
    if not isinstance(payload, dict) or payload.keys() != {"class", "shape", "context", "tensors"}:
        raise ValueError("the parts of a tensor are a class, a shape, a context and tensors")
    return _Container.named(payload["class"])


def check_parts(payload: Any) -> None:
    """Raises StateMismatch for saved parts of a tensor that cannot be put together here, ValueError
    where they are damaged."""
    container = known_container(payload)
    if not isinstance(payload["tensors"], dict) or not payload["tensors"]:
        raise ValueError(f"a {container.name} has no parts")
    container.load_class()


def is_made_of(live: Any, payload: Mapping[str, Any]) -> bool:
    """Whether these parts, or slices, are the memory of a live tensor of a registered class."""
    mine = flattened(live)
    return mine is not None and all(
        _memory(payload["tensors"][name]) is _memory(part)
        for name, part in mine.payload["tensors"].items()
    )


def _memory(part: Any) -> Any:
    return part.tensor if isinstance(part, Shard) else part


def misfit(saved: Any, live: Any) -> tuple[str, str] | None:
    """(saved, live) in words where a saved tensor of a registered class, or None for a plain one,
    does not fit the live one; None where it fits as far as can be known before its parts."""
    mine = flattened(live)
    then = None if saved is None else known_container(saved).name
    now = None if mine is None else mine.payload["class"]
    if then != now:
        return (f"a {then or 'plain tensor'}", f"a {now or 'plain tensor'}")
    if saved is None or mine is None:
        return None
    local = tuple(_local_part(live).shape)
    contexts = [_with_shape(payload["context"], local) for payload in (saved, mine.payload)]
    facts: dict[str, tuple[Any, Any]] = {
        "shape": (saved["shape"], mine.payload["shape"]),
        "parts": (sorted(saved["tensors"]), sorted(mine.payload["tensors"])),
    }
    if all(type(each) is dict and each.keys() == {"dict"} for each in contexts):
        one, other = (each["dict"] for each in contexts)
        facts |= {name: (one.get(name), other.get(name)) for name in one.keys() | other.keys()}
    else:
        facts["context"] = contexts[0], contexts[1]
    for name, (was, is_now) in sorted(facts.items()):
        if was != is_now:
            return (f"{then} with {name} {was}", f"{name} {is_now}")
    return None


def _with_shape(stored: Any, local: tuple[int, ...]) -> Any:
    """What a context says of a slice of this shape."""
    if type(stored) in (tuple, list):
        return type(stored)(_with_shape(each, local) for each in stored)
    if not isinstance(stored, dict):
        return stored
    if stored.keys() == {"shape"}:
        return (
            {"Size": [*local]}
            if stored["shape"] == "Size"
            else _LOCAL_SHAPES[stored["shape"]](local)
        )
    return {key: _with_shape(each, local) for key, each in stored.items()}


# The moments of optimizers, of which the parameter says how they are cut.


@dataclass(frozen=True)
class _Slice:
    """What this rank has of a parameter that is cut along its first dimension."""

    shape: tuple[int, ...]  # of the whole
    local: tuple[int, ...]
    row: int  # the first of this rank

    @classmethod
    def of(cls, name: str, parameter: Any) -> _Slice | None:
        """None for a parameter that is here as a whole. Raises InvalidState."""
        if not is_dtensor(parameter):
            return None
        if len(parameter.placements) != 1 or not parameter.placements[0].is_shard(0):
            raise InvalidState(
                f"{name}: moments in few bits of a parameter with placements "
                f"{parameter.placements} cannot be stored: only those cut along the first "
                "dimension can",
                key=name,
            )
        shape, local = tuple(parameter.shape), tuple(parameter.to_local().shape)
        each = -(-shape[0] // parameter.device_mesh.size())
        return cls(shape, local, min(parameter.device_mesh.get_local_rank() * each, shape[0]))

    @property
    def start(self) -> int:
        return self.row * prod(self.shape[1:])

    def part(self, tensor: torch.Tensor) -> Shard:
        """One part of the moment here, as a slice of that part of the whole moment."""
        if tuple(tensor.shape) == self.local:
            return Shard(tensor, self.shape, (self.row, *[0] * (len(self.shape) - 1)))
        values = prod(self.local) // max(1, tensor.numel())  # that one item stands for
        return Shard(tensor, (prod(self.shape) // values,), (self.start // values,))

    def empty(self, name: str, shape: tuple[int, ...], like: dict[str, Any]) -> Shard:
        """Memory for this rank's slice of a part that is of `shape` as a whole."""
        if shape == self.shape:
            return self.part(torch.empty(self.local, **like))
        values = prod(self.shape) // max(1, prod(shape))
        if self.start % values or prod(self.local) % values:
            raise StateMismatch(
                f"{name} is stored in blocks of {values} values, and {list(self.local)} of "
                f"{list(self.shape)} on this rank do not begin and end with a block; resume on "
                "the number of ranks that saved it"
            )
        return self.part(torch.empty(prod(self.local) // values, **like))


def stored_moments(name: str, parameter: Any, values: Mapping[Any, Any]) -> dict[Any, Any]:
    """What a checkpoint has of an optimizer's state of one parameter: as a rule just that."""
    kinds = set(map(type, values.values()))
    if kinds <= _ORDINARY:
        return dict(values)
    moment = Moment(name, parameter)
    return {key: moment.stored(value) for key, value in values.items()}


@dataclass(frozen=True)
class Moment:
    """How a moment of one parameter is stored. name: of the parameter."""

    name: str
    parameter: Any

    def stored(self, value: Any) -> Any:
        """What stands for a moment in a checkpoint: itself, unless it is of a registered class."""
        if type(value) in _ORDINARY or not isinstance(value, torch.Tensor):
            return value
        inner = _local_part(value)
        if (container := _container_of(inner)) is None:
            return value
        names, context = inner.__tensor_flatten__()
        cut = _Slice.of(self.name, self.parameter)
        parts = {name: getattr(inner, name) for name in names}
        if cut is not None:
            parts = {n: p if n in container.whole else cut.part(p) for n, p in parts.items()}
        return {
            "quantized": container.name,
            "context": [_plain(item) for item in context],
            "tensors": parts,
        }

    def allocate(self, part: str, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
        """Memory for an inner tensor of a moment that the live optimizer does not have yet."""
        like = {"dtype": dtype, "device": self.parameter.device}
        cut = _Slice.of(self.name, self.parameter)
        if cut is None or any(part in container.whole for container in _BY_NAME.values()):
            return torch.empty(shape, **like)
        return cut.empty(name, shape, like)

    def made(self, value: Any) -> Any:
        """The moment again, or this rank's part of it; what was not taken apart stays as it is.

        Raises StateMismatch for a class that is not registered or not installed, and for parts
        that do not make up a moment of the parameter.
        """
        if not isinstance(value, Mapping) or value.keys() != _KEYS:
            return value
        mine: Any = self.parameter
        shape = torch.Size(mine.to_local().shape if is_dtensor(mine) else mine.shape)
        try:
            container = _Container.named(value["quantized"])
            try:
                parts = {name: _memory(part) for name, part in dict(value["tensors"]).items()}
                context = [_meant(item) for item in value["context"]]
            except (TypeError, ValueError) as error:
                raise container.unfit(f"{type(error).__name__}: {error}") from error
            return container.made(parts, context, shape, device=mine.device)
        except StateMismatch as error:
            error.message = f"{self.name}: {error.message}"
            raise


def _plain(item: Any) -> Any:
    if isinstance(item, torch.dtype):
        return str(item)
    # The shape is that of this rank's slice, which the parameter says.
    return "shape" if isinstance(item, tuple) else item


def _meant(item: Any) -> Any:
    """The reverse, as the context of any tensor has it."""
    if item == "shape":
        return {"shape": "Size"}
    if not isinstance(item, str) or not item.startswith("torch."):
        return item
    found = getattr(torch, item.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this torch has no dtype {item!r}")
    return found
