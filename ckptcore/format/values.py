"""Codecs of plain values: every leaf keeps its exact type, and nothing is ever executed or imported
to read one.

Values are msgpack. What msgpack has a type for is stored as that (None, bool, int of 64 bits,
float, str, bytes, list, dict with str keys); everything else is an extension whose payload is
msgpack again. Tensors are not values: a `leaf` function replaces them with `TensorRef(number)` on
the way in and back again on the way out.
"""

from __future__ import annotations

import datetime as dt
import pathlib
import struct
import zoneinfo
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgpack

from ..errors import UnsupportedValue
from .checks import MAX_DEPTH, check_declared, check_depth, exact, exact_items, parsing, unique
from .codecs import (
    BY_NAME,
    Opaque,
    array_of,
    codec_of,
    hint,
    is_array,
    is_numpy,
    payload_of,
    scalar_of,
    why_not_storable,
)

__all__ = [
    "LARGE_BYTES",
    "MAX_DEPTH",
    "Numbered",
    "TensorRef",
    "decode",
    "encode",
    "join_path",
    "largest_part",
    "tensor_wire",
]

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

# A TensorRef, or what stands for it in the bytes; None where it is no tensor.
Leaf = Callable[[tuple[Any, ...], Any], Any]

LARGE_BYTES = 64 << 10  # from this length on texts and bytes need not lie in the index


@dataclass(slots=True, unsafe_hash=True)
class TensorRef:
    """Stands for the tensor number `index` of its component; `numpy`: it was a numpy array in the
    live state."""

    index: int
    numpy: bool = False


def tensor_wire(number: int, numpy: bool) -> msgpack.ExtType:
    """What stands for a tensor in the bytes of a value."""
    return msgpack.ExtType(TENSOR, msgpack.packb([number, numpy]))


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
    many: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any] | None] | None = None,
) -> bytes:
    """Bytes of `value`. `leaf(path, x)` is asked first about every x that is not plain; None means
    "not mine".

    large: asked about every str and bytes of LARGE_BYTES or more that is neither a key nor in a
    set; what it gives is the tensor of its bytes (of a text in UTF-8), or None to leave it out.
    many: asked about every dict with text keys and values that are not plain; what it gives stands
    for the dict: by key, what `leaf` would have given, or `tensor_wire` of it.
    renumber: called when all leaves were met; says for each number that `leaf` gave which one the
    bytes are to have. Raises UnsupportedValue, naming component, path and type, for what cannot be
    stored.
    """
    encoder = _Encoder(leaf, component, large, many)
    wire = encoder.wire(value, (), 0)
    return encoder.packed(wire, None if renumber is None else renumber())


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
    with parsing(f"{file or 'index'}: stored values cannot be read", file or None):
        value = decoder.value_of(data)
        check_depth(value)
        return value


_INT64 = range(-(2**63), 2**64)
_PLAIN = frozenset({type(None), bool, float, bytes, str})
_PLAIN_OR_INT = _PLAIN | {int}
_OF_ONE_SIZE = _PLAIN - {bytes, str}
_TEXT = frozenset({str})
_TEXT_OR_BYTES = frozenset({str, bytes})


def _ready(items: Collection[Any]) -> bool:
    """Whether msgpack packs all of `items` as they are, and none is large. Without a step of Python
    for each: there may be millions."""
    kinds = set(map(type, items))
    if not kinds <= _PLAIN_OR_INT:
        return False
    if not kinds.isdisjoint(_TEXT_OR_BYTES):
        texts = (
            items
            if kinds <= _TEXT_OR_BYTES
            else [item for item in items if type(item) in _TEXT_OR_BYTES]
        )
        if max(map(len, texts)) >= LARGE_BYTES:
            return False
    if int not in kinds:
        return True
    numbers = items if len(kinds) == 1 else [item for item in items if type(item) is int]
    return min(numbers) in _INT64 and max(numbers) in _INT64


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
    """An extension whose payload is `wire`, to be packed when it is known how tensors are
    numbered."""

    code: int
    wire: Any
    is_set: bool = False


class _Encoder:
    """Two steps: a walk that makes of a value what msgpack knows, and packing it at once. What
    msgpack packs as it is stays what it is; nobody else has a turn between the two steps."""

    def __init__(
        self,
        leaf: Leaf | None,
        component: str,
        large: Leaf | None = None,
        many: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any] | None] | None = None,
    ) -> None:
        self.leaf, self.component, self.large, self.many = leaf, component, large, many
        # For what is packed at once, having no tensors in it whose numbers are yet to be known.
        self.packer = msgpack.Packer(use_bin_type=True, unicode_errors="surrogatepass")

    def refuse(self, path: tuple[Any, ...], value: Any, why: str) -> UnsupportedValue:
        key = join_path(path)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        where = f"component {self.component!r}, key {key!r}" if self.component else f"key {key!r}"
        return UnsupportedValue(
            f"{where}: {why}", component=self.component or None, key=key, type_name=kind
        )

    def packed(self, wire: Any, numbers: Sequence[int] | None) -> bytes:
        def default(item: Any) -> msgpack.ExtType:
            if type(item) is TensorRef:
                number = item.index if numbers is None else numbers[item.index]
                return tensor_wire(number, item.numpy)
            if item.is_set:
                # In the order of their bytes: equal sets give equal files whatever the hash seed.
                return msgpack.ExtType(
                    item.code, msgpack.packb(sorted(pack(each) for each in item.wire))
                )
            return msgpack.ExtType(item.code, pack(item.wire))

        def pack(wire: Any) -> bytes:
            return bytes(
                msgpack.packb(
                    wire, default=default, use_bin_type=True, unicode_errors="surrogatepass"
                )
            )

        try:
            return pack(wire)
        except (ValueError, OverflowError) as error:
            raise self.refuse((), wire, f"cannot be stored ({error})") from None

    def wire(self, value: Any, path: tuple[Any, ...], depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            if kind not in _TEXT_OR_BYTES or len(value) < LARGE_BYTES or self.large is None:
                return value
            ref = self.large(path, value)
            return None if ref is None else _Extension(REGISTERED, [kind.__name__, ref])
        if kind is int:
            if value in _INT64:
                return value
            if depth > MAX_DEPTH:
                raise self.refuse(path, value, f"nested deeper than {MAX_DEPTH} levels")
            size = value.bit_length() // 8 + 1
            return msgpack.ExtType(BIG_INT, value.to_bytes(size, "big", signed=True))
        if depth > MAX_DEPTH:
            raise self.refuse(
                path, value, f"nested deeper than {MAX_DEPTH} levels (or contains itself)"
            )
        if kind is list:
            return self.wire_items(value, path, depth)
        if kind is dict:
            return self.wire_dict(value, path, depth)
        if kind is tuple:
            if _ready(value):
                return msgpack.ExtType(TUPLE, self.packed_now(value, path))
            return _Extension(TUPLE, self.wire_items(value, path, depth))
        if self.leaf is not None and (ref := self.leaf(path, value)) is not None:
            return ref
        return self.wire_other(value, path, depth)

    def packed_now(self, items: Any, path: tuple[Any, ...]) -> bytes:
        """Bytes of what is ready."""
        try:
            return bytes(self.packer.pack(items))
        except (ValueError, OverflowError) as error:
            self.packer.reset()
            raise self.refuse(path, items, f"cannot be stored ({error})") from None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What has to be hashed while tensors are not there yet is not left to them."""
        large, self.large = self.large, None
        try:
            yield
        finally:
            self.large = large

    def wire_items(self, value: Sequence[Any], path: tuple[Any, ...], depth: int) -> Sequence[Any]:
        if _ready(value):
            return value
        kinds = set(map(type, value))
        if (
            kinds in ({list}, {tuple})
            and depth < MAX_DEPTH
            and _ready(list(chain.from_iterable(value)))
        ):
            if list in kinds:
                return value
            return [msgpack.ExtType(TUPLE, self.packed_now(item, path)) for item in value]
        return [
            item if type(item) in _OF_ONE_SIZE else self.wire(item, (*path, i), depth + 1)
            for i, item in enumerate(value)
        ]

    def wire_dict(self, value: dict[Any, Any], path: tuple[Any, ...], depth: int) -> Any:
        if _TEXT.issuperset(map(type, value)):
            if _ready(value.values()):
                return value
            if (
                self.many is not None
                and depth < MAX_DEPTH
                and (wire := self.many(path, value)) is not None
            ):
                return wire
            return {
                key: item
                if type(item) in _OF_ONE_SIZE
                else self.wire(item, (*path, key), depth + 1)
                for key, item in value.items()
            }
        if _ready(value) and _ready(value.values()):
            return msgpack.ExtType(DICT, self.packed_now(list(value.items()), path))
        texts = {key for key in value if type(key) is str}
        pairs = []
        for key, item in value.items():
            step = (
                Numbered(key) if texts and type(key) is not str and _key_text(key) in texts else key
            )
            with self.whole():
                name = self.wire(key, (*path, step), depth + 1)
            pairs.append([name, self.wire(item, (*path, step), depth + 1)])
        return _Extension(DICT, pairs)

    def wire_other(self, value: Any, path: tuple[Any, ...], depth: int) -> Any:
        kind = type(value)
        if kind in (set, frozenset) and _ready(value):
            # In the order of their bytes, as below.
            packed = sorted(self.packed_now(item, path) for item in value)
            return msgpack.ExtType(SET if kind is set else FROZENSET, self.packed_now(packed, path))
        if kind in (set, frozenset):
            with self.whole():
                items = [self.wire(item, path, depth + 1) for item in value]
            return _Extension(SET if kind is set else FROZENSET, items, is_set=True)
        if kind is complex:
            return msgpack.ExtType(COMPLEX, struct.pack(">dd", value.real, value.imag))
        if kind in (dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone, zoneinfo.ZoneInfo):
            return _Extension(TIME, self.wire(self.time_payload(value, path), path, depth + 1))
        if kind.__name__ in _PATHS and isinstance(value, pathlib.PurePath):
            return _Extension(PATH, [kind.__name__, str(value)])
        if is_numpy(value):
            if why := why_not_storable(value):
                raise self.refuse(path, value, why)
            return _Extension(NUMPY_ARRAY if is_array(value) else NUMPY_SCALAR, payload_of(value))
        if kind is Opaque:
            return _Extension(REGISTERED, [value.codec, self.wire(value.payload, path, depth + 1)])
        codec = codec_of(value)
        if codec is None:
            what = (
                f"a value of type {kind.__module__}.{kind.__qualname__} cannot be stored; "
                f"{hint(value)}"
            )
            raise self.refuse(path, value, what)
        # The payload has the path of the value itself, so that what is in it is found by its own
        # keys.
        return _Extension(REGISTERED, [codec.name, self.wire(codec.encode(value), path, depth + 1)])

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
            return unique([(key, item) for key, item in exact(self.value_of(data), list)])
        if code in (SET, FROZENSET):
            items = [self.value_of(item) for item in exact_items(self.value_of(data), bytes)]
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
