"""Where on this rank what was saved goes: which stored copy of a component it gets, and which
memory the bytes of each tensor are read into."""

from __future__ import annotations

import ctypes
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointCorrupt, CheckpointWarning, StateMismatch
from ..format.layout import Box, LogicalTensor, WholeLayout, volume
from ..format.manifest import MALFORMED, CheckpointManifest, ComponentManifest, malformed, short
from ..format.values import Opaque, TensorRef, join_path, keyed, only_plain
from ..ranks.communicator import group_index
from ..state.component import StateComponent, is_optimizer
from ..state.containers import CODEC, check_parts, is_made_of, misfit
from ..state.layout import (
    TensorBytes,
    local_shard,
    memory_span,
    overlaps_itself,
    own_stream,
    pinned_memory,
    same_view_key,
    torch_dtype,
    words,
)
from ..state.modules import ModelState
from ..state.plain import PlainState, has_other_owner
from ..state.tree import StateSnapshot, TensorLeaf
from ..storage.chunks import MakeMemory
from .reader import StoredFiles, TensorRead, Words, read_of
from .view import CheckpointView, StoredComponent, portions_of

CONVERTED_BYTES = 64 << 20  # read at a time in the saved dtype, where another one is wanted
ALLOCATED_UNSEEN = 16 << 20  # larger tensors are allocated only after a look at their files

# One state for all ranks.
_COMMON = ("GLOBAL", "REPLICATED", "SHARDED")


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank is in the job that loads."""

    rank: int
    world_size: int
    nodes: list[list[int]]
    partitions: Mapping[str, list[list[int]]]


def stored_copy_for(
    manifest: CheckpointManifest, component: StateComponent, position: RankPosition
) -> int | None:
    """The number of the copy to restore on this rank; None when the live state is to stay.

    What was saved decides: global and replicated state goes to every rank. State of a rank, node or
    group goes to the same one while their number (or the group's key) is the same and, on as many
    ranks, their ranks are the same. All else is up to the component's `on_resize`. Another sharing
    pattern than the saved one is a CheckpointWarning where it makes a difference. Raises
    StateMismatch with what was saved and what there is now.
    """
    saved = manifest.components[component.key]
    count = len(manifest.copies(component.key))
    copy = _stored_copy(manifest, saved, count, component, position)
    if copy is not None and position.rank == 0:
        _warn_of_pattern(saved, count, component, position)
    return copy


def _stored_copy(
    manifest: CheckpointManifest,
    saved: ComponentManifest,
    count: int,
    component: StateComponent,
    position: RankPosition,
) -> int | None:
    resized = _Resized(component, position, saved.pattern, count)
    if saved.pattern in _COMMON:
        return 0
    if saved.pattern == "PER_RANK":
        same = position.world_size == count
        return position.rank if same else resized.by_count(position.rank, position.world_size)
    if saved.pattern == "PER_NODE":
        number, now = group_index(position.nodes, position.rank), len(position.nodes)
        if (
            now == count > 1
            and position.world_size == manifest.world_size
            and position.nodes != manifest.nodes
        ):
            return resized.by_members(
                number,
                now,
                f"the nodes {short(manifest.nodes)}",
                f"they are {short(position.nodes)}",
            )
        return number if now == count else resized.by_count(number, now)
    return _copy_of_group(manifest, saved, count, component, position, resized)


def _copy_of_group(
    manifest: CheckpointManifest,
    saved: ComponentManifest,
    count: int,
    component: StateComponent,
    position: RankPosition,
    resized: _Resized,
) -> int | None:
    """A key that was given at the save and now decides. Else groups are known by name and number,
    and where there are as many ranks as there were, by their members too: one partition has nothing
    to do with another of as many groups."""
    name = component.process_group_name or ""
    partition = position.partitions.get(name)
    if partition is None:
        if count == 1:
            return 0
        raise StateMismatch(
            f"component {component.key!r} was saved PER_GROUP over {saved.group!r} ({count} "
            "groups); declare it so, "
            "with process_group_name and process_groups, to say which of them this rank is in"
        )
    number, now = group_index(partition, position.rank), len(partition)
    if saved.group_keys and component.group_key is not None:
        if component.group_key in saved.group_keys:
            return saved.group_keys.index(component.group_key)
        names = f" ({', '.join(saved.group_keys)}; this rank's is {component.group_key})"
        return resized.by_count(number, now, names)
    if now != count:
        return resized.by_count(number, now)
    same_members = position.world_size != manifest.world_size or partition == saved.partition
    if count > 1 and not (name == saved.group and same_members):
        was = f"the groups {short(saved.partition)} of {saved.group!r}"
        return resized.by_members(number, now, was, f"{name!r} is {short(partition)}")
    return number


def _warn_of_pattern(
    saved: ComponentManifest, count: int, component: StateComponent, position: RankPosition
) -> None:
    """Say so where another pattern than the saved one makes a difference: where ranks get states of
    their own, or may want such."""
    now = component.sharing_pattern.value
    one_state = saved.pattern in _COMMON or count == 1
    one_wanted = now in _COMMON or position.world_size == 1
    if saved.pattern == now or (one_state and one_wanted):
        return
    owner = saved.pattern.removeprefix("PER_").lower()
    gets = (
        "every rank gets the one state that was saved"
        if one_state
        else f"each rank gets the state of its own {owner}"
    )
    warnings.warn(
        f"component {component.key!r} was saved {saved.pattern} and is declared {now} now: {gets}",
        CheckpointWarning,
        stacklevel=2,
    )


@dataclass(frozen=True, slots=True)
class _Resized:
    """What becomes of a component whose ranks, nodes or groups are not those that were saved:
    `on_resize` decides."""

    component: StateComponent
    position: RankPosition
    pattern: str
    count: int

    def by_count(self, number: int, now: int, names: str = "") -> int | None:
        """Another number of them, or names that were not saved."""
        what = f"{self.count} {self.what}s{names}, there are {now} now"
        return self.chosen(number, now, what, "", everywhere=bool(names))

    def by_members(self, number: int, now: int, was: str, now_is: str) -> int | None:
        """As many of them, and not the same ones."""
        hint = (
            "declare the group that it was saved over, or give group_key at the save and at the "
            "load; "
        )
        return self.chosen(
            number, now, f"{was}, and now {now_is}", hint if self.what == "group" else ""
        )

    @property
    def what(self) -> str:
        return self.pattern.removeprefix("PER_").lower()

    def chosen(
        self, number: int, now: int, changed: str, hint: str, *, everywhere: bool = False
    ) -> int | None:
        component, policy = self.component, self.component.on_resize
        if policy == "keep":
            if self.position.rank == 0 or everywhere:  # once, not once per rank
                warnings.warn(
                    f"component {component.key!r} was saved for {changed}: the live state stays "
                    "(on_resize='keep')",
                    CheckpointWarning,
                    stacklevel=2,
                )
            return None
        if policy == "error":
            rng = getattr(component.stateful, "restore_last", False)
            where = (
                "RNGState(on_resize='keep')"
                if rng
                else f"StateComponent({component.key!r}, ..., on_resize='keep')"
            )
            raise StateMismatch(
                f"component {component.key!r} was saved for {changed}; {hint}set on_resize='keep' "
                "to go on with the "
                f"live state ({where}), or to a function (new {self.what}, new size, old size) -> "
                f"old {self.what}"
            )
        answer = policy(number, now, self.count)
        if type(answer) is not int or not 0 <= answer < self.count:
            raise StateMismatch(
                f"component {component.key!r}: on_resize gave {answer!r} for {self.what} "
                f"{number} of {now}; it must be a whole number below {self.count}"
            )
        return answer


@dataclass(frozen=True, slots=True)
class LoadedComponent:
    """What is loaded of one component: its owner here, what is stored for it, and names that only
    the checkpoint has."""

    component: StateComponent
    stored: StoredComponent
    sharded: bool
    unexpected: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class LiveComponent:
    """A component that is loaded, and its state here. owner: who decides what it takes, also where
    only a part of its state is loaded; snapshot: the tensors of the state; numbers: what the
    checkpoint calls its tensors, by name."""

    key: str
    loaded: LoadedComponent
    owner: Any
    state: Any
    snapshot: StateSnapshot
    numbers: dict[str, int]

    def order(self, tensor: TensorLeaf) -> int:
        """Who keeps memory that several tensors have: the lowest. OTHER is not read into."""
        owner, layout = self.owner, tensor.spec.layout
        if isinstance(owner, ModelState):
            return OTHER if layout is None and owner.decides(tensor.spec.name) else MODULE
        if is_optimizer(owner):
            return OPTIMIZER
        if isinstance(owner, PlainState):
            return PLAIN
        return OTHER if layout is None else SLICE


MODULE, OPTIMIZER, SLICE, PLAIN, OTHER = range(5)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A live tensor of a component."""

    live: LiveComponent
    tensor: TensorLeaf

    @property
    def name(self) -> tuple[str, str]:
        return self.live.key, self.tensor.spec.name

    @property
    def number(self) -> int | None:
        """What the checkpoint calls it, if it has it."""
        return self.live.numbers.get(self.tensor.spec.name)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Live memory that several of the tensors to be loaded have in common, over all components.

    One memory cannot hold two values. A module keeps its memory; an optimizer's or a plain dict's
    entry that was saved with other bytes gets memory of its own. Tensors that overlap in part are
    read into host memory first, and compared after.

    keepers: whose memory a tensor is that is the same view. contested: tensors that overlap others
    in part. others: what is not read into and shares memory with what is.
    """

    keepers: dict[tuple[str, str], Held] = field(default_factory=dict)
    contested: set[tuple[str, str]] = field(default_factory=set)
    others: list[tuple[Held, Held]] = field(default_factory=list)


def shared_memory(components: Iterable[LiveComponent]) -> SharedMemory:
    found = SharedMemory()
    for cluster in _clusters(components):
        kept: dict[tuple[object, ...] | None, Held] = {}
        ordered = sorted(cluster, key=lambda held: held.live.order(held.tensor))
        for one in ordered:
            if one.live.order(one.tensor) == OTHER:
                continue
            spec = one.tensor.spec
            view = same_view_key(one.tensor.tensor), spec.global_shape, spec.box
            first = kept.setdefault(view, one)
            if first is not one and first.live is not one.live:
                found.keepers[one.name] = first
        if len(kept) > 1:
            found.contested.update(one.name for one in kept.values())
        for one in cluster:
            if one.live.order(one.tensor) == OTHER:
                found.others.extend((one, k) for k in kept.values() if k.live is not one.live)
    return found


def _clusters(components: Iterable[LiveComponent]) -> Iterator[list[Held]]:
    """Tensors whose memory lies in one stretch, where there are several."""
    live: list[LiveComponent] = []
    tensors: list[TensorLeaf] = []
    on_device: dict[str, list[tuple[int, int, int]]] = {}
    for component in components:
        for tensor in component.snapshot.tensors:
            if (span := memory_span(tensor.tensor)) is not None:
                on_device.setdefault(span[0], []).append((span[1], span[2], len(tensors)))
                live.append(component)
                tensors.append(tensor)
    for spans in on_device.values():
        spans.sort()
        first, end = 0, 0
        for at in range(len(spans) + 1):
            if at == len(spans) or spans[at][0] >= end:
                if at - first > 1:
                    yield [Held(live[n], tensors[n]) for _, _, n in spans[first:at]]
                first, end = at, 0
            if at < len(spans):
                end = max(end, spans[at][1])


def same_bytes(one: Held, other: Held) -> bool:
    """Whether the same bytes were saved of two live tensors that are one, by their digests."""
    first, second = one.number, other.number
    if first is None or second is None or one.tensor.spec.shape != other.tensor.spec.shape:
        return False
    return _same_stored(one, first, other, second)


def _same_stored(one: Held, first: int, other: Held, second: int) -> bool:
    """Whether two saved tensors are equal where `one` wants them."""
    box = one.tensor.spec.box
    here, there = one.live.loaded.stored, other.live.loaded.stored
    a, b = here.tensors[first], there.tensors[second]
    if box is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return box is None
    pieces = [
        [(piece.offset, piece.digests) for piece in stored.pieces(number, box)]
        for stored, number in ((here, first), (there, second))
    ]
    return pieces[0] == pieces[1]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A tensor that is read in its own dtype, portion by portion, into `memory` of another one,
    which holds `box` of it."""

    key: str
    stored: StoredComponent
    number: int
    dtype: torch.dtype
    box: Box
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What is read, and where to.

    converted: what is read in portions, after the rest. overwritten: components whose live tensors
    are read into. staged: by component, live tensors and
    the host memory that is copied into them after all was read; contested: those of them whose
    memory others have too, by name. cast: full name -> "saved dtype -> live dtype"; mismatched:
    full name -> forms, saved and live, that do not fit.
    """

    reads: list[TensorRead] = field(default_factory=list)
    converted: list[Conversion] = field(default_factory=list)
    devices: set[torch.device] = field(default_factory=set)
    overwritten: set[str] = field(default_factory=set)
    staged: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    contested: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    cast: dict[str, str] = field(default_factory=dict)
    mismatched: dict[str, tuple[str, str]] = field(default_factory=dict)


class HostMemory:
    """A Target: memory of a contiguous tensor on the host, which holds all of a stored box."""

    __slots__ = ("pinned", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.pinned: MakeMemory | None = None

    def view(self, start: int, stop: int) -> memoryview:
        # By its address: numpy would have it without gradient, conjugation and bfloat16, in eight
        # microseconds a tensor instead of one.
        memory = (ctypes.c_char * (stop - start)).from_address(self.tensor.data_ptr() + start)
        return memoryview(memory).cast("B")

    def put(self, start: int, data: memoryview) -> None:
        raise AssertionError("there is always a view")


class Destinations:
    """Where the tensors of one component go. skip: those that this rank does not have belong to
    others. cast: dtypes may differ; in_portions: what is converted is read a portion at a time;
    host_first: no live tensor is read into before all is verified.
    """

    def __init__(
        self,
        view: CheckpointView,
        live: LiveComponent,
        shared: SharedMemory,
        plan: ReadPlan,
        *,
        skip: bool,
        cast: bool,
        in_portions: bool,
        host_first: bool,
    ) -> None:
        self.view, self.entry, self.shared, self.plan = view, live, shared, plan
        self.skip, self.cast, self.host_first = skip, cast, host_first
        self.in_portions = in_portions
        self.key, self.stored, self.owner = live.key, live.loaded.stored, live.owner
        self.live = {t.spec.name: t for t in live.snapshot.tensors}
        self.held = dict(_held_names(live.state) if live.loaded.sharded else ())
        self.leaves: dict[int, Any] = {}
        self.arrays: set[int] = set()

    def leaf(self, ref: TensorRef) -> Any:
        """What stands for a saved tensor in the state that is handed over; its bytes are read
        later."""
        if not 0 <= ref.index < len(self.stored.tensors):
            raise ValueError(f"the tree refers to tensor {ref.index} of {len(self.stored.tensors)}")
        if ref.numpy:
            self.arrays.add(ref.index)
        found = self._leaf_of(ref.index)
        return found.numpy() if ref.numpy and isinstance(found, torch.Tensor) else found

    def container(self, saved: Opaque) -> Any:
        """What stands for a saved tensor that is made of others: the live one, whose parts are read
        into, or its parts, to be put together when they were read."""
        payload = saved.payload
        name = self._container_name(payload)
        live = self.entry.snapshot.containers.get(name)
        wrong = misfit(payload, live)
        plain = self.live.get(name)
        other = live if live is not None else None if plain is None else plain.live
        if wrong is not None and other is not None and not self._may_replace(name, other):
            self.plan.mismatched[f"{self.key}/{name}"] = wrong
            return other
        parts = self.substituted(payload)
        return live if wrong is None and is_made_of(live, parts) else Opaque(saved.codec, parts)

    def substituted(self, saved: Any) -> Any:
        """A saved value with what stands for its tensors."""
        return substituted(saved, self.leaf, self.container)

    def _container_name(self, payload: Any) -> str:
        """Raises StateMismatch for a class that cannot be made here, ValueError for damage."""
        try:
            check_parts(payload)
        except StateMismatch as error:
            error.message = f"{self.view.url}: component {self.key!r}: {error.message}"
            raise
        inner, part = next(iter(payload["tensors"].items()))
        if type(part) is Opaque:
            name = self._container_name(part.payload)
        else:
            name = self.stored.tensors[part.index].name
        return name.removesuffix(join_path(("tensors", inner))).removesuffix("/")

    def _may_replace(self, name: str, live: Any) -> bool:
        """Whether another tensor may take the place of a live one that is made of others, or of a
        plain one by such a tensor."""
        if isinstance(self.owner, ModelState):
            return self.owner.decides(name)
        return not isinstance(self.owner, PlainState) or self.owner.may_replace(live)

    def _leaf_of(self, number: int) -> Any:
        tensor = self.stored.tensors[number]
        live = self.live.get(tensor.name)
        made_of_others = self.entry.snapshot.containers.get(tensor.name)
        if made_of_others is not None and not self._may_replace(tensor.name, made_of_others):
            wrong = misfit(None, made_of_others)
            self.plan.mismatched[f"{self.key}/{tensor.name}"] = wrong or ("", "")
            return made_of_others
        if tensor.alias_of is not None:
            first = self.stored.tensors[tensor.alias_of]
            other = self.live.get(first.name)
            if live is None and other is None:
                return self._once(tensor.alias_of)
            if live is not None and other is not None and _tied(live, other):
                return self._once(tensor.alias_of)
        if live is not None and live.spec.alias_of is not None and self.entry.order(live) != OTHER:
            other = self.entry.snapshot.tensors[live.spec.alias_of]
            number_of_other = self.entry.numbers.get(other.spec.name)
            if number_of_other is not None and _tied(live, other):
                one, two = Held(self.entry, live), Held(self.entry, other)
                if _same_stored(one, number, two, number_of_other):
                    self._once(number_of_other)
                    return live.live
                return self._two_values(number, tensor, live, repr(other.spec.name))
        return self._once(number)

    def _two_values(self, number: int, tensor: LogicalTensor, live: TensorLeaf, other: str) -> Any:
        """One memory cannot hold two values. What is held by name gets memory of its own; a
        module's tensors are refused."""
        dtype = torch_dtype(tensor.dtype)
        by_name = isinstance(self.owner, PlainState) or is_optimizer(self.owner)
        if by_name and not has_other_owner(live.live) and dtype is not None and _fits(live, tensor):
            return self._as_saved(number, tensor, dtype, live)
        forms = ("a value of its own", f"memory that it shares with {other}")
        self.plan.mismatched[f"{self.key}/{tensor.name}"] = forms
        return live.live

    def _once(self, number: int) -> Any:
        if number not in self.leaves:
            self.leaves[number] = self._destination(number, self.stored.tensors[number])
        return self.leaves[number]

    def _destination(self, number: int, tensor: LogicalTensor) -> Any:
        dtype = known_dtype(self.view, self.key, tensor)
        if (live := self.live.get(tensor.name)) is None:
            return self._as_saved(number, tensor, dtype, None)
        fits, same_shape = _fits(live, tensor), live.spec.global_shape == tensor.shape
        if self.entry.order(live) == OTHER:
            # A module's own code may resize; that a dtype changes is for the caller to say.
            checked = isinstance(self.owner, ModelState) and same_shape
            if not fits and checked and not self._castable(tensor, live, dtype):
                return live.live
            return self._as_saved(number, tensor, dtype, live)
        if not fits and self._replaceable(tensor, live) and not (self.cast and same_shape):
            return self._as_saved(number, tensor, dtype, live)
        if not fits and not self._castable(tensor, live, dtype):
            return live.live
        if (keeper := self.shared.keepers.get((self.key, tensor.name))) is not None:
            if not same_bytes(Held(self.entry, live), keeper):
                other = f"'{keeper.live.key}/{keeper.tensor.spec.name}'"
                return self._two_values(number, tensor, live, other)
            return live.live
        if fits and self._free_for_reading(live):
            self.plan.overwritten.add(self.key)
            self._read_into(number, live.tensor, live.spec.box)
        elif not fits and self.in_portions and self._free_for_reading(live):
            if live.spec.box is not None:
                self.plan.overwritten.add(self.key)
                self.plan.converted.append(
                    Conversion(
                        self._key(number), self.stored, number, dtype, live.spec.box, live.tensor
                    )
                )
        else:
            self._stage(number, tensor, live, dtype)
        return live.live

    def _free_for_reading(self, live: TensorLeaf) -> bool:
        """Whether a tensor's memory may be read into: not shared in part with another's, or with
        itself."""
        tensor = live.tensor
        # The memory of a conjugated or negated view holds other bits than its items say.
        odd = tensor.is_conj() or tensor.is_neg()
        odd = odd or not (tensor.is_contiguous() or not overlaps_itself(tensor))
        return not (self.host_first or odd or (self.key, live.spec.name) in self.shared.contested)

    def _stage(
        self, number: int, tensor: LogicalTensor, live: TensorLeaf, dtype: torch.dtype
    ) -> None:
        """Read into host memory first."""
        staged = torch.empty(live.spec.shape, dtype=dtype, device="cpu")
        self.plan.staged.setdefault(self.key, []).append((live.tensor, staged))
        if (self.key, tensor.name) in self.shared.contested:
            self.plan.contested.append((f"{self.key}/{tensor.name}", live.tensor, staged))
        self._read_into(number, staged, live.spec.box)

    def _replaceable(self, tensor: LogicalTensor, live: TensorLeaf) -> bool:
        """Whether a plain tensor of another shape or dtype may take the place of the live one in
        the dict or list around it: one that nothing else is known to use."""
        whole = tensor.layout is None or isinstance(tensor.layout, WholeLayout)
        return isinstance(self.owner, PlainState) and whole and self.owner.may_replace(live.live)

    def _as_saved(
        self, number: int, tensor: LogicalTensor, dtype: torch.dtype, live: TensorLeaf | None
    ) -> Any:
        """Fresh memory in the shape and dtype that were saved, on the device of the live tensor if
        there is one."""
        leaf = self._fresh(number, tensor, dtype, live)
        if leaf is not SKIPPED:
            shard = local_shard(leaf)
            self._read_into(number, shard.tensor, shard.box)
        return leaf

    def _read_into(self, number: int, tensor: torch.Tensor, box: Box | None) -> None:
        """Read `box` of a saved tensor into `tensor`."""
        if box is None:
            return
        self.plan.devices.add(tensor.device)
        self.plan.reads.extend(reads_into(self._key(number), self.stored, number, box, tensor))

    def _key(self, number: int) -> str:
        return self.stored.of[number] if self.stored.of else self.key

    def _castable(self, tensor: LogicalTensor, live: TensorLeaf, dtype: torch.dtype) -> bool:
        name = f"{self.key}/{tensor.name}"
        same_kind = live.tensor.is_complex() == dtype.is_complex
        if self.cast and live.spec.global_shape == tensor.shape and same_kind:
            self.plan.cast[name] = f"{tensor.dtype} -> {live.spec.dtype}"
            return True
        self.plan.mismatched[name] = (
            f"{tensor.dtype} {list(tensor.shape)}",
            f"{live.spec.dtype} {list(live.spec.global_shape)}",
        )
        return False

    def _fresh(
        self, number: int, tensor: LogicalTensor, dtype: torch.dtype, live: TensorLeaf | None
    ) -> Any:
        allocate = getattr(self.owner, "allocate", None)
        if allocate is not None:
            made = allocate(tensor.name, dtype, tensor.shape)
            if made is not None:
                return made
        if live is None and self.skip and not _has_other(self.held, tensor.name):
            return SKIPPED
        if volume(tensor.shape) * dtype.itemsize > ALLOCATED_UNSEEN:
            # First that the bytes are there, then memory for them.
            whole = (0,) * len(tensor.shape), tensor.shape
            self.view.check_files(p.file for p in self.stored.pieces(number, whole) if p.file)
        # A module copies what it is handed, from wherever it is.
        here = live is None or number in self.arrays or isinstance(self.owner, ModelState)
        device = torch.device("cpu") if live is None or here else live.tensor.device
        return torch.empty(tensor.shape, dtype=dtype, device=device)


def known_dtype(view: CheckpointView, key: str, tensor: LogicalTensor) -> torch.dtype:
    """Raises CheckpointCorrupt for a dtype that this torch lacks."""
    dtype = torch_dtype(tensor.dtype)
    if dtype is None:
        name = f"{key}/{tensor.name}"
        raise CheckpointCorrupt(
            f"{view.url}: tensor {name!r} has dtype {tensor.dtype}, which this torch lacks",
            tensor=name,
            kind="format",
        )
    return dtype


def read_converted(files: StoredFiles, parts: Iterable[Conversion], threads: int) -> None:
    """As many bytes at a time as may be in memory twice."""
    for batch in _batches(parts):
        staged = [torch.empty(shape, dtype=part.dtype) for part, (_, shape) in batch]
        reads: list[TensorRead] = []
        for (part, box), memory in zip(batch, staged, strict=True):
            reads += reads_into(part.key, part.stored, part.number, box, memory)
        files.read(reads, threads)
        for (part, (offset, shape)), memory in zip(batch, staged, strict=True):
            ranges = zip(offset, part.box[0], shape, strict=True)
            here = tuple(slice(o - s, o - s + n) for o, s, n in ranges)
            part.memory.detach()[here].copy_(memory)


def _batches(parts: Iterable[Conversion]) -> Iterator[list[tuple[Conversion, Box]]]:
    batch: list[tuple[Conversion, Box]] = []
    nbytes = 0
    for part in parts:
        start, held = part.box
        for slices in portions_of(held, part.dtype.itemsize, CONVERTED_BYTES):
            shape = tuple(each.stop - each.start for each in slices)
            size = volume(shape) * part.dtype.itemsize
            if batch and nbytes + size > CONVERTED_BYTES:
                yield batch
                batch, nbytes = [], 0
            offset = tuple(s + each.start for s, each in zip(start, slices, strict=True))
            batch.append((part, (offset, shape)))
            nbytes += size
    if batch:
        yield batch


def reads_into(
    key: str, stored: StoredComponent, number: int, box: Box, tensor: torch.Tensor
) -> Iterator[TensorRead]:
    """What is read to have `box` of a saved tensor in `tensor`, which is of its dtype."""
    on_host = tensor.is_cpu and tensor.is_contiguous()
    region: Words | None = None
    for piece in stored.pieces(number, box):
        whole = piece.local_shape == box[1] and piece.offset in (None, box[0])
        if whole and on_host:
            yield TensorRead(key, piece, HostMemory(tensor))
            continue
        region = torch_words(tensor) if region is None else region
        yield read_of(key, piece, box, region)


def _tied(live: TensorLeaf, other: TensorLeaf) -> bool:
    view = same_view_key(live.tensor)
    return (view is not None and view == same_view_key(other.tensor)) or live.live is other.live


def _fits(live: TensorLeaf, tensor: LogicalTensor) -> bool:
    return live.spec.global_shape == tensor.shape and live.spec.dtype == tensor.dtype


def torch_words(tensor: torch.Tensor) -> Words:
    """Words over a tensor's memory, on any device."""
    array = words(tensor)

    def memory(part: torch.Tensor) -> memoryview | None:
        return TensorBytes(part).view(0, part.numel() * part.element_size())

    flat = lambda data: torch.frombuffer(data, dtype=array.dtype)  # noqa: E731
    if tensor.device.type == "cpu":
        return Words(array, array.element_size(), flat, memory, moving=torch.inference_mode)
    flattened = lambda part: part.view(-1) if part.is_contiguous() else None  # noqa: E731

    @contextmanager
    def moving() -> Iterator[None]:
        with torch.inference_mode(), own_stream(tensor.device):
            yield

    return Words(
        array, array.element_size(), flat, memory, flattened, pinned_memory(tensor.device), moving
    )


# What a rank is handed of a state of which it holds a part.


class _Skipped:
    """In the place of a tensor that this rank does not want."""


SKIPPED = _Skipped()
_DICTS = (dict, OrderedDict, Counter)


def state_with(destinations: Destinations, saved: Any, file: str) -> Any:
    """A decoded state with destinations in place of the references to tensors, and without what
    this rank does not want. Raises CheckpointCorrupt, with `file`, where they make no sense."""
    try:
        state = destinations.substituted(saved)
    except MALFORMED as error:
        raise malformed(f"{file}: stored values cannot be read", error, file) from None
    left = _pruned(state)
    return {} if left is SKIPPED else left


def substituted(
    state: Any, leaf: Callable[[TensorRef], Any], container: Callable[[Opaque], Any]
) -> Any:
    """A decoded state with `leaf(ref)` in place of the references to tensors, and
    `container(parts)` in place of tensors that are made of others."""
    kind = type(state)
    if kind is TensorRef:
        return leaf(state)
    if kind is Opaque:
        if state.codec == CODEC:
            return container(state)
        return Opaque(state.codec, substituted(state.payload, leaf, container))
    if kind in _DICTS:
        if only_plain(state.values()):
            return state
        return kind({key: substituted(item, leaf, container) for key, item in state.items()})
    if kind in (list, tuple, set, frozenset) and not only_plain(state):
        return kind([substituted(item, leaf, container) for item in state])
    return state


def _held_names(
    state: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[str, ...], int | None]]:
    """Parts of the names, made as those of tensors, of lists in the live state with their lengths,
    and of what is neither dict nor list."""
    if (items := keyed(state)) is not None:
        for key, item in items.items():
            yield from _held_names(item, (*path, key))
        return
    is_list = type(state) in (list, tuple)
    yield tuple(join_path(path).split("/")) if path else (), len(state) if is_list else None
    for number, item in enumerate(state if is_list else ()):
        yield from _held_names(item, (*path, number))


def _has_other(held: Mapping[tuple[str, ...], int | None], name: str) -> bool:
    """Whether the live state has something else where the tensor `name` was saved: another value,
    or a list that ends before it."""
    parts = tuple(name.split("/"))
    for n in range(len(parts) + 1):
        if parts[:n] in held:
            length = held[parts[:n]]
            if (
                length is None
                or n == len(parts)
                or (parts[n].isdecimal() and int(parts[n]) >= length)
            ):
                return True
    return False


def _lacks(state: Any) -> bool:
    """Whether something was skipped at any depth."""
    if type(state) is Opaque:
        return _lacks(state.payload)
    items = (
        state.values() if isinstance(state, dict) else state if type(state) in (list, tuple) else ()
    )
    return state is SKIPPED or any(_lacks(item) for item in items)


def _pruned(state: Any) -> Any:
    """The state without what was skipped, and without dicts that held nothing else."""
    if type(state) in _DICTS:
        if only_plain(state.values()):
            return state
        kept = {key: _pruned(item) for key, item in state.items()}
        result = {key: item for key, item in kept.items() if item is not SKIPPED}
        return SKIPPED if kept and not result else type(state)(result)
    if type(state) is Opaque and keyed(state) is not None:
        kept = _pruned(state.payload)
        return SKIPPED if kept is SKIPPED else Opaque(state.codec, kept)
    if type(state) is Opaque:
        return SKIPPED if _lacks(state.payload) else state
    if type(state) in (list, tuple) and not only_plain(state):
        return type(state)(None if (item := _pruned(i)) is SKIPPED else item for i in state)
    return state
