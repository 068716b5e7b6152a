"""A trainer as an island: resumed exactly, refused where it cannot be one, told in the logs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.callbacks import DiLoCoCallback, TBLogger
from ckpt_trainers.diloco import Access, DiLoCoError, DiLoCoServer, DiLoCoWorker
from ckpt_trainers.diloco.outer import named_parameters
from ckpt_trainers.main import build_model
from ckpt_trainers.model import ByteGPT

from .islands import until

STEPS: dict[str, Any] = {"max_steps": 14, "num_train_epochs": 1, "logging_strategy": "no"}


@pytest.fixture
def model(tiny: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {n: p.detach() for n, p in named_parameters(ByteGPT(tiny.gpt)).items()}


def serve(model: dict[str, torch.Tensor], **options: Any) -> DiLoCoServer:
    return DiLoCoServer(model, **{"access": Access(port=0, patience=5.0), **options})


def island(server: DiLoCoServer, name: str = "", **options: Any) -> DiLoCoCallback:
    return DiLoCoCallback(server.address, **{"sync_every": 4, "worker_id": name, **options})


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in named_parameters(trainer.model).items()}


def test_the_environment_says_what_arguments_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not DiLoCoCallback().active
    said = {
        "SERVER": "host:1",
        "SYNC_EVERY": "20",
        "WORKER_ID": "w",
        "BF16_COMM": "false",
        "DYLU": "yes",
        "HEARTBEAT_INTERVAL": "1.5",
        "NUM_FRAGMENTS": "2",
    }
    for name, value in said.items():
        monkeypatch.setenv(f"DILOCO_{name}", value)
    found = DiLoCoCallback()
    assert found.active and found.server_addr == "host:1"
    options = found.options
    assert (options.sync_every, options.worker_id, options.bf16_comm) == (20, "w", False)
    assert (options.dylu, options.heartbeat_interval, options.num_fragments) == (True, 1.5, 2)
    given = DiLoCoCallback("", sync_every=5, bf16_comm=True)
    assert not given.active and given.options.sync_every == 5 and given.options.bf16_comm
    monkeypatch.setenv("DILOCO_SYNC_EVERY", "many")
    with pytest.raises(InvalidArgument, match=r"DILOCO_SYNC_EVERY='many': sync_every is no int"):
        DiLoCoCallback()
    monkeypatch.setenv("DILOCO_SYNC_EVERY", "0")
    with pytest.raises(InvalidArgument, match="sync_every=0: out of range"):
        DiLoCoCallback()


def test_without_a_server_it_does_nothing(tiny: Any) -> None:
    plain = tiny.trainer("plain", **STEPS)
    plain.train()
    idle = DiLoCoCallback()
    watched = tiny.trainer("idle", callbacks=(idle,), **STEPS)
    watched.train()
    assert idle.state_dict() == {}
    assert tiny.differences("plain", "idle", 14).keys() == {"callbacks"}


def test_a_lone_island_with_plain_outer_steps_is_plain_training(
    tiny: Any, model: dict[str, torch.Tensor]
) -> None:
    plain = tiny.trainer("plain", **STEPS)
    start = weights(plain)
    plain.train()
    sgd = partial(torch.optim.SGD, lr=1.0)
    with serve(start, outer_optimizer=sgd, dtype=torch.float64) as server:
        trained = tiny.trainer("island", callbacks=(island(server, bf16_comm=False),), **STEPS)
        trained.train()
        assert server.status()["version"] == 3
    assert all(torch.equal(weights(trained)[n], v) for n, v in weights(plain).items())


def test_metrics_reach_the_loggers(tiny: Any, model: dict[str, torch.Tensor]) -> None:
    written: dict[str, float] = {}

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            written[tag] = value

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    with serve(model) as server:
        # The logger comes first: what is added is there before anyone writes.
        callbacks = (TBLogger(Writer()), island(server))
        tiny.trainer(callbacks=callbacks, max_steps=8, num_train_epochs=1).train()
    assert written["diloco/sync_count"] == 2 and written["diloco/bytes_sent"] > 0


def test_an_island_stopped_and_resumed_is_as_if_it_had_not_been(
    tiny: Any, model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """The server, too. The schedule, the data and the moments go on; so do the rounds."""

    def train(server: DiLoCoServer, run: str, stop: int | None) -> dict[str, torch.Tensor]:
        notes = tiny.notes()

        def do(name: str, state: Any, control: Any, **_: Any) -> None:
            if name == "on_step_end" and state.global_step == stop:
                control.should_training_stop = True

        notes.do = do
        trainer = tiny.trainer(run, notes, callbacks=(island(server, "a"),), **STEPS)
        trainer.train()
        return weights(trainer)

    with serve(model) as server:
        whole = train(server, "whole", None)
        digest = server.checksum()
    for stop in (3, 8):
        root = str(tmp_path / f"server-{stop}")
        with serve(model, save_dir=root) as server:
            train(server, f"stopped-{stop}", stop)
        with serve(model, save_dir=root, resume=True) as server:
            found = train(server, f"stopped-{stop}", None)
            assert server.checksum() == digest
        assert all(torch.equal(found[name], whole[name]) for name in whole), stop


def test_a_killed_island_goes_on_from_its_last_checkpoint(
    tiny: Any, model: dict[str, torch.Tensor]
) -> None:
    with serve(model) as server:
        whole = tiny.trainer("whole", callbacks=(island(server, "a"),), save_steps=3, **STEPS)
        whole.train()
    with serve(model) as server:
        notes = tiny.notes()
        notes.die_at = 10  # saved at 9; the sync at 8 is in that checkpoint
        dying = tiny.trainer("run", notes, callbacks=(island(server, "a"),), save_steps=3, **STEPS)
        with pytest.raises(tiny.died):
            dying.train()
        assert server.status()["workers"] == [], "close() says goodbye"
        again = tiny.trainer("run", callbacks=(island(server, "a"),), save_steps=3, **STEPS)
        again.train()
    assert all(torch.equal(weights(again)[n], v) for n, v in weights(whole).items())


def test_the_id_is_kept_unless_another_is_given(tiny: Any, model: dict[str, torch.Tensor]) -> None:
    with serve(model) as server:
        first = island(server)
        tiny.trainer(callbacks=(first,), max_steps=4, num_train_epochs=1).train()
        name = first.state_dict()["worker_id"]
        second = island(server)
        tiny.trainer(callbacks=(second,), max_steps=6, num_train_epochs=1).train()
        assert second.state_dict()["worker_id"] == name
        third = island(server, "other", sync_every=7)
        tiny.trainer(callbacks=(third,), max_steps=8, num_train_epochs=1).train()
        found = third.state_dict()
        assert (found["worker_id"], found["sync_every"]) == ("other", 7)


def test_too_few_workers_save_and_stop(tiny: Any, model: dict[str, torch.Tensor]) -> None:
    with serve(model) as server:
        callback = island(server)
        notes = tiny.notes()

        def do(name: str, state: Any, **_: Any) -> None:
            if name == "on_step_begin" and state.global_step == 5:
                assert callback.worker is not None
                callback.worker._heard({"stop": True})

        notes.do = do
        trainer = tiny.trainer(callbacks=(callback, notes), save_steps=100, **STEPS)
        result = trainer.train()
    assert (result.global_step, result.stop_reason) == (6, "requested")
    assert tiny.steps() == [6] and trainer.state.stop_requested_by == "DiLoCoCallback"


def test_a_server_that_is_not_there_ends_the_run(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_trainers.diloco.client.CONTROL_PAUSE", 0.01)
    with pytest.raises(DiLoCoError, match="no answer from the server"):
        tiny.trainer(callbacks=(DiLoCoCallback("127.0.0.1:1"),), **STEPS).train()


def test_what_cannot_be_an_island_is_refused(tiny: Any) -> None:
    callback = DiLoCoCallback("127.0.0.1:1")
    for kind, reason in (("fsdp2", "splits the parameters"), ("pipeline", "splits the model")):
        trainer = type("Other", (), {"kind": kind})()
        with pytest.raises(InvalidArgument, match=f"DiLoCoCallback='{kind}': .*{reason}"):
            callback.on_init_end(args=None, trainer=trainer)
    with pytest.raises(InvalidArgument, match="no step to sync after"):
        tiny.trainer(callbacks=(callback,), fuse_optim_with_backward=True, max_grad_norm=None)
    with torch.device("meta"):
        shell = torch.nn.Linear(2, 2)
    with pytest.raises(DiLoCoError, match="the model has no values"):
        DiLoCoWorker(shell, torch.optim.SGD(shell.parameters()), "127.0.0.1:1")


def test_no_sync_is_between_the_parts_of_a_checkpoint(
    tiny: Any, model: dict[str, torch.Tensor]
) -> None:
    """A fragment is on its way while the state is captured, and changes nothing before the next
    step."""
    captured: list[bool] = []
    with serve(model) as server:
        callback = island(server, num_fragments=2)
        notes = tiny.notes()

        def do(name: str, trainer: Any, **_: Any) -> None:
            worker = callback.worker
            if name == "on_save" and worker is not None and worker._in_flight is not None:
                before = weights(trainer)
                future = worker._in_flight.future
                assert future is not None
                until(future.done)  # it has come, and lies beside the model
                same = [torch.equal(v, before[n]) for n, v in weights(trainer).items()]
                captured.append(all(same) and len(same) > 0)

        notes.do = do
        tiny.trainer(callbacks=(callback, notes), **STEPS).train()
    assert len(captured) > 5 and all(captured)


def test_two_ranks_are_one_island(tiny: Any, ranks: Any, text: Path, tmp_path: Path) -> None:
    """Rank 0 talks, the other takes its parameters: what both save together is equal, or the save
    would fail; and resumed it is as if it had not stopped."""
    words = [
        f"data={text}",
        "model.n_layer=1",
        "model.n_head=2",
        "model.n_embd=8",
        "model.block_size=8",
        "trainer=ddp",
        "use_cpu=true",
        "per_device_train_batch_size=2",
        "save_steps=5",
        "logging_steps=5",
        "eval_strategy=no",
        "report_to=none",
    ]
    digests = []
    for name, stops in (("whole", [10]), ("halves", [5, 10])):
        with DiLoCoServer(build_model(tuple(words)), access=Access(port=0)) as server:
            for steps in stops:
                island = ["diloco", "worker", "--server", server.address, "--sync-every", "3"]
                output = tmp_path / "out"
                more = [
                    f"output_dir={tmp_path / name}",
                    f"max_steps={steps}",
                    "lr_scheduler_type=constant",
                ]
                codes = ranks.command(2, [*island, "--worker-id", "w", *words, *more], output)
                assert codes == [0, 0], output.read_text()
            assert server.status()["version"] == 3
            digests.append(server.checksum())
    assert digests[0] == digests[1]
    assert tiny.differences("whole", "halves", 10).keys() <= {"trainer", "callbacks"}
