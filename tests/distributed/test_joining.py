"""Who calls what, when: calls that do not belong together, ranks that come late or never, and the
board's size."""

import threading

import pytest
import torch

from ckptcore import (
    CheckpointCoordinator,
    CheckpointManager,
    JoinTimeout,
    KeepLast,
    RankLost,
    RanksDisagree,
    SharingPattern,
    StateComponent,
    open_storage,
)
from ckptcore.ranks.store import StoreCommunicator
from ckptcore.testing.faults import FaultStorage
from ckptcore.testing.processes import patience
from ckptcore.testing.ranks import Killed, run_ranks

DEADLINE = 30 * patience()  # for events; nothing here takes long unless something is wrong


def state(rank=0, **components):
    components = components or {"model": SharingPattern.REPLICATED, "rng": SharingPattern.PER_RANK}
    return [
        StateComponent(
            key, {"x": torch.full((3,), float(rank if pattern == "PER_RANK" else 1))}, pattern
        )
        for key, pattern in components.items()
    ]


def calls(tmp_path, errors_of, size, call):
    """`call(ckpt, rank)` on every rank after step 1 was saved; then step 5 is saved and loaded by
    all."""

    def program(comm):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, state(comm.rank))
            ckpt.save(2, state(comm.rank))
            try:
                call(ckpt, comm.rank)
                result = None
            except Exception as error:
                result = error
            assert ckpt.save(5, state(comm.rank)).step == 5
            assert ckpt.load(state(comm.rank)).step == 5
            return result

    results = errors_of(size, program)
    assert {entry.name for entry in tmp_path.iterdir()} == {
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-5",
    }
    return results


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize(
    ("others", "one", "words"),
    [
        (lambda c: c.save(3, state()), lambda c: c.save(4, state()), ["step", "3", "4"]),
        (
            lambda c: c.save(3, state()),
            lambda c: c.save(3, state(model="REPLICATED")),
            ["components", "rng"],
        ),
        (
            lambda c: c.save(3, state(a="REPLICATED", b="GLOBAL")),
            lambda c: c.save(3, state(b="GLOBAL", a="REPLICATED")),
            ["components"],
        ),
        (
            lambda c: c.save(3, state(a="REPLICATED")),
            lambda c: c.save(3, state(a="PER_RANK")),
            ["PER_RANK", "'a'"],
        ),
        (lambda c: c.save(2, state(), overwrite=True), lambda c: c.save(2, state()), ["overwrite"]),
        (lambda c: c.save(3, state()), lambda c: c.load(state()), ["save", "load"]),
        (lambda c: c.load(state()), lambda c: c.save(3, state()), ["save", "load"]),
        (lambda c: c.load(state()), lambda c: c.load(state(model="REPLICATED")), ["components"]),
        (lambda c: c.load(state(), step=1), lambda c: c.load(state(), step=2), ["1", "2"]),
        (
            lambda c: c.load(state(), step="latest"),
            lambda c: c.load(state(), step=1),
            ["latest", "1"],
        ),
        (lambda c: c.restore(state()), lambda c: c.load(state(), step=1), ["1"]),
    ],
    ids=[
        "steps",
        "components",
        "order",
        "patterns",
        "overwrite",
        "save-load",
        "load-save",
        "load components",
        "load steps",
        "latest and a step",
        "restore and load",
    ],
)
def test_calls_that_do_not_belong_together(tmp_path, odd, others, one, words, errors_of, on_all):
    results = calls(
        tmp_path, errors_of, 4, lambda ckpt, rank: (one if rank == odd else others)(ckpt)
    )
    error = on_all(results, RanksDisagree)
    assert error.ranks == ([odd] if odd else [1, 2, 3])
    assert all(word in str(error) for word in words), str(error)


def test_ranks_with_different_roots(tmp_path, errors_of, on_all):
    def program(comm):
        coordinator = CheckpointCoordinator(state(comm.rank), comm=comm)
        return coordinator.save_checkpoint(tmp_path / ("other" if comm.rank == 1 else "name"))

    error = on_all(errors_of(3, program), RanksDisagree)
    assert error.ranks == [1] and "'other'" in str(error) and "'name'" in str(error)


class Meeting:
    """Ranks wait here for one another outside the engine, with a deadline."""

    def __init__(self):
        self.event = threading.Event()

    def wait(self):
        assert self.event.wait(DEADLINE)

    def open(self):
        self.event.set()


@pytest.mark.parametrize("missing", [[1], [3], [1, 2], [0]])
def test_ranks_that_never_call_are_named(tmp_path, missing):
    done = threading.Barrier(4)

    def program(comm):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            try:
                return None if comm.rank in missing else ckpt.save(1, state(comm.rank))
            except Exception as error:
                return error
            finally:
                done.wait(DEADLINE)

    results = run_ranks(4, program, join_timeout=0.5)
    present = [result for rank, result in enumerate(results) if rank not in missing]
    assert [type(result) for result in present] == [JoinTimeout] * len(present)
    assert len({str(error) for error in present}) == 1
    assert present[0].ranks == missing
    name = f"rank {missing[0]}" if len(missing) == 1 else "ranks 1, 2"
    assert f"{name} did not join within 0.5 s" in str(present[0])
    assert "must be made on every rank" in str(present[0])
    assert isinstance(present[0], TimeoutError)
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("late", [2, 0])
@pytest.mark.parametrize("what", ["save", "load"])
def test_late_rank_gets_the_same_verdict_and_the_next_save_works(tmp_path, late, what):
    """It must not go on alone as if the others were with it, nor wait for them."""
    gone, back = threading.Barrier(2), threading.Barrier(3)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, [StateComponent("model", {"x": torch.ones(3)})])

    def call(ckpt, rank):
        try:
            return (
                ckpt.save(2, state(rank))
                if what == "save"
                else ckpt.load(state(model="REPLICATED"))
            )
        except Exception as error:
            return error

    def program(comm):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            if comm.rank == late:
                gone.wait(DEADLINE)
            result = call(ckpt, comm.rank)
            if comm.rank == 1:
                gone.wait(DEADLINE)
            back.wait(DEADLINE)
            return result, ckpt.save(3, state(comm.rank)).step

    results = run_ranks(3, program, join_timeout=0.5, deadline=15)
    assert [type(result) for result, _ in results] == [JoinTimeout] * 3
    assert [result.ranks for result, _ in results] == [[late]] * 3
    assert [step for _, step in results] == [3] * 3
    assert {entry.name for entry in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-3"}


def test_board_after_ranks_that_came_late_several_times(tmp_path):
    """Verdicts that a rank reads later are kept for it, and no longer."""
    missed, back = threading.Barrier(2), threading.Barrier(2)

    def program(comm):
        sizes = []
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            for turn in range(3):
                if comm.rank == 1 and turn == 1:
                    missed.wait(DEADLINE)
                for late in range(3 if turn == 1 else 0):
                    with pytest.raises(JoinTimeout):
                        ckpt.save(100 + late, state(comm.rank))
                if comm.rank == 0 and turn == 1:
                    missed.wait(DEADLINE)
                back.wait(DEADLINE)
                ckpt.save(turn, state(comm.rank))
                back.wait(DEADLINE)
                sizes.append(len(comm.board.values))
                back.wait(DEADLINE)
        return sizes

    for sizes in run_ranks(2, program, join_timeout=0.3):
        assert sizes == [sizes[0]] * 3


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("where", ["before the call", "capture"])
def test_rank_that_dies_is_named_within_the_liveness_timeout(tmp_path, victim, where):
    class Dies:
        armed = False

        def state_dict(self):
            if self.armed:
                raise Killed
            return {"x": torch.zeros(2)}

        def load_state_dict(self, state_dict):
            pass

    def program(comm):
        mortal = Dies()
        components = [StateComponent("own", mortal, SharingPattern.PER_RANK)]
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, components)
            mortal.armed = comm.rank == victim
            if where == "before the call" and mortal.armed:
                raise Killed
            ckpt.save(2, components)

    results = run_ranks(3, program, errors=True, liveness_timeout=0.6, join_timeout=20, deadline=15)
    assert isinstance(results[victim], Killed)
    survivors = [result for rank, result in enumerate(results) if rank != victim]
    assert [type(result) for result in survivors] == [RankLost] * 2, survivors
    assert [error.ranks for error in survivors] == [[victim]] * 2
    assert f"rank {victim} stopped" in str(survivors[0])
    with CheckpointManager(tmp_path) as ckpt:
        assert [info.step for info in ckpt.list()] == [1]


def test_rank_that_leaves_the_job_is_named_at_once(tmp_path):
    def program(comm):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, state(comm.rank))
            if comm.rank == 1:
                return
            ckpt.save(2, state(comm.rank))

    results = run_ranks(3, program, errors=True, liveness_timeout=2, join_timeout=60, deadline=20)
    assert [type(result) for result in results] == [RankLost, type(None), RankLost]
    assert [results[0].ranks, results[2].ranks] == [[1], [1]]
    assert "rank 1 left the job: its manager was closed before this call" in str(results[0])
    assert "not made on every rank" in str(results[0])


def test_slow_retention_on_rank_0_fails_no_save(tmp_path):
    """The others are in the next call already while rank 0 still deletes: a slow disk alone fails
    nothing."""

    def program(comm):
        faults = FaultStorage(open_storage(tmp_path))
        with CheckpointManager(faults, comm=comm, keep=KeepLast(1)) as ckpt:
            ckpt.save(1, state(comm.rank))
            faults.delay(1.2, kind="remove_folder")
            return [ckpt.save(step, state(comm.rank)).step for step in (2, 3)]

    assert run_ranks(2, program, join_timeout=0.5) == [[2, 3]] * 2


def test_board_does_not_grow_with_saves_and_loads(tmp_path):
    def program(comm):
        sizes = []
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            for step in range(50):
                ckpt.save(step, state(comm.rank))
                if step in (5, 49):
                    ckpt.load(state(comm.rank))
                    with comm.round("settled") as r:
                        r.gather()
                        if r.leads:
                            sizes.append(len(comm.board.values))
        return sizes

    sizes = run_ranks(3, program)[0]
    assert sizes == [sizes[0]] * 2 and sizes[0] < 20


def over_store(size, program, timeout=30.0):
    """Run `program(make)` on ranks over a real TCPStore; make(name) is the rank's communicator of
    that name."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    results = [None] * size

    def rank(number):
        made = []

        def make(name):
            made.append(
                StoreCommunicator(
                    store, number, size, name=name, join_timeout=timeout, liveness_timeout=timeout
                )
            )
            return made[-1]

        try:
            results[number] = program(number, make, store)
        except Exception as error:
            results[number] = error
        finally:
            for comm in made:
                comm.close()

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if failed := [result for result in results if isinstance(result, Exception)]:
        raise failed[0]
    return results


def test_store_does_not_grow_with_saves(tmp_path):
    def program(rank, make, store):
        sizes = []
        comm = make("job")
        ckpt = CheckpointManager(tmp_path, comm=comm)
        for step in range(50):
            ckpt.save(step, state(rank))
            if step % 2:
                comm.board.get("x")  # what this rank has deleted is gone when it answers
                with comm.round("count") as r:
                    r.gather()
                    if r.leads:
                        sizes.append(store.num_keys())
        return sizes

    sizes = over_store(3, program)[0]
    # One count may be made before a key of the same round is there, or gone; a leak would show.
    assert len(sizes) == 25 and max(sizes[-10:]) <= max(sizes[:10])


def test_several_managers_in_one_job_at_the_same_time(tmp_path):
    """Two runs saved from two threads of each rank; neither sees the other's rounds."""

    def program(rank, make, store):
        failed = []

        def run(name):
            try:
                with CheckpointManager(tmp_path / name, comm=make(name)) as ckpt:
                    for step in range(8):
                        ckpt.save(step, state(rank))
                    assert ckpt.load(state(rank)).step == 7
            except Exception as error:
                failed.append(error)

        threads = [
            threading.Thread(target=run, args=(name,)) for name in ("a", "b")[:: (-1) ** rank]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        assert failed == [] and not any(thread.is_alive() for thread in threads)

    over_store(3, program)
    for name in ("a", "b"):
        assert len(list((tmp_path / name).iterdir())) == 8


def test_several_managers_one_after_the_other(tmp_path):
    def program(comm):
        for name in ("a", "b", "a"):
            with CheckpointManager(tmp_path / name, comm=comm) as ckpt:
                newest = ckpt.latest()
                with comm.round("looked"):
                    pass
                ckpt.save(newest.step + 1 if newest else 0, state(comm.rank))

    run_ranks(3, program)
    found = {
        name: sorted(entry.name for entry in (tmp_path / name).iterdir()) for name in ("a", "b")
    }
    assert found == {"a": ["checkpoint-0", "checkpoint-1"], "b": ["checkpoint-0"]}
