"""Real processes over gloo: ranks that raise, die, stop, stay away or do something else, one at a
time."""

import pytest

LIVENESS = JOIN = 5.0
# A lost rank is noticed when its heartbeat has been still for LIVENESS; it is looked for every
# LIVENESS / 4.
BOUND = LIVENESS + LIVENESS / 2 + 3
ALL = 4


def check_going_on(results, survivors, restored):
    """The checkpoint before it restores on every survivor, and the next save is whole."""
    for number, rank in enumerate(survivors):
        assert results[rank]["restored"] == restored
        assert results[rank]["model"] == {f"w{n}": restored + n for n in range(4)}
        assert results[rank]["own"] == [float(rank)] * 8, number
        assert (results[rank]["next"], results[rank]["world"], results[rank]["problems"]) == (
            9,
            len(survivors),
            0,
        )


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("SIGKILL", "capture"),
        ("SIGKILL", "write"),
        ("SIGKILL", "before the receipt"),
        ("SIGSTOP", "write"),
    ],
)
def test_rank_2_of_4_is_gone(tmp_path, processes, how, where):
    results = processes.run("fault", ALL, tmp_path, victim=2, how=how, where=where)
    assert results[2] == {"signal": 9}
    survivors = [results[rank] for rank in (0, 1, 3)]
    assert [result["error"] for result in survivors] == ["RankLost"] * 3, survivors
    assert [result["ranks"] for result in survivors] == [[2]] * 3
    assert (
        len({result["message"] for result in survivors}) == 1
        and "rank 2" in survivors[0]["message"]
    )
    assert max(result["seconds"] for result in survivors) < BOUND
    assert {"checkpoint-1"} == {name for name in survivors[0]["steps"] if "partial" not in name}
    check_going_on(results, [0, 1, 3], 1)


def test_rank_2_of_4_is_killed_after_its_receipt(tmp_path, processes):
    """All that it had to write is there, so its death does not undo the save; the next one names
    it."""
    results = processes.run(
        "fault", ALL, tmp_path, victim=2, how="SIGKILL", where="after the receipt"
    )
    assert results[2] == {"signal": 9}
    survivors = [results[rank] for rank in (0, 1, 3)]
    assert [result.get("committed") for result in survivors] == [True] * 3, survivors
    # Its silence and its absence from the next call become certain at about the same time, here.
    assert {result["error"] for result in survivors} in ({"RankLost"}, {"JoinTimeout"})
    assert [result["ranks"] for result in survivors] == [[2]] * 3
    assert max(result["seconds"] for result in survivors) < BOUND
    check_going_on(results, [0, 1, 3], 2)


def test_rank_2_of_4_raises_in_a_write(tmp_path, processes):
    results = processes.run("fault", ALL, tmp_path, victim=2, how="raise", where="write")
    assert [results[rank]["error"] for rank in range(ALL)] == ["StorageError"] * ALL
    assert len({results[rank]["message"] for rank in range(ALL)}) == 1
    assert [list(results[rank]["causes"]) for rank in range(ALL)] == [["2"]] * ALL
    assert (
        "rank 2: " in results[0]["message"]
        and max(results[rank]["seconds"] for rank in range(ALL)) < BOUND
    )
    assert results[0]["steps"] == ["checkpoint-1"]
    check_going_on(results, [0, 1, 2, 3], 1)


def test_rank_2_of_4_never_calls(tmp_path, processes):
    results = processes.run("fault", ALL, tmp_path, victim=2, how="absent", where="")
    assert [(results[rank]["error"], results[rank]["ranks"]) for rank in range(ALL)] == [
        ("JoinTimeout", [2])
    ] * ALL
    assert "must be made on every rank" in results[0]["message"]
    assert max(results[rank]["seconds"] for rank in range(ALL)) < JOIN + 3
    check_going_on(results, [0, 1, 2, 3], 1)


def test_rank_2_of_4_calls_with_another_step(tmp_path, processes):
    results = processes.run("fault", ALL, tmp_path, victim=2, how="other step", where="")
    assert [(results[rank]["error"], results[rank]["ranks"]) for rank in range(ALL)] == [
        ("RanksDisagree", [2])
    ] * ALL
    assert "rank 0 calls for a save of step 2, rank 2 for a save of step 7" in results[0]["message"]
    assert max(results[rank]["seconds"] for rank in range(ALL)) < BOUND
    check_going_on(results, [0, 1, 2, 3], 1)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_the_process_that_hosts_the_store(tmp_path, processes, how):
    """Typed and in time, also for a second call and for close, whether it died or only stopped."""
    results = processes.run("host_dies", 3, tmp_path, how=how, deadline=40)
    assert results[0] == {"signal": 9}
    for rank in (1, 2):
        for outcome in (results[rank], results[rank]["again"]):
            assert (outcome["error"], outcome["ranks"]) == ("RankLost", [0]), outcome
            assert "rank 0" in outcome["message"]
            assert outcome["seconds"] < 2 * BOUND
        assert (
            results[rank]["closing"]["error"] is None
            and results[rank]["closing"]["seconds"] < BOUND
        )
    assert [entry.name for entry in tmp_path.iterdir() if "partial" not in entry.name] == [
        "checkpoint-1"
    ]


def test_groups_as_mesh_dimensions_process_groups_and_lists(tmp_path, processes):
    results = processes.run("meshes", 4, tmp_path)
    for rank in range(4):
        dp = [[0, 2], [1, 3]]
        assert results[rank]["groups"] == {
            "mesh": dp,
            "group": dp,
            "named": dp,
            "lists": dp,
            "pp": [[0, 1], [2, 3]],
        }
        assert results[rank]["loaded"] == [[float(rank % 2)] * 8] * 4
        assert results[rank]["two"]["error"] == "InvalidState"
        assert "2 dimensions" in results[rank]["two"]["message"]


def test_zero_redundancy_optimizer_goes_on_exactly_on_any_number_of_ranks(tmp_path, processes):
    """Each rank has the moments of some parameters; by name they are one state."""
    saved = processes.run("zero", 2, tmp_path, saves=True)
    assert sum(saved[rank]["mine"] for rank in range(2)) == 6
    assert min(saved[rank]["mine"] for rank in range(2)) > 0
    for pattern, outcome in saved[0]["refused"].items():
        assert (outcome["error"], "declare it SHARDED" in outcome["message"]) == (
            "InvalidState",
            True,
        ), pattern
    for world_size in (2, 4, 1):
        resumed = processes.run("zero", world_size, tmp_path, saves=False)
        assert sum(resumed[rank]["mine"] for rank in range(world_size)) == 6
        for rank in range(world_size):
            assert resumed[rank]["weights"] == saved[0]["weights"] == saved[1]["weights"]
            assert resumed[rank]["lr"] == saved[0]["lr"] == 0.1 / 6


def test_a_coordinator_for_every_checkpoint_leaves_nothing_behind(tmp_path, processes):
    """Neither threads with a heart nor keys in the job's store pile up."""
    results = processes.run("coordinators", 2, tmp_path, saves=20)
    for rank in range(2):
        early, late = results[rank]["counts"]
        assert late == early


def check_trained(results, runs):
    for rank in (0, 1):
        assert results[rank]["wrong"] == 0
        assert len(results[rank]["saves"]) == runs and min(results[rank]["saves"]) >= 2
    assert results[0]["saves"] == results[1]["saves"]


def test_b34_training_goes_on_while_both_ranks_save(tmp_path, processes):
    check_trained(processes.run("train_while_saving", 2, tmp_path, steps=200, seeds=[1, 2]), 2)


@pytest.mark.stress
@pytest.mark.timeout(400)
def test_b34_training_goes_on_while_both_ranks_save_50_times(tmp_path, processes):
    seeds = list(range(50))
    check_trained(
        processes.run("train_while_saving", 2, tmp_path, deadline=380, steps=200, seeds=seeds), 50
    )


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [(2, 4), pytest.param(5, 12, marks=pytest.mark.stress)],
    ids=["short", "full"],
)
def test_b34_a_slow_disk_fails_no_save(tmp_path, processes, timeout, seconds):
    results = processes.run("slow_save", 2, tmp_path, group_timeout=timeout, seconds=seconds)
    for rank in (0, 1):
        assert results[rank].get("sum") == 2.0, results[rank]
        assert results[rank]["took"] > seconds > timeout


def test_b07_rank_1_cannot_read_or_write_its_part(tmp_path, processes):
    results = processes.run("b07", 2, tmp_path, deadline=30)
    for rank in (0, 1):
        for what in ("reading", "writing"):
            outcome = results[rank][what]
            assert outcome["error"] == "StorageError", outcome
            assert (
                "own.rank00001.safetensors" in outcome["message"]
                and "rank 1: " in outcome["message"]
            )
            assert list(outcome["causes"]) == ["1"] and outcome["seconds"] < 30
        assert results[rank]["after"]["error"] is None and results[rank]["last"]["error"] is None
        assert results[rank]["own"] == [float(rank)] * 8


def test_b14_random_streams_of_every_rank(tmp_path, processes):
    results = processes.run("b14", 4, tmp_path, epochs=3, batches=4, stops=[6, 8])
    for rank in range(4):
        for stop in ("6", "8"):
            found = results[rank][stop]
            assert found["drawn"] == found["expected"]
            assert found["same losses"] is True and found["same weights"] is True
    assert len({tuple(results[rank]["losses"]) for rank in range(4)}) == 4
    assert len({tuple(results[rank]["6"]["drawn"]) for rank in range(4)}) == 4


@pytest.mark.parametrize("saves", [15, pytest.param(50, marks=pytest.mark.stress)])
def test_b15_one_rank_publishes_and_nothing_is_left(tmp_path, processes, saves):
    results = processes.run("b15", 4, tmp_path, saves=saves, deadline=100)
    for rank in range(4):
        assert results[rank] == {"steps": list(range(saves)), "left": []}


def test_b35_only_rank_0_saves(tmp_path, processes):
    results = processes.run("b35", 2, tmp_path)
    for rank in (0, 1):
        only, other = results[rank]["only"], results[rank]["other"]
        assert (only["error"], only["ranks"]) == ("JoinTimeout", [1])
        assert (
            "rank 1 did not join" in only["message"]
            and "must be made on every rank" in only["message"]
        )
        assert only["seconds"] < 1.5 + 5
        assert results[rank]["entries"] == []
        assert (other["error"], other["ranks"]) == ("RanksDisagree", [1])
        assert "rank 0 calls for a save of step 1, rank 1 for a save of step 2" in other["message"]
        assert results[rank]["last"]["error"] is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-3"]


def test_one_layer_of_a_sharded_model(tmp_path, processes):
    """Saved on 2 ranks, one layer loaded on 4 with its moments; keys that are not the same
    everywhere change nothing."""
    saved = processes.run("part", 2, tmp_path, saves=True)[0]
    results = processes.run("part", 4, tmp_path, saves=False)
    for rank in range(4):
        found = results[rank]
        assert found["weights"][:2] == saved["weights"][:2]
        assert all(
            not any(map(any, w if isinstance(w[0], list) else [w])) for w in found["weights"][2:]
        )
        assert found["moments"] == [*saved["moments"][:2], None, None]
        assert found["lr"] == 0.25  # the group has a parameter that was not asked for
        assert (found["other"]["error"], found["other"]["ranks"]) == ("RanksDisagree", [1])
        assert len(found["other"]["warned"]) == (rank == 0)
