"""What a component held before a load, for a load that is all or nothing."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch

from ..format.checks import containers_copied
from ..state.adapters import PlainState, metadata_of
from ..state.component import StateComponent
from ..state.layout import Shard, copy_into, words
from ..state.tree import StateSnapshot

__all__ = ["Snapshot"]


class Snapshot:
    """A private copy of a component's state: bytes of its tensors in host memory, and all else."""

    def __init__(self, component: StateComponent, state: Any, live: StateSnapshot) -> None:
        self.component = component
        self.state = containers_copied(state, _private)
        # As integers, which every dtype can be copied as.
        self.bytes = [
            (t.tensor, words(t.tensor).to("cpu", copy=True))
            for t in live.tensors
            if t.spec.alias_of is None
        ]
        if (metadata := metadata_of(component.stateful)) is not None:
            self.state = OrderedDict(self.state)
            self.state._metadata = metadata

    def restore(self) -> None:
        """Give the tensors their bytes, and the component its state, back. Raises whatever the
        component raises."""
        for tensor, before in self.bytes:
            items = (
                torch.view_as_complex(before.view(torch.float64))
                if tensor.dtype == torch.complex128
                else before.view(tensor.dtype)
            )
            if tensor.shape != items.shape:  # a module's own code has resized it
                tensor.data = items.to(tensor.device)
            else:
                copy_into(tensor, items)
        if isinstance(self.component.stateful, PlainState):  # all of it: a part puts itself back
            self.component.stateful.strict = True
            self.component.stateful.put_back(self.state, {})
        else:
            self.component.stateful.load_state_dict(self.state)


def _private(leaf: Any) -> Any:
    """Tensors stay themselves: their bytes are kept apart."""
    if isinstance(leaf, torch.Tensor | Shard):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # what cannot be copied is not copied
        return leaf
