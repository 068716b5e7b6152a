"""Cases from the field: what goes, what stays, what is best, and what a step that is saved again
holds."""

import errno
import os
import random
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptcore import (
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    InvalidState,
    KeepBest,
    KeepEvery,
    KeepLast,
    StorageError,
    open_checkpoint,
    open_storage,
)
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.testing import FaultStorage

values = st.floats(allow_nan=True, width=16) | st.integers(-3, 3).map(float)


def expected(there, limit, mode, saved):
    """Five lines: the newest `limit`, the best (of equal ones the earliest), and the one just
    committed."""
    known = [step for step, value in there.items() if value is not None and value == value]
    best = sorted(known, key=lambda step: (there[step] if mode == "min" else -there[step], step))[
        :1
    ]
    return {*sorted(there)[-limit:], *best, saved}


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("kind", ["local", "memory"])
@given(
    metrics=st.lists(st.none() | values, min_size=8, max_size=8),
    order=st.permutations(range(8)) | st.just(range(8)),
)
@settings(max_examples=20)
def test_b13_a_limit_and_the_best(make_root, marked, kind, limit, mode, metrics, order):
    storage = make_root(kind)
    there = {}
    with CheckpointManager(
        storage, keep=KeepLast(limit) | KeepBest("loss", mode), io_threads=1
    ) as ckpt:
        for step, value in zip(order, metrics, strict=True):
            ckpt.save(step, {"s": {"step": step}}, metrics={} if value is None else {"loss": value})
            there[step] = value
            there = {number: there[number] for number in expected(there, limit, mode, step)}
            assert {info.step for info in ckpt.list()} == {*there}
            assert step in there and 1 <= len(there) <= limit + 2
            known = [
                number
                for number in there
                if there[number] is not None and there[number] == there[number]
            ]
            assert (ckpt.best() is None) == (not known)
            assert not known or ckpt.best().step in known
            assert ckpt.latest().step == max(there)
        assert sorted(marked.files(storage)) == sorted(f"checkpoint-{number}" for number in there)
    if kind == "memory":
        storage.fs.rm(
            storage.root, recursive=True
        )  # memory:// looks through all that it holds, at every call


def test_b13_the_total_is_the_limit_and_the_best(tmp_path, marked):
    """In order of steps, KeepLast(n) | KeepBest(m) is at most n + 1."""
    for limit in (1, 2, 3):
        with CheckpointManager(
            tmp_path / str(limit), keep=KeepLast(limit) | KeepBest("loss")
        ) as ckpt:
            counts = []
            for step in range(1, 9):
                ckpt.save(step, marked.state(step), metrics={"loss": float(step)})
                counts.append(len(ckpt.list()))
        assert counts == [min(step, limit + 1) for step in range(1, 9)]
        assert [info.step for info in ckpt.list()] == [1, *range(9 - limit, 9)]


POLICIES = {
    "last": KeepLast(1),
    "best": KeepLast(1) | KeepBest("loss"),
    "every": KeepEvery(steps=50),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_b21_a_fresh_run_beside_an_old_one(make_root, marked, kind, policy):
    """Not by time, nor by number alone: what the other run has is not counted, not best, and not
    removed."""
    storage = make_root(kind)
    for step in (500, 600, 700):
        CheckpointManager(storage, run_id="A").save(
            step, marked.state(step), metrics={"loss": -1.0}
        )
    if kind == "local":
        for number, path in enumerate(storage.root.rglob("*")):
            os.utime(path, (4e9 + number, 4e9 + number))
    before = marked.files(storage)
    with CheckpointManager(storage, run_id="B", keep=POLICIES[policy]) as ckpt:
        for step in (100, 200):
            ckpt.save(step, marked.state(step), metrics={"loss": float(-step)})
        kept = {"last": [200], "best": [200], "every": [100, 200]}[policy]
        assert [info.step for info in ckpt.list()] == kept
        assert ckpt.best("loss").step == 200
    assert {
        name: files for name, files in marked.files(storage).items() if name in before
    } == before
    assert len(marked.files(storage)) == 3 + len(kept)
    assert marked.restored(storage) == (200, 200)
    assert marked.restored(storage, run_id="A") == (700, 700)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_b21_numbers_not_texts(make_root, marked, kind):
    storage = make_root(kind)
    storage.make_folder("000100")
    storage.make_folder("checkpoint-000100")
    for folder in ("000100", "checkpoint-000100"):
        storage.write(f"{folder}/mine.bin", b"mine")
    with CheckpointManager(storage, keep=KeepLast(2)) as ckpt:
        for step in (1000, 9, 100, 10):
            ckpt.save(step, marked.state(step))
        # 1000 and the next below it are the newest two; 10 was just committed.
        assert [info.step for info in ckpt.list()] == [10, 100, 1000]
        ckpt.save(1001, marked.state(1001))
        assert [info.step for info in ckpt.list()] == [1000, 1001]
    assert {"000100", "checkpoint-000100"} < {*marked.files(storage)}
    assert (
        marked.files(storage)["000100"]
        == marked.files(storage)["checkpoint-000100"]
        == {"mine.bin"}
    )


def evaluated(root, marked, losses, keep=None):
    """A run that saves at each evaluation; a resume when the root has something."""
    with CheckpointManager(root, keep=keep or KeepLast(2) | KeepBest("loss")) as ckpt:
        ckpt.restore(marked.state(-1))
        for step, loss in losses.items():
            ckpt.save(step, marked.state(step), metrics={"loss": loss})
        return ckpt.best().step, [info.step for info in ckpt.list()]


def test_b32_best_is_a_step_and_moves_with_its_root(tmp_path, marked):
    """Nothing stores a path: a root that was moved has the same best, and two more evaluations do
    not lose it."""
    assert evaluated(tmp_path / "here", marked, {1: 0.9, 2: 0.1, 3: 0.8, 4: 0.7}) == (2, [2, 3, 4])
    there = tmp_path / "deep" / "there"
    there.parent.mkdir()
    (tmp_path / "here").rename(there)
    for path in there.rglob("*.json"):
        assert str(tmp_path).encode() not in path.read_bytes()
    assert evaluated(there, marked, {5: 0.6, 6: 0.5}) == (2, [2, 5, 6])
    assert not (tmp_path / "here").exists()
    with CheckpointManager(there, keep=KeepBest("loss")) as ckpt:
        report = ckpt.load(marked.state(-1), "best")
        assert (report.step, marked.mark(report.values)) == (2, 2)
        report = ckpt.restore(marked.state(-1), "best")
        assert (report.step, marked.mark(report.values)) == (2, 2)
        assert ckpt.verify("best") == []
        assert ckpt.best().url == str(there / "checkpoint-2")


def test_b32_the_best_of_those_that_are_there(tmp_path, marked):
    """Its folder is gone: the best of the others is best, the limit holds, and the end of the run
    does not crash."""
    root = tmp_path / "run"
    assert evaluated(root, marked, {1: 0.9, 2: 0.1, 3: 0.8, 4: 0.7}) == (2, [2, 3, 4])
    shutil.rmtree(root / "checkpoint-2")
    with CheckpointManager(root, keep=KeepLast(2) | KeepBest("loss")) as ckpt:
        assert ckpt.best().step == 4
        report = ckpt.load(marked.state(-1), "best")
        assert (report.step, marked.mark(report.values)) == (4, 4)
    assert evaluated(root, marked, {5: 0.95, 6: 0.99}) == (4, [4, 5, 6])
    for step in (4, 5, 6):
        shutil.rmtree(root / f"checkpoint-{step}")
    with CheckpointManager(root, keep=KeepBest("loss")) as ckpt:
        assert ckpt.best() is None
        with pytest.raises(CheckpointNotFound, match="loss"):
            ckpt.load(marked.state(-1), "best")


def test_b32_a_damaged_best_is_not_best_and_not_lost_in_silence(tmp_path, marked):
    """Damage that the manifest shows: the next best counts. Retention leaves what is damaged to
    people."""
    root = tmp_path / "run"
    evaluated(root, marked, {1: 0.9, 2: 0.1, 3: 0.8, 4: 0.7})
    (root / "checkpoint-2" / "model.safetensors").write_bytes(b"short")
    with CheckpointManager(
        root, run_id=CheckpointManager(root).list()[0].run_id, keep=KeepBest("loss")
    ) as ckpt:
        assert ckpt.best().step == 4
        ckpt.save(5, marked.state(5), metrics={"loss": 0.95})
        assert [info.step for info in ckpt.list()] == [4, 5]
    assert (root / "checkpoint-2" / MANIFEST_NAME).exists()


def test_best_needs_to_know_by_what(tmp_path, marked):
    with CheckpointManager(tmp_path, keep=KeepLast(3)) as ckpt:
        ckpt.save(1, marked.state(1), metrics={"loss": 0.5, "score": 1.0})
        ckpt.save(2, marked.state(2), metrics={"loss": 0.7, "score": 2.0})
        for call in (
            ckpt.best,
            lambda: ckpt.load(marked.state(-1), "best"),
            lambda: ckpt.verify("best"),
        ):
            with pytest.raises(InvalidState, match="best"):
                call()
        assert ckpt.best("loss").step == 1
        assert (ckpt.best("score", "max").step, ckpt.best("score", "min").step) == (2, 1)
        assert ckpt.best("other") is None


@pytest.mark.parametrize("run", ["other", "same"])
def test_a_source_outside_the_root_is_never_touched(tmp_path, marked, run):
    """A fine-tuning that starts from another root, even one of the same run: not this root's to
    tidy."""
    source = tmp_path / "source"
    with CheckpointManager(source, run_id="run" if run == "same" else "base") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, marked.state(step), metrics={"loss": 9.0})
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    with CheckpointManager(
        tmp_path / "tuned", run_id="run", keep=KeepLast(1) | KeepBest("loss")
    ) as ckpt:
        report = ckpt.load(marked.state(-1), source / "checkpoint-2")
        assert (report.step, marked.mark(report.values)) == (2, 2)
        for step in range(3, 9):
            ckpt.save(step, marked.state(step), metrics={"loss": 1.0 / step})
        assert [info.step for info in ckpt.list()] == [8]
        assert ckpt.best().step == 8
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before


def test_a_source_of_another_run_in_the_root_is_never_touched(tmp_path, marked):
    with CheckpointManager(tmp_path, run_id="base") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, marked.state(step), metrics={"loss": -9.0})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with CheckpointManager(tmp_path, run_id="tuned", keep=KeepLast(1) | KeepBest("loss")) as ckpt:
        report = ckpt.load(marked.state(-1), 2)
        assert (report.step, marked.mark(report.values), ckpt.run_id) == (2, 2, "tuned")
        for step in range(4, 9):
            ckpt.save(step, marked.state(step), metrics={"loss": float(step)})
        assert [info.step for info in ckpt.list()] == [4, 8]
    assert {path: data for path, data in before.items() if path.read_bytes() != data} == {}


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_b30_four_ranks_abort_and_two_save_the_step_again(make_root, marked, errors_of, kind):
    """The shards of the four never mix with those of the two; nothing foreign is a member."""
    storage = make_root(kind)

    def four(comm):
        faults = FaultStorage(storage)
        with CheckpointManager(faults, comm=comm, run_id="run", io_threads=1) as ckpt:
            ckpt.save(10, marked.parts(10, comm.rank, 64))
            if (
                comm.rank == 0
            ):  # all shards are there; then the storage dies, so that nobody can clean up either
                faults.fail(kind="create", path="*" + MANIFEST_NAME)
                faults.fail(kind=("remove", "remove_folder"), times=None)
            ckpt.save(20, marked.parts(19, comm.rank, 64))

    with pytest.warns(CheckpointWarning, match="leftovers"):
        results = errors_of(4, four)
    assert [(type(e), e.errno) for e in results] == [(StorageError, errno.EIO)] * 4, results
    (left,) = [
        files for name, files in marked.files(storage).items() if name.startswith("checkpoint-20")
    ]
    assert {f"own.rank{rank:05d}.safetensors" for rank in range(4)} <= left

    def two(comm):
        with CheckpointManager(storage, comm=comm, run_id="run", io_threads=1) as ckpt:
            live = [part for part in marked.parts(-1, comm.rank, 64) if part.key != "own"]
            assert ckpt.load(live, strict=False).step == 10
            ckpt.save(20, marked.parts(21, comm.rank, 64))
            assert marked.loaded(ckpt.restore, comm.rank, 64) == (20, 21)
            return ckpt.latest().manifest.world_size

    assert errors_of(2, two) == [2, 2]
    assert marked.files(storage) == marked.whole(storage, [10, 20])
    view = open_checkpoint(f"{storage.url}/checkpoint-20")
    assert {name for name in view.manifest.files if name.startswith("own")} == {
        "own.rank00000.safetensors",
        "own.rank00001.safetensors",
    }
    assert view.foreign_files() == []
    if kind == "local":
        save_file(
            {"x": torch.zeros(3)}, storage.root / "checkpoint-20" / "own.rank00003.safetensors"
        )
        assert (
            errors_of(
                2,
                lambda comm: marked.loaded(
                    CheckpointManager(storage, comm=comm).restore, comm.rank, 64
                ),
            )
            == [(20, 21)] * 2
        )
        assert open_checkpoint(storage.root / "checkpoint-20").foreign_files() == [
            "own.rank00003.safetensors"
        ]


def test_pins_go_with_a_copy(tmp_path, marked):
    root = tmp_path / "run"
    with CheckpointManager(root, run_id="run", keep=KeepLast(1)) as ckpt:
        ckpt.save(1, marked.state(1))
        ckpt.pin(1)
        ckpt.save(2, marked.state(2))
        assert [(info.step, info.pinned) for info in ckpt.list()] == [(1, True), (2, False)]
        assert ckpt.verify(1) == []
        assert open_checkpoint(root / "checkpoint-1").foreign_files() == []
    shutil.copytree(root, tmp_path / "copy")
    with CheckpointManager(open_storage(tmp_path / "copy"), run_id="run", keep=KeepLast(1)) as ckpt:
        for step in random.Random(5).sample(range(3, 9), 6):
            ckpt.save(step, marked.state(step))
            assert (1, True) in [(info.step, info.pinned) for info in ckpt.list()]
        with pytest.raises(InvalidState, match="pinned"):
            ckpt.delete(1)
        ckpt.unpin(1)
        ckpt.save(9, marked.state(9))
        assert [info.step for info in ckpt.list()] == [9]
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["checkpoint-9"]


def test_a_metric_that_no_checkpoint_has_is_warned_of_once(tmp_path, marked):
    """At the first commit that has metrics; one without any says nothing."""
    keep = KeepLast(1) | KeepBest("eval_loss")
    with CheckpointManager(tmp_path / "typo", keep=keep) as ckpt:
        ckpt.save(1, marked.state(1))
        with pytest.warns(
            CheckpointWarning, match="'eval_loss', which no checkpoint has.* they have: acc, loss"
        ) as told:
            for step in (2, 3):
                ckpt.save(step, marked.state(step), metrics={"loss": 1.0, "acc": 0.5})
        assert len(told) == 1
    with CheckpointManager(tmp_path / "right", keep=keep) as ckpt:
        ckpt.save(1, marked.state(1), metrics={"eval_loss": 1.0})
    with CheckpointManager(tmp_path / "right", keep=keep) as ckpt:  # another checkpoint has it
        ckpt.restore(marked.state(-1))
        ckpt.save(2, marked.state(2), metrics={"loss": 1.0})


@pytest.mark.parametrize("by", ["the user", "retention"])
def test_what_an_overwrite_could_not_remove_does_not_come_back(make_root, marked, by):
    """The checkpoint that was put aside counts while the one that replaced it is not there: it has
    to go first."""
    storage = FaultStorage(make_root("local"))
    ckpt = CheckpointManager(storage, keep=KeepLast(1), io_threads=1)
    ckpt.save(1, marked.state(1))
    storage.fail(times=None, kind="rename", path="*.replaced-*/*")
    with pytest.warns(CheckpointWarning, match="could not be removed"):
        ckpt.save(1, marked.state(2), overwrite=True)
    storage.clear()
    aside = [name for name in marked.files(storage) if ".replaced-" in name]
    assert len(aside) == 1
    if by == "the user":
        ckpt.delete(1)
        assert marked.files(storage) == {}
    else:
        ckpt.save(5, marked.state(3))
        assert marked.restored(storage) == (5, 3)
        marked.whole(storage, [5])
