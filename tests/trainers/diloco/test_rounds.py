"""The rules of a round, on a clock that the tests move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.diloco.rounds import Contribution, Member, Rounds, Rules


def rounds(*workers: str, fragments: int = 1, **rules: Any) -> Rounds:
    found = Rounds(Rules(**rules))
    for worker in workers:
        found.join(worker, Member(0.0, sync_every=100), fragments)
    return found


def send(rounds: Rounds, worker: str, base: int = 0, now: float = 0.0, fragment: int = 0) -> bool:
    wanted = rounds.wanted(worker, fragment, base)
    if wanted:
        rounds.add(worker, fragment, Contribution(base, {"w": torch.ones(1)}), now)
    return wanted


def step(rounds: Rounds, fragment: int = 0) -> list[str]:
    taken = rounds.take(fragment)
    rounds.advance(fragment, taken)
    return list(taken)


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"min_workers": 2},
        {"workers": 65},
        {"round_timeout": 0.0},
        {"heartbeat_timeout": -1.0},
        {"grace_period": float("nan")},
    ],
)
def test_numbers_that_no_run_can_have(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"give (1 <=|seconds above 0)"):
        Rules(**wrong)


def test_a_round_waits_for_all_that_are_expected() -> None:
    found = rounds("a", "b", workers=2)
    assert send(found, "b") and not found.ready(0, 0.0)
    assert send(found, "a") and found.ready(0, 0.0)
    assert step(found) == ["a", "b"]
    assert found.fragments[0].number == 1 and not found.ready(0, 0.0)


def test_the_first_round_waits_for_as_many_as_were_announced() -> None:
    found = rounds("a", workers=3)
    send(found, "a")
    assert found.open and not found.ready(0, 1e9)
    found.join("b", Member(0.0), 1)
    found.join("c", Member(0.0), 1)
    assert not found.open
    found.join("d", Member(0.0), 1)
    assert found.fragments[0].expected == {"a", "b", "c"}


def test_a_late_joiner_is_expected_in_the_next_round() -> None:
    found = rounds("a", "b", workers=2)
    found.join("c", Member(0.0), 1)
    send(found, "c")
    send(found, "a")
    send(found, "b")
    assert step(found) == ["a", "b"], "what came from c does not count"
    assert found.fragments[0].expected == {"a", "b", "c"}
    assert not found.wanted("c", 0, 0) and found.wanted("c", 0, 1)


def test_a_contribution_counts_once() -> None:
    found = rounds("a", "b", workers=2)
    send(found, "a")
    send(found, "a")
    send(found, "b")
    step(found)
    assert not send(found, "a", base=0) and found.counted("a", 0, 0)
    assert not found.counted("a", 0, 1)


def test_who_shows_no_sign_of_life_is_out() -> None:
    found = rounds("a", "b", workers=2, heartbeat_timeout=10)
    send(found, "a")
    found.members["a"].last_seen = 9.0
    assert found.expire(10.5) == ["b"] and found.ready(0, 10.5)
    assert step(found) == ["a"] and found.fragments[0].expected == {"a"}


def test_who_never_beats_is_not_evicted() -> None:
    found = rounds("a", heartbeat_timeout=10)
    found.members["a"].beats = False
    assert found.expire(1e9) == []


def test_what_an_evicted_worker_sent_is_dropped() -> None:
    found = rounds("a", "b", workers=2, heartbeat_timeout=10)
    send(found, "b")
    found.members["a"].last_seen = 20.0
    found.expire(20.0)
    assert found.take(0) == {} and not found.ready(0, 20.0)


def test_too_few_left_end_the_run_and_new_ones_begin_it_again() -> None:
    found = rounds("a", "b", workers=2, min_workers=2, heartbeat_timeout=10)
    found.members["a"].last_seen = 20.0
    send(found, "a")
    found.expire(20.0)
    assert found.stopping and not found.ready(0, 1e9)
    found.leave("a")
    assert not found.stopping and found.open
    for worker in ("a", "b"):
        found.join(worker, Member(20.0), 1)
    assert found.fragments[0].expected == {"a", "b"}


def test_an_orderly_leave_ends_nothing() -> None:
    found = rounds("a", "b", workers=2, min_workers=2)
    send(found, "a")
    found.leave("b")
    assert not found.stopping and found.ready(0, 0.0)


def test_a_round_goes_on_without_the_slow_ones_after_its_time() -> None:
    found = rounds("a", "b", workers=2, round_timeout=30)
    send(found, "a", now=5.0)
    assert found.deadline(0) == 35.0 and not found.ready(0, 34.0)
    assert found.ready(0, 35.0)
    step(found)
    assert found.fragments[0].expected == {"a", "b"}
    assert not send(found, "b", base=0), "too late for its round"


def test_but_not_with_fewer_than_the_minimum() -> None:
    found = rounds("a", "b", workers=2, min_workers=2, round_timeout=30)
    send(found, "a")
    assert not found.ready(0, 1e9)


def test_where_all_that_were_expected_are_gone_the_others_are() -> None:
    found = rounds("a", workers=1)
    found.join("b", Member(0.0), 1)
    send(found, "b")
    found.leave("a")
    assert found.ready(0, 0.0) and step(found) == ["b"]


def test_who_diverged_is_waited_for_no_longer() -> None:
    found = rounds("a", "b", workers=2)
    send(found, "a")
    found.refuse("b", 0)
    assert found.ready(0, 0.0)
    alone = rounds("a")
    alone.refuse("a", 0)
    assert alone.fragments[0].expected == {"a"}


def test_fragments_have_rounds_of_their_own() -> None:
    found = rounds("a", "b", fragments=2, workers=2)
    send(found, "a", fragment=1)
    send(found, "b", fragment=1)
    assert not found.ready(0, 0.0) and found.ready(1, 0.0)
    step(found, 1)
    assert [held.number for held in found.fragments] == [0, 1] and found.version == 1


def test_asynchronous_contributions_count_at_once_and_say_how_stale_they_are() -> None:
    found = rounds("a", "b", workers=2, asynchronous=True)
    send(found, "a")
    assert found.ready(0, 0.0) and step(found) == ["a"]
    send(found, "a", base=1)
    step(found)
    send(found, "b", base=0)
    assert step(found) == ["b"] and found.members["b"].staleness == 2
    assert not send(found, "b", base=0), "again: the answer was lost"


def test_a_grace_period_collects() -> None:
    found = rounds("a", "b", asynchronous=True, grace_period=2.0)
    send(found, "a", now=1.0)
    assert not found.ready(0, 2.9)
    send(found, "b", now=2.9)
    assert found.ready(0, 3.0) and step(found) == ["a", "b"]


def test_dylu_gives_each_as_many_steps_as_its_speed_allows() -> None:
    found = rounds("a", "b", "c", dylu=True)
    found.members["a"].steps_per_second = 10.0
    found.members["b"].steps_per_second = 3.35
    assert [found.recommended(w) for w in "abc"] == [100, 33, None]
    found.members["c"].steps_per_second = 0.01
    assert found.recommended("c") == 1
    assert rounds("a").recommended("a") is None


def test_the_state_goes_on() -> None:
    found = rounds("a", "b", fragments=2, workers=2)
    for worker in ("a", "b"):
        send(found, worker)
    step(found)
    found.join("c", Member(0.0), 2)
    again = Rounds(found.rules)
    again.load_state_dict(found.state_dict(), now=50.0)
    assert again.state_dict() == found.state_dict()
    assert again.counted("a", 0, 0) and again.fragments[1].expected == {"a", "b"}
    assert again.members["c"].last_seen == 50.0 and not again.open
