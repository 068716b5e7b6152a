"""`ckpt-train diloco` as its user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from ckpt_trainers.diloco import Access
from ckpt_trainers.diloco.command import make_server
from ckpt_trainers.diloco.outer import DelayedNesterov
from ckpt_trainers.main import main
from click.testing import CliRunner, Result

from ckptcore import CheckpointManager, scan_root
from ckptcore.testing.processes import patience

from .islands import Island, Net, serve

WORDS = ["model.n_layer=1", "model.n_head=2", "model.n_embd=8", "model.block_size=8"]


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> None:
    sys.exit(main(words))


def run(*words: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(command, ["diloco", *words])


def test_status_as_a_table_and_as_json() -> None:
    with (
        serve(access=Access(port=0, token="secret")) as server,
        Island().worker(server, worker_id="island-1", token="secret", sync_every=4),
    ):
        token = {"DILOCO_TOKEN": "secret", "DILOCO_SERVER": server.address}
        shown = run("status", "--checksum", **token)
        found = run("status", "--json", **token)
    assert shown.exit_code == 0 and f"checksum {server.checksum()}" in shown.output
    assert "synchronous, running: 0 outer steps, round 0, 202 parameters" in shown.output
    assert [line.split()[0] for line in shown.output.splitlines()[3:]] == ["worker", "island-1"]
    said = json.loads(found.output)
    assert said["workers"][0]["worker"] == "island-1" and said["rounds"] == [0]


def test_what_goes_wrong_is_one_line(tmp_path: Path) -> None:
    gone = run("status", "--server", "127.0.0.1:1")
    assert gone.exit_code == 4 and "no answer from the server" in gone.output
    with serve(access=Access(port=0, token="secret")) as server:
        refused = run("status", "--server", server.address)
        assert refused.exit_code == 1
        assert "authentication required" in refused.output
    missing = run("status", "--token-file", str(tmp_path / "none"))
    assert missing.exit_code == 3
    outside = run("server", *WORDS, "--host", "0.0.0.0")
    assert outside.exit_code == 2 and "give a token" in outside.output
    unknown = run("server", "model.n_lair=1")
    assert unknown.exit_code == 2 and "n_lair" in unknown.output
    for result in (gone, refused, missing, outside, unknown):
        assert "Traceback" not in result.output


def test_the_options_of_a_server(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        net = Net()
        for parameter in net.parameters():
            parameter.data.fill_(0.25)
        manager.save(7, {"model": net, "other": {"x": 1}})
    token = tmp_path / "token"
    token.write_text("secret\n")
    given: dict[str, Any] = {
        "workers": 3,
        "min_workers": 2,
        "host": "127.0.0.1",
        "port": 0,
        "certificate": None,
        "key": None,
        "outer_lr": 0.5,
        "outer_momentum": 0.8,
        "nesterov": True,
        "float64": True,
        "asynchronous": True,
        "delay": 4,
        "grace_period": 1.5,
        "dylu": True,
        "round_timeout": 9.0,
        "heartbeat_timeout": 8.0,
        "save_dir": None,
        "save_every": 2,
        "keep": 5,
        "resume": False,
        "resume_version": None,
    }
    found = make_server(Net(), str(tmp_path / "checkpoint-7"), token, **given)
    assert found.access.token == "secret" and found.rules.min_workers == 2
    assert isinstance(found.model.optimizer, DelayedNesterov)
    assert found.model.optimizer.defaults == {"lr": 0.5, "momentum": 0.8, "delay": 4}
    assert all((p == 0.25).all() for p in found.model.parameters.values())


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from ckpt_trainers.main import main\n"
        "main(['diloco', 'server', '--help'])\n"
        "print('torch' in sys.modules, 'aiohttp' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60 * patience()
    )
    assert done.stdout.splitlines()[-1] == "False False", done.stderr


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_a_server_and_its_worker_as_processes(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "ckpt_trainers.main", "diloco"]
    saved = ["--save-dir", str(tmp_path / "server"), "--port", "0"]
    server = subprocess.Popen(
        [*command, "server", *WORDS, *saved], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        own = [f"output_dir={tmp_path / 'island'}", "max_steps=8", "report_to=none"]
        words = ["--server", address, "--sync-every", "4", *WORDS, *own]
        done = subprocess.run(
            [*command, "worker", *words], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
    finally:
        server.send_signal(signal.SIGTERM)
    assert server.wait(60 * patience()) == 0
    assert [info.step for info in scan_root(tmp_path / "server")] == [1, 2]
