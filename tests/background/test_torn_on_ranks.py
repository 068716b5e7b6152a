"""B02 on several ranks: replicas are compared, and bytes written, as they were when `save_async`
was called."""

import threading

import pytest
import torch

from ckptcore import (
    AsyncSaveError,
    CheckpointManager,
    ReplicationMismatch,
    SharingPattern,
    StateComponent,
    ValidationLevel,
    open_checkpoint,
    open_storage,
)
from ckptcore.testing import FaultStorage
from ckptcore.testing.processes import patience
from ckptcore.testing.ranks import run_ranks

SIZE = 4
GROUPS = {"dp": [[0, 2], [1, 3]]}
PATTERNS = SharingPattern
LEVELS = list(ValidationLevel)


@pytest.fixture(autouse=True)
def split_everything(monkeypatch):
    """Even the smallest replicated state is split over its ranks, and staged in pieces."""
    monkeypatch.setattr("ckptcore.saving.plan.MIN_SHARE_BYTES", 1)


def declare(pattern, level):
    group = "dp" if pattern is PATTERNS.PER_GROUP else None

    def declared(state):
        return [
            StateComponent(
                key,
                value,
                pattern,
                group,
                validate_replication=level is not None,
                validation_level=level or "QUICK",
            )
            for key, value in state.items()
            if key != "rng"  # virtual ranks share one process's streams
        ]

    return declared


def salt_of(pattern, rank):
    """What makes a rank's state its own: where the pattern says that it is."""
    return {PATTERNS.PER_RANK: 7 * rank, PATTERNS.PER_GROUP: rank % 2, PATTERNS.GLOBAL: rank}.get(
        pattern, 0
    )


CASES = [
    *((PATTERNS.REPLICATED, level) for level in LEVELS),
    *((PATTERNS.PER_GROUP, level) for level in (ValidationLevel.QUICK, ValidationLevel.FULL)),
    (PATTERNS.PER_RANK, None),
    (PATTERNS.GLOBAL, None),
]


@pytest.mark.parametrize(
    "rounds",
    [3, pytest.param(50, marks=[pytest.mark.stress, pytest.mark.timeout(900)])],
    ids=["few", "many"],
)
@pytest.mark.parametrize(
    ("pattern", "level"), CASES, ids=[f"{p.name}-{v.name if v else ''}" for p, v in CASES]
)
def test_b02_every_kind_of_leaf_on_four_ranks(
    tmp_path, everything, check_step, small_pieces, pattern, level, rounds
):
    meet = threading.Barrier(SIZE, timeout=30 * patience())
    declared = declare(pattern, level)

    def program(comm):
        faults = FaultStorage(open_storage(tmp_path))
        salt = salt_of(pattern, comm.rank)
        live = everything(0, items=600, salt=salt)
        with CheckpointManager(
            faults, comm=comm, process_groups=GROUPS, run_id="run", drain_timeout=20
        ) as ckpt:
            for step in range(1, rounds + 1):
                faults.clear()
                gate = faults.block(1 + step % 2, kind="write_at")
                handle = ckpt.save_async(step, declared(live.at(step).components()))
                # At once, and differently on every rank: a replica that is compared later would not
                # be equal.
                live.at(step + 10_000 * (1 + comm.rank))
                if faults.count("create") or pattern is not PATTERNS.GLOBAL:
                    gate.wait_reached(20)
                live.at(step + 20_000)
                assert not handle.done()
                meet.wait()
                gate.open()
                assert handle.result(60).step == step
                written, total = handle.progress
                assert written == total and (total > 0) == (
                    pattern is not PATTERNS.GLOBAL or comm.rank == 0
                )
                truth = 0 if pattern is PATTERNS.GLOBAL else salt
                check_step(ckpt, step, declared=declared, items=600, salt=truth)
        return True

    assert run_ranks(SIZE, program) == [True] * SIZE
    view = open_checkpoint(tmp_path / f"checkpoint-{rounds}")
    assert view.verify() == []
    writers = {name: c.writers for name, c in view.manifest.components.items()}
    assert set(writers["all"]) == ({0} if pattern is PATTERNS.GLOBAL else set(range(SIZE)))


@pytest.mark.parametrize("level", LEVELS)
def test_b02_slices_and_their_replicas(tmp_path, sharded_part, level):
    meet = threading.Barrier(SIZE, timeout=30 * patience())

    def program(comm):
        faults = FaultStorage(open_storage(tmp_path))
        live = sharded_part(comm.rank, SIZE, 0)
        state = [StateComponent("m", live, PATTERNS.SHARDED, validation_level=level)]
        with CheckpointManager(faults, comm=comm, drain_timeout=20) as ckpt:
            for step in (1, 2, 3):
                faults.clear()
                gate = faults.block(kind="write_at")
                live.at(step)
                handle = ckpt.save_async(step, state)
                live.at(step + 1000 * (1 + comm.rank))
                gate.wait_reached(20)
                live.at(step + 9000)
                meet.wait()
                gate.open()
                assert handle.result(60).step == step
                assert ckpt.load(state, step).step == step
                assert live.plain() == sharded_part(comm.rank, SIZE, step).plain()
        return True

    assert run_ranks(SIZE, program) == [True] * SIZE


@pytest.mark.parametrize("level", [level for level in LEVELS if level is not ValidationLevel.NONE])
@pytest.mark.parametrize("name", ["big", "small", "value"])
def test_a_difference_is_found_though_it_is_gone_by_then(tmp_path, level, name):
    """The other way round: replicas differ when `save_async` is called, and are equal ever
    after."""

    def program(comm):
        faults = FaultStorage(open_storage(tmp_path))
        events = []
        live = {"big": torch.zeros(3000), "small": torch.zeros(3), "value": [0.0]}
        state = [StateComponent("m", live, PATTERNS.REPLICATED, validation_level=level)]
        ckpt = CheckpointManager(faults, comm=comm, on_event=events.append)
        live[name][-1] = 4.0 if comm.rank == 2 else 0.0
        handle = ckpt.save_async(1, state)
        live[name][-1] = 0.0
        with pytest.raises(AsyncSaveError) as caught:
            handle.result(60)
        assert ckpt.save_async(2, state).result(60).step == 2
        ckpt.close()
        assert [
            (event.kind, event.step) for event in events if event.kind in ("committed", "failed")
        ] == [("failed", 1), ("committed", 2)]
        return caught.value

    for error in run_ranks(SIZE, program):
        cause = error.__cause__
        assert (error.step, type(cause)) == (1, ReplicationMismatch)
        assert (cause.component, cause.ranks) == ("m", [2])
        assert cause.keys == (["value/0"] if name == "value" else [name])
        if level is ValidationLevel.FULL and name != "value":
            found = cause.details[name]
            assert (found["differing"], found["largest difference"]) == (1, 4.0)
            assert found["first index"] == (2999 if name == "big" else 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-2"]
