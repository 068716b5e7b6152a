"""Network filesystems: a rename that is done and reported as failed, or refused for files that are
held open.

A client that sends a rename again because the first answer was lost is told ENOENT (the source is
gone), EEXIST or ENOTEMPTY (the target is there) or ESTALE, of something that has happened. A folder
in which somebody has a removed file open holds a `.nfs...` file, and cannot be renamed (EBUSY) or
removed (ENOTEMPTY).
"""

import errno
import warnings

import pytest

from ckptcore import (
    CheckpointExists,
    CheckpointManager,
    CheckpointWarning,
    KeepLast,
    StorageError,
    open_storage,
)
from ckptcore.testing import FaultStorage

LOST = [errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ESTALE, errno.EIO]
names_of = errno.errorcode.get


def saved(storage, steps, marked):
    for step in steps:
        CheckpointManager(storage, run_id="run").save(step, marked.state(step))


def outcome(call):
    """What a call returned or raised, and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        try:
            result = call()
        except (StorageError, CheckpointExists) as error:
            result = error
    return result, [str(w.message) for w in caught]


@pytest.mark.parametrize("error", LOST, ids=names_of)
def test_b15_a_rename_that_published_and_reports_an_error(quick_folder, marked, error):
    """The verdict is what is on disk: committed, or an error and nothing of it. Never an error
    about a commit."""
    storage = open_storage(quick_folder / "run")
    saved(storage, [10], marked)
    faults = FaultStorage(storage)
    faults.fail(kind="rename", path="checkpoint-20", error=error, after=True)
    result, told = outcome(
        lambda: CheckpointManager(faults, run_id="run").save(20, marked.state(20))
    )
    assert faults.count("rename", "checkpoint-20") >= 1
    if isinstance(result, Exception):
        assert type(result) is StorageError, "nobody else made it"
        assert marked.restored(storage) == (10, 10), "a save that raised is committed"
        assert marked.files(storage) == marked.whole(storage, [10])
    else:
        assert (result.step, result.status, told) == (20, "committed", [])
        assert marked.restored(storage) == (20, 20)
        assert marked.files(storage) == marked.whole(storage, [10, 20])


@pytest.mark.parametrize("error", LOST, ids=names_of)
@pytest.mark.parametrize("which", [1, 2], ids=["old put aside", "new put in place"])
def test_a_rename_of_an_overwrite_that_reports_an_error(quick_folder, marked, which, error):
    """The old checkpoint or the new one, as told; and never none in between."""
    storage = open_storage(quick_folder / "run")
    saved(storage, [10, 20], marked)
    faults = FaultStorage(storage)
    faults.fail(which, kind="rename", path="checkpoint-20*", error=error, after=True)
    manager = CheckpointManager(faults, run_id="run")
    result, _ = outcome(lambda: manager.save(20, marked.state(21), overwrite=True))
    if isinstance(result, Exception):
        assert type(result) is StorageError, "nobody else made it"
        assert marked.restored(storage) == (20, 20)
    else:
        assert marked.restored(storage) == (20, 21)
    manager.save(20, marked.state(22), overwrite=True)
    manager.save(30, marked.state(30))
    assert marked.restored(storage, which=20) == (20, 22)
    assert marked.files(storage) == marked.whole(storage, [10, 20, 30])


@pytest.mark.parametrize("error", [errno.EBUSY, errno.ENOTEMPTY, errno.EACCES], ids=names_of)
def test_a_rename_that_is_refused_leaves_no_trace(quick_folder, marked, error):
    storage = open_storage(quick_folder / "run")
    saved(storage, [10], marked)
    faults = FaultStorage(storage)
    faults.fail(kind="rename", path="checkpoint-20", error=error)
    manager = CheckpointManager(faults, run_id="run")
    result, told = outcome(lambda: manager.save(20, marked.state(20)))
    assert isinstance(result, CheckpointExists if error == errno.ENOTEMPTY else StorageError)
    assert told == []
    assert marked.files(storage) == marked.whole(storage, [10])
    manager.save(20, marked.state(20))
    assert marked.files(storage) == marked.whole(storage, [10, 20])


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EACCES], ids=names_of)
@pytest.mark.parametrize("which", [1, 2], ids=["old put aside", "new put in place"])
def test_an_overwrite_whose_rename_is_refused_leaves_the_old_one(
    quick_folder, marked, which, error
):
    storage = open_storage(quick_folder / "run")
    saved(storage, [10, 20], marked)
    faults = FaultStorage(storage)
    faults.fail(which, kind="rename", path="checkpoint-20*", error=error)
    manager = CheckpointManager(faults, run_id="run")
    result, told = outcome(lambda: manager.save(20, marked.state(21), overwrite=True))
    assert (type(result), result.errno, told) == (StorageError, error, [])
    assert marked.restored(storage) == (20, 20)
    assert marked.files(storage) == marked.whole(storage, [10, 20])


@pytest.mark.parametrize("after", [False, True], ids=["refused", "done"])
@pytest.mark.parametrize("error", [*LOST, errno.EBUSY], ids=names_of)
@pytest.mark.parametrize("kind", ["rename", "remove", "remove_folder"])
def test_a_deletion_that_reports_an_error_is_finished_later(
    quick_folder, marked, kind, error, after
):
    """Retention withdraws the old one; whatever the filesystem says, it is whole or it is gone, and
    gone in the end."""
    storage = open_storage(quick_folder / "run")
    saved(storage, [10], marked)
    faults = FaultStorage(storage)
    faults.fail(kind=kind, path="checkpoint-10*", error=error, after=after)
    manager = CheckpointManager(faults, run_id="run", keep=KeepLast(1))
    result, told = outcome(lambda: manager.save(20, marked.state(20)))
    assert (result.step, result.status) == (20, "committed")
    assert all("checkpoint-10" in text for text in told)
    assert marked.restored(storage) == (20, 20)
    if "checkpoint-10" in {info.name for info in CheckpointManager(storage, run_id="run").list()}:
        assert marked.restored(storage, which=10) == (10, 10)
    result, told = outcome(lambda: manager.save(30, marked.state(30)))
    assert (result.step, told) == (30, [])
    assert marked.files(storage) == marked.whole(storage, [30])


def test_a_folder_that_holds_an_nfs_file_goes_when_it_is_gone(quick_folder, marked):
    """A reader has a file of the old checkpoint open: its folder stays, empty but for that, and
    nothing is lost."""
    root = quick_folder / "run"
    storage = open_storage(root)
    saved(storage, [10], marked)
    held = root / "checkpoint-10" / ".nfs000000000000000100000001"
    held.write_bytes(b"held open")
    manager = CheckpointManager(storage, run_id="run", keep=KeepLast(1))
    for step in (20, 30):
        result, told = outcome(lambda step=step: manager.save(step, marked.state(step)))
        assert (result.step, told) == (step, [])
        assert marked.files(storage) == {
            **marked.whole(storage, [step]),
            "checkpoint-10": {held.name},
        }
        assert marked.restored(storage) == (step, step)
    held.unlink()
    # The server removed it; what is left is an empty folder with the name of a checkpoint, which is
    # swept.
    manager.save(40, marked.state(40))
    assert marked.files(storage) == marked.whole(storage, [40])
    assert marked.restored(storage) == (40, 40)


@pytest.mark.parametrize("undo", [1, 2], ids=["the new one", "the old one"])
def test_an_undo_that_fails_hides_no_error_and_leaves_the_rest_undone_no_longer_than_needed(
    quick_folder, marked, undo
):
    """The error is the one of the save, the other rename is made all the same, and the old
    checkpoint counts."""
    storage = open_storage(quick_folder / "run")
    saved(storage, [10, 20], marked)
    faults = FaultStorage(storage)
    faults.fail(1, kind="sync_folder", path="", error=errno.ENOSPC)
    # The old one aside, the new one in its place, then the two back.
    faults.fail(2 + undo, kind="rename", path="checkpoint-20*", error=errno.EBUSY)
    manager = CheckpointManager(faults, run_id="run")
    result, told = outcome(lambda: manager.save(20, marked.state(21), overwrite=True))
    assert isinstance(result, StorageError) and result.errno == errno.ENOSPC
    assert any("could not be renamed back" in text for text in told)
    assert marked.restored(storage) in ((20, 20), (20, 21))
    manager.save(20, marked.state(22), overwrite=True)
    manager.save(30, marked.state(30))
    assert marked.restored(storage, which=20) == (20, 22)
    assert marked.files(storage) == marked.whole(storage, [10, 20, 30])
