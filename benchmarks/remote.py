"""Saves to and loads from S3 over loopback, against boto3 and s3fs moving the same bytes: `python
-m benchmarks remote`.

The server (objects.py) is a process of its own that keeps everything in memory. Ours moves tensors;
the peers move a safetensors file of the same bytes, which is on the disk already, and write it
there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .frame import Check, Contender, Report, measure, rows_of
from .ground import GIB, MIB, make_state, size_text
from .memory import peak_added
from .savers import missing_package

__all__ = ["run"]

BUCKET = "bench"
SAVE, LOAD = "ckptcore save", "ckptcore load, verified"
UP = ("boto3 upload_file", "s3fs put_file")
DOWN = ("boto3 download_file", "s3fs get_file")
MEMORY_TARGET = 256.0


@contextmanager
def served() -> Iterator[dict[str, Any]]:
    """A server with nothing in it: storage_options for it."""
    command = [sys.executable, "-m", "benchmarks.objects"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        where = {
            "endpoint_url": f"http://127.0.0.1:{int(server.stdout.readline())}",
            "key": "key",
            "secret": "secret",
        }
        yield {**where, "client_kwargs": {"region_name": "us-east-1"}}
        server.kill()


def run(
    folder: Path,
    *,
    size: int = GIB,
    rounds: int = 5,
    io_threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Time everything in interleaved rounds; then the memory of one save and one load, and the
    requests of each."""
    missing = missing_package("boto3") or missing_package("s3fs")
    if missing:
        raise ValueError(f"`remote` needs boto3 and s3fs: {missing}")
    import torch
    from safetensors.torch import save_file

    from ckptcore import CheckpointManager

    progress("making the state")
    state = make_state(size)
    live = {name: torch.zeros_like(tensor).fill_(7) for name, tensor in state.items()}
    file = folder / "state.safetensors"
    save_file(state, file)
    with served() as options:
        manager = CheckpointManager(
            f"s3://{BUCKET}/run", storage_options=options, io_threads=io_threads
        )

        def check() -> None:
            wrong = [name for name, tensor in live.items() if not torch.equal(tensor, state[name])]
            if wrong:
                raise AssertionError(
                    f"{len(wrong)} tensors were not loaded, the first is {wrong[0]}"
                )

        contenders = [
            Contender(SAVE, lambda: save(manager, state), "ours"),
            Contender(
                LOAD, lambda: load(manager, live), "ours", prepare=lambda: zero(live), finish=check
            ),
            *_peers(options, file, folder / "back"),
        ]
        save(manager, state)
        samples = measure(contenders, rounds, progress=progress)
        manager.close()
    progress("memory and requests")
    command = [sys.executable, "-m", "benchmarks.remote", str(size), str(manager.io_threads)]
    found = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    rows = rows_of(samples)
    for row in rows:
        if row.median:
            row.extra["GB/s"] = f"{size / row.median / 1e9:.2f}"
        if row.name in found:
            requests, added = found[row.name]
            row.extra["requests"] = str(requests)
            row.extra["memory added"] = f"{added / MIB:.0f} MiB"
            medians = [samples[name].median for name in (UP if row.name == SAVE else DOWN)]
            best = min((m for m in medians if m is not None), default=None)
            row.checks.append(
                Check(
                    "of the best peer's speed",
                    0.9,
                    best / row.median if best and row.median else None,
                    unit="x",
                )
            )
            row.checks.append(
                Check("memory added", MEMORY_TARGET, added / MIB, at_least=False, unit=" MiB")
            )
    return Report(
        "remote",
        f"Save and load of {size_text(size)} over S3 on loopback",
        rows,
        {"size": size, "rounds": rounds, "io_threads": manager.io_threads},
        [
            f"{rounds} interleaved rounds after one that is not counted. The server keeps objects "
            "in memory, in a process of "
            "its own on the same machine: its work takes part in every figure.",
            "boto3: TransferConfig default. The peers' files are in the page cache; ours hashes "
            "what it saves and verifies what "
            "it loads. memory added: peak resident memory of one save, and of one load into live "
            "tensors, in a process of their "
            "own. requests: those of a save with an older checkpoint in the root, and of a load.",
        ],
    )


def cost_of_one(size: int, io_threads: int) -> dict[str, list[int]]:
    """Requests and peak memory of one save and one load, each after one of a small state (imports,
    connections)."""
    from ckptcore import CheckpointManager
    from ckptcore.storage.s3 import S3Storage

    state, small = make_state(size), make_state(MIB)
    with served() as options:
        manager = CheckpointManager(
            f"s3://{BUCKET}/run", storage_options=options, io_threads=io_threads
        )
        storage = manager.storage
        assert isinstance(storage, S3Storage)
        found = {}
        manager.save(0, {"model": small})
        for name, warm, work in (
            (SAVE, lambda: None, lambda: save(manager, state)),
            (LOAD, lambda: manager.load({"model": small}, 0), lambda: load(manager, state)),
        ):
            warm()
            before = storage.requests
            added = peak_added(work)
            found[name] = [storage.requests - before, added]
    return found


def save(manager: Any, state: Any) -> None:
    manager.save(1, {"model": state}, overwrite=True)


def load(manager: Any, live: Any) -> None:
    manager.load({"model": live}, 1)


def zero(live: Any) -> None:
    for tensor in live.values():
        tensor.fill_(7)


def _done(work: Callable[[], object]) -> None:
    work()


def _peers(options: dict[str, Any], file: Path, back: Path) -> list[Contender]:
    import boto3
    import s3fs

    boto = boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    fs = s3fs.S3FileSystem(**options)
    boto.upload_file(str(file), BUCKET, "of-boto3")
    fs.put_file(str(file), f"{BUCKET}/of-s3fs")
    works: list[Callable[[], object]] = [
        lambda: boto.upload_file(str(file), BUCKET, "of-boto3"),
        lambda: fs.put_file(str(file), f"{BUCKET}/of-s3fs"),
        lambda: boto.download_file(BUCKET, "of-boto3", str(back)),
        lambda: fs.get_file(f"{BUCKET}/of-s3fs", str(back)),
    ]

    def finish() -> None:
        back.unlink(missing_ok=True)

    return [
        Contender(name, partial(_done, work), finish=finish)
        for name, work in zip((*UP, *DOWN), works, strict=True)
    ]


if __name__ == "__main__":
    print(json.dumps(cost_of_one(int(sys.argv[1]), int(sys.argv[2]))))
