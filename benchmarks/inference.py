"""`python -m benchmarks.inference [WIDTH [disk] [S3]]`: the weights of a run, for inference.

Four FSDP2 ranks save a model of ten square layers (default width 2890: 334 MB in float32) and its
AdamW. One new process then loads the weights, from the disk and from S3 (moto, over HTTP): how much
it reads, by how much it grows, and that every value is right.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

REPO = Path(__file__).resolve().parents[1]
LAYERS, RANKS = 10, 4
CASES = {
    "load_state(url)": {},
    'load_state(url, dtype="bfloat16")': {"dtype": torch.bfloat16},
    "ModelState of a model on meta, bfloat16": {"meta": True},
    "the same, renamed": {"meta": True, "rename": True},
    "load_state, one layer, bfloat16": {"keys": "3.*", "dtype": torch.bfloat16},
}


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, width) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Renamed(nn.Module):
    """Another program's model, with the same layers under another name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.backbone = Model(width)


def made(width: int) -> Model:
    torch.manual_seed(0)
    return Model(width)


def save(rank: int, ranks: int, width: int, url: str, options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    from ckptcore import CheckpointManager

    torch.set_num_threads(1)
    model = made(width)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # moments, and the weights as made
    model(torch.ones(1, width)).mean().backward()
    optimizer.step()
    with CheckpointManager(url, storage_options=options) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer})


def load(
    rank: int, ranks: int, case: str, width: int, url: str, options: Any, counter: str | None
) -> dict[str, int]:
    """How many bytes came, by how many the process grew, and how many it has."""
    sys.path.insert(0, str(REPO))
    from benchmarks.memory import peak_added
    from ckptcore import CheckpointManager, ModelState, load_state

    how: dict[str, Any] = dict(CASES[case])
    meta, rename = how.pop("meta", False), how.pop("rename", False)
    found: dict[str, Any] = {}

    def work() -> None:
        if not meta:
            place = f"{url}/checkpoint-1"
            found.update(load_state(place, "model", storage_options=options, **how))
            return
        with torch.device("meta"):
            model = (Renamed if rename else Model)(width)
        with CheckpointManager(url, storage_options=options) as ckpt:
            names = {"model/": "model/backbone."} if rename else None
            state = {"model": ModelState(model, device="cpu", dtype=torch.bfloat16)}
            ckpt.load(state, 1, rename=names)
        found.update(model.state_dict())

    # Imports and connections of a first load are no part of the figures.
    load_state(f"{url}/checkpoint-1", "model", keys="layers.9.bias", storage_options=options)
    before = read_by_now(counter)
    if how.get("keys"):
        how["keys"] = f"layers.{how['keys']}"
    added = peak_added(work)
    read = read_by_now(counter) - before
    held = sum(value.nbytes for value in found.values())
    expected = made(width).state_dict()
    assert len(found) == (2 if how.get("keys") else len(expected))
    for name, value in found.items():
        wanted = expected[name.removeprefix("backbone.")].to(value.dtype)
        assert torch.equal(value, wanted), name
    return {"read": read, "added": added, "held": held}


def read_by_now(counter: str | None) -> int:
    """From the disk and the page cache, or over the wire."""
    if counter is not None:
        return int(Path(counter).read_text())
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


class Wire:
    """A way to a server that counts the bytes which come back."""

    def __init__(self, port: int, counter: Path) -> None:
        self.target, self.counter, self.lock, self.bytes = port, counter, threading.Lock(), 0
        counter.write_text("0")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection(("127.0.0.1", self.target))
            for source, sink, counted in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self.copy, args=(source, sink, counted), daemon=True
                ).start()

    def copy(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        try:
            while data := source.recv(1 << 20):
                if counted:
                    with self.lock:  # before the reader can have it
                        self.bytes += len(data)
                        beside = self.counter.with_suffix(".new")
                        beside.write_text(str(self.bytes))
                        os.replace(beside, self.counter)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()


def main(width: int = 2890, *only: str) -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    from ckptcore.testing.processes import RankProcesses

    os.environ.setdefault("CKPTCORE_TEST_PATIENCE", "5")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    processes = RankProcesses(
        Path(__file__), imports=["ckptcore", "s3fs", "torch.distributed.fsdp"]
    )
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        wire = Wire(port, Path(folder) / "counter")
        keys: dict[str, Any] = {
            "key": "key",
            "secret": "secret",
            "client_kwargs": {"region_name": "us-east-1"},
        }
        keys["config_kwargs"] = {"read_timeout": 300}  # the server takes its time for a byte
        near = {**keys, "endpoint_url": f"http://127.0.0.1:{port}"}
        far = {**keys, "endpoint_url": f"http://127.0.0.1:{wire.port}"}
        boto3.client(
            "s3",
            endpoint_url=near["endpoint_url"],
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        ).create_bucket(Bucket="bench")
        places = {
            "disk": (f"{folder}/run", None, None, None),
            "S3": ("s3://bench/run", near, far, str(wire.counter)),
        }
        for place in only or places:
            url, to_save, to_load, counter = places[place]
            start = time.perf_counter()
            where = {"width": width, "url": url, "options": to_save}
            processes.run("save", RANKS, where, backend="gloo", deadline=500.0)
            print(f"{place}: saved by {RANKS} ranks in {time.perf_counter() - start:.1f} s")
            for case in CASES:
                how = {"case": case, "width": width, "url": url, "options": to_load}
                (found,) = processes.run("load", 1, {**how, "counter": counter}, deadline=500.0)
                held, read, added = (f"{found[x] / 1e6:6.1f} MB" for x in ("held", "read", "added"))
                print(f"{place:5}{case:42}result {held}   read {read}   peak {added}", flush=True)
    server.stop()


if __name__ == "__main__":
    main(*(int(x) if x.isdigit() else x for x in sys.argv[1:]))
