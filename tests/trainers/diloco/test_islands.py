"""Islands and their server: what must be equal is, to the last bit."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.diloco import (
    Access,
    DelayedNesterov,
    DiLoCoServer,
    Refused,
    Rules,
    ServerUnreachable,
)
from ckpt_trainers.diloco.client import Target, server_status

from .islands import PLAIN, Island, Net, at_once, same, serve, trained, until


def alone(steps: int, seed: int = 1) -> Island:
    island = Island(seed)
    island.train(steps)
    return island


def test_one_worker_with_plain_steps_is_plain_training() -> None:
    """With the server's arithmetic in float64: g - (g - l) is l."""
    with serve(outer_optimizer=PLAIN, dtype=torch.float64) as server:
        island = trained(server, 1, "a", 23, sync_every=5, bf16_comm=False)
        assert server.status()["version"] == 4
    assert same(island.values(), alone(23).values())


def test_in_float32_it_is_so_up_to_rounding() -> None:
    with serve(outer_optimizer=PLAIN) as server:
        island = trained(server, 1, "a", 23, sync_every=5, bf16_comm=False)
    for name, value in alone(23).values().items():
        torch.testing.assert_close(island.values()[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bf16", [True, False])
def test_two_workers_with_equal_data_are_one(bf16: bool) -> None:
    options: dict[str, Any] = {"sync_every": 4, "bf16_comm": bf16}
    with serve() as server:
        one = trained(server, 1, "a", 18, **options)
        digest = server.checksum()
    with serve(rules=Rules(workers=2)) as server:
        found = at_once({n: partial(trained, server, 1, n, 18, **options) for n in ("a", "b")})
        assert server.checksum() == digest
    assert same(found["a"].values(), one.values()) and same(found["b"].values(), one.values())


def test_workers_with_other_data_end_a_round_with_the_same_parameters() -> None:
    with serve(rules=Rules(workers=3)) as server:
        work = {n: partial(trained, server, s, n, 12, sync_every=4) for s, n in enumerate("abc")}
        found = at_once(work)
        global_model = server.model.snapshot(server.model.layout)
    for island in found.values():
        assert same(island.values(), global_model)


def test_the_round_is_the_outer_optimizer_on_the_mean() -> None:
    start = Island(1).values()
    moved = [{n: start[n] - v for n, v in alone(4, seed).values().items()} for seed in (1, 2)]
    parameters = {n: torch.nn.Parameter(v) for n, v in start.items()}
    outer = torch.optim.SGD(parameters.values(), lr=0.7, momentum=0.9, nesterov=True)
    for name, parameter in parameters.items():
        parameter.grad = (moved[0][name] + moved[1][name]) / 2
    outer.step()
    with serve(rules=Rules(workers=2)) as server:
        options: dict[str, Any] = {"sync_every": 4, "bf16_comm": False}
        work = {n: partial(trained, server, s, n, 4, **options) for s, n in ((1, "a"), (2, "b"))}
        found = at_once(work)
    assert same(found["a"].values(), {n: p.detach() for n, p in parameters.items()})


def test_a_worker_takes_the_servers_parameters_first() -> None:
    other = {n: v + 1 for n, v in Island().values().items()}
    with DiLoCoServer(other, access=Access(port=0)) as server:
        island = Island()
        with island.worker(server, sync_every=3) as worker:
            assert same(island.values(), other)
            assert worker.checksum() == server.checksum()


def test_a_late_joiner_starts_from_the_current_parameters() -> None:
    with serve() as server:
        first = Island(1)
        with first.worker(server, worker_id="a", sync_every=4) as worker:
            first.train(8)
            late = Island(2)
            with late.worker(server, worker_id="b", sync_every=4) as other:
                assert other.rounds == [2] and other.checksum() == worker.checksum()
                at_once({"a": lambda: first.train(8), "b": lambda: late.train(8)})
                assert worker.checksum() == other.checksum() == server.checksum()


def test_a_late_joiner_that_is_early_waits_for_the_round_of_the_others() -> None:
    with serve() as server:
        first, late = Island(1), Island(2)
        with (
            first.worker(server, worker_id="a", sync_every=4) as worker,
            late.worker(server, worker_id="b", sync_every=4) as other,
        ):
            thread = threading.Thread(target=late.train, args=(4,))
            thread.start()
            until(lambda: "b" in server.rounds.fragments[0].received)
            first.train(4)
            thread.join(30)
            assert not server.rounds.counted("b", 0, 0) and server.rounds.counted("a", 0, 0)
            assert worker.checksum() == other.checksum()


def test_bf16_halves_what_is_sent() -> None:
    sent = {}
    for bf16 in (True, False):
        with serve() as server:
            island = Island()
            with island.worker(server, sync_every=2, bf16_comm=bf16) as worker:
                island.train(2)
                sent[bf16] = worker.sync_metrics["diloco/bytes_sent"]
    elements = sum(p.numel() for p in Net().parameters())
    assert sent[False] - sent[True] == pytest.approx(2 * elements, abs=16)


def test_parameters_of_half_precision() -> None:
    """What the model starts from is what counts, not what the server rounded away."""
    with serve(outer_optimizer=PLAIN) as server:
        server.model.layout = server.model.layout.to(torch.bfloat16)
        island = Island()
        island.model.bfloat16()
        with island.worker(server, sync_every=1, bf16_comm=True) as worker:
            before = server.model.parameters["enter.weight"].detach().clone()
            worker._after_step()
            assert torch.equal(server.model.parameters["enter.weight"], before), "nothing moved"


# Asynchronous.


def test_asynchronous_workers_wait_for_nobody() -> None:
    rules = Rules(workers=2, asynchronous=True)
    with serve(rules=rules, outer_optimizer=partial(DelayedNesterov, delay=2)) as server:
        fast, slow = Island(1), Island(2)
        with (
            fast.worker(server, worker_id="a", sync_every=2) as worker,
            slow.worker(server, worker_id="b", sync_every=2),
        ):
            fast.train(8)
            assert worker.rounds == [4]
            slow.train(2)
            assert server.rounds.members["b"].staleness == 4
            assert server.status()["version"] == 5


def test_an_asynchronous_worker_alone_is_a_synchronous_one() -> None:
    islands = []
    for asynchronous in (True, False):
        with serve(rules=Rules(asynchronous=asynchronous)) as server:
            islands.append(trained(server, 1, "a", 12, sync_every=3))
    assert same(islands[0].values(), islands[1].values())


def test_a_grace_period_makes_one_step_of_what_comes_together() -> None:
    with serve(rules=Rules(workers=2, asynchronous=True, grace_period=0.5)) as server:
        at_once({n: partial(trained, server, s, n, 4, sync_every=4) for s, n in enumerate("ab")})
        assert server.status()["version"] in (1, 2)
        assert server.rounds.fragments[0].number <= 2


# Fragments.


def test_one_worker_with_fragments_syncs_each_in_turn() -> None:
    with serve() as server:
        island = Island()
        with island.worker(server, sync_every=6, num_fragments=3) as worker:
            island.train(13)  # sends at 2, 4, 6 ...; each lands at the next
            assert worker.rounds == [2, 2, 1]
            assert worker.sync_metrics["diloco/fragment_syncs"] == 5
            assert worker.progress.next_fragment == 0
        assert server.status()["rounds"] == [2, 2, 2]


def test_training_goes_on_while_a_fragment_travels() -> None:
    """The other worker of the round has not come yet, and the first one trains."""
    with serve(rules=Rules(workers=2)) as server:
        first, second = Island(1), Island(2)
        options: dict[str, Any] = {"sync_every": 6, "num_fragments": 2}
        with (
            first.worker(server, worker_id="a", **options) as worker,
            second.worker(server, worker_id="b", **options) as other,
        ):
            first.train(5)  # sent at 3; would land at 6
            assert worker.rounds == [0, 0] and first.step == 5
            at_once({"a": lambda: first.train(2), "b": lambda: second.train(7)})
            assert worker.rounds == other.rounds == [1, 0]
            names = {spec.name for spec in worker.layouts[0].specs}
            assert names and all(torch.equal(worker.base[n], other.base[n]) for n in names)


def test_two_workers_with_equal_data_and_fragments_are_one() -> None:
    options: dict[str, Any] = {"sync_every": 6, "num_fragments": 3}
    with serve() as server:
        one = trained(server, 1, "a", 25, **options)
        digest = server.checksum()
    with serve(rules=Rules(workers=2)) as server:
        found = at_once({n: partial(trained, server, 1, n, 25, **options) for n in ("a", "b")})
        assert server.checksum() == digest
    assert same(found["a"].values(), one.values())


def test_workers_of_one_run_have_equally_many_fragments() -> None:
    with (
        serve() as server,
        Island().worker(server, sync_every=4, num_fragments=2),
        pytest.raises(Refused, match="num_fragments is 2 in this run"),
    ):
        Island().worker(server, sync_every=4, num_fragments=3).start()


# Speed.


def test_dylu_gives_the_slow_one_fewer_steps() -> None:
    with serve(rules=Rules(workers=2, dylu=True)) as server:
        fast, slow = Island(1), Island(2)
        options: dict[str, Any] = {"sync_every": 8, "dylu": True, "heartbeat_interval": 0.05}
        quick = fast.worker(server, worker_id="a", **options)
        lame = slow.worker(server, worker_id="b", **options)
        quick.speed = lambda: 40.0  # type: ignore[method-assign]
        lame.speed = lambda: 10.0  # type: ignore[method-assign]
        with quick, lame:
            until(lambda: lame._advice == 2 and quick._advice == 8)
            at_once({"a": lambda: fast.train(8), "b": lambda: slow.train(8)})
            assert (quick.sync_every, lame.sync_every) == (8, 2)
            at_once({"a": lambda: fast.train(8), "b": lambda: slow.train(2)})
            assert quick.checksum() == lame.checksum() and quick.rounds == [2]
            assert lame.sync_metrics["diloco/dylu_adjustments"] == 1


# Who may talk, and what is said.


def test_another_model_is_named() -> None:
    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.leave = torch.nn.Linear(8, 3)

    with (
        DiLoCoServer(Wider(), access=Access(port=0)) as server,
        pytest.raises(Refused, match=r"tensor 'leave.bias' is .*\[3\]"),
    ):
        Island().worker(server).start()
    assert server.failure is None


def test_a_token_is_asked_for_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    with serve(access=Access(port=0, token="s3cret-ümlaut")) as server:
        for token in (None, "wrong", "s3cret"):
            with pytest.raises(Refused, match="authentication required") as caught:
                Island().worker(server, token=token).start()
            assert caught.value.status == 401
    with serve(access=Access(port=0, token="s3cret")) as server:
        assert trained(server, 1, "a", 4, sync_every=2, token="s3cret").step == 4
        assert server_status(Target(server.address, "s3cret"))["version"] == 2
    assert "s3cret" not in caplog.text


def test_the_outside_needs_a_token() -> None:
    with pytest.raises(InvalidArgument, match="can be reached from outside"):
        Access(host="0.0.0.0")


def test_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_trainers.diloco.client.CONTROL_PAUSE", 0.01)
    with serve() as server:
        address = server.address
    worker = Island().worker(address, timeout=5.0)
    with pytest.raises(ServerUnreachable, match=r"no answer from the server at http://127.0.0.1"):
        worker.start()
    assert not any(t.name == "diloco-client" and t.is_alive() for t in threading.enumerate())


def test_nothing_is_left_behind() -> None:
    before = threading.active_count()
    with serve() as server:
        island = trained(server, 1, "a", 4, sync_every=2)
        assert server.status()["workers"] == []
    until(lambda: threading.active_count() == before)
    island.train(5)  # the hook is gone
