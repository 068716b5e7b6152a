"""The second save of a state of which little has changed: `python -m benchmarks reuse [--size
1GiB]`.

A module of which one hundredth trains. Ours with and without `reuse=True`, the peers, and the
limit: reading every byte once, to find out that it has not changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ckptcore import CheckpointManager, KeepLast, SaveEvent
from ckptcore.format.digest import CHUNK_BYTES, chunk_digest
from ckptcore.storage.chunks import Workers

from .frame import Check, Contender, Report, best_limit, measure, rows_of, times_faster
from .ground import GIB, MIB, clean_folder, make_state, memory_of, size_text
from .savers import SAVERS, cores

__all__ = ["run"]

OURS = "ckptcore save, reuse=True"
PEERS = ("dcp.save, default", "torch_checkpointing")


class Tuned(nn.Module):
    """`size` bytes, of which one tensor of a hundredth trains."""

    def __init__(self, size: int) -> None:
        super().__init__()
        state = make_state(size)
        base = {name.replace(".", "_"): nn.Parameter(t, False) for name, t in state.items()}
        self.base = nn.ParameterDict(base)
        self.adapter = nn.Parameter(torch.zeros(size // 400))


def run(
    folder: Path,
    *,
    size: int = GIB,
    rounds: int = 5,
    settle: float = 2.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    progress("making the state")
    model = Tuned(size)
    events: list[SaveEvent] = []
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}

    with (
        CheckpointManager(
            folder / "reuse",
            reuse=True,
            refresh_every=10_000,
            keep=KeepLast(1),
            on_event=events.append,
        ) as reusing,
        CheckpointManager(folder / "full", keep=KeepLast(1)) as full,
    ):
        contenders = [
            Contender("digests of all bytes", partial(_hash_all, tensors), "limit"),
            _ours(OURS, reusing, model, settle),
            _ours("ckptcore save", full, model, settle),
        ]
        for saver in SAVERS:
            if saver.name.startswith(PEERS):
                place = folder / "peer"
                contenders.append(
                    Contender(
                        saver.name,
                        partial(saver.save, tensors, place),
                        prepare=partial(clean_folder, place, settle),
                        finish=partial(shutil.rmtree, place),
                        missing=saver.missing,
                    )
                )
        samples = measure(contenders, rounds, progress=progress)
    rows = rows_of(samples)
    last = [event for event in events if event.kind == "committed"][-1]
    limit = best_limit(samples)
    for row in rows:
        if row.name == OURS:
            written = last.nbytes - last.reused
            row.extra["written"] = f"{written / MIB:.1f} MiB of {last.nbytes / MIB:.0f}"
            mine = samples[OURS].median
            ratio = mine / limit if mine and limit else None
            row.checks = [
                Check("the time of the digests", 2.0, ratio, at_least=False, unit="x"),
                Check("a full save", 3.0, times_faster(samples, OURS, "ckptcore save"), unit="x"),
            ]
    return Report(
        "reuse",
        f"Second save of a module of {size_text(size)}, of which 1 % trains",
        rows,
        {"size": size, "rounds": rounds, "settle": settle},
        [
            f"{rounds} interleaved rounds after one that is not counted, durable; the part that "
            "trains changes before each."
        ],
    )


def _ours(name: str, manager: CheckpointManager, model: Tuned, settle: float) -> Contender:
    steps = iter(range(1, 1 << 30))

    def change() -> None:
        with torch.no_grad():
            model.adapter += 1
        clean_folder(Path(manager.root) / "nothing", settle)

    return Contender(name, lambda: _save(manager, next(steps), model), "ours", prepare=change)


def _save(manager: CheckpointManager, step: int, model: Tuned) -> None:
    manager.save(step, {"model": model})


def _hash_all(tensors: dict[str, torch.Tensor]) -> None:
    with Workers(cores(), "digests") as workers:
        workers.run([partial(_hash, memory_of(tensor)) for tensor in tensors.values()])


def _hash(memory: memoryview) -> None:
    for at in range(0, len(memory), CHUNK_BYTES):
        chunk_digest(memory[at : at + CHUNK_BYTES])
