"""The state of one component in new memory: nothing live is needed to load it into."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from ..arguments import Names, answer_of, check_threads, checked_options, shown
from ..errors import InvalidState, UnknownName
from ..format.layout import Box, LogicalTensor, MeshLayout, volume
from ..format.manifest import MALFORMED, malformed
from ..format.values import Opaque, TensorRef, decode, key_leaves, revived
from ..state.containers import check_parts
from ..state.layout import (
    box_on,
    codes_of,
    dtensor_of,
    is_mesh,
    is_placement,
    placements_of,
    synchronize,
)
from ..state.modules import checked_device, checked_dtype
from ..state.tree import with_versions
from ..storage.chunks import default_threads
from .keys import tree_of
from .load import module_versions
from .placement import Fill, Substitution, direct_reads, known_dtype, read_converted
from .view import CheckpointView, StoredComponent, open_checkpoint

Wanted = str | Collection[str] | Callable[[str], bool]
Placements = Sequence[Any] | Callable[[str, torch.Size], Sequence[Any] | None]


def load_state(
    url: str | os.PathLike[str],
    component: str = "model",
    *,
    keys: Wanted | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    copy: int = 0,
    mesh: Any = None,
    placements: Placements | None = None,
    io_threads: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Any:
    """The state of one component as it was saved, with whole torch tensors, however it was sharded.
    Nothing live is needed, and no process group: one process calls it. With `mesh` each rank of it
    does, reads its own part, and waits for no other.

    Only what is asked for is read, and all that is read is verified. Tied tensors are one tensor
    again. Memory beyond the result: about 64 MiB, and 8 MiB a thread.

    url: local path or fsspec URL of the checkpoint's folder, or a CheckpointInfo.
    component: text, its key (default "model").
    keys: names to load (default None: all): a name or pattern ("layers.0.*"), a list of them, or a
        function of each name that returns True or False. A name asks for all that lies below it.
    device: of the tensors (default "cpu", or that of `mesh`); on "meta" no tensor is read.
    dtype: torch.dtype or its name, that floating-point tensors are converted to; those of 8 bits
        stay as they are (default None: as they were saved).
    copy: int, which stored copy of PER_RANK, PER_GROUP or PER_NODE state (default 0).
    mesh: DeviceMesh, on which tensors that were saved as DTensors become DTensors again (default
        None: whole tensors). Others are whole on each rank.
    placements: of them on `mesh`: a list of torch's placements, or a function of each name, within
        the component, and shape, of sharded tensors or not, that returns such a list, or None for a
        whole tensor. By default as saved; on a mesh of more dimensions replicated along the first
        ones, and on one of one dimension cut along the first dimension that was cut.
    io_threads: int, threads that read (default None: one a core, at most 8).
    storage_options: dict for the filesystem of `url` (default None).

    Raises InvalidState (an argument), CheckpointNotFound, UnknownName (a KeyError) for a component,
    copy or key that is not there, CheckpointCorrupt, UnsupportedVersion, StorageError.
    """
    wanted = None if keys is None else Names("keys", keys)
    layout = _layout(mesh, placements)
    if layout is None:
        target = checked_device("device", "cpu" if device is None else device)
    else:
        target = layout.checked_device(device)
    kind = None if dtype is None else checked_dtype("dtype", dtype)
    threads = check_threads("io_threads", io_threads) or default_threads()
    checked_options("storage_options", storage_options)
    with open_checkpoint(url, storage_options) as view:
        view.check_copy(component, copy)
        stored = view.component(component, copy)
        file = f"{view.url}: component {component!r}"
        tree = decode(stored.tree, opaque=True, file=file)
        if wanted is not None:
            tree = _part_of(tree, wanted, component, view.url)
        fresh = _Fresh(view, component, stored, target, kind, layout)
        try:
            state = fresh.of(tree)
        except MALFORMED as error:
            what = f"{file}: stored values cannot be read"
            raise malformed(what, error, None, view.url) from None
        synchronize({fill.memory.device for fill in fresh.fills + fresh.converted})
        view.files.read(direct_reads(fresh.fills), threads)
        read_converted(view.files, fresh.converted, threads)
        state = revived(state, file)
        versions = module_versions(stored, file)
        if versions and type(state) is dict and "" in versions:
            state = OrderedDict(state)
        return with_versions(state, versions) if versions else state


def _part_of(tree: Any, wanted: Names, component: str, url: str) -> Any:
    """The part of a state that is asked for. Raises UnknownName for a name or pattern that nothing
    has, InvalidState for what the function gives."""
    leaves = [*key_leaves(tree)]
    taken = {}
    for name, path, value in leaves:
        answer = wanted.answer(name)
        if answer is not None and type(answer) is not bool:
            raise InvalidState(
                f"the function given as keys must give True or False; for {name!r} it gives "
                f"{shown(answer)}"
            )
        if answer:
            taken[path] = value
    if taken and not wanted.unused:
        return tree if len(taken) == len(leaves) else tree_of(taken)  # all of it in its own types
    names = [name for name, _, _ in leaves]
    asked = min(wanted.unused, default=None)
    what = "the function given as keys" if asked is None else repr(asked)
    near = get_close_matches(asked or "", names, 3) if len(names) <= 5000 else []
    hint = f"did you mean {' or '.join(map(repr, near or names[:3]))}?"
    raise UnknownName(
        f"{url}: component {component!r} has nothing that {what} asks for; {hint}",
        path=url,
        key=asked,
        available=names,
    )


def _layout(mesh: Any, placements: Any) -> _Layout | None:
    if mesh is None:
        if placements is not None:
            raise InvalidState("placements are those on a mesh: give mesh=, too")
        return None
    if not is_mesh(mesh):
        raise InvalidState(f"mesh must be a DeviceMesh, not {shown(mesh)}")
    return _Layout(mesh, placements)


@dataclass(frozen=True, slots=True)
class _Layout:
    """How tensors become DTensors on a mesh. placements: as they were given."""

    mesh: Any
    placements: Any

    def checked_device(self, device: Any) -> torch.device:
        kind = self.mesh.device_type
        target = checked_device("device", kind if device is None else device)
        if target.type not in (kind, "meta"):
            raise InvalidState(
                f"device is {shown(device)}, and the mesh is one of {kind}: leave device out"
            )
        return target

    def codes(self, tensor: LogicalTensor) -> tuple[str, ...] | None:
        """The placements of a tensor, as the format has them; None for one that stays whole.
        Raises InvalidState."""
        sharded, given = isinstance(tensor.layout, MeshLayout), self.placements
        if callable(given):
            given = answer_of("placements", given, tensor.name, torch.Size(tensor.shape))
            if given is None:
                return None
        elif not sharded:
            return None
        if given is None:
            return self._as_saved(tensor)
        return self._checked(tensor, given)

    def _as_saved(self, tensor: LogicalTensor) -> tuple[str, ...]:
        assert isinstance(tensor.layout, MeshLayout)
        saved: tuple[str, ...] = tensor.layout.placements
        more: int = self.mesh.ndim - len(saved)
        if more >= 0:
            return ("R",) * more + saved
        if self.mesh.ndim == 1:
            cut = [code for code in saved if code != "R"]
            return (f"S{cut[0][1:]}" if cut else "R",)
        raise InvalidState(
            f"{tensor.name!r} was saved with {len(saved)} placements, and the mesh has "
            f"{self.mesh.ndim} dimensions: give placements="
        )

    def _checked(self, tensor: LogicalTensor, given: Any) -> tuple[str, ...]:
        fits = isinstance(given, list | tuple) and len(given) == self.mesh.ndim
        if not fits or not all(map(is_placement, given)):
            raise InvalidState(
                f"placements of {tensor.name!r} must be a list of {self.mesh.ndim} of torch's "
                f"placements, one for each dimension of the mesh, not {shown(given)}"
            )
        codes = codes_of(self.mesh, given)
        if any(code != "R" and not 0 <= int(code[1:]) < len(tensor.shape) for code in codes):
            raise InvalidState(
                f"placements {given} cut a dimension that {tensor.name!r} of shape "
                f"{list(tensor.shape)} has not"
            )
        return codes

    def dtensor(
        self, local: torch.Tensor, codes: tuple[str, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        stride = torch.empty(shape, device="meta").stride()
        return dtensor_of(
            local, self.mesh, placements_of(self.mesh, codes), torch.Size(shape), stride
        )


class _Fresh(Substitution):
    """New tensors for stored ones, and what is to be read into them."""

    def __init__(
        self,
        view: CheckpointView,
        key: str,
        stored: StoredComponent,
        device: torch.device,
        dtype: torch.dtype | None,
        layout: _Layout | None,
    ) -> None:
        self.view, self.key, self.stored = view, key, stored
        self.device, self.dtype, self.layout = device, dtype, layout
        self.made: dict[int, torch.Tensor] = {}  # by number
        self.fills: list[Fill] = []
        self.converted: list[Fill] = []

    def leaf(self, ref: TensorRef) -> Any:
        target = self.stored.tensors[ref.index].alias_of
        number = ref.index if target is None else target
        if number not in self.made:
            self.made[number] = self._new(number, self.stored.tensors[number], array=ref.numpy)
        tensor = self.made[number]
        return tensor.cpu().numpy() if ref.numpy and not tensor.is_meta else tensor

    def container(self, saved: Opaque) -> Opaque:
        """A tensor that is made of others, which stay in their own dtypes, and whole."""
        check_parts(saved.payload)
        before = self.dtype, self.layout
        self.dtype = self.layout = None
        payload = self.of(saved.payload)
        self.dtype, self.layout = before
        return Opaque(saved.codec, payload)

    def _new(self, number: int, tensor: LogicalTensor, *, array: bool) -> torch.Tensor:
        saved, layout = known_dtype(self.view, self.key, tensor), self.layout
        floating = saved.is_floating_point and saved.itemsize > 1 and not array
        dtype = self.dtype if self.dtype is not None and floating else saved
        codes = None if layout is None or array else layout.codes(tensor)
        box = tensor.whole
        if layout is not None and codes is not None:
            nothing: Box = ((0,), (0,))  # of a rank that is not in the mesh
            box = box_on(layout.mesh, codes, tensor.shape) or nothing
        read = self.device.type != "meta" and volume(box[1]) > 0
        if read:
            # First that the bytes are there, then memory for them.
            self.view.check_files(p.file for p in self.stored.pieces(number, box) if p.file)
        made = torch.empty(box[1], dtype=dtype, device="cpu" if array else self.device)
        if read:
            fills = self.fills if dtype is saved else self.converted
            fills.append(Fill(self.key, self.stored, number, saved, box, made))
        if layout is None or codes is None:
            return made
        return layout.dtensor(made, codes, tensor.shape)
