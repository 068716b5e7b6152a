"""Which parameters travel together, where they do not all travel at once."""

from __future__ import annotations

import re

from ..arguments import InvalidArgument
from .wire import Layout

__all__ = ["split_layout"]

_BLOCK = re.compile(r"^(.*?\.)?\d+(?=\.)")  # up to the first number: a block of a ModuleList


def split_layout(layout: Layout, number: int) -> tuple[Layout, ...]:
    """`number` fragments that hold every tensor once, the same on every machine.

    Whole blocks are dealt out in strides, so that each fragment has early and late ones; tensors
    outside of blocks go, the largest first, to the fragment that has least.

    Raises InvalidArgument where there are fewer blocks and tensors than fragments.
    """
    groups: dict[str, set[str]] = {}
    for spec in layout.specs:
        block = _BLOCK.match(spec.name)
        groups.setdefault(f"{block.group()}." if block else spec.name, set()).add(spec.name)
    if not 1 <= number <= len(groups):
        raise InvalidArgument(
            "num_fragments",
            number,
            f"the model has {len(groups)} parts that can travel by themselves",
            f"give a whole number from 1 to {len(groups)}",
        )
    blocks = sorted((name for name in groups if name.endswith(".")), key=_natural)
    size = {name: sum(s.elements for s in layout.select(groups[name]).specs) for name in groups}
    others = sorted((n for n in groups if not n.endswith(".")), key=lambda n: (-size[n], n))
    dealt: list[set[str]] = [set() for _ in range(number)]
    held = [0] * number
    for position, name in enumerate(blocks):
        dealt[position % number] |= groups[name]
        held[position % number] += size[name]
    for name in others:
        # An empty one first: every fragment has something.
        target = min(range(number), key=lambda n: (bool(dealt[n]), held[n], n))
        dealt[target] |= groups[name]
        held[target] += size[name]
    return tuple(layout.select(names) for names in dealt)


def _natural(name: str) -> list[tuple[int, str]]:
    """Block 10 after block 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
