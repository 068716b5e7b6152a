"""Tensor memory: dtypes, bytes in C order without a copy where that is possible, and which tensors
share memory; on accelerators, streams for copies, and when memory holds what was asked of it."""

from __future__ import annotations

import ctypes
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..arguments import shown
from ..errors import InvalidState, StateMismatch, UnsupportedValue
from ..format.layout import Box, Mesh, MeshLayout, volume
from ..format.tensorfile import DTYPES
from ..storage.chunks import Chunk, MakeMemory, Scratch

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
# Those that safetensors has no agreed name for are stored under torch's own.
_NAMES |= {
    dtype: name
    for name, kind in DTYPES.items()
    if not kind.native and isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
# Nearly all tensors are of these types, of which it is known at once that there is nothing special
# to them.
ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})
LARGEST = 2**57  # items, also where one size is 0: see docs/format.md
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str | None:
    """The format's name of a dtype; None when it cannot be stored (quantized dtypes: they need
    their scales)."""
    return _NAMES.get(dtype)


# The installed torch's dtype of a name in files; None where it has none.
torch_dtype: Callable[[str], torch.dtype | None] = _DTYPES.get


def _why_not_storable(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be stored, or None."""
    dispatch = getattr(tensor, "__torch_dispatch__", None)
    # What has inner tensors, or runs operations in a way of its own.
    if type(tensor) not in ORDINARY and (
        is_traceable_wrapper_subclass(tensor)
        or dispatch is not getattr(torch.Tensor, "__torch_dispatch__", None)
    ):
        return (
            f"tensor subclass {_type_name(tensor)} is not supported; call register_tensor_class "
            "for it where it is a plain container of other tensors, or store those"
        )
    if type(tensor) not in ORDINARY and torch.nn.parameter.is_lazy(tensor):
        return "an uninitialized parameter has no data; run the model once first"
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"
        return f"a {kind} cannot be stored; convert it to dense or store its parts"
    if tensor.is_meta:
        return "a meta tensor has no data to store"
    if (tensor.numel() or prod(n or 1 for n in tensor.shape)) >= LARGEST:
        return f"a tensor of shape {list(tensor.shape)} has more items than the format can count"
    if dtype_name(tensor.dtype) is None:
        return (
            f"dtype {tensor.dtype} cannot be stored; store its integers and scales as tensors of "
            "their own"
        )
    return None


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A slice of a logical tensor, for code without DTensor.

    tensor: torch.Tensor, the values of the slice.
    global_shape: tuple of int, shape of the whole tensor, in items.
    offset: tuple of int, where the slice begins in it, in items.

    Raises InvalidState when the slice is not inside the global shape.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor):
            raise InvalidState(f"Shard: tensor must be a tensor, not {shown(self.tensor)}")
        for name in ("global_shape", "offset"):
            given = getattr(self, name)
            try:
                sizes = tuple(operator.index(n) for n in given)
            except Exception:  # of a type of the user's own
                raise InvalidState(
                    f"Shard: {name} must be whole numbers, not {shown(given)}"
                ) from None
            object.__setattr__(self, name, sizes)
        local = tuple(self.tensor.shape)
        fits = len(self.offset) == len(local) == len(self.global_shape) and all(
            o >= 0 and o + n <= g
            for o, n, g in zip(self.offset, local, self.global_shape, strict=False)
        )
        if not fits:
            raise InvalidState(
                f"Shard: a box of shape {local} at {self.offset} is not inside {self.global_shape}"
            )


@dataclass(slots=True)
class LocalShard:
    """What a rank holds of a logical tensor. `box`: None where it holds nothing by its layout (not
    in the mesh).

    layout: how all ranks hold it (DTensor), "box" for a Shard, None for a plain tensor, which is
    all of it.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box | None
    layout: MeshLayout | Literal["box"] | None


def local_shard(leaf: torch.Tensor | Shard) -> LocalShard:
    """Raises InvalidState for a layout that is not one whole state: pending sums, or cuts in an
    order not known."""
    if isinstance(leaf, Shard):
        return LocalShard(
            leaf.tensor, leaf.global_shape, (leaf.offset, tuple(leaf.tensor.shape)), "box"
        )
    if not is_dtensor(leaf):
        shape = tuple(leaf.shape)
        return LocalShard(leaf, shape, ((0,) * len(shape), shape), None)
    return _dtensor_shard(leaf)


def _dtensor_shard(leaf: Any) -> LocalShard:
    facts = _facts_of(leaf.device_mesh)
    local, shape = leaf.to_local().detach(), tuple(leaf.shape)
    known = facts.parts.get((leaf.placements, shape))
    if known is None:
        layout = MeshLayout(facts.mesh, codes_of(leaf.device_mesh, leaf.placements))
        known = layout, None if facts.at is None else layout.box_at(shape, facts.at)
        facts.parts[leaf.placements, shape] = known
    layout, box = known
    if box is not None and box[1] != tuple(local.shape) and local.numel() + volume(box[1]):
        raise InvalidState(
            f"DTensor of shape {shape} with placements {leaf.placements} holds "
            f"{tuple(local.shape)} here, not {box[1]}; this "
            "layout is not supported"
        )
    return LocalShard(local, shape, box, layout)


def is_dtensor(leaf: Any) -> bool:
    """Without importing torch's distributed tensors when nobody has made one."""
    kind: Any = type(leaf)
    return is_dtensor_class(kind)


@lru_cache(maxsize=256)
def is_dtensor_class(kind: type) -> bool:
    """The same of what is of type `kind`."""
    if kind in ORDINARY or not any(cls.__name__ == "DTensor" for cls in kind.__mro__):
        return False
    from torch.distributed.tensor import DTensor

    return issubclass(kind, DTensor)


_FORM = operator.attrgetter("dtype", "shape", "device", "layout", "is_nested")


def forms_of(leaves: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Of each leaf what must stay the same for it to be described as before, and its memory on this
    rank. Equal to nothing: the forms of leaves of types that are not known.

    Quick: it is asked for thousands of tensors at every save. Raises RuntimeError for what has no
    shape.
    """
    if ORDINARY.issuperset(map(type, leaves)):
        return [*map(_FORM, leaves)], leaves
    forms: list[Any] = []
    memory: list[torch.Tensor] = []
    for leaf in leaves:
        form: Any = object()
        kind: Any = type(leaf)
        local = leaf
        if kind in ORDINARY:
            form = _FORM(leaf)
        elif isinstance(leaf, Shard):
            local = leaf.tensor
            if kind is Shard and type(local) in ORDINARY:
                form = leaf.global_shape, leaf.offset, _FORM(local)
        elif is_dtensor_class(kind):
            local = leaf.to_local()
            if type(local) in ORDINARY:
                form = _facts_of(leaf.device_mesh), leaf.placements, leaf.shape, _FORM(local)
        forms.append(form)
        memory.append(local)
    return forms, memory


class TensorFacts(NamedTuple):
    """What is stored of a tensor beside its name. shape: of the memory on this rank; global_shape,
    box, layout: as in LocalShard."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    global_shape: tuple[int, ...]
    box: Box | None
    layout: MeshLayout | Literal["box"] | None

    @classmethod
    def of(cls, shard: LocalShard) -> TensorFacts:
        tensor = shard.tensor
        dtype, shape = dtype_name(tensor.dtype) or "", tuple(tensor.shape)
        return cls(dtype, shape, tensor.nbytes, shard.shape, shard.box, shard.layout)


def describe(
    component: str, names: Sequence[str], leaves: list[Any], *, sharded: bool, loading: bool
) -> tuple[list[Any], list[torch.Tensor], list[TensorFacts]]:
    """The forms of leaves, their memory on this rank, and what is stored of each.

    sharded: slices are allowed. Raises UnsupportedValue for what cannot be stored, InvalidState for
    slices that are not expected or not complete, and where there is no memory to load into.
    """
    try:
        forms, memory = forms_of(leaves)
    except RuntimeError:  # one has no shape, and is refused by name
        forms, memory = [object() for _ in leaves], leaves
    # Leaves of one form are described alike, and large states have few forms.
    known: dict[Any, TensorFacts] = {}
    for form, leaf, name in zip(forms, leaves, names, strict=True):
        if form in known:
            continue
        try:
            known[form] = TensorFacts.of(_checked_shard(leaf, sharded, loading))
        except (InvalidState, UnsupportedValue) as error:
            error.message = f"component {component!r}, key {name!r}{error.message}"
            error.component, error.key = component, name
            raise
    return forms, memory, [known[form] for form in forms]


def _checked_shard(leaf: Any, sharded: bool, loading: bool) -> LocalShard:
    """What this rank holds of a leaf. Raises as `describe` does."""
    inner = leaf if isinstance(leaf, torch.Tensor) else leaf.tensor
    if loading and inner.is_meta:
        raise InvalidState(
            " is on the meta device, and a load has no memory to read into: give "
            "ModelState(module, device=...), or call module.to_empty(device=...) before it"
        )
    why = None if is_dtensor(inner) else _why_not_storable(inner)
    if why is None:
        try:
            part = local_shard(leaf)
        except InvalidState as error:
            error.message = f": {error.message}"
            raise
        if part.layout is not None and not sharded:
            what = f" is a slice of a tensor ({type(leaf).__name__}); declare the component SHARDED"
            raise InvalidState(what)
        if part.tensor is inner or (why := _why_not_storable(part.tensor)) is None:
            return part
    raise UnsupportedValue(f": {why}", type_name=_type_name(leaf))


class _MeshFacts(NamedTuple):
    """A DeviceMesh as the format sees it, and where this rank is in it (None: it is not)."""

    of: weakref.ref[Any]
    mesh: Mesh
    at: list[int] | None
    parts: dict[Any, tuple[MeshLayout, Box | None]]  # by placements and global shape

    def __hash__(self) -> int:
        return hash(self.mesh.shape)


# By the id of the DeviceMesh. A DTensor's mesh takes torch 0.1 ms to describe, and thousands of
# tensors share one.
_mesh_facts: dict[int, _MeshFacts] = {}


def _facts_of(mesh: Any) -> _MeshFacts:
    known = _mesh_facts.get(id(mesh))
    if known is None or known.of() is not mesh:
        key = id(mesh)
        ref = weakref.ref(mesh, lambda gone: _forget_mesh(key, gone))
        ranks = mesh.mesh
        described = Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()))
        known = _mesh_facts[key] = _MeshFacts(ref, described, mesh.get_coordinate(), {})
    return known


def _forget_mesh(key: int, gone: weakref.ref[Any]) -> None:
    if (known := _mesh_facts.get(key)) is not None and known.of is gone:
        del _mesh_facts[key]


def codes_of(mesh: Any, placements: Sequence[Any]) -> tuple[str, ...]:
    """Torch's placements on a mesh, as the format has them. Raises InvalidState."""
    return tuple(_code_of(number, mesh, placements) for number in range(len(placements)))


def placements_of(mesh: Any, codes: Sequence[str]) -> tuple[Any, ...]:
    """The reverse."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Cut
    from torch.distributed.tensor.placement_types import _StridedShard

    made: list[Any] = []
    for number, code in enumerate(codes):
        if code == "R":
            made.append(Replicate())
        elif code[0] == "S":
            made.append(Cut(int(code[1:])))
        else:
            later = [mesh.size(m) for m in range(number + 1, mesh.ndim) if codes[m][1:] == code[1:]]
            made.append(_StridedShard(int(code[1:]), split_factor=prod(later)))
    return tuple(made)


def is_mesh(value: Any) -> bool:
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(value, DeviceMesh)


def is_placement(value: Any) -> bool:
    from torch.distributed.tensor import Placement

    return isinstance(value, Placement)


def dtensor_of(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Any, stride: Any
) -> torch.Tensor:
    """A DTensor of this rank's part; nothing is asked of other ranks."""
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return made


def box_on(mesh: Any, codes: tuple[str, ...], shape: tuple[int, ...]) -> Box | None:
    """What this rank holds of a tensor of that shape; None where it is not in the mesh."""
    facts = _facts_of(mesh)
    return None if facts.at is None else MeshLayout(facts.mesh, codes).box_at(shape, facts.at)


def _code_of(number: int, mesh: Any, placements: Sequence[Any]) -> str:
    placement = placements[number]
    if placement.is_replicate():
        return "R"
    if placement.is_partial():
        raise InvalidState(
            "a DTensor with a Partial placement is a pending sum, not a state; redistribute it "
            "first"
        )
    split = getattr(placement, "split_factor", None)
    if split is None:
        return f"S{placement.dim}"
    later = [
        mesh.size(m)
        for m in range(number + 1, mesh.ndim)
        if getattr(placements[m], "dim", None) == placement.dim
    ]
    if prod(later) != split:
        raise InvalidState(
            f"a DTensor with placements {placements} is cut in an order that is not supported"
        )
    return f"s{placement.dim}"


def same_view_key(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Equal for tensors that are the same view of the same memory; None for tensors without
    memory."""
    if tensor.numel() == 0:
        return None
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def memory_span(tensor: torch.Tensor) -> tuple[str, int, int] | None:
    """(device, first byte, end byte) of the memory that a tensor's items lie in; None when it is
    empty."""
    if tensor.numel() == 0:
        return None
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (reach + 1) * tensor.element_size()


def memory_clusters(tensors: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Numbers of tensors whose memory lies in one stretch, where there are several."""
    spans = [(*span, n) for n, t in enumerate(tensors) if (span := memory_span(t)) is not None]
    cluster: list[int] = []
    device, end = "", 0
    for on, start, stop, number in sorted(spans):
        if on != device or start >= end:
            if len(cluster) > 1:
                yield cluster
            device, end, cluster = on, 0, []
        cluster.append(number)
        end = max(end, stop)
    if len(cluster) > 1:
        yield cluster


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several items may share memory (expanded tensors, sliding windows): not a place to
    read into."""
    dims = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    reach = 0
    for stride, n in dims:
        if stride <= reach:
            return True
        reach += (n - 1) * stride
    return False


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The same items as integers of the same width: every dtype can then be copied, on any device,
    bit for bit."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if plain.dtype == torch.complex128:
        plain = torch.view_as_real(plain)
    word = _WORDS[plain.element_size()]
    return plain if plain.dtype is word else plain.view(word)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Give every item of `target` the value of `source`, whatever its memory looks like.

    Raises StateMismatch where items share memory (expanded tensors) and their values differ.
    """
    target = whole = target.detach()
    values = source
    if overlaps_itself(target):
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
        target, source = target[once], source[once]
        for at in product(*(range(n) for n in target.shape)) if overlaps_itself(target) else ():
            target[at] = source[at]  # sliding windows, item by item
    if target.dtype == source.dtype and not (target.is_conj() or target.is_neg()):
        # As integers, which every dtype can be copied as.
        target, source = words(target), words(source)
    if not overlaps_itself(target):
        target.copy_(source)
    if overlaps_itself(whole) and not torch.equal(words(whole), words(values.to(whole.dtype))):
        raise StateMismatch(
            f"items of a live tensor of shape {list(whole.shape)} share memory, and the saved "
            "ones differ"
        )


_of_thread = threading.local()


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """This thread's stream for copies: what it does neither waits for training nor is waited
    for."""
    streams: dict[torch.device, torch.cuda.Stream] = _of_thread.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Copies from or to `device` are made on this thread's stream, and are complete afterwards."""
    if device.type != "cuda":
        yield
        return
    stream = side_stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def pinned_memory(device: torch.device) -> MakeMemory | None:
    """How to make host memory that `device` copies from and to by itself; None where any memory
    will do."""
    return _pinned if device.type == "cuda" else None


def _pinned(nbytes: int) -> memoryview:
    return memoryview(
        torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy().data
    )


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for what this thread has asked of `devices`, so that copies on other streams find it
    done."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


class TensorBytes:
    """A tensor as its bytes in C order: what writers read from. Where it is not host memory,
    `synchronize` its device first."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._words = words(tensor)
        self._memory: memoryview | None = None
        self.pinned = pinned_memory(tensor.device)
        if self._words.device.type == "cpu" and self._words.is_contiguous() and self._words.numel():
            # Strides of dimensions of one item may be anything.
            flat = self._words.as_strided((self._words.numel(),), (1,))
            self._memory = memoryview(flat.view(torch.uint8).numpy().data)

    def view(self, start: int, stop: int) -> memoryview | None:
        """Bytes `start` to `stop` in place; None when they are not contiguous host memory."""
        return None if self._memory is None else self._memory[start:stop]

    def fill(self, start: int, buffer: memoryview) -> None:
        """Copy bytes from `start` on into `buffer`. Both are multiples of the item size."""
        host, size = self._host(buffer), self._words.element_size()
        with own_stream(self._words.device):
            _copy_range(self._words, start // size, host)

    def _host(self, buffer: memoryview) -> torch.Tensor:
        return torch.frombuffer(buffer, dtype=self._words.dtype)


# Fewer bytes are copied sooner than they are handed over where they are.
SMALL_BYTES = 16 << 10
# Keeps the interpreter to itself: with thousands of tensors, a thread that gives it up each time
# would wait for a busy program as often.
_move = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.CDLL(None))
)


class TensorSource:
    """The bytes of files that tensors are stored in; `held` has them by number.

    What lies side by side in memory as in the file is one buffer, and so are small tensors.
    """

    def __init__(self, held: Mapping[int, torch.Tensor]) -> None:
        self._held = held

    def fetch(self, chunks: Sequence[Chunk[int]], scratch: Scratch) -> list[memoryview]:
        """The bytes of chunks of the tensors, each buffer of one or of several of them."""
        buffers: list[memoryview] = []
        used = copied = 0  # bytes of the scratch memory, and of them those of the last buffer
        memory, start = memoryview(b""), 0
        for address, length, offset, number in self._runs(chunks):
            if address and length > SMALL_BYTES:
                buffers.append(_memory_at(address, length))
                copied = 0
                continue
            if not address:
                source = TensorBytes(self._held[number])
                buffers.append(scratch.bytes_of(source, offset, length, used))
                copied = 0
            else:
                if not start:
                    memory = scratch.take(0, scratch.size)
                    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
                assert used + length <= scratch.size
                _move(start + used, address, length)
                if copied:
                    buffers.pop()
                copied += length
                buffers.append(memory[used + length - copied : used + length])
            used += length
        return buffers

    def _runs(self, chunks: Sequence[Chunk[int]]) -> list[tuple[int, int, int, int]]:
        """(address, bytes, first byte, number of the tensor) of chunks that follow each other in
        memory; address 0 for one that is not contiguous host memory."""
        runs = []
        start = length = first = tensor = 0
        for _, nbytes, offset, number in chunks:
            held = self._held[number]
            plain = held.is_cpu and held.is_contiguous() and not held.is_conj()
            address = held.data_ptr() + offset if plain and not held.is_neg() else 0
            if address and address == start + length:
                length += nbytes
                continue
            if length:
                runs.append((start, length, first, tensor))
            start, length, first, tensor = address, nbytes, offset, number
        runs.append((start, length, first, tensor))
        return runs


def _memory_at(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def _copy_range(tensor: torch.Tensor, start: int, host: torch.Tensor) -> None:
    """Copy items `start` ... of `tensor` in C order to the flat `host`, as few block copies."""
    count = host.numel()
    if tensor.is_contiguous():
        part = tensor.reshape(-1)[start : start + count]
        host.copy_(part)
        return
    row = tensor[0].numel()
    at = 0
    while at < count:
        index, within = divmod(start + at, row)
        if within or count - at < row:
            n = min(row - within, count - at)
            _copy_range(tensor[index], within, host[at : at + n])
        else:
            rows = (count - at) // row
            n = rows * row
            block, flat = tensor[index : index + rows], host[at : at + n]
            flat.view(block.shape).copy_(block)
        at += n
