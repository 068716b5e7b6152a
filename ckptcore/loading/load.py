"""Loading one checkpoint into live state, on all ranks or on none, in three rounds.

`check`: everything is compared first, on every rank, and rank 0 judges for all. `read`: every byte
is read into its place, and verified. `apply`: the complete states are handed over.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..arguments import check_flags
from ..catalog.catalog import Location
from ..catalog.domain import StorageDomains
from ..errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    LoadFailed,
    RanksDisagree,
    StateMismatch,
)
from ..format.digest import content_hash
from ..format.manifest import MANIFEST_NAME, CheckpointManifest
from ..format.values import decode, revived
from ..ranks.communicator import Communicator, view_of_group
from ..ranks.communicator import partitions as partitions_of
from ..ranks.messages import message
from ..state.component import StateComponent, check_equal, is_optimizer, metadata_of
from ..state.layout import Shard, copy_into, memory_span, synchronize, words
from ..state.modules import ModelState, one_walk
from ..state.plain import PlainState, only_own
from ..state.tree import (
    DEFAULT_VERSIONS,
    Differences,
    capture,
    collector_paused,
    differences,
    with_versions,
)
from .broadcast import read_shared
from .keys import Asked, Keys, Rename, Selection, chosen_components
from .placement import (
    How,
    LoadedComponent,
    Partitions,
    ReadPlan,
    SharedMemory,
    direct_reads,
    read_converted,
    same_bytes,
    shared_memory,
    state_with_destinations,
    stored_copy_for,
)
from .reader import TensorRead
from .view import CheckpointView, StoredComponent

# Ends the message of a load that failed halfway; no longer true when another checkpoint was loaded
# over it.
PARTLY_OVERWRITTEN = (
    "; live state is partly overwritten, do not train on it (transactional=True avoids this)"
)


class LoadedValues(dict[str, Any]):
    """Loaded plain values by component key: the live objects, which have what was loaded.

    One that was emptied since is given as a copy of what was loaded: `d.clear();
    d.update(report.values["d"])` loses nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[str, Any] = {}

    def keep(self, key: str, value: Any) -> None:
        self[key], self._copies[key] = value, _containers_copied(value)

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        emptied = isinstance(value, dict | list | set | deque) and not value
        return (self._copies.get(key) or value) if emptied else value


@dataclass(slots=True, repr=False)
class LoadReport:
    """What a load or restore did. As text it is one line.

    fresh: bool, there was no checkpoint and nothing was touched.
    step: int, of the checkpoint; None for a fresh start.
    path: text, path or URL of the checkpoint; None for a fresh start.
    manifest: CheckpointManifest; None for a fresh start.
    values: dict of component key -> loaded plain values; dicts, lists and the like are those of the
        state, filled in place.
    missing: list of full names that only the live state has (with strict=False).
    unexpected: list of full names that only the checkpoint has (with strict=False).
    cast: dict of full name -> "saved dtype -> live dtype".
    skipped: dict of newer entries that `restore` passed over -> why.
    """

    fresh: bool = False
    step: int | None = None
    path: str | None = None
    manifest: CheckpointManifest | None = None
    values: LoadedValues = field(default_factory=LoadedValues)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        more = [f"skipped {', '.join(self.skipped)}"] if self.skipped else []
        if self.fresh or self.manifest is None:
            return "; ".join(["nothing restored: a fresh start", *more])
        counts = {"missing": self.missing, "unexpected": self.unexpected, "cast": self.cast}
        more = [f"{len(names)} {what}" for what, names in counts.items() if names] + more
        name = (self.path or "").rstrip("/").rpartition("/")[2]
        count = len(self.manifest.components)
        what = f"step {self.step}, {count} component{'s' if count != 1 else ''}"
        return "; ".join([f"restored {name} ({what})", *more])

    def __repr__(self) -> str:
        return f"<LoadReport: {self}>"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """How to load.

    strict: names that only one side has are an error. cast: dtypes may differ, and are converted.
    transactional: live state is as before after any failure, on all ranks; it takes host memory for
    both states. host_first: all is read and verified in host memory before live state is touched,
    which `transactional` implies. broadcast: what every rank needs is read by one of them and
    passed on. keys: load only these; rename: what is read from where. whole: components of the
    checkpoint that were not given are an error. Raises InvalidState.
    """

    strict: bool = True
    cast: bool = False
    transactional: bool = False
    host_first: bool = False
    broadcast: bool = False
    keys: Keys | None = None
    rename: Rename | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        check_flags(strict=self.strict, cast=self.cast, transactional=self.transactional)
        self.selection()

    def selection(self) -> Selection | None:
        """None where all is loaded under its own name."""
        if self.keys is None and self.rename is None:
            return None
        return Selection(self.keys, self.rename)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Who loads, and what into. process_groups: by name, as they were given."""

    comm: Communicator
    domains: StorageDomains
    components: Sequence[StateComponent]
    process_groups: Mapping[str, Any]
    io_threads: int

    def call(self, words: str, request: LoadRequest) -> LoadCall:
        """What this rank brings to the join: `words` say what it calls for. Raises InvalidState."""
        rank, size = self.comm.rank, self.comm.world_size
        views = {n: view_of_group(n, ranks, rank, size) for n, ranks in self.process_groups.items()}
        selection = request.selection()
        keys = None if selection is None else selection.text
        asked = {"components": [c.key for c in self.components], "keys": keys}
        return LoadCall(words + self.domains.words, asked, views)


@message
@dataclass(frozen=True, slots=True)
class LoadCall:
    """What a rank brings to the join of a load. words: what is called for; asked: how, which must
    be the same on all ranks; groups: what it knows of each process group."""

    words: str
    asked: dict[str, Any]
    groups: dict[str, list[list[int]]]


def same_call(calls: Sequence[LoadCall]) -> dict[str, list[list[int]]]:
    """The partitions of the process groups, where all ranks make the same call. Raises
    RanksDisagree, InvalidState."""
    check_equal("loads", calls)
    return partitions_of([call.groups for call in calls])


@one_walk()
def load(
    job: LoadJob,
    partitions: Partitions,
    location: Location,
    request: LoadRequest,
    step: int | None = None,
) -> LoadReport:
    """Load the components from the checkpoint at `location`, verified, on all ranks or on none. A
    call of all ranks, which have joined.

    partitions: of all ranks, by name of the process group. step: the one that the checkpoint must
    be of, where it is known; another is CheckpointCorrupt.

    What one rank raises, all raise: CheckpointNotFound, CheckpointCorrupt, UnsupportedVersion,
    StateMismatch, StorageError, LoadFailed. Live state is not touched before structure, sizes and
    every rank's agreement are checked.
    """
    comm, threads = job.comm, job.io_threads
    with comm.round("check") as r:
        view = _opened(job, location, step)
        loading = _Loading(job, partitions, view, request)
        reports = r.gather(loading.match())
        if r.leads:
            r.verdict = _judged(job, view, request, reports, loading.lacking)
    loading.learn(r.verdict)
    reads, plan = loading.reads, loading.plan
    if request.broadcast:
        with loading.touching():
            reads = read_shared(comm, view.files, reads, threads)
    with comm.round("read"), loading.touching():
        synchronize({fill.memory.device for fill in plan.fills})
        view.files.read(reads, threads)
        if plan.converted:
            read_converted(view.files, plan.converted, threads)
    try:
        with comm.round("apply"):
            loading.apply()
    except BaseException as error:
        if request.transactional:
            loading.put_back(error)
        raise
    return loading.report


def _opened(job: LoadJob, location: Location, step: int | None) -> CheckpointView:
    """Raises CheckpointNotFound, CheckpointCorrupt, UnsupportedVersion, StorageError,
    InvalidState."""
    try:
        view = CheckpointView(location.storage, location.folder)
    except CheckpointNotFound as error:
        error.message = job.domains.without(error.message)
        raise
    job.domains.check_part(view.manifest, view.url)
    if step not in (None, view.manifest.step):
        raise CheckpointCorrupt(
            f"{view.url} is of step {view.manifest.step}, and step {step} was found there before: "
            "it was replaced meanwhile",
            path=view.url,
            file=MANIFEST_NAME,
            kind="format",
            expected=step,
            actual=view.manifest.step,
        )
    return view


# Whether what was saved fits what is live, on all ranks.


@message
@dataclass(frozen=True, slots=True)
class MatchReport:
    """How what was saved fits on one rank.

    digest, checkpoint: of the manifest, and its id. loads: whether there is anything to load.
    missing: live names that the checkpoint lacks -> the saved names that they were to be read from.
    unexpected: names that only the checkpoint has. mismatched: name -> forms, saved and live.
    unmatched: components of which no name is there; doubtful: those of which no name is here, and
    that is an error unless other ranks have some of them. lacking: by sharded component, hashes of
    saved names that this rank does not have -> whether that is wrong if no rank has them. asked:
    what `keys` asked for.
    """

    digest: str
    checkpoint: str
    loads: bool
    missing: dict[str, str]
    unexpected: list[str]
    mismatched: dict[str, tuple[str, str]]
    unmatched: list[str]
    doubtful: list[str]
    lacking: dict[str, dict[bytes, bool]]
    asked: Asked | None

    def unwanted(self, nowhere: Mapping[str, Sequence[str]]) -> list[str]:
        """All that only the checkpoint has, with what no rank has: names by component."""
        return self.unexpected + [
            f"{key}/{name}"
            for key, names in nowhere.items()
            for name in names
            if self.lacking.get(key, {}).get(_hash(name), True)
        ]


def _hash(name: str) -> bytes:
    return content_hash(name.encode("utf-8", "surrogatepass"))


def _judged(
    job: LoadJob,
    view: CheckpointView,
    request: LoadRequest,
    reports: Sequence[MatchReport],
    lacking: Mapping[str, Mapping[str, bool]],
) -> dict[str, list[str]]:
    """On rank 0: the saved names of sharded components that no rank has. lacking: those that rank 0
    lacks, among which they are.

    Raises CheckpointCorrupt where ranks see other checkpoints, RanksDisagree where `keys` are not
    the same everywhere, StateMismatch for what must not be loaded.
    """
    _same_checkpoint(job, view, reports)
    if reports[0].asked is not None:
        _same_keys(job, view, request, [r.asked for r in reports if r.asked is not None])
    nowhere = {}
    for key, names in lacking.items():
        left = {_hash(name): name for name in names}
        for report in reports[1:]:
            theirs = report.lacking.get(key, {})
            left = {hashed: name for hashed, name in left.items() if hashed in theirs}
        nowhere[key] = [*left.values()]
    found = {rank: _misfit(job, view, request, r, nowhere) for rank, r in enumerate(reports)}
    wrong = {rank: error for rank, error in found.items() if error is not None}
    if wrong:
        rank, error = next(iter(wrong.items()))
        if job.comm.world_size > 1:
            error.causes = {r: f"StateMismatch: {e.message}" for r, e in wrong.items()}
            others = ", ".join(str(r) for r in wrong if r != rank)
            more = f" (also failed: rank{'s' if len(wrong) > 2 else ''} {others})" if others else ""
            error.message = f"rank {rank}: {error.message}{more}"
        raise error
    return nowhere


def _same_checkpoint(job: LoadJob, view: CheckpointView, reports: Sequence[MatchReport]) -> None:
    """Raises CheckpointCorrupt where ranks of one storage domain read different manifests, or
    domains have parts of different checkpoints."""
    first = reports[0].checkpoint
    for ranks in job.domains.ranks(job.comm):
        lowest, what = reports[ranks[0]], ""
        if wrong := [rank for rank in ranks if reports[rank].digest != lowest.digest]:
            what = f"ranks {wrong} read another manifest than rank {ranks[0]}: do they see the same"
            what += " storage?"
        elif lowest.checkpoint != first:
            what = f"ranks {list(ranks)} have a part of another checkpoint ({lowest.checkpoint})"
            what += f" than rank 0 ({first})"
        if what:
            raise CheckpointCorrupt(f"{view.url}: {what}", path=view.url, kind="digest")


def _same_keys(
    job: LoadJob, view: CheckpointView, request: LoadRequest, asked: Sequence[Asked]
) -> None:
    for key, (names, chosen) in asked[0].digests.items():
        for rank, other in enumerate(asked):
            # Ranks may have other names, of one stage of a pipeline, say.
            theirs = other.digests.get(key)
            if theirs and theirs[0] == names and theirs[1] != chosen:
                raise RanksDisagree(
                    f"keys ask for other names of component {key!r} on rank {rank} than on rank 0",
                    ranks=[rank],
                )
    unused = [p for p in asked[0].unused if all(p in other.unused for other in asked)]
    if (unused and request.strict) or not any(other.chosen for other in asked):
        which = ", ".join(map(repr, unused)) or "the function given as keys"
        live = _some([f"{c.key}/..." for c in job.components])
        what = f"{which} asks for nothing that the live state has; names there: {live}"
        raise StateMismatch(
            f"{view.url}: {what}", path=view.url, missing=unused, unexpected=[], mismatched={}
        )


def _misfit(
    job: LoadJob,
    view: CheckpointView,
    request: LoadRequest,
    report: MatchReport,
    nowhere: Mapping[str, Sequence[str]],
) -> StateMismatch | None:
    """Of what does not fit on one rank, the worst."""
    saved, by_keys = view.manifest.components, report.asked is not None
    # A load is of the components that were given; a restore is of all that was saved.
    found = report.unwanted(nowhere)
    unexpected = [n for n in found if "/" in n or (request.whole and saved[n].required)]
    missing, sources = list(report.missing), list(report.missing.values())
    # Of a sharded component, no rank has any of the names.
    unmatched = report.unmatched + [
        key
        for key in report.doubtful
        if len(report.lacking.get(key, ())) == len(nowhere.get(key, ()))
    ]
    if by_keys and missing and not report.loads:
        what = f": nothing that keys ask for is in the checkpoint, not {_some(sources)}"
    elif unmatched or not (by_keys or any(c.key in saved for c in job.components)):
        of = f"component {unmatched[0]!r}" if unmatched else "the state"
        what = f": nothing in {of} has a name that the checkpoint has; live: {_some(missing)}"
        what += f"; saved: {_some(found)}"
    elif report.mismatched:
        (name, (then, now)), *others = report.mismatched.items()
        same_shape = "[" in then and then.split("[")[1:] == now.split("[")[1:]
        what = f": {name!r} was saved as {then}, the live state has {now}"
        what += f" and {len(others)} more" if others else ""
        what += "; cast=True converts dtypes" if same_shape else ""
    elif request.strict and (missing or unexpected):
        what = (
            f" and the live state have different keys: missing in the checkpoint: {_some(sources)}"
        )
        what += f"; unexpected in the checkpoint: {_some(unexpected)}"
        what += "; strict=False loads what both have"
        if request.whole and not missing and all(name in saved for name in unexpected):
            keys = [component.key for component in job.components]
            what += f", and only={keys[:5]!r} loads these components alone"
    else:
        return None
    return StateMismatch(
        f"{view.url}{what}",
        path=view.url,
        missing=missing,
        unexpected=unexpected,
        mismatched=report.mismatched,
    )


class _Prepared(NamedTuple):
    """What is handed over to a component in the end. versions: of the modules in it, by path."""

    live: LoadedComponent
    state: Any
    versions: dict[str, Any] | None


def _comes_last(prepared: _Prepared) -> bool:
    """Whether it is handed over after the others."""
    return bool(getattr(prepared.live.component.stateful, "restore_last", False))


class _Loading:
    """One load on one rank: what was matched, what is read, and how far it came."""

    def __init__(
        self, job: LoadJob, partitions: Partitions, view: CheckpointView, request: LoadRequest
    ) -> None:
        manifest = view.manifest
        self.job, self.partitions, self.view, self.request = job, partitions, view, request
        self.keys = request.selection()
        self.report = LoadReport(step=manifest.step, path=view.url, manifest=manifest)
        self.prepared: dict[str, _Prepared] = {}
        self.plan, self.shared = ReadPlan(), SharedMemory()
        self.reads: list[TensorRead] = []
        # Of sharded components: saved names that this rank lacks, and whether that is wrong if no
        # rank has them; and those that no rank has.
        self.lacking: dict[str, dict[str, bool]] = {}
        self.nowhere: dict[str, list[str]] = {}
        self.unmatched: list[str] = []
        self.doubtful: list[str] = []
        # How far `apply` came.
        self.begun: list[str] = []
        self.before: dict[str, StateBefore] = {}

    @collector_paused()
    def match(self) -> MatchReport:
        """Match saved and live state, and check the files that are needed. Live state is untouched.

        Raises StateMismatch, CheckpointCorrupt, StorageError.
        """
        manifest, report, plan = self.view.manifest, self.report, self.plan
        live = [*self._components()]
        self.shared = shared_memory(live)
        for component in live:
            self._prepare(component)
        if not (self.unmatched or plan.mismatched):
            self.reads = direct_reads(plan.fills)
            files = {read.entry.file for read in self.reads if read.entry.file}
            self.view.check_files(files, others=True)
        renamed = {} if self.keys is None else self.keys.renamed
        return MatchReport(
            manifest.digest,
            manifest.checkpoint_id,
            bool(self.prepared),
            {name: renamed.get(name, name) for name in report.missing},
            report.unexpected,
            plan.mismatched,
            self.unmatched,
            self.doubtful,
            {k: {_hash(n): wrong for n, wrong in ns.items()} for k, ns in self.lacking.items()},
            None if self.keys is None else self.keys.asked,
        )

    def learn(self, nowhere: dict[str, list[str]]) -> None:
        """What the ranks have found out together: the saved names that none of them has."""
        self.nowhere = {key: nowhere.get(key, []) for key in self.lacking}
        for key, names in self.nowhere.items():
            wrong = self.lacking[key]
            self.report.unexpected += [f"{key}/{name}" for name in names if wrong.get(name, True)]
        self.report.cast = self.plan.cast

    def _components(self) -> Iterator[LoadedComponent]:
        """What is to be loaded: all that both sides have, or what `keys` ask for."""
        view, saved, comm = self.view, self.view.manifest.components, self.job.comm
        given = {c.key for c in self.job.components}
        others = [key for key in saved if key not in given]
        if self.keys is not None:
            yield from chosen_components(
                self.keys, view, self.job.components, comm, self.partitions, self.report.missing
            )
            read = {name.partition("/")[0] for name in self.keys.renamed.values()}
            asked = [key for key in others if key not in read and self.keys.asks_for(key)]
            self.report.unexpected = asked if self.request.whole else []
            return
        self.report.unexpected = others
        for component in self.job.components:
            key = component.key
            if key not in saved:
                self.report.missing += [key] if component.required else []
                continue
            number = stored_copy_for(view.manifest, component, comm, self.partitions)
            if number is not None:
                sharded = component.sharded or saved[key].pattern == "SHARDED"
                yield LoadedComponent.of(component, view.component(key, number), sharded)

    def _prepare(self, live: LoadedComponent) -> None:
        """The saved state with destinations in place of the tensors, none of them read yet."""
        owner, key, request = live.owner, live.key, self.request
        # On one rank nothing belongs to others, and who has no names yet is handed all of it.
        named = isinstance(owner, ModelState) or is_optimizer(owner) or bool(live.snapshot.tensors)
        skip = live.sharded and (self.job.comm.world_size > 1 or named)
        file = f"{self.view.url}: component {key!r}"
        versions = module_versions(live.stored, file)
        values = decode(live.stored.tree, opaque=True, file=file)
        if isinstance(owner, torch.amp.GradScaler) and not values and live.state:
            raise StateMismatch(
                f"{file}: the scaler was saved with nothing in it (enabled=False), and the live "
                "one is on; load without it, and save the next checkpoint with it",
                path=self.view.url,
            )
        # Names and values first, so that nothing is allocated for a state that does not fit.
        self._compare(live, values, skip)
        if skip:
            self.lacking.setdefault(key, {}).update(dict.fromkeys(live.unexpected, True))
        else:
            self.report.unexpected += [f"{key}/{name}" for name in live.unexpected]
        how = How(
            skip,
            cast=request.cast or getattr(owner, "casts", False),
            in_portions=not request.broadcast,
            host_first=request.host_first or request.transactional,
        )
        state = state_with_destinations(values, self.view, live, self.shared, self.plan, how)
        self.prepared[key] = _Prepared(live, state, versions)

    def _compare(self, live: LoadedComponent, saved: Any, sharded: bool) -> None:
        """Note which names fit, as the owner sees it; of a part, what is missing or unexpected was
        found out when it was chosen."""
        key, owner = live.key, live.owner
        whole = owner is live.component.stateful
        try:
            if isinstance(owner, PlainState):
                owner.strict = self.request.strict
                found = owner.differences(saved, sharded=sharded and whole)
            elif hasattr(owner, "differences"):
                found = owner.differences(saved)
            elif sharded:
                found, whole = differences(saved, live.state), True
            else:
                return
        except StateMismatch as error:
            error.message = f"{self.view.url}: component {key!r}: {error.message}"
            raise
        self.plan.mismatched.update({f"{key}/{n}": f for n, f in found.mismatched.items()})
        if not whole:
            found = Differences([], [], 1, {})
        self.report.missing += [f"{key}/{name}" for name in found.missing]
        unmatched = not found.matched and bool(found.missing or found.unexpected)
        if sharded:
            tolerated = dict.fromkeys(found.tolerated, False)
            self.lacking[key] = dict.fromkeys(found.unexpected, True) | tolerated
            self.doubtful += [key] if unmatched else []
            return
        names = [*found.unexpected, *(() if self.request.strict else found.tolerated)]
        self.report.unexpected += [f"{key}/{name}" for name in names]
        self.unmatched += [key] if unmatched else []

    @contextmanager
    def touching(self) -> Iterator[None]:
        """What fails in it says that live tensors were read into, where they were."""
        try:
            yield
        except CheckpointError as error:
            if self.plan.overwritten and not error.message.endswith(PARTLY_OVERWRITTEN):
                error.message += PARTLY_OVERWRITTEN
            raise

    def apply(self) -> None:
        """Hand the complete states over, random streams last. Raises LoadFailed where a component
        refuses its own."""
        order = sorted(self.prepared.values(), key=_comes_last)
        if self.request.transactional:
            self.before = {each.live.key: StateBefore(each.live) for each in order}
        done: dict[int, tuple[Any, Any]] = {}
        for prepared in order:
            key = prepared.live.key
            self.begun.append(key)
            try:
                for live, staged in self.plan.staged.get(key, ()):
                    copy_into(live, staged)
                self._hand_over(prepared, done)
            except Exception as error:
                raise self._failed(key, error) from error
        self._check_shared()

    def _hand_over(self, prepared: _Prepared, done: dict[int, tuple[Any, Any]]) -> None:
        live, versions = prepared.live, prepared.versions
        key, owner, stateful = live.key, live.owner, live.component.stateful
        state = revived(prepared.state, f"{self.view.url}: component {key!r}")
        if isinstance(owner, ModelState):
            owner.strict = self.request.strict and owner is stateful
            if versions is not None and isinstance(state, dict):
                state = OrderedDict(state)
                state._metadata = versions.get("", {})  # type: ignore[attr-defined]
        elif versions and not isinstance(owner, PlainState):
            state = with_versions(state, versions)
        if isinstance(owner, PlainState) and owner is stateful:
            if key in self.nowhere:
                state = only_own(state, owner.value, set(self.nowhere[key]).__contains__)
            owner.put_back(state, done)
        else:
            stateful.load_state_dict(state)
        if isinstance(owner, PlainState):
            self.report.values.keep(key, owner.loaded)

    def _failed(self, key: str, error: Exception) -> CheckpointError:
        """What to raise where a component refused its state: with its name, and what that
        leaves."""
        touched = [k for k in self.prepared if k in self.plan.overwritten or k in self.begun]
        left = [k for k in self.prepared if k not in touched]
        after = (
            ""
            if self.request.transactional
            else f"; overwritten by now, {key!r} perhaps in part: {_some(touched)}; as before: "
            f"{_some(left)}; do not train on it (transactional=True puts everything back)"
        )
        if isinstance(error, CheckpointError) and not isinstance(error, StateMismatch):
            error.message += after
            return error
        rank = self.job.comm.rank
        facts = {"path": self.view.url, "component": key, "rank": rank, "overwritten": touched}
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, StateMismatch):
            text = error.message
            facts |= {n: getattr(error, n) for n in ("missing", "unexpected", "mismatched")}
        where = f"{self.view.url}: component {key!r} on rank {rank} could not be loaded"
        return LoadFailed(f"{where}: {text}{after}", **facts)

    def _check_shared(self) -> None:
        """Raise LoadFailed where memory that several tensors have in common does not hold what was
        saved of each."""
        wrong = [
            name
            for name, live, staged in self.plan.contested
            if not torch.equal(words(live).cpu(), words(staged.to(live.dtype)))
        ]
        also = ""
        for one, keeper in () if wrong else self.shared.others:
            state = one.of.component.stateful.state_dict()
            tensors = capture(one.of.key, state, sharded=True).tensors
            now = next((t for t in tensors if t.spec.name == one.tensor.spec.name), None)
            span = memory_span(keeper.tensor.tensor)
            kept = None if now is None else memory_span(now.tensor)
            if span is None or kept is None or span[0] != kept[0]:
                continue
            if span[1] < kept[2] and kept[1] < span[2] and not same_bytes(one, keeper):
                wrong, also = ["/".join(one.name)], f" with '{'/'.join(keeper.name)}'"
                break
        if wrong:
            raise LoadFailed(
                f"{self.view.url}: {wrong[0]!r} shares memory{also} in the live state, and other "
                "bytes were saved of it: one memory cannot hold two values; make it a copy of its "
                "own before the load" + ("" if self.request.transactional else PARTLY_OVERWRITTEN),
                path=self.view.url,
                component=wrong[0].split("/")[0],
                rank=self.job.comm.rank,
                overwritten=list(self.prepared),
            )

    def put_back(self, error: BaseException) -> None:
        """Undo what `apply` did on this rank, and say so in `error`."""
        failed = []
        for key in reversed(self.begun):
            try:
                self.before[key].restore()
            except BaseException as reason:  # a second interrupt must not leave the rest as it is
                failed.append(f"{key!r} ({type(reason).__name__}: {reason})")
        text = "; live state is as it was before the load"
        if failed:
            text = "; the others were put back as they were, and these could not be: "
            text += f"{', '.join(failed)}; do not train on it"
        if isinstance(error, CheckpointError):
            error.message += text
        else:
            error.add_note(text[2:])


def module_versions(stored: StoredComponent, file: str) -> dict[str, Any] | None:
    """Versions of modules by path and name. Raises CheckpointCorrupt."""
    if stored.versions in (None, DEFAULT_VERSIONS):
        return None if stored.versions is None else {"": {}}
    found = decode(stored.versions, file=file)
    tables = found.values() if isinstance(found, dict) else [None]
    if not all(
        isinstance(table, dict) and all(isinstance(facts, dict) for facts in table.values())
        for table in tables
    ):
        raise CheckpointCorrupt(
            f"{file}: the versions of its modules are not a table", kind="format"
        )
    return dict(found)


class StateBefore:
    """What a component held before a load that is all or nothing: a private copy of the bytes of
    its tensors, in host memory, and of all else."""

    def __init__(self, live: LoadedComponent) -> None:
        self.stateful = live.component.stateful
        self.state = _containers_copied(live.state, _private)
        # As integers, which every dtype can be copied as.
        self.bytes = [
            (t.tensor, words(t.tensor).to("cpu", copy=True))
            for t in live.snapshot.tensors
            if t.spec.alias_of is None
        ]
        if (metadata := metadata_of(self.stateful)) is not None:
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
        if isinstance(self.stateful, PlainState):  # all of it: a part puts itself back
            self.stateful.strict = True
        self.stateful.load_state_dict(self.state)


def _containers_copied(value: Any, leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """`value` with dicts, lists, tuples, sets and deques of its own, and `leaf(item)` for
    everything else."""
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = _containers_copied(item, leaf)
        return made
    if type(value) in (list, tuple, set):
        return type(value)(_containers_copied(item, leaf) for item in value)
    if type(value) is deque:
        return deque((_containers_copied(item, leaf) for item in value), value.maxlen)
    return leaf(value)


def _private(leaf: Any) -> Any:
    """Tensors stay themselves: their bytes are kept beside."""
    if isinstance(leaf, torch.Tensor | Shard):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # what cannot be copied is not copied
        return leaf


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:5])
    return (shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")) or "nothing"
