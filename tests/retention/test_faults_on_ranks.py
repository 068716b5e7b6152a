"""Four ranks, and storage that fails one of them at every operation that writes: one verdict,
nothing of it stays."""

import errno
import warnings

import pytest

from ckptcore import CheckpointManager, CheckpointWarning, KeepLast, NoSpace, StorageError
from ckptcore.testing import FaultStorage
from ckptcore.testing.faults import WRITE_OPERATIONS

RANKS = 4
HOW = {"save": {}, "overwrite": {"overwrite": True}, "retention": {"keep": True}}

pytestmark = pytest.mark.usefixtures("split_everything")


def manager_of(storage, comm, how):
    return CheckpointManager(
        storage,
        comm=comm,
        run_id="run",
        io_threads=1,
        keep=KeepLast(1) if how.get("keep") else None,
    )


def save_with_fault(storage, marked, errors_of, how, bad=None, at=0, error=errno.EIO, after=False):
    """Step 20 is saved over step 10 while the `at`-th writing operation of rank `bad` fails; then
    it is saved again where that failed, and step 30: by rank what step 20 raised, what restored
    after it, and how many operations it took."""
    faults = [FaultStorage(storage) for _ in range(RANKS)]

    def program(comm):
        mine = faults[comm.rank]
        rank, overwrite = comm.rank, how.get("overwrite", False)
        with manager_of(storage, comm, how) as ckpt:
            ckpt.save(10, marked.parts(10, rank))
            if overwrite:
                ckpt.save(20, marked.parts(19, rank))
        with manager_of(mine, comm, how) as ckpt:
            if rank == bad:
                mine.fail(at, error=error, kind=WRITE_OPERATIONS, after=after)
            try:
                ckpt.save(20, marked.parts(20, rank), overwrite=overwrite)
                raised = None
            except StorageError as found:
                raised = found
            # Retention is rank 0's, and goes on while the others return from the save.
            with comm.round("the attempt is over"):
                pass
            took = mine.count(WRITE_OPERATIONS)
            mine.clear()
            with manager_of(storage, comm, how) as fresh:
                restored = marked.loaded(fresh.restore, rank)
            with comm.round("what is left") as r:
                r.gather()
                if r.leads:
                    r.verdict = sorted(marked.files(storage))
            left = r.verdict
            if raised is not None:
                ckpt.save(20, marked.parts(21, rank), overwrite=overwrite or after)
                assert marked.loaded(ckpt.load, rank) == (20, 21)
            ckpt.save(30, marked.parts(30, rank))
            assert marked.loaded(ckpt.restore, rank) == (30, 30)
        return raised, restored, took, left

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        results = errors_of(RANKS, program)
    assert [type(result) for result in results] == [tuple] * RANKS, results
    return results, [str(w.message) for w in caught]


def check(storage, marked, results, told, how, bad, error):
    """Whether the save failed; AssertionError unless what came of it is the same, and right, on all
    ranks."""
    raised = [result[0] for result in results]
    left = results[0][3]
    if failed := raised[0] is not None:
        kind = NoSpace if error == errno.ENOSPC else StorageError
        assert [type(e) for e in raised] == [kind] * RANKS, raised
        assert {(str(e), e.errno, e.path, e.needed) for e in raised} == {
            (str(raised[0]), error, raised[0].path, raised[0].needed)
        }
        assert all(list(e.causes) == [bad] for e in raised if e.causes), raised[0].causes
        assert "made by FaultStorage" in str(raised[0])
        # The last operation before the commit is known to be durable is on the root itself.
        assert raised[0].path == "" or "checkpoint-20" in raised[0].path
        if error == errno.ENOSPC:
            assert raised[0].needed > 0
        replaces = how.get("overwrite", False)
        if replaces and not storage.atomic_rename:
            # The old manifest was withdrawn first, as the docs say of object stores.
            assert results[0][1] in ((20, 19), (10, 10))
        else:
            assert results[0][1] == ((20, 19) if replaces else (10, 10))
            assert left == (["checkpoint-10", "checkpoint-20"] if replaces else ["checkpoint-10"])
    else:
        assert raised == [None] * RANKS
        assert results[0][1] == (20, 20)
        assert len(told) <= 1
    assert {result[1] for result in results} == {results[0][1]}
    assert marked.files(storage) == marked.whole(storage, [30] if how.get("keep") else [10, 20, 30])
    return failed


@pytest.mark.parametrize(
    "every", [pytest.param(1, id="all", marks=pytest.mark.stress), pytest.param(11, id="sample")]
)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_b48_a_failure_at_every_writing_operation_of_every_rank(
    make_root, marked, errors_of, kind, how, error, every
):
    results, _ = save_with_fault(make_root(kind), marked, errors_of, HOW[how])
    took = [result[2] for result in results]
    assert min(took) >= 7, took
    points = [(bad, at) for bad in range(RANKS) for at in range(1, took[bad] + 1)]
    failed, troubles = 0, {}
    for number, (bad, at) in enumerate(points):
        if number % every:
            continue
        storage = make_root(kind)
        try:
            results, told = save_with_fault(storage, marked, errors_of, HOW[how], bad, at, error)
            failed += check(storage, marked, results, told, HOW[how], bad, error)
        except (Exception, pytest.fail.Exception) as trouble:
            troubles.setdefault(f"{type(trouble).__name__}: {trouble}"[:400], []).append((bad, at))
    tried = len(range(0, len(points), every))
    print(
        f"\n{kind} {how}: {tried} of {len(points)} writing operations failed in turn, {failed} "
        "saves with them"
    )
    assert troubles == {}
    assert failed >= tried // 2


@pytest.mark.parametrize(
    "every", [pytest.param(1, id="all", marks=pytest.mark.stress), pytest.param(9, id="sample")]
)
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_b48_an_operation_that_took_effect_and_failed_all_the_same(
    make_root, marked, errors_of, kind, every
):
    """As when the answer of a server was lost. What the ranks are told is one thing, and the root
    is whole either way."""
    results, _ = save_with_fault(make_root(kind), marked, errors_of, {})
    points = [(bad, at) for bad in range(RANKS) for at in range(1, results[bad][2] + 1)][::every]
    troubles = {}
    for bad, at in points:
        storage = make_root(kind)
        try:
            results, _ = save_with_fault(storage, marked, errors_of, {}, bad, at, after=True)
            assert len({(type(result[0]), str(result[0]), result[1]) for result in results}) == 1, (
                results
            )
            assert results[0][1] in ((10, 10), (20, 20))
            if results[0][0] is None:
                assert results[0][1] == (20, 20), "a save that returned is committed"
            assert marked.files(storage) == marked.whole(storage, [10, 20, 30])
        except (Exception, pytest.fail.Exception) as trouble:
            troubles.setdefault(f"{type(trouble).__name__}: {trouble}"[:400], []).append((bad, at))
    print(f"\n{kind}: {len(points)} operations took effect and failed")
    assert troubles == {}
