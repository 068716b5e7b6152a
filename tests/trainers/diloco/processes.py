"""Server and workers as processes of their own, forked from one that has imported torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from ckpt_trainers.diloco import Access, Rules

sys.path.insert(0, str(Path(__file__).parent))

from islands import Island, serve


def server(port: int, root: str) -> None:
    rules = Rules(workers=2, heartbeat_timeout=3.0)
    found = serve(access=Access(port=port), rules=rules, save_dir=root, resume=True)
    found.start()
    print("serving", flush=True)
    found.wait()


def worker(name: str, port: int, steps: int) -> None:
    island = Island(ord(name))
    options = {"sync_every": 4, "worker_id": name, "heartbeat_interval": 0.3}
    endless = {"max_sync_retries": 1000, "backoff": 0.0}
    with island.worker(f"127.0.0.1:{port}", **options, **endless) as found:
        island.train(steps, lambda step: print("step", step, flush=True))
        print(found.checksum(), flush=True)
    print("ended", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        out, kind, port, last = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)
            continue
        os.dup2(os.open(out, os.O_WRONLY), 1)
        if kind == "server":
            server(int(port), last)
        else:
            worker(kind, int(port), int(last))
        os._exit(0)


if __name__ == "__main__":
    main()
