"""Resharded loads with real processes, against dcp.load in the same run: `python -m benchmarks
reshard [--size 256MiB]`.

Four gloo processes save float32 DTensors cut along dimension 0; two processes load them cut along
dimension 0, and along dimension 1. Seconds are those of the slower rank, bytes what both read
(rchar of /proc/self/io, so of both libraries).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .frame import Check, Report, Row
from .ground import MIB, size_text

__all__ = ["run"]

COLUMNS = 1024
TENSORS = 16


def run(
    folder: Path,
    *,
    size: int = 256 * MIB,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Rows: ours and dcp for both target layouts."""
    rows_each = size // (4 * COLUMNS * TENSORS)
    progress("saving on 4 ranks")
    _spawn(folder, 4, ["save", str(rows_each)])
    progress("loading on 2 ranks")
    found = json.loads(_spawn(folder, 2, ["load", str(rows_each), str(rounds)]))
    rows = []
    for dim in (0, 1):
        medians = {}
        for name in ("ckptcore", "ckptcore, load_broadcast", "dcp"):
            seconds, nbytes = found[f"{name} {dim}"]
            medians[name] = statistics.median(seconds)
            row = Row(
                f"{name}: S(0) on 4 -> S({dim}) on 2",
                medians[name],
                min(seconds),
                max(seconds),
                rounds=seconds,
            )
            row.kind = "peer" if name == "dcp" else "ours"
            row.extra = {"bytes read": f"{nbytes / size:.2f} x needed"}
            rows.append(row)
        ours = rows[-3]
        ours.checks.append(Check("dcp.load", 2.0, medians["dcp"] / medians["ckptcore"], unit="x"))
        read = found[f"ckptcore {dim}"][1] / size
        ours.checks.append(Check("bytes needed", 1.05, read, at_least=False, unit="x"))
    return Report(
        "reshard",
        f"Resharded load of {size_text(size)}, page cache warm",
        rows,
        {"size": size, "rounds": rounds},
        [
            "with S(0) -> S(1), every chunk of 4 MiB holds something that each rank needs, and is "
            "read whole to be verified.",
            "load_broadcast: every chunk is read by one rank, which passes it on.",
        ],
    )


def _spawn(folder: Path, ranks: int, what: list[str]) -> str:
    """Run this module on `ranks` processes; what rank 0 printed."""
    store = folder / f"store-{ranks}"
    store.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.reshard", str(folder), str(store), str(ranks)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), *what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    answers = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, answers, strict=True):
        if process.returncode:
            raise RuntimeError(
                f"a rank ended with exit code {process.returncode}: {errors[-2000:]}"
            )
    return answers[0][0]


def _rank(folder: Path, store: Path, ranks: int, rank: int, what: list[str]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks
    )
    mesh = init_device_mesh("cpu", (ranks,))
    total = int(what[1])

    def state(dim: int, fill: bool) -> dict[str, Any]:
        made = {}
        for number in range(TENSORS):
            shape = (total // ranks, COLUMNS) if dim == 0 else (total, COLUMNS // ranks)
            local = torch.zeros(shape)
            if fill:
                local += torch.arange(rank * shape[0], (rank + 1) * shape[0])[:, None] + number
            made[f"w{number}"] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
        return made

    if what[0] == "save":
        _save(folder, state(0, True))
    else:
        found = {}
        for dim in (0, 1):
            live = state(dim, False)
            for name in _loaders(folder):
                found[f"{name} {dim}"] = [[], 0]
            for number in range(int(what[2]) + 1):
                for name, load in _loaders(folder).items():
                    seconds, nbytes = _measured(load, live, mesh)
                    if number:
                        found[f"{name} {dim}"][0].append(seconds)
                        found[f"{name} {dim}"][1] = nbytes
                    want = torch.arange(total, dtype=torch.float32)
                    got = live["w3"].to_local()[:, 0]
                    first = rank * got.shape[0] if dim == 0 else 0
                    if not torch.equal(got, want[first : first + got.shape[0]] + 3):
                        raise RuntimeError(f"{name} loaded wrong values")
                    for tensor in live.values():
                        tensor.to_local().zero_()
        if rank == 0:
            print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _save(folder: Path, state: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    from ckptcore import CheckpointManager

    with CheckpointManager(folder / "ours") as manager:
        manager.save(1, {"model": state})
    dcp.save(state, checkpoint_id=str(folder / "dcp"))


def _loaders(folder: Path) -> dict[str, Callable[[dict[str, Any]], Any]]:
    import torch.distributed.checkpoint as dcp

    from ckptcore import CheckpointManager

    if not _managers:
        _managers.extend(
            CheckpointManager(folder / "ours", load_broadcast=once) for once in (False, True)
        )
    return {
        "ckptcore": lambda live: _managers[0].load({"model": live}),
        "ckptcore, load_broadcast": lambda live: _managers[1].load({"model": live}),
        "dcp": lambda live: dcp.load(live, checkpoint_id=str(folder / "dcp")),
    }


_managers: list[Any] = []


def _measured(
    load: Callable[[dict[str, Any]], Any], live: dict[str, Any], mesh: Any
) -> tuple[float, int]:
    """Seconds of the slowest rank and bytes that all ranks read."""
    import time

    import torch
    import torch.distributed as dist

    dist.barrier()
    before, start = _read_so_far(), time.perf_counter()
    load(live)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    nbytes = torch.tensor(_read_so_far() - before)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(nbytes)
    return float(seconds), int(nbytes)


def _read_so_far() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
