"""The blackboard over a store, and the hearts that beat on it."""

import threading
import time

import pytest
from torch.distributed import TCPStore

from ckptcore import JoinTimeout
from ckptcore.ranks.board import MemoryBoard, PartOfBoard
from ckptcore.ranks.rounds import BoardCommunicator
from ckptcore.ranks.store import StoreBoard, StoreCommunicator
from ckptcore.testing.processes import patience

DEADLINE = 20 * patience()


class Counted:
    """A store that counts the calls that reach it."""

    def __init__(self, store, calls):
        self.store, self.calls = store, calls

    def clone(self):
        return Counted(self.store.clone(), self.calls)

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.store, name)


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def connections():
    return [thread for thread in threading.enumerate() if thread.name == "ckptcore-store"]


def until(condition):
    end = time.monotonic() + DEADLINE
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_waiting_is_one_call_however_often_the_thread_looks_around(store, capfd):
    calls = []
    board = StoreBoard(Counted(store, calls), "p", DEADLINE)
    assert board.wait(["a", "b"], 0) is None
    board.put("a", b"1")
    before = len(calls)
    for _ in range(5):
        assert board.wait(["a", "b"], 0.02) is None
    assert calls[before:] == ["wait"]
    board.put("b", b"2")
    assert (
        board.wait(["a", "b"], DEADLINE) == board.wait(["b", "a"], DEADLINE)[::-1] == [b"1", b"2"]
    )
    assert board.wait(["a", "b"], 0) == [b"1", b"2"] and board.wait([], DEADLINE) == []
    board.close()
    assert capfd.readouterr().err == ""  # a store warns when a wait of its own times out


def test_threads_that_wait_share_connections_one_after_the_other(store):
    others = len(connections())
    board = StoreBoard(store, "p", DEADLINE)
    board.put("there", b"1")
    for _ in range(10):
        found = []
        thread = threading.Thread(target=lambda f=found: f.append(board.wait(["there"], DEADLINE)))
        thread.start()
        thread.join(DEADLINE)
        assert found == [[b"1"]]
    assert len(connections()) == others + 2  # one that talks, one that waits
    both = [threading.Thread(target=board.wait, args=(["late"], DEADLINE)) for _ in range(2)]
    for thread in both:
        thread.start()
    until(lambda: len(connections()) == others + 3)
    board.put("late", b"1")
    for thread in both:
        thread.join(DEADLINE)
    board.close()
    until(lambda: len(connections()) == others)


def test_a_wait_that_was_given_up_ends(store):
    others = len(connections())
    board = StoreBoard(store, "p", DEADLINE)
    assert board.wait(["never", "ever"], 0.01) is None
    board.give_up(["never", "ever"])
    board.close()
    until(lambda: len(connections()) == others)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_thread_of_a_rank_that_gave_up_waits_on(store, rank):
    """It would crash the interpreter when the store goes while that ends."""
    others = len(connections())
    comm = StoreCommunicator(store, rank, 2, name=f"alone {rank}", join_timeout=0.05)
    with pytest.raises(JoinTimeout), comm.round("alone", joining=True):
        pass
    comm.heart.stop()
    comm.heart.join(DEADLINE)
    comm.board.close()
    until(lambda: len(connections()) == others)


def test_parts_of_a_board_are_apart(store):
    for board in (MemoryBoard(), StoreBoard(store, "p", DEADLINE)):
        one, two = PartOfBoard(board, "one"), PartOfBoard(board, "two")
        one.put("x", b"1")
        two.offer("x", b"2")
        two.offer("x", b"3")
        assert (one.get("x"), two.wait(["x"], DEADLINE), board.get("two/x")) == (b"1", [b"2"], b"2")
        one.delete(["x", "y"])
        assert (one.get("x"), two.get("x")) == (None, b"2")
        board.close()


class Stumbles(MemoryBoard):
    """A board whose next heartbeat ends the thread that brings it."""

    stumbles = False

    def put(self, key, value):
        if key.startswith("alive/") and self.stumbles:
            self.stumbles = False
            raise SystemExit
        super().put(key, value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_heart_that_was_interrupted_beats_again():
    board = Stumbles()
    comm = BoardCommunicator(board, 0, 1, liveness_timeout=0.08)
    board.stumbles = True
    until(lambda: not comm.heart.lives())
    still = board.get("alive/0")
    with comm.call("save of step 1"):
        pass
    until(lambda: board.get("alive/0") != still)
    branch = comm.branch("x")
    assert branch.heart is comm.heart and comm.heart.lives()
    branch.close()
    assert comm.heart.thread.is_alive() and board.get("x/1/left/0") is not None
    comm.close()
    assert board.get("alive/0") == b"gone"
