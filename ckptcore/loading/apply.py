"""Loading into live state: everything is checked first, then read into place, then handed over."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointCorrupt, CheckpointError, StateMismatch
from ..format.index import TensorEntry
from ..format.manifest import CheckpointManifest
from ..format.values import TensorRef, decode
from ..ranks.communicator import Communicator
from ..state.adapters import PlainState
from ..state.component import StateComponent
from ..state.layout import TensorBytes, memory_span, overlaps_itself, same_view_key, torch_dtype
from ..state.tree import CapturedTensor, capture
from .place import Place, copy_for
from .reader import TensorRead, read_tensors
from .view import CheckpointView, MergedComponent

__all__ = ["LoadReport", "Loading"]


@dataclass(slots=True)
class LoadReport:
    """What a load or restore did.

    fresh: there was no checkpoint and nothing was touched. values: the loaded plain values by component key.
    missing, unexpected: full names that only the live state, or only the checkpoint, has (not strict). cast: full
    name -> "saved dtype -> live dtype". skipped: newer entries that `restore` passed over, and why.
    """

    fresh: bool = False
    step: int | None = None
    path: str | None = None
    manifest: CheckpointManifest | None = None
    values: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


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
    ) -> None:
        manifest = view.manifest
        self.view, self.components, self.io_threads, self.strict = view, components, io_threads, strict
        self.report = LoadReport(step=manifest.step, path=view.url, manifest=manifest)
        self.place = Place(comm.rank, comm.world_size, comm.nodes, partitions)
        self.fits = _Fits(view, cast, transactional, self.report)
        self.prepared: list[tuple[StateComponent, Any]] = []

    def check(self) -> None:
        """Match saved and live state, and check the files that are needed. Live state is untouched.

        Raises StateMismatch, CheckpointCorrupt, StorageError.
        """
        saved = self.view.manifest.components
        keys = {c.key for c in self.components}
        self.report.missing = [c.key for c in self.components if c.key not in saved and c.required]
        self.report.unexpected = [key for key in saved if key not in keys]
        here = [c for c in self.components if c.key in saved]
        for component in here:
            copy = copy_for(self.view.manifest, component, self.place)
            if copy is not None:
                self.prepared.append((component, self.fits.prepare(component, copy)))
        self.fits.judge(self.strict, matched_any=bool(here))
        self.view.check_files(read.entry.file for read in self.fits.reads if read.entry.file)

    def read(self) -> None:
        """Read every byte into its place, verified. Raises CheckpointCorrupt, StorageError."""
        try:
            read_tensors(self.view.storage, self.view.folder, self.fits.reads, self.io_threads)
        except CheckpointError as error:
            if self.fits.in_place:
                error.message += (
                    "; live state is partly overwritten, do not train on it (transactional=True avoids this)"
                )
            raise

    def apply(self) -> None:
        """Hand the complete states over, random streams last."""
        for component, state in sorted(
            self.prepared, key=lambda p: bool(getattr(p[0].stateful, "restore_last", False))
        ):
            component.stateful.load_state_dict(self.fits.finished(component.key, state))
            if isinstance(component.stateful, PlainState):
                self.report.values[component.key] = component.stateful.loaded


class _Fits:
    """Matches what was saved with what is live: destinations, differences, mismatches."""

    def __init__(self, view: CheckpointView, cast: bool, transactional: bool, report: LoadReport) -> None:
        self.view, self.cast, self.transactional, self.report = view, cast, transactional, report
        self.reads: list[TensorRead] = []
        self.in_place = False
        self.mismatched: dict[str, tuple[str, str]] = {}
        self.unmatched: list[str] = []
        self.regrouped: list[StateMismatch] = []
        self.casts: dict[str, list[tuple[torch.Tensor, torch.dtype]]] = {}
        self.spans: dict[str, list[tuple[int, int]]] = {}

    def prepare(self, component: StateComponent, copy: int) -> Any:
        """The saved state with destination tensors in place of the tensors, none of them read yet."""
        index = self.view.component(component.key, copy)
        live = {t.name: t for t in capture(component.key, component.stateful.state_dict()).tensors}
        found = _Component(self, component, index, live)
        state = decode(index.tree, found.leaf, file=f"{self.view.url}: component {component.key!r}")
        compare = getattr(component.stateful, "differences", None)
        if compare is not None:
            self._compare(component, compare, state)
        return state

    def _compare(self, component: StateComponent, compare: Any, state: Any) -> None:
        try:
            missing, unexpected = compare(state)
        except StateMismatch as error:
            error.message = f"{self.view.url}: component {component.key!r}: {error.message}"
            self.regrouped.append(error)
            return
        self.report.missing += [f"{component.key}/{name}" for name in missing]
        self.report.unexpected += [f"{component.key}/{name}" for name in unexpected]
        if isinstance(state, Mapping) and state and len(unexpected) >= len(state) and missing:
            self.unmatched.append(component.key)

    def judge(self, strict: bool, matched_any: bool) -> None:
        """Raise StateMismatch for what must not be loaded. Nothing live has been touched so far."""
        where, report = self.view.url, self.report
        facts = {
            "path": where, "missing": report.missing, "unexpected": report.unexpected, "mismatched": self.mismatched,
        }  # fmt: skip
        if self.regrouped:
            raise self.regrouped[0]
        if not matched_any or self.unmatched:
            what = f"component {self.unmatched[0]!r}" if self.unmatched else "the state"
            raise StateMismatch(
                f"{where}: nothing in {what} has a name that the checkpoint has; live: {_some(report.missing)}; "
                f"saved: {_some(report.unexpected)}", **facts)  # fmt: skip
        if self.mismatched:
            name, (saved, live) = next(iter(self.mismatched.items()))
            more = f" and {len(self.mismatched) - 1} more" if len(self.mismatched) > 1 else ""
            hint = "; cast=True converts dtypes" if saved.split("[")[1:] == live.split("[")[1:] else ""
            raise StateMismatch(
                f"{where}: {name!r} was saved as {saved}, the live state has {live}{more}{hint}", **facts
            )
        if strict and (report.missing or report.unexpected):
            raise StateMismatch(
                f"{where} and the live state have different keys: missing in the checkpoint: {_some(report.missing)}; "
                f"unexpected in the checkpoint: {_some(report.unexpected)}; strict=False loads the rest", **facts)  # fmt: skip

    def free_for_reading(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory may be read into: not shared with another destination, or with itself."""
        span = memory_span(tensor)
        if self.transactional or overlaps_itself(tensor):
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

    def finished(self, key: str, state: Any) -> Any:
        """The state to hand over: with dtypes converted where that was asked for."""
        converted = {id(t): t.to(dtype) for t, dtype in self.casts.get(key, [])}
        return _replaced(state, converted) if converted else state


class _Component:
    """Destinations of one component's tensors."""

    def __init__(
        self, fits: _Fits, component: StateComponent, index: MergedComponent, live: dict[str, CapturedTensor]
    ) -> None:
        self.fits, self.component, self.entries, self.live = fits, component, index.tensors, live
        self.judged = hasattr(component.stateful, "differences")
        self.targets: dict[int, torch.Tensor] = {}

    def leaf(self, ref: TensorRef) -> Any:
        if not 0 <= ref.index < len(self.entries):
            raise ValueError(f"the tree refers to tensor {ref.index} of {len(self.entries)}")
        target, is_live = self.target(ref.index)
        live = self.live.get(self.entries[ref.index].name)
        if is_live and live is not None:
            return live.live
        return target.numpy() if ref.numpy else target

    def target(self, number: int) -> tuple[torch.Tensor, bool]:
        """The destination of a tensor, and whether it is the live tensor of that name itself."""
        entry = self.entries[number]
        held = entry if entry.alias_of is None else self.entries[entry.alias_of]
        live = self.live.get(entry.name)
        if entry.alias_of is not None:
            first, _ = self.target_once(entry.alias_of)
            if live is None and held.name not in self.live:
                return first, False
            if live is not None and same_view_key(live.tensor) == same_view_key(first) is not None:
                return first, True
        return self.target_once(number)

    def target_once(self, number: int) -> tuple[torch.Tensor, bool]:
        entry = self.entries[number]
        live = self.live.get(entry.name)
        if number in self.targets:
            target = self.targets[number]
            return target, live is not None and target is live.tensor
        held = entry if entry.alias_of is None else self.entries[entry.alias_of]
        name = f"{self.component.key}/{entry.name}"
        dtype = torch_dtype(entry.dtype)
        if dtype is None:
            raise CheckpointCorrupt(f"{self.fits.view.url}: tensor {name!r} has dtype {entry.dtype}, which this torch lacks",
                                    tensor=name, kind="format")  # fmt: skip
        fitting = live is not None and live.shape == entry.shape and live.dtype == entry.dtype
        if live is not None and not fitting and self.judged:
            self.mismatch(name, entry, live, dtype)
        if fitting and live is not None and self.fits.free_for_reading(live.tensor):
            target, is_live = live.tensor, True
            self.fits.in_place = True
        else:
            target, is_live = self.fresh(entry, dtype, live), False
            if live is not None and self.fits.cast and self.judged and live.dtype != entry.dtype:
                self.fits.casts.setdefault(self.component.key, []).append((target, live.tensor.dtype))
        self.targets[number] = target
        self.fits.reads.append(TensorRead(self.component.key, held, TensorBytes(target)))
        return target, is_live

    def mismatch(self, name: str, entry: TensorEntry, live: CapturedTensor, dtype: torch.dtype) -> None:
        if self.fits.cast and live.shape == entry.shape and live.tensor.is_complex() == dtype.is_complex:
            self.fits.report.cast[name] = f"{entry.dtype} -> {live.dtype}"
        else:
            saved, held = f"{entry.dtype} {list(entry.shape)}", f"{live.dtype} {list(live.shape)}"
            self.fits.mismatched[name] = (saved, held)

    def fresh(self, entry: TensorEntry, dtype: torch.dtype, live: CapturedTensor | None) -> torch.Tensor:
        allocate = getattr(self.component.stateful, "allocate", None)
        if live is None and allocate is not None and not self.fits.transactional:
            made = allocate(entry.name, dtype, entry.shape)
            if isinstance(made, torch.Tensor):
                return made
        return torch.empty(entry.shape, dtype=dtype)


def _replaced(state: Any, converted: dict[int, torch.Tensor]) -> Any:
    if id(state) in converted:
        return converted[id(state)]
    if type(state) is dict:
        return {key: _replaced(item, converted) for key, item in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_replaced(item, converted) for item in state)
    return state


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:5])
    return (shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")) or "nothing"
