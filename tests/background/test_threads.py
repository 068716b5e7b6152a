"""One manager and several callers: threads that save at the same time, and `save_async` in the
middle of itself."""

import secrets
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from ckptcore import (
    AsyncSaveError,
    CheckpointManager,
    InvalidState,
    SaveHandle,
    StateComponent,
    open_storage,
)
from ckptcore.testing import FaultStorage
from ckptcore.testing.processes import patience

ITEMS = 1 << 20  # four MiB: copying them takes a moment
SMALL = 50


def state(step):
    return {
        "large": torch.full((ITEMS,), float(step)),
        **{f"w{n}": torch.full((9,), float(step)) for n in range(SMALL)},
    }


def marks(ckpt, step):
    """Every value in a checkpoint."""
    live = {"m": state(-1)}
    assert ckpt.load(live, step).step == step
    return {value for tensor in live["m"].values() for value in tensor.unique().tolist()}


class Both:
    """State whose owner tries, once, to be asked for it while the other thread is being asked as
    well."""

    def __init__(self, step, meet):
        self.state, self.meet = state(step), meet

    def state_dict(self):
        with suppress(threading.BrokenBarrierError):  # one at a time, as it should be
            self.meet.wait(0.1)
        return self.state

    def load_state_dict(self, state_dict):
        raise AssertionError


def in_threads(*calls):
    """What each call returned or raised."""
    found = [None] * len(calls)

    def run(number):
        try:
            found[number] = calls[number]()
        except BaseException as error:
            found[number] = error

    threads = [
        threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40 * patience())
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("prewarmed", [False, True])
def test_two_threads_save_their_own_state(tmp_path, prewarmed):
    """Every checkpoint is of one step through and through: nobody else's copy is in it."""
    meet = threading.Barrier(2)

    def saves(ckpt, first):
        made = []
        for step in range(first, 8, 2):
            own = Both(step, meet)
            made.append(ckpt.save_async(step, {"m": own}))
            for tensor in own.state.values():
                tensor.fill_(-step)  # it is private by now
        return [handle.result(30).step for handle in made]

    with CheckpointManager(tmp_path) as ckpt:
        if prewarmed:
            ckpt.prewarm({"m": state(0)})
        assert in_threads(lambda: saves(ckpt, 0), lambda: saves(ckpt, 1)) == [
            [0, 2, 4, 6],
            [1, 3, 5, 7],
        ]
        assert [info.step for info in ckpt.list()] == list(range(8))
        assert {step: marks(ckpt, step) for step in range(8)} == {
            step: {float(step)} for step in range(8)
        }
        assert ckpt.failed_steps == ()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        f"checkpoint-{step}" for step in range(8)
    ]


def test_a_thread_that_comes_while_the_other_save_is_written_waits(tmp_path):
    """Also where neither saw the other when it asked whether there is one to wait for."""
    faults, meet = FaultStorage(open_storage(tmp_path)), threading.Barrier(2)
    with CheckpointManager(faults, drain_timeout=20) as ckpt:
        gate = faults.block(kind="write_at")

        def save(step):
            return ckpt.save_async(step, {"m": Both(step, meet)})

        def opens():
            gate.wait_reached(20)
            held = [handle for handle in ckpt.list() if handle.step]
            gate.open()
            return held

        first, second, held = in_threads(lambda: save(1), lambda: save(2), opens)
        assert held == []
        assert (first.result(30).step, second.result(30).step) == (1, 2)
        assert (marks(ckpt, 1), marks(ckpt, 2)) == ({1.0}, {2.0})


class Provider:
    """A trainer that lets another thread save while it is asked for its components."""

    def __init__(self, step, other):
        self.components, self.other = [StateComponent("m", state(step))], [other]

    def get_state_components(self):
        while self.other:
            self.other.pop()()
        return self.components

    def get_process_groups(self):
        return {}


@pytest.mark.parametrize("saves", ["save_async", "save"])
def test_a_save_that_another_thread_began_meanwhile_is_waited_for_and_not_skipped(tmp_path, saves):
    faults, events = FaultStorage(open_storage(tmp_path)), []
    with CheckpointManager(
        faults, on_event=lambda e: events.append((e.kind, e.step)), drain_timeout=20
    ) as ckpt:
        gate = faults.block(kind="write_at", path="checkpoint-1*")

        def other():
            (handle,) = in_threads(lambda: ckpt.save_async(1, {"m": state(1)}))
            gate.wait_reached(20)
            if saves == "save_async":
                threading.Timer(0.1, gate.open).start()
            return handle

        made = getattr(ckpt, saves)(2, Provider(2, other))
        gate.open()
        if saves == "save_async":
            assert not made.skipped
            made = made.result(30)
        assert made.step == 2 and ckpt.wait(30)
        assert (marks(ckpt, 1), marks(ckpt, 2)) == ({1.0}, {2.0})
        assert not [event for event in events if event[0] == "skipped"]


def test_a_failure_is_told_even_if_another_thread_saved_meanwhile(tmp_path):
    """The second save waits for the first one to end, and does not take its failure out of
    sight."""
    faults, meet, inside = (
        FaultStorage(open_storage(tmp_path)),
        threading.Barrier(2),
        threading.Event(),
    )
    faults.fail(kind="write_at", path="checkpoint-1*")
    ckpt = CheckpointManager(faults, drain_timeout=20)

    class First(Both):
        def state_dict(self):
            inside.set()
            return super().state_dict()

    def second():
        assert inside.wait(20)
        return ckpt.save_async(2, {"m": Both(2, meet)})

    first, made = in_threads(lambda: ckpt.save_async(1, {"m": First(1, meet)}), second)
    assert first.wait(30) and isinstance(first.error, OSError)
    told = [made] if isinstance(made, AsyncSaveError) else []
    for look in (ckpt.wait, ckpt.close):
        try:
            look()
        except AsyncSaveError as error:
            told.append(error)
    assert [error.step for error in told] == [1] and ckpt.failed_steps == (1,)


def test_a_look_for_a_failure_does_not_lose_sight_of_a_new_save(tmp_path, monkeypatch):
    """Another thread's save begins just as this one has seen that the one before is over."""
    faults, done, others = FaultStorage(open_storage(tmp_path)), SaveHandle.done, []
    with CheckpointManager(faults, drain_timeout=20) as ckpt:
        first = ckpt.save_async(1, {"m": state(1)})
        assert first.wait(30)
        gate = faults.block(kind="write_at")

        def late(handle):
            found = done(handle)
            if (
                handle is first
                and not others
                and sys._getframe(1).f_code.co_name == "raise_failure"
            ):
                others.append(None)
                others[:] = in_threads(lambda: ckpt.save_async(2, {"m": state(2)}))
                gate.wait_reached(20)
                threading.Timer(0.1, gate.open).start()
            return found

        monkeypatch.setattr(SaveHandle, "done", late)
        assert ckpt.save_async(3, {"m": state(3)}).result(30).step == 3
        assert others[0].result(30).step == 2
        assert [marks(ckpt, step) for step in (1, 2, 3)] == [{1.0}, {2.0}, {3.0}]


def test_threads_that_ask_for_the_run_at_once_hear_of_the_same(tmp_path, monkeypatch):
    """Or the checkpoints of one manager would belong to two runs, and one of them would hide the
    other."""
    meet, token = threading.Barrier(2), secrets.token_hex

    def slow(nbytes):
        with suppress(threading.BrokenBarrierError):
            meet.wait(0.1)
        return token(nbytes)

    with CheckpointManager(tmp_path) as ckpt:
        with monkeypatch.context() as patched:
            patched.setattr("ckptcore.manager.secrets", SimpleNamespace(token_hex=slow))
            first, second = in_threads(lambda: ckpt.run_id, lambda: ckpt.run_id)
        assert (
            first == second == ckpt.run_id == ckpt.save_async(1, {"m": state(1)}).result(30).run_id
        )


class Reentrant:
    """State whose `state_dict()` saves, as a signal handler might that comes in the middle of a
    save."""

    def __init__(self, then):
        self.then, self.seen = then, []

    def state_dict(self):
        then, self.then = self.then, None
        if then is not None:
            try:
                self.seen.append(then())
            except InvalidState as error:
                self.seen.append(error)
        return {"w": torch.full((9,), 1.0)}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict["w"].tolist()


@pytest.mark.parametrize("outer", ["save_async", "prewarm"])
@pytest.mark.parametrize("inner", ["save_async", "prewarm"])
def test_save_async_in_the_middle_of_itself_is_refused(tmp_path, outer, inner):
    """There is one pool, and it is in use. The save that was under way is none the worse."""
    with CheckpointManager(tmp_path) as ckpt:
        calls = {
            "save_async": lambda: ckpt.save_async(20, {"m": state(20)}),
            "prewarm": lambda: ckpt.prewarm(state(20)),
        }
        own = Reentrant(calls[inner])
        if outer == "prewarm":
            ckpt.prewarm({"own": own, "m": state(1)})
        else:
            assert ckpt.save_async(1, {"own": own, "m": state(1)}).result(30).step == 1
        assert [type(error) for error in own.seen] == [InvalidState]
        assert "save_async was called in the middle of save_async" in str(own.seen[0])
        assert [info.step for info in ckpt.list()] == ([] if outer == "prewarm" else [1])
        assert ckpt.save_async(2, {"own": own, "m": state(2)}).result(30).step == 2
        for step in ([2], [1, 2])[outer == "save_async"]:
            live = {"own": own, "m": state(-1)}
            ckpt.load(live, step)
            assert own.loaded == [1.0] * 9
            assert {v for t in live["m"].values() for v in t.unique().tolist()} == {float(step)}


def test_save_in_the_middle_of_save_async_works(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        own = Reentrant(lambda: ckpt.save(1, {"m": state(1)}).step)
        assert ckpt.save_async(2, {"own": own, "m": state(2)}).result(30).step == 2
        assert own.seen == [1]
        assert [info.step for info in ckpt.list()] == [1, 2]
        assert marks(ckpt, 1) == {1.0}
        live = {"own": own, "m": state(-1)}
        ckpt.load(live, 2)
        assert {v for t in live["m"].values() for v in t.unique().tolist()} == {2.0}
