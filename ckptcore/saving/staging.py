"""A private host copy of what a rank has to write, in memory that is allocated once, touched once
and reused.

On the CPU the copy is complete when `stage` returns. From an accelerator the bytes flow into pinned
memory on a stream of their own; devices.py says what keeps them from being changed meanwhile.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
import torch

from ..errors import InvalidState
from ..replicas.compare import compared_digest, take_digests
from ..replicas.device_digest import on_accelerator
from ..state.component import StateComponent
from ..state.layout import words
from ..state.tree import LeafSpec, StateSnapshot, TensorLeaf
from ..storage.chunks import Workers
from .devices import (
    COPIED_AS_THEY_ARE,
    DeviceCopy,
    Item,
    Room,
    Staging,
    aligned,
    pin,
    release,
    start_copies,
    unpin,
    watch_optimizers,
)
from .plan import WritePlan

ALIGNMENT = 64
PAGE = 4096
LARGE_PAGE = 2 << 20
PIECE_BYTES = 16 << 20
# Tensors smaller than this are copied many at a time by one thread: each costs more to hand over
# than to copy.
SMALL_BYTES = 256 << 10
# torch copies so many items in one thread.
ALONE_ITEMS = 32768


@dataclass(frozen=True, slots=True)
class _Targets:
    """Where in a block the copies of leaves lie."""

    block: torch.Tensor
    specs: list[LeafSpec]
    offsets: list[int]
    targets: list[torch.Tensor]


class HostPool:
    """One block of host memory, as large as the largest save so far; pinned from when an
    accelerator needs it."""

    def __init__(self, staging: Staging = "auto") -> None:
        self.staging: Staging = staging
        watch_optimizers()
        self.block = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.pinned = False
        self._kept: _Targets | None = None
        # Set where nobody waits for new memory. Large pages take the system longer to find, and
        # then every save is hashed and written with less work.
        self.large_pages = False

    def reserve(self, nbytes: int, *, pinned: bool, workers: Workers) -> torch.Tensor:
        """At least `nbytes` of touched memory. What was there before is given back first."""
        if self.block.numel() < nbytes or (nbytes and pinned and not self.pinned):
            size = aligned(max(nbytes, self.block.numel()), ALIGNMENT)
            self.release()
            try:
                self.block = _new_memory(size, self.large_pages)
            except (RuntimeError, OSError) as error:  # of torch, and of the system
                raise MemoryError(
                    f"save_async copies the state, and {size:,} bytes of host memory for that "
                    "cannot be allocated; save() makes no copy"
                ) from error
            _touch(self.block, workers)
            if pinned:
                pin(self.block)
            self.pinned = pinned
        return self.block

    def targets(
        self, block: torch.Tensor, copied: Sequence[tuple[TensorLeaf, int]]
    ) -> list[torch.Tensor]:
        """Memory in `block` for the copy of each leaf, from its byte on: the same tensors from save
        to save, while leaves and offsets stay."""
        specs, offsets = [t.spec for t, _ in copied], [at for _, at in copied]
        kept = self._kept
        if (
            kept is None
            or kept.block is not block
            or kept.specs != specs
            or kept.offsets != offsets
        ):
            room = Room(block)
            targets = [room.like(t.tensor, at) for t, at in copied]
            kept = self._kept = _Targets(block, specs, offsets, targets)
        return kept.targets

    def release(self) -> None:
        self._kept = None
        if self.pinned:
            unpin(self.block)
        self.block, self.pinned = torch.empty(0, dtype=torch.uint8, device="cpu"), False

    def __del__(self) -> None:
        if getattr(
            self, "pinned", False
        ):  # memory must not go back to the system while it is locked
            self.release()


@dataclass(slots=True)
class StagedCopy:
    """Where a staged save is private, or will be: `wait` returns when the host has every byte.
    leaves: whose memory is the copy."""

    nbytes: int
    devices: list[DeviceCopy] = field(default_factory=list)
    leaves: Sequence[TensorLeaf] = ()

    def wait(self) -> None:
        for copy in self.devices:
            copy.wait()

    def refuse_changed(self) -> None:
        """Raises InvalidState when something has changed the state while it was copied."""
        changed = {target.data_ptr() for copy in self.devices for target in copy.changed}
        names = [t.spec.name for t in self.leaves if t.tensor.data_ptr() in changed]
        if changed:
            raise InvalidState(
                f"tensor {names[0]!r}{f' and {len(names) - 1} more' * (len(names) > 1)} changed "
                "while it was copied in the background, by something else than the step of its "
                'optimizer. The next saves copy it at once; staging="copy" does so with everything',
                key=names[0],
            )

    def complete(self) -> bool:
        return all(copy.complete() for copy in self.devices)


@torch.inference_mode(False)  # the threads that copy are in no such mode, whatever the caller is in
def stage(
    pool: HostPool,
    plan: WritePlan,
    stored: Mapping[str, StateSnapshot],
    snapshots: Mapping[str, StateSnapshot],
    compared: Sequence[tuple[StateComponent, Sequence[TensorLeaf]]],
    whole: set[str],
    workers: Workers,
) -> StagedCopy:
    """Put a copy in the place of every tensor that this rank writes.

    stored: what is written of each component; snapshots: this rank's state of it.
    compared: components whose replicas are compared later, each with the tensors that other ranks
    may hold too. Of what this rank does not write only the digest is kept that they are compared
    by; but everything of those in `whole`, which may have to be compared item by item.
    """
    copied, size = _offsets(plan, stored, snapshots, whole)
    wanted = {id(t) for t, _ in copied}
    _keep_digests(compared, wanted)
    on_devices = any(t.tensor.is_cuda for t, _ in copied)
    block = pool.reserve(size, pinned=on_devices, workers=workers)
    targets = pool.targets(block, copied)
    host: list[tuple[torch.Tensor, torch.Tensor]] = []
    away: list[Item] = []
    for (t, _), target in zip(copied, targets, strict=True):
        source = t.tensor
        t.tensor, t.live = target, None
        if source.dtype not in COPIED_AS_THEY_ARE:
            source, target = words(source), words(target)
        if not source.is_cpu and t.spec.nbytes:
            away.append((source, target))
        else:
            host.append((target, source))
    copies = start_copies(away, pool.staging)
    try:
        for state in snapshots.values():
            _let_go(state, wanted)
        workers.run(list(_copy_jobs(host)))
        for copy in copies:
            copy.returnable()
    except BaseException:
        release(copies)  # nobody else knows of them
        raise
    return StagedCopy(size, copies, [t for t, _ in copied])


def _offsets(
    plan: WritePlan,
    stored: Mapping[str, StateSnapshot],
    snapshots: Mapping[str, StateSnapshot],
    whole: set[str],
) -> tuple[list[tuple[TensorLeaf, int]], int]:
    """What is copied, each with the byte of the pool where its copy begins, and the bytes of all.

    What this rank writes lies as in its files, each file's data from a page on: whole pages can
    then go to the disk from where they are. After that comes what is not in any file, of the
    components in `whole`.
    """
    found: dict[int, tuple[TensorLeaf, int]] = {}
    unaligned: dict[int, TensorLeaf] = {}
    end = 0
    tensors = {c.key: c.tensors(stored[c.key]) for c in plan.components}
    for file in plan.files:
        first = aligned(end, PAGE) - len(file.header)
        of = tensors[file.component]
        for number, placed in file.contents:
            t = of[number]
            # Items of dtypes that no stock reader knows need not begin at a multiple of their size.
            if (first + placed.start) % max(1, t.tensor.element_size()):
                unaligned[id(t)] = t
            else:
                found[id(t)] = (t, first + placed.start)
        end = first + file.size
    for key in whole & snapshots.keys():
        unaligned |= {
            id(t): t
            for t in snapshots[key].tensors
            if t.spec.alias_of is None and id(t) not in found
        }
    for t in unaligned.values():
        end = aligned(end, ALIGNMENT)
        found[id(t)] = (t, end)
        end += t.spec.nbytes
    return list(found.values()), end


def _keep_digests(
    compared: Sequence[tuple[StateComponent, Sequence[TensorLeaf]]], wanted: set[int]
) -> None:
    """Digests, taken now, of what is compared and not copied, and of all that is compared on its
    accelerator."""
    for c, leaves in compared:
        left = [t for t in leaves if id(t) not in wanted and t.spec.alias_of is None]
        away = [t for t in leaves if id(t) in wanted and on_accelerator(t.tensor)]
        take_digests(c, left + away)
        for t in left:
            if t.digest is None:
                t.digest = compared_digest(c, t)


def _let_go(state: StateSnapshot, wanted: set[int]) -> None:
    """Let go of live memory: aliases follow what they are one with, the rest keeps its shape
    alone."""
    for t in state.tensors:
        if id(t) in wanted:
            continue
        t.live = None
        tensor = t.tensor
        if t.spec.alias_of is not None:
            target = state.tensors[t.spec.alias_of]
            t.digest = target.digest
            tensor = target.tensor
        else:
            tensor = torch.empty(t.spec.shape, dtype=t.tensor.dtype, device="meta")
        t.tensor = tensor


def _new_memory(size: int, large_pages: bool) -> torch.Tensor:
    """`size` bytes that begin with a page."""
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        page = LARGE_PAGE
        mapped = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a request, which not every system grants
            mapped.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
    else:
        page = PAGE
        memory = torch.empty(size + page, dtype=torch.uint8, device="cpu")
    start = -memory.data_ptr() % page
    return memory[start : start + size]


def _touch(block: torch.Tensor, workers: Workers) -> None:
    """Have the system provide the pages now, by several threads."""
    pages = block.numpy()
    workers.run(
        [partial(pages[at : at + PIECE_BYTES].fill, 0) for at in range(0, len(pages), PIECE_BYTES)]
    )


def _copy_jobs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Callable[[], None]]:
    """Large tensors in pieces, small ones together."""
    small = iter([pair for pair in pairs if 0 < pair[0].nbytes < SMALL_BYTES])
    for target, source in pairs:
        if target.nbytes >= SMALL_BYTES and source.is_contiguous():
            a, b, items = target.view(-1), source.view(-1), PIECE_BYTES // target.element_size()
            yield from (
                partial(_copy, [(a[at : at + items], b[at : at + items])])
                for at in range(0, len(a), items)
            )
        elif target.nbytes >= SMALL_BYTES:
            yield partial(_copy, [(target, source)])
    while some := list(islice(small, 1024)):
        yield partial(_copy, some)


@torch.no_grad()  # of this thread: nothing that is trained is to remember its copy
def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    alone = [pair for pair in pairs if pair[0].numel() < ALONE_ITEMS]
    if alone:
        torch._foreach_copy_([target for target, _ in alone], [source for _, source in alone])
    for target, source in pairs if len(alone) < len(pairs) else ():
        if target.numel() < ALONE_ITEMS:
            continue
        if source.is_contiguous():
            # Not torch's copy, which would start threads of its own in each of ours.
            np.copyto(words(target).numpy(), words(source).numpy())
        else:
            target.copy_(source)
