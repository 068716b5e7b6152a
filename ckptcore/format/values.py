"""Plain values as bytes: every leaf keeps its exact type, and nothing is ever executed or imported
to read one.

Values are msgpack. What msgpack has a type for is stored as that (None, bool, int of 64 bits,
float, str, bytes, list, dict with str keys); everything else is an extension whose payload is
msgpack again: types that are built in, those of numpy, and those that a codec is registered for.
Tensors are not values: a `leaf` function replaces them with `TensorRef(number)` on the way in and
back again on the way out.

numpy is imported only where there is a value of it, so that readers of other checkpoints start
faster.
"""

from __future__ import annotations

import datetime as dt
import pathlib
import re
import struct
import sys
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import partial, reduce
from itertools import chain
from math import prod
from operator import or_
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID

import msgpack

from ..errors import CheckpointCorrupt, CheckpointError, UnsupportedValue
from .manifest import MALFORMED, exact, exact_items, malformed, short, unique

# What is plain.

PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})


def only_plain(items: Iterable[Any]) -> bool:
    """Whether nothing is in any of `items`: none is a container, a tensor or an object. Without a
    step of Python for each, for a list may have millions."""
    return PLAIN_TYPES.issuperset(map(type, items))


# Types beyond the plain ones.

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
    if not isinstance(cls, type):
        raise TypeError(f"register_codec takes a class, not {cls!r}")
    if issubclass(cls, Flag):  # any combination of members
        encode = encode or (lambda flag: [member.name for member in flag])  # type: ignore[attr-defined]
        decode = decode or (lambda names: reduce(or_, [cls[n] for n in exact(names, list)], cls(0)))
    elif issubclass(cls, Enum):
        encode = encode or (lambda member: member.name)  # type: ignore[attr-defined]
        decode = decode or (lambda member_name: cls[member_name])
    if not callable(encode) or not callable(decode):
        raise TypeError(f"register_codec({cls.__qualname__}) needs encode= and decode=, functions")
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


def key_names(state: Any, path: tuple[Any, ...] = ()) -> list[str]:
    """Names of all leaves of nested dicts; lists and everything else count as leaves."""
    return [name for name, _, _ in key_leaves(state, path)]


def key_leaves(
    state: Any, path: tuple[Any, ...] = (), keys: tuple[Any, ...] = ()
) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """The same with the keys that lead to the leaves, and the leaves."""
    items = keyed(state)
    if items is None or (path and not items):
        yield join_path(path) if path else "value", keys, state
        return
    for key, item in items.items():
        yield from key_leaves(item, (*path, part_of(key)), (*keys, key))


def part_of(key: Any) -> Any:
    """A key as a part of a name: 0 and "0" are different keys, though tensors below them have the
    same name in a file."""
    return key if isinstance(key, str) else Numbered(key)


def revived(value: Any, file: str = "") -> Any:
    """`value` with what `opaque` left aside decoded: its tensors are there now. Raises
    CheckpointCorrupt."""
    if type(value) is Opaque:
        payload = revived(value.payload, file)
        try:
            return BY_NAME[value.codec].decode(payload)
        except CheckpointError:
            raise
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


# Bytes that claim more than there is.

MAX_DEPTH = 64  # each level of extensions costs some 50 KB of the C stack when it is read

# msgpack makes room for up to 10,000 items of a list, 80 KB, when it has read its length. So few
# lengths do no harm.
FEW = 8
_LONG = (b"\xdc", b"\xdd", b"\xde", b"\xdf")

# Tokens that hold nothing: numbers, nil, booleans, and extensions of fixed size. No more at once
# than the regular expression engine takes little memory for.
_HOLDING_NOTHING = re.compile(
    rb"(?:[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1\xd4]..|\xd5.{3}|[\xca\xce\xd2].{4}|\xd6.{5}|"
    rb"[\xcb\xcf\xd3].{8}|\xd7.{9}|\xd8.{17}){1,1000}+",
    re.DOTALL,
)
# First byte -> bytes of the length that follows, and bytes that come on top of that length.
_SKIPPED = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
}
# First byte -> bytes of the count that follows, and values for each.
_COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def check_declared(data: bytes) -> None:
    """Raises ValueError when lists and dicts in this msgpack say that they have more items than
    there are bytes.

    Each item takes a byte at least, so what is whole never does. Lists in lists that only say they
    are long would cost a thousand times the memory of the data, and that again for each level of
    extensions.
    """
    # Each length is three bytes at least.
    if len(data) < 3 * FEW or sum(map(data.count, _LONG)) <= FEW:
        return
    left, at, end = len(data), 0, len(data)
    while at < end:
        if plain := _HOLDING_NOTHING.match(data, at):
            at = plain.end()
            continue
        first = data[at]
        at += 1
        if first in _SKIPPED:
            width, more = _SKIPPED[first]
            at += width + more + int.from_bytes(data[at : at + width], "big")
        elif first in _COUNTED:
            width, each = _COUNTED[first]
            left -= each * int.from_bytes(data[at : at + width], "big")
            at += width
        elif 0xA0 <= first <= 0xBF:
            at += first & 0x1F
        elif first <= 0x8F:
            left -= 2 * (first & 0x0F)
        elif first <= 0x9F:
            left -= first & 0x0F
        else:
            return  # no msgpack, or cut off: the decoder says so, and there is nothing behind it
        if left < 0:
            raise ValueError("lists are said to have more items than there are bytes")


_NESTED = (list, dict, tuple, deque)


def check_depth(value: Any) -> None:
    """Raises ValueError for what is nested deeper than anything that is ever stored: it would
    overflow the stack of whoever walks through it."""
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(2 * MAX_DEPTH):
        if not level:
            return
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [
            part
            for parts in inner
            if not only_plain(parts)
            for part in parts
            if isinstance(part, _NESTED)
        ]
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


# To bytes and back.

# Extension codes of format version 1. Never reuse a number.
(
    BIG_INT,
    TUPLE,
    DICT,
    SET,
    FROZENSET,
    COMPLEX,
    TIME,
    PATH,
    NUMPY_SCALAR,
    NUMPY_ARRAY,
    REGISTERED,
    TENSOR,
) = range(1, 13)

LARGE_BYTES = 64 << 10  # from this length on texts and bytes need not lie in the index


@dataclass(slots=True, unsafe_hash=True)
class TensorRef:
    """Stands for the tensor number `index` of its component; `numpy`: it was a numpy array in the
    live state."""

    index: int
    numpy: bool = False


# A TensorRef, or what stands for it in the bytes; None where it is no tensor; and for a tensor that
# is made of others, a value of a registered type that has these in it.
Leaf = Callable[[tuple[Any, ...], Any], Any]
# The same of all values of a dict, or what stands for the dict.
Many = Callable[[tuple[Any, ...], dict[str, Any]], list[TensorRef] | bytes | None]


def tensor_wires(refs: Iterable[TensorRef]) -> list[bytes]:
    """What stands for each tensor in the bytes of a value."""
    return [_extension(TENSOR, msgpack.packb([ref.index, ref.numpy])) for ref in refs]


def tensors_wire(keys: Sequence[str], refs: Sequence[bytes]) -> bytes:
    """What stands for a dict of nothing but tensors."""
    packer = msgpack.Packer(use_bin_type=True, unicode_errors="surrogatepass")
    header = packer.pack_map_header(len(keys))
    return b"".join(
        [header, *(p for k, r in zip(keys, refs, strict=True) for p in (packer.pack(k), r))]
    )


def join_path(path: tuple[Any, ...]) -> str:
    """The name of a leaf: its path joined with `/`, each part escaped as in JSON Pointer (RFC
    6901).

    A part that is no str is written as its repr; where a str key of the same dict has that text
    too, `~2` and the type follow, so names stay distinct. Lone surrogates, which no UTF-8 file can
    hold, become backslash escapes.
    """
    parts = []
    for part in path:
        text = part if isinstance(part, str) else _key_text(part)
        parts.append(
            text.replace("~", "~0").replace("/", "~1") if not isinstance(part, Numbered) else text
        )
    name = "/".join(parts)
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


LONG_INT = 2048  # bits; Python can be set to write no ints of more than 640 digits in decimal


def _key_text(key: Any) -> str:
    """What a key that is no str is called: its repr, with long ints in hexadecimal."""
    if type(key) is int and key.bit_length() > LONG_INT:
        return hex(key)
    try:
        return repr(key)
    except ValueError:  # there is a long int in it
        parts = [_key_text(part) for part in key] if isinstance(key, tuple | frozenset) else ["..."]
        return (
            f"{type(key).__name__}({', '.join(parts if isinstance(key, tuple) else sorted(parts))})"
        )


class Numbered:
    """A part of a path that is no str and must not be taken for its text: {0: a, "0": b}."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __repr__(self) -> str:
        return (
            _key_text(self.key).replace("~", "~0").replace("/", "~1")
            + f"~2{type(self.key).__name__}"
        )


def encode(
    value: Any,
    leaf: Leaf | None = None,
    *,
    component: str = "",
    renumber: Callable[[], Sequence[int]] | None = None,
    large: Leaf | None = None,
    many: Many | None = None,
) -> bytes:
    """Bytes of `value`. `leaf(path, x)` is asked first about every x that is not plain; None means
    "not mine", and a value of a registered type stands in the place of x.

    large: asked about every str and bytes of LARGE_BYTES or more that is neither a key nor in a
    set; what it gives is the tensor of its bytes (of a text in UTF-8), or None to leave it out.
    many: asked first about every dict with text keys that has other than plain values in it: gives
    what `leaf` would have given of all of them, or the bytes that stand for the whole dict.
    renumber: called when all leaves were met; says for each number that `leaf` gave which one the
    bytes are to have. Raises UnsupportedValue, naming component, path and type, for what cannot be
    stored.
    """
    encoder = _Encoder(leaf, component, large, many)
    encoder.add(value, (), 0)
    return encoder.packed(None if renumber is None else renumber())


def decode(
    data: bytes,
    leaf: Callable[[TensorRef], Any] | None = None,
    *,
    lenient: bool = False,
    opaque: bool = False,
    file: str = "",
) -> Any:
    """The value that `encode` was given. `leaf(ref)` supplies tensors. Raises CheckpointCorrupt.

    lenient: values of unregistered codecs become `Opaque` instead of an error, and those whose
    codec wants real tensors.
    opaque: all become `Opaque` that have tensors in them, for `revived` to decode; OrderedDict and
    Counter apart.
    """
    decoder = _Decoder(leaf, lenient, opaque)
    try:
        value = decoder.value_of(data)
        check_depth(value)
        return value
    except MALFORMED as error:
        what = f"{file or 'index'}: stored values cannot be read"
        raise malformed(what, error, file or None) from None


_INT64 = range(-(2**63), 2**64)
_PACKED_AS_THEY_ARE = PLAIN_TYPES | {list, dict}
_HOLDERS = frozenset({list, dict})
_NUMBERS = PLAIN_TYPES - {str, bytes}
_TEXT = frozenset({str})
_TEXT_OR_BYTES = frozenset({str, bytes})


def _small(items: Collection[Any], kinds: set[type]) -> bool:
    """Whether no text or bytes among `items`, which are of these `kinds`, are large."""
    if kinds.isdisjoint(_TEXT_OR_BYTES):
        return True
    texts = items
    if not kinds <= _TEXT_OR_BYTES:
        texts = [item for item in items if type(item) in _TEXT_OR_BYTES]
    return max(map(len, texts)) < LARGE_BYTES


def _plain(items: Collection[Any]) -> bool:
    """Whether msgpack packs all of `items` as they are, and none is large. Large ints apart, which
    it says itself."""
    kinds = set(map(type, items))
    return kinds <= PLAIN_TYPES and _small(items, kinds)


def _as_they_are(items: Collection[Any], depth: int) -> bool:
    """The same at every depth of lists and dicts with text keys; `depth` is that of the items.
    Level by level, without a step of Python for each value: there may be millions."""
    level: Collection[Any] = items
    above: set[int] = set()
    for at in range(depth, MAX_DEPTH + 2):
        kinds = set(map(type, level))
        if not kinds <= _PACKED_AS_THEY_ARE or not _small(level, kinds):
            return False
        if kinds.isdisjoint(_HOLDERS):
            return True
        lists: Collection[Any] = [x for x in level if type(x) is list] if list in kinds else ()
        dicts: Collection[Any] = [x for x in level if type(x) is dict] if dict in kinds else ()
        if not _TEXT.issuperset(map(type, chain.from_iterable(dicts))):
            return False
        # Most values lie at the last level, of which nothing but the types is looked at.
        if at <= MAX_DEPTH and _NUMBERS.issuperset(map(type, _inside(lists, dicts))):
            return True
        once = {id(x): x for x in lists}, {id(x): x for x in dicts}
        if not above.isdisjoint(once[0]) or not above.isdisjoint(once[1]):
            return False  # it may contain itself, and have no end
        above.update(*once)
        level = [*_inside(once[0].values(), once[1].values())]
    return False  # nested too deep, which is told where that is


def _inside(lists: Iterable[Any], dicts: Iterable[Any]) -> Iterator[Any]:
    return chain(chain.from_iterable(lists), chain.from_iterable(map(dict.values, dicts)))


def _extension(code: int, data: bytes) -> bytes:
    """Quicker than msgpack.ExtType, and the same."""
    length = len(data)
    if length < 256 and length not in _FIXED:
        return b"\xc7%c%c%b" % (length, code, data)
    return bytes(msgpack.packb(msgpack.ExtType(code, data)))


_PATHS = {
    cls.__name__: cls
    for cls in (
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.PosixPath,
        pathlib.WindowsPath,
    )
}


@dataclass(slots=True)
class _Extension:
    """An extension that holds tensors: its bytes wait until it is known how these are numbered.
    parts: of the payload; of a set, those of each item."""

    code: int
    parts: list[Any]
    is_set: bool = False


_BYTES = frozenset({bytes})
_FIXED = frozenset({1, 2, 4, 8, 16})  # lengths for which msgpack has extensions of their own


class _Encoder:
    """One walk, in which all is packed at once but for tensors, whose numbers may not be known yet:
    `out` has bytes, a TensorRef for each of these, and an _Extension for what holds one."""

    def __init__(
        self, leaf: Leaf | None, component: str, large: Leaf | None = None, many: Many | None = None
    ) -> None:
        self.leaf, self.component, self.large, self.many = leaf, component, large, many
        self.out: list[Any] = []
        self.packer = msgpack.Packer(use_bin_type=True, unicode_errors="surrogatepass")

    def refuse(self, path: tuple[Any, ...], value: Any, why: str) -> UnsupportedValue:
        key = join_path(path)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        at = [f"component {self.component!r}"] if self.component else []
        where = ", ".join([*at, f"key {key!r}"] if key or not at else at)
        return UnsupportedValue(
            f"{where}: {why}", component=self.component or None, key=key, type_name=kind
        )

    def packed(self, numbers: Sequence[int] | None) -> bytes:
        return self.joined(self.out, numbers)

    def joined(self, parts: list[Any], numbers: Sequence[int] | None) -> bytes:
        return b"".join(
            part if type(part) is bytes else self.finished(part, numbers) for part in parts
        )

    def finished(self, part: Any, numbers: Sequence[int] | None) -> bytes:
        if type(part) is TensorRef:
            number = part.index if numbers is None else numbers[part.index]
            return _extension(TENSOR, self.packer.pack([number, part.numpy]))
        if part.is_set:
            # In the order of their bytes: equal sets give equal files whatever the hash seed.
            items = sorted(self.joined(item, numbers) for item in part.parts)
            return _extension(part.code, self.packer.pack(items))
        return _extension(part.code, self.joined(part.parts, numbers))

    def pack(self, value: Any, path: tuple[Any, ...]) -> bytes:
        """Bytes of what msgpack packs as it is."""
        try:
            return bytes(self.packer.pack(value))
        except (ValueError, OverflowError) as error:
            self.packer.reset()
            raise self.refuse(path, value, f"cannot be stored ({error})") from None

    def closed(self, made: _Extension, parts: list[Any]) -> Any:
        """An extension with these parts: its bytes already, where there is no tensor in it."""
        return self.finished(made, None) if _BYTES.issuperset(map(type, parts)) else made

    def add_closed(self, code: int, outer: list[Any]) -> None:
        """What is in `out` is the payload of an extension, and that belongs into `outer`."""
        parts, self.out = self.out, outer
        outer.append(self.closed(_Extension(code, parts), parts))

    def add(self, value: Any, path: tuple[Any, ...], depth: int) -> None:
        kind = type(value)
        if kind is int:
            self.add_int(value, path, depth)
        elif kind in PLAIN_TYPES:
            self.add_plain(value, path)
        elif depth > MAX_DEPTH:
            what = f"nested deeper than {MAX_DEPTH} levels (or contains itself)"
            raise self.refuse(path, value, what)
        elif kind is list:
            self.add_items(value, path, depth)
        elif kind is dict:
            self.add_dict(value, path, depth)
        elif kind is tuple:
            self.add_tuple(value, path, depth)
        elif self.leaf is not None and (ref := self.leaf(path, value)) is not None:
            if type(ref) in (TensorRef, bytes):
                self.out.append(ref)
            else:
                self.add_registered(ref, path, depth)
        else:
            self.add_other(value, path, depth)

    def add_plain(self, value: Any, path: tuple[Any, ...]) -> None:
        kind = type(value)
        if kind not in _TEXT_OR_BYTES or len(value) < LARGE_BYTES or self.large is None:
            self.out.append(self.pack(value, path))
            return
        ref = self.large(path, value)
        if ref is None:
            self.out.append(self.packer.pack(None))
            return
        outer, self.out = self.out, [self.packer.pack_array_header(2)]
        self.out += (self.packer.pack(kind.__name__), ref)
        self.add_closed(REGISTERED, outer)

    def add_int(self, value: int, path: tuple[Any, ...], depth: int) -> None:
        if value in _INT64:
            self.out.append(self.packer.pack(value))
        elif depth > MAX_DEPTH:
            raise self.refuse(path, value, f"nested deeper than {MAX_DEPTH} levels")
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
            self.out.append(_extension(BIG_INT, data))

    def packed_at_once(self, value: Any) -> bytes | None:
        """Bytes of what is plain; None where there is a large int in it."""
        try:
            return bytes(self.packer.pack(value))
        except OverflowError:
            self.packer.reset()
            return None

    def add_items(self, value: Sequence[Any], path: tuple[Any, ...], depth: int) -> None:
        """A list, or the payload of a tuple."""
        if _as_they_are(value, depth + 1) and (data := self.packed_at_once(value)) is not None:
            self.out.append(data)
            return
        self.out.append(self.packer.pack_array_header(len(value)))
        if {*map(type, value)} == {tuple} and depth < MAX_DEPTH and self.add_tuples(value):
            return
        for number, item in enumerate(value):
            self.add(item, (*path, number), depth + 1)

    def add_tuple(self, value: tuple[Any, ...], path: tuple[Any, ...], depth: int) -> None:
        if _plain(value) and (data := self.packed_at_once(value)) is not None:
            self.out.append(_extension(TUPLE, data))
            return
        outer, self.out = self.out, []
        self.add_items(value, path, depth)
        self.add_closed(TUPLE, outer)

    def add_tuples(self, value: Sequence[Any]) -> bool:
        """Tuples of plain values, all at once, where that can be done."""
        if not _plain([*chain.from_iterable(value)]):
            return False
        try:
            self.out += [_extension(TUPLE, data) for data in map(self.packer.pack, value)]
        except OverflowError:
            self.packer.reset()
            return False
        return True

    def add_dict(self, value: dict[Any, Any], path: tuple[Any, ...], depth: int) -> None:
        pack = self.packer.pack
        if not _TEXT.issuperset(map(type, value)):
            outer, self.out = self.out, []
            self.add_pairs(value, path, depth)
            self.add_closed(DICT, outer)
            return
        if (
            _as_they_are(value.values(), depth + 1)
            and (data := self.packed_at_once(value)) is not None
        ):
            self.out.append(data)
            return
        known = self.many(path, value) if self.many is not None and depth < MAX_DEPTH else None
        if type(known) is bytes:
            self.out.append(known)
            return
        self.out.append(self.packer.pack_map_header(len(value)))
        if known is not None:
            for key, ref in zip(value, known, strict=True):
                self.out += (pack(key), ref)
            return
        for key, item in value.items():
            self.out.append(pack(key))
            self.add(item, (*path, key), depth + 1)

    def add_pairs(self, value: dict[Any, Any], path: tuple[Any, ...], depth: int) -> None:
        """The payload of a dict with other keys than texts."""
        if (
            _plain(value)
            and _plain(value.values())
            and (data := self.packed_at_once([*value.items()])) is not None
        ):
            self.out.append(data)
            return
        texts = {key for key in value if type(key) is str}
        self.out.append(self.packer.pack_array_header(len(value)))
        pair = self.packer.pack_array_header(2)
        for key, item in value.items():
            step = (
                Numbered(key) if texts and type(key) is not str and _key_text(key) in texts else key
            )
            self.out.append(pair)
            self.add_whole(key, (*path, step), depth + 1)
            self.add(item, (*path, step), depth + 1)

    def add_whole(self, value: Any, path: tuple[Any, ...], depth: int) -> None:
        """What has to be hashed while tensors are not there yet is not left to them."""
        large, self.large = self.large, None
        self.add(value, path, depth)
        self.large = large

    def add_set(self, value: Any, path: tuple[Any, ...], depth: int) -> None:
        code = SET if type(value) is set else FROZENSET
        if _plain(value):
            try:
                # In the order of their bytes, as below.
                self.add_extension(code, self.packer.pack(sorted(map(self.packer.pack, value))))
                return
            except OverflowError:
                self.packer.reset()
        outer, items = self.out, list[list[Any]]()
        for item in value:
            self.out = []
            self.add_whole(item, path, depth + 1)
            items.append(self.out)
        self.out = outer
        made = _Extension(code, items, is_set=True)
        outer.append(self.closed(made, [*chain.from_iterable(items)]))

    def add_other(self, value: Any, path: tuple[Any, ...], depth: int) -> None:
        kind = type(value)
        if kind in (set, frozenset):
            self.add_set(value, path, depth)
        elif kind is complex:
            self.add_extension(COMPLEX, struct.pack(">dd", value.real, value.imag))
        elif kind in (dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone, zoneinfo.ZoneInfo):
            outer, self.out = self.out, []
            self.add(self.time_payload(value, path), path, depth + 1)
            self.add_closed(TIME, outer)
        elif kind.__name__ in _PATHS and isinstance(value, pathlib.PurePath):
            self.add_extension(PATH, self.pack([kind.__name__, str(value)], path))
        elif is_numpy(value):
            if why := why_not_storable(value):
                raise self.refuse(path, value, why)
            code = NUMPY_ARRAY if is_array(value) else NUMPY_SCALAR
            self.add_extension(code, self.pack(payload_of(value), path))
        else:
            self.add_registered(value, path, depth)

    def add_extension(self, code: int, data: bytes) -> None:
        self.out.append(_extension(code, data))

    def add_registered(self, value: Any, path: tuple[Any, ...], depth: int) -> None:
        kind = type(value)
        if kind is Opaque:
            name, payload = value.codec, value.payload
        else:
            codec = codec_of(value)
            if codec is None:
                what = (
                    f"a value of type {kind.__module__}.{kind.__qualname__} cannot be stored; "
                    f"{hint(value)}"
                )
                raise self.refuse(path, value, what)
            name, payload = codec.name, codec.encode(value)
        outer, self.out = self.out, [self.packer.pack_array_header(2), self.pack(name, path)]
        # It has the path of the value itself, so that what is in it is found by its own keys.
        self.add(payload, path, depth + 1)
        self.add_closed(REGISTERED, outer)

    def time_payload(self, value: Any, path: tuple[Any, ...]) -> list[Any]:
        if isinstance(value, dt.timedelta):
            return ["timedelta", value.days, value.seconds, value.microseconds]
        if isinstance(value, zoneinfo.ZoneInfo):
            if value.key is None:
                raise self.refuse(path, value, "a ZoneInfo without a key cannot be stored")
            return ["zone", value.key]
        if isinstance(value, dt.timezone):
            offset = value.utcoffset(None)
            return [
                "timezone",
                offset.days,
                offset.seconds,
                offset.microseconds,
                value.tzname(None),
            ]
        if isinstance(value, dt.datetime | dt.time):
            zone = value.tzinfo
            if zone is not None and type(zone) not in (dt.timezone, zoneinfo.ZoneInfo):
                raise self.refuse(
                    path, value, f"time zone of type {type(zone).__qualname__} cannot be stored"
                )
            zone_payload = None if zone is None else self.time_payload(zone, path)
            return [
                type(value).__name__,
                value.replace(tzinfo=None).isoformat(),
                value.fold,
                zone_payload,
            ]
        return ["date", value.isoformat()]


def largest_part(tree: bytes) -> tuple[str, int]:
    """The name of the value that takes most of the bytes of a tree, and how many. It may be a
    container of many alike."""
    value: Any = msgpack.unpackb(tree, strict_map_key=False, unicode_errors="surrogatepass")
    path: tuple[Any, ...] = ()
    size = len(tree)
    while True:
        while isinstance(value, msgpack.ExtType):
            if value.code not in (TUPLE, DICT, REGISTERED):
                return join_path(path), size
            inner = msgpack.unpackb(
                value.data, strict_map_key=False, unicode_errors="surrogatepass"
            )
            if value.code == DICT:
                inner = {key if isinstance(key, str) else repr(key): item for key, item in inner}
            value = inner[1] if value.code == REGISTERED else inner
        items = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value if isinstance(value, list) else ())
        )
        sizes = [
            (len(msgpack.packb(item, unicode_errors="surrogatepass")), key, item)
            for key, item in items
        ]
        most, step, value = max(sizes, key=lambda found: found[0], default=(0, None, None))
        if 2 * most < size:
            return join_path(path), size
        size, path = most, (*path, step)


def _holds_tensor(value: Any) -> bool:
    """Whether what is to be hashed has a tensor in it, for which a reference stands so far."""
    if isinstance(value, tuple | frozenset):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, TensorRef)


class _Decoder:
    def __init__(
        self, leaf: Callable[[TensorRef], Any] | None, lenient: bool, opaque: bool
    ) -> None:
        self.leaf = leaf
        self.lenient, self.opaque, self.refs = lenient, opaque, 0
        self.depth = 0

    def value_of(self, data: bytes) -> Any:
        check_declared(data)
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            unicode_errors="surrogatepass",
            ext_hook=self.ext,
            object_pairs_hook=unique,
        )

    def ext(self, code: int, data: bytes) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH + 1:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        try:
            return self.ext_value(code, data)
        finally:
            self.depth -= 1

    def ext_value(self, code: int, data: bytes) -> Any:
        if code == BIG_INT:
            return int.from_bytes(data, "big", signed=True)
        if code == TUPLE:
            return tuple(exact(self.value_of(data), list))
        if code == DICT:
            before = self.refs
            pairs = [(key, item) for key, item in exact(self.value_of(data), list)]
            if self.refs > before and any(_holds_tensor(key) for key, _ in pairs):
                raise ValueError("a tensor cannot be a key")
            return unique(pairs)
        if code in (SET, FROZENSET):
            items = [self.value_of(item) for item in exact_items(self.value_of(data), bytes)]
            if any(_holds_tensor(item) for item in items):
                raise ValueError("a tensor cannot be in a set")
            return set(items) if code == SET else frozenset(items)
        if code == COMPLEX:
            return complex(*struct.unpack(">dd", data))
        if code == TIME:
            return self.time(self.value_of(data))
        if code == PATH:
            kind, text = self.value_of(data)
            # A path of another system stays readable as its pure kind.
            native = _PATHS[kind]
            pure = (
                native
                if kind.startswith("Pure") or kind == type(pathlib.Path()).__name__
                else native.__bases__[-1]
            )
            return pure(text)
        if code == NUMPY_SCALAR:
            return scalar_of(*self.value_of(data))
        if code == NUMPY_ARRAY:
            return array_of(*self.value_of(data))
        if code == TENSOR:
            index, is_numpy = self.value_of(data)
            if type(index) is not int or type(is_numpy) is not bool:
                raise ValueError("a tensor reference is malformed")
            self.refs += 1
            ref = TensorRef(index, is_numpy)
            return ref if self.leaf is None else self.leaf(ref)
        if code == REGISTERED:
            return self.registered(data)
        raise ValueError(f"unknown kind of value {code}")

    def registered(self, data: bytes) -> Any:
        before = self.refs
        name, payload = self.value_of(data)
        codec = BY_NAME.get(name)
        if codec is None:
            if self.lenient:
                return Opaque(name, payload)
            raise ValueError(
                f"no codec named {name!r} is registered; call ckptcore.register_codec before "
                "loading"
            )
        has_tensors = self.refs > before
        if self.opaque and has_tensors and codec.cls not in (OrderedDict, Counter):
            return Opaque(name, payload)
        try:
            return codec.decode(payload)
        except Exception as error:  # anybody's code; what it raises is reported as damage
            if self.lenient and has_tensors:
                return Opaque(name, payload)  # it wants tensors, not what stands for them
            raise ValueError(f"codec {name!r}: {type(error).__name__}: {error}") from error

    def time(self, payload: list[Any]) -> Any:
        kind, *rest = payload
        if kind == "timedelta":
            return dt.timedelta(days=rest[0], seconds=rest[1], microseconds=rest[2])
        if kind == "zone":
            return zoneinfo.ZoneInfo(rest[0])
        if kind == "timezone":
            offset = dt.timedelta(days=rest[0], seconds=rest[1], microseconds=rest[2])
            plain = dt.timezone(offset)
            return plain if plain.tzname(None) == rest[3] else dt.timezone(offset, rest[3])
        if kind == "date":
            return dt.date.fromisoformat(rest[0])
        cls: Any = {"datetime": dt.datetime, "time": dt.time}[kind]
        zone = None if rest[2] is None else self.time(rest[2])
        return cls.fromisoformat(rest[0]).replace(fold=rest[1], tzinfo=zone)
