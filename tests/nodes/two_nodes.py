"""Four real ranks on two nodes, forked from a process that has imported torch once. Prints what
each of them found.

    python two_nodes.py FOLDER

First a job that saves five times and keeps two, whose second node's lowest rank dies while it
publishes a sixth. Then a job that restores and saves on.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    KeepLast,
    SharingPattern,
    StateComponent,
    open_storage,
)
from ckptcore.testing import KILLED_EXIT_CODE, FaultStorage

RANKS = 4
torch.set_num_threads(1)


def state(mark: int, rank: int) -> list[StateComponent]:
    return [
        StateComponent("model", {"w": torch.arange(4.0) + mark}, SharingPattern.REPLICATED),
        StateComponent(
            "clock",
            {"at": mark if rank == 0 else -rank, "t": torch.tensor(mark + rank)},
            SharingPattern.GLOBAL,
        ),
        StateComponent("own", {"x": torch.tensor([100.0 * mark + rank])}, SharingPattern.PER_RANK),
    ]


def restored(ckpt: CheckpointManager, rank: int) -> list[Any]:
    live = state(-1, rank)
    report = ckpt.restore(live)
    return [
        report.step,
        live[0].stateful["w"].tolist(),
        report.values["clock"]["at"],
        live[1].stateful["t"].item(),
        live[2].stateful["x"].tolist(),
    ]


def first(rank: int, folder: Path) -> Any:
    disk = FaultStorage(open_storage(folder / f"disk{rank // 2}"))
    ckpt = CheckpointManager(
        disk, storage_mode="node", keep=KeepLast(2), run_id="run", liveness_timeout=2.0
    )
    for step in range(1, 6):
        ckpt.save(step, state(step, rank))
    ckpt.save_async(5, state(55, rank), overwrite=True).result()
    found = [info.step for info in ckpt.list()]
    if rank == 2:
        disk.kill(kind="rename", path="checkpoint-6")
    try:
        ckpt.save(6, state(6, rank))
    except Exception as error:
        return found, type(error).__name__, getattr(error, "ranks", None)
    finally:
        ckpt.close()  # rank 0 hosts the store: it stays until the others have read the verdict
    return found, "no error", None


def second(rank: int, folder: Path) -> Any:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        with CheckpointManager(
            folder / f"disk{rank // 2}", storage_mode="node", run_id="run"
        ) as ckpt:
            found = restored(ckpt, rank)
            ckpt.save(6, state(6, rank))
            again = restored(ckpt, rank)
            return (
                found,
                again,
                [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)],
            )


def job(program: Any, folder: Path) -> dict[int, Any]:
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    made.listen(64)
    port = made.getsockname()[1]
    children = {}
    for rank in range(RANKS):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.environ["CKPTCORE_NODE"] = f"node{rank // 2}"
            listens = {"master_listen_fd": made.detach()} if rank == 0 else {}
            if rank:
                made.close()
            store = dist.TCPStore(
                "127.0.0.1",
                port,
                RANKS,
                rank == 0,
                timedelta(seconds=60),
                wait_for_workers=False,
                **listens,
            )
            dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
            os.write(write, json.dumps(program(rank, folder)).encode())
            os._exit(0)
        os.close(write)
        children[rank] = pid, read
    made.close()
    results: dict[int, Any] = {}
    for rank, (_, read) in children.items():
        data = b"".join(iter(lambda read=read: os.read(read, 65536), b""))  # type: ignore[misc]
        results[rank] = json.loads(data) if data else None
    for rank, (pid, _) in children.items():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        results[rank] = results[rank] if code == 0 else f"exit {code}"
    return results


if __name__ == "__main__":
    at = Path(sys.argv[1])
    print(json.dumps([job(first, at), job(second, at), KILLED_EXIT_CODE]))
