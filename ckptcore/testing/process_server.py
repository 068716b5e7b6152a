"""The process that forks the ranks of `processes.py`.

    python -m ckptcore.testing.process_server MODULE...

Imports the modules, then reads one order per line, as JSON, and answers with two lines: the process
ids of the ranks when they run, and how each has ended. For each set of files it forks a process
that imports them, which forks the ranks of all jobs with these files.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

STACKS = signal.SIGRTMAX  # a rank that gets it prints the stack of each of its threads and ends
OUTPUT = 20_000  # characters of what a rank printed that are kept
POLL_SECONDS = 0.5  # between two checks whether all ranks that run are stopped


@dataclass(frozen=True)
class Order:
    """One job: what `RankProcesses.start` was asked for, with deadlines in seconds."""

    files: list[str]
    imports: list[str]
    environment: dict[str, str]
    program: str
    world_size: int
    arguments: dict[str, Any]
    folder: str | None
    deadline: float
    grace: float | None
    backend: str | None


@dataclass
class Rank:
    """A rank of the job that runs, as its parent sees it."""

    number: int
    pid: int
    pidfd: int
    folder: Path
    exit_code: int | None = None

    def answer(self) -> dict[str, Any]:
        """What the rank left; nothing where it died."""
        try:
            return dict(json.loads((self.folder / "answer").read_text()))
        except FileNotFoundError:
            return {}

    def stopped(self) -> bool:
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def reap(self) -> None:
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.pidfd)

    def outcome(self, state: str) -> dict[str, Any]:
        answer = {"state": "died", "value": None, "error": ""} | self.answer()
        return {
            **answer,
            "state": state or answer["state"],
            "rank": self.number,
            "exit_code": self.exit_code,
            "output": (self.folder / "output").read_text(errors="replace")[-OUTPUT:],
        }


def host_store(ports: int) -> NoReturn:
    """The store of a job: as under torchrun, it outlives the ranks."""
    # Of IPv4: torch asks a name server for the name of every peer of an IPv6 socket.
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    how: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    store: Any = TCPStore("127.0.0.1", port, None, True, **how)
    os.write(ports, str(port).encode())
    os.close(ports)
    while store:
        signal.pause()
    os._exit(0)


def as_torchrun(order: Order, number: int, port: int) -> dict[str, str]:
    """The environment of a rank; that of a program started without torchrun for one alone."""
    if order.world_size == 1 and order.backend is None:
        return order.environment
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(order.world_size),
        "LOCAL_WORLD_SIZE": str(order.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **order.environment,
    }


def be_rank(order: Order, programs: list[Any], number: int, port: int, folder: Path) -> NoReturn:
    """The life of one rank."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable(file=2)
    faulthandler.register(STACKS, file=2, all_threads=True, chain=True)  # then the default: it ends
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.environ |= as_torchrun(order, number, port)
        if order.folder is not None:
            os.chdir(order.folder)
        program = next(
            found for module in programs if (found := getattr(module, order.program, None))
        )
        if order.backend is not None:
            dist.init_process_group(order.backend, timeout=timedelta(seconds=order.deadline))
        value = program(number, order.world_size, **order.arguments)
        if order.backend is not None and dist.is_initialized():
            dist.barrier()  # nobody leaves while another still makes groups or sends
            dist.destroy_process_group()
        text = json.dumps({"state": "returned", "value": value})
    except BaseException:
        text = json.dumps({"state": "raised", "error": traceback.format_exc()})
    sys.stdout.flush()
    sys.stderr.flush()
    (folder / "unfinished").write_text(text)
    (folder / "unfinished").rename(folder / "answer")
    os._exit(0)


def fork_ranks(order: Order, programs: list[Any], port: int, folder: Path) -> list[Rank]:
    ranks: list[Rank] = []
    for number in range(order.world_size):
        mine = folder / str(number)
        mine.mkdir()
        (mine / "output").touch()
        if (pid := os.fork()) == 0:
            be_rank(order, programs, number, port, mine)
        ranks.append(Rank(number, pid, os.pidfd_open(pid), mine))
    return ranks


def watch(order: Order, ranks: list[Rank]) -> list[dict[str, Any]]:
    """Until each has ended, or none runs that is not stopped, or the deadline: how each ended."""
    running = {rank.pidfd: rank for rank in ranks}
    end, state = time.monotonic() + order.deadline, "late"
    while running and (left := end - time.monotonic()) > 0:
        if all(rank.stopped() for rank in running.values()):
            break
        for ended in select.select(list(running), [], [], min(left, POLL_SECONDS))[0]:
            rank = running.pop(ended)
            rank.reap()
            failed = rank.answer().get("state") != "returned"
            if failed and order.grace is not None and state == "late":
                end, state = min(end, time.monotonic() + order.grace), "ended"
    states = {rank.number: "stopped" if rank.stopped() else state for rank in running.values()}
    print_stacks([rank for rank in running.values() if states[rank.number] != "stopped"])
    for rank in running.values():
        os.kill(rank.pid, signal.SIGKILL)
        rank.reap()
    return [rank.outcome(states.get(rank.number, "")) for rank in ranks]


def print_stacks(ranks: Iterable[Rank]) -> None:
    """End ranks that do not end by themselves, each once it has printed where it is.

    The death of a rank says that its stacks are whole. One that cannot take the signal is not
    waited for longer than a minute; `watch` kills it.
    """
    asked = {rank.pidfd: rank for rank in ranks}
    for rank in asked.values():
        os.kill(rank.pid, STACKS)
    end = time.monotonic() + 60.0
    while asked and (left := end - time.monotonic()) > 0:
        for ended in select.select(list(asked), [], [], left)[0]:
            del asked[ended]


def run_job(order: Order, programs: list[Any], answers: int) -> None:
    read, write = os.pipe()
    if (host := os.fork()) == 0:
        os.close(read)
        host_store(write)
    os.close(write)
    try:
        port = int(os.read(read, 16))
        os.close(read)
        with tempfile.TemporaryDirectory() as folder:
            ranks = fork_ranks(order, programs, port, Path(folder))
            say(answers, {"pids": [rank.pid for rank in ranks]})
            say(answers, {"outcomes": watch(order, ranks)})
    finally:
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)


def say(answers: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(answers, data) :]


def freeze_imports() -> None:
    """What was imported stays: ranks neither search it for garbage nor copy its pages for that."""
    gc.collect()
    gc.freeze()


def serve_files(files: list[str], orders: BinaryIO, answers: int) -> NoReturn:
    """Fork the ranks of jobs with these files."""
    try:
        sys.path[:0] = [str(Path(file).parent) for file in files]
        programs = [import_module(Path(file).stem) for file in files]
        freeze_imports()
        for line in orders:
            order = Order(**json.loads(line))
            for name in order.imports:
                import_module(name)
            run_job(order, programs, answers)
    except BaseException:
        say(answers, {"broken": traceback.format_exc()})
        os._exit(1)
    os._exit(0)


@dataclass(frozen=True)
class FileServer:
    """A process that has imported some files, and the pipes to it."""

    orders: BinaryIO
    answers: BinaryIO

    @staticmethod
    def fork(files: list[str], others: Iterable[FileServer]) -> FileServer:
        order_read, order_write = os.pipe()
        answer_read, answer_write = os.pipe()
        if os.fork() == 0:
            for pipe in (order_write, answer_read):
                os.close(pipe)
            for other in others:
                other.orders.close()
            serve_files(files, os.fdopen(order_read, "rb"), answer_write)
        for pipe in (order_read, answer_write):
            os.close(pipe)
        return FileServer(os.fdopen(order_write, "wb"), os.fdopen(answer_read, "rb"))


def main(modules: list[str]) -> None:
    torch.set_num_threads(1)
    answers = os.dup(1)
    os.dup2(2, 1)  # what somebody prints is no answer
    for module in modules:
        import_module(module)
    freeze_imports()
    servers: dict[tuple[str, ...], FileServer] = {}
    for line in sys.stdin.buffer:
        files = json.loads(line)["files"]
        if tuple(files) not in servers:
            servers[tuple(files)] = FileServer.fork(files, servers.values())
        server = servers[tuple(files)]
        server.orders.write(line)
        server.orders.flush()
        for _ in ("pids", "outcomes"):
            line = server.answers.readline() or b'{"broken": "a process that forks ranks died"}'
            answer = json.loads(line)
            say(answers, answer)
            if "broken" in answer:
                del servers[tuple(files)]
                break
    for server in servers.values():
        server.orders.close()
    while servers:
        try:
            os.wait()
        except ChildProcessError:
            break


if __name__ == "__main__":
    main(sys.argv[1:])
