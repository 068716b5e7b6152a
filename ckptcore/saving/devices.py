"""From an accelerator into pinned host memory, without letting the state change under the copy.

- "copy": the call returns when the host has everything.
- "overlap": a stream of its own copies while training goes on. Only an optimizer's step changes
  what belongs to the optimizer, so a hook makes the step wait (on the device) for the copy.
  Everything else is copied in the order of the caller's stream, before anything that comes after.
  What is seen to change between steps too, as an embedding with `max_norm` does in its forward
  pass, counts as everything else. A change that was not foreseen makes the save fail.
- "auto": as much as safely fits is first copied on the device. That takes a hundredth of the time
  and frees the state at once. The snapshot goes to the host afterwards, and is given back block by
  block. The rest goes as in "overlap".
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..state.layout import is_dtensor, side_stream

Staging = Literal["auto", "copy", "overlap"]
# What is copied, on the device, and where to on the host.
Item = tuple[torch.Tensor, torch.Tensor]

# Types of which torch copies every bit. Others are copied as words.
COPIED_AS_THEY_ARE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)

BLOCK_BYTES = 256 << 20
ALIGNMENT = 512  # bytes, as the allocator's own blocks


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


class Room:
    """A block of bytes in which tensors are laid out, in C order."""

    def __init__(self, block: torch.Tensor) -> None:
        self.block = block
        self.views: dict[torch.dtype, torch.Tensor] = {}

    def like(self, source: torch.Tensor, at: int) -> torch.Tensor:
        """The memory, from byte `at` on, of what has dtype and shape of `source`."""
        view = self.views.get(source.dtype)
        if view is None:
            view = self.views[source.dtype] = self.block.view(source.dtype)
        first = at // source.element_size()
        if source.is_contiguous():  # in one step, and half the time
            return view.as_strided(source.shape, source.stride(), view.storage_offset() + first)
        return view[first : first + source.numel()].view(source.shape)


def pin(block: torch.Tensor) -> None:
    """Lock host memory in place, so that a device can copy to it by itself. Raises MemoryError."""
    result = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)  # type: ignore[no-untyped-call]
    if int(result) != 0:
        raise MemoryError(
            f"{block.numel():,} bytes of host memory could not be pinned (CUDA error {int(result)})"
        )


def unpin(block: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())  # type: ignore[no-untyped-call]


INTERVALS = 3  # between two steps, after which parameters are not compared any more


@dataclass(slots=True)
class _Watched:
    """An optimizer whose steps come by here. intervals: between two steps that were compared;
    versions: of its parameters after its last step, while another comparison is due."""

    intervals: int = 0
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)


# Optimizers of this process whose steps are known to come by here, memory of theirs that something
# else changes too, and copies that their next step waits for.
_known: weakref.WeakKeyDictionary[Optimizer, _Watched] = weakref.WeakKeyDictionary()
_unknown: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_restless: set[int] = set()
_fences: list[DeviceCopy] = []
_watching = threading.Lock()
_hooked = False


def watch_optimizers() -> None:
    """Be told of every optimizer step of this process from now on, if there is a device to copy
    from."""
    global _hooked
    with _watching:
        if not _hooked and torch.cuda.is_available():
            _hooked = True
            # Not to be compiled: a compiled step comes by too, before its first kernel.
            disable: Any = torch.compiler.disable
            register_optimizer_step_pre_hook(disable(_before_step))
            register_optimizer_step_post_hook(disable(_after_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.cuda.is_current_stream_capturing():
        # A captured step is replayed without coming by here.
        _unknown.add(optimizer)
        return
    watched = _known.setdefault(optimizer, _Watched())
    if watched.versions:
        _restless.update(_memory(t) for t, version in watched.versions if _version(t) != version)
        watched.intervals, watched.versions = watched.intervals + 1, []
    for copy in tuple(_fences):
        copy.note_changes()
        if copy.copied.query():  # type: ignore[no-untyped-call]
            _unfence(copy)  # nothing is left to wait for, whatever becomes of the save
        else:
            torch.cuda.current_stream(copy.device).wait_event(copy.copied)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    watched = _known.get(optimizer)
    if watched is not None and watched.intervals < INTERVALS:
        watched.versions = [(t, _version(t)) for t in map(_local, _parameters(optimizer))]


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _unfence(copy: DeviceCopy) -> None:
    """Have no optimizer step wait for a copy any more. Several threads may come by here for one
    copy."""
    with suppress(ValueError):
        _fences.remove(copy)


def _fenced_memory() -> set[int]:
    """Where the memory begins that only optimizer steps change which wait for copies."""
    found: set[int] = set()
    for optimizer, watched in list(_known.items()):
        if optimizer in _unknown or not watched.intervals:
            continue
        for parameter in _parameters(optimizer):
            states = optimizer.state.get(parameter, {})
            found.update(
                _memory(t) for t in (parameter, *states.values()) if isinstance(t, torch.Tensor)
            )
    return found - _restless


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local


def _memory(tensor: torch.Tensor) -> int:
    local = _local(tensor)
    return local.untyped_storage().data_ptr() if not local.is_meta else 0


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 for one of inference mode, which nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def start_copies(items: Iterable[Item], staging: Staging) -> list[DeviceCopy]:
    """Begin to copy every item; one DeviceCopy for each device."""
    by_device: dict[torch.device, list[Item]] = {}
    for item in items:
        by_device.setdefault(item[0].device, []).append(item)
    copies: list[DeviceCopy] = []
    try:
        for device, of_device in by_device.items():
            copies.append(DeviceCopy(device, of_device, staging))
    except BaseException:
        release(copies)
        raise
    return copies


def release(copies: Iterable[DeviceCopy]) -> None:
    """Give up all of `copies`. Raises nothing but what interrupts the program."""
    for copy in copies:
        copy.release()


def warm_up(devices: Iterable[torch.device]) -> None:
    """Have loaded what the first snapshot on each device runs."""
    for device in devices:
        if device.type == "cuda":
            for dtype in COPIED_AS_THEY_ARE:
                item = torch.zeros(1, dtype=dtype, device=device)
                _snapshot_of([(item, item)], 1 << 20)
            torch.cuda.synchronize(device)


class DeviceCopy:
    """Copies from one device, in flight. Sources are held until they are copied."""

    def __init__(self, device: torch.device, items: Sequence[Item], staging: Staging) -> None:
        self.device = device
        self.snapshot: list[list[Item]] = []
        self.sources: list[torch.Tensor] = []
        self.fenced: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self.changed: list[torch.Tensor] = []  # where the copies are that may be of two steps
        self._noting = threading.Lock()
        self.ended = threading.Event()
        self.returns_at_once = staging != "copy" and device.type == "cuda"
        if device.type != "cuda":
            with torch.no_grad():
                for source, target in items:
                    target.copy_(source)
            self.ended.set()
            return
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        try:
            self._start(items, staging)
        except BaseException:
            self.release()
            raise

    @torch.no_grad()  # of this thread: nothing that is trained is to remember its copy
    def _start(self, items: Sequence[Item], staging: Staging) -> None:
        device = self.device
        current, side = torch.cuda.current_stream(device), side_stream(device)
        blocks: list[list[Item]] = []
        rest = list(items)
        with torch.cuda.stream(current):
            if staging == "auto":
                blocks, rest = _snapshot_of(rest, _safe_bytes(device))
            fenced = _fenced_memory() if staging != "copy" and rest else set()
            late = [item for item in rest if staging == "copy" or _memory(item[0]) in fenced]
            if len(late) < len(rest):
                ids = {id(item) for item in late}
                _enqueue(item for item in rest if id(item) not in ids)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            _enqueue(late)
            self.copied.record(side)
        if self.returns_at_once:
            self.fenced = [(source, target, _version(source)) for source, target in late]
        self.sources = [source for source, _ in rest]
        if late and self.returns_at_once:
            _fences.append(self)
        self.snapshot = blocks

    def note_changes(self) -> None:
        """Before the first step that waits for the copy, or when it is complete: note what
        something else than a step has changed since it began."""
        with self._noting:
            fenced, self.fenced = self.fenced, []
            for source, target, version in fenced:
                if _version(source) != version:
                    _restless.add(_memory(source))
                    self.changed.append(target)

    def returnable(self) -> None:
        """Return when the caller may go on: in "copy" mode when everything is copied."""
        if not self.returns_at_once:
            self.wait()

    def wait(self) -> None:
        """Return when the host has every byte; the device's memory is given back on the way."""
        if self.ended.is_set():
            return
        try:
            self._drain()
        except BaseException:
            self.release()
            raise

    def _drain(self) -> None:
        self.copied.synchronize()
        self.note_changes()
        _unfence(self)
        self.sources = []
        stream = side_stream(self.device)  # of the thread that drains
        while self.snapshot:
            with torch.cuda.stream(stream):
                for copy, target in self.snapshot.pop():
                    target.copy_(copy, non_blocking=True)
            stream.synchronize()
        self.ended.set()

    def release(self) -> None:
        """Give up, after a failure or Ctrl-C: on return nothing is being copied, no step waits for
        it, and the device's memory is given back."""
        if self.ended.is_set():
            return
        _unfence(self)
        with suppress(Exception):  # a device that has failed may answer nothing any more
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self.sources, self.snapshot, self.fenced = [], [], []
        self.ended.set()

    def complete(self) -> bool:
        """Whether the host has every byte."""
        return self.ended.is_set()


def _snapshot_of(items: list[Item], budget: int) -> tuple[list[list[Item]], list[Item]]:
    """Copy on the device what fits into `budget` bytes, first what no optimizer owns. Returns the
    copies, each with where it goes to, in blocks of memory that go back one by one; and the
    items that do not fit."""
    if sum(source.nbytes for source, _ in items) > budget > 0:
        fenced = _fenced_memory()
        items = sorted(items, key=lambda item: _memory(item[0]) in fenced)
    groups: list[list[Item]] = []
    rest: list[Item] = []
    used = BLOCK_BYTES
    for item in items:
        size = aligned(item[0].nbytes)
        if size > budget:
            rest.append(item)
            continue
        budget -= size
        if used + size > BLOCK_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += size
    blocks = []
    for number, group in enumerate(groups):
        try:
            blocks.append(_block_of(group))
        except torch.OutOfMemoryError:
            return blocks, [*(item for later in groups[number:] for item in later), *rest]
    return blocks, rest


def _block_of(items: list[Item]) -> list[Item]:
    """Copies of all sources in one piece of memory: few large allocations are faster than many, the
    first time above all."""
    block = torch.empty(
        sum(aligned(source.nbytes) for source, _ in items),
        dtype=torch.uint8,
        device=items[0][0].device,
    )
    room = Room(block)
    copies: list[Item] = []
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    at = 0
    for source, target in items:
        copy = room.like(source, at)
        at += aligned(source.nbytes)
        copies.append((copy, target))
        targets, sources = by_dtype.setdefault(source.dtype, ([], []))
        targets.append(copy)
        sources.append(source)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)
    return copies


def _enqueue(items: Iterable[Item]) -> None:
    for source, target in items:
        target.copy_(source, non_blocking=True)


def _safe_bytes(device: torch.device) -> int:
    """Device memory that a snapshot may take for a moment: what is free at the worst moment of
    training so far, less a tenth of the device. Nothing before any training was seen, because
    nobody knows how much it is going to need."""
    stats = torch.cuda.memory_stats(device)
    now, peak = (
        stats.get("allocated_bytes.all.current", 0),
        stats.get("allocated_bytes.all.peak", 0),
    )
    if not _known or peak <= now:
        return 0
    free, total = torch.cuda.mem_get_info(device)
    reserved, most = (
        stats.get("reserved_bytes.all.current", 0),
        stats.get("reserved_bytes.all.peak", 0),
    )
    return int(free - max(0, most - reserved) - total // 10)
