"""A rank that leaves a round, however it does, keeps nobody waiting; and each caller gets the
answer to its own call."""

import asyncio
import logging
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore

import ckptcore.ranks.rounds as rounds
from ckptcore import (
    CheckpointManager,
    InvalidState,
    JoinTimeout,
    RankFailed,
    RanksDisagree,
    SharingPattern,
    StateComponent,
    UnsupportedValue,
)
from ckptcore.ranks.board import BoardLost
from ckptcore.ranks.rounds import BoardCommunicator
from ckptcore.ranks.store import StoreBoard
from ckptcore.testing.processes import patience
from ckptcore.testing.ranks import run_ranks

SIZE = 3
DEADLINE = 20 * patience()


def own(rank, state=None):
    return [
        StateComponent(
            "own", state or {"x": torch.full((4,), float(rank))}, SharingPattern.PER_RANK
        )
    ]


class Asked:
    """State that does something when it is asked for."""

    def __init__(self, act):
        self.act = act

    def state_dict(self):
        self.act()
        return {"x": torch.zeros(4)}

    def load_state_dict(self, state_dict):
        pass


# One connection, many callers.


@settings(max_examples=4)
@given(st.randoms(use_true_random=False), st.integers(2, 8))
def test_threads_on_one_store_board_get_their_own_answers(random, threads):
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    board = StoreBoard(store.clone(), "p", DEADLINE)
    wrong = []
    plans = [
        [random.choice(["put", "get", "delete", "offer", "wait", "none"]) for _ in range(150)]
        for _ in range(threads)
    ]

    def caller(me):
        held = None
        for number, what in enumerate(plans[me]):
            value = f"{me} {number}".encode()
            if what == "put":
                board.put(f"k{me}", value)
                held = value
            elif what == "offer":
                board.offer(f"k{me}", value)
                held = held or value
            elif what == "delete":
                board.delete([f"k{me}"])
                held = None
            else:
                found = {
                    "get": lambda: board.get(f"k{me}"),
                    "wait": lambda: (board.wait([f"k{me}"], 0.0) or [None])[0],
                    "none": lambda: board.get("nobody's"),
                }[what]()
                if found != (None if what == "none" else held):
                    wrong.append((me, number, what, held, found))

    callers = [threading.Thread(target=caller, args=(me,), daemon=True) for me in range(threads)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(60)
    board.close()
    assert not any(thread.is_alive() for thread in callers) and wrong == []


class Store:
    """A store of this process, whose host can be stopped; `asked` is set when a call has reached
    it."""

    def __init__(self):
        self.values, self.up, self.asked, self.clones = {}, threading.Event(), threading.Event(), 0
        self.up.set()

    def clone(self):
        self.clones += 1
        self._reach()
        return self

    def _reach(self):
        self.asked.set()
        assert self.up.wait(60)

    def set(self, key, value):
        self._reach()
        self.values[key] = value

    def check(self, keys):
        self._reach()
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]

    def wait(self, keys, timeout):
        while not self.check(keys):
            time.sleep(0.001)

    def multi_get(self, keys):
        return [self.values[key] for key in keys]

    def delete_key(self, key):
        self.values.pop(key, None)


def test_the_answer_to_an_interrupted_call_is_nobody_elses():
    store = Store()
    board = StoreBoard(store, "p", DEADLINE)
    board.put("a", b"of a")
    board.put("b", b"of b")
    store.up.clear()
    store.asked.clear()

    def interrupts():
        store.asked.wait(DEADLINE)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)

    def handler(*_):
        store.up.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        helper = threading.Thread(target=interrupts)
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            board.get("a")
        helper.join()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [board.get(key) for key in ("b", "c", "a")] == [b"of b", None, b"of a"]
    board.close()


def test_a_store_that_answers_again_is_found_again_and_hearts_beat():
    store = Store()
    ranks = [
        BoardCommunicator(
            StoreBoard(store, "p", 0.3), r, 2, join_timeout=DEADLINE, liveness_timeout=0.3
        )
        for r in range(2)
    ]
    board = StoreBoard(store, "p", 0.3)
    board.put("kept", b"1")
    store.up.clear()
    for _ in range(3):
        with pytest.raises(BoardLost):
            board.get("kept")
    store.up.set()
    assert board.get("kept") == b"1" and store.clones > 0
    for comm in ranks:
        beats = set()
        end = time.monotonic() + DEADLINE
        while len(beats) < 3 and time.monotonic() < end:
            beats.add(board.get(f"alive/{comm.rank}"))
        assert len(beats) == 3
    # A round that takes one rank longer than liveness_timeout.
    found = [None, None]

    def run(rank):
        with ranks[rank].round("slow") as r:
            values = r.gather(threading.Event().wait(0.7) if rank else True)
            if r.leads:
                r.verdict = values
        found[rank] = r.verdict

    both = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(DEADLINE)
    assert found == [[True, False]] * 2
    for comm in ranks:
        comm.close()
    board.close()


# Leaving a round.


class Preempted(BaseException):
    pass


class Waits:
    """A board whose wait is interrupted when it is armed."""

    def __init__(self, board):
        self.board, self.armed = board, None

    def __getattr__(self, name):
        return getattr(self.board, name)

    def wait(self, keys, seconds):
        armed, self.armed = self.armed, None
        if armed is not None:
            raise armed
        return self.board.wait(keys, seconds)


KINDS = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, Preempted]
PLACES = [
    (where, victim)
    for where in ("local", "waiting", "between", "at the end")
    for victim in range(SIZE)
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("where", "victim"), [*PLACES, ("decide", 0)])
def test_a_rank_that_leaves_a_call_and_lives_on(where, victim, kind):
    """The others hear of it at once, in the same words, and the next call of all works."""
    sizes = []

    def program(comm):
        bad = comm.rank == victim
        comm.board = board = Waits(comm.board)

        def interrupt(at):
            if bad and where == at:
                raise kind

        def call():
            with comm.round("first", joining=True):
                pass
            if bad and where == "waiting":
                board.armed = kind()
            with comm.round("second") as r:
                interrupt("local")
                r.gather()
                if r.leads:
                    interrupt("decide")
            interrupt("between")
            with comm.round("third"):
                pass
            interrupt("at the end")
            return "done"

        def following():
            with comm.round("next") as r:
                ranks = r.gather(comm.rank)
                if r.leads:
                    r.verdict = ranks
            return r.verdict

        outcomes = []
        for work in (call, following):
            try:
                with comm.call("save of step 1"):
                    outcomes.append(work())
            except BaseException as error:
                outcomes.append(error)
        with comm.round("and on"):
            pass
        with comm.round("and on") as r:
            r.gather()
            if r.leads:
                sizes.append(sorted(comm.board.values))
        return outcomes

    started = time.monotonic()
    results = run_ranks(SIZE, program, join_timeout=60, liveness_timeout=40)
    assert time.monotonic() - started < 20
    others = [first for rank, (first, _) in enumerate(results) if rank != victim]
    assert type(results[victim][0]) is kind
    if where == "at the end":
        assert others == ["done"] * (SIZE - 1)
    else:
        assert [type(error) for error in others] == [RankFailed] * (SIZE - 1), others
        assert {str(error) for error in others} == {str(others[0])}
        assert [list(error.causes) for error in others] == [[victim]] * (SIZE - 1)
        assert kind.__name__ in str(others[0]) and f"rank {victim}" in str(others[0])
    assert [second for _, second in results] == [[0, 1, 2]] * SIZE
    left = [key for key in sizes[0] if "/" in key and key.split("/")[0].isdigit()]
    assert len(left) <= SIZE + 1, left  # of the rounds that are not over: nothing piles up


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("victim", range(SIZE))
def test_interrupts_at_every_point_of_a_save(tmp_path, victim, asynchronous):
    """Whatever word to the board, or part of the call, it comes before: one outcome, and the next
    save works."""

    def program(comm, moment):
        words = 0
        real = comm.board

        class Interrupted:
            def __getattr__(self, name):
                nonlocal words
                if (
                    name in ("put", "put_all", "wait", "delete")
                    and threading.current_thread() is thread
                ):
                    words += 1
                    if words == moment:
                        raise KeyboardInterrupt
                return getattr(real, name)

        thread = threading.current_thread()
        with CheckpointManager(tmp_path / str(moment), comm=comm) as ckpt:
            if comm.rank == victim:
                comm.board = Interrupted()
            try:
                if asynchronous:
                    first = ckpt.save_async(1, own(comm.rank)).result(DEADLINE).step
                else:
                    first = ckpt.save(1, own(comm.rank)).step
            except BaseException as error:
                first = error
            # The branch that was made meanwhile has the board that was there.
            reached, comm.board, words = words < moment, real, moment
            with suppress(RankFailed):
                while True:
                    ckpt.wait(DEADLINE)
                    break
            return first, reached, ckpt.save(2, own(comm.rank)).step

    seen = set()
    for moment in range(1, 60):
        results = run_ranks(
            SIZE, lambda comm, moment=moment: program(comm, moment), join_timeout=40
        )
        assert [last for *_, last in results] == [2] * SIZE
        others = {type(first) for rank, (first, *_) in enumerate(results) if rank != victim}
        assert len(others) == 1, (moment, results)
        seen |= others
        if results[victim][1]:
            break
        assert isinstance(results[victim][0], KeyboardInterrupt)
    assert (moment > 8 and seen >= {int, RankFailed}) or asynchronous


@pytest.mark.parametrize("bad", range(SIZE))
@pytest.mark.parametrize("what", ["value", "verdict", "text", "surrogate"])
def test_what_cannot_be_posted_fails_the_round_on_all(bad, what, errors_of, on_all):
    class Dumb(Exception):
        def __str__(self):
            raise ValueError("no words")

    def local(rank):
        if rank == bad and what == "text":
            raise Dumb
        if rank == bad and what == "surrogate":
            raise KeyError("\ud800")
        return object() if rank == bad and what == "value" else rank

    def program(comm):
        with comm.round("x") as r:
            values = r.gather(local(comm.rank))
            if r.leads:
                r.verdict = object() if what == "verdict" else values
        return r.verdict

    kind = UnsupportedValue if what in ("value", "verdict") else RankFailed
    on_all(errors_of(SIZE, program, join_timeout=60), kind)


def test_a_broadcast_whose_transport_fails_on_one_rank(tmp_path, errors_of, on_all):
    """Live state is partly overwritten by then, and everybody is told so."""
    state = {"m": {"w": torch.zeros(3 << 20)}}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state)

    def program(comm):
        share = comm.share

        def broken(buffer, source):
            if comm.rank == 1:
                raise RuntimeError("connection reset by peer")
            share(buffer, source)

        comm.share = broken
        ckpt = CheckpointManager(tmp_path, comm=comm, load_broadcast=True)
        ckpt.load({"m": {"w": torch.ones(3 << 20)}})

    error = on_all(errors_of(SIZE, program, join_timeout=60), RankFailed)
    assert "connection reset by peer" in str(error) and "live state is partly overwritten" in str(
        error
    )
    assert list(error.causes) == [1]


# A call in the middle of a call.


@pytest.mark.parametrize(
    "call", ["save", "save_async", "load", "restore", "pin", "delete", "verify"]
)
def test_a_call_in_the_middle_of_a_save_is_refused_by_name(tmp_path, call):
    """As a signal handler makes it. The save that was under way goes on, on all ranks."""

    def program(comm):
        seen = []
        calls = {
            "save": lambda: ckpt.save(9, own(comm.rank)),
            "save_async": lambda: ckpt.save_async(9, own(comm.rank)),
            "load": lambda: ckpt.load(own(comm.rank), 1),
            "restore": lambda: ckpt.restore(own(comm.rank)),
            "pin": lambda: ckpt.pin(1),
            "delete": lambda: ckpt.delete(1),
            "verify": lambda: ckpt.verify(1),
        }

        def inside():
            try:
                calls[call]()
            except InvalidState as error:
                seen.append(str(error))

        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, own(comm.rank))
            ckpt.save(2, own(comm.rank, Asked(inside if comm.rank == 1 else lambda: None)))
            calls[call]()  # and now it may
            return seen, [info.step for info in ckpt.list()][:2]

    steps = [2] if call == "delete" else [1, 2]
    first, second = run_ranks(2, program)
    assert first[1] == second[1] == steps and first[0] == []
    assert len(second[0]) == 1 and "a save of step 2 is under way on this thread" in second[0][0]


def test_threads_take_turns(tmp_path, errors_of):
    """Rounds of two saves do not mix, whichever threads they come from."""

    def program(comm):
        inside, late = [], threading.Barrier(2)

        def act(step):
            inside.append(step)
            with suppress(threading.BrokenBarrierError):
                late.wait(0.05)
            assert inside.pop() == step and inside == []

        with CheckpointManager(tmp_path / "r", comm=comm) as ckpt:
            turn = threading.Event()

            def other():
                turn.wait(DEADLINE)
                ckpt.save(2, own(comm.rank, Asked(lambda: act(2))))

            thread = threading.Thread(target=other, daemon=True)
            thread.start()
            ckpt.save(1, own(comm.rank, Asked(lambda: (turn.set(), act(1)))))
            thread.join(DEADLINE)
            return [info.step for info in ckpt.list()]

    assert errors_of(2, program) == [[1, 2]] * 2


# Who does not come.


def lone(calls, saves, victim, tmp_path, **how):
    """After `saves` saves of all, `victim` alone makes the call; the seconds and the error."""
    through = threading.Barrier(SIZE)

    def program(comm):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            for step in range(1, saves + 1):
                if step % 2:
                    ckpt.save(step, own(comm.rank))
                else:
                    ckpt.save_async(step, own(comm.rank)).result(DEADLINE)
            error = None
            started = time.monotonic()
            if comm.rank == victim:
                with pytest.raises(JoinTimeout) as raised:
                    calls(ckpt, comm.rank)
                error = raised.value
            seconds = time.monotonic() - started
            through.wait(DEADLINE)
            return error, seconds

    return run_ranks(SIZE, program, **{"join_timeout": 0.4, "liveness_timeout": 10, **how})[victim]


LONE = {
    "save of step 99": lambda ckpt, rank: ckpt.save(99, own(rank)),
    "load of latest": lambda ckpt, rank: ckpt.load(own(rank)),
    "restore": lambda ckpt, rank: ckpt.restore(own(rank)),
    "deletion of step 1": lambda ckpt, rank: ckpt.delete(1),
    "verification of step latest": lambda ckpt, rank: ckpt.verify(),
}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("what", ["save of step 99", "deletion of step 1"])
def test_after_calls_of_one_rank_alone_the_next_one_of_all_works(tmp_path, what, victim, times):
    """Nobody ever makes the call that it made; the others are not to fail for it, now or later."""
    through = threading.Barrier(SIZE)

    def program(comm):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, own(comm.rank))
            for _ in range(times):
                if comm.rank == victim:
                    with pytest.raises(JoinTimeout):
                        LONE[what](ckpt, comm.rank)
            through.wait(DEADLINE)
            steps = [ckpt.save(step, own(comm.rank)).step for step in (2, 3)]
            steps.append(ckpt.save_async(4, own(comm.rank)).result(DEADLINE).step)
            return steps, [info.step for info in ckpt.list()]

    expected = [2, 3, 4], [1, 2, 3, 4]
    assert run_ranks(SIZE, program, join_timeout=0.3, liveness_timeout=10) == [expected] * SIZE


@pytest.mark.parametrize("saves", [0, 1, 4])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", LONE)
def test_a_call_of_one_rank_ends_within_join_timeout(tmp_path, what, victim, saves):
    """After any number of saves: what rank 0 does after one announces nothing for ever."""
    error, seconds = lone(LONE[what], saves, victim, tmp_path)
    assert seconds < 5
    assert error.ranks == ([1, 2] if victim == 0 else [0])
    assert str(error).startswith(f"{what}: rank")


def test_work_that_rank_0_announced_and_does_no_more_does_not_keep_others_waiting(tmp_path):
    """As when its last word about it was lost."""

    through = threading.Barrier(2)

    def program(comm):
        if comm.rank == 0:
            comm.board.put("works/0", b"5")
        else:
            with pytest.raises(JoinTimeout), comm.round("x", joining=True):
                pass
        through.wait(DEADLINE)

    started = time.monotonic()
    run_ranks(2, program, join_timeout=0.2, liveness_timeout=0.6)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_of_an_error_handler_does_not_hide_the_error_for_long(tmp_path, victim, monkeypatch):
    def saves(ckpt, rank):
        monkeypatch.setattr(ckpt.comm, "error_join_timeout", 0.3)
        try:
            raise ZeroDivisionError("the error that counts")
        finally:
            ckpt.save(99, own(rank))

    error, seconds = lone(saves, 1, victim, tmp_path, join_timeout=60)
    assert seconds < 10 and "within 0.3 s" in str(error)
    assert isinstance(error.__context__, ZeroDivisionError)


@pytest.mark.parametrize("victim", [0, 1])
def test_whom_a_call_waits_for_is_logged_once(tmp_path, victim, monkeypatch, caplog):
    monkeypatch.setattr(rounds, "PATIENT_SECONDS", 0.01)
    caplog.set_level(logging.WARNING, logger="ckptcore")
    lone(lambda ckpt, rank: ckpt.save(7, own(rank)), 0, victim, tmp_path)
    lines = [record.getMessage() for record in caplog.records if record.name == "ckptcore"]
    whom = "ranks 1, 2" if victim == 0 else "rank 0"
    assert lines == [f"save of step 7: waiting for {whom} since 0 s"]


@pytest.mark.parametrize("what", ["save", "load"])
def test_components_that_differ_are_named(tmp_path, what, errors_of, on_all):
    def state(*keys):
        return [StateComponent(key, {"x": torch.ones(2)}) for key in keys]

    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state("a", "b"))

    def program(comm):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            mine = state("b") if comm.rank == 1 else state("a", "b")
            return ckpt.save(2, mine) if what == "save" else ckpt.load(mine, 1)

    error = on_all(errors_of(2, program), RanksDisagree)
    assert "component 'a' is on rank 0 and not on rank 1" in str(error) and error.ranks == [1]
