"""The state of one component in new memory: nothing live is needed to load it into."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, KeysView
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch

from ..arguments import check_threads, checked_options, shown
from ..errors import InvalidState, UnknownName
from ..format.layout import Box, LogicalTensor, volume
from ..format.manifest import MALFORMED, malformed
from ..format.tensorfile import tensor_nbytes
from ..format.values import Opaque, TensorRef, decode, key_leaves, revived
from ..state.containers import check_parts
from ..state.layout import synchronize
from ..state.modules import checked_device, checked_dtype
from ..state.tree import with_versions
from ..storage.chunks import default_threads
from .keys import matches
from .load import module_versions
from .placement import known_dtype, reads_into, substituted
from .reader import TensorRead
from .view import CheckpointView, StoredComponent, open_checkpoint, portions_of

Names = str | Collection[str] | Callable[[str], bool]

# Read at a time in the saved dtype, where another one is wanted.
CONVERTED_BYTES = 64 << 20


def load_state(
    url: str | os.PathLike[str],
    component: str = "model",
    *,
    keys: Names | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    copy: int = 0,
    io_threads: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Any:
    """The state of one component as it was saved, with whole torch tensors, however it was sharded.
    Nothing live is needed, and no process group: one process calls it.

    Only what is asked for is read, and all that is read is verified. Tied tensors are one tensor
    again. Memory beyond the result: about 64 MiB, and 8 MiB a thread.

    url: local path or fsspec URL of the checkpoint's folder, or a CheckpointInfo.
    component: text, its key (default "model").
    keys: names to load (default None: all): a name or pattern ("layers.0.*"), a list of them, or a
        function of each name that returns True or False. A name asks for all that lies below it.
    device: of the tensors (default "cpu"); on "meta" no tensor is read.
    dtype: torch.dtype or its name, that floating-point tensors are converted to; those of 8 bits
        stay as they are (default None: as they were saved).
    copy: int, which stored copy of PER_RANK, PER_GROUP or PER_NODE state (default 0).
    io_threads: int, threads that read (default None: one a core, at most 8).
    storage_options: dict for the filesystem of `url` (default None).

    Raises InvalidState (an argument), CheckpointNotFound, UnknownName (a KeyError) for a component,
    copy or key that is not there, CheckpointCorrupt, UnsupportedVersion, StorageError.
    """
    wanted = None if keys is None else _Names(keys)
    target = checked_device("device", device)
    kind = None if dtype is None else checked_dtype("dtype", dtype)
    threads = check_threads("io_threads", io_threads) or default_threads()
    checked_options("storage_options", storage_options)
    with open_checkpoint(url, storage_options) as view:
        view.check_copy(component, copy)
        stored = view.component(component, copy)
        file = f"{view.url}: component {component!r}"
        tree = decode(stored.tree, opaque=True, file=file)
        if wanted is not None:
            tree = wanted.chosen(tree, component, view.url)
        fresh = _Fresh(view, component, stored, target, kind)
        try:
            state = substituted(tree, fresh.leaf, fresh.container)
        except MALFORMED as error:
            what = f"{file}: stored values cannot be read"
            raise malformed(what, error, None, view.url) from None
        fresh.read(threads)
        state = revived(state, file)
        versions = module_versions(stored, file)
        if versions and type(state) is dict and "" in versions:
            state = OrderedDict(state)
        return with_versions(state, versions) if versions else state


class _Names:
    """The `keys` of a load_state. Raises InvalidState for what is neither of the three."""

    def __init__(self, keys: Any) -> None:
        self.function = keys if callable(keys) else None
        found = () if callable(keys) else (keys,) if isinstance(keys, str) else keys
        if not isinstance(found, list | tuple | set | frozenset | KeysView) or not (
            self.function or (found and all(isinstance(name, str) and name for name in found))
        ):
            raise InvalidState(
                "keys must be a name, a pattern, a list of them or a function of a name, not "
                f"{shown(keys)}"
            )
        self.patterns: list[str] = [*found]

    def chosen(self, tree: Any, component: str, url: str) -> Any:
        """The part of a state that is asked for. Raises UnknownName for a name or pattern that
        nothing has."""
        leaves = [*key_leaves(tree)]
        unused = set(self.patterns)
        taken = []
        for name, path, value in leaves:
            asking = {p for p in self.patterns if matches(p, name)}
            unused -= asking
            if asking or (self.function is not None and self._asks_for(name)):
                taken.append((path, value))
        if unused or not taken:
            raise self._nothing([name for name, _, _ in leaves], sorted(unused), component, url)
        if len(taken) == len(leaves):
            return tree  # in its own types
        part: Any = {}
        for path, value in taken:
            _put(part, path, value)
        return part

    def _asks_for(self, name: str) -> bool:
        assert self.function is not None
        try:
            answer = self.function(name)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise InvalidState(f"the function given as keys fails for {name!r} ({what})") from error
        if answer is not None and type(answer) is not bool:
            raise InvalidState(
                f"the function given as keys must give True or False; for {name!r} it gives "
                f"{shown(answer)}"
            )
        return bool(answer)

    def _nothing(
        self, names: list[str], unused: list[str], component: str, url: str
    ) -> UnknownName:
        asked = unused[0] if unused else None
        what = "the function given as keys" if asked is None else repr(asked)
        near = get_close_matches(asked or "", names, 3) if len(names) <= 5000 else []
        hint = f"did you mean {' or '.join(map(repr, near or names[:3]))}?"
        return UnknownName(
            f"{url}: component {component!r} has nothing that {what} asks for; {hint}",
            path=url,
            key=asked,
            available=names,
        )


def _put(tree: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


@dataclass(slots=True)
class _Fresh:
    """New tensors for stored ones, and what is to be read into them. converted: the numbers of
    tensors that are read in their own dtype first."""

    view: CheckpointView
    key: str
    stored: StoredComponent
    device: torch.device
    dtype: torch.dtype | None
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    direct: list[TensorRead] = field(default_factory=list)
    converted: list[int] = field(default_factory=list)

    def leaf(self, ref: TensorRef) -> Any:
        if not 0 <= ref.index < len(self.stored.tensors):
            raise ValueError(f"the tree refers to tensor {ref.index} of {len(self.stored.tensors)}")
        target = self.stored.tensors[ref.index].alias_of
        number = ref.index if target is None else target
        if number not in self.made:
            self.made[number] = self._new(number, self.stored.tensors[number], array=ref.numpy)
        tensor = self.made[number]
        return tensor.cpu().numpy() if ref.numpy and not tensor.is_meta else tensor

    def container(self, saved: Opaque) -> Opaque:
        """A tensor that is made of others, which stay in their own dtypes."""
        check_parts(saved.payload)
        dtype, self.dtype = self.dtype, None
        payload = substituted(saved.payload, self.leaf, self.container)
        self.dtype = dtype
        return Opaque(saved.codec, payload)

    def _new(self, number: int, tensor: LogicalTensor, *, array: bool) -> torch.Tensor:
        saved = known_dtype(self.view, self.key, tensor)
        floating = saved.is_floating_point and saved.itemsize > 1 and not array
        dtype = self.dtype if self.dtype is not None and floating else saved
        if self.device.type == "meta":
            return torch.empty(tensor.shape, dtype=dtype, device=self.device)
        whole: Box = ((0,) * len(tensor.shape), tensor.shape)
        # First that the bytes are there, then memory for them.
        self.view.check_files(p.file for p in self.stored.pieces(number, whole) if p.file)
        made = torch.empty(tensor.shape, dtype=dtype, device="cpu" if array else self.device)
        if dtype == saved:
            self.direct += reads_into(self.key, self.stored, number, whole, made)
        else:
            self.converted.append(number)
        return made

    def read(self, threads: int) -> None:
        synchronize({tensor.device for tensor in self.made.values()})
        self.view.files.read(self.direct, threads)
        for batch in self._batches():
            staged = [
                (self.made[number], box, torch.empty(box[1], dtype=dtype))
                for number, box, dtype in batch
            ]
            reads: list[TensorRead] = []
            for (number, box, _), (_, _, memory) in zip(batch, staged, strict=True):
                reads += reads_into(self.key, self.stored, number, box, memory)
            self.view.files.read(reads, threads)
            for tensor, (offset, shape), memory in staged:
                part = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
                tensor[part].copy_(memory)

    def _batches(self) -> Iterator[list[tuple[int, Box, torch.dtype]]]:
        """Boxes of tensors that are converted, as many at a time as may be in memory twice."""
        batch: list[tuple[int, Box, torch.dtype]] = []
        nbytes = 0
        for number in self.converted:
            tensor = self.stored.tensors[number]
            dtype = known_dtype(self.view, self.key, tensor)
            itemsize = tensor_nbytes(tensor.dtype, (1,))
            for slices in portions_of(tensor.shape, itemsize, CONVERTED_BYTES):
                shape = tuple(part.stop - part.start for part in slices)
                size = volume(shape) * itemsize
                if batch and nbytes + size > CONVERTED_BYTES:
                    yield batch
                    batch, nbytes = [], 0
                batch.append((number, (tuple(part.start for part in slices), shape), dtype))
                nbytes += size
        if batch:
            yield batch
