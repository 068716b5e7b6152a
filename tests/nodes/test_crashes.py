"""One node fails, or dies, in the middle: no restore is ever put together from two saves, and the
next save goes on."""

from __future__ import annotations

import errno

import pytest

from ckptcore import CheckpointExists, CheckpointManager, KeepLast, StorageError, open_storage
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.storage.remote import FsspecStorage
from ckptcore.testing import FaultStorage, Killed
from ckptcore.testing.faults import WRITE_OPERATIONS
from ckptcore.testing.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::ckptcore.CheckpointWarning")


def killed(job, step, *nodes, overwrite=False, disk=open_storage, mark=None, at=(1, 1), **where):
    """Save `step`, while the lowest rank of each of `nodes` dies at an operation of its disk (at:
    by node); what the ranks raised."""
    disks = [disk(root) for root in job.roots]
    struck = {job.nodes[node][0]: FaultStorage(disks[node]) for node in nodes}
    for rank, faults in struck.items():
        faults.kill(at[rank // 2], how="raise", **where)

    def program(comm):
        root = struck.get(comm.rank, disks[comm.rank // 2])
        job.manager(comm, root=root).save(
            step, job.state(mark or step, comm.rank), overwrite=overwrite
        )

    return run_ranks(4, program, nodes=job.nodes, errors=True, notice=True)


@pytest.mark.parametrize("node", [0, 1])
def test_a_crash_between_the_two_publishes_leaves_no_checkpoint(job, node):
    job.save(10)
    results = killed(job, 20, node, kind="rename", path="checkpoint-20")
    assert isinstance(results[2 * node], Killed)
    there = [root.joinpath("checkpoint-20", MANIFEST_NAME).exists() for root in job.roots]
    assert there == [node == 1, node == 0]
    assert job.restores() == 10
    lacking = ["node 0 (ranks 0, 1)", "node 1 (ranks 2, 3)"][node]
    assert [
        text for text in job.said if f"skipped checkpoint-20: not on {lacking}" in text
    ] == job.said
    assert len(job.said) == 1

    def looks(comm):
        with job.manager(comm) as ckpt:
            return [info.step for info in ckpt.list()], ckpt.latest().step

    assert job.run(looks) == [([10], 10)] * 4
    job.save(20)  # what is on one node alone gives way without being asked
    assert job.restores() == 20
    assert job.names() == [["checkpoint-10", "checkpoint-20"]] * 2
    for root in job.roots:
        assert CheckpointManager(root, storage_mode="node", run_id="run").verify(20) == []


def test_what_is_on_one_node_alone_is_swept_by_a_later_save(job):
    job.save(10)
    killed(job, 20, 1, kind="rename", path="checkpoint-20")
    assert job.names()[0] == ["checkpoint-10", "checkpoint-20"]
    job.save(15)
    assert job.names() == [["checkpoint-10", "checkpoint-15"]] * 2
    assert job.restores() == 15


@pytest.mark.parametrize("node", [0, 1])
def test_a_crash_in_an_overwrite_keeps_the_old_one(job, node):
    """One node has the new one in its place, and the old one aside, the other the old one alone."""
    job.save(20)
    before = [open_storage(root).read(f"checkpoint-20/{MANIFEST_NAME}") for root in job.roots]
    killed(job, 20, node, overwrite=True, at=(2, 2), kind="rename", path="checkpoint-20*")
    kinds = [
        sorted(name.split("-")[1].partition(".")[2] for name in names) for names in job.names()
    ]
    assert kinds[node] == ["partial", "replaced"]
    assert kinds[1 - node] == ["", "replaced"]
    assert job.restores() == 20

    def reads(comm):
        with job.manager(comm) as ckpt:
            live = job.state(-1, comm.rank)
            return ckpt.restore(live).manifest.encode()

    assert job.run(reads)[::2] == before
    job.save(30)
    assert job.names() == [["checkpoint-20", "checkpoint-30"]] * 2
    assert [
        open_storage(root).read(f"checkpoint-20/{MANIFEST_NAME}") for root in job.roots
    ] == before
    assert job.restores() == 30


def test_a_crash_in_the_middle_of_retention_is_finished_by_the_next_one(job):
    job.save(10)

    def program(comm):
        faults = FaultStorage(open_storage(job.roots[comm.rank // 2]))
        if comm.rank == 2:
            faults.fail(kind="rename", path="checkpoint-10/*")
        with job.manager(comm, root=faults, keep=KeepLast(1)) as ckpt:
            ckpt.save(20, job.state(20, comm.rank))

    job.run(program)
    assert job.names() == [["checkpoint-20"], ["checkpoint-10", "checkpoint-20"]]
    assert job.restores() == 20
    job.save(30, keep=KeepLast(2))
    assert job.names() == [["checkpoint-20", "checkpoint-30"]] * 2


def failing(job, node, at, *, overwrite, storage=lambda s: s, error=errno.EIO, after=False):
    """Save 20 while the at-th writing operation of all ranks on one node's disk fails; what it
    raised and took."""
    faults = [FaultStorage(storage(root)) for root in job.roots]

    def program(comm):
        mine = faults[comm.rank // 2]
        with job.manager(comm, root=mine, keep=KeepLast(2)) as ckpt:
            ckpt.save(10, job.state(10, comm.rank))
            if overwrite:
                ckpt.save(20, job.state(19, comm.rank))
            with comm.round("begin"):
                mine.log.clear()
            if comm.rank == 2 * node and at:
                mine.fail(at, error=error, kind=WRITE_OPERATIONS, after=after)
            with comm.round("armed"):
                pass
            try:
                ckpt.save(20, job.state(20, comm.rank), overwrite=overwrite)
                raised = None
            except (StorageError, CheckpointExists) as found:
                raised = found
            with comm.round("over"):
                pass
            took = mine.count(WRITE_OPERATIONS)
            mine.clear()
            with job.manager(comm, root=mine) as fresh:
                restored = job.restored(fresh)
            ckpt.save(20, job.state(21, comm.rank), overwrite=True)
            assert job.restored(ckpt) == 21
            ckpt.save(30, job.state(30, comm.rank))
            assert job.restored(ckpt) == 30
            return raised and str(raised), restored, took

    results = job.run(program)
    assert len({result[:2] for result in results}) == 1, results
    return results[0][0], results[0][1], results[2 * node][2]


def every_operation(job, kind, overwrite, step):
    def storage(root):
        return open_storage(root) if kind == "local" else FsspecStorage(f"file://{root}", {})

    folder = job.roots[0].parent
    took = failing(type(job)(folder / "count"), 1, 0, overwrite=overwrite, storage=storage)[2]
    assert took > 20
    old = 19 if overwrite else 10
    failed = tried = 0
    for at in range(1, took + 1, step):
        raised, restored, _ = failing(
            type(job)(folder / str(at)), 1, at, overwrite=overwrite, storage=storage
        )
        tried += 1
        failed += raised is not None
        if raised is None:
            assert restored == 20, at
        elif kind == "local":
            assert restored == old, (at, raised)
        else:  # objects are withdrawn before they are replaced
            assert restored in (old, 10), (at, raised)
    assert failed > tried / 2


@pytest.mark.parametrize("kind", ["local", "folder"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_fault_on_one_node_is_one_verdict_on_all_ranks(job, kind, overwrite):
    """The save fails on all ranks, or on none; what restores is that of one save; the next one
    works."""
    every_operation(job, kind, overwrite, step=9)


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["local", "folder"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_fault_at_every_operation_on_one_node_is_one_verdict_on_all_ranks(job, kind, overwrite):
    every_operation(job, kind, overwrite, step=1)


def every_death(job, kind, overwrite, pairs):
    """The lowest ranks of both nodes die, one at its j-th and the other at its k-th writing
    operation. What restores is the old one or the new one, all of it; the next save works, and
    nothing is left of what was begun."""

    def disk(root):
        return open_storage(root) if kind == "local" else FsspecStorage(f"file://{root}", {})

    folder = job.roots[0].parent
    seen = set()
    for number, (j, k) in enumerate(pairs):
        made = type(job)(folder / str(number))
        roots = made.roots
        made.roots = [disk(root) for root in roots]
        made.save(10, 20)
        made.roots = roots
        results = killed(
            made,
            20 if overwrite else 30,
            0,
            1,
            overwrite=overwrite,
            disk=disk,
            mark=33,
            at=(j, k),
            kind=WRITE_OPERATIONS,
        )
        made.roots = [disk(root) for root in roots]
        found = made.restores()
        # An object is withdrawn before it is replaced: what was there is gone then.
        assert found in ((20, 33, 10) if overwrite and kind == "folder" else (20, 33)), (
            j,
            k,
            results,
        )
        seen.add(found)
        made.save(40)
        assert made.restores() == 40
        assert made.said == []
        made.roots = roots
        first, second = made.names()
        assert first == second, (j, k)
        assert set(first) <= {f"checkpoint-{step}" for step in (10, 20, 30, 40)}
    return seen


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["local", "folder"])
def test_both_nodes_may_die_anywhere(job, kind, overwrite):
    assert 33 in every_death(job, kind, overwrite, [(3, 9), (14, 17), (17, 14), (99, 99)])


@pytest.mark.stress
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["local", "folder"])
def test_both_nodes_may_die_at_any_pair_of_operations(job, kind, overwrite):
    pairs = [(j, k) for j in (*range(1, 40), 99) for k in sorted({1, j - 1, j, j + 1, 99}) if k > 0]
    assert len(every_death(job, kind, overwrite, pairs)) > 1
