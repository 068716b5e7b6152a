"""Loading into live state: everything is checked first, then read into place, then handed over."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..errors import CheckpointCorrupt, CheckpointError, RanksDisagree, StateMismatch
from ..format.codecs import revived
from ..format.digest import content_hash
from ..format.layout import LogicalTensor, volume
from ..format.manifest import MANIFEST_NAME
from ..format.values import TensorRef, decode
from ..ranks.communicator import Communicator
from ..state.adapters import PlainState
from ..state.component import StateComponent
from ..state.layout import (
    LocalPart,
    TensorBytes,
    copy_into,
    local_part,
    memory_span,
    overlaps_itself,
    same_view_key,
    torch_dtype,
    words,
)
from ..state.names import one_walk
from ..state.streams import own_stream, pinned_memory, settle
from ..state.tree import CapturedTensor, capture, differences
from .broadcast import read_shared
from .keys import Part, Selection, parts
from .partial import SKIPPED, has_other, held_names, pruned
from .place import Place, copy_for
from .plan import Words, read_of
from .reader import TensorRead, read_tensors
from .report import PARTLY_OVERWRITTEN, LoadReport
from .view import CheckpointView, StoredComponent

__all__ = ["LoadReport", "Loading"]

ALLOCATED_UNSEEN = 16 << 20  # larger tensors are allocated only after a look at their files


class Loading:
    """One load on one rank, in the three steps between which the ranks agree: check, read, apply."""

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
        step: int | None = None,
        keys: Selection | None = None,
        whole: bool = False,
    ) -> None:
        manifest = view.manifest
        self.view, self.components, self.comm, self.io_threads = view, components, comm, io_threads
        self.strict, self.cast, self.transactional, self.step = strict, cast, transactional, step
        self.keys, self.whole = keys, whole
        self.report = LoadReport(step=manifest.step, path=view.url, manifest=manifest)
        self.place = Place(comm.rank, comm.world_size, comm.nodes, partitions)
        self.prepared: list[tuple[StateComponent, Any]] = []
        # What is to be read, where to, and what is then copied into live tensors.
        self.reads: list[TensorRead] = []
        self.devices: set[torch.device] = set()
        self.staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.in_place = False
        self.spans: dict[str, list[tuple[int, int]]] = {}
        # What does not fit.
        self.mismatched: dict[str, tuple[str, str]] = {}
        self.unmatched: list[str] = []
        self.regrouped: list[StateMismatch] = []
        self.elsewhere: dict[str, list[str]] = {}
        self.nothing_here: set[str] = set()

    def read_once(self) -> None:
        """Read what all ranks need on one of them each, and pass it on. Raises what `read` raises."""
        with self._touching():
            self.reads = read_shared(self.comm, self.view.storage, self.view.folder, self.reads, self.io_threads)

    @one_walk()
    def check(self) -> dict[str, Any]:
        """Match saved and live state, and check the files that are needed. Live state is untouched.

        Returns, for sharded components, hashes of the saved names that this rank does not have: `judge` wants those
        that no rank has; and what `keys` asked for. Raises StateMismatch, CheckpointCorrupt, StorageError.
        """
        if self.step not in (None, self.view.manifest.step):
            raise CheckpointCorrupt(
                f"{self.view.url} is of step {self.view.manifest.step}, and step {self.step} was found there before: it was "
                "replaced meanwhile", path=self.view.url, file=MANIFEST_NAME, kind="format",
                expected=self.step, actual=self.view.manifest.step)  # fmt: skip
        for part in self._parts():
            self.prepared.append((part.component, self._prepare(part)))
        hashes = {key: [_hash(name) for name in names] for key, names in self.elsewhere.items()}
        return {"elsewhere": hashes, "keys": None if self.keys is None else self.keys.answer}

    def _parts(self) -> Iterator[Part]:
        """What is to be loaded: all that both sides have, or what `keys` ask for."""
        saved = self.view.manifest.components
        given = {c.key for c in self.components}
        others = [key for key in saved if key not in given]
        if self.keys is not None:
            self.report.unexpected = [key for key in others if self.whole and self.keys.asks_for(key)]
            yield from parts(self.keys, self.view, self.components, self.place, self.report.missing)
            return
        self.report.missing = [c.key for c in self.components if c.key not in saved and c.required]
        self.report.unexpected = others
        for component in self.components:
            copy = copy_for(self.view.manifest, component, self.place) if component.key in saved else None
            if copy is not None:
                sharded = component.sharded or saved[component.key].pattern == "SHARDED"
                yield Part(component, self.view.component(component.key, copy), sharded)

    def compared(self, found: list[dict[str, Any]]) -> dict[str, list[bytes]]:
        """On rank 0: of the names that ranks lack, those that all of them lack. Raises RanksDisagree where `keys` are
        not the same everywhere, StateMismatch where they ask for nothing."""
        if self.keys is not None:
            self._compare_keys([f["keys"] for f in found])
        first, *others = [f["elsewhere"] for f in found]
        lacking = [{key: set(names) for key, names in other.items()} for other in others]
        return {
            key: [h for h in names if all(h in other.get(key, ()) for other in lacking)] for key, names in first.items()
        }

    def _compare_keys(self, found: list[dict[str, Any]]) -> None:
        for key, (names, chosen) in found[0]["digests"].items():
            for rank, other in enumerate(found):
                # Ranks may have other names, of one stage of a pipeline, say.
                if (theirs := other["digests"].get(key)) and theirs[0] == names and theirs[1] != chosen:
                    raise RanksDisagree(
                        f"keys ask for other names of component {key!r} on rank {rank} than on rank 0", ranks=[rank]
                    )
        unused = [p for p in found[0]["unused"] if all(p in other["unused"] for other in found)]
        nothing = not any(other["chosen"] for other in found)
        if nothing or (unused and self.strict):
            which = ", ".join(map(repr, unused)) or "the function given as keys"
            live = [f"{c.key}/..." for c in self.components]
            raise StateMismatch(
                f"{self.view.url}: {which} asks for nothing that the live state has; names there: {_some(live)}",
                path=self.view.url,
                missing=unused,
                unexpected=[],
                mismatched={},
            )

    def _prepare(self, part: Part) -> Any:
        """The saved state with destinations in place of the tensors, none of them read yet."""
        component, stored, sharded = part.component, part.stored, part.sharded
        state = component.stateful.state_dict()
        live = {t.name: t for t in capture(component.key, state, sharded=True, live_only=True).tensors}
        found = _Component(self, component, stored, live, dict(held_names(state) if sharded else ()), skip=sharded)
        file = f"{self.view.url}: component {component.key!r}"
        compare = getattr(component.stateful, "differences", None)
        if compare is None and sharded:
            compare = partial(differences, live=state)
        if compare is not None:
            # Names and values first, so that nothing is allocated for a state that does not fit.
            self._compare(component, compare, decode(stored.tree, opaque=True, file=file), sharded)
        if sharded:
            self.elsewhere.setdefault(component.key, []).extend(part.unexpected)
        else:
            self.report.unexpected += [f"{component.key}/{name}" for name in part.unexpected]
        left = pruned(decode(stored.tree, found.leaf, opaque=True, file=file))
        return {} if left is SKIPPED else left

    def _compare(self, component: StateComponent, compare: Any, saved: Any, sharded: bool) -> None:
        try:
            found = compare(saved)
        except StateMismatch as error:
            error.message = f"{self.view.url}: component {component.key!r}: {error.message}"
            self.regrouped.append(error)
            return
        self.report.missing += [f"{component.key}/{name}" for name in found.missing]
        self.mismatched |= {f"{component.key}/{name}": forms for name, forms in found.mismatched.items()}
        if sharded:
            self.elsewhere[component.key] = found.unexpected
            self.nothing_here |= {component.key} if not found.matched and (found.missing or found.unexpected) else set()
            return
        self.report.unexpected += [f"{component.key}/{name}" for name in found.unexpected]
        if not found.matched and (found.missing or found.unexpected):
            self.unmatched.append(component.key)

    def judge(self, on_no_rank: dict[str, list[bytes]]) -> None:
        """Raise StateMismatch for what must not be loaded; check the files that are to be read. Live state is untouched."""
        for key, names in self.elsewhere.items():
            unknown = set(on_no_rank.get(key, ()))
            found = [n for n in names if _hash(n) in unknown]
            self.report.unexpected += [f"{key}/{name}" for name in found]
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
        unexpected = [n for n in report.unexpected if "/" in n or (self.whole and parts[n].required)]
        facts = {
            "path": where, "missing": report.missing, "unexpected": unexpected, "mismatched": self.mismatched,
        }  # fmt: skip
        if self.regrouped:
            raise self.regrouped[0]
        matched_any = any(c.key in self.view.manifest.components for c in self.components)
        renamed = {} if self.keys is None else self.keys.renamed
        missing = [renamed.get(name, name) for name in report.missing]
        if self.keys is not None:
            if report.missing and not self.prepared:
                lacking = _some(missing)
                raise StateMismatch(f"{where}: nothing that keys ask for is in the checkpoint, not {lacking}", **facts)
            matched_any = True
        if not matched_any or self.unmatched:
            what = f"component {self.unmatched[0]!r}" if self.unmatched else "the state"
            raise StateMismatch(
                f"{where}: nothing in {what} has a name that the checkpoint has; live: {_some(report.missing)}; "
                f"saved: {_some(report.unexpected)}", **facts)  # fmt: skip
        if self.mismatched:
            name, (saved, live) = next(iter(self.mismatched.items()))
            more = f" and {len(self.mismatched) - 1} more" if len(self.mismatched) > 1 else ""
            same_shape = "[" in saved and saved.split("[")[1:] == live.split("[")[1:]
            hint = "; cast=True converts dtypes" if same_shape else ""
            raise StateMismatch(
                f"{where}: {name!r} was saved as {saved}, the live state has {live}{more}{hint}", **facts
            )
        if self.strict and (report.missing or unexpected):
            raise StateMismatch(
                f"{where} and the live state have different keys: missing in the checkpoint: {_some(missing)}; "
                f"unexpected in the checkpoint: {_some(unexpected)}; strict=False loads the rest", **facts)  # fmt: skip

    def read(self) -> None:
        """Read every byte into its place, verified. Raises CheckpointCorrupt, StorageError."""
        settle(self.devices)
        with self._touching():
            read_tensors(self.view.storage, self.view.folder, self.reads, self.io_threads)

    @contextmanager
    def _touching(self) -> Iterator[None]:
        """What fails in it says that live tensors were read into, where they were."""
        try:
            yield
        except CheckpointError as error:
            if self.in_place:
                error.message += PARTLY_OVERWRITTEN
            raise

    @one_walk()
    def apply(self) -> None:
        """Hand the complete states over, random streams last."""
        for live, staged in self.staged:
            copy_into(live, staged)
        for component, state in sorted(
            self.prepared, key=lambda p: bool(getattr(p[0].stateful, "restore_last", False))
        ):
            component.stateful.load_state_dict(revived(state, f"{self.view.url}: component {component.key!r}"))
            owner = getattr(component.stateful, "whole", component.stateful)
            if isinstance(owner, PlainState):
                self.report.values[component.key] = owner.loaded

    def free_for_reading(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory may be read into: not shared with another destination, or with itself."""
        span = memory_span(tensor)
        # The memory of a conjugated or negated view holds other bits than its items say.
        if self.transactional or tensor.is_conj() or tensor.is_neg() or overlaps_itself(tensor):
            return False
        if span is None:
            return True
        device, start, stop = span
        taken = self.spans.setdefault(device, [])
        at = bisect_left(taken, (start, stop))
        if (at and taken[at - 1][1] > start) or (at < len(taken) and taken[at][0] < stop):
            return False
        insort(taken, (start, stop))
        return True


class _Component:
    """Destinations of one component's tensors. skip: tensors that this rank does not have belong to others."""

    def __init__(
        self,
        loading: Loading,
        component: StateComponent,
        stored: StoredComponent,
        live: dict[str, CapturedTensor],
        held: dict[tuple[str, ...], int | None],
        *,
        skip: bool,
    ) -> None:
        self.loading, self.component, self.stored, self.live, self.skip = loading, component, stored, live, skip
        self.judged = hasattr(component.stateful, "differences")
        self.live_list = list(live.values())
        self.held = held
        self.numbers = {tensor.name: number for number, tensor in enumerate(stored.tensors)}
        self.leaves: dict[int, Any] = {}

    def leaf(self, ref: TensorRef) -> Any:
        """What stands for a saved tensor in the state that is handed over; its bytes are read later."""
        if not 0 <= ref.index < len(self.stored.tensors):
            raise ValueError(f"the tree refers to tensor {ref.index} of {len(self.stored.tensors)}")
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
                self.once(tensor.alias_of)
                return live.live
        if live is not None and live.alias_of is not None:
            other = self.live_list[live.alias_of]
            number_of_other = self.numbers.get(other.name)
            if number_of_other is not None and self.tied(live, other):
                if self.same_bytes(number, number_of_other, live):
                    self.once(number_of_other)
                    return live.live
                # One memory cannot hold two values.
                forms = ("a value of its own", f"memory that it shares with {other.name!r}")
                self.loading.mismatched[f"{self.component.key}/{tensor.name}"] = forms
                return live.live
        return self.once(number)

    def tied(self, live: CapturedTensor, other: CapturedTensor) -> bool:
        view = same_view_key(live.tensor)
        return (view is not None and view == same_view_key(other.tensor)) or live.live is other.live

    def same_bytes(self, number: int, other: int, live: CapturedTensor) -> bool:
        """Whether two saved tensors are equal where `live` wants them, by their digests."""
        box = live.part.box
        a, b = self.stored.tensors[number], self.stored.tensors[other]
        if box is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            return box is None
        pieces = [[(p.offset, p.digests) for p in self.stored.pieces(n, box)] for n in (number, other)]
        return pieces[0] == pieces[1]

    def once(self, number: int) -> Any:
        if number not in self.leaves:
            self.leaves[number] = self.destination(number, self.stored.tensors[number])
        return self.leaves[number]

    def fitting(self, live: CapturedTensor, tensor: LogicalTensor) -> bool:
        return live.part.shape == tensor.shape and live.dtype == tensor.dtype

    def destination(self, number: int, tensor: LogicalTensor) -> Any:
        name = f"{self.component.key}/{tensor.name}"
        dtype = torch_dtype(tensor.dtype)
        if dtype is None:
            raise CheckpointCorrupt(f"{self.loading.view.url}: tensor {name!r} has dtype {tensor.dtype}, which this torch lacks",
                                    tensor=name, kind="format")  # fmt: skip
        live = self.live.get(tensor.name)
        if live is None or not (self.judged or self.skip or self.fitting(live, tensor)):
            leaf = self.fresh(tensor, dtype)
            if leaf is not SKIPPED:
                self.read_into(number, tensor, local_part(leaf))
            return leaf
        if not self.fitting(live, tensor) and not self.castable(name, tensor, live, dtype):
            return live.live
        if self.fitting(live, tensor) and self.loading.free_for_reading(live.tensor):
            self.loading.in_place = True
            self.read_into(number, tensor, live.part)
        else:
            staged = torch.empty(live.shape, dtype=dtype, device="cpu")
            self.loading.staged.append((live.tensor, staged))
            self.read_into(number, tensor, LocalPart(staged, tensor.shape, live.part.box, live.part.layout))
        return live.live

    def read_into(self, number: int, tensor: LogicalTensor, part: LocalPart) -> None:
        if part.box is None:
            return
        words = torch_words(part.tensor)
        self.loading.devices.add(part.tensor.device)
        for piece in self.stored.pieces(number, part.box):
            key = self.stored.of[number] if self.stored.of else self.component.key
            self.loading.reads.append(read_of(key, piece, part.box, words))

    def castable(self, name: str, tensor: LogicalTensor, live: CapturedTensor, dtype: torch.dtype) -> bool:
        same_kind = live.tensor.is_complex() == dtype.is_complex
        if self.loading.cast and live.part.shape == tensor.shape and same_kind:
            self.loading.report.cast[name] = f"{tensor.dtype} -> {live.dtype}"
            return True
        saved, held = f"{tensor.dtype} {list(tensor.shape)}", f"{live.dtype} {list(live.part.shape)}"
        self.loading.mismatched[name] = (saved, held)
        return False

    def fresh(self, tensor: LogicalTensor, dtype: torch.dtype) -> Any:
        """A leaf for a tensor that the live state does not have."""
        allocate = getattr(self.component.stateful, "allocate", None)
        if allocate is not None:
            made = allocate(tensor.name, dtype, tensor.shape)
            if made is not None:
                return made
        if self.skip and not has_other(self.held, tensor.name):
            return SKIPPED
        if volume(tensor.shape) * dtype.itemsize > ALLOCATED_UNSEEN:
            # First that the bytes are there, then memory for them.
            whole = (0,) * len(tensor.shape), tensor.shape
            number = self.numbers[tensor.name]
            self.loading.view.check_files(piece.file for piece in self.stored.pieces(number, whole) if piece.file)
        return torch.empty(tensor.shape, dtype=dtype, device="cpu")


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

    return Words(array, array.element_size(), flat, memory, flattened, pinned_memory(tensor.device), moving)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:5])
    return (shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")) or "nothing"
