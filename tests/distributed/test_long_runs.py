"""Long programs of public calls, some of which one rank leaves by an error: the ranks never drift
apart."""

import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    InvalidState,
    KeepBest,
    KeepLast,
    RankFailed,
    SharingPattern,
    StateComponent,
)
from ckptcore.catalog.catalog import scan
from ckptcore.storage.local import LocalStorage
from ckptcore.testing.processes import patience
from ckptcore.testing.ranks import run_ranks

SIZE = 3
DEADLINE = 20 * patience()
KEEP = KeepLast(3)


class Own:
    def __init__(self, value):
        self.value, self.act = torch.full((64,), float(value)), lambda: None

    def state_dict(self):
        self.act()
        return {"x": self.value}

    def load_state_dict(self, state):
        self.act()
        self.value = state["x"].clone()


class Words:
    """A board on which the `left`-th word of one thread is interrupted."""

    def __init__(self, board):
        self._board, self.left, self.thread = board, 0, threading.get_ident()

    def __getattr__(self, name):
        words = ("put", "put_all", "wait", "delete")
        if name in words and self.left and threading.get_ident() == self.thread:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return getattr(self._board, name)


CALLS = [
    "save",
    "save",
    "save_async",
    "save_async",
    "load",
    "restore",
    "verify",
    "pin",
    "prewarm",
    "again",
    "damage",
]
FAULTS = st.one_of(
    st.none(), st.just(("state", 0)), st.tuples(st.just("Ctrl-C"), st.integers(1, 25))
)
STEPS = st.tuples(st.sampled_from(CALLS), st.integers(0, 1), st.integers(0, SIZE - 1), FAULTS)


class Rank:
    """One rank of a program with two managers in one communicator."""

    def __init__(self, comm, roots, shared):
        self.comm, self.rank, self.roots, self.shared = comm, comm.rank, roots, shared
        self.board = comm.board = Words(comm.board)
        self.managers = [self.made(which) for which in range(2)]
        self.steps = [0, 0]
        self.live = Own(0)

    def made(self, which):
        return CheckpointManager(self.roots[which], keep=KEEP, comm=self.comm, io_threads=1)

    def parts(self, value):
        return [StateComponent("own", self.own(value), SharingPattern.PER_RANK)]

    def own(self, value):
        self.live = Own(value)
        return self.live

    def saved(self, which, how):
        self.steps[which] += 1
        step = self.steps[which]
        parts = self.parts(100 * step + self.rank)
        return lambda: getattr(self.managers[which], how)(step, parts).step

    def loaded(self, which, how):
        parts = self.parts(-1)

        def work():
            report = getattr(self.managers[which], how)(parts)
            step = report.step or 0
            assert report.fresh or torch.all(self.live.value == 100 * step + self.rank)
            return step

        return work

    def call(self, what, which):
        ckpt = self.managers[which]
        if what in ("save", "save_async"):
            return self.saved(which, what)
        if what in ("load", "restore"):
            return self.loaded(which, what)
        if what == "verify":
            return lambda: len(ckpt.verify())
        if what == "pin":
            return lambda: ckpt.pin(self.steps[which])
        parts = self.parts(0)
        return lambda: ckpt.prewarm(parts)

    def outcome(self, work, fault=None):
        kind, moment = fault or ("", 0)
        self.board.left = moment
        if kind == "state":
            self.live.act = lambda: 1 / 0
        try:
            return work()
        except (Exception, KeyboardInterrupt) as error:
            return type(error).__name__
        finally:
            self.board.left = 0

    def one(self, what, which, victim, fault):
        if what == "again":
            with suppress(Exception):
                self.managers[which].close()
            self.managers[which] = self.made(which)
            return None
        if what == "damage":
            for ckpt in self.managers:
                with suppress(Exception):
                    ckpt.wait(DEADLINE)
            self.shared.wait(DEADLINE)
            if self.rank == 0:
                damage(self.roots[which])
            self.shared.wait(DEADLINE)
            what = "restore"
        result = self.outcome(self.call(what, which), fault if self.rank == victim else None)
        if (
            what == "restore"
        ):  # the program goes on from what rank 0 has restored, or, if it has not, anew
            self.shared.found[self.rank] = result
            self.shared.wait(DEADLINE)
            steps = [found for found in self.shared.found if isinstance(found, int)]
            if len(steps) >= SIZE - 1:
                self.steps[which] = steps[0]
            self.shared.wait(DEADLINE)
        return result


class Shared(threading.Barrier):
    def __init__(self):
        super().__init__(SIZE)
        self.found = [None] * SIZE


def damage(root):
    """The newest committed checkpoint loses its bytes."""
    infos = [info for info in scan(LocalStorage(root)) if info.status == "committed"]
    if infos:
        for path in (root / infos[-1].name).glob("*"):
            if path.name != "manifest.json":
                path.write_bytes(b"")


def check(plan, folder):
    shared = Shared()

    def program(comm):
        rank = Rank(comm, [folder / "a", folder / "b"], shared)
        seen = [rank.one(*step) for step in plan]
        # What failed in the background is raised by one of these.
        for which in range(2):
            rank.outcome(rank.saved(which, "save"))
        ends = [
            rank.outcome(rank.saved(which, how))
            for which in range(2)
            for how in ("save_async", "save")
        ]
        for ckpt in rank.managers:
            ckpt.close()
        return seen, ends, comm.number

    results = run_ranks(SIZE, program, deadline=20)
    for number, (what, _, victim, fault) in enumerate(plan):
        outcomes = [seen[number] for seen, *_ in results]
        others = [o for rank, o in enumerate(outcomes) if fault is None or rank != victim]
        assert len({*map(str, others)}) == 1, (number, plan[number], outcomes)
        assert "RanksDisagree" not in outcomes and "JoinTimeout" not in outcomes, (
            number,
            plan[number],
            outcomes,
        )
        assert "KeyboardInterrupt" not in others, (number, what, outcomes)
    assert {str(end) for _, end, *_ in results} == {str(results[0][1])}, [
        end for _, end, *_ in results
    ]
    assert all(isinstance(end, int) for end in results[0][1]), results[0][1]
    assert len({number for *_, number in results}) == 1


@pytest.mark.filterwarnings("ignore::ckptcore.CheckpointWarning")
@settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(STEPS, min_size=1, max_size=10))
def test_no_sequence_of_calls_and_errors_of_one_rank_parts_the_ranks(tmp_path_factory, plan):
    check(plan, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("how", ["prewarm", "save_async"])
def test_a_manager_that_one_rank_left_early_does_not_mix_up_the_next_one(tmp_path, how):
    """Its branch may not be there yet on the rank that was interrupted. The next manager's has the
    same name on all."""
    for moment in range(1, 22):
        check([(how, 0, 1, ("Ctrl-C", moment)), ("save_async", 1, 0, None)], tmp_path / str(moment))


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_rank_0_may_not_know_which_branch_it_has_named(tmp_path, how):
    """It is interrupted while it says so, and the others have made it: the next save in the
    background is on one branch all the same."""
    for moment in range(2, 7):
        interrupted = (how, 0, 0, ("Ctrl-C", moment))
        check([interrupted, ("save_async", 0, 1, None)], tmp_path / str(moment))


@pytest.mark.filterwarnings("ignore::ckptcore.CheckpointWarning")
@pytest.mark.parametrize("victim", range(SIZE))
def test_a_rank_that_left_a_restore_saves_over_what_was_damaged(tmp_path, victim):
    """It may not have heard that the checkpoint is damaged; rank 0 says what gives way."""
    for moment in range(16, 34):
        plan = [
            ("save", 0, 0, None),
            ("save", 0, 0, None),
            ("damage", 0, victim, ("Ctrl-C", moment)),
        ]
        check([*plan, ("save", 0, 0, None)], tmp_path / str(moment))


def test_a_warning_that_is_an_error_on_rank_0_leaves_the_next_call_whole(tmp_path, errors_of):
    """What retention has to say is known to rank 0 alone, when the save is over for the others."""

    def program(comm):
        keep = KeepBest("accuracy")
        with CheckpointManager(tmp_path, keep=keep, comm=comm, io_threads=1) as ckpt:
            outcomes = []
            for step in (1, 2):
                try:
                    part = StateComponent("own", Own(step), SharingPattern.PER_RANK)
                    outcomes.append(ckpt.save(step, [part], metrics={"loss": 1.0}).step)
                except CheckpointWarning as warning:
                    outcomes.append(str(warning).partition(": ")[2].partition(",")[0])
            return outcomes

    results = errors_of(SIZE, program)
    assert results == [["KeepBest goes by 'accuracy'", 2], [1, 2], [1, 2]]


# Where nodes share no storage, a look is a call of all ranks, too.


def node_manager(tmp_path, comm, **how):
    return CheckpointManager(
        tmp_path / f"node{comm.rank}", comm=comm, storage_mode="node", io_threads=1, **how
    )


def test_a_watcher_of_a_save_in_the_background_cannot_look_and_stops_nobody(tmp_path):
    """The next save has the turn, and waits for the one that the watcher belongs to."""

    def program(comm):
        seen, waits = [], threading.Event()

        def watch(event):
            if event.kind == "committed" and event.step == 1:
                waits.wait(DEADLINE)
                try:
                    ckpt.list()
                except InvalidState as error:
                    seen.append(str(error))

        with node_manager(tmp_path, comm, on_event=watch) as ckpt:
            wait = ckpt._saves.wait_for_pending
            ckpt.save_async(1, [StateComponent("own", Own(1), SharingPattern.PER_RANK)])
            ckpt._saves.wait_for_pending = lambda: (waits.set(), wait())
            ckpt.save(2, [StateComponent("own", Own(2), SharingPattern.PER_RANK)])
            return seen, [info.step for info in ckpt.list()]

    for seen, steps in run_ranks(2, program, nodes=[[0], [1]], deadline=20):
        assert steps == [1, 2]
        assert len(seen) == 1 and "cannot be waited for by what it calls itself" in seen[0]


@pytest.mark.parametrize("victim", range(2))
@pytest.mark.parametrize("look", ["list", "latest", "best"])
def test_a_rank_that_left_a_look_makes_the_next_call_with_the_others(tmp_path, victim, look):
    def program(comm, moment):
        comm.board = words = Words(comm.board)
        with node_manager(tmp_path / str(moment), comm, keep=KeepBest("loss") | KEEP) as ckpt:
            ckpt.save(
                1, [StateComponent("own", Own(1), SharingPattern.PER_RANK)], metrics={"loss": 1.0}
            )
            words.left = moment if comm.rank == victim else 0
            try:
                getattr(ckpt, look)()
                outcome = "done"
            except (KeyboardInterrupt, RankFailed) as error:
                outcome = type(error).__name__
            words.left = 0
            saved = ckpt.save(2, [StateComponent("own", Own(2), SharingPattern.PER_RANK)]).step
            return outcome, saved

    seen = set()
    for moment in range(1, 24):
        results = run_ranks(
            2, lambda comm, m=moment: program(comm, m), nodes=[[0], [1]], deadline=20
        )
        assert [saved for _, saved in results] == [2, 2]
        seen.add(tuple(outcome for outcome, _ in results))
    assert len(seen) > 1
