"""Work per tensor: `python -m benchmarks calls [--counts 100 --counts 10000]`.

Tiny tensors, so that bytes cost nothing: the call of an async save, and the whole of a load. Plain
tensors on one process, and DTensors on two real gloo processes. Seconds are those of the slower
rank.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .frame import PEER_ERRORS, Check, Report, Row, problem_of

__all__ = ["COUNTS", "judge", "run"]

COUNTS = (100, 1_000, 10_000)
LAYOUTS = {"plain": 1, "DTensor": 2}  # kind of the tensors -> processes
ITEMS = 16  # of each tensor, on all ranks together
DEADLINE = 300.0  # seconds that the processes of one layout may take

# Microseconds a tensor at the largest count: (later saves, loads), for each layout. A first save
# may take this many times as long as a later one.
TARGETS = {"plain": (8.0, 60.0), "DTensor": (15.0, 100.0)}
FIRST = 5.0


def run(
    folder: Path,
    *,
    counts: Sequence[int] = COUNTS,
    rounds: int = 5,
    layouts: Sequence[str] = tuple(LAYOUTS),
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Rows: for each layout and count, ours (first save, later saves, load) and the peers beside
    it."""
    rows: list[Row] = []
    for layout in layouts:
        for count in counts:
            progress(f"{count:,} tensors, {layout}")
            rows += _rows(_spawn(folder, layout, count, rounds), layout, count)
    judge(rows, max(counts))
    return Report(
        "calls",
        "The call of an async save, and a load, over many small tensors",
        rows,
        {"counts": list(counts), "rounds": rounds},
        [
            "save: until the call returns; the background work is waited for before the next one. "
            "first: of a new saver.",
            f"tensors of {ITEMS} float32 items. plain: one process; DTensor: two processes, cut "
            "along dimension 0.",
        ],
    )


def _rows(found: dict[str, Any], layout: str, count: int) -> list[Row]:
    rows = []
    for name, seconds in found.items():
        row = Row(
            f"{name}: {count:,} {layout}",
            None,
            kind="ours" if name.startswith("ckptcore") else "peer",
        )
        if isinstance(seconds, str):
            row.problem = seconds
        else:
            row.median, row.low, row.high = statistics.median(seconds), min(seconds), max(seconds)
            row.rounds = seconds
            row.extra["us a tensor"] = f"{1e6 * row.median / count:.1f}"
        rows.append(row)
    return rows


def judge(rows: Sequence[Row], count: int) -> None:
    """Put the targets to our rows of the largest count."""
    medians = {row.name: row.median for row in rows}
    for row in rows:
        task, _, what = row.name.partition(": ")
        number, _, layout = what.partition(" ")
        if row.kind != "ours" or row.median is None or number != f"{count:,}":
            continue
        each = 1e6 * row.median / count
        later, load = TARGETS[layout]
        if task.endswith("later"):
            row.checks.append(Check("a tensor", later, each, at_least=False, unit=" us"))
        elif task.endswith("load"):
            row.checks.append(Check("a tensor", load, each, at_least=False, unit=" us"))
        else:
            base = medians.get(f"{task.removesuffix('first')}later: {what}")
            ratio = row.median / base if base else None
            row.checks.append(Check("a later save", FIRST, ratio, at_least=False, unit="x"))


def _spawn(folder: Path, layout: str, count: int, rounds: int) -> dict[str, Any]:
    """Run this module on as many processes as the layout has; what rank 0 printed."""
    ranks = LAYOUTS[layout]
    store = folder / f"store-{layout}-{count}"
    arguments = [str(folder), str(store), str(ranks)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.calls",
                *arguments,
                str(rank),
                layout,
                str(count),
                str(rounds),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        answers = [process.communicate(timeout=DEADLINE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, answers, strict=True):
        if process.returncode:
            raise RuntimeError(
                f"a rank ended with exit code {process.returncode}: {errors[-2000:]}"
            )
    found: dict[str, Any] = json.loads(answers[0][0].splitlines()[-1])
    return found


class _State:
    """What the savers of the other benchmarks ask a training run for."""

    device = "cpu"

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors
        self.nbytes = 4 * ITEMS * len(tensors)

    def plain(self) -> dict[str, Any]:
        return dict(self._tensors)

    def state(self) -> dict[str, Any]:
        return {"model": self._tensors}


def _rank(
    folder: Path, store: Path, ranks: int, rank: int, layout: str, count: int, rounds: int
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks
    )
    state = _State(_tensors(layout, count, ranks))
    found: dict[str, Any] = {}
    work = folder / f"calls-{layout}-{count}"
    for name, measure in _contenders(ranks).items():
        try:
            measure(found, name, state, work / name.replace(" ", "-"), rounds)
        except PEER_ERRORS as error:
            if name == "ckptcore":
                raise
            found[name] = problem_of(error)
    if rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _tensors(layout: str, count: int, ranks: int) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    made = {
        f"layers.{n // 10}.w{n % 10}": torch.full((ITEMS // ranks,), float(n)) for n in range(count)
    }
    if layout == "plain":
        return made
    mesh = init_device_mesh("cpu", (ranks,))
    return {k: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for k, t in made.items()}


Measure = Callable[[dict[str, Any], str, _State, Path, int], None]


def _contenders(ranks: int) -> dict[str, Measure]:
    from .asyncs import DcpAsync, TorchCheckpointing
    from .savers import missing_package

    def peer(saver: Any) -> Measure:
        return lambda found, name, state, folder, rounds: _peer(
            found, name, saver, state, folder, rounds
        )

    found: dict[str, Measure] = {"ckptcore": _ours, "dcp": peer(DcpAsync("dcp"))}
    # On two ranks its processes do not come up in time on two cores.
    if ranks == 1 and missing_package("torch_checkpointing") is None:
        found["torch_checkpointing"] = peer(TorchCheckpointing("torch_checkpointing"))
    return found


def _ours(found: dict[str, Any], name: str, state: _State, folder: Path, rounds: int) -> None:
    from ckptcore import CheckpointManager, KeepLast

    first: list[float] = []
    later: list[float] = []
    for number in range(rounds):
        with CheckpointManager(folder / str(number), keep=KeepLast(1)) as manager:
            for step in (1, 2, 3):
                handles: list[Any] = []
                seconds = _slowest(
                    lambda step=step, manager=manager, handles=handles: handles.append(  # type: ignore[misc]
                        manager.save_async(step, state.state())
                    )
                )
                handles[0].result(DEADLINE)
                if number or step == 3:
                    (first if step == 1 else later).append(seconds)
    loads = []
    with CheckpointManager(folder / str(rounds - 1)) as manager:
        for number in range(rounds + 1):
            seconds = _slowest(lambda: manager.load(state.state()))
            if number:
                loads.append(seconds)
    found[f"{name} save_async, first"] = first or later
    found[f"{name} save_async, later"] = later
    found[f"{name} load"] = loads


def _peer(
    found: dict[str, Any], name: str, saver: Any, state: _State, folder: Path, rounds: int
) -> None:
    import torch.distributed.checkpoint as dcp

    saver.start(state, folder)
    seconds = []
    try:
        for step in range(rounds + 1):
            # dcp talks over the same group from a thread of its own, so the ranks compare when it
            # has ended.
            each = _seconds(lambda step=step: saver.begin(step))  # type: ignore[misc]
            with saver.guard():
                pass
            saver.wait()
            slowest = _of_all_ranks(each)
            if step:
                seconds.append(slowest)
        found[f"{name} async save, later"] = seconds
        if name == "dcp":
            live = state.plain()
            loads = [
                _slowest(lambda: dcp.load(live, checkpoint_id=str(saver.place)))
                for _ in range(rounds + 1)
            ]
            found[f"{name} load"] = loads[1:]
    finally:
        saver.stop()


def _slowest(call: Callable[[], Any]) -> float:
    """Seconds of `call` on the rank that takes longest."""
    return _of_all_ranks(_seconds(call))


def _seconds(call: Callable[[], Any]) -> float:
    """Seconds of `call`, which all ranks begin at the same moment."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _of_all_ranks(seconds: float) -> float:
    import torch
    import torch.distributed as dist

    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


if __name__ == "__main__":
    _rank(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        int(sys.argv[3]),
        int(sys.argv[4]),
        sys.argv[5],
        int(sys.argv[6]),
        int(sys.argv[7]),
    )
