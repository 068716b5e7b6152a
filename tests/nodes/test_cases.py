"""Two nodes with disks of their own: both hold what they need, and what does not fit together is
said on all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptcore import (
    CheckpointCoordinator,
    CheckpointCorrupt,
    CheckpointManager,
    CheckpointNotFound,
    InvalidState,
    KeepLast,
    NoUsableCheckpoint,
    RanksDisagree,
    SharingPattern,
    StateComponent,
    open_checkpoint,
)
from ckptcore.ranks.communicator import SingleProcess


def test_b36_every_node_holds_all_that_it_needs(job):
    job.save(1, 2, 3, 4, 5, keep=KeepLast(2))
    assert job.names() == [["checkpoint-4", "checkpoint-5"]] * 2
    assert job.restores() == 5
    assert job.said == []
    first, second = (open_checkpoint(root / "checkpoint-5").manifest for root in job.roots)
    assert (first.node, second.node) == (0, 1)
    assert first.nodes == second.nodes == [[0, 1], [2, 3]]
    assert first.checkpoint_id == second.checkpoint_id
    assert (first.sequence, first.attempt_id, first.created) == (
        second.sequence,
        second.attempt_id,
        second.created,
    )
    assert first.sequence == 5
    for manifest, ranks in ((first, [0, 1]), (second, [2, 3])):
        assert {record.writer for record in manifest.files.values()} == set(ranks)
        assert manifest.storage_mode == "node"
    assert {
        "global.safetensors",
        "same.safetensors",
        "group.dp-00000.safetensors",
    } <= second.files.keys()
    assert "node.node00001.safetensors" in second.files
    assert "node.node00000.safetensors" not in second.files
    for root in job.roots:
        assert open_checkpoint(root / "checkpoint-5").verify() == []


@pytest.mark.parametrize("node", [0, 1])
def test_b36_a_node_whose_disk_is_gone_is_named_on_all_ranks(job, on_all, node):
    job.save(1, 2)
    shutil.rmtree(job.roots[node])
    name = ["node 0 (ranks 0, 1)", "node 1 (ranks 2, 3)"][node]

    def program(comm):
        with job.manager(comm) as ckpt:
            errors = []
            for call in ("restore", "load"):
                try:
                    job.restored(ckpt, call)
                except CheckpointNotFound as error:
                    errors.append(error)
            assert ckpt.latest() is None
            assert job.plain(job.state(-1, comm.rank)) == job.plain(job.state(-1, comm.rank))
            return errors

    results = job.run(program)
    error = on_all([result[0] for result in results], NoUsableCheckpoint)
    assert error.reasons == {"checkpoint-2": f"not on {name}", "checkpoint-1": f"not on {name}"}
    error = on_all([result[1] for result in results], CheckpointNotFound)
    assert f"checkpoint-2: not on {name}" in str(error)


def test_b36_shared_storage_that_is_not_shared_is_found_before_anything_is_published(job, on_all):
    def program(comm):
        with job.manager(comm, storage_mode="shared") as ckpt:
            ckpt.save(1, job.state(1, comm.rank))

    error = on_all(job.run(program, errors=True), InvalidState)
    assert "node 1 (ranks 2, 3)" in str(error)
    assert "storage_mode='node'" in str(error)
    assert error.ranks == [2, 3]
    assert list(job.roots[0].iterdir()) == []
    assert not job.roots[1].exists()


def test_storage_that_is_shared_after_all_is_found_before_anything_is_published(job, on_all):
    job.roots[1] = job.roots[0]

    def program(comm):
        with job.manager(comm) as ckpt:
            ckpt.save(1, job.state(1, comm.rank))

    error = on_all(job.run(program, errors=True), InvalidState)
    assert "storage_mode='shared'" in str(error)
    assert error.ranks in ([0, 1], [2, 3])
    assert job.names() == [[], []]


def test_a_checkpoint_of_the_other_mode_is_refused_by_name(job, folder, on_all):
    job.save(1)
    shared = folder / "shared"

    def program(comm):
        with job.manager(comm, storage_mode="shared", root=shared) as ckpt:
            ckpt.save(2, job.state(2, comm.rank))
        errors = []
        for mode, root, call in (
            ("shared", job.roots[0], "restore"),
            ("node", shared, "restore"),
            ("node", shared, "load"),
        ):
            with job.manager(comm, storage_mode=mode, root=root) as ckpt:
                try:
                    job.restored(ckpt, call)
                except InvalidState as error:
                    errors.append(error)
        return errors

    results = job.run(program)
    assert "saved with storage_mode='node'" in str(
        on_all([found[0] for found in results], InvalidState)
    )
    for n in (1, 2):
        error = on_all([found[n] for found in results], InvalidState)
        assert "saved with storage_mode='shared'" in str(error)
        assert "storage_mode='node'" in str(error)


def test_ranks_that_mean_different_modes_are_told_so(job, on_all):
    def program(comm):
        with job.manager(
            comm, storage_mode="node" if comm.rank == 3 else "shared", root=job.roots[0]
        ) as ckpt:
            ckpt.save(1, job.state(1, comm.rank))

    error = on_all(job.run(program, errors=True), RanksDisagree)
    assert error.ranks == [3]
    assert "storage_mode='node'" in str(error)


def test_a_single_process_writes_the_same_in_both_modes_but_for_the_record(tmp_path, same):
    state = {"model": {"w": [1.0, 2.0], "n": 2**70}, "rest": {"at": 3}}
    for mode in ("shared", "node"):
        with CheckpointManager(
            tmp_path / mode, storage_mode=mode, run_id="a", keep=KeepLast(2)
        ) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step, state, metrics={"loss": 1 / step})
            assert [info.step for info in ckpt.list()] == [2, 3]
            assert (ckpt.latest().step, ckpt.best("loss", "min").step) == (3, 3)
            assert ckpt.verify() == []
            ckpt.pin(2)
            ckpt.save(4, state)
            ckpt.save(5, state)
            assert [info.step for info in ckpt.list()] == [2, 4, 5]
            ckpt.unpin(2)
            ckpt.delete(2)
            live = {"model": {"w": [0.0], "n": 0}, "rest": {"at": 0}}
            same(dict(ckpt.restore(live).values), state)
    found = {mode: open_checkpoint(tmp_path / mode / "checkpoint-5") for mode in ("shared", "node")}
    shared, node = (found[mode].manifest for mode in ("shared", "node"))
    assert (shared.node, node.node, node.nodes) == (None, 0, [[0]])
    assert shared.files == node.files
    assert (tmp_path / "shared" / "checkpoint-5" / "checkpoint_manifest.json").read_text().count(
        "storage_mode"
    ) == 0


def test_a_coordinator_saves_and_loads_one_checkpoint_per_node(job, on_all):
    def program(comm):
        path = job.roots[comm.rank // 2] / "here"
        state = job.state(7, comm.rank)
        how = {"process_groups": {"dp": [[0, 2], [1, 3]]}, "comm": comm, "storage_mode": "node"}
        info = CheckpointCoordinator(state, **how).save_checkpoint(path, step=7)
        live = job.state(-1, comm.rank)
        report = CheckpointCoordinator(live, **how).load_checkpoint(path)
        assert job.plain(live, report.values) == job.expected(7, comm.rank)
        return info.step, info.manifest.node, Path(info.url).parent.name

    assert job.run(program) == [(7, 0, "disk0"), (7, 0, "disk0"), (7, 1, "disk1"), (7, 1, "disk1")]

    def missing(comm):
        path = job.roots[comm.rank // 2] / "here"
        CheckpointCoordinator(
            job.state(-1, comm.rank), {"dp": [[0, 2], [1, 3]]}, comm=comm, storage_mode="node"
        ).load_checkpoint(path)

    shutil.rmtree(job.roots[1] / "here")
    error = on_all(job.run(missing, errors=True), CheckpointNotFound)
    assert "node 1 (ranks 2, 3) has no part of it" in str(error)


def test_parts_of_two_checkpoints_are_never_put_together(job, folder, on_all):
    """Step 1 of two runs, one on each node's disk."""
    job.save(1, run_id="a")
    kept = job.roots[1]
    job.roots[1] = folder / "other"
    shutil.rmtree(job.roots[0])
    job.save(1, run_id="b")
    job.roots[1] = kept

    def program(comm):
        with job.manager(comm, run_id=None) as ckpt, pytest.raises(NoUsableCheckpoint) as found:
            ckpt.restore(job.state(-1, comm.rank))
        # What is asked for by its path is opened on every node, and compared.
        root = job.roots[comm.rank // 2] / "checkpoint-1"
        how = {"process_groups": {"dp": [[0, 2], [1, 3]]}, "comm": comm, "storage_mode": "node"}
        with pytest.raises(CheckpointCorrupt, match="part of another checkpoint"):
            CheckpointCoordinator(job.state(-1, comm.rank), **how).load_checkpoint(root)
        return found.value

    error = on_all(job.run(program), NoUsableCheckpoint)
    assert error.reasons == {"checkpoint-1": "not on node 1 (ranks 2, 3)"}


def test_a_mode_that_there_is_not(tmp_path):
    with pytest.raises(InvalidState, match="storage_mode must be"):
        CheckpointManager(tmp_path, storage_mode="local")
    component = StateComponent("a", {"x": 1}, SharingPattern.GLOBAL)
    with pytest.raises(InvalidState, match="storage_mode must be"):
        CheckpointCoordinator([component], comm=SingleProcess(), storage_mode="local")
