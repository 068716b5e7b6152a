"""Whether replicas are equal, bit by bit: digests are compared first, and only what differs is
looked at closely."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..errors import ReplicationMismatch
from ..format.digest import CHUNK_BYTES, chunk_digest, combined_digest, content_digest, content_hash
from ..format.layout import volume
from ..format.manifest import ReplicaGroup, chunk_count
from ..format.values import Numbered, Opaque, TensorRef, decode, encode, join_path
from ..ranks.communicator import Communicator
from ..ranks.messages import message
from ..state.component import StateComponent, ValidationLevel
from ..state.layout import TensorBytes, torch_dtype
from ..state.tree import StateSnapshot, Structure, TensorLeaf
from .device_digest import fingerprints, on_accelerator
from .shard_table import ShardTable, holders_of, ranks_in_words, value_in_words

SAMPLES = 16
SAMPLE_BYTES = 512
FULL_TENSORS = 8
SHOWN_KEYS = 20


@dataclass(frozen=True, slots=True)
class Replicas:
    """What one rank compares of one save.

    components: those that are compared. snapshots: those of this rank, by component. groups: the
    ranks that hold the same, of every component that is not sharded; tables: of every one that is.
    chunks: chunk digests that were computed on the way, by component and tensor number, so that no
    byte is hashed twice.
    """

    rank: int
    world_size: int
    components: Sequence[StateComponent]
    snapshots: Mapping[str, StateSnapshot]
    groups: Mapping[str, Sequence[ReplicaGroup]]
    tables: Mapping[str, ShardTable]
    chunks: dict[tuple[str, int], bytes] = field(default_factory=dict)

    @property
    def whole(self) -> list[StateComponent]:
        """Components of which several ranks hold the whole."""
        return [c for c in self.components if not c.sharded]

    @property
    def sharded(self) -> list[StateComponent]:
        """Components of which several ranks may hold the same part."""
        return [c for c in self.components if c.sharded]


@message
@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a rank's replicas are compared by: a digest of each component that is whole, and one of
    all parts of a sharded one that the same ranks hold, by those ranks and the component."""

    whole: dict[str, str]
    parts: dict[str, str]


@message
@dataclass(frozen=True, slots=True)
class ReplicaVerdict:
    """What is not equal on all ranks that hold it: components, each with the number of its replica
    group; and the names of parts in the reports."""

    whole: list[list[Any]]
    parts: list[str]


def report(replicas: Replicas) -> ReplicaReport:
    """What this rank says of its replicas."""
    for component in replicas.whole:
        if component.key in replicas.snapshots:
            take_digests(component, replicas.snapshots[component.key].tensors)
    whole = {
        c.key: combined_digest(_leaf_digests(c, replicas.snapshots[c.key], replicas.chunks))
        for c in replicas.whole
        if c.key in replicas.snapshots
    }
    parts: dict[str, str] = {}
    for component in replicas.sharded:
        for tag, found in _parts(replicas, component).items():
            parts[tag] = combined_digest(
                part
                for name, (digest, _) in sorted(found.items())
                for part in (name.encode(), digest)
            )
    return ReplicaReport(whole, parts)


def decide(replicas: Replicas, reports: Sequence[ReplicaReport | None]) -> ReplicaVerdict | None:
    """What differs, from the reports of all ranks; None where all is equal."""
    given = [each for each in reports if each is not None]  # all: every rank compares the same
    differing = [
        [component.key, number]
        for component in replicas.whole
        for number, group in enumerate(replicas.groups[component.key])
        if len({given[rank].whole.get(component.key) for rank in group.members}) > 1
    ]
    first: dict[str, str] = {}
    parts = {
        tag
        for each in given
        for tag, digest in each.parts.items()
        if first.setdefault(tag, digest) != digest
    }
    return ReplicaVerdict(differing, sorted(parts)) if differing or parts else None


def explain(comm: Communicator, replicas: Replicas, verdict: ReplicaVerdict) -> None:
    """Find out which tensors and values differ, on which ranks, and for FULL by how much, in rounds
    of their own.

    Raises ReplicationMismatch on all ranks, with component, keys and ranks, unless all of it is
    equal but for the order of keys, or within tolerance.
    """
    by_key = {c.key: c for c in replicas.components}
    for key, number in verdict.whole:
        _explain_whole(
            comm,
            by_key[key],
            replicas.groups[key][number],
            replicas.snapshots.get(key),
            replicas.chunks,
        )
    for component in replicas.sharded:
        tags = [tag for tag in verdict.parts if tag.split(" ", 1)[1] == component.key]
        if tags:
            _explain_parts(comm, replicas, component, tags)


def compared_leaves(replicas: Replicas, component: StateComponent) -> Sequence[TensorLeaf]:
    """The tensors of this rank's state that other ranks may hold too."""
    if component.key not in replicas.snapshots:
        return []
    leaves = replicas.snapshots[component.key].tensors
    if not component.sharded:
        return leaves
    return [leaves[at] for at, *_ in _shared(replicas, component)]


def take_digests(component: StateComponent, leaves: Iterable[TensorLeaf]) -> None:
    """Give leaves that have none yet what they are compared by, where that is quicker for many at
    once: all that lie on accelerators, and of QUICK the small ones on the host."""
    wanted = [leaf for leaf in leaves if leaf.digest is None and not leaf.tensor.is_meta]
    away = [leaf for leaf in wanted if on_accelerator(leaf.tensor)]
    sampled = component.validated is ValidationLevel.QUICK
    digests = fingerprints([leaf.tensor for leaf in away], sampled=sampled)
    for leaf, digest in zip(away, digests, strict=True):
        leaf.digest = digest
    by_dtype: dict[torch.dtype, list[TensorLeaf]] = {}
    for leaf in wanted if sampled else ():
        small = leaf.tensor.is_cpu and 0 < leaf.spec.nbytes <= SAMPLES * SAMPLE_BYTES
        if small and not leaf.tensor.is_complex() and not leaf.tensor.is_neg():
            by_dtype.setdefault(leaf.tensor.dtype, []).append(leaf)
    for batch in by_dtype.values():
        with torch.no_grad():
            items = torch.cat([leaf.tensor.reshape(-1) for leaf in batch])
        data = items.view(torch.uint8).numpy().data
        at = 0
        for leaf in batch:
            leaf.digest = content_hash(data[at : at + leaf.spec.nbytes])
            at += leaf.spec.nbytes


def chunk_digests(tensor: TensorLeaf) -> bytes:
    """The digests of a tensor's chunks, as the index records them. Bounded memory for tensors that
    are not host memory."""
    source = TensorBytes(tensor.tensor)
    digests = bytearray()
    scratch: memoryview | None = None
    for chunk in range(chunk_count(tensor.spec.nbytes)):
        start = chunk * CHUNK_BYTES
        length = min(CHUNK_BYTES, tensor.spec.nbytes - start)
        view = source.view(start, start + length)
        if view is None:
            scratch = scratch if scratch is not None else memoryview(bytearray(CHUNK_BYTES))
            view = scratch[:length]
            source.fill(start, view)
        digests += chunk_digest(view)
    return bytes(digests)


def _sample(tensor: TensorLeaf) -> bytes:
    """A digest of bytes spread over the tensor, both ends included."""
    nbytes = tensor.spec.nbytes
    if nbytes <= SAMPLES * SAMPLE_BYTES:
        return content_hash(_bytes_of(tensor, 0, nbytes) if nbytes else b"")
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


def compared_digest(component: StateComponent, tensor: TensorLeaf) -> bytes:
    """What a tensor's replicas are compared by: a sample for QUICK, else the digests of its
    chunks."""
    return (
        _sample(tensor) if component.validated is ValidationLevel.QUICK else chunk_digests(tensor)
    )


def replica_digest(
    component: StateComponent, tensor: TensorLeaf, number: int, known: dict[tuple[str, int], bytes]
) -> bytes:
    """What replicas of one tensor, or of one part of it, are compared by at the component's level.

    number: of the tensor that holds the bytes, which of an alias is another one; chunk digests that
    this takes go into `known` under it.
    """
    if tensor.digest is not None:
        return tensor.digest
    if component.validated is ValidationLevel.QUICK:
        return compared_digest(component, tensor)
    key = component.key, number
    if key not in known:
        known[key] = compared_digest(component, tensor)
    return known[key]


def _leaf_digests(
    component: StateComponent, snapshot: StateSnapshot, known: dict[tuple[str, int], bytes]
) -> Iterator[bytes]:
    # The tree holds structure and values; names, dtypes and shapes are the tensors' own.
    yield content_hash(_compared_tree(component, snapshot))
    for number, tensor in enumerate(snapshot.tensors):
        t = tensor.spec
        if component.ignore and component.ignores(t.name):
            continue
        yield f"{t.name} {t.dtype} {list(t.shape)} {t.alias_of}".encode()
        holder = number if t.alias_of is None else t.alias_of
        yield replica_digest(component, tensor, holder, known)


def _compared_tree(component: StateComponent, snapshot: StateSnapshot) -> bytes:
    """The plain values of a state, without those that are not compared."""
    if not component.ignore:
        return snapshot.tree
    parts: list[list[Any]] = []
    for name, kind, value in _walk(_decoded(snapshot)):
        if not component.ignores(name):
            keys = sorted(map(encode, value)) if isinstance(value, Mapping) else None
            parts.append([name, kind, value if kind is None else keys or len(value)])
    return encode(parts)


def _explain_whole(
    comm: Communicator,
    component: StateComponent,
    copy: ReplicaGroup,
    snapshot: StateSnapshot | None,
    known: dict[tuple[str, int], bytes],
) -> None:
    """Find out which keys differ, on which ranks, and for FULL by how much; raise unless that is
    within tolerance."""
    member = comm.rank in copy.members
    described: dict[str, dict[str, Any]] = {}
    with comm.round(f"compare replicas of {component.key}") as r:
        if member and snapshot is not None:
            described = _described(component, snapshot, known)
        found = r.gather(described)
        if r.leads:
            r.verdict = _differing(copy.members, found)
    wrong: list[list[Any]] = r.verdict
    if not wrong:
        return  # equal content: only the order of keys in dicts differs
    mine = {t.spec.name: t for t in snapshot.tensors} if snapshot is not None and member else {}
    leaves = [(name, copy.members) for part, name, _ in wrong if part == "leaf"]
    numbers, tolerable = distances(comm, component, leaves, mine)
    if tolerable:
        wrong = [row for row in wrong if row[0] != "leaf"]
    if not wrong:
        return
    # Leaves that differ say it better than what they are in.
    wrong = [row for row in wrong if row[0] != "container"] or wrong
    raise _mismatch(
        component, copy, wrong, _details(comm, copy, wrong, numbers, snapshot if member else None)
    )


def _differing(
    members: Sequence[int], found: Sequence[Mapping[str, Mapping[str, Any]]]
) -> list[list[Any]]:
    """[part, name, ranks] of what the lowest of `members` and others do not have alike."""
    first, *others = members
    wrong: dict[tuple[str, str], list[int]] = {}
    for rank in others:
        for part in _PARTS:
            ours, theirs = found[first].get(part, {}), found[rank].get(part, {})
            for name in {*ours, *theirs}:
                if ours.get(name) != theirs.get(name):
                    wrong.setdefault((part, name), []).append(rank)
    return [
        [part, name, wrong[part, name]] for part, name in sorted(wrong, key=lambda key: key[::-1])
    ]


def _parts(
    replicas: Replicas, component: StateComponent
) -> dict[str, dict[str, tuple[bytes, tuple[int, ...]]]]:
    """What this rank's tensors (or parts) that other ranks hold too are compared by, and who holds
    them: by a name for those ranks and the component, then by tensor."""
    leaves = replicas.snapshots[component.key].tensors
    shared = _shared(replicas, component)
    take_digests(component, [leaves[at] for at, *_ in shared])
    found: dict[str, dict[str, tuple[bytes, tuple[int, ...]]]] = {}
    for at, number, holders, tag in shared:
        digest = replica_digest(component, leaves[at], number, replicas.chunks)
        found.setdefault(tag, {})[leaves[at].spec.name] = content_hash(digest), holders
    return found


# Which leaves of a structure other ranks hold too, by the table that says so.
_known_shared: WeakKeyDictionary[Structure, tuple[ShardTable, list[Any]]] = WeakKeyDictionary()


def _shared(
    replicas: Replicas, component: StateComponent
) -> list[tuple[int, int, tuple[int, ...], str]]:
    """The leaves (by their own numbers, and by those of the table) that other ranks hold too, these
    ranks, and a name for them and the component."""
    table, snapshot = replicas.tables[component.key], replicas.snapshots[component.key]
    if snapshot.structure is not None:
        known = _known_shared.get(snapshot.structure)
        if known is not None and known[0] is table:
            return known[1]
    numbers = {t.name: number for number, t in enumerate(table.tensors)}
    # Tensors that are held alike share their layouts.
    tagged: dict[Any, tuple[tuple[int, ...], str]] = {}
    found = []
    for at, leaf in enumerate(snapshot.tensors):
        spec, number = leaf.spec, numbers[leaf.spec.name]
        if table.tensors[number].alias_of is None and spec.box is not None and volume(spec.box[1]):
            layouts = table.layouts[number]
            like = id(layouts), spec.global_shape, spec.box
            if like not in tagged:
                holders = holders_of(layouts, spec.global_shape, spec.box, replicas.rank)
                tag = f"{content_digest(repr(holders).encode())} {component.key}"
                tagged[like] = holders, tag
            holders, tag = tagged[like]
            if len(holders) > 1:
                found.append((at, number, holders, tag))
    if snapshot.structure is not None:
        _known_shared[snapshot.structure] = table, found
    return found


def _differing_parts(
    found: Sequence[Mapping[str, Mapping[str, tuple[bytes, tuple[int, ...]]]]],
) -> list[tuple[str, tuple[int, ...], list[int]]]:
    """Names, holders, and the ranks that differ from the lowest of them."""
    wrong: dict[tuple[str, str], tuple[str, tuple[int, ...], list[int]]] = {}
    reference: dict[tuple[str, str], bytes] = {}
    for rank, parts in enumerate(found):
        for tag, tensors in parts.items():
            for name, (digest, holders) in tensors.items():
                if reference.setdefault((tag, name), digest) != digest:
                    wrong.setdefault((tag, name), (name, holders, []))[2].append(rank)
    return list(wrong.values())


def _explain_parts(
    comm: Communicator, replicas: Replicas, component: StateComponent, tags: Sequence[str]
) -> None:
    """The same of a sharded component."""

    with comm.round("explain replicas") as r:
        mine = _parts(replicas, component)
        found = r.gather({tag: mine[tag] for tag in tags if tag in mine})
        if r.leads:
            r.verdict = _differing_parts(found)
    wrong: list[tuple[str, tuple[int, ...], list[int]]] = r.verdict
    if not wrong:  # no part has two values, so the ranks differ in what they hold
        raise ReplicationMismatch(
            f"component {component.key!r} is SHARDED, and ranks that hold the same parts do not "
            "hold them of the same tensors: make its DTensors with the same device mesh and "
            "placements on every rank; nothing was committed",
            component=component.key,
        )
    held = {t.spec.name: t for t in replicas.snapshots[component.key].tensors}
    numbers, tolerable = distances(
        comm, component, [(name, holders) for name, holders, _ in wrong], held
    )
    if tolerable:
        return
    names = sorted({name for name, _, _ in wrong})
    ranks = sorted({rank for _, _, found_on in wrong for rank in found_on})
    how = f"; {names[0]!r}: {in_words(numbers[names[0]])}" if numbers.get(names[0]) else ""
    raise ReplicationMismatch(
        f"component {component.key!r} is SHARDED, and {some_keys(names)} on "
        f"{ranks_in_words(ranks)} {'is' if len(names) == 1 else 'are'} not equal to the same part "
        "on lower ranks; replicas of a part must be "
        f"equal; nothing was committed{how}",
        component=component.key,
        keys=names[:20],
        ranks=ranks,
        details=numbers or None,
    )


def _details(
    comm: Communicator,
    copy: ReplicaGroup,
    wrong: list[list[Any]],
    numbers: dict[str, Any],
    snapshot: StateSnapshot | None,
) -> dict[str, Any]:
    """By key, how a tensor differs in numbers, or else what the lowest rank has and what the first
    has that differs."""
    texts = _texts(snapshot) if snapshot is not None else {}

    with comm.round("describe what differs") as r:
        shown = wrong[:SHOWN_KEYS]
        found = r.gather([texts.get((part, name), "nothing") for part, name, _ in shown])
        if r.leads:
            lowest = copy.members[0]
            r.verdict = [
                {f"rank {rank}": found[rank][n] for rank in (lowest, row[2][0])}
                for n, row in enumerate(shown)
            ]
    forms: list[dict[str, str]] = r.verdict
    details: dict[str, Any] = {}
    for (part, name, _), form in zip(wrong, forms, strict=False):
        number = numbers.get(name) if part == "leaf" else None
        # Else there is no more to say than that it differs.
        if number is not None or len(set(form.values())) > 1:
            details[name or "value"] = number or form
    return details


# Plain values and tensors; which memory tensors share; the dicts, lists and tuples that all is in.
_PARTS = ("leaf", "tie", "container")


def _described(
    component: StateComponent, snapshot: StateSnapshot, known: dict[tuple[str, int], bytes]
) -> dict[str, dict[str, Any]]:
    """What each part of a state is compared by, by name."""
    found: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for name, kind, value in _walk(_decoded(snapshot)):
        if component.ignores(name):
            continue
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
    for number, tensor in enumerate(snapshot.tensors):
        if component.ignores(tensor.spec.name):
            continue
        held = number if tensor.spec.alias_of is None else tensor.spec.alias_of
        digest = replica_digest(component, tensor, held, known)
        found["leaf"][tensor.spec.name] = [f"{tensor.spec.dtype} {list(tensor.spec.shape)}", digest]
        found["tie"][tensor.spec.name] = _tied(snapshot, tensor)
    return found


def _texts(snapshot: StateSnapshot) -> dict[tuple[str, str], str]:
    """The same for people."""
    texts: dict[tuple[str, str], str] = {}
    for name, kind, value in _walk(_decoded(snapshot)):
        if kind is None:
            texts["leaf", name] = value_in_words(value)
        elif isinstance(value, Mapping):
            texts["container", name] = f"{kind} with keys {value_in_words([*value], typed=False)}"
        else:
            texts["container", name] = f"{kind} of length {len(value)}"
    for tensor in snapshot.tensors:
        texts["leaf", tensor.spec.name] = f"{tensor.spec.dtype} {list(tensor.spec.shape)}"
        texts["tie", tensor.spec.name] = _tied(snapshot, tensor)
    return texts


def _tied(snapshot: StateSnapshot, tensor: TensorLeaf) -> str:
    other = (
        None if tensor.spec.alias_of is None else snapshot.tensors[tensor.spec.alias_of].spec.name
    )
    return "memory of its own" if other is None else f"the memory of {other!r}"


def some_keys(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys[:5])) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def _mismatch(
    component: StateComponent, copy: ReplicaGroup, wrong: list[list[Any]], details: dict[str, Any]
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
            "; if it should be the same, find what made the ranks differ (weights that began from "
            "another seed, a model without DDP, a gradient that was not reduced); if each rank has "
            "its own (a data loader, random streams), it is PER_RANK; if only rank 0's counts, "
            "GLOBAL; BatchNorm statistics under DDP go to ignore=['*.running_*', "
            "'*.num_batches_tracked']"
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


def _decoded(snapshot: StateSnapshot) -> Any:
    return decode(snapshot.tree, lambda ref: ref, opaque=True)


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
    mine: Mapping[str, TensorLeaf],
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
    tensor: TensorLeaf | None,
) -> dict[str, Any] | None:
    """How a tensor differs from that of the lowest rank, element by element, a chunk at a time;
    None for values and for tensors of different shape."""
    reference = members[0]
    member = comm.rank in members

    with comm.round(f"compare {name}") as r:
        forms = r.gather(
            None
            if tensor is None
            else [tensor.spec.dtype, list(tensor.spec.shape), tensor.spec.nbytes]
        )
        if r.leads:
            of_members = [forms[rank] for rank in members]
            same = all(form == of_members[0] for form in of_members)
            r.verdict = of_members[0] if same else None
    if r.verdict is None:
        return None
    dtype, _, nbytes = r.verdict
    counts: dict[str, Any] = {
        "differing": 0,
        "beyond tolerance": 0,
        "first index": None,
        "largest difference": 0.0,
        "equal as numbers": 0,
    }
    for start in range(0, nbytes, CHUNK_BYTES):
        length = min(CHUNK_BYTES, nbytes - start)
        with comm.round(f"compare {name}") as r:
            mine = b"" if tensor is None else _bytes_of(tensor, start, length)
            parts = r.gather(mine if comm.rank == reference else b"")
            if r.leads:
                r.verdict = parts[reference]
        if member and tensor is not None and mine != r.verdict:
            _count(counts, r.verdict, mine, dtype, start, component)
    with comm.round(f"compare {name}") as r:
        found = r.gather(counts)
        if r.leads:
            r.verdict = _most(found)
    most: dict[str, Any] = r.verdict
    return most


def _most(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counts of the rank that differs most, and the first index on any."""
    firsts = [c["first index"] for c in found if c["first index"] is not None]
    result = {key: max(c[key] for c in found) for key in found[0] if key != "first index"}
    if not result["equal as numbers"]:  # nearly always
        del result["equal as numbers"]
    return {**result, "first index": min(firsts, default=None)}


def _bytes_of(tensor: TensorLeaf, start: int, length: int) -> bytes:
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
