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
from collections.abc import Callable, Collection, Iterable, Sequence
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
    "tensor_wires",
    "tensors_wire",
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

LARGE_BYTES = 64 << 10  # from this length on texts and bytes need not lie in the index


@dataclass(slots=True, unsafe_hash=True)
class TensorRef:
    """Stands for the tensor number `index` of its component; `numpy`: it was a numpy array in the
    live state."""

    index: int
    numpy: bool = False


# A TensorRef, or what stands for it in the bytes; None where it is no tensor.
Leaf = Callable[[tuple[Any, ...], Any], TensorRef | bytes | None]
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
    "not mine".

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
    with parsing(f"{file or 'index'}: stored values cannot be read", file or None):
        value = decoder.value_of(data)
        check_depth(value)
        return value


_INT64 = range(-(2**63), 2**64)
_PLAIN = frozenset({type(None), bool, float, bytes, str, int})
_PACKED_AS_THEY_ARE = _PLAIN | {list, dict}
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
    return kinds <= _PLAIN and _small(items, kinds)


def _as_they_are(items: Collection[Any], depth: int) -> bool:
    """The same at every depth of lists and dicts with text keys; `depth` is that of the items.
    Level by level, without a step of Python for each value: there may be millions."""
    level: Collection[Any] = items
    above: set[int] = set()
    for _ in range(depth, MAX_DEPTH + 2):
        kinds = set(map(type, level))
        if not kinds <= _PACKED_AS_THEY_ARE or not _small(level, kinds):
            return False
        lists = {id(x): x for x in level if type(x) is list} if list in kinds else {}
        dicts = {id(x): x for x in level if type(x) is dict} if dict in kinds else {}
        if not lists and not dicts:
            return True
        if not above.isdisjoint(lists) or not above.isdisjoint(dicts):
            return False  # it may contain itself, and have no end
        if not _TEXT.issuperset(map(type, chain.from_iterable(dicts.values()))):
            return False
        above.update(lists, dicts)
        level = [
            *chain.from_iterable(lists.values()),
            *chain.from_iterable(map(dict.values, dicts.values())),
        ]
    return False  # nested too deep, which is told where that is


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
        where = f"component {self.component!r}, key {key!r}" if self.component else f"key {key!r}"
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
        elif kind in _PLAIN:
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
            self.out.append(ref)
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
