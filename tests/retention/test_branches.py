"""A run that goes back goes on from there: a restart, the best and retention follow what it did
last."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import (
    CheckpointExists,
    CheckpointManager,
    CheckpointWarning,
    KeepBest,
    KeepLast,
    Tier,
    open_checkpoint,
    scan_root,
)
from ckptcore.format.manifest import CheckpointManifest
from ckptcore.testing import run_ranks

warns = pytest.warns(CheckpointWarning, match="gone back behind")


def state(value=-1):
    return {"s": {"t": torch.full((2,), float(value)), "n": value}}


def restored(root, which="auto", **options):
    with CheckpointManager(root, io_threads=1, **options) as ckpt:
        return ckpt.restore(state(), which).step


def save(ckpt, *steps, loss=None):
    for step in steps:
        ckpt.save(step, state(step), metrics={"loss": float(step) if loss is None else loss})


def went_back(root, *, keep=None, **options):
    """100 to 500, back to 300, and then 350, 360, 370."""
    with CheckpointManager(root, keep=keep, io_threads=1, **options) as ckpt:
        save(ckpt, 100, 200, 300, 400, 500)
    ckpt = CheckpointManager(root, keep=keep, io_threads=1, **options)
    ckpt.load(state(), 300)
    with pytest.warns(
        CheckpointWarning, match="gone back behind what it saved of steps 400, 500:"
    ) as warned:
        save(ckpt, 350, 360, 370)
    assert len(warned) == 1
    return ckpt


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_restart_goes_on_with_what_the_run_did_last(make_root, kind):
    storage = make_root(kind)
    with went_back(storage, keep=KeepLast(3)) as ckpt:
        assert [info.step for info in ckpt.list()] == [350, 360, 370]
        assert ckpt.latest().step == 370
        assert ckpt.best("loss", "max").step == 370
    assert restored(storage) == restored(storage, "latest") == 370
    left = [(info.step, info.abandoned) for info in scan_root(storage)]
    assert left == [(350, False), (360, False), (370, False), (400, True), (500, True)]
    assert "abandoned" in str(scan_root(storage)[-1])
    # An abandoned one is still there for who asks for it, and is gone on from then.
    with CheckpointManager(storage, keep=KeepLast(3), io_threads=1) as ckpt:
        assert ckpt.load(state(), 500).step == 500
        with warns:
            save(ckpt, 510)
        assert [info.step for info in ckpt.list()] == [400, 500, 510]
    assert restored(storage) == 510
    assert [info.step for info in scan_root(storage) if info.abandoned] == [350, 360, 370]


def test_abandoned_ones_do_not_grow_without_bound(tmp_path):
    keep = KeepLast(2) | KeepBest("loss")
    with CheckpointManager(tmp_path, keep=keep, io_threads=1) as ckpt:
        save(ckpt, 10)
    for round_ in range(1, 5):
        with (
            CheckpointManager(tmp_path, keep=keep, io_threads=1) as ckpt,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", CheckpointWarning)
            ckpt.load(state(), 10)
            save(ckpt, *(round_ * 100 + n for n in range(4)))
            assert [info.step for info in ckpt.list()] == [10, round_ * 100 + 2, round_ * 100 + 3]
        assert len(scan_root(tmp_path)) <= 6


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_the_number_of_an_abandoned_step_is_free_again(make_root, kind):
    storage = make_root(kind)
    with CheckpointManager(storage, io_threads=1) as ckpt:
        save(ckpt, 300, 400, 500)
        ckpt.pin(500)
    with CheckpointManager(storage, io_threads=1) as ckpt:
        ckpt.load(state(), 300)
        with warns:
            ckpt.save(400, state(-400))
        with pytest.raises(CheckpointExists, match="pinned"):
            save(ckpt, 500)
        with pytest.raises(CheckpointExists, match="committed checkpoint"):
            save(ckpt, 400)
        assert ckpt.load(state(), 400).values["s"]["n"] == -400
    assert restored(storage) == 400


def test_what_another_job_commits_after_the_load_is_not_abandoned_by_it(tmp_path):
    """Of a job that was started twice the second to save a step is refused."""
    with CheckpointManager(tmp_path, io_threads=1) as ckpt:
        save(ckpt, 1)
    jobs = [CheckpointManager(tmp_path, io_threads=1) for _ in range(2)]
    for job in jobs:
        assert job.restore(state()).step == 1
    save(jobs[0], 2)
    with pytest.raises(CheckpointExists):
        save(jobs[1], 2)


def test_only_what_was_loaded_of_this_run_is_gone_on_from(tmp_path):
    """Not a part, not another run's, and nothing where nothing was loaded."""
    with CheckpointManager(tmp_path / "run", run_id="run", io_threads=1) as ckpt:
        save(ckpt, 1, 2, 3)
    with CheckpointManager(tmp_path / "other", run_id="other", io_threads=1) as ckpt:
        save(ckpt, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with CheckpointManager(tmp_path / "run", run_id="run", io_threads=1) as ckpt:
            save(ckpt, 4)
            ckpt.load(state(), 1, keys="s")
            save(ckpt, 5)
            ckpt.load(state(), tmp_path / "other" / "checkpoint-1")
            save(ckpt, 6)
            assert [info.step for info in ckpt.list()] == [1, 2, 3, 4, 5, 6]
    with CheckpointManager(tmp_path / "run", io_threads=1) as ckpt:
        ckpt.load(state(), tmp_path / "run" / "checkpoint-2")
        with warns:
            save(ckpt, 7)
        assert [info.step for info in ckpt.list()] == [1, 2, 7]


def test_steps_that_were_saved_out_of_order_are_not_abandoned_by_a_restart(tmp_path):
    """The newest is the one with the highest step, and to go on from it is not to go back."""
    with CheckpointManager(tmp_path, io_threads=1) as ckpt:
        save(ckpt, 1000, 9, 100)
    with CheckpointManager(tmp_path, io_threads=1) as ckpt:
        assert ckpt.restore(state()).step == 1000
        save(ckpt, 1001)
        assert [info.step for info in ckpt.list()] == [9, 100, 1000, 1001]


def test_what_a_restore_found_damaged_does_not_count_in_the_place_of_a_good_one(tmp_path):
    """KeepLast(2) keeps two that are good; the damaged one is not deleted without a word."""
    with CheckpointManager(tmp_path, io_threads=1) as ckpt:
        save(ckpt, 1, 2, 3)
    file = tmp_path / "checkpoint-3" / "s.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with CheckpointManager(tmp_path, keep=KeepLast(2), io_threads=1) as ckpt:
        with pytest.warns(CheckpointWarning, match="skipped checkpoint-3"):
            assert ckpt.restore(state()).step == 2
        ckpt.save(4, state(4), metrics={"loss": 9.0})
        assert [info.step for info in ckpt.list()] == [2, 4]
        assert file.exists()
    assert restored(tmp_path) == 4


def test_without_the_field_nothing_is_abandoned(tmp_path):
    with went_back(tmp_path):
        pass
    for info in scan_root(tmp_path):
        file = tmp_path / info.name / "checkpoint_manifest.json"
        manifest = CheckpointManifest.decode(file.read_bytes())
        assert manifest.abandoned == ([[4, 5]] if info.step in (350, 360, 370) else [])
        assert CheckpointManifest.decode(manifest.encode()) == manifest
        manifest.abandoned = []
        file.write_bytes(manifest.encode())
        assert b'"abandoned"' not in file.read_bytes()
    assert restored(tmp_path) == 500
    assert not any(info.abandoned for info in scan_root(tmp_path))


def test_what_is_abandoned_stays_so_when_the_way_back_is_deleted(tmp_path):
    """After two restarts retention has nothing left of the branch but its last checkpoint."""
    with went_back(tmp_path) as ckpt:
        for step in (100, 200, 300, 350, 360, 400):
            ckpt.delete(step)
    for step in (380, 390):
        with CheckpointManager(tmp_path, keep=KeepLast(1), io_threads=1) as ckpt:
            assert ckpt.restore(state()).step == step - 10
            save(ckpt, step)
            assert [info.step for info in ckpt.list()] == [step]
    with CheckpointManager(tmp_path, run_id=scan_root(tmp_path)[0].run_id, io_threads=1) as ckpt:
        save(ckpt, 400)  # by a process that has loaded nothing
        assert [info.step for info in ckpt.list()] == [390, 400]
    assert [(info.step, info.abandoned) for info in scan_root(tmp_path)] == [
        (390, False),
        (400, False),
        (500, True),
    ]


def test_a_damaged_commit_says_where_the_run_went(tmp_path):
    with went_back(tmp_path):
        pass
    (tmp_path / "checkpoint-370" / "s.safetensors").unlink()
    with pytest.warns(CheckpointWarning, match="skipped checkpoint-370"):
        assert restored(tmp_path) == 360


def test_nodes_without_shared_storage_agree(tmp_path):
    def job(work):
        def program(comm):
            root = tmp_path / f"node{comm.nodes.index([comm.rank]) if comm.nodes else comm.rank}"
            with CheckpointManager(root, comm=comm, storage_mode="node", io_threads=1) as ckpt:
                return work(ckpt)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            return run_ranks(2, program, nodes=[[0], [1]])

    def back(ckpt):
        ckpt.load(state(), 1)
        save(ckpt, 2)
        return [info.step for info in ckpt.list()]

    job(lambda ckpt: save(ckpt, 1, 2, 3))
    assert job(back) == [[1, 2], [1, 2]]
    assert job(lambda ckpt: ckpt.restore(state()).step) == [2, 2]


def test_tiers_follow_the_run(tmp_path):
    tier = lambda: [Tier(tmp_path / "tier", keep=KeepLast(3))]  # noqa: E731
    with went_back(tmp_path / "fast", keep=KeepLast(1), tiers=tier()) as ckpt:
        ckpt.wait()
    assert restored(tmp_path / "tier") == 370
    assert restored(tmp_path / "new", tiers=tier()) == 370


commands = st.lists(
    st.one_of(st.just("save"), st.just("restart"), st.integers(0, 20)), min_size=3, max_size=14
)


@given(commands)
@settings(max_examples=40, deadline=None)
def test_the_list_is_the_way_to_the_last_commit(tmp_path_factory, commands):
    """Against a model of commits that know their parents."""
    root = tmp_path_factory.mktemp("root")
    there, last, at = (
        {},
        None,
        None,
    )  # commits by step; the last one; the one that the live state comes from
    ckpt = CheckpointManager(root, run_id="run", io_threads=1)
    ckpt.restore(state())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        for command in commands:
            if command == "save":
                step = 10 + (at["step"] if at else 0)
                ckpt.save(step, state(step))
                there[step] = last = at = {"step": step, "parent": at}
            elif there:
                ckpt = CheckpointManager(root, run_id="run", io_threads=1)
                if command == "restart":
                    assert ckpt.restore(state()).step == last["step"]
                    at = last
                else:
                    step = sorted(there)[command % len(there)]
                    assert ckpt.load(state(), step).step == step
                    at = there[step]
            way, commit = [], last
            while commit:
                way += [commit["step"]] if there[commit["step"]] is commit else []
                commit = commit["parent"]
            assert [info.step for info in ckpt.list()] == sorted(way)
    assert sorted(info.step for info in scan_root(root)) == sorted(there)
    assert all(
        open_checkpoint(root / info.name).read("s/t")[0] == info.step for info in scan_root(root)
    )
