"""Ctrl-C between the commit and the return of `save`: nobody hears that the save failed, because it
has not."""

import pytest

# Calls: from rename to verdict close to each other, then a long way of cleaning up.
POINTS = [1, 12, 25, 45, 80, 150, 300, 9999]


def wrong(results, victim):
    """The points at which something else came out than it should, and what."""
    assert all(isinstance(result, list) for result in results.values()), results
    found = []
    for outcomes in zip(*(results[rank] for rank in sorted(results)), strict=True):
        where = outcomes[victim][3]
        for rank, (at, outcome, kinds, _, *later) in enumerate(outcomes):
            expected = "KeyboardInterrupt: " if rank == victim and where else 2
            heard = kinds == ["committed"] or (rank == victim and where and kinds == [])
            if not heard or [outcome, later] != [expected, [3, 2, 20.0 + rank]]:
                found.append([at, where, rank, outcome, kinds, later])
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_after_the_commit(tmp_path, processes, victim):
    results = processes.run(
        "interrupted_after_commit", 2, tmp_path, victim=victim, points=POINTS, deadline=100
    )
    assert wrong(results, victim) == []
    assert len(results[0]) > 3 and not results[victim][-1][3], "the save came to its end"


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", range(3))
def test_a_signal_at_every_call_after_the_commit(tmp_path, processes, victim):
    points = [*range(1, 5000)]
    results = processes.run(
        "interrupted_after_commit", 3, tmp_path, victim=victim, points=points, deadline=3500
    )
    print(f"{len(results[0]) - 1} points")
    assert wrong(results, victim) == []
