"""Forks real ranks of programs.py from a process that has imported torch. One JSON order per line,
one line of answer.

Run by the fixture `gang`. Every rank has a gloo process group on a TCPStore that its rank 0 hosts,
on a socket that was made before the fork: no two jobs can want the same port.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import programs
import torch.distributed as dist


def child(order: dict[str, Any], rank: int, listener: socket.socket, answer: int) -> None:
    """One rank: never returns."""
    faulthandler.enable()  # what dies in native code says where
    world, port = order["world"], listener.getsockname()[1]
    try:
        wait = timedelta(seconds=order["deadline"])
        listens = {"master_listen_fd": listener.detach()} if rank == 0 else {}
        if rank:
            listener.close()
        store = dist.TCPStore(
            "127.0.0.1", port, world, rank == 0, wait, wait_for_workers=False, **listens
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
        result = getattr(programs, order["program"])(rank, world, **order["arguments"])
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    data = json.dumps(result).encode()
    while data:
        data = data[os.write(answer, data) :]
    os._exit(0)


def run(order: dict[str, Any]) -> dict[int, Any]:
    listener = socket.create_server(("127.0.0.1", 0))
    pipes: dict[int, int] = {}
    children: list[int] = []
    for rank in range(order["world"]):
        read, write = os.pipe()
        children.append(os.fork())
        if children[-1] == 0:
            child(order, rank, listener, write)
        os.close(write)
        pipes[read] = rank
    listener.close()
    texts = dict.fromkeys(pipes.values(), b"")
    end = time.monotonic() + order["deadline"]
    waiting = set(pipes)
    while waiting and (left := end - time.monotonic()) > 0:
        for read in select.select(list(waiting), [], [], left)[0]:
            data = os.read(read, 1 << 16)
            texts[pipes[read]] += data
            if not data:
                waiting.discard(read)
    for pid in children:
        if waiting:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for read in pipes:
        os.close(read)
    return {
        rank: json.loads(text) if text else {"error": "no answer"} for rank, text in texts.items()
    }


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # what a rank prints is no answer
    for line in sys.stdin:
        os.write(out, json.dumps(run(json.loads(line))).encode() + b"\n")
