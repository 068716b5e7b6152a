"""Where on this rank what was saved goes: which stored copy of a component it gets, and which
memory the bytes of each tensor are read into."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ..errors import CheckpointCorrupt, CheckpointWarning, StateMismatch
from ..format.layout import Box, LogicalTensor, WholeLayout, volume
from ..format.manifest import MALFORMED, CheckpointManifest, ComponentManifest, malformed, short
from ..format.values import Opaque, TensorRef, join_path, keyed, only_plain
from ..ranks.communicator import Communicator, group_index
from ..state.component import StateComponent, is_optimizer, owner_of
from ..state.containers import CODEC, check_parts, is_made_of, misfit
from ..state.layout import (
    TensorBytes,
    local_shard,
    memory_clusters,
    overlaps_itself,
    own_stream,
    pinned_memory,
    same_view_key,
    torch_dtype,
    words,
)
from ..state.modules import ModelState
from ..state.plain import PlainState, has_other_owner
from ..state.tree import StateSnapshot, TensorLeaf, capture
from .reader import HostMemory, PartTarget, StoredFiles, TensorRead, read_of
from .view import CheckpointView, StoredComponent, portions_of

CONVERTED_BYTES = 64 << 20  # read at a time in the saved dtype, where another one is wanted
ALLOCATED_UNSEEN = 16 << 20  # larger tensors are allocated only after a look at their files

# One state for all ranks.
_COMMON = ("GLOBAL", "REPLICATED", "SHARDED")
Partitions = Mapping[str, list[list[int]]]


class _Position(NamedTuple):
    """Which of the saved copies belongs to this rank: its `number` among the ranks, nodes or
    groups that there are now, and of how many. changed: how they are not those that were saved, in
    words, where they are not; hint: what else to do then."""

    number: int
    of: int
    changed: str = ""
    hint: str = ""


def stored_copy_for(
    manifest: CheckpointManifest,
    component: StateComponent,
    comm: Communicator,
    partitions: Partitions,
) -> int | None:
    """The number of the copy to restore on this rank; None when the live state is to stay.

    What was saved decides: global and replicated state goes to every rank. State of a rank, node or
    group goes to the same one while their number (or the group's key) is the same and, on as many
    ranks, their ranks are the same. All else is up to the component's `on_resize`. Another sharing
    pattern than the saved one is a CheckpointWarning where it makes a difference. Raises
    StateMismatch with what was saved and what there is now.
    """
    saved = manifest.components[component.key]
    count = 1 if saved.pattern in _COMMON else len(manifest.copies(component.key))
    if saved.pattern in _COMMON:
        position = _Position(0, count)
    elif saved.pattern == "PER_GROUP":
        position = _position_of_group(manifest, saved, count, component, comm, partitions)
    else:
        position = _position_of_rank(manifest, saved.pattern, count, comm)
    number: int | None = position.number
    if position.changed:
        number = _resized(component, saved.pattern, count, position, comm)
    if number is not None and comm.rank == 0:
        _warn_of_pattern(saved, count, component, comm.world_size)
    return number


def _position_of_rank(
    manifest: CheckpointManifest, pattern: str, count: int, comm: Communicator
) -> _Position:
    if pattern == "PER_RANK":
        number, now, unit = comm.rank, comm.world_size, "rank"
    else:
        number, now, unit = comm.node_number, len(comm.nodes), "node"
    if now != count:
        return _Position(number, now, f"{count} {unit}s, there are {now} now")
    moved = unit == "node" and now > 1 and comm.nodes != manifest.nodes
    if moved and comm.world_size == manifest.world_size:
        was, is_now = short(manifest.nodes), short(comm.nodes)
        return _Position(number, now, f"the nodes {was}, and now they are {is_now}")
    return _Position(number, now)


def _position_of_group(
    manifest: CheckpointManifest,
    saved: ComponentManifest,
    count: int,
    component: StateComponent,
    comm: Communicator,
    partitions: Partitions,
) -> _Position:
    """A key that was given at the save and now decides. Else groups are known by name and number,
    and where there are as many ranks as there were, by their members too: one partition has nothing
    to do with another of as many groups."""
    name = component.process_group_name or ""
    partition = partitions.get(name)
    if partition is None:
        if count == 1:
            return _Position(0, 1)
        raise StateMismatch(
            f"component {component.key!r} was saved PER_GROUP over {saved.group!r} ({count} "
            "groups); declare it so, with process_group_name and process_groups, to say which of "
            "them this rank is in"
        )
    number, now, names = group_index(partition, comm.rank), len(partition), ""
    if saved.group_keys and component.group_key is not None:
        if component.group_key in saved.group_keys:
            return _Position(saved.group_keys.index(component.group_key), now)
        names = f" ({', '.join(saved.group_keys)}; this rank's is {component.group_key})"
    if names or now != count:
        return _Position(number, now, f"{count} groups{names}, there are {now} now")
    same_members = comm.world_size != manifest.world_size or partition == saved.partition
    if count > 1 and not (name == saved.group and same_members):
        was = f"the groups {short(saved.partition)} of {saved.group!r}"
        hint = "declare the group that it was saved over, or give group_key at the save and at the "
        hint += "load; "
        return _Position(number, now, f"{was}, and now {name!r} is {short(partition)}", hint)
    return _Position(number, now)


def _resized(
    component: StateComponent, pattern: str, count: int, position: _Position, comm: Communicator
) -> int | None:
    """What `on_resize` makes of a component whose ranks, nodes or groups are not those that were
    saved."""
    unit, policy = pattern.removeprefix("PER_").lower(), component.on_resize
    saved_for = f"component {component.key!r} was saved for {position.changed}"
    if policy == "keep":
        # Once, not once per rank; of a key that was not saved each rank has its own.
        if comm.rank == 0 or "this rank's is" in position.changed:
            what = f"{saved_for}: the live state stays (on_resize='keep')"
            warnings.warn(what, CheckpointWarning, stacklevel=2)
        return None
    if policy == "error":
        where = f"StateComponent({component.key!r}, ..., on_resize='keep')"
        if getattr(component.stateful, "restore_last", False):
            where = "RNGState(on_resize='keep')"
        raise StateMismatch(
            f"{saved_for}; {position.hint}set on_resize='keep' to go on with the live state "
            f"({where}), or to a function (new {unit}, new size, old size) -> old {unit}"
        )
    answer = policy(position.number, position.of, count)
    if type(answer) is not int or not 0 <= answer < count:
        raise StateMismatch(
            f"component {component.key!r}: on_resize gave {answer!r} for {unit} {position.number} "
            f"of {position.of}; it must be a whole number below {count}"
        )
    return answer


def _warn_of_pattern(
    saved: ComponentManifest, count: int, component: StateComponent, world_size: int
) -> None:
    """Say so where another pattern than the saved one makes a difference: where ranks get states of
    their own, or may want such."""
    now = component.sharing_pattern.value
    one_state = saved.pattern in _COMMON or count == 1
    one_wanted = now in _COMMON or world_size == 1
    if saved.pattern == now or (one_state and one_wanted):
        return
    gets = "every rank gets the one state that was saved"
    if not one_state:
        gets = f"each rank gets the state of its own {saved.pattern.removeprefix('PER_').lower()}"
    warnings.warn(
        f"component {component.key!r} was saved {saved.pattern} and is declared {now} now: {gets}",
        CheckpointWarning,
        stacklevel=2,
    )


@dataclass(frozen=True, slots=True, eq=False)
class LoadedComponent:
    """What is loaded of one component, and into what.

    stored: what the checkpoint has of it; unexpected: names that only the checkpoint has. owner:
    who decides what it takes, also where only a part of its state is loaded. state, snapshot: its
    state here, and the tensors of that; numbers: what the checkpoint calls them, by name; decided:
    names of those that code of the owner's own decides about.
    """

    key: str
    component: StateComponent
    stored: StoredComponent
    sharded: bool
    unexpected: Sequence[str]
    owner: Any
    state: Any
    snapshot: StateSnapshot
    numbers: dict[str, int]
    decided: frozenset[str]

    @classmethod
    def of(
        cls,
        component: StateComponent,
        stored: StoredComponent,
        sharded: bool,
        unexpected: Sequence[str] = (),
    ) -> LoadedComponent:
        """Asks the component for its state."""
        shaped = state = component.stateful.state_dict()
        owner, decided = owner_of(component.stateful), frozenset[str]()
        if isinstance(owner, ModelState):
            # What its own loading makes of parameters that have no shape yet is its to say.
            lazy = {n for n, v in state.items() if isinstance(v, torch.Tensor) and is_lazy(v)}
            shaped = {n: v for n, v in state.items() if n not in lazy} if lazy else state
        key = component.key
        snapshot = capture(key, shaped, sharded=True, live_only=True)
        if isinstance(owner, ModelState) and owner.decides_some:
            decided = frozenset(filter(owner.decides, (t.spec.name for t in snapshot.tensors)))
        numbers = {tensor.name: number for number, tensor in enumerate(stored.tensors)}
        here = owner, state, snapshot, numbers, decided
        return cls(key, component, stored, sharded, unexpected, *here)

    def order(self, tensor: TensorLeaf) -> int:
        """Who keeps memory that several tensors have: the lowest. OTHER is not read into."""
        owner, layout = self.owner, tensor.spec.layout
        if isinstance(owner, ModelState):
            return OTHER if layout is None and tensor.spec.name in self.decided else MODULE
        if is_optimizer(owner):
            return OPTIMIZER
        if isinstance(owner, PlainState):
            return PLAIN
        return OTHER if layout is None else SLICE


MODULE, OPTIMIZER, SLICE, PLAIN, OTHER = range(5)


class Held(NamedTuple):
    """A live tensor of a component."""

    of: LoadedComponent
    tensor: TensorLeaf

    @property
    def name(self) -> tuple[str, str]:
        return self.of.key, self.tensor.spec.name

    def precedence(self) -> tuple[int, bool]:
        """Which of several tensors keeps the memory that they share: the lowest, and of those in a
        component the first that its state has."""
        return self.of.order(self.tensor), self.tensor.spec.alias_of is not None

    @property
    def number(self) -> int | None:
        """What the checkpoint calls it, if it has it."""
        return self.of.numbers.get(self.tensor.spec.name)


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


def shared_memory(components: Iterable[LoadedComponent]) -> SharedMemory:
    found = SharedMemory()
    live = [
        Held(component, leaf) for component in components for leaf in component.snapshot.tensors
    ]
    for cluster in memory_clusters([held.tensor.tensor for held in live]):
        held = sorted((live[at] for at in cluster), key=Held.precedence)
        kept: dict[tuple[object, ...] | None, Held] = {}
        for one in held:
            if one.of.order(one.tensor) == OTHER:
                # They are the last, so all that is kept is known.
                found.others.extend((one, k) for k in kept.values() if k.of is not one.of)
                continue
            spec = one.tensor.spec
            view = same_view_key(one.tensor.tensor), spec.global_shape, spec.box
            if (first := kept.setdefault(view, one)) is not one:
                found.keepers[one.name] = first
        if len(kept) > 1:
            found.contested.update(one.name for one in kept.values())
    return found


def same_bytes(one: Held, other: Held) -> bool:
    """Whether the same bytes were saved of two live tensors that are one, by their digests, where
    `one` wants them."""
    first, second, spec = one.number, other.number, one.tensor.spec
    if first is None or second is None or spec.shape != other.tensor.spec.shape:
        return False
    a, b = one.of.stored.tensors[first], other.of.stored.tensors[second]
    if spec.box is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return spec.box is None
    here, there = (
        [(piece.offset, piece.digests) for piece in stored.pieces(number, spec.box)]
        for stored, number in ((one.of.stored, first), (other.of.stored, second))
    )
    return here == there


class Fill(NamedTuple):
    """Memory, and the box of a saved tensor that it is to have. key: its component, for messages.
    dtype: of the saved one; that of the memory may be another."""

    key: str
    stored: StoredComponent
    number: int
    dtype: torch.dtype
    box: Box
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What is read, and where to.

    converted: what is read in portions, after the rest, into memory of another dtype. overwritten:
    components whose live tensors are read into. staged: by component, live tensors and the host
    memory that is copied into them after all was read; contested: those of them whose memory others
    have too, by name. cast: full name -> "saved dtype -> live dtype"; mismatched: full name ->
    forms, saved and live, that do not fit.
    """

    fills: list[Fill] = field(default_factory=list)
    converted: list[Fill] = field(default_factory=list)
    overwritten: set[str] = field(default_factory=set)
    staged: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    contested: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    cast: dict[str, str] = field(default_factory=dict)
    mismatched: dict[str, tuple[str, str]] = field(default_factory=dict)


class _Skipped:
    """In the place of a tensor that this rank does not want."""


SKIPPED = _Skipped()
_DICTS = (dict, OrderedDict, Counter)


class Substitution:
    """A decoded state with something else in place of its tensors."""

    stored: StoredComponent
    skipped = 0  # tensors that this rank does not want, so far

    def leaf(self, ref: TensorRef) -> Any:
        """What stands for a tensor."""
        raise NotImplementedError

    def container(self, saved: Opaque) -> Any:
        """What stands for a tensor that is made of others."""
        raise NotImplementedError

    def of(self, state: Any) -> Any:
        """`state` with what stands for its tensors, without what is skipped, and without dicts that
        held nothing else. Raises ValueError and the like where it makes no sense."""
        kind = type(state)
        if kind is TensorRef:
            count = len(self.stored.tensors)
            if not 0 <= state.index < count:
                raise ValueError(f"the tree refers to tensor {state.index} of {count}")
            found = self.leaf(state)
            self.skipped += found is SKIPPED
            return found
        if kind is Opaque:
            before = self.skipped
            made = self.container(state) if state.codec == CODEC else self.of(state.payload)
            # A codec is given all of a value or nothing of it, but for one of dicts.
            if made is SKIPPED or (self.skipped > before and keyed(state) is None):
                return SKIPPED
            return made if state.codec == CODEC else Opaque(state.codec, made)
        if kind in _DICTS and not only_plain(state.values()):
            items = {key: self.of(item) for key, item in state.items()}
            left = {key: item for key, item in items.items() if item is not SKIPPED}
            return kind(left) if left or not items else SKIPPED
        if kind in (list, tuple, set, frozenset) and not only_plain(state):
            return kind([None if (made := self.of(item)) is SKIPPED else made for item in state])
        return state


class How(NamedTuple):
    """How a component is loaded. skip: tensors that this rank does not have belong to others. cast:
    dtypes may differ; in_portions: what is converted is read a portion at a time; host_first: no
    live tensor is read into before all is verified."""

    skip: bool
    cast: bool
    in_portions: bool
    host_first: bool


def state_with_destinations(
    values: Any,
    view: CheckpointView,
    loaded: LoadedComponent,
    shared: SharedMemory,
    plan: ReadPlan,
    how: How,
) -> Any:
    """The decoded `values` of a component with its tensors' destinations in place of them, and
    without what this rank does not want; `plan` has then what is to be read. Raises
    CheckpointCorrupt where they make no sense, StateMismatch."""
    try:
        state = _Destinations(view, loaded, shared, plan, how).of(values)
    except MALFORMED as error:
        file = f"{view.url}: component {loaded.key!r}"
        raise malformed(f"{file}: stored values cannot be read", error, file) from None
    return {} if state is SKIPPED else state


class _Destinations(Substitution):
    """Where the tensors of one component go."""

    def __init__(
        self,
        view: CheckpointView,
        loaded: LoadedComponent,
        shared: SharedMemory,
        plan: ReadPlan,
        how: How,
    ) -> None:
        self.view, self.loaded, self.shared, self.plan = view, loaded, shared, plan
        self.skip, self.cast, self.in_portions, self.host_first = how
        self.key, self.stored, self.owner = loaded.key, loaded.stored, loaded.owner
        self.live = {t.spec.name: t for t in loaded.snapshot.tensors}
        self.lists = dict(_held_names(loaded.state) if loaded.sharded else ())
        self.leaves: dict[int, Any] = {}
        self.arrays: set[int] = set()

    def leaf(self, ref: TensorRef) -> Any:
        """What stands for a saved tensor in the state that is handed over; its bytes are read
        later."""
        if ref.numpy:
            self.arrays.add(ref.index)
        found = self._leaf_of(ref.index)
        return found.numpy() if ref.numpy and isinstance(found, torch.Tensor) else found

    def container(self, saved: Opaque) -> Any:
        """The live tensor that is made of others, whose parts are read into; or its parts, to be
        put together when they were read."""
        payload = saved.payload
        name = self._container_name(payload)
        live = self.loaded.snapshot.containers.get(name)
        wrong = misfit(payload, live)
        plain = self.live.get(name)
        other = live if live is not None or plain is None else plain.live
        if wrong is not None and other is not None and not self._may_replace(name, other):
            self.plan.mismatched[f"{self.key}/{name}"] = wrong
            return other
        parts = self.of(payload)
        return live if wrong is None and is_made_of(live, parts) else Opaque(saved.codec, parts)

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
        made_of_others = self.loaded.snapshot.containers.get(tensor.name)
        if made_of_others is not None and not self._may_replace(tensor.name, made_of_others):
            wrong = misfit(None, made_of_others)
            self.plan.mismatched[f"{self.key}/{tensor.name}"] = wrong or ("", "")
            return made_of_others
        if tensor.alias_of is not None:
            live = self.live.get(tensor.name)
            other = self.live.get(self.stored.tensors[tensor.alias_of].name)
            if live is other or (live is not None and other is not None and _tied(live, other)):
                number = tensor.alias_of
        if number not in self.leaves:
            self.leaves[number] = self._destination(number, self.stored.tensors[number])
        return self.leaves[number]

    def _destination(self, number: int, tensor: LogicalTensor) -> Any:
        dtype = known_dtype(self.view, self.key, tensor)
        if (live := self.live.get(tensor.name)) is None:
            return self._as_saved(number, tensor, dtype, None)
        fits, same_shape = _fits(live, tensor), live.spec.global_shape == tensor.shape
        if self.loaded.order(live) == OTHER:
            # A module's own code may resize; that a dtype changes is for the caller to say.
            checked = isinstance(self.owner, ModelState) and same_shape
            if not fits and checked and not self._castable(tensor, live, dtype):
                return live.live
            return self._as_saved(number, tensor, dtype, live)
        if not fits and self._replaceable(tensor, live) and not (self.cast and same_shape):
            return self._as_saved(number, tensor, dtype, live)
        if not fits and not self._castable(tensor, live, dtype):
            return live.live
        keeper = self.shared.keepers.get((self.key, tensor.name))
        if keeper is not None and not self._is_kept_for(keeper, number):
            if same_bytes(Held(self.loaded, live), keeper):
                return live.live
            return self._two_values(number, tensor, dtype, live, keeper)
        if live.spec.box is not None:
            self._fill_live(number, tensor, dtype, live, fits)
        return live.live

    def _is_kept_for(self, keeper: Held, number: int) -> bool:
        """Whether memory of this component is kept for the saved tensor itself, or for one that was
        not saved."""
        if keeper.of is not self.loaded or (kept := keeper.number) is None:
            return keeper.of is self.loaded
        alias = self.stored.tensors[kept].alias_of
        return number == (kept if alias is None else alias)

    def _two_values(
        self, number: int, tensor: LogicalTensor, dtype: torch.dtype, live: TensorLeaf, keeper: Held
    ) -> Any:
        """One memory cannot hold two values. What is held by name gets memory of its own; a
        module's tensors are refused."""
        by_name = isinstance(self.owner, PlainState) or is_optimizer(self.owner)
        if by_name and not has_other_owner(live.live) and _fits(live, tensor):
            return self._as_saved(number, tensor, dtype, live)
        other = keeper.tensor.spec.name if keeper.of is self.loaded else "/".join(keeper.name)
        forms = ("a value of its own", f"memory that it shares with '{other}'")
        self.plan.mismatched[f"{self.key}/{tensor.name}"] = forms
        return live.live

    def _fill_live(
        self, number: int, tensor: LogicalTensor, dtype: torch.dtype, live: TensorLeaf, fits: bool
    ) -> None:
        """Read into a live tensor, or into host memory first: where all is to be verified before,
        where it shares a part of its memory with another or with itself, and where its memory holds
        other bits than its items say (a conjugated or negated view)."""
        memory, name = live.tensor, (self.key, live.spec.name)
        odd = memory.is_conj() or memory.is_neg() or name in self.shared.contested
        odd = odd or not (memory.is_contiguous() or not overlaps_itself(memory))
        if not (self.host_first or odd) and (fits or self.in_portions):
            self.plan.overwritten.add(self.key)
            self._read_into(number, dtype, memory, live.spec.box)
            return
        staged = torch.empty(live.spec.shape, dtype=dtype, device="cpu")
        self.plan.staged.setdefault(self.key, []).append((memory, staged))
        if name in self.shared.contested:
            self.plan.contested.append((f"{self.key}/{tensor.name}", memory, staged))
        self._read_into(number, dtype, staged, live.spec.box)

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
            self._read_into(number, dtype, shard.tensor, shard.box)
        return leaf

    def _read_into(
        self, number: int, dtype: torch.dtype, memory: torch.Tensor, box: Box | None
    ) -> None:
        if box is not None:
            key = self.stored.of[number] if self.stored.of else self.key
            fills = self.plan.fills if memory.dtype is dtype else self.plan.converted
            fills.append(Fill(key, self.stored, number, dtype, box, memory))

    def _castable(self, tensor: LogicalTensor, live: TensorLeaf, dtype: torch.dtype) -> bool:
        name, now = f"{self.key}/{tensor.name}", live.spec
        same_kind = live.tensor.is_complex() == dtype.is_complex
        if self.cast and now.global_shape == tensor.shape and same_kind:
            self.plan.cast[name] = f"{tensor.dtype} -> {now.dtype}"
            return True
        forms = f"{tensor.dtype} {list(tensor.shape)}", f"{now.dtype} {list(now.global_shape)}"
        self.plan.mismatched[name] = forms
        return False

    def _fresh(
        self, number: int, tensor: LogicalTensor, dtype: torch.dtype, live: TensorLeaf | None
    ) -> Any:
        allocate = getattr(self.owner, "allocate", None)
        made = None if allocate is None else allocate(tensor.name, dtype, tensor.shape)
        if made is not None:
            return made
        if live is None and self.skip and not _has_other(self.lists, tensor.name):
            return SKIPPED
        if volume(tensor.shape) * dtype.itemsize > ALLOCATED_UNSEEN:
            # First that the bytes are there, then memory for them.
            pieces = self.stored.pieces(number, tensor.whole)
            self.view.check_files(piece.file for piece in pieces if piece.file)
        # A module copies what it is handed, from wherever it is.
        here = live is None or number in self.arrays or isinstance(self.owner, ModelState)
        device = torch.device("cpu") if live is None or here else live.tensor.device
        return torch.empty(tensor.shape, dtype=dtype, device=device)


def _tied(live: TensorLeaf, other: TensorLeaf) -> bool:
    view = same_view_key(live.tensor)
    return (view is not None and view == same_view_key(other.tensor)) or live.live is other.live


def _fits(live: TensorLeaf, tensor: LogicalTensor) -> bool:
    return live.spec.global_shape == tensor.shape and live.spec.dtype == tensor.dtype


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
            at_end = length is None or n == len(parts)
            if at_end or (parts[n].isdecimal() and int(parts[n]) >= (length or 0)):
                return True
    return False


# Reading what is planned.


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


def direct_reads(fills: Iterable[Fill]) -> list[TensorRead]:
    """What is read into memory of the saved dtype."""
    return [read for fill in fills for read in _reads_into(fill, fill.box, fill.memory)]


def read_converted(files: StoredFiles, fills: Iterable[Fill], threads: int) -> None:
    """Fill what has another dtype than was saved: as many bytes at a time as may be in memory
    twice."""
    for batch in _batches(fills):
        _read_converted(files, batch, threads)  # its memory is free before the next one begins


def _read_converted(files: StoredFiles, batch: Iterable[tuple[Fill, Box]], threads: int) -> None:
    staged = [torch.empty(shape, dtype=fill.dtype) for fill, (_, shape) in batch]
    reads: list[TensorRead] = []
    for (fill, box), memory in zip(batch, staged, strict=True):
        reads += _reads_into(fill, box, memory)
    files.read(reads, threads)
    for (fill, (offset, shape)), memory in zip(batch, staged, strict=True):
        ranges = zip(offset, fill.box[0], shape, strict=True)
        here = tuple(slice(o - s, o - s + n) for o, s, n in ranges)
        fill.memory.detach()[here].copy_(memory)


def _batches(fills: Iterable[Fill]) -> Iterator[list[tuple[Fill, Box]]]:
    batch: list[tuple[Fill, Box]] = []
    nbytes = 0
    for fill in fills:
        start, held = fill.box
        for slices in portions_of(held, fill.dtype.itemsize, CONVERTED_BYTES):
            shape = tuple(each.stop - each.start for each in slices)
            size = volume(shape) * fill.dtype.itemsize
            if batch and nbytes + size > CONVERTED_BYTES:
                yield batch
                batch, nbytes = [], 0
            offset = tuple(s + each.start for s, each in zip(start, slices, strict=True))
            batch.append((fill, (offset, shape)))
            nbytes += size
    if batch:
        yield batch


def _reads_into(fill: Fill, box: Box, memory: torch.Tensor) -> Iterator[TensorRead]:
    """What is read to have `box` of a saved tensor in `memory`, which is of its dtype."""
    on_host = memory.is_cpu and memory.is_contiguous()
    items: torch.Tensor | None = None
    for piece in fill.stored.pieces(fill.number, box):
        if on_host and piece.local_shape == box[1] and piece.offset in (None, box[0]):
            # By its address: numpy would have it without gradient, conjugation and bfloat16, in
            # eight microseconds a tensor instead of one.
            target = HostMemory(memory.data_ptr(), memory)
            yield TensorRead(fill.key, piece, target)
            continue
        items = words(memory) if items is None else items
        yield read_of(fill.key, piece, box, items, TorchTarget)


class TorchTarget(PartTarget):
    """A part of a tensor, on any device, as integers as wide as its items."""

    def flat(self, data: memoryview) -> torch.Tensor:
        return torch.frombuffer(data, dtype=self.region.dtype)

    def memory_of(self, region: torch.Tensor) -> memoryview | None:
        return TensorBytes(region).view(0, region.numel() * region.element_size())

    def items_of(self, region: torch.Tensor) -> torch.Tensor | None:
        on_device = region.device.type != "cpu" and region.is_contiguous()
        return region.view(-1) if on_device else None

    def pinned_for(self, region: torch.Tensor) -> Any:
        return pinned_memory(region.device)

    def moving(self) -> AbstractContextManager[Any]:
        return torch.inference_mode() if self.region.is_cpu else self._on_stream()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.inference_mode(), own_stream(self.region.device):
            yield
