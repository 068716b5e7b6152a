"""Codecs of types beyond the plain ones: built in, registered by users, and those of numpy.

numpy is imported only where there is a value of it, so that readers of other checkpoints start
faster.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import partial, reduce
from math import prod
from operator import or_
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID

from ..errors import CheckpointCorrupt
from .checks import exact, exact_items, only_plain, short

__all__ = [
    "BY_NAME",
    "BY_TYPE",
    "Opaque",
    "array_of",
    "codec_of",
    "hint",
    "is_array",
    "is_numpy",
    "keyed",
    "payload_of",
    "register_codec",
    "revived",
    "scalar_of",
    "why_not_storable",
]

T = TypeVar("T")


def _defaultdict(made: Any, payload: Any) -> defaultdict[Any, Any]:
    return defaultdict(made, exact(payload, dict))


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that its codec has not decoded: the codec is not registered in this process (when
    reading leniently, as `ckpt` does), or the value has tensors in it that are yet to be read.

    codec: text, the name of the codec.
    payload: the plain values that the codec would get.
    """

    codec: str
    payload: Any


@dataclass(frozen=True, slots=True)
class _Codec:
    cls: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


BY_TYPE: dict[type, _Codec] = {}
BY_NAME: dict[str, _Codec] = {}


def register_codec(
    cls: type[T],
    encode: Callable[[T], Any] | None = None,
    decode: Callable[[Any], T] | None = None,
    *,
    name: str | None = None,
) -> None:
    """Teach checkpoints to hold values of exactly one type. The process that loads must make the
    same call.

    cls: the type; an Enum needs no functions, its members are stored by name.
    encode: function of a value that returns plain values, tensors among them (default None).
    decode: function of those plain values that returns the value (default None).
    name: text, what the file calls the type; keep it when the class moves (default None: module and
        qualified name).

    Raises ValueError when the name is taken by another class, TypeError when functions are missing.
    """
    if issubclass(cls, Flag):  # any combination of members
        encode = encode or (lambda flag: [member.name for member in flag])  # type: ignore[attr-defined]
        decode = decode or (lambda names: reduce(or_, [cls[n] for n in exact(names, list)], cls(0)))
    elif issubclass(cls, Enum):
        encode = encode or (lambda member: member.name)  # type: ignore[attr-defined]
        decode = decode or (lambda member_name: cls[member_name])
    if encode is None or decode is None:
        raise TypeError(f"register_codec({cls.__qualname__}) needs encode= and decode=")
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    taken = BY_NAME.get(name)
    if taken is not None and (taken.cls.__module__, taken.cls.__qualname__) != (
        cls.__module__,
        cls.__qualname__,
    ):
        raise ValueError(f"codec name {name!r} is taken by {taken.cls!r}")
    BY_TYPE[cls] = BY_NAME[name] = _Codec(cls, name, encode, decode)


register_codec(OrderedDict, dict, lambda p: OrderedDict(exact(p, dict)), name="OrderedDict")
register_codec(Counter, dict, lambda p: Counter(exact(p, dict)), name="Counter")
register_codec(
    SimpleNamespace,
    lambda n: dict(vars(n)),
    lambda p: SimpleNamespace(**exact(p, dict)),
    name="SimpleNamespace",
)
register_codec(
    deque, lambda d: [list(d), d.maxlen], lambda p: deque(exact(p[0], list), p[1]), name="deque"
)
register_codec(bytearray, bytes, lambda p: bytearray(exact(p, bytes)), name="bytearray")
register_codec(
    range, lambda r: [r.start, r.stop, r.step], lambda p: range(*exact_items(p, int)), name="range"
)
register_codec(
    slice, lambda s: [s.start, s.stop, s.step], lambda p: slice(*exact(p, list)), name="slice"
)
register_codec(Decimal, str, lambda p: Decimal(exact(p, str)), name="Decimal")
register_codec(
    Fraction,
    lambda f: [f.numerator, f.denominator],
    lambda p: Fraction(*exact_items(p, int)),
    name="Fraction",
)
# Texts and bytes too large for an index: the payload is a tensor. Small ones need no codec, so none
# is found by type.
BY_NAME["bytes"] = _Codec(bytes, "bytes", bytes, lambda p: bytes_of(p))
BY_NAME["str"] = _Codec(str, "str", str, lambda p: bytes_of(p).decode("utf-8", "surrogatepass"))
register_codec(UUID, lambda u: u.bytes, lambda p: UUID(bytes=exact(p, bytes)), name="UUID")


# The factory is in the name, so that the payload is a dict like any other. None of them runs
# anything.
for _made in (None, int, float, str, list, dict, set):
    _name = f"defaultdict.{_made.__name__ if _made else 'None'}"
    BY_NAME[_name] = _Codec(defaultdict, _name, dict, partial(_defaultdict, _made))


def codec_of(value: Any) -> _Codec | None:
    """How a value of this type is stored, None where nobody has said it."""
    if type(value) is not defaultdict or defaultdict in BY_TYPE:
        return BY_TYPE.get(type(value))
    made = value.default_factory
    known = made is None or (isinstance(made, type) and made in (int, float, str, list, dict, set))
    return BY_NAME[f"defaultdict.{made.__name__ if made else 'None'}"] if known else None


_PUT_UP = "put it at the top level of the state, under a name of its own"
_HINTS = {
    "torch.nn.modules.module.Module": f"a module is a component: {_PUT_UP}",
    "torch.optim.optimizer.Optimizer": f"an optimizer is a component: {_PUT_UP}",
    "torch.utils.data.dataloader.DataLoader": "a DataLoader has no state; use one that has, as "
    "torchdata's StatefulDataLoader, "
    "or store the epoch and position",
    "torch._C.Generator": "store its get_state(), and give that to set_state() after the load; "
    "the default streams are in RNGState()",
    "ckptcore.state.component.StateComponent": "a StateComponent belongs at the top level of the "
    "state, as an item of the list or "
    "a value of the dict, under its own key",
    "builtins.function": "a function is code, and no state; store its name",
    "builtins.builtin_function_or_method": "a function is code, and no state; store its name",
    "builtins.type": "a class is code, and no state; store its name",
    "builtins.generator": "where an iterator is cannot be read from it; store the position",
    "collections.defaultdict": "one is stored if its factory is int, float, str, list, dict, set "
    "or None",
}


def hint(value: Any) -> str:
    """What to do about a value that cannot be stored."""
    kind = type(value)
    for cls in kind.__mro__[:-1]:
        if (found := _HINTS.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
            return found
    name = kind.__qualname__.rpartition(".")[2]
    if hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict"):
        return f"it has a state_dict: {_PUT_UP}"
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return f"call ckptcore.register_codec({name}, tuple, lambda p: {name}(*p)) in both programs"
    if hasattr(kind, "__dataclass_fields__"):
        return f"call ckptcore.register_codec({name}, vars, lambda p: {name}(**p)) in both programs"
    if issubclass(kind, Enum):
        return f"call ckptcore.register_codec({name}) in both programs"
    return "store plain values or tensors instead, or call ckptcore.register_codec for the type"


def keyed(value: Any) -> Mapping[Any, Any] | None:
    """What has the keys that are parts of names: a dict, or what the codec of a dict's type makes
    of it. Else None."""
    codec = BY_NAME.get(value.codec) if type(value) is Opaque else codec_of(value)
    if type(value) is Opaque:
        value = value.payload if codec is not None and issubclass(codec.cls, Mapping) else None
    elif codec is not None and isinstance(value, Mapping):
        value = codec.encode(value)
    return value if isinstance(value, Mapping) else None


def revived(value: Any, file: str = "") -> Any:
    """`value` with what `opaque` left aside decoded: its tensors are there now. Raises
    CheckpointCorrupt."""
    if type(value) is Opaque:
        payload = revived(value.payload, file)
        try:
            return BY_NAME[value.codec].decode(payload)
        except Exception as error:
            what = (
                f"{file or 'index'}: stored values cannot be read (codec {value.codec!r}: "
                f"{type(error).__name__}: {error})"
            )
            raise CheckpointCorrupt(what, file=file or None, kind="format") from error
    if type(value) in (dict, OrderedDict, Counter):
        if only_plain(value.values()):
            return value
        return type(value)({key: revived(item, file) for key, item in value.items()})
    if type(value) not in (list, tuple) or only_plain(value):
        return value
    return type(value)(revived(item, file) for item in value)


# As numpy writes them: byte order, kind, size, and the unit of times. What else it reads, it takes
# for a small language.
_SPELLING = re.compile(r"[<>|=][a-zA-Z][0-9]{0,10}(\[[0-9]*[a-zA-Zμ]+(/[0-9]+)?\])?")


def is_array(value: Any) -> bool:
    np = sys.modules.get("numpy")
    return np is not None and type(value) is np.ndarray


def is_numpy(value: Any) -> bool:
    """Whether `value` is an array or a scalar of numpy's own. Where numpy was not imported, nothing
    can be."""
    np = sys.modules.get("numpy")
    return is_array(value) or (
        np is not None and isinstance(value, np.generic) and type(value).__module__ == "numpy"
    )


def bytes_of(value: Any) -> bytes:
    """The bytes of a flat array of bytes. Raises TypeError for anything else."""
    if not is_array(value) or value.dtype.str != "|u1" or value.ndim != 1:
        raise TypeError(f"{type(value).__name__} is no flat array of bytes")
    return bytes(value.tobytes())


def why_not_storable(value: Any) -> str | None:
    if value.dtype.hasobject or value.dtype.names is not None:
        return f"numpy dtype {value.dtype} cannot be stored (objects or named fields)"
    return None


def payload_of(value: Any) -> list[Any]:
    """[dtype, shape, bytes] of an array, [dtype, bytes] of a scalar."""
    raw = value.tobytes() if value.dtype.itemsize else b""
    dtype = str(value.dtype.str)
    return [dtype, list(value.shape), raw] if is_array(value) else [dtype, raw]


def scalar_of(dtype: str, raw: bytes) -> Any:
    import numpy as np

    kind = _dtype(dtype)
    if kind.kind == "S":  # arrays cut zeros off the end of their strings
        return np.bytes_(exact(raw, bytes))
    if kind.kind == "U":
        return np.str_(
            exact(raw, bytes).decode(
                "utf-32-be" if dtype.startswith(">") else "utf-32-le", "surrogatepass"
            )
        )
    return array_of(dtype, [], raw)[()]


def array_of(dtype: str, shape: list[int], raw: bytes) -> Any:
    import numpy as np

    kind = _dtype(dtype)
    if kind.hasobject or kind.names is not None or any(n < 0 for n in exact_items(shape, int)):
        raise ValueError(
            f"numpy dtype {dtype!r} or shape {short(shape)} is not one that is ever stored"
        )
    count = prod(shape)
    if count * kind.itemsize != len(exact(raw, bytes)):
        raise ValueError(f"{len(raw)} bytes do not hold {short(count)} items of {dtype}")
    if kind.itemsize == 0 and count:
        raise ValueError(f"{short(count)} items of nothing")
    if count == 0:
        return np.zeros(shape, kind)
    return np.frombuffer(bytearray(raw), kind).reshape(shape)


def _dtype(text: Any) -> Any:
    import numpy as np

    if not _SPELLING.fullmatch(exact(text, str)) or (kind := np.dtype(text)).str != text:
        raise ValueError(f"numpy dtype {short(text)} is not one that is ever stored")
    return kind
