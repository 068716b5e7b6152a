"""What a rank is handed of a state of which it holds a part."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from ..format.codecs import Opaque
from ..format.values import join_path

__all__ = ["SKIPPED", "leaf_names", "pruned"]


class _Skipped:
    """In the place of a tensor that this rank does not want."""


SKIPPED = _Skipped()


def leaf_names(state: Any, path: tuple[Any, ...] = ()) -> Iterator[str]:
    """Names of what is no dict in the live state, as those of tensors are made."""
    if isinstance(state, Mapping):
        for key, item in state.items():
            yield from leaf_names(item, (*path, key))
    else:
        yield join_path(path) if path else "value"


def _lacks(state: Any) -> bool:
    """Whether something was skipped at any depth."""
    if type(state) is Opaque:
        return _lacks(state.payload)
    items = state.values() if isinstance(state, dict) else state if type(state) in (list, tuple) else ()
    return state is SKIPPED or any(_lacks(item) for item in items)


def pruned(state: Any) -> Any:
    """The state without what was skipped, and without dicts that held nothing else."""
    if type(state) in (dict, OrderedDict, Counter):
        kept = {key: pruned(item) for key, item in state.items()}
        result = {key: item for key, item in kept.items() if item is not SKIPPED}
        return SKIPPED if kept and not result else type(state)(result)
    if type(state) is Opaque:
        return SKIPPED if _lacks(state.payload) else state
    if type(state) in (list, tuple):
        return type(state)(None if (item := pruned(i)) is SKIPPED else item for i in state)
    return state
