"""Whether replicas are equal, bit by bit: digests are compared first, and only what differs is
looked at closely."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from reprlib import Repr
from typing import Any

import torch

from ..errors import ReplicationMismatch
from ..format.codecs import Opaque
from ..format.digest import CHUNK_BYTES, chunk_count, chunk_digest, combined_digest, content_hash
from ..format.manifest import Copy
from ..format.values import Numbered, TensorRef, decode, encode, join_path
from ..state.component import StateComponent, ValidationLevel
from ..state.layout import TensorBytes, torch_dtype
from ..state.tree import Captured, CapturedTensor
from .communicator import Communicator
from .fingerprint import fingerprints, on_accelerator

__all__ = [
    "chunk_digests",
    "compared_digest",
    "distances",
    "in_words",
    "replica_digest",
    "short",
    "some_keys",
    "take_fingerprints",
    "validate",
]

SAMPLES = 16
SAMPLE_BYTES = 512
FULL_TENSORS = 8
SHOWN_KEYS = 20


def validate(
    comm: Communicator,
    components: Sequence[StateComponent],
    captured: Mapping[str, Captured],
    copies: Mapping[str, list[Copy]],
) -> dict[tuple[str, int], bytes]:
    """Compare the members of every copy. Raises ReplicationMismatch on all ranks, with component,
    keys and ranks.

    captured: this rank's, of the components that are compared on it. Returns the chunk digests that
    were computed on the way, by component and tensor number, so that no byte is hashed twice.
    """
    checked = [
        c
        for c in components
        if c.validated is not ValidationLevel.NONE
        and not c.sharded
        and len(copies[c.key]) < comm.world_size
    ]
    if not checked:
        return {}
    known: dict[tuple[str, int], bytes] = {}

    def summary() -> dict[str, str]:
        take_fingerprints(checked, captured)
        return {
            c.key: combined_digest(_leaf_digests(c, captured[c.key], known))
            for c in checked
            if c.key in captured
        }

    def compare(found: list[dict[str, str]]) -> list[list[Any]]:
        differing = []
        for component in checked:
            for number, copy in enumerate(copies[component.key]):
                if len({found[rank].get(component.key) for rank in copy.members}) > 1:
                    differing.append([component.key, number])
        return differing

    differing = comm.together("compare replicas", summary, compare)
    by_key = {c.key: c for c in checked}
    for key, number in differing:
        _explain(comm, by_key[key], copies[key][number], captured.get(key), known)
    return known


def take_fingerprints(
    components: Iterable[StateComponent], captured: Mapping[str, Captured]
) -> None:
    """Give tensors on accelerators what they are compared by, all at once, where they have nothing
    yet."""
    for component in components:
        if component.key in captured:
            tensors = captured[component.key].tensors
            away = [t for t in tensors if t.digest is None and on_accelerator(t.tensor)]
            sampled = component.validated is ValidationLevel.QUICK
            for t, digest in zip(
                away, fingerprints([t.tensor for t in away], sampled=sampled), strict=True
            ):
                t.digest = digest


def chunk_digests(tensor: CapturedTensor) -> bytes:
    """The digests of a tensor's chunks, as the index records them. Bounded memory for tensors that
    are not host memory."""
    source = TensorBytes(tensor.tensor)
    digests = bytearray()
    scratch: memoryview | None = None
    for chunk in range(chunk_count(tensor.nbytes)):
        start = chunk * CHUNK_BYTES
        length = min(CHUNK_BYTES, tensor.nbytes - start)
        view = source.view(start, start + length)
        if view is None:
            scratch = scratch if scratch is not None else memoryview(bytearray(CHUNK_BYTES))
            view = scratch[:length]
            source.fill(start, view)
        digests += chunk_digest(view)
    return bytes(digests)


def _sample(tensor: CapturedTensor) -> bytes:
    """A digest of bytes spread over the tensor, both ends included."""
    nbytes = tensor.nbytes
    if nbytes <= SAMPLES * SAMPLE_BYTES:
        return chunk_digests(tensor)
    source = TensorBytes(tensor.tensor)
    buffer = memoryview(bytearray(SAMPLE_BYTES))
    size = max(1, tensor.tensor.element_size())
    parts = []
    for n in range(SAMPLES):
        start = (nbytes - SAMPLE_BYTES) * n // (SAMPLES - 1) // size * size
        view = source.view(start, start + SAMPLE_BYTES)
        if view is None:
            view = buffer
            source.fill(start, buffer)
        parts.append(bytes(view))
    return content_hash(b"".join(parts))


def compared_digest(component: StateComponent, tensor: CapturedTensor) -> bytes:
    """What a tensor's replicas are compared by: a sample for QUICK, else the digests of its
    chunks."""
    return (
        _sample(tensor) if component.validated is ValidationLevel.QUICK else chunk_digests(tensor)
    )


def replica_digest(
    component: StateComponent,
    tensor: CapturedTensor,
    number: int,
    known: dict[tuple[str, int], bytes],
) -> bytes:
    """What replicas of one tensor, or of one part of it, are compared by at the component's level.

    number: of the tensor that holds the bytes, which of an alias is another one; chunk digests that
    this takes go into `known` under it.
    """
    if tensor.digest is not None:
        return tensor.digest
    if component.validated is ValidationLevel.QUICK:
        return compared_digest(component, tensor)
    place = component.key, number
    if place not in known:
        known[place] = compared_digest(component, tensor)
    return known[place]


def _leaf_digests(
    component: StateComponent, captured: Captured, known: dict[tuple[str, int], bytes]
) -> Iterator[bytes]:
    # The tree holds structure and values; names, dtypes and shapes are the tensors' own.
    yield content_hash(captured.tree)
    for number, tensor in enumerate(captured.tensors):
        yield f"{tensor.name} {tensor.dtype} {list(tensor.shape)} {tensor.alias_of}".encode()
        yield replica_digest(
            component, tensor, number if tensor.alias_of is None else tensor.alias_of, known
        )


def _explain(
    comm: Communicator,
    component: StateComponent,
    copy: Copy,
    captured: Captured | None,
    known: dict[tuple[str, int], bytes],
) -> None:
    """Find out which keys differ, on which ranks, and for FULL by how much; raise unless that is
    within tolerance."""
    member = comm.rank in copy.members

    def describe() -> dict[str, dict[str, Any]]:
        return _described(component, captured, known) if member and captured is not None else {}

    def compare(found: list[dict[str, dict[str, Any]]]) -> list[list[Any]]:
        """[part, name, ranks] of what differs."""
        first, *others = copy.members
        wrong: dict[tuple[str, str], list[int]] = {}
        for rank in others:
            for part in _PARTS:
                ours, theirs = found[first].get(part, {}), found[rank].get(part, {})
                for name in {*ours, *theirs}:
                    if ours.get(name) != theirs.get(name):
                        wrong.setdefault((part, name), []).append(rank)
        return [
            [part, name, wrong[part, name]]
            for part, name in sorted(wrong, key=lambda key: key[::-1])
        ]

    wrong = comm.together(f"compare replicas of {component.key}", describe, compare)
    if not wrong:
        return  # equal content: only the order of keys in dicts differs
    mine = {t.name: t for t in captured.tensors} if captured is not None and member else {}
    leaves = [(name, copy.members) for part, name, _ in wrong if part == "leaf"]
    numbers, tolerable = distances(comm, component, leaves, mine)
    if tolerable:
        wrong = [row for row in wrong if row[0] != "leaf"]
    if not wrong:
        return
    # Leaves that differ say it better than what they are in.
    wrong = [row for row in wrong if row[0] != "container"] or wrong
    raise _mismatch(
        component, copy, wrong, _details(comm, copy, wrong, numbers, captured if member else None)
    )


def _details(
    comm: Communicator,
    copy: Copy,
    wrong: list[list[Any]],
    numbers: dict[str, Any],
    captured: Captured | None,
) -> dict[str, Any]:
    """By key, how a tensor differs in numbers, or else what the lowest rank has and what the first
    has that differs."""
    texts = _texts(captured) if captured is not None else {}

    def both(found: list[list[str]]) -> list[dict[str, str]]:
        lowest = copy.members[0]
        return [
            {f"rank {r}": found[r][n] for r in (lowest, row[2][0])}
            for n, row in enumerate(wrong[:SHOWN_KEYS])
        ]

    forms = comm.together(
        "describe what differs",
        lambda: [texts.get((part, name), "nothing") for part, name, _ in wrong[:SHOWN_KEYS]],
        both,
    )
    details: dict[str, Any] = {}
    for (part, name, _), form in zip(wrong, forms, strict=False):
        found = numbers.get(name) if part == "leaf" else None
        if (
            found is not None or len(set(form.values())) > 1
        ):  # else there is no more to say than that it differs
            details[name or "value"] = found or form
    return details


# Plain values and tensors; which memory tensors share; the dicts, lists and tuples that all is in.
_PARTS = ("leaf", "tie", "container")


def _described(
    component: StateComponent, captured: Captured, known: dict[tuple[str, int], bytes]
) -> dict[str, dict[str, Any]]:
    """What each part of a state is compared by, by name."""
    found: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for name, kind, value in _walk(_decoded(captured)):
        if kind is None:
            found["leaf"][name] = [
                "value",
                content_hash(type(value).__name__.encode() + encode(value)),
            ]
        else:
            keys = (
                sorted(encode(key) for key in value) if isinstance(value, Mapping) else [len(value)]
            )
            found["container"].setdefault(name, []).extend([kind, content_hash(encode(keys))])
    for number, tensor in enumerate(captured.tensors):
        held = number if tensor.alias_of is None else tensor.alias_of
        digest = replica_digest(component, tensor, held, known)
        found["leaf"][tensor.name] = [f"{tensor.dtype} {list(tensor.shape)}", digest]
        found["tie"][tensor.name] = _tied(captured, tensor)
    return found


def _texts(captured: Captured) -> dict[tuple[str, str], str]:
    """The same for people."""
    texts: dict[tuple[str, str], str] = {}
    for name, kind, value in _walk(_decoded(captured)):
        if kind is None:
            texts["leaf", name] = short(value)
        elif isinstance(value, Mapping):
            texts["container", name] = f"{kind} with keys {_SHORT.repr([*value])}"
        else:
            texts["container", name] = f"{kind} of length {len(value)}"
    for tensor in captured.tensors:
        texts["leaf", tensor.name] = f"{tensor.dtype} {list(tensor.shape)}"
        texts["tie", tensor.name] = _tied(captured, tensor)
    return texts


def _tied(captured: Captured, tensor: CapturedTensor) -> str:
    other = None if tensor.alias_of is None else captured.tensors[tensor.alias_of].name
    return "memory of its own" if other is None else f"the memory of {other!r}"


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def short(value: Any) -> str:
    """A plain value and its type, for people."""
    return f"{_SHORT.repr(value)} ({type(value).__name__})"


def some_keys(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys[:5])) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def _mismatch(
    component: StateComponent, copy: Copy, wrong: list[list[Any]], details: dict[str, Any]
) -> ReplicationMismatch:
    ranks = sorted({rank for _, _, found in wrong for rank in found})
    keys = list(dict.fromkeys(name or "value" for _, name, _ in wrong))
    # In a dict nobody need have said it.
    declared, why = (
        ("was taken to be", f" (a dict's value, on {len(copy.members)} ranks)")
        if component.inferred
        else ("is declared", "")
    )
    hint = ""
    if component.sharing_pattern.value == "PER_GROUP":
        hint = (
            f"; PER_GROUP needs the group across which the state is the same (its replicas), and "
            f"{component.process_group_name!r} is ranks {list(copy.members)}: did you name "
            "another dimension of the mesh?"
        )
    elif component.sharing_pattern.value == "REPLICATED":
        hint = (
            "; state that is each rank's own (random streams, data loaders) is PER_RANK, and "
            "state of which rank 0's is the "
            "truth (BatchNorm statistics under DDP) is GLOBAL"
        )
        if component.inferred:
            hint += (
                f": StateComponent({component.key!r}, ..., 'PER_RANK') as the dict's value says so"
            )
    how = f"; {keys[0]!r}: {in_words(details[keys[0]])}" if keys[0] in details else ""
    return ReplicationMismatch(
        f"component {component.key!r} {declared} {component.sharing_pattern.value}{why}, but "
        f"{some_keys(keys)} on rank"
        f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} "
        f"differ{'' if len(keys) > 1 else 's'} from rank "
        f"{copy.members[0]}; nothing was committed{how}{hint}",
        component=component.key,
        keys=keys[:SHOWN_KEYS],
        ranks=ranks,
        details=details or None,
    )


def in_words(detail: Mapping[str, Any]) -> str:
    """How a key differs, of `ReplicationMismatch.details`."""
    if "differing" not in detail:
        return ", ".join(f"{text} on {rank}" for rank, text in detail.items())
    count, first = detail["differing"], detail["first index"]
    text = f"{count} element{'s differ' if count > 1 else ' differs'}, the first at index {first}"
    equal = detail.get("equal as numbers", 0)
    if equal == count:
        return f"{text}, in bits alone: the numbers are equal (0.0 and -0.0, say)"
    if not detail["largest difference"]:
        return f"{text}, with NaN or infinity on one side"
    return f"{text}, the largest difference is {detail['largest difference']:g}"


def _decoded(captured: Captured) -> Any:
    return decode(captured.tree, lambda ref: ref, opaque=True)


def _walk(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, str | None, Any]]:
    """(name, kind, value) of every container (its kind is that of dicts, lists, tuples or a codec)
    and plain value."""
    name = join_path(path)
    if isinstance(state, Opaque):
        yield name, state.codec, ()
        yield from _walk(state.payload, path)
    elif isinstance(state, Mapping):
        yield name, type(state).__name__, state
        texts = {join_path((key,)) for key in state if isinstance(key, str)}
        for key, item in state.items():
            step = Numbered(key) if not isinstance(key, str) and join_path((key,)) in texts else key
            yield from _walk(item, (*path, step))
    elif isinstance(state, list | tuple):
        yield name, type(state).__name__, state
        for number, item in enumerate(state):
            yield from _walk(item, (*path, number))
    elif not isinstance(state, TensorRef):
        yield name or "value", None, state


def distances(
    comm: Communicator,
    component: StateComponent,
    wrong: Sequence[tuple[str, Sequence[int]]],
    mine: Mapping[str, CapturedTensor],
) -> tuple[dict[str, Any], bool]:
    """For FULL: by how much tensors that are not equal differ, and whether that is within tolerance
    for all of them.

    wrong: their names, each with the ranks that hold it.
    """
    if component.validated is not ValidationLevel.FULL:
        return {}, False
    tolerant = bool(component.atol or component.rtol)
    found = [
        (name, _difference(comm, component, members, name, mine.get(name)))
        for name, members in (wrong if tolerant else wrong[:FULL_TENSORS])
    ]
    tolerable = all(
        numbers is not None and numbers["beyond tolerance"] == 0 for _, numbers in found
    )
    return dict(found), tolerant and tolerable


def _difference(
    comm: Communicator,
    component: StateComponent,
    members: Sequence[int],
    name: str,
    tensor: CapturedTensor | None,
) -> dict[str, Any] | None:
    """How a tensor differs from that of the lowest rank, element by element, a chunk at a time;
    None for values and for tensors of different shape."""
    reference = members[0]
    member = comm.rank in members

    def describe() -> Any:
        return None if tensor is None else [tensor.dtype, list(tensor.shape), tensor.nbytes]

    def same(found: list[Any]) -> Any:
        shapes = [found[rank] for rank in members]
        return shapes[0] if shapes[0] is not None and all(s == shapes[0] for s in shapes) else None

    agreed = comm.together(f"compare {name}", describe, same)
    if agreed is None:
        return None
    dtype, _, nbytes = agreed
    counts: dict[str, Any] = {
        "differing": 0,
        "beyond tolerance": 0,
        "first index": None,
        "largest difference": 0.0,
    }
    counts["equal as numbers"] = 0
    for start in range(0, nbytes, CHUNK_BYTES):
        length = min(CHUNK_BYTES, nbytes - start)

        def send(start: int = start, length: int = length) -> bytes:
            return (
                _bytes_of(tensor, start, length)
                if comm.rank == reference and tensor is not None
                else b""
            )

        theirs = comm.together(f"compare {name}", send, lambda parts: parts[reference])
        if member and tensor is not None and comm.rank != reference:
            mine = _bytes_of(tensor, start, length)
            if mine != theirs:
                _count(counts, theirs, mine, dtype, start, component)

    def merge(found: list[dict[str, Any]]) -> dict[str, Any]:
        firsts = [c["first index"] for c in found if c["first index"] is not None]
        result = {key: max(c[key] for c in found) for key in counts if key != "first index"}
        if not result["equal as numbers"]:  # nearly always
            del result["equal as numbers"]
        return {**result, "first index": min(firsts, default=None)}

    merged: dict[str, Any] = comm.together(f"compare {name}", lambda: counts, merge)
    return merged


def _bytes_of(tensor: CapturedTensor, start: int, length: int) -> bytes:
    source = TensorBytes(tensor.tensor)
    view = source.view(start, start + length)
    if view is None:
        view = memoryview(bytearray(length))
        source.fill(start, view)
    return bytes(view)


def _count(
    counts: dict[str, Any],
    theirs: bytes,
    mine: bytes,
    dtype: str,
    start: int,
    component: StateComponent,
) -> None:
    kind = torch_dtype(dtype) or torch.uint8
    a, b = (torch.frombuffer(bytearray(data), dtype=kind) for data in (theirs, mine))
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(
        a.element_size(), torch.uint8
    )
    unequal = (a.view(words) != b.view(words)).reshape(a.numel(), -1).any(1)
    distance = (_wide(a) - _wide(b)).abs()[unequal]
    if not (a.is_floating_point() or a.is_complex()):
        distance = distance.clamp(min=1)  # large ones may be the same as floats
    allowed = component.atol + component.rtol * _wide(a).abs()[unequal]
    counts["differing"] += int(unequal.sum())
    # Without a tolerance equality is that of the bits: 0.0 and -0.0 differ, by nothing.
    tolerant = bool(component.atol or component.rtol)
    counts["beyond tolerance"] += int((~(distance <= allowed)).sum() if tolerant else unequal.sum())
    counts["equal as numbers"] += int((distance == 0).sum())
    if counts["first index"] is None:
        counts["first index"] = start // a.element_size() + int(unequal.nonzero()[0])
    finite = distance[distance.isfinite()]
    counts["largest difference"] = max(
        counts["largest difference"], float(finite.max()) if finite.numel() else 0.0
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """As numbers that can be subtracted; dtypes that torch cannot convert, as their bits."""
    try:
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    except (NotImplementedError, RuntimeError):
        return tensor.view(torch.uint8).to(torch.float64)
