"""What a rank is handed of a state of which it holds a part."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from ..format.checks import only_plain
from ..format.codecs import Opaque, keyed
from ..format.values import join_path

__all__ = ["SKIPPED", "has_other", "held_names", "pruned"]


class _Skipped:
    """In the place of a tensor that this rank does not want."""


SKIPPED = _Skipped()


def held_names(
    state: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[str, ...], int | None]]:
    """Parts of the names, made as those of tensors, of lists in the live state with their lengths,
    and of what is neither dict nor list."""
    if (items := keyed(state)) is not None:
        for key, item in items.items():
            yield from held_names(item, (*path, key))
        return
    is_list = type(state) in (list, tuple)
    yield tuple(join_path(path).split("/")) if path else (), len(state) if is_list else None
    for number, item in enumerate(state if is_list else ()):
        yield from held_names(item, (*path, number))


def has_other(held: Mapping[tuple[str, ...], int | None], name: str) -> bool:
    """Whether the live state has something else where the tensor `name` was saved: another value,
    or a list that ends before it."""
    parts = tuple(name.split("/"))
    for n in range(len(parts) + 1):
        if parts[:n] in held:
            length = held[parts[:n]]
            if (
                length is None
                or n == len(parts)
                or (parts[n].isdecimal() and int(parts[n]) >= length)
            ):
                return True
    return False


def _lacks(state: Any) -> bool:
    """Whether something was skipped at any depth."""
    if type(state) is Opaque:
        return _lacks(state.payload)
    items = (
        state.values() if isinstance(state, dict) else state if type(state) in (list, tuple) else ()
    )
    return state is SKIPPED or any(_lacks(item) for item in items)


def pruned(state: Any) -> Any:
    """The state without what was skipped, and without dicts that held nothing else."""
    if type(state) in (dict, OrderedDict, Counter):
        if only_plain(state.values()):
            return state
        kept = {key: pruned(item) for key, item in state.items()}
        result = {key: item for key, item in kept.items() if item is not SKIPPED}
        return SKIPPED if kept and not result else type(state)(result)
    if type(state) is Opaque and keyed(state) is not None:
        kept = pruned(state.payload)
        return SKIPPED if kept is SKIPPED else Opaque(state.codec, kept)
    if type(state) is Opaque:
        return SKIPPED if _lacks(state.payload) else state
    if type(state) in (list, tuple) and not only_plain(state):
        return type(state)(None if (item := pruned(i)) is SKIPPED else item for i in state)
    return state
