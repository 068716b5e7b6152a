"""One checkpoint, all ranks: the flow of a save and of a load, from top to bottom."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from .errors import CheckpointWarning, InvalidState, RanksDisagree
from .loading.apply import Loading, LoadReport
from .loading.join import join_load
from .loading.keys import Keys
from .ranks.communicator import Communicator
from .ranks.nodes import StorageMode
from .ranks.store import shared_communicator
from .root import CheckpointInfo
from .saving.flow import Saving
from .saving.join import SaveRequest
from .saving.workers import Workers
from .state.adapters import as_components
from .state.component import StateComponent, StatefulProvider
from .storage.base import Storage, open_storage
from .storage.urls import split_url

__all__ = ["CheckpointCoordinator"]

JOIN_SECONDS = 5.0


class CheckpointCoordinator:
    """Saves and loads single checkpoints of the given components, on all ranks together.

    state_components: a list of StateComponent, a dict of objects, or a StatefulProvider (whose process groups are
    used too). process_groups: name -> lists of ranks, ProcessGroup, or DeviceMesh dimension. comm: by default the
    running torch.distributed job. io_threads: how many threads read and write, by default as many as the process may
    use cores, at most 8. writers: "split" spreads the bytes of replicated state over its ranks, "lowest" does not. workers:
    the threads that write, where somebody keeps them from save to save. storage_mode: "node" where every node has
    storage of its own under the same name, and "shared" where all ranks see the same one.
    """

    def __init__(
        self,
        state_components: Any,
        process_groups: Mapping[str, Any] | None = None,
        *,
        comm: Communicator | None = None,
        io_threads: int | None = None,
        writers: Literal["split", "lowest"] = "split",
        workers: Workers | None = None,
        storage_mode: StorageMode = "shared",
    ) -> None:
        self.comm = comm or shared_communicator()
        self.components: list[StateComponent] = as_components(state_components, self.comm.world_size)
        if process_groups is None and isinstance(state_components, StatefulProvider):
            process_groups = state_components.get_process_groups()
        self.process_groups = dict(process_groups or {})
        self.io_threads = io_threads or default_io_threads()
        self._own_workers = workers is None
        self.workers = workers or Workers(self.io_threads)
        if writers not in ("split", "lowest"):
            raise InvalidState(f"writers must be 'split' or 'lowest', not {writers!r}")
        self.writers = writers
        if storage_mode not in ("shared", "node"):
            raise InvalidState(f"storage_mode must be 'shared' or 'node', not {storage_mode!r}")
        self.storage_mode: StorageMode = storage_mode

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        step: int = 0,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        storage_options: dict[str, Any] | None = None,
    ) -> CheckpointInfo:
        """Save to the folder `path`, which becomes the checkpoint. Raises what `save` raises."""
        parent, name = split_url(os.fspath(path))
        storage = open_storage(parent, storage_options)
        request = SaveRequest(step, run_id=secrets.token_hex(8), metadata=metadata or {}, overwrite=overwrite)
        return self.save(storage, name, request)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        strict: bool = True,
        *,
        cast: bool = False,
        transactional: bool = False,
        keys: Keys | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> LoadReport:
        """Load from the folder `path`. Arguments, and what is raised, are those of `CheckpointManager.load`."""
        storage = open_storage(path, storage_options)
        return self.load(storage, "", strict=strict, cast=cast, transactional=transactional, keys=keys)

    def save(self, storage: Storage, name: str, request: SaveRequest) -> CheckpointInfo:
        """Save the components as the checkpoint `name` of `storage`. A failure leaves nothing behind.

        What one rank raises, all raise: CheckpointExists, UnsupportedValue, InvalidState and ReplicationMismatch before
        a byte is written; StorageError, NoSpace; JoinTimeout, RankLost, RanksDisagree.
        """
        saving = self.saving(storage, name, request)
        try:
            saving.begin()
            info = saving.finish(self.comm)
        except BaseException:
            with suppress(CheckpointWarning):  # as an error it must not take the place of the one that counts
                warn_all(saving.told)
            raise
        finally:
            if self._own_workers:
                self.workers.close(JOIN_SECONDS)
        warn_all(saving.told)
        return info

    def saving(self, storage: Storage, name: str, request: SaveRequest) -> Saving:
        """A save that has not begun, for those who do more between its steps."""
        return Saving(
            self.comm, self.components, self.process_groups, self.writers, storage, name, request, self.workers,
            self.storage_mode)  # fmt: skip

    def load(
        self,
        storage: Storage,
        name: str,
        *,
        strict: bool = True,
        cast: bool = False,
        transactional: bool = False,
        broadcast: bool = False,
        step: int | None = None,
        keys: Keys | None = None,
        whole: bool = False,
    ) -> LoadReport:
        """Load the components from the checkpoint `name` of `storage`, verified, on all ranks or on none.

        broadcast: what every rank needs is read by one of them and passed on, for storage that is slow or billed.
        step: the one that the checkpoint must be of, where it is known; another is CheckpointCorrupt.
        keys: see `CheckpointManager.load`. whole: components of the checkpoint that were not given are an error.

        What one rank raises, all raise: CheckpointNotFound, CheckpointCorrupt, UnsupportedVersion, StateMismatch,
        StorageError. Live state is not touched before structure, sizes and every rank's agreement are checked.
        """
        comm = self.comm
        view, partitions, selection = join_load(
            comm, storage, name, self.components, self.process_groups, self.storage_mode, keys
        )
        loading = Loading(
            view,
            self.components,
            comm,
            partitions,
            self.io_threads,
            strict=strict,
            cast=cast,
            transactional=transactional,
            step=step,
            keys=selection,
            whole=whole,
        )
        on_no_rank = comm.together("check", loading.check, loading.compared)
        comm.together("judge", lambda: loading.judge(on_no_rank), _nothing)
        if broadcast:
            loading.read_once()
        comm.together("read", loading.read, _nothing)
        comm.together("apply", loading.apply, _nothing)
        return loading.report


def meet(
    comm: Communicator,
    make: Callable[[], CheckpointCoordinator],
    call: Callable[[], tuple[str, Any, Any]],
    decide: Callable[[Sequence[Sequence[Any]]], Any],
) -> tuple[CheckpointCoordinator, Any]:
    """Make a coordinator on every rank, for the same call everywhere; rank 0 decides what all need to know first.

    call: what this rank calls for, in words that must be equal on all ranks, and two more things for `decide`. What
    fails on one rank (a state that makes no sense, an argument), fails on all. Raises RanksDisagree.
    """
    made: list[CheckpointCoordinator] = []

    def local() -> list[Any]:
        made.append(make())
        return [*call()]

    def agree(calls: list[list[Any]]) -> Any:
        wrong = [rank for rank, call in enumerate(calls) if call[0] != calls[0][0]]
        if wrong:
            what = f"rank 0 calls for a {calls[0][0]}, rank {wrong[0]} for a {calls[wrong[0]][0]}"
            raise RanksDisagree(what, ranks=wrong)
        return decide(calls)

    decided = comm.together("checkpoint", local, agree, joining=True)
    return made[0], decided


def _nothing(*_: Any) -> None:
    return None


def warn_all(texts: Iterable[str]) -> None:
    for text in texts:
        warnings.warn(text, CheckpointWarning, stacklevel=3)


def default_io_threads() -> int:
    return min(8, max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2))
