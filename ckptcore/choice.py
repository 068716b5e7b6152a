"""Which checkpoint of a root is meant: the newest, the best, a step; and what a run may be restored
from.

Where nodes share no storage, what is there is agreed on by all ranks first, and what is done is
done on every node.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any, TypeVar

from .catalog.branches import newest_run
from .catalog.catalog import clean_up, delete_all, scan, sweep
from .catalog.folder import (
    LOOKS,
    CheckpointInfo,
    delete_checkpoint,
    pin_checkpoint,
    still_there,
    unpin_checkpoint,
)
from .catalog.retention import RetentionPolicy, surplus
from .errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    InvalidState,
    RanksDisagree,
    StorageError,
    UnsupportedVersion,
)
from .loading.report import PARTLY_OVERWRITTEN, LoadReport
from .loading.view import CheckpointView, Problem
from .nodes.agreement import Agreed, StorageMode, leads, look, node_name, own_node
from .ranks.communicator import Communicator
from .storage.base import Storage
from .storage.urls import join_url, split_url

__all__ = ["Root", "load_chosen", "newest_that_loads"]

T = TypeVar("T")
Wanted = Callable[[], int | str]
Choose = Callable[[list[CheckpointInfo], int | str], CheckpointInfo]

# What the storage says of bytes that are lost, and of a file that went, or became something else,
# meanwhile: another checkpoint may still be whole. Anything else (no permission, no connection) is
# no verdict on this one.
_LOST = frozenset({errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR})


class Root:
    """The root of a run as its ranks see it. Where nodes share no storage (mode "node") it is one
    on every node: what lies there is agreed on, and what is done is done by one rank of each node.
    Then all is for every rank to call."""

    def __init__(self, comm: Communicator, storage: Storage, mode: StorageMode) -> None:
        self.comm, self.storage, self.mode = comm, storage, mode

    def scan(self) -> list[CheckpointInfo]:
        """Every checkpoint-like entry, ordered by (step, commit sequence), for callers that
        conclude from what is missing."""
        return scan(self.storage, sure=True)

    @property
    def storages(self) -> list[Storage]:
        """Where its checkpoints may be."""
        return [self.storage]

    def named(self, url: str) -> tuple[Storage, str] | None:
        """The storage and folder of what is called `url` here, if that lies in one of
        `storages`."""
        around, folder = split_url(url)
        return next(
            ((s, folder) for s in self.storages if s.at(folder) == join_url(around, folder)), None
        )

    def place(self, name: str) -> tuple[Storage, str]:
        """Where an entry of `scan` lies: a storage, and its folder there."""
        return self.storage, name

    def last_sequence(self) -> int:
        """The highest commit sequence that is known of elsewhere."""
        return 0

    def look(self) -> Agreed:
        """What lies there: by this rank alone, or for all nodes."""
        if self.mode == "node":
            return look(self.comm, self.storage, sure=True, joining=True)
        infos = self.entries()
        return Agreed(infos, newest_run(infos), 0, None)

    def meet_and_look(
        self,
        meet: Callable[[Callable[[Any], Any]], tuple[T, Any]],
        choose: Callable[[list[CheckpointInfo]], Any],
    ) -> tuple[T, Agreed]:
        """What `meet` makes on every rank, and what rank 0 chooses from what lies there."""
        if self.mode == "node":
            made, _ = meet(lambda _: None)
            return made, self.look_again(choose)
        made, chosen = meet(lambda _: choose(self.scan()))
        return made, Agreed([], None, 0, chosen)

    def look_again(self, choose: Callable[[list[CheckpointInfo]], Any]) -> Agreed:
        """What rank 0 chooses from what lies there now. On every rank."""
        if self.mode == "node":
            return look(self.comm, self.storage, choose, everyone=False, sure=True)
        chosen = self.comm.together("look", lambda: None, lambda _: choose(self.scan()))
        return Agreed([], None, 0, chosen)

    def act(
        self, what: str, wanted: Wanted, choose: Choose, work: Callable[[CheckpointInfo], Any]
    ) -> list[Any]:
        """Do `work` with the checkpoint that is `wanted`: on rank 0, or on one rank of each node.
        On every rank.

        What it returns there, which must be plain values, is for all; and what one raises, all
        raise. Raises RanksDisagree for different steps.
        """

        def same(told: list[int | str]) -> int | str:
            if wrong := [rank for rank, which in enumerate(told) if which != told[0]]:
                calls = (
                    f"rank 0 calls for a {what} of step {told[0]}, rank {wrong[0]} for one of "
                    f"step {told[wrong[0]]}"
                )
                raise RanksDisagree(calls, ranks=wrong)
            return told[0]

        if self.mode == "shared":
            done = self.comm.together(
                what, wanted, lambda told: work(choose(self.entries(), same(told))), joining=True
            )
            return [done]
        which = self.comm.together(what, wanted, same, joining=True)
        seen = look(self.comm, self.storage, lambda infos: choose(infos, which).name, sure=True)
        info = next(info for info in seen.infos if info.name == seen.here(seen.chosen))
        results: list[Any] = self.comm.together(
            what, lambda: work(info) if leads(self.comm, self.mode) else None, lambda found: found
        )
        return results

    def entries(self) -> list[CheckpointInfo]:
        """Those of `scan`, of each commit one."""
        return self.scan()

    def pin(self, wanted: Wanted, choose: Choose) -> None:
        self.act("pin", wanted, choose, lambda info: self._each(info, pin_checkpoint))

    def unpin(self, wanted: Wanted, choose: Choose) -> None:
        self.act("unpin", wanted, choose, lambda info: self._each(info, unpin_checkpoint))

    def delete(self, wanted: Wanted, choose: Choose) -> None:
        """Raises InvalidState for a checkpoint that is pinned, StorageError."""

        def work(info: CheckpointInfo) -> None:
            if info.pinned:
                raise InvalidState(f"{info.url} is pinned; unpin it before it is deleted")
            self._delete(info)

        self.act("deletion", wanted, choose, work)

    def _delete(self, info: CheckpointInfo) -> None:
        self._each(info, delete_checkpoint)

    def _each(self, info: CheckpointInfo, work: Callable[[Storage, str], None]) -> None:
        """Do `work` with each copy of a checkpoint."""
        work(self.storage, info.name)

    def verify(self, wanted: Wanted, choose: Choose, io_threads: int) -> list[Problem]:
        """Read and check every byte of a checkpoint, here or on all nodes."""

        def work(info: CheckpointInfo) -> list[list[Any]]:
            view = CheckpointView(*self.place(info.name))
            found = view.verify(io_threads)
            if (
                found
                and self.mode == "shared"
                and not still_there(view.storage, view.folder, view.manifest)
            ):
                raise CheckpointNotFound(
                    f"{info.url} was deleted or replaced while it was verified", path=info.url
                )
            if self.mode == "node":
                where = node_name(self.comm.nodes, own_node(self.comm))
                found = [
                    replace(problem, message=f"{where}: {problem.message}") for problem in found
                ]
            return [list(astuple(problem)) for problem in found]

        found = self.act("verification", wanted, choose, work)
        return [Problem(*row) for rows in found for row in rows or ()]

    def clean_up(
        self,
        comm: Communicator,
        policy: RetentionPolicy | None,
        run_id: str,
        saved: CheckpointInfo,
        tell: Callable[[str], None],
        deleted: Callable[[CheckpointInfo], None],
        listed: Sequence[CheckpointInfo] | None = None,
    ) -> None:
        """Retention and sweeping after the commit of `saved`, on every node; rank 0 decides,
        talking over `comm`. What fails is told, and no error. What is of this run and not on all
        nodes goes, too. listed: what the save has found in shared storage."""
        if self.mode == "shared":
            if comm.rank == 0:
                with self.comm.keep_alive():
                    clean_up(self.storage, policy, run_id, saved, tell, deleted, listed)
            return

        def choose(infos: list[CheckpointInfo]) -> list[str]:
            return [info.name for info in surplus(infos, policy, run_id, saved.name)]

        try:
            seen = look(comm, self.storage, choose, everyone=False)
            if leads(comm, self.mode):
                names = {seen.here(name) for name in seen.chosen}
                told = deleted if comm.rank == 0 else lambda _: None
                stray = [info for info in seen.infos if info.status == "elsewhere"]
                mine = [
                    i for i in stray if i.run_id == run_id and i.name != saved.name and not i.pinned
                ]
                with self.comm.keep_alive():
                    delete_all(
                        self.storage,
                        [info for info in seen.infos if info.name in names],
                        tell,
                        told,
                    )
                    delete_all(self.storage, mine, tell, lambda _: None)
                    sweep(
                        self.storage,
                        [info for info in seen.infos if info not in stray],
                        run_id,
                        tell,
                    )
        except Exception as error:  # a policy of the user's own may raise anything
            tell(f"{self.storage.url}: cleaning up after step {saved.step} failed: {error!r}")


def _nothing(*_: Any) -> None:
    return None


def first_that_loads(names: Sequence[str], load: Callable[[str], LoadReport]) -> LoadReport:
    """What `load` says of the first copy that is whole. Raises what it raises of the last one."""
    for name in names[:-1]:
        try:
            return load(name)
        except (CheckpointCorrupt, CheckpointNotFound):
            pass
    return load(names[-1])


def load_chosen(
    seen: Agreed,
    look_again: Callable[[], Agreed],
    load: Callable[[Agreed, str, int | None], LoadReport],
    *,
    whole: bool,
) -> LoadReport:
    """What `load` says of a `choice`. Where that was deleted or replaced meanwhile, the next choice
    is loaded.

    whole: the next one replaces all that was read of the one before. Raises what `load` raises of a
    checkpoint that is still the one to choose, and what `look_again` raises.
    """
    for _ in range(LOOKS):
        names, step, digest = seen.chosen
        try:
            return first_that_loads(names, lambda name: load(seen, name, step))  # noqa: B023
        except (CheckpointCorrupt, CheckpointNotFound, StorageError) as error:
            if isinstance(error, StorageError) and error.errno not in _LOST:
                raise
            try:
                after = look_again()
            except CheckpointNotFound as gone:  # deleted while it was read, and nothing follows
                if PARTLY_OVERWRITTEN in str(error):
                    gone.message += PARTLY_OVERWRITTEN
                raise gone from error
            if after.chosen[2] in (digest, "") or (PARTLY_OVERWRITTEN in str(error) and not whole):
                raise
            seen = after
    raise StorageError(
        f"{names[0]} and what came after it were deleted while they were read", errno=errno.EAGAIN
    )


def newest_that_loads(
    seen: Agreed, look_again: Callable[[], Agreed], load: Callable[[Agreed, str], LoadReport]
) -> tuple[LoadReport | None, dict[str, str]]:
    """What `load` says of the first of `candidates` that verifies; and which were passed over
    before it, and why.

    After a failure the root is looked at again: what was deleted while it was read has a newer one
    to follow. Where it has none, and an older one is loaded, it counts as passed over. That there
    is none takes two equal looks. Raises what `load` raises beside damage, and StorageError where
    it cannot be known whether there is a newer one.
    """
    failed: dict[tuple[str, str], str] = {}
    older: dict[str, set[str]] = {}  # than one that failed, by its name
    before: list[list[str]] | None = None
    for _ in range(LOOKS):
        skipped: dict[str, str] = {}
        for name, status, reason, digest in seen.chosen:
            if status == "unreadable":
                raise StorageError(
                    f"{name} might be the newest checkpoint and cannot be read: {reason}", path=name
                )
            if status == "committed" and (name, digest) not in failed:
                break
            skipped[name] = failed.get((name, digest), reason)
        else:
            if seen.chosen == before:
                return None, skipped
            before = seen.chosen
            seen = look_again()
            continue
        try:
            report = load(seen, name)
        except (CheckpointCorrupt, CheckpointNotFound, UnsupportedVersion, StorageError) as error:
            if isinstance(error, StorageError) and error.errno not in _LOST:
                raise
            failed[name, digest] = str(error)
            names = [candidate[0] for candidate in seen.chosen]
            older[name] = {*names[names.index(name) + 1 :]}
            seen = look_again()
        except CheckpointError as error:
            if touched := [n for (n, _), why in failed.items() if why.endswith(PARTLY_OVERWRITTEN)]:
                error.message += (
                    f"; live state was partly overwritten by {touched[0]}, which is damaged, "
                    "before that"
                )
            raise
        else:
            gone = {lost: why for (lost, _), why in failed.items() if name in older[lost]}
            skipped = {
                n: why.replace(PARTLY_OVERWRITTEN, "") for n, why in (gone | skipped).items()
            }
            report.skipped = skipped
            return report, skipped
    raise StorageError("checkpoints are deleted faster than they can be read", errno=errno.EAGAIN)
