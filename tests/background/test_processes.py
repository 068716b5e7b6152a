"""Saves in the background of real ranks over gloo: training goes on, ranks die, programs fork and
end."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def processes(jobs_of):
    """processes(program, folder, ...): what every rank's program returned, or {"signal": n}."""
    programs = Path(__file__).parents[1] / "distributed" / "programs.py"
    started = jobs_of(programs, Path(__file__).with_name("saving_programs.py"))
    return lambda program, folder, **how: started.run(program, 2, folder, **{"deadline": 50, **how})


@pytest.mark.parametrize(
    ("steps", "seeds"),
    [
        (100, [1]),
        pytest.param(1000, [1, 2, 3], marks=[pytest.mark.stress, pytest.mark.timeout(600)]),
    ],
)
def test_b34_training_collectives_while_saves_overlap(tmp_path, processes, steps, seeds):
    for seed in seeds:
        folder = tmp_path / str(seed)
        results = processes(
            "b34_async", folder, steps=steps, seed=seed, deadline=50 if steps < 500 else 180
        )
        saved = list(range(0, steps, 10))
        for result in results.values():
            assert result["wrong"] == 0
            assert result["done"] == result["listed"] == saved
            assert result["right"] == [True] * len(saved)
            assert result["left"] == sorted(f"checkpoint-{step}" for step in saved)
        overlapped = [result["overlapped"] for result in results.values()]
        assert min(overlapped) > steps // 20  # or nothing was tried
        print(f"\n{steps} steps, {len(saved)} saves, {overlapped} steps of the ranks during one")


def test_b02_slices_of_dtensors(tmp_path, processes):
    for result in processes("dtensors", tmp_path / "run", rounds=5).values():
        assert result == {"found": [[float(step)] for step in range(1, 6)], "kind": "DTensor"}


@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_is_killed_in_the_background(tmp_path, processes, victim):
    results = processes("killed_in_the_background", tmp_path / "run", victim=victim)
    other = results[1 - victim]
    assert results[victim] == {"signal": 9}
    assert (other["error"], other["step"]) == ("AsyncSaveError", 2), other
    assert (other["cause"]["error"], other["cause"]["ranks"]) == ("RankLost", [victim])
    assert "step 2" in other["message"] and f"rank {victim}" in other["message"]
    assert other["seconds"] < 20
    # And nothing of the save that is tried after it: the ranks did not come together for it.
    assert other["events"][-1] == "failed 2"
    assert "committed 2" not in other["events"] and other["failed"] == [2]
    assert other["again"]["error"] in ("RankLost", "JoinTimeout")
    assert other["closing"]["error"] is None
    assert other["latest"] == 1


def test_programs_that_end_without_closing(tmp_path, processes):
    """Rank 0 hosts the store: it stays until the others have heard that the save is committed."""
    results = processes("never_closed", tmp_path / "run")
    assert results == {0: {"error": None}, 1: {"error": None}}
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["checkpoint-1"]


def test_forked_children_close_what_is_not_theirs(tmp_path, processes):
    """At once, without a word to the other ranks, and without a byte on the connections of the
    parent."""
    results = processes("forked", tmp_path / "run")
    for result in results.values():
        assert (result["child"], result["steps"]) == (0, [1, 2])
        assert result["seconds"] < 5  # liveness_timeout is 6
