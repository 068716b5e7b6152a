"""Forks real ranks from a process that imported torch once. Reads one JSON order per line, answers
with one line.

Every rank is a process of its own with a gloo process group and a TCPStore that its rank 0 hosts.
The sockets on which the stores listen are made before the fork, so no two jobs can ever want the
same port.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

import calls
import programs
import training
from programs import Job

JOBS = 2  # how many process groups a program may make, one after the other


def listener() -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", 0))
    made.listen(64)
    return made


def child(order: dict[str, Any], rank: int, sockets: list[socket.socket], answer: int) -> None:
    """One rank: never returns."""
    result: Any = None
    try:
        job = Job(rank, order["world"], order["folder"], sockets)
        name = order["program"]
        module = next(module for module in (programs, training, calls) if hasattr(module, name))
        result = getattr(module, name)(job, **order["arguments"])
        job.leave()
    except BaseException as error:
        traceback.print_exc()
        result = programs.told(error)
    data = json.dumps(result).encode()
    while data:
        data = data[os.write(answer, data) :]
    os._exit(0)


def run(order: dict[str, Any]) -> dict[str, Any]:
    sockets = [listener() for _ in range(JOBS)]
    ranks: dict[int, tuple[int, int, int]] = {}
    for rank in range(order["world"]):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            child(order, rank, sockets, write)
        os.close(write)
        ranks[rank] = (pid, os.pidfd_open(pid), read)
    for made in sockets:
        made.close()
    end = time.monotonic() + order["deadline"]
    running = {pidfd for _, pidfd, _ in ranks.values()}
    while running and not all(_is_stopped(pid) for pid, fd, _ in ranks.values() if fd in running):
        left = end - time.monotonic()
        if left <= 0:
            break
        ended, _, _ = select.select(list(running), [], [], min(left, 0.5))
        running -= set(ended)
    late = []
    results: dict[int, Any] = {}
    for rank, (pid, pidfd, read) in ranks.items():
        if pidfd in running:
            if not _is_stopped(pid):
                late.append(rank)
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        data = b""
        while part := os.read(read, 1 << 16):
            data += part
        os.close(read)
        os.close(pidfd)
        results[rank] = json.loads(data) if data else {"signal": -os.waitstatus_to_exitcode(status)}
    return {"results": results, "late": late}


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # what a rank prints is no answer
    for line in sys.stdin:
        os.write(out, json.dumps(run(json.loads(line))).encode() + b"\n")
