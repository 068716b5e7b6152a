"""Everything that can save or load a dict of CPU tensors: the raw system calls, ours, and the
peers.

Used by `python -m benchmarks save`, `load` and the memory measurement. A peer is imported when it
is first used. Every `save` is durable when it returns: file contents and folder are fsynced, by the
saver or by us.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .frame import Kind
from .ground import MIB, fsync_tree, memory_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "LOADERS",
    "SAVERS",
    "Loader",
    "Saver",
    "State",
    "cores",
    "dcp_errors",
    "in_threads",
    "missing_package",
]

State = Mapping[str, "torch.Tensor"]
PIECE = 4 * MIB
# A safetensors file of this state begins with about this much header. The raw writes leave room for
# it, because the place of the data matters: at multiples of large powers of two some kernels fill
# the page cache in huge pages, which was three times slower on a virtual machine whose host has to
# provide them.
HEADER = 6184


@dataclass(frozen=True)
class Saver:
    """`save(state, folder)` into an empty folder."""

    name: str
    save: Callable[[State, Path], None]
    kind: Kind = "peer"
    needs: str | None = None  # the package it comes from

    @property
    def missing(self) -> str | None:
        return missing_package(self.needs)


@dataclass(frozen=True)
class Loader:
    """`load(live, folder)` fills the live tensors in place from what the saver of the name
    `saved_by` wrote."""

    name: str
    load: Callable[[State, Path], None]
    saved_by: str
    kind: Kind = "peer"
    needs: str | None = None

    @property
    def missing(self) -> str | None:
        return missing_package(self.needs)


def missing_package(name: str | None) -> str | None:
    """Why a row is empty: the package is not installed. None when it is there."""
    return (
        f"not installed: pip install -c constraints.txt {name}"
        if name and find_spec(name) is None
        else None
    )


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _pieces(state: State, start: int = HEADER) -> list[tuple[int, memoryview]]:
    """(offset in the file, bytes) of all tensors one after another, in pieces of 4 MiB."""
    found, at = [], start
    for tensor in state.values():
        view = memory_of(tensor)
        found += [(at + n, view[n : n + PIECE]) for n in range(0, len(view), PIECE)]
        at += len(view)
    return found


def in_threads(threads: int, work: Callable[[int], None]) -> None:
    if threads == 1:
        work(0)
        return
    errors: list[OSError] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except OSError as error:
            errors.append(error)

    started = [threading.Thread(target=guarded, args=(n,)) for n in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


def raw_save(threads: int) -> Callable[[State, Path], None]:
    """pwrite from the tensors' memory to one file by `threads` threads, then fsync: the machine's
    own limit."""

    def save(state: State, folder: Path) -> None:
        pieces = _pieces(state)
        fd = os.open(folder / "raw.bin", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)

        def work(number: int) -> None:
            for offset, view in pieces[number::threads]:
                done = 0
                while done < len(view):
                    done += os.pwrite(fd, view[done:], offset + done)

        try:
            in_threads(threads, work)
            os.fsync(fd)
        finally:
            os.close(fd)
        _fsync_folder(folder)

    return save


def direct_save(state: State, folder: Path) -> None:
    """As raw_save with two threads, past the page cache (O_DIRECT) through aligned buffers. Not a
    limit of the targets; shows what the disk gives where the page cache costs."""
    pieces = _pieces(state, 0)
    fd = os.open(folder / "raw.bin", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o644)
    end = pieces[-1][0] + len(pieces[-1][1])

    def work(number: int) -> None:
        buffer = memoryview(mmap.mmap(-1, PIECE))
        for offset, view in pieces[number::2]:
            buffer[: len(view)] = view
            length = -(-len(view) // 4096) * 4096
            os.pwrite(fd, buffer[:length], offset)

    try:
        in_threads(2, work)
        os.ftruncate(fd, end)
        os.fsync(fd)
    finally:
        os.close(fd)
    _fsync_folder(folder)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def ours_save(state: State, folder: Path) -> None:
    from ckptcore import CheckpointManager

    with CheckpointManager(folder) as manager:
        manager.save(1, {"model": dict(state)})


def torch_save(state: State, folder: Path) -> None:
    import torch

    torch.save(dict(state), folder / "state.pt")
    fsync_tree(folder)


def safetensors_save(state: State, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(state), folder / "model.safetensors")
    fsync_tree(folder)


@contextmanager
def dcp_errors() -> Iterator[None]:
    """Its CheckpointException is a BaseException, which would end the whole run; and it warns when
    used alone."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise RuntimeError(f"CheckpointException: {error}") from error


def dcp_save(state: State, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with dcp_errors():
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    _fsync_folder(folder)


def dcp_best_save(state: State, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    # Its SAFETENSORS serialization copies the whole state and is far slower.
    writer = dcp.FileSystemWriter(folder, thread_count=cores(), single_file_per_rank=True)
    with dcp_errors():
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
    _fsync_folder(folder)


def torch_checkpointing_save(state: State, folder: Path) -> None:
    with _torch_checkpointing_manager() as manager:
        manager.save(str(folder / "step"), {"model": dict(state)})
    fsync_tree(folder)


@contextmanager
def _torch_checkpointing_manager() -> Iterator[object]:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(
        use_direct_io=False
    )  # its default fails on ext4 here
    manager = config.build()
    try:
        yield manager
    finally:
        manager.close()


SAVERS = [
    Saver("raw write+fsync, 1 thread", raw_save(1), "limit"),
    Saver("raw write+fsync, 2 threads", raw_save(2), "limit"),
    Saver("ckptcore save", ours_save, "ours"),
    Saver("torch.save + fsync", torch_save),
    Saver("safetensors save_file + fsync", safetensors_save, needs="safetensors"),
    Saver("dcp.save, default", dcp_save),
    Saver(f"dcp.save, {cores()} threads", dcp_best_save),
    Saver(
        "torch_checkpointing sync + fsync", torch_checkpointing_save, needs="torch_checkpointing"
    ),
    Saver("raw O_DIRECT, 2 threads", direct_save, "note"),
]


def raw_load(threads: int) -> Callable[[State, Path], None]:
    """preadv straight into the live tensors. One thread is the limit that the target names."""

    def load(state: State, folder: Path) -> None:
        pieces = _pieces(state)
        fd = os.open(folder / "raw.bin", os.O_RDONLY)

        def work(number: int) -> None:
            for offset, view in pieces[number::threads]:
                done = 0
                while done < len(view):
                    got = os.preadv(fd, [view[done:]], offset + done)
                    if got == 0:
                        raise OSError("the raw file ends too early")
                    done += got

        try:
            in_threads(threads, work)
        finally:
            os.close(fd)

    return load


def ours_load(state: State, folder: Path) -> None:
    from ckptcore import CheckpointManager

    with CheckpointManager(folder) as manager:
        manager.load({"model": _Live(state)})


class _Live:
    """A component whose tensors are loaded in place, as those of a module are."""

    def __init__(self, state: State) -> None:
        self.state = dict(state)

    def state_dict(self) -> dict[str, object]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        _copy_into(self.state, state)


def _copy_into(live: State, loaded: Mapping[str, torch.Tensor]) -> None:
    """What load_state_dict of a module does; free where the loader filled the live tensors
    themselves."""
    for name, tensor in live.items():
        if loaded[name].data_ptr() != tensor.data_ptr():
            tensor.copy_(loaded[name])


def safetensors_load(state: State, folder: Path) -> None:
    from safetensors.torch import load_file

    _copy_into(state, load_file(folder / "model.safetensors"))


def dcp_load(state: State, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with dcp_errors():
        dcp.load(dict(state), checkpoint_id=folder, no_dist=True)


def torch_load(state: State, folder: Path) -> None:
    import torch

    _copy_into(state, torch.load(folder / "state.pt", mmap=False, weights_only=True))


def torch_checkpointing_load(state: State, folder: Path) -> None:
    with _torch_checkpointing_manager() as manager:
        loaded = manager.load(str(folder / "step"), into={"model": dict(state)})  # type: ignore[attr-defined]
        _copy_into(state, loaded["model"])


LOADERS = [
    Loader("raw preadv, 1 thread", raw_load(1), "raw write+fsync, 1 thread", "limit"),
    Loader("raw preadv, 2 threads", raw_load(2), "raw write+fsync, 1 thread", "note"),
    Loader("ckptcore load, verified", ours_load, "ckptcore save", "ours"),
    Loader(
        "safetensors load_file + copy",
        safetensors_load,
        "safetensors save_file + fsync",
        needs="safetensors",
    ),
    Loader("dcp.load", dcp_load, "dcp.save, default"),
    Loader("torch.load + copy", torch_load, "torch.save + fsync"),
    Loader(
        "torch_checkpointing load",
        torch_checkpointing_load,
        "torch_checkpointing sync + fsync",
        needs="torch_checkpointing",
    ),
]
