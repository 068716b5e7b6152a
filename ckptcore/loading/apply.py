"""Loading into live state: everything is checked first, then read into place, then handed over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..errors import CheckpointCorrupt, CheckpointError, LoadFailed, RanksDisagree, StateMismatch
from ..format.codecs import revived
from ..format.digest import content_hash
from ..format.layout import LogicalTensor, WholeLayout, volume
from ..format.manifest import MANIFEST_NAME
from ..format.values import TensorRef, decode
from ..ranks.communicator import Communicator
from ..state.adapters import ModelState, PlainState, is_optimizer, owner_of
from ..state.component import StateComponent
from ..state.layout import (
    LocalShard,
    TensorBytes,
    copy_into,
    local_shard,
    memory_span,
    overlaps_itself,
    same_view_key,
    torch_dtype,
    words,
)
from ..state.names import one_walk
from ..state.plain import only_own, owned_elsewhere
from ..state.streams import own_stream, pinned_memory, synchronize
from ..state.tree import StateSnapshot, TensorLeaf, capture, differences, with_versions
from .broadcast import read_shared
from .keys import Part, Selection, parts
from .partial import SKIPPED, has_other, held_names, pruned
from .place import Place, copy_for
from .plan import Words, read_of
from .reader import TensorRead, read_tensors
from .report import PARTLY_OVERWRITTEN, LoadReport
from .sharing import MODULE, OPTIMIZER, OTHER, PLAIN, SLICE, Held, SharedMemory, shared_memory
from .undo import Snapshot
from .view import CheckpointView, StoredComponent

__all__ = ["LoadReport", "Loading"]

ALLOCATED_UNSEEN = 16 << 20  # larger tensors are allocated only after a look at their files


@dataclass(slots=True)
class _Entry:
    """One component that is loaded: what was saved, what there is now, and what is handed over in
    the end."""

    part: Part
    owner: Any  # who decides, also where only a part of its state is loaded
    state: Any
    live: StateSnapshot
    held: list[Held] = field(default_factory=list)
    prepared: Any = None
    versions: dict[str, Any] | None = None
    staged: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    in_place: bool = False

    @property
    def key(self) -> str:
        return self.part.component.key

    @property
    def component(self) -> StateComponent:
        return self.part.component

    @property
    def stored(self) -> StoredComponent:
        return self.part.stored

    @property
    def stateful(self) -> Any:
        return self.part.component.stateful


class Loading:
    """One load on one rank, in the three steps between which the ranks agree: check, read, apply.

    transactional: all or nothing, also where a component refuses its state; host_first: read all
    into host memory before anything live is touched, which `transactional` implies.
    """

    def __init__(
        self,
        view: CheckpointView,
        components: Sequence[StateComponent],
        comm: Communicator,
        partitions: Mapping[str, list[list[int]]],
        io_threads: int,
        *,
        strict: bool,
        cast: bool,
        transactional: bool,
        host_first: bool = False,
        step: int | None = None,
        keys: Selection | None = None,
        whole: bool = False,
    ) -> None:
        manifest = view.manifest
        self.view, self.components, self.comm, self.io_threads = view, components, comm, io_threads
        self.strict, self.cast, self.transactional, self.step = strict, cast, transactional, step
        self.keys, self.whole = keys, whole
        self.host_first = host_first or transactional
        self.report = LoadReport(step=manifest.step, path=view.url, manifest=manifest)
        self.place = Place(comm.rank, comm.world_size, comm.nodes, partitions)
        self.entries: dict[str, _Entry] = {}
        self.shared = SharedMemory()
        # What is to be read, and where to.
        self.reads: list[TensorRead] = []
        self.devices: set[torch.device] = set()
        self.contested: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        # How far `apply` came.
        self.begun: list[str] = []
        self.before: dict[str, Snapshot] = {}
        # What does not fit.
        self.mismatched: dict[str, tuple[str, str]] = {}
        self.unmatched: list[str] = []
        self.regrouped: list[StateMismatch] = []
        self.elsewhere: dict[str, list[str]] = {}
        self.tolerated: dict[str, set[str]] = {}
        self.on_no_rank_at_all: dict[str, set[str]] = {}
        self.nothing_here: set[str] = set()

    def read_once(self) -> None:
        """Read what all ranks need on one of them each, and pass it on. Raises what `read`
        raises."""
        with self._touching():
            self.reads = read_shared(
                self.comm, self.view.storage, self.view.folder, self.reads, self.io_threads
            )

    @one_walk()
    def check(self) -> dict[str, Any]:
        """Match saved and live state, and check the files that are needed. Live state is untouched.

        Returns, for sharded components, hashes of the saved names that this rank does not have:
        `judge` wants those that no rank has; and what `keys` asked for. Raises StateMismatch,
        CheckpointCorrupt, StorageError.
        """
        if self.step not in (None, self.view.manifest.step):
            raise CheckpointCorrupt(
                f"{self.view.url} is of step {self.view.manifest.step}, and step {self.step} was "
                "found there before: it was "
                "replaced meanwhile",
                path=self.view.url,
                file=MANIFEST_NAME,
                kind="format",
                expected=self.step,
                actual=self.view.manifest.step,
            )
        for part in self._parts():
            self.entries[part.component.key] = self._entry(part)
        self.shared = shared_memory(held for entry in self.entries.values() for held in entry.held)
        for entry in self.entries.values():
            self._prepare(entry)
        hashes = {key: [_hash(name) for name in names] for key, names in self.elsewhere.items()}
        return {"elsewhere": hashes, "keys": None if self.keys is None else self.keys.answer}

    def _parts(self) -> Iterator[Part]:
        """What is to be loaded: all that both sides have, or what `keys` ask for."""
        saved = self.view.manifest.components
        given = {c.key for c in self.components}
        others = [key for key in saved if key not in given]
        if self.keys is not None:
            self.report.unexpected = [
                key for key in others if self.whole and self.keys.asks_for(key)
            ]
            yield from parts(self.keys, self.view, self.components, self.place, self.report.missing)
            return
        self.report.missing = [c.key for c in self.components if c.key not in saved and c.required]
        self.report.unexpected = others
        for component in self.components:
            copy = (
                copy_for(self.view.manifest, component, self.place)
                if component.key in saved
                else None
            )
            if copy is not None:
                sharded = component.sharded or saved[component.key].pattern == "SHARDED"
                yield Part(component, self.view.component(component.key, copy), sharded)

    def compared(self, found: list[dict[str, Any]]) -> dict[str, list[bytes]]:
        """On rank 0: of the names that ranks lack, those that all of them lack. Raises
        RanksDisagree where `keys` are not the same everywhere, StateMismatch where they ask for
        nothing."""
        if self.keys is not None:
            self._compare_keys([f["keys"] for f in found])
        first, *others = [f["elsewhere"] for f in found]
        lacking = [{key: set(names) for key, names in other.items()} for other in others]
        return {
            key: [h for h in names if all(h in other.get(key, ()) for other in lacking)]
            for key, names in first.items()
        }

    def _compare_keys(self, found: list[dict[str, Any]]) -> None:
        for key, (names, chosen) in found[0]["digests"].items():
            for rank, other in enumerate(found):
                # Ranks may have other names, of one stage of a pipeline, say.
                if (
                    (theirs := other["digests"].get(key))
                    and theirs[0] == names
                    and theirs[1] != chosen
                ):
                    raise RanksDisagree(
                        f"keys ask for other names of component {key!r} on rank {rank} than on "
                        "rank 0",
                        ranks=[rank],
                    )
        unused = [p for p in found[0]["unused"] if all(p in other["unused"] for other in found)]
        nothing = not any(other["chosen"] for other in found)
        if nothing or (unused and self.strict):
            which = ", ".join(map(repr, unused)) or "the function given as keys"
            live = [f"{c.key}/..." for c in self.components]
            raise StateMismatch(
                f"{self.view.url}: {which} asks for nothing that the live state has; names there: "
                f"{_some(live)}",
                path=self.view.url,
                missing=unused,
                unexpected=[],
                mismatched={},
            )

    def _entry(self, part: Part) -> _Entry:
        component = part.component
        state = component.stateful.state_dict()
        seen, owner = state, owner_of(component.stateful)
        if isinstance(owner, ModelState):
            # What its own loading makes of parameters that have no shape yet is its to say.
            seen = {
                n: v for n, v in state.items() if not (isinstance(v, torch.Tensor) and is_lazy(v))
            }
        live = capture(component.key, seen, sharded=True, live_only=True)
        return _Entry(part, owner, state, live, list(_held(component.key, owner, live)))

    def _prepare(self, entry: _Entry) -> None:
        """The saved state with destinations in place of the tensors, none of them read yet."""
        part, component, stored, state = entry.part, entry.component, entry.stored, entry.state
        owner = entry.owner
        # On one rank nothing belongs to others, and who has no names yet is handed all of it.
        named = isinstance(owner, ModelState) or is_optimizer(owner) or bool(entry.live.tensors)
        skip = part.sharded and (self.comm.world_size > 1 or named)
        found = _Component(self, entry, dict(held_names(state) if part.sharded else ()), skip=skip)
        file = f"{self.view.url}: component {component.key!r}"
        entry.versions = _versions(stored, file)
        values = decode(stored.tree, opaque=True, file=file)
        if isinstance(owner, torch.amp.GradScaler) and not values and state:
            self.regrouped.append(
                StateMismatch(
                    f"{file}: the scaler was saved with nothing in it (enabled=False), and the "
                    "live one is on; load without it, and "
                    "save the next checkpoint with it",
                    path=self.view.url,
                )
            )
        compare = getattr(entry.stateful, "differences", None)
        if isinstance(owner, PlainState):
            owner.strict = self.strict
            compare = (
                partial(owner.differences, sharded=skip) if owner is entry.stateful else compare
            )
        if compare is None and skip:
            compare = partial(differences, live=state)
        if compare is not None:
            # Names and values first, so that nothing is allocated for a state that does not fit.
            self._compare(component, compare, values, skip)
        if skip:
            self.elsewhere.setdefault(component.key, []).extend(part.unexpected)
        else:
            self.report.unexpected += [f"{component.key}/{name}" for name in part.unexpected]
        left = pruned(decode(stored.tree, found.leaf, opaque=True, file=file))
        entry.prepared = {} if left is SKIPPED else left

    def _compare(self, component: StateComponent, compare: Any, saved: Any, sharded: bool) -> None:
        try:
            found = compare(saved)
        except StateMismatch as error:
            error.message = f"{self.view.url}: component {component.key!r}: {error.message}"
            self.regrouped.append(error)
            return
        self.report.missing += [f"{component.key}/{name}" for name in found.missing]
        self.mismatched |= {
            f"{component.key}/{name}": forms for name, forms in found.mismatched.items()
        }
        if sharded:
            self.elsewhere[component.key] = [*found.unexpected, *found.tolerated]
            self.tolerated[component.key] = set(found.tolerated)
            self.nothing_here |= (
                {component.key}
                if not found.matched and (found.missing or found.unexpected)
                else set()
            )
            return
        names = [*found.unexpected, *(() if self.strict else found.tolerated)]
        self.report.unexpected += [f"{component.key}/{name}" for name in names]
        if not found.matched and (found.missing or found.unexpected):
            self.unmatched.append(component.key)

    def judge(self, on_no_rank: dict[str, list[bytes]]) -> None:
        """Raise StateMismatch for what must not be loaded; check the files that are to be read.
        Live state is untouched."""
        for key, names in self.elsewhere.items():
            unknown = set(on_no_rank.get(key, ()))
            found = [n for n in names if _hash(n) in unknown]
            self.on_no_rank_at_all[key] = set(found)
            tolerated = self.tolerated.get(key, ())
            self.report.unexpected += [f"{key}/{name}" for name in found if name not in tolerated]
            if key in self.nothing_here and len(found) == len(names):
                self.unmatched.append(key)  # no rank has any of the names
        self._judge_names()
        self.view.check_small_files()
        self.view.check_files(read.entry.file for read in self.reads if read.entry.file)

    def _judge_names(self) -> None:
        """Of what does not fit, the worst."""
        where, report = self.view.url, self.report
        # A load is of the components that were given; a restore is of all that was saved.
        parts = self.view.manifest.components
        unexpected = [
            n for n in report.unexpected if "/" in n or (self.whole and parts[n].required)
        ]
        facts = {
            "path": where,
            "missing": report.missing,
            "unexpected": unexpected,
            "mismatched": self.mismatched,
        }
        if self.regrouped:
            raise self.regrouped[0]
        matched_any = any(c.key in self.view.manifest.components for c in self.components)
        renamed = {} if self.keys is None else self.keys.renamed
        missing = [renamed.get(name, name) for name in report.missing]
        if self.keys is not None:
            if report.missing and not self.entries:
                lacking = _some(missing)
                raise StateMismatch(
                    f"{where}: nothing that keys ask for is in the checkpoint, not {lacking}",
                    **facts,
                )
            matched_any = True
        if not matched_any or self.unmatched:
            what = f"component {self.unmatched[0]!r}" if self.unmatched else "the state"
            raise StateMismatch(
                f"{where}: nothing in {what} has a name that the checkpoint has; live: "
                f"{_some(report.missing)}; "
                f"saved: {_some(report.unexpected)}",
                **facts,
            )
        if self.mismatched:
            name, (saved, live) = next(iter(self.mismatched.items()))
            more = f" and {len(self.mismatched) - 1} more" if len(self.mismatched) > 1 else ""
            same_shape = "[" in saved and saved.split("[")[1:] == live.split("[")[1:]
            hint = "; cast=True converts dtypes" if same_shape else ""
            raise StateMismatch(
                f"{where}: {name!r} was saved as {saved}, the live state has {live}{more}{hint}",
                **facts,
            )
        if self.strict and (report.missing or unexpected):
            raise StateMismatch(
                f"{where} and the live state have different keys: missing in the checkpoint: "
                f"{_some(missing)}; "
                f"unexpected in the checkpoint: {_some(unexpected)}; strict=False loads the rest",
                **facts,
            )

    def read(self) -> None:
        """Read every byte into its place, verified. Raises CheckpointCorrupt, StorageError."""
        synchronize(self.devices)
        with self._touching():
            read_tensors(self.view.storage, self.view.folder, self.reads, self.io_threads)

    @contextmanager
    def _touching(self) -> Iterator[None]:
        """What fails in it says that live tensors were read into, where they were."""
        try:
            yield
        except CheckpointError as error:
            if any(entry.in_place for entry in self.entries.values()):
                error.message += PARTLY_OVERWRITTEN
            raise

    @one_walk()
    def apply(self) -> None:
        """Hand the complete states over, random streams last. Raises LoadFailed where a component
        refuses its own."""
        order = sorted(
            self.entries.values(), key=lambda e: bool(getattr(e.stateful, "restore_last", False))
        )
        if self.transactional:
            self.before = {e.key: Snapshot(e.component, e.state, e.live) for e in order}
        seen: dict[int, tuple[Any, Any]] = {}
        for entry in order:
            self.begun.append(entry.key)
            try:
                for live, staged in entry.staged:
                    copy_into(live, staged)
                self._hand_over(entry, seen)
            except Exception as error:
                raise self._failed(entry, error) from error
        self._check_shared()

    def _hand_over(self, entry: _Entry, seen: dict[int, tuple[Any, Any]]) -> None:
        owner = entry.owner
        state = revived(entry.prepared, f"{self.view.url}: component {entry.key!r}")
        if isinstance(owner, PlainState):
            if owner is not entry.stateful:
                entry.stateful.load_state_dict(state)
            else:
                if entry.key in self.elsewhere:
                    nowhere = self.on_no_rank_at_all.get(entry.key, set())
                    state = only_own(state, owner.value, nowhere.__contains__)
                owner.put_back(state, seen)
            self.report.values.keep(entry.key, owner.loaded)
            return
        if isinstance(owner, ModelState):
            owner.strict = self.strict and owner is entry.stateful
            if entry.versions is not None and isinstance(state, dict):
                state = OrderedDict(state)
                state._metadata = entry.versions.get("", {})  # type: ignore[attr-defined]
        elif entry.versions:
            state = with_versions(state, entry.versions)
        entry.stateful.load_state_dict(state)

    def _failed(self, entry: _Entry, error: Exception) -> CheckpointError:
        """What to raise where a component refused its state: with its name, and what that
        leaves."""
        said = (
            f"{type(error).__name__}: {error}"
            if not isinstance(error, CheckpointError)
            else error.message
        )
        where = (
            f"{self.view.url}: component {entry.key!r} on rank {self.comm.rank} could not be loaded"
        )
        touched = [e.key for e in self.entries.values() if e.in_place or e.key in self.begun]
        left = [key for key in self.entries if key not in touched]
        after = (
            ""
            if self.transactional
            else (
                f"; overwritten by now, {entry.key!r} perhaps in part: {_some(touched)}; as "
                f"before: {_some(left)}; do not train on "
                "it (transactional=True puts everything back)"
            )
        )
        facts = {
            "path": self.view.url,
            "component": entry.key,
            "rank": self.comm.rank,
            "overwritten": touched,
        }
        if isinstance(error, CheckpointError) and not isinstance(error, StateMismatch):
            error.message += after
            return error
        if isinstance(error, StateMismatch):
            facts |= {
                "missing": error.missing,
                "unexpected": error.unexpected,
                "mismatched": error.mismatched,
            }
        return LoadFailed(f"{where}: {said}{after}", **facts)

    def _check_shared(self) -> None:
        """Raise LoadFailed where memory that several tensors have in common does not hold what was
        saved of each."""
        wrong = [
            name
            for name, live, staged in self.contested
            if not torch.equal(words(live).cpu(), words(staged.to(live.dtype)))
        ]
        also = ""
        for one, keeper in () if wrong else self.shared.others:
            entry = self.entries[one.component]
            now = {
                t.name: t
                for t in capture(entry.key, entry.stateful.state_dict(), sharded=True).tensors
            }.get(one.tensor.name)
            span, kept = (
                memory_span(keeper.tensor.tensor),
                memory_span(now.tensor) if now is not None else None,
            )
            overlap = span is not None and kept is not None and span[0] == kept[0]
            if (
                overlap
                and span[1] < kept[2]  # type: ignore[index]
                and kept[1] < span[2]  # type: ignore[index]
                and not self._one_value(one, keeper)
            ):
                wrong = wrong or [f"{one.component}/{one.tensor.name}"]
                also = also or f" with '{keeper.component}/{keeper.tensor.name}'"
        if wrong:
            raise LoadFailed(
                f"{self.view.url}: {wrong[0]!r} shares memory{also} in the live state, and other "
                "bytes were saved of it: one "
                "memory cannot hold two values; make it a copy of its own before the load"
                + ("" if self.transactional else PARTLY_OVERWRITTEN),
                path=self.view.url,
                component=wrong[0].split("/")[0],
                rank=self.comm.rank,
                overwritten=list(self.entries),
            )

    def _one_value(self, one: Held, other: Held) -> bool:
        """Whether the same bytes were saved of two live tensors that are one."""
        numbers = []
        for held in (one, other):
            named = {t.name: n for n, t in enumerate(self.entries[held.component].stored.tensors)}
            numbers.append(named.get(held.tensor.name))
        first, second = numbers
        if first is None or second is None or one.tensor.shape != other.tensor.shape:
            return False
        return _same_bytes(
            self.entries[one.component].stored,
            first,
            self.entries[other.component].stored,
            second,
            one.tensor,
        )

    def put_back(self, error: BaseException) -> None:
        """Undo what `apply` did on this rank, and say so in `error`."""
        failed = []
        for key in reversed(self.begun):
            try:
                self.before[key].restore()
            except BaseException as reason:  # a second interrupt must not leave the rest as it is
                failed.append(f"{key!r} ({type(reason).__name__}: {reason})")
        text = "; live state is as it was before the load"
        if failed:
            text = (
                "; the others were put back as they were, and these could not be: "
                f"{', '.join(failed)}; do not train on it"
            )
        if isinstance(error, CheckpointError):
            error.message += text
        else:
            error.add_note(text[2:])

    def free_for_reading(self, place: tuple[str, str], tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory may be read into: not shared in part with another's, or with
        itself."""
        # The memory of a conjugated or negated view holds other bits than its items say.
        odd = tensor.is_conj() or tensor.is_neg() or overlaps_itself(tensor)
        return not (self.host_first or odd or place in self.shared.contested)


def _held(key: str, owner: Any, live: StateSnapshot) -> Iterator[Held]:
    """The live tensors of a component, and who of several owners would keep their memory."""
    by_name = is_optimizer(owner)
    for t in live.tensors:
        order = OTHER
        if isinstance(owner, ModelState):
            order = OTHER if owner.decides(t.spec.name) and t.spec.layout is None else MODULE
        elif by_name:
            order = OPTIMIZER
        elif isinstance(owner, PlainState):
            order = PLAIN
        elif t.spec.layout is not None:
            order = SLICE
        yield Held(key, order, t)


def _versions(stored: StoredComponent, file: str) -> dict[str, Any] | None:
    """Versions of modules by path and name. Raises CheckpointCorrupt."""
    if stored.versions is None:
        return None
    found = decode(stored.versions, file=file)
    tables = found.values() if isinstance(found, dict) else [None]
    if not all(
        isinstance(table, dict) and all(isinstance(facts, dict) for facts in table.values())
        for table in tables
    ):
        raise CheckpointCorrupt(
            f"{file}: the versions of its modules are not a table", kind="format"
        )
    return dict(found)


def _same_bytes(
    a: StoredComponent, first: int, b: StoredComponent, second: int, live: TensorLeaf
) -> bool:
    """Whether two saved tensors are equal where `live` wants them, by their digests."""
    box = live.spec.box
    one, other = a.tensors[first], b.tensors[second]
    if box is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return box is None
    pieces = [
        [(p.offset, p.digests) for p in stored.pieces(n, box)]
        for stored, n in ((a, first), (b, second))
    ]
    return pieces[0] == pieces[1]


class _Component:
    """Destinations of one component's tensors. skip: tensors that this rank does not have belong to
    others."""

    def __init__(
        self,
        loading: Loading,
        entry: _Entry,
        held: dict[tuple[str, ...], int | None],
        *,
        skip: bool,
    ) -> None:
        self.loading, self.entry, self.skip = loading, entry, skip
        self.component, self.stored, self.owner = entry.component, entry.stored, entry.owner
        self.live = {t.spec.name: t for t in entry.live.tensors}
        self.live_list = entry.live.tensors
        self.held = held
        self.numbers = {tensor.name: number for number, tensor in enumerate(entry.stored.tensors)}
        self.order = {one.tensor.name: one.order for one in entry.held}
        self.leaves: dict[int, Any] = {}
        self.arrays: set[int] = set()

    def leaf(self, ref: TensorRef) -> Any:
        """What stands for a saved tensor in the state that is handed over; its bytes are read
        later."""
        if not 0 <= ref.index < len(self.stored.tensors):
            raise ValueError(f"the tree refers to tensor {ref.index} of {len(self.stored.tensors)}")
        if ref.numpy:
            self.arrays.add(ref.index)
        found = self.leaf_of(ref.index)
        return found.numpy() if ref.numpy and isinstance(found, torch.Tensor) else found

    def leaf_of(self, number: int) -> Any:
        tensor = self.stored.tensors[number]
        live = self.live.get(tensor.name)
        if tensor.alias_of is not None:
            first = self.stored.tensors[tensor.alias_of]
            other = self.live.get(first.name)
            if live is None and other is None:
                return self.once(tensor.alias_of)
            if live is not None and other is not None and self.tied(live, other):
                return self.once(tensor.alias_of)
        if (
            live is not None
            and live.spec.alias_of is not None
            and self.order[live.spec.name] != OTHER
        ):
            other = self.live_list[live.spec.alias_of]
            number_of_other = self.numbers.get(other.name)
            if number_of_other is not None and self.tied(live, other):
                if _same_bytes(self.stored, number, self.stored, number_of_other, live):
                    self.once(number_of_other)
                    return live.live
                return self.two_values(number, tensor, live, repr(other.name))
        return self.once(number)

    def two_values(self, number: int, tensor: LogicalTensor, live: TensorLeaf, other: str) -> Any:
        """One memory cannot hold two values. What is held by name gets memory of its own; a
        module's tensors are refused."""
        dtype = torch_dtype(tensor.dtype)
        free = (
            isinstance(self.owner, PlainState) or is_optimizer(self.owner)
        ) and not owned_elsewhere(live.live)
        if free and dtype is not None and self.fitting(live, tensor):
            return self.as_saved(number, tensor, dtype, live)
        forms = ("a value of its own", f"memory that it shares with {other}")
        self.loading.mismatched[f"{self.component.key}/{tensor.name}"] = forms
        return live.live

    def tied(self, live: TensorLeaf, other: TensorLeaf) -> bool:
        view = same_view_key(live.tensor)
        return (view is not None and view == same_view_key(other.tensor)) or live.live is other.live

    def once(self, number: int) -> Any:
        if number not in self.leaves:
            self.leaves[number] = self.destination(number, self.stored.tensors[number])
        return self.leaves[number]

    def fitting(self, live: TensorLeaf, tensor: LogicalTensor) -> bool:
        return live.spec.global_shape == tensor.shape and live.spec.dtype == tensor.dtype

    def destination(self, number: int, tensor: LogicalTensor) -> Any:
        name = f"{self.component.key}/{tensor.name}"
        dtype = torch_dtype(tensor.dtype)
        if dtype is None:
            raise CheckpointCorrupt(
                f"{self.loading.view.url}: tensor {name!r} has dtype {tensor.dtype}, which this "
                "torch lacks",
                tensor=name,
                kind="format",
            )
        if (live := self.live.get(tensor.name)) is None:
            return self.as_saved(number, tensor, dtype, None)
        fits = self.fitting(live, tensor)
        if self.order[tensor.name] == OTHER:
            # A module's own code may resize; that a dtype changes is for the caller to say.
            checked = isinstance(self.owner, ModelState) and live.spec.global_shape == tensor.shape
            if not fits and checked and not self.castable(name, tensor, live, dtype):
                return live.live
            return self.as_saved(number, tensor, dtype, live)
        if (
            not fits
            and self.replaceable(tensor, live)
            and not (self.loading.cast and live.spec.global_shape == tensor.shape)
        ):
            return self.as_saved(number, tensor, dtype, live)
        if not fits and not self.castable(name, tensor, live, dtype):
            return live.live
        place = self.component.key, tensor.name
        keeper = self.loading.shared.keepers.get(place)
        if keeper is not None:
            one = Held(*place[:1], self.order[tensor.name], live)
            if not self.loading._one_value(one, keeper):
                return self.two_values(
                    number, tensor, live, f"'{keeper.component}/{keeper.tensor.name}'"
                )
            return live.live
        if fits and self.loading.free_for_reading(place, live.tensor):
            self.entry.in_place = True
            self.read_into(number, tensor, live.part)
        else:
            staged = torch.empty(live.shape, dtype=dtype, device="cpu")
            self.entry.staged.append((live.tensor, staged))
            if place in self.loading.shared.contested:
                self.loading.contested.append((name, live.tensor, staged))
            self.read_into(
                number, tensor, LocalShard(staged, tensor.shape, live.spec.box, live.spec.layout)
            )
        return live.live

    def replaceable(self, tensor: LogicalTensor, live: TensorLeaf) -> bool:
        """Whether a plain tensor of another shape or dtype may take the place of the live one in
        the dict or list around
        it: one that nothing else is known to use."""
        whole = tensor.layout is None or isinstance(tensor.layout, WholeLayout)
        return isinstance(self.owner, PlainState) and whole and self.owner.may_replace(live.live)

    def as_saved(
        self, number: int, tensor: LogicalTensor, dtype: torch.dtype, live: TensorLeaf | None
    ) -> Any:
        """Fresh memory in the shape and dtype that were saved, on the device of the live tensor if
        there is one."""
        leaf = self.fresh(number, tensor, dtype, live)
        if leaf is not SKIPPED:
            self.read_into(number, tensor, local_shard(leaf))
        return leaf

    def read_into(self, number: int, tensor: LogicalTensor, part: LocalShard) -> None:
        if part.box is None:
            return
        words = torch_words(part.tensor)
        self.loading.devices.add(part.tensor.device)
        for piece in self.stored.pieces(number, part.box):
            key = self.stored.of[number] if self.stored.of else self.component.key
            self.loading.reads.append(read_of(key, piece, part.box, words))

    def castable(
        self, name: str, tensor: LogicalTensor, live: TensorLeaf, dtype: torch.dtype
    ) -> bool:
        same_kind = live.tensor.is_complex() == dtype.is_complex
        if self.loading.cast and live.spec.global_shape == tensor.shape and same_kind:
            self.loading.report.cast[name] = f"{tensor.dtype} -> {live.dtype}"
            return True
        saved, held = (
            f"{tensor.dtype} {list(tensor.shape)}",
            f"{live.dtype} {list(live.spec.global_shape)}",
        )
        self.loading.mismatched[name] = (saved, held)
        return False

    def fresh(
        self, number: int, tensor: LogicalTensor, dtype: torch.dtype, live: TensorLeaf | None
    ) -> Any:
        allocate = getattr(self.owner, "allocate", None)
        if allocate is not None:
            made = allocate(tensor.name, dtype, tensor.shape)
            if made is not None:
                return made
        if live is None and self.skip and not has_other(self.held, tensor.name):
            return SKIPPED
        if volume(tensor.shape) * dtype.itemsize > ALLOCATED_UNSEEN:
            # First that the bytes are there, then memory for them.
            whole = (0,) * len(tensor.shape), tensor.shape
            self.loading.view.check_files(
                piece.file for piece in self.stored.pieces(number, whole) if piece.file
            )
        # A module copies what it is handed, from wherever it is.
        here = live is None or number in self.arrays or isinstance(self.owner, ModelState)
        device = torch.device("cpu") if live is None or here else live.tensor.device
        return torch.empty(tensor.shape, dtype=dtype, device=device)


def _hash(name: str) -> bytes:
    return content_hash(name.encode("utf-8", "surrogatepass"))


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


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:5])
    return (shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")) or "nothing"
