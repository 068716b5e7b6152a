"""Workers, servers and connections that fail: the others end or go on, with equal parameters."""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument
from ckpt_trainers.diloco import Access, DiLoCoServer, DiLoCoWorker, Rules

from ckptcore import CheckpointWarning, open_storage, scan_root
from ckptcore.testing import FaultStorage, Killed

from .islands import Island, at_once, same, serve, trained, until

STEPS: dict[str, Any] = {"sync_every": 4}


@cache
def reference(steps: int = 16, workers: str = "ab", **options: Any) -> dict[str, Any]:
    """What undisturbed islands come to."""
    with serve(rules=Rules(workers=len(workers))) as server:
        work = {w: partial(trained, server, ord(w), w, steps, **STEPS, **options) for w in workers}
        return {name: island.values() for name, island in at_once(work).items()}


class Dies(Exception):
    """The end of a worker, as far as one can end in a thread of another process."""


def vanish(worker: DiLoCoWorker) -> None:
    """What the end of its process does to a worker: connections close, and nobody says goodbye."""
    assert worker._client is not None
    worker._client.close()
    worker._client = None
    worker._hook.remove()


class Relay:
    """Stands between workers and a server; `do` gets each piece that a worker sends, and what was
    sent before, and may end the connection."""

    def __init__(self, server: DiLoCoServer) -> None:
        self.target = ("127.0.0.1", int(server.address.rsplit(":", 1)[1]))
        self.do: Callable[[bytes, int, str], bool] = lambda piece, sent, way: True
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self.target)
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._carry, args=(source, sink, way), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        sent = 0
        try:
            while piece := source.recv(256):
                if not self.do(piece, sent, way):
                    self.cuts += 1
                    break
                sink.sendall(piece)
                sent += len(piece)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self.listener.close()


# Connections.


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_connection_cut_in_the_middle_of_a_body(way: str) -> None:
    """On the way up nothing counted yet; on the way down it had, and counts once."""
    expected = reference()
    with serve(rules=Rules(workers=2)) as server:
        relay, cut = Relay(server), threading.Event()

        def once(piece: bytes, sent: int, direction: str) -> bool:
            """The first body after the first sync: in the middle of it."""
            late = server.rounds.fragments and server.rounds.fragments[0].number >= 1
            inside = direction == way and b"HTTP/1.1" not in piece and sent > 512
            if late and inside and not cut.is_set():
                cut.set()
                return False
            return True

        relay.do = once
        work = {
            "a": partial(trained, relay.address, ord("a"), "a", 16, **STEPS),
            "b": partial(trained, server, ord("b"), "b", 16, **STEPS),
        }
        found = at_once(work)
        assert cut.is_set() and server.status()["version"] == 4
        relay.close()
    assert all(same(found[name].values(), expected[name]) for name in found)


def test_a_network_that_is_gone_for_a_while() -> None:
    """The worker skips the round that it cannot reach, and takes the others' parameters later."""
    with serve(rules=Rules(workers=2, heartbeat_timeout=0.6)) as server:
        relay = Relay(server)
        far, near = Island(1), Island(2)
        options: dict[str, Any] = {**STEPS, "max_sync_retries": 1, "heartbeat_interval": 0.1}
        with (
            far.worker(relay.address, worker_id="a", **options) as cut_off,
            near.worker(server, worker_id="b", **options) as worker,
        ):
            at_once({"a": partial(far.train, 4), "b": partial(near.train, 4)})
            relay.do = lambda *_: False
            far.train(4)  # its sync fails, and it trains on
            assert cut_off.rounds == [1] and far.step == 8
            near.train(8)  # a is evicted, and b goes on
            assert worker.rounds == [3] and server.rounds.evicted == 1
            relay.do = lambda *_: True
            until(lambda: "a" in server.rounds.members)  # by its heartbeat
            far.train(4)
            assert cut_off.rounds[0] >= 3 and cut_off.checksum() == server.checksum()
            at_once({"a": partial(far.train, 4), "b": partial(near.train, 4)})
            assert cut_off.checksum() == worker.checksum() == server.checksum()
        relay.close()


# Workers.


def test_a_worker_that_dies_between_submit_and_answer_has_counted() -> None:
    with serve(rules=Rules(workers=2, heartbeat_timeout=0.5)) as server:
        first, second = Island(ord("a")), Island(ord("b"))
        options: dict[str, Any] = {**STEPS, "heartbeat_interval": 0.1}
        dying = first.worker(server, worker_id="a", **options)
        dying.start()
        with second.worker(server, worker_id="b", **options) as worker:
            dying._land = lambda: -1  # type: ignore[method-assign]
            first.train(4)
            until(lambda: "a" in server.rounds.fragments[0].received)
            vanish(dying)
            second.train(4)
            assert worker.rounds == [1] and server.rounds.counted("a", 0, 0)
            second.train(4)  # waits until a is evicted
            assert worker.rounds == [2] and server.rounds.evicted == 1
            assert worker.checksum() == server.checksum()
    expected = reference(4)
    with serve(rules=Rules(workers=2)) as server:
        work = {w: partial(trained, server, ord(w), w, 4, **STEPS) for w in "ab"}
        assert same(at_once(work)["b"].values(), expected["b"])


def test_a_worker_that_is_gone_for_good_holds_nobody_up() -> None:
    with serve(rules=Rules(workers=3, heartbeat_timeout=0.5)) as server:
        islands = {name: Island(ord(name)) for name in "abc"}
        options: dict[str, Any] = {**STEPS, "heartbeat_interval": 0.1}
        workers = {n: i.worker(server, worker_id=n, **options) for n, i in islands.items()}
        for worker in workers.values():
            worker.start()
        islands["c"].train(2)
        vanish(workers["c"])
        began = time.monotonic()
        at_once({name: partial(islands[name].train, 8) for name in "ab"})
        assert time.monotonic() - began < 5
        assert workers["a"].rounds == workers["b"].rounds == [2]
        assert workers["a"].checksum() == workers["b"].checksum() == server.checksum()
        for name in "ab":
            workers[name].stop()


def test_fewer_than_the_minimum_save_and_stop() -> None:
    with serve(rules=Rules(workers=2, min_workers=2, heartbeat_timeout=0.5)) as server:
        islands = {name: Island(ord(name)) for name in "ab"}
        options: dict[str, Any] = {**STEPS, "heartbeat_interval": 0.1}
        workers = {n: i.worker(server, worker_id=n, **options) for n, i in islands.items()}
        for worker in workers.values():
            worker.start()
        vanish(workers["b"])
        islands["a"].train(5)
        assert workers["a"].should_stop and islands["a"].step == 5
        assert workers["a"].progress.sync_retries == 0, "it is told, and tries no more"
        workers["a"].stop()
        work = {w: partial(trained, server, ord(w), w, 8, **options) for w in "ab"}
        assert same(*(island.values() for island in at_once(work).values()))


def test_a_worker_slower_than_the_round_waits() -> None:
    with serve(rules=Rules(workers=2, round_timeout=0.3)) as server:
        fast, slow = Island(1), Island(2)
        with (
            fast.worker(server, worker_id="a", **STEPS) as quick,
            slow.worker(server, worker_id="b", **STEPS) as lame,
        ):
            slow.train(3)
            fast.train(4)
            assert quick.rounds == [1] and not server.rounds.counted("b", 0, 0)
            slow.train(1)
            assert lame.rounds == [1] and lame.checksum() == quick.checksum()
            at_once({"a": partial(fast.train, 4), "b": partial(slow.train, 4)})
            assert lame.checksum() == quick.checksum() == server.checksum()


def test_a_round_longer_than_the_workers_patience_is_left_out() -> None:
    with serve(rules=Rules(workers=2)) as server:
        first, second = Island(1), Island(2)
        options: dict[str, Any] = {**STEPS, "timeout": 0.2, "max_sync_retries": 1}
        with (
            first.worker(server, worker_id="a", **options) as impatient,
            second.worker(server, worker_id="b", **STEPS) as worker,
        ):
            first.train(5)
            assert impatient.rounds == [0] and impatient.progress.sync_retries == 1
            second.train(4)  # with what a had sent
            assert worker.rounds == [1] and server.rounds.counted("a", 0, 0)
            first.train(3)  # it has counted: it takes what came of it
            assert impatient.rounds == [1] and impatient.checksum() == worker.checksum()


def test_a_worker_that_diverged_is_named_and_the_others_go_on() -> None:
    with serve(rules=Rules(workers=2)) as server:
        bad = Island(2)

        def diverge() -> str:
            with bad.worker(server, worker_id="b", **STEPS):
                bad.train(3)
                with torch.no_grad():
                    bad.model.enter.bias[2] = float("nan")
                try:
                    bad.train(1)
                except Exception as error:
                    return f"{type(error).__name__}: {error}"
            return "nothing"

        work = {"a": partial(trained, server, 1, "a", 8, **STEPS), "b": diverge}
        found = at_once(work)
        assert "Refused: " in found["b"] and "has values that are not finite" in found["b"]
        assert same(found["a"].values(), server.model.snapshot(server.model.layout))
        assert all(v.isfinite().all() for v in found["a"].values().values())


def test_unless_the_server_takes_anything() -> None:
    with serve(refuse_nonfinite=False) as server:
        island = Island()
        with island.worker(server, **STEPS) as worker:
            with torch.no_grad():
                island.model.enter.bias[2] = float("nan")
            island.train(4)
            assert worker.rounds == [1] and worker.base["enter.bias"].isnan().any()


# The server.


def server_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def run_through(root: Path, storage: FaultStorage) -> tuple[int, Any]:
    """Two islands over a server that dies by what is set for its storage, and is started again:
    (how many starts, the islands)."""
    access, starts = Access(port=server_port(), patience=5.0), 0
    done = threading.Event()

    def keep_serving() -> None:
        nonlocal starts
        target: Any = storage
        while not done.is_set():
            server = serve(access=access, rules=Rules(workers=2), save_dir=target, resume=True)
            starts += 1
            try:
                server.start()
                while server._thread.is_alive() and not done.wait(0.01):
                    pass
                server.stop()
            except Killed:
                server.manager = None  # a dead process closes nothing
                target = str(root)

    thread = threading.Thread(target=keep_serving, daemon=True)
    thread.start()
    address = f"127.0.0.1:{access.port}"
    options: dict[str, Any] = {**STEPS, "max_sync_retries": 40, "backoff": 0.0, "timeout": 20.0}
    try:
        work = {w: partial(trained, address, ord(w), w, 12, **options) for w in "ab"}
        found = at_once(work)
        return starts, found
    finally:
        done.set()
        thread.join(20)


def operations_of_a_run(root: Path) -> int:
    storage = FaultStorage(open_storage(str(root)))
    run_through(root, storage)
    return storage.count()


@pytest.mark.parametrize("at", [5, 30, 65])
def test_a_server_killed_at_a_storage_operation_goes_on(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_trainers.diloco.client.CONTROL_PAUSE", 0.02)
    kill_and_compare(tmp_path, reference(12), at)


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_a_server_killed_at_every_storage_operation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_trainers.diloco.client.CONTROL_PAUSE", 0.02)
    expected = reference(12)
    operations = operations_of_a_run(tmp_path / "whole")
    for at in range(1, operations + 1):
        kill_and_compare(tmp_path, expected, at)
    print(f"killed at each of {operations} operations")


def kill_and_compare(folder: Path, expected: dict[str, Any], at: int) -> None:
    root = folder / f"at-{at}"
    storage = FaultStorage(open_storage(str(root)))
    storage.kill(max(at, 1), how="raise")
    starts, found = run_through(root, storage)
    assert starts == 2
    for name in "ab":
        assert same(found[name].values(), expected[name]), f"killed at operation {at}"


def test_a_save_that_fails_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    storage = FaultStorage(open_storage(str(tmp_path)))
    with serve(save_dir=storage, rules=Rules(workers=1)) as server:
        storage.fail(1, kind="write_at", times=None)
        trained(server, 1, "a", 4, **STEPS)
        assert server.status()["failed_saves"] == 1
        storage.clear()
        trained(server, 1, "a", 4, **STEPS)
    assert [info.step for info in scan_root(tmp_path) if info.status == "committed"] == [2]


def test_a_server_does_not_begin_in_the_folder_of_another_run(tmp_path: Path) -> None:
    with serve(save_dir=str(tmp_path)) as server:
        trained(server, 1, "a", 4, **STEPS)
    with pytest.raises(InvalidArgument, match="has checkpoints already"):
        serve(save_dir=str(tmp_path)).start()


def test_checkpoints_every_second_step(tmp_path: Path) -> None:
    with serve(save_dir=str(tmp_path), save_every=2, keep=2) as server:
        trained(server, 1, "a", 28, **STEPS)
    assert [info.step for info in scan_root(tmp_path)] == [4, 6]


@pytest.mark.filterwarnings("ignore::ckptcore.CheckpointWarning")
def test_a_server_goes_back_to_a_round(tmp_path: Path) -> None:
    with serve(save_dir=str(tmp_path), keep=10) as server:
        island = trained(server, 1, "a", 8, **STEPS)
        digest = server.checksum()
        island = trained(server, 1, "a", 16, **STEPS)
    with serve(save_dir=str(tmp_path), keep=10, resume=2) as server:
        assert server.checksum() == digest and server.status()["version"] == 2
        trained(server, 3, "a", 4, **STEPS)
        assert server.status()["version"] == 3
    with serve(save_dir=str(tmp_path), keep=10, resume=True) as server:
        assert server.status()["version"] == 3, "the newest of this branch"
    assert issubclass(CheckpointWarning, Warning) and island.step == 16


# Resume: stopped at any step, it is as if it had not been.


class Saved:
    """An island that is saved after every step, as a trainer would."""

    def __init__(self, seed: int) -> None:
        self.island, self.states = Island(seed), {}  # type: ignore[var-annotated]

    def train(self, server: DiLoCoServer, name: str, upto: int, **options: Any) -> None:
        with self.island.worker(server, worker_id=name, **options) as worker:
            self.keep(worker)
            self.island.train(upto - self.island.step, lambda step: self.keep(worker))

    def keep(self, worker: DiLoCoWorker) -> None:
        held = {"island": self.island.state_dict(), "worker": worker.state_dict()}
        self.states[self.island.step] = copy.deepcopy(held)

    def resumed(
        self, server: DiLoCoServer, name: str, at: int, upto: int, **options: Any
    ) -> Island:
        island, state = Island(self.island.seed), self.states[at]
        island.model.load_state_dict(state["island"]["model"])
        island.optimizer.load_state_dict(state["island"]["optimizer"])
        island.step = at
        worker = island.worker(server, worker_id=name, **options)
        worker.start(state["worker"])
        island.train(upto - at)
        worker.stop()
        return island


def both(work: Callable[[str], Any]) -> dict[str, Any]:
    return at_once({name: partial(work, name) for name in "ab"})


@pytest.mark.parametrize("options", [{}, {"num_fragments": 2}], ids=["whole", "fragments"])
@pytest.mark.parametrize("at", range(5, 9))
def test_stopped_at_any_step_and_resumed(tmp_path: Path, at: int, options: dict[str, Any]) -> None:
    """All of it: the server goes on from what it saved, each worker from its checkpoint."""
    expected = reference(14, **options)
    options = {**STEPS, **options}
    before = {name: Saved(ord(name)) for name in "ab"}
    with serve(save_dir=str(tmp_path), rules=Rules(workers=2)) as server:
        workers = both(lambda name: before[name].train(server, name, at, **options))
        assert set(workers) == {"a", "b"}
    with serve(save_dir=str(tmp_path), rules=Rules(workers=2), resume=True) as server:
        found = both(lambda name: before[name].resumed(server, name, at, 14, **options))
    for name in "ab":
        assert same(found[name].values(), expected[name]), f"{name}, stopped at step {at}"


@pytest.mark.parametrize(
    ("back", "options"),
    [(1, {}), (4, {}), (1, {"num_fragments": 2}), (3, {"num_fragments": 2})],
    ids=["whole-1", "whole-4", "fragments-1", "fragments-3"],
)
def test_a_killed_worker_resumes_from_before_its_last_sync(
    back: int, options: dict[str, Any]
) -> None:
    """Its part of the round has counted: it trains up to there again, and takes the result."""
    expected = reference(14, **options)
    options = {**STEPS, **options}
    saved = {name: Saved(ord(name)) for name in "ab"}
    with serve(rules=Rules(workers=2)) as server:
        workers = {}
        for name in "ab":
            workers[name] = saved[name].island.worker(server, worker_id=name, **options)
            workers[name].start()

        def train(name: str) -> None:
            saved[name].island.train(9, lambda step: saved[name].keep(workers[name]))

        both(train)
        vanish(workers["a"])

        def go_on(name: str) -> Island:
            if name == "a":
                return saved["a"].resumed(server, "a", 9 - back, 14, **options)
            saved["b"].island.train(5)
            workers["b"].stop()
            return saved["b"].island

        found = both(go_on)
    for name in "ab":
        assert same(found[name].values(), expected[name])


def test_a_checkpoint_of_an_older_round_takes_the_servers_parameters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = Saved(1)
    with serve() as server:
        saved.train(server, "a", 13, **STEPS)
        island = saved.resumed(server, "a", 3, 3, **STEPS)
        assert same(island.values(), server.model.snapshot(server.model.layout))
    assert "the server is in round [3] and worker a was in [0]" in caplog.text


# Real processes.


class Zygote:
    """Has imported torch, and forks a process for each line of JSON that it reads."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("processes.py"))]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def fork(self, out: Path, *words: object) -> Child:
        assert self.process.stdin is not None and self.process.stdout is not None
        out.touch()
        print(json.dumps([str(out), *map(str, words)]), file=self.process.stdin, flush=True)
        return Child(int(self.process.stdout.readline()), out)


@dataclass(frozen=True)
class Child:
    pid: int
    out: Path

    def until(self, line: str, seconds: float = 60.0) -> None:
        until(lambda: line in self.out.read_text().splitlines(), seconds)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def test_server_and_worker_killed_at_once(tmp_path: Path) -> None:
    """By SIGKILL. The survivor goes on with the server that was started again, and ends with its
    parameters."""
    port, root, zygote = server_port(), tmp_path / "root", Zygote()
    children = [zygote.fork(tmp_path / "server", "server", port, root)]
    try:
        children[0].until("serving")
        children += [zygote.fork(tmp_path / name, name, port, 24) for name in "ab"]
        _, survivor, victim = children
        victim.until("step 6")
        victim.kill()
        children[0].kill()
        children.append(zygote.fork(tmp_path / "again", "server", port, root))
        survivor.until("ended")
    finally:
        for child in children:
            child.kill()
        zygote.process.kill()
    digest = survivor.out.read_text().splitlines()[-2]
    with serve(save_dir=str(root), resume=True) as again:
        assert again.checksum() == digest and again.status()["version"] == 6
