"""Commands to a running job over HTTP, and the command line that sends them."""

from __future__ import annotations

import http.client
import importlib.util
import json
import logging
import os
import platform
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.callbacks import TrainerControlCallback, control, control_server
from ckpt_trainers.callbacks.jobs import Endpoint, announced_jobs, find_job, jobs_directory
from ckpt_trainers.control import control as control_command
from click.testing import CliRunner

from .callback_run import FakeTrainer

TOKEN = "a token of the test"


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINERS_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path / "config"


def listening(**how: Any) -> TrainerControlCallback:
    return TrainerControlCallback(**{"job_id": "job", "port": 0, "auth_token": TOKEN, **how})


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TrainerControlCallback]:
    """One that listens and whose trainer does nothing."""
    callback = listening()
    trainer = FakeTrainer([callback], tmp_path / "run" / "logs", load_best_model_at_end=False)
    trainer.fire("on_train_begin")
    yield callback
    callback.close()


def endpoint_of(callback: TrainerControlCallback) -> Endpoint:
    assert callback.endpoint is not None
    return callback.endpoint


def ask(
    callback: TrainerControlCallback,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    authorization: str | None = f"Bearer {TOKEN}",
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, answer, headers) of one request."""
    where = endpoint_of(callback)
    connection = http.client.HTTPConnection(where.host, where.port, timeout=20)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    headers = {} if authorization is None else {"Authorization": authorization}
    try:
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), dict(answer.headers)
    finally:
        connection.close()


def send(callback: TrainerControlCallback, command: str) -> None:
    status, answer, _ = ask(callback, "/jobs/job/control", {"command": command})
    assert (status, answer["status"], answer["command"]) == (200, "acknowledged", command)
    assert answer["message"] == f"Command {command} queued for execution"


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"bearer {TOKEN}",
        TOKEN,
        "Bearer \xe4",
    ],
)
def test_without_the_token_nothing_is_learnt(
    job: TrainerControlCallback, authorization: str | None
) -> None:
    for path, body in (
        ("/jobs/job/status", None),
        ("/jobs", None),
        ("/nothing", None),
        ("/jobs/job/control", {"command": "abort"}),
        ("/jobs/job/control", b"x" * 10**6),
    ):
        status, answer, headers = ask(job, path, body, authorization=authorization)
        assert (status, answer) == (401, {"detail": "authentication required"})
        assert headers["WWW-Authenticate"] == 'Bearer realm="trainer"'
    assert job._commands.empty()


@pytest.mark.parametrize(
    ("path", "body", "method", "status", "error"),
    [
        ("/jobs/job/control", {"command": "stop"}, None, 400, "Unknown command: stop"),
        ("/jobs/job/control", {"command": ["abort"]}, None, 400, "Unknown command: ['abort']"),
        ("/jobs/job/control", {}, None, 400, "Unknown command: None"),
        ("/jobs/job/control", ["abort"], None, 400, 'give {"command"'),
        ("/jobs/job/control", {"command": "abort", "data": 1}, None, 400, 'give {"command"'),
        ("/jobs/job/control", b"\xff\xfe", None, 400, 'give {"command"'),
        ("/jobs/job/control", b"[" * 60000, None, 400, 'give {"command"'),
        ("/jobs/job/control", b"", "POST", 400, 'give {"command"'),
        ("/jobs/job/control", b"x" * (64 * 1024 + 1), None, 413, "size"),
        ("/jobs/other/control", {"command": "abort"}, None, 404, "no such job"),
        ("/jobs/other/status", None, None, 404, "no such job"),
        ("/", None, None, 404, "Not Found"),
        ("/jobs/job/control", None, "GET", 405, "Method Not Allowed"),
        ("/jobs/job/status", {}, "POST", 405, "Method Not Allowed"),
    ],
)
def test_requests_that_are_refused(
    job: TrainerControlCallback, path: str, body: Any, method: str | None, status: int, error: str
) -> None:
    found, answer, _ = ask(job, path, body, method=method)
    assert found == status and error in answer["error"]
    if error.startswith("Unknown"):
        assert answer["valid_commands"] == list(control.COMMANDS)
    assert job._commands.empty()


def test_a_body_in_chunks_is_limited_too(job: TrainerControlCallback) -> None:
    where = endpoint_of(job)
    connection = http.client.HTTPConnection(where.host, where.port, timeout=20)
    connection.request(
        "POST",
        "/jobs/job/control",
        iter([b"x" * 1024] * 65),
        {"Authorization": f"Bearer {TOKEN}"},
        encode_chunked=True,
    )
    assert connection.getresponse().status == 413
    connection.close()


def half_a_request(job: TrainerControlCallback, text: str) -> socket.socket:
    where = endpoint_of(job)
    made = socket.create_connection((where.host, where.port), timeout=20)
    made.sendall(text.encode())
    return made


HALF = f"POST /jobs/job/control HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 99\r\n"


def test_slow_clients_hold_up_nobody(job: TrainerControlCallback) -> None:
    slow = [half_a_request(job, text) for text in ("", "POST /jo", HALF, f"{HALF}\r\n{{")]
    send(job, "save_checkpoint")
    began = time.monotonic()
    job.close()
    assert time.monotonic() - began < 4
    for each in slow:
        each.close()


def test_a_body_that_does_not_arrive(
    job: TrainerControlCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "PATIENCE", 0.05)
    slow = half_a_request(job, f"{HALF}\r\n{{")
    assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
    slow.close()


def test_what_is_no_http_is_no_news(
    job: TrainerControlCallback, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = half_a_request(job, "SSH-2.0-scanner\r\n\r\n")
    assert b" 400 " in stranger.recv(100)
    stranger.close()
    assert warned(caplog) == []


def test_what_fails_inside_is_told_without_its_text(
    job: TrainerControlCallback, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Any:
        raise OSError("/some/path")

    assert job._server is not None
    monkeypatch.setattr(job._server, "status", fails)
    assert ask(job, "/jobs/job/status")[:2] == (500, {"error": "OSError"})
    assert "/some/path" in caplog.text


def test_files_are_their_users_alone_and_go(
    tmp_path: Path, config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    before = os.umask(0)
    try:
        callback = listening(auth_token=None)
        trainer = FakeTrainer([callback], tmp_path / "run" / "logs", run_name="a run")
        assert not config.exists()
        trainer.fire("on_train_begin")
    finally:
        os.umask(before)
    folder = config / "jobs" / "job"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["auth_token", "endpoint.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    token = (folder / "auth_token").read_text()
    assert len(token) == 64 and set(token) <= set("0123456789abcdef")
    announced = json.loads((folder / "endpoint.json").read_text())
    assert announced == {
        "job_id": "job",
        "host": "127.0.0.1",
        "port": endpoint_of(callback).port,
        "pid": os.getpid(),
        "hostname": platform.node(),
        "started_at": pytest.approx(time.time(), abs=60),
        "output_dir": str(tmp_path / "run"),
        "logging_dir": str(tmp_path / "run" / "logs"),
        "run_name": "a run",
    }
    assert ask(callback, "/jobs", authorization=f"Bearer {token}")[1] == {"jobs": [announced]}
    where = endpoint_of(callback)
    trainer.fire("on_train_end")
    assert list((config / "jobs").iterdir()) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((where.host, where.port), timeout=5)
    assert token not in caplog.text and "takes commands at" in caplog.text


def test_without_authentication(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = listening(disable_auth=True)
    FakeTrainer([callback], tmp_path / "logs").fire("on_train_begin")
    assert ask(callback, "/jobs/job/status", authorization=None)[0] == 200
    assert not (jobs_directory() / "job" / "auth_token").exists()
    assert warned(caplog) == [
        f"TrainerControlCallback: 127.0.0.1:{endpoint_of(callback).port} asks for no token"
    ]
    callback.close()


def test_reachable_from_outside_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = listening(host="0.0.0.0")
    FakeTrainer([callback], tmp_path / "logs").fire("on_train_begin")
    where = endpoint_of(callback)
    assert warned(caplog) == [
        f"TrainerControlCallback: 0.0.0.0:{where.port} can be reached from outside"
    ]
    assert where.url == f"http://127.0.0.1:{where.port}"
    callback.close()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def taken() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_a_port_that_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with taken() as other:
        port = other.getsockname()[1]
        callback = listening(port=port)
        FakeTrainer([callback], tmp_path / "logs").fire("on_train_begin")
        assert callback.endpoint is None and not list(announced_jobs())
        (message,) = warned(caplog)
        assert message.startswith("TrainerControlCallback takes no commands: its server did not")
        assert "in use" in message
        monkeypatch.setattr(control_server, "FIRST_PORT", port)
        monkeypatch.setattr(control_server, "LAST_PORT", port)
        with pytest.raises(OSError, match=f"no free port from {port} to {port}"):
            control_server.bound_socket("127.0.0.1", None)
        monkeypatch.setattr(control_server, "LAST_PORT", port + 50)
        with control_server.bound_socket("127.0.0.1", None) as free:
            assert port < free.getsockname()[1] <= port + 50


def test_without_aiohttp_and_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeTrainer([listening(enable_http=False)], tmp_path / "a").fire("on_train_begin")
    assert warned(caplog) == []
    monkeypatch.setattr(control, "ControlServer", None)
    FakeTrainer([listening()], tmp_path / "b").fire("on_train_begin")
    assert warned(caplog) == [
        "TrainerControlCallback takes no commands: aiohttp is not installed "
        "(pip install ckptcore[control])"
    ]
    assert not list(announced_jobs())


def test_the_module_is_imported_without_aiohttp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, control_server.__name__)
    spec = importlib.util.spec_from_file_location(f"{control.__name__}_copy", control.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.ControlServer is None


@pytest.mark.parametrize("job_id", ["", ".hidden", "..", "a/b", "a b", "ä", "a\n", "x" * 201])
def test_a_job_id_is_a_plain_name(job_id: str) -> None:
    with pytest.raises(InvalidArgument, match="job_id"):
        TrainerControlCallback(job_id=job_id)


def write_endpoint(name: str, **changes: Any) -> None:
    folder = jobs_directory() / name
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        "job_id": name,
        "host": "127.0.0.1",
        "port": 1,
        "pid": os.getpid(),
        "hostname": platform.node(),
        "started_at": 1.0,
        "from a later version": True,
    }
    (folder / "endpoint.json").write_text(json.dumps({**found, **changes}))


def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_which_jobs_there_are(caplog: pytest.LogCaptureFixture) -> None:
    assert list(announced_jobs()) == []
    write_endpoint("alive")
    write_endpoint("dead", pid=dead_pid())
    write_endpoint("far", pid=dead_pid(), hostname="another machine")
    write_endpoint("renamed", job_id="alive")
    write_endpoint("nonsense", pid="1")
    write_endpoint("huge", pid=2**70)
    write_endpoint("evil", job_id="../evil")
    (jobs_directory() / "torn").mkdir()
    (jobs_directory() / "torn" / "endpoint.json").write_text('{"job_id": ')
    (jobs_directory() / "list").mkdir()
    (jobs_directory() / "list" / "endpoint.json").write_text("[]")
    assert [(j.job_id, j.is_alive()) for j in announced_jobs()] == [
        ("alive", True),
        ("dead", False),
        ("far", True),
    ]
    assert sorted(Path(m.split(" is skipped")[0]).parent.name for m in warned(caplog)) == [
        "evil",
        "huge",
        "list",
        "nonsense",
        "renamed",
        "torn",
    ]
    assert find_job("dead") is None and find_job("alive") is not None


def test_a_job_that_runs_keeps_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        write_endpoint("job", pid=other.pid)
        callback = listening()
        FakeTrainer([callback], tmp_path / "logs").fire("on_train_begin")
        assert callback.endpoint is None
        assert f"job job is running already, as pid {other.pid}" in caplog.text
        other.communicate()
    FakeTrainer([callback], tmp_path / "logs").fire("on_train_begin")  # it is gone
    assert endpoint_of(callback).pid == os.getpid()
    callback.close()


# In a run.


class At:
    """Does something in an event of a step, once."""

    def __init__(self, event: str, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act
        setattr(self, event, self.handle)

    def handle(self, state: Any, **_: Any) -> None:
        if state.global_step == self.step and self.act is not None:
            act, self.act = self.act, None
            act()


def run(tiny: Any, event: str, step: int, *commands: str, **args: Any) -> Any:
    """A run of 9 steps, saves at 3, 6 and 9, that is sent commands; (trainer, result, events)."""
    callback, notes = listening(), tiny.notes()
    sends = At(event, step, lambda: [send(callback, command) for command in commands])
    given = {"max_steps": 9, "save_steps": 3, "logging_steps": 1, **args}
    trainer = tiny.trainer(notes=notes, callbacks=(callback, sends), **given)
    return trainer, trainer.train(), notes


def test_save_and_graceful_stop(tiny: Any) -> None:
    trainer, result, notes = run(tiny, "on_step_begin", 4, "save_checkpoint")
    assert (tiny.steps(), result.global_step) == ([3, 5, 6, 9], 9)
    assert result.stop_reason is None
    trainer, result, notes = run(
        tiny, "on_step_begin", 4, "graceful_stop", "save_checkpoint", output_dir=str(tiny.root("b"))
    )
    assert (tiny.steps("b"), result.global_step) == ([3, 5], 5)
    assert (result.stop_reason, trainer.state.stop_requested_by) == (
        "requested",
        "TrainerControlCallback",
    )
    assert ("on_train_end", 5) in notes.events and not list(announced_jobs())


def test_save_and_stop_where_nothing_is_scheduled_and_going_on(tiny: Any) -> None:
    _, result, _ = run(tiny, "on_step_begin", 1, "graceful_stop", save_strategy="no")
    assert (tiny.steps(), result.global_step) == ([], 2)
    _, result, _ = run(tiny, "on_step_begin", 1, "save_and_stop", save_strategy="no")
    assert (tiny.steps(), result.global_step) == ([2], 2)
    again = tiny.trainer(max_steps=9, save_steps=3).train()
    assert (again.resumed_from, again.global_step, tiny.steps()) == (2, 9, [2, 3, 6, 9])


@pytest.mark.parametrize(
    ("event", "step"),
    [
        ("on_step_begin", 5),  # step 6 is a scheduled save
        ("on_log_step", 6),  # the log before the save
        ("on_prediction_step", 6),  # in the evaluation before the save
        ("on_step_begin", 8),  # the last step, and its final save
    ],
)
def test_an_abort_saves_nothing(tiny: Any, event: str, step: int) -> None:
    _, result, notes = run(
        tiny,
        event,
        step,
        "save_and_stop",
        "abort",
        "save_checkpoint",
        eval_strategy="steps",
        eval_steps=3,
        load_best_model_at_end=True,
    )
    ends = step if event != "on_step_begin" else step + 1
    assert tiny.steps() == [at for at in (3, 6) if at < ends]
    assert (result.stop_reason, result.global_step) == ("aborted", ends)
    evaluated = {at for name, at in notes.events if name == "on_evaluate"}
    assert (ends in evaluated) == (event == "on_prediction_step")


def test_a_save_for_the_best_model_is_measured(tiny: Any) -> None:
    _, _, notes = run(
        tiny,
        "on_step_begin",
        4,
        "save_checkpoint",
        eval_strategy="steps",
        eval_steps=3,
        load_best_model_at_end=True,
    )
    assert [at for name, at in notes.events if name == "on_evaluate"] == [3, 5, 6, 9]


def test_what_a_status_says(tiny: Any) -> None:
    found: list[Any] = []
    callback = listening()
    asks = [
        At("on_step_begin", step, lambda: found.append(ask(callback, "/jobs/job/status")[1]))
        for step in (0, 4)
    ]
    asks.append(At("on_log_step", 6, lambda: send(callback, "graceful_stop")))
    asks.append(At("on_epoch_end", 6, lambda: found.append(ask(callback, "/jobs/job/status")[1])))
    bad = At("on_train_begin", 0, lambda: None)
    bad.on_log_step = lambda logs, **_: logs.update(bad=float("nan"))  # type: ignore[attr-defined]
    tiny.trainer(callbacks=(callback, *asks, bad), max_steps=9, logging_steps=2).train()
    first, later, *_, last = found
    assert set(first) == {"status", "job_id", "timestamp", "global_step", "epoch", "max_steps"}
    assert (first["status"], first["global_step"], first["max_steps"]) == ("running", 0, 9)
    assert (later["status"], later["global_step"], later["bad"]) == ("running", 4, None)
    assert later["loss"] > 0
    assert (last["status"], last["global_step"]) == ("stopping", 6)


def test_an_error_ends_the_server(tiny: Any) -> None:
    callback, notes = listening(), tiny.notes()
    notes.die_at = 3
    trainer = tiny.trainer(notes=notes, callbacks=(callback,), max_steps=9)
    with pytest.raises(tiny.died):
        trainer.train()
    assert callback.endpoint is None and not list(announced_jobs())


def test_commands_that_come_too_late(
    job: TrainerControlCallback, caplog: pytest.LogCaptureFixture
) -> None:
    send(job, "save_checkpoint")
    job.close()
    assert warned(caplog) == [
        "TrainerControlCallback: training has ended; dropped: save_checkpoint"
    ]


def test_a_control_that_knows_no_abort(
    job: TrainerControlCallback, caplog: pytest.LogCaptureFixture
) -> None:
    class Control:
        should_training_stop = False

    send(job, "abort")
    job.on_step_end(args=None, control=Control())  # type: ignore[arg-type]
    assert Control.should_training_stop is False and "knows no should_abort" in caplog.text


# The command line.


def command(*words: str, text: str | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(control_command, list(words), input=text)
    return done.exit_code, done.stdout, done.stderr


def test_list_status_and_commands(job: TrainerControlCallback, tmp_path: Path) -> None:
    code, out, _ = command("list")
    assert code == 0
    assert out.split("  ")[0] == "job" and out.strip().endswith(str(tmp_path / "run"))
    code, out, _ = command("status", "job")
    assert code == 0 and json.loads(out)["status"] == "running"
    for word, sent in (
        (["save"], "save_checkpoint"),
        (["stop"], "graceful_stop"),
        (["save-stop"], "save_and_stop"),
        (["abort", "--yes"], "abort"),
    ):
        assert command(word[0], "job", *word[1:])[0] == 0
        assert job._commands.get_nowait() == sent
    assert command("abort", "job", text="n\n")[0] == 1 and job._commands.empty()
    assert command("abort", "job", text="y\n")[0] == 0 and job._commands.get_nowait() == "abort"


def test_a_job_by_its_url(job: TrainerControlCallback, tmp_path: Path) -> None:
    url = endpoint_of(job).url
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    assert command("save", "job", "--url", url, "--token-file", str(token))[0] == 0
    code, _, text = command("save", "other", "--url", url, "--token-file", str(token))
    assert (code, text) == (1, f"ckpt-train control: {url} refused (404): no such job here\n")
    code, _, text = command("save", "job", "--url", url)
    assert (code, text) == (
        1,
        f"ckpt-train control: {url} refused (401): authentication required\n",
    )
    assert command("save", "job", "--url", url, "--token-file", str(tmp_path / "none"))[0] == 4


def test_no_job_a_dead_job_and_one_that_does_not_answer(job: TrainerControlCallback) -> None:
    code, _, text = command("stop", "nobody")
    assert (code, text) == (
        3,
        "ckpt-train control: no job nobody is running here; see `ckpt-train control list`\n",
    )
    assert command("stop", "../job")[0] == 2 and command("stop")[0] == 2
    write_endpoint("dead", pid=dead_pid())
    assert command("stop", "dead")[0] == 3
    with taken() as gone:
        port = gone.getsockname()[1]
    write_endpoint("silent", port=port)
    code, _, text = command("stop", "silent")
    assert code == 4 and "does not answer" in text
    assert command("cleanup") == (0, "removed dead\n", "")
    assert sorted(path.name for path in jobs_directory().iterdir()) == ["job", "silent"]
    job.close()
    write_endpoint("silent", pid=dead_pid())
    assert command("list") == (0, "", "no job is running\n")
