"""From an accelerator into pinned host memory, without letting the state change under the copy.

"copy"      the call returns when the host has everything.
"overlap"   a stream of its own copies while training goes on. What belongs to an optimizer is changed by its step alone,
            so a hook makes the step wait (on the device) for the copy; everything else is copied in the order of the
            caller's stream, before anything that comes after.
"auto"      as much as safely fits is first copied on the device, which takes a hundredth of the time and frees the
            state at once; the rest as "overlap". The snapshot goes to the host afterwards, and is given back piece by piece.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..state.layout import is_dtensor
from ..state.streams import side_stream

__all__ = ["DeviceCopy", "Staging", "pin", "start_copies", "unpin", "watch_optimizers"]

Staging = Literal["auto", "copy", "overlap"]
Pair = tuple[torch.Tensor, torch.Tensor]  # place on the host, source on the device

DRAIN_BYTES = 256 << 20


def pin(block: torch.Tensor) -> None:
    """Lock host memory in place, so that a device can copy to it by itself. Raises MemoryError."""
    result = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)  # type: ignore[no-untyped-call]
    if int(result) != 0:
        raise MemoryError(f"{block.numel():,} bytes of host memory could not be pinned (CUDA error {int(result)})")


def unpin(block: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())  # type: ignore[no-untyped-call]


# Optimizers of this process whose steps are known to come by here, and copies that their next step waits for.
_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_unseen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_fences: list[DeviceCopy] = []
_watching = threading.Lock()
_hooked = False


def watch_optimizers() -> None:
    """Be told of every optimizer step of this process from now on, if there is a device to copy from."""
    global _hooked
    with _watching:
        if not _hooked and torch.cuda.is_available():
            _hooked = True
            register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.cuda.is_current_stream_capturing():
        # A captured step is replayed without coming by here.
        _unseen.add(optimizer)
        return
    _seen.add(optimizer)
    for copy in tuple(_fences):
        torch.cuda.current_stream(copy.device).wait_event(copy.copied)


def _fenced_memory() -> set[int]:
    """Where the memory begins that only optimizer steps change which wait for copies."""
    found: set[int] = set()
    for optimizer in [o for o in _seen if o not in _unseen]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                states = optimizer.state.get(parameter, {})
                found.update(_memory(t) for t in (parameter, *states.values()) if isinstance(t, torch.Tensor))
    return found


def _memory(tensor: torch.Tensor) -> int:
    local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local.untyped_storage().data_ptr() if not local.is_meta else 0


def start_copies(pairs: Iterable[Pair], staging: Staging) -> list[DeviceCopy]:
    """Begin to copy every pair; one DeviceCopy for each device."""
    by_device: dict[torch.device, list[Pair]] = {}
    for pair in pairs:
        if pair[1].numel():
            by_device.setdefault(pair[1].device, []).append(pair)
    return [DeviceCopy(device, of_device, staging) for device, of_device in by_device.items()]


class DeviceCopy:
    """Copies from one device, in flight. Sources are held until they are copied."""

    def __init__(self, device: torch.device, pairs: Sequence[Pair], staging: Staging) -> None:
        self.device = device
        self.snapshot: list[Pair] = []
        self.sources: list[torch.Tensor] = []
        self.ended = threading.Event()
        self.returns_at_once = staging != "copy" and device.type == "cuda"
        if device.type != "cuda":
            for place, source in pairs:
                place.copy_(source)
            self.ended.set()
            return
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        current, side = torch.cuda.current_stream(device), side_stream(device)
        rest = list(pairs)
        if staging == "auto":
            rest = self._take_snapshot(rest)
        fenced = _fenced_memory() if staging != "copy" and rest else set()
        late = [pair for pair in rest if staging == "copy" or pair[1].untyped_storage().data_ptr() in fenced]
        with torch.cuda.stream(current):
            if len(late) < len(rest):
                ids = {id(pair) for pair in late}
                _enqueue([pair for pair in rest if id(pair) not in ids])
        side.wait_stream(current)
        with torch.cuda.stream(side):
            _enqueue(late)
            self.copied.record(side)
        self.sources = [source for _, source in rest]
        if late and self.returns_at_once:
            _fences.append(self)

    def returnable(self) -> None:
        """Return when the caller may go on: in "copy" mode when everything is copied."""
        if not self.returns_at_once:
            self.wait()

    def wait(self) -> None:
        """Return when the host has every byte; the device's memory is given back on the way."""
        if self.ended.is_set():
            return
        self.copied.synchronize()
        if self in _fences:
            _fences.remove(self)
        self.sources = []
        stream = side_stream(self.device)  # of the thread that drains
        while self.snapshot:
            with torch.cuda.stream(stream):
                size, group = 0, []
                while self.snapshot and size < DRAIN_BYTES:
                    group.append(self.snapshot.pop())
                    size += group[-1][0].nbytes
                _enqueue(group)
            stream.synchronize()
        self.ended.set()

    def complete(self) -> bool:
        """Whether the host has every byte."""
        return self.ended.is_set()

    def _take_snapshot(self, pairs: list[Pair]) -> list[Pair]:
        """Copy on the device what safely fits, first what no optimizer owns; returns the rest."""
        budget = _safe_bytes(self.device)
        if budget <= 0:
            return pairs
        fenced = _fenced_memory() if sum(source.nbytes for _, source in pairs) > budget else set()
        pairs = sorted(pairs, key=lambda pair: pair[1].untyped_storage().data_ptr() in fenced)
        taken: list[Pair] = []
        rest: list[Pair] = []
        for pair in pairs:
            (taken if budget >= pair[1].nbytes else rest).append(pair)
            budget -= pair[1].nbytes if budget >= pair[1].nbytes else 0
        try:
            copies = [torch.empty_like(source, memory_format=torch.contiguous_format) for _, source in taken]
        except torch.OutOfMemoryError:
            return pairs
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for copy, (_, source) in zip(copies, taken, strict=True):
            targets, sources = by_dtype.setdefault(source.dtype, ([], []))
            targets.append(copy)
            sources.append(source)
        with torch.no_grad():
            for targets, sources in by_dtype.values():
                torch._foreach_copy_(targets, sources)
        self.snapshot = [(place, copy) for (place, _), copy in zip(taken, copies, strict=True)]
        return rest


def _enqueue(pairs: Iterable[Pair]) -> None:
    for place, source in pairs:
        place.copy_(source, non_blocking=True)


def _safe_bytes(device: torch.device) -> int:
    """Device memory that a snapshot may take for a moment: what is free at the worst moment of training so far, less a
    tenth of the device. Nothing before any training was seen, because nobody knows how much it is going to need."""
    stats = torch.cuda.memory_stats(device)
    now, peak = stats.get("allocated_bytes.all.current", 0), stats.get("allocated_bytes.all.peak", 0)
    if not _seen or peak <= now:
        return 0
    free, total = torch.cuda.mem_get_info(device)
    reserved, most = stats.get("reserved_bytes.all.current", 0), stats.get("reserved_bytes.all.peak", 0)
    return int(free - max(0, most - reserved) - total // 10)
