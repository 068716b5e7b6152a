"""Live memory that several of the tensors to be loaded have in common, over all components.

One memory cannot hold two values. A module keeps its memory; an optimizer's or a plain dict's entry
that was saved with other bytes gets memory of its own. Tensors that overlap in part are read into
host memory first, and compared after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..state.layout import memory_span, same_view_key
from ..state.tree import TensorLeaf

__all__ = ["Held", "SharedMemory", "shared_memory"]

# Who keeps memory that several have: in this order.
MODULE, OPTIMIZER, SLICE, PLAIN, OTHER = range(5)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A live tensor of a component. order: of those above; OTHER: it is not read into."""

    component: str
    order: int
    tensor: TensorLeaf

    @property
    def place(self) -> tuple[str, str]:
        return self.component, self.tensor.name


@dataclass(slots=True)
class SharedMemory:
    """keepers: whose memory a tensor is that is the same view. contested: tensors that overlap
    others in part. others: what is not read into and shares memory with what is."""

    keepers: dict[tuple[str, str], Held] = field(default_factory=dict)
    contested: set[tuple[str, str]] = field(default_factory=set)
    others: list[tuple[Held, Held]] = field(default_factory=list)


def shared_memory(held: Iterable[Held]) -> SharedMemory:
    found = SharedMemory()
    for cluster in _clusters(held):
        kept: dict[tuple[object, ...] | None, Held] = {}
        for one in sorted((h for h in cluster if h.order != OTHER), key=lambda h: h.order):
            spec, memory = one.tensor.spec, one.tensor.tensor
            view = (same_view_key(memory), spec.global_shape, spec.box)
            first = kept.setdefault(view, one)
            if first is not one and first.component != one.component:
                found.keepers[one.place] = first
        if len(kept) > 1:
            found.contested.update(one.place for one in kept.values())
        for one in cluster:
            if one.order == OTHER:
                found.others += [
                    (one, keeper) for keeper in kept.values() if keeper.component != one.component
                ]
    return found


def _clusters(held: Iterable[Held]) -> Iterator[list[Held]]:
    """Tensors whose memory lies in one stretch, where there are several."""
    spans = sorted(
        (
            (span, n, one)
            for n, one in enumerate(held)
            if (span := memory_span(one.tensor.tensor)) is not None
        ),
        key=lambda s: s[:2],
    )
    cluster: list[Held] = []
    device, end = "", 0
    for (on, start, stop), _, one in spans:
        if on != device or start >= end:
            if len(cluster) > 1:
                yield cluster
            cluster, device, end = [], on, 0
        cluster.append(one)
        end = max(end, stop)
    if len(cluster) > 1:
        yield cluster
