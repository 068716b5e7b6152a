"""Object stores have no rename: attempts are built where checkpoints lie. Two jobs that meet there
harm neither's commit.

Each test holds one job at a chosen operation and lets the other one pass it.
"""

import threading

import pytest

from ckptcore import CheckpointExists, CheckpointManager, KeepLast, StorageError
from ckptcore.catalog.catalog import scan, sweep
from ckptcore.catalog.folder import Attempt, in_flight, mark_attempt, mark_name
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.testing import FaultStorage

pytestmark = pytest.mark.parametrize("kind", ["memory", "folder"])


class Meeting(FaultStorage):
    """Calls `then` once, after the first operation that `when` (kind, path) says yes to."""

    when = then = None

    def list(self, path=""):
        try:
            return super().list(path)
        finally:
            self._met("list", path)

    def make_folder(self, path):
        super().make_folder(path)
        self._met("make_folder", path)

    def _met(self, kind, path):
        if self.when is not None and self.when(kind, path):
            self.when = None
            self.then()


class Other:
    """Another job's save, in a thread, held before the operation that `block` names."""

    def __init__(self, storage, marked, run, step, mark, **block):
        self.error = None
        faults = FaultStorage(storage)
        self.gate = faults.block(**block)
        self.thread = threading.Thread(
            target=self._save, args=(faults, marked, run, step, mark), daemon=True
        )
        self.thread.start()
        self.gate.wait_reached(30)

    def _save(self, faults, marked, run, step, mark):
        try:
            CheckpointManager(faults, run_id=run, io_threads=1).save(step, marked.state(mark))
        except BaseException as error:
            self.error = error

    def finish(self):
        self.gate.open()
        self.thread.join(30)
        assert not self.thread.is_alive()


def steps_of(storage, run):
    manager = CheckpointManager(storage, run_id=run)
    return [(info.step, manager.verify(info.step)) for info in manager.list()]


def test_what_another_job_commits_while_leftovers_are_swept_stays(make_root, marked, kind):
    """The sweep has seen an attempt; by the time that it comes to it, it is a checkpoint."""
    storage = make_root(kind)
    storage.make_folder("")
    other = Other(
        storage, marked, "B", 75, 75, kind="create", path=f"checkpoint-75/{MANIFEST_NAME}"
    )
    mine = Meeting(storage)
    mine.when = lambda kind, path: (
        path == "checkpoint-75" and mine.count("close", f"checkpoint-10/{MANIFEST_NAME}") > 0
    )
    mine.then = other.finish
    CheckpointManager(mine, run_id="A", keep=KeepLast(1)).save(10, marked.state(10))
    assert mine.when is None, "the two have met"
    assert other.error is None
    assert steps_of(storage, "B") == [(75, [])], (
        "a committed checkpoint of another run was swept away"
    )
    assert steps_of(storage, "A") == [(10, [])]
    assert marked.restored(storage, run_id="B") == (75, 75)


def test_a_folder_that_another_job_has_just_made_is_not_swept_from_under_it(
    make_root, marked, kind
):
    storage = make_root(kind)
    storage.make_folder("")
    mine = Meeting(storage)
    mine.when = lambda kind, path: kind == "make_folder" and path == "checkpoint-75"
    mine.then = lambda: CheckpointManager(storage, run_id="A", keep=KeepLast(1)).save(
        10, marked.state(10)
    )
    CheckpointManager(mine, run_id="B").save(75, marked.state(75))
    assert mine.when is None, "the two have met"
    assert steps_of(storage, "B") == [(75, [])]
    assert steps_of(storage, "A") == [(10, [])]


@pytest.mark.parametrize("runs", [("A", "B"), ("run", "run")], ids=["two runs", "one run twice"])
@pytest.mark.parametrize("held", ["create", "close"])
@pytest.mark.parametrize("file", ["model.safetensors", MANIFEST_NAME])
def test_two_jobs_that_save_the_same_step(make_root, marked, kind, runs, held, file):
    """Whoever is told that it saved the step has saved it; who is refused takes nothing of the
    other away."""
    storage = make_root(kind)
    storage.make_folder("")
    CheckpointManager(storage, run_id=runs[0]).save(10, marked.state(10))
    other = Other(storage, marked, runs[1], 75, 2, kind=held, path=f"checkpoint-75/{file}")
    mine = None
    try:
        CheckpointManager(storage, run_id=runs[0], io_threads=1).save(75, marked.state(1))
    except (CheckpointExists, StorageError) as error:
        mine = error
    after_mine = (
        [(i.step, i.run_id) for i in CheckpointManager(storage, run_id=runs[0]).list()]
        if mine is None
        else None
    )
    other.finish()
    errors = [error for error in (mine, other.error) if error is not None]
    assert len(errors) == 1, f"one saves it and one is refused: {errors}"
    winner, mark = (runs[0], 1) if mine is None else (runs[1], 2)
    assert mine is not None or (75, winner) in after_mine
    assert (75, []) in steps_of(storage, winner), "what was committed is gone, or not whole"
    assert marked.restored(storage, which=75, run_id=winner) == (75, mark)
    assert type(errors[0]) is CheckpointExists, errors
    assert marked.files(storage) == {
        **marked.whole(storage, [10, 75] if winner == runs[0] else [75], run=winner),
        "checkpoint-10": marked.files(storage)["checkpoint-10"],
    }


@pytest.mark.parametrize(
    "at", [("list", "checkpoint-75"), ("make_folder", "checkpoint-75")], ids=lambda at: at[0]
)
def test_what_another_job_commits_while_this_one_makes_its_place_stays(make_root, marked, kind, at):
    """The place was looked at and found empty; before anything is put there, the other job has come
    and gone."""
    storage = make_root(kind)
    storage.make_folder("")
    mine = Meeting(storage)
    # The place is looked at twice: when the ranks join, and right before it is taken.
    looks = iter(range(1, 100))
    mine.when = lambda kind, path: (kind, path) == at and (kind != "list" or next(looks) == 2)
    mine.then = lambda: CheckpointManager(storage, run_id="B").save(75, marked.state(2))
    with pytest.raises(CheckpointExists, match="checkpoint-75") as caught:
        CheckpointManager(mine, run_id="A", io_threads=1).save(75, marked.state(1))
    assert caught.value.step == 75
    assert mine.when is None, "the two have met"
    assert marked.files(storage) == marked.whole(storage, [75], run="B")
    assert marked.restored(storage, which=75, run_id="B") == (75, 2)


@pytest.mark.parametrize("gone", ["the mark", "a file"])
def test_an_attempt_that_another_job_has_cleared_away_is_not_committed(
    make_root, marked, kind, gone
):
    storage = make_root(kind)
    storage.make_folder("")
    other = Other(
        storage, marked, "A", 75, 1, kind="create", path="checkpoint-75/index.rank00000.msgpack"
    )
    names = marked.files(storage)["checkpoint-75"]
    (name,) = (
        [n for n in names if n.startswith("attempt.")]
        if gone == "the mark"
        else names & {"model.safetensors"}
    )
    storage.remove(f"checkpoint-75/{name}")
    other.finish()
    assert type(other.error) is CheckpointExists, other.error
    assert CheckpointManager(storage, run_id="A").list() == []
    # Without the mark nothing says whose the rest is.
    CheckpointManager(storage, run_id="A").save(75, marked.state(2), overwrite=gone == "the mark")
    assert marked.files(storage) == marked.whole(storage, [75], run="A")
    assert marked.restored(storage) == (75, 2)


def test_the_mark_of_a_dead_attempt_beside_a_living_one_is_not_swept(make_root, marked, kind):
    """Two met, one died before it could take its mark back. What the other writes is its own."""
    storage = make_root(kind)
    mine = Attempt.new("run")
    dead = Attempt(mine.run, mine.machine, 2**22 + 5, "1", 1)
    for attempt in (dead, mine):
        mark_attempt(storage, "checkpoint-75", str(attempt))
    storage.write("checkpoint-75/model.safetensors", b"half")
    before = {mark_name(str(dead)), mark_name(str(mine)), "model.safetensors"}
    assert [info.status for info in scan(storage)] == ["partial"]
    told = []
    with in_flight(str(mine)):
        assert sweep(storage, scan(storage), "run", told.append) == []
    assert marked.files(storage) == {"checkpoint-75": before}
    assert sweep(storage, scan(storage), "run", told.append) == ["checkpoint-75"]
    assert told == []
    assert marked.files(storage) == {}
