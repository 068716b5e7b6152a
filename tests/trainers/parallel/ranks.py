"""Ranks for the tests of this folder: forked as torchrun would start them, from one process that
imported torch already.

Reads one JSON order per line: a program and the number of ranks. Answers with what each rank's
program returned.
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

import programs


def listener() -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", 0))
    made.listen(64)
    return made


def child(order: dict[str, Any], rank: int, made: socket.socket, answer: int) -> None:
    """One rank: never returns."""
    try:
        programs.join(rank, order["world"], made)
        result = getattr(programs, order["program"])(**order["arguments"])
        programs.leave()
    except BaseException as error:
        traceback.print_exc()
        result = {
            "error": type(error).__name__,
            "text": str(error),
            "trace": traceback.format_exc(),
        }
    data = json.dumps(result).encode()
    while data:
        data = data[os.write(answer, data) :]
    os._exit(0)


def run(order: dict[str, Any]) -> dict[str, Any]:
    programs.prepare(order["program"])
    made = listener()
    ranks: dict[int, tuple[int, int]] = {}
    for rank in range(order["world"]):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            for _, other in ranks.values():
                os.close(other)
            child(order, rank, made, write)
        os.close(write)
        ranks[rank] = pid, read
    made.close()
    end = time.monotonic() + order["deadline"]
    held: dict[int, bytes] = dict.fromkeys(ranks, b"")
    running = {read: rank for rank, (_, read) in ranks.items()}
    failed_at: float | None = None
    while running and time.monotonic() < end:
        for read in select.select(list(running), [], [], 0.2)[0]:
            part = os.read(read, 1 << 16)
            rank = running[read]
            held[rank] += part
            if not part:
                del running[read]
                if failed_at is None and held[rank].startswith(b'{"error"'):
                    failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + 3:
            break  # those that wait for a rank which failed learn nothing more
    for pid, read in ranks.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
    late = sorted(running.values())
    return {
        "late": late,
        "results": {
            rank: json.loads(data) for rank, data in held.items() if data and rank not in late
        },
    }


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # what a rank prints is no answer
    programs.warm_up()
    for line in sys.stdin:
        os.write(out, json.dumps(run(json.loads(line))).encode() + b"\n")
