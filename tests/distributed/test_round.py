"""Every path out of the block of a round ends it on all ranks, soon, with one outcome."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from ckptcore import CheckpointCorrupt, InvalidState, RankFailed, RankLost, UnsupportedValue
from ckptcore.ranks.board import Board, BoardLost
from ckptcore.ranks.communicator import SingleProcess
from ckptcore.ranks.messages import message, packed, unpacked
from ckptcore.testing.ranks import run_ranks

SIZE = 3


@message
@dataclass(frozen=True, slots=True)
class Leaf:
    name: str
    size: int


@message
@dataclass(frozen=True, slots=True)
class Tree:
    leaves: list[Leaf]
    by_name: dict[str, Any] = field(default_factory=dict)
    other: "Tree | None" = None


def test_a_message_comes_as_what_it_was():
    a, b = Leaf("a", 1), Leaf("b", 2**70)
    tree = Tree([a, b], {"pair": (a, [b, None])}, Tree([], {"again": a}))
    for value in (tree, [tree, 1.5, {"x": tree}], (a,), None, b"bytes", {"plain": [1, "two"]}):
        got = unpacked(packed(value))
        assert got == value and type(got) is type(value)


def test_what_is_no_message_cannot_travel():
    @dataclass(frozen=True)
    class Plain:
        x: int

    with pytest.raises(UnsupportedValue, match="Plain"):
        packed([Plain(1)])


def test_all_have_the_verdict_and_rank_0_the_reports():
    def program(comm):
        with comm.call("count"):
            seen = []
            for topic in ("one", "two"):
                with comm.round(topic, joining=topic == "one") as r:
                    reports = r.gather(Leaf(topic, comm.rank))
                    seen.append(reports)
                    if r.leads:
                        r.verdict = [report.size for report in reports]
                seen.append(r.verdict)
            with comm.round("a check alone"):
                pass
        with comm.round("a call of its own") as r:
            if r.leads:
                r.verdict = r.gather()
        return seen, r.verdict

    results = run_ranks(SIZE, program)
    for rank, (seen, nothing) in enumerate(results):
        ranks = range(SIZE) if rank == 0 else [rank]
        assert seen[0::2] == [[Leaf(topic, r) for r in ranks] for topic in ("one", "two")]
        assert seen[1::2] == [[0, 1, 2], [0, 1, 2]] and nothing == [None] * SIZE


def test_a_single_process_needs_nobody():
    comm = SingleProcess()
    with comm.call("x"), comm.round("x", joining=True) as r:
        assert r.leads and r.gather(5) == [5]
        r.verdict = object
    assert r.verdict is object
    with pytest.raises(ZeroDivisionError), comm.round("x"):
        raise ZeroDivisionError


class Lost(Board):
    """A board whose connection breaks, once it is told to, and is made anew at the next word."""

    def __init__(self, board):
        self.board, self.breaks = board, False

    def _reach(self):
        if self.breaks:
            self.breaks = False
            raise BoardLost("connection reset")
        return self.board

    def put(self, key, value):
        self._reach().put(key, value)

    def get(self, key):
        return self._reach().get(key)

    def delete(self, keys):
        self._reach().delete(keys)

    def wait(self, keys, seconds):
        return self._reach().wait(keys, seconds)


def ckpt_error():
    error = CheckpointCorrupt("rotten", file="f")
    error.add_note("a note")
    raise error


WAYS = {
    "an error": lambda: {}["missing"],
    "an error of ckptcore": ckpt_error,
    "Ctrl-C": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
    "a round in a round": None,
    "a second gather": None,
    "what cannot travel": None,
}
BEFORE = [(way, "before", rank) for way in WAYS for rank in range(SIZE)]
AFTER = [
    (way, "after", rank) for way in WAYS for rank in range(SIZE) if way != "what cannot travel"
]
VERDICT = [(way, "verdict", 0) for way in WAYS]


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize(("way", "where", "victim"), [*BEFORE, *AFTER, *VERDICT])
def test_every_path_out_of_the_block(way, where, victim, caught, errors_of):
    """caught: by the program, around the round and in the call, which goes on to the next round
    where all ranks do."""

    def program(comm):
        def act(at, r):
            if comm.rank != victim or at != where:
                return
            if way == "a round in a round":
                with comm.round("inner"):
                    pass
            elif way == "a second gather":
                r.gather(1)
                r.gather(2)
            elif way == "what cannot travel" and at == "before":
                r.gather(object())
            elif way == "what cannot travel":
                r.verdict = object()
            else:
                WAYS[way]()

        def one_round():
            with comm.round("inspect", joining=True) as r:
                act("before", r)
                r.gather(comm.rank)
                act("after", r)
                if r.leads:
                    r.verdict = "fine"
                    act("verdict", r)
            return r.verdict

        outcome = None
        try:
            with comm.call("save of step 1"):
                if caught and way != "Ctrl-C":
                    try:
                        one_round()
                    except Exception as error:
                        outcome = error
                    with comm.round("next") as r:
                        if r.leads:
                            r.verdict = "next"
                    assert r.verdict == "next"
                else:
                    outcome = one_round()
        except BaseException as error:
            outcome = error
        with comm.round("and on", joining=True) as r:
            ranks = r.gather(comm.rank)
            if r.leads:
                r.verdict = ranks
        assert r.verdict == [0, 1, 2]
        return outcome

    results = errors_of(SIZE, program, join_timeout=15, liveness_timeout=15, deadline=25)
    if way == "Ctrl-C":
        mine = results.pop(victim)
        assert type(mine) is KeyboardInterrupt
    kind = {
        "an error of ckptcore": CheckpointCorrupt,
        "a round in a round": InvalidState,
        "a second gather": InvalidState,
        "what cannot travel": UnsupportedValue,
    }.get(way, RankFailed)
    assert [type(result) for result in results] == [kind] * len(results), results
    assert {str(result) for result in results} == {str(results[0])}
    if victim != 0 or (where == "before" and way != "a second gather"):
        assert way == "Ctrl-C" or str(results[0]).startswith(f"rank {victim}: ")
        assert list(results[0].causes) == [victim]
    if way == "an error of ckptcore":
        assert {result.file for result in results} == {"f"}
        assert results[victim].__notes__ == ["a note"]
    if way == "an error":  # the cause is shown where it happened, and nowhere twice
        assert isinstance(results[victim].__cause__, KeyError)
        assert results[victim].__context__ is None


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("victim", range(SIZE))
def test_a_rank_that_loses_its_connection(where, victim, errors_of, on_all):
    def program(comm):
        comm.board = board = Lost(comm.board)
        with comm.round("inspect", joining=True) as r:
            board.breaks = comm.rank == victim and where == "before"
            r.gather(comm.rank)
            board.breaks = comm.rank == victim
        return r.verdict

    results = errors_of(SIZE, program, join_timeout=15, liveness_timeout=15, deadline=10)
    assert [type(result) for result in results] == [RankLost] * SIZE, results
    for result in results:
        assert f"rank {victim} lost the connection to the store" in str(result)


@pytest.mark.parametrize("rank", range(SIZE))
def test_what_was_being_handled_stays_in_sight(rank, errors_of):
    """The error that all raise takes the place of the one in the block, and comes about where that
    has."""

    def program(comm):
        try:
            raise ZeroDivisionError("before")
        except ZeroDivisionError:
            with comm.round("inspect", joining=True) as r:
                if comm.rank == rank:
                    raise CheckpointCorrupt("rotten")  # noqa: B904
                r.gather()

    for error in errors_of(SIZE, program):
        assert type(error) is CheckpointCorrupt and error.__cause__ is None
        assert isinstance(error.__context__, ZeroDivisionError)
