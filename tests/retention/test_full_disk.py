"""A real disk of 64 MiB that real saves fill: a typed error with the numbers, nothing left, the
next save works."""

import os
import subprocess

import pytest

from ckptcore import CheckpointManager, KeepBest, KeepLast, NoSpace, open_storage

DISK = 64 << 20
ITEMS = 3 << 19  # three tensors of 6 MiB: three checkpoints fit, the fourth does not
NBYTES = 3 * 4 * ITEMS
RANKS = 4


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def left_on(disk):
    """Free bytes and free inodes."""
    info = os.statvfs(disk)
    return info.f_bavail * info.f_frsize, info.f_ffree


def check_numbers(error, needed, marked_as):
    """What the error says about the bytes, as attributes and in its text."""
    assert type(error) is NoSpace
    assert isinstance(error, OSError)
    assert error.errno == 28
    assert error.needed >= needed
    assert 0 <= error.free < error.needed
    assert f"{error.needed:,} bytes" in str(error)
    assert f"{error.free:,} bytes free" in str(error)
    assert marked_as in error.path


def test_b48_saves_fill_the_disk(disk, marked):
    root = disk / "run"
    manager = CheckpointManager(root, run_id="run")
    for step in (10, 20, 30):
        manager.save(step, marked.state(step, ITEMS))
    before = left_on(disk)
    assert before[0] < NBYTES
    for _ in range(3):
        with pytest.raises(NoSpace) as caught:
            manager.save(40, marked.state(40, ITEMS))
        check_numbers(caught.value, NBYTES, "checkpoint-40")
        assert left_on(disk) == before, "bytes or inodes of the attempt were left"
        assert marked.files(open_storage(root)) == marked.whole(open_storage(root), [10, 20, 30])
    assert [marked.restored(root, ITEMS, step) for step in (10, 20, 30)] == [
        (10, 10),
        (20, 20),
        (30, 30),
    ]
    assert marked.restored(root, ITEMS) == (30, 30)
    manager.delete(10)
    manager.save(40, marked.state(40, ITEMS))
    assert marked.restored(root, ITEMS) == (40, 40)
    assert marked.files(open_storage(root)) == marked.whole(open_storage(root), [20, 30, 40])
    assert left_on(disk) == before


def test_b48_an_overwrite_that_does_not_fit_leaves_the_old_one(disk, marked):
    root = disk / "run"
    manager = CheckpointManager(root, run_id="run")
    for step in (10, 20, 30):
        manager.save(step, marked.state(step, ITEMS))
    before = left_on(disk)
    with pytest.raises(NoSpace) as caught:
        manager.save(30, marked.state(31, ITEMS), overwrite=True)
    check_numbers(caught.value, NBYTES, "checkpoint-30")
    assert left_on(disk) == before
    assert marked.restored(root, ITEMS) == (30, 30)
    manager.delete(20)
    manager.save(30, marked.state(31, ITEMS), overwrite=True)
    assert marked.restored(root, ITEMS) == (30, 31)
    assert marked.files(open_storage(root)) == marked.whole(open_storage(root), [10, 30])


def test_b48_retention_needs_room_for_one_more_than_it_keeps(disk, marked):
    """Save, commit, then delete: nothing is given up for a checkpoint that is not safe yet."""
    root = disk / "run"
    manager = CheckpointManager(root, run_id="run", keep=KeepLast(2))
    for step in range(1, 9):
        manager.save(step, marked.state(step, ITEMS))
        assert [info.step for info in manager.list()] == [*range(max(1, step - 1), step + 1)]
    assert marked.restored(root, ITEMS) == (8, 8)
    # Three that must stay fill the disk: the best by its metric, and the newest two.
    manager = CheckpointManager(root, run_id="run", keep=KeepLast(2) | KeepBest("loss"))
    manager.save(9, marked.state(9, ITEMS), metrics={"loss": 0.0})
    manager.save(10, marked.state(10, ITEMS), metrics={"loss": 1.0})
    manager.save(11, marked.state(11, ITEMS), metrics={"loss": 2.0})
    before = left_on(disk)
    for step in (12, 13):
        with pytest.raises(NoSpace) as caught:
            manager.save(step, marked.state(step, ITEMS), metrics={"loss": -1.0})
        check_numbers(caught.value, NBYTES, f"checkpoint-{step}")
        assert (manager.best().step, manager.latest().step) == (9, 11)
        assert left_on(disk) == before
    assert marked.files(open_storage(root)) == marked.whole(open_storage(root), [9, 10, 11])
    assert [marked.restored(root, ITEMS, step) for step in (9, 10, 11)] == [
        (9, 9),
        (10, 10),
        (11, 11),
    ]


@pytest.mark.usefixtures("split_everything")
def test_b48_saves_of_four_ranks_fill_the_disk(disk, marked, errors_of):
    """Each of the ranks writes a part, some run out of space: the same error on all, nothing of any
    of them stays."""
    root = disk / "run"
    items = ITEMS * 13 // 32  # 7.3 MiB that all have, and 2.4 MiB of each rank's own: 17.1 MiB

    def program(comm):
        seen = []
        with CheckpointManager(root, comm=comm, run_id="run") as ckpt:
            for step in (10, 20, 30):
                ckpt.save(step, marked.parts(step, comm.rank, items))
            for _ in range(3):
                with comm.round("before") as r:
                    r.gather()
                    if r.leads:
                        r.verdict = list(left_on(disk))
                before = r.verdict
                with pytest.raises(NoSpace) as caught:
                    ckpt.save(40, marked.parts(40, comm.rank, items))
                seen.append(caught.value)
                with comm.round("after") as r:
                    r.gather()
                    if r.leads:
                        r.verdict = list(left_on(disk))
                assert r.verdict == before
                assert marked.loaded(ckpt.restore, comm.rank, items) == (30, 30)
            older = [
                marked.loaded(lambda s, n=n: ckpt.load(s, n), comm.rank, items)
                for n in (10, 20, 30)
            ]
            assert older == [(10, 10), (20, 20), (30, 30)]
            ckpt.delete(10)
            ckpt.save(40, marked.parts(40, comm.rank, items))
            assert marked.loaded(ckpt.restore, comm.rank, items) == (40, 40)
        return seen

    results = errors_of(RANKS, program)
    assert [type(result) for result in results] == [list] * RANKS, results
    for errors in zip(*results, strict=True):
        assert {
            (type(e), str(e), e.needed, e.free, e.path, tuple(e.causes.items())) for e in errors
        } == {
            (
                NoSpace,
                str(errors[0]),
                errors[0].needed,
                errors[0].free,
                errors[0].path,
                tuple(errors[0].causes.items()),
            )
        }
        check_numbers(errors[0], items * 4, "checkpoint-40.partial-")
        assert all(cause.startswith("NoSpace: ") for cause in errors[0].causes.values())
    assert len(results[0]) == 3
    assert marked.files(open_storage(root)) == marked.whole(open_storage(root), [20, 30, 40])
