"""Public calls of real ranks: on all, on one alone, with one that is killed; and many random rounds
of all that can go wrong."""

from collections import Counter

import pytest

WORLD = 3


@pytest.mark.parametrize(
    ("join", "liveness", "kind"),
    [(3.0, 20.0, "JoinTimeout"), (60.0, 3.0, "RankLost")],
    ids=["join", "liveness"],
)
def test_a_rank_that_is_killed_before_it_joins(tmp_path, processes, join, liveness, kind):
    """One type, with its name, on all that are left, though rank 0, which hosts the store, ends at
    once."""
    results = processes.run(
        "killed_before_joining", 4, tmp_path, victim=3, join=join, liveness=liveness
    )
    assert results[3] == {"signal": 9}
    survivors = [results[rank] for rank in range(3)]
    assert [(result["error"], result["ranks"]) for result in survivors] == [(kind, [3])] * 3, (
        survivors
    )
    assert {result["message"] for result in survivors} == {survivors[0]["message"]}
    assert survivors[0]["message"].startswith("save of step 2")
    assert max(result["seconds"] for result in survivors) < 3 * 1.5 + 4


OWN = {"wait": True, "list": [1, 2], "latest": 2, "best": 1}
ALL = {
    "prewarm": None,
    "wait": True,
    "load step": 1,
    "load path": 1,
    "pin": None,
    "unpin": None,
    "verify": [],
    "delete": None,
    "best": 1,
}


def test_every_call_on_one_rank_alone_and_on_all(tmp_path, processes):
    """The table of docs/guide.md."""
    results = processes.run("table", WORLD, tmp_path, deadline=100)
    names = [name.removesuffix(" None") for name in results[0] if name.endswith(" None")]
    assert len(names) == 15
    for alone in range(WORLD):
        others = [rank for rank in range(WORLD) if rank != alone]
        missing = others if alone == 0 else [0]
        for name in names:
            outcome = results[alone][f"{name} {alone}"]
            assert outcome == OWN.get(name, ["JoinTimeout", missing]), (name, alone)
    for name in names:
        outcomes = [results[rank][f"{name} None"] for rank in range(WORLD)]
        assert outcomes == [outcomes[0]] * WORLD, name
        assert name not in ALL or outcomes[0] == ALL[name], (name, outcomes[0])
    saved, later = results[0]["save None"], results[0]["save_async None"]
    assert (
        results[0]["load latest None"]
        == results[0]["latest None"]
        == results[0]["restore None"]
        == later
    )
    assert results[0]["list None"] == [1, 2, saved, later] and later == saved + 1
    for rank in range(WORLD):
        assert results[rank]["after"] == 90 and results[rank]["close"] is None
        assert results[rank].get("save after close", ["RankLost", [1]]) == ["RankLost", [1]]


# What may come of a round. Of an interrupted one: what the others get; and the rank itself, where
# it was not too late.
EXPECTED = {
    "save": {"ok"},
    "thread": {"ok"},
    "state_dict fails": {"RankFailed"},
    "signal, idle": {"ok"},
    "signal, in a save": {"ok, InvalidState"},
    "stop, short": {"ok"},
    "stop, long": {"RankLost"},
    "async": {
        "ok, ['ok', 'ok'], [False, False]",
        "ok, ['ok', 'ok'], [False, True]",
        "AsyncSaveError, ['ok'], [False]",
    },
    # JoinTimeout: on a busy machine the signal may come before that rank has called at all.
    "Ctrl-C": {"ok", "RankFailed", "JoinTimeout"},
    "Ctrl-C, async": {"ok", "RankFailed", "AsyncSaveError", "JoinTimeout"},
    "signal, any time": {"ok", "RanksDisagree", "JoinTimeout", "RankFailed"},
}


def check_rounds(results):
    """How often what came out."""
    seen = Counter()
    for number, rounds in enumerate(zip(*results.values(), strict=True)):
        kinds = {kind for kind, *_ in rounds}
        assert len(kinds) == 1
        kind, where = kinds.pop(), (number, rounds)
        outcomes = [outcome for _, outcome, *_ in rounds]
        assert [after for *_, after, _ in rounds] == ["ok"] * len(rounds), where
        assert max(max(seconds, again) for _, _, seconds, _, again in rounds) < 20, where
        if kind == "signal, any time":  # ranks may be in different calls then
            assert set(outcomes) <= EXPECTED[kind], where
        else:
            left = {outcome for outcome in outcomes if outcome != "KeyboardInterrupt"}
            assert len(left) == 1 and left <= EXPECTED[kind], where
            assert outcomes.count("KeyboardInterrupt") <= ("Ctrl-C" in kind), where
        seen[f"{kind}: {', '.join(sorted(set(outcomes)))}"] += 1
    return seen


@pytest.mark.timeout(200)
def test_random_rounds_end_with_one_outcome_and_the_next_save_works(tmp_path, processes):
    check_rounds(processes.run("stress", 3, tmp_path, seed=1, rounds=15, deadline=150))


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world", "rounds"), [(2, 170), (3, 170), (4, 160)])
def test_500_random_rounds(tmp_path, processes, world, rounds):
    seen = check_rounds(
        processes.run("stress", world, tmp_path, seed=world, rounds=rounds, deadline=3500)
    )
    print(f"{rounds} rounds on {world} ranks:")
    for what, count in sorted(seen.items()):
        print(f"  {count:4} {what}")
